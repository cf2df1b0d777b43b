"""The paper's formula is reproduced to the byte, and what PyTorch keeps beyond it has a name, line by line."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import measure, memory
from labutils.config import ModelConfig, TrainConfig
from labutils.model import GPT

PAPER = {
    "22B": dict(b=4, s=2048, h=6144, a=64),
    "175B": dict(b=1, s=2048, h=12288, a=96),
    "530B": dict(b=1, s=2048, h=20480, a=128),
}


@pytest.mark.parametrize("sizes", PAPER.values(), ids=PAPER)
def test_equations_1_to_6_hold_to_the_byte(sizes):
    b, s, h, a = sizes.values()
    t, sbh, scores = 8, s * b * h, 5 * a * s * s * b
    totals = {
        (): 34 * sbh + scores,
        ("t",): 10 * sbh + (24 * sbh + scores) // t,
        ("t", "sequence"): (34 * sbh + scores) // t,
        ("t", "selective"): 10 * sbh + 24 * sbh // t,
        ("t", "sequence", "selective"): 34 * sbh // t,
        ("full",): 2 * sbh,
    }
    for options, total in totals.items():
        policy = next((option for option in options if option in ("selective", "full")), "none")
        layer = memory.korthikanti(
            **sizes,
            t=t if "t" in options else 1,
            sequence="sequence" in options,
            checkpointing=policy,
        )
        assert layer.total == total, options


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([4, 6]),
    st.integers(1, 3),
    st.integers(1, 9),
    st.booleans(),
)
def test_every_byte_beyond_the_paper_has_a_name(layers, heads, d_head, micro_batch, seq_len, tied):
    h = heads * d_head
    model = ModelConfig(
        num_layers=layers,
        d_model=h,
        num_heads=heads,
        d_ff=4 * h,
        vocab_size=11,
        seq_len=seq_len,
        dropout=0.1,
        tied=tied,
    )
    train = TrainConfig(micro_batch=micro_batch, global_batch=micro_batch, precision="bf16")
    paper = memory.korthikanti(b=micro_batch, s=seq_len, h=h, a=heads).scaled(layers)
    explained = paper + memory.beyond_the_paper(model, train)
    assert explained.total == memory.activations(model, train).total
    gpt = GPT(model).to(torch.bfloat16)
    tokens, targets = torch.zeros(2, micro_batch, seq_len, dtype=torch.long).unbind()
    measured = measure.saved_activations(lambda: gpt.loss(tokens.clone(), targets.clone()), gpt)
    assert explained.total == measured.total


GPT_2 = ModelConfig(
    num_layers=1, d_model=8, num_heads=2, d_ff=32, vocab_size=11, seq_len=4, dropout=0.1
)
HALF = TrainConfig(micro_batch=1, global_batch=1, precision="bf16")


@pytest.mark.parametrize(
    "model, train, message",
    [
        (replace(GPT_2, dropout=0.0), HALF, "dropout=0"),
        (replace(GPT_2, ffn="swiglu"), HALF, "ffn='swiglu'"),
        (replace(GPT_2, num_kv_heads=1, d_ff=33), HALF, "d_ff=33, num_kv_heads=1"),
        (GPT_2, replace(HALF, precision="fp32"), "precision='fp32'"),
        (
            GPT_2,
            replace(HALF, attention="sdpa", checkpointing="full"),
            "attention='sdpa', checkpointing='full'",
        ),
    ],
)
def test_a_model_that_the_formula_is_not_made_for_is_refused(model, train, message):
    with pytest.raises(ValueError, match=message):
        memory.beyond_the_paper(model, train)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(s=0), "s must be at least 1"),
        (dict(t=3), "tp=3 does not divide num_heads=4"),
        (dict(t=4, sequence=True, s=6), "tokens"),
        (dict(checkpointing="some"), "'none', 'selective' or 'full'"),
    ],
)
def test_bad_sizes_are_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        memory.korthikanti(**dict(b=1, s=8, h=16, a=4) | wrong)
