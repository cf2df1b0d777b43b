"""The same training on one device and on any mesh: a case is a few features, by name, of a mesh, a model and a plan."""

import ast
import contextlib
import csv
import functools
import itertools
import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from small_models import random_

from labutils import lora, measure, precision, predict, quantization, step, tensor_parallel, zero
from labutils.config import DATA, Adapters, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.predict.rehearsal import program as recorded
from labutils.predict.rehearsal import rehearsal
from labutils.trace import OneRank, Trace
from labutils.world import RankError, World

STEPS, ROWS, LR, CLIP = 2, 8, 0.3, 0.05
MODEL = dict(
    num_layers=2, d_model=16, num_heads=4, num_kv_heads=2, d_ff=16, vocab_size=24, seq_len=16,
    ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False,
)  # fmt: skip
FROZEN = "blocks.0.attention.key.weight"
TRAIN = dict(
    optimizer="momentum", lr=LR, clip=CLIP, precision="fp64", bucket_bytes=3000, frozen=(FROZEN,)
)  # fmt: skip
TABLE, JOIN = DATA / "compositions.csv", " × "
LORA = Adapters(rank=2, alpha=4)
ROUTED = {"dispatch", "combine"}

GPT2 = dict(ffn="gelu", norm="layernorm", positions="learned", bias=True)

# Of each feature its kind, of which a case has one, and what it sets.
FEATURES = {
    "1F1B": ("pp", dict(pp=2)),
    "interleaved": ("pp", dict(pp=2, schedule="interleaved", num_layers=3)),
    "ZB-H1": ("pp", dict(pp=2, schedule="zb_h1")),
    "ZB-V": ("pp", dict(pp=2, schedule="zb_v", num_layers=3)),
    "DualPipe": ("pp", dict(pp=2, schedule="dualpipe")),
    "dp": ("dp", dict(dp=2)),
    "ZeRO-1": ("dp", dict(dp=2, zero=1)),
    "ZeRO-2": ("dp", dict(dp=2, zero=2)),
    "ZeRO-3": ("dp", dict(dp=2, zero=3)),
    "ring": ("cp", dict(cp=2, attention="ring")),
    "Ulysses": ("cp", dict(cp=2, attention="ulysses")),
    "tp": ("tp", dict(tp=2)),
    "tp + sp": ("tp", dict(tp=2, sequence=True)),
    "ep": ("ep", dict(num_experts=4, top_k=2, ep=2)),
    "selective": ("recomputation", dict(checkpointing="selective")),
    "full": ("recomputation", dict(checkpointing="full")),
    "tied": ("tied", dict(tied=True)),
    "autocast": ("precision", dict(precision="bf16", autocast=True)),
    "bf16": ("precision", dict(precision="bf16")),
    "FP8": ("products", dict(fp8="unscaled")),
    "LoRA": ("adapters", dict(adapters=LORA)),
    "NF4": ("adapters", dict(adapters=replace(LORA, base="nf4"))),
}  # fmt: skip


