"""A call is the call in which what it leaves out is named; with another value it is not."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from torch import nn

from labutils import (
    anatomy,
    checkpointing,
    clock,
    collectives,
    context_parallel,
    data_parallel,
    expert_parallel,
    flash,
    floats,
    ledger,
    lora,
    measure,
    memory,
    pipeline,
    planner,
    precision,
    predict,
    quantization,
    randomness,
    scaling,
    schedule,
    step,
    tensor_parallel,
    timeline,
    trace,
    units,
    zero,
)  # fmt: skip
from labutils.config import Adapters, Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.flash import fused
from labutils.model import GPT, Rotary, check_words, cross_entropy
from labutils.planner import climb, plans, proof, rates, stages, work
from labutils.predict import rehearsal
from labutils.world import World

SIZES = dict(num_layers=4, d_model=32, num_heads=4, d_ff=64, vocab_size=64, seq_len=32)
MODEL = ModelConfig(**SIZES)
EXPERTS = ModelConfig(**SIZES, ffn="swiglu", num_experts=4, top_k=2)
BATCH = dict(micro_batch=1, global_batch=8)
TRAIN = TrainConfig(**BATCH)
FULL = TrainConfig(**BATCH, precision="fp32")
H100, LINK = Hardware.named("H100"), Link(1e-6, 1e9)
JOB = planner.Job(model=MODEL, cluster=planner.Cluster(device=H100, nodes=1), batch_tokens=1024)
FULL_UP = planner.Job(  # it fits best where something is computed again
    model=ModelConfig.named("llama-3.1-8b"), cluster=JOB.cluster, batch_tokens=2**22
)
PLAN = planner.Plan(tp=2, pp=2, dp=2, micro_batches=4)
X = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
HEADS = torch.randn(3, 1, 4, 16, 8, generator=torch.Generator().manual_seed(1))
AGAIN = dataclasses.replace(PLAN, recompute=2)
LINK_OF_NOTHING = Link(0.0, 1e9)
ORDER = schedule.one_f_one_b(2, 4)
RATES = planner.Rates.of(H100)
MANY = X.repeat(8, 1)  # two blocks of states
TOKENS = torch.arange(32)[None] % 7
EIGHT = quantization.to_eight(X, torch.float8_e4m3fn)
PAST = torch.cat([X, 1e30 * X, 2e38 * X.sign()])  # and beyond the formats of 8 bits, and bf16


def on_ranks(fn, n=4):
    """What each of n ranks gets of a tensor of its own, of rows that they can share out."""
    with World(n) as world:
        return world.run(lambda rank: fn(X[:, :4] * (rank.rank + 1), rank.comm("dp")))


def collected(name, **options):
    return on_ranks(lambda x, comm: getattr(collectives, name)(x, comm, **options))


def asked(name, **options):
    return on_ranks(lambda x, comm: getattr(comm, name)(x, **options))


def in_a_world(mesh, program):
    """What each rank returns, and the messages that it has sent and received, in their order."""
    with World(mesh) as world:
        found = world.run(program)
        return found, [[(e.op, e.to, e.sent, e.source) for e in rank] for rank in world.trace.ranks]


def whole_words(build, mesh, axis, model=MODEL, backward=False):
    """What ranks make of the same sequence, after `build(model, comm)`."""

    def program(rank):
        net = build(GPT(model), rank.comm(axis))
        out = net(TOKENS)
        if backward:
            out.sum().backward()
        return out.detach()

    return in_a_world(mesh, program)


def after_a_step(**options):
    def program(rank):
        net = GPT(MODEL)
        optimizer = zero.Optimizer(net.parameters(), rank.comm("dp"), level=1, **options)
        net(TOKENS).sum().backward()
        optimizer.step()
        return net.head.weight.detach()

    return in_a_world(Mesh(dp=2), program)


def piped(**options):
    def program(rank):
        own = pipeline.local(pipeline.split(GPT(MODEL), 2), ORDER, rank.comm("pp").rank)
        pipeline.run(own, ORDER, rank.comm("pp"), [(TOKENS, TOKENS)] * 4, **options)

    return in_a_world(Mesh(pp=2), program)


def stepping(**options):
    def program(rank):
        mine = step.build(MODEL, TRAIN, rank.mesh)(rank)
        mine([(TOKENS, TOKENS)] * 8, **options)

    return in_a_world(Mesh(pp=2), program)


def shared_attention(way, **options):
    return in_a_world(Mesh(cp=2), lambda rank: way(*HEADS, rank.comm("cp"), **options))


def ask(plan):
    return planner.estimate(FULL_UP, plan)


def split_layer(kind, whole, **options):
    """What two ranks make of what they all have, or of its first tokens."""

    def program(rank):
        x = torch.arange(8)[None] if kind is tensor_parallel.VocabEmbedding else X[None, :, :4]
        return kind.from_full(whole, rank.comm("tp"), **options)(x).detach()

    return in_a_world(Mesh(tp=2), program)


def received(how, **options):
    """What arrives where there was something already."""

    def program(rank):
        comm, out = rank.comm("dp"), torch.ones(2)
        if how == "send_recv":
            return comm.send_recv(X[0, :2], 1 - comm.rank, out, 1 - comm.rank, **options)
        if comm.rank:
            return comm.send(X[0, :2], 0)
        comm.recv(out, 1, **options) if how == "recv" else comm.irecv(out, 1, **options).wait()
        return out

    return in_a_world(Mesh(dp=2), program)


def copied(**options):
    def program(rank):
        x = X.clone().requires_grad_()
        tensor_parallel.layers.copy_to(x, rank.comm("tp"), **options).sum().backward()
        return x.grad

    return in_a_world(Mesh(tp=2), program)


def refused(call, *given, **options):
    try:
        call(*given, **options)
    except (ValueError, IndexError):
        return True
    return False


def mean_losses(**options):
    def program(rank):
        logits = X[None, :4].repeat(1, 4, 1) * (rank.rank + 1)
        return context_parallel.mean_loss(logits, TOKENS, rank.comm("cp"), **options)

    return in_a_world(Mesh(cp=2), program)


def reserved(**options):
    """Bytes that an allocator reserves where a small block follows on a large one that was freed."""
    allocator = memory.Allocator(2**30, **options)
    allocator.free(allocator.alloc(2**26))
    allocator.alloc(2**22)
    return allocator.reserved


def blocks_of(**options):
    """The rows that a function is given at once, in one pass over the inputs."""
    seen = []
    fused.one_pass(lambda x: (seen.append(len(x)), x)[1], MANY, **options)
    return seen


def run_under(region):
    with region:
        return nn.functional.linear(X, X).dtype


def stepped_half(**options):
    weight = nn.Parameter(X.bfloat16())
    optimizer = precision.MasterWeights(torch.optim.SGD([weight], lr=0.1), **options)
    for _ in range(3):
        weight.grad = (weight.detach() / 3).bfloat16()
        optimizer.step()
    return weight.detach()


def stepped(make, steps=3):
    """A weight of 8192 elements after steps of an optimizer whose gradients change."""
    weight = nn.Parameter(X.repeat(4, 4))
    optimizer = make([weight])
    for i in range(steps):
        weight.grad = weight.detach() * 1e-8 * (1 + i)
        optimizer.step()
    return weight.detach()


def kept(**options):
    layer = quantization.use_fp8(nn.Sequential(nn.Linear(64, 8)), quantization.Scheme())
    for p in layer.parameters():
        p.data.fill_(0.5)
    optimizer = quantization.KeptAdam(layer, quantization.RECIPES["FP8-LM"], **options)
    for i in range(3):
        (layer(X) * 1e-8 * (1 + i)).sum().backward()
        optimizer.step()
    return layer(X).detach()


def scales(**options):
    """The loss scale before and after an overflow, and after as many steps as let it grow."""
    scaler, weight = precision.LossScaler(**options), nn.Parameter(torch.ones(1))
    optimizer, seen = torch.optim.SGD([weight], lr=0.0), [scaler.scale(torch.ones(())).item()]
    for i in range(2002):
        weight.grad = torch.full_like(weight, math.inf if i == 0 else 1.0)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i in (0, 1999, 2000):
            seen.append(scaler.scale(torch.ones(())).item())
    return seen


def adapted(**options):
    model = lora.adapt(GPT(MODEL), rank=2, alpha=4, **options)
    return [(name, p.shape) for name, p in model.named_parameters() if p.requires_grad]


def layer(**options):
    block = quantization.blocks.BlockLinear(
        nn.Linear(64, 64), floats.MXFP4, generator=torch.Generator().manual_seed(0), **options
    )
    x = X.repeat(4, 1).requires_grad_()
    block(x).square().sum().backward()
    return x.grad, block.weight.grad


def updated(**options):
    """The bias of a router after one rank's uneven tokens."""
    with World(1) as world:
        def program(rank):
            comm = rank.comm("ep")
            model = expert_parallel.spread_experts(GPT(EXPERTS), comm, biased=True)
            model(torch.zeros(1, 8, dtype=torch.long))
            expert_parallel.update_bias(model, comm, **options)
            return [b.clone() for name, b in model.named_buffers() if name.endswith("bias")]

        return world.run(program)[0]


