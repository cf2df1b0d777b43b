"""Model states: weights, gradients and what the optimizer keeps, whole or as one rank's shard."""

from collections.abc import Iterator

from labutils import anatomy
from labutils.config import MOMENTS, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line

FP32 = 4
WIDTHS = {"fp32": FP32, "bf16": 2, "fp16": 2}  # bytes of a number
# The ZeRO level from which a component is one rank's share.
SHARDED_FROM = {"optimizer": 1, "gradients": 2, "weights": 3}


def states(
    *,
    half: bool,
    fp32_gradients: bool | str,
    optimizer: str,
    level: int,
    parameters: int,
    tensors: int,
    dp: int,
) -> Iterator[Line]:
    """Bytes of weights, gradients and optimizer state of `parameters` numbers in so many `tensors`,
    on one of `dp` ranks at a ZeRO level."""

    def line(name: str, component: str, width: int) -> Line:
        sharded = level >= SHARDED_FROM[component]
        elements = -(-parameters // dp) if sharded else parameters
        return Line(name, elements * width, component, axis="dp" if sharded else "")

    width = 2 if half else FP32
    yield line("weights", "weights", width)
    if not (half and fp32_gradients == "only"):
        yield line("gradients", "gradients", width)
    if half and fp32_gradients:
        yield line("fp32 gradients", "gradients", FP32)
    if half:
        yield line("master weights", "optimizer", FP32)
    for name in MOMENTS[optimizer]:
        yield line(name, "optimizer", FP32)
    if len(MOMENTS[optimizer]) == 2:  # Adam counts its steps once for each tensor; a shard is one
        yield Line("step", (1 if level else tensors) * FP32, "optimizer")


def buffers(model: ModelConfig, width: int) -> Iterator[Line]:
    """Bytes of RoPE's tables of cos and sin, in numbers of so many bytes."""
    if model.positions == "rope":
        numbers = 2 * model.seq_len * (model.d_head // 2)
        yield Line("buffers", numbers * width, "buffers")


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
    half = train.precision != "fp32" and not train.autocast
    held = states(
        half=half, fp32_gradients=train.fp32_gradients, optimizer=train.optimizer,
        level=zero_level(train, mesh), parameters=model.num_params,
        tensors=anatomy.num_tensors(model), dp=mesh.dp,
    )  # fmt: skip
    return Ledger([*held, *buffers(model, 2 if half else FP32)])


def require_formula(train: TrainConfig) -> None:
    """Nothing, or a ValueError for what changes the bytes of a step and has no formula here."""
    plain = dict(adapters=None, fp8=None, sequence=False, reshard=True)
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
    kept = state if step > 1 else 0
    summed = weights if micro_batches > 1 else 0
    return max(weights + kept + summed + working, 2 * weights + state + temporary)
