"""The model as one table: each part of `model.GPT`, the dims of its weights in letters, what it
multiplies, and the tensors it keeps for the backward pass.

A dim is a product of letters of the notation ("ad" is a·d), a shape is dims in PyTorch's order,
output first ("ad h"). Parameter counts, FLOPs, saved activations, ZeRO's units, LoRA's targets and
the shares of tensor parallelism are sums over the table.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labutils.units import Reason, instance, writable

Model = Any  # a config.ModelConfig; config counts its parameters here, so it cannot be imported

LETTERS = {  # of the notation, and the fields of a `config.ModelConfig`
    "s": "seq_len",
    "h": "d_model",
    "a": "num_heads",
    "g": "num_kv_heads",
    "d": "d_head",
    "f": "d_ff",
    "L": "num_layers",
    "v": "vocab_size",
    "E": "num_experts",
    "k": "top_k",
}
LATENT = {"q": "q_rank", "c": "kv_rank", "r": "d_rope", "w": "d_value"}
"""Further letters of models with multi-head latent attention; n = d − r."""
OWN_EXPERTS = {"x": "d_expert", "z": "d_shared", "D": "dense_layers"}
"""Further letters of models whose experts have widths of their own or stand behind dense layers;
M = L − D."""
SPLITS = {"tp": "agfv", "ep": "E", "pp": "L"}
"""The letters that an axis divides: tp those of a tensor, ep and pp those of a part's copies."""

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number, by the precision of a `config.TrainConfig`."""
FP32_BYTES = WIDTHS["fp32"]  # bytes of a number that is always fp32
INDEX = 8  # bytes of an int64


@dataclass(frozen=True)
class Policy:
    """What decides which tensors are kept, and how wide they are.

    compute: bytes of a number in and between the matrix products.
    stream: bytes of a number of the residual stream, which autocast leaves in fp32.
    attention: "plain", "sdpa" or "ulysses", as in `config.TrainConfig`.
    checkpointing: "none", "selective" or "full".
    """

    compute: int = FP32_BYTES
    stream: int = FP32_BYTES
    attention: str = "plain"
    checkpointing: str = "none"

    @property
    def autocast(self) -> bool:
        """Whether each matrix product casts what it reads."""
        return self.compute != self.stream


@dataclass(frozen=True)
class Kept:
    """A tensor that autograd keeps: its name, shape in letters, bytes of an element, and what it is
    for a reader."""

    name: str
    dims: str
    itemsize: int
    what: str

    @property
    def note(self) -> Reason:
        """What it is, as the note of a line, whose name can be asked for."""
        return Reason(self.name, self.what)


@dataclass(frozen=True)
class Part:
    """One row of the table.

    name: its module in `model.GPT`, with * for the number of a layer or an expert; dense.* and
        sparse.* are layers of a model that has both kinds.
    weight: the shape of its weight, empty for a part that has none.
    bias: the shape of its bias, likewise.
    products: multiplications in its matrix products, for one token.
    keeps: the tensors that it keeps for the backward pass.
    """

    name: str
    weight: str = ""
    bias: str = ""
    products: str = ""
    keeps: tuple[Kept, ...] = ()

    @property
    def copies(self) -> str:
        """How many there are: one, L, or L·E; a token meets k of the E."""
        layers = next((n for word, n in LAYERS.items() if f"{word}.*" in self.name), "")
        return layers + "E" * ("experts.*" in self.name)

    @property
    def group(self) -> str:
        """The line of `parameters` that it is counted in."""
        return next(GROUPS[word] for word in reversed(GROUPS) if word in self.name)

    @property
    def lora(self) -> bool:
        """Whether LoRA may adapt it: a linear layer of a block, the router aside."""
        return bool(self.weight and self.products and self.copies) and self.group != "router"


GROUPS = {
    "tokens": "token embedding",
    "positions": "position embedding",
    "attention": "attention",
    "feed_forward": "feed-forward",
    "router": "router",
    "norm": "norms",
    "head": "head",
}
"""The lines of `parameters`, by a word in a part's name; of two such words the later one counts."""

