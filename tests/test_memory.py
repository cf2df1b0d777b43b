"""What is predicted is what is measured, to the byte."""

import functools
import gc
import random
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from labutils import accumulation, checkpointing, measure, memory, precision, predict
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.memory import formulas
from labutils.model import GPT
from labutils.timeline import History

PRECISIONS = [dict(precision="fp32"), dict(precision="bf16"), dict(precision="bf16", autocast=True)]


@st.composite
def models(draw):
    groups, experts = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 4]))
    heads, d_head = groups * draw(st.integers(1, 3)), draw(st.sampled_from([4, 6, 8]))
    return ModelConfig(
        num_layers=draw(st.integers(1, 2)), num_heads=heads, num_kv_heads=groups, d_head=d_head, d_model=draw(st.sampled_from([heads * d_head, 10])),
        d_ff=draw(st.sampled_from([7, 24])), vocab_size=draw(st.sampled_from([11, 30])), seq_len=draw(st.sampled_from([1, 2, 9])),
        ffn=draw(st.sampled_from(["gelu", "swiglu"])), norm=draw(st.sampled_from(["layernorm", "rmsnorm"])), positions=draw(st.sampled_from(["learned", "rope"])),
        bias=draw(st.sampled_from([True, False, "qkv"])), tied=draw(st.booleans()), dropout=draw(st.sampled_from([0.0, 0.1])),
        num_experts=experts, top_k=draw(st.integers(1, experts)), shared_expert=experts > 1 and draw(st.booleans()),
    )  # fmt: skip


def saved(config: ModelConfig, train: TrainConfig) -> Ledger:
    """What autograd really keeps; the experts of a layer under one name, since a router decides which of them keeps what."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[train.precision]
    model = GPT(config, attention=train.attention).to(torch.float32 if train.autocast else dtype)
    checkpointing.apply(model, train.checkpointing)
    tokens = torch.randint(config.vocab_size, (train.micro_batch, config.seq_len))
    targets = tokens.clone()

    def forward():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            return model.loss(tokens, targets)

    return Ledger(
        replace(line, name=re.sub(r"experts\.\d+", "experts", line.name))
        for line in measure.saved_activations(forward, model)
    )


@settings(max_examples=80, deadline=None)
@given(
    models(),
    st.integers(1, 3),
    st.sampled_from(["plain", "sdpa"]),
    st.sampled_from(PRECISIONS),
    st.sampled_from(checkpointing.POLICIES),
)
def test_every_saved_tensor_is_predicted(config, micro_batch, attention, precision, policy):
    train = TrainConfig(
        micro_batch=micro_batch,
        global_batch=micro_batch,
        attention=attention,
        checkpointing=policy,
        **precision,
    )
    diff = memory.activations(config, train).diff(saved(config, train))
    assert diff.unexplained == 0, str(diff)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@settings(max_examples=30, deadline=None)
@given(models(), st.sampled_from(sorted(OPTIMIZERS)))
def test_model_states_are_predicted(config, name):
    train = TrainConfig(micro_batch=2, global_batch=2, precision="fp32", optimizer=name)
    model = GPT(config)
    optimizer = OPTIMIZERS[name](model.parameters())
    for (
        parameter
    ) in model.parameters():  # every expert gets a gradient, whatever the router chooses
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    diff = predict.states(config, train).diff(measure.model_states(model, optimizer))
    assert diff.unexplained == 0, str(diff)


def test_model_states_of_mixtral_are_predicted():
    config, train = (
        ModelConfig.named("mixtral-8x7b"),
        TrainConfig(micro_batch=1, global_batch=1, precision="fp32"),
    )
    with FakeTensorMode():  # 747 GB
        model = GPT(config)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        diff = predict.states(config, train).diff(measure.model_states(model, optimizer))
    assert diff.unexplained == 0, str(diff)


# The peak


@st.composite
def trainings(draw):
    formats = draw(
        st.sampled_from(
            [*PRECISIONS, *(dict(precision="bf16", fp32_gradients=kept) for kept in (True, "only"))]
        )
    )
    micro_batch = draw(st.integers(1, 3))
    return TrainConfig(
        micro_batch=micro_batch, global_batch=micro_batch * draw(st.integers(1, 4)), attention=draw(st.sampled_from(["plain", "sdpa"])),
        checkpointing=draw(st.sampled_from(checkpointing.POLICIES)), optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
        stepping=draw(st.sampled_from(sorted(STEPPING))), **formats,
    )  # fmt: skip


STEPPING = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}


def step_of(config: ModelConfig, train: TrainConfig):
    """A training step as `train` says, its model and its optimizer."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[train.precision]
    half = train.precision != "fp32" and not train.autocast
    model = checkpointing.apply(
        GPT(config, attention=train.attention).to(dtype if half else torch.float32),
        train.checkpointing,
    )
    make = {
        "sgd": torch.optim.SGD,
        "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
    }
    inner = make[train.optimizer](model.parameters(), lr=1e-3, **STEPPING[train.stepping])
    optimizer = (
        precision.MasterWeights(inner, fp32_gradients=train.fp32_gradients) if half else inner
    )
    tokens = torch.randint(config.vocab_size, (train.global_batch, config.seq_len))
    targets = tokens.clone()

    def loss(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=train.autocast):
            return model.loss(*batch)

    def step():
        if train.global_batch == train.micro_batch:
            value = loss((tokens, targets))
            value.backward()
        else:
            value = accumulation.accumulate(
                loss, accumulation.micro_batches((tokens, targets), train.micro_batch)
            )
        optimizer.step()
        optimizer.zero_grad()

    return step, model, inner


