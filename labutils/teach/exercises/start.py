"""Tokens in a step, the peak of a step that accumulates, and a counter that counts too much."""

import functools
from collections.abc import Mapping
from numbers import Real

import torch
from torch import nn

from labutils import accumulation, measure, memory, units
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.teach.exercises import Exercise, Failed, Property, _clock


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


def _peaks(
    attempt, case: Mapping[str, float], peaks: dict[tuple[int, int], float], why: str
) -> str:
    """Hold the attempt against the peaks in MB of (step, micro-batches)."""
    sizes = {name: int(amount * units.MB) for name, amount in case.items()}
    for (step, micro_batches), peak in peaks.items():
        _peak(attempt, sizes, step, micro_batches, int(peak * units.MB), why)
    return f"{len(peaks)} peaks"


def _peak(
    attempt, sizes: dict[str, int], step: int, micro_batches: int, peak: int, why: str
) -> None:
    got = attempt(step, micro_batches, **sizes)
    if got != peak:
        told = ", ".join(f"{name} {units.text(amount)}" for name, amount in sizes.items())
        said = f"{got:,}" if isinstance(got, Real) else repr(got)
        asked = f"peak of step {step} with micro_batches={micro_batches}"
        raise Failed(f"{asked}, {told}: you say {said} bytes, it is {peak:,}", why)


def _first_step(attempt) -> str:
    why = (
        "Not everything is alive at once. Optimizer state is allocated by the first step(), and "
        "activations are gone by then."
    )
    large = _DEEP | {"temporary": 4}
    if attempt(1, 1, **{name: int(part * units.MB) for name, part in large.items()}) == 22e6:
        why = (
            "With one micro-batch no gradient lies under the hill: backward() makes them while the "
            "activations go, and zero_grad() let go of the last step's."
        )
    return _peaks(attempt, _DEEP, {(1, 1): 21}, why)


def _second_step(attempt) -> str:
    why = (
        "From step 2 on the optimizer's state lies under the forward and backward pass; plain SGD "
        "keeps none."
    )
    if attempt(2, 1, **{name: int(part * units.MB) for name, part in _DEEP.items()}) == 24e6:
        why = (
            "With one micro-batch no gradient lies under the hill, in later steps either: "
            "zero_grad() let go of the last step's."
        )
    _peaks(attempt, _DEEP, {(2, 1): 23, (7, 1): 23}, why)
    return _peaks(attempt, _SGD, {(1, 1): 21, (2, 1): 21}, why)


def _accumulating(attempt) -> str:
    why = (
        "backward() adds to the gradients that are there: from the second micro-batch on they lie "
        "under its forward pass, as many bytes as the weights, and nothing else is new there."
    )
    _peaks(attempt, _DEEP, {(1, 2): 22, (2, 2): 24}, why)
    return _peaks(attempt, _SGD, {(1, 2): 22, (3, 2): 22}, why)


def _many(attempt) -> str:
    why = (
        "All micro-batches share one set of gradients, and each frees its activations before the "
        "next one begins: eight hold no more than two."
    )
    return _peaks(attempt, _DEEP, {(1, 8): 22, (2, 8): 24, (3, 64): 24}, why)


def _updating(attempt) -> str:
    why = (
        "step() is a peak too: weights, one set of gradients, state and what it needs for a moment "
        "are alive together, in step 1 already."
    )
    return _peaks(attempt, _WIDE, {(1, 1): 5, (2, 1): 5, (1, 4): 5, (2, 4): 5}, why)


def _trained(name: str, batch: int):
    generator = torch.Generator().manual_seed(0)
    gpt = GPT(
        ModelConfig(num_layers=2, d_model=16, num_heads=2, d_ff=64, vocab_size=32, seq_len=16),
        generator=generator,
    )
    optimizer = getattr(torch.optim, name)(gpt.parameters(), foreach=True)
    tokens = torch.randint(32, (batch, 16), generator=generator)

    def step(micro_batches: int) -> None:
        for _ in range(micro_batches):
            gpt.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return gpt, optimizer, step


