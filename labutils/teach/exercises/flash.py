"""A softmax that is never complete, two halves of the keys, a mask that is right on squares."""

import gc
import math
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from labutils import flash, measure, units
from labutils.teach.exercises import Exercise, Failed, Property

Blocks = Iterable[tuple[Tensor, Tensor]]
Online = Callable[[Blocks], tuple[Tensor, Tensor]]
Merge = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
Attend = Callable[..., tuple[Tensor, Tensor]]


def _noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _far(mine: Tensor, exact: Tensor) -> float:
    """The largest difference; NaN and a missing infinity count as infinitely far."""
    if mine.shape != exact.shape:
        return math.inf
    difference = (mine.double() - exact.double()).abs().masked_fill(mine == exact, 0)
    return difference.nan_to_num(math.inf).max().item()


def _nearly(off: float, hint: str) -> str:
    """The hint, or what is the matter where all but the last digits are right."""
    if off > 1e-5:
        return hint
    return (
        "The first digits are right: a float32 on the way, or a small number added to keep a "
        "division from 0. Compute in the dtype that you are given, and add nothing."
    )


def _pair(found: Any, what: str) -> tuple[Tensor, Tensor]:
    """The two tensors of an answer; arrays, lists of numbers and numbers count as tensors."""
    several = isinstance(found, Iterable) and not isinstance(found, Tensor)
    parts = list(found) if several else [found]
    try:
        out, lse = (x if isinstance(x, Tensor) else torch.as_tensor(np.asarray(x)) for x in parts)
    except (TypeError, ValueError, RuntimeError):
        got = ", ".join(type(part).__name__ for part in parts)
        raise Failed(f"you returned {got}", f"Return two tensors: {what}.") from None
    return out, lse


# Online softmax


