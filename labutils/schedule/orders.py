"""A schedule is data: the order of operations on each rank, and why an order is illegal."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from labutils import units
from labutils.units import Reason

KINDS = "FBW"


class Op(NamedTuple):
    """One operation: `kind` F (forward), B (backward) or W (weight gradient) of a stage, for one
    micro-batch. Where W is an operation of its own, B computes the gradient of the input only.

    >>> str(Op("F", stage=2, micro_batch=5))
    'F5@2'
    """

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True)
class Schedule:
    """The operations of one step, in the order in which each rank runs them.

    name: what the schedule is called
    ranks: the operations of each rank
    places: the rank of each stage; two of them where half of the micro-batches flow the other way
    micro_batches: how many flow through the pipeline in one step
    split: whether W is an operation of its own; otherwise B is the whole backward
    fused: (rank, index) of each F that runs at once with the B and the W that follow it
    every: after how many of its backwards a rank updates its weights, without waiting for others;
        0 where all ranks update once, after the step (they *flush* the pipeline)
    buffered: whether a micro-batch then uses the weights that are one update old (double-buffered),
        on all ranks alike; else the newest that its rank has when its forward begins
    """

    name: str
    ranks: tuple[tuple[Op, ...], ...]
    places: tuple[tuple[int, ...], ...]
    micro_batches: int
    split: bool = False
    fused: frozenset[tuple[int, int]] = frozenset()
    every: int = 0
    buffered: bool = False

    @property
    def stages(self) -> int:
        """Stages of the model: chunks of all ranks."""
        return len(self.places[0])

    @property
    def kinds(self) -> str:
        """The operations that each stage owes each micro-batch."""
        return KINDS if self.split else KINDS[:2]

    @property
    def text(self) -> str:
        """The order of each rank in words that `read` understands; fused or not is not told."""
        return " | ".join(" ".join(map(str, ops)) for ops in self.ranks)

    def order_of(self, rank: int) -> tuple["Op", ...]:
        """What a rank runs, in order.

        Raises ValueError for a rank that has nothing to do here.
        """
        if (rank := units.whole(rank, "rank")) >= (p := len(self.ranks)):
            raise ValueError(f"rank={rank} is none of p={p}: use 0 … {p - 1}")
        return self.ranks[rank]

    def rank_of(self, stage: int, micro_batch: int) -> int:
        """The rank that runs a stage for a micro-batch."""
        return self.places[micro_batch * len(self.places) // self.micro_batches][stage]

    def version(self, rank: int, micro_batch: int) -> int:
        """The weights with which a rank computes F and B of a micro-batch: how many of its updates
        they have seen.

        The micro-batch's own gradient makes update micro_batch // every + 1: with the weights of
        version v it is micro_batch // every − v updates late (its *staleness*).
        """
        if not self.every:
            return 0
        if self.buffered:
            return max(0, micro_batch // self.every - 1)
        kinds = (op.kind for op in self.ranks[rank] if op[0] == "B" or op[2] == micro_batch)
        return sum(1 for _ in itertools.takewhile(lambda kind: kind == "B", kinds)) // self.every

    def inputs(self, op: Op) -> tuple[Op, ...]:
        """What must be done before `op`: F waits for the F below, B for its F and the B above,
        W for its B."""
        kind, stage, k = op
        if kind == "W":
            return (Op("B", stage, k),)
        if kind == "F":
            return (Op("F", stage - 1, k),) if stage else ()
        above = (Op("B", stage + 1, k),) if stage + 1 < self.stages else ()
        return (Op("F", stage, k), *above)

    def in_flight(self, rank: int, nbytes: Sequence[int] | None = None) -> Iterator[int]:
        """Activations that a rank holds after it began each operation, from F until W, or B where
        it is the whole backward, is over: so many of a stage and a micro-batch each, or their bytes
        when `nbytes` says how many each stage keeps."""
        sizes = nbytes or [1] * self.stages
        held, freed = 0, 0
        for op in self.ranks[rank]:
            held += (op.kind == "F") * sizes[op.stage] - freed
            freed = (op.kind == self.kinds[-1]) * sizes[op.stage]
            yield held

    def peak(self, rank: int, nbytes: Sequence[int] | None = None) -> int:
        """Most that `in_flight` reaches."""
        self.order_of(rank)  # or an error
        # Among fused operations F begins before anything is freed: the same as one by one.
        return max(self.in_flight(rank, nbytes), default=0)

    def check(self, cap: int | None = None) -> "Schedule":
        """This schedule, if every move in it is legal; with a `cap` on activations per rank.

        Raises ValueError: which move is illegal, and why.
        """
        if reason := why_illegal(self, cap):
            raise ValueError(f"{self.name}: {reason}")
        return self


def read(text: str, name: str = "yours") -> Schedule:
    """The schedule that `text` spells: operations such as F0@0, where the stage may be left out if
    it has the number of its rank; a bar, or a new line, after each rank.

    >>> read("F0 F1 B0 B1 | F0 B0 F1 B1") == read("F0@0 F1@0 B0@0 B1@0 | F0@1 B0@1 F1@1 B1@1")
    True

    Raises ValueError: which word is no operation, or which stage has no rank of its own.
    """
    units.instance(text, str, "read")
    rows: list[tuple[Op, ...]] = []
    owners: dict[int, int] = {}
    for rank, words in enumerate(text.strip().replace("|", "\n").splitlines()):
        row = []
        for word in words.split():
            if not (found := re.fullmatch(r"([FBW])(\d+)(?:@(\d+))?", word)):
                raise ValueError(
                    f"{word!r} is no operation: write F0, B0 or W0, or F0@3 of stage 3"
                )
            op = Op(found[1], int(found[3] or rank), int(found[2]))
            if owners.setdefault(op.stage, rank) != rank:
                raise ValueError(
                    f"rank {rank} runs {op}, but rank {owners[op.stage]} has its stage"
                )
            row.append(op)
        rows.append(tuple(row))
    if sorted(owners) != list(range(len(owners))) or not owners:
        raise ValueError(f"stages 0, 1 … are needed, each on a rank: got {sorted(owners)}")
    ops = [op for row in rows for op in row]
    m, split = 1 + max(op.micro_batch for op in ops), any(op.kind == "W" for op in ops)
    place = tuple(owners[stage] for stage in sorted(owners))
    return Schedule(name, tuple(rows), (place,), m, split)


class Board:
    """A schedule of which some operations are done: says why a next move is illegal."""

    def __init__(self, schedule: Schedule, cap: int | None) -> None:
        units.instance(schedule, Schedule, "Board")
        self.schedule = schedule
        self.cap = cap
        self.done: set[Op] = set()
        self.held = [0] * len(schedule.ranks)

    def why_not(self, rank: int, op: Op) -> Reason | None:
        """Why `rank` cannot run `op` now; None if it can."""
        return self.why_never(rank, op) or self.why_later(rank, op) or self.why_full(rank, op)

    def why_never(self, rank: int, op: Op) -> Reason | None:
        """Why `rank` cannot run `op`, whatever the others do before; None if it may."""
        if reason := _foreign(self.schedule, rank, op):
            return reason
        if op in self.done:
            return Reason("twice", f"rank {rank} runs {op} twice")
        for needed in self.schedule.inputs(op):
            if needed not in self.done:
                owner = self.schedule.rank_of(needed.stage, needed.micro_batch)
                if owner == rank:
                    return Reason("own", f"rank {rank} runs {op} before its own {needed}")
        return None

    def why_later(self, rank: int, op: Op) -> Reason | None:
        """What another rank has to do before; None if nothing."""
        for needed in self.schedule.inputs(op):
            if needed not in self.done:
                owner = self.schedule.rank_of(needed.stage, needed.micro_batch)
                come = f"{needed} has come from rank {owner}"
                return Reason("later", f"rank {rank} runs {op} before {come}")
        return None

    def why_full(self, rank: int, op: Op) -> Reason | None:
        """How the limit on activations is in the way; None if it is not."""
        if self.cap is not None and op.kind == "F" and self.held[rank] >= self.cap:
            held = self.held[rank] + 1
            holds = f"rank {rank} holds {held} activations at {op}"
            return Reason("full", f"{holds}; its limit is {self.cap}")
        return None

    def play(self, rank: int, op: Op) -> None:
        """Runs `op` on `rank`.

        Raises ValueError: why it cannot.
        """
        if reason := self.why_not(rank, op):
            raise ValueError(reason)
        self.done.add(op)
        self.held[rank] += (op.kind == "F") - (op.kind == self.schedule.kinds[-1])


def _foreign(schedule: Schedule, rank: int, op: Op) -> Reason | None:
    """Why an operation is none of this rank's at all."""
    runs = f"rank {rank} runs {op}"
    if op.kind not in tuple(schedule.kinds):
        kinds = ", ".join(schedule.kinds)
        return Reason("kind", f"{runs}: operations of this schedule are {kinds}")
    if op.stage not in range(schedule.stages):
        return Reason("stage", f"{runs}: stages are 0 … {schedule.stages - 1}")
    if op.micro_batch not in range(schedule.micro_batches):
        return Reason("micro-batch", f"{runs}: micro-batches are 0 … {schedule.micro_batches - 1}")
    if (owner := schedule.rank_of(op.stage, op.micro_batch)) != rank:
        return Reason("rank", f"{runs}, which is rank {owner}'s")
    return None


