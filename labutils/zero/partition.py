"""How parameters are dealt out: in equal shares, the end padded."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from labutils import units


@dataclass(frozen=True)
class Partition:
    """`numel` elements in `n` equal shares; what the last ranks lack is padding."""

    numel: int
    n: int

    @property
    def share(self) -> int:
        """Elements that each rank holds, padding included."""
        return -(-self.numel // self.n)

    @property
    def padded(self) -> int:
        """Elements of all shares together."""
        return self.share * self.n

    @property
    def padding(self) -> int:
        """Elements that stand for no parameter."""
        return self.padded - self.numel

    def bounds(self, rank: int) -> tuple[int, int]:
        """Where the elements of `rank` begin and end, without padding; a rank may have none."""
        if not 0 <= (rank := units.whole(rank, "rank")) < self.n:
            raise ValueError(f"rank {rank} has no share: there are {self.n}, use 0 … {self.n - 1}")
        return min(rank * self.share, self.numel), min((rank + 1) * self.share, self.numel)

    def cuts(self, numels: Iterable[int], rank: int) -> list[tuple[int, int]]:
        """Where in the share of `rank` parameters of so many elements begin and end, one after the
        other; most have nothing there."""
        first, _ = self.bounds(rank)
        starts = itertools.accumulate(numels, initial=0)
        return list(itertools.pairwise(min(max(x - first, 0), self.share) for x in starts))


def partition(numel: int, n: int) -> Partition:
    """`numel` elements dealt out to `n` ranks in order: all ranks hold, send and receive alike.

    >>> dealt = partition(10, 4)
    >>> dealt.share, dealt.padding, [dealt.bounds(rank) for rank in range(4)]
    (3, 2, [(0, 3), (3, 6), (6, 9), (9, 10)])

    Invariant: the bounds of all ranks are disjoint and cover 0 … numel; padding is less than n.
    """
    return Partition(units.whole(numel, "numel", 1), units.whole(n, "n", 1))


@dataclass(frozen=True)
class Unit:
    """What is gathered, reduced or updated at once: the elements of each of its parameters.

    Of a root, `after` are the trained ones that compute after all other units, so that their
    gradients come first.
    """

    trained: tuple[int, ...] = ()
    frozen: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for numel in (*self.trained, *self.frozen, *self.after):
            units.whole(numel, "elements of a parameter", 1)

    def dealt(self, n: int, *, frozen: bool = False) -> tuple[Partition, ...]:
        """The partition of its flat parameter of trained, or of frozen ones; none without any."""
        numel = sum(self.frozen) if frozen else sum(self.trained + self.after)
        return (partition(numel, n),) if numel else ()


Layout = int | Iterable["int | Sequence[int] | Unit"]


def units_of(sizes: Layout) -> tuple[Unit, ...]:
    """Units from what is easier to write: Ψ, (Ψ₁, Ψ₂), or ((a, b), …) where parameters count.

    >>> [unit.trained for unit in units_of((8, (3, 2)))]
    [(8,), (3, 2)]
    """
    known = []
    given: Any = (sizes,) if units.is_whole(sizes) else sizes
    for unit in given:
        numels = (unit,) if units.is_whole(unit) else unit
        known.append(unit if isinstance(unit, Unit) else Unit(tuple(numels)))
    if not known:
        raise ValueError("a layout needs at least one unit: give Ψ, or the sizes of the units")
    return tuple(known)
