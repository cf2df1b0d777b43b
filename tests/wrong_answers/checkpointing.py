"""Wrong answers to the exercises of `checkpointing`."""

import functools
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from labutils import checkpointing
from labutils.teach.exercises import checkpointing as exercises
from wrong_answers import Wrong


def _two_n(n: int, k: int) -> list[tuple[str, int]]:
    size, steps = n // k, []
    for i in range(n):
        steps += [("forward", i)] + [("drop", i)] * (i % size != 0)
    steps.append(("drop", n))
    for start in reversed(range(0, n, size)):
        steps += [("record", i) for i in range(start, start + size)] + [
            ("backward", i) for i in reversed(range(start, start + size))
        ]
        steps += [("drop", start)] * (start > 0)
    return steps


def _from_the_start(n: int, k: int) -> list[tuple[str, int]]:
    size, steps = n // k, []
    for start in reversed(range(0, n, size)):
        for i in range(start):
            steps += [("forward", i)] + [("drop", i)] * (i > 0)
        steps += [("record", i) for i in range(start, start + size)] + [
            ("backward", i) for i in reversed(range(start, start + size))
        ]
        steps += [("drop", start)] * (start > 0)
    return steps


def _keeps_all(n: int, k: int) -> list[tuple[str, int]]:
    size = n // k
    last = n - size
    steps = [("forward", i) for i in range(last)]
    for start in reversed(range(0, n, size)):
        steps += [("drop", i) for i in range(start + size, start, -1) if start < last]
        steps += [("record", i) for i in range(start, start + size)] + [
            ("backward", i) for i in reversed(range(start, start + size))
        ]
    return steps


def _keeps_one(n: int, k: int) -> list[tuple[str, int]]:
    """The right plan, but x1 stays until it is computed again."""
    steps = [(step.op, step.at) for step in checkpointing.segments(n, k).steps]
    if ("drop", 1) in steps:
        steps.remove(("drop", 1))
        steps.insert(steps.index(("record", 0)), ("drop", 1))
    return steps


def _records_at_once(n: int, k: int) -> list[tuple[str, int]]:
    return [("record", i) for i in range(n)] + [("backward", i) for i in reversed(range(n))]


def _drops_too_early(n: int, k: int) -> list[tuple[str, int]]:
    steps = [("record", 0)]
    for i in range(1, n):
        steps += [("record", i), ("drop", i)]
    return steps + [("backward", i) for i in reversed(range(n))]


def _changed(edit: Callable[[list], list]) -> Callable[[int, int], list]:
    """The right plan, with its list of steps edited."""
    return lambda n, k: edit([(step.op, step.at) for step in checkpointing.segments(n, k).steps])


def _forward_first(n: int, k: int) -> list[tuple[str, int]]:
    """Records the layers of a segment, and takes them backward in the same order."""
    return [("record", i) for i in range(n)] + [("backward", i) for i in range(n)]


def _as_printed(n: int, s: int) -> int:
    """The recurrence with one of its two ends, e(1, s) = 1."""
    return (
        1 if n == 1 else min(m + _as_printed(n - m, s - 1) + _as_printed(m, s) for m in range(1, n))
    )


def _forgetful(n: int, s: int) -> int:
    """Right, and never done: nothing is remembered."""
    if n == 1 or s == 1:
        return n * (n + 1) // 2
    return min(m + _forgetful(n - m, s - 1) + _forgetful(m, s) for m in range(1, n))


def _remembered(rule: Callable[[Callable, int, int], int]) -> Callable[[int, int], int]:
    @functools.cache
    def count(n: int, snapshots: int) -> int:
        return rule(count, n, snapshots)

    return count


def _shares_the_snapshot(count: Callable, n: int, s: int) -> int:
    return 1 if n == 1 else min(m + count(n - m, s) + count(m, s) for m in range(1, n))


def _x0_reverses_for_n(count: Callable, n: int, s: int) -> int:
    if n == 1 or s == 1:
        return n
    return min(m + count(n - m, s - 1) + count(m, s) for m in range(1, n))


def _reaches_for_free(count: Callable, n: int, s: int) -> int:
    if n == 1 or s == 1:
        return n * (n + 1) // 2
    return min(count(n - m, s - 1) + count(m, s) for m in range(1, n))


def _loses_one_left(count: Callable, n: int, s: int) -> int:
    if n == 1 or s == 1:
        return n * (n + 1) // 2
    return min(m + count(n - m, s - 1) + count(m, s - 1) for m in range(1, n))


def _middle(count: Callable, n: int, s: int) -> int:
    if n == 1 or s == 1:
        return n * (n + 1) // 2
    return n // 2 + count(n - n // 2, s - 1) + count(n // 2, s)


