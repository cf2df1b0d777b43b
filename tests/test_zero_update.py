"""The update: groups of parameters, schedules, clipping, loss scaling, half weights and their master copies."""

import pytest
import torch
from torch import nn
from zero_training import (
    GROUPS,
    LEVELS,
    OPTIMIZERS,
    TIED,
    assert_books,
    assert_equal,
    batches,
    build,
    clip,
    gradients_of,
    inner,
    of,
    own,
    ranks,
    same,
    shards,
    train,
    weights,
)

from labutils import zero
from labutils.precision import LossScaler


def test_fewer_elements_than_ranks():
    def program(rank):
        weight = nn.Parameter(torch.full((2,), float(rank.rank)))
        optimizer = zero.Optimizer([weight], rank.comm("dp"), OPTIMIZERS["sgd"], level=2)
        (weight * torch.tensor([1.0, 2.0]) * rank.rank).sum().backward()
        optimizer.step()
        return weight.tolist(), optimizer.flats[0].shard.tolist()

    results = ranks(4).run(program)
    assert [whole for whole, _ in results] == [pytest.approx([-0.15, -0.3])] * 4
    assert [owned for _, owned in results] == [
        pytest.approx(owned) for owned in ([-0.15], [-0.3], [0.0], [0.0])
    ]


