"""What a pipeline sends, from the schedule and the sizes alone."""

import math
from collections import Counter

from labutils import anatomy, units
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.pipeline.messages import reader_of
from labutils.pipeline.stages import cut, placed, shared_with
from labutils.schedule import Schedule


def sent(schedule: Schedule, model: ModelConfig, *, micro_batch: int, itemsize: int = 4) -> Ledger:
    """Bytes that each rank of any schedule sends in one step: b·s·h numbers for each F whose result
    another rank reads, and for each such B; and the gradients of what two ranks have, as wide as
    activations. Of a whole step on a mesh see `predict.sent`.

    >>> from labutils.schedule import one_f_one_b
    >>> gpt2 = ModelConfig.named("gpt2")
    >>> step = sent(one_f_one_b(4, 8), gpt2, micro_batch=1).only(name="send forward")
    >>> step.by("rank") == dict.fromkeys(range(3), 8 * 4 * gpt2.seq_len * gpt2.d_model)
    True
    >>> (s, h), b, m, bytes_each = gpt2.letters("s h"), 2, 8, 2
    >>> step = sent(one_f_one_b(4, m), gpt2, micro_batch=b, itemsize=bytes_each)
    >>> forward = step.only(name="send forward", rank=0).total
    >>> forward == m * b * s * h * bytes_each  # to the next stage, forward
    True
    """
    units.instance(schedule, Schedule, "sent")
    units.instance(model, ModelConfig, "sent")
    each = units.whole(micro_batch, "micro_batch", 1) * model.seq_len * model.d_model * itemsize
    lines = []
    for rank, ops in enumerate(schedule.ranks):
        counts = Counter(op.kind for op in ops if reader_of(schedule, op) is not None)
        for kind, name in (("F", "send forward"), ("B", "send backward")):
            if n := counts[kind]:
                lines.append(Line(name, n * each, axis="pp", rank=rank, count=n))
        if sizes := _twice(schedule, model, rank):
            nbytes, n = sum(sizes) * itemsize, len(sizes)
            lines.append(Line("gradients", nbytes, axis="pp", rank=rank, count=n))
    return Ledger(lines)


def _twice(schedule: Schedule, model: ModelConfig, rank: int) -> list[int]:
    """Elements of each parameter of this rank that another has, too."""
    if shared_with(schedule, rank, model.tied) is None:
        return []
    if len(schedule.places) == 1:
        return [math.prod(anatomy.tensors(model)["tokens.weight"])]
    layers, mine = cut(model, schedule.stages), placed(schedule, rank)
    blocks = {f"blocks.{k}." for s in mine for k in range(sum(layers[:s]), sum(layers[: s + 1]))}
    ends = ("tokens", "positions") * (0 in mine) + ("norm", "head") * (schedule.stages - 1 in mine)
    return [
        math.prod(shape)
        for name, shape in anatomy.tensors(model).items()
        if name.startswith(tuple(blocks)) or name.split(".")[0] in ends
    ]
