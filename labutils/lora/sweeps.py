"""Recorded sweeps of fine-tuning over learning rates, LoRA ranks and seeds."""

import csv
import math
import statistics

from labutils.config import DATA


class Sweep:
    """What fine-tuning at each learning rate led to, seed by seed; `made`: how it was recorded."""

    def __init__(self, rows: list[dict[str, str]], made: str) -> None:
        self.rows, self.made = rows, made

    def losses(self, of: str = "loss", **wanted: str) -> tuple[list[float], list[list[float]]]:
        """The learning rates, and for each seed the held-out loss at each of them, or another
        column `of` the table; of all layers unless a `pattern` is wanted."""
        wanted = {"pattern": "*"} | wanted
        rows = [row for row in self.rows if all(row[key] == v for key, v in wanted.items())]
        rates = sorted({float(row["lr"]) for row in rows})
        seeds = sorted({row["seed"] for row in rows})
        found = {(row["seed"], float(row["lr"])): float(row[of]) for row in rows}
        return rates, [[found[seed, lr] for lr in rates] for seed in seeds]

    def best(self, **wanted: str) -> tuple[float, float, float]:
        """The learning rate with the lowest mean loss, that loss, and its standard error over the
        seeds."""
        rates, losses = self.losses(**wanted)
        found = [
            (lr, statistics.mean(each), statistics.stdev(each) / math.sqrt(len(each)))
            for lr, each in zip(rates, zip(*losses, strict=True), strict=True)
        ]
        return min(found, key=lambda point: point[1])

    def traded(self, **wanted: str) -> tuple[list[float], list[float]]:
        """Nats of the old task forgotten and nats learned, against the model before, at each
        learning rate up to the best; means over the seeds."""
        best = self.best(**wanted)[0]
        found = []
        for of, sign in (("old", 1), ("loss", -1)):
            _, ((before,),) = self.losses(of, rank="none")
            rates, losses = self.losses(of, **wanted)
            means = map(statistics.mean, zip(*losses, strict=True))
            points = zip(rates, means, strict=True)
            found.append([sign * (mean - before) for lr, mean in points if lr <= best])
        return found[0], found[1]

    def trained(self, pattern: str) -> int:
        """Numbers that were trained where layers of this pattern had adapters."""
        return next(int(row["trained"]) for row in self.rows if row["pattern"] == pattern)


def sweep(task: str) -> Sweep:
    """The sweep of a task that tools/lora_sweep.py records: "addition", from base 10 to base 8, or
    "text", from Python's reference to its source code, where `old` is the reference's loss."""
    with open(DATA / f"lora_{task}.csv", encoding="utf-8") as file:
        made = file.readline().removeprefix("# ").strip()
        return Sweep(list(csv.DictReader(file)), made)
