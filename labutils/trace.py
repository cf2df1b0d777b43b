"""Who sent what to whom: the messages of one run in program order, as ledgers of bytes and as steps that wait for each other."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from labutils.config import Link
from labutils.ledger import Ledger, Line


@dataclass(frozen=True, slots=True)
class Event:
    """What one rank did at one moment: send `sent` bytes `to` a rank, receive `received` bytes from `source`, or both at once."""

    op: str
    axis: str = ""
    to: int | None = None
    sent: int = 0
    source: int | None = None
    received: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """`nbytes` that travel from rank `source` to rank `to` between `start` and `end`, in steps or in seconds."""

    op: str
    axis: str
    source: int
    to: int
    nbytes: int
    start: float = 0
    end: float = 0


@dataclass(frozen=True)
class Trace:
    """What every rank sent and received, in its own program order: the books of one run.

    >>> ring = Trace([[Event("ring", "dp", to=1 - i, sent=8, source=1 - i, received=8)] * 2 for i in (0, 1)])
    >>> ring.sent.by("rank"), ring.steps
    ({0: 16, 1: 16}, 2)
    """

    ranks: tuple[tuple[Event, ...], ...] = ()

    def __init__(self, ranks: Iterable[Iterable[Event]] = ()) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(events) for events in ranks))

    def _ledger(self, amount: str, peer: str) -> Ledger:
        sums: dict[tuple, int] = {}
        counts: Counter = Counter()
        for rank, events in enumerate(self.ranks):
            for event in events:
                if getattr(event, peer) is not None:
                    key = event.op, event.axis, rank
                    sums[key] = sums.get(key, 0) + getattr(event, amount)
                    counts[key] += 1
        return Ledger(
            Line(op, nbytes, axis=axis, rank=rank, count=counts[op, axis, rank])
            for (op, axis, rank), nbytes in sums.items()
        )

    @cached_property
    def sent(self) -> Ledger:
        """Bytes that each rank sent, a line for each operation; `count` is the number of messages."""
        return self._ledger("sent", "to")

    @cached_property
    def received(self) -> Ledger:
        """Bytes that each rank received, a line for each operation."""
        return self._ledger("received", "source")

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Every message with the step in which it starts and ends, when each message takes one step."""
        return self._replay(lambda nbytes: 1)

    @property
    def steps(self) -> int:
        """The longest chain of messages that had to wait for each other; a rank sends and receives at once in one step."""
        return max((int(message.end) for message in self.messages), default=0)

    def makespan(self, link: Link) -> float:
        """Seconds until the last message arrives, when each takes λ + bytes/bw and a rank sends one and receives one at a time."""
        latency, bandwidth = Fraction(link.latency), Fraction(link.bandwidth)
        return float(
            max(
                (
                    message.end
                    for message in self._replay(lambda nbytes: latency + nbytes / bandwidth)
                ),
                default=0,
            )
        )

    def _replay(self, cost: Callable[[int], float]) -> tuple[Message, ...]:
        """All messages with start and end: the k-th send of a channel meets its k-th receive, and a sender does not wait for the receiver."""
        clock = [0.0 * cost(0)] * len(self.ranks)
        queues = [deque(events) for events in self.ranks]
        announced = [False] * len(queues)
        under_way: dict[tuple, deque[int]] = defaultdict(deque)
        done: list[Message] = []
        moved = True
        while moved:
            moved = False
            for rank, queue in enumerate(queues):
                while queue:
                    event = queue[0]
                    if event.to is not None and not announced[rank]:
                        announced[rank] = True
                        start = clock[rank]
                        under_way[rank, event.to, event.axis].append(len(done))
                        done.append(
                            Message(
                                event.op,
                                event.axis,
                                rank,
                                event.to,
                                event.sent,
                                start,
                                start + cost(event.sent),
                            )
                        )
                        moved = True
                    finish = clock[rank] + cost(event.sent) if event.to is not None else clock[rank]
                    if event.source is not None:
                        channel = under_way[event.source, rank, event.axis]
                        if not channel:
                            break
                        index = channel.popleft()
                        end = max(clock[rank], done[index].start) + cost(event.received)
                        done[index] = replace(done[index], end=max(end, done[index].end))
                        finish = max(finish, end)
                    clock[rank] = finish
                    announced[rank] = False
                    queue.popleft()
                    moved = True
        waiting = [rank for rank, queue in enumerate(queues) if queue]
        if waiting:
            raise ValueError(
                f"ranks {waiting} wait for messages that nobody sent: this trace is not of a finished run"
            )
        return tuple(done)
