"""What ZeRO holds and sends: formula = dry run = threads = processes, totals and peaks, to the byte."""

import dataclasses

import pytest
import torch
from zero_training import TIED, UNTIED, held_over, inner, layout, own, ranks

from labutils import measure, world, zero
from labutils.config import ModelConfig
from labutils.model import GPT

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def second_step(rank, config, level, options):
    """The peak of all that is alive, the peak of model states, the layout."""
    model = GPT(config, generator=rank.generator)
    optimizer = own(model, rank.comm("dp"), level, torch.optim.AdamW, **options)
    x = torch.zeros(2, config.seq_len, dtype=torch.long)

    def step():
        model.loss(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    everything = measure.history(step, model, inner(optimizer))
    states = everything.only("weights", "gradients", "optimizer")
    return everything.peak.ledger, states.peak.ledger, layout(model, optimizer)


def widths(options):
    computing = options.get("param_dtype", torch.float32).itemsize
    reducing = options.get("reduce_dtype", torch.float32).itemsize
    return {"itemsize": computing, "reduce_itemsize": reducing, "shard_itemsize": 4}


def assert_formula(states, sent, dealt, n, level, rank, options):
    known = {name: options[name] for name in ("reshard", "prefetch") if name in options}
    held = zero.predict_held(dealt, n, level, rank=rank, **widths(options), **known)
    assert held.diff(states).unexplained == 0, held.diff(states)
    known.pop("prefetch", None)
    books = {"steps": 2, "start": True, "rank": rank}
    predicted = zero.predict_sent(dealt, n, level, **books, **widths(options), **known)
    assert predicted.diff(sent.only(rank=rank)).unexplained == 0


CASES = [
    (TIED, 2, 1, {"bucket_bytes": 2000}),
    (UNTIED, 3, 1, {}),
    (UNTIED, 3, 2, {"bucket_bytes": 2000}),
    (TIED, 4, 2, {}),
    (UNTIED, 2, 3, {"prefetch": False}),
    (TIED, 3, 3, {}),
    (UNTIED, 4, 3, {"reshard": False}),
    (UNTIED, 3, 3, BF16),
]
each_case = pytest.mark.parametrize(
    "config, n, level, options", CASES, ids=[f"level {level} on {n}" for _, n, level, _ in CASES]
)


@each_case
def test_formula_dry_run_and_threads_agree(config, n, level, options):
    real = ranks(n).run(second_step, config, level, options)
    for rank, (_, states, dealt) in enumerate(real):
        assert_formula(states, ranks(n).ledger, dealt, n, level, rank, options)
    with world.World(n, engine="dry") as dry:
        for rank in (0, n - 1):  # the last one has the padding
            told = dry.run(second_step, config, level, options, rank=rank)
            assert told == real[rank]
            assert_formula(told[1], dry.ledger, told[2], n, level, rank, options)


def test_processes_hold_and_send_the_same():
    with world.World(2, engine="processes") as two, world.World(2, engine="dry") as dry:
        for level in (1, 2, 3):
            real = two.run(second_step, UNTIED, level, {})
            assert dry.run(second_step, UNTIED, level, {}, rank=1) == real[1]
            assert_formula(real[1][1], two.ledger, real[1][2], 2, level, 1, {})


def test_a_rank_of_llama_405b_among_16384():
    """Of two of its layers, and of all 126 by the formula alone."""

    def program(rank, config):
        model = zero.shard(GPT(config, attention="sdpa"), rank.comm("dp"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x = torch.zeros(1, 64, dtype=torch.long)

        def step():
            model.loss(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        return held_over(step, model, optimizer).peak.ledger, zero.layout(model)

    config = dataclasses.replace(ModelConfig.named("llama-3.1-405b"), num_layers=2)
    n, rank = 16_384, 11_111
    with world.World(n, engine="dry") as dry:
        held, dealt = dry.run(program, config, rank=rank)
        sent = zero.predict_sent(dealt, n, 3, steps=2, start=True, rank=rank)
        assert sent.diff(dry.ledger).unexplained == 0
    assert zero.predict_held(dealt, n, 3, rank=rank).diff(held).unexplained == 0
    assert held.total == 75_374_108_764
    root, layer, _ = dealt
    whole = zero.predict_held((root, *[layer] * 126), n, 3, rank=rank)
    assert whole.total == 88_510_935_500
