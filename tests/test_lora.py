"""LoRA: equal to W + (α/r)·B·A written out, merged and unmerged to the bit, and what it costs: formula = dry run = measured."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

from labutils import (
    checkpointing,
    collectives,
    data_parallel,
    expert_parallel,
    lora,
    measure,
    memory,
    predict,
    tensor_parallel,
    zero,
)
from labutils.config import Adapters, Mesh, ModelConfig, TrainConfig
from labutils.flash import fused
from labutils.model import GPT
from labutils.teach import rigs
from labutils.world import RankError, World, copies

SIZES = dict(num_layers=2, d_model=16, num_heads=4, d_ff=24, vocab_size=12, seq_len=8)
LLAMA_STYLE = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
GPT2 = ModelConfig(**SIZES)
LLAMA = ModelConfig(**SIZES, **LLAMA_STYLE, num_kv_heads=2)
ROWS = tuple(
    torch.randint(12, (4, 8), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
)
PATTERNS = ["*", ("query", "value"), "value", "attention.*", "feed_forward.*", "down"]


def build(config, dtype=torch.float64, adapters=True, seed=0, **options):
    """A model with random weights, biases and norms included, and adapters of which B is too."""
    generator = torch.Generator().manual_seed(seed)
    model = GPT(config, generator=generator).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    if not adapters:
        return model
    return lora.adapt(model, **(dict(rank=3, alpha=6.0, generator=generator) | options))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def steps(model, rows=ROWS, count=3, optimizer=None):
    """Losses, and the adapters behind them."""
    optimizer = optimizer or adamw(list(trained(model).values()))
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model.loss(*rows)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, {name: p.detach().clone() for name, p in trained(model).items()}


def written_out(model, adapters, scale, rows=ROWS):
    """The loss of the plain model whose weights are W + (α/r)·B·A."""
    weights = {
        name.replace(".base.", "."): p
        for name, p in model.named_parameters()
        if ".adapters." not in name
    }
    for path in lora.adapted(model):
        A, B = (adapters[f"{path}.adapters.default.{key}"] for key in "AB")
        weights[f"{path}.weight"] = weights[f"{path}.weight"] + scale * (B @ A)
    plain = GPT(model.config).double()
    logits = torch.func.functional_call(plain, weights, (rows[0],))
    return F.cross_entropy(logits.flatten(0, 1), rows[1].flatten())


@pytest.mark.parametrize(
    "config, pattern",
    [(GPT2, "*"), (LLAMA, "*"), (GPT2, ("query", "value")), (LLAMA, "feed_forward.*")],
    ids=str,
)
def test_three_steps_are_those_of_the_sum_written_out(config, pattern):
    model = build(config, pattern=pattern)
    adapters = {name: p.detach().clone().requires_grad_() for name, p in trained(model).items()}
    optimizer, losses = adamw(list(adapters.values())), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = written_out(model, adapters, 2.0)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    got, after = steps(model)
    assert got == pytest.approx(losses, rel=1e-12)
    assert set(after) == set(adapters)
    for name, value in adapters.items():
        torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-9)


def test_it_begins_as_the_model_itself_and_only_adapters_are_trained():
    plain, model = build(GPT2, adapters=False), build(GPT2)
    assert torch.equal(plain(ROWS[0]), model(ROWS[0]))
    assert all(".adapters.default." in name for name in trained(model))
    model.loss(*ROWS).backward()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
        elif name.endswith(".A"):
            assert parameter.grad.abs().max() == 0  # B is zero
        else:
            assert parameter.grad.abs().max() > 0
    bound = 1 / 16**0.5
    first = model.blocks[0].attention.query.adapters["default"].A
    assert -bound <= first.min() < -0.5 * bound and 0.5 * bound < first.max() <= bound


def test_with_both_zero_nothing_is_ever_learned():
    model = build(GPT2)
    for layer in lora.adapted(model).values():
        nn.init.zeros_(layer.adapters["default"].A)
    _, after = steps(model)
    assert all(not value.any() for value in after.values())


def test_dropout_acts_before_a_and_on_the_adapter_alone():
    layer = lora.wrap(nn.Linear(64, 5).double(), rank=2, alpha=2, dropout=0.5)
    assert {name.split(".")[0] for name in trained(layer)} == {"adapters"}  # W and bias are frozen
    adapter, x = layer.adapters["default"], torch.ones(3, 64, dtype=torch.float64)
    nn.init.ones_(adapter.B)
    torch.manual_seed(0)
    got = layer(x)
    torch.manual_seed(0)
    low = F.linear(F.dropout(x, 0.5), adapter.A)
    torch.testing.assert_close(got, layer.base(x) + low.sum(-1, keepdim=True).expand(3, 5))
    layer.eval()
    torch.testing.assert_close(layer(x), layer.base(x) + F.linear(x, adapter.delta()))


# ── merging ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_merged_layer_computes_the_sum_and_unmerged_it_is_what_it_was(dtype):
    model = build(LLAMA, dtype)
    with torch.no_grad():
        for name, parameter in trained(model).items():
            parameter.uniform_(-0.3, 0.3)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(ROWS[0])
    with lora.merged(model):
        close = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.5}[dtype]
        assert (model(ROWS[0]) - logits).abs().max() < close
    after = dict(model.named_parameters())
    assert set(after) == set(before) and all(torch.equal(after[n], before[n]) for n in before)
    assert torch.equal(model(ROWS[0]), logits)


def test_subtracting_what_was_added_would_not_give_the_weight_back():
    layer = lora.wrap(nn.Linear(64, 64), rank=4, alpha=4)
    nn.init.normal_(layer.adapters["default"].B)
    weight, delta = layer.base.weight.detach().clone(), layer.adapters["default"].delta()
    layer.merge()
    assert not torch.equal(layer.base.weight - delta, weight)
    layer.unmerge()
    assert torch.equal(layer.base.weight, weight)


def test_merging_out_of_order_is_refused():
    layer = lora.wrap(nn.Linear(4, 4), rank=1, alpha=1)
    with pytest.raises(ValueError, match="not merged: call merge"):
        layer.unmerge()
    layer.merge()
    with pytest.raises(ValueError, match="merged already"):
        layer.merge()
    with pytest.raises(ValueError, match=r"unmerge\(\) before another"):
        layer.activate(None)
    layer.unmerge()
    layer.activate(None)
    with pytest.raises(ValueError, match="no active adapter"):
        layer.merge()


# ── several, and on disk ──────────────────────────────────────────────────────────────────────────


def test_several_adapters_live_beside_each_other_and_one_is_trained():
    model = build(GPT2)
    plain = model(ROWS[0])
    steps(model)
    first = model(ROWS[0])
    lora.adapt(model, rank=1, alpha=1, pattern="value", name="second")
    assert torch.equal(model(ROWS[0]), plain)  # the new one is zero, the first is not active
    assert {name.split(".")[-2] for name in trained(model)} == {"second"}
    steps(model)
    assert not torch.equal(model(ROWS[0]), plain)
    lora.activate(model, "default")
    assert torch.equal(model(ROWS[0]), first)
    lora.activate(model, None)
    assert torch.equal(model(ROWS[0]), plain) and not trained(model)
    with pytest.raises(ValueError, match="there is an adapter 'second' already"):
        lora.adapt(model, rank=1, alpha=1, pattern="value", name="second")
    for name in ("b", "a", "d", "c"):  # whatever the order, they are named by the alphabet
        lora.adapt(model, rank=1, alpha=1, pattern="value", name=name)
    known = r"\['a', 'b', 'c', 'd', 'default', 'second'\]"
    with pytest.raises(ValueError, match=f"no layer has an adapter 'third': the module has {known}"):
        lora.activate(model, "third")


def test_adapters_alone_go_to_disk_and_come_back(tmp_path):
    layers = ("query", "down")
    model, path = build(LLAMA, torch.float32, pattern=layers), tmp_path / "a.safetensors"
    lora.adapt(model, rank=1, alpha=1, pattern="value", name="second")
    lora.activate(model, "default")
    steps(model)
    safetensors.torch.save_file(lora.state(model), path)
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size == 8 + header + 4 * lora.trainable(LLAMA, rank=3, pattern=layers)
    fresh = build(LLAMA, torch.float32, pattern=layers)
    assert not torch.equal(fresh(ROWS[0]), model(ROWS[0]))
    found = fresh.load_state_dict(safetensors.torch.load_file(path), strict=False)
    assert torch.equal(fresh(ROWS[0]), model(ROWS[0])) and not found.unexpected_keys
    with pytest.raises(ValueError, match="no layer has an adapter 'x'"):
        lora.state(model, "x")


# ── which layers, and how many parameters ─────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "name, pattern, rank, wanted",
    [  # Hu et al. 2106.09685, Tables 4 and 5, 175B; and the adapters of an 8B Llama
        ("gpt3-175b", ("query", "value"), 1, 4_718_592),
        ("gpt3-175b", ("query", "value"), 4, 18_874_368),
        ("gpt3-175b", ("query", "value"), 8, 37_748_736),
        ("gpt3-175b", "query", 8, 18_874_368),
        ("gpt3-175b", ("query", "key", "value", "attention.output"), 2, 18_874_368),
        ("llama-3.1-8b", "*", 16, 41_943_040),
    ],
)
def test_counts_are_those_of_the_paper(name, pattern, rank, wanted):
    assert lora.trainable(ModelConfig.named(name), rank=rank, pattern=pattern) == wanted


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_what_is_trained_is_what_was_counted(pattern):
    experts = ModelConfig(**SIZES, **LLAMA_STYLE, num_experts=3, top_k=2)
    for config in (GPT2, LLAMA, experts):
        model = build(config, pattern=pattern)
        counted = lora.trainable(config, rank=3, pattern=pattern)
        assert sum(p.numel() for p in trained(model).values()) == counted
        assert not [path for path in lora.adapted(model) if path.endswith(("router", "head"))]


def test_a_pattern_that_names_nothing_is_refused():
    with pytest.raises(ValueError, match=r"ends in 'head': use \*, or some of down, gate, key"):
        lora.targets(LLAMA, ("query", "head"))


# ── bytes and FLOPs ───────────────────────────────────────────────────────────────────────────────


def held(config, frozen, rows=None, **options):
    """What a step leaves in memory."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if frozen == "fp32" else torch.bfloat16)
    try:
        model = GPT(config)
        if frozen == "nf4":
            lora.quantize_base(model)
        lora.adapt(model, alpha=8, **options)
        optimizer = adamw(list(trained(model).values()))
        tokens = torch.zeros(1, 8, dtype=torch.long)
        model.loss(tokens, tokens).backward()
        optimizer.step()
    finally:
        torch.set_default_dtype(before)
    return measure.model_states(model, optimizer)


