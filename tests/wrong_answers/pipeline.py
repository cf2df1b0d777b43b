"""Wrong answers to the exercises of `pipeline`."""

import itertools

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


# ── what a rank holds ────────────────────────────────────────────────────────────────────────────


def _walk(ops, nbytes, frees, most=max):
    held, counts = 0, [0]
    for op in ops:
        held += nbytes[op.stage] * ((op.kind == "F") - (op.kind == frees))
        counts.append(held)
    return most(counts)


def _last_kind(ops):
    return "W" if any(op.kind == "W" for op in ops) else "B"


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


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


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


_LEGAL = "every operation, in a legal order"
WRONG = {
    "pipeline/one-f-one-b": (
        Wrong("GPipe", _warmed(lambda rank, p, m: m), "memory", "more than ranks follow"),
        Wrong("one forward too many", _warmed(lambda rank, p, m: p - rank), "memory", "p − 1 − i"),
        Wrong(
            "all ranks warm up like the first",
            _warmed(lambda rank, p, m: p - 1),
            "memory",
            "more than ranks follow",
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
        Wrong("words", lambda rank, p, m: ["forward"] * m, _LEGAL, "'F0', 'B0'"),
    ),
    "pipeline/peak": (
        Wrong(
            "B frees, always",
            lambda ops, nbytes: _walk(ops, nbytes, "B"),
            "W apart",
            "they go with W",
        ),
        Wrong(
            "W frees, always", lambda ops, nbytes: _walk(ops, nbytes, "W"), "1F1B", "lets them go"
        ),
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
            "W apart",
            "they go with W",
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
    ),
}
