"""Wrong answers to the exercises of `memory`."""

from collections.abc import Callable, Mapping
from typing import Any

from labutils import memory, units
from labutils.config import ModelConfig
from labutils.teach.exercises import memory as exercises
from wrong_answers import Wrong


def _count(missing: Callable[[ModelConfig], int]) -> Callable[[Mapping[str, Any]], int]:
    """A wrong count: the right one plus what `missing` says."""
    return lambda config: (
        ModelConfig.from_hf(config).num_params + missing(ModelConfig.from_hf(config))
    )


def _larger(moments: Callable, first: str = "backward") -> Callable:
    """The larger of two moments; `first` is the phase of the one after the loss."""

    def fullest(*asked: Any) -> tuple[str, int]:
        after_the_loss, updating = moments(*asked)
        return max((after_the_loss, first), (updating, "optimizer"))[::-1]

    return fullest


def _working(stepping: str) -> int:
    """Bytes per parameter in the optimizer's step."""
    return 24 if stepping == "foreach" else 20


def _fills(
    stays: int, goes: tuple[int, ...], segment: int, upto: int = 2**60, free: bool = True
) -> Callable[[memory.Allocator], None]:
    """Allocate what stays and what goes, segment after segment, then free what goes."""

    def fragment(gpu: memory.Allocator) -> None:
        going = []
        while gpu.available >= segment and gpu.reserved < upto:
            if stays:
                gpu.alloc(stays)
            going += [gpu.alloc(size) for size in goes]
        for address in going * free:
            gpu.free(address)

    return fragment


def _all_that_stays_first(gpu: memory.Allocator) -> None:
    for _ in range(40):
        gpu.alloc(512)
    _fills(0, (units.MIB, units.MIB), 2 * units.MIB)(gpu)


