"""The tiles that tell what attention holds, for runs without values."""

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

from labutils.flash.algorithms import Tiling


class FewTiles(Tiling):
    """Two of each kind, one after the other, in place of all: the fullest moment is the same, and
    the time does not grow with the square of the tokens. What is computed is wrong.

    The mask cuts a tile, or does not; queries and keys differ in how many they are, and in which of
    both they meet.
    """

    @functools.cached_property
    def query_blocks(self) -> list[slice]:
        rows, columns = self._all
        return _two_of_each(rows, lambda r: (r.stop - r.start, self._kinds([r], columns)))

    @functools.cached_property
    def key_blocks(self) -> list[slice]:
        rows, columns = self._all
        return _two_of_each(columns, lambda c: (c.stop - c.start, self._kinds(rows, [c])))

    def keys_of(self, rows: slice) -> Iterator[slice]:
        seen = [columns for columns in self._all[1] if self.visible(rows, columns)]
        return iter(_two_of_each(seen, lambda columns: self.cut(rows, columns)))

    def queries_of(self, columns: slice) -> Iterator[slice]:
        seen = [rows for rows in self._all[0] if self.visible(rows, columns)]
        return iter(_two_of_each(seen, lambda rows: self.cut(rows, columns)))

    @functools.cached_property
    def _all(self) -> tuple[list[slice], list[slice]]:
        whole = Tiling(self.s_q, self.s_k, self.block_q, self.block_k, self.offset)
        return whole.query_blocks, whole.key_blocks

    def _kinds(self, rows: list[slice], columns: list[slice]) -> Hashable:
        return frozenset(self.cut(r, c) for r in rows for c in columns if self.visible(r, c))


def _two_of_each(blocks: Iterable[slice], kind: Callable[[slice], Hashable]) -> list[slice]:
    met: Counter[Hashable] = Counter()
    kept = []
    for block in blocks:
        met[kind(block)] += 1
        if met[kind(block)] <= 2:
            kept.append(block)
    return kept
