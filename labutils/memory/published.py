"""Korthikanti's formula for activations, line by line, and what PyTorch keeps beyond it: every byte
of the difference has a name."""

from labutils import anatomy, units
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory.activations import activations
from labutils.memory.states import WIDTHS

_RUN = {"autocast": False, "attention": "plain", "checkpointing": "none"}

# The paper's lines, and the tensors of `anatomy` that each of them counts: module, and what.
_PAPER = {
    ("inputs of the two LayerNorms", "4sbh"): (
        ("attention_norm", "input, sbh"),
        ("feed_forward_norm", "input, sbh"),
    ),
    ("inputs of attention and feed-forward", "4sbh"): (("query", "input"), ("up", "input")),
    ("dropout masks after them", "2sbh"): (("dropout", "dropout mask, sbh"),),
    ("queries, keys and values", "6sbh"): (
        ("attention", "queries"),
        ("attention", "keys"),
        ("attention", "values"),
    ),
    ("input of the output projection", "2sbh"): (("output", "input"),),
    ("input of GELU and its output", "16sbh"): (
        ("feed_forward", "input of GELU, sbf"),
        ("down", "input"),
    ),
    ("softmax, and after dropout", "4as²b"): (
        ("attention", "softmax of the scores, as²b"),
        ("attention", "softmax after dropout, as²b"),
    ),
    ("dropout mask of the scores", "as²b"): (("attention", "dropout mask, as²b"),),
}


def korthikanti(
    *,
    b: int,
    s: int,
    h: int,
    a: int,
    t: int = 1,
    sequence: bool = False,
    checkpointing: str = "none",
) -> Ledger:
    """Bytes that one layer of a GPT keeps for its backward pass, by the paper: 16-bit activations,
    dropout masks of one byte, nothing for the norms' statistics.

    b, s, h, a: sequences, tokens, width and heads.
    t: ranks of tensor parallelism, which divide what has heads or a feed-forward width.
    sequence: whether sequence parallelism divides the other tensors too.
    checkpointing: "selective" drops what grows with s², "full" keeps the input alone.

    >>> layer = korthikanti(b=1, s=2048, h=12288, a=96)
    >>> layer.total == 1 * 2048 * 12288 * (34 + 5 * 96 * 2048 // 12288)
    True

    Source: Korthikanti et al. 2205.05198, section 4.1, equations 1 to 6 and table 2.
    """
    for name, value in {"b": b, "s": s, "h": h, "a": a, "t": t}.items():
        units.whole(value, name, 1)
    if checkpointing not in ("none", "selective", "full"):
        choices = "use 'none', 'selective' or 'full'"
        raise ValueError(f"checkpointing={checkpointing!r} is unknown: {choices}")
    if sequence and s % t:
        raise ValueError(f"{t} ranks do not divide {s} tokens evenly: choose a divisor")
    if checkpointing == "full":
        whole = Line("input of the layer", 2 * s * b * h, component="activations", note="2sbh")
        return Ledger([whole])
    model = ModelConfig(
        num_layers=1, d_model=h, num_heads=a, d_ff=4 * h, vocab_size=t, seq_len=s, dropout=0.1
    )
    sizes, here = anatomy.letters(model), anatomy.letters(model, tp=t)
    keeps: dict[tuple[str, str], int] = {}
    for name, kept in anatomy.kept(model, anatomy.Policy(2, 2, checkpointing=checkpointing)):
        if not name.startswith("blocks"):
            continue
        whole = anatomy.size(kept.dims, sizes | {"b": b})
        share = anatomy.size(kept.dims, here | {"b": b})
        mine = whole // t if sequence else share
        place = name.rpartition(".")[2], kept.what
        width = 1 if "mask" in kept.what else kept.itemsize
        keeps[place] = keeps.get(place, 0) + mine * width
    return Ledger(
        Line(name, sum(map(keeps.get, places)), component="activations", note=note)
        for (name, note), places in _PAPER.items()
        if keeps.keys() >= set(places)
    )


def beyond_the_paper(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes that PyTorch keeps on a CPU and the formula does not count, for a model of the kind the
    formula is made for.

    Invariant: L layers of `korthikanti` and these lines are `activations(model, train)`, to the
    byte.
    """
    b, (s, h, a, L) = train.micro_batch, model.letters("s h a L")
    shape = {"d_ff": 4 * h, "num_kv_heads": a, "d_head": h // a, "num_experts": 1}
    made_for = {"norm": "layernorm", "ffn": "gelu", **shape}
    odd = [
        f"{name}={getattr(chosen, name)!r}"
        for chosen, only in ((model, made_for), (train, _RUN))
        for name, value in only.items()
        if getattr(chosen, name) != value
    ]
    odd += ["precision='fp32'"] * (train.precision == "fp32") + ["dropout=0"] * (not model.dropout)
    if odd:
        so = "memory.activations counts such a model as it is"
        raise ValueError(f"the formula is not made for {', '.join(odd)}: {so}")
    size = WIDTHS[train.precision]
    masks = L * (size - 1) * (2 * s * b * h + a * s * s * b)
    statistics = L * 2 * 2 * s * b * size
    lines = [
        Line("masks in two bytes, not one", masks, "activations", note="2sbh + as²b a layer"),
        Line(
            "mean and 1/σ of each token", statistics, "activations", note="two LayerNorms a layer"
        ),
    ]
    outside = [line for line in activations(model, train) if not line.name.startswith("blocks.")]
    return Ledger([*lines, *outside])
