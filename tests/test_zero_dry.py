"""What ZeRO holds and sends: formula = dry run = threads = processes, totals and peaks, to the byte."""

import dataclasses

import pytest
import torch
from zero_training import TIED, UNTIED, inner, of_a_step, own, planned, ranks

from labutils import checkpointing, measure, predict, world, zero
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.predict.rehearsal import rehearsal

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def second_step(rank, config, level, options):
    """The peak of all that is alive, and that of model states."""
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
    return everything.peak.ledger, states.peak.ledger


def assert_formula(states, sent, config, n, level, rank, options):
    train, mesh = planned(n, level, dtype=torch.float32, **options), Mesh(dp=n)
    held = predict.peak_states(config, train, mesh, rank)
    assert held.diff(states).unexplained == 0, held.diff(states)
    told = predict.sent(config, train, mesh, rank).scaled(2)
    assert of_a_step(told) == of_a_step(sent.only(rank=rank))


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
    for rank, (_, states) in enumerate(real):
        assert_formula(states, ranks(n).ledger, config, n, level, rank, options)
    with world.World(n, engine="dry") as dry:
        for rank in (0, n - 1):  # the last one has the padding
            told = dry.run(second_step, config, level, options, rank=rank)
            assert told == real[rank]
            assert_formula(told[1], dry.ledger, config, n, level, rank, options)


@pytest.mark.parametrize("n, level", [(1, 1), (2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("kept", [False, "only"])
def test_in_half_precision_shares_have_gradients_of_their_own(n, level, kept):
    """They come bucket by bucket, in fp32; with few ranks the last bucket is the fullest moment."""
    train = TrainConfig(
        micro_batch=1, global_batch=n, precision="bf16", zero=level, fp32_gradients=kept
    )
    held = predict.peak_states(UNTIED, train, Mesh(dp=n), n - 1)
    told = rehearsal(UNTIED, train, Mesh(dp=n), n - 1).peak_states
    assert held.diff(told).unexplained == 0, held.diff(told)
    assert ("gradient shards" in held.by("name")) == (level == 2 or not kept)


@pytest.mark.parametrize("vocab_size", [11, 200], ids=["layers", "the head"])
@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
def test_level_3_holds_what_it_gathered_ahead_and_did_not_release(reshard, prefetch, vocab_size):
    """The fullest moment is in the backward pass of a layer or in that of a large head."""
    config = dataclasses.replace(UNTIED, num_layers=4, vocab_size=vocab_size)
    how = dict(zero=3, precision="fp32", reshard=reshard, prefetch=prefetch)
    train, mesh = TrainConfig(micro_batch=1, global_batch=2, **how), Mesh(dp=2)
    held = predict.peak_states(config, train, mesh, 1)
    told = rehearsal(config, train, mesh, 1).peak_states
    assert held.diff(told).unexplained == 0, held.diff(told)


def test_processes_hold_and_send_the_same():
    with world.World(2, engine="processes") as two, world.World(2, engine="dry") as dry:
        for level in (1, 2, 3):
            real = two.run(second_step, UNTIED, level, {})
            assert dry.run(second_step, UNTIED, level, {}, rank=1) == real[1]
            assert_formula(real[1][1], two.ledger, UNTIED, 2, level, 1, {})


def test_a_rank_of_llama_405b_among_16384():
    """Of two of its layers, and of all 126 by the formula alone."""
    config, (n, rank) = ModelConfig.named("llama-3.1-405b"), (16_384, 11_111)
    two = dataclasses.replace(config, num_layers=2, seq_len=64)
    train = TrainConfig(micro_batch=1, global_batch=n, precision="fp32", zero=3, attention="sdpa")
    train, mesh = dataclasses.replace(train, stepping="foreach"), Mesh(dp=n)
    held, told = predict.peak_states(two, train, mesh, rank), rehearsal(two, train, mesh, rank)
    assert held.diff(told.peak_states).unexplained == 0
    assert held.total == 75_374_108_764
    assert predict.sent(two, train, mesh, rank).diff(told.sent).unexplained == 0
    assert predict.peak_states(config, train, mesh, rank).total == 88_510_935_500


def a_sequence_of_llama_405b(rank, config):
    """The peak of a step on one sequence, every layer recomputed, in lab 09's units."""
    model = GPT(config, attention="sdpa")
    checkpointing.apply(model, "full")
    units = [model.tokens, *model.blocks, model.head]
    zero.shard(model, rank.comm("dp"), units=units, param_dtype=torch.bfloat16)
    optimizer, x = torch.optim.AdamW(model.parameters()), torch.zeros(1, 8192, dtype=torch.long)
    for piece in model.parameters():
        piece.grad = torch.zeros_like(piece) if len(piece) else None
    optimizer.step()
    optimizer.zero_grad()
    return measure.peak(lambda: model.loss(x, x).backward(), model, optimizer).total


def test_lab_09_says_how_much_a_sequence_of_llama_405b_takes():
    """From three and four layers: each further one keeps its input and its share."""
    config = dataclasses.replace(ModelConfig.named("llama-3.1-405b"), seq_len=8192)
    with world.World(16_384, engine="dry") as dry:
        few, more = (
            dry.run(a_sequence_of_llama_405b, dataclasses.replace(config, num_layers=layers), rank=7)
            for layers in (3, 4)
        )
    assert round((few + 123 * (more - few)) / 1e9) == 68


@pytest.mark.parametrize("asked", [dict(zero=0), dict(zero=1, fp8="current", precision="fp32")])
def test_where_there_is_no_formula_a_dry_run_says_what_is_held(asked):
    train, mesh = TrainConfig(micro_batch=1, global_batch=2, **asked), Mesh(dp=2)
    held = predict.peak_states(TIED, train, mesh)
    assert {line.note for line in held} == {"dry run of rank 0"}
    assert held.total > predict.states(TIED, train, mesh).total
