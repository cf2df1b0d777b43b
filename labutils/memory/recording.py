"""A training step of `model.GPT`, recorded: really run at small prime sizes, so that the bytes of
every storage factor into letters.

Give each letter of the shape (b, s, h, a, g, d, f, v) a prime of its own and run the course's own
step. A storage of 2,002 bytes can then only be 2·7·11·13: two bytes for each of b·s·v numbers. So
one run of a few milliseconds says what every step of its kind holds, at any sizes.

Of `memory` this file alone loads torch; the rest evaluates what it finds.
"""

import bisect
import functools
import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from labutils import accumulation, anatomy, measure
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.memory.formulas import Recording, Storage, factored
from labutils.step import build
from labutils.world import Rank, World

BATCH = "tokens and targets"
SHARES = {
    "weight shards", "gradient shards", "master weights", "exp_avg", "exp_avg_sq",
    "momentum_buffer", "working memory of the optimizer",
}  # fmt: skip


def record(model: ModelConfig, train: TrainConfig, primes: Mapping[str, int]) -> Recording:
    """The second step of a training, which begins with the optimizer's state, at sizes that are
    products of the `primes` of letters.

    With ZeRO it runs on one rank, whose shards are whole, so what has the name of a shard is a
    share of what it is here. Each parameter is a bucket of its own at levels 1 and 2.

    Raises ValueError where a storage is no product of these letters and a power of two, nor as
    large as the weights of a layer.
    """
    ours = gc.get_freeze_count() == 0  # or unfreeze() would take back what a caller has frozen
    if ours:
        gc.freeze()  # what was there before is not searched for garbage
    try:
        # In a thread of its own, where no mode, hook, autocast or no_grad of the caller's is seen.
        with World(Mesh()) as one:
            ((recorder, places),) = one.run(_run, model, train)
    finally:
        if ours:
            gc.unfreeze()
    gathered = anatomy.units(model).values() if train.zero == 3 else ()
    units = {sum(sizes): [factored(size, primes) for size in sizes] for sizes in gathered}
    lives = []
    for life, part in zip(recorder.lives, places.parts, strict=True):
        name = part if life.name in ("", "activations", "buffers") else life.name
        death = len(recorder.events) if life.death is None else life.death
        batches = train.global_batch // train.micro_batch if name == BATCH else 1
        more = "m" * (batches > 1) + "/" * (train.zero > 0 and name in SHARES)
        sizes = _parts(life.nbytes // batches, units, primes) if life.nbytes else ()
        for factor, letters in sizes:
            column = name, life.component, letters + more
            lives.append(Storage(column, factor, life.birth, death))
    return Recording(recorder.events, places.layers, lives)


def _parts(nbytes: int, units: Mapping[int, list], primes: Mapping[str, int]) -> list:
    """A size as factors and letters: one pair, or one for each parameter of a unit of ZeRO."""
    for width in (2, 4):
        if nbytes % width == 0 and nbytes // width in units:
            return [(width * factor, letters) for factor, letters in units[nbytes // width]]
    return [factored(nbytes, primes)]


class _Weightless(measure.Mode):
    """Products of matrices without their values, which decide nothing here: they would be most of
    the time that a step takes, above all in bf16, which few CPUs multiply."""

    PRODUCTS = (
        torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
    )  # fmt: skip

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in self.PRODUCTS:
            a, b = args[-2:]
            return a.new_zeros((*a.shape[:-1], b.shape[-1]))
        return func(*args, **(kwargs or {}))


def _run(rank: Rank, model: ModelConfig, train: TrainConfig) -> "tuple[measure.Recorder, _Places]":
    with _Weightless():  # below the recorder, which sees each product asked for and delivered
        return _step(rank, model, replace(train, bucket_bytes=1))


def _begun(rank: Rank, model: ModelConfig, train: TrainConfig) -> tuple:
    """A training after its first step: a step, the model, what steps its weights; then the batch,
    and the optimizer around that.

    All is built by `step.build`. Its own step is not what is recorded, since it weighs each loss by
    its targets: at GPT-2's peak in fp32 these scalars are 8 bytes, 28 with four micro-batches.
    """
    # Of what autocast does, weights know nothing.
    plain = replace(train, precision="fp32", autocast=False) if train.autocast else train
    mine = build(model, plain, rank.mesh)(rank)
    net: Any = mine.stages[0]
    (optimizer,), (inner,) = mine.optimizers, mine.inner
    rows = train.micro_batch * train.accumulation(rank.size)
    x, y = (torch.zeros(rows, model.seq_len, dtype=torch.long) for _ in range(2))

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            return net.loss(*batch)

    loss((x[: train.micro_batch], y[: train.micro_batch])).backward()
    optimizer.step()  # makes its state
    optimizer.zero_grad()

    def step(before_optimizer: Callable[[], None] = lambda: None) -> Tensor:
        if rows == train.micro_batch:
            value = loss((x, y))
            value.backward()
        else:
            batches = accumulation.micro_batches((x, y), train.micro_batch)
            value = accumulation.accumulate(loss, batches)
        before_optimizer()
        with measure.phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        return value  # held until here, as the caller of a step holds it

    return step, net, inner, (x, y), optimizer


def _step(rank: Rank, model: ModelConfig, train: TrainConfig) -> "tuple[measure.Recorder, _Places]":
    step, net, inner, batch, optimizer = _begun(rank, model, train)
    with measure.recording(net, inner) as recorder:
        recorder.guess(batch, "activations", BATCH)
        for table in net.buffers():
            recorder.life(table).name = "tables of cos and sin"
        with _Places(recorder, net, train.checkpointing) as places, places.hooks():
            step(functools.partial(places.enter_optimizer, optimizer, inner))
    places.catch_up()
    return recorder, places


class _Places(measure.Mode):
    """Writes down beside a recorder which layer each moment belongs to, and which part of the model
    made each storage."""

    def __init__(self, recorder: measure.Recorder, net: nn.Module, policy: str) -> None:
        super().__init__()
        self.recorder, self.net = recorder, net
        self.layers: list[int | None] = []
        self.parts: list[str] = []
        self.layer: int | None = None
        self.inside = ["loss"]  # the parts of the model that the program is in
        self.nodes = [(0, "loss")]  # from which node of the tape on it was where
        self.again = "attention" if policy == "selective" else "residual stream"
        self.owners: dict[int, int | None] = {}  # layers, by the lives of what is stepped
        self.catch_up()

    def catch_up(self, part: str = "") -> None:
        """Place what has happened since."""
        new = len(self.recorder.lives) - len(self.parts)
        self.parts += [part or self._part()] * new if new else []
        self.layers += [self.layer] * (len(self.recorder.events) - len(self.layers))

    def go(self, layer: int | None) -> None:
        """From here on moments belong to another layer."""
        self.catch_up()
        self.layer = layer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        first = args[0] if args and isinstance(args[0], Tensor) else None
        life = first is not None and self.recorder.current.get(first.untyped_storage()._cdata)
        if life and self.owners:
            self.go(self.owners.get(id(life), self.layer))
        out = func(*args, **(kwargs or {}))
        copied = func is torch.ops.aten._to_copy.default and life and life.component == "weights"
        self.catch_up("half copies of weights" if copied else "")
        return out

    def _part(self) -> str:
        """The part of the model whose operation runs, forward or backward."""
        if self.owners:
            return "working memory of the optimizer"
        if torch._C._current_graph_task_id() == -1:
            return self.inside[-1]
        if torch.is_grad_enabled():
            return self.inside[-1] if len(self.inside) > 1 else self.again
        node = torch._C._current_autograd_node()
        at = bisect.bisect(self.nodes, (node._sequence_nr(), "~")) - 1
        return f"{self.nodes[at][1]}, backward"

    def enter_optimizer(self, optimizer: Any, inner: torch.optim.Optimizer) -> None:
        """From here on moments belong to the layer whose weight is stepped."""
        self.go(None)
        stepped = [weight for group in inner.param_groups for weight in group["params"]]
        for (name, weight), master in zip(self.net.named_parameters(), stepped, strict=True):
            layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
            self._own(layer, weight, weight.grad, master, master.grad)
            self._own(layer, *inner.state[master].values())
        for flat in getattr(optimizer, "flats", ()):
            layer = self.owners[id(self.recorder.life(flat.whole))]
            self._own(layer, flat.buffer, flat.gradient, flat.shard)

    def _own(self, layer: int | None, *tensors: Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None:
                self.owners[id(self.recorder.life(tensor))] = layer

    def hooks(self) -> ExitStack:
        """Be told where in the model the program is, until the stack unwinds."""
        stack = ExitStack()
        for path, part in self.net.named_modules():
            words = [word for word in path.split(".") if word != "blocks" and not word.isdigit()]
            enter = functools.partial(self._enter, ".".join(words) or "residual stream")
            stack.callback(part.register_forward_pre_hook(enter).remove)
            stack.callback(part.register_forward_hook(self._leave).remove)
        # First on the way in, last on the way out: what ZeRO does around a layer is the layer's.
        for i, block in enumerate(self.net.get_submodule("blocks").children()):
            enter, leave = (functools.partial(f, i) for f in (self._enter_layer, self._follow))
            stack.callback(block.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(block.register_forward_hook(leave, prepend=True).remove)
        stack.callback(block.register_forward_hook(lambda *_: self.go(None)).remove)
        return stack

    def _enter(self, name: str, *_: object) -> None:
        self.inside.append(name)
        self.nodes.append((torch.autograd._get_sequence_nr(), name))

    def _leave(self, *_: object) -> None:
        self.inside.pop()
        self.nodes.append((torch.autograd._get_sequence_nr(), self.inside[-1]))

    def _enter_layer(self, i: int, block: nn.Module, inputs: tuple[Tensor]) -> None:
        self.go(i)
        if i == 0:
            inputs[0].register_hook(lambda gradient: self.go(None))

    def _follow(self, i: int, block: nn.Module, inputs: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: self.go(i))
