"""Layers whose backward pass waits, as a CPU waits for its GPU, so that a few cores can send."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def waiting_chain(layers: Sequence[tuple[int, float]]) -> nn.Sequential:
    """A chain that computes nothing, and whose backward pass takes its time.

    layers: (bytes of gradients, seconds of the backward pass) of each, in forward order, as
    `backward_timeline` takes them; gradients are fp32 ones

    >>> chain = waiting_chain([(8, 0.0), (4, 0.0)])
    >>> chain(torch.ones(1)).backward()
    >>> [layer.weight.grad.tolist() for layer in chain]
    [[1.0, 1.0], [1.0]]
    """
    return nn.Sequential(*(_Waiting(nbytes // 4, seconds) for nbytes, seconds in layers))


class _Waiting(nn.Module):
    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Wait.apply(x, self.weight, self.seconds)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.shape = weight.shape
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, torch.ones(ctx.shape), None
