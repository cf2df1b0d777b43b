"""What a person chooses: exact parameter counts, legal meshes, clear refusals."""

import csv
import itertools
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils import config
from labutils.config import REACHED, Hardware, Link, Mesh, ModelConfig, TrainConfig

TINY = dict(num_layers=2, d_model=8, num_heads=4, d_ff=32, vocab_size=16, seq_len=8)
PUBLISHED = {
    row["name"]: int(row["published_params"])
    for row in csv.DictReader((config.DATA / "models.csv").read_text(encoding="utf-8").splitlines())
}


@pytest.mark.parametrize("name", ModelConfig.names())
def test_parameter_counts_are_the_published_ones(name):
    assert ModelConfig.named(name).num_params == PUBLISHED[name]


def test_gpt2_small_by_the_playbook_formula():
    # Ultra-Scale Playbook: N = h·v + L(12h² + 13h) + 2h leaves out the positions (paper row PC-07).
    model = ModelConfig.named("gpt2")
    h, v, L, s = model.letters("h v L s")
    assert h * v + L * (12 * h * h + 13 * h) + 2 * h == 123_653_376 == model.num_params - s * h


def test_a_token_of_mixtral_meets_two_experts():
    mixtral = ModelConfig.named("mixtral-8x7b")
    idle = mixtral.parameters["feed-forward"] * (8 - 2) // 8
    assert mixtral.num_params - idle == 12_879_925_248


def test_training_flops_are_six_per_parameter_and_attention():
    model = ModelConfig.named("gpt3-175b")
    matrices = model.num_params - model.parameters["position embedding"] - model.parameters["norms"]
    s, a, d, L = model.letters("s a d L")
    linear_biases = L * (3 * model.d_model + model.d_model + model.d_ff + model.d_model)
    assert model.flops_per_token() == 6 * (matrices - linear_biases) + 12 * L * s * a * d
    assert model.flops_per_token() == 3 * model.flops_per_token(training=False)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(num_layers=0), "num_layers must be at least 1"), (dict(d_model=-8), "d_model must be at least 1, got -8"), (dict(vocab_size=3.5), "vocab_size must be a whole"),
        (dict(num_heads=3), "num_heads=3 does not divide d_model=8"), (dict(num_kv_heads=3), "num_kv_heads=3 does not divide"), (dict(ffn="relu"), "ffn must be one of 'gelu'"),
        (dict(norm="batch"), "norm must be"), (dict(positions="alibi"), "positions must be"), (dict(bias="all"), "bias must be"), (dict(dropout=float("nan")), "dropout must be"),
        (dict(tied="no"), "tied must be one of True, False, got 'no'"), (dict(tied=1), "tied must be"), (dict(bias=1), "bias must be"), (dict(bias="True"), "bias must be"), (dict(name=7), "name must be text"),
        (dict(dropout=1.0), "dropout must be"), (dict(top_k=2), "top_k=2 is more than num_experts=1"), (dict(num_experts=0), "num_experts must be"), (dict(shared_expert=1), "shared_expert must be"), (dict(shared_expert=True), "give num_experts of 2"),
        (dict(d_expert=16), "d_expert=16, d_shared=0, dense_layers=0 are of models with experts"), (dict(num_experts=2, dense_layers=2), "dense_layers=2 of num_layers=2 leaves no layer"), (dict(d_expert=-1, num_experts=2), "d_expert must be at least 0"),
        (dict(q_rank=4), "q_rank=4, d_rope=0, d_value=0 are of multi-head latent"), (dict(kv_rank=4), "d_rope=0 is the part of d_head=2"), (dict(kv_rank=4, d_rope=1, num_kv_heads=2), "every head has keys of its own"), (dict(kv_rank=-1), "kv_rank must be at least 0"),
    ],
)  # fmt: skip
def test_model_config_refuses(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ModelConfig(**(TINY | change))


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ValueError, match="no model called 'gpt5'.*gpt2-xl"):
        ModelConfig.named("gpt5")
    with pytest.raises(ValueError, match="no device called 'B9000'.*H100"):
        Hardware.named("B9000")
    with pytest.raises(ValueError, match="no letter q"):
        ModelConfig(**TINY).letters("s q")


