"""Checkpointing plans: what to keep and what to compute again, simulated, and made optimal.

A chain takes x₀ to xₙ; stage i makes xᵢ₊₁ from xᵢ and, if asked, records what its own backward pass
will need. A plan is a list of steps:

    forward i     xᵢ₊₁ from xᵢ, recording nothing
    record i      the same, and stage i's interior stays
    backward i    the gradient of xᵢ from that of xᵢ₊₁; the interior, xᵢ₊₁ and its gradient go
    drop i        xᵢ goes

Both ways through a stage are one forward evaluation. Bytes are those held after each step; x₀ and
the weights belong to the caller.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from labutils import units
from labutils.ledger import Ledger, Line
from labutils.timeline import History, Moment, Span, Timeline
from labutils.units import Reason

Cost = int | float
_AS_OUTPUT: Any = None  # the default of a gradient's bytes: never None later
OPERATIONS = ("forward", "record", "backward", "drop")


@dataclass(frozen=True, slots=True)
class Stage:
    """One link of a chain.

    forward: the cost of its forward pass, in any unit
    output: bytes of its output
    interior: bytes that it records beside input and output
    gradient: bytes of its output's gradient; as many as the output, unless said otherwise
    """

    forward: Cost
    output: int
    interior: int
    gradient: int = _AS_OUTPUT

    def __post_init__(self) -> None:
        if self.gradient is None:
            object.__setattr__(self, "gradient", self.output)
        units.positive_fields(self, "forward", or_zero=True)
        units.whole_fields(self, "output", "interior", "gradient", minimum=0)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a chain costs: its stages, the bytes of its input and of the input's gradient.

    The latter are 0 where nobody asks for it, as for tokens.
    """

    stages: Sequence[Stage]
    input: int
    input_gradient: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        for each in self.stages:
            units.instance(each, Stage, "Costs, for each stage,")
        units.whole_fields(self, "input", "input_gradient", minimum=0)

    def __len__(self) -> int:
        return len(self.stages)

    @property
    def gradients(self) -> tuple[int, ...]:
        """Bytes of the gradient of each value; that of the chain's output is the caller's."""
        return self.input_gradient, *(stage.gradient for stage in self.stages[:-1]), 0

    @classmethod
    def uniform(
        cls, n: int, *, output: int = 1, interior: int = 0, gradient: int = 0
    ) -> "Costs":
        """n equal stages of cost 1 whose input is as large as their outputs.

        output, interior, gradient: bytes of each; without gradients, which are the same in every
            plan, unless given
        """
        n = _listed(n)
        return cls((Stage(1, output, interior, gradient),) * n, output, gradient)


def _listed(n: int) -> int:
    units.writable(n := units.whole(n, "n", 1), "the stages are n =", "take fewer")
    return n


@dataclass(frozen=True, slots=True)
class Step:
    """One move of a plan: an operation on a stage, or `drop` of a value."""

    op: str
    at: int

    def __post_init__(self) -> None:
        if self.op not in OPERATIONS:
            known = ", ".join(OPERATIONS)
            raise ValueError(Reason("operation", f"a step is one of {known}, got {self.op!r}"))

    def __str__(self) -> str:
        return f"{self.op} {self.at}"


@dataclass(frozen=True, slots=True)
class Held:
    """What is held between two steps.

    values: by index
    recorded: the stages whose interior is held
    gradient: the index of the value whose gradient has been reached
    """

    values: frozenset[int]
    recorded: frozenset[int]
    gradient: int


