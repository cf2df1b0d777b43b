"""Wrong answers to the exercises of `context_parallel`."""

import functools

import torch
import torch.nn.functional as F

from labutils import context_parallel, flash
from wrong_answers import Wrong

# ── pass keys and values round ───────────────────────────────────────────────────────────────────


def _added(o1, lse1, o2, lse2):
    return o1 + o2, torch.logaddexp(lse1, lse2)


def _lse_lost(o1, lse1, o2, lse2):
    out, _ = flash.merge(o1, lse1, o2, lse2)
    return out, lse2


def _ring(
    q,
    k,
    v,
    whole,
    comm,
    attend,
    *,
    merge=flash.merge,
    offset=None,
    rounds=0,
    every=False,
    blocking=False,
    early=False,
    mean=False,
    keep_lse=True,
):
    """The ring with its slips switched on one at a time."""
    n, i = comm.size, comm.rank
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    count = torch.zeros(q.shape[2], 1, dtype=q.dtype)
    kv = torch.stack([k, v])
    for step in range(n):
        holder, works = (i - step) % n, ()
        if step < n - 1 + rounds and n > 1:
            following = torch.empty_like(kv)
            if blocking:
                comm.send(kv, (i + 1) % n)
                comm.recv(following, (i - 1) % n)
            else:
                works = comm.isend(kv, (i + 1) % n), comm.irecv(following, (i - 1) % n)
            if early:
                [work.wait() for work in works]
        for tile in whole.tiles(i, holder):
            at, c = tile.rows, tile.columns
            shift = tile.offset if offset is None else offset(i, holder, q.shape[2])
            found = attend(q[:, :, at], kv[0][:, :, c], kv[1][:, :, c], shift)
            out[:, :, at], lse[:, :, at] = merge(out[:, :, at], lse[:, :, at], *found)
            count[at] += 1
        if every and not list(whole.tiles(i, holder)):
            attend(q, *kv, -q.shape[2])
        if not early:
            [work.wait() for work in works]
        if n > 1 and step < n - 1 + rounds:
            kv = following
    return out / count if mean else out, lse if keep_lse else torch.zeros_like(lse)


def _swapped_lse(o1, lse1, o2, lse2):
    """Each output by the other's lse, once both are there."""
    both = (o1, lse2, o2, lse1) if lse1.isfinite().all() else (o1, lse1, o2, lse2)
    return flash.merge(*both)


def _larger_lse(o1, lse1, o2, lse2):
    return flash.merge(o1, lse1, o2, lse2)[0], torch.maximum(lse1, lse2)


def _values_for_keys(q, k, v, whole, comm, attend):
    return context_parallel.ring(q, v, k, whole, comm, attend)


def _over_itself(q, k, v, whole, comm, attend):
    """The next keys come into the tensor that is being sent."""
    n, i = comm.size, comm.rank
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    kv = torch.stack([k, v])
    for step in range(n):
        works = ()
        if step < n - 1:
            works = comm.isend(kv, (i + 1) % n), comm.irecv(kv, (i - 1) % n)
        for tile in whole.tiles(i, (i - step) % n):
            at, c = tile.rows, tile.columns
            found = attend(q[:, :, at], *kv[:, :, :, c], tile.offset)
            out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
        for work in works:
            work.wait()
    return out, lse


def _plain_exponentials(q, k, v, whole, comm, attend):
    """Sums of e^lse, without the larger lse taken out."""
    n, i = comm.size, comm.rank
    summed, weight, kv = torch.zeros_like(q), torch.zeros_like(q[..., 0]), torch.stack([k, v])
    for step in range(n):
        works = ()
        if step < n - 1:
            works = comm.isend(kv, (i + 1) % n), comm.irecv(torch.empty_like(kv), (i - 1) % n)
        for tile in whole.tiles(i, (i - step) % n):
            out, lse = attend(q[:, :, tile.rows], *kv[:, :, :, tile.columns], tile.offset)
            summed[:, :, tile.rows] += out * lse.exp()[..., None]
            weight[:, :, tile.rows] += lse.exp()
        for work in works:
            kv = work.wait()
    return summed / weight[..., None], weight.log()


