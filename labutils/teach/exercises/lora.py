"""Give a layer an adapter, count what is trained and held, and repair a layer that merges."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from labutils import lora
from labutils.flash import fused
from labutils.teach.exercises import Exercise, Failed, Property

_D, _K = 5, 7  # outputs and inputs, unlike each other and unlike every LoRA rank below
_CASES = ((2, 8.0), (3, 3.0), (4, 1.0))


def fine_tuned(linears: Sequence[nn.Linear], rank: int, itemsize: int) -> tuple[int, int]:
    """The numbers that LoRA trains beside these layers, and the bytes that all hold after a step
    of AdamW: the frozen layers with `itemsize` bytes per number; adapters, their gradients and two
    moments each in fp32. AdamW's counters of steps are left out.

    >>> fine_tuned([nn.Linear(6, 4)], rank=2, itemsize=2)
    (20, 376)
    """
    trained = sum(rank * (each.out_features + each.in_features) for each in linears)
    frozen = sum(parameter.numel() for each in linears for parameter in each.parameters())
    return trained, itemsize * frozen + 4 * 4 * trained


# ── what both layers are tried with ──────────────────────────────────────────────────────────────


def _linear(
    d: int = _D, k: int = _K, dtype: torch.dtype = torch.float64, bias: bool = True
) -> nn.Linear:
    layer = nn.Linear(k, d, bias=bias, dtype=dtype)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=dtype))
    return layer


def _x(k: int = _K, rows: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(1), dtype=dtype)


def _whole(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    """Whole numbers, whose products are not rounded: factors may be fp32 beside weights in fp64."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=draw).to(dtype)


def _made(attempt: Callable, linear: nn.Linear, rank: int, alpha: float) -> nn.Module:
    """The layer, its factors in the dtype of the weights unless it takes what the weights take."""
    dtype, k = linear.weight.dtype, linear.in_features
    layer = attempt(linear, rank, alpha)
    if not isinstance(layer, nn.Module):
        hint = "Write a class that derives from nn.Module and takes (linear, rank, alpha)."
        raise Failed(f"you return {type(layer).__name__}", hint)
    try:
        with torch.no_grad():
            layer(torch.zeros(1, k, dtype=dtype))
    except NotImplementedError:
        raise
    except RuntimeError:
        return layer.to(dtype)
    return layer


