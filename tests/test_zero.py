"""Levels 1, 2 and 3: the same numbers as one process, every byte sent and held as predicted, snapshots that fit any number of ranks."""

import dataclasses
import functools
import weakref

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labutils import checkpointing, collectives, measure, memory, units, world, zero
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.model import GPT

TIED = ModelConfig(num_layers=3, d_model=16, num_heads=2, d_ff=24, vocab_size=13, seq_len=8)
UNTIED = ModelConfig(num_layers=2, d_model=12, num_heads=2, d_ff=20, vocab_size=29, seq_len=6, ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
LEVELS = (1, 2, 3)
ROWS = 12  # sequences in a micro-batch of all ranks
BUCKET = 9000  # bytes: several buckets, some parameters larger than one


@functools.cache
def ranks(n: int) -> world.World:
    return world.World(n)


@pytest.fixture(scope="module")
def processes():
    with world.World(4, engine="processes") as four:
        yield four


OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}


def build(config, seed, dtype=torch.float64, frozen=()):
    model = GPT(config, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def batches(config, steps, accumulation):
    """For each step the micro-batches of all ranks together; they are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    return [[torch.randint(0, config.vocab_size, (ROWS, config.seq_len), generator=generator) for _ in range(accumulation)] for _ in range(steps)]


def own(model, comm, level, make, **options):
    """The model made ready for a level, and its optimizer."""
    if level == 3:
        return zero.shard(model, comm, make, **options)
    return zero.Optimizer(model.named_parameters(), comm, make, level=level, **{"bucket_bytes": BUCKET} | options)


def weights(model, owner):
    """All parameters, whole, by name."""
    if owner.level < 3:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with owner.gathered():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(rank, config, level, *, steps=3, accumulation=1, optimizer="adamw", clip=None, dtype=torch.float64, frozen=(), checkpointed=None, look=False, **options):
    """Losses, gradients of the first step, weights at the end, what the last step held at its fullest."""
    model = build(config, rank.index, dtype, frozen)  # every rank begins elsewhere
    if checkpointed == "inside":
        for block in model.blocks:
            block.forward = functools.partial(checkpointing.checkpoint, block.forward)
    if checkpointed in ("outside", "to the end"):
        again = checkpointing.checkpoint if checkpointed == "outside" else functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False, early_stop=False)
        layers = [functools.partial(again, block) for block in model.blocks]
        model.forward = lambda tokens: model.head(model.norm(functools.reduce(lambda x, layer: layer(x), layers, model.embed(tokens))))
    comm = rank.comm("dp")
    owner = own(model, comm, level, OPTIMIZERS[optimizer], **options)
    losses, gradients, peak = [], None, None

    def step(micro_batches):
        nonlocal gradients
        for x in micro_batches:
            mine = x.view(rank.size, ROWS // rank.size, -1)[rank.index]
            loss = model.loss(mine, mine) / accumulation
            loss.backward()
            losses.append(loss.item() * accumulation)
        if look and gradients is None:
            gradients = owner.gradients()
        if clip:
            losses.append(owner.clip_grad_norm(clip).item())
        owner.step()
        owner.zero_grad()

    *before, last = batches(config, steps, accumulation)
    for micro_batches in before:
        step(micro_batches)
    peak = zero.history(lambda: step(last), owner).peak.ledger if look else step(last)
    return losses, gradients, weights(model, owner) if look else None, peak, owner.layout


def train_alone(config, *, steps=3, accumulation=1, optimizer="adamw", clip=None, dtype=torch.float64, frozen=()):
    """The same on one process with the whole batch: losses, gradients of the first step, weights at the end."""
    model = build(config, 0, dtype, frozen)
    inner = OPTIMIZERS[optimizer]([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses, gradients = [], None
    for micro_batches in batches(config, steps, accumulation):
        for x in micro_batches:
            loss = model.loss(x, x) / accumulation
            loss.backward()
            losses.append(loss.item() * accumulation)
        gradients = gradients or {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
        if clip:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        inner.step()
        inner.zero_grad()
    return losses, gradients, {name: parameter.detach() for name, parameter in model.named_parameters()}


def same(ours, theirs, tolerance=1e-10):
    return ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance) for name in theirs)


def assert_equal(results, config, clip=None, tolerance=1e-10, **settings):
    losses, gradients, final = train_alone(config, clip=clip, **settings)
    for _, found, ended, _, _ in results:
        assert same(found, gradients, tolerance) and same(ended, final, tolerance)
    mean = torch.tensor([result[0] for result in results], dtype=torch.float64).mean(0)
    assert torch.allclose(mean, torch.tensor(losses, dtype=torch.float64), rtol=tolerance)


# ── who owns what ──────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 200), st.integers(1, 20))
def test_a_partition_covers_everything_once_in_equal_shares(numel, n):
    dealt = zero.partition(numel, n)
    owned = [i for rank in range(n) for i in range(*dealt.bounds(rank))]
    assert owned == list(range(numel)) and 0 <= dealt.padding < n and dealt.padded == n * dealt.share == numel + dealt.padding


@given(st.lists(st.integers(1, 50), min_size=1), st.sampled_from([2, 4, 8]), st.integers(1, 200))
def test_buckets_hold_everything_from_the_end_and_little_more_than_they_may(numels, itemsize, limit):
    found = zero.buckets(numels, itemsize, limit)
    assert [i for bucket in found for i in bucket] == list(reversed(range(len(numels))))
    filled = [sum(numels[i] for i in bucket) * itemsize for bucket in found]
    assert all(nbytes <= limit or len(bucket) == 1 for nbytes, bucket in zip(filled, found, strict=True))
    assert all(nbytes + numels[after[0]] * itemsize > limit for nbytes, after in zip(filled, found[1:], strict=False))


def test_fewer_elements_than_ranks():
    def program(rank):
        weight = nn.Parameter(torch.full((2,), float(rank.index)))
        optimizer = zero.Optimizer([weight], rank.comm("dp"), OPTIMIZERS["sgd"], level=2)
        (weight * torch.tensor([1.0, 2.0]) * rank.index).sum().backward()
        optimizer.step()
        return weight.tolist(), optimizer.owned[0].tolist()

    results = ranks(4).run(program)
    assert [whole for whole, _ in results] == [pytest.approx([-0.15, -0.3])] * 4
    assert [owned for _, owned in results] == [pytest.approx(owned) for owned in ([-0.15], [-0.3], [0.0], [0.0])]


def test_parameters_that_take_no_part_have_a_gradient_of_zero():
    def program(rank, level):
        model = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1), "sometimes": nn.Linear(3, 1)})
        model.forward = lambda x: model["used"](x) + (model["sometimes"](x) if rank.index == 0 else 0)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["sgd"], **({} if level == 3 else {"bucket_bytes": 16}))
        before = weights(model, owner)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
        gradients = owner.gradients()
        owner.step()
        after = weights(model, owner)
        return {name: (gradients[name].flatten()[0].item(), torch.equal(before[name], after[name])) for name in after}

    for level in LEVELS:
        for found in ranks(2).run(program, level):
            assert found == {
                "used.weight": (4.0, False), "used.bias": (4.0, False), "unused.weight": (0.0, True), "unused.bias": (0.0, True),
                "sometimes.weight": (2.0, False), "sometimes.bias": (2.0, False),
            }  # fmt: skip


def test_units_are_the_members_of_the_lists_of_a_module():
    def program(rank):
        comm = rank.comm("dp")
        stack = zero.shard(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), comm)
        single = zero.shard(nn.Linear(2, 3), comm)
        model = GPT(UNTIED)
        chosen = zero.shard(model, comm, units=[model.tokens, *model.blocks, model.head])
        return [[sum(unit.trained + unit.after) for unit in owner.layout] for owner in (stack, single, chosen)]

    parts = UNTIED.parameters
    layer = (parts["attention"] + parts["feed-forward"]) // 2 + 2 * 12
    assert ranks(2).run(program) == [[[0, 9, 16], [9], [12, parts["token embedding"], layer, layer, parts["head"]]]] * 2


# ── the same numbers, and the books ────────────────────────────────────────────────────────────────────────────────

CASES = [
    dict(),
    dict(accumulation=2, clip=0.5),
    dict(optimizer="momentum", frozen=("tokens", "feed_forward.up.bias", "query")),
    dict(optimizer="sgd", clip=0.1, frozen=("blocks.1", "norm.weight")),
]


@pytest.mark.parametrize("n, settings", [*((n, CASES[0]) for n in (1, 2, 3, 4)), (3, CASES[1]), (4, CASES[2]), (2, CASES[3])], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_to_one_process_and_held_as_predicted(n, level, settings):
    for config in (TIED, UNTIED)[: 1 if settings else 2]:
        results = ranks(n).run(train, config, level, look=True, **settings)
        assert_equal(results, config, **settings)
        whole = build(config, 0, frozen=settings.get("frozen", ()))
        resting = 0 if level == 3 else sum(parameter.numel() for parameter in whole.parameters() if not parameter.requires_grad)
        predicted = zero.predict_held(results[0][4], n, level, itemsize=8, optimizer=settings.get("optimizer", "adamw"), frozen=resting)
        for *_, peak, layout in results:
            assert layout == results[0][4]
            assert predicted.diff(peak).unexplained == 0, predicted.diff(peak)


@pytest.mark.parametrize("options", [dict(reshard=False), dict(prefetch=False), dict(reshard=False, prefetch=False), dict(units=[])], ids=str)
def test_every_way_to_gather(options):
    for n, config in ((2, UNTIED), (3, TIED)):
        results = ranks(n).run(train, config, 3, look=True, **options)
        assert_equal(results, config)
        known = {name: value for name, value in options.items() if name != "units"}
        predicted = zero.predict_held(results[0][4], n, 3, itemsize=8, **known)
        assert predicted.diff(results[0][3]).unexplained == 0, predicted.diff(results[0][3])


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
        owner = zero.shard(model, rank.comm("dp"), OPTIMIZERS["sgd"])
        for _ in range(2):
            model(x).sum().backward()
            owner.step()
            owner.zero_grad()
        resting = zero.held(owner).by("name")
        return weights(model, owner), resting.get("gathered weights", 0) + resting.get("gradient buckets", 0)

    alone = made()
    inner = OPTIMIZERS["sgd"](alone.parameters())
    for _ in range(2):
        alone(x).sum().backward()
        inner.step()
        inner.zero_grad()
    for final, left in ranks(3).run(program):
        assert same(final, {name: parameter.detach() for name, parameter in alone.named_parameters()}) and left == 0


class Made(TorchDispatchMode):
    """Every storage that operations make, as long as it lives."""

    def __init__(self):
        super().__init__()
        self.storages = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new, given = ({leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)} for tree in (out, (args, kwargs)))
        self.storages |= new - given
        return out


@pytest.mark.parametrize("level", LEVELS)
def test_a_step_leaves_nothing_behind(level):
    """What `held` counts is all there is: of what a step makes, nothing outlives it."""

    def program(rank):
        model = build(TIED, 0)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        advance(model, owner, rank, TIED, batches(TIED, 1, 1))
        before = zero.held(owner)
        with Made() as made:
            advance(model, owner, rank, TIED, batches(TIED, 1, 1))
        return before.diff(zero.held(owner)).unexplained, sum(storage.nbytes() for storage in made.storages)

    assert ranks(2).run(program) == [(0, 0)] * 2


def test_evaluation_leaves_nothing_behind():
    x = batches(TIED, 1, 1)[0][0]
    expected = build(TIED, 0)(x)

    def program(rank, reshard):
        model = build(TIED, rank.index)
        owner = zero.shard(model, rank.comm("dp"), reshard=reshard)
        shards = zero.held(owner)
        with torch.no_grad():
            outputs = [model(x)]
        left = [zero.held(owner)]
        with owner.gathered():
            outputs += [model(x).detach(), model.norm(model.embed(x)).detach()]
        left.append(zero.held(owner))
        with pytest.raises(RuntimeError):
            model.embed(x)  # outside of a pass there is no weight to look anything up in
        return [torch.equal(out, expected) for out in outputs[:2]] + [shards.diff(each).unexplained for each in left]

    for reshard in (True, False):
        assert ranks(2).run(program, reshard) == [[True, True, 0, 0]] * 2


def test_a_step_reaches_weights_that_a_forward_has_left_behind():
    x = batches(TIED, 1, 1)[0][0]

    def program(rank):
        model = build(TIED, 0)
        owner = zero.shard(model, rank.comm("dp"), OPTIMIZERS["sgd"], reshard=False)
        model.loss(x, x).backward()
        first = model(x)  # without a backward, which would free the weights
        owner.step()
        second = model(x)
        with owner.gathered():
            return torch.equal(first, second), torch.equal(second, model(x))

    assert ranks(2).run(program) == [(False, True)] * 2


@pytest.mark.parametrize("level", LEVELS)
def test_a_schedule_of_the_learning_rate_goes_with_the_inner_optimizer(level):
    def run(model, inner, step, mine=slice(None)):
        schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
        for (x,) in batches(TIED, 3, 1):
            model.loss(x[mine], x[mine]).backward()
            step()
            schedule.step()
            inner.zero_grad()

    def program(rank):
        model = build(TIED, 0)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["momentum"])

        def step():
            owner.step()
            owner.zero_grad()

        run(model, owner.inner, step, slice(6 * rank.index, 6 * rank.index + 6))
        return weights(model, owner)

    alone = build(TIED, 0)
    inner = OPTIMIZERS["momentum"](alone.parameters())
    run(alone, inner, lambda: inner.step())
    assert all(same(final, dict(alone.named_parameters())) for final in ranks(2).run(program))


@pytest.mark.parametrize("checkpointed", ["inside", "outside", "to the end"])
def test_a_checkpointed_unit_is_gathered_once_more_and_no_oftener(checkpointed):
    for options in (dict(), dict(reshard=False)):
        results = ranks(2).run(train, TIED, 3, look=True, checkpointed=checkpointed, **options)
        assert_equal(results, TIED)
        _, _, _, _, layout = ranks(2).run(train, TIED, 3, checkpointed=checkpointed, **options)[0]
        assert zero.predict_sent(layout, 2, 3, itemsize=8, steps=3, start=True, **options).diff(ranks(2).ledger).unexplained == 0
        assert zero.predict_held(layout, 2, 3, itemsize=8, **options).diff(results[0][3]).unexplained == 0


@pytest.mark.parametrize("level", LEVELS)
def test_offloaded_state_is_stepped_beside_the_weights(level):
    results = ranks(2).run(train, TIED, level, look=True, offload="cpu")
    assert_equal(results, TIED)
    predicted = zero.predict_held(results[0][4], 2, level, itemsize=8, offload=True)
    assert predicted.diff(results[0][3]).unexplained == 0, predicted.diff(results[0][3])


SENT = [
    *((n, level, {}) for n in (1, 2, 3, 4) for level in LEVELS),
    *((3, level, dict(accumulation=2, clip=1.0, frozen=("tokens", "bias"))) for level in LEVELS),
    *((4, level, dict(dtype=torch.bfloat16, gradient_dtype=torch.float32)) for level in LEVELS),
    (4, 2, dict(bucket_bytes=1)),
    (4, 2, dict(bucket_bytes=units.GB, accumulation=3)),
    (4, 3, dict(reshard=False, accumulation=2)),
    (3, 3, dict(units=[], prefetch=False)),
]


@pytest.mark.parametrize("n, level, settings", SENT, ids=str)
def test_bytes_sent_are_those_of_the_formula(n, level, settings):
    layout = ranks(n).run(train, TIED, level, steps=2, **settings)[0][4]
    model = build(TIED, 0, frozen=settings.get("frozen", ()))
    resting = 0 if level == 3 else sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    dtype = settings.get("dtype", torch.float64)
    predicted = zero.predict_sent(
        layout, n, level, itemsize=dtype.itemsize, gradient_itemsize=settings.get("gradient_dtype", dtype).itemsize, steps=2, start=True, frozen=resting,
        accumulation=settings.get("accumulation", 1), clip="clip" in settings, reshard=settings.get("reshard", True),
    )  # fmt: skip
    assert predicted.diff(ranks(n).ledger).unexplained == 0, predicted.diff(ranks(n).ledger)
    counts = [{line.key: line.count for line in ledger if line.name != "broadcast"} for ledger in (predicted, ranks(n).ledger)]
    assert counts[0] == counts[1]  # as many messages, too; frozen tensors start out one by one


def test_what_a_step_sends_is_two_and_three_times_the_weights():
    for n in (2, 4):
        assert TIED.num_params % n == 0
        for level, factor in ((0, 2), (1, 2), (2, 2), (3, 3)):
            sent = zero.predict_sent(TIED.num_params, n, level).by("rank")
            assert set(sent.values()) == {factor * TIED.num_params * (n - 1) // n * 4}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_formulas_agree_with_those_of_the_other_labs(level, precision):
    m, itemsize = 4, 4 if precision == "fp32" else 2
    train_config = TrainConfig(micro_batch=2, global_batch=2 * 2 * m, precision=precision, zero=level)
    theirs = collectives.predict(TIED, train_config, Mesh(dp=2))
    ours = zero.predict_sent(TIED.num_params, 2, level, itemsize=itemsize, accumulation=m)
    assert ours.diff(theirs).unexplained == 0
    if level == 0:
        held = zero.predict_held([parameter.numel() for parameter in build(TIED, 0).parameters()], 2, 0, itemsize=itemsize, master=precision == "bf16")
        assert held.diff(memory.model_states(TIED, train_config)).unexplained == 0


@pytest.mark.parametrize("level", LEVELS)
def test_held_and_what_the_other_labs_measure_agree(level):
    def program(rank):
        model = build(TIED, 0)
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        advance(model, owner, rank, TIED, batches(TIED, 1, 1))
        whole = measure.history(lambda: advance(model, owner, rank, TIED, batches(TIED, 1, 1)), model, owner.inner)
        ours, theirs = zero.held(owner).by("component"), measure.model_states(model, owner.inner).by("component")
        peak = zero.history(lambda: advance(model, owner, rank, TIED, batches(TIED, 1, 1)), owner).peak.ledger.total
        return [ours[part] - theirs[part] for part in ("weights", "optimizer")], peak < whole.peak.ledger.total

    assert ranks(3).run(program) == [([0, 0], True)] * 3


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("level", LEVELS)
def test_processes_give_the_same_bits_and_books(processes, level):
    settings = dict(accumulation=2, clip=0.5, frozen=("positions",))
    theirs = ranks(4).run(train, TIED, level, **settings)
    ours = processes.run(train, TIED, level, **settings)
    assert ours == theirs and processes.ledger.diff(ranks(4).ledger).unexplained == 0
    results = processes.run(train, TIED, level, look=True, **settings)
    assert_equal(results, TIED, **settings)
    resting = 0 if level == 3 else TIED.seq_len * TIED.d_model
    predicted = zero.predict_held(results[0][4], 4, level, itemsize=8, frozen=resting)
    assert all(predicted.diff(peak).unexplained == 0 for *_, peak, _ in results)


def test_snapshots_of_processes(processes, tmp_path):
    written = processes.run(write, TIED, 3, tmp_path / "run")
    for loaded, final, _ in ranks(2).run(read, TIED, 2, tmp_path / "run"):
        assert all(torch.equal(loaded[name], written[0][name]) for name in loaded) and same(final, uninterrupted(TIED))


# ── other formats than float64 ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("level", LEVELS)
def test_gradients_and_master_weights_are_rounded_no_more_than_they_must(level, dtype):
    """A mean of n gradients is n roundings away from the exact one; the step is that of torch on an fp32 copy of the weights."""
    n, (x,) = 3, batches(TIED, 1, 1)[0]

    def program(rank):
        mine = x.view(rank.size, ROWS // rank.size, -1)[rank.index]
        alone, model = build(TIED, 0, dtype), build(TIED, rank.index, dtype)
        alone.loss(mine, mine).backward()
        owner = own(model, rank.comm("dp"), level, OPTIMIZERS["adamw"])
        model.loss(mine, mine).backward()
        gradients = owner.gradients()
        owner.step()
        return {name: parameter.grad for name, parameter in alone.named_parameters()}, gradients, weights(model, owner)

    results = ranks(n).run(program)
    whole = build(TIED, 0, dtype)
    master = {name: nn.Parameter(parameter.detach().float()) for name, parameter in whole.named_parameters()}
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
            assert torch.allclose(final[name].float(), parameter.to(dtype).float(), rtol=0 if dtype != torch.float32 else 1e-6, atol=1e-8)


def test_half_weights_move_through_their_master_copy():
    """Steps that each round away in bfloat16 add up in the fp32 shard, and only there."""

    def program(rank, master):
        weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        optimizer = zero.Optimizer([weight], rank.comm("dp"), lambda params: torch.optim.SGD(params, lr=1e-3), level=2, master=master)
        for _ in range(20):
            weight.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach().float().mean().item()

    assert ranks(2).run(program, None) == pytest.approx([0.98] * 2, abs=2**-9) and ranks(2).run(program, False) == [1.0, 1.0]


# ── snapshots ──────────────────────────────────────────────────────────────────────────────────────────────────────


def advance(model, owner, rank, config, steps):
    for (x,) in steps:
        mine = x.view(rank.size, ROWS // rank.size, -1)[rank.index]
        model.loss(mine, mine).backward()
        owner.step()
        owner.zero_grad()


def write(rank, config, level, path, *, frozen=(), dtype=torch.float64, make=OPTIMIZERS["adamw"], steps=2, **options):
    model = build(config, rank.index, dtype, frozen)
    owner = own(model, rank.comm("dp"), level, make, **options)
    advance(model, owner, rank, config, batches(config, 4, 1)[:steps])
    for group in owner.inner.param_groups:
        group["lr"] = 3e-3  # as a schedule would have left it
    owner.save(path)
    assert path.exists()  # for every rank, not for rank 0 alone
    return weights(model, owner)


def read(rank, config, level, path, *, frozen=(), dtype=torch.float64, make=OPTIMIZERS["adamw"], steps=2, **options):
    model = build(config, 10 + rank.index, dtype, frozen)
    owner = own(model, rank.comm("dp"), level, make, **options)
    owner.load(path)
    loaded = weights(model, owner)
    advance(model, owner, rank, config, batches(config, 4, 1)[4 - steps :])
    return loaded, weights(model, owner), owner.inner.param_groups[0]["lr"]


@functools.cache
def uninterrupted(config, frozen=()):
    model = build(config, 0, frozen=frozen)
    inner = OPTIMIZERS["adamw"]([parameter for parameter in model.parameters() if parameter.requires_grad])
    for i, (x,) in enumerate(batches(config, 4, 1)):
        inner.param_groups[0]["lr"] = 1e-2 if i < 2 else 3e-3
        model.loss(x, x).backward()
        inner.step()
        inner.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "before, after",
    [((4, 1), (2, 1)), ((4, 2), (1, 3)), ((4, 3), (2, 3)), ((4, 3), (1, 1)), ((1, 1), (4, 3)), ((3, 2), (4, 2)), ((2, 3), (3, 2))],
    ids=lambda place: "{} ranks, level {}".format(*place),
)
def test_a_run_goes_on_with_another_number_of_ranks(before, after, tmp_path):
    path, frozen = tmp_path / "run", ("positions", "blocks.1.feed_forward.up")
    (n, level), (m, other) = before, after
    written = ranks(n).run(write, TIED, level, path, frozen=frozen)
    for loaded, final, lr in ranks(m).run(read, TIED, other, path, frozen=frozen, **({} if other == 3 else {"bucket_bytes": 3000})):
        assert all(torch.equal(loaded[name], written[0][name]) for name in loaded)
        assert same(final, uninterrupted(TIED, frozen)) and lr == 3e-3
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_master_weights_survive(tmp_path):
    """What a snapshot keeps of half weights is their fp32 copy, so that nothing is rounded on the way."""

    def program(rank, path=None):
        weight = nn.Parameter(torch.full((5,), 1.0 / rank.size, dtype=torch.bfloat16))
        optimizer = zero.Optimizer([weight], rank.comm("dp"), lambda params: torch.optim.SGD(params, lr=1e-4, momentum=0.5), level=1)
        if rank.size == 1:
            optimizer.load(path)
            assert weight.tolist() == [0.25] * 5  # 0.2499 as bfloat16
        weight.sum().backward()
        optimizer.step()
        optimizer.save(path)
        return optimizer.owned[0].tolist()

    first, *_ = ranks(4).run(program, tmp_path / "run")
    (again,) = ranks(1).run(program, tmp_path / "run")
    assert first == pytest.approx([0.25 - 1e-4] * 2, abs=2**-24) and again == pytest.approx([0.25 - 2.5e-4] * 5, abs=2**-24)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "run"
    ranks(2).run(write, TIED, 2, path)
    return path.read_bytes()


def refusal(data, tmp_path, config=TIED, **options):
    """What is said about a file, which must leave everything as it was."""
    (tmp_path / "run").write_bytes(data)

    def program(rank):
        model = build(config, 0, options.get("dtype", torch.float64))
        owner = own(model, rank.comm("dp"), 3, options.get("make", OPTIMIZERS["adamw"]))
        before = weights(model, owner)
        with pytest.raises(zero.SnapshotError) as error:
            owner.load(tmp_path / "run")
        assert all(torch.equal(weight, before[name]) for name, weight in weights(model, owner).items()) and not owner.inner.state
        return str(error.value)

    told = set(ranks(2).run(program))
    assert len(told) == 1
    return told.pop()


@pytest.mark.parametrize("kept", [0, 10, 25, 40, 0.3, 0.99, -1])
def test_a_torn_file_is_refused(kept, snapshot, tmp_path):
    short = snapshot[: int(kept * len(snapshot)) if isinstance(kept, float) else kept]
    assert "is torn" in refusal(short, tmp_path) or (kept in (0, 10) and "not a snapshot" in refusal(short, tmp_path))


@pytest.mark.parametrize("at", [30, 5000, -2000, -60])
def test_a_damaged_file_is_refused(at, snapshot, tmp_path):
    damaged = bytearray(snapshot)
    damaged[at] ^= 1
    assert "is damaged" in refusal(bytes(damaged), tmp_path)


def test_a_file_of_something_else_is_refused(snapshot, tmp_path):
    torch.save({"model": torch.zeros(3)}, tmp_path / "other")
    assert "not a snapshot of labutils.zero" in refusal((tmp_path / "other").read_bytes(), tmp_path)
    assert "it lacks: blocks.1.feed_forward.gate.weight" in refusal(snapshot, tmp_path, UNTIED)
    wider = dataclasses.replace(TIED, d_ff=28)
    assert "blocks.2.feed_forward.up.weight has shape [24, 16] there and [28, 16] here" in refusal(snapshot, tmp_path, wider)
    assert "was written by AdamW, this optimizer is SGD" in refusal(snapshot, tmp_path, make=OPTIMIZERS["sgd"])
    assert "would lose digits" in refusal(snapshot, tmp_path, dtype=torch.float32)
    with pytest.raises(world.RankError, match="FileNotFoundError"):
        ranks(2).run(read, TIED, 1, tmp_path / "none")


def test_a_write_that_fails_leaves_the_older_file(tmp_path):
    (tmp_path / "run").write_bytes(b"older")

    def program(rank):
        optimizer = zero.Optimizer([nn.Parameter(torch.ones(8))], rank.comm("dp"), level=1)
        optimizer.inner.state[optimizer.owned[0]] = {"what": torch.ones(3)}
        optimizer.save(tmp_path / "run")

    with pytest.raises(world.RankError, match="neither a number nor like the weights"):
        ranks(2).run(program)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("run", b"older")]


# ── the paper ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_papers_tables():
    table = {  # Ψ in billions: N_d: GB with optimizer state, gradients and weights divided, which the paper cuts, not rounds
        7.5: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 16: (35.6, 21.6, 7.5), 64: (31.4, 16.6, 1.88), 256: (30.4, 15.4, 0.47), 1024: (30.1, 15.1, 0.12)},
        128: {1: (2048, 2048, 2048), 4: (896, 704, 512), 16: (608, 368, 128), 64: (536, 284, 32), 256: (518, 263, 8), 1024: (513, 257, 2)},
        1000: {1: (16000, 16000, 16000), 4: (7000, 5500, 4000), 16: (4750, 2875, 1000), 64: (4187, 2218, 250), 256: (4046, 2054, 62.5), 1024: (4011, 2013, 15.6)},
    }
    for billions, columns in table.items():
        for n, printed in columns.items():
            for level, amount in zip(LEVELS, printed, strict=True):
                exact = zero.model_states(billions * 1e9, n, level) / units.GB
                assert exact == pytest.approx(amount, abs=1 if amount > 200 else 0.06 if amount > 10 else 0.006), (billions, n, level)
    largest = [zero.largest_model(32 * units.GB, 64, level) / 1e9 for level in (0, 1, 2, 3)]
    assert largest == pytest.approx([2, 7.6, 14.4, 128], rel=0.01)
    assert zero.model_states(1, 1, 0, gradient_bytes=4) == 18 and zero.model_states(1, 10**9, 1) == pytest.approx(4)


# ── what cannot be ─────────────────────────────────────────────────────────────────────────────────────────────────


def alone(fn):
    """What `fn(comm)` does on one rank; the world wraps its error with the same words."""
    return ranks(1).run(lambda rank: fn(rank.comm("dp")))


def optimize(*params, **options):
    return alone(lambda comm: zero.Optimizer(params, comm, **{"level": 1} | options))


def param(**options):
    return nn.Parameter(torch.ones(3, **options))


def stepped(*calls):
    def program(comm):
        weight = param()
        optimizer = zero.Optimizer([weight], comm, OPTIMIZERS["sgd"], level=1)
        for call in calls:
            weight.sum().backward() if call == "backward" else getattr(optimizer, call)()

    return alone(program)


def tied_across_units(comm):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    zero.shard(model, comm)


@pytest.mark.parametrize(
    "attempt, said",
    [
        (lambda: zero.partition(0, 4), "numel must be at least 1, got 0"),
        (lambda: zero.partition(4, 0), "n must be at least 1, got 0"),
        (lambda: zero.partition(4, 2.0), "n must be a whole number"),
        (lambda: zero.partition(4, 2).bounds(2), "rank 2 has no share: there are 2"),
        (lambda: zero.buckets([3], 4, 0), "bucket_bytes must be at least 1"),
        (lambda: zero.predict_sent((), 2, 1), "at least one unit"),
        (lambda: zero.predict_sent(10, 2, 4), "level=4 is no level of ZeRO"),
        (lambda: zero.predict_sent(10, 2, 1, accumulation=0), "accumulation must be at least 1"),
        (lambda: zero.predict_held(10, 2, 1, optimizer="lion"), "use one of sgd, momentum, adam, adamw"),
        (lambda: zero.predict_held((0,), 2, 1), "elements of a parameter must be at least 1"),
        (lambda: zero.model_states(1e9, 0, 1), "n must be at least 1"),
        (lambda: optimize(param(), level=0), "use data_parallel.replicate"),
        (lambda: optimize(param(), level=3), "use zero.shard"),
        (lambda: optimize(param(), level=4), "level=4 is not one of"),
        (lambda: optimize(), "of 0 parameters none requires a gradient"),
        (lambda: optimize(nn.Parameter(torch.ones(2), requires_grad=False)), "of 1 parameters none requires a gradient"),
        (lambda: optimize(param(), param(dtype=torch.float64)), "these parameters have float32 on cpu, float64 on cpu"),
        (lambda: optimize(param(dtype=torch.complex64)), "must be a leaf of floating-point numbers"),
        (lambda: optimize(param() * 2), "must be a leaf"),
        (lambda: optimize(param(device="meta")), "in memory"),
        (lambda: optimize({"params": [param()]}), "one optimizer a group"),
        (lambda: optimize(param(), optimizer=lambda params: params), "must make a torch optimizer"),
        (lambda: optimize(param(), offload="cpu", master=False), "leave master=None"),
        (lambda: alone(lambda comm: zero.shard([param()], comm)), "shard takes a module, got list"),
        (lambda: alone(lambda comm: zero.shard(nn.Linear(2, 2), comm, units=[nn.Linear(2, 2)])), "is no part of the module"),
        (lambda: alone(lambda comm: zero.shard(m := nn.Sequential(nn.Sequential(nn.Linear(2, 2))), comm, units=[m[0], m[0][0]])), "is in two units, 0 and 0.0"),
        (lambda: alone(lambda comm: zero.shard(m := nn.Linear(2, 2), comm, units=[m])), "below the root"),
        (lambda: alone(tied_across_units), "0.weight is tied between two units, 0 and 1"),
        (lambda: stepped("step"), "there are no gradients since zero_grad()"),
        (lambda: stepped("backward", "step", "backward"), "call zero_grad() between step() and backward()"),
        (lambda: alone(lambda comm: zero.Optimizer([param()], comm, level=1).clip_grad_norm(0)), "max_norm must be a finite number above 0"),
    ],
)
def test_bad_input_is_named_with_its_remedy(attempt, said):
    with pytest.raises((ValueError, TypeError, RuntimeError)) as error:
        attempt()
    assert said in str(error.value)
