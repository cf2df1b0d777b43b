"""What a step holds in memory, measured: live storages, counted to the byte, on any device, on real
tensors and on fake ones (a memory profiler, as torch's MemTracker is one).

A *storage* is the memory behind a tensor. Views, tied weights and `detach` share one, so storages,
not tensors, are what is counted.
"""

import functools
import gc
import importlib
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from labutils import units
from labutils.ledger import COMPONENTS, Ledger, Line
from labutils.timeline import History, Moment, OutOfMemory

Optimizers = Iterable[torch.optim.Optimizer | None]
_HALF = (torch.float16, torch.bfloat16)
_DEVICE = torch.ops.prim.device.default
_LIFT = torch.ops.aten.lift_fresh.default  # by which torch.tensor(…) comes: argument, and yet new
_RESIZE = torch.ops.inductor.resize_storage_bytes_.default


def model_states(module: nn.Module, *optimizers: torch.optim.Optimizer | None) -> Ledger:
    """Bytes of weights, gradients, optimizer state and buffers that are alive now; each storage
    counts once, so a tied weight does too. Several optimizers step different parameters.

    Optimizer state comes under the optimizer's own names (Adam: exp_avg, exp_avg_sq, step);
    parameters that the optimizer steps and the module does not hold are its master weights, and
    beside half-precision weights the gradients of those are the fp32 gradients.

    >>> layer = nn.Linear(3, 1)
    >>> print(model_states(layer, torch.optim.AdamW(layer.parameters())))
             bytes
    weights     16
    total       16
    """
    _check(module, *optimizers)
    seen: set[int] = set()
    lines = []
    for component, name, tensor in _states(module.parameters(), optimizers, module.buffers()):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            lines.append(Line(name, storage.nbytes(), component=component))
    return Ledger(lines).merged()


def _check(module: object, *optimizers: object, fn: object = print) -> None:
    """Raises TypeError where one of them is something else."""
    if not callable(fn):
        said = f"{fn!r:.60} ({type(fn).__name__})"
        raise TypeError(f"measure takes a function, got {said}: lambda: loss().backward() is one")
    units.instance(module, nn.Module, "measure")
    for optimizer in optimizers:
        if optimizer is not None:
            units.optimizer(optimizer, "measure")


def saved_activations(fn: Callable[[], object], module: nn.Module) -> Ledger:
    """Bytes that autograd keeps for the backward pass of `fn()`: a line for each storage, under the
    part of `module` that saved it first.

    Weights and buffers are left out: they are there anyway. What is saved outside of any submodule
    (a loss) stands under "outside".

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> print(saved_activations(lambda: layers(torch.ones(2, 4)), layers))
                   bytes             note
    activations · 0   32  float32 [2, 4]
    activations · 1   64  float32 [2, 8]
    total             96
    """
    _check(module, fn=fn)
    there = (*module.parameters(), *module.buffers())
    known = {tensor.untyped_storage()._cdata for tensor in there}
    # Holding the storage keeps its address from being used again.
    saved: dict[int, tuple[torch.UntypedStorage, Line]] = {}
    inside: list[str] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in saved:
            what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            name = inside[-1] if inside else "outside"
            line = Line(name, storage.nbytes(), component="activations", note=what)
            saved[storage._cdata] = storage, line
        return tensor.detach()  # the tensor itself would close a cycle with its own graph

    with ExitStack() as hooks:
        for name, part in module.named_modules():
            enter = part.register_forward_pre_hook(
                lambda part, inputs, name=name or "model": inside.append(name)
            )
            leave = part.register_forward_hook(
                lambda part, inputs, output: inside.pop() and None, always_call=True
            )
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
        hooks.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
        result = fn()  # a name for the result, so that its graph lives until everything is counted
    del result
    return Ledger(line for _, line in saved.values())


