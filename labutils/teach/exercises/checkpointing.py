"""Write a plan, count the best one, write `checkpoint`, and the test that a broken one fails."""

import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from labutils import checkpointing, measure, units
from labutils.checkpointing import Reversal, Step
from labutils.teach.exercises import Exercise, Failed, Property

# ── a plan of k segments ─────────────────────────────────────────────────────────────────────────


_ON_PAPER = "Follow one segment on paper: what is held before each step, and what after it?"
_ILLEGAL = {  # by the reason's name, what it usually means
    "caller": (
        "Every segment's input goes after its backward pass, except x0: it is the caller's."
    ),
    "needed": (
        "You drop a value too early: what a recorded stage has read, and what it has made, stays "
        "until its backward pass."
    ),
    "again": (
        "A value that is held may not be made again. In the first sweep drop what lies inside a "
        "segment; a backward step frees its stage's output by itself."
    ),
    "gone": (
        "Nothing can be computed from a value that is gone. Keep the input of each segment, and "
        "start from it when you compute the segment again."
    ),
    "absent": "You drop what is not there: `backward i` has freed the output of stage i.",
    "recorded": (
        "A stage must be recorded before its backward pass: `forward` keeps nothing for it."
    ),
    "order": (
        "Gradients come from the right: take the stages of a segment backward in reverse order, "
        "and the last segment first."
    ),
    "end": (
        "Something is missing at the end: each stage needs its backward pass, and the input of "
        "each segment but the first must go."
    ),
    "stages": "Stages are counted from 0: the last one is n − 1.",
    "operation": "There are four operations: forward, record, backward and drop.",
}


def _whole(at: Any) -> Any:
    """The int that a stage's number is, whatever it is kept in; the value itself if it is none."""
    try:
        return operator.index(at)
    except TypeError:
        return at


def _plan(attempt: Callable, n: int, k: int) -> Reversal:
    made = attempt(n, k)
    if isinstance(made, Reversal):
        return made
    steps = list(made) if isinstance(made, Iterable) else [made]
    steps = [(step.op, step.at) if isinstance(step, Step) else step for step in steps]
    if not steps or not all(isinstance(step, (tuple, list)) and len(step) == 2 for step in steps):
        raise Failed(
            f"n = {n}, k = {k}: you returned {made!r:.60}",
            "Return a list of pairs, such as [('record', 0), ('backward', 0)].",
        )
    try:
        return Reversal(n, tuple(Step(op, _whole(at)) for op, at in steps))
    except (TypeError, ValueError) as error:
        why = _ILLEGAL.get(getattr(error.args[0], "name", ""), _ON_PAPER)
        raise Failed(f"n = {n}, k = {k}: {error}", why) from None


_CASES = [(4, 2), (6, 1), (6, 6), (9, 3), (16, 4)]


def _why_evaluations(n: int, k: int, found: int, best: int) -> str:
    """The most likely reason for so many forward evaluations of n stages."""
    if found < best:
        return (
            "What is recorded in the first sweep stays until its backward pass. "
            "Record the last segment alone then, and the others one at a time."
        )
    if found == 2 * n - k and k * k != n:
        return "That is right for n/k segments: k is how many there are, n/k the stages of each."
    if found == 2 * n:
        return (
            "You compute the last segment twice. Its backward pass comes right after its forward "
            "pass: record it on the way."
        )
    if found > 2 * n:
        return (
            "Do you start from x0 for every segment? "
            "Keep each segment's input during the first sweep, and start from there."
        )
    return "Every segment but the last is computed twice, the last once."


def _evaluations(attempt: Callable) -> str:
    for n, k in _CASES:
        found, best = sum(_plan(attempt, n, k).evaluations), 2 * n - n // k
        if found != best:
            raise Failed(
                f"n = {n}, k = {k}: {found} forward evaluations, "
                f"{k} segment{'s need' if k > 1 else ' needs'} {best}",
                _why_evaluations(n, k, found, best),
            )
    return f"{len(_CASES)} chains"