PUBLISHED |= {"phi-3-mini": 3_821_079_552, "mistral-nemo": 12_247_782_400}
HF = {
    "phi-3-mini": dict(model_type="phi3", num_hidden_layers=32, hidden_size=3072, num_attention_heads=32, intermediate_size=8192, vocab_size=32064, max_position_embeddings=4096),
    "mistral-nemo": dict(model_type="mistral", num_hidden_layers=40, hidden_size=5120, num_attention_heads=32, num_key_value_heads=8, head_dim=128, intermediate_size=14336, vocab_size=131072, max_position_embeddings=128000),
    "gpt2": dict(model_type="gpt2", n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=1024),
    "llama-3.1-8b": dict(model_type="llama", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=128256, max_position_embeddings=131072, hidden_act="silu", tie_word_embeddings=False, attention_bias=False),
    "mistral-7b": dict(model_type="mistral", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=32000, max_position_embeddings=32768),
    "qwen2-0.5b": dict(model_type="qwen2", num_hidden_layers=24, hidden_size=896, num_attention_heads=14, num_key_value_heads=2, intermediate_size=4864, vocab_size=151936, max_position_embeddings=131072, tie_word_embeddings=True),
    "deepseek-v2": dict(model_type="deepseek_v2", num_hidden_layers=60, hidden_size=5120, num_attention_heads=128, num_key_value_heads=128, intermediate_size=12288, moe_intermediate_size=1536, n_routed_experts=160, n_shared_experts=2, num_experts_per_tok=6, first_k_dense_replace=1, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, vocab_size=102400, max_position_embeddings=163840),
    "mixtral-8x7b": dict(model_type="mixtral", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336, vocab_size=32000, max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2),
}  # fmt: skip


@pytest.mark.parametrize("name", HF)
def test_from_hf_reads_every_family(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HF[name]), encoding="utf-8")
    for source in (HF[name], tmp_path, tmp_path / "config.json", str(tmp_path)):
        assert ModelConfig.from_hf(source).num_params == PUBLISHED[name]


