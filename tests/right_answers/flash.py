"""Right answers to the exercises of `flash`, written differently from the reference."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from labutils import flash
from labutils.teach.exercises import flash as exercises

LOWEST = torch.finfo(torch.float64).min


def _numpy(blocks: exercises.Blocks) -> tuple[np.ndarray, float]:
    top, total, out = -1e300, 0.0, 0.0
    for scores, values in blocks:
        scores, values = scores.numpy(), values.numpy()
        new = max(top, scores.max())
        weights = np.exp(scores - new)
        total = total * np.exp(top - new) + weights.sum()
        out = out * np.exp(top - new) + weights @ values
        top = new
    return out / total, float(top + np.log(total))


def _normalized_at_once(blocks: exercises.Blocks) -> Iterator[Tensor]:
    """A mean so far and its log-sum-exp: divided after every block, not once at the end."""
    lse, out = torch.tensor(LOWEST, dtype=torch.float64), 0.0
    for scores, values in blocks:
        new = torch.logaddexp(lse, scores.logsumexp(0)).clamp_min(LOWEST)
        out = out * (lse - new).exp() + (scores - new).exp() @ values
        lse = new
    yield out
    yield lse


def _token_by_token(blocks: exercises.Blocks) -> list[Tensor]:
    state = None
    for scores, values in blocks:
        for score, value in zip(scores, values, strict=True):
            if score > -math.inf:
                state = (value, score) if state is None else flash.merge(*state, value, score)
    return list(state)


def _in_the_blocks(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """Scores become weights where they stand."""
    top = total = out = None
    for scores, values in blocks:
        if top is None:
            top, total = scores.new_tensor(LOWEST), scores.new_zeros(())
            out = values.new_zeros(values.shape[1:])
        new = max(top, scores.max())
        weights, factor = scores.sub_(new).exp_(), (top - new).exp()
        total, out, top = total * factor + weights.sum(), torch.addmv(out * factor, values.T, weights), new
    return out.div_(total), total.log_().add_(top)


def _in_place(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The first output becomes the whole one."""
    top = torch.maximum(lse1, lse2)
    top = top.masked_fill(top == -math.inf, 0.0)
    first, second = (lse1 - top).exp(), (lse2 - top).exp()
    total = first + second
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    o1.mul_((first / total)[..., None]).add_(o2 * (second / total)[..., None])
    return o1, (top + total.log()).masked_fill(blind, -math.inf)


class _Merge(torch.autograd.Function):
    """Forward and backward by hand."""

    @staticmethod
    def forward(ctx, o1, lse1, o2, lse2):
        lse = torch.logaddexp(lse1, lse2)
        known = lse.masked_fill(lse == -math.inf, 0)
        a, b = (lse1 - known).exp(), (lse2 - known).exp()
        out = a[..., None] * o1 + b[..., None] * o2
        ctx.save_for_backward(o1, o2, out, a, b)
        return out, lse

    @staticmethod
    def backward(ctx, of_out, of_lse):
        o1, o2, out, a, b = ctx.saved_tensors
        first, second = (
            share * (of_lse + (of_out * (o - out)).sum(-1)) for share, o in ((a, o1), (b, o2))
        )
        return a[..., None] * of_out, first, b[..., None] * of_out, second


