"""Write 1F1B, bound what a rank holds, place W; repair an order that hangs from 3 ranks on, and a
backward pass whose weight gradients come too late."""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import schedule
from labutils.flash import fused
from labutils.schedule import Op, Schedule
from labutils.teach.exercises import Exercise, Failed, Property

# ── orders, rank by rank ─────────────────────────────────────────────────────────────────────────

_FORM = "Return a list of operations such as 'F0', 'B0' (or ('F', 0)), in the order of this rank."


def _op(made: Any, stage: int) -> Op | None:
    """What a learner calls an operation: 'F0', 'F0@2', ('F', 0), ('F', stage, 0), an Op."""
    if isinstance(made, str):
        found = re.fullmatch(r"([FBW])(-?\d+)(?:@(-?\d+))?", made.strip())
        return Op(found[1], int(found[3] or stage), int(found[2])) if found else None
    try:
        kind, *numbers = made
        *given, k = map(operator.index, numbers)
        (stage,) = given or [stage]
    except (TypeError, ValueError):
        return None
    return Op(str(kind), stage, k)


def _order(made: Any, case: str, stage: int) -> tuple[Op, ...]:
    """The operations of one rank, whatever they are kept in."""
    if isinstance(made, str):
        made = made.split()
    several = isinstance(made, Iterable) and getattr(made, "ndim", 1) != 0  # a 0-d tensor is none
    ops = list(made) if several else [made]
    found = []
    for given in ops:
        if (op := _op(given, stage)) is None:
            raise Failed(f"{case}: {given!r:.60} is no operation", _FORM)
        found.append(op)
    return tuple(found)


_MEANS = {  # by the name of `schedule.why_illegal`'s reason, what it usually means
    "never": (
        "Every micro-batch needs each of its operations once on every rank. What is still owed "
        "after the last forward must come at the end."
    ),
    "twice": (
        "The number is the micro-batch's, on every rank. Count those of each kind on their own: "
        "the next F is not the next B."
    ),
    "micro-batch": (
        "With few micro-batches there are fewer forwards than the warm-up asks for: take "
        "min(warm-up, m)."
    ),
    "stage": "There are chunks·p stages, and a rank has each p-th of them, from its own on.",
    "rank": "Stage rank + chunk·p belongs to the rank, for each chunk 0 … chunks − 1.",
    "kind": "The letters are F and B, and W where the backward is split.",
    "own": "A backward needs its own forward before it, and a W its own B.",
    "deadlock": (
        "A rank can begin its first backward only when the ranks after it have had all forwards "
        "that they run first. So a rank may not run fewer forwards first than the next one does; "
        "of several chunks the last one comes back first; and no forward that a rank runs first "
        "may need one that another runs behind its first backward."
    ),
}


def _collected(
    attempt: Callable, p: int, m: int, *chunks: int, split: bool = False
) -> tuple[str, Schedule]:
    """What the attempt gives for all ranks, as a schedule that can run."""
    case = f"p = {p}, m = {m}" + (f", chunks = {chunks[0]}" if chunks else "")
    rows = []
    for rank in range(p):
        rows.append(_order(attempt(rank, p, m, *chunks), f"{case}, rank {rank}", rank))
    made = Schedule("yours", tuple(rows), (schedule.loop(p, *chunks),), m, split)
    least = min((op.micro_batch for row in rows for op in row), default=0)
    if least > 0 or (least < 0 and p <= m):  # with few, a warm-up counts on below 0
        what = "is no micro-batch 0" if least > 0 else f"is a micro-batch {least}"
        raise Failed(f"{case}: there {what}", "Micro-batches count from 0 to m − 1.")
    if reason := schedule.why_illegal(made):
        raise Failed(f"{case}: {reason}", _MEANS.get(reason.name, ""))
    return case, made


def _legal(attempt: Callable, cases: Sequence[tuple[int, ...]], split: bool = False) -> str:
    for case in cases:
        _collected(attempt, *case, split=split)
    return f"{len(cases)} cases"


