"""Right answers to the exercises of `flash`, written differently from the reference."""

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


def _untiled(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **_: int) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen = seen.tril(k.shape[2] - q.shape[2])
    weights = scores.exp() * seen
    total = weights.sum(-1)
    return weights / total.clamp_min(1e-300)[..., None] @ v, total.log()


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


RIGHT = {
    "flash/online-softmax": {
        "NumPy, an array and a float": _numpy,
        "normalized after every block, yielded": _normalized_at_once,
        "one score at a time, a list": _token_by_token,
    },
    "flash/merge": {
        "a softmax of the two lse": _softmax_of_two,
        "a sigmoid of their difference": _difference,
        "stacked, summed by einsum": _einsum,
    },
    "flash/causal-hunt": {
        "all scores at once": _untiled,
        "keys outside, backwards": _keys_outside,
        "one query at a time": _query_by_query,
    },
}
