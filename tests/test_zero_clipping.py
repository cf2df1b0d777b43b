"""Clipping and loss scaling over any mesh: the norm of one device, each number once, one decision of all ranks."""

import contextlib
import copy
import functools
import re
from dataclasses import replace

import pytest
import torch
from small_models import build
from torch import nn

from labutils import (
    context_parallel,
    data_parallel,
    expert_parallel,
    lora,
    pipeline,
    precision,
    schedule,
    tensor_parallel,
    world,
    zero,
)
from labutils.config import Mesh, ModelConfig
from labutils.precision import LossScaler
from labutils.world import RankError, World

SIZES = dict(num_layers=2, d_model=8, num_heads=4, d_ff=12, vocab_size=12, seq_len=8)
LLAMA = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False)
TIED = ModelConfig(**SIZES)
QWEN = ModelConfig(**SIZES, **LLAMA | dict(bias="qkv", tied=True), num_kv_heads=1)
UNTIED = ModelConfig(**SIZES, **LLAMA, tied=False, num_kv_heads=2)
MIXTURE = ModelConfig(**SIZES, tied=False, num_experts=4, top_k=2)
MAX_NORM, STEPS = 0.05, 2
PAIR = schedule.one_f_one_b(2, 2)
# Mesh, model, level, pipeline, sequence parallelism.
CASES = [
    (dict(dp=2), TIED, 0, None, False),
    (dict(tp=2), TIED, 0, None, True),
    (dict(tp=4), QWEN, 0, None, True),
    (dict(dp=2, tp=2), QWEN, 1, None, True),
    (dict(dp=2, tp=2), TIED, 2, None, False),
    (dict(dp=2, tp=2), UNTIED, 3, None, False),
    (dict(dp=2, cp=2), TIED, 2, None, False),
    (dict(dp=4, ep=2), MIXTURE, 0, None, False),
    (dict(dp=4, ep=2), MIXTURE, 1, None, False),
    (dict(pp=2, tp=2), TIED, 0, PAIR, False),
    (dict(pp=2), replace(TIED, num_layers=3), 0, schedule.zb_v(2, 2), False),
    (dict(pp=2), UNTIED, 0, schedule.dualpipe(2, 4), False),
    (dict(pp=2, dp=2, tp=2), UNTIED, 1, PAIR, True),
    (dict(pp=2, dp=2), UNTIED, 3, PAIR, False),
]


def name(case):
    axes, config, level, plan, sequence = case
    kind = "mixture" if config.num_experts > 1 else "tied" if config.tied else "untied"
    around = ([plan.name] if plan else []) + ["sequence"] * sequence
    mesh = " ".join(f"{axis}{n}" for axis, n in axes.items())
    return " ".join([mesh, kind, f"level {level}", *around])


def sgd(parameters):
    """A wrong clip shows in its steps; AdamW, which divides by the gradient's size, would hide it."""
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def rows(n, s=8):
    made = torch.Generator().manual_seed(1)
    tokens = torch.randint(12, (n, s), generator=made)
    targets = torch.randint(12, (n, s), generator=made)
    return tokens, targets