def _trained(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _case(rank: int, alpha: float) -> str:
    return f"r = {rank}, α = {alpha:g}, W[{_D}, {_K}]"


# ── an adapter ───────────────────────────────────────────────────────────────────────────────────


def _begins(attempt: Callable) -> str:
    for rank, alpha in _CASES:
        before = _linear()(_x())
        off = (_made(attempt, _linear(), rank, alpha)(_x()) - before).abs().max().item()
        if off > 1e-12:
            why = (
                "Fine-tuning begins at the pre-trained function: y = W·x + bias. "
                "One of the two factors must be zero."
            )
            if off < 1e-5:
                why = "W was rounded on its way into your layer: keep the dtype of linear.weight."
            raise Failed(
                f"{_case(rank, alpha)}: before any training the output is off by {off:.2g}", why
            )
    return f"{len(_CASES)} cases"


_NOT_TRAINED = {
    _D * _K: "W itself is trained: set requires_grad_(False) on the layer that you were given.",
    _D: "The bias is trained: freeze the whole layer, its bias too.",
    _D * _K + _D: "The layer itself is trained: call linear.requires_grad_(False).",
}


def _what_is_trained(attempt: Callable) -> str:
    for rank, alpha in _CASES:
        layer = _made(attempt, _linear(), rank, alpha)
        got, right = sum(p.numel() for p in _trained(layer)), rank * (_D + _K)
        if got != right:
            more = _NOT_TRAINED.get(got - right, "A has r·k numbers, B has d·r.")
            for name, other in (("A", rank * _D), ("B", rank * _K)):
                if got == other:
                    more = f"{name} is not trained: both factors are, an nn.Parameter each."
            raise Failed(
                f"{_case(rank, alpha)}: {got} numbers are trained, A and B have {right}", more
            )
    return "A and B alone"


def _learns(attempt: Callable) -> str:
    rank, alpha = _CASES[0]
    torch.manual_seed(0)
    layer = _made(attempt, _linear(), rank, alpha)
    target = torch.randn(3, _D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    optimizer = torch.optim.SGD(_trained(layer), lr=1e-2)
    before = [parameter.detach().clone() for parameter in _trained(layer)]
    for _ in range(2):
        optimizer.zero_grad()
        (layer(_x()) - target).square().mean().backward()
        optimizer.step()
    moved = [
        not torch.equal(*pair)
        for pair in zip(before, map(Tensor.detach, _trained(layer)), strict=True)
    ]
    if not any(moved):
        raise Failed(
            "after two steps of SGD no number has moved",
            "The gradient of B is proportional to A and that of A to B: with both zero, both "
            "gradients are zero for ever. One of them is drawn at random.",
        )
    if not all(moved):
        hint = "From the second step on both factors have a gradient. Is one detached, or no part?"
        raise Failed("after two steps of SGD one factor is what it was", hint)
    drawn = max(before, key=lambda factor: factor.abs().max())
    if torch.linalg.matrix_rank(drawn) < rank:
        raise Failed(
            f"the drawn factor has rank {torch.linalg.matrix_rank(drawn)}, not {rank}",
            "Equal rows get equal gradients and stay equal: you train an update of a lower rank. "
            "Draw the factor at random.",
        )
    after = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        _made(attempt, _linear(), rank, alpha)
        after.append(torch.rand(2).tolist())
    if after[0] == after[1]:
        raise Failed(
            "whatever seed the program has set, after your layer it draws the same numbers",
            "A seed is set inside the layer: every layer draws what the last one drew, and so do "
            "dropout and the order of data. Draw from the generator as it stands.",
        )
    return "two steps move A and B"


def _factors(layer: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
    """A[r, k] and B[d, r], drawn anew; whichever way round they are kept."""
    found = {}
    with torch.no_grad():
        for i, parameter in enumerate(_trained(layer)):
            values, shape = _whole(*parameter.shape, seed=3 + i), tuple(parameter.shape)
            parameter.copy_(values)
            if sorted(shape) == sorted((rank, _K)):
                found["A"] = values if shape == (rank, _K) else values.mT
            elif sorted(shape) == sorted((_D, rank)):
                found["B"] = values if shape == (_D, rank) else values.mT
    if len(found) != 2:
        got = ", ".join(str(list(parameter.shape)) for parameter in _trained(layer))
        raise Failed(f"trained are tensors of {got}", f"A is [{rank}, {_K}], B is [{_D}, {rank}].")
    return found["A"], found["B"]


def _why_scaled(factor: float, rank: int, alpha: float) -> str:
    for value, words in (
        (1.0, "The factor α/r is missing: α then changes nothing, and r changes the step."),
        (alpha, "α is there and 1/r is not: with a larger r the same update becomes larger."),
        (1 / rank, "1/r is there and α is not."),
        (alpha / rank**0.5, "This is α/√r (rank-stabilized LoRA); the paper's factor is α/r."),
        (rank / alpha, "The factor is upside down."),
        (alpha // rank, "// cuts the fraction off: the factor is α / r."),
    ):
        if abs(factor - value) < 1e-9:
            return words
    return "Add (α/r)·B·A·x to what the layer gives."


def _scaled(attempt: Callable) -> str:
    for rank, alpha in _CASES:
        linear = _linear()
        layer = _made(attempt, linear, rank, alpha).eval()
        A, B = _factors(layer, rank)
        x = _whole(3, _K)
        low = x @ A.mT @ B.mT
        added = (layer(x) - _linear()(x)).detach()
        factor = ((added * low).sum() / low.square().sum()).item()
        if (added - factor * low).abs().max() > 1e-9:
            hint = "Add (α/r)·B·A·x: first A, which leaves r numbers, then B."
            raise Failed(f"{_case(rank, alpha)}: what is added is no multiple of B·A·x", hint)
        if abs(factor - alpha / rank) > 1e-9:
            raise Failed(
                f"{_case(rank, alpha)}: you add {factor:.3g}·B·A·x, α/r is {alpha / rank:.3g}",
                _why_scaled(factor, rank, alpha),
            )
    return f"{len(_CASES)} cases"


def _passes_on(attempt: Callable) -> str:
    """The gradient of x is that of the function which the layer computes, in any shape."""
    rank, alpha = _CASES[0]
    layer = _made(attempt, _linear(), rank, alpha).eval()
    _factors(layer, rank)
    x, g = _whole(2, 3, _K), _whole(2, 3, _D, seed=2)
    try:
        y = layer(x.requires_grad_())
    except RuntimeError as error:
        hint = "Activations are [b, s, k]: multiply with @ or F.linear, which take more dims."
        raise Failed(f"x[2, 3, {_K}]: {error}", hint) from None
    with torch.no_grad():
        whole = (layer(torch.eye(_K, dtype=torch.float64)) - layer(g.new_zeros(1, _K))).mT
    W = _linear().weight.detach()
    (found,) = torch.autograd.grad((y * g).sum(), x, allow_unused=True)
    found = torch.zeros_like(x) if found is None else found
    if (found - g @ whole).abs().max() > 1e-9:
        hint = "The gradient of x is (W + (α/r)·B·A)ᵀ times that of y."
        if (found - g @ (whole - W)).abs().max() < 1e-9:
            hint = (
                "It flows through B·A alone. Frozen is W, and not what flows through it: under "
                "no_grad or detach the adapters of all layers below learn nothing from this path."
            )
        elif (found - g @ W).abs().max() < 1e-9:
            hint = "It flows through W alone: what goes into A must not be detached."
        norms = f"{found.norm():.3g}, of which {(g @ whole).norm():.3g} should arrive"
        raise Failed(f"two layers, one on the other: the lower gets a gradient of {norms}", hint)
    return "x[2, 3, k]"


def _thin(attempt: Callable) -> str:
    """B·A is as large as W: whoever makes it whole computes r·d·k products for it, in each forward
    pass, and keeps another W for the backward pass."""
    n, rank = 64, 2
    layer = _made(attempt, _linear(n, n), rank, 4.0)
    got = fused.product_flops(lambda: layer(_x(n, rows=1)))
    right = 2 * (n * n + 2 * rank * n)
    if got > 1.5 * right:
        raise Failed(
            f"W[{n}, {n}], r = {rank}, one token: a forward pass takes {got:,} FLOPs, "
            f"W·x and B·(A·x) take {right:,}",
            "B·A made whole is as large as W: it is computed anew in each pass, and kept for the "
            "backward pass in each layer. Go through r numbers: first A·x, then B times that.",
        )
    return f"{got:,} FLOPs per token"


def _without_bias(attempt: Callable) -> str:
    """As every layer of the models of this lab."""
    linear = _linear(bias=False)
    try:
        off = (_made(attempt, linear, *_CASES[0])(_x()) - linear(_x())).abs().max().item()
    except (AttributeError, TypeError) as error:
        hint = "linear.bias is None there. The layer itself knows: self.linear(x) has it or not."
        raise Failed(f"a layer without a bias: {error}", hint) from None
    if off > 1e-12:
        raise Failed(f"a layer without a bias: the output is off by {off:.2g}", "y = W·x.")
    return "y = W·x"


def _in_bf16(attempt: Callable) -> str:
    """The layer of a model in half precision: its outputs are in bf16, and right to its digits."""
    rank, alpha = _CASES[0]
    layer = _made(attempt, _linear(dtype=torch.bfloat16), rank, alpha).eval()
    A, B = _factors(layer, rank)
    x = _x(dtype=torch.bfloat16)
    y, base = layer(x).detach(), _linear(dtype=torch.bfloat16).double()
    if y.dtype != torch.bfloat16:
        hint = "The next layer expects bf16: compute in the dtype of x."
        raise Failed(f"a bf16 layer and x in bf16 give {str(y.dtype).removeprefix('torch.')}", hint)
    right = base(x.double()).detach() + alpha / rank * x.double() @ A.mT @ B.mT
    off = ((y.double() - right).norm() / right.norm()).item()
    if off > 0.02:
        raise Failed(f"in bf16 you are off by {off:.0%}", "W·x + bias + (α/r)·B·A·x, in bf16.")
    return f"off by {off:.1%}"


ADAPTER = Exercise(
    id="lora/adapter",
    reference=lambda linear, rank, alpha: lora.wrap(linear, rank=rank, alpha=alpha),
    properties=(
        Property("it begins as the layer", _begins),
        Property("what is trained", _what_is_trained),
        Property("it learns", _learns),
        Property("the factor α/r", _scaled),
        Property("the layer below", _passes_on),
        Property("in bf16", _in_bf16),
        Property("thin", _thin),
        Property("no bias", _without_bias),
    ),
    hints=(
        "Keep the layer, frozen with requires_grad_(False). A is an nn.Parameter [r, k], drawn; "
        "B is one [d, r], zero.",
        "forward: self.linear(x) + (alpha / rank) * (x @ self.A.T @ self.B.T).",
    ),
)

# ── what is trained and held ─────────────────────────────────────────────────────────────────────

_LAYERS = {
    "one layer without a bias": ([(64, 48, False)], 4, 4),
    "a layer with a bias": ([(64, 48, True)], 4, 2),
    "an attention layer in bf16": ([(64, 64, True), (64, 16, True), (64, 16, False)], 8, 2),
}


def _answer(attempt: Callable, case: str) -> tuple[list[nn.Linear], tuple[int, int], tuple, str]:
    shapes, rank, itemsize = _LAYERS[case]
    with torch.device("meta"):
        linears = [nn.Linear(k, d, bias=bias) for k, d, bias in shapes]
    got = attempt(linears, rank, itemsize)
    several = isinstance(got, Iterable) and not isinstance(got, str)
    pair = tuple(got) if several and getattr(got, "ndim", 1) != 0 else ()
    if len(pair) != 2:
        raise Failed(f"you return {got!r}", "Return two numbers: how many are trained, and bytes.")
    said = f"{case}, r = {rank}, {itemsize} bytes per frozen number"
    return linears, fine_tuned(linears, rank, itemsize), pair, said


def _same(got: Any, right: int) -> bool:
    try:
        return float(got) == right
    except (TypeError, ValueError, RuntimeError):
        return False


def _counted(attempt: Callable) -> str:
    for case in _LAYERS:
        linears, (right, nbytes), (got, _), said = _answer(attempt, case)
        if _same(got, right):
            continue
        rank = _LAYERS[case][1]
        biases = sum(each.out_features for each in linears if each.bias is not None)
        whole = sum(each.weight.numel() for each in linears)
        inputs = sum(rank * each.in_features for each in linears)
        usually = {
            right + biases: "The bias counts as trained. It is frozen with its layer.",
            whole: "That is W: what is trained are A[r, k] and B[d, r].",
            rank * whole: "r·d·k is more than W: A has r·k numbers and B has d·r.",
            inputs: "That is A alone: B has d·r more.",
            right - inputs: "That is B alone: A has r·k more.",
            2 * inputs: "A has r·k numbers, k inputs, and B has d·r, d outputs.",
            2 * (right - inputs): "A has r·k numbers, k inputs, and B has d·r, d outputs.",
            right + rank * biases: "A bias has no adapter: A and B are beside W alone.",
            right + whole: "W is frozen: it counts as held, and not as trained.",
            nbytes: "These are the bytes: return the trained numbers first.",
        }
        hint = usually.get(got, "A has r·k numbers and B has d·r, for each layer.")
        raise Failed(f"{said}: you count {got!r}, trained are {right:,}", hint)
    return f"{len(_LAYERS)} cases"


def _held(attempt: Callable) -> str:
    for case in _LAYERS:
        linears, (trained, right), (_, got), said = _answer(attempt, case)
        if _same(got, right):
            continue
        itemsize = _LAYERS[case][2]
        frozen = sum(p.numel() for each in linears for p in each.parameters())
        biases = sum(p.bias.numel() for p in linears if p.bias is not None)
        usually = {
            right + 8 * len(linears): "AdamW's counters, 4 bytes for A and for B, do not count.",
            right + 4 * trained: "Adapters are fp32 already: they have no master copy.",
            right - 2 * trained: "Adapters, their gradients and their moments are all fp32.",
            right - 4 * trained: "Weights, gradients and two moments are four numbers, not three.",
            right - 8 * trained: "AdamW keeps two moments of each trained number.",
            right - 12 * trained: "Gradients and moments of what is trained are missing.",
            16 * trained: "The frozen weights are still there: every product needs them.",
            right - itemsize * biases: "The biases are missing among what is frozen.",
            16 * (frozen + trained): "A frozen weight has no gradient and no moments.",
            right + (4 - itemsize) * frozen: "Frozen numbers take `itemsize` bytes, not four.",
            right + itemsize * frozen: "A frozen weight has no gradient."
            + (" Or do you count four bytes for it?" if itemsize == 2 else ""),
            itemsize * frozen + 4 * itemsize * trained: "Adapters stay fp32 beside a half model.",
        }
        hint = usually.get(got, "Frozen: itemsize per number. Trained: four numbers in fp32.")
        raise Failed(f"{said}: you say {got!r} B, held are {right:,} B", hint)
    return f"{len(_LAYERS)} cases"


HELD = Exercise(
    id="lora/held",
    reference=fine_tuned,
    properties=(Property("numbers trained", _counted), Property("bytes held", _held)),
    hints=(
        "A layer of k inputs and d outputs: A is [r, k], B is [d, r]. Whose bias is it?",
        "Frozen numbers take `itemsize` bytes each and nothing more. Each trained one is there "
        "four times in fp32: itself, its gradient, two moments.",
    ),
)

# ── merging ──────────────────────────────────────────────────────────────────────────────────────

_N = 48  # inputs and outputs, of which rounding shows


def _mergeable(attempt: Callable) -> tuple[Any, Tensor, Tensor]:
    """A layer whose adapter is not zero, an input, and its output."""
    layer = _made(attempt, _linear(_N, _N, torch.float32), 4, 8.0)
    draw = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in _trained(layer):
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
        x = _x(_N, 4, torch.float32)
        return layer, x, layer.eval()(x)


def _off(layer: nn.Module, x: Tensor, before: Tensor) -> float:
    """How far a layer's output has moved, relative to what it was."""
    with torch.no_grad():
        return ((layer(x) - before).norm() / before.norm()).item()


def _values(attempt: Callable) -> str:
    layer, x, before = _mergeable(attempt)
    layer.merge()
    off = _off(layer, x, before)
    if off > 1e-5:
        raise Failed(
            f"merged, the output is off by {100 * off:.2g} %",
            "W + (α/r)·B·A takes the place of W, and the adapter's own product is left out.",
        )
    off = _off(layer.train(), x, before)
    if off > 1e-5:
        hint = "A merged layer computes W·x alone in both modes: W holds the adapter already."
        raise Failed(f"merged, in training mode the output is off by {100 * off:.2g} %", hint)
    given = x.clone().requires_grad_()
    y = layer.eval()(given)
    if not y.requires_grad or torch.autograd.grad(y.sum(), given, allow_unused=True)[0] is None:
        hint = "Merged or not, the layers below still learn: no no_grad, no detach in forward."
        raise Failed("merged, no gradient comes back to x", hint)
    return "merged = beside"


def _work(attempt: Callable) -> str:
    layer, x, _ = _mergeable(attempt)
    layer.merge()
    with torch.no_grad():
        layer(x)  # whoever merges at the next forward has done so by then
        got, right = fused.product_flops(lambda: layer(x)), 2 * x.numel() * _N
    if got > right:
        raise Failed(
            f"merged, a forward takes {got:,} FLOPs, the layer alone {right:,}",
            "A product times zero is still computed: return early while it is merged. That is what "
            "one merges for.",
        )
    return f"{right:,} FLOPs"


def _twice(attempt: Callable) -> str:
    layer, x, before = _mergeable(attempt)
    layer.merge()
    try:
        layer.merge()
    except Exception:
        return "the second merge() is refused"
    off = _off(layer, x, before)
    if off > 1e-5:
        raise Failed(
            f"merged twice, the output is off by {100 * off:.2g} %",
            "The update is in W two times. Raise an error the second time, or do nothing.",
        )
    return "the second merge() changes nothing"


def _back_from_two(attempt: Callable) -> str:
    """The weights come back after a merge that found them merged, and only those of that merge."""
    layer, x, before = _mergeable(attempt)
    layer.merge()
    with contextlib.suppress(Exception):
        layer.merge()
    with torch.no_grad():
        layer(x)
        if fused.product_flops(lambda: layer(x)) > 2 * x.numel() * _N:
            hint = "Raise an error the second time, or do nothing: it stays merged."
            raise Failed("merged twice, the adapter's products are computed again", hint)
    layer.unmerge()
    if off := _off(layer, x, before):
        hint = "The second merge() kept W + Δ as if it were W: look first whether it is merged."
        raise Failed(f"merged twice, unmerged once: the output is off by {off:.1%}", hint)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(2)
        before = layer(x)
    with contextlib.suppress(Exception):
        layer.unmerge()
    if off := _off(layer, x, before):
        hint = "What the last merge() kept is of no use any more: look first whether it is merged."
        raise Failed(f"unmerged, trained, unmerged again: the output is off by {off:.1%}", hint)
    return "W as it was"


def _rounded(layer: nn.Module) -> str:
    """The dtype to which the weights of the layer were rounded, or ""."""
    W = _linear(_N, _N, torch.float32).weight
    for dtype in (torch.half, torch.bfloat16):
        if any(torch.equal(p, W.to(dtype).to(p.dtype)) for p in layer.parameters()):
            return str(dtype).removeprefix("torch.")
    return ""


def _back(attempt: Callable) -> str:
    layer, x, before = _mergeable(attempt)
    with torch.no_grad():
        for _ in range(3):
            layer.merge()
            layer.unmerge()
        after = layer(x)
    if not torch.equal(after, before):
        off = (after - before).abs().max().item()
        why = (
            "W + Δ is rounded, and W + Δ − Δ is rounded again: that is not W. "
            "Keep W itself, and put it back."
        )
        rounded = _rounded(layer)
        if rounded:
            why = f"Keep W in its own dtype: it comes back rounded to {rounded}."
        elif off > 1e-3 * before.abs().max():
            beside = _linear(_N, _N, torch.float32)(x).detach()
            why = (
                "W is back and the adapter is not: after unmerge() A and B compute beside W again."
                if torch.allclose(after, beside, rtol=1e-4, atol=1e-4)
                else "That is no rounding. Keep W itself as a copy (clone: the tensor that merge() "
                "writes into changes with it), and leave A and B as they are."
            )
        raise Failed(f"merged and unmerged three times, the output differs by {off:.1e}", why)
    return "equal to the bit"


def _loaded(attempt: Callable) -> str:
    """Weights that are loaded after the adapter was put beside them are those that come back."""
    layer, x, _ = _mergeable(attempt)
    layer.merge()
    layer.unmerge()
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.requires_grad and parameter.shape == (_N, _N):
                parameter.copy_(parameter.mT * 3)
        before = layer(x)
        layer.merge()
        off = _off(layer, x, before)
        layer.unmerge()
        after = layer(x)
    if off > 1e-5 or not torch.equal(after, before):
        raise Failed(
            "weights loaded into the frozen layer, then merged and unmerged: the output differs "
            f"by {max(off, _off(layer, x, before)):.1%}",
            "What merge() keeps are the weights of that moment. Kept when the layer was made, "
            "or when it was merged first, they are older than what was loaded since.",
        )
    return "what merge() found"


def _trained_on(attempt: Callable) -> str:
    """What is merged is the adapter of that moment."""
    layer, x, _ = _mergeable(attempt)
    layer.merge()
    layer.unmerge()
    with torch.no_grad():
        for parameter in _trained(layer):
            parameter.mul_(-1.5)
        before = layer(x)
    layer.merge()
    off = _off(layer, x, before)
    if off > 1e-5:
        raise Failed(
            f"merged, unmerged, trained, merged: the output is off by {off:.1%}",
            "Training goes on between two merges: B·A is computed when it is merged.",
        )
    return "the adapter of that moment"


def _not_merged(attempt: Callable) -> str:
    layer, x, before = _mergeable(attempt)
    try:
        layer.unmerge()
    except (RuntimeError, ValueError, AssertionError):
        return "refused"
    except Exception as error:
        hint = "Nothing was merged, so nothing is to be taken out: return, or raise a clear error."
        raise Failed(
            f"unmerge() of an unmerged layer: {type(error).__name__}: {error}", hint
        ) from None
    if _off(layer, x, before) > 0:
        hint = "Nothing was merged, so nothing is to be taken out: return, or raise an error."
        raise Failed("unmerge() of an unmerged layer changes the output", hint)
    return "changes nothing"


def _frozen_still(attempt: Callable) -> str:
    layer, _, _ = _mergeable(attempt)
    before = sum(parameter.numel() for parameter in _trained(layer))
    for change in ("merge", "unmerge"):
        getattr(layer, change)()
        after = sum(parameter.numel() for parameter in _trained(layer))
        if change == "unmerge" and after < before:
            hint = "unmerge() is called to train on: A and B need their gradients again."
            raise Failed(f"after unmerge() {after:,} numbers can be trained, not {before:,}", hint)
        kept = [p for p in _trained(layer) if p.grad_fn is not None]
        if after > before and kept:
            hint = "What is added to W needs no history: merge under torch.no_grad()."
            raise Failed(f"after {change}() W remembers how it was computed", hint)
        if after > before:
            raise Failed(
                f"after {change}(), {after:,} numbers can be trained, and {before:,} before",
                "A new nn.Parameter is trained unless told otherwise. Write into the weight that "
                "is there, by copy_, or freeze the new one.",
            )
    return f"{before:,} numbers"


REPAIR = Exercise(
    id="lora/bug-hunt",
    reference=lambda linear, rank, alpha: lora.wrap(linear, rank=rank, alpha=alpha),
    untouched="da9421e0",
    properties=(
        Property("merged, the same values", _values),
        Property("merged twice", _twice),
        Property("unmerged, the same bits", _back),
        Property("no work left", _work),
        Property("weights loaded later", _loaded),
        Property("trained in between", _trained_on),
        Property("unmerged without a merge", _not_merged),
        Property("trained as before", _frozen_still),
        Property("twice, and back", _back_from_two),
    ),
    hints=(
        "Call merge() two times. Call merge() and unmerge() in float32 and compare with "
        "torch.equal. Count the products of a merged layer.",
        "Floating-point sums are rounded: (W + Δ) − Δ is not W. What would have to be kept?",
        "merge(): if self.merged: return; keep the old weight. unmerge(): put that back. "
        "forward(): if self.merged, return self.linear(x) at once.",
    ),
)

EXERCISES = (ADAPTER, HELD, REPAIR)
