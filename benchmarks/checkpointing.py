"""A training step of a GPT with every block checkpointed: ours beside torch.utils.checkpoint.

Both run in turn on the same weights and tokens, so that whatever else the machine does slows both
alike. The ratio is ours over theirs, below 1 where ours is faster; the aim is 1.05 at most. "extra"
is what checkpointing costs over a plain step.
"""

import torch
from _side_by_side import interleave, owe, report
from torch.utils.checkpoint import checkpoint as theirs

from labutils import checkpointing
from labutils.config import ModelConfig
from labutils.model import GPT

SIZES = {
    "small": (64, 32, 8, 40),
    "medium": (256, 128, 4, 15),
    "large": (512, 256, 4, 7),
}  # width, tokens, rows, rounds
PEER = "torch.utils.checkpoint"
WAYS = {
    "plain": lambda block, x: block(x),
    "ours": checkpointing.checkpoint,
    "theirs": lambda block, x: theirs(block, x, use_reentrant=False),
}


def steps(width, length, rows):
    """A training step in each of the ways, and its gradients, from the same random state."""
    config = ModelConfig(
        num_layers=6,
        d_model=width,
        num_heads=4,
        d_ff=4 * width,
        vocab_size=256,
        seq_len=length,
        dropout=0.1,
    )
    model = GPT(config, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))

    def step(way):
        torch.manual_seed(2)
        model.zero_grad()
        x = model.embed(tokens)
        for block in model.blocks:
            x = way(block, x)
        model.head(model.norm(x)).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    return {name: lambda way=way: step(way) for name, way in WAYS.items()}


def main():
    print("a step of a 6-layer GPT, every block checkpointed, interleaved; ms, median (minimum)")
    print(
        "size    plain                ours                 theirs               ours/theirs    "
        "extra over plain"
    )
    owe(PEER, dict.fromkeys(SIZES, 1.05))
    for name, (width, length, rows, rounds) in SIZES.items():
        calls = steps(width, length, rows)
        results = [call() for call in calls.values()]
        if not all(
            torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*results, strict=True)
        ):
            raise SystemExit(f"{name}: the gradients differ, the times mean nothing")
        times = interleave(calls, rounds, seconds=5)
        report(name, PEER, times["ours"], times["theirs"])
        cells = "  ".join(str(times[way]) for way in calls)
        median, least = (
            {way: getattr(found, how) for way, found in times.items()}
            for how in ("median", "minimum")
        )
        by_median, by_least = (each["ours"] / each["plain"] - 1 for each in (median, least))
        extra = f"{by_median:+.0%} ({by_least:+.0%})"
        print(f"{name:7} {cells}  {times['ours'].ratio(times['theirs'])}    {extra}")


if __name__ == "__main__":
    main()
