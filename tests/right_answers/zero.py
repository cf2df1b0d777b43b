"""Right answers to the exercises of `zero`, written in other styles than the reference."""

import collections
import functools
import itertools

import numpy as np
import torch
from torch import nn

from labutils import collectives, zero

# ── a sharded optimizer ──────────────────────────────────────────────────────────────────────────


class _InPlace:
    """Uneven shares, as `torch.tensor_split` cuts, and collectives that know their sizes."""

    def __init__(self, w, comm, make):
        self.w, self.comm = w, comm
        self.sizes = collectives.shares(len(w), comm.size)
        self.mine = nn.Parameter(w.detach().split(self.sizes)[comm.rank].clone())
        self.inner = make([self.mine])

    def step(self):
        self.mine.grad = self.comm.reduce_scatter(self.w.grad).div_(self.comm.size)
        self.inner.step()
        self.mine.grad = None
        whole = self.comm.all_gather(self.mine.detach(), sizes=self.sizes)
        with torch.no_grad():
            self.w.copy_(whole)


def _of_closures(w, comm, make):
    """No class: a function that keeps what it needs, and steps by lists of pieces."""
    dealt = zero.partition(w.numel(), comm.size)
    start = comm.rank * dealt.share
    padded = torch.cat([w.detach(), torch.zeros(dealt.padding, dtype=w.dtype)])
    mine = padded[start : start + dealt.share].clone().requires_grad_()
    inner = make([mine])

    class Closure:
        state = inner

        @staticmethod
        def step():
            gradient = torch.cat([w.grad / comm.size, w.new_zeros(dealt.padding)])
            mine.grad = comm.reduce_scatter(gradient.detach())
            inner.step()
            w.data[:] = comm.all_gather(mine.detach())[: len(w)]

    return Closure()


def _one_step(w, comm, mine, inner):
    padded = nn.functional.pad(w.grad, (0, len(mine) * comm.size - len(w)))
    mine.grad = comm.reduce_scatter(padded) / comm.size
    inner.step()
    w.data.copy_(comm.all_gather(mine.detach())[: len(w)])


def _mine(w, comm):
    dealt = zero.partition(w.numel(), comm.size)
    padded = nn.functional.pad(w.detach(), (0, dealt.padding))
    return nn.Parameter(padded.split(dealt.share)[comm.rank].clone())


class _InSlots:
    __slots__ = ("comm", "inner", "mine", "w")

    def __init__(self, w, comm, make):
        self.w, self.comm, self.mine = w, comm, _mine(w, comm)
        self.inner = make([self.mine])

    def step(self):
        _one_step(self.w, self.comm, self.mine, self.inner)


class _Partial:
    """The step is a function with all its arguments."""

    def __init__(self, w, comm, make):
        mine = _mine(w, comm)
        self.step = functools.partial(_one_step, w, comm, mine, inner=make([mine]))


class _Suspended:
    """A generator stands between two steps."""

    def __init__(self, w, comm, make):
        self.steps = self.run(w, comm, make)

    def run(self, w, comm, make):
        mine = _mine(w, comm)
        inner = make([mine])
        while True:
            yield _one_step(w, comm, mine, inner)

    def step(self):
        next(self.steps)


class _Queued:
    def __init__(self, w, comm, make):
        mine = _mine(w, comm)
        self.parts = collections.deque([w, comm, mine, make([mine])])

    def step(self):
        _one_step(*self.parts)


class _Bound:
    """Another object's method."""

    def __init__(self, w, comm, make):
        self.step = _InSlots(w, comm, make).step


