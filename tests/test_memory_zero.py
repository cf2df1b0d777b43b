"""What memory.predict says of ZeRO is what ranks really hold, and what a dry run of one holds:
totals and peaks, phase by phase."""

import functools

import pytest
import torch

from labutils import accumulation, checkpointing, measure, memory, zero
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.world import World

# Sizes that the ranks divide: padding is in no formula.
LLAMA = ModelConfig(
    num_layers=4, d_model=8, num_heads=2, d_ff=12, vocab_size=68, seq_len=4, ffn="swiglu",
    norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip
GPT2 = ModelConfig(num_layers=3, d_model=8, num_heads=2, d_ff=32, vocab_size=40, seq_len=8)
N = 2
FORMATS = {
    "fp32": dict(precision="fp32"),
    "bf16": dict(precision="bf16"),
    "bf16, fp32 gradients": dict(precision="bf16", fp32_gradients="only"),
    "autocast": dict(precision="bf16", autocast=True),
}


def step_of(rank, config: ModelConfig, train: TrainConfig):
    """A training step on this rank, its model and its optimizer; each parameter is a bucket."""
    half = train.precision != "fp32" and not train.autocast
    narrow = torch.bfloat16 if half else torch.float32
    wide = torch.float32 if train.fp32_gradients else None
    for turn in range(rank.size):  # threads share one default dtype; fake modules have no .to()
        if turn == rank.rank:
            torch.set_default_dtype(torch.float32 if train.zero == 3 else narrow)
            model = GPT(config, attention=train.attention)
            torch.set_default_dtype(torch.float32)
        rank.comm().barrier()
    checkpointing.apply(model, train.checkpointing)
    options = {train.stepping: True}
    adamw = functools.partial(torch.optim.AdamW, **options)
    comm = rank.comm("dp")
    if train.zero == 3:
        zero.shard(model, comm, param_dtype=narrow, reduce_dtype=wide)
        owner = inner = adamw(model.parameters())
    else:
        options = dict(level=train.zero, reduce_dtype=wide, bucket_bytes=1)
        owner = zero.Optimizer(model.parameters(), comm, adamw, **options)
        inner = owner.inner
    rows = train.micro_batch * train.accumulation(comm.size)
    x, y = (torch.zeros(rows, config.seq_len, dtype=torch.long) for _ in range(2))

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            return model.loss(*batch)

    def step():
        if rows == train.micro_batch:
            value = loss((x, y))
            value.backward()
        else:
            batches = accumulation.micro_batches((x, y), train.micro_batch)
            value = accumulation.accumulate(loss, batches)
        with measure.phase("optimizer"):
            owner.step()
            owner.zero_grad()
        del value

    return step, model, inner


def training(rank, config: ModelConfig, train: TrainConfig):
    """Bytes at the fullest moment of each phase of a second step, and Adam's steps on this rank."""
    step, model, inner = step_of(rank, config, train)
    step()
    history = measure.history(step, model, inner)
    counted = sum(state["step"].nbytes for state in inner.state.values())
    return {phase: moment.ledger.total for phase, moment in history.phases.items()}, counted


@pytest.fixture(scope="module")
def ranks():
    with World(Mesh(dp=N)) as world:
        yield world


@pytest.fixture(scope="module")
def processes():
    with World(Mesh(dp=N), engine="processes") as world:
        yield world


@pytest.fixture(scope="module")
def alone():
    with World(Mesh(dp=N), engine="dry") as world:
        yield world


@pytest.mark.parametrize(
    "level, precision, config",
    [
        (level, precision, (LLAMA, GPT2)[(level + i) % 2])
        for level in (1, 2, 3)
        for i, precision in enumerate(FORMATS)
    ],
)
def test_what_is_predicted_is_what_a_rank_holds(ranks, processes, alone, level, precision, config):
    more = config is GPT2
    train = TrainConfig(
        micro_batch=2, global_batch=2 * N * (1 + more), zero=level, **FORMATS[precision],
        stepping="foreach" if more else "fused", checkpointing="full" if more else "none",
    )  # fmt: skip
    peak = memory.predict(config, train, mesh=Mesh(dp=N))
    # Adam counts its steps for each piece of a parameter that a rank has: of all, the formulas say.
    steps = peak.by("name")["step"]
    # torch keeps the half-precision copies of autocast in one place for all threads: whichever
    # rank leaves its region first forgets those of the others.
    real = (processes if train.autocast else ranks).run(training, config, train)
    for measured, counted in real:
        assert counted == steps if level < 3 else counted <= steps
        found = {phase: measured[phase] - counted for phase in peak.phases}
        assert found == {phase: total - steps for phase, total in peak.phases.items()}
    if precision == "bf16":  # the slowest of the three
        dry, counted = alone.run(training, config, train, rank=1)
        assert {phase: dry[phase] - counted for phase in found} == found


def test_a_device_holds_less_with_each_level():
    train = TrainConfig(micro_batch=1, global_batch=8, stepping="fused", checkpointing="full")
    model = ModelConfig.named("gpt2")
    totals = []
    for level in range(4):
        options = TrainConfig(**{**vars(train), "zero": level})
        totals.append(memory.peak_bytes(model, options, Mesh(dp=8)))
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4
    assert memory.peak_bytes(model, options, Mesh()) > totals[0]