def _into_its_own(q, k, v, whole, comm, attend):
    """Two buffers take turns, and this rank's keys are one of them."""
    n, i = comm.size, comm.rank
    sets = [(k, v), (torch.empty_like(k), torch.empty_like(v))]
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype)
    for step in range(n):
        here, other = sets[step % 2], sets[1 - step % 2]
        works = []
        if step < n - 1:
            works += [comm.isend(x.contiguous(), (i + 1) % n) for x in here]
            works += [comm.irecv(x, (i - 1) % n) for x in other]
        for t in whole.tiles(i, (i - step) % n):
            cut = q[:, :, t.rows], *(x[:, :, t.columns] for x in here)
            pair = attend(*cut, t.offset)
            both = flash.merge(out[:, :, t.rows], lse[:, :, t.rows], *pair)
            out[:, :, t.rows], lse[:, :, t.rows] = both
        [work.wait() for work in works]
    return out, lse


def _over_the_queries(q, k, v, whole, comm, attend):
    """Outputs are as large as queries: no new tensor for them."""
    out, lse = _ring(q, k, v, whole, comm, attend)
    return q.copy_(out), lse


def _room_for_all(q, k, v, whole, comm, attend):
    """One tensor, in which the keys of all ranks stand in the end."""
    n, i = comm.size, comm.rank
    room = torch.empty(n, 2, *k.shape, dtype=k.dtype)
    room[0] = torch.stack((k, v))
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for step in range(n):
        works = ()
        if step < n - 1:
            works = comm.isend(room[step], (i + 1) % n), comm.irecv(room[step + 1], (i - 1) % n)
        for tile in whole.tiles(i, (i - step) % n):
            at, c = tile.rows, tile.columns
            found = attend(q[:, :, at], *room[step][:, :, :, c], tile.offset)
            out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
        for work in works:
            work.wait()
    return out, lse


def _never_waits(q, k, v, whole, comm, attend):
    n, i = comm.size, comm.rank
    out, lse, kv = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf), torch.stack((k, v))
    for step in range(n):
        if step < n - 1:
            following = torch.zeros_like(kv)
            going = comm.isend(kv, (i + 1) % n)
            comm.irecv(following, (i - 1) % n)
        for tile in whole.tiles(i, (i - step) % n):
            at, c = tile.rows, tile.columns
            found = attend(q[:, :, at], *kv[:, :, :, c], tile.offset)
            out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
        if step < n - 1:
            going.wait()
            kv = following
    return out, lse


def _recursive(q, k, v, whole, comm, attend, step=0, so_far=None):
    """Each call calls the next, and all keep their keys until the last returns."""
    n, i = comm.size, comm.rank
    out, lse = so_far or (torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf))
    works = []
    if step < n - 1:
        works = [comm.irecv(torch.empty_like(x), (i - 1) % n) for x in (k, v)]
        works += [comm.isend(x.contiguous(), (i + 1) % n) for x in (k, v)]
    for tile in whole.tiles(i, (i - step) % n):
        at, c = tile.rows, tile.columns
        found = attend(q[:, :, at], k[:, :, c], v[:, :, c], tile.offset)
        out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
    came = [work.wait() for work in works][:2]
    return _recursive(q, *came, whole, comm, attend, step + 1, (out, lse)) if came else (out, lse)


def _without_tiles(q, k, v, whole, comm, attend):
    """Whole shares, as if each rank had neighbouring tokens."""
    n, i = comm.size, comm.rank
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    kv = torch.stack([k, v])
    for step in range(n):
        works, holder = (), (i - step) % n
        if step < n - 1:
            following = torch.empty_like(kv)
            works = comm.isend(kv, (i + 1) % n), comm.irecv(following, (i - 1) % n)
        if holder <= i:
            out, lse = flash.merge(out, lse, *attend(q, *kv, (i - holder) * q.shape[2]))
        for work in works:
            kv = work.wait()
    return out, lse


def _own_keys(q, k, v, whole, comm, attend):
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for tile in whole.tiles(comm.rank, comm.rank):
        at, c = tile.rows, tile.columns
        found = attend(q[:, :, at], k[:, :, c], v[:, :, c], tile.offset)
        out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
    return out, lse


def _single(q, k, v, whole, comm, attend):
    """Keys and values travel in fp32."""

    def wider(q, k, v, offset):
        return attend(q, k.double(), v.double(), offset)

    return context_parallel.ring(q, k.float(), v.float(), whole, comm, wider)


