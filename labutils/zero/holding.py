"""What a rank holds, measured: the live storages of weights, gradients and optimizer state, now and over the course of a step."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment
from labutils.zero.optimizer import Optimizer
from labutils.zero.sharded import Sharded


def held(owner: Optimizer | Sharded) -> Ledger:
    """Bytes of weights, gradients and optimizer state alive on this rank now; each storage counts once, with all the bytes it has.

    What is under way counts too: gathered weights, buckets of gradients, a gradient that backward has made and nobody has taken yet.
    """
    return _ledger(_alive(owner))


def _alive(owner: Optimizer | Sharded) -> list[tuple[str, str, int]]:
    seen: dict[int, tuple[str, str, int]] = {}
    for component, name, tensor in _tensors(owner):
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = component, name, storage.nbytes()
    return list(seen.values())


def _ledger(alive: list[tuple[str, str, int]]) -> Ledger:
    return Ledger(
        Line(name, nbytes, component=component) for component, name, nbytes in alive if nbytes
    ).merged()


def history(fn: Callable[[], object], owner: Optimizer | Sharded) -> History:
    """What is `held` over the course of `fn()`, such as a training step: a moment for every operation that changes it, with its phase.

    Phases are forward, backward and step; the peak is what the step needs beside its activations.
    """
    watch = _Watch(owner)
    with ExitStack() as hooks:
        hooks.callback(owner.inner.register_step_pre_hook(watch.entered).remove)
        hooks.callback(owner.inner.register_step_post_hook(watch.left).remove)
        hooks.enter_context(watch)
        fn()
    return History(watch.moments)


class _Watch(TorchDispatchMode):
    def __init__(self, owner: Optimizer | Sharded) -> None:
        super().__init__()
        self.owner, self.stepping = owner, False
        self.alive = _alive(owner)
        self.moments = [Moment("start", "", _ledger(self.alive))]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (alive := _alive(self.owner)) != self.alive:
            self.alive = alive
            phase = (
                "step"
                if self.stepping
                else "backward"
                if torch._C._current_graph_task_id() != -1
                else "forward"
            )
            self.moments.append(Moment(phase, func.overloadpacket.__name__, _ledger(alive)))
        return out

    def entered(self, *_: object) -> None:
        self.stepping = True

    def left(self, *_: object) -> None:
        self.stepping = False


def _tensors(owner: Optimizer | Sharded) -> Iterator[tuple[str, str, Tensor]]:
    for flat in (*owner.flats, *owner.resting):
        if owner.level == 3:
            yield "weights", "weight shards", flat.shard
        yield "weights", "gathered weights" if owner.level == 3 else "weights", flat.whole
    yield from (("weights", "weights", weights) for weights in owner.constants.values())
    for parameter in owner.leaves:
        if parameter.grad is not None:
            yield "gradients", "gradient on its way", parameter.grad
    for flat in owner.flats:
        yield "gradients", "gradients" if owner.level == 1 else "gradient shards", flat.gradient
        if flat.buffer is not None:
            yield "gradients", "gradients" if owner.level == 1 else "gradient buckets", flat.buffer
    for owned in owner.owned:
        yield (
            "optimizer",
            "master weights",
            owned,
        )  # without a copy of its own it is a shard, and counted by now
    for piece in (piece for pieces in owner.pieces for piece in pieces.values()):
        if piece.grad is not None:
            yield "gradients", "gradient to step", piece.grad
    for state in owner.inner.state.values():
        yield from (
            ("optimizer", name, value) for name, value in state.items() if isinstance(value, Tensor)
        )
