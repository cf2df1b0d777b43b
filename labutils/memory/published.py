"""Korthikanti's formula for activations, line by line, and what PyTorch keeps beyond it: every byte
of the difference has a name."""

from labutils import units
from labutils.anatomy import WIDTHS
from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory.activations import activations

# The paper's lines: how many bytes of which product, and whether tensor parallelism divides them.
_PAPER = (
    ("inputs of the two LayerNorms", 4, "sbh", False),
    ("inputs of attention and feed-forward", 4, "sbh", False),
    ("dropout masks after them", 2, "sbh", False),
    ("queries, keys and values", 6, "sbh", True),
    ("input of the output projection", 2, "sbh", True),
    ("input of GELU and its output", 16, "sbh", True),
    ("softmax, and after dropout", 4, "as²b", True),
    ("dropout mask of the scores", 1, "as²b", True),
)


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

    >>> b, s, h, a, N_t = 1, 2048, 12288, 96, 8
    >>> layer = dict(b=b, s=s, h=h, a=a)
    >>> korthikanti(**layer).total == s * b * h * (34 + 5 * a * s / h)  # one device
    True
    >>> kept = korthikanti(**layer, t=N_t).total
    >>> kept == s * b * h * (10 + 24 / N_t + 5 * a * s / (h * N_t))  # tensor parallelism
    True
    >>> kept = korthikanti(**layer, t=N_t, sequence=True).total
    >>> kept == s * b * h / N_t * (34 + 5 * a * s / h)  # with sequence parallelism
    True
    >>> kept = korthikanti(**layer, t=N_t, sequence=True, checkpointing="selective").total
    >>> kept == 34 * s * b * h / N_t  # both, and selective recomputation
    True
    >>> korthikanti(**layer, checkpointing="full").total == 2 * s * b * h  # full recomputation
    True

    Raises ValueError for an unknown checkpointing, and where t divides not s or a.
    Source: Korthikanti et al. 2205.05198, section 4.1, equations 1 to 6 and table 2.
    """
    sizes = {"b": b, "s": s, "h": h, "a": a, "t": t}
    b, s, h, a, t = (units.whole(value, name, 1) for name, value in sizes.items())
    if checkpointing not in ("none", "selective", "full"):
        choices = "use 'none', 'selective' or 'full'"
        raise ValueError(f"checkpointing={checkpointing!r} is unknown: {choices}")
    if sequence and s % t:
        raise ValueError(f"{t} ranks do not divide {s} tokens evenly: choose a divisor")
    if a % t:
        raise ValueError(f"tp={t} does not divide num_heads={a}: choose a divisor")
    products = {"sbh": s * b * h, "as²b": a * s * s * b}
    if checkpointing == "full":
        return Ledger([Line("input of the layer", 2 * s * b * h, "activations", note="2sbh")])
    lines = []
    for name, factor, product, divided in _PAPER:
        if checkpointing == "selective" and product == "as²b":
            continue
        nbytes = factor * products[product] // (t if divided or sequence else 1)
        note = f"{factor}{product}" if factor > 1 else product
        lines.append(Line(name, nbytes, "activations", note=note))
    return Ledger(lines)


def beyond_the_paper(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes that PyTorch keeps on a CPU and the formula does not count, for a model of the kind the
    formula is made for.

    Invariant: L layers of `korthikanti` and these lines are `activations(model, train)`, to the
    byte.
    Raises ValueError for a model of another kind.
    """
    b, (s, h, a, L) = train.micro_batch, model.letters("s h a L")
    made_for = {
        "norm": "layernorm", "ffn": "gelu", "d_ff": 4 * h, "num_kv_heads": a, "d_head": h // a,
        "num_experts": 1, "autocast": False, "attention": "plain", "checkpointing": "none",
    }  # fmt: skip
    given = vars(model) | vars(train)
    odd = [f"{name}={given[name]!r}" for name, only in made_for.items() if given[name] != only]
    odd += ["precision='fp32'"] * (train.precision == "fp32") + ["dropout=0"] * (not model.dropout)
    if odd:
        so = "memory.activations counts such a model as it is"
        raise ValueError(f"the formula is not made for {', '.join(odd)}: {so}")
    size = WIDTHS[train.precision]
    masks = L * (size - 1) * (2 * s * b * h + a * s * s * b)
    statistics = L * 2 * 2 * s * b * size
    layers = {
        "masks in two bytes, not one": (masks, "2sbh + as²b a layer"),
        "mean and 1/σ of each token": (statistics, "two LayerNorms a layer"),
    }
    lines = [Line(name, n, "activations", note=note) for name, (n, note) in layers.items()]
    outside = [line for line in activations(model, train) if not line.name.startswith("blocks.")]
    return Ledger([*lines, *outside])
