"""None, a list or a number in the place of a module, a communicator or a config: the error says what was given, what is wanted, and how one comes by it.

In a process of its own: while pytest runs, jaxtyping's checks refuse a wrong type before our own can.
"""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

SETUP = """
import torch
from torch import nn

from labutils import checkpointing, collectives, context_parallel, data_parallel, expert_parallel, huggingface, lora, measure
from labutils import memory, pipeline, planner, precision, predict, quantization, scaling, schedule, step, tensor_parallel, units, zero
from labutils import accumulation
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Line
from labutils.model import GPT
from labutils.timeline import History
from labutils.world import World

TINY = ModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8, vocab_size=6, seq_len=4)
ORDER = schedule.one_f_one_b(1, 1)
TRAIN = TrainConfig(micro_batch=1, global_batch=1)
LAYER = nn.Linear(2, 2)
LINK = Link(1e-6, 1e9)
"""

CALLS = [  # `x` stands where a module, a schedule or a config belongs
    ("data_parallel.replicate(x, comm)", "replicate takes a Module"),
    ("zero.shard(x, comm)", "shard takes a module"),
    ("zero.gathered(x).__enter__()", "zero takes a Module"),
    ("pipeline.split(x, 1)", "split takes a labutils.model.GPT"),
    ("pipeline.local(pipeline.split(GPT(TINY), 1), x, 0)", "local takes a Schedule"),
    ("pipeline.run(pipeline.split(GPT(TINY), 1), x, comm, [])", "run takes a Schedule"),
    ("pipeline.run(x, ORDER, comm, [])", "run takes a Module"),
    ("tensor_parallel.parallelize(x, comm)", "parallelize takes a whole labutils.model.GPT"),
    ("context_parallel.distribute(x, comm)", "distribute takes a whole labutils.model.GPT"),
    ("expert_parallel.spread_experts(x, comm)", "spread_experts takes a Module"),
    ("expert_parallel.reduce_gradients(x, comm, comm)", "expert_parallel takes a Module"),
    ("expert_parallel.auxiliary_loss(x)", "expert_parallel takes a Module"),
    ("expert_parallel.update_bias(x, comm)", "expert_parallel takes a Module"),
    ("lora.adapt(x, rank=2, alpha=2)", "adapt takes a Module"),
    ("lora.wrap(x, rank=2, alpha=2)", "wrap takes a Module"),
    ("lora.activate(x, None)", "lora takes a Module"),
    ("lora.merged(x).__enter__()", "lora takes a Module"),
    ("lora.quantize_base(x)", "quantize_base takes a Module"),
    ("schedule.simulate(x)", "simulate takes a Schedule"),
    ("schedule.why_illegal(x)", "why_illegal takes a Schedule"),
    ("checkpointing.apply(x, 'full')", "apply takes a Module"),
    ("checkpointing.stages(x)", "stages takes a Module"),
    ("quantization.use_fp8(x, quantization.Scheme())", "use_fp8 takes a Module"),
    ("quantization.advance_scales(x)", "fp8_layers takes a Module"),
    ("quantization.quantized(x)", "quantized takes a Module"),
    ("quantization.inputs_of(x)", "inputs_of takes a Module"),
    ("measure.saved_activations(print, x)", "measure takes a Module"),
    ("measure.peak(print, x)", "measure takes a Module"),
    ("GPT(x)", "GPT takes a ModelConfig"),
    ("data_parallel.average_gradients(x, comm)", "average_gradients takes a Module"),
    ("data_parallel.average_gradients(LAYER, x)", "data parallelism takes a Comm"),
    ("data_parallel.check_alike(LAYER.parameters(), x)", "data parallelism takes a Comm"),
    ("data_parallel.replicate(LAYER, x)", "data parallelism takes a Comm"),
    ("data_parallel.share(4, x)", "share takes a Comm"),
    ("measure.model_states(x)", "measure takes a Module"),
    ("zero.shard(LAYER, x)", "data parallelism takes a Comm"),
    ("zero.Optimizer(LAYER.parameters(), x, level=1)", "data parallelism takes a Comm"),
    ("zero.Optimizer(x or 3, comm, level=1)", "zero.Optimizer takes an Iterable, got 3"),
    ("zero.clip_grad_norm(LAYER.parameters(), x, 1.0)", "clip_grad_norm takes a Comm"),
    ("tensor_parallel.parallelize(GPT(TINY), x)", "parallelize takes a Comm"),
    ("tensor_parallel.rank_config(x, 1)", "rank_config takes a ModelConfig"),
    ("context_parallel.distribute(GPT(TINY), x)", "distribute takes a Comm"),
    ("expert_parallel.spread_experts(GPT(TINY), x)", "spread_experts takes a Comm"),
    ("expert_parallel.reduce_gradients(LAYER, x, comm)", "reduce_gradients takes a Comm"),
    ("pipeline.run(pipeline.split(GPT(TINY), 1), ORDER, x, [])", "run takes a Comm"),
    ("pipeline.run(pipeline.split(GPT(TINY), 1), ORDER, comm, x or 3)", "run takes a Sequence, got 3"),
    ("pipeline.cut(x, 1)", "cut takes a ModelConfig"),
    ("pipeline.stage_flops(x, (1,))", "stage_flops takes a ModelConfig"),
    ("pipeline.actions(x, 0)", "actions takes a Schedule"),
    ("schedule.read(x)", "read takes a str"),
    ("scaling.fit(x)", "fit takes a Mapping"),
    ("schedule.simulate(ORDER, x or 3)", "simulate takes a Durations, got 3"),
    ("schedule.simulate(ORDER, None, x or 3)", "simulate takes a Link, got 3"),
    ("step.build(x, TRAIN, Mesh())", "a step takes a ModelConfig"),
    ("step.build(TINY, x, Mesh())", "a step takes a TrainConfig"),
    ("step.build(TINY, TRAIN, x)", "a step takes a Mesh"),
    ("step.build(TINY, TRAIN, Mesh())(x)", "a step takes a Rank"),
    ("predict.states(TINY, TRAIN, x)", "a step takes a Mesh"),
    ("predict.peak(TINY, x)", "a step takes a TrainConfig"),
    ("predict.sent(x, TRAIN)", "a step takes a ModelConfig"),
    ("memory.activations(TINY, x)", "memory takes a TrainConfig"),
    ("memory.peak(x, TRAIN)", "memory takes a ModelConfig"),
    ("checkpointing.run([LAYER], x, torch.ones(1, 2))", "a chain takes a Reversal"),
    ("checkpointing.run([LAYER], checkpointing.segments(1, 1), x)", "a chain takes a Tensor"),
    ("checkpointing.costs([LAYER], x)", "a chain takes a Tensor"),
    ("checkpointing.overhead(x, 'full')", "overhead takes a ModelConfig"),
    ("checkpointing.plan(x, 9)", "plan takes a Costs"),
    ("step.schedule_of(x, Mesh())", "a step takes a TrainConfig"),
    ("step.schedule_of(TRAIN, x)", "a step takes a Mesh"),
    ("predict.time(TINY, TRAIN, device=x)", "predict.time takes a Hardware"),
    ("expert_parallel.route(x, 1)", "route takes a Tensor"),
    ("huggingface.to_hf('nowhere', TINY, x or 3)", "to_hf takes a Mapping, got 3"),
    ("precision.MasterWeights(x)", "MasterWeights takes an Optimizer"),
    ("precision.RoundedWeights(x)", "RoundedWeights takes an Optimizer"),
    ("precision.LossScaler(comm=x or 3)", "LossScaler takes a Comm, got 3"),
    ("precision.round_to(x, 'bf16')", "round_to takes a Tensor"),
    ("precision.running_sum(x, 'bf16')", "running_sum takes a Tensor"),
    ("quantization.quantize(x, 'int8')", "quantize takes a Tensor"),
    ("quantization.to_nf4(x)", "to_nf4 takes a Tensor"),
    ("quantization.use_fp8(LAYER, x)", "use_fp8 takes a Scheme"),
    ("quantization.kept_states(x, 4)", "kept_states takes a StateFormats"),
    ("collectives.cost('all_reduce_ring', 8, 2, x)", "cost takes a Link"),
    ("planner.Job(model=x, cluster=None)", "Job takes a ModelConfig"),
    ("planner.Job(model=TINY, cluster=x)", "Job takes a Cluster"),
    ("planner.search(x)", "search takes a Job"),
    ("planner.estimate(x, planner.Plan())", "estimate takes a Job"),
    ("planner.ledger(x, planner.Plan())", "ledger takes a ModelConfig"),
    ("planner.ledger(TINY, x)", "ledger takes a Plan"),
    ("huggingface.config(x)", "config takes a ModelConfig"),
    ("accumulation.accumulate(x, [])", "accumulate takes a loss of a batch"),
    ("accumulation.accumulate(print, x or 3)", "accumulate takes an Iterable, got 3"),
    ("accumulation.step(x, print, [])", "step takes an Optimizer"),
    ("accumulation.epoch(x, print, [], 1, 1.0)", "epoch takes an Optimizer"),
    ("accumulation.tokens(x)", "a batch's last part takes a Tensor"),
    ("accumulation.tokens((LAYER.weight, x))", "a batch's last part takes a Tensor"),
    ("accumulation.gradient_buffer(x or 3).__enter__()", "gradient_buffer takes an Iterable, got 3"),
    ("accumulation.gradient_buffer([x]).__enter__()", "gradient_buffer takes a Parameter"),
    ("Line(x, 1)", "a Line's name takes a str"),
    ("Line('a', 1, x or 3)", "a Line's component takes a str, got 3"),
    ("Line('a', 1, axis=x or 3)", "a Line's axis takes a str, got 3"),
    ("Line('a', 1, note=x or 3)", "a Line's note takes a str, got 3"),
    ("History([x])", "History takes a Moment"),
    ("TrainConfig(micro_batch=1, global_batch=1, frozen=x or 3)", "frozen takes a tuple of names"),
    ("TrainConfig(micro_batch=1, global_batch=1, frozen=[x])", "a name in frozen takes a str"),
    ("TrainConfig(micro_batch=1, global_batch=1, layers=x or 3)", "layers takes an Iterable, got 3"),
    ("measure.peak(x, LAYER)", "measure takes a function"),
    ("measure.saved_activations(x, LAYER)", "measure takes a function"),
    ("measure.peak(print, LAYER, x or 3)", "measure takes an Optimizer, got 3"),
    ("measure.model_states(LAYER, x or 3)", "measure takes an Optimizer, got 3"),
]  # fmt: skip

