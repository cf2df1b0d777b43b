"""Right answers to labs 10–13b by somebody who had not read their checks."""

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from wrong_answers import unseen_parallel as ways

from labutils import context_parallel, expert_parallel
from labutils.tensor_parallel import copy_to, gather_from, reduce_from, scatter_to


def _with_hooks(x, up, down, comm):
    x = x * 1
    if x.requires_grad:
        x.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    parts = (t.tensor_split(comm.size)[comm.rank] for t in (up.weight, up.bias))
    y = F.gelu(F.linear(x, *parts)) @ down.weight.tensor_split(comm.size, 1)[comm.rank].mT
    return y + (comm.all_reduce(y.detach()) - y.detach()) + down.bias


def _from_shares(logits, targets, comm):
    """Two numbers per token and rank: the log-sum-exp of its words, and the target's logit."""
    v, own = logits.shape[-1], logits.logsumexp(-1)
    top, place = comm.all_reduce(own.detach(), "max"), targets - comm.rank * v
    mine = (place >= 0) & (place < v)
    picked = logits.gather(-1, place.clamp(0, v - 1)[:, None])[:, 0].where(mine, 0.0)
    total, target = reduce_from(torch.stack([(own - top).exp(), picked]), comm)
    return (total.log() + top - target).mean()


def _one_hot(logits, targets, comm):
    v = logits.shape[-1]
    z = logits - comm.all_reduce(logits.detach().amax(-1, keepdim=True), "max")
    hot = (torch.arange(v) + comm.rank * v == targets[:, None]).to(z.dtype)
    total, target = (reduce_from(x.sum(-1), comm) for x in (z.exp(), z * hot))
    return -(target - total.log()).mean()


def _called_with(x, norm, up, down, comm):
    whole = {name: copy_to(p, comm) for name, p in norm.named_parameters()}
    y = torch.func.functional_call(norm, whole, (x,))
    inner = F.gelu(up(gather_from(y, comm)))
    return x + scatter_to(inner @ down.weight.mT, comm) + copy_to(down.bias, comm)


def _two_buffers(q, k, v, whole, comm, attend):
    n, rank = comm.size, comm.rank
    have = torch.stack([k, v])
    come = torch.empty_like(have)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    for step in range(n):
        works = []
        if step < n - 1:
            works = [comm.irecv(come, (rank - 1) % n), comm.isend(have, (rank + 1) % n)]
        for tile in whole.tiles(rank, (rank - step) % n):
            part = attend(q[:, :, tile.rows], *have[:, :, :, tile.columns], tile.offset)
            rows = tile.rows
            both = ways.flash.merge(out[:, :, rows].clone(), lse[:, :, rows].clone(), *part)
            out[:, :, rows], lse[:, :, rows] = both
        for work in works:
            work.wait()
        have, come = come, have
    return out, lse


class _Library:
    def __init__(self, model, comm):
        self.model, self.comm = context_parallel.distribute(model, comm), comm

    def loss(self, tokens, targets):
        return context_parallel.mean_loss(self.model(tokens), targets, self.comm)


def _in_chunks(x, whole, comm):
    return whole.join(comm.all_to_all(torch.stack(x.chunk(comm.size, 1))).unbind(), 2)


def _message_by_message(x, whole, comm):
    n, rank = comm.size, comm.rank
    mine = [part.contiguous() for part in x.chunk(n, 1)]
    found = {rank: mine[rank]}
    for step in range(1, n):
        sent = comm.isend(mine[(rank + step) % n], (rank + step) % n)
        source = (rank - step) % n
        found[source] = comm.irecv(torch.empty_like(mine[0]), source).wait()
        sent.wait()
    return whole.join([found[each] for each in range(n)], 2)


def _softmax_of_the_chosen(logits, k, score, bias):
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    chosen = (scores.detach() + bias).argsort(-1, descending=True)[:, :k]
    if score == "softmax":
        return chosen, logits.gather(-1, chosen).softmax(-1)
    return chosen, F.normalize(scores.take_along_dim(chosen, -1), p=1, dim=-1)


def _mask(logits, k, score, bias):
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    least = (scores + bias).topk(k, -1).values[:, -1:]
    best = scores + bias >= least
    picked = scores[best].view(-1, k)
    return best.nonzero()[:, 1].view(-1, k), picked / picked.sum(-1, keepdim=True)


