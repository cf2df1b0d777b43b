"""Checkpointing: gradients equal to the bit, memory really freed; plans with the numbers of the papers, simulated = executed to the byte."""

import copy
import gc
import heapq
import itertools
import math
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labutils import checkpointing, measure
from labutils.checkpointing import Costs, Reversal, Stage, Step, checkpoint
from labutils.checkpointing import plans as planning
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import World

# ── checkpoint ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted(nn.Module):
    """A layer with dropout that counts how often it is computed."""

    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.3),
            nn.Linear(2 * width, width),
            nn.Dropout(0.3),
        )
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.layers(x)


def gradients(fn, *inputs, seed=0):
    """Everything that a backward pass of fn(*inputs) leaves, and one draw from the generator after it."""
    torch.manual_seed(seed)
    inputs = [x.detach().requires_grad_(x.requires_grad) for x in inputs]
    outputs = fn(*inputs)
    leaves = (
        [outputs]
        if isinstance(outputs, torch.Tensor)
        else list(outputs.values())
        if isinstance(outputs, dict)
        else list(outputs)
    )
    sum((k + 1) * (y * y).sum() for k, y in enumerate(leaves)).backward()
    return (
        [y.detach() for y in leaves] + [x.grad for x in inputs if x.requires_grad] + [torch.rand(1)]
    )


