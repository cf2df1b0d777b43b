"""What LoRA costs, from the configuration alone: parameters, bytes, FLOPs."""

from collections.abc import Iterator
from typing import NamedTuple

from labutils import anatomy
from labutils.config import Adapters, ModelConfig
from labutils.lora.layers import checked_rank
from labutils.lora.transform import targets

Pattern = str | tuple[str, ...]
PASSES = ("outputs", "gradients of inputs", "gradients of weights")


def trainable(model: ModelConfig, *, rank: int, pattern: Pattern = "*") -> int:
    """Parameters of the adapters: r·(d + k) for each matrix W[d, k].

    >>> gpt3 = ModelConfig.named("gpt3-175b")
    >>> [trainable(gpt3, rank=r, pattern=("query", "value")) for r in (1, 8)]
    [4718592, 37748736]
    >>> (L, h, a, g, d), r = ModelConfig.named("llama-3.1-8b").letters("L h a g d"), 16
    >>> both = trainable(ModelConfig.named("llama-3.1-8b"), rank=r, pattern=("query", "value"))
    >>> both == L * r * (h + a * d + h + g * d)  # of queries and values
    True

    Source: Hu et al. 2106.09685, section 5.1.
    """
    able = targets(model, pattern)
    sizes, total = anatomy.letters(model), 0
    for part in able:
        d, k = (anatomy.size(dim, sizes) for dim in part.weight.split())
        total += anatomy.size(part.copies, sizes) * checked_rank(rank, d, k) * (d + k)
    return total


def training_flops(model: ModelConfig, *, rank: int, pattern: Pattern = "*") -> dict[str, int]:
    """FLOPs of the matrix products of a training step, for one token, by what they compute:
    outputs, gradients of inputs, gradients of weights (of adapters alone).

    What stands before the first adapter needs no gradient; attention is counted in full.

    >>> gpt2 = ModelConfig.named("gpt2")
    >>> f"{sum(training_flops(gpt2, rank=8).values()) / gpt2.flops_per_token():.3f} of full"
    '0.716 of full'

    Raises ValueError for a mixture of experts: which of them need gradients, routing decides.
    """
    trainable(model, rank=rank, pattern=pattern)  # or an error
    head = 2 * anatomy.size("v h", anatomy.letters(model))
    found = dict(zip(PASSES, (head, head, 0), strict=True))
    for step in _walk(model, pattern):
        if step.part.products:
            _add_flops(step, rank, anatomy.letters(model), found)
    return found


def _add_flops(step: "_Step", rank: int, sizes: dict[str, int], found: dict[str, int]) -> None:
    """Add the FLOPs of a part, forward and backward, to those `found`."""
    base = 2 * anatomy.size(step.part.products, sizes)
    if step.word == "attention":  # q·kᵀ and softmax·v, each with a gradient for both factors
        query, key, value = step.qkv
        found["outputs"] += base
        found["gradients of inputs"] += base // 2 * (query + key + value + (query or key))
        return
    d, k = (2 * rank * step.mine * anatomy.size(dim, sizes) for dim in step.part.weight.split())
    found["outputs"] += base + d + k  # d·r of B, and r·k of A
    found["gradients of inputs"] += step.reads * (base + k) + d  # A·x has a gradient always
    found["gradients of weights"] += d + k


# ── what autograd keeps ───────────────────────────────────────────────────────────────────────────


