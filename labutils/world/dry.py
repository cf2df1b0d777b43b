"""One rank of any mesh, alone, under FakeTensorMode: each message is done at once, and booked."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.utils._pytree import tree_leaves, tree_map_only

from labutils import randomness, units
from labutils.config import Mesh
from labutils.trace import Event, OneRank, Trace
from labutils.world.comm import Background, Comm
from labutils.world.errors import Failure, internal, place, rank_error, site
from labutils.world.messages import Endpoint, Request, describe
from labutils.world.rank import Rank

Assume = Mapping[type, Any]
_TORCH = torch.__path__[0]
_ASKED: dict[Any, type] = {
    torch.ops.aten.equal.default: bool,
    torch.ops.aten.allclose.default: bool,
    torch.ops.aten.nonzero.default: int,  # how many
}
_DEVICE = torch.ops.prim.device.default
_VIEWS = {
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.expand.default,
    torch.ops.aten.select.int,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.unbind.int,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.view.default,
}


class Dry:
    """The engine: the rank that is asked for runs in this thread, and nobody else does.

    Its fake tensors stay alive and can be passed to the next run. A message arrives at once, with
    no values, so that a peer that is late, or makes another call, is not seen: memory held by
    messages on their way is a lower bound. Where torch picks `foreach` by the type of the tensors
    (clip_grad_norm_), say which: it does not for fake ones.
    """

    def __init__(self, mesh: Mesh, timeout: float, assume: Assume | None = None) -> None:
        if not isinstance(assume or {}, Mapping):
            example = "{bool: True, int: lambda x: x.numel() // 8}"
            raise TypeError(f"assume says what to answer for a type, as {example}: got {assume!r}")
        for kind in assume or {}:
            if kind not in (bool, float, int):
                raise TypeError(f"assume={{{kind!r}: …}} names no type: use bool, float or int")
        self.mesh = mesh
        self.mode = _Fake(assume or {})

    def run(self, fn: Callable, args: tuple, kwargs: dict, rank: int) -> tuple[Any, Trace]:
        """What fn(rank, *args, **kwargs) returns on this rank, and its messages.

        Raises ValueError for a rank that the mesh has not, RankError for what `fn` raises.
        """
        size = self.mesh.size
        if (rank := units.whole(rank, "rank")) >= size:
            raise ValueError(f"rank={rank} is none of {size}: use 0 … {size - 1}")
        me = Rank(rank, self.mesh, _Alone(), torch.device("cpu"))
        me._comm_class = DryComm
        try:
            with self.mode, randomness.within(me._random):
                args, kwargs = tree_map_only(Tensor, self.mode.from_tensor, (args, kwargs))
                value = fn(me, *args, **kwargs)
                events = me._finish()
        except Exception as error:
            failure = Failure.of(error)
            raise failure.error or rank_error(rank, size, failure) from None
        return value, Trace(OneRank(size, rank, events))


class DryComm(Comm):
    """A door behind which nobody is: what leaves is booked, what is to come is there."""

    def book(self, dst: int, sent: int, src: int, received: int, count: int) -> None:
        """Write down `count` messages to rank dst and as many from rank src, of so many bytes sent
        and received in all."""
        if count:
            to, source = self.ranks[dst], self.ranks[src]
            event = Event(self._name or "", self.axis, to, sent, source, received, count)
            self._events.append(event)

    def _in_background(self, twin: Comm) -> Background:
        return _AtOnce(twin)


class _AtOnce(Background):
    """Its jobs are done as they come: a FakeTensorMode has one thread."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.jobs = self

    def put(self, job: tuple) -> None:
        self._do(*job).done = True


class _Alone(Endpoint):
    """An endpoint without others."""

    def post(self, *requests: Request) -> None:
        for request in requests:
            request.done = True


