"""The only door between ranks: what leaves a rank leaves through its `Comm`, which counts it as it passes."""

import contextlib
import functools
import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from labutils import collectives
from labutils.config import AXES, Mesh
from labutils.trace import Event
from labutils.world.board import Board
from labutils.world.errors import MismatchError, Site, place, site

WORLD = "world"
_BY_ROWS = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")

# What a receiver may do with what arrives; the result is left in the receiver's own tensor.
REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "copy": Tensor.copy_,
    "sum": Tensor.add_,
    "product": Tensor.mul_,
    "min": lambda mine, theirs: torch.minimum(mine, theirs, out=mine),
    "max": lambda mine, theirs: torch.maximum(mine, theirs, out=mine),
}


class Call:
    """A call that a rank's program made: the operation, its arguments, its axis, and the line it stands in."""

    __slots__ = ("axis", "detail", "op", "where")

    def __init__(self, op: str, detail: str, axis: str, where: Site) -> None:
        self.op, self.detail, self.axis, self.where = op, detail, axis, where

    def __str__(self) -> str:
        return f"{self.op}({self.detail}) on axis {self.axis!r} at {place(self.where)}"


class Op:
    """One message from one side: a tensor on its way to or from a peer, or (with no tensor) work of the rank's own."""

    __slots__ = (
        "call",
        "channel",
        "done",
        "error",
        "gate",
        "peer",
        "reduce",
        "result",
        "sending",
        "span",
        "state",
        "tensor",
    )

    def __init__(
        self,
        sending: bool,
        channel: int,
        peer: int,
        tensor: Tensor | None,
        call: Call,
        reduce: str | None = None,
    ) -> None:
        self.sending, self.channel, self.peer, self.tensor, self.call, self.reduce = (
            sending,
            channel,
            peer,
            tensor,
            call,
            reduce,
        )
        self.done, self.gate, self.error, self.result, self.state, self.span = (
            False,
            None,
            None,
            None,
            None,
            None,
        )

    def __str__(self) -> str:
        if self.call.detail or self.tensor is None:
            return str(self.call)
        verb = (
            f"send({describe(self.tensor)}) to"
            if self.sending
            else f"recv({describe(self.tensor)}) from"
        )
        inside = (
            f" inside {self.call.op}" if self.call.op not in ("send", "recv", "send_recv") else ""
        )
        return f"{verb} rank {self.peer}{inside} at {place(self.call.where)}"


def describe(x: Tensor) -> str:
    """A tensor's dtype and shape, as in 'float32[4, 2]'."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def misfit(sender: int, send: object, receiver: int, receive: object) -> MismatchError:
    """The error for a message that is not what its receiver expects."""
    return MismatchError(
        f"a message does not fit where it is received:\n  rank {sender}: {send}\n  rank {receiver}: {receive}"
    )


def show(printed: Sequence[Sequence[str]]) -> None:
    """Write what ranks printed, in rank order, each line marked with its rank."""
    for rank, texts in enumerate(printed):
        for line in "".join(texts).splitlines():
            sys.stdout.write(f"[rank {rank}] {line}\n")


class Endpoint(Protocol):
    """How one rank reaches the others: what an engine provides."""

    def post(self, *ops: Op) -> None:
        """Start messages; several at once go both ways at the same time."""

    def wait(self, op: Op) -> None:
        """Return when `op` is done; raise Stopped if another rank has failed."""

    def watch(self, op: Op) -> None:
        """See that `op` moves on while the rank computes."""

    def finish(self, op: Op) -> None:
        """Mark `op` as done and wake who waits for it."""

    def add_actor(self, step: int) -> None:
        """Count one more (or one fewer) thread that works for this rank beside its program."""


class Work:
    """Something under way: `wait()` returns its result, `done()` tells whether that would return at once."""

    def __init__(self, endpoint: Endpoint, op: Op, pending: dict[Op, None]) -> None:
        self._endpoint, self._op, self._pending = endpoint, op, pending

    def wait(self) -> Any:
        """The result: the received tensor, the collective's value, or None for a send."""
        self._endpoint.wait(self._op)
        self._pending.pop(self._op, None)  # the result is the caller's alone from now on
        if self._op.error is not None:
            raise self._op.error
        return self._op.result

    def done(self) -> bool:
        """Whether the result is there."""
        return self._op.done

    @property
    def span(self) -> tuple[float, float]:
        """When a collective that has ended was under way: from and to, in seconds on the clock of `time.perf_counter`."""
        if self._op.span is None:
            raise RuntimeError(
                "only an asynchronous collective has a span, and only once it has ended: call wait() first"
            )
        return self._op.span


