"""The backward pass in two: B, the gradient of the input, now; W, those of the weights, later."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

Owed = list[Callable[[], None]]


class Later(TorchFunctionMode):
    """Inside, the backward pass of every F.linear computes the gradient of its input and adds to
    `owed` a function that computes that of its weight, which `pay` calls.

    Only products of matrices wait: biases, norms and embeddings have their gradients at once.

    Cost: from B to W the input of each linear layer and the gradient of its output are kept.
    Invariant: B and W together compute what the backward pass does, nothing twice.
    Source: Qi et al. 2023, arXiv:2401.10241; the WeightGradStore of its code and of DualPipe's.
    """

    def __init__(self, owed: Owed) -> None:
        super().__init__()
        self.owed = owed

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is F.linear:
            return _linear(self.owed, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def pay(owed: Owed) -> None:
    """W: the gradients of the weights, each adding to what is there; what was kept goes."""
    while owed:
        owed.pop()()


def _linear(owed: Owed, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wanted = weight.new_empty(0, requires_grad=weight.requires_grad)
    y = _Linear.apply(x, wanted, (weight, owed))
    return y if bias is None else y + bias


class _Linear(torch.autograd.Function):
    """x·Wᵀ, whose weight B does not reach, nor the hooks on it: an empty tensor is in its place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: Tensor, later: tuple[Tensor, Owed]) -> Tensor:
        weight, ctx.owed = later
        ctx.weight = weight  # itself: hooks on saved tensors return another one
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            parameter = ctx.weight

            def w() -> None:
                parameter.backward(dy.flatten(0, -2).mT @ x.flatten(0, -2))

            ctx.owed.append(w)
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None
