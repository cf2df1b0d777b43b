"""When a rank computes and when its gradients travel: one type for what a formula says and for what a run took."""

from collections.abc import Sequence
from dataclasses import dataclass

from labutils import collectives, units
from labutils.config import Link
from labutils.data_parallel.buckets import buckets


@dataclass(frozen=True, slots=True)
class Span:
    """What a rank did from `start` to `end`, in seconds since its step began: `kind` is "forward", "backward" or "reduce"."""

    rank: int
    kind: str
    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The spans of one step, of one rank or of several: from a formula (`simulate`) or from a run (`Replica.timeline`).

    >>> step = Timeline((Span(0, "backward", "layer 0", 0.0, 3.0), Span(0, "reduce", "bucket 0", 2.0, 4.0)))
    >>> step.makespan, step.exposed, step.hidden
    (4.0, 1.0, 0.5)
    """

    spans: tuple[Span, ...]

    def __add__(self, other: "Timeline") -> "Timeline":
        return Timeline(self.spans + other.spans) if isinstance(other, Timeline) else NotImplemented

    def __radd__(self, other: int) -> "Timeline":
        return self if other == 0 else NotImplemented  # so that sum(timelines) works

    @property
    def makespan(self) -> float:
        """Seconds until the last rank is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds from the end of the last computation on any rank to the end of the step: communication that nothing hides."""
        return self.makespan - max(
            (span.end for span in self.spans if span.kind != "reduce"), default=0.0
        )

    @property
    def hidden(self) -> float:
        """The part of communication, 0 … 1, that runs while its rank computes; 1 where there is none."""
        open_ = total = 0.0
        for rank in {span.rank for span in self.spans}:
            mine = [span for span in self.spans if span.rank == rank]
            computed = max((span.end for span in mine if span.kind != "reduce"), default=0.0)
            for span in mine:
                if span.kind == "reduce":
                    total += span.end - span.start
                    open_ += max(0.0, span.end - max(span.start, computed))
        return 1 - open_ / total if total else 1.0


def simulate(
    layers: Sequence[tuple[int, float]],
    *,
    bucket_bytes: int,
    n: int,
    link: Link,
    overlap: bool = True,
) -> Timeline:
    """The backward pass of a chain of layers, each (gradient bytes, seconds), in forward order, on `n` ranks: as every one of them sees it.

    Buckets are reduced one after the other, each when its last gradient is there: the latency–bandwidth cost of a ring all-reduce.

    >>> simulate([(1000, 1.0)] * 4, bucket_bytes=2000, n=2, link=Link(0, 4000)).exposed
    0.5
    """
    sizes = {f"layer {i}": nbytes for i, (nbytes, _) in enumerate(layers)}
    spans, now, ready = [], 0.0, {}
    for name, (_, seconds) in reversed(list(zip(sizes, layers, strict=True))):
        spans.append(
            Span(0, "backward", name, now, now + units.positive(seconds, f"the seconds of {name}"))
        )
        now = ready[name] = spans[-1].end
    free = 0.0 if overlap else now
    for k, bucket in enumerate(buckets(sizes, bucket_bytes)):
        start = max(free, ready[bucket.names[-1]])
        free = start + collectives.cost("all_reduce_ring", bucket.nbytes, n, link)
        spans.append(Span(0, "reduce", f"bucket {k}", start, free))
    return Timeline(tuple(spans))
