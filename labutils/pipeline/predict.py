"""What a pipeline sends, from the schedule and the sizes alone."""

import math
from collections import Counter

from labutils import anatomy, units
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.pipeline.messages import reader_of
from labutils.pipeline.stages import cut, placed, shared_with
from labutils.schedule import Schedule


def sent(
    schedule: Schedule,
    model: ModelConfig,
    *,
    micro_batch: int,
    itemsize: int = 4,
    layers: tuple[int, ...] | None = None,
    tp: int = 1,
    sequence: bool = False,
) -> Ledger:
    """Bytes that each rank sends in one step: b·s·h numbers for each F whose result another rank
    reads, and for each such B; and the gradients of what two ranks have, whole and as wide as
    activations. Of a step with ZeRO, or formats of their own, see `predict.sent`.

    layers: of each stage, as for `split`; only where micro-batches flow both ways does it matter
    tp: tensor parallelism, whose ranks each send as much, and have a share of each gradient
    sequence: whether each of them sends its tokens only, s/tp

    >>> from labutils.schedule import one_f_one_b
    >>> gpt2 = ModelConfig.named("gpt2")
    >>> step = sent(one_f_one_b(4, 8), gpt2, micro_batch=1).only(name="send forward")
    >>> step.by("rank") == dict.fromkeys(range(3), 8 * 4 * gpt2.seq_len * gpt2.d_model)
    True
    """
    units.instance(schedule, Schedule, "sent")
    units.instance(model, ModelConfig, "sent")
    s, t = model.seq_len, units.whole(tp, "tp", 1)
    if sequence and s % t:
        raise ValueError(f"tp={t} does not divide seq_len={s}: pad it, or set sequence=False")
    each = units.whole(micro_batch, "micro_batch", 1) * s * model.d_model * itemsize
    each //= t if sequence else 1
    lines = []
    for rank, ops in enumerate(schedule.ranks):
        counts = Counter(op.kind for op in ops if reader_of(schedule, op) is not None)
        for kind, name in (("F", "send forward"), ("B", "send backward")):
            if n := counts[kind]:
                lines.append(Line(name, n * each, axis="pp", rank=rank, count=n))
        if sizes := _twice(schedule, model, rank, layers, t):
            nbytes, n = sum(sizes) * itemsize, len(sizes)
            lines.append(Line("gradients", nbytes, axis="pp", rank=rank, count=n))
    return Ledger(lines)


def _twice(
    schedule: Schedule, model: ModelConfig, rank: int, layers: tuple[int, ...] | None, tp: int
) -> list[int]:
    """Elements of each parameter of this rank that another has, too."""
    if shared_with(schedule, rank, model.tied) is None:
        return []
    if len(schedule.places) == 1:
        return [math.prod(anatomy.tensors(model, tp=tp)["tokens.weight"])]
    layers = layers or cut(model, schedule.stages)
    mine = placed(schedule, rank)
    blocks = {f"blocks.{k}." for s in mine for k in range(sum(layers[:s]), sum(layers[: s + 1]))}
    ends = ("tokens", "positions") * (0 in mine) + ("norm", "head") * (schedule.stages - 1 in mine)
    return [
        math.prod(shape)
        for name, shape in anatomy.tensors(model, tp=tp).items()
        if name.startswith(tuple(blocks)) or name.split(".")[0] in ends
    ]