@pytest.mark.parametrize(
    "broken, message",
    [
        ({}, "model_type is None"), (dict(model_type="bert"), "model_type is 'bert'; from_hf reads gpt2"), (dict(model_type=["gpt2"]), "model_type is"), (dict(model_type="gpt2"), "needs the key 'n_embd'"),
        (HF["llama-3.1-8b"] | dict(hidden_act="gelu"), "hidden_act is 'gelu'"), (HF["llama-3.1-8b"] | dict(attention_bias=True), "attention_bias is true"),
(dict(model_type="qwen3"), "qwen3 has norms of queries and keys"), (dict(model_type="gemma2"), "gemma2 has four norms per layer"), (dict(model_type="olmo2"), "olmo2 has norms behind"),
        (HF["llama-3.1-8b"] | dict(tie_word_embeddings="false"), "tie_word_embeddings must be one of True, False, got 'false'"), (HF["gpt2"] | dict(tie_word_embeddings=0), "tie_word_embeddings must be"), (HF["llama-3.1-8b"] | dict(mlp_bias="no"), "mlp_bias must be"),
        (HF["gpt2"] | dict(activation_function="relu"), "activation_function is 'relu'"), (HF["gpt2"] | dict(resid_pdrop=0.0), "embd_pdrop=0.1, resid_pdrop=0.0, attn_pdrop=0.1: a ModelConfig has one"), (HF["gpt2"] | dict(add_cross_attention=True), "add_cross_attention is true"),
        (HF["mistral-7b"] | dict(attention_dropout=0.1), "attention_dropout is not 0"), (HF["phi-3-mini"] | dict(partial_rotary_factor=0.75), "partial_rotary_factor is 0.75"), (HF["phi-3-mini"] | dict(resid_pdrop=0.1), "a ModelConfig has one rate"),
        (HF["llama-3.1-8b"] | dict(mlp_bias=True), "mlp_bias is true"), (HF["llama-3.1-8b"] | dict(hidden_size=None), "d_model must be a whole number, got None"),
        (HF["deepseek-v2"] | dict(hidden_act="gelu"), "DeepSeek models with SwiGLU and without biases"), (HF["deepseek-v2"] | dict(attention_bias=True), "DeepSeek models with SwiGLU"), (HF["deepseek-v2"] | dict(moe_layer_freq=2), "moe_layer_freq is 2"),
    ],
)  # fmt: skip
def test_from_hf_says_what_it_cannot_read(broken, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ModelConfig.from_hf(broken)


def test_a_qwen3_without_its_norms_is_read_as_the_error_says():
    """Qwen3-8B has 8,190,735,360 weights, of which 2 · 128 a layer are in norms of queries and keys."""
    qwen3 = HF["llama-3.1-8b"] | dict(model_type="qwen3", num_hidden_layers=36, head_dim=128, intermediate_size=12288, vocab_size=151936)  # fmt: skip
    with pytest.raises(ValueError, match='write "model_type": "llama" in a copy of it'):
        ModelConfig.from_hf(qwen3)
    without = ModelConfig.from_hf(qwen3 | dict(model_type="llama"))
    assert without.num_params + 36 * 2 * 128 == 8_190_735_360


@pytest.mark.parametrize("family, kv", [("llama", 32), ("mistral", 8), ("mixtral", 8), ("phi3", 32), ("qwen2", 32)])  # fmt: skip
def test_a_key_that_is_not_there_has_the_default_of_its_family(family, kv):
    bare = {k: v for k, v in HF["phi-3-mini"].items()} | dict(model_type=family)
    model = ModelConfig.from_hf(bare)
    experts = (8, 2) if family == "mixtral" else (1, 1)
    assert (model.num_kv_heads, model.tied) == (kv, False)
    assert (model.num_experts, model.top_k) == experts
    assert ModelConfig.from_hf(bare | dict(num_key_value_heads=None)).num_kv_heads == 32
    assert ModelConfig.from_hf(HF["gpt2"]).dropout == 0.1
    assert ModelConfig.from_hf(HF["gpt2"] | dict(n_inner=5)).d_ff == 5


@pytest.mark.parametrize("source", [None, 5, ["config.json"]])
def test_from_hf_takes_paths_and_dictionaries(source):
    with pytest.raises(TypeError, match="takes a path or a dictionary, got"):
        ModelConfig.from_hf(source)


@pytest.mark.parametrize(
    "content, message",
    [
        ("[" * 100_000, "not valid JSON"),
        ('{"n": ' + "1" * 10_000 + "}", "not valid JSON"),
        (None, "no file 'config.json'"),
        ("{", "not valid JSON"),
        ("[]", "holds a list"),
    ],
)
def test_from_hf_on_missing_and_broken_files(content, message, tmp_path):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(path)


def test_from_hf_does_not_wait_for_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for source in (tmp_path, tmp_path / "config.json", "x" * 10_000):
        with pytest.raises(ValueError, match="there is no file"):
            ModelConfig.from_hf(source)


def test_accumulation_recipe():
    # Rows S1-036 of the claims: 1024/(128·2) = 4 and 1024/(512·2) = 1.
    train = TrainConfig(micro_batch=2, global_batch=1024)
    assert (train.accumulation(128), train.accumulation(512)) == (4, 1)
    with pytest.raises(ValueError, match="not a multiple of micro_batch · dp = 2 · 3"):
        train.accumulation(3)


@pytest.mark.parametrize(
    "change",
    [
        dict(micro_batch=0),
        dict(micro_batch=3),
        dict(precision="int4"),
        dict(optimizer="lion"),
        dict(zero=4),
        dict(zero=True),
        dict(zero=1.0),
        dict(autocast="no"),
        dict(fp32_gradients=1),
        dict(checkpointing="some"),
    ],
)
def test_train_config_refuses(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TrainConfig(**(dict(micro_batch=2, global_batch=8) | change))


degrees = st.integers(1, 3)


@given(pp=degrees, dp=degrees, cp=degrees, tp=degrees, data=st.data())
def test_groups_partition_the_mesh_on_every_axis(pp, dp, cp, tp, data):
    ep = data.draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
    mesh = Mesh(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    for axis in config.AXES:
        groups = {mesh.group(rank, axis) for rank in range(mesh.size)}
        assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
        assert {len(group) for group in groups} == {getattr(mesh, axis)}
        for rank in range(mesh.size):
            assert mesh.group(rank, axis)[mesh.coords(rank)[axis]] == rank


def test_sizes_from_numpy_are_python_ints_and_do_not_overflow():
    sizes = dict(num_layers=2, d_model=64, num_heads=4, d_ff=120, vocab_size=100, seq_len=8)
    small = ModelConfig(**{name: np.int8(size) for name, size in sizes.items()})
    assert small == ModelConfig(**sizes) and small.num_params == ModelConfig(**sizes).num_params
    assert {type(getattr(small, name)) for name in (*sizes, "num_kv_heads", "d_head")} == {int}
    mesh = Mesh(dp=np.int8(100), tp=np.int8(100))
    assert mesh.size == 10_000 and repr(mesh) == repr(Mesh(dp=100, tp=100))
    assert mesh.coords(np.int64(150)) == mesh.coords(150) and mesh.group(np.int64(7), "tp")[7] == 7
    train = TrainConfig(micro_batch=np.int8(2), global_batch=np.int64(8))
    assert train.accumulation(np.int8(4)) == 1 and type(train.micro_batch) is int
    lists, tuples = (replace(train, frozen=kind(["a"]), layers=kind([2])) for kind in (list, tuple))
    assert lists == tuples and hash(lists) == hash(tuples)


@given(pp=degrees, dp=degrees, cp=degrees, tp=degrees, data=st.data())
def test_ranks_that_share_several_axes_are_those_alike_on_the_others(pp, dp, cp, tp, data):
    mesh = Mesh(pp=pp, dp=dp, cp=cp, tp=tp)
    axes = data.draw(st.lists(st.sampled_from(("pp", "dp", "cp", "tp")), unique=True))
    rank = data.draw(st.integers(0, mesh.size - 1))
    fixed = {"pp", "dp", "cp", "tp"} - set(axes)
    alike = [
        other
        for other in range(mesh.size)
        if all(mesh.coords(other)[axis] == mesh.coords(rank)[axis] for axis in fixed)
    ]
    assert list(mesh.ranks(rank, *axes)) == alike


def test_ranks_of_a_mesh_of_a_billion_are_a_range_or_refused():
    mesh = Mesh(pp=1000, dp=1000, tp=1000)
    assert mesh.ranks(123_456_789, "dp") == range(123_000_789, 124_000_789, 1000)
    assert mesh.ranks(7, "pp", "dp", "tp") == range(10**9)
    assert mesh.ranks(7, "dp", "pp") == range(7, 10**9 + 7, 1000)
    assert Mesh(dp=10**9, cp=4).ranks(3, "tp", "dp") == range(3, 4 * 10**9 + 3, 4)  # tp is one
    assert len(mesh.ranks(7, "pp", "tp")) == 10**6  # not neighbors: each of them is written down
    for axes in [("pp", "tp"), ("dp",)]:
        with pytest.raises(ValueError, match="at most 1,000,000 can be listed"):
            big = Mesh(pp=10**4, dp=10**7, tp=10**4)
            big.ranks(0, *axes) if axes[1:] else big.group(0, *axes)


def test_tensor_parallel_ranks_are_neighbors():
    assert Mesh(pp=2, dp=2, tp=2).group(5, "tp") == (4, 5)
    assert Mesh(pp=2, dp=2, tp=2).group(5, "pp") == (1, 5)
    assert Mesh(dp=6, ep=3).group(4, "ep") == (3, 4, 5)  # a block has all experts,
    assert Mesh(dp=6, ep=3).group(4, "edp") == (1, 4)  # each of them stands once per block


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Mesh(dp=0), "dp must be at least 1"),
        (lambda: Mesh(dp=2, ep=4), "ep=4 does not divide"),
        (lambda: Mesh(dp=2).coords(2), "rank 2 is not on this mesh of 2"),
        (lambda: Mesh(dp=2).group(0, "xp"), "no axis 'xp'"),
    ],
)
def test_mesh_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_hardware_is_what_the_data_sheets_say():
    h100 = Hardware.named("H100")
    assert (h100.memory, h100.flops["bf16"], h100.memory_bandwidth) == (
        80 * 10**9,
        989.4e12,
        3.35e12,
    )
    assert Hardware.named("A100").flops["bf16"] / Hardware.named("A100").flops["fp32"] == 16
    assert all(Hardware.named(name).source for name in Hardware.names())


