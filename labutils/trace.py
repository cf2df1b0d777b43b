"""Who sent what to whom: the messages of one run in program order, as ledgers of bytes and as
steps that wait for each other."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

from labutils import units
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
    start: float
    end: float


class OneRank(Sequence):
    """The programs of `size` ranks of which only one ran, in a dry run: the others have no
    events, and cost nothing."""

    def __init__(self, size: int, rank: int, events: Iterable[Event]) -> None:
        self.size = size
        self.rank = rank
        self.events = tuple(events)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, at: int | slice) -> Any:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(self.size)[at])
        return self.events if range(self.size)[at] == self.rank else ()


@dataclass(frozen=True)
class Trace:
    """What every rank sent and received, in its own program order: the books of one run.

    >>> hop = [Event("ring", "dp", to=1 - i, sent=8, source=1 - i, received=8) for i in (0, 1)]
    >>> ring = Trace([[event] * 2 for event in hop])
    >>> ring.sent.by("rank"), ring.steps
    ({0: 16, 1: 16}, 2)
    """

    ranks: Sequence[tuple[Event, ...]] = ()

    def __init__(self, ranks: Iterable[Iterable[Event]] = ()) -> None:
        units.instance(ranks, Iterable, "Trace")
        told = ranks if isinstance(ranks, OneRank) else tuple(map(_events, ranks))
        object.__setattr__(self, "ranks", told)

    @property
    def _programs(self) -> Iterable[tuple[int, tuple[Event, ...]]]:
        """Ranks with their events; of a dry run the one that there is."""
        one = self.ranks
        return [(one.rank, one.events)] if isinstance(one, OneRank) else enumerate(one)

    def _ledger(self, amount: str, peer: str) -> Ledger:
        lines = []
        for rank, events in self._programs:
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
        """The longest chain of messages that wait for each other, when a send takes as long as its
        receive; a rank sends one and receives one at a time."""
        return max((int(message.end) for message in self.messages), default=0)

    def makespan(self, link: Link) -> float:
        """Seconds until the last message arrives, when each takes λ + bytes/bw, a rank sends and
        receives one at a time, and both sides of a message wait for each other."""
        latency, bandwidth = Fraction(link.latency), Fraction(link.bandwidth)
        replayed = self._replay(lambda nbytes: latency + nbytes / bandwidth)
        return float(max((message.end for message in replayed), default=0))

    def _replay(self, cost: Callable[[int], float | Fraction]) -> tuple[Message, ...]:
        """All messages with start and end. Each is a rendezvous: it starts when its sender has come
        to the send and its receiver to the receive, and both go on when it has arrived."""
        places = {rank: _Place(events) for rank, events in self._programs}
        done: list[Message] = []
        moved = True
        while moved:
            moved = False
            for source, sender in places.items():
                while (to := sender.to) in places and places[to].awaits(source, sender.axis):
                    receiver = places[to]
                    event, start = sender.todo[0], max(sender.clock, receiver.clock)
                    end = start + cost(event.sent)
                    done.append(Message(event.op, event.axis, source, to, event.sent, start, end))
                    sender.finish("to", end)
                    receiver.finish("source", end)
                    moved = True
        if waiting := [rank for rank, place in places.items() if place.todo]:
            lost = "wait for each other, or for a message that nobody sends"
            raise ValueError(f"ranks {waiting} {lost}: this is no trace of a finished run")
        return tuple(sorted(done, key=lambda message: (message.start, message.source)))


def _events(told: Iterable[Event]) -> tuple[Event, ...]:
    units.instance(told, Iterable, "the list of a Trace")
    for event in (events := tuple(told)):
        units.instance(event, Event, "a rank of a Trace")
    return events


class _Place:
    """Where a rank has come to in a replay: its next event since `clock`, and the halves of it that
    are still to be done, a send `to` one rank and a receive from a `source`."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.todo = deque(event for event in events if (event.to, event.source) != (None, None))
        self.clock: float = 0
        self.end: float = 0
        self._next()

    def _next(self) -> None:
        event = self.todo[0] if self.todo else Event("")
        self.to = event.to
        self.source = event.source
        self.axis = event.axis

    def awaits(self, source: int, axis: str) -> bool:
        """Whether this rank stands at a receive from that one."""
        return self.source == source and self.axis == axis

    def finish(self, half: str, end: float) -> None:
        """One half of the event is over; after the other one the rank goes on."""
        setattr(self, half, None)
        self.end = max(self.end, end)
        if self.to is None and self.source is None:
            self.clock = self.end
            self.todo.popleft()
            self._next()
