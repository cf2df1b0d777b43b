"""What is too long for a cell of lab 15b: training a GPT of width 512 that meets an outlier, and
gradients in NVFP4, averaged over many batches and over more. Writes labutils/data/fp8_outlier.csv,
fp8_averaged.csv and fp8_longer.csv, whose first line says how they were made.

    python tools/fp8_sweep.py            all three, some minutes
    python tools/fp8_sweep.py outlier    the first alone
"""

import copy
import csv
import datetime
import platform
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labutils import floats, precision, quantization
from labutils.config import DATA
from labutils.quantization import F8_E4M3, SCHEMES, Scheme
from labutils.teach import rigs

SEEDS, STEPS, RATE = range(3), 60, 5e-4
INT8, TILES = SCHEMES["int8"], Scheme(torch.int8, torch.int8, "tiles")
TRAINED: list[tuple[str, Scheme | None, dict[str, float]]] = [
    ("fp32", None, {}), ("no gradient for the blocks", SCHEMES["unscaled"], {"share": 2.0**-12}),
    ("int8, one scale", INT8, {}), ("int8, one scale", INT8, {"k": 1e2}),
    ("int8, tiles", TILES, {"k": 1e2}),
    ("e4m3, one scale", Scheme(F8_E4M3, F8_E4M3), {"k": 1e5}),
    ("e4m3, tiles", SCHEMES["tiles"], {"k": 1e5}),
]  # fmt: skip

COUNTS = [1, 4, 16, 64]
GRADIENTS, WEIGHTS, INPUTS = ("grad",), ("weight",), ("x",)
ROUNDED: dict[str, dict[str, Any]] = {  # to the nearest number but for what is drawn
    "gradients, nearest": dict(operands=GRADIENTS),
    "gradients, stochastic": dict(operands=GRADIENTS, drawn=GRADIENTS),
    "all, nearest": {},
    "all, stochastic": dict(drawn=GRADIENTS),
    "all, stochastic, rotated": dict(drawn=GRADIENTS, rotate=True),
    "weights": dict(operands=WEIGHTS),
    "weights, stochastic": dict(operands=WEIGHTS, drawn=WEIGHTS),
    "inputs of the first": dict(operands=INPUTS),
    "inputs of the first, stochastic": dict(operands=INPUTS, drawn=INPUTS),
    "inputs of the others": dict(operands=INPUTS),
}
LONG = [64, 256]
FIRST = {f"blocks.0.attention.{each}" for each in ("query", "key", "value")}  # read embeddings


def outlier() -> Iterator[dict[str, Any]]:
    """Test losses after 60 steps of a GPT whose layers find one channel k times as large."""
    for name, scheme, how in TRAINED:
        for seed in SEEDS:
            _, losses = rigs.fp8.train_reader(
                seed, scheme, steps=STEPS, lr=RATE, config=rigs.fp8.WIDE_READER, **how
            )
            yield dict(scheme=name, k=f"{how.get('k', 1):g}", seed=seed, loss=f"{losses[-1]:.4f}")


def averaged() -> Iterator[dict[str, Any]]:
    """How far the mean gradient of so many batches of lab 15b's reader is off, relative to its
    length: where gradients alone are rounded to NVFP4, where inputs and weights are, too, and where
    weights alone are, inputs of the layers that read embeddings, or those of the other layers."""
    for seed in SEEDS:
        exact, twins = rigs.fp8.reader(), {}
        for name, how in ROUNDED.items():
            draw = torch.Generator().manual_seed(seed) if "drawn" in how else None
            twin = copy.deepcopy(exact)
            twins[name] = quantization.use_blocks(twin, floats.NVFP4, generator=draw, **how)
            if name.startswith("inputs"):
                modules, kind = twin.named_modules(), quantization.BlockLinear
                layers = {path: each for path, each in modules if isinstance(each, kind)}
                for path in FIRST if name.endswith("others") else layers.keys() - FIRST:
                    layers[path].operands = ()
        yield from _errors(exact, twins, COUNTS, seed)


def _errors(
    exact: nn.Module, twins: dict[str, nn.Module], counts: list[int], seed: int
) -> Iterator[dict[str, Any]]:
    """How far the sums of gradients of the twins are off after so many batches."""
    batches, models = rigs.fp8.excerpts(100 + seed), {"": exact, **twins}
    sums = dict.fromkeys(models, torch.zeros(()).double())
    for count in range(1, counts[-1] + 1):
        batch = next(batches)
        for name, model in models.items():
            found = rigs.fp8.matrix_gradients(model, batch)
            sums[name] = sums[name] + torch.cat([each.flatten() for each in found])
        for name in twins if count in counts else ():
            off = ((sums[name] - sums[""]).norm() / sums[""].norm()).item()
            yield dict(rounded=name, batches=count, seed=seed, error=f"{off:.4f}")


class _OtherScales(quantization.BlockLinear):
    """A layer of NVFP4 whose scales clip nothing: those of full precision, or rounded up to e4m3
    where NVFP4 takes the nearest."""

    up = False

    def rounded(self, x: Tensor, operand: str) -> Tensor:
        if operand not in self.operands:
            return x
        blocks = x.unflatten(-1, (-1, floats.NVFP4.block_size))
        scale = blocks.abs().amax(-1, keepdim=True) / floats.E2M1.max
        if self.up:
            whole = scale.max() / floats.E4M3.max
            least = (scale / whole).clamp(max=floats.E4M3.max)
            near = precision.round_to(least, floats.E4M3)
            above = near.to(F8_E4M3).view(torch.uint8) + (near < least)
            scale = above.view(F8_E4M3).to(x) * whole
        scale = scale.where(scale > 0, 1.0)
        how: dict[str, Any] = dict(mode="stochastic", generator=self.generator)
        values = precision.round_to(blocks / scale, floats.E2M1, overflow="saturate", **how)
        return (values * scale).flatten(-2)


LONGER = ["nearest", "stochastic", "stochastic, scales rounded up", "stochastic, exact scales"]


def longer() -> Iterator[dict[str, Any]]:
    """The error of `averaged` over more batches, where gradients alone are rounded to NVFP4: to the
    nearest number, stochastically, and stochastically with scales that clip nothing."""
    for seed in SEEDS:
        exact, twins = rigs.fp8.reader(), {}
        for name in LONGER:
            draw = None if name == "nearest" else torch.Generator().manual_seed(seed)
            twin = twins[name] = copy.deepcopy(exact)
            quantization.use_blocks(twin, floats.NVFP4, generator=draw, operands=GRADIENTS)
            for layer in twin.modules() if "scales" in name else ():
                if isinstance(layer, quantization.BlockLinear):
                    layer.__class__ = _OtherScales
                    layer.up = "up" in name
        yield from _errors(exact, twins, LONG, seed)


def main(names: list[str]) -> None:
    """Run all parts, or those of these names, and write their files."""
    torch.set_num_threads(1)
    for part in (outlier, averaged, longer):
        if names and part.__name__ not in names:
            continue
        rows = list(part())
        said = f"torch {torch.__version__}, Python {platform.python_version()}"
        today = f"{datetime.date.today():%d %B %Y}, {platform.machine()}"
        name = DATA / f"fp8_{part.__name__}.csv"
        with open(name, "w", newline="", encoding="utf-8") as file:
            file.write(f"# python tools/fp8_sweep.py {part.__name__}; {said}; {today}\n")
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        print(f"{name.name}: {len(rows)} rows", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
