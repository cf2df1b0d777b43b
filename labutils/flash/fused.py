"""Fused kernels: row-wise functions in many passes over memory or in one, and the roofline."""

import timeit
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import units
from labutils.config import Hardware
from labutils.flash.algorithms import SlowMemory
from labutils.flash.counting import ledger_of
from labutils.ledger import Ledger
from labutils.model import check_words


def softmax(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """softmax of each row in five operations, each through slow memory."""
    shifted = x - x.amax(-1, keepdim=True)
    weights = shifted.exp()
    return weights / weights.sum(-1, keepdim=True)


def layernorm(x: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
    """Each row with mean 0 and variance 1 in seven operations, each through slow memory."""
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    return centered * (variance + 1e-5).rsqrt()


def swiglu(
    gate: Float[Tensor, "rows width"], up: Float[Tensor, "rows width"]
) -> Float[Tensor, "rows width"]:
    """gate · sigmoid(gate) · up in three operations, each through slow memory."""
    return gate * gate.sigmoid() * up


# Each operation of the functions above: its name, what it reads and what it writes, in whole
# tensors "n" and in columns "r" of one number per row.
_PASSES: dict[Callable, str] = {
    softmax: "amax n r, sub nr n, exp n n, sum n r, div nr n",
    layernorm: "mean n r, sub nr n, pow n n, mean n r, add r r, rsqrt r r, mul nr n",
    swiglu: "sigmoid n n, mul nn n, mul nn n",
}


def passes(
    fn: Callable, rows: int, width: int, *, itemsize: int = 4, fused: bool = False
) -> Ledger:
    """Bytes that `fn` (`softmax`, `layernorm` or `swiglu`) moves on rows × width numbers of
    `itemsize` bytes: operation by operation, or fused into one pass.

    >>> passes(softmax, 1024, 1024).total / passes(softmax, 1024, 1024, fused=True).total
    4.001953125

    Raises ValueError for another function.
    """
    if fn not in _PASSES:
        known = ", ".join(each.__name__ for each in _PASSES)
        raise ValueError(f"the passes of {fn!r:.60} are not known: there are {known}")
    rows, width, itemsize = units.wholes(1, rows=rows, width=width, itemsize=itemsize)
    size = {"r": rows * itemsize, "n": rows * width * itemsize}
    if fused:
        loads = ("x0", "x1") if fn is swiglu else ("x0",)
        return ledger_of({("load", x): size["n"] for x in loads} | {("store", "out"): size["n"]})
    moved: Counter = Counter()
    for operation in _PASSES[fn].split(", "):
        name, reads, writes = operation.split()
        moved["load", name] += sum(size[what] for what in reads)
        moved["store", name] += sum(size[what] for what in writes)
    return ledger_of(moved)


def moved(fn: Callable[[], object]) -> Ledger:
    """Bytes that the operations of `fn()` load and store, counted as they are dispatched.

    Each reads its tensors and writes its results once; views move nothing. What a cache saves
    between two operations, and what an operation re-reads, is not seen.
    """
    with _Dispatched() as dispatched:
        fn()
    return ledger_of(dispatched.moved)


def product_flops(fn: Callable[[], object]) -> int:
    """FLOPs of the matrix products in `fn()`, backward passes and products in place included.

    >>> x = torch.ones(3, 4, 5)
    >>> product_flops(lambda: x @ x.mT) == 3 * (2 * 4 * 4 * 5)
    True
    """
    with _Dispatched() as dispatched:
        fn()
    return dispatched.flops


class _Dispatched(TorchDispatchMode):
    """Counts the bytes that each operation reads and writes, and the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.moved: Counter = Counter()
        self.flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        taken, made = _tensors((args, kwargs)), _tensors(out)
        shared = _storages(taken) & _storages(made)
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm", "baddbmm_"):
            left, right = args[-2:]
            self.flops += 2 * left.numel() * right.shape[-1]
        if func._schema.is_mutable or not shared:
            self.moved["load", name] += sum(x.nbytes for x in taken)
            self.moved["store", name] += sum(x.nbytes for x in made)
        return out


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storages(tensors: list[Tensor]) -> set[int]:
    return {x.untyped_storage()._cdata for x in tensors}


def one_pass(
    fn: Callable[..., Tensor], *inputs: Float[Tensor, "rows width"], block: int | None = None
) -> tuple[Tensor, Ledger]:
    """fn(*inputs) computed `block` rows at a time, and the bytes it moved.

    Whatever `fn` writes down in between stays in fast memory. Right for any function that treats
    each row on its own; `block` defaults to rows of 256 kB in all.

    Raises ValueError for inputs of unlike shapes.
    """
    shapes = [tuple(x.shape) for x in inputs]
    if len(set(shapes)) != 1 or len(shapes[0]) != 2 or not inputs[0].numel():
        raise ValueError(f"one_pass takes tensors of equally many rows and columns, got {shapes}")
    rows, width = shapes[0]
    if block is None:
        block = max(1, 2**18 // (width * inputs[0].element_size()))
    block = units.whole(block, "block", 1)
    tensors = {f"x{i}": x for i, x in enumerate(inputs)} | {"out": torch.empty_like(inputs[0])}
    memory = SlowMemory(1, **{name: tensor[None, None] for name, tensor in tensors.items()})
    for start in range(0, rows, block):
        at = slice(start, min(start + block, rows))
        loaded = [memory.load(f"x{i}", at, x.dtype)[0] for i, x in enumerate(inputs)]
        memory.store("out", at, fn(*loaded)[None])
    return tensors["out"], ledger_of(memory.moved)


class LinearCrossEntropy(torch.autograd.Function):
    """How `linear_cross_entropy` does it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, targets: Tensor, rows: int) -> Tensor:
        """The loss of x @ W.T and the targets, `rows` rows at a time; ctx keeps the gradients."""
        dx, dW, loss = torch.empty_like(x), torch.zeros_like(W), x.new_zeros(())
        for part, out, t in zip(x.split(rows), dx.split(rows), targets.split(rows), strict=True):
            P = part @ W.mT  # logits, then weights, then their gradient, in one place
            m, right = P.amax(-1, keepdim=True), P.gather(1, t[:, None])
            total = P.sub_(m).exp_().sum(-1, keepdim=True)
            loss += (m + total.log() - right).sum()
            P.div_(total * len(x))
            P.scatter_add_(1, t[:, None], torch.full_like(right, -1 / len(x)))
            out.copy_(P @ W)
            dW.addmm_(P.mT, part)
            del P  # before the next ones come
        ctx.save_for_backward(dx, dW)
        return loss / len(x)

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx, dW = ctx.saved_tensors
        return dx.mul_(scale), dW.mul_(scale), None, None


def linear_cross_entropy(
    x: Float[Tensor, "tokens width"],
    W: Float[Tensor, "words width"],
    targets: Int[Tensor, " tokens"],
    rows: int,
) -> Float[Tensor, ""]:
    """The mean cross-entropy of the logits x @ W.T and targets; `rows` rows exist at a time.

    The gradients are computed with the loss, while the logits are there: the backward pass scales
    them, and runs once. Every target counts.

    >>> x, W, targets = torch.eye(2), torch.zeros(4, 2), torch.tensor([0, 3])
    >>> linear_cross_entropy(x, W, targets, rows=1)  # log 4
    tensor(1.3863)

    Raises IndexError for a target that is no word, ValueError where not each row of x has one.
    Cost: three products of tokens × words × width, as without chunks; rows · words numbers in place
    of three times tokens · words. Source: Hsu et al. 2410.10989.
    """
    for each in (x, W, targets):
        units.instance(each, Tensor, "linear_cross_entropy")
    whole = targets.dtype in (torch.int64, torch.int32) and targets.shape == x.shape[:1] != (0,)
    if not whole or (x.ndim, W.ndim, x.shape[-1]) != (2, 2, W.shape[-1]):
        shapes = " and ".join(str(tuple(each.shape)) for each in (x, W, targets))
        told = f"got {shapes}, targets of {targets.dtype}"
        raise ValueError(f"x (tokens, h), W (words, h) and a whole number per token, {told}")
    try:
        return LinearCrossEntropy.apply(x, W, targets, units.whole(rows, "rows", 1))
    except RuntimeError:
        check_words("target", targets, len(W))
        raise


@dataclass(frozen=True)
class Roof:
    """The roofline of a device: at most `flops` FLOP/s, and `bandwidth` bytes/s of slow memory."""

    name: str
    flops: float
    bandwidth: float

    def __post_init__(self) -> None:
        units.positive_fields(self, "flops", "bandwidth")

    @classmethod
    def of(cls, hardware: Hardware, dtype: str = "bf16") -> "Roof":
        """The roof of a device in the data sheets.

        >>> roof = Roof.of(Hardware.named("A100"))
        >>> round(roof.flops / roof.bandwidth)  # FLOPs per byte where the two ceilings meet
        153
        """
        units.instance(hardware, Hardware, "Roof.of")
        flops = units.entry(hardware.flops, dtype, f"{hardware.name} has no rate in")
        return cls(f"{hardware.name} {dtype}", flops, hardware.memory_bandwidth)

    @classmethod
    def measured(cls, *, size: int = 1024, nbytes: int = 2**26) -> "Roof":
        """This machine's own roof in fp32: the best of a few products, and of a few sweeps."""
        draw = torch.Generator()
        a, x = (torch.randn(shape, generator=draw) for shape in ((size, size), nbytes // 4))
        out = torch.empty_like(x)
        # The first run warms up; a minimum forgets it.
        product = min(timeit.repeat(lambda: a @ a, number=1, repeat=6))
        sweep = min(timeit.repeat(lambda: torch.add(x, 1, out=out), number=1, repeat=6))
        return cls("this machine fp32", 2 * size**3 / product, 2 * x.nbytes / sweep)

    def time(self, flops: int | float, nbytes: int | float) -> float:
        """Seconds at least, for that many FLOPs and bytes of slow memory."""
        return max(self._times(flops, nbytes))

    def bound(self, flops: int | float, nbytes: int | float) -> str:
        """Which ceiling is met first: "compute" or "memory"."""
        computing, moving = self._times(flops, nbytes)
        return "compute" if computing >= moving else "memory"

    def _times(self, flops: float, nbytes: float) -> tuple[float, float]:
        flops = units.positive(flops, "flops", or_zero=True)
        nbytes = units.positive(nbytes, "nbytes", or_zero=True)
        return flops / self.flops, nbytes / self.bandwidth
