"""Right answers to the exercises of `context_parallel`, in other styles than the reference."""

import math

import numpy as np
import torch
from torch import nn

from labutils import context_parallel, flash

# ── pass keys and values round ───────────────────────────────────────────────────────────────────


def _two_messages(q, k, v, whole, comm, attend):
    """Keys and values travel as two tensors; the receive is begun first."""
    n, i = comm.size, comm.rank
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(n):
        works = []
        if step + 1 < n:
            works = [comm.irecv(torch.empty_like(x), (i - 1) % n) for x in (k, v)]
            works += [comm.isend(x.contiguous(), (i + 1) % n) for x in (k, v)]
        for tile in whole.tiles(i, (i - step) % n):
            r, c = tile.rows, tile.columns
            pair = attend(q[:, :, r], k[:, :, c], v[:, :, c], tile.offset)
            out[:, :, r], lse[:, :, r] = flash.merge(out[:, :, r], lse[:, :, r], *pair)
        if works:
            k, v, *_ = [work.wait() for work in works]
    return out, lse


def _numpy(q, k, v, whole, comm, attend):
    """Rescaled by hand, in NumPy, and returned as a list."""
    n, i = comm.size, comm.rank
    total, top = np.zeros(q.shape), np.full(q.shape[:3], -1e300)
    norm, kv = np.zeros(q.shape[:3]), torch.stack([k, v])
    for step in range(n):
        if step < n - 1:
            going, coming = (
                comm.isend(kv, (i + 1) % n),
                comm.irecv(torch.empty_like(kv), (i - 1) % n),
            )
        for t in whole.tiles(i, (i - step) % n):
            x, partial = (
                y.numpy() for y in attend(q[:, :, t.rows], *kv[:, :, :, t.columns], t.offset)
            )
            new = np.maximum(top[:, :, t.rows], partial)
            old = np.exp(top[:, :, t.rows] - new)
            total[:, :, t.rows] = (
                total[:, :, t.rows] * old[..., None] + x * np.exp(partial - new)[..., None]
            )
            norm[:, :, t.rows] = norm[:, :, t.rows] * old + np.exp(partial - new)
            top[:, :, t.rows] = new
        if step < n - 1:
            going.wait()
            kv = coming.wait()
    return [torch.from_numpy(total / norm[..., None]), torch.from_numpy(top + np.log(norm))]


def _merged_at_the_end(q, k, v, whole, comm, attend):
    """Each tile's result is kept, and all are merged in the end by their log-sum-exps."""
    found, kv = [], torch.stack((k, v))
    for step in range(comm.size):
        works = ()
        if step < comm.size - 1:
            works = (
                comm.isend(kv, (comm.rank + 1) % comm.size),
                comm.irecv(torch.empty_like(kv), (comm.rank - 1) % comm.size),
            )
        for tile in whole.tiles(comm.rank, (comm.rank - step) % comm.size):
            cut = q[:, :, tile.rows], *kv[:, :, :, tile.columns]
            found.append((tile.rows, *attend(*cut, tile.offset)))
        for work in works:
            kv = work.wait()
    lses = [torch.full_like(q[..., 0], -math.inf) for _ in found]
    outs = [torch.zeros_like(q) for _ in found]
    for (rows, out, lse), into, into_lse in zip(found, outs, lses, strict=True):
        into[:, :, rows], into_lse[:, :, rows] = out, lse
    lse = torch.stack(lses).logsumexp(0)
    weights = (torch.stack(lses) - lse).exp()
    return (weights[..., None] * torch.stack(outs)).sum(0), lse


def _two_buffers(q, k, v, whole, comm, attend):
    """Two buffers take turns; a generator tells what comes next."""
    n, i = comm.size, comm.rank
    buffers = [torch.stack([k, v]), torch.empty(2, *k.shape, dtype=k.dtype)]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for step, holder in enumerate((i - t) % n for t in range(n)):
        here, other = buffers[step % 2], buffers[(step + 1) % 2]
        more = step + 1 < n
        coming = comm.irecv(other, (i - 1) % n) if more else None
        going = comm.isend(here, (i + 1) % n) if more else None
        for rows, columns, offset in (
            (t.rows, t.columns, t.offset) for t in whole.tiles(i, holder)
        ):
            o, m = attend(q[:, :, rows], *here[:, :, :, columns].unbind(), offset)
            both = torch.logaddexp(lse[:, :, rows], m)
            kept, new = (lse[:, :, rows] - both).exp(), (m - both).exp()
            out[:, :, rows] = out[:, :, rows] * kept[..., None] + o * new[..., None]
            lse[:, :, rows] = both
        if more:
            coming.wait(), going.wait()
    return out, lse


