"""The planner from a shell, and its plans in the words of frameworks."""

import json
import pathlib
import re
import subprocess
import sys
import tomllib
from dataclasses import replace

import pytest

from labutils import huggingface, planner
from labutils.config import Hardware, ModelConfig
from labutils.planner import __main__ as command
from labutils.planner import export, plans

# Names that Megatron-LM's own parser takes, of core_v0.16.1 and of core_v0.19.0, with its checks of
# all together (test_other_frameworks.py).
MEGATRON = set(
    """tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size micro-batch-size global-batch-size
    seq-length bf16 accumulate-allreduce-grads-in-fp32 sequence-parallel use-distributed-optimizer
    use-megatron-fsdp data-parallel-sharding-strategy cp-comm-type pipeline-model-parallel-layout
    recompute-granularity recompute-method recompute-num-layers ckpt-format overlap-grad-reduce
    overlap-param-gather""".split()
)
# Further options of torchtitan 0.2.2 that labs name.
TORCHTITAN = {f"{part}.{name}" for part, names in export.TORCHTITAN_NAMES.items() for name in names}
TORCHTITAN |= set(
    """profiling.enable_memory_snapshot training.enable_cpu_offload model.converters
    parallelism.disable_loss_parallel parallelism.enable_async_tensor_parallel
    parallelism.expert_tensor_parallel_degree
    quantize.linear.float8.recipe_name lr_scheduler.warmup_steps optimizer.lr""".split()
)
MEET = """ \\
  --rdzv-id plan --rdzv-backend c10d --rdzv-endpoint "${node0:?}:29400" \\
  """
LABS = sorted((pathlib.Path(__file__).parents[1] / "notebooks/text").glob("*.py"))
JOB = planner.Job(
    model=replace(ModelConfig.named("llama-3.1-8b"), seq_len=8192),
    cluster=planner.Cluster(device=Hardware.named("H100"), nodes=8), batch_tokens=2**22,
)  # fmt: skip
PLANS = {
    "pipeline": planner.Plan(tp=2, pp=4, dp=8, micro_batches=64, schedule=2, chunks=2, zero=2),
    "1f1b": planner.Plan(tp=8, pp=2, cp=2, dp=2, micro_batches=256, zero=3, recompute=2),
    "shards": planner.Plan(tp=4, dp=16, micro_batch=2, micro_batches=16, zero=3),
    "level 1": planner.Plan(tp=4, cp=2, dp=8, micro_batches=64),
}


def run(capsys, words):
    try:
        status = command.main(words.split())
    except SystemExit as stop:
        status = stop.code
    return status, *capsys.readouterr()


BASE = "--model llama-3.1-8b --nodes 2 --gpu H100 --batch-tokens 1e6"