def why_illegal(schedule: Schedule, cap: int | None = None) -> Reason | None:
    """The first illegal move of a schedule and its reason; None if all are legal.

    What a rank lacks, has twice or does not own is found first; then the ranks play, one operation
    each per round, so that the first move is the first in time when all operations take as long.
    """
    units.instance(schedule, Schedule, "why_illegal")
    if reason := _incomplete(schedule):
        return reason
    board = Board(schedule, cap)
    at = [0] * len(schedule.ranks)
    while True:
        played = []
        for rank, ops in enumerate(schedule.ranks):
            if at[rank] < len(ops):
                op = ops[at[rank]]
                later = board.why_later(rank, op)
                full = None if later else board.why_full(rank, op)
                if reason := board.why_never(rank, op) or full:
                    return reason  # no other rank can help
                if not later:
                    played.append((rank, op))
        if not played:
            break
        for rank, op in played:
            board.play(rank, op)
            at[rank] += 1
    return _deadlock(schedule, at)


def _incomplete(schedule: Schedule) -> Reason | None:
    """The first operation that is foreign to its rank, there twice, or missing."""
    for rank, ops in enumerate(schedule.ranks):
        for op in ops:
            if reason := _foreign(schedule, rank, op):
                return reason
        if ops and (most := Counter(ops).most_common(1)[0])[1] > 1:
            return Reason("twice", f"rank {rank} runs {most[0]} twice")
    known = {op for ops in schedule.ranks for op in ops}
    for k in range(schedule.micro_batches):
        for kind in schedule.kinds:
            for stage in range(schedule.stages):
                if Op(kind, stage, k) not in known:
                    owner = schedule.rank_of(stage, k)
                    return Reason("never", f"rank {owner} never runs {Op(kind, stage, k)}")
    return None


def _deadlock(schedule: Schedule, at: list[int]) -> Reason | None:
    """Which ranks wait for each other in a ring, from where each has come to; None if all ended."""
    stuck = [rank for rank, ops in enumerate(schedule.ranks) if at[rank] < len(ops)]
    if not stuck:
        return None
    done = {op for rank, ops in enumerate(schedule.ranks) for op in ops[: at[rank]]}
    rank, seen, ring = stuck[0], [], []
    while rank not in seen:
        seen.append(rank)
        op = schedule.ranks[rank][at[rank]]
        needed = next(need for need in schedule.inputs(op) if need not in done)
        owner = schedule.rank_of(needed.stage, needed.micro_batch)
        ring.append(f"rank {rank} waits at {op} for {needed} of rank {owner}")
        rank = owner
    return Reason("deadlock", "deadlock: " + ", ".join(ring[seen.index(rank) :]))
