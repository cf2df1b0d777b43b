"""A GPT with adapters: which layers have one, which is active, its merging, its state."""

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn

from labutils import anatomy, quantization, randomness, tensor_parallel
from labutils.config import ModelConfig
from labutils.lora.layers import Linear, LoraLinear, wide, wrap
from labutils.model import GPT
from labutils.units import instance


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
    instance(patterns, tuple, "targets")
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

    rank, alpha: r and α; an adapter adds α/r·B·A
    pattern: of layers, as in `targets`

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
    one of that name compute alone.

    Raises ValueError for a name that no layer has.
    """
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


def state(module: nn.Module, name: str = "default") -> dict[str, Tensor]:
    """A and B of every adapter of that name, by their names in the module, to write to a file; a
    model adapted alike takes them back by `load_state_dict(…, strict=False)`.

    On a model that is split or sharded: this rank's share of them.

    Raises ValueError where no layer has an adapter of that name.
    """
    found = {each: w for each, w in module.state_dict().items() if f".adapters.{name}." in each}
    if not found:
        raise ValueError(f"no layer has an adapter {name!r}: nothing to keep")
    return found


def quantize_base(module: GPT) -> GPT:
    """QLoRA's first step: every linear layer of the blocks keeps its weight in NF4, in place; then
    `adapt` it.

    Raises TypeError for a layer that is not plain.
    """
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
