"""Schedules carried out on ranks: equal to the whole model, in the schedule's order, sent and held as predicted."""

import contextlib
import functools
import itertools
import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from labutils import anatomy, data_parallel, measure, pipeline, schedule, zero
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.pipeline import execute
from labutils.schedule import Durations
from labutils.teach import rigs
from labutils.world import DeadlockError, RankError, World

SIZES = dict(num_layers=6, d_model=8, num_heads=2, d_ff=12, vocab_size=14, seq_len=6)
TIED = ModelConfig(**SIZES)
LLAMA = ModelConfig(
    **SIZES, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False, num_kv_heads=1
)
PLANS = [
    (schedule.naive(2, 2), TIED),
    (schedule.gpipe(3, 3), LLAMA),
    (schedule.one_f_one_b(1, 2), TIED),
    (schedule.one_f_one_b(2, 4), LLAMA),
    (schedule.one_f_one_b(4, 5), TIED),
    (schedule.eager_one_f_one_b(3, 4), TIED),
    (schedule.interleaved(2, 2, chunks=3), TIED),
    (schedule.breadth_first(2, 2), LLAMA),
    (schedule.zb_h1(3, 4), TIED),
    (schedule.zb_h2(2, 4), LLAMA),
    (schedule.zb_auto(3, 3, 3), LLAMA),
    (schedule.interleaved_zb(2, 2), TIED),
    (schedule.zb_v(1, 2), TIED),
    (schedule.zb_v(3, 3), LLAMA),
    (schedule.dualpipe_v(2, 4), TIED),
    (schedule.dualpipe(4, 8), LLAMA),
    (schedule.dualpipe(2, 4), TIED),
]
# A layer more than stages: some have two.
ALL = [(plan, replace(config, num_layers=plan.stages + 1)) for plan, config in PLANS]
each_schedule = pytest.mark.parametrize(
    "plan, config", ALL, ids=[f"{one.name} {len(one.ranks)}x{one.micro_batches}" for one, _ in ALL]
)
FOUR = schedule.one_f_one_b(4, 5)


@functools.cache
def ranks(p):
    return World(Mesh(pp=p))


@pytest.mark.parametrize("plan, rank, layers, kept, ends", [
    (schedule.gpipe(3, 3), 0, None, {0, 1}, {"tokens", "positions"}),
    (schedule.gpipe(3, 3), 1, (1, 3, 2), {1, 2, 3}, set()),
    (schedule.gpipe(3, 3), 2, (1, 4, 1), {5}, {"norm", "head"}),
    (schedule.zb_v(2, 4), 0, (1, 2, 2, 1), {0, 5}, {"tokens", "positions", "norm", "head"}),
    (schedule.interleaved(2, 2, chunks=2), 1, (1, 2, 2, 1), {1, 2, 5}, {"norm", "head"}),
])  # fmt: skip
def test_a_rank_keeps_the_layers_and_ends_of_its_stages_alone(plan, rank, layers, kept, ends):
    model = pipeline.keep(GPT(TIED), plan, rank, layers)
    assert {k for k in range(6) if getattr(model.blocks, str(k)) is not None} == kept
    parts = {"tokens", "positions", "norm", "head"}
    assert {name for name in parts if getattr(model, name) is not None} == ends



def batches(m, rows=1):
    made = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(14, (rows, 6), generator=made) for _ in range(2)) for _ in range(m)]


def build(config, seed=0):
    """A model whose biases and norms, too, are random."""
    model, made = GPT(config).double(), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=made)
    return model


def own(plan, model, rank):
    return pipeline.local(pipeline.split(model, plan.stages), plan, rank)


def named(module):
    """Gradients and weights by their names in the whole model."""
    found = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        name = name if isinstance(module, GPT) else name.partition(".")[2]
        found[name] = (None if p.grad is None else p.grad.clone(), p.detach().clone())
    return found


