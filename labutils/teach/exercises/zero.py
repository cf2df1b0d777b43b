"""Shard an optimizer, write the schedule of level 3, repair a mixed-precision optimizer."""

import collections
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from labutils import units, world, zero
from labutils.teach.exercises import Exercise, Failed, Property, _ranks

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_SHARES = (
    "All ranks make the same collective calls, in the same order, with the same shapes. "
    "Shares of unequal length break that: pad to N equal ones."
)


def _inside(thing: object) -> list[object]:
    """What an object is made of, as far as tensors may hide in it."""
    if isinstance(thing, (world.Comm, type, types.ModuleType, str, int, float)):
        return []
    attributes = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    attributes += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
    names = ("func", "args", "keywords", "__self__", "__func__", "__defaults__", "__kwdefaults__")
    if isinstance(thing, (functools.partial, types.MethodType, types.FunctionType)):
        attributes += [getattr(thing, name, None) for name in names]
    if isinstance(thing, types.GeneratorType) and thing.gi_frame:
        attributes += thing.gi_frame.f_locals.values()
    slots = [getattr(base, "__slots__", ()) for base in type(thing).__mro__]
    for name in itertools.chain(*([each] if isinstance(each, str) else each for each in slots)):
        attributes.append(getattr(thing, name, None))
    if not type(thing).__module__.startswith(("builtins", "torch")):
        attributes += vars(type(thing)).values()
    if isinstance(thing, dict):
        return [*attributes, *thing.keys(), *thing.values()]
    several = (list, tuple, set, frozenset, collections.deque)
    return [*attributes, *thing] if isinstance(thing, several) else attributes


def _kept(owner: object, w: Tensor) -> tuple[int, int]:
    """Bytes of all tensors that `owner` keeps beside `w` and its gradient, each storage once, and
    of these the moments of torch optimizers."""
    storages, moments = {}, 0
    seen: set[int] = set()
    todo = [owner]
    while todo:
        thing = todo.pop()
        if isinstance(thing, Tensor):
            storages[thing.untyped_storage()._cdata] = thing.untyped_storage().nbytes()
            todo += [] if thing.grad is None else [thing.grad]
        elif id(thing) not in seen:
            seen.add(id(thing))
            todo += _inside(thing)
            states = thing.state.values() if isinstance(thing, torch.optim.Optimizer) else ()
            moments += sum(x.nbytes for state in states for x in state.values() if x.dim())
    for known in (w, w.grad):
        if known is not None:
            storages.pop(known.untyped_storage()._cdata, None)
    return sum(storages.values()), moments


# ── a sharded optimizer ──────────────────────────────────────────────────────────────────────────


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.125, momentum=0.5)


def _adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.125)


def _start(numel: int) -> Tensor:
    return (torch.arange(numel, dtype=torch.float64) * 7 + 3) % 11 - 5


def _slope(numel: int, rank: int, step: int) -> Tensor:
    """The gradient of one rank in one step: no element is 0, and the mean is no rank's own."""
    return ((torch.arange(numel, dtype=torch.float64) + step) * (rank + 2)) % 5 + 4 * rank + 1


def _plain(n: int, numel: int, make: Make, steps: int, *, anew: bool = False) -> Tensor:
    """Weights after steps of one optimizer on one rank, or of one made anew in each step."""
    w = nn.Parameter(_start(numel))
    optimizer = make([w])
    for step in range(steps):
        optimizer = make([w]) if anew else optimizer
        w.grad = sum((_slope(numel, rank, step) for rank in range(n)), torch.zeros(())) / n
        optimizer.step()
    return w.detach()


def _stepped(
    attempt: Callable, n: int, numel: int, make: Make, steps: int = 3
) -> tuple[list[Tensor], list[tuple[int, int]]]:
    """Each rank's weights after some steps, and what `_kept` finds in its optimizer."""

    def program(rank: world.Rank) -> tuple[Tensor, tuple[int, int]]:
        w = nn.Parameter(_start(numel))
        optimizer = attempt(w, rank.comm("dp"), make)
        for step in range(steps):
            w.grad = None
            (w * _slope(numel, rank.rank, step)).sum().backward()
            optimizer.step()
            if w.shape != (numel,):
                break
        return w.detach().clone(), _kept(optimizer, w)

    case = f"{_ranks.count(n)}, {numel} weights"
    results = _ranks.run(n, case, program, _SHARES)
    if any(w.shape != (numel,) for w, _ in results):
        raise Failed(
            f"{case}: w has {results[0][0].numel()} elements after a step",
            "The gathered shares end with the padding: cut it off, [: w.numel()].",
        )
    return [w for w, _ in results], [kept for _, kept in results]


