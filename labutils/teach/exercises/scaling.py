"""Take a recipe to more devices, measure the noise scale on ranks, and repair a large-batch SGD."""

import functools
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labutils import scaling, world
from labutils.scaling import ranks
from labutils.teach.exercises import Exercise, Failed, Property, _ranks

# ── a recipe for k times as many devices ─────────────────────────────────────────────────────────

_RECIPES = [("sgd", 0.1, 1e-4, 32, 12), ("adam", 1e-3, 0.1, 20, 10), ("sgd", 0.02, 1e-3, 4, 7)]
_RECIPES += [("rmsprop", 4e-3, 1e-2, 64, 5)]
_WARM, _LATE = 5, 40  # epochs


def scaled_recipe(
    optimizer: str, lr: float, decay: float, k: float, steps: int
) -> tuple[Callable[[int], float], float]:
    """The learning rate of iteration t, a function of t, and the weight decay for k times the
    batch: linear for "sgd" and a square root for others, warmed up as Goyal does over five epochs
    of `steps` iterations each; each step multiplies a weight by 1 − rate·decay, and the decay of
    an epoch at the scaled rate stays what it was."""
    rule: scaling.Rule = "linear" if optimizer == "sgd" else "square root"
    peak = scaling.scale_lr(lr, k, rule)
    warmed = functools.partial(scaling.warm_up, steps=_WARM * steps, start=lr, end=peak)
    return warmed, scaling.scale_decay(decay, k, rule)


def _answered(attempt: Callable, recipe: tuple) -> tuple[list[float], float, str]:
    """The rates of seven epochs and of iteration 0 of a late one, the decay, the case in words."""
    optimizer, lr, _, k, steps = recipe
    case = f"{optimizer}, lr = {lr:g}, k = {k}, {steps} iterations per epoch"
    found = attempt(*recipe)
    if not isinstance(found, tuple | list) or len(found) != 2 or not callable(found[0]):
        hint = "Return a function of the iteration, and the weight decay."
        raise Failed(f"{case}: you return {found!r:.80}", hint)
    if not isinstance(found[1], Real | Tensor | np.ndarray):
        raise Failed(f"{case}: the weight decay is {found[1]!r}", "Return a number.")
    times = [*range(7 * steps), _LATE * steps]
    rates = [_rate(found[0], t, case) for t in times]
    for t, rate in list(zip(times, rates, strict=True))[::-3]:  # again, in another order
        if not _near(again := _rate(found[0], t, case), rate):
            raise Failed(
                f"{case}: iteration {t} runs at {rate:.4g}, and asked for again at {again:.4g}",
                "A run that resumes asks for iteration t alone. Work the rate out from t, and not "
                "from how often it was asked for.",
            )
    return rates, float(found[1]), case


def _rate(rate: Callable, t: int, case: str) -> float:
    try:
        found = rate(t)
    except (IndexError, KeyError, StopIteration) as error:
        said, hint = type(error).__name__, "Later rates are constant, for as long as asked."
        raise Failed(f"{case}: iteration {t} has no rate ({said})", hint) from None
    if not isinstance(found, Real | Tensor | np.ndarray):
        raise Failed(f"{case}: at iteration {t} the rate is {found!r}", "Return a number.")
    return float(found)


def _not(found: float, right: float) -> str:
    """Two numbers side by side, in as many digits as tell them apart."""
    digits = next((n for n in range(4, 17) if f"{found:.{n}g}" != f"{right:.{n}g}"), 17)
    return f"{found:.{digits}g}, not {right:.{digits}g}"


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-12)


