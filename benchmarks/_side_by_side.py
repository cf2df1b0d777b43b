"""Timing things in turn, so that what else the machine does slows all alike; what they hold;
and the rows that `python benchmarks` makes its table of."""

import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 12.0  # of a row


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
    group: Any = None,
    seconds: float = SECONDS,
) -> dict[str, Times]:
    """The times of `rounds` calls of each, in ms; every second round goes backward.

    So nobody is always first. No round begins after so many seconds, but for the first: on a
    machine that emulates fp16 a single call can take as long.

    `group` is the process group of the ranks that do this together: they meet before each call,
    which is not timed, and agree on the end.
    """
    taken: dict[str, list[float]] = {name: [] for name in calls}
    begun = time.perf_counter()
    for turn in range(rounds):
        if turn and _late(time.perf_counter() - begun > seconds, group):
            break
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            if group is not None:
                dist.barrier(group=group)
            start = time.perf_counter()
            calls[name]()
            taken[name].append(1e3 * (time.perf_counter() - start))
    return {name: Times(tuple(found)) for name, found in taken.items()}


def _late(mine: bool, group: Any) -> bool:
    """Whether the time is over, for any rank of the group."""
    late = torch.tensor(float(mine))
    if group is not None:
        dist.all_reduce(late, dist.ReduceOp.MAX, group=group)
    return bool(late)


def owe(peer: str, aims: Mapping[str, float]) -> None:
    """Tells `python benchmarks` which rows are to come, and the ratio that each aims at."""
    for row, aim in aims.items():
        _tell({"row": row, "peer": peer, "aim": aim})


def report(row: str, peer: str, ours: Times, theirs: Times) -> None:
    """Tells `python benchmarks` what a row came to: medians in ms, their ratio, how many rounds."""
    rounds = len(ours.taken)
    numbers = {"ours": ours.median, "theirs": theirs.median, "rounds": rounds}
    ratio = ours.median / theirs.median
    note = f"{rounds} round{'s' * (rounds > 1)} only" if rounds < 3 else ""
    _tell({"row": row, "peer": peer, "ratio": ratio, "note": note} | numbers)


def _tell(row: Mapping[str, object]) -> None:
    if path := os.environ.get("BENCHMARK_ROWS"):
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


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
