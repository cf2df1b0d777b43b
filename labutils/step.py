"""One step of training on any mesh, put together in one place from the course's own transforms.

Their order is what makes them compose: the layers of a rank (pp), attention over ranks and the
places of tokens (cp), shares of every layer (tp), adapters, experts (ep), what is computed again,
replicas or ZeRO, the optimizer, clipping. Every mesh runs `pipeline.run`: a pipeline of one stage
accumulates micro-batches.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from labutils import (
    anatomy,
    checkpointing,
    context_parallel,
    expert_parallel,
    lora,
    pipeline,
    precision,
    quantization,
    schedule,
    tensor_parallel,
    units,
    zero,
)
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import ATTEND, GPT, IGNORED, Block, check_tokens, cross_entropy
from labutils.world import Comm, Rank

Batch = tuple[Tensor, Tensor]  # tokens [b, s] and targets [b, s]
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOOPED = {"interleaved", "breadth_first", "interleaved_zb"}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
STEPPING = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
SEED = 0  # of all weights that are drawn: the same numbers on all ranks


def build(
    model: ModelConfig,
    train: TrainConfig,
    mesh: Mesh,
    *,
    whole: Callable[[], GPT] | None = None,
) -> "Callable[[Rank], RankStep]":
    """What every rank of the mesh runs: of a rank, its step, to be called with its micro-batches.

    whole: makes the model that training begins with, frozen where it is to stay; all ranks go on
        with that of rank 0. Unless given, weights are drawn as `GPT` draws them

    >>> from labutils.world import World
    >>> sizes = dict(num_layers=2, d_model=8, num_heads=2, d_ff=8, vocab_size=16, seq_len=4)
    >>> train = TrainConfig(micro_batch=1, global_batch=4, precision="fp32", clip=1.0)
    >>> mesh, rows = Mesh(pp=2, dp=2), torch.arange(4 * 5).view(4, 5) % 16
    >>> def program(rank):
    ...     step = make(rank)
    ...     mine = step.share(rows[:, :-1], rows[:, 1:])
    ...     return [step(mine).loss.item() for _ in range(3)]
    >>> make = build(ModelConfig(**sizes), train, mesh)
    >>> with World(mesh) as world:
    ...     first, *others = world.run(program)
    >>> first[0] > first[2], all(losses == first for losses in others)
    (True, True)

    Invariant: weights, loss and norm are those of one device with the whole batch, up to rounding,
    however the mesh cuts it.
    Raises ValueError for what does not go together, with the reason and what would (`check_plan`).
    """
    check_plan(model, train, mesh)
    plan = schedule_of(train, mesh)
    return functools.partial(RankStep, model=model, train=train, mesh=mesh, plan=plan, whole=whole)


def schedule_of(train: TrainConfig, mesh: Mesh) -> schedule.Schedule:
    """The schedule of a step; on one stage micro-batches come one after the other."""
    units.instance(train, TrainConfig, "a step")
    units.instance(mesh, Mesh, "a step")
    if not isinstance(plan := train.schedule, str):
        units.instance(plan, schedule.Schedule, "TrainConfig.schedule")
        _require_fit(plan, train, mesh)
        return plan
    name = train.schedule if mesh.pp > 1 else "one_f_one_b"
    options = {"chunks": train.chunks} if name in LOOPED else {}
    return getattr(schedule, name)(mesh.pp, train.accumulation(mesh.dp), **options)


def _require_fit(plan: schedule.Schedule, train: TrainConfig, mesh: Mesh) -> None:
    """Nothing, or a ValueError for a schedule that is not one of this step."""
    plan.check()
    found = len(plan.ranks), plan.micro_batches
    if found != (wanted := (mesh.pp, train.accumulation(mesh.dp))):
        sizes = "{} ranks and {} micro-batches"
        raise ValueError(
            f"{plan.name} is for {sizes.format(*found)}, and this step has "
            f"{sizes.format(*wanted)}: make one for these"
        )
    if plan.every:
        remedy = "give one that updates once, after the step"
        raise ValueError(f"{plan.name} updates its weights in the course of a step: {remedy}")


@dataclass(frozen=True)
class Taken:
    """A step that was taken.

    loss: the mean over all targets of the global batch, the same on all ranks
    norm: that of the whole gradient before clipping, if `clip` is given
    run: the operations of this rank
    """

    loss: Tensor
    norm: Tensor | None
    run: pipeline.RankRun


class RankStep:
    """What a rank holds of a model and its optimizer, and a step of both; made by `build`.

    stages: the rank's part of the model
    plan: the schedule
    optimizers: one for each group of ranks that have the same parameters
    """

    def __init__(
        self,
        rank: Rank,
        *,
        model: ModelConfig,
        train: TrainConfig,
        mesh: Mesh,
        plan: schedule.Schedule,
        whole: Callable[[], GPT] | None,
    ) -> None:
        units.instance(rank, Rank, "a step")
        if rank.mesh != mesh:
            remedy = f"run it in World({mesh}) or build it for that of the ranks"
            raise ValueError(f"this step is for {mesh}, and the ranks are {rank.mesh}: {remedy}")
        self.rank, self.train, self.plan = rank, train, plan
        self.replicas = rank.comm("dp", "cp")
        half = _HALF[train.precision] if train.half else None
        with torch.device(rank.device):
            net = GPT(model, generator=_seeded(rank)) if whole is None else whole()
        if whole is not None:  # what is drawn here is the same on all ranks
            with rank.comm().record("start"):
                for parameter in net.parameters():
                    rank.comm().broadcast(parameter.data, out=parameter.data)
        for name, parameter in net.named_parameters():
            if any(fnmatchcase(name, pattern) for pattern in train.frozen):
                parameter.requires_grad_(False)
        pipeline.keep(net, plan, rank.coords["pp"], train.layers)
        if train.precision == "fp64" or (half is not None and train.zero < 3):
            _cast(net, half or torch.float64)
        self.stages = self._cut(self._change(net))
        if train.zero == 3:
            self._shard(half)
        self.sides = list(self._sides())
        self.optimizers = [self._optimizer(named, comm) for named, comm in self.sides]
        fp16 = train.precision == "fp16"
        self.scaler = precision.LossScaler(comm=rank.comm()) if fp16 else None
        self._all = _Together(self.optimizers)

    # ── what a rank has ───────────────────────────────────────────────────────────────────────────

    def _change(self, net: GPT) -> GPT:
        """The model, each layer of which does this rank's part."""
        rank, train, mesh = self.rank, self.train, self.rank.mesh
        layers = [part for part in net.modules() if isinstance(part, Block)]
        if train.attention in ATTEND:
            for block in layers:
                block.attention.attend = ATTEND[train.attention]
        else:
            cp, kind = rank.comm("cp"), train.layout
            context_parallel.share_tokens(net, cp, attention=train.attention, kind=kind)
        if train.adapters and train.adapters.base == "nf4":
            lora.quantize_base(net)
        if mesh.tp > 1:
            tensor_parallel.parallelize(net, rank.comm("tp"), train.sequence)
        if train.fp8 and layers:
            quantization.use_fp8(net, quantization.SCHEMES[train.fp8])
        if train.adapters:
            net.requires_grad_(False)
        if (chosen := train.adapters) and layers:
            sizes: Any = dict(rank=chosen.rank, alpha=chosen.alpha, pattern=chosen.pattern)
            lora.adapt(net, **sizes, generator=_seeded(rank))
        if mesh.ep > 1 and layers:
            expert_parallel.spread_experts(net, rank.comm("ep"), replicas=self.replicas)
        return checkpointing.apply(net, train.checkpointing)

    def _cut(self, net: GPT) -> nn.ModuleList:
        """The stages of this rank, and in which precision they compute."""
        stages = pipeline.split(net, self.plan.stages, self.train.layers)
        mine = pipeline.local(stages, self.plan, self.rank.coords["pp"])
        for stage in mine:
            if self.train.autocast:
                region = precision.autocast(_HALF[self.train.precision])
                stage.forward = functools.partial(_inside, region, stage.forward)
        return mine

    @property
    def _reduced_in(self) -> torch.dtype | None:
        """What gradients are reduced in, where it is another dtype than that of their weights."""
        return torch.float32 if self.train.half and self.train.fp32_gradients else None

    def _shard(self, half: torch.dtype | None) -> None:
        """Level 3: each stage keeps its share of every layer."""
        train = self.train
        when: Any = dict(reshard=train.reshard, prefetch=train.prefetch)
        how = when | dict(param_dtype=half, reduce_dtype=self._reduced_in)
        for stage in self.stages:
            zero.shard(
                stage, self.replicas, units=list(stage.get_submodule("blocks").children()), **how
            )

    def _sides(self) -> Iterator[tuple[dict[str, nn.Parameter], Comm]]:
        """What is trained, by the ranks that have it alike: experts, and all else."""
        trained = {n: p for n, p in self.stages.named_parameters() if p.requires_grad}
        experts = {n: p for n, p in trained.items() if getattr(p, "only_on", "") == "edp"}
        others = {n: p for n, p in trained.items() if n not in experts}
        for named, comm in ((others, self.replicas), (experts, self.rank.comm("edp"))):
            if named:
                yield named, comm

    def _optimizer(self, named: dict[str, nn.Parameter], comm: Comm) -> Any:
        train = self.train
        kind, how = OPTIMIZERS[train.optimizer], STEPPING[train.stepping]
        make = functools.partial(kind, lr=train.lr, **how)
        if train.zero in (1, 2):
            sizes: Any = dict(level=train.zero, bucket_bytes=train.bucket_bytes)
            return zero.Optimizer(named.items(), comm, make, reduce_dtype=self._reduced_in, **sizes)
        optimizer = make(named.values())
        if train.zero == 0 and train.half:
            return precision.MasterWeights(optimizer, fp32_gradients=train.fp32_gradients)
        return optimizer

    @property
    def inner(self) -> list[torch.optim.Optimizer]:
        """Torch's optimizers, in those of ZeRO and of master weights: what holds state."""
        inside = [getattr(each, "inner", each) for each in self.optimizers]
        return [getattr(each, "optimizer", each) for each in inside]

    # ── a step ────────────────────────────────────────────────────────────────────────────────────

    def share(self, tokens: Tensor, targets: Tensor) -> list[Batch]:
        """This rank's micro-batches of a global batch: the rows of its place on dp, and of these
        the tokens of its place on cp.

        Raises ValueError for another number of sequences than global_batch, or of targets.
        """
        batch = self.train.global_batch
        _check_sides("share", tokens, targets)
        if len(tokens) != batch:
            raise ValueError(f"these are {len(tokens)} sequences: give global_batch={batch}")
        return self._cut_batch(tokens, targets)

    def _cut_batch(self, tokens: Tensor, targets: Tensor) -> list[Batch]:
        coords, mesh = self.rank.coords, self.rank.mesh
        mine = [side.chunk(mesh.dp)[coords["dp"]] for side in (tokens, targets)]
        if mesh.cp > 1:
            layout = context_parallel.layout(tokens.shape[1], mesh.cp, self.train.layout)
            mine = [layout.split(side, coords["cp"]) for side in mine]
        return list(zip(*(side.split(self.train.micro_batch) for side in mine), strict=True))

    def __call__(self, batches: Sequence[Batch], *, messages: str = "matched") -> Taken:
        """One step with this rank's micro-batches, as `share` cuts them; `messages` between stages
        as `pipeline.actions` has them."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        comm = self.rank.comm("pp")
        how: Any = dict(loss=self._loss, messages=messages, replicas=self.replicas)
        run = pipeline.run(self.stages, self.plan, comm, batches, **how)
        gradients = self._reduced()
        norm = None
        if self.train.clip:
            norm = zero.clip_grad_norm(gradients, self.rank.comm(), self.train.clip)
        (self.scaler or _Steps).step(self._all)
        if self.scaler is not None:
            self.scaler.update()
        if self.train.fp8 == "delayed":
            quantization.advance_scales(self.stages, self.rank.comm("dp", "cp", "tp"))
        return Taken(self._whole(run), norm, run)

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over all targets of a batch of any size, which all ranks have whole; the
        same on all ranks. Nothing is trained."""
        _check_sides("evaluate", tokens, targets)
        short = -len(tokens) % (self.train.micro_batch * self.rank.mesh.dp)
        tokens = torch.cat([tokens, tokens[:1].expand(short, -1)])
        none = torch.full_like(targets[:1], IGNORED).expand(short, -1)
        found = torch.zeros(2, dtype=torch.float64, device=self.rank.device)
        kept = [buffer.clone() for buffer in self.stages.buffers()]  # scales that a pass moves
        self.stages.eval()
        for each in self._cut_batch(tokens, torch.cat([targets, none])):
            found += self._passed(*each)
        self.stages.train()
        for buffer, before in zip(self.stages.buffers(), kept, strict=True):
            buffer.copy_(before)
        ranks = self.rank.comm("pp", "dp", "cp")
        with ranks.record("evaluate"):
            total, count = ranks.all_reduce(found)
        return total / count

    def _passed(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """A micro-batch goes through the stages; on the last one the sum of the losses of its
        targets and their number, zeros elsewhere."""
        comm, place, x = self.rank.comm("pp"), self.plan.places[0], tokens
        for stage in sorted(self._stages, key=lambda stage: stage.index):
            s, ends = stage.index, self.plan.stages - 1
            if place[s] != comm.rank:  # micro-batches flow both ways, and this is the other way
                continue
            with comm.record("evaluate"):
                if s and place[s - 1] != comm.rank:
                    x = comm.recv(stage.message(tokens), place[s - 1])
                x = stage(x)
                if s < ends and place[s + 1] != comm.rank:
                    comm.send(x.contiguous(), place[s + 1])
            if s == ends:
                count = (targets != IGNORED).sum()
                return torch.stack([self._mean(x, targets) * count, count])
        return torch.zeros(2, device=x.device)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """What a backward pass begins with: the mean loss, scaled, if losses are."""
        found = self._mean(logits, targets)
        return found if self.scaler is None else self.scaler.scale(found)

    def _mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The mean over the targets of a micro-batch, in fp32 or wider."""
        if self.rank.mesh.tp > 1:
            tp = self.rank.comm("tp")
            total = tensor_parallel.cross_entropy(logits, targets, tp, reduction="sum")
        else:
            if self.train.autocast:  # which computes losses in fp32
                logits = logits.float()
            each = cross_entropy(logits, targets, reduction="none")
            wide = torch.promote_types(each.dtype, torch.float32)  # fp16 ends at 65,504
            total = each.sum(dtype=wide)
        return total / (targets != IGNORED).sum().clamp(min=1)

    def _reduced(self) -> list[nn.Parameter]:
        """What the optimizers step, with the mean gradient of all replicas."""
        found: list[nn.Parameter] = []
        for optimizer, (_, comm) in zip(self.optimizers, self.sides, strict=True):
            if hasattr(optimizer, "collect"):
                optimizer.collect()
            mine = [p for group in optimizer.param_groups for p in group["params"]]
            if self.train.zero == 0:
                _average(mine, comm)
            found += mine
        if self.scaler is not None:
            self.scaler.unscale_(self._all)
        return found

    def _whole(self, run: pipeline.RankRun) -> Tensor:
        """The loss of the global batch, on all ranks."""
        mine = torch.zeros((), device=self.rank.device) if run.loss is None else run.loss
        if self.scaler is not None:
            mine = mine / self.scaler.value
        ranks = self.rank.comm("pp", "dp", "cp")
        with ranks.record("loss"):
            return ranks.all_reduce(mine.double()) / self.replicas.size

    # ── a snapshot ────────────────────────────────────────────────────────────────────────────────

    def save(self, path: str | os.PathLike, about: Mapping[str, Any] | None = None) -> None:
        """Write weights, optimizer states and the loss scale to a file, which the ranks of any mesh
        can `load`; all ranks do (`zero.save`).

        about: what else to keep, as JSON has it: how far the run is

        Raises ValueError for delayed scales of fp8, and for weights in nf4, which no file keeps.
        """
        if self.train.fp8 == "delayed":
            remedy = "train with fp8='current', whose scales are those of each step"
            raise ValueError(f"fp8='delayed' has scales that a snapshot does not keep: {remedy}")
        scaler = self.scaler
        scale = None if scaler is None else [scaler.value, scaler.good_steps]
        kept = {"loss_scale": scale, "about": dict(about or {})}
        zero.save(path, self._stages, self.optimizers, comm=self.rank.comm(), about=kept)

    def load(self, path: str | os.PathLike) -> dict[str, Any]:
        """Go on from a file that `save` wrote on any mesh; what it was given as `about`. Raises
        zero.SnapshotError for a file that does not fit, before anything changes."""
        kept = zero.load(path, self._stages, self.optimizers, comm=self.rank.comm())
        if self.scaler is not None and kept.get("loss_scale"):
            self.scaler.value, self.scaler.good_steps = kept["loss_scale"]
        return kept.get("about", {})

    @property
    def _stages(self) -> list[Any]:
        return list(self.stages)


class _Together:
    """The optimizers of a rank as one, of which another rank may have more, or none: all ranks ask
    once whether gradients are finite, and step all or nothing."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.optimizers = optimizers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all."""
        return [group for each in self.optimizers for group in each.param_groups]

    def step(self) -> None:
        """Step each."""
        for each in self.optimizers:
            each.step()


class _Steps:
    """An optimizer's step, where no loss is scaled."""

    @staticmethod
    def step(optimizer: Any) -> None:
        optimizer.step()


def _seeded(rank: Rank) -> torch.Generator:
    return torch.Generator(rank.device).manual_seed(SEED)


def _cast(net: GPT, dtype: torch.dtype) -> None:
    """The model in another format, as `to` makes it, also where tensors are fake."""
    found: dict[Tensor, nn.Parameter] = {}  # a tied weight stays one
    for part in net.modules():
        for name, p in part._parameters.items():
            if p is not None:
                made = nn.Parameter(p.detach().to(dtype), p.requires_grad)
                part._parameters[name] = found.setdefault(p, made)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def _inside(region: precision.autocast, forward: Callable, *args: Any) -> Any:
    with region:
        return forward(*args)


def _average(parameters: Sequence[nn.Parameter], comm: Comm) -> None:
    """Plain data parallelism: the mean of each gradient over ranks."""
    with comm.record("gradients"):
        for grad in (p.grad for p in parameters if p.grad is not None):
            comm.all_reduce(grad, out=grad).div_(comm.size)


# ── what does not go together ─────────────────────────────────────────────────────────────────────


def _check_sides(call: str, tokens: Tensor, targets: Tensor) -> None:
    for side in (tokens, targets):
        check_tokens(call, side)
    if tokens.shape != targets.shape:
        shapes = f"tokens of shape {tuple(tokens.shape)}, targets of {tuple(targets.shape)}"
        raise ValueError(f"{shapes}: give each token its target")


def check_plan(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> None:
    """Nothing, or a ValueError that says what does not go together, and what would, before a
    message is sent."""
    for kind, value in {ModelConfig: model, TrainConfig: train, Mesh: mesh}.items():
        units.instance(value, kind, "a step")
    model.require_gpt()
    for wrong, why, remedy in _reasons(model, train, mesh):
        if wrong:
            raise ValueError(f"{why}: {remedy}")
    local = tensor_parallel.rank_config(model, mesh.tp)
    if mesh.cp > 1 or train.attention not in ATTEND:
        context_parallel.require(local, mesh.cp, train.attention, train.layout)
        context_parallel.layout(model.seq_len, mesh.cp, train.layout)
    if train.sequence and (mine := model.seq_len // mesh.cp) % mesh.tp:
        whole = f"the {mine} tokens of a rank"
        raise ValueError(f"tp={mesh.tp} does not divide {whole}: pad seq_len or set sequence=False")
    if model.num_experts % mesh.ep:
        sizes = f"ep={mesh.ep} does not divide num_experts={model.num_experts}"
        raise ValueError(f"{sizes}: choose another ep, or another number of experts")
    if train.adapters is not None:
        lora.targets(model, train.adapters.pattern)
    for pattern in train.frozen:
        if not any(fnmatchcase(name, pattern) for name in anatomy.tensors(model)):
            remedy = "anatomy.tensors(model) has their names"
            raise ValueError(f"frozen={pattern!r} is the name of no parameter: {remedy}")
    plan = schedule_of(train, mesh)
    if train.layers is not None and len(train.layers) != plan.stages:
        sizes = f"layers={train.layers} are for {len(train.layers)} stages"
        raise ValueError(f"{sizes}, and {plan.name} has {plan.stages}: give as many")
    pipeline.stages.filled(model, plan.stages, train.layers)  # or an error


def _reasons(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> Iterator[tuple[bool, str, str]]:
    """Whether something is wrong, why, and what to do."""
    ring = train.attention not in ATTEND
    yield (
        mesh.cp > 1 and not ring,
        f"attention={train.attention!r} sees the tokens of one rank, and cp={mesh.cp}",
        "give attention='ring' or 'ulysses'",
    )
    yield (
        ring and model.dropout > 0,
        f"dropout={model.dropout} in attention={train.attention!r}: no mask for keys that travel",
        "build the model with dropout=0",
    )
    yield (
        train.sequence and mesh.tp == 1,
        "sequence=True shares out tokens over tp, and tp=1",
        "set sequence=False or tp of 2 or more",
    )
    yield (
        train.fp8 is not None and train.half,
        f"fp8={train.fp8!r} adds up in fp32, and weights of precision={train.precision!r} do not",
        "set autocast=True, or precision='fp32'",
    )
    yield (
        train.fp8 == "tiles" and mesh.tp > 1 and _cuts_tiles(model, train, mesh),
        f"tp={mesh.tp} cuts tiles of {quantization.fp8.GROUP} numbers of a layer",
        "set fp8='current'",
    )
    yield (
        mesh.ep > 1 and model.num_experts == 1,
        f"ep={mesh.ep} spreads experts, and the model has none",
        "set ep=1 or num_experts",
    )
    yield from _reasons_of_zero(model, train, mesh)
    packed = train.adapters is not None and train.adapters.base == "nf4"
    yield (
        train.fp8 is not None and packed,
        f"fp8={train.fp8!r} finds no layer of a block whose weight is not in nf4",
        "set fp8=None, or adapters with base=''",
    )
    yield (
        mesh.tp > 1 and packed,
        f"a weight in nf4 is no matrix of numbers that tp={mesh.tp} could cut",
        "give adapters with base=''",
    )


def _cuts_tiles(model: ModelConfig, train: TrainConfig, mesh: Mesh) -> bool:
    """Whether a layer that tensor parallelism splits has shares that are not whole tiles."""
    local = tensor_parallel.rank_config(model, mesh.tp)
    widths = [local.num_heads * local.d_head, local.num_kv_heads * local.d_head]
    dense = local.num_experts == 1
    widths += [local.d_ff] if dense else [1] * train.sequence  # a router's tokens are shared out
    return any(width % quantization.fp8.GROUP for width in widths)


def _reasons_of_zero(
    model: ModelConfig, train: TrainConfig, mesh: Mesh
) -> Iterator[tuple[bool, str, str]]:
    """The same, of what ZeRO shares out."""
    plan, full = schedule_of(train, mesh), train.zero == 3
    yield (
        full and plan.split,
        f"{plan.name} splits backward passes, and zero=3 gathers weights for whole ones",
        "set zero=2, or schedule='one_f_one_b'",
    )
    yield (
        full and mesh.pp > 1 and model.tied,
        "zero=3 cuts a tied embedding differently in the first and the last stage",
        "set zero=2, or build the model with tied=False",
    )
    yield (
        full and mesh.ep > 1,
        f"zero=3 shares all weights of a layer over dp, and ep={mesh.ep} has experts apart",
        "set zero=2",
    )
    yield (
        full and train.adapters is not None and train.adapters.base == "nf4",
        "zero=3 gathers weights of one dtype, and a layer in nf4 has two",
        "set zero=2, or adapters with base=''",
    )
