"""Right answers to the exercises of `accumulation`, written differently from the reference."""

import fractions
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from labutils import accumulation


def _seeded(loss: Callable, batches: Sequence[Any], weigh: Callable) -> float:
    """The share goes into backward, not onto the loss; a Python number comes back."""
    total, whole = sum(map(weigh, batches)), 0.0
    for batch in batches:
        if weigh(batch):
            value = loss(batch)
            value.backward(gradient=torch.full_like(value, weigh(batch) / total))
            whole += value.item() * weigh(batch) / total
    return whole


def _shares_in_fp32(loss: Callable, batches: Sequence[Any], weigh: Callable) -> Tensor:
    """Shares as torch.tensor makes them of fractions."""
    counts = torch.tensor([weigh(batch) for batch in batches])
    whole = torch.zeros(())
    for batch, share in zip(batches, counts / counts.sum(), strict=True):
        if share:
            part = loss(batch) * share
            part.backward()
            whole = whole + part.detach()
    return whole


def _no_empty_ones(loss: Callable, batches: Sequence[Any], weigh: Callable) -> np.float64:
    batches = [batch for batch in batches if weigh(batch) > 0]
    counts = np.array([weigh(batch) for batch in batches])
    values = []
    for batch, share in zip(batches, counts / counts.sum(), strict=True):
        part = loss(batch) * float(share)
        part.backward()
        values.append(part.item())
    return np.float64(sum(values))


def _grown(loss: Callable, batches: Sequence[Any], weigh: Callable) -> Tensor:
    """A 1-element tensor, filled on the way."""
    shares = [weigh(batch) / sum(weigh(each) for each in batches) for batch in batches]
    whole = torch.zeros(1, dtype=torch.float64)
    for batch, share in zip(batches, shares, strict=True):
        if share:
            part = share * loss(batch)
            part.backward()
            with torch.no_grad():
                whole += part
    return whole


def _sliced(optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float) -> int:
    batches, steps = iter(batches), 0
    while group := list(itertools.islice(batches, k)):
        optimizer.zero_grad()
        for batch in group:
            (loss(batch) / len(group)).backward()
        nn.utils.clip_grad_norm_(
            [p for part in optimizer.param_groups for p in part["params"]], most
        )
        optimizer.step()
        steps += 1
    optimizer.zero_grad()
    return steps


def _rescaled(
    optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float
) -> np.int64:
    """Sums first; divides the gradients once, before the step."""
    weights = [p for part in optimizer.param_groups for p in part["params"]]
    steps = waiting = 0

    def finish() -> None:
        nonlocal steps, waiting
        for p in weights:
            p.grad /= waiting
        nn.utils.clip_grad_norm_(weights, most)
        optimizer.step()
        optimizer.zero_grad()
        steps, waiting = steps + 1, 0

    for batch in batches:
        loss(batch).backward()
        waiting += 1
        if waiting == k:
            finish()
    if waiting:
        finish()
    return np.int64(steps)


def _through_step(
    optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float
) -> Tensor:
    """`accumulation.step` does the work; a 0-d tensor comes back."""
    batches = list(batches)
    groups = [batches[i : i + k] for i in range(0, len(batches), k)]
    for group in groups:
        accumulation.step(optimizer, loss, group, max_norm=most)
    for part in optimizer.param_groups:
        for p in part["params"]:
            p.grad = None
    return torch.tensor(len(groups))


def _clipped_by_hand(
    optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float
) -> int:
    """min(1, max_norm/norm), without the 1e-6 that torch adds."""
    weights, steps, batches = optimizer.param_groups, 0, iter(batches)
    while group := list(itertools.islice(batches, k)):
        for batch in group:
            loss(batch).div(len(group)).backward()
        grads = [p.grad for part in weights for p in part["params"]]
        norm = float(sum(grad.square().sum() for grad in grads)) ** 0.5
        factor = min(1.0, most / norm)
        for grad in grads:
            grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def _sum_clipped(
    optimizer: Any, loss: Callable, batches: Iterable[Any], k: int, most: float
) -> int:
    """The sum is clipped to n · max_norm, then divided by n."""
    weights, steps, batches = (
        [p for part in optimizer.param_groups for p in part["params"]],
        0,
        list(batches),
    )
    for start in range(0, len(batches), k):
        group = batches[start : start + k]
        for batch in group:
            loss(batch).backward()
        nn.utils.clip_grad_norm_(weights, most * len(group))
        for p in weights:
            p.grad /= len(group)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps


def _dropped(target: int, seq_len: int, gpus: int, fits: Callable) -> list[int]:
    share = target // seq_len // gpus
    sizes = [share // steps for steps in range(1, share + 1) if share % steps == 0]
    while not fits(sizes[0]):
        sizes.pop(0)
    return [sizes[0], share // sizes[0]]


def _yielded(target: int, seq_len: int, gpus: int, fits: Callable) -> Iterator[Tensor]:
    share = torch.tensor(target // seq_len // gpus)
    steps = next(s for s in range(1, int(share) + 1) if share % s == 0 and fits(int(share) // s))
    yield share // steps
    yield torch.tensor(steps)


def _empty_ones_too(loss, batches, weigh):
    """Runs what has no token as well, and takes its 0/0 for 0."""
    total, whole = sum(map(weigh, batches)), 0.0
    for batch in batches:
        part = (loss(batch) * weigh(batch) / total).nan_to_num(0.0)
        part.backward()
        whole = whole + part.detach()
    return whole


def _by_autograd(loss, batches, weigh):
    """The share as the seed of autograd.backward; what has no token is never run."""
    shares = torch.tensor([float(weigh(batch)) for batch in batches], dtype=torch.float64)
    shares /= shares.sum()
    whole = torch.zeros((), dtype=torch.float64)
    for batch, share in zip(batches, shares, strict=True):
        if share > 0:
            value = loss(batch)
            torch.autograd.backward(value, share.to(value))
            whole += share * value.detach()
    return whole


def _nan_left_out(loss, batches, weigh):
    """Knows an empty micro-batch by its loss; keeps losses, whose graphs are freed."""
    total, parts = sum(map(weigh, batches)), []
    for batch in batches:
        part = loss(batch) * weigh(batch) / total
        if not part.isnan():
            part.backward()
            parts.append(part)
    return sum(parts).detach()


def _cleared_before(optimizer, loss, batches, k, most):
    """Clears at the start of a step alone, that of the epoch too."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    batches, steps = list(batches), 0
    for i, batch in enumerate(batches):
        if i % k == 0:
            optimizer.zero_grad()
            here = min(k, len(batches) - i)
        (loss(batch) / here).backward()
        if i % k == here - 1:
            nn.utils.clip_grad_norm_(weights, most)
            optimizer.step()
            steps += 1
    return steps


def _stretched_then_clipped(optimizer, loss, batches, k, most):
    """Divided by k throughout; a short step is stretched before it is clipped."""
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    batches, steps = iter(batches), 0
    while group := list(itertools.islice(batches, k)):
        for batch in group:
            (loss(batch) / k).backward()
        for p in weights:
            p.grad *= k / len(group)
        nn.utils.clip_grad_norm_(weights, most)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        steps += 1
    return steps


def _downwards(target, seq_len, gpus, fits):
    """From the share down, as one tensor of two numbers."""
    size = share = target // (seq_len * gpus)
    while not (fits(size) and share % size == 0):
        size -= 1
    return torch.tensor([size, share // size])


def _steps_first(target, seq_len, gpus, fits):
    """Counts accumulation steps up."""
    share = target // seq_len // gpus
    return next(
        (share // steps, steps)
        for steps in range(1, share + 1)
        if share % steps == 0 and fits(share // steps)
    )


def _in_fp32(loss, batches, weigh):
    total, whole = sum(map(weigh, batches)), 0.0
    for batch in batches:
        if weigh(batch):
            part = loss(batch) * (weigh(batch) / total)
            part.backward()
            whole += part.item()
    return torch.tensor(whole)


def _in_an_array(loss, batches, weigh):
    """The losses add up in an array without dims."""
    counts = [weigh(batch) for batch in batches]
    value = np.zeros(())
    for batch, count in zip(batches, counts, strict=True):
        if count:
            part = loss(batch) * (count / sum(counts))
            part.backward()
            value += part.detach().numpy()
    return value


def _in_numpys_fp32(loss, batches, weigh):
    return np.float32(_in_an_array(loss, batches, weigh))


def _fractions(loss, batches, weigh):
    """Shares and the loss as fractions."""
    total, value = sum(map(weigh, batches)), fractions.Fraction(0)
    for batch in filter(weigh, batches):
        share, part = fractions.Fraction(weigh(batch), total), loss(batch)
        (part * float(share)).backward()
        value += share * fractions.Fraction(part.item())
    return value


def _gradients_by_hand(optimizer, loss, batches, k, max_norm):
    """autograd.grad, and .grad is written once a step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    batches, steps = iter(batches), 0
    while group := list(itertools.islice(batches, k)):
        sums = [torch.zeros_like(p) for p in parameters]
        for batch in group:
            for total, gradient in zip(
                sums, torch.autograd.grad(loss(batch), parameters), strict=True
            ):
                total += gradient / len(group)
        factor = min(1.0, max_norm / float(torch.cat([x.flatten() for x in sums]).norm()))
        for parameter, gradient in zip(parameters, sums, strict=True):
            parameter.grad = gradient * factor
        optimizer.step()
        steps += 1
    optimizer.zero_grad()
    return steps


RIGHT = {
    "accumulation/accumulate": {
        "an array without dims": _in_an_array,
        "NumPy's fp32": _in_numpys_fp32,
        "fractions": _fractions,
        "autograd.backward": _by_autograd,
        "empty ones known by their loss": _nan_left_out,
        "empty ones computed as well": _empty_ones_too,
        "backward(gradient=share), a float": _seeded,
        "empty ones filtered, a NumPy scalar": _no_empty_ones,
        "a tensor of one element": _grown,
        "a float, rounded to fp32": _in_fp32,
        "shares in fp32": _shares_in_fp32,
    },
    "accumulation/bug-hunt": {
        "gradients by hand": _gradients_by_hand,
        "islice": _sliced,
        "cleared before": _cleared_before,
        "stretched, then clipped": _stretched_then_clipped,
        "gradients divided, a NumPy integer": _rescaled,
        "accumulation.step, a 0-d tensor": _through_step,
        "clipped by hand": _clipped_by_hand,
        "the sum clipped to n times the norm": _sum_clipped,
    },
    "accumulation/configure": {
        "steps counted up": _steps_first,
        "downwards, a tensor": _downwards,
        "sizes dropped until one fits, a list": _dropped,
        "NumPy integers": lambda *args: tuple(map(np.int64, _dropped(*args))),
        "fewest steps first, 0-d tensors, yielded": _yielded,
    },
}
