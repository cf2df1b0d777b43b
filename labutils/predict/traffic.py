"""What a rank sends in one step: a private term for each axis, summed over its inventory."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from labutils.anatomy import INDEX
from labutils.ledger import Ledger, Line
from labutils.predict.inventory import OTHERS, Here, Placed, Weight

_WHOLE = ("pp", "dp", "cp", "tp")


class Call(NamedTuple):
    """Equal collectives: the name in the books, the axes of the ranks, elements in all, bytes of
    one, how often; `row` is how many elements are never cut apart, `block` how many neighbours on
    tp take part where not all do."""

    name: str
    op: str
    axes: tuple[str, ...]
    numel: int
    width: int
    times: int
    row: int = 1
    block: int = 0


def sent_by(here: Here) -> Ledger:
    """Bytes by axis and operation."""
    lines = list(of_stages(here))
    for term in (of_passes, of_replicas, _agreed):
        lines += (_line(here, call) for call in term(here) if call.times)
    return Ledger(line for line in lines if line.count).merged()


def of_passes(here: Here) -> Iterator[Call]:
    """What the passes of micro-batches send within stages."""
    for term in (_tensors, _contexts, _experts):
        yield from term(here)


def _line(here: Here, call: Call) -> Line:
    from labutils.collectives.costs import FORMULAS, Seat

    axes = tuple(axis for axis in (*_WHOLE, "ep", "edp") if axis in call.axes)
    name = "world" if axes == _WHOLE else "_".join(axes)
    ranks = here.mesh.ranks(here.rank, *axes)
    n, at = len(ranks), ranks.index(here.rank)
    if call.block:
        n, at = call.block, at % call.block
    seat = Seat(n, at, call.numel * call.width, call.row * call.width)
    count, nbytes = n - 1, (n - 1) * seat.S
    if call.op != "ring":  # whose messages are whole
        way = "pairwise" if call.op == "all_to_all" else "ring"
        count, nbytes = FORMULAS[f"{call.op}_{way}"].sent(seat)
    return Line(call.name, nbytes * call.times, "", name, here.rank, count * call.times)


# ── tp ────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(here: Here) -> Iterator[Call]:
    """What tensor parallelism sends: of each layer's halves, of the ends, for gradients."""
    if here.mesh.tp == 1:
        return
    for stage in here.stages:
        yield from _sequence(here, stage) if here.train.sequence else _heads(here, stage)
        yield from _low(here, stage)
        if stage.heads:  # the largest logit of each token, then the sum and the target's
            wide = max(4, here.compute if not here.train.autocast else 4)
            for numel in (here.tokens, 2 * here.tokens):
                yield Call("loss", "all_reduce", ("tp",), numel, wide, stage.runs)
    for weight in here.weights:
        if weight.trained:
            yield from _partial(here, weight)


def _again(here: Here, stage: Placed) -> tuple[int, int]:
    """How often halves of a layer begin and end once more, where full recomputation computes them
    again: in a dense layer up to the input of its last product."""
    model, train = here.model, here.train
    if train.checkpointing != "full":
        return 0, 0
    halves = stage.layers * (1 if model.num_experts > 1 else 2)
    whole = model.num_experts > 1 or model.dropout or train.adapters
    return halves, halves - (0 if whole else stage.layers)


def _halves(here: Here, stage: Placed) -> int:
    """Halves of layers that tensor parallelism splits: experts are whole."""
    return stage.layers * (1 if here.model.num_experts > 1 else 2)


def _row(here: Here) -> int:
    """Bytes of a number that a row layer's product gives; in 8 bits it is fp32."""
    return max(4, here.compute) if here.train.fp8 else here.compute


def _learning(here: Here, stage: Placed) -> int:
    """Halves whose input needs a gradient: of adapters' first layer it does not."""
    return _halves(here, stage) - (
        1 if stage.embeds and stage.layers and _frozen_start(here) else 0
    )


def _frozen_start(here: Here) -> bool:
    return not any(w.trained for w in here.weights if w.part in ("tokens", "positions"))


def _heads(here: Here, stage: Placed) -> Iterator[Call]:
    """f and g: an all-reduce behind each half forward, one before it backward."""
    stream = here.tokens * here.model.d_model

    def call(way: str, width: int, times: int) -> Call:
        return Call(f"all_reduce {way}", "all_reduce", ("tp",), stream, width, times * stage.runs)

    yield call("forward", _row(here), _halves(here, stage) + _again(here, stage)[1])
    yield call("forward", here.stream, int(stage.embeds))
    yield call("backward", here.stream, _learning(here, stage) + stage.heads)


