"""Wrong answers to labs 05–09 by somebody who had not read their checks."""

import contextlib
import itertools
import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labutils import collectives, flash, zero
from wrong_answers import Wrong

# ── 05 ───────────────────────────────────────────────────────────────────────────────────────────


def _weighs(share, loss, batches, weigh, until_empty=False):
    """Accumulates with share(weight so far, weight, all weights)."""
    weights, seen, whole = [weigh(batch) for batch in batches], 0, 0.0
    for batch, n in zip(batches, weights, strict=True):
        seen += n
        if n:
            part = loss(batch) * share(seen, n, weights)
            part.backward()
            whole = whole + part.detach()
        elif until_empty:
            break
    return whole


def _by_tokens(seen, n, weights):
    return n / sum(weights)


def _mean_of_losses(loss, batches, weigh):
    losses = []
    _weighs(_by_tokens, lambda batch: losses.append(loss(batch)) or losses[-1], batches, weigh)
    return torch.stack(losses).detach().mean()


def _twice(loss, batches, weigh):
    _weighs(_by_tokens, loss, batches, weigh)
    with torch.no_grad():
        full = [batch for batch in batches if weigh(batch)]
        return sum(loss(b) * weigh(b) for b in full) / sum(map(weigh, full))


def _epoch(optimizer, loss, batches, k, max_norm, *, tail_by_k=False, extra=False, skips=False):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    steps, batches = 0, iter(batches)
    while group := list(itertools.islice(batches, k)):
        for batch in group:
            (loss(batch) / (k if tail_by_k else len(group))).backward()
        nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if skips:
            next(batches, None)
    return steps + extra


def _clips(optimizer, loss, batches, k, max_norm, *, late=False):
    """Clips by value, or after the step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    steps, batches = 0, iter(batches)
    while group := list(itertools.islice(batches, k)):
        for batch in group:
            (loss(batch) / len(group)).backward()
        if not late:
            nn.utils.clip_grad_value_(parameters, max_norm)
        optimizer.step()
        if late:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.zero_grad()
        steps += 1
    return steps


def _fills(choose, target, seq_len, gpus, fits):
    share = target // seq_len // gpus
    micro = choose(share, fits)
    return micro, share // micro


def _largest(share, fits):
    return max(b for b in range(1, share + 1) if fits(b))


def _rounds_up(target, seq_len, gpus, fits):
    share = target // seq_len // gpus
    return _largest(share, fits), -(-share // _largest(share, fits))


def _doubles(share, fits):
    b = 1
    while fits(2 * b) and share % (2 * b) == 0:
        b *= 2
    return b


def _first_that_does_not_divide(share, fits):
    b = 1
    while fits(b + 1) and share % (b + 1) == 0:
        b += 1
    return b


def _no_gpus(target, seq_len, gpus, fits):
    return _fills(
        lambda n, fits: _largest(n, lambda b: fits(b) and n % b == 0), target, seq_len, 1, fits
    )


# ── 06 ───────────────────────────────────────────────────────────────────────────────────────────


def _online(blocks, start=-1e30, of_block=False, output_too=True, add_maximum=True):
    top, total, out = torch.tensor(start, dtype=torch.float64), 0.0, 0.0
    for scores, values in blocks:
        new = scores.max() if of_block else torch.maximum(top, scores.max())
        weights, factor = (scores - new).exp(), (top - new).exp()
        total = total * factor + weights.sum()
        out = out * (factor if output_too else 1) + weights @ values
        top = new
    return out / total, top * add_maximum + total.log()


def _outputs_of_all(blocks):
    parts = [(x.softmax(0).nan_to_num(0) @ v, x.logsumexp(0)) for x, v in blocks]
    out, lse = map(torch.stack, zip(*parts, strict=True))
    return lse.softmax(0) @ out, lse.logsumexp(0)


def _merge(o1, lse1, o2, lse2, *, share=None, whole=torch.logaddexp):
    """`share` is the first part's, of both lse; `whole` the lse of both."""
    first = torch.sigmoid(lse1 - lse2).nan_to_num(0) if share is None else share(lse1, lse2)
    return o1 * first[..., None] + o2 * (1 - first)[..., None], whole(lse1, lse2)


