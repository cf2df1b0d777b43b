"""Right answers to the exercises of `precision`, in styles that are not the reference's."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from labutils.precision import LossScaler


def _by_torch(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    master = nn.Parameter(weights.to(torch.float32))
    optimizer = torch.optim.SGD([master], lr=lr)
    for gradient in gradients:
        master.grad = gradient.to(torch.float32)
        optimizer.step()
    return master.data.bfloat16()


def _in_double(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    total = torch.stack(list(gradients)).double().sum(0)
    return (weights.double() - lr * total).float().to(torch.bfloat16)


def _folded(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    master = functools.reduce(lambda w, g: w.sub(g.float(), alpha=lr), gradients, weights.float())
    return master.type_as(weights)


def _in_numpy(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    master = weights.float().numpy().copy()
    for gradient in gradients:
        master -= np.float32(lr) * gradient.float().numpy()
    return torch.from_numpy(master).bfloat16()


def _compensated(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    """bf16 weights, and beside them in fp32 what rounding has taken from them."""
    left = torch.zeros_like(weights, dtype=torch.float32)
    for gradient in gradients:
        left -= lr * gradient.float()
        rounded = (weights.float() + left).bfloat16()
        left -= rounded.float() - weights.float()
        weights = rounded
    return weights


def _generated(finite: Sequence[bool], start: float, interval: int) -> Iterator[float]:
    scale, left = start, interval
    yield scale
    for good in finite:
        left = left - 1 if good else interval
        if not good:
            scale *= 0.5
        elif not left:
            scale, left = scale * 2, interval
        yield scale


def _accumulated(finite: Sequence[bool], start: float, interval: int) -> Tensor:
    runs = itertools.accumulate(finite, lambda run, good: good * (run + 1), initial=0)
    rungs = [0] + [-1 if not run else int(run % interval == 0) for run in list(runs)[1:]]
    return start * 2.0 ** torch.tensor(rungs).cumsum(0)


def _exponents(finite: Sequence[bool], start: float, interval: int) -> np.ndarray:
    exponents, good = [math.log2(start)], 0
    for is_finite in finite:
        good = (good + 1) % interval if is_finite else 0
        exponents.append(exponents[-1] + (-1 if not is_finite else good == 0))
    return 2.0 ** np.array(exponents)


def _asked(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> None:
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss()).backward()
    if scaler.unscale_(optimizer):
        nn.utils.clip_grad_norm_(
            itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups),
            max_norm,
        )
        optimizer.step()
    scaler.update()


def _by_hand(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> bool:
    parameters = [*optimizer.param_groups[0]["params"], *optimizer.param_groups[1]["params"]]
    for parameter in parameters:
        parameter.grad = None
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad *= (max_norm / norm).clamp(max=1)
    taken = scaler.step(optimizer)
    scaler.update()
    return taken


def _in_two(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = torch.autograd.grad(scaler.scale(loss()), parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    scaler.unscale_(optimizer)
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    scaler.step(optimizer)
    scaler.update()


def _one_vector(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> None:
    parameters = [*itertools.chain(*(group["params"] for group in optimizer.param_groups))]
    optimizer.zero_grad()
    (scaler.scale(loss())).backward()
    scaler.unscale_(optimizer)
    length = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in parameters]))
    if length > max_norm:
        torch._foreach_mul_([p.grad for p in parameters], max_norm / length.item())
    scaler.step(optimizer)
    scaler.update()


def _larger_bound(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> None:
    """Clips scaled gradients to the scaled bound; step() unscales them."""
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    nn.utils.clip_grad_norm_(parameters, max_norm * scaler.value)
    scaler.step(optimizer)
    scaler.update()


RIGHT = {
    "precision/master-weights": {
        "torch's SGD on an fp32 copy": _by_torch,
        "one sum in double precision": _in_double,
        "a fold": _folded,
        "NumPy": _in_numpy,
        "what rounding takes is kept": _compensated,
    },
    "precision/dynamic-scale": {
        "a generator": _generated,
        "accumulate, a tensor": _accumulated,
        "powers of two, an array": _exponents,
        "a tuple": lambda *args: tuple(_generated(*args)),
    },
    "precision/bug-hunt": {
        "steps if unscale_ says so": _asked,
        "clips by hand": _by_hand,
        "torch.autograd.grad": _in_two,
        "one vector of all gradients": _one_vector,
        "the bound is scaled": _larger_bound,
    },
}
