"""What is predicted of a rank is what its dry run finds, to the byte; that it is what ranks hold and send is found in the table's runs (test_compositions)."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from equivalence import LORA, case, phases, rehearsed, rows

from labutils import anatomy, checkpointing, flash, measure, memory, predict, schedule, step
from labutils.config import Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.flash import fused
from labutils.model import GPT
from labutils.predict import rehearsal as predict_rehearsal
from labutils.predict.rehearsal import BATCH, rehearsal
from labutils.world import World

LARGER = [names for names, what in rows() if what == "equal" and len(names) > 2]
GPT2 = ModelConfig(num_layers=2, d_model=10, num_heads=2, d_ff=34, vocab_size=43, seq_len=7)
LLAMA = ModelConfig.named("llama-3.1-405b")
# Beside the table: several micro-batches, other optimizers, half gradients, clipping without.
PLANS = {
    "bf16, fp32 gradients": dict(precision="bf16", fp32_gradients=True, zero=1),
    "bf16, level 2": dict(precision="bf16", zero=2, schedule="zb_h1"),
    "bf16, level 3": dict(precision="bf16", fp32_gradients="only", zero=3, reshard=False),
    "bf16, no ZeRO": dict(precision="bf16", fp32_gradients="only", optimizer="adamw"),
    "fp16": dict(precision="fp16", optimizer="adamw", stepping="foreach"),
    "contiguous": dict(attention="ulysses", layout="contiguous", optimizer="sgd"),
}


@pytest.mark.parametrize("names", LARGER, ids=" × ".join)
def test_a_dry_run_finds_what_formulas_say(names):
    """On the last rank, which has the head; routed evenly, what experts are sent is foreseen too."""
    plan = case(names)
    last = plan.mesh.size - 1
    assert rehearsed(plan.model, plan.train, plan.mesh, last) == (0, 0)


@pytest.mark.parametrize("given", PLANS.values(), ids=PLANS)
def test_so_it_does_of_other_plans(given):
    plan = case(("1F1B", "dp", "tp + sp"), clip=None)
    mesh = replace(plan.mesh, cp=2) if "attention" in given else plan.mesh
    train = replace(plan.train, **({"precision": "fp32", "frozen": (), "clip": None} | given))
    for rank in (1, mesh.size - 1):  # the first and the last stage run in another order
        assert rehearsed(plan.model, train, mesh, rank) == (0, 0)


def test_so_it_does_of_a_schedule_of_ones_own():
    plan = case(("1F1B", "dp"), clip=None)
    pp, m = plan.mesh.pp, plan.train.accumulation(plan.mesh.dp)
    own = replace(plan.train, schedule=schedule.zb_auto(pp, m, m))
    for rank in (0, plan.mesh.size - 1):
        assert rehearsed(plan.model, own, plan.mesh, rank) == (0, 0)
    for wrong, why in {
        schedule.naive(pp, m + 1): f"for {pp} ranks and {m + 1} micro-batches, and this step has",
        schedule.naive(pp + 1, m): f"for {pp + 1} ranks .* has {pp} ranks",
        schedule.pipedream(pp, m): "pipedream updates its weights in the course of a step",
    }.items():
        with pytest.raises(ValueError, match=why):
            predict.sent(plan.model, replace(plan.train, schedule=wrong), plan.mesh)


SOME = replace(LORA, pattern="down")
# Of random plans, those that formulas had once got wrong.
FOUND = {
    "some adapters behind Ulysses": (("Ulysses", "LoRA"), dict(adapters=SOME)),
    "some adapters over NF4": (("NF4",), dict(adapters=replace(SOME, base="nf4"))),
    "adapters of experts alone": (("ep", "LoRA"), dict(adapters=replace(LORA, pattern="up"))),
    "adapters under autocast": (("tp + sp", "LoRA", "autocast"), {}),
    "fp16": (("1F1B",), dict(precision="fp16")),
    "a loss in fp32": (("autocast",), {}),
    "a ring of one": (("autocast",), dict(attention="ring")),
    "heads for tokens": (("1F1B", "Ulysses", "tp + sp"), dict(positions="learned")),
    "heads for tokens turned by RoPE": (("Ulysses",), dict(positions="rope", precision="bf16")),
    "copies of a key–value head": (("Ulysses",), dict(num_kv_heads=1, precision="fp32")),
    "keys in fp32": (("ring", "autocast", "FP8"), {}),
    "halves of fp32 shards": (("1F1B", "ZeRO-3"), dict(precision="bf16")),
    "whole weights under autocast": (("ZeRO-3", "tp + sp", "autocast"), {}),
    "two experts": (("ep",), dict(num_experts=2, top_k=1)),
    "rows of experts under autocast": (("ep", "autocast"), {}),
    "a frozen tied end": (("1F1B", "tied"), dict(frozen=("tokens*",))),
    "dropout": (("1F1B", "tp + sp"), dict(dropout=0.1)),
    "a key–value head on two ranks": (("tp + sp",), dict(num_kv_heads=1)),
}


@pytest.mark.parametrize("names, given", FOUND.values(), ids=FOUND)
def test_so_it_does_of_plans_that_a_search_has_found(names, given):
    plan = case(names, **({"clip": None, "frozen": ()} | given))
    plan = plan.model, plan.train, plan.mesh, plan.mesh.size - 1
    assert rehearsed(*plan) == (0, 0)
    formula, dry = activations_both_ways(*plan)
    assert formula == dry


# Plans in which many settings meet: any two that can stand in one plan do in one of these, mostly.
MANY = [
    (("ZeRO-2",), dict(fp32_gradients=True)),  # which only halves have
    (("ZeRO-3",), dict(fp32_gradients="only")),
    (("1F1B", "tied", "bf16"), dict(fp32_gradients=True)),
    (("1F1B", "ZeRO-1", "tied", "bf16"), dict(fp32_gradients="only")),
    (("1F1B", "ZeRO-2", "tied"), dict(precision="fp16", optimizer="adamw", num_layers=3)),
    (("ep", "autocast", "NF4"), dict(bias=True)),
    (("1F1B", "ring", "tp + sp", "selective", "tied", "FP8"), dict(bias="qkv", stepping="foreach")),
    (("ZB-H1", "ZeRO-2", "tp + sp", "full"), dict(precision="fp16", frozen=("blocks.0.*",), dropout=0.1)),
    (("interleaved", "Ulysses", "ep", "selective", "tied", "autocast"), dict(num_kv_heads=4, num_layers=4)),
    (("ZB-V", "ring", "tp + sp", "ep", "selective", "autocast"), dict(layout="contiguous", num_kv_heads=1)),
    (("ZeRO-1", "tp", "selective", "tied", "bf16"), dict(fp32_gradients="only", bucket_bytes=10**6)),
    (("1F1B", "Ulysses", "ep", "NF4"), dict(precision="fp32", frozen=("blocks.0.*",), num_kv_heads=2)),
    (("dp", "ring", "tp", "autocast"), dict(layout="contiguous", positions="rope", optimizer="adamw")),
    (("1F1B", "ZeRO-1", "tp", "tied", "LoRA"), dict(precision="fp32", optimizer="adamw", dropout=0.1)),
    (("dp", "ring", "tp + sp", "ep", "selective", "autocast", "LoRA"), dict(num_kv_heads=1, ffn="gelu")),
    (("interleaved", "ZeRO-3", "selective", "bf16"), dict(fp32_gradients="only", vocab_size=25)),
    (("1F1B", "NF4"), dict(precision="fp32", optimizer="sgd", stepping="foreach", dropout=0.1)),
    (("1F1B", "ZeRO-1", "Ulysses", "tp", "full", "tied"), dict(bucket_bytes=1, precision="fp16")),
    (("interleaved", "ZeRO-2", "tp", "full", "LoRA"), dict(precision="bf16", positions="learned")),
]  # fmt: skip


@pytest.mark.parametrize("names, given", MANY, ids=[" × ".join(names) for names, _ in MANY])
def test_so_it_does_where_many_settings_meet(names, given):
    plan = case(names, **({"frozen": ()} | given))
    for rank in {0, plan.mesh.size - 1}:
        assert rehearsed(plan.model, plan.train, plan.mesh, rank) == (0, 0)


def llama(m):
    """Llama 3.1 405B on 16,384 ranks, with m micro-batches."""
    train = TrainConfig(
        micro_batch=1, global_batch=128 * m, fp32_gradients=True, zero=1, sequence=True,
        attention="sdpa",
    )  # fmt: skip
    return replace(LLAMA, seq_len=8192), train, Mesh(pp=16, dp=128, tp=8)


def test_a_rank_of_llama_405b():
    """2n, 4n and 12n/128 bytes of states with fp32 gradients at level 1; what its ranks send."""
    model, train, mesh = llama(16)
    assert predict.sent(model, train, mesh).total == 289_302_246_920
    held = predict.states(model, train, mesh).by("component")
    numbers = held["gradients"] // 4  # padded, as weights are
    assert (held["weights"], numbers) == (2 * numbers, 3_052_109_824)
    assert held["optimizer"] == 12 * numbers // 128 + 228


@pytest.mark.parametrize(("stage", "m"), [(0, 16), (1, 2), (8, 2), (15, 2)])
def test_a_dry_run_of_llama_405b_is_what_the_formulas_say(stage, m):
    """All layers of a rank of the first, second, a middle and the last stage. What it costs is
    counted in moments, which no busy machine slows down: as many for each further micro-batch."""
    plan = *llama(m), 1024 * stage
    assert rehearsed(*plan) == (0, 0)
    formula, dry = activations_both_ways(*plan)
    assert formula == dry
    history = rehearsal(*plan).history
    assert len(history.moments) < 2000 * m
    if m == 16:
        tokens = 16 * 2 * 8192 * 8  # of 16 micro-batches, and as many targets
        assert sum(x.amount for x in history.peak.ledger if x.name == BATCH) == tokens
        assert history.peak.ledger.total == 111_332_103_396 + tokens // 2  # targets are others


def test_what_does_not_go_together_is_refused():
    train = TrainConfig(micro_batch=1, global_batch=8, zero=3, schedule="zb_h1")
    with pytest.raises(ValueError, match="set zero=2"):
        predict.sent(LLAMA, train, Mesh(pp=2, dp=2))


WHOLE_B = [
    (), ("1F1B", "tied", "tp + sp"), ("interleaved", "dp"), ("1F1B", "ring", "tp"), ("selective",),
    ("1F1B", "ZeRO-3"), ("1F1B", "tp + sp", "bf16"),
]  # fmt: skip


@pytest.mark.parametrize("names", WHOLE_B, ids=" × ".join)
def test_activations_of_whole_backward_passes_are_a_sum(names):
    plan = case(names)
    plan = plan.model, replace(plan.train, frozen=()), plan.mesh
    for rank in {0, plan[2].size - 1}:
        formula, dry = activations_both_ways(*plan, rank)
        assert formula == dry


@pytest.mark.parametrize("names", [("LoRA", "bf16"), ("NF4", "bf16"), ("LoRA", "bf16", "tied")], ids=" × ".join)
def test_activations_beside_adapters_are_a_sum_on_one_device(names):
    plan = case(names)
    train = replace(plan.train, frozen=(), attention="sdpa")
    formula, dry = activations_both_ways(plan.model, train, plan.mesh, 0)
    assert formula == dry and len(predict.activations(plan.model, train)) > 1


def test_the_scale_of_a_loss_in_fp16_is_kept_where_the_head_is():
    plan = case(("1F1B", "tp + sp", "bf16"))
    train = replace(plan.train, frozen=(), precision="fp16")
    formula, dry = activations_both_ways(plan.model, train, plan.mesh, plan.mesh.size - 1)
    assert formula == dry


FEW, ENDS = dict(adapters=replace(LORA, pattern=("query",))), dict(frozen=("tokens.weight",))
ALL = dict(frozen=())
ASKED = [  # of which plans a dry run answers, since no formula does
    (predict.sent, "1F1B, ZeRO-2, tp + sp, tied", {}, False), (predict.sent, "ring, tp", {}, False),
    (predict.sent, "dp", ENDS, False), (predict.sent, "tp", ENDS, True), (predict.sent, "ring", ENDS, True),
    (predict.sent, "tp, LoRA", {}, False), (predict.sent, "1F1B, dp, LoRA", FEW, False),
    (predict.sent, "tp, LoRA", FEW, True), (predict.sent, "ring, LoRA", FEW, True),
    (predict.sent, "tp, autocast", {}, False), (predict.sent, "dp, autocast, LoRA", {}, False),
    (predict.sent, "tp, autocast, LoRA", {}, True), (predict.sent, "tp, FP8", {}, False),
    (predict.sent, "dp, FP8", dict(fp8="current"), False), (predict.sent, "tp, FP8", dict(fp8="current"), True),
    (predict.sent, "dp, FP8", dict(fp8="delayed"), True),
    (predict.activations, "1F1B, ZeRO-2, tp + sp, tied", ALL, False), (predict.activations, "1F1B", {}, True),
    (predict.activations, "ring, selective", ALL, False), (predict.activations, "Ulysses", ALL, False),
    (predict.activations, "ZB-H1", ALL, True), (predict.activations, "ep", ALL, True),
    (predict.activations, "tp", ALL | dict(dropout=0.1), False), (predict.activations, "dp, FP8", ALL, True),
    (predict.activations, "full", ALL | dict(dropout=0.1), True), (predict.activations, "full", ALL, False),
    (predict.activations, "autocast", ALL, False), (predict.activations, "dp, autocast", ALL, True),
    (predict.activations, "dp, LoRA, bf16", ALL | dict(attention="sdpa"), True),
]  # fmt: skip


@pytest.mark.parametrize("question, names, how, dry", ASKED)
def test_a_dry_run_answers_where_there_is_no_formula_and_only_there(question, names, how, dry):
    plan = case(tuple(names.split(", ")), **how)
    answer = question(plan.model, plan.train, plan.mesh)
    assert answer and all(("dry run" in line.note) is dry for line in answer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("d_head", [2, 4])
def test_the_smallest_heads_that_rope_turns(d_head, precision):
    """Halves of one number: PyTorch takes another kernel for them, which keeps scores."""
    model = replace(
        GPT2, d_model=16, num_heads=16 // d_head, num_kv_heads=16 // d_head, d_head=d_head,
        seq_len=16, vocab_size=8, positions="rope",
    )  # fmt: skip
    train = TrainConfig(micro_batch=1, global_batch=1, precision=precision, attention="sdpa")
    found, dry = activations_both_ways(model, train, Mesh(), 0)
    assert found == dry


def activations_both_ways(*plan):
    """Bytes of activations by the formula, and in a dry run."""
    moments = rehearsal(*plan).history.only("activations").moments
    most = max(sum(x.amount for x in m.ledger if x.name != BATCH) for m in moments)
    return predict.activations(*plan).total, most


REAL = {  # on processes there are others in test_compositions
    ("ZeRO-1", "tp + sp"): {}, ("ZeRO-2", "ring", "full"): {}, ("1F1B", "ZeRO-3", "bf16"): {},
    ("dp", "selective", "bf16"): {}, ("tp + sp", "tied"): dict(dropout=0.1, num_kv_heads=1),
}  # fmt: skip


@pytest.mark.parametrize("names, given", REAL.items(), ids=map(" × ".join, REAL))
def test_ranks_hold_what_a_dry_run_says_at_the_fullest_moment_of_each_phase(names, given):
    plan = case(names, **given)
    real, dry = phases(plan, messages="paired")
    last = plan.model, plan.train, plan.mesh, plan.mesh.size - 1
    said, found = predict.peak(*last), rehearsal(*last).history.phases
    assert real == dry
    assert said.phases == {name: found[name].ledger.total for name in said.phases}
    assert said.total == max(said.phases.values())


def test_where_nothing_is_trained_no_phase_is_backward():
    train = TrainConfig(micro_batch=1, global_batch=2, precision="fp32", frozen=("*",))
    said = predict.peak(GPT2, train)
    found = rehearsal(GPT2, train, Mesh(), 0).history
    assert said.total == found.peak.ledger.total and said.phase == "forward"
    assert "backward" not in said.phases


@pytest.mark.parametrize("attention, layout, precision, s, block", [
    ("ring", "zigzag", "bf16", 128, (8, 8)), ("ring", "contiguous", "fp32", 94, (10, 6)),
    ("ulysses", "zigzag", "bf16", 108, (12, 20)),
])  # fmt: skip
def test_two_tiles_of_each_kind_hold_what_all_of_them_hold(
    attention, layout, precision, s, block, monkeypatch
):
    """What makes the peak of a long sequence a matter of seconds."""
    monkeypatch.setattr(flash.algorithms, "default_blocks", lambda heads: block)
    model = ModelConfig(
        num_layers=1, d_model=16, num_heads=2, d_ff=16, vocab_size=8, seq_len=s, num_kv_heads=2
    )
    train = TrainConfig(
        micro_batch=1, global_batch=1, attention=attention, layout=layout, precision=precision
    )
    asked = model, train, Mesh(cp=2), 1
    few = predict_rehearsal.rehearsal.__wrapped__(*asked)
    monkeypatch.setattr(predict_rehearsal, "_few_tiles", flash.Tiling)
    all_ = predict_rehearsal.rehearsal.__wrapped__(*asked)
    assert len(few.history.moments) < len(all_.history.moments)
    assert few.sent == all_.sent and few.states == all_.states
    assert few.history.peak == all_.history.peak and few.history.phases == all_.history.phases
    for part in ("weights", "gradients", "activations"):
        assert few.history.only(part).peak == all_.history.only(part).peak


LONG = {  # micro-batches, as many as the last number
    "accumulated": (Mesh(dp=2), dict(zero=2, precision="bf16"), 10),
    "1f1b": (Mesh(pp=2, tp=2), dict(sequence=True), 19),
    "interleaved": (Mesh(pp=2, dp=2), dict(schedule="interleaved", chunks=2, zero=1), 26),
    "zb_v": (Mesh(pp=2), dict(schedule="zb_v"), 26),
    "dualpipe": (Mesh(pp=2, dp=2), dict(schedule="dualpipe", zero=2), 26),
    "ring": (Mesh(pp=2, cp=2), dict(attention="ring", checkpointing="full"), 18),
    "scales that ranks agree on": (Mesh(tp=2), dict(fp8="delayed"), 10),
}


@pytest.mark.parametrize("mesh, given, m", LONG.values(), ids=LONG)
def test_two_short_steps_tell_what_a_long_one_holds_and_sends(mesh, given, m, monkeypatch):
    model = replace(GPT2, num_layers=2 * mesh.pp, d_model=16, seq_len=4, vocab_size=40)
    train = TrainConfig(**{"micro_batch": 1, "global_batch": m * mesh.dp, "precision": "fp32"} | given)
    asked = model, train, mesh, mesh.size - 1
    questions = predict.peak, predict.peak_states, predict.activations, predict.sent
    run = []
    monkeypatch.setattr(
        predict_rehearsal, "rehearsal", lambda *plan: run.append(plan[1]) or rehearsal(*plan)
    )
    told = [ask(*asked) for ask in questions]
    assert all(short.global_batch < train.global_batch for short in run)
    whole = predict_rehearsal.Told(rehearsal(*asked), rehearsal(*asked), 0)
    monkeypatch.setattr(predict_rehearsal, "told", lambda *plan: run.append(train) or whole)
    assert told == [ask(*asked) for ask in questions] and run[-1] == train


def test_a_schedule_that_holds_the_more_the_more_there_are_is_run_at_length():
    """Of few micro-batches the update is the fullest moment; of many what GPipe holds."""
    model = replace(GPT2, d_model=256, d_ff=1024, seq_len=2, vocab_size=40)
    few, many = (
        TrainConfig(micro_batch=1, global_batch=m, schedule="gpipe", precision="fp32")
        for m in (6, 60)
    )
    assert predict.peak(model, few, Mesh(pp=2)).phase == "optimizer"
    asked = model, many, Mesh(pp=2)
    found, history = predict.peak(*asked), rehearsal(*asked, 0).history
    assert found.total == history.peak.ledger.total and found.phase == "backward"


@pytest.mark.parametrize("given, scalars", [
    (dict(precision="fp32"), 8), (dict(precision="bf16"), 2), (dict(autocast=True), 8),
    (dict(precision="fp32", global_batch=4), 28),
], ids=str)  # fmt: skip
def test_on_one_device_a_step_of_a_mesh_holds_what_memory_says_and_the_weights_of_losses(
    given, scalars
):
    """Why `memory.recording` has a loop of its own."""
    model = replace(ModelConfig.named("gpt2"), num_layers=3)
    train = TrainConfig(**{"micro_batch": 1, "global_batch": 1} | given)
    assert predict.peak(model, train).total - memory.peak(model, train).total == scalars


BEGUN = {
    "dense": (("1F1B", "dp"), {}),
    "two experts": ((), dict(num_experts=2, top_k=2)),  # both get every token
    "ring": (("ring",), {}),
    "8 bits": (("FP8",), {}),
}


@pytest.mark.parametrize("names, given", BEGUN.values(), ids=BEGUN)
def test_the_step_that_a_dry_run_records_is_one_of_a_training_that_has_begun(names, given):
    plan = case(names, **given)
    with World(plan.mesh, timeout=60) as world:
        real = world.run(second_step, plan.model, plan.train)[-1]
    dry = predict.peak(plan.model, plan.train, plan.mesh, plan.mesh.size - 1)
    assert {name: real[name] for name in dry.phases} == dry.phases


def second_step(rank, model, train):
    """Bytes at the fullest moment of each phase of the second of two steps. A message is with its receiver when a send is over: else it counts where it was made, for as long as the other thread takes."""
    mine = step.build(model, train, rank.mesh)(rank)
    rows = train.global_batch // rank.mesh.dp, model.seq_len // rank.mesh.cp
    sides = [torch.zeros(rows, dtype=torch.long) for _ in range(2)]
    batches = list(zip(*(side.split(train.micro_batch) for side in sides), strict=True))
    mine(batches)
    with measure.recording(mine.stages, *mine.inner) as recorder:
        recorder.guess(sides, "activations", BATCH)
        mine(batches, messages="paired")
    return {name: phase.ledger.total for name, phase in recorder.history().phases.items()}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_zero_shards_model_states(level):
    """What each level divides, but for the padding of 13
    units or of some tens of buckets."""
    model = ModelConfig.named("gpt2")
    train = TrainConfig(micro_batch=1, global_batch=3, zero=level, precision="fp32")
    whole, shard = 4 * model.num_params, 4 * model.num_params / 3
    states = predict.states(model, train, Mesh(dp=3)).by("name")
    padding = 4 * 3 * 40
    assert 0 <= states["weights"] - (shard if level == 3 else whole) < padding
    assert 0 <= states["gradients"] - (shard if level >= 2 else whole) < padding
    assert states["exp_avg"] == states["exp_avg_sq"]
    assert 0 <= states["exp_avg"] - (shard if level else whole) < padding


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("level, apart", [(1, False), (1, True), (2, False), (2, True), (3, False)])
def test_what_is_held_is_one_fact(n, level, apart):
    """`predict.peak_states` and `predict.states` say the same of every rank, which is what the
    elements say that the rank steps, counted one by one."""
    train = TrainConfig(micro_batch=1, global_batch=n, zero=level, precision="fp32")
    train = replace(train, bucket_bytes=1) if apart else train  # each parameter its own bucket
    shapes = {name: p.shape for name, p in GPT(GPT2).named_parameters()}
    if level < 3:
        buckets = [[name] for name in shapes] if apart else [list(reversed(shapes))]
    else:
        buckets = [[name for name in shapes if not name.startswith("blocks.")]]
        buckets += [[x for x in shapes if x.startswith(f"blocks.{i}.")] for i in range(2)]
    total = 0
    for rank in range(n):
        owned = []
        for bucket in buckets:
            elements = [name for name in bucket for _ in range(shapes[name].numel())]
            share = -(-len(elements) // n)
            owned.append(elements[rank * share : (rank + 1) * share])
        numbers = sum(map(len, owned))
        counters = sum(len(set(each)) for each in owned)
        said = predict.states(GPT2, train, Mesh(dp=n), rank).by("name")
        held = predict.peak_states(GPT2, train, Mesh(dp=n), rank).by("name")
        for lines in (said, held):
            assert lines["exp_avg"] == lines["exp_avg_sq"] == 4 * numbers
            assert lines["step"] == 4 * counters
        total += numbers
    assert total == GPT2.num_params


# ── in time ───────────────────────────────────────────────────────────────────────────────────────

BANDWIDTH = 1e9
WIRE = Link(0.0, BANDWIDTH)
DEVICE = replace(
    Hardware.named("H100"), node=10**6, inside=WIRE, network=WIRE,
    reached={"products": 1.0, "attention": 0.5},
)  # fmt: skip
UNTIED = ModelConfig(
    num_layers=4, d_model=16, num_heads=4, d_ff=36, vocab_size=44, seq_len=16, tied=False
)  # fmt: skip
MIXTURE = replace(UNTIED, num_experts=4, top_k=2)
TIMED = [
    (UNTIED, Mesh(pp=2, dp=2, tp=2), dict(sequence=True, checkpointing="full", zero=1)),
    (UNTIED, Mesh(pp=2, tp=2), dict(schedule="zb_h1", checkpointing="selective")),
    (UNTIED, Mesh(pp=2, cp=2), dict(schedule="interleaved", attention="ring")),
    (UNTIED, Mesh(dp=2, cp=2), dict(attention="ulysses", zero=1, checkpointing="full")),
    (MIXTURE, Mesh(dp=4, ep=2), dict(checkpointing="full", clip=1.0)),
    (UNTIED, Mesh(pp=2, dp=2), dict(schedule="dualpipe", fp32_gradients=True, zero=1)),
    (replace(UNTIED, tied=True), Mesh(pp=2, tp=2), {}),
]


@pytest.mark.parametrize("model, mesh, how", TIMED, ids=str)
def test_what_is_sent_takes_its_bytes_over_a_link(model, mesh, how):
    """On every axis, of the first and the last rank, where links have no latency."""
    train = TrainConfig(micro_batch=1, global_batch=4 * mesh.dp, **how)
    for rank in (0, mesh.size - 1):
        step = predict.time(model, train, mesh, rank, device=DEVICE)
        at = mesh.coords(rank)["pp"]
        assert sum(step.spent(at).values()) == pytest.approx(step.makespan)
        took, bytes_ = Counter(), Counter()
        for span in step.spans:
            took[span.kind] += (span.end - span.start) * (span.rank == at)
        for line in predict.sent(model, train, mesh, rank):
            if line.name not in ("targets", "gradient norm") and line.axis != "pp_dp_cp":
                axis = "dp" if line.axis in ("dp_cp", "edp") else line.axis
                bytes_[axis] += line.amount
        for axis in ("tp", "cp", "ep", "pp", "dp"):
            assert took[axis] * BANDWIDTH == pytest.approx(bytes_[axis]), axis


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("tied", [True, False])
def test_computing_takes_its_products_over_a_rate(tied, policy):
    """Those that a real step multiplies, its second passes with them; however backward is split."""
    model, tokens = replace(GPT2, tied=tied), torch.zeros(2, GPT2.seq_len, dtype=torch.long)
    net = checkpointing.apply(GPT(model), policy)
    counted = fused.product_flops(lambda: net.loss(tokens, tokens).backward())
    alike = replace(DEVICE, reached={"products": 0.5, "attention": 0.5})
    sizes = dict(micro_batch=2, global_batch=8, checkpointing=policy)
    step = predict.time(model, TrainConfig(**sizes), device=alike)
    assert step.makespan == pytest.approx(4 * counted / (0.5 * DEVICE.flops["bf16"]))
    two = [
        predict.time(model, TrainConfig(**sizes, schedule=name), Mesh(pp=2), device=alike).busy(0)
        for name in ("one_f_one_b", "zb_h1")
    ]
    assert two[0] == pytest.approx(two[1])


def test_fused_attention_skips_half_and_finds_scores_again_backward():
    """Half of the products forward, two and a half times as many backward, at a rate of its own."""
    took = {}
    for attention in ("plain", "sdpa"):
        train = TrainConfig(micro_batch=1, global_batch=1, attention=attention)
        took[attention] = predict.time(GPT2, train, device=DEVICE).makespan
    core = GPT2.seq_len * anatomy.token_flops(GPT2)["blocks.*.attention"] / DEVICE.rate("attention")
    assert took["plain"] - took["sdpa"] == pytest.approx((3 - 3.5 / 2) * core)


@pytest.mark.parametrize("how, said", [
    (dict(zero=2), "zero=2 sends beside computing: set zero=1"),
    (dict(frozen=("norm*",)), "not every weight has a gradient"),
    (dict(precision="fp64"), "no rate is known for precision='fp64'"),
    (dict(precision="fp32", fp8="current"), "no rate is known for fp8='current'"),
])  # fmt: skip
def test_a_step_that_cannot_be_put_in_time_is_refused(how, said):
    with pytest.raises(ValueError, match=said):
        predict.time(GPT2, TrainConfig(micro_batch=1, global_batch=1, **how), device=DEVICE)
