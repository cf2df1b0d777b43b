"""Our ZeRO beside PyTorch's, on four processes: step time, bytes held, equal weights, in one run.

    python benchmarks/zero.py

Levels 1 and 2 beside DistributedDataParallel with ZeroRedundancyOptimizer and beside FSDP2's
`fully_shard` without resharding after the forward, level 3 beside `fully_shard` with it. All train
the same model on the same batches with the same fused AdamW. Step times are taken in turn; a ratio
below 1 means that ours is faster, or holds less. What is held is counted by PyTorch's own profiler,
allocation by allocation, from before the model is built: it sees activations and the buffers of C++
too.
"""

import statistics

import torch
from _side_by_side import Times, fullest, interleave, owe, report, slowest

from labutils import units, zero
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import World

RANKS, ROUNDS, STEPS = 4, 15, 3
BUCKET = 4 * units.MIB  # about a block of the model, which is what FSDP2 is told to take at a time
MODEL = ModelConfig(num_layers=6, d_model=256, num_heads=4, d_ff=1024, vocab_size=1024, seq_len=64)
OURS = {"level 1": 1, "level 2": 2, "level 3": 3}
THEIRS = {"DDP + ZeRO optimizer": None, "FSDP2, no reshard": False, "FSDP2, reshard": True}
PAIRS = [
    ("level 1", "DDP + ZeRO optimizer"),
    ("level 2", "DDP + ZeRO optimizer"),
    ("level 1", "FSDP2, no reshard"),
    ("level 2", "FSDP2, no reshard"),
    ("level 3", "FSDP2, reshard"),
]


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


class Contestant:
    """A model made ready by one library: `step()` trains it, `weights()` are its parameters."""

    def __init__(self, name: str, rank) -> None:
        self.model = GPT(MODEL, generator=torch.Generator().manual_seed(0), attention="sdpa")
        self.batches = torch.Generator().manual_seed(rank.rank)
        self.weights = lambda: [parameter.detach().clone() for parameter in self.model.parameters()]
        comm = rank.comm("dp")
        if name in OURS:
            self._ours(OURS[name], comm)
        elif THEIRS[name] is None:
            self._replicated(comm.group)
        else:
            self._fully_sharded(comm, THEIRS[name])

    def _ours(self, level: int, comm) -> None:
        if level < 3:
            self.optimizer = zero.Optimizer(
                self.model.parameters(), comm, adamw, level=level, bucket_bytes=BUCKET
            )
            return
        zero.shard(self.model, comm)
        self.optimizer = adamw(self.model.parameters())
        self.weights = self._gathered

    def _gathered(self) -> list[torch.Tensor]:
        with zero.gathered(self.model):
            return [parameter.detach().clone() for parameter in self.model.parameters()]

    def _replicated(self, group) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        self.replica = DistributedDataParallel(self.model, process_group=group)
        self.optimizer = ZeroRedundancyOptimizer(
            self.model.parameters(), torch.optim.AdamW, process_group=group, lr=1e-3, fused=True
        )

    def _fully_sharded(self, comm, reshard: bool) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(comm.group, "cpu")
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=reshard)
        self.optimizer = adamw(self.model.parameters())
        self.weights = lambda: [
            parameter.full_tensor().detach().clone() for parameter in self.model.parameters()
        ]

    def step(self) -> None:
        tokens = torch.randint(0, MODEL.vocab_size, (2, MODEL.seq_len), generator=self.batches)
        model = getattr(self, "replica", self.model)
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def race(rank) -> tuple[dict[str, Times], dict[str, float]]:
    """Step times of all contestants, and how far their weights are apart after as many steps."""
    contestants = {name: Contestant(name, rank) for name in (*OURS, *THEIRS)}
    for contestant in contestants.values():
        for _ in range(STEPS):
            contestant.step()
    reference = contestants["DDP + ZeRO optimizer"].weights()
    apart = {
        name: max(
            (a - b).abs().max().item() for a, b in zip(each.weights(), reference, strict=True)
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


def main() -> None:
    """Print the table."""
    print(
        f"{units.text(4 * MODEL.num_params)} of fp32 weights on {RANKS} processes; ratios "
        "ours / theirs: step time by medians (by minima), bytes held"
    )
    for ours, theirs in PAIRS:
        owe(theirs, {ours: 0.61})
    with World(RANKS, engine="processes", timeout=120) as world:
        ranks = world.run(race)
        times, apart = slowest(times for times, _ in ranks), ranks[0][1]
        for ours, theirs in PAIRS:
            report(ours, theirs, times[ours], times[theirs])
        peaks = {name: int(statistics.median(world.run(held, name))) for name in (*OURS, *THEIRS)}
    for name, each in times.items():
        print(
            f"{name:>22}: {each} ms, {units.text(peaks[name]):>8} held, "
            f"weights within {apart[name]:.0e}"
        )
    for ours, theirs in PAIRS:
        held_ratio = peaks[ours] / peaks[theirs]
        time_ratio = times[ours].ratio(times[theirs])
        print(f"{ours} / {theirs:<22} time {time_ratio}   held {held_ratio:.2f}")


if __name__ == "__main__":
    main()
