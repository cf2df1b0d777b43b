"""Step half-precision weights, move a loss scale, and repair a step that trains all the same."""

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from labutils.precision import LossScaler, clipped_step, half_sgd, scales
from labutils.teach.exercises import Exercise, Failed, Property

# ── half-precision weights ────────────────────────────────────────────────────────────────────────

_BF16 = torch.bfloat16


def _stepped(
    attempt: Callable, start: Sequence[float], gradients: Sequence[Sequence[float]], lr: float
) -> Tensor:
    """What the attempt makes of these weights: a tensor of their shape."""
    weights = torch.tensor(start, dtype=_BF16)
    found = attempt(
        weights.clone(), [torch.tensor(gradient, dtype=_BF16) for gradient in gradients], lr
    )
    if not isinstance(found, Tensor) or found.shape != weights.shape:
        raise Failed(
            f"{len(start)} weights: returned {found!r}",
            "Return the weights after the last step, a tensor like the one given.",
        )
    return found


_CUT_OFF = "The last digits are cut off. Round to the nearest: .to(torch.bfloat16)."


def _cut(x: Tensor) -> Tensor:
    """fp32 numbers without the digits that bf16 has not."""
    return x.view(torch.int32).bitwise_and(-(2**16)).view(torch.float32)


def _half_again(attempt: Callable) -> str:
    found = _stepped(attempt, [1.0, -2.0], [[1.0, 0.5]], 0.25)
    if found.dtype != _BF16:
        raise Failed(
            f"the weights come back as {found.dtype}",
            "The next forward pass wants half-precision weights: round the fp32 copy into them, "
            "and keep the copy.",
        )
    return "bfloat16"


def _long_steps(attempt: Callable) -> str:
    for lr in (0.25, 1.0):
        found = _stepped(attempt, [1.0, -2.0], [[1.0, 0.5], [-0.5, 1.0]], lr)
        expected = torch.tensor([1.0 - lr * 0.5, -2.0 - lr * 1.5])
        if not torch.equal(found.float(), expected):
            raise Failed(
                f"lr = {lr}: from 1 and −2 with gradients (1, 0.5), then (−0.5, 1) "
                f"to {found.tolist()}, it is {expected.tolist()}",
                "One step of SGD: master −= lr · gradient, for every gradient in turn.",
            )
    return "2 learning rates"


def _short_steps(attempt: Callable) -> str:
    cases = [(1.0, 1e-3, 100), (4.0, 1e-3, 500), (0.5, 1e-4, 1000)]
    for start, lr, steps in cases:
        found = _stepped(attempt, [start], [[1.0]] * steps, lr).float().item()
        target = start - lr * steps
        if abs(found - target) > 2**-8 * abs(target):  # what rounding once may cost, twice over
            said = "it has not moved" if found == start else f"it is {found:g}"
            said = f"{steps} steps of {lr:g} from {start:g}: {said}, and should be about {target:g}"
            if found == _cut(torch.tensor(target)).item():
                raise Failed(said, _CUT_OFF)
            raise Failed(
                said,
                "In 16 bits a step below half a gap is rounded away, each time anew, and a sum of "
                "gradients stands still too. Keep *one* fp32 copy over all "
                "steps, add each step to that, and never read it back from the bf16 weights.",
            )
    return f"{len(cases)} runs"


def _once_rounded(attempt: Callable) -> str:
    """The weights are the fp32 path rounded once; gradients are widened first."""
    draw = torch.Generator().manual_seed(0)
    start, gradients = (
        torch.randn(64, generator=draw).bfloat16(),
        torch.randn(30, 64, generator=draw).bfloat16(),
    )
    found = _stepped(attempt, start.tolist(), gradients.tolist(), 0.3)
    expected, narrow = start.float(), start.float()
    for gradient in gradients:
        expected = expected - 0.3 * gradient.float()
        narrow = narrow - (0.3 * gradient).float()
    off = int((found.float() - expected.bfloat16().float()).ne(0).sum())
    if off > 3:  # a last digit of fp32 may differ by how the step is written
        why = (
            "The copy, the learning rate, each product and each sum are fp32 all the way; round "
            "at the end, once."
        )
        if torch.equal(found, narrow.bfloat16()):
            why = (
                "Make the gradient fp32 *before* you multiply it with the learning rate: "
                "lr · gradient in bf16 is rounded a second time."
            )
        elif torch.equal(found.float(), _cut(expected)):
            why = _CUT_OFF
        raise Failed(
            f"64 weights, 30 steps: {off} of them are not the fp32 result rounded once", why
        )
    return "64 weights"


MASTER = Exercise(
    id="precision/master-weights",
    reference=half_sgd,
    properties=(
        Property("half again", _half_again),
        Property("long steps", _long_steps),
        Property("short steps add up", _short_steps),
        Property("rounded once", _once_rounded),
    ),
    hints=(
        "A step can be too small for bf16 and still has to count. What has to remember it until "
        "enough of them have come together, and in which format?",
        "An fp32 copy of the weights, made once, before the first step. Which operations have to "
        "be in fp32, and when is the one time that something is rounded?",
        "Start with weights.float(). A step is lr * gradient.float(). At the end: "
        ".to(weights.dtype).",
    ),
)

