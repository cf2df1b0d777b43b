"""What each rank does, in memory that all see: how a deadlock between processes is found."""

import mmap

import numpy as np

RUNNING, BLOCKED, ENDED = range(3)


class Progress:
    """A row a rank: what it does, how often it looked around in vain, what it moved."""

    def __init__(self, memory: mmap.mmap, size: int) -> None:
        self.memory = memory
        numbers = np.frombuffer(memory, np.int64, 1 + 3 * size)
        self.flag = numbers[:1]
        self.rows = numbers[1:].reshape(size, 3)
        self.seen: np.ndarray | None = None

    def clear(self) -> None:
        """Every rank runs."""
        self.flag[:] = 0
        self.rows[:] = 0

    @property
    def stopped(self) -> bool:
        """Whether the run is to end at once."""
        return bool(self.flag[0])

    def stop(self) -> None:
        """Tell every rank that waits to give up."""
        self.flag[0] = 1

    def publish(self, rank: int, state: int, looks: int, moved: int) -> None:
        """Write what `rank` does: its state, its looks around in vain, and what it has moved."""
        self.rows[rank] = state, looks, moved

    def rests(self, rank: int) -> bool:
        """Whether `rank` is over, or has looked around in vain, twice."""
        state, looks, _ = self.rows[rank]
        return bool(state == ENDED or (state == BLOCKED and looks >= 2))

    def deadlock(self) -> bool:
        """Whether every rank has looked twice, in vain, since it was first seen that none runs, and
        nothing has moved since then."""
        rows = self.rows.copy()
        states, looks = rows[:, 0], rows[:, 1]
        if (states == RUNNING).any():
            self.seen = None
            return False
        if self.seen is None or (self.seen[:, ::2] != rows[:, ::2]).any():
            self.seen = rows
        return bool(((states == ENDED) | (looks >= self.seen[:, 1] + 2)).all())
