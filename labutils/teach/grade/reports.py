"""Marks as a table, as a page, and as Gradescope's results.json."""

import csv
import html
import json
import pathlib
from collections.abc import Iterable, Sequence

from labutils.teach.grade import Mark

_COLUMNS = ("submission", "lab", "exercise", "status", "points", "most", "said", "remarks")
_STYLE = """body{font:16px/1.4 system-ui,sans-serif;margin:2em auto;max-width:60em;padding:0 1em}
table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #ccc;padding:4px 8px;
text-align:left;vertical-align:top}pre{white-space:pre-wrap;margin:0}.solved{color:#14683d}
.remark{color:#8a4b00}"""


def write(marks: Sequence[Mark], folder: pathlib.Path) -> list[pathlib.Path]:
    """Write grades.csv, grades.html and a results.json for each submission; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    table, page = folder / "grades.csv", folder / "grades.html"
    with open(table, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([_COLUMNS, *map(_row, marks)])
    page.write_text(_page(marks), encoding="utf-8")
    written = [table, page]
    for name, mine in _by_submission(marks):
        path = folder / "gradescope" / name / "results.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results(mine), indent=1), encoding="utf-8")
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
    return {"score": sum(mark.points for mark in marks), "output": "".join(refused), "tests": tests}


def _page(marks: Sequence[Mark]) -> str:
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>Grades</title>"]
    parts.append(f"<style>{_STYLE}</style><h1>Grades</h1>")
    for name, mine in _by_submission(marks):
        sums = f"{sum(mark.points for mark in mine):g} of {sum(mark.most for mark in mine):g}"
        parts.append(f"<h2>{html.escape(name)} · {sums}</h2><table><tr><th>exercise<th>points")
        parts.append("<th>what the check says</tr>")
        parts += map(_line, mine)
        parts.append("</table>")
    return "\n".join(parts)


def _line(mark: Mark) -> str:
    remarks = "".join(f"<div class=remark>{html.escape(each)}</div>" for each in mark.remarks)
    solved = " class=solved" * (mark.status == "solved")
    return (
        f"<tr><td>{html.escape(mark.exercise)}<br><b{solved}>{mark.status}</b>"
        f"<td>{mark.points:g} of {mark.most:g}<td><pre>{html.escape(mark.said)}</pre>{remarks}</tr>"
    )
