"""Formulas refuse what is out of their range, by the name of the argument; numbers of numpy are
numbers."""

import dataclasses
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from labutils import (
    accumulation,
    anatomy,
    checkpointing,
    clock,
    collectives,
    config,
    context_parallel,
    data_parallel,
    expert_parallel,
    flash,
    floats,
    huggingface,
    ledger,
    lora,
    memory,
    model,
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
    trace,
    units,
    zero,
)
from labutils.model import GPT
from labutils.timeline import Span, Timeline
from labutils.world import RankError, World

ROOT = pathlib.Path(__file__).resolve().parents[1]
LINK = config.Link(1e-6, 1e9)
MODEL = config.ModelConfig(
    num_layers=2, d_model=8, num_heads=2, d_ff=16, vocab_size=8, seq_len=4
)  # fmt: skip
TRAIN = config.TrainConfig(micro_batch=1, global_batch=4, zero=1)
RING = "all_reduce_ring"
CHAIN = checkpointing.Costs.uniform(4)


def micro_batches(size):
    return accumulation.micro_batches(torch.arange(4), size)


def states(rank):
    return predict.states(MODEL, TRAIN, config.Mesh(dp=4), rank)


def buckets(size, bucket_bytes, itemsize):
    return data_parallel.buckets([8, size], bucket_bytes, itemsize=itemsize)


def timeline(seconds, bucket_bytes, n):
    layers = [(8, seconds)] * 2
    return data_parallel.backward_timeline(layers, bucket_bytes=bucket_bytes, n=n, link=LINK)


def order_timeline(seconds, n):
    return zero.step_timeline(zero.unit_order(1), [(8, seconds)], n=n, link=LINK)


def layers_of_stages(layers):
    return config.TrainConfig(micro_batch=1, global_batch=1, layers=(layers, layers))


def flops_of_stages(layers):
    return pipeline.stage_flops(MODEL, (layers, 0))


def cluster(**options):
    return planner.Cluster(device=config.Hardware.named("H100"), **options)


def job(**options):
    return planner.Job(model=MODEL, cluster=cluster(nodes=1), **options)


def fit(batch, steps):
    """A numpy.uint8 of 200 times one of 200 is 64."""
    return scaling.fit({batch: steps, 100: 57})


def named(fn, *args):
    """A function of its other arguments, which stand by name."""
    return lambda **options: fn(*args, **options)


def row(fn, **options):
    """A formula, and for each argument a good value and its range: "1" and "0" are whole numbers
    from there on, "+" are numbers above 0 and "0+" from 0 on."""
    name = getattr(fn, "__name__", "")
    return SimpleNamespace(fn=fn, name=name, options=options)


