"""Our tensor parallelism beside torch's parallelize_module (DTensor) on four processes: step time.

    python benchmarks/tensor_parallel.py

Both split the same model alike, train it on the same batches with the same AdamW, and take
turns; a ratio below 1 means that ours is faster.
"""

import contextlib

import torch
import torch.distributed as dist
from _side_by_side import Times, interleave, owe, report, slowest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from labutils import tensor_parallel, units
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.world import World

RANKS, ROUNDS, STEPS = 4, 21, 3
SIZES = dict(num_layers=4, d_model=256, num_heads=8, d_ff=1024, vocab_size=1024, seq_len=64)
MODEL = ModelConfig(**SIZES, positions="rope", tied=False)


def split_by_torch(model: GPT, group: dist.ProcessGroup) -> None:
    """Column and row layers, the embedding and the head by words, as in `styles`."""
    words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    plan = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": words}
    for name, style in tensor_parallel.styles(MODEL).items():
        if style in ("column", "row") and name != "head":
            for i in range(MODEL.num_layers):
                kind = ColwiseParallel if style == "column" else RowwiseParallel
                plan[name.replace("*", str(i))] = kind()
    parallelize_module(model, DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",)), plan)


class Contestant:
    """A model split by one library: `step()` trains it once."""

    def __init__(self, name: str, rank) -> None:
        self.ours, comm = name == "ours", rank.comm("tp")
        self.model = GPT(MODEL, generator=torch.Generator().manual_seed(0), attention="sdpa")
        self.batches = torch.Generator().manual_seed(0)
        if self.ours:
            tensor_parallel.parallelize(self.model, comm)
        else:
            split_by_torch(self.model, comm.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss = 0.0

    def step(self) -> None:
        tokens = torch.randint(0, MODEL.vocab_size, (2, MODEL.seq_len), generator=self.batches)
        with contextlib.nullcontext() if self.ours else loss_parallel():
            if self.ours:
                loss = self.model.loss(tokens, tokens)
            else:
                scores = self.model(tokens).flatten(0, 1)
                loss = nn.functional.cross_entropy(scores, tokens.flatten())
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = float(loss.detach() if self.ours else loss.detach().full_tensor())


def race(rank) -> tuple[dict[str, Times], dict[str, float]]:
    """Step times, and the losses after as many steps."""
    contestants = {name: Contestant(name, rank) for name in ("ours", "DTensor")}
    for _ in range(STEPS):
        for contestant in contestants.values():
            contestant.step()
    losses = {name: each.loss for name, each in contestants.items()}
    group = rank.comm("tp").group
    steps = {name: each.step for name, each in contestants.items()}
    return interleave(steps, ROUNDS, group=group), losses


def main() -> None:
    """Print the table: medians, minima in brackets."""
    print(f"{units.text(4 * MODEL.num_params)} of fp32 weights split over {RANKS} processes")
    owe("DTensor", {"step": 0.31})
    with World(Mesh(tp=RANKS), engine="processes", timeout=120) as world:
        ranks = world.run(race)
    times, losses = slowest(times for times, _ in ranks), ranks[0][1]
    report("step", "DTensor", times["ours"], times["DTensor"])
    for name, each in times.items():
        print(f"{name:>8}: {each} ms, loss {losses[name]:.6f}")
    print(f"ours / DTensor: {times['ours'].ratio(times['DTensor'])}")


if __name__ == "__main__":
    main()
