"""Random numbers of ranks: masks and gradients are the same whatever other threads draw, with checkpointing and without, under every transform."""

import ast
import functools
import pathlib
import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torchs_checkpoint

from labutils import (
    checkpointing,
    data_parallel,
    expert_parallel,
    lora,
    pipeline,
    randomness,
    schedule,
    tensor_parallel,
    zero,
)
from labutils.checkpointing import checkpoint
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT, Dropout
from labutils.world import RankError, World

SIZES = dict(num_layers=1, d_model=8, num_heads=2, d_ff=16, vocab_size=12, seq_len=4)
GPT2 = ModelConfig(**SIZES, dropout=0.4)
MIXTURE = ModelConfig(**SIZES, dropout=0.4, num_experts=2, top_k=1, tied=False)
POLICIES = ("none", "selective", "full")
X = torch.linspace(1, 2, 64, dtype=torch.float64)


class Meanwhile(TorchDispatchMode):
    """Before each operation of this thread torch's generator, which all threads share, is drawn from, as by building a module, and seeded anew: by another thread, or, which is quicker and the same, here."""

    def __init__(self, thread):
        super().__init__()
        self.asked, self.done, self.over = threading.Semaphore(0), threading.Semaphore(0), False
        self.thread = threading.Thread(target=self.other, daemon=True) if thread else None
        self.count = 0

    def draw(self):
        self.count += 1
        nn.Linear(2, 2)
        torch.default_generator.manual_seed(self.count % 5)

    def other(self):
        while self.asked.acquire() and not self.over:
            self.draw()
            self.done.release()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.thread is None:
            self.draw()
        else:
            self.asked.release()
            self.done.acquire()
        return func(*args, **(kwargs or {}))


@contextmanager
def meanwhile(thread=True):
    mode = Meanwhile(thread)
    if thread:
        mode.thread.start()
    try:
        with mode:
            yield
        assert mode.count > 10
    finally:
        mode.over = True
        if thread:
            mode.asked.release()
            mode.thread.join()


# ── every transform, with and without checkpointing ──────────────────────────────────────────────────────────────


def whole(config=GPT2, attention="plain"):
    draw = torch.Generator().manual_seed(0)
    return GPT(config, attention=attention, generator=draw).double()


def rows(rank):
    draw = torch.Generator().manual_seed(rank.coords["dp"])
    return torch.randint(12, (2, 2, 4), generator=draw)


def replicated(rank, policy):
    replica = data_parallel.replicate(checkpointing.apply(whole(), policy), rank.comm("dp"))
    tokens, targets = rows(rank)
    return replica, lambda: F.cross_entropy(replica(tokens).flatten(0, 1), targets.flatten())


def averaged(rank, policy):
    model = checkpointing.apply(whole(attention="sdpa"), policy)
    return model, lambda: model.loss(*rows(rank))


def sharded(rank, policy):
    model = zero.shard(checkpointing.apply(whole(), policy), rank.comm("dp"))
    tokens, targets = rows(rank)
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def split(rank, policy, sequence=False, first=False, attention="plain"):
    model = whole(attention=attention)
    if first:
        checkpointing.apply(model, policy)
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    if not first:
        checkpointing.apply(model, policy)
    return model, lambda: model.loss(*rows(rank))


def spread(rank, policy):
    model = expert_parallel.spread_experts(whole(MIXTURE), rank.comm("ep"))
    checkpointing.apply(model, policy)
    return model, lambda: model.loss(*rows(rank))


def with_adapters(rank, policy):
    model = lora.adapt(whole(), rank=2, alpha=4, dropout=0.3)
    checkpointing.apply(model, policy)
    return model, lambda: model.loss(*rows(rank))


def stepped(rank, build, policy, finish=None):
    """The weights after a step, and the losses before and after it."""
    model, loss = build(rank, policy)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    return _train(model, optimizer, loss, lambda: finish and finish(model, rank))


def sharded_step(rank, policy, level):
    model = checkpointing.apply(whole(), policy)
    make = functools.partial(torch.optim.SGD, lr=0.5)
    optimizer = zero.Optimizer(model.parameters(), rank.comm("dp"), make, level=level)
    return _train(model, optimizer, lambda: model.loss(*rows(rank)), lambda: None)


def piped(rank, policy):
    model = checkpointing.apply(whole(replace(GPT2, num_layers=2)), policy)
    plan = schedule.one_f_one_b(2, 3)
    stages = pipeline.local(pipeline.split(model, 2), plan, rank.coords["pp"])
    draw = torch.Generator().manual_seed(0)
    batches = [tuple(torch.randint(12, (2, 1, 4), generator=draw)) for _ in range(3)]
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.5)

    def loss():
        return pipeline.run(stages, plan, rank.comm("pp"), batches).loss

    return _train(stages, optimizer, loss, lambda: None, backward=False)