LAYERS = {"blocks": "L", "dense": "D", "sparse": "M"}
"""What counts the layers of each kind."""

# ── the table ─────────────────────────────────────────────────────────────────────────────────────


def parts(model: Model, how: Policy = Policy()) -> tuple[Part, ...]:
    """The table of a model, in the order of its forward pass, which is that of its parameters.

    Raises TypeError for what is no `ModelConfig`.
    """
    if not hasattr(model, "dense_layers"):
        told = f"{model!r:.60} ({type(model).__name__}): ModelConfig.named(…) is one"
        raise TypeError(f"parts takes a ModelConfig, got {told}")
    instance(how, Policy, "parts")
    return _parts(model, how)


@functools.lru_cache(maxsize=1024)
def _parts(model: Model, how: Policy) -> tuple[Part, ...]:
    block = tuple(_block(model, how))
    if model.dense_layers:
        alone = tuple(_block(model, how, experts=False))
        rows = (replace(p, name=p.name.replace("blocks", "dense")) for p in alone)
        block = (*rows, *(replace(p, name=p.name.replace("blocks", "sparse")) for p in block))
    if how.checkpointing == "full":
        whole = Kept("residual", "b s h", how.stream, "input of the checkpointed block, sbh")
        block = (Part("blocks.*", keeps=(whole,)), *(replace(part, keeps=()) for part in block))
    head = _linear("head", "v h", how)
    loss = (
        Kept("log-probabilities", "b s v", how.stream, "log-probabilities, sbv"),
        Kept("targets", "b s", INDEX, "targets, sb"),
        Kept("count", "1", how.stream, "number of targets"),
    )
    return (
        Part("tokens", "v h", keeps=(Kept("tokens", "b s", INDEX, "token numbers, sb"),)),
        *([Part("positions", "s h")] if model.positions == "learned" else []),
        Part("dropout", keeps=_mask(model, "b s h", how.stream)),
        *block,
        _norm("norm", model, how),
        replace(head, weight="") if model.tied else head,
        Part("outside", keeps=loss),
    )


def _block(model: Model, how: Policy, experts: bool = True) -> Iterator[Part]:
    yield _norm("blocks.*.attention_norm", model, how)
    kind = _latent_attention if model.kv_rank else _attention
    yield from kind("blocks.*.attention", model, how)
    yield Part("blocks.*.dropout", keeps=_mask(model, "b s h", how.compute))
    yield _norm("blocks.*.feed_forward_norm", model, how)
    if model.num_experts == 1 or not experts:
        yield from _feed_forward("blocks.*.feed_forward", model, how)
        yield Part("blocks.*.dropout", keeps=_mask(model, "b s h", how.compute))
    else:  # experts add their outputs up in the dtype of the stream
        yield from _experts("blocks.*.feed_forward", model, how)
        yield Part("blocks.*.dropout", keeps=_mask(model, "b s h", how.stream))


def _attention(at: str, model: Model, how: Policy) -> Iterator[Part]:
    bias, shared = bool(model.bias), not how.autocast  # autocast makes a half copy for each product
    yield _linear(f"{at}.query", "ad h", how, bias=bias)
    yield _linear(f"{at}.key", "gd h", how, bias=bias, shared=shared)
    yield _linear(f"{at}.value", "gd h", how, bias=bias, shared=shared)
    rope = model.positions == "rope"
    if rope and how.autocast:  # one table serves all layers, and goes by its name in the first
        what = "half copies of cos and sin, for q and for k"
        tables = Kept("tables", "2 s d", how.compute, what)
        yield Part("blocks.0.attention.rotary", keeps=(tables,))
    plain, fused = how.attention == "plain", how.attention != "plain" and not model.dropout
    again = how.checkpointing == "selective"  # what is computed again keeps its inputs alone
    # PyTorch's fused CPU kernel has no dropout: it falls back on plain attention in fp32, keys and
    # values repeated for every head.
    width, heads = (how.compute, "g") if plain or fused or again else (FP32_BYTES, "a")
    keeps = [Kept("queries", "b s a d", width, "queries")]
    keeps += [Kept(name, f"b s {heads} d", width, name) for name in ("keys", "values")]
    if fused and not again:
        rows = "log-sum-exp of each row of scores, asb"
        keeps.append(Kept("output", "b s a d", how.compute, "output, sbh"))
        keeps.append(Kept("log-sum-exp", "b a s", FP32_BYTES, rows))
    elif not again:
        keeps.append(Kept("weights", "b a s s", width, "softmax of the scores, as²b"))
        keeps += _mask(model, "b a s s", width, "dropout mask, as²b")
        if model.dropout:
            keeps.append(Kept("dropped", "b a s s", width, "softmax after dropout, as²b"))
    yield Part(at, products="2 s a d", keeps=tuple(keeps))  # q·kᵀ and softmax·v
    # The fused kernel lays its output out like its queries: as one row for each token, ready for
    # the next product, unless RoPE made them anew, heads outermost; with one head or one token the
    # two layouts are the same. That of Ulysses goes to other ranks first.
    ready = fused and not again and how.attention == "sdpa"
    ready = ready and (not rope or 1 in (model.seq_len, model.num_heads))
    whole = model.bias is True
    yield _linear(f"{at}.output", "h ad", how, bias=whole, reads="b s a d", shared=ready)