def _fits(
    attempt: Callable,
    cases: Sequence[tuple[int, ...]],
    bound: Callable[..., int],
    why: str,
    split: bool = False,
) -> str:
    """No rank holds more than `bound(p, m, *chunks, rank=rank)` activations."""
    for numbers in cases:
        case, made = _collected(attempt, *numbers, split=split)
        for rank in range(numbers[0]):
            peak, most = made.peak(rank), bound(*numbers, rank=rank)
            if peak > most:
                raise Failed(
                    f"{case}: rank {rank} holds {peak} activations at once, {most} are enough", why
                )
    return f"{len(cases)} cases"


def _lasts(
    attempt: Callable,
    cases: Sequence[tuple[int, ...]],
    best: Callable[..., float],
    why: str,
    split: bool = False,
) -> str:
    """A step takes `best(p, m, *chunks)` units of time when F, B and W take one each."""
    for numbers in cases:
        case, made = _collected(attempt, *numbers, split=split)
        found = schedule.simulate(made).makespan
        if found > best(*numbers):
            whole = "1 each" if split else "1, the backward 2"
            raise Failed(
                f"{case}: a step takes {found:g} units of time (F takes {whole}), "
                f"{best(*numbers):g} are enough",
                why,
            )
    return f"{len(cases)} cases"


# ── 1F1B ─────────────────────────────────────────────────────────────────────────────────────────

_LINES = ((1, 1), (2, 4), (4, 8), (3, 7), (6, 8))
_SHORT = ((4, 2), (5, 1))

ONE_F_ONE_B = Exercise(
    id="pipeline/one-f-one-b",
    reference=lambda rank, p, m: list(map(str, schedule.one_f_one_b(p, m).ranks[rank])),
    properties=(
        Property("every operation, in a legal order", _legal, cases=_LINES),
        Property(
            "memory",
            _fits,
            cases=_LINES,
            bound=lambda p, m, rank: schedule.peak_in_flight("one_f_one_b", p, m, rank),
            why="Rank i needs no more than p − i: one, and one for each rank behind it. It runs "
            "p − 1 − i forwards first; from then on each forward is followed by a backward.",
        ),
        Property(
            "time",
            _lasts,
            cases=_LINES,
            best=lambda p, m: 3 * (m + p - 1),
            why="A rank waits for its neighbor although it could run ahead: while its first "
            "micro-batch travels to the last rank and back, it has p − 1 − i more to start. "
            "And backwards come in the order of the forwards, B0 first.",
        ),
        Property("fewer micro-batches than ranks", _legal, cases=_SHORT),
        Property(
            "as short as it can be with few",
            _lasts,
            cases=_SHORT,
            best=lambda p, m: 3 * (m + p - 1),
            why="With m below p all forwards go first, min(p − 1 − rank, m) of them before "
            "the first backward: one after the other they would travel alone.",
        ),
        Property(
            "memory with few",
            _fits,
            cases=_SHORT,
            bound=lambda p, m, rank: schedule.peak_in_flight("one_f_one_b", p, m, rank),
            why="With m below p, too, rank i runs min(p − 1 − i, m) forwards first: the last "
            "rank none.",
        ),
    ),
    hints=(
        "Three parts: forwards only, then a forward and a backward in turn, then backwards only. "
        "How many forwards must rank 0 run before its first backward can come back?",
        "warm = min(p − 1 − rank, m) forwards; then for k in range(m − warm): F of warm + k, "
        "B of k; then the backwards that are left.",
    ),
)

# ── what a rank holds ────────────────────────────────────────────────────────────────────────────


def _peak(ops: Sequence[Op], nbytes: Sequence[int]) -> int:
    m = 1 + max(op.micro_batch for op in ops)
    split = any(op.kind == "W" for op in ops)
    return Schedule("", (tuple(ops),), ((0,) * len(nbytes),), m, split).peak(0, nbytes)


