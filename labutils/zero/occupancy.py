"""Which elements of the model a rank holds, and from when to when: what `holding` counts in bytes, laid out in space and time."""

from collections.abc import Callable, Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labutils.timeline import Occupancy, Span
from labutils.zero.flat import Flat
from labutils.zero.optimizer import Optimizer
from labutils.zero.sharded import Sharded

Stretch = tuple[str, int, int]


def occupancy(fn: Callable[[], object], owner: Optimizer | Sharded) -> Occupancy:
    """What this rank holds of weights, gradients and optimizer state, where and when, over the operations of `fn()`, such as a step.

    Elements are numbered from the first unit of the model to the last, padding included. The bytes are those of `history`, less the
    gradients of single parameters that are on their way into their flat tensor.
    """
    flats = (
        [flat for part in owner.parts for flat in part.flats]
        if owner.level == 3
        else list(reversed(owner.flats))
    )
    watch = _Watch(lambda: set(_stretches(owner, flats)))
    entering = owner.inner.register_step_pre_hook(lambda *_: watch.enter("step"))
    try:
        with watch:
            fn()
    finally:
        entering.remove()
    elements = sum(flat.partition.share for flat in owner.flats)
    state = sum(
        value.nbytes
        for known in owner.inner.state.values()
        for value in known.values()
        if value.dim()
    )
    state += sum(owned.nbytes for owned in owner.owned) if owner.separate else 0
    itemsizes = {
        "weights": flats[0].whole.itemsize,
        "gradients": owner.flats[0].gradient.itemsize,
        "optimizer": state // elements,
    }
    numel = sum(flat.partition.padded for flat in flats)
    spans = tuple(_spans(owner.comm.rank, watch.held))
    return Occupancy(spans, numel, itemsizes, watch.phases, len(watch.held))


class _Watch(TorchDispatchMode):
    """Writes down what is there after every operation."""

    def __init__(self, look: Callable[[], set[Stretch]]) -> None:
        super().__init__()
        self.look, self.held, self.phases = look, [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "step" not in self.phases:
            self.enter("backward" if torch._C._current_graph_task_id() != -1 else "forward")
        out = func(*args, **(kwargs or {}))
        self.held.append(self.look())
        return out

    def enter(self, phase: str) -> None:
        self.phases.setdefault(phase, len(self.held))


def _stretches(owner: Optimizer | Sharded, flats: list[Flat]) -> Iterator[Stretch]:
    """What is there now: (component, start, stop)."""
    place, stepped = (
        0,
        {id(flat): pieces.values() for flat, pieces in zip(owner.flats, owner.pieces, strict=True)},
    )
    for flat in flats:
        whole, own = (
            (place, place + flat.partition.padded),
            (place + flat.own.start, place + flat.own.stop),
        )
        yield "weights", *(whole if flat.resident else own)
        if id(flat) in stepped:
            if owner.level > 1 or flat.buffer is not None:
                yield "gradients", *(whole if flat.buffer is not None else own)
            if owner.separate or any(owner.inner.state.get(piece) for piece in stepped[id(flat)]):
                yield "optimizer", *own
        place = whole[1]


def _spans(rank: int, held: list[set[Stretch]]) -> Iterator[Span]:
    """Stretches that are there in operations one after the other, put together."""
    begun: dict[Stretch, int] = {}
    for operation, there in enumerate([*held, set()]):
        for stretch in sorted(begun.keys() - there):
            component, first, stop = stretch
            yield Span(rank, component, "", begun.pop(stretch), operation, (first, stop))
        begun |= dict.fromkeys(there - begun.keys(), operation)