def _latent_attention(at: str, model: Model, how: Policy) -> Iterator[Part]:
    """What multi-head latent attention has, for counting: no code of the course keeps anything.

    A released checkpoint stacks `key_value` on `rotary_key`, and each head's `key` on its `value`.
    Source: DeepSeek-V2 2405.04434, section 2.1 and appendix C.
    """

    def linear(name: str, weight: str) -> Part:
        return Part(f"{at}.{name}", weight, products=weight)

    if model.q_rank:
        yield from (linear("query_latent", "q h"), Part(f"{at}.query_norm", "q"))
    yield linear("query", "ad q" if model.q_rank else "ad h")
    yield from (linear("key_value_latent", "c h"), linear("rotary_key", "r h"))
    yield Part(f"{at}.key_value_norm", "c")
    yield from (linear("key", "an c"), linear("value", "aw c"))
    yield Part(at, products="s a d")  # q·kᵀ
    yield Part(f"{at}.weighted", products="s a w")  # softmax·v
    yield linear("output", "h aw")


def _feed_forward(
    at: str, model: Model, how: Policy, visits: str = "", shared: bool = False, f: str = "f"
) -> Iterator[Part]:
    bias, reads, inner = model.bias is True, f"{visits} b s h", f"{visits} b s {f}"
    linear = functools.partial(_linear, how=how, bias=bias, copies="E" if visits else "")
    if model.ffn == "gelu":
        yield linear(f"{at}.up", f"{f} h", reads=reads, shared=shared)
        yield Part(at, keeps=(Kept("inner", inner, how.compute, "input of GELU, sbf"),))
    else:
        yield linear(f"{at}.gate", f"{f} h", reads=reads, shared=shared)
        yield linear(f"{at}.up", f"{f} h", reads=reads, shared=not how.autocast)
        three = "input of SiLU, its output, and the factor beside it, sbf each"
        yield Part(at, keeps=(Kept("inner", f"3 {inner}", how.compute, three),))
    yield linear(f"{at}.down", f"h {f}", reads=inner)


def _experts(at: str, model: Model, how: Policy) -> Iterator[Part]:
    """Every token visits k experts: whatever the router chooses, together they see k·b·s tokens."""
    yield _linear(f"{at}.router", "E h", how)
    keeps = (
        Kept("chosen", "k b s", INDEX, "chosen experts"),
        Kept("scores", "k b s", how.compute, "softmax of their scores"),
        Kept("visits", "2 k b s", INDEX, "token and place of each visit"),
        Kept("weights", "k b s", how.compute, "weight of each visit"),
        Kept("outputs", "k b s h", how.compute, "outputs of the experts"),
        Kept("weighted", "k b s h", how.stream, "the same, weighted"),
    )
    yield Part(at, keeps=keeps)
    x, z = ("x", "z") if _own_experts(model) else ("f", "f")
    yield from _feed_forward(f"{at}.experts.*", model, how, visits="k", f=x)
    if model.shared_expert:  # it reads what the router has kept
        yield from _feed_forward(f"{at}.shared", model, how, shared=not how.autocast, f=z)