# Beside all pairs: what met its own trouble, and meshes of many axes.
LARGER = [tuple(names.split(", ")) for names in (
    "1F1B, ZeRO-1, tp + sp",
    "interleaved, ZeRO-2, tp",
    "1F1B, ZeRO-1, tied",
    "1F1B, ZeRO-3, tied",
    "ZB-H1, ZeRO-2, tied",
    "ZB-H1, ZeRO-1, full, tied",
    "DualPipe, ZeRO-2, full, tied",
    "1F1B, ring, tp + sp",
    "1F1B, dp, ring, tp",
    "ZeRO-3, ring, tp + sp, full",
    "1F1B, ZeRO-1, Ulysses, tp + sp, selective",
    "1F1B, tp + sp, ep, full",
    "ring, tp + sp, ep",
    "tp + sp, ep, LoRA",
    "tp, ep, LoRA",
    "ZB-V, ZeRO-2, tp + sp, LoRA",
    "interleaved, tp + sp, full, NF4",
    "1F1B, ZeRO-1, tp, autocast",
    "1F1B, ZeRO-2, tp + sp, bf16, tied",
    "1F1B, ZeRO-3, bf16",
    "1F1B, ZeRO-3, tp + sp, autocast",
    "tp + sp, autocast, LoRA",
    "ZeRO-1, tp, full, FP8",
    "ZeRO-1, ring, ep",
    "ZeRO-2, Ulysses, ep",
)]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, a plan and a mesh."""

    model: ModelConfig
    train: TrainConfig
    mesh: Mesh


def case(names, **changes):
    """The case of these features; `changes` set single values, as a remedy asks for. Each has a frozen weight and uneven targets; every second one is of GPT-2's kind, the others of Llama's."""
    given = dict(GPT2) if sum(map(ord, "".join(names))) % 2 else {}
    for name in names:
        given |= FEATURES[name][1]
    if "base" in changes:  # of the adapters
        changes = {"adapters": replace(LORA, base=changes["base"])}
    given |= changes
    if given.get("ep", 1) > 1 and given.get("dp", 1) * given.get("cp", 1) == 1:
        given["dp"] = 2  # experts are spread over ranks that there are anyway
    mesh = Mesh(
        **{axis: given.pop(axis) for axis in ("pp", "dp", "cp", "tp", "ep") if axis in given}
    )
    model = {key: given.pop(key) for key in list(given) if key in ModelConfig.__dataclass_fields__}
    if mesh.pp == 1 and given.get("zero") != 3:
        model["num_layers"] = 1
    many = 4 if given.get("schedule") == "dualpipe" else 2
    sizes = dict(micro_batch=ROWS // many // mesh.dp, global_batch=ROWS)
    return Case(ModelConfig(**(MODEL | model)), TrainConfig(**(TRAIN | sizes | given)), mesh)


def data(case):
    """Tokens and targets of the whole batch: a row has no target, others have few."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(case.model.vocab_size, (ROWS, case.model.seq_len + 1), generator=generator)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].clone()
    targets[0] = -100
    for row in range(1, ROWS):
        targets[row, : 2 * row] = -100
    return tokens, targets


def whole(case):
    """The model as training begins, with a weight that stays: float64 where nothing is rounded on purpose."""
    rounded = case.train.precision != "fp64"
    with torch.device("cpu"):
        model = random_(GPT(case.model).to(torch.float32 if rounded else torch.float64), 3)
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


@functools.cache
def one_device(alone):
    """Weights, norms and losses of a plain loop over the whole batch, with nothing of `step`."""
    case, train = alone, alone.train
    model = whole(case)
    half = {"bf16": torch.bfloat16}.get(train.precision)
    if half is not None and not train.autocast:
        model.to(half)
    if train.adapters is not None:
        if train.adapters.base == "nf4":
            lora.quantize_base(model)
        sizes = dict(rank=train.adapters.rank, alpha=train.adapters.alpha)
        lora.adapt(model, **sizes, generator=torch.Generator().manual_seed(step.SEED))
    if train.fp8:
        quantization.use_fp8(model, quantization.SCHEMES[train.fp8])
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=LR, momentum=0.9)
    if half is not None and not train.autocast:
        optimizer = precision.MasterWeights(optimizer)
    tokens, targets = data(case)
    # A replica's gradients are those of its own mean: of 8 bits it decides which vanish.
    mean_of = case.mesh.dp * case.mesh.cp
    norms, losses = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", half or torch.bfloat16, enabled=train.autocast):
            logits = model(tokens)
        logits = logits if train.precision == "fp64" else logits.float()
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        (loss * mean_of).backward()
        for p in trained:
            p.grad = None if p.grad is None else p.grad / mean_of
        if hasattr(optimizer, "collect"):
            optimizer.collect()
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        norms.append(torch.nn.utils.clip_grad_norm_(stepped, train.clip))
        optimizer.step()
        losses.append(loss.detach())
    weights = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    return weights, norms, losses


def alone(case):
    """The case without what only a mesh has: many cases share the run of one device."""
    kept = ("precision", "autocast", "fp8", "adapters", "optimizer", "lr", "clip")
    train = TrainConfig(
        micro_batch=ROWS, global_batch=ROWS, **{k: getattr(case.train, k) for k in kept}
    )
    return replace(case, train=train, mesh=Mesh(dp=case.mesh.dp * case.mesh.cp if train.fp8 else 1))