def same(left, right):
    return len(left) == len(right) and all(
        a is b or torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


def x_of(*shape, requires_grad=True, seed=3):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(
        requires_grad
    )


LAYER = Counted()
FUNCTIONS = {
    "dropout": lambda x: LAYER(x),
    "several outputs": lambda x: (x.sin(), LAYER(x), x * 2),
    "a dictionary": lambda x: {"a": x.exp(), "b": LAYER(x).tanh()},
    "saves its output": lambda x: x.exp().tanh().softmax(-1),
    "nested": lambda x: checkpoint(lambda y: checkpoint(LAYER, y.cos()), x.exp()).sin(),
    "no_grad inside": lambda x: x * LAYER(x).detach().exp() + LAYER(x),
    "in place": lambda x: torch.relu_(LAYER(x) * 2),
    "twice the same input": lambda x: torch.stack([LAYER(x), LAYER(x) @ LAYER(x).mT @ x]),
    "autocast inside": lambda x: torch.autocast("cpu", dtype=torch.bfloat16)(LAYER)(x).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_a_plain_call_to_the_bit(name):
    fn, x = FUNCTIONS[name], x_of(4, 8)
    plain, found = [], []
    for results, call in ((plain, fn), (found, lambda x: checkpoint(fn, x))):
        LAYER.zero_grad()
        results += gradients(call, x) + [p.grad for p in LAYER.parameters()]
    assert same(plain, found)


def test_the_random_state_after_a_step_is_as_without_checkpointing():
    results = []
    for call in (torch.dropout, lambda *args: checkpoint(torch.dropout, *args)):
        torch.manual_seed(1)
        results.append(
            [*gradients(lambda x, call=call: call(x, 0.5, True), x_of(32)), torch.rand(1)]
        )
    assert same(*results)


def test_the_autocast_setting_around_the_call_comes_back():
    x, results = x_of(4, 8), []
    for call in (LAYER, lambda x: checkpoint(LAYER, x)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.manual_seed(0)
            y = call(x)
        LAYER.zero_grad()
        y.float().square().sum().backward()  # outside of autocast
        results.append([y.detach(), *(p.grad.clone() for p in LAYER.parameters())])
    assert same(*results)


def test_autocast_that_begins_after_the_call_is_not_seen_by_the_second_evaluation():
    x, seen = x_of(4, 8), []

    def fn(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x.exp().sin()

    y = checkpoint(fn, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False, False]


def test_arguments_in_keywords_lists_and_constants():
    def fn(pair, *, scale, power, name):
        assert name == "n"
        return (pair[0] * scale["s"] + pair[1]) ** power

    tensors = [x_of(5, seed=k) for k in range(3)]
    fn_of = {
        "plain": lambda a, b, c: fn([a, b], scale={"s": c}, power=2, name="n"),
        "kept": lambda a, b, c: checkpoint(fn, [a, b], scale={"s": c}, power=2, name="n"),
    }
    assert same(*(gradients(call, *tensors) for call in fn_of.values()))


def test_second_derivatives_and_a_second_backward_pass():
    x = x_of(6)
    values = []
    for call in (lambda x: x.sin().exp(), lambda x: checkpoint(lambda z: z.sin().exp(), x)):
        y = call(x)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(y.sum(), x)
        values.append([first.detach(), second, again])
    assert same(*values) and torch.equal(values[1][0], values[1][2])


def test_weights_alone_may_need_gradients_and_frozen_ones_get_none():
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    layer[0].requires_grad_(False)
    checkpoint(layer, x_of(2, 3, requires_grad=False)).sum().backward()
    assert layer[0].weight.grad is None and layer[2].weight.grad is not None


def test_nothing_is_kept_where_no_gradient_is_asked_for():
    with torch.no_grad():
        assert checkpoint(LAYER, x_of(4, 8)).grad_fn is None


def test_the_second_evaluation_happens_once_and_ends_early():
    layers, reached = [Counted(), Counted()], []

    def fn(x):
        y = layers[1](layers[0](x).sum() * x)
        reached.append("end")
        return y + 1  # saves nothing, so it need not be computed again

    y = checkpoint(fn, x_of(4, 8))
    assert [layer.calls for layer in layers] == [1, 1]
    y.sum().backward()
    assert [layer.calls for layer in layers] == [2, 2]
    assert reached == ["end"]


def test_only_the_arguments_are_saved():
    model, x = nn.Sequential(*(Counted(8) for _ in range(3))), x_of(16, 8)
    assert (
        measure.saved_activations(lambda: checkpoint(model, x), model).total
        == x.untyped_storage().nbytes()
    )
    assert (
        measure.saved_activations(lambda: model(x), model).total > 10 * x.untyped_storage().nbytes()
    )


def test_nested_regions_keep_the_arguments_of_the_outer_one_alone():
    model, x = nn.Sequential(*(Counted(8) for _ in range(3))), x_of(16, 8)

    def inner(x):
        for layer in model:
            x = checkpoint(layer, x)
        return x

    assert (
        measure.saved_activations(lambda: checkpoint(inner, x), model).total
        == x.untyped_storage().nbytes()
    )


def test_inside_an_outer_region_the_arguments_of_an_inner_one_are_freed():
    watches = []

    def outer(x):
        hidden = LAYER(x)
        watches.append(weakref.ref(hidden.untyped_storage()))
        return checkpoint(LAYER, hidden)

    y = checkpoint(outer, x_of(4, 8))
    assert watches[0]() is None
    y.sum().backward()


def test_everything_is_freed_by_reference_count_alone():
    gc.collect()
    gc.disable()
    try:
        x = x_of(4, 8)
        hidden = LAYER(x)
        watch = weakref.ref(hidden.untyped_storage())
        y = checkpoint(LAYER, hidden)
        del hidden
        assert watch() is not None  # the region's input
        y.sum().backward()
        del y
        assert watch() is None
        dropped = checkpoint(LAYER, LAYER(x))  # a graph that nobody takes backward
        watch = weakref.ref(dropped.untyped_storage())
        del dropped
        assert watch() is None
    finally:
        gc.enable()


def test_a_function_that_does_something_else_the_second_time_is_an_error():
    count = itertools.count()
    fewer = checkpoint(lambda x: x.sin().exp() if next(count) == 0 else x * 1.5, x_of(3))
    with pytest.raises(RuntimeError, match=r"saved 2 tensors the first time and 0 now"):
        fewer.sum().backward()
    sizes = iter([3, 2])
    other = checkpoint(lambda x: x[: next(sizes)].sin().sum(), x_of(3))
    with pytest.raises(
        RuntimeError, match=r"float32\[3\] as tensor 0 the first time and float32\[2\] now"
    ):
        other.backward()


def test_an_input_that_was_changed_in_place_is_an_error():
    x = x_of(3) * 2
    y = checkpoint(torch.sin, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_exception_in_the_function_comes_through_and_the_random_state_is_put_back():
    count = itertools.count()

    def fails_later(x):
        y = nn.functional.dropout(x, 0.5)
        if next(count):
            raise KeyError("second time")
        return y.exp()

    y = checkpoint(fails_later, x_of(3))
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="second time"):
        y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_it_works_on_rank_threads():
    def program(rank):
        x = x_of(4, 8, seed=rank.rank)
        weight = x_of(8, 8)
        checkpoint(lambda x: (x @ weight).tanh() @ weight, x).square().sum().backward()
        return weight.grad

    def plain(seed):
        x, weight = x_of(4, 8, seed=seed), x_of(8, 8)
        ((x @ weight).tanh() @ weight).square().sum().backward()
        return weight.grad

    assert same(World(2).run(program), [plain(0), plain(1)])


# ── plans: the numbers of the papers ───────────────────────────────────────────────────────────────────────────────


def evaluations(plan):
    return sum(plan.evaluations)


@pytest.mark.parametrize(
    "n, k, evals, stored", [(16, 4, 28, 7), (64, 8, 120, 15), (100, 10, 190, 19)]
)
def test_chen_segments(
    n, k, evals, stored
):  # CK-01, CK-02: 1604.06174, algorithm 1; `stored` leaves x0 out, eq. (1) has it in
    run = checkpointing.segments(n, k).on(Costs.uniform(n))
    assert sum(run.evaluations) == evals
    assert run.peak == stored + 1 == n // k + k == 2 * math.isqrt(n)


def test_sqrt_is_the_best_number_of_segments():
    peaks = {
        k: checkpointing.segments(144, k).on(Costs.uniform(144)).peak
        for k in range(1, 145)
        if 144 % k == 0
    }
    assert min(peaks, key=peaks.get) == 12 and peaks[12] == 24


@pytest.mark.parametrize("n", [1, 2, 4, 10, 100])
def test_keeping_nothing_takes_n_squared(n):  # CK-05
    plan = checkpointing.keep_nothing(n)
    assert evaluations(plan) == n * (n + 1) // 2
    assert plan.evaluations == tuple(range(n, 0, -1))
    assert plan.on(Costs.uniform(n)).peak <= 3


@pytest.mark.parametrize("n, snapshots, evals", [(10, 3, 25), (100, 10, 322), (1000, 10, 4636)])
def test_revolve(n, snapshots, evals):  # Griewank & Walther
    plan = checkpointing.binomial(n, snapshots)
    assert evaluations(plan) == checkpointing.binomial_evaluations(n, snapshots) == evals
    kept = (
        1 + snapshots
    )  # x0 among the snapshots; the value at work and the one it makes come on top
    assert max(len(state.values) for state in plan.states) == kept + 1


@given(st.integers(1, 40), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_the_binomial_formula_solves_its_recurrence(n, snapshots):
    best = checkpointing.binomial_evaluations
    if n > 1:
        splits = [
            m + best(n - m, snapshots - 1) + best(m, snapshots)
            for m in range(1, n)
            if snapshots > 1
        ]
        assert best(n, snapshots) == min([*splits, n - 1 + 1 + best(n - 1, snapshots)])
    assert evaluations(checkpointing.binomial(n, snapshots)) == best(n, snapshots)


@pytest.mark.parametrize("n, snapshots", [(1, 1), (5, 1), (10, 3), (40, 4), (100, 10)])
def test_the_optimum_of_equal_stages_is_binomial(n, snapshots):
    interior = 2 * n  # recording a stage early is dearer than any number of snapshots
    chain = Costs.uniform(n, interior=interior)
    working = 1 if n == 1 else 2  # the value at work, and the one it makes
    plan = checkpointing.plan(chain, snapshots + working + interior)
    assert evaluations(plan) == checkpointing.binomial_evaluations(n, snapshots)


def test_logarithmic_memory_for_a_logarithmic_factor_of_time():  # CK-04
    for n in (2**k for k in range(1, 11)):
        log = round(math.log2(n))
        assert checkpointing.binomial_evaluations(n, log + 1) <= n * (log + 1)


# ── plans: what holds of all of them ───────────────────────────────────────────────────────────────────────────────

STAGES = st.tuples(
    st.integers(0, 9), st.integers(1, 9), st.integers(0, 12), st.sampled_from([None, 0])
)


def chain_of(
    stages, *ends
):  # built in the test: beartype looks at random elements, which a hypothesis strategy must not
    return Costs([Stage(*stage) for stage in stages], *ends)


@given(st.lists(STAGES, min_size=1, max_size=7), st.integers(0, 5), st.integers(0, 3))
@example(
    [(2, 8, 0, 0), (3, 3, 0, 3), (3, 5, 2, 5), (2, 9, 1, 0)], 0, 0
)  # where the fullest moment is on the way, with a gradient waiting
@settings(max_examples=30, deadline=None)
def test_a_plan_keeps_its_promise(stages, given_bytes, input_gradient):
    chain = chain_of(stages, given_bytes, input_gradient)
    trades = checkpointing.frontier(chain)
    assert list(trades) == sorted(trades) and all(
        a[1] > b[1] for a, b in itertools.pairwise(trades)
    )
    assert trades[0][0] == checkpointing.smallest_budget(chain)
    assert trades[-1][1] == sum(stage.forward for stage in chain.stages) or any(
        stage.forward == 0 for stage in chain.stages
    )
    for room, cost in trades:
        for budget in (room, room + 1):
            run = checkpointing.plan(chain, budget).on(chain)
            assert run.peak <= budget and run.cost <= cost
        assert checkpointing.plan(chain, room).on(chain).cost == cost


def cheapest_of_all(chain, budget):
    """The cost of the cheapest legal plan of any kind, found by trying them all (Dijkstra over what can be held)."""
    sizes = [chain.input, *(stage.output for stage in chain.stages)]
    slopes = [chain.input_gradient, *(stage.gradient for stage in chain.stages[:-1]), 0]
    steps = [Step(op, i) for op in planning.OPERATIONS for i in range(len(chain) + 1)]
    start = planning.Held(frozenset([0]), frozenset(), len(chain))
    best, order = {start: 0}, itertools.count()
    queue = [(0, next(order), start)]
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state.gradient == 0 and len(state.values) == 1:
            return cost
        for step in steps:
            if planning._why_illegal(state, step, len(chain)):
                continue
            after = planning._after(state, step)
            held = (
                sum(sizes[i] for i in after.values)
                + sum(chain.stages[i].interior for i in after.recorded)
                + slopes[after.gradient]
            )
            total = cost + (
                chain.stages[step.at].forward if step.op in ("forward", "record") else 0
            )
            if held <= budget and total < best.get(after, math.inf):
                best[after] = total
                heapq.heappush(queue, (total, next(order), after))
    return math.inf


@given(st.integers(1, 5), st.integers(0, 6), st.sampled_from([0, 1]))
@settings(max_examples=20, deadline=None)
def test_nothing_beats_the_plan_on_equal_stages(n, interior, gradient):
    chain = Costs.uniform(n, interior=interior, gradient=gradient)
    for budget, cost in checkpointing.frontier(chain):
        assert cheapest_of_all(chain, budget) == cost
    assert cheapest_of_all(chain, checkpointing.smallest_budget(chain) - 1) == math.inf


def test_a_plan_that_drops_a_value_early_can_beat_ours_where_stages_differ():
    """What the invariant of `plan` leaves open, and Beaumont et al. prove to be rare."""
    stages = [Stage(6, 1, 7, 0), Stage(1, 4, 2, 4), Stage(1, 3, 5, 3), Stage(4, 3, 6, 0)]
    chain = Costs(stages, input=4, input_gradient=3)
    assert checkpointing.plan(chain, 19).on(chain).cost == 33
    assert cheapest_of_all(chain, 19) == 27


@given(st.lists(STAGES, min_size=1, max_size=4), st.integers(0, 5), st.integers(0, 3))
@settings(max_examples=15, deadline=None)
def test_no_plan_fits_below_the_smallest_budget(stages, given_bytes, input_gradient):
    chain = chain_of(stages, given_bytes, input_gradient)
    assert cheapest_of_all(chain, checkpointing.smallest_budget(chain) - 1) == math.inf


def test_a_budget_that_is_too_small_is_told_the_smallest():
    chain = Costs([Stage(1, 100, 700), Stage(1, 200, 50)], input=40)
    least = checkpointing.smallest_budget(chain)
    with pytest.raises(
        ValueError, match=rf"budget of {least - 1} bytes .* smallest possible one is {least:,}"
    ):
        checkpointing.plan(chain, least - 1)
    assert checkpointing.plan(chain, least).on(chain).peak == least


@pytest.mark.parametrize(
    "steps, why",
    [
        ("forward 1", r"step 0, forward 1: its input x1 is not held"),
        ("forward 0, forward 0", r"x1 is held already"),
        (
            "forward 0, forward 1, backward 1",
            r"stage 1 has not been recorded: a b node needs its f node",
        ),
        ("record 0, backward 0", r"the gradient has reached x2: stage 1 is next"),
        ("record 0, drop 1", r"stage 0 was recorded and needs x1"),
        ("record 0, record 1, drop 1", r"stage 0 was recorded and needs x1"),
        ("drop 0", r"x0 belongs to the caller"),
        ("drop 1", r"x1 is not held"),
        ("forward 2", r"the chain has stages 0 … 1"),
        (
            "record 0, record 1, backward 1",
            r"ends with the gradient of x1 and values \[0, 1\]: it must end",
        ),
        ("", r"ends with the gradient of x2 and values \[0\]: it must end"),
    ],
)
def test_an_illegal_plan_says_which_step_and_why(steps, why):
    moves = tuple(
        Step(op, int(at)) for op, at in (step.split() for step in steps.split(", ") if step)
    )
    with pytest.raises(ValueError, match=why):
        Reversal(2, moves)


def test_a_value_left_over_is_not_a_finished_plan():
    moves = [
        ("forward", 0),
        ("record", 1),
        ("backward", 1),
        ("forward", 1),
        ("drop", 1),
        ("record", 0),
        ("backward", 0),
    ]
    with pytest.raises(ValueError, match=r"the gradient of x0 and values \[0, 2\]"):
        Reversal(2, tuple(Step(*move) for move in moves))


@pytest.mark.parametrize(
    "call, error, why",
    [
        (
            lambda: checkpointing.segments(4, 5),
            ValueError,
            "4 stages cannot be cut into 5 segments: use 1 … 4",
        ),
        (lambda: checkpointing.segments(4, 0), ValueError, "k must be at least 1"),
        (lambda: checkpointing.segments(True, 1), TypeError, "n must be a whole number"),
        (lambda: checkpointing.keep_nothing(0), ValueError, "n must be at least 1"),
        (lambda: checkpointing.binomial(4, 0), ValueError, "snapshots must be at least 1"),
        (lambda: Step("undo", 1), ValueError, "forward, record, backward, drop"),
        (lambda: checkpointing.plan(Costs.uniform(3), -1), ValueError, "budget must be at least 0"),
        (
            lambda: checkpointing.segments(3, 1).on(Costs.uniform(4)),
            ValueError,
            "for 3 stages, the chain has 4",
        ),
    ],
)
def test_bad_input_to_plans(call, error, why):
    with pytest.raises(error, match=why):
        call()


# ── execution ──────────────────────────────────────────────────────────────────────────────────────────────────────

SMALL = dict(num_layers=3, d_model=32, num_heads=4, d_ff=96, vocab_size=65, seq_len=12, dropout=0.1)
MODELS = {
    "gpt": ModelConfig(**SMALL),
    "llama": ModelConfig(
        **SMALL
        | dict(
            ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, num_kv_heads=2, tied=False
        )
    ),
    "experts": ModelConfig(**SMALL | dict(num_experts=3, top_k=2)),
}


def batch(config, rows=2):
    draw = torch.Generator().manual_seed(5)
    return [
        torch.randint(config.vocab_size, (rows, config.seq_len), generator=draw) for _ in range(2)
    ]


def trained(model, call):
    model.zero_grad()
    torch.manual_seed(11)
    loss = call()
    return [loss, *(parameter.grad.clone() for parameter in model.parameters()), torch.rand(1)]


def backward(loss):
    loss.backward()
    return loss.detach()


PLANS = {
    "everything": lambda n, chain: checkpointing.segments(n, 1),
    "sqrt": lambda n, chain: checkpointing.segments(n, 2),
    "every layer": lambda n, chain: checkpointing.segments(n, n),
    "nothing": lambda n, chain: checkpointing.keep_nothing(n),
    "binomial": lambda n, chain: checkpointing.binomial(n, 2),
    "optimal": lambda n, chain: checkpointing.plan(
        chain, checkpointing.smallest_budget(chain) * 5 // 4
    ),
    "smallest": lambda n, chain: checkpointing.plan(chain, checkpointing.smallest_budget(chain)),
}


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_predicted_is_executed_at_every_step_to_the_byte(name, attention):
    config = MODELS[name]
    tokens, targets = batch(config)
    model = GPT(config, attention=attention, generator=torch.Generator().manual_seed(0))
    plain = trained(model, lambda: backward(model.loss(tokens, targets)))
    chain = checkpointing.stages(model, targets)
    costs = checkpointing.costs(chain, tokens)
    for make in PLANS.values():
        plan = make(len(chain), costs)
        runs = []

        def execute(plan=plan, runs=runs):
            runs.append(checkpointing.run(chain, plan, tokens))
            return runs[0].output

        assert same(plain, trained(model, execute)), plan.name
        predicted, (executed,) = plan.on(costs), runs
        assert (predicted.evaluations, predicted.cost, predicted.peak) == (
            executed.evaluations,
            executed.cost,
            executed.peak,
        )
        for expected, found in zip(
            predicted.history.moments, executed.history.moments, strict=True
        ):
            assert (expected.phase, expected.event) == (found.phase, found.event)
            assert expected.ledger.diff(found.ledger).unexplained == 0, (plan.name, expected.event)


def test_measuring_costs_draws_no_random_number_and_leaves_no_gradient():
    chain = [Counted(), Counted()]
    state = torch.get_rng_state()
    found = checkpointing.costs(chain, x_of(4, 8))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for module in chain for parameter in module.parameters())
    assert (
        found.stages[0].forward == 2 * 2 * 4 * 8 * 16 and found.input == found.input_gradient == 128
    )


def test_a_chain_that_ends_in_a_tensor_takes_the_gradient_of_it():
    chain, x, slope = (
        [nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)],
        x_of(4, 3),
        x_of(4, 2, requires_grad=False, seed=9),
    )
    nn.Sequential(*chain)(x).backward(slope)
    expected = [x.grad, *(p.grad.clone() for module in chain for p in module.parameters())]
    for module in chain:
        module.zero_grad()
    run = checkpointing.run(chain, checkpointing.keep_nothing(3), x, slope)
    assert same(
        expected, [run.input_gradient, *(p.grad for module in chain for p in module.parameters())]
    )
    with pytest.raises(RuntimeError, match="created only for scalar outputs"):
        checkpointing.run(chain, checkpointing.keep_nothing(3), x)


@pytest.mark.parametrize(
    "chain, error, why",
    [
        ([nn.Linear(8, 8), nn.Flatten(0)], ValueError, "Flatten returns a view of its input"),
        ([nn.Linear(8, 8), nn.ReLU(inplace=True)], RuntimeError, "in-place operation"),
        ([nn.Linear(8, 8), nn.LSTM(8, 8)], AttributeError, "'tuple' object has no attribute"),
    ],
)
def test_a_chain_that_cannot_be_cut_says_why(chain, error, why):
    with pytest.raises(error, match=why):
        checkpointing.costs(chain, x_of(4, 8))
    with pytest.raises(error, match=why):
        checkpointing.run(chain, checkpointing.segments(2, 1), x_of(4, 8))


def test_a_plan_for_another_chain():
    with pytest.raises(ValueError, match="for 3 stages, the chain has 1"):
        checkpointing.run([nn.Linear(8, 8)], checkpointing.segments(3, 1), x_of(4, 8))


# ── policies ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("policy", checkpointing.POLICIES)
@pytest.mark.parametrize("name", MODELS)
def test_a_policy_changes_no_bit(name, policy):
    config = MODELS[name]
    tokens, targets = batch(config)
    model = GPT(config, generator=torch.Generator().manual_seed(0))
    plain = trained(model, lambda: backward(model.loss(tokens, targets)))
    names = [name for name, _ in model.named_parameters()]
    for (
        other
    ) in checkpointing.POLICIES:  # policies replace each other, and a copy of the model is its own
        checkpointing.apply(model, other)
    twin = copy.deepcopy(checkpointing.apply(model, policy))
    assert {"forward" in vars(block) for block in model.blocks} == {policy == "full"}
    assert (
        [name for name, _ in twin.named_parameters()]
        == names
        == [name for name, _ in model.named_parameters()]
    )
    for candidate in (model, twin):
        assert same(
            plain,
            trained(
                candidate, lambda candidate=candidate: backward(candidate.loss(tokens, targets))
            ),
        )


def saved(model, tokens):
    return measure.saved_activations(lambda: model(tokens), model).total


def test_what_each_policy_keeps():
    """Full: a block's input. Selective: all but the s×s matrix of the softmax, because the core's inputs q, k and v are kept in any case."""
    b, tokens = 2, torch.zeros(2, 12, dtype=torch.long)
    shallow, deep = (ModelConfig(**SMALL | dict(num_layers=L, dropout=0.0)) for L in (1, 3))
    s, h, a = deep.letters("s h a")
    a_block = {
        policy: (
            saved(checkpointing.apply(GPT(deep), policy), tokens)
            - saved(checkpointing.apply(GPT(shallow), policy), tokens)
        )
        // 2
        for policy in checkpointing.POLICIES
    }
    assert a_block["full"] == 4 * b * s * h
    assert a_block["none"] - a_block["selective"] == 4 * b * a * s * s


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", checkpointing.POLICIES)
def test_the_overhead_is_what_a_flop_counter_sees(name, policy, dropout):
    config = replace(MODELS[name], dropout=dropout, seq_len=16, num_experts=1, top_k=1)
    tokens = torch.randint(config.vocab_size, (2, 16))
    flops = []
    for chosen in ("none", policy):
        model = checkpointing.apply(GPT(config), chosen)
        with FlopCounterMode(display=False) as counter:
            model.loss(tokens, tokens).backward()
        flops.append(counter.get_total_flops())
    assert flops[0] == tokens.numel() * config.flops_per_token()
    assert flops[1] / flops[0] - 1 == pytest.approx(
        checkpointing.overhead(config, policy), abs=1e-12
    )


def test_overheads_of_the_papers():
    """CK-06 and ACT-40, S1-025: one more forward pass of the layers is a third; the paper's eq. (8) adds three forward passes of the scores, not one."""
    layers = ModelConfig(
        num_layers=96, d_model=12288, num_heads=96, d_ff=49152, vocab_size=1, seq_len=2048
    )
    assert checkpointing.overhead(layers, "full", early_stop=False) == pytest.approx(
        1 / 3, abs=1e-7
    )
    for h, L, published in ((6144, 48, 5.192), (12288, 96, 2.693), (25600, 128, 1.314)):
        config = ModelConfig(
            num_layers=L, d_model=h, num_heads=64, d_ff=4 * h, vocab_size=51200, seq_len=2048
        )
        assert 3 * 100 * checkpointing.overhead(
            config, "selective", early_stop=False
        ) == pytest.approx(published, abs=2e-3)
    with pytest.raises(ValueError, match="policy .half.: use"):
        checkpointing.overhead(layers, "half")


def test_a_policy_needs_a_gpt_and_a_known_name():
    with pytest.raises(ValueError, match="unknown policy 'some': use 'none', 'selective', 'full'"):
        checkpointing.apply(GPT(MODELS["gpt"]), "some")


def test_a_plan_on_a_clock_ticks_with_each_computation_and_values_live_from_one_to_another():
    """Worked out by hand: forward 0 · record 1 · backward 1 · drop 1 · record 0 · backward 0."""
    spans = checkpointing.segments(2, 2).timeline.spans
    found = sorted((span.start, span.end, span.kind, span.rank) for span in spans)
    computed = [(0, 1, "forward", 0), (1, 2, "record", 1), (2, 3, "backward", 1)]
    computed += [(3, 4, "record", 0), (4, 5, "backward", 0)]
    held = [(2, 3, "interior", 1), (4, 5, "interior", 0), (0, 5, "value", 0)]
    held += [(1, 3, "value", 1), (2, 3, "value", 2), (4, 5, "value", 1)]
    assert found == sorted(computed + held)
