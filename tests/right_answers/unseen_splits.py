"""Right answers to labs 10, 13a, 13b and 15a by another hand that had not written them."""

from collections import deque
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from wrong_answers import unseen_splits as ways

from labutils.tensor_parallel import copy_to, reduce_from

# ── 10 ───────────────────────────────────────────────────────────────────────────────────────────


def _data_replaced(x, up, down, comm):
    """A hook of a view of x; the part keeps its history and gets the sum's numbers."""
    n, i = comm.size, comm.rank
    x = x.view_as(x)
    if x.requires_grad:
        x.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    inner = F.gelu(F.linear(x, up.weight.chunk(n)[i], up.bias.chunk(n)[i]))
    part = F.linear(inner, down.weight.chunk(n, 1)[i])
    part.data = comm.all_reduce(part.data)
    return part + down.bias


def _views(x, up, down, comm):
    """Weights with a dim of ranks, and einsum."""
    n, i = comm.size, comm.rank
    w1, b1 = up.weight.view(n, -1, up.in_features)[i], up.bias.view(n, -1)[i]
    inner = F.gelu(torch.einsum("bsh,fh->bsf", copy_to(x, comm), w1) + b1)
    w2 = down.weight.view(down.out_features, n, -1)[:, i]
    return reduce_from(torch.einsum("bsf,hf->bsh", inner, w2), comm) + down.bias


def _own_slot(logits, targets, comm):
    """Log-sum-exps and target's logits are gathered; a rank's own have their history."""
    v, i = logits.shape[-1], comm.rank
    place = targets - i * v
    mine = (place >= 0) & (place < v)
    hit = logits.gather(-1, place.clamp(0, v - 1)[:, None])[:, 0].where(mine, 0.0)
    own = torch.stack([logits.logsumexp(-1), hit])
    table = comm.all_gather(own.detach()[None].contiguous())
    rows = [own if rank == i else table[rank] for rank in range(comm.size)]
    parts, hits = torch.stack(rows).unbind(1)
    return (parts.logsumexp(0) - hits.sum(0)).mean()


def _modulo(logits, targets, comm):
    """The target's place is its remainder, its rank the quotient."""
    rank, place = targets // logits.shape[-1], targets % logits.shape[-1]
    z = logits - comm.all_reduce(logits.detach().amax(-1), "max")[:, None]
    target = z.gather(-1, place[:, None])[:, 0] * (rank == comm.rank)
    return (reduce_from(z.exp().sum(-1), comm).log() - reduce_from(target, comm)).mean()


# ── 13a ──────────────────────────────────────────────────────────────────────────────────────────


def _backward_then_forward(rank, p, m):
    """p − i forwards; then each backward lets one more in."""
    yield from (("F", k) for k in range(min(p - rank, m)))
    for k in range(m):
        yield "B", k
        if k + p - rank < m:
            yield "F", k + p - rank


def _one_line(rank, p, m):
    return " ".join(ways.order(rank, p, m))


def _counted_again(ops, nbytes):
    """At each place the forwards before it, less what has let go."""
    last = max({op.kind for op in ops} - {"F"})  # "W" where there is one

    def held(place):
        kinds = [(op.kind, op.stage) for op in ops[:place]]
        return sum(nbytes[at] * (("F" == kind) - (kind == last)) for kind, at in kinds)

    return max(map(held, range(1, len(ops) + 1)))


def _with_numpy(ops, nbytes):
    sign = {"F": 1, "W": -1, "B": 0 if any(op.kind == "W" for op in ops) else -1}
    return np.cumsum([sign[op.kind] * nbytes[op.stage] for op in ops]).max()


def _two_queues(rank, p, m, chunks):
    """Forwards run while fewer than the warm-up are ahead, by deques of jobs."""
    places = [(c, r + k) for r in range(0, m, p) for c in range(chunks) for k in range(p)]
    ahead = deque(f"F{k}@{rank + c * p}" for c, k in places)
    back = deque(f"B{k}@{rank + (chunks - 1 - c) * p}" for c, k in places)
    for _ in range(min(2 * (p - 1 - rank) + (chunks - 1) * p, len(places))):
        yield ahead.popleft()
    while back:
        if ahead:
            yield ahead.popleft()
        yield back.popleft()


# ── 13b ──────────────────────────────────────────────────────────────────────────────────────────


def _defaults(weights, inputs, dy):
    """What a function reads is bound when it is made."""
    owed = []
    for x, weight in zip(inputs[::-1], weights[::-1], strict=True):

        def pay(weight=weight, grad=dy, x=x):
            product = grad.mT @ x
            weight.grad = product if weight.grad is None else weight.grad + product

        owed.append(pay)
        dy = dy @ weight
    return dy, lambda: [pay() for pay in owed]