def _own_experts(model: Model) -> bool:
    """Whether experts have letters of their own."""
    return bool(model.dense_layers or model.d_expert or model.d_shared)


def _norm(name: str, model: Model, how: Policy) -> Part:
    if model.norm == "layernorm":
        residual = Kept("residual", "b s h", how.stream, "input, sbh")
        statistics = Kept("statistics", "2 b s", how.stream, "mean and 1/σ of each token")
        return Part(name, "h", "h", keeps=(residual, statistics))
    keeps = (
        Kept("residual", "b s h", FP32_BYTES, "input in fp32, sbh"),
        Kept("statistics", "b s", FP32_BYTES, "1/rms of each token"),
        Kept("normalized", "b s h", FP32_BYTES, "input / rms, sbh"),
    )
    return Part(name, "h", keeps=keeps)


def _linear(
    name: str,
    weight: str,
    how: Policy,
    *,
    bias: bool = False,
    reads: str = "b s h",
    shared: bool = False,
    copies: str = "",
) -> Part:
    """A linear layer, which keeps its input unless that is `shared` with a tensor already kept;
    autocast adds a half copy of each of its weights."""
    keeps: tuple[Kept, ...] = () if shared else (Kept("input", reads, how.compute, "input"),)
    if how.autocast:
        what = "half copy of the weight"
        keeps += (Kept("copy", f"{copies} {weight}", how.compute, what),)
    return Part(name, weight, weight.split()[0] if bias else "", products=weight, keeps=keeps)


def _mask(
    model: Model, dims: str, width: int, what: str = "dropout mask, sbh"
) -> tuple[Kept, ...]:
    """Dropout's mask, which a CPU keeps in the dtype of what it masks."""
    return (Kept("mask", dims, width, what),) if model.dropout else ()


# ── sums over it ──────────────────────────────────────────────────────────────────────────────────


def letters(model: Model, *, tp: int = 1, ep: int = 1) -> dict[str, int]:
    """The sizes behind the letters, or what is left of them on one rank of tp and of ep.

    Raises ValueError for a degree that does not divide a size.
    """
    fields = LETTERS | (LATENT if model.kv_rank else {})
    fields |= OWN_EXPERTS if _own_experts(model) else {}
    sizes = {letter: getattr(model, field) for letter, field in fields.items()}
    for letter, as_wide in (("w", "d"), ("x", "f"), ("z", "f")):
        if letter in sizes:
            sizes[letter] = sizes[letter] or sizes[as_wide]
    if "c" in sizes:
        sizes["n"] = sizes["d"] - sizes["r"]
    if "D" in sizes:
        sizes["M"] = sizes["L"] - sizes["D"]
    for axis, n in (("tp", tp), ("ep", ep)):
        for letter in SPLITS[axis]:
            if letter == "f" and axis == "tp" and model.num_experts > 1:
                continue  # experts are whole: ep spreads them
            if sizes[letter] % n:
                field = f"{LETTERS[letter]}={sizes[letter]}"
                raise ValueError(f"{axis}={n} does not divide {field}: choose another, or pad it")
            sizes[letter] //= n
    return sizes


def size(dims: str, sizes: Mapping[str, int]) -> int:
    """Elements of a shape in letters.

    >>> size("2 s ad", {"s": 10, "a": 3, "d": 4})
    240
    """
    return math.prod(int(c) if c.isdigit() else sizes[c] for c in dims if c != " ")


def parameters(model: Model) -> dict[str, int]:
    """Parameters of each group of parts, all layers together."""
    sizes, totals = letters(model), dict.fromkeys(GROUPS.values(), 0)
    for part in parts(model):
        for dims in filter(None, (part.weight, part.bias)):
            totals[part.group] += size(part.copies, sizes) * size(dims, sizes)
    return totals


