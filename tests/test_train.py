"""examples/train.py: one process and any mesh train alike, a plan starts it, and a killed run ends as one that was not."""

import json
import math
import os
import pathlib
import re
import runpy
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import run

from labutils import huggingface
from labutils.config import TrainConfig
from labutils.planner.__main__ import main as planner
from labutils.world import worker

ROOT = pathlib.Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train.py"
SIZES = dict(
    model_type="llama", num_hidden_layers=2, hidden_size=16, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=32, vocab_size=256, max_position_embeddings=16,
    rms_norm_eps=1e-5,
)  # fmt: skip
KINDS = {
    "llama": SIZES,
    "gpt2": dict(model_type="gpt2", n_layer=2, n_embd=16, n_head=4, vocab_size=256, n_positions=16),
    "mixtral": SIZES | dict(model_type="mixtral", num_local_experts=4, rope_theta=1e4),
}


@pytest.fixture
def train(monkeypatch, tmp_path):
    """Runs the script; its metrics."""
    monkeypatch.setattr(sys, "argv", sys.argv[:1])

    def run(*options, kind="llama", out="run"):
        (tmp_path / f"{kind}.json").write_text(json.dumps(KINDS[kind]))
        words = ["--model", tmp_path / f"{kind}.json", "--out", tmp_path / out, "--held-out", 5]
        script([str(word) for word in (*words, *options)])
        return lines(tmp_path / out)

    return run


def script(words):
    sys.argv[1:] = words
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as exit:
        raise RuntimeError(f"exit status {exit.code}") from None


def lines(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(out):
    return load_file(sorted(out.glob("step-*.safetensors"))[-1])


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


MESHES = {
    "llama": ("--pp 2 --dp 2 --tp 2 --zero 1 --recompute full --micro-batches 2",
              "--dp 2 --cp 2 --zero 3 --recompute selective --micro-batches 2"),
    "gpt2": ("--pp 2 --tp 4 --schedule zb_h1",),
    "mixtral": ("--dp 2 --ep 2 --tp 2 --pp 2 --zero 2 --micro-batches 2",),
}  # fmt: skip


@pytest.mark.parametrize("kind", MESHES)
def test_ranks_train_as_one_process(kind, train, tmp_path):
    how = "--precision", "fp64", "--steps", 2, "--warm-up", 1, "--lr", 0.01, "--clip", 0.5
    one = train(*how, kind=kind, out="one")
    assert one[-1]["loss"] < one[0]["loss"]
    assert [line["lr"] for line in one] == pytest.approx([0.01, 0.01])
    assert max(line["norm"] for line in one) > 0.5  # or nothing is clipped
    for i, mesh in enumerate(MESHES[kind]):
        many = train(*how, *mesh.split(), kind=kind, out=f"many {i}")
        for name in ("loss", "norm", "held_out"):
            found, wanted = ([x[name] for x in each if name in x] for each in (many, one))
            assert found == pytest.approx(wanted, rel=1e-12), name
        theirs = weights(tmp_path / f"many {i}")
        for name, weight in weights(tmp_path / "one").items():
            if "/" not in name:
                torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-7)


def test_a_plan_starts_it_and_what_it_leaves_loads_elsewhere(train, tmp_path, capsys):
    (tmp_path / "llama.json").write_text(json.dumps(SIZES))
    options = f"--model {tmp_path / 'llama.json'} --nodes 1 --gpus-per-node 4 --json"
    assert planner([*options.split(), "--seq-len", "16", "--batch-tokens", "128"]) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    how = "--plan", tmp_path / "plan.json", "--export", tmp_path / "hf", "--gpu", "H100"
    found = train(*how, "--steps", 2, "--precision", "bf16")
    assert all(0 < line["mfu"] < 1e-3 for line in found)
    model = huggingface.from_hf(tmp_path / "hf")
    text = runpy.run_path(str(SCRIPT))
    held = text["Data"](text["TEXTS"], 16, 0).held_out[:5].long()
    with torch.no_grad():
        loss = model.loss(held[:, :-1], held[:, 1:]).item()
    assert loss == pytest.approx(found[-1]["held_out"], rel=2e-3)  # bf16 and its fp32 copy


