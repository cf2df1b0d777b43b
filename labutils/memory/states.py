"""Model states: weights, gradients and what the optimizer keeps, on one device."""

from collections.abc import Iterator

from labutils import anatomy, units
from labutils.anatomy import FP32_BYTES
from labutils.config import MOMENTS, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line


def buffers(model: ModelConfig, width: int) -> Iterator[Line]:
    """Bytes of RoPE's tables of cos and sin, in numbers of so many bytes."""
    if model.positions == "rope":
        numbers = 2 * model.seq_len * (model.d_head // 2)
        yield Line("buffers", numbers * width, "buffers")


def model_states(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes of weights, gradients and optimizer state on one device after an optimizer step, under
    the names of `measure.model_states`; on a mesh see `predict.states`.

    Adam keeps two moments in fp32; with half-precision weights an fp32 master copy goes along, and
    fp32 gradients if asked for.

    >>> train = TrainConfig(micro_batch=1, global_batch=1)
    >>> model_states(ModelConfig.named("gpt2-xl"), train).only(component="weights").total
    3115222400

    Source: ZeRO 1910.02054, section 3.1: 2Ψ + 2Ψ + 12Ψ.
    """
    require_formula(model, train)
    width, numbers = 2 if train.half else FP32_BYTES, model.num_params
    held = [Line("weights", numbers * width, "weights")]
    if not (train.half and train.fp32_gradients == "only"):
        held.append(Line("gradients", numbers * width, "gradients"))
    if train.half and train.fp32_gradients:
        held.append(Line("fp32 gradients", numbers * FP32_BYTES, "gradients"))
    kept = ["master weights"] * train.half + list(MOMENTS[train.optimizer])
    held += [Line(name, numbers * FP32_BYTES, "optimizer") for name in kept]
    if len(MOMENTS[train.optimizer]) == 2:  # Adam counts its steps once for each tensor
        held.append(Line("step", anatomy.num_tensors(model) * FP32_BYTES, "optimizer"))
    return Ledger([*held, *buffers(model, width)])


def require_formula(model: ModelConfig, train: TrainConfig) -> None:
    """Nothing, or an error for what changes the bytes of a step and has no formula here."""
    units.instance(model, ModelConfig, "memory")
    units.instance(train, TrainConfig, "memory")
    if train.precision == "fp64":
        raise ValueError("memory has no formula for precision='fp64': give 'fp32', a half of it")
    plain = dict(adapters=None, fp8=None, sequence=False)
    for name, value in plain.items():
        if getattr(train, name) != value:
            remedy = f"leave {name}={value!r}, or ask predict.peak"
            raise ValueError(f"memory has no formula for {name}={getattr(train, name)!r}: {remedy}")
    if train.attention not in ("plain", "sdpa"):
        remedy = "give 'plain' or 'sdpa', or ask predict.activations"
        raise ValueError(f"memory has no formula for attention={train.attention!r}: {remedy}")


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
