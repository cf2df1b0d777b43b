"""What memory.predict says of ZeRO is what ranks really hold of weights, gradients and optimizer state."""

import pytest
import torch

from labutils import checkpointing, memory, zero
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT
from labutils.world import World

# Buckets of one layer's size are the layers, what computes after them, and what comes before: (v + 1)·h = 4h² + 3hf + 2h.
LLAMA = ModelConfig(
    num_layers=3, d_model=8, num_heads=2, d_ff=12, vocab_size=69, seq_len=4, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False
)  # fmt: skip
GPT2 = ModelConfig(num_layers=2, d_model=8, num_heads=2, d_ff=32, vocab_size=40, seq_len=8)
STATES = ("weights", "gradients", "optimizer")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def training(rank, config: ModelConfig, train: TrainConfig):
    """What this rank holds in a step, moment by moment, and its units."""
    dtype, comm = DTYPES[train.precision], rank.comm("dp")
    model = checkpointing.apply(GPT(config).to(dtype), train.checkpointing)
    options = dict(gradient_dtype=torch.float32) if train.fp32_gradients else {}
    if train.zero == 3:
        owner = zero.shard(model, comm, **options)
    else:
        layer = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
        owner = zero.Optimizer(
            model.parameters(),
            comm,
            level=train.zero,
            bucket_bytes=layer if train.zero == 2 else 2**40,
            **options,
        )
    x = torch.zeros(train.micro_batch, config.seq_len, dtype=torch.long)

    def step():
        for _ in range(train.accumulation(comm.size)):
            model.loss(x, x).backward()
        owner.step()
        owner.zero_grad()

    step()
    return zero.history(step, owner), owner.layout


def fullest(history, *phases: str) -> Ledger:
    """Model states at the moment of these phases that has the most of them."""
    moments = [
        Ledger(line for line in m.ledger if line.component in STATES)
        for m in history.moments
        if m.phase in phases
    ]
    return max(moments, key=lambda ledger: ledger.total)


@pytest.mark.parametrize(
    "precision",
    [dict(precision="fp32"), dict(precision="bf16"), dict(precision="bf16", fp32_gradients="only")],
)
@pytest.mark.parametrize("level, config", [(1, LLAMA), (2, LLAMA), (3, LLAMA), (3, GPT2)])
def test_what_is_predicted_is_what_a_rank_holds(precision, level, config):
    n, m, policy = (4, 1, "none") if level == 1 else (2, 2, "full")
    train = TrainConfig(
        micro_batch=2,
        global_batch=2 * n * m,
        checkpointing=policy,
        zero=level,
        stepping="fused",
        **precision,
    )
    width, half = DTYPES[train.precision].itemsize, train.precision == "bf16"
    predicted = memory.history(config, train, Mesh(dp=n))
    with World(Mesh(dp=n)) as world:
        ranks = world.run(training, config, train)
    for measured, layout in ranks:
        held = zero.predict_held(
            layout,
            n,
            level,
            itemsize=width,
            gradient_itemsize=4 if train.fp32_gradients else None,
            master=half,
        )
        assert held.diff(measured.peak.ledger).unexplained == 0
        # What the two count differently, by name. Adam's steps: once here, once a unit there.
        steps = Line("steps of the other units", 4 * (len(layout) - 1), component="optimizer")
        # A gradient counts here from the moment it is made, there when it has a parameter.
        waiting = Line(
            "gradient of a bias",
            -config.d_ff * width * (level == 3 and config.bias is True),
            component="gradients",
        )
        # The optimizer gets fp32 gradients of all shards here, of one unit's after the other's there.
        largest = max(sum(unit.trained + unit.after) for unit in layout) // n
        shards = Line(
            "fp32 gradients of the other units",
            -4 * (config.num_params // n - largest) * (half and not train.fp32_gradients),
            component="gradients",
        )
        backward = fullest(predicted, "backward") + Ledger([steps, waiting])
        diff = backward.diff(fullest(measured, "backward"), by="component")
        assert diff.unexplained == 0, str(diff)
        others = [
            fullest(predicted, "forward") + Ledger([steps]),
            fullest(predicted, "optimizer") + Ledger([steps, shards]),
        ]
        diff = max(others, key=lambda ledger: ledger.total).diff(
            fullest(measured, "start", "forward", "step"), by="component"
        )
        assert diff.unexplained == 0, str(diff)