def _train(model, optimizer, loss, finish, backward=True):
    losses = [loss()]
    if backward:
        losses[0].backward()
    finish()
    optimizer.step()
    losses += [loss()] if backward else []
    seen = [torch.as_tensor(each or 0.0).detach().double().view(1) for each in losses]
    return torch.cat([*seen, *(p.detach().flatten() for p in model.parameters())])


def average(model, rank):
    data_parallel.average_gradients(model, rank.comm("dp"))


def reduce(model, rank):
    expert_parallel.reduce_gradients(model, rank.comm("dp"), rank.comm("edp"))


tp = functools.partial
TRANSFORMS = {
    "replicate": (Mesh(dp=2), tp(stepped, build=replicated)),
    "average, sdpa": (Mesh(dp=2), tp(stepped, build=averaged, finish=average)),
    "zero 1": (Mesh(dp=2), tp(sharded_step, level=1)),
    "zero 2": (Mesh(dp=2), tp(sharded_step, level=2)),
    "zero 3": (Mesh(dp=2), tp(stepped, build=sharded)),
    "tp": (Mesh(tp=2), tp(stepped, build=split)),
    "checkpointing, then tp": (Mesh(tp=2), tp(stepped, build=tp(split, first=True))),
    "tp, sdpa": (Mesh(tp=2), tp(stepped, build=tp(split, attention="sdpa"))),
    "sp": (Mesh(tp=2), tp(stepped, build=tp(split, sequence=True))),
    "sp on replicas": (Mesh(dp=2, tp=2), tp(stepped, build=tp(split, sequence=True), finish=average)),
    "ep": (Mesh(dp=2, ep=2), tp(stepped, build=spread, finish=reduce)),
    "pp": (Mesh(pp=2), piped),
    "lora": (Mesh(dp=2), tp(stepped, build=with_adapters, finish=average)),
}  # fmt: skip


def program(rank, run, policy, disturbed):
    if not disturbed:
        return run(rank, policy=policy)
    with meanwhile(thread=False):
        return run(rank, policy=policy)


def equal(some, others):
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_is_the_same_whatever_others_draw_and_whatever_is_computed_again(name):
    mesh, run = TRANSFORMS[name]
    world = World(mesh)
    quiet = world.run(program, run, "none", False)
    assert all(each.isfinite().all() for each in quiet)
    for policy in POLICIES:
        assert equal(world.run(program, run, policy, True), quiet), policy


@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_processes_draw_what_threads_draw(axis):
    mesh = Mesh(**{axis: 2})
    with World(mesh, engine="processes") as world:
        for run in (run for its, run in TRANSFORMS.values() if its == mesh):
            expected = World(mesh).run(program, run, "none", False)
            for policy in POLICIES:
                assert equal(world.run(program, run, policy, False), expected)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_dry_rank_computes_again_too(policy, sequence):
    dry = World(Mesh(tp=2), engine="dry", assume={float: 0.0, bool: True})
    found = dry.run(lambda rank: split(rank, policy, sequence)[1]().backward(), rank=1)
    assert found is None


# ── who draws alike ──────────────────────────────────────────────────────────────────────────────────────────────


def generators(rank):
    axes = ("dp", "cp", "pp", "tp", "ep")
    named = {"own": rank.generator} | {axis: rank.comm(axis).generator for axis in axes}
    named["world"] = rank.comm().generator
    return {
        name: (rank.comm(name).ranks if name in axes else name, torch.rand(4, generator=g).tolist())
        for name, g in named.items()
    }


def test_a_group_draws_alike_and_no_other_does():
    seen = World(Mesh(dp=2, cp=2, pp=2, tp=2, ep=2)).run(generators)
    for axis in ("dp", "cp", "pp", "tp", "ep", "world"):
        drawn = {str(each[axis][0]): set() for each in seen}
        for each in seen:
            drawn[str(each[axis][0])].add(str(each[axis][1]))
        assert all(len(numbers) == 1 for numbers in drawn.values())  # all of a group the same
    groups = {(name, str(where)) for each in seen for name, (where, _) in each.items()}
    numbers = {str(drawn) for each in seen for _, drawn in each.values()}
    assert len(numbers) == len(groups) - 1 + len(seen)  # and each group, and each rank, its own


