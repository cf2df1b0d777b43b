"""What every stage of a pipeline holds at its fullest moment, each byte under a name, in one of two
stacks that are never mixed: the course's own code, and Megatron-LM with Transformer Engine.

Only ranks that can be the fullest are asked: of those with the same layers the first, and the last.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from labutils import anatomy, units
from labutils.anatomy import FP32_BYTES, INDEX
from labutils.config import ModelConfig
from labutils.ledger import Ledger, Line
from labutils.planner import work
from labutils.planner.work import BF16_BYTES, GPIPE, INTERLEAVED, RECOMPUTE, Numbers, Plan

STACKS = ("course", "megatron")
# Fitted to the measured runs: workspaces and what else has no name, and the bytes for each weight
# of a rank's experts that the measured mixtures of experts hold and nothing explains.
WORKSPACES = 0.1 * units.GIB
UNEXPLAINED = 0.177


@dataclass(frozen=True)
class Place:
    """Full moments of ranks of pipelines [moments, plans]: which rank; its layers without and with
    experts, and whether (1 or 0) it has the embedding and the head; of how many micro-batches it
    then keeps each of these, summed over its layers; and the layers, again of both kinds, of first
    chunks of the ranks before it, of its last chunk, and of last chunks of those behind it."""

    rank: Numbers
    plain: Numbers
    sparse: Numbers
    first: Numbers
    last: Numbers
    kept_plain: Numbers
    kept_sparse: Numbers
    kept_first: Numbers
    kept_last: Numbers
    before_plain: Numbers
    before_sparse: Numbers
    own_plain: Numbers
    own_sparse: Numbers
    behind_plain: Numbers
    behind_sparse: Numbers

    def of_rank(self, which: Numbers) -> "Place":
        """That of one moment of each plan."""
        rows = vars(self).values()
        if not which.shape:
            return Place(*(row.item(which) for row in rows))
        return Place(*(row[which, np.arange(which.size)] for row in rows))


@functools.lru_cache(maxsize=1024)
def rank_layers(model: ModelConfig, pp: int, chunks: int, even: bool) -> np.ndarray:
    """Layers without and with experts of each chunk of each rank of a pipeline [pp, chunks, 2];
    `even`, each chunk has as many, whatever embedding and head take."""
    layers = np.array(work.stage_layers(model, pp * chunks, even))
    begin = np.cumsum(layers) - layers
    plain = np.clip(work.shape(model).num_plain - begin, 0, layers)
    return np.stack([plain, layers - plain], axis=1).reshape(chunks, pp, 2).swapaxes(0, 1)


def in_flight(p: Plan, rank: int) -> np.ndarray:
    """Micro-batches of which a rank of one plan holds activations, of each of its chunks, at the
    moments that can be its fullest [moments, chunks]; of an interleaved schedule those after each
    forward pass of a round.

    Source: as the operations of `schedule` count, with which a test compares it.
    """
    pp, m, v, after = p.pp, p.micro_batches, p.chunks, p.pp - 1 - rank
    if p.schedule != INTERLEAVED:
        return np.full((1, v), (min(after + 1, m), m, 0, min(pp, m))[p.schedule])
    ahead, chunk = min(2 * after + (v - 1) * pp + 1, v * m), np.arange(v)
    done = np.arange(min(v * pp, v * m - ahead) + 1)[:, None]

    def passed(n: np.ndarray, order: np.ndarray) -> np.ndarray:
        """How many of the first n passes are of each chunk: in rounds of pp after one another."""
        return n // (v * pp) * pp + np.clip(n % (v * pp) - order * pp, 0, pp)

    return passed(done + ahead, chunk) - passed(done, v - 1 - chunk)


def _fullest(model: ModelConfig, p: Plan, rank: int) -> list[tuple[int, ...]]:
    """The rows of a `Place` of a rank of one plan: its moments that no other exceeds in all."""
    every, held = rank_layers(model, p.pp, p.chunks, p.even), in_flight(p, rank)
    layers, first, last = every[rank], 1 * (rank == 0), 1 * (rank + 1 == p.pp)
    ends = held[:, :1] * first, held[:, -1:] * last
    rows = set(map(tuple, np.concatenate([held @ layers, *ends], axis=1).tolist()))
    most = [a for a in rows if not any(_covers(b, a) for b in rows if b != a)]
    before, behind = every[:rank, 0].sum(axis=0), every[rank + 1 :, -1].sum(axis=0)
    others = [*before.tolist(), *layers[-1].tolist(), *behind.tolist()]
    mine = rank, *layers.sum(axis=0).tolist(), first, last
    return [(*mine, *row, *others) for row in sorted(most)]


def _covers(row: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(a >= b for a, b in zip(row, other, strict=True))


def of_ranks(model: ModelConfig, plan: Plan, ranks: Iterable[int]) -> Place:
    """The full moments of some ranks of one plan [moments]."""
    return Place(*np.array([row for rank in ranks for row in _fullest(model, plan, rank)]).T)


@functools.lru_cache(maxsize=4096)
def _moments(
    model: ModelConfig, pp: int, chunks: int, even: bool, schedule: int, micro_batches: int
) -> list[tuple[int, ...]]:
    """The rows of a `Place`, of the ranks that can be the fullest or the slowest: the first of each
    pattern of layers, which holds more than those behind it, the second, which sends more than the
    first, and the last two, of which one may wait less than the like of it before."""
    sizes = dict(pp=pp, chunks=chunks, micro_batches=micro_batches)
    p = Plan(**sizes, even=even, schedule=schedule)
    first: dict[Any, int] = {}
    for rank, layers in enumerate(rank_layers(model, pp, chunks, even)):
        first.setdefault(layers.tobytes(), rank)
    ranks = sorted({*first.values(), min(1, pp - 1), max(pp - 2, 0), pp - 1})
    return [row for rank in ranks for row in _fullest(model, p, rank)]


def places(model: ModelConfig, p: Plan) -> Place:
    """The full moments of the ranks that can be the fullest, and the slowest, of a plan or of a
    column of plans [moments, plans]."""
    # More than 3 · pp micro-batches only change what GPipe holds.
    m = work.where(p.schedule == GPIPE, p.micro_batches, work.least(p.micro_batches, 3 * p.pp))
    columns = (p.pp, p.chunks, p.even, p.schedule, m)
    if not isinstance(m, np.ndarray):
        return Place(*np.array(_moments(model, *columns)).T)
    found, where = work.each_once(functools.partial(_moments, model), columns)
    most = max(map(len, found))
    rows = np.array([each + each[:1] * (most - len(each)) for each in found])
    return Place(*rows.T[:, :, where])


def held_weights(model: ModelConfig, p: Plan, at: Place) -> tuple[Numbers, Numbers]:
    """Weights of a rank: outside of experts, and in them."""
    dense, expert = work.weights(model, p, at.plain, at.sparse)
    h, table = model.d_model, model.vocab_size * model.d_model / p.tp
    shared = at.first * at.last * model.tied
    norm = h * (1 + (model.norm == "layernorm"))
    learned = at.first * model.seq_len * h * (model.positions == "learned")
    ends = table * (at.first + at.last - shared) + norm * at.last + learned
    return dense + ends, expert


def stage_states(model: ModelConfig, p: Plan, at: Place, copies: Numbers = 1) -> dict[str, Numbers]:
    """Bytes of weights in bf16, gradients in fp32, and Adam's moments with a master copy in fp32,
    each cut as the level of ZeRO says; experts over dp · cp / ep, times `copies`. Of the ranks
    `at` their places."""
    alike = p.replicas, p.replicas / p.ep * copies
    dense, expert = held_weights(model, p, at)
    found = {}
    sizes = {"weights": BF16_BYTES, "gradients": p.gradient_bytes, "optimizer": 3 * FP32_BYTES}
    for level, (name, each) in zip((3, 2, 1), sizes.items(), strict=True):
        shares = (work.where(p.zero >= level, ranks, 1) for ranks in alike)
        found[name] = each * (dense / next(shares) + expert / next(shares))
    return found


# ── Megatron-LM with Transformer Engine ───────────────────────────────────────────────────────────


def held_by_megatron(model: ModelConfig, p: Plan, at: Place) -> dict[str, Numbers]:
    """Bytes of a rank at its fullest moment, by name, for bf16 with fused kernels.

    The last rank is fullest in the head's backward pass, any other in the last layer's, as its
    activation function is computed backward.

    Source: the names were found from the residuals of data/measured_b200.csv (dense within 0.1 %,
    with experts within 1.2 %); levels 0, 2 and 3 of ZeRO and recomputation follow the same rules
    and were not among the runs.
    """
    known, found = work.shape(model), stage_states(model, p, at, copies=p.tp)
    full, T = 1 * (p.recompute == 2), work.rank_tokens(model, p)
    once = 0
    for experts, count in ((False, at.kept_plain), (True, at.kept_sparse)):
        if known.num_sparse if experts else known.num_plain:
            lines = kept_by_megatron(model, p, experts)
            times = count * (1 - full)
            for name, nbytes in lines.items():
                found[name] = found.get(name, 0) + nbytes * times
            once = work.most(once, sum(lines.values()))
    inputs = BF16_BYTES * T * model.d_model / p.tp * (at.kept_plain + at.kept_sparse)
    found["inputs of layers"] = inputs * full
    found["the layer computed again"] = once * full
    found["backward"] = np.where(at.last, _head_backward(model, p), _layer_backward(model, p, at))
    found["dummy weight gradients"] = _dummies(model, p, at)
    if work.some(p.zero >= 2):
        found["gathered layers"] = _gathered(model, p)
    if known.num_sparse:
        expert = work.weights(model, p, at.plain, at.sparse)[1]
        found["experts, not explained"] = UNEXPLAINED * expert
    return found | {"workspaces": WORKSPACES}


def kept_by_megatron(model: ModelConfig, p: Plan, experts: bool) -> dict[str, Numbers]:
    """Bytes that a layer keeps of one micro-batch for its backward pass, by name."""
    known = work.shape(model)
    at, size = known.letters, known.sparse if experts else known.plain
    T, t = work.rank_tokens(model, p), p.tp
    h, a, g, d, w, k = (at[letter] for letter in "hagdwk")
    latent, turned = at.get("q", 0) + at.get("c", 0), at.get("r", 0)
    wide = a * (2 * d + w) if latent else (a + 2 * g) * d
    # Transformer Engine keeps the output of Ulysses' attention before and behind the exchange.
    outputs = work.where((p.cp > 1) & work.ulysses(model, p) & (latent == 0), 2, 1)
    found = {
        "norms": 4 * BF16_BYTES * T * h / t,
        "queries, keys, values": BF16_BYTES * T * wide / t,
        "attention": T * a / t * (BF16_BYTES * w * outputs + FP32_BYTES * (p.recompute != 1)),
    }
    if latent:
        found["latent vectors"] = BF16_BYTES * T * (2 * latent + turned)
    if size.inner:
        found["feed-forward"] = BF16_BYTES * T / t * size.inner * (1 + at["gated"])
    if experts:
        found["inputs of experts"] = BF16_BYTES * T / t * k * h
        found["experts"] = BF16_BYTES * T / t * size.visited * (1 + at["gated"])
    return found


def _head_backward(model: ModelConfig, p: Plan) -> Numbers:
    """The last norm's input and output, what tp gathers of it, the scores in bf16 with their
    gradient in place, and the gradient of the gathered input, and its own share."""
    T, t, h = work.rank_tokens(model, p), p.tp, model.d_model
    streams, gathered = T * h / t, T * h * (t > 1)
    scores = T * model.vocab_size / t
    return BF16_BYTES * (2 * streams + gathered + scores + T * h + streams * (t > 1))


def _layer_backward(model: ModelConfig, p: Plan, at: Place) -> Numbers:
    """The gradient of what the activation function reads, in the last layer of a rank; behind
    experts also its output's, and the gradients of their outputs before and behind an exchange."""
    known, T, t = work.shape(model), work.rank_tokens(model, p), p.tp
    gated, h, k = (known.letters[letter] for letter in ("gated", "h", "k"))
    plain = known.plain.inner * gated
    sparse = known.sparse.visited * (1 + gated) + 2 * k * h
    return BF16_BYTES * T / t * np.where(at.sparse > 0, sparse, plain)


