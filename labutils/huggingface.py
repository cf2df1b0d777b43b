"""Weights under Hugging Face's names: a model of the course as transformers loads it, and theirs as
the course's GPT runs it. Families: GPT-2, Llama, Qwen2 (Llama with biases), Mixtral (its experts).
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from labutils import units
from labutils.config import ModelConfig
from labutils.model import GPT, ROPE_BASE

Weights = Mapping[str, Tensor]
ENDS = {  # of GPT-2, and of Llama's kin
    "tokens": ("wte", "embed_tokens"), "positions": ("wpe", ""), "norm": ("ln_f", "norm"),
}  # fmt: skip
LAYER = {
    "attention_norm": ("ln_1", "input_layernorm"),
    "attention.query": ("attn.c_attn", "self_attn.q_proj"),  # GPT-2: three in one, side by side
    "attention.key": ("attn.c_attn", "self_attn.k_proj"),
    "attention.value": ("attn.c_attn", "self_attn.v_proj"),
    "attention.output": ("attn.c_proj", "self_attn.o_proj"),
    "feed_forward_norm": ("ln_2", "post_attention_layernorm"),
    "feed_forward.gate": ("", "mlp.gate_proj"),
    "feed_forward.up": ("mlp.c_fc", "mlp.up_proj"),
    "feed_forward.down": ("mlp.c_proj", "mlp.down_proj"),
    "feed_forward.router": ("", "block_sparse_moe.gate"),
    "feed_forward.experts.*.gate": ("", "block_sparse_moe.experts.*.w1"),
    "feed_forward.experts.*.up": ("", "block_sparse_moe.experts.*.w3"),
    "feed_forward.experts.*.down": ("", "block_sparse_moe.experts.*.w2"),
}


def family(model: ModelConfig) -> str:
    """The model_type by which transformers runs the model. ValueError if it has none."""
    kind = model.ffn, model.norm, model.positions
    heads = model.num_kv_heads == model.num_heads and model.d_head * model.num_heads
    if kind == ("gelu", "layernorm", "learned") and model.bias is True:
        if model.num_experts == 1 and heads == model.d_model:
            return "gpt2"
    elif kind == ("swiglu", "rmsnorm", "rope") and not model.shared_expert and not model.beyond:
        known = {(False, False): "llama", ("qkv", False): "qwen2", (False, True): "mixtral"}
        if found := known.get((model.bias, model.num_experts > 1)):
            return found
    has = f"ffn={model.ffn!r}, norm={model.norm!r}, positions={model.positions!r}"
    remedy = "build GPT-2's kind (gelu, layernorm, learned, biases) or Llama's (swiglu, rmsnorm, …)"
    raise ValueError(f"no family of Hugging Face has {has}, bias={model.bias!r}: {remedy}")


def config(model: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, which `ModelConfig.from_hf` reads as well."""
    units.instance(model, ModelConfig, "config")
    kind, m = family(model), model
    both = {"model_type": kind, "vocab_size": m.vocab_size, "tie_word_embeddings": m.tied}
    both |= {"bos_token_id": None, "eos_token_id": None}
    if kind == "gpt2":
        rates = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), m.dropout)
        return both | rates | {
            "architectures": ["GPT2LMHeadModel"], "n_layer": m.num_layers, "n_embd": m.d_model,
            "n_head": m.num_heads, "n_inner": m.d_ff, "n_positions": m.seq_len,
            "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
        }  # fmt: skip
    names = {"llama": "Llama", "qwen2": "Qwen2", "mixtral": "Mixtral"}
    experts = {"num_local_experts": m.num_experts, "num_experts_per_tok": m.top_k}
    return both | (experts if kind == "mixtral" else {}) | {
        "architectures": [f"{names[kind]}ForCausalLM"], "num_hidden_layers": m.num_layers,
        "hidden_size": m.d_model, "num_attention_heads": m.num_heads, "head_dim": m.d_head,
        "num_key_value_heads": m.num_kv_heads, "intermediate_size": m.d_ff, "hidden_act": "silu",
        "max_position_embeddings": m.seq_len, "rope_theta": ROPE_BASE, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def _renamed(model: ModelConfig, names: Iterable[str]) -> Iterator[tuple[str, str, str, bool]]:
    """Of each weight of the model its name, theirs, which of the three that lie side by side it is
    there ("query", …, or ""), and whether it is transposed there."""
    gpt2 = family(model) == "gpt2"
    for name in names:
        path, _, kind = name.rpartition(".")
        blocks, _, inside = path.partition(".")
        layer, _, part = inside.partition(".")
        if path == "head":
            yield name, "lm_head.weight", "", False
            continue
        found = (ENDS if blocks == path else LAYER)[re.sub(r"\b\d+", "*", part or path)][not gpt2]
        for number in re.findall(r"\b\d+", part):  # of an expert
            found = found.replace("*", number)
        at = "" if blocks == path else f"h.{layer}." if gpt2 else f"layers.{layer}."
        which = part.rpartition(".")[2] if found.endswith("c_attn") else ""
        turned = gpt2 and kind == "weight" and ".c_" in found  # a Conv1D, which multiplies x·W
        yield name, f"{'transformer' if gpt2 else 'model'}.{at}{found}.{kind}", which, turned


def to_hf(folder: str | os.PathLike, model: ModelConfig, weights: Weights) -> None:
    """Write config.json and model.safetensors, which transformers loads by `from_pretrained`.

    weights: those of a GPT by name, as `named_parameters` has them, or a file of `zero.save`:
        states of an optimizer in it are left out

    Raises ValueError where one is missing or has another shape.
    """
    units.instance(weights, Mapping, "to_hf")
    own = {name: w for name, w in weights.items() if "/" not in name}
    with torch.device("meta"):
        whole = {name: weight.shape for name, weight in GPT(model).named_parameters()}
    for name, shape in whole.items():
        if name not in own or own[name].shape != shape:
            raise ValueError(f"no {name} of shape {tuple(shape)}: give all weights of this config")
    found: dict[str, list[Tensor]] = {}
    for name, theirs, _, turned in _renamed(model, own):
        if not (model.tied and name == "head.weight"):
            found.setdefault(theirs, []).append(own[name].T if turned else own[name])
    (to := Path(folder)).mkdir(parents=True, exist_ok=True)
    joined = {name: torch.cat(parts, -1) for name, parts in found.items()}
    save_file(joined, to / "model.safetensors", {"format": "pt"})
    (to / "config.json").write_text(json.dumps(config(model), indent=1), encoding="utf-8")


def from_hf(folder: str | Path) -> GPT:
    """The GPT whose config.json and safetensors files lie in a folder.

    Raises ValueError for what the course's GPT does not compute, and for files or weights that are
    missing.
    """
    model = ModelConfig.from_hf(folder)  # refuses a file that is missing or broken
    folder = Path(folder)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    _check(said)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= load_file(file)
    if not any(name.startswith("transformer.") for name in stored):  # GPT-2 as it was released
        stored |= {f"transformer.{name}": w for name, w in stored.items()}
    net = GPT(model)
    with torch.no_grad():
        for name, theirs, part, turned in _renamed(model, own := dict(net.named_parameters())):
            if theirs not in stored:
                raise ValueError(f"no file in {folder.name} has {theirs}: copy them again")
            given = stored[theirs]
            if part:
                given = given.chunk(3, -1)[("query", "key", "value").index(part)]
            own[name].copy_(given.T if turned else given)
    return net


def _check(said: Mapping[str, Any]) -> None:
    """Nothing, or a ValueError for a config of which a GPT would compute something else."""
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    mixtral, gpt2 = said["model_type"] == "mixtral", said["model_type"] == "gpt2"
    theta = rope.get("rope_theta", said.get("rope_theta", 1e6 if mixtral else 1e4))
    eps = said.get("layer_norm_epsilon", 1e-5) if gpt2 else said.get("rms_norm_eps", 1e-6)
    exact = gpt2 and said.get("activation_function") == "gelu"  # by erf, not by tanh
    window = said.get("sliding_window") if said.get("use_sliding_window", True) else None
    has = {
        "rope_theta": (theta, ROPE_BASE), "epsilon of norms": (eps, 1e-5),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "sliding_window": (window, None),
        "scale_attn_by_inverse_layer_idx": (
            bool(said.get("scale_attn_by_inverse_layer_idx")), False),
        "activation_function": ("gelu" if exact else "gelu_new", "gelu_new"),
    }  # fmt: skip
    for key, (given, wanted) in has.items():
        if given != wanted:
            own = f"the course's GPT has {wanted!r}"
            raise ValueError(f"{key} is {given!r}, {own}: its logits would differ, take another")
