"""A plan in the words of the frameworks that train it, from tables of their names by version.

torchtitan 0.2.2 reads TOML, 0.3.0 and later a Python function; Megatron-LM and Accelerate take
flags, the same on each node. Nodes meet at a port of one of them, whose name the shell knows as
node0, or says that it does not. What a framework cannot do of a plan is refused, with what would.

Source: what their own parsers and checks take (`tests/test_other_frameworks.py`).
"""

from collections.abc import Callable
from typing import Any

from labutils.config import ModelConfig
from labutils.planner.plans import Job
from labutils.planner.work import PLANNED, RECOMPUTE, Plan, ulysses

TORCHTITAN = "0.2.2"
TORCHTITAN_NAMES = {
    "training": ("local_batch_size", "global_batch_size", "seq_len", "mixed_precision_param",
        "mixed_precision_reduce"),
    "parallelism": ("data_parallel_replicate_degree", "data_parallel_shard_degree",
        "fsdp_reshard_after_forward", "tensor_parallel_degree", "context_parallel_degree",
        "context_parallel_rotate_method", "pipeline_parallel_degree", "pipeline_parallel_schedule",
        "pipeline_parallel_microbatch_size", "expert_parallel_degree",
        "module_fqns_per_model_part"),
    "activation_checkpoint": ("mode",),
}  # fmt: skip
"""The names that the TOML of torchtitan 0.2.2 may have, by section."""
_NODE, _PORT = "${node0:?}", 29400  # where nodes meet
_SCHEDULES = {"one_f_one_b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B"}


def torchtitan_values(job: Job, plan: Plan) -> dict[str, dict[str, Any]]:
    """Values by section and name, as torchtitan 0.2.2 has them. Its cp is a ring.

    Raises ValueError: for what it has not: ZB-H1, level 1 of ZeRO, level 0 beside another axis, and
        recomputation of attention alone.
    """
    name = PLANNED[plan.schedule]
    if name not in _SCHEDULES:
        raise ValueError(f"torchtitan has no {name}: choose {', '.join(_SCHEDULES)}")
    if plan.zero == 1 and plan.replicas > 1:
        raise ValueError("torchtitan has no level 1 of ZeRO: choose a plan of level 2 or 3")
    replicated = plan.zero == 0
    if replicated and plan.gpus > plan.dp:
        said = "beside tp, cp or pp torchtitan shards weights, or computes in fp32"
        raise ValueError(f"{said}: choose a plan of level 2 or 3 of ZeRO")
    _refuse_selective(plan, "torchtitan")
    found: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": plan.micro_batch * (plan.micro_batches if plan.pp > 1 else 1),
            "global_batch_size": job.batch,
            "seq_len": job.model.seq_len,
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        },
        "parallelism": {
            "data_parallel_replicate_degree": plan.dp if replicated else 1,
            "data_parallel_shard_degree": 1 if replicated else plan.dp,
            "fsdp_reshard_after_forward": "always" if plan.zero == 3 else "never",
            "tensor_parallel_degree": plan.tp,
            "context_parallel_degree": plan.cp,
            "pipeline_parallel_degree": plan.pp,
            "expert_parallel_degree": plan.ep,
        },
        "activation_checkpoint": {"mode": RECOMPUTE[plan.recompute]},
    }
    if plan.cp > 1:
        found["parallelism"]["context_parallel_rotate_method"] = "alltoall"
    if plan.pp > 1:
        found["parallelism"] |= {
            "pipeline_parallel_schedule": _SCHEDULES[name],
            "pipeline_parallel_microbatch_size": plan.micro_batch,
            "module_fqns_per_model_part": _modules(job.model, plan),
        }
    return found


def _refuse_selective(plan: Plan, who: str) -> None:
    if RECOMPUTE[plan.recompute] == "selective":
        said = f"{who} does not recompute attention alone"
        raise ValueError(f"{said}: choose a plan with recompute none or full")


def _cut(model: ModelConfig, plan: Plan) -> tuple[int, ...]:
    """Layers of each stage."""
    train = plan.train(model)
    return train.layers or (model.num_layers,)


