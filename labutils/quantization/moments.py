"""Optimizer state of 8 bits in blocks: 8-bit Adam's dynamic code (bitsandbytes).

Each block of numbers is divided by its largest, and each number takes the nearest of 256 values,
which lie densely near 0 and near 1 alike.

Source: Dettmers et al. 2110.02861.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from labutils import units
from labutils.quantization.nf4 import seen

STATE_BLOCK = 2048
"""Numbers that share a scale, in the paper; bitsandbytes has since gone to 256."""

_DECADES = 7


def dynamic_code(signed: bool, device: Any = None) -> Float[Tensor, "256"]:
    """The 256 values, ascending: in each of seven decades below 1 twice as many as in the decade
    under it, and 0 and 1. Without a sign there are twice as many in each.

    >>> [round(v, 9) for v in dynamic_code(False)[:4].tolist()], dynamic_code(True)[-1].item()
    ([0.0, 3.25e-07, 7.75e-07, 2.125e-06], 1.0)
    """
    return torch.tensor(_values(signed), device=device)


@functools.cache
def _values(signed: bool) -> tuple[float, ...]:
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade + (not signed))
        for part in range(parts):
            middle = 10.0 ** (decade + 1 - _DECADES) * (0.1 + 0.9 * (part + 0.5) / parts)
            values += [middle, -middle] if signed else [middle]
    return tuple(sorted(values))


class Blocks(NamedTuple):
    """Numbers as codes of 8 bits, and the largest |x| of each block."""

    codes: UInt8[Tensor, " n"]
    amax: Float[Tensor, " blocks"]


@torch.no_grad()
def to_blocks(
    x: Float[Tensor, "..."], *, signed: bool = True, block: int | None = STATE_BLOCK
) -> Blocks:
    """x in the dynamic code, `block` numbers to a scale; None makes one block of all. A block with
    a NaN or an infinity comes back as NaN.

    >>> to_blocks(torch.tensor([1e-9, 1e-9, 1.0]), block=2).codes.tolist()
    [255, 255, 255]
    >>> to_blocks(torch.tensor([1e-9, 1e-9, 1.0]), block=None).codes.tolist()  # 127 is 0
    [127, 127, 255]
    """
    n, block = x.numel(), _whole_block(block, x.numel())
    rows = F.pad(x.detach().flatten().float(), (0, -n % block)).view(-1, block)
    amax = seen(rows.abs().amax(1))
    book = dynamic_code(signed, x.device)
    unit = rows / torch.where(amax == 0, 1.0, amax)[:, None]
    codes = torch.bucketize(unit, (book[1:] + book[:-1]) / 2).to(torch.uint8)
    return Blocks(codes.flatten()[:n].clone(), amax)  # without the padding's memory


@torch.no_grad()
def from_blocks(
    blocks: Blocks,
    shape: tuple[int, ...],
    *,
    signed: bool = True,
    block: int | None = STATE_BLOCK,
) -> Float[Tensor, "..."]:
    """The numbers behind the blocks of `to_blocks`, in fp32 and their shape; `signed` and `block`
    as they were there.
    """
    n = blocks.codes.numel()
    block = _whole_block(block, n)
    numbers = dynamic_code(signed, blocks.codes.device)[blocks.codes.int()]
    rows = F.pad(numbers, (0, -n % block)).view(-1, block) * blocks.amax[:, None]
    return rows.flatten()[:n].view(shape)


def _whole_block(block: int | None, n: int) -> int:
    return max(n, 1) if block is None else units.whole(block, "block", 1)


class LowBits(torch.optim.Optimizer):
    """An optimizer whose states come back from `state_dict` in the formats they are kept in;
    torch's own turns each of them into the dtype of its parameter."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        here = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, here, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                copied = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
                self.state[p][name] = copied


class Adam8(LowBits):
    """AdamW whose two moments are kept in the dynamic code: 2 bytes per parameter instead of 8.

    A step brings them back to fp32, moves the weights as AdamW does, and rounds them again. Tensors
    of fewer than `smallest` numbers keep theirs in fp32.

    block: numbers to a scale; None: one scale for each tensor
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: int | None = STATE_BLOCK,
        smallest: int = 4096,
    ) -> None:
        lr = units.positive(lr, "lr", or_zero=True)
        eps = units.positive(eps, "eps", or_zero=True)
        weight_decay = units.positive(weight_decay, "weight_decay", or_zero=True)
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: both are at least 0 and below 1, as (0.9, 0.999)")
        if block is not None:
            block = units.whole(block, "block", 1)
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self.block, self.smallest = block, units.whole(smallest, "smallest")

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # it takes no closure
        """One step for every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, p.grad, group)

    def _step(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        m, v = (self.moment(p, name) for name in ("exp_avg", "exp_avg_sq"))
        adamw_(p, grad.float(), m, v, state["step"], group)
        for name, moment in (("exp_avg", m), ("exp_avg_sq", v)):
            if p.numel() < self.smallest:
                state[name] = moment
                continue
            kept = to_blocks(moment, signed=name == "exp_avg", block=self.block)
            state[name], state[f"{name} scales"] = kept

    def moment(self, p: Tensor, name: str) -> Float[Tensor, "..."]:
        """A moment of a parameter, "exp_avg" or "exp_avg_sq", in fp32."""
        state = self.state[p]
        if name not in state:
            return torch.zeros_like(p, dtype=torch.float32)
        if state[name].dtype != torch.uint8:
            return state[name]
        kept = Blocks(state[name], state[f"{name} scales"])
        return from_blocks(kept, p.shape, signed=name == "exp_avg", block=self.block)


def adamw_(p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, group: dict[str, Any]) -> None:
    """A step of AdamW, in place, of p, its gradient g and its moments m and v: fp32 tensors of one
    shape. `group` has lr, betas, eps and weight_decay, and `step` counts from 1.
    """
    beta1, beta2 = group["betas"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    p.mul_(1 - group["lr"] * group["weight_decay"])
    root = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
    p.addcdiv_(m, root, value=-group["lr"] / (1 - beta1**step))