def dry_held(config, frozen, **options):
    return World(Mesh(), engine="dry").run(lambda rank: held(config, frozen, **options))


@pytest.mark.parametrize("frozen", ["fp32", "bf16", "nf4"])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_model_states_formula_dry_run_and_measured_agree(config, frozen):
    options = dict(rank=3, pattern=("query", "down"))
    formula = predict.states(config, rigs.lora.fine_tuning(frozen=frozen, **options))
    dry, measured = (each(config, frozen, **options) for each in (dry_held, held))
    assert formula.diff(dry).unexplained == 0 == dry.diff(measured).unexplained


FROZEN = ["fp32", "bf16", "nf4"]


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_what_autograd_keeps_is_known_tensor_by_tensor(config, frozen):
    for pattern in [*PATTERNS, "query", ("key", "down"), "attention.output", "up"]:
        model = begun(config, frozen, rank=3, pattern=pattern, attention="sdpa")
        kept = measure.saved_activations(lambda model=model: model.loss(*ROWS), model)
        train = rigs.lora.fine_tuning(3, frozen, pattern, batch=4)
        formula = memory.activations(config, train)
        assert formula.diff(kept).unexplained == 0, (pattern, formula.diff(kept))


def begun(config, frozen, attention="plain", **options):
    """A model to fine-tune, frozen in that format."""
    model = GPT(config, attention=attention)
    if frozen != "fp32":
        model.bfloat16()
    if frozen == "nf4":
        lora.quantize_base(model)
    return lora.adapt(model, **dict(alpha=8) | options)


