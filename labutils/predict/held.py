"""What a rank holds of weights, gradients and what the optimizer keeps: between steps, and at the
fullest moment of one."""

from collections.abc import Iterator
from dataclasses import replace

from labutils.config import MOMENTS
from labutils.ledger import Ledger, Line
from labutils.predict.inventory import Flat, Here

STEP = 4  # bytes in which Adam counts its steps, for each parameter


def states_in(here: Here) -> Ledger:
    """Bytes after an optimizer step, under the names of `measure.model_states`."""
    found = _sharded(here) if here.train.zero else _whole(here)
    lines = [line for line in (*found, *_buffers(here)) if line.amount]
    return Ledger(lines).merged()


def _whole(here: Here) -> Iterator[Line]:
    train = here.train
    for weight in here.weights:
        yield Line("weights", weight.nbytes, "weights")
        if not weight.trained:
            continue
        half = train.half and weight.width == 2
        if not (half and train.fp32_gradients == "only"):
            yield Line("gradients", weight.nbytes, "gradients")
        if half and train.fp32_gradients:
            yield Line("fp32 gradients", 4 * weight.numel, "gradients")
        if half:
            yield Line("master weights", 4 * weight.numel, "optimizer")
        yield from _moments(train.optimizer, weight.numel, max(4, weight.width), 1)


def _moments(optimizer: str, numel: int, width: int, tensors: int) -> Iterator[Line]:
    for name in MOMENTS[optimizer]:
        yield Line(name, numel * width, "optimizer")
    if len(MOMENTS[optimizer]) == 2:
        yield Line("step", STEP * tensors, "optimizer")


def _sharded(here: Here) -> Iterator[Line]:
    """At levels 1 to 3: of each flat parameter what is whole, and this rank's share."""
    train = here.train
    if train.zero < 3:
        for weight in here.weights:
            yield Line("weights", 0 if weight.trained else weight.nbytes, "weights")
    for _, n, rank, trained in here.sides():
        for unit in here.units(trained, n, rank):
            yield from _share(here, unit)


def _share(here: Here, unit: Flat) -> Iterator[Line]:
    train, part, width = here.train, unit.part, max(4, unit.width)
    kept = part.share if train.zero == 3 else part.padded
    yield Line("weights", kept * unit.width, "weights")
    if not unit.trained:
        return
    own, pieces = sum(unit.own), sum(map(bool, unit.own))
    half = train.half and unit.width == 2
    name = "fp32 gradients" if train.half and train.zero < 3 else "gradients"
    if train.zero > 1:
        yield Line(name, part.share * width if own else 0, "gradients")
    elif not half or train.fp32_gradients:  # it lies where it was reduced, in its bucket
        yield Line(name, part.padded * width if own else 0, "gradients")
    else:
        yield Line(name, own * width, "gradients")
    if half:
        yield Line("master weights", part.share * width, "optimizer")
    yield from _moments(train.optimizer, own, width, pieces)