def _two_halves(q, k, v, whole, comm, attend):
    """One tensor has room for two sets: one half is sent, and the next set comes into the other."""
    n, i = comm.size, comm.rank
    room, kv = torch.empty(2, 2, *k.shape, dtype=k.dtype), torch.stack((k, v))
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    for step in range(n):
        works = ()
        if step < n - 1:
            works = comm.isend(kv, (i + 1) % n), comm.irecv(room[step % 2], (i - 1) % n)
        for tile in whole.tiles(i, (i - step) % n):
            at = slice(None), slice(None), tile.rows
            found = attend(q[at], *(each[:, :, tile.columns] for each in kv), tile.offset)
            out[at], lse[at] = flash.merge(out[at], lse[at], *found)
        for work in works:
            work.wait()
        kv = room[step % 2]
    return out, lse


def _other_way(q, k, v, whole, comm, attend):
    """Keys go to the rank before."""
    n, i = comm.size, comm.rank
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    kv = torch.stack((k, v))
    for t in range(n):
        works = []
        if t < n - 1:
            coming = comm.irecv(torch.empty_like(kv), (i + 1) % n)
            works = [comm.isend(kv, (i - 1) % n), coming]
        for tile in whole.tiles(i, (i + t) % n):
            r = tile.rows
            pair = attend(q[:, :, r], *kv[:, :, :, tile.columns], tile.offset)
            out[:, :, r], lse[:, :, r] = flash.merge(out[:, :, r], lse[:, :, r], *pair)
        for work in works:
            kv = work.wait()
    return out, lse


def _each_to_each(q, k, v, whole, comm, attend):
    """Own keys go to one rank after the other: as many bytes, over longer ways."""
    n, i = comm.size, comm.rank
    mine = here = torch.stack([k, v])
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -math.inf, dtype=q.dtype)
    for step in range(n):
        works = []
        if step < n - 1:
            works.append(comm.isend(mine, (i + step + 1) % n))
            works.append(comm.irecv(torch.empty_like(mine), (i - step - 1) % n))
        for t in whole.tiles(i, (i - step) % n):
            pair = attend(q[:, :, t.rows], *here[:, :, :, t.columns], t.offset)
            both = flash.merge(out[:, :, t.rows], lse[:, :, t.rows], *pair)
            out[:, :, t.rows], lse[:, :, t.rows] = both
        came = [work.wait() for work in works]
        here = came[-1] if came else here
    return out, lse


def _by_query(q, k, v, whole, comm, attend):
    """What each query has so far; no zeros and no −inf to begin with."""
    n, i, g = comm.size, comm.rank, k.shape[1]
    kv, have = torch.cat((k, v), 1), {}
    for t in range(n):
        works = []
        if t < n - 1:
            box = torch.empty_like(kv)
            works = [comm.irecv(box, (i - 1) % n), comm.isend(kv, (i + 1) % n)]
        for tile in whole.tiles(rank=i, holder=(i - t) % n):
            keys, values = kv[:, :g, tile.columns], kv[:, g:, tile.columns]
            pair = attend(q[:, :, tile.rows], keys, values, tile.offset)
            for j, row in enumerate(range(tile.rows.start, tile.rows.stop)):
                new = [x[:, :, j : j + 1] for x in pair]
                have[row] = flash.merge(*have[row], *new) if row in have else new
        for work in works:
            work.wait()
        kv = box if works else kv
    return tuple(torch.cat([have[row][x] for row in sorted(have)], 2) for x in (0, 1))


def _everything_seen(q, k, v, whole, comm, attend):
    """Of other ranks' tiles every pair is seen, so any large offset will do."""
    return context_parallel.ring(q, k, v, whole, comm, lambda q, k, v, offset: attend(
        q, k, v, offset if offset == 0 else offset + 1000))  # fmt: skip


