"""Wrong answers to the exercises of `fp8`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from labutils.quantization import F8_E4M3, F8_E5M2, Eight, cast, largest, product, to_eight
from wrong_answers import Wrong


def _slip(
    *, amax: str = "given", order: str = "clip first", inverse: str = "one over", zero: bool = True
) -> Callable:
    """A cast with its slips switched on one at a time."""

    def attempt(x: Tensor, given: float, dtype: torch.dtype) -> tuple[Tensor, float]:
        top = largest(dtype)
        amaxes = {
            "given": given, "own": x.abs().max().item(), "signed": x.max().item(),
            "after": cast(x, dtype).float().abs().max().item() if amax == "after" else 0,
            "none": top,
        }  # fmt: skip
        chosen = amaxes[amax]
        if zero:
            chosen = chosen or 1e-30
        scale = top / torch.tensor(chosen)
        scaled = x * scale
        if order == "clip first":
            codes = cast(scaled, dtype)
        elif order == "clip after":
            codes = scaled.to(dtype).float().clamp(-top, top).nan_to_num(nan=0.0).to(dtype)
            codes = torch.where(scaled.to(dtype).float().isinf(), torch.nan, scaled).to(dtype)
        else:
            codes = scaled.to(dtype)
        if inverse == "twice":
            codes = cast(codes.float() / scale, dtype)
        back = {"one over": 1 / scale, "forgotten": torch.tensor(1.0), "scale": scale}
        return codes, back.get(inverse, 1 / scale).item()

    return attempt


def _products(
    *, x: tuple | None = (1, 128), w: tuple | None = (128, 128), grad: tuple | None = (1, 128),
    of_grad: torch.dtype = F8_E4M3, scaled: bool = True, across: bool = False, again: bool = False,
    turned: bool = False,
) -> Callable:  # fmt: skip
    """The three products with slips in tiles and formats.

    across: the gradient of w from the transposed codes of the other products; again: w in 8 bits a
    second time
    """

    def attempt(xs: Tensor, ws: Tensor, grads: Tensor) -> tuple[Tensor, ...]:
        one = None if scaled else torch.ones(())
        x8, w8 = to_eight(xs, F8_E4M3, x), to_eight(ws, F8_E4M3, w)
        g8 = to_eight(grads, of_grad, grad, scale=one)
        w_back = to_eight(ws.mT.contiguous(), F8_E4M3, w) if again else w8.mT
        if across:
            of_w = product(g8.mT, x8.mT)
        else:
            of_w = product(to_eight(grads.mT, of_grad, grad, scale=one), to_eight(xs.mT, F8_E4M3, x))
        return product(x8, w8), product(g8, w_back), of_w.mT if turned else of_w

    return attempt


def _delayed(
    *, own: bool = False, after: bool = False, last: bool = False, oldest: bool = False,
    newest: bool = False, early: bool = False, new_inverse: bool = False, first: bool = False,
    e4m3: bool = False,
) -> type:  # fmt: skip
    """A delayed scale with its slips switched on one at a time.

    own: the current largest number; after: seen behind the cast; last: of the last micro-batch;
    oldest: the history keeps the first steps; newest: only the last; early: advanced in cast;
    first: looks at one number; e4m3: 448 for any format
    """

    class Attempt:
        def __init__(self, dtype: torch.dtype, length: int) -> None:
            self.dtype, self.length = dtype, length
            self.history, self.seen, self.scale = [], 0.0, 1.0

        def cast(self, x: Tensor) -> tuple[Tensor, float]:
            amax = (x.flatten()[0] if first else x).abs().max().item()
            if own and self.history:
                self.scale = largest(self.dtype) / amax
            codes, used = cast(x * self.scale, self.dtype), self.scale
            if after:
                amax = codes.float().abs().max().item() / self.scale
            self.seen = amax if last else max(self.seen, amax)
            if early:
                self.note()
            return codes, 1 / (largest(self.dtype) / amax if new_inverse else used)

        def advance(self) -> None:
            if not early:
                self.note()

        def note(self) -> None:
            history = [*self.history, self.seen]
            self.history = history[: self.length] if oldest else history[-self.length :]
            self.seen = 0.0
            top = self.history[-1] if newest else max(self.history)
            self.scale = largest(F8_E4M3 if e4m3 else self.dtype) / top

    return Attempt


class _ZerosSkipped(_delayed()):
    """A step of zeros is none."""

    def note(self) -> None:
        if self.seen:
            super().note()


class _ZerosReset(_delayed()):
    """After a step of zeros any scale will do."""

    def note(self) -> None:
        zeros, self.seen = not self.seen, self.seen or 1e-30
        super().note()
        self.scale = 1.0 if zeros else self.scale


def _power_of_two(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A scale rounded down to a power of two, as in MX formats."""
    scale = 2.0 ** torch.tensor(largest(dtype) / max(amax, 1e-30)).log2().floor().item()
    return cast(x * scale, dtype), 1 / scale