def _cut(scores: Tensor, size: int, width: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    values = _noise(len(scores), width, seed=1)
    return zip(scores.split(size), values.split(size), strict=True)


def _online(
    attempt: Online,
    cases: dict[str, tuple[Tensor, int]],
    hint: Callable[[Tensor], str] | str,
    part: int = 0,
    width: int = 3,
) -> str:
    for name, (scores, size) in cases.items():
        found = _pair(
            attempt((s.clone(), v.clone()) for s, v in _cut(scores, size, width)),
            "the output and the log-sum-exp",
        )
        if found[0].dim() < found[1].dim():
            raise Failed(
                f"{name}: your first tensor is a single number",
                "The output, as wide as the values, comes first; the log-sum-exp second.",
            )
        mine = found[part]
        values = _noise(len(scores), width, seed=1)
        exact = (scores.softmax(0) @ values, scores.logsumexp(0))[part]
        if _far(mine, exact) > 1e-9:
            why = hint if isinstance(hint, str) else hint(mine)
            raise Failed(
                f"{name}: you return {mine.tolist()}, it is {exact.tolist()}",
                _nearly(_far(mine, exact), why),
            )
    return f"{len(cases)} case{'s' * (len(cases) > 1)}"


def _first_highest(attempt: Online) -> str:
    cases = {
        "one block": (_noise(5), 5),
        "six scores, falling, in blocks of 2": (_noise(6).sort(descending=True).values, 2),
    }
    return _online(
        attempt,
        cases,
        lambda _: (
            "The output is Σ exp(score)·value over all blocks, divided once by Σ exp(score) "
            "over all blocks."
        ),
    )


def _later_highest(attempt: Online) -> str:
    rising = torch.tensor([0.0, 1.0, 3.0, 4.0], dtype=torch.float64)

    def hint(found: Tensor) -> str:
        values, late = _noise(4, 3, seed=1), (rising[2:] - 4).exp()

        def with_factor(factor: float) -> Tensor:
            return (factor * (rising[:2] - 1).exp() @ values[:2] + late @ values[2:]) / (
                rising - 4
            ).exp().sum()

        if _far(found, with_factor(1)) < 1e-9:
            return (
                "The sum of exponentials is rescaled when a larger maximum comes, the output so "
                "far is not: both are in units of the old maximum."
            )
        if _far(found, with_factor(math.exp(3))) < 1e-9:
            return (
                "The factor for the output is exp(old − new), below 1. "
                "Algorithm 1 of FlashAttention-2 prints its inverse: an erratum."
            )
        return (
            "When a block brings a larger maximum, everything summed so far has to be multiplied "
            "by exp(old maximum − new maximum)."
        )

    return _online(
        attempt,
        {
            "scores 0, 1, then 3, 4": (rising, 2),
            "twelve scores, rising": (_noise(12).sort().values * 3, 3),
        },
        hint,
    )


def _huge(attempt: Online) -> str:
    def case(*scores: float) -> tuple[Tensor, int]:
        return torch.tensor(scores, dtype=torch.float64), 2

    high = {"scores near 1000": (1000 + _noise(6), 2)}
    far = {"1000": 1000, "20 000": 20_000, "200 000": 200_000}
    low = {f"scores near −{told}": (-many + _noise(6), 2) for told, many in far.items()}
    falling = {"scores 1000, 999, then 1, 0": case(1000, 999, 1, 0)}
    rising = {"scores 0, 1, then 1000, 1001": case(0, 1, 1000, 1001)}
    for cases, hint in (
        (
            high,
            "exp(1000) is infinite: subtract the largest score so far before the exponential.",
        ),
        (
            low,
            "What is your maximum before the first block? A start above all scores, such as 0, is "
            "never replaced: begin with the lowest finite number of the scores' dtype.",
        ),
        (
            falling,
            "A block of smaller scores must not lower the maximum: "
            "subtract the largest so far, not the largest of the block.",
        ),
        (
            rising,
            "The first block's maximum is not the largest for ever: "
            "when a larger score comes, subtract that, and rescale what was summed before.",
        ),
    ):
        _online(attempt, cases, hint)
    return "6 cases"


def _blind_start(attempt: Online) -> str:
    scores = torch.cat([torch.full((2,), -math.inf, dtype=torch.float64), _noise(4)])
    hint = (
        "A block that is masked throughout has the maximum −inf, and −inf − (−inf) is NaN: "
        "start from the lowest finite number of the scores' dtype instead."
    )
    hint += " (torch.tensor(x) makes a float32: there the lowest float64 is −inf again.)"
    return _online(attempt, {"the first block is masked": (scores, 2)}, lambda _: hint)


def _lse(attempt: Online) -> str:
    scores = _noise(6) + 2

    def hint(found: Tensor) -> str:
        if _far(found, scores.logsumexp(0) / math.log(2)) < 1e-9:
            return (
                "That is the logarithm to base 2. Kernels compute in base 2 because the hardware "
                "has exp2; what they return is natural."
            )
        return (
            "The sum was taken after subtracting the maximum: log Σ exp(score) "
            "= maximum + log(sum)."
        )

    return _online(attempt, {"six scores in blocks of 2": (scores, 2)}, hint, part=1)


def _many(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """So many blocks of 16 keys."""
    for k in range(count):
        yield _noise(16, seed=k), _noise(16, 3, seed=k)


def _ragged(attempt: Online) -> str:
    """A last block that is shorter, blocks of one key, and values of other widths."""
    hint = (
        "How many keys a block has may change from block to block, and the output is as wide as "
        "the values: take both from what comes."
    )
    cases = {"seven scores in blocks of 3": (_noise(7), 3), "one key at a time": (_noise(3), 1)}
    for name, case in cases.items():
        for width in (5, 1):
            try:
                _online(attempt, {f"{name}, values of {width}": case}, hint, width=width)
            except (IndexError, RuntimeError, ValueError) as error:
                told = f"{name}, values of {width}: {type(error).__name__}: {error!s:.80}"
                raise Failed(told, hint) from None
    return f"{2 * len(cases)} cases"


def _most_in_python(attempt: Online, count: int) -> int:
    """Bytes of lists, numbers and arrays at the fullest moment, with so many blocks."""
    gc.collect()
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        attempt(_many(count))
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        if not tracing:
            tracemalloc.stop()


def _most_held(attempt: Online, count: int) -> int:
    """Bytes of tensors at the fullest moment, with so many blocks."""

    def seen() -> None:
        attempt(_many(count))

    return measure.peak(seen, nn.Module()).total


def _forgets(attempt: Online) -> str:
    few, many = _most_held(attempt, 8), _most_held(attempt, 32)
    if many > few + 128:
        each = (many - few) // 24
        raise Failed(
            f"with 8 blocks you hold {units.text(few)}, with 32 blocks {units.text(many)}",
            f"{each} B of each block stay"
            + (": the block itself. " if each >= 16 * 8 else ", an output or a sum of its own. ")
            + "Keep one maximum, one sum and one output for all: that makes s × s go away.",
        )
    # Thrice: what is made once is no block's.
    fewer, more = (min(_most_in_python(attempt, n) for _ in range(3)) for n in (8, 72))
    each = (more - fewer) // 64
    if each > 100:
        raise Failed(
            f"of each block about {each} B stay, in lists, numbers or arrays",
            "What is no tensor takes memory as well. Keep one maximum, one sum and one output for "
            "all: that makes s × s go away.",
        )
    return f"{units.text(few)}, with 8 blocks and with 32"


ONLINE = Exercise(
    id="flash/online-softmax",
    reference=flash.online,
    properties=(
        Property("the maximum comes first", _first_highest),
        Property("a larger maximum comes later", _later_highest),
        Property("huge scores", _huge),
        Property("a masked first block", _blind_start),
        Property("the log-sum-exp", _lse),
        Property("blocks of any size", _ragged),
        Property("blocks are forgotten", _forgets),
    ),
    hints=(
        "Three things are enough to remember: the largest score so far, the sum of exp(score − "
        "largest), and the sum of exp(score − largest)·value.",
        "When the largest score changes from m to m', each exp(score − m) you have summed becomes "
        "exp(score − m') by one factor: exp(m − m').",
        "Start with m = torch.finfo(dtype).min in that dtype, sum 0, output 0. "
        "In the end return output / sum and m + log(sum).",
    ),
)


# Merge


def _halves(s_k: int = 6, first: int = 3, size: float = 1.0) -> tuple[Tensor, ...]:
    q, k, v = size * _noise(1, 2, 4, 5), _noise(1, 2, s_k, 5, seed=1), _noise(1, 2, s_k, 5, seed=2)
    parts = [
        flash.plain(q, k[:, :, at], v[:, :, at]) for at in (slice(0, first), slice(first, s_k))
    ]
    return *parts[0], *parts[1], *flash.plain(q, k, v)


def _merged(
    attempt: Merge, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    own = (x.clone() for x in (o1, lse1, o2, lse2))  # it may write into what it gets
    return _pair(attempt(*own), "the merged output and the merged log-sum-exp")


def _outputs(attempt: Merge) -> str:
    flat = "halves, without batch and heads"
    for name, sizes in {"halves": (6, 3), "1 key and 7 keys": (8, 1), flat: (6, 3)}.items():
        parts = _halves(*sizes)
        if name == flat:
            parts = tuple(x.flatten(0, 2) for x in parts)
        o1, lse1, o2, lse2, exact, _ = parts
        try:
            out, _ = _merged(attempt, o1, lse1, o2, lse2)
        except (IndexError, RuntimeError, ValueError) as error:
            if name != flat:
                raise
            hint = "Outputs are (…, d) and lse (…), with any number of dims: lse[..., None] fits."
            raise Failed(f"{name}: {type(error).__name__}: {error!s:.60}", hint) from None
        if _far(out, exact) > 1e-9:
            if _far(out, (o1 + o2) / 2) < 1e-9:
                hint = (
                    "The two outputs do not weigh the same: a part whose scores are larger has "
                    "the larger share of the softmax."
                )
            elif _far(out, flash.merge(o1, lse2, o2, lse1)[0]) < 1e-9:
                hint = "The shares are swapped: the part with the larger lse has the larger one."
            elif _far(out, o1 + o2) < 1e-9:
                hint = (
                    "Each output is normalized over its own keys, so each is a mean already; "
                    "the sum of two means is twice too much."
                )
            else:
                hint = (
                    "Each part's share of the whole is exp(its lse) / (exp(lse1) + exp(lse2)), "
                    "row by row."
                )
            off = _far(out, exact)
            raise Failed(f"{name}: off by {off:.3g}", _nearly(off, hint))
    return "3 cases"


def _merged_lse(attempt: Merge) -> str:
    *parts, _, exact = _halves()
    _, lse = _merged(attempt, *parts)
    if _far(lse, exact) > 1e-9:
        raise Failed(
            f"lse is off by {_far(lse, exact):.3g}",
            "The sums of exponentials add, not their logarithms: log(exp(lse1) + exp(lse2)).",
        )
    return "4 rows, 2 heads"


def _large(attempt: Merge) -> str:
    o1, lse1, o2, lse2, exact, whole = _halves()
    for more, hint in (
        (1000, "exp(1000) is infinite: subtract the larger of the two lse first."),
        (-(10**5), "A low lse is a number like any other: only −inf means that no key was seen."),
    ):
        out, lse = _merged(attempt, o1, lse1 + more, o2, lse2 + more)
        if max(_far(out, exact), _far(lse, whole + more)) > 1e-9:
            raise Failed(
                f"with both lse {abs(more):,} {'larger' if more > 0 else 'smaller'} the output is "
                "no longer the same",
                hint,
            )
    apart = 1000 * torch.arange(
        4.0, dtype=torch.float64
    )  # rows of different size, parts of the same
    out, lse = _merged(attempt, o1, lse1 + apart, o2, lse2 + apart)
    if max(_far(out, exact), _far(lse, whole + apart)) > 1e-9:
        raise Failed(
            "with rows whose lse lie 1000 apart the output is no longer the same",
            "Row by row: what is largest over all rows turns a smaller row into 0/0.",
        )
    return "lse near 1000 and −100,000, and rows 1000 apart"


def _nothing(attempt: Merge) -> str:
    o1, lse1, *_ = _halves()
    blank, nowhere = torch.zeros_like(o1), torch.full_like(lse1, -math.inf)
    for name, parts, exact in (
        ("the second part", (o1, lse1, blank, nowhere), (o1, lse1)),
        ("the first part", (blank, nowhere, o1, lse1), (o1, lse1)),
        ("both parts", (blank, nowhere) * 2, (blank, nowhere)),
    ):
        found = _merged(attempt, *parts)
        if any(_far(mine, right) > 1e-9 for mine, right in zip(found, exact, strict=True)):
            raise Failed(
                f"{name} saw no key (out 0, lse −inf): you return "
                f"{found[0].flatten()[0].item():.3g} and {found[1].flatten()[0].item():.3g}",
                "A causal mask can leave a part without keys. −inf − (−inf) is NaN, 0/0 too: "
                "the answer of two empty parts is 0 and −inf.",
            )
    return "one empty part, two empty parts"


def _gradient(attempt: Merge) -> str:
    q, k, v = _noise(1, 1, 3, 4), _noise(1, 1, 6, 4, seed=1), _noise(1, 1, 6, 4, seed=2)
    for leaf in (q, k, v):
        leaf.requires_grad_()
    weights = _noise(1, 1, 3, 4, seed=3)
    # Three parts, as on a ring of three: what the first merge returns goes into the second.
    parts = [flash.attention(q, k[:, :, i : i + 2], v[:, :, i : i + 2]) for i in (0, 2, 4)]
    out, _ = _merged(attempt, *_merged(attempt, *parts[0], *parts[1]), *parts[2])
    mine = torch.autograd.grad((out * weights).sum(), (q, k, v), allow_unused=True)
    exact = torch.autograd.grad((flash.plain(q, k, v)[0] * weights).sum(), (q, k, v))
    if any(g is None or _far(g, e) > 1e-9 for g, e in zip(mine, exact, strict=True)):
        raise Failed(
            "three parts, merged in a row: the gradients of q, k and v are wrong",
            "The weights depend on lse, so lse needs its gradient, the one you return as well: no "
            "detach() on what remains in the result.",
        )
    o1, lse1, o2, lse2, *_ = (x.detach().clone() for x in _halves())
    for out, lse in ((o1, lse1), (o2, lse2)):  # a row that neither part sees
        out[:, :, 0], lse[:, :, 0] = 0.0, -math.inf
    leaves = [x.requires_grad_() for x in (o1, lse1, o2, lse2)]
    out, lse = _merged(attempt, *leaves)
    found = torch.autograd.grad(out.sum() + lse.exp().sum(), leaves, allow_unused=True)
    if any(g is None or not g.isfinite().all() for g in found):
        raise Failed(
            "in a row that no part sees the gradients are not finite",
            "Replacing NaN in the result mends the value, not the gradient: keep −inf − (−inf) "
            "from being computed, by subtracting a finite number there, and take no log of 0.",
        )
    _gradient_of_one_part(attempt)
    return "q, k and v, and rows that one part sees, or none"


def _gradient_of_one_part(attempt: Merge) -> None:
    o1, lse1, o2, lse2, *_ = (x.detach().clone() for x in _halves())
    o1[:, :, 0], lse1[:, :, 0] = 0.0, -math.inf  # each part has a row that it does not see
    o2[:, :, 1], lse2[:, :, 1] = 0.0, -math.inf
    lse1[:, :, 2] += 1000
    leaves = [x.requires_grad_() for x in (o1, lse1, o2, lse2)]
    weights = _noise(*o1.shape, seed=3)

    def back(merge: Merge) -> tuple[Tensor, ...]:
        out, lse = _merged(merge, *leaves)
        total = (out * weights).sum() + lse.sum()
        return torch.autograd.grad(total, leaves, allow_unused=True)

    for mine, exact in zip(back(attempt), back(flash.merge), strict=True):
        if mine is not None and _far(mine, exact) <= 1e-9:
            continue
        case = "in rows that one part alone sees, or whose lse lie 1000 apart"
        if mine is not None and not mine.isfinite().all():
            raise Failed(
                f"{case}, gradients are not finite",
                "Also what torch.where leaves out has a gradient, and 0 · ∞ is NaN: no exponential "
                "may overflow, in no branch. Subtract the larger lse from both.",
            )
        raise Failed(
            f"{case}, gradients are wrong",
            "There one part has all of the gradient, of its output and of its lse, and the other "
            "one has none.",
        )


MERGE = Exercise(
    id="flash/merge",
    reference=flash.merge,
    properties=(
        Property("outputs", _outputs),
        Property("log-sum-exp", _merged_lse),
        Property("large scores", _large),
        Property("parts without keys", _nothing),
        Property("gradients", _gradient),
    ),
    hints=(
        "lse says how much a part weighs: exp(lse) is the denominator that its output was divided "
        "by.",
        "Undo both divisions, add, divide by the sum of both denominators. "
        "Subtract the larger lse from both before the exponential.",
        "Where both lse are −inf, subtract some finite number instead, and divide by 1 instead of "
        "0.",
    ),
)


# Bug hunt: the mask


def buggy_attention(q, k, v, *, causal, block_q, block_k):
    """Tiled causal attention (b, a, s, d) → (out, lse), with a bug that no square can show."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for top in range(0, q.shape[2], block_q):
        rows = torch.arange(top, min(top + block_q, q.shape[2]))
        state = None
        for left in range(0, k.shape[2], block_k):
            columns = torch.arange(left, min(left + block_k, k.shape[2]))
            if causal and columns[0] > rows[-1]:
                break
            scores = q[:, :, rows] @ k[:, :, columns].mT * q.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(columns > rows[:, None], -math.inf)
            part = scores.softmax(-1) @ v[:, :, columns], scores.logsumexp(-1)
            part = part[0].nan_to_num(0), part[1]
            state = part if state is None else flash.merge(*state, *part)
        if state is not None:
            out[:, :, rows], lse[:, :, rows] = state
    return out, lse


def _attends(
    attempt: Attend,
    shapes: dict[str, tuple[int, int]],
    hint: Callable[[Tensor, Tensor, int, int], str],
    causal: bool = True,
) -> str:
    for name, (s_q, s_k) in shapes.items():
        q, k, v = _noise(2, 2, s_q, 4), _noise(2, 2, s_k, 4, seed=1), _noise(2, 2, s_k, 4, seed=2)
        out, lse = _pair(
            attempt(q.clone(), k.clone(), v.clone(), causal=causal, block_q=3, block_k=2),
            "the output and the log-sum-exp",
        )
        exact, exact_lse = flash.plain(q, k, v, causal=causal)
        if max(_far(out, exact), _far(lse, exact_lse)) > 1e-9:
            if max(_far(out[:1], exact[:1]), _far(lse[:1], exact_lse[:1])) <= 1e-9:
                raise Failed(
                    f"{name}, 2 sequences: the first is right, the second is not",
                    "A batch has several sequences: do for each sequence what you do for that one.",
                )
            rows = [
                i
                for i in range(s_q)
                if _far(out[:, :, i], exact[:, :, i]) > 1e-9
                or _far(lse[:, :, i], exact_lse[:, :, i]) > 1e-9
            ]
            raise Failed(
                f"{name}: {s_q} quer{'y' if s_q == 1 else 'ies'}, {s_k} keys: "
                f"wrong in {'query' if len(rows) == 1 else 'queries'} {', '.join(map(str, rows))}",
                hint(lse, exact_lse, s_q, s_k),
            )
    return ", ".join(shapes)


def _keys_seen(lse: Tensor, s_q: int, s_k: int) -> Callable[[int], bool]:
    """Whether each row saw exactly the keys up to i + offset, for an offset asked about."""
    q, k, v = _noise(2, 2, s_q, 4), _noise(2, 2, s_k, 4, seed=1), _noise(2, 2, s_k, 4, seed=2)
    return lambda offset: _far(lse, flash.plain(q, k, v, causal=True, offset=offset)[1]) < 1e-9


def _squares(attempt: Attend) -> str:
    def hint(lse: Tensor, exact: Tensor, s_q: int, s_k: int) -> str:
        if lse.isnan().any() or _far(lse, exact) < 1e-9:
            return (
                "The log-sum-exp is right where it is a number: a tile can be all mask for one of "
                "its rows, and a softmax of −inf alone is NaN. Such a row gets 0 from that tile."
            )
        return "As many queries as keys: query i sees keys 0 … i, and no other."

    return _attends(attempt, {"even": (6, 6), "ragged": (7, 7)}, hint)


def _cache(attempt: Attend) -> str:
    def hint(lse: Tensor, exact: Tensor, s_q: int, s_k: int) -> str:
        seen = _keys_seen(lse, s_q, s_k)
        if seen(0):
            return (
                "The new token saw key 0 alone: its row number is 0, but it stands at the end of "
                "the cache. The last query sees the last key."
            )
        if seen(s_q - s_k):
            return (
                "The offset has the wrong sign: it is s_k − s_q, the number of keys that came "
                "before the first query."
            )
        if (lse <= exact + 1e-12).all():
            return (
                "The mask is right and keys are missing: the loop leaves before it has reached "
                "them. Its test needs the same offset as the mask."
            )
        return (
            "Queries are the last s_q positions of a sequence of s_k: "
            "query i stands at position i + s_k − s_q."
        )

    return _attends(
        attempt, {"one new token": (1, 8), "three new tokens": (3, 8), "five": (5, 9)}, hint
    )


def _more_queries(attempt: Attend) -> str:
    def hint(lse: Tensor, exact: Tensor, s_q: int, s_k: int) -> str:
        return (
            "The first queries come before every key: their output is 0 and their lse −inf, "
            "without a NaN on the way."
        )

    shapes = {"three see no key": (8, 5), "two see no key": (7, 5), "one sees no key": (6, 5)}
    return _attends(attempt, shapes, hint)


def _unmasked(attempt: Attend) -> str:
    shapes = {"causal=False": (5, 7), "causal=False again": (7, 5)}
    said = "With causal=False every query sees every key: no mask, and no way out of the loop."
    return _attends(attempt, shapes, lambda *_: said, causal=False)


class _Largest(TorchDispatchMode):
    """The numbers of the largest tensor that an operation makes, views left out."""

    numel = 0

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = fn(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage()._cdata not in given:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.itemsize)
        return result


def _tiles(attempt: Attend) -> str:
    """Scores exist a tile at a time, and tiles above the diagonal are not computed."""
    q, k, v = _noise(1, 2, 6, 2), _noise(1, 2, 160, 2, seed=1), _noise(1, 2, 160, 2, seed=2)
    with _Largest() as largest:
        attempt(q, k, v, causal=True, block_q=3, block_k=2)
    if largest.numel > k.numel():
        raise Failed(
            f"6 queries, 160 keys, 2 heads: a tensor of {largest.numel:,} numbers, where a tile "
            "of 3 queries and 2 keys has 12 scores",
            "The results are right, and the scores exist again. Repair the mask inside the two "
            "loops: one tile of block_q × block_k is there at a time.",
        )
    q, k, v = (_noise(1, 1, 12, 4, seed=i) for i in range(3))
    tile, touched = 2 * 2 * 3 * 2 * 4, 2 + 3 + 5 + 6
    flops = flash.product_flops(lambda: attempt(q, k, v, causal=True, block_q=3, block_k=2))
    if flops > touched * tile:
        raise Failed(
            f"12 queries, 12 keys, causal: products of {flops / tile:g} tiles, "
            f"{touched} of the 24 have a key that some query may see",
            "A tile above the diagonal is all mask: leave the loop before it is computed.",
        )
    return f"one tile at a time, {touched} of 24 tiles"


HUNT = Exercise(
    id="flash/causal-hunt",
    untouched="87d88437",
    reference=flash.attention,
    properties=(
        Property("as many queries as keys", _squares),
        Property("new tokens after a cache", _cache),
        Property("more queries than keys", _more_queries),
        Property("without a mask", _unmasked),
        Property("still in tiles", _tiles),
    ),
    hints=(
        "Every test of the author had as many queries as keys. What is the position of the first "
        "query if there are 8 keys and 1 query?",
        "Two lines compare a column with a row. Both compare positions, and a row's position is "
        "not its number.",
        "offset = s_k − s_q; mask columns > rows + offset, and leave the loop when columns[0] > "
        "rows[-1] + offset.",
    ),
)

EXERCISES = (ONLINE, MERGE, HUNT)
