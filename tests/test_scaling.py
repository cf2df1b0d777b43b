"""Learning-rate scaling: rules and schedules by the papers, many copies at once = torch one at a time = ranks, and the noise scale three ways."""

import dataclasses
import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from labutils import collectives, scaling
from labutils.scaling import ranks
from labutils.teach import rigs
from labutils.world import World

SMALL = rigs.copies.Network((6, 5, 4), "relu", norm=True)
TOKENS = rigs.copies.Network((6, 5, 7), tokens=7, embed=2)
RANDOM = torch.Generator().manual_seed(0)
NUMBERS = torch.randn(48, 6, generator=RANDOM, dtype=torch.float64), torch.arange(48) % 4
LETTERS = torch.randint(7, (48, 3), generator=RANDOM), torch.arange(48) % 7


def test_the_rules_scale_the_learning_rate():
    # Goyal 1706.02677: 0.1 at 256 is 3.2 at 8k; the square root is Table 2(a)'s 0.10·√32.
    assert scaling.scale_lr(0.1, 32, "linear") == pytest.approx(3.2)
    assert scaling.scale_lr(0.1, 32, "square root") == pytest.approx(0.565685, abs=1e-6)
    assert scaling.scale_lr(0.1, 32, "none") == 0.1
    with pytest.raises(ValueError, match=r"'cube'.*linear"):
        scaling.scale_lr(0.1, 2, "cube")
    with pytest.raises(ValueError, match="ratio"):
        scaling.scale_lr(0.1, 0, "linear")


@given(st.integers(1, 50), st.floats(0.01, 1), st.floats(1, 64))
def test_warm_up_grows_by_equal_amounts_at_each_iteration(steps, start, ratio):
    rates = [scaling.warm_up(t, steps, start=start, end=ratio * start) for t in range(steps + 3)]
    grown = [b - a for a, b in itertools.pairwise(rates)]
    assert rates[0] == start
    assert rates[steps:] == [pytest.approx(ratio * start)] * 3
    assert grown[:steps] == [pytest.approx((ratio - 1) * start / steps, abs=1e-9)] * steps


def test_schedules_meet_their_ends():
    # Goyal, section 2.2: 782 iterations from 0.1 to 3.2; half-way 1.65, not the 1.6 of a start at 0.
    assert scaling.warm_up(391, 782, start=0.1, end=3.2) == pytest.approx(1.65)
    assert [scaling.gradual(8, 0.2)(t, 100) for t in (0, 10, 20, 99)] == [1 / 8, 4.5 / 8, 1, 1]
    assert scaling.warm_up(0, 0, start=0.1, end=3.2) == 3.2
    assert [scaling.cosine(t, 10, peak=2, end=1) for t in (0, 5, 10, 99)] == [2, 1.5, 1, 1]
    early = [scaling.wsd(t, n, peak=1, decay=4) for n in (10, 20) for t in range(6)]
    assert early == [1] * 12
    assert [scaling.wsd(t, 10, peak=1, decay=4, end=0.5) for t in (8, 10, 11)] == [0.75, 0.5, 0.5]


def test_weight_decay_of_an_epoch_stays_under_every_rule():
    before = scaling.shrinkage(1e-3, 0.1, 3200)
    for rule in scaling.POWERS:
        lr, decay = scaling.scale_lr(1e-3, 32, rule), scaling.scale_decay(0.1, 32, rule)
        assert scaling.shrinkage(lr, decay, 100) == pytest.approx(before, rel=2e-3)
    assert scaling.scale_decay(0.1, 32, "linear") == 0.1
    assert scaling.shrinkage(32**0.5 * 1e-3, 0.1, 100) == pytest.approx(0.945, abs=1e-3)
    assert scaling.shrinkage(32e-3, 3.2, 100) < before / 1000
    weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.01, weight_decay=0.3)
    for _ in range(20):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert weight.item() == pytest.approx(scaling.shrinkage(0.01, 0.3, 20), rel=1e-12)


def test_k_small_steps_are_a_large_one_where_the_gradient_does_not_change():
    # Goyal, equations (3) and (4), LR-17.
    w, gradient = torch.ones(2, 5, dtype=torch.float64), torch.arange(5.0).double()
    small, large = torch.optim.SGD([p := nn.Parameter(w[0])], 0.1), nn.Parameter(w[1])
    for _ in range(32):
        p.grad = gradient
        small.step()
    large.grad = gradient
    torch.optim.SGD([large], scaling.scale_lr(0.1, 32, "linear")).step()
    torch.testing.assert_close(p, large, rtol=0, atol=1e-12)


