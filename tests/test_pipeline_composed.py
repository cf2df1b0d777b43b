"""Pipelines with what is put around them: three optimizer steps equal those of one device, in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from labutils import checkpointing, data_parallel, pipeline, schedule, tensor_parallel, zero
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.world import RankError, World

TIED = ModelConfig(num_layers=3, d_model=8, num_heads=2, d_ff=12, vocab_size=14, seq_len=6)
UNTIED = ModelConfig(
    **dict(num_layers=3, d_model=8, num_heads=2, d_ff=12, vocab_size=14, seq_len=6, tied=False)
)
STEPS, DP = 3, 2
MAKE = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.3, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2),
}
FROZEN = ("blocks.0.attention.query.weight", "blocks.1.feed_forward.up.bias", "blocks.2.norm")
PLANS = {
    "line": schedule.one_f_one_b(2, 3),
    "split": schedule.zb_h1(2, 3),
    "loop": schedule.interleaved(2, 2),
    "vee": schedule.zb_v(2, 4),
    "both ways": schedule.dualpipe(2, 4),
}


@functools.cache
def grid():
    return World(Mesh(pp=2, dp=DP))


def build(config):
    model, made = GPT(config).double(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3, generator=made)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))
    return model


def sized(plan, tied):
    """A layer for each stage at least."""
    sizes = vars(TIED if tied else UNTIED)
    return ModelConfig(**sizes | {"num_layers": max(3, plan.stages)})


def batches(m, rows=1):
    made = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(14, (rows, 6), generator=made) for _ in range(2)) for _ in range(m)]


@functools.cache
def alone(config, m, kind):
    """Weights after the steps, on one device."""
    model = build(config)
    optimizer = MAKE[kind](model.parameters())
    tokens, targets = map(torch.cat, zip(*batches(m), strict=True))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.loss(tokens, targets).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}


def stepped(rank, plan, config, kind, level):
    """Weights after the steps, of this rank's stages."""
    comm, dp = rank.comm("pp"), rank.comm("dp")
    stages = pipeline.local(pipeline.split(build(config), plan.stages), plan, comm.rank)
    if level:
        optimizer = zero.Optimizer(
            stages.parameters(), dp, MAKE[kind], level=level, bucket_bytes=2000
        )
    else:
        optimizer = MAKE[kind](stages.parameters())
    m = plan.micro_batches
    for _ in range(STEPS):
        optimizer.zero_grad()
        pipeline.run(stages, plan, comm, batches(DP * m)[dp.rank * m :][:m])
        if not level:
            data_parallel.average_gradients(stages, dp)
        optimizer.step()
    named = stages.named_parameters(remove_duplicate=False)
    return {name.partition(".")[2]: p.detach() for name, p in named}


def assert_equal(results, wanted):
    assert set().union(*results) == set(wanted)
    for table in results:
        for name, weight in table.items():
            assert torch.allclose(weight, wanted[name], rtol=1e-11, atol=1e-12), name


CASES = [
    ("line", 1, "tied", "sgd"),
    ("line", 2, "tied", "adamw"),
    ("split", 2, "tied", "sgd"),
    ("loop", 1, "untied", "adamw"),
    ("loop", 2, "tied", "sgd"),
    ("vee", 2, "tied", "adamw"),
    ("both ways", 1, "tied", "sgd"),
    ("both ways", 2, "untied", "adamw"),
    ("both ways", 2, "tied", "sgd"),
]


@pytest.mark.parametrize("name, level, tied, kind", CASES)
def test_levels_of_zero_on_every_kind_of_schedule(name, level, tied, kind):
    """What two ranks have, a tied embedding or all there is, gets the sum of both gradients."""
    plan = PLANS[name]
    config = sized(plan, tied == "tied")
    results = grid().run(stepped, plan, config, kind, level)
    assert_equal(results, alone(config, DP * plan.micro_batches, kind))


def test_gradients_from_before_are_refused_wherever_they_are():
    """They would be added up twice; a zero.Optimizer keeps them out of sight."""

    def twice(rank, level):
        plan, dp = PLANS["line"], rank.comm("dp")
        stages = pipeline.local(pipeline.split(build(TIED), 2), plan, rank.comm("pp").rank)
        optimizer = zero.Optimizer(stages.parameters(), dp, level=level)
        for _ in range(2):
            pipeline.run(stages, plan, rank.comm("pp"), batches(3))
        optimizer.step()

    for level in (1, 2):
        with pytest.raises(RankError, match=r"call zero_grad\(\) before run"):
            grid().run(twice, level)


# ── computed again ─────────────────────────────────────────────────────────────────────────────────