# ── the scale ────────────────────────────────────────────────────────────────────────────────────


def _moved(
    attempt: Callable, pattern: str, interval: int, hint: str, start: float = 1024.0
) -> None:
    """Compares the scales of a pattern of steps, "." for a good one and "x" for one with an inf."""
    finite = [mark == "." for mark in pattern]
    found, expected = attempt(list(finite), start, interval), scales(finite, start, interval)
    try:
        found = [float(scale) for scale in found]  # of a list, an array, a generator
    except TypeError:
        found = [found]
    if len(found) != len(expected):
        raise Failed(
            f"steps {pattern}: returned {found!r}",
            f"{len(pattern)} steps have {len(expected)} scales: one before each, and one after "
            "the last.",
        )
    for k, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if mine != right:
            raise Failed(
                f"growth interval {interval}, steps {pattern} (x: an inf): "
                f"the scale number {k} is {mine:g}, it should be {right:g}",
                hint,
            )


def _grows(attempt: Callable) -> str:
    for interval in (1, 3):
        _moved(
            attempt,
            "." * 7,
            interval,
            "After `interval` good steps in a row the scale doubles, and the count begins anew.",
        )
    high = "PyTorch's rule has no upper end: what is too high overflows, and comes down by that."
    _moved(attempt, "...", 1, high, start=2.0**30)
    return "2 intervals"


def _backs_off(attempt: Callable) -> str:
    for pattern in ("x", "xx", ".x"):
        _moved(attempt, pattern, 5, "A step with an inf is skipped and halves the scale, at once.")
    low = "A scale below 1 is a scale, too: 1 halves to 0.5, and PyTorch's rule has no lower end."
    _moved(attempt, "xxx", 5, low, start=2.0)
    return "4 patterns"


def _in_a_row(attempt: Callable) -> str:
    for pattern in ("..x..", "..x...", ".x..x..."):
        _moved(
            attempt,
            pattern,
            3,
            "Good steps count *in a row*: one with an inf sets the count to 0, or the scale "
            "climbs straight back to what overflowed.",
        )
    return "3 patterns"


SCALE = Exercise(
    id="precision/dynamic-scale",
    reference=scales,
    properties=(
        Property("it grows", _grows),
        Property("it backs off", _backs_off),
        Property("in a row", _in_a_row),
    ),
    hints=(
        "Two variables go through the loop: the scale, and the number of good steps in a row.",
        "An inf: scale /= 2, count = 0. A good step: count += 1, and at `interval` scale *= 2, "
        "count = 0.",
    ),
)

# ── the bug hunt ─────────────────────────────────────────────────────────────────────────────────


_START = torch.tensor([2.0, 3.0, 6.0])  # of length 7


class _Bowl:
    """Weights 2, 3 and 6 in two groups, whose loss is half their squares, times `slope`."""

    def __init__(self, scale: float = 64.0) -> None:
        self.weights = [nn.Parameter(start.clone()) for start in _START.split(1)]
        groups = [{"params": self.weights[:2]}, {"params": self.weights[2:]}]
        self.optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.5)
        self.scaler = LossScaler(scale, growth_interval=2)
        self.slope = 1.0
        self.arrived: list[float] = []  # the gradient of the loss itself, which is the scale

    @property
    def place(self) -> Tensor:
        """Where the weights are."""
        return torch.cat([weight.detach() for weight in self.weights])

    @property
    def momentum(self) -> Tensor:
        """What the optimizer keeps."""
        state = self.optimizer.state
        return torch.cat([state[weight]["momentum_buffer"] for weight in self.weights])

    def loss(self) -> Tensor:
        first, *others = (weight.square().sum() for weight in self.weights)
        loss = self.slope * sum(others, first) / 2
        if loss.requires_grad:
            loss.register_hook(lambda gradient: self.arrived.append(gradient.item()))
        return loss

    def step(self, attempt: Callable, max_norm: float = 1e9) -> None:
        attempt(self.loss, self.optimizer, self.scaler, max_norm)


def _rounded(place: Tensor) -> list[float]:
    return [round(x, 3) for x in place.tolist()]


