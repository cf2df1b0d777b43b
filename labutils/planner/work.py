"""The work of a training step, counted: what each place of a pipeline computes, moves and sends.

Everything is linear in what a device does per second, and holds for one plan as for a column of
plans: sizes are numbers or numpy arrays. A row of work is an array [9, plans] in the order of
`WORK`: FLOPs of large products and of attention, bytes of memory-bound work, kernels, and bytes
sent on each axis.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from labutils import anatomy, units
from labutils.anatomy import FP32_BYTES
from labutils.config import AXES, Mesh, ModelConfig, TrainConfig

WORK = ("products", "attention", "memory", "kernels", "tp", "cp", "ep", "pp", "dp")
LINKS = WORK[4:]
_ROW = {name: i for i, name in enumerate(WORK)}
PLANNED = ("one_f_one_b", "gpipe", "interleaved", "zb_h1")
GPIPE, INTERLEAVED, ZB_H1 = 1, 2, 3  # places in it
SAID = ("1f1b", "gpipe", "interleaved", "zb_h1")  # as people and files say it
RECOMPUTE = ("none", "selective", "full")
# Kernels of a layer, forward and backward, beside its collectives: of any layer, of experts, of
# multi-head latent attention. A collective costs as much as three.
KERNELS = {"layer": (12, 19), "experts": (20, 30), "latent": (10, 15), "ends": (6, 10)}
COLLECTIVE = 3
BF16_BYTES = anatomy.WIDTHS["bf16"]

Numbers = Any  # a number, or a column of them


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a mesh trains a model; also, with arrays for numbers, a column of plans.

    pp, dp, cp, tp, ep: degrees, as of a `Mesh`; with tp there is sequence parallelism, cp is
        Ulysses where there are heads enough and a ring elsewhere, and experts are whole
    micro_batch, micro_batches: sequences in each, and how many a rank takes in a step
    schedule, chunks: of the pipeline, a place in `PLANNED`, and its chunks per rank
    zero: the level of ZeRO over dp · cp
    recompute: a place in `RECOMPUTE`
    even: whether stages have equally many layers, instead of a share that counts the head
    modern: whether attention is one kernel, which skips what is masked, and chunks send while
        another computes; False: the s² scores are written out and sends are waited for, as in
        Megatron-LM of 2021 and 2022
    gradient_bytes: of a gradient that is added up and reduced
    """

    tp: Numbers = 1
    cp: Numbers = 1
    pp: Numbers = 1
    dp: Numbers = 1
    ep: Numbers = 1
    micro_batch: Numbers = 1
    micro_batches: Numbers = 1
    schedule: Numbers = 0
    chunks: Numbers = 1
    zero: Numbers = 1
    recompute: Numbers = 0
    even: Any = False
    modern: Any = True
    gradient_bytes: Numbers = 4

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            if isinstance(value, np.ndarray | bool):
                continue
            known = {"schedule": PLANNED, "recompute": RECOMPUTE}.get(name, ())
            if known and not (units.is_whole(value) and value in range(len(known))):
                places = ", ".join(f"{i} is {word!r}" for i, word in enumerate(known))
                raise ValueError(f"{name}={value!r:.60}: {places}; Plan.read takes the word")
            least = 1 if name in (*AXES, "micro_batch", "chunks") else 0
            object.__setattr__(self, name, units.whole(value, name, least))
            if name == "zero" and value > 3:
                raise ValueError(f"zero={value}: levels of ZeRO are 0 … 3")

    def named(self) -> dict[str, Any]:
        """One plan in the words of a file: schedule "1f1b", recompute "none", …; what a person
        chooses, and nothing of what runs of the past need."""
        said = {name: getattr(self, name) for name in CHOSEN}
        words = {"schedule": SAID[self.schedule], "recompute": RECOMPUTE[self.recompute]}
        return said | words

    @classmethod
    def read(cls, said: Mapping[str, Any] | str | Path) -> "Plan":
        """The plan of `named`, or of a file that `python -m labutils.planner --json` wrote, of
        whose rows it is the first.

        >>> Plan.read({"tp": 2, "pp": 4, "schedule": "1f1b", "recompute": "full"}).recompute
        2

        Raises ValueError: for a name, a schedule or a recomputation that there is not.
        """
        found: Any = said
        if isinstance(said, str | Path):
            found = json.loads(Path(said).read_text(encoding="utf-8"))
        found = found[0] if isinstance(found, list) and found else found
        if not isinstance(found, Mapping):
            raise ValueError(f"{said!r} holds no plan: write one with --json")
        found = dict(found.get("plan", found))
        if unknown := set(found) - set(CHOSEN):
            known = ", ".join(CHOSEN)
            raise ValueError(f"a plan has no {', '.join(sorted(unknown))}: it has {known}")
        for name, words in (("schedule", SAID), ("recompute", RECOMPUTE)):
            word = found.get(name, words[0])
            word = "1f1b" if word == "one_f_one_b" else word
            if word not in words:
                raise ValueError(f"{name}={word!r} is unknown: use {', '.join(words)}")
            found[name] = words.index(word)
        return cls(**{name: units.whole(value, name) for name, value in found.items()})

    @property
    def replicas(self) -> Numbers:
        """Ranks that hold the same weights: dp · cp."""
        return self.dp * self.cp

    @property
    def gpus(self) -> Numbers:
        """Ranks of the mesh."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def mesh(self) -> Mesh:
        """The mesh of one plan."""
        return Mesh(pp=self.pp, dp=self.dp, cp=self.cp, tp=self.tp, ep=self.ep)

    def train(self, model: ModelConfig) -> TrainConfig:
        """What `step.build` takes of one plan: bf16 with gradients in fp32.

        Raises ValueError: for several chunks of a schedule that has one.
        """
        name, batch = PLANNED[self.schedule], self.micro_batch * self.micro_batches * self.dp
        if self.chunks > 1 and name != "interleaved":
            said = f"chunks={self.chunks}, and {SAID[self.schedule]} has one chunk for each rank"
            raise ValueError(f"{said}: set schedule='interleaved', or chunks=1")
        cut = stage_layers(model, self.pp * self.chunks, self.even) if self.pp > 1 else None
        return TrainConfig(
            micro_batch=self.micro_batch,
            global_batch=batch,
            fp32_gradients=self.gradient_bytes == FP32_BYTES,
            attention="sdpa" if self.cp == 1 else "ulysses" if ulysses(model, self) else "ring",
            sequence=self.tp > 1,
            checkpointing=RECOMPUTE[self.recompute],
            schedule=name,
            chunks=self.chunks if name == "interleaved" else 2,
            layers=cut,
            zero=self.zero,
        )

    def column(self) -> "Plan":
        """The plan as columns of length one."""
        return Plan(**{f.name: np.atleast_1d(getattr(self, f.name)) for f in fields(self)})

    def __getitem__(self, i: Any) -> "Plan":
        """One plan of a column (a whole number), or some (anything else that picks)."""
        picked = {f.name: getattr(self, f.name)[i] for f in fields(self)}
        if np.ndim(picked["tp"]) == 0:
            picked = {name: value.item() for name, value in picked.items()}
        return Plan(**picked)


CHOSEN = (
    "pp", "dp", "cp", "tp", "ep", "micro_batch", "micro_batches", "schedule", "chunks", "zero",
    "recompute",
)  # fmt: skip
"""What of a plan a person chooses: the rest is of runs that were measured."""


# ── the model, as sums over its anatomy ───────────────────────────────────────────────────────────


class Layer(NamedTuple):
    """Weights of a layer of one kind: in matrices that tp divides, in others, in one expert with
    its biases, in biases that tp divides, in other biases and norms; and the widths between its two
    feed-forward products that tp divides, and of all the experts that a token visits."""

    split: int
    whole: int
    expert: int
    biases: int
    norms: int
    inner: int
    visited: int


class Shape(NamedTuple):
    """A model as the planner sees it: the letters, a layer without experts and one with them, and
    how many there are of each."""

    letters: dict[str, int]
    plain: Layer
    sparse: Layer
    num_plain: int
    num_sparse: int


@functools.lru_cache(maxsize=256)
def shape(model: ModelConfig) -> Shape:
    """The sums over the anatomy of `model` that work and memory hang on."""
    at, experts = anatomy.letters(model), model.num_experts > 1
    L, plain = model.num_layers, model.dense_layers if experts else model.num_layers
    f, visited, shared = model.d_ff, model.top_k * at.get("x", model.d_ff), 0
    if model.shared_expert:
        shared = at.get("z", f)
    words = ("dense.", "sparse.") if plain and experts else ("blocks.", "blocks.")
    return Shape(
        at | {"w": at.get("w", at["d"]), "gated": 1 + (model.ffn == "swiglu")},
        _layer(model, words[0])._replace(inner=f),
        _layer(model, words[1])._replace(inner=shared, visited=visited),
        plain,
        L - plain,
    )


def _layer(model: ModelConfig, word: str) -> Layer:
    at, found = anatomy.letters(model), dict.fromkeys(Layer._fields, 0)
    letters = {*anatomy.SPLITS["tp"], "z"}
    for part in anatomy.parts(model):
        if part.name.startswith(word) and part.weight:
            kind = "split" if set(part.weight) & letters else "whole"
            kind = "expert" if "experts" in part.name else kind if part.products else "norms"
            found[kind] += anatomy.size(part.weight, at)
            if kind != "expert":
                kind = "biases" if set(part.bias) & letters else "norms"
            found[kind] += anatomy.size(part.bias, at) if part.bias else 0
    return Layer(**found)


@functools.lru_cache(maxsize=4096)
def stage_layers(model: ModelConfig, n: int, even: bool = False) -> tuple[int, ...]:
    """Layers of each of n stages: equally many, or so that the longest is short, its head included;
    two stages more than layers have the embedding alone first and the head alone last.

    Invariant: the uneven cut is `pipeline.cut`, which needs torch.
    Raises ValueError: if they cannot be filled.
    """
    L = model.num_layers
    if even and L % n:
        raise ValueError(f"{n} stages do not divide num_layers={L}: choose another, or even=False")
    if n > L + 2:
        raise ValueError(f"{L} layers do not fill {n} stages: at most {L + 2}")
    if even or n == 1:
        return (L // n,) * n
    if n == L + 2:
        return (0, *[1] * L, 0)
    flops = anatomy.token_flops(model)
    head = flops["head"]
    layer = (sum(flops.values()) - head) // L

    def longest(last: int) -> tuple[int, int]:
        return max(-(-(L - last) // (n - 1)) * layer, last * layer + head), -last

    last = min(range(L - n + 2), key=longest)
    each, more = divmod(L - last, n - 1)
    return (*[each] * (n - 1 - more), *[each + 1] * more, last)


def ulysses(model: ModelConfig, p: Plan) -> Numbers:
    """Whether every rank of cp gets whole key–value heads."""
    return model.num_kv_heads % (p.tp * p.cp) == 0


# ── the work of one rank for one micro-batch ──────────────────────────────────────────────────────


def rank_tokens(model: ModelConfig, p: Plan) -> Numbers:
    """Tokens of a micro-batch that a rank of cp has."""
    return p.micro_batch * model.seq_len / p.cp


def where(so: Numbers, yes: Numbers, no: Numbers) -> Numbers:
    """`np.where`; of single numbers without its price, which would be most of a plan's."""
    return np.where(so, yes, no) if isinstance(so, np.ndarray) else yes if so else no


