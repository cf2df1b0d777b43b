"""Learning rates against batch sizes on two small tasks, over rules, optimizers and seeds: writes
labutils/data/scaling_sweep.csv.

    python tools/scaling_sweep.py             all of it, half an hour
    python tools/scaling_sweep.py rates       the rows of one part anew: see PARTS
"""

import csv
import dataclasses
import platform
import sys
import time
from collections.abc import Iterator

import torch

from labutils import scaling
from labutils.config import DATA
from labutils.teach.rigs import copies
from labutils.teach.rigs.scaling import CHARACTERS, characters, digits, digits_network, steps_to

COLUMNS = "part optimizer norm batch rule lr seed target value".split()
BASE = {"sgd": 2**-6, "adam": 2**-8, "rmsprop": 2**-8}  # the best at a batch of 16
SAMPLES, SEEDS, BATCHES = 2**16, range(8), (16, 64, 256, 512, 1024, 4096)
TARGETS = (3.0, 2.7, 2.55, 2.4)
STEPS = {8: 3000, 32: 800, 128: 260, 512: 110, 2048: 70}
LOWEST = {  # the smallest of six rates, each twice the one before
    "sgd": {8: 2**-9, 32: 2**-7, 128: 2**-5, 512: 2**-4, 2048: 2**-3},
    "adam": {8: 2**-11, 32: 2**-10, 128: 2**-9, 512: 2**-8, 2048: 2**-8},
}
NEAR = {  # of five rates in steps of √2 the middle one, as the power of 2 that it is of BASE
    "sgd": {64: 2, 256: 4, 512: 5, 1024: 5.5, 4096: 6},
    "adam": {64: 1, 256: 2, 512: 3, 1024: 3.5, 4096: 3.5},
    "rmsprop": {64: 1, 256: 1.5, 512: 1.5, 1024: 2, 4096: 1},
}
DIGITS_TARGETS, DIGITS_STEPS = (1.0, 0.5, 0.3), {4: 2500, 16: 700, 64: 250, 256: 120, 718: 100}
DIGITS_LOWEST = {4: 2**-10, 16: 2**-8, 64: 2**-7, 256: 2**-6, 718: 2**-5}  # of eight rates
DECAYS = [0.1 * 2**i for i in range(6)]
WIDTHS, WIDTH_RATES = (32, 64, 128, 256), [2.0**i for i in range(-11, -3)]
RUN = {"batch": 32, "lr": 2**-4, "steps": (1, 16, 64, 128, 256, 512)}


def row(part: str, value: float, **columns: object) -> dict:
    """A row of the file."""
    given = {"part": part, "value": f"{value:.5g}", **columns}
    return {name: given.get(name, "") for name in COLUMNS}


def losses(batch: int, lr: list[float], optimizer: str, schedule=None, **how) -> torch.Tensor:
    """Held-out losses of characters [seeds, rates]."""
    data, held_out = characters()
    rows = copies.train_copies(
        CHARACTERS, data, lr=lr, batch=batch, samples=SAMPLES, seeds=SEEDS,
        optimizer=optimizer, schedule=schedule, **how,
    )  # fmt: skip
    return copies.score(CHARACTERS, rows, held_out)[0]


def base() -> Iterator[dict]:
    """Learning rates at the base batch."""
    for optimizer, best in BASE.items():
        rates = [best * 2.0**i for i in (-2, -1, 0, 1, 2)]
        for seed, found in enumerate(losses(16, rates, optimizer).tolist()):
            for lr, value in zip(rates, found, strict=True):
                yield row("base", value, optimizer=optimizer, batch=16, lr=lr, seed=seed)