def _dummies(model: ModelConfig, p: Plan, at: Place) -> Numbers:
    """Transformer Engine keeps a gradient of each shape of a weight that it never writes, in bf16,
    since the true one is added into fp32."""
    known, t = work.shape(model), p.tp
    at_, h, f = known.letters, model.d_model, model.d_ff
    a, g, d, w, gated = (at_[letter] for letter in ("a", "g", "d", "w", "gated"))
    if model.kv_rank:
        q, c, r, n = (at_[letter] for letter in "qcrn")
        from_latent = q * h + a * d * q / t if q else a * d * h / t
        attention = from_latent + (c + r) * h + a * (n + w) * c / t + a * w * h / t
    else:
        attention = (a + 2 * g) * d * h / t + a * d * h / t
    found = attention + (1 + gated) * h * f / t * (at.plain > 0)  # [ranks, plans]
    if model.num_experts > 1:
        shared = (1 + gated) * h * known.sparse.inner / t
        found = found + (shared + known.sparse.expert) * (at.sparse > 0)
    return BF16_BYTES * (found + model.vocab_size * h / t * at.last)


def _gathered(model: ModelConfig, p: Plan) -> Numbers:
    """Level 3: two whole layers at a time; from level 2 a whole layer's gradient."""
    n = np.maximum(*(sum(work.weights(model, p, *one)) for one in ((1, 0), (0, 1))))
    return 2 * BF16_BYTES * n * (p.zero >= 3) + p.gradient_bytes * n * (p.zero >= 2)


