"""Right answers to the exercises of `fp8`, in other styles than the reference."""

import collections

import numpy as np
import torch

from labutils.quantization import E4M3, product, scale_for, to_eight


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
    w8 = to_eight(w, E4M3, tile=(128, 128))
    for a, b in ((x, w8), (grad, w8.mT), (grad.mT, to_eight(x.mT.contiguous(), E4M3, (1, 128)))):
        found.append(product(to_eight(a.contiguous(), E4M3, (1, 128)), b))
    return found


def _transposed(x, w, grad):
    def along(z):
        return to_eight(z, E4M3, (1, 128))

    w8 = to_eight(w.mT, E4M3, (128, 128))  # quantized the other way round: the same tiles
    return (
        product(w8.mT, along(x)).mT,
        product(w8, along(grad)).mT,
        product(along(x.mT), along(grad.mT)).mT,
    )


def _by_numbers(x, w, grad):
    def along(z):
        return to_eight(z, E4M3, (1, 128)).numbers()

    w8 = to_eight(w, E4M3, (128, 128)).numbers()
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
    from_x = to_eight(x, E4M3, (1, 128))
    y = product(from_x, to_eight(w, E4M3, (128, 128)))
    back = to_eight(w.mT.contiguous(), E4M3, (128, 128))
    along = [to_eight(z, E4M3, (1, 128)) for z in (grad, grad.mT, x.mT)]
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


RIGHT = {
    "fp8/cast": {
        "by division": _by_division,
        "where": _by_where,
        "NumPy": _numpy,
        "behind": _clipped_behind,
    },
    "fp8/products": {
        "a loop": _in_turn,
        "transposed": _transposed,
        "numbers": _by_numbers,
        "twice": _square_first,
    },
    "fp8/bug-hunt": {
        "a deque": _Deque,
        "tensors": _Tensors,
        "a dictionary": _ByHand,
        "by steps": _OfSteps,
        "keeps its scale": _KeepsItsScale,
    },
}
