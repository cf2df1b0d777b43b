"""What memory.predict says of ZeRO is what ranks really hold, and what a dry run of one holds:
totals and peaks, phase by phase."""

import functools
from dataclasses import replace

import pytest
import torch

from labutils import accumulation, checkpointing, measure, memory, zero
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.world import World

# Sizes that few numbers of ranks divide.
LLAMA = ModelConfig(
    num_layers=2, d_model=10, num_heads=2, d_head=6, d_ff=13, vocab_size=67, seq_len=4,
    ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip
GPT2 = ModelConfig(num_layers=2, d_model=10, num_heads=2, d_ff=34, vocab_size=43, seq_len=7)
DEFAULT = 25 * 2**20
FORMATS = {
    "fp32": dict(precision="fp32"),
    "bf16": dict(precision="bf16"),
    "bf16, fp32 gradients": dict(precision="bf16", fp32_gradients="only"),
    "autocast": dict(precision="bf16", autocast=True),
}


def step_of(rank, config: ModelConfig, train: TrainConfig):
    """A training step on this rank, its model and its optimizer."""
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
        zero.shard(model, comm, param_dtype=narrow, reduce_dtype=wide, reshard=train.reshard)
        owner = inner = adamw(model.parameters())
    else:
        options = dict(level=train.zero, reduce_dtype=wide)
        if train.bucket_bytes != DEFAULT:  # or the optimizer's own
            options["bucket_bytes"] = train.bucket_bytes
        owner = zero.Optimizer(model.parameters(), comm, adamw, **options)
        inner = owner.inner
    rows = train.micro_batch * train.accumulation(comm.size)
    x, y = (torch.zeros(rows, config.seq_len, dtype=torch.long) for _ in range(2))

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            return model.loss(*batch)

    def step(zero_grad=True):
        if rows == train.micro_batch:
            value = loss((x, y))
            value.backward()
        else:
            batches = accumulation.micro_batches((x, y), train.micro_batch)
            value = accumulation.accumulate(loss, batches)
        with measure.phase("optimizer"):
            owner.step()
            if zero_grad:
                owner.zero_grad()
        del value

    return step, model, inner, owner.zero_grad


def training(rank, config: ModelConfig, train: TrainConfig):
    """Bytes at the fullest moment of each phase of a second step, and the lines of the fullest of
    all; the states between the first optimizer's step and zero_grad()."""
    step, model, inner, zero_grad = step_of(rank, config, train)
    step(zero_grad=False)
    states = measure.model_states(model, inner).by("name")
    zero_grad()
    step()
    history = measure.history(step, model, inner)
    phases = {phase: history.phases[phase].ledger.total for phase in PHASES}
    return phases, history.peak.ledger.by("name"), states


PHASES = ("forward", "backward", "optimizer")
SMALL = 3000
CASES = [  # ranks, level, bucket, precision
    (2, 1, DEFAULT, "fp32"),
    (3, 1, SMALL, "bf16"),
    (4, 1, DEFAULT, "bf16, fp32 gradients"),
    (3, 2, DEFAULT, "bf16"),
    (4, 2, SMALL, "fp32"),
    (2, 2, SMALL, "bf16, fp32 gradients"),
    (2, 2, 1, "bf16"),
    (2, 3, DEFAULT, "fp32"),
    (3, 3, DEFAULT, "bf16, fp32 gradients"),
    (4, 3, DEFAULT, "bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_is_predicted_is_what_a_rank_holds(case):
    """Every rank, every line; on sizes that N does not divide."""
    n, level, bucket, precision = case
    more = (n + level) % 2 == 0
    config = (LLAMA, GPT2)[more]
    train = TrainConfig(
        micro_batch=2, global_batch=2 * n * (1 + more), zero=level, **FORMATS[precision],
        stepping="foreach" if more else "fused", checkpointing="full" if more else "none",
        bucket_bytes=bucket, reshard=precision != "fp32",
    )  # fmt: skip
    with World(Mesh(dp=n)) as ranks:
        real = ranks.run(training, config, train)
    for rank, (phases, lines, states) in enumerate(real):
        held = memory.model_states(config, train, Mesh(dp=n), rank)
        assert held.by("name") == states
        if rank == n - 1:
            peak = memory.predict(config, train, mesh=Mesh(dp=n), rank=rank)
            assert peak.phases == phases and peak.total == max(phases.values())
            assert peak.by("name") == {name: amount for name, amount in lines.items() if amount}
            assert {line.note for line in peak} == {f"dry run of rank {rank}"}


def test_under_autocast_too():
    """On processes: torch keeps the half-precision copies in one place for all threads, and
    whichever rank leaves its region first forgets those of the others."""
    options = dict(micro_batch=1, global_batch=2, bucket_bytes=SMALL, stepping="foreach")
    with World(Mesh(dp=2), engine="processes") as ranks:
        for level in (1, 3):
            train = TrainConfig(zero=level, **options, **FORMATS["autocast"])
            phases, _, states = ranks.run(training, GPT2, train)[1]
            assert memory.predict(GPT2, train, mesh=Mesh(dp=2), rank=1).phases == phases
            assert memory.model_states(GPT2, train, Mesh(dp=2), 1).by("name") == states


def test_buckets_are_not_a_detail():
    """Of 25 MiB they hold more than buckets of one parameter each, which is what a page says."""
    model = ModelConfig(
        num_layers=3, d_model=128, num_heads=4, d_ff=512, vocab_size=100, seq_len=16
    )
    train = TrainConfig(micro_batch=1, global_batch=4, zero=2)
    on_a_page = memory.peak.by_formula(model, train, Mesh(dp=4)).total
    assert memory.peak_bytes(model, train, Mesh(dp=4)) > 1.2 * on_a_page


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_what_is_held_is_one_fact(n, level):
    """`zero.predict_held` and `memory.model_states` say the same of every rank, which is what the
    elements say that the rank steps, counted one by one."""
    train = TrainConfig(micro_batch=1, global_batch=n, zero=level, precision="fp32")
    shapes = {name: p.shape for name, p in GPT(GPT2).named_parameters()}
    if level < 3:
        buckets = [list(reversed(shapes))]
    else:
        buckets = [[name for name in shapes if not name.startswith("blocks.")]]
        buckets += [[x for x in shapes if x.startswith(f"blocks.{i}.")] for i in range(2)]
    sizes = [tuple(shapes[name].numel() for name in bucket) for bucket in buckets]
    total = 0
    for rank in range(n):
        owned = []
        for bucket in buckets:
            elements = [name for name in bucket for _ in range(shapes[name].numel())]
            share = -(-len(elements) // n)
            owned.append(elements[rank * share : (rank + 1) * share])
        numbers = sum(map(len, owned))
        counters = sum(len(set(each)) for each in owned)
        said = memory.model_states(GPT2, train, Mesh(dp=n), rank).by("name")
        held = zero.predict_held(sizes, n, level, rank=rank).by("name")
        for lines in (said, held):
            assert lines["exp_avg"] == lines["exp_avg_sq"] == 4 * numbers
            assert lines["step"] == 4 * counters
        total += numbers
    assert total == GPT2.num_params


def test_a_step_that_clips_is_refused():
    train = TrainConfig(micro_batch=1, global_batch=2, zero=1, clip=1.0)
    with pytest.raises(ValueError, match=r"clips \(clip=1.0\) has none: leave clip=None"):
        memory.predict(GPT2, train, mesh=Mesh(dp=2))


def test_a_rank_that_is_not_there_is_refused():
    train = TrainConfig(micro_batch=1, global_batch=2, zero=1)
    for ask in (memory.model_states, memory.peak_bytes, memory.history):
        for mesh, rank in ((Mesh(dp=2), 2), (Mesh(), 1)):
            with pytest.raises(ValueError, match=f"rank {rank} is not on this mesh"):
                ask(GPT2, train, mesh, rank)


def test_a_device_holds_less_with_each_level():
    """Where a bucket is small beside the model, and a layer too."""
    model = ModelConfig(num_layers=8, d_model=16, num_heads=2, d_ff=64, vocab_size=9, seq_len=2)
    train = TrainConfig(micro_batch=1, global_batch=8, stepping="fused", bucket_bytes=SMALL)
    levels = [replace(train, zero=level) for level in range(4)]
    totals = [memory.peak_bytes(model, options, Mesh(dp=8)) for options in levels]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 4
    assert memory.peak_bytes(model, levels[3], Mesh()) > totals[1]