@pytest.fixture
def nodes(tmp_path):
    """What the script prints on two nodes, each a torchrun agent of one rank. They meet in a file, so that no port has to be free, and know each other as 127.0.0.1. Who stops listening kills them."""
    environment = {name: v for name, v in os.environ.items() if not name.startswith("TORCHELASTIC")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["GLOO_SOCKET_IFNAME"] = worker.loopback()
    meeting = "--rdzv-backend=c10d --rdzv-id=two --rdzv-conf=store_type=file --local-addr=127.0.0.1"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    torchrun += [*meeting.split(), f"--rdzv-endpoint={tmp_path / 'meeting'}", str(SCRIPT)]

    def start(*words):
        read, write = os.pipe()
        how = dict(env=environment, cwd=tmp_path, stdout=write, stderr=write)
        agents = [subprocess.Popen([*torchrun, *map(str, words)], **how) for _ in range(2)]
        os.close(write)
        try:
            with open(read) as told:
                yield from told
        finally:
            kill(agents)

    return start


def kill(agents):
    """SIGKILL, for agents and ranks."""
    running = [psutil.Process(agent.pid) for agent in agents if agent.poll() is None]
    for process in [
        *(rank for each in running for rank in each.children(recursive=True)),
        *running,
    ]:
        process.kill()
    for agent in agents:
        agent.wait()


def test_a_killed_run_ends_as_one_that_was_not(train, nodes, tmp_path):
    """Both nodes are killed when they are past a snapshot; threads go on at the same place of the text, to the same bits."""
    (tmp_path / "llama.json").write_text(json.dumps(SIZES))
    how = "--every 3 --tp 2 --micro-batch 1 --warm-up 100000".split()
    words = ["--model", tmp_path / "llama.json", "--out", tmp_path / "killed", "--held-out", 5]
    told = nodes(*words, *how, "--steps", 100000)
    said = []
    while not said or "step 5/" not in said[-1]:
        said.append(next(told, None))
        assert said[-1] is not None, "".join(said[:-1])
    told.close()
    done = max(int(p.stem[5:]) for p in (tmp_path / "killed").glob("step-*"))
    assert done >= 3
    (tmp_path / "killed" / f".step-{done + 3:08}.safetensors.0").write_bytes(b"half")
    went_on = train(*how, "--steps", done + 2, "--resume", out="killed")
    whole = train(*how, "--steps", done + 2, out="whole")
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    kept = [[(line["step"], line["loss"], line["norm"]) for line in x] for x in (went_on, whole)]
    assert kept[0] == kept[1] and len(whole) == done + 2


def test_it_goes_on_where_it_was_on_another_mesh_with_another_batch(train, tmp_path):
    how = "--precision", "fp64", "--every", 1, "--micro-batch", 1
    first = train(*how, "--steps", 2, "--micro-batches", 4)
    for out in ("a", "b"):
        (tmp_path / out).mkdir()
        for path in (tmp_path / "run").iterdir():
            (tmp_path / out / path.name).write_bytes(path.read_bytes())
    here = train(*how, "--steps", 3, "--micro-batches", 8, "--resume", out="a")
    mesh = "--dp", 2, "--pp", 2, "--tp", 2, "--zero", 2, "--micro-batches", 4, "--resume"
    there = train(*how, "--steps", 3, *mesh, out="b")
    assert here[:2] == there[:2] == first
    assert there[2]["loss"] == pytest.approx(here[2]["loss"], rel=1e-12)
    assert len(list((tmp_path / "b").glob("step-*"))) == 2  # the newest and one more
    with pytest.raises(Exception, match="was begun with --seq-len 16 --seed 0"):
        train(*how, "--seed", 1, "--resume", "--steps", 9)


def test_every_row_comes_once_in_an_epoch_whatever_the_batch(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(250)))
    data = runpy.run_path(str(SCRIPT))["Data"]([tmp_path / "text"], 3, seed=5)
    n = len(data.rows)
    parts = [data.batch(had, 7) for had in range(0, 7 * n, 7)]
    assert torch.equal(torch.cat(parts), data.batch(0, 7 * n))
    epochs = data.batch(0, 2 * n)[:, 0].split(n)
    assert [sorted(e.tolist()) for e in epochs] == [data.rows[:, 0].tolist()] * 2
    assert not torch.equal(*epochs)
    assert data.held_out.min() >= data.rows.max()  # nothing of it is trained but the byte between


@pytest.mark.parametrize(
    "options, told",
    [
        ("--tp 3", "tp=3 does not divide num_heads=8"),
        ("--schedule zigzag", "schedule='zigzag' is unknown: use 1f1b, "),
        ("--model gpt5", "no model called 'gpt5': there are gpt2, "),
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--pp 2 --chunks 2", "chunks=2, and 1f1b has one chunk for each rank: set schedule="),
        ("--gpu X9", "no device called 'X9': there are V100, "),
        ("--resume", "--export and --resume read the snapshots of --out: give a folder"),
        ("--seq-len 900000", "are not ten sequences of 900,000 tokens: give more, or"),
        ("--zero 3 --pp 2 --schedule zb_h1", "set zero=2, or schedule='one_f_one_b'"),
        ("--out .", "has step-00000001.safetensors: add --resume to go on, or give another"),
        ("--text none.txt", "No such file or directory: 'none.txt'"),
    ],
)
def test_bad_options_are_refused_with_what_would_do(options, told, monkeypatch, capsys, tmp_path):
    (tmp_path / "step-00000001.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *options.split()])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert exit.value.code == 2 and told in capsys.readouterr().err


def test_a_device_without_the_format_has_no_mfu_and_still_trains():
    peak, bf16 = runpy.run_path(str(SCRIPT))["peak"], TrainConfig(micro_batch=1, global_batch=1)
    assert math.isnan(peak("T4", bf16)) and peak("T4", replace(bf16, precision="fp16")) == 65e12
    assert peak("H100", bf16) == 989.4e12


def torchruns():
    """The README's torchrun commands, a line each, from `torchrun` on."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line[line.index("torchrun ") :].split()[1:] for line in text.splitlines()
            if re.search(r"\btorchrun .*examples/train\.py", line)]  # fmt: skip


def test_torchrun_and_the_script_take_the_readmes_lines():
    """For one node, for several, and in Slurm's script: ranks make up the mesh."""
    options, met = runpy.run_path(str(SCRIPT))["options"](), []
    for words in torchruns():
        words = ["2" if word == '"$SLURM_NNODES"' else word for word in words]
        torch_ = run.parse_args(words)
        mine = options.parse_args(torch_.training_script_args)
        assert (ROOT / torch_.training_script).samefile(SCRIPT)
        met.append(torch_.nnodes)
        if not mine.plan:
            ranks = int(torch_.nnodes.split(":")[0]) * int(torch_.nproc_per_node)
            assert math.prod(getattr(mine, axis) or 1 for axis in ("pp", "dp", "cp", "tp")) == ranks
        if torch_.nnodes == "2":
            assert torch_.rdzv_backend == "c10d" and torch_.rdzv_id and torch_.rdzv_endpoint
    assert sorted(set(met)) == ["1:1", "2"] and met.count("2") == 2 and len(met) >= 4