def computed_again(rank, plan, config, policy, before):
    """Gradients of a rank with checkpointing, and the FLOPs of its products."""
    comm, tp = rank.comm("pp"), rank.comm("tp")
    model = build(config)
    if before:
        checkpointing.apply(model, policy)
    if tp.size > 1:
        tensor_parallel.parallelize(model, tp)
    stages = pipeline.local(pipeline.split(model, plan.stages), plan, comm.rank)
    if not before:
        checkpointing.apply(stages, policy)
    loss = functools.partial(tensor_parallel.cross_entropy, comm=tp)
    with FlopCounterMode(display=False) as flops:
        pipeline.run(stages, plan, comm, batches(plan.micro_batches), loss=loss)
    named = stages.named_parameters(remove_duplicate=False)
    return {name.partition(".")[2]: p.grad for name, p in named}, flops.get_total_flops()


AGAIN = [
    (schedule.zb_h1(2, 3), "full", True, 1),
    (schedule.zb_h1(2, 3), "full", False, 1),
    (schedule.zb_h1(2, 2), "full", False, 2),
    (schedule.zb_v(2, 4), "selective", False, 1),
    (schedule.zb_v(2, 4), "full", False, 1),
    (schedule.dualpipe_v(2, 4), "full", True, 1),
]


@pytest.mark.parametrize("plan, policy, before, tp", AGAIN)
def test_split_backward_passes_with_checkpointing(plan, policy, before, tp):
    """The same gradients; the products of B and W, and those that 1F1B computes again, none twice."""
    config = sized(plan, True)
    results = World(Mesh(pp=2, tp=tp)).run(computed_again, plan, config, policy, before)
    _, wanted = whole_gradients(config, batches(plan.micro_batches))
    for i, (table, _) in enumerate(results):
        for name, grad in table.items():
            full = wanted[name]
            if full is not None:
                cut = [dim for dim in range(full.dim()) if full.shape[dim] != grad.shape[dim]]
                full = full.chunk(2, *cut)[i % tp] if cut else full
                assert torch.allclose(grad, full, rtol=1e-11, atol=1e-12), name
    if tp == 1:
        model = checkpointing.apply(build(config), policy)
        with FlopCounterMode(display=False) as flops:
            for tokens, targets in batches(plan.micro_batches):
                model.loss(tokens, targets).backward()
        assert sum(each for _, each in results) == flops.get_total_flops()


def whole_gradients(config, given):
    """Loss and gradients of the whole model on the whole batch."""
    model = build(config)
    loss = model.loss(*map(torch.cat, zip(*given, strict=True)))
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.item(), {name: p.grad for name, p in named}


STALE = [schedule.pipedream(2, 4), schedule.pipedream_2bw(2, 6, 3)]


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize("plan", STALE, ids=lambda plan: plan.name)
def test_old_weights_are_old_when_a_layer_is_computed_again(plan, policy):
    """PipeDream with checkpointing steps to the same weights as without."""

    def program(rank, policy):
        stages = pipeline.split(build(UNTIED), 2)
        stages = checkpointing.apply(pipeline.local(stages, plan, rank.rank), policy)
        sgd = torch.optim.SGD(stages.parameters(), lr=0.5)
        given = batches(plan.micro_batches)
        pipeline.run(stages, plan, rank.comm("pp"), given, optimizer=sgd)
        return {name: p.detach() for name, p in stages.named_parameters()}

    two = World(Mesh(pp=2))
    for plain, again in zip(two.run(program, "none"), two.run(program, policy), strict=True):
        for name, weight in plain.items():
            assert torch.allclose(again[name], weight, rtol=1e-12, atol=1e-14), name


# ── targets that count for nothing ─────────────────────────────────────────────────────────────────


def uneven(lengths, seed=2):
    """Micro-batches of rows of these lengths; of their targets some, or all, are −100."""
    made = torch.Generator().manual_seed(seed)
    given = []
    for i, (rows, length, ignored) in enumerate(lengths):
        tokens, targets = (torch.randint(14, (rows, length), generator=made) for _ in range(2))
        targets.flatten()[: round(ignored * rows * length)] = -100
        given.append((tokens, targets))
    return given


UNEVEN = [
    (1, 6, 0.5),
    (2, 4, 0),
    (1, 6, 1),
    (1, 3, 0.34),
    (2, 6, 0.25),
    (1, 5, 0),
    (1, 2, 1),
    (1, 6, 0),
]


def one_device(config, given):
    """Loss and gradients of micro-batches as one batch."""
    model = build(config)
    each = [
        F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        for tokens, targets in given
    ]
    loss = sum(each) / sum((targets != -100).sum() for _, targets in given)
    loss.backward()
    named = model.named_parameters(remove_duplicate=False)
    return loss.item(), {name: p.grad for name, p in named}


