"""What a rank holds between steps: weights, gradients and what the optimizer keeps."""

from collections.abc import Iterator

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
