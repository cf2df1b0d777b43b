"""What has a formula on one device, and the fullest moment of a step in fp32."""

from labutils import units
from labutils.config import ModelConfig, TrainConfig


def require_formula(model: ModelConfig, train: TrainConfig, *, adapters: bool = False) -> None:
    """Nothing, or an error for what changes the bytes of a step and has no formula here; with
    `adapters` they have one."""
    units.instance(model, ModelConfig, "memory")
    units.instance(train, TrainConfig, "memory")
    if train.precision == "fp64":
        raise ValueError("memory has no formula for precision='fp64': give 'fp32', a half of it")
    plain = dict(fp8=None, sequence=False) | ({} if adapters else dict(adapters=None))
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
