"""Wrong answers to the exercises of `zero`."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from labutils import world, zero
from labutils.teach.exercises import zero as exercises
from wrong_answers import Wrong


class _Sharded:
    """A right answer with its slips switched on one at a time."""

    all_reduces = sums = averages_twice = keeps_to_itself = own_gradient = drops_rest = remakes = (
        keeps_a_view
    ) = False

    def __init__(self, w: nn.Parameter, comm: world.Comm, make: exercises.Make) -> None:
        self.w, self.comm, self.make = w, comm, make
        self.share = w.numel() // comm.size if self.drops_rest else -(-w.numel() // comm.size)
        self.mine = nn.Parameter(
            self.own(w.detach()) if self.keeps_a_view else self.own(w.detach()).clone()
        )
        self.inner = make([self.mine])

    def padded(self, x: Tensor) -> Tensor:
        length = self.share * self.comm.size
        return torch.cat([x[:length], x.new_zeros(max(0, length - len(x)))])

    def own(self, x: Tensor) -> Tensor:
        return self.padded(x).split(self.share)[self.comm.rank] if self.share else x[:0]

    def step(self) -> None:
        n, gradient = self.comm.size, self.w.grad / (self.comm.size if self.averages_twice else 1)
        if self.remakes:
            self.inner = self.make([self.mine])
        if self.own_gradient:
            reduced = self.own(gradient) * n
        elif self.all_reduces:
            reduced = self.own(self.comm.all_reduce(gradient))
        else:
            reduced = self.comm.reduce_scatter(self.padded(gradient))
        self.mine.grad = reduced.clone() / (1 if self.sums else n)
        self.inner.step()
        if self.keeps_to_itself:
            self.w.data[self.comm.rank * self.share :][: self.share] = self.mine.detach()[
                : max(0, len(self.w) - self.comm.rank * self.share)
            ]
        else:
            whole = self.comm.all_gather(self.mine.detach())[: self.w.numel()]
            self.w.data[: len(whole)] = whole


def _slip(base: type, name: str) -> type:
    return type(name, (base,), {name: True})


class _AveragesWeights:
    def __init__(self, w: nn.Parameter, comm: world.Comm, make: exercises.Make) -> None:
        self.w, self.comm, self.inner = w, comm, make([w])

    def step(self) -> None:
        self.inner.step()
        self.w.data.copy_(self.comm.all_reduce(self.w.detach()) / self.comm.size)


class _KeepsPadding(_Sharded):
    def step(self) -> None:
        self.mine.grad = self.comm.reduce_scatter(self.padded(self.w.grad)) / self.comm.size
        self.inner.step()
        self.w.data = self.comm.all_gather(self.mine.detach())


class _KeepsAPaddedGradient(_Sharded):
    def step(self) -> None:
        self.buffer = self.padded(self.w.grad).clone()
        super().step()


class _AStepLate(_Sharded):
    """Gathers what the step before made."""

    def step(self) -> None:
        whole = self.comm.all_gather(self.mine.detach())[: self.w.numel()]
        self.mine.grad = self.comm.reduce_scatter(self.padded(self.w.grad)) / self.comm.size
        self.inner.step()
        self.w.data[: len(whole)] = whole


class _AddsZeros(_Sharded):
    """An all-reduce of the new weights, zeros where others own them."""

    def step(self) -> None:
        self.mine.grad = self.comm.reduce_scatter(self.padded(self.w.grad)) / self.comm.size
        self.inner.step()
        whole = self.mine.new_zeros(self.share * self.comm.size)
        whole.split(self.share)[self.comm.rank].copy_(self.mine.detach())
        self.w.data.copy_(self.comm.all_reduce(whole)[: self.w.numel()])


class _NeverClears(_Sharded):
    """Adds each gradient to those of the steps before."""

    def step(self) -> None:
        gradient = self.comm.reduce_scatter(self.padded(self.w.grad)) / self.comm.size
        self.mine.grad = gradient + (0 if self.mine.grad is None else self.mine.grad)
        self.inner.step()
        self.w.data.copy_(self.comm.all_gather(self.mine.detach())[: self.w.numel()])


class _WritesElsewhere(_Sharded):
    """Makes new weights of its own, and leaves those that it was given."""

    def step(self) -> None:
        self.w = nn.Parameter(self.w.detach().clone(), requires_grad=False)
        self.w.grad = torch.ones_like(self.w)
        super().step()


class _GathersGradients(_Sharded):
    """Sends everybody's whole gradient to everybody."""

    def step(self) -> None:
        whole = self.comm.all_gather(self.padded(self.w.grad)).view(self.comm.size, -1)
        self.mine.grad = self.own(whole.mean(0)).clone()
        self.inner.step()
        self.w.data.copy_(self.comm.all_gather(self.mine.detach())[: self.w.numel()])