def share(name, weight, case, rank):
    """The part of a weight that a rank of tp has, by hand: heads of keys and values are not cut."""
    n, i = case.mesh.tp, rank.coords["tp"]
    if n == 1:
        return weight
    parts = name.replace(".base", "").split(".")
    adapter = parts[-1] if "adapters" in parts else ""
    path = parts[: parts.index("adapters")] if adapter else parts[:-1]
    style = tensor_parallel.styles(case.model)[".".join("*" if p.isdigit() else p for p in path)]
    dims = {"column": 0, "vocabulary": 0, "row": 1}
    if style == "whole" or (style == "row" and parts[-1] == "bias"):
        return weight
    if adapter and adapter != {"column": "B", "row": "A"}[style]:
        return weight
    return weight.chunk(n, dims[style])[i]


def in_place(rank, mesh, run, *args):
    """What a rank of any mesh runs on this one, of as many: processes take seconds to start."""
    rank.mesh, rank.coords = mesh, mesh.coords(rank.rank)
    return run(rank, *args)


def on_ranks(case, world=None):
    """The largest difference from one device: of a weight of any rank, of a norm, of a loss; and the bytes by which what a rank held, or sent in its second step, is not what was predicted. A tensor that is not made where others are, as those of a GPU have to be, has no values here."""
    make = step.build(case.model, case.train, case.mesh, whole=functools.partial(whole, case))
    weights, norms, losses = one_device(alone(case))
    tokens, targets = data(case)

    def program(rank):
        taken, begun = [], 0
        with torch.device("meta"):
            mine = make(rank)
            batches = mine.share(tokens, targets)
            for _ in range(STEPS):
                begun = len(rank._finish())
                taken.append(mine(batches))
        sent = Trace(OneRank(rank.size, rank.rank, rank._finish()[begun:])).sent
        held = measure.model_states(mine.stages, *mine.inner)
        found = dict(full(mine))
        assert found, "a rank without weights"
        apart = [distance(p, share(name, weights[name], case, rank)) for name, p in found.items()]
        norm = [distance(one.norm, two) for one, two in zip(taken, norms, strict=True)]
        loss = [distance(one.loss, two) for one, two in zip(taken, losses, strict=True)]
        return (max(apart), max(norm), max(loss)), held, sent

    with contextlib.nullcontext(world) if world else World(case.mesh, timeout=60) as ranks:
        apart, held, sent = zip(*ranks.run(in_place, case.mesh, program), strict=True)
    lost = sum(map(unexplained, [case] * len(held), range(len(held)), held, sent))
    return tuple(map(max, zip(*apart, strict=True))), lost


def unexplained(case, rank, held, sent):
    """Bytes by which a rank's states and messages are not those predicted. What visits an expert is of the tokens' choice: there each rank's own share is unknown."""
    plan = case.model, case.train, case.mesh, rank
    routed = predict.sent(*plan), sent
    foreseen, found = (
        Ledger(x for x in each if x.name.split()[0] not in ROUTED) for each in routed
    )
    return predict.states(*plan).diff(held).unexplained + foreseen.diff(found).unexplained


def trained(case):
    """The weights of all ranks after training, and their losses and norms."""
    tokens, targets = data(case)
    make = step.build(case.model, case.train, case.mesh, whole=functools.partial(whole, case))

    def program(rank):
        mine = make(rank)
        taken = [mine(mine.share(tokens, targets)) for _ in range(STEPS)]
        return dict(full(mine)), [(one.loss, one.norm) for one in taken]

    with World(case.mesh, timeout=60) as world:
        return world.run(program)


def alike(one, two):
    """Whether two trainings are the same to the bit."""
    same = (
        torch.equal(a[name], b[name]) for (a, _), (b, _) in zip(one, two, strict=True) for name in a
    )
    return all(same) and [taken for _, taken in one] == [taken for _, taken in two]


def stepped(case, begun, steps, ended):
    """Steps of training from a snapshot, or from the beginning, to a snapshot: the losses, and of the whole batch the loss after them and what the first one told the next."""
    tokens, targets = data(case)
    make = step.build(case.model, case.train, case.mesh, whole=functools.partial(whole, case))

    def program(rank):
        mine = make(rank)
        about = mine.load(begun) if begun else {}
        losses = [mine(mine.share(tokens, targets)).loss.item() for _ in range(steps)]
        mine.save(ended, {"steps": about.get("steps", 0) + steps})
        return losses, mine.evaluate(tokens, targets).item(), about

    with World(case.mesh, timeout=60) as world:
        first, *others = world.run(program)
    assert all(each == first for each in others)
    return first


def same_masks(names, policy):
    """With dropout one device cannot be matched, as masks are a rank's own; but a rank that computes again draws again what it drew, and a second training is the first one."""
    plain, again = case(names, dropout=0.1), case(names, dropout=0.1, checkpointing=policy)
    kept = trained(plain)
    return alike(kept, trained(plain)), alike(kept, trained(again))


