"""The blackboard: each rank writes down the collective it enters and reads what the others wrote, so that a wrong call is found without a message.

It is a piece of memory that all ranks can see: ordinary memory between threads, a mapped file between processes.
"""

import mmap
import struct
import zlib
from collections.abc import Sequence

from labutils.world.errors import ABSENT, OVER, WAITS, MismatchError, Site, State, named, place

_ENTRY = struct.Struct("<QQHI")  # group, number of the call, bytes of text, their check sum
_SLOTS, _WIDTH = 32, 512
_STATE = struct.Struct(
    "<BQQH"
)  # running, blocked, finished or failed; looks in vain; pieces moved; bytes of text
_REGION = _WIDTH * (1 + _SLOTS)
RUNNING, BLOCKED, FINISHED, FAILED = range(4)


class Board:
    """Who called what: one region of memory a rank, written by that rank and read by all."""

    def __init__(self, memory: bytearray | mmap.mmap, size: int) -> None:
        self.memory, self.size = memory, size

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of memory that a board for `size` ranks needs."""
        return 1 + size * _REGION

    def clear(self) -> None:
        """Wipe the board before a run."""
        self.memory[: self.nbytes(self.size)] = bytes(self.nbytes(self.size))

    @property
    def stopped(self) -> bool:
        """Whether the run is to end at once."""
        return bool(self.memory[0])

    def stop(self) -> None:
        """Tell every rank that waits to give up."""
        self.memory[0] = 1

    # -- who waits where -----------------------------------------------------------------------------------------------

    def publish(self, rank: int, state: int, looks: int, moved: int, where: str) -> None:
        """Write what `rank` is doing."""
        at, text = 1 + rank * _REGION, where.encode()[: _WIDTH - _STATE.size]
        self.memory[at + _STATE.size : at + _STATE.size + len(text)] = text
        _STATE.pack_into(self.memory, at, state, looks, moved, len(text))

    def state(self, rank: int) -> tuple[int, int, int, str]:
        """What `rank` wrote last: state, looks, pieces moved, where."""
        at = 1 + rank * _REGION
        *numbers, length = _STATE.unpack_from(self.memory, at)
        return (
            *numbers,
            bytes(self.memory[at + _STATE.size : at + _STATE.size + length]).decode(
                errors="replace"
            ),
        )

    def states(self) -> list[State]:
        """What every rank does, and where."""
        known = [self.state(rank) for rank in range(self.size)]
        what = {RUNNING: (ABSENT, ""), FINISHED: (OVER, "finished"), FAILED: (OVER, "failed")}
        return [(WAITS, where) if state == BLOCKED else what[state] for state, _, _, where in known]

    # -- collectives ---------------------------------------------------------------------------------------------------

    def enter(
        self, rank: int, group: str, ranks: Sequence[int], number: int, call: str, where: Site
    ) -> None:
        """Write that `rank` makes `call` as call `number` of a group; raise MismatchError if another rank made a different one."""
        key = zlib.crc32(f"{group}{ranks}".encode())
        at = 1 + rank * _REGION + (1 + (number + key) % _SLOTS) * _WIDTH
        text = f"{call}\t{where[0]}\t{where[1]}\t{where[2]}".encode()[: _WIDTH - _ENTRY.size]
        self.memory[at + _ENTRY.size : at + _ENTRY.size + len(text)] = text
        _ENTRY.pack_into(self.memory, at, key, number, len(text), zlib.crc32(text, 1))
        for other in ranks:
            theirs = self._read(other, key, number)
            if theirs is not None and theirs[0] != call:
                error = MismatchError(self.mismatch(group, ranks, number))
                error.call = group, tuple(ranks), number
                raise error

    def _read(self, rank: int, key: int, number: int) -> tuple[str, Site] | None:
        at = 1 + rank * _REGION + (1 + (number + key) % _SLOTS) * _WIDTH
        *head, length, checksum = _ENTRY.unpack_from(self.memory, at)
        text = bytes(self.memory[at + _ENTRY.size : at + _ENTRY.size + length])
        # An entry may be seen half written. Then it counts as not there yet: its writer looks at ours after it has finished.
        if head != [key, number] or zlib.crc32(text, 1) != checksum:
            return None
        call, file, line, function = text.decode(errors="replace").split("\t")
        return call, (file, int(line), function)

    def mismatch(self, group: str, ranks: Sequence[int], number: int) -> str:
        """Who called what, from which line, as call `number` of a group."""
        key = zlib.crc32(f"{group}{ranks}".encode())
        calls = {rank: self._read(rank, key, number) for rank in ranks}
        lines = [
            f"  rank {rank}: {entry[0]} at {place(entry[1])}"
            if entry
            else f"  rank {rank}: has not called it"
            for rank, entry in calls.items()
        ]
        head = f"{named(tuple(ranks))} must make the same calls on axis {group!r} in the same order, but call {number} differs:"
        return "\n".join([head, *lines])