def finer() -> Iterator[dict]:
    """Rates in steps of √2, at two batches, over half as many examples: Adam's, RMSProp's, and
    those of an RMSProp whose mean of squares is corrected for its start at 0, as Adam's is: Adam
    with β₁ = 0 and β₂ = 0.99."""
    data, held_out = characters()
    small = range(-1, 4)
    ways = (
        ("adam", "", "adam", 1.0, small, range(3, 9)),
        ("rmsprop", "", "rmsprop", 1.0, small, range(1, 7)),
        ("rmsprop", "corrected", "adam", 10.0, small, range(3, 9)),
    )
    for name, rule, optimizer, forget, *tried in ways:
        for batch, halves in zip((16, 512), tried, strict=True):
            rates = [BASE[name] * 2 ** (i / 2) for i in halves]
            rows = copies.train_copies(
                CHARACTERS, data, lr=rates, batch=batch, samples=SAMPLES // 2, seeds=range(30),
                optimizer=optimizer, forget=(forget, forget),
            )  # fmt: skip
            for seed, found in enumerate(copies.score(CHARACTERS, rows, held_out)[0].tolist()):
                for lr, value in zip(rates, found, strict=True):
                    yield row(
                        "finer", value, optimizer=name, batch=batch, rule=rule, lr=lr, seed=seed
                    )


def best() -> Iterator[dict]:
    """Five rates round the best one of each batch."""
    for optimizer, middles in NEAR.items():
        for batch, middle in middles.items():
            tried = [BASE[optimizer] * 2 ** (middle + i / 2) for i in range(-2, 3)]
            for seed, found in enumerate(losses(batch, tried, optimizer).tolist()):
                for lr, value in zip(tried, found, strict=True):
                    yield row("best", value, optimizer=optimizer, batch=batch, lr=lr, seed=seed)


def rules() -> Iterator[dict]:
    """Three rules, and a warm-up over an eighth of the steps with the linear one."""
    for optimizer, best in BASE.items():
        for batch in BATCHES:
            rates = {r: scaling.scale_lr(best, batch / 16, r) for r in scaling.POWERS}
            found = dict(zip(rates, losses(batch, list(rates.values()), optimizer).T, strict=True))
            if batch > 16:
                warm = losses(
                    batch, [rates["linear"]], optimizer, scaling.gradual(batch / 16, 1 / 8)
                )
                found["linear, warm-up"] = warm[:, 0]
            for rule, values in found.items():
                for seed, value in enumerate(values.tolist()):
                    yield row(
                        "rules", value, optimizer=optimizer, batch=batch, rule=rule, seed=seed
                    )


def betas() -> Iterator[dict]:
    """The square root with 1 − β times k and ε over √k, and, with Adam, with β₂ and ε alone. Adam's
    1 − β₁ is 0.1, so that it can be multiplied by less than 10. And RMSProp corrected for its start
    at 0, which is Adam with 1 − β of 1 and 0.01, without and with β₂ and ε."""
    tried = {"adam": (64, 128, 512, 1024, 4096), "rmsprop": (64, 256, 512, 1024)}
    for optimizer, batches in tried.items():
        for batch in batches:
            k = batch / 16
            ways = {"square root": (1.0, 1.0), "and β₂": (1.0, k), "and both β": (k, k)}
            if optimizer == "rmsprop" or k >= 10:
                del ways["and both β"]
            if optimizer == "rmsprop":
                ways |= {"corrected": (10.0, 10.0), "corrected, and β₂": (10.0, 10.0 * k)}
            for rule, forget in ways.items():
                lr = [scaling.scale_lr(BASE[optimizer], k, "square root")]
                name = "adam" if "corrected" in rule else optimizer
                for seed, value in enumerate(losses(batch, lr, name, forget=forget)[:, 0]):
                    yield row(
                        "betas", value.item(), optimizer=optimizer, batch=batch, rule=rule,
                        seed=seed,
                    )  # fmt: skip


def widths() -> Iterator[dict]:
    """Adam's rates for networks of four widths: as they are, with μP from a width of 32, and with
    either half of it alone."""
    data, held_out = characters()
    ways = {"standard": (0, ""), "μP": (WIDTHS[0], "")}
    ways |= {f"μP's {half} alone": (WIDTHS[0], half) for half in ("rates", "start")}
    for rule, (base, half) in ways.items():
        for width in WIDTHS:
            sizes = (CHARACTERS.widths[0], *[width] * 3, CHARACTERS.widths[-1])
            network = dataclasses.replace(CHARACTERS, widths=sizes, base=base, half=half)
            rows = copies.train_copies(
                network, data, lr=WIDTH_RATES, batch=64, samples=2**14, seeds=range(3),
                optimizer="adam",
            )  # fmt: skip
            for seed, found in enumerate(copies.score(network, rows, held_out)[0].tolist()):
                for lr, value in zip(WIDTH_RATES, found, strict=True):
                    yield row(
                        "widths", value, optimizer="adam", rule=rule, target=width, lr=lr,
                        seed=seed,
                    )  # fmt: skip