# ── trade tokens for heads ───────────────────────────────────────────────────────────────────────


def _flat(x, whole, comm):
    """Heads first, batch later."""
    back = comm.all_to_all(x.transpose(0, 1).contiguous())
    rows = back.unflatten(0, (comm.size, -1))
    return torch.cat(
        [whole.join([row[h : h + 1] for row in rows], 2) for h in range(rows.shape[1])]
    ).transpose(0, 1)


def _sized(x, whole, comm):
    """Sizes given, a list of chunks joined by position."""
    rows = torch.cat([part[None] for part in x.chunk(comm.size, dim=1)])
    rows = comm.all_to_all(rows, [1] * comm.size, [1] * comm.size)
    out = x.new_empty(x.shape[0], x.shape[1] // comm.size, whole.s, x.shape[3])
    for rank in range(comm.size):
        out[:, :, list(whole.positions(rank))] = rows[rank]
    return out


def _messages(x, whole, comm):
    """Without a collective: a message to each."""
    parts = [part.contiguous() for part in x.chunk(comm.size, 1)]
    works = []
    for other in range(comm.size):
        if other != comm.rank:
            works.append(comm.isend(parts[other], other))
            works.append(comm.irecv(torch.empty_like(parts[0]), other))
    rows = iter([work.wait() for work in works][1::2])
    return whole.join([parts[r] if r == comm.rank else next(rows) for r in range(comm.size)], 2)


def _permuted(x, whole, comm):
    b, a, t, d = x.shape
    n = comm.size
    came = comm.all_to_all(x.reshape(b, n, a // n, t, d).permute(1, 0, 2, 3, 4).clone())
    found = torch.empty(b, a // n, whole.s, d, dtype=x.dtype)
    for rank in range(n):
        found[:, :, torch.tensor(list(whole.positions(rank)))] = came[rank]
    return found


def _sorted_by_place(x, whole, comm):
    came = comm.all_to_all(torch.stack(torch.tensor_split(x, comm.size, dim=1)))
    places = torch.tensor([p for rank in range(comm.size) for p in whole.positions(rank)])
    return torch.cat(tuple(came), 2).index_select(2, places.argsort())


def _heads_in_front(x, whole, comm):
    rows = x.permute(1, 2, 0, 3).contiguous()
    came = comm.all_to_all(rows.view(comm.size, -1, *rows.shape[1:]))
    return whole.join([part.permute(2, 0, 1, 3) for part in came], 2)


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


class _Counts(nn.Module):
    """A module; targets are counted by an all-reduce, the loss is the same on all ranks."""

    def __init__(self, model, comm):
        super().__init__()
        self.model, self.comm = model, comm
        self.rotary = model.blocks[0].attention.rotary
        self.cos, self.sin = self.rotary.cos.clone(), self.rotary.sin.clone()
        for block in model.blocks:
            block.attention.attend = lambda q, k, v, dropout: context_parallel.ring_attention(
                q, k, v, comm
            )

    def loss(self, tokens, targets):
        n, rank = self.comm.size, self.comm.rank
        whole = context_parallel.layout(tokens.shape[1], n)
        places = list(whole.positions(rank))
        self.rotary.cos, self.rotary.sin = self.cos[places], self.sin[places]
        logits, right = self.model(tokens[:, places]), targets[:, places]
        count = self.comm.all_reduce((right != -100).sum().reshape(1)).item()
        picked = logits.log_softmax(-1).gather(-1, right.clamp(min=0)[..., None])[..., 0]
        return -(picked * (right != -100)).sum() * n / count


class _WeighsMeans:
    """Ulysses; the mean of this rank's targets times its share of them."""

    def __init__(self, model, comm):
        self.model, self.comm = model, comm
        table = model.blocks[0].attention.rotary
        self.tables = {"cos": table.cos, "sin": table.sin}
        for block in model.blocks:
            block.attention.attend = self.attend

    def attend(self, q, k, v, dropout):
        return context_parallel.ulysses_attention(q, k, v, self.comm, "zigzag")

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size)
        for name, table in self.tables.items():
            setattr(
                self.model.blocks[0].attention.rotary,
                name,
                whole.split(table[: whole.s], self.comm.rank, 0),
            )
        logits = self.model(whole.split(tokens, self.comm.rank))
        right = whole.split(targets, self.comm.rank)
        mine, counted = (int((x != -100).sum()) for x in (right, targets))
        if not mine:
            return 0 * logits.sum()
        mean = nn.functional.cross_entropy(logits.flatten(0, 1), right.flatten())
        return mean * mine / counted * self.comm.size


class _Contiguous:
    """Tokens and ring are both contiguous; the loss is a sum over what this rank has."""

    def __init__(self, model, comm):
        self.model, self.comm = model, comm
        self.rotary = model.blocks[0].attention.rotary
        self.whole = [(name, getattr(self.rotary, name).clone()) for name in ("cos", "sin")]
        for block in model.blocks:
            block.attention.attend = self.look

    def look(self, q, k, v, dropout):
        return context_parallel.ring_attention(q, k, v, self.comm, "contiguous")

    def loss(self, tokens, targets):
        n, width = self.comm.size, tokens.shape[1] // self.comm.size
        mine = slice(self.comm.rank * width, (self.comm.rank + 1) * width)
        for name, table in self.whole:
            setattr(self.rotary, name, table[mine])
        each = nn.CrossEntropyLoss(reduction="none")(
            self.model(tokens[:, mine]).transpose(1, 2), targets[:, mine]
        )
        return each.sum() * n / targets.ne(-100).sum()


class _Places:
    """Tells model and table where the tokens stand."""

    def __init__(self, model, comm):
        self.model, self.comm = model, comm
        model.places_ = model.blocks[0].attention.rotary.places_ = self.places
        for block in model.blocks:
            block.attention.attend = lambda q, k, v, dropout: context_parallel.ring_attention(
                q, k, v, comm, "zigzag"
            )

    def places(self, count):
        n = self.comm.size
        return list(context_parallel.layout(count * n, n, "zigzag").positions(self.comm.rank))

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size, "zigzag")
        mine, right = (whole.split(x, self.comm.rank) for x in (tokens, targets))
        summed = nn.functional.cross_entropy(
            self.model(mine).flatten(0, 1), right.flatten(), reduction="sum"
        )
        return summed * self.comm.size / (targets != -100).sum()


class _MeanCount(_Places):
    """Over the mean number of targets of a rank, which all are asked for."""

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size)
        mine, right = (whole.split(x, self.comm.rank) for x in (tokens, targets))
        counts, logs = right != -100, self.model(mine).log_softmax(-1)
        each = -logs.gather(-1, right.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        of_ranks = self.comm.all_gather(counts.sum().reshape(1)).double()
        return torch.where(counts, each, torch.zeros_like(each)).sum() / of_ranks.mean()


class _OneByOne(_Places):
    """A sequence at a time, each by its share of all targets."""

    def loss(self, tokens, targets):
        counts = (targets != -100).sum(1)
        losses = [
            super(_OneByOne, self).loss(tokens[i : i + 1], targets[i : i + 1]) * counts[i]
            for i in range(len(tokens))
        ]
        return torch.stack(losses).sum() / counts.sum()


RIGHT = {
    "context_parallel/ring": {
        "two messages": _two_messages,
        "rescaled by hand in NumPy, as a list": _numpy,
        "merged at the end": _merged_at_the_end,
        "two buffers": _two_buffers,
        "two halves of a buffer": _two_halves,
        "the other way": _other_way,
        "query by query": _by_query,
        "each to each": _each_to_each,
        "large offsets": _everything_seen,
    },
    "context_parallel/heads": {
        "heads first": _flat,
        "sizes given": _sized,
        "messages": _messages,
        "permuted": _permuted,
        "sorted by place": _sorted_by_place,
        "heads in front": _heads_in_front,
        "a lambda": lambda x, whole, comm: context_parallel.heads_for_tokens(x, whole, comm),
    },
    "context_parallel/bug-hunt": {
        "counts by an all-reduce": _Counts,
        "weighted means, with Ulysses": _WeighsMeans,
        "all contiguous": _Contiguous,
        "by places": _Places,
        "the mean number of targets": _MeanCount,
        "one by one": _OneByOne,
        "the library": lambda model, comm: context_parallel.distribute(model, comm, kind="zigzag"),
    },
}
