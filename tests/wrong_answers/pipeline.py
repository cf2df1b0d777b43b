"""Wrong answers to the exercises of `pipeline`."""

import functools
import itertools

import torch

from labutils import schedule

from . import Wrong

# ── 1F1B ─────────────────────────────────────────────────────────────────────────────────────────


def _warmed(warm, drain=True, clip=True):
    """F first, then F and B in turn, then the rest of B; `warm` forwards first."""

    def order(rank, p, m):
        ahead = min(warm(rank, p, m), m) if clip else warm(rank, p, m)
        ops = [f"F{k}" for k in range(ahead)]
        for k in range(m - ahead):
            ops += [f"F{ahead + k}", f"B{k}"]
        return ops + [f"B{k}" for k in range(max(0, m - ahead), m)] * drain

    return order


def _same_number(rank, p, m):
    """In the steady state F and B of the same micro-batch."""
    warm = min(p - 1 - rank, m)
    pairs = [op for k in range(warm, m) for op in (f"F{k}", f"B{k}")]
    return [f"F{k}" for k in range(warm)] + pairs + [f"B{k}" for k in range(warm)]


def _naive_with_few(rank, p, m):
    """Right from m = p on; with fewer, each micro-batch there and back before the next."""
    return _warmed(lambda *_: p - 1 - rank if m >= p else 0)(rank, p, m)


def _gpipe_with_few(rank, p, m):
    """Right from m = p on; with fewer, all forwards first."""
    return _warmed(lambda *_: p - 1 - rank if m >= p else m)(rank, p, m)


def _from_one(rank, p, m):
    return [f"{op[0]}{int(op[1:]) + 1}" for op in _warmed(lambda *_: p - 1 - rank)(rank, p, m)]


def _youngest(rank, p, m):
    """A stack in place of a queue: the last forward comes back first."""
    waiting, ops = [], []
    for k in range(m):
        ops.append(("F", k))
        waiting.append(k)
        if len(waiting) > p - 1 - rank:
            ops.append(("B", waiting.pop()))
    return ops + [("B", waiting.pop()) for _ in range(len(waiting))]


def _in_waves(rank, p, m):
    """GPipe in waves of p micro-batches."""
    return " ".join(
        f"{kind}{k}"
        for first in range(0, m, p)
        for kind in "FB"
        for k in range(first, min(first + p, m))
    )


# ── what a rank holds ────────────────────────────────────────────────────────────────────────────


def _walk(ops, nbytes, frees, most=max):
    held, counts = 0, [0]
    for op in ops:
        held += nbytes[op.stage] * ((op.kind == "F") - (op.kind == frees))
        counts.append(held)
    return most(counts)


def _last_kind(ops):
    return "W" if any(op.kind == "W" for op in ops) else "B"


def _largest_times_most(ops, nbytes):
    """The most passes in flight, each as large as the largest stage."""
    count = _walk(ops, [1] * len(nbytes), _last_kind(ops))
    return count * max(nbytes[op.stage] for op in ops)


def _after_each(ops, nbytes):
    """Counted behind each pair of operations: a peak between F and its B is not seen."""
    held, most, frees = 0, 0, _last_kind(ops)
    for n, op in enumerate(ops):
        held += nbytes[op.stage] * ((op.kind == "F") - (op.kind == frees))
        most = max(most, held) if n % 2 else most
    return most


def _by_micro_batch(ops, nbytes):
    """A dictionary by micro-batch: a second chunk takes the place of the first."""
    alive, most, frees = {}, 0, _last_kind(ops)
    for kind, stage, k in ops:
        if kind == "F":
            alive[k] = nbytes[stage]
        elif kind == frees:
            alive.pop(k, None)
        most = max(most, sum(alive.values()))
    return most


def _where_most_are(ops, nbytes):
    """The bytes at the moment in which the most passes are in flight."""
    frees = _last_kind(ops)
    signs = [(op.kind == "F") - (op.kind == frees) for op in ops]
    counts = itertools.accumulate(signs)
    held = itertools.accumulate(s * nbytes[op.stage] for s, op in zip(signs, ops, strict=True))
    return max(zip(counts, held, strict=True))[1]


def _at_the_last_forward(ops, nbytes):
    """What is held when the last forward has begun."""
    frees = _last_kind(ops)
    last = max(i for i, op in enumerate(ops) if op.kind == "F")
    return _walk(ops[: last + 1], nbytes, frees, lambda counts: counts[-1])


