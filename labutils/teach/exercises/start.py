"""Tokens in a step, the step that runs out of memory, and a counter that counts too much."""

import functools

import torch
from torch import nn

from labutils import accumulation, measure, memory, units
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.teach.exercises import Exercise, Failed, Property


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and optimizer state that are alive now, each storage once."""
    return measure.model_states(model, optimizer).total


# --- checks ---


def _tokens(attempt, sizes: tuple[int, ...], told: str, slip: int, why: str, adds: str) -> None:
    """Raise Failed unless the tokens are right: `why` is for one slip, `adds` for all others."""
    got, right = attempt(*sizes), accumulation.tokens_per_step(*sizes)
    if got != right:
        message = f"{told}: you say {got!r} tokens, it is {right:,}"
        raise Failed(message, why if got == slip else adds)


def _one_rank(attempt) -> str:
    start = "Start from what one rank reads in one pass."
    why = "Eight samples are eight sequences; a language model learns from each of their tokens."
    _tokens(attempt, (8, 1, 1, 1024), "8 sequences of 1,024 tokens on one rank", 8, why, start)
    return "8 × 1,024 tokens"


def _accumulated(attempt) -> str:
    why = (
        "Did you leave out gradient accumulation? "
        "The optimizer steps once after all accumulated micro-batches."
    )
    told = "4 micro-batches of 2 sequences, 4,096 tokens each"
    _tokens(attempt, (2, 4, 1, 4096), told, 8192, why, "Every micro-batch adds the same.")
    return "4 accumulated micro-batches"


def _many_ranks(attempt) -> str:
    why = (
        "Data-parallel ranks read different sequences, "
        "and one optimizer step learns from all of them."
    )
    for dp in (2, 128, 512):
        told = f"the same on {dp} data-parallel ranks"
        _tokens(attempt, (2, 4, dp, 4096), told, 32768, why, "Every rank adds the same.")
    return "up to 512 ranks, 16.8 million tokens"


_DEEP = dict(weights=1, state=2, working=20, temporary=1)  # MB; activations dominate
_WIDE = dict(weights=1, state=2, working=0.5, temporary=1)  # the model states do
_SGD = dict(weights=1, state=0, working=20, temporary=0)


def _expect(attempt, expected: int | None, why: str, capacity: int, **case: int) -> None:
    got = attempt(**case, capacity=capacity)
    if got != expected:
        amounts = dict(case, capacity=capacity).items()
        told = ", ".join(f"{name} {units.text(amount)}" for name, amount in amounts)
        said = {"None": "no step fails", "1": "step 1 fails", "2": "step 2 fails"}
        raise Failed(
            f"{told}: you say {said.get(repr(got), repr(got))}, but {said[repr(expected)]}", why
        )


def _megabytes(
    attempt, case: dict[str, float], capacity: float, expected: int | None, why: str
) -> None:
    sizes = {name: int(amount * units.MB) for name, amount in case.items()}
    _expect(attempt, expected, why, int(capacity * units.MB), **sizes)


def _roomy(attempt) -> str:
    why = (
        "Peaks do not add up: activations are gone when the optimizer steps, "
        "and when they are fullest there is hardly a gradient yet."
    )
    _megabytes(attempt, _DEEP, 23.5, None, why)
    why = "A peak of exactly the capacity still fits: a step fails when it needs *more*."
    _megabytes(attempt, _DEEP, 23, None, why)
    return "exactly enough is enough"


def _activations_first(attempt) -> str:
    why = (
        "Activations alone, on top of the weights, are more than there is: "
        "even the first backward pass does not fit."
    )
    _megabytes(attempt, _DEEP, 20, 1, why)
    why = (
        "When is optimizer state allocated? Not before the first step() asks for it: "
        "the first backward pass runs without it, the second with it."
    )
    _megabytes(attempt, _DEEP, 22, 2, why)
    return "a capacity below both peaks, and one between them"


def _optimizer_first(attempt) -> str:
    why = (
        "The optimizer's own step is a peak too: weights, gradients, state and its temporary "
        "tensors are alive together, in step 1 already."
    )
    for capacity, expected in ((4, 1), (4.5, 1), (5, None)):
        _megabytes(attempt, _WIDE, capacity, expected, why)
    return "a model whose states outweigh its activations"


def _no_state(attempt) -> str:
    why = "Plain SGD keeps no state, so its second step needs what its first one needed."
    for capacity, expected in ((20, 1), (21, None)):
        _megabytes(attempt, _SGD, capacity, expected, why)
    return "plain SGD"


def _trained(batch: int):
    generator = torch.Generator().manual_seed(0)
    gpt = GPT(
        ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=64, vocab_size=32, seq_len=16),
        generator=generator,
    )
    optimizer = torch.optim.AdamW(gpt.parameters(), foreach=True)
    tokens = torch.randint(32, (batch, 16), generator=generator)

    def step() -> None:
        gpt.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return gpt, optimizer, step


@functools.cache
def _run(batch: int) -> tuple[dict[str, int], tuple[int, int]]:
    """The measured arguments of `memory.first_failing_step` and the measured peaks of two steps."""
    gpt, optimizer, step = _trained(batch)
    first, second = (measure.history(step, gpt, optimizer) for _ in range(2))
    weights, state = (
        measure.model_states(gpt, optimizer).by("component")[part]
        for part in ("weights", "optimizer")
    )
    working = max(first.phases[phase].ledger.total for phase in ("forward", "backward")) - weights
    temporary = first.phases["optimizer"].ledger.total - 2 * weights - state
    return dict(weights=weights, state=state, working=working, temporary=temporary), (
        first.peak.ledger.total,
        second.peak.ledger.total,
    )


def _real(attempt) -> str:
    cases = 0
    for batch in (1, 2, 32):
        case, (first, second) = _run(batch)
        for capacity in sorted({first - 1, first, (first + second) // 2, second - 1, second}):
            failing = [k for k, peak in enumerate((first, second), 1) if peak > capacity]
            why = (
                f"Measured on a small GPT with a batch of {batch}: "
                f"its steps peaked at {first:,} and {second:,} bytes."
            )
            _expect(attempt, failing[0] if failing else None, why, capacity, **case)
            cases += 1
    return f"{cases} capacities, measured on a real GPT"


def _adam(tied: bool, dtype: torch.dtype = torch.float32, stepped: bool = True):
    config = ModelConfig(
        num_layers=1, d_model=8, num_heads=2, d_ff=32, vocab_size=20, seq_len=4, tied=tied
    )
    gpt = GPT(config).to(dtype)
    if tied:
        gpt.head.weight = gpt.tokens.weight
    optimizer = torch.optim.AdamW(gpt.parameters())
    if stepped:
        tokens = torch.zeros(1, 4, dtype=torch.long)
        gpt.loss(tokens, tokens).backward()
        optimizer.step()
    return gpt, optimizer


def _counted(
    attempt, gpt: GPT, optimizer: torch.optim.Optimizer, what: str, hints: dict[int, str]
) -> str:
    ledger = measure.model_states(gpt, optimizer)
    got = attempt(gpt, optimizer)
    if got != ledger.total:
        off = got - ledger.total if isinstance(got, int) else 0
        parts = ", ".join(f"{name} {amount:,}" for name, amount in ledger.by("name").items())
        direction = f": {abs(off):,} too {'many' if off > 0 else 'few'}" if off else ""
        raise Failed(
            f"{what}: you count {got!r} bytes, {ledger.total:,} are alive{direction}",
            hints.get(off, f"Alive are: {parts}."),
        )
    return f"{ledger.total:,} bytes"


def _untied(attempt) -> str:
    gpt, optimizer = _adam(tied=False)
    psi, tensors = gpt.config.num_params, len(list(gpt.parameters()))
    hints = {
        -4
        * tensors: f"{tensors} tensors, 4 bytes each: Adam keeps a step counter with every tensor.",
        -4 * psi: (
            "4 bytes for each parameter: are the gradients in your count, or one of Adam's two "
            "moments missing?"
        ),
    }
    return _counted(attempt, gpt, optimizer, "an untied GPT after one step", hints)


def _before(attempt) -> str:
    gpt, optimizer = _adam(tied=False, stepped=False)
    why = (
        "Nothing has been trained yet: gradients come with the first backward(), Adam's state "
        "with the first step(). Count what is there, not what will be."
    )
    psi, tensors = gpt.config.num_params, len(list(gpt.parameters()))
    return _counted(
        attempt,
        gpt,
        optimizer,
        "before the first step",
        {12 * psi + 4 * tensors: why, 12 * psi: why, 8 * psi: why, 4 * psi: why},
    )


def _tied(attempt) -> str:
    gpt, optimizer = _adam(tied=True)
    embedding = gpt.tokens.weight.numel()
    why = (
        "Which tensor takes exactly that much, with its gradient and its state? "
        "And how often does your count meet it?"
    )
    return _counted(
        attempt,
        gpt,
        optimizer,
        "a GPT as GPT-2 has it",
        {16 * embedding + 4: why, 16 * embedding: why, 4 * embedding: why},
    )


def _bf16(attempt) -> str:
    gpt, optimizer = _adam(tied=True, dtype=torch.bfloat16)
    psi = gpt.config.num_params
    why = "A bf16 parameter takes 2 bytes, not 4: ask each tensor for its own size."
    return _counted(attempt, gpt, optimizer, "the same GPT in bf16", {8 * psi: why})


EXERCISES = (
    Exercise(
        id="start/tokens-per-step",
        title="Tokens in one step",
        minutes=4,
        difficulty=1,
        proves="you can turn a batch in samples into a batch in tokens",
        reference=accumulation.tokens_per_step,
        properties=(
            Property("one rank", _one_rank),
            Property("accumulation", _accumulated),
            Property("many ranks", _many_ranks),
        ),
        hints=(
            "How many sequences does one rank read before the optimizer steps?",
            "Sequences in a micro-batch, times micro-batches, times ranks; then tokens in each.",
        ),
    ),
    Exercise(
        id="start/first-failing-step",
        title="Which step runs out of memory?",
        minutes=10,
        difficulty=2,
        proves="you know what is alive when, and why a first step that succeeds promises nothing",
        reference=memory.first_failing_step,
        properties=(
            Property("enough memory", _roomy),
            Property("activations dominate", _activations_first),
            Property("model states dominate", _optimizer_first),
            Property("an optimizer without state", _no_state),
            Property("a real run", _real),
        ),
        hints=(
            "Write down what is alive at two moments: when activations are fullest, and while the "
            "optimizer steps.",
            "In step 1 these are weights + working, and weights + gradients + state + temporary. "
            "Which of the two changes in step 2, and by what?",
            "From step 2 on, the state is there during forward and backward as well: "
            "weights + state + working.",
        ),
    ),
    Exercise(
        id="start/bug-hunt-state-bytes",
        title="Bug hunt: a counter that counts too much",
        untouched="6d01d7d9",
        minutes=8,
        difficulty=2,
        proves="you count memory by what is alive, not by a formula",
        reference=state_bytes,
        properties=(
            Property("after one step", _untied),
            Property("before the first step", _before),
            Property("another model", _tied),
            Property("the same in bf16", _bf16),
        ),
        hints=(
            "GPT-2 has one thing that the first model of the check has not: "
            "`ModelConfig` calls it tied. What does it mean for the tensors?",
            "Print `[name for name, p in model.named_parameters(remove_duplicate=False) "
            "if p is model.tokens.weight]`: how many modules hold the embedding?",
            "model.parameters() hands out every parameter once, however many modules hold it.",
        ),
    ),
)
