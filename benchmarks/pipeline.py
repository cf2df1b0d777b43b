"""Our pipelines beside torch.distributed.pipelining on four processes: time, activations, bubbles.

    python benchmarks/pipeline.py

Both run the same schedule on the same stages and batches and take turns; a ratio below 1 means that
ours is faster. Bubbles are those of operations that wait instead of computing, as a host waits for
its GPU, so that four ranks on two cores can work at the same time. Last, what it takes to make and
time a large schedule, beside the orders that torch computes. What torch holds are the forward
passes of which autograd still keeps a tensor: in ZB-V more than its order needs.
"""

import functools
import gc
import time
import weakref

import torch
from _side_by_side import Times, interleave, owe, report, slowest
from torch import nn

from labutils import pipeline, schedule
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.schedule import Durations, Schedule
from labutils.world import World

RANKS, BATCHES, ROUNDS, WARM = 4, 8, 11, 2
MODEL = ModelConfig(
    num_layers=8, d_model=256, num_heads=4, d_ff=1024, vocab_size=1024, seq_len=64, tied=False
)
SAME = {
    "ScheduleGPipe": schedule.gpipe(RANKS, BATCHES),
    "Schedule1F1B": schedule.one_f_one_b(RANKS, BATCHES),
    "ScheduleInterleaved1F1B": schedule.interleaved(RANKS, BATCHES),
    "ScheduleZBVZeroBubble": schedule.zb_v(RANKS, BATCHES),
}
PEER = "distributed.pipelining"
PACE = Durations(F=0.03, B=0.03, W=0.03)


def stages_of(rank, plan: Schedule) -> nn.ModuleList:
    """This rank's stages, the layers shared out evenly."""
    model = GPT(MODEL, generator=torch.Generator().manual_seed(0), attention="sdpa")
    layers = [MODEL.num_layers // plan.stages] * plan.stages
    return pipeline.local(pipeline.split(model, plan.stages, layers), plan, rank.comm("pp").rank)


def ours(rank, plan: Schedule, x, y) -> functools.partial:
    """A step of ours."""
    batches = list(zip(x.split(1), y.split(1), strict=True))
    return functools.partial(pipeline.run, stages_of(rank, plan), plan, rank.comm("pp"), batches)


def theirs(rank, name: str, x, y, watch=lambda stages: None) -> functools.partial:
    """A step of torch's."""
    from torch.distributed import pipelining

    plan, comm, cpu = SAME[name], rank.comm("pp"), torch.device("cpu")
    stages = stages_of(rank, plan)
    watch(stages)
    parts = [
        pipelining.PipelineStage(stage, stage.index, stage.count, cpu, group=comm.group)
        for stage in stages
    ]
    one = parts if plan.stages > RANKS else parts[0]
    engine = getattr(pipelining, name)(one, BATCHES, loss_fn=pipeline.mean_cross_entropy)
    first = any(stage.index == 0 for stage in stages)
    last = any(stage.index == stage.count - 1 for stage in stages)
    return functools.partial(engine.step, *(x,) * first, **({"target": y} if last else {}))


class Kept:
    """Counts the forward passes of modules of which autograd keeps something."""

    def __init__(self, modules: nn.ModuleList) -> None:
        self.alive = self.peak = 0
        gc.freeze()  # quicker below
        for module in modules:
            module.forward = functools.partial(self.watched, module.forward)

    def watched(self, forward, *args):
        gc.collect()  # what only waits for it is not kept
        mark = type("Mark", (), {})()
        weakref.finalize(mark, self.gone)
        self.alive += 1
        self.peak = max(self.peak, self.alive)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x, mark), lambda kept: kept[0]):
            return forward(*args)

    def gone(self) -> None:
        self.alive -= 1


