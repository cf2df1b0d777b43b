"""A small GPT trained at every level of ZeRO, and on one process alone: what the tests of `zero` compare."""

import contextlib
import functools
from types import SimpleNamespace

import torch
import torch.utils.checkpoint

from labutils import checkpointing, measure, predict, world, zero
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT

TIED = ModelConfig(num_layers=3, d_model=16, num_heads=2, d_ff=24, vocab_size=13, seq_len=8)
UNTIED = ModelConfig(
    num_layers=2,
    d_model=12,
    num_heads=2,
    d_ff=20,
    vocab_size=29,
    seq_len=6,
    ffn="swiglu",
    norm="rmsnorm",
    positions="rope",
    bias=False,
    tied=False,
)
LEVELS = (1, 2, 3)
ROWS = 12  # sequences in a micro-batch of all ranks
BUCKET = 9000  # bytes: several buckets, some parameters larger than one

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
}
AGAIN = {  # ways to checkpoint a unit from outside
    "outside": checkpointing.checkpoint,
    "to the end": functools.partial(
        torch.utils.checkpoint.checkpoint, use_reentrant=False, early_stop=False
    ),
    "reentrant": functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
}
GROUPS = {  # settings of matrices and of vectors
    "adamw": ({"weight_decay": 0.3}, {"weight_decay": 0.0, "lr": 3e-2, "betas": (0.8, 0.9)}),
    "momentum": ({"weight_decay": 0.1, "lr": 0.05}, {"momentum": 0.5, "nesterov": True}),
    "partly momentum": ({"momentum": 0.9}, {"momentum": 0.0}),
}


@functools.cache
def ranks(n):
    return world.World(n)


def build(config, seed, dtype=torch.float64, frozen=()):
    model = GPT(config, generator=torch.Generator().manual_seed(seed)).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def batches(config, steps, accumulation=1):
    """For each step the micro-batches of all ranks together; they are the same for any number of ranks."""
    generator = torch.Generator().manual_seed(7)
    return [
        [
            torch.randint(0, config.vocab_size, (ROWS, config.seq_len), generator=generator)
            for _ in range(accumulation)
        ]
        for _ in range(steps)
    ]