def _softmax_of_two(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([lse1, lse2])
    blind = (both == -math.inf).all(0)
    both = both.masked_fill(blind, 0)
    shares = both.softmax(0).masked_fill(blind, 0)
    out = (shares[..., None] * torch.stack([o1, o2])).sum(0)
    return out, both.logsumexp(0).masked_fill(blind, -math.inf)


def _difference(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> list[Tensor]:
    """One sigmoid, where there is a difference."""
    blind = (lse1 == -math.inf) & (lse2 == -math.inf)
    first, second = (lse.masked_fill(blind, 0) for lse in (lse1, lse2))
    share = torch.sigmoid(first - second)[..., None]
    out = share * o1 + (1 - share) * o2
    lse = torch.logaddexp(first, second)
    return [out.masked_fill(blind[..., None], 0), lse.masked_fill(blind, -math.inf)]


def _einsum(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> Iterator[Tensor]:
    both = torch.stack([lse1, lse2], -1)
    top = both.detach().amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    parts = (both - top).exp()
    total = parts.sum(-1)
    safe = torch.where(total > 0, total, 1.0)
    yield torch.einsum("...p,p...d->...d", parts / safe[..., None], torch.stack([o1, o2]))
    yield torch.where(total > 0, safe.log() + top[..., 0], -math.inf)


def _keys_outside(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, block_q: int, block_k: int
) -> list[Tensor]:
    """The first paper's order, from the last block of keys to the first."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    before = k.shape[2] - q.shape[2]
    for left in reversed(range(0, k.shape[2], block_k)):
        keys, values = k[:, :, left : left + block_k], v[:, :, left : left + block_k]
        for top in range(0, q.shape[2], block_q):
            rows = slice(top, top + block_q)
            if causal and left > min(top + block_q, q.shape[2]) - 1 + before:
                continue
            mask = dict(causal=True, offset=before + top - left) if causal else {}
            part = flash.plain(q[:, :, rows], keys, values, **mask)
            out[:, :, rows], lse[:, :, rows] = flash.merge(out[:, :, rows], lse[:, :, rows], *part)
    return [out, lse]


def _query_by_query(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, block_q: int, block_k: int
) -> tuple[Tensor, ...]:
    results = []
    for i in range(q.shape[2]):
        stop = max(0, i + 1 + k.shape[2] - q.shape[2]) if causal else k.shape[2]
        results.append(flash.attention(q[:, :, i : i + 1], k[:, :, :stop], v[:, :, :stop]))
    return tuple(torch.cat(parts, 2) for parts in zip(*results, strict=True))


def _by_lse(blocks):
    """Normalized outputs, merged two at a time by their log-sum-exp."""
    out = lse = None
    for scores, values in blocks:
        new = scores.logsumexp(0)
        mine = scores.softmax(0).nan_to_num(0) @ values
        if out is None:
            out, lse = mine, new
            continue
        both = torch.logaddexp(lse, new)
        share = (lse - both).exp().nan_to_num(0)
        out, lse = share * out + (new - both).exp().nan_to_num(0) * mine, both
    return out, lse


def _log_of_sums(o1, lse1, o2, lse2):
    """Undoes both divisions, in units of the larger lse, a finite one."""
    unit = torch.maximum(lse1, lse2).detach()
    unit = torch.where(unit.isfinite(), unit, torch.zeros_like(unit))
    first, second = (lse1 - unit).exp(), (lse2 - unit).exp()
    total = first + second
    some = torch.where(total > 0, total, torch.ones_like(total))
    out = (first[..., None] * o1 + second[..., None] * o2) / some[..., None]
    return out, torch.where(total > 0, some.log() + unit, torch.full_like(unit, -math.inf))


def _as_far_as_seen(q, k, v, *, causal, block_q, block_k):
    """No way out of the loop: it ends at the last key that the block's last query sees."""
    at = k.shape[2] - q.shape[2]
    outs, sums = [], []
    for top in range(0, q.shape[2], block_q):
        rows = q[:, :, top : top + block_q]
        end = min(k.shape[2], top + rows.shape[2] + at) if causal else k.shape[2]
        out = torch.zeros_like(rows)
        lse = torch.full_like(rows[..., 0], -math.inf)
        for left in range(0, max(0, end), block_k):
            scores = torch.einsum("basd,batd->bast", rows, k[:, :, left : left + block_k])
            scores = scores / math.sqrt(q.shape[-1])
            if causal:
                place = torch.arange(top, top + rows.shape[2])[:, None] + at
                scores[..., torch.arange(left, left + scores.shape[-1]) > place] = -math.inf
            part = scores.softmax(-1).nan_to_num(0) @ v[:, :, left : left + block_k]
            out, lse = _log_of_sums(out, lse, part, scores.logsumexp(-1))
        outs.append(out)
        sums.append(lse)
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _keys_cut_off(q, k, v, *, causal, block_q, block_k):
    """Each block of queries gets the keys up to its last one, and the library's corner."""
    parts = []
    for rows in torch.arange(q.shape[2]).split(block_q):
        stop = int(rows[-1]) + 1 + k.shape[2] - q.shape[2] if causal else k.shape[2]
        mine, keys, values = q[:, :, rows], k[:, :, : max(0, stop)], v[:, :, : max(0, stop)]
        if stop <= 0:
            parts.append((torch.zeros_like(mine), torch.full_like(mine[..., 0], -math.inf)))
            continue
        blocks = dict(block_q=block_q, block_k=block_k)
        if len(rows) > stop:  # the first rows see nothing
            blind = len(rows) - stop
            seen = flash.attention(mine[:, :, blind:], keys, values, causal=True, **blocks)
            out, lse = torch.zeros_like(mine), torch.full_like(mine[..., 0], -math.inf)
            out[:, :, blind:], lse[:, :, blind:] = seen
            parts.append((out, lse))
            continue
        parts.append(flash.attention(mine, keys, values, causal=causal, **blocks))
    out, lse = zip(*parts, strict=True)
    return torch.cat(out, 2), torch.cat(lse, 2)


def _one_more_key(blocks: exercises.Blocks) -> tuple[Tensor, Tensor]:
    """What was seen is one more key of the next block: its score the lse, its value the output."""
    out = lse = None
    for scores, values in blocks:
        if out is not None:
            scores, values = torch.cat([lse[None], scores]), torch.cat([out[None], values])
        lse = scores.logsumexp(0)
        out = (scores - lse.clamp_min(LOWEST)).exp() @ values
    return out, lse


def _numbers(blocks: exercises.Blocks) -> tuple[list[float], float]:
    """Python's floats, score by score; what is −∞ is left out."""
    top, total, out = None, 0.0, None
    for scores, values in blocks:
        for score, value in zip(scores.tolist(), values.tolist(), strict=True):
            if score == -math.inf:
                continue
            if top is None or score > top:
                factor = 0.0 if top is None else math.exp(top - score)
                total, top = factor * total, score
                out = [factor * each for each in out or [0.0] * len(value)]
            weight = math.exp(score - top)
            total += weight
            out = [each + weight * x for each, x in zip(out, value, strict=True)]
    return [each / total for each in out], top + math.log(total)


def _one_table(blocks: exercises.Blocks) -> Tensor:
    """A column of ones beside the values: the sum is the output's last number."""
    top = torch.tensor(LOWEST, dtype=torch.float64)
    both = 0.0
    for scores, values in blocks:
        old, top = top, torch.stack([top, scores.amax()]).amax()
        ones = torch.cat([values, torch.ones_like(values[:, :1])], 1)
        both = torch.exp(old - top) * both + torch.exp(scores - top) @ ones
    return both[:-1] / both[-1], both[-1].log() + top


def _by_logsigmoid(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """lse1 − logsigmoid(lse1 − lse2), with numbers in place of −∞ where both are."""
    blind = torch.isneginf(lse1) & torch.isneginf(lse2)
    a, b = torch.where(blind, 0.0, lse1), torch.where(blind, 0.0, lse2)
    larger = a >= b
    high, low = torch.where(larger, a, b), torch.where(larger, b, a)
    lse = high - torch.nn.functional.logsigmoid(high - low)
    weights = ((part - lse).exp()[..., None] for part in (a, b))
    out = sum(weight * o for weight, o in zip(weights, (o1, o2), strict=True))
    return torch.where(blind[..., None], 0.0, out), torch.where(blind, -math.inf, lse)


def _as_two_keys(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Two keys of one row: their scores the lse, their values the outputs."""
    scores = torch.stack((lse1, lse2), dim=-1).unsqueeze(-2)
    top = scores.amax(-1, keepdim=True)
    top = top.masked_fill(top.isinf(), 0)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    seen = total != 0
    total = total.masked_fill(~seen, 1)
    out = (weights / total) @ torch.stack((o1, o2), dim=-2)
    lse = (total.log() + top).masked_fill(~seen, -math.inf)
    return out.squeeze(-2), lse[..., 0, 0]


def _seen_rows(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Only rows that a part sees are computed at all."""
    seen = (lse1 > -math.inf) | (lse2 > -math.inf)
    lse, out = torch.full_like(lse1, -math.inf), torch.zeros_like(o1)
    both = torch.logaddexp(lse1[seen], lse2[seen])
    first, second = ((part[seen] - both).exp().unsqueeze(1) for part in (lse1, lse2))
    out = out.index_put((seen,), first * o1[seen] + second * o2[seen])
    return out, lse.index_put((seen,), both)


def _from_the_end(q, k, v, *, causal, block_q, block_k):
    """Positions are counted from the last key, which the last query sees."""
    outs, sums, s_q, s_k = [], [], q.shape[2], k.shape[2]
    for top in range(0, s_q, block_q):
        rows = torch.arange(top, min(top + block_q, s_q)) - s_q  # −1 is the last
        state = torch.zeros_like(q[:, :, rows]), torch.full_like(q[:, :, rows, 0], -math.inf)
        for left in range(0, s_k, block_k):
            columns = torch.arange(left, min(left + block_k, s_k)) - s_k
            if causal and int(columns.min()) > int(rows.max()):
                continue
            scores = (q[:, :, rows] @ k[:, :, columns].mT) / q.shape[-1] ** 0.5
            if causal:
                scores = scores.where(columns <= rows[:, None], -math.inf)
            top_score = scores.amax(-1, keepdim=True).clamp_min(LOWEST)
            weights = (scores - top_score).exp()
            total = weights.sum(-1, keepdim=True)
            part = weights @ v[:, :, columns] / total.where(total > 0, 1.0)
            state = flash.merge(*state, part, (total.log() + top_score)[..., 0])
        outs.append(state[0])
        sums.append(state[1])
    return torch.cat(outs, 2), torch.cat(sums, 2)


def _heads_in_turn(q, k, v, *, causal, block_q, block_k):
    """A head of a sequence at a time, and the online softmax of the lab in each row of tiles."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    before = k.shape[2] - q.shape[2]
    for one in itertools.product(range(q.shape[0]), range(q.shape[1])):
        for top in range(0, q.shape[2], block_q):
            at = torch.arange(top, min(top + block_q, q.shape[2]))
            last = int(at[-1]) + before if causal else k.shape[2] - 1
            m, total, sums = torch.full((len(at), 1), LOWEST, dtype=q.dtype), 0.0, 0.0
            for left in range(0, last + 1, block_k):
                keys = torch.arange(left, min(left + block_k, k.shape[2]))
                S = q[one][at] @ k[one][keys].T / math.sqrt(q.shape[3])
                if causal:
                    S = S.masked_fill(keys[None] > at[:, None] + before, -math.inf)
                old, m = m, torch.maximum(m, S.amax(1, keepdim=True))
                P, factor = (S - m).exp(), (old - m).exp()
                total, sums = factor * total + P.sum(1, keepdim=True), factor * sums + P @ v[one][keys]
            if last < 0:
                continue
            some = total > 0
            out[one][at] = torch.where(some, sums / total.where(some, 1.0), 0.0)
            lse[one][at] = torch.where(some, m + total.log(), -math.inf)[:, 0]
    return out, lse


def _padded(q, k, v, *, causal, block_q, block_k):
    """Queries in front of the first, so that the picture is a square again; they are thrown away."""
    more = k.shape[2] - q.shape[2] if causal else 0
    blocks = dict(block_q=block_q, block_k=block_k)
    if more <= 0:
        return flash.attention(q, k, v, causal=causal, **blocks)
    square = torch.cat([torch.zeros_like(k[:, :, :more, :]), q], 2)
    out, lse = flash.attention(square, k, v, causal=True, **blocks)
    return out[:, :, more:], lse[:, :, more:]


RIGHT = {
    "flash/online-softmax": {
        "weights in place of scores": _in_the_blocks,
        "outputs merged by their lse": _by_lse,
        "NumPy, an array and a float": _numpy,
        "normalized after every block, yielded": _normalized_at_once,
        "one score at a time, a list": _token_by_token,
        "one more key": _one_more_key,
        "Python's floats": _numbers,
        "a column of ones": _one_table,
    },
    "flash/merge": {
        "a Function of its own": _Merge.apply,
        "in place": _in_place,
        "a finite unit": _log_of_sums,
        "a softmax of the two lse": _softmax_of_two,
        "a sigmoid of their difference": _difference,
        "stacked, summed by einsum": _einsum,
        "a logsigmoid": _by_logsigmoid,
        "two keys": _as_two_keys,
        "rows that are seen": _seen_rows,
    },
    "flash/causal-hunt": {
        "keys cut off": _keys_cut_off,
        "a loop that ends in time": _as_far_as_seen,
        "keys outside, backwards": _keys_outside,
        "one query at a time": _query_by_query,
        "from the end": _from_the_end,
        "heads in turn": _heads_in_turn,
        "padded": _padded,
    },
}
