"""The table is the model: names, shapes and counts of `GPT`, and what follows from them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from labutils import anatomy, config, memory, predict, step
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import GPT

TINY = ModelConfig(
    num_layers=2, d_model=24, num_heads=6, num_kv_heads=2, d_ff=16, vocab_size=10, seq_len=4
)  # fmt: skip
FAMILIES = {
    "gpt2": TINY,
    "gpt2 untied": replace(TINY, tied=False),
    "llama": replace(TINY, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False),
    "qwen": replace(TINY, ffn="swiglu", norm="rmsnorm", positions="rope", bias="qkv", d_head=6),
    "mixtral": replace(TINY, ffn="swiglu", norm="rmsnorm", bias=False, num_experts=4, top_k=2),
    "experts with biases": replace(TINY, num_experts=2, top_k=1),
    "a shared expert": replace(TINY, num_experts=2, top_k=1, shared_expert=True),
}
each_family = pytest.mark.parametrize("config", FAMILIES.values(), ids=FAMILIES)


def gpt(config: ModelConfig) -> GPT:
    with torch.device("meta"):
        return GPT(config)


@each_family
def test_names_shapes_and_order_are_those_of_the_model(config):
    theirs = [(name, tuple(p.shape)) for name, p in gpt(config).named_parameters()]
    assert list(anatomy.tensors(config).items()) == theirs
    assert anatomy.num_params(config) == sum(math.prod(shape) for _, shape in theirs)
    assert config.num_params == anatomy.num_params(config) and config.letters("Ψ h") == (
        config.num_params,
        24,
    )


RUN = [name for name in ModelConfig.names() if not ModelConfig.named(name).beyond]


@pytest.mark.parametrize("name", RUN)
def test_every_known_model_is_its_table(name):
    config = replace(ModelConfig.named(name), num_layers=2)
    model = gpt(config)
    assert anatomy.tensors(config) == {name: tuple(p.shape) for name, p in model.named_parameters()}


@each_family
def test_every_part_is_a_module(config):
    modules = {name for name, _ in gpt(config).named_modules()}
    for part in anatomy.parts(config):
        assert part.name.replace("*", "0") in modules | {"outside"}, part


@each_family
def test_units_are_the_layers_and_the_rest(config):
    units, model = anatomy.units(config), gpt(config)
    assert list(units) == ["", "blocks.0", "blocks.1"]
    for i in (0, 1):
        assert units[f"blocks.{i}"] == tuple(p.numel() for p in model.blocks[i].parameters())
    assert sum(map(sum, units.values())) == config.num_params
    # Level 3 gathers each unit twice and reduces it once, padded to a multiple of the ranks.
    padded = sum(-(-sum(numels) // 4) * 4 for numels in units.values())
    train = TrainConfig(micro_batch=1, global_batch=4, precision="fp32", zero=3)
    sent = predict.sent(config, train, Mesh(dp=4)).by("name")
    assert sent["all_gather"] + sent["reduce_scatter"] == 3 * 3 * padded // 4 * 4


@each_family
def test_lora_adapts_the_linear_layers_of_a_block(config):
    targets = {part.name.rpartition(".")[2] for part in anatomy.parts(config) if part.lora}
    modules = gpt(config).blocks[0].named_modules()
    linear = {name.rpartition(".")[2] for name, m in modules if isinstance(m, torch.nn.Linear)}
    assert targets == linear - {"router"}


@pytest.mark.parametrize(
    "share, message",
    [
        (dict(tp=4), "tp=4 does not divide num_heads=6"),
        (dict(tp=3), "tp=3 does not divide num_kv_heads=2"),
        (dict(ep=2), "ep=2 does not divide num_experts=1"),
    ],
)
def test_a_share_that_does_not_exist_is_refused(share, message):
    with pytest.raises(ValueError, match=message):
        anatomy.letters(TINY, **share)


@each_family
def test_flops_are_those_that_torch_counts(config):
    if config.num_experts > 1:  # which expert a token visits is chosen by values, not by shapes
        config = replace(config, num_experts=1, top_k=1, shared_expert=False)
    with FlopCounterMode(display=False) as counted, torch.device("meta"):
        GPT(config)(torch.zeros(3, config.seq_len, dtype=torch.long))
    assert counted.get_total_flops() == 3 * config.seq_len * sum(
        anatomy.token_flops(config).values()
    )


@settings(max_examples=30)
@given(st.integers(1, 8), st.integers(1, 8))
def test_a_token_pays_for_the_experts_that_it_visits(experts, visited):
    visited = min(visited, experts)
    config = replace(FAMILIES["mixtral"], num_experts=experts, top_k=visited)
    one = replace(config, num_experts=1, top_k=1)
    router = 2 * config.num_layers * config.d_model * experts if experts > 1 else 0
    expert = 2 * config.num_layers * 3 * config.d_model * config.d_ff
    assert (
        config.flops_per_token(False)
        == one.flops_per_token(False) + (visited - 1) * expert + router
    )


LATENT = replace(TINY, d_head=6, kv_rank=8, d_rope=2, num_kv_heads=6)
OWN = dict(num_experts=4, top_k=2, shared_expert=True)
BEYOND = {
    "multi-head latent attention": LATENT,
    "experts of a width": replace(TINY, **OWN, d_expert=8, d_shared=16),
    "a shared expert of a width": replace(TINY, **OWN, d_shared=32),
    "leading layers": replace(TINY, **OWN, dense_layers=1),
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_the_gpt_does_not_run_is_counted_and_refused(what):
    model, mesh = BEYOND[what], config.Mesh()
    train = config.TrainConfig(micro_batch=1, global_batch=1)
    assert model.num_params == sum(model.parameters.values()) > 0 < model.flops_per_token()
    for refuses in (
        lambda: gpt(model),
        lambda: step.build(model, train, mesh),
        lambda: memory.peak(model, train),
        lambda: memory.activations(model, train),
    ):
        with pytest.raises(ValueError, match=f"GPT does not run {what}"):
            refuses()


def test_the_latent_attention_of_deepseek_by_hand():
    # DeepSeek-V2, 2405.04434, section 2.1: down, norm, up for queries and for keys and values.
    h, a, q, c, rope, nope, value = 5120, 128, 1536, 512, 64, 128, 128
    by_hand = (
        h * q + q * a * (nope + rope) + h * (c + rope) + c * a * (nope + value) + a * value * h
    )
    model = ModelConfig.named("deepseek-v2")
    assert model.parameters["attention"] == 60 * by_hand
    assert model.parameters["norms"] == 60 * (2 * h + q + c) + h
    # A token meets 6 of 160 experts: 21 B of the 236 B (the paper's table 1).
    idle = 3 * h * 1536 * 59 * (160 - 6)
    assert round((model.num_params - idle) / 1e9, 1) == 21.4
    direct = replace(model, q_rank=0)
    assert direct.parameters["attention"] == 60 * (by_hand - h * q - q * a * 192 + h * a * 192)
