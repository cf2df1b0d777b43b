"""What is predicted is what is measured, to the byte."""

import re
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import checkpointing, measure, memory
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT

PRECISIONS = [dict(precision="fp32"), dict(precision="bf16"), dict(precision="bf16", autocast=True)]


@st.composite
def models(draw):
    groups, experts = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    heads, d_head = groups * draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 8]))
    return ModelConfig(
        num_layers=draw(st.integers(1, 2)), num_heads=heads, num_kv_heads=groups, d_head=d_head, d_model=draw(st.sampled_from([heads * d_head, 10])),
        d_ff=draw(st.sampled_from([7, 24])), vocab_size=draw(st.sampled_from([11, 30])), seq_len=draw(st.sampled_from([1, 2, 9])),
        ffn=draw(st.sampled_from(["gelu", "swiglu"])), norm=draw(st.sampled_from(["layernorm", "rmsnorm"])), positions=draw(st.sampled_from(["learned", "rope"])),
        bias=draw(st.sampled_from([True, False, "qkv"])), tied=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.1])),
        num_experts=experts, top_k=draw(st.integers(1, experts)),
    )  # fmt: skip


def saved(config: ModelConfig, train: TrainConfig) -> Ledger:
    """What autograd really keeps; the experts of a layer under one name, since a router decides which of them keeps what."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[train.precision]
    model = GPT(config, attention=train.attention).to(torch.float32 if train.autocast else dtype)
    checkpointing.apply(model, train.checkpointing)
    tokens = torch.randint(config.vocab_size, (train.micro_batch, config.seq_len))
    targets = tokens.clone()

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            return model.loss(tokens, targets)

    return Ledger(replace(line, name=re.sub(r"experts\.\d+", "experts", line.name)) for line in measure.saved_activations(forward, model))


@settings(max_examples=80, deadline=None)
@given(models(), st.integers(1, 3), st.sampled_from(["plain", "sdpa"]), st.sampled_from(PRECISIONS), st.sampled_from(checkpointing.POLICIES))
def test_every_saved_tensor_is_predicted(config, micro_batch, attention, precision, policy):
    train = TrainConfig(micro_batch=micro_batch, global_batch=micro_batch, attention=attention, checkpointing=policy, **precision)
    diff = memory.activations(config, train).diff(saved(config, train))
    assert diff.unexplained == 0, str(diff)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@settings(max_examples=30, deadline=None)
@given(models(), st.sampled_from(sorted(OPTIMIZERS)))
def test_model_states_are_predicted(config, name):
    train = TrainConfig(micro_batch=2, global_batch=2, precision="fp32", optimizer=name)
    model = GPT(config)
    optimizer = OPTIMIZERS[name](model.parameters())
    for parameter in model.parameters():  # every expert gets a gradient, whatever the router chooses
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    diff = memory.model_states(config, train).diff(measure.model_states(model, optimizer))
    assert diff.unexplained == 0, str(diff)
