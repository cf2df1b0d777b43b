"""A GPT with adapters: which layers have one, which is active, its merging, its file."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from labutils import anatomy, quantization, randomness, tensor_parallel
from labutils.config import ModelConfig
from labutils.lora.layers import Linear, LoraLinear, SplitAdapter, wide, wrap
from labutils.model import GPT
from labutils.units import instance

OWN, MODEL = "labutils.lora", "labutils.lora.model"  # the keys of the metadata


def targets(model: ModelConfig, pattern: str | tuple[str, ...] = "*") -> list[anatomy.Part]:
    """The parts of a model that a pattern names, of those that LoRA may adapt: the linear layers of
    its blocks. A pattern is the end of a part's name, with * for any words, or several of them.

    >>> gpt3 = ModelConfig.named("gpt3-175b")
    >>> [part.name for part in targets(gpt3, ("query", "value"))]
    ['blocks.*.attention.query', 'blocks.*.attention.value']

    Raises ValueError for a pattern that names nothing.
    """
    able = [part for part in anatomy.parts(model) if part.lora]
    patterns = (pattern,) if isinstance(pattern, str) else pattern
    chosen = [p for p in able if any(fnmatchcase(p.name, f"*.{each}") for each in patterns)]
    for each in patterns:
        if not any(fnmatchcase(part.name, f"*.{each}") for part in able):
            names = ", ".join(sorted({part.name.rpartition(".")[2] for part in able}))
            raise ValueError(f"no layer's name ends in {each!r}: use *, or some of {names}")
    return chosen


def adapt(
    module: GPT,
    *,
    rank: int,
    alpha: int | float,
    pattern: str | tuple[str, ...] = "*",
    name: str = "default",
    **options: Any,
) -> GPT:
    """The GPT, changed in place: all of it frozen, and beside each layer of `pattern` an adapter
    that is trained. Called again with another `name` it adds a second set, and activates that.

    After `tensor_parallel.parallelize`, before `data_parallel.replicate` and `zero.shard`;
    checkpointing may come before or after.

    Invariant: until the first step the outputs are those of the module without it, to the bit.
    """
    instance(module, nn.Module, "adapt")
    chosen = {part.name for part in targets(module.config, pattern)}
    module.requires_grad_(False)
    shapes = anatomy.tensors(module.config)
    paths = [name.removesuffix(".weight") for name in shapes if name.endswith(".weight")]
    parts = dict(module.named_modules())
    layers = {path: parts.get(path) for path in paths if _starred(path) in chosen}
    like = next(next(part.parameters()) for part in layers.values() if part is not None)
    for path, layer in layers.items():
        if layer is None:  # on another rank: the numbers of its adapter go by
            passed = like.new_empty(rank, shapes[f"{path}.weight"][1], dtype=wide(like))
            passed.uniform_(generator=options.get("generator") or randomness.alike(like.device))
        elif isinstance(layer, LoraLinear):
            layer.add(name, rank=rank, alpha=alpha, **options)
        else:
            layer = wrap(cast("Linear", layer), rank=rank, alpha=alpha, name=name, **options)
            module.set_submodule(path, layer)
    activate(module, name)
    return module


def _starred(path: str) -> str:
    return ".".join("*" if word.isdigit() else word for word in path.split("."))


def adapted(module: nn.Module) -> dict[str, LoraLinear]:
    """The layers with adapters, by path."""
    instance(module, nn.Module, "lora")
    found = module.named_modules()
    return {path: layer for path, layer in found if isinstance(layer, LoraLinear)}


def activate(module: nn.Module, name: str | None) -> None:
    """Compute with the adapters of that name, which alone are trained, or with none; layers without
    one of that name compute alone."""
    layers = adapted(module).values()
    known = sorted({each for layer in layers for each in layer.adapters})
    if name is not None and name not in known:
        raise ValueError(f"no layer has an adapter {name!r}: the module has {known}")
    for layer in layers:
        layer.activate(name if name in layer.adapters else None)


@contextmanager
def merged(module: nn.Module) -> Iterator[nn.Module]:
    """The module with its active adapters merged; behind it every weight is what it was."""
    layers = [layer for layer in adapted(module).values() if layer.active is not None]
    done: list[LoraLinear] = []
    try:
        for layer in layers:
            layer.merge()
            done.append(layer)
        yield module
    finally:
        for layer in done:
            layer.unmerge()


def absorb(module: nn.Module) -> nn.Module:
    """The module with its active adapters merged for good: plain layers, which cost what they cost
    before."""
    for path, layer in adapted(module).items():
        if layer.active is not None:
            layer.merge()
        module.set_submodule(path, layer.base)
    return module


def quantize_base(module: GPT) -> GPT:
    """QLoRA's first step: every linear layer of the blocks keeps its weight in NF4, in place; then
    `adapt` it."""
    instance(module, nn.Module, "quantize_base")
    able = {part.name for part in targets(module.config)}
    for path, layer in list(module.named_modules()):
        if _starred(path) in able:
            if type(layer) is not nn.Linear:
                got = f"{path} is a {type(layer).__name__}"
                remedy = "quantize plain linear layers, then adapt them"
                if isinstance(layer, tensor_parallel.Split):
                    remedy = (
                        "its share would have other blocks than the whole; keep it as it is, or "
                        "share out the batch by data_parallel.replicate or zero.Optimizer instead"
                    )
                raise TypeError(f"{got}: {remedy}")
            module.set_submodule(path, quantization.Nf4Linear(layer))
    return module


# ── adapters on disk ──────────────────────────────────────────────────────────────────────────────


def save_adapter(path: str | os.PathLike, module: nn.Module, name: str = "default") -> None:
    """Write the adapters of that name, and nothing of the model, to a safetensors file: A and B of
    each layer under its path, LoRA rank, α and dropout of each as metadata.

    Raises ValueError where a rank has only a share of them.
    """
    tensors: dict[str, torch.Tensor] = {}
    settings: dict[str, dict[str, Any]] = {}
    for at, layer in adapted(module).items():
        if name not in layer.adapters:
            continue
        adapter = layer.adapters[name]
        if isinstance(adapter, SplitAdapter) or adapter.A.dim() != 2:
            remedy = "save from a model that has them whole (zero.gathered, or one without tp)"
            raise ValueError(f"{at}: this rank has a share of the adapter {name!r}: {remedy}")
        tensors |= {f"{at}.A": adapter.A.detach(), f"{at}.B": adapter.B.detach()}
        settings[at] = dict(rank=adapter.rank, alpha=adapter.alpha, dropout=adapter.dropout)
    if not tensors:
        raise ValueError(f"no layer has an adapter {name!r}: nothing to save")
    shape = json.dumps(_shape(module))
    save_file(tensors, path, metadata={OWN: json.dumps(settings), MODEL: shape})


def _shape(module: nn.Module) -> list[int] | None:
    """Layers and width of a GPT."""
    config = getattr(module, "config", None)
    return None if config is None else [config.num_layers, config.d_model]


@torch.no_grad()
def load_adapter(path: str | os.PathLike, module: GPT, name: str = "default") -> GPT:
    """The model with the adapters of a file, in place, under a `name` that is free, and active.

    Raises ValueError for a file that is torn, or no adapter, or one of another model, before
    anything changes.
    """
    file = Path(path).name
    try:
        with safe_open(path, "pt") as opened:
            found = {key: opened.get_tensor(key) for key in opened.keys()}
            settings = json.loads((opened.metadata() or {})[OWN])
            shape = json.loads(opened.metadata().get(MODEL, "null"))
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{file} is torn, or holds no adapter: {error}") from None
    wanted = {f"{at}.{part}" for at in settings for part in "AB"}
    if wanted != found.keys():
        lacks = ", ".join(sorted(wanted ^ found.keys()))
        raise ValueError(f"{file} is torn: {lacks} is not on both sides, tensors and settings")
    if shape is not None and shape != _shape(module):
        both = f"{_shape(module)} here and {shape} there"
        raise ValueError(f"{file} is of another model: layers and width are {both}")
    for at in settings:
        layer = dict(module.named_modules()).get(at)
        base = layer.base if isinstance(layer, LoraLinear) else layer
        here = (getattr(base, "out_features", None), getattr(base, "in_features", None))
        shape = (len(found[f"{at}.B"]), found[f"{at}.A"].shape[1])
        if shape != here:
            raise ValueError(f"{file}: {at} is {here} here and {shape} there: another model?")
    module.requires_grad_(False)
    for at, options in settings.items():
        layer = module.get_submodule(at)
        if not isinstance(layer, LoraLinear):
            layer = LoraLinear(cast("Linear", layer))
            module.set_submodule(at, layer)
        layer.add(name, **options)
        for key, parameter in layer.adapters[name].named_parameters():
            parameter.copy_(found[f"{at}.{key}"])
    activate(module, name)
    return module
