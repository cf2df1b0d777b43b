"""One clock for everything that computes while something else is sent: tasks, when each of them
runs, what it waited for, and where a rank's time went."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from labutils import units
from labutils.timeline import COMMUNICATION, Span, Timeline

_WAITED_FOR = ("pass", "pp")  # what one rank sends and another waits for


@dataclass(eq=False, slots=True)
class Task:
    """What occupies a lane for some seconds, once the tasks that it needs are over.

    lane: who does one task after the other, in the order in which they are listed: the processor
        of a rank, a link
    seconds: how long it takes
    after: the tasks that it needs
    kind, name, rank: of its span; a task of no kind is not drawn

    Raises TypeError and ValueError where seconds are no finite number of at least 0.
    """

    lane: Hashable
    seconds: float
    after: Sequence["Task"] = ()
    kind: str = ""
    name: str = ""
    rank: int = 0

    def __post_init__(self) -> None:
        units.instance(self.lane, Hashable, "lane of a Task")
        units.positive_fields(self, "seconds", or_zero=True)
        units.instance(self.after, Sequence, "after of a Task")

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Wait(NamedTuple):
    """A rank that does not compute before `op`, because of what `op` needs; at the end of the step,
    where both are None, because of other ranks.

    >>> gather, forward = Task("link", 2, (), "gather", "1"), Task("rank 2", 1, (), "forward", "1")
    >>> str(Wait(2, 0, 2, forward, gather))
    'rank 2 waits from 0 to 2: forward 1 needs gather 1'
    """

    rank: int
    start: float
    end: float
    op: Any
    needs: Any

    def __str__(self) -> str:
        why = f"{self.op} needs {self.needs}" if self.op else "the step has not ended"
        return f"rank {self.rank} waits from {self.start:g} to {self.end:g}: {why}"


class Played(Timeline):
    """Tasks, and when each of them ran.

    spans: of all that have a kind, in the order in which they were listed
    when: start and end of each task

    >>> gather = Task("link", 2, kind="gather", name="layer 0")
    >>> forward = Task("rank", 3, [gather], kind="forward", name="layer 0")
    >>> step = play([gather, forward])
    >>> step.makespan, step.spent(0), *map(str, step.critical_path())
    (5, {'forward': 3, 'gather': 2}, 'gather layer 0', 'forward layer 0')
    """

    def __init__(self, spans: tuple[Span, ...], when: Mapping[Task, tuple[float, float]]) -> None:
        super().__init__(spans)
        self._when: Mapping[Any, tuple[float, float]] = when

    def _lanes(self) -> Iterable[Sequence[Any]]:
        """What ran on each lane, in order."""
        return _by_lane(self._when).values()

    def _inputs(self, op: Any) -> Sequence[Any]:
        """What must be over before."""
        return op.after

    def _ran(self, rank: int) -> Iterable[tuple[Any, float, float]]:
        """What a rank computed, from when to when, in order."""
        own = [task for task in self._when if task.rank == rank and task.kind]
        ran = [(task, *self._when[task]) for task in own if task.kind not in COMMUNICATION]
        return sorted(ran, key=lambda each: each[1:])

    def _done(self, rank: int) -> float:
        """When a rank must be through if it is to end with the step."""
        return self.makespan

    @cached_property
    def _before(self) -> dict[Any, Any]:
        """What ran before on the same lane."""
        found: dict[Any, Any] = {}
        for ops in self._lanes():
            found.update(zip(ops[1:], ops, strict=False))
        return found

    def _end(self, op: Any) -> float:
        return self._when[op][1]

    def cause(self, op: Any) -> Any:
        """What let it begin no sooner: what its lane did until then, or else that of its inputs
        which was over last; None at the start."""
        before = self._before.get(op)
        if before is not None and self._end(before) >= self._when[op][0]:
            return before
        return max(self._inputs(op), key=self._end, default=None)

    def critical_path(self) -> tuple[Any, ...]:
        """What begins, each, when the one before lets it, to the end of the last: all takes as long
        as they and the messages between them. One path, where there are several."""
        op, path = max(self._when, key=self._end, default=None), []
        while op is not None:
            path.append(op)
            op = self.cause(op)
        return tuple(reversed(path))

    def _computing(self, rank: int) -> Iterator[tuple[Any, float, float, float]]:
        """What a rank computes, with when it was free for it, began, and ended; what runs at the
        same time counts once."""
        free: float = 0
        for op, start, end in self._ran(rank):
            yield op, free, max(start, free), max(end, free)
            free = max(end, free)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(end - start for _, _, start, end in self._computing(rank))

    def idle(self, rank: int) -> float:
        """The part of the makespan in which a rank does not compute."""
        return self.makespan - self.busy(rank)

    def waits_of(self, rank: int) -> tuple[Wait, ...]:
        """The idle time of a rank, piece by piece, each with its reason; they add up to `idle`."""
        found: list[Wait] = []
        end: float = 0
        for op, free, start, end in self._computing(rank):
            if start > free:
                found.append(Wait(rank, free, start, op, self.cause(op)))
        if (until := self._done(rank)) > end:
            found.append(Wait(rank, end, until, None, None))
        return tuple(found)

    def spent(self, rank: int) -> dict[str, float]:
        """Where the makespan went on a rank, by kind: what it computed; *exposed* communication,
        its own beside which it computed nothing, or a message that it stood still for; and the rest
        of its idle time, "bubble", due to what others did.

        Invariant: adds up to the makespan, less the updates of a schedule.
        """
        found: defaultdict[str, float] = defaultdict(int)
        for op, _, start, end in self._computing(rank):
            found[op.kind] += end - start
        for wait in self.waits_of(rank):
            for kind, seconds in self._reasons(wait):
                found[kind] += seconds
        return {kind: seconds for kind, seconds in found.items() if seconds}

    def _reasons(self, wait: Wait) -> Iterator[tuple[str, float]]:
        """A wait, cut into what was sent meanwhile and what others did."""
        left = [(wait.start, wait.end)]
        own = (op for op in self._when if op.kind in COMMUNICATION and op.rank == wait.rank)
        sent = [(op.kind, *self._when[op]) for op in own]
        for kind, start, end in (*sent, *self._messages(wait)):
            rest = []
            for a, b in left:
                low, high = max(a, start), min(b, end)
                if low < high:
                    yield kind, high - low
                    rest += [(x, y) for x, y in ((a, low), (high, b)) if x < y]
                else:
                    rest.append((a, b))
            left = rest
        yield "bubble", sum(end - start for start, end in left)

    def _messages(self, wait: Wait) -> Iterator[tuple[str, float, float]]:
        """What was on its way from rank to rank along the causes of a wait."""
        op = wait.needs or max(self._when, key=self._end)
        now = wait.end if wait.op else self._end(op)  # then come updates
        while now > wait.start and op is not None:
            start, end = self._when[op]
            yield "pass", end, now
            if op.kind in _WAITED_FOR:
                yield op.kind, start, end
            now, op = start, self.cause(op)


def play(tasks: Iterable[Task]) -> Played:
    """When each task runs, if its lane begins it as soon as it can.

    Raises ValueError: which task never begins, and why.

    Cost: about 3 µs per task.
    """
    units.instance(tasks, Iterable, "play")
    numbers: dict[Task, int] = {}
    for task in tasks:
        units.instance(task, Task, "the list of play")
        numbers.setdefault(task, len(numbers))
    try:
        rows = [_row(lane, numbers) for lane in _by_lane(numbers).values()]
    except KeyError as missing:
        raise ValueError(f"{missing.args[0]} is needed, but not among the tasks") from None
    starts, ends = run_times(rows, len(numbers))
    for task, end in zip(numbers, ends, strict=True):
        if end is None:
            way = "it waits for itself, or for what comes later on its own lane"
            raise ValueError(f"{task} never begins: {way}, or for such a task")
    when = dict(zip(numbers, zip(starts, ends, strict=True), strict=True))
    shown = ((task, times) for task, times in when.items() if task.kind)
    spans = tuple(Span(task.rank, task.kind, task.name, *times) for task, times in shown)
    return Played(spans, when)


def _by_lane(tasks: Iterable[Task]) -> dict[Hashable, list[Task]]:
    lanes: dict[Hashable, list[Task]] = {}
    for task in tasks:
        lanes.setdefault(task.lane, []).append(task)
    return lanes


NOTHING, PAUSE = -1, -2  # as a need: none; as a number: only waits, for one more need

Row = tuple[Sequence[int], Sequence[int], Sequence[float], Sequence[float]]


def _row(tasks: Iterable[Task], numbers: Mapping[Task, int]) -> Row:
    row: list[tuple[int, int, float, float]] = []
    for task in tasks:
        *more, last = [numbers[need] for need in task.after] or [NOTHING]
        row += [(PAUSE, need, 0, 0) for need in more]
        row.append((numbers[task], last, 0, task.seconds))
    return columns(row)


def columns(row: Iterable[tuple[Any, ...]]) -> Row:
    """The four columns of a lane's operations."""
    codes, needs, lags, costs = zip(*row, strict=True)
    return codes, needs, lags, costs


