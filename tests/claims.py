"""What the checks of labutils/data/ ask for that is more than a call: long checks have a name here."""

import dataclasses
import os
import re
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from labutils import (
    checkpointing,
    collectives,
    config,
    data_parallel,
    flash,
    lora,
    measure,
    memory,
    planner,
    predict,
    quantization,
    scaling,
    schedule,
    tensor_parallel,
    world,
)
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.teach import rigs

ONE = TrainConfig(micro_batch=1, global_batch=1)


def llama_on_64_h100() -> planner.Job:
    """The job that lab 17 plans."""
    model = dataclasses.replace(ModelConfig.named("llama-3.1-70b"), seq_len=8192)
    cluster = planner.Cluster(device=config.Hardware.named("H100"), nodes=8)
    return planner.Job(model=model, cluster=cluster, batch_tokens=2**22)


def clock_ahead(latency: float = 1, **plan: int) -> float:
    """By how many percent lab 17's clock plays a plan longer than the formula says, where neither
    kernels nor memory take time and nothing hides; `latency` times that of the links."""
    job, replace = llama_on_64_h100(), dataclasses.replace
    bare, one = replace(job.rates, memory=1e30, kernel=1e-30, overlap=0), planner.Plan(**plan)
    path = planner.rates.critical_path(job.model, one, bare, job.cluster, stack="course")
    device = job.cluster.device
    for name in ("inside", "network"):
        link = getattr(device, name)
        device = replace(device, **{name: replace(link, latency=latency * link.latency)})
    played = predict.time(job.model, one.train(job.model), one.mesh, device=device).makespan
    return 100 * (1 - float(path.total(bare)) / played)


def winner_behind(shares: tuple[float, ...]) -> list[int]:
    """How many percent lab 17's winner is behind the fastest plan where this share hides messages."""
    job, found = llama_on_64_h100(), []
    winner = planner.search(job).fastest.plan
    for share in shares:
        less = dataclasses.replace(job, rates=dataclasses.replace(job.rates, overlap=share))
        best = planner.search(less).fastest.seconds
        found.append(round(100 * (planner.estimate(less, winner).seconds / best - 1)))
    return found


def loses_least_by_rates_and_shares() -> tuple[list[float], set[tuple[int, ...]]]:
    """Of the plans for lab 17's job the three that lose least, in percent, if each rate is off by a
    quarter, a kernel takes twice as long, or the network half as fast, at each of five shares of
    hidden messages; and their dp, tp, cp, pp and level of ZeRO."""
    job, ratios = llama_on_64_h100(), []
    rates, every, replace = job.rates, planner.search(job), dataclasses.replace
    changes: list[dict] = [{}, {"kernel": 2 * rates.kernel}]
    for name in planner.rates.NAMES[:4]:
        changes += [{name: by * getattr(rates, name)} for by in (0.75, 1.25)]
    jobs = [replace(job, rates=replace(rates, **change)) for change in changes]
    jobs.append(replace(job, cluster=replace(job.cluster, between=job.cluster.between / 2)))
    for each in jobs:
        for share in (0, 0.25, 0.5, 0.75, 1):
            found = planner.search(replace(each, rates=replace(each.rates, overlap=share)))
            ratios.append(found.seconds / found.fastest.seconds)
    loses = np.where(every.fits, np.max(ratios, axis=0) - 1, np.inf)
    least = loses.argsort(kind="stable")[:3]
    plans = [every.plans[int(i)] for i in least]
    return (
        [round(100 * float(loses[i]), 1) for i in least],
        {(plan.dp, plan.tp, plan.cp, plan.pp, plan.zero) for plan in plans},
    )


def peak_of_8192_tokens_on_16_ranks() -> float:
    """GB of Llama-3.1-8B at its fullest moment with ZeRO-3, in bf16: the peak of two layers, and the
    states and activations of thirty more."""
    train = TrainConfig(micro_batch=1, global_batch=16, attention="sdpa", zero=3)
    mesh, model = Mesh(dp=16), ModelConfig.named("llama-3.1-8b")
    whole, two = (dataclasses.replace(model, seq_len=8192, num_layers=n) for n in (32, 2))

    def kept(config: ModelConfig) -> int:
        asked = (config, train, mesh)
        return predict.states(*asked).total + predict.activations(*asked).total

    return round((predict.peak(two, train, mesh).total + kept(whole) - kept(two)) / 1e9, 1)


