"""Gradient buckets: which gradients travel together, and the time of their way."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labutils import clock, collectives, units
from labutils.config import BUCKET_BYTES, Link


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together, in the order in which they come.

    names: of the parameters, or their numbers
    sizes: bytes of each gradient
    itemsize: bytes of an element
    """

    names: tuple[Any, ...]
    sizes: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes in this bucket."""
        return sum(self.sizes)


def buckets(
    sizes: Mapping[str, int] | Mapping[int, int] | Sequence[int],
    bucket_bytes: int = BUCKET_BYTES,
    *,
    itemsize: int = 4,
) -> tuple[Bucket, ...]:
    """Buckets of at most `bucket_bytes`, in the order in which a backward pass fills them.

    `sizes` are the bytes of each gradient in forward order, by name; a list names them by number.

    >>> [bucket.names for bucket in buckets({"embed": 10, "hidden": 10, "head": 5}, 16)]
    [('head', 'hidden'), ('embed',)]

    Invariant: each is in one bucket; one that is larger than a bucket has a bucket of its own.
    """
    bucket_bytes, itemsize = units.wholes(1, bucket_bytes=bucket_bytes, itemsize=itemsize)
    units.instance(sizes, Iterable, "buckets")
    given: Mapping[Any, int] = sizes if isinstance(sizes, Mapping) else dict(enumerate(sizes))
    of = {name: units.whole(size, f"size of {name!r}") for name, size in given.items()}
    grouped: list[list[Hashable]] = []
    held = 0
    for name in reversed(list(of)):
        if not grouped or held + of[name] > bucket_bytes:
            grouped.append([])
            held = 0
        grouped[-1].append(name)
        held += of[name]
    parts = [(tuple(names), tuple(of[name] for name in names)) for names in grouped]
    return tuple(Bucket(names, nbytes, itemsize) for names, nbytes in parts)


def backward_timeline(
    layers: Sequence[tuple[int, float]],
    *,
    bucket_bytes: int,
    n: int,
    link: Link,
    overlap: bool = True,
) -> clock.Played:
    """The backward pass of a chain of layers on `n` ranks, as every one of them sees it.

    Buckets are reduced one after the other, each when its last gradient is there.

    layers: (bytes of gradients, seconds of the backward pass) of each, in forward order
    bucket_bytes: what a bucket holds at most
    link: a bucket takes what a ring all-reduce costs on it
    overlap: False waits for the whole backward pass before anything is sent

    >>> backward_timeline([(1000, 1.0)] * 4, bucket_bytes=2000, n=2, link=Link(0, 4000)).exposed
    0.5

    Raises ValueError where a layer is no (bytes of gradients, seconds).
    """
    for layer in layers:
        if len(layer) != 2:
            raise ValueError(f"a layer is (bytes of gradients, seconds), got {layer!r}")
    sizes = {f"layer {i}": nbytes for i, (nbytes, _) in enumerate(layers)}
    backward: dict[Hashable, clock.Task] = {}
    for name, (_, seconds) in reversed(list(zip(sizes, layers, strict=True))):
        seconds = units.positive(seconds, "seconds", or_zero=True)
        backward[name] = clock.Task("rank", seconds, (), "backward", name)
    last, reduced = list(backward)[-1:], []
    for k, bucket in enumerate(buckets(sizes, bucket_bytes)):
        needs = [backward[name] for name in (bucket.names[-1:] if overlap else last)]
        seconds = collectives.cost("all_reduce_ring", bucket.nbytes, n, link)
        reduced.append(clock.Task("link", seconds, needs, "reduce", f"bucket {k}"))
    return clock.play([*backward.values(), *reduced])
