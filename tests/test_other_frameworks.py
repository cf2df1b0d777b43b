"""Exported plans in the parsers and checks of the frameworks themselves.

torchtitan 0.2.2 lies where `make test` puts it, and Accelerate among what peft asks for. The others
are optional, each in a folder that a variable names, beside the course's own torch:

    pip install --no-deps --target B torchtitan==0.3.0 tyro docstring-parser typeguard spmd_types
                                                                                  TORCHTITAN_RECIPE=B
    git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM C               MEGATRON=C

Where none is at hand, `tests/test_planner_command.py` compares with stored names.
"""

import json
import os
import pathlib
import subprocess
import sys
import sysconfig
from dataclasses import replace

import pytest
from test_planner_command import JOB, PLANS

from labutils.planner import export

ROOT = pathlib.Path(__file__).resolve().parents[1]
HERE = {"TORCHTITAN": f"{sys.prefix}/titan", "ACCELERATE": sysconfig.get_paths()["purelib"]}
MODEL = """--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --mock-data
    --tokenizer-type NullTokenizer --vocab-size 128255 --untie-embeddings-and-output-weights
    --lr 1e-4 --train-iters 10 --swiglu --position-embedding-type rope --normalization RMSNorm
    --disable-bias-linear"""


def told(variable, program, given):
    """What a program prints as JSON, beside the framework that the variable names; a dictionary of
    strings is on its standard input."""
    folder = os.environ.get(variable, HERE.get(variable, ""))
    if not os.path.isdir(folder):
        pytest.skip(f"{variable}=… names the folder of the framework")
    outside = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "MODEL": MODEL}
    words = [sys.executable, "-W", "ignore", "-c", f"import json, os, sys\n{program}"]
    how = dict(capture_output=True, text=True, env=outside, check=False)
    done = subprocess.run(words, input=json.dumps(given), **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def plans_for(name):
    """All plans that can be said in a framework, at all levels of ZeRO, as texts."""
    found = {}
    for plan in (replace(each, zero=zero) for each in PLANS.values() for zero in range(4)):
        try:
            found[str(plan)] = export.export(name, JOB, plan), plan
        except ValueError as refused:
            assert "choose" in str(refused)
    return found


TITAN = """
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
import dataclasses, tempfile
def parsed(text):
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(text)
        file.flush()
        found = ConfigManager().parse_args([f"--job.config_file={file.name}"])
    p = found.parallelism
    ParallelDims(p.data_parallel_replicate_degree, p.data_parallel_shard_degree,
        p.context_parallel_degree, p.tensor_parallel_degree, p.pipeline_parallel_degree,
        p.expert_parallel_degree, p.expert_tensor_parallel_degree, world_size=64)
    return dataclasses.asdict(found)
texts = json.load(sys.stdin)
found = {name: parsed(text) for name, text in texts.items()}
try:
    parsed(next(iter(texts.values())).replace("tensor_parallel_degree", "tp_degree"))
except ValueError as error:
    found["wrong"] = str(error)
print(json.dumps(found))
"""


def test_torchtitan_parses_its_toml():
    given = plans_for("torchtitan")
    found = told("TORCHTITAN", TITAN, {name: text for name, (text, _) in given.items()})
    assert "Invalid field names" in found.pop("wrong")
    assert len(found) == len(given) > 3
    for name, (_, plan) in given.items():
        for section, values in export.torchtitan_values(JOB, plan).items():
            for key, value in values.items():
                assert found[name][section][key] == value, (name, key)


RECIPE = """
import dataclasses
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
def taken(text):
    @dataclasses.dataclass(slots=True)
    class Config:
        training: object
        parallelism: object
        activation_checkpoint: object
    names = {}
    exec(text, names)
    config = Config(TrainingConfig(), ParallelismConfig(), SelectiveAC.Config())
    found = names["planned"](config)
    kind = found.activation_checkpoint
    assert kind is None or isinstance(kind, FullAC.Config)
    return {"parallelism": dataclasses.asdict(found.parallelism), "full": kind is not None}
print(json.dumps({name: taken(text) for name, text in json.load(sys.stdin).items()}))
"""


def test_torchtitans_recipe_sets_what_its_configuration_has():
    given = plans_for("torchtitan-recipe")
    found = told("TORCHTITAN_RECIPE", RECIPE, {name: text for name, (text, _) in given.items()})
    for name, (_, plan) in given.items():
        there = found[name]["parallelism"]
        assert there["enable_sequence_parallel"] == (plan.tp > 1)
        assert there["tensor_parallel_degree"] == plan.tp
        assert there["pipeline_parallel_degree"] == plan.pp
        assert found[name]["full"] == (plan.recompute == 2)


MEGATRON = """
import os, shlex, torch, typing
vars(typing).setdefault("override", lambda method: method)  # before Python 3.12
hopper = type("Hopper", (), dict(major=9, minor=0, name="H100"))
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.get_device_properties = lambda *device: hopper
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.training import arguments
def checked(text):
    words = shlex.split(text.replace("\\\\\\n", " "))
    begin = words.index("pretrain_gpt.py")
    outside = dict(word.split("=") for word in words[:begin] if "=" in word)
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    os.environ |= outside | {"RANK": "0", "WORLD_SIZE": "64"}
    sys.argv[1:] = [*os.environ["MODEL"].split(), *words[begin + 2 :]]
    found = arguments.parse_args()
    arguments.validate_args(found)
    layout, stages = found.pipeline_model_parallel_layout, found.pipeline_model_parallel_size
    if layout:
        layout = PipelineParallelLayerLayout(layout, stages)
        layout.validate_layer_layout(32, None)
        layout = layout.layout
    return [found.data_parallel_size, [[sum(x.name == "decoder" for x in chunk) for chunk in rank]
            for rank in layout or ()]]
print(json.dumps({name: checked(text) for name, text in json.load(sys.stdin).items()}))
"""


def test_megatron_parses_and_accepts_its_flags():
    given = plans_for("megatron")
    found = told("MEGATRON", MEGATRON, {name: text for name, (text, _) in given.items()})
    assert len(found) == 4 * len(PLANS)
    for name, (_, plan) in given.items():
        dp, layers = found[name]
        assert dp == plan.dp
        cut = plan.train(JOB.model).layers or ()
        assert layers == [list(cut[rank :: plan.pp]) for rank in range(plan.pp) if cut]


ACCELERATE = """
import shlex
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch
launch.is_port_in_use = lambda port: False
def parsed(text):
    words = shlex.split(text.replace("\\\\\\n", " "))
    asked = launch_command_parser().parse_args(words[2:])
    launch.prepare_multi_gpu_env(_validate_launch_command(asked)[0])
    found = vars(asked)
    names = ("parallelism_config", "fsdp", "rdzv", "nnodes", "nproc")
    return {name: found[name] for name in found if any(map(name.__contains__, names))}
print(json.dumps({name: parsed(text) for name, text in json.load(sys.stdin).items()}))
"""


def test_accelerate_parses_its_flags():
    given = plans_for("accelerate")
    found = told("ACCELERATE", ACCELERATE, {name: text for name, (text, _) in given.items()})
    assert given
    for name, (_, plan) in given.items():
        assert found[name]["parallelism_config_dp_shard_size"] == plan.dp
        assert found[name]["parallelism_config_tp_size"] == plan.tp
        assert found[name]["fsdp_reshard_after_forward"] == str(plan.zero == 3).lower()
        assert (found[name]["rdzv_backend"], found[name]["rdzv_endpoint"]) == ("c10d", "${node0:?}:29400")
        assert (found[name]["nnodes"], found[name]["nproc_per_node"]) == ("8", "8")