def _layer(**changes) -> dict[str, int]:
    """Korthikanti's lines for a layer over sbh, or over as²b where they grow with s²."""
    sizes = dict(b=1, s=64, h=1024, a=16)
    units = {"s²": 16 * 64 * 64, "": 64 * 1024}
    lines = memory.korthikanti(**sizes, **changes)
    return {line.name: line.amount // units["s²" * ("s²" in line.note)] for line in lines}


def feed_forward_sbh() -> int:
    """Bytes over sbh that a feed-forward layer keeps: its input, GELU's input and output, a mask.

    The input and the mask are one of two like them in the layer.
    """
    lines = _layer()
    shared = lines["inputs of attention and feed-forward"] + lines["dropout masks after them"]
    return shared // 2 + lines["input of GELU and its output"]


def attention_sbh_and_as2b() -> tuple[int, int]:
    """Bytes over sbh, and over as²b, that an attention layer keeps."""
    lines = _layer()
    linear = lines["inputs of attention and feed-forward"] + lines["dropout masks after them"]
    linear = linear // 2 + lines["queries, keys and values"]
    linear += lines["input of the output projection"]
    square = lines["softmax, and after dropout"] + lines["dropout mask of the scores"]
    return linear, square


def growth_with_length(d: int, **changes) -> tuple[float, float]:
    """A and B in A·s + B·s², the bytes of a layer with heads of width d, from two lengths."""
    h, a, s = 16 * d, 16, 64
    once, twice = (memory.korthikanti(b=1, s=n, h=h, a=a, **changes).total for n in (s, 2 * s))
    return (4 * once - twice) / (2 * s), (twice - 2 * once) / (2 * s * s)


def saved_by_grouping(name: str) -> float:
    """What grouped queries save of a model's activations, in % of 34sbh a layer."""
    model = ModelConfig.named(name)
    alike = dataclasses.replace(model, num_kv_heads=model.num_heads)
    saved = memory.activations(alike, ONE).total - memory.activations(model, ONE).total
    s, h, L = model.letters("s h L")
    return round(100 * saved / (34 * s * h * L), 1)


def bytes_per_parameter(name: str) -> float:
    """Bytes of one line of the model states of GPT-2 XL in bf16, for each parameter."""
    model = ModelConfig.named("gpt2-xl")
    return predict.states(model, ONE).by("name")[name] / model.num_params


def fp32_buffer_per_parameter() -> float:
    """Bytes for each parameter in an fp32 tensor as long as all half-precision gradients."""
    parameter = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    flat = torch.zeros_like(parameter, dtype=torch.float32)
    return flat.untyped_storage().nbytes() / parameter.numel()


def full_precision_bytes() -> float:
    """Bytes of weights, gradients and both moments for each parameter of GPT-2 XL in fp32; Adam's
    step counters, 4 bytes a tensor, are left out.
    """
    model = ModelConfig.named("gpt2-xl")
    train = TrainConfig(micro_batch=1, global_batch=1, precision="fp32")
    kinds = predict.states(model, train).by("name")
    named = ("weights", "gradients", "exp_avg", "exp_avg_sq")
    return sum(kinds[name] for name in named) / model.num_params


def largest_activation(n: int) -> float:
    """What one of n ranks keeps of the stream between two layers with sequence parallelism, over
    what one device keeps.
    """
    model, streams = ModelConfig.named("llama-3.1-8b"), []
    for ranks in (1, n):
        train = TrainConfig(micro_batch=2, global_batch=2, precision="fp32", sequence=ranks > 1)
        kept = predict.activations(model, train, Mesh(tp=ranks))
        streams.append(max(line.amount for line in kept if line.note == "input in fp32, sbh"))
    return streams[1] / streams[0]


def most_activations(micro_batches: int) -> int:
    """Bytes of activations at the fullest moment of a step that accumulates micro-batches of 2."""
    train = TrainConfig(micro_batch=2, global_batch=2 * micro_batches)
    step = memory.history(ModelConfig.named("gpt2"), train)
    return step.only("activations").peak.ledger.total


def plain_over_flash(s: int, d: int = 64) -> float:
    """How many times as much plain attention holds as flash attention, measured, beside q, k, v."""
    q, k, v = torch.randn(3, 1, 1, s, d, generator=torch.Generator().manual_seed(0))

    def held(attend: Callable, **blocks) -> int:
        alive = measure.peak(lambda: attend(q, k, v, **blocks), nn.Module())
        return alive.total - q.untyped_storage().nbytes()

    return held(flash.plain) / held(flash.attention, block_q=128, block_k=128)


def states_of_a_rank(level: int, ranks: int) -> int:
    """Bytes of GPT-2's model states on one of so many data-parallel ranks."""
    train = TrainConfig(micro_batch=1, global_batch=ranks, zero=level)
    return predict.states(ModelConfig.named("gpt2"), train, Mesh(dp=ranks)).total


def seconds_of_a_step(dp: int) -> float:
    """A step of 1,024 sequences on dp ranks: its micro-batches, and what the last leaves exposed."""
    layers, link = [(2**20, 0.01)] * 12, Link(1e-5, 1e10)
    backward = data_parallel.backward_timeline(layers, bucket_bytes=2**22, n=dp, link=link)
    micro_batches = TrainConfig(micro_batch=2, global_batch=1024).accumulation(dp)
    return micro_batches * 1.5 * backward.computed + backward.exposed


def replicas_agree(ranks: int = 4, batch: int = 2) -> bool:
    """Whether every rank has the gradient of the whole batch, each having seen a part of it."""
    x = torch.randn(ranks * batch, 3, generator=torch.Generator().manual_seed(0)).double()

    def gradient(x: torch.Tensor, comm: world.Comm | None = None) -> torch.Tensor:
        layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(layer.weight, 0.5)
        model = data_parallel.replicate(layer, comm) if comm else layer
        model(x).square().mean().backward()
        return layer.weight.grad

    parts, whole = x.split(batch), gradient(x)
    with world.World(ranks) as them:
        found = them.run(lambda rank: gradient(parts[rank.rank], rank.comm("dp")))
    return all(torch.allclose(each, whole) for each in found)


def server_steps(ranks: int = 4) -> dict[str, bool]:
    """A parameter server's step: do all devices get its model, does it get the gradients of all,
    and are its new weights those of one device with the whole batch?"""
    x = torch.randn(2 * ranks, 3, generator=torch.Generator().manual_seed(0)).double()
    models = []

    def gradient(w: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        w = w.detach().requires_grad_()
        (part @ w).square().mean().backward()
        return w.grad

    def step(rank: world.Rank) -> torch.Tensor | None:
        comm, drawn = rank.comm("dp"), torch.full((3,), 1.0 + rank.rank).double()
        w = collectives.broadcast_star(drawn, comm)
        models.append(w)
        total = collectives.reduce_star(gradient(w, x[rank.rank :: ranks]), comm)
        return None if total is None else w - total / ranks

    with world.World(ranks) as devices:
        server, *others = devices.run(step)
    ones = torch.ones(3).double()
    return {
        "one model": all(torch.equal(w, ones) for w in models) and len(models) == ranks,
        "the server steps": bool(torch.allclose(server, ones - gradient(ones, x))),
        "nobody else does": others == [None] * (ranks - 1),
    }


def processes_of(ranks: int) -> int:
    """How many processes so many ranks are."""
    with world.World(ranks, engine="processes") as them:
        return len(set(them.run(lambda rank: os.getpid())) - {os.getpid()})


def utilization(
    layers: int, width: int, heads: int, batch: int, seconds: float, gpus: int
) -> tuple[float, float]:
    """Model and hardware FLOPs utilization of A100s, in %, of a GPT with 2,048 tokens.

    The hardware's is Korthikanti's equation (8): all three passes of attention's products again.
    """
    model = ModelConfig(
        num_layers=layers, d_model=width, num_heads=heads, d_ff=4 * width, vocab_size=51200,
        seq_len=2048,
    )  # fmt: skip
    done = batch * model.seq_len * model.flops_per_token() / seconds
    used = 100 * done / (gpus * config.Hardware.named("A100").flops["bf16"])
    again = 3 * checkpointing.overhead(model, "selective", early_stop=False)
    return used, used * (1 + again)


def tensor_parallel_exposed(beside: int | None = None) -> tuple[int, ...]:
    """Percent of a layer's forward pass that no rank computes, or of a step with so many of the
    three messages of a backward half beside a product: Llama-3.1-70B, 8192 tokens, H100s, 8 in a
    node and 16 on eight rings across two."""
    model = dataclasses.replace(ModelConfig.named("llama-3.1-70b"), seq_len=8192)
    device, found = config.Hardware.named("H100"), []
    for n in (8, 16):
        layer = tensor_parallel.layer_timeline(model, n, device.ring(n), flops=device.rate())
        waits, works, message = layer.exposed, layer.makespan - layer.exposed, layer.exposed / 4
        if beside is not None:
            forward = [span for span in layer.spans if span.kind == "forward"]
            products = [forward[i].end - forward[i].start for i in (0, 3)]  # by columns
            late = sum(max(0.0, message - seconds) for seconds in products)
            waits, works = waits + 2 * (3 - beside) * message + beside * late, 3 * works
        found.append(round(100 * waits / (waits + works)))
    return tuple(found)


def zero_bubble(row: str) -> tuple[list[float], bool]:
    """Bubbles of 1F1B and ZB-H1 for a case of Qi et al., Table 5, if F, B and W take equally long;
    and whether what they measured is more than that, and falls from 1F1B to what was searched."""
    case, paper = rigs.pipeline.published_bubbles(row)
    p, m = (int(re.search(rf"\b{letter}=(\d+)", case)[1]) for letter in "pm")
    makers = schedule.one_f_one_b, schedule.zb_h1, schedule.zb_h2
    equal = [schedule.simulate(make(p, m)).period_bubble_fraction for make in makers]
    measured = [paper[name] for name in ("1F1B", "ZB-H1", "ZB-H2")]
    falls = all(a > b for a, b in zip(measured, [*measured[1:], paper["ZB-2p"]], strict=True))
    more = all(a > b for a, b in zip(measured, equal, strict=True)) and equal[2] == 0
    return [round(each, 4) for each in equal[:2]], falls and more


def sent_by_a_layer(sequence: bool, ranks: int = 4) -> dict[str, int]:
    """Bytes that a layer adds to what a tensor-parallel rank sends in a step, in fp32."""
    sizes = dict(d_model=64, num_heads=8, d_ff=256, vocab_size=64, seq_len=16)
    train = dataclasses.replace(ONE, precision="fp32", sequence=sequence)
    models = (ModelConfig(num_layers=L, **sizes) for L in (1, 2))
    one, two = (predict.sent(model, train, Mesh(tp=ranks)).by("name") for model in models)
    return {name: more for name in two if (more := two[name] - one.get(name, 0))}


def deepseek_v3(experts: int) -> int:
    """Parameters of DeepSeek-V3's main model, of which a token meets so many routed experts per
    layer: 256 for all of them. The bias that chooses experts is counted."""
    model = config.ModelConfig.named("deepseek-v3")
    layers, each = model.num_layers - model.dense_layers, 3 * model.d_model * model.d_expert
    return model.num_params + layers * (256 - (256 - experts) * each)


def _adapted() -> tuple[lora.LoraLinear, torch.Tensor]:
    torch.manual_seed(0)
    return lora.wrap(nn.Linear(6, 5).double(), rank=2, alpha=8), torch.randn(3, 6).double()


def lora_starts() -> tuple[str, str]:
    """Which of A and B has a gradient in the first step; what is learned where both are zero."""
    layer, x = _adapted()
    layer(x).square().sum().backward()
    factors = layer.adapters["default"]
    zero = not factors.A.grad.any() and factors.B.grad.any()
    nn.init.zeros_(factors.A)
    layer.zero_grad()
    layer(x).square().sum().backward()
    nothing = not factors.A.grad.any() and not factors.B.grad.any()
    return "A 0, B not" if zero else "other", "nothing" if nothing else "something"


def lora_begins() -> str:
    """The function at which fine-tuning begins."""
    layer, x = _adapted()
    return "pre-trained" if torch.equal(layer(x), layer.base(x)) else "another"


def lora_scale() -> float:
    """The factor before B·A·x at r = 2 and α = 8."""
    layer, x = _adapted()
    factors = layer.adapters["default"]
    nn.init.ones_(factors.B)
    added, low = layer(x) - layer.base(x), x @ factors.A.mT @ factors.B.mT
    return round((added / low).mean().item(), 9)


def lora_merges() -> bool:
    """Whether a merged layer computes the same to 1e-6, with the products of the layer alone."""
    layer, x = _adapted()
    nn.init.ones_(layer.adapters["default"].B)
    before, plain = layer(x), flash.fused.product_flops(lambda: layer.base(x))
    layer.merge()
    same = torch.allclose(layer(x), before, rtol=0, atol=1e-6)
    return same and flash.fused.product_flops(lambda: layer(x)) == plain


def lora_counts() -> tuple[str, str, str]:
    """What becomes of the parameters of a layer with an adapter."""
    layer, _ = _adapted()
    trained = sum(p.numel() for p in layer.parameters() if p.requires_grad)
    every = sum(p.numel() for p in layer.parameters())
    whole = tuple(layer.base.weight.shape) == (5, 6)
    return (
        "W whole" if whole else "W cut",
        "trained fewer" if trained < 5 * 6 else "trained more",
        "all more" if every > 5 * 6 + 5 else "all fewer",
    )


def lora_learns() -> tuple[list[int], bool]:
    """The range of LoRA's best learning rate over that of full fine-tuning, in both recorded
    sweeps; and whether, on text, full fine-tuning has learned more where it has forgotten no more
    than LoRA, up to the best rate of each."""
    both = [rigs.lora.sweep(task) for task in ("addition", "text")]
    times = [
        runs.best(rank=r)[0] / runs.best(rank="full")[0] for runs in both for r in ("1", "4", "16")
    ]
    forgotten, learned = both[1].traded(rank="full")
    more = all(
        max(mine for mine, cost in zip(learned, forgotten, strict=True) if cost <= lost) > gained
        for r in ("1", "4", "16")
        for lost, gained in zip(*both[1].traded(rank=r), strict=True)
    )
    return [round(min(times)), round(max(times))], more


def lora_with_alpha_8r(rank: str) -> list[float]:
    """By how many nats LoRA of rank 1 or 16 ends lower with α = 8r than with 32, seed by seed, each
    at its best rate: three seeds have both."""
    ends = []
    for task, more in (("addition", {}), ("alpha", {"alpha": str(8 * int(rank))})):
        runs, wanted = rigs.lora.sweep(task), {"rank": rank, **more}
        rates, losses = runs.losses(**wanted)
        place = rates.index(runs.best(**wanted)[0])
        ends.append([of_seed[place] for of_seed in losses])
    return [usual - larger for usual, larger in zip(*ends, strict=False)]


def _kashin(pairs: int, trained: bool = False) -> tuple[torch.Tensor, ...]:
    """x, Q, u, v and the rests: x is Gaussian, or a row of trained weights."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(1024, generator=draw, dtype=torch.float64)
    if trained:
        x = rigs.quantization.load_minilm().layers[0].up.weight[0].double()
    Q = quantization.rotation(len(x), 0).double()
    return (x, Q, *quantization.kashin(x, Q, pairs))


def kashin_first_step() -> float:
    """The norm that one greedy step leaves of a Gaussian vector of 1,024 numbers."""
    x, _, u, *_ = _kashin(1)
    return ((x - u).norm() / x.norm()).item()


def kashin_rests(trained: bool = True) -> list[float]:
    """The norm that each of twenty pairs of steps leaves."""
    return _kashin(20, trained)[-1]


def kashin_parts() -> bool:
    """Whether x is the *sum* of u and Q·v, and both are flat: no number above half of x's largest."""
    x, Q, u, v, _ = _kashin(20)
    flat = max(u.abs().max(), v.abs().max()) < x.abs().max() / 2
    return bool(flat) and torch.allclose(u + Q @ v, x, rtol=0, atol=1e-5)


def rates_of_90_epochs() -> list[float]:
    """Goyal's learning rates at 8k images: a tenth from epochs 30, 60 and 80 on."""
    peak = scaling.scale_lr(0.1, 32, "linear")
    optimizer = torch.optim.SGD([torch.zeros(1)], peak)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60, 80])
    rates = []
    for _ in range(90):
        rates.append(round(schedule.get_last_lr()[0], 9))
        optimizer.step()
        schedule.step()
    return list(dict.fromkeys(rates))