def most(one: Numbers, other: Numbers) -> Numbers:
    """`np.maximum`; of single numbers without its price."""
    return where(one > other, one, other)


def least(one: Numbers, other: Numbers) -> Numbers:
    """`np.minimum`; of single numbers without its price."""
    return where(one < other, one, other)


def some(so: Numbers) -> bool:
    """`np.any`; of a single truth without its price."""
    return bool(so.any()) if isinstance(so, np.ndarray) else so


def each_once(
    answer: Callable[..., Any], columns: Sequence[np.ndarray]
) -> tuple[list[Any], np.ndarray]:
    """What `answer` says of each row of columns of whole numbers, asked once for rows that are
    alike; and at which place of the list each row finds it."""
    sizes = [1 + int(np.max(column)) for column in columns]
    keys, where = np.unique(np.ravel_multi_index(tuple(columns), sizes), return_inverse=True)
    rows = zip(*np.unravel_index(keys, sizes), strict=True)
    return [answer(*map(int, row)) for row in rows], where


def zeros(*like: Numbers) -> np.ndarray:
    """No work, of as many plans as these sizes are of [9, …]."""
    columns = [size.shape for size in like if isinstance(size, np.ndarray)]
    return np.zeros((len(WORK), *(np.broadcast_shapes(*columns) if columns else ())))


