"""When each operation of a schedule runs, what is idle, what is in flight: simulated or timed."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from labutils.config import Link
from labutils.schedule.orders import KINDS, Op, Schedule, why_illegal
from labutils.timeline import Span, Timeline

Times = float | Sequence[float]


class Wait(NamedTuple):
    """A rank that stands still before `op`, for what another operation computes; at the end of the
    step, where both are None, for the other ranks.

    >>> str(Wait(2, 0, 2, Op("F", 2, 0), Op("F", 1, 0)))
    'rank 2 waits from 0 to 2: F0@2 needs F0@1'
    """

    rank: int
    start: float
    end: float
    op: Op | None
    needs: Op | None

    def __str__(self) -> str:
        why = f"{self.op} needs {self.needs}" if self.op else "the step has not ended"
        return f"rank {self.rank} waits from {self.start:g} to {self.end:g}: {why}"


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
        """The time of F, B, W or O on each of so many stages."""
        value = getattr(self, kind)
        if not isinstance(value, Sequence):
            return [value] * stages
        if len(value) != stages:
            raise ValueError(f"{kind} has {len(value)} times for {stages} stages: give one each")
        return list(value)


class PipelineRun(Timeline):
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
            for op, (rank, start, end) in self._when.items()
        )

    def _ran(self, rank: int) -> Iterator[tuple[Op, float, float]]:
        """The operations of a rank, each with its start and end."""
        return zip(self.schedule.ranks[rank], self.starts[rank], self.ends[rank], strict=True)

    @property
    def makespan(self) -> float:
        """Time until the last rank is done, when updates wait for all."""
        return self.flushed + max(self.updates, default=0)

    @property
    def flushed(self) -> float:
        """Time until the last operation ends; then updates can begin that wait for all."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def period(self) -> float:
        """Time between the begins of steps that follow each other without a barrier."""
        each = zip(self.starts, self.ends, self.updates, strict=True)
        return max((ends[-1] - starts[0] + o for starts, ends, o in each if ends), default=0)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes; what is fused counts once."""
        total: float = self.updates[rank]
        until: float = -math.inf
        for _, start, end in self._ran(rank):
            if end > until:
                total += end - max(start, until)
                until = end
        return total

    def idle(self, rank: int) -> float:
        """The part of the makespan in which a rank does not compute."""
        return self.makespan - self.busy(rank)

    @cached_property
    def _when(self) -> dict[Op, tuple[int, float, float]]:
        """Rank, start and end of each operation."""
        return {
            op: (rank, start, end)
            for rank in range(len(self.ends))
            for op, start, end in self._ran(rank)
        }

    def _last_input(self, op: Op) -> Op | None:
        """Of the operations that an operation needs, the one that ends last."""
        needed = self.schedule.inputs(op)
        return max(needed, key=lambda each: self._when[each][2], default=None)

    def bubbles(self, rank: int) -> tuple[Wait, ...]:
        """The bubble of a rank, piece by piece, each with its reason; they add up to `idle`."""
        found: list[Wait] = []
        free: float = 0
        for op, start, end in self._ran(rank):
            if start > free:
                found.append(Wait(rank, free, start, op, self._last_input(op)))
            free = max(free, end)
        if (until := self.makespan - self.updates[rank]) > free:
            found.append(Wait(rank, free, until, None, None))
        return tuple(found)

    def critical_path(self) -> tuple[Op, ...]:
        """Operations, each of which starts when the one before lets it, to the last one's end: all
        take as long as they and the messages between them. One path, where there are several.
        """
        before: dict[Op, Op] = {}
        for ops in self.schedule.ranks:
            before.update(zip(ops[1:], ops, strict=False))
        op = max(self._when, key=lambda each: self._when[each][2], default=None)
        path = []
        while op is not None:
            path.append(op)
            _, start, _ = self._when[op]
            mine, needed = before.get(op), self._last_input(op)
            op = mine if mine and self._when[mine][2] >= start else needed
        return tuple(reversed(path))

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
    times, wire = times or Durations(), link.latency + nbytes / link.bandwidth if link else 0
    try:
        starts, ends, unmet = _clock(schedule, times, wire)
    except (KeyError, IndexError):  # no such kind, or no such stage
        unmet = True
    owed = len(schedule.kinds) * schedule.stages * schedule.micro_batches
    if unmet or sum(map(len, schedule.ranks)) != owed:
        raise ValueError(f"{schedule.name}: {why_illegal(schedule)}")
    costs = times.of("O", schedule.stages)
    updates: list[float] = [0] * len(schedule.ranks)
    for stage, ranks in enumerate(zip(*schedule.places, strict=True)):
        for rank in set(ranks):
            updates[rank] += costs[stage]
    return PipelineRun(schedule, starts, ends, updates)


Clock = tuple[list[list[float]], list[list[float]], int]


def _clock(schedule: Schedule, times: Durations, wire: float) -> Clock:
    """Start and end of what each rank comes to do, and how many operations never run.

    An operation starts when its rank is free and its input is there. A rank that lacks an input
    leaves its number for whoever computes it: nothing has to be taken in the order of time.
    """
    rows = _rows(schedule, times, wire)
    count = len(schedule.kinds) * schedule.stages * schedule.micro_batches
    end: list[float | None] = [*[None] * count, 0]  # the last one stands for no input
    waiting: dict[int, int] = {}
    starts: list[list[float]] = [[] for _ in rows]
    ends: list[list[float]] = [[] for _ in rows]
    todo = list(range(len(rows)))
    while todo:
        rank = todo.pop()
        codes, needs, lags, costs, also = rows[rank]
        began, over = starts[rank], ends[rank]
        now = over[-1] if over else 0
        for index in range(len(over), len(codes)):
            need = needs[index]
            arrived = end[need]
            if also and index in also:
                need, arrived = _later(need, also[index], end)
            if arrived is None:
                waiting[need] = rank
                break
            if arrived + lags[index] > now:
                now = arrived + lags[index]
            began.append(now)
            now += costs[index]
            over.append(now)
            end[codes[index]] = now
            if codes[index] in waiting:
                todo.append(waiting.pop(codes[index]))
    if times.fused is not None:
        for rank, index in schedule.fused:
            starts[rank][index + 1 : index + 3] = [starts[rank][index]] * 2
    return starts, ends, end.count(None)


def _later(need: int, other: int, end: list[float | None]) -> tuple[int, float | None]:
    """Of two inputs the one that is not there yet, or the later one; and when it came."""
    first, second = end[need], end[other]
    if first is None or (second is not None and first >= second):
        return need, first
    return other, second


Row = tuple[list[int], list[int], list[float], list[float], dict[int, int]]


def _rows(schedule: Schedule, times: Durations, wire: float) -> list[Row]:
    """Of each rank's operations: their numbers, (kind · stages + stage) · m + micro-batch; the one
    input that implies all others; its delay; their time; and of a fused F the input of its B.

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
        spent = [costs[at] for at in lines]
        also = {}
        if times.fused is not None:
            for index in (index for who, index in schedule.fused if who == rank):
                also[index] = needs[index + 1]
                spent[index : index + 3] = [times.fused, 0, 0]
        rows.append((codes, needs, [lag[at] for at in lines], spent, also))
    return rows