def _sequence(here: Here, stage: Placed) -> Iterator[Call]:
    """Under sequence parallelism: gathers before each half and scatters behind it."""
    h, train = here.model.d_model, here.train
    halves, learning, (begun, ended) = (
        _halves(here, stage), _learning(here, stage), _again(here, stage)
    )  # fmt: skip
    eight = train.fp8 is not None
    enter = here.stream if eight else here.compute
    kept = 0 if eight or train.adapters else halves  # gathered once more for the weights' gradients
    start = stage.embeds and not _frozen_start(here)
    head = any(w.trained for w in here.weights if w.part == "head" or w.name == "tokens.weight")

    def call(op: str, way: str, width: int, times: int) -> Call:
        # Tokens are cut, and b·h numbers of each stay together.
        row, numel = train.micro_batch * h, here.tokens * h
        return Call(f"{op} {way}", op, ("tp",), numel, width, times * stage.runs, row)

    yield call("all_gather", "forward", enter, halves + begun)
    yield call("reduce_scatter", "forward", _row(here), halves + ended)
    yield call("all_gather", "backward", _row(here), halves)
    yield call("all_gather", "backward", enter, kept)
    yield call("reduce_scatter", "backward", enter, learning)
    yield call("reduce_scatter", "forward", here.stream, int(stage.embeds))
    yield call("all_gather", "backward", here.stream, int(start))
    yield call("all_gather", "forward", here.compute, int(stage.heads))
    yield call("all_gather", "backward", here.compute, int(stage.heads and head))
    yield call("reduce_scatter", "backward", here.compute, int(stage.heads))


def _low(here: Here, stage: Placed) -> Iterator[Call]:
    """Adapters of split layers: the r numbers of each token that lie between A and B."""
    if here.train.adapters is None:
        return
    again = 1 + (here.train.checkpointing == "full")
    b, r = here.train.micro_batch, here.train.adapters.rank
    for weight in here.weights:
        if weight.stages != (stage.index,) or not weight.name.endswith(".A"):
            continue
        for way, style, times in (("forward", "row", again), ("backward", "column", 1)):
            op, back = (
                ("reduce_scatter", "all_gather") if here.train.sequence else ("all_reduce", "")
            )
            ways = {"forward": "backward", "backward": "forward"}
            if weight.style == style:
                low, width = here.tokens * r, here.compute
                row = b * r if here.train.sequence else 1
                yield Call(f"{op} {way}", op, ("tp",), low, width, times * stage.runs, row)
                if back:
                    times = again if ways[way] == "forward" else 1
                    name = f"{back} {ways[way]}"
                    yield Call(name, back, ("tp",), low, width, times * stage.runs, row)


def _partial(here: Here, weight: Weight) -> Iterator[Call]:
    """Gradients that each rank has a part of: under sequence parallelism of what it applies to its
    own tokens, and of a key–value head that neighbours have alike."""
    runs = sum(s.runs for s in here.stages if s.index in weight.stages)
    width, how = weight.width, ("all_reduce", ("tp",), weight.numel)
    if here.train.zero == 3 or (weight.name.endswith((".A", ".B")) and weight.style != "whole"):
        width = here.stream  # of the copy that computes
    if weight.alike > 1:
        yield Call("gradients", *how, width, runs, block=weight.alike)
    if not here.train.sequence:
        return
    last = weight.name.rpartition(".")[2]
    own = {"column": last == "A", "row": last in ("bias", "B"), "whole": True}
    if own.get(weight.style, False):
        yield Call("gradients", *how, width, runs)


# ── cp, ep ────────────────────────────────────────────────────────────────────────────────────────