def _modules(model: ModelConfig, plan: Plan) -> list[list[str]]:
    """torchtitan's names of the modules of each stage."""
    found: list[list[str]] = []
    begin = 0
    for count in _cut(model, plan):
        found.append([f"layers.{i}" for i in range(begin, begin + count)])
        begin += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", "output"]
    return found


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def torchtitan(job: Job, plan: Plan) -> str:
    """The TOML of torchtitan 0.2.2: the sections that a plan decides."""
    lines = [f"# torchtitan {TORCHTITAN}; with pp, local_batch_size is of all micro-batches"]
    if plan.cp > 1 and ulysses(job.model, plan):
        lines.append("# cp was planned as Ulysses, and is a ring here: its seconds differ")
    for section, values in torchtitan_values(job, plan).items():
        lines += ["", f"[{section}]", *(f"{name} = {_toml(v)}" for name, v in values.items())]
    return "\n".join(lines) + "\n"


def torchtitan_recipe(job: Job, plan: Plan) -> str:
    """A Python function for torchtitan 0.3.0 and later, which reads no TOML: the same names, less
    what went, and with sequence parallelism named."""
    values = torchtitan_values(job, plan)
    values["parallelism"].pop("context_parallel_rotate_method", None)
    values["parallelism"]["enable_sequence_parallel"] = plan.tp > 1
    again = {"none": "None", "full": "FullAC.Config()"}[values.pop("activation_checkpoint")["mode"]]
    lines = [
        "# torchtitan 0.3.0: give it the config of your model",
        "from torchtitan.distributed.activation_checkpoint import FullAC",
        "",
        "",
        "def planned(config):",
    ]
    for section, named in values.items():
        lines += [f"    config.{section}.{name} = {value!r}" for name, value in named.items()]
    lines += [f"    config.activation_checkpoint = {again}", "    return config"]
    return "\n".join(lines) + "\n"


def megatron_values(job: Job, plan: Plan) -> dict[str, Any]:
    """Flags of Megatron-LM core 0.16.1 and later, without dashes; True stands alone.

    Raises ValueError: for ZB-H1, which it has not.
    """
    if PLANNED[plan.schedule] not in ("one_f_one_b", "interleaved"):
        name = PLANNED[plan.schedule]
        raise ValueError(f"Megatron-LM has no {name}: choose one_f_one_b or interleaved")
    model = job.model
    found: dict[str, Any] = {
        "tensor-model-parallel-size": plan.tp,
        "pipeline-model-parallel-size": plan.pp,
        "context-parallel-size": plan.cp,
        "expert-model-parallel-size": plan.ep,
        "expert-tensor-parallel-size": 1,
        "micro-batch-size": plan.micro_batch,
        "global-batch-size": job.batch,
        "seq-length": model.seq_len,
        "bf16": True,
        "accumulate-allreduce-grads-in-fp32": True,
        "sequence-parallel": plan.tp > 1,
        "use-distributed-optimizer": plan.zero > 0,
        "use-megatron-fsdp": plan.zero > 1,
    }
    if model.num_experts == 1:
        del found["expert-model-parallel-size"], found["expert-tensor-parallel-size"]
    if plan.zero > 1:
        strategy = "optim_grads" if plan.zero == 2 else "optim_grads_params"
        found |= {"data-parallel-sharding-strategy": strategy, "ckpt-format": "fsdp_dtensor"}
        found |= {"overlap-grad-reduce": True, "overlap-param-gather": plan.zero == 3}
    if plan.cp > 1:
        found["cp-comm-type"] = "a2a" if ulysses(model, plan) else "p2p"
    if plan.pp > 1:
        stages = [f"t*{n}" if n > 1 else "t" * n for n in _cut(model, plan)]
        stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
        found["pipeline-model-parallel-layout"] = "|".join(stages)
    if RECOMPUTE[plan.recompute] == "full":
        found |= {"recompute-granularity": "full", "recompute-method": "uniform"}
        found["recompute-num-layers"] = 1
    elif RECOMPUTE[plan.recompute] == "selective":
        found["recompute-granularity"] = "selective"
    return {name: value for name, value in found.items() if value is not False}