# ── the course's own code ─────────────────────────────────────────────────────────────────────────


def held_by_course(model: ModelConfig, p: Plan, at: Place) -> dict[str, Numbers]:
    """States and kept activations of a rank in the course's code, by name. What lives for a moment
    has no closed form: a dry run finds it. A layer that is computed again is counted as if it kept
    all of its own, which is a bound.

    Invariant: `predict.states` and `predict.activations`, where those are formulas.

    Raises ValueError: for a model that the course's GPT does not run.
    """
    found, kept = stage_states(model, p, at), kept_by_course(model, p)
    full, master = p.recompute == 2, p.zero == 3
    # Level 0 adds gradients in bf16 up in fp32; the shards of level 3 are the master copy.
    both = (p.zero == 0) & (p.gradient_bytes == FP32_BYTES)
    found["gradients"] = found["gradients"] + BF16_BYTES * sum(held_weights(model, p, at)) * both
    found["weights"] = found["weights"] * (1 + master)
    found["optimizer"] = found["optimizer"] - found["weights"] * master
    if model.positions == "rope":
        rows = BF16_BYTES * model.seq_len / p.cp * model.d_head
        apart = (p.cp > 1) & (p.zero < 3) & (at.plain + at.sparse > 0)
        found["rows of RoPE's tables, once"] = rows * apart
    if work.some(full):
        once = _kept(model, p, "none")["layers"]
        found["computed again, at most"] = np.maximum(once - kept["head"] * at.last, 0) * full
    counts = at.kept_plain + at.kept_sparse, at.kept_first, at.kept_last
    for name, count in zip(("layers", "embedding", "head"), counts, strict=True):
        found[f"kept by {name}"] = kept[name] * count
    return found


