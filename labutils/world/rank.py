"""Rank, what a rank's program is given, and Outcome, how the program ended there."""

import contextlib
import io
import itertools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from labutils.config import COMM_AXES, Mesh
from labutils.trace import Event, Trace
from labutils.world.comm import Comm
from labutils.world.errors import ABSENT, OVER, WAITS, Failure, State, Stopped, run_error
from labutils.world.messages import CallSite, Endpoint, Request, Work

WORLD = "world"
_PRINTS = 1_000_000  # characters that are kept of what a rank prints


class Calls:
    """The last collectives that a rank called on one communicator, to compare with the others'."""

    def __init__(self) -> None:
        self.count = 0
        self.last: deque[tuple[int, CallSite]] = deque(maxlen=64)

    def append(self, call: CallSite) -> None:
        """Note one more call."""
        self.count += 1
        self.last.append((self.count, call))


class Output(io.TextIOBase):
    """What a rank prints, up to a limit."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.length = 0

    def write(self, text: str) -> int:
        """Keep `text`, or count it where there is too much already."""
        if self.length < _PRINTS:
            self.texts.append(text[: _PRINTS - self.length])
        self.length += len(text)
        return len(text)

    def __str__(self) -> str:
        lost = self.length - _PRINTS
        return "".join(self.texts) + f"\n… and {lost:,} characters more" * (lost > 0)


@dataclass
class Outcome:
    """How a rank's program ended.

    value: what it returned
    events: its messages, in program order
    failure: its exception
    state: what it did when the run ended: waited, where; was over, how; or still computed, where
    printed: what it wrote
    calls: its last collectives, by axis and ranks
    touched_group: whether it has used a real process group
    """

    value: Any = None
    events: tuple[Event, ...] = ()
    failure: Failure | None = None
    state: State = (OVER, "finished")
    printed: str = ""
    calls: dict[tuple, Calls] = field(default_factory=dict)
    touched_group: bool = False


class Rank:
    """What a rank's program is given: its number, its place on the mesh, its doors to the others.

    rank: its number in the world
    size: the number of ranks
    mesh, coords: the mesh, and where this rank stands on each axis
    device: where its tensors lie
    generator: its own random numbers, which repeat from run to run
    """

    _comm_class = Comm

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        endpoint: Endpoint,
        device: torch.device,
        groups: Callable[[tuple[int, ...]], Any] | None = None,
    ) -> None:
        self.rank = rank
        self.mesh = mesh
        self.size = mesh.size
        self.coords = mesh.coords(rank)
        self.device = device
        self.generator = torch.Generator(device=device).manual_seed(rank)
        self._endpoint = endpoint
        self._groups = groups
        self._events: list[Event | list[Event]] = []
        self._pending: dict[Request, None] = {}
        self._output = Output()
        self._comms: dict[str, Comm] = {}
        self._called: dict[tuple, Calls] = {}

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.size})"

    def comm(self, *axes: str) -> Comm:
        """The communicator of the ranks that share these axes; without a name, of all ranks.

        Several axes are joined: `rank.comm("dp", "cp")` is named "dp_cp" and spans their product,
        in the order of rank numbers, whichever axis is named first.
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
            ranks = (self.rank,) if axes else tuple(range(self.size))
            for axis in axes:
                groups = (self.mesh.group(rank, axis) for rank in ranks)
                ranks = tuple(sorted(itertools.chain.from_iterable(groups)))
            channel = sum(1 << COMM_AXES.index(axis) for axis in axes)
            self._comms[name] = self._comm_class(self, name, ranks, channel)
        return self._comms[name]

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Like `print`; shown in rank order, each line marked with its rank."""
        self._output.write(sep.join(map(str, values)) + end)

    def _calls(self, axis: str, ranks: tuple[int, ...]) -> Calls:
        return self._called.setdefault((axis, ranks), Calls())

    def _finish(self) -> tuple[Event, ...]:
        """The rank's events in program order, after all that it started has ended."""
        for request in list(self._pending):
            Work(self._endpoint, request, self._pending).wait()
        flat: list[Event] = []
        for event in self._events:
            flat.extend(event if isinstance(event, list) else (event,))
        return tuple(flat)

    def _close(self) -> None:
        for comm in self._comms.values():
            if comm._background is not None:
                comm._background.close()


def perform(rank: Rank, program: Callable[[], Any], *, capture: bool = False) -> Outcome:
    """How `program` ends on this rank.

    capture: whether plain `print` and warnings, too, are kept for the notebook
    """
    outcome = Outcome(calls=rank._called)
    try:
        with contextlib.ExitStack() as stack:
            if capture:
                stack.enter_context(contextlib.redirect_stdout(rank._output))
                stack.enter_context(contextlib.redirect_stderr(rank._output))
            outcome.value = program()
            outcome.events = rank._finish()
    except Stopped as stopped:
        outcome.state = (WAITS, str(stopped)) if stopped.args else (ABSENT, "")
    except BaseException as error:
        outcome.failure = Failure.of(error)
        waits = getattr(error, "waits", "")
        outcome.state = (WAITS, waits) if waits else (OVER, "failed")
    outcome.printed = str(rank._output)
    rank._endpoint.leave(over=outcome.state[0] == OVER)
    rank._close()
    return outcome


def show_output(rank: int, printed: str) -> None:
    """Write what a rank printed, each line marked with its rank."""
    for line in printed.splitlines():
        sys.stdout.write(f"[rank {rank}] {line}\n")


def conclude(outcomes: Sequence[Outcome]) -> tuple[list[Any], Trace]:
    """What the ranks returned and their trace; the error of the run if a rank failed."""
    for rank, outcome in enumerate(outcomes):
        show_output(rank, outcome.printed)
    if any(outcome.failure for outcome in outcomes):
        raise run_error(outcomes)
    return [outcome.value for outcome in outcomes], Trace(outcome.events for outcome in outcomes)