def _plain_step(attempt: Callable) -> str:
    for scale in (1.0, 64.0):
        bowl = _Bowl(scale)
        bowl.step(attempt)
        if (bowl.place - _START).norm() > 1e8:
            raise Failed(
                "max_norm is 1e9, and the gradient became as long as that",
                "Clipping shortens what is too long, and leaves the rest: a factor of at most 1.",
            )
        if not torch.allclose(bowl.place, torch.zeros(3)):
            raise Failed(
                f"scale {scale:g}: a step of lr = 1 along the gradient leads from (2, 3, 6) "
                f"to {_rounded(bowl.place)}, not to (0, 0, 0)",
                "This is where two steps along one gradient lead, the second with momentum: "
                "scaler.step(optimizer) makes the step itself. Leave optimizer.step() out."
                if torch.allclose(bowl.place, -1.5 * _START)
                else "The weights have not moved: from backward() to step() gradients must stay."
                if torch.equal(bowl.place, _START)
                else "Gradients carry the scale until unscale_(); what steps must not."
                if bowl.place.abs().max() > 6
                else (
                    "They were divided by the scale once too often. Scale the loss; unscale once; "
                    "update() comes last, after it step() would unscale anew."
                ),
            )
        if set(bowl.arrived) != {scale}:
            raise Failed(
                f"scale {scale:g}: the backward pass began with {bowl.arrived[0]:g} times the loss",
                "It is the backward pass that loses small gradients. Begin it with the scaled "
                "loss: scaler.scale(loss()).backward().",
            )
    return "2 scales"


def _updated(attempt: Callable) -> str:
    bowl = _Bowl()
    bowl.step(attempt)
    try:
        bowl.scaler.unscale_(bowl.optimizer)  # as the next step will
    except RuntimeError:
        raise Failed(
            "a second step begins, and update() was not called since the first",
            "scaler.update() once, after every step: it moves the scale, and makes the scaler "
            "ready for the next unscale_().",
        ) from None
    return "ready for the next one"


def _clipped(attempt: Callable) -> str:
    for scale in (1.0, 4096.0):
        bowl = _Bowl(scale)
        bowl.step(attempt, max_norm=3.5)
        moved = (bowl.place - _START).norm().item()
        if abs(moved - 3.5) > 1e-4:
            raise Failed(
                f"scale {scale:g}: a gradient of length 7, clipped to 3.5, moves the weights by "
                f"{moved:.4g}",
                "Clipping has to see true gradients: unscale_() first. "
                "What is clipped before is divided by the scale afterwards."
                if moved < 3.5 < scale
                else (
                    f"What steps is {'longer' if moved > 3.5 else 'shorter'} than max_norm: "
                    "clip_grad_norm_, once, with the Euclidean norm of all gradients together, "
                    "between unscale_() and step()."
                ),
            )
    return "2 scales"


def _skipped(attempt: Callable) -> str:
    for value, which in itertools.product((math.inf, -math.inf, math.nan), (2, 1, 0)):
        bowl = _Bowl()
        bowl.step(attempt, max_norm=3.5)  # half of the way
        before, momentum = bowl.place, bowl.momentum
        overflow = bowl.weights[which].register_hook(
            lambda g, value=value: torch.full_like(g, value)
        )
        bowl.step(attempt)
        overflow.remove()
        if not (torch.equal(bowl.place, before) and torch.equal(bowl.momentum, momentum)):
            raise Failed(
                f"a finite loss, and a gradient of {value} for one of three weights: "
                f"they go from {_rounded(before)} to {_rounded(bowl.place)}",
                "scaler.step(optimizer) leaves the step out when it found an inf or NaN in any "
                "gradient; optimizer.step() does not, and Adam's moments never forget a NaN.",
            )
    return "weights and momentum as before"


def _moves(attempt: Callable) -> str:
    bowl = _Bowl(64.0)
    found = []
    for slope in (1.0, math.inf, 1.0, 1.0):
        bowl.slope = slope
        bowl.step(attempt)
        found.append(bowl.scaler.value)
    if found != [64.0, 32.0, 32.0, 64.0]:
        raise Failed(
            f"good, inf, good, good: the scale goes {found}, it should go [64.0, 32.0, 32.0, 64.0]",
            "scaler.update() once, after every step.",
        )
    return "down and up again"


def _fresh(attempt: Callable) -> str:
    bowl = _Bowl()
    for weight in bowl.weights:
        weight.grad = torch.full((1,), 100.0)
    bowl.step(attempt)
    if not torch.allclose(bowl.place, torch.zeros(3)):
        raise Failed(
            f"with a gradient left over from before, the step leads to {_rounded(bowl.place)}",
            "Clear the gradients before backward().",
        )
    return "nothing left over"


HUNT = Exercise(
    id="precision/bug-hunt",
    untouched="f0e0e0fe",
    reference=clipped_step,
    properties=(
        Property("a plain step", _plain_step),
        Property("gradients are fresh", _fresh),
        Property("a step after a step", _updated),
        Property("clipping sees true gradients", _clipped),
        Property("an overflow changes nothing", _skipped),
        Property("the scale moves", _moves),
    ),
    hints=(
        "Follow one gradient: by how much is it multiplied when it is clipped, and when it is "
        "stepped?",
        "backward → unscale_ → clip → scaler.step (not optimizer.step) → update.",
    ),
)

EXERCISES = (MASTER, SCALE, HUNT)
