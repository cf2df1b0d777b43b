"""Rounding whole tensors to any `FloatFormat`.

A tensor keeps its dtype and only its *values* move to the format's grid, so training in fp8, fp4 or
a format of your own can be tried on any machine. `floats` is the exact, slow reference; this file
is the fast road to the same numbers.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from labutils import floats, units
from labutils.floats import FloatFormat

CHUNK = 1 << 15
"""Elements worked on at a time: they stay in cache for all passes, and torch uses one thread.
More threads would be faster on an idle machine; on a busy one they wait for one another."""


NATIVE = {floats.FP16: torch.float16, floats.BF16: torch.bfloat16, floats.E5M2: torch.float8_e5m2}
"""Casts of torch that round as we do on a CPU; not from float64, which torch rounds twice."""


EXPONENTS = {torch.float64: (torch.int64, 0x7FF << 52), torch.float32: (torch.int32, 0xFF << 23)}
"""Where the exponent's bits are in a machine number, seen as an integer."""


def round_to(
    x: Float[Tensor, "*shape"],
    fmt: FloatFormat | str,
    *,
    mode: str = "nearest",
    overflow: str = "ieee",
    generator: torch.Generator | None = None,
) -> Float[Tensor, "*shape"]:
    """x with every value rounded once to fmt's grid, in x's own dtype and shape.

    NaN stays NaN, −0 stays −0.

    >>> round_to(torch.tensor([17.0, 464.0, 465.0]), "e4m3")
    tensor([ 16., 448.,  nan])
    >>> round_to(torch.tensor([17.0, 464.0, 465.0]), "e4m3", overflow="saturate")
    tensor([ 16., 448., 448.])

    `mode` and `overflow` mean what they mean in `FloatFormat.encode`: for e4m3, "ieee" is what
    ml_dtypes does (NaN above 464) and "saturate" what torch's CPU cast does (448, even for inf).
    "stochastic" needs a `generator`; the chance of rounding up is right to 2⁻²⁴ (2⁻⁵³ for float64).
    A result that x's dtype cannot hold (bf16's 65536 in a float16 tensor) becomes inf there. fp6
    and fp4 have no code for NaN, but round_to passes it through: a simulation should not hide one.
    Gradient: straight through, everywhere, as if this were the identity.

    Cost: about ten passes over cached memory. Invariant: equals `fmt.round` of every element
    (nearest, zero).
    Raises TypeError for numbers of fewer than 16 bits; ValueError for an unknown mode or
    overflow, and without a generator where one is needed.
    """
    units.instance(x, Tensor, "round_to")
    if x.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        raise TypeError(f"round_to takes floats of 16 bits or more, got {x.dtype}: use x.float()")
    if mode not in floats.MODES or overflow not in floats.OVERFLOWS:
        raise ValueError(f"{mode=} or {overflow=} is not in {floats.MODES}, {floats.OVERFLOWS}")
    if mode == "stochastic" and generator is None:
        raise ValueError("stochastic rounding draws from a generator: pass generator=")
    return _RoundTo.apply(x, _Rule(floats.named(fmt), mode, overflow, generator))


class _Rule(NamedTuple):
    """What `round_to` was told."""

    fmt: FloatFormat
    mode: str
    overflow: str
    generator: torch.Generator | None


def _fits_fp32(fmt: FloatFormat) -> bool:
    """Whether every value of fmt is one of fp32's."""
    fp32 = floats.FP32
    exponents = fmt.min_exponent >= fp32.min_exponent and fmt.max_exponent <= fp32.max_exponent
    return exponents and fmt.mantissa_bits <= fp32.mantissa_bits