def history(
    fn: Callable[[], object],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    capacity: int | None = None,
) -> History:
    """Bytes alive after every operation of `fn()`, such as a training step, by what they are for
    and by phase: forward, backward, optimizer.

    A moment called "start" and one called "end" enclose the operations. Views take no memory and no
    moment. weights, gradients and optimizer are the model states; activations is what autograd
    keeps for the backward pass (and what a checkpointed region computes again); buffers is
    everything else: temporary results, gradients of activations, the module's own buffers. Lines
    have the names that `label` gave, those of `model_states` otherwise.
    With `capacity` in bytes, the first operation after which more is alive raises `OutOfMemory`, as
    a device of that size would.

    On ranks, call it inside the rank function: it counts what this rank's own thread makes, which
    is neither a neighbor's tensor nor memory in which messages travel.

    Invariant: two equal steps have equal histories, because a storage counts from the operation
    that makes or resizes it until its last reference dies; what is older counts from the start.
    Memory that a kernel takes and returns within one operation is not seen.
    """
    _check(module, optimizer, fn=fn)
    with recording(module, optimizer, capacity=capacity) as recorder:
        fn()
    return recorder.history()


def peak(
    fn: Callable[[], object], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Ledger:
    """Bytes alive at the fullest moment of `fn()`, by component."""
    return history(fn, module, optimizer).peak.ledger


def storages(
    fn: Callable[[], object], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> "tuple[Life, ...]":
    """Every storage that is alive during `fn()`: its bytes, between which operations it lives, what
    it is for. A trace for `memory.replay`."""
    _check(module, optimizer, fn=fn)
    with recording(module, optimizer) as recorder:
        fn()
    return tuple(recorder.lives)


# ── what a technique tells ────────────────────────────────────────────────────────────────────────


def label(tensors: Iterable[Tensor], component: str, name: str = "", *, anew: bool = False) -> None:
    """Tell who is recording in this thread, if anybody is, what the memory of `tensors` is for.

    tensors: their storages carry the label for as long as they live, also in moments gone by
    component: one of `COMPONENTS`
    name: the line in the ledger, such as "gathered weights"; the component's own unless given
    anew: in moments gone by they were something else, such as the result of an operation

    Raises ValueError for an unknown component.
    """
    if component not in COMPONENTS:
        raise ValueError(f"no component {component!r}: use one of {', '.join(COMPONENTS)}")
    for recorder in _recorders():
        for tensor in tensors:
            life = recorder.life(tensor)
            if anew:
                life = recorder.renew(tensor.untyped_storage(), life, life.nbytes)
            life.component, life.name = component, name or component


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Moments recorded inside are of this phase, such as "optimizer", whatever runs there."""
    recorders = list(_recorders())
    for recorder in recorders:
        recorder.phases.append(name)
    try:
        yield
    finally:
        for recorder in recorders:
            recorder.phases.pop()


# ── the recorder ──────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Life:
    """One storage of one size: between which moments it is alive, and what it is for."""

    nbytes: int
    birth: int
    death: int | None = None
    component: str = "buffers"
    name: str = ""


@contextmanager
def recording(
    module: nn.Module,
    *optimizers: torch.optim.Optimizer | None,
    capacity: int | None = None,
) -> "Iterator[Recorder]":
    """A recorder of what this thread does inside: `history()` is what was alive at every moment,
    `lives` the storages one by one."""
    recorder = Recorder(module, optimizers, capacity)
    with ExitStack() as stack:
        stack.enter_context(_undisturbed())
        stack.callback(recorder.watches.clear)
        recorder.hook(stack)
        stack.enter_context(saved_tensors_hooks(recorder.keep, lambda tensor: tensor))
        stack.enter_context(recorder)
        _ACTIVE.recorders = (*_recorders(), recorder)
        stack.callback(lambda: setattr(_ACTIVE, "recorders", _ACTIVE.recorders[:-1]))
        yield recorder
        recorder.events.append(("end", ""))


class Mode(TorchDispatchMode):
    """Sees each operation of a thread, and nothing is asked of torch.compile before and after it,
    which takes as long as the operation of a small model itself."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class Recorder(Mode):
    """Writes down the birth and death of every storage. What each was for is known only later, so
    the ledgers are made at the end.

    Cost: constant for each operation and each of its tensors, however much is alive.
    """

    def __init__(self, module: nn.Module, optimizers: Optimizers, capacity: int | None) -> None:
        super().__init__()
        if capacity is not None:
            capacity = units.whole(capacity, "capacity", 1)
        self.capacity = capacity
        self.optimizers = [each for each in optimizers if each is not None]
        self.parameters = list(module.parameters())
        self.lives: list[Life] = []
        self.current: dict[int, Life] = {}  # by address of the living storage
        self.watches: set[weakref.ref] = set()
        self.events: list[tuple[str, str]] = [("start", "")]
        self.phases: list[str] = []
        self.alive = 0
        self.look(module.buffers())

    # -- births and deaths -------------------------------------------------------------------------

    def life(self, tensor: Tensor, birth: int = 0) -> Life:
        """The life of a tensor's storage; an unknown one has been there since the start."""
        storage = tensor.untyped_storage()
        return self.current.get(storage._cdata) or self.begin(storage, storage.nbytes(), birth)

    def begin(self, storage: torch.UntypedStorage, nbytes: int, birth: int) -> Life:
        address = storage._cdata
        life = self.current[address] = Life(nbytes, birth)
        self.lives.append(life)
        self.alive += nbytes
        self.watches.add(weakref.ref(storage, functools.partial(self.die, address)))
        return life

    def die(self, address: int, watch: weakref.ref) -> None:
        life = self.current.pop(address)
        life.death = len(self.events)
        self.alive -= life.nbytes
        self.watches.discard(watch)

    def resized(self, storage: torch.UntypedStorage, before: int) -> bool:
        """Whether a storage is of another size than `before`: one life ends, another begins."""
        nbytes = storage.nbytes()
        life = self.current.get(storage._cdata) or self.begin(storage, before, 0)
        if life.nbytes == nbytes:
            return False
        self.renew(storage, life, nbytes)
        return True

    def renew(self, storage: torch.UntypedStorage, life: Life, nbytes: int) -> Life:
        """Another life of a storage, from now on."""
        life.death = len(self.events)
        new = replace(life, nbytes=nbytes, birth=len(self.events), death=None)
        self.current[storage._cdata] = new
        self.lives.append(new)
        self.alive += nbytes - life.nbytes
        return new

    def guess(self, tensors: Iterable[Tensor], component: str, name: str = "") -> None:
        """What tensors are for, unless that is known: a saved weight is a weight."""
        for tensor in tensors:
            life = self.life(tensor)
            if not life.name:
                life.component, life.name = component, name or component

    def look(self, buffers: Iterable[Tensor] = ()) -> None:
        """What there is of weights, gradients and optimizer state gets its name."""
        for component, name, tensor in _states(self.parameters, self.optimizers, buffers):
            self.guess([tensor], component, name)

    def happened(self, event: str) -> None:
        """An operation has changed what is alive, or what is in it.

        Raises OutOfMemory beyond the capacity.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        ordinary = "backward" if in_backward else "forward"
        self.events.append((self.phases[-1] if self.phases else ordinary, event))
        if self.capacity is not None and self.alive > self.capacity:
            excess = f"{self.alive - self.capacity:,} bytes more than the capacity of "
            capacity = units.text(self.capacity)
            raise OutOfMemory(f"{', '.join(self.events[-1])}: {excess}{capacity} would be alive")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is _DEVICE:  # most of what a fake tensor is asked, and it knows the answer
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        fresh, mutable = _makes_memory(func), func._schema.is_mutable or func is _RESIZE
        # What only moves through here may belong to a neighbor.
        if (fresh and func is not _LIFT) or func is _RESIZE:
            for tensor in _tensors((*args, *kwargs.values()) if kwargs else args):
                self.life(tensor)
        out = func(*args, **(kwargs or {}))
        made = len(self.lives)
        results = out if isinstance(out, (tuple, list)) else (out,)
        if fresh:
            for tensor in _tensors(results):
                self.life(tensor, len(self.events))
        elif mutable:
            for tensor in _tensors(results if func._schema.returns else args[:1]):
                storage = tensor.untyped_storage()
                if life := self.current.get(storage._cdata):
                    self.resized(storage, life.nbytes)
        if len(self.lives) == made and not mutable:  # a view: no memory, no work
            return out
        if fresh and torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            for life in self.lives[made:]:  # a checkpointed region computes its activations again
                life.component = life.name = "activations"
        self.happened(func.overloadpacket.__name__)
        return out

    # -- hooks -------------------------------------------------------------------------------------

    def hook(self, stack: ExitStack) -> None:
        """Be told of gradients and of the optimizer's steps, until the stack unwinds."""
        for parameter in self.parameters:
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p: self.guess(_gradients([p]), "gradients")
                )
                stack.callback(hook.remove)
        for optimizer in self.optimizers:
            stack.callback(optimizer.register_step_pre_hook(self.entered).remove)
            stack.callback(optimizer.register_step_post_hook(self.left).remove)

    def keep(self, tensor: Tensor) -> Tensor:
        """What autograd saves; detached, or an output would close a cycle with its own graph."""
        self.guess([tensor], "activations")
        return tensor.detach()

    def entered(self, *_: object) -> None:
        self.phases.append("optimizer")
        self.look()

    def left(self, *_: object) -> None:
        self.phases.pop()
        self.look()

    # -- results -----------------------------------------------------------------------------------

    def history(self) -> History:
        """Bytes alive at every moment; each component has a line of its own name, also of 0."""
        changes: defaultdict[int | None, Counter] = defaultdict(Counter)
        for life in self.lives:
            key = life.component, life.name or life.component
            changes[life.birth][key] += life.nbytes
            changes[life.death][key] -= life.nbytes  # at None, where it is still alive
        lines = {(name, name): Line(name, 0, component=name) for name in COMPONENTS}
        moments = []
        for i, (phase, event) in enumerate(self.events):
            for (component, name), change in changes.get(i, {}).items():
                before = lines.get((component, name))
                amount = change + (before.amount if before else 0)
                if amount or component == name:
                    lines[component, name] = Line(name, amount, component=component)
                elif before:
                    del lines[component, name]
            moments.append(Moment(phase, event, Ledger(lines.values())))
        return History(moments)


_ACTIVE = threading.local()  # .recorders: those of this thread, the innermost last


def _recorders() -> "tuple[Recorder, ...]":
    return getattr(_ACTIVE, "recorders", ())


class _Shared:
    """What all threads that record have in common: how many they are, what was there before."""

    lock, count, collecting = threading.Lock(), 0, False


@contextmanager
def _undisturbed() -> Iterator[None]:
    """As long as any thread records, storages die by reference count alone, at the same operation
    in every run, and a resize, which torch dispatches to nobody, is seen."""
    with _Shared.lock:
        _Shared.count += 1
        if _Shared.count == 1:
            # The first dispatch imports it, and leaves frames with their tensors to the collector.
            importlib.import_module("torch._dynamo")
            _Shared.collecting = gc.isenabled()
            gc.disable()
            type.__setattr__(torch.UntypedStorage, "resize_", _resize_)
    try:
        yield
    finally:
        with _Shared.lock:
            _Shared.count -= 1
            if _Shared.count == 0:
                del torch.UntypedStorage.resize_  # the inherited one shows again
                if _Shared.collecting:
                    gc.enable()


def _resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    before = storage.nbytes()
    torch._C.StorageBase.resize_(storage, size)  # type: ignore[attr-defined]  # not in its stub
    for recorder in _recorders():
        if recorder.resized(storage, before):
            recorder.happened("resize_")
    return storage


@functools.cache
def _makes_memory(func: Any) -> bool:
    """Whether what an operation returns is new, and no view of an argument."""
    returns = func._schema.returns
    return func is _LIFT or (bool(returns) and all(each.alias_info is None for each in returns))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    """The tensors among the arguments or results of an operation, also those in its lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (each for each in value if isinstance(each, Tensor))


def _states(
    weights: Iterable[Tensor],
    optimizers: Optimizers,
    buffers: Iterable[Tensor],
) -> Iterator[tuple[str, str, Tensor]]:
    """What there is of weights, gradients, optimizer state and buffers: component, name, tensor."""
    weights = list(weights)
    stepping = [optimizer for optimizer in optimizers if optimizer is not None]
    groups = [group for optimizer in stepping for group in optimizer.param_groups]
    stepped = [parameter for group in groups for parameter in group["params"]]
    beside_half = any(parameter.dtype in _HALF for parameter in weights)
    yield from (("weights", "weights", parameter) for parameter in weights)
    yield from (("gradients", "gradients", gradient) for gradient in _gradients(weights))
    name = "fp32 gradients" if beside_half else "gradients"
    yield from (("gradients", name, gradient) for gradient in _gradients(stepped))
    # Of those that are stepped, the weights of the module have come by now.
    yield from (("optimizer", "master weights", parameter) for parameter in stepped)
    for state in (state for optimizer in stepping for state in optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, Tensor):
                yield "optimizer", name, value
    yield from (("buffers", "buffers", buffer) for buffer in buffers)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