@functools.cache
def alone(config, n, adapted=False):
    """Norms of some steps, and the weights, on one device."""
    model, norms = build(config, 0), []
    if adapted:
        adapt(model)
    optimizer = sgd(model.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        model.loss(*rows(n)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, {name: p.detach() for name, p in model.named_parameters()}


def adapt(model):
    """Adapters with other values than zero, the same everywhere."""
    lora.adapt(model, rank=2, alpha=4, generator=torch.Generator().manual_seed(0))
    for layer in lora.adapted(model).values():
        adapter = layer.adapters["default"]
        with torch.no_grad():
            adapter.B.fill_(0.1)


def changed(rank, config, plan, sequence, adapted=False):
    """The parts of the model that this rank trains, before ZeRO."""
    model, mesh = build(config, 0), rank.mesh
    if mesh.cp > 1:
        context_parallel.distribute(model, rank.comm("cp"))
    if mesh.tp > 1:
        tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    if mesh.ep > 1:
        expert_parallel.spread_experts(model, rank.comm("ep"), replicas=rank.comm("dp"))
    if adapted:
        adapt(model)
    if plan is None:
        return nn.ModuleList([model])
    return pipeline.local(pipeline.split(model, plan.stages), plan, rank.comm("pp").rank)


def optimizers(rank, parts, level):
    """Those of this rank, what they clip, and what reduces before."""
    dp = rank.comm("dp", "cp")
    if level == 0:
        return [sgd(parts.parameters())], lambda: list(parts.parameters())
    if level == 3:
        for part in parts:
            units = part.blocks.values() if isinstance(part.blocks, nn.ModuleDict) else part.blocks
            zero.shard(part, dp, units=list(units))
        return [sgd(parts.parameters())], lambda: list(parts.parameters())
    experts = expert_parallel.expert_parameters(parts)
    rest = {name: p for name, p in parts.named_parameters() if name not in experts}
    found = [zero.Optimizer(rest.items(), dp, sgd, level=level, bucket_bytes=2000)]
    if experts:
        found.append(zero.Optimizer(experts.items(), rank.comm("edp"), sgd, level=level))
    return found, lambda: [piece for each in found for piece in each.collect()]


def passed(rank, parts, plan, batch):
    """One backward pass over this rank's rows."""
    tokens, targets = (x.chunk(rank.mesh.dp)[rank.comm("dp").rank] for x in batch)
    if plan is None:
        parts[0].loss(tokens, targets).backward()
        return
    loss = pipeline.mean_cross_entropy
    if rank.mesh.tp > 1:
        loss = functools.partial(tensor_parallel.cross_entropy, comm=rank.comm("tp"))
    micro = list(zip(*(x.chunk(plan.micro_batches) for x in (tokens, targets)), strict=True))
    pipeline.run(parts, plan, rank.comm("pp"), micro, loss=loss)


def reduced(rank, parts, level):
    """What is left to do for replicas."""
    if level == 0 and rank.mesh.ep > 1:
        expert_parallel.reduce_gradients(parts, rank.comm("dp", "cp"), rank.comm("edp"))
    elif level == 0:
        data_parallel.average_gradients(parts, rank.comm("dp", "cp"))


def trained(rank, config, level, plan, sequence, n, adapted=False):
    parts = changed(rank, config, plan, sequence, adapted)
    steppers, clipped = optimizers(rank, parts, level)
    norms = []
    for _ in range(STEPS):
        for each in steppers:
            each.zero_grad()
        passed(rank, parts, plan, rows(n))
        reduced(rank, parts, level)
        norms.append(zero.clip_grad_norm(clipped(), rank.comm(), MAX_NORM))
        for each in steppers:
            each.step()
    found = {}
    for part in parts:
        with zero.gathered(part) if level == 3 else contextlib.nullcontext():
            found |= {name: p.detach().clone() for name, p in part.named_parameters()}
    return [norm.item() for norm in norms], found


def share(whole, found, n, i):
    """What rank i of n has of a whole tensor, of fewer shares than ranks where it is larger."""
    for dim in range(whole.dim()):
        if whole.shape[dim] != found.shape[dim]:
            parts = whole.shape[dim] // found.shape[dim]
            whole = whole.chunk(parts, dim)[i * parts // n]
    return whole


@pytest.mark.parametrize("case", CASES, ids=name)
def test_norm_and_steps_are_those_of_one_device(case):
    axes, config, level, plan, sequence = case
    mesh = Mesh(**axes)
    n = 8
    norms, weights = alone(config, n)
    assert all(norm > 2 * MAX_NORM for norm in norms)
    for i, (ours, found) in enumerate(World(mesh).run(trained, config, level, plan, sequence, n)):
        assert ours == pytest.approx(norms, rel=1e-12)
        tp = mesh.coords(i)["tp"]
        for at, p in found.items():
            wanted = weights["tokens.weight" if config.tied and at == "head.weight" else at]
            assert torch.allclose(p, share(wanted, p, mesh.tp, tp), rtol=1e-12, atol=1e-13), at


@pytest.mark.parametrize(
    "axes, config, sequence",
    [(dict(tp=4), QWEN, False), (dict(dp=2, tp=2), TIED, True), (dict(dp=2), UNTIED, False)],
)
def test_adapters_count_once_too(axes, config, sequence):
    norms, weights = alone(config, 8, adapted=True)
    mesh = Mesh(**axes)
    for i, (ours, found) in enumerate(World(mesh).run(trained, config, 0, None, sequence, 8, True)):
        assert ours == pytest.approx(norms, rel=1e-12)
        for at, p in found.items():
            if "adapters" in at:
                wanted = share(weights[at], p, mesh.tp, mesh.coords(i)["tp"])
                assert torch.allclose(p, wanted, rtol=1e-12, atol=1e-13), at


# ── dry, half precision, a rank without gradients ──────────────────────────────────────────────────────────────────


def test_a_dry_run_clips_and_books_the_same():
    """No value of the norm is asked for."""
    case = dict(config=UNTIED, level=1, plan=PAIR, sequence=True, n=8)
    mesh = Mesh(pp=2, dp=2, tp=2)
    real = World(mesh)
    real.run(trained, **case)

    def step(rank):
        parts = changed(rank, UNTIED, PAIR, True)
        _, clipped = optimizers(rank, parts, 1)
        passed(rank, parts, PAIR, rows(8))
        return zero.clip_grad_norm(clipped(), rank.comm(), MAX_NORM).shape

    dry = World(mesh, engine="dry")
    assert dry.run(step, rank=5) == ()
    booked = dry.ledger.only(name="gradient norm", rank=5).total
    assert booked and STEPS * booked == real.ledger.only(name="gradient norm", rank=5).total


def test_a_stage_without_gradients_takes_part():
    """Only the head learns: the first stage adds nothing, and hears the norm."""

    def program(rank, dtype=torch.float64):
        model = build(UNTIED, 0, dtype).requires_grad_(False)
        model.head.requires_grad_(True)
        plan, comm = PAIR, rank.comm("pp")
        mine = pipeline.local(pipeline.split(model, 2), plan, comm.rank)
        passed(rank, mine, plan, rows(4))
        return zero.clip_grad_norm(mine.parameters(), rank.comm(), MAX_NORM).item()

    model = build(UNTIED, 0).requires_grad_(False)
    model.head.requires_grad_(True)
    model.loss(*rows(4)).backward()
    norm = model.head.weight.grad.norm().item()
    assert World(Mesh(pp=2)).run(program) == [pytest.approx(norm, rel=1e-12)] * 2


def test_master_weights_know_what_their_weights_are():
    """In half precision the fp32 copies are clipped: of those of a split layer each rank has its own."""

    def program(rank):
        model = build(TIED, 0, torch.bfloat16)
        tensor_parallel.parallelize(model, rank.comm("tp"))
        masters = precision.MasterWeights(torch.optim.SGD(model.parameters(), lr=1.0))
        model.loss(*rows(2)).backward()
        masters.collect()
        found = [p for group in masters.param_groups for p in group["params"]]
        norm = zero.clip_grad_norm(found, rank.comm(), 1e9)
        named = {p: name for name, p in model.named_parameters()}
        return norm.item(), {named[w]: m.grad for w, m in masters.masters.items()}

    results = World(Mesh(tp=2)).run(program)
    square = 0.0
    for at, whole in build(TIED, 0).named_parameters():
        mine = [gradients[at] for _, gradients in results]
        split = mine[0].shape != whole.shape
        square += sum(g.double().square().sum() for g in mine[: 2 if split else 1]).item()
    for norm, _ in results:
        assert norm == pytest.approx(square**0.5, rel=1e-6)


# ── one decision ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", [0, 3])
@pytest.mark.parametrize(
    "axes, level",
    [(dict(dp=2, tp=2), 0), (dict(dp=2, tp=2), 3), (dict(pp=2, dp=2), 1), (dict(pp=2, tp=2), 0)],
)
def test_an_overflow_anywhere_on_the_mesh_is_skipped_by_all(axes, level, where):
    plan = PAIR if "pp" in axes else None

    def program(rank):
        parts = changed(rank, UNTIED, plan, False)
        (stepper,), clipped = optimizers(rank, parts, level)
        before = [p.detach().clone() for p in parts.parameters()]
        scaler = LossScaler(8.0, comm=rank.comm())
        passed(rank, parts, plan, rows(4))
        reduced(rank, parts, level)
        if rank.rank == where:  # the others see numbers
            next(p for p in clipped() if p.grad is not None).grad.view(-1)[0] = torch.inf
        stepped = scaler.step(stepper)
        scaler.update()
        return stepped, scaler.value, all(map(torch.equal, before, parts.parameters()))

    assert World(Mesh(**axes)).run(program) == [(False, 4.0, True)] * 4


# ── refused, with a remedy that works ──────────────────────────────────────────────────────────────────────────────


def one(rank, **marks):
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.full_like(parameter, 2.0)
    vars(parameter).update(marks)
    return parameter


@pytest.mark.parametrize(
    "attempt, said",
    [
        (lambda rank: zero.clip_grad_norm([one(rank, shares=1)], rank.comm("dp"), 1.0), "has 2 of"),
        (
            lambda rank: zero.clip_grad_norm([one(rank, shares=1)], rank.comm("tp"), 1.0),
            "rank.comm",
        ),
        (lambda rank: LossScaler(comm=rank.comm("dp")), "whether a step is skipped is .* all 4"),
        (lambda rank: zero.clip_grad_norm([one(rank)], rank.comm(), 1.0), "set its .shares: 1 if"),
        (
            lambda rank: precision.clipped_step(
                torch.rand, None, LossScaler(comm=rank.comm()), 1.0
            ),
            "then zero.clip_grad_norm",
        ),
    ],
)
def test_what_is_no_norm_of_the_whole_is_refused(attempt, said):
    with pytest.raises(RankError) as error:
        World(Mesh(dp=2, tp=2)).run(attempt)
    assert re.search(said, str(error.value).splitlines()[0])  # below stands the source line


def test_the_weights_of_a_zero_optimizer_are_refused_and_its_pieces_taken():
    """At levels 1 and 2 the weights have no gradient: their norm would be 0, and nothing be clipped."""

    def program(rank, remedied):
        model = nn.Linear(3, 1, bias=False)
        optimizer = zero.Optimizer(model.parameters(), rank.comm("dp"), level=1)
        model(torch.ones(1, 3)).sum().backward()
        mine = optimizer.collect() if remedied else model.parameters()
        return zero.clip_grad_norm(mine, rank.comm("dp"), 1.0).item()

    with pytest.raises(RankError, match="give what its collect"):
        World(2).run(program, False)
    assert World(2).run(program, True) == [pytest.approx(3**0.5)] * 2


@pytest.mark.parametrize("shares, norm", [(1, 12**0.5), (4, 48**0.5)])
def test_a_parameter_of_ones_own_says_what_it_is(shares, norm):
    def program(rank):
        mine = one(rank, shares=shares)
        return zero.clip_grad_norm(
            [mine, mine], rank.comm(), 1.0
        ).item()  # named twice, counts once

    assert World(Mesh(dp=2, tp=2)).run(program) == [pytest.approx(norm)] * 4


def test_a_copy_of_a_parameter_is_no_longer_marked_and_a_door_has_no_copy():
    def program(rank):
        layer = nn.Linear(4, 4)
        model = nn.Sequential(tensor_parallel.ColumnLinear.from_full(layer, rank.comm("tp")))
        return copy.deepcopy(model)

    with pytest.raises(RankError, match="has no copy: copy the module first"):
        World(Mesh(tp=2)).run(program)


def test_copies():
    """How many of 8 ranks have a tensor: of a stage of 4, by shares; at both ends twice."""

    def program(rank):
        found = []
        for marks in (dict(shares=1), dict(shares=2), dict(shares=4), dict(shares=1, ends=2)):
            found.append(int(world.copies(one(rank, **marks), rank.comm())))
        like = one(rank, shares=2, only_on="edp")
        made = world.marked(one(rank), like, shares=2)
        return [*found, made.shares, made.only_on]

    assert World(Mesh(pp=2, dp=2, tp=2)).run(program) == [[4, 2, 1, 8, 4, "edp"]] * 8