def second_step(config, frozen, rows, policy="none", **options):
    """What is alive at each moment of a step that is not the first."""
    model = checkpointing.apply(begun(config, frozen, attention="sdpa", **options), policy)
    optimizer = adamw(list(trained(model).values()))
    tokens, targets = (torch.zeros(rows, config.seq_len, dtype=torch.long) for _ in range(2))

    def step():
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return measure.history(step, model, optimizer)


def dry_second_step(*given, **options):
    return World(Mesh(), engine="dry").run(lambda rank: second_step(*given, **options))


def at_the_loss(history):
    return next(m.ledger for m in history.moments if m.event == "_log_softmax_backward_data")


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("config", [rigs.lora.ADDER, LLAMA], ids=["adder", "llama"])
def test_a_step_moment_by_moment_dry_and_measured(config, frozen):
    options = dict(rank=3, pattern=("query", "down"))
    dry, measured = (run(config, frozen, 4, **options) for run in (dry_second_step, second_step))
    assert dry.moments == measured.moments
    formula = rigs.lora.at_the_loss(config, batch=4, frozen=frozen, **options)
    assert formula.diff(at_the_loss(dry), by="component").unexplained == 0


@pytest.mark.parametrize("frozen", ["bf16", "nf4"])
@pytest.mark.parametrize("name", ["llama-2-7b", "llama-2-70b"])
def test_the_fullest_moment_at_7b_and_70b(name, frozen):
    """Of two of their layers, dry."""
    config = replace(ModelConfig.named(name), num_layers=2)
    history = dry_second_step(config, frozen, 1, rank=16)
    formula = rigs.lora.at_the_loss(config, rank=16, batch=1, frozen=frozen)
    assert formula.diff(at_the_loss(history), by="component").unexplained == 0
    if (name, frozen) != ("llama-2-70b", "nf4"):
        assert history.peak.ledger.total == formula.total
        return
    # A weight of 235 million numbers is made whole: codes, numbers, padded, and scaled, 4 bytes each.
    s, h, f = config.letters("s h f")
    whole = h * f * 4 * 4 + h * f // 64 * 2 * 4  # scales of blocks, before and after their mean
    streams = 2 * s * h * 2  # the block's input, and the stream behind attention
    tables, tokens = s * config.d_head * 2, s * 8
    peak = history.peak
    assert peak.phase == "forward"
    found = peak.ledger.only(component="buffers").total
    assert found == whole + streams + tables + tokens
    behind = ("norm", "outside", "blocks.1.feed_forward.down.adapters.default")
    kept = memory.activations(config, rigs.lora.fine_tuning(16, frozen)).lines
    already = ("input", "targets, sb")
    kept = [line for line in kept if line.name not in behind or line.note in already]
    found = peak.ledger.only(component="activations").total
    assert found == sum(line.amount for line in kept)


