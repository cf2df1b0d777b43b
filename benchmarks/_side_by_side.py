"""Timing things in turn, one call of each and then the next of each, so that whatever else the machine does slows all alike."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """The times of one contestant, in ms, in the order they were taken."""

    taken: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.taken)

    @property
    def minimum(self) -> float:
        return min(self.taken)

    def __str__(self) -> str:
        return f"{self.median:8.2f} ({self.minimum:8.2f})"

    def ratio(self, other: "Times") -> str:
        """Ours over theirs, by medians and, in brackets, by minima."""
        return f"{self.median / other.median:.2f} ({self.minimum / other.minimum:.2f})"


def interleave(calls: Mapping[str, Callable[[], object]], rounds: int, *, before: Callable[[], object] = lambda: None) -> dict[str, Times]:
    """The times of `rounds` calls of each, in ms; every second round goes backward, so that nobody is always first.

    `before` is called before each call and not timed: among ranks, their barrier.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            before()
            start = time.perf_counter()
            calls[name]()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: Times(tuple(found)) for name, found in taken.items()}


def slowest(ranks: Iterable[Mapping[str, Times]]) -> dict[str, Times]:
    """What each rank measured, as one: a round took as long as on its slowest rank."""
    ranks = list(ranks)
    return {name: Times(tuple(map(max, zip(*(rank[name].taken for rank in ranks), strict=True)))) for name in ranks[0]}
