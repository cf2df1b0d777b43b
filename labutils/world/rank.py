"""Rank, what a rank's program is given, and Outcome, how the program ended there."""

import contextlib
import io
import pickle
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from labutils import randomness
from labutils.config import COMM_AXES, Mesh
from labutils.trace import Event, Trace
from labutils.world.comm import Comm
from labutils.world.errors import (
    ABSENT,
    OVER,
    WAITS,
    Failure,
    RankError,
    State,
    Stopped,
    run_error,
)
from labutils.world.messages import CallSite, Endpoint, Work

WORLD = "world"
Calls = deque[tuple[int, CallSite]]  # the last of them, numbered
_PRINTS = 1_000_000  # characters that are kept of what a rank prints


class Output(io.StringIO):
    """What a rank prints, up to a limit."""

    length = 0

    def write(self, text: str) -> int:
        """Keep `text`, or count it where there is too much already."""
        if self.length < _PRINTS:
            super().write(text[: _PRINTS - self.length])
        self.length += len(text)
        return len(text)

    def __str__(self) -> str:
        lost = self.length - _PRINTS
        return self.getvalue() + f"\n… and {lost:,} characters more" * (lost > 0)


class Metered:
    """A stream that the rank threads of a process share: each writes up to the limit of `Output`,
    and what is beyond it is counted. Other threads write as before."""

    lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.name = name  # of the stream in sys
        self.stream: Any = None
        self.users = 0
        self.lengths: dict[int, int] = {}  # characters of each rank's thread, by its identity

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        me = threading.get_ident()
        if me in self.lengths:
            room = max(_PRINTS - self.lengths[me], 0)
            self.lengths[me] += len(text)
            self.stream.write(text[:room])
            return len(text)
        return self.stream.write(text)

    def flush(self) -> None:
        self.stream.flush()

    @contextlib.contextmanager
    def among(self, streams: Any) -> Iterator[None]:
        """In place of the stream while a run lasts, and of runs at once while the last one does."""
        with self.lock:
            self.users += 1
            if self.users == 1 and getattr(streams, self.name) is not self:
                self.stream = getattr(streams, self.name)
                setattr(streams, self.name, self)
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    self.lengths.clear()
                    if getattr(streams, self.name) is self:
                        setattr(streams, self.name, self.stream)

    @contextlib.contextmanager
    def counted(self, rank: int) -> Iterator[None]:
        """What this thread writes is that of `rank`; it is told in the end what was too much."""
        me = threading.get_ident()
        self.lengths[me] = 0
        try:
            yield
        finally:
            lost = self.lengths.pop(me, 0) - _PRINTS
            if lost > 0:
                self.stream.write(f"\n[rank {rank}] … and {lost:,} characters more\n")


OUT, ERR = Metered("stdout"), Metered("stderr")


@dataclass
class Outcome:
    """How a rank's program ended."""

    value: Any = None  # what it returned
    events: Sequence[Event] = ()  # its messages, in program order
    failure: Failure | None = None
    state: State = (OVER, "finished")  # what it did when the run ended, and where
    printed: str = ""  # what its process wrote
    calls: dict[tuple, Calls] = field(default_factory=dict)  # by axis and ranks
    touched_group: bool = False  # whether it has used a real process group


