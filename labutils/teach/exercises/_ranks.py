"""Ranks on which a learner's attempt runs, and what is told when it does not come back."""

import functools
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from labutils import world
from labutils.config import Mesh
from labutils.teach.exercises import Failed

T = TypeVar("T")

# Seconds. Ranks that all wait are seen at once, and what does not end is stopped long before by the
# check's own clock, which counts what is computed: on a busy machine a sound rank may be late.
PATIENCE = 600


@functools.cache
def world_of(n: int | Mesh) -> world.World:
    """The world that all checks share; its ledger and trace are of its last run."""
    return world.World(n, engine="threads", timeout=PATIENCE)


class Remembered(Generic[T]):
    """Runs of an attempt, each of which several properties ask for: kept until `cache_clear()`, by
    the attempt itself, which need not be hashable."""

    def __init__(self, run: Callable[..., T]) -> None:
        self.run = run
        self.kept: dict[tuple, tuple[Callable, T]] = {}

    def __call__(self, attempt: Callable, *given: Any) -> T:
        key = (id(attempt), *given)
        if key not in self.kept:
            self.kept[key] = attempt, self.run(attempt, *given)  # it lives on, and its id with it
        return self.kept[key][1]

    def cache_clear(self) -> None:
        self.kept.clear()


def count(n: int) -> str:
    """The number of ranks as words: "1 rank", "4 ranks"."""
    return f"{n} rank{'s' * (n != 1)}"


def run(
    n: int | Mesh,
    case: str,
    program: Callable[[world.Rank], Any],
    hint: str,
    mismatch: str | None = None,
) -> list[Any]:
    """What `program` returns on each of `n` ranks, or ranks of a mesh.

    case: what was run, the first words of a failure
    hint: what it usually means when ranks wait for each other for ever, or make different calls
    mismatch: what different calls usually mean, where that is something else
    Raises: Failed with the learner's own line; NotImplementedError where the stub is untouched.
    """
    failures: list[Failed] = []

    def noted(rank: world.Rank) -> Any:
        try:
            return program(rank)
        except Failed as failure:
            failures.append(failure)
            raise

    try:
        return world_of(n).run(noted)
    except world.WorldError as error:
        if failures:
            raise failures[0] from None
        if isinstance(error, (world.DeadlockError, world.TimeoutError)):
            raise Failed(f"{case}: {error}", hint) from None
        if isinstance(error, world.MismatchError):
            raise Failed(f"{case}: {error}", mismatch or hint) from None
        if not isinstance(error, world.RankError):
            raise
        headline = str(error).splitlines()[0]
        if "NotImplementedError" in headline and "NotImplementedError:" not in headline:
            raise NotImplementedError from None
        raise Failed(f"{case}: {headline}", _where(error.traceback)) from None


def _where(told: str) -> str:
    """The innermost line of a traceback that is not a check's own: the learner's."""
    lines = told.splitlines()
    places = [i for i, line in enumerate(lines[:-1]) if re.search(r", line \d+, in ", line)]
    own = [i for i in places if not re.search(r"\bexercises[/\\]", lines[i])]
    if not own:
        return ""
    return f"It happened in {lines[own[-1]].strip()}: {lines[own[-1] + 1].strip()}"