def _gathered(q, k, v, whole, comm, attend):
    everything = comm.all_gather(torch.stack([k, v])[None])
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for holder, (keys, values) in enumerate(everything):
        for tile in whole.tiles(comm.rank, holder):
            at, c = tile.rows, tile.columns
            found = attend(q[:, :, at], keys[:, :, c], values[:, :, c], tile.offset)
            out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
    return out, lse


def _another_ring(
    q, k, v, whole, comm, attend, *, early=False, left=False, keeps=False, repeat=1, toward=1,
    holder=None,
):  # fmt: skip
    """Another hand's ring, with its slips."""
    n, me = comm.size, comm.rank
    box = torch.stack([k, v]).repeat_interleave(repeat, 2)
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], float("-inf"))
    kept = []
    for t in range(n):
        sending = receiving = None
        if t < n - 1:
            inbox = torch.empty_like(box)
            sending = comm.isend(box, (me + toward) % n)
            receiving = comm.irecv(inbox, (me - toward) % n)
            if early:
                receiving.wait()
        for tile in whole.tiles(me, holder(me, t, n) if holder else (me - t) % n):
            keys, values = box[:, :, :, tile.columns].unbind()
            part = attend(q[:, :, tile.rows], keys, values, tile.offset)
            merged = flash.merge(out[:, :, tile.rows], lse[:, :, tile.rows], *part)
            out[:, :, tile.rows], lse[:, :, tile.rows] = merged
        if receiving:
            kept += [box] if keeps else []
            receiving.wait()
            box = inbox
            if not left:
                sending.wait()
    return out, lse


def _ring_of(**slips):
    return functools.partial(_another_ring, **slips)


# ── trade tokens for heads ───────────────────────────────────────────────────────────────────────


def _trade(x, whole, comm, *, cut=None, join=None, gather=False, front=True):
    n = comm.size
    if gather:
        rows = comm.all_gather(x[None].contiguous()).unbind()
        each = x.shape[1] // n
        return whole.join([row[:, comm.rank * each :][:, :each] for row in rows], 2)
    rows = (cut or (lambda x: x.unflatten(1, (n, -1)).movedim(1, 0)))(x)
    rows = comm.all_to_all(rows.contiguous()).unbind()
    return join(rows) if join else whole.join(rows, 2)


def _strided(x, whole, comm):
    return _trade(x, whole, comm, cut=lambda x: x.unflatten(1, (-1, comm.size)).movedim(2, 0))


def _in_rank_order(x, whole, comm):
    return _trade(x, whole, comm, join=lambda rows: torch.cat(rows, 2))