def _by_n_alone(n: int, s: int) -> int:
    known: dict[int, int] = {}

    def count(n: int, s: int) -> int:
        if n == 1 or s == 1:
            return n * (n + 1) // 2
        if n not in known:
            known[n] = min(m + count(n - m, s - 1) + count(m, s) for m in range(1, n))
        return known[n]

    return count(n, s)


def _without_recording(n: int, snapshots: int) -> int:
    return checkpointing.binomial_evaluations(n, snapshots) - n


def _offloads_nothing(fn: Callable, x: Tensor) -> Tensor:
    return fn(x)


def _seeds(fn: Callable, x: torch.Tensor) -> torch.Tensor:
    """Sets the same seed before both evaluations."""

    def seeded(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return fn(x)

    return exercises.textbook("no")(seeded, x)


_SLOT: list = []


class _OneSlot(torch.autograd.Function):
    """Keeps its state in one place for all calls, and not in ctx."""

    @staticmethod
    def forward(ctx, fn, x, anchor):
        _SLOT[:] = [fn, x, torch.get_rng_state()]
        return fn(x)

    @staticmethod
    def backward(ctx, slope):
        fn, x, state = _SLOT
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(state)
            y = fn(x)
        torch.autograd.backward(y, slope)
        return None, x.grad, None


_SLOTS: dict = {}


class _ASlotForEachFunction(torch.autograd.Function):
    """Keeps its state in one place for all calls of a function."""

    @staticmethod
    def forward(ctx, fn, x, anchor):
        ctx.fn, _SLOTS[fn] = fn, (x, torch.get_rng_state())
        return fn(x)

    @staticmethod
    def backward(ctx, slope):
        x, state = _SLOTS[ctx.fn]
        x = x.detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(state)
            y = ctx.fn(x)
        torch.autograd.backward(y, slope)
        return None, x.grad, None


class _Clones(torch.autograd.Function):
    """Keeps fifty copies where autograd does not look."""

    @staticmethod
    def forward(ctx, fn, x, anchor):
        ctx.fn, ctx.copies = fn, [x.detach().clone() for _ in range(50)]
        ctx.state = torch.get_rng_state()
        return fn(x)

    @staticmethod
    def backward(ctx, slope):
        x = ctx.copies[0].requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.fn(x), slope)
        return None, x.grad, None


def _anchored(function: type[torch.autograd.Function]) -> Callable[[Callable, Tensor], Tensor]:
    return lambda fn, x: function.apply(fn, x, torch.empty(0, requires_grad=True))


def _by_hooks(fn: Callable, x: Tensor, *, needs: bool = True) -> Tensor:
    """Slots that are filled by a second run, whose input always needs a gradient."""
    state, filled, places = torch.get_rng_state(), [], itertools.count()

    def unpack(place: int) -> Tensor:
        if not filled:
            again = x.detach().requires_grad_(needs or x.requires_grad)
            keep = torch.autograd.graph.saved_tensors_hooks(
                lambda t: filled.append(t.detach()), lambda t: t
            )
            with torch.random.fork_rng(devices=[]), torch.enable_grad(), keep:
                torch.set_rng_state(state)
                fn(again)
        return filled[place]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: next(places), unpack):
        return fn(x)


def _ahead(fn: Callable, x: Tensor) -> Tensor:
    """Computes the second time at once, with a graph, and lets go of nothing."""
    with torch.no_grad():
        fn(x)
    return fn(x)