TABLE = {
    "zero.model_states": row(
        named(lambda **o: zero.model_states(level=1, **o)),
        num_params=(100, "+"), n=(4, "1"), K=(12, "0"), gradient_bytes=(2, "0"),
    ),
    "zero.level": row(lambda level: zero.model_states(100, 4, level), level=(1, "0")),
    "zero.partition": row(zero.partition, numel=(10, "1"), n=(4, "1")),
    "zero.bounds": row(zero.partition(10, 4).bounds, rank=(0, "0")),
    "zero.unit_order": row(zero.unit_order, num_units=(3, "1")),
    "zero.step_timeline": row(order_timeline, seconds=(1.0, "0+"), n=(2, "1")),
    "memory.step_peak": row(
        memory.step_peak, step=(1, "1"), micro_batches=(1, "1"), weights=(4, "0"), state=(8, "0"),
        working=(30, "0"), temporary=(4, "0"),
    ),
    "predict.states": row(states, rank=(1, "0")),
    "accumulation.tokens_per_step": row(
        accumulation.tokens_per_step, micro_batch=(1, "1"), accumulation=(2, "1"), dp=(1, "1"),
        seq_len=(4, "1"),
    ),
    "accumulation.micro_batches": row(micro_batches, size=(2, "1")),
    "checkpointing.segments": row(checkpointing.segments, n=(4, "1"), k=(2, "1")),
    "checkpointing.binomial": row(checkpointing.binomial, n=(4, "1"), snapshots=(2, "1")),
    "checkpointing.evaluations": row(
        checkpointing.binomial_evaluations, n=(4, "1"), snapshots=(2, "1")
    ),
    "checkpointing.uniform": row(checkpointing.Costs.uniform, n=(4, "1")),
    "checkpointing.Stage": row(
        checkpointing.Stage,
        forward=(2.5, "0+"), output=(3, "0"), interior=(3, "0"), gradient=(3, "0"),
    ),
    "checkpointing.Costs": row(
        named(checkpointing.Costs, [checkpointing.Stage(1, 1, 0)]), input=(3, "0"), input_gradient=(3, "0")
    ),
    "checkpointing.plan": row(named(checkpointing.plan, CHAIN), budget=(100, "0")),
    "collectives.sent": row(
        named(collectives.sent, RING), nbytes=(64, "0"), n=(4, "1"), itemsize=(4, "1"),
        rank=(1, "0"),
    ),
    "collectives.held": row(
        named(collectives.held, RING), nbytes=(64, "0"), n=(4, "1"), itemsize=(4, "1")
    ),
    "collectives.steps": row(named(collectives.steps, RING), n=(4, "1")),
    "collectives.cost": row(
        named(lambda **o: collectives.cost(RING, link=LINK, **o)), nbytes=(64, "0+"), n=(4, "1")
    ),
    "collectives.crossover": row(
        lambda n: collectives.crossover(RING, "all_reduce_tree", n, LINK), n=(4, "1")
    ),
    "collectives.busbw": row(
        named(collectives.busbw, "all_reduce"), nbytes=(64, "0+"), seconds=(1.0, "+"), n=(4, "1")
    ),
    "data_parallel.buckets": row(
        buckets, size=(8, "0"), bucket_bytes=(16, "1"), itemsize=(4, "1")
    ),
    "data_parallel.backward_timeline": row(
        timeline, seconds=(1.0, "0+"), bucket_bytes=(16, "1"), n=(2, "1")
    ),
    "data_parallel.sampler": row(
        data_parallel.sampler, length=(10, "0"), rank=(0, "0"), size=(4, "1"), epoch=(0, "0"),
        seed=(0, "0"),
    ),
    "flash.attention_flops": row(
        flash.attention_flops, s=(8, "1"), d=(4, "1"), heads=(2, "1")
    ),
    "flash.block_sizes": row(flash.block_sizes, fast=(1000, "1"), d=(8, "1")),
    "flash.traffic": row(
        named(flash.traffic, "flash-2"), s=(8, "1"), d=(4, "1"), block_q=(4, "1"),
        block_k=(4, "1"), heads=(2, "1"), itemsize=(2, "1"), stat_itemsize=(4, "1"),
    ),
    "flash.passes": row(
        named(flash.passes, flash.softmax), rows=(4, "1"), width=(4, "1"), itemsize=(4, "1")
    ),
    "flash.time": row(flash.Roof("a roof", 1.0, 1.0).time, flops=(2.0, "0+"), nbytes=(1.0, "0+")),
    "scaling.seconds": row(
        named(scaling.Hyperbola(1.0, 2.0).seconds, 4), devices=(2, "+"), example=(1.0, "0+"),
        reduce=(1.0, "0+"),
    ),
    "flash.Roof": row(named(flash.Roof, "a roof"), flops=(1e9, "+"), bandwidth=(1e9, "+")),
    "scaling.warm_up": row(
        scaling.warm_up, step=(1, "0"), steps=(4, "0"), start=(0.5, "0+"), end=(1.0, "0+")
    ),
    "scaling.cosine": row(
        scaling.cosine, step=(1, "0"), steps=(4, "1"), peak=(1.0, "0+"), end=(0.1, "0+")
    ),
    "scaling.wsd": row(
        scaling.wsd, step=(1, "0"), steps=(4, "1"), peak=(1.0, "0+"), end=(0.1, "0+"),
        decay=(1, "1"),
    ),
    "pipeline.stage_flops": row(flops_of_stages, layers=(2, "0")),
    "schedule.simulate": row(
        named(schedule.simulate, schedule.gpipe(2, 2), None, LINK), nbytes=(8.0, "0+")
    ),
    "schedule.gpipe": row(schedule.gpipe, p=(2, "1"), m=(2, "1")),
    "schedule.interleaved": row(schedule.interleaved, p=(2, "1"), m=(2, "1"), chunks=(2, "1")),
    "schedule.bubble": row(named(schedule.bubble, "gpipe"), p=(2, "1"), m=(2, "1")),
    "pipeline.cut": row(named(pipeline.cut, MODEL), n=(2, "1")),
    "tensor_parallel.rank_config": row(named(tensor_parallel.rank_config, MODEL), n=(2, "1")),
    "context_parallel.layout": row(context_parallel.layout, s=(8, "1"), n=(2, "1")),
    "expert_parallel.capacity": row(
        expert_parallel.capacity, tokens=(100, "0"), num_experts=(2, "1"), k=(3, "1"),
        factor=(1.25, "+"),
    ),
    "quantization.nf4_bytes": row(quantization.nf4_bytes, numel=(64, "1")),
    "quantization.Adam8": row(
        lambda **options: quantization.Adam8(NET.parameters(), **options).defaults,
        lr=(0.5, "0+"), eps=(0.5, "0+"), weight_decay=(0.5, "0+"), block=(64, "1"),
        smallest=(4096, "0"),
    ),
    "memory.korthikanti": row(
        memory.korthikanti, b=(2, "1"), s=(4, "1"), h=(8, "1"), a=(2, "1"), t=(1, "1")
    ),
    "Hardware.ring": row(config.Hardware.named("H100").ring, n=(8, "1"), apart=(2, "1")),
    "config.accumulation": row(TRAIN.accumulation, dp=(2, "1")),
    "config.coords": row(config.Mesh(dp=4).coords, rank=(0, "0")),
    "config.Link": row(config.Link, latency=(1e-6, "0+"), bandwidth=(1e9, "+")),
    "config.Adapters": row(config.Adapters, rank=(2, "1"), alpha=(4.0, "+")),
    "config.TrainConfig": row(
        config.TrainConfig, micro_batch=(1, "1"), global_batch=(8, "1"), lr=(0.5, "+"),
        clip=(1.0, "+"),
    ),
    "config.layers": row(layers_of_stages, layers=(2, "0")),
    "planner.Cluster": row(
        cluster, nodes=(2, "1"), gpus_per_node=(8, "1"), between=(50.0, "+"), price=(2.0, "0+"),
    ),
    "planner.Job": row(
        job, batch_tokens=(64, "1"), tokens=(1000.0, "0+")
    ),
    "scaling.fit": row(fit, batch=(200, "+"), steps=(50, "+")),
    "floats.FloatFormat": row(
        named(floats.FloatFormat, "fp32"), exponent_bits=(8, "1"), mantissa_bits=(23, "0")
    ),
    "units.text": row(named(units.text, 10.0), digits=(3, "1")),
    "ledger.Line": row(named(ledger.Line, "weights", 8), count=(1, "0")),
    "ledger.scaled": row(ledger.Ledger([ledger.Line("weights", 8)]).scaled, factor=(2, "0")),
}  # fmt: skip
OUT = {  # of each range; True is no number, and text is none either
    "1": (0, -1, 1.5, math.nan, True, "2"),
    "0": (-1, 1.5, math.nan, True, "2"),
    "+": (0, -1, math.nan, math.inf, True, "2"),
    "0+": (-1, math.nan, math.inf, True, "2"),
}

