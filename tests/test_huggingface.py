"""Hugging Face's names: what is written loads in transformers and gives the same logits, and comes back the same."""

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import random_

from labutils import huggingface
from labutils.config import ModelConfig
from labutils.model import GPT

GPT2 = ModelConfig(num_layers=2, d_model=16, num_heads=4, d_ff=24, vocab_size=32, seq_len=12)
LLAMA = replace(
    GPT2, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False, num_kv_heads=2
)
MODELS = {
    "gpt2": GPT2,
    "gpt2 untied": replace(GPT2, tied=False),
    "llama": LLAMA,
    "llama tied, wide heads": replace(LLAMA, tied=True, d_head=8),
    "qwen2": replace(LLAMA, bias="qkv"),
    "mixtral": replace(LLAMA, num_experts=4, top_k=2),
}
each_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def export(model, folder):
    net = random_(GPT(model), 1)
    huggingface.to_hf(folder, model, dict(net.named_parameters()) | {"step/other": torch.ones(1)})
    return net


@each_model
def test_what_goes_out_comes_back(model, tmp_path):
    net, back = export(model, tmp_path), huggingface.from_hf(tmp_path)
    assert back.config == model
    for (name, p), (again, q) in zip(net.named_parameters(), back.named_parameters(), strict=True):
        assert name == again and torch.equal(p, q)


@each_model
def test_transformers_gives_the_same_logits(model, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(logging.getLogger("transformers"), "level", logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    net = export(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(32, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, logits = net(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, ours, rtol=1e-5, atol=1e-5 * ours.abs().max().item())
    theirs.save_pretrained(tmp_path / "theirs")
    back = huggingface.from_hf(tmp_path / "theirs")
    assert all(map(torch.equal, back.parameters(), net.parameters()))


def test_the_released_gpt2_has_no_prefix(tmp_path):
    net, file = export(GPT2, tmp_path), tmp_path / "model.safetensors"
    save_file({name.removeprefix("transformer."): w for name, w in load_file(file).items()}, file)
    assert all(map(torch.equal, huggingface.from_hf(tmp_path).parameters(), net.parameters()))


@pytest.mark.parametrize(
    "model, change, told",
    [
        (LLAMA, {"rope_theta": 5e5}, "rope_theta is 500000.0, the course's GPT has 10000.0"),
        (LLAMA, {"rms_norm_eps": None}, "epsilon of norms is None, the course's GPT has 1e-05"),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3"}}, "rope_type is 'llama3'"),
        (LLAMA, {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 1000000.0"),
        (LLAMA, {"sliding_window": 8}, "sliding_window is 8"),
        (GPT2, {"activation_function": "gelu"}, "activation_function is 'gelu'"),
        (GPT2, {"layer_norm_epsilon": 1e-6}, "epsilon of norms is 1e-06"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_model_that_computes_something_else_is_refused(model, change, told, tmp_path):
    export(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError) as error:
        huggingface.from_hf(tmp_path)
    assert told in str(error.value)


def test_a_file_that_lacks_a_weight_is_refused(tmp_path):
    export(LLAMA, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({n: w for n, w in load_file(file).items() if "layers.1.mlp.up" not in n}, file)
    with pytest.raises(ValueError, match=r"has model.layers.1.mlp.up_proj.weight: copy them again"):
        huggingface.from_hf(tmp_path)


@pytest.mark.parametrize("change", [{}, {"tokens.weight": torch.zeros(2)}], ids=["none", "shape"])
def test_weights_that_are_not_those_of_the_config_are_not_written(tmp_path, change):
    whole = dict(GPT(LLAMA).named_parameters()) if change else {}
    with pytest.raises(ValueError, match="no tokens.weight of shape .*: give all weights"):
        huggingface.to_hf(tmp_path / "new", LLAMA, whole | change)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("change", [{"bias": False}, {"ffn": "swiglu"}, {"num_kv_heads": 2}])
def test_a_model_of_no_family_is_refused(change):
    with pytest.raises(ValueError, match="no family of Hugging Face has ffn="):
        huggingface.family(replace(GPT2, **change))