_LATER = schedule.read("F0 B0 F1 F2 B1 B2"), schedule.read("F0 B0 W0 F1 F2 B1 W1 B2 W2")
# Two stages on one rank: five passes are in flight when one of the second stage is, four when two.
_FEWER = schedule.read(
    "F0@0 F1@0 F2@0 F3@0 F0@1 B0@1 B0@0 F1@1 B1@1 B1@0 F2@1 F3@1 B2@1 B2@0 B3@1 B3@0",
    "fewer and larger",
)
_HELD = (
    ("1F1B", (schedule.one_f_one_b(4, 8), schedule.gpipe(3, 5), schedule.naive(2, 4), _LATER[0])),
    ("W apart", (schedule.zb_h1(4, 8), schedule.zb_h2(3, 7), _LATER[1])),
    ("several chunks", (schedule.interleaved(4, 8), schedule.breadth_first(2, 4, 3), _FEWER)),
    ("several chunks, W apart", (schedule.zb_v(3, 7), schedule.interleaved_zb(2, 6))),
)
_WHY_HELD = {
    "1F1B": "A forward adds the activations of its stage, and its backward lets them go: keep "
    "count along the order, and the largest count is the peak.",
    "W apart": "Where the order has W, B computes the gradient of the inputs only. The gradient of "
    "the weights still needs the activations: they go with W.",
    "several chunks": "A rank with several chunks has several stages, each with its own bytes: "
    "nbytes[op.stage] for each operation. The most bytes need not be there where the most passes "
    "are in flight.",
}
_WHY_HELD["several chunks, W apart"] = _WHY_HELD["W apart"] + " " + _WHY_HELD["several chunks"]


def _counts(attempt: Callable, kind: str) -> str:
    made = dict(_HELD)[kind]
    for each in made:
        for more in (0, 37, 900):
            nbytes = [101 + more * stage for stage in range(each.stages)]
            for rank, ops in enumerate(each.ranks):
                found, peak = attempt(list(ops), list(nbytes)), each.peak(rank, nbytes)
                try:
                    same = bool(found == peak)
                except (TypeError, ValueError, RuntimeError):
                    raise Failed(f"you return {found!r:.60}", "Return one number.") from None
                if not same:
                    raise Failed(
                        f"{each.name}, rank {rank} of {len(each.ranks)}, nbytes = {nbytes}: "
                        f"you say {found!r}, it holds {peak}",
                        _WHY_HELD[kind],
                    )
    return f"{len(made)} schedules"


PEAK = Exercise(
    id="pipeline/peak",
    reference=_peak,
    properties=tuple(Property(kind, _counts, kind=kind) for kind, _ in _HELD),
    hints=(
        "Walk along ops with a counter: an F adds nbytes[op.stage]. Which operation is the last "
        "that reads the activations?",
        "If any op.kind is 'W', then W frees, otherwise B. Keep the largest value that the counter "
        "has had.",
    ),
)

# ── place W ──────────────────────────────────────────────────────────────────────────────────────

_SPLIT = ((1, 2), (2, 4), (4, 8), (4, 4), (6, 13))
_FEW = ((4, 2), (5, 1))

PLACE_W = Exercise(
    id="pipeline/place-w",
    reference=lambda rank, p, m: list(map(str, schedule.zb_h1(p, m).ranks[rank])),
    properties=(
        Property("every operation, in a legal order", _legal, cases=_SPLIT + _FEW, split=True),
        Property(
            "memory",
            _fits,
            cases=_SPLIT,
            bound=lambda p, m, rank: p,
            why="Activations stay until W. Rank 0 of 1F1B holds p already, so it can delay no "
            "W; rank i holds p − i, so it can delay i of them.",
            split=True,
        ),
        Property(
            "time",
            _lasts,
            cases=_SPLIT,
            best=lambda p, m: 3 * m + p - 1,
            why="A W right after its B makes the rank before wait: what others need comes "
            "first. Keep as many W as memory allows, and run them where the rank would idle, "
            "at the end.",
            split=True,
        ),
    ),
    hints=(
        "Take the order of 1F1B. W is wanted by no other rank, so it can wait; while it waits, its "
        "activations stay. How many can wait on rank i, if every rank may hold p?",
        "Go along 1F1B with a queue: after a B, append its W; whenever more than `rank` of them "
        "wait, run the oldest. What still waits at the end runs at the end.",
    ),
)

