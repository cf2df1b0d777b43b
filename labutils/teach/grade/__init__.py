"""Marks for submitted notebooks: each answer is checked by itself, contained, in a fresh process.

    python -m labutils.teach.grade submissions/ --out grades

A submission is a notebook, `ada.ipynb` or `ada/anything.ipynb`. Its answers are checked one by one:
the cells that an answer needs are run, and the course's own check decides.
"""

import csv
import json
import math
import os
import pathlib
import re
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labutils.teach import check, exercises
from labutils.teach.exercises import Card
from labutils.teach.grade import answers, judge
from labutils.teach.grade.containment import LOOK, Contained, Limits

_ID = re.compile(r"\bcheck\(\s*[\"']([\w/-]+)[\"']")
STATES = ("solved", "not yet", "not attempted", "no answer", "void", "stopped", "refused")


@dataclass(frozen=True)
class Mark:
    """What one answer of a submission is worth, and why.

    status: one of `STATES`; "void" where the answer changed the checks, "stopped" where it had to
        be ended, "refused" where the submission is no notebook of the course
    """

    submission: str
    lab: str
    exercise: str
    title: str
    status: str
    points: float
    most: float
    said: str
    remarks: tuple[str, ...] = ()


@dataclass
class _Submission:
    name: str
    cells: list[str]
    cards: tuple[Card, ...]
    refused: str = ""


def submitted(folder: pathlib.Path) -> Iterator[tuple[str, pathlib.Path]]:
    """(name, notebook) of every submission: a notebook's name, or that of its folder and its own.

    What is no notebook is a submission, too, so that nobody is forgotten; hidden files are none,
    nor is what a Mac adds to an archive.
    """

    def hidden(path: pathlib.Path) -> bool:
        parts = path.relative_to(folder).parts
        return any(part.startswith(".") or part == "__MACOSX" for part in parts)

    for path in sorted(folder.iterdir()):
        if hidden(path):
            continue
        inside = sorted(path.rglob("*.ipynb")) if path.is_dir() and not path.is_symlink() else []
        inside = [each for each in inside if not hidden(each)]
        for each in inside or [path]:
            name = str(each.relative_to(folder)) + "/" * path.is_dir() * (not inside)
            yield name.removesuffix(".ipynb"), each


def _opened(name: str, path: pathlib.Path, lab: str | None) -> _Submission:
    try:
        if path.is_dir() and not path.is_symlink():
            raise answers.Refused("its folder has no notebook")
        cells = answers.code_cells(path)
        return _Submission(name, cells, _cards(cells, lab))
    except (answers.Refused, OSError) as error:
        said = "it is a link" if path.is_symlink() else str(error)
        return _Submission(name, [], (), said)


def _cards(cells: Sequence[str], lab: str | None) -> tuple[Card, ...]:
    """The exercises of the lab that a notebook belongs to, as its checks tell."""
    if lab is None:
        labs = {card.exercise: card.lab for card in exercises.cards()}
        found = Counter(labs.get(each) for cell in cells for each in _ID.findall(cell))
        found.pop(None, None)
        if not found:
            raise answers.Refused("it has no check of the course: name its lab with --lab")
        lab = found.most_common(1)[0][0]
    return tuple(card for card in exercises.cards() if card.lab == lab)


def points_of(path: pathlib.Path | None) -> dict[str, float]:
    """The most points of each exercise to grade: of a table exercise,points, or all, by minutes.

    Raises: ValueError where the table names what is no exercise, or points that are no number.
    """
    if path is None:
        return {card.exercise: card.minutes for card in exercises.cards()}
    given = {}
    with open(path, newline="", encoding="utf-8-sig") as table:
        for row in csv.DictReader(table):
            try:
                given[row["exercise"]] = float(row["points"])
            except (KeyError, TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {len(given) + 2}: the first line is exercise,points and each "
                    "other an exercise, a comma and a number"
                ) from None
    for exercise, points in given.items():
        exercises.find(exercise)
        if not 0 <= points < math.inf:
            raise ValueError(f"{path}: {exercise} has {points} points, and 0 or more are meant")
    return given


