"""What an exercise is: a card, a reference solution, properties to check, and graded hints.

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

from labutils import config, units


class Failed(Exception):
    """Raised by a property's test: what happened, on which input, by how much.

    `hint` says what that usually means.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Property:
    """One thing that must hold of an attempt.

    `test(attempt)` returns what it covered ("12 cases") or raises `Failed`.
    """

    name: str
    test: Callable[[Any], str | None]


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """A card (minutes, difficulty 1–3, what it proves), the solution, and the check.

    untouched: the `digest` of the code that a bug hunt hands out, which is no attempt yet
    """

    id: str
    title: str
    minutes: int
    difficulty: int
    proves: str
    reference: Any
    properties: tuple[Property, ...]
    hints: tuple[str, ...]
    untouched: str = ""

    def __post_init__(self) -> None:
        units.whole(self.minutes, f"{self.id}: minutes", 1)
        if self.difficulty not in (1, 2, 3):
            raise ValueError(f"{self.id}: difficulty is 1, 2 or 3, got {self.difficulty!r}")
        if not self.properties or not self.hints:
            raise ValueError(f"{self.id}: an exercise needs at least one property and one hint")

    @property
    def dots(self) -> str:
        """The difficulty as it stands on the card: ●○○, ●●○ or ●●●."""
        return "●" * self.difficulty + "○" * (3 - self.difficulty)


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
    """Where an exercise stands: its lab, its number there, its id, and the name of the answer."""

    lab: str
    number: str
    exercise: str
    answer: str


@functools.cache
def cards() -> tuple[Card, ...]:
    """The cards of all labs, in order, from a table of the course's data."""
    with open(config.DATA / "exercises.csv", newline="", encoding="utf-8") as table:
        return tuple(Card(**row) for row in csv.DictReader(table))