def _values(attempt: Callable) -> str:
    for n, k in _CASES:
        most = max(len(state.values) for state in _plan(attempt, n, k).states)
        best = max(k + n // k, min(n, 2) + 1)
        if most > best:
            raise Failed(
                f"n = {n}, k = {k}: {most} values held at once, {best} are enough",
                "Something stays that nobody needs: a value inside a segment after the first "
                "sweep has passed it, or a segment's input after its end.",
            )
    return f"{len(_CASES)} chains"


SEGMENTS = Exercise(
    id="checkpointing/segments",
    reference=checkpointing.segments,
    properties=(
        Property(
            "legal", lambda attempt: f"{len([_plan(attempt, *case) for case in _CASES])} chains"
        ),
        Property("forward evaluations", _evaluations),
        Property("values held", _values),
    ),
    hints=(
        "First sweep: ('forward', i), then ('drop', i) unless i is where a segment starts (0 is "
        "the caller's, it stays). Stop where the last segment starts.",
        "Then from the last segment to the first: record all its stages, take them backward in "
        "reverse order, drop the segment's input unless it is x0.",
        "For n = 4, k = 2: forward 0, forward 1, drop 1, record 2, record 3, backward 3, "
        "backward 2, drop 2, record 0, record 1, backward 1, backward 0.",
    ),
)

# ── the fewest evaluations ───────────────────────────────────────────────────────────────────────


@functools.cache
def fewest_evaluations(n: int, snapshots: int) -> int:
    """Forward evaluations of the best plan for n equal stages; x0 is one of the snapshots.

    >>> fewest_evaluations(100, 10)
    322
    """
    if n == 1 or snapshots == 1:
        return n * (n + 1) // 2
    return min(
        m + fewest_evaluations(n - m, snapshots - 1) + fewest_evaluations(m, snapshots)
        for m in range(1, n)
    )


_KNOWN = [(1, 1, 1), (4, 1, 10), (10, 1, 55), (5, 5, 9), (10, 3, 25)]
_GRID = [(n, snapshots) for n in range(1, 13) for snapshots in range(1, 7)]
_LONG = [(60, 6), (100, 10)]
_CALLS = 1_000_000  # a cached recurrence makes some 50,000 for the longest chain


def _why_not_fewest(n: int, snapshots: int, found: object, best: int) -> str:
    """The most likely reason for another count than the fewest."""
    if found == best - n:
        return (
            "You are short by exactly n: each stage is computed once more to record it, "
            "right before its backward pass."
        )
    if found == checkpointing.binomial_evaluations(n, snapshots + 1):
        return (
            f"That is right for {snapshots + 1}: x0 takes one of the snapshots, "
            "because every restart of the leftmost part needs it."
        )
    if found == checkpointing.binomial_evaluations(n, 1) and snapshots > 1 < n:
        return "That is what x0 alone costs. Each further snapshot may hold an x_m: try every m."
    if (n, snapshots, found) == (10, 3, 27):
        return (
            "A sum with one snapshot less on both sides, or with one choice of m alone, is too "
            "large: x_m is gone when the left part is taken, so that has all snapshots again, and "
            "the best m is not the middle. Try every one."
        )
    if found == n and snapshots == 1:
        return (
            "With x0 alone, every stage starts from x0 again. Only snapshots may be held, "
            "not a segment: split a segment again."
        )
    if found == n:
        return "Reaching x_m is not free: its m evaluations belong to the sum."
    if found == 2 * n - 1 and snapshots == 1:
        return (
            "Where does your recurrence end? With x0 alone no x_m can be kept: every stage starts "
            "from x0 again, n(n + 1)/2 evaluations. And the right part has one snapshot less, "
            "because x_m occupies it."
        )
    if found == n + n - math.ceil(n / min(snapshots, n)):
        return (
            "You computed every segment twice, which needs its values all at once. "
            "Only snapshots may be held: split a segment again."
        )
    if isinstance(found, (int, float)) and found < best:
        return (
            "No plan gets by with so few. The right part has one snapshot less, "
            "because x_m occupies it until the right part is done."
        )
    return (
        "Try every m: m evaluations to reach x_m, the right part with one snapshot less, "
        "the left part with all of them again."
    )


def _fewest(attempt: Callable) -> str:
    small = [(n, s, checkpointing.binomial_evaluations(n, s)) for n, s in _GRID]
    for n, snapshots, best in _KNOWN + small:
        found = attempt(n, snapshots)
        if found != best:
            raise Failed(
                f"n = {n}, {snapshots} snapshot{'s' * (snapshots > 1)}: "
                f"you count {found}, the fewest is {best}",
                _why_not_fewest(n, snapshots, found, best),
            )
    return f"{len(_KNOWN + small)} cases"


@contextmanager
def _counted(n: int, snapshots: int) -> Iterator[None]:
    """Raises Failed when more than `_CALLS` functions are called inside."""
    calls = itertools.count(1)

    def count(frame: object, event: str, argument: object) -> None:
        if event == "call" and next(calls) > _CALLS:
            sys.setprofile(before)
            raise Failed(
                f"n = {n}, {snapshots} snapshots: more than {_CALLS:,} calls, and no end in sight",
                "Your recurrence computes the same pieces again and again. There are only "
                "n · snapshots of them: remember each result, with functools.cache.",
            )

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


def _in_time(attempt: Callable) -> str:
    for n, snapshots in _LONG:
        with _counted(n, snapshots):
            found = attempt(n, snapshots)
        if found != checkpointing.binomial_evaluations(n, snapshots):
            raise Failed(
                f"n = {n}, {snapshots} snapshots: {found} is not the fewest",
                "Is a result remembered under the wrong key? It depends on n and on the snapshots.",
            )
    return f"{_LONG[-1][0]} stages"


BINOMIAL = Exercise(
    id="checkpointing/fewest-evaluations",
    reference=fewest_evaluations,
    properties=(Property("fewest evaluations", _fewest), Property("longer chains", _in_time)),
    hints=(
        "One stage costs 1. With one snapshot (x0 alone) there is no choice: "
        "restart from x0 for every stage.",
        "Otherwise choose m: m evaluations bring you to x_m, keep it; "
        "reverse the n − m stages on its right with one snapshot less; then the m on its left.",
        "best(n, s) = min over m of m + best(n − m, s − 1) + best(m, s). Use functools.cache.",
    ),
)

# ── checkpoint ───────────────────────────────────────────────────────────────────────────────────


class _Block(nn.Module):
    """Something to checkpoint: weights, and dropout if wanted."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16)
        )
        self.calls = 0
        with torch.no_grad():
            for k, parameter in enumerate(self.parameters()):
                parameter.copy_(
                    torch.linspace(-0.4, 0.5, parameter.numel()).view_as(parameter).roll(k + 1)
                )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers(x)


def _same(found: Tensor | None, right: Tensor | None) -> bool:
    return found is not None and right is not None and torch.equal(found, right)


def _backward(y: Tensor) -> None:
    """The backward pass of y; what it stops with is told in words that help."""
    try:
        y.square().sum().backward()
    except (RuntimeError, IndexError) as error:
        if "does not require grad" in str(error):
            advice = (
                "Inside backward, autograd records nothing: compute the function again, and all "
                "that you make of its result, under torch.enable_grad(), on "
                "x.detach().requires_grad_()."
            )
            raise Failed("what you take backward there has recorded no graph", advice) from None
        if isinstance(error, IndexError) or "shape" in str(error) or "size" in str(error):
            advice = (
                "If you fill slots by hooks: both evaluations must save the same tensors in the "
                "same order. An input that needs no gradient must need none the second time "
                "either: x.detach().requires_grad_(x.requires_grad)."
            )
            raise Failed(f"the backward pass stopped: {error}", advice) from None
        raise


def _step(
    call: Callable, dropout: float
) -> tuple[Tensor, Tensor | None, list[Tensor | None], Tensor]:
    """Output, gradients of input and weights, and the random number that comes after the step."""
    block, x = _Block(dropout), torch.linspace(-1, 1, 8 * 16).view(8, 16).requires_grad_()
    torch.manual_seed(0)
    torch.rand(1)  # an earlier layer's dropout: setting the seed anew in the block now shows
    y = call(block, x)
    if not isinstance(y, Tensor) or y.grad_fn is None:
        got = "a tensor without a graph" if isinstance(y, Tensor) else repr(y)
        raise Failed(
            f"checkpoint(block, x) returned {got}",
            "The result must take part in the backward pass: return it from an autograd.Function, "
            "or from hooks.",
        )
    # A later layer's dropout: now a generator shows that was set back to before the block.
    torch.rand(1)
    _backward(y)
    return y.detach(), x.grad, [parameter.grad for parameter in block.parameters()], torch.rand(1)


def _gradients(attempt: Callable) -> str:
    y, slope, weights, _ = _step(attempt, 0.0)
    expected, expected_slope, expected_weights, _ = _step(lambda block, x: block(x), 0.0)
    if not torch.equal(y, expected):
        raise Failed(
            "the output differs from block(x)",
            "The first evaluation is an ordinary one: return what fn returns.",
        )
    if slope is None or any(gradient is None for gradient in weights):
        missing = "the input" if slope is None else "the weights inside the block"
        raise Failed(
            f"{missing} got no gradient",
            "Compute the function again with gradients enabled, on an input that requires them, "
            "and call torch.autograd.backward on the result: "
            "that reaches the weights too, which torch.autograd.grad(y, x) does not.",
        )
    assert expected_slope is not None
    if torch.allclose(slope, 2 * expected_slope):
        raise Failed(
            "the input's gradient is twice that of block(x)",
            "Your second evaluation runs on the caller's x, so its backward pass reaches x once, "
            "and what you return reaches it again: use x.detach().",
        )
    if not torch.equal(slope, expected_slope) or not all(
        _same(a, b) for a, b in zip(weights, expected_weights, strict=True)
    ):
        raise Failed(
            "the gradients differ from those of block(x)",
            "Pass the incoming gradient on to the backward pass of the second evaluation.",
        )
    return "input and 4 weights, to the bit"


def _memory(attempt: Callable) -> str:
    block, x = _Block(), torch.ones(8, 16, requires_grad=True)
    kept = measure.saved_activations(lambda: attempt(block, x), block).total
    least, most = (
        x.untyped_storage().nbytes(),
        measure.saved_activations(lambda: block(x), block).total,
    )
    if kept >= most:
        raise Failed(
            f"{units.text(kept)} are kept for the backward pass, as many as without "
            f"checkpointing; {units.text(least)} are enough",
            "The first evaluation records a graph. Compute it under torch.no_grad(), and keep its "
            "input alone.",
        )
    if kept > least:
        raise Failed(
            f"{units.text(kept)} are kept, {units.text(least)} are enough",
            "Only the input has to stay: the output can be computed again as well.",
        )
    return (
        units.text(kept)
        if kept
        else (
            "nothing that autograd sees; ctx.save_for_backward(x) also notices when x is "
            "overwritten"
        )
    )


def _frozen_input(attempt: Callable) -> str:
    block, x = _Block(), torch.linspace(-1, 1, 8 * 16).view(8, 16)
    y = attempt(block, x)
    if y.requires_grad:
        _backward(y)
    if x.requires_grad:
        raise Failed(
            "an input that needed no gradient needs one after the call",
            "It belongs to the caller, who did not ask for its gradient: leave it as it is, and "
            "give the Function one more tensor that requires gradients.",
        )
    if any(parameter.grad is None for parameter in block.parameters()):
        raise Failed(
            "for an input that needs no gradient the weights inside the block got none",
            "That is how a frozen embedding stops all learning behind it. The output of an "
            "autograd.Function requires gradients only if one of its tensor arguments does, and "
            "it does not see the weights: hand apply(…) one more tensor that does, such as "
            "torch.empty(0, requires_grad=True).",
        )
    return "the weights inside learn"


def _kept_in(results: list, call: Callable, *given: Any) -> None:
    results.append(call(*given))


def _nothing_else(attempt: Callable) -> str:
    """What is alive after the forward pass, wherever it is kept."""
    block, x = _Block(), torch.ones(256, 16, requires_grad=True)
    results: list[Any] = []
    alive = []
    for call in (attempt, torch.no_grad()(lambda block, x: block(x))):
        once = functools.partial(_kept_in, results, call, block, x)
        last = measure.history(once, block).moments[-1]
        alive.append(last.ledger.total)
    generator = 2 * torch.get_rng_state().nbytes
    if (extra := alive[0] - alive[1]) > x.nbytes + generator:
        raise Failed(
            f"after the forward pass {units.text(extra)} are alive beside weights, input and "
            f"output; the input has {units.text(x.nbytes)}",
            "Autograd does not see all that you keep, but memory does: the input, once, and the "
            "generator's state are enough.",
        )
    return f"{units.text(max(extra, 0))} alive"


def _in_a_row(attempt: Callable) -> str:
    for told, places in (("two blocks in a row", (0, 1)), ("one block twice", (0, 0))):
        _chained(attempt, told, places)
    return "2 blocks, and one twice, to the bit"


def _chained(attempt: Callable, told: str, places: tuple[int, ...]) -> None:
    found = []
    for call in (attempt, lambda block, x: block(x)):
        torch.manual_seed(0)
        made = [_Block(0.5) for _ in set(places)]
        blocks, x = [made[place] for place in places], torch.linspace(-1, 1, 128).view(8, 16)
        x.requires_grad_()
        y = x
        for block in blocks:
            y = call(block, y)
        _backward(y)
        found.append([x.grad] + [p.grad for block in made for p in block.parameters()])
    for k, (mine, right) in enumerate(zip(*found, strict=True)):
        if not _same(mine, right):
            raise Failed(
                f"{told}: the gradient of {'x' if k == 0 else 'a weight'} is "
                f"{'missing' if mine is None else 'wrong'}",
                "Gradients add up: a weight that is used twice, or in two micro-batches, gets the "
                "sum. torch.autograd.backward adds to .grad; neither overwrite nor clear it."
                if k and mine is not None
                else "Both regions wait for the backward pass at the same time. What one of them "
                "keeps belongs to that call, in ctx or in a closure, and not to a variable that "
                "the next call overwrites.",
            )


def _twice(attempt: Callable) -> str:
    block, x = _Block(), torch.ones(8, 16, requires_grad=True)
    y = attempt(block, x)
    if block.calls != 1:
        raise Failed(
            f"the block was computed {block.calls} times before the backward pass",
            "The second evaluation belongs into the backward pass: computed earlier, its insides "
            "wait in memory all the same.",
        )
    y.sum().backward()
    if block.calls != 2:
        raise Failed(
            f"the block was computed {block.calls} times",
            "It was not computed again, so its insides were kept: in a list, on the host or on "
            "disk. Keep its input alone."
            if block.calls == 1
            else "Once in the forward pass, once in the backward pass: no gradient is worth a "
            "third.",
        )
    return "2 evaluations"


def _masks(attempt: Callable) -> str:
    y, slope, _, later = _step(attempt, 0.5)
    expected, right, _, expected_later = _step(lambda block, x: block(x), 0.5)
    if not torch.equal(y, expected):
        raise Failed(
            "with dropout the output differs from block(x) with the same generator",
            "The first evaluation takes the generator as it finds it: "
            "set no seed of your own, or all blocks draw the same mask.",
        )
    if slope is None or right is None or not torch.equal(slope, right):
        off = math.inf if slope is None or right is None else float((slope - right).abs().max())
        raise Failed(
            f"with dropout the input's gradient is off by up to {off:.2g}",
            "The second evaluation drew another dropout mask. Keep torch.get_rng_state() "
            "from before the first, and set it before the second.",
        )
    if not torch.equal(later, expected_later):
        raise Failed(
            "after the backward pass the next random number differs from a step without "
            "checkpointing",
            "You set the generator back and left it there: put the state of before the second "
            "evaluation back when it is done, or use torch.random.fork_rng().",
        )
    return "the same masks, and the generator where it was"


class Recomputed(torch.autograd.Function):
    """The textbook version, with switches for what people leave out."""

    @staticmethod
    def forward(
        ctx: Any, fn: Callable, replay: str, through: str, x: Tensor, *anchor: Tensor
    ) -> Tensor:
        ctx.fn, ctx.replay, ctx.through, ctx.state = fn, replay, through, torch.get_rng_state()
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        x = x if ctx.through == "the caller's x" else x.detach().requires_grad_()
        scope: AbstractContextManager = (
            torch.random.fork_rng(devices=[]) if ctx.replay == "fork" else nullcontext()
        )
        with scope, torch.set_grad_enabled(ctx.through != "nothing"):
            if ctx.replay != "no":
                torch.set_rng_state(ctx.state)
            y = ctx.fn(x)
        unused = [None] * (len(ctx.needs_input_grad) - 4)
        if ctx.through == "grad":
            return None, None, None, torch.autograd.grad(y, x, slope)[0], *unused
        torch.autograd.backward(y, slope)
        return None, None, None, x.grad, *unused


def textbook(
    replay: str, through: str = "backward", *, anchored: bool = True
) -> Callable[[Callable, Tensor], Tensor]:
    """The checkpoint of the textbooks.

    replay: the generator in the second evaluation: "fork" it, "set" it and leave it, or "no"
    through: where gradients go: "backward", "grad" (of the input), "the caller's x", "nothing"
    anchored: whether the result requires gradients also where the input does not
    """

    def checkpoint(fn: Callable, x: Tensor) -> Tensor:
        anchor = [torch.empty(0, requires_grad=True)] * anchored
        if x.is_floating_point():
            return Recomputed.apply(fn, replay, through, x, *anchor)
        # Tokens have no gradient: 0 goes the way of x.
        zero = torch.zeros(())
        return Recomputed.apply(lambda zero: fn(x) + zero, replay, through, zero, *anchor)

    return checkpoint


def _drawn_apart(fn: Callable, x: Tensor) -> Tensor:
    """Draws another mask the second time, and leaves the generator where it was."""

    def apart(x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[], enabled=torch.is_grad_enabled()):
            return fn(x)

    return textbook("no")(apart, x)


CHECKPOINT = Exercise(
    id="checkpointing/checkpoint",
    reference=checkpointing.checkpoint,
    properties=(
        Property("gradients", _gradients),
        Property("input without gradient", _frozen_input),
        Property("bytes kept", _memory),
        Property("nothing kept elsewhere", _nothing_else),
        Property("evaluations", _twice),
        Property("dropout", _masks),
        Property("two in a row", _in_a_row),
    ),
    hints=(
        "The older way is the shorter one to write: a torch.autograd.Function. "
        "forward(ctx, fn, x) computes fn(x), which records nothing there, and saves x; backward "
        "computes fn again.",
        "In backward: x = x.detach().requires_grad_(), then y = fn(x) under torch.enable_grad(), "
        "torch.autograd.backward(y, slope), return None, x.grad.",
        "Dropout: keep torch.get_rng_state() in forward; in backward set it inside `with "
        "torch.random.fork_rng(devices=[])`, which puts the old state back.",
        "An input that needs no gradient: apply(fn, x, torch.empty(0, requires_grad=True)), so "
        "that the result requires gradients all the same; backward returns one more None.",
    ),
)

# ── a test for checkpoint ────────────────────────────────────────────────────────────────────────


def _verdict(attempt: Callable, implementation: Callable) -> bool:
    """What the attempt says of an implementation, whatever the seed."""
    said = {seed: _says(attempt, implementation, seed) for seed in range(5)}
    if len(set(said.values())) > 1:
        times = sum(said.values())
        raise Failed(
            f"of the same checkpoint your test says {times} times of {len(said)} that it is broken",
            "It hangs on chance: set the seed before each step, and let dropout have enough "
            "numbers to drop, so that two masks can hardly be alike.",
        )
    return said[0]


def _says(attempt: Callable, implementation: Callable, seed: int) -> bool:
    torch.manual_seed(seed)
    try:
        found = attempt(implementation)
    except (TypeError, AttributeError) as error:
        if "NoneType" not in str(error):
            raise
        raise Failed(
            f"your test stopped with {type(error).__name__}: {error}",
            "A gradient that is None is the bug: a broken checkpoint gives a weight none. Look "
            "for None before you compare.",
        ) from None
    found = found.item() if getattr(found, "shape", None) == () else found  # of NumPy or torch
    if not isinstance(found, (bool, int)) or found not in (0, 1):
        raise Failed(
            f"is_broken returned {found!r}",
            "Return True if this checkpoint is broken, False if it is not.",
        )
    return bool(found)


def _innocent(attempt: Callable) -> str:
    right: dict[str, Callable] = {
        "the course's": checkpointing.checkpoint,
        "the textbook": textbook("fork"),
        "torch's": functools.partial(torch_checkpoint, use_reentrant=False),
    }
    for name, implementation in right.items():
        if _verdict(attempt, implementation):
            raise Failed(
                f"your test calls {name} checkpoint broken, and it is right",
                "Set the seed before the plain step and again before the checkpointed one, "
                "and compare equal things: gradients, or what comes after."
                + " Take them by backward(): an autograd.Function does not see the weights, and "
                "leaves their gradients in .grad, where torch.autograd.grad does not look."
                * (name == "the textbook"),
            )
    return "3 right implementations pass"


def _caught(attempt: Callable, *, of: tuple[Callable, ...], story: str, advice: str) -> str:
    if not all(_verdict(attempt, implementation) for implementation in of):
        raise Failed(story, advice)
    return "caught"


def differs(checkpoint: Callable, *, dropout: float, after: bool, grads: str = "both") -> bool:
    """Whether a step through `checkpoint` differs from a plain one, as far as this test looks.

    dropout: of the block
    after: whether the random number after the step is compared
    grads: the gradients that are compared: "both", "weights", "input"
    """
    outcomes = []
    for call in (lambda block, x: block(x), checkpoint):
        _, slope, weights, later = _step(call, dropout)
        outcomes.append(
            [slope] * (grads != "weights")
            + [w for w in weights if grads == "both"]
            + [later] * after
        )
    plain, found = outcomes
    return not all(_same(a, b) for a, b in zip(plain, found, strict=True))


def is_broken(checkpoint: Callable) -> bool:
    """True if a step through `checkpoint` differs from a plain step with the same seed.

    Compared are all gradients, and the random number that comes next.
    """
    return differs(checkpoint, dropout=0.5, after=True)


TEST = Exercise(
    id="checkpointing/bug-hunt",
    reference=is_broken,
    properties=(
        Property("lets right ones pass", _innocent),
        Property(
            "catches lost weights",
            _caught,
            of=(textbook("fork", "grad"),),
            story="a checkpoint that gives no gradient to the weights passes your test",
            advice="Compare the gradients of the weights, not that of the input alone.",
        ),
        Property(
            "catches another mask",
            _caught,
            of=(textbook("no"), _drawn_apart),
            story="a checkpoint that draws another dropout mask the second time passes your test",
            advice="Without dropout in the block the bug cannot show: "
            "put some in, and compare gradients.",
        ),
        Property(
            "catches a generator left behind",
            _caught,
            of=(textbook("set"),),
            story="a checkpoint that leaves the random generator in the past passes your test",
            advice="All gradients of this step are right; the next step draws old numbers. "
            "Draw torch.rand(1) after the backward pass and compare that too. "
            "One block alone hides the bug, since it ends where the forward pass ended: "
            "draw a number between forward and backward, or use two blocks.",
        ),
    ),
    hints=(
        "Run the same step twice, once as block(x), once as checkpoint(block, x), "
        "with torch.manual_seed before each. What must be equal?",
        "Use a block with dropout. Compare x.grad and the gradients of the block's parameters.",
        "And the generator: torch.rand(1) after the backward pass must give the same number both "
        "times, also when a later layer has drawn numbers.",
    ),
)

EXERCISES = (SEGMENTS, BINOMIAL, CHECKPOINT, TEST)
