"""Our data parallelism beside DistributedDataParallel on four processes: time, bytes, overlap.

    python benchmarks/data_parallel.py

Both train the same model on the same batches with the same fused AdamW, in buckets of the same
size, and take turns; a ratio below 1 means that ours is faster, or holds less. What is held is
counted from before the model is built.

The overlap is that of a backward pass that waits instead of computing, as a host waits for its GPU,
so that four ranks on two cores have time to send.
"""

import torch
from _side_by_side import Times, fullest, interleave, owe, report, slowest
from torch import nn

from labutils import data_parallel, units
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.teach import rigs
from labutils.timeline import Timeline
from labutils.world import World

RANKS, ROUNDS, STEPS = 4, 21, 3
BUCKET = 4 * units.MIB
MODEL = ModelConfig(num_layers=6, d_model=256, num_heads=4, d_ff=1024, vocab_size=1024, seq_len=64)
LAYERS, NBYTES, SECONDS = 12, units.MIB, 0.03
THEIRS = {"DDP": False, "DDP, gradients as views": True}
NAMES = ("ours", *THEIRS)


class Contestant:
    """A model made ready by one library: `step()` trains it once."""

    def __init__(self, name: str, rank) -> None:
        self.model = GPT(
            MODEL, generator=torch.Generator().manual_seed(rank.rank), attention="sdpa"
        )
        self.batches = torch.Generator().manual_seed(rank.rank)
        comm = rank.comm("dp")
        if name == "ours":
            self.replica = data_parallel.replicate(self.model, comm, bucket_bytes=BUCKET)
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
        group=group,
    ), apart


def held(rank, name: str) -> int:
    """Bytes alive at the fullest moment of the last of a few steps."""
    return fullest(lambda: Contestant(name, rank).step, STEPS)


def chain(rank, overlap: bool) -> Timeline:
    """The second step of a chain of such layers, a bucket each."""
    net = rigs.data_parallel.waiting_chain([(NBYTES, SECONDS)] * LAYERS)
    replica = data_parallel.replicate(net, rank.comm("dp"), bucket_bytes=NBYTES, overlap=overlap)
    for _ in range(2):
        rank.comm("dp").barrier()
        replica(torch.ones(1)).backward()
    return replica.timeline


def main() -> None:
    """Print the tables."""
    print(f"{units.text(4 * MODEL.num_params)} of fp32 weights on {RANKS} processes; ratios")
    print("ours / theirs: step time by medians (by minima), bytes held")
    for theirs in THEIRS:
        owe(theirs, {"step": 0.91})
    with World(RANKS, engine="processes", timeout=120) as world:
        ranks = world.run(race)
        times, apart = slowest(times for times, _ in ranks), ranks[0][1]
        for theirs in THEIRS:
            report("step", theirs, times["ours"], times[theirs])
        peaks = {name: max(world.run(held, name)) for name in NAMES}
        chains = {"during": sum(world.run(chain, True)), "after": sum(world.run(chain, False))}
    for name, each in times.items():
        held_bytes = f"{units.text(peaks[name]):>8} held"
        print(f"{name:>23}: {each} ms, {held_bytes}, weights within {apart[name]:.0e}")
    for theirs in THEIRS:
        time_ratio, held_ratio = times["ours"].ratio(times[theirs]), peaks["ours"] / peaks[theirs]
        print(f"ours / {theirs:<23} time {time_ratio}   held {held_ratio:.2f}")
    each = f"{LAYERS} layers of {units.text(NBYTES)}"
    print(f"\n{each} on the ring, whose backward pass waits {units.text(SECONDS, 's')} each:")
    for when, timeline in chains.items():
        exposed, step = units.text(timeline.exposed, "s"), units.text(timeline.makespan, "s")
        hidden = f"{timeline.hidden:>4.0%} of communication hidden"
        print(f"reduced {when:>6}: {hidden}, {exposed:>7} exposed, a step takes {step}")


if __name__ == "__main__":
    main()