def _three_times(fn: Callable, x: Tensor) -> Tensor:
    """Computes twice in the backward pass."""

    def twice(x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                fn(x)
        return fn(x)

    return exercises.textbook("fork")(twice, x)


def _compares(
    see: Callable, *, seed: bool = True, dropout: float = 0.5, width: int = 8
) -> Callable:
    """A test that compares what `see(layer, x, y)` returns of a plain and a checkpointed step."""

    def is_broken(checkpoint: Callable) -> bool:
        torch.manual_seed(0) if seed == "once" else None
        outcomes, layer = (
            [],
            torch.nn.Sequential(torch.nn.Dropout(dropout), torch.nn.Linear(width, width)),
        )
        for call in (lambda layer, x: layer(x), checkpoint):
            layer.zero_grad()
            if seed is True:
                torch.manual_seed(torch.initial_seed())
            x = torch.ones(2, width, requires_grad=True)
            y = call(layer, x)
            y.sum().backward()
            outcomes.append([0 if t is None else t.detach().clone() for t in see(layer, x, y)])
        return any(
            not torch.equal(torch.as_tensor(a), torch.as_tensor(b))
            for a, b in zip(*outcomes, strict=True)
        )

    return is_broken


def _trips(checkpoint: Callable) -> bool:
    """Compares gradients without a look whether there are any."""
    outcomes = []
    for call in (lambda layer, x: layer(x), checkpoint):
        torch.manual_seed(2)
        layer = torch.nn.Linear(4, 4)
        call(layer, torch.ones(2, 4, requires_grad=True)).sum().backward()
        outcomes.append([parameter.grad for parameter in layer.parameters()])
    return not all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def _none_and_what_comes_next(checkpoint: Callable) -> bool:
    """Whether gradients are there, and the next random number; no gradient's value."""
    outcomes = []
    for call in (lambda layer, x: layer(x), checkpoint):
        layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
        torch.manual_seed(0)
        y = call(layer, torch.ones(2, 8, requires_grad=True))
        torch.rand(1)
        y.sum().backward()
        there = [parameter.grad is not None for parameter in layer.parameters()]
        outcomes.append((there, torch.rand(1).item()))
    return outcomes[0] != outcomes[1]


class _Overwriting(torch.autograd.Function):
    """Takes the weights' gradients by autograd.grad, and writes them over what is there."""

    @staticmethod
    def forward(ctx, fn, x, anchor):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(x)
        return fn(x)

    @staticmethod
    def backward(ctx, slope):
        x, weights = ctx.saved_tensors[0].detach().requires_grad_(), list(ctx.fn.parameters())
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.fn(x)
        of_x, *of_weights = torch.autograd.grad(y, [x, *weights], slope)
        for weight, gradient in zip(weights, of_weights, strict=True):
            weight.grad = gradient
        return None, of_x, None


def _overwrites(fn, x):
    return _Overwriting.apply(fn, x, torch.empty(0, requires_grad=True))


def _by_autograd_grad(checkpoint):
    """Asks for all gradients at once, those of the weights among them."""
    found = []
    for call in (lambda fn, x: fn(x), checkpoint):
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.5))
        x = torch.randn(16, 8, requires_grad=True)
        loss, leaves = call(net, x).square().sum(), [x, *net.parameters()]
        found.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    return not all(y is not None and torch.equal(x, y) for x, y in zip(*found, strict=True))


