"""Which rank has which tokens of a sequence, and which of their pairs a causal mask leaves to it.

contiguous   rank i has chunk i of n: the last rank sees all that came before it
zigzag       rank i has chunks i and 2n − 1 − i of 2n: early and late tokens, equal work
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from labutils import units

_CHUNKS = {"contiguous": 1, "zigzag": 2}  # of each rank


@dataclass(frozen=True)
class Tile:
    """Queries and keys that meet, as places among those that two ranks have: query i of `rows` sees
    key j of `columns` where j ≤ i + `offset`, both counted from 0, as in `flash.attention`."""

    rows: slice
    columns: slice
    offset: int

    @property
    def pairs(self) -> int:
        """Pairs that the mask leaves."""
        rows, columns = (part.stop - part.start for part in (self.rows, self.columns))
        seen, beyond = self.offset, self.offset - columns  # of row −1, and how many too many
        return _sum_to(seen + rows) - _sum_to(seen) - _sum_to(beyond + rows) + _sum_to(beyond)


def _sum_to(m: int) -> int:
    """1 + 2 + … + m."""
    return m * (m + 1) // 2 if m > 0 else 0


@dataclass(frozen=True)
class SequenceLayout:
    """Which of s tokens each of n ranks has; made by `layout`."""

    s: int
    n: int
    kind: str

    @property
    def chunk(self) -> int:
        """Tokens that stand together."""
        return self.s // (self.n * _CHUNKS[self.kind])

    def numbers(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of the sequence and of its memory.

        Raises ValueError for a rank that has none.
        """
        if (rank := units.whole(rank, "rank")) >= self.n:
            raise ValueError(f"rank {rank} has no tokens: use 0 … {self.n - 1}")
        return (rank,) if self.kind == "contiguous" else (rank, 2 * self.n - 1 - rank)

    def positions(self, rank: int) -> tuple[int, ...]:
        """The position in the sequence of each token that a rank has."""
        starts = [number * self.chunk for number in self.numbers(rank)]
        return tuple(start + i for start in starts for i in range(self.chunk))

    def split(self, x: Shaped[Tensor, "*whole"], rank: int, dim: int = 1) -> Tensor:
        """The tokens of a rank, of all that stand along `dim`; ValueError if these are not s."""
        if x.shape[dim] != self.s:
            got = f"{x.shape[dim]} tokens along dim {dim}"
            raise ValueError(f"this is a layout of s={self.s} tokens, got {got}: make their own")
        places = (number * self.chunk for number in self.numbers(rank))
        return torch.cat([x.narrow(dim, place, self.chunk) for place in places], dim)

    def join(self, shares: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole sequence, from what each rank has of it; ValueError for other than n shares
        or another number of tokens along `dim`."""
        if len(shares) != self.n:
            raise ValueError(f"there are {self.n} shares, got {len(shares)}: one from each rank")
        if {share.shape[dim] for share in shares} != {self.s // self.n}:
            got = f"{[share.shape[dim] for share in shares]} along dim {dim}"
            has = f"each rank has {self.s // self.n} of s={self.s} tokens"
            raise ValueError(f"{has}, got {got}: give each its own, and the dim of tokens")
        chunks: dict[int, Tensor] = {}
        for rank, share in enumerate(shares):
            chunks |= zip(self.numbers(rank), share.split(self.chunk, dim), strict=True)
        return torch.cat([chunks[number] for number in sorted(chunks)], dim)

    def tiles(self, rank: int, holder: int) -> Iterator[Tile]:
        """Where queries of `rank` meet keys of `holder`: one tile, or none where the mask leaves
        none. All queries that see a key of the holder see the same ones, but for one's own, and
        there places in memory are in the order of the sequence."""
        mine, theirs, c = self.numbers(rank), self.numbers(holder), self.chunk
        queries = [query for query in mine if query >= theirs[0]]
        keys = [key for key in theirs if key <= mine[-1]]
        if queries and keys:
            rows = slice((len(mine) - len(queries)) * c, len(mine) * c)
            yield Tile(rows, slice(0, len(keys) * c), (queries[0] - keys[0]) * c)

    def grid(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Of each chunk of queries and of keys that the mask lets meet, the rank that computes it,
        and the step of the ring."""
        pieces = self.s // self.chunk
        units.writable(pieces**2, f"meetings of {pieces} chunks are", "take fewer ranks")
        has = {number: rank for rank in range(self.n) for number in self.numbers(rank)}
        return {
            (query, key): (has[query], (has[query] - has[key]) % self.n)
            for query in has
            for key in has
            if key <= query
        }

    def met(self, rank: int) -> tuple[int, ...]:
        """Pairs of query and key that a rank computes at each step of the ring, its own first: as
        counted in the tiles that `ring_attention` runs."""
        holders = [(rank - step) % self.n for step in range(self.n)]
        return tuple(sum(tile.pairs for tile in self.tiles(rank, at)) for at in holders)

    def work(self, rank: int) -> int:
        """The same of all steps together, as a formula; of a chunk of c tokens c² with each earlier
        one, c(c + 1)/2 with itself.

        >>> [layout(4096, 4, "contiguous").work(rank) for rank in range(4)]
        [524800, 1573376, 2621952, 3670528]
        >>> [layout(4096, 4, "zigzag").work(rank) for rank in range(4)]
        [2097664, 2097664, 2097664, 2097664]

        Invariant: contiguous, the last of n ranks does ((2n − 1)c + 1)/(nc + 1) times the average,
        which nears (2n − 1)/n; zig-zag all do the same.
        """
        c, numbers = self.chunk, self.numbers(rank)
        return sum(numbers) * c**2 + len(numbers) * c * (c + 1) // 2


def layout(s: int, n: int, kind: str = "zigzag") -> SequenceLayout:
    """Which of s tokens each of n ranks has.

    kind: "contiguous", or "zigzag", which is fair under a causal mask

    >>> zigzag = layout(16, 4, "zigzag")
    >>> zigzag.positions(0), zigzag.positions(3)
    ((0, 1, 14, 15), (6, 7, 8, 9))

    Invariant: each position is on one rank; all ranks have s/n.
    Raises ValueError where the chunks would differ in length.
    """
    s, n = units.whole(s, "s", 1), units.whole(n, "n", 1)
    pieces = units.entry(_CHUNKS, kind, "no layout") * n
    if s % pieces:
        cut = f"cut it to {s - s % pieces} tokens or " if s > pieces else ""
        remedy = f"{cut}pad it to {s + -s % pieces}"
        raise ValueError(f"{s} tokens are not {pieces} equal chunks ({kind}, cp={n}): {remedy}")
    return SequenceLayout(s, n, kind)
