"""When each operation of a schedule runs, what is idle, what is in flight: simulated or timed."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from labutils import clock, units
from labutils.config import Link
from labutils.schedule.orders import KINDS, Op, Schedule, why_illegal
from labutils.timeline import Span

Times = float | Sequence[float]


@dataclass(frozen=True)
class Durations:
    """Time of an operation: one number, or one for each stage.

    F: the forward
    B: the gradient of the input; a schedule that is not split adds W to it
    W: the gradient of the weights
    fused: an F that runs at once with the B and W of another chunk; None for one after the other
    O: the optimizer's update, after the last operation of the step
    """

    F: Times = 1
    B: Times = 1
    W: Times = 1
    fused: float | None = None
    O: Times = 0  # noqa: E741

    def __post_init__(self) -> None:
        for name in (*KINDS, "fused", "O"):
            value = getattr(self, name)
            for time in value if isinstance(value, Sequence) else (value,):
                if time is not None and not (0 <= time < math.inf):
                    raise ValueError(f"{name} must be a time of at least 0, got {time!r}")

    def of(self, kind: str, stages: int) -> list[float]:
        """The time of F, B, W or O on each of so many stages.

        Raises ValueError for times of another number of stages.
        """
        value = getattr(self, kind)
        if not isinstance(value, Sequence):
            return [value] * stages
        if len(value) != stages:
            raise ValueError(f"{kind} has {len(value)} times for {stages} stages: give one each")
        return list(value)


class PipelineRun(clock.Played):
    """A schedule and when each of its operations ran: one step, simulated or measured.

    schedule: what ran
    starts, ends: of each rank, the time of each operation in its order
    updates: of each rank, the time of its optimizer's update; none without them

    The *makespan* runs from 0 to the end of the last operation, and of the updates that then begin
    on all ranks: a step with a barrier before them, such as the clipping of gradients, takes that
    long. The *period* is the longest time that a single rank takes from its first start to the end
    of an update that waits for nobody: how often steps can begin without a barrier.
    """

    def __init__(
        self,
        schedule: Schedule,
        starts: Sequence[Sequence[float]],
        ends: Sequence[Sequence[float]],
        updates: Iterable[float] = (),
    ) -> None:
        self.schedule, self.starts, self.ends = schedule, starts, ends
        self.updates = tuple(updates) or (0,) * len(ends)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Every operation as a span of kind F, B or W, named after it; fused ones overlap."""
        return tuple(
            Span(rank, op.kind, str(op), start, end)
            for rank in range(len(self.ends))
            for op, start, end in self._ran(rank)
        )

    @cached_property
    def _when(self) -> dict[Op, tuple[float, float]]:  # type: ignore[override]
        ran = (each for rank in range(len(self.ends)) for each in self._ran(rank))
        return {op: (start, end) for op, start, end in ran}

    def _ran(self, rank: int) -> Iterator[tuple[Op, float, float]]:
        """The operations of a rank, each with its start and end."""
        return zip(self.schedule.order_of(rank), self.starts[rank], self.ends[rank], strict=True)

    @property
    def makespan(self) -> float:
        """Time until the last rank is done, when updates wait for all."""
        return self.flushed + max(self.updates)

    @property
    def flushed(self) -> float:
        """Time until the last operation ends; then updates can begin that wait for all."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def period(self) -> float:
        """Time between the begins of steps that follow each other without a barrier."""
        each = zip(self.starts, self.ends, self.updates, strict=True)
        return max((ends[-1] - starts[0] + o for starts, ends, o in each if ends), default=0)

    def _lanes(self) -> tuple[tuple[Op, ...], ...]:
        return self.schedule.ranks

    def _inputs(self, op: Op) -> tuple[Op, ...]:
        return self.schedule.inputs(op)

    def _done(self, rank: int) -> float:
        return self.makespan - self.updates[rank]

    def busy(self, rank: int) -> float:
        """Time in which a rank computes, its update included; what is fused counts once."""
        return super().busy(rank) + self.updates[rank]

    @property
    def bubble_fraction(self) -> float:
        """Idle per total time over all ranks, when a barrier ends the step."""
        return self._bubble(self.makespan)[0]

    @property
    def bubble_overhead(self) -> float:
        """Idle per ideal time over all ranks, when a barrier ends the step."""
        return self._bubble(self.makespan)[1]

    @property
    def period_bubble_fraction(self) -> float:
        """Idle per total time over all ranks, when no barrier ends the step."""
        return self._bubble(self.period)[0]

    def _bubble(self, duration: float) -> tuple[float, float]:
        """Idle per total and per ideal time of all ranks in a step of that duration."""
        ranks = len(self.schedule.ranks)
        ideal = sum(map(self.busy, range(ranks)))
        total = ranks * duration
        return (1 - ideal / total, total / ideal - 1) if ideal else (0.0, 0.0)

    def in_flight(self, rank: int) -> tuple[tuple[float, int], ...]:
        """(time, held) at every change: activations of a stage and micro-batch each, from the start
        of F to the end of the last operation that needs them."""
        last = self.schedule.kinds[-1]
        changes = []
        for op, start, end in self._ran(rank):
            if op.kind == "F":
                changes.append((start, 1))
            if op.kind == last:
                changes.append((end, -1))
        held, steps = 0, {}
        for time, change in sorted(changes):  # what is freed makes room for what begins then
            held += change
            steps[time] = held
        return tuple(steps.items())

    def peak(self, rank: int) -> int:
        """The most that `in_flight` reaches."""
        return max((held for _, held in self.in_flight(rank)), default=0)

    def to_perfetto(self, path: str | Path) -> None:
        """Writes a Chrome trace, which ui.perfetto.dev opens: a track per rank, its activations
        below; times are taken as seconds."""
        events: list[dict] = []
        for rank in range(len(self.schedule.ranks)):
            named = {"name": f"rank {rank}"}
            events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": named})
            for time, held in self.in_flight(rank):
                count = {"ph": "C", "name": "in flight", "pid": rank, "ts": time * 1e6}
                events.append(count | {"args": {"in flight": held}})
        for span in self.spans:
            when = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            what = {"ph": "X", "name": span.name, "cat": span.kind}
            lane = KINDS.index(span.kind) if self.schedule.fused else 0
            events.append(what | {"pid": span.rank, "tid": lane} | when)
        Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def simulate(
    schedule: Schedule, times: Durations | None = None, link: Link | None = None, nbytes: int = 0
) -> PipelineRun:
    """When each operation runs if every rank does the next one as soon as its inputs are there.

    times: what an operation takes; a unit of time each if None
    link: what a result of `nbytes` takes to another rank, in the unit of `times`; messages delay
        neither each other nor the ranks, and without a link they take no time

    Raises ValueError: the first illegal move, if the schedule cannot run.

    >>> from labutils.schedule import one_f_one_b
    >>> run = simulate(one_f_one_b(4, 8), Durations(F=1, B=1, W=1))
    >>> run.makespan, run.idle(0), run.bubble_overhead, [run.peak(rank) for rank in range(4)]
    (33, 9, 0.375, [4, 3, 2, 1])

    Cost: about 0.5 µs per operation.
    """
    units.instance(schedule, Schedule, "simulate")
    for kind, value in ((Durations, times), (Link, link)):
        if value is not None:
            units.instance(value, kind, "simulate")
    sent = units.positive(nbytes, "nbytes", or_zero=True)
    times, wire = times or Durations(), link.latency + sent / link.bandwidth if link else 0
    count = len(schedule.kinds) * schedule.stages * schedule.micro_batches
    try:
        rows = _rows(schedule, times, wire)
        start, end = clock.run_times(rows, count)
    except (KeyError, IndexError, TypeError):  # no such kind, or no such stage
        start, end = [], [None]
    if None in end or sum(map(len, schedule.ranks)) != count:
        raise ValueError(f"{schedule.name}: {why_illegal(schedule)}")
    ran = [[code for code in codes if code != clock.PAUSE] for codes, *_ in rows]
    starts, ends = ([[time[code] for code in codes] for codes in ran] for time in (start, end))
    if times.fused is not None:
        for rank, index in schedule.fused:
            starts[rank][index + 1 : index + 3] = [starts[rank][index]] * 2
    costs = times.of("O", schedule.stages)
    updates: list[float] = [0] * len(schedule.ranks)
    for stage, ranks in enumerate(zip(*schedule.places, strict=True)):
        for rank in set(ranks):
            updates[rank] += costs[stage]
    return PipelineRun(schedule, starts, ends, updates)


def _rows(schedule: Schedule, times: Durations, wire: float) -> list[clock.Row]:
    """Of each rank's operations: their numbers, (kind · stages + stage) · m + micro-batch; the one
    input that implies all others; its delay; their time. A fused F pauses for the input of its B.

    That F precedes B on a rank needs no look: the B above would never have come.
    """
    m, stages, place = schedule.micro_batches, schedule.stages, schedule.places[0]
    last = stages - 1
    far = [wire * (place[s] != place[s + 1]) for s in range(last)]
    back = 0 if schedule.split else 1
    costs = times.of("F", stages)
    whole = zip(times.of("B", stages), times.of("W", stages), strict=True)
    costs += [b + w * back for b, w in whole] + times.of("W", stages)
    lag = [0, *far, *far, 0, *[0] * stages]
    step = [-m] * stages + [m] * last + [-m * stages] * (stages + 1)
    base = {kind: i * stages for i, kind in enumerate(schedule.kinds)}
    rows = []
    for rank, ops in enumerate(schedule.ranks):
        lines = [base[kind] + stage for kind, stage, _ in ops]
        codes = [at * m + op[2] for at, op in zip(lines, ops, strict=True)]
        needs = [code + step[at] if at else -1 for at, code in zip(lines, codes, strict=True)]
        row = codes, needs, [lag[at] for at in lines], [costs[at] for at in lines]
        pairs = sorted(index for who, index in schedule.fused if who == rank)
        rows.append(_fused(row, pairs, times.fused) if pairs and times.fused is not None else row)
    return rows


def _fused(row: clock.Row, pairs: Sequence[int], seconds: float) -> clock.Row:
    """A row in which each of these F takes so long, for the B and W after it too, and begins when
    the input of B is there as well."""
    codes, needs, lags, costs = map(list, row)
    for index in pairs:
        costs[index : index + 3] = [seconds, 0, 0]
    whole = list(zip(codes, needs, lags, costs, strict=True))
    found, copied = [], 0
    for index in pairs:
        found += [*whole[copied:index], (clock.PAUSE, needs[index + 1], lags[index + 1], 0)]
        copied = index
    return clock.columns([*found, *whole[copied:]])