def _reshaped(x, whole, comm):
    """A view in place of moving the dim: right for one sequence, mixed for two."""
    b, a, s, d = x.shape
    return _trade(x, whole, comm, cut=lambda x: x.reshape(comm.size, b, a // comm.size, s, d))


def _mean_of_heads(x, whole, comm):
    return comm.all_to_all(x.movedim(1, 0).contiguous()).movedim(0, 1)


def _tokens_for_tokens(x, whole, comm):
    """Tokens are dealt out, where heads should be."""
    rows = x.unflatten(2, (comm.size, -1)).movedim(2, 0).contiguous()
    return torch.cat(comm.all_to_all(rows).unbind(), 1)


def _first_heads(x, whole, comm):
    """Everybody gets the first heads."""
    each = x.shape[1] // comm.size
    parts = comm.all_gather(x[None, :, :each].contiguous())
    return whole.join(parts.unbind(), 2)


def _backwards(x, whole, comm):
    """Rows in the order of ranks from the last to the first."""
    rows = comm.all_to_all(torch.stack(x.chunk(comm.size, 1)))
    return whole.join(rows.flip(0).unbind(), 2)


def _as_it_was(x, whole, comm):
    """A view does the trade, and nothing is sent."""
    return x.reshape(x.shape[0], x.shape[1] // comm.size, -1, x.shape[3])


def _twice(x, whole, comm):
    """There, back, and there again."""
    rows = torch.stack(x.chunk(comm.size, 1))
    for _ in range(3):
        rows = comm.all_to_all(rows)
    return whole.join(list(rows), 2)


def _rounded(x, whole, comm):
    return _trade(x.float(), whole, comm).to(x.dtype)


def _joined_by_heads(x, whole, comm):
    return _trade(x, whole, comm, join=lambda rows: whole.join([*rows], 1))


def _last_rank_first(x, whole, comm):
    return _trade(x, whole, comm, cut=lambda x: torch.stack(x.chunk(comm.size, 1)[::-1]))


def _interleaved(x, whole, comm):
    """Token t of each rank, then token t + 1 of each."""
    return _trade(x, whole, comm, join=lambda rows: torch.stack(rows, 3).flatten(2, 3))


def _broadcasts(x, whole, comm):
    """Each rank tells all it has to everybody."""
    shares = [comm.broadcast(x.contiguous(), rank) for rank in range(comm.size)]
    return whole.join([share.chunk(comm.size, 1)[comm.rank] for share in shares], 2)


def _reused(x, whole, comm):
    """x is of no use any more, so its memory takes what comes."""
    rows = x.unflatten(1, (comm.size, -1)).movedim(1, 0).contiguous()
    came = comm.all_to_all(rows)
    x.copy_(came.movedim(0, 1).flatten(1, 2))
    return whole.join(list(x.unflatten(1, (comm.size, -1)).unbind(1)), 2)


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


class _Model:
    """The model of the hunt, with its bugs repaired but for those that are asked for."""

    def __init__(self, model, comm, kind="zigzag", turn="right", weigh="right"):
        self.model, self.comm, self.kind, self.turn, self.weigh = model, comm, kind, turn, weigh
        rotary = model.blocks[0].attention.rotary
        self.tables = rotary.cos, rotary.sin
        for block in model.blocks:
            block.attention.attend = self.attend

    def attend(self, q, k, v, dropout):
        return context_parallel.ring_attention(q, k, v, self.comm, self.kind)

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size)
        mine, right = (whole.split(x, self.comm.rank) for x in (tokens, targets))
        rotary = self.model.blocks[0].attention.rotary
        at = torch.tensor(whole.positions(self.comm.rank))
        if self.turn == "neighbours":
            at = torch.arange(len(at)) + self.comm.rank * len(at)
        if self.turn == "again":
            rotary.cos, rotary.sin = (
                rotary.cos[at % len(rotary.cos)],
                rotary.sin[at % len(rotary.cos)],
            )
        elif self.turn != "local":
            rotary.cos, rotary.sin = (table[at] for table in self.tables)
        each = F.cross_entropy(self.model(mine).flatten(0, 1), right.flatten(), reduction="sum")
        count = (targets != -100).sum()
        if self.weigh == "own":
            return each / (right != -100).sum()
        if self.weigh == "own, never 0":
            return each / (right != -100).sum().clamp(min=1)
        if self.weigh == "shares":
            return each / right.numel()
        return each / count * (1 if self.weigh == "twice" else self.comm.size)


def _model(**slips):
    return functools.partial(_Model, **slips)


class _SameEverywhere(_Model):
    """Every rank returns the whole loss, and the average counts its own part once."""

    def loss(self, tokens, targets):
        mine = super().loss(tokens, targets) / self.comm.size
        others = self.comm.all_reduce(mine.detach().reshape(1)) - mine.detach()
        return mine + others[0]


class _Shifted(_Model):
    """Labels are made after the split: the last token of each share has none."""

    def loss(self, tokens, targets):
        every = targets.clone()
        if self.comm.size > 1:
            whole = context_parallel.layout(tokens.shape[1], self.comm.size)
            every[:, whole.positions(self.comm.rank)[-1]] = -100
        return super().loss(tokens, every)


class _CountsHere(_Model):
    """Divides by n times this rank's targets."""

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size)
        here = (whole.split(targets, self.comm.rank) != -100).sum().clamp(min=1)
        return super().loss(tokens, targets) * (targets != -100).sum() / here / self.comm.size


class _CountsAll(_Model):
    """Divides by all tokens, ignored ones too."""

    def loss(self, tokens, targets):
        return super().loss(tokens, targets) * (targets != -100).sum() / targets.numel()


class _Sorted(_Model):
    """The tables of neighbours for tokens of a zig-zag: right for the first chunk."""

    def __init__(self, model, comm):
        super().__init__(model, comm, turn="neighbours")


class _OfFirstLength(_Model):
    """Positions are worked out once, for the first length that comes."""

    def loss(self, tokens, targets):
        if not hasattr(self, "kept"):
            whole = context_parallel.layout(tokens.shape[1], self.comm.size)
            at = torch.tensor(whole.positions(self.comm.rank))
            self.kept = [table[at] for table in self.tables]
        rotary = self.model.blocks[0].attention.rotary
        rotary.cos, rotary.sin = self.kept
        self.turn = "local"
        return super().loss(tokens, targets)


class _FirstBlock(_Model):
    """Only the first block attends over the ring."""

    def __init__(self, model, comm):
        others = [block.attention.attend for block in model.blocks]
        super().__init__(model, comm)
        for block, attend in zip(model.blocks[1:], others[1:], strict=True):
            block.attention.attend = attend


class _Dealt(_Model):
    """Tokens in contiguous shares, the ring in a zig-zag."""

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size)
        order = [p for rank in range(self.comm.size) for p in whole.positions(rank)]
        back = torch.tensor(order).argsort()
        return super().loss(tokens[:, back], targets[:, back])


