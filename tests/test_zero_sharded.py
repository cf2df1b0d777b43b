"""Level 3: when units are gathered and freed, in which order, and what checkpointing, evaluation and a forward without backward do to that."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from zero_training import (
    AGAIN,
    OPTIMIZERS,
    TIED,
    assert_books,
    assert_equal,
    batches,
    build,
    gradients_of,
    held,
    own,
    ranks,
    same,
    train,
    weights,
)

from labutils import world, zero
from labutils.config import Mesh


@pytest.mark.parametrize(
    "options",
    [
        dict(reshard=False),
        dict(prefetch=False),
        dict(reshard=False, prefetch=False),
    ],
    ids=str,
)
def test_every_way_to_gather(options):
    results = ranks(3).run(train, TIED, 3, **options)
    assert_equal(results, TIED)
    assert_books(results, ranks(3).ledger, TIED, 3, **options)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_weights_that_lie_transposed(level):
    def program(rank):
        layer = torch.nn.Linear(3, 5, dtype=torch.float64)
        layer.weight.data = torch.arange(15.0, dtype=torch.float64).view(3, 5).T
        layer.bias.data.zero_()
        make = functools.partial(torch.optim.SGD, lr=0.5)
        optimizer = own(layer, rank.comm("dp"), level, make)
        layer(torch.full((1, 3), 2.0 * rank.rank, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return weights(layer, optimizer)["weight"]

    whole = torch.arange(15.0, dtype=torch.float64).view(3, 5).T - 0.5
    assert all(torch.equal(found, whole) for found in ranks(2).run(program))


def test_a_model_that_is_one_unit():
    assert_equal(ranks(3).run(train, TIED, 3, units=[]), TIED)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("prefetch", [True, False])
def test_how_many_units_are_whole_while_one_computes(prefetch, reshard):
    """In the forward pass and in the backward pass: the peak of a step would show the latter."""

    def program(rank):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
        zero.shard(model, rank.comm("dp"), prefetch=prefetch, reshard=reshard)
        groups, seen = model._sharded.groups, {"forward": [], "backward": []}

        def look(phase):
            seen[phase].append(sum(group.resident for group in groups[1:]))

        for unit in model:
            unit[1].register_forward_hook(lambda *_: look("forward"))
            unit[1].register_full_backward_hook(lambda *_: look("backward"))
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
        return seen

    for seen in ranks(2).run(program):
        if reshard:
            assert seen["forward"] == ([2, 2, 2, 1] if prefetch else [1, 1, 1, 1])
            assert seen["backward"][1:] == ([2, 2, 1] if prefetch else [1, 1, 1])
        else:
            assert seen["forward"] == ([2, 3, 4, 4] if prefetch else [1, 2, 3, 4])


@pytest.mark.parametrize("order", [(0, 2), (2, 0, 1)], ids=["one unit skipped", "another order"])
def test_units_that_do_not_compute_in_their_order(order):
    x = torch.ones(2, 4, dtype=torch.float64)

    def made():
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3)))
        for parameter in model.parameters():
            nn.init.normal_(parameter, generator=generator)
        model.forward = lambda x: functools.reduce(lambda x, i: model[i](x).tanh(), order, x)
        return model

    def program(rank):
        model = made()
        owner = own(model, rank.comm("dp"), 3, OPTIMIZERS["sgd"])
        for _ in range(2):
            model(x).sum().backward()
            owner.step()
            owner.zero_grad()
        left = held(model, owner).by("name")["left"]
        return weights(model, owner), left

    alone = made()
    inner = OPTIMIZERS["sgd"](alone.parameters())
    for _ in range(2):
        alone(x).sum().backward()
        inner.step()
        inner.zero_grad()
    for final, left in ranks(3).run(program):
        assert (
            same(final, {name: parameter.detach() for name, parameter in alone.named_parameters()})
            and left == 0
        )


def test_evaluation_leaves_nothing_behind():
    x = batches(TIED, 1)[0][0]
    expected = build(TIED, 0)(x)

    def program(rank, reshard):
        model = build(TIED, rank.rank)
        owner = own(model, rank.comm("dp"), 3, OPTIMIZERS["sgd"], reshard=reshard)
        shards = held(model, owner)
        with torch.no_grad():
            outputs = [model(x)]
        left = [held(model, owner)]
        with zero.gathered(model):
            outputs += [model(x).detach(), model.norm(model.embed(x)).detach()]
        left.append(held(model, owner))
        with pytest.raises(RuntimeError):
            model.embed(x)  # outside of a pass there is no weight to look anything up in
        return [torch.equal(out, expected) for out in outputs[:2]] + [
            shards.diff(each).unexplained for each in left
        ]

    for reshard in (True, False):
        assert ranks(2).run(program, reshard) == [[True, True, 0, 0]] * 2


def test_a_step_reaches_weights_that_a_forward_has_left_behind():
    x = batches(TIED, 1)[0][0]

    def program(rank):
        model = build(TIED, 0)
        owner = own(model, rank.comm("dp"), 3, OPTIMIZERS["sgd"], reshard=False)
        model.loss(x, x).backward()
        first = model(x)  # without a backward, which would free the weights
        owner.step()
        second = model(x)
        with zero.gathered(model):
            return torch.equal(first, second), torch.equal(second, model(x))

    assert ranks(2).run(program) == [(False, True)] * 2


@pytest.mark.parametrize("options", [dict(), dict(reshard=False)], ids=str)
@pytest.mark.parametrize("checkpointed", ["inside", *AGAIN])
def test_a_checkpointed_unit_is_gathered_no_oftener_than_another(checkpointed, options):
    """It computes again where its weights are here anyway, for its backward: recomputation sends nothing."""
    results = ranks(2).run(train, TIED, 3, checkpointed=checkpointed, **options)
    assert_equal(results, TIED)
    assert_books(results, ranks(2).ledger, TIED, 3, **options)


@pytest.mark.parametrize("level", [1, 2])
def test_reentrant_checkpoints_do_not_end_a_backward_pass(level):
    results = ranks(2).run(train, TIED, level, checkpointed="reentrant", accumulation=2)
    assert_equal(results, TIED, accumulation=2)
    assert_books(results, ranks(2).ledger, TIED, level, accumulation=2)


def test_a_model_that_is_one_reentrant_checkpoint():
    """Level 3 sees it begin to compute again. Level 2 sees passes within a pass alone, and cannot tell where the outer one ends."""
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)

    def program(rank, level, passes):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["sgd"])
        with zero.gathered(model) if level == 3 else contextlib.nullcontext():
            expected = torch.autograd.grad(
                model(x.detach()).sum() * passes, [model[0].weight, model[1].bias]
            )
        for _ in range(passes):
            AGAIN["reentrant"](model, x).sum().backward()
        found = gradients_of(model, owner, rank.comm("dp"))
        return torch.allclose(found["0.weight"], expected[0]) and torch.allclose(
            found["1.bias"], expected[1]
        )

    for level, passes in ((2, 1), (3, 1), (3, 2)):
        assert ranks(2).run(program, level, passes) == [True, True]
    with pytest.raises(
        world.RankError,
        match="came again after it was reduced, in a backward pass within another: checkpoint with use_reentrant=False",
    ):
        ranks(2).run(program, 2, 2)


@pytest.mark.parametrize("axes", [("dp",), ("dp", "cp")], ids=str)
def test_a_module_is_sharded_over_an_axis_of_a_mesh_or_over_two_of_them(axes):
    x = batches(TIED, 1)[0][0]
    alone = build(TIED, 0)
    optimizer = OPTIMIZERS["momentum"](alone.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        alone.loss(x, x).backward()
        optimizer.step()

    def program(rank):
        comm = rank.comm(*axes)
        model = build(TIED, comm.rank)
        owner = own(model, comm, 3, OPTIMIZERS["momentum"])
        for _ in range(2):
            owner.zero_grad()
            model.loss(x, x).backward()
            owner.step()
        return sum(p.numel() for p in model.parameters()), weights(model, owner)

    with world.World(Mesh(dp=2, cp=2)) as mesh:
        results = mesh.run(program)
    n = 2 ** len(axes)
    expected = {name: parameter.detach() for name, parameter in alone.named_parameters()}
    assert all(same(final, expected) for _, final in results)
    assert sum(numel for numel, _ in results) == 4 // n * TIED.num_params
