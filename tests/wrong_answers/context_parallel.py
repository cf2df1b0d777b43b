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


def _gathered(q, k, v, whole, comm, attend):
    everything = comm.all_gather(torch.stack([k, v])[None])
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -torch.inf)
    for holder, (keys, values) in enumerate(everything):
        for tile in whole.tiles(comm.rank, holder):
            at, c = tile.rows, tile.columns
            found = attend(q[:, :, at], keys[:, :, c], values[:, :, c], tile.offset)
            out[:, :, at], lse[:, :, at] = flash.merge(out[:, :, at], lse[:, :, at], *found)
    return out, lse


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


WRONG = {
    "context_parallel/ring": (
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
        Wrong(
            "waits, then computes",
            functools.partial(_ring, early=True),
            "sends travel while you compute",
            "*after*",
        ),
    ),
    "context_parallel/heads": (
        Wrong("every n-th head", _strided, "contiguous", "neighbouring heads"),
        Wrong("reshaped, not moved", _reshaped, "contiguous", "deals rows of dim 0"),
        Wrong("one head to a rank", _mean_of_heads, "contiguous", "fewer heads, all tokens"),
        Wrong("tokens in the order of ranks", _in_rank_order, "zig-zag", "belong"),
        Wrong(
            "gathered, then cut",
            functools.partial(_trade, gather=True),
            "bytes sent",
            "thrown away",
        ),
    ),
    "context_parallel/bug-hunt": (
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
            "mean of means",
        ),
        Wrong("divided twice", _model(weigh="twice"), "every token weighs alike", "division by N"),
    ),
}
