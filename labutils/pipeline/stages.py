"""A GPT cut into stages: of equal time, each with the layers that its rank runs."""

import functools
import itertools
from collections.abc import Iterable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from labutils import anatomy, units
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.schedule import Schedule
from labutils.world import marked


def stage_flops(model: ModelConfig, layers: Sequence[int]) -> list[int]:
    """FLOPs of each stage's matrix products in a forward pass, for one token, if the stages have so
    many layers each; the head is the last one's, an embedding multiplies nothing.

    They are the times of `Durations(F=…)`, in the time of a FLOP; W takes as long, and so does B
    but for attention's products of activations, which it computes twice.

    Raises ValueError: if these are not all layers of the model.
    """
    units.instance(model, ModelConfig, "stage_flops")
    layers = [units.whole(count, "layers") for count in layers]
    if sum(layers) != model.num_layers:
        got = f"stages of {', '.join(map(str, layers))} layers"
        raise ValueError(f"{got} do not make a model of {model.num_layers}: they must add up to it")
    flops, dense = anatomy.token_flops(model), model.dense_layers
    of_dense = sum(n for name, n in flops.items() if name.startswith("dense."))
    of_others = sum(flops.values()) - flops["head"] - of_dense
    first = [min(end, dense) for end in itertools.accumulate(layers, initial=0)]
    found = []
    for count, plain in zip(layers, (b - a for a, b in itertools.pairwise(first)), strict=True):
        others = of_others // (model.num_layers - dense) * (count - plain)
        found.append(of_dense // max(dense, 1) * plain + others)
    return [*found[:-1], found[-1] + flops["head"]]


def cut(model: ModelConfig, n: int) -> tuple[int, ...]:
    """The layers of each of n stages for which the longest stage is as short as it can be, the head
    included; the first stages, which hold most activations, have fewer where it makes no odds.

    >>> cut(ModelConfig.named("gpt2"), 4)  # its head takes the time of 4.5 layers
    (4, 4, 4, 0)

    Two stages more than layers have the embedding alone first, and the head alone last.

    Raises ValueError: if there are still more.
    """
    units.instance(model, ModelConfig, "cut")
    L, n = model.num_layers, units.whole(n, "n", 1)
    if n > L + 2:
        most = f"at most {L + 2}, the embedding alone first, the head alone last"
        raise ValueError(f"{L} layers do not fill {n} stages: {most}")
    if n == L + 2:
        return (0, *[1] * L, 0)
    if n == 1:
        return (L,)
    ways = f"the stages of all ways to cut {L} layers are"
    units.writable((L - n + 2) * n, ways, "take fewer layers or stages")
    found = []
    for last in range(L - n + 2):
        each, more = divmod(L - last, n - 1)
        found.append((*[each] * (n - 1 - more), *[each + 1] * more, last))
    whole, head = stage_flops(model, (L, 0))

    def longest(layers: tuple[int, ...]) -> int:
        return max(whole // L * max(layers), whole // L * layers[-1] + head)

    return min(found, key=lambda layers: (longest(layers), -layers[-1]))


def filled(
    model: ModelConfig, n: int, layers: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The layers of each of n stages: those given, or as `cut` has them.

    Raises ValueError: if they are not those of the model, or not n, or a stage has nothing to do.
    """
    layers = cut(model, n) if layers is None else tuple(layers)
    if len(layers) != units.whole(n, "n", 1):
        raise ValueError(f"layers={layers} are for {len(layers)} stages, not for {n}")
    stage_flops(model, layers)  # or an error
    empty = [i for i in range(1, n - 1) if not layers[i]]
    if empty:
        raise ValueError(f"layers={layers}: stage {empty[0]} has nothing to do; give it a layer")
    return layers


class PipelineStage(GPT):
    """Some consecutive layers of a GPT, with the embedding if it is the first stage and the head if
    it is the last; made by `split`. Parameters have the names that they have in the whole model.

    index, count: which stage it is, of how many
    """

    index: int
    count: int

    def forward(
        self, x: Int[Tensor, "b s"] | Float[Tensor, "b s_or_s_t h"]
    ) -> Float[Tensor, "b s_out h_or_v"]:
        """The residual stream [b, s, h] behind these layers; in come tokens [b, s] at the first
        stage, logits [b, s, v] come out of the last."""
        x = self.embed(x) if self.index == 0 else x
        for block in self.get_submodule("blocks").children():
            x = block(x)
        return self.head(self.norm(x)) if self.index == self.count - 1 else x

    def message(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s_or_s_t h"]:
        """Memory for what comes from a neighbour: the residual stream of these tokens [b, s], or
        its gradient, in the format in which layers compute, which shards of them need not have;
        under sequence parallelism this rank's tokens of it."""
        b, s = tokens.shape
        if getattr(self, "sequence", False):
            s //= vars(self)["comm"].size
        sharded = vars(self).get("_sharded")
        dtype = (sharded and sharded.param_dtype) or next(self.parameters()).dtype
        return torch.empty(b, s, self.config.d_model, dtype=dtype, device=tokens.device)


@functools.cache
def _stage_of(kind: type[GPT]) -> type[PipelineStage]:
    """Stages of a GPT that tensor parallelism has changed embed as it does."""
    return PipelineStage if kind is GPT else type("PipelineStage", (PipelineStage, kind), {})


def split(model: GPT, n: int, layers: Sequence[int] | None = None) -> nn.ModuleList:
    """The n stages of a model, which share its parameters; keep those of your rank (`local`).

    layers: of each stage; as `cut` has them unless given

    Tensor parallelism comes before (`tensor_parallel.parallelize`), data parallelism after: once a
    step by `data_parallel.average_gradients` or `zero.Optimizer(level=1)`. What reduces in hooks
    does so after each backward pass of a stage: `zero.Optimizer(level=2)`; `replicate` and
    `zero.shard(stage, comm, units=stage.blocks.values())`, around each stage by itself, where
    backward passes are whole, and `run` refuses them elsewhere. A tied embedding is in the first
    stage and in the last: `run` adds the gradients of both up, and refuses `zero.shard` of it.
    Each parameter knows its stages, `parameter.stages`.

    Raises ValueError: if layers are not those of the model, or not n; TypeError for a model with a
    forward pass of its own, such as one that context parallelism has changed.
    """
    if not isinstance(model, GPT) or type(model).forward is not GPT.forward:
        raise TypeError(f"split takes a labutils.model.GPT, whole, got {type(model).__name__}")
    if hasattr(model, "_sharded"):
        raise TypeError("split takes a model that is whole: zero.shard each of its stages, later")
    layers = filled(model.config, n, layers)
    numbers = iter(range(model.config.num_layers))
    stages = nn.ModuleList(
        _stage(model, i, n, itertools.islice(numbers, count)) for i, count in enumerate(layers)
    )
    for parameter in stages.parameters():
        vars(parameter)["stages"] = ()
    for i, stage in enumerate(stages):
        for parameter in stage.parameters():
            vars(parameter)["stages"] += (i,)  # whose backward passes give its gradient
    if model.config.tied:  # one of the ends may be elsewhere (`keep`)
        for end in (model.tokens, model.head):
            if end is not None:
                vars(end.weight)["stages"] = (0, n - 1)[: min(n, 2)]
    return stages


def keep(model: GPT, schedule: Schedule, rank: int, layers: Sequence[int] | None = None) -> GPT:
    """The model, changed in place: None instead of each layer, or end, that the rank does not run
    under the schedule, whose stages have so many `layers` each, as in `split`. What other
    techniques then change and send is this rank's alone, and `split` comes after them.
    """
    mine, counts = placed(schedule, rank), layers or cut(model.config, schedule.stages)
    stage_of = (stage for stage, count in enumerate(counts) for _ in range(count))
    for k, stage in enumerate(stage_of):
        if stage not in mine:
            setattr(model.blocks, str(k), None)
    away = ["tokens", "positions", "dropout"] if 0 not in mine else []
    for name in [*away, *(["norm", "head"] if schedule.stages - 1 not in mine else [])]:
        setattr(model, name, None)
    return model


def _stage(model: GPT, index: int, count: int, layers: Iterable[int]) -> PipelineStage:
    """Stage `index` of `count`, with these layers of the model."""
    kind = _stage_of(type(model))  # type: ignore[arg-type]  # a class has a hash, too
    stage = kind.__new__(kind)
    nn.Module.__init__(stage)
    known = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    vars(stage).update(known, index=index, count=count)  # its config, its comm
    parts = ["tokens", "positions", "dropout"] if index == 0 else []
    for name in [*parts, "blocks", *(["norm", "head"] if index == count - 1 else [])]:
        setattr(stage, name, getattr(model, name))
    stage.add_module("blocks", nn.ModuleDict({str(k): model.blocks[k] for k in layers}))
    return stage


def local(stages: nn.ModuleList, schedule: Schedule, rank: int) -> nn.ModuleList:
    """The stages that a rank runs: one, or a chunk for each that the schedule places there.

    Raises ValueError: if the schedule has more or fewer stages.
    """
    units.instance(schedule, Schedule, "local")
    if len(stages) != schedule.stages:
        remedy = f"split(model, {schedule.stages})"
        raise ValueError(
            f"{schedule.name} has {schedule.stages} stages, not {len(stages)}: {remedy}"
        )
    mine = nn.ModuleList(stages[i] for i in placed(schedule, rank))
    for parameter in mine.parameters():
        vars(marked(parameter))["ends"] = 1
    for shared in common(mine, schedule, rank):
        vars(shared)["ends"] = 2  # a norm over ranks counts each of its numbers once
    return mine


def placed(schedule: Schedule, rank: int) -> list[int]:
    """The stages that a schedule places on a rank.

    Raises ValueError for a rank that the schedule has not.
    """
    units.instance(schedule, Schedule, "a rank's stages")
    schedule.order_of(rank)  # or an error
    return [i for i in range(schedule.stages) if any(place[i] == rank for place in schedule.places)]


def shared_with(schedule: Schedule, rank: int, tied: bool) -> int | None:
    """The rank that has parameters of this one, too: all of them where micro-batches flow both
    ways, a tied embedding where first and last stage are apart."""
    ends = schedule.places[0][0], schedule.places[0][-1]
    if len(schedule.places) == 2:
        return schedule.places[1][schedule.places[0].index(rank)]
    if tied and rank in ends and ends[0] != ends[1]:
        return ends[rank == ends[0]]
    return None


def common(stages: Iterable[nn.Module], schedule: Schedule, rank: int) -> list[Tensor]:
    """The parameters of a rank's stages that another rank has, too (`shared_with`)."""
    mine = [stage for stage in stages if isinstance(stage, PipelineStage)]
    if shared_with(schedule, rank, mine[0].config.tied) is None:
        return []
    if len(schedule.places) == 2:
        return list(nn.ModuleList(mine).parameters())
    first = next((stage for stage in mine if stage.index == 0), None)
    return [mine[-1].head.weight if first is None else first.tokens.weight]
