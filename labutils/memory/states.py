"""Model states: weights, gradients and what the optimizer keeps, whole or as one rank's shard."""

import math
from collections.abc import Iterator
from dataclasses import replace

from labutils import anatomy, units
from labutils.config import MOMENTS, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line

FP32 = 4
WIDTHS = {"fp32": FP32, "bf16": 2, "fp16": 2}  # bytes of a number


def states(
    *, half: bool, fp32_gradients: bool | str, optimizer: str, parameters: int, tensors: int
) -> Iterator[Line]:
    """Bytes of weights, gradients and optimizer state of `parameters` numbers in so many `tensors`,
    all on one device."""
    width = 2 if half else FP32
    yield Line("weights", parameters * width, "weights")
    if not (half and fp32_gradients == "only"):
        yield Line("gradients", parameters * width, "gradients")
    if half and fp32_gradients:
        yield Line("fp32 gradients", parameters * FP32, "gradients")
    if half:
        yield Line("master weights", parameters * FP32, "optimizer")
    for name in MOMENTS[optimizer]:
        yield Line(name, parameters * FP32, "optimizer")
    if len(MOMENTS[optimizer]) == 2:  # Adam counts its steps once for each tensor
        yield Line("step", tensors * FP32, "optimizer")


def _shares(
    model: ModelConfig, train: TrainConfig, level: int, n: int, rank: int
) -> Iterator[Line]:
    """Bytes of the same on one of `n` ranks at a ZeRO level, whose partition says what it has."""
    from labutils import data_parallel, zero  # where these facts stand; they load torch

    half = train.precision != "fp32" and not train.autocast
    width = 2 if half and level < 3 else FP32
    dealt = list(anatomy.units(model).values())
    if level < 3:
        numels = [math.prod(shape) for shape in anatomy.tensors(model).values()]
        sizes = [numel * width for numel in numels]
        grouped = data_parallel.buckets(sizes, train.bucket_bytes)
        dealt = [tuple(numels[i] for i in bucket.names) for bucket in grouped]
    options: dict = {"itemsize": width, "shard_itemsize": FP32, "optimizer": train.optimizer}
    gradients = "fp32 gradients" if half and level < 3 else "gradients"
    kept = {"weight shards": "weights"} | ({"gradient shards": gradients} if level > 1 else {})
    kept |= {name: name for name in ("weights", "master weights", "step")}
    kept |= {name: name for name in MOMENTS[train.optimizer]}
    for line in zero.predict_held(dealt, n, level, rank=rank, **options):
        if line.name in kept:
            yield replace(line, name=kept[line.name], axis="dp" * (line.name != "weights"))
    if level == 1:  # what has been reduced lies in its bucket, or is fp32 beside half ones
        parts = [(zero.partition(sum(unit), n), unit) for unit in dealt]
        own = [sum(b - a for a, b in part.cuts(unit, rank)) for part, unit in parts]
        if not half or train.fp32_gradients:
            own = [part.padded for (part, _), mine in zip(parts, own, strict=True) if mine]
        yield Line(gradients, sum(own) * FP32, "gradients", axis="dp")


def buffers(model: ModelConfig, width: int) -> Iterator[Line]:
    """Bytes of RoPE's tables of cos and sin, in numbers of so many bytes."""
    if model.positions == "rope":
        numbers = 2 * model.seq_len * (model.d_head // 2)
        yield Line("buffers", numbers * width, "buffers")


def model_states(
    model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh(), rank: int = 0
) -> Ledger:
    """Bytes of weights, gradients and optimizer state after an optimizer step, under the names of
    `measure.model_states`.

    Adam keeps two moments in fp32; with half-precision weights an fp32 master copy goes along, and
    fp32 gradients if asked for. On a `mesh` with several data-parallel ranks, the ZeRO level of
    `train` decides what of it `rank` holds its share of; no two ranks need hold the same. Gradients
    of a half-precision share are fp32, as its master copy is, and at level 3 the share is that.

    >>> train = TrainConfig(micro_batch=1, global_batch=1)
    >>> model_states(ModelConfig.named("gpt2-xl"), train).only(component="weights").total
    3115222400

    Source: ZeRO 1910.02054, section 3.1: 2Ψ + 2Ψ + 12Ψ.
    """
    mesh.coords(rank)  # or an error
    half = train.precision != "fp32" and not train.autocast
    if level := zero_level(train, mesh):
        held = _shares(model, train, level, mesh.dp, rank)
    else:
        held = states(
            half=half, fp32_gradients=train.fp32_gradients, optimizer=train.optimizer,
            parameters=model.num_params, tensors=anatomy.num_tensors(model),
        )  # fmt: skip
    return Ledger([*held, *buffers(model, 2 if half and level < 3 else FP32)])


def require_formula(train: TrainConfig) -> None:
    """Nothing, or a ValueError for what changes the bytes of a step and has no formula here."""
    plain = dict(adapters=None, fp8=None, sequence=False)
    for name, value in plain.items():
        if getattr(train, name) != value:
            remedy = f"leave {name}={value!r}, or run step.build dry (World(mesh, engine='dry'))"
            raise ValueError(f"memory has no formula for {name}={getattr(train, name)!r}: {remedy}")
    if train.attention not in ("plain", "sdpa"):
        remedy = "give 'plain' or 'sdpa', or ask context_parallel.kept_activations"
        raise ValueError(f"memory has no formula for attention={train.attention!r}: {remedy}")


def zero_level(train: TrainConfig, mesh: Mesh) -> int:
    """The ZeRO level at which states are really sharded on `mesh`: 0 where there is one
    data-parallel rank."""
    require_formula(train)
    for axis in ("tp", "pp", "cp", "ep"):
        if (n := getattr(mesh, axis)) > 1:
            remedy = f"leave {axis}=1 and use dp with TrainConfig(zero=1, 2 or 3)"
            raise ValueError(f"memory has no formula for {axis}={n} yet: {remedy}")
    return train.zero if mesh.dp > 1 else 0


def step_peak(
    step: int, micro_batches: int, *, weights: int, state: int, working: int, temporary: int
) -> int:
    """Bytes at the fullest moment of optimizer step 1, 2, … in fp32, when the gradients of
    `micro_batches` add up, then the optimizer steps and `zero_grad()` lets go of them.

    weights: bytes of the weights; gradients take as many
    state: what the optimizer keeps between steps, from its first `step()` on
    working: what forward and backward of one micro-batch hold at their fullest, besides weights,
        state and what is left of earlier micro-batches
    temporary: what `optimizer.step()` needs for a moment

    >>> sizes = dict(weights=4, state=8, working=30, temporary=4)
    >>> [step_peak(step, micro_batches, **sizes) for micro_batches in (1, 2) for step in (1, 2)]
    [34, 42, 38, 46]
    """
    step, micro_batches = units.wholes(1, step=step, micro_batches=micro_batches)
    weights, state, working, temporary = units.wholes(
        weights=weights, state=state, working=working, temporary=temporary
    )
    kept = state if step > 1 else 0
    summed = weights if micro_batches > 1 else 0
    return max(weights + kept + summed + working, 2 * weights + state + temporary)
