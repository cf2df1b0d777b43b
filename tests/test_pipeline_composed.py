"""Pipelines with what is put around them: three optimizer steps equal those of one device, in float64."""

import functools

import pytest
import torch

from labutils import data_parallel, pipeline, schedule, zero
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.world import RankError, World

TIED = ModelConfig(num_layers=3, d_model=8, num_heads=2, d_ff=12, vocab_size=14, seq_len=6)
UNTIED = ModelConfig(
    **dict(num_layers=3, d_model=8, num_heads=2, d_ff=12, vocab_size=14, seq_len=6, tied=False)
)
STEPS, DP = 3, 2
MAKE = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
}
FROZEN = ("blocks.0.attention.query.weight", "blocks.1.feed_forward.up.bias", "blocks.2.norm")
PLANS = {
    "line": schedule.one_f_one_b(2, 3),
    "split": schedule.zb_h1(2, 3),
    "loop": schedule.interleaved(2, 2),
    "vee": schedule.zb_v(2, 4),
    "both ways": schedule.dualpipe(2, 4),
}


@functools.cache
def grid():
    return World(Mesh(pp=2, dp=DP))


def build(config):
    model, made = GPT(config).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=made)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def sized(plan, tied):
    """A layer for each stage at least."""
    sizes = vars(TIED if tied else UNTIED)
    return ModelConfig(**sizes | {"num_layers": max(3, plan.stages)})


def batches(m, rows=1):
    made = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(14, (rows, 6), generator=made) for _ in range(2)) for _ in range(m)]


@functools.cache
def alone(config, m, kind):
    """Weights after the steps, on one device."""
    model = build(config)
    optimizer = MAKE[kind](model.parameters())
    tokens, targets = map(torch.cat, zip(*batches(m), strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def stepped(rank, plan, config, kind, level):
    """Weights after the steps, of this rank's stages."""
    comm, dp = rank.comm("pp"), rank.comm("dp")
    stages = pipeline.local(pipeline.split(build(config), plan.stages), plan, comm.rank)
    if level:
        optimizer = zero.Optimizer(
            stages.parameters(), dp, MAKE[kind], level=level, bucket_bytes=2000
        )
    else:
        optimizer = MAKE[kind](stages.parameters())
    m = plan.micro_batches
    for _ in range(STEPS):
        optimizer.zero_grad()
        pipeline.run(stages, plan, comm, batches(DP * m)[dp.rank * m :][:m])
        if not level:
            data_parallel.average_gradients(stages, dp)
        optimizer.step()
    named = stages.named_parameters(remove_duplicate=False)
    return {name.partition(".")[2]: p.detach() for name, p in named}


def assert_equal(results, wanted):
    assert set().union(*results) == set(wanted)
    for table in results:
        for name, weight in table.items():
            assert torch.allclose(weight, wanted[name], rtol=1e-11, atol=1e-12), name


CASES = [
    ("line", 1, "tied", "sgd"),
    ("line", 2, "tied", "adamw"),
    ("split", 2, "tied", "sgd"),
    ("loop", 1, "untied", "adamw"),
    ("loop", 2, "tied", "sgd"),
    ("vee", 2, "tied", "adamw"),
    ("both ways", 1, "tied", "sgd"),
    ("both ways", 2, "untied", "adamw"),
    ("both ways", 2, "tied", "sgd"),
]


@pytest.mark.parametrize("name, level, tied, kind", CASES)
def test_levels_of_zero_on_every_kind_of_schedule(name, level, tied, kind):
    """What two ranks have, a tied embedding or all there is, gets the sum of both gradients."""
    plan = PLANS[name]
    config = sized(plan, tied == "tied")
    results = grid().run(stepped, plan, config, kind, level)
    assert_equal(results, alone(config, DP * plan.micro_batches, kind))


def test_gradients_from_before_are_refused_wherever_they_are():
    """They would be added up twice; a zero.Optimizer keeps them out of sight."""

    def twice(rank, level):
        plan, dp = PLANS["line"], rank.comm("dp")
        stages = pipeline.local(pipeline.split(build(TIED), 2), plan, rank.comm("pp").rank)
        optimizer = zero.Optimizer(stages.parameters(), dp, level=level)
        for _ in range(2):
            pipeline.run(stages, plan, rank.comm("pp"), batches(3))
        optimizer.step()

    for level in (1, 2):
        with pytest.raises(RankError, match=r"call zero_grad\(\) before run"):
            grid().run(twice, level)