def kept_by_course(model: ModelConfig, p: Plan) -> dict[str, Numbers]:
    """Bytes that one layer, the embedding and the head keep of a micro-batch.

    Invariant: those of `anatomy.kept` on a rank of tp with sequence parallelism and of cp.
    """
    if not isinstance(p.recompute, np.ndarray):
        return _kept(model, p, RECOMPUTE[p.recompute])
    found: dict[str, Any] = {}
    for level in np.unique(p.recompute):
        chosen = p.recompute == level
        for part, nbytes in _kept(model, p, RECOMPUTE[level]).items():
            found[part] = found.get(part, 0) + nbytes * chosen
    return found


@functools.lru_cache(maxsize=64)
def _of_token(model: ModelConfig, again: str) -> dict[str, int]:
    """Bytes that one layer and the head keep of each token, of which a rank of tp has its share."""
    how, found = anatomy.Policy(BF16_BYTES, BF16_BYTES, "sdpa", again), {"layers": 0, "head": 0}
    sizes = anatomy.letters(model) | {"b": 1, "s": 1}
    for name, tensor in anatomy.kept(replace(model, num_layers=1), how):
        # The batch is there anyway, and the number of targets is one.
        if tensor.name not in ("count", "tokens", "targets"):
            part = "layers" if name.startswith("blocks.") else "head"
            found[part] += anatomy.size(tensor.dims, sizes) * tensor.itemsize
    return found


