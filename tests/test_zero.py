"""Levels 1, 2 and 3: the same numbers as one process, every byte sent and held as predicted, snapshots that fit any number of ranks."""

import functools

import pytest
import torch

from labutils import checkpointing, world, zero
from labutils.config import ModelConfig
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


def train(rank, config, level, *, steps=3, accumulation=1, optimizer="adamw", clip=None, dtype=torch.float64, frozen=(), checkpointed=False, look=False, **options):
    """Losses, gradients of the first step, weights at the end, what the last step held at its fullest."""
    model = build(config, rank.index, dtype, frozen)  # every rank begins elsewhere
    if checkpointed:
        for block in model.blocks:
            forward = block.forward
            block.forward = functools.partial(checkpointing.checkpoint, forward)
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
    for config in (TIED, UNTIED):
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
