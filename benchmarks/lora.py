"""A training step of a GPT with adapters on all linear layers: ours beside `peft`'s.

    python benchmarks/lora.py

Forward, backward and AdamW, r = 8, fp32. They take turns, on the same weights and tokens; the ratio
is ours over theirs, below 1 where ours is faster, and the aim is 1.00 at most. "full" is the step
in which every weight is trained.
"""

import copy
import os

import torch
from _side_by_side import interleave, owe, report

from labutils import lora
from labutils.config import ModelConfig
from labutils.model import GPT

SIZES = {
    "small": (64, 8, 32, 60),
    "medium": (256, 64, 8, 25),
    "large": (512, 128, 4, 15),
}  # width, tokens, rows, rounds
RANK = 8


def steps(width: int, length: int, rows: int):
    """A training step of each, which returns its loss, from the same weights, A and B."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import peft

    config = ModelConfig(
        num_layers=4, d_model=width, num_heads=4, d_ff=4 * width, vocab_size=96, seq_len=length
    )
    full = GPT(config, attention="sdpa", generator=torch.Generator().manual_seed(0))
    ours = lora.adapt(copy.deepcopy(full), rank=RANK, alpha=16)
    targets = [part.name.rpartition(".")[2] for part in lora.targets(config)]
    settings = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules=targets)
    theirs = peft.get_peft_model(copy.deepcopy(full), settings)
    models = {"full": full, "ours": ours, "theirs": theirs}
    trained = {
        name: [p for p in model.parameters() if p.requires_grad] for name, model in models.items()
    }
    with torch.no_grad():
        for mine, other in zip(trained["ours"], trained["theirs"], strict=True):
            other.copy_(mine)
    tokens = torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(1))

    def step(model, optimizer):
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    optimizers = {name: torch.optim.AdamW(found) for name, found in trained.items()}
    return {name: lambda name=name: step(models[name], optimizers[name]) for name in models}


def main():
    print("a training step of a 4-layer GPT, interleaved; ms, median (minimum)")
    print("size    full                 ours                 theirs               ours/theirs")
    owe("peft", dict.fromkeys(SIZES, 1.0))
    for name, (width, length, rows, rounds) in SIZES.items():
        calls = steps(width, length, rows)
        for _ in range(3):
            _, mine, other = [call() for call in calls.values()]
            if mine != other:
                raise SystemExit(f"{name}: the losses differ, the times mean nothing")
        times = interleave(calls, rounds, seconds=6)
        report(name, "peft", times["ours"], times["theirs"])
        cells = "  ".join(map(str, times.values()))
        print(f"{name:7} {cells}  {times['ours'].ratio(times['theirs'])}")


if __name__ == "__main__":
    main()
