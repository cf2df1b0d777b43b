"""One step of any mesh: what it takes and gives, and what it refuses. That it is right on every mesh is the table's business (test_compositions)."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import equivalence
import pytest
import torch
from safetensors.torch import load_file
from small_models import random_

from labutils import step
from labutils.config import Adapters, Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.world import World, WorldError

MODEL = ModelConfig(**equivalence.MODEL)
TRAIN = TrainConfig(micro_batch=1, global_batch=8, precision="fp32", optimizer="sgd", lr=0.1)
ROWS = torch.arange(8 * 17).view(8, 17) * 5 % 24
BATCH = ROWS[:, :-1], ROWS[:, 1:]


def trained(train, mesh, *, whole=None, steps=1, model=MODEL):
    """Of each rank the losses of a few steps, and its weights."""
    make = step.build(model, train, mesh, whole=whole)

    def program(rank):
        mine = make(rank)
        taken = [mine(mine.share(*BATCH)) for _ in range(steps)]
        weights = {n: p.detach().clone() for n, p in mine.stages.named_parameters()}
        return [one.loss.item() for one in taken], weights, mine, taken

    with World(mesh, timeout=60) as world:
        return world.run(program)


def test_weights_are_drawn_as_those_of_a_gpt():
    mesh = Mesh(dp=2)
    wanted = GPT(MODEL, generator=torch.Generator().manual_seed(step.SEED))
    loss = wanted.loss(*BATCH).item()
    for losses, *_ in trained(TRAIN, mesh):
        assert losses == [pytest.approx(loss, rel=1e-6)]


def test_a_step_runs_on_the_mesh_that_it_was_built_for():
    """Elsewhere what was looked at is not what runs: plain attention, say, over tokens that cp shares out."""
    make = step.build(MODEL, TRAIN, Mesh(tp=2))
    with World(Mesh(cp=2)) as world, pytest.raises(WorldError, match=r"run it in World\(Mesh\(.*tp=2"):
        world.run(make)


def test_all_ranks_begin_with_the_model_of_the_first():
    """Also where each rank would make another one: the loss of two stages is that of one of the four."""
    seeds = itertools.count(3)
    found = trained(
        TRAIN, Mesh(pp=2, dp=2), whole=lambda: random_(GPT(MODEL).double(), next(seeds))
    )
    losses = [random_(GPT(MODEL).double(), seed).loss(*BATCH).item() for seed in range(3, 7)]
    assert {loss for (loss,), *_ in found} == {found[0][0][0]}
    assert min(abs(found[0][0][0] - loss) for loss in losses) < 1e-12


def test_a_rank_has_its_rows_and_of_these_its_tokens():
    train = replace(TRAIN, attention="ring", micro_batch=2)
    mesh = Mesh(dp=2, cp=2)
    make = step.build(MODEL, train, mesh)
    with World(mesh) as world:
        shares = world.run(lambda rank: make(rank).share(*BATCH))
    for rank, batches in enumerate(shares):
        dp, cp = mesh.coords(rank)["dp"], mesh.coords(rank)["cp"]
        at = [[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))][cp]
        tokens = torch.cat([tokens for tokens, _ in batches])
        assert len(batches) == 2 and (tokens == BATCH[0][4 * dp : 4 * dp + 4][:, at]).all()


def test_the_loss_is_that_of_the_whole_batch_on_every_rank():
    mesh = Mesh(pp=2, dp=2, tp=2)
    loss = random_(GPT(MODEL).double(), 3).loss(*BATCH).item()
    train = replace(TRAIN, schedule="dualpipe")
    for losses, *_ in trained(train, mesh, whole=lambda: random_(GPT(MODEL).double(), 3)):
        assert losses == [pytest.approx(loss, rel=1e-12)]


def test_one_rank_of_cp_takes_sequences_of_any_length():
    """Zigzag, of which `layout` speaks, is of two halves for each of several ranks."""
    model = replace(MODEL, seq_len=15)
    tokens, targets = (side[:, :15] for side in BATCH)
    with World(Mesh(dp=2)) as world:
        make = step.build(model, TRAIN, Mesh(dp=2))
        shares = world.run(lambda rank: make(rank).share(tokens, targets))
    assert torch.equal(torch.cat([mine for share in shares for mine, _ in share]), tokens)


def test_where_one_rank_overflows_in_fp16_all_skip():
    """A scale of 2^16 is too large for gradients beyond 1; who has none that are waits for the others."""
    train = replace(TRAIN, precision="fp16", autocast=True, clip=1.0)

    def whole():
        model = random_(GPT(MODEL), 3)
        model.norm.weight.data.mul_(1000)  # the gradient of the head alone overflows
        model.head.weight.data.div_(1000)
        return model

    found = trained(train, Mesh(pp=2, tp=2), whole=whole, steps=2)
    assert {mine.scaler.value for _, _, mine, _ in found} == {2.0**14}
    for losses, weights, *_ in found:
        assert losses[0] == losses[1], "the weights are those of the beginning"


@pytest.mark.parametrize("given, mesh", [
    (dict(frozen=("tokens*", "blocks.0.*")), Mesh(pp=2)),
    (dict(layers=(0, 2), num_layers=2, num_experts=4, top_k=2), Mesh(pp=2, dp=2, ep=2)),
], ids=["the first stage learns nothing", "experts on the last stage alone"])  # fmt: skip
def test_ranks_agree_in_fp16_whatever_each_of_them_trains(given, mesh):
    """Those who train nothing, and those with experts beside the rest, ask the others as often."""
    model = replace(MODEL, **{k: v for k, v in given.items() if k in vars(MODEL)})
    how = {k: v for k, v in given.items() if k not in vars(MODEL)}
    train = replace(TRAIN, precision="fp16", clip=1.0, **how)
    found = trained(train, mesh, steps=2, model=model)
    assert len({tuple(losses) for losses, *_ in found}) == 1
    assert len({mine.scaler.value for _, _, mine, _ in found}) == 1
    for rank in (0, mesh.size - 1):
        assert equivalence.rehearsed(model, train, mesh, rank) == (0, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_losses_that_are_too_many_for_fp16_have_a_mean(tp):
    """128 targets of 1,000 nats each add up beyond 65,504."""
    make = step.build(MODEL, replace(TRAIN, precision="fp16"), mesh := Mesh(tp=tp))

    def program(rank):
        logits = torch.tensor([0.0] * 23 + [1000.0], dtype=torch.float16).expand(1, 128, 24)
        return make(rank)._mean(logits.chunk(tp, -1)[rank.rank], logits.new_zeros(1, 128).long())

    with World(mesh) as world:
        assert world.run(program) == [torch.tensor(1000.0)] * tp


MESH = Mesh()
WRONG = [
    (dict(mesh=Mesh(cp=2)), "attention='plain' sees the tokens of one rank, and cp=2: give attention='ring'"),
    (dict(attention="ring", dropout=0.1), "no mask for keys that travel: build the model with dropout=0"),
    (dict(sequence=True), "tp=1: set sequence=False or tp of 2 or more"),
    (dict(mesh=Mesh(dp=2, ep=2)), "ep=2 spreads experts, and the model has none"),
    (dict(mesh=Mesh(dp=3, ep=3), num_experts=4, top_k=1, global_batch=9), "ep=3 does not divide num_experts=4"),
    (dict(mesh=Mesh(tp=4), num_heads=2), "tp=4 does not divide num_heads=2"),
    (dict(mesh=Mesh(cp=4), attention="ulysses", num_heads=6, d_model=12), "cp=4 does not share out 6 heads"),
    (dict(mesh=Mesh(cp=2, tp=4), attention="ulysses"), "cp=2 does not share out 1 heads"),
    (dict(mesh=Mesh(cp=8, tp=2), attention="ring", sequence=True, seq_len=24, layout="contiguous"), "tp=2 does not divide the 3 tokens of a rank"),
    (dict(mesh=Mesh(cp=3), attention="ring"), "16 tokens are not 6 equal chunks"),
    (dict(mesh=Mesh(pp=2), schedule="dualpipe", micro_batch=4), "m ≥ 2p: got p=2, m=2"),
    (dict(mesh=Mesh(pp=4), schedule="interleaved"), "2 layers do not fill 8 stages"),
    (dict(mesh=Mesh(pp=2), layers=(1, 1, 0)), "are for 3 stages, and one_f_one_b has 2"),
    (dict(frozen=("heads.*",)), "frozen='heads.*' is the name of no parameter: anatomy.tensors(model)"),
    (dict(d_head=3), "d_head=3 is odd: RoPE turns pairs of numbers, so give the heads an even width"),
    (dict(mesh=Mesh(pp=2), layers=(1, 2)), "stages of 1, 2 layers do not make a model of 2"),
    (dict(mesh=Mesh(pp=2), schedule="interleaved", layers=(1, 0, 1, 0)), "stage 1 has nothing to do; give it a layer"),
    (dict(adapters=Adapters(rank=2, alpha=4, pattern="gates")), "no layer's name ends in 'gates': use *, or some of down, gate"),
    (dict(mesh=Mesh(tp=2), fp8="tiles"), "tp=2 cuts tiles of 128 numbers of a layer: set fp8='current'"),
    (dict(mesh=Mesh(dp=3)), "global_batch=8 is not a multiple of micro_batch · dp = 1 · 3: take 9, say"),
]  # fmt: skip


@pytest.mark.parametrize("given, message", WRONG, ids=[message for _, message in WRONG])
def test_what_cannot_be_is_refused_before_anything_is_built(given, message):
    given = dict(given)
    mesh = given.pop("mesh", MESH)
    sizes = {key: given.pop(key) for key in list(given) if key in ModelConfig.__dataclass_fields__}
    with pytest.raises(ValueError) as refused:
        model = ModelConfig(**(equivalence.MODEL | sizes))
        step.build(model, replace(TRAIN, **given), mesh, whole=None)
    assert message in str(refused.value)


CONFIG = [
    (dict(schedule="1f1b"), "schedule must be one of 'naive', 'gpipe', 'one_f_one_b'"),
    (dict(attention="rings"), "attention must be one of 'plain', 'sdpa', 'ring', 'ulysses'"),
    (dict(fp8="e4m3"), "fp8 must be one of None, 'unscaled', 'current'"),
    (dict(clip=0.0), "clip must be a finite number above 0, got 0.0"),
    (dict(chunks=0), "chunks must be at least 1"),
    (dict(frozen="head.*"), "frozen takes a tuple of names, got 'head.*' (str): ('head.*',) is one"),
    (dict(layers=(1, "a")), "layers[1] must be a whole number, got 'a'"),
    (dict(adapters=8), "adapters must be config.Adapters or None, got 8"),
]


@pytest.mark.parametrize("given, message", CONFIG, ids=[message for _, message in CONFIG])
def test_a_plan_says_what_it_takes(given, message):
    with pytest.raises((ValueError, TypeError)) as refused:
        replace(TRAIN, **given)
    assert message in str(refused.value)


def test_what_only_looks_like_a_schedule_is_none():
    train = replace(TRAIN, schedule=SimpleNamespace(ranks=()))
    with pytest.raises(TypeError, match="schedule takes a Schedule, got"):
        step.build(MODEL, train, Mesh(pp=2))


def test_adapters_say_what_they_take():
    with pytest.raises(ValueError, match="base must be one of '', 'nf4', got 'int4'"):
        Adapters(rank=1, alpha=1, base="int4")


def test_a_batch_of_another_size_is_named():
    make = step.build(MODEL, TRAIN, MESH)
    with World(MESH) as world, pytest.raises(Exception, match="7 sequences: give global_batch=8"):
        world.run(lambda rank: make(rank).share(*(side[:7] for side in BATCH)))


def test_targets_that_are_not_one_for_each_token_are_named():
    make, (tokens, targets) = step.build(MODEL, TRAIN, MESH), BATCH
    with World(MESH) as world:
        for wrong, said in {targets[:7]: "give each token its target", None: "share takes a Tensor"}.items():
            with pytest.raises(Exception, match=said):
                world.run(lambda rank, wrong=wrong: make(rank).share(tokens, wrong))


GPT2 = dict(equivalence.GPT2, tied=True, num_layers=3)
MOVES = {  # the model, and meshes of which the first writes and each goes on
    "Llama": (dict(num_layers=3), ("tp + sp", "1F1B, ZeRO-1, tp", "ZeRO-3, ring", "DualPipe, dp")),
    "GPT-2, tied": (GPT2, ("1F1B, ZeRO-2, tp + sp", "ZB-V, Ulysses", "ZeRO-3, tp", "interleaved")),
    "experts": (dict(num_experts=4, top_k=2), ("1F1B, ZeRO-1, ep", "dp", "ring, ep, tp")),
    "bf16": ({}, ("dp, bf16", "ZeRO-3, tp, bf16", "1F1B, ZeRO-2, bf16")),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_snapshot_of_any_mesh_loads_on_any_other(name, tmp_path):
    """To the bit: what is read is written again the same; and a step on from there is that of the mesh that wrote it."""
    sizes, meshes = MOVES[name]
    model = ModelConfig(**(equivalence.MODEL | sizes))
    cases = [replace(equivalence.case(names.split(", ")), model=model) for names in meshes]
    equivalence.stepped(cases[0], None, 2, tmp_path / "two")
    two = load_file(tmp_path / "two")
    trained = {key for key in two if "/" not in key}
    assert trained == {key for key, _ in GPT(model).named_parameters()}
    assert len(two) == 2 * len(trained) - 1  # with momentum, of which what is frozen has none
    found = []
    for i, case in enumerate(cases):
        equivalence.stepped(case, tmp_path / "two", 0, tmp_path / "again")
        again = load_file(tmp_path / "again")
        assert again.keys() == two.keys() and all(torch.equal(again[k], two[k]) for k in two), i
        (loss,), after, about = equivalence.stepped(case, tmp_path / "two", 1, tmp_path / "three")
        assert about == {"steps": 2}
        found.append((loss, after, load_file(tmp_path / "three")))
    exact = case.train.precision == "fp64"
    for loss, after, three in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-12 if exact else 1e-3)
        assert after == pytest.approx(found[0][1], rel=1e-12 if exact else 1e-3)
        for key, weight in found[0][2].items():
            most = 1e-12 if exact else 5e-2 if "/" in key else 4e-3
            assert (three[key].double() - weight.double()).abs().max() <= most, key


def test_the_loss_scale_goes_on_from_a_snapshot(tmp_path):
    make = step.build(MODEL, replace(TRAIN, precision="fp16", autocast=True), Mesh(dp=2))

    def program(rank):
        mine, other = make(rank), make(rank)
        mine.scaler.value, mine.scaler.good_steps = 512.0, 7
        mine.save(tmp_path / "run")
        other.load(tmp_path / "run")
        return other.scaler.value, other.scaler.good_steps

    with World(Mesh(dp=2)) as world:
        assert world.run(program) == [(512.0, 7)] * 2


def test_what_a_snapshot_does_not_keep_is_refused(tmp_path):
    def program(rank, train):
        step.build(MODEL, train, Mesh())(rank).save(tmp_path / "run")

    delayed = replace(TRAIN, fp8="delayed")
    packed = replace(TRAIN, adapters=Adapters(rank=2, alpha=4, base="nf4"))
    with World(1) as world:
        with pytest.raises(WorldError, match="delayed.*fp8='current', whose scales are those"):
            world.run(program, delayed)
        with pytest.raises(WorldError, match="a snapshot has no numbers like .*uint8: keep lora"):
            world.run(program, packed)


@pytest.mark.parametrize("names", ["1F1B, dp, tp", "ZeRO-3, ring", "DualPipe, tied", "ZB-V"])
@pytest.mark.parametrize("rows", [1, 7])
def test_a_batch_of_any_size_is_evaluated_and_nothing_changes(names, rows):
    case = equivalence.case(names.split(", "))
    tokens, targets = (side[-rows:] for side in equivalence.data(case))
    wanted = equivalence.whole(case).eval().loss(tokens, targets).item()
    make = step.build(case.model, case.train, case.mesh, whole=lambda: equivalence.whole(case))

    def program(rank):
        mine = make(rank)
        before = [p.detach().clone() for p in mine.stages.parameters()]
        with torch.device("meta"):  # as in `equivalence.on_ranks`
            loss = mine.evaluate(tokens, targets).item()
        assert all(map(torch.equal, mine.stages.parameters(), before)) and mine.stages.training
        assert all(p.grad is None for p in mine.stages.parameters())
        return loss

    with World(case.mesh, timeout=60) as world:
        assert world.run(program) == [pytest.approx(wanted, rel=1e-12)] * case.mesh.size


def test_where_micro_batches_flow_both_ways_evaluating_goes_one():
    """Over four stages, where a rank that took both of its own would wait for what nobody sends."""
    make = step.build(MODEL, replace(TRAIN, schedule="dualpipe"), mesh := Mesh(pp=4))
    wanted = GPT(MODEL, generator=torch.Generator().manual_seed(step.SEED)).loss(*BATCH).item()
    with World(mesh, timeout=60) as world:
        found = world.run(lambda rank: make(rank).evaluate(*BATCH).item())
    assert found == [pytest.approx(wanted, rel=1e-6)] * 4


def test_what_is_sent_for_evaluating_is_not_a_training_step():
    """A rank may forget its books, which would grow by a line for each message."""
    make = step.build(MODEL, TRAIN, Mesh(dp=2))

    def program(rank):
        mine = make(rank)
        mine(mine.share(*BATCH))
        rank.forget()
        mine.evaluate(*BATCH)

    with World(Mesh(dp=2)) as world:
        world.run(program)
        assert {line.name for line in world.ledger} == {"evaluate"}