def _half_each(ops, nbytes):
    """B frees a half and W the other."""
    held = most = 0
    split = any(op.kind == "W" for op in ops)
    for op in ops:
        held += nbytes[op.stage] * {"F": 1, "B": -0.5 if split else -1, "W": -0.5}[op.kind]
        most = max(most, held)
    return most


# ── place W ──────────────────────────────────────────────────────────────────────────────────────


def _lagging(lag, before=False):
    """1F1B with each W so many backwards behind its B."""

    def order(rank, p, m):
        ops, owed = [], []
        for op in schedule.one_f_one_b(p, m).ranks[rank]:
            owed += [f"W{op.micro_batch}"] * (op.kind == "B")
            if before and op.kind == "B":
                ops.append(owed.pop(0))
            ops.append(f"{op.kind}{op.micro_batch}")
            if op.kind == "B" and len(owed) > lag(rank, p, m):
                ops.append(owed.pop(0))
        return ops + owed

    return order


def _unclipped(rank, p, m):
    """p − 1 − rank forwards first, whatever m is."""
    ops = [f"F{k}" for k in range(p - 1 - rank)]
    owed = []
    for k in range(m):
        forward = k + p - 1 - rank
        ops += [f"F{forward}"] * (forward < m) + [f"B{k}"]
        owed.append(f"W{k}")
        ops += [owed.pop(0)] if len(owed) > rank else []
    return ops + owed


def _gpipe_split(rank, p, m):
    return [f"{kind}{k}" for kind in "FBW" for k in range(m)]


def _full_first(rank, p, m):
    """Forwards until p are held, on every rank."""
    ops, f, b, w = [], 0, 0, 0
    while w < m:
        if f < m and f - w < p:
            ops, f = [*ops, ("F", f)], f + 1
        elif b < f:
            ops, b = [*ops, ("B", b)], b + 1
        else:
            ops, w = [*ops, ("W", w)], w + 1
    return ops


def _by_name(make):
    """The order of a schedule of the library."""
    return lambda rank, p, m: list(map(str, make(p, m).ranks[rank]))


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


def _interleaved_warm(warm):
    """The interleaved order with another number of forwards first."""

    def order(rank, p, m, chunks):
        ops = schedule.interleaved(p, m, chunks).ranks[rank]
        forward, backward = ([op for op in ops if op.kind == kind] for kind in "FB")
        first = min(warm(p - 1 - rank, p, chunks), len(forward))
        pairs = itertools.chain(*zip(forward[first:], backward, strict=False))
        return [*forward[:first], *pairs, *backward[len(forward) - first :]]

    return order


def _interleaved(after=lambda rank, p: p - 1 - rank, back=lambda chunk, chunks: chunks - 1 - chunk):
    """The interleaved order, with so many ranks behind, and the chunk that comes back."""

    def order(rank, p, m, chunks):
        jobs = [
            (chunk, first + k)
            for first, chunk, k in itertools.product(range(0, m, p), range(chunks), range(p))
        ]
        warm = min(2 * after(rank, p) + (chunks - 1) * p, len(jobs))
        forward = [("F", rank + chunk * p, k) for chunk, k in jobs]
        backward = [("B", rank + back(chunk, chunks) * p, k) for chunk, k in jobs]
        ops = forward[:warm]
        for pair in zip(forward[warm:], backward, strict=False):
            ops += pair
        return ops + backward[len(jobs) - warm :]

    return order


# ── weight gradients later ───────────────────────────────────────────────────────────────────────


def _halves(bound=True, adds=True, now=False, stale=False):
    """B, and a function that is W, with the mistakes that are named."""

    def backward(weights, inputs, dy):
        owed, first = [], dy
        for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
            grad, dy = (first if stale else dy), dy @ weight
            owed.append((weight, grad, x))

        def w():
            for kept in owed:
                weight, grad, x = kept if bound else owed[-1]
                product = grad.mT @ x
                weight.grad = product + (weight.grad if adds and weight.grad is not None else 0)

        if now:
            w()
        return dy, (lambda: None) if now else w

    return backward


def _twice(weights, inputs, dy):
    """Both gradients for each layer, W at its output's gradient times the weight."""
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        dy = dy @ weight
        owed.append((weight, dy, x))
    return dy, lambda: [setattr(each, "grad", grad.mT @ x) for each, grad, x in owed]


def _moves_nothing(weights, inputs, dy):
    """All products in B; W only adds what is there."""
    products = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        products.append((weight, dy.mT @ x))
        dy = dy @ weight

    def w():
        for weight, product in products:
            weight.grad = product if weight.grad is None else weight.grad + product

    return dy, w


