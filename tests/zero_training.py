"""A small GPT trained at every level of ZeRO, and on one process alone: what the tests of `zero` compare."""

import functools
from types import SimpleNamespace

import torch
import torch.utils.checkpoint

from labutils import checkpointing, world, zero
from labutils.config import ModelConfig
from labutils.ledger import Ledger
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


def grouped(model, settings):
    """Matrices and vectors apart, frozen ones among them, as torch optimizers take them; no groups without settings."""
    members = [
        [parameter for parameter in model.parameters() if (parameter.dim() > 1) is wide]
        for wide in (True, False)
    ]
    return settings and [
        {"params": params, **chosen} for params, chosen in zip(members, settings, strict=True)
    ]


def own(model, comm, level, make, groups=None, **options):
    """The model made ready for a level, and its optimizer."""
    groups = grouped(model, groups)
    if level == 3:
        return zero.shard(model, comm, make, groups=groups, **options)
    return zero.Optimizer(
        model.named_parameters(),
        comm,
        make,
        level=level,
        groups=groups,
        **{"bucket_bytes": BUCKET} | options,
    )


def weights(model, owner):
    """All parameters, whole, by name."""
    if owner.level < 3:
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with owner.gathered():
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def advance(model, owner, rank, steps):
    for (x,) in steps:
        model.loss(of(rank, x), of(rank, x)).backward()
        owner.step()
        owner.zero_grad()


def scheduled(inner):
    """Another learning rate for each group in each step."""
    return torch.optim.lr_scheduler.LambdaLR(
        inner, [lambda step, i=i: 1 / (1 + step + i) for i in range(len(inner.param_groups))]
    )


def train(
    rank, config, level, *, steps=3, accumulation=1, optimizer="adamw", clip=None, dtype=torch.float64, frozen=(), groups=None, schedule=False,
    checkpointed=None, look=True, **options,
):  # fmt: skip
    """Losses and norms, gradients of the first step, weights at the end, what the last step held at its fullest, the layout of the flat tensors."""
    model = build(config, rank.rank, dtype, frozen)  # every rank begins elsewhere
    if checkpointed == "inside":
        for block in model.blocks:
            block.forward = functools.partial(checkpointing.checkpoint, block.forward)
    if checkpointed in AGAIN:
        layers = [functools.partial(AGAIN[checkpointed], block) for block in model.blocks]
        model.forward = lambda tokens: model.head(
            model.norm(functools.reduce(lambda x, layer: layer(x), layers, model.embed(tokens)))
        )
    owner = own(model, rank.comm("dp"), level, OPTIMIZERS[optimizer], GROUPS.get(groups), **options)
    plan = scheduled(owner.inner) if schedule else None
    losses, gradients, peak = [], None, None

    def step(micro_batches):
        nonlocal gradients
        for x in micro_batches:
            loss = model.loss(of(rank, x), of(rank, x)) / accumulation
            loss.backward()
            losses.append(loss.item() * accumulation)
        if look and gradients is None:
            gradients = owner.gradients()
        if clip:
            losses.append(owner.clip_grad_norm(clip).item())
        owner.step()
        owner.zero_grad()
        if plan:
            plan.step()

    *before, last = batches(config, steps, accumulation)
    for micro_batches in before:
        step(micro_batches)
    peak = zero.history(lambda: step(last), owner).peak.ledger if look else step(last)
    return SimpleNamespace(
        losses=losses,
        gradients=gradients,
        weights=weights(model, owner) if look else None,
        peak=peak,
        layout=owner.layout,
    )


@functools.cache
def train_alone(
    config,
    *,
    steps=3,
    accumulation=1,
    optimizer="adamw",
    clip=None,
    frozen=(),
    groups=None,
    schedule=False,
):
    """The same on one process with the whole batch."""
    model = build(config, 0, frozen=frozen)
    inner = OPTIMIZERS[optimizer](
        grouped(model, GROUPS.get(groups))
        or [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
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
        if clip:
            losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
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


def assert_books(
    results,
    sent,
    config,
    level,
    *,
    accumulation=1,
    optimizer="adamw",
    clip=None,
    dtype=torch.float64,
    frozen=(),
    steps=3,
    look=True,
    **options,
):
    """Every rank held as predicted at its fullest, and sent as predicted, byte for byte and message for message."""
    n, layout = len(results), results[0].layout
    gradient_itemsize = options.get("gradient_dtype", dtype).itemsize
    widths = {"itemsize": dtype.itemsize, "gradient_itemsize": gradient_itemsize}
    whole = build(config, 0, frozen=frozen)
    resting = (
        0
        if level == 3
        else sum(
            parameter.numel() for parameter in whole.parameters() if not parameter.requires_grad
        )
    )
    reshard = {"reshard": options["reshard"]} if "reshard" in options else {}
    predicted = zero.predict_sent(
        layout,
        n,
        level,
        accumulation=accumulation,
        steps=steps,
        clip=bool(clip),
        start=True,
        frozen=resting,
        **widths,
        **reshard,
    )
    if look:  # which gathers gradients once, under a name of their own, and at level 3 weights
        sent = Ledger(line for line in sent if line.name != "gradients")
        if level == 3:
            predicted = (
                predicted
                + zero.predict_sent(layout, n, 1, itemsize=dtype.itemsize).only(name="all_gather")
            ).merged()
    assert predicted.diff(sent).unexplained == 0, predicted.diff(sent)
    counts = [
        {line.key: line.count for line in ledger if line.name != "broadcast"}
        for ledger in (predicted, sent)
    ]
    assert counts[0] == counts[1]  # as many messages, too; frozen tensors start out one by one
    if look:
        known = {name: value for name, value in options.items() if name in ("reshard", "prefetch")}
        kept = {
            "optimizer": optimizer,
            "frozen": resting,
            "master": dtype.itemsize < 4,
            "offload": "offload" in options,
            "accumulation": accumulation,
        }
        held = zero.predict_held(layout, n, level, **kept, **widths, **known)
        for result in results:
            assert result.layout == layout and held.diff(result.peak).unexplained == 0, held.diff(
                result.peak
            )