def timeline(history: History, masters: bool = False) -> list:
    """Every operation and what is alive after it. What `MasterWeights` does around the optimizer's own step is in no phase of its own."""
    return [
        ("" if masters and m.phase != "backward" else m.phase, m.event, m.ledger.by("component"))
        for m in history.moments
    ]


@settings(max_examples=14, deadline=None)
@given(models(), trainings())
def test_every_moment_of_the_step_is_predicted(config, train):
    config = replace(config, num_experts=1, top_k=1, shared_expert=False)
    step, model, optimizer = step_of(config, train)
    step()  # the second step has the optimizer's state from the start
    masters = train.precision != "fp32" and not train.autocast
    predicted, measured = (
        timeline(memory.history(config, train), masters),
        timeline(measure.history(step, model, optimizer), masters),
    )
    first_difference = next(
        (pair for pair in zip(predicted, measured, strict=False) if pair[0] != pair[1]), None
    )
    assert first_difference is None and len(predicted) == len(measured)


@settings(max_examples=12, deadline=None)
@given(models(), trainings(), st.integers(0, 6))
def test_the_peak_is_that_of_the_timeline(config, train, more):
    """The timeline walks through every layer and micro-batch, the peak through those that stand for all."""
    config = replace(
        config, num_experts=1, top_k=1, shared_expert=False, num_layers=config.num_layers + more
    )
    peak, history = memory.peak(config, train), memory.history(config, train)
    fullest = history.peak
    assert peak.total == fullest.ledger.total
    assert peak.by("component") == {
        name: amount for name, amount in fullest.ledger.by("component").items() if amount
    }
    assert (peak.phase, peak.event) == (fullest.phase, fullest.event)
    of_phases = {phase: moment.ledger.total for phase, moment in history.phases.items()}
    assert peak.phases == {phase: of_phases[phase] for phase in peak.phases}


def kinds(examples: int):
    """Some kinds of step, other ones at each level of ZeRO."""
    pick = random.Random(examples)
    for level in range(examples):
        model = ModelConfig.named(pick.choice(["gpt2", "llama-2-7b", "qwen2-7b"]))
        options = pick.choice(PRECISIONS) | {"stepping": pick.choice(["foreach", "fused"])}
        train = TrainConfig(
            micro_batch=2, global_batch=8, zero=level % 4, attention=pick.choice(["plain", "sdpa"]),
            checkpointing=pick.choice(checkpointing.POLICIES), **options,
        )  # fmt: skip
        yield formulas.kind(model, train, Mesh(dp=2))


