"""LoRA against full fine-tuning over learning rates, LoRA ranks and seeds, on two tasks: from
addition in base 10 to base 8, and from Python's reference to its source code. Writes
in labutils/data adder.safetensors, the model before the first, and what became of both:
lora_addition.csv, lora_alpha.csv, lora_merged.csv and lora_text.csv, whose first line says how they
were made.

    python tools/lora_sweep.py           all of it
    python tools/lora_sweep.py alpha     lora_alpha.csv alone, from the recorded model
    python tools/lora_sweep.py merged    lora_merged.csv alone, from it too
"""

import copy
import csv
import datetime
import math
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from labutils import lora, quantization
from labutils.config import DATA, ModelConfig
from labutils.model import GPT
from labutils.teach import rigs

ALPHA = 32
RATES = [1e-4 * 2**i for i in range(8)]

SEEDS = range(5)
LARGE, SMALL = [*RATES[5:], 2 * RATES[-1]], RATES[2:6]
ALPHAS = {  # rates by r and α
    (4, 4): LARGE, (4, 128): SMALL, (4, 512): RATES[:5], (1, 8): LARGE, (16, 128): SMALL,
}  # fmt: skip
RUNS = {"full": RATES[:6], 1: RATES[3:], 4: RATES[3:], 16: RATES[3:]}
PATTERNS = {"attention.*": 8, "feed_forward.*": 2}  # alone, with that LoRA rank

WRITER = ModelConfig(
    num_layers=2, d_model=64, num_heads=4, d_ff=256, vocab_size=len(rigs.corpus.ALPHABET),
    seq_len=64, positions="rope", norm="rmsnorm", bias=False, tied=False, name="writer",
)  # fmt: skip
TEXT_SEEDS = range(3)
TEXT_RUNS = {"full": RATES[1:7], 1: RATES[3:], 4: RATES[3:], 16: RATES[3:]}
HELD_OUT = 256  # rows of the end of a text


def adapted(
    model: GPT, rank: int | str, pattern: str, seed: int, alpha: int = ALPHA
) -> tuple[GPT, int]:
    """A copy to train, whole or by adapters, and how many numbers of it are trained."""
    model = copy.deepcopy(model)
    if rank != "full":
        draw = torch.Generator().manual_seed(seed)
        lora.adapt(model, rank=rank, alpha=alpha, pattern=pattern, generator=draw)
    return model, sum(p.numel() for p in model.parameters() if p.requires_grad)


# ── addition ──────────────────────────────────────────────────────────────────────────────────────


def adder() -> GPT:
    """A model that adds in base 10."""
    model = GPT(rigs.lora.ADDER, attention="sdpa", generator=torch.Generator().manual_seed(0))
    return rigs.lora.learn_sums(model, 10, steps=1200, batch=64, lr=5e-3, decay=True)


def add(
    model: GPT, rank: int | str, pattern: str, lr: float, seed: int, alpha: int = ALPHA
) -> dict[str, Any]:
    """What a model has learned, and forgotten, after 60 steps of 32 sums."""
    model, trained = adapted(model, rank, pattern, seed, alpha)
    rigs.lora.learn_sums(model, 8, steps=60, batch=32, lr=lr, seed=seed)
    (loss, right), (_, kept) = (rigs.lora.score_sums(model, base) for base in (8, 10))
    return dict(
        rank=rank, pattern=pattern, trained=trained, lr=f"{lr:.1e}", seed=seed,
        loss=f"{loss:.4f}", base_8=f"{right:.4f}", base_10=f"{kept:.4f}",
    )  # fmt: skip


# ── text ──────────────────────────────────────────────────────────────────────────────────────────


