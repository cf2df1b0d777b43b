"""Who owns what, the formulas from sizes alone, the paper's tables, and what cannot be."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zero_training import LEVELS, TIED, UNTIED, ranks

from labutils import anatomy, collectives, predict, units, zero
from labutils.config import Mesh, TrainConfig
from labutils.model import GPT
from labutils.precision import LossScaler


@given(st.integers(1, 200), st.integers(1, 20))
def test_a_partition_covers_everything_once_in_equal_shares(numel, n):
    dealt = zero.partition(numel, n)
    owned = [i for rank in range(n) for i in range(*dealt.bounds(rank))]
    assert (
        owned == list(range(numel))
        and 0 <= dealt.padding < n
        and dealt.padded == n * dealt.share == numel + dealt.padding
    )


def test_units_are_the_members_of_the_lists_of_a_module():
    def program(rank):
        comm = rank.comm("dp")
        stack = zero.shard(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), comm)
        single = zero.shard(nn.Linear(2, 3), comm)
        model = GPT(UNTIED)
        chosen = zero.shard(model, comm, units=[model.tokens, *model.blocks, model.head])
        return [
            [sum(flat.partition.numel for flat in group.flats) for group in module._sharded.groups]
            for module in (stack, single, chosen)
        ]

    parts = UNTIED.parameters
    layer = (parts["attention"] + parts["feed-forward"]) // 2 + 2 * 12
    assert (
        ranks(2).run(program)
        == [[[0, 9, 16], [9], [12, parts["token embedding"], layer, layer, parts["head"]]]] * 2
    )


# ── formulas ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_step_sends_is_two_and_three_times_the_weights():
    """By the paper, and by `predict` for the very names of a run."""
    for n, (level, factor) in itertools.product((2, 4), enumerate((2, 2, 2, 3))):
        train = TrainConfig(micro_batch=1, global_batch=n, precision="fp32", zero=level)
        sent = predict.sent(TIED, train, Mesh(dp=n)).by("name")
        names = ("all_gather", "reduce_scatter") if level else ("gradients",)
        assert sum(map(sent.get, names)) == factor * TIED.num_params * (n - 1) // n * 4


@pytest.mark.parametrize("n", [3, 7, 64])
def test_a_share_is_rounded_up_where_ranks_do_not_divide_the_model(n):
    model = dataclasses.replace(TIED, d_ff=TIED.d_ff + 1)
    whole = [sum(sizes) for sizes in anatomy.units(model).values()]
    share = sum(-(-numel // n) for numel in whole)  # each unit is dealt out by itself
    assert any(numel % n for numel in whole) and share * n > model.num_params
    train = TrainConfig(micro_batch=1, global_batch=n, zero=3, precision="fp32")
    held = predict.states(model, train, Mesh(dp=n)).by("name")
    assert held["exp_avg"] == held["exp_avg_sq"] == 4 * share
    assert held["weights"] == 4 * share


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_formulas_agree_with_those_of_the_other_labs(level, precision):
    m, psi, itemsize = 4, TIED.num_params, 4 if precision == "fp32" else 2
    train_config = TrainConfig(
        micro_batch=2, global_batch=2 * 2 * m, precision=precision, zero=level
    )
    summed, scattered, gathered = (
        collectives.sent(f"{op}_ring", nbytes=itemsize * psi, n=2, itemsize=itemsize)
        for op in ("all_reduce", "reduce_scatter", "all_gather")
    )
    theirs = (
        summed,
        scattered + gathered,
        scattered.scaled(m) + gathered,
        scattered.scaled(m) + gathered.scaled(2 * m),
    )[level]
    ours = predict.sent(TIED, train_config, Mesh(dp=2)).by("name")
    moved = sum(ours.get(name, 0) for name in ("gradients", "all_gather", "reduce_scatter"))
    if level == 0 and precision == "bf16":  # master weights have their gradients in fp32
        moved //= 2
    assert moved == theirs.by("rank")[0] == (2, 2, m + 1, 3 * m)[level] * itemsize * psi // 2


def test_the_papers_tables():
    table = {  # Ψ in billions: N_d: GB with optimizer state, gradients and weights divided, which the paper cuts, not rounds
        7.5: {
            1: (120, 120, 120),
            4: (52.5, 41.3, 30),
            16: (35.6, 21.6, 7.5),
            64: (31.4, 16.6, 1.88),
            256: (30.4, 15.4, 0.47),
            1024: (30.1, 15.1, 0.12),
        },
        128: {
            1: (2048, 2048, 2048),
            4: (896, 704, 512),
            16: (608, 368, 128),
            64: (536, 284, 32),
            256: (518, 263, 8),
            1024: (513, 257, 2),
        },
        1000: {
            1: (16000, 16000, 16000),
            4: (7000, 5500, 4000),
            16: (4750, 2875, 1000),
            64: (4187, 2218, 250),
            256: (4046, 2054, 62.5),
            1024: (4011, 2013, 15.6),
        },
    }
    for billions, columns in table.items():
        for n, printed in columns.items():
            for level, amount in zip(LEVELS, printed, strict=True):
                exact = zero.model_states(billions * 1e9, n, level).total / units.GB
                assert exact == pytest.approx(
                    amount, abs=1 if amount > 200 else 0.06 if amount > 10 else 0.006
                ), (billions, n, level)
    for parallel in (
        1,
        2,
        4,
        8,
        16,
    ):  # ranks of model parallelism; 64 of data parallelism with 32 GB each; the paper's 0.5T, 1T and 2T are 512B, 1024B and 2048B
        largest = [
            parallel * 32 * units.GB / zero.model_states(10**9, 64, level).total
            for level in (0, 1, 2, 3)
        ]
        assert largest == pytest.approx(
            [2 * parallel, 7.6 * parallel, 14.4 * parallel, 128 * parallel], rel=0.01
        )
    assert zero.model_states(1, 1, 0, gradient_bytes=4).total == 18 and zero.model_states(
        1, 10**9, 1
    ).total == pytest.approx(4)


# ── what cannot be ─────────────────────────────────────────────────────────────────────────────────────────────────


def alone(fn):
    """What `fn(comm)` does on one rank; the world wraps its error with the same words."""
    return ranks(1).run(lambda rank: fn(rank.comm("dp")))


def optimize(*params, level=1):
    return alone(lambda comm: zero.Optimizer(params, comm, level=level))


def param(**options):
    return nn.Parameter(torch.ones(3, **options))


def sharded(module, units):
    return alone(lambda comm: zero.shard(module, comm, units=units))


def tied_across_units(comm):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    zero.shard(model, comm)


def half_gradients(comm):
    model = zero.shard(nn.Linear(2, 1).half(), comm)
    optimizer = torch.optim.SGD(model.parameters())
    model(torch.ones(1, 2).half()).sum().backward()
    LossScaler(2.0).unscale_(optimizer)


inside = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))

BAD = [
    (lambda: zero.partition(0, 4), "numel must be at least 1, got 0"),
    (lambda: zero.partition(4, 0), "n must be at least 1, got 0"),
    (lambda: zero.partition(4, 2.0), "n must be a whole number"),
    (lambda: zero.partition(4, 2).bounds(2), "rank 2 has no share: there are 2"),
    (lambda: zero.model_states(1e9, 4, 4), "level=4 is no level of ZeRO"),
    (lambda: zero.model_states(1e9, 0, 1), "n must be at least 1"),
    (lambda: optimize(param(), level=0), "use data_parallel.replicate"),
    (lambda: optimize(param(), level=3), "use zero.shard"),
    (lambda: optimize(param(), level=4), "level=4 is not of this optimizer"),
    (lambda: optimize(), "empty parameter list"),
    (
        lambda: optimize(param(), param(dtype=torch.float64)),
        "not torch.float32 on cpu, torch.float64 on cpu: convert the model",
    ),
    (lambda: alone(lambda comm: zero.shard([param()], comm)), "shard takes a module, got list"),
    (lambda: sharded(nn.Linear(2, 2), [nn.Linear(2, 2)]), "is no part of the module"),
    (lambda: sharded(inside, [inside[0], inside[0][0]]), "is in two units, 0 and 0.0"),
    (lambda: sharded(inside[0][0], [inside[0][0]]), "below the root"),
    (lambda: alone(tied_across_units), "weight of 1 is tied between two units, 0 and 1"),
    (lambda: alone(half_gradients), "Keep fp32 weights"),
    (
        lambda: alone(lambda comm: zero.clip_grad_norm([param()], comm, 0)),
        "max_norm must be a finite number above 0",
    ),
]


@pytest.mark.parametrize("attempt, said", BAD)
def test_bad_input_is_named_with_its_remedy(attempt, said):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        attempt()
    assert said in str(error.value)