def _in_matrices(x, chosen, weights, experts, comm):
    n, each, (T, k) = comm.size, len(experts), chosen.shape
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=n * each)
    came = comm.all_to_all(counts).view(n, each)
    send, recv = counts.view(n, each).sum(1).tolist(), came.sum(1).tolist()
    rows = comm.all_to_all(x[order // k], send, recv)
    by = torch.arange(each).repeat(n).repeat_interleave(came.flatten()).argsort(stable=True)
    groups = rows[by].split(came.sum(0).tolist())
    out, home = torch.empty_like(rows), torch.empty(T * k, x.shape[1], dtype=x.dtype)
    out[by] = torch.cat([expert(group) for expert, group in zip(experts, groups, strict=True)])
    home[order] = comm.all_to_all(out, recv, send)
    return torch.einsum("tkh,tk->th", home.view(T, k, -1), weights)


def _one_by_one(x, chosen, weights, experts, comm):
    n, each = comm.size, len(experts)
    table = enumerate(chosen.tolist())
    visits = sorted((e, t, c) for t, row in table for c, e in enumerate(row))
    counts = [sum(e == expert for e, *_ in visits) for expert in range(n * each)]
    came = comm.all_to_all(torch.tensor(counts)).tolist()
    send, recv = ([sum(c[r * each :][:each]) for r in range(n)] for c in (counts, came))
    rows = torch.stack([x[t] for _, t, _ in visits])
    parts = list(comm.all_to_all(rows, send, recv).split(came))
    for i, part in enumerate(parts):
        parts[i] = experts[i % each](part) if len(part) else part
    y = torch.zeros_like(x)
    for (_, t, c), row in zip(visits, comm.all_to_all(torch.cat(parts), recv, send), strict=True):
        y[t] += weights[t, c] * row
    return y


def _library_step(model, tokens, dp, edp, alpha):
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    expert_parallel.reduce_gradients(model, dp, edp)
    return loss


def _as_it_goes(rank, p, m):
    forward = backward = 0
    while backward < m:
        if forward < m and forward - backward < p - rank:
            yield f"F{forward}"
            forward += 1
        else:
            yield f"B{backward}"
            backward += 1


def _accumulated(ops, nbytes):
    frees = "W" if "W" in {op.kind for op in ops} else "B"
    changes = (nbytes[op.stage] * ((op.kind == "F") - (op.kind == frees)) for op in ops)
    return max(itertools.accumulate(changes))


def _alive(ops, nbytes):
    last = {(op.stage, op.micro_batch): i for i, op in enumerate(ops) if op.kind != "F"}
    alive, most = {}, 0
    for i, op in enumerate(ops):
        key = op.stage, op.micro_batch
        if op.kind == "F":
            alive[key] = nbytes[op.stage]
        elif last[key] == i:
            del alive[key]
        most = max(most, sum(alive.values()))
    return most


def _einsum(weights, inputs, dy):
    owed = []

    def pay(weight, grad, x):
        product = torch.einsum("...o,...i->oi", grad, x)
        weight.grad = product if weight.grad is None else weight.grad.add(product)

    for i in range(len(weights) - 1, -1, -1):
        owed.append(partial(pay, weights[i], dy, inputs[i]))
        dy = torch.matmul(dy, weights[i])
    return dy, lambda: [each() for each in owed] and None


RIGHT = {
    "tensor_parallel/feed-forward": {
        "hooks and tensor_split": _with_hooks,
        "every n-th column": partial(ways.feed_forward, strided=(True, True)),
    },
    "tensor_parallel/cross-entropy": {"sums of shares": _from_shares, "one-hot": _one_hot},
    "tensor_parallel/bug-hunt": {
        "an n-th of the bias each": partial(ways.tokens, bias="shared"),
        "the bias of rank 0": partial(ways.tokens, bias="rank 0"),
        "functional_call": _called_with,
    },
    "context_parallel/ring": {
        "the other way round": partial(ways.ring, way=-1),
        "two buffers": _two_buffers,
    },
    "context_parallel/bug-hunt": {
        "contiguous all over": ways.long(kind="contiguous"),
        "targets counted over ranks": ways.long(mean="counted by all"),
        "the whole loss told": ways.long(mean="told to all"),
        "the library's": _Library,
    },
    "context_parallel/heads": {"chunks": _in_chunks, "message by message": _message_by_message},
    "expert_parallel/route": {
        "a softmax of the chosen": _softmax_of_the_chosen,
        "a mask": _mask,
    },
    "expert_parallel/travel": {
        "calls an expert with no rows": ways.moe,
        "matrices": _in_matrices,
        "one by one": _one_by_one,
    },
    "expert_parallel/bug-hunt": {"by names": ways.step, "the library's": _library_step},
    "pipeline/one-f-one-b": {"as it goes": _as_it_goes},
    "pipeline/peak": {"accumulated": _accumulated, "what is alive": _alive},
    "pipeline/bug-hunt": {"fewer forwards first": partial(ways.interleaved, hops=1)},
    "pipeline/late-weights": {"einsum": _einsum},
    "pipeline/place-w": {"the newest first": partial(ways.place, newest=True)},
}
