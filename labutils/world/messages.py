"""A message as one side asks for it (MPI's request, torch's `P2POp`), and who carries it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labutils.world.errors import MismatchError, Site, TimeoutError, place

# What a receiver may do with what arrives; the result is left in the receiver's own tensor.
REDUCE_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": Tensor.copy_,
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}


@dataclass(slots=True, eq=False)
class CallSite:
    """A call in a rank's program and the line it stands in.

    op: the name of the operation
    axis: the axis of its communicator
    where: file, line and function
    signature: of a collective, what all ranks must agree on, as in "all_reduce(float32[4], op=sum)"
    """

    op: str
    axis: str
    where: Site
    signature: str = ""

    def __str__(self) -> str:
        return f"{self.signature} on axis {self.axis!r} at {place(self.where)}"


@dataclass(slots=True, eq=False)
class Request:
    """One side of a message under way, or (without a tensor) an asynchronous collective under way.

    call: the line that asked for it
    peer: the other side's rank in the world
    channel: messages of one channel between two ranks arrive in the order in which they were sent
    tensor: contiguous memory that is read, or written to
    sending: which side this is
    reduce: what is done with what arrives, a key of REDUCE_OPS
    state: the endpoint's own
    wakeup: what a thread that waits for it sleeps on
    """

    call: CallSite
    peer: int = -1
    channel: int = -1
    tensor: Tensor | None = None
    sending: bool = False
    reduce: str = "copy"
    done: bool = False
    error: BaseException | None = None
    result: Any = None
    span: tuple[float, float] | None = None
    state: Any = None
    wakeup: Any = None

    def __str__(self) -> str:
        if self.call.signature or self.tensor is None:
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
    """How one rank reaches the others: what an engine provides; half of it few engines need."""

    def post(self, *requests: Request) -> None:
        """Start messages; several at once go both ways at the same time."""
        raise NotImplementedError

    def wait(self, request: Request) -> None:
        """Return when `request` is done; raise Stopped if another rank has failed."""
        raise NotImplementedError

    def watch(self, request: Request) -> None:
        """See that `request` moves on while the rank computes."""

    def finish(self, request: Request) -> None:
        """Mark `request` as done and wake who waits for it."""
        request.done = True

    def add_actor(self, step: int) -> None:
        """Count one more (or one fewer) thread that works for this rank beside its program."""

    def leave(self, over: bool) -> None:
        """The rank takes no more part in this run: its program is over, or gave up waiting."""


class Work:
    """Something under way: `wait()` returns its result, `done()` tells whether it is there."""

    def __init__(self, endpoint: Endpoint, request: Request, pending: dict[Request, None]) -> None:
        self._endpoint = endpoint
        self._request = request
        self._pending = pending
        self._result: Any = None

    def wait(self) -> Any:
        """The result: the received tensor, the collective's value, or None for a send."""
        self._endpoint.wait(self._request)
        self._pending.pop(self._request, None)
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
        """When a collective was under way: from and to, in seconds of `time.perf_counter`."""
        if self._request.span is None:
            remedy = "and only once it has ended: call wait() first"
            raise RuntimeError(f"only an asynchronous collective has a span, {remedy}")
        return self._request.span


def describe(x: Tensor) -> str:
    """A tensor's dtype and shape, as in 'float32[4, 2]'."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def misfit(sender: int, send: object, receiver: int, receive: object) -> MismatchError:
    """The error for a message that is not what its receiver expects."""
    both = f"  rank {sender}: {send}\n  rank {receiver}: {receive}"
    error = MismatchError(f"a message does not fit where it is received:\n{both}")
    error.misfit = True
    return error


def out_of_time(seconds: float, request: Request) -> TimeoutError:
    """The error of a rank that has waited too long for a message."""
    op = request.call.op
    return TimeoutError(f"waited {seconds:g} s in {op}", str(request), op)
