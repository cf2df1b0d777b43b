"""Fusion in general: row-wise functions as many passes over slow memory or as one, their bytes by formula and counted, and the roofline."""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import units
from labutils.config import Hardware
from labutils.flash.algorithms import SlowMemory
from labutils.ledger import Ledger, Line


def softmax(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """softmax of each row in five operations, each through slow memory."""
    shifted = x - x.amax(-1, keepdim=True)
    weights = shifted.exp()
    return weights / weights.sum(-1, keepdim=True)


def layernorm(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Each row with mean 0 and variance 1 (no gain, no bias) in seven operations, each through slow memory."""
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return centered * (variance + 1e-5).rsqrt()


def swiglu(
    gate: Float[Tensor, "rows width"], up: Float[Tensor, "rows width"]
) -> Float[Tensor, "rows width"]:
    """gate · sigmoid(gate) · up in three operations, each through slow memory."""
    return gate * gate.sigmoid() * up


# Each operation of the functions above as (reads, writes), in whole tensors "n" and in columns "r" of one number a row.
PASSES: dict[Callable, tuple[tuple[str, str, str], ...]] = {
    softmax: (("amax", "n", "r"), ("sub", "nr", "n"), ("exp", "n", "n"), ("sum", "n", "r"), ("div", "nr", "n")),
    layernorm: (
        ("mean", "n", "r"), ("sub", "nr", "n"), ("pow", "n", "n"), ("mean", "n", "r"),
        ("add", "r", "r"), ("rsqrt", "r", "r"), ("mul", "nr", "n"),
    ),
    swiglu: (("sigmoid", "n", "n"), ("mul", "nn", "n"), ("mul", "nn", "n")),
}  # fmt: skip


def passes(
    fn: Callable, rows: int, width: int, *, itemsize: int = 4, fused: bool = False
) -> Ledger:
    """Bytes that `softmax`, `layernorm` or `swiglu` moves on rows × width numbers: operation by operation, or fused into one pass.

    >>> passes(softmax, 1024, 1024).total / passes(softmax, 1024, 1024, fused=True).total
    4.001953125
    """
    if fn not in PASSES:
        raise ValueError(
            f"the passes of {fn!r} are not known: use {', '.join(f'fused.{known.__name__}' for known in PASSES)}"
        )
    size = {"r": units.whole(rows, "rows", 1) * units.whole(itemsize, "itemsize", 1)}
    size["n"] = size["r"] * units.whole(width, "width", 1)
    if fused:
        inputs = 2 if fn is swiglu else 1
        return Ledger(
            [Line(f"x{i}", size["n"], component="load") for i in range(inputs)]
            + [Line("out", size["n"], component="store")]
        )
    moved: Counter = Counter()
    for name, reads, writes in PASSES[fn]:
        moved["load", name] += sum(size[what] for what in reads)
        moved["store", name] += sum(size[what] for what in writes)
    return _ledger(moved)


def moved(fn: Callable[[], object]) -> Ledger:
    """Bytes that the operations of `fn()` load and store, counted as they are dispatched: each reads its tensors and writes its results once.

    Views move nothing. What a cache saves between two operations, and what an operation re-reads, is not seen.
    """
    with _Books() as books:
        fn()
    return _ledger(books.moved)


class _Books(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        taken, made = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
            for tree in ((args, kwargs), out)
        )
        alias = {x.untyped_storage()._cdata for x in taken} & {
            x.untyped_storage()._cdata for x in made
        }
        if func._schema.is_mutable or not alias:
            for direction, tensors in (("load", taken), ("store", made)):
                self.moved[direction, func.overloadpacket.__name__] += sum(
                    x.numel() * x.element_size() for x in tensors
                )
        return out


def one_pass(
    fn: Callable[..., Tensor], *inputs: Float[Tensor, "rows width"], block: int | None = None
) -> tuple[Tensor, Ledger]:
    """fn(*inputs) computed `block` rows at a time, and the bytes it moved: whatever `fn` writes down in between stays in fast memory.

    Right for any function that treats each row on its own; `block` defaults to rows of 256 kB in all.
    """
    rows, width = inputs[0].shape
    if any(x.shape != (rows, width) for x in inputs):
        raise ValueError(
            f"one_pass needs inputs of one shape, got {', '.join(str(tuple(x.shape)) for x in inputs)}"
        )
    block = (
        max(1, 2**18 // (width * inputs[0].element_size()))
        if block is None
        else units.whole(block, "block", 1)
    )
    tensors = {f"x{i}": x for i, x in enumerate(inputs)} | {"out": torch.empty_like(inputs[0])}
    memory = SlowMemory(1, **{name: tensor[None, None] for name, tensor in tensors.items()})
    for start in range(0, rows, block):
        at = slice(start, min(start + block, rows))
        memory.store(
            "out",
            at,
            fn(*(memory.load(f"x{i}", at, x.dtype)[0] for i, x in enumerate(inputs)))[None],
        )
    return tensors["out"], _ledger(memory.moved)


@dataclass(frozen=True)
class Roof:
    """A device with two ceilings: `flops` FLOP/s if the data are at hand, and `bandwidth` bytes/s of slow memory if the arithmetic is free."""

    name: str
    flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        units.positive(self.flops, "flops")
        units.positive(self.bandwidth, "bandwidth")

    @classmethod
    def of(cls, hardware: Hardware, dtype: str = "bf16") -> "Roof":
        """The roof of a device in the data sheets.

        >>> round(Roof.of(Hardware.named("A100")).ridge)
        153
        """
        if dtype not in hardware.flops:
            raise ValueError(
                f"{hardware.name} has no {dtype} rate in its data sheet: it has {', '.join(hardware.flops)}"
            )
        return cls(f"{hardware.name} {dtype}", hardware.flops[dtype], hardware.memory_bandwidth)

    @classmethod
    def measured(cls, *, size: int = 1024, nbytes: int = 2**26, repeats: int = 5) -> "Roof":
        """This machine's own roof in fp32: the best of a few matrix products and of a few sweeps over memory."""
        a, x = torch.randn(size, size), torch.randn(nbytes // 4)
        out = torch.empty_like(x)
        product = _best(lambda: a @ a, repeats)
        sweep = _best(lambda: torch.add(x, 1, out=out), repeats)
        return cls("this machine fp32", 2 * size**3 / product, 2 * x.nbytes / sweep)

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which the two ceilings meet: with fewer, memory is the limit."""
        return self.flops / self.bandwidth

    def rate(self, intensity: float) -> float:
        """FLOP/s that can be had at `intensity` FLOPs a byte."""
        return min(self.flops, intensity * self.bandwidth)

    def time(self, flops: float, nbytes: float) -> float:
        """Seconds at least, for that many FLOPs and bytes of slow memory."""
        return max(flops / self.flops, nbytes / self.bandwidth)

    def bound(self, flops: float, nbytes: float) -> str:
        """Which ceiling is met first: "compute" or "memory"."""
        return "compute" if flops / self.flops >= nbytes / self.bandwidth else "memory"


def _best(fn: Callable[[], object], repeats: int) -> float:
    best = math.inf
    for _ in range(repeats + 1):  # the first warms up; a minimum forgets it
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best


def _ledger(moved: dict[tuple[str, str], int]) -> Ledger:
    return Ledger(
        Line(name, amount, component=direction) for (direction, name), amount in moved.items()
    )