def decays() -> Iterator[dict]:
    """AdamW's weight decays, as targets, on 2,048 characters that are seen 16 times, at two batches
    and over learning rates; and at one with a LayerNorm before the activation."""
    (x, y), held_out = characters()
    few = x[:: len(y) // 2048][:2048], y[:: len(y) // 2048][:2048]
    normed = dataclasses.replace(CHARACTERS, norm=True)
    for network, batch in ((CHARACTERS, 16), (CHARACTERS, 512), (normed, 16)):
        for times in (0.25, 0.5, 1.0, 2.0)[1 - network.norm :]:
            lr = scaling.scale_lr(times * BASE["adam"], batch / 16, "square root")
            rows = copies.train_copies(
                network, few, lr=[lr] * len(DECAYS), decay=DECAYS, batch=batch, samples=2**15,
                seeds=range(5), optimizer="adam",
            )  # fmt: skip
            for seed, found in enumerate(copies.score(network, rows, held_out)[0].tolist()):
                for decay, value in zip(DECAYS, found, strict=True):
                    yield row(
                        "decay", value, optimizer="adam", norm=network.norm, batch=batch, lr=lr,
                        seed=seed, target=decay,
                    )  # fmt: skip


def warm_ups() -> Iterator[dict]:
    """Digits, with a LayerNorm and without: errors in %, with warm-ups over parts of ten epochs."""
    data, held_out = digits()
    for norm, best in ((True, 2**-5), (False, 2**-7)):
        for batch in (8, 64, 256, 512, 718):
            for share in (0, 0.2, 0.4):
                names = list(scaling.POWERS) if not share else ["linear"]
                rates = [scaling.scale_lr(best, batch / 8, name) for name in names]
                network = digits_network(norm)
                rows = copies.train_copies(
                    network, data, lr=rates, batch=batch, samples=14370, seeds=range(20),
                    schedule=scaling.gradual(batch / 8, share) if share else None,
                )  # fmt: skip
                errors = 100 * copies.score(network, rows, held_out)[1]
                for name, values in zip(names, errors.T.tolist(), strict=True):
                    rule = f"{name}, warm-up {share:g}" if share else name
                    for seed, value in enumerate(values):
                        yield row(
                            "warm-up", value, optimizer="sgd", norm=norm, batch=batch, rule=rule,
                            seed=seed,
                        )  # fmt: skip


def rates() -> Iterator[dict]:
    """Digits in batches of half the data, over learning rates: errors in %, at once and with a
    warm-up over four of ten epochs from 1/90 of the rate; with LayerNorm also over one and two."""
    data, held_out = digits()
    tried = [2.0**i for i in range(-5, 4)]
    shares = {"at once": 0.0, "warm-up": 0.4, "one epoch": 0.1, "two epochs": 0.2}
    for norm in (True, False):
        for rule in list(shares)[: 4 if norm else 2]:
            schedule = scaling.gradual(718 / 8, shares[rule]) if shares[rule] else None
            network = digits_network(norm)
            rows = copies.train_copies(
                network, data, lr=tried, batch=718, samples=14370, seeds=range(20),
                schedule=schedule,
            )  # fmt: skip
            errors = 100 * copies.score(network, rows, held_out)[1]
            for lr, values in zip(tried, errors.T.tolist(), strict=True):
                for seed, value in enumerate(values):
                    yield row(
                        "rates", value, optimizer="sgd", norm=norm, batch=718, rule=rule, lr=lr,
                        seed=seed,
                    )  # fmt: skip


def steps_to_targets() -> Iterator[dict]:
    """Steps until the held-out loss is at a target: of characters for six rates at each batch size,
    of digits for eight, with a LayerNorm and without."""
    task = characters()
    for optimizer, lowest in LOWEST.items():
        rates = {batch: [lowest[batch] * 2.0**i for i in range(6)] for batch in STEPS}
        yield from _steps(CHARACTERS, task, optimizer, rates, STEPS, TARGETS, 4.3)
    for norm in (True, False):
        rates = {
            batch: [low * 2.0**i for i in range(8)] for batch, low in DIGITS_LOWEST.items()
        }
        yield from _steps(
            digits_network(norm), digits(), "sgd", rates, DIGITS_STEPS, DIGITS_TARGETS, 2.7,
            norm=norm,
        )  # fmt: skip


def _steps(
    network: copies.Network,
    task: tuple,
    optimizer: str,
    rates: dict[int, list[float]],
    most: dict[int, int],
    targets: tuple[float, ...],
    begin: float,
    **columns: object,
) -> Iterator[dict]:
    data, held_out = task
    for batch, steps in most.items():
        every, seen = max(steps // 70, 1), []

        def watch(step, rows, every=every, seen=seen):
            if step % every == 0:
                seen.append((step, copies.score(network, rows, held_out)[0]))

        copies.train_copies(
            network, data, lr=rates[batch], batch=batch, samples=steps * batch, seeds=range(5),
            optimizer=optimizer, watch=watch,
        )  # fmt: skip
        at = [0, *(step for step, _ in seen)]
        for seed in range(5):
            for i, lr in enumerate(rates[batch]):
                curve = [begin, *(found[seed, i].item() for _, found in seen)]
                for target in targets:
                    yield row(
                        "steps", steps_to(target, at, curve), optimizer=optimizer,
                        batch=batch, lr=lr, seed=seed, target=target, **columns,
                    )  # fmt: skip


def noise() -> Iterator[dict]:
    """tr Σ and |G|² along a run of SGD: of characters from 2,048 gradients of single examples, of
    digits from 1,024, with a LayerNorm and without."""
    yield from _noise(CHARACTERS, characters(), RUN, 2048)
    for norm in (True, False):
        run = {"batch": 16, "lr": 2**-6 if norm else 2**-7, "steps": (1, 8, 16, 32, 64, 128, 256)}
        yield from _noise(digits_network(norm), digits(), run, 1024, norm=norm)


def _noise(
    network: copies.Network, task: tuple, run: dict, n: int, **columns: object
) -> Iterator[dict]:
    (x, y), held_out = task
    kept = {}

    def watch(step, rows):
        if step in run["steps"]:
            kept[step] = rows[:, 0].clone()

    copies.train_copies(
        network, (x, y), lr=[run["lr"]], batch=run["batch"], seeds=SEEDS,
        samples=run["batch"] * run["steps"][-1], watch=watch,
    )  # fmt: skip
    for step, rows in kept.items():
        loss = copies.score(network, rows, held_out)[0].tolist()
        for seed, copy in enumerate(rows):
            draw = torch.Generator().manual_seed(7 * step + seed)
            chosen = torch.randint(len(y), (n,), generator=draw)
            lengths = copies.squared_lengths(network, copy, x[chosen], y[chosen], (1, n))
            found = scaling.estimate_spread(lengths[1], lengths[n], 1, n)
            for name, value in (("loss", loss[seed]), *found._asdict().items()):
                yield row(
                    f"noise {name}", value, optimizer="sgd", seed=seed, target=step, **columns
                )


PARTS = {  # what each function writes in the column "part"
    noise: ("noise loss", "noise trace", "noise signal"), warm_ups: ("warm-up",),
    rates: ("rates",), rules: ("rules",), steps_to_targets: ("steps",), base: ("base",),
    finer: ("finer",), best: ("best",), betas: ("betas",), widths: ("widths",),
    decays: ("decay",),
}  # fmt: skip


def main(names: list[str]) -> None:
    """Run every part, or those of these names, and write the file."""
    torch.set_num_threads(1)
    chosen = [part for part in PARTS if not names or part.__name__ in names]
    anew = {name for part in chosen for name in PARTS[part]}
    with open(DATA / "scaling_sweep.csv", encoding="utf-8") as file:
        rows = [each for each in csv.DictReader(file) if each["part"] not in anew]
    for part in chosen:
        began = time.perf_counter()
        rows += part()
        print(f"{part.__name__}: {time.perf_counter() - began:.0f} s", flush=True)
    with open(DATA / "scaling_sweep.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    said = f"torch {torch.__version__}, Python {platform.python_version()}"
    print(len(rows), "rows;", said)


if __name__ == "__main__":
    main(sys.argv[1:])
