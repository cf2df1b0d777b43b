"""LoRA against full fine-tuning, base-10 addition to base 8, over learning rates, LoRA ranks and
seeds: writes data/adder.safetensors, the model before, and data/lora_sweep.csv, what became of it.

    python tools/lora_sweep.py
"""

import copy
import csv
import platform

import torch
from safetensors.torch import save_file

from labutils import lora
from labutils.config import DATA
from labutils.lora import addition
from labutils.model import GPT

SEEDS = range(5)
RATES = [1e-4 * 2**i for i in range(8)]
RUNS = {"full": RATES[:6], 1: RATES[3:], 4: RATES[3:], 16: RATES[3:]}
PATTERNS = {"attention.*": 8, "feed_forward.*": 2}  # alone, with that LoRA rank
STEPS, BATCH, ALPHA = 60, 32, 32


def pretrained() -> GPT:
    """A model that adds in base 10."""
    model = GPT(addition.ADDER, attention="sdpa", generator=torch.Generator().manual_seed(0))
    return addition.learn_sums(model, 10, steps=1200, batch=64, lr=5e-3, decay=True)


def run(model: GPT, rank: int | str, pattern: str, lr: float, seed: int) -> dict:
    """What a model has learned, and forgotten, after 60 steps."""
    model = copy.deepcopy(model)
    if rank != "full":
        draw = torch.Generator().manual_seed(seed)
        lora.adapt(model, rank=rank, alpha=ALPHA, pattern=pattern, generator=draw)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    addition.learn_sums(model, 8, steps=STEPS, batch=BATCH, lr=lr, seed=seed)
    (loss, right), (_, kept) = (addition.score_sums(model, base) for base in (8, 10))
    return dict(
        rank=rank, pattern=pattern, trained=trained, lr=f"{lr:.1e}", seed=seed,
        loss=f"{loss:.4f}", base_8=f"{right:.4f}", base_10=f"{kept:.4f}",
    )  # fmt: skip


def main() -> None:
    """Train, sweep, and write both files."""
    torch.set_num_threads(1)
    model = pretrained()
    said = f"torch {torch.__version__}, Python {platform.python_version()}"
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, DATA / "adder.safetensors", metadata={"made": said})
    rows = []
    for rank, rates in RUNS.items():
        rows += [run(model, rank, "*", lr, seed) for lr in rates for seed in SEEDS]
    for pattern, rank in PATTERNS.items():
        rows += [run(model, rank, pattern, lr, seed) for lr in RATES[3:] for seed in SEEDS]
    with open(DATA / "lora_sweep.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(len(rows), "runs;", said)


if __name__ == "__main__":
    main()