@pytest.mark.parametrize("frozen, policy, layers", [("bf16", "full", 5), ("nf4", "none", 4)])
def test_two_layers_and_a_third_tell_the_peak_of_more(frozen, policy, layers):
    def run(config):
        return dry_second_step(config, frozen, 1, policy, rank=4)

    deep = replace(LLAMA, num_layers=layers)
    peak = rigs.lora.peak_of_all_layers(deep, run)
    assert peak.by("component") == run(config=deep).peak.ledger.by("component")


def test_a_layer_of_a_70b_model_dry_in_nf4():
    llama = replace(ModelConfig.named("llama-2-70b"), num_layers=1)
    dry, formula = (
        dry_held(llama, "nf4", rank=16),
        predict.states(llama, rigs.lora.fine_tuning(16, "nf4")),
    )
    assert formula.diff(dry).unexplained == 0


def test_what_has_no_formula_is_refused():
    train = rigs.lora.fine_tuning(1)
    with pytest.raises(ValueError, match="dropout=0.1: of adapters there is a formula for 0"):
        memory.activations(replace(GPT2, dropout=0.1), train)
    for name, given in (("attention", "plain"), ("checkpointing", "full")):
        with pytest.raises(ValueError, match=f"{name}='{given}': of adapters there is a formula"):
            memory.activations(GPT2, replace(train, **{name: given}))
    with pytest.raises(ValueError, match="no formula for adapters"):
        memory.peak(GPT2, train)
    with pytest.raises(ValueError, match="num_experts=3"):
        lora.training_flops(ModelConfig(**SIZES, num_experts=3), rank=1)


@pytest.mark.parametrize("pattern", [*PATTERNS, "query", "key", "attention.output", "up"], ids=str)
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_flops_of_a_training_step_are_counted_to_the_last(config, pattern):
    model = build(config, torch.float32, pattern=pattern)
    counted = fused.product_flops(lambda: model.loss(*ROWS).backward())
    formula = lora.training_flops(config, rank=3, pattern=pattern)
    assert sum(formula.values()) * ROWS[0].numel() == counted


# ── with other techniques ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_checkpointing_changes_no_bit(policy):
    losses, adapters = steps(build(LLAMA))
    before = checkpointing.apply(build(LLAMA, adapters=False), policy)
    behind = checkpointing.apply(build(LLAMA), policy)
    lora.adapt(before, rank=3, alpha=6.0)
    before.load_state_dict(behind.state_dict())
    for model in (before, behind):
        got, after = steps(model)
        assert got == losses and all(torch.equal(after[name], adapters[name]) for name in adapters)


