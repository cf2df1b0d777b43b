"""What an exercise is: a reference solution, properties to check, and graded hints.

Each module of this folder holds the exercises of one topic in a tuple `EXERCISES`; `find` and
`every` are the only ways in. Wrong answers, which the checks must reject, stand in the tests.
"""

import ast
import csv
import functools
import hashlib
import importlib
import inspect
import itertools
import linecache
import pkgutil
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from labutils import config


class Failed(Exception):
    """Raised by a property's test: what happened, on which input, by how much.

    `hint` says what that usually means.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, init=False)
class Property:
    """One thing that must hold of an attempt.

    `test(attempt)` returns what it covered ("12 cases") or raises `Failed`; what is `given` goes
    to the test as well.
    """

    name: str
    test: Callable[[Any], str | None]

    def __init__(self, name: str, test: Callable[..., str | None], /, **given: Any) -> None:
        vars(self).update(name=name, test=functools.partial(test, **given) if given else test)


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """The solution, the check, and hints, each of which says more than the one before.

    untouched: the `digest` of the code that a bug hunt hands out, which is no attempt yet
    """

    id: str
    reference: Any
    properties: tuple[Property, ...]
    hints: tuple[str, ...]
    untouched: str = ""

    def __post_init__(self) -> None:
        if not self.properties or not self.hints:
            raise ValueError(f"{self.id}: an exercise needs at least one property and one hint")

    @property
    def card(self) -> "Card":
        """What its lab says of it."""
        return next(card for card in cards() if card.exercise == self.id)


def digest(code: Any) -> str:
    """Eight digits that change when the code of a function or class does, comments left out.

    It is "" for what has no Python source, such as a number or a builtin.
    """
    try:
        lines = textwrap.dedent(_source(code)).splitlines()
    except (OSError, TypeError, StopIteration):
        return ""
    kept = [line.rstrip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:8]


def is_stub(code: Any) -> bool:
    """Whether a function or class is still what a lab hands out: `raise NotImplementedError`.

    It is True too for what has no Python source to look at.
    """
    if getattr(code, "__name__", "") == "<lambda>":
        return False
    try:
        tree = ast.parse(textwrap.dedent(_source(code)))
    except (OSError, TypeError, StopIteration, SyntaxError):
        return True
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return bool(functions) and all(
        (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))  # a docstring
        or ast.unparse(line) in ("raise NotImplementedError", "super().__init__()")
        for function in functions
        for line in function.body
    )  # fmt: skip


def _source(code: Any) -> str:
    """What `inspect.getsource` returns, of classes in a notebook too."""
    if not isinstance(code, type):
        return inspect.getsource(code)
    method = next(inspect.unwrap(f) for f in vars(code).values() if inspect.isfunction(f))
    lines = linecache.getlines(method.__code__.co_filename)
    head = re.compile(rf"\s*class {code.__name__}\b")
    above = range(method.__code__.co_firstlineno)
    start = next(at for at in reversed(above) if head.match(lines[at]))
    return "".join(inspect.getblock(lines[start:]))


@functools.cache
def _topics() -> tuple[str, ...]:
    names = (info.name for info in pkgutil.iter_modules(__path__))
    return tuple(sorted(name for name in names if not name.startswith("_")))


@functools.cache
def _of(topic: str) -> dict[str, Exercise]:
    from labutils.teach.exercises import _session  # which imports torch, as every topic does

    with _session.as_new():
        return {each.id: each for each in importlib.import_module(f"{__name__}.{topic}").EXERCISES}


def every() -> dict[str, Exercise]:
    """All exercises of the course by id, which begins with the topic."""
    return dict(itertools.chain(*(_of(topic).items() for topic in _topics())))


def find(exercise_id: str) -> Exercise:
    """The exercise of that id, such as "collectives/ring-all-reduce".

    Raises: ValueError where there is no such topic or exercise; it names those that there are.
    """
    topic, _, name = exercise_id.partition("/")
    if not name or topic not in _topics():
        topics = ", ".join(_topics())
        raise ValueError(
            f"no exercise {exercise_id!r}: an id is topic/name, and the topics are {topics}"
        )
    if exercise_id not in _of(topic):
        raise ValueError(f"no exercise {exercise_id!r}: {topic} has {', '.join(_of(topic))}")
    return _of(topic)[exercise_id]


class Card(NamedTuple):
    """What a lab says of an exercise: its number there, its id, the name of the answer, its title,
    the minutes that it takes, and its difficulty: ●○○, ●●○ or ●●●."""

    lab: str
    number: str
    exercise: str
    answer: str
    title: str
    minutes: int
    dots: str


@functools.cache
def cards() -> tuple[Card, ...]:
    """The cards of all labs, in order, from a table of the course's data."""
    with open(config.DATA / "exercises.csv", newline="", encoding="utf-8") as table:
        _, *rows = csv.reader(table)
        return tuple(Card._make([*row[:5], int(row[5]), row[6]]) for row in rows)
