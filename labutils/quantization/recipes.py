"""What a recipe of low-precision training keeps, and in which format: bytes per parameter from one
function, and an optimizer that really keeps it so.
"""

from dataclasses import astuple, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from labutils import anatomy, units
from labutils.config import ModelConfig
from labutils.gradients import kept_by
from labutils.ledger import Ledger, Line
from labutils.quantization.fp8 import F8_E4M3, Fp8Linear, fp8_layers, scale_for, tile_amax, to_eight
from labutils.quantization.moments import (
    STATE_BLOCK,
    Blocks,
    LowBits,
    adamw_,
    from_blocks,
    to_blocks,
)

DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": F8_E4M3, "blocks": torch.uint8,
}  # fmt: skip
"""The formats of states: fp8 is e4m3 with a scale per tensor, blocks is the dynamic code."""


@dataclass(frozen=True)
class StateFormats:
    """The format in which each state lives from step to step; "" where there is none.

    The names are those of `measure.model_states`. `summed` is what micro-batches are added in.

    >>> StateFormats("bf16", "bf16", "fp32", "fp32", master="fp32").bytes_per_parameter
    16
    """

    weights: str
    gradients: str
    exp_avg: str
    exp_avg_sq: str
    master: str = ""
    summed: str = ""

    def __post_init__(self) -> None:
        for field, fmt in zip(fields(self), astuple(self), strict=True):
            if fmt != "" or field.name not in ("master", "summed"):
                units.entry(DTYPES, fmt, f"no format for {field.name} called")

    @property
    def formats(self) -> dict[str, str]:
        """The format of each state that there is, by its name in a ledger."""
        long = {"master": "master weights", "summed": "summed gradients"}
        pairs = zip(fields(self), astuple(self), strict=True)
        return {long.get(field.name, field.name): fmt for field, fmt in pairs if fmt}

    @property
    def bytes_per_parameter(self) -> int:
        """Bytes of all states, for each parameter; scales are left out."""
        return sum(DTYPES[fmt].itemsize for fmt in self.formats.values())


RECIPES = {
    "bf16, fp32 sums": StateFormats("bf16", "bf16", "fp32", "fp32", master="fp32", summed="fp32"),
    "bf16": StateFormats("bf16", "bf16", "fp32", "fp32", master="fp32"),
    "Transformer Engine": StateFormats("fp32", "fp32", "fp32", "fp32"),
    "FP8-LM": StateFormats("fp8", "fp8", "fp8", "fp16", master="fp16", summed="fp16"),
    "DeepSeek-V3": StateFormats("fp8", "bf16", "bf16", "bf16", master="fp32", summed="fp32"),
    "nanotron": StateFormats("fp8", "fp8", "fp8", "fp8", master="bf16", summed="fp32"),
    "8-bit Adam": StateFormats("bf16", "bf16", "blocks", "blocks", master="fp32"),
}
"""Recipes by name. Source: the FP8 table of *The Ultra-Scale Playbook*; 8-bit Adam: 2110.02861."""

_COMPONENTS = {"weights": "weights", "gradients": "gradients", "summed gradients": "gradients"}