@dataclass(frozen=True)
class Reversal:
    """A plan: a legal list of steps that takes a chain of `n` stages forward and all the way back.

    >>> print(keep_nothing(2))
    forward 0 · record 1 · backward 1 · drop 1 · record 0 · backward 0
    """

    n: int
    steps: tuple[Step, ...]
    name: str = ""

    def __post_init__(self) -> None:
        units.whole_fields(self, "n")
        *_, end = self.states
        if end.gradient or len(end.values) > 1:
            end_is = f"the gradient of x{end.gradient} and values {sorted(end.values)}"
            must = "it must end with those of x0 alone"
            raise ValueError(Reason("end", f"the plan ends with {end_is}: {must}"))

    @functools.cached_property
    def states(self) -> tuple[Held, ...]:
        """What is held at the start and after every step.

        Raises: ValueError at the first illegal step, with its number and the reason.
        """
        states = [Held(frozenset([0]), frozenset(), self.n)]
        for number, step in enumerate(self.steps):
            if reason := _why_illegal(states[-1], step, self.n):
                said = f"step {number}, {step}: {reason}"
                raise ValueError(Reason(reason.name, said))
            states.append(_after(states[-1], step))
        return tuple(states)

    @property
    def evaluations(self) -> tuple[int, ...]:
        """How often each stage's forward pass is computed."""
        counted = Counter(step.at for step in self.steps if step.op in ("forward", "record"))
        return tuple(counted[stage] for stage in range(self.n))

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The plan on a clock that ticks with every computation; lanes are stages, or values.

        A span is a computation ("forward", "record", "backward"), or how long a "value" or an
        "interior" is held.
        """
        clock, spans, since = 0, [], {("value", 0): 0}
        for step, after in zip(self.steps, self.states[1:], strict=True):
            if step.op != "drop":
                spans.append(Span(step.at, step.op, str(step), clock, clock + 1))
                clock += 1
            held = {("value", i) for i in after.values} | {("interior", i) for i in after.recorded}
            for kind, i in sorted(since.keys() - held):
                spans.append(Span(i, kind, "", since.pop((kind, i)), clock))
            since |= dict.fromkeys(sorted(held - since.keys()), clock)
        return Timeline((*spans, Span(0, "value", "", since["value", 0], clock)))

    def on(self, costs: Costs) -> "Run":
        """The run that this plan would be on a chain of those costs.

        >>> sweep = segments(16, 4).on(Costs.uniform(16))
        >>> sum(sweep.evaluations), sweep.peak
        (28, 8)
        """
        units.instance(costs, Costs, "Reversal.on")
        require_length(self, len(costs))
        sizes = [costs.input, *(stage.output for stage in costs.stages)]
        amounts = []
        for held in self.states:
            values = sum(sizes[i] for i in held.values)
            interiors = sum(costs.stages[i].interior for i in held.recorded)
            amounts.append((values, interiors, costs.gradients[held.gradient]))
        evaluated = zip(costs.stages, self.evaluations, strict=True)
        cost = sum(stage.forward * times for stage, times in evaluated)
        return Run(self.evaluations, cost, history(self, amounts))

    def __str__(self) -> str:
        return " · ".join(map(str, self.steps))


def _why_illegal(state: Held, step: Step, n: int) -> Reason | None:
    """Why a plan of `n` stages cannot take a step; None if it can."""
    op, i = step.op, step.at
    user = {i - 1, i} & state.recorded if op == "drop" else set()
    if i > n - (op != "drop"):
        return Reason("stages", f"the chain has stages 0 … {n - 1}")
    if op in ("forward", "record") and i not in state.values:
        return Reason("gone", f"its input x{i} is not held: compute it again from an earlier value")
    if op in ("forward", "record") and i + 1 in state.values:
        return Reason("again", f"x{i + 1} is held already: drop it first, or use it")
    if op == "backward" and i not in state.recorded:
        return Reason("recorded", f"stage {i} has not been recorded: a b node needs its f node")
    if op == "backward" and state.gradient != i + 1:
        reached = f"the gradient has reached x{state.gradient}"
        return Reason("order", f"{reached}: stage {state.gradient - 1} is next")
    if op == "drop" and i not in state.values:
        return Reason("absent", f"x{i} is not held")
    if op == "drop" and i == 0:
        return Reason("caller", "x0 belongs to the caller")
    if user:
        needs = f"needs x{i} for its backward pass"
        return Reason("needed", f"stage {min(user)} was recorded and {needs}")
    return None


def _after(state: Held, step: Step) -> Held:
    """What is held after a legal step."""
    op, i = step.op, step.at
    if op == "backward":
        return Held(state.values - {i + 1}, state.recorded - {i}, i)
    if op == "drop":
        return replace(state, values=state.values - {i})
    recorded = state.recorded | {i} if op == "record" else state.recorded
    return Held(state.values | {i + 1}, recorded, state.gradient)


@dataclass(frozen=True)
class Run:
    """What a plan did, simulated or executed.

    evaluations: forward evaluations of each stage
    cost: of all of them together
    history: the bytes held after every step

    An execution also has the chain's `output` and the gradient of its input.
    """

    evaluations: tuple[int, ...]
    cost: Cost
    history: History
    output: Any = None
    input_gradient: Any = None

    @property
    def peak(self) -> int:
        """Most bytes held after any step, x₀ included."""
        return self.history.peak.ledger.total


def history(plan: Reversal, amounts: Iterable[tuple[int, int, int]]) -> History:
    """The history of a plan, from the bytes of values, interiors and gradient at its start and
    after every step; from the first backward step on it is the backward pass."""
    moments = []
    events = ("start", *map(str, plan.steps))
    for event, state, amount in zip(events, plan.states, amounts, strict=True):
        phase = "forward" if state.gradient == plan.n else "backward"
        values, interiors, gradient = amount
        lines = [
            Line("values", values, component="activations"),
            Line("interiors", interiors, component="activations"),
            Line("gradient", gradient, component="gradients"),
        ]
        moments.append(Moment(phase, event, Ledger(lines)))
    return History(moments)


def require_length(plan: Reversal, n: int) -> None:
    """Nothing, or an error where a chain of n stages is not the plan's."""
    units.instance(plan, Reversal, "a chain")
    if plan.n != n:
        raise ValueError(f"the plan is for {plan.n} stages, the chain has {n}")