NAMED = [  # `x` stands where a name belongs
    ("collectives.cost(x, 8, 2, LINK)", "no algorithm {}: there are broadcast_star"),
    ("collectives.sent(x, nbytes=8, n=2)", "no algorithm {}: there are broadcast_star"),
    ("collectives.bus_factor(x, 4)", "no bus factor for {}: there are all_reduce"),
    ("World(1, engine=x or ['a'])", "no engine {}: there are threads"),
    ("checkpointing.overhead(TINY, x)", "unknown policy {}: use 'none'"),
    ("checkpointing.apply(GPT(TINY), x)", "unknown policy {}: use 'none'"),
    ("quantization.quantize(torch.ones(4), x)", "no format {}: there are mxfp4"),
    ("quantization.StateFormats(x, 'fp8', 'fp8', 'fp8')", "no format for weights called {}: there are fp32"),
    ("precision.round_to(torch.ones(2), x)", "unknown format {}: choose one of fp64"),
    ("ModelConfig.named(x)", "no model called {}: there are gpt2"),
    ("context_parallel.layout(8, 2, x)", "no layout {}: there are contiguous"),
    ("schedule.bubble(x, 2, 2)", "by {}: there are naive"),
    ("schedule.peak_in_flight(x, 2, 2, 0)", "no formula for {}: there are naive"),
    ("planner.Plan(recompute=x)", "recompute={}: 0 is 'none', 1 is 'selective'"),
    ("units.parse(x)", "cannot read {} as a quantity: write a number"),
    ("lora.adapt(GPT(TINY), rank=2, alpha=2, name=x)", "an adapter's name takes a str, got {}"),
    ("lora.activate(lora.adapt(GPT(TINY), rank=1, alpha=2), x or ['a'])", "an adapter {}: the module"),
]  # fmt: skip

