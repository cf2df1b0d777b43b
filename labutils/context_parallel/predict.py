"""What context parallelism sends and keeps, from the sizes alone."""

from dataclasses import replace

from labutils import anatomy, collectives, units
from labutils.config import ModelConfig
from labutils.context_parallel.attention import kv_heads
from labutils.context_parallel.sequence import layout
from labutils.context_parallel.transform import require
from labutils.ledger import Ledger, Line


def sent(
    model: ModelConfig,
    n: int,
    *,
    micro_batch: int,
    attention: str = "ring",
    itemsize: int = 4,
    rank: int | None = None,
) -> Ledger:
    """Bytes that each of n ranks sends in the forward and backward pass of a micro-batch, gradients
    of parameters aside (`data_parallel.bytes_to_reduce`); alike in both layouts.

    itemsize: bytes of an element of weights and activations
    rank: the only one that is asked for; all unless given

    >>> layer = replace(ModelConfig.named("llama-3.1-8b"), num_layers=1)
    >>> ring = sent(layer, 8, micro_batch=1, itemsize=2, rank=0).by("name")
    >>> ring["ring forward"] == 7 * 2 * layer.seq_len // 8 * 8 * 128 * 2
    True
    """
    require(model, n, attention, "contiguous")
    L, s, a, g, d = model.letters("L s a g d")
    rows = units.whole(micro_batch, "micro_batch", 1) * d * layout(s, n, "contiguous").chunk
    if n == 1:
        return Ledger()
    wide = max(4, itemsize)
    losses = collectives.sent("all_reduce_ring", nbytes=wide, n=n, itemsize=wide, axis="cp")
    lines = [replace(line, name="loss") for line in losses if rank in (None, line.rank)]
    for i in range(n) if rank is None else (rank,):
        if attention == "ring":
            kv, sums = 2 * g * rows * itemsize, 2 * g * rows * wide
            moves = [("ring forward", kv, 1), ("ring backward", kv + sums, 2)]
        else:
            each = (2 * a + 2 * kv_heads(a, g, n)) * rows * itemsize // n
            moves = [("all_to_all forward", each, 2), ("all_to_all backward", each, 2)]
        for name, nbytes, messages in moves:
            times = (n - 1) * L
            lines.append(Line(name, nbytes * times, axis="cp", rank=i, count=messages * times))
    return Ledger(lines).merged()


def kept_activations(
    model: ModelConfig,
    n: int,
    *,
    micro_batch: int,
    attention: str = "ring",
    how: anatomy.Policy = anatomy.Policy(attention="sdpa"),
) -> Ledger:
    """Bytes that autograd keeps on each of n ranks for the backward pass of a micro-batch: what a
    model of s/n tokens keeps, the rows of the RoPE tables that are this rank's, and the number of
    all targets. Where Ulysses copies key–value heads, n instead of g of them.

    how: precisions, as in `anatomy.kept`; the ring keeps what a fused attention does

    >>> llama, kept = ModelConfig.named("llama-3.1-8b"), {}
    >>> for n in (1, 16):
    ...     kept[n] = kept_activations(llama, n, micro_batch=1).only(name="blocks.31.attention")
    >>> kept[1].total / kept[16].total
    16.0
    """
    require(model, n, attention, "contiguous")
    a, g = model.letters("a g")
    s = layout(model.seq_len, n, "contiguous").chunk
    local = replace(model, seq_len=s)
    sizes = anatomy.letters(local) | {"b": units.whole(micro_batch, "micro_batch", 1)}
    copies = kv_heads(a, g, n) // g if attention == "ulysses" else 1
    lines = []
    for name, tensor in anatomy.kept(local, how):
        nbytes = anatomy.size(tensor.dims, sizes) * tensor.itemsize
        nbytes *= copies if tensor.what in ("keys", "values") else 1
        lines.append(Line(name, nbytes, "activations", note=tensor.what))
    if model.positions == "rope":
        tables = s * model.d_head * how.compute
        rotary = "rows of the tables of RoPE, sd"
        lines.append(Line("blocks.0.attention.rotary", tables, "activations", note=rotary))
    elif attention == "ulysses":
        # Without RoPE a fused kernel's output is ready for the next product; the exchange makes it
        # anew, tokens innermost.
        output = micro_batch * how.compute * s * a * model.d_head
        for i in range(model.num_layers):
            at = f"blocks.{i}.attention.output"
            lines.append(Line(at, output, "activations", note="input"))
    if model.positions == "learned":
        lines.append(Line("positions", 8 * s, "activations", note="places of the tokens, s"))
    lines.append(Line("outside", 8, "activations", note="targets of all ranks"))
    return Ledger(lines)