LEAST = {"1": 1, "0": 0, "0+": 0}


def good_ones(name):
    return {key: value for key, (value, _) in TABLE[name].options.items()}


def check_refused(name):
    formula, good = TABLE[name], good_ones(name)
    formula.fn(**good)
    for key, (_, kind) in formula.options.items():
        check_least(formula, good, key, kind)
        for bad in OUT[kind]:
            with pytest.raises((ValueError, TypeError)) as error:
                formula.fn(**good | {key: bad})
            assert key in str(error.value) and str(bad) in str(error.value), (key, bad)


def check_least(formula, good, key, kind):
    """The least number of a range is in it, even where others forbid it, as rank 1 does n=1."""
    if kind in LEAST:
        try:
            formula.fn(**good | {key: LEAST[kind]})
        except ValueError as error:
            assert f"{key} must be" not in str(error), error


def narrow(number):
    """It in numpy's smallest type that holds it: np.uint8(1) - 2 and 300 / np.float16(0.1) are not
    what they are in Python."""
    kind = np.min_scalar_type(number).type
    return kind(number) if float(kind(number)) == number else np.float64(number)


def check_numpy(name):
    """The answer is the same, of the same types."""
    good = good_ones(name)
    numpys = {key: narrow(number) for key, number in good.items()}
    found, wanted = (repr(TABLE[name].fn(**each)) for each in (numpys, good))
    assert found == wanted, (found, wanted)


def test_what_is_checked_is_what_is_computed_with():
    """A numpy.int8 or float16 that is only checked overflows later: the number of Python that the
    check returns goes on."""
    thrown_away = re.compile(r"^ *(?:if )?(?:units\.)?(?:_?whole|wholes|positive)\(", re.MULTILINE)
    sources = [path for path in (ROOT / "labutils").rglob("*.py") if "teach" not in path.parts]
    assert [path.name for path in sources if thrown_away.search(path.read_text())] == []


@pytest.mark.parametrize("name", TABLE)
def test_what_is_out_of_range_is_refused_by_name(name):
    check_refused(name)