def momentum_correction() -> float:
    """What a velocity of steps is multiplied by when 0.1 becomes 3.2, for SGD to go where torch's
    goes, whose velocity holds gradients."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    absorbed, before = -weight.item(), weight.item()
    weight.grad = torch.zeros_like(weight)
    optimizer.param_groups[0]["lr"] = scaling.scale_lr(0.1, 32, "linear")
    optimizer.step()
    return round((before - weight.item()) / (0.9 * absorbed), 9)


def small_steps_are_a_large_one(k: int = 32) -> float:
    """How far k steps and one with k times the rate end from each other, along one gradient."""
    gradient = torch.arange(5, dtype=torch.float64)
    ends = []
    for rate, steps in ((0.1, k), (scaling.scale_lr(0.1, k, "linear"), 1)):
        weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        optimizer = torch.optim.SGD([weight], rate)
        for _ in range(steps):
            weight.grad = gradient
            optimizer.step()
        ends.append(weight.detach())
    return (ends[0] - ends[1]).abs().max().item()


def busiest_experts() -> tuple[float, ...]:
    """Visits of the busiest expert over the mean, at the end of recorded runs: left alone, with
    equally frequent words, without what all rows share, and with a balance loss."""
    ways = ("nothing", "words equally frequent", "rows centered", "α = 0.1")
    found = [rigs.expert_parallel.ends(way, "busiest") for way in ways]
    return tuple(round(sum(each) / len(each), 1) for each in found)


def busiest_by_lot(seeds: int = 8, draws: int = 50) -> float:
    """Visits of the busiest of eight experts over the mean, in a first batch of the language of
    `train_router`, if every word keeps to two experts drawn by lot."""
    draw, found = torch.Generator().manual_seed(0), []
    for seed in range(seeds):
        words = rigs.expert_parallel.language(16, 33, seed)(8)[:, :-1].flatten()
        for _ in range(draws):
            pairs = torch.rand(16, 8, generator=draw).topk(2).indices
            visits = torch.bincount(pairs[words].flatten(), minlength=8)
            found.append(visits.max().item() / visits.double().mean().item())
    return round(sum(found) / len(found), 1)


TWELVES = ModelConfig(num_layers=2, d_model=12, num_heads=2, d_ff=24, vocab_size=12, seq_len=12)


def zero_step(level: int, n: int, **how) -> tuple[int, dict[str, int], dict[str, int]]:
    """Elements of a model in fp32 that 2, 3, 4 and 8 ranks deal out without padding, and what a
    rank of ZeRO sends of them in a step and holds at its fullest, in bytes by name."""
    train = TrainConfig(micro_batch=1, global_batch=n, precision="fp32", zero=level, **how)
    sent, held = (ask(TWELVES, train, Mesh(dp=n)) for ask in (predict.sent, predict.peak_states))
    return TWELVES.num_params, sent.by("name"), held.by("name")


def zero_sends(level: int, *, micro_batches: int = 1, **how) -> float:
    """How many times Ψ·(N − 1)/N elements a rank of ZeRO sends in a step, gradients and weights."""
    batch = dict(micro_batch=1, global_batch=4 * micro_batches)
    train = TrainConfig(**batch, precision="fp32", zero=level, **how)
    sent = predict.sent(TWELVES, train, Mesh(dp=4))
    names = ("gradients", "all_gather", "reduce_scatter")
    return sum(sent.only(name=name).total for name in names) / (3 * TWELVES.num_params)


def adams_rate_grows() -> tuple[float, float, float]:
    """How many times Adam's best rate grows from a batch of 16 to 512, by the record, and the middle
    95 % of that if seeds are drawn again and again."""
    found = {
        batch: rigs.scaling._values("finer", "lr", {"optimizer": "adam", "batch": batch})
        for batch in (16, 512)
    }
    rng = np.random.default_rng(0)

    def grows(seeds: np.ndarray) -> float:
        small, large = (
            rigs.scaling.lowest({
                lr: rigs.scaling.mean(np.array(each)[seeds].tolist()) for lr, each in of.items()
            })
            for of in found.values()
        )  # fmt: skip
        return large / small

    drawn = sorted(grows(rng.integers(0, 30, 30)) for _ in range(1000))
    return tuple(round(each, 1) for each in (grows(np.arange(30)), drawn[25], drawn[975]))
