"""Our data parallelism beside PyTorch's DistributedDataParallel, on four processes of this machine: step time, bytes held, overlap, equal weights.

    python benchmarks/data_parallel.py

Both train the same model on the same batches with the same fused AdamW, in buckets of the same size, and take turns; a ratio below 1 means that
ours is faster, or holds less. What is held is counted from before the model is built.

The overlap is that of a backward pass that waits instead of computing, as a host waits for its GPU, so that four ranks on two cores have time to send.
"""

import time

import torch
from _side_by_side import Times, fullest, interleave, slowest
from torch import nn

from labutils import data_parallel, units
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import World

RANKS, ROUNDS, STEPS = 4, 21, 3
BUCKET = 4 * units.MIB
MODEL = ModelConfig(num_layers=6, d_model=256, num_heads=4, d_ff=1024, vocab_size=1024, seq_len=64)
LAYERS, WIDTH, SECONDS = 12, 512, 0.03
OURS = {"ring": "ring", "halving and doubling": "halving_doubling"}
THEIRS = {"DDP": False, "DDP, gradients as views": True}
NAMES = (*OURS, *THEIRS)


class Contestant:
    """A model made ready by one library: `step()` trains it once."""

    def __init__(self, name: str, rank) -> None:
        self.model = GPT(
            MODEL, generator=torch.Generator().manual_seed(rank.rank), attention="sdpa"
        )
        self.batches = torch.Generator().manual_seed(rank.rank)
        comm = rank.comm("dp")
        if name in OURS:
            self.replica = data_parallel.replicate(
                self.model, comm, bucket_bytes=BUCKET, algorithm=OURS[name]
            )
        else:
            options = dict(bucket_cap_mb=BUCKET / units.MIB, gradient_as_bucket_view=THEIRS[name])
            self.replica = nn.parallel.DistributedDataParallel(
                self.model, process_group=comm.group, **options
            )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def step(self) -> None:
        tokens = torch.randint(0, MODEL.vocab_size, (2, MODEL.seq_len), generator=self.batches)
        nn.functional.cross_entropy(self.replica(tokens).flatten(0, 1), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def race(rank) -> tuple[dict[str, Times], dict[str, float]]:
    """Step times, and how far the weights are from PyTorch's after as many steps."""
    import torch.distributed as dist

    contestants = {name: Contestant(name, rank) for name in NAMES}
    for contestant in contestants.values():
        for _ in range(STEPS):
            contestant.step()
    theirs = list(contestants["DDP"].model.parameters())
    apart = {
        name: max(
            (a - b).abs().max().item() for a, b in zip(each.model.parameters(), theirs, strict=True)
        )
        for name, each in contestants.items()
    }
    group = rank.comm("dp").group
    return interleave(
        {name: each.step for name, each in contestants.items()},
        ROUNDS,
        before=lambda: dist.barrier(group=group),
    ), apart


def held(rank, name: str) -> int:
    """Bytes alive at the fullest moment of the last of a few steps."""
    return fullest(lambda: Contestant(name, rank).step, STEPS)


class Wait(torch.autograd.Function):
    """x; its backward pass takes SECONDS, in which the processor is free."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SECONDS)
        return gradient


class Layer(nn.Linear):
    """A linear layer whose backward pass waits."""

    def forward(self, x):
        return Wait.apply(super().forward(x))


def chain(rank, overlap: bool) -> data_parallel.Timeline:
    """The second step of a chain of such layers, a bucket each."""
    net = nn.Sequential(*(Layer(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    replica = data_parallel.replicate(
        net, rank.comm("dp"), bucket_bytes=4 * WIDTH * WIDTH, overlap=overlap
    )
    for _ in range(2):
        rank.comm("dp").barrier()
        replica(torch.ones(1, WIDTH)).sum().backward()
    return replica.timeline


def main() -> None:
    """Print the tables."""
    print(
        f"{units.text(4 * MODEL.num_params)} of fp32 weights on {RANKS} processes; ratios ours / theirs: step time by medians (by minima), bytes held"
    )
    with World(RANKS, engine="processes", timeout=120) as world:
        ranks = world.run(race)
        times, apart = slowest(times for times, _ in ranks), ranks[0][1]
        peaks = {name: max(world.run(held, name)) for name in NAMES}
        chains = {"during": sum(world.run(chain, True)), "after": sum(world.run(chain, False))}
    for name, each in times.items():
        print(
            f"{name:>23}: {each} ms, {units.text(peaks[name]):>8} held, weights within {apart[name]:.0e}"
        )
    for ours in OURS:
        for theirs in THEIRS:
            print(
                f"{ours} / {theirs:<23} time {times[ours].ratio(times[theirs])}   held {peaks[ours] / peaks[theirs]:.2f}"
            )
    print(
        f"\n{LAYERS} layers of {units.text(4 * WIDTH * WIDTH)} on the ring, whose backward pass waits {units.text(SECONDS, 's')} each:"
    )
    for when, timeline in chains.items():
        hidden, exposed, step = (
            f"{timeline.hidden:.0%}",
            units.text(timeline.exposed, "s"),
            units.text(timeline.makespan, "s"),
        )
        print(
            f"reduced {when:>6} the backward pass: {hidden:>4} of communication hidden, {exposed:>7} exposed, a step takes {step}"
        )


if __name__ == "__main__":
    main()
