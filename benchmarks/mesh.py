"""A step of pipeline × data × tensor parallelism on eight processes, by `step.build` and by torch's
own parts: step time, equal gradients and losses.

    python benchmarks/mesh.py

Torch's side is `distributed.pipelining` around stages that `parallelize_module` has split (DTensor)
and that DistributedDataParallel or FSDP2's `fully_shard` makes replicas or shards of, the three on
one DeviceMesh. Beside DDP stands ours at level 0. FSDP2 without resharding gathers the weights and
reduces the gradients once per step, as our level 1 does. All train the same model on the same
batches with the same fused AdamW and 1F1B, and take turns; a ratio below 1 means that ours is
faster. Only ours gives every rank the loss of the whole batch.
"""

from fnmatch import fnmatchcase

import torch
from _side_by_side import Times, interleave, owe, report, slowest
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

from labutils import pipeline, step, tensor_parallel, units
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.world import World

MESH, ROUNDS, STEPS = Mesh(pp=2, dp=2, tp=2), 11, 3
SIZES = dict(num_layers=4, d_model=256, num_heads=8, d_ff=1024, vocab_size=1024, seq_len=64)
MODEL = ModelConfig(**SIZES, positions="rope", tied=False)
BATCH = dict(micro_batch=1, global_batch=8)  # four micro-batches per replica
CHOICES = dict(precision="fp32", attention="sdpa", stepping="fused")
OURS = {f"level {zero}": TrainConfig(**BATCH, **CHOICES, zero=zero) for zero in (0, 1)}
PAIRS = {"level 0": "pipelining, DDP, DTensor", "level 1": "pipelining, FSDP2, DTensor"}


def styles(stage: nn.Module) -> dict:
    """How DTensor splits each part of a stage: column and row layers, words, as ours."""
    words = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    ends = {"tokens": RowwiseParallel(input_layouts=Replicate()), "head": words}
    kinds = {"column": ColwiseParallel, "row": RowwiseParallel}
    found = {name: part for name, part in ends.items() if hasattr(stage, name)}
    for pattern, style in tensor_parallel.styles(MODEL).items():
        for name in (name for name, _ in stage.named_modules() if name not in found):
            if style in kinds and fnmatchcase(name, pattern):
                found[name] = kinds[style]()
    return found


