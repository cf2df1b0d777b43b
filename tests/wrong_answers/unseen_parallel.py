"""Wrong answers to labs 10–13b by somebody who had not read their checks."""

import math
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

from labutils import context_parallel, expert_parallel, flash
from labutils.tensor_parallel import copy_to, gather_from, reduce_from, scatter_to
from wrong_answers import Wrong

# ── 10 ───────────────────────────────────────────────────────────────────────────────────────────


class Both(torch.autograd.Function):
    """A function forward, another one backward."""

    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_ = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_(grad), None, None


def summed(comm, share=1.0):
    return lambda x: comm.all_reduce(x.contiguous()) * share


def same(x):
    return x.clone()


def feed_forward(x, up, down, comm, *, f=None, g=None, strided=(False, False), detach=False,
                 gelu=F.gelu, told=None):  # fmt: skip
    """f: the way back of f; told: what f does forward; strided: how `up` and `down` are cut."""
    n, rank, width = comm.size, comm.rank, torch.arange(len(up.weight))
    mine, theirs = (width[rank::n] if each else width.tensor_split(n)[rank] for each in strided)
    parts = up.weight[mine], up.bias[mine], down.weight[:, theirs]
    if detach:
        parts = [nn.Parameter(part.detach()) for part in parts]
    x = Both.apply(x, told(comm) if told else same, (f or summed)(comm))
    y = gelu(F.linear(x, *parts[:2])) @ parts[2].mT
    return Both.apply(y, summed(comm), g(comm) if g else same) + down.bias


def _whole_down(x, up, down, comm):
    """The inner activation is gathered, and every rank computes all of the second product."""
    n, rank = comm.size, comm.rank
    x = Both.apply(x, same, summed(comm))
    inner = F.gelu(F.linear(x, up.weight.chunk(n)[rank], up.bias.chunk(n)[rank]))

    def gathered(t):
        return comm.all_gather(t.movedim(-1, 0).contiguous()).movedim(0, -1)

    return down(Both.apply(inner, gathered, lambda grad: grad.chunk(n, -1)[rank]))


def loss(logits, targets, comm, *, top="token", outside="mask", reduce=reduce_from, share=1.0):
    v = logits.shape[-1]
    own = {"token": lambda z: comm.all_reduce(z.amax(-1), "max"), "rank": lambda z: z.amax(-1),
           "all": lambda z: comm.all_reduce(z.amax().reshape(1), "max").expand(len(z))}  # fmt: skip
    z = logits - own[top](logits.detach())[:, None]
    place = targets - comm.rank * v
    mine = (place >= 0) & (place < v) if outside != "from 1" else (place > 0) & (place < v)
    picked = z.gather(-1, place.clamp(0, v - 1)[:, None])[:, 0]
    picked = picked if outside == "nothing" else picked * mine
    return (reduce(z.exp().sum(-1), comm).log() - reduce(picked, comm)).mean() * share


def _cut_off(x, comm):
    return comm.all_reduce(x.detach()) + 0 * x


def _summed_twice(x, comm):
    return Both.apply(x, summed(comm), summed(comm))


def _every_word(logits, targets, comm):
    """Right, and a number of each word travels besides."""
    return loss(logits, targets, comm) + 0 * reduce_from(logits / 1e4, comm).sum()


def tokens(x, norm, up, down, comm, *, sums=("weight", "bias", "last"), average=False, sliced=False,
           normed=False, gather=gather_from, bias="after"):  # fmt: skip
    n, rank = comm.size, comm.rank

    def own(name, parameter):
        if name not in sums:
            return parameter
        one = Both.apply(parameter, same, summed(comm, 1 / n))
        return one if average else copy_to(parameter, comm)

    weight, shift = own("weight", norm.weight), own("bias", norm.bias)
    y = F.layer_norm(x, norm.normalized_shape, weight, shift, norm.eps)
    inner = F.gelu(F.linear(gather(copy_to(y, comm) if normed else y, comm),
                            up.weight, own("up", up.bias)))  # fmt: skip
    part, last = F.linear(inner, down.weight), own("last", down.bias)
    before = {"shared": last / n, "rank 0": last * (rank == 0), "after": 0}[bias]
    if sliced:
        s = x.shape[1]
        return x + reduce_from(part, comm)[:, rank * s :][:, :s] + last
    return x + scatter_to(part + before, comm) + (last if bias == "after" else 0)


