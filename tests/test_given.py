"""None, a list or a number in the place of a module or a schedule: the error says what was given and what is wanted.

In a process of its own: while pytest runs, jaxtyping's checks refuse a wrong type before our own can.
"""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

SETUP = """
from labutils import checkpointing, data_parallel, expert_parallel, lora, measure, pipeline, quantization, schedule
from labutils import context_parallel, tensor_parallel, zero
from labutils.config import ModelConfig
from labutils.model import GPT
from labutils.world import World

TINY = ModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8, vocab_size=6, seq_len=4)
ORDER = schedule.one_f_one_b(1, 1)
"""

CALLS = [  # `x` stands where a module, a schedule or a config belongs
    ("data_parallel.replicate(x, comm)", "replicate takes a Module"),
    ("data_parallel.bytes_to_start(x, 2)", "bytes_to_start takes a Module"),
    ("zero.shard(x, comm)", "shard takes a module"),
    ("zero.gathered(x).__enter__()", "zero takes a Module"),
    ("zero.layout(x)", "zero takes a Module"),
    ("pipeline.split(x, 1)", "split takes a labutils.model.GPT"),
    ("pipeline.local(pipeline.split(GPT(TINY), 1), x, 0)", "local takes a Schedule"),
    ("pipeline.run(pipeline.split(GPT(TINY), 1), x, comm, [])", "run takes a Schedule"),
    ("pipeline.run(x, ORDER, comm, [])", "run takes a Module"),
    ("pipeline.sent(x, TINY, micro_batch=1)", "sent takes a Schedule"),
    ("pipeline.sent(ORDER, x, micro_batch=1)", "sent takes a ModelConfig"),
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
    return [said(call, value, rank.comm("dp")) for call in CALLS for value in (None, [], 3)]

with World(1) as alone:
    print("\\n".join(line.partition("\\n")[0] for line in alone.run(program)[0]))
"""


@pytest.fixture(scope="module")
def answers():
    program = f"{SETUP}\nCALLS = {[call for call, _ in CALLS]}\n{PROGRAM}"
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    asked = [(call, given) for call, _ in CALLS for given in GIVEN]
    return dict(zip(asked, ran.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("call, wanted", CALLS)
@pytest.mark.parametrize("given", GIVEN)
def test_what_is_no_module_and_no_schedule_is_named(answers, call, wanted, given):
    said = answers[call, given]
    assert said.startswith(f"TypeError: {wanted}"), said
    assert f"got {given}" in said or f"got {type(eval(given)).__name__}" in said, said


def test_a_module_that_is_whole_has_no_shards_to_gather():
    from torch import nn

    from labutils import zero

    with pytest.raises(ValueError, match=r"this Linear is whole: zero\.shard it first"):
        zero.layout(nn.Linear(2, 2))
