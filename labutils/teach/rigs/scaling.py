"""Two small tasks on real data, the next character of a text and handwritten digits; the rows of
data/scaling_sweep.csv, which tools/scaling_sweep.py writes: losses, errors and steps for each
optimizer, batch size, rule and seed; and Goyal's published errors beside them."""

import csv
import functools
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, stdev
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from labutils.config import DATA
from labutils.scaling import POWERS, Hyperbola, Spread, fit, noise_scale
from labutils.teach.rigs import corpus
from labutils.teach.rigs.copies import Network

CONTEXT, VOCAB = 8, 64
CHARACTERS = Network((8 * CONTEXT, 64, VOCAB), "tanh", tokens=VOCAB, embed=8)
"""8,832 parameters: the next character from the last eight, of 64 kinds."""

Examples = tuple[Tensor, Tensor]
Norm = bool | Literal[""]


def characters() -> tuple[Examples, Examples]:
    """Inputs int64 [n, 8] and targets [n] of the text, and 1,024 held out from its last tenth.

    The 63 most frequent characters keep a token each, the others share one.
    """
    text = corpus.encoded("topics")
    kept = torch.bincount(text, minlength=len(corpus.ALPHABET)).argsort(
        descending=True, stable=True
    )
    renamed = torch.full((len(corpus.ALPHABET),), VOCAB - 1)
    renamed[kept[: VOCAB - 1]] = torch.arange(VOCAB - 1)
    windows = renamed[text].unfold(0, CONTEXT + 1, 1)
    cut = int(0.9 * len(windows))
    held_out = windows[_spread_out(cut + CONTEXT, len(windows) - 1)]
    train = windows[:cut]
    return (train[:, :-1], train[:, -1]), (held_out[:, :-1], held_out[:, -1])


def _spread_out(first: int, last: int, count: int = 1024) -> Tensor:
    """Places from first to last: `torch.linspace` in fp32, which rounds another way where a CPU has
    other vector instructions, and one place of 1,024 moves a loss by 0.002."""
    step, i = float(torch.tensor((last - first) / (count - 1))), torch.arange(count).double()
    from_both_ends = torch.where(i < count / 2, first + step * i, last - step * (count - 1 - i))
    return from_both_ends.float().long()


def digits_network(norm: bool = True) -> Network:
    """A network for digits, with a LayerNorm before each activation or without."""
    return Network((64, 32, 32, 32, 10), "relu", norm)


def digits() -> tuple[Examples, Examples]:
    """1,437 images of handwritten digits, float32 [n, 64], with their classes, and 360 held out:
    scikit-learn's, which come with the package. A pixel is taken less its mean, over the standard
    deviation of all pixels.

    Raises ImportError, with the remedy, where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        remedy = 'pip install -e ".[real]"'
        raise ImportError(f"the digits come with scikit-learn: {remedy}") from error
    images, classes = load_digits(return_X_y=True)
    shuffled = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[shuffled]
    x = (x - x[:1437].mean(0)) / x[:1437].std()
    y = torch.tensor(classes, dtype=torch.long)[shuffled]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


class Mean(NamedTuple):
    """A mean over seeds and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def mean(values: Sequence[float]) -> Mean:
    """The mean of some seeds and its standard error; infinite where one has diverged.

    >>> mean([1.0, 2.0, 3.0]).value
    2.0
    """
    if not all(map(math.isfinite, values)):
        return Mean(math.inf, math.inf)
    return Mean(fmean(values), stdev(values) / math.sqrt(len(values)))


@functools.cache
def _rows() -> tuple[dict[str, str], ...]:
    with open(DATA / "scaling_sweep.csv", encoding="utf-8") as file:
        return tuple(csv.DictReader(file))


def swept(part: str, by: str = "batch", less: str = "", **wanted: object) -> dict[float, Mean]:
    """Means over seeds of a part of the sweep, by a column of numbers.

    part: "base", "finer", "best", "rules", "betas", "widths", "decay" (loss in nats), "warm-up",
        "rates" (error in %), "steps" (to a target)
    less: a rule, whose value with the same seed is taken off each
    wanted: other columns: optimizer, norm, batch, rule, lr, target (of "widths" the width,
        of "decay" the decay)
    """
    values = _values(part, by, wanted)
    if less:
        others = _values(part, by, {**wanted, "rule": less})
        for key, each in values.items():
            values[key] = [a - b for a, b in zip(each, others[key], strict=True)]
    return {key: mean(each) for key, each in sorted(values.items())}


def _values(part: str, by: str, wanted: dict[str, object]) -> dict[float, list[float]]:
    """What was recorded, in the order of the seeds."""
    values = defaultdict(list)
    for row in _rows():
        if row["part"] == part and all(row[key] == str(value) for key, value in wanted.items()):
            values[float(row[by])].append(float(row["value"]))
    if not values:
        raise ValueError(f"the sweep has no rows of {part!r} with {wanted}")
    return values


def lowest(found: Mapping[float, tuple[float, float]]) -> float:
    """The rate, or the decay, at the bottom of a parabola over its logarithm, through the smallest
    mean and the two next to it.

    found: a mean and its error at each rate

    Raises ValueError if the smallest is the first or the last.

    >>> lowest({1.0: (2.0, 0.1), 2.0: (1.0, 0.1), 4.0: (2.0, 0.1)})
    2.0
    """
    rates, losses = list(found), [value for value, _ in found.values()]
    at = losses.index(min(losses))
    if not 0 < at < len(losses) - 1:
        raise ValueError(f"the best rate, {rates[at]:g}, is the first or the last that was tried")
    left, middle, right = losses[at - 1 : at + 2]
    steps = (left - right) / 2 / (left - 2 * middle + right)
    return rates[at] * (rates[at + 1] / rates[at]) ** steps