# Every plan below is one rule, asked about ever smaller pieces of the chain. For stages s … t, with
# x_s held, it either splits at a stage j (compute up to x_j, keep x_j, reverse j … t, drop x_j,
# reverse s … j−1) or answers None (record s, reverse the rest, reverse s).
Rule = Callable[[int, int, Any], tuple[int | None, Any, Any]]


def _unroll(n: int, rule: Rule, state: Any = None, name: str = "") -> Reversal:
    """The plan that a rule makes for n stages.

    Asked about stages s … t, the rule returns (split or None, state for the right part, state for
    the left part).
    """
    n = units.whole(n, "n", 1)
    steps: list[Step] = []
    todo: list[Any] = [(0, n - 1, state)]
    while todo:
        item = todo.pop()
        if isinstance(item, Step):
            steps.append(item)
            continue
        s, t, state = item
        split, right, left = rule(s, t, state)
        if split is None:
            steps.append(Step("record", s))
            todo += [Step("backward", s), *([(s + 1, t, right)] if s < t else [])]
        else:
            for i in range(s, split):
                steps += [Step("forward", i), *([Step("drop", i)] if i > s else [])]
            todo += [(s, split - 1, left), Step("drop", split), (split, t, right)]
    return Reversal(n, tuple(steps), name)


