"""A caching allocator by the rules of PyTorch's CUDA allocator: what is reserved, what is in use,
and why free memory cannot always be had.

Nothing is allocated here: blocks are intervals of addresses, so a laptop replays what happens in 80
GB. One stream, one device.

Source: the comments and the code of c10/cuda/CUDACachingAllocator.cpp in PyTorch; the notes on CUDA
memory management in its documentation.
"""

import itertools
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from labutils import units
from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment, OutOfMemory

ALIGNMENT = 512  # every size is a multiple of it
SMALL = units.MIB  # requests up to this size share small segments
LARGE_SEGMENT = 20 * units.MIB
SEGMENT = {"small": 2 * units.MIB, "large": LARGE_SEGMENT}  # also the pages of expandable ones
OWN_SEGMENT = 10 * units.MIB  # from here on a request has its own segment, rounded up to ROUND
ROUND = 2 * units.MIB


@dataclass(eq=False, slots=True)
class _Block:
    """`size` bytes at `address` of a segment: "used" for a request of `requested` bytes by `name`,
    "free", or address space that is "unmapped"."""

    address: int
    size: int
    pool: str
    state: str
    segment: "list[_Block]" = field(repr=False)
    requested: int = 0
    name: str = ""


def _order(block: _Block) -> tuple[int, int]:
    return block.size, block.address