class Rank:
    """What a rank's program is given: its number, its place on the mesh, its doors to the others.

    rank: its number in the world
    size: the number of ranks
    mesh, coords: the mesh, and where this rank stands on each axis
    device: where its tensors lie
    generator: its own random numbers, dropout's too, which repeat from run to run
    """

    _comm_class = Comm

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        endpoint: Endpoint,
        device: torch.device,
        groups: Callable[[tuple[int, ...]], Any] | None = None,
        private: bool = True,
    ) -> None:
        self.rank = rank
        self.mesh = mesh
        self.size = mesh.size
        self.coords = mesh.coords(rank)
        self.device = device
        self._random = randomness.Numbers(rank, device, private)
        self.generator = self._random.own
        self._endpoint = endpoint
        self._groups = groups
        self._events: MutableSequence[Any] = []  # Event, or a list of those of a collective
        self._pending: dict[Work, None] = {}
        self._comms: dict[str, Comm] = {}
        self._called: dict[tuple, Calls] = {}

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.size})"

    def comm(self, *axes: str) -> Comm:
        """The communicator of the ranks that share these axes; without a name, of all ranks.

        Several axes are joined: `rank.comm("dp", "cp")` is named "dp_cp" and spans their product,
        in the order of rank numbers, whichever axis is named first.

        Raises ValueError for axes that a mesh has not, or that cannot be joined.
        """
        unknown = [axis for axis in axes if axis not in COMM_AXES]
        if unknown and axes != (WORLD,):
            raise ValueError(f"a mesh has no axis {unknown[0]!r}: it has {', '.join(COMM_AXES)}")
        axes = tuple(axis for axis in COMM_AXES if axis in axes)
        name = "_".join(axes) or WORLD
        if name not in self._comms:
            on_dp_and_cp = {"ep", "edp"} & set(axes)
            if on_dp_and_cp and len({"dp", "cp", "ep", "edp"} & set(axes)) > 1:
                remedy = f"{min(on_dp_and_cp)} lies on the ranks of dp and cp; join those"
                raise ValueError(f"axes {axes} cannot be joined: {remedy}")
            ranks = self.mesh.ranks(self.rank, *axes) if axes else range(self.size)
            channel = 2 * sum(1 << COMM_AXES.index(axis) for axis in axes)
            self._comms[name] = self._comm_class(self, name, ranks, channel)
        return self._comms[name]

    def forget(self) -> None:
        """Lets go of the books until now, which have a line for each message: a training run of
        many steps would fill the memory with them."""
        self._finish()
        self._events.clear()

    def _finish(self) -> list[Event]:
        """The rank's events in program order, after all that it started has ended."""
        for work in list(self._pending):
            work.wait()
        flat: list[Event] = []
        for event in self._events:
            flat.extend(event if isinstance(event, list) else (event,))
        return flat


def perform(rank: Rank, fn: Callable, args: tuple, kwargs: dict) -> Outcome:
    """How `fn(rank, *args, **kwargs)` ends on this rank."""
    outcome = Outcome(calls=rank._called)
    try:
        with randomness.within(rank._random):
            outcome.value = fn(rank, *args, **kwargs)
            outcome.events = rank._finish()
    except Stopped as stopped:
        outcome.state = (WAITS, str(stopped)) if stopped.args else (ABSENT, "")
    except BaseException as error:
        outcome.failure = Failure.of(error)
        waits = getattr(error, "waits", "")
        outcome.state = (WAITS, waits) if waits else (OVER, "failed")
    for comm in rank._comms.values():
        if comm._background is not None:
            comm._background.close()
    rank._endpoint.leave(over=outcome.state[0] == OVER)
    return outcome


def unpack(packed: bytes, rank: int, size: int) -> Outcome:
    """The outcome that a rank's process has sent; what cannot be read back is that rank's error."""
    try:
        return pickle.loads(packed)
    except Exception as error:
        what = f"rank {rank} of {size} returned what cannot be read back in the notebook"
        why = f"({type(error).__name__}: {error}): return numbers, text or tensors"
        return Outcome(failure=Failure.of(RankError(f"{what} {why}", rank)))


def conclude(outcomes: Sequence[Outcome]) -> tuple[list[Any], Trace]:
    """What the ranks returned and their trace; the error of the run if a rank failed.

    What processes printed is shown in rank order, each line marked with its rank.
    """
    for rank, outcome in enumerate(outcomes):
        for line in outcome.printed.splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")
    if any(outcome.failure for outcome in outcomes):
        raise run_error(outcomes)
    return [outcome.value for outcome in outcomes], Trace(outcome.events for outcome in outcomes)