class Ours:
    """A rank's step by `step.build`."""

    def __init__(self, rank, name: str) -> None:
        self.train = step.build(MODEL, OURS[name], MESH)(rank)
        self.loss = 0.0

    def step(self, tokens: Tensor) -> None:
        self.loss = self.train(self.train.share(tokens, tokens)).loss.item()

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, at level 0."""
        return {name: p.grad for name, p in self.train.stages[0].named_parameters()}


class Theirs:
    """A rank's step by torch's parts."""

    def __init__(self, rank, name: str) -> None:
        plan = step.schedule_of(OURS["level 0"], MESH)
        axes = {axis: rank.comm(axis) for axis in ("pp", "dp", "tp")}
        ranks = torch.arange(MESH.size).view([comm.size for comm in axes.values()])
        groups = [comm.group for comm in axes.values()]
        mesh = DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=tuple(axes))
        whole = GPT(MODEL, generator=torch.Generator().manual_seed(step.SEED), attention="sdpa")
        self.place, self.micro_batches, self.loss = rank.coords, plan.micro_batches, 0.0
        stages = pipeline.split(whole, plan.stages)
        (self.stage,) = pipeline.local(stages, plan, self.place["pp"])
        parallelize_module(self.stage, mesh["tp"], styles(self.stage))
        self.part = self.stage
        if "DDP" in name:
            _pre_dp_module_transform(self.stage)  # DDP takes the local share of a DTensor
            group = axes["dp"].group
            self.part = nn.parallel.DistributedDataParallel(self.stage, process_group=group)
        else:
            for block in (*self.stage.blocks.children(), self.stage):
                fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        cpu, group = torch.device("cpu"), axes["pp"].group
        one = pipelining.PipelineStage(self.part, self.place["pp"], plan.stages, cpu, group=group)
        # Scaled by the loss: the engine would miss gradients of weights that a pass takes from DDP.
        how = dict(loss_fn=self._loss, scale_grads=False)
        self.engine = pipelining.Schedule1F1B(one, plan.micro_batches, **how)
        self.named = dict(self.stage.named_parameters())  # before a pass takes them away
        self.optimizer = torch.optim.AdamW(self.named.values(), lr=1e-3, fused=True)

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return mean / self.micro_batches

    def step(self, tokens: Tensor) -> None:
        """As `Ours.step`, whose gradients also live until the next one begins."""
        self.optimizer.zero_grad()
        mine = tokens.chunk(MESH.dp)[self.place["dp"]]
        losses: list[Tensor] = []
        with loss_parallel():
            if self.place["pp"] == 0:
                self.engine.step(mine)
            else:
                self.engine.step(target=mine, losses=losses)
        self.optimizer.step()
        if losses:
            self.loss = torch.stack([whole(loss.detach()) for loss in losses]).sum().item()

    def gradients(self) -> dict[str, Tensor]:
        return {name: whole(p.grad) for name, p in self.named.items()}


def whole(x: Tensor) -> Tensor:
    """All of a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def apart(mine: dict[str, Tensor], other: dict[str, Tensor], tp: int) -> float:
    """The largest difference of two gradients, in parts of the largest gradient; `mine` has the
    share of rank `tp`, and `other` that or all of it."""
    assert mine.keys() == other.keys()
    far = largest = 0.0
    for name, grad in mine.items():
        cut = other[name]
        for dim, size in enumerate(grad.shape):
            cut = cut if cut.shape[dim] == size else cut.chunk(MESH.tp, dim)[tp]
        far = max(far, (grad - cut).abs().max().item())
        largest = max(largest, grad.abs().max().item())
    return far / largest


def race(rank) -> tuple[dict[str, Times], dict[str, float], dict[str, float]]:
    """Step times, how far the first gradients are from ours, and the losses after as many steps."""
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(MODEL.vocab_size, (BATCH["global_batch"], MODEL.seq_len), generator=draw)
    ours = {name: Ours(rank, name) for name in OURS}
    theirs = {name: Theirs(rank, name) for name in PAIRS.values()}
    for turn in range(STEPS):
        for each in (ours | theirs).values():
            each.step(tokens)
        if not turn:
            mine, tp = ours["level 0"].gradients(), rank.coords["tp"]
            far = {name: apart(mine, each.gradients(), tp) for name, each in theirs.items()}
    losses = {name: each.loss for name, each in (ours | theirs).items()}
    calls = {name: lambda each=each: each.step(tokens) for name, each in (ours | theirs).items()}
    return interleave(calls, ROUNDS, group=rank.comm().group), far, losses


def main() -> None:
    """Print the table: medians, minima in brackets."""
    print(f"{units.text(4 * MODEL.num_params)} of fp32 weights on {MESH}, four micro-batches")
    for row, peer in PAIRS.items():
        owe(peer, {row: 0.7})
    with World(MESH, engine="processes", timeout=120) as world:
        ranks = world.run(race)
    times = slowest(times for times, *_ in ranks)
    far = {name: max(found[name] for _, found, _ in ranks) for name in PAIRS.values()}
    assert max(far.values()) < 1e-5, f"gradients are not those of ours: {far}"
    ends = [losses for *_, losses in ranks[MESH.size // 2 :]]  # the last stage knows the loss
    losses = {name: sum(end[name] for end in ends) / len(ends) for name in times}
    for name, each in times.items():
        print(f"{name:>26}: {each} ms, loss {losses[name]:.5f}")
    for row, peer in PAIRS.items():
        report(row, peer, times[row], times[peer])
        ratio = times[row].ratio(times[peer])
        print(f"{row} / {peer}: {ratio}, gradients within {far[peer]:.0e}")


if __name__ == "__main__":
    main()
