"""Gradient accumulation: a batch that does not fit, taken one micro-batch at a time, with the gradient of the whole.

The whole trick is one fraction. The loss of a batch is a mean over its tokens, so the loss of a micro-batch enters with its share of the tokens,
weight / total. Leave the fraction out and the gradient is too large by the number of micro-batches; use 1/k for all and a micro-batch with few
tokens counts as much as one with many.
"""

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from labutils import units
from labutils.config import Mesh, TrainConfig
from labutils.ledger import Ledger, Line

IGNORED = -100  # the target that cross-entropy leaves out


def micro_batches(batch: Any, size: int) -> list[Any]:
    """The batch in pieces of `size` rows, as views: a tensor, or any nest of tensors with equally many rows. The last piece may be short.

    >>> [x.tolist() for x, y in micro_batches((torch.arange(5), torch.ones(5, 2)), 2)]
    [[0, 1], [2, 3], [4]]

    Invariant: the pieces put together are the batch; no row is left out, also where `size` does not divide their number.
    """
    units.whole(size, "size", 1)
    rows = _rows(batch)

    def piece(start: int) -> Any:
        return tree_map(lambda tensor: tensor[start : start + size], batch)

    return [piece(start) for start in range(0, rows, size)]


def tokens(batch: Any) -> int:
    """Targets that count towards the loss of a batch (inputs, targets): those that are not −100.

    >>> tokens((None, torch.tensor([[5, 7, -100], [-100, -100, 2]])))
    3
    """
    *_, targets = batch
    return int((targets != IGNORED).sum())


def accumulate(
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    *,
    weigh: Callable[[Any], int] | None = None,
    total: int | None = None,
) -> Tensor:
    """The loss of all `batches` together, whose gradient has been added to `.grad`: forward and backward, one micro-batch at a time.

    `loss(batch)` is a mean over `weigh(batch)` things: rows, unless `weigh` says otherwise (`tokens`, for a language model). `total` is the number of
    things in the whole batch, where other ranks hold some of it.

    >>> x, w = torch.arange(6.0), torch.ones((), requires_grad=True)
    >>> accumulate(lambda x: (w * x).mean(), micro_batches(x, 4)), w.grad
    (tensor(2.5000), tensor(2.5000))

    Invariant: equal to one pass over the whole batch up to rounding, for losses that are a mean over things and layers that treat each row on its own.
    Cost: the activations of one micro-batch at a time; the gradients stay from the first micro-batch to the step.
    """
    batches = list(batches)
    if not batches:
        raise ValueError(
            "there is no micro-batch to accumulate: the data ended, or the batch is empty"
        )
    weights = [
        units.whole((weigh or _rows)(batch), "the weight of a micro-batch") for batch in batches
    ]
    if total is None:
        total = sum(weights)
    if units.whole(total, "total") < sum(weights):
        raise ValueError(
            f"total={total} is less than the {sum(weights)} that these micro-batches hold: add up all ranks"
        )
    if not total:
        raise ValueError("nothing in this batch counts towards the loss: every target is left out")
    whole: Tensor | None = None
    for batch, weight in zip(batches, weights, strict=True):
        if weight == 0:
            continue  # a mean over nothing is 0/0, and one NaN would spoil the sum
        part = loss(batch)
        if part.dim():
            raise ValueError(
                f"loss(batch) must be one number, the mean over the micro-batch, got shape {list(part.shape)}: reduce it first"
            )
        part = part * (weight / total)
        part.backward()
        whole = part.detach() if whole is None else whole + part.detach()
    return whole if whole is not None else torch.zeros(())


@dataclass(frozen=True)
class Taken:
    """What one optimizer step saw: the loss of the whole batch and the norm of its gradient before clipping (None where nothing was clipped)."""

    loss: float
    norm: float | None