WRONG = {
    "memory/count-parameters": (
        Wrong(
            "three biases of h",
            _count(lambda m: 2 * (m.bias == "qkv") * (m.num_heads - m.num_kv_heads) * m.d_head * m.num_layers),
            "Qwen2 0.5B, tied",
            "as long as what it is added to",
        ),
        Wrong(
            "the frequencies of RoPE",
            _count(lambda m: m.d_head // 2),
            "Llama 2 7B",
            "computed, not learned",
        ),
        Wrong(
            "as many key–value heads as heads",
            _count(
                lambda m: 2 * m.d_model * (m.num_heads - m.num_kv_heads) * m.d_head * m.num_layers
            ),
            "Llama 3.1 8B, with fewer key–value heads",
            "key and a value head of its own",
        ),
        Wrong(
            "always an own head",
            _count(lambda m: m.vocab_size * m.d_model * m.tied),
            "Qwen2 0.5B, tied",
            "is the embedding itself",
        ),
        Wrong(
            "two matrices, as GELU has",
            _count(lambda m: -m.d_model * m.d_ff * m.num_layers),
            "Llama 2 7B",
            "three matrices",
        ),
        Wrong(
            "no bias at all",
            _count(
                lambda m: (
                    -(m.num_heads + 2 * m.num_kv_heads)
                    * m.d_head
                    * m.num_layers
                    * (m.bias == "qkv")
                )
            ),
            "Qwen2 0.5B, tied",
            "bias on queries, keys and values",
        ),
        Wrong("no last norm", _count(lambda m: -m.d_model), "Llama 2 7B", "A last norm"),
        Wrong(
            "a table of positions",
            _count(lambda m: m.seq_len * m.d_model),
            "Llama 2 7B",
            "RoPE turns queries and keys",
        ),
        Wrong(
            "norms with a bias",
            _count(lambda m: (2 * m.num_layers + 1) * m.d_model),
            "Llama 2 7B",
            "a weight and no bias",
        ),
        Wrong(
            "no output projection",
            _count(lambda m: -m.num_layers * m.d_model**2),
            "Llama 2 7B",
            "four matrices",
        ),
        Wrong(
            "a bias on queries alone",
            _count(lambda m: -2 * m.num_kv_heads * m.d_head * m.num_layers * (m.bias == "qkv")),
            "Qwen2 0.5B, tied",
            "keys and values",
        ),
        Wrong(
            "biases in Llama too",
            lambda config: exercises.count_parameters(dict(config) | {"model_type": "qwen2"}),
            "Llama 2 7B",
            "Only Qwen2 has biases",
        ),
        Wrong(
            "in billions",
            lambda config: ModelConfig.from_hf(config).num_params / 1e9,
            "Llama 2 7B",
            "not millions or billions",
        ),
    ),
    "memory/saved-by-attention": (
        Wrong(
            "scores before and after softmax",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size) + size * a * s * s * b
            ),
            "as many key–value heads as heads",
            "its output, not its input",
        ),
        Wrong(
            "the input three times",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size) + 2 * size * s * b * h
            ),
            "as many key–value heads as heads",
            "It is kept once",
        ),
        Wrong(
            "forgets the output projection",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size) - size * s * b * h
            ),
            "as many key–value heads as heads",
            "what the output projection reads",
        ),
        Wrong(
            "a heads for keys and values",
            lambda b, s, h, a, g, size: exercises.saved_by_attention(b, s, h, a, a, size),
            "grouped heads",
            "have g heads, not a",
        ),
        Wrong(
            "half of the scores, because of the mask",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size) - size * a * s * s * b // 2
            ),
            "as many key–value heads as heads",
            "keeps its zeros",
        ),
        Wrong(
            "scores of key–value heads",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size) - size * (a - g) * s * s * b
            ),
            "grouped heads",
            "also those that share a key",
        ),
        Wrong(
            "the weights as well",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size)
                + size * (2 * h * h + 2 * h * (h // a) * g)
            ),
            "as many key–value heads as heads",
            "they are model states",
        ),
        Wrong(
            "the paper's formula",
            lambda b, s, h, a, g, size: 11 * s * b * h + 5 * a * s * s * b,
            "as many key–value heads as heads",
            "it counts dropout",
        ),
        Wrong(
            "numbers, not bytes",
            lambda b, s, h, a, g, size: exercises.saved_by_attention(b, s, h, a, g, 1),
            "as many key–value heads as heads",
            "You count numbers",
        ),
        Wrong(
            "the softmax in fp32",
            lambda b, s, h, a, g, size: (
                exercises.saved_by_attention(b, s, h, a, g, size) + (4 - size) * a * s * s * b
            ),
            "bf16",
            "in `size` bytes",
        ),
        Wrong(
            "always four bytes",
            lambda b, s, h, a, g, size: exercises.saved_by_attention(b, s, h, a, g, 4),
            "bf16",
            "bytes of a number",
        ),
    ),
    "memory/bug-hunt-peak": (
        Wrong(
            "in GB",
            lambda *asked: (lambda phase, nbytes: (phase, nbytes / 1e9))(
                *exercises.fullest_moment(*asked)
            ),
            "one sequence, fused",
            "Bytes are asked for",
        ),
        Wrong(
            "everything at once",
            lambda p, act, logits, how: ("forward", 16 * p + act),
            "one sequence, fused",
            "never there together",
        ),
        Wrong(
            "no fp32 gradients",
            _larger(lambda p, act, logits, how: (14 * p + act + 2 * logits, 16 * p)),
            "one sequence, fused",
            "fp32 copy of all gradients",
        ),
        Wrong(
            "foreach as fused",
            _larger(lambda p, act, logits, how: (14 * p + act + 2 * logits, 20 * p)),
            "one sequence, foreach",
            "working copy",
        ),
        Wrong(
            "fused as foreach",
            _larger(lambda p, act, logits, how: (14 * p + act + 2 * logits, 24 * p)),
            "one sequence, fused",
            "working copy",
        ),
        Wrong(
            "gradients after the loss",
            _larger(lambda p, act, logits, how: (16 * p + act + 2 * logits, _working(how) * p)),
            "one sequence, foreach",
            "there is none",
        ),
        Wrong(
            "one gradient of the logits",
            _larger(lambda p, act, logits, how: (14 * p + act + logits, _working(how) * p)),
            "more sequences",
            "comes in and the gradient that goes out",
        ),
        Wrong(
            "no gradient of the logits",
            _larger(lambda p, act, logits, how: (14 * p + act, _working(how) * p)),
            "more sequences",
            "two gradients of the log-probabilities",
        ),
        Wrong(
            "the optimizer, whatever the batch",
            lambda p, act, logits, how: ("optimizer", _working(how) * p),
            "more sequences",
            "Write down two moments",
        ),
        Wrong(
            "the right bytes, always in the backward pass",
            lambda *asked: ("backward", exercises.fullest_moment(*asked)[1]),
            "one sequence, fused",
            "the backward pass is over",
        ),
        Wrong(
            "in the forward pass",
            _larger(
                lambda p, act, logits, how: (14 * p + act + 2 * logits, _working(how) * p),
                "forward",
            ),
            "more sequences",
            "belong to the backward pass",
        ),
        Wrong(
            "the total alone",
            lambda p, act, logits, how: 16 * p + act,
            "one sequence, fused",
            "Return two things",
        ),
    ),
    "memory/fragment": (
        Wrong("nothing", lambda gpu: None, "20 MiB are refused", "no segment has taken"),
        Wrong(
            "everything freed",
            _fills(0, (5 * units.MIB,) * 4, 20 * units.MIB),
            "20 MiB are refused",
            "free neighbors join",
        ),
        Wrong(
            "one piece, freed",
            lambda gpu: gpu.free(gpu.alloc(gpu.capacity)),
            "20 MiB are refused",
            "free neighbors join",
        ),
        Wrong(
            "a device of 80 MiB",
            _fills(512, (units.MIB, units.MIB - 512), 2 * units.MIB, upto=80 * units.MIB),
            "20 MiB are refused",
            "gpu.available says",
        ),
        Wrong(
            "what stays in one segment",
            _all_that_stays_first,
            "20 MiB are refused",
            "did something stay",
        ),
        Wrong(
            "a full device",
            _fills(0, (5 * units.MIB,) * 4, 20 * units.MIB, free=False),
            "half is free",
            "a full device",
        ),
        Wrong(
            "every second one of 5 MiB",
            _fills(5 * units.MIB, (5 * units.MIB,), 20 * units.MIB),
            "99 % are free",
            "segments of 2 MiB",
        ),
        Wrong(
            "2 MiB in 20",
            _fills(2 * units.MIB, (18 * units.MIB,), 20 * units.MIB),
            "99 % are free",
            "segments of 2 MiB",
        ),
        Wrong(
            "the least that a segment of 20 MiB can hold",
            _fills(units.MIB + 512, (9 * units.MIB, 9 * units.MIB), 20 * units.MIB),
            "99 % are free",
            "segments of 2 MiB",
        ),
        Wrong(
            "64 KiB in 2 MiB",
            _fills(2**16, (units.MIB, units.MIB - 2**16), 2 * units.MIB),
            "99 % are free",
            "how little can stay",
        ),
    ),
}