def masks(rank, sequence):
    """What dropout leaves of ones: of the stream, and of the heads."""
    model = whole()
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    seen = []
    model.blocks[0].attention.attend = lambda q, k, v, p: (
        seen.append(F.dropout(torch.ones(40), p)) or q
    )
    with meanwhile():
        model.loss(*rows(rank))
        return model.dropout(torch.ones(40)), model.blocks[0].dropout(torch.ones(40)), seen[0]


@pytest.mark.parametrize("sequence", [False, True])
def test_replicas_draw_apart_and_ranks_of_tp_alike_where_they_have_the_same(sequence):
    world = World(Mesh(dp=2, tp=2, pp=2))
    seen = world.run(masks, sequence)
    for i, one in enumerate(seen):
        for j, other in enumerate(seen[:i]):
            near = world.mesh.coords(i) | dict(tp=0) == world.mesh.coords(j) | dict(tp=0)
            for k in range(2):
                assert torch.equal(one[k], other[k]) == (near and not sequence)
            assert not torch.equal(one[2], other[2])


def test_what_nobody_gave_a_generator_is_alike_on_all_ranks():
    def weights(rank):
        model = lora.adapt(GPT(GPT2), rank=2, alpha=4)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    def disturbed(rank):
        with meanwhile():
            return weights(rank)

    first, second = World(2).run(disturbed)
    assert torch.equal(first, second)
    with World(2, engine="processes") as world:
        assert equal(world.run(weights), [first, second])


def test_a_seed_that_is_set_anew_counts():
    def drawn(rank, seed):
        comm, layer = rank.comm(), Dropout(0.5)
        rank.generator.manual_seed(seed)
        comm.generator.manual_seed(seed)
        layer.group = comm
        layer(X)
        return layer(X), Dropout(0.5)(X)

    world = World(1)
    ((a, b),), ((c, d),), ((e, f),) = (world.run(drawn, seed) for seed in (7, 7, 8))
    assert equal([a, b], [c, d])
    assert not torch.equal(a, e)
    assert not torch.equal(b, f)


# ── dropout itself ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_generator_has_one_twin_on_another_device():
    def program(rank):
        given, there = torch.Generator().manual_seed(7), torch.device("cpu:0")  # another name
        numbers = randomness.here()
        twin = numbers.near(given, there)
        assert twin.initial_seed() == 7 and twin is numbers.near(given, there) is not given
        assert numbers.near(given, given.device) is given

    World(1).run(program)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_it_is_torchs_dropout_with_other_random_numbers(p, dtype):
    x = X.to(dtype)
    torch.manual_seed(3)
    theirs = F.dropout(x, p)
    torch.manual_seed(3)
    assert torch.equal(randomness.dropout(x, p), theirs)  # not on a rank: torch's own

    def ours(rank):
        rank.generator.manual_seed(3)
        given = x.clone().requires_grad_()
        y = randomness.dropout(given, p)
        y.sum().backward()
        assert torch.equal(given.grad * x, y)
        assert randomness.dropout(x, p, training=False) is x
        assert randomness.dropout(x, 0.0) is x
        assert not randomness.dropout(x, 1.0).any()
        assert Dropout(p).eval()(x) is x
        return y.detach()

    assert equal(World(1).run(ours), [theirs])


def test_a_rank_leaves_torchs_random_numbers_and_dtype_alone():
    def run(rank):
        model = lora.adapt(GPT(GPT2, attention="sdpa"), rank=2, alpha=4, dropout=0.5)
        checkpointing.apply(model, "full").loss(*rows(rank)).backward()

    for engine in ("threads", "dry"):
        before = torch.get_rng_state()
        World(Mesh(), engine=engine).run(run)
        assert torch.equal(torch.get_rng_state(), before)


def test_a_model_is_built_without_torchs_random_numbers():
    before = torch.get_rng_state()
    model = GPT(replace(MIXTURE, num_layers=2), generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.get_rng_state(), before)
    draw = torch.Generator().manual_seed(4)
    for name, p in model.named_parameters():
        std = 0.02 / (2 if name.endswith(("output.weight", "down.weight")) else 1)  # √(2·2)
        fill = torch.full_like(p, float(name.endswith("norm.weight")))
        wanted = fill.normal_(0, std, generator=draw) if p.dim() > 1 else fill
        assert torch.equal(p, wanted), name


# ── computed again ───────────────────────────────────────────────────────────────────────────────────────────────

