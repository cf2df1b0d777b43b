"""Wrong answers to the exercises of `precision`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from labutils import precision
from labutils.precision import LossScaler
from wrong_answers import Wrong


def _in_half(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    for gradient in gradients:
        weights -= lr * gradient
    return weights


def _read_back(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    for gradient in gradients:
        master = weights.float()
        master -= lr * gradient.float()
        weights = master.to(torch.bfloat16)
    return weights


def _gradients_first(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    return (weights.float() - lr * sum(gradients).float()).to(torch.bfloat16)


def _fp16_master(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    master = weights.half()
    for gradient in gradients:
        master -= lr * gradient.half()
    return master.to(torch.bfloat16)


def _fp32_out(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    master = weights.float()
    for gradient in gradients:
        master -= lr * gradient.float()
    return master


def _half_product(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    master = weights.float()
    for gradient in gradients:
        master -= lr * gradient  # a bf16 product
    return master.to(torch.bfloat16)


def _scale_by(
    *, grow: bool = True, reset: bool = True, restart: bool = True, back_off: bool = True
) -> Callable:
    """A rule with its slips switched on one at a time."""

    def attempt(finite: Sequence[bool], start: float, interval: int) -> list[float]:
        scale, good, found = start, 0, []
        for is_finite in finite:
            found.append(scale)
            if not is_finite:
                scale = scale / 2 if back_off else scale
                good = 0 if reset else good
                continue
            good += 1
            if grow and good >= interval:
                scale, good = 2 * scale, 0 if restart else good
        return [*found, scale]

    return attempt


def _clear(parameters: list[nn.Parameter], max_norm: float) -> None:
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)


def _bugged(
    *,
    zero: bool = True,
    scale: bool = True,
    unscale: str = "before",
    clip: Callable = nn.utils.clip_grad_norm_,
    stepper: str = "scaler",
    update: str = "last",
) -> Callable:
    """The step with its slips switched on one at a time."""

    def attempt(
        loss: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        max_norm: float,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if zero:
            optimizer.zero_grad()
        (scaler.scale(loss()) if scale else loss()).backward()
        if unscale == "before":
            scaler.unscale_(optimizer)
        clip(parameters, max_norm)
        if unscale == "after":
            scaler.unscale_(optimizer)
        if update == "first":
            scaler.update()
        if stepper != "optimizer":
            scaler.step(optimizer)
        if stepper != "scaler":
            optimizer.step()
        if update == "last":
            scaler.update()
        elif update == "never":
            scaler._finite.clear()  # ready for the next step
            scaler._stepped.clear()

    return attempt


def _scaled_afterwards(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> None:
    """Gradients are multiplied by the scale when the backward pass has lost the small ones."""
    optimizer.zero_grad()
    loss().backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        parameter.grad *= scaler.value
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.step(optimizer)
    scaler.update()


def _clip_each(parameters: list[nn.Parameter], max_norm: float) -> None:
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], max_norm)


def _clip_first(parameters: list[nn.Parameter], max_norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters[:1], max_norm)


def _clip_groups(parameters: list[nn.Parameter], max_norm: float) -> None:
    for group in (parameters[:2], parameters[2:]):
        nn.utils.clip_grad_norm_(group, max_norm)


def _clip_first_of_groups(parameters: list[nn.Parameter], max_norm: float) -> None:
    nn.utils.clip_grad_norm_(parameters[::2], max_norm)


def _steps_if(is_fine: Callable[[Tensor, list[nn.Parameter], Tensor], Tensor]) -> Callable:
    """The step with a condition of its own: of the loss, the parameters and the norm."""

    def attempt(
        loss: Callable[[], Tensor],
        optimizer: torch.optim.Optimizer,
        scaler: LossScaler,
        max_norm: float,
    ) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        optimizer.zero_grad()
        value = loss()
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, max_norm)
        if is_fine(value, parameters, norm):
            optimizer.step()
        scaler.update()

    return attempt


def _otherwise(rule: Callable[[float, int, int, bool, int], tuple[float, int]]) -> Callable:
    """A rule of its own: (scale, count) from scale, count, number of the step, finite, interval."""

    def attempt(finite: Sequence[bool], start: float, interval: int) -> list[float]:
        scale, count, found = start, 0, [start]
        for k, is_finite in enumerate(finite):
            scale, count = rule(scale, count, k, is_finite, interval)
            found.append(scale)
        return found

    return attempt


def _too_late(scale, count, k, finite, interval):
    if not finite:
        return scale / 2, 0
    return (2 * scale, 0) if count == interval else (scale, count + 1)


def _every_so_many_steps(scale, count, k, finite, interval):
    if not finite:
        return scale / 2, 0
    return (2 * scale if (k + 1) % interval == 0 else scale), 0


def _in_powers_of_four(scale, count, k, finite, interval):
    if not finite:
        return scale / 4, 0
    return (2 * scale, 0) if count + 1 == interval else (scale, count + 1)


def _waits_for_two(scale, count, k, finite, interval):
    """Hysteresis: comes down at the second overflow in a row. The count of good steps is >= 0."""
    if not finite:
        return (scale / 2, 0) if count < 0 else (scale, -1)
    count = max(count, 0) + 1
    return (2 * scale, 0) if count == interval else (scale, count)


def _rounds_at_random(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    """Stochastic rounding in place of a master copy."""
    draw = torch.Generator().manual_seed(0)
    for gradient in gradients:
        stepped = weights.float() - lr * gradient.float()
        rounded = precision.round_to(stepped, "bf16", mode="stochastic", generator=draw)
        weights = rounded.to(torch.bfloat16)
    return weights


def _mean_of_gradients(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    return (weights.float() - lr * torch.stack(list(gradients)).float().mean(0)).bfloat16()


def _forgets_the_rest(weights: Tensor, gradients: Sequence[Tensor], lr: float) -> Tensor:
    """Saves up until a weight moves, and then begins with nothing."""
    saved = torch.zeros_like(weights, dtype=torch.float32)
    for gradient in gradients:
        saved -= lr * gradient.float()
        rounded = (weights.float() + saved).bfloat16()
        saved[rounded != weights] = 0
        weights = rounded
    return weights


def _as_long_as_max_norm(
    loss: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer,
    scaler: LossScaler,
    max_norm: float,
) -> None:
    """Makes the gradient as long as it may be."""
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.cat([p.grad.flatten() for p in parameters]).norm()
    for parameter in parameters:
        parameter.grad.mul_(max_norm / norm)
    scaler.step(optimizer)
    scaler.update()


WRONG = {
    "precision/master-weights": (
        Wrong("stepped in half", _in_half, "short steps add up", "rounded away"),
        Wrong(
            "the master read back from the bf16 weights",
            _read_back,
            "short steps add up",
            "never read it back",
        ),
        Wrong(
            "the gradients added up in half",
            _gradients_first,
            "short steps add up",
            "a sum of gradients stands still",
        ),
        Wrong("an fp16 master", _fp16_master, "short steps add up", "fp32 copy"),
        Wrong("fp32 weights returned", _fp32_out, "half again", "keep the copy"),
        Wrong("the product in half", _half_product, "rounded once", "before"),
        Wrong(
            "uphill",
            lambda w, gradients, lr: precision.half_sgd(w, [-g for g in gradients], lr),
            "long steps",
            "−=",
        ),
        Wrong("the mean of the gradients", _mean_of_gradients, "long steps", "in turn"),
        Wrong("forgets the rest", _forgets_the_rest, "short steps add up", "*one* fp32 copy"),
        Wrong("rounds at random", _rounds_at_random, "short steps add up", "*one* fp32 copy"),
    ),
    "precision/dynamic-scale": (
        Wrong("static", _scale_by(grow=False, back_off=False), "it grows", "doubles"),
        Wrong("it never backs off", _scale_by(back_off=False), "it backs off", "halves the scale"),
        Wrong(
            "the count survives an inf", _scale_by(reset=False), "in a row", "sets the count to 0"
        ),
        Wrong("the count is never restarted", _scale_by(restart=False), "it grows", "begins anew"),
        Wrong("one good step too late", _otherwise(_too_late), "it grows", "doubles"),
        Wrong(
            "doubles at every interval of the run",
            _otherwise(_every_so_many_steps),
            "in a row",
            "sets the count to 0",
        ),
        Wrong("a quarter", _otherwise(_in_powers_of_four), "it backs off", "halves the scale"),
        Wrong("waits for a second inf", _otherwise(_waits_for_two), "it backs off", "at once"),
        Wrong(
            "without the scale after the last step",
            lambda *args: precision.scales(*args)[:-1],
            "it grows",
            "one after the last",
        ),
    ),
    "precision/bug-hunt": (
        Wrong(
            "as long as max_norm", _as_long_as_max_norm, "a plain step", "a factor of at most 1"
        ),
        Wrong(
            "clipped before unscaling",
            _bugged(unscale="after"),
            "clipping sees true gradients",
            "unscale_() first",
        ),
        Wrong(
            "the optimizer steps by itself",
            _bugged(stepper="optimizer"),
            "an overflow changes nothing",
            "never forget a NaN",
        ),
        Wrong(
            "gradients scaled, and not the loss",
            _scaled_afterwards,
            "a plain step",
            "Begin it with the scaled loss",
        ),
        Wrong("both of them step", _bugged(stepper="both"), "a plain step", "Leave optimizer.step"),
        Wrong(
            "gradients are cleared before they step",
            _bugged(clip=_clear),
            "a plain step",
            "have not moved",
        ),
        Wrong("the scale stays", _bugged(update="never"), "the scale moves", "after every step"),
        Wrong("no update", _bugged(update="none"), "a step after a step", "after every step"),
        Wrong(
            "gradients are not cleared",
            _bugged(zero=False),
            "gradients are fresh",
            "before backward",
        ),
        Wrong(
            "each parameter clipped alone",
            _bugged(clip=_clip_each),
            "clipping sees true gradients",
            "all gradients together",
        ),
        Wrong(
            "the first group alone clipped",
            _bugged(clip=_clip_first),
            "clipping sees true gradients",
            "all gradients together",
        ),
        Wrong(
            "each group clipped alone",
            _bugged(clip=_clip_groups),
            "clipping sees true gradients",
            "all gradients together",
        ),
        Wrong(
            "the first parameter of each group clipped",
            _bugged(clip=_clip_first_of_groups),
            "clipping sees true gradients",
            "all gradients together",
        ),
        Wrong(
            "looks for NaN alone",
            _steps_if(lambda loss, parameters, norm: not torch.isnan(norm)),
            "an overflow changes nothing",
            "an inf or NaN",
        ),
        Wrong(
            "looks at the loss alone",
            _steps_if(lambda loss, parameters, norm: torch.isfinite(loss)),
            "an overflow changes nothing",
            "in any gradient",
        ),
        Wrong(
            "looks at the first gradient alone",
            _steps_if(lambda loss, parameters, norm: torch.isfinite(parameters[0].grad)),
            "an overflow changes nothing",
            "in any gradient",
        ),
        Wrong("the loss is not scaled", _bugged(scale=False), "a plain step", "Scale the loss"),
        Wrong(
            "updated before the step",
            _bugged(update="first"),
            "a plain step",
            "update() comes last",
        ),
        Wrong(
            "each gradient clipped on its own",
            _bugged(clip=nn.utils.clip_grad_value_),
            "clipping sees true gradients",
            "all gradients together",
        ),
        Wrong(
            "never unscaled",
            _bugged(unscale="never", stepper="optimizer", update="never"),
            "a plain step",
            "until unscale_()",
        ),
        Wrong(
            "looks at the last gradient alone",
            _steps_if(lambda loss, parameters, norm: torch.isfinite(parameters[-1].grad)),
            "an overflow changes nothing",
            "in any gradient",
        ),
    ),
}
