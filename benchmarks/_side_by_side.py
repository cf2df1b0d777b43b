"""Timing things in turn, so that what else the machine does slows all alike; what they hold."""

import gc
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


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """The times of `rounds` calls of each, in ms; every second round goes backward.

    So nobody is always first.

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
    return {
        name: Times(tuple(map(max, zip(*(rank[name].taken for rank in ranks), strict=True))))
        for name in ranks[0]
    }


def fullest(prepare: Callable[[], Callable[[], object]], warm: int) -> int:
    """Bytes alive at the fullest moment of the call of `prepare()` that follows `warm` others.

    Of all that was allocated since before `prepare`.

    PyTorch's own profiler counts, allocation by allocation: it sees activations and the buffers of
    C++ too.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    gc.collect()  # what earlier runs left must not be freed while we count
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call = prepare()
        for _ in range(warm):
            call()
        with record_function("measured"):
            call()
    events = profiler.profiler.kineto_results.events()
    (measured,) = [event for event in events if event.name() == "measured"]
    alive = peak = 0
    for when, nbytes in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        alive += nbytes
        if when >= measured.start_ns():
            peak = max(peak, alive)
    return peak
