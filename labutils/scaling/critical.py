"""Steps to a target against the batch size: S = Smin + Emin / B, and the critical batch size."""

from collections.abc import Mapping
from typing import NamedTuple

from labutils import units


class Hyperbola(NamedTuple):
    """S = Smin + Emin / B: no batch needs fewer steps than `smin`, none fewer examples than `emin`.

    Source: S. McCandlish et al., 1812.06162, where it reads (S/Smin − 1)(E/Emin − 1) = 1.
    """

    smin: float
    emin: float

    @property
    def critical(self) -> float:
        """The critical batch size, in examples: it takes 2·Smin steps and 2·Emin examples."""
        return self.emin / self.smin

    def steps(self, batch: float) -> float:
        """Steps to the target with this batch size.

        >>> fewest_steps, fewest_examples, batch = 100, 6400, 16
        >>> steps = Hyperbola(fewest_steps, fewest_examples).steps(batch)
        >>> steps == fewest_steps + fewest_examples / batch  # by the hyperbola
        True
        """
        return self.smin + self.emin / units.positive(batch, "batch")

    def seconds(self, batch: float, devices: float, *, example: float, reduce: float) -> float:
        """Time to the target where `devices` share a batch: `example` seconds of one for each
        example, and `reduce` for the all-reduce of a step."""
        devices = units.positive(devices, "devices")
        example = units.positive(example, "example", or_zero=True)
        reduce = units.positive(reduce, "reduce", or_zero=True)
        return self.steps(batch) * (example * batch / devices + reduce * (devices > 1))


def fit(steps: Mapping[float, float]) -> Hyperbola:
    """The hyperbola nearest to the steps that each batch size took, in relative distance.

    >>> fit({1: 110.0, 10: 20.0, 100: 11.0})
    Hyperbola(smin=10.0, emin=100.0)

    Raises ValueError for fewer than two batch sizes, and where steps fit no hyperbola.
    """
    units.instance(steps, Mapping, "fit")
    if len(steps) < 2:
        raise ValueError(
            f"{len(steps)} batch sizes fix no hyperbola: give the steps of two or more"
        )
    said, positive = "steps of a batch of", units.positive
    pairs = [(positive(b, "batch"), positive(s, f"{said} {b}")) for b, s in steps.items()]
    # Divided by S: 1 = Smin·(1/S) + Emin·(1/(B·S)), two columns and the normal equations.
    columns = [(1 / s, 1 / (b * s)) for b, s in pairs]
    aa, ab, bb = (sum(c[i] * c[j] for c in columns) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b, det = sum(c[0] for c in columns), sum(c[1] for c in columns), aa * bb - ab * ab
    found = Hyperbola(round((a * bb - b * ab) / det, 9), round((b * aa - a * ab) / det, 9))
    if min(found) <= 0:
        fall = "steps fall as the batch grows, and by less than it grows"
        raise ValueError(f"{found} is of no hyperbola: {fall}; measure batches farther apart")
    return found