_NOT_LINEAR = (
    "With SGD your weights are right. Adam is not linear: a mean of weights, each moved along a "
    "rank's own gradient, is not a step along the mean gradient. Average the gradients, then step."
)


_ROUNDED = (
    "They differ in the last digits alone: w is float64 here. Does your share have another dtype?"
)


_FORGETS = (
    "Where are the moments? Make the inner optimizer once and keep it as an attribute: one that is "
    "made anew in every step forgets them."
)


def _right_weights(attempt: Callable, n: int, numel: int) -> None:
    case = f"{_ranks.count(n)}, {numel} weights"
    for name, make in (("SGD with momentum", _sgd), ("Adam", _adam)):
        for steps in (1, 3):
            expected = _plain(n, numel, make, steps)
            results, _ = _stepped(attempt, n, numel, make, steps)
            for rank, w in enumerate(results):
                if not torch.allclose(w, expected, rtol=1e-12, atol=1e-12):
                    rounded = torch.equal(w, w.float().double()) and make is _adam
                    why = _NOT_LINEAR if make is _adam else _why(rank, w, n, numel, steps)
                    raise Failed(
                        f"{case}, {name}, after {steps} step{'s' * (steps > 1)}: "
                        f"rank {rank} holds other weights than one optimizer on one rank",
                        _ROUNDED if rounded else why,
                    )


