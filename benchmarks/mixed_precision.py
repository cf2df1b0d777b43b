"""A mixed-precision training step of a GPT: our autocast and LossScaler beside torch's.

Both step their own copy of the same model on the same tokens, in turn, so that whatever else the
machine does slows both alike. The ratio is ours over theirs, below 1 where ours is faster; the aim
is 1.10 at most. Whether weights stay equal is checked before and after.
"""

import copy

import torch
from _side_by_side import interleave, owe, report
from torch import nn

from labutils import precision
from labutils.config import ModelConfig
from labutils.model import GPT

SIZES = {
    "small": (64, 32, 8, 60),
    "medium": (256, 128, 4, 24),
    "large": (512, 256, 4, 8),
}  # width, tokens, rows, rounds
PEER = "torch.autocast, GradScaler"
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def steps(width, length, rows, dtype):
    """A training step in each of the ways, on models that start equal.

    Cast, scale, backward, unscale, clip, step, update.
    """
    config = ModelConfig(
        num_layers=4, d_model=width, num_heads=4, d_ff=4 * width, vocab_size=256, seq_len=length
    )
    model = GPT(config, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))
    ways = {
        "ours": (lambda: precision.autocast(dtype), precision.LossScaler(growth_interval=4)),
        "theirs": (
            lambda: torch.autocast("cpu", dtype),
            torch.amp.GradScaler("cpu", growth_interval=4),
        ),
    }

    def step(model, optimizer, region, scaler):
        optimizer.zero_grad()
        with region():
            loss = model.loss(tokens, tokens)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    calls, models = {}, {}
    for name, (region, scaler) in ways.items():
        models[name] = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(models[name].parameters(), lr=1e-4)
        calls[name] = lambda made=(models[name], optimizer, region, scaler): step(*made)
    return calls, models


def main():
    print("a step of a 4-layer GPT in mixed precision, interleaved; ms, median (minimum)")
    print("size    format  ours                 theirs               ours/theirs")
    owe(PEER, {f"{size}, {half}": 1.1 for half in HALVES for size in SIZES})
    for half, dtype in HALVES.items():
        for size, (width, length, rows, rounds) in SIZES.items():
            calls, models = steps(width, length, rows, dtype)
            times = None
            for turns in (2, rounds):
                times = interleave(calls, turns, seconds=5)
                if not all(
                    map(torch.equal, models["ours"].parameters(), models["theirs"].parameters())
                ):
                    raise SystemExit(f"{size}, {half}: the weights differ, the times mean nothing")
            report(f"{size}, {half}", PEER, times["ours"], times["theirs"])
            print(
                f"{size:7} {half:7} {'  '.join(str(times[way]) for way in calls)}  "
                f"{times['ours'].ratio(times['theirs'])}"
            )


if __name__ == "__main__":
    main()
