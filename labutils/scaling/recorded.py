"""The rows of data/scaling_sweep.csv, which tools/scaling_sweep.py writes: losses, errors and steps
for each optimizer, batch size, rule and seed; and Goyal's published errors beside them."""

import csv
import functools
import math
import re
from collections import defaultdict
from statistics import fmean, stdev
from typing import NamedTuple

from labutils.config import DATA
from labutils.scaling.critical import Hyperbola, fit
from labutils.scaling.noise import Spread
from labutils.scaling.rules import POWERS


class Mean(NamedTuple):
    """A mean over seeds and its standard error."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def mean(values: list[float]) -> Mean:
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


def swept(part: str, by: str = "batch", **wanted: str | int) -> dict[float, Mean]:
    """Means over seeds of a part of the sweep, by a column of numbers.

    part: "base", "rules" (loss in nats), "warm-up" (error in %), "steps" (to a target)
    wanted: other columns: optimizer, norm, batch, rule, lr, target
    """
    values = defaultdict(list)
    for row in _rows():
        if row["part"] == part and all(row[key] == str(value) for key, value in wanted.items()):
            values[float(row[by])].append(float(row["value"]))
    if not values:
        raise ValueError(f"the sweep has no rows of {part!r} with {wanted}")
    return {key: mean(each) for key, each in sorted(values.items())}


def fewest_steps(optimizer: str, target: float) -> dict[int, tuple[float, Mean]]:
    """By batch size, the learning rate that reaches a loss in the fewest steps, and these."""
    found = {}
    for batch in swept("steps", optimizer=optimizer, target=target):
        rates = swept("steps", "lr", optimizer=optimizer, target=target, batch=int(batch))
        found[int(batch)] = min(rates.items(), key=lambda item: item[1].value)
    return found


def hyperbola(optimizer: str, target: float) -> Hyperbola:
    """The hyperbola through the fewest steps of each batch size."""
    runs = fewest_steps(optimizer, target)
    return fit({batch: steps.value for batch, (_, steps) in runs.items()})


Band = tuple[list[float], list[list[float]]]


def rule_curves(optimizer: str, most: int = 1024) -> dict[str, Band]:
    """For each rule the batch sizes up to `most`, and the mean losses, between two standard errors
    less and two more."""
    found = {}
    for rule in POWERS:
        kept = {
            b: m for b, m in swept("rules", optimizer=optimizer, rule=rule).items() if b <= most
        }
        band = [[value + i * error for value, error in kept.values()] for i in (-2, 0, 2)]
        found[rule.replace("none", "unscaled")] = list(kept), band
    return found


def spreads() -> dict[int, tuple[float, list[Spread]]]:
    """By step of a run of SGD, the mean held-out loss, and tr Σ and |G|² for each seed."""
    of = defaultdict(lambda: defaultdict(list))
    for row in _rows():
        if row["part"] in ("noise loss", "noise trace", "noise signal"):
            of[int(row["target"])][row["part"]].append(float(row["value"]))
    return {
        step: (
            fmean(each["noise loss"]),
            list(map(Spread, each["noise trace"], each["noise signal"])),
        )
        for step, each in sorted(of.items())
    }


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