def _buffers(here: Here) -> Iterator[Line]:
    """RoPE's tables of cos and sin, one for all layers."""
    model = here.model
    if model.positions == "rope" and any(stage.layers for stage in here.stages):
        width = max(4, here.stream) if here.train.zero == 3 else here.stream
        yield Line("buffers", 2 * model.seq_len * (model.d_head // 2) * width, "buffers")


# ── at the fullest moment of a step ───────────────────────────────────────────────────────────────


def no_moment(here: Here) -> str:
    """Why there is no formula for the fullest moment, if there is none."""
    train, mesh = here.train, here.mesh
    reasons = {
        "what comes and goes without ZeRO are single gradients": train.zero == 0,
        "other axes send gradients too": mesh.size > mesh.dp,
        "gradients of several experts come at once": here.model.num_experts > 1,
        "nothing is trained": not any(weight.trained for weight in here.weights),
        "layers of other kinds": train.adapters or train.fp8 or train.autocast,
    }
    return next((reason for reason, so in reasons.items() if so), "")


def fullest_in(here: Here) -> Ledger:
    """Bytes at that moment, where ZeRO shares states over dp alone.

    What stays for the whole step is whole, or the rank's share. What comes and goes is one gradient
    on its way, and

    - level 1: the gradients, which come bucket by bucket in the first of several backward passes;
      where the shares have a type of their own, their gradients, bucket by bucket;
    - level 2: the bucket that fills and the one that is being reduced;
    - level 3: the weights of the root, of the layer that computes and of the next one; the
      gradients of the root, of that layer and of the one before.
    """
    level = here.train.zero
    ((_, n, rank, trained),) = here.sides()
    flats = list(here.units(trained, n, rank))
    stays = states_in(here)
    lines = list(stays.only(component="weights"))
    if level == 3:
        lines = [replace(line, name="weight shards") for line in lines]
    if level > 1:
        shares = sum(unit.part.share * max(4, unit.width) for unit in flats if unit.trained)
        lines.append(Line("gradient shards", shares, "gradients"))
    lines += stays.only(component="optimizer")
    moments = _layers_come(here, flats) if level == 3 else _buckets_come(here, flats)
    for name, nbytes in max(moments, key=lambda moment: sum(moment.values())).items():
        lines.append(Line(name, nbytes, "weights" if "weights" in name else "gradients"))
    return Ledger(line for line in lines if line.amount)


def _buckets_come(here: Here, flats: list[Flat]) -> Iterator[dict[str, int]]:
    """Of levels 1 and 2 the gradients that come and go, at moments that may be the fullest."""
    train, landed = here.train, 0
    more = train.accumulation(here.mesh.dp) > 1
    wide = 4 if train.half and train.fp32_gradients else 0
    sizes = [unit.part.padded * (wide or unit.width) for unit in flats]
    for i, unit in enumerate(flats):
        coming = max(weight.nbytes for weight in unit.weights)
        if train.zero == 2:
            filling = sum(sizes[max(0, i - 1) : i + 1])
            yield {"gradient buckets": filling, "gradient on its way": coming}
            continue
        kept = sum(sizes if more else sizes[: i + 1])
        yield {"gradients": kept, "gradient on its way": coming}
        landed += sum(unit.own) * max(4, unit.width)
        if max(4, unit.width) != (wide or unit.width):
            yield {"gradients": sum(sizes[i:]), "gradient shards": landed}


def _layers_come(here: Here, flats: list[Flat]) -> Iterator[dict[str, int]]:
    """Of level 3 what is gathered and collected, at moments that may be the fullest."""
    train, width = here.train, here.stream
    wide = 4 if train.half and train.fp32_gradients else width
    rows: dict[str, list[Flat]] = {"": []}  # first the root, which is whole for an entire pass
    for unit in flats:
        block = unit.weights[0].name.split(".")[:2]
        rows.setdefault(block[1] if block[0] == "blocks" else "", []).append(unit)
    weights = [sum(unit.part.padded for unit in row) * width for row in rows.values()]
    learns = [[unit for unit in row if unit.trained] for row in rows.values()]
    sizes = [sum(unit.part.padded for unit in row) * wide for row in learns]
    after = here.model.num_layers  # whose gradients come first: what the root has behind the layers
    coming = [0] * (after + 2)
    for i, row in enumerate(learns):
        for weight in (weight for unit in row for weight in unit.weights):
            at = after + 1 if weight.name.startswith(("norm", "head")) else i
            coming[at] = max(coming[at], weight.numel * width)

    def moment(computing: int, ahead: int, buckets: set[int], arrives: int) -> dict[str, int]:
        whole = {0, computing} | ({ahead} if train.prefetch and 0 < ahead <= after else set())
        if not train.reshard:
            whole |= set(range(computing + 1))
        return {
            "gathered weights": sum(weights[i] for i in whole),
            "gradient buckets": sum(sizes[i] for i in buckets),
            "gradient on its way": arrives,
        }

    for i in range(after + 1):
        yield moment(i, i + 1, set(), 0)
    yield moment(0 if train.reshard else after, after, {0}, coming[after + 1])
    reducing: set[int] = set()
    for i in range(after, 0, -1):
        own = {i} if learns[i] else set()
        yield moment(i, i - 1, {0} | own | reducing, coming[i])
        reducing = own or reducing
    yield moment(0, 0, {0} | reducing, coming[0])
