"""A message as one side asks for it (MPI's request, torch's `P2POp`), and who carries it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labutils.world.errors import MismatchError, Site, TimeoutError, place

if TYPE_CHECKING:
    from labutils.world.rank import Rank

# What a receiver may do with what arrives; the result is left in the receiver's own tensor.
REDUCE_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": Tensor.copy_,
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}


NO_TENSOR = torch.empty(0)  # stands in a request that is no message


@dataclass(slots=True, eq=False)
class CallSite:
    """A call in a rank's program and the line it stands in."""

    op: str
    axis: str  # of its communicator
    where: Site
    signature: str = ""  # what all ranks must agree on, as in "all_reduce(float32[4], op=sum)"

    def __str__(self) -> str:
        return f"{self.signature} on axis {self.axis!r} at {place(self.where)}"


@dataclass(slots=True, eq=False)
class Request:
    """One side of a message under way, or (without a tensor) an asynchronous collective."""

    call: CallSite  # the line that asked for it
    rank: int  # of this side, in the world
    peer: int = -1  # the rank of the other side
    channel: int = -1  # what one rank sends to another on one channel arrives in that order
    tensor: Tensor = NO_TENSOR  # contiguous memory that is read, or written to
    sending: bool = False
    reduce: str = "copy"  # what is done with what arrives, a key of REDUCE_OPS
    done: bool = False
    error: BaseException | None = None
    result: Any = None  # of a collective, until its rank takes it
    span: tuple[float, float] | None = None
    state: Any = None  # the endpoint's own
    wakeup: Any = None  # what a thread that waits for it sleeps on

    def __str__(self) -> str:
        if self.call.signature or self.tensor is NO_TENSOR:
            return str(self.call)
        what = describe(self.tensor)
        verb = f"send({what}) to" if self.sending else f"recv({what}) from"
        plain = self.call.op in ("send", "recv", "send_recv")
        inside = "" if plain else f" inside {self.call.op}"
        return f"{verb} rank {self.peer}{inside} at {place(self.call.where)}"

    def accept(self, data: Tensor, first: int = 0) -> None:
        """Put `data` into this request's tensor from element `first` on, or reduce with it."""
        with torch.no_grad():
            mine = self.tensor.view(-1)[first : first + data.numel()]
            REDUCE_OPS[self.reduce](mine, data)


class Endpoint:
    """How ranks reach each other: what an engine provides; half of it few engines need."""

    def reset(self, run: int) -> None:
        """Begin a run."""

    def post(self, *requests: Request) -> None:
        """Start messages; several at once go both ways at the same time."""

    def wait(self, request: Request) -> None:
        """Return when `request` is done; raise Stopped if another rank has failed.

        Its memory is given up here and not before, so that what a rank holds at a line of its
        program does not depend on when the others came.
        """
        self.until_done(request)
        request.tensor = NO_TENSOR

    def until_done(self, request: Request) -> None:
        """Return when `request` is done: what an engine provides for `wait`."""

    def watch(self, request: Request) -> None:
        """See that `request` moves on while the rank computes."""

    def begin(self, worker: object) -> None:
        """One thing more for `worker`, a thread beside the rank's program: it may move while it has
        any."""

    def finish(self, request: Request, worker: object) -> None:
        """Mark `request` as done, one thing fewer for `worker`, and wake who waits for it."""
        request.done = True

    def leave(self, over: bool) -> None:
        """The rank takes no more part in this run: its program is over, or gave up waiting."""


class Work:
    """Something under way: `wait()` returns its result, `done()` tells whether it is there."""

    def __init__(self, owner: "Rank", request: Request, result: Tensor | None = None) -> None:
        self._owner = owner
        self._request = request
        self._result: Any = result
        owner._pending[self] = None

    def wait(self) -> Any:
        """The result: the received tensor, the collective's value, or None for a send. Raises what
        went wrong with it."""
        self._owner._endpoint.wait(self._request)
        self._owner._pending.pop(self, None)
        if self._request.error is not None:
            raise self._request.error
        if self._request.result is not None:  # the caller's alone from now on: a thread that has
            self._result, self._request.result = self._request.result, None  # done it may live on
        return self._result

    def done(self) -> bool:
        """Whether the result is there."""
        return self._request.done

    @property
    def span(self) -> tuple[float, float]:
        """When a collective was under way: from and to, in seconds of `time.perf_counter`; a
        RuntimeError before it has ended."""
        if self._request.span is None:
            remedy = "and only once it has ended: call wait() first"
            raise RuntimeError(f"only an asynchronous collective has a span, {remedy}")
        return self._request.span


def describe(x: Tensor) -> str:
    """A tensor's dtype and shape, as in 'float32[4, 2]'."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def misfit(send: Request, receive: object) -> MismatchError:
    """The error for a message that is not what its receiver expects."""
    both = f"  rank {send.rank}: {send}\n  rank {send.peer}: {receive}"
    return MismatchError(f"a message does not fit where it is received:\n{both}", str(send))


TIMEOUT = 120.0
"""Seconds that a rank waits for another one, unless told otherwise: it may be on a busy machine."""


def out_of_time(seconds: float, request: Request) -> TimeoutError:
    """The error of a rank that has waited too long for a message."""
    return TimeoutError(f"waited {seconds:g} s in {request.call.op}", str(request))
