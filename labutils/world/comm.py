"""Comm, a communicator that keeps books: what leaves a rank leaves through it, and is counted."""

import contextlib
import functools
import operator
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch
from torch import Tensor

from labutils import collectives, units
from labutils.collectives.algorithms import Sizes, is_rank
from labutils.config import COMM_AXES, Mesh
from labutils.trace import Event
from labutils.world.errors import site
from labutils.world.messages import REDUCE_OPS, CallSite, Request, Work, describe

if TYPE_CHECKING:
    from labutils.world.rank import Rank

_CALLS = 64  # the last ones, which are compared between ranks
_BY_ROWS = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")
_WRITES_OUT = ("all_reduce", "reduce_scatter", "all_gather")  # algorithms that know `out`


class How(TypedDict, total=False):
    """Where a collective's result goes, and whether the call returns a `Work` at once."""

    out: Tensor | None
    async_op: bool


class Comm:
    """The ranks of one mesh axis, or of several joined ones, as one of them sees them.

    `send`, `recv` and the rest count ranks inside this group. Sends are rendezvous: they return
    when the receiver has the bytes. Collectives are `torch.distributed`'s, but functional: they
    return their result, write into `out=` if given, and with `async_op=True` return a `Work` at
    once, whose `wait()` gives the result.
    """

    def __init__(self, owner: "Rank", axis: str, ranks: Sequence[int], channel: int) -> None:
        self.axis = axis
        self.ranks = ranks
        self.rank = ranks.index(owner.rank)
        self.size = len(ranks)
        self._owner = owner
        self._endpoint = owner._endpoint
        self._events = owner._events
        name = axis + " (async)" * (channel % 2)
        self._calls = owner._called.setdefault((name, ranks), deque(maxlen=_CALLS))
        self._channel = channel  # odd: that of asynchronous collectives
        self._name: str | None = None
        self._call: CallSite | None = None
        self._background: Background | None = None
        self._open: list[Request] | None = None  # messages that `at_once` will wait for

    def __repr__(self) -> str:
        return f"Comm(axis={self.axis!r}, rank={self.rank}, size={self.size})"

    @property
    def mesh(self) -> Mesh:
        """The mesh of the world that its ranks are of."""
        return self._owner.mesh

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors lie."""
        return self._owner.device

    def check_all(self, what: str) -> None:
        """Raises ValueError if these are not all ranks of the mesh, who must answer `what`
        together."""
        if self.size < self.mesh.size:
            of = f"{what} is a matter of all {self.mesh.size} ranks of the mesh"
            raise ValueError(f"{of}, and {self.axis!r} has {self.size} of them: give rank.comm()")

    def __deepcopy__(self, memo: Any) -> "Comm":
        """Refused: a copy of a module would call the others where they do not call it."""
        remedy = "copy the module first, and change the copy"
        raise TypeError(f"{self!r} is this rank's door to others and has no copy: {remedy}")

    @property
    def group(self) -> Any:
        """The real `torch.distributed.ProcessGroup` of these ranks, whose bytes nobody counts.

        Raises RuntimeError on threads and in a dry run, which have none.
        """
        if self._owner._groups is None:
            remedy = 'use World(..., engine="processes")'
            raise RuntimeError(f"neither threads nor a dry run have a ProcessGroup: {remedy}")
        return self._owner._groups(tuple(self.ranks))

    @property
    def generator(self) -> torch.Generator:
        """Random numbers that these ranks have in common, as long as all draw the same of them."""
        return self._owner._random.shared(self.axis, self.ranks[0])

    def neighbours(self, count: int) -> "Comm":
        """The communicator of this rank's block, of the blocks of `count` that the ranks fall into
        (torch's new_subgroups); ValueError where they do not fill the ranks."""
        if self.size % (count := units.whole(count, "count", 1)):
            remedy = "choose a divisor"
            raise ValueError(f"blocks of {count} do not fill {self.size} ranks: {remedy}")
        first = self.rank - self.rank % count
        ranks, known = self.ranks[first : first + count], self._owner._comms
        name = f"{self.axis} of {ranks}"
        if name not in known:
            channel = self._channel + (2 * count << len(COMM_AXES))  # not that of all ranks
            known[name] = type(self)(self._owner, self.axis, ranks, channel)
        return known[name]

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Messages sent inside are booked under `name`; of nested names the outermost wins."""
        before, self._name = self._name, self._name or name
        try:
            yield
        finally:
            self._name = before

    # -- messages ----------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        """Nothing; returns when rank `dst` has received `x`."""
        self._endpoint.wait(self._send(x, dst))

    def recv(self, out: Tensor, src: int, *, reduce: str | None = None) -> Tensor:
        """`out`, filled with what rank `src` sends, or reduced with it.

        reduce: "sum", "product", "min" or "max"
        """
        self._endpoint.wait(self._recv(out, src, reduce))
        return out

    def send_recv(
        self, x: Tensor, dst: int, out: Tensor, src: int, *, reduce: str | None = None
    ) -> Tensor:
        """`out`, filled with what rank `src` sends while `x` goes to rank `dst`, or, by `reduce`,
        such as "sum", taken together with it.

        Each segment is reduced as it arrives, while the next one is on its way.
        """
        call = self._call_site("send_recv")
        send = self._outgoing(x, dst, call)
        receive = self._incoming(out, src, reduce, call)
        self._endpoint.post(receive, send)
        name = self._name or call.op
        event = Event(name, self.axis, send.peer, x.nbytes, receive.peer, out.nbytes)
        self._events.append(event)
        if self._open is None:
            self._endpoint.wait(send)
            self._endpoint.wait(receive)
        else:
            self._open += send, receive
        return out

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """`send_recv` inside does not wait: all have gone and come at the end of the region, and
        what they fill is not to be read before."""
        self._open = []
        try:
            yield
            requests = self._open
        finally:
            self._open = None
        for request in requests:
            self._endpoint.wait(request)

    def isend(self, x: Tensor, dst: int) -> Work:
        """A `Work` that is done when rank `dst` has received `x`; don't write into `x` before."""
        return self._watched(self._send(x, dst))

    def irecv(self, out: Tensor, src: int, *, reduce: str | None = None) -> Work:
        """A `Work` whose result is `out`, filled or reduced; don't touch `out` before."""
        return self._watched(self._recv(out, src, reduce), out)

    def _send(self, x: Tensor, dst: int) -> Request:
        request = self._outgoing(x, dst, self._call_site("send"))
        self._endpoint.post(request)
        self._events.append(Event(self._name or "send", self.axis, request.peer, x.nbytes))
        return request

    def _recv(self, out: Tensor, src: int, reduce: str | None) -> Request:
        request = self._incoming(out, src, reduce, self._call_site("recv"))
        self._endpoint.post(request)
        name = self._name or "recv"
        self._events.append(Event(name, self.axis, source=request.peer, received=out.nbytes))
        return request

    def _watched(self, request: Request, result: Tensor | None = None) -> Work:
        self._endpoint.watch(request)
        return Work(self._owner, request, result)

    def _call_site(self, op: str) -> CallSite:
        """The collective that this message is part of, or the line that asks for it."""
        return self._call or CallSite(self._name or op, self.axis, site(sys._getframe(2)))

    def _outgoing(self, x: Tensor, dst: int, call: CallSite) -> Request:
        """What travels is a value: no autograd graph spans two ranks, no conjugation is pending."""
        self._contiguous(x, call.op)
        value = x.detach().resolve_conj().resolve_neg()
        ends = self._owner.rank, self._peer(dst)
        return Request(call, *ends, self._channel, value, sending=True)

    def _incoming(self, out: Tensor, src: int, reduce: str | None, call: CallSite) -> Request:
        self._contiguous(out, call.op)
        if out.is_conj() or out.is_neg():
            what = f"{call.op} cannot write into a lazily conjugated or negated tensor"
            raise ValueError(f"{what}: pass out.resolve_conj().resolve_neg()")
        reduce = reduce or "copy"
        if reduce not in REDUCE_OPS:
            raise ValueError(f"cannot reduce by {reduce!r}: use one of {', '.join(REDUCE_OPS)}")
        ends = self._owner.rank, self._peer(src)
        return Request(call, *ends, self._channel, out.detach(), reduce=reduce)

    def _contiguous(self, x: Tensor, op: str) -> None:
        self._dense(x, op)
        if not x.is_contiguous():
            got = f"{describe(x)} with strides {x.stride()}"
            raise ValueError(f"{op} takes a contiguous tensor, got {got}: pass x.contiguous()")

    def _dense(self, x: Tensor, op: str) -> None:
        if not isinstance(x, Tensor):
            got = f"{x!r} ({type(x).__name__})"
            raise TypeError(f"{op} takes a tensor, got {got}: wrap it with torch.tensor(...)")
        device = self._owner.device.type
        if x.layout is not torch.strided or x.is_quantized or x.device.type != device:
            got = f"one with {x.layout} on {x.device}"
            raise TypeError(f"{op} takes a dense tensor on {device}, got {got}: convert it first")

    def _peer(self, rank: int) -> int:
        if not is_rank(rank, self.size):
            known = f"use 0 … {self.size - 1}, as in (rank + 1) % size"
            here = f"on axis {self.axis!r} of {self.size} ranks"
            raise ValueError(f"there is no rank {rank!r} {here}: {known}")
        if rank == self.rank:
            itself = f"rank {rank} on axis {self.axis!r} sends to itself"
            raise ValueError(f"{itself}: nothing needs to travel, use x.clone()")
        return self.ranks[rank]

    # -- collectives -------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: str = "sum", **how: Unpack[How]) -> Any:
        """The sum (or `op`) of x over all ranks, on every rank."""
        return self._collective("all_reduce", collectives.all_reduce_ring, x, {"op": op}, **how)

    def reduce_scatter(self, x: Tensor, op: str = "sum", **how: Unpack[How]) -> Any:
        """This rank's share of the rows of the sum (or `op`) of x over all ranks."""
        run = collectives.reduce_scatter_ring
        return self._collective("reduce_scatter", run, x, {"op": op}, **how)

    def all_gather(self, x: Tensor, *, sizes: Sizes = None, **how: Unpack[How]) -> Any:
        """The rows of all ranks, in rank order, on every rank.

        sizes: the rows that each rank brings, if they differ
        """
        arguments = _given(sizes=sizes)
        return self._collective("all_gather", collectives.all_gather_ring, x, arguments, **how)

    def broadcast(self, x: Tensor, src: int = 0, **how: Unpack[How]) -> Any:
        """Rank `src`'s x, on every rank; elsewhere only the shape and dtype of x matter."""
        return self._collective("broadcast", collectives.broadcast_tree, x, {"src": src}, **how)

    def scatter(self, x: Tensor, src: int = 0, **how: Unpack[How]) -> Any:
        """This rank's share of the rows of rank `src`'s x; elsewhere only its form matters."""
        return self._collective("scatter", collectives.scatter_star, x, {"src": src}, **how)

    def gather(self, x: Tensor, dst: int = 0, *, sizes: Sizes = None, **how: Unpack[How]) -> Any:
        """At rank `dst` the rows of all ranks, in rank order, and None elsewhere.

        sizes: the rows that each rank brings, if they differ
        """
        arguments = {"dst": dst} | _given(sizes=sizes)
        return self._collective("gather", collectives.gather_star, x, arguments, **how)

    def reduce(self, x: Tensor, dst: int = 0, op: str = "sum", **how: Unpack[How]) -> Any:
        """At rank `dst` the sum (or `op`) of x over all ranks, and None elsewhere."""
        arguments = {"dst": dst, "op": op}
        return self._collective("reduce", collectives.reduce_tree, x, arguments, **how)

    def all_to_all(
        self, x: Tensor, send_sizes: Sizes = None, recv_sizes: Sizes = None, **how: Unpack[How]
    ) -> Any:
        """The rows that every rank has for this one, in rank order.

        send_sizes, recv_sizes: the rows for and from each rank; without them all shares are equal,
            or it is a ValueError
        """
        if send_sizes is None and isinstance(x, Tensor) and x.ndim and len(x) % self.size:
            got = f"all_to_all got {len(x)} rows for {self.size} ranks, which are no equal shares"
            raise ValueError(f"{got}: pass send_sizes and recv_sizes")
        arguments = _given(send_sizes=send_sizes, recv_sizes=recv_sizes)
        return self._collective("all_to_all", _all_to_all, x, arguments, **how)

    def barrier(self) -> None:
        """Nothing, once every rank has come here.

        In step k each rank hears from the rank 2ᵏ before it: after ⌈log₂ N⌉ it has heard of all.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device=self._owner.device)
        self._collective("barrier", _dissemination_barrier, nothing, {})

    def _collective(
        self,
        op: str,
        algorithm: Callable[..., Any],
        x: Tensor,
        arguments: dict[str, Any],
        *,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """What `algorithm(x, comm, **arguments)` gives, now or later."""
        self._dense(x, op)
        if x.ndim == 0 and op in _BY_ROWS:
            got = f"{op} deals in rows and got a tensor without dimensions"
            raise ValueError(f"{got}: pass x.reshape(1)")
        for name, value in arguments.items():  # numpy's numbers read as Python's do
            arguments[name] = operator.index(value) if units.is_whole(value) else value
        call = CallSite(op, self.axis, site(sys._getframe(2)), _signature(op, x, arguments))
        if op in _WRITES_OUT:
            arguments, out = arguments | {"out": out}, None
        run = functools.partial(algorithm, x.resolve_conj().resolve_neg(), **arguments)
        if not async_op:
            return self._run(call, run, out)
        if self._background is None:
            twin = type(self)(self._owner, self.axis, self.ranks, self._channel + 1)
            self._background = self._in_background(twin)
        return Work(self._owner, self._background.start(call, run, out, self._name))

    def _in_background(self, twin: "Comm") -> "Background":
        """What runs asynchronous collectives, over these ranks on a channel of their own."""
        return Background(twin)

    def _run(self, call: CallSite, run: Callable[["Comm"], Any], out: Tensor | None) -> Any:
        number, _ = self._calls[-1] if self._calls else (0, None)
        self._calls.append((number + 1, call))
        self._call = call
        try:
            with self.record(call.op):
                result = run(self)
        finally:
            self._call = None
        if out is None or result is None:
            return result
        if out.shape != result.shape or out.dtype != result.dtype:
            both = f"the result of {call.op} is {describe(result)} and out is {describe(out)}"
            raise ValueError(f"{both}: give an out like it")
        out.detach().copy_(result)
        return out


def _given(**sizes: Sizes) -> dict[str, list[int]]:
    """The rows of each rank where they are given, in Python's numbers whoever made them."""
    try:
        given = {name: list(each) for name, each in sizes.items() if each is not None}
    except TypeError:
        remedy = "give the rows of each rank, as in [2, 3]"
        raise TypeError(f"{', '.join(sizes)} must be a list: {remedy}; got {sizes}") from None
    return {name: [units.whole(size, name) for size in each] for name, each in given.items()}


def _signature(op: str, x: Tensor, arguments: dict[str, Any]) -> str:
    """What all ranks must agree on in a collective; shapes differ where sizes are given."""
    texts = [describe(x)] if op != "barrier" else []
    if any(name.endswith("sizes") for name in arguments):
        texts = [f"dtype={str(x.dtype).removeprefix('torch.')}"]
    if op == "all_to_all" and arguments:
        return f"{op}({texts[0]}, sizes given)"
    return f"{op}({', '.join(texts + [f'{name}={value}' for name, value in arguments.items()])})"


def _all_to_all(x: Tensor, comm: Comm, **sizes: Any) -> Tensor:
    """Pairwise, but no step waits for the one before: each has another pair of ranks."""
    with comm.at_once():
        return collectives.all_to_all_pairwise(x, comm, **sizes)


def _dissemination_barrier(nothing: Tensor, comm: Comm) -> None:
    distance = 1
    while distance < comm.size:
        after, before = (comm.rank + distance) % comm.size, (comm.rank - distance) % comm.size
        comm.send_recv(nothing, after, nothing, before)
        distance *= 2


class Background:
    """A thread that runs the asynchronous collectives of one axis, in program order.

    It is to a rank what a communication stream is to a GPU.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.jobs: Any = queue.SimpleQueue()
        self.closed = False
        threading.Thread(target=self._work, name=f"{comm.axis}-async", daemon=True).start()

    def start(
        self, call: CallSite, run: Callable[[Comm], Any], out: Tensor | None, name: str | None
    ) -> Request:
        """The pending result of `run`, into `out`; its messages are booked at this point of the
        rank's program, under the name that is recorded there. Errors name the `call`."""
        owner, events = self.comm._owner, list[Event]()
        request = Request(call, owner.rank)
        owner._events.append(events)
        self.comm._endpoint.begin(self)
        self.jobs.put((request, events, run, out, name))
        return request

    def close(self) -> None:
        """End the thread after what it does now; what still waits for its turn is dropped."""
        self.closed = True
        self.jobs.put(None)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            request = job[0] if self.closed else self._do(*job)
            del job  # what it worked on is the rank's alone when the rank learns that it is done
            self.comm._endpoint.finish(request, self)
            del request

    def _do(
        self, request: Request, events: list[Event], run: Callable[[Comm], Any],
        out: Tensor | None, name: str | None,
    ) -> Request:  # fmt: skip
        self.comm._events, self.comm._name = events, name
        start = time.perf_counter()
        try:
            with torch.no_grad():
                request.result = self.comm._run(request.call, run, out)
        except BaseException as error:
            request.error = error
        request.span = start, time.perf_counter()
        return request
