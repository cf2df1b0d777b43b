"""Sums whose every partial result is rounded, and a cross-entropy over such a sum."""

import itertools

import torch
from jaxtyping import Float, Int
from torch import Tensor

from labutils import floats, units
from labutils.floats import FloatFormat
from labutils.model import check_words
from labutils.precision.rounding import round_to

MACHINE = {floats.FP16: torch.float16, floats.BF16: torch.bfloat16, floats.FP32: torch.float32}
"""Formats that a CPU adds in by itself, rounding once."""


def running_sum(
    x: Float[Tensor, "*rows n"],
    fmt: FloatFormat | str,
    *,
    mode: str = "nearest",
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*rows n"]:
    """All partial sums of each row, from left to right, every one rounded to fmt.

    mode, generator: as in `round_to`

    >>> running_sum(torch.ones(4096), "fp16")[-1].item()
    2048.0

    Invariant: each addition is rounded once. It is formed in float64, which for two numbers of up
    to 25 significant bits makes the second rounding harmless (Figueroa 1995). Numbers that are
    fmt's already are left to the machine's own addition, which gives the same and is twenty times
    as fast.
    """
    units.instance(x, Tensor, "running_sum")
    fmt = _accumulator(fmt)
    if mode == "nearest" and _machine_adds(x, fmt):
        return _added_by_the_machine(x.to(MACHINE[fmt])).to(x.dtype)
    total = torch.zeros(x.shape[:-1], dtype=torch.float64, device=x.device)
    partial = torch.empty(x.shape, dtype=torch.float64, device=x.device)
    for i, term in enumerate(x.double().unbind(-1)):
        total = round_to(total + term, fmt, mode=mode, generator=generator)
        partial[..., i] = total
    return partial.to(x.dtype)


def pairwise_sum(x: Float[Tensor, "*rows n"], fmt: FloatFormat | str) -> Float[Tensor, "*rows"]:
    """The sum of each row as a tree: neighbors first, then their sums, every one rounded to fmt.

    >>> pairwise_sum(torch.ones(4096), "fp16").item()
    4096.0

    Cost: n − 1 additions, like the running sum, but each term passes through only ⌈log₂ n⌉ of them.
    """
    fmt = _accumulator(fmt)
    level = x.double()
    while level.shape[-1] > 1:
        even = level.shape[-1] // 2 * 2
        pairs = round_to(level[..., 0:even:2] + level[..., 1:even:2], fmt)
        level = torch.cat([pairs, level[..., even:]], dim=-1)
    return level.sum(-1).to(x.dtype)


def kahan_sum(x: Float[Tensor, "*rows n"], fmt: FloatFormat | str) -> Float[Tensor, "*rows"]:
    """The sum of each row from left to right, every operation rounded to fmt, where what an
    addition loses is added to the next term: compensated summation.

    >>> kahan_sum(torch.ones(4096), "bf16").item()
    4096.0

    Cost: four additions per term, and one number beside the sum. The bound on the error does not
    grow with n (while n is small beside 1 / eps).
    Source: W. Kahan, Communications of the ACM 8 (1965), page 40.
    """
    fmt = _accumulator(fmt)
    by_machine = _machine_adds(x, fmt)
    terms = x.to(MACHINE[fmt] if by_machine else torch.float64)

    def rounded(y: Tensor) -> Tensor:
        return y if by_machine else round_to(y, fmt)

    total = lost = torch.zeros(x.shape[:-1], dtype=terms.dtype, device=x.device)
    for term in terms.unbind(-1):
        term = rounded(term + lost)
        before, total = total, rounded(total + term)
        lost = rounded(term - rounded(total - before))
    return total.to(x.dtype)


def cross_entropy(
    logits: Float[Tensor, "n v"], targets: Int[Tensor, " n"], fmt: FloatFormat | str
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats; the softmax's denominator is a running sum in `fmt`.

    >>> logits, targets = torch.zeros(1, 4096), torch.zeros(1, dtype=torch.long)
    >>> for name in ("fp32", "fp16", "bf16"):
    ...     print(round(cross_entropy(logits, targets, name).exp().item()))
    4096
    2048
    256

    The terms exp(x − max) are rounded to `fmt`, then added one after another; everything else is
    fp32. The gradient is what a kernel computes that keeps the denominator: p − y, with p the terms
    over that sum, so these p need not add up to 1.

    Raises IndexError for a target that is no word, ValueError where not each row has one.
    Invariant: in fp32 it is torch's cross-entropy, up to the order of summation.
    Source: sums in fp32, softmax's by name: Micikevicius et al. 1710.03740, section 3.3.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        got = f"{tuple(targets.shape)} for logits {tuple(logits.shape)}"
        raise ValueError(f"cross_entropy takes a target for each row of logits, got {got}")
    try:
        return _CrossEntropy.apply(logits, targets, floats.named(fmt))
    except RuntimeError:
        check_words("target", targets, logits.shape[-1])
        raise


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, fmt):
        logits = logits.float()
        shifted = logits - logits.amax(-1, keepdim=True)
        terms = shifted.exp()
        total = running_sum(round_to(terms, fmt), fmt)[:, -1:]
        ctx.save_for_backward(terms / total, targets)
        return (total.log() - shifted.gather(-1, targets[:, None])).mean()

    @staticmethod
    def backward(ctx, grad):
        p, targets = ctx.saved_tensors
        y = torch.ones(len(targets), 1, device=p.device)
        return p.scatter_add(-1, targets[:, None], -y).mul_(grad / len(targets)), None, None


def _machine_adds(x: Tensor, fmt: FloatFormat) -> bool:
    """Whether the machine's own addition of x rounds as fmt does."""
    units.instance(x, Tensor, "a sum")
    if fmt not in MACHINE or x.device.type != "cpu" or x.requires_grad:
        return False
    return torch.equal(x.to(MACHINE[fmt]).to(x.dtype), x)


def _added_by_the_machine(x: Tensor) -> Tensor:
    # Contiguous: each addition finds its terms side by side.
    partial = x.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    partial[:1].add_(0.0)  # every sum starts at +0, so that −0 alone becomes +0
    for before, after in itertools.pairwise(partial.unbind()):
        after.add_(before)
    return partial.movedim(0, -1)


def _accumulator(fmt: FloatFormat | str) -> FloatFormat:
    fmt = floats.named(fmt)
    if 24 < fmt.mantissa_bits < 52:
        bits = f"{fmt.name} has {fmt.mantissa_bits} mantissa bits"
        raise ValueError(f"{bits}: sums are exact for up to 24, and for fp64")
    return fmt
