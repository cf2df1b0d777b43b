"""Right answers to the exercises of `fp8`, in other styles than the reference."""

import collections
import functools

import numpy as np
import torch

from labutils.quantization import (
    F8_E4M3,
    SCHEMES,
    Fp8Products,
    cast,
    largest,
    product,
    scale_for,
    to_eight,
)


def _by_division(x, amax, dtype):
    top = torch.finfo(dtype).max
    unit = amax / top if amax > 0 else 1.0
    return torch.clamp(x / unit, min=-top, max=top).to(dtype), unit


def _by_where(x, amax, dtype):
    top = torch.finfo(dtype).max
    x = torch.where(x.abs() > amax, amax * x.sign(), x)
    scale = torch.tensor(top) / max(amax, 1e-12)
    return (x * scale).to(dtype), 1 / scale


def _numpy(x, amax, dtype):
    top = np.float32(torch.finfo(dtype).max)
    scale = top / np.float32(amax) if amax else np.float32(1)
    codes = np.clip(x.numpy() * scale, -top, top)
    return torch.from_numpy(codes).to(dtype), np.float32(1) / scale


def _in_turn(x, w, grad):
    found = []
    w8 = to_eight(w, F8_E4M3, tile=(128, 128))
    for a, b in ((x, w8), (grad, w8.mT), (grad.mT, to_eight(x.mT.contiguous(), F8_E4M3, (1, 128)))):
        found.append(product(to_eight(a.contiguous(), F8_E4M3, (1, 128)), b))
    return found


def _transposed(x, w, grad):
    def along(z):
        return to_eight(z, F8_E4M3, (1, 128))

    w8 = to_eight(w.mT, F8_E4M3, (128, 128))  # quantized the other way round: the same tiles
    return (
        product(w8.mT, along(x)).mT,
        product(w8, along(grad)).mT,
        product(along(x.mT), along(grad.mT)).mT,
    )


def _by_numbers(x, w, grad):
    def along(z):
        return to_eight(z, F8_E4M3, (1, 128)).numbers()

    w8 = to_eight(w, F8_E4M3, (128, 128)).numbers()
    return along(x) @ w8.T, along(grad) @ w8, along(grad.T) @ along(x.T).T


class _Deque:
    def __init__(self, dtype, length):
        self.top, self.dtype = torch.finfo(dtype).max, dtype
        self.amaxes, self.now = collections.deque(maxlen=length), []

    def cast(self, x):
        self.now.append(float(x.abs().max()))
        unit = max(self.amaxes, default=0.0) / self.top or 1.0
        return (x / unit).clamp(-self.top, self.top).to(self.dtype), unit

    def advance(self):
        self.amaxes.append(max(self.now))
        self.now = []


class _Tensors:
    def __init__(self, dtype, length):
        self.history, self.dtype = torch.zeros(length), dtype
        self.seen, self.scale = torch.zeros(()), torch.ones(())

    def cast(self, x):
        top = torch.finfo(self.dtype).max
        self.seen = torch.maximum(self.seen, x.abs().amax())
        return (x * self.scale).clamp(-top, top).to(self.dtype), self.scale.reciprocal()

    def advance(self):
        self.history = torch.roll(self.history, 1)
        self.history[0] = self.seen
        self.seen = torch.zeros(())
        self.scale = scale_for(self.history.max(), self.dtype)


class _ByHand:
    def __init__(self, dtype, length):
        self.kept, self.length, self.dtype, self.steps = {}, length, dtype, 0

    def _amax(self):
        past = [v for k, v in self.kept.items() if self.steps - self.length <= k < self.steps]
        return max(past, default=0.0) or torch.finfo(self.dtype).max

    def cast(self, x):
        top, amax = torch.finfo(self.dtype).max, self._amax()
        mine = x.abs().max().item()
        self.kept[self.steps] = max(self.kept.get(self.steps, 0.0), mine)
        return x.clamp(-amax, amax).mul(top / amax).to(self.dtype), amax / top

    def advance(self):
        self.steps += 1