def _row(p: Plan, **amounts: Numbers) -> np.ndarray:
    found = zeros(p.tp, *amounts.values())
    for name, amount in amounts.items():
        found[_ROW[name]] = amount
    return found


def layer(model: ModelConfig, p: Plan, experts: bool) -> tuple[np.ndarray, np.ndarray]:
    """Work of a layer's forward and of its backward pass for one micro-batch.

    Fused attention is causal: half of the s² products, computed 2.5 times backward. Under tp
    activations are gathered and scattered four times forward and six times backward around two
    halves; Ulysses sends queries, keys, values and outputs (a ring is in `sent_around`); experts
    get and give back k copies of a token. Bytes of memory-bound work are those of fused norms,
    RoPE, SwiGLU and additions.
    """
    known = shape(model)
    at, size = known.letters, known.sparse if experts else known.plain
    T, t, c, e = rank_tokens(model, p), p.tp, p.cp, p.ep
    h, a, d, w, k = (at[letter] for letter in "hadwk")
    g, latent = at["g"], at.get("q", 0) + at.get("c", 0)
    visits = T / t * k if experts else 0  # what a rank's own tokens add up to
    F = 2 * T * (size.split / t + size.whole) + 2 * visits * size.expert
    scores = p.micro_batch * model.seq_len**2 * a / (t * c)
    A, written = (2 - p.modern) * scores * (d + w), (1 - p.modern) * scores
    inner = T / t * (size.inner + size.visited)
    streams, turned = T * h / t, 4 * T * (a + g) * d / t + 4 * T * latent
    moved = 16 * visits * h  # to the experts' order and back, read and written
    around = 2 * T * h * (t - 1) / t  # one gather or scatter under tp
    halves = 2 if not experts or size.inner else 1
    exchanged = 2 * T * (2 * a + 2 * g) * d / t * (c - 1) / c
    routed = 2 * 2 * visits * h * (e - 1) / e
    found, whole_heads = [], ulysses(model, p)
    for i, (times, core, base) in enumerate(((1, 1, 20), (2, 2 + p.modern / 2, 24))):
        calls = halves * (2 + i) * (t > 1) + 2 * (whole_heads & (c > 1)) + experts * 2 * (e > 1)
        calls = calls + where(whole_heads, 0, 2 * (c - 1))  # a message and a part of attention
        kernels = KERNELS["layer"][i] + COLLECTIVE * calls + (latent > 0) * KERNELS["latent"][i]
        if experts:  # each expert has products of its own
            kernels = kernels + KERNELS["experts"][i] + 2 * times * at["E"] / e
        found.append(
            _row(
                p,
                products=times * F,
                attention=core * A,
                memory=base * streams + turned + (6 + 4 * i) * inner + moved + 12 * written,
                kernels=kernels,
                tp=halves * (2 + i) * around,
                cp=where(whole_heads, exchanged, 0),
                ep=routed * experts,
            )
        )
    return found[0], found[1]