def rehearsed(model, train, mesh, rank):
    """Bytes by which what a dry run of a rank holds, and bytes and messages by which what it sends in a step, is not what was predicted."""
    plan = model, train, mesh, rank
    found, sent = rehearsal(*plan), predict.sent(*plan)
    apart = {line.key: line.count for line in found.sent}
    for line in sent:
        apart[line.key] = apart.get(line.key, 0) - line.count
    held, sent = predict.states(*plan).diff(found.states), sent.diff(found.sent)
    return held.unexplained, sent.unexplained + sum(map(abs, apart.values()))


def phases(case, world=None, messages="matched"):
    """Bytes at the fullest moment of each phase, on the last rank and in its dry run: with "paired", where processes send, too, as a message is with its receiver when a send is over."""
    plan = case.model, case.train
    with contextlib.nullcontext(world) if world else World(case.mesh, timeout=60) as ranks:
        real = ranks.run(in_place, case.mesh, recorded, *plan, messages)[-1]
    dry = rehearsal(*plan, case.mesh, case.mesh.size - 1, messages)
    both = real.history.phases, dry.history.phases
    return [{name: at.ledger.total for name, at in each.items()} for each in both]


def equal(case, world=None):
    """Whether ranks and one device agree, and ranks and their formulas; and by how much they differ."""
    found, lost = on_ranks(case, world)
    same = all(one <= most for one, most in zip(found, bounds(case), strict=True))
    return same and not lost, (*found, lost)


def bounds(case):
    """How far weights, norms and losses may be apart: in float64 by rounding."""
    train, adapted = case.train, case.train.adapters is not None
    if train.precision == "bf16":  # 8 digits; of adapters, that begin with zero, fewer
        return (5e-2 if adapted else 1e-2), 1e-2, 3e-3
    if train.fp8 and case.mesh.ep > 1:  # gradients travel divided by N_e: others vanish in 8 bits
        return 1e-2, 1e-2, 1e-3
    if adapted and train.adapters.base == "nf4":  # adapters are fp32
        return 1e-6, 1e-6, 1e-6
    if train.precision == "fp32":  # as a remedy asks for
        return 1e-6, 1e-6, 1e-6
    return 1e-12, 1e-12, 1e-12


def outcome(case):
    """What comes of a case: refused, equal or wrong, and the words of the error or the differences."""
    try:
        step.check_plan(case.model, case.train, case.mesh)
    except ValueError as error:
        return "refused", str(error)
    try:
        same, found = equal(case)
    except RankError as error:
        return "wrong", str(error).strip().partition("\n")[0]
    return (
        "equal" if same else "wrong",
        "weights {:.0e}, norm {:.0e}, loss {:.0e}, bytes {}".format(*found),
    )


def remedies(text):
    """What an error says to set instead, one change each: `zero=2, or tied=False`."""
    named = re.findall(r"(\w+)=('[^']*'|\w+)", text.rpartition(": ")[2])
    return [{name: ast.literal_eval(value)} for name, value in named]


def rows():
    """The table: the features of each case, and what comes of them."""
    with open(TABLE, encoding="utf-8", newline="") as file:
        return [(tuple(row["case"].split(JOIN)), row["outcome"]) for row in csv.DictReader(file)]


def pairs():
    """Each feature alone, and all pairs of two kinds."""
    both = itertools.combinations(FEATURES, 2)
    different = [pair for pair in both if FEATURES[pair[0]][0] != FEATURES[pair[1]][0]]
    return [*((name,) for name in FEATURES), *different]


def full(mine):
    """The parameters of a rank's stages by their names in the whole model."""
    for stage in mine.stages:
        if mine.train.zero == 3:
            with zero.gathered(stage):
                yield from [(n, p.detach().clone()) for n, p in stage.named_parameters()]
        else:
            yield from ((n, p.detach()) for n, p in stage.named_parameters())


def distance(one, two):
    """The largest difference, as a part of the largest number."""
    assert one.shape == two.shape, f"{tuple(one.shape)} is not {tuple(two.shape)}"
    one, two = one.double(), two.double()
    if not one.isfinite().all():
        return float("inf")
    return ((one - two).abs().max() / two.abs().max().clamp(min=1e-30)).item()