def test_parameters_that_take_no_part_have_a_gradient_of_zero():
    def program(rank, level):
        model = nn.ModuleDict(
            {"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "sometimes": nn.Linear(3, 1)}
        )
        model.forward = lambda x: (
            model["used"](x) + (model["sometimes"](x) if rank.rank == 0 else 0)
        )
        owner = own(
            model,
            rank.comm("dp"),
            level,
            OPTIMIZERS["sgd"],
            **({} if level == 3 else {"bucket_bytes": 16}),
        )
        before = weights(model, owner)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        gradients = gradients_of(model, owner, rank.comm("dp"))
        owner.step()
        after = weights(model, owner)
        return {
            name: (gradients[name].flatten()[0].item(), torch.equal(before[name], after[name]))
            for name in after
        }

    for level in LEVELS:
        for found in ranks(2).run(program, level):
            assert found == {
                "used.weight": (4.0, False), "used.bias": (4.0, False), "unused.weight": (0.0, True), "unused.bias": (0.0, True),
                "sometimes.weight": (2.0, False), "sometimes.bias": (2.0, False),
            }  # fmt: skip


GROUPED = [
    (2, dict(groups="adamw", schedule=True)),
    (
        3,
        dict(
            groups="adamw", accumulation=2, max_norm=0.5, frozen=("tokens", "feed_forward.up.bias")
        ),
    ),
    (
        4,
        dict(
            groups="momentum", optimizer="momentum", schedule=True, frozen=("positions", "blocks.1")
        ),
    ),
]


@pytest.mark.parametrize("n, settings", GROUPED, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_groups_with_settings_of_their_own(n, level, settings):
    """One optimizer of matrices that decay and vectors that do not, each with a learning rate that a schedule moves."""
    results = ranks(n).run(train, TIED, level, **settings)
    assert_equal(results, TIED, **settings)
    assert_books(
        results,
        ranks(n).ledger,
        TIED,
        level,
        **{name: value for name, value in settings.items() if name not in ("groups", "schedule")},
    )


def test_settings_are_read_and_changed_where_torch_has_them():
    def program(rank):
        owner = own(build(TIED, 0), rank.comm("dp"), 2, OPTIMIZERS["adamw"], GROUPS["adamw"])
        owner.param_groups[1]["lr"] *= 2
        return [(group["lr"], group["weight_decay"]) for group in inner(owner).param_groups]

    assert ranks(2).run(program) == [[(1e-2, 0.3), (6e-2, 0.0)]] * 2


@pytest.mark.parametrize("level", [2, 3])
def test_a_backward_pass_that_failed_is_forgotten(level):
    (x,) = batches(TIED, 1)[0]

    alone = build(TIED, 0)
    for _ in range(2):
        alone.loss(x, x).backward()

    def program(rank):
        model = build(TIED, 0)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        hidden = []
        watching = model.blocks[0].register_forward_hook(
            lambda module, args, output: hidden.append(output)
        )
        loss = model.loss(x, x)
        watching.remove()
        hidden.pop().register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        owner.zero_grad()
        for _ in range(2):
            model.loss(x, x).backward()
        return gradients_of(model, owner, rank.comm("dp"))

    for found in ranks(2).run(program):
        assert same(found, {name: parameter.grad for name, parameter in alone.named_parameters()})


# ── loss scaling ───────────────────────────────────────────────────────────────────────────────────────────────────


def scaled_steps(model, optimizer, clip, inputs, comm=None):
    """Scales and norms of some steps, each with a loss that is scaled."""
    scaler, told = LossScaler(1024.0, growth_interval=2, comm=comm), []
    for x in inputs:
        scaler.scale(model(x).mean()).backward()
        finite = scaler.unscale_(optimizer)
        told.append((finite, float(clip())))
        told.append((scaler.step(optimizer), 0.0))
        scaler.update()
        told.append((True, scaler.value))
        optimizer.zero_grad()
    return told


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_an_inf_on_one_rank_makes_all_ranks_skip(n, level):
    """One element of one rank's gradient overflows in the third of five steps: one owner sees it, and nobody steps."""
    inputs = torch.randn(5, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    inputs[2, -1, 0] = torch.inf

    def made():
        return nn.Linear(8, 1, bias=False, dtype=torch.float64)

    def program(rank):
        model = made()
        nn.init.ones_(model.weight)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        told = scaled_steps(
            model,
            owner,
            lambda: clip(model, owner, rank.comm("dp"), 0.5),
            [x.chunk(n)[rank.rank] for x in inputs],
            rank.comm("dp"),
        )
        with rank.comm("dp").record("compare"):
            return told, weights(model, owner)

    alone = made()
    nn.init.ones_(alone.weight)
    expected = scaled_steps(
        alone,
        OPTIMIZERS["adamw"](alone.parameters()),
        lambda: nn.utils.clip_grad_norm_(alone.parameters(), 0.5),
        inputs,
    )
    assert [finite for finite, _ in expected[::3]] == [True, True, False, True, True]
    results = ranks(n).run(program)
    for told, final in results:
        assert [finite for finite, _ in told] == [finite for finite, _ in expected]
        assert torch.allclose(
            torch.tensor(told, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-10,
        )
        assert torch.allclose(final["weight"], alone.weight, rtol=1e-10, atol=1e-10)
    S = 8 * zero.partition(alone.weight.numel(), n).padded
    gathers = {3: 10}.get(level, 4)  # twice a step, or once, but for the one that is skipped
    flags = {"finite": 5 * 4, "gradient norm": 5 * 8}  # one number each, to be agreed on
    sent = {"broadcast": S, "reduce_scatter": 5 * S, "all_gather": gathers * S}
    sent = {name: nbytes * (n - 1) for name, nbytes in sent.items()}
    sent |= {name: 2 * nbytes * (n - 1) for name, nbytes in flags.items()}
    found = ranks(n).ledger.by("name")
    assert {name: found.get(name, 0) for name in sent} == sent


@pytest.mark.parametrize("level", LEVELS)
def test_half_gradients_are_unscaled_in_the_fp32_copy(level):
    """A gradient of 2**-26 is zero in fp16; scaled, it arrives, is clipped by its true norm, and the master copy moves by it."""

    def program(rank, scale):
        dtype, options = (torch.float32, {"param_dtype": torch.float16})
        if level < 3:
            dtype, options = torch.float16, {}
        model, comm = nn.Linear(8, 1, bias=False, dtype=dtype), rank.comm("dp")
        nn.init.ones_(model.weight)
        owner = own(model, comm, level, lambda p: torch.optim.SGD(p, lr=2.0**20), **options)
        scaler = LossScaler(scale, comm=comm)
        x = torch.full((1, 8), 2.0**-13, dtype=torch.float16)
        scaler.scale(model(x).float().sum() * 2.0**-13).backward()
        scaler.unscale_(owner)
        gradient = gradients_of(model, owner, comm)["weight"]
        norm = clip(model, owner, comm, max_norm)
        stepped = scaler.step(owner)
        moved = 1 - shards(model, owner)[1][0].shard
        return stepped, gradient.unique().tolist(), norm.item(), moved.tolist()

    true = 8**0.5 * 2.0**-26
    max_norm = true / 2
    moved = max_norm / (true + 1e-6) * 2.0**-26 * 2.0**20
    assert (
        ranks(2).run(program, 2.0**16)
        == [(True, [2.0**-26], pytest.approx(true), pytest.approx([moved] * 4, rel=1e-3))] * 2
    )
    assert ranks(2).run(program, 1.0) == [(True, [0.0], 0.0, [0.0] * 4)] * 2


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_inf_in_one_of_several_buckets_is_an_overflow(level, which):
    """Three flat parameters, one of them with an inf: nobody steps, whichever it is."""

    def program(rank):
        layers = [nn.Linear(4, 1, bias=False, dtype=torch.float64) for _ in range(3)]
        model, comm = nn.Sequential(*layers), rank.comm("dp")
        model.forward = lambda x: sum(layer(row) for layer, row in zip(layers, x, strict=True))
        x = torch.ones(3, 4, dtype=torch.float64)
        if rank.rank == 1:
            x[which] = torch.inf  # and so is the gradient of that layer alone
        if level == 3:
            optimizer = OPTIMIZERS["sgd"](zero.shard(model, comm).parameters())
        else:
            options = dict(level=level, bucket_bytes=1)
            optimizer = zero.Optimizer(model.parameters(), comm, OPTIMIZERS["sgd"], **options)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler = LossScaler(4.0, comm=comm)
        scaler.scale(model(x).sum()).backward()
        stepped = scaler.step(optimizer)
        scaler.update()
        still = all(map(torch.equal, before, model.parameters()))
        return len(shards(model, optimizer)[1]), stepped, still, scaler.value

    for found in ranks(2).run(program):
        assert found == (3, False, True, 2.0)


# ── other formats than float64 ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_and_master_weights_are_rounded_no_more_than_they_must(level, dtype):
    """A mean of n gradients is n roundings away from the exact one; the step is that of torch on an fp32 copy of the weights."""
    n, (x,) = 3, batches(TIED, 1)[0]

    def program(rank):
        mine, comm, kept, options = of(rank, x), rank.comm("dp"), dtype, {}
        if level == 3:  # which rounds what it gathers, not what it keeps
            kept, options = torch.float32, {"param_dtype": dtype}
        alone, model = build(TIED, 0, dtype), build(TIED, rank.rank, kept)
        alone.loss(mine, mine).backward()
        owner = own(model, comm, level, OPTIMIZERS["adamw"], **options)
        model.loss(mine, mine).backward()
        gradients = gradients_of(model, owner, comm)
        owner.step()
        return (
            {name: parameter.grad for name, parameter in alone.named_parameters()},
            gradients,
            weights(model, owner),
        )

    results = ranks(n).run(program)
    whole = build(TIED, 0, torch.float32 if level == 3 else dtype)
    master = {
        name: nn.Parameter(parameter.detach().float())
        for name, parameter in whole.named_parameters()
    }
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    for name, parameter in master.items():
        own_gradients = torch.stack([result[0][name].double() for result in results])
        bound = (n + 1) * torch.finfo(dtype).eps / 2 * own_gradients.abs().mean(0) + n * smallest
        for _, gradients, _ in results:
            assert ((gradients[name].double() - own_gradients.mean(0)).abs() <= bound).all()
        parameter.grad = results[0][1][name].float()
    OPTIMIZERS["adamw"](list(master.values())).step()
    for _, _, final in results:
        for name, parameter in master.items():
            assert torch.allclose(
                final[name].float(),
                parameter.to(dtype).float(),
                rtol=0 if dtype != torch.float32 else 1e-6,
                atol=1e-8,
            )


def test_half_weights_move_through_their_master_copy():
    """Steps that each round away in bfloat16 add up in the fp32 shard, and only there."""

    def sgd(params):
        return torch.optim.SGD(params, lr=1e-3)

    def program(rank, level):
        model, comm = nn.Linear(5, 1, bias=False), rank.comm("dp")
        nn.init.constant_(model.weight, 1.0)
        if level == 3:
            owner = own(model, comm, 3, sgd, param_dtype=torch.bfloat16)
        elif level:
            owner = own(model.bfloat16(), comm, level, sgd)
        else:
            owner = sgd(model.bfloat16().parameters())
        for _ in range(20):
            model(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
            owner.step()
            owner.zero_grad()
        return (
            next(iter(weights(model, owner).values() if level else model.parameters()))
            .float()
            .mean()
            .item()
        )

    assert ranks(2).run(program, 0) == [1.0, 1.0]
    for level in LEVELS:
        assert ranks(2).run(program, level) == pytest.approx([0.98] * 2, abs=2**-9)


def test_master_weights_of_a_sharded_module_start_unrounded():
    """What bf16 would round away before the first step is in the fp32 shards after it."""

    def program(rank):
        model = nn.Linear(5, 1, bias=False)
        nn.init.constant_(model.weight, 1 / 3)
        zero.shard(model, rank.comm("dp"), param_dtype=torch.bfloat16)
        with zero.gathered(model):
            seen = model.weight.unique().tolist()
        return seen, sum(model.weight.eq(torch.tensor(1 / 3)).tolist())

    assert ranks(2).run(program) == [([0.333984375], 3), ([0.333984375], 2)]