def race(rank, name: str) -> tuple[dict[str, Times], tuple[int, int]]:
    """Step times of both, and the activations that ours and theirs held at once."""
    made = torch.Generator().manual_seed(0)
    x, y = (torch.randint(MODEL.vocab_size, (BATCHES, MODEL.seq_len), generator=made) for _ in "xy")
    calls = {"ours": ours(rank, SAME[name], x, y), "torch": theirs(rank, name, x, y)}
    for _ in range(WARM):
        for call in calls.values():
            call()
    seen = []
    watched = theirs(rank, name, x, y, lambda stages: seen.append(Kept(stages)))
    watched()  # it also finds out shapes
    gc.collect()
    before, seen[0].peak = seen[0].alive, 0
    watched()
    held = max(calls["ours"]().in_flight), seen[0].peak - before
    group = rank.comm("pp").group
    return interleave(calls, ROUNDS, group=group), held


def waiting(rank, plan: Schedule) -> pipeline.RankRun:
    """A step of ours whose operations take at least as long as `PACE` says."""
    tokens = torch.zeros(1, 4, dtype=torch.long)
    layers = [1] * plan.stages
    small = ModelConfig(
        num_layers=plan.stages, d_model=8, num_heads=1, d_ff=8, vocab_size=8, seq_len=4, tied=False
    )
    stages = pipeline.local(pipeline.split(GPT(small), plan.stages, layers), plan, rank.rank)
    comm, batches = rank.comm("pp"), [(tokens, tokens)] * BATCHES
    pipeline.run(stages, plan, comm, batches)
    comm.barrier()
    return pipeline.run(stages, plan, comm, batches, pace=PACE)


def order_of(name: str, p: int, m: int, chunks: int) -> dict:
    """Torch's order of all ranks, by the methods that its classes call, without ranks."""
    from torch.distributed import pipelining

    one = (kind := getattr(pipelining, name)).__new__(kind)
    one._n_microbatches, one.pp_group_size, one.n_local_stages = m, p, chunks
    one._num_stages = one.num_stages = p * chunks
    one.number_of_rounds, one.microbatches_per_round = m // p, p
    if chunks == 1:
        return one._get_pipeline_order()
    return {rank: one._calculate_single_rank_operations(rank) for rank in range(p)}


def main() -> None:
    """Print the tables."""
    print(f"step time in ms, median (minimum), on {RANKS} processes, {BATCHES} micro-batches")
    owe(PEER, {plan.name: 1.02 for plan in SAME.values()})
    with World(Mesh(pp=RANKS), engine="processes", timeout=120) as world:
        for name, plan in SAME.items():
            results = world.run(race, name)
            times = slowest(each for each, _ in results)
            report(plan.name, PEER, times["ours"], times["torch"])
            held, torchs = zip(*(held for _, held in results), strict=True)
            assert held == tuple(plan.peak(rank) for rank in range(RANKS))
            ratio = times["ours"].ratio(times["torch"])
            print(f"{plan.name:>12}: ours {times['ours']}   torch {times['torch']}", end="   ")
            print(f"ratio {ratio}   held at most {held}, torch {torchs}")
        print("\nbubble fraction, operations that wait 30 ms: simulated, measured")
        for plan in (*SAME.values(), schedule.zb_h1(RANKS, BATCHES)):
            measured = pipeline.joined(plan, world.run(waiting, plan)).bubble_fraction
            simulated = schedule.simulate(plan, PACE).bubble_fraction
            print(f"{plan.name:>12}: {simulated:.1%} {measured:.1%}")
    print("\n64 ranks, 4096 micro-batches, in s: made, timed; torch's order made")
    for name, make in (
        ("Schedule1F1B", schedule.one_f_one_b),
        ("ScheduleInterleaved1F1B", schedule.interleaved),
        ("ScheduleZBVZeroBubble", schedule.zb_v),
    ):
        start = time.perf_counter()
        plan = make(64, 4096)
        made = time.perf_counter()
        schedule.simulate(plan)
        timed = time.perf_counter()
        order_of(name, 64, 4096, plan.stages // 64)
        torchs = time.perf_counter() - timed
        print(f"{plan.name:>12}: {made - start:.2f} {timed - made:.2f}   {torchs:.2f}")


if __name__ == "__main__":
    main()