def _peak(attempt: Callable) -> str:
    for recipe in _RECIPES:
        rates, _, case = _answered(attempt, recipe)
        _, lr, _, k, _ = recipe
        right = scaled_recipe(*recipe)[0](10**6)
        late = {7: rates[-2], _LATE: rates[-1]}
        epochs = next((at for at, rate in late.items() if not _near(rate, right)), None)
        if epochs is None:
            continue
        usually = {
            lr: "The rate is not scaled at all: k times the batch in as many steps less.",
            lr * k: "The linear rule is SGD's. Adam and RMSProp divide a gradient by its own size: "
            "a batch k times as large has noise smaller by √k, hence the square root.",
            lr
            * math.sqrt(k): "The square root fits Adam and RMSProp. k small steps of SGD are one "
            "step of k·lr.",
            lr / k: "Upside down: a larger batch takes larger steps.",
            lr * k * k: "Scaled twice: once for the batch is enough.",
        }
        hint = next(
            (words for value, words in usually.items() if _near(late[epochs], value)),
            "After the warm-up: k·lr for SGD, √k·lr for the others.",
        )
        if rates[-1] != rates[-2]:
            hint = "It still changes: after five epochs of `steps` iterations the rate is constant."
        raise Failed(f"{case}: after {epochs} epochs {_not(late[epochs], right)}", hint)
    return f"{len(_RECIPES)} recipes"


def _decay(attempt: Callable) -> str:
    for recipe in _RECIPES:
        _, decay, case = _answered(attempt, recipe)
        optimizer, _, old, k, _ = recipe
        right = scaled_recipe(*recipe)[1]
        if _near(decay, right):
            continue
        grown = k if optimizer == "sgd" else math.sqrt(k)
        times = decay * grown / (old * k)
        said = f"stays {old:.4g}" if decay == old else f"{old:.4g} → {decay:.4g}"
        raise Failed(
            f"{case}: weight decay {said}; at the scaled rate an epoch then decays {times:.3g} "
            "times as much as before",
            f"A step decays by rate · decay. An epoch has 1/{k} of the steps, and the rate is "
            f"{grown:.3g} times as large: "
            + (
                "the two cancel, and the decay stays as it is."
                if optimizer == "sgd"
                else "the decay has to make up for the rest, √k."
            ),
        )
    return "an epoch decays as before"


def _begins(attempt: Callable) -> str:
    for recipe in _RECIPES:
        rates, _, case = _answered(attempt, recipe)
        if _near(rates[0], recipe[1]):
            continue
        peak, warm = rates[-1], _WARM * recipe[4]
        hint = "Iteration 0 runs at the rate of the small batch."
        if rates[0] == 0 or _near(rates[0], peak / warm):
            hint = (
                "This grows from 0, as libraries do. Goyal's begins at η, which is known to work."
            )
        elif _near(rates[0], peak):
            hint = "There is no warm-up: iteration 0 already runs at the scaled rate."
        raise Failed(f"{case}: it begins at {rates[0]:.4g}, not at η = {recipe[1]:g}", hint)
    return "at η"


def _every_iteration(attempt: Callable) -> str:
    for recipe in _RECIPES:
        rates, _, case = _answered(attempt, recipe)
        right = [scaled_recipe(*recipe)[0](t) for t in range(len(rates))]  # the last: any late one
        wrong = [t for t, pair in enumerate(zip(rates, right, strict=True)) if not _near(*pair)]
        if not wrong:
            continue
        t, steps = wrong[0], recipe[4]
        warm = _WARM * steps
        hint = f"The increment is (scaled rate − η) / {warm} at each iteration: a straight line."
        over = next(t for t, rate in enumerate(rates) if _near(rate, right[-1]))
        if all(len(set(rates[e * steps : (e + 1) * steps])) == 1 for e in range(_WARM)):
            hint = "The rate changes once per epoch, in leaps: it should grow at every iteration."
        elif over == _WARM:
            hint = "The warm-up is over after five *iterations*: it lasts five epochs."
        elif over != warm:
            hint = (
                f"The scaled rate is there at iteration {over}, and should be at {warm}: five "
                f"epochs of `steps` = {steps} iterations, counted with the large batch."
            )
        raise Failed(f"{case}: iteration {t} runs at {_not(rates[t], right[t])}", hint)
    return "equal amounts"