def trained(rank, plan, config, *, steps=2, given=None, frozen=(), turned=None, **options):
    """Losses and runs of some steps, the last gradients, the weights."""
    comm = rank.comm("pp")
    model = build(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    stages = own(plan, model, comm.rank)
    if comm.rank == turned:
        stages = torch.nn.ModuleList(reversed(stages))
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    runs = []
    for _ in range(steps):
        optimizer.zero_grad()
        given = given or batches(plan.micro_batches)
        runs.append(pipeline.run(stages, plan, comm, given, **options))
        optimizer.step()
    return runs, named(stages)


@functools.cache
def alone(config, m, steps=2, frozen=(), rows=1):
    model = build(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, (tokens, targets) = [], map(torch.cat, zip(*batches(m, rows), strict=True))
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, named(model)


def assert_equal(results, expected):
    """Losses, gradients and weights of all ranks together are those of the whole model."""
    losses, whole = expected
    for step, loss in enumerate(losses):
        parts = [runs[step].loss for runs, _ in results if runs[step].loss is not None]
        assert sum(map(float, parts)) == pytest.approx(loss, rel=1e-10)
    assert set().union(*(table for _, table in results)) == set(whole)
    for _, table in results:
        for name, pair in table.items():
            for found, wanted in zip(pair, whole[name], strict=True):
                same = found is wanted or torch.allclose(found, wanted, rtol=1e-10, atol=1e-10)
                assert same, name


# ── equal to the whole model ───────────────────────────────────────────────────────────────────────


@each_schedule
def test_equal_to_the_whole_model_in_the_order_of_the_schedule(plan, config):
    """Two steps; what ran, what was held meanwhile and what was sent are what the schedule says."""
    world = ranks(len(plan.ranks))
    results = world.run(trained, plan, config)
    assert_equal(results, alone(config, plan.micro_batches))
    for rank, (runs, _) in enumerate(results):
        for one in runs:
            assert one.ops == plan.ranks[rank]
            assert one.in_flight == tuple(plan.in_flight(rank))
    sent = rigs.pipeline.between_stages(plan, config).scaled(2)
    assert sent.diff(world.ledger).unexplained == 0
    assert {line.key: line.count for line in sent} == {x.key: x.count for x in world.ledger}


V = [schedule.zb_v(2, 4), schedule.interleaved(2, 4), schedule.dualpipe_v(3, 6)]


@pytest.mark.parametrize("plan", [FOUR, *V], ids=lambda plan: plan.name)
def test_blocking_sends_in_pairs_do_the_same(plan):
    results = ranks(len(plan.ranks)).run(trained, plan, TIED, steps=1, messages="paired")
    assert_equal(results, alone(TIED, plan.micro_batches, 1))


def test_a_comparison_finds_what_is_off():
    """Swapped messages in a V: only values tell."""
    for messages in ("matched", "unmatched"):
        beside = rigs.pipeline.compare(V[0], TIED, messages=messages)
        assert beside.equal == (messages == "matched")
        assert (beside.error > 0.1) == (messages == "unmatched")
        assert beside.kept == tuple(V[0].peak(rank) for rank in range(2))
        assert beside.predicted.diff(beside.sent).unexplained == 0
        assert beside.run.schedule == V[0]
    assert not replace(beside, loss=beside.alone).equal


def test_uneven_micro_batches_count_for_what_they_hold():
    """Their rows."""
    plan, whole = schedule.zb_h1(2, 3), batches(1, 4)[0]
    pieces = [tuple(half[a:b] for half in whole) for a, b in ((0, 1), (1, 3), (3, 4))]
    results = ranks(2).run(trained, plan, LLAMA, steps=1, given=pieces)
    model = build(LLAMA)
    loss = model.loss(*whole)
    loss.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert_equal(results, ([loss.item()], named(model)))


@pytest.mark.parametrize("plan", [schedule.interleaved(2, 2), schedule.dualpipe(2, 4)])
def test_stages_may_stand_in_any_order(plan):
    """On one rank only, too: what two of them share they still meet over in one order."""
    config = replace(TIED, num_layers=plan.stages + 1)
    results = ranks(2).run(trained, plan, config, turned=1)
    assert_equal(results, alone(config, plan.micro_batches))


@pytest.mark.parametrize("make", [schedule.one_f_one_b, schedule.zb_h1])
def test_frozen_parameters_stay_as_they_are(make):
    """Also all of the first stage."""
    frozen = (
        "tokens",
        "positions",
        "blocks.0.",
        "blocks.1.",
        "blocks.2.",
        "blocks.5.attention",
        "down.weight",
    )
    results = ranks(3).run(trained, make(3, 3), replace(TIED, tied=False), frozen=frozen)
    assert_equal(results, alone(replace(TIED, tied=False), 3, 2, frozen))


# ── what hangs, and what is silently wrong ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("messages", ["matched", "unmatched", "blocking", "paired"])
def test_what_an_operation_needs_has_come_before_it(messages):
    """Also where messages come in another order than they are used."""
    for plan in (schedule.zb_v(2, 4), schedule.interleaved_zb(2, 4, 2), schedule.dualpipe_v(2, 4)):
        for rank in range(2):
            here = set()
            for kind, op, *_ in pipeline.actions(plan, rank, messages):
                if kind == "run":
                    assert set(plan.inputs(op)) <= here
                if kind in ("recv", "run"):
                    here.add(op)


def test_blocking_sends_hang():
    """All but naive and GPipe."""
    with pytest.raises(DeadlockError, match="rank 0 waits in send.*inside send forward"):
        ranks(2).run(trained, schedule.one_f_one_b(2, 2), TIED, messages="blocking")
    for plan in (schedule.naive(2, 2), schedule.gpipe(2, 2)):
        results = ranks(2).run(trained, plan, TIED, steps=1, messages="blocking")
        assert_equal(results, alone(TIED, 2, 1))


def test_in_a_v_messages_are_swapped_unless_received_in_the_order_of_sends():
    """Forwards and backwards go the same way, and are of one shape: nobody complains."""
    ((_, first), _) = ranks(2).run(trained, V[0], TIED, steps=1, messages="unmatched")
    _, right = alone(TIED, 4, 1)
    name = "blocks.0.attention.query.weight"
    assert (first[name][0] - right[name][0]).norm() > 0.1 * right[name][0].norm()
    results = ranks(2).run(trained, schedule.zb_h1(2, 4), TIED, steps=1, messages="unmatched")
    assert_equal(results, alone(TIED, 4, 1))


@pytest.mark.parametrize("messages", pipeline.MESSAGES)
def test_what_is_sent_is_received(messages):
    """Each message once, between its two ranks; what runs is the schedule."""
    for plan, _ in PLANS:
        rows = [pipeline.actions(plan, rank, messages) for rank in range(len(plan.ranks))]
        sends, receives = set(), set()
        for rank, row in enumerate(rows):
            assert tuple(each.op for each in row if each.do == "run") == plan.ranks[rank]
            sends |= {(rank, each.peer, each.op) for each in row if "send" in each.do}
            receives |= {(each.peer, rank, each.op) for each in row if each.do == "recv"}
        count = sum(each.do != "run" for row in rows for each in row)
        assert sends == receives and count == 2 * len(sends)


# ── B and W ────────────────────────────────────────────────────────────────────────────────────────


def test_the_two_halves_of_a_backward_pass_compute_it_once():
    """B the gradient of the input, W those of the matrices; together 2 FLOPs for each of the forward."""
    config = replace(LLAMA, num_layers=2)
    stage = pipeline.split(build(config), 2, (1, 1))[1]
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    flops, found = {}, []
    for later in (None, []):
        stage.zero_grad()
        given = x.clone().requires_grad_()
        with FlopCounterMode(display=False) as forward:
            if later is None:
                y = stage(given)
            else:
                # Who records what is kept hands back another tensor than the weight.
                with pipeline.Later(later), saved_tensors_hooks(Tensor.detach, lambda kept: kept):
                    y = stage(given)
        with FlopCounterMode(display=False) as backward:
            y.square().sum().backward()
        del y
        missing = [name for name, p in stage.named_parameters() if p.grad is None]
        with FlopCounterMode(display=False) as weights:
            pipeline.pay(later or [])
        flops[later is None] = [c.get_total_flops() for c in (forward, backward, weights)]
        found.append([given.grad, *(p.grad.clone() for p in stage.parameters())])
        matrices = [name for name, p in stage.named_parameters() if p.dim() == 2]
        assert missing == ([] if later is None else matrices) and not later
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(*found, strict=True))
    (forward, both, _), (same, b, w) = flops[True], flops[False]
    products = 2 * 6 * sum(p.numel() for p in stage.parameters() if p.dim() == 2)
    assert forward == same and both == b + w and w == products


def test_a_linear_whose_bias_is_named_adds_it():
    x, weight, bias = torch.randn(2, 3), torch.randn(4, 3, requires_grad=True), torch.randn(4)
    owed = []
    with pipeline.Later(owed):
        y = F.linear(x, weight, bias=bias)
        y.sum().backward()
    torch.testing.assert_close(y, F.linear(x, weight, bias))
    assert len(owed) == 1


def test_weights_are_paid_in_the_order_in_which_they_are_owed():
    paid = []
    weights = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    owed = [(each, lambda i=i: paid.append(i) or torch.ones(1)) for i, each in enumerate(weights)]
    pipeline.pay(owed)
    assert paid == [0, 1, 2] and not owed


# ── times, memory, bytes ───────────────────────────────────────────────────────────────────────────


class LogicalTime:
    """A clock for each thread, which a sleep moves on; what is received was sent before."""

    def __init__(self):
        self.here, self.sent = threading.local(), {}

    def perf_counter(self):
        return getattr(self.here, "now", 100.0)

    def sleep(self, seconds):
        self.here.now = self.perf_counter() + seconds

    def watch(self, monkeypatch):
        send, receive = execute._Execution._isend, execute._Execution._recv

        def isend(rank, op, peer):
            self.sent[op] = self.perf_counter()
            send(rank, op, peer)

        def recv(rank, op, peer):
            receive(rank, op, peer)
            self.here.now = max(self.perf_counter(), self.sent[op])

        monkeypatch.setattr(execute, "time", self)
        monkeypatch.setattr(execute._Execution, "_isend", isend)
        monkeypatch.setattr(execute._Execution, "_recv", recv)


CLOCKED = [FOUR, schedule.zb_h1(3, 4), schedule.zb_v(2, 4)]


@pytest.mark.parametrize("plan", CLOCKED, ids=lambda plan: plan.name)
def test_measured_times_are_the_simulated_ones(plan, monkeypatch):
    """On a clock that only operations move."""
    LogicalTime().watch(monkeypatch)
    pace = Durations([3 + i for i in range(plan.stages)], 5, 2)
    results = ranks(len(plan.ranks)).run(trained, plan, TIED, steps=1, pace=pace)
    found = pipeline.joined(plan, [runs[0] for runs, _ in results])
    predicted = schedule.simulate(plan, pace)
    assert found.schedule == plan and found.spans == predicted.spans
    assert found.bubble_fraction == predicted.bubble_fraction > 0


def held(rank, plan, config, messages="matched"):
    """Bytes held during a step: what a rank keeps, and all of it with what is on its way."""
    comm = rank.comm("pp")
    stages = own(plan, build(config), comm.rank)
    zeros = [tuple(torch.zeros(1, 6, dtype=torch.long) for _ in range(2))] * plan.micro_batches
    found = measure.history(
        lambda: pipeline.run(stages, plan, comm, zeros, messages=messages), stages
    )
    return found.only("weights", "gradients", "activations"), found


SMALL = replace(TIED, num_layers=4)
THREE = schedule.one_f_one_b(3, 4)


@functools.cache
def really_held(plan, messages="matched"):
    """What all ranks hold, and the books."""
    world = ranks(len(plan.ranks))
    return world.run(held, plan, SMALL, messages), world.ledger


@pytest.mark.parametrize("messages", ["paired", "matched"])
@pytest.mark.parametrize("plan", [THREE, V[0]], ids=lambda plan: plan.name)
def test_a_dry_rank_holds_and_sends_what_a_real_one_does(plan, messages):
    """Paired, all of it. Matched, but for what is on its way to a receiver: a dry rank waits for
    none, and what waits may make another moment of a real one the fullest."""
    real, books = really_held(plan, messages)
    sent = rigs.pipeline.between_stages(plan, SMALL)
    dry = World(Mesh(pp=len(plan.ranks)), engine="dry")
    for rank, (kept_there, whole_there) in enumerate(real):
        kept, whole = dry.run(held, plan, SMALL, messages, rank=rank)
        assert kept.peak.ledger.diff(kept_there.peak.ledger).unexplained == 0
        on_its_way = whole_there.peak.ledger.total - whole.peak.ledger.total
        assert on_its_way == 0 if messages == "paired" else on_its_way >= 0
        for each in (whole, whole_there):
            after = each.moments[-1].ledger.by("component")
            assert after["buffers"] == 0, "a message was not let go"
        assert sent.only(rank=rank).diff(dry.ledger).unexplained == 0
    assert sent.diff(books).unexplained == 0


def test_activations_held_are_those_in_flight():
    """Bytes at the peak: for each micro-batch in flight what autograd keeps of its stage."""
    real, _ = really_held(THREE)
    stages = pipeline.split(build(SMALL), 3)
    for rank, stage in enumerate(stages):
        x = torch.zeros(1, 6, dtype=torch.long)
        given = stage.message(x).zero_().requires_grad_() if rank else x
        targets = torch.zeros(1, 6, dtype=torch.long)

        def forward(stage=stage, given=given, targets=targets):
            y = stage(given)
            return pipeline.mean_cross_entropy(y, targets) if stage.index == 2 else y

        each = measure.saved_activations(forward, stage).total
        kept = real[rank][0].only("activations").peak.ledger.total
        shared = (THREE.peak(rank) - 1) * (x.nbytes * (rank == 0) + targets.nbytes * (rank == 2))
        assert kept + shared == THREE.peak(rank) * each  # all micro-batches are the same tensor


# ── composed ───────────────────────────────────────────────────────────────────────────────────────


def replicated(stages, dp):
    return torch.nn.ModuleList(data_parallel.replicate(stage, dp) for stage in stages)


def sharded(stages, dp):
    for stage in stages:
        zero.shard(stage, dp, units=stage.blocks.values())
    return stages


def around_stages(rank, plan, config, wrap):
    """Weights of this rank's stages after a few steps; replicas begin with other ones."""
    comm, dp = rank.comm("pp"), rank.comm("dp")
    stages = wrap(own(plan, build(config, seed=dp.rank), comm.rank), dp)
    optimizer = torch.optim.AdamW(stages.parameters(), lr=1e-2)
    m = plan.micro_batches
    for _ in range(2):
        optimizer.zero_grad()
        pipeline.run(stages, plan, comm, batches(2 * m)[dp.rank * m :][:m])
        optimizer.step()
    parts = [part for part in stages.modules() if isinstance(part, pipeline.PipelineStage)]
    found = {}
    for part in parts:
        with zero.gathered(part) if wrap is sharded else contextlib.nullcontext():
            for name, weight in part.named_parameters(remove_duplicate=False):
                found[name] = weight.detach().clone()
    return found


@pytest.mark.parametrize("plan", [schedule.one_f_one_b(2, 3), schedule.interleaved(2, 2)])
@pytest.mark.parametrize("wrap, tied", [(replicated, True), (sharded, False)])
def test_replicas_and_shards_of_each_stage(plan, wrap, tied):
    config = replace(TIED, num_layers=plan.stages + 1, tied=tied)
    results = World(Mesh(pp=2, dp=2)).run(around_stages, plan, config, wrap)
    _, whole = alone(config, 2 * plan.micro_batches, 2)
    assert set().union(*results) == set(whole)
    for table in results:
        for name, found in table.items():
            assert torch.allclose(found, whole[name][1], rtol=1e-10, atol=1e-10), name


@pytest.mark.parametrize(
    "plan, wrap, tied, reason",
    [
        (schedule.zb_h1(2, 3), replicated, True, "zb_h1 splits .* replicate .* average_grad"),
        (schedule.zb_v(2, 2), sharded, False, "zb_v splits .* zero.shard .* level 1"),
        (schedule.pipedream(2, 2), replicated, False, "keeps old .*step_pre_hook"),
        (schedule.interleaved(2, 2), data_parallel.replicate, True, "by itself, not the list"),
        (schedule.one_f_one_b(2, 3), zero.shard, False, "zero.shard .* by itself"),
        (schedule.one_f_one_b(2, 3), sharded, True, "tied embedding .* tied=False"),
    ],
)
def test_what_hooks_would_get_wrong_is_refused_with_a_remedy(plan, wrap, tied, reason):
    config = replace(TIED, num_layers=plan.stages + 1, tied=tied)
    with pytest.raises(RankError, match=f"ValueError: .*{reason}"):
        World(Mesh(pp=2, dp=2)).run(around_stages, plan, config, wrap)


def test_a_sharded_model_is_not_split():
    def program(rank):
        pipeline.split(zero.shard(build(TIED), rank.comm()), 2)

    with pytest.raises(RankError, match="zero.shard each of its stages, later"):
        World(1).run(program)


# ── weights that change on the way ─────────────────────────────────────────────────────────────────

UNTIED = replace(TIED, tied=False)
STALE = [
    (schedule.pipedream(4, 6), [4, 3, 2, 1]),
    (schedule.pipedream_2bw(3, 6), [2, 2, 2]),
    (schedule.pipedream_2bw(3, 6, 2), [2, 2, 2]),
]


def on_the_way(rank, plan):
    stages = own(plan, build(UNTIED), rank.rank)
    adamw = torch.optim.AdamW(stages.parameters(), lr=0.1)
    found = pipeline.run(
        stages, plan, rank.comm("pp"), batches(plan.micro_batches), optimizer=adamw
    )
    return found, {name: pair[1] for name, pair in named(stages).items()}


def stale(plan):
    """The same without ranks: each micro-batch meets old weights of each stage, as the schedule says; the newest are stepped."""
    stages = pipeline.split(build(UNTIED), plan.stages)
    adamws = [torch.optim.AdamW(stage.parameters(), lr=0.1) for stage in stages]
    tables = [dict(stage.named_parameters()) for stage in stages]
    past = [[{name: p.detach().clone() for name, p in table.items()}] for table in tables]
    losses = []
    for k, (x, targets) in enumerate(batches(plan.micro_batches)):
        used = [
            {name: w.clone().requires_grad_() for name, w in past[r][plan.version(r, k)].items()}
            for r in range(plan.stages)
        ]
        for stage, weights in zip(stages, used, strict=True):
            x = torch.func.functional_call(stage, weights, (x,))
        losses.append(pipeline.mean_cross_entropy(x, targets))
        (losses[-1] / plan.every).backward()
        for table, weights, adamw, versions in zip(tables, used, adamws, past, strict=True):
            for name, p in table.items():
                p.grad = weights[name].grad if p.grad is None else p.grad + weights[name].grad
            if (k + 1) % plan.every == 0:
                adamw.step()
                adamw.zero_grad()
                versions.append({name: p.detach().clone() for name, p in table.items()})
    return torch.stack(losses).mean().item(), dict(
        (name, p.detach()) for table in tables for name, p in table.items()
    )


@pytest.mark.parametrize("plan, held", STALE, ids=["1", "2, every 3", "2, every 2"])
def test_pipedream_applies_gradients_of_old_weights(plan, held):
    """Rank i of p holds p−i versions of its weights; double-buffered, two."""
    results = ranks(len(plan.ranks)).run(on_the_way, plan)
    loss, weights = stale(plan)
    assert results[-1][0].loss.item() == pytest.approx(loss, rel=1e-12)
    assert [run.versions for run, _ in results] == held
    for run, table in results:
        assert run.ops in plan.ranks
        assert all(torch.allclose(w, weights[name], rtol=1e-10) for name, w in table.items())


def learning(rank, plan, config, batch):
    """The stages of a rank, trained by SGD on one batch again and again."""
    model = GPT(config, generator=torch.Generator().manual_seed(0)).double()
    stages = pipeline.split(model, len(plan.ranks), (1,) * len(plan.ranks))
    stages = pipeline.local(stages, plan, rank.rank)
    sgd = torch.optim.SGD(stages.parameters(), lr=0.3)
    pipeline.run(stages, plan, rank.comm("pp"), [batch] * plan.micro_batches, optimizer=sgd)
    return stages


def test_one_device_with_gradients_of_old_weights_learns_what_pipedream_learns():
    config, (batch, *_) = replace(UNTIED, num_layers=3), batches(1)
    trained = ranks(3).run(learning, schedule.pipedream(3, 7), config, batch)
    parts = [stage for stages in trained for stage in stages]
    logits = functools.reduce(lambda out, stage: stage(out), parts, batch[0])
    loss = pipeline.mean_cross_entropy(logits, batch[1]).item()
    assert rigs.pipeline.aged(config, batch, (2, 1, 0), 7, 0.3) == pytest.approx(loss, rel=1e-12)
    assert rigs.pipeline.aged(config, batch, (0, 0, 0), 7, 0.3) != pytest.approx(loss, rel=1e-4)
    assert rigs.pipeline.aged(config, batch, (0, 0, 0), 40, 1e6) == float("inf")


def replicas_on_the_way(rank, plan, make):
    """Weights after PipeDream on replicas that share the rows of each micro-batch."""
    dp = rank.comm("dp")
    stages = own(plan, build(UNTIED), rank.comm("pp").rank)
    data = [(x[dp.rank :: dp.size], y[dp.rank :: dp.size]) for x, y in batches(4, rows=2)]
    pipeline.run(stages, plan, rank.comm("pp"), data, optimizer=make(stages, dp))
    return {name: pair[1] for name, pair in named(stages).items()}


def averaging(stages, dp):
    sgd = torch.optim.SGD(stages.parameters(), lr=0.1)
    sgd.register_step_pre_hook(lambda *_: data_parallel.average_gradients(stages, dp))
    return sgd


def of_zero(stages, dp):
    return zero.Optimizer(stages.parameters(), dp, torch.optim.SGD, level=1)


def test_pipedream_averages_over_replicas_in_a_hook_of_its_optimizer():
    plan = schedule.pipedream(2, 4)
    wanted = ranks(2).run(replicas_on_the_way, plan, averaging)
    for i, table in enumerate(World(Mesh(pp=2, dp=2)).run(replicas_on_the_way, plan, averaging)):
        for name, weight in table.items():
            assert torch.allclose(weight, wanted[i // 2][name], rtol=1e-10, atol=1e-10), name
    with pytest.raises(RankError, match="TypeError|TypeCheckError"):
        World(Mesh(pp=2, dp=2)).run(replicas_on_the_way, plan, of_zero)


# ── an order for unequal stages ────────────────────────────────────────────────────────────────────


def in_blocks(config, layers):
    """FLOPs of each stage, those of a block being 1."""
    block = pipeline.stage_flops(config, (config.num_layers, 0))[0] / config.num_layers
    return [flops / block for flops in pipeline.stage_flops(config, layers)]


def test_a_planned_v_is_shorter_than_zb_v_where_the_head_is_long_and_no_v_is_shorter():
    times = in_blocks(ModelConfig.named("gpt2"), (0, *[2] * 6, 0))
    plan = rigs.pipeline.planned(schedule.vee(4), 8, times, 8, 2).check(cap=8)
    period, usual = (
        schedule.simulate(each, Durations(times, times, times)).period
        for each in (plan, schedule.zb_v(4, 8))
    )
    # Rank 0 waits until the first micro-batch has been through all blocks.
    assert period == pytest.approx(12 + 3 * 8 * times[-1])
    assert usual > 1.1 * period
    assert rigs.pipeline.compare(plan, replace(TIED, num_layers=8)).equal


# ── cutting ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("vocabulary", [14, 300, 2000])
def test_no_other_cut_has_a_shorter_longest_stage(vocabulary):
    config = replace(TIED, vocab_size=vocabulary)
    for n in (1, 2, 3, 5):
        found = pipeline.cut(config, n)
        assert len(found) == n and sum(found) == 6
        flops = pipeline.stage_flops(config, found)
        assert sum(flops) == sum(anatomy.token_flops(config).values())
        others = (
            layers
            for layers in itertools.product(range(7), repeat=n)
            if sum(layers) == 6 and all(layers[:-1])
        )
        assert max(flops) == min(max(pipeline.stage_flops(config, each)) for each in others)


def test_two_stages_more_than_layers_have_the_ends_alone():
    assert pipeline.cut(TIED, 8) == (0, 1, 1, 1, 1, 1, 1, 0)
    stages = pipeline.split(build(TIED), 8)
    x = batches(1)[0][0]
    whole = functools.reduce(lambda x, stage: stage(x), stages, x)
    assert torch.equal(whole, build(TIED)(x))


@pytest.mark.parametrize("vocabulary", [1, 60, 120, 700])
def test_of_equally_long_cuts_the_first_stages_have_fewer_layers(vocabulary):
    """The last stage has as many as the longest lets it, the others as alike as can be."""
    config = replace(TIED, vocab_size=vocabulary)
    for n in (2, 3, 4, 5):
        cuts = [
            layers
            for layers in itertools.product(range(7), repeat=n)
            if sum(layers) == 6 and all(layers[:-1])
        ]
        longest = {layers: max(pipeline.stage_flops(config, layers)) for layers in cuts}
        best = [layers for layers in cuts if longest[layers] == min(longest.values())]
        last = max(layers[-1] for layers in best)
        *others, found = pipeline.cut(config, n)
        assert found == last
        assert others == sorted(others) and max(others) - min(others) <= 1


def test_the_head_is_the_last_stages_work():
    """One that takes longer than a layer leaves it none; what remains is spread."""
    config = replace(TIED, vocab_size=120)
    head = 2 * 120 * 8
    first, last = pipeline.stage_flops(config, (3, 3))
    assert last - first == head
    assert pipeline.cut(config, 5) == (1, 1, 2, 2, 0)


def test_layers_before_the_experts_have_flops_of_their_own():
    """DeepSeek-V3: three layers alike, then 58 whose feed-forward is 8 experts, one that all tokens
    visit and a router."""
    model = ModelConfig.named("deepseek-v3")
    h, x, f = model.d_model, 2048, model.d_ff
    more = 2 * (9 * 3 * h * x + 256 * h) - 2 * 3 * h * f
    one = pipeline.stage_flops(model, [1] * 61)
    assert one[1:3] == one[:1] * 2 and one[4:-1] == one[3:4] * 56 and one[3] - one[0] == more
    assert pipeline.stage_flops(model, (2, 2, 57))[1] == one[0] + one[3]
    assert sum(one) == sum(anatomy.token_flops(model).values())


def test_stages_are_the_model():
    """Its parameters under its names, each once; a stage alone computes its part."""
    model = build(LLAMA)
    stages = pipeline.split(model, 3, (3, 1, 2))
    names = [name for stage in stages for name, _ in stage.named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]
    assert [len(stage.blocks) for stage in stages] == [3, 1, 2]
    x = batches(1)[0][0]
    assert torch.equal(functools.reduce(lambda x, stage: stage(x), stages, x), model(x))
    shared = pipeline.split(build(TIED), 2)
    assert shared[1].head.weight is shared[0].tokens.weight


# ── what makes no sense ────────────────────────────────────────────────────────────────────────────


def test_what_makes_no_sense_is_named():
    model, two = build(TIED), schedule.one_f_one_b(2, 2)
    with pytest.raises(ValueError, match="stages of 4, 3 layers do not make a model of 6"):
        pipeline.split(model, 2, (4, 3))
    with pytest.raises(ValueError, match="are for 2 stages, not for 3"):
        pipeline.split(model, 3, (3, 3))
    with pytest.raises(ValueError, match="stage 1 has nothing to do"):
        pipeline.split(model, 3, (3, 0, 3))
    with pytest.raises(ValueError, match="6 layers do not fill 9 stages: at most 8"):
        pipeline.cut(TIED, 9)
    with pytest.raises(
        TypeError, match="split takes a labutils.model.GPT, whole, got PipelineStage"
    ):
        pipeline.split(pipeline.split(model, 2)[0], 2)
    with pytest.raises(ValueError, match=r"zb_v has 4 stages, not 2: split\(model, 4\)"):
        pipeline.local(pipeline.split(model, 2), schedule.zb_v(2, 4), 0)
    with pytest.raises(ValueError, match="no messages='loud': use one of matched, "):
        pipeline.actions(two, 0, "loud")
    wrong = replace(two, ranks=(two.ranks[0], two.ranks[1][::-1]))
    with pytest.raises(ValueError, match="rank 1 runs B1@1 before its own F1@1"):
        pipeline.actions(wrong, 0)


def test_a_run_says_what_it_cannot_run():
    two = schedule.one_f_one_b(2, 2)

    def program(rank, stage, plan, m):
        pipeline.run(pipeline.split(build(TIED), 2)[stage], plan, rank.comm("pp"), batches(m))

    def twice(rank):
        stages = own(two, build(TIED), rank.rank)
        for _ in range(2):
            pipeline.run(stages, two, rank.comm("pp"), batches(2))

    def updated(rank, plan, config, stepped):
        stages = own(plan, build(config), rank.rank)
        adamw = torch.optim.AdamW(stages.parameters()) if stepped else None
        pipeline.run(stages, plan, rank.comm("pp"), batches(2), optimizer=adamw)

    for plan, config, stepped, message in (
        (two, TIED, True, "one_f_one_b flushes: step the optimizer yourself, after run"),
        (schedule.pipedream(2, 2), UNTIED, False, "updates weights as it goes: pass optimizer="),
        (schedule.pipedream(2, 2), TIED, True, "build the model with tied=False"),
    ):
        with pytest.raises(RankError, match=message):
            ranks(2).run(updated, plan, config, stepped)
    with pytest.raises(RankError, match="rank 1 runs stages 1 of 2, got 0 of 2: pass local"):
        ranks(2).run(program, 0, two, 2)

    def one_of_another_cut(rank):
        stages = own(V[0], build(TIED), rank.rank)
        stages[1].count = 5
        pipeline.run(stages, V[0], rank.comm("pp"), batches(4))

    with pytest.raises(RankError, match="rank 0 runs stages 0, 3 of 4, got 0 of 4, 3 of 5: pass"):
        ranks(2).run(one_of_another_cut)
    with pytest.raises(RankError, match="for 2 ranks and 2 micro-batches, got 2 and 3"):
        ranks(2).run(lambda rank: program(rank, rank.rank, two, 3))
    with pytest.raises(RankError, match=r"call zero_grad\(\) before run"):
        ranks(2).run(twice)
