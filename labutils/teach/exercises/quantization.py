"""Scale groups of a row, place zero, and repair a layer of 8-bit integers that passed its test."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labutils import quantization
from labutils.teach.exercises import Exercise, Failed, Property


def group_codes(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Symmetric codes of w[d, k], and the scales [d, ⌈k/group⌉] of groups of neighbors in a row.

    >>> codes, scales = group_codes(torch.tensor([[7.0, -2.0, 0.5, 1.0, 14.0]]), 4, 4)
    >>> codes.tolist(), scales.tolist()
    ([[7, -2, 0, 1, 7]], [[1.0, 2.0]])
    """
    kept = quantization.quantize(w, f"int{bits}", granularity=group)
    return kept.codes(), kept.parts["scales"].view(len(w), -1)


def affine_codes(x: Tensor, bits: int) -> tuple[Tensor, float, int]:
    """Codes 0 … 2ᵇ − 1 of x with one scale, and the zero point: x ≈ scale · (code − zero).

    >>> affine_codes(torch.tensor([-1.0, 0.0, 2.0]), 2)
    (tensor([0, 1, 3], dtype=torch.int16), 1.0, 1)
    """
    kept = quantization.quantize(x, f"int{bits}", affine=True)
    codes = quantization.unpack_codes(kept.parts["codes"], bits, x.numel()).view(x.shape)
    return codes, kept.parts["scales"].item(), int(kept.parts["zero points"])


def int8_linear(x: Tensor, w: Tensor, limit: float) -> Tensor:
    """x·wᵀ of int8 codes: one scale for x, which calibration found to stay within ±limit, and one
    for each output channel of w."""
    with torch.device("meta"):
        linear = nn.Linear(w.shape[1], len(w), bias=False)
    linear.weight = nn.Parameter(w, requires_grad=False)
    return quantization.Int8Linear(linear, limit)(x)


