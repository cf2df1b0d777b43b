"""What autograd keeps on a rank between the forward and the backward passes of micro-batches."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from labutils import anatomy
from labutils.anatomy import INDEX
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.predict.inventory import Here

_BATCH = {"tokens", "targets"}  # views of the batch, which is there anyway
_PARTED = {"ring", "ulysses"}  # attention of ranks that have a part of the tokens each


def why_dry(here: Here) -> str:
    """Why there is no formula for what is kept, if there is none."""
    model, train, mesh = here.model, here.train, here.mesh
    reasons = {
        "what a weight's gradient needs is kept longer than the rest": here.plan.split,
        "tokens choose their experts": model.num_experts > 1,
        "masks of what is computed again": model.dropout > 0 and train.checkpointing != "none",
        "what adapters need": train.adapters is not None and not _one_device(here),
        "8 bits": train.fp8 is not None,
        "half copies": train.autocast and (mesh.size > 1 or train.attention in _PARTED),
        "a frozen weight needs no input": train.frozen,
        "PyTorch's fused attention takes no halves of one number": _halves_of_one(here),
    }
    return next((reason for reason, so in reasons.items() if so), "")


def _halves_of_one(here: Here) -> bool:
    """Whether RoPE leaves heads of two numbers, whose scores PyTorch then keeps."""
    return (
        here.train.attention == "sdpa" and here.model.positions == "rope" and here.model.d_head == 2
    )


def _one_device(here: Here) -> bool:
    """Whether a step is of the kind of which adapters have a formula."""
    model, train = here.model, here.train
    plain = train.attention == "sdpa" and train.checkpointing == "none" and not train.autocast
    return here.mesh.size == 1 and plain and here.stream < 8 and not model.dropout


def kept_here(here: Here) -> Ledger:
    """Bytes at the fullest moment between two operations, the batch itself aside."""
    of = {stage.index: list(_of_a_pass(here, stage.index)) for stage in here.stages}
    sizes = {index: sum(line.amount for line in lines) for index, lines in of.items()}
    held: Counter[int] = Counter()
    most: Counter[int] = Counter()

    def total(counts: Counter[int]) -> int:
        return sum(sizes[index] * count for index, count in counts.items())

    for op in here.plan.ranks[here.coords["pp"]]:
        held[op.stage] += op.kind == "F"
        if total(held) > total(most):
            most = held.copy()
        held[op.stage] -= op.kind == here.plan.kinds[-1]
    lines = [
        replace(line, amount=line.amount * most[index], count=most[index])
        for index, kept in of.items()
        for line in kept
    ]
    return Ledger([*lines, *_tables(here)])


def _of_a_pass(here: Here, index: int) -> Iterator[Line]:
    """What the forward pass of a stage keeps of one micro-batch, by module."""
    from labutils import tensor_parallel

    train, mesh = here.train, here.mesh
    stage = next(stage for stage in here.stages if stage.index == index)
    local = tensor_parallel.rank_config(here.model, mesh.tp)
    local = replace(local, seq_len=here.model.seq_len // mesh.cp)
    attention = "sdpa" if train.attention == "ring" else train.attention
    how = anatomy.Policy(here.compute, here.stream, attention, train.checkpointing)
    sizes = anatomy.letters(local) | {"b": train.micro_batch}
    blocks, ends = range(stage.first, stage.end), set[str]()
    ends |= {"tokens", "positions", "dropout"} if stage.embeds else set()
    ends |= {"norm", "head", "outside"} if stage.heads else set()
    whole = functools.cache(lambda dims: anatomy.size(dims, sizes))  # layers are alike
    rows = anatomy.kept(local, how)
    if train.adapters is not None:
        from labutils import lora

        sizes["r"] = train.adapters.rank
        rows = lora.kept_with_adapters(local, train.adapters, how)
    for name, tensor in rows:
        part = name.split(".")
        if not (int(part[1]) in blocks if part[0] == "blocks" else part[0] in ends):
            continue
        itemsize = 8 if here.stream == 8 else tensor.itemsize
        if tensor.name in ("keys", "values"):
            itemsize *= _copies(here, local)
        if tensor.name == "count" and mesh.tp > 1:  # which half formats cannot make
            itemsize = max(4, itemsize)
        nbytes = whole(tensor.dims) * itemsize
        if train.sequence and not set(tensor.dims) & set(anatomy.SPLITS["tp"]):
            nbytes //= mesh.tp if name != "outside" else 1
        if tensor.name in _BATCH:
            continue
        yield Line(name, nbytes, "activations", note=tensor.note)
    if _casts_tables(here) and train.checkpointing != "full":
        for i in range(stage.first, stage.end):
            at, nbytes = f"blocks.{i}.attention.rotary", 2 * local.seq_len * local.d_head * 2
            yield Line(at, nbytes, "activations", note="halves of RoPE's tables, for q and for k")
    if stage.embeds and mesh.tp > 1:  # which words are others', and the places of one's own
        yield Line("tokens", (INDEX + 1) * here.tokens, "activations", note="words of other ranks")
    if stage.embeds and train.attention in _PARTED and here.model.positions == "learned":
        places = INDEX * local.seq_len
        yield Line("positions", places, "activations", note="places of the tokens, s")
    if stage.heads and train.precision == "fp16":
        yield Line("outside", 4, "activations", note="the scale of the loss")
    if stage.heads:
        yield Line("outside", INDEX, "activations", note="number of targets that count")


def _copies(here: Here, local: ModelConfig) -> int:
    """How often a key–value head is kept: more than once if Ulysses has more ranks than heads."""
    from labutils.context_parallel.attention import kv_heads

    if here.train.attention != "ulysses" or here.train.checkpointing != "none":
        return 1
    return kv_heads(local.num_heads, local.num_kv_heads, here.mesh.cp) // local.num_kv_heads


def _tables(here: Here) -> Iterator[Line]:
    """The rows of RoPE's tables for the tokens of a rank of cp, picked out once."""
    parted, rope = here.train.attention in _PARTED, here.model.positions == "rope"
    if parted and rope and not _casts_tables(here) and any(stage.layers for stage in here.stages):
        numbers = here.model.seq_len // here.mesh.cp * here.model.d_head
        note = "rows of the tables of RoPE, sd"
        yield Line("blocks.0.attention.rotary", numbers * here.stream, "activations", note=note)


def _casts_tables(here: Here) -> bool:
    """Whether RoPE's tables are wider than what they turn: level 3 keeps them in fp32."""
    return here.train.zero == 3 and here.train.half and here.model.positions == "rope"
