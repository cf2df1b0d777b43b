"""What each rank does, in memory that all see: how a deadlock between processes is found."""

import mmap

RUNNING, BLOCKED, OVER = range(3)
_STATE, _LOOKS, _MOVED, _WIDTH = range(4)


class Progress:
    """A row a rank: what it does, how often it looked around in vain, what it moved."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self.size = size
        self.memory = memory
        self.numbers = memoryview(memory)[: self.nbytes(size)].cast("q")

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of memory for `size` ranks."""
        return 8 * (1 + size * _WIDTH)

    def clear(self) -> None:
        """Every rank runs."""
        for i in range(1 + self.size * _WIDTH):
            self.numbers[i] = 0

    @property
    def stopped(self) -> bool:
        """Whether the run is to end at once."""
        return bool(self.numbers[0])

    def stop(self) -> None:
        """Tell every rank that waits to give up."""
        self.numbers[0] = 1

    def publish(self, rank: int, state: int, looks: int, moved: int) -> None:
        """Write what `rank` does."""
        at = 1 + rank * _WIDTH
        self.numbers[at + _MOVED] = moved
        self.numbers[at + _LOOKS] = looks
        self.numbers[at + _STATE] = state

    def row(self, rank: int) -> tuple[int, int, int]:
        """What `rank` wrote last: state, looks, moved."""
        at = 1 + rank * _WIDTH
        return self.numbers[at], self.numbers[at + _LOOKS], self.numbers[at + _MOVED]

    def rests(self, rank: int) -> bool:
        """Whether `rank` is over, or has looked around in vain, twice."""
        state, looks, _ = self.row(rank)
        return state == OVER or (state == BLOCKED and looks >= 2)


class DeadlockWatch:
    """Tells one rank whether every rank waits for another one."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.seen: list[tuple[int, int]] = []
        self.since: list[int] = []

    def sees(self) -> bool:
        """Whether every rank has looked twice, in vain, since nothing moved anywhere."""
        rows = [self.progress.row(rank) for rank in range(self.progress.size)]
        if any(state == RUNNING for state, _, _ in rows):
            self.seen = []
            return False
        now = [(state, moved) for state, _, moved in rows]
        if self.seen != now:
            self.seen = now
            self.since = [looks for _, looks, _ in rows]
        each = zip(rows, self.since, strict=True)
        return all(state == OVER or looks >= before + 2 for (state, looks, _), before in each)