RECIPE = Exercise(
    id="scaling/recipe",
    reference=scaled_recipe,
    properties=(
        Property("the rule", _peak),
        Property("weight decay", _decay),
        Property("where the warm-up begins", _begins),
        Property("every iteration", _every_iteration),
    ),
    hints=(
        "k small steps of SGD are one of k·lr. Adam divides the gradient by its own size. How many "
        "steps has an epoch now, and by how much does each of them decay a weight?",
        "From lr at iteration 0 to the scaled rate at iteration 5 · steps, along a straight line, "
        "and constant from there. rate · decay · steps of an epoch stays what it was: "
        "decay under the linear rule, √k · decay under the square root.",
    ),
)

# ── the noise scale on ranks ─────────────────────────────────────────────────────────────────────

_P, _SEEDS = 12, 6


@functools.cache
def _gradients(n: int, b: int) -> list[list[Tensor]]:
    """For each rank, its gradient in each seed: a mean of b examples' gradients."""
    draw = torch.Generator().manual_seed(n)
    signal = 0.5 * torch.arange(1, _SEEDS + 1, dtype=torch.float64).view(_SEEDS, 1, 1, 1)
    noise = torch.randn(_SEEDS, n, b, _P, generator=draw, dtype=torch.float64)
    return [list(each) for each in (signal + 3 * noise).mean(2).transpose(0, 1)]


_FORMS = "each rank must call all_reduce equally often"


def _found(attempt: Callable, n: int, b: int) -> list[float]:
    def program(rank: world.Rank) -> float | None:
        own = [gradient.clone() for gradient in _gradients(n, b)[rank.rank]]
        found = attempt(own, b, rank.comm("dp"))
        try:
            return None if found is None else float(found)
        except (TypeError, ValueError, RuntimeError):
            return None

    case = f"{_ranks.count(n)}, b = {b}"
    every = _ranks.run(n, case, program, f"Deadlock: {_FORMS}.")
    if None in every:
        at = every.index(None)
        raise Failed(f"{case}: rank {at} returns no number", "Every rank returns the number.")
    return every


def _of_mean_gradients(own: Tensor, n: int, b: int) -> Tensor:
    """The noise scale of gradients [seed, rank, P] of which a mean over seeds was taken first."""
    once = own.mean(0)
    small, large = once.square().sum(1).mean(), once.mean(0).square().sum()
    trace = (small - large) / (1 / b - 1 / (n * b))
    return trace / (small - trace / b)