def test_the_table_the_rows_and_the_reasons(capsys):
    status, out, err = run(capsys, f"{BASE} --tokens 15e12 --price 2 --explain --top 4")
    assert status == 0 and not err and "90% of the device" in out and "GPU-hours" in out
    assert "ZeRO-2, ZeRO-3: assuming" in out and "1 node more: step" in out
    assert "16 GPUs do not divide a batch of 122 sequences: of 128 (--batch-tokens 1048576)" in out
    lines = [line for line in out.splitlines() if "ZeRO-" in line and line[:3].strip().isdigit()]
    rows = json.loads(run(capsys, f"{BASE} --tokens 15e12 --price 2 --json --top 4")[1])
    least = min(row["step_seconds"] for row in rows)
    marked = [line[3] for line in lines]
    assert marked == [" ="[row["step_seconds"] <= 1.03 * least] for row in rows] and "=" in marked
    for line, row in zip(lines, rows, strict=True):
        told = [float(word.strip("%")) for word in line[4:].replace(",", "").split()[:5]]
        names = "step_seconds", "peak_bytes", "mfu", "tokens_per_second_and_gpu", "days"
        exact = dict(row, peak_bytes=row["peak_bytes"] / 1e9, mfu=100 * row["mfu"]["causal"])
        assert told == [pytest.approx(exact[name], rel=5e-3) for name in names]
    assert rows[0]["gpu_hours"] == pytest.approx(16 * 24 * rows[0]["days"])
    assert rows[0]["cost"] == pytest.approx(2 * rows[0]["gpu_hours"])
    assert "at the price given" not in run(capsys, f"{BASE} --tokens 15e12 --top 4")[1]
    assert len(rows) == 4 and sum(rows[0]["seconds"].values()) == pytest.approx(
        rows[0]["step_seconds"]
    )
    plan = planner.Plan.read(rows[0])
    asked = command.asked(command.options().parse_args(BASE.split()))
    alone = planner.estimate(asked, plan).seconds  # numpy sums one plan in another order than many
    assert alone == pytest.approx(rows[0]["step_seconds"], rel=1e-12)
    tokens = 16 * 86400 * rows[0]["days"] * rows[0]["tokens_per_second_and_gpu"]
    assert tokens == pytest.approx(15e12)
    best = enumerate(planner.search(asked).best(60), 1)
    row, deep = next((i, one.plan) for i, one in best if one.plan.pp > 2)
    status, out, _ = run(capsys, f"{BASE} --plan {row}")
    assert status == 0 and "optimizer · rank 0" in out and "bubble" in out
    assert out.startswith(plans.text_of(deep) + "\n")
    shares = [float(share) for share in re.findall(r" s +([\d.]+)%", out)]
    assert len(shares) > 3 and sum(shares) == pytest.approx(100, abs=0.5)
    assert all(f"rank {i} of {deep.pp} of the pipeline" in out for i in (0, 1, deep.pp - 1))
    slow = command.options().parse_args([*BASE.split(), "--between", "25GB/s"])
    assert command.asked(slow).cluster.between == 25e9
    status, out, _ = run(capsys, f"{BASE} --export megatron")
    assert status == 0 and f"torchrun --nnodes 2 --nproc-per-node 8{MEET}pretrain_gpt.py" in out


