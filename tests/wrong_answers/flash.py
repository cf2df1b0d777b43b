"""Wrong answers to the exercises of `flash`."""

import functools
import math

import torch
from torch import Tensor

from labutils import flash
from labutils.teach.exercises import flash as exercises
from wrong_answers import Wrong


def _online_with(
    rescale_out: bool = True,
    sign: int = 1,
    shift: bool = True,
    start: float = -1e300,
    base: float = math.e,
) -> exercises.Online:
    """An online softmax with one of the bugs that are about."""

    def attempt(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
        top, total, out = torch.tensor(start if shift else 0.0, dtype=torch.float64), 0.0, 0.0
        for scores, values in blocks:
            new = torch.maximum(top, scores.max()) if shift else top
            factor = (sign * (top - new)).exp() if isinstance(total, Tensor) else 1.0
            weights = (scores - new).exp()
            total = total * (factor if sign > 0 else (top - new).exp()) + weights.sum()
            out = out * (factor if rescale_out else 1.0) + weights @ values
            top = new
        return out / total, (top + total.log()) / math.log(base)

    return attempt


def _own_maximum(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    top, total, out = torch.tensor(-1e300, dtype=torch.float64), 0.0, 0.0
    for scores, values in blocks:
        rescale, weights, top = (
            (top - scores.max()).exp(),
            (scores - scores.max()).exp(),
            scores.max(),
        )
        total, out = total * rescale + weights.sum(), out * rescale + weights @ values
    return out / total, top + total.log()


def _swapped(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    return flash.online(blocks)[::-1]


def _blockwise_mean(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    parts = [(scores.softmax(0) @ values, scores.logsumexp(0)) for scores, values in blocks]
    return torch.stack([out for out, _ in parts]).mean(0), torch.stack(
        [lse for _, lse in parts]
    ).logsumexp(0)


def _collect(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    scores, values = (torch.cat(parts) for parts in zip(*list(blocks), strict=True))
    return scores.softmax(0) @ values, scores.logsumexp(0)


def _without_top(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    blocks = [(scores.clone(), values) for scores, values in blocks]
    out, lse = flash.online(blocks)
    return out, lse - max(scores.max() for scores, _ in blocks)


def _average(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return (o1 + o2) / 2, torch.logaddexp(lse1, lse2)


def _sum(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return o1 + o2, torch.logaddexp(lse1, lse2)


def _logs_added(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return flash.merge(o1, lse1, o2, lse2)[0], lse1 + lse2


def _unshifted(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    w1, w2 = lse1.exp(), lse2.exp()
    return (o1 * w1[..., None] + o2 * w2[..., None]) / (w1 + w2)[..., None], (w1 + w2).log()


def _shares_swapped(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return flash.merge(o1, lse2, o2, lse1)


def _one_maximum(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(lse1, lse2).max()
    out, lse = _unshifted(o1, lse1 - top, o2, lse2 - top)
    return out, lse + top


def _sigmoid(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    share = torch.sigmoid(lse1 - lse2)[..., None]
    return share * o1 + (1 - share) * o2, torch.logaddexp(lse1, lse2)


def _lse_detached(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = flash.merge(o1, lse1, o2, lse2)
    return out, lse.detach()


def _detached(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return flash.merge(o1, lse1.detach(), o2, lse2.detach())


def _only_the_mask_moved(q: Tensor, k: Tensor, v: Tensor, **blocks: int) -> tuple[Tensor, Tensor]:
    # What a loop misses that still stops at the diagonal of the square: whole tiles beyond it.
    s_q, s_k, block_q, block_k = q.shape[2], k.shape[2], blocks["block_q"], blocks["block_k"]
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for top in range(0, s_q, block_q):
        rows = slice(top, min(top + block_q, s_q))
        reached = min(s_k, -(-rows.stop // block_k) * block_k)
        part = flash.plain(
            q[:, :, rows],
            k[:, :, :reached],
            v[:, :, :reached],
            causal=True,
            offset=rows.start + s_k - s_q,
        )
        out[:, :, rows], lse[:, :, rows] = part
    return out, lse


def _wrong_sign(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return flash.plain(q, k, v, causal=True, offset=q.shape[2] - k.shape[2])


def _strict(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return flash.plain(q, k, v, causal=True, offset=k.shape[2] - q.shape[2] - 1)


def _blind_nan(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    out, lse = flash.plain(q, k, v, causal=True)
    return out.masked_fill((lse == -math.inf)[..., None], math.nan), lse


def _always_causal(q: Tensor, k: Tensor, v: Tensor, **_: object) -> tuple[Tensor, Tensor]:
    return flash.plain(q, k, v, causal=True)


def _first_maximum(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """Subtracts the maximum of the first block that has one, for ever."""
    top, total, out = None, 0.0, 0.0
    for scores, values in blocks:
        if top is None and scores.max() > -math.inf:
            top = scores.max()
        weights = (scores - (0.0 if top is None else top)).exp()
        total, out = total + weights.sum(), out + weights @ values
    return out / total, top + total.log()


def _mended_nan(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse1, lse2)
    w1, w2 = ((part - lse).exp().nan_to_num(0.0)[..., None] for part in (lse1, lse2))
    return w1 * o1 + w2 * o2, lse


def _log_of_nothing(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The output's gradient is mended in a row without keys, that of lse is 0 · ∞."""
    top = torch.maximum(lse1, lse2).nan_to_num(neginf=0.0)
    w1, w2 = (lse1 - top).exp(), (lse2 - top).exp()
    share = (w1 / (w1 + w2).clamp_min(1e-30))[..., None]
    out = share * o1 + (w2 / (w1 + w2).clamp_min(1e-30))[..., None] * o2
    return out, top + (w1 + w2).log()


def _in_float32(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    return flash.online([(scores.float(), values.float()) for scores, values in blocks])


def _shares_in_float32(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return flash.merge(o1.float(), lse1.float(), o2.float(), lse2.float())


def _blind_rows_of_tiles(
    q: Tensor, k: Tensor, v: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    """A softmax of a row that is all mask in one tile, and its NaN kept."""
    out, lse = flash.attention(q, k, v, **options)
    if options["causal"] and options["block_q"] > 1:
        out[:, :, 0] = math.nan
    return out, lse


WRONG = {
    "flash/online-softmax": (
        Wrong("in float32", _in_float32, "the maximum comes first", "float32 on the way"),
        Wrong(
            "mean of the blocks' outputs",
            _blockwise_mean,
            "the maximum comes first",
            "divided once",
        ),
        Wrong(
            "the output is not rescaled",
            _online_with(rescale_out=False),
            "a larger maximum comes later",
            "the output so far is not",
        ),
        Wrong(
            "the printed inverse",
            _online_with(sign=-1),
            "a larger maximum comes later",
            "prints its inverse",
        ),
        Wrong(
            "no maximum at all",
            _online_with(shift=False),
            "huge scores",
            "subtract the largest score",
        ),
        Wrong(
            "the maximum of the block alone",
            _own_maximum,
            "huge scores",
            "must not lower the maximum",
        ),
        Wrong(
            "the maximum starts at 0", _online_with(start=0.0), "huge scores", "before the first"
        ),
        Wrong("lse first", _swapped, "the maximum comes first", "comes first"),
        Wrong(
            "starts from −inf",
            _online_with(start=-math.inf),
            "a masked first block",
            "lowest finite number",
        ),
        Wrong("log-sum-exp to base 2", _online_with(base=2), "the log-sum-exp", "base 2"),
        Wrong(
            "log-sum-exp without the maximum", _without_top, "the log-sum-exp", "maximum + log(sum)"
        ),
        Wrong(
            "the first maximum for ever", _first_maximum, "huge scores", "not the largest for ever"
        ),
        Wrong("collects the blocks", _collect, "blocks are forgotten", "the block itself"),
    ),
    "flash/merge": (
        Wrong("in float32", _shares_in_float32, "outputs", "float32 on the way"),
        Wrong("average", _average, "outputs", "do not weigh the same"),
        Wrong("sum", _sum, "outputs", "twice too much"),
        Wrong("adds the logarithms", _logs_added, "log-sum-exp", "not their logarithms"),
        Wrong("each the other's share", _shares_swapped, "outputs", "swapped"),
        Wrong("one maximum for all rows", _one_maximum, "large scores", "Row by row"),
        Wrong("exponentials without a shift", _unshifted, "large scores", "subtract the larger"),
        Wrong("sigmoid of the difference", _sigmoid, "parts without keys", "NaN"),
        Wrong("NaN mended afterwards", _mended_nan, "gradients", "not the gradient"),
        Wrong("log of 0 for lse", _log_of_nothing, "gradients", "no log of 0"),
        Wrong("a detached lse returned", _lse_detached, "gradients", "the one you return"),
        Wrong("detached weights", _detached, "gradients", "lse needs its gradient"),
    ),
    "flash/causal-hunt": (
        Wrong(
            "NaN from a row that one tile masks",
            _blind_rows_of_tiles,
            "as many queries as keys",
            "all mask for one of its rows",
        ),
        Wrong(
            "the code as it stands",
            functools.partial(exercises.buggy_attention),
            "new tokens after a cache",
            "key 0 alone",
        ),
        Wrong(
            "only the mask was moved",
            _only_the_mask_moved,
            "new tokens after a cache",
            "the loop leaves before",
        ),
        Wrong("the offset's sign", _wrong_sign, "new tokens after a cache", "wrong sign"),
        Wrong("a query does not see itself", _strict, "as many queries as keys", "0 … i"),
        Wrong("NaN where no key is seen", _blind_nan, "more queries than keys", "without a NaN"),
        Wrong("causal is not asked", _always_causal, "without a mask", "sees every key"),
    ),
}
