"""Put a tensor into 8 bits, form three products by tiles, and repair a delayed scale."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from labutils.quantization import (
    F8_E4M3,
    F8_E5M2,
    Eight,
    cast,
    largest,
    product,
    scale_for,
    to_eight,
)
from labutils.teach.exercises import Exercise, Failed, Property

_FORMATS = {"e4m3": F8_E4M3, "e5m2": F8_E5M2}


def in_eight_bits(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """x as codes of 8 bits, scaled so that `amax` becomes the format's largest number, and the
    factor that brings codes back; what is beyond becomes ±amax.

    >>> codes, inverse = in_eight_bits(torch.tensor([1.0, -4.0]), 2.0, F8_E4M3)
    >>> codes.tolist(), (codes.float() * inverse).tolist()
    ([224.0, -448.0], [1.0, -2.0])
    """
    scale = scale_for(torch.tensor(amax), dtype).item()
    return cast(x * scale, dtype), 1 / scale


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ── codes and their inverse ──────────────────────────────────────────────────────────────────────


def _codes(attempt: Callable, x: Tensor, amax: float, name: str) -> tuple[Tensor, float]:
    given = x.clone()
    got = attempt(given, amax, _FORMATS[name])
    if not torch.equal(given, x):
        raise Failed(f"{name}: x is changed in place", "It is somebody's gradient: scale a copy.")
    if not isinstance(got, tuple | list) or len(got) != 2 or not isinstance(got[0], Tensor):
        several = isinstance(got, tuple | list)
        found = ", ".join(type(each).__name__ for each in (got if several else [got]))
        raise Failed(f"you return {found}", "Return two things: codes, and then a factor.")
    codes, inverse = got
    if codes.dtype != _FORMATS[name] or codes.shape != x.shape:
        what = f"{codes.dtype} of shape {list(codes.shape)}"
        raise Failed(f"{name}: the codes are {what}", f"Codes are x's shape in {_FORMATS[name]}.")
    return codes, float(inverse)


def _why_back(ratio: float, inverse: float, scale: float) -> str:
    """What usually leads to codes · inverse = ratio · x."""
    if abs(inverse - 1) < 1e-6 and abs(ratio / scale - 1) < 0.1:
        return "The inverse scale is forgotten: codes stand for x times the scale."
    if abs(inverse / scale - 1) < 1e-3:
        return "That is the scale. What brings codes back is one over it."
    if abs(ratio * scale - 1) < 0.1:
        return (
            "The inverse scale is applied twice, or the scale never: codes are cast(x · scale), "
            "and the inverse waits until they have been multiplied and added up."
        )
    return "codes = cast(x · scale), and codes · inverse is x again."


def _back(attempt: Callable) -> str:
    for name, dtype in _FORMATS.items():
        for size in (0.5, 1e-4, 3e5):
            x = size * _normal(2000).clamp(max=1.0)  # the largest |x| is negative
            amax = x.abs().max().item()
            codes, inverse = _codes(attempt, x, amax, name)
            back, bound = codes.float() * inverse, 2 ** -(4 if name == "e4m3" else 3)
            off = ((back - x).abs() / (x.abs() + amax * 1e-3)).max().item()
            if not off <= 1.01 * bound:
                ratio = (back.norm() / x.norm()).item()
                hint = _why_back(ratio, inverse, largest(dtype) / amax)
                if (codes.float().abs() == largest(dtype)).double().mean() > 0.05:
                    hint = "Many codes are the format's largest: amax is the largest |x|. " + hint
                raise Failed(f"{name}, numbers of about {size:g}: codes · inverse is off", hint)
    return "2 formats, 3 sizes"


def _factor(attempt: Callable) -> str:
    for (name, dtype), amax in itertools.product(_FORMATS.items(), (100.0, 3e-10)):
        _, inverse = _codes(attempt, torch.tensor([amax, -amax / 3]), amax, name)
        if abs(inverse * largest(dtype) / amax - 1) > 1e-3:
            raise Failed(
                f"{name}, amax = {amax:g}: the factor is {inverse:.6g}, it should be "
                f"{amax / largest(dtype):.6g}",
                "The factor is amax over the format's largest number, in fp32 or finer. Where "
                "amax is small, what is added to it counts.",
            )
    return "large and small"


def _nearest(attempt: Callable) -> str:
    """The codes are those of numbers that were rounded once: all but 1 % of them."""
    for name, dtype in _FORMATS.items():
        x = _normal(4000) * torch.logspace(0, -6, 4000)  # down to subnormal codes, and to zero
        amax = x.abs().max().item()
        found, right = _codes(attempt, x, amax, name)[0], in_eight_bits(x, amax, dtype)[0]
        wrong = (found.float() != right.float()).sum().item()
        if wrong > len(x) / 100:
            small = right.float().abs() < torch.finfo(dtype).tiny
            hint = (
                "Each number goes to the nearest one of the format, once. A number that passes "
                "through bf16 on its way is rounded twice."
            )
            if not found.float()[small].any():
                hint = "Below the smallest normal number a format has subnormal ones."
            raise Failed(f"{name}: {wrong} of {len(x)} codes are not the nearest ones", hint)
    return "rounded once"


def _whole_range(attempt: Callable) -> str:
    for name, dtype in _FORMATS.items():
        for x in (1e-7 * _normal(100), -_normal(100).abs(), 1e6 * _normal(100)):
            amax = x.abs().max().item()
            codes, _ = _codes(attempt, x, amax, name)
            top = codes.float().abs().max().item()
            if top != largest(dtype):
                hint = (
                    f"The scale brings amax to {largest(dtype):g}, whatever its sign: no power of "
                    "two, and no other format's largest number."
                )
                if top in (0, math.inf) or abs(top / amax - 1) < 0.1:
                    hint += (
                        " It comes from the numbers *before* the cast: behind it the small are "
                        "zero already, and the large clipped."
                    )
                raise Failed(f"{name}: the largest |x| is {amax:.3g}, and its code {top:g}", hint)
    return "small, negative, large"


def _as_given(attempt: Callable) -> str:
    for name, dtype in _FORMATS.items():
        x = torch.tensor([1.0, -0.5, 0.25])
        codes, _ = _codes(attempt, x, 4.0, name)
        if codes.float()[0].item() != largest(dtype) / 4:
            raise Failed(
                f"{name}, amax = 4: 1 has the code {codes.float()[0].item():g}, "
                f"not {largest(dtype) / 4:g}",
                "amax is given. Delayed scaling hands in that of earlier steps: x's own is not "
                "known until all of x has been read.",
            )
    return "amax is an input"


def _saturates(attempt: Callable) -> str:
    for name, dtype in _FORMATS.items():
        x = torch.tensor([3.0, -5.0, 1e4, 1e30, 0.5])
        codes, inverse = _codes(attempt, x, 2.0, name)
        back = (codes.float() * inverse).tolist()
        if not all(abs(b) <= 2.01 for b in back) or back[1] > -1.99:
            raise Failed(
                f"{name}, amax = 2: {x.tolist()} come back as {[round(b, 3) for b in back]}",
                "What is beyond amax becomes ±amax: clip. e5m2's cast goes to infinity, and inf "
                "times 0 in a product is no number.",
            )
    return "clipped"


def _zeros(attempt: Callable) -> str:
    for name in _FORMATS:
        codes, inverse = _codes(attempt, torch.zeros(4), 0.0, name)
        back = (codes.float() * inverse).tolist()
        if back != [0.0] * 4:
            raise Failed(
                f"{name}: zeros with amax = 0 come back as {back}",
                "largest / 0 is inf, and 0 · inf is NaN: a tensor of zeros has a scale, too, any.",
            )
    return "a layer without gradients"


CAST = Exercise(
    id="fp8/cast",
    reference=in_eight_bits,
    properties=(
        Property("back again", _back),
        Property("the whole range", _whole_range),
        Property("amax as given", _as_given),
        Property("what is beyond", _saturates),
        Property("zeros", _zeros),
        Property("the factor", _factor),
        Property("the nearest codes", _nearest),
    ),
    hints=(
        "torch.finfo(dtype).max is the format's largest number. By what do you multiply amax to "
        "get there?",
        "scale = largest / amax; (x * scale).clamp(-largest, largest).to(dtype); 1 / scale. And "
        "amax may be 0.",
    ),
)

# ── three products ───────────────────────────────────────────────────────────────────────────────

_T, _N, _K = 256, 384, 512  # tokens, outputs, inputs


def three_products(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """y[t, n], and the gradients of x[t, k] and w[n, k], of y = x·wᵀ: operands in e4m3, tiles of
    1×128 along what is added up, of 128×128 for the weights, which are put into 8 bits once.
    """
    along, square = (1, 128), (128, 128)
    w8 = to_eight(w, F8_E4M3, square)
    y = product(to_eight(x, F8_E4M3, along), w8)
    grad_x = product(to_eight(grad, F8_E4M3, along), w8.mT)
    grad_w = product(to_eight(grad.mT, F8_E4M3, along), to_eight(x.mT, F8_E4M3, along))
    return y, grad_x, grad_w


def _operands() -> tuple[Tensor, Tensor, Tensor]:
    """Some tokens and some channels are a thousand times as large as the others."""
    x, w, grad = _normal(_T, _K), _normal(_N, _K, seed=1), 1e-5 * _normal(_T, _N, seed=2)
    x[:, 3] *= 1e6
    x[7] *= 1e4
    grad[9] *= 1e4
    grad[:, 5] *= 1e3
    return x, w, grad


_SHORT = torch.bfloat16, torch.half
_NAMES = ("y", "the gradient of x", "the gradient of w")


def _three(attempt: Callable) -> tuple[Tensor, ...]:
    try:
        got = attempt(*(each.clone() for each in _operands()))
    except ValueError as error:
        if getattr(error.args[0], "name", "") != "scale":
            raise
        raise Failed(
            str(error),
            "A matrix unit adds 128 products before a scale can be applied: a tile of 1×128 has to "
            "lie along the dim that *this* product adds up. Transposed it lies across: x and the "
            "gradient take other tiles for the gradient of w, from the transposed matrix; a square "
            "tile serves w both ways round.",
        ) from None
    shapes = [(_T, _N), (_T, _K), (_N, _K)]
    if not isinstance(got, (tuple, list)) or len(got) != 3:
        raise Failed(f"you return {type(got).__name__}", "Return y, and two gradients.")
    if not all(isinstance(each, Tensor) for each in got):
        kinds = ", ".join(type(each).__name__ for each in got)
        raise Failed(f"you return {kinds}", "Return y, and two gradients: three tensors.")
    found_shapes = [tuple(found.shape) for found in got]
    hint = "product(a, b) is a·bᵀ: y = product(x, w), and what is added up is the last dim of both."
    if found_shapes != shapes and sorted(found_shapes) == sorted(shapes):
        hint = "Return y, then the gradient of x, then that of w."
    for name, found, shape in zip(_NAMES, found_shapes, shapes, strict=True):
        if found != shape:
            raise Failed(f"{name} has shape {list(found)}, not {list(shape)}", hint)
    return tuple(got)


def _shapes(attempt: Callable) -> str:
    _three(attempt)
    return "every scale outside of its sums"


def _variants() -> list[tuple[str, Callable[[Tensor], Eight]]]:
    along = (1, 128)
    return [
        ("One scale for a whole tensor: the largest number ruins all others. Use tiles.",
         lambda z: to_eight(z, F8_E4M3)),
        ("Without a scale: what is below 2⁻¹⁰ is rounded to zero in e4m3, most gradients are.",
         lambda z: to_eight(z, F8_E4M3, scale=torch.ones(()))),
        ("Tiles of 128×128 are for weights: an activation's large token spoils 127 others.",
         lambda z: to_eight(z, F8_E4M3, (128, 128))),
        ("A scale for each row: a tile ends after 128 numbers, where a product can apply it.",
         lambda z: to_eight(z, F8_E4M3, (1, z.shape[1]))),
        ("That is e5m2. Its range is what tiles provide: take the bit of precision, e4m3.",
         lambda z: to_eight(z, F8_E5M2, along)),
    ]  # fmt: skip


def _near(found: Tensor, right: Tensor, share: float) -> bool:
    """Equal but for 1e-4 of each number and a share of the largest."""
    return torch.allclose(found, right, rtol=1e-4, atol=share * right.abs().max().item())


def _values(attempt: Callable) -> str:
    x, w, grad = _operands()
    along, square = (1, 128), (128, 128)
    w8 = to_eight(w, F8_E4M3, square)
    w1, w2 = to_eight(w, F8_E4M3, along), to_eight(w.mT, F8_E4M3, along)
    pairs = [(x, w), (grad, w.mT), (grad.mT, x.mT)]
    weights = [(w8, w1), (w8.mT, w2), (None, None)]
    right = three_products(x, w, grad)
    for at, (name, found) in enumerate(zip(_NAMES, _three(attempt), strict=True)):
        if _near(found.float(), right[at], 1e-5):
            continue
        hint, (a, b), (square8, along8) = "", pairs[at], weights[at]
        candidates = []
        if along8 is not None:
            words = "The tiles of w are 128×128, so that one set of codes serves both products."
            candidates.append((words, product(to_eight(a, F8_E4M3, along), along8)))
        else:
            words = "Rounded twice: put x and the gradient themselves into tiles along tokens, and "
            words += "not what comes back from the tiles of the other products."
            once = [to_eight(each.mT, F8_E4M3, along).numbers().mT for each in (a, b)]
            again, other = (to_eight(each, F8_E4M3, along) for each in once)
            candidates.append((words, product(again, other)))
        for words, put in _variants():
            others = [square8] if square8 is not None else [to_eight(b, F8_E4M3, along), put(b)]
            candidates += [(words, product(put(a), each)) for each in others]
            candidates.append((words, product(put(a), put(b))))
            candidates.append((words, product(to_eight(a, F8_E4M3, along), put(b))))
        for words, value in candidates:
            if _near(found.float(), value, 1e-6):
                hint = words
                break
        if any(torch.equal(found.float(), right[at].to(kind).float()) for kind in _SHORT):
            hint = "Right but for rounding: leave what `product` returns in fp32."
        off = ((found - right[at]).norm() / right[at].norm()).item()
        raise Failed(
            f"{name} is off by {100 * off:.2g} %",
            hint
            or "Activations and gradients: to_eight(…, F8_E4M3, (1, 128)); weights: (128, 128).",
        )
    return "y and two gradients"


PRODUCTS = Exercise(
    id="fp8/products",
    reference=three_products,
    properties=(Property("scales", _shapes), Property("values", _values)),
    hints=(
        "y[t, n] adds up over k, the gradient of x[t, k] over n, that of w[n, k] over tokens. "
        "product(a, b) adds up over the last dim of both.",
        "grad_x = product(grad in tiles, w8.mT). grad_w: grad.mT and x.mT, each put into tiles.",
    ),
)

# ── delayed scaling ──────────────────────────────────────────────────────────────────────────────


class DelayedScale:
    """The scale of one tensor from its largest numbers in the last `length` steps."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        self.dtype, self.length = dtype, length
        self.history: list[float] = []
        self.seen, self.scale = 0.0, 1.0

    def cast(self, x: Tensor) -> tuple[Tensor, float]:
        """Codes, and the inverse of the scale that they were made with."""
        self.seen = max(self.seen, x.abs().max().item())
        return cast(x * self.scale, self.dtype), 1 / self.scale

    def advance(self) -> None:
        """Ends a step: what was seen in it gives the next one its scale."""
        self.history = [*self.history, self.seen][-self.length :]
        self.seen, amax = 0.0, max(self.history)
        self.scale = scale_for(torch.tensor(amax), self.dtype).item() if amax else 1.0


