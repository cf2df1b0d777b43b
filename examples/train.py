r"""Train a GPT on any mesh of pp × dp × cp × tp (× ep), on bytes of text; go on after being killed.

    python examples/train.py                       one process; of more ranks, threads
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --dp 2 --tp 2 --zero 1 --out runs/small
    python -m labutils.planner --model examples/llama.json --seq-len 128 --batch-tokens 4096 \
        --nodes 1 --json > plan.json
    torchrun --nproc-per-node 8 examples/train.py --plan plan.json --out runs/planned --resume
"""

import argparse
import contextlib
import gzip
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from labutils import huggingface, planner, scaling, step, units
from labutils.config import DATA, Hardware, Mesh, ModelConfig, TrainConfig
from labutils.world import Rank, World

SMALL = Path(__file__).with_name("llama.json")
TEXTS = [DATA / f"python_{name}.txt.gz" for name in ("topics", "source")]


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    shell = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    shell.formatter_class = argparse.RawDescriptionHelpFormatter
    add = shell.add_argument
    add("--model", type=Path, default=SMALL, help="a name of data/models.csv, or a config.json")
    add("--seq-len", type=int, help="tokens of a sequence; the plan's, or the model's")
    add("--plan", type=Path, help="what `python -m labutils.planner --json` printed; its first")
    for name in planner.work.CHOSEN:
        kind = str if name in ("schedule", "recompute") else int
        add(f"--{name.replace('_', '-')}", type=kind, help="of the plan, or instead of its own")
    add("--precision", default="fp32", choices=("fp32", "bf16", "fp16", "fp64"))
    add("--autocast", action="store_true", help="weights stay fp32, products are in --precision")
    add("--steps", type=int, default=50, help="of the whole run (50)")
    add("--lr", type=float, default=3e-3, help="learning rate at its highest (0.003)")
    add("--warm-up", type=int, default=10, help="steps; then a cosine down to a tenth (10)")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient (1.0)")
    add("--seed", type=int, default=0, help="of the order of the data (0)")
    add("--text", type=Path, nargs="+", default=TEXTS, help="files, .gz or not; a byte is a token")
    add("--held-out", type=int, default=64, help="sequences of the last tenth to evaluate on (64)")
    add("--out", type=Path, help="folder of metrics.jsonl and snapshots, which all nodes see")
    add("--every", type=int, default=25, help="steps between snapshots, and held-out losses (25)")
    add("--resume", action="store_true", help="from the newest snapshot in --out, if there is one")
    add("--export", type=Path, metavar="FOLDER", help="at the end, for transformers; needs --out")
    add("--gpu", help="a name of data/hardware.csv, for MFU; unless given, the one in use")
    return shell


def asked(given: argparse.Namespace) -> tuple[ModelConfig, TrainConfig, Mesh]:
    """What the options describe; ValueError says what is wrong and what would do."""
    for name in ("steps", "warm_up", "held_out", "every"):
        units.whole(getattr(given, name), f"--{name.replace('_', '-')}", 1)
    if (given.export or given.resume) and not given.out:
        raise ValueError("--export and --resume read the snapshots of --out: give a folder")
    is_file = given.model.exists() or given.model.suffix == ".json"
    model = (ModelConfig.from_hf if is_file else ModelConfig.named)(str(given.model))
    if model.vocab_size < 256:
        raise ValueError(f"vocab_size={model.vocab_size}: a byte is a token, give 256 or more")
    row: Any = {"plan": {"micro_batch": 2, "micro_batches": 4, "zero": 0}}
    if given.plan:
        row = json.loads(given.plan.read_text(encoding="utf-8"))
        row = row[0] if isinstance(row, list) else row
    flags = {n: v for n in planner.work.CHOSEN if (v := getattr(given, n)) is not None}
    plan = planner.Plan.read({**row.get("plan", row), **flags})
    model = replace(model, seq_len=given.seq_len or row.get("seq_len", model.seq_len), dropout=0)
    how: Any = {name: getattr(given, name) for name in ("precision", "autocast", "lr", "clip")}
    half = given.precision in ("bf16", "fp16") and not given.autocast
    train = replace(plan.train(model), fp32_gradients=half, **how)
    step.check_plan(model, train, plan.mesh)
    peak(given.gpu, train)  # or an error
    _ = given.export and huggingface.family(model)  # or an error
    if given.out and not given.resume and (old := snapshots(given.out)):
        remedy = "add --resume to go on, or give another folder"
        raise ValueError(f"--out {given.out} has {old[-1].name}: {remedy}")
    return model, train, plan.mesh


def snapshots(out: Path) -> list[Path]:
    """Those of a run, the oldest first."""
    return sorted(out.glob("step-*.safetensors"))