def of(rank, x):
    """This rank's sequences of a micro-batch."""
    return x.view(rank.size, ROWS // rank.size, -1)[rank.rank]


def is_vector(name):
    return "norm" in name or name.endswith("bias")


def grouped(named, settings=None):
    """Matrices and vectors apart, as torch optimizers take them; no groups without settings."""
    named = list(named)
    if settings is None:
        return [parameter for _, parameter in named]
    return [
        {"params": [p for name, p in named if is_vector(name) is vectors], **chosen}
        for vectors, chosen in zip((False, True), settings, strict=True)
    ]


def own(model, comm, level, make, groups=None, **options):
    """The optimizer of a model that is made ready for a level."""
    if level == 3:
        zero.shard(model, comm, **options)
        return make(grouped(model.named_parameters(), groups))
    return zero.Optimizer(
        model.named_parameters(),
        comm,
        lambda named: make(grouped(named, groups)),
        level=level,
        **{"bucket_bytes": BUCKET} | options,
    )


def inner(optimizer):
    return optimizer.inner if isinstance(optimizer, zero.Optimizer) else optimizer


def shards(model, optimizer):
    """This rank's pieces, with their gradients, and the flat parameters that they are of."""
    if isinstance(optimizer, zero.Optimizer):
        pieces = optimizer.collect()
        names = {p: name for name, p in model.named_parameters()}
        return {piece: names[p] for p, piece in optimizer.pieces.items()}, optimizer.flats, pieces
    flats = [flat for group in model._sharded.groups for flat in group.flats if flat.trained]
    names = {piece: name for name, piece in model.named_parameters()}
    return names, flats, list(model.parameters())


def clip(model, optimizer, comm, max_norm):
    return zero.clip_grad_norm(shards(model, optimizer)[2], comm, max_norm)


def gradients_of(model, optimizer, comm):
    """The mean gradient over ranks of every trained parameter, whole, by name."""
    names, flats, _ = shards(model, optimizer)
    found = {}
    for flat in flats:
        shard = torch.zeros_like(flat.shard)
        for piece, (a, b) in zip(flat.pieces, flat.cuts, strict=True):
            assert (piece.grad is None) == (a == b)
            if a < b:
                shard[a:b] = piece.grad
        with comm.record("gradients"):
            whole = comm.all_gather(shard)
        found |= zip((names[piece] for piece in flat.pieces), flat.views(whole), strict=True)
    return found


def weights(model, optimizer):
    """All parameters, whole, by name."""
    sharded = not isinstance(optimizer, zero.Optimizer)
    with zero.gathered(model) if sharded else contextlib.nullcontext():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def advance(model, optimizer, rank, steps):
    for (x,) in steps:
        model.loss(of(rank, x), of(rank, x)).backward()
        optimizer.step()
        optimizer.zero_grad()


def held_over(fn, model, optimizer):
    """What is alive of weights, gradients and optimizer state, moment by moment."""
    return measure.history(fn, model, inner(optimizer)).only("weights", "gradients", "optimizer")


def held(model, optimizer):
    """The same now; the root's gathered weights and gradient buckets are there too, if any are."""
    flats = [flat for group in model._sharded.groups for flat in group.flats]
    left = sum(flat.whole.untyped_storage().nbytes() for flat in flats)
    left += sum(flat.buffer.nbytes for flat in flats if flat.buffer is not None)
    return measure.model_states(model, optimizer) + Ledger([Line("left", left)])


def scheduled(optimizer):
    """Another learning rate for each group in each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        [lambda step, i=i: 1 / (1 + step + i) for i in range(len(optimizer.param_groups))],
    )


def train(
    rank, config, level, *, steps=3, accumulation=1, optimizer="adamw", max_norm=None,
    dtype=torch.float64, frozen=(), groups=None, schedule=False, checkpointed=None, look=True,
    **options,
):  # fmt: skip
    """Losses and norms, gradients of the first step, final weights, the last step's peak."""
    comm = rank.comm("dp")
    model = build(config, rank.rank, dtype, frozen)  # every rank begins elsewhere
    if checkpointed == "inside":
        for block in model.blocks:
            block.forward = functools.partial(checkpointing.checkpoint, block.forward)
    if checkpointed in AGAIN:
        layers = [functools.partial(AGAIN[checkpointed], block) for block in model.blocks]
        model.forward = lambda tokens: model.head(
            model.norm(functools.reduce(lambda x, layer: layer(x), layers, model.embed(tokens)))
        )
    owner = own(model, comm, level, OPTIMIZERS[optimizer], GROUPS.get(groups), **options)
    plan = scheduled(inner(owner)) if schedule else None
    losses, gradients, peak = [], None, None

    def step(micro_batches):
        nonlocal gradients
        for x in micro_batches:
            loss = model.loss(of(rank, x), of(rank, x)) / accumulation
            loss.backward()
            losses.append(loss.item() * accumulation)
        if look and gradients is None:
            gradients = gradients_of(model, owner, comm)
        if max_norm:
            losses.append(clip(model, owner, comm, max_norm).item())
        owner.step()
        owner.zero_grad()
        if plan:
            plan.step()

    *before, last = batches(config, steps, accumulation)
    for micro_batches in before:
        step(micro_batches)
    peak = held_over(lambda: step(last), model, owner).peak.ledger if look else step(last)
    with comm.record("gradients"):  # which are of no step, as those that are gathered above
        final = weights(model, owner) if look else None
    return SimpleNamespace(losses=losses, gradients=gradients, weights=final, peak=peak)


@functools.cache
def train_alone(
    config,
    *,
    steps=3,
    accumulation=1,
    optimizer="adamw",
    max_norm=None,
    frozen=(),
    groups=None,
    schedule=False,
):
    """The same on one process with the whole batch."""
    model = build(config, 0, frozen=frozen)
    inner = OPTIMIZERS[optimizer](grouped(model.named_parameters(), GROUPS.get(groups)))
    plan = scheduled(inner) if schedule else None
    losses, gradients = [], None
    for micro_batches in batches(config, steps, accumulation):
        for x in micro_batches:
            loss = model.loss(x, x) / accumulation
            loss.backward()
            losses.append(loss.item() * accumulation)
        gradients = gradients or {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        if max_norm:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        inner.step()
        inner.zero_grad()
        if plan:
            plan.step()
    return SimpleNamespace(
        losses=losses,
        gradients=gradients,
        weights={name: parameter.detach() for name, parameter in model.named_parameters()},
    )


def same(ours, theirs, tolerance=1e-10):
    return ours.keys() == theirs.keys() and all(
        torch.allclose(ours[name], theirs[name], rtol=tolerance, atol=tolerance) for name in theirs
    )


def assert_equal(results, config, **settings):
    """Losses, gradients and weights are those of one process."""
    alone = train_alone(config, **settings)
    for result in results:
        assert same(result.gradients, alone.gradients) and same(result.weights, alone.weights)
    mean = torch.tensor([result.losses for result in results], dtype=torch.float64).mean(0)
    assert torch.allclose(mean, torch.tensor(alone.losses, dtype=torch.float64), rtol=1e-10)


PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16"}
TOLD = ("optimizer", "bucket_bytes", "reshard", "prefetch")


def planned(
    n, level, *, accumulation=1, max_norm=None, dtype=torch.float64, frozen=(), **options
):  # fmt: skip
    """The step of `train`, as `predict` takes it."""
    precision = PRECISIONS[options.get("param_dtype", dtype)]
    return TrainConfig(
        micro_batch=ROWS // n, global_batch=ROWS * accumulation, precision=precision, zero=level,
        clip=max_norm, frozen=tuple(f"*{part}*" for part in frozen),
        fp32_gradients="reduce_dtype" in options,
        **{"bucket_bytes": BUCKET} | {key: options[key] for key in TOLD if key in options},
    )  # fmt: skip


def of_a_step(ledger):
    """Bytes and messages by name, of what a step of `train` sends: its losses stay where they are."""
    lines = (line for line in ledger if line.name not in ("targets", "loss", "gradients", "broadcast"))
    return sorted((line.name, line.amount, line.count) for line in lines)


def assert_books(results, sent, config, level, *, steps=3, look=True, **options):
    """Every rank held at its fullest, and sent, as predicted: byte for byte, message for message."""
    n = len(results)
    step, mesh = planned(n, level, **options), Mesh(dp=n)
    for rank, result in enumerate(results):
        told = predict.sent(config, step, mesh, rank).scaled(steps)
        assert of_a_step(told) == of_a_step(sent.only(rank=rank))
        if look:
            held = predict.peak_states(config, step, mesh, rank)
            assert held.diff(result.peak).unexplained == 0, held.diff(result.peak)
    start = predict.states(config, step, mesh).only(component="weights").total
    start *= n if level == 3 else 1  # weights of rank 0 go to each of the others, padding and all
    assert sent.only(name="broadcast").total == (n - 1) * start
