"""The published formula for activations, line by line, and what PyTorch keeps beyond it: every byte of the difference has a name."""

from labutils import units
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory.activations import activations
from labutils.memory.states import WIDTHS

_RUN = {
    "precision": ("bf16", "fp16"),
    "autocast": (False,),
    "attention": ("plain",),
    "checkpointing": ("none",),
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
    """Bytes that one layer of a GPT keeps for its backward pass, by the paper: 16-bit activations, dropout masks of one byte.

    Without parallelism sbh(34 + 5as/h). `t` ranks of tensor parallelism divide all but 10sbh, `sequence` parallelism divides that too; selective
    recomputation drops what grows with s², full recomputation keeps the input alone.

    >>> layer = korthikanti(b=1, s=2048, h=12288, a=96)
    >>> layer.total == 1 * 2048 * 12288 * (34 + 5 * 96 * 2048 // 12288)
    True

    Source: Korthikanti et al. 2205.05198, section 4.1, equations 1 to 6 and table 2.
    """
    for name, value in {"b": b, "s": s, "h": h, "a": a, "t": t}.items():
        units.whole(value, name, 1)
    if checkpointing not in ("none", "selective", "full"):
        raise ValueError(
            f"checkpointing={checkpointing!r} is unknown: use 'none', 'selective' or 'full'"
        )
    if checkpointing == "full":
        return Ledger(
            [Line("input of the layer", 2 * s * b * h, component="activations", note="2sbh")]
        )
    if a % t or (s if sequence else h) % t:
        raise ValueError(
            f"{t} ranks divide neither {a} heads nor the {'tokens' if sequence else 'columns'} evenly: choose t among the common divisors"
        )
    sbh, scores = s * b * h, a * s * s * b
    everywhere = t if sequence else 1
    lines = [
        ("inputs of the two LayerNorms", 4 * sbh // everywhere, "4sbh"),
        ("inputs of attention and feed-forward", 4 * sbh // everywhere, "4sbh"),
        ("dropout masks after them", 2 * sbh // everywhere, "2sbh"),
        ("queries, keys and values", 6 * sbh // t, "6sbh"),
        ("input of the output projection", 2 * sbh // t, "2sbh"),
        ("input of GELU and its output", 16 * sbh // t, "16sbh"),
    ]
    if checkpointing == "none":
        lines += [
            ("softmax, and after dropout", 4 * scores // t, "4as²b"),
            ("dropout mask of the scores", scores // t, "as²b"),
        ]
    return Ledger(
        Line(name, amount, component="activations", note=note) for name, amount, note in lines
    )


def beyond_the_paper(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes that PyTorch keeps on a CPU and the formula does not count, for a model of the kind the formula is made for.

    Invariant: L layers of `korthikanti` and these lines are `activations(model, train)`, to the byte.
    """
    b, (s, h, a, L) = train.micro_batch, model.letters("s h a L")
    made_for = {
        "norm": "layernorm",
        "ffn": "gelu",
        "d_ff": 4 * h,
        "num_kv_heads": a,
        "d_head": h // a,
        "num_experts": 1,
    }
    odd = [
        f"{name}={getattr(model, name)!r}"
        for name, value in made_for.items()
        if getattr(model, name) != value
    ]
    odd += [
        f"{name}={getattr(train, name)!r}"
        for name, value in _RUN.items()
        if getattr(train, name) not in value
    ]
    odd += [] if model.dropout else ["dropout=0"]
    if odd:
        raise ValueError(
            f"the formula is not made for {', '.join(odd)}: memory.activations counts such a model as it is"
        )
    size = WIDTHS[train.precision]
    lines = [
        Line(
            "masks in two bytes, not one",
            L * (size - 1) * (2 * s * b * h + a * s * s * b),
            component="activations",
            note="2sbh + as²b a layer",
        ),
        Line(
            "mean and 1/σ of each token",
            L * 2 * 2 * s * b * size,
            component="activations",
            note="two LayerNorms a layer",
        ),
    ]
    outside = [line for line in activations(model, train) if not line.name.startswith("blocks.")]
    return Ledger([*lines, *outside])
