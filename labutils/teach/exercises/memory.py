"""Count a config.json's parameters, predict what attention keeps, find the fullest moment, break up
a device's memory."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

import torch

from labutils import measure, memory, units
from labutils.config import ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.teach.exercises import Exercise, Failed, Property


def count_parameters(config: Mapping[str, Any]) -> int:
    """Parameters of the model that a Llama-like config.json describes, exact.

    >>> count_parameters(LLAMA_3)
    8030261248
    """
    h, f = config["hidden_size"], config["intermediate_size"]
    v, L = config["vocab_size"], config["num_hidden_layers"]
    a = config["num_attention_heads"]
    g, d = config.get("num_key_value_heads", a), h // a
    bias = (a + 2 * g) * d if config["model_type"] == "qwen2" else 0
    attention = h * (a + 2 * g) * d + bias + a * d * h
    layer = attention + 3 * h * f + 2 * h
    return v * h * (1 if config["tie_word_embeddings"] else 2) + L * layer + h


def saved_by_attention(b: int, s: int, h: int, a: int, g: int, size: int) -> int:
    """Bytes that plain causal attention keeps for its backward pass, without dropout.

    It has a query heads and g key–value heads; a number has `size` bytes.

    >>> saved_by_attention(b=1, s=8, h=16, a=4, g=4, size=4) == 4 * (5 * 8 * 16 + 4 * 8 * 8)
    True
    """
    d = h // a
    return size * (s * b * h + s * b * h + 2 * s * b * g * d + a * s * s * b + s * b * h)


def fullest_moment(
    parameters: int, activations: int, logits: int, stepping: str
) -> tuple[str, int]:
    """The phase of the fullest moment of a step in bf16 with fp32 master weights and AdamW, and
    the bytes alive then.

    parameters: how many the model has
    activations: bytes kept for the backward pass, at the end of the forward pass
    logits: bytes of one tensor of a score for each token and word
    stepping: "foreach", or "fused"

    >>> fullest_moment(10, 1000, 50, "fused")
    ('backward', 1240)
    """
    after_the_loss = (2 + 12) * parameters + activations + 2 * logits
    updating = (2 + 2 + 4 + 12 + (4 if stepping == "foreach" else 0)) * parameters
    return max(("backward", after_the_loss), ("optimizer", updating), key=lambda moment: moment[1])


def fragment(gpu: memory.Allocator) -> None:
    """Leave an empty device with nearly all of its memory free, and unable to hand out 20 MiB.

    512 bytes stay in each segment for small requests; what filled the rest of it goes.

    >>> gpu = memory.Allocator(80 * units.MIB)
    >>> fragment(gpu)
    >>> gpu.allocated, gpu.reserved // units.MIB
    (20480, 80)
    """
    go = []
    while gpu.available >= 2 * units.MIB:
        gpu.alloc(512)
        go += [gpu.alloc(units.MIB), gpu.alloc(units.MIB - 512)]
    for address in go:
        gpu.free(address)


LLAMA_3 = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
    num_key_value_heads=8, num_hidden_layers=32, vocab_size=128256,
    max_position_embeddings=131072, tie_word_embeddings=False,
)  # fmt: skip
_LLAMA_2 = {key: value for key, value in LLAMA_3.items() if key != "num_key_value_heads"} | dict(
    intermediate_size=11008, vocab_size=32000
)
_QWEN_SMALL = dict(
    model_type="qwen2", hidden_size=896, intermediate_size=4864, num_attention_heads=14,
    num_key_value_heads=2, num_hidden_layers=24, vocab_size=151936,
    max_position_embeddings=32768, tie_word_embeddings=True,
)  # fmt: skip
_QWEN_7B = _QWEN_SMALL | dict(
    hidden_size=3584, intermediate_size=18944, num_attention_heads=28, num_key_value_heads=4,
    num_hidden_layers=28, vocab_size=152064, tie_word_embeddings=False,
)  # fmt: skip

# ── parameters ───────────────────────────────────────────────────────────────────────────────────


def _miscounts(model: ModelConfig) -> dict[int, str]:
    """What it usually means to count so many parameters too many."""
    h, f, a, g, d, v, L = model.letters("h f a g d v L")
    queries, keys, values = a * d * L, g * d * L, g * d * L
    norms = (2 * L + 1) * h
    return {
        2 * h * (d * L - keys): (
            "One head of keys and values is too few here. A file without num_key_value_heads means "
            "as many as there are query heads."
        ),
        v: "The head has no bias: vh numbers, and no more.",
        2 * h * (queries - keys): (
            "Every query head got a key and a value head of its own. "
            "How many does num_key_value_heads give?"
        ),
        v * h * model.tied: (
            "The head counts once more than it should: "
            "with tie_word_embeddings it is the embedding itself."
        ),
        -v * h: (
            "The head is missing, or the embedding: "
            "without tie_word_embeddings they are two matrices of the same size."
        ),
        -h * f * L: "A SwiGLU layer has three matrices: gate, up and down.",
        -(queries + keys + values): (
            "Qwen2 has a bias on queries, keys and values, although config.json does not say so."
        ),
        -h * queries: (
            "Attention has four matrices: "
            "behind queries, keys and values there is the output projection."
        ),
        -(keys + values): "Qwen2 has a bias on keys and values as well as on queries.",
        queries + keys + values: "Only Qwen2 has biases: model_type says which model it is.",
        queries: (
            "In each layer h numbers too many: it has two norms, and no bias on the output "
            "projection."
        ),
        -norms: "Norms have weights: two in every layer, one at the end.",
        h - norms: "Norms have weights: two in every layer, one at the end.",
        norms: "A norm here is RMSNorm: a weight and no bias.",
        -h: "A last norm stands before the head.",
        -L * h: (
            "In each layer h numbers are missing: it has two norms"
            + (", and a bias on its queries." if model.bias == "qkv" else ".")
        ),
        model.seq_len * h: (
            "There is no table of positions: RoPE turns queries and keys and has no weights."
        ),
    } | _small_miscounts(model)


def _small_miscounts(model: ModelConfig) -> dict[int, str]:
    """What it usually means to count so many too many, where they are no matrix."""
    a, g, d, L = model.letters("a g d L")
    return {
        2 * (a - g) * d * L: (
            "A bias is as long as what it is added to: g·d numbers at the keys and at the values."
        ),
        **dict.fromkeys(
            (d // 2, L * d // 2),
            "The frequencies of RoPE are computed, not learned: a buffer, and no parameter.",
        ),
    }


def _counted(attempt: Callable, config: Mapping[str, Any], name: str) -> str:
    model = ModelConfig.from_hf(config)
    got, right = attempt(dict(config)), model.num_params
    if got == right:
        return name
    if not isinstance(got, Integral) and not (isinstance(got, float) and got.is_integer()):
        raise Failed(
            f"{name}: you return {got!r}",
            "Return the number of parameters itself: "
            "a whole number, not millions or billions of them.",
        )
    off = int(got) - right
    parts = ", ".join(f"{part} {n:,}" for part, n in model.parameters.items() if n)
    raise Failed(
        f"{name}: you count {int(got):,}, the model has {right:,} parameters, {abs(off):,} too "
        f"{'many' if off > 0 else 'few'}",
        _miscounts(model).get(off, f"Its parts: {parts}."),
    )


PARAMETERS = Exercise(
    id="memory/count-parameters",
    reference=count_parameters,
    properties=(
        Property("Llama 2 7B", _counted, config=_LLAMA_2, name="Llama 2 7B"),
        Property(
            "Llama 3.1 8B, with fewer key–value heads",
            _counted,
            config=LLAMA_3,
            name="Llama 3.1 8B",
        ),
        Property("Qwen2 0.5B, tied", _counted, config=_QWEN_SMALL, name="Qwen2 0.5B"),
        Property("Qwen2 7B", _counted, config=_QWEN_7B, name="Qwen2 7B"),
    ),
    hints=(
        "A layer: queries and output h·h, keys and values h·(g·d) each, three matrices of h·f, "
        "two norms of h. "
        "g is num_key_value_heads, or a where the file has none; d is h / a.",
        "Outside: the embedding v·h, a last norm h, and a head v·h unless it is tied. "
        "Qwen2 adds a bias of (a + 2g)·d to every layer.",
    ),
)

# ── attention ────────────────────────────────────────────────────────────────────────────────────

_SIZES = [
    dict(b=1, s=14, h=16, a=4, g=4),
    dict(b=3, s=10, h=16, a=4, g=4),
    dict(b=2, s=12, h=16, a=4, g=2),
    dict(b=1, s=32, h=24, a=6, g=1),
]


@functools.cache
def _measured(b: int, s: int, h: int, a: int, g: int, size: int) -> int:
    """Bytes that the attention of a GPT really keeps."""
    config = ModelConfig(
        num_layers=1, d_model=h, num_heads=a, num_kv_heads=g, d_ff=h, vocab_size=5, seq_len=s
    )
    attention = GPT(config).blocks[0].attention.to({4: torch.float32, 2: torch.bfloat16}[size])
    x = torch.ones(b, s, h, dtype=attention.query.weight.dtype, requires_grad=True)
    return measure.saved_activations(lambda: attention(x), attention).total


_MASK = "The causal mask need not be kept: it is added, and adding reads nothing."


def _misread(right: int, b: int, s: int, h: int, a: int, g: int, size: int) -> dict[int, str]:
    """What it usually means to predict so many bytes too many."""
    sbh, scores, narrow = size * s * b * h, size * a * s * s * b, size * s * b * (h // a) * g
    masks = (count * s * s for count in (1, b, b * a, size, size * b))  # of bytes, or of numbers
    return {
        **dict.fromkeys(masks, _MASK),
        size * a * b * s - scores: (
            "A number for each row of the scores is what fused attention keeps (lab 06). Plain "
            "attention keeps the softmax itself, as²b."
        ),
        right // b - right: "Every tensor has b sequences.",
        sbh: (
            "One tensor of sbh too many: what the output projection makes is not kept, "
            "for nothing in attention reads it again."
        ),
        scores: "Softmax needs its output, not its input: one s×s matrix a head, in `size` bytes.",
        2 * (sbh - narrow): "Keys and values have g heads, not a.",
        2 * sbh: "Queries, keys and values read the same tensor. It is kept once.",
        -sbh: (
            "Three tensors of sbh are kept: "
            "the common input, the queries, and what the output projection reads."
        ),
        -2 * narrow: (
            "The two matrix products need both factors: "
            "keys and values are kept as well as queries."
        ),
        -scores: (
            "The weights after softmax are kept: "
            "softmax needs them, and so does the product with the values."
        ),
        right: (
            "Twice as much: `size` is the bytes of a number. Do you count four where there are two?"
        ),
        right // size - right: "You count numbers. How many bytes has each?",
        -scores // 2: (
            "The mask makes half of the scores 0, but an s×s matrix keeps its zeros as well."
        ),
        scores // a - scores: "Every head has an s×s matrix of its own.",
        scores // b - scores: "Each sequence has scores of its own: they are as²b.",
        scores // a * g - scores: (
            "Every query head has an s×s matrix of its own, also those that share a key."
        ),
        size * (2 * h * h + 2 * h * (h // a) * g): (
            "Weights are there anyway, whatever is computed: "
            "they are model states, not activations."
        ),
        11 * s * b * h + 5 * a * s * s * b - right: (
            "That is the paper's line for attention, 11sbh + 5as²b: "
            "it counts dropout, and two bytes a number."
        ),
    }


def _agrees(attempt: Callable, sizes: dict[str, int], size: int) -> None:
    got, right = attempt(**sizes, size=size), _measured(**sizes, size=size)
    if got == right:
        return
    told = ", ".join(f"{name} = {value}" for name, value in sizes.items())
    off = None
    why = (
        "Go through the forward pass: "
        "which tensors does the backward pass of each product and of softmax read?"
    )
    if isinstance(got, Integral):
        off = int(got) - right
        why = _misread(right, **sizes, size=size).get(off, why)
    raise Failed(
        f"{told}, {size} bytes a number: you predict {got!r} B, autograd keeps {right:,} B"
        + (f" ({off:+,})" if off else ""),
        why,
    )


def _agree(attempt: Callable, cases: list[dict[str, int]], size: int = 4) -> str:
    for sizes in cases:
        _agrees(attempt, sizes, size)
    return f"{len(cases)} measured"


SAVED = Exercise(
    id="memory/saved-by-attention",
    reference=saved_by_attention,
    properties=(
        Property("as many key–value heads as heads", _agree, cases=_SIZES[:2]),
        Property("grouped heads", _agree, cases=_SIZES[2:]),
        Property("bf16", _agree, cases=_SIZES, size=2),
    ),
    hints=(
        "y = W·x needs x for the gradient of W. C = A·B needs A and B. softmax needs its output. "
        "Adding the causal mask and dividing by a number need nothing.",
        "Kept are: x, q, k, v, the softmax, and the input of the output projection. "
        "Which of them have g heads, and which have s×s entries?",
    ),
)

# ── the fullest moment ───────────────────────────────────────────────────────────────────────────

_STEPS = [  # model, tokens in a sequence, sequences, stepping
    ("gpt2-xl", 1024, 1, "fused"),
    ("gpt2-xl", 1024, 1, "foreach"),
    ("gpt2-xl", 1024, 5, "foreach"),
    ("gpt2-xl", 1024, 5, "fused"),
    ("gpt2-xl", 1024, 32, "foreach"),
    ("llama-3.1-8b", 4096, 8, "fused"),
]


@functools.cache
def _predicted(name: str, tokens: int, batch: int, stepping: str) -> tuple[tuple, memory.Peak]:
    """What an attempt is asked at a setting, and what is predicted there operation by operation."""
    model = dataclasses.replace(ModelConfig.named(name), seq_len=tokens)
    train = TrainConfig(micro_batch=batch, global_batch=batch, attention="sdpa", stepping=stepping)
    kept = memory.activations(model, train).total
    asked = model.num_params, kept, 2 * batch * tokens * model.vocab_size, stepping
    return asked, memory.peak(model, train)


def _why_not_fullest(
    parameters: int, activations: int, logits: int, stepping: str
) -> dict[int, str]:
    """What it usually means to find so many bytes."""
    extra = 4 * parameters * (stepping == "foreach")
    loss, updating = 14 * parameters + activations, 20 * parameters
    working = (
        "The optimizer steps the fp32 master weights: during its step there is an fp32 copy of all "
        "gradients beside the half-precision ones, four bytes per parameter."
    )
    return {
        16 * parameters + activations: (
            "You add up what is never there together. When the activations are complete there is "
            "no gradient yet; when all gradients are there the activations are gone."
        ),
        16 * parameters + activations + 2 * logits: (
            "Gradients of weights come one by one in the backward pass: right after the loss there "
            "is none."
        ),
        loss: (
            "After the loss two gradients of the log-probabilities are alive beside them: each is "
            "as large as the logits."
        ),
        loss + logits: (
            "The gradient that comes in and the gradient that goes out are both alive while the "
            "softmax goes backward: two times the logits."
        ),
        28 * parameters: "foreach has one working copy in fp32, not two: four bytes per parameter.",
        22 * parameters + extra: (
            "The weights themselves are bf16, two bytes: their fp32 copy is among the twelve of "
            "the optimizer."
        ),
        updating + extra + activations: (
            "In the optimizer's step no activation is left: the backward pass is over."
        ),
        updating + activations + 2 * logits: (
            "In the optimizer's step no activation is left: these are two moments, not one."
        ),
        16 * parameters: working,
        16 * parameters + extra: working,
        20 * parameters if extra else 24 * parameters: (
            "foreach steps all weights at once and needs a working copy of them, four bytes per "
            "parameter more; fused does it in the kernel."
        ),
    }


_UNITS = units.KB, units.KIB, units.MB, units.MIB, units.GB, units.GIB
_PHASES = ("forward", "backward", "optimizer")


def _phase(said: Any) -> str:
    """The phase that is meant, such as "optimizer" by "the optimizer step" and by "update"."""
    words = str(said).strip().lower()
    named = [phase for phase in _PHASES if phase in words]
    if not named and ("update" in words or "step" in words):
        return "optimizer"
    return named[0] if len(named) == 1 else words


def _fullest(attempt: Callable, setting: tuple[str, int, int, str]) -> None:
    asked, peak = _predicted(*setting)
    name, tokens, batch, stepping = setting
    what = f"{name}, {batch} × {tokens} tokens, {stepping}"
    got = attempt(*asked)
    try:
        phase, found = got
        near = math.isclose(found := float(found), peak.total, rel_tol=1e-3)
    except (TypeError, ValueError):
        raise Failed(
            f"{what}: you return {got!r}",
            'Return two things: "forward", "backward" or "optimizer", and the bytes.',
        ) from None
    phase = _phase(phase)
    if near and phase == peak.phase:
        return
    if any(math.isclose(found * unit, peak.total, rel_tol=1e-3) for unit in _UNITS):
        raise Failed(
            f"{what}: you return {found:g}",
            "Bytes are asked for, not thousands, millions or billions of them.",
        )
    why = _why_not_fullest(*asked).get(
        round(found),
        "Write down two moments: right after the loss, and in the middle of the optimizer's step. "
        "Which tensors are there? Return the larger sum.",
    )
    if near and peak.phase == "optimizer":
        why = "Those bytes are there while the optimizer steps: the backward pass is over."
    elif near:
        why = (
            "The log-probabilities' gradients belong to the backward pass: it has begun when they "
            "are made."
        )
    right = f"{units.text(peak.total)} in the {peak.phase}"
    seen = f"you find {units.text(found)} in the {phase}"
    seen += f": so many it is, but in the {peak.phase}" if near else f", it is {right}"
    raise Failed(f"{what}: {seen}", why)


def _fullest_at(attempt: Callable, settings: slice) -> str:
    for setting in _STEPS[settings]:
        _fullest(attempt, setting)
    return f"{len(_STEPS[settings])} steps"


FULLEST = Exercise(
    id="memory/bug-hunt-peak",
    untouched="b6728bce",
    reference=fullest_moment,
    properties=(
        Property("one sequence, fused", _fullest_at, settings=slice(1)),
        Property("one sequence, foreach", _fullest_at, settings=slice(1, 3)),
        Property("more sequences", _fullest_at, settings=slice(3, 6)),
    ),
    hints=(
        "Two moments can be the fullest: right after the loss, and inside the optimizer's step. "
        "Which of weights, gradients, optimizer state and activations are alive at each?",
        "After the loss: weights, optimizer state, activations, and two gradients of the size of "
        "the logits. No gradient of a weight is there yet.",
        "In the optimizer's step: 2 + 2 + 12 bytes per parameter, an fp32 copy of the gradients, "
        "and with foreach one more copy in fp32. No activation is left.",
    ),
)

# ── memory in pieces ─────────────────────────────────────────────────────────────────────────────

_ASKED = 20 * units.MIB
_DEVICES = 80 * units.MIB, 130 * units.MIB


def _mib(nbytes: int) -> str:
    return units.text(nbytes, binary=True)


def _why_it_fits(gpu: memory.Allocator) -> str:
    """Where a device that an attempt has left finds room for a large request."""
    if gpu.available >= _ASKED:
        return (
            f"The device still has {_mib(gpu.available)} that no segment has taken. "
            "Go on while it has room for a segment: gpu.available says how much is left."
        )
    if gpu.largest_free >= _ASKED:
        return f"A free block has {_mib(gpu.largest_free)}: free neighbors join."
    return (
        "Before it gives up, the allocator hands back segments in which nothing is left, "
        "and takes a new one. In how many of yours did something stay?"
    )


def _left_by(attempt: Callable, free: float, why: str = "") -> str:
    """Hold an attempt against all devices: nothing large fits, and the share `free` is not used."""
    for capacity in _DEVICES:
        gpu = memory.Allocator(capacity)
        attempt(gpu)
        used, told = gpu.allocated, f"a device of {_mib(capacity)}"
        reason = _why_it_fits(gpu)
        try:
            gpu.alloc(_ASKED)
        except memory.OutOfMemory:
            if used <= (1 - free) * capacity:
                continue
            said = f"{_mib(used)} are in use, more than {1 - free:.0%} of it"
            raise Failed(f"{told}: 20 MiB are refused, and {said}", why) from None
        raise Failed(f"{told}: 20 MiB still fit, with {_mib(used)} in use", reason)
    return "devices of 80 and 130 MiB"


FRAGMENT = Exercise(
    id="memory/fragment",
    reference=fragment,
    properties=(
        Property("20 MiB are refused", _left_by, free=0),
        Property(
            "half is free",
            _left_by,
            free=0.5,
            why="That is a full device. Free most of what you have allocated, "
            "and leave something in every segment.",
        ),
        Property(
            "99 % are free",
            _left_by,
            free=0.99,
            why="What stays is too large for its segment: in one of 20 MiB more than 1 MiB has to. "
            "Which requests get segments of 2 MiB, and how little can stay in one?",
        ),
    ),
    hints=(
        "A segment goes back to the device only where nothing in it is in use. So something has to "
        "stay in each, and the device has to be full of segments before anything goes.",
        "Requests of up to 1 MiB share segments of 2 MiB: allocate what stays, then what fills the "
        "rest of the segment, and begin the next one. 512 bytes are the smallest block.",
    ),
)

EXERCISES = (PARAMETERS, SAVED, FULLEST, FRAGMENT)
