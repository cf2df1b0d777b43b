"""What a step holds in memory, measured: every number here is counted from live storages, to the byte, on any device.

A *storage* is the memory behind a tensor. Views, tied weights and `detach` share one, so storages, not tensors, are what is counted.
"""

import functools
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import units
from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment

COMPONENTS = ("weights", "gradients", "optimizer", "activations", "buffers")


class OutOfMemory(RuntimeError):
    """Raised by `history` when more bytes are alive than its `capacity`."""


def model_states(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Ledger:
    """Bytes of weights, gradients, optimizer state and buffers that are alive now; each storage counts once, so a tied weight does too.

    Optimizer state comes under the optimizer's own names (Adam: exp_avg, exp_avg_sq, step); parameters that the optimizer steps and the
    module does not hold are its master weights, and beside half weights the gradients of those are the fp32 gradients.

    >>> layer = nn.Linear(3, 1)
    >>> print(model_states(layer, torch.optim.AdamW(layer.parameters())))
             bytes
    weights     16
    total       16
    """
    named: list[tuple[str, str, Tensor]] = [("weights", "weights", p) for p in module.parameters()]
    named += [("gradients", "gradients", gradient) for gradient in _gradients(module)]
    beside_half = any(p.dtype in (torch.float16, torch.bfloat16) for p in module.parameters())
    named += [
        ("gradients", "fp32 gradients" if beside_half else "gradients", gradient)
        for gradient in _gradients(module, optimizer)
    ]
    named += [("optimizer", key, value) for key, value in _optimizer_tensors(optimizer)]
    named += [("buffers", "buffers", buffer) for buffer in module.buffers()]
    seen: set[int] = set()
    lines = []
    for component, name, tensor in named:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            lines.append(Line(name, storage.nbytes(), component=component))
    return Ledger(lines).merged()


def saved_activations(fn: Callable[[], object], module: nn.Module) -> Ledger:
    """Bytes that autograd keeps for the backward pass of `fn()`: a line for each storage, under the part of `module` that saved it first.

    Weights and buffers are left out: they are there anyway. What is saved outside of any submodule (a loss) stands under "outside".

    >>> layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> print(saved_activations(lambda: layers(torch.ones(2, 4)), layers))
                   bytes             note
    activations · 0   32  float32 [2, 4]
    activations · 1   64  float32 [2, 8]
    total             96
    """
    known = {
        tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())
    }
    saved: dict[
        int, tuple[torch.UntypedStorage, Line]
    ] = {}  # holding the storage keeps its address from being used again
    inside: list[str] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known and storage._cdata not in saved:
            what = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            name = inside[-1] if inside else "outside"
            saved[storage._cdata] = (
                storage,
                Line(name, storage.nbytes(), component="activations", note=what),
            )
        return tensor

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
    """Bytes alive after every operation of `fn()`, such as a training step, by what they are for and by phase: forward, backward, optimizer.

    A moment called "start" and one called "end" enclose the operations. Views take no memory and no moment.
    weights, gradients and optimizer are the model states; activations is what autograd keeps for the backward pass (and what a checkpointed
    region computes again); buffers is everything else: temporary results, gradients of activations, the module's own buffers.
    With `capacity` in bytes, the first operation after which more is alive raises `OutOfMemory`, as a device of that size would.

    Invariant: two equal steps have equal histories, because a storage counts from the operation that makes it until its last reference dies.
    Memory that a kernel takes and returns within one operation is not seen.
    """
    if capacity is not None:
        units.whole(capacity, "capacity", 1)
    recorder = _Recorder(module, optimizer, capacity)
    with recorder.recording():
        fn()
        recorder.events.append(("end", ""))
    return recorder.history()


