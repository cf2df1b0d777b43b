"""Who sent what to whom: the messages of one run in program order, as ledgers of bytes and as
steps that wait for each other."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from labutils.config import Link
from labutils.ledger import Ledger, Line


@dataclass(frozen=True, slots=True)
class Event:
    """What one rank did at one moment: send `sent` bytes `to` a rank, receive `received` bytes from
    `source`, or both at once.

    A dry run books `count` messages between the same two ranks as one event of all their bytes.
    """

    op: str
    axis: str = ""
    to: int | None = None
    sent: int = 0
    source: int | None = None
    received: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class Message:
    """`nbytes` that travel from rank `source` to rank `to` between `start` and `end`, in steps or
    in seconds."""

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

    >>> hop = [Event("ring", "dp", to=1 - i, sent=8, source=1 - i, received=8) for i in (0, 1)]
    >>> ring = Trace([[event] * 2 for event in hop])
    >>> ring.sent.by("rank"), ring.steps
    ({0: 16, 1: 16}, 2)
    """

    ranks: tuple[tuple[Event, ...], ...] = ()

    def __init__(self, ranks: Iterable[Iterable[Event]] = ()) -> None:
        object.__setattr__(self, "ranks", tuple(tuple(events) for events in ranks))

    def _ledger(self, amount: str, peer: str) -> Ledger:
        lines = []
        for rank, events in enumerate(self.ranks):
            for event in events:
                if getattr(event, peer) is not None:
                    nbytes = getattr(event, amount)
                    lines.append(
                        Line(event.op, nbytes, axis=event.axis, rank=rank, count=event.count)
                    )
        return Ledger(lines).merged()

    @cached_property
    def sent(self) -> Ledger:
        """Bytes that each rank sent, a line for each operation; `count` is its messages."""
        return self._ledger("sent", "to")

    @cached_property
    def received(self) -> Ledger:
        """Bytes that each rank received, a line for each operation."""
        return self._ledger("received", "source")

    @cached_property
    def messages(self) -> tuple[Message, ...]:
        """Every message with the step in which it starts and ends, when each takes one step."""
        return self._replay(lambda nbytes: 1)

    @property
    def steps(self) -> int:
        """The longest chain of messages that wait for each other; a rank sends and receives at a
        time."""
        return max((int(message.end) for message in self.messages), default=0)

    def makespan(self, link: Link) -> float:
        """Seconds until the last message arrives, when each takes λ + bytes/bw and a rank sends one
        and receives one at a time."""
        latency, bandwidth = Fraction(link.latency), Fraction(link.bandwidth)
        replayed = self._replay(lambda nbytes: latency + nbytes / bandwidth)
        return float(max((message.end for message in replayed), default=0))

    def _replay(self, cost: Callable[[int], float]) -> tuple[Message, ...]:
        """All messages with start and end: the k-th send of a channel meets its k-th receive, and a
        sender does not wait for the receiver."""
        replay = _Replay(cost, [deque(events) for events in self.ranks])
        while any([replay.advance(rank) for rank in range(len(self.ranks))]):
            pass
        if waiting := [rank for rank, queue in enumerate(replay.queues) if queue]:
            lost = "wait for messages that nobody sent: this trace is not of a finished run"
            raise ValueError(f"ranks {waiting} {lost}")
        return tuple(replay.done)


class _Replay:
    """The state of a replay: the clock of each rank, what it has yet to do, and the messages that
    were sent and not yet received."""

    def __init__(self, cost: Callable[[int], float], queues: list[deque[Event]]) -> None:
        self.cost = cost
        self.queues = queues
        self.clock = [0.0 * cost(0)] * len(queues)
        self.announced = [False] * len(queues)  # whether the send of a rank's next event is counted
        self.under_way: dict[tuple, deque[int]] = defaultdict(deque)
        self.done: list[Message] = []

    def advance(self, rank: int) -> bool:
        """Runs the events of a rank until it waits or is done; whether anything happened."""
        queue, moved = self.queues[rank], False
        while queue:
            event, start = queue[0], self.clock[rank]
            if event.to is not None and not self.announced[rank]:
                self._send(rank, event)
                self.announced[rank] = moved = True
            finish = start if event.to is None else start + self.cost(event.sent)
            if event.source is not None:
                channel = self.under_way[event.source, rank, event.axis]
                if not channel:
                    return moved
                finish = max(finish, self._receive(channel.popleft(), start, event.received))
            self.clock[rank] = finish
            self.announced[rank] = False
            queue.popleft()
            moved = True
        return moved

    def _send(self, rank: int, event: Event) -> None:
        start = self.clock[rank]
        end = start + self.cost(event.sent)
        self.under_way[rank, event.to, event.axis].append(len(self.done))
        self.done.append(Message(event.op, event.axis, rank, event.to, event.sent, start, end))

    def _receive(self, index: int, start: float, nbytes: int) -> float:
        """When the receiver, ready at `start`, has the message of that number."""
        message = self.done[index]
        end = max(start, message.start) + self.cost(nbytes)
        self.done[index] = replace(message, end=max(end, message.end))
        return end