def _pair(got: Any, x: Tensor) -> tuple[Tensor, float]:
    """The codes of x, and the number that brings them back."""
    try:
        codes, inverse = got
        if codes.shape == x.shape and isinstance(codes, Tensor):
            return codes, float(inverse)
    except (AttributeError, TypeError, ValueError, RuntimeError):
        pass
    hint = "Return two things: codes of the shape of x, and then the number that brings them back."
    raise Failed(f"cast returns {got!r:.60}", hint)


def _ran(
    attempt: Any, sizes: list, length: int = 3, dtype: torch.dtype = F8_E4M3
) -> list[tuple[float, float]]:
    """What the largest number of each step comes back as, and the range its codes cover.

    A step is a number, or a list of them: one for each micro-batch.
    """
    tracker, found = attempt(dtype, length), []
    for step in sizes:
        for size in step if isinstance(step, list) else [step]:
            x = torch.tensor([[-size / 4, size], [size / 2, 0.0]])
            given = x.clone()
            codes, inverse = _pair(tracker.cast(given), x)
            if not torch.equal(given, x):
                hint = "It is somebody's gradient: scale a copy."
                raise Failed("cast changes x in place", hint)
            back = float(codes.float()[0, 1]) * inverse
            found.append((back, largest(dtype) * inverse))
        tracker.advance()
    return found


