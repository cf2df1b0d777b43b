"""Wrong answers to the exercises of `scaling`."""

import itertools
import math
from collections.abc import Callable
from functools import partial
from statistics import fmean, median

import torch
from torch import Tensor

from labutils import scaling, world
from labutils.teach.exercises.scaling import LargeBatchSGD
from wrong_answers import Wrong

WARM = 5


def _recipe(
    *,
    power: Callable[[str], float] = lambda optimizer: 1.0 if optimizer == "sgd" else 0.5,
    decay_power: Callable[[str], float] = lambda optimizer: 0.0 if optimizer == "sgd" else 0.5,
    origin: float = 1.0,
    shift: int = 0,
    by_epoch: bool = False,
    epochs: int = WARM,
    short: bool = False,
    twice: bool = False,
) -> Callable:
    """A recipe with its slips switched on one at a time."""

    def attempt(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
        peak = lr * k ** power(optimizer) * (k if twice else 1)

        def rate(t: int) -> float:
            total = epochs if short else epochs * steps
            t = t + shift
            t = t // steps * steps if by_epoch else t
            start = origin * lr
            return start + (peak - start) * min(t / total, 1) if total else peak

        return rate, decay * k ** decay_power(optimizer)

    return attempt


def _bent(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """Along an exponential from η to the scaled rate: equal factors, and not equal amounts."""
    ratio = k if optimizer == "sgd" else math.sqrt(k)
    grow = [lr * ratio ** (t / (5 * steps)) for t in range(5 * steps)]
    return (lambda t: grow[t] if t < len(grow) else lr * ratio), decay * k / ratio


def _grown_late(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """One epoch at η, then four that grow."""
    ratio = k if optimizer == "sgd" else k**0.5
    share = lambda t: min(max(t - steps, 0) / (4 * steps), 1)  # noqa: E731
    return (lambda t: lr + share(t) * (ratio - 1) * lr), decay * k / ratio


def _of_the_words(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """A table of rules in which RMSProp is no adaptive optimizer."""
    ratio = {"adam": k**0.5}.get(optimizer, k)
    return (lambda t: min(lr + t * (ratio - 1) * lr / (5 * steps), ratio * lr)), decay * k / ratio


def _warmed(share: Callable[[int, float, int], float]) -> Callable:
    """The right rates, but for how far the warm-up is: a function of t, k and steps."""

    def attempt(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
        ratio = k if optimizer == "sgd" else k**0.5
        return (lambda t: lr + share(t, k, steps) * (ratio - 1) * lr), decay * k / ratio

    return attempt


def _counts(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """The next rate, whichever iteration is asked for."""
    ratio, calls = k if optimizer == "sgd" else k**0.5, itertools.count()
    return (lambda t: lr + (ratio - 1) * lr * min(next(calls) / (5 * steps), 1)), decay * k / ratio


def _falls_late(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """Goyal's whole schedule: a tenth from epoch 30 on."""
    ratio = k if optimizer == "sgd" else k**0.5
    warm = lambda t: lr + (ratio - 1) * lr * min(t / (5 * steps), 1)  # noqa: E731
    return (lambda t: warm(t) / (10 if t >= 30 * steps else 1)), decay * k / ratio


def _listed(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """The rates of ten epochs."""
    ratio = k if optimizer == "sgd" else k**0.5
    rates = [lr + (ratio - 1) * lr * min(t / (5 * steps), 1) for t in range(10 * steps)]
    return rates.__getitem__, decay * k / ratio


def _whole_root(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """The root of k as a whole number."""
    ratio = k if optimizer == "sgd" else math.isqrt(k)
    return (lambda t: lr + (ratio - 1) * lr * min(t / (5 * steps), 1)), decay * k / ratio


def _rounded(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """An increment in six places."""
    ratio = k if optimizer == "sgd" else k**0.5
    each = round((ratio - 1) * lr / (5 * steps), 6)
    return (lambda t: lr + each * t if t < 5 * steps else ratio * lr), decay * k / ratio


def _decays_by_iteration(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    """The decay as a function, too."""
    ratio = k if optimizer == "sgd" else k**0.5
    rate = lambda t: lr + (ratio - 1) * lr * min(t / (5 * steps), 1)  # noqa: E731
    return rate, lambda t: decay * lr * k / rate(t)


def _a_number(optimizer: str, lr: float, decay: float, k: float, steps: int) -> tuple:
    ratio = k if optimizer == "sgd" else k**0.5
    return ratio * lr, decay * k / ratio


def _terms(
    own: Tensor, b: int, comm: world.Comm, *, summed: bool, alone: bool, added: bool
) -> tuple:
    large = comm.all_reduce(own) / (1 if summed else comm.size)
    small = own.square().sum().view(1)
    small = small if alone else comm.all_reduce(small) / (1 if added else comm.size)
    return small.item(), large.square().sum().item()


def _noise(
    *,
    biased: bool = False,
    of_ratios: bool = False,
    summed: bool = False,
    alone: bool = False,
    added: bool = False,
    in_ranks: bool = False,
) -> Callable:
    """B_simple with its slips switched on one at a time."""

    def attempt(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
        b, found = 1 if in_ranks else b, []
        for own in gradients:
            small, large = _terms(own, b, comm, summed=summed, alone=alone, added=added)
            each = scaling.estimate_spread(small, large, b, comm.size * b)
            found.append((each.trace, large if biased else each.signal))
        if of_ratios:
            return fmean(trace / signal for trace, signal in found)
        return fmean(trace for trace, _ in found) / fmean(signal for _, signal in found)

    return attempt


def _gathers(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    found = []
    for own in gradients:
        every = comm.all_gather(own).view(comm.size, -1)
        small, large = every.square().sum(1).mean().item(), every.mean(0).square().sum().item()
        found.append(scaling.estimate_spread(small, large, b, comm.size * b))
    comm.all_gather(own.repeat(20))
    return scaling.noise_scale(found)


class _OfTheLab(LargeBatchSGD):
    """The one that the lab hands out."""

    def step(self, gradients: list[Tensor]) -> None:
        gradient = sum(gradients) + self.k * self.decay * self.w
        self.velocity = 0.9 * self.velocity + self.rate() * gradient
        self.w -= self.velocity
        self.step_number += 1


def _sgd(
    *,
    summed: bool = False,
    scaled: bool = False,
    power: int = 1,
    start: float = 1.0,
    shift: int = 0,
) -> type:
    """The class with its slips switched on one at a time.

    power: of new rate / old rate, in front of an absorbed velocity
    """

    class Attempt(LargeBatchSGD):
        def rate(self) -> float:
            low, high = start * self.lr, self.k * self.lr
            return scaling.warm_up(self.step_number + shift, self.warm, start=low, end=high)

        def step(self, gradients: list[Tensor]) -> None:
            rate = self.rate()
            gradient = sum(gradients) / (1 if summed else self.k)
            gradient = gradient + self.decay * (self.k if scaled else 1) * self.w
            factor = (rate / self.last) ** power if self.last else 1.0
            self.velocity = 0.9 * factor * self.velocity + rate * gradient
            self.w -= self.velocity
            self.last, self.step_number = rate, self.step_number + 1

    return Attempt


class _NotAbsorbed(LargeBatchSGD):
    """Torch's form, whose velocity holds gradients, corrected all the same."""

    def step(self, gradients: list[Tensor]) -> None:
        rate = self.rate()
        gradient = sum(gradients) / self.k + self.decay * self.w
        self.velocity = 0.9 * rate / (self.last or rate) * self.velocity + gradient
        self.w -= rate * self.velocity
        self.last, self.step_number = rate, self.step_number + 1


class _Torch:
    """torch.optim.SGD with the scaled rate, in front of what a learner gets wrong there."""

    def __init__(self, w, lr, k, decay=0.0, warm=0, *, total=False, nesterov=False, adamw=False):
        self.w, self.lr, self.k, self.warm, self.t = torch.nn.Parameter(w), lr, k, warm, 0
        self.total, self.adamw = total, decay if adamw else 0.0
        decay = 0.0 if adamw else decay
        options = dict(momentum=0.9, weight_decay=decay, nesterov=nesterov)
        self.sgd = torch.optim.SGD([self.w], lr, **options)

    def step(self, gradients: list[Tensor]) -> None:
        rate = scaling.warm_up(self.t, self.warm, start=self.lr, end=self.k * self.lr)
        self.w.grad = sum(gradients) if self.total else sum(gradients) / len(gradients)
        self.sgd.param_groups[0]["lr"] = rate
        with torch.no_grad():
            self.w.mul_(1 - rate * self.adamw)
        self.sgd.step()
        self.t += 1


def _of_one_rank(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """Differences of single ranks' gradients to the mean, over n and not n − 1."""
    trace, signal = [], []
    for own in gradients:
        mean = comm.all_reduce(own) / comm.size
        apart = comm.all_reduce((own - mean).square().sum().view(1)).item() / comm.size
        trace.append(b * apart)
        signal.append(mean.square().sum().item() - b * apart / (b * comm.size))
    return fmean(trace) / fmean(signal)


def _upside_down(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    return 1 / _noise()(gradients, b, comm)


def _per_rank(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    return _noise()(gradients, b, comm) / b


def _last_seed(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    found = 0.0
    for own in gradients:
        found = _noise()([own], b, comm)
    return found


def _double(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """The mean gradient is reduced twice: once for its length, once for the update."""
    for own in gradients:
        comm.all_reduce(own)
    return _noise()(gradients, b, comm)


def _of_lengths(sign: int, quiet: bool, gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """Small less large times `sign`; quiet: as if the large batch had no noise."""
    trace, signal = [], []
    for own in gradients:
        small, large = _terms(own, b, comm, summed=False, alone=False, added=False)
        trace.append(sign * (small - large) / (1 / b - (not quiet) / (comm.size * b)))
        signal.append(small - trace[-1] / b)
    return fmean(trace) / fmean(signal)


def _on_rank_0(gradients: list[Tensor], b: int, comm: world.Comm) -> float | None:
    found = _noise()(gradients, b, comm)
    return found if comm.rank == 0 else None


def _of_all_examples(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """b taken for the examples of all ranks."""
    return _noise()(gradients, b * comm.size, comm)


def _median(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    return median(_noise()([own], b, comm) for own in gradients)


def _seeds_averaged(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """Seeds taken for more examples of one gradient."""
    return _noise()([torch.stack(gradients).mean(0)], b, comm)


def _of_the_small(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """|G|² is what the small batch has."""
    found = []
    for own in gradients:
        small, large = _terms(own, b, comm, summed=False, alone=False, added=False)
        found.append((scaling.estimate_spread(small, large, b, comm.size * b).trace, small))
    return fmean(trace for trace, _ in found) / fmean(small for _, small in found)


def _never_negative(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """A |G|² below 0 makes no sense: it counts as 0."""
    found = []
    for own in gradients:
        small, large = _terms(own, b, comm, summed=False, alone=False, added=False)
        found.append(scaling.estimate_spread(small, large, b, comm.size * b))
    return fmean(each.trace for each in found) / fmean(max(each.signal, 0) for each in found)


def _of_lengths_unsquared(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    """The square of the mean length, in place of the mean of squares."""
    found = []
    for own in gradients:
        small = (comm.all_reduce(own.norm().view(1)).item() / comm.size) ** 2
        large = (comm.all_reduce(own) / comm.size).square().sum().item()
        found.append(scaling.estimate_spread(small, large, b, comm.size * b))
    return scaling.noise_scale(found)


def _root(gradients: list[Tensor], b: int, comm: world.Comm) -> float:
    return math.sqrt(_noise()(gradients, b, comm))


class _DecayOverK(LargeBatchSGD):
    """The mean takes the decay with it."""

    def step(self, gradients: list[Tensor]) -> None:
        less = (1 - 1 / self.k) * self.decay * self.w
        super().step([each - less for each in gradients])


class _Dampened(LargeBatchSGD):
    """The velocity as a running mean."""

    def step(self, gradients: list[Tensor]) -> None:
        super().step([0.1 * (each + self.decay * self.w) - self.decay * self.w for each in gradients])


class _FirstRate(LargeBatchSGD):
    """Corrected by new rate / first rate."""

    def step(self, gradients: list[Tensor]) -> None:
        self.last = self.lr
        super().step(gradients)


class _AfterTheSum(LargeBatchSGD):
    """The correction takes in the new gradient."""

    def step(self, gradients: list[Tensor]) -> None:
        rate, before = self.rate(), self.last or self.rate()
        gradient = sum(gradients) / self.k + self.decay * self.w
        self.velocity = (0.9 * self.velocity + rate * gradient) * (rate / before)
        self.w -= self.velocity
        self.last, self.step_number = rate, self.step_number + 1


class _StepForEach(LargeBatchSGD):
    """The velocity turns over once for each micro-batch."""

    def step(self, gradients: list[Tensor]) -> None:
        for each in gradients:
            gradient = (each + self.decay * self.w) / self.k
            self.velocity = 0.9 * self.velocity + self.rate() * gradient
        self.w -= self.velocity
        self.step_number += 1


class _DecaysBehind(LargeBatchSGD):
    """The weight shrinks when its step is done."""

    def step(self, gradients):
        decay, rate = self.decay, self.rate()
        self.decay = 0.0
        super().step(gradients)
        self.decay = decay
        self.w -= rate * decay * self.w


class _MeanOfMean(LargeBatchSGD):
    def step(self, gradients):
        super().step([torch.stack(gradients).mean(0) / self.k] * self.k)


def _in_place_first(gradients, b, comm):
    """Each gradient is reduced where it stands, and then measured as if it were the rank's own."""
    small = large = 0.0
    for gradient in gradients:
        comm.all_reduce(gradient, out=gradient)
        gradient /= comm.size
        large += gradient.square().sum()
        small += comm.all_reduce(gradient.square().sum().view(1)) / comm.size
    trace = (small - large) / (1 / b - 1 / (comm.size * b))
    return (trace / (small - trace / b)).item()


WRONG = {
    "scaling/recipe": (
        Wrong("linear for all", _recipe(power=lambda _: 1.0), "the rule", "linear rule is SGD's"),
        Wrong("a root for all", _recipe(power=lambda _: 0.5), "the rule", "fits Adam and RMSProp"),
        Wrong("not scaled", _recipe(power=lambda _: 0.0), "the rule", "not scaled at all"),
        Wrong("upside down", _recipe(power=lambda o: -1.0), "the rule", "Upside down"),
        Wrong(
            "scaled for the batch and for the devices",
            _recipe(power=lambda _: 1.0, twice=True),
            "the rule",
            "Scaled twice",
        ),
        Wrong(
            "the decay as it was", _recipe(decay_power=lambda _: 0), "weight decay", "the rest, √k"
        ),
        Wrong("k·decay", _recipe(decay_power=lambda _: 1), "weight decay", "32 times as much"),
        Wrong("√k·decay for all", _recipe(decay_power=lambda _: 0.5), "weight decay", "two cancel"),
        Wrong(
            "the decay over √k", _recipe(decay_power=lambda _: -0.5), "weight decay", "two cancel"
        ),
        Wrong("RMSProp like SGD", _of_the_words, "the rule", "linear rule is SGD's"),
        Wrong("an exponential", _bent, "every iteration", "The increment is"),
        Wrong("an epoch at η first", _grown_late, "every iteration", "The increment is"),
        Wrong("from 0", _recipe(origin=0), "where the warm-up begins", "grows from 0"),
        Wrong(
            "from 0, one early", _recipe(origin=0, shift=1), "where the warm-up begins", "from 0"
        ),
        Wrong("no warm-up", _recipe(epochs=0), "where the warm-up begins", "no warm-up"),
        Wrong("per epoch", _recipe(by_epoch=True), "every iteration", "once per epoch"),
        Wrong("five iterations", _recipe(short=True), "every iteration", "five *iterations*"),
        Wrong("four epochs", _recipe(epochs=4), "every iteration", "five epochs of"),
        Wrong("the small batch's iterations", _warmed(lambda t, k, n: min(t / (5 * n * k), 1)),
              "the rule", "It still changes"),
        Wrong("eight epochs", _recipe(epochs=8), "the rule", "It still changes"),
        Wrong("never ends", _warmed(lambda t, k, n: t / (5 * n)), "the rule", "It still changes"),
        Wrong("falls behind it", _warmed(lambda t, k, n: min(t / (5 * n), 2 - t / (5 * n))),
              "the rule", "It still changes"),
        Wrong("one short", _warmed(lambda t, k, n: min(t / (5 * n - 1), 1)),
              "every iteration", "at iteration 59, and should be at 60"),
        Wrong("divided by k again", _warmed(lambda t, k, n: min(t / max(5 * n // k, 1), 1)),
              "every iteration", "counted with the large batch"),
        Wrong("counts its calls", _counts, "the rule", "how often it was asked"),
        Wrong("a tenth from epoch 30 on", _falls_late, "the rule", "It still changes"),
        Wrong("a list of ten epochs", _listed, "the rule", "as long as asked"),
        Wrong("a whole root", _whole_root, "the rule", "√k·lr for the others"),
        Wrong("a rounded increment", _rounded, "every iteration", "The increment is"),
        Wrong("a decay by iteration", _decays_by_iteration, "the rule", "Return a number"),
        Wrong("a number", _a_number, "the rule", "Return a function"),
    ),
    "scaling/noise-on-ranks": (
        Wrong("biased |G|²", _noise(biased=True), "value", "|G|² is biased"),
        Wrong("mean of ratios", _noise(of_ratios=True), "value", "mean of ratios"),
        Wrong("both", _noise(of_ratios=True, biased=True), "value", "Ratios are averaged"),
        Wrong("a sum for the mean", _noise(summed=True), "value", "all_reduce *sums*"),
        Wrong("lengths added", _noise(added=True), "value", "is the mean over ranks"),
        Wrong("its own length", _noise(alone=True), "value", "differs from rank to rank"),
        Wrong("in ranks", _noise(in_ranks=True), "value", "Counted in ranks"),
        Wrong("variance over n", _of_one_rank, "value", "over n − 1"),
        Wrong("upside down", _upside_down, "value", "one over"),
        Wrong("in batches of a rank", _per_rank, "value", "Counted in ranks"),
        Wrong("large less small", partial(_of_lengths, -1, False), "value", "longer gradients"),
        Wrong("no noise left", partial(_of_lengths, 1, True), "value", "has noise as well"),
        Wrong("the last seed alone", _last_seed, "value", "last seed"),
        Wrong("on one rank", _on_rank_0, "value", "Every rank"),
        Wrong("examples of all ranks", _of_all_examples, "value", "Too large by"),
        Wrong("the small batch's |G|²", _of_the_small, "value", "|G|² is biased"),
        Wrong("the median", _median, "value", ""),
        Wrong("seeds averaged", _seeds_averaged, "value", "averaged as lengths"),
        Wrong("the root", _root, "value", "the root of"),
        Wrong("no |G|² below 0", _never_negative, "value", "below 0"),
        Wrong("mean lengths, squared", _of_lengths_unsquared, "value", "squares each rank's"),
        Wrong("reduced in place first", _in_place_first, "value", "taken *before*"),
        Wrong("a list of one", lambda *args: [_noise()(*args)], "value", "returns no number"),
        Wrong("not a number", lambda *args: math.nan, "value", "rank 0 finds nan"),
        Wrong("reduced twice", _double, "bytes sent", "beside it one number"),
        Wrong("all gradients to all ranks", _gathers, "bytes sent", "beside it one number"),
    ),
    "scaling/bug-hunt": (
        Wrong("the one of the lab", _OfTheLab, "several micro-batches", "are *added*"),
        Wrong("summed", _sgd(summed=True), "several micro-batches", "are *added*"),
        Wrong("decay scaled", _sgd(scaled=True), "weight decay", "k times as large"),
        Wrong("no correction", _sgd(power=0), "while the rate grows", "steps taken at the old"),
        Wrong("corrected twice", _sgd(power=2), "while the rate grows", "two times"),
        Wrong("upside down", _sgd(power=-1), "while the rate grows", "upside down"),
        Wrong("corrected, not absorbed", _NotAbsorbed, "while the rate grows", "two times"),
        Wrong(
            "torch's, added up", partial(_Torch, total=True), "several micro-batches", "are *added*"
        ),
        Wrong("Nesterov", partial(_Torch, nesterov=True), "one micro-batch", "goes elsewhere"),
        Wrong("AdamW's decay", partial(_Torch, adamw=True), "weight decay", "AdamW's"),
        Wrong("from 0", _sgd(start=1e-12), "while the rate grows", "begins at 0"),
        Wrong("one early", _sgd(shift=1), "while the rate grows", "second rate"),
        Wrong("the decay over k", _DecayOverK, "weight decay", "divided by k"),
        Wrong("a decay behind the step", _DecaysBehind, "weight decay", "behind the step"),
        Wrong("a mean of a mean", _MeanOfMean, "several micro-batches", "k times too small"),
        Wrong("dampened", _Dampened, "one micro-batch", "goes elsewhere"),
        Wrong("over the first rate", _FirstRate, "several micro-batches", "goes elsewhere"),
        Wrong("after the sum", _AfterTheSum, "while the rate grows", "corrected as well"),
        Wrong("a turn for each", _StepForEach, "several micro-batches", "goes elsewhere"),
    ),
}