class _ShardsNothing:
    def __init__(self, w: nn.Parameter, comm: world.Comm, make: exercises.Make) -> None:
        self.w, self.comm, self.inner = w, comm, make([w])

    def step(self) -> None:
        self.w.grad = self.comm.all_reduce(self.w.grad) / self.comm.size
        self.inner.step()


def _plan(
    *,
    reshard: bool = True,
    prefetch: bool = True,
    again: bool = True,
    late: bool = False,
    forward_order: bool = False,
    thrice: bool = False,
) -> Callable:
    """A schedule with its slips switched on one at a time."""

    def attempt(count: int) -> list[exercises.Step]:
        if reshard and prefetch and again and not (late or forward_order or thrice):
            return zero.unit_order(count)
        steps: list[exercises.Step] = []
        for i in range(count):
            steps += [("gather", i), ("forward", i)] + [("free", i)] * reshard
        for i in range(count) if forward_order else reversed(range(count)):
            steps += (
                [("gather", i)] * (reshard and again)
                + [("backward", i)]
                + [("free", i)] * again
                + [("reduce", i)] * (not late)
            )
        steps += [("reduce", i) for i in range(count)] * late
        for i in range(count * thrice):
            steps += [("gather", i), ("free", i)]
        return steps

    return attempt


def _reduces_two_late(count: int) -> list[exercises.Step]:
    """Each gradient waits for the two units after it."""
    steps = [step for step in zero.unit_order(count) if step[0] != "reduce"]
    for i in range(count):
        turn = steps.index(("backward", max(0, i - 2))) + 1
        steps.insert(turn, ("reduce", i))
    return steps


def _without(verb: str, unit: int | None = None) -> Callable:
    """The right schedule, but for the steps of one verb, or one of them."""
    return lambda count: [
        (what, i) for what, i in zero.unit_order(count) if what != verb or unit not in (None, i)
    ]


def _gathers_after(count: int) -> list[exercises.Step]:
    """The next gather begins when a unit has computed and is free."""
    steps: list[exercises.Step] = []
    for i in range(count):
        steps += [("gather", i)] + [("forward", i)] + [("free", i)] * (i + 1 < count)
    for i in reversed(range(count)):
        steps += [("gather", i)] * (i + 1 < count)
        steps += [("backward", i), ("free", i), ("reduce", i)]
    return steps


def _ahead_in_the_forward_alone(count: int) -> list[exercises.Step]:
    steps = zero.unit_order(count)
    turn = steps.index(("forward", count - 1)) + 1
    late = [step for step in steps[turn:] if step[0] != "gather"]
    for i in reversed(range(count - 1)):
        late.insert(late.index(("backward", i)), ("gather", i))
    return [*steps[:turn], *late]


def _frees_the_last(count: int) -> list[exercises.Step]:
    last, steps = count - 1, zero.unit_order(count)
    turn = steps.index(("forward", last)) + 1
    return [*steps[:turn], ("free", last), ("gather", last), *steps[turn:]]


def _gathers_all_first(count: int) -> list[exercises.Step]:
    steps = zero.unit_order(count)
    return [("gather", i) for i in range(count)] + [
        step
        for k, step in enumerate(steps)
        if step[0] != "gather" or ("forward", count - 1) in steps[:k]
    ]


def _gathers_all_again(count: int) -> list[exercises.Step]:
    steps = zero.unit_order(count)
    turn = steps.index(("forward", count - 1)) + 1
    return [
        *steps[:turn],
        *(("gather", i) for i in reversed(range(count - 1))),
        *(step for step in steps[turn:] if step[0] != "gather"),
    ]