def _no_maximum(a, b):
    return a.exp() / (a.exp() + b.exp())


def _tiles(q, k, v, *, causal, block_q, block_k, offset=None, leaves=1):
    """Right with offset s_k − s_q. leaves: 1 at the right tile, 0 by the row's number, −1 never."""
    out, lse = torch.zeros_like(q), torch.full_like(q[..., 0], -math.inf)
    at = offset(q.shape[2], k.shape[2]) if offset else k.shape[2] - q.shape[2]
    for rows in torch.arange(q.shape[2]).split(block_q):
        state = None
        for columns in torch.arange(k.shape[2]).split(block_k):
            if causal and leaves >= 0 and columns[0] > rows[-1] + at * leaves:
                break
            scores = q[:, :, rows] @ k[:, :, columns].mT * q.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(columns > rows[:, None] + at, -math.inf)
            part = scores.softmax(-1).nan_to_num(0) @ v[:, :, columns], scores.logsumexp(-1)
            state = part if state is None else flash.merge(*state, *part)
        if state:
            out[:, :, rows], lse[:, :, rows] = state
    return out, lse


def _no_tiles(q, k, v, *, causal, block_q, block_k):
    return flash.plain(q, k, v, causal=causal)


def _whole_rows(q, k, v, *, causal, block_q, block_k):
    """Blocks of queries, each against all keys at once."""
    return _tiles(q, k, v, causal=causal, block_q=block_q, block_k=k.shape[2])


# ── 07 ───────────────────────────────────────────────────────────────────────────────────────────


def _ordered(first, x, comm):
    right, left, out = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size, torch.empty_like(x)
    if first(comm.rank, comm.size):
        comm.send(x, right)
        return comm.recv(out, left)
    comm.recv(out, left)
    comm.send(x, right)
    return out


def _posted(x, comm):
    sent = comm.isend(x, (comm.rank + 1) % comm.size)
    out = comm.recv(torch.empty_like(x), (comm.rank - 1) % comm.size)
    sent.wait()
    return out


def _parents(children, x, comm):
    """A tree that is told by the children of each rank."""
    x = x.clone()
    for parent in range(comm.size):
        if comm.rank in children(parent):
            comm.recv(x, parent)
    for child in children(comm.rank):
        if child < comm.size:
            comm.send(x, child)
    return x


def _floor_of_log(x, comm):
    x = x.clone()
    for width in (2**k for k in range(int(math.log2(comm.size)))):
        if comm.rank < width and comm.rank + width < comm.size:
            comm.send(x, comm.rank + width)
        elif width <= comm.rank < 2 * width:
            comm.recv(x, comm.rank - width)
    return x


def _sum_of_zeros(x, comm):
    return comm.all_reduce(x if comm.rank == 0 else torch.zeros_like(x))


def _cut_and_gather(x, comm):
    padded = F.pad(x.flatten(), (0, -x.numel() % comm.size))
    return comm.all_gather(comm.scatter(padded))[: x.numel()].view_as(x)