def _gathered_by_hand(y, comm):
    s = y.shape[1]

    def gathered(t):
        return comm.all_gather(t.transpose(0, 1).contiguous()).transpose(0, 1)

    return Both.apply(y, gathered, lambda grad: grad[:, comm.rank * s :][:, :s])


# ── 11 ───────────────────────────────────────────────────────────────────────────────────────────


def ring(q, k, v, whole, comm, attend, *, way=1, holder=-1, early=(), hops=None,
         merge=flash.merge, lse=-math.inf, once=False):  # fmt: skip
    """early: which of keys and values are waited for before the tiles; once: a chunk of keys."""
    n, rank, kv = comm.size, comm.rank, [k, v]
    out, found = torch.zeros_like(q), torch.full(q.shape[:-1], lse, dtype=q.dtype)
    for step in range(hops(n) if hops else n):
        last, come = step == n - 1, {}
        if not last:
            sent = [comm.isend(x.contiguous(), (rank + way) % n) for x in kv]
            works = [comm.irecv(torch.empty_like(x), (rank - way) % n) for x in kv]
            come = {i: works[i].wait() for i in early}
        for tile in whole.tiles(rank, (rank + holder * way * step) % n):
            rows, columns = tile.rows, slice(0, whole.chunk) if once else tile.columns
            keys = (x[:, :, columns] for x in kv)
            part = attend(q[:, :, rows], *keys, tile.offset)
            so_far = out[:, :, rows].clone(), found[:, :, rows].clone()
            out[:, :, rows], found[:, :, rows] = merge(*so_far, *part)
        if not last:
            kv = [come[i] if i in come else work.wait() for i, work in enumerate(works)]
            [work.wait() for work in sent]
    return out, found


def _asks_everybody(q, k, v, whole, comm, attend):
    """In step t from the rank t before, directly: the same bytes, over links that are no ring."""
    n, rank = comm.size, comm.rank
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    for step in range(n):
        keys = k, v
        if step:
            sent = [comm.isend(x.contiguous(), (rank + step) % n) for x in keys]
            works = [comm.irecv(torch.empty_like(x), (rank - step) % n) for x in keys]
            keys = [work.wait() for work in works]
            [work.wait() for work in sent]
        for tile in whole.tiles(rank, (rank - step) % n):
            rows, cut = tile.rows, (x[:, :, tile.columns] for x in keys)
            part = attend(q[:, :, rows], *cut, tile.offset)
            so_far = out[:, :, rows].clone(), lse[:, :, rows].clone()
            out[:, :, rows], lse[:, :, rows] = flash.merge(*so_far, *part)
    return out, lse