TORCH = {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop}  # fmt: skip


@pytest.mark.parametrize("network, data", [(SMALL, NUMBERS), (TOKENS, LETTERS)])
@pytest.mark.parametrize("name", TORCH)
def test_every_copy_is_trained_as_torch_trains_one(name, network, data):
    x, y = data
    lr, seeds, seen = [0.03, 0.01], [3, 4], []
    decay = [0.1, 0.5] if name == "adam" else [0.0]
    rows = rigs.copies.train_copies(
        network, data, lr=lr, batch=8, samples=80, seeds=seeds, optimizer=name,
        decay=decay, schedule=lambda step, steps: (step + 1) / steps, dtype=torch.float64,
        watch=lambda step, rows: seen.append((step, rows.shape)),
    )  # fmt: skip
    assert seen == [(step, rows.shape) for step in range(1, 11)]
    assert not torch.equal(rigs.copies.order(48, 80, 3), rigs.copies.order(48, 80, 4))
    for s, seed in enumerate(seeds):
        indices = rigs.copies.order(48, 80, seed)
        assert sorted(indices[:48].tolist()) == list(range(48))
        for r, rate in enumerate(lr):
            module = network.alone(network.start([seed])[0].double())
            optimizer = TORCH[name](
                module.parameters(), lr=rate, weight_decay=decay[r * (name == "adam")]
            )
            for step in range(10):
                chosen = indices[8 * step :][:8]
                optimizer.zero_grad()
                nn.functional.cross_entropy(module(x[chosen]), y[chosen]).backward()
                optimizer.param_groups[0]["lr"] = rate * (step + 1) / 10
                optimizer.step()
            torch.testing.assert_close(rows[s, r], module.row.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_memory_that_is_scaled_is_torchs_with_those_numbers(name):
    """1 − β times 3 and 4, ε over √4."""
    copies = rigs.copies
    k, eps, (b1, b2) = (3, 4), copies.EPS / 2, (1 - 3 * 0.1, 1 - 4 * 0.001)
    how = {"betas": (b1, b2)} if name == "adam" else {"alpha": 1 - 4 * 0.01}
    row = SMALL.start([0]).double()
    module = SMALL.alone(row[0])
    optimizer = TORCH[name](module.parameters(), lr=0.03, eps=eps, weight_decay=0.0, **how)
    update, lr = copies.Update(name, row, forget=k), torch.tensor([[0.03]], dtype=torch.float64)
    for step in range(5):
        x, y = NUMBERS[0][step:][:7], NUMBERS[1][step:][:7]
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
        update(row, SMALL.gradients(row, x[None], y[None]), lr)
    torch.testing.assert_close(row[0], module.row.detach(), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="is above 1"):
        copies.Update("adam", row, forget=(11, 1))


def test_a_wider_network_of_mup_begins_and_steps_as_its_table_says():
    """Table 3 of Yang et al. for Adam, in units of the base width."""
    narrow, wide = (
        dataclasses.replace(TOKENS, widths=(6, n, n, 7), base=50) for n in (50, 200)
    )
    plain = dataclasses.replace(narrow, base=0)
    assert torch.equal(narrow.start([1]), plain.start([1])) and (narrow.steps() == 1).all()
    sizes = [math.prod(shape) for shape in wide.shapes]
    steps = [part.unique().tolist() for part in wide.steps().split(sizes)]
    assert steps == [[1], [1], [1], [0.25], [1], [0.25], [1]]  # embedding; weight, bias, …
    began = wide.start([1])[0].split(sizes)
    usual = dataclasses.replace(wide, base=0).start([1])[0].split(sizes)
    assert [torch.equal(*pair) for pair in zip(began, usual, strict=True)].count(False) == 1
    torch.testing.assert_close(began[5], usual[5] / 2)  # variance 1/n²
    rates, start = (dataclasses.replace(wide, half=half) for half in ("rates", "start"))
    assert torch.equal(rates.steps(), wide.steps()) and (start.steps() == 1).all()
    assert torch.equal(start.start([1])[0], wide.start([1])[0])
    assert torch.equal(rates.start([1])[0], torch.cat(usual))
    how = dict(lr=[0.01], batch=8, samples=8, seeds=[1], optimizer="adam")
    moved = rigs.copies.train_copies(wide, LETTERS, **how)[0, 0] - wide.start([1])[0]
    lengths = [part.abs().max().item() for part in moved.split(sizes)]
    assert lengths == pytest.approx([0.01 * factor for (factor,) in steps], rel=1e-2)


def test_losses_and_errors_of_all_copies():
    rows = SMALL.start(range(6)).double().view(2, 3, -1)
    losses, errors = rigs.copies.score(SMALL, rows, NUMBERS)
    one = SMALL.alone(rows[1, 2])(NUMBERS[0])
    assert losses[1, 2].item() == pytest.approx(nn.functional.cross_entropy(one, NUMBERS[1]).item())
    assert errors[1, 2].item() == pytest.approx(
        (one.argmax(1) != NUMBERS[1]).double().mean().item()
    )
    rows[0, 0] = torch.nan
    assert rigs.copies.score(SMALL, rows, NUMBERS)[0][0, 0] == torch.inf
    with pytest.raises(ValueError, match="sgd, adam or rmsprop"):
        rigs.copies.Update("lion", rows[0])


def test_where_networks_start():
    rows = rigs.copies.Network((400, 300, 10), "relu").start([0, 1])
    assert not torch.equal(rows[0], rows[1])
    weight, bias = rows[0, : 400 * 300], rows[0, 400 * 300 :][:300]
    assert weight.var().item() == pytest.approx(2 / 400, rel=0.02) and not bias.any()
    tanh = rigs.copies.Network((400, 300), "tanh").start([0])[0, : 400 * 300]
    assert tanh.var().item() == pytest.approx(1 / 400, rel=0.02)
    assert sum(math.prod(shape) for shape in rigs.scaling.CHARACTERS.shapes) == 8832


@pytest.mark.parametrize("n, micro", [(1, 12), (2, 3), (4, 3), (4, 2), (3, 4)])
def test_the_same_batch_on_ranks_and_in_micro_batches(n, micro):
    rows = rigs.copies.train_copies(
        SMALL, NUMBERS, lr=[0.1], batch=12, samples=60, seeds=[0], dtype=torch.float64
    )  # fmt: skip
    chosen = rigs.copies.order(48, 60, 0).split(12)
    batches = [(NUMBERS[0][each], NUMBERS[1][each]) for each in chosen]

    def program(rank):
        module = SMALL.alone(SMALL.start([0])[0].double() + rank.rank)
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        cross_entropy = nn.functional.cross_entropy
        rigs.copies.train_replica(module, cross_entropy, batches, sgd, rank.comm("dp"), micro)
        return module.row.detach()

    with World(n) as world:
        for row in world.run(program):
            torch.testing.assert_close(row, rows[0, 0], rtol=0, atol=1e-10)
        # Reduced once per step, whatever the number of micro-batches.
        sent = collectives.sent("all_reduce_ring", nbytes=rows[0, 0].nbytes, n=n, itemsize=8)
        assert world.ledger.only(name="all_reduce").total == 5 * sent.total


def per_sample(network, row, x, y):
    def loss(row, x, y):
        return network.losses(row[None], x[None, None], y[None, None])[0]

    return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(row, x, y)


def test_the_noise_scale_three_ways():
    row = SMALL.start([0])[0].double()
    each = per_sample(SMALL, row, *NUMBERS)
    covariance = each.var(0).sum().item()  # unbiased: n − 1
    signal = each.mean(0).square().sum().item() - covariance / 48
    lengths = rigs.copies.squared_lengths(SMALL, row, *NUMBERS, (1, 12, 48))
    found = scaling.estimate_spread(lengths[1], lengths[48], 1, 48)
    assert found == (pytest.approx(covariance), pytest.approx(signal))
    # Four ranks with twelve examples each, before and after their all-reduce.
    own = each.view(4, 12, -1).mean(1)
    two = scaling.estimate_spread(lengths[12], lengths[48], 12, 48)

    def program(rank):
        return ranks.noise_scale_of_ranks([own[rank.rank]] * 2, 12, rank.comm("dp"))

    with World(4) as world:
        assert world.run(program) == [pytest.approx(scaling.noise_scale([two]))] * 4


def test_the_estimate_has_no_bias():
    # A known gradient and covariance: a mean over many batches finds both.
    draw = torch.Generator().manual_seed(1)
    samples = torch.randn(4000, 16, 10, generator=draw, dtype=torch.float64) * 2 + 0.5
    small = samples.square().sum(2).mean().item()
    large = samples.mean(1).square().sum(1).mean().item()
    found = scaling.estimate_spread(small, large, 1, 16)
    assert found.trace == pytest.approx(40, rel=0.02) and found.signal == pytest.approx(
        2.5, rel=0.1
    )
    assert large > 1.5 * found.signal  # the biased one


def test_the_noise_scale_is_a_ratio_of_means():
    found = [scaling.Spread(8.0, 1.0), scaling.Spread(8.0, 3.0)]
    assert scaling.noise_scale(found) == 4
    for signals in ([-1.0], [0.0], [1.0, -1.0]):
        with pytest.raises(ValueError, match="average over more"):
            scaling.noise_scale(scaling.Spread(1.0, signal) for signal in signals)
    with pytest.raises(ValueError, match="b = 4 and B = 4"):
        scaling.estimate_spread(1.0, 1.0, 4, 4)


@given(st.floats(1, 100), st.floats(100, 10000))
def test_the_hyperbola_is_found_again(smin, emin):
    found = scaling.fit({batch: smin + emin / batch for batch in (8, 32, 128, 512)})
    assert found.smin == pytest.approx(smin, rel=1e-4) and found.emin == pytest.approx(
        emin, rel=1e-4
    )
    assert found.steps(found.critical) == pytest.approx(2 * found.smin)
    # Two devices that wait for nothing halve the time; an all-reduce adds to each step.
    once, twice = (found.seconds(64, n, example=1, reduce=0) for n in (1, 2))
    assert once == pytest.approx(2 * twice)
    assert found.seconds(64, 2, example=1, reduce=3) == pytest.approx(twice + 3 * found.steps(64))
    assert found.seconds(64, 1, example=1, reduce=3) == once


def test_a_target_is_met_between_two_points():
    assert rigs.scaling.steps_to(2.5, [0, 10, 20], [4.0, 3.0, 2.0]) == 15
    assert rigs.scaling.steps_to(2.0, [0, 10, 20], [4.0, 3.0, 2.0]) == 20
    assert rigs.scaling.steps_to(3.5, [0, 10, 20, 30], [4.0, 3.0, 5.0, 3.0]) == 5  # the first time
    assert rigs.scaling.steps_to(1.0, [0, 10], [4.0, 3.0]) == math.inf


def test_the_data_are_what_they_are():
    (x, y), (_, held_y) = rigs.scaling.characters()
    assert x.shape == (418536, 8) and y.max() < 64 and len(held_y) == 1024
    assert torch.equal(x[:8, 0], x[0]) and torch.equal(x[1:8, -1], y[:7])  # what follows
    (x, y), held_out = rigs.scaling.digits()
    assert x.shape == (1437, 64) and len(held_out[1]) == 360
    assert x.mean(0).abs().max() < 1e-5 and x.var().item() == pytest.approx(0.518, abs=0.01)


def test_without_scikit_learn_the_remedy_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[real\]"'):
        rigs.scaling.digits()


def test_what_was_recorded_and_published():
    tables = {name: rigs.scaling.goyal(name) for name in ("Table 1", "Table 2(a)", "Fig 3")}
    assert {name: len(table) for name, table in tables.items()} == {"Table 1": 4, "Table 2(a)": 8, "Fig 3": 10}  # fmt: skip
    assert tables["Table 2(a)"]["kn=256, η=0.10"] == (23.60, 0.12)
    assert tables["Fig 3"]["8192"].value == 23.74
    best = rigs.scaling.fewest_steps("sgd", 2.55)
    assert sorted(best) == [8, 32, 128, 512, 2048]
    rates = rigs.scaling.swept("steps", "lr", optimizer="sgd", target=2.55, batch=128)
    assert best[128][1] == min(rates.values()) and rates[best[128][0]] == best[128][1]
    assert rigs.scaling.hyperbola("sgd", 2.55) == scaling.fit(
        {b: m.value for b, (_, m) in best.items()}
    )
    places, (low, middle, high) = rigs.scaling.rule_curves("adam", most=256)["square root"]
    value, error = rigs.scaling.swept("rules", optimizer="adam", rule="square root")[64]
    assert places == [16, 64, 256] and middle[1] == value
    assert (low[1], high[1]) == (value - 2 * error, value + 2 * error)
    finer = rigs.scaling.swept("finer", "lr", optimizer="adam", batch=16)
    assert min(finer, key=finer.get) / 2 < rigs.scaling.lowest(finer) < 2 * min(finer, key=finer.get)
    with pytest.raises(ValueError, match="first or the last"):
        rigs.scaling.lowest(dict(list(finer.items())[2:]))
    with pytest.raises(ValueError, match="lion"):
        rigs.scaling.swept("rules", optimizer="lion")
    of = {"optimizer": "rmsprop", "rule": "and β₂"}
    root = rigs.scaling.swept("betas", optimizer="rmsprop", rule="square root")
    more, less = rigs.scaling.swept("betas", **of), rigs.scaling.swept("betas", less="square root", **of)  # fmt: skip
    assert less[64].value == pytest.approx(more[64].value - root[64].value)
    assert less[64].error < more[64].error  # seed by seed
    again = rigs.scaling.swept("rules", optimizer="rmsprop", rule="square root")
    for batch, recorded in root.items():  # what two parts recorded is the same
        assert recorded.value == pytest.approx(again[batch].value, rel=1e-3)
    assert rigs.scaling.mean([1.0, math.inf]) == (math.inf, math.inf)
    assert rigs.scaling.mean([1.0, 3.0]) == (2.0, 1.0)


def test_a_row_of_the_sweep_is_recorded_again():
    """The noise at the first checkpoint, with two of its eight seeds."""
    (x, y), held_out = rigs.scaling.characters()
    rows = rigs.copies.train_copies(
        rigs.scaling.CHARACTERS, (x, y), lr=[2**-4], batch=32, samples=32, seeds=[0, 1]
    )
    loss, found = rigs.scaling.spreads()[1]
    assert rigs.copies.score(rigs.scaling.CHARACTERS, rows, held_out)[
        0
    ].mean().item() == pytest.approx(loss, rel=0.01)
    for seed in (0, 1):
        chosen = torch.randint(len(y), (2048,), generator=torch.Generator().manual_seed(7 + seed))
        lengths = rigs.copies.squared_lengths(
            rigs.scaling.CHARACTERS, rows[seed, 0], x[chosen], y[chosen], (1, 2048)
        )
        again = scaling.estimate_spread(lengths[1], lengths[2048], 1, 2048)
        assert again == (
            pytest.approx(found[seed].trace, rel=0.01),
            pytest.approx(found[seed].signal, rel=0.02),
        )


def test_the_held_out_places_are_the_same_on_every_cpu():
    places = rigs.scaling._spread_out(418_544, 465_039)
    assert places[[0, 1, 511, 512, 1022, 1023]].tolist() == [
        418544,
        418589,
        441768,
        441814,
        464993,
        465039,
    ]
    assert int(places.sum()) == 452_394_000


@pytest.mark.parametrize(
    "attempt, said",
    [
        (lambda: scaling.cosine(-3, 5, peak=1.0), "step must be at least 0, got -3"),
        (lambda: scaling.cosine(5, 0, peak=1.0), "steps must be at least 1, got 0"),
        (lambda: scaling.warm_up(5, -10, start=0.0, end=1.0), "steps must be at least 0, got -10"),
        (lambda: scaling.wsd(0, 10, peak=1.0, decay=20), "a decay of 20 does not fit 10 steps"),
        (lambda: scaling.wsd(0, 10, peak=1.0, decay=0), "decay must be at least 1"),
        (lambda: scaling.shrinkage(1.0, 3.0, 2.5), "lr·decay = 3 turns the sign of a weight"),
        (lambda: scaling.fit({}), "0 batch sizes fix no hyperbola"),
        (lambda: scaling.fit({1: 10.0, 2: 20.0}), "is of no hyperbola"),
        (lambda: scaling.fit({1: float("nan"), 2: 20.0}), "steps of a batch of 1 must be a finite"),
        (lambda: scaling.Hyperbola(1.0, 2.0).steps(0), "batch must be a finite number above 0"),
    ],
)
def test_numbers_out_of_range_are_refused(attempt, said):
    with pytest.raises(ValueError, match=said):
        attempt()
