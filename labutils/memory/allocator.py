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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from labutils import units
from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment

BLOCK = 512  # every size is a multiple of it
SMALL = units.MIB  # requests up to this size share small segments
LARGE_SEGMENT = 20 * units.MIB
SEGMENT = {"small": 2 * units.MIB, "large": LARGE_SEGMENT}  # also the pages of expandable ones
OWN_SEGMENT = 10 * units.MIB  # from here on a request has its own segment, rounded up to ROUND
ROUND = 2 * units.MIB


class OutOfMemory(RuntimeError):
    """Raised when a request cannot be met, although cached segments were given back first; the
    message says what is free, and where."""


@dataclass(eq=False, slots=True)
class Block:
    """`size` bytes at `address`: "used" for a request of `requested` bytes by `name`, "free",
    or address space that is "unmapped"."""

    address: int
    size: int
    pool: str
    state: str = "free"
    requested: int = 0
    name: str = ""
    before: "Block | None" = field(default=None, repr=False)
    after: "Block | None" = field(default=None, repr=False)

    @property
    def alone(self) -> bool:
        """Whether the block is its whole segment, never split or whole again."""
        return self.before is None and self.after is None


class Allocator:
    """Hands out addresses below a `capacity` in bytes, as PyTorch does on a device of that size.

    Segments come from the device whole and are cut into blocks. A request takes the smallest free
    block that holds it, and splits it; a block that is freed joins its free neighbors. What is free
    stays cached. Only when the device has nothing left do segments without a single used block go
    back.

    `max_split_size` in bytes keeps larger blocks whole; `expandable_segments` lets each pool grow
    one segment page by page instead.

    >>> gpu = Allocator(units.parse("10 GiB"))
    >>> batch = gpu.alloc(6 * units.GIB)
    >>> gpu.free(batch)
    >>> state = gpu.alloc(units.GIB)                           # moves into the hole
    >>> gpu.allocated // units.GIB, gpu.reserved // units.GIB, gpu.largest_free // units.GIB
    (1, 6, 5)
    >>> gpu.alloc(6 * units.GIB)
    Traceback (most recent call last):
    labutils.memory.allocator.OutOfMemory: no room for 6.00 GiB: 1.00 GiB of 10.0 GiB are ...

    Cost: O(log n) comparisons a request, n free blocks.
    Invariant: blocks of a segment tile it without gaps; no two neighbors are both free; used and
    free bytes add up to `reserved`.
    """

    def __init__(
        self, capacity: int, *, max_split_size: float = math.inf, expandable_segments: bool = False
    ) -> None:
        self.capacity = units.whole(capacity, "capacity", 1)
        if max_split_size <= LARGE_SEGMENT:
            why = f"must be more than {LARGE_SEGMENT}: segments of 20 MiB are made to be split"
            raise ValueError(f"max_split_size={max_split_size} {why}")
        if expandable_segments and max_split_size < math.inf:
            raise ValueError("give max_split_size or expandable_segments, not both")
        self.max_split_size = max_split_size
        self.expandable = expandable_segments
        self.allocated = self.reserved = self.requested = 0
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        self._used: dict[int, Block] = {}
        # Sorted, so that the first that fits is the best.
        self._free: dict[str, list[tuple[int, int, Block]]] = {"small": [], "large": []}
        self._segments: list[Block] = []  # the first block of each
        self._next_address = 0

    def alloc(self, nbytes: int, name: str = "") -> int:
        """The address of `nbytes` of memory."""
        units.whole(nbytes, "nbytes", 1)
        size = _up(nbytes, BLOCK)
        pool = "small" if size <= SMALL else "large"
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._grow(pool, size)
        if block is None:
            raise OutOfMemory(self._refusal(nbytes))
        if self._splits(block, size):
            self._cut(block, size)
        block.state, block.requested, block.name = "used", nbytes, name or "used"
        self._used[block.address] = block
        self.allocated += block.size
        self.requested += nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block.address

    def free(self, address: int) -> None:
        """Gives the block at `address` back to its segment, where it joins its free neighbors."""
        block = self._used.pop(address, None)
        if block is None:
            why = "it was freed before, or it is not what alloc returned"
            raise ValueError(f"nothing is allocated at address {address}: {why}")
        self.allocated -= block.size
        self.requested -= block.requested
        block.state, block.requested, block.name = "free", 0, ""
        self._cache(self._joined(block))

    def empty_cache(self) -> int:
        """Gives segments (of expandable ones: pages) that hold nothing back to the device; returns
        their bytes."""
        held = self.reserved
        for blocks in self._free.values():
            for _, _, block in list(blocks):
                if self.expandable:
                    self._unmap(block)
                elif block.alone:
                    self._release(block)
        return held - self.reserved

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block: more than that cannot be had without a new segment."""
        return max((blocks[-1][0] for blocks in self._free.values() if blocks), default=0)

    @property
    def cached(self) -> int:
        """Bytes that are reserved and not in use."""
        return self.reserved - self.allocated

    @property
    def available(self) -> int:
        """Bytes that the device still has."""
        return self.capacity - self.reserved

    @property
    def segments(self) -> tuple[tuple[Block, ...], ...]:
        """Every segment as its blocks in order of address, small and large alike, oldest first."""
        return tuple(tuple(_chain(first)) for first in self._segments)

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

    def _best_fit(self, pool: str, size: int) -> Block | None:
        free = self._free[pool]
        place = bisect_left(free, (size,))
        if place == len(free):
            return None
        if self.expandable:  # what is free at the end counts with all that it can grow into
            while place + 1 < len(free) and _reach(free[place + 1][2]) < _reach(free[place][2]):
                place += 1
        block = free[place][2]
        if size < self.max_split_size <= block.size:
            return None
        if size >= self.max_split_size and block.size >= size + LARGE_SEGMENT:
            return None
        del free[place]
        return block

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool == "small" or self.expandable:
            return rest >= BLOCK
        return rest > SMALL and size < self.max_split_size

    def _cut(self, block: Block, size: int) -> None:
        """Leaves `size` bytes to the block; the rest becomes a block in the same state."""
        rest = Block(block.address + size, block.size - size, block.pool, block.state)
        rest.before, rest.after = block, block.after
        if rest.after is not None:
            rest.after.before = rest
        block.after, block.size = rest, size
        if rest.state == "free":
            self._cache(rest)

    def _cache(self, block: Block) -> None:
        insort(self._free[block.pool], (block.size, block.address, block))

    def _uncache(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]

    def _joined(self, block: Block) -> Block:
        """The block with its neighbors of the same state; free ones leave the cache."""
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.state == block.state:
                if block.state == "free":
                    self._uncache(neighbor)
                block = _merge(*sorted((block, neighbor), key=lambda part: part.address))
        return block

    def _grow(self, pool: str, size: int) -> Block | None:
        """A free block of at least `size`, not cached, in memory new from the device, if it can."""
        if self.expandable:
            return self._map(pool, size)
        wanted = SEGMENT[pool] if size < OWN_SEGMENT else _up(size, ROUND)
        if wanted > self.available:
            return None
        self._reserve(wanted)
        return self._segment(pool, wanted, "free")

    def _segment(self, pool: str, size: int, state: str) -> Block:
        block = Block(self._next_address, size, pool, state)
        self._next_address += _up(size, LARGE_SEGMENT)  # where a page of any pool may start
        self._segments.append(block)
        return block

    def _reserve(self, nbytes: int) -> None:
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _release(self, block: Block) -> None:
        self._uncache(block)
        self._segments.remove(block)
        self.reserved -= block.size

    def _release_oversize(self, pool: str, size: int) -> bool:
        """Gives blocks that may not be split back: one that is large enough, or the largest until
        they make up the size."""
        free, wanted = self._free[pool], max(size, self.max_split_size)
        place = bisect_left(free, (wanted,))
        if place < len(free):
            self._release(free[place][2])
            return True
        released = 0
        while free and released < wanted and free[-1][0] >= self.max_split_size:
            released += free[-1][0]
            self._release(free[-1][2])
        return released >= wanted

    def _map(self, pool: str, size: int) -> Block | None:
        """`_grow` by pages, within addresses that are set aside for the whole device once."""
        blocks = itertools.chain.from_iterable(self.segments)
        places = (block for block in blocks if block.pool == pool and _room(block) >= size)
        block = next(places, None)
        if block is None:
            addresses = _up(self.capacity + self.capacity // 8, LARGE_SEGMENT)
            block = self._segment(pool, addresses, "unmapped")
        while True:
            hole, missing = block, size
            if block.state == "free":
                if block.size >= size:
                    self._uncache(block)
                    return block
                hole, missing = block.after, size - block.size
            nbytes = min(_up(missing, SEGMENT[pool]), hole.size)
            if nbytes > self.available:
                return None
            if nbytes < hole.size:
                self._cut(hole, nbytes)
            self._reserve(nbytes)
            hole.state = "free"
            block = self._joined(hole)
            self._cache(block)

    def _unmap(self, block: Block) -> None:
        """Takes the memory away from all pages that lie in a free block."""
        page, end = SEGMENT[block.pool], block.address + block.size
        start, stop = _up(block.address, page), end // page * page
        if start >= stop:
            return
        self._uncache(block)
        if stop < end:
            self._cut(block, stop - block.address)
        if start > block.address:
            self._cut(block, start - block.address)
            block, whole = block.after, block
            self._cache(whole)
            self._uncache(block)
        block.state = "unmapped"
        self.reserved -= block.size
        self._joined(block)


def replay(lives: Iterable[Any], allocator: Allocator) -> History:
    """What the allocator holds while storages live, as `measure.storages` returns them: bytes asked
    for, bytes lost to rounding, bytes cached; a moment for each that is born or dies.

    At each operation first dies what was freed before it, then what it makes is born.
    """
    events = []
    for key, life in enumerate(lives):
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


def _chain(first: Block | None) -> Iterator[Block]:
    while first is not None:
        yield first
        first = first.after


def _merge(first: Block, second: Block) -> Block:
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first


def _room(block: Block) -> int:
    """Bytes from a block on until the next used one, if some of them are unmapped and no free block
    lies right before; else 0."""
    if block.before is not None and block.before.state != "used":
        return 0
    run = list(itertools.takewhile(lambda other: other.state != "used", _chain(block)))
    grows = any(other.state == "unmapped" for other in run)
    return sum(other.size for other in run) if grows else 0


def _reach(block: Block) -> int:
    """Bytes that a free block has or can grow into."""
    grows = block.after is not None and block.after.state == "unmapped"
    return block.size + (block.after.size if grows else 0)