def kept_states(kept: StateFormats, *sizes: int) -> Ledger:
    """Bytes of tensors of these numbers of parameters, each kept as the recipe says: a line for
    each state, and one for the scales of each that has any; those of weights are buffers.

    >>> kept_states(RECIPES["nanotron"], 1000, 500).by("name")["exp_avg · scales"]
    8
    """
    units.instance(kept, StateFormats, "kept_states")
    lines = []
    for name, fmt in kept.formats.items():
        component = _COMPONENTS.get(name, "optimizer")
        lines.append(Line(name, DTYPES[fmt].itemsize * sum(sizes), component=component))
        blocks = sum(-(-size // STATE_BLOCK) for size in sizes)
        if scales := {"fp8": len(sizes), "blocks": blocks}.get(fmt):
            component = "buffers" if name == "weights" else "optimizer"
            label = component if name == "weights" else f"{name} · scales"
            lines.append(Line(label, 4 * scales, component=component))
    return Ledger(lines)


def fp8_states(model: ModelConfig, kept: StateFormats) -> Ledger:
    """Bytes after a step of `KeptAdam`: the linear layers of the blocks are kept as the recipe
    says, and the rest, embeddings, norms and the head, in fp32 as ever.
    """
    sizes, letters = [], anatomy.letters(model)
    for part in (each for each in anatomy.parts(model) if each.lora):
        numel = 1
        for dim in part.weight.split():
            numel *= anatomy.size(dim, letters)
        sizes += anatomy.size(part.copies, letters) * [numel]
    rest = kept_states(RECIPES["Transformer Engine"], model.num_params - sum(sizes))
    tables = 2 * 4 * model.seq_len * (model.d_head // 2) * (model.positions == "rope")
    buffers = Ledger([Line("buffers", tables, component="buffers")] if tables else [])
    return (kept_states(kept, *sizes) + rest + buffers).merged()


class KeptAdam(LowBits):
    """AdamW over a module with `Fp8Linear` layers, whose weights and states are kept as a recipe
    says; everything else in fp32. Layers are given new weights: make it before anything else holds
    the parameters.

    A gradient is put into its format as soon as it is there, and added to the sum. Master weights
    are stepped, in fp32 for the moment, and rounded into the weights. Formats of 16 bits are
    rounded to nearest, fp8 with a scale per tensor from its largest number now. So nobody else can
    read or change a gradient: clipping and DualPipe are refused.
    """

    def __init__(
        self, module: nn.Module, kept: StateFormats, lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8, weight_decay: float = 0.01,
    ) -> None:  # fmt: skip
        self.layers, masters = {}, {}
        for path, layer in fp8_layers(module).items():
            if not isinstance(layer, Fp8Linear):
                remedy = "train without tensor parallelism, or step torch.optim.AdamW"
                raise TypeError(f"{path} is of a layer that ranks share out: {remedy}")
            whole = layer.weight.detach().float()
            layer.weight = nn.Parameter(torch.empty_like(whole, dtype=DTYPES[kept.weights]))
            layer.weight.grad_dtype = torch.float32
            self.layers[layer.weight], masters[layer.weight] = layer, whole
        if not self.layers:
            raise ValueError("no layer of this module is an Fp8Linear: call use_fp8 first")
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, steps=0)
        super().__init__(module.parameters(), options)
        self.kept = {}
        for group in self.param_groups:
            for p in group["params"]:
                self.kept[p] = kept if p in self.layers else RECIPES["Transformer Engine"]
        for p, whole in masters.items():
            p.register_post_accumulate_grad_hook(self._take)
            kept_by(self, p)
            self._publish(p, whole)

    def gradient_of(self, p: Tensor) -> Tensor:
        """Raises ValueError: it is rounded as soon as it is there."""
        remedy = "step torch.optim.AdamW, or neither clip nor take a schedule with two copies"
        raise ValueError(f"KeptAdam has rounded this gradient of {list(p.shape)} already: {remedy}")

    # -- what is kept, and in which format ---------------------------------------------------------

    def _keep(self, p: Tensor, name: str, x: Tensor) -> None:
        """A state of a parameter, in its format; a tensor that is there is written into."""
        fmt, state = self.kept[p].formats[name], self.state[p]
        if fmt == "fp8":
            eight = to_eight(x.reshape(1, -1), F8_E4M3)
            state[name], state[f"{name} · scales"] = eight.codes.view(x.shape), eight.inverse
        elif fmt == "blocks":
            state[name], state[f"{name} · scales"] = to_blocks(x, signed=name == "exp_avg")
        else:
            state[name] = x.to(DTYPES[fmt])

    def read(self, p: Tensor, name: str) -> Tensor:
        """A state of a parameter in fp32, zero where there is none yet."""
        fmt, state = self.kept[p].formats[name], self.state[p]
        if name not in state:
            return torch.zeros(p.shape, device=p.device)
        if fmt == "fp8":
            return state[name].float() * state[f"{name} · scales"]
        if fmt == "blocks":
            kept = Blocks(state[name], state[f"{name} · scales"])
            return from_blocks(kept, p.shape, signed=name == "exp_avg")
        return state[name].float()

    @torch.no_grad()
    def _publish(self, p: nn.Parameter, whole: Tensor) -> None:
        """New weights: into the master weights, and from there into the layer."""
        if "master weights" in self.kept[p].formats:
            self._keep(p, "master weights", whole)
            whole = self.read(p, "master weights")
        if self.kept[p].weights == "fp8":
            scale = scale_for(tile_amax(whole), F8_E4M3)
            eight = to_eight(whole, F8_E4M3, scale=scale)
            p.copy_(eight.codes)
            self.layers[p].register_buffer("weight_inverse", eight.inverse)
        else:
            p.copy_(whole)

    # -- a step ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _take(self, p: Tensor) -> None:
        """A gradient, as it comes: into its format, and into the sum."""
        state, summed = self.state[p], "summed gradients" in self.kept[p].formats
        assert p.grad is not None  # the hook says that it is there
        before = 0 if summed or state.get("done", True) else self.read(p, "gradients")
        self._keep(p, "gradients", p.grad + before)
        if summed:
            total = self.read(p, "gradients")
            if not state.get("done", True):
                total += self.read(p, "summed gradients")
            self._keep(p, "summed gradients", total)
        p.grad, state["done"] = None, False

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # it takes no closure
        """One step of AdamW for every parameter."""
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                if p in self.layers or p.grad is not None:
                    self._step(p, group)

    def _step(self, p: nn.Parameter, group: dict[str, Any]) -> None:
        kept = self.kept[p].formats
        whole = self.read(p, "master weights") if "master weights" in kept else p
        if p in self.layers:
            g = self.read(p, "summed gradients" if "summed gradients" in kept else "gradients")
        elif p.grad is None:
            return
        else:
            g = p.grad
        m, v = self.read(p, "exp_avg"), self.read(p, "exp_avg_sq")
        adamw_(whole, g, m, v, group["steps"], group)
        self._keep(p, "exp_avg", m)
        self._keep(p, "exp_avg_sq", v)
        if p in self.layers:
            self._publish(p, whole)
            self.state[p]["done"] = True
