"""Loss and gradients beside torch.distributed.pipelining, on the same processes, stages and batches."""

import pytest
import torch

from labutils import pipeline, schedule
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.world import World

CONFIG = ModelConfig(
    num_layers=4, d_model=8, num_heads=2, d_ff=12, vocab_size=13, seq_len=6, tied=False
)
SAME = {
    "ScheduleGPipe": schedule.gpipe(2, 4),
    "Schedule1F1B": schedule.one_f_one_b(2, 4),
    "ScheduleInterleaved1F1B": schedule.interleaved(2, 4),
    "ScheduleZBVZeroBubble": schedule.zb_v(2, 4),
}


@pytest.fixture(scope="module")
def processes():
    with World(Mesh(pp=2), engine="processes", timeout=120) as ranks:
        yield ranks


def both(rank, name):
    """Of torch and of ours: the loss where it is known, and the gradients."""
    from torch.distributed import pipelining

    plan, comm = SAME[name], rank.comm("pp")
    made = torch.Generator().manual_seed(1)
    x, y = (torch.randint(13, (4, 6), generator=made) for _ in range(2))
    found = []
    for ours in (False, True):
        model = GPT(CONFIG, generator=torch.Generator().manual_seed(0)).double()
        stages = pipeline.local(pipeline.split(model, plan.stages), plan, comm.rank)
        if ours:
            batches = list(zip(x.split(1), y.split(1), strict=True))
            loss = pipeline.run(stages, plan, comm, batches).loss
        else:
            cpu, group = torch.device("cpu"), comm.group
            theirs = [
                pipelining.PipelineStage(stage, stage.index, stage.count, cpu, group=group)
                for stage in stages
            ]
            one = theirs if len(theirs) > 1 or plan.stages > 2 else theirs[0]
            engine = getattr(pipelining, name)(one, 4, loss_fn=pipeline.mean_cross_entropy)
            last, losses = any(stage.index == stage.count - 1 for stage in stages), []
            given = (x,) if any(stage.index == 0 for stage in stages) else ()
            engine.step(*given, **(dict(target=y, losses=losses) if last else {}))
            loss = torch.stack(losses).mean() if last else None
        found.append((loss, {name: p.grad for name, p in stages.named_parameters()}))
    return found


@pytest.mark.parametrize("name", SAME)
def test_the_same_loss_and_gradients(processes, name):
    for theirs, ours in processes.run(both, name):
        assert (theirs[0] is None) == (ours[0] is None)
        if ours[0] is not None:
            assert torch.allclose(theirs[0], ours[0], rtol=1e-12)
        assert theirs[1].keys() == ours[1].keys()
        for parameter, grad in theirs[1].items():
            assert torch.allclose(grad, ours[1][parameter], rtol=1e-10, atol=1e-12), parameter