def test_under_checkpointing_the_inputs_of_layers_are_kept_and_the_ends():
    model = build(LLAMA, torch.float32)
    checkpointing.apply(model, "full")
    kept = measure.saved_activations(lambda: model.loss(*ROWS), model)
    ends = memory.activations(LLAMA, rigs.lora.fine_tuning(3, "fp32", batch=4)).by("name")
    inputs = LLAMA.num_layers * 4 * ROWS[0].numel() * LLAMA.d_model
    assert kept.total == inputs + ends["norm"] + ends["outside"]


def share(rank):
    comm = rank.comm("dp")
    return tuple(rows.chunk(comm.size)[comm.rank] for rows in ROWS)


def test_replicas_reduce_the_gradients_of_adapters_alone():
    def program(rank):
        model = build(GPT2, torch.float32, seed=rank.comm("dp").rank)
        replica = data_parallel.replicate(model, rank.comm("dp"))
        with torch.no_grad():
            for adapter in trained(model).values():
                adapter.normal_(generator=torch.Generator().manual_seed(0))
        x, y = share(rank)
        F.cross_entropy(replica(x).flatten(0, 1), y.flatten()).backward()
        return {name: p.grad for name, p in trained(model).items()}

    alone = build(GPT2, torch.float32)
    with torch.no_grad():
        for adapter in trained(alone).values():
            adapter.normal_(generator=torch.Generator().manual_seed(0))
    alone.loss(*ROWS).backward()
    with World(Mesh(dp=2)) as two:
        for gradients in two.run(program):
            for name, p in trained(alone).items():
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)
        nbytes = 4 * lora.trainable(GPT2, rank=3)
        ring = collectives.sent("all_reduce_ring", nbytes=nbytes, n=2, itemsize=4)
        assert two.ledger.only(name="all_reduce").total == ring.total


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_shards_adapters_and_computes_the_same(level):
    def program(rank):
        model, comm = build(LLAMA, seed=rank.comm("dp").rank), rank.comm("dp")
        names = list(trained(model))
        if level == 3:
            zero.shard(model, comm)
            optimizer = adamw(list(trained(model).values()))
        else:
            optimizer = zero.Optimizer(list(model.parameters()), comm, adamw, level=level)
        losses, _ = steps(model, share(rank), optimizer=optimizer)
        states = measure.model_states(model, getattr(optimizer, "inner", optimizer))
        with comm.record("compare"), zero.gathered(model) if level == 3 else nullcontext():
            found = dict(model.named_parameters())
            return losses, {name: found[name].detach().clone() for name in names}, states

    losses, after = steps(build(LLAMA))
    with World(Mesh(dp=2)) as two:
        results = two.run(program)
        measured = two.ledger
    sizes = dict(micro_batch=2, global_batch=4, precision="fp64", zero=level)
    train, mesh = TrainConfig(**sizes, adapters=Adapters(rank=3, alpha=6.0)), Mesh(dp=2)
    assert [sum(each) / 2 for each in zip(*(r[0] for r in results), strict=True)] == pytest.approx(
        losses, rel=1e-12
    )
    for rank, (_, found, states) in enumerate(results):
        for name, value in after.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
        assert predict.states(LLAMA, train, mesh, rank).diff(states).unexplained == 0
        sent = predict.sent(LLAMA, train, mesh, rank).scaled(3).by("name")
        for name in ("all_gather", "reduce_scatter"):
            assert measured.only(rank=rank, name=name).total == sent[name]