class _OwnMean(_Model):
    """A rank's mean, times its share of the targets: 0/0 where it has none."""

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size)
        mine = (whole.split(targets, self.comm.rank) != -100).sum()
        return super().loss(tokens, targets) / mine * mine


class _Rolled(_Model):
    """Labels are shifted once more."""

    def loss(self, tokens, targets):
        return super().loss(tokens, targets.roll(-1, 1))


class _Everywhere:
    """No ring and no places: every rank computes all tokens, and takes the losses of its own."""

    def __init__(self, model, comm):
        self.model, self.comm = model, comm

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size, "zigzag")
        logits, right = (whole.split(x, self.comm.rank) for x in (self.model(tokens), targets))
        total = F.cross_entropy(logits.flatten(0, 1), right.flatten(), reduction="sum")
        return self.comm.size * total / (targets != -100).sum()


class _NoHistory(_Everywhere):
    def loss(self, tokens, targets):
        loss = super().loss(tokens, targets)
        return self.comm.all_reduce(loss.detach().view(1))[0] / self.comm.size + 0 * loss


WRONG = {
    "context_parallel/ring": (
        Wrong(
            "keys first, then tiles",
            _ring_of(early=True),
            "sends travel while you compute",
            "all leave and come",
        ),
        Wrong("sends without an end", _ring_of(left=True), "bytes sent", "nobody waits for"),
        Wrong("keeps what passes", _ring_of(keeps=True), "bytes sent", "are two sets"),
        Wrong("keys for all query heads", _ring_of(repeat=2), "bytes sent", "query heads"),
        Wrong("the other way round", _ring_of(toward=-1), "contiguous", "every tile"),
        Wrong(
            "a holder of the other way",
            _ring_of(holder=lambda me, t, n: (me + t) % n),
            "contiguous",
            "every tile",
        ),
        Wrong(
            "outputs added, not rescaled",
            functools.partial(_ring, merge=_added),
            "contiguous",
            "units of its own",
        ),
        Wrong(
            "the mean of outputs",
            functools.partial(_ring, merge=_added, mean=True),
            "contiguous",
            "units of its own",
        ),
        Wrong("keys in fp32", _single, "contiguous", "but for rounding"),
        Wrong("own keys only", _own_keys, "contiguous", "every tile"),
        Wrong(
            "the mask of the own tile on all",
            functools.partial(_ring, offset=lambda i, holder, s: 0),
            "contiguous",
            "offset",
        ),
        Wrong("the mask of neighbours after zig-zag", _without_tiles, "zig-zag", "not neighbours"),
        Wrong(
            "lse of the last tile", functools.partial(_ring, merge=_lse_lost), "contiguous", "lse"
        ),
        Wrong("no lse", functools.partial(_ring, keep_lse=False), "contiguous", "merged lse"),
        Wrong(
            "everybody sends first", functools.partial(_ring, blocking=True), "contiguous", "isend"
        ),
        Wrong("sent home", functools.partial(_ring, rounds=1), "bytes sent", "sends the keys home"),
        Wrong("all keys at once", _gathered, "bytes sent", "O(s)"),
        Wrong("each output by the other's lse",
              functools.partial(_ring, merge=_swapped_lse), "contiguous", "every tile"),
        Wrong("the larger lse",
              functools.partial(_ring, merge=_larger_lse), "contiguous", "merged lse"),
        Wrong("values for keys", _values_for_keys, "contiguous", "every tile"),
        Wrong("received over what is sent", _over_itself, "contiguous", "still reads"),
        Wrong("received into its own keys", _into_its_own, "contiguous", "into tensors of your own"),
        Wrong("outputs over queries", _over_the_queries, "contiguous", "this rank's own"),
        Wrong("plain exponentials", _plain_exponentials, "contiguous", "overflows"),
        Wrong("room for all", _room_for_all, "bytes sent", "are two sets"),
        Wrong("never waits", _never_waits, "contiguous", "until wait()"),
        Wrong("lse first", lambda *given: context_parallel.ring(*given)[::-1], "contiguous",
              "return (out, lse)"),
        Wrong("outputs alone", lambda *given: context_parallel.ring(*given)[0], "contiguous",
              "Return two tensors"),
        Wrong("recursive", _recursive, "bytes sent", "are two sets"),
        Wrong(
            "waits, then computes",
            functools.partial(_ring, early=True),
            "sends travel while you compute",
            "*after*",
        ),
    ),
    "context_parallel/heads": (
        Wrong("tokens dealt out", _tokens_for_tokens, "contiguous", "fewer heads, all tokens"),
        Wrong("the first heads", _first_heads, "contiguous", "another rank's heads"),
        Wrong("from last to first", _backwards, "contiguous", "in the order of *ranks*"),
        Wrong("a view", _as_it_was, "contiguous", "deals rows of dim 0"),
        Wrong("three exchanges", _twice, "bytes sent", "what it has once"),
        Wrong("every n-th head", _strided, "contiguous", "neighbouring heads"),
        Wrong("reshaped, not moved", _reshaped, "contiguous", "deals rows of dim 0"),
        Wrong("one head to a rank", _mean_of_heads, "contiguous", "fewer heads, all tokens"),
        Wrong("tokens in the order of ranks", _in_rank_order, "zig-zag", "belong"),
        Wrong("rounded on the way", _rounded, "contiguous", "but for rounding"),
        Wrong("joined by heads", _joined_by_heads, "contiguous", "and the dim of tokens"),
        Wrong("the last rank's heads first", _last_rank_first, "contiguous", "another rank's"),
        Wrong("interleaved", _interleaved, "contiguous", "wrong places"),
        Wrong("x reused", _reused, "contiguous", "a tensor of your own"),
        Wrong("broadcasts", _broadcasts, "bytes sent", "thrown away"),
        Wrong(
            "gathered, then cut",
            functools.partial(_trade, gather=True),
            "bytes sent",
            "thrown away",
        ),
    ),
    "context_parallel/bug-hunt": (
        Wrong(
            "the same loss everywhere",
            _SameEverywhere,
            "every token weighs alike",
            "N times as large",
        ),
        Wrong("all tokens on every rank", _Everywhere, "who sees whom", "its own are 6"),
        Wrong("a loss without a history", _NoHistory, "one rank", "has no history"),
        Wrong("positions of the first length", _OfFirstLength, "positions", "own position"),
        Wrong("the first block alone", _FirstBlock, "positions", "not every block"),
        Wrong("tokens dealt otherwise", _Dealt, "who sees whom", "zig-zag"),
        Wrong("0/0 of no targets", _OwnMean, "every token weighs alike", "is 0/0"),
        Wrong("labels shifted twice", _Rolled, "one rank", "the whole sequence"),
        Wrong("labels shifted late", _Shifted, "every token weighs alike", "off"),
        Wrong("counts its own", _CountsHere, "every token weighs alike", "mean of means"),
        Wrong("counts ignored ones", _CountsAll, "every token weighs alike", "by all tokens"),
        Wrong("tables of neighbours", _Sorted, "positions", "own position"),
        Wrong(
            "the one of the lab",
            _model(kind="contiguous", turn="local", weigh="own"),
            "who sees whom",
            "zig-zag",
        ),
        Wrong("the mask of neighbours", _model(kind="contiguous"), "who sees whom", "zig-zag"),
        Wrong("positions restart", _model(turn="local"), "positions", "counts its tokens from 0"),
        Wrong("positions of neighbours", _model(turn="neighbours"), "positions", "own position"),
        Wrong("tables cut again and again", _model(turn="again"), "positions", "pass before"),
        Wrong("a mean of means", _model(weigh="own"), "every token weighs alike", "mean of means"),
        Wrong(
            "a mean of means without NaN",
            _model(weigh="own, never 0"),
            "every token weighs alike",
            "mean of means",
        ),
        Wrong(
            "ignored targets count",
            _model(weigh="shares"),
            "every token weighs alike",
            "by all tokens",
        ),
        Wrong("divided twice", _model(weigh="twice"), "every token weighs alike", "once more by N"),
    ),
}
