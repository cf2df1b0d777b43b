"""Model states: weights, gradients and what the optimizer keeps, whole or as one rank's shard."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from labutils.config import MOMENTS, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line

FP32 = 4
INDEX = 8  # bytes of an int64
WIDTHS = {"fp32": FP32, "bf16": 2, "fp16": 2}  # bytes of a number
# The ZeRO level from which a component is one rank's share.
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}


class ModelState(NamedTuple):
    """So many numbers of so many bytes, which live from step to step."""

    name: str
    component: str
    elements: Any
    width: int
    sharded: bool


def states(
    *,
    half: bool,
    fp32_gradients: bool | str,
    optimizer: str,
    level: int,
    parameters: Any,
    tensors: Any,
    share: Any,
) -> Iterator[ModelState]:
    """Weights, gradients and optimizer state of `parameters` numbers in so many `tensors`, or the
    `share` that is left of them at a ZeRO level."""

    def state(name: str, component: str, width: int) -> ModelState:
        sharded = level >= SHARDED_FROM[component]
        return ModelState(name, component, share if sharded else parameters, width, sharded)

    width = 2 if half else FP32
    yield state("weights", "weights", width)
    if not (half and fp32_gradients == "only"):
        yield state("gradients", "gradients", width)
    if half and fp32_gradients:
        yield state("fp32 gradients", "gradients", FP32)
    if half:
        yield state("master weights", "optimizer", FP32)
    for name in MOMENTS[optimizer]:
        yield state(name, "optimizer", FP32)
    if len(MOMENTS[optimizer]) == 2:  # Adam counts its steps once for each tensor; a shard is one
        yield ModelState("step", "optimizer", 1 if level else tensors, FP32, False)


def model_states(model: ModelConfig, train: TrainConfig, mesh: Mesh = Mesh()) -> Ledger:
    """Bytes of weights, gradients and optimizer state after an optimizer step, under the names of
    `measure.model_states`.

    Adam keeps two moments in fp32; with half-precision weights an fp32 master copy goes along, and
    fp32 gradients if asked for. On a `mesh` with several data-parallel ranks, the ZeRO level of
    `train` decides what of it a rank holds its share of: ⌈Ψ/N_d⌉ numbers of one flat, padded list.

    >>> train = TrainConfig(micro_batch=1, global_batch=1)
    >>> model_states(ModelConfig.named("gpt2-xl"), train).only(component="weights").total
    3115222400

    Source: ZeRO 1910.02054, section 3.1: 2Ψ + 2Ψ + 12Ψ.
    """
    level, half = zero_level(train, mesh), train.precision != "fp32" and not train.autocast
    lines = [
        Line(name, elements * width, component=component, axis="dp" if sharded else "")
        for name, component, elements, width, sharded in states(
            half=half,
            fp32_gradients=train.fp32_gradients,
            optimizer=train.optimizer,
            level=level,
            parameters=model.num_params,
            tensors=model.num_tensors,
            share=-(-model.num_params // mesh.dp),
        )
    ]
    if model.positions == "rope":  # tables of cos and sin
        numbers = 2 * model.seq_len * (model.d_head // 2)
        lines.append(Line("buffers", numbers * (2 if half else FP32), component="buffers"))
    return Ledger(lines)


def zero_level(train: TrainConfig, mesh: Mesh) -> int:
    """The ZeRO level at which states are really sharded on `mesh`: 0 where there is one
    data-parallel rank."""
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
    kept = state if step > 1 else 0
    summed = weights if micro_batches > 1 else 0
    return max(weights + kept + summed + working, 2 * weights + state + temporary)