def run_times(rows: Iterable[Row], n: int) -> tuple[list[Any], list[Any]]:
    """Start and end of n operations; None for those that never run.

    rows: of each lane four columns, in the order in which it works: the numbers of its operations,
        the one that each needs, how long its result is on the way, and how long the operation takes

    A lane that lacks an input leaves its number with whoever computes it: nothing has to be taken
    in the order of time.
    """
    rows = list(rows)
    start: list[Any] = [None] * (n + 2)  # the last two are PAUSE and NOTHING
    end: list[Any] = [*[None] * n, 0, 0]
    at = [0] * len(rows)
    free: list[float] = [0] * len(rows)
    waiting: dict[int, list[int]] = {}
    todo = list(range(len(rows)))
    while todo:
        lane = todo.pop()
        codes, needs, lags, costs = rows[lane]
        now = free[lane]
        for index in range(at[lane], len(codes)):
            arrived = end[needs[index]]
            if arrived is None:
                at[lane], free[lane] = index, now
                waiting.setdefault(needs[index], []).append(lane)
                break
            if arrived + lags[index] > now:
                now = arrived + lags[index]
            code = codes[index]
            start[code] = now
            now += costs[index]
            end[code] = now
            if code in waiting:
                todo += waiting.pop(code)
    return start[:n], end[:n]