def test_a_machine_reaches_a_part_of_its_peaks_and_a_ring_uses_all_links_of_a_node():
    b200, v100 = Hardware.named("B200"), Hardware.named("V100")
    reached = [b200.rate() / 1e12, b200.rate("attention") / 1e12, b200.inside.bandwidth / 1e9]
    assert reached == pytest.approx([0.4833 * 2250, 0.393 * 2250, 0.5327 * 900])
    assert b200.kernel == pytest.approx(17.63e-6) and b200.rate(fmt="fp8") == 2 * b200.rate()
    # eight devices in a node, with eight links of 50 GB/s, which reach 0.8 of that, or four of 12.5
    h100 = Hardware.named("H100")
    assert h100.ring(8) == h100.ring(2, apart=4) == h100.inside
    carried = {(9, 1): 400, (16, 1): 400, (4, 4): 100, (2, 8): 50, (2, 64): 50}
    found = {at: h100.ring(*at).bandwidth / 0.8e9 for at in carried}
    assert found == pytest.approx(carried)
    assert v100.ring(16).bandwidth == 50e9 and v100.ring(2, 8).bandwidth == 6.25e9
    assert b200.ring(16).latency == 5e-6 > b200.inside.latency == 2e-6
    for name in Hardware.names():
        one = Hardware.named(name)
        assert set(one.reached) == set(REACHED) and all(0 < x <= 1 for x in one.reached.values())
        assert one.ring(2 * one.node).bandwidth <= one.inside.bandwidth
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        h100.ring(0)


def test_link_refuses():
    for latency, bandwidth in [
        (-1, 1),
        (True, 1),
        (float("nan"), 1),
        (0, 0),
        (0, float("inf")),
        (0, True),
    ]:
        with pytest.raises((ValueError, TypeError), match="must be"):
            Link(latency, bandwidth)