def test_a_plan_is_written_in_words_and_read_again(capsys, tmp_path):
    rows = json.loads(run(capsys, f"{BASE} --json --top 40")[1])
    assert {row["plan"]["schedule"] for row in rows} > {"1f1b"} and rows[0]["seq_len"] == 8192
    assert all(row["plan"]["recompute"] in ("none", "selective", "full") for row in rows)
    asked = command.asked(command.options().parse_args(BASE.split()))
    best = planner.search(asked).best(40)
    for row, one in zip(rows, best, strict=True):
        assert not {"even", "modern", "gradient_bytes"} & set(row["plan"])
        assert planner.Plan.read(row["plan"]) == one.plan
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(rows))
    assert planner.Plan.read(path) == best[0].plan
    same = rows[0]["plan"] | {"schedule": "one_f_one_b"}
    assert planner.Plan.read(same).schedule == 0
    for wrong, said in (
        ({"tp": 2, "even": True}, "a plan has no even: it has pp, dp"),
        ({"schedule": "2f2b"}, "schedule='2f2b' is unknown: use 1f1b"),
        ({"dp": 2.5}, "dp must be a whole number"),
        ([], "holds no plan"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            planner.Plan.read(wrong)
    for given, said in (
        (dict(schedule=["a"]), r"schedule=\['a'\]: 0 is 'one_f_one_b'.*; Plan.read takes the word"),
        (dict(schedule="interleaved"), "schedule='interleaved': 0 is 'one_f_one_b'"),
        (dict(schedule=4), "schedule=4: 0 is"),
        (dict(tp="2"), "tp must be a whole number, got '2'"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            planner.Plan(**given)


def test_a_reader_may_leave_before_the_end():
    words = [sys.executable, "-m", "labutils.planner", *BASE.split(), "--top", "4000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shell:
        shell.stdout.readline()
        shell.stdout.close()
        assert shell.stderr.read() == b"" and shell.wait() == 0


def test_a_long_search_says_how_far_it_is(capsys):
    asked = command.asked(command.options().parse_args(BASE.split()))
    found = planner.search(asked, command.progress(after=0))
    assert capsys.readouterr().err == f"{len(found):,} of {len(found):,} plans\n"
    command.progress(after=0)(4096, 9000)
    assert capsys.readouterr().err == "4,096 of 9,000 plans\r"
    planner.search(asked, command.progress(after=100))
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        ("--model gpt9 --nodes 1", "--model: no model called 'gpt9': there are"),
        ("--model none.json --nodes 1", "--model: there is no file 'none.json'"),
        ("--model gpt2 --nodes 1 --gpu B9", "--gpu: no device called 'B9': there are"),
        ("--model gpt2 --nodes 0", "nodes must be at least 1, got 0"),
        ("--model gpt2 --nodes 1 --reserve 2", "reserve=2.0 is a share of the memory"),
        ("--model gpt2 --nodes 1 --between fast", "--between: cannot read 'fast' as a quantity"),
        ("--model gpt2 --nodes 1 --batch-tokens 100", "--batch-tokens, --tokens or --stack: batch"),
        ("--model deepseek-v3 --nodes 1 --stack course", "GPT does not run multi-head latent"),
        ("--model llama-3.1-405b --nodes 1", "use 16 nodes, where one fits, a larger device"),
        ("--model llama-3.1-405b --nodes 65 --reserve 0.99", "of H100): use more nodes, a larger"),
        (f"{BASE} --price 2", "--price is paid for a whole training: give its --tokens, too"),
        (f"{BASE} --plan 0", "argument --plan: '0': rows are counted from 1, in nine"),
        (f"{BASE} --plan 9999999", "--plan 9999999: there are rows 1 to"),
        (f"{BASE} --top -3", "argument --top: '-3': rows are counted from 1, in nine"),
        (f"{BASE} --json --export megatron", "--export prints flags, not JSON"),
        (f"{BASE} --between 0GB", "planner: --between: 0GB is no link"),
        (f"{BASE} --between 400", "--between: 400 is no link: give what each GPU sends, as 50GB/s or"),
        ("--model llama-3.1-8b --nodes 125", "in common, as with 500 sequences (4096000 tokens)"),
        ("--model llama-3.1-8b --nodes 9973", "they have divisors in common\n"),  # a prime
        (f"{BASE} --tokens 15Q", "argument --tokens: '15Q' is no number of tokens"),
        (f"{BASE} --batch-tokens inf", "argument --batch-tokens: 'inf' is no number"),
        (f"{BASE} --batch-tokens nan", "argument --batch-tokens: 'nan' is no number"),
        (f"{BASE} --plans 3", "unrecognized arguments: --plans 3"),
    ],
)
def test_errors_name_the_option_and_what_would_do(capsys, words, said):
    status, out, err = run(capsys, words)
    assert status == 2 and not out and said in err


def test_names_are_known_in_any_case_and_as_publishers_say_them():
    words = "--model meta-llama/Llama-3.1-8B --nodes 2 --gpu h100 --batch-tokens 1M"
    said = command.asked(command.options().parse_args(words.split()))
    assert said.model.name == "llama-3.1-8b" and said.cluster.device.name == "H100"


def test_what_leaves_a_node_is_the_devices_own_unless_given():
    for gpu, more, speed in (
        ("H100", "", 50e9),
        ("A100", "", 25e9),
        ("A100", "--between 9GB", 9e9),
        ("A100", "--between 400Gb/s", 50e9),
        ("A100", "--between 200Gbps", 25e9),
    ):
        words = f"--model gpt2 --nodes 2 --gpu {gpu} {more}".split()
        assert command.asked(command.options().parse_args(words)).cluster.between == speed


def test_a_model_is_called_as_its_file_or_folder(capsys, tmp_path):
    folder = tmp_path / "Tiny-1B"
    folder.mkdir()
    config = huggingface.config(replace(ModelConfig.named("llama-3.1-8b"), vocab_size=50_257))
    for path in (folder / "config.json", tmp_path / "tiny.json"):
        path.write_text(json.dumps(config))
    for given, name in ((folder, "Tiny-1B"), (folder / "config.json", "Tiny-1B")):
        assert run(capsys, f"--model {given} --nodes 1 --top 1")[1].startswith(f"{name} · 8 × H100")
    out = run(capsys, f"--model {tmp_path / 'tiny.json'} --nodes 1 --top 1")[1]
    assert out.startswith("tiny · ") and "no plan has tp, which would divide vocab_size=50,257" in out
    assert "config.json with 50,304" in out
    assert "no plan has tp" not in run(capsys, BASE)[1]


def test_learned_positions_are_as_many_as_the_model_has():
    for words, length in (("gpt2", 1024), ("gpt2 --seq-len 2048", 2048), ("llama-2-7b", 8192)):
        words = f"--model {words} --nodes 1".split()
        assert command.asked(command.options().parse_args(words)).model.seq_len == length


def test_a_batch_that_gpus_do_not_divide_is_said(capsys):
    few = run(capsys, BASE.replace("1e6", "5e6"))[1]
    assert "16 GPUs do not divide a batch of 610 sequences: of 608 (--batch-tokens 4980736)" in few
    asked = command.asked(command.options().parse_args(BASE.split()))
    plans_ = [len(planner.search(replace(asked, batch_tokens=n * 8192))) for n in (610, 608)]
    assert plans_[0] < plans_[1]
    for words in (BASE.replace("1e6", "4980736"), BASE.replace("1e6", "65536")):  # 608, and 8
        assert "do not divide" not in run(capsys, words)[1]
    lines = few.splitlines()
    none = run(capsys, "--model llama-3.1-8b --nodes 16 --seq-len 131072 --batch-tokens 4e6 --top 1")
    assert "128 GPUs are no multiple of a batch of 31 sequences: of 32" in none[1]
    asked = command.asked(command.options().parse_args(BASE.split()))
    for batch, best in ((31, 32), (24, 32), (41, 48), (16, 16), (7, 8), (3, 2), (1, 1)):
        assert replace(asked, batch_tokens=batch * 8192).fitting_batch == best, batch
    assert max(map(len, lines[-4:])) <= 100 and "rates: products: fitted" in few


def test_the_first_row_that_a_framework_has_is_exported(capsys):
    words = f"{BASE} --export accelerate"
    status, out, err = run(capsys, words)
    asked = command.asked(command.options().parse_args(words.split()))
    first = None
    for row, one in enumerate(planner.search(asked).best(50), 1):
        try:
            wanted = export.export("accelerate", asked, one.plan)
        except ValueError as error:
            first = first or error
            assert run(capsys, f"{words} --plan {row}")[2] == f"python -m labutils.planner: {error}\n"
            continue
        break
    assert (status, out) == (0, wanted) and row > 1
    assert err == f"row {row}, since row 1 cannot be: {first}\n"
    assert not run(capsys, f"{BASE} --export megatron")[2]


@pytest.mark.parametrize("gpu", Hardware.names())
def test_every_device_has_plans(capsys, gpu):
    words = f"--model gpt2 --nodes 1 --gpu {gpu} --top 1"
    status, out, err = run(capsys, f"{words} --explain")
    assert (status, err) == (0, "") and "%" in out
    assert json.loads(run(capsys, f"{words} --json")[1])[0]["mfu"]["causal"] > 0.1
    old = gpu in ("V100", "T4")
    assert (f"{gpu} has no bf16: counted is fp16" in out) is old
    status, flags, err = run(capsys, f"{words} --export megatron")
    assert (status, "--bf16" in flags) == ((2, False) if old else (0, True))
    assert (f"{gpu} has no bf16, which these flags ask for: take the degrees" in err) is old


def test_tokens_have_suffixes():
    job = command.asked(command.options().parse_args(f"{BASE} --tokens 1.5t".split()))
    assert job.tokens == 1.5e12 and [command._tokens(w) for w in ("2K", "4M", "1B")] == [2e3, 4e6, 1e9]


def test_it_starts_without_torch_and_helps():
    program = (
        "import sys\nfrom labutils.planner import __main__ as m\n"
        "try: m.main(['--help'])\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "example, Llama-3.1-70B" in done.stdout


@pytest.mark.parametrize("name", ["pipeline", "1f1b", "shards"])
def test_torchtitans_toml_has_its_names_and_our_numbers(name):
    plan = PLANS[name]
    found = tomllib.loads(export.export("torchtitan", JOB, plan))
    for section, values in found.items():
        assert set(values) <= set(export.TORCHTITAN_NAMES[section])
    there, batch = found["parallelism"], found["training"]
    assert (there["tensor_parallel_degree"], there["context_parallel_degree"]) == (plan.tp, plan.cp)
    assert there["data_parallel_shard_degree"] == plan.dp
    accumulated = batch["global_batch_size"] // (batch["local_batch_size"] * plan.dp)
    assert accumulated == (1 if plan.pp > 1 else plan.micro_batches)
    assert there["fsdp_reshard_after_forward"] == ("always" if plan.zero == 3 else "never")
    if plan.pp > 1:
        parts = there["module_fqns_per_model_part"]
        assert len(parts) == plan.pp * plan.chunks
        assert [m for part in parts for m in part] == [
            "tok_embeddings", *(f"layers.{i}" for i in range(32)), "norm", "output"
        ]  # fmt: skip
    recipe = {}
    said = export.export("torchtitan-recipe", JOB, plan)
    exec(said.partition("import FullAC")[2], recipe)
    assert callable(recipe["planned"]) and ("FullAC.Config()" in said) == (plan.recompute == 2)


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_labs_name_torchtitans_options_by_version(lab):
    text = lab.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "torchtitan" in line or "parallelism." in line]
    parts = "|".join({name.split(".")[0] for name in TORCHTITAN})
    named = set(re.findall(rf"(?:--|`)((?:{parts})\.[\w.]+)", "\n".join(lines)))
    assert named <= TORCHTITAN | {"parallelism.enable_sequence_parallel"}
    assert not named or "torchtitan 0.2.2" in text
    if "parallelism.enable_sequence_parallel" in named:
        assert "From torchtitan 0.3 on" in text


@pytest.mark.parametrize("name", PLANS)
def test_megatrons_flags_are_its_names(name):
    plan = PLANS[name]
    found = export.megatron_values(JOB, plan)
    assert set(found) <= MEGATRON
    assert found["global-batch-size"] == plan.dp * plan.micro_batch * plan.micro_batches == 512
    if plan.pp > 1:
        layout = found["pipeline-model-parallel-layout"]
        layers = sum(
            int(part.strip("EL").partition("*")[2] or len(part.strip("EL")))
            for part in layout.split("|")
        )
        assert layers == 32 and layout.count("|") == plan.pp * plan.chunks - 1
        assert layout.startswith("E") and layout.endswith("L")
    said = export.export("megatron", JOB, plan)
    assert all(f"--{flag}" in said for flag in found) and "False" not in said
    for zero in range(4):
        found = export.megatron_values(JOB, replace(plan, zero=zero))
        assert ("use-distributed-optimizer" in found) == (zero in (1, 2, 3))
        fsdp = {name: name in found for name in ("use-megatron-fsdp", "overlap-grad-reduce")}
        assert set(fsdp.values()) == {zero in (2, 3)} == {found.get("ckpt-format") == "fsdp_dtensor"}
        assert ("overlap-param-gather" in found) == (zero == 3)
        said = export.export("megatron", JOB, replace(plan, zero=zero))
        assert said.startswith("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun" if zero < 2 else "torchrun")
    assert ("sequence-parallel" in found) == (plan.tp in (2, 4, 8))
    assert found["micro-batch-size"] == plan.micro_batch


def test_words_follow_the_plan():
    ring, heads = (export.megatron_values(JOB, PLANS[name]) for name in ("1f1b", "level 1"))
    assert (ring["cp-comm-type"], heads["cp-comm-type"]) == ("p2p", "a2a")  # 8 heads on 16, on 8
    assert ring["data-parallel-sharding-strategy"] == "optim_grads_params"
    assert ring["recompute-granularity"] == "full" and "recompute-granularity" not in heads
    assert "use-megatron-fsdp" not in heads and heads["use-distributed-optimizer"]
    deep = export.megatron_values(JOB, PLANS["pipeline"])
    assert deep["data-parallel-sharding-strategy"] == "optim_grads" and "cp-comm-type" not in deep
    whole = planner.Plan(dp=16, tp=2, cp=2, micro_batch=2, micro_batches=16, zero=0)
    there = export.torchtitan_values(JOB, replace(whole, tp=1, cp=1))
    degrees = there["parallelism"]
    assert degrees["data_parallel_replicate_degree"] == 16
    assert degrees["data_parallel_shard_degree"] == 1
    assert there["training"]["local_batch_size"] == 2
    flags = export.accelerate_values(JOB, replace(whole, zero=2, tp=1))
    sizes = {name[19:]: n for name, n in flags.items() if name.startswith("parallelism_config")}
    ring = {"cp_size": 2, "cp_comm_strategy": "alltoall"}
    assert sizes == {"dp_replicate_size": 1, "dp_shard_size": 16, "tp_size": 1} | ring
    assert flags["fsdp_reshard_after_forward"] == "false" and flags["num_processes"] == 32
    few = replace(JOB, cluster=replace(JOB.cluster, nodes=2))
    plain = export.export("megatron", few, planner.Plan(dp=16, micro_batches=32))
    assert plain.startswith(f"torchrun --nnodes 2 --nproc-per-node 8{MEET}pretrain_gpt.py ")
    one = replace(JOB, cluster=replace(JOB.cluster, nodes=1))
    plain = export.export("megatron", one, planner.Plan(dp=8, micro_batches=64))
    assert plain.startswith("torchrun --nproc-per-node 8 \\\n  pretrain_gpt.py ")
    alone = export.accelerate_values(one, planner.Plan(dp=8, micro_batches=64, zero=3))
    assert "main_process_ip" not in alone and alone["num_machines"] == 1
    for cp, way, said in ((1, None, False), (2, "alltoall", True), (16, "alltoall", False)):
        shards = planner.Plan(cp=cp, dp=64 // cp, micro_batches=8 * cp, zero=3)
        there = export.torchtitan_values(JOB, shards)["parallelism"]
        assert there.get("context_parallel_rotate_method") == way
        ring = export.accelerate_values(JOB, shards).get("parallelism_config_cp_comm_strategy")
        assert ring == way
        assert ("was planned as Ulysses" in export.export("torchtitan", JOB, shards)) is said
        assert "rotate_method" not in export.export("torchtitan-recipe", JOB, shards)


def test_what_a_framework_has_not_is_refused():
    for name, plan, why in (
        ("torchtitan", PLANS["level 1"], "no level 1 of ZeRO: choose a plan of level 2"),
        ("torchtitan", replace(PLANS["pipeline"], schedule=3, chunks=1), "no zb_h1"),
        ("torchtitan", replace(PLANS["1f1b"], zero=0), "beside tp, cp or pp torchtitan shards"),
        ("torchtitan", planner.Plan(tp=8, zero=0, micro_batches=512), "or computes in fp32: choose"),
        ("torchtitan", replace(PLANS["shards"], recompute=1), "does not recompute attention alone"),
        ("accelerate", replace(PLANS["shards"], recompute=1), "FSDP2 does not recompute attention"),
        ("megatron", replace(PLANS["1f1b"], schedule=1), "no gpipe: choose one_f_one_b"),
        ("accelerate", PLANS["pipeline"], "no pp=4, ep=1"),
        ("accelerate", PLANS["level 1"], "no level 1"),
        ("jax", PLANS["shards"], "no format 'jax': there are torchtitan"),
    ):
        with pytest.raises(ValueError, match=why):
            export.export(name, JOB, plan)
    flags = export.export("accelerate", JOB, PLANS["shards"])
    assert "--parallelism_config_dp_shard_size 16" in flags and "--fsdp_version 2" in flags
