"""What an exercise is: a card, a reference solution, properties to check, and graded hints.

Each module of this folder holds the exercises of one topic in a tuple `EXERCISES`; `find` and `every` are the only ways in.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labutils import units


class Failed(Exception):
    """Raised by a property's test: what happened, on which input, by how much, and in `hint` what that usually means."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True)
class Property:
    """One thing that must hold of an attempt: `test(attempt)` returns what it covered ("12 cases") or raises `Failed`."""

    name: str
    test: Callable[[Any], str | None]


@dataclass(frozen=True, kw_only=True)
class Exercise:
    """A card (minutes, difficulty 1–3, what it proves), the library's own solution, and the check."""

    id: str
    title: str
    minutes: int
    difficulty: int
    proves: str
    reference: Any
    properties: tuple[Property, ...]
    hints: tuple[str, ...]

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


@functools.cache
def every() -> dict[str, Exercise]:
    """All exercises of the course by id."""
    found: dict[str, Exercise] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        for exercise in importlib.import_module(f"{__name__}.{module}").EXERCISES:
            if exercise.id in found:
                raise ValueError(f"two exercises are called {exercise.id!r}: rename one")
            found[exercise.id] = exercise
    return found


def find(exercise_id: str) -> Exercise:
    """The exercise of that id, such as "collectives/ring-all-reduce"; the topic is the module it lives in."""
    topic, _, name = exercise_id.partition("/")
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__))
    if not name or topic not in modules:
        raise ValueError(
            f"no exercise {exercise_id!r}: an id is topic/name, and the topics are {', '.join(modules)}"
        )
    exercises = importlib.import_module(f"{__name__}.{topic}").EXERCISES
    for exercise in exercises:
        if exercise.id == exercise_id:
            return exercise
    raise ValueError(
        f"no exercise {exercise_id!r}: {topic} has {', '.join(exercise.id for exercise in exercises)}"
    )
