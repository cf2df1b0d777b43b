"""Loss scaling: gradients lifted into the range of fp16, and set down again in fp32."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from labutils import floats, units
from labutils.world import Comm


class LossScaler:
    """A factor on the loss that keeps small gradients out of fp16's underflow, like GradScaler.

    The dynamic scale climbs until gradients overflow: `growth_interval` steps in a row without an
    inf or NaN double it; a step with one is skipped and halves it. A static scale (dynamic=False)
    stays; steps that overflow are skipped all the same. Over a `comm`, rank.comm(), where ranks
    have other shards of the gradients, or other stages, all skip or none: one number is
    all-reduced, booked as "finite". An optimizer is torch's, `MasterWeights` or `zero`'s.

    >>> weight = torch.nn.Parameter(torch.tensor(2.0))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> scaler = LossScaler(1024, growth_interval=1)
    >>> for loss in (weight * 3, weight * math.inf):
    ...     optimizer.zero_grad()
    ...     scaler.scale(loss).backward()
    ...     stepped = scaler.step(optimizer)
    ...     scaler.update()
    ...     print(stepped, round(weight.item(), 3), scaler.value)
    True 1.7 2048.0
    False 1.7 1024.0

    Invariant: scale for scale, skip for skip and weight for weight what `torch.amp.GradScaler`
    does.
    Source: Micikevicius et al. 1710.03740, section 3.2 (a constant scale, skipped steps); the
    dynamic rule: NVIDIA's mixed-precision guide.
    """

    def __init__(
        self,
        init_scale: float | int = 2.0**16,
        *,
        dynamic: bool = True,
        growth_interval: int = 2000,
        comm: Any = None,
    ) -> None:
        # In fp32, which is what gradients are multiplied with.
        self.value = floats.FP32.round(units.positive(init_scale, "init_scale"))
        if not 0 < self.value < math.inf:
            raise ValueError(f"init_scale={init_scale} is 0 or inf in fp32: 2**16 is usual")
        if comm is not None:
            units.instance(comm, Comm, "LossScaler")
            comm.check_all("whether a step is skipped")
        self.growth_interval = units.whole(growth_interval, "growth_interval", 1)
        self.dynamic = dynamic
        self.comm = comm
        self.good_steps = 0  # in a row, since the scale last moved
        # Since the last update(), by id of an optimizer: were its gradients finite; did it step?
        self._finite: dict[int, bool] = {}
        self._stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the scale, in fp32 or wider: 65536 itself is beyond fp16."""
        return loss * torch.tensor(self.value, device=loss.device)

    @torch.no_grad()
    def unscale_(self, optimizer: Any) -> bool:
        """Divides the optimizer's gradients by the scale, once; whether all of them were finite.

        What clips comes after it.

        Raises RuntimeError where they are unscaled already.
        """
        if id(optimizer) in self._finite:
            stepped = id(optimizer) in self._stepped
            what = "this optimizer has stepped" if stepped else "these gradients are unscaled"
            raise RuntimeError(f"{what} already: unscale_() once between two calls of update()")
        factor = floats.FP32.round(1 / self.value)
        if hasattr(optimizer, "collect"):
            optimizer.collect()
        finite = _multiply_gradients_(optimizer, factor)
        if self.comm is not None:
            with self.comm.record("finite"):
                found = torch.tensor(float(not finite), device=self.comm.device)
                finite = not self.comm.all_reduce(found, "max").item()
        self._finite[id(optimizer)] = finite
        return finite

    def step(self, optimizer: Any) -> bool:
        """Steps the optimizer, unless a gradient is inf or NaN; whether it did. Unscales first.

        Raises RuntimeError for a second one before `update`.
        """
        key = id(optimizer)
        if key in self._stepped:
            raise RuntimeError("step() was called twice: call update() once after every step")
        finite = self._finite[key] if key in self._finite else self.unscale_(optimizer)
        self._stepped.add(key)
        if finite:
            optimizer.step()
        return finite

    def update(self) -> None:
        """Moves the scale by what the last step found; once after every step, of all optimizers.

        Raises RuntimeError before any `step`; FloatingPointError where the scale has come to 0.
        """
        if not self._finite:
            raise RuntimeError("no gradients were looked at since the last update(): step() first")
        finite = all(self._finite.values())
        self._finite.clear()
        self._stepped.clear()
        if not self.dynamic:
            return
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.value = floats.FP32.round(self.value / 2)
            if not self.value:
                raise FloatingPointError("the scale is 0: the loss itself is inf or NaN")
        elif self.good_steps == self.growth_interval:
            self.good_steps = 0
            if 2 * self.value <= floats.FP32.max:
                self.value *= 2


def scales(finite: Iterable[bool], start: float, interval: int) -> list[float]:
    """The dynamic scale of every step, and the one after the last.

    finite: whether the gradients of a step are. interval: good steps in a row before it doubles

    >>> scales([True, True, False, True], start=64.0, interval=2)
    [64.0, 64.0, 128.0, 64.0, 64.0]
    """
    scale, good_steps, found = start, 0, [start]
    for is_finite in finite:
        good_steps = good_steps + 1 if is_finite else 0
        if not is_finite:
            scale /= 2
        elif good_steps == interval:
            scale, good_steps = 2 * scale, 0
        found.append(scale)
    return found


def clipped_step(
    loss: Callable[[], Tensor], optimizer: Any, scaler: LossScaler, max_norm: float
) -> None:
    """One training step with a loss scale and clipping, in the order in which it is right.

    On one device: ValueError for a scaler with a comm, whose gradients are clipped by the norm of
    all ranks.

    loss: computes the loss; optimizer: over the weights that it depends on
    max_norm: of the unscaled gradients of them all
    """
    if scaler.comm is not None:
        remedy = "unscale_, then zero.clip_grad_norm over rank.comm(), then step and update"
        raise ValueError(f"clipped_step knows the gradients of one device alone: {remedy}")
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()


def _multiply_gradients_(optimizer: Any, factor: float) -> bool:
    """Multiplies in place; whether all gradients were finite before. One pass does both."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    if any(gradient.dtype == torch.float16 for gradient in gradients):
        remedy = "Keep fp32 weights, or wrap the optimizer in MasterWeights"
        raise ValueError(f"fp16 gradients would underflow again when unscaled. {remedy}")
    if not gradients:
        return True
    found = torch.zeros(1, device=gradients[0].device)
    inverse = torch.full_like(found, factor)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse)
    return not found