def rows(name: str) -> tuple[Tensor, Tensor]:
    """A text in rows of 65 characters: those that are trained on, and those held out."""
    tokens = rigs.corpus.encoded(name)
    whole = tokens[: len(tokens) // 65 * 65].view(-1, 65)
    return whole[:-HELD_OUT], whole[-HELD_OUT:]


def learn_text(
    model: GPT, name: str, *, steps: int, batch: int, lr: float, seed: int, decay: bool = False
) -> GPT:
    """The model, its trained parameters stepped by AdamW on rows drawn from a text; the schedule is
    that of `rigs.lora.learn_sums`."""
    text, _ = rows(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
    draw = torch.Generator().manual_seed(seed)
    for step in range(steps):
        falls = (1 + math.cos(math.pi * step / steps)) / 2 if decay else 1
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20) * falls
        chosen = text[torch.randint(len(text), (batch,), generator=draw)]
        model.loss(chosen[:, :-1], chosen[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def score_text(model: GPT, name: str) -> float:
    """Mean loss of the held-out rows, nats per character."""
    _, text = rows(name)
    return model.loss(text[:, :-1], text[:, 1:]).item()


def writer() -> GPT:
    """A model of Python's reference."""
    model = GPT(WRITER, attention="sdpa", generator=torch.Generator().manual_seed(0))
    return learn_text(model, "topics", steps=600, batch=16, lr=5e-3, seed=0, decay=True)


def write(
    model: GPT, rank: int | str, pattern: str, lr: float, seed: int, steps: int = 120
) -> dict[str, Any]:
    """What a model has learned of source code, and forgotten of the reference, after so many steps
    of 8 rows."""
    model, trained = adapted(model, rank, pattern, seed)
    learn_text(model, "source", steps=steps, batch=8, lr=lr, seed=seed)
    return dict(
        rank=rank, pattern=pattern, trained=trained, lr=f"{lr:.1e}", seed=seed,
        loss=f"{score_text(model, 'source'):.4f}", old=f"{score_text(model, 'topics'):.4f}",
    )  # fmt: skip


# ── all of it ─────────────────────────────────────────────────────────────────────────────────────


def sweep(
    run: Callable[..., dict[str, Any]], model: GPT, runs: dict, seeds: Iterable[int]
) -> list[dict[str, Any]]:
    """A row for each LoRA rank, learning rate and seed, with adapters on all layers."""
    return [
        run(model, rank, "*", lr, seed)
        for rank, rates in runs.items() for lr in rates for seed in seeds
    ]  # fmt: skip


def save(name: str, found: list[dict[str, Any]], made: str) -> None:
    """Write a sweep to lora_{name}.csv, with how it was made in its first line."""
    with open(DATA / f"lora_{name}.csv", "w", newline="", encoding="utf-8") as file:
        file.write(f"# {made}\n")
        writer = csv.DictWriter(file, found[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)


def sweep_alpha(model: GPT) -> list[dict[str, Any]]:
    """Addition at r = 4 with other α, and with α/r = 8 at others, over learning rates and seeds."""
    return [
        add(model, rank, "*", lr, seed, alpha) | {"alpha": alpha}
        for (rank, alpha), rates in ALPHAS.items() for lr in rates for seed in TEXT_SEEDS
    ]  # fmt: skip


def merge_into_nf4(model: GPT, seed: int) -> dict[str, Any]:
    """Losses in base 8 of an adapter that has learned over NF4: beside the frozen weights; W made
    whole, W + Δ in bf16; W + Δ rounded to NF4 once more; and, as a control, W alone rounded so."""
    model = lora.quantize_base(copy.deepcopy(model).bfloat16())
    draw = torch.Generator().manual_seed(seed)
    lora.adapt(model, rank=4, alpha=ALPHA, generator=draw)
    rigs.lora.learn_sums(model, 8, steps=150, batch=32, lr=3.2e-3, seed=seed)
    layers = list(lora.adapted(model).values())
    weights = [layer.base.dequantized(torch.float32) for layer in layers]
    deltas = [layer.adapters["default"].delta().detach() for layer in layers]
    found = {"beside": rigs.lora.score_sums(model, 8)[0]}
    for name, merged, nf4 in (
        ("W rounded again", 0, True), ("merged, bf16", 1, False), ("merged, NF4", 1, True),
    ):  # fmt: skip
        for layer, weight, delta in zip(layers, weights, deltas, strict=True):
            made = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=torch.bfloat16)
            made.weight.data.copy_(weight + merged * delta)
            layer.base = quantization.Nf4Linear(made) if nf4 else made
        lora.activate(model, None if merged else "default")
        found[name] = rigs.lora.score_sums(model, 8)[0]
    return {"seed": seed, **{name: f"{loss:.4f}" for name, loss in found.items()}}


def sweep_merged(model: GPT) -> list[dict[str, Any]]:
    """What a merge into NF4 costs, three seeds."""
    return [merge_into_nf4(model, seed) for seed in TEXT_SEEDS]


def recorded_adder() -> GPT:
    """The model of adder.safetensors."""
    model = GPT(rigs.lora.ADDER, attention="sdpa")
    model.load_state_dict(load_file(DATA / "adder.safetensors"))
    return model


def main(names: list[str]) -> None:
    """Train, sweep, and write the files; of `names`, "alpha" and "merged", those alone."""
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    today = f"{datetime.date.today():%d %B %Y}, {platform.machine()}"
    made = f"python tools/lora_sweep.py; {versions}; {today}"
    parts = {"alpha": sweep_alpha, "merged": sweep_merged}
    for name in names:
        save(name, parts[name](recorded_adder()), made.replace(";", f" {name};", 1))
    if names:
        return

    model = writer()
    found = [write(model, "full", "*", 0.0, 0, steps=0) | dict(rank="none", trained=0)]
    save("text", found + sweep(write, model, TEXT_RUNS, TEXT_SEEDS), made)

    model = adder()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, DATA / "adder.safetensors", metadata={"made": made})
    found = sweep(add, model, RUNS, SEEDS)
    for pattern, rank in PATTERNS.items():
        found += [add(model, rank, pattern, lr, seed) for lr in RATES[3:] for seed in SEEDS]
    save("addition", found, made)
    for name, part in parts.items():
        save(name, part(model), made)


if __name__ == "__main__":
    main(sys.argv[1:])