_SIZES = 2.0**-8, 1.0, 64.0, -3.0


def _steady(attempt: Any) -> str:
    for (name, dtype), size in itertools.product(_FORMATS.items(), _SIZES):
        (_, first), *later = _ran(attempt, [size] * 5, dtype=dtype)
        top = f"{largest(dtype):g}"
        if first != largest(dtype):
            hint = (
                "Before anything was seen the scale is 1, and the inverse is one over the scale "
                "that the codes were made with."
            )
            raise Failed(f"{name}: the first step reaches to {first:g}, not to {top}", hint)
        for back, reach in later:
            if abs(reach / abs(size) - 1) > 1e-3 or abs(back / size - 1) > 1e-3:
                raise Failed(
                    f"{name}, numbers of {size:g} in every step: one comes back as {back:g}, codes "
                    f"reach to {reach:g}",
                    f"From the second step on the scale brings the largest number to {top}, and "
                    "the inverse is one over that same scale.",
                )
    return "2 formats, 4 sizes"


def _late(attempt: Any) -> str:
    for name, dtype in _FORMATS.items():
        back, reach = _ran(attempt, [1.0, 1.0, 8.0], dtype=dtype)[2]
        if abs(reach - 1) > 1e-3:
            raise Failed(
                f"{name}: 1, 1, then 8: in the third step codes reach to {reach:g}",
                "The scale of a step is fixed before it: its own largest number is not known until "
                "the tensor has been read, which is what delayed scaling saves. 8 is clipped to 1, "
                "once.",
            )
        if not abs(back - 1) < 1e-3:
            raise Failed(
                f"{name}: 1, 1, then 8: codes reach to 1, and 8 comes back as {back:g}",
                "What outgrows the history is clipped to the format's largest number before the "
                "cast: torch's own cast takes e5m2 to infinity.",
            )
    return "a jump is clipped, once"