class _Places:
    """This rank's elements by their places in w, which it keeps."""

    def __init__(self, w, comm, make):
        self.w, self.comm, share = w, comm, -(-len(w) // comm.size)
        self.places = torch.arange(len(w))[comm.rank * share :][:share].clone()
        self.rest = share - len(self.places)
        self.mine = nn.Parameter(w.detach()[self.places])
        self.inner = make([self.mine])

    def step(self):
        rest = (0, (len(self.mine) + self.rest) * self.comm.size - len(self.w))
        gradient = self.comm.reduce_scatter(nn.functional.pad(self.w.grad, rest))
        self.mine.grad = gradient[: len(self.mine)] / self.comm.size
        self.inner.step()
        new = self.comm.all_gather(nn.functional.pad(self.mine.detach(), (0, self.rest)))
        self.w.data[:] = new[: len(self.w)]


class _ByAllToAll:
    """A reduce-scatter written out: everybody's piece of my share comes to me, and is added."""

    def __init__(self, w, comm, make):
        self.w, self.comm, self.share = w, comm, -(-len(w) // comm.size)
        self.mine = nn.Parameter(self.pieces(w.detach())[comm.rank].clone())
        self.inner = make([self.mine])

    def pieces(self, x):
        padded = nn.functional.pad(x, (0, self.share * self.comm.size - len(x)))
        return padded.view(self.comm.size, self.share)

    def step(self):
        came = self.comm.all_to_all(self.pieces(self.w.grad).flatten())
        self.mine.grad = came.view(self.comm.size, -1).mean(0)
        self.inner.step()
        self.w.data.copy_(self.comm.all_gather(self.mine.detach())[: len(self.w)])


# ── the schedule of level 3 ──────────────────────────────────────────────────────────────────────


def _yields(count):
    """A generator; gradients are reduced while the next unit computes, as FSDP does."""
    yield "gather", 0
    for i in range(count):
        if i + 1 < count:
            yield "gather", i + 1
        yield "forward", i
        if i + 1 < count:
            yield "free", i
    for i in range(count - 1, -1, -1):
        if i:
            yield "gather", i - 1
        yield "backward", i
        yield "free", i
        if i + 1 < count:
            yield "reduce", i + 1
    yield "reduce", 0


def _numpy_integers(count):
    verbs, numbers = zip(*zero.unit_order(count), strict=True)
    return list(zip(verbs, np.array(numbers), strict=True))


def _iterator_of_lists(count):
    return map(list, itertools.chain(zero.unit_order(count)))


# ── bug hunt ─────────────────────────────────────────────────────────────────────────────────────


class _ReducesInFp32:
    """Gradients travel in fp32, as MixedPrecisionPolicy(reduce_dtype=torch.float32) has it."""

    def __init__(self, w, comm, make):
        self.w, self.comm, self.dealt = w, comm, zero.partition(w.numel(), comm.size)
        self.master = nn.Parameter(self.own(w.detach()).float().clone())
        self.inner = make([self.master])

    def own(self, x):
        padded = nn.functional.pad(x, (0, self.dealt.padding))
        return padded.split(self.dealt.share)[self.comm.rank]

    def step(self, max_norm):
        padded = nn.functional.pad(self.w.grad, (0, self.dealt.padding)).float()
        self.master.grad = self.comm.reduce_scatter(padded) / self.comm.size
        norm = self.clip(max_norm)
        self.inner.step()
        new = self.comm.all_gather(self.master.detach().bfloat16())
        self.w.data.copy_(new[: self.w.numel()])
        return norm

    def clip(self, max_norm):
        square = self.comm.all_reduce(self.master.grad.square().sum())
        self.master.grad *= (max_norm / square.sqrt()).clamp(max=1)
        return square.sqrt().item()


class _ClipsByTheLibrary(_ReducesInFp32):
    def clip(self, max_norm):
        self.master.shares = self.comm.size  # each rank has another one
        return zero.clip_grad_norm([self.master], self.comm, max_norm)


class _NormsGathered(_ReducesInFp32):
    """All norms at every rank, one number each; the answer is a NumPy scalar."""

    def clip(self, max_norm):
        norms = self.comm.all_gather(self.master.grad.norm().view(1))
        whole = np.sqrt(np.float64(norms.double().square().sum().item()))
        if whole > max_norm:
            self.master.grad.mul_(float(max_norm / whole))
        return np.float32(whole)


class _Owners(_ByAllToAll):
    """The new weights come by a broadcast from each owner."""

    def step(self):
        came = self.comm.all_to_all(self.pieces(self.w.grad).flatten())
        self.mine.grad = came.view(self.comm.size, -1).mean(0)
        self.inner.step()
        mine = self.mine.detach()
        whole = [self.comm.broadcast(mine.clone(), src=owner) for owner in range(self.comm.size)]
        self.w.data.copy_(torch.cat(whole)[: len(self.w)])


def _by_hooks(count):
    """What hooks before and after each pass would do."""
    steps, whole = [], set()

    def before(i, following):
        for unit in (i, following):
            if 0 <= unit < count and unit not in whole:
                steps.append(("gather", unit))
                whole.add(unit)

    def after(i):
        whole.discard(i)
        steps.append(("free", i))

    for i in range(count):
        before(i, i + 1)
        steps.append(("forward", i))
        if i + 1 < count:
            after(i)
    for i in range(count)[::-1]:
        before(i, i - 1)
        steps.append(("backward", i))
        steps.append(("reduce", i))
        after(i)
    return tuple(steps)


class _InDoublePrecision(_ReducesInFp32):
    """The norm from squares in fp64; the factor by torch.where."""

    def clip(self, max_norm):
        norm = self.comm.all_reduce(self.master.grad.double().pow(2).sum()).sqrt()
        factor = torch.where(norm > max_norm, max_norm / norm, torch.ones_like(norm))
        self.master.grad.mul_(factor.float())
        return norm


class _EveryNth(_ReducesInFp32):
    """Rank r owns elements r, r + N, r + 2N, …, in the dtype of w."""

    def __init__(self, w, comm, make):
        self.w, self.comm, self.share = w, comm, -(-len(w) // comm.size)
        self.mine = nn.Parameter(self.dealt_out(w.detach())[comm.rank].clone())
        self.inner = make([self.mine])

    def dealt_out(self, x):
        padded = nn.functional.pad(x, (0, self.share * self.comm.size - len(x)))
        return padded.view(self.share, -1).T.contiguous()

    def step(self):
        gradients = self.dealt_out(self.w.grad / self.comm.size).flatten()
        self.mine.grad = self.comm.reduce_scatter(gradients)
        self.inner.step()
        whole = self.comm.all_gather(self.mine.detach()).view(self.comm.size, -1)
        with torch.no_grad():
            self.w.copy_(whole.T.flatten()[: len(self.w)])


class _Rebinds(_EveryNth):
    """`w.data` is another tensor after each step; the share's gradient is gone."""

    def step(self):
        gradients = self.dealt_out(self.w.grad).flatten()
        self.mine.grad = self.comm.reduce_scatter(gradients).div_(self.comm.size)
        self.inner.step()
        self.inner.zero_grad()
        whole = self.comm.all_gather(self.mine.data).view(self.comm.size, -1)
        self.w.data = whole.T.flatten()[: len(self.w)].clone()


class _Differences(_EveryNth):
    """What travels is by how much each weight moved."""

    def step(self):
        before = self.mine.detach().clone()
        gradients = self.dealt_out(self.w.grad).flatten()
        self.mine.grad = self.comm.reduce_scatter(gradients) / self.comm.size
        self.inner.step()
        moved = self.comm.all_gather(self.mine.detach() - before).view(self.comm.size, -1)
        self.w.data += moved.T.flatten()[: len(self.w)]


def _two_kept(count):
    """The last two units stay for their backward: a gather less, and still two are whole."""
    steps = [("gather", 0)]
    for i in range(count):
        steps += [("gather", i + 1)] * (i + 1 < count) + [("forward", i)]
        steps += [("free", i)] * (i + 2 < count)
    for i in reversed(range(count)):
        steps += [("backward", i), ("free", i), ("reduce", i)]
        steps += [("gather", i - 2)] * (i > 1)
    return steps


def _recursive(count, i=0):
    """A unit comes, calls the next one, and is there again when that returns."""
    start, ahead = [("gather", 0)] * (i == 0), [("gather", i + 1)] * (i + 1 < count)
    inner = [("free", i), *_recursive(count, i + 1)] if ahead else []
    before = [("gather", i - 1)] * (i > 0)
    after = [*before, ("backward", i), ("free", i), ("reduce", i)]
    return [*start, *ahead, ("forward", i), *inner, *after]


def _with_arrays(count):
    """Rows of an array of objects."""
    return np.array(zero.unit_order(count), dtype=object).tolist()


class _DotProduct(_ReducesInFp32):
    def clip(self, max_norm):
        mine = self.master.grad
        norm = float(self.comm.all_reduce(torch.dot(mine, mine))) ** 0.5
        mine.div_(max(1.0, norm / max_norm))
        return norm


class _NormOfNorms(_ReducesInFp32):
    def clip(self, max_norm):
        norms = self.comm.all_gather(torch.linalg.vector_norm(self.master.grad)[None])
        norm = torch.linalg.vector_norm(norms)
        nn.utils.clip_grads_with_norm_([self.master], max_norm, norm)
        return norm


class _InPlaceSum(_ReducesInFp32):
    def clip(self, max_norm):
        squares = self.master.grad.pow(2).sum().view(1)
        self.comm.all_reduce(squares, out=squares)
        self.master.grad *= min(1.0, max_norm / squares.sqrt().item())
        return squares.sqrt()


class _UnlessItIsOld(_ReducesInFp32):
    """The master is read back from w where somebody else has changed w, and only there."""

    def step(self, max_norm):
        mine = self.own(self.w.detach())
        if not torch.equal(mine, self.master.detach().bfloat16()):
            self.master.data.copy_(mine)
        return super().step(max_norm)


RIGHT = {
    "zero/optimizer": {
        "broadcasts from the owners": _Owners,
        "uneven shares": _InPlace,
        "every nth element": _EveryNth,
        "w.data bound anew": _Rebinds,
        "differences": _Differences,
        "a function with closures": _of_closures,
        "all-to-all and a mean": _ByAllToAll,
        "in slots": _InSlots,
        "a partial": _Partial,
        "a generator": _Suspended,
        "a deque": _Queued,
        "a bound method": _Bound,
        "places kept": _Places,
    },
    "zero/schedule": {
        "as hooks would": _by_hooks,
        "the last two kept": _two_kept,
        "recursive": _recursive,
        "an array's rows": _with_arrays,
        "a generator that reduces one unit late": _yields,
        "NumPy integers": _numpy_integers,
        "an iterator of lists": _iterator_of_lists,
    },
    "zero/repair": {
        "squares in fp64": _InDoublePrecision,
        "a dot product": _DotProduct,
        "a norm of norms": _NormOfNorms,
        "summed in place": _InPlaceSum,
        "gradients reduced in fp32": _ReducesInFp32,
        "the library's clipping": _ClipsByTheLibrary,
        "norms gathered": _NormsGathered,
        "read back where w was changed": _UnlessItIsOld,
    },
}
