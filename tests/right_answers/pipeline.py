"""Right answers to the exercises of `pipeline`, in other styles than the reference."""

import collections
import functools
import itertools

import numpy as np
import torch

from labutils import schedule

# ── 1F1B ─────────────────────────────────────────────────────────────────────────────────────────


def _generator(rank, p, m):
    forward, backward = itertools.count(), itertools.count()
    yield from (f"F{next(forward)}" for _ in range(min(p - 1 - rank, m)))
    for done in range(m):
        if (k := next(forward)) < m:
            yield f"F{k}"
        yield f"B{next(backward)}"


def _capped(rank, p, m):
    """A forward while there is memory, otherwise a backward."""
    ops, f, b = [], 0, 0
    while b < m:
        kind, k = ("F", f) if f < m and f - b < p - rank else ("B", b)
        f, b = f + (kind == "F"), b + (kind == "B")
        ops.append((kind, np.int64(k)))
    return ops


def _sentence(rank, p, m):
    """One string, micro-batches from the last to the first."""
    warm = min(p - 1 - rank, m)
    letters = "F" * warm + "FB" * (m - warm) + "B" * warm
    count = collections.Counter()
    words = []
    for letter in letters:
        count[letter] += 1
        words.append(f"{letter}{m - count[letter]}")
    return " ".join(words)


# ── what a rank holds ────────────────────────────────────────────────────────────────────────────


def _accumulated(ops, nbytes):
    last = max(op.kind for op in ops)  # W comes after F and B in the alphabet
    last = last if last == "W" else "B"
    signs = {"F": 1, last: -1}
    return max(itertools.accumulate(signs.get(op.kind, 0) * nbytes[op.stage] for op in ops))


def _numpy(ops, nbytes):
    frees = "W" if "W" in {op.kind for op in ops} else "B"
    change = np.array([(op.kind == "F") * 1 - (op.kind == frees) for op in ops])
    return np.cumsum(change * np.array(nbytes)[[op.stage for op in ops]]).max()


def _alive(ops, nbytes):
    """The set of what is alive, after every operation."""
    kinds, alive, most = {kind for kind, _, _ in ops}, set(), 0.0
    for kind, stage, k in ops:
        if kind == "F":
            alive.add((stage, k))
            most = max(most, sum(nbytes[s] for s, _ in alive))
        elif kind == "W" or "W" not in kinds:
            alive.remove((stage, k))
    return most


# ── place W ──────────────────────────────────────────────────────────────────────────────────────


def _queue(rank, p, m):
    waiting = collections.deque()
    for kind, _, k in schedule.one_f_one_b(p, m).ranks[rank]:
        yield kind, k
        if kind == "B":
            waiting.append(("W", k))
        if len(waiting) > rank:
            yield waiting.popleft()
    yield from waiting


def _by_memory(rank, p, m):
    """A W as soon as the next forward would find the memory full."""
    ops, held, waiting = [], 0, []
    for op in schedule.one_f_one_b(p, m).ranks[rank]:
        if op.kind == "F" and held == p:
            ops.append(f"W{waiting.pop(0)}")
            held -= 1
        ops.append(f"{op.kind}{op.micro_batch}")
        held += op.kind == "F"
        waiting += [op.micro_batch] * (op.kind == "B")
        drains = op.kind == "B" and not any(w == m - 1 for w in waiting)
        if drains and f"F{m - 1}" in ops and len(waiting) > rank:
            ops.append(f"W{waiting.pop(0)}")
            held -= 1
    return ops + [f"W{k}" for k in waiting]


def _inserted(rank, p, m):
    """Into a list, from behind."""
    ops = [(op.kind, op.micro_batch) for op in schedule.one_f_one_b(p, m).ranks[rank]]
    for k in reversed(range(m)):
        late = min(k + rank, m - 1)
        at = ops.index(("B", late)) + 1 if k + rank < m else len(ops) - (m - 1 - k)
        ops.insert(at, ("W", k))
    return tuple(ops)


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


def _repaired(rank, p, m, chunks):
    after = p - 1 - rank
    jobs = [
        (chunk, first + k)
        for first, chunk, k in itertools.product(range(0, m, p), range(chunks), range(p))
    ]
    warm = min(2 * after + (chunks - 1) * p, len(jobs))
    forward = (f"F{k}@{rank + chunk * p}" for chunk, k in jobs)
    backward = (f"B{k}@{rank + (chunks - 1 - chunk) * p}" for chunk, k in jobs)
    yield from itertools.islice(forward, warm)
    for op in forward:
        yield op
        yield next(backward)
    yield from backward