# ── bug hunt: an order that hangs from three ranks on ────────────────────────────────────────────

_TWO = ((2, 2, 2), (2, 4, 2), (2, 8, 2))
_MORE = ((3, 3, 2), (3, 6, 2), (4, 8, 2), (5, 5, 2), (8, 16, 2))
_CHUNKS = ((2, 4, 1), (3, 6, 3), (4, 8, 3), (2, 4, 4))


def _interleaved(rank: int, p: int, m: int, chunks: int) -> list[str]:
    return list(map(str, schedule.interleaved(p, m, chunks).ranks[rank]))


HUNT = Exercise(
    id="pipeline/bug-hunt",
    reference=_interleaved,
    properties=(
        Property("two ranks", _legal, cases=_TWO),
        Property("three ranks and more", _legal, cases=_MORE),
        Property("other numbers of chunks", _legal, cases=_CHUNKS),
        Property(
            "memory",
            _fits,
            cases=_TWO + _MORE + _CHUNKS,
            bound=lambda p, m, chunks, rank: schedule.peak_in_flight(
                "interleaved", p, m, rank, chunks
            ),
            why="More forwards first than the interleaved schedule needs: 2(p − 1 − rank) + "
            "(chunks − 1)·p of them are enough.",
        ),
        Property(
            "time",
            _lasts,
            cases=_TWO + _MORE + _CHUNKS,
            best=lambda p, m, chunks: 3 * (m * chunks + p - 1),
            why="It runs, but ranks wait for each other: is the number of forwards first that "
            "of the ranks behind, and does the last chunk come back first?",
        ),
    ),
    hints=(
        "schedule.why_illegal names who waits for whom. Print the warm-up of each rank for p = 3: "
        "which rank runs fewer forwards first than the rank after it?",
        "`after` should be the number of ranks behind this one: 2, 1, 0 for p = 3. Python's % "
        "never gives a negative number, so that a sign can be wrong and p = 2 does not tell.",
        "Then try three chunks: which one comes back first, and which stage is that?",
    ),
    untouched="8b74ba29",
)

# ── bug hunt: weight gradients later ─────────────────────────────────────────────────────────────