DRAWS = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "nn.Dropout": nn.Dropout(0.5),
    "rand": lambda x: x * torch.rand(64),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint": lambda x: x * torch.randint(1, 9, (64,)),
    "randperm": lambda x: x * torch.randperm(64),
    "uniform_": lambda x: x * torch.empty(64).uniform_(1, 2),
    "rank's": lambda x: randomness.dropout(x, 0.5),
    "new group": lambda x: x * torch.rand(64, generator=randomness.here().shared("late", 0)),
    "nested": lambda x: checkpoint(lambda y: F.dropout(F.dropout(y, 0.3), 0.3), F.dropout(x, 0.3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_checkpoint_computes_again_draws_again_even_what_torch_draws(name):
    """y = x·mask, so x·dy/dx = y where the mask is the same."""

    def run(rank):
        with meanwhile():
            for _ in range(3):
                x = X.clone().requires_grad_()
                y = checkpoint(lambda x: (DRAWS[name](x) * 2).exp().log(), x)
                after = torch.rand(2, generator=rank.generator)
                x.grad = None
                later = rank.generator.get_state()
                y.sum().backward()
                assert torch.allclose(x.grad * X, y.detach())
                assert torch.equal(rank.generator.get_state(), later)
        return y.detach(), after

    first, again = (World(2).run(run) for _ in range(2))
    assert all(equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], first[1][0]) or name == "new group"


def test_a_chain_draws_again_on_a_rank():
    chain = [nn.Sequential(nn.Dropout(0.3), nn.Tanh()) for _ in range(4)]
    plan = checkpointing.segments(4, 2)

    def run(rank, plan):
        with meanwhile():
            x = X.clone().requires_grad_()
            found = checkpointing.run(chain, plan, x, torch.ones_like(x))
            return found.output, found.input_gradient

    first, again = (World(2).run(run, plan) for _ in range(2))
    assert all(equal(*pair) for pair in zip(first, again, strict=True))
    for y, slope in first:
        assert torch.equal(y == 0, slope == 0)  # a number that was dropped has no gradient


def test_what_draws_from_torch_alone_is_refused_by_name():
    def run(rank):
        return checkpoint(lambda x: torch.native_dropout(x, 0.5, True)[0], X.clone())

    World(1).run(lambda rank: torch.native_dropout(X, 0.5, True)[0])  # that is no checkpoint
    with pytest.raises(RankError, match="native_dropout draws from torch's own generator"):
        World(1).run(lambda rank: checkpoint(run, rank))


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_is_refused_on_a_rank_and_right_elsewhere(engine, reentrant):
    def run(rank=None):
        x = X.clone().requires_grad_()
        y = torchs_checkpoint(lambda x: randomness.dropout(x, 0.5), x, use_reentrant=reentrant)
        y.sum().backward()
        return torch.equal(x.grad * X, y.detach())

    def after_ours(rank):
        checkpoint(lambda x: randomness.dropout(x, 0.5), X.clone().requires_grad_()).sum().backward()
        return run()

    assert run()
    with World(1, engine=engine) as world:
        with pytest.raises(
            RankError, match=r"another mask: use labutils\.checkpointing\.checkpoint"
        ):
            world.run(after_ours)


# ── the source ───────────────────────────────────────────────────────────────────────────────────────────────────

PACKAGE = pathlib.Path(randomness.__file__).parent
GLOBAL = {"get_rng_state", "set_rng_state", "fork_rng", "set_default_dtype", "initial_seed"}
DRAWING = (
    "rand randn randint randperm bernoulli normal multinomial poisson rand_like randn_like "
    "randint_like uniform_ normal_ bernoulli_ random_ exponential_"
).split()
TORCHS = {"dropout", "dropout1d", "alpha_dropout", "rrelu", "Dropout", "RReLU", "manual_seed"}


def draws_from_torch(node):
    """Whether a call draws from torch's own generator, or sets it, or the default dtype."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    name, of = node.func.attr, ast.unparse(node.func.value)
    if name in DRAWING:
        return "generator" not in {word.arg for word in node.keywords}
    of_torch = of.split(".")[0] in ("torch", "F", "nn")
    return of_torch and name in GLOBAL | TORCHS and not of.startswith("torch.Generator(")


def test_nothing_on_a_rank_draws_from_torch_or_sets_what_threads_share():
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        if "exercises" not in path.parts  # they judge code that runs on no rank
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if draws_from_torch(node)
    ]
    files = sorted({place.partition(":")[0] for place in found})
    # where no rank is, and where a check puts back what the code that it judges has drawn or set
    assert files == ["randomness.py", "teach/check.py"], found
    assert draws_from_torch(ast.parse("torch.rand(3)").body[0].value)
    assert not draws_from_torch(ast.parse("torch.Generator().manual_seed(3)").body[0].value)