def _contexts(here: Here) -> Iterator[Call]:
    """What attention over ranks sends: keys and values round a ring, or heads for tokens."""
    c, train, model = here.mesh.cp, here.train, here.model
    if c == 1:
        return
    from labutils import context_parallel, tensor_parallel

    local = tensor_parallel.rank_config(model, here.mesh.tp)
    a, g = local.num_heads, local.num_kv_heads
    rows, width = here.tokens * model.d_head, _row(here)
    again = 1 + (train.checkpointing != "none")
    for stage in here.stages:
        times = stage.layers * stage.runs
        if train.attention == "ring":
            yield Call("ring forward", "ring", ("cp",), 2 * g * rows, width, again * times)
            yield Call("ring backward", "ring", ("cp",), 2 * g * rows, width, times)
            wide = max(4, width)
            yield Call("ring backward", "ring", ("cp",), 2 * g * rows, wide, times)
            continue
        back = 1 + (train.checkpointing == "full")  # selective: what gives tokens back is the end
        both = a + 2 * context_parallel.kv_heads(a, g, c)
        for numel, often in ((both * rows, again), (a * rows, back)):
            for way, more in (("forward", often), ("backward", 1)):
                name, ahead = f"all_to_all {way}", ("all_to_all", ("cp",), numel, width)
                yield Call(name, *ahead, more * times, numel // c)


def _experts(here: Here) -> Iterator[Call]:
    """What tokens and their gradients send on their way to experts and back, routed evenly."""
    e, model, train = here.mesh.ep, here.model, here.train
    if e == 1:
        return
    visits = here.own * model.top_k
    again = 1 + (train.checkpointing == "full")
    for stage in here.stages:
        times = stage.layers * stage.runs
        E = model.num_experts
        yield Call("counts", "all_to_all", ("ep",), E, INDEX, again * times, E // e)
        for name, width in (("dispatch", here.stream), ("combine", _row(here))):
            numel = visits * model.d_model
            for way, often in (("forward", again), ("backward", 1)):
                yield Call(
                    f"{name} {way}", "all_to_all", ("ep",), numel, width, often * times, numel // e
                )


# ── pp ────────────────────────────────────────────────────────────────────────────────────────────


def of_stages(here: Here) -> Iterator[Line]:
    """What stages send to neighbours, and the gradients of what two ranks have."""
    from labutils.pipeline.messages import reader_of
    from labutils.pipeline.stages import shared_with

    plan, at = here.plan, here.coords["pp"]
    nbytes = here.own * here.model.d_model * here.stream
    readers = [op.kind for op in plan.ranks[at] if reader_of(plan, op) is not None]
    for kind, name in (("F", "send forward"), ("B", "send backward")):
        if times := readers.count(kind):
            yield Line(name, times * nbytes, "", "pp", here.rank, times)
    if shared_with(plan, at, here.model.tied) is None:
        return
    train, half = here.train, here.train.half
    wide = 4 if half and train.fp32_gradients else 0
    for axes, n, rank, trained in here.sides():
        for unit in here.units(trained, n, rank) if train.zero == 2 else [trained]:
            weights = unit if isinstance(unit, list) else unit.weights
            for i, weight in enumerate(weights):
                both = len(plan.places) == 2 or len(weight.stages) > 1
                if isinstance(unit, list):
                    numel, width = weight.numel, wide or weight.width
                else:
                    numel, width = unit.own[i], max(4, weight.width)
                if both and numel:
                    yield Line("gradients", numel * width, "", "pp", here.rank)


# ── dp, and what all agree on ─────────────────────────────────────────────────────────────────────


def of_replicas(here: Here) -> Iterator[Call]:
    """Gradients that are averaged over replicas, and weights that ZeRO gathers."""
    train = here.train
    wide = 4 if train.half and train.fp32_gradients else 0
    for axes, n, rank, trained in here.sides():
        if train.zero == 0:
            for weight in trained:
                width = max(4, weight.width)
                yield Call("gradients", "all_reduce", axes, weight.numel, width, 1)
            continue
        for unit in here.units(trained, n, rank):
            padded, stages = unit.part.padded, unit.weights[0].stages
            passes = sum(s.passes for s in here.stages if s.index in stages)
            width = here.stream if train.zero == 3 else unit.width
            gathers = _gathers(here, stages[0]) if train.zero == 3 else 1
            yield Call("all_gather", "all_gather", axes, padded, width, gathers)
            if unit.trained:
                times = passes if train.zero > 1 else 1
                yield Call("reduce_scatter", "reduce_scatter", axes, padded, wide or width, times)


def _gathers(here: Here, stage: int) -> int:
    """How often level 3 gathers a stage's weights: for each pass, unless they are left by the one
    before, which was of the same micro-batch if it was forward."""
    kinds = [op.kind for op in here.plan.ranks[here.coords["pp"]] if op.stage == stage]
    left = 0 if here.train.reshard else [*itertools.pairwise(kinds)].count(("F", "B"))
    return len(kinds) - left


def _agreed(here: Here) -> Iterator[Call]:
    """Single numbers: targets and losses of all, the norm of the gradient, whether it is finite."""
    train = here.train
    last = any(stage.heads for stage in here.stages)
    yield Call("targets", "all_reduce", OTHERS, 1, 8, int(last))
    yield Call("loss", "all_reduce", ("pp", "dp", "cp"), 1, 8, 1)
    yield Call("gradient norm", "all_reduce", _WHOLE, 1, 8, int(train.clip is not None))
    yield Call("finite", "all_reduce", _WHOLE, 1, 4, int(train.precision == "fp16"))