def _later(
    weights: Sequence[Tensor], inputs: Sequence[Tensor], dy: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        owed.append((weight, dy, x))
        dy = dy @ weight

    def w() -> None:
        while owed:
            weight, grad, x = owed.pop()
            product = grad.mT @ x
            weight.grad = product if weight.grad is None else weight.grad + product

    return dy, w


def _chain(sizes: Sequence[int], m: int) -> tuple[list[Tensor], list[tuple[list[Tensor], Tensor]]]:
    """Weights of linear layers, and of m micro-batches the inputs of the layers and a gradient."""
    draw = torch.Generator().manual_seed(len(sizes) + m)
    make = functools.partial(torch.randn, generator=draw, dtype=torch.float64)
    weights = [make(high, low) for low, high in itertools.pairwise(sizes)]
    passes = []
    for _ in range(m):
        inputs = [make(3, sizes[0])]
        for weight in weights[:-1]:
            inputs.append(inputs[-1] @ weight.mT)
        passes.append((inputs, make(3, sizes[-1])))
    return weights, passes


_TURNED = "It is transposed: the gradient of weight[o, i] is grad.mT @ x."


def _is(found: Any, wanted: Tensor, case: str, what: str, why: str) -> None:
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else found
        if isinstance(found, Tensor) and found.mT.shape == wanted.shape:
            why = _TURNED
        raise Failed(f"{case}: {what} is {got!r:.60}, not of shape {tuple(wanted.shape)}", why)
    if found.dtype != wanted.dtype:
        kind = str(found.dtype).removeprefix("torch.")
        raise Failed(f"{case}: {what} is in {kind}, not in float64", "Keep the dtype of dy.")
    if not torch.allclose(found, wanted, rtol=1e-10, atol=1e-12):
        off, turned = (found - wanted).norm() / wanted.norm(), found.mT
        if turned.shape == wanted.shape and torch.allclose(turned, wanted):
            why = _TURNED
        raise Failed(f"{case}: {what} is off by {100 * off:.2g} %", why)


_LATE = (
    "A function reads the variables around it when it is called, not when it is made: by then the "
    "loop has moved on to the last layer. Keep each layer's own tensors."
)
_MIXED = (
    "Keep each layer's own three tensors: weights[i], inputs[i], and the gradient of its output. "
    "One of them is another layer's here: paired in another order, or read by a function that is "
    "called when the loop has moved on."
)
_DW = "W adds grad.mT @ x to .grad, where grad is the gradient of the layer's output."
_NOT_PAID = (
    "W adds grad.mT @ x to .grad of the tensors in `weights`, not of copies, and calls all that is "
    "owed."
)
_ADD = "Each micro-batch has a W of its own, and .grad is the sum over all: add to what is there."
_DX = "B passes on dy @ weight, layer by layer from the last to the first."
_ALONE = (
    "B leaves .grad alone: what the W of earlier micro-batches have added is needed until the "
    "optimizer's step."
)
_OWN = (
    "Each W adds what its own B owes, to whatever is in .grad: no debt of another micro-batch, and "
    "no sum that is kept elsewhere."
)


def _both(
    attempt: Callable, weights: Sequence[Tensor], inputs: Sequence[Tensor], dy: Tensor, case: str
) -> tuple[Any, Callable[[], None]]:
    """The gradient of the input, and W."""
    given = dy.clone()
    made = attempt(list(weights), list(inputs), given)
    if not isinstance(made, Sequence) or len(made) != 2 or not callable(made[1]):
        hint = "Return the gradient of the first layer's input, and W: a function, not called yet."
        raise Failed(f"{case}: you return no pair of a tensor and a function", hint)
    if not torch.equal(given, dy):
        hint = "W needs each layer's own gradient, and dy is the last one's: no in-place product."
        raise Failed(f"{case}: B changes dy in place", hint)
    return made[0], made[1]


def _halves(attempt: Callable, cases: Sequence[tuple[Sequence[int], int]], why: str) -> str:
    for sizes, m in cases:
        case = f"layer widths {', '.join(map(str, sizes))}" + f", {m} micro-batches" * (m > 1)
        weights, passes = _chain(sizes, m)
        expected: list[Any] = [0] * len(weights)
        owed = []
        for inputs, dy in passes:
            found, w = _both(attempt, weights, inputs, dy, case)
            owed.append(w)
            for i in reversed(range(len(weights))):
                expected[i] = expected[i] + dy.mT @ inputs[i]
                dy = dy @ weights[i]
            _is(found, dy, case, "the gradient of the input", _DX)
        if any(weight.grad is not None and weight.grad.any() for weight in weights):
            raise Failed(f"{case}: there are gradients of weights before W", "They belong to W.")
        for w in owed:
            w()
        if all(weight.grad is None for weight in weights):
            why = _NOT_PAID
        elif why is _LATE and all(weight.grad is not None for weight in weights):
            why = _MIXED
        for i, wanted in enumerate(expected):
            _is(weights[i].grad, wanted, case, f"the gradient of layer {i}'s weight", why)
    return f"{len(cases)} cases"


def _in_turn(attempt: Callable) -> str:
    """Gradients after each B and each W, which take turns; the weights had gradients before."""
    case = "layer widths 3, 5, 2, 4, B0 W0 B1 B2 W2 W1"
    weights, passes = _chain((3, 5, 2, 4), 3)
    expected = [weight.detach().flip(0) for weight in weights]
    for weight, grad in zip(weights, expected, strict=True):
        weight.grad = grad.clone()
    owed: dict[int, Callable[[], None]] = {}
    for kind, k in ("B0", "W0", "B1", "B2", "W2", "W1"):
        inputs, dy = passes[int(k)]
        if kind == "B":
            owed[int(k)] = _both(attempt, weights, inputs, dy, case)[1]
        else:
            owed[int(k)]()
            for i in reversed(range(len(weights))):
                expected[i] = expected[i] + dy.mT @ inputs[i]
                dy = dy @ weights[i]
        what, why = f"after {kind}{k} the gradient of layer", _ALONE if kind == "B" else _OWN
        for i, wanted in enumerate(expected):
            _is(weights[i].grad, wanted, case, f"{what} {i}'s weight", why)
    return "after each B and each W"


_COPIES = {
    *("clone", "_to_copy", "copy_", "cat", "stack", "index", "index_select", "gather"),
    *("empty_like", "zeros_like", "ones_like", "new_zeros", "new_empty", "new_ones"),
}


class _Reads(TorchDispatchMode):
    """Which operations compute with some tensors, their views or their copies."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.kept = list(tensors)  # so that no other tensor takes their place in memory
        self.names: list[str] = []

    def _touches(self, tree: Any) -> bool:
        places = {x.untyped_storage().data_ptr() for x in self.kept}
        leaves = (x for x in tree_leaves(tree) if isinstance(x, Tensor))
        return any(x.untyped_storage().data_ptr() in places for x in leaves)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._touches((args, kwargs)) and not self._touches(out):
            name = func.overloadpacket.__name__
            if name in _COPIES:
                self.kept += [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            else:
                self.names.append(name)
        return out


def _products(attempt: Callable) -> str:
    """Each product of a backward pass once: the inputs' half in B, the weights' half in W."""
    case = "layer widths 3, 5, 2, 4"
    weights, ((inputs, dy),) = _chain((3, 5, 2, 4), 1)
    enough = sum(2 * len(dy) * weight.numel() for weight in weights)
    found: list[Callable] = []
    with _Reads(inputs) as reads:
        b = fused.product_flops(lambda: found.append(attempt(list(weights), list(inputs), dy)[1]))
    w = fused.product_flops(found[0])
    for name, flops, half in (("B", b, "dy @ weight"), ("W", w, "grad.mT @ x")):
        if flops > enough:
            raise Failed(
                f"{case}: {name} multiplies {flops:,} FLOPs, {enough:,} are enough",
                f"{name} needs one product for each layer, {half}. Work that is done in B moves "
                "nothing, and a second walk along the chain costs what you wanted to save.",
            )
    if reads.names:
        raise Failed(
            f"{case}: B computes with the inputs of the layers ({reads.names[0]})",
            "The gradient of an input needs dy and the weight alone. What reads x belongs to the "
            "gradient of the weight, in whatever way it is multiplied: it moves nothing if B does "
            "it, and W adds up what is there.",
        )
    return "each product once"


LATE = Exercise(
    id="pipeline/late-weights",
    reference=_later,
    properties=(
        Property("one layer", _halves, cases=[((4, 4), 1), ((3, 5), 1)], why=_DW),
        Property("several layers", _halves, cases=[((4, 4, 4), 1), ((3, 5, 2, 4), 1)], why=_LATE),
        Property(
            "several micro-batches", _halves, cases=[((4, 4), 2), ((3, 5, 2, 4), 3)], why=_ADD
        ),
        Property("B and W in turn", _in_turn),
        Property("what is multiplied when", _products),
    ),
    hints=(
        "Print id(weight) inside pay for two layers. Then run two micro-batches, W after both.",
        "Bind now what W needs later: functools.partial(pay, weight, grad, x), with parameters for "
        "pay, or a list of tuples. "
        "And add to weight.grad if there is one.",
    ),
    untouched="765fb206",
)

EXERCISES = (ONE_F_ONE_B, PEAK, PLACE_W, HUNT, LATE)
