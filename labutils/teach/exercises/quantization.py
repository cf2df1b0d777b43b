"""Scale groups of a row, repair a layer of 8-bit integers, and round with error feedback."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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

_GROUPS = (((4, 8), 4, 4), ((3, 6), 8, 4), ((2, 5), 3, 5), ((3, 40), 4, 16), ((2, 6), 2, 3))


def _both(attempt: Callable, w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, str]:
    case = f"w[{w.shape[0]}, {w.shape[1]}], {bits} bits, groups of {group}"
    given = w.clone()
    got = attempt(given, bits, group)
    if not torch.equal(given, w):
        raise Failed(f"{case}: w is changed in place", "Somebody's weights: work on a copy.")
    if not isinstance(got, Sequence) or len(got) != 2:
        raise Failed(f"{case}: you return {type(got).__name__}", "Return codes and scales.")
    codes, scales = _tensor(got[0], f"{case}: codes"), _tensor(got[1], f"{case}: scales")
    right = [len(w), -(-w.shape[1] // group)]
    if list(scales.shape) != right:
        hint = (
            "Groups lie within a row, the last one of a row may be short: "
            "flattened first, a group runs over the end of a row into the next."
        )
        if list(scales.squeeze().shape) == right:
            hint = "The groups are right, in dims that are too many: view or squeeze them."
        elif scales.shape == w.shape and list(codes.shape) == right:
            hint = "Return the codes first, then the scales."
        elif len(scales.shape) == 2 and len(scales) == len(w):
            hint = (
                "A row has ⌈k/group⌉ groups, each with a scale of its own; the last may be short."
            )
        raise Failed(f"{case}: scales are {list(scales.shape)}, there are {right} groups", hint)
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
    if k % group == 0:
        apart = w.view(d, group, -1).abs().amax(1) / top
        said["A group is neighbors: w[:, j : j + group], and not every n-th column."] = apart
    lowest, highest = w.new_full((), torch.inf), -w.new_full((), torch.inf)
    spread = [nn.functional.pad(w, (0, -k % group), value=end.item()).view(d, -1, group)
              for end in (highest, lowest)]  # fmt: skip
    said |= {
        "This is one over the scale. The scale brings codes back: w = code · scale.": 1 / right,
        f"This is max|w| itself: the top code is {top}, and max|w| / {top} its scale.": right * top,
        "From the smallest w to the largest: symmetric codes ask for max|w| alone.": (
            (spread[0].amax(2) - spread[1].amin(2)) / (2 * top)
        ),
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
        kept = torch.allclose(scales, right.double(), rtol=6e-4)  # fp16 scales are right, too
        if not kept and not torch.equal(scales, right.bfloat16().double()):
            mistakes = _mistaken_scales(w, bits, group).items()
            likely = (said for said, bad in mistakes if torch.allclose(scales, bad.double(), 1e-4))
            hint = next(likely, "The largest |w| of a group gets the top code.")
            at = (scales - right).abs().argmax()
            found, wanted = scales.flatten()[at], right.flatten()[at]
            raise Failed(f"{case}: a scale is {found:.5g}, it should be {wanted:.5g}", hint)
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
                "This rounds up: round to the nearest.": (w / each).ceil(),
                f"Symmetric codes are signed, and 0 stays 0: add no {1 << bits - 1}.": (
                    (w / each).round() + (1 << bits - 1)
                ),
                "Multiply back only to use them: the codes are w / scale.": (w * each).round(),
            }
            found = (said for said, bad in usual.items() if torch.equal(codes, bad.double()))
            hint = next(found, "codes = round(w / scale), with the scale of its own group.")
            raise Failed(f"{case}: {int((off != 0).sum())} codes of {w.numel()} are wrong", hint)
    return f"{len(_GROUPS)} cases"


def _nothing(attempt: Callable) -> str:
    w = torch.zeros(2, 8)
    w[0, 0] = 1.0
    for group in (4, 8):  # parts of a row, and whole ones
        codes, scales, _ = _both(attempt, w, 4, group)
        if not (codes.isfinite().all() and scales.isfinite().all()) or codes[1].any():
            hint = "Its max|w| is 0, and 0/0 is NaN: take any other scale there, such as 1."
            raise Failed("a group of zeros: codes or scales are not finite, or codes not 0", hint)
    return "zeros stay zeros"


def _small(attempt: Callable) -> str:
    """Small weights have codes, too. What scales are kept in does not matter here."""
    w = 1e-6 * _drawn(4, 8)
    codes, found, case = _both(attempt, w, 4, 4)
    _, right = group_codes(w, 4, 4)
    in_16_bits = (right.to(dtype).double() for dtype in (torch.half, torch.bfloat16))
    kept = torch.allclose(found, right.double(), rtol=6e-4, atol=0)
    wrong = torch.ones_like(codes, dtype=torch.bool)
    for scales in (right.double(), found):
        each = scales.repeat_interleave(4, 1)
        wrong &= (codes - w.double() / each).abs() > 0.51
    if wrong.any() or not (kept or any(torch.equal(found, each) for each in in_16_bits)):
        at = (found - right).abs().argmax()
        raise Failed(
            f"{case}, of about 1e-6: scales such as {found.flatten()[at]:.2g}, or codes, are wrong",
            "A group of small numbers is no group of zeros: what stands against 0/0 must not "
            "change the scale of the others.",
        )
    return "weights of 1e-6"


GROUPS = Exercise(
    id="quantization/groups",
    reference=group_codes,
    properties=(
        Property("scales", _scales),
        Property("codes", _codes),
        Property("a group of zeros", _nothing),
        Property("small weights", _small),
    ),
    hints=(
        "The top code is 2**(bits − 1) − 1. Take the columns of a group, `w[:, j : j + group]`, "
        "and find max|w| of each row in it.",
        "part = w[:, j : j + group]; scale = part.abs().amax(1, keepdim=True) / top; "
        "codes = (part / scale).round(); then torch.cat along dim 1. Where is the scale 0?",
    ),
)

# ── a layer of integers ──────────────────────────────────────────────────────────────────────────


def _product(attempt: Callable, x: Tensor, w: Tensor, limit: float, case: str) -> Tensor:
    given = x.clone(), w.clone()
    y = _tensor(attempt(*given, limit), case)
    for name, before, after in zip("xw", (x, w), given, strict=True):
        if not torch.equal(before, after):
            raise Failed(f"{case}: {name} is changed in place", "Work on a copy.")
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
        if not y.any():
            hint = "x = 1 with limit = 127 is the code 1: 8 bits reach from −127 to 127."
            raise Failed(f"{case}: every output is 0", hint)
        if (off := _off(y, x.double() @ w.double().mT)) > 0.02:
            raise Failed(
                f"{case}: an output channel is off by {100 * off:.2g} %",
                "A scale belongs to an output channel, a row of w: max|w| over its inputs. "
                "Scales over the other axis cannot be taken out of the sum.",
            )
    return "w[4, 4] and w[3, 5]"


def _idle_channel(attempt: Callable) -> str:
    w, x = _drawn(3, 8), _drawn(2, 8)
    w[1] = 0.0
    x[0] = 0.0
    y = _product(attempt, x, w, 3.0, "a channel of zeros")
    if not y[0, [0, 2]].isfinite().all() or y[0, [0, 2]].any():
        hint = "All its codes are 0. Nothing is divided by a row's own size: x has one scale."
        raise Failed(f"a row of x that is 0 gives {y[0, 0]:g}", hint)
    if not y.isfinite().all() or y[:, 1].any():
        hint = "Its max|w| is 0, and 0/0 is NaN: take any other scale there, such as 1."
        raise Failed(f"an output channel whose weights are 0 gives {y[0, 1]:g}", hint)
    return "zeros give zero"


def _sums(attempt: Callable) -> str:
    for k in (8, 512):
        x, w = _drawn(6, k).abs().clamp(max=3), _drawn(5, k).abs()
        y, right = _product(attempt, x, w, 3.0, f"k = {k}"), x.double() @ w.double().mT
        if (off := _off(y, right)) > 0.05:
            if _off(y * 3.0 / 127, right) < 0.05:
                hint = "The sum of codes is to be multiplied by both scales, that of x too."
                raise Failed(f"limit = 3: an output is {127 / 3:.0f} times too large", hint)
            raise Failed(
                f"sums of {k} products: off by {100 * off:.2g} %",
                "A product of two int8 has up to 16,129, and int8 ends at 127 and wraps around, "
                "int16 at 32,767; fp16 becomes inf from 65,520 on. Sum in int32.",
            )
    return "up to 512 products"


_FOLLOWS = (
    "What is beyond the limit comes out whole: the scale is limit / 127, whatever x is, and codes "
    "end at ±127. Clip them."
)
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
        usual = {
            _FOLLOWS: x,
            "What is beyond becomes ±limit, and not 0: clip it.": x * (x.abs() <= 1.5),
            "Codes reach from −127 to 127: here negative ones are 0.": x.clamp(0, 1.5),
        }
        near = (said for said, bad in usual.items() if _off(y, bad.double() @ w.double().mT) < 0.1)
        raise Failed(
            f"numbers up to twice the limit: off by {100 * off:.2g} % from the clipped product",
            next(near, _WRAPS),
        )
    return "clipped"


_SHORT = (
    "Right but for rounding: a sum of codes has more digits than a float of 16 bits. Sum in int32, "
    "and multiply by the scales in fp32."
)


def _in_16_bits(*several: Tensor) -> bool:
    """Whether the numbers of one of these are such as fp16 or bf16 has."""
    pairs = itertools.product(several, (torch.half, torch.bfloat16))
    return any(torch.allclose(x, x.to(kind).double(), rtol=1e-5, atol=0) for x, kind in pairs)


def _is_cut(sums: Tensor, x: Tensor, w: Tensor, limit: float, cuts: Sequence[Callable]) -> bool:
    """Whether these are sums of codes that were cut like this: those of x, and those of w."""
    codes = cuts[0](x / (limit / 127)), cuts[1](w / (w.abs().amax(1, keepdim=True) / 127))
    apart = (sums - codes[0].double() @ codes[1].double().mT).abs()
    return (apart > 0.5).double().mean().item() < 0.05


def _integers(attempt: Callable) -> str:
    """Each output is a sum of products of codes, times both scales."""
    for limit, largest in ((2.0, 2.0), (2.0, 0.5)):
        x, w = _drawn(40, 4).clamp(-largest, largest), _drawn(5, 4)
        x[0, 0] = largest  # at the limit, or all below it
        y = _product(attempt, x, w, limit, "4 products of drawn numbers")
        unit = (limit / 127) * w.double().abs().amax(1) / 127
        codes = (
            (x.double() * 127 / limit).round(),
            (w.double() / w.double().abs().amax(1, keepdim=True) * 127).round(),
        )
        sums, right = y / unit, codes[0] @ codes[1].mT
        if (sums - sums.round()).abs().max() > 0.05:
            for ratio in (128 / 127, 128**2 / 127**2):
                if (sums * ratio - (sums * ratio).round()).abs().max() < 0.05:
                    hint = "Codes reach from −127 to 127: divide by 127, for x and for w."
                    raise Failed("4 products: codes are whole, but a scale is max / 128", hint)
            hint = (
                "Codes of x and of w are integers, and so is the sum of their products: round both "
                "and take the scales as they are, with nothing added."
            )
            for dim in (0, 1), 1:  # of all of x, or of each token
                unit = x.abs().amax(dim, keepdim=True).clamp(max=limit) / 127
                follows = ((x / unit).round() * unit).double() @ codes[1].mT
                if _off(y, follows * w.double().abs().amax(1) / 127) < 1e-5:
                    hint = "The scale of x is limit / 127, also for a row of smaller numbers."
            if _in_16_bits(y, sums, sums * (limit / 127)):
                hint = _SHORT
            at = (sums - sums.round()).abs().argmax()
            raise Failed(
                f"4 products: in units of both scales an output is {sums.flatten()[at]:.2f}, "
                "no whole number",
                hint,
            )
        if (wrong := ((sums - right).abs() > 0.5).sum()) > 3:  # a tie may go the other way
            hint = "8 bits have the codes −127 … 127, for x and for w: the nearest one, once."
            if (sums - right).norm() / right.norm() < 1e-3:
                hint = _SHORT
            for cut, way in ((torch.trunc, "towards zero"), (torch.floor, "down")):
                some = (cut, torch.round), (torch.round, cut), (cut, cut)
                if any(_is_cut(sums, x, w, limit, each) for each in some):
                    hint = f"Codes go {way} here: round to the nearest before the cast."
            what = f"{wrong} of {right.numel()} sums are not those of the nearest codes"
            raise Failed(f"4 products: {what}", hint)
    return "whole numbers"


_SUMS = {"matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "_int_mm", "linear", "addmm", "mv"}
_SUMS |= {"dot", "inner", "outer", "einsum", "tensordot"}


class _Factors(TorchFunctionMode):
    """Looks at what goes into products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.broken: float | None = None  # a factor that is no whole number

    def __torch_function__(
        self, func: Callable, types: Any, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _SUMS:
            nested = [each if isinstance(each, list | tuple) else [each] for each in args]
            for each in itertools.chain.from_iterable(nested):
                if isinstance(each, Tensor) and each.is_floating_point():
                    broken = each[each != each.round()]
                    self.broken = broken[0].item() if len(broken) else self.broken
        return func(*args, **(kwargs or {}))


def _of_codes(attempt: Callable) -> str:
    with _Factors() as factors:
        attempt(_drawn(6, 4), _drawn(5, 4), 2.0)
    if factors.broken is not None:
        raise Failed(
            f"a factor of your product is {factors.broken:.4g}, which is no code",
            "Scales come out of the sum: multiply the codes, and the result by both scales.",
        )
    return "of codes alone"


def _symmetric(attempt: Callable) -> str:
    y = _product(attempt, torch.tensor([[-3.3, 3.3]]), torch.eye(2), 1.5, "±3.3 and a limit of 1.5")
    for found, wanted in zip(y[0].tolist(), (-1.5, 1.5), strict=True):
        if abs(found / wanted - 1) > 2e-3:
            raise Failed(
                f"limit = 1.5: {2.2 * wanted:g} comes back as {found:.4g}, it should be {wanted:g}",
                "Codes are symmetric, −127 … 127: a code of −128 is beyond the limit.",
            )
    return "−127 … 127"


def _small_channel(attempt: Callable) -> str:
    x, w = _drawn(6, 16).clamp(-2, 2), _drawn(3, 16)
    w[1] *= 1e-6
    y = _product(attempt, x, w, 2.0, "a channel of small weights")
    codes = (w[1].double() / w[1].double().abs().max() * 127).round()
    right = (x.double() * 127 / 2).round() @ codes * (2 / 127 * w[1].abs().max().item() / 127)
    if (off := _off(y[:, 1:2], right[:, None])) > 2e-3:
        raise Failed(
            f"weights of about 1e-6 in an output channel: it is off by {100 * off:.2g} %",
            "A channel of small weights is none of zeros: what stands against 0/0 must not change "
            "its scale.",
        )
    return "weights of 1e-6"


LAYER = Exercise(
    id="quantization/bug-hunt",
    reference=int8_linear,
    untouched="ab81791b",
    properties=(
        Property("a scale for each output channel", _channels),
        Property("sums of products", _sums),
        Property("beyond the limit", _beyond),
        Property("integers", _integers),
        Property("products", _of_codes),
        Property("symmetric codes", _symmetric),
        Property("a channel of zeros", _idle_channel),
        Property("a channel of small weights", _small_channel),
    ),
    hints=(
        "The test multiplies an identity: every sum has one term. Try w of other shapes, longer "
        "sums, and an x beyond the limit.",
        "Which index is summed over? A scale that depends on it cannot be taken out of the sum.",
        "w.abs().amax(1); clamp before .to(torch.int8); "
        "torch._int_mm, or both factors .to(torch.int32) before the product.",
    ),
)

# ── errors that cancel ───────────────────────────────────────────────────────────────────────────

_D, _K = 6, 12


def with_feedback(w: Tensor, H: Tensor, scales: Tensor) -> Tensor:
    """w[d, k] rounded to codes −7 … 7 times scales[d, 1], column after column, each column's error
    handed on to those after it by the inverse of H[k, k]."""
    return quantization.error_feedback(w, H, "int4", scales=scales)


def _calibrated(k: int = _K, alike: float = 0.9) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, xᵀx of inputs whose columns are alike, and the scales of rows."""
    draw = torch.Generator().manual_seed(k)
    make = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    w, x = make(_D, k), make(64, 1) * alike + make(64, k) * (1 - alike)
    H = x.mT @ x
    return w, H + 0.01 * H.diagonal().mean() * torch.eye(k), w.abs().amax(1, keepdim=True) / 8


def _fed(attempt: Callable, w: Tensor, H: Tensor, scales: Tensor) -> Tensor:
    given = w.clone()
    y = _tensor(attempt(given, H.clone(), scales.clone()), "the rounded weights").double()
    if y.shape != w.shape:
        raise Failed(f"you return {list(y.shape)}, w is {list(w.shape)}", "Return all columns.")
    return y


def _on_the_grid(attempt: Callable) -> str:
    w, H, scales = _calibrated()
    codes = _fed(attempt, w, H, scales) / scales
    if (codes - codes.round()).abs().max() > 1e-6:
        hint = "Each column is rounded in its turn, and is not changed after that: only later are."
        own = codes * scales / w.abs().amax(1, keepdim=True) * 7
        if (own - own.round()).abs().max() < 1e-6:
            hint = "The scales are given: take them, and not others that you find in w."
        if (codes * scales - (codes * scales).round()).abs().max() < 1e-6:
            hint = "These are the codes alone: return them times scales."
        raise Failed("the result has values between those of the grid", hint)
    if codes.abs().max() > 7.5:
        hint = "What earlier columns add can lead beyond the largest code: clamp before you scale."
        raise Failed(f"a code is {codes.abs().max():.0f}, they end at 7", hint)
    return "codes −7 … 7"


def _slips_of_feedback(w: Tensor, H: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """What usual mistakes give, by what to say."""

    def walk(
        sign: float = 1,
        eliminate: bool = True,
        divide: bool = True,
        of: str = "inverse",
        cut: Callable = torch.round,
        damped: float = 0,
    ) -> Tensor:
        D = H + damped * H.diagonal().mean() * torch.eye(len(H), dtype=H.dtype)
        y, inverse = w.clone(), torch.linalg.inv(D) if of == "inverse" else H.clone()
        for j in range(w.shape[1]):
            rounded = cut(y[:, j] / scales[:, 0]).clamp(-7, 7) * scales[:, 0]
            error = (y[:, j] - rounded) / (inverse[j, j] if divide else 1)
            y[:, j] = rounded
            y[:, j + 1 :] -= sign * error[:, None] * inverse[j, j + 1 :]
            if eliminate:
                inverse = inverse - inverse[:, j, None] * inverse[j] / inverse[j, j]
        return y

    return {
        "Every weight went to its nearest value: the errors are not handed on.": (
            (w / scales).round().clamp(-7, 7) * scales
        ),
        "The sign is the wrong way round: later columns must undo what this one did.": walk(-1),
        "Eliminate j from the inverse: a finished column can make up for nothing.": (
            walk(eliminate=False)
        ),
        "Divide the error by the inverse's [j, j].": walk(divide=False),
        "Codes go to the nearest whole number, and not towards zero.": walk(cut=torch.trunc),
        "Codes go to the nearest whole number, and not down.": walk(cut=torch.floor),
        "Take H as it is, and add nothing to its diagonal.": walk(damped=0.01),
        "Take H as it is: who gives it has damped it.": walk(damped=0.1),
        "It is the *inverse* of H that says how columns can make up for each other.": walk(of="H"),
    }


def _values(attempt: Callable) -> str:
    for k, alike in ((_K, 0.9), (_K, 0.5), (2, 0.9)):
        given = _calibrated(k, alike)
        found, right = _fed(attempt, *given), with_feedback(*given)
        wrong = (found - right).abs() > 1e-6 * given[2]
        if wrong.any():
            slips = _slips_of_feedback(*given).items()
            same = (words for words, bad in slips if torch.allclose(found, bad, atol=1e-9))
            hint = next(
                same,
                "From the first column on, change w[:, j + 1:] by −(error / inverse[j, j]) · "
                "inverse[j, j + 1:], with the error of what column j has become by then.",
            )
            raise Failed(f"k = {k}: {int(wrong.sum())} of {wrong.numel()} weights differ", hint)
    return "3 cases"


def _untouched(attempt: Callable) -> str:
    w, H, scales = _calibrated()
    given = w.clone(), H.clone(), scales.clone()
    attempt(*given)
    names = ("w", "H", "scales")
    for name, before, after in zip(names, (w, H, scales), given, strict=True):
        if not torch.equal(before, after):
            raise Failed(f"{name} is changed in place", "Work on a copy: clone it first.")
    return "w, H and scales"


FEEDBACK = Exercise(
    id="quantization/feedback",
    reference=with_feedback,
    properties=(
        Property("on the grid", _on_the_grid),
        Property("values", _values),
        Property("what is left alone", _untouched),
    ),
    hints=(
        "A loop over columns j with a copy of w and the inverse of H. Round w[:, j], work out e, "
        "change the columns after j, eliminate j from the inverse.",
        "w[:, j + 1:] −= e[:, None] * inverse[j, j + 1:], and "
        "inverse = inverse − inverse[:, j, None] * inverse[j] / inverse[j, j].",
    ),
)

EXERCISES = (GROUPS, LAYER, FEEDBACK)