def _as_halves(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A format's largest number looked up by hand, and that of e4m3 for both."""
    scale = 448 / max(amax, 1e-30)
    return (x * scale).clamp(-448, 448).to(dtype), 1 / scale


def _integers(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    codes = (x / max(amax, 1e-30) * 127).clamp(-127, 127).round()
    return codes.to(dtype), amax / 127


def _bytes(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The codes as bytes: what they stand for is lost."""
    scale = largest(dtype) / max(amax, 1e-30)
    return cast(x * scale, dtype).view(torch.uint8), 1 / scale


def _no_transpose(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """product(a, b) taken for a·b."""
    along = (1, 128)
    x8, w8 = to_eight(x, F8_E4M3, along), to_eight(w.mT, F8_E4M3, (128, 128))
    return product(x8, w8), product(x8, w8), product(x8, w8)


def _in_fp32(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return x @ w.mT, grad @ w, grad.mT @ x


def _two(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return _products()(x, w, grad)[:2]


def _mean_amax(make: type) -> type:
    """The mean of the history in place of its largest."""

    class Attempt(make):
        def note(self) -> None:
            super().note()
            self.scale = largest(self.dtype) * len(self.history) / max(sum(self.history), 1e-30)

    return Attempt


def _margin(make: type) -> type:
    """Half of the range is kept free, for growth."""

    class Attempt(make):
        def note(self) -> None:
            super().note()
            self.scale /= 2

    return Attempt


def _scaled(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float, float]:
    """x times its scale, the format's largest number, and the inverse."""
    top = largest(dtype)
    return x * (top / (amax or 1)), top, (amax or 1) / top


def _factor_first(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[float, Tensor]:
    scaled, top, inverse = _scaled(x, amax, dtype)
    return inverse, scaled.clamp(-top, top).to(dtype)


def _above_alone(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Clipped above, and not below."""
    scaled, top, inverse = _scaled(x, amax, dtype)
    return scaled.clamp(max=top).to(dtype), inverse


def _dropped(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """What is beyond becomes 0."""
    scaled, top, inverse = _scaled(x, amax, dtype)
    return scaled.where(scaled.abs() <= top, 0).to(dtype), inverse


def _room(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Half of the range is kept free."""
    scaled, top, inverse = _scaled(x, 2 * amax, dtype)
    return scaled.clamp(-top, top).to(dtype), inverse


def _whole_numbers(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Rounded as an integer is, and cast then."""
    scaled, top, inverse = _scaled(x, amax, dtype)
    return scaled.round().clamp(-top, top).to(dtype), inverse


def _larger_of_both(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The amax that is given, or x's own where that is larger."""
    scaled, top, inverse = _scaled(x, max(amax, x.abs().max().item()), dtype)
    return scaled.clamp(-top, top).to(dtype), inverse


def _other_order(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    y, of_x, of_w = _products()(x, w, grad)
    return y, of_w, of_x


def _of_the_mean(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradient of w is divided by the tokens."""
    y, of_x, of_w = _products()(x, w, grad)
    return y, of_x, of_w / len(x)


def _by_rows(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """A scale for each row, however long."""

    def rows(z: Tensor) -> Eight:
        return to_eight(z, F8_E4M3, (1, z.shape[1]))

    w8 = to_eight(w, F8_E4M3, (128, 128))
    return product(rows(x), w8), product(rows(grad), w8.mT), product(rows(grad.mT), rows(x.mT))


def _short(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Tiles of 64: finer, and no matrix unit could apply them."""
    return _products(x=(1, 64), w=(64, 64), grad=(1, 64))(x, w, grad)


def _from_codes(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """For the gradient of w, what came back from the tiles of the other two products."""
    y, of_x, _ = _products()(x, w, grad)
    back = [to_eight(each, F8_E4M3, (1, 128)).numbers() for each in (grad, x)]
    return y, of_x, product(*(to_eight(each.mT, F8_E4M3, (1, 128)) for each in back))


def _in_place(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The caller's tensor is scaled."""
    top = largest(dtype)
    x *= top / (amax or 1)
    return x.clamp_(-top, top).to(dtype), (amax or 1) / top


def _by_bf16(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Rounded twice."""
    scaled, top, inverse = _scaled(x, amax, dtype)
    return scaled.bfloat16().clamp(-top, top).to(dtype), inverse


def _half_inverse(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """The factor is kept in bf16."""
    scaled, top, inverse = _scaled(x, amax, dtype)
    return scaled.clamp(-top, top).to(dtype), torch.tensor(inverse).bfloat16().item()


def _added(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """1e-8 against a division by zero, as large as an amax may be."""
    scaled, top, inverse = _scaled(x, amax + 1e-8, dtype)
    return scaled.clamp(-top, top).to(dtype), inverse


def _whole_scale(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """A scale without a fraction, where it is above 1."""
    top = largest(dtype)
    scale = top / (amax or 1)
    scale = round(scale) if scale > 1 else scale
    return (x * scale).clamp(-top, top).to(dtype), 1 / scale


def _flushed(x: Tensor, amax: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """No subnormal numbers."""
    scaled, top, inverse = _scaled(x, amax, dtype)
    scaled = scaled.where(scaled.abs() >= torch.finfo(dtype).tiny, 0)
    return scaled.clamp(-top, top).to(dtype), inverse


class _Zeros(_delayed()):
    """Zeros are a step, and no number is divided by them. A base for slips that divide by none."""

    def note(self) -> None:
        self.history, self.seen = [*self.history, self.seen][-self.length :], 0.0
        self.scale = largest(self.dtype) / (max(self.history) or 1.0)


class _WaitsForNumbers(_Zeros):
    """After a step of zeros the scale stays, whatever the history holds by then."""

    def note(self) -> None:
        seen, old = self.seen, self.scale
        super().note()
        self.scale = self.scale if seen else old


class _LastOfNone(_Zeros):
    """[-0:] is everything: a history of 1 never forgets."""

    def note(self) -> None:
        kept = self.history[-(self.length - 1) :]
        super().note()
        self.history = [*kept, self.history[-1]]
        self.scale = largest(self.dtype) / (max(self.history) or 1.0)


class _ThreeSteps(_Zeros):
    """Whatever length is."""

    def __init__(self, dtype: torch.dtype, length: int) -> None:
        super().__init__(dtype, 3)


class _AtLeast(_Zeros):
    """An amax of 1e-6 at least, where a gradient's may be 1e-9."""

    def note(self) -> None:
        super().note()
        self.scale = largest(self.dtype) / max(max(self.history), 1e-6)


class _Tail(_Zeros):
    """Looks at the last row alone."""

    def cast(self, x: Tensor) -> tuple[Tensor, float]:
        seen = max(self.seen, x[-1].abs().max().item())
        found = super().cast(x)
        self.seen = seen
        return found


class _Emptied(_Zeros):
    """A step of zeros empties the history."""

    def note(self) -> None:
        seen, old = self.seen, self.scale
        super().note()
        if not seen:
            self.history, self.scale = [0.0], old


class _MicroSteps(_Zeros):
    """Each micro-batch goes into the history."""

    def cast(self, x: Tensor) -> tuple[Tensor, float]:
        found = super().cast(x)
        self.history = [*self.history, x.abs().max().item()][-self.length :]
        return found

    def note(self) -> None:
        self.scale = largest(self.dtype) / (max(self.history) or 1.0)


class _Overwrites(_Zeros):
    """The caller's tensor is scaled."""

    def cast(self, x: Tensor) -> tuple[Tensor, float]:
        found = super().cast(x)
        x *= self.scale
        return found


def _long(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Tiles of 256: a matrix unit could apply them, and an outlier spoils twice as many."""
    return _products(x=(1, 256), w=(256, 256), grad=(1, 256))(x, w, grad)


def _weights_left(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """The gradient of x by the weights themselves."""
    y, _, of_w = _products()(x, w, grad)
    return y, to_eight(grad, F8_E4M3, (1, 128)).numbers() @ w, of_w


def _in_bf16(x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Results in 16 bits, rounded once more."""
    return tuple(each.bfloat16() for each in _products()(x, w, grad))


class _Unclipped(_delayed()):
    """torch's cast, which takes e5m2 to infinity."""

    def cast(self, x: Tensor) -> tuple[Tensor, float]:
        _, inverse = super().cast(x)
        return (x * self.scale).to(self.dtype), inverse


class _NeverForgets(_delayed()):
    """The largest number of a step is not reset."""

    def note(self) -> None:
        seen = self.seen
        super().note()
        self.seen = seen


class _OneMore(_delayed()):
    def __init__(self, dtype: torch.dtype, length: int) -> None:
        super().__init__(dtype, length + 1)


class _WithItsOwn(_delayed()):
    """This step's largest number is taken into its own scale."""

    def cast(self, x: Tensor) -> tuple[Tensor, float]:
        if self.history:
            top = max(*self.history, x.abs().max().item())
            self.scale = largest(self.dtype) / top
        return super().cast(x)


class _OnlyShrinks(_delayed()):
    """A scale that once was small stays small."""

    def note(self) -> None:
        old = self.scale if self.history else math.inf
        super().note()
        self.scale = min(old, self.scale)


class _SeenForEver(_Zeros):
    """What was seen in a step is seen in all later ones."""

    def advance(self):
        seen = self.seen
        super().advance()
        self.seen = seen


class _MeanOfTwo(_Zeros):
    """Half of the way to what was seen."""

    def advance(self):
        if self.history:
            self.seen = (self.history[-1] + self.seen) / 2
        super().advance()


WRONG = {
    "fp8/cast": (
        Wrong("the inverse forgotten", _slip(inverse="forgotten"), "back again", "forgotten"),
        Wrong("the inverse applied twice", _slip(inverse="twice"), "back again", "applied twice"),
        Wrong("the scale returned", _slip(inverse="scale"), "back again", "one over it"),
        Wrong("amax after the cast", _slip(amax="after"), "back again", "codes"),
        Wrong("the largest, not the largest |x|", _slip(amax="signed"), "back again", "the largest |x|"),
        Wrong("no scale", _slip(amax="none"), "back again", "codes"),
        Wrong("x's own amax", _slip(amax="own"), "amax as given", "amax is given"),
        Wrong("not clipped", _slip(order="never"), "what is beyond", "clip."),
        Wrong("clipped after rounding", _slip(order="clip after"), "what is beyond", "clip."),
        Wrong("a power of two", _power_of_two, "the whole range", "brings amax to"),
        Wrong("448 for both", _as_halves, "the whole range", "brings amax to"),
        Wrong("as int8", _integers, "back again", ""),
        Wrong("bytes", _bytes, "back again", "Codes are"),
        Wrong("divided by zero", _slip(zero=False), "zeros", "NaN"),
        Wrong("the factor first", _factor_first, "back again", "codes, and then"),
        Wrong("clipped above alone", _above_alone, "what is beyond", "clip."),
        Wrong("what is beyond dropped", _dropped, "what is beyond", "becomes ±amax"),
        Wrong("room for growth", _room, "the whole range", "brings amax to"),
        Wrong("whole numbers", _whole_numbers, "back again", "is x again"),
        Wrong("in place", _in_place, "back again", "a copy"),
        Wrong("by way of bf16", _by_bf16, "the nearest codes", "rounded twice"),
        Wrong("the factor in bf16", _half_inverse, "the factor", "fp32 or finer"),
        Wrong("1e-8 added to amax", _added, "the factor", "counts"),
        Wrong("a whole scale", _whole_scale, "the factor", "The factor is"),
        Wrong("no subnormal numbers", _flushed, "the nearest codes", "subnormal ones"),
        Wrong("the larger of both", _larger_of_both, "what is beyond", "becomes ±amax"),
    ),
    "fp8/products": (
        Wrong("tiles of w 1×128", _products(w=(1, 128)), "scales", "a square tile"),
        Wrong("w a second time", _products(w=(1, 128), again=True), "values", "both products"),
        Wrong("transposed codes", _products(across=True), "scales", "other tiles"),
        Wrong("tiles across", _products(x=(128, 1)), "scales", "has to lie along"),
        Wrong("one scale per tensor", _products(x=None, grad=None), "values", "ruins all others"),
        Wrong("square tiles", _products(x=(128, 128), grad=(128, 128)), "values", "for weights"),
        Wrong("gradients unscaled", _products(scaled=False), "values", "Without a scale"),
        Wrong("gradients in e5m2", _products(of_grad=F8_E5M2), "values", "That is e5m2"),
        Wrong("a·b", _no_transpose, "scales", ""),
        Wrong("in fp32", _in_fp32, "values", ""),
        Wrong("two of three", _two, "scales", "two gradients"),
        Wrong("the wrong way round", _products(turned=True), "scales", "a·bᵀ"),
        Wrong("the other order", _other_order, "scales", "then that of w"),
        Wrong("of the mean", _of_the_mean, "values", ""),
        Wrong("a scale for each row", _by_rows, "values", "ends after 128"),
        Wrong("tiles of 64", _short, "scales", "adds 128 products"),
        Wrong("one scale for w", _products(w=None), "values", "ruins all others"),
        Wrong("tiles of 256", _long, "values", ""),
        Wrong("pairs of rows", _products(x=(2, 128), grad=(2, 128)), "values", ""),
        Wrong("the weights themselves", _weights_left, "values", ""),
        Wrong("results in bf16", _in_bf16, "values", "leave what `product` returns"),
        Wrong("rounded twice", _from_codes, "values", "Rounded twice"),
    ),
    "fp8/bug-hunt": (
        Wrong("the one of the lab", _delayed(after=True, last=True, oldest=True),
              "a jump is learned", "before"),
        Wrong("the current amax", _delayed(own=True), "one step late", "not known until"),
        Wrong("seen behind the cast", _delayed(after=True), "a jump is learned", "clipped to"),
        Wrong("the last micro-batch", _delayed(last=True), "micro-batches", "not that of the last"),
        Wrong("advanced in cast", _delayed(early=True), "micro-batches", "has one scale"),
        Wrong("never advanced", _delayed(oldest=True), "the history advances", "oldest goes out"),
        Wrong("only the newest", _delayed(newest=True), "the history advances", "the largest of"),
        Wrong("divided by nothing seen", _delayed(), "zeros", "any scale"),
        Wrong("zeros are no step", _ZerosSkipped, "zeros", "pushes the oldest out"),
        Wrong("zeros reset", _ZerosReset, "zeros", "holds other numbers"),
        Wrong("the first number", _delayed(first=True), "a steady tensor", "largest number"),
        Wrong("448 for any format", _delayed(e4m3=True), "a steady tensor", "57344"),
        Wrong("the mean", _mean_amax(_delayed()), "a jump is learned", "no mean"),
        Wrong("a margin", _margin(_delayed()), "a steady tensor", "largest number to 448"),
        Wrong("another inverse", _delayed(new_inverse=True), "a steady tensor", "made with"),
        Wrong("not clipped", _Unclipped, "one step late", "to infinity"),
        Wrong("never forgets", _NeverForgets, "the history advances", "oldest goes out"),
        Wrong("one step more", _OneMore, "the history advances", "oldest goes out"),
        Wrong("its own as well", _WithItsOwn, "one step late", "not known until"),
        Wrong("waits for numbers", _WaitsForNumbers, "zeros", "comes from them"),
        Wrong("a slice of -0", _LastOfNone, "the history advances", "oldest goes out"),
        Wrong("three steps, always", _ThreeSteps, "the history advances", "oldest goes out"),
        Wrong("1e-6 at least", _AtLeast, "small numbers", "no zero"),
        Wrong("the last row", _Tail, "a steady tensor", "largest number"),
        Wrong("zeros empty it", _Emptied, "zeros", "comes from them"),
        Wrong("micro-batches as steps", _MicroSteps, "micro-batches", "adds one number"),
        Wrong("overwrites", _Overwrites, "a steady tensor", "a copy"),
        Wrong("the mean of two", _MeanOfTwo, "a jump is learned", "no mean"),
        Wrong("seen for ever", _SeenForEver, "the history advances", "begins at 0"),
        Wrong("only shrinks", _OnlyShrinks, "the history advances", "oldest goes out"),
    ),
}  # fmt: skip
