"""The backward pass in two: B, the gradient of the input, now; W, those of the weights, later."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

# Weights, and a function that computes the gradient of each.
Owed = list[tuple[Tensor, Callable[[], Tensor]]]


class Later(TorchFunctionMode):
    """Inside, the backward pass of every F.linear computes the gradient of its input and adds its
    weight to `owed`, with a function that computes the weight's gradient, for `pay`.

    Only products of matrices wait: biases, norms and embeddings have their gradients at once. B is
    to be inside, too, where a checkpoint computes products again.

    Cost: from B to W the input of each linear layer and the gradient of its output are kept.
    Invariant: B and W together compute what the backward pass does, nothing twice.
    Source: Qi et al. 2023, arXiv:2401.10241; the WeightGradStore of its code and of DualPipe's.
    """

    def __init__(self, owed: Owed) -> None:
        super().__init__()
        self.owed = owed
        self.anchor = torch.empty(0, requires_grad=True)  # in the place of weights

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        wanted = self.anchor if weight.requires_grad else None
        # Before the product, so that what is computed again can end without it.
        kept = _Keep.apply(self.anchor, x, weight).grad_fn
        y = _Product.apply(x, wanted, (weight, self.owed, kept))
        return y if bias is None else y + bias


def pay(owed: Owed) -> None:
    """W: the gradients of the weights, each adding to what is there, in the order in which they are
    owed and in one backward pass; what was kept goes."""
    due = [_Due.apply(weight, compute) for weight, compute in reversed(owed)]  # the last one first
    owed.clear()
    if due:
        torch.autograd.backward(due, [torch.empty_like(each) for each in due])


class _Due(torch.autograd.Function):
    """Nothing, whose backward pass gives a weight its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        ctx.compute = compute
        return weight.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        compute, ctx.compute = ctx.compute, None  # lets go of what was kept for it
        return compute(), None


class _Keep(torch.autograd.Function):
    """A node that is never run: it has what a product needs for its backward pass."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return anchor.new_empty(0)


class _Product(torch.autograd.Function):
    """x·Wᵀ, whose weight B does not reach, nor the hooks on it: the anchor is in its place."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, wanted: Tensor | None, later: tuple[Tensor, Owed, Any]
    ) -> Tensor:
        weight, ctx.owed, ctx.kept = later
        ctx.weight = weight  # itself: hooks on saved tensors return another one
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None]:
        x, weight = ctx.kept.saved_tensors
        ctx.kept = None
        if ctx.needs_input_grad[1]:
            ctx.owed.append((ctx.weight, lambda: dy.flatten(0, -2).mT @ x.flatten(0, -2)))
        return dy @ weight if ctx.needs_input_grad[0] else None, None, None