def _clipped_behind(x, amax, dtype):
    """torch's cast saturates e4m3, and what became inf in e5m2 is clipped behind it. A list."""
    top = torch.finfo(dtype).max
    scale = top / amax if amax else 1.0
    codes = (x * scale).clamp(-3e38, 3e38).to(dtype).float()
    codes = torch.where((x * scale).abs() > top, top * x.sign(), codes)
    return [codes.to(dtype), 1 / scale]


def _square_first(x, w, grad):
    """w cast twice, the second time transposed: square tiles give the same codes."""
    from_x = to_eight(x, F8_E4M3, (1, 128))
    y = product(from_x, to_eight(w, F8_E4M3, (128, 128)))
    back = to_eight(w.mT.contiguous(), F8_E4M3, (128, 128))
    along = [to_eight(z, F8_E4M3, (1, 128)) for z in (grad, grad.mT, x.mT)]
    return [y, product(along[0], back), product(along[1], along[2])]


class _OfSteps:
    """A largest number for each step that is kept, and 0 stands for none yet."""

    def __init__(self, dtype, length):
        self.dtype, self.steps = dtype, [0.0] * (length + 1)

    @property
    def amax(self):
        return max(self.steps[1:])

    def cast(self, x):
        self.steps[0] = max(self.steps[0], x.abs().max().item())
        top = torch.finfo(self.dtype).max
        factor = top / self.amax if self.amax else 1.0
        return torch.clamp(x * factor, -top, top).to(self.dtype), 1 / factor

    def advance(self):
        self.steps = [0.0, *self.steps[:-1]]


class _KeepsItsScale(_ByHand):
    """Where all that is kept were zeros, the scale of before stays."""

    last = 0.0

    def _amax(self):
        past = [v for k, v in self.kept.items() if self.steps - self.length <= k < self.steps]
        self.last = max(past, default=0.0) or self.last
        return self.last or torch.finfo(self.dtype).max


def _number_by_number(x, amax, dtype):
    top = torch.finfo(dtype).max
    scale = top / amax if amax else 1.0
    scaled = [max(-top, min(top, scale * each)) for each in x.flatten().tolist()]
    return torch.tensor(scaled).view(x.shape).to(dtype), 1 / scale


def _in_units(x, amax, dtype):
    """In units of amax, in 64 bits; zeros are sent back before anything is divided."""
    if not amax:
        return x.to(dtype), 0.0
    return (x.double() / amax).clip(-1, 1).mul(torch.finfo(dtype).max).to(dtype), (
        amax / torch.finfo(dtype).max
    )


def _the_library(x, amax, dtype):
    scale = scale_for(torch.tensor(amax), dtype)
    eight = to_eight(x.view(1, -1), dtype, scale=scale)
    return eight.codes.view(x.shape), eight.inverse


def _by_fp16(x, amax, dtype):
    """Times its scale in fp16, which has the digits of both formats and eight more."""
    top = torch.finfo(dtype).max
    scale = top / (amax or top)
    return (x * scale).clamp(-top, top).half().to(dtype), 1 / scale


def _one_number(x, amax, dtype):
    """The factor is a tensor of one number."""
    top = torch.finfo(dtype).max
    scale = torch.tensor([top / max(amax, 1e-12)])
    return torch.minimum(torch.maximum(x * scale, -x.new_tensor(top)), x.new_tensor(top)).to(
        dtype
    ), scale.reciprocal()


def _columns(x, w, grad):
    """Tiles that stand upright in x and in the gradient, and lie when these are transposed."""
    w8 = to_eight(w, F8_E4M3, (128, 128))
    upright = [to_eight(each, F8_E4M3, (128, 1)).mT for each in (grad, x)]
    lying = [to_eight(each, F8_E4M3, (1, 128)) for each in (x, grad)]
    return product(lying[0], w8), product(lying[1], w8.mT), product(*upright)