@pytest.mark.parametrize(
    "config, n, sequence",
    [(GPT2, 2, False), (LLAMA, 4, False), (LLAMA, 4, True)],
    ids=["gpt2 on 2", "llama on 4", "llama on 4, sequence"],
)
def test_the_adapters_of_a_split_model_learn_the_same(config, n, sequence):
    config = replace(config, num_layers=1)

    def program(rank):
        comm = rank.comm("tp")
        model = build(config, adapters=False)
        tensor_parallel.parallelize(model, comm, sequence=sequence)
        generator = torch.Generator().manual_seed(7 + comm.rank)  # rank 0's A is everybody's
        lora.adapt(model, rank=3, alpha=6.0, generator=generator)
        losses, after = steps(model, count=2)
        for name, p in trained(model).items():  # as often as the weight: keys may be on several
            layer = model.get_submodule(name.split(".adapters")[0])
            cut = isinstance(layer.base, tensor_parallel.ColumnLinear) == name.endswith(".B")
            assert copies(p, comm) == (copies(layer.base.weight, comm) if cut else n)
        with lora.merged(model):
            return losses, after, model.loss(*ROWS).item()

    whole = build(config, adapters=False)
    lora.adapt(whole, rank=3, alpha=6.0, generator=torch.Generator().manual_seed(7))
    losses, after = steps(whole, count=2)
    final = whole.loss(*ROWS).item()
    with World(Mesh(tp=n)) as world:
        results = world.run(program)
    for got, _, merged in results:
        assert got == pytest.approx(losses, rel=1e-12) and merged == pytest.approx(final, rel=1e-12)
    for name, value in after.items():
        column = not name.split(".adapters")[0].endswith(("output", "down"))
        shares = [found[name] for _, found, _ in results]
        split = (0 if column else 1) if column == name.endswith(".B") else None
        if split is None:
            assert all(torch.equal(each, shares[0]) for each in shares)
            shares = shares[:1]
        elif sum(len(each) for each in shares) > len(value) and split == 0:
            shares = shares[:: n // config.num_kv_heads]  # neighbours have the same head
        whole_again = torch.cat(shares, split or 0)
        torch.testing.assert_close(whole_again, value, rtol=1e-9, atol=1e-9)


def test_a_split_adapter_adds_messages_of_r_numbers_a_token():
    def program(rank, adapters):
        model = build(GPT2, torch.float32, adapters=False)
        tensor_parallel.parallelize(model, rank.comm("tp"))
        if adapters:
            lora.adapt(model, rank=3, alpha=6)
        model.loss(*ROWS).backward()

    sent = []
    for adapters in (False, True):
        with World(Mesh(tp=2)) as two:
            two.run(program, adapters)
            sent.append(
                [two.ledger.only(name=f"all_reduce {way}") for way in ("forward", "backward")]
            )
    message = collectives.sent("all_reduce_ring", nbytes=4 * 3 * ROWS[0].numel(), n=2, itemsize=4)
    plain, beside = sent
    # Forward for output and down; backward for query, key, value and up.
    assert beside[0].total - plain[0].total == 2 * 2 * message.total
    # What stands before the first adapter sends no gradient: the first layer's attention.
    stream = collectives.sent(
        "all_reduce_ring", nbytes=4 * 16 * ROWS[0].numel(), n=2, itemsize=4
    ).total
    assert beside[1].total - plain[1].total == 2 * 4 * message.total - stream


def test_what_does_not_compose_is_refused():
    def split_the_adapted(rank):
        tensor_parallel.parallelize(build(GPT2), rank.comm("tp"))

    def drop_on_a_share(rank):
        model = tensor_parallel.parallelize(build(GPT2, adapters=False), rank.comm("tp"))
        lora.adapt(model, rank=1, alpha=1, dropout=0.1)

    def adapt_the_sharded(rank):
        model = zero.shard(build(GPT2, adapters=False), rank.comm("dp"))
        lora.adapt(model, rank=1, alpha=1)

    def merge_the_sharded(rank):
        model = zero.shard(build(GPT2), rank.comm("dp"))
        model.blocks[0].attention.query.merge()

    def shard_bytes(rank):
        zero.shard(lora.adapt(lora.quantize_base(GPT(GPT2)), rank=1, alpha=1), rank.comm("dp"))

    cases = {
        split_the_adapted: "first split or convert the model, then adapt it",
        drop_on_a_share: "dropout=0.1 on a split layer",
        adapt_the_sharded: "adapt the model before it is sharded",
        merge_the_sharded: "merge before zero.shard, not after",
        shard_bytes: "lie beside others in each layer: keep them whole, .* zero.Optimizer of level 1",
    }
    for program, words in cases.items():
        axis = "dp" if program in (adapt_the_sharded, merge_the_sharded, shard_bytes) else "tp"
        with World(Mesh(**{axis: 2})) as world, pytest.raises(RankError, match=words):
            world.run(program)
    model = lora.adapt(lora.quantize_base(GPT(GPT2)), rank=1, alpha=1)
    with pytest.raises(TypeError, match="first split or convert the model, then adapt it"):
        model.blocks[0].attention.query.weight  # noqa: B018
    with pytest.raises(ValueError, match="has no code in NF4"):
        model.blocks[0].attention.query.merge()
    with pytest.raises(TypeError, match=r"query is a LoraLinear: quantize plain linear layers"):
        lora.quantize_base(build(GPT2))


# ── the task of the lab ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("base", [8, 10])
def test_every_sum_is_right_and_there_once(base):
    tokens, targets = rigs.lora.sums(base)
    seen = set()
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        text = "".join(rigs.lora.WORDS[i] for i in row)
        left, right = int(text[:2], base), int(text[3:5], base)
        digits = [int(each) for each in text[6:]] + wanted[-1:]
        assert sum(digit * base**i for i, digit in enumerate(digits)) == left + right
        assert wanted[:-3] == [-100] * 5 and wanted[-3:-1] == digits[:2]
        seen.add((left, right))
    assert len(seen) == len(tokens) == base**4


def test_held_out_sums_are_not_trained_on_and_a_score_counts_whole_sums():
    tokens, _ = rigs.lora.held_out(8)
    assert torch.equal(tokens, rigs.lora.sums(8)[0][:512])

    class Oracle(nn.Module):
        def forward(self, tokens):
            wanted = rigs.lora.held_out(8)[1].clamp(min=0)
            wanted = torch.where(torch.arange(512)[:, None] < 128, (wanted + 1) % 8, wanted)
            return 50.0 * F.one_hot(wanted, len(rigs.lora.WORDS)).float()

    loss, right = rigs.lora.score_sums(Oracle(), 8)
    assert right == 0.75 and loss == pytest.approx(12.5)
    tens, ones = (tokens[:, i] + tokens[:, i + 3] for i in (0, 1))
    assert rigs.lora.carry_free(8) == ((tens < 8) & (ones < 8)).double().mean().item()


def test_training_follows_its_schedule_and_steps_what_is_trained():
    draw = torch.Generator().manual_seed(0)
    model = lora.adapt(GPT(rigs.lora.ADDER, generator=draw), rank=1, alpha=32, generator=draw)
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    before = rigs.lora.score_sums(model, 8)[0]
    rigs.lora.learn_sums(model, 8, steps=25, batch=32, lr=1e-2, decay=True)
    assert rigs.lora.score_sums(model, 8)[0] < before
    assert all(torch.equal(p, frozen[n]) for n, p in model.named_parameters() if n in frozen)


def test_recorded_sweeps_have_their_seeds_at_each_rate_and_say_how_they_were_made():
    adding, text = map(rigs.lora.sweep, ("addition", "text"))
    every = (dict(rank="full"), dict(rank="1"), dict(rank="4"), dict(rank="16"))
    cases = [(adding, 5, each) for each in (*every, dict(pattern="attention.*"))]
    cases += [(text, 3, each) for each in every]
    for runs, seeds, wanted in cases:
        rates, losses = runs.losses(**wanted)
        assert len(losses) == seeds and all(len(each) == len(rates) for each in losses)
        lr, mean, error = runs.best(**wanted)
        column = [each[rates.index(lr)] for each in losses]
        assert mean == pytest.approx(sum(column) / seeds) and 0 < error < mean
    assert adding.trained("attention.*") == lora.trainable(
        rigs.lora.ADDER, rank=8, pattern="attention.*"
    )
    old = text.losses("old", rank="none"), text.losses("old", rank="full")
    ((before,),) = old[0][1]
    assert before < min(min(each) for each in old[1][1])  # every run forgets
    forgotten, learned = text.traded(rank="full")
    rates, losses = text.losses(rank="full")
    assert len(learned) == len(forgotten) == rates.index(text.best(rank="full")[0]) + 1
    assert learned == sorted(learned)
    assert forgotten[-1] == pytest.approx(
        sum(each[len(learned) - 1] for each in old[1][1]) / 3 - before
    )
    for runs in (adding, text):
        assert runs.made.startswith("python tools/lora_sweep.py; torch ") and "2026" in runs.made


# ── what does not go together, and what does instead ───────────────────────────────────────────────────────────────


def test_adapters_of_experts_are_those_of_the_ranks_that_have_the_experts():
    """Whichever comes first; averaged over all replicas they would be of different experts."""
    config = ModelConfig(**SIZES | dict(num_experts=4, top_k=2, tied=False))

    def program(rank, first):
        model = build(config, adapters=first)
        expert_parallel.spread_experts(model, rank.comm("ep"))
        if not first:
            lora.adapt(model, rank=2, alpha=4)
        mine = {at: p for at, p in trained(model).items() if "experts" in at}
        assert mine and all(p.only_on == "edp" and p.shares == 2 for p in mine.values())
        rest = [p for at, p in trained(model).items() if at not in mine]
        zero.Optimizer(mine.values(), rank.comm("edp"), level=1)
        zero.Optimizer(rest, rank.comm("dp"), level=1)
        zero.Optimizer(trained(model).values(), rank.comm("dp"), level=1)

    for first in (True, False):
        with pytest.raises(RankError, match="some of these parameters are experts"):
            World(Mesh(dp=4, ep=2)).run(program, first)


def test_nf4_and_tensor_parallelism_are_refused_and_replicas_of_it_train():
    def split_the_quantized(rank):
        tensor_parallel.parallelize(
            lora.quantize_base(build(GPT2, adapters=False)), rank.comm("tp")
        )

    def quantize_the_split(rank):
        lora.quantize_base(
            tensor_parallel.parallelize(build(GPT2, adapters=False), rank.comm("tp"))
        )

    for program in (split_the_quantized, quantize_the_split):
        with pytest.raises(
            RankError, match=r"share out the batch by data_parallel.replicate or ze"
        ):
            World(Mesh(tp=2)).run(program)

    def remedy(rank, replicated):
        model = lora.adapt(lora.quantize_base(GPT(GPT2)), rank=1, alpha=1)
        if replicated:
            replica = data_parallel.replicate(model, rank.comm("dp"))
            optimizer, run = adamw(trained(model).values()), replica
        else:
            optimizer = zero.Optimizer(trained(model).items(), rank.comm("dp"), level=2)
            run = model
        run(ROWS[0]).sum().backward()
        optimizer.step()
        return True

    for replicated in (True, False):
        assert World(2).run(remedy, replicated) == [True, True]


@pytest.mark.parametrize("name", ["a.b", "", "keys"])
def test_a_name_that_no_module_can_have(name):
    with pytest.raises(ValueError, match="give a word without a dot"):
        lora.adapt(GPT(GPT2), rank=1, alpha=1, name=name)


def test_a_rank_beyond_the_matrix_and_numbers_that_are_none():
    with pytest.raises(
        ValueError, match="rank=1000: the update of a matrix of 32 × 64 has rank 32"
    ):
        lora.wrap(nn.Linear(64, 32), rank=1000, alpha=1)
    assert lora.wrap(nn.Linear(64, 32), rank=64, alpha=1).adapters["default"].rank == 64
    with pytest.raises(ValueError, match="rank=65"):
        lora.wrap(nn.Linear(64, 32), rank=65, alpha=1)
    for formula in (lora.trainable, lora.training_flops):
        for rank in (-4, 0, 1000):
            with pytest.raises(ValueError, match="rank"):
                formula(GPT2, rank=rank)
        with pytest.raises(TypeError, match="1.5"):
            formula(GPT2, rank=1.5)
    with pytest.raises(ValueError, match="micro_batch must be at least 1"):
        rigs.lora.at_the_loss(GPT2, rank=1, batch=0)


def test_what_is_added_to_a_weight_is_rounded_once():
    """In bf16: the sum of fp32 numbers, and not of a rounded update."""
    layer = lora.wrap(nn.Linear(64, 64, dtype=torch.bfloat16), rank=4, alpha=4)
    adapter = layer.adapters["default"]
    with torch.no_grad():
        adapter.B.normal_(0, 0.05, generator=torch.Generator().manual_seed(0))
    weight, delta = layer.base.weight.clone(), adapter.delta()
    layer.merge()
    exact = (weight.double() + delta.double()).to(torch.bfloat16)
    assert torch.equal(layer.base.weight, exact) and not layer.base.weight.requires_grad
    assert not torch.equal(exact, weight + delta.to(torch.bfloat16))


def test_the_first_step_moves_a_weight_by_the_root_of_the_rank_and_the_loss_by_the_rank():
    """Adam moves every number of B by the rate; the rows of A are drawn, so what they add up to
    grows as √r, and its part along the gradient as r."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    moved, lowered = {}, {}
    for rank in (1, 4, 16):
        draw = torch.Generator().manual_seed(1)
        layer = lora.wrap(nn.Linear(256, 256), rank=rank, alpha=rank, generator=draw)
        adapter = layer.adapters["default"]
        optimizer = torch.optim.Adam(adapter.parameters(), lr=1e-5)
        loss = layer(x).square().mean()
        loss.backward()
        optimizer.step()
        moved[rank] = adapter.delta().norm().item()
        lowered[rank] = (loss - layer(x).square().mean()).item()
    for n in (4, 16):
        assert moved[n] / moved[1] == pytest.approx(n**0.5, rel=0.15)
        assert lowered[n] / lowered[1] == pytest.approx(n, rel=0.15)