class Data:
    """Rows of s + 1 bytes of text, the last tenth held out; their order hangs on the seed alone, on
    no mesh and no batch: a run has to remember how many it has had, and nothing else."""

    def __init__(self, files: list[Path], s: int, seed: int) -> None:
        read = (f.read_bytes() for f in files)
        text = b"".join(gzip.decompress(x) if x[:2] == b"\x1f\x8b" else x for x in read)
        if len(text) <= 10 * s:
            few = f"the {len(text):,} bytes of --text are not ten sequences of {s:,} tokens"
            raise ValueError(f"{few}: give more, or a smaller --seq-len")
        self.seed = seed
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, s + 1, s)
        self.rows, self.held_out = rows.split([len(rows) - len(rows) // 10, len(rows) // 10])

    def batch(self, had: int, count: int) -> Tensor:
        """The rows that come after so many; each epoch has an order of its own."""
        n, draw = len(self.rows), torch.Generator()
        seeds = (self.seed + 1_000_003 * i for i in range(had // n, (had + count - 1) // n + 1))
        order = torch.cat([torch.randperm(n, generator=draw.manual_seed(seed)) for seed in seeds])
        return self.rows[order[had % n :][:count]]


def pair(rows: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens, and what follows each."""
    return rows[:, :-1].long().to(device), rows[:, 1:].long().to(device)


def learning_rate(k: int, given: argparse.Namespace) -> float:
    """Of step k, from 0."""
    if k < given.warm_up:
        return scaling.warm_up(k + 1, given.warm_up, start=0.0, end=given.lr)
    steps = given.steps - given.warm_up
    return scaling.cosine(k - given.warm_up, steps, peak=given.lr, end=given.lr / 10)


def metrics(out: Path, done: int) -> Any:
    """The file of a line per step, without those after the `done` ones, which come again."""
    (path := out / "metrics.jsonl").parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(lines[:done]))
    return path.open("a")


def peak(gpu: str | None, how: TrainConfig) -> float:
    """FLOPs per second of a device by its data sheet; NaN without a device, or a rate there."""
    if gpu is None and torch.cuda.is_available():
        gpu = next((n for n in Hardware.names() if n in torch.cuda.get_device_name()), None)
    fmt = how.precision if how.precision in ("bf16", "fp16") else "fp32"
    return Hardware.named(gpu).flops.get(fmt, math.nan) if gpu else math.nan


def train(rank: Rank, job: tuple, data: Data, given: argparse.Namespace) -> None:
    """What every rank runs."""
    (model, how, mesh), device, out, first = job, rank.device, given.out, rank.rank == 0
    mine, size, most = step.build(*job)(rank), how.global_batch, peak(given.gpu, how) * mesh.size
    at = {"step": 0, "rows": 0, "seq_len": model.seq_len, "seed": given.seed}
    if given.resume and snapshots(out):
        at = mine.load(snapshots(out)[-1])
        if (of := (at["seq_len"], at["seed"])) != (model.seq_len, given.seed):
            raise ValueError("{} was begun with --seq-len {} --seed {}".format(out, *of))
    with metrics(out, at["step"]) if out and first else contextlib.nullcontext() as file:
        for k in range(at["step"], given.steps):
            begun, lr = time.perf_counter(), learning_rate(k, given)
            for group in (group for each in mine.optimizers for group in each.param_groups):
                group["lr"] = lr
            taken = mine(mine.share(*pair(data.batch(at["rows"], size), device)))
            loss, norm = taken.loss.item(), taken.norm.item()  # which waits for the device
            speed = size * model.seq_len / (time.perf_counter() - begun)
            used = speed * model.flops_per_token() / most  # attention counted in full
            at |= {"step": k + 1, "rows": at["rows"] + size}
            line = {"step": k + 1, "loss": loss, "norm": norm, "lr": lr, "tokens_per_second": speed}
            line["mfu"] = None if math.isnan(used) else used
            text = f"step {k + 1}/{given.steps}  loss {loss:.4f}  norm {norm:.3f}  "
            text += f"{speed:,.0f} tokens/s  MFU {'?' if math.isnan(used) else f'{used:.1%}'}"
            if (k + 1) % given.every == 0 or k + 1 == given.steps:
                held = mine.evaluate(*pair(data.held_out[: given.held_out], device)).item()
                line, text = line | {"held_out": held}, f"{text}  held out {held:.4f}"
            if first:
                print(text, file=sys.__stdout__, flush=True)
            if file:
                print(json.dumps(line), file=file, flush=True)
            if out and "held_out" in line:
                mine.save(out / f"step-{k + 1:08}.safetensors", at)
                for old in snapshots(out)[:-2] if first else ():  # one more, should one be damaged
                    old.unlink()
            rank.forget()
    if given.export and first:
        huggingface.to_hf(given.export, model, load_file(snapshots(out)[-1]))


def main() -> None:
    """Runs the command."""
    shell = options()
    given = shell.parse_args()
    try:
        job = asked(given)
        data = Data(given.text, job[0].seq_len, given.seed)
        world = World(job[2], timeout=600)
    except (ValueError, OSError) as error:
        shell.exit(2, f"{shell.prog}: {error}\n" if os.environ.get("RANK", "0") == "0" else "")
    world.run(train, job, data, given)


if __name__ == "__main__":
    main()