@functools.cache
def _run(name: str, batch: int) -> tuple[dict[str, int], dict[tuple[int, int], int]]:
    """The measured arguments of `memory.step_peak`, and the measured peaks of some steps."""
    gpt, optimizer, step = _trained(name, batch)
    first = measure.history(lambda: step(1), gpt, optimizer)
    held = measure.model_states(gpt, optimizer).by("component")
    weights, state = held["weights"], held.get("optimizer", 0)
    full = {phase: moment.ledger.total for phase, moment in first.phases.items()}
    sizes = dict(
        weights=weights,
        state=state,
        working=max(full["forward"], full["backward"]) - weights,
        temporary=full["optimizer"] - 2 * weights - state,
    )
    peaks = {(1, 1): first.peak.ledger.total}
    for micro_batches in (1, 3):
        later = measure.history(functools.partial(step, micro_batches), gpt, optimizer)
        peaks[2, micro_batches] = later.peak.ledger.total
    gpt, optimizer, step = _trained(name, batch)
    peaks[1, 2] = measure.history(lambda: step(2), gpt, optimizer).peak.ledger.total
    return sizes, peaks


def _real(attempt) -> str:
    count = 0
    for name, batch in (("AdamW", 2), ("AdamW", 32), ("SGD", 2)):
        with _clock.spared():
            sizes, peaks = _run(name, batch)
        why = f"Measured on a small GPT with {name} and micro-batches of {batch}."
        for (step, micro_batches), peak in peaks.items():
            _peak(attempt, sizes, step, micro_batches, peak, why)
            count += 1
    return f"{count} peaks, measured on a real GPT"


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
    attempt, net: nn.Module, optimizer: torch.optim.Optimizer, what: str, hints: dict[int, str]
) -> str:
    ledger = measure.model_states(net, optimizer)
    got = attempt(net, optimizer)
    if got != ledger.total:
        value = got.item() if getattr(got, "shape", None) == () else got  # of NumPy or torch
        off = int(float(value)) - ledger.total if isinstance(value, Real) else 0
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


def _partly_frozen(attempt) -> str:
    """A frozen embedding, and the rest in two groups."""
    gpt, optimizer = _adam(tied=False, stepped=False)
    embedding = gpt.tokens.weight.requires_grad_(False)
    optimizer.param_groups.clear()
    first, *others = (p for p in gpt.parameters() if p.requires_grad)
    optimizer.add_param_group({"params": [first]})
    optimizer.add_param_group({"params": others})
    tokens = torch.zeros(1, 4, dtype=torch.long)
    gpt.loss(tokens, tokens).backward()
    optimizer.step()
    frozen = "A frozen weight has no gradient and no state, and takes its own bytes all the same."
    hints = {
        -embedding.nbytes: frozen,
        2 * embedding.nbytes: frozen,
        3 * embedding.nbytes: frozen,
    }
    told = "a GPT with a frozen embedding, and two groups of parameters"
    return _counted(attempt, gpt, optimizer, told, hints)


def _two_layers(attempt) -> str:
    """Two layers that share a weight, and neither a head nor an embedding."""
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    net = nn.Sequential(first, second)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    why = "Any two modules may hold one tensor, not only a head and an embedding."
    shared = 16 * first.weight.numel() + 4
    return _counted(attempt, net, optimizer, "two layers that share a weight", {shared: why})


def _bf16(attempt) -> str:
    gpt, optimizer = _adam(tied=True, dtype=torch.bfloat16)
    psi = gpt.config.num_params
    why = "A bf16 parameter takes 2 bytes, not 4: ask each tensor for its own size."
    return _counted(attempt, gpt, optimizer, "the same GPT in bf16", {8 * psi: why})


EXERCISES = (
    Exercise(
        id="start/tokens-per-step",
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
        id="start/step-peak",
        reference=memory.step_peak,
        properties=(
            Property("the first step", _first_step),
            Property("later steps", _second_step),
            Property("two micro-batches", _accumulating),
            Property("many micro-batches", _many),
            Property("the update", _updating),
            Property("a real run", _real),
        ),
        hints=(
            "Write down what is alive at two moments: when the last micro-batch's activations are "
            "fullest, and while the optimizer steps.",
            "For one micro-batch the lab has both: weights + state (from step 2 on) + working, and "
            "weights + gradients + state + temporary. What else is alive under the second "
            "micro-batch?",
            "The gradients of the first: as many bytes as the weights, however many micro-batches "
            "have added to them.",
        ),
    ),
    Exercise(
        id="start/bug-hunt-state-bytes",
        untouched="6d01d7d9",
        reference=state_bytes,
        properties=(
            Property("after one step", _untied),
            Property("before the first step", _before),
            Property("another model", _tied),
            Property("the same in bf16", _bf16),
            Property("a frozen part", _partly_frozen),
            Property("any module", _two_layers),
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