class Allocator:
    """Hands out addresses below a `capacity` in bytes, as PyTorch does on a device of that size.

    Segments come from the device whole and are cut into blocks. A request takes the smallest free
    block that holds it, and splits it; a block that is freed joins its free neighbors. What is free
    stays cached. Only when the device has nothing left do segments without a single used block go
    back.

    `max_split_size` in bytes keeps larger blocks whole (on a full device PyTorch gives these back
    first; here all unused segments go at once); `expandable_segments` lets each pool grow one
    segment page by page instead.

    >>> gpu = Allocator(units.parse("10 GiB"))
    >>> batch = gpu.alloc(6 * units.GIB)
    >>> gpu.free(batch)
    >>> state = gpu.alloc(units.GIB)                           # moves into the hole
    >>> gpu.allocated // units.GIB, gpu.reserved // units.GIB, gpu.largest_free // units.GIB
    (1, 6, 5)
    >>> gpu.alloc(6 * units.GIB)
    Traceback (most recent call last):
    labutils.timeline.OutOfMemory: no room for 6.00 GiB: 1.00 GiB of 10.0 GiB are ...

    Invariant: blocks of a segment tile it without gaps; no two neighbors are both free; used and
    free bytes add up to `reserved`.
    """

    def __init__(
        self, capacity: int, *, max_split_size: float = math.inf, expandable_segments: bool = False
    ) -> None:
        self.capacity = units.whole(capacity, "capacity", 1)
        if not max_split_size > LARGE_SEGMENT:
            why = f"must be more than {LARGE_SEGMENT}: segments of 20 MiB are made to be split"
            raise ValueError(f"max_split_size={max_split_size} {why}")
        if expandable_segments and max_split_size < math.inf:
            raise ValueError("give max_split_size or expandable_segments, not both")
        self.max_split_size = max_split_size
        self.expandable = expandable_segments
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = 0
        self.segments: list[list[_Block]] = []  # oldest first, its blocks in order of address
        self._used: dict[int, _Block] = {}
        # Sorted, so that the first that fits is the best.
        self._free: dict[str, list[_Block]] = {"small": [], "large": []}
        self._next_address = 0

    def alloc(self, nbytes: int, name: str = "") -> int:
        """The address of `nbytes` of memory.

        Raises OutOfMemory where no free block and no new segment holds it.
        """
        nbytes = units.whole(nbytes, "nbytes", 1)
        size = _up(nbytes, ALIGNMENT)
        pool = "small" if size <= SMALL else "large"
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            self.empty_cache()
            block = self._grow(pool, size)
        if block is None:
            raise OutOfMemory(self._refusal(nbytes))
        if self._splits(block, size):
            self._cache(self._cut(block, size))
        block.state, block.requested, block.name = "used", nbytes, name or "used"
        self._used[block.address] = block
        self.allocated += block.size
        self.requested += nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Gives the block at `address` back to its segment, where it joins its free neighbors.

        Raises ValueError for an address that is not in use.
        """
        block = self._used.pop(address, None)
        if block is None:
            why = "it was freed before, or it is not what alloc returned"
            raise ValueError(f"nothing is allocated at address {address}: {why}")
        self.allocated -= block.size
        self.requested -= block.requested
        block.state, block.requested, block.name = "free", 0, ""
        self._cache(self._joined(block))

    def empty_cache(self) -> None:
        """Gives segments (of expandable ones: pages) that hold nothing back to the device."""
        for block in [*self._free["small"], *self._free["large"]]:
            if self.expandable:
                self._unmap(block)
            elif block.segment == [block]:
                self._free[block.pool].remove(block)
                self.segments.remove(block.segment)
                self.reserved -= block.size

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block: more than that cannot be had without a new segment."""
        return max((blocks[-1].size for blocks in self._free.values() if blocks), default=0)

    @property
    def cached(self) -> int:
        """Bytes that are reserved and not in use."""
        return self.reserved - self.allocated

    @property
    def available(self) -> int:
        """Bytes that the device still has."""
        return self.capacity - self.reserved

    @property
    def layout(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """(bytes, name) of every mapped block of every segment; a free block has no name."""
        found = []
        for segment in self.segments:
            mapped = [block for block in segment if block.state != "unmapped"]
            found.append(tuple((block.size, block.name) for block in mapped))
        return tuple(found)

    def __repr__(self) -> str:
        used, held = _text(self.allocated), _text(self.reserved)
        amounts = f"{used} allocated, {held} reserved of {_text(self.capacity)}"
        return f"Allocator: {amounts}, largest free block {_text(self.largest_free)}"

    def _refusal(self, nbytes: int) -> str:
        return (
            f"no room for {_text(nbytes)}: {_text(self.allocated)} of {_text(self.capacity)} are "
            f"allocated, {_text(self.cached)} are reserved but unallocated, the largest free block "
            f"of them has {_text(self.largest_free)}, the device has {_text(self.available)} left"
        )

    def _best_fit(self, pool: str, size: int) -> _Block | None:
        free = self._free[pool]
        place = bisect_left(free, (size, 0), key=_order)
        if self.expandable:  # what is free at the end counts with all that it can grow into
            while place + 1 < len(free) and _reach(free[place + 1]) < _reach(free[place]):
                place += 1
        if place == len(free):
            return None
        block = free[place]
        if size < self.max_split_size <= block.size:
            return None
        if size >= self.max_split_size and block.size >= size + LARGE_SEGMENT:
            return None
        return free.pop(place)

    def _splits(self, block: _Block, size: int) -> bool:
        rest = block.size - size
        if block.pool == "small" or self.expandable:
            return rest >= ALIGNMENT
        return rest > SMALL and size < self.max_split_size

    def _cut(self, block: _Block, size: int) -> _Block:
        """Leaves `size` bytes to the block; the rest becomes a block in the same state."""
        segment = block.segment
        rest = _Block(block.address + size, block.size - size, block.pool, block.state, segment)
        segment.insert(_place(block) + 1, rest)
        block.size = size
        return rest

    def _cache(self, block: _Block) -> None:
        insort(self._free[block.pool], block, key=_order)

    def _joined(self, block: _Block) -> _Block:
        """The block with its neighbors of the same state; free ones leave the cache."""
        segment, place = block.segment, _place(block)
        for neighbor in segment[max(place - 1, 0) : place + 2]:
            if neighbor is not block and neighbor.state == block.state:
                if block.state == "free":
                    self._free[block.pool].remove(neighbor)
                segment.remove(neighbor)
                block.address = min(block.address, neighbor.address)
                block.size += neighbor.size
        return block

    def _grow(self, pool: str, size: int) -> _Block | None:
        """A free block of at least `size`, not cached, in memory new from the device, if it can."""
        if self.expandable:
            return self._map(pool, size)
        wanted = SEGMENT[pool] if size < OWN_SEGMENT else _up(size, ROUND)
        if wanted > self.available:
            return None
        self._reserve(wanted)
        return self._segment(pool, wanted, "free")

    def _segment(self, pool: str, size: int, state: str) -> _Block:
        segment: list[_Block] = []
        segment.append(_Block(self._next_address, size, pool, state, segment))
        self._next_address += _up(size, LARGE_SEGMENT)  # where a page of any pool may start
        self.segments.append(segment)
        return segment[0]

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _map(self, pool: str, size: int) -> _Block | None:
        """`_grow` by pages, within addresses that are set aside for the whole device once."""
        mine = [segment for segment in self.segments if segment[0].pool == pool]
        unused = itertools.chain.from_iterable(map(_unused, mine))
        block = next((run[0] for run in unused if sum(b.size for b in run) >= size), None)
        if block is None:
            addresses = _up(self.capacity + self.capacity // 8, LARGE_SEGMENT)
            block = self._segment(pool, addresses, "unmapped")
        while block.state == "unmapped" or block.size < size:
            hole, missing = block, size
            if block.state == "free":
                after, missing = _after(block), size - block.size
                assert after is not None  # what is set aside ends with a block that is unmapped
                hole = after
            nbytes = min(_up(missing, SEGMENT[pool]), hole.size)
            if nbytes > self.available:
                return None
            if nbytes < hole.size:
                self._cut(hole, nbytes)
            self._reserve(nbytes)
            hole.state = "free"
            block = self._joined(hole)
            self._cache(block)
        self._free[pool].remove(block)
        return block

    def _unmap(self, block: _Block) -> None:
        """Takes the memory away from all pages that lie in a free block."""
        page, end = SEGMENT[block.pool], block.address + block.size
        start, stop = _up(block.address, page), end // page * page
        if start >= stop:
            return
        self._free[block.pool].remove(block)
        if stop < end:
            self._cache(self._cut(block, stop - block.address))
        if start > block.address:
            before, block = block, self._cut(block, start - block.address)
            self._cache(before)
        block.state = "unmapped"
        self.reserved -= block.size
        self._joined(block)


def replay(lives: Iterable[Any], allocator: Allocator) -> History:
    """What the allocator holds while storages live, as `measure.storages` returns them: bytes asked
    for, bytes lost to rounding, bytes cached; a moment for each that is born or dies.

    At each operation first dies what was freed before it, then what it makes is born.

    Raises TypeError where one of `lives` is no storage's.
    """
    units.instance(lives, Iterable, "replay")
    units.instance(allocator, Allocator, "replay")
    events = []
    for key, life in enumerate(lives):
        if not hasattr(life, "nbytes"):
            raise TypeError(f"replay takes what measure.storages returns, got a list with {life!r}")
        if life.nbytes:
            events.append((life.birth, 1, key, life))
            if life.death is not None:
                events.append((life.death, 0, key, life))
    places: dict[int, int] = {}
    moments = []
    for _, born, key, life in sorted(events, key=lambda event: event[:2]):
        if born:
            places[key] = allocator.alloc(life.nbytes, life.component)
        else:
            allocator.free(places.pop(key))
        rounding = Line("rounding", allocator.allocated - allocator.requested)
        held = [Line("allocated", allocator.requested), rounding, Line("cached", allocator.cached)]
        moments.append(Moment("", life.component, Ledger(held)))
    return History(moments)


def _text(nbytes: int) -> str:
    return units.text(nbytes, binary=True)  # as PyTorch says it


def _up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _unused(segment: list[_Block]) -> list[list[_Block]]:
    """The runs of blocks between used ones."""
    runs = itertools.groupby(segment, key=lambda block: block.state == "used")
    return [list(run) for used, run in runs if not used]


def _place(block: _Block) -> int:
    return bisect_left(block.segment, block.address, key=attrgetter("address"))


def _after(block: _Block) -> _Block | None:
    place = _place(block) + 1
    return block.segment[place] if place < len(block.segment) else None


def _reach(block: _Block) -> int:
    """Bytes that a free block has or can grow into."""
    after = _after(block)
    return block.size + (after.size if after and after.state == "unmapped" else 0)
