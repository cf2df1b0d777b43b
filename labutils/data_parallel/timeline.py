"""When gradients travel, by formula: what a backward pass in buckets hides and what it exposes."""

from collections.abc import Sequence

from labutils import collectives, units
from labutils.config import Link
from labutils.data_parallel.buckets import buckets
from labutils.timeline import Span, Timeline


def simulate(
    layers: Sequence[tuple[int, float]],
    *,
    bucket_bytes: int,
    n: int,
    link: Link,
    overlap: bool = True,
) -> Timeline:
    """The backward pass of a chain of layers on `n` ranks, as every one of them sees it.

    Buckets are reduced one after the other, each when its last gradient is there.

    layers: (bytes of gradients, seconds of the backward pass) of each, in forward order
    bucket_bytes: what a bucket holds at most
    link: a bucket takes what a ring all-reduce costs on it
    overlap: False waits for the whole backward pass before anything is sent

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