def _grows(attempt: Any) -> str:
    found = _ran(attempt, [1.0, 1.0, 8.0, 8.0])
    if abs((reach := found[3][1]) - 8) > 1e-2:
        hint = "Of the history the largest number counts: no mean, and none of the older ones."
        if abs(reach - 1) < 1e-2:
            hint = (
                "What was seen is measured *before* the cast. Behind it everything has been "
                "clipped to the old range, and the history never learns of anything larger. "
                "(Or is it not the largest of the history that counts?)"
            )
        raise Failed(f"1, 1, 8, 8: in the fourth step codes reach to {reach:.3g}, not to 8", hint)
    return "the jump is seen"


def _micro(attempt: Any) -> str:
    found = _ran(attempt, [1.0, [1.0, 6.0, 0.5], [2.0, 2.0]])
    reaches = [reach for _, reach in found]
    if any(abs(reach - 1) > 1e-3 for reach in reaches[1:4]):
        raise Failed(
            f"three micro-batches of a step: codes reach to {reaches[1:4]}",
            "A step has one scale: it changes in advance(), or the backward pass of a checkpointed "
            "layer computes with another than the forward pass did.",
        )
    if abs(reaches[4] - 6) > 1e-2:
        raise Failed(
            f"micro-batches of 1, 6 and 0.5: then codes reach to {reaches[4]:g}, not to 6",
            "The largest of all micro-batches counts, not that of the last one.",
        )
    if abs((reach := _ran(attempt, [[6.0, 1.0, 1.0, 1.0], 1.0])[4][1]) - 6) > 1e-2:
        raise Failed(
            f"micro-batches of 6, 1, 1 and 1, a history of 3: then codes reach to {reach:g}, "
            "not to 6",
            "The history holds steps, and not micro-batches: advance() adds one number to it.",
        )
    return "3 and 4 micro-batches"