TABLE = {
    # on one device
    anatomy.parts: (
        lambda **o: anatomy.parts(MODEL, **o),
        dict(how=(anatomy.Policy(), anatomy.Policy(compute=2))),
    ),
    anatomy.letters: (lambda **o: anatomy.letters(EXPERTS, **o), dict(tp=(1, 2), ep=(1, 2))),
    anatomy.Policy: (
        anatomy.Policy,
        dict(
            compute=(4, 2), stream=(4, 2), attention=("plain", "flash"),
            checkpointing=("none", "full"),
        ),
    ),
    checkpointing.overhead: (
        lambda **o: checkpointing.overhead(MODEL, "full", **o),
        dict(early_stop=(True, False)),
    ),
    checkpointing.Stage: (functools.partial(checkpointing.Stage, 1, 3, 1), dict(gradient=(3, 0))),
    checkpointing.Costs: (
        functools.partial(checkpointing.Costs, (), 1),
        dict(input_gradient=(0, 1)),
    ),
    checkpointing.Costs.uniform: (
        lambda **o: checkpointing.Costs.uniform(3, **o),
        dict(output=(1, 2), interior=(0, 1), gradient=(0, 1)),
    ),
    clock.Task: (
        lambda **o: clock.play([clock.Task(0, 1.0, kind="forward", **o)]).spans[0].rank,
        dict(rank=(0, 1)),
    ),
    flash.attention_flops: (
        lambda **o: flash.attention_flops(16, 8, **o),
        dict(heads=(1, 2), causal=(False, True), backward=(False, True)),
    ),
    flash.plain: (lambda **o: flash.plain(*HEADS, **o), dict(causal=(False, True))),
    flash.attention: (
        lambda **o: flash.attention(*HEADS, **o),
        dict(causal=(False, True), block_q=(None, 1), block_k=(None, 1)),
    ),
    flash.algorithms.problem_of: (
        lambda **o: flash.algorithms.problem_of(*HEADS, False, None, **o).tiling,
        dict(block_q=(None, 1), block_k=(None, 1)),
    ),
    flash.traffic: (
        lambda **o: flash.traffic("flash-1", s=300, d=64, **o).total,
        dict(
            block_k=(128, 64), heads=(1, 2), causal=(False, True), itemsize=(2, 4),
            stat_itemsize=(4, 2),
        ),
    ),
    "flash.traffic of a mask": (
        lambda **o: flash.traffic("flash-2", s=300, d=64, causal=True, **o).total,
        dict(block_q=(128, 64), whole_blocks=(False, True)),
    ),
    flash.counted: (
        lambda **o: flash.counted(*torch.randn(3, 1, 1, 300, 8), **o).total,
        dict(causal=(False, True), block_q=(128, 64)),
    ),
    "flash.counted under a mask": (
        lambda **o: flash.counted(*torch.randn(3, 1, 1, 300, 8), causal=True, **o).total,
        dict(block_k=(128, 256)),
    ),
    fused.passes: (
        lambda **o: fused.passes(fused.softmax, 64, 64, **o).total,
        dict(itemsize=(4, 2), fused=(False, True)),
    ),
    fused.one_pass: (blocks_of, dict(block=(None, 1))),
    fused.Roof.of: (lambda **o: fused.Roof.of(H100, **o), dict(dtype=("bf16", "fp32"))),
    floats.FloatFormat: (
        lambda **o: floats.FloatFormat("f", 4, 3, **o),
        dict(bias=(7, 8), nan=("ieee", "none"), signed=(True, False), zero=(True, False)),
    ),
    floats.FloatFormat.encode: (
        lambda **o: floats.E5M2.encode(1e9, **o),
        dict(overflow=("ieee", "saturate")),
    ),
    "encode a number between two": (
        lambda **o: floats.E4M3.encode(1.12, **o),
        dict(mode=("nearest", "zero")),
    ),
    floats.BlockFormat: (
        lambda **o: floats.BlockFormat("b", floats.E2M1, **o),
        dict(block_size=(32, 16), scale=(floats.E8M0, floats.E4M3)),
    ),
    ledger.Line: (
        lambda **o: ledger.Line("a", 1, **o),
        dict(component=("", "x"), axis=("", "x"), rank=(None, 0), count=(1, 2), note=("", "x")),
    ),
    ledger.Ledger.diff: (
        lambda **o: str(ledger.Ledger([ledger.Line("a", 1, "b")]).diff(ledger.Ledger(), **o)),
        dict(by=(None, "component")),
    ),
    lora.state: (
        lambda **o: list(lora.state(lora.adapt(GPT(MODEL), rank=1, alpha=1), **o)),
        dict(name=("default", "other")),
    ),
    lora.wrap: (
        lambda **o: list(lora.wrap(nn.Linear(2, 2), rank=1, alpha=1, **o).adapters),
        dict(name=("default", "other")),
    ),
    lora.trainable: (lambda **o: lora.trainable(MODEL, rank=2, **o), dict(pattern=("*", "*query"))),
    lora.training_flops: (
        lambda **o: lora.training_flops(MODEL, rank=2, **o),
        dict(pattern=("*", "*query")),
    ),
    lora.targets: (lambda **o: lora.targets(MODEL, **o), dict(pattern=("*", "*query"))),
    lora.adapt: (adapted, dict(pattern=("*", "*query"), name=("default", "other"))),
    memory.korthikanti: (
        lambda **o: memory.korthikanti(b=1, s=32, h=32, a=4, **o).total,
        dict(t=(1, 2), checkpointing=("none", "full")),
    ),
    "memory.korthikanti on two": (
        lambda **o: memory.korthikanti(b=1, s=32, h=32, a=4, t=2, **o).total,
        dict(sequence=(False, True)),
    ),
    memory.Allocator: (
        reserved,
        dict(max_split_size=(math.inf, 2**25), expandable_segments=(False, True)),
    ),
    Rotary: (lambda **o: list(Rotary(8, 4, **o).buffers()), dict(base=(10_000.0, 500_000.0))),
    check_words: (
        functools.partial(refused, check_words, "word", TOKENS * 0 - 1, 1), dict(ignored=(0, -1)),
    ),
    GPT: (
        lambda **o: measure.saved_activations(lambda: net(TOKENS), net).total
        if (net := GPT(MODEL, **o)) else 0,
        dict(attention=("plain", "sdpa")),
    ),
    measure.history: (
        lambda **o: measure.history(lambda: X + 1, nn.Linear(1, 1), **o).peak.ledger.total,
        dict(capacity=(None, 1)),
    ),
    memory.moments.by_formula: (
        lambda **o: memory.moments.by_formula(MODEL, FULL, **o).total,
        dict(mesh=(Mesh(), Mesh(dp=8))),
    ),
    "memory of adapters": (
        functools.partial(
            refused, memory.states.require_formula, MODEL,
            dataclasses.replace(FULL, adapters=Adapters(rank=1, alpha=1)),
        ),
        dict(adapters=(False, True)),
    ),
    cross_entropy: (
        lambda **o: cross_entropy(X, torch.arange(8), **o),
        dict(reduction=("mean", "sum")),
    ),
    randomness.dropout: (
        lambda **o: randomness.dropout(X, 0.5, **o),
        dict(training=(True, False)),
    ),
    # numbers of few bits
    precision.fate: (
        lambda **o: precision.fate({-20: 3, 0: 5}, "fp16", **o),
        dict(scale=(1.0, 1024.0)),
    ),
    precision.round_to: (
        lambda **o: precision.round_to(PAST, "fp16", **o),
        dict(mode=("nearest", "stochastic"), overflow=("ieee", "saturate")),
    ),
    precision.running_sum: (
        lambda **o: precision.running_sum(X, "bf16", **o),
        dict(mode=("nearest", "stochastic")),
    ),
    precision.autocast: (
        lambda **o: run_under(precision.autocast(**o)),
        dict(dtype=(torch.bfloat16, torch.float16), enabled=(True, False)),
    ),
    precision.LossScaler: (
        scales,
        dict(init_scale=(2.0**16, 2.0**15), dynamic=(True, False), growth_interval=(2000, 1999)),
    ),
    precision.MasterWeights: (
        lambda **o: stepped_half(**o), dict(fp32_gradients=(False, True)),
    ),
    quantization.hessian: (lambda **o: quantization.hessian(X, **o), dict(damping=(0.01, 0.1))),
    quantization.rotated: (
        lambda **o: quantization.rotated(torch.round, **o)(X),
        dict(seed=(0, 1)),
    ),
    quantization.error_feedback: (
        lambda **o: quantization.error_feedback(X, quantization.hessian(X), "int4", **o),
        dict(granularity=("row", "tensor")),
    ),
    quantization.tile_amax: (lambda **o: quantization.tile_amax(X, **o), dict(tile=(None, (1, 8)))),
    quantization.to_eight: (
        lambda **o: quantization.to_eight(X, torch.float8_e4m3fn, **o).codes.float(),
        dict(tile=(None, (1, 8))),
    ),
    quantization.product: (
        lambda **o: quantization.product(EIGHT, EIGHT, **o),
        dict(dtype=(torch.float32, torch.float64)),
    ),
    "what eight bits stand for": (
        lambda **o: EIGHT.numbers(**o),
        dict(dtype=(torch.float32, torch.float64)),
    ),
    quantization.Scheme: (
        quantization.Scheme,
        dict(
            forward=(torch.float8_e4m3fn, torch.float8_e5m2),
            backward=(torch.float8_e5m2, torch.float8_e4m3fn), scaling=("current", "delayed"),
            history=(16, 8),
        ),
    ),
    quantization.blocks.BlockLinear: (
        layer,
        dict(
            rotate=(False, True), operands=(("x", "weight", "grad"), ("grad",)),
            drawn=(("grad",), ()),
        ),
    ),
    quantization.to_blocks: (
        lambda **o: quantization.to_blocks(X.abs(), **o),
        dict(signed=(True, False), block=(2048, 256)),
    ),
    quantization.from_blocks: (
        lambda **o: quantization.from_blocks(quantization.to_blocks(MANY), MANY.shape, **o),
        dict(signed=(True, False), block=(2048, 1024)),
    ),
    quantization.Adam8: (
        lambda **o: stepped(functools.partial(quantization.Adam8, **o)),
        dict(
            lr=(1e-3, 1e-2), betas=((0.9, 0.999), (0.9, 0.95)), eps=(1e-8, 1e-7),
            weight_decay=(1e-2, 1e-1), block=(2048, 1024), smallest=(4096, 16384),
        ),
    ),
    quantization.KeptAdam: (
        kept,
        dict(
            lr=(1e-3, 1e-2), betas=((0.9, 0.95), (0.9, 0.999)), eps=(1e-8, 1e-7),
            weight_decay=(0.01, 0.1),
        ),
    ),
    quantization.nf4_bytes: (
        lambda **o: quantization.nf4_bytes(4096, **o),
        dict(double=(True, False)),
    ),
    quantization.to_nf4: (lambda **o: quantization.to_nf4(X, **o), dict(double=(True, False))),
    quantization.from_nf4: (
        lambda **o: quantization.from_nf4(quantization.to_nf4(X, **o), X.shape, X.dtype, **o),
        dict(double=(True, False)),
    ),
    quantization.quantize: (
        lambda **o: quantization.quantize(X, "int4", **o).dequantize(),
        dict(granularity=(None, "row"), affine=(False, True), clip=("", "mse")),
    ),
    quantization.quantized_bytes: (
        lambda **o: quantization.quantized_bytes((64, 64), "int4", **o).total,
        dict(granularity=(None, "row"), affine=(False, True)),
    ),
    quantization.StateFormats: (
        lambda **o: quantization.StateFormats("bf16", "bf16", "fp32", "fp32", **o),
        dict(master=("", "fp32"), summed=("", "fp32")),
    ),
    scaling.cosine: (lambda **o: scaling.cosine(9, 10, peak=1.0, **o), dict(end=(0.0, 0.1))),
    scaling.wsd: (lambda **o: scaling.wsd(9, 10, peak=1.0, decay=4, **o), dict(end=(0.0, 0.1))),
    units.whole: (lambda **o: units.whole(0, "n", **o), dict(minimum=(0, 1))),
    units.whole_fields: (
        lambda **o: units.whole_fields(PLAN, "cp", **o), dict(minimum=(1, 2)),
    ),
    units.writable: (
        lambda **o: units.writable(10**7, "are", "take fewer", **o), dict(most=(10**7, 10**7 - 1)),
    ),
    units.positive: (functools.partial(refused, units.positive, 0, "x"), dict(or_zero=(False, True))),
    units.positive_fields: (
        functools.partial(refused, units.positive_fields, LINK_OF_NOTHING, "latency"),
        dict(or_zero=(False, True)),
    ),
    units.wholes: (lambda **o: units.wholes(*o.values(), n=0), dict(minimum=(0, 1))),
    units.text: (
        lambda **o: units.text(2**21, **o),
        dict(unit=("B", "FLOP"), digits=(3, 4), binary=(False, True)),
    ),
    # models, trainings and their predictions
    ModelConfig: (
        lambda **o: ModelConfig(**SIZES, **o),
        dict(
            num_kv_heads=(4, 2), d_head=(8, 16), ffn=("gelu", "swiglu"),
            norm=("layernorm", "rmsnorm"), positions=("learned", "rope"), bias=(True, False),
            tied=(True, False), dropout=(0.0, 0.1), num_experts=(1, 2),
        ),
    ),
    "a model of experts": (
        lambda **o: ModelConfig(**SIZES, num_experts=4, **o),
        dict(top_k=(1, 2), shared_expert=(False, True), d_expert=(0, 16), dense_layers=(0, 1)),
    ),
    ModelConfig.flops_per_token: (MODEL.flops_per_token, dict(training=(True, False))),
    Adapters: (
        functools.partial(Adapters, rank=2, alpha=4),
        dict(pattern=("*", "*query"), base=("", "nf4")),
    ),
    TrainConfig: (
        lambda **o: TrainConfig(**BATCH, **o),
        dict(
            precision=("bf16", "fp32"), optimizer=("adamw", "sgd"), lr=(1e-3, 1e-2),
            clip=(None, 1.0), fp32_gradients=(False, True), attention=("plain", "sdpa"),
            layout=("zigzag", "contiguous"), sequence=(False, True), checkpointing=("none", "full"),
            schedule=("one_f_one_b", "gpipe"), chunks=(2, 3), frozen=((), ("head*",)),
            stepping=("loop", "foreach"), zero=(0, 1),
            bucket_bytes=(data_parallel.BUCKET_BYTES, 10**6), reshard=(True, False),
            prefetch=(True, False),
        ),
    ),
    Mesh: (Mesh, dict(pp=(1, 2), dp=(1, 2), cp=(1, 2), tp=(1, 2))),
    "a mesh of replicas": (functools.partial(Mesh, dp=2), dict(ep=(1, 2))),
    Hardware.rate: (H100.rate, dict(kind=("products", "attention"), fmt=("bf16", "fp8"))),
    Hardware.ring: (functools.partial(H100.ring, 16), dict(apart=(1, 8))),
    predict.states: (
        lambda **o: predict.states(MODEL, TRAIN, **o),
        dict(mesh=(Mesh(), Mesh(pp=2))),
    ),
    predict.peak_states: (
        lambda **o: predict.peak_states(MODEL, TRAIN, **o),
        dict(mesh=(Mesh(), Mesh(pp=2))),
    ),
    predict.sent: (lambda **o: predict.sent(MODEL, TRAIN, **o), dict(mesh=(Mesh(), Mesh(dp=2)))),
    predict.activations: (
        lambda **o: predict.activations(MODEL, TRAIN, **o),
        dict(mesh=(Mesh(), Mesh(pp=2))),
    ),
    predict.peak: (lambda **o: predict.peak(MODEL, TRAIN, **o), dict(mesh=(Mesh(), Mesh(pp=2)))),
    predict.time: (
        lambda **o: predict.time(MODEL, TRAIN, device=H100, **o).makespan,
        dict(mesh=(Mesh(), Mesh(pp=2))),
    ),
    **{
        f"{of.__name__} on two stages": (
            functools.partial(of, MODEL, TRAIN, Mesh(pp=2)), dict(rank=(0, 1)),
        )
        for of in (
            predict.states, predict.peak_states, predict.sent, predict.activations, predict.peak
        )
    },
    # ranks
    collectives.sent: (
        lambda **o: collectives.sent("all_reduce_ring", nbytes=40, n=3, **o),
        dict(itemsize=(4, 8), axis=("dp", "tp"), rank=(None, 0), name=(None, "mine")),
    ),
    collectives.held: (
        lambda **o: collectives.held("scatter_star", nbytes=40, n=3, **o),
        dict(itemsize=(4, 8)),
    ),
    **{
        f"{name} from one": (functools.partial(collected, name), dict(src=(0, 1)))
        for name in ("broadcast_star", "broadcast_tree", "scatter_star")
    },
    **{
        f"{name} to one": (functools.partial(collected, name), dict(dst=(0, 1)))
        for name in ("gather_star", "reduce_star", "reduce_tree")
    },
    **{
        f"{name} of sums": (functools.partial(collected, name), dict(op=("sum", "max")))
        for name in ("reduce_star", "reduce_tree", "reduce_scatter_ring", *collectives.ALL_REDUCES)
    },
    **{
        f"comm.{name}": (functools.partial(asked, name), named)
        for name, named in dict(
            all_reduce=dict(op=("sum", "max")), reduce_scatter=dict(op=("sum", "max")),
            broadcast=dict(src=(0, 1)), scatter=dict(src=(0, 1)), gather=dict(dst=(0, 1)),
            reduce=dict(dst=(0, 1), op=("sum", "max")),
        ).items()
    },
    context_parallel.layout: (
        lambda **o: context_parallel.layout(8, 2, **o),
        dict(kind=("zigzag", "contiguous")),
    ),
    context_parallel.SequenceLayout.split: (
        lambda **o: context_parallel.layout(8, 2, "zigzag").split(X[:, :8], 0, **o),
        dict(dim=(1, 0)),
    ),
    context_parallel.SequenceLayout.join: (
        lambda **o: context_parallel.layout(8, 2, "zigzag").join([X[:4, :4], X[4:, 4:8]], **o),
        dict(dim=(1, 0)),
    ),
    **{
        f"attention by a {way.__name__}": (
            functools.partial(shared_attention, way), dict(kind=("zigzag", "contiguous"))
        )
        for way in (context_parallel.ring_attention, context_parallel.ulysses_attention)
    },
    context_parallel.mean_loss: (mean_losses, dict(kind=("zigzag", "contiguous"))),
    context_parallel.distribute: (
        lambda **o: whole_words(
            lambda net, comm: context_parallel.distribute(net, comm, **o), Mesh(cp=2), "cp"
        ),
        dict(attention=("ring", "ulysses"), kind=("zigzag", "contiguous"), block=(None, 1)),
    ),
    data_parallel.replicate: (
        lambda **o: whole_words(
            lambda net, comm: data_parallel.replicate(net, comm, **o), Mesh(dp=2), "dp",
            backward=True,
        ),
        dict(bucket_bytes=(data_parallel.BUCKET_BYTES, 10_000)),
    ),
    expert_parallel.spread_experts: (
        lambda **o: whole_words(
            lambda net, comm: expert_parallel.spread_experts(net, comm, **o), Mesh(dp=2, ep=2),
            "ep", EXPERTS,
        ),
        dict(score=("softmax", "sigmoid"), capacity_factor=(None, 0.1)),
    ),
    tensor_parallel.parallelize: (
        lambda **o: whole_words(
            lambda net, comm: tensor_parallel.parallelize(net, comm, **o), Mesh(tp=2), "tp"
        ),
        dict(sequence=(False, True)),
    ),
    **{
        f"{kind.__name__}.from_full": (
            functools.partial(split_layer, kind, whole), dict(sequence=(False, True))
        )
        for kind, whole in (
            (tensor_parallel.ColumnLinear, nn.Linear(4, 8)),
            (tensor_parallel.RowLinear, nn.Linear(8, 4)),
            (tensor_parallel.VocabEmbedding, nn.Embedding(8, 4)),
        )
    },
    tensor_parallel.layers.copy_to: (copied, dict(name=("all_reduce backward", "mine"))),
    zero.shard: (
        lambda **o: whole_words(
            lambda net, comm: zero.shard(net, comm, **o), Mesh(dp=2), "dp", backward=True
        ),
        dict(
            reshard=(True, False), prefetch=(True, False), param_dtype=(None, torch.bfloat16),
            reduce_dtype=(None, torch.bfloat16),
        ),
    ),
    zero.Optimizer: (
        after_a_step,
        dict(
            make=(torch.optim.AdamW, torch.optim.SGD), reduce_dtype=(None, torch.bfloat16),
            bucket_bytes=(data_parallel.BUCKET_BYTES, 10_000),
        ),
    ),
    pipeline.run: (piped, dict(messages=("matched", "paired"))),
    "a step of a rank": (stepping, dict(messages=("matched", "paired"))),
    pipeline.keep: (
        lambda **o: [
            block is None for block in pipeline.keep(GPT(MODEL), ORDER, 0, **o).blocks
        ],
        dict(layers=(None, (1, 3))),
    ),
    rehearsal.program: (
        lambda **o: in_a_world(
            Mesh(pp=2), lambda rank: rehearsal.program(rank, MODEL, TRAIN, **o) and None
        ),
        dict(messages=("matched", "paired")),
    ),
    **{
        f"comm.{how}": (functools.partial(received, how), dict(reduce=(None, "sum")))
        for how in ("recv", "irecv", "send_recv")
    },
    context_parallel.least_tokens: (
        lambda **o: context_parallel.least_tokens(1e12, 1e9, **o),
        dict(groups=(1, 0.5), causal=(True, False)),
    ),
    context_parallel.ring_timeline: (
        lambda **o: context_parallel.ring_timeline(MODEL, 4, flops=1e9, link=LINK, **o).makespan,
        dict(kind=("zigzag", "contiguous"), overlap=(True, False)),
    ),
    data_parallel.buckets: (
        lambda **o: data_parallel.buckets([data_parallel.BUCKET_BYTES // 2] * 4, **o),
        dict(bucket_bytes=(data_parallel.BUCKET_BYTES, 10**6), itemsize=(4, 2)),
    ),
    data_parallel.backward_timeline: (
        lambda **o: data_parallel.backward_timeline(
            [(10**6, 1e-3)] * 4, bucket_bytes=10**6, n=4, link=LINK, **o
        ).makespan,
        dict(overlap=(True, False)),
    ),
    data_parallel.sampler: (
        lambda **o: list(data_parallel.sampler(16, 1, 2, **o)),
        dict(epoch=(0, 1), seed=(0, 1)),
    ),
    expert_parallel.update_bias: (updated, dict(rate=(0.001, 0.01))),
    expert_parallel.routed_sent: (
        lambda **o: expert_parallel.routed_sent(EXPERTS, [[[3] * 4] * 2] * 4, **o),
        dict(itemsize=(4, 2), rank=(None, 0)),
    ),
    expert_parallel.routed_timeline: (
        lambda **o: expert_parallel.routed_timeline(
            EXPERTS, [[64] * 4] * 2, flops=1e12, link=LINK, **o
        ).makespan,
        dict(itemsize=(2, 4), chunks=(1, 2)),
    ),
    expert_parallel.route: (
        lambda **o: expert_parallel.route(X[:, :4], 2, **o),
        dict(score=("softmax", "sigmoid"), capacity=(None, 1)),
    ),
    tensor_parallel.layer_shares: (
        lambda **o: tensor_parallel.layer_shares(MODEL, **o),
        dict(sequence=(False, True)),
    ),
    tensor_parallel.layer_timeline: (
        lambda **o: tensor_parallel.layer_timeline(MODEL, 2, link=LINK, flops=1e12, **o).makespan,
        dict(micro_batch=(1, 2), itemsize=(2, 4), pieces=(False, True)),
    ),
    zero.model_states: (
        lambda **o: zero.model_states(1000, 4, 0, **o),
        dict(K=(12, 8), gradient_bytes=(2, 4)),
    ),
    timeline.Span: (
        functools.partial(timeline.Span, 0, "F", "F0", 0.0, 1.0), dict(elements=(None, (0, 1)))
    ),
    trace.Event: (
        functools.partial(trace.Event, "send"),
        dict(
            axis=("", "dp"), to=(None, 1), sent=(0, 1), source=(None, 1), received=(0, 1),
            count=(1, 2),
        ),
    ),
    # pipelines
    schedule.bubble: (
        lambda **o: schedule.bubble("one_f_one_b", 2, 4, **o),
        dict(times=(None, schedule.Durations(2, 3, 2))),
    ),
    "bubble of zb_h2": (
        lambda **o: schedule.bubble("zb_h2", 2, 4, **o),
        dict(barrier=(True, False)),
    ),
    schedule.peak_in_flight: (
        lambda **o: schedule.peak_in_flight("interleaved", 4, 8, **o),
        dict(rank=(0, 1)),
    ),
    "peak_in_flight of breadth_first": (
        lambda **o: schedule.peak_in_flight("breadth_first", 2, 4, **o), dict(chunks=(1, 2)),
    ),
    schedule.Schedule.check: (lambda **o: ORDER.check(**o) and None, dict(cap=(None, 1))),
    schedule.why_illegal: (lambda **o: schedule.why_illegal(ORDER, **o), dict(cap=(None, 1))),
    schedule.whole_step: (
        lambda **o: schedule.whole_step(
            ORDER, [{"F": {"forward": 1}, "B": {"backward": 2}}] * 2, **o
        ).makespan,
        dict(send=(0, 1)),
    ),
    pipeline.messages.Action: (
        functools.partial(pipeline.messages.Action, "run", None), dict(peer=(None, 1))
    ),
    pipeline.actions: (
        lambda **o: pipeline.actions(ORDER, 0, **o), dict(messages=("matched", "paired"))
    ),
    pipeline.split: (
        lambda **o: [len(stage.blocks) for stage in pipeline.split(GPT(MODEL), 2, **o)],
        dict(layers=(None, (1, 3))),
    ),
    schedule.loop: (lambda **o: schedule.loop(4, **o), dict(chunks=(1, 2))),
    schedule.pipedream_2bw: (lambda **o: schedule.pipedream_2bw(2, 4, **o), dict(every=(2, 4))),
    schedule.interleaved: (lambda **o: schedule.interleaved(2, 4, **o), dict(chunks=(2, 3))),
    schedule.breadth_first: (lambda **o: schedule.breadth_first(2, 4, **o), dict(chunks=(2, 3))),
    schedule.interleaved_zb: (lambda **o: schedule.interleaved_zb(2, 4, **o), dict(chunks=(2, 3))),
    schedule.Schedule: (
        lambda **o: schedule.Schedule("s", ORDER.ranks, ORDER.places, 4, **o),
        dict(split=(False, True), every=(0, 2), buffered=(False, True)),
    ),
    schedule.Durations: (
        schedule.Durations,
        dict(F=(1, 2), B=(1, 2), W=(1, 2), O=(0, 1), fused=(None, 1.5)),
    ),
    schedule.simulate: (
        lambda **o: schedule.simulate(ORDER, **o).makespan,
        dict(
            times=(schedule.Durations(), schedule.Durations(2, 3, 1)), link=(None, Link(1.0, 1.0)),
        ),
    ),
    "schedule.simulate over a link": (
        lambda **o: schedule.simulate(ORDER, None, LINK, **o).makespan,
        dict(nbytes=(0, 10**9)),
    ),
    # the planner
    planner.Cluster: (
        functools.partial(planner.Cluster, device=H100, nodes=2),
        dict(gpus_per_node=(8, 4), reserve=(0.1, 0.2), price=(0.0, 1.0)),
    ),
    planner.Job: (
        functools.partial(planner.Job, model=MODEL, cluster=JOB.cluster),
        dict(batch_tokens=(2**24, 2**22), tokens=(0.0, 1e9), stack=("megatron", "course")),
    ),
    planner.Plan: (
        planner.Plan,
        dict(
            tp=(1, 2), cp=(1, 2), pp=(1, 2), dp=(1, 2), ep=(1, 2), micro_batch=(1, 2),
            micro_batches=(1, 2), schedule=(0, 1), chunks=(1, 2), zero=(1, 0), recompute=(0, 1),
            even=(False, True), modern=(True, False), gradient_bytes=(4, 2),
        ),
    ),
    plans.Estimate.mfu: (
        lambda **o: planner.estimate(JOB, planner.Plan(dp=8, micro_batches=4)).mfu(**o),
        dict(convention=("causal", "full")),
    ),
    planner.which_runs: (
        lambda **o: len(planner.which_runs(planner.measured()[:6], H100, **o)), dict(n=(5, 4)),
    ),
    climb.climb: (
        lambda **o: climb.climb(FULL_UP, ask, climb.start_of(FULL_UP), **o)[-1],
        dict(recompute=(climb.ALL, (0,))),
    ),
    planner.MeasuredStep: (
        functools.partial(planner.MeasuredStep, MODEL, PLAN, 1.0),
        dict(name=("", "x"), peaks=((None, None), (1.0, 1.0))),
    ),
    planner.calibrate: (
        lambda **o: planner.calibrate(planner.measured()[:6], H100, **o),
        dict(only=(rates.NAMES, rates.NAMES[:1])),
    ),
    stages.stage_states: (
        lambda **o: {
            name: np.sum(nbytes)
            for name, nbytes in stages.stage_states(
                EXPERTS, PLAN, stages.places(EXPERTS, PLAN), **o
            ).items()
        },
        dict(copies=(1, 2)),
    ),
    planner.Rates: (
        functools.partial(
            planner.Rates, products=1.0, attention=1.0, memory=1.0, link=1.0, kernel=1.0
        ),
        dict(overlap=(1.0, 0.5), unsure=({}, {"link": 0.1})),
    ),
    rates.critical_path: (
        lambda **o: rates.critical_path(MODEL, AGAIN, RATES, **o).total(RATES),
        dict(stack=("megatron", "course")),
    ),
    stages.ledger: (
        lambda **o: stages.ledger(MODEL, PLAN, **o),
        dict(rank=(0, 1), stack=("megatron", "course")),
    ),
    work.stage_layers: (
        lambda **o: work.stage_layers(dataclasses.replace(MODEL, vocab_size=4096), 2, **o),
        dict(even=(False, True)),
    ),
    proof.scaled: (
        lambda **o: proof.scaled(planner.Plan(dp=64, tp=8, pp=4, micro_batches=4), **o),
        dict(ranks=(8, 4)),
    ),
    proof.small: (
        lambda **o: proof.small(dataclasses.replace(MODEL, num_layers=12), **o),
        dict(layers=(4, 8)),
    ),
    plans.Found.best: (lambda **o: planner.search(JOB).best(**o), dict(n=(1, 2))),
}  # fmt: skip


def seeded(call, **named):
    """What a call returns where random numbers are always the same."""
    torch.manual_seed(0)
    return call(**named)


def said(call, **named):
    """What a call returns, or the error that it raises."""
    try:
        return seeded(call, **named)
    except (ValueError, IndexError, RuntimeError) as error:
        return str(error)


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(same, a, b))
    if dataclasses.is_dataclass(a) and not isinstance(a, type) and type(a) is type(b):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    "call, name, left_out, other",
    [
        pytest.param(call, name, *values, id=f"{getattr(of, '__qualname__', of)}-{name}")
        for of, (call, named) in TABLE.items()
        for name, values in named.items()
    ],
)
def test_what_is_left_out_is_the_default(call, name, left_out, other):
    plain = seeded(call)
    assert same(plain, seeded(call, **{name: left_out}))
    assert not same(plain, said(call, **{name: other})), "the row cannot tell"