GIVEN = ("None", "[]", "3")

PROGRAM = """
def said(call, value, comm):
    try:
        eval(call, globals() | {"x": value, "comm": comm})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def program(rank):
    return [said(call, value, rank.comm("dp")) for call in CALLS for value in GIVEN]

with World(1) as alone:
    print("\\n".join(line.partition("\\n")[0] for line in alone.run(program)[0]))
"""


@pytest.fixture(scope="module")
def answers():
    calls = [call for call, _ in CALLS + NAMED]
    program = f"{SETUP}\nCALLS, GIVEN = {calls}, [{', '.join(GIVEN)}]\n{PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    asked = [(call, given) for call in calls for given in GIVEN]
    return dict(zip(asked, ran.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("call, wanted", CALLS)
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_no_module_and_no_schedule_is_named(answers, call, wanted, given):
    said = answers[call, given]
    assert said.startswith(f"TypeError: {wanted}"), said
    given = "3" if " or 3" in call else given
    assert f"got {given}" in said or f"got {type(eval(given)).__name__}" in said, said


@pytest.mark.parametrize("call, wanted", NAMED)
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_no_name_is_named_with_those_that_there_are(answers, call, wanted, given):
    said = answers[call, given]
    given = "['a']" if " or ['a']" in call and given != "3" else given
    assert said.startswith(("ValueError", "TypeError")) and wanted.format(given) in said, said


@pytest.mark.parametrize("name", ["bool", "int64", "complex64"])
def test_what_is_no_float_is_not_rounded(name):
    """True would become 1.0, and come back as what it never was."""
    import torch

    from labutils import quantization

    x = torch.ones(4).to(getattr(torch, name))
    said = f"rounds floating-point numbers, got {name}: pass x.float()"
    for call in (quantization.to_nf4, lambda x: quantization.quantize(x, "int8")):
        with pytest.raises(TypeError, match=said):
            call(x)


def test_a_module_that_is_whole_has_no_shards_to_gather():
    from torch import nn

    from labutils import zero

    with pytest.raises(ValueError, match=r"this Linear is whole: zero\.shard it first"):
        zero.gathered(nn.Linear(2, 2)).__enter__()