class _RoundTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rule):
        return _rounded(x, rule)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _rounded(x: Tensor, rule: _Rule) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    on_cpu = x.device.type == "cpu"
    chunk = CHUNK if on_cpu else max(x.numel(), 1)
    sources, targets = x.detach().reshape(-1).split(chunk), out.view(-1).split(chunk)
    simple = on_cpu and rule.mode == "nearest" and rule.overflow == "ieee"
    if simple and x.dtype != torch.float64 and rule.fmt in NATIVE:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source.to(NATIVE[rule.fmt]))
        return out
    wide = x.dtype == torch.float64 or not _fits_fp32(rule.fmt)
    dtype = torch.float64 if wide else torch.float32
    # Room for the magnitudes of a chunk and the gaps around them.
    scratch = torch.empty(2, min(chunk, x.numel()), dtype=dtype, device=x.device)
    for source, target in zip(sources, targets, strict=True):
        _round_chunk(source, target, scratch, rule)
    return out


def _round_chunk(source: Tensor, target: Tensor, scratch: Tensor, rule: _Rule) -> None:
    """Writes |x| in units of the gap between its neighbors, rounds that, and multiplies back."""
    fmt, mode = rule.fmt, rule.mode
    integer, exponent_mask = EXPONENTS[scratch.dtype]
    work, gap = scratch[:, : source.numel()]
    a = target if target.dtype == work.dtype else work
    torch.abs(source.to(work.dtype), out=a)

    # The gap is 2^(exponent − mantissa_bits), the exponent that of x, but within the format's.
    torch.clamp(a, 2.0**fmt.min_exponent, 2.0**fmt.max_exponent, out=gap)
    gap.view(integer).bitwise_and_(exponent_mask)
    gap.mul_(2.0**-fmt.mantissa_bits)
    a.div_(gap)
    if mode == "nearest":
        _round_to_even_(a, fmt.mantissa_bits)
    elif mode == "zero":
        a.trunc_()
    else:
        _round_stochastically_(a, 2.0 ** (fmt.mantissa_bits + 2), rule.generator)
    a.mul_(gap)

    _overflow_(a, source, rule)
    if not fmt.zero:
        a.clamp_(min=fmt.min_normal)
    if fmt.signed:
        a.copysign_(source)
    else:
        a.masked_fill_(source < 0, math.nan)
    if fmt.nan == "negative_zero":
        a.add_(0.0)  # −0 + 0 = +0
    if a is not target:
        target.copy_(a)


def _round_to_even_(a: Tensor, mantissa_bits: int) -> None:
    """Round a ≥ 0 in place to the nearest integer, ties to even."""
    no_fractions = 1 / torch.finfo(a.dtype).eps  # from here on the gap is 1: adding it rounds
    if 2.0 ** (mantissa_bits + 1) <= no_fractions:
        a.add_(no_fractions).sub_(no_fractions)
    else:
        a.round_()  # the same, but it wakes every thread of torch, however small the tensor


def _round_stochastically_(a: Tensor, cap: float, generator: torch.Generator | None) -> None:
    """Round a ≥ 0 in place to ⌊a⌋ or ⌈a⌉, up with probability a − ⌊a⌋."""
    a.clamp_(max=cap)  # far above every significand: keeps inf − inf from making a NaN
    floor = a.floor()
    drawn = torch.rand(a.shape, dtype=a.dtype, device=a.device, generator=generator)
    a.sub_(floor).sub_(drawn).ceil_().add_(floor)


def _overflow_(a: Tensor, source: Tensor, rule: _Rule) -> None:
    """Send magnitudes above fmt.max, in place, where they belong."""
    fmt = rule.fmt
    special = math.inf if fmt.inf else math.nan
    if rule.overflow == "saturate" or fmt.nan == "none":
        a.clamp_(max=fmt.max)
    elif rule.mode == "zero":
        a.clamp_(max=fmt.max).masked_fill_(source.isinf(), special)
    else:
        # threshold_ replaces what is ≤ its threshold, keeps NaN, and is ten times as fast as
        # masked_fill_.
        beyond = fmt.max + fmt.spacing(fmt.max)
        beyond = beyond if beyond <= torch.finfo(a.dtype).max else math.inf
        torch.threshold_(a.neg_(), -beyond, special).abs_()
