"""Which elements of the model a rank holds, and from when to when, laid out in space and time."""

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labutils import zero
from labutils.timeline import Occupancy, Span
from labutils.world import Rank, World
from labutils.zero.sharded import sharded_of

Stretch = tuple[str, int, int]


def occupancy(
    fn: Callable[[], object], module: nn.Module, optimizer: zero.Optimizer | torch.optim.Optimizer
) -> Occupancy:
    """What this rank holds of weights, gradients and optimizer state over the operations of `fn()`.

    Elements are numbered from the first unit of the model to the last, padding included. Gradients
    of single parameters, on their way into their flat parameter, are not in it.
    """
    if isinstance(optimizer, zero.Optimizer):
        inner, flats = optimizer.inner, optimizer.flats[::-1]
    else:
        groups = sharded_of(module).groups
        inner, flats = optimizer, [flat for group in groups for flat in group.flats]
    buffers: dict[zero.FlatParameter, weakref.ref] = {}
    watch = _Watch(lambda: set(_stretches(flats, inner, buffers)))
    entering = inner.register_step_pre_hook(lambda *_: watch.enter("step"))
    try:
        with watch:
            fn()
    finally:
        entering.remove()
    pieces = [piece for flat in flats if flat.trained for piece in flat.pieces]
    state = sum(x.nbytes for p in pieces for x in inner.state.get(p, {}).values() if x.dim())
    itemsizes = {
        "weights": flats[0].whole.itemsize,
        "gradients": flats[0].reduce_dtype.itemsize,
        "optimizer": state // sum(map(len, pieces)),
    }
    numel = sum(flat.partition.padded for flat in flats)
    spans = tuple(_spans(flats[0].comm.rank, watch.held))
    return Occupancy(spans, numel, itemsizes, watch.phases, len(watch.held))


def of_each_level(world: World) -> dict[str, list[Occupancy]]:
    """What each rank holds of a chain of six equal layers over a step of Adam in fp32, by level."""
    with World(1) as alone:  # every rank of plain data parallelism holds what one rank alone would
        plain = alone.run(_held_over_a_step, 1) * world.size
    levels = {n: world.run(_held_over_a_step, n) for n in (1, 2, 3)}
    return {f"level_{n}": held for n, held in ({0: plain} | levels).items()}


def _held_over_a_step(rank: Rank, level: int) -> Occupancy:
    layers, width = 6, 16
    chain = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    model, comm = nn.Sequential(*chain), rank.comm("dp")
    if level == 3:
        optimizer: Any = torch.optim.AdamW(zero.shard(model, comm).parameters())
    else:
        a_layer = 4 * (width + 1) * width  # a bucket is a layer
        optimizer = zero.Optimizer(model.parameters(), comm, level=level, bucket_bytes=a_layer)

    def step() -> None:
        model(torch.ones(4, width)).square().mean().backward()
        optimizer.step()

    step()  # the first step makes the optimizer state
    optimizer.zero_grad()
    return occupancy(step, model, optimizer)


class _Watch(TorchDispatchMode):
    """Writes down what is there after every operation."""

    def __init__(self, look: Callable[[], set[Stretch]]) -> None:
        super().__init__()
        self.look = look
        self.held: list[set[Stretch]] = []
        self.phases: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "step" not in self.phases:
            self.enter("backward" if torch._C._current_graph_task_id() != -1 else "forward")
        out = func(*args, **(kwargs or {}))
        self.held.append(self.look())
        return out

    def enter(self, phase: str) -> None:
        self.phases.setdefault(phase, len(self.held))


def _stretches(
    flats: list[zero.FlatParameter],
    inner: torch.optim.Optimizer,
    buffers: dict[zero.FlatParameter, weakref.ref],
) -> Iterator[Stretch]:
    """What is there now: (component, start, stop). A buffer is there as long as its memory is."""
    place = 0
    for flat in flats:
        whole = place, place + flat.partition.padded
        own = place + flat.own.start, place + flat.own.stop
        yield "weights", *(whole if flat.resident else own)
        if flat.buffer is not None:
            buffers[flat] = weakref.ref(flat.buffer.untyped_storage())
        if flat in buffers and buffers[flat]() is not None:
            yield "gradients", *whole
        elif flat.gradient is not None:
            yield "gradients", *own
        if any(inner.state.get(piece) for piece in flat.pieces):
            first, stop = flat.partition.bounds(flat.comm.rank)
            yield "optimizer", place + first, place + stop
        place = whole[1]


def _spans(rank: int, held: list[set[Stretch]]) -> Iterator[Span]:
    """Stretches that are there in operations one after the other, put together."""
    begun: dict[Stretch, int] = {}
    for operation, there in enumerate([*held, set()]):
        for stretch in sorted(begun.keys() - there):
            component, first, stop = stretch
            yield Span(rank, component, "", begun.pop(stretch), operation, (first, stop))
        begun |= dict.fromkeys(there - begun.keys(), operation)