def test_the_same_where_no_annotation_is_enforced_and_numbers_of_numpy_are_numbers():
    """As a learner has it: in here jaxtyping refuses some of it before we can."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    finished = subprocess.run(
        [sys.executable, __file__],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0 and not finished.stdout, finished.stdout + finished.stderr


@pytest.mark.parametrize(
    "name",
    [
        "zero.bounds", "predict.states",
        "collectives.sent", "config.coords", "data_parallel.sampler",
    ],
)  # fmt: skip
def test_a_rank_beyond_the_last_is_refused(name):
    with pytest.raises(ValueError, match="rank 4 .*use 0 … 3"):
        TABLE[name].fn(**good_ones(name) | {"rank": 4})


NET = GPT(MODEL)
LOGITS = torch.zeros(2, 3)


def deep(layers):
    return dataclasses.replace(MODEL, num_layers=layers)


EXPERTS = dataclasses.replace(MODEL, num_experts=2)


def routed(**wrong):
    how = dict(flops=1.0, link=LINK) | wrong
    return expert_parallel.routed_timeline(EXPERTS, [[4, 0], [2, 2]], **how)


def one_op(*op):
    return schedule.Schedule("mine", ((schedule.Op(*op),),), ((0,),), 1)


TIRED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: huggingface.from_hf("/none/here"), ValueError, "there is no file 'here' at that path: give the path"),
    (lambda: huggingface.from_hf(None), TypeError, "takes a path or a dictionary, got None"),
    (lambda: checkpointing.checkpoint(None), TypeError, "checkpoint takes a Callable, got None (NoneType): a module"),
    (lambda: clock.Task(0, "F", -1.0), TypeError, "seconds must be a number, got 'F'"),
    (lambda: clock.Task(0, -1.0), ValueError, "seconds must be a finite number of at least 0, got -1.0"),
    (lambda: clock.Task(0, 1.0, -1.0), TypeError, "after of a Task takes a Sequence, got -1.0"),
    (lambda: clock.play(None), TypeError, "play takes an Iterable, got None"),
    (lambda: ledger.Ledger(None), TypeError, "Ledger takes an Iterable, got None"),
    (lambda: NET(None), TypeError, "GPT takes a Tensor, got None (NoneType): torch.tensor(…) is one"),
    (lambda: NET(torch.zeros(1, 2)), ValueError, "GPT takes tokens (b, s) of int64 or int32, got torch.float32 of shape (1, 2): convert"),
    (lambda: NET(torch.arange(3)), ValueError, "got torch.int64 of shape (3,)"),
    (lambda: NET(torch.zeros(1, 0).long()), ValueError, "got torch.int64 of shape (1, 0)"),
    (lambda: expert_parallel.update_bias(NET, None), TypeError, "update_bias takes a Comm, got None"),
    (lambda: expert_parallel.route(LOGITS, None), TypeError, "k must be a whole number, got None"),
    (lambda: expert_parallel.route(LOGITS, 1.5), TypeError, "k must be a whole number, got 1.5"),
    (lambda: expert_parallel.balance_loss(None), TypeError, "balance_loss takes a Routing, got None"),
    (lambda: flash.attention(None, None, None), TypeError, "attention takes a Tensor, got None"),
    (lambda: anatomy.parts(None), TypeError, "parts takes a ModelConfig, got None (NoneType): ModelConfig.named(…) is one"),
    (lambda: precision.exponents(None), TypeError, "exponents takes an Iterable, got None"),
    (lambda: precision.exponents([None]), TypeError, "the list of exponents takes a Tensor, got None"),
    (lambda: precision.fate(None, "e4m3"), TypeError, "fate takes a Mapping, got None"),
    (lambda: units.text(None), TypeError, "text takes a number, got None (NoneType)"),
    (lambda: accumulation.micro_batches(torch.tensor(1.0), 1), ValueError, "a tensor of shape (), which has no rows: unsqueeze(0) it"),
    (lambda: accumulation.accumulate(lambda x: 3.0, [torch.ones(2)]), TypeError, "the sum of losses takes a Tensor, got 3.0 (float)"),
    (lambda: quantization.error_feedback(LOGITS, torch.eye(2), "int4"), ValueError, "w has 3 columns, H the shape (2, 2): hessian(its inputs)"),
    (lambda: memory.replay([None], memory.Allocator(2**20)), TypeError, "replay takes what measure.storages returns, got a list with None"),
    (lambda: data_parallel.backward_timeline([(8,)], bucket_bytes=1, n=2, link=LINK), ValueError, "a layer is (bytes of gradients, seconds), got (8,)"),
    (lambda: quantization.to_eight(LOGITS, quantization.F8_E4M3, (1, 2), scale=torch.ones(1, 2)), ValueError, "(2, 3) has (2, 2) tiles of (1, 2), and scales of shape (1, 2)"),
    (lambda: quantization.blocks.hadamard(2**20), ValueError, "entries of n=1048576 are 1,099,511,627,776: at most 67,108,864 can be written down: rotate in blocks"),
    (lambda: planner.Plan(zero=9), ValueError, "zero=9: levels of ZeRO are 0 … 3"),
    (lambda: zero.partition(10, 2).cuts([4, -1, 7], 0), ValueError, "numels must be at least 0, got -1"),
    (lambda: clock.play([None]), TypeError, "the list of play takes a Task, got None"),
    (lambda: clock.play([[None]]), TypeError, "the list of play takes a Task, got [None]"),
    (lambda: expert_parallel.route(LOGITS.long(), 1), ValueError, "logits of a float format, got torch.int64: use .float()"),
    (lambda: expert_parallel.route(LOGITS, 1, bias=torch.zeros(4)), ValueError, "bias of 3 experts has shape (3,), got (4,)"),
    (lambda: expert_parallel.route(LOGITS, 1, bias=torch.zeros(1)), ValueError, "bias of 3 experts has shape (3,), got (1,)"),
    (lambda: schedule.simulate(one_op(0, 0, 0)), ValueError, "mine: rank 0 runs 00@0: operations of this schedule are F, B"),
    (lambda: schedule.simulate(one_op("F", "X", 0)), ValueError, "mine: rank 0 runs F0@X: stages are 0 … 0"),
    (lambda: schedule.simulate(one_op("F", 0, "a")), ValueError, "mine: rank 0 runs Fa@0: micro-batches are 0 … 0"),
    (lambda: one_op("FB", 0, 0).check(), ValueError, "operations of this schedule are F, B"),
    (lambda: checkpointing.Costs.uniform(10**9), ValueError, "n = 1,000,000,000: at most 10,000,000 can be written down: take fewer"),
    (lambda: checkpointing.segments(10**9, 10**9), ValueError, "n = 1,000,000,000: at most"),
    (lambda: checkpointing.binomial(10**9, 3), ValueError, "n = 1,000,000,000: at most"),
    (lambda: checkpointing.binomial_evaluations(10**9, 1), ValueError, "n = 1,000,000,000: at most"),
    (lambda: checkpointing.keep_nothing(10**5), ValueError, "evaluations of n=100000 are 5,000,050,000: at most"),
    (lambda: zero.unit_order(10**9), ValueError, "num_units is 1,000,000,000: at most"),
    (lambda: flash.traffic("flash-2", s=10**6, d=64), ValueError, "1000000 × 1000000 scores, 128 × 128 to a tile, are 61,042,969: at most"),
    (lambda: data_parallel.sampler(10**9, 0, 2), ValueError, "length is 1,000,000,000: at most 100,000,000 can be written down: draw from a shard"),
    (lambda: pipeline.cut(dataclasses.replace(MODEL, num_layers=10**9), 10**8), ValueError, "to cut 1000000000 layers are 90,000,000,200,000,000: at most"),
    (lambda: checkpointing.Costs([3], 0), TypeError, "Costs, for each stage, takes a Stage, got 3"),
    (lambda: data_parallel.buckets(None), TypeError, "buckets takes an Iterable, got None"),
    (lambda: Timeline(None), TypeError, "Timeline takes a Sequence, got None"),
    (lambda: Timeline([None]), TypeError, "the list of a Timeline takes a Span, got None"),
    (lambda: Timeline([Span(0, "forward", "layer 0", 2.0, 1.0)]), ValueError, "start=2.0, end=1.0, elements=None) ends before it begins: give start, then end"),
    (lambda: scaling.noise_scale([]), ValueError, "the mean |G|² is 0: average over more"),
    (lambda: scaling.noise_scale([1.0]), TypeError, "noise_scale takes a Spread, got 1.0"),
    (lambda: scaling.noise_scale([scaling.Spread(1.0, math.nan)]), ValueError, "the mean |G|² is nan: average over more"),
    (lambda: scaling.estimate_spread(math.nan, 1.0, 1, 2), ValueError, "small must be a finite number of at least 0, got nan"),
    (lambda: scaling.estimate_spread(1.0, -1.0, 1, 2), ValueError, "large must be a finite number of at least 0, got -1.0"),
    (lambda: scaling.scale_lr(10**400, 2, "linear"), ValueError, "lr must be a finite number above 0, got 1000"),
    (lambda: scaling.scale_lr(0.1, 2, ["linear"]), ValueError, "there is no rule ['linear']: there are none, square root, linear"),
    (lambda: scaling.gradual(0, 0.5), ValueError, "ratio must be a finite number above 0, got 0"),
    (lambda: scaling.gradual(4, math.nan), ValueError, "share must be a finite number of at least 0, got nan"),
    (lambda: scaling.fit({1: 4, 2: 2}), ValueError, "smin=0.0, emin=4.0) is of no hyperbola: steps fall"),
    (lambda: scaling.fit({1: 2, 2: 2}), ValueError, "smin=2.0, emin=0.0) is of no hyperbola: steps fall"),
    (lambda: config.Hardware.named("H100").rate("x"), ValueError, "H100 has no rate of 'x': there are products, attention"),
    (lambda: config.Hardware.named("H100").rate(fmt="fp3"), ValueError, "H100 has no rate in 'fp3': there are fp32,"),
    (lambda: flash.Roof.of(config.Hardware.named("H100"), "fp3"), ValueError, "H100 has no rate in 'fp3': there are fp32,"),
    (lambda: flash.Roof.of("H100"), TypeError, "Roof.of takes a Hardware, got 'H100'"),
    (lambda: flash.passes(torch.relu, 2, 2, fused=True), ValueError, "are not known: there are softmax, layernorm, swiglu"),
    (lambda: flash.block_sizes(10, 1000), ValueError, "four rows of d=1000 do not fit fast=10 elements: use 4000 at least"),
    (lambda: flash.online([]), ValueError, "no block has come: give one at least"),
    (lambda: flash.one_pass(flash.softmax, LOGITS, block=-1), ValueError, "block must be at least 1, got -1"),
    (lambda: flash.one_pass(flash.softmax, torch.zeros(2, 0)), ValueError, "of equally many rows and columns, got [(2, 0)]"),
    (lambda: flash.one_pass(flash.swiglu, LOGITS, LOGITS[:1]), ValueError, "of equally many rows and columns, got [(2, 3), (1, 3)]"),
    (lambda: flash.linear_cross_entropy(LOGITS, LOGITS, torch.tensor([0, 2]), 1), IndexError, "target 2 is not in the vocabulary of 2 words: use 0 … 1"),
    (lambda: trace.Trace(None), TypeError, "Trace takes an Iterable, got None"),
    (lambda: trace.Trace([None]), TypeError, "the list of a Trace takes an Iterable, got None"),
    (lambda: trace.Trace([[None]]), TypeError, "a rank of a Trace takes an Event, got None"),
    (lambda: anatomy.parts([]), TypeError, "parts takes a ModelConfig, got [] (list): ModelConfig.named(…) is one"),
    (lambda: anatomy.parts(MODEL, None), TypeError, "parts takes a Policy, got None"),
    (lambda: memory.Allocator(2**30, max_split_size=math.nan), ValueError, "max_split_size=nan must be more than 20971520"),
    (lambda: memory.replay(None, memory.Allocator(2**30)), TypeError, "replay takes an Iterable, got None"),
    (lambda: memory.replay([], None), TypeError, "replay takes an Allocator, got None"),
    (lambda: predict.states(deep(10**9), TRAIN), ValueError, "parts of num_layers=1000000000, num_experts=1 are 18,000,000,000: at most 1,000,000 can be written down: take fewer layers"),
    (lambda: predict.activations(deep(10**9), TRAIN), ValueError, "parts of num_layers=1000000000, num_experts=1 are 18,000,000,000: at most"),
    (lambda: predict.peak(deep(10**5), TRAIN), ValueError, "num_layers=100000 on pp=1 with 4 micro-batches, to be run dry, are 400,000: at most 100,000"),
    (lambda: memory.history(deep(10**5), TRAIN), ValueError, "num_layers=100000 with 4 micro-batches, to be recorded, are 400,000: at most 100,000"),
    (lambda: checkpointing.frontier([]), TypeError, "frontier takes a Costs, got []"),
    (lambda: checkpointing.smallest_budget(checkpointing.Costs.uniform(3000)), ValueError, "the pieces of n=3000 stages are 9,000,000: at most 1,000,000 can be written down: join"),
    (lambda: checkpointing.segments(4, 2).on(None), TypeError, "Reversal.on takes a Costs, got None"),
    (lambda: quantization.quantized_bytes((-4, 4), "int8"), ValueError, "a size of shape must be at least 1, got -4"),
    (lambda: quantization.pack_codes(torch.tensor([20]), 4), ValueError, "codes of 4 bits, at most 8, are what these are not: give whole numbers from 0 to 15"),
    (lambda: quantization.pack_codes(torch.tensor([-1]), 4), ValueError, "give whole numbers from 0 to 15"),
    (lambda: quantization.pack_codes(torch.tensor([1.0]), 4), ValueError, "give whole numbers from 0 to 15"),
    (lambda: quantization.pack_codes(torch.tensor([1]), 9), ValueError, "codes of 9 bits, at most 8"),
    (lambda: quantization.unpack_codes(torch.zeros(2, dtype=torch.uint8), 3, 6), ValueError, "count=6: 2 bytes have 5 codes of 3 bits"),
    (lambda: quantization.to_blocks(LOGITS, block=0), ValueError, "block must be at least 1, got 0"),
    (lambda: quantization.from_blocks(quantization.to_blocks(LOGITS), (2, 3), block=0), ValueError, "block must be at least 1, got 0"),
    (lambda: quantization.from_nf4(quantization.to_nf4(LOGITS), (2, 3), torch.int8), TypeError, "from_nf4 gives floating-point numbers, got torch.int8"),
    (lambda: quantization.hessian(LOGITS, damping=-1), ValueError, "damping must be a finite number of at least 0, got -1"),
    (lambda: quantization.kashin(torch.ones(4), torch.eye(4), -1), ValueError, "pairs must be at least 0, got -1"),
    (lambda: quantization.keeping(-1, abs), ValueError, "count must be at least 0, got -1"),
    (lambda: quantization.rotation(0, 0), ValueError, "h must be at least 1, got 0"),
    (lambda: quantization.tile_amax(LOGITS, (0, 1)), ValueError, "a side of tile must be at least 1, got 0"),
    (lambda: quantization.Int8Linear(torch.nn.Linear(2, 2), math.nan), ValueError, "limit must be a finite number of at least 0, got nan"),
    (lambda: quantization.Adam8(NET.parameters(), smallest=None), TypeError, "smallest must be a whole number, got None"),
    (lambda: expert_parallel.balanced(None, 4), TypeError, "balanced takes a ModelConfig, got None"),
    (lambda: expert_parallel.routed_sent(EXPERTS, []), ValueError, "of as many ranks in each layer, got []"),
    (lambda: expert_parallel.routed_sent(EXPERTS, [[[1, 2], [3]]]), ValueError, "of each rank counts has the visits to 2 experts, got [[1, 2], [3]]"),
    (lambda: expert_parallel.routed_sent(EXPERTS, [[[1, -2]]]), ValueError, "visits of an expert must be at least 0, got -2"),
    (lambda: routed(flops=0), ValueError, "flops must be a finite number above 0, got 0"),
    (lambda: routed(link=None), TypeError, "routed_timeline takes a Link, got None"),
    (lambda: routed(chunks=0), ValueError, "chunks must be at least 1, got 0"),
    (lambda: context_parallel.layout(8, 2).join([torch.zeros(2, 4), torch.zeros(2, 3)]), ValueError, "each rank has 4 of s=8 tokens, got [4, 3]"),
    (lambda: context_parallel.layout(10**6, 10**5).grid(), ValueError, "meetings of 200000 chunks are 40,000,000,000: at most"),
    (lambda: context_parallel.least_tokens(0, 1), ValueError, "flops must be a finite number above 0, got 0"),
    (lambda: context_parallel.least_tokens(1, 1, groups=0), ValueError, "groups must be a finite number above 0, got 0"),
    (lambda: context_parallel.ring_timeline(None, 2, flops=1.0, link=LINK), TypeError, "ring_timeline takes a ModelConfig, got None"),
    (lambda: context_parallel.ring_timeline(MODEL, 10**6, flops=1.0, link=LINK), ValueError, "steps of a ring of n=1000000 are 1,000,000,000,000: at most 1,000,000"),
    (lambda: context_parallel.kv_heads(4, 4, 0), ValueError, "n must be at least 1, got 0"),
    (lambda: tensor_parallel.styles(None), TypeError, "styles takes a ModelConfig, got None"),
    (lambda: zero.step_timeline([("push", 0)], [(8, 1.0)], n=2, link=LINK), ValueError, "of layers 0 … 0, got ('push', 0): zero.unit_order(1) is one"),
    (lambda: zero.step_timeline(zero.unit_order(2), [(8, 1.0)], n=2, link=LINK), ValueError, "of layers 0 … 0, got ('gather', 1): zero.unit_order(1) is one"),
    (lambda: zero.save("/none/here", [], None), ValueError, "a snapshot has a module, or several, got none: give the stages"),
    (lambda: schedule.simulate(schedule.gpipe(2, 2)).peak(7), ValueError, "rank=7 is none of p=2: use 0 … 1"),
    (lambda: schedule.simulate(schedule.gpipe(2, 2)).busy(-1), ValueError, "rank must be at least 0, got -1"),
    (lambda: schedule.gpipe(2, 2).peak(2), ValueError, "rank=2 is none of p=2: use 0 … 1"),
    (lambda: schedule.bubble("gpipe", 2, 2, 3), TypeError, "bubble takes a Durations, got 3"),
    (lambda: schedule.Board(None, None), TypeError, "Board takes a Schedule, got None"),
    (lambda: schedule.whole_step(None, []), TypeError, "whole_step takes a Schedule, got None"),
    (lambda: schedule.whole_step(schedule.gpipe(2, 2), []), ValueError, "gpipe has 2 stages, got the work of 0: give seconds of F and B for each"),
    (lambda: pipeline.keep(GPT(MODEL), schedule.gpipe(2, 2), 9), ValueError, "rank=9 is none of p=2: use 0 … 1"),
    (lambda: pipeline.keep(GPT(MODEL), None, 0), TypeError, "a rank's stages takes a Schedule, got None"),
    (lambda: pipeline.actions(schedule.gpipe(2, 2), 9), ValueError, "rank=9 is none of p=2: use 0 … 1"),
    (lambda: pipeline.joined(schedule.gpipe(2, 2), []), ValueError, "gpipe has 2 ranks, got the runs of 0: give what pipeline.run returned"),
    (lambda: clock.Task([], 1.0), TypeError, "lane of a Task takes a Hashable, got []"),
    (lambda: lora.trainable(None, rank=2), TypeError, "parts takes a ModelConfig, got None"),
    (lambda: lora.targets(MODEL, None), TypeError, "targets takes a tuple, got None"),
    (lambda: precision.cross_entropy(LOGITS, torch.tensor([0, 3]), "bf16"), IndexError, "target 3 is not in the vocabulary of 3 words"),
    (lambda: floats.named("bf16").encode(10**400), ValueError, "cannot encode 10000000000000000000…, beyond every format: pass math.inf"),
    (lambda: planner.configure(target=10**30, seq_len=4, gpus=8, fits=bool), ValueError, "at most 10,000,000 can be written down: use more GPUs"),
    (lambda: precision.LossScaler(growth_interval=0), ValueError, "growth_interval must be at least 1, got 0"),
]  # fmt: skip

# Where annotations are enforced, jaxtyping is the first to refuse these.
PLAIN: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: model.cross_entropy(torch.zeros(2, 3, 8), torch.zeros(2, 4).long()), ValueError, "got torch.int64 (2, 4) for logits (2, 3, 8)"),
    (lambda: model.cross_entropy(torch.zeros(2, 3, 8), torch.zeros(2, 3)), ValueError, "got torch.float32 (2, 3) for logits (2, 3, 8)"),
    (lambda: model.cross_entropy(torch.zeros(8), torch.tensor(0)), ValueError, "got torch.int64 () for logits (8,)"),
    (lambda: flash.linear_cross_entropy(None, LOGITS, None, 1), TypeError, "linear_cross_entropy takes a Tensor, got None"),
    (lambda: flash.linear_cross_entropy(LOGITS, LOGITS.mT, torch.tensor([0, 0]), 1), ValueError, "x (tokens, h), W (words, h) and a whole number per token, got (2, 3) and (3, 2) and (2,)"),
    (lambda: flash.linear_cross_entropy(LOGITS, LOGITS, torch.tensor([0]), 1), ValueError, "got (2, 3) and (2, 3) and (1,)"),
    (lambda: flash.linear_cross_entropy(LOGITS, LOGITS, torch.zeros(2), 1), ValueError, "targets of torch.float32"),
    (lambda: flash.linear_cross_entropy(LOGITS[:0], LOGITS, torch.tensor([]).long(), 1), ValueError, "got (0, 3) and (2, 3) and (0,)"),
    (lambda: precision.cross_entropy(LOGITS, torch.tensor([0]), "bf16"), ValueError, "a target for each row of logits, got (1,) for logits (2, 3)"),
    (lambda: quantization.from_nf4(None, (64,), torch.float32), TypeError, "from_nf4 takes a Tensor, got None"),
    (lambda: quantization.quantized_bytes(None, "int8"), TypeError, "quantized_bytes takes a tuple, got None"),
    (lambda: quantization.Int8Linear(None, None), TypeError, "Int8Linear takes a Linear, got None"),
    (lambda: precision.kahan_sum(None, "bf16"), TypeError, "a sum takes a Tensor, got None"),
    (lambda: randomness.dropout(None, 0.1), TypeError, "dropout takes a Tensor, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "told"), TIRED)
def test_the_call_of_somebody_tired_is_refused_with_a_remedy(call, kind, told):
    with pytest.raises(kind) as caught:
        call()
    assert told in str(caught.value)


@pytest.mark.parametrize("call", ["share", "evaluate"])
@pytest.mark.parametrize("side", [0, 1])
def test_a_step_refuses_tokens_and_targets_that_are_no_whole_numbers_or_not_as_many(side, call):
    def program(rank, change):
        given = [torch.zeros(4, 4).long(), torch.zeros(4, 4).long()]
        given[side] = change(given[side])
        getattr(step.build(MODEL, TRAIN, config.Mesh())(rank), call)(*given)

    world = World(1, engine="dry")
    with pytest.raises(RankError, match=f"{call} takes tokens .* got torch.float64"):
        world.run(program, torch.Tensor.double, rank=0)
    with pytest.raises(RankError, match="give each token its target|give global_batch=4"):
        world.run(program, lambda x: x[:3], rank=0)


if __name__ == "__main__":
    for name in TABLE:
        for check in (check_refused, check_numpy):
            try:
                check(name)
            except (Exception, pytest.fail.Exception) as error:
                print(f"{check.__name__} of {name}: {type(error).__name__}: {error}")
    for call in TIRED + PLAIN:
        try:
            test_the_call_of_somebody_tired_is_refused_with_a_remedy(*call)
        except (Exception, pytest.fail.Exception) as error:
            print(f"{call[2]}: {type(error).__name__}: {error}")