def long(places="whole", mean="n", kind="zigzag", ring=None):
    """A class like the lab's; `mean` says what its loss is divided by."""

    class LongContext:
        def __init__(self, model, comm):
            self.model, self.comm = model, comm
            for block in model.blocks:
                block.attention.attend = self.attend

        def attend(self, q, k, v, dropout):
            return context_parallel.ring_attention(q, k, v, self.comm, ring or kind)

        def loss(self, tokens, targets):
            n, rank, s = self.comm.size, self.comm.rank, tokens.shape[1]
            whole = context_parallel.layout(s, n, kind)
            at = {"whole": whole.positions(rank), "own": range(s // n),
                  "contiguous": range(rank * s // n, (rank + 1) * s // n)}[places]  # fmt: skip
            for each in (self.model, *(block.attention.rotary for block in self.model.blocks)):
                each.places_ = lambda _: at
            mine, right = (whole.split(x, rank) for x in (tokens, targets))
            logits, right = self.model(mine).flatten(0, 1), right.flatten()
            total, all_ = F.cross_entropy(logits, right, reduction="sum"), (targets != -100).sum()
            each = F.cross_entropy(logits, right, reduction="none").view(len(targets), -1).sum(1)
            return {
                "n": lambda: total / all_ * n,
                "all": lambda: total / all_,
                "tokens": lambda: total / targets.numel() * n,
                "sequences": lambda: (each / (targets != -100).sum(1).clamp(min=1)).mean() * n,
                "counted by all": lambda: total * n / self.comm.all_reduce(
                    (right != -100).sum().reshape(1).double())[0],
                "told": lambda: self.comm.all_reduce((total / all_).detach().reshape(1))[0]
                + (total - total.detach()) / all_,
                "told to all": lambda: self.comm.all_reduce((total / all_).detach().reshape(1))[0]
                + (total - total.detach()) / all_ * n,
            }[mean]()  # fmt: skip

    return LongContext


def _heads(x, whole, comm, strided=False, join=True, moved=True):
    n, (b, a, s, d) = comm.size, x.shape
    cut = x.view(b, a // n, n, s, d).movedim(2, 0) if strided else x.unflatten(1, (n, -1))
    rows = cut if strided else cut.movedim(1, 0) if moved else x.reshape(n, b, a // n, s, d)
    got = comm.all_to_all(rows.contiguous())
    return whole.join(list(got), 2) if join else torch.cat(list(got), 2)


def _all_heads(x, whole, comm):
    got = comm.all_gather(x[None].contiguous())
    return whole.join(list(got), 2).chunk(comm.size, 1)[comm.rank]


def _told_in_turn(x, whole, comm):
    parts = [comm.broadcast(x.clone(), rank).chunk(comm.size, 1) for rank in range(comm.size)]
    return whole.join([part[comm.rank] for part in parts], 2)


# ── 12 ───────────────────────────────────────────────────────────────────────────────────────────


def choose(logits, k, score, bias, *, key=None, weigh=None):
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    chosen = (key(scores, logits, bias) if key else scores + bias).topk(k, -1).indices
    if weigh:
        return chosen, weigh(scores, chosen, bias, k)
    picked = scores.gather(-1, chosen)
    return chosen, picked / picked.sum(-1, keepdim=True)


def _over_all_tokens(scores, chosen, bias, k):
    picked = scores.gather(-1, chosen)
    return picked / picked.sum()


def _unless_one(scores, chosen, bias, k):
    picked = scores.gather(-1, chosen)
    return picked / picked.sum(-1, keepdim=True) if k > 1 else picked


def _of_constant_sum(scores, chosen, bias, k):
    picked = scores.gather(-1, chosen)
    return picked / picked.sum(-1, keepdim=True).detach()


def moe(x, chosen, weights, experts, comm, *, by_rank=False, computes="own", sent_back=False,
        residual=False, weigh=True):  # fmt: skip
    n, each, k = comm.size, len(experts), chosen.shape[1]
    flat, token = chosen.flatten(), torch.arange(len(x)).repeat_interleave(k)
    order = (flat // each if by_rank else flat).argsort(stable=True)
    counts = torch.bincount(flat, minlength=n * each)
    came = comm.all_to_all(counts)
    send, recv = (c.view(n, each).sum(1).tolist() for c in (counts, came))
    rows = comm.all_to_all(x[token[order]], send, send if sent_back else recv)
    which = torch.arange(each).repeat(n).repeat_interleave(came)
    out = torch.zeros_like(rows)
    for i, expert in enumerate(experts):
        here = which == i
        if computes == "all":
            out = torch.where(here[:, None], expert(rows), out)
        elif computes == "first":
            out[here] = experts[0](rows[here])
        else:
            out[here] = expert(rows[here])
    back = comm.all_to_all(out, recv, send)
    back = back * weights.flatten()[order][:, None] if weigh else back
    return (x if residual else torch.zeros_like(x)).index_add(0, token[order], back)


def _padded(x, chosen, weights, experts, comm):
    """Every expert gets as many rows from every rank as the busiest."""
    n, each, k = comm.size, len(experts), chosen.shape[1]
    token = torch.arange(len(x)).repeat_interleave(k)
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=n * each)
    most = int(comm.all_reduce(counts.max().reshape(1), "max"))
    rows = x.new_zeros(n * each, most, x.shape[1])
    for i, group in enumerate(x[token[order]].split(counts.tolist())):
        rows[i, : len(group)] = group
    came = comm.all_to_all(rows).view(n, each, most, -1)
    out = [expert(came[:, i].flatten(0, 1)).view(n, most, -1) for i, expert in enumerate(experts)]
    back = comm.all_to_all(torch.stack(out, 1).flatten(0, 1).contiguous())
    rows = torch.cat([back[i, :count] for i, count in enumerate(counts.tolist())])
    weighed = rows * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, token[order], weighed)


def _divided_again(x, chosen, weights, experts, comm):
    return moe(x, chosen, weights / weights.sum(-1, keepdim=True), experts, comm)


def _layers_but_routers(model, tokens, dp, edp, alpha):
    loss = model.loss(tokens, tokens) + alpha * expert_parallel.auxiliary_loss(model)
    loss.backward()
    for name, parameter in model.named_parameters():
        comm = edp if "feed_forward." in name and "router" not in name else dp
        parameter.grad = comm.all_reduce(parameter.grad) / comm.size
    return loss


def step(model, tokens, dp, edp, alpha, *, probable=lambda p: p.mean(0), layers=slice(None),
         experts="edp", by="edp", leaves_out=()):  # fmt: skip
    total = model.loss(tokens, tokens)
    for block in list(model.blocks)[layers]:
        routing = block.feed_forward.routing
        share = routing.load / routing.load.sum()
        total = total + alpha * len(share) * (share * probable(routing.probabilities)).sum()
    total.backward()
    spread = expert_parallel.expert_parameters(model)
    for name, parameter in model.named_parameters():
        if parameter.grad is None or any(word in name for word in leaves_out):
            continue
        comm = edp if name in spread and experts == "edp" else dp
        size = 1 if name in spread and by == "nothing" else (dp if by == "dp" else comm).size
        parameter.grad = comm.all_reduce(parameter.grad) / size
    return total


# ── 13 ───────────────────────────────────────────────────────────────────────────────────────────


def order(rank, p, m, warm=lambda rank, p: p - rank - 1):
    first = min(warm(rank, p), m)
    turns = [op for k in range(first, m) for op in (f"F{k}", f"B{k - first}")]
    return [f"F{k}" for k in range(first)] + turns + [f"B{k}" for k in range(m - first, m)]


def _rounds(rank, p, m):
    rounds = [range(at, min(at + p, m)) for at in range(0, m, p)]
    return [f"{kind}{k}" for each in rounds for kind in "FB" for k in each]


def _last_in_first_out(rank, p, m):
    found = order(rank, p, m)
    end = len(found) - min(p - rank - 1, m)
    return found[:end] + found[end:][::-1]


def peak(ops, nbytes, *, frees=None, tells=max):
    split, held, seen = any(op.kind == "W" for op in ops), 0, [0]
    for op in ops:
        held += nbytes[op.stage] * ((op.kind == "F") - (op.kind in (frees or "BW"[split])))
        seen.append(held)
    return tells(seen)


def _stage_by_stage(ops, nbytes):
    return sum(peak([op for op in ops if op.stage == at], nbytes) for at in range(len(nbytes)))


def interleaved(rank, p, m, chunks, *, after=lambda rank, p: p - rank - 1, last_first=True,
                first=None, more=0, hops=2):  # fmt: skip
    jobs = [(c, r + k) for r in range(0, m, p) for c in range(chunks) for k in range(p)]
    forwards = [("F", rank + c * p, k) for c, k in jobs]
    back = [chunks - 1 - c if last_first else (c + 1) % chunks for c, _ in jobs]
    backwards = [("B", rank + c * p, k) for c, (_, k) in zip(back, jobs, strict=True)]
    warm = min(hops * after(rank, p) + ((first or chunks) - 1) * p + more, len(jobs))
    turns = [op for k in range(warm, len(jobs)) for op in (forwards[k], backwards[k - warm])]
    return forwards[:warm] + turns + backwards[len(jobs) - warm :]


def _by_micro_batch(rank, p, m, chunks):
    ops = interleaved(rank, p, m, chunks)
    backwards = iter(sorted((op for op in ops if op[0] == "B"), key=lambda op: (op[2], -op[1])))
    return [next(backwards) if op[0] == "B" else op for op in ops]


def late(weights, inputs, dy, *, adds=True, eager=False, only=None):
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        owed.append((weight, dy, x, dy.mT @ x if eager else None))
        dy = dy @ weight

    def w():
        for weight, grad, x, product in owed[:only]:
            product = grad.mT @ x if product is None else product
            weight.grad = product + weight.grad if adds and weight.grad is not None else product

    return dy, w


def _inputs_from_the_front(weights, inputs, dy):
    owed = []
    for weight, x in zip(weights[::-1], inputs, strict=True):
        owed.append((weight, dy, x))
        dy = dy @ weight

    def pay():
        for weight, grad, x in owed:
            added = grad.mT @ x
            weight.grad = added if weight.grad is None else weight.grad + added

    return dy, pay


def _all_of_it_late(weights, inputs, dy):
    return late(weights, inputs, dy)[0], lambda: late(weights, inputs, dy)[1]()


def place(rank, p, m, waits=lambda rank, p: rank, warm=lambda rank, p: p - rank - 1, newest=False):
    found, owed = [], []
    for op in order(rank, p, m, warm):
        found.append(op)
        owed += [f"W{op[1:]}"] * (op[0] == "B")
        if len(owed) > waits(rank, p):
            found.append(owed.pop(-1 if newest else 0))
    return found + owed


_TANH = partial(F.gelu, approximate="tanh")
_MEAN_OF_X = {"told": lambda comm: summed(comm, 1 / comm.size)}
_MASTER = {"f": lambda comm: summed(comm, 1 / comm.size)}

# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "tensor_parallel/feed-forward": [
        ("f averages", partial(feed_forward, **_MASTER),
         "the gradient of the input", "too small"),
        ("f sums forward too", partial(feed_forward, **_MEAN_OF_X), "bytes sent", "has to travel"),
        ("down cut otherwise", partial(feed_forward, strided=(False, True)), "the output", "is cut"),
        ("shares without a history", partial(feed_forward, detach=True),
         "the gradients of the weights", "another leaf"),
        ("another GELU", partial(feed_forward, gelu=_TANH), "the output", "GELU"),
        ("down on every rank", _whole_down, "the gradients of the weights", "its share"),
    ],
    "tensor_parallel/cross-entropy": [
        ("one maximum for all, again", partial(loss, top="all"), "large logits", "that token"),
        ("each rank its maximum", partial(loss, top="rank"), "the loss", "the same number"),
        ("no mask", partial(loss, outside="nothing"), "the loss", "count as 0"),
        ("word 0 is nobody's", partial(loss, outside="from 1"), "the loss", "count as 0"),
        ("sums cut off", partial(loss, reduce=_cut_off), "the gradient", "as g does"),
        ("sums summed again", partial(loss, reduce=_summed_twice), "the gradient", "too large"),
        ("a number of each word travels", _every_word, "bytes sent", "the sum of exponentials"),
    ],
    "tensor_parallel/bug-hunt": [
        ("norm's bias forgotten", partial(tokens, sums=("weight", "last")),
         "the gradients of the norm", "drift apart"),
        ("up's bias summed", partial(tokens, sums=("weight", "bias", "last", "up")),
         "the gradients of the matrices", "all tokens"),
        ("means of gradients", partial(tokens, average=True),
         "the gradients of the norm", "do not average"),
        ("what is normed copied", partial(tokens, normed=True),
         "the gradients of the matrices", "tokens are its own"),
        ("a gather that sums nothing", partial(tokens, gather=_gathered_by_hand),
         "the gradients of the matrices", "gather_from"),
        ("an n-th of the bias, not summed", partial(tokens, bias="shared", sums=("weight", "bias")),
         "the gradient of the bias", "too small"),
    ],
    "context_parallel/ring": [
        ("values before, keys after", partial(ring, early=(1,)),
         "sends travel while you compute", "keys and values"),
        ("the other holder", partial(ring, holder=1), "contiguous", "holder"),
        ("starts with an lse of 0", partial(ring, lse=0.0), "contiguous", "log 0 is −inf"),
        ("a hop too few", partial(ring, hops=lambda n: max(1, n - 1)), "contiguous", "every tile"),
        ("one chunk of two", partial(ring, once=True), "zig-zag", "each tile"),
        ("asks each rank in turn", _asks_everybody, "sends travel while you compute", "before"),
    ],
    "context_parallel/bug-hunt": [
        ("places left", long(places="own"), "positions", "from 0"),
        ("contiguous places", long(places="contiguous"), "positions", "its own position"),
        ("the ring left", long(ring="contiguous"), "who sees whom", "laid out"),
        ("a sum without n", long(mean="all"), "every token weighs alike", "once more"),
        ("tokens counted", long(mean="tokens"), "every token weighs alike", "by all tokens"),
        ("a mean of sequences", long(mean="sequences"), "every token weighs alike", "a sequence"),
        ("told, the gradient n times too small", long(mean="told"), "every token weighs alike", "N times as large"),
    ],
    "context_parallel/heads": [
        ("every n-th head, again", partial(_heads, strided=True), "contiguous", "neighbouring"),
        ("in the order of ranks", partial(_heads, join=False), "zig-zag", "the order of *ranks*"),
        ("the batch first", partial(_heads, moved=False), "contiguous", "come first"),
        ("all heads to all", _all_heads, "bytes sent", "thrown away"),
        ("told in turn", _told_in_turn, "bytes sent", "thrown away"),
    ],
    "expert_parallel/route": [
        ("the bias on logits", partial(choose, key=lambda s, z, b: z + b),
         "the bias only chooses", "after softmax"),
        ("the bias as a factor", partial(choose, key=lambda s, z, b: s * (1 + b)),
         "the bias only chooses", "is added"),
        ("no division for k = 1", partial(choose, weigh=_unless_one),
         "weights add up to 1", "by their sum"),
        ("divided over all tokens", partial(choose, weigh=_over_all_tokens),
         "weights add up to 1", "by their sum"),
        ("a softmax of scores", partial(choose, weigh=lambda s, c, b, k: s.gather(-1, c).softmax(-1)),
         "weights add up to 1", "scores already"),
        ("a constant sum", partial(choose, weigh=_of_constant_sum),
         "the router learns", "their sum included"),
    ],
    "expert_parallel/travel": [
        ("every expert on all rows", partial(moe, computes="all"), "rows computed", "no other"),
        ("padded to the busiest", _padded, "bytes sent", "padded"),
        ("a rank's first expert", partial(moe, computes="first"), "one rank", "rows"),
        ("sorted by rank alone", partial(moe, by_rank=True), "one rank", "by expert"),
        ("receives what it sends", partial(moe, sent_back=True),
         "every token in its place", "another expects"),
        ("on top of the tokens", partial(moe, residual=True), "one rank", "themselves on top"),
        ("unweighted, again", partial(moe, weigh=False), "one rank", "without their weights"),
        ("weights divided again", _divided_again, "one expert each, and three", "as they are"),
    ],
    "expert_parallel/bug-hunt": [
        ("P without a history", partial(step, probable=lambda p: p.mean(0).detach()),
         "balance", "without a history"),
        ("P summed over tokens", partial(step, probable=lambda p: p.sum(0)), "the loss", "each layer"),
        ("the first layer", partial(step, layers=slice(1)), "the loss", "each layer"),
        ("experts over dp, again", partial(step, experts="dp"), "experts", "over edp"),
        ("experts by dp", partial(step, by="dp"), "experts", "half the right one"),
        ("all but routers over edp", _layers_but_routers, "what all ranks hold", "mean over dp"),
        ("experts not divided", partial(step, by="nothing"), "experts", "twice the right one"),
        ("no mean of the router", partial(step, leaves_out=("router",)),
         "what all ranks hold", "mean over dp"),
    ],
    "pipeline/one-f-one-b": [
        ("a forward more", partial(order, warm=lambda rank, p: p - rank), "memory", "needs no more than"),
        ("as many on all ranks", partial(order, warm=lambda rank, p: p - 1),
         "memory", "needs no more than"),
        ("more on later ranks", partial(order, warm=lambda rank, p: rank),
         "every operation, in a legal order", "fewer forwards first"),
        ("half as many", partial(order, warm=lambda rank, p: (p - rank) // 2), "time", "run ahead"),
        ("p at a time", _rounds, "memory", "needs no more than"),
        ("the last ones backwards", _last_in_first_out, "time", "B0 first"),
        ("right for four ranks", partial(order, warm=lambda rank, p: min(p, 4) - min(rank, 3) - 1),
         "time", "run ahead"),
    ],
    "pipeline/peak": [
        ("B frees", partial(peak, frees="B"), "W apart", "they go with W"),
        ("B and W free", partial(peak, frees="BW"), "W apart", "they go with W"),
        ("only W frees", partial(peak, frees="W"), "1F1B", "lets them go"),
        ("all that is kept", partial(peak, frees="-"), "1F1B", "the largest count"),
        ("what is left", partial(peak, tells=lambda seen: seen[-1]), "1F1B", "the largest count"),
        ("each stage's own", _stage_by_stage, "several chunks", "several stages"),
        ("up to the first backward", partial(peak, tells=lambda seen: max(
            seen[: 2 + next(i for i, (a, b) in enumerate(pairwise(seen)) if b < a)])),
         "1F1B", "the largest count"),
        ("in tens", lambda ops, nbytes: peak(ops, nbytes) // 10 * 10, "1F1B", "the largest count"),
        ("activations, times the largest",
         lambda ops, nbytes: peak(ops, [1] * len(nbytes)) * max(nbytes), "1F1B", "of its stage"),
    ],
    "pipeline/bug-hunt": [
        ("ranks before counted", partial(interleaved, after=lambda rank, p: (rank + 1) % p),
         "three ranks and more", "fewer forwards first"),
        ("chunks in turn", partial(interleaved, last_first=False),
         "other numbers of chunks", "comes back first"),
        ("one more", partial(interleaved, more=1), "memory", "than the interleaved"),
        ("all forwards first, again", partial(interleaved, more=99), "memory", "than the interleaved"),
        ("two chunks for all", partial(interleaved, first=2),
         "other numbers of chunks", "own forward before it"),
        ("backwards by micro-batch", _by_micro_batch, "three ranks and more", "deadlock"),
    ],
    "pipeline/late-weights": [
        ("products at once", partial(late, eager=True), "what is multiplied when", "moves nothing"),
        ("overwrites", partial(late, adds=False), "several micro-batches", "add to what is there"),
        ("the last layer alone", partial(late, only=1), "several layers", "gradient of layer 0"),
        ("nothing is paid", partial(late, only=0), "one layer", "W adds"),
        ("inputs in another order", _inputs_from_the_front, "several layers", "another order"),
        ("B again in W", _all_of_it_late, "what is multiplied when", "second walk"),
    ],
    "pipeline/place-w": [
        ("at once", partial(place, waits=lambda rank, p: 0), "time", "rank before wait"),
        ("as many on all ranks", partial(place, waits=lambda rank, p: p - 1), "memory", "until W"),
        ("more on earlier ranks", partial(place, waits=lambda rank, p: p - 1 - rank),
         "memory", "until W"),
        ("one fewer", partial(place, waits=lambda rank, p: max(0, rank - 1)), "time", "rank before"),
        ("one more", partial(place, waits=lambda rank, p: rank + 1), "memory", "until W"),
        ("twice the warm-up", partial(place, waits=lambda rank, p: 2 * rank,
                                      warm=lambda rank, p: 2 * (p - rank - 1)), "memory", "until W"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
