"""Marks as tables, as a page, and as Gradescope's results.json."""

import csv
import html
import json
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from labutils.teach.grade import Mark

_COLUMNS = ("submission", "lab", "exercise", "status", "points", "most", "said", "remarks")
_MADE_BY = "labutils.teach.grade"  # by which a later run knows what it may replace
_STYLE = """body{font:16px/1.4 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:4px 8px;
text-align:left;vertical-align:top}table{margin:1em 0}pre{white-space:pre-wrap;margin:0}
.solved{color:#14683d}
.remark{color:#8a4b00}td:nth-child(2){white-space:nowrap}"""


def write(marks: Sequence[Mark], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write grades.csv, a row for each answer; totals.csv, a row for each submission; grades.html;
    and for each submission its part of that page, to hand back, and Gradescope's results.json, in
    place of those of an earlier run.

    Returns their paths. Tables begin with a mark by which Excel knows UTF-8.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table, totals, page = (folder / name for name in ("grades.csv", "totals.csv", "grades.html"))
    for path, rows in (table, map(_row, marks)), (totals, _totals(marks)):
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows([_COLUMNS, *rows] if path == table else rows)
    page.write_text(_page(marks), encoding="utf-8")
    written = [table, totals, page]
    for place, files in ("gradescope", "results.json"), ("feedback", "*.html"):
        for old in sorted((folder / place).rglob(files)):
            if _MADE_BY in old.read_text(encoding="utf-8", errors="replace"):
                old.unlink()
                if not any(old.parent.iterdir()):
                    old.parent.rmdir()
    for name, mine in _by_submission(marks):
        told = [replace(mark, remarks=()) for mark in mine]  # remarks are the teacher's
        texts = {
            f"gradescope/{name}/results.json": json.dumps(results(mine), indent=1),
            f"feedback/{name.rstrip('/')}.html": "\n".join(
                [*_head(name), *_of_submission(0, name, told)]
            ),
        }
        for place, text in texts.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def _by_submission(marks: Iterable[Mark]) -> Iterable[tuple[str, list[Mark]]]:
    found: dict[str, list[Mark]] = {}
    for mark in marks:
        found.setdefault(mark.submission, []).append(mark)
    return found.items()


def _row(mark: Mark) -> list:
    told = [getattr(mark, name) for name in _COLUMNS[:-1]] + ["; ".join(mark.remarks)]
    return [_harmless(value) if isinstance(value, str) else value for value in told]


def _totals(marks: Sequence[Mark]) -> Iterator[list]:
    """A row for each submission: its sum, the points of each exercise, and why it was refused."""
    exercises = list(dict.fromkeys(mark.exercise for mark in marks if mark.exercise))
    yield ["submission", "lab", "points", "most", *exercises, "refused"]
    for name, mine in _by_submission(marks):
        points = {mark.exercise: mark.points for mark in mine}
        refused = "".join(mark.said for mark in mine if mark.status == "refused")
        sums = _sum(mark.points for mark in mine), _sum(mark.most for mark in mine)
        each = [points.get(exercise, "") for exercise in exercises]
        yield [_harmless(name), mine[0].lab, *sums, *each, _harmless(refused)]


def _sum(points: Iterable[float]) -> float:
    return round(sum(points), 2)


def _harmless(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def results(marks: Sequence[Mark]) -> dict:
    """One submission as Gradescope reads it (its autograder specification, "output format")."""
    refused = [mark.said for mark in marks if mark.status == "refused"]
    tests = [
        {
            "name": f"{mark.exercise}: {mark.title}",
            "score": mark.points,
            "max_score": mark.most,
            "status": "passed" if mark.status == "solved" else "failed",
            "output": mark.said,
        }
        for mark in marks
        if mark.status != "refused"
    ]
    score = _sum(mark.points for mark in marks)
    output, made = "".join(refused), {"made by": _MADE_BY}
    return {"score": score, "output": output, "tests": tests, "extra_data": made}


def _page(marks: Sequence[Mark]) -> str:
    parts = [*_head("Grades"), "<h1>Grades</h1>", *_of_exercises(marks), *_of_submissions(marks)]
    for i, (name, mine) in enumerate(_by_submission(marks)):
        parts += _of_submission(i, name, mine)
    return "\n".join(parts)


def _head(title: str) -> Iterator[str]:
    yield f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
    yield "<meta name=viewport content='width=device-width'>"
    yield f"<meta name=generator content={_MADE_BY}><style>{_STYLE}</style>"


def _of_submission(number: int, name: str, mine: Sequence[Mark]) -> Iterator[str]:
    """What the checks say to one submission."""
    yield f"<h2 id=s{number}>{html.escape(name)} · {_sums(mine)}</h2>"
    yield f"<p>{mine[0].lab}</p>" * bool(mine[0].lab)
    yield "<table><tr><th>exercise<th>points<th>what the check says</tr>"
    yield from map(_line, mine)
    yield "</table>"


def _of_exercises(marks: Sequence[Mark]) -> Iterator[str]:
    """How many solved each exercise, and how many did not."""
    found: dict[tuple[str, str], Counter] = {}
    for mark in marks:
        if mark.exercise:
            found.setdefault((mark.exercise, mark.title), Counter())[mark.status] += 1
    yield "<table><tr><th>exercise<th>solved<th>others</tr>"
    for (exercise, title), states in found.items():
        others = ", ".join(f"{n} {state}" for state, n in states.items() if state != "solved")
        yield f"<tr><td>{html.escape(f'{exercise} · {title}')}"
        yield f"<td>{states['solved']} of {states.total()}<td>{others}</tr>"
    yield "</table>"


def _of_submissions(marks: Sequence[Mark]) -> Iterator[str]:
    """Who submitted which lab, and the sum of points."""
    yield "<table><tr><th>submission<th>lab<th>points<th>remarks</tr>"
    for i, (name, mine) in enumerate(_by_submission(marks)):
        lab = mine[0].lab or mine[0].status
        remarks = sum(len(mark.remarks) for mark in mine) or ""
        link = f"<a href=#s{i}>{html.escape(name)}</a>"
        yield f"<tr><td>{link}<td>{lab}<td>{_sums(mine)}<td class=remark>{remarks}</tr>"
    yield "</table>"


def _sums(marks: Sequence[Mark]) -> str:
    return f"{_sum(mark.points for mark in marks):g} of {_sum(mark.most for mark in marks):g}"


def _line(mark: Mark) -> str:
    remarks = "".join(f"<div class=remark>{html.escape(each)}</div>" for each in mark.remarks)
    solved = " class=solved" * (mark.status == "solved")
    return (
        f"<tr><td>{html.escape(mark.exercise)}<br><b{solved}>{mark.status}</b>"
        f"<td>{mark.points:g} of {mark.most:g}<td><pre>{html.escape(mark.said)}</pre>{remarks}</tr>"
    )
