"""Where a gradient is once a hook has taken it: found there by a pipeline that adds up two halves."""

import functools

import pytest
import torch
from small_models import build
from torch import nn

from labutils import accumulation, pipeline, precision, schedule, zero
from labutils.config import Mesh, ModelConfig
from labutils.gradients import gradient_of
from labutils.world import RankError, World

TIED = ModelConfig(num_layers=3, d_model=8, num_heads=2, d_ff=12, vocab_size=14, seq_len=6)
MADE = torch.Generator().manual_seed(1)
BATCHES = [tuple(torch.randint(14, (1, 6), generator=MADE) for _ in range(2)) for _ in range(3)]


def in_fp32(rank, kept):
    """The gradient of the tied embedding, added up in fp32 beside bf16 weights."""
    plan = schedule.one_f_one_b(2, 3)
    stages = pipeline.split(build(TIED, 0).bfloat16(), 2)
    stages = pipeline.local(stages, plan, rank.comm("pp").rank)
    weight = next(p for p in stages.parameters() if p.ends == 2)
    if kept == "buffer":
        with accumulation.gradient_buffer(stages.parameters()) as buffer:
            pipeline.run(stages, plan, rank.comm("pp"), BATCHES)
        return buffer[weight]
    trained = [p for p in stages.parameters() if p.requires_grad]
    masters = precision.MasterWeights(torch.optim.SGD(trained), fp32_gradients=kept)
    pipeline.run(stages, plan, rank.comm("pp"), BATCHES)
    masters.collect()
    return masters.masters[weight].grad


@pytest.mark.parametrize("kept", ["buffer", True, "only", False])
def test_halves_of_a_tied_embedding_meet_where_fp32_gradients_are(kept):
    first, last = World(Mesh(pp=2)).run(in_fp32, kept)
    model = build(TIED, 0)
    model.loss(*map(torch.cat, zip(*BATCHES, strict=True))).backward()
    assert torch.equal(first, last)
    wanted = model.tokens.weight.grad.float()
    assert (first - wanted).norm() < 0.05 * wanted.norm()


def test_it_is_in_grad_again_when_nobody_takes_it_any_more():
    layer = torch.nn.Linear(1, 1)
    with accumulation.gradient_buffer(layer.parameters()) as buffer:
        layer(torch.ones(1, 1)).backward()
        assert gradient_of(layer.weight) is buffer[layer.weight]
    layer(torch.ones(1, 1)).backward()
    assert gradient_of(layer.weight) is layer.weight.grad
    masters = precision.MasterWeights(
        torch.optim.SGD(layer.bfloat16().parameters()), fp32_gradients="only"
    )
    layer.zero_grad()
    layer(torch.ones(1, 1).bfloat16()).backward()
    assert gradient_of(layer.weight) is masters.masters[layer.weight].grad is not None


@pytest.mark.parametrize("fp32_gradients", [True, "only"])
def test_gradients_that_are_not_in_grad_are_not_clipped_as_if_there_were_none(fp32_gradients):
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    masters = precision.MasterWeights(
        torch.optim.SGD(layer.parameters()), fp32_gradients=fp32_gradients
    )
    other = nn.Linear(4, 4)
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    clip = functools.partial(zero.clip_grad_norm, max_norm=1.0)
    with pytest.raises(RankError, match="taken out of .grad as they come: clip what its collect"):
        World(1).run(lambda rank: clip(layer.parameters(), rank.comm()))
    masters.collect()
    kept = list(masters.masters.values())
    assert World(1).run(lambda rank: clip(kept, rank.comm()))[0] > 1
    with accumulation.gradient_buffer(other.parameters()):
        other(torch.ones(1, 4)).sum().backward()
        with pytest.raises(RankError, match="taken out of .grad as they come"):
            World(1).run(lambda rank: clip(other.parameters(), rank.comm()))
