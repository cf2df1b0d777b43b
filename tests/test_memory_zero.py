"""What memory.predict says of ZeRO is what ranks really hold of weights, gradients and optimizer state."""

import functools

import pytest
import torch

from labutils import checkpointing, measure, memory, zero
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


def training(rank, config: ModelConfig, train: TrainConfig):
    """What this rank holds in a step, moment by moment, and its units."""
    comm = rank.comm("dp")
    model = checkpointing.apply(GPT(config), train.checkpointing)
    adamw = functools.partial(torch.optim.AdamW, fused=True)
    if train.zero == 3:
        owner = adamw(zero.shard(model, comm).parameters())
        layout, inner = zero.layout(model), owner
    else:
        layer = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
        room = layer if train.zero == 2 else 2**40
        owner = zero.Optimizer(model.parameters(), comm, adamw, level=train.zero, bucket_bytes=room)
        layout, inner = owner.layout, owner.inner
    x = torch.zeros(train.micro_batch, config.seq_len, dtype=torch.long)

    def step():
        for _ in range(train.accumulation(comm.size)):
            model.loss(x, x).backward()
        owner.step()
        owner.zero_grad()

    step()
    return measure.history(step, model, inner).only(*STATES), layout


def fullest(history, *phases: str) -> Ledger:
    """Model states at the moment of these phases that has the most of them."""
    moments = [
        Ledger(line for line in m.ledger if line.component in STATES)
        for m in history.moments
        if m.phase in phases
    ]
    return max(moments, key=lambda ledger: ledger.total)


@pytest.mark.parametrize("level, config", [(1, LLAMA), (2, LLAMA), (3, LLAMA), (3, GPT2)])
def test_what_is_predicted_is_what_a_rank_holds(level, config):
    n, m, policy = (4, 1, "none") if level == 1 else (2, 2, "full")
    train = TrainConfig(
        micro_batch=2,
        global_batch=2 * n * m,
        checkpointing=policy,
        zero=level,
        stepping="fused",
        precision="fp32",
    )
    predicted = memory.history(config, train, Mesh(dp=n))
    with World(Mesh(dp=n)) as world:
        ranks = world.run(training, config, train)
    for rank, (measured, layout) in enumerate(ranks):
        held = zero.predict_held(layout, n, level, rank=rank)
        assert held.diff(measured.peak.ledger).unexplained == 0
        # What the two count differently, by name. Adam's steps: once here, once a piece there.
        steps = Line(
            "steps of the other pieces", held.by("name")["step"] - 4, component="optimizer"
        )
        # A gradient counts here from the moment it is made, there when it has a parameter.
        waiting = Line(
            "gradient of a bias",
            -config.d_ff * 4 * (level == 3 and config.bias is True),
            component="gradients",
        )
        backward = fullest(predicted, "backward") + Ledger([steps, waiting])
        diff = backward.diff(fullest(measured, "backward"), by="component")
        assert diff.unexplained == 0, str(diff)
        others = [
            fullest(predicted, "forward") + Ledger([steps]),
            fullest(predicted, "optimizer") + Ledger([steps]),
        ]
        diff = max(others, key=lambda ledger: ledger.total).diff(
            fullest(measured, "start", "forward", "optimizer", "end"), by="component"
        )
        assert diff.unexplained == 0, str(diff)