def _drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _tensor(value: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise Failed(f"{what}: got {type(value).__name__}", "Return numbers in a tensor.") from None


# ── a scale for each group ───────────────────────────────────────────────────────────────────────

_GROUPS = (((4, 8), 4, 4), ((3, 6), 8, 4), ((2, 5), 3, 5))


def _both(attempt: Callable, w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, str]:
    case = f"w[{w.shape[0]}, {w.shape[1]}], {bits} bits, groups of {group}"
    got = attempt(w.clone(), bits, group)
    if not isinstance(got, Sequence) or len(got) != 2:
        raise Failed(f"{case}: you return {type(got).__name__}", "Return codes and scales.")
    codes, scales = _tensor(got[0], f"{case}: codes"), _tensor(got[1], f"{case}: scales")
    right = [len(w), -(-w.shape[1] // group)]
    if list(scales.shape) != right:
        raise Failed(
            f"{case}: scales are {list(scales.shape)}, there are {right} groups",
            "Groups lie within a row, the last one of a row may be short: "
            "flattened first, a group runs over the end of a row into the next.",
        )
    if codes.shape != w.shape:
        raise Failed(f"{case}: codes are {list(codes.shape)}", "Codes have the shape of w.")
    return codes.double(), scales.double(), case


def _mistaken_scales(w: Tensor, bits: int, group: int) -> dict[str, Tensor]:
    """The scales that usual mistakes give, by what to say."""
    top, (d, k) = (1 << bits - 1) - 1, w.shape
    rows = nn.functional.pad(w, (0, -k % group)).view(d, -1, group)
    right = rows.abs().amax(2) / top
    flat = nn.functional.pad(w.flatten(), (0, -w.numel() % group)).view(-1, group)
    starts = torch.arange(d)[:, None] * k + torch.arange(0, k, group)
    said = {
        "This is max(w): a group's largest |w| may be negative. Take max|w|.": rows.amax(2) / top,
        "These are the scales of columns, over all rows: a group is neighbors in one row.": (
            rows.abs().amax(0, keepdim=True).amax(2) / top
        ).expand_as(right),
        "This is the scale of the whole row. Each group has its own.": right.amax(
            1, keepdim=True
        ).expand_as(right),
        f"Symmetric codes reach ±{top}, not ±{top + 1}: divide by {top}.": right * top / (top + 1),
        f"Codes go from −{top} to {top}: divide max|w| by {top}, not by all 2ᵇ − 1 steps.": (
            right * top / (2 * top + 1)
        ),
        "Flattened first, a group runs over the end of a row into the next.": (
            flat.abs().amax(1) / top
        )[starts // group],
    }
    if d == right.shape[1]:
        said["The scales are right and transposed."] = right.mT
    return said


def _scales(attempt: Callable) -> str:
    for shape, bits, group in _GROUPS:
        w = _drawn(*shape)
        w[0, 0] = -5.0  # of a group the largest, and negative
        _, scales, case = _both(attempt, w, bits, group)
        _, right = group_codes(w, bits, group)
        if not torch.allclose(scales, right.double(), rtol=1e-4):
            mistakes = _mistaken_scales(w, bits, group).items()
            likely = (said for said, bad in mistakes if torch.allclose(scales, bad.double(), 1e-4))
            hint = next(likely, "The largest |w| of a group gets the top code.")
            at = (scales - right).abs().argmax()
            found, wanted = scales.flatten()[at], right.flatten()[at]
            raise Failed(f"{case}: a scale is {found:.3g}, it should be {wanted:.3g}", hint)
    return f"{len(_GROUPS)} cases"


def _codes(attempt: Callable) -> str:
    for shape, bits, group in _GROUPS:
        w = _drawn(*shape)
        codes, _, case = _both(attempt, w, bits, group)
        right, scales = group_codes(w, bits, group)
        if (codes != codes.round()).any():
            hint = "Codes are what is kept, in few bits. Divide by the scale, and round."
            raise Failed(f"{case}: codes are no integers, such as {codes.flatten()[0]:.3g}", hint)
        off = codes - right
        if off.abs().max() > 1 or (off != 0).double().mean() > 0.05:
            each = scales.repeat_interleave(group, 1)[:, : shape[1]]
            usual = {
                "You cut the fraction off: round to the nearest.": (w / each).trunc(),
                "This rounds down: round to the nearest.": (w / each).floor(),
                "Multiply back only to use them: the codes are w / scale.": (w * each).round(),
            }
            found = (said for said, bad in usual.items() if torch.equal(codes, bad.double()))
            hint = next(found, "codes = round(w / scale), with the scale of its own group.")
            raise Failed(f"{case}: {int((off != 0).sum())} codes of {w.numel()} are wrong", hint)
    return f"{len(_GROUPS)} cases"


def _nothing(attempt: Callable) -> str:
    w = torch.zeros(2, 8)
    w[0, 0] = 1.0
    codes, scales, _ = _both(attempt, w, 4, 4)
    if not (codes.isfinite().all() and scales.isfinite().all()) or codes[1].any():
        hint = "Its max|w| is 0, and 0/0 is NaN: take any other scale there, such as 1."
        raise Failed("a group of zeros: codes or scales are not finite, or codes not 0", hint)
    return "zeros stay zeros"


GROUPS = Exercise(
    id="quantization/groups",
    title="A scale for each group",
    minutes=12,
    difficulty=2,
    proves="you find the scales and codes of groups, over the right axis, up to the end of a row",
    reference=group_codes,
    properties=(
        Property("scales", _scales),
        Property("codes", _codes),
        Property("a group of zeros", _nothing),
    ),
    hints=(
        "The top code is 2**(bits − 1) − 1. Take the columns of a group, `w[:, j : j + group]`, "
        "and find max|w| of each row in it.",
        "part = w[:, j : j + group]; scale = part.abs().amax(1, keepdim=True) / top; "
        "codes = (part / scale).round(); then torch.cat along dim 1. Where is the scale 0?",
    ),
)

# ── zero has a code ──────────────────────────────────────────────────────────────────────────────

_RANGES = {"from −1 to 3": (-1.0, 3.0), "from −2 to 0.5": (-2.0, 0.5), "from 2 to 3": (2.0, 3.0)}


def _placed(attempt: Callable, case: str, bits: int = 8) -> tuple[Tensor, Tensor, float, float]:
    low, high = _RANGES[case]
    x = torch.cat([torch.tensor([low, 0.0, high]), torch.linspace(low, high, 50)])
    x = x[x != 0] if low > 0 else x
    got = attempt(x.clone(), bits)
    if not isinstance(got, Sequence) or len(got) != 3:
        raise Failed(f"you return {type(got).__name__}", "Return codes, scale and zero point.")
    codes, scale, zero = (_tensor(part, case).double() for part in got)
    if scale.numel() != 1 or zero.numel() != 1:
        raise Failed(f"{case}: one scale and one zero point, got {list(scale.shape)}", "")
    return x.double(), codes, scale.item(), zero.item()


def _range(attempt: Callable) -> str:
    for case, (low, high) in _RANGES.items():
        _, _, scale, zero = _placed(attempt, case)
        low, high = min(low, 0), max(high, 0)
        if abs(scale - (high - low) / 255) > 1e-5:
            own, both = _RANGES[case][1] - _RANGES[case][0], max(-low, high) / 127
            usual = {
                "The range must hold 0, also where all x are on one side of it.": own / 255,
                "From 0 to 2ᵇ − 1 there are 2ᵇ − 1 steps, not 2ᵇ.": (high - low) / 256,
                "This is the symmetric scale, max|x| / 127: use max − min.": both,
            }
            found = (said for said, bad in usual.items() if abs(scale - bad) < 1e-5)
            hint = next(found, "scale = (max − min) / (2ᵇ − 1), with 0 between min and max.")
            raise Failed(f"{case}: scale {scale:.6f}, should be {(high - low) / 255:.6f}", hint)
        if zero != round(zero) or not 0 <= zero <= 255:
            hint = "The zero point is the code of 0: a whole number, 0 … 2ᵇ − 1."
            raise Failed(f"{case}: the zero point is {zero:g}", hint)
    return f"{len(_RANGES)} ranges"


def _zero(attempt: Callable) -> str:
    for case, (low, _) in _RANGES.items():
        _, _, scale, zero = _placed(attempt, case)
        right = round(-min(low, 0) / scale)
        if zero == right:
            continue
        usual = {
            right + 1: "Off by one: min gets code 0, so 0 gets round(−min / scale).",
            right - 1: "Off by one: min gets code 0, so 0 gets round(−min / scale).",
            0: "Codes begin at 0 and x at min: which code has 0?",
            128: "128 is the middle of the codes, not the code of 0.",
        }
        hint = usual.get(int(zero), "min gets code 0, so 0 gets round(−min / scale).")
        raise Failed(f"{case}: zero point {zero:.0f}, should be {right}", hint)
    return "the code of 0"


def _back(attempt: Callable) -> str:
    for case in _RANGES:
        x, codes, scale, zero = _placed(attempt, case)
        if codes.min() < 0 or codes.max() > 255 or (codes != codes.round()).any():
            hint = "Clamp to 0 … 255 before the cast. A cast of 256 to 8 bits gives 0."
            raise Failed(f"{case}: codes from {codes.min():g} to {codes.max():g}", hint)
        off = (scale * (codes - zero) - x).abs()
        if off.max() > 1.01 * scale:
            at = off.argmax()
            if abs(off[at] / scale - 256) < 2:
                hint = (
                    "Off by 256 steps: a code of 256 was cast to 8 bits and wrapped. Clamp first."
                )
            elif (scale * codes - x)[x >= 0].abs().max() < 1.01 * scale:
                hint = "The zero point is not added: code = round(x / scale) + zero."
            else:
                hint = "code = round(x / scale) + zero, clamped to 0 … 2ᵇ − 1."
            back = scale * (codes[at] - zero)
            raise Failed(f"{case}: {x[at]:.3g} comes back as {back:.3g}", hint)
        if off.max() > 0.76 * scale or off.mean() > 0.4 * scale:
            hint = "Round to nearest; the fraction is cut off."
            raise Failed(f"{case}: off by {off.max() / scale:.2f} steps", hint)
    return f"{len(_RANGES)} ranges"


ZERO = Exercise(
    id="quantization/zero-point",
    title="Zero has a code",
    minutes=8,
    difficulty=2,
    proves="you give numbers that are not centered a grid on which 0 is exact",
    reference=affine_codes,
    properties=(
        Property("scale", _range),
        Property("zero point", _zero),
        Property("there and back", _back),
    ),
    hints=(
        "low = min(x.min(), 0), high = max(x.max(), 0). The 2**bits codes are 2**bits − 1 steps.",
        "zero = round(−low / scale); codes = round(x / scale) + zero, clamped to 0 … 2**bits − 1.",
    ),
)

# ── a layer of integers ──────────────────────────────────────────────────────────────────────────


def _product(attempt: Callable, x: Tensor, w: Tensor, limit: float, case: str) -> Tensor:
    y = _tensor(attempt(x.clone(), w.clone(), limit), case)
    right = [len(x), len(w)]
    if list(y.shape) != right:
        hint = "y = x·wᵀ, with a scale for each of the d output channels: max|w| over its k inputs."
        raise Failed(f"{case}: y is {list(y.shape)}, it should be {right}", hint)
    return y.double()


def _off(y: Tensor, right: Tensor) -> float:
    if not y.isfinite().all():
        return float("inf")
    return ((y - right).norm(dim=0) / right.norm(dim=0).clamp(min=1e-30)).max().item()


def _channels(attempt: Callable) -> str:
    for d, k in ((4, 4), (3, 5)):
        w = torch.zeros(d, k)  # a number in each row, so that no sum can be too large
        w[range(d), [(i + 1) % d for i in range(d)]] = torch.tensor([1.0, -100.0, 0.01, 7.0])[:d]
        x, case = torch.eye(k), f"w[{d}, {k}] with rows of different size"
        try:
            y = _product(attempt, x, w, 127.0, case)
        except NotImplementedError:
            raise
        except RuntimeError as error:
            hint = "A scale belongs to an output channel, a row of w: there are d of them, not k."
            raise Failed(f"{case}: {error}", hint) from None
        if (off := _off(y, x.double() @ w.double().mT)) > 0.02:
            raise Failed(
                f"{case}: an output channel is off by {off:.0%}",
                "A scale belongs to an output channel, a row of w: max|w| over its inputs. "
                "Scales over the other axis cannot be taken out of the sum.",
            )
    return "w[4, 4] and w[3, 5]"


def _sums(attempt: Callable) -> str:
    for k in (8, 512):
        x, w = _drawn(6, k).abs().clamp(max=3), _drawn(5, k).abs()
        y = _product(attempt, x, w, 3.0, f"k = {k}")
        if (off := _off(y, x.double() @ w.double().mT)) > 0.05:
            raise Failed(
                f"sums of {k} products: off by {off:.0%}",
                "A product of two int8 has up to 16,129, and int8 ends at 127 and wraps around, "
                "int16 at 32,767. Sum in int32.",
            )
    return "up to 512 products"


_FOLLOWS = "The scale follows x here: it is limit / 127, and what is beyond is clipped."
_WRAPS = (
    "A cast to int8 wraps around: 200 becomes −56, and clamping after it finds nothing to clamp. "
    "Clip first, then round and cast."
)


def _beyond(attempt: Callable) -> str:
    x, w = _drawn(6, 16), _drawn(5, 16)
    x[0, 0], x[3, 2] = 2.9, -3.3
    y = _product(attempt, x, w, 1.5, "numbers beyond ±limit")
    right = x.clamp(-1.5, 1.5).double() @ w.double().mT
    if (off := _off(y, right)) > 0.05:
        whole = _off(y, x.double() @ w.double().mT) < 0.1
        raise Failed(
            f"numbers up to twice the limit: off by {off:.0%} from the clipped product",
            _FOLLOWS if whole else _WRAPS,
        )
    return "clipped"


LAYER = Exercise(
    id="quantization/bug-hunt",
    title="Bug hunt: the layer that passed its test",
    minutes=12,
    difficulty=3,
    proves="you multiply integers without an overflow, with scales that can leave the sum",
    reference=int8_linear,
    untouched="ab81791b",
    properties=(
        Property("a scale for each output channel", _channels),
        Property("sums of products", _sums),
        Property("beyond the limit", _beyond),
    ),
    hints=(
        "The test multiplies an identity: every sum has one term. Try w of other shapes, longer "
        "sums, and an x beyond the limit.",
        "Which index is summed over? A scale that depends on it cannot be taken out of the sum.",
        "w.abs().amax(1); clamp before .to(torch.int8); "
        "torch._int_mm, or both factors .to(torch.int32) before the product.",
    ),
)

EXERCISES = (GROUPS, ZERO, LAYER)