def megatron(job: Job, plan: Plan) -> str:
    """Flags of Megatron-LM for a shell, alike on each node; those of the model and the data are
    left to you."""
    flags = [_flag("--" + name, value) for name, value in megatron_values(job, plan).items()]
    ranks, meet = f"--nproc-per-node {job.cluster.gpus_per_node}", []
    if job.cluster.nodes > 1:
        ranks = f"--nnodes {job.cluster.nodes} {ranks}"
        meet = [f'--rdzv-id plan --rdzv-backend c10d --rdzv-endpoint "{_NODE}:{_PORT}"']
    # Its checks ask for this with tp or cp before Blackwell, and forbid it to its FSDP.
    queues = "CUDA_DEVICE_MAX_CONNECTIONS=1 " * (plan.tp * plan.cp > 1 and plan.zero < 2)
    begin = [f"{queues}torchrun {ranks}", *meet, 'pretrain_gpt.py "${MODEL_AND_DATA[@]}"']
    return " \\\n  ".join([*begin, *flags]) + "\n"


def accelerate_values(job: Job, plan: Plan) -> dict[str, Any]:
    """Flags of `accelerate launch` 1.15 with FSDP2. Its cp is a ring.

    Raises ValueError: for pipelines and experts, which it has not, levels 0 and 1 of ZeRO, and
        recomputation of attention alone.
    """
    if plan.pp > 1 or plan.ep > 1:
        raise ValueError(f"Accelerate's FSDP2 has no pp={plan.pp}, ep={plan.ep}: choose 1 of both")
    if plan.zero < 2 and plan.replicas > 1:
        raise ValueError(f"FSDP2 has no level {plan.zero} of ZeRO: choose a plan of level 2 or 3")
    _refuse_selective(plan, "FSDP2")
    ring = {"parallelism_config_cp_comm_strategy": "alltoall"} if plan.cp > 1 else {}
    meet = {  # a rank of the machine must be given, and c10d gives others
        "machine_rank": 0, "rdzv_backend": "c10d",
        "main_process_ip": _NODE, "main_process_port": _PORT,
    } if job.cluster.nodes > 1 else {}  # fmt: skip
    return {
        "num_processes": plan.gpus,
        "num_machines": job.cluster.nodes,
        **meet,
        "mixed_precision": "bf16",
        "use_fsdp": True,
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": "true" if plan.zero == 3 else "false",
        "fsdp_activation_checkpointing": "true" if plan.recompute else "false",
        "use_parallelism_config": True,
        "parallelism_config_dp_replicate_size": 1,
        "parallelism_config_dp_shard_size": plan.dp,
        "parallelism_config_tp_size": plan.tp,
        "parallelism_config_cp_size": plan.cp,
        **ring,
    }


def accelerate(job: Job, plan: Plan) -> str:
    """`accelerate launch` with FSDP2 for a shell, alike on each node; batch and sequence are the
    script's."""
    flags = [_flag("--" + name, value) for name, value in accelerate_values(job, plan).items()]
    return " \\\n  ".join(["accelerate launch", *flags, "train.py"]) + "\n"


def _flag(name: str, value: Any) -> str:
    if value is True:
        return name
    mark = '"' if "$" in str(value) else "'" * ("|" in str(value))
    return f"{name} {mark}{value}{mark}"


WRITERS: dict[str, Callable[[Job, Plan], str]] = {
    "torchtitan": torchtitan,
    "torchtitan-recipe": torchtitan_recipe,
    "megatron": megatron,
    "accelerate": accelerate,
}


def export(name: str, job: Job, plan: Plan) -> str:
    """The plan for a framework: a name of `WRITERS`.

    Raises ValueError: for what the framework has not, for an unknown name, and for a device without
        bf16, which all of them write.
    """
    if name not in WRITERS:
        raise ValueError(f"no format {name!r}: there are {', '.join(WRITERS)}")
    if (device := job.cluster.device).half != "bf16":
        said = f"{device.name} has no bf16, which these flags ask for"
        raise ValueError(f"{said}: take the degrees of --json, and the framework's flags for fp16")
    return WRITERS[name](job, plan)