WRONG = {
    "checkpointing/segments": (
        Wrong(
            "words instead of pairs", lambda n, k: ["record", "backward"], "legal", "list of pairs"
        ),
        Wrong("the last segment twice", _two_n, "forward evaluations", "record it on the way"),
        Wrong(
            "every segment from x0",
            _from_the_start,
            "forward evaluations",
            "Keep each segment's input",
        ),
        Wrong(
            "everything recorded in the first sweep",
            _records_at_once,
            "forward evaluations",
            "one at a time",
        ),
        Wrong(
            "a first sweep that keeps everything",
            _keeps_all,
            "values held",
            "after the first sweep has passed it",
        ),
        Wrong(
            "one value too many",
            _keeps_one,
            "values held",
            "a value inside a segment",
        ),
        Wrong(
            "drops what a recorded stage needs",
            _drops_too_early,
            "legal",
            "needs x1 for its backward pass",
        ),
        Wrong(
            "drops the caller's input",
            _changed(lambda steps: [*steps, ("drop", 0)]),
            "legal",
            "except x0",
        ),
        Wrong(
            "keeps what lies inside a segment",
            _changed(lambda steps: [step for step in steps if step[0] != "drop"]),
            "legal",
            "may not be made again",
        ),
        Wrong("backward in the order of forward", _forward_first, "legal", "in reverse order"),
        Wrong(
            "forward where it should record",
            _changed(
                lambda steps: [("forward", i) if op == "record" else (op, i) for op, i in steps]
            ),
            "legal",
            "keeps nothing for it",
        ),
        Wrong(
            "stops before the end",
            _changed(lambda steps: steps[:-1]),
            "legal",
            "Something is missing at the end",
        ),
        Wrong(
            "counts from one",
            _changed(lambda steps: [(op, i + 1) for op, i in steps]),
            "legal",
            "from a value that is gone",
        ),
    ),
    "checkpointing/fewest-evaluations": (
        Wrong("recording for free", _without_recording, "fewest evaluations", "short by exactly n"),
        Wrong(
            "x0 not counted",
            lambda n, s: checkpointing.binomial_evaluations(n, s + 1),
            "fewest evaluations",
            "x0 takes one of the snapshots",
        ),
        Wrong(
            "the right part keeps all snapshots",
            _remembered(_shares_the_snapshot),
            "fewest evaluations",
            "one snapshot less",
        ),
        Wrong(
            "one snapshot, n evaluations",
            _remembered(_x0_reverses_for_n),
            "fewest evaluations",
            "every stage starts from x0",
        ),
        Wrong(
            "x_m reached for free",
            _remembered(_reaches_for_free),
            "fewest evaluations",
            "its m evaluations belong to the sum",
        ),
        Wrong(
            "the recurrence with one of its two ends",
            _as_printed,
            "fewest evaluations",
            "Where does your recurrence end?",
        ),
        Wrong("remembers nothing", _forgetful, "longer chains", "functools.cache"),
        Wrong(
            "equal segments",
            lambda n, s: n + n - math.ceil(n / min(s, n)),
            "fewest evaluations",
            "split a segment again",
        ),
        Wrong(
            "the left part has lost a snapshot, too",
            _remembered(_loses_one_left),
            "fewest evaluations",
            "has all snapshots again",
        ),
        Wrong("always the middle", _remembered(_middle), "fewest evaluations", "every m"),
        Wrong(
            "what the lab prints",
            lambda n, s: {(10, 3): 25, (100, 10): 322, (5, 5): 9}.get((n, s), n * (n + 1) // 2),
            "fewest evaluations",
            "what x0 alone costs",
        ),
        Wrong(
            "remembered by n alone",
            _by_n_alone,
            "fewest evaluations",
            "one snapshot less",
        ),
    ),
    "checkpointing/checkpoint": (
        Wrong("writes over gradients", _overwrites, "two in a row", "Gradients add up"),
        Wrong("keeps everything", _offloads_nothing, "bytes kept", "torch.no_grad()"),
        Wrong(
            "no gradient for the weights",
            exercises.textbook("fork", "grad"),
            "gradients",
            "torch.autograd.backward",
        ),
        Wrong(
            "no graph the second time",
            exercises.textbook("fork", "nothing"),
            "gradients",
            "torch.enable_grad()",
        ),
        Wrong(
            "the caller's x",
            exercises.textbook("fork", "the caller's x"),
            "gradients",
            "use x.detach()",
        ),
        Wrong(
            "an input that needs no gradient",
            exercises.textbook("fork", anchored=False),
            "input without gradient",
            "one more tensor",
        ),
        Wrong("a seed of its own", _seeds, "dropout", "set no seed of your own"),
        Wrong("another dropout mask", exercises.textbook("no"), "dropout", "another dropout mask"),
        Wrong("the generator left behind", exercises.textbook("set"), "dropout", "left it there"),
        Wrong(
            "one slot for all calls", _anchored(_OneSlot), "two in a row", "next call overwrites"
        ),
        Wrong(
            "one slot for each function",
            _anchored(_ASlotForEachFunction),
            "two in a row",
            "belongs to that call",
        ),
        Wrong(
            "fifty copies that autograd does not see",
            _anchored(_Clones),
            "nothing kept elsewhere",
            "memory does",
        ),
        Wrong(
            "hooks, and an input that needs a gradient the second time only",
            _by_hooks,
            "input without gradient",
            "save the same tensors",
        ),
        Wrong("computes it twice at once", _ahead, "bytes kept", "records a graph"),
        Wrong("computes it three times", _three_times, "evaluations", "worth a third"),
    ),
    "checkpointing/bug-hunt": (
        Wrong(
            "asks autograd.grad",
            _by_autograd_grad,
            "lets right ones pass",
            "where torch.autograd.grad does not look",
        ),
        Wrong(
            "no dropout",
            lambda c: exercises.differs(c, dropout=0.0, after=True),
            "catches another mask",
            "put some in",
        ),
        Wrong(
            "gradients only",
            lambda c: exercises.differs(c, dropout=0.5, after=False),
            "catches a generator left behind",
            "Draw torch.rand(1)",
        ),
        Wrong(
            "input only",
            lambda c: exercises.differs(c, dropout=0.5, after=True, grads="input"),
            "catches lost weights",
            "the weights",
        ),
        Wrong("everything is broken", lambda c: True, "lets right ones pass", "Set the seed"),
        Wrong("trips over None", _trips, "catches lost weights", "None is the bug"),
        Wrong(
            "looks at the output alone",
            _compares(lambda layer, x, y: [y]),
            "catches lost weights",
            "gradients of the weights",
        ),
        Wrong(
            "sets no seed",
            _compares(lambda layer, x, y: [layer[1].weight.grad], seed=False),
            "lets right ones pass",
            "Set the seed",
        ),
        Wrong(
            "two numbers to drop",
            _compares(lambda layer, x, y: [layer[1].weight.grad], width=1),
            "catches another mask",
            "hangs on chance",
        ),
        Wrong(
            "whether gradients are there, and what comes next",
            _none_and_what_comes_next,
            "catches another mask",
            "compare gradients",
        ),
        Wrong("words", lambda c: "broken", "lets right ones pass", "Return True"),
        Wrong(
            "reads the name",
            lambda c: "textbook" in getattr(c, "__qualname__", ""),
            "lets right ones pass",
            "it is right",
        ),
    ),
}
