"""Right answers to the exercises of `memory`, in other styles than the reference."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from labutils import memory, units
from labutils.config import ModelConfig
from labutils.model import GPT


def _matrix_by_matrix(file: Mapping[str, Any]) -> int:
    """A loop over the shapes of all tensors."""
    h, f = file["hidden_size"], file["intermediate_size"]
    heads = file["num_attention_heads"]
    narrow = h // heads * file.get("num_key_value_heads", heads)
    layer = [(h, h), (h, narrow), (h, narrow), (h, h), (h, f), (h, f), (f, h), (h,), (h,)]
    if file["model_type"] == "qwen2":
        layer += [(h,), (narrow,), (narrow,)]
    shapes = [(file["vocab_size"], h), (h,)] + layer * file["num_hidden_layers"]
    if not file["tie_word_embeddings"]:
        shapes.append((file["vocab_size"], h))
    return sum(int(np.prod(shape)) for shape in shapes)


def _on_meta(file: Mapping[str, Any]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(ModelConfig.from_hf(file)).parameters())


def _listed(b: int, s: int, h: int, a: int, g: int, size: int) -> int:
    """A list of shapes."""
    d = h // a
    tensors = dict(
        x=(b, s, h), q=(b, a, s, d), k=(b, g, s, d), v=(b, g, s, d), p=(b, a, s, s), out=(b, s, h)
    )
    return size * sum(int(np.prod(shape)) for shape in tensors.values())


def _per_token(b: int, s: int, h: int, a: int, g: int, size: int) -> float:
    return float(b * s * size * (3 * h + 2 * g * (h / a) + a * s))


def _per_parameter(parameters: int, activations: int, logits: int, stepping: str) -> list:
    copies = {"fused": 0, "foreach": 1}[stepping]
    moments = {
        "optimizer": parameters * (20 + 4 * copies),
        "backward": 14 * parameters + activations + logits + logits,
    }
    phase = max(moments, key=moments.get)
    return [phase, np.float64(moments[phase])]


def _if_else(parameters: int, activations: int, logits: int, stepping: str) -> tuple:
    step = 24 * parameters if stepping == "foreach" else 20 * parameters
    loss = 14 * parameters + activations + 2 * logits
    if loss > step:
        return "backward", torch.tensor(loss)
    return "optimizer", torch.tensor(step)


def _until_refused(gpu: memory.Allocator) -> None:
    """One byte and two fillers at a time, until the device refuses."""
    go = []
    try:
        while True:
            gpu.alloc(1)
            go.append(gpu.alloc(units.MIB))
            go.append(gpu.alloc(units.MIB - 512))
    except memory.OutOfMemory:
        for address in reversed(go):
            gpu.free(address)


def _one_of_many(gpu: memory.Allocator) -> None:
    """Pieces of 16 KiB everywhere; one in 128 stays."""
    pieces = [gpu.alloc(2**14) for _ in range(gpu.capacity // 2**14)]
    for i, address in enumerate(pieces):
        if i % 128:
            gpu.free(address)


def _moves_in(gpu: memory.Allocator) -> None:
    """The device full of pairs of 1 MiB; of each, one is replaced by 512 bytes, and the other goes."""
    pairs = [(gpu.alloc(units.MIB), gpu.alloc(units.MIB)) for _ in range(gpu.capacity // 2**21)]
    for first, second in pairs:
        gpu.free(first)
        gpu.alloc(512, name="stays")
        gpu.free(second)


def _behind(gpu: memory.Allocator) -> list[int]:
    """What goes, then what stays, in a list; returns what nobody asked for."""
    rows = [
        [gpu.alloc(size) for size in (units.MIB - 512, units.MIB, 100)]
        for _ in range(gpu.available // (2 * units.MIB))
    ]
    for row in rows:
        for address in row[:2]:
            gpu.free(address)
    return [row[2] for row in rows]


def _in_other_words(backward: str, optimizer: str) -> Callable:
    """The phases as one may call them."""
    names = {"backward": backward, "optimizer": optimizer}

    def fullest(*asked: Any) -> tuple[str, float]:
        phase, nbytes = _if_else(*asked)
        return names[phase], nbytes

    return fullest


RIGHT = {
    "memory/count-parameters": {
        "a loop over shapes": _matrix_by_matrix,
        "a float": lambda file: float(ModelConfig.from_hf(file).num_params),
        "a NumPy integer": lambda file: np.int64(ModelConfig.from_hf(file).num_params),
        "the model itself, without memory": _on_meta,
    },
    "memory/saved-by-attention": {
        "a list of shapes": _listed,
        "per token, a float": _per_token,
        "a tensor": lambda **sizes: torch.tensor(_listed(**sizes)),
        "a NumPy integer": lambda **sizes: np.int64(_listed(**sizes)),
    },
    "memory/bug-hunt-peak": {
        "passes and steps": _in_other_words("the backward pass", "optimizer.step()"),
        "the update": _in_other_words("Backward pass", "update"),
        "a dict of moments, a list, a NumPy float": _per_parameter,
        "if and else, 0-d tensors": _if_else,
        "a generator": lambda *asked: (part for part in _if_else(*asked)),
        "an array of NumPy": lambda *asked: np.array(_if_else(*asked), dtype=object),
        "a capital": lambda *asked: (_if_else(*asked)[0].title(), _if_else(*asked)[1]),
    },
    "memory/fragment": {
        "until it refuses": _until_refused,
        "pieces of 16 KiB": _one_of_many,
        "moves into a hole": _moves_in,
        "what stays behind what goes": _behind,
    },
}