def mark(
    submission: str, card: Card, most: float, outcome: Mapping | None, ended: str, partial: bool
) -> Mark:
    """The mark for what a judge sent, or for why it sent nothing."""
    if outcome is None:
        said = ended or "it ended before the check did"
        return Mark(submission, card.lab, card.exercise, card.title, "stopped", 0, most, said)
    share = outcome["status"] == "solved"
    if partial and outcome["status"] == "not yet" and outcome["of"]:
        share = outcome["passed"] / outcome["of"]
    return Mark(
        submission,
        card.lab,
        card.exercise,
        card.title,
        outcome["status"],
        round(most * share, 2),
        most,
        outcome["said"],
        tuple(outcome["remarks"]),
    )


def earned(exercise: str, attempt: Any, most: float | None = None) -> float:
    """Points for an answer, checked here and now: for graders that run notebooks themselves.

    most: for the whole exercise; its minutes where none are given
    """
    verdicts = check.check(exercise, attempt).verdicts
    share = sum(verdict.status == "passed" for verdict in verdicts) / max(len(verdicts), 1)
    return round(share * (exercises.find(exercise).card.minutes if most is None else most), 2)


def _outcome(sent: bytes, token: str) -> dict | None:
    """What the judge sent: the one line that has its token."""
    for line in sent.split(b"\n"):
        try:
            outcome = json.loads(line)
            if secrets.compare_digest(outcome.pop("token"), token):
                return outcome
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            continue
    return None


def grade(
    folder: pathlib.Path,
    *,
    lab: str | None = None,
    limits: Limits | None = None,
    jobs: int | None = None,
    points: Mapping[str, float] | None = None,
    partial: bool = True,
    say: Callable[[str], object] = lambda line: None,
) -> list[Mark]:
    """The marks of all submissions in a folder, in order; `say` gets a line after each.

    lab: all are of this one; without it, each notebook's checks tell
    jobs: answers that are checked at a time; as many as there are processors
    points: the most of each exercise to grade; all, by their minutes
    partial: a share of the points for the properties that hold
    """
    points, began = points or points_of(None), time.monotonic()
    found = [_opened(name, path, lab) for name, path in submitted(folder)]
    for each in found:
        graded = tuple(card for card in each.cards if card.exercise in points)
        if each.cards and not graded:
            each.refused = f"it is lab {each.cards[0].lab}, of which no exercise is graded"
        each.cards = graded
    asked = [(each, card) for each in found for card in each.cards]
    marks: dict[str, list[Mark]] = {each.name: [] for each in found}
    done = sum(not each.cards for each in found)
    for each, card, outcome, ended in _judged(asked, limits or Limits(), jobs):
        mine = marks[each.name]
        mine.append(mark(each.name, card, points[card.exercise], outcome, ended, partial))
        if len(mine) == len(each.cards):
            done += 1
            sums = f"{sum(m.points for m in mine):g} of {sum(m.most for m in mine):g}"
            took = f"{time.monotonic() - began:.0f} s"
            say(f"{done} of {len(found)} graded, {took} · {each.name}: {sums}")
    return [mark for each in found for mark in _in_order(each, marks[each.name])]


def _judged(
    asked: Iterable[tuple[_Submission, Card]], limits: Limits, jobs: int | None
) -> Iterator[tuple[_Submission, Card, dict | None, str]]:
    """(submission, card, what the judge sent, why its process ended), as they end."""
    waiting = deque(asked)
    running: dict[Contained, tuple[_Submission, Card, str]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (jobs or os.cpu_count() or 1):
                each, card = waiting.popleft()
                token = secrets.token_hex()
                process = Contained(_program(card, each.cells, token), limits)
                running[process] = each, card, token
            for process in [process for process in running if process.look()]:
                each, card, token = running.pop(process)
                yield each, card, _outcome(process.sent, token), process.ended
            time.sleep(LOOK)
    finally:
        for process in running:
            process.stop("the grader was stopped")


def _in_order(each: _Submission, marks: Sequence[Mark]) -> Iterable[Mark]:
    if each.refused:
        return [Mark(each.name, "", "", "", "refused", 0, 0, each.refused)]
    order = [card.exercise for card in each.cards]
    return sorted(marks, key=lambda mark: order.index(mark.exercise))


def _program(card: Card, cells: Sequence[str], token: str) -> Callable:
    return lambda send, _: judge.deliver(card, cells, send, token)


def out_of_reach() -> set[str]:
    """What submitted code cannot reach here, of "files", "network" and "signals"."""
    probe = Contained(_tell, Limits(seconds=10))
    while not probe.look():
        time.sleep(LOOK)
    return set(probe.sent.decode().split())


def _tell(send: Callable[[str], int], out_of_reach: set[str]) -> None:
    send(" ".join(out_of_reach))
    os._exit(0)