def _forgets(attempt: Any) -> str:
    sizes = [1.0, 100.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0]
    for length in (3, 1, 5):
        reaches = [reach for _, reach in _ran(attempt, sizes, length)]
        for step, mine in enumerate(reaches[1:], 2):
            expected = max(sizes[max(step - 1 - length, 0) : step - 1])
            if abs(mine / expected - 1) > 1e-2:
                hint = (
                    "The history is advanced in every step: the newest goes in, the oldest goes "
                    "out, and the scale comes from the largest of those that are left."
                )
                if mine > expected and abs(mine / max(sizes[: step - 1]) - 1) < 1e-2:
                    hint += " And what is seen begins at 0 in each step."
                raise Failed(
                    f"{sizes}, a history of {length}: in step {step} codes reach to {mine:g}, "
                    f"not to {expected:g}",
                    hint,
                )
    return "8 steps, histories of 3, 1 and 5"


def _zeros_seen(attempt: Any) -> str:
    try:
        found = _ran(attempt, [0.0, 0.0, 4.0, 4.0])
    except ZeroDivisionError:
        hint = "A layer may get zeros, at first or for ever: any scale will do there, such as 1."
        raise Failed("steps of zeros: the scale divides by 0", hint) from None
    if not all(map(math.isfinite, itertools.chain(*found))):
        raise Failed("steps of zeros: codes or scales are not finite", "0 · inf is no number.")
    if abs(found[-1][0] - 4) > 1e-3:
        hint = "Once there are numbers, the scale comes from them."
        raise Failed(f"0, 0, 4, 4: the last comes back as {found[-1][0]:g}", hint)
    for sizes, right in (
        ([8.0, 0.0, 0.0, 1.0, 1.0], (8, 8, 8, 1)),
        ([8.0, 1.0, 0.0, 0.0, 1.0], (8, 8, 8, 1)),
    ):
        reaches = [reach for _, reach in _ran(attempt, sizes)]
        for step, expected in enumerate(right, 2):
            if abs(reaches[step - 1] / expected - 1) > 1e-2:
                raise Failed(
                    f"{sizes}, a history of 3: in step {step} codes reach to "
                    f"{reaches[step - 1]:g}, not to {expected}",
                    "A step of zeros is a step: it goes into the history, and pushes the oldest "
                    "out. While that history holds other numbers the scale comes from them.",
                )
    return "a layer without gradients"


