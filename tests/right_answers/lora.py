"""Right answers to the exercises of `lora`, in other styles than the reference."""

import copy
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class _Plain(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        d, k = linear.weight.shape
        self.A, self.B = (
            nn.Parameter(each) for each in (torch.rand(rank, k), torch.zeros(d, rank))
        )
        self.scale, self.merged = alpha / rank, False

    def forward(self, x):
        y = self.linear(x)
        return y if self.merged else y + self.scale * (x @ self.A.T @ self.B.T)

    @torch.no_grad()
    def merge(self):
        if not self.merged:
            self.kept = self.linear.weight.clone()
            self.linear.weight += self.scale * self.B @ self.A
            self.merged = True

    @torch.no_grad()
    def unmerge(self):
        if self.merged:
            self.linear.weight.copy_(self.kept)
            self.merged = False


class _TwoLinears(nn.Module):
    """PEFT's way: A and B are linear layers of their own."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.base_layer, self.scaling = linear, alpha / rank
        for parameter in linear.parameters():
            parameter.requires_grad = False
        self.lora_A = nn.Linear(linear.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, linear.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.merged_layer = None

    def forward(self, x):
        if self.merged_layer is not None:
            return self.merged_layer(x)
        return self.base_layer(x) + self.scaling * self.lora_B(self.lora_A(x))

    def merge(self):
        if self.merged_layer is not None:
            raise RuntimeError("merged already")
        merged = copy.deepcopy(self.base_layer)
        merged.weight.data += self.scaling * (self.lora_B.weight @ self.lora_A.weight).detach()
        self.merged_layer = merged

    def unmerge(self):
        self.merged_layer = None


class _Cast(_Plain):
    """The factors in the dtype of what comes."""

    def forward(self, x):
        if self.merged:
            return self.linear(x)
        A, B = (factor.to(x.dtype) for factor in (self.A, self.B))
        return self.linear(x) + F.linear(F.linear(x, A), self.scale * B)


class _FullPrecision(_Plain):
    """Factors in fp32 beside weights of any precision; what they give is rounded last."""

    def forward(self, x):
        if self.merged:
            return self.linear(x)
        low = x.float() @ self.A.T @ self.B.T
        return self.linear(x) + (self.scale * low).to(x.dtype)

    def unmerge(self):
        assert self.merged, "nothing is merged"
        super().unmerge()


class _Mirrored(nn.Module):
    """The factors the other way round, A·Bᵀ with the zero one first; W + Δ is made to merge."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.frozen = linear.requires_grad_(False)
        self.first = nn.Parameter(torch.zeros(linear.in_features, rank))
        self.second = nn.Parameter(torch.rand(rank, linear.out_features) - 0.5)
        self.factor, self.ready = alpha / rank, None

    def forward(self, x):
        if self.ready is not None:
            return F.linear(x, self.ready, self.frozen.bias)
        return self.frozen(x) + (x @ self.first) @ (self.factor * self.second)

    def merge(self):
        with torch.no_grad():
            self.ready = self.frozen.weight + self.factor * (self.first @ self.second).T

    def unmerge(self):
        self.ready = None


class _Buffers(nn.Module):
    """W and the bias are buffers, and F.linear takes the merged weight or adds the two products."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.register_buffer("weight", linear.weight.detach().clone())
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach().clone())
        self.low = nn.ParameterList([torch.randn(rank, linear.in_features) / 8])
        self.low.append(torch.zeros(linear.out_features, rank))
        self.alpha, self.delta = alpha, None

    def _update(self):
        A, B = self.low
        return (self.alpha / len(A)) * (B @ A)

    def forward(self, x):
        if self.delta is not None:
            return F.linear(x, self.delta, self.bias)
        A, B = self.low
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, A), B) * (
            self.alpha / len(A)
        )

    def merge(self):
        if self.delta is not None:
            raise ValueError("it is merged already")
        self.delta = (self.weight + self._update()).detach()

    def unmerge(self):
        self.delta = None


class _OneProduct(_Plain):
    """[W, B] times x above A·x: one product, as wide as both."""

    def forward(self, x):
        if self.merged:
            return self.linear(x)
        both = torch.cat([x, self.scale * (x @ self.A.T)], -1)
        return F.linear(both, torch.cat([self.linear.weight, self.B], 1), self.linear.bias)


class _MergesLater(_Plain):
    """What merge() asks for is done by the next forward."""

    wanted = False

    def forward(self, x):
        if self.wanted:
            super().merge()
        return super().forward(x)

    def merge(self):
        self.wanted = True

    def unmerge(self):
        self.wanted = False
        super().unmerge()


def _in_an_array(linears, rank, itemsize):
    trained = sum(rank * sum(each.weight.shape) for each in linears)
    frozen = sum(p.numel() for each in linears for p in each.parameters())
    return np.array([trained, itemsize * frozen + 16 * trained])


def _tensors(linears, rank, itemsize):
    """0-d tensors."""
    sizes = torch.tensor([[each.in_features, each.out_features] for each in linears])
    trained = rank * sizes.sum()
    biases = sum(each.out_features for each in linears if each.bias is not None)
    return trained, itemsize * (sizes.prod(1).sum() + biases) + 16 * trained


def _loop(linears, rank, itemsize):
    trained = frozen = 0
    for layer in linears:
        d, k = layer.weight.shape
        trained += rank * d + rank * k
        frozen += d * k + (d if layer.bias is not None else 0)
    return trained, frozen * itemsize + trained * (4 + 4 + 8)


def _numpy(linears, rank, itemsize):
    shapes = np.array([layer.weight.shape for layer in linears])
    trained = rank * shapes.sum()
    frozen = sum(p.numel() for layer in linears for p in layer.parameters())
    return [np.int64(trained), np.int64(itemsize * frozen + 16 * trained)]


def _built(linears, rank, itemsize):
    adapters = [
        (torch.empty(rank, layer.in_features), torch.empty(layer.out_features, rank))
        for layer in linears
    ]
    trained = sum(each.numel() for pair in adapters for each in pair)
    frozen = sum(p.numel() for layer in linears for p in layer.parameters())
    return float(trained), float(itemsize * frozen + 16 * trained)


_LAYERS = {
    "a flag and a copy": _Plain,
    "two linear layers": _TwoLinears,
    "the sum written out, mirrored": _Mirrored,
    "buffers": _Buffers,
    "cast to the dtype of x": _Cast,
    "factors in fp32": _FullPrecision,
    "one product for both": _OneProduct,
}
RIGHT = {
    "lora/adapter": _LAYERS,
    "lora/held": {
        "a loop": _loop,
        "NumPy, in a list": _numpy,
        "floats, of tensors": _built,
        "0-d tensors": _tensors,
        "an array": _in_an_array,
        "a tensor": lambda *args: torch.stack(_tensors(*args)),
        "values of a dict": lambda *args: dict(
            zip(("trained", "bytes"), _tensors(*args), strict=True)
        ).values(),
    },
    "lora/bug-hunt": _LAYERS | {"merges later": _MergesLater},
}