class Comm:
    """The ranks of one mesh axis, or of several joined ones, seen from one of them; `send`, `recv` and the rest count ranks inside
    this group.

    Sends are rendezvous: they return when the receiver has the bytes. Collectives are `torch.distributed`'s, but functional: they return
    their result, write into `out=` if given, and with `async_op=True` return a `Work` at once.
    """

    def __init__(
        self, owner: "Rank", axis: str, ranks: tuple[int, ...], channel: int, lane: int = 0
    ) -> None:
        self.axis = axis
        self.ranks = ranks
        self.rank = ranks.index(owner.rank)
        self.size = len(ranks)
        self._owner = owner
        self._endpoint = owner._endpoint
        self._board = owner._board
        self._events = owner._events
        self._channel = 2 * channel + lane  # no message of one channel waits for one of another
        self._group = axis + " (async)" * lane
        self._name: str | None = None
        self._call: Call | None = None
        self._calls = 1
        self._helper: Helper | None = None

    def __repr__(self) -> str:
        return f"Comm(axis={self.axis!r}, rank={self.rank}, size={self.size})"

    @property
    def group(self) -> Any:
        """The real `torch.distributed.ProcessGroup` of these ranks, whose bytes nobody counts (processes and torchrun only)."""
        if self._owner._groups is None:
            raise RuntimeError(
                "ranks that are no processes have no torch.distributed.ProcessGroup: "
                'use World(..., engine="processes")'
            )
        return self._owner._groups(self.ranks)

    @contextlib.contextmanager
    def record(self, name: str) -> Iterator[None]:
        """Messages sent inside are booked under `name`; of nested names the outermost wins."""
        before, self._name = self._name, self._name or name
        try:
            yield
        finally:
            self._name = before

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, x: Tensor, dst: int) -> None:
        """Nothing; returns when rank `dst` has received `x`."""
        self._endpoint.wait(self._send(x, dst, "send"))

    def recv(self, out: Tensor, src: int, *, reduce: str | None = None) -> Tensor:
        """`out`, filled with what rank `src` sends, or reduced with it ("sum", "product", "min", "max")."""
        self._endpoint.wait(self._recv(out, src, "recv", reduce))
        return out

    def send_recv(
        self, x: Tensor, dst: int, out: Tensor, src: int, *, reduce: str | None = None
    ) -> Tensor:
        """`out`, filled or reduced with what rank `src` sends while `x` goes to rank `dst`, both at once.

        With `reduce` the arithmetic is done on each segment as it arrives, while the next one is on its way.
        """
        x, out_ = self._outgoing(x, "send_recv"), self._incoming(out, "send_recv")
        to, source = self._peer(dst), self._peer(src)
        call = self._call or Call(self._name or "send_recv", "", self.axis, site(sys._getframe(1)))
        receive = Op(False, self._channel, source, out_, call, self._reduce(reduce))
        send = Op(True, self._channel, to, x, call)
        self._endpoint.post(receive, send)
        self._events.append(
            Event(self._name or "send_recv", self.axis, to, x.nbytes, source, out_.nbytes)
        )
        self._endpoint.wait(send)
        self._endpoint.wait(receive)
        return out

    def isend(self, x: Tensor, dst: int) -> Work:
        """A `Work` that is done when rank `dst` has received `x`; don't write into `x` before."""
        return self._watched(self._send(x, dst, "send"))

    def irecv(self, out: Tensor, src: int, *, reduce: str | None = None) -> Work:
        """A `Work` whose result is `out`, filled or reduced with what rank `src` sends; don't touch `out` before."""
        op = self._recv(out, src, "recv", reduce)
        op.result = out
        return self._watched(op)

    def _send(self, x: Tensor, dst: int, verb: str) -> Op:
        x, to = self._outgoing(x, verb), self._peer(dst)
        call = self._call or Call(self._name or verb, "", self.axis, site(sys._getframe(2)))
        op = Op(True, self._channel, to, x, call)
        self._endpoint.post(op)
        self._events.append(Event(self._name or verb, self.axis, to, x.nbytes))
        return op

    def _recv(self, out: Tensor, src: int, verb: str, reduce: str | None) -> Op:
        out, source = self._incoming(out, verb), self._peer(src)
        call = self._call or Call(self._name or verb, "", self.axis, site(sys._getframe(2)))
        op = Op(False, self._channel, source, out, call, self._reduce(reduce))
        self._endpoint.post(op)
        self._events.append(
            Event(self._name or verb, self.axis, source=source, received=out.nbytes)
        )
        return op

    def _watched(self, op: Op) -> Work:
        self._endpoint.watch(op)
        return self._later(op)

    def _later(self, op: Op) -> Work:
        self._owner._pending[op] = None
        return Work(self._endpoint, op, self._owner._pending)

    def _outgoing(self, x: Tensor, verb: str) -> Tensor:
        """What travels is a value: no autograd graph spans two ranks, and a lazy conjugation or negation is carried out."""
        return self._contiguous(x, verb).detach().resolve_conj().resolve_neg()

    def _incoming(self, out: Tensor, verb: str) -> Tensor:
        if isinstance(out, Tensor) and (out.is_conj() or out.is_neg()):
            raise ValueError(
                f"{verb} cannot write into a lazily conjugated or negated tensor: "
                "pass out.resolve_conj().resolve_neg()"
            )
        return self._contiguous(out, verb).detach()

    def _contiguous(self, x: Tensor, verb: str) -> Tensor:
        self._dense(x, verb)
        if not x.is_contiguous():
            raise ValueError(
                f"{verb} takes a contiguous tensor, got {describe(x)} with strides {x.stride()}: "
                "pass x.contiguous()"
            )
        return x

    def _dense(self, x: Tensor, verb: str) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{verb} takes a tensor, got {x!r} ({type(x).__name__}): "
                "wrap it with torch.tensor(...)"
            )
        device = self._owner.device.type
        if x.layout is not torch.strided or x.is_quantized or x.device.type != device:
            raise TypeError(
                f"{verb} takes a dense tensor on {device}, got one with {x.layout} on {x.device}: "
                "convert it first"
            )

    def _peer(self, rank: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"a peer is a rank's number, got {rank!r} ({type(rank).__name__})")
        if not 0 <= rank < self.size:
            raise ValueError(
                f"there is no rank {rank} on axis {self.axis!r} of {self.size} ranks: use 0 … {self.size - 1}, as in (rank + 1) % size"
            )
        if rank == self.rank:
            raise ValueError(
                f"rank {rank} on axis {self.axis!r} sends to itself: nothing needs to travel, use x.clone()"
            )
        return self.ranks[rank]

    def _reduce(self, reduce: str | None) -> str | None:
        if reduce is not None and reduce not in REDUCE:
            raise ValueError(
                f"cannot reduce by {reduce!r}: use one of {', '.join(REDUCE)}, or None to keep what arrives"
            )
        return reduce

    # -- collectives ---------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        algorithm: str = "ring",
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """The sum (or `op`) of x over all ranks, on every rank; `algorithm` is "ring", "naive", "tree" or "halving_doubling"."""
        run = getattr(collectives, f"all_reduce_{algorithm}", None)
        if run is None:
            raise ValueError(
                f"no all-reduce called {algorithm!r}: use {', '.join(map(repr, collectives.ALL_REDUCES))} without the 'all_reduce_'"
            )
        return self._collective(
            "all_reduce",
            x,
            f"op={op}",
            lambda x, comm: run(x, comm, op=op, out=out),
            None,
            async_op,
        )

    def reduce_scatter(
        self, x: Tensor, op: str = "sum", *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """This rank's share of the rows of the sum (or `op`) of x over all ranks."""
        return self._collective(
            "reduce_scatter",
            x,
            f"op={op}",
            lambda x, comm: collectives.reduce_scatter_ring(x, comm, op=op, out=out),
            None,
            async_op,
        )

    def all_gather(
        self,
        x: Tensor,
        *,
        sizes: Sequence[int] | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """The rows of all ranks, in rank order, on every rank; `sizes` are the rows that each rank brings, if they differ."""
        return self._collective(
            "all_gather",
            x,
            _sizes(sizes),
            lambda x, comm: collectives.all_gather_ring(x, comm, sizes=sizes, out=out),
            None,
            async_op,
        )

    def broadcast(
        self, x: Tensor, src: int = 0, *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """Rank `src`'s x, on every rank; elsewhere only the shape and dtype of x matter."""
        return self._collective(
            "broadcast",
            x,
            f"src={src}",
            lambda x, comm: collectives.broadcast_tree(x, comm, src=src),
            out,
            async_op,
        )

    def scatter(
        self, x: Tensor, src: int = 0, *, out: Tensor | None = None, async_op: bool = False
    ) -> Any:
        """This rank's share of the rows of rank `src`'s x; elsewhere only the shape and dtype of x matter."""
        return self._collective(
            "scatter",
            x,
            f"src={src}",
            lambda x, comm: collectives.scatter_star(x, comm, src=src),
            out,
            async_op,
        )

    def gather(
        self, x: Tensor, dst: int = 0, *, sizes: Sequence[int] | None = None, async_op: bool = False
    ) -> Any:
        """At rank `dst` the rows of all ranks, in rank order, and None elsewhere; `sizes` are the rows that each rank brings, if they differ."""
        detail = ", ".join(filter(None, (f"dst={dst}", _sizes(sizes))))
        return self._collective(
            "gather",
            x,
            detail,
            lambda x, comm: collectives.gather_star(x, comm, dst=dst, sizes=sizes),
            None,
            async_op,
        )

    def reduce(self, x: Tensor, dst: int = 0, op: str = "sum", *, async_op: bool = False) -> Any:
        """At rank `dst` the sum (or `op`) of x over all ranks, and None elsewhere."""
        return self._collective(
            "reduce",
            x,
            f"dst={dst}, op={op}",
            lambda x, comm: collectives.reduce_tree(x, comm, dst=dst, op=op),
            None,
            async_op,
        )

    def all_to_all(
        self,
        x: Tensor,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """The rows that every rank has for this one, in rank order; without sizes, each rank has an equal share for each."""

        def run(x: Tensor, comm: "Comm") -> Tensor:
            return collectives.all_to_all_pairwise(
                x, comm, send_sizes=send_sizes, recv_sizes=recv_sizes
            )

        return self._collective(
            "all_to_all", x, "" if send_sizes is None else "sizes given", run, out, async_op
        )

    def barrier(self, *, async_op: bool = False) -> Any:
        """None, once every rank has come here: in step k each rank hears from the rank 2ᵏ before it, so that after ⌈log₂ N⌉ it has heard of all."""
        nothing = torch.empty(0, device=self._owner.device)

        def run(nothing: Tensor, comm: "Comm") -> None:
            distance = 1
            while distance < comm.size:
                comm.send_recv(
                    nothing,
                    (comm.rank + distance) % comm.size,
                    nothing,
                    (comm.rank - distance) % comm.size,
                )
                distance *= 2

        return self._collective("barrier", nothing, "", run, None, async_op)

    def _collective(
        self,
        op: str,
        x: Tensor,
        detail: str,
        algorithm: Callable[[Tensor, "Comm"], Any],
        out: Tensor | None,
        async_op: bool,
    ) -> Any:
        self._dense(x, op)
        if x.ndim == 0 and op in _BY_ROWS:
            raise ValueError(
                f"{op} deals in rows and got a tensor without dimensions: pass x.reshape(1)"
            )
        x = x.resolve_conj().resolve_neg()
        run = functools.partial(algorithm, x)
        what = (
            f"dtype={str(x.dtype).removeprefix('torch.')}"
            if "sizes" in detail
            else describe(x)
            if op != "barrier"
            else ""
        )
        call = Call(op, ", ".join(filter(None, (what, detail))), self.axis, site(sys._getframe(2)))
        if async_op:
            self._helper = self._helper or self._background()
            return self._later(self._helper.start(call, run, out))
        return self._enter(call, run, out)

    def _background(self) -> "Helper":
        """What runs the asynchronous collectives of this axis."""
        return Helper(Comm(self._owner, self.axis, self.ranks, self._channel // 2, lane=1))

    def _enter(self, call: Call, run: Callable[["Comm"], Any], out: Tensor | None) -> Any:
        outer, self._call = self._call, self._call or call
        try:
            if outer is None and self.size > 1:
                self._board.enter(
                    self._owner.rank,
                    self._group,
                    self.ranks,
                    self._calls,
                    f"{call.op}({call.detail})",
                    call.where,
                )
                self._calls += 1
            with self.record(call.op):
                result = run(self)
        finally:
            self._call = outer
        if out is None or result is None:
            return result
        if out.shape != result.shape or out.dtype != result.dtype:
            raise ValueError(
                f"the result of {call.op} is {describe(result)} and out is {describe(out)}: give an out like it"
            )
        out.detach().copy_(result)
        return out


def _sizes(sizes: Sequence[int] | None) -> str:
    return "" if sizes is None else f"sizes={list(sizes)}"


class Helper:
    """A thread that runs the asynchronous collectives of one axis, in the order in which they were started, while the rank computes."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.jobs = comm, queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"{comm.axis}-async", daemon=True).start()

    def start(self, call: Call, run: Callable[[Comm], Any], out: Tensor | None) -> Op:
        """The pending result; its messages are booked at this point of the rank's program."""
        op, events = Op(False, self.comm._channel, self.comm._owner.rank, None, call), []
        self.comm._owner._events.append(events)
        self.comm._endpoint.add_actor(+1)
        self.jobs.put((op, events, run, out))
        return op

    def close(self) -> None:
        self.jobs.put(None)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            op = self._run(*job)
            del job  # what it worked on is the rank's alone when the rank learns that it is done
            self.comm._endpoint.finish(op)
            self.comm._endpoint.add_actor(-1)
            del op

    def _run(
        self, op: Op, events: list[Event], run: Callable[[Comm], Any], out: Tensor | None
    ) -> Op:
        self.comm._events = events
        start = time.perf_counter()
        try:
            with torch.no_grad():
                op.result = self.comm._enter(op.call, run, out)
        except BaseException as error:
            op.error = error
        op.span = start, time.perf_counter()
        return op


class Rank:
    """What a rank's program is given: its number, its place on the mesh, its device, its own random numbers, its doors to the others."""

    _door = Comm

    def __init__(
        self,
        rank: int,
        mesh: Mesh,
        endpoint: Endpoint,
        board: Board,
        device: torch.device,
        groups: Callable[[tuple[int, ...]], Any] | None = None,
    ) -> None:
        self.rank, self.mesh, self.size, self.coords, self.device = (
            rank,
            mesh,
            mesh.size,
            mesh.coords(rank),
            device,
        )
        self.generator = torch.Generator(device=device).manual_seed(rank)
        self._endpoint, self._board, self._groups = endpoint, board, groups
        self._events: list[Event | list[Event]] = []
        self._pending: dict[Op, None] = {}
        self._printed: list[str] = []
        self._comms: dict[str, Comm] = {}

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.size})"

    def comm(self, *axes: str) -> Comm:
        """The door to the ranks that share these axes ("dp", "tp", …) with this one; without a name, to all ranks.

        Several axes are joined: `rank.comm("dp", "cp")` is named "dp_cp" and spans their product, in the order of rank numbers,
        whichever axis is named first.
        """
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown and axes != (WORLD,):
            raise ValueError(f"a mesh has no axis {unknown[0]!r}: it has {', '.join(AXES)}")
        axes = tuple(axis for axis in AXES if axis in axes)
        name = "_".join(axes) or WORLD
        if name not in self._comms:
            if "ep" in axes and ("dp" in axes or "cp" in axes):
                raise ValueError(
                    f"axes {axes} cannot be joined: ep lies on the ranks of dp and cp; join those"
                )
            ranks = (self.rank,) if axes else tuple(range(self.size))
            for axis in axes:
                groups = (self.mesh.group(rank, axis) for rank in ranks)
                ranks = tuple(sorted(itertools.chain.from_iterable(groups)))
            channel = sum(1 << AXES.index(axis) for axis in axes)
            self._comms[name] = self._door(self, name, ranks, channel)
        return self._comms[name]

    def print(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Like `print`; the notebook shows the output of all ranks in rank order, each line marked with its rank."""
        self._printed.append(sep.join(map(str, values)) + end)

    def _finish(self) -> tuple[Event, ...]:
        """The rank's events in program order, after everything that it started has come to its end."""
        for op in list(self._pending):
            Work(self._endpoint, op, self._pending).wait()
        flat: list[Event] = []
        for event in self._events:
            flat.extend(event if isinstance(event, list) else (event,))
        return tuple(flat)

    def _close(self) -> None:
        for comm in self._comms.values():
            if comm._helper is not None:
                comm._helper.close()
