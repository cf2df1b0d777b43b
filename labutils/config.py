"""What a person chooses: the model, the training run, the mesh of ranks, the hardware. Frozen,
validated, and free of torch."""

import csv
import dataclasses
import functools
import itertools
import json
import math
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labutils import anatomy, units

DATA = Path(__file__).resolve().parent / "data"
AXES = ("pp", "dp", "cp", "tp", "ep")  # of a `Mesh`
COMM_AXES = (*AXES, "edp")
"""The axes that a Comm can be of: also edp, the ranks that hold the same experts."""
_MOST = 10**6  # ranks in a list
REACHED = ("products", "attention", "memory", "link")
"""The peaks of which a device reaches a fraction."""
MOMENTS = {
    "sgd": (),
    "momentum": ("momentum_buffer",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}
"""What an optimizer keeps for each weight, under PyTorch's names."""
BUCKET_BYTES = 25 * units.MIB  # PyTorch's bucket_cap_mb=25 counts MiB
SCHEDULES = (
    "naive", "gpipe", "one_f_one_b", "eager_one_f_one_b", "interleaved", "breadth_first",
    "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v", "dualpipe",
)  # fmt: skip
"""The functions of `schedule` whose steps end before the optimizer's begins."""
_FROM_OTHERS: Any = None  # the default of a field that is worked out of others: never None later


def _one_of(fields: Mapping[str, Any], **allowed: tuple) -> None:
    """Refuses fields whose value is none of those allowed; 1 and "yes" are no True."""
    for name, values in allowed.items():
        value = fields[name]
        if type(value) not in map(type, values) or value not in values:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, values))}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer, down to its last parameter.

    num_kv_heads: key–value heads, as many as query heads unless given.
    d_head: width of a head, d_model / num_heads unless given.
    bias: a bias on every linear layer (True), on none (False), or on the query, key and value
        projections alone ("qkv", as Qwen2 does).
    tied: the head multiplies with the token embedding.
    num_experts: above 1, every feed-forward layer is a mixture of experts with a router.
    top_k: experts that each token visits.
    shared_expert: beside these, one that every token visits, as in DeepSeek's models.
    d_expert, d_shared: widths of a routed and of the shared expert; 0: d_ff.
    dense_layers: the first layers, which have one feed-forward layer of width d_ff and no experts.
    kv_rank: above 0, multi-head latent attention: keys and values are made of one latent vector of
        this width and of one key of width d_rope, turned by RoPE, that all heads share. d_head is
        the width of a query or key (d_rope of it turned), d_value that of a value (0: as wide).
    q_rank: the width of the latent vector that queries are made of; 0: they are made of the input.

    >>> ModelConfig.named("gpt2-xl").num_params
    1557611200
    """

    num_layers: int
    d_model: int
    num_heads: int
    d_ff: int
    vocab_size: int
    seq_len: int
    num_kv_heads: int = _FROM_OTHERS
    d_head: int = _FROM_OTHERS
    ffn: str = "gelu"
    norm: str = "layernorm"
    positions: str = "learned"
    bias: bool | str = True
    tied: bool = True
    dropout: float = 0.0
    num_experts: int = 1
    top_k: int = 1
    shared_expert: bool = False
    d_expert: int = 0
    d_shared: int = 0
    dense_layers: int = 0
    q_rank: int = 0
    kv_rank: int = 0
    d_rope: int = 0
    d_value: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        sizes = ("num_layers", "d_model", "num_heads", "d_ff", "vocab_size", "seq_len")
        units.whole_fields(self, *sizes, "num_experts", "top_k")
        h, a = self.d_model, self.num_heads
        if self.num_kv_heads is None:
            object.__setattr__(self, "num_kv_heads", a)
        units.whole_fields(self, "num_kv_heads")
        g = self.num_kv_heads
        if a % g:
            remedy = "each group shares one key–value head"
            raise ValueError(f"num_kv_heads={g} does not divide num_heads={a}: {remedy}")
        if self.d_head is None:
            if h % a:
                remedy = "change one of them or give d_head"
                raise ValueError(f"num_heads={a} does not divide d_model={h}: {remedy}")
            object.__setattr__(self, "d_head", h // a)
        units.whole_fields(self, "d_head")
        _one_of(
            vars(self),
            ffn=("gelu", "swiglu"),
            norm=("layernorm", "rmsnorm"),
            positions=("learned", "rope"),
            bias=(True, False, "qkv"),
            tied=(True, False),
            shared_expert=(True, False),
        )
        if not isinstance(self.name, str):
            raise TypeError(f"name must be text, got {self.name!r}")
        if not isinstance(self.dropout, (int, float)) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be a probability in [0, 1), got {self.dropout!r}")
        if self.top_k > self.num_experts:
            more = f"top_k={self.top_k} is more than num_experts={self.num_experts}"
            raise ValueError(f"{more}: a token cannot visit an expert twice")
        if self.shared_expert and self.num_experts == 1:
            remedy = "give num_experts of 2 or more"
            raise ValueError(f"shared_expert=True stands beside experts with a router: {remedy}")
        self._check_widths()

    def _check_widths(self) -> None:
        """What only DeepSeek's models have."""
        experts, latent = ("d_expert", "d_shared", "dense_layers"), ("q_rank", "d_rope", "d_value")
        units.whole_fields(self, *experts, *latent, "kv_rank", minimum=0)
        if self.num_experts == 1 and any(getattr(self, name) for name in experts):
            given = ", ".join(f"{name}={getattr(self, name)}" for name in experts)
            raise ValueError(f"{given} are of models with experts: give num_experts of 2 or more")
        if self.dense_layers >= self.num_layers:
            every = f"dense_layers={self.dense_layers} of num_layers={self.num_layers}"
            raise ValueError(f"{every} leaves no layer for experts: give fewer, dense_layers=0 say")
        if not self.kv_rank and any(getattr(self, name) for name in latent):
            given = ", ".join(f"{name}={getattr(self, name)}" for name in latent)
            raise ValueError(f"{given} are of multi-head latent attention: give kv_rank")
        if self.kv_rank and not 0 < self.d_rope < self.d_head:
            given = f"d_rope={self.d_rope} is the part of d_head={self.d_head} that RoPE turns"
            raise ValueError(f"{given}: give a width between them")
        if self.kv_rank and self.num_kv_heads != self.num_heads:
            heads = f"num_kv_heads={self.num_kv_heads} with kv_rank={self.kv_rank}"
            raise ValueError(f"{heads}: every head has keys of its own, leave it out")

    @property
    def beyond(self) -> str:
        """What the model has and the course's `GPT` has not, in words; empty if there is none.
        Parameters and FLOPs of such a model are counted, and `planner` plans for it."""
        has = {
            f"multi-head latent attention (kv_rank={self.kv_rank})": self.kv_rank,
            f"experts of a width of their own (d_expert={self.d_expert})": self.d_expert,
            f"a shared expert of a width of its own (d_shared={self.d_shared})": self.d_shared,
            f"leading layers without experts (dense_layers={self.dense_layers})": self.dense_layers,
        }
        return " and ".join(what for what, there in has.items() if there)

    def require_gpt(self) -> None:
        """Raises ValueError for a model that the course's `GPT` does not run."""
        if self.beyond:
            remedy = "ask num_params, flops_per_token or the planner, or build another model"
            raise ValueError(f"the course's GPT does not run {self.beyond}: {remedy}")
        if self.positions == "rope" and self.d_head % 2:
            remedy = "RoPE turns pairs of numbers, so give the heads an even width"
            raise ValueError(f"d_head={self.d_head} is odd: {remedy}")

    @property
    def parameters(self) -> dict[str, int]:
        """Parameters of each part of the model, all layers together; a tied head counts once."""
        return anatomy.parameters(self)

    @functools.cached_property
    def num_params(self) -> int:
        """Ψ: all parameters, exact; for the models of data/models.csv the published count."""
        return sum(self.parameters.values())

    def flops_per_token(self, training: bool = True) -> int:
        """FLOPs of all matrix products for one token: forward, or forward and backward (three times
        that). Attention is counted in full, as Korthikanti et al. do (2205.05198, appendix A)."""
        return (3 if training else 1) * sum(anatomy.token_flops(self).values())

    def letters(self, wanted: str) -> tuple[int, ...]:
        """The sizes behind letters of the notation, in the order asked for.

        >>> s, h, a, L = ModelConfig.named("gpt2").letters("s h a L")
        >>> s, h, a, L
        (1024, 768, 12, 12)

        Raises ValueError for a letter that the model has not.
        """
        known = anatomy.letters(self)
        if "Ψ" in wanted:
            known["Ψ"] = self.num_params
        unknown = [letter for letter in wanted.split() if letter not in known]
        if unknown:
            has = " ".join([*known, "Ψ"])
            raise ValueError(f"a model has no letter {', '.join(unknown)}: it has {has}")
        return tuple(known[letter] for letter in wanted.split())

    @classmethod
    def named(cls, name: str) -> "ModelConfig":
        """The model of that name in data/models.csv."""
        row, told = _row("models.csv", name, "model"), {"True": True, "False": False}
        given: dict[str, Any] = {
            field.name: int(cell) if cell.isdigit() else told.get(cell, cell)
            for field in dataclasses.fields(cls)
            if (cell := row.get(field.name))
        }
        return cls(**given)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that `named` knows."""
        return tuple(_table("models.csv"))

    @classmethod
    def from_hf(cls, source: str | Path | Mapping[str, Any]) -> "ModelConfig":
        """The model that a Hugging Face config.json describes: a path to the file or its folder, or
        the parsed dictionary.

        Reads the GPT-2, Llama, Mistral, Mixtral, Phi-3, Qwen2 and DeepSeek families; a key that is
        not there has its family's own default, if there is one. A sliding window, the scaling of
        RoPE and the fused weights of Phi-3 change no parameter and are not kept.

        Raises ValueError for what a ModelConfig cannot express, such as Qwen3's norms of queries
        and keys, and for a file that is missing or broken.
        """
        if isinstance(source, Mapping):
            config, origin = source, "this dictionary"
        elif isinstance(source, (str, os.PathLike)):
            config, origin = _read_json(Path(source))
        else:
            raise TypeError(f"from_hf takes a path or a dictionary, got {source!r}")
        family = str(config.get("model_type"))
        if reason := _HF_BEYOND.get(family):
            remedy = "if its sizes without them will do, "
            remedy += _HF_WITHOUT.get(family, "build a ModelConfig by hand")
            beyond = f"{family} has {reason}, which a ModelConfig has not"
            raise ValueError(f"{origin}: {beyond}: {remedy}")
        if family not in _HF_FAMILIES:
            read = f"from_hf reads {', '.join(_HF_FAMILIES)}. Build a ModelConfig by hand instead"
            raise ValueError(f"{origin}: model_type is {config.get('model_type')!r}; {read}")
        try:
            return cls(**_HF_FAMILIES[family](config))
        except KeyError as missing:
            needs = f"a {family} config needs the key {missing}, which is not there"
            raise ValueError(f"{origin}: {needs}") from None


def _read_json(path: Path) -> tuple[dict, str]:
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.isfile(path):
        remedy = "give the path of a config.json or of the folder that holds it"
        raise ValueError(f"there is no file {path.name[:80]!r} at that path: {remedy}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON ({error}): download it again") from None
    if not isinstance(config, dict):
        found = f"{path.name} holds a {type(config).__name__}, not an object with keys"
        raise ValueError(f"{found}: is it the model's config.json?")
    return config, path.name


def _from_gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    h, activation = config["n_embd"], config.get("activation_function", "gelu_new")
    if activation not in ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        raise ValueError(f"activation_function is {activation!r}: from_hf reads GPT-2s with a GELU")
    if _flag(config, "add_cross_attention"):
        raise ValueError("add_cross_attention is true: from_hf reads decoders that stand alone")
    return dict(
        num_layers=config["n_layer"],
        d_model=h,
        num_heads=config["n_head"],
        d_ff=4 * h if config.get("n_inner") is None else config["n_inner"],
        vocab_size=config["vocab_size"],
        seq_len=config["n_positions"],
        dropout=_dropout(config, 0.1, "embd_pdrop", "resid_pdrop", "attn_pdrop"),
        tied=_flag(config, "tie_word_embeddings", True),
    )


def _from_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    family, activation = config["model_type"], config.get("hidden_act", "silu")
    if activation != "silu":
        only = "from_hf reads SwiGLU models, whose hidden_act is 'silu'"
        raise ValueError(f"hidden_act is {activation!r}: {only}")
    for key, places in (("mlp_bias", "SwiGLU layers"), ("attention_bias", "four projections")):
        if family == "llama" and _flag(config, key):
            by_hand = "build a ModelConfig by hand with bias=False, 'qkv' or True"
            raise ValueError(f"{key} is true, a bias on {places} alone: {by_hand}")
    if config.get("partial_rotary_factor", 1) != 1:
        turned = f"partial_rotary_factor is {config['partial_rotary_factor']!r}"
        raise ValueError(f"{turned}: in a ModelConfig RoPE turns heads as wide as they are")
    others = ("embd_pdrop", "resid_pdrop") if family == "phi3" else ()
    if _dropout(config, 0.0, "attention_dropout", *others):
        no = "from_hf reads models of this kind without dropout"
        raise ValueError(f"attention_dropout is not 0: {no}")
    mixtral = family == "mixtral"
    return _gated(config) | dict(
        num_kv_heads=config.get("num_key_value_heads", _HF_KV_HEADS[family]),
        d_head=config.get("head_dim"),
        bias="qkv" if family == "qwen2" else False,
        num_experts=config.get("num_local_experts", 8) if mixtral else 1,
        top_k=config.get("num_experts_per_tok", 2) if mixtral else 1,
    )


def _from_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    if (every := config.get("moe_layer_freq", 1)) != 1:
        raise ValueError(f"moe_layer_freq is {every!r}: from_hf reads models with experts in all")
    if config.get("hidden_act", "silu") != "silu" or _flag(config, "attention_bias"):
        raise ValueError("from_hf reads DeepSeek models with SwiGLU and without biases")
    width, shared = config["moe_intermediate_size"], config.get("n_shared_experts") or 0
    return _gated(config) | dict(
        d_head=config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        bias=False,
        num_experts=config["n_routed_experts"],
        top_k=config["num_experts_per_tok"],
        shared_expert=shared > 0,
        d_expert=width,
        d_shared=shared * width or width,
        dense_layers=config.get("first_k_dense_replace", 0),
        q_rank=config.get("q_lora_rank") or 0,
        kv_rank=config["kv_lora_rank"],
        d_rope=config["qk_rope_head_dim"],
        d_value=config["v_head_dim"],
    )


def _gated(config: Mapping[str, Any]) -> dict[str, Any]:
    """What Llama's and DeepSeek's families say under the same keys."""
    return dict(
        num_layers=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        d_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        seq_len=config["max_position_embeddings"],
        ffn="swiglu",
        norm="rmsnorm",
        positions="rope",
        tied=_flag(config, "tie_word_embeddings"),
    )


def _flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    value = config.get(key, default)
    _one_of({key: value}, **{key: (True, False)})
    return value


def _dropout(config: Mapping[str, Any], default: float, *keys: str) -> Any:
    """The one rate of dropout that all `keys` have."""
    rates = {key: config.get(key, default) for key in keys}
    if any(rate != rates[keys[0]] for rate in rates.values()):
        each = ", ".join(f"{key}={rate!r}" for key, rate in rates.items())
        raise ValueError(f"{each}: a ModelConfig has one rate of dropout for all places")
    return rates[keys[0]]


# Key–value heads of a config.json that does not say; None: as many as query heads.
_HF_KV_HEADS = {"llama": None, "mistral": 8, "mixtral": 8, "phi3": None, "qwen2": 32}
_HF_FAMILIES = {"gpt2": _from_gpt2} | dict.fromkeys(_HF_KV_HEADS, _from_llama)
_HF_FAMILIES |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), _from_deepseek)
_HF_BEYOND = {
    "gemma": "a gated feed-forward layer with GELU",
    "gemma2": "four norms per layer and a gated feed-forward layer with GELU",
    "olmo2": "norms behind attention and feed-forward, and norms of queries and keys",
    "qwen3": "norms of queries and keys",
    "qwen3_moe": "norms of queries and keys",
}
"""Parts that the anatomy of a ModelConfig cannot express, by model_type."""
_HF_WITHOUT = {"qwen3": 'write "model_type": "llama" in a copy of it'}


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """What LoRA trains beside frozen weights.

    rank, alpha: r and α of each adapter, whose product is weighed with α/r
    pattern: the layers that have one, by the ends of their names, as in `lora.targets`
    base: the format of the frozen linear layers: their own ("") or "nf4", as in QLoRA
    """

    rank: int
    alpha: float
    pattern: str | tuple[str, ...] = "*"
    base: str = ""

    def __post_init__(self) -> None:
        units.whole_fields(self, "rank")
        units.positive_fields(self, "alpha")
        _one_of(vars(self), base=("", "nf4"))


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained; batch sizes are in sequences.

    optimizer, lr: what steps the weights, "momentum" being SGD with 0.9 of it, and how far.
    clip: the norm of the whole gradient to which a step is clipped; None leaves it as it is.

    precision: "fp32", "fp64" to compare with another way, or a half format ("bf16", "fp16"):
        weights and gradients are half, and an fp32 master copy goes with the optimizer.
    fp32_gradients: with a half precision, gradients are accumulated in fp32: beside the half ones
        (True), or in their place ("only").
    autocast: weights and gradients stay fp32 and only the matrix products are half.
    fp8: the scheme of `quantization.SCHEMES` by which linear layers multiply 8 bits; None: none do.
    adapters: what LoRA trains; None trains the weights themselves.
    stepping: how the optimizer goes through the weights: one after the other ("loop", PyTorch's
        default on a CPU), all in each operation ("foreach", its default on a GPU), or all in one
        ("fused").

    attention: "plain" writes the s×s scores out, "sdpa" is PyTorch's fused kernel; over the ranks
        of cp, "ring" or "ulysses".
    layout: which tokens of a sequence a rank of cp has, "zigzag" or "contiguous".
    sequence: sequence parallelism around tensor parallelism.
    checkpointing: "none", "selective" (attention is computed again), or "full" (each layer is).
    schedule: of the pipeline, a name of `SCHEDULES`, or a `Schedule` for these ranks and
        micro-batches.
    chunks: stages of a rank, where a schedule goes round the ranks ("interleaved" and its kin).
    layers: of each stage; cut so that the longest stage is short unless given.
    frozen: names of parameters that stay as they are, with * for any letters.
    zero: the level of ZeRO.
    bucket_bytes: what levels 1 and 2 reduce and gather at once.
    reshard: whether level 3 frees weights between the forward and the backward pass.
    prefetch: whether it gathers a layer while the one before computes.
    """

    micro_batch: int
    global_batch: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    lr: float = 1e-3
    clip: float | None = None
    fp32_gradients: bool | str = False
    autocast: bool = False
    fp8: str | None = None
    adapters: Adapters | None = None
    attention: str = "plain"
    layout: str = "zigzag"
    sequence: bool = False
    checkpointing: str = "none"
    schedule: Any = "one_f_one_b"
    chunks: int = 2
    layers: tuple[int, ...] | None = None
    frozen: tuple[str, ...] = ()
    stepping: str = "loop"
    zero: int = 0
    bucket_bytes: int = BUCKET_BYTES
    reshard: bool = True
    prefetch: bool = True

    def __post_init__(self) -> None:
        units.whole_fields(self, "micro_batch", "global_batch", "chunks", "bucket_bytes")
        if self.global_batch % self.micro_batch:
            sizes = f"micro_batch={self.micro_batch} does not divide global_batch"
            raise ValueError(f"{sizes}={self.global_batch}: the last micro-batch would be short")
        _one_of(
            vars(self),
            precision=("fp32", "fp64", "bf16", "fp16"),
            fp32_gradients=(True, False, "only"),
            autocast=(True, False),
            fp8=(None, "unscaled", "current", "delayed", "tiles", "int8"),
            attention=("plain", "sdpa", "ring", "ulysses"),
            layout=("zigzag", "contiguous"),
            sequence=(True, False),
            optimizer=tuple(MOMENTS),
            checkpointing=("none", "selective", "full"),
            **({} if hasattr(self.schedule, "ranks") else {"schedule": SCHEDULES}),
            stepping=("loop", "foreach", "fused"),
            zero=(0, 1, 2, 3),
            reshard=(True, False),
            prefetch=(True, False),
        )
        units.positive_fields(self, "lr")
        if self.clip is not None:
            units.positive_fields(self, "clip")
        if self.layers is not None:
            units.instance(self.layers, Iterable, "layers")
            layers = units.wholes(**{f"layers[{i}]": n for i, n in enumerate(self.layers)})
            object.__setattr__(self, "layers", layers)
        if not isinstance(self.frozen, list | tuple):  # a text alone is a name for each letter
            said = f"{self.frozen!r:.60} ({type(self.frozen).__name__})"
            raise TypeError(f"frozen takes a tuple of names, got {said}: ('head.*',) is one")
        for pattern in self.frozen:
            units.instance(pattern, str, "a name in frozen")
        object.__setattr__(self, "frozen", tuple(self.frozen))
        if not isinstance(self.adapters, Adapters | None):
            raise TypeError(f"adapters must be config.Adapters or None, got {self.adapters!r}")
        if self.autocast and self.precision in ("fp32", "fp64"):
            remedy = "give precision='bf16' or 'fp16'"
            raise ValueError(f"autocast=True computes in a half format: {remedy}")

    @property
    def half(self) -> bool:
        """Whether weights are in a half format, and so step as an fp32 master copy."""
        return self.precision in ("bf16", "fp16") and not self.autocast

    def accumulation(self, dp: int) -> int:
        """Micro-batches that each of `dp` ranks accumulates before an optimizer step.

        >>> TrainConfig(micro_batch=2, global_batch=1024).accumulation(dp=128)
        4

        Raises ValueError where micro_batch·dp does not divide global_batch.
        """
        dp = units.whole(dp, "dp", 1)
        if self.global_batch % (self.micro_batch * dp):
            product = f"micro_batch · dp = {self.micro_batch} · {dp}"
            more = -(-self.global_batch // (self.micro_batch * dp)) * self.micro_batch * dp
            sizes = f"global_batch={self.global_batch} is not a multiple of {product}"
            raise ValueError(f"{sizes}: take {more}, say")
        return self.global_batch // (self.micro_batch * dp)


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks laid out on the axes of parallelism, outermost first: pp, dp, cp, tp. Neighbours on
    `tp` are neighbours in number.

    `ep` does not add ranks: experts are spread over the data- and context-parallel ranks, `ep` of
    them at a time; those at the same place of such blocks hold the same experts, and are the group
    "edp" (Megatron's expert data parallelism).

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh.size, mesh.coords(5), mesh.group(5, "tp"), mesh.group(5, "dp")
    (8, {'pp': 0, 'dp': 1, 'cp': 0, 'tp': 1, 'ep': 0}, (4, 5, 6, 7), (1, 5))
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        units.whole_fields(self, *AXES)
        if (self.dp * self.cp) % self.ep:
            ranks = f"dp · cp = {self.dp * self.cp}: experts are spread over those ranks"
            raise ValueError(f"ep={self.ep} does not divide {ranks}")

    @property
    def size(self) -> int:
        """Number of ranks: pp · dp · cp · tp."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def _axes(self) -> dict[str, tuple[int, int]]:
        """How far apart the ranks of a group are in number, and how many they are, by axis."""
        return {
            "pp": (self.dp * self.cp * self.tp, self.pp),
            "dp": (self.cp * self.tp, self.dp),
            "cp": (self.tp, self.cp),
            "tp": (1, self.tp),
            "ep": (self.tp, self.ep),
            "edp": (self.ep * self.tp, self.dp * self.cp // self.ep),
        }

    def coords(self, rank: int) -> dict[str, int]:
        """Where `rank` stands on each axis.

        Raises ValueError for a rank that is not on the mesh.
        """
        if (rank := units.whole(rank, "rank")) >= self.size:
            there = f"this mesh of {self.size} ranks: use 0 … {self.size - 1}"
            raise ValueError(f"rank {rank} is not on {there}")
        return {axis: rank // step % n for axis, (step, n) in self._axes.items() if axis in AXES}

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that `rank` shares the `axis` with, itself included, in order."""
        return tuple(_listed(self.ranks(rank, axis)))

    def ranks(self, rank: int, *axes: str) -> Sequence[int]:
        """The ranks that `rank` shares these axes with, in order: a range, which costs nothing
        however many they are, unless the axes are not neighbours on the mesh.

        >>> Mesh(dp=10**6, tp=1000).ranks(2024, "dp")
        range(24, 1000000024, 1000)

        Raises ValueError for an unknown axis.
        """
        for axis in axes:
            if axis not in COMM_AXES:
                raise ValueError(f"a mesh has no axis {axis!r}: it has {', '.join(COMM_AXES)}")
        self.coords(rank)  # or an error
        rank, known = operator.index(rank), self._axes
        apart: list[range] = []
        for step, n in sorted(known[axis] for axis in set(axes)):
            rank -= rank // step % n * step
            if apart and apart[-1].step * len(apart[-1]) == step:  # begins where that one ends
                step, n = apart[-1].step, len(apart.pop()) * n
            if n > 1:
                apart.append(range(0, n * step, step))
        if len(apart) < 2:
            along = apart[0] if apart else range(1)
            return range(rank, rank + along.stop, along.step)
        _listed(range(math.prod(map(len, apart))))
        return tuple(rank + sum(places) for places in itertools.product(*reversed(apart)))


def _listed(ranks: Sequence[int]) -> Sequence[int]:
    """`ranks`, after checking that a list of so many is not too long."""
    if len(ranks) > _MOST:
        few = f"at most {_MOST:,} can be listed"
        raise ValueError(f"{len(ranks):,} ranks share this: {few}; give a smaller mesh")
    return ranks


@dataclass(frozen=True)
class Link:
    """A connection between two ranks: λ seconds before the first byte arrives, then `bandwidth`
    bytes per second in each direction."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        units.positive_fields(self, "latency", or_zero=True)
        units.positive_fields(self, "bandwidth")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A device, and the node and the network that it stands in.

    memory_bandwidth, flops, link_bandwidth: dense peaks of its data sheet; a link's in one
        direction
    reached: the fraction of a peak that training reaches, of each in `REACHED`
    kernel: seconds that a kernel takes besides
    node: devices in a node
    inside: what carries a device's messages to the others of its node, at the rate that it reaches
    network, network_links: a link between nodes, at its rate, and how many of them a node has
    source, reached_source: of the data sheet's numbers, and of the fractions that are reached; that
        of the others stands beside them in the table

    Source: data/hardware.csv, citations for each row.
    """

    name: str
    memory: int
    memory_bandwidth: float
    flops: Mapping[str, float]
    link_bandwidth: float
    reached: Mapping[str, float]
    kernel: float
    node: int
    inside: Link
    network: Link
    network_links: int
    source: str
    reached_source: str

    @classmethod
    def named(cls, name: str) -> "Hardware":
        """The device of that name in data/hardware.csv.

        >>> units.text(Hardware.named("H100").memory)
        '80.0 GB'
        """
        row = _row("hardware.csv", name, "device")
        rates = {key.removeprefix("tflops_"): row[key] for key in row if key.startswith("tflops_")}
        return cls(
            name=name,
            memory=int(row["memory_GB"]) * units.GB,
            memory_bandwidth=float(row["memory_bandwidth_GBps"]) * 1e9,
            flops={fmt: float(rate) * 1e12 for fmt, rate in rates.items() if rate},
            link_bandwidth=(link := float(row["link_GBps_per_direction"]) * 1e9),
            reached={kind: float(row[kind]) for kind in REACHED},
            kernel=float(row["kernel_us"]) / 1e6,
            node=int(row["devices_per_node"]),
            inside=Link(float(row["link_us"]) / 1e6, (part := float(row["link"])) * link),
            network=Link(float(row["network_us"]) / 1e6, part * float(row["network_GBps"]) * 1e9),
            network_links=int(row["network_links"]),
            source=row["source"],
            reached_source=row["reached"],
        )

    @property
    def half(self) -> str:
        """Of its formats in 16 bits that which needs no loss scale: bf16, or fp16 without it."""
        return "bf16" if "bf16" in self.flops else "fp16"

    def rate(self, kind: str = "products", fmt: str = "bf16") -> float:
        """FLOPs per second that products or attention reach in a format.

        >>> units.text(Hardware.named("H100").rate(), "FLOP/s")
        '601 TFLOP/s'
        """
        reached = units.entry(self.reached, kind, f"{self.name} has no rate of")
        return reached * units.entry(self.flops, fmt, f"{self.name} has no rate in")

    def ring(self, n: int, apart: int = 1) -> Link:
        """What carries the messages of each of n ranks to the next, if the ring stays in a node or
        else uses its part of all links that leave one.

        n, apart: ranks of the ring, and how far the number of one is from the next: 1 where they
            fill a node, the devices of a node where each stands in its own

        >>> h100 = Hardware.named("H100")
        >>> [units.text(h100.ring(*at).bandwidth) for at in ((8,), (16,), (16, 8))]
        ['360 GB', '320 GB', '40.0 GB']
        """
        n, apart = units.whole(n, "n", 1), units.whole(apart, "apart", 1)
        if n * apart <= self.node:
            return self.inside
        beside = max(1, self.node // apart)  # ranks of one ring in a node
        carried = beside / self.node * self.network_links * self.network.bandwidth
        return Link(self.network.latency, min(self.inside.bandwidth, carried))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The names that `named` knows."""
        return tuple(_table("hardware.csv"))


@functools.cache
def _table(file: str) -> dict[str, dict[str, str]]:
    with open(DATA / file, newline="", encoding="utf-8") as text:
        return {row["name"]: row for row in csv.DictReader(text)}


def _row(file: str, name: str, kind: str) -> dict[str, str]:
    return units.entry(_table(file), name, f"no {kind} called")