class _Fake(FakeTensorMode):
    """Tensors without values; who asks for one gets what the caller assumes, or an error."""

    def __init__(self, assume: Assume) -> None:
        super().__init__()
        self.assume = assume
        self.known: dict[tuple, _Result | None] = {}  # by operation and kinds of its arguments
        self.states: dict[torch.device, dict] = {}  # attributes of a new tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # nothing is asked of torch.compile
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # most of what a fake tensor is asked
            return args[0].fake_device
        if func in _VIEWS and self._is_plain(args[0]):  # half of all; no need to ask the cache
            with in_kernel_invocation_manager(self):
                view = func(*args, **(kwargs or {}))
            device = args[0].fake_device
            if isinstance(view, Tensor):
                return self._fake(view, device)
            return tuple(self._fake(each, device) for each in view)
        key = self._key(func, args, kwargs or {})  # what happens again is not worked out again
        if key is not None and (known := self.known.get(key)) is not None:
            return known(args)
        try:
            out = self.dispatch(func, types, args, kwargs or {})
            if key is not None and key not in self.known:
                self.known[key] = self._learned(args, out, key[2])
            return out
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._assumed(func, args)
        except Exception:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            real = [x for x in tensors if not isinstance(x, FakeTensor)]
            if not real:
                raise
            got = f"{func.overloadpacket.__name__} got a real tensor, {describe(real[0])}"
            remedy = "make it inside the rank function, or pass it as an argument of run"
            raise RuntimeError(f"{_where()}: {got}, in a dry run: {remedy}") from None

    def _key(self, func: Any, args: tuple, kwargs: dict) -> tuple | None:
        """What the sizes of an operation's result depend on; None where there is more to it."""
        if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:
            return None
        try:
            named = tuple(kwargs.items()) if kwargs else ()
            return func, torch.get_default_dtype(), self._kind(args), self._kind(named)
        except _Special:
            return None

    def _kind(self, values: Sequence) -> tuple:
        found: list[Any] = []
        for value in values:
            if isinstance(value, FakeTensor) and self._is_plain(value):
                at = value.storage_offset()
                found.append((value.shape, value.stride(), at, value.dtype, value.fake_device))
            elif isinstance(value, Tensor):
                raise _Special
            elif isinstance(value, (list, tuple)):
                found.append(self._kind(value))
            else:
                found.append((type(value), value))  # 1 and 1.0 are equal, and make other tensors
        return tuple(found)

    def _learned(self, args: tuple, out: Any, kinds: tuple) -> "_Result | None":
        """How to return the like of `out` again; None where that is not known."""
        if out is None:
            return lambda args: None
        if args and out is args[0]:
            return (lambda args: args[0]) if self._kind(args[:1]) == kinds[:1] else None
        if isinstance(out, tuple):
            parts = [self._learned(args, part, kinds) for part in out]
            made = [x.untyped_storage()._cdata for x in out if isinstance(x, Tensor)]
            known = [part for part in parts if part is not None]
            whole = len(known) == len(parts) and len(set(made)) == len(made)
            return (lambda args: tuple(part(args) for part in known)) if whole else None
        if not self._is_plain(out) or out.requires_grad or out.dtype.is_complex:
            return None
        kind = self._kind([out])[0]
        there = [x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, Tensor)]
        storage, twin = out.untyped_storage(), self._made(*kind).untyped_storage()
        new = storage._cdata not in there and not out.storage_offset()
        same = new and storage.nbytes() == twin.nbytes()
        return (lambda args: self._made(*kind)) if same else None

    def _made(self, shape: Any, stride: Any, _: int, dtype: Any, device: Any) -> Tensor:
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._fake(empty, device)

    def _fake(self, meta: Tensor, device: torch.device) -> Tensor:
        """FakeTensor(self, meta, device), whose other attributes are found once."""
        if (state := self.states.get(device)) is None:
            first = FakeTensor(self, meta, device)
            self.states[device] = dict(vars(first))
            return first
        more = Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True,
            device_for_backend_keys=device,
        )  # fmt: skip
        torch._C._set_throw_on_mutable_data_ptr(more)
        vars(more).update(state)
        return more

    def _is_plain(self, x: Any) -> bool:
        mine = isinstance(x, FakeTensor) and x.fake_mode is self and x.constant is None
        return mine and x.layout is torch.strided

    def _assumed(self, func: Any, args: tuple) -> Any:
        x = args[0]
        scalar = _kind(x) if func is torch.ops.aten._local_scalar_dense.default else None
        kind = _ASKED.get(func, scalar)
        if kind is not None and kind in self.assume:
            value = self.assume[kind]
            value = kind(value(x) if callable(value) else value)
            counted = func is torch.ops.aten.nonzero.default
            return x.new_zeros((value, x.dim()), dtype=torch.long) if counted else value
        name = func.overloadpacket.__name__
        needs = f"needs the values of {describe(x)}, and in a dry run tensors have none"
        remedy = "write it so that its result has the same shape whatever the values"
        if kind:
            example = {bool: "True", float: "0.0", int: "lambda x: x.numel() // 8"}[kind]
            answer = f"assume={{{kind.__name__}: {example}}}"
            remedy = f'say what to assume: World(…, engine="dry", {answer})'
        raise RuntimeError(f"{_where()}: {name} {needs}: {remedy}")


_Result = Callable[[tuple], Any]


class _Special(Exception):
    """An argument that is no plain tensor of this mode, and no number."""


def _kind(x: Tensor) -> type:
    if x.dtype is torch.bool:
        return bool
    return float if x.is_floating_point() else int


def _where() -> str:
    """The line of the program that runs now, and not of torch or of the machinery below."""
    frame = sys._getframe(1)
    while frame.f_back and (
        internal(frame.f_code.co_filename)
        or frame.f_code.co_filename.startswith(_TORCH)
        or frame.f_globals.get("__name__") == "labutils.measure"
    ):
        frame = frame.f_back
    return place(site(frame))
