"""What happens when: who does or holds what, from when to when, and the bytes alive."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from labutils import units
from labutils.ledger import Ledger

# Kinds of spans that communicate; all others compute, or are held. In a whole step on a mesh they
# are called after their axis.
COMMUNICATION = ("gather", "reduce", "exchange", "route", "pass", "tp", "cp", "ep", "pp", "dp")


class OutOfMemory(RuntimeError):
    """Raised when more bytes would be alive than there is room for; the message says which."""


@dataclass(frozen=True, slots=True)
class Span:
    """What one rank does, or holds, from `start` to `end`.

    rank: who; on one device the lane, such as the stage of a chain
    kind: what, the hue of a figure: "forward", "backward", "reduce", "weights", …
    name: which one of its kind: a layer, a bucket, a micro-batch
    start, end: seconds since the step began, or steps and operations counted from 0
    elements: of a flat tensor, the first element and the one after the last, where a part is held
    """

    rank: int
    kind: str
    name: str
    start: float
    end: float
    elements: tuple[int, int] | None = None


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, of one rank or of several: from a formula, a dry run or a real one.

    >>> backward = Span(0, "backward", "layer 0", 0.0, 3.0)
    >>> step = Timeline((backward, Span(0, "reduce", "bucket 0", 2.0, 4.0)))
    >>> step.makespan, step.exposed, step.hidden
    (4.0, 1.0, 0.5)

    Raises ValueError for a span that ends before it begins.
    """

    spans: tuple[Span, ...]

    def __post_init__(self) -> None:
        units.instance(self.spans, Sequence, "Timeline")
        for span in self.spans:
            if not isinstance(span, Span):  # a quarter of the time of a call, for each of many
                units.instance(span, Span, "the list of a Timeline")
            if span.end < span.start:
                raise ValueError(f"{span} ends before it begins: give start, then end")

    def __add__(self, other: "Timeline") -> "Timeline":
        return Timeline(self.spans + other.spans) if isinstance(other, Timeline) else NotImplemented

    def __radd__(self, other: int) -> "Timeline":
        return self if other == 0 else NotImplemented  # so that sum(timelines) works

    @property
    def ranks(self) -> list[int]:
        """The ranks, or lanes, that do anything, in order."""
        return sorted({span.rank for span in self.spans})

    @property
    def makespan(self) -> float:
        """Time until the last rank is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def computed(self) -> float:
        """Time at which the last computation on any rank ends."""
        return max((s.end for s in self.spans if s.kind not in COMMUNICATION), default=0.0)

    @property
    def waits(self) -> tuple[tuple[float, float], ...]:
        """Stretches of time in which no rank computes, the beginning and the end included."""
        found, now = [], 0.0
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.kind not in COMMUNICATION:
                found += [(now, span.start)] * (span.start > now)
                now = max(now, span.end)
        return (*found, *[(now, self.makespan)] * (self.makespan > now))

    @property
    def exposed(self) -> float:
        """Time in which no rank computes: what no computation hides."""
        return sum(end - start for start, end in self.waits)

    @property
    def hidden(self) -> float:
        """The part of communication, 0 … 1, that runs while its rank computes; 1 for none."""
        in_the_open = total = 0.0
        for rank in self.ranks:
            own = Timeline(tuple(span for span in self.spans if span.rank == rank))
            for span in own.spans:
                if span.kind in COMMUNICATION:
                    total += span.end - span.start
                    pairs = [(max(span.start, a), min(span.end, b)) for a, b in own.waits]
                    in_the_open += sum(max(0.0, end - start) for start, end in pairs)
        return 1 - in_the_open / total if total else 1.0


@dataclass(frozen=True)
class Occupancy:
    """Which elements of a model one rank holds, over the operations of a step.

    spans: stretches of elements; the `kind` is a component of memory, times are operations
    numel: elements of the whole model, padding included
    itemsizes: bytes of an element of each component
    phases: the first operation of each phase
    operations: how many there are
    """

    spans: tuple[Span, ...]
    numel: int
    itemsizes: dict[str, int]
    phases: dict[str, int]
    operations: int

    @property
    def whole(self) -> int:
        """Bytes of every component of the whole model."""
        return self.numel * sum(self.itemsizes.values())

    @property
    def peak(self) -> int:
        """Bytes held at the fullest operation."""
        changes: dict[float, int] = {}
        for span in self.spans:
            assert span.elements, f"{span} holds a stretch of no elements"
            first, stop = span.elements
            nbytes = (stop - first) * self.itemsizes[span.kind]
            changes[span.start] = changes.get(span.start, 0) + nbytes
            changes[span.end] = changes.get(span.end, 0) - nbytes
        alive = peak = 0
        for operation in sorted(changes):
            alive += changes[operation]
            peak = max(peak, alive)
        return peak


@dataclass(frozen=True, slots=True)
class Moment:
    """The bytes alive right after an `event` of a `phase` ("forward", "optimizer", …)."""

    phase: str
    event: str
    ledger: Ledger


@dataclass(frozen=True)
class History:
    """Bytes resident over the course of a step: one ledger a moment."""

    moments: tuple[Moment, ...]

    def __init__(self, moments: Iterable[Moment]) -> None:
        object.__setattr__(self, "moments", tuple(moments))
        if not self.moments:
            raise ValueError("a History needs at least one Moment: nothing was recorded")
        for moment in self.moments:
            units.instance(moment, Moment, "History")

    def only(self, *components: str) -> "History":
        """The same moments, and of what is alive only these components."""
        return History(
            replace(m, ledger=Ledger(x for x in m.ledger if x.component in components and x.amount))
            for m in self.moments
        )

    @property
    def peak(self) -> Moment:
        """The first moment at which most bytes are alive."""
        return max(self.moments, key=lambda moment: moment.ledger.total)

    @property
    def phases(self) -> dict[str, Moment]:
        """The peak of each phase, in order of appearance."""
        peaks: dict[str, Moment] = {}
        for moment in self.moments:
            if moment.phase not in peaks or moment.ledger.total > peaks[moment.phase].ledger.total:
                peaks[moment.phase] = moment
        return peaks