def weighed(rank, plan, config, given, sharded):
    comm, dp, tp = rank.comm("pp"), rank.comm("dp"), rank.comm("tp")
    model = build(config)
    options = {}
    if tp.size > 1:
        tensor_parallel.parallelize(model, tp)
        options["loss"] = functools.partial(tensor_parallel.cross_entropy, comm=tp)
    stages = pipeline.local(pipeline.split(model, plan.stages), plan, comm.rank)
    m = plan.micro_batches
    found = pipeline.run(stages, plan, comm, given[m * dp.rank :][:m], replicas=dp, **options)
    data_parallel.average_gradients(stages, dp)
    named = stages.named_parameters(remove_duplicate=False)
    return found.loss, {name.partition(".")[2]: p.grad for name, p in named}


@pytest.mark.parametrize(
    "name, mesh",
    [
        ("line", Mesh(pp=2)),
        ("split", Mesh(pp=2, tp=2)),
        ("vee", Mesh(pp=2, dp=2)),
        ("both ways", Mesh(pp=2, dp=2)),
    ],
)
def test_a_micro_batch_counts_for_its_targets(name, mesh):
    """Of any length, with as many −100 as there are, also all; and so does a replica's share."""
    plan = PLANS[name]
    config = sized(plan, True)
    given = uneven(UNEVEN[: plan.micro_batches * mesh.dp])
    results = World(mesh).run(weighed, plan, config, given, mesh.tp)
    loss, wanted = one_device(config, given)
    losses = [float(each) for each, _ in results if each is not None]
    assert sum(losses) / (mesh.dp * mesh.tp) == pytest.approx(loss, rel=1e-12)
    for i, (_, table) in enumerate(results):
        for name, grad in table.items():
            full = wanted[name]
            if full is not None:
                cut = [dim for dim in range(full.dim()) if full.shape[dim] != grad.shape[dim]]
                full = full.chunk(2, *cut)[i % mesh.tp] if cut else full
                assert torch.allclose(grad, full, rtol=1e-11, atol=1e-12), name


def test_a_batch_without_any_target_is_refused():
    with pytest.raises(RankError, match="all targets of an update are −100.*leave these micro-b"):
        World(Mesh(pp=2)).run(weighed, PLANS["line"], TIED, uneven([(1, 6, 1)] * 3), 1)


def test_an_update_of_pipedream_is_the_mean_over_its_own_targets():
    """Its first two micro-batches meet the first weights: together they are a batch of their own."""
    plan, given = schedule.pipedream_2bw(2, 2, 2), uneven(UNEVEN[:2])

    def program(rank):
        stages = pipeline.local(pipeline.split(build(UNTIED), 2), plan, rank.rank)
        sgd = torch.optim.SGD(stages.parameters(), lr=1)
        before = {
            name.partition(".")[2]: p.detach().clone() for name, p in stages.named_parameters()
        }
        found = pipeline.run(stages, plan, rank.comm("pp"), given, optimizer=sgd)
        now = {name.partition(".")[2]: p.detach() for name, p in stages.named_parameters()}
        return found.loss, {name: before[name] - now[name] for name in now}

    (_, first), (loss, last) = World(Mesh(pp=2)).run(program)
    wanted_loss, wanted = one_device(UNTIED, given)
    assert loss.item() == pytest.approx(wanted_loss, rel=1e-12)
    for name, change in (first | last).items():
        grad = torch.zeros_like(change) if wanted[name] is None else wanted[name]
        assert torch.allclose(change, grad, atol=1e-12), name


# ── sent once ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", PLANS)
def test_level_2_sends_each_gradient_once_per_backward_pass_of_its_stage(name):
    """Formula, dry run and real run: W is the second half of the pass of B, chunks have their own."""
    plan = PLANS[name]
    config, m = sized(plan, True), plan.micro_batches

    def program(rank):
        comm, dp = rank.comm("pp"), rank.comm("dp")
        stages = pipeline.local(pipeline.split(build(config), plan.stages), plan, comm.rank)
        optimizer = zero.Optimizer(stages.parameters(), dp, MAKE["sgd"], level=2, bucket_bytes=2000)
        pipeline.run(stages, plan, comm, batches(m))
        here = {stage.index for stage in stages}
        return [
            (flat.partition.padded, len(here & set(flat.wholes[0].stages)))  # whose passes it needs
            for flat in optimizer.flats
        ]

    grid().run(program)
    real = grid().ledger.only(name="reduce_scatter").by("rank")
    dry = World(Mesh(pp=2, dp=DP), engine="dry")
    for rank in range(4):
        predicted = 0
        for padded, stages in dry.run(program, rank=rank):
            passes = m // len(plan.places) * stages  # where they flow both ways, half each
            predicted += passes * (DP - 1) * 8 * padded // DP
        assert dry.ledger.only(name="reduce_scatter").total == predicted == real[rank]