class _Half:
    """The answer to the bug hunt, each slip a switch; the first two make the code of the lab."""

    of_rank_0 = means_elements = largest_element = clips_late = of_gradients = False
    local_norm = rereads = adds_norms = largest_norm = clips_early = gathers = whole_master = False
    no_root = means_squares = scales_up = tells_nothing = wide_weights = means_norms = False
    remakes = norm_of_before = roots_own = False
    before: Tensor | None = None

    def __init__(self, w: nn.Parameter, comm: world.Comm, make: exercises.Make) -> None:
        self.w, self.comm = w, comm
        self.dealt = zero.partition(w.numel(), comm.size)
        self.master = nn.Parameter(
            (self.padded(w.detach()) if self.whole_master else self.own(w.detach())).float().clone()
        )
        self.make, self.inner = make, make([self.master])

    def padded(self, x: Tensor) -> Tensor:
        return nn.functional.pad(x, (0, self.dealt.padding))

    def own(self, x: Tensor) -> Tensor:
        return self.padded(x).split(self.dealt.share)[self.comm.rank]

    def step(self, max_norm: float) -> Tensor | None:
        gradient = self.w.grad
        if self.clips_early:
            gradient = gradient * min(1.0, max_norm / (gradient.float().norm().item() + 1e-6))
        mine = self.comm.reduce_scatter(self.padded(gradient)).float() / self.comm.size
        norm = mine.norm()
        if self.gathers:
            norm = self.comm.all_gather(mine.bfloat16()).float().norm()
        elif self.adds_norms:
            norm = self.comm.all_reduce(norm)
        elif self.of_rank_0:
            norm = self.comm.broadcast(norm)
        elif self.of_gradients:
            norm = self.w.grad.float().norm()
        elif self.largest_element:
            norm = self.comm.all_reduce(mine.abs().max(), "max")
        elif self.means_elements:
            norm = (self.comm.all_reduce(mine.square().mean()) / self.comm.size).sqrt()
        elif self.largest_norm:
            norm = self.comm.all_reduce(norm, "max")
        elif self.means_norms:
            norm = self.comm.all_reduce(self.w.grad.float().norm()) / self.comm.size
        elif self.roots_own:
            whole = self.comm.all_reduce(self.w.grad.float().square().sum())
            norm = whole.sqrt() / self.comm.size
        elif self.no_root:
            norm = self.comm.all_reduce(norm**2)
        elif not (self.local_norm or self.clips_early):
            norm = (
                self.comm.all_reduce(norm**2) / (self.comm.size if self.means_squares else 1)
            ).sqrt()
        clips_by = self.before if self.norm_of_before and self.before is not None else norm
        self.before = norm
        factor = min(math.inf if self.scales_up else 1.0, max_norm / clips_by.item())
        mine = mine * (1 if self.clips_late else factor)
        if self.rereads:
            self.master.data.copy_(self.own(self.w.detach()))
        if self.remakes:
            self.inner = self.make([self.master])
        self.master.grad = self.comm.all_gather(mine) if self.whole_master else mine
        self.inner.step()
        new = (
            self.own(self.master.detach()[: self.w.numel()])
            if self.whole_master
            else self.master.detach()
        )
        new = new if self.wide_weights else new.bfloat16()
        self.w.data.copy_(self.comm.all_gather(new)[: self.w.numel()])
        return None if self.tells_nothing else norm


_Published = type("_Published", (_Half,), {"local_norm": True, "rereads": True})


def _in_vain(count):
    return [*zero.unit_order(count), ("gather", 0), ("free", 0)]


class _WholeInSlots:
    """All of the optimizer's state, where no __dict__ shows it."""

    __slots__ = ("comm", "inner", "w")

    def __init__(self, w, comm, make):
        self.w, self.comm, self.inner = w, comm, make([w])

    def step(self):
        self.w.grad = self.comm.all_reduce(self.w.grad) / self.comm.size
        self.inner.step()