def peak(
    fn: Callable[[], object], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Ledger:
    """Bytes alive at the fullest moment of `fn()`, by component."""
    return history(fn, module, optimizer).peak.ledger


def storages(
    fn: Callable[[], object], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> "tuple[Life, ...]":
    """Every storage that is alive during `fn()`: its bytes, between which operations it lives, what it is for. A trace for `memory.replay`."""
    recorder = _Recorder(module, optimizer, None)
    with recorder.recording():
        fn()
        recorder.events.append(("end", ""))
    return tuple(recorder.lives)


def peak_allocated(fn: Callable[[], object], device: torch.device | str = "cuda") -> int:
    """Bytes that PyTorch's CUDA allocator had handed out at the fullest moment of `fn()`: each tensor rounded up to 512, workspaces included."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"there is no {device} device here: measure.history counts the same step on the CPU"
        )
    torch.cuda.reset_peak_memory_stats(device)
    fn()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


@dataclass(slots=True)
class Life:
    """One storage: between which moments it is alive, and what it turned out to be for."""

    nbytes: int
    birth: int
    death: int | None = None
    component: str = "buffers"


class _Recorder(TorchDispatchMode):
    """Writes down the birth and death of every storage; what each was for is known only later, so the ledgers are made at the end."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer | None, capacity: int | None
    ) -> None:
        super().__init__()
        self.module, self.optimizer, self.capacity = module, optimizer, capacity
        self.lives: list[Life] = []
        self.current: dict[int, Life] = {}  # by address of the living storage
        self.watches: set[weakref.ref] = set()
        self.events: list[tuple[str, str]] = [("start", "")]
        self.alive = 0
        self.in_optimizer = False
        self.label(module.parameters(), "weights")
        self.label(_gradients(module, optimizer), "gradients")
        self.label((value for _, value in _optimizer_tensors(optimizer)), "optimizer")
        self.label(module.buffers(), "buffers")
        self.own = {
            buffer.untyped_storage()._cdata for buffer in module.buffers()
        }  # saved or not, they are there anyway

    def life(self, tensor: Tensor, birth: int) -> Life:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.current:
            life = self.current[address] = Life(storage.nbytes(), birth)
            self.lives.append(life)
            self.alive += life.nbytes
            self.watches.add(weakref.ref(storage, functools.partial(self.die, address)))
        return self.current[address]

    def die(self, address: int, watch: weakref.ref) -> None:
        life = self.current.pop(address)
        life.death = len(self.events)
        self.alive -= life.nbytes
        self.watches.discard(watch)

    def label(self, tensors: Iterable[Tensor], component: str) -> None:
        for tensor in tensors:
            life = self.life(tensor, len(self.events) - 1)
            if life.component == "buffers":  # the first name stays: a saved weight is a weight
                life.component = component

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (
            func is not torch.ops.aten.lift_fresh.default
        ):  # torch.tensor(…) shows up as an argument, yet is new
            for tensor in _tensors(
                (args, kwargs)
            ):  # any other unknown argument, such as the batch, has been alive since the start
                self.life(tensor, 0)
        known = len(self.lives)
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            self.life(tensor, len(self.events))
        made = self.lives[known:]
        if not made and not func._schema.is_mutable:  # a view: no memory, no work
            return out
        in_backward = torch._C._current_graph_task_id() != -1
        self.events.append(
            (
                "optimizer" if self.in_optimizer else "backward" if in_backward else "forward",
                func.overloadpacket.__name__,
            )
        )
        if (
            in_backward and torch.is_grad_enabled()
        ):  # a checkpointed region computes its activations again
            for life in made:
                life.component = "activations"
        if self.capacity is not None and self.alive > self.capacity:
            phase, event = self.events[-1]
            excess = self.alive - self.capacity
            raise OutOfMemory(
                f"{phase}, {event}: {excess:,} bytes more than the capacity of {units.text(self.capacity)} would be alive"
            )
        return out

    @contextmanager
    def recording(self) -> Iterator[None]:
        def keep(tensor: Tensor) -> Tensor:
            if tensor.untyped_storage()._cdata not in self.own:
                self.label([tensor], "activations")
            return tensor

        def entered(*_: object) -> None:
            self.in_optimizer = True
            self.label(_gradients(self.module, self.optimizer), "gradients")

        def left(*_: object) -> None:
            self.in_optimizer = False
            self.label((value for _, value in _optimizer_tensors(self.optimizer)), "optimizer")

        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # storages die by reference count alone, at the same operation in every run
        try:
            with ExitStack() as hooks:
                for parameter in self.module.parameters():
                    if parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(
                            lambda p: self.label(
                                [p.grad] if p.grad is not None else [], "gradients"
                            )
                        )
                        hooks.callback(hook.remove)
                if self.optimizer is not None:
                    hooks.callback(self.optimizer.register_step_pre_hook(entered).remove)
                    hooks.callback(self.optimizer.register_step_post_hook(left).remove)
                hooks.enter_context(saved_tensors_hooks(keep, lambda tensor: tensor))
                hooks.enter_context(self)
                yield
        finally:
            self.watches.clear()
            if collecting:
                gc.enable()

    def history(self) -> History:
        changes: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
        for life in self.lives:
            changes[life.birth][life.component] += life.nbytes
            if life.death is not None:
                changes[life.death][life.component] -= life.nbytes
        held = dict.fromkeys(COMPONENTS, 0)
        moments = []
        for i, (phase, event) in enumerate(self.events):
            for component, amount in changes[i].items():
                held[component] += amount
            moments.append(
                Moment(
                    phase,
                    event,
                    Ledger(Line(name, amount, component=name) for name, amount in held.items()),
                )
            )
        return History(moments)


def _stepped(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    return (
        []
        if optimizer is None
        else [parameter for group in optimizer.param_groups for parameter in group["params"]]
    )


def _gradients(module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    return [
        parameter.grad
        for parameter in (*module.parameters(), *_stepped(optimizer))
        if parameter.grad is not None
    ]


def _optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> list[tuple[str, Tensor]]:
    # Weights that the module holds too have been counted by the time this list is read.
    masters = [("master weights", parameter) for parameter in _stepped(optimizer)]
    states = [] if optimizer is None else optimizer.state.values()
    return masters + [
        (key, value)
        for state in states
        for key, value in state.items()
        if isinstance(value, Tensor)
    ]


def _tensors(tree: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
