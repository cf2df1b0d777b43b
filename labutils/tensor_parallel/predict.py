"""What tensor and sequence parallelism send and keep, from the sizes alone."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from labutils import anatomy, collectives, units
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.tensor_parallel.transform import rank_config, require_dense


def sent(
    model: ModelConfig,
    n: int,
    *,
    micro_batch: int,
    sequence: bool = False,
    itemsize: int = 4,
    ends: bool = True,
    start: bool = False,
    rank: int | None = None,
) -> Ledger:
    """Bytes that each of n ranks sends in the forward and backward pass of a micro-batch.

    A layer all-reduces b·s·h numbers twice each way. Sequence parallelism sends the same volume in
    eight halves, and gathers twice more in the backward pass, what is not kept whole; and it sums
    the gradients of the parameters that each rank applies to its tokens. Neighbours that have the
    same key–value head sum its gradients.

    sequence: sequence parallelism around it
    itemsize: bytes of an element of weights and activations
    ends: with the embedding, the head and the loss; else the layers alone
    start: with the broadcast of the whole model, which `parallelize` begins with
    rank: the only one that is asked for; all unless given

    >>> layer = replace(ModelConfig.named("llama-3.1-8b"), num_layers=1)
    >>> one = sent(layer, 8, micro_batch=1, ends=False, rank=0)
    >>> one.total == 4 * 2 * 7 / 8 * 4 * layer.seq_len * layer.d_model
    True

    Raises ValueError with the size that n does not divide.
    """
    require_dense(model)
    s, tokens = model.seq_len, units.whole(micro_batch, "micro_batch", 1) * model.seq_len
    calls = _calls(model, n, tokens * model.d_model, sequence, ends)
    if start:
        shapes = anatomy.tensors(model).values()
        calls += [("broadcast", math.prod(shape), 1, n) for shape in shapes]
    calls += [("loss", numel, int(ends), n) for numel in (tokens, 2 * tokens)]
    ranks = range(n) if rank is None else (rank,)
    return Ledger(line for call in calls for line in _lines(*call, itemsize, s, ranks)).merged()


def _calls(
    model: ModelConfig, n: int, stream: int, sequence: bool, ends: bool
) -> list[tuple[str, int, int, int]]:
    """Name in the books, numbers in all, how often, ranks in the ring."""
    L, s, h, g, d = model.letters("L s h g d")
    each, width = 2 * L + ends, rank_config(model, n).num_kv_heads * d
    shared = n > g  # the weights and biases of keys and of values
    found = [
        ("gradients", width * h, 2 * L * shared, max(n // g, 1)),
        ("gradients", width, 2 * L * shared * bool(model.bias), max(n // g, 1)),
    ]
    if not sequence:
        both = ("all_reduce forward", "all_reduce backward")
        return [*((name, stream, each, n) for name in both), *found]
    if s % n:
        raise ValueError(f"tp={n} does not divide seq_len={s}: choose another, or pad it")
    norm = 1 + (model.norm == "layernorm")  # its weight and bias
    return [
        ("all_gather forward", stream, each, n),
        ("reduce_scatter forward", stream, each, n),
        ("all_gather backward", stream, 2 * each, n),
        ("reduce_scatter backward", stream, each, n),
        ("gradients", h, norm * each + 2 * L * (model.bias is True), n),
        ("gradients", s * h, ends * (model.positions == "learned"), n),
        *found,
    ]


def _lines(
    name: str, numel: int, times: int, ring: int, itemsize: int, s: int, ranks: Iterable[int]
) -> Iterator[Line]:
    """The lines of so many equal calls."""
    whole = {"gradients": "all_reduce", "loss": "all_reduce"}
    op = "broadcast_tree" if name == "broadcast" else whole.get(name, name.split()[0]) + "_ring"
    width = max(4, itemsize) if name == "loss" else itemsize
    # What deals in rows is cut between tokens, the rest between elements.
    row = numel // s * width if "_scatter" in op or "_gather" in op else width
    for rank in ranks if times else ():
        at: dict[str, Any] = {
            "n": ring,
            "itemsize": row,
            "rank": rank % ring,
            "axis": "tp",
            "name": name,
        }
        for line in collectives.sent(op, nbytes=numel * width, **at).scaled(times):
            yield replace(line, rank=rank)


def kept_activations(
    model: ModelConfig,
    n: int,
    *,
    micro_batch: int,
    sequence: bool = False,
    how: anatomy.Policy = anatomy.Policy(),
) -> Ledger:
    """Bytes that autograd keeps on each of n ranks for the backward pass of a micro-batch, as
    `memory.activations` has them of the whole model: divided where there are heads, a feed-forward
    width or a vocabulary; else whole, or with `sequence` a share of the tokens.

    Source: Korthikanti et al. 2205.05198, section 4.2, equations 2 to 4.
    """
    require_dense(model)
    local = rank_config(model, n)
    sizes = anatomy.letters(local) | {"b": units.whole(micro_batch, "micro_batch", 1)}
    words = Line("tokens", micro_batch * model.seq_len, "activations", note="words of other ranks")
    lines = [words]
    for name, tensor in anatomy.kept(local, how):
        width = max(4, tensor.itemsize) if tensor.dims == "1" else tensor.itemsize  # a count
        nbytes = anatomy.size(tensor.dims, sizes) * width
        divided = set(tensor.dims) & set(anatomy.SPLITS["tp"]) or name in ("tokens", "outside")
        nbytes //= n if sequence and not divided else 1
        lines.append(Line(name, nbytes, component="activations", note=tensor.what))
    return Ledger(lines)


_SHORT = {
    "input, sbh": "norm",
    "queries": "q",
    "keys": "k",
    "values": "v",
    "output, sbh": "heads",
    "input of GELU, sbf": "GELU",
}


def layer_shares(model: ModelConfig, sequence: bool = False) -> list[tuple[str, float, str]]:
    """What a layer of the GPT-2 kind keeps, in the order of its forward pass: name, width in h, and
    along which of "s" and "h" tensor parallelism cuts it, if it does; of width 0, what travels."""
    enter, leave = ("gather", "scatter") if sequence else ("f", "g")
    travels = {"query": enter, "up": enter, "heads": leave, "down": leave}
    sizes, found = anatomy.letters(model), []
    for at, tensor in anatomy.kept(replace(model, num_layers=1), anatomy.Policy(attention="sdpa")):
        part = at.rpartition(".")[2]
        if not at.startswith("blocks") or not tensor.dims.startswith(("b s", " b s")):
            continue
        name, (_, _, *width) = _SHORT.get(tensor.what, part), tensor.dims.split()
        cut = "h" if set(width) & set(anatomy.SPLITS["tp"]) else "s" * sequence
        found.append((name, anatomy.size("".join(width), sizes) / model.d_model, cut))
        found += [(travels[name], 0.0, "")] if name in travels else []
    return found