def kept_with_adapters(
    model: ModelConfig, adapters: Adapters, how: anatomy.Policy
) -> Iterator[tuple[str, anatomy.Kept]]:
    """As `anatomy.kept`, of a model that is frozen but for its adapters, of r numbers each. Frozen
    weights need none of it; gradients on their way to the first adapter do.

    Raises ValueError where `training_flops` does, and for another policy than attention by SDPA
    that is kept whole, for autocast, and for a model with dropout.
    """
    odd: dict[str, tuple[object, object]]
    odd = {"dropout": (model.dropout, 0), "autocast": (how.autocast, False)}
    odd |= {"attention": (how.attention, "sdpa"), "checkpointing": (how.checkpointing, "none")}
    for name, (given, only) in odd.items():
        if given != only:
            raise ValueError(f"{name}={given!r}: of adapters there is a formula for {only!r}")
    trainable(model, rank=adapters.rank, pattern=adapters.pattern)  # or an error
    *_, norm, _, loss = anatomy.parts(model, how)
    seen = set[object]()
    for step in _walk(model, adapters.pattern, how):
        name = step.part.name.replace("*", str(step.layer)) + ".adapters.default" * step.mine
        yield from ((name, tensor) for tensor in _kept(step, how, seen))
    if step.learns or step.depends["output"] or step.depends["down"]:
        yield from (("norm", tensor) for tensor in _needed(norm))
    yield from (("outside", tensor) for tensor in loss.keeps)


def _needed(norm: anatomy.Part) -> tuple[anatomy.Kept, ...]:
    """What the gradient of a norm's input needs; its weight is frozen."""
    return tuple(kept for kept in norm.keeps if kept.name != "normalized")


def _kept(step: "_Step", how: anatomy.Policy, seen: set) -> Iterator[anatomy.Kept]:
    """The tensors that a part keeps; `seen` are the inputs that several adapters share."""
    part, word, width, depends = step.part, step.word, how.compute, step.depends
    if word.endswith("norm"):
        yield from _needed(part) if step.reads else ()
    elif word == "attention":
        yield from part.keeps if any(step.qkv) else ()
    elif word == "feed_forward":
        needed = depends["up"] + 2 * depends.get("gate", 0)  # of SiLU and the product behind it
        if needed:
            what = "input of GELU, or of SiLU and its product"
            yield anatomy.Kept("inner", f"{needed} b s f", width, what)
    elif step.mine:
        d, k = part.weight.split()
        shared = word == "output" and not part.keeps and any(step.qkv)
        group = step.layer, word if word in ("output", "down") else part.group
        if not shared and group not in seen:
            yield anatomy.Kept("input", f"b s {k}", width, "input")
        seen.add(group)
        yield anatomy.Kept("low", "b s r", width, "(α/r)·A·x")
        if width < anatomy.FP32_BYTES:
            yield anatomy.Kept("copy", f"{d} r", width, "half copy of B")
            if step.reads:
                yield anatomy.Kept("copy", f"r {k}", width, "half copy of A")


# ── what depends on an adapter, and so has a gradient ─────────────────────────────────────────────


class _Step(NamedTuple):
    """A part of a layer, on the way forward."""

    layer: int
    part: anatomy.Part
    mine: bool  # whether it has an adapter
    learns: bool  # whether the residual stream depended on one before this layer
    depends: dict[str, bool]  # whether the outputs of this layer's linear layers do

    @property
    def word(self) -> str:
        return self.part.name.rpartition(".")[2]

    @property
    def qkv(self) -> tuple[bool, bool, bool]:
        q, k, v = (self.depends[each] for each in ("query", "key", "value"))
        return q, k, v

    @property
    def reads(self) -> bool:
        """Whether what it reads depends on an adapter."""
        before = {"output": ("query", "key", "value"), "down": ("gate", "up")}.get(self.word)
        if before:
            return any(self.depends.get(each, False) for each in before)
        return self.learns or self.depends.get("output", False)  # the residual stream


def _walk(
    model: ModelConfig, pattern: Pattern, how: anatomy.Policy = anatomy.Policy()
) -> Iterator[_Step]:
    """The parts of every layer, in the order of the forward pass."""
    if model.num_experts > 1:
        fewer = "there is a formula for num_experts=1"
        raise ValueError(f"num_experts={model.num_experts}: routing decides; {fewer}")
    chosen, learns = {part.name for part in targets(model, pattern)}, False
    rows = [part for part in anatomy.parts(model, how) if part.copies]
    for layer in range(model.num_layers):
        depends: dict[str, bool] = {}
        for part in rows:
            step = _Step(layer, part, part.name in chosen, learns, depends)
            yield step
            if part.weight and part.products:
                depends[step.word] = step.reads or step.mine
        learns = learns or depends["output"] or depends["down"]
