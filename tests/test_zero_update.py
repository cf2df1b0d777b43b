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
    of,
    own,
    ranks,
    same,
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
        return weight.tolist(), optimizer.owned[0].tolist()

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
        gradients = owner.gradients()
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
    (3, dict(groups="adamw", accumulation=2, clip=0.5, frozen=("tokens", "feed_forward.up.bias"))),
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


@pytest.mark.parametrize("level", LEVELS)
def test_offloaded_state_is_stepped_beside_the_weights(level):
    results = ranks(2).run(train, TIED, level, offload="cpu", groups="adamw")
    assert_equal(results, TIED, groups="adamw")
    assert_books(results, ranks(2).ledger, TIED, level, offload="cpu")


def test_settings_are_read_and_changed_where_torch_has_them():
    def program(rank):
        owner = own(build(TIED, 0), rank.comm("dp"), 2, OPTIMIZERS["adamw"], GROUPS["adamw"])
        owner.param_groups[1]["lr"] *= 2
        return [(group["lr"], group["weight_decay"]) for group in owner.inner.param_groups]

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
        return owner.gradients()

    for found in ranks(2).run(program):
        assert same(found, {name: parameter.grad for name, parameter in alone.named_parameters()})


# ── loss scaling ───────────────────────────────────────────────────────────────────────────────────────────────────


def scaled_steps(model, optimizer, clip, zero_grad, inputs):
    """Scales and norms of some steps, each with a loss that is scaled."""
    scaler, told = LossScaler(1024.0, growth_interval=2), []
    for x in inputs:
        scaler.scale(model(x).mean()).backward()
        finite = scaler.unscale_(optimizer)
        told.append((finite, float(clip())))
        told.append((scaler.step(optimizer), 0.0))
        scaler.update()
        told.append((True, scaler.value))
        zero_grad()
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
            lambda: owner.clip_grad_norm(0.5),
            owner.zero_grad,
            [x.chunk(n)[rank.rank] for x in inputs],
        )
        return told, weights(model, owner), owner.layout

    alone = made()
    nn.init.ones_(alone.weight)
    inner = OPTIMIZERS["adamw"](alone.parameters())
    expected = scaled_steps(
        alone,
        inner,
        lambda: nn.utils.clip_grad_norm_(alone.parameters(), 0.5),
        inner.zero_grad,
        inputs,
    )
    assert [finite for finite, _ in expected[::3]] == [True, True, False, True, True]
    results = ranks(n).run(program)
    for told, final, _ in results:
        assert [finite for finite, _ in told] == [finite for finite, _ in expected]
        assert torch.allclose(
            torch.tensor(told, dtype=torch.float64),
            torch.tensor(expected, dtype=torch.float64),
            rtol=1e-10,
        )
        assert torch.allclose(final["weight"], alone.weight, rtol=1e-10, atol=1e-10)
    layout, books = results[0][2], {"itemsize": 8, "clip": True, "scaled": True}
    sent = zero.predict_sent(layout, n, level, steps=5, start=True, **books).by("name")
    gather = zero.predict_sent(layout, n, 1, itemsize=8).only(name="all_gather").total
    sent["all_gather"] = sent.get("all_gather", 0) + (
        gather if level == 3 else -gather
    )  # that of weights(); that of the step that is skipped
    assert ranks(n).ledger.by("name") == {name: nbytes for name, nbytes in sent.items() if nbytes}


@pytest.mark.parametrize("level", LEVELS)
def test_half_gradients_are_unscaled_in_the_fp32_copy(level):
    """A gradient of 2**-26 is zero in fp16; scaled, it arrives, is clipped by its true norm, and the master copy moves by it."""

    def program(rank, scale):
        model = nn.Linear(8, 1, bias=False, dtype=torch.float16)
        nn.init.ones_(model.weight)
        owner = own(
            model, rank.comm("dp"), level, lambda params: torch.optim.SGD(params, lr=2.0**20)
        )
        scaler = LossScaler(scale)
        scaler.scale(
            model(torch.full((1, 8), 2.0**-13, dtype=torch.float16)).float().sum() * 2.0**-13
        ).backward()
        scaler.unscale_(owner)
        gradient, norm = owner.gradients()["weight"], owner.clip_grad_norm(max_norm)
        return (
            scaler.step(owner),
            gradient.unique().tolist(),
            norm.item(),
            (1 - owner.owned[0]).tolist(),
        )

    true = 8**0.5 * 2.0**-26
    max_norm = true / 2
    moved = max_norm / (true + 1e-6) * 2.0**-26 * 2.0**20
    assert (
        ranks(2).run(program, 2.0**16)
        == [(True, [2.0**-26], pytest.approx(true), pytest.approx([moved] * 4, rel=1e-3))] * 2
    )
    assert ranks(2).run(program, 1.0) == [(True, [0.0], 0.0, [0.0] * 4)] * 2


# ── other formats than float64 ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_and_master_weights_are_rounded_no_more_than_they_must(level, dtype):
    """A mean of n gradients is n roundings away from the exact one; the step is that of torch on an fp32 copy of the weights."""
    n, (x,) = 3, batches(TIED, 1)[0]

    def program(rank):
        mine = of(rank, x)
        alone, model = build(TIED, 0, dtype), build(TIED, rank.rank, dtype)
        alone.loss(mine, mine).backward()
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        model.loss(mine, mine).backward()
        gradients = owner.gradients()
        owner.step()
        return (
            {name: parameter.grad for name, parameter in alone.named_parameters()},
            gradients,
            weights(model, owner),
        )

    results = ranks(n).run(program)
    whole = build(TIED, 0, dtype)
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

    def program(rank, master):
        weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        optimizer = zero.Optimizer(
            [weight],
            rank.comm("dp"),
            lambda params: torch.optim.SGD(params, lr=1e-3),
            level=2,
            master=master,
        )
        for _ in range(20):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().float().mean().item()

    assert ranks(2).run(program, None) == pytest.approx([0.98] * 2, abs=2**-9) and ranks(2).run(
        program, False
    ) == [1.0, 1.0]
