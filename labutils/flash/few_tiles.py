"""The tiles that tell what attention holds, for runs without values."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

from labutils.flash.algorithms import Tiling


class FewTiles(Tiling):
    """Two of each kind, one after the other, in place of all: the fullest moment is the same, and
    the time does not grow with the square of the tokens. What is computed is wrong.

    A kind of tile is its size, and whether the mask cuts it; one of queries or keys, how many there
    are and which kinds of tile they meet.
    """

    @functools.cached_property
    def query_blocks(self) -> list[slice]:
        rows, columns = self._all
        return _two_of_each(rows, lambda r: (_size(r), frozenset(self._kinds([r], columns))))

    @functools.cached_property
    def key_blocks(self) -> list[slice]:
        rows, columns = self._all
        return _two_of_each(columns, lambda c: (_size(c), frozenset(self._kinds(rows, [c]))))

    def keys_of(self, rows: slice) -> Iterator[slice]:
        seen = [columns for columns in self._all[1] if self.visible(rows, columns)]
        return iter(_two_of_each(seen, lambda columns: self._kind(rows, columns)))

    def queries_of(self, columns: slice) -> Iterator[slice]:
        seen = [rows for rows in self._all[0] if self.visible(rows, columns)]
        return iter(_two_of_each(seen, lambda rows: self._kind(rows, columns)))

    @functools.cached_property
    def _all(self) -> tuple[list[slice], list[slice]]:
        whole = Tiling(self.s_q, self.s_k, self.block_q, self.block_k, self.offset)
        return whole.query_blocks, whole.key_blocks

    def _kinds(self, rows: list[slice], columns: list[slice]) -> Iterator[tuple[int, int, bool]]:
        return (self._kind(r, c) for r in rows for c in columns if self.visible(r, c))

    def _kind(self, rows: slice, columns: slice) -> tuple[int, int, bool]:
        return _size(rows), _size(columns), self.cut(rows, columns)


def _size(block: slice) -> int:
    return block.stop - block.start


def _two_of_each(blocks: Iterable[slice], kind: Callable[[slice], Hashable]) -> list[slice]:
    met: Counter[Hashable] = Counter()
    kept = []
    for block in blocks:
        met[kind(block)] += 1
        if met[kind(block)] <= 2:
            kept.append(block)
    return kept