def last_product(model: ModelConfig, p: Plan) -> np.ndarray:
    """Work of the product that ends a dense layer, and of what tp sends behind it."""
    T, t, h = rank_tokens(model, p), p.tp, model.d_model
    return _row(p, products=2 * T * h * model.d_ff / t, tp=2 * T * h * (t - 1) / t)


def embedding(model: ModelConfig, p: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Work of the embedding, forward and backward."""
    streams, around = rank_tokens(model, p) * model.d_model / p.tp, p.tp > 1
    sent = 2 * streams * (p.tp - 1)
    kernels = 2 + COLLECTIVE * around
    return (
        _row(p, memory=4 * streams, kernels=kernels, tp=sent),
        _row(p, memory=8 * streams, kernels=kernels, tp=sent),
    )


def head(model: ModelConfig, p: Plan) -> tuple[np.ndarray, np.ndarray]:
    """Work of the last norm, the head and the fused cross-entropy, forward and backward."""
    T, t, h = rank_tokens(model, p), p.tp, model.d_model
    scores, around = T * model.vocab_size / t, 2 * T * h * (t - 1) / t
    found = []
    for i in (1, 2):
        memory = 4 * i * scores + (4 + 4 * i) * T * h / t
        kernels = 4 * i + COLLECTIVE * i * (t > 1)
        found.append(
            _row(p, products=2 * i * scores * h, memory=memory, kernels=kernels, tp=i * around)
        )
    return found[0], found[1]


def message(model: ModelConfig, p: Plan) -> np.ndarray:
    """Work of sending a micro-batch's activations, or their gradient, to the next stage."""
    apart = p.pp > 1
    sent = BF16_BYTES * rank_tokens(model, p) * model.d_model / p.tp * apart
    return _row(p, kernels=COLLECTIVE * apart, pp=sent)


def update(
    model: ModelConfig, p: Plan, dense: Numbers, expert: Numbers, far: Numbers = 1
) -> np.ndarray:
    """Work of a step that is no micro-batch's: gradients reduced, Adam, weights gathered. Levels 2
    and 3 of ZeRO reduce in every backward pass, and level 3 gathers before every pass: that is in
    `sent_beside`.

    dense, expert: weights of the rank outside of experts, and in them, which ranks of tp have alike
    far: how many times longer a byte of experts takes, whose ranks lie further apart
    """
    memory, kernels, sent = 0.0, 0.0, 0.0
    back = where(p.zero == 0, p.gradient_bytes, BF16_BYTES * (p.zero < 3))
    each = p.gradient_bytes * (p.zero < 2) + back
    sides = [(dense, p.replicas, 1), (expert, p.replicas * p.tp / p.ep, far)]
    for weights, ranks, longer in sides[: 1 + (model.num_experts > 1)]:
        memory = memory + weights * (34 / where(p.zero > 0, ranks, 1) + 12)
        kernels = kernels + (weights > 0) * (10 + 2 * COLLECTIVE * (ranks > 1))
        sent = sent + longer * each * weights * (ranks - 1) / ranks
    return _row(p, memory=memory, kernels=kernels, dp=sent)


def sent_beside(model: ModelConfig, p: Plan, weights: Numbers, messages: Numbers) -> np.ndarray:
    """What is sent while a micro-batch is computed, of a rank with so many weights: by levels 2 and
    3 of ZeRO, and so many `messages` between chunks. A ring's bytes are in `sent_around`."""
    share, gathers = (p.replicas - 1) / p.replicas, 2 * BF16_BYTES * (p.zero == 3)
    sent = (p.gradient_bytes * (p.zero >= 2) + gathers) * weights * share
    return _row(p, dp=sent) + messages * message(model, p)


def sent_around(model: ModelConfig, p: Plan, stack: str = "megatron") -> tuple[Numbers, Numbers]:
    """Bytes that a layer's attention sends round a ring for one micro-batch, forward and backward:
    keys and values, again where attention is computed again; then the sums of their gradients,
    which the course's code has in fp32."""
    known, T = shape(model).letters, rank_tokens(model, p)
    pairs = BF16_BYTES * 2 * T * known["g"] * known["d"] / p.tp * (p.cp - 1)
    pairs = pairs * (1 - ulysses(model, p))
    return pairs, pairs * (2 + (stack == "course") + (p.recompute > 0))


def weights(model: ModelConfig, p: Plan, plain: Numbers, sparse: Numbers) -> tuple:
    """Weights of a rank outside of experts, and in them, embedding and head aside.

    plain, sparse: its layers without experts, and with them
    """
    known, t = shape(model), p.tp
    one, other = (
        (size.split + size.biases) / t + (size.whole + size.norms)
        for size in (known.plain, known.sparse)
    )
    expert = known.sparse.expert * known.letters["E"] * known.num_sparse // max(known.num_sparse, 1)
    return plain * one + sparse * other, sparse * (expert / p.ep)