def _slips(n: int, b: int) -> list[tuple[float, str]]:
    """What usual mistakes would give, and the words for each."""
    own = torch.stack([torch.stack(each) for each in _gradients(n, b)], 1)  # seed, rank, P
    small, mean = own.square().sum(2).mean(1), own.mean(1).square().sum(1)
    trace = (small - mean) / (1 / b - 1 / (n * b))
    signal = small - trace / b
    summed = (small - n * n * mean) / (1 / b - 1 / (n * b))
    added = (n * small - mean) / (1 / b - 1 / (n * b))
    ranks_alone = (small - mean) / (1 - 1 / n)
    biased, every = trace * (n - 1) / n, (small - mean) * b
    short = own.norm(dim=2).mean(1).square()
    shorter = (short - mean) / (1 / b - 1 / (n * b))
    values = [
        (_of_mean_gradients(own, n, b), "Seeds are averaged as lengths: first "
         "tr Σ and |G|² of each seed, then their means. A mean of gradients has less noise."),
        (trace.mean() / mean.mean(), "|G|² is biased: |mean gradient|² still holds tr Σ / (N·b) of "
         "noise. Subtract it."),
        ((trace / signal).mean(), "This is the mean of ratios, and one |G|² near zero is all "
         "that counts. Average tr Σ and |G|² over seeds first, and divide once."),
        ((trace / mean).mean(), "Ratios are averaged, and |G|² is biased: means first, then one "
         "ratio, of estimates without bias."),
        (summed.mean() / (small - summed / b).mean(), "all_reduce *sums*: the gradient of the "
         "large batch is the mean over ranks. Divide by N before you take its length."),
        (added.mean() / (n * small - added / b).mean(), "|g|² of the small batch is the mean over "
         "ranks, and all_reduce sums: divide by N."),
        (ranks_alone.mean() / (small - ranks_alone).mean(), "Counted in ranks, not in examples: "
         "each rank's gradient is that of b examples."),
        (trace.mean() / small.mean(), "|G|² is biased: the small batch's |g|² still holds tr Σ / b "
         "of noise. Subtract it."),
        (trace.mean() / signal.mean() * n, "Too large by the number of ranks: each rank's gradient "
         "is that of b examples, and the mean of all that of N·b."),
        ((trace.mean() / signal.mean()).sqrt(), "That is the root of the noise scale: lengths are "
         "squared in tr Σ and in |G|²."),
        (trace.mean() / signal.mean() / n, "Too small by the number of ranks."),
        (trace.mean() / signal.mean() / b, "Counted in ranks, not in examples: each rank's "
         "gradient is that of b examples."),
        (signal.mean() / trace.mean(), "That is one over the noise scale: tr Σ / |G|²."),
        (trace[-1] / signal[-1], "That is the last seed alone: average tr Σ and |G|² over all."),
        (-trace.mean() / (small + trace / b).mean(), "tr Σ is negative here: small batches have "
         "the longer gradients. Subtract the large one's |g|² from the small one's."),
        (every.mean() / (small - every / b).mean(), "The large batch has noise as well: "
         "small − large is tr Σ · (1/b − 1/(N·b)), not tr Σ / b."),
        (biased.mean() / (mean - biased / (n * b)).mean(), "The variance of n gradients around "
         "their own mean is their squared distance over n − 1, not over n."),
        (trace.mean() / signal.clamp(min=0).mean(), "An estimate without bias may come out "
         "below 0, and it must: cut at 0, the mean of all is too large."),
        (shorter.mean() / (short - shorter / b).mean(), "E|g|² squares each rank's length first, "
         "and then takes the mean: not the square of a mean length."),
    ]  # fmt: skip
    return [(value.item(), words) for value, words in values]


def _value(attempt: Callable) -> str:
    cases = [(4, 1), (4, 8), (2, 5), (3, 2)]
    for n, b in cases:
        found = _found(attempt, n, b)
        own = [torch.stack(each) for each in _gradients(n, b)]
        right = scaling.noise_scale(
            scaling.estimate_spread(
                sum(g[s].square().sum().item() for g in own) / n,
                torch.stack([g[s] for g in own]).mean(0).square().sum().item(),
                b,
                n * b,
            )
            for s in range(_SEEDS)
        )
        if not all(map(math.isfinite, found)):
            hint = "Divide once, at the end, and by what is not 0: 1/b − 1/(N·b), and |G|²."
            raise Failed(f"{_ranks.count(n)}, b = {b}: rank 0 finds {found[0]}", hint)
        if len({round(each, 9) for each in found}) > 1:
            raise Failed(
                f"{_ranks.count(n)}: the ranks find {', '.join(f'{x:.3g}' for x in found)}",
                "The same number on every rank: |g|² before the all-reduce differs from rank to "
                "rank, so average it over ranks too.",
            )
        if not math.isclose(found[0], right, rel_tol=1e-6):
            near = (w for v, w in _slips(n, b) if math.isclose(found[0], v, rel_tol=1e-6))
            hint = next(near, "E|g|² = |G|² + tr Σ / batch, for a batch of b and one of N·b.")
            if abs(found[0]) < 1e-9 * right:
                hint = (
                    "Small and large batches look alike: |g|² of the small one is taken *before* "
                    "the all-reduce, which must not write into the gradient until then."
                )
            raise Failed(
                f"{_ranks.count(n)}, b = {b}, {_SEEDS} seeds: {found[0]:.4g}, not {right:.4g}", hint
            )
    return f"{len(cases)} cases"