def _why(rank: int, w: Tensor, n: int, numel: int, steps: int) -> str:
    """The most likely reason why SGD left these weights on this rank."""
    moved, wanted = w - _start(numel), _plain(n, numel, _sgd, steps) - _start(numel)
    still = (moved == 0).nonzero().flatten().tolist()
    own = list(range(*zero.partition(numel, n).bounds(rank)))
    if len(still) == numel:
        return (
            f"No weight moves in {steps} step{'s' * (steps > 1)}: a `step` ends when the new ones, "
            "gathered, are written into w itself, w.data.copy_(…)."
        )
    if steps == 1 and torch.allclose(moved, n * wanted):
        return (
            "The update is N times too long: reduce-scatter sums, and the gradient of the whole "
            "batch is the mean. Divide by comm.size."
        )
    if steps == 1 and n > 1 and torch.allclose(n * moved, wanted):
        return (
            "The update is N times too short: is the gradient divided by N twice, "
            "before and after it is summed? (Adam alone would have hidden that.)"
        )
    if steps > 1 and torch.allclose(
        moved + _start(numel), _plain(n, numel, _sgd, steps, anew=True)
    ):
        return _FORGETS
    if still and still == list(range(numel // n * n, numel)):
        last = (
            "last weight never moves"
            if len(still) == 1
            else f"last {len(still)} weights never move"
        )
        return (
            f"The {last}: {numel} // {n} times {n} is "
            f"{numel // n * n}. Take ⌈numel / N⌉ for a share and pad the last ones."
        )
    if still and not set(still) & set(own):
        return (
            "This rank's own share is new and the rest is old: all-gather the shares of all ranks "
            "into w, every step."
        )
    if still:
        return f"Of {numel} weights {len(still)} never moved: whose share are they?"
    if steps == 1 and torch.allclose(moved[own], -0.125 * _slope(numel, rank, 0)[own]):
        return (
            "Its share moved along this rank's own gradient: where do the gradients of the other "
            "ranks come in?"
        )
    return (
        "The plain optimizer steps along the mean of all ranks' gradients. "
        "Does your inner one see its share of that, every step?"
    )


def _weights(attempt: Callable) -> str:
    cases = [(1, 4), (2, 8), (3, 12), (4, 32)]
    for n, numel in cases:
        _right_weights(attempt, n, numel)
    return f"{len(cases)} × 2 optimizers"


def _remainders(attempt: Callable) -> str:
    cases = [(2, 7), (3, 10), (4, 9), (4, 2)]
    for n, numel in cases:
        try:
            _right_weights(attempt, n, numel)
        except Failed as failure:
            remedy = (
                f" It works where N divides: {numel} weights on {n} ranks leave a rest. "
                "Pad to N equal shares."
            ) * ("pad" not in failure.hint)
            raise Failed(str(failure), failure.hint + remedy) from None
    return f"{len(cases)} cases"


_ALL_MOMENTS = (
    "Your weights are right, and nothing is sharded: every rank has moments for all weights. "
    "Give `make` this rank's share alone."
)
_TOO_LONG = (
    "The moments are of this rank's share alone, as they should be. But something as long as all "
    "weights stays alive from step to step: a padded gradient that is an attribute? Or a view, "
    "which keeps all of what it is a piece of: clone this rank's share."
)


def _state_bytes(attempt: Callable) -> str:
    n, numel = 4, 1000
    _, kept = _stepped(attempt, n, numel, _adam)
    moments = 2 * 8 * zero.partition(numel, n).share
    for rank, (nbytes, of_moments) in enumerate(kept):
        told = f"{n} ranks, {numel} weights, Adam: rank {rank} keeps {nbytes:,} B"
        if nbytes < moments:
            raise Failed(
                f"{told}, less than the moments of its share, {moments:,} B",
                _FORGETS,
            )
        # Beside them there is room for a copy of the share, its gradient, its places in w, and a
        # count of steps.
        if nbytes > 5 * moments // 2 + 64:
            raise Failed(
                f"{told} beside weights and gradients, its share's moments are {moments:,} B",
                _ALL_MOMENTS if of_moments >= 2 * 8 * numel else _TOO_LONG,
            )
    return "2 moments of 1/N"


_WHOLE_SUMS = (
    "That is an all-reduce and an all-gather, 3Ψ. The all-reduce hands every rank the sums of all "
    "shares, and a rank needs those of its own: half of an all-reduce, reduce_scatter, is enough. "
    "(The first ZeRO-1 of DeepSpeed did the same.)"
)
_SUM_OF_ZEROS = (
    "Is the second exchange an all-reduce of the new weights, zeros where others own them? It adds "
    "what nobody has to add, and sends twice what an all_gather of the shares does."
)
_NOTHING_ELSE = (
    "One reduce_scatter of the gradient and one all_gather of the new weights are enough; "
    "nothing else has to travel."
)


def _sent_a_step(
    run: Callable[[int], Any], n: int, steps: tuple[int, int], **only: str
) -> list[int]:
    """Bytes that each rank sends in one more step, from two runs of so many steps; `only` those of
    a collective."""
    books = []
    for count in steps:
        run(count)
        books.append(_ranks.world_of(n).ledger.only(**only).by("rank"))
    few, many = books
    return [(many.get(r, 0) - few.get(r, 0)) // (steps[1] - steps[0]) for r in range(n)]


def _step_bytes(attempt: Callable) -> str:
    for n, numel in ((4, 1000), (3, 10)):
        least = 2 * (n - 1) * 8 * zero.partition(numel, n).share
        steps = functools.partial(_stepped, attempt, n, numel, _adam)
        for rank, each in enumerate(_sent_a_step(steps, n, (1, 3))):
            if each > least:
                summed = _ranks.world_of(n).ledger.only(name="reduce_scatter").total
                three = _SUM_OF_ZEROS if summed else _WHOLE_SUMS
                raise Failed(
                    f"{n} ranks, Ψ = {numel} weights of 8 B: rank {rank} sends {each:,} B a step, "
                    f"2Ψ(N − 1)/N is {least:,} B",
                    three if 1.3 < each / least < 1.7 else _NOTHING_ELSE,
                )
    return "2Ψ(N − 1)/N a step"


class _Reference:
    """The library's own, told like the exercise: one flat parameter, no gradient after the step."""

    def __init__(self, w: nn.Parameter, comm: world.Comm, make: Make) -> None:
        self.optimizer = zero.Optimizer([w], comm, make, level=2)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


SHARD = Exercise(
    id="zero/optimizer",
    reference=_Reference,
    properties=(
        Property("weights", _weights),
        Property("lengths that N does not divide", _remainders),
        Property("bytes held", _state_bytes),
        Property("bytes sent", _step_bytes),
    ),
    hints=(
        "In __init__: zero.partition(w.numel(), N) says how long a share is. "
        "Make a parameter of this rank's own share, and give `make` that one alone.",
        "In step: pad w.grad with zeros to N · share elements; comm.reduce_scatter gives this "
        "rank's share of the sum. Divide by N, step the inner optimizer, "
        "comm.all_gather the shares, cut the padding off, copy into w.data.",
    ),
)

# ── the schedule of level 3 ──────────────────────────────────────────────────────────────────────

Step = tuple[str, int]


_GATHER_FIRST = "Gather a unit before it computes."
_FREED = " Its forward is long over, and its weights were freed: gather it again."
_TURNS = "Forward runs from the first unit to the last, backward from the last to the first."
_GATHERED = "Every gather costs a unit's bytes: free it first, or leave this gather out."
_WHOLE_NUMBERS = "Units are whole numbers, from 0 on."
_REDUCE_ONCE = "Reduce a unit's gradient after its backward, once."


class _Replay:
    """What is whole, and what has a gradient, while the steps of a schedule are gone through."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.whole: set[int] = set()
        self.gradients: set[int] = set()
        self.left = [("forward", i) for i in range(count)]
        self.left += [("backward", i) for i in reversed(range(count))]

    def refusal(self, what: str, i: int) -> tuple[str, str] | None:
        """Why this step cannot be carried out now, and what that usually means."""
        computes, here = what in ("forward", "backward"), i in self.whole
        if what not in ("gather", "forward", "free", "backward", "reduce"):
            return "no such step", "Steps are gather, forward, free, backward, reduce."
        if i not in range(self.count):
            return "no such unit", f"Units are 0 … {self.count - 1}."
        if computes and not here:
            freed = what == "backward" and ("forward", i) not in self.left
            return f"the weights of unit {i} are not here", _GATHER_FIRST + _FREED * freed
        if computes and self.left[:1] != [(what, i)]:
            turn = (
                f"it is the turn of {' '.join(map(str, self.left[0]))}" if self.left else "too much"
            )
            return turn, _TURNS
        if what == "gather" and here:
            return f"unit {i} is here already", _GATHERED
        if what == "free" and not here:
            return f"unit {i} is not here", "Free what has been gathered, once."
        if what == "reduce" and i not in self.gradients:
            return f"there is no gradient of unit {i} to reduce", _REDUCE_ONCE
        return None

    def take(self, what: str, i: int) -> None:
        """Carry the step out."""
        if what == "gather":
            self.whole.add(i)
        elif what == "free":
            self.whole.remove(i)
        elif what == "reduce":
            self.gradients.remove(i)
        else:
            self.left.pop(0)
            self.gradients |= {i} if what == "backward" else set()


def _legal(attempt: Callable, count: int) -> list[Step]:
    """The attempt's steps, each of which can be carried out when its turn comes."""
    steps, case = attempt(count), f"{count} unit{'s' * (count > 1)}"
    several = isinstance(steps, Iterable) and getattr(steps, "ndim", 1) != 0  # a 0-d tensor is none
    steps = list(steps) if several else [steps]
    if not all(isinstance(step, (list, tuple)) and len(step) == 2 for step in steps):
        raise Failed(
            f"{case}: got {str(steps)[:80]}, not a list of pairs",
            "Return pairs such as ('gather', 0).",
        )
    replay = _Replay(count)
    for k, (what, i) in enumerate(steps):
        if not hasattr(i, "__index__"):
            raise Failed(f"{case}, step {k}, {what} {i!r}: no such unit", _WHOLE_NUMBERS)
        if refusal := replay.refusal(what, i):
            raise Failed(f"{case}, step {k}, {what} {i}: {refusal[0]}", refusal[1])
        replay.take(what, i)
    if replay.left:
        raise Failed(
            f"{case}: the steps end before {' '.join(map(str, replay.left[0]))}",
            "Every unit goes forward once and backward once.",
        )
    if replay.gradients or replay.whole:
        gradients = f"unreduced gradients of units {sorted(replay.gradients)}"
        raise Failed(
            f"{case}: the end leaves "
            + (gradients if replay.gradients else f"units {sorted(replay.whole)} whole"),
            "Reduce every gradient, and free every unit, before the step is over.",
        )
    return [tuple(step) for step in steps]


class _Chain:
    """One rank's part of a chain of square matrices that level 3 trains, step by step."""

    width = 8

    def __init__(self, rank: world.Rank, count: int) -> None:
        numel, n = self.width**2, rank.size
        line = torch.linspace(-0.5, 0.5, numel, dtype=torch.float64)
        weights = torch.stack([line * (i + 1) / count for i in range(count)])
        inputs = torch.linspace(-1, 1, 2 * n * self.width, dtype=torch.float64)
        self.comm = rank.comm("dp")
        self.shards = weights.view(count, n, -1)[:, rank.rank].clone()
        self.values = inputs.view(n, 2, self.width)[rank.rank]
        self.whole: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}

    def gather(self, i: int) -> None:
        self.whole[i] = self.comm.all_gather(self.shards[i]).view(self.width, -1)

    def free(self, i: int) -> None:
        del self.whole[i]

    def forward(self, i: int) -> None:
        self.inputs[i] = self.values
        self.values = (self.values @ self.whole[i]).tanh()
        self.slope = 2 * self.values / self.values.numel()  # of the mean square of the output

    def backward(self, i: int) -> None:
        x = self.inputs.pop(i)
        slope = self.slope * (1 - (x @ self.whole[i]).tanh() ** 2)
        self.gradients[i] = (x.T @ slope).flatten()
        self.slope = slope @ self.whole[i].T

    def reduce(self, i: int) -> None:
        mean = self.comm.reduce_scatter(self.gradients.pop(i)) / self.comm.size
        self.shards[i] -= 0.1 * mean


@functools.cache
def _carried_out(steps: tuple[Step, ...], count: int) -> SimpleNamespace:
    """The steps on two ranks: weights after SGD, most units whole, most gradients, bytes sent."""
    n = 2

    def program(rank: world.Rank) -> tuple[Tensor, int, int]:
        chain, whole, gradients = _Chain(rank, count), 0, 0
        for what, i in steps:
            getattr(chain, what)(i)
            whole = max(whole, len(chain.whole))
            gradients = max(gradients, len(chain.gradients))
        return chain.shards, whole, gradients

    results = _ranks.run(n, f"{count} unit{'s' * (count > 1)}", program, _SHARES)
    return SimpleNamespace(
        weights=[shards for shards, _, _ in results],
        whole=results[0][1],
        gradients=results[0][2],
        gathered=_ranks.world_of(n).ledger.only(name="all_gather").by("rank")[0],
        nbytes=8 * _Chain.width**2,
        n=n,
    )


def _schedule_legal(attempt: Callable) -> str:
    for count in (1, 2, 5):
        steps = tuple(_legal(attempt, count))
        mine, plain = _carried_out(steps, count), _carried_out(tuple(zero.unit_order(count)), count)
        if not all(torch.allclose(a, b) for a, b in zip(mine.weights, plain.weights, strict=True)):
            raise Failed(
                f"{count} units: other weights after the step",
                "Is each gradient reduced when all of it is there?",
            )
    return "1, 2 and 5 units"


def _schedule_held(attempt: Callable) -> str:
    for count in (3, 6):
        steps = tuple(_legal(attempt, count))
        run = _carried_out(steps, count)
        if run.whole > 2:
            forward = [what for what, _ in steps[: steps.index(("forward", count - 1))]]
            why = (
                "Nothing is resharded: at the end of the forward pass all weights are here, "
                "as in plain data parallelism. Free a unit after its forward, "
                "and gather it again for its backward."
                if "free" not in forward and run.whole == count
                else (
                    "Free a unit as soon as it has computed, and gather no more than the next one "
                    "ahead, in the backward pass too."
                )
            )
            raise Failed(
                f"{count} units of {units.text(run.nbytes)}: {run.whole} of them are whole at "
                f"once, {units.text(run.whole * run.nbytes)}; 2 are enough",
                why,
            )
        if run.gradients > 2:
            raise Failed(
                f"{count} units of {units.text(run.nbytes)}: "
                f"the whole gradients of {run.gradients} units are held at once, 2 are enough",
                "Reduce a gradient right after the unit's backward, or while the next one "
                "computes: then a rank keeps 1/N of it.",
            )
    return "2 units, at most 2 gradients"


def _schedule_sent(attempt: Callable) -> str:
    for count in (3, 6):
        steps = _legal(attempt, count)
        run = _carried_out(tuple(steps), count)
        share = run.nbytes * (run.n - 1) // run.n
        if run.gathered > 2 * count * share:
            raise Failed(
                f"{count} units: {run.gathered / share:g} gathers, {2 * count} are enough",
                "One gather for a unit's forward and one for its backward make 2Ψ; "
                "with the reduce-scatter, 3Ψ.",
            )
        last: dict[int, str] = {}  # of each unit the last step that wants it whole
        for k, (what, i) in enumerate(steps):
            if what == "free" and last.get(i) == "gather":
                what = f"{count} units, step {k}, free {i}: it was gathered in vain"
                raise Failed(what, _GATHERED)
            last[i] = last.get(i, "") if what == "reduce" else what
    return "at most 3Ψ(N − 1)/N"


def _schedule_prefetch(attempt: Callable) -> str:
    for count in (2, 5):
        steps, computed = _legal(attempt, count), 0
        for k, (what, i) in enumerate(steps):
            computed += what in ("forward", "backward")
            start = next((j for j in reversed(range(k)) if steps[j] == ("gather", i)), 0)
            between = any(verb in ("forward", "backward") for verb, _ in steps[start:k])
            if what in ("forward", "backward") and computed > 1 and not between:
                last = what == "backward" and i == count - 1
                raise Failed(
                    f"{count} units: gather {i} begins right before {what} {i}",
                    "The last unit goes backward right after its forward: don't free it in between."
                    if last
                    else (
                        "Nothing computes while it is on its way. Start it one unit earlier: "
                        "two whole units are allowed, the one that computes and the next."
                    ),
                )
    return "always one ahead"


SCHEDULE = Exercise(
    id="zero/schedule",
    reference=zero.unit_order,
    properties=(
        Property("everything is there when it is used", _schedule_legal),
        Property("bytes held", _schedule_held),
        Property("bytes sent", _schedule_sent),
        Property("prefetch", _schedule_prefetch),
    ),
    hints=(
        "Forward of unit i: start to gather i + 1, compute i, free i. "
        "What is different for the last unit, whose backward comes next?",
        "Backward of unit i, from the last to the first: start to gather i − 1, compute, free i, "
        "reduce its gradient.",
    ),
)

# ── bug hunt: mixed precision, clipped ───────────────────────────────────────────────────────────


def _coarse(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.25)


def _fine(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=2**-11)


def _half(
    attempt: Callable,
    n: int,
    numel: int,
    make: Make,
    slopes: Callable[[int], Tensor],
    max_norm: float,
    steps: int = 1,
    grows: float = 1.0,
) -> tuple[list[Tensor], list[float], list[int]]:
    """Each rank's bf16 weights, last norm and bytes kept; rank r's gradient is slopes(r), and
    `grows` times as long in each further step."""

    def program(rank: world.Rank) -> tuple[Tensor, float, int]:
        w = nn.Parameter(torch.ones(numel, dtype=torch.bfloat16))
        optimizer, norm = attempt(w, rank.comm("dp"), make), None
        for step in range(steps):
            w.grad = None
            (w * (grows**step * slopes(rank.rank)).bfloat16()).sum().backward()
            norm = optimizer.step(max_norm)
        try:
            norm = float("nan") if norm is None else float(norm)
        except (TypeError, ValueError, RuntimeError):
            said = f"step() returns {norm!r:.60}"
            raise Failed(said, "Return the norm of the whole gradient, one number.") from None
        return w.detach().clone(), norm, _kept(optimizer, w)[0]

    results = _ranks.run(n, f"{_ranks.count(n)}, {numel} weights", program, _SHARES)
    return (
        [w for w, _, _ in results],
        [norm for _, norm, _ in results],
        [kept for _, _, kept in results],
    )


def _steep(numel: int) -> Callable[[int], Tensor]:
    """Gradients whose mean is 1, 2, …: later shares are steeper, and no two ranks' point alike."""
    mean = torch.arange(1.0, numel + 1)
    apart = torch.where(mean % 2 == 0, 4.0, -4.0)  # else the mean of the norms were the right one
    return lambda rank: 1.5 * mean + apart if rank % 2 == 0 else 0.5 * mean - apart


def _hunt_plain(attempt: Callable) -> str:
    for n, numel in ((2, 8), (4, 12), (4, 10)):
        results, _, _ = _half(attempt, n, numel, _coarse, _steep(numel), 1e6)
        expected = (torch.ones(numel) - 0.25 * torch.arange(1.0, numel + 1)).bfloat16()
        for rank, w in enumerate(results):
            if not torch.equal(w, expected):
                raise Failed(
                    f"{n} ranks, {numel} weights, nothing to clip: "
                    f"rank {rank} holds other weights than one optimizer on one rank",
                    "This much was right in the code that you got: "
                    "the mean gradient of each share, one step, all shares gathered, "
                    "the padding cut off. "
                    "And a gradient that is shorter than max_norm stays as it is.",
                )
    return "3 cases"


def _why_clipped(norm: float, rank: int, n: int, slopes: Tensor) -> str:
    """The most likely reason for the norm that a rank clips by, when `slopes` is the gradient."""
    true, shares = slopes.norm().item(), slopes.view(n, -1).norm(dim=1)

    def is_(other: float | Tensor) -> bool:
        return math.isclose(norm, other, rel_tol=1e-3)

    if is_(true / 2):
        return "That is the norm after clipping. Return the one from before."
    if math.isclose(norm, true, rel_tol=0.006) and not is_(true):
        return "Nearly: squares added up in bf16 lose digits. Measure in fp32."
    if is_(true**2):
        return "That is the sum of the squares over all ranks: take the root of it."
    if is_(n * true):
        return (
            "That is the norm of the sum of all ranks' gradients, N times too much: "
            "divide by N before you measure."
        )
    if is_(true / n**0.5) or is_(true / len(slopes) ** 0.5):
        return (
            "That is the root of a *mean* of squares. Each rank has another part of the "
            "gradient: add the squares, don't average them."
        )
    if is_(slopes.abs().max()):
        return "That is the largest element. The norm is the root of the sum of all squares."
    if is_(shares[rank]):
        return (
            "That is the local norm, of this rank's share: every rank scales by its own factor, "
            "and the direction of the update changes. Add the *squares* over all ranks "
            "(one all-reduce of one number), then take the root."
        )
    if is_(shares.sum()):
        return "Norms don't add: their squares do. Square, all-reduce, then take the root."
    if is_(shares.max()) or is_(shares.mean()):
        return (
            "The norm of the whole is neither the largest nor the mean of the parts' norms: "
            "add their squares over all ranks, then take the root."
        )
    return (
        "Clip the mean gradient, after it has been reduced: "
        "the norm of a rank's own gradient is another number. And return the norm."
    )


def _hunt_clipping(attempt: Callable) -> str:
    for n, numel in ((2, 8), (4, 12)):
        slopes = torch.arange(1.0, numel + 1)
        true = slopes.norm().item()
        results, norms, _ = _half(attempt, n, numel, _coarse, _steep(numel), true / 2)
        expected = (1 - 0.25 * slopes / 2).bfloat16().float()
        for rank, (w, norm) in enumerate(zip(results, norms, strict=True)):
            if math.isnan(norm):
                raise Failed(
                    f"{n} ranks: rank {rank} got no norm from step()",
                    "Return the norm of the whole gradient, as it was before clipping.",
                )
            if not math.isclose(norm, true, rel_tol=1e-3):
                raise Failed(
                    f"{n} ranks, max_norm = {true / 2:.4g}: rank {rank} clips by a norm of "
                    f"{norm:.4g}, the whole gradient has {true:.4g}",
                    _why_clipped(norm, rank, n, slopes),
                )
            if not torch.allclose(w.float(), expected, rtol=2**-7, atol=2**-7):
                raise Failed(
                    f"{n} ranks, max_norm = {true / 2:.4g}: rank {rank} returns the right norm, "
                    f"{norm:.4g}, and steps by another gradient",
                    "Scale this rank's share by max_norm / norm = 0.5, once, before the step: the "
                    "same factor for all elements and ranks.",
                )
    return "one norm on all ranks"


def _hunt_small(attempt: Callable) -> str:
    results, _, _ = _half(attempt, 2, 4, _fine, lambda rank: torch.ones(4), 1e6, steps=16)
    for rank, w in enumerate(results):
        if not torch.equal(w, torch.full((4,), 1 - 2**-7, dtype=torch.bfloat16)):
            raise Failed(
                f"16 steps of 2⁻¹¹ from 1: rank {rank} is at {w[0].item():g}, not at {1 - 2**-7:g}",
                "Each step is smaller than half the spacing of bf16 below 1. "
                "The fp32 master has to carry it on to the next step: "
                "is it read back from the rounded weights, or never kept in fp32?",
            )
    return "16 steps below the spacing of bf16"


def _hunt_steps(attempt: Callable) -> str:
    n, numel, steps = 2, 8, 3
    mean = torch.arange(1.0, numel + 1, dtype=torch.float32)
    max_norm = 1.5 * mean.norm().item()
    results, _, _ = _half(attempt, n, numel, _sgd, _steep(numel), max_norm, steps, grows=2.0)
    for rank, w in enumerate(results):
        expected, anew = (_clipped(mean, max_norm, steps, anew=anew) for anew in (False, True))
        if not torch.allclose(w.float(), expected, rtol=2**-7, atol=2**-7):
            forgets = torch.allclose(w.float(), anew, rtol=2**-7, atol=2**-7)
            raise Failed(
                f"{steps} steps of SGD with momentum, each gradient twice as long as the one "
                f"before: rank {rank} holds other weights than one optimizer on one rank",
                _FORGETS if forgets else "Each step is scaled by the norm of its own gradient.",
            )
    return f"{steps} steps with momentum"


def _clipped(mean: Tensor, max_norm: float, steps: int, *, anew: bool) -> Tensor:
    """The weights of one optimizer on one rank, or of one made anew in each step, when gradients
    double and are clipped."""
    w = nn.Parameter(torch.ones_like(mean))
    optimizer = _sgd([w])
    for step in range(steps):
        optimizer = _sgd([w]) if anew else optimizer
        w.grad = 2.0**step * mean
        nn.utils.clip_grad_norm_([w], max_norm)
        optimizer.step()
    return w.detach()


def _hunt_held(attempt: Callable) -> str:
    n, numel = 4, 1000
    _, _, kept = _half(attempt, n, numel, _adam, _steep(numel), 1.0, steps=2)
    share = zero.partition(numel, n).share
    least = 12 * share  # an fp32 master and two fp32 moments
    for rank, nbytes in enumerate(kept):
        # Beside them there is room for the share's gradient in bf16 and fp32, and a count of steps.
        if nbytes > least + 8 * share + 64:
            raise Failed(
                f"{n} ranks, {numel} weights, Adam: rank {rank} keeps {nbytes:,} B; "
                f"master and moments of its share are {least:,} B",
                "The master copy and the moments are 12 of the 16 bytes of each weight: "
                "they must be of this rank's share alone.",
            )
    return "12 bytes a weight, 1/N of them"


def _hunt_sent(attempt: Callable) -> str:
    n, numel = 4, 1000
    least = (n - 1) * 2 * zero.partition(numel, n).share  # a bf16 share to every other rank
    steps = functools.partial(_half, attempt, n, numel, _coarse, _steep(numel), 1.0)
    reduced = _sent_a_step(steps, n, (1, 2), name="reduce_scatter")
    for rank, each in enumerate(_sent_a_step(steps, n, (1, 2))):
        # Gradients may be reduced in fp32; the new weights are bf16, and a norm is one number.
        rest = each - reduced[rank]
        if reduced[rank] <= 2 * least and 1.9 * least < rest < 2 * least + 64:
            raise Failed(
                f"{n} ranks, Ψ = {numel} weights of 2 B: beside its reduce-scatter rank {rank} "
                f"sends {rest:,} B a step, {least:,} B and a number are enough",
                "Do the new weights travel in fp32, or all gradients for their norm? What travels "
                "is bf16, and a norm needs one number of each rank.",
            )
        if reduced[rank] > 2 * least or rest > least + 64:
            raise Failed(
                f"{n} ranks, Ψ = {numel} weights of 2 B: rank {rank} sends {each:,} B a step; "
                f"2Ψ(N − 1)/N is {2 * least:,} B, or {3 * least:,} B with gradients reduced in "
                "fp32, and the norm is one number",
                "Whole gradients need not travel for a norm: each rank knows the squares of its "
                "share, and their sum is one number. "
                "And the new weights travel in bf16.",
            )
    return "2Ψ(N − 1)/N and a number"


class _HalfReference:
    """The library's own, told like the exercise."""

    def __init__(self, w: nn.Parameter, comm: world.Comm, make: Make) -> None:
        self.comm = comm
        self.optimizer = zero.Optimizer([w], comm, make, level=2)

    def step(self, max_norm: float) -> Tensor:
        norm = zero.clip_grad_norm(self.optimizer.collect(), self.comm, max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


HUNT = Exercise(
    id="zero/repair",
    untouched="4b3b0de1",
    reference=_HalfReference,
    properties=(
        Property("one step, nothing clipped", _hunt_plain),
        Property("clipping", _hunt_clipping),
        Property("small updates", _hunt_small),
        Property("step after step", _hunt_steps),
        Property("bytes held", _hunt_held),
        Property("bytes sent", _hunt_sent),
    ),
    hints=(
        "Two bugs. Which number in `step` is of this rank's share alone, and should be of the "
        "whole gradient? "
        "What is read from w, in every step, that was more exact before?",
        "The norm: all-reduce the square of self.master.grad.norm(), take the root, and scale "
        "master.grad by max_norm / norm where that is below 1. The master: "
        "it is copied from the weights once, in __init__, and never again.",
    ),
)

EXERCISES = (SHARD, SCHEDULE, HUNT)