def _kept(model: ModelConfig, p: Plan, again: str) -> dict[str, Numbers]:
    each, s, many = _of_token(model, again), model.seq_len / p.cp, p.tp > 1
    found = {part: p.micro_batch * s * nbytes / p.tp for part, nbytes in each.items()}
    # Under tp words of other ranks are masked; under cp learned positions are picked out; level 3
    # casts RoPE's tables for q and for k; the head counts the targets, in int64 and as a divisor.
    if model.positions == "rope" and again != "full":
        found["layers"] = found["layers"] + 2 * BF16_BYTES * s * model.d_head * (p.zero == 3)
    found["head"] = found["head"] + INDEX + work.where(many, FP32_BYTES, BF16_BYTES)
    learned = INDEX * s * (model.positions == "learned") * (p.cp > 1)
    found["embedding"] = p.micro_batch * s * (INDEX + 1) * many + learned
    return found


# ── what a person reads ───────────────────────────────────────────────────────────────────────────


def bytes_of(model: ModelConfig, p: Plan, stack: str, at: Place) -> np.ndarray:
    """Bytes of these ranks at their fullest [ranks, plans], as a stack holds them."""
    return sum(
        {"course": held_by_course, "megatron": held_by_megatron}[stack](model, p, at).values()
    )


def ledger(model: ModelConfig, plan: Plan, rank: int = 0, stack: str = "megatron") -> Ledger:
    """What a rank of a plan's pipeline holds at its fullest moment: a line in bytes for each name.

    Raises ValueError: for a stack that there is not, or a rank.
    """
    units.instance(model, ModelConfig, "ledger")
    units.instance(plan, Plan, "ledger")
    if stack not in STACKS:
        raise ValueError(f"stack={stack!r} is unknown: use {' or '.join(map(repr, STACKS))}")
    if (rank := units.whole(rank, "rank")) >= plan.pp:
        raise ValueError(f"rank={rank} is none of pp={plan.pp}: use 0 … {plan.pp - 1}")
    at = of_ranks(model, plan, [rank])
    found = {"course": held_by_course, "megatron": held_by_megatron}[stack](model, plan, at)
    found = {name: np.broadcast_to(n, at.rank.shape) for name, n in found.items()}
    fullest = sum(found.values()).argmax()
    rows = {name: round(n[fullest].item()) for name, n in found.items()}
    group = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer"}
    for name in ("backward", "dummy weight gradients", "gathered layers", "workspaces"):
        group[name] = "buffers"
    return Ledger(
        [Line(name, n, group.get(name, "activations"), rank=rank) for name, n in rows.items() if n]
    )