def _gradients_listed(weights, inputs, dy):
    """B keeps the gradient of each output; W goes from the first layer to the last."""
    outs = [dy]
    for weight in reversed(weights):
        outs.append(outs[-1].matmul(weight))

    def w():
        for i, (weight, x) in enumerate(zip(weights, inputs, strict=True)):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad += outs[len(weights) - 1 - i].mT.matmul(x)

    return outs[-1], w


def _counted(rank, p, m):
    """Counts of F, B and W: what is held decides."""
    done = {"F": 0, "B": 0, "W": 0}
    while done["W"] < m:
        forward = done["F"] < m and done["F"] - done["B"] < p - rank
        late = done["B"] - done["W"] > rank or done["B"] == m
        kind = "W" if late else "F" if forward else "B"
        yield f"{kind}{done[kind]}"
        done[kind] += 1


# ── 15a ──────────────────────────────────────────────────────────────────────────────────────────


def _reduceat(w, bits, group):
    """NumPy, without padding."""
    w, top = w.numpy(), (1 << (bits - 1)) - 1
    most = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[1], group), axis=1)
    scales = np.where(most > 0, most, top) / top
    each = np.repeat(scales, group, axis=1)[:, : w.shape[1]]
    return np.rint(w / each).astype(np.int8), scales


def _lists(w, bits, group):
    top, codes, scales = 2 ** (bits - 1) - 1, [], []
    for row in w.tolist():
        parts = [row[at : at + group] for at in range(0, len(row), group)]
        scales.append([max(map(abs, part)) / top or 1.0 for part in parts])
        pairs = zip(parts, scales[-1], strict=True)
        codes.append([round(x / scale) for part, scale in pairs for x in part])
    return codes, scales


def _a_small_number_added(x, w, limit):
    w_scale = w.abs().amax(1, keepdim=True) / 127 + 1e-12
    codes = (x * 127 / limit).round().clamp(-128, 127).clamp(min=-127)
    return (codes @ (w / w_scale).round().mT) * (limit / 127) * w_scale.mT


def _cholesky(w, H, scales):
    """Rows of the inverse's Cholesky factor, as GPTQ has them."""
    factor, y = torch.linalg.cholesky(torch.linalg.inv(H), upper=True), w.clone()
    for j in range(w.shape[1]):
        error = y[:, j] - (y[:, j] / scales[:, 0]).round().clamp(-7, 7) * scales[:, 0]
        y[:, j:] -= torch.outer(error / factor[j, j], factor[j, j:])
    return y


def _least_squares(w, H, scales):
    """The best places of what is free, solved for anew after each column."""
    y = w.clone()
    for j in range(w.shape[1]):
        rounded = (y[:, j] / scales[:, 0]).round().clamp(-7, 7) * scales[:, 0]
        moved, free = rounded - y[:, j], slice(j + 1, None)
        y[:, free] -= torch.outer(moved, torch.linalg.solve(H[free, free], H[free, j]))
        y[:, j] = rounded
    return y


RIGHT = {
    "tensor_parallel/feed-forward": {
        "data replaced": _data_replaced,
        "views of the weights": _views,
        "f and g as functions": ways.feed_forward,
    },
    "tensor_parallel/cross-entropy": {
        "its own slot": _own_slot,
        "quotient and remainder": _modulo,
        "the largest added again": ways.loss,
        "sums, divided": partial(ways.loss, over=lambda targets: targets.numel()),
    },
    "tensor_parallel/bug-hunt": {"functions": ways.tokens},
    "pipeline/one-f-one-b": {
        "a backward, then a forward": _backward_then_forward,
        "one line": _one_line,
        "pairs": partial(ways.order, name=lambda *op: op),
    },
    "pipeline/peak": {
        "counted again": _counted_again,
        "NumPy": _with_numpy,
        "fractions": partial(ways.peak, w_frees=1),
    },
    "pipeline/bug-hunt": {
        "two queues": _two_queues,
        "a list": partial(ways.interleaved, way=list),
        "one hop fewer": partial(ways.interleaved, hops=1),
    },
    "pipeline/late-weights": {
        "defaults": _defaults,
        "gradients listed": _gradients_listed,
        "tuples": ways.late,
    },
    "pipeline/place-w": {
        "counted": _counted,
        "a queue": ways.place,
        "the newest W first": partial(ways.place, newest=True),
    },
    "quantization/groups": {"reduceat": _reduceat, "lists": _lists, "split": ways.groups},
    "quantization/bug-hunt": {
        "int32": ways.integers,
        "whole numbers in fp64": partial(ways.integers, sums=torch.float64),
        "a small number added": _a_small_number_added,
    },
    "quantization/feedback": {
        "Cholesky": _cholesky,
        "least squares": _least_squares,
        "a loop": ways.feedback,
    },
}
