"""Gradient accumulation: the gradient of a batch that does not fit, one micro-batch at a time.

The whole trick is one fraction. The loss of a batch is a mean over its tokens, so the loss of a
micro-batch enters with its share of the tokens, weight / total. Leave the fraction out and the
gradient is too large by the number of micro-batches; use 1/k for all and a micro-batch with few
tokens counts as much as one with many.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from labutils import gradients, units
from labutils.model import IGNORED


def micro_batches(batch: Any, size: int) -> list[Any]:
    """The batch in pieces of `size` rows, as views; the last piece may be short.

    A batch is a tensor, or any nest of tensors with equally many rows.

    >>> [x.tolist() for x, y in micro_batches((torch.arange(5), torch.ones(5, 2)), 2)]
    [[0, 1], [2, 3], [4]]

    Invariant: the pieces put together are the batch; no row is left out, also where `size` does not
    divide their number.
    """

    def piece(start: int) -> Any:
        return tree_map(lambda tensor: tensor[start : start + size], batch)

    size = units.whole(size, "size", 1)
    return [piece(start) for start in range(0, _rows(batch), size)]


def tokens(batch: Any) -> int:
    """Targets that count towards the loss of a batch (inputs, targets): those that are not −100.

    >>> tokens((None, torch.tensor([[5, 7, -100], [-100, -100, 2]])))
    3
    """
    targets = batch[-1] if isinstance(batch, list | tuple) and batch else batch
    units.instance(targets, Tensor, "a batch's last part")
    return int((targets != IGNORED).sum())


def accumulate(
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    *,
    weigh: Callable[[Any], int] | None = None,
    total: int | None = None,
) -> Tensor:
    """The loss of all `batches` together, whose gradient has been added to `.grad`.

    loss: of a micro-batch, the mean over `weigh(batch)` things
    weigh: how many these are: rows, unless told otherwise (`tokens`, for a language model)
    total: how many there are in the whole batch, where other ranks hold some of it

    >>> x, w = torch.arange(6.0), torch.ones((), requires_grad=True)
    >>> accumulate(lambda x: (w * x).mean(), micro_batches(x, 4)), w.grad
    (tensor(2.5000), tensor(2.5000))

    Invariant: equal to one pass over the whole batch up to rounding, for losses that are a mean
    over things and layers that treat each row on its own.
    Cost: the activations of one micro-batch at a time; the gradients stay from the first
    micro-batch to the step.
    Raises ValueError where nothing counts, or more than `total` says, and TypeError of a loss that
    is no tensor.
    """
    batches = _all(batches, loss)
    weights = [(weigh or _rows)(batch) for batch in batches]
    if total is None:
        total = sum(weights)
    if not total or total < sum(weights):
        raise ValueError(f"these micro-batches hold {sum(weights)} of {total} things that count")
    whole: Tensor | None = None
    for batch, weight in zip(batches, weights, strict=True):
        if weight == 0:
            continue  # a mean over nothing is 0/0, and one NaN would spoil the sum
        units.instance(part := loss(batch), Tensor, "the sum of losses")
        part = part * (weight / total)
        part.backward()
        whole = part.detach() if whole is None else whole + part.detach()
    return whole if whole is not None else torch.zeros(())


def _all(batches: Iterable[Any], loss: Callable[[Any], Tensor]) -> list[Any]:
    if not callable(loss):
        raise TypeError(f"accumulate takes a loss of a batch, got {loss!r:.60}: give a function")
    units.instance(batches, Iterable, "accumulate")
    return list(batches)


def step(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    *,
    weigh: Callable[[Any], int] | None = None,
    max_norm: float | None = None,
) -> Tensor:
    """The loss of all `batches` together, after one optimizer step on them; loss and weigh as in
    `accumulate`.

    Gradients are cleared, accumulated, clipped once to `max_norm`, applied. Clipping comes after
    the last micro-batch: a norm is not linear, so clipping every piece gives another gradient.
    """
    units.optimizer(optimizer, "step")
    optimizer.zero_grad()
    value = accumulate(loss, batches, weigh=weigh)
    if max_norm is not None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, units.positive(max_norm, "max_norm"))
    optimizer.step()
    return value


def epoch(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], Tensor],
    batches: Iterable[Any],
    k: int,
    max_norm: float,
) -> int:
    """Optimizer steps taken on all `batches`, `k` micro-batches of equal weight to a step.

    The last step may have fewer. The gradient of each step of the optimizer is clipped to
    `max_norm`. `loss` is that of `accumulate`.
    """
    units.optimizer(optimizer, "epoch")
    batches, k = _all(batches, loss), units.whole(k, "k", 1)
    groups = [batches[start : start + k] for start in range(0, len(batches), k)]
    for group in groups:
        step(optimizer, loss, group, max_norm=max_norm)
    optimizer.zero_grad()
    return len(groups)


@contextmanager
def gradient_buffer(parameters: Iterable[nn.Parameter]) -> Iterator[dict[nn.Parameter, Tensor]]:
    """Megatron-LM's main_grad: sums of gradients in fp32 beside low-precision parameters.

    Inside `with`, every gradient moves here as soon as it is complete.

    >>> w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> with gradient_buffer([w]) as buffer:
    ...     for slope in (256.0, 1.0, 1.0): (w * slope).sum().backward()
    >>> buffer[w]
    tensor([258.])

    Cost: 4Ψ bytes, from the first micro-batch to the step.
    Raises ValueError where a parameter holds a gradient already.
    Source: the Ultra-Scale Playbook's fp32 gradient accumulation.
    """
    units.instance(parameters, Iterable, "gradient_buffer")
    parameters = list(parameters)
    for parameter in parameters:
        units.instance(parameter, nn.Parameter, "gradient_buffer")
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if any(parameter.grad is not None for parameter in trained):
        raise ValueError("a parameter already holds a gradient: call zero_grad() first")
    sums = _Sums()

    def take(parameter: nn.Parameter) -> None:
        if parameter not in sums:
            sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        assert parameter.grad is not None  # the hook says that it is there
        sums[parameter] += parameter.grad
        parameter.grad = None

    with ExitStack() as hooks:
        for parameter in trained:
            hooks.callback(parameter.register_post_accumulate_grad_hook(take).remove)
            gradients.kept_by(sums, parameter)
        try:
            yield sums
        finally:
            sums.taking = False


class _Sums(dict):
    """The sum of the gradients of each parameter."""

    taking = True  # new gradients, out of `.grad`

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        return self.get(parameter) if self.taking else parameter.grad


def tokens_per_step(micro_batch: int, accumulation: int, dp: int, seq_len: int) -> int:
    """Tokens that one optimizer step learns from, over all `dp` ranks.

    micro_batch: sequences in a micro-batch of seq_len tokens
    accumulation: micro-batches of a rank

    >>> tokens_per_step(micro_batch=2, accumulation=4, dp=128, seq_len=4096)
    4194304
    >>> b, m, N_d, s = 2, 4, 128, 4096
    >>> tokens_per_step(b, m, N_d, s) == b * m * N_d * s  # tokens of a step
    True
    """
    sizes = dict(micro_batch=micro_batch, accumulation=accumulation, dp=dp, seq_len=seq_len)
    return math.prod(units.wholes(1, **sizes))


def _rows(batch: Any) -> int:
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if any(not leaf.dim() for leaf in leaves):
        raise ValueError("a batch has a tensor of shape (), which has no rows: unsqueeze(0) it")
    rows = {len(leaf) for leaf in leaves}
    if not rows:
        raise ValueError(f"a batch has tensors, got {batch!r:.60}: torch.tensor(…) is one")
    if len(rows) != 1:
        raise ValueError(f"the tensors of a batch have equally many rows, got {sorted(rows)}")
    return rows.pop()