def best_decays(batch: int, norm: bool = False) -> dict[float, tuple[float, Mean]]:
    """By learning rate, AdamW's best weight decay, at the bottom of a parabola, and the smallest
    mean loss of those that were tried; norm: of the network with a LayerNorm."""
    found = {}
    for lr in swept("decay", "lr", norm=norm, batch=batch):
        losses = swept("decay", "target", norm=norm, batch=batch, lr=lr)
        found[lr] = lowest(losses), min(losses.values())
    return found


def grows(optimizer: str, rule: str = "") -> float:
    """How many times the best learning rate grows from a batch of 16 to 512, by the finer record;
    rule: "corrected" for an RMSProp that is corrected for its start at 0."""
    small, large = (
        lowest(swept("finer", "lr", optimizer=optimizer, rule=rule, batch=batch))
        for batch in (16, 512)
    )
    return large / small


def best_rates(optimizer: str) -> dict[int, tuple[float, Mean]]:
    """By batch size, the best learning rate, at the bottom of a parabola, and the smallest mean
    loss of those that were tried."""
    found = {16: swept("base", "lr", optimizer=optimizer)}
    for batch in map(int, swept("best", optimizer=optimizer)):
        found[batch] = swept("best", "lr", optimizer=optimizer, batch=batch)
    return {batch: (lowest(rates), min(rates.values())) for batch, rates in found.items()}


def fewest_steps(optimizer: str, target: float, norm: Norm = "") -> dict[int, tuple[float, Mean]]:
    """By batch size, the learning rate that reaches a loss in the fewest steps, and these; of
    characters, or of digits with or without a `norm`."""
    found = {}
    steps = functools.partial(swept, "steps", optimizer=optimizer, target=target, norm=norm)
    for batch in steps():
        rates = steps("lr", batch=int(batch))
        found[int(batch)] = min(rates.items(), key=lambda item: item[1].value)
    return found


def hyperbola(optimizer: str, target: float, norm: Norm = "") -> Hyperbola:
    """The hyperbola through the fewest steps of each batch size."""
    runs = fewest_steps(optimizer, target, norm)
    return fit({batch: steps.value for batch, (_, steps) in runs.items()})


def steps_to(target: float, steps: Sequence[int], losses: Sequence[float]) -> float:
    """The step at which a curve first reaches `target`, between its points along a straight line;
    infinite where it never does.

    >>> steps_to(2.5, [0, 10, 20], [4.0, 3.0, 2.0])
    15.0
    """
    for (s0, l0), (s1, l1) in pairwise(zip(steps, losses, strict=True)):
        if l1 <= target < l0:
            return s0 + (s1 - s0) * (l0 - target) / (l0 - l1)
    return math.inf


Band = tuple[list[float], list[list[float]]]


def rule_curves(optimizer: str, most: int = 1024) -> dict[str, Band]:
    """For each rule, and for the best rates, the batch sizes up to `most`, and the mean losses,
    between two standard errors less and two more."""
    ways: dict[str, Mapping[float, Mean]] = {
        rule.replace("none", "unscaled"): swept("rules", optimizer=optimizer, rule=rule)
        for rule in POWERS
    }
    ways["best rate"] = {float(b): mean for b, (_, mean) in best_rates(optimizer).items()}
    found = {}
    for name, means in ways.items():
        kept = {b: m for b, m in means.items() if b <= most}
        band = [[value + i * error for value, error in kept.values()] for i in (-2, 0, 2)]
        found[name] = list(kept), band
    return found


def spreads(norm: Norm = "") -> dict[int, tuple[float, list[Spread]]]:
    """By step of a run of SGD, the mean held-out loss, and tr Σ and |G|² for each seed; of
    characters, or of digits with or without a `norm`."""
    of: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in _rows():
        parts = ("noise loss", "noise trace", "noise signal")
        if row["part"] in parts and row["norm"] == str(norm):
            of[int(row["target"])][row["part"]].append(float(row["value"]))
    return {
        step: (
            fmean(each["noise loss"]),
            list(map(Spread, each["noise trace"], each["noise signal"])),
        )
        for step, each in sorted(of.items())
    }


def critical_and_simple(target: float, norm: Norm = "") -> tuple[float, float]:
    """B_crit of SGD for a target loss, and B_simple as it was measured nearest to that loss; of
    characters, or of digits with or without a `norm`."""
    near = min(spreads(norm).values(), key=lambda each: abs(each[0] - target))
    return hyperbola("sgd", target, norm).critical, noise_scale(near[1])


def goyal(table: str) -> dict[str, Mean]:
    """Published top-1 errors of ResNet-50 on ImageNet, in %, by their inputs: Goyal's "Table 1",
    "Table 2(a)", with the standard deviation of five runs, or the curve of "Fig 3" by batch size,
    without."""
    with open(DATA / "paper_results.csv", encoding="utf-8") as file:
        rows = [
            row
            for row in csv.DictReader(file)
            if row["source"].startswith("Goyal") and row["source"].endswith(table)
        ]
    if table == "Fig 3":
        found = re.findall(r"(\d+)(k?) ([\d.]+)", rows[0]["value"])
        return {str(int(n) * (1024 if k else 1)): Mean(float(of), 0.0) for n, k, of in found}
    numbers = {row["inputs"]: row["value"].split(" ± ") for row in rows}
    return {inputs: Mean(*map(float, pair)) for inputs, pair in numbers.items()}