def step(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    *,
    weigh: Callable[[Any], int] | None = None,
    max_norm: float | None = None,
) -> Taken:
    """One optimizer step on all `batches` together: gradients cleared, accumulated, clipped once to `max_norm`, applied.

    Clipping comes after the last micro-batch: a norm is not linear, so clipping every piece gives another gradient.
    """
    optimizer.zero_grad()
    value = accumulate(loss, batches, weigh=weigh)
    norm = None
    if max_norm is not None:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        norm = float(nn.utils.clip_grad_norm_(parameters, units.positive(max_norm, "max_norm")))
    optimizer.step()
    return Taken(float(value), norm)


class GradientBuffer(AbstractContextManager):
    """Sums of gradients kept in `dtype` beside low-precision parameters: inside `with`, every gradient moves here as soon as it is complete.

    >>> w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    >>> with GradientBuffer([w]) as buffer:
    ...     for slope in (256.0, 1.0, 1.0): (w * slope).sum().backward()
    >>> buffer[w], buffer.ledger.total
    (tensor([258.]), 4)

    Cost: one number of `dtype` for every parameter, from the first micro-batch to the step: 4Ψ bytes in fp32.
    Source: the Ultra-Scale Playbook's fp32 gradient accumulation; Megatron-LM's main_grad.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype = torch.float32
    ) -> None:
        if not dtype.is_floating_point:
            raise ValueError(
                f"gradients are summed in a floating-point format, got {dtype}: use torch.float32"
            )
        self.dtype = dtype
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        if not self.parameters:
            raise ValueError("no parameter here needs a gradient: give the trainable ones")
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.hooks: list[Any] = []

    def __enter__(self) -> "GradientBuffer":
        if any(parameter.grad is not None for parameter in self.parameters):
            raise ValueError(
                "a parameter already holds a gradient, which would be added to the sum: call zero_grad() first"
            )
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._take)
            for parameter in self.parameters
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _take(self, parameter: Tensor) -> None:
        if parameter not in self.sums:
            self.sums[parameter] = torch.zeros_like(parameter, dtype=self.dtype)
        self.sums[parameter] += parameter.grad
        parameter.grad = None

    def __getitem__(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self.sums:
            raise KeyError(
                "no gradient of this parameter has arrived: run a backward pass inside `with`"
            )
        return self.sums[parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.sums)

    @property
    def ledger(self) -> Ledger:
        """Bytes that the sums hold."""
        amounts = [total.untyped_storage().nbytes() for total in self.sums.values()]
        return Ledger(
            [Line("gradient buffer", sum(amounts), component="gradients", count=len(amounts))]
        )


def tokens_per_step(micro_batch: int, accumulation: int, dp: int, seq_len: int) -> int:
    """Tokens that one optimizer step learns from, over all ranks.

    micro_batch: sequences in a micro-batch
    accumulation: micro-batches of a rank
    dp: ranks
    seq_len: tokens in a sequence

    >>> tokens_per_step(micro_batch=2, accumulation=4, dp=128, seq_len=4096)
    4194304
    """
    return micro_batch * accumulation * dp * seq_len


@dataclass(frozen=True)
class Choice:
    """One decision of a training configuration and why it was made."""

    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class Recipe:
    """A training configuration with the reasons for it, in the order in which they were found."""

    choices: tuple[Choice, ...]
    train: TrainConfig
    mesh: Mesh

    def __str__(self) -> str:
        first, second = (
            max(len(getattr(choice, field)) for choice in self.choices)
            for field in ("what", "value")
        )
        return "\n".join(
            f"{choice.what:<{first}}  {choice.value:>{second}}  {choice.reason}"
            for choice in self.choices
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        def row(choice: Choice) -> str:
            cells = ((choice.what, "left"), (choice.value, "right"), (choice.reason, "left"))
            return "".join(
                f'<td style="text-align:{side};padding:2px 12px">{html.escape(cell)}</td>'
                for cell, side in cells
            )

        rows = "".join(f"<tr>{row(choice)}</tr>" for choice in self.choices)
        return f'<table class="recipe"><tbody>{rows}</tbody></table>'


def configure(
    *,
    target: int,
    seq_len: int,
    gpus: int,
    fits: Callable[[int], bool],
    gpus_per_copy: int = 1,
    settings: dict[str, Any] | None = None,
) -> Recipe:
    """A configuration for a batch of about `target` tokens on `gpus` devices, found step by step.

    `fits(micro_batch)` says whether that many sequences fit on one device beside everything else: a memory prediction, or a try.
    `settings` go into the TrainConfig as they are.

    >>> recipe = configure(target=4_194_304, seq_len=4096, gpus=128, fits=lambda b: b <= 2)
    >>> recipe.train.micro_batch, recipe.train.global_batch, recipe.train.accumulation(recipe.mesh.dp)
    (2, 1024, 4)

    Source: the order of decisions of the Ultra-Scale Playbook: tokens in a batch, sequence length, micro-batch, GPUs, accumulation.
    """
    for value, name in (
        (target, "target"),
        (seq_len, "seq_len"),
        (gpus, "gpus"),
        (gpus_per_copy, "gpus_per_copy"),
    ):
        units.whole(value, name, 1)
    if gpus % gpus_per_copy:
        raise ValueError(
            f"gpus_per_copy={gpus_per_copy} does not divide gpus={gpus}: some devices would hold no whole copy of the model"
        )
    copies = gpus // gpus_per_copy
    # Each copy takes equally many sequences, so the batch is rounded to a multiple of the copies.
    share = round(target / seq_len / copies)
    if share < 1:
        raise ValueError(
            f"{target:,} tokens are {target // seq_len:,} sequences of {seq_len:,}, fewer than {copies} copies of the model: "
            "use fewer GPUs, shorter sequences, or put several GPUs on one copy (tensor or context parallelism)"
        )
    if not fits(1):
        raise ValueError(
            f"not even one sequence of {seq_len:,} tokens fits on a device: checkpoint activations, shard the states, or shorten the sequence"
        )
    largest = max(size for size in _divisors(share) if size == 1 or fits(size))
    batch, steps = share * copies, share // largest
    asked = (
        "what you asked for"
        if batch * seq_len == target
        else f"the closest to {target:,} that {copies:,} copies can share"
    )
    each = "one for each copy" if gpus_per_copy == 1 else f"{gpus_per_copy} for each copy"
    found = (
        "a copy's whole share fits at once"
        if largest == share
        else f"the largest divisor of {share} that fits"
    )
    choices = (
        Choice("tokens in a batch", f"{batch * seq_len:,}", asked),
        Choice("sequence length", f"{seq_len:,}", "what the model is to learn to read"),
        Choice("global batch", f"{batch:,}", f"{batch * seq_len:,} / {seq_len:,} sequences"),
        Choice(
            "copies of the model", f"{copies:,}", f"{gpus:,} GPUs, {each}: {share} sequences a copy"
        ),
        Choice("micro-batch", f"{largest:,}", found),
        Choice("accumulation steps", f"{steps:,}", f"{batch:,} / ({largest} · {copies:,})"),
    )
    return Recipe(
        choices,
        TrainConfig(micro_batch=largest, global_batch=batch, **(settings or {})),
        Mesh(dp=copies, tp=gpus_per_copy),
    )


def _divisors(n: int) -> list[int]:
    return [size for size in range(1, n + 1) if n % size == 0]


def _rows(batch: Any) -> int:
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not tensors or any(tensor.dim() == 0 for tensor in tensors):
        raise TypeError(
            f"a batch is a tensor with rows, or a nest of such tensors, got {type(batch).__name__} without any"
        )
    rows = {len(tensor) for tensor in tensors}
    if len(rows) > 1:
        raise ValueError(
            f"the tensors of this batch have {', '.join(map(str, sorted(rows)))} rows: they must have equally many"
        )
    if rows == {0}:
        raise ValueError("the batch is empty: it has 0 rows")
    return rows.pop()