def _less_ahead(rank, p, m, chunks):
    """Fewer forwards first, which is enough where messages take no time."""
    jobs = sorted(itertools.product(range(m), range(chunks)), key=lambda j: (j[0] // p, j[1], j[0]))
    warm = min((p - 1 - rank) + (chunks - 1) * p, len(jobs))
    forward = [("F", rank + c * p, k) for k, c in jobs]
    backward = [("B", rank + (chunks - 1 - c) * p, k) for k, c in jobs]
    ops = forward[:warm]
    for f, b in itertools.zip_longest(forward[warm:], backward):
        ops += filter(None, (f, b))
    return ops


# ── weight gradients later ───────────────────────────────────────────────────────────────────────


def _add(weight, product):
    weight.grad = product if weight.grad is None else weight.grad.add_(product)


def _partials(weights, inputs, dy):
    owed = []
    for i in range(len(weights) - 1, -1, -1):
        owed.append(functools.partial(torch.mm, dy.T, inputs[i]))
        dy = dy @ weights[i]
    return dy, lambda: [_add(weight, owed.pop()()) for weight in weights]


def _suspended(weights, inputs, dy):
    """A generator that stops between B and W."""

    def halves(dy):
        grads = [dy]
        for weight in reversed(weights):
            grads.append(grads[-1] @ weight)
        yield grads.pop()
        for weight, x in zip(weights, inputs, strict=True):
            _add(weight, torch.einsum("no,ni->oi", grads.pop(), x))

    run = halves(dy)
    return next(run), functools.partial(list, run)


def _zipped(weights, inputs, dy):
    """All gradients first, each kept beside its layer by zip."""
    grads = [dy]
    for weight in weights[::-1]:
        grads.insert(0, torch.matmul(grads[0], weight))

    def w():
        for weight, x, grad in zip(weights, inputs, grads[1:], strict=True):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad += grad.T @ x

    return grads[0], w


def _defaults(weights, inputs, dy):
    """Bound by default arguments."""
    w = lambda: None  # noqa: E731
    for x, weight in reversed(list(zip(inputs, weights, strict=True))):

        def w(rest=w, x=x, weight=weight, grad=dy):
            rest()
            _add(weight, torch.tensordot(grad, x, dims=([0], [0])))

        dy = dy @ weight
    return dy, w


def _copies(weights, inputs, dy):
    """What W needs is copied; a weight's gradient grows in place, row by row."""
    owed = []
    for x, weight in zip(inputs[::-1], weights[::-1], strict=True):
        owed.append((weight, dy.clone(), torch.stack(list(x))))
        dy = dy @ weight

    def w():
        for weight, grad, x in owed:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            for row, column in zip(grad, x, strict=True):
                weight.grad.addr_(row, column)

    return dy, w


def _greedy(rank, p, m):
    """A simulation of one rank: F while fewer than p − rank wait for their B; W when full."""
    ops, f, b, w = [], 0, 0, 0
    while w < m:
        if f < m and f - b < p - rank and f - w < p:
            ops, f = [*ops, ("F", f)], f + 1
        elif b < m and (f - b >= p - rank or f == m) and b - w <= rank:
            ops, b = [*ops, ("B", b)], b + 1
        else:
            ops, w = [*ops, ("W", w)], w + 1
    return ops


def _by_formula(rank, p, m):
    """Places and not loops: where in the order the forward k of a rank stands."""
    warm = min(p - 1 - rank, m)
    place = {("F", k): k if k < warm else warm + 2 * (k - warm) for k in range(m)}
    for k in range(m):
        place["B", k] = warm + 2 * k + 1 if k < m - warm else m + k
    return sorted(place, key=place.get)


def _recursive(ops, nbytes):
    """The largest sum of any beginning, from behind."""
    ops, split = list(ops), any(op.kind == "W" for op in ops)
    best = 0
    for op in reversed(ops):
        gone = op.kind == ("W" if split else "B")
        best = max(0, best + nbytes[op.stage] * ((op.kind == "F") - gone))
    return best


def _swapped(rank, p, m, chunks):
    """Forwards as they are; backwards are those of the mirrored stages."""
    total, jobs = p * chunks, []
    for first in range(0, m, p):
        jobs += [(c * p + rank, k) for c in range(chunks) for k in range(first, first + p)]
    warm = min(2 * (p - 1 - rank) + (chunks - 1) * p, len(jobs))
    back = [(total - 1 - (s - rank + p - 1 - rank), k) for s, k in jobs]
    ops = [f"F{k}@{s}" for s, k in jobs[:warm]]
    for (s, k), (t, n) in zip(jobs[warm:], back, strict=False):
        ops += [f"F{k}@{s}", f"B{n}@{t}"]
    return ops + [f"B{n}@{t}" for t, n in back[len(jobs) - warm :]]


def _zeros_first(weights, inputs, dy):
    """Room for the sums is made in B, and filled by W."""
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        owed.append(functools.partial(weight.grad.addmm_, dy.mT, x))
        dy = dy @ weight
    return dy, lambda: [pay() for pay in owed]


RIGHT = {
    "pipeline/one-f-one-b": {
        "a generator": _generator,
        "pairs with NumPy integers, by memory": _capped,
        "one string, the last micro-batch first": _sentence,
        "by places": _by_formula,
    },
    "pipeline/peak": {
        "accumulate": _accumulated,
        "NumPy": _numpy,
        "a set of what is alive": _alive,
        "from behind": _recursive,
    },
    "pipeline/place-w": {
        "a generator with a queue": _queue,
        "when memory is full": _by_memory,
        "inserted from behind, a tuple": _inserted,
        "step by step": _greedy,
        "one line of text": lambda *case: " ".join(f"{kind}{k}" for kind, k in _queue(*case)),
    },
    "pipeline/bug-hunt": {
        "generators": _repaired,
        "fewer forwards first": _less_ahead,
        "mirrored stages": _swapped,
        "the library's operations": lambda *case: schedule.interleaved(*case[1:]).ranks[case[0]],
    },
    "pipeline/late-weights": {
        "partials": _partials,
        "a generator": _suspended,
        "zip": _zipped,
        "default arguments": _defaults,
        "copies": _copies,
        "zeros first": _zeros_first,
    },
}