def _small(attempt: Any) -> str:
    size = 2.0**-30  # as of a gradient, where the loss is multiplied by 2⁻¹²
    back, reach = _ran(attempt, [size] * 3)[2]
    if abs(reach / size - 1) > 1e-3 or abs(back / size - 1) > 1e-3:
        raise Failed(
            f"numbers of {size:.3g} in every step: in the third, codes reach to {reach:.3g}",
            "A small number is no zero: what stands against a division by 0 must be far smaller.",
        )
    return "numbers of 1e-9"


HUNT = Exercise(
    id="fp8/bug-hunt",
    untouched="132fcfbe",
    reference=DelayedScale,
    properties=(
        Property("a steady tensor", _steady),
        Property("one step late", _late),
        Property("a jump is learned", _grows),
        Property("micro-batches", _micro),
        Property("the history advances", _forgets),
        Property("zeros", _zeros_seen),
        Property("small numbers", _small),
    ),
    hints=(
        "Play three cases on paper: a tensor that suddenly grows, one that is cast twice in a "
        "step, and one that was large only once, long ago.",
        "Look at x and not at the codes; keep the largest of a step; let the history drop the "
        "oldest; and what if all it holds is 0?",
    ),
)

EXERCISES = (CAST, PRODUCTS, HUNT)