def _sent(attempt: Callable) -> str:
    n, b = 4, 2
    _found(attempt, n, b)
    most = max(_ranks.world_of(n).ledger.by("rank").values())
    right = _SEEDS * 2 * (n - 1) * 8 * (_P // n + 1)  # a ring of P numbers, and one of a single one
    if most > right:
        raise Failed(
            f"{_ranks.count(n)}, {_SEEDS} gradients of {8 * _P} B: a rank sends {most:,} B, "
            f"{right:,} B are enough",
            "All-reduce each gradient once, as training does anyway, and beside it one number.",
        )
    return "one gradient and one number"


NOISE = Exercise(
    id="scaling/noise-on-ranks",
    reference=ranks.noise_scale_of_ranks,
    properties=(Property("value", _value), Property("bytes sent", _sent)),
    hints=(
        "The small batch has b examples, the large one N·b. For each seed you need the mean over "
        "ranks of |g|², and |mean over ranks of g|².",
        "tr Σ = (small − large) / (1/b − 1/(N·b)), and |G|² = small − tr Σ / b. Average both over "
        "seeds, then divide.",
    ),
)

# ── bug hunt: SGD for large batches ──────────────────────────────────────────────────────────────


class LargeBatchSGD:
    """SGD with momentum for k micro-batches per step, on one tensor, the learning rate absorbed
    in the velocity: the momentum correction of Goyal's section 3."""

    last: float | None  # the learning rate of the step before

    def __init__(self, w: Tensor, lr: float, k: int, decay: float = 0.0, warm: int = 0) -> None:
        self.w, self.lr, self.k, self.decay, self.warm = w, lr, k, decay, warm
        self.velocity, self.last, self.step_number = torch.zeros_like(w), None, 0

    def rate(self) -> float:
        """The learning rate of this step."""
        return scaling.warm_up(self.step_number, self.warm, start=self.lr, end=self.k * self.lr)

    def step(self, gradients: list[Tensor]) -> None:
        """A step along the mean of k micro-batches' gradients."""
        rate = self.rate()
        gradient = sum(gradients) / self.k + self.decay * self.w
        correction = rate / (self.last or rate)
        self.velocity = 0.9 * correction * self.velocity + rate * gradient
        self.w -= self.velocity
        self.last, self.step_number = rate, self.step_number + 1


def _followed(
    attempt: Callable, k: int, decay: float = 0.0, warm: int = 0, equal: bool = False
) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Where an attempt goes in eight steps, where the right one and usual mistakes go, and
    whether the attempt left the tensor that it was given where it was."""
    draw, size = torch.Generator().manual_seed(5), 6
    start = torch.randn(size, generator=draw, dtype=torch.float64)
    shape = (8, 1 if equal else k, size)
    pieces = torch.randn(shape, generator=draw, dtype=torch.float64).expand(8, k, size)

    def follow(make: Callable, w: Tensor) -> Tensor:
        optimizer = make(w, 0.05, k, decay=decay, warm=warm)
        for each in pieces:
            optimizer.step([piece.clone() for piece in each])
        return getattr(optimizer, "w", w)

    given = start.clone()
    found = follow(attempt, given)
    known = {name: follow(make, start.clone()) for name, make in _MISTAKES.items()}
    return found, known, torch.equal(given, start)


class _Summed(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        super().step([self.k * each for each in gradients])


class _DecayScaled(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        more = (self.k - 1) * self.decay * self.w
        super().step([each + more for each in gradients])


class _Decoupled(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        decay, rate, w = self.decay, self.rate(), self.w.clone()
        self.decay = 0.0
        super().step(gradients)
        self.w -= rate * decay * w
        self.decay = decay


class _DecoupledAfter(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        decay, rate = self.decay, self.rate()
        self.decay = 0.0
        super().step(gradients)
        self.w *= 1 - rate * decay
        self.decay = decay


class _DecayDivided(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        less = self.decay * self.w * (1 - 1 / self.k)
        super().step([each - less for each in gradients])


class _DividedTwice(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        super().step([each / self.k for each in gradients])


class _AllCorrected(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        times = self.rate() / (self.last or self.rate())
        more = (times - 1) * self.decay * self.w
        super().step([each * times + more for each in gradients])


class _Uncorrected(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        self.last = None
        super().step(gradients)


class _CorrectedTwice(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        self.velocity = self.velocity * (self.rate() / (self.last or self.rate()))
        super().step(gradients)


class _UpsideDown(LargeBatchSGD):
    def step(self, gradients: list[Tensor]) -> None:
        self.velocity = self.velocity * ((self.last or self.rate()) / self.rate()) ** 2
        super().step(gradients)


class _FromZero(LargeBatchSGD):
    def rate(self) -> float:
        return (
            scaling.warm_up(self.step_number, self.warm, start=0.0, end=self.k * self.lr) or 1e-30
        )


class _Late(LargeBatchSGD):
    def rate(self) -> float:
        return scaling.warm_up(self.step_number + 1, self.warm, start=self.lr, end=self.k * self.lr)


_MISTAKES = {
    "right": LargeBatchSGD,
    "The gradient is k times too large: micro-batches are *added*, and the rate is scaled by k as "
    "well. The linear rule is for the mean.": _Summed,
    "The weight decay is k times as large: the rule scales the rate, and this number stays.": (
        _DecayScaled
    ),
    "This decay is AdamW's, beside the step. That of this class goes through the velocity: "
    "gradient + decay · w.": _Decoupled,
    "This decay multiplies the weight behind the step. That of this class goes through the "
    "velocity: gradient + decay · w.": _DecoupledAfter,
    "The decay is divided by k: of the gradients the mean counts, and decay · w is added to it.": (
        _DecayDivided
    ),
    "The gradient is k times too small: it is divided by k twice, or the mean is divided.": (
        _DividedTwice
    ),
    "The new gradient is corrected as well: what the velocity *held* is multiplied by new rate / "
    "old rate, and rate · gradient comes behind it.": _AllCorrected,
    "The velocity holds steps taken at the old rate. When the rate changes, multiply it by new "
    "rate / old rate: the momentum correction.": _Uncorrected,
    "The momentum correction is there two times: once, by new rate / old rate.": _CorrectedTwice,
    "The momentum correction is upside down: new rate / old rate.": _UpsideDown,
    "The warm-up begins at 0: Goyal's begins at the rate of the small batch.": _FromZero,
    "The first step already runs at the second rate.": _Late,
}


def _follows(attempt: Callable, **options: Any) -> str:
    found, known, left = _followed(attempt, **options)
    right = known.pop("right")
    if not torch.allclose(found, right, rtol=1e-9, atol=1e-12):
        same = (w for w, end in known.items() if torch.allclose(found, end, rtol=1e-9, atol=1e-12))
        said = ", ".join(f"{name} = {value}" for name, value in options.items())
        off = ((found - right).norm() / right.norm()).item()
        raise Failed(
            f"{said}: after 8 steps the weight is off by {100 * off:.2g} %",
            next(same, "torch.optim.SGD with momentum 0.9 and this rate goes elsewhere."),
        )
    if left:
        raise Failed(
            "after 8 steps the tensor that was given is what it was",
            "self.w = self.w − … makes a new tensor, and the model keeps the old one. Write into "
            "the tensor that is there: self.w -= ….",
        )
    return "8 steps"


REPAIR = Exercise(
    id="scaling/bug-hunt",
    reference=LargeBatchSGD,
    untouched="bf83d6b5",
    properties=(
        Property("one micro-batch", _follows, k=1),
        Property("several micro-batches", _follows, k=4),
        Property("weight decay", _follows, k=4, decay=0.1),
        Property("while the rate grows", _follows, k=4, warm=5),
        Property("all together", _follows, k=3, decay=0.1, warm=4),
    ),
    hints=(
        "Its test has one micro-batch, no decay and no warm-up. Set k = 4, then decay, then warm, "
        "one at a time, and compare with torch.optim.SGD.",
        "A gradient of a batch is a mean. A decay is not scaled. And what does the velocity hold "
        "when the rate changes: gradients, or steps?",
        "velocity = 0.9 · (rate / last rate) · velocity + rate · gradient.",
    ),
)

EXERCISES = (RECIPE, NOISE, REPAIR)
