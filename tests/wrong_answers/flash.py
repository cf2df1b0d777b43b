"""Wrong answers to the exercises of `flash`."""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from labutils import flash
from labutils.teach.exercises import flash as exercises
from wrong_answers import Wrong

LOWEST = torch.finfo(torch.float64).min


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


def _sum_not_rescaled(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """The output is converted, and the sum is not."""
    top, total, out = torch.tensor(-1e300, dtype=torch.float64), 0.0, 0.0
    for scores, values in blocks:
        new = torch.maximum(top, scores.max())
        weights = (scores - new).exp()
        total, out = total + weights.sum(), out * (top - new).exp() + weights @ values
        top = new
    return out / total, top + total.log()


def _divided_twice(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """After each block, and at the end."""
    top, total, out = torch.tensor(-1e300, dtype=torch.float64), 0.0, 0.0
    for scores, values in blocks:
        new = torch.maximum(top, scores.max())
        weights, factor = (scores - new).exp(), (top - new).exp()
        total = total * factor + weights.sum()
        out = (out * factor + weights @ values) / total
        top = new
    return out / total, top + total.log()


def _of_the_last_block(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """lse with the maximum of the last block."""
    seen = []
    out, lse = flash.online((seen.append(scores.max()) or scores, v) for scores, v in blocks)
    return out, lse - max(seen) + seen[-1]


def _sum_itself(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    out, lse = flash.online(blocks)
    return out, lse.exp()


def _never_zero(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """A small number is added to what the output is divided by."""
    top, total, out = torch.tensor(-1e300, dtype=torch.float64), 0.0, 0.0
    for scores, values in blocks:
        new = torch.maximum(top, scores.max())
        weights, factor = (scores - new).exp(), (top - new).exp()
        total, out = total * factor + weights.sum(), out * factor + weights @ values
        top = new
    return out / (total + 1e-8), top + total.log()


def _keeps_scores(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """Values are forgotten, scores are kept for the end."""
    out, lse, kept = None, None, []
    for scores, values in blocks:
        kept.append(scores)
        part = scores.softmax(0).nan_to_num(0) @ values, scores.logsumexp(0)
        out, lse = part if out is None else flash.merge(out, lse, *part)
    return out, torch.cat(kept).logsumexp(0)


def _shares_of_lse(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    share = (lse1 / (lse1 + lse2))[..., None]
    return share * o1 + (1 - share) * o2, torch.logaddexp(lse1, lse2)


def _mean_of_lse(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return flash.merge(o1, lse1, o2, lse2)[0], (lse1 + lse2) / 2


def _over_rows(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """A softmax over the queries."""
    shares = torch.stack([lse1, lse2]).softmax(-1)[..., None]
    return shares[0] * o1 + shares[1] * o2, torch.logaddexp(lse1, lse2)


def _guarded(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """A small number keeps the division from 0."""
    top = torch.maximum(lse1, lse2).nan_to_num(neginf=0.0)
    w1, w2 = (lse1 - top).exp()[..., None], (lse2 - top).exp()[..., None]
    return (w1 * o1 + w2 * o2) / (w1 + w2 + 1e-8), torch.logaddexp(lse1, lse2)


def _lowest(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Finite in a row without keys: the lowest number, and not −∞."""
    lowest = torch.finfo(lse1.dtype).min
    out, lse = flash.merge(o1, lse1, o2, lse2)
    return out, lse.clamp_min(lowest)


def _clamped(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Takes every lse below −10,000 for −10,000."""
    nowhere = torch.maximum(lse1, lse2) == -math.inf
    out, lse = flash.merge(o1, lse1.clamp_min(-1e4), o2, lse2.clamp_min(-1e4))
    return out.masked_fill(nowhere[..., None], 0), lse.masked_fill(nowhere, -math.inf)


def _of_the_first(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """A row counts where the first part sees it."""
    seen = lse1 > -math.inf
    out, lse = flash.merge(o1, lse1, o2, lse2)
    return out.masked_fill(~seen[..., None], 0), lse.masked_fill(~seen, -math.inf)


def _blocks_before_the_keys(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """Nothing for a block of queries whose first one comes before every key."""
    out, lse = flash.attention(q, k, v, causal=causal, block_q=block_q, block_k=block_k)
    blind = -(-max(0, q.shape[2] - k.shape[2]) // block_q) * block_q * causal
    out[:, :, :blind], lse[:, :, :blind] = 0, -math.inf
    return out, lse


def _heads_needed(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of the two lse, in the places of (b, a, s)."""
    shares = torch.stack([lse1, lse2]).sub(torch.maximum(lse1, lse2)).softmax(0)
    return (
        torch.einsum("pbas,pbasd->basd", shares, torch.stack([o1, o2])),
        torch.logaddexp(lse1, lse2),
    )


def _at_once(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: int) -> tuple[Tensor, Tensor]:
    return flash.plain(q, k, v, causal=causal)


def _all_tiles(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, block_q: int, block_k: int
) -> tuple[Tensor, Tensor]:
    """No way out of the loop: tiles of mask alone are computed and add nothing."""
    outs, before = [], k.shape[2] - q.shape[2]
    for top in range(0, q.shape[2], block_q):
        rows, state = q[:, :, top : top + block_q], None
        for left in range(0, k.shape[2], block_k):
            at = slice(left, left + block_k)
            mask = dict(causal=True, offset=before + top - left) if causal else {}
            part = flash.plain(rows, k[:, :, at], v[:, :, at], **mask)
            state = part if state is None else flash.merge(*state, *part)
        outs.append(state)
    return tuple(torch.cat(parts, 2) for parts in zip(*outs, strict=True))


def _offset_at_least_0(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """Queries that come before every key see the first one."""
    if options["causal"]:
        return flash.plain(q, k, v, causal=True, offset=max(0, k.shape[2] - q.shape[2]))
    return flash.plain(q, k, v)


def _last_row_alone(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """A special case for one query, which sees everything."""
    if q.shape[2] == 1:
        return flash.plain(q, k, v)
    return exercises.buggy_attention(q, k, v, **options)


def _one_too_far(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    if options["causal"]:
        return flash.plain(q, k, v, causal=True, offset=k.shape[2] - q.shape[2] + 1)
    return flash.plain(q, k, v)


def _arrays(blocks: exercises.Blocks) -> tuple[np.ndarray, float]:
    """Collects what the blocks hold, copied into arrays."""
    scores, values = zip(*((s.numpy().copy(), v.numpy().copy()) for s, v in blocks), strict=True)
    scores, values = np.concatenate(scores), np.concatenate(values)
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum(), scores.max() + np.log(weights.sum())


def _a_state_for_each_place(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """A maximum and a sum for the first key of every block, for the second, …: put together last."""
    top = total = out = None
    for scores, values in blocks:
        if top is None:
            top, total = torch.full_like(scores, LOWEST), torch.zeros_like(scores)
            out = torch.zeros_like(values)
        new = torch.maximum(top, scores)
        total = total * (top - new).exp() + (scores - new).exp()
        out = out * (top - new).exp()[:, None] + (scores - new).exp()[:, None] * values
        top = new
    factor = (top - top.max()).exp()
    return factor @ out / (factor @ total), top.max() + (factor @ total).log()


def _three_wide(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """The values of the first tests were three wide."""
    top = torch.tensor(LOWEST, dtype=torch.float64)
    total, out = torch.zeros((), dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for scores, values in blocks:
        new = torch.maximum(top, scores.max())
        factor, weights = (top - new).exp(), (scores - new).exp()
        total, out, top = total * factor + weights.sum(), out * factor + weights @ values, new
    return out / total, top + total.log()


def _numbers_of_each(blocks: exercises.Blocks) -> tuple[list[float], float]:
    """A maximum, a sum and an output for each block, as numbers, put together in the end."""
    parts = []
    for scores, values in blocks:
        top = max(scores.max().item(), -1e300)
        weights = (scores - top).exp()
        parts.append((top, weights.sum().item(), (weights @ values).tolist()))
    top = max(part[0] for part in parts)
    total = sum(math.exp(at - top) * each for at, each, _ in parts)
    width = range(len(parts[0][2]))
    out = [sum(math.exp(at - top) * o[i] for at, _, o in parts) / total for i in width]
    return out, top + math.log(total)


def _two_branches(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """torch.where takes the branch that does not overflow; the other one has a gradient."""
    dead = torch.isneginf(lse1) & torch.isneginf(lse2)
    a, b = lse1.masked_fill(dead, 0), lse2.masked_fill(dead, 0)
    lse = torch.where(a > b, a + (b - a).exp().log1p(), b + (a - b).exp().log1p())
    out = (a - lse).exp()[..., None] * o1 + (b - lse).exp()[..., None] * o2
    return out, lse.masked_fill(dead, -math.inf)


def _first_sequence(q, k, v, *, causal, block_q, block_k):
    """One sequence of the batch."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    how = dict(causal=causal, block_q=block_q, block_k=block_k)
    for head in range(q.shape[1]):
        one = (slice(0, 1), slice(head, head + 1))
        out[one], lse[one] = flash.attention(q[one], k[one], v[one], **how)
    return out, lse


def _no_key_for_the_first(q, k, v, *, causal, block_q, block_k):
    """Queries that come before every key are left out, with a mask or without."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    at = slice(max(0, q.shape[2] - k.shape[2]), None)
    out[:, :, at], lse[:, :, at] = flash.attention(
        q[:, :, at], k, v, causal=causal, block_q=block_q, block_k=block_k
    )
    return out, lse


WRONG = {
    "flash/online-softmax": (
        Wrong("a state for each place", _a_state_for_each_place, "blocks of any size", "may change"),
        Wrong("three wide", _three_wide, "blocks of any size", "as wide as the values"),
        Wrong("copies in arrays", _arrays, "blocks are forgotten", "What is no tensor"),
        Wrong("numbers of each block", _numbers_of_each, "blocks are forgotten", "no tensor"),
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
        Wrong("starts at −100 000", _online_with(start=-1e5), "huge scores", "never replaced"),
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
        Wrong("the sum is not rescaled", _sum_not_rescaled, "a larger maximum comes later", "so far"),
        Wrong("divided twice", _divided_twice, "the maximum comes first", "divided once"),
        Wrong("the last block's maximum", _of_the_last_block, "the log-sum-exp", "maximum + log"),
        Wrong("the sum and not its log", _sum_itself, "the log-sum-exp", "maximum + log"),
        Wrong("a small number added", _never_zero, "the maximum comes first", "add nothing"),
        Wrong("keeps the scores", _keeps_scores, "blocks are forgotten", "the block itself"),
    ),
    "flash/merge": (
        Wrong("two branches", _two_branches, "gradients", "in no branch"),
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
        Wrong("shares of lse", _shares_of_lse, "outputs", "exp(its lse)"),
        Wrong("the mean of both lse", _mean_of_lse, "log-sum-exp", "not their logarithms"),
        Wrong("a softmax over queries", _over_rows, "outputs", "row by row"),
        Wrong("lse below −10,000 clamped", _clamped, "large scores", "a number like any other"),
        Wrong("batch and heads needed", _heads_needed, "outputs", "any number of dims"),
        Wrong("rows of the first part", _of_the_first, "parts without keys", "0 and −inf"),
        Wrong("a guarded division", _guarded, "outputs", "add nothing"),
        Wrong("the lowest number", _lowest, "parts without keys", "0 and −inf"),
    ),
    "flash/causal-hunt": (
        Wrong("one sequence", _first_sequence, "as many queries as keys", "each sequence"),
        Wrong("no key for the first", _no_key_for_the_first, "without a mask", "sees every key"),
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
        Wrong("all scores at once", _at_once, "still in tiles", "the scores exist again"),
        Wrong("tiles of mask", _all_tiles, "still in tiles", "leave the loop"),
        Wrong(
            "no block that begins before the keys",
            _blocks_before_the_keys,
            "more queries than keys",
            "before every key",
        ),
        Wrong("no offset below 0", _offset_at_least_0, "more queries than keys", "before every key"),
        Wrong("one query is special", _last_row_alone, "new tokens after a cache", "key 0 alone"),
        Wrong("one key too far", _one_too_far, "as many queries as keys", "0 … i"),
    ),
}