def _ring(x, comm, more=0, equal=False, wide=None):
    n, right, left = comm.size, (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    whole = (x if wide is None else x.to(wide)).clone()
    sizes = [len(x) // n] * n if equal else collectives.shares(len(x), n)
    pieces = whole[: sum(sizes)].split(sizes)
    for k in range(n - 1):
        give, take = pieces[(comm.rank - k) % n], pieces[(comm.rank - k - 1) % n]
        comm.send_recv(give, right, take, left, reduce="sum")
    for k in range(n - 1 + more):
        comm.send_recv(pieces[(comm.rank + 1 - k) % n], right, pieces[(comm.rank - k) % n], left)
    return whole.to(x.dtype)


def _complains(all_reduce, world, *, bits=all, busiest=None, total=False, exact=False):
    """Which complaints a test has: `bits` of which ranks, bytes of the `busiest` or in all."""
    given = [torch.randn(67, generator=torch.Generator().manual_seed(r)) for r in range(world.size)]
    kept = [x.clone() for x in given]
    found = world.run(lambda rank: all_reduce(given[rank.rank], rank.comm("dp")))
    sent = world.ledger.by("rank") or {0: 0}
    ring = 2 * kept[0].nbytes
    near = torch.equal if exact else partial(torch.allclose, atol=1e-4)
    faults = {
        "values": all(near(y, sum(kept)) for y in found),
        "bits": bits is None or bits(torch.equal(y, found[0]) for y in found),
        "input": bits is None or all(map(torch.equal, given, kept)),
        "bytes": busiest is None or busiest(sent) <= ring,
        "total": not total or sum(sent.values()) <= world.size * ring,
    }
    return [name for name, fine in faults.items() if not fine]


def _most(sent):
    return max(sent.values())


def _first_two(same):
    return all(itertools.islice(same, 2))


# ── 08 ───────────────────────────────────────────────────────────────────────────────────────────


def _permutation(length, seed):
    return torch.randperm(length, generator=torch.Generator().manual_seed(seed)).tolist()


def _dealt(order, length, rank, size, epoch, once=False):
    """Every size-th of an order, which is repeated until `size` divides it, or `once`."""
    order = order(length, rank, epoch)
    spare = order[: -length % size] if once else order * size
    return (order + spare)[: len(order) + len(spare) if once else -(-length // size) * size][
        rank::size
    ]


def _hooks(module, comm, start="all", hook=None):
    for parameter in module.parameters():
        if start == "mean":
            parameter.data.copy_(comm.all_reduce(parameter.data) / comm.size)
        elif start == "all" or (start == "trained" and parameter.requires_grad):
            comm.broadcast(parameter.data, out=parameter.data)
    for parameter in filter(lambda parameter: parameter.requires_grad, module.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(hook or _reduced, comm))


def _hooks_once(module, comm):
    handles = {}

    def hook(parameter):
        _reduced(comm, parameter)
        handles[parameter].remove()

    for parameter in module.parameters():
        comm.broadcast(parameter.data, out=parameter.data)
        if parameter.requires_grad:
            handles[parameter] = parameter.register_post_accumulate_grad_hook(hook)


def _reduced(comm, parameter):
    parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size)


def _weights_reduced(comm, parameter):
    parameter.data = comm.all_reduce(parameter.data) / comm.size


def _told(comm, parameter):
    parameter.grad.copy_(comm.broadcast(parameter.grad))


def _told_and_reduced(comm, parameter):
    comm.broadcast(parameter.data, out=parameter.data)
    _reduced(comm, parameter)


class _Buckets:
    """The wrapper of the lab, repaired; each slip is a switch."""

    start, at_the_end, restores, insists, collects = "all", True, True, True, False

    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.bucket_bytes = module, comm, bucket_bytes
        self.waiting, self.armed, self.sends = [], False, True
        _hooks(module, comm, self.start, hook=self.ready)

    def ready(self, _, parameter):
        if not (self.sends or self.collects):
            return
        self.waiting.append(parameter)
        if self.at_the_end and not self.armed:
            self.armed = True
            torch.autograd.Variable._execution_engine.queue_callback(self.done)
        if self.sends and sum(p.nbytes for p in self.waiting) >= self.bucket_bytes:
            self.flush()

    def done(self):
        self.armed = False
        if self.sends and self.waiting:
            self.flush()

    def flush(self):
        sums = self.comm.all_reduce(torch.cat([p.grad.flatten() for p in self.waiting]))
        for p in self.waiting:
            mine, sums = sums[: p.numel()], sums[p.numel() :]
            p.grad.copy_(mine.view_as(p) / self.comm.size)
        self.waiting.clear()

    @contextlib.contextmanager
    def no_sync(self):
        before, self.sends = self.sends, False
        try:
            yield
        except BaseException:
            self.sends = before if self.insists else self.sends
            raise
        self.sends = before if self.restores else True

    def __call__(self, *args):
        if self.waiting and not self.at_the_end:
            self.flush()
        return self.module(*args)


class _CountsFrozen(_Buckets):
    """Knows the end by the number of parameters, frozen ones among them."""

    seen = 0

    def ready(self, _, parameter):
        if not self.sends:
            return
        self.waiting.append(parameter)
        self.seen = (self.seen + 1) % len(list(self.module.parameters()))
        if not self.seen or sum(p.nbytes for p in self.waiting) >= self.bucket_bytes:
            self.flush()


# ── 09 ───────────────────────────────────────────────────────────────────────────────────────────


class _Sharded:
    """A sharded optimizer; each slip is a switch."""

    adds_up = narrow = own_gradient = masks = leaves = gathers_first = False

    def __init__(self, w, comm, make):
        self.w, self.comm, self.dealt = w, comm, zero.partition(w.numel(), comm.size)
        mine = self.own(w.detach()).clone()
        self.mine = w if self.masks else nn.Parameter(mine.float() if self.narrow else mine)
        self.inner = make([self.mine])

    def padded(self, x):
        return F.pad(x, (0, self.dealt.padding))

    def own(self, x):
        return self.padded(x).split(self.dealt.share)[self.comm.rank]

    def step(self):
        if self.leaves and self.comm.rank * self.dealt.share >= self.w.numel():
            return
        before = self.comm.all_gather(self.mine.detach()) if self.gathers_first else None
        share = self.comm.reduce_scatter(self.padded(self.w.grad)) / self.comm.size
        share = self.own(self.w.grad).clone() if self.own_gradient else share
        if self.masks:
            whole = torch.zeros(self.comm.size, self.dealt.share, dtype=share.dtype)
            whole[self.comm.rank] = share
            share = whole.flatten()[: self.w.numel()]
        elif self.adds_up and self.mine.grad is not None:
            share = share + self.mine.grad
        self.mine.grad = share.to(self.mine.dtype)
        self.inner.step()
        new = self.own(self.mine.detach()).clone() if self.masks else self.mine.detach()
        new = self.comm.all_gather(new) if before is None else before
        self.w.data.copy_(new[: self.w.numel()])


def _order(count, ahead=1, ahead_again=1, drops=()):
    """The schedule with units gathered so far ahead; `drops` leaves steps of unit 0 out."""
    steps, whole = [], set()

    def gather(units):
        for i in units:
            if 0 <= i < count and i not in whole:
                steps.append(("gather", i))
                whole.add(i)

    for i in range(count):
        gather(range(i, i + ahead + 1))
        steps.append(("forward", i))
        if i < count - 1:
            steps.append(("free", i))
            whole.remove(i)
    for i in reversed(range(count)):
        gather(range(i, i - ahead_again - 1, -1))
        steps += [("backward", i), ("free", i), ("reduce", i)]
        whole.remove(i)
    last = len(steps) - 3
    return [step for k, step in enumerate(steps) if k < last or step not in drops]


class _Half(_Sharded):
    """Level 2 with bf16 weights, repaired; `norm` and `scaled` are the slips."""

    norm, scaled = None, None

    def __init__(self, w, comm, make):
        super().__init__(w, comm, make)
        self.mine = nn.Parameter(
            self.mine.detach().to(torch.bfloat16 if self.narrow else torch.float32)
        )
        self.inner = make([self.mine])

    def step(self, max_norm):
        share = self.comm.reduce_scatter(self.padded(self.w.grad)).float() / self.comm.size
        norm = self.comm.all_reduce(share.square().sum()).sqrt()
        norm = self.norm(share, norm) if self.norm else norm
        scaled = self.scaled or (lambda x, norm, most: x * min(1.0, most / norm.item()))
        self.mine.grad = scaled(share, norm, max_norm).to(self.mine.dtype)
        self.inner.step()
        new = self.comm.all_gather(self.mine.detach().bfloat16())
        self.w.data.copy_(new[: self.w.numel()])
        return self.told(norm, max_norm)

    def told(self, norm, max_norm):
        return norm


def _slip(of, **switches):
    return type(of.__name__, (of,), switches)


_ADD = {"whole": lambda a, b: a + b}
_NO_KEYS_BEFORE = {"offset": lambda s_q, s_k: max(0, s_k - s_q)}
_ONE_QUERY = {"offset": lambda s_q, s_k: s_k - 1 if s_q == 1 else 0}
_IN_BF16 = lambda self, x, _: self.comm.all_reduce(x.bfloat16().square().sum()).sqrt()  # noqa: E731
_OF_OWN = lambda self, x, _: self.w.grad.float().norm()  # noqa: E731
_CLAMPED = staticmethod(lambda x, norm, most: x.clamp(-most, most))
_UNCLIPPED = staticmethod(lambda x, norm, most: x)
_CLIPPED_NORM = lambda self, norm, most: norm.clamp(max=most)  # noqa: E731

# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "accumulation/accumulate": [
        ("mean over those with a token",
         partial(_weighs, lambda seen, n, all_: 1 / sum(map(bool, all_))),
         "unequal token counts", "its share"),
        ("the mean of all losses", _mean_of_losses, "the loss", "weighted losses"),
        ("the total so far", partial(_weighs, lambda seen, n, all_: n / seen),
         "equal micro-batches", "the mean of their gradients"),
        ("a second forward pass for the loss", _twice, "work", "detached"),
        ("stops at an empty one", partial(_weighs, _by_tokens, until_empty=True),
         "a micro-batch without targets", "no weight"),
    ],
    "accumulation/bug-hunt": [
        ("the tail over k", partial(_epoch, tail_by_k=True),
         "every micro-batch counts", "another denominator"),
        ("counts a step too many", partial(_epoch, extra=True),
         "every micro-batch counts", "counts steps"),
        ("one lost at each step", partial(_epoch, skips=True),
         "full steps", "goes forward and backward once"),
        ("clips too late", partial(_clips, late=True), "clipping", "Clip once"),
        ("clips values", _clips, "clipping", "changes the direction"),
    ],
    "accumulation/configure": [
        ("one step more where it does not divide", _rounds_up, "tokens in the batch", "must divide"),
        ("the rest of a share lost", partial(_fills, _largest), "tokens in the batch", "must divide"),
        ("twice as many while it divides", partial(_fills, _doubles),
         "fewest steps", "the largest that fits"),
        ("the next one while it divides", partial(_fills, _first_that_does_not_divide),
         "fewest steps", "the largest that fits"),
        ("no division by the GPUs", _no_gpus, "tokens in the batch", "number of GPUs"),
    ],
    "flash/online-softmax": [
        ("starts at 0", partial(_online, start=0.0), "huge scores", "before the first"),
        ("starts at −10 000", partial(_online, start=-1e4), "huge scores", "never replaced"),
        ("starts at −∞", partial(_online, start=-math.inf),
         "a masked first block", "lowest finite"),
        ("each block its maximum", partial(_online, of_block=True), "huge scores", "of the block"),
        ("the sum alone rescaled", partial(_online, output_too=False),
         "a larger maximum comes later", "the output so far is not"),
        ("log of the sum alone", partial(_online, add_maximum=False),
         "the log-sum-exp", "maximum + log"),
        ("an output of each block", _outputs_of_all,
         "blocks are forgotten", "an output or a sum of its own"),
    ],
    "flash/merge": [
        ("half and half", partial(_merge, share=lambda a, b: torch.full_like(a, 0.5)),
         "outputs", "do not weigh the same"),
        ("exp of lse as it is", partial(_merge, share=_no_maximum), "large scores", "infinite"),
        ("lse weigh", partial(_merge, share=lambda a, b: a / (a + b)),
         "outputs", "share of the whole"),
        ("the larger takes all", partial(_merge, share=lambda a, b: (a > b).to(a.dtype)),
         "outputs", "share of the whole"),
        ("lse added", partial(_merge, **_ADD), "log-sum-exp", "not their logarithms"),
        ("the larger lse", partial(_merge, whole=torch.maximum),
         "log-sum-exp", "not their logarithms"),
        ("lse of the result detached",
         partial(_merge, whole=lambda a, b: torch.logaddexp(a, b).detach()),
         "gradients", "no detach"),
    ],
    "flash/causal-hunt": [
        ("the way out by row number", partial(_tiles, leaves=0),
         "new tokens after a cache", "same offset"),
        ("no way out", partial(_tiles, leaves=-1), "still in tiles", "all mask"),
        ("one key too many", partial(_tiles, offset=lambda s_q, s_k: s_k - s_q + 1),
         "as many queries as keys", "keys 0 … i"),
        ("no negative offset", partial(_tiles, **_NO_KEYS_BEFORE),
         "more queries than keys", "before every key"),
        ("one new token alone", partial(_tiles, **_ONE_QUERY),
         "new tokens after a cache", "end of the cache"),
        ("plain attention", _no_tiles, "still in tiles", "scores exist again"),
        ("rows of all keys", _whole_rows, "still in tiles", "scores exist again"),
    ],
    "collectives/ordered-sends": [
        ("rank 0 sends first", partial(_ordered, lambda rank, n: rank == 0), "steps", "a queue"),
        ("the lower half sends first", partial(_ordered, lambda rank, n: 2 * rank < n),
         "steps", "a queue"),
        ("every third sends first", partial(_ordered, lambda rank, n: rank % 3 == 0),
         "steps", "a queue"),
        ("nobody sends first", partial(_ordered, lambda rank, n: False), "values", "receive"),
        ("posts its send", _posted, "steps", "isend"),
    ],
    "collectives/broadcast-tree": [
        ("two children each", partial(_parents, lambda r: (2 * r + 1, 2 * r + 2)),
         "steps", "double"),
        ("one child each", partial(_parents, lambda r: (r + 1,)), "steps", "the one before it"),
        ("rounds rounded down", _floor_of_log, "any number of ranks", "a round missing"),
        ("a sum with zeros", _sum_of_zeros, "values", "yours to write"),
        ("scattered and gathered", _cut_and_gather, "values", "yours to write"),
    ],
    "collectives/ring-all-reduce": [
        ("a hop too many", partial(_ring, more=1), "bytes sent", "are enough"),
        ("equal pieces, no rest", partial(_ring, equal=True),
         "ranks that don't divide n", "It works when N divides"),
        ("the mean of all", lambda x, comm: _ring(x, comm) / comm.size,
         "values", "leave that to the caller"),
        ("travels as fp64", partial(_ring, wide=torch.float64), "dtypes", "costs bytes"),
        ("travels as bf16", partial(_ring, wide=torch.bfloat16), "values", "That is rounding"),
    ],
    "collectives/missing-test": [
        ("sums alone", partial(_complains, bits=None),
         "catches ranks that drift apart", "torch.randn"),
        ("bytes of all together", partial(_complains, total=True),
         "catches an overworked rank", "the busiest rank"),
        ("bytes of rank 0", partial(_complains, busiest=lambda sent: sent.get(0, 0)),
         "catches an overworked rank", "may be any"),
        ("bits of two ranks", partial(_complains, bits=_first_two, busiest=_most),
         "catches ranks that drift apart", "all ranks with each other"),
        ("exact sums", partial(_complains, busiest=_most, exact=True),
         "lets a sound ring pass", "allclose"),
    ],
    "data_parallel/sampler": [
        ("a seed for each rank",
         partial(_dealt, lambda n, rank, epoch: _permutation(n, 100 * epoch + rank)),
         "nobody works twice", "one* permutation"),
        ("rest left out",
         lambda n, rank, size, epoch: _permutation(n, epoch)[: n // size * size][rank::size],
         "everything is seen", "The tail is dropped"),
        ("begun again once",
         partial(_dealt, lambda n, rank, epoch: _permutation(n, epoch), once=True),
         "equal shares", "⌈length / N⌉"),
        ("rotated by the epoch",
         partial(_dealt, lambda n, rank, epoch: [(i + epoch) % n for i in range(n)]),
         "a new order in every epoch", "Shuffle"),
        ("an order for two epochs",
         partial(_dealt, lambda n, rank, epoch: _permutation(n, epoch // 2)),
         "a new order in every epoch", "depend on the epoch"),
    ],
    "data_parallel/hooks": [
        ("starts as drawn", partial(_hooks, start="none"), "equal starts", "Broadcast rank 0's"),
        ("starts what is trained", partial(_hooks, start="trained"),
         "a frozen layer", "rank 0's weights all the same"),
        ("hooks that go after their first call", _hooks_once,
         "the gradient of the whole batch", "every backward pass"),
        ("starts with the mean", partial(_hooks, start="mean"),
         "equal starts", "the tensor of rank 0"),
        ("weights in place of gradients", partial(_hooks, hook=_weights_reduced),
         "the gradient of the whole batch", "reduce parameter.grad"),
        ("rank 0's gradient for all", partial(_hooks, hook=_told),
         "the gradient of the whole batch", "hands out one rank's gradient"),
        ("weights told in every hook", partial(_hooks, hook=_told_and_reduced),
         "bytes sent", "once"),
    ],
    "data_parallel/bug-hunt": [
        ("starts as they were drawn", _slip(_Buckets, start="none"),
         "equal starts", "Broadcast rank 0's"),
        ("starts only what is trained", _slip(_Buckets, start="trained"),
         "a frozen layer", "rank 0's weights all the same"),
        ("the rest leaves at the next call", _slip(_Buckets, at_the_end=False),
         "the last bucket", "still waits"),
        ("an inner block ends the outer", _slip(_Buckets, restores=False),
         "no_sync in no_sync", "what it was before"),
        ("counts frozen parameters", _CountsFrozen, "a frozen layer", "gets no gradient"),
        ("quiet after an error", _slip(_Buckets, insists=False), "after an error", "finally"),
        ("waits in the bucket in every micro-batch", _slip(_Buckets, collects=True),
         "accumulation", "inside no_sync"),
    ],
    "zero/optimizer": [
        ("adds gradients of all steps", _slip(_Sharded, adds_up=True), "weights", "every step"),
        ("a share in fp32", _slip(_Sharded, narrow=True), "weights", "another dtype"),
        ("a gradient of its own", _slip(_Sharded, own_gradient=True),
         "weights", "this rank's own gradient"),
        ("zeros for the others", _slip(_Sharded, masks=True), "bytes held", "nothing is sharded"),
        ("nothing to do, so gone", _slip(_Sharded, leaves=True),
         "lengths that N does not divide", "the same collective calls"),
        ("gathers, then steps", _slip(_Sharded, gathers_first=True), "weights", "No weight moves"),
    ],
    "zero/schedule": [
        ("two units ahead", partial(_order, ahead=2, ahead_again=2),
         "bytes held", "no more than the next one"),
        ("no gather ahead on the way back", partial(_order, ahead_again=0),
         "prefetch", "one unit earlier"),
        ("two ahead on the way back", partial(_order, ahead_again=2),
         "bytes held", "in the backward pass too"),
        ("unit 0 is not reduced", partial(_order, drops={("reduce", 0)}),
         "everything is there when it is used", "Reduce every gradient"),
        ("unit 0 stays whole", partial(_order, drops={("free", 0)}),
         "everything is there when it is used", "free every unit"),
    ],
    "zero/repair": [
        ("a master in bf16", _slip(_Half, narrow=True), "small updates", "kept in fp32"),
        ("squares in bf16", _slip(_Half, norm=_IN_BF16), "clipping", "Measure in fp32"),
        ("each rank its gradient's norm", _slip(_Half, norm=_OF_OWN),
         "clipping", "a rank's own gradient"),
        ("measures, does not clip", _slip(_Half, scaled=_UNCLIPPED),
         "clipping", "Scale this rank's share"),
        ("clamps", _slip(_Half, scaled=_CLAMPED), "clipping", "the same factor"),
        ("tells the norm afterwards", _slip(_Half, told=_CLIPPED_NORM),
         "clipping", "the one from before"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
