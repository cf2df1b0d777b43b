"""What LoRA costs, from the configuration alone: parameters, bytes, FLOPs."""

from collections.abc import Iterator, Mapping

from labutils import anatomy, quantization
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.lora.transform import targets
from labutils.memory import states

Pattern = str | tuple[str, ...]
PASSES = ("outputs", "gradients of inputs", "gradients of weights")


def trainable(model: ModelConfig, *, rank: int, pattern: Pattern = "*") -> int:
    """Parameters of the adapters: r·(d + k) for each matrix W[d, k].

    >>> gpt3 = ModelConfig.named("gpt3-175b")
    >>> [trainable(gpt3, rank=r, pattern=("query", "value")) for r in (1, 8)]
    [4718592, 37748736]

    Source: Hu et al. 2106.09685, section 5.1.
    """
    return rank * sum(count * (d + k) for count, d, k in _matrices(model, pattern))


def _matrices(model: ModelConfig, pattern: Pattern) -> Iterator[tuple[int, int, int]]:
    """How many there are of each target, its outputs and its inputs."""
    sizes = anatomy.letters(model)
    for part in targets(model, pattern):
        d, k = (anatomy.size(dim, sizes) for dim in part.weight.split())
        yield anatomy.size(part.copies, sizes), d, k


def model_states(
    model: ModelConfig,
    *,
    rank: int,
    pattern: Pattern = "*",
    frozen: str = "bf16",
    optimizer: str = "adamw",
    level: int = 0,
    dp: int = 1,
) -> Ledger:
    """Bytes after an optimizer step, under the names of `measure.model_states`: frozen weights,
    and adapters in fp32 with their gradients and what the optimizer keeps of them.

    frozen: "fp32" or "bf16"; or "nf4", where the linear layers of the blocks are in NF4 with double
        quantization and the rest is in bf16 (QLoRA)
    level, dp: the level of ZeRO at which what is trained is sharded over dp ranks: 0, 1 or 2

    >>> llama = ModelConfig.named("llama-2-7b")
    >>> [f"{model_states(llama, rank=16, frozen=f).total / 1e9:.1f} GB" for f in ("bf16", "nf4")]
    ['14.1 GB', '4.5 GB']
    """
    if frozen not in ("fp32", "bf16", "nf4") or level not in (0, 1, 2):
        wanted = "frozen='fp32', 'bf16' or 'nf4', and level=0, 1 or 2"
        raise ValueError(f"wanted {wanted}; got {frozen!r} and {level!r}")
    width = 4 if frozen == "fp32" else 2
    lines = [Line("weights", frozen_bytes(model, frozen), component="weights")]
    numel, matrices = trainable(model, rank=rank, pattern=pattern), _matrices(model, pattern)
    held = states.states(
        half=False, fp32_gradients=False, optimizer=optimizer, level=level if dp > 1 else 0,
        parameters=numel, tensors=2 * sum(count for count, _, _ in matrices), share=-(-numel // dp),
    )  # fmt: skip
    for name, component, elements, itemsize, sharded in held:
        axis = "dp" if sharded else ""
        lines.append(Line(name, elements * itemsize, component=component, axis=axis))
    if model.positions == "rope":
        tables = 2 * model.seq_len * (model.d_head // 2)
        lines.append(Line("buffers", tables * width, component="buffers"))
    return Ledger(lines).merged()


def frozen_bytes(model: ModelConfig, frozen: str) -> int:
    """Bytes of the weights of a model that are not trained, in "fp32", "bf16" or "nf4"."""
    width = 4 if frozen == "fp32" else 2
    if frozen != "nf4":
        return width * model.num_params
    matrices = list(_matrices(model, "*"))
    rest = model.num_params - sum(count * d * k for count, d, k in matrices)
    return width * rest + sum(count * quantization.nf4_bytes(d * k) for count, d, k in matrices)


def training_flops(model: ModelConfig, *, rank: int, pattern: Pattern = "*") -> dict[str, int]:
    """FLOPs of the matrix products of a training step, for one token, by what they compute:
    outputs, gradients of inputs, gradients of weights (of adapters alone).

    What stands before the first adapter needs no gradient; attention is counted in full.

    >>> gpt2 = ModelConfig.named("gpt2")
    >>> f"{sum(training_flops(gpt2, rank=8).values()) / gpt2.flops_per_token():.3f} of full"
    '0.716 of full'

    Raises ValueError for a mixture of experts: which of them need gradients, routing decides.
    """
    if model.num_experts > 1:
        fewer = "there is a formula for num_experts=1"
        raise ValueError(f"num_experts={model.num_experts}: routing decides; {fewer}")
    head = 2 * anatomy.size("v h", anatomy.letters(model))
    found = dict(zip(PASSES, (head, head, 0), strict=True))
    chosen = {part.name for part in targets(model, pattern)}
    learns = False  # whether the residual stream depends on an adapter
    for _ in range(model.num_layers):
        learns = _layer_flops(model, rank, chosen, learns, found)
    return found


def _layer_flops(
    model: ModelConfig, rank: int, chosen: set[str], learns: bool, found: dict[str, int]
) -> bool:
    """Add the FLOPs of a layer to those `found`; whether the residual stream behind it depends on
    an adapter."""
    sizes, depends = anatomy.letters(model), {}
    for part in (each for each in anatomy.parts(model) if each.copies and each.products):
        word, dims = part.name.rpartition(".")[2], part.weight.split()
        base, mine = 2 * anatomy.size(part.products, sizes), part.name in chosen
        if word == "attention":  # q·kᵀ and softmax·v, each with a gradient for both factors
            q, k, v = (depends[each] for each in ("query", "key", "value"))
            found["outputs"] += base
            found["gradients of inputs"] += base // 2 * (q + k + v + (q or k))
            continue
        d, k = (2 * rank * mine * anatomy.size(dim, sizes) for dim in dims)  # of B, and of A
        reads = _reads(word, depends, learns)
        found["outputs"] += base + d + k
        found["gradients of inputs"] += reads * (base + k) + d  # A·x has a gradient always
        found["gradients of weights"] += d + k
        depends[word] = reads or mine
    return learns or depends["output"] or depends["down"]


def _reads(word: str, depends: Mapping[str, bool], learns: bool) -> bool:
    """Whether what a layer reads depends on an adapter."""
    before = {"output": ("query", "key", "value"), "down": ("gate", "up")}.get(word)
    if before:
        return any(depends.get(each, False) for each in before)
    return learns or depends.get("output", False)  # the residual stream, before or after attention