def _clears(weights, inputs, dy):
    """B sets .grad to None, as an optimizer's zero_grad() does."""
    for weight in weights:
        weight.grad = None
    return _halves()(weights, inputs, dy)


_OWED = []


def _one_list(weights, inputs, dy):
    """One list for all micro-batches: the first W pays whatever is owed."""
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        _OWED.append((weight, dy, x))
        dy = dy @ weight

    def w():
        while _OWED:
            weight, grad, x = _OWED.pop()
            product = grad.mT @ x
            weight.grad = product if weight.grad is None else weight.grad + product

    return dy, w


def _in_another_way(product):
    """All products in B, in another way than by @; W only adds what is there."""

    def backward(weights, inputs, dy):
        owed = []
        for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
            owed.append((weight, product(dy, x)))
            dy = dy @ weight

        def w():
            for weight, found in owed:
                found = found.sum(0) if found.dim() == 3 else found
                weight.grad = found if weight.grad is None else weight.grad + found

        return dy, w

    return backward


def _by_columns(grad, x):
    return torch.stack([torch.mv(grad.T, column) for column in x.T], 1)


def _walks_again(weights, inputs, dy):
    """W goes along the whole chain a second time."""
    first = dy
    for weight in reversed(weights):
        dy = dy @ weight

    def w():
        grad = first
        for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
            product, grad = grad.mT @ x, grad @ weight
            weight.grad = product if weight.grad is None else weight.grad + product

    return dy, w


def _asks_autograd(weights, inputs, dy):
    """autograd, first for the input and then for the weights, from a graph of its own."""
    leaves = [weight.detach().requires_grad_() for weight in weights]
    x = inputs[0].detach().requires_grad_()
    y = functools.reduce(torch.nn.functional.linear, leaves, x)
    (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)

    def w():
        for weight, product in zip(weights, torch.autograd.grad(y, leaves, dy), strict=True):
            weight.grad = product if weight.grad is None else weight.grad + product

    return dx, w


def _transposed(weights, inputs, dy):
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        owed.append((weight, dy, x))
        dy = dy @ weight
    return dy, lambda: [setattr(weight, "grad", x.mT @ grad) for weight, grad, x in owed]


def _last_layer_first(weights, inputs, dy):
    """Inputs are paired with weights from the wrong end."""
    owed = []
    for x, weight in zip(inputs, reversed(weights), strict=True):
        owed.append((weight, dy, x))
        dy = dy @ weight
    return dy, lambda: [setattr(weight, "grad", grad.mT @ x) for weight, grad, x in owed]


_LEGAL = "every operation, in a legal order"
def _kept_late(weights, inputs, dy):
    """A right backward pass."""
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        owed.append((weight, dy, x))
        dy = dy @ weight

    def w():
        for weight, grad, x in owed:
            weight.grad = grad.mT @ x + (0 if weight.grad is None else weight.grad)

    return dy, w


def _into_dy(weights, inputs, dy):
    """No memory for another gradient."""
    return dy.copy_(dy @ weights[-1]) if len(weights) == 1 else dy, lambda: None


def _of_a_copy(weights, inputs, dy):
    return _kept_late([weight.clone() for weight in weights], inputs, dy)


def _w_in_w(*args):
    dx, w = _kept_late(*args)
    return dx, lambda: w