def test_other_primes_give_the_same_formulas():
    for kind in kinds(4):
        one, other = (formulas.recorded(kind, formulas.DEPTH, primes) for primes in (0, 1))
        assert one == other


def test_a_recording_leaves_frozen_what_a_caller_has_frozen():
    """And nothing else: of what it froze itself, garbage is found again."""
    (kind,) = kinds(1)
    for frozen in (False, True):  # the tests' own are frozen again at the end
        gc.freeze() if frozen else gc.unfreeze()
        formulas.recorded.__wrapped__(kind, 1)
        assert bool(gc.get_freeze_count()) == frozen


def test_a_size_that_is_no_product_is_refused():
    primes = {"b": 7, "s": 11, "d": 5}
    assert formulas.factored(4 * 7 * 11 * 11, primes) == (4, "bss")
    assert formulas.factored(4 * 10 * 7, primes) == (4, "bd")
    for nbytes in (4 * 7 + 4 * 11, 3 * 7, 4 * 13):
        with pytest.raises(ValueError, match=f"{nbytes} bytes are"):
            formulas.factored(nbytes, primes)


def test_what_is_stored_is_what_is_recorded(tmp_path, monkeypatch):
    of = list(kinds(2))
    found = {kind: formulas.find_fullest(kind) for kind in of}
    formulas.store(found, tmp_path / "formulas.json.gz")
    monkeypatch.setattr(formulas, "STORED", tmp_path / "formulas.json.gz")
    formulas.stored.cache_clear()
    assert {kind: formulas.fullest.__wrapped__(kind) for kind in of} == found
    formulas.stored.cache_clear()


def test_the_stored_formulas_are_those_of_the_code():
    _, known = formulas.stored()
    for kind in random.Random(0).sample(sorted(known, key=str), min(3, len(known))):
        assert formulas.fullest(kind) == formulas.find_fullest(kind)


def test_the_peak_of_one_kind_is_a_formula():
    """Working memory beside weights and gradients for LayerNorm, GELU and plain attention in fp32 without dropout, by hand."""
    for b, s, L in ((4, 64, 3), (2, 128, 9), (3, 96, 4)):
        model = ModelConfig(
            num_layers=L, d_model=32, num_heads=4, d_ff=128, vocab_size=2000, seq_len=s
        )
        h, f, a, v = model.letters("h f a v")
        peak = memory.peak(
            model, TrainConfig(micro_batch=b, global_batch=b, precision="fp32", optimizer="sgd")
        )
        assert peak.phase == "backward"
        held = sum(
            amount
            for component, amount in peak.by("component").items()
            if component in ("activations", "buffers")
        )
        assert held == b * s * (4 * L * (8 * h + 2 * f + a * s + 4) + 8 * h + 12 * v + 24) + 8
        assert (
            peak.total
            == memory.history(
                model, TrainConfig(micro_batch=b, global_batch=b, precision="fp32", optimizer="sgd")
            ).peak.ledger.total
        )


def test_what_cannot_be_predicted_is_said():
    model, train = ModelConfig.named("gpt2"), TrainConfig(micro_batch=1, global_batch=4)
    for wrong in (dict(sequence=True), dict(fp8="tiles"), dict(attention="ring"), dict(clip=1.0)):
        with pytest.raises(ValueError, match="or ask predict"):
            memory.peak(model, replace(train, **wrong))
    with pytest.raises(
        ValueError,
        match="num_experts=4: .* depends on what the router chooses.*predict.states and memory.activations are exact",
    ):
        memory.peak(replace(model, num_experts=4), train)
    with pytest.raises(TypeError, match="takes a ModelConfig, got 'gpt2'"):
        memory.peak("gpt2", train)
    with pytest.raises(ValueError, match="d_head=3 is odd"):
        memory.peak(replace(model, positions="rope", d_head=3), train)


def test_the_update_is_the_fullest_moment_of_little_work():
    """Weights and gradients, states and what a step needs for a moment."""
    sizes = dict(weights=4, state=8, working=2, temporary=3)
    assert [memory.step_peak(step, 2, **sizes) for step in (1, 2)] == [4 + 4 + 8 + 3] * 2