def _by_autograd(x, w, grad):
    """The library's layer, and its backward pass."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = Fp8Products(SCHEMES["tiles"])(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), grad)


def _x_outside(x, w, grad):
    """The gradient of w as (xᵀ·G)ᵀ."""
    tiles, square = functools.partial(to_eight, dtype=F8_E4M3, tile=(1, 128)), (128, 128)
    of_w = product(tiles(x.T), tiles(grad.T)).T
    back = to_eight(w, F8_E4M3, square).mT
    return product(tiles(x), back.mT), product(tiles(grad), back), of_w


class _Lazy:
    """The scale is found when it is asked for; the steps are kept as tensors."""

    def __init__(self, dtype, length):
        self.dtype, self.length, self.steps = dtype, length, [[]]

    def cast(self, x):
        self.steps[-1].append(x.abs().max())
        past = [each for step in self.steps[:-1] for each in step]
        amax = torch.stack(past).max() if past else torch.zeros(())
        top = torch.finfo(self.dtype).max
        scale = top / amax if amax > 0 else torch.ones(())
        return torch.clamp(x * scale, -top, top).to(self.dtype), (1 / scale).item()

    def advance(self):
        self.steps = [*self.steps, []][-self.length - 1 :]


class _Array:
    """A ring of NumPy numbers, and a place in it."""

    def __init__(self, dtype, length):
        self.ring, self.at, self.dtype = np.zeros(length), 0, dtype
        self.unit, self.seen = 1.0, 0.0

    def cast(self, x):
        top = torch.finfo(self.dtype).max
        self.seen = np.fmax(self.seen, np.abs(x.numpy()).max())
        return torch.from_numpy(np.clip(x.numpy() / self.unit, -top, top)).to(self.dtype), self.unit

    def advance(self):
        self.ring[self.at % len(self.ring)] = self.seen
        self.at, self.seen = self.at + 1, 0.0
        self.unit = float(self.ring.max() / torch.finfo(self.dtype).max) or 1.0


class _Inserted(_OfSteps):
    """The newest in front; 1e-12 stands against a division by zero."""

    def __init__(self, dtype, length):
        self.dtype, self.length, self.kept, self.now = dtype, length, [], 0.0
        self.factor = 1.0

    def cast(self, x):
        self.now = max(self.now, float(torch.linalg.vector_norm(x, torch.inf)))
        return cast(self.factor * x, self.dtype), 1 / self.factor

    def advance(self):
        self.kept.insert(0, self.now)
        del self.kept[self.length :]
        self.now, self.factor = 0.0, largest(self.dtype) / max(*self.kept, 1e-12)


class _Repaired:
    """The lab's own, with four changes."""

    def __init__(self, dtype, length):
        self.dtype, self.length = dtype, length
        self.history, self.seen, self.scale = [], 0.0, 1.0

    def cast(self, x):
        self.seen = max(self.seen, x.abs().max().item())
        return cast(x * self.scale, self.dtype), 1 / self.scale

    def advance(self):
        self.history = [self.seen, *self.history][: self.length]
        self.seen = 0.0
        if max(self.history):
            self.scale = largest(self.dtype) / max(self.history)


RIGHT = {
    "fp8/cast": {
        "by division": _by_division,
        "where": _by_where,
        "NumPy": _numpy,
        "behind": _clipped_behind,
        "number by number": _number_by_number,
        "in units": _in_units,
        "the library": _the_library,
        "by way of fp16": _by_fp16,
        "one number": _one_number,
    },
    "fp8/products": {
        "a loop": _in_turn,
        "transposed": _transposed,
        "numbers": _by_numbers,
        "twice": _square_first,
        "columns": _columns,
        "autograd": _by_autograd,
        "x outside": _x_outside,
    },
    "fp8/bug-hunt": {
        "a deque": _Deque,
        "tensors": _Tensors,
        "a dictionary": _ByHand,
        "by steps": _OfSteps,
        "keeps its scale": _KeepsItsScale,
        "lazy": _Lazy,
        "a ring": _Array,
        "inserted": _Inserted,
        "repaired": _Repaired,
    },
}