WRONG = {
    "pipeline/one-f-one-b": (
        Wrong("numbers below 0", lambda rank, p, m: [("F", -k) for k in range(m)] + [
            ("B", -k) for k in range(m)], "every operation, in a legal order", "from 0 to m"),
        Wrong("GPipe", _warmed(lambda rank, p, m: m), "memory", "needs no more than p − i"),
        Wrong("one forward too many", _warmed(lambda rank, p, m: p - rank), "memory", "p − 1 − i"),
        Wrong(
            "all ranks warm up like the first",
            _warmed(lambda rank, p, m: p - 1),
            "memory",
            "needs no more than p − i",
        ),
        Wrong("naive", _warmed(lambda rank, p, m: 0), "time", "could run ahead"),
        Wrong(
            "one forward ahead on all ranks but the last",
            _warmed(lambda rank, p, m: min(1, p - 1 - rank)),
            "time",
            "could run ahead",
        ),
        Wrong(
            "the warm-up grows with the rank",
            _warmed(lambda rank, p, m: rank),
            _LEGAL,
            "may not run fewer forwards first",
        ),
        Wrong(
            "no backwards at the end",
            _warmed(lambda rank, p, m: p - 1 - rank, drain=False),
            _LEGAL,
            "still owed",
        ),
        Wrong("F and B of one micro-batch in turn", _same_number, "time", "B0 first"),
        Wrong(
            "the warm-up is not cut to m",
            _warmed(lambda rank, p, m: p - 1 - rank, clip=False),
            "fewer micro-batches than ranks",
            "min(warm-up, m)",
        ),
        Wrong(
            "the backward comes first",
            lambda rank, p, m: [op for k in range(m) for op in (f"B{k}", f"F{k}")],
            _LEGAL,
            "needs its own forward",
        ),
        Wrong("naive with few", _naive_with_few, "as short as it can be with few", "travel alone"),
        Wrong("GPipe with few", _gpipe_with_few, "memory with few", "the last rank none"),
        Wrong("numbers from 1", _from_one, _LEGAL, "count from 0"),
        Wrong("a stack", _youngest, "time", "B0 first"),
        Wrong("waves of p", _in_waves, "memory", "needs no more than p − i"),
        Wrong(
            "half of the warm-up",
            _warmed(lambda rank, p, m: (p - 1 - rank) // 2),
            "time",
            "could run ahead",
        ),
        Wrong("words", lambda rank, p, m: ["forward"] * m, _LEGAL, "'F0', 'B0'"),
    ),
    "pipeline/peak": (
        Wrong("where the most are", _where_most_are, "several chunks", "need not be there"),
        Wrong("at the last forward", _at_the_last_forward, "several chunks", "need not be there"),
        Wrong(
            "B frees, always",
            lambda ops, nbytes: _walk(ops, nbytes, "B"),
            "W apart",
            "they go with W",
        ),
        Wrong(
            "W frees, always", lambda ops, nbytes: _walk(ops, nbytes, "W"), "1F1B", "lets them go"
        ),
        Wrong("count × largest", _largest_times_most, "several chunks", "nbytes[op.stage]"),
        Wrong("every second operation", _after_each, "1F1B", "the largest count"),
        Wrong("a dictionary by micro-batch", _by_micro_batch, "several chunks", "several stages"),
        Wrong("B frees a half", _half_each, "W apart", "they go with W"),
        Wrong("a constant", lambda ops, nbytes: sum(nbytes), "1F1B", "keep count"),
        Wrong(
            "all forwards",
            lambda ops, nbytes: sum(nbytes[op.stage] for op in ops if op.kind == "F"),
            "1F1B",
            "keep count along the order",
        ),
        Wrong(
            "the warm-up",
            lambda ops, nbytes: (
                nbytes[ops[0].stage]
                * len(list(itertools.takewhile(lambda op: op.kind == "F", ops)))
            ),
            "1F1B",
            "the largest count",
        ),
        Wrong(
            "what is held in the end",
            lambda ops, nbytes: _walk(ops, nbytes, _last_kind(ops), most=lambda counts: counts[-1]),
            "1F1B",
            "the largest count",
        ),
        Wrong(
            "the bytes of the first stage for all",
            lambda ops, nbytes: _walk(ops, [nbytes[ops[0].stage]] * len(nbytes), _last_kind(ops)),
            "several chunks",
            "nbytes[op.stage]",
        ),
    ),
    "pipeline/place-w": (
        Wrong("not cut to m", _unclipped, _LEGAL, "min(warm-up, m)"),
        Wrong("GPipe, W behind", _gpipe_split, "memory", "can delay no W"),
        Wrong("full first", _full_first, "time", ""),
        Wrong("ZB-H2", _by_name(schedule.zb_h2), "memory", "can delay no W"),
        Wrong(
            "two late at most",
            _lagging(lambda rank, p, m: min(rank, 2)),
            "time",
            "as many W as memory allows",
        ),
        Wrong(
            "W right after its B",
            _lagging(lambda rank, p, m: 0),
            "time",
            "makes the rank before wait",
        ),
        Wrong("all W at the end", _lagging(lambda rank, p, m: m), "memory", "can delay no W"),
        Wrong(
            "the first rank delays most",
            _lagging(lambda rank, p, m: p - 1 - rank),
            "memory",
            "can delay i of them",
        ),
        Wrong("one late on all ranks", _lagging(lambda rank, p, m: 1), "memory", "delay no W"),
        Wrong(
            "one late on all ranks but the first",
            _lagging(lambda rank, p, m: min(rank, 1)),
            "time",
            "as many W as memory allows",
        ),
        Wrong(
            "W before its B", _lagging(lambda rank, p, m: 0, before=True), _LEGAL, "a W its own B"
        ),
        Wrong(
            "no W at all",
            lambda rank, p, m: list(map(str, schedule.one_f_one_b(p, m).ranks[rank])),
            _LEGAL,
            "never runs W0",
        ),
    ),
    "pipeline/bug-hunt": (
        Wrong(
            "the one of the lab",
            _interleaved(lambda rank, p: (rank - 1) % p, lambda chunk, chunks: 1 - chunk),
            "three ranks and more",
            "may not run fewer forwards first",
        ),
        Wrong(
            "repaired for all chunks, but not for all ranks",
            _interleaved(lambda rank, p: abs(p // 2 - rank)),
            "three ranks and more",
            "deadlock",
        ),
        Wrong(
            "two chunks only",
            _interleaved(back=lambda chunk, chunks: 1 - chunk),
            "other numbers of chunks",
            "each p-th of them",
        ),
        Wrong(
            "the first chunk comes back first",
            _interleaved(back=lambda chunk, chunks: chunk),
            "two ranks",
            "comes back first",
        ),
        Wrong(
            "everybody warms up like the first",
            _interleaved(lambda rank, p: p - 1),
            "memory",
            "2(p − 1 − rank)",
        ),
        Wrong(
            "the number of the rank",
            _interleaved(lambda rank, p: rank),
            "two ranks",
            "may not run fewer forwards first",
        ),
        Wrong(
            "no room for the chunks",
            _interleaved_warm(lambda after, p, chunks: 2 * after),
            "two ranks",
            "its own forward",
        ),
        Wrong(
            "all forwards first",
            _interleaved_warm(lambda after, p, chunks: 10**9),
            "memory",
            "2(p − 1 − rank)",
        ),
        Wrong(
            "one more on each rank",
            _interleaved_warm(lambda after, p, chunks: 2 * after + (chunks - 1) * p + 1),
            "memory",
            "2(p − 1 − rank)",
        ),
        Wrong(
            "one rank at a time",
            lambda rank, p, m, chunks: [
                (kind, rank + c * p, k)
                for k in range(m)
                for kind, cs in (("F", range(chunks)), ("B", range(chunks - 1, -1, -1)))
                for c in cs
            ],
            "time",
            "ranks wait for each other",
        ),
    ),
    "pipeline/late-weights": (
        Wrong("bound late", _halves(bound=False), "several layers", "not when it is made"),
        Wrong("the last one stays", _halves(adds=False), "several micro-batches", "add to what"),
        Wrong("W in B", _halves(now=True), "one layer", "belong to W"),
        Wrong("one gradient for all layers", _halves(stale=True), "several layers", "layer's own"),
        Wrong("the gradient of the input in place of that of the output", _twice, "one layer", ""),
        Wrong("B clears .grad", _clears, "B and W in turn", "B leaves .grad alone"),
        Wrong("one list for all", _one_list, "B and W in turn", "what its own B owes"),
        Wrong(
            "outer products in B",
            _in_another_way(lambda grad, x: (grad[:, :, None] * x[:, None, :]).sum(0)),
            "what is multiplied when",
            "dy and the weight alone",
        ),
        Wrong(
            "outer products that W sums",
            _in_another_way(lambda grad, x: grad[:, :, None] * x.clone()[:, None, :]),
            "what is multiplied when",
            "dy and the weight alone",
        ),
        Wrong(
            "column by column in B",
            _in_another_way(_by_columns),
            "what is multiplied when",
            "dy and the weight alone",
        ),
        Wrong("dy in place", _into_dy, "one layer", "changes dy in place"),
        Wrong("of a copy", _of_a_copy, "one layer", "not of copies"),
        Wrong("W returns a W", _w_in_w, "one layer", "calls all that is owed"),
        Wrong("in fp32", lambda *args: (lambda dx, w: (dx.float(), w))(*_kept_late(*args)),
              "one layer", "in float32"),
        Wrong("W alone", lambda *args: _kept_late(*args)[1], "one layer", "no pair"),
        Wrong("moves nothing", _moves_nothing, "what is multiplied when", "moves nothing"),
        Wrong("walks again", _walks_again, "what is multiplied when", "second walk"),
        Wrong("autograd, twice", _asks_autograd, "what is multiplied when", "B needs one product"),
        Wrong("transposed", _transposed, "one layer", "grad.mT @ x"),
        Wrong("inputs from the wrong end", _last_layer_first, "several layers", ""),
    ),
}