WRONG = {
    "zero/optimizer": (
        Wrong("shards nothing", _ShardsNothing, "bytes held", "nothing is sharded"),
        Wrong("nothing sharded, in slots", _WholeInSlots, "bytes held", "nothing is sharded"),
        Wrong("keeps a padded gradient", _KeepsAPaddedGradient, "bytes held", "a padded gradient"),
        Wrong(
            "keeps a view of the whole",
            _slip(_Sharded, "keeps_a_view"),
            "bytes held",
            "clone this rank's share",
        ),
        Wrong(
            "all-reduces", _slip(_Sharded, "all_reduces"), "bytes sent", "reduce_scatter, is enough"
        ),
        Wrong("a step late", _AStepLate, "weights", "a `step` ends when"),
        Wrong("adds zeros", _AddsZeros, "bytes sent", "zeros where others own them"),
        Wrong("never clears", _NeverClears, "weights", "its share of that, every step"),
        Wrong("weights of its own", _WritesElsewhere, "weights", "into w itself"),
        Wrong("gathers all gradients", _GathersGradients, "bytes sent", "nothing else has to"),
        Wrong("steps along the sum", _slip(_Sharded, "sums"), "weights", "Divide by comm.size"),
        Wrong("averages twice", _slip(_Sharded, "averages_twice"), "weights", "divided by N twice"),
        Wrong(
            "keeps its share to itself",
            _slip(_Sharded, "keeps_to_itself"),
            "weights",
            "all-gather the shares",
        ),
        Wrong(
            "its own gradient",
            _slip(_Sharded, "own_gradient"),
            "weights",
            "along this rank's own gradient",
        ),
        Wrong(
            "loses the remainder",
            _slip(_Sharded, "drops_rest"),
            "lengths that N does not divide",
            "The last weight never moves: 7 // 2",
        ),
        Wrong("averages weights, not gradients", _AveragesWeights, "weights", "Adam is not linear"),
        Wrong("keeps the padding", _KeepsPadding, "lengths that N does not divide", "cut it off"),
        Wrong(
            "forgets its moments", _slip(_Sharded, "remakes"), "weights", "made anew in every step"
        ),
    ),
    "zero/schedule": (
        Wrong("never reshards", _plan(reshard=False), "bytes held", "Nothing is resharded"),
        Wrong(
            "no second gather",
            _plan(again=False),
            "everything is there when it is used",
            "gather it again",
        ),
        Wrong(
            "backward in the order of forward",
            _plan(forward_order=True),
            "everything is there when it is used",
            "from the last to the first",
        ),
        Wrong(
            "reduces at the end", _plan(late=True), "bytes held", "right after the unit's backward"
        ),
        Wrong("reduces two units late", _reduces_two_late, "bytes held", "2 are enough"),
        Wrong("gathers in vain", _in_vain, "bytes sent", "leave this gather out"),
        Wrong("numbers as text", lambda count: [(what, str(i)) for what, i in zero.unit_order(count)],
              "everything is there when it is used", "whole numbers"),
        Wrong(
            "gathers for the step too",
            _plan(thrice=True),
            "bytes sent",
            "with the reduce-scatter, 3Ψ",
        ),
        Wrong("gathers when all is free", _gathers_after, "prefetch", "one unit earlier"),
        Wrong("ahead forward alone", _ahead_in_the_forward_alone, "prefetch", "one unit earlier"),
        Wrong(
            "never reduces",
            _without("reduce"),
            "everything is there when it is used",
            "Reduce every gradient",
        ),
        Wrong(
            "one unit never freed",
            _without("free", 0),
            "everything is there when it is used",
            "free every unit",
        ),
        Wrong(
            "strings",
            lambda count: [f"{what} {i}" for what, i in zero.unit_order(count)],
            "everything is there when it is used",
            "Return pairs",
        ),
        Wrong("gathers everything first", _gathers_all_first, "bytes held", "whole at once"),
        Wrong(
            "gathers everything for the backward pass",
            _gathers_all_again,
            "bytes held",
            "in the backward pass too",
        ),
        Wrong(
            "frees the unit that it needs next",
            _frees_the_last,
            "prefetch",
            "don't free it in between",
        ),
        Wrong("no prefetch", _plan(prefetch=False), "prefetch", "Start it one unit earlier"),
    ),
    "zero/repair": (
        Wrong("as it was", _Published, "clipping", "local norm"),
        Wrong("the squares of own gradients", _slip(_Half, "roots_own"), "clipping",
              "a rank's own gradient"),
        Wrong("norms added", _slip(_Half, "adds_norms"), "clipping", "Norms don't add"),
        Wrong("the largest norm", _slip(_Half, "largest_norm"), "clipping", "neither the largest"),
        Wrong(
            "clipped before it is reduced",
            _slip(_Half, "clips_early"),
            "clipping",
            "after it has been reduced",
        ),
        Wrong(
            "the mean of the ranks' own norms",
            _slip(_Half, "means_norms"),
            "clipping",
            "the norm of a rank's own gradient",
        ),
        Wrong("the norm of rank 0", _slip(_Half, "of_rank_0"), "clipping", "local norm"),
        Wrong("its own norm", _slip(_Half, "of_gradients"), "clipping", "a rank's own gradient"),
        Wrong("the largest", _slip(_Half, "largest_element"), "clipping", "largest element"),
        Wrong("per element", _slip(_Half, "means_elements"), "clipping", "don't average them"),
        Wrong("not scaled", _slip(_Half, "clips_late"), "clipping", "steps by another gradient"),
        Wrong("no root", _slip(_Half, "no_root"), "clipping", "take the root of it"),
        Wrong(
            "the mean of the squares",
            _slip(_Half, "means_squares"),
            "clipping",
            "don't average them",
        ),
        Wrong(
            "scales short gradients up",
            _slip(_Half, "scales_up"),
            "one step, nothing clipped",
            "shorter than max_norm",
        ),
        Wrong("returns nothing", _slip(_Half, "tells_nothing"), "clipping", "Return the norm"),
        Wrong(
            "the norm repaired, the master not",
            _slip(_Half, "rereads"),
            "small updates",
            "read back from the rounded weights",
        ),
        Wrong(
            "the whole master on every rank",
            _slip(_Half, "whole_master"),
            "bytes held",
            "this rank's share alone",
        ),
        Wrong(
            "gathers fp32 weights",
            _slip(_Half, "wide_weights"),
            "bytes sent",
            "Do the new weights travel in fp32",
        ),
        Wrong(
            "clips by the norm of the step before",
            _slip(_Half, "norm_of_before"),
            "step after step",
            "the norm of its own gradient",
        ),
        Wrong(
            "another optimizer in each step",
            _slip(_Half, "remakes"),
            "step after step",
            "made anew in every step",
        ),
        Wrong(
            "gathers the gradient for its norm", _slip(_Half, "gathers"), "bytes sent", "one number"
        ),
    ),
}