def segments(n: int, k: int) -> Reversal:
    """The plan that keeps the inputs of `k` segments of n stages, and records one at a time.

    k = 1 keeps everything, k = n keeps every stage's input, k = √n the fewest values. The last
    segment is recorded on the way, because its backward pass comes next: libraries that wrap every
    layer compute it twice.

    >>> [sum(segments(n, k).evaluations) for n, k in [(16, 1), (16, 4), (16, 16)]]
    [16, 28, 31]
    >>> layers, pieces = 16, 4
    >>> held = segments(layers, pieces).on(Costs.uniform(layers)).peak
    >>> held == pieces + layers / pieces  # inputs and outputs held, least for √layers pieces
    True

    Cost: n + (n − last segment) forward evaluations; about k + n/k values held.
    Raises ValueError for a k that is not 1 … n.
    Source: Chen et al. 1604.06174, algorithm 1 and eq. (1).
    """
    n = _listed(n)
    if (k := units.whole(k, "k", 1)) > n:
        raise ValueError(f"{n} stages cannot be cut into {k} segments: use 1 … {n}")
    starts = tuple(part * (n // k) + min(part, n % k) for part in range(1, k))
    name = {n: "every stage", 1: "keep everything"}.get(k, f"{k} segments")

    def rule(s: int, t: int, rest: tuple[int, ...]) -> tuple:
        return (rest[0], rest[1:], ()) if rest else (None, (), ())

    return _unroll(n, rule, starts, name)


def keep_nothing(n: int) -> Reversal:
    """The plan that starts from x₀ again for every single stage.

    Cost: n(n + 1)/2 forward evaluations, beside x₀ no more than one value and one recorded stage.
    """
    n = units.whole(n, "n", 1)
    units.writable(n * (n + 1) // 2, f"the evaluations of n={n} are", "take fewer stages")
    return _unroll(n, lambda s, t, _: (None if s == t else t, None, None), None, "keep nothing")


def binomial_evaluations(n: int, snapshots: int) -> int:
    """The fewest forward evaluations that reverse n equal stages with so many `snapshots`.

    These are the values kept at most, x₀ among them; one stage is recorded at a time.

    >>> [binomial_evaluations(*case) for case in [(10, 3), (100, 10), (1000, 10)]]
    [25, 322, 4636]

    Source: Griewank & Walther, Revolve (ACM TOMS 26, 2000): r·n − C(c + r, c + 1) steps that
    advance, for the least r with C(c + r, c) ≥ n; plus the n that record, which the paper counts
    with the reverse sweep.
    """
    n = _listed(n)
    snapshots = units.whole(snapshots, "snapshots", 1)
    r = 0
    while math.comb(snapshots + r, snapshots) < n:
        r += 1
    return n + r * n - math.comb(snapshots + r, snapshots + 1)


def binomial(n: int, snapshots: int) -> Reversal:
    """The plan that reaches `binomial_evaluations`: the optimum for equal stages that are recorded
    one at a time. Where stages record little beside their outputs, `plan` finds cheaper ones."""
    fewest = functools.cache(binomial_evaluations)
    fewest(n, snapshots)

    def rule(s: int, t: int, free: int) -> tuple:
        def evaluations(split: int) -> int:
            return split - s + fewest(t - split + 1, free - 1) + fewest(split - s, free)

        if s == t:
            return None, 0, 0
        split = t if free == 1 else min(range(s + 1, t + 1), key=evaluations)
        return split, free - 1, free

    return _unroll(n, rule, snapshots, f"{snapshots} snapshots")


@dataclass(frozen=True, slots=True)
class _Front:
    """The best trades of a piece of the chain: with `bytes[k]` of room the cost is `costs[k]`.

    Bytes rise, costs fall.
    """

    bytes: np.ndarray
    costs: np.ndarray

    def cost(self, room: Any) -> Any:
        """The cost in a room, or in each of many; none may be below the least."""
        return self.costs[np.searchsorted(self.bytes, room, "right") - 1]

    @classmethod
    def of(cls, needs: list[np.ndarray], costs: list[np.ndarray]) -> "_Front":
        need, cost = np.concatenate(needs), np.concatenate(costs)
        order = np.lexsort((cost, need))
        need, cost = need[order], cost[order]
        better = np.ones(len(cost), bool)
        better[1:] = cost[1:] < np.minimum.accumulate(cost)[:-1]
        return cls(need[better], cost[better])


class _Way(NamedTuple):
    """A way to reverse a piece: forward passes for `cost`, the right part beside `kept` bytes, then
    the left part.

    split: where the right part begins if x_split is kept, None where the first stage is recorded
    fullest: most bytes that these forward passes, and the gradients around them, hold
    """

    split: int | None
    kept: int
    fullest: int
    cost: Cost
    right: _Front
    left: _Front

    @property
    def least(self) -> int:
        """The least room for it."""
        return max(self.fullest, self.right.bytes[0] + self.kept, self.left.bytes[0])

    def total(self, room: Any) -> Any:
        """The cost of all of it in a room, or in each of many."""
        return self.cost + self.right.cost(room - self.kept) + self.left.cost(room)


class _Optimum:
    """Dynamic programming over the pieces s … t of a chain.

    C(s, t) = best of  record s, then C(s+1, t)
                  and, for every split j,  forward s … j−1, C(j, t), C(s, j−1).

    A piece's answer is a whole front of (bytes held at its fullest moment on top of x_s, cost),
    exact to the byte, so that one pass serves every budget. Equal pieces share one front.
    """

    def __init__(self, costs: Costs) -> None:
        n, remedy = len(costs), "join neighbours to one stage"
        units.writable(n * n, f"the pieces of n={n} stages are", remedy, most=10**6)
        self.stages = costs.stages
        self.gradient = costs.gradients  # of xᵢ: held while stage i−1 waits for its backward pass
        around = zip(costs.stages, self.gradient[:-1], self.gradient[1:], strict=True)
        kinds: dict[tuple, int] = {}
        self.kinds = tuple(kinds.setdefault(kind, len(kinds)) for kind in around)
        self.known: dict[tuple[int, ...], _Front] = {
            (): _Front(np.array([0]), np.array([0]))
        }  # of a piece without stages
        for length in range(1, len(costs) + 1):
            for s in range(len(costs) - length + 1):
                key = self.kinds[s : s + length]
                if key not in self.known:
                    self.known[key] = self.solve(s, s + length - 1)

    def front(self, s: int, t: int) -> _Front:
        return self.known[self.kinds[s : t + 1]]

    def ways(self, s: int, t: int) -> Iterator[_Way]:
        first, before, after = self.stages[s], self.gradient[s], self.gradient[t + 1]
        kept = first.interior + first.output
        rest = self.front(s + 1, t), self.front(s, s - 1)
        yield _Way(None, kept, max(kept + after, before), first.forward, *rest)
        fullest, previous = before, 0
        cost: Cost = 0
        for j, stage in enumerate(self.stages[s:t], s + 1):
            fullest = max(fullest, previous + stage.output + after)
            cost += stage.forward
            previous = stage.output
            yield _Way(j, stage.output, fullest, cost, self.front(j, t), self.front(s, j - 1))

    def solve(self, s: int, t: int) -> _Front:
        needs, costs = [], []
        for way in self.ways(s, t):
            rooms = np.concatenate([way.right.bytes + way.kept, way.left.bytes])
            rooms = np.unique(np.maximum(rooms, way.least))
            needs.append(rooms)
            costs.append(way.total(rooms))
        return _Front.of(needs, costs)

    def rule(self, s: int, t: int, room: int) -> tuple[int | None, int, int]:
        possible = (way for way in self.ways(s, t) if way.least <= room)
        best = min(possible, key=lambda way: way.total(room))
        return best.split, room - best.kept, room


_optimum = functools.lru_cache(maxsize=8)(_Optimum)


def frontier(costs: Costs) -> tuple[tuple[int, Cost], ...]:
    """Every trade worth making on a chain: (peak bytes, cost of the forward passes).

    Bytes rise, costs fall. Of plans that keep a value, once kept, until its own backward pass.

    >>> frontier(Costs.uniform(3))
    ((3, 5), (4, 3))
    """
    units.instance(costs, Costs, "frontier")
    front = _optimum(costs).front(0, len(costs) - 1)
    needs = (front.bytes + costs.input).tolist()
    return tuple(zip(needs, front.costs.tolist(), strict=True))


def smallest_budget(costs: Costs) -> int:
    """The fewest bytes that any plan of `plan` can peak at, x₀ included."""
    return frontier(costs)[0][0]


def plan(costs: Costs, budget: int) -> Reversal:
    """The cheapest plan whose peak is at most `budget` bytes, x₀ included, and of these the lowest.

    >>> chain = Costs([Stage(5, 10, 60), Stage(1, 40, 5), Stage(5, 10, 60)], input=10)
    >>> cheapest = plan(chain, 160)
    >>> cheapest.on(chain).peak, cheapest.evaluations
    (135, (2, 1, 1))

    Cost: O(n³) merges of trade-off curves for n stages that all differ (n = 40: a third of a
    second), O(n²) for equal ones.
    Invariant: optimal among plans that keep a value, once kept, until its own backward pass; its
    simulated cost and peak are those promised.
    Raises ValueError where no plan fits, with the smallest peak.
    Source: Beaumont et al. 1911.13214 (forward, record and drop on heterogeneous chains); here the
    recurrence is solved for all budgets at once.
    """
    units.instance(costs, Costs, "plan")
    budget = units.whole(budget, "budget")
    optimum = _optimum(costs)
    needs = optimum.front(0, len(costs) - 1).bytes
    rooms = needs[needs <= budget - costs.input]
    if not len(rooms):
        least = int(needs[0]) + costs.input
        smallest = f"the smallest possible one is {least:,} ({units.text(least)})"
        refused = f"no plan fits a budget of {budget:,} bytes ({units.text(budget)})"
        raise ValueError(f"{refused}: {smallest}")
    name = f"optimal for {units.text(budget)}"
    return _unroll(len(costs), optimum.rule, int(rooms[-1]), name)