def num_params(model: Model) -> int:
    """Ψ: all parameters, a tied head once.

    >>> from labutils.config import ModelConfig
    >>> gpt = ModelConfig.named("gpt2-xl")
    >>> L, h, v, s = gpt.letters("L h v s")
    >>> num_params(gpt) == L * (12 * h**2 + 13 * h) + (v + s + 2) * h  # a GPT-2, f = 4h
    True
    >>> llama = ModelConfig.named("llama-3.1-8b")
    >>> L, h, a, g, d, f, v = llama.letters("L h a g d f v")
    >>> psi = num_params(llama)
    >>> psi == L * (2 * h * (a + g) * d + 3 * h * f + 2 * h) + (2 * v + 1) * h  # a Llama
    True
    """
    return sum(parameters(model).values())


def tensors(model: Model) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter by its name, as `GPT(model).named_parameters()` has them."""
    sizes, found = letters(model), {}

    @functools.cache  # layers are alike
    def shape(dims: str) -> tuple[int, ...]:
        return tuple(size(dim, sizes) for dim in dims.split())

    for name, part in _numbered(_layers(model), "experts", model.num_experts):
        for kind, dims in (("weight", part.weight), ("bias", part.bias)):
            if dims:
                found[f"{name}.{kind}"] = shape(dims)
    return found


def units(model: Model) -> dict[str, tuple[int, ...]]:
    """Elements of each parameter by ZeRO unit: what stands outside of the layers (""), and each
    layer.

    Invariant: together they are `num_params`.
    """
    found: dict[str, tuple[int, ...]] = {"": ()}
    for name, shape in tensors(model).items():
        unit = ".".join(name.split(".")[:2]) if name.startswith("blocks") else ""
        found[unit] = (*found.get(unit, ()), math.prod(shape))
    return found


def token_flops(model: Model) -> dict[str, int]:
    """FLOPs of each part's matrix products in a forward pass, for one token, all layers together; a
    multiply and an add are two.

    Attention is counted in full, s keys for every query, causal or not.
    Source: Korthikanti et al. 2205.05198, appendix A.

    >>> from labutils.config import ModelConfig
    >>> gpt = ModelConfig.named("gpt2-xl")
    >>> L, h, v, s = gpt.letters("L h v s")
    >>> forward = sum(token_flops(gpt).values())
    >>> forward == 24 * L * h**2 + 4 * L * s * h + 2 * v * h  # a GPT-2; in training 3 times that
    True
    >>> llama = ModelConfig.named("llama-3.1-8b")
    >>> L, h, a, g, d, f, v, s = llama.letters("L h a g d f v s")
    >>> forward = sum(token_flops(llama).values())
    >>> forward == 2 * L * (2 * h * (a + g) * d + 3 * h * f + 2 * s * a * d) + 2 * v * h  # a Llama
    True
    """
    sizes, found = letters(model), {}
    for part in parts(model):
        if part.products:
            met = size(part.copies.replace("E", "k"), sizes)
            found[part.name] = 2 * met * size(part.products, sizes)
    return found


def kept(model: Model, how: Policy) -> Iterator[tuple[str, Kept]]:
    """Each tensor that is kept for the backward pass, with the module that keeps it, in the order
    of the forward pass. A layer's experts stand together: a router decides which keeps what."""
    for name, part in _layers(model, how):
        for tensor in part.keeps:
            yield name.replace("experts.*", "experts"), tensor


def _layers(model: Model, how: Policy = Policy()) -> Iterator[tuple[str, Part]]:
    """The parts of every layer, one after the other."""
    model.require_gpt()
    rows, (L, E) = parts(model, how), (model.num_layers, model.num_experts)
    said = f"parts of num_layers={L}, num_experts={E} are"
    writable(L * E * len(rows), said, "take fewer layers", most=10**6)
    return _numbered(((part.name, part) for part in rows), "blocks", L)


def _numbered(
    rows: Iterable[tuple[str, Part]], word: str, n: int
) -> Iterator[tuple[str, Part]]:
    """The rows, in which those of a layer (or of an expert) come once for each of `n`."""
    for repeated, group in itertools.groupby(rows, lambda row: word in row[0]):
        same = tuple(group)
        for i in range(n if repeated else 1):
            for name, part in same:
                yield name.replace(f"{word}.*", f"{word}.{i}"), part
