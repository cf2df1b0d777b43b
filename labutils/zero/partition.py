"""How parameters are dealt out: in equal shares, the end padded."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

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
        """Where the elements of `rank` begin and end, without padding; a rank may have none.

        Raises ValueError for a rank that has no share.
        """
        if not 0 <= (rank := units.whole(rank, "rank")) < self.n:
            raise ValueError(f"rank {rank} has no share: there are {self.n}, use 0 … {self.n - 1}")
        return min(rank * self.share, self.numel), min((rank + 1) * self.share, self.numel)

    def cuts(self, numels: Iterable[int], rank: int) -> list[tuple[int, int]]:
        """Where in the share of `rank` parameters of so many elements begin and end, one after the
        other; most have nothing there."""
        first, _ = self.bounds(rank)
        sizes = (units.whole(numel, "numels") for numel in numels)
        starts = itertools.accumulate(sizes, initial=0)
        return list(itertools.pairwise(min(max(x - first, 0), self.share) for x in starts))


def partition(numel: int, n: int) -> Partition:
    """`numel` elements dealt out to `n` ranks in order: all ranks hold, send and receive alike.

    >>> dealt = partition(10, 4)
    >>> dealt.share, dealt.padding, [dealt.bounds(rank) for rank in range(4)]
    (3, 2, [(0, 3), (3, 6), (6, 9), (9, 10)])

    Invariant: the bounds of all ranks are disjoint and cover 0 … numel; padding is less than n.
    """
    return Partition(units.whole(numel, "numel", 1), units.whole(n, "n", 1))
