r"""Train a GPT on any mesh of pp × dp × cp × tp (× ep), on bytes of text; go on after being killed.

    python examples/train.py                       one process, a small model, half a minute
    torchrun --nproc-per-node 8 examples/train.py --pp 2 --dp 2 --tp 2 --zero 1 --out runs/small
    python -m labutils.planner --model examples/llama.json --seq-len 128 --batch-tokens 4096 \
        --nodes 1 --json > plan.json
    torchrun --nproc-per-node 8 examples/train.py --plan plan.json --out runs/planned --resume

Without torchrun the ranks of a mesh are threads of this process.
"""

import argparse
import contextlib
import functools
import gzip
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from labutils import huggingface, planner, scaling, step, units
from labutils.config import DATA, Hardware, Mesh, ModelConfig, TrainConfig
from labutils.planner.work import CHOSEN
from labutils.world import Rank, World

TEXTS = [DATA / f"python_{name}.txt.gz" for name in ("topics", "source")]
KEPT = 2  # snapshots: an older one, should the newest be damaged


class Job(NamedTuple):
    """What all ranks are told: the model, how it is trained on which mesh, and the options."""

    model: ModelConfig
    train: TrainConfig
    mesh: Mesh
    given: argparse.Namespace


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    say = argparse.RawDescriptionHelpFormatter
    shell = argparse.ArgumentParser(description=__doc__, formatter_class=say, allow_abbrev=False)
    add = shell.add_argument
    small = Path(__file__).with_name("llama.json")
    add("--model", default=small, type=Path, help="a name of data/models.csv, or a config.json")
    add("--begin", type=Path, metavar="FOLDER", help="Hugging Face's weights and config.json")
    add("--seq-len", type=int, help="tokens of a sequence; the plan's, or the model's")
    add("--plan", type=Path, help="what `python -m labutils.planner --json` printed; its first")
    for name in CHOSEN:
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
    add("--evaluate", type=int, default=25, help="every so many steps (25)")
    add("--out", type=Path, help="folder of metrics.jsonl and snapshots, which all nodes see")
    add("--every", type=int, default=25, help="steps between snapshots (25)")
    add("--resume", action="store_true", help="from the newest snapshot in --out, if there is one")
    add("--export", type=Path, metavar="FOLDER", help="at the end, for transformers; needs --out")
    add("--gpu", help="a name of data/hardware.csv, for MFU; unless given, the one in use")
    return shell


def asked(given: argparse.Namespace) -> Job:
    """The job that the options describe; ValueError says what is wrong and what would do."""
    for name in ("steps", "warm_up", "held_out", "evaluate", "every"):
        units.whole(getattr(given, name), f"--{name.replace('_', '-')}", 1)
    if (given.export and not given.out) or (given.resume and not given.out):
        raise ValueError("--export and --resume read the snapshots of --out: give a folder")
    file = given.begin or given.model
    is_file = file.exists() or given.begin or file.suffix == ".json"
    model = ModelConfig.from_hf(file) if is_file else ModelConfig.named(str(file))
    if model.vocab_size < 256:
        raise ValueError(f"vocab_size={model.vocab_size}: a byte is a token, give 256 or more")
    row: Any = {"plan": {"micro_batch": 2, "micro_batches": 4, "zero": 0}}
    if given.plan:
        row = json.loads(given.plan.read_text(encoding="utf-8"))
    row = row[0] if isinstance(row, list) else row
    flags = {name: getattr(given, name) for name in CHOSEN if getattr(given, name) is not None}
    plan = planner.Plan.read({**row.get("plan", row), **flags})
    model = replace(model, seq_len=given.seq_len or row.get("seq_len", model.seq_len), dropout=0)
    half = given.precision in ("bf16", "fp16") and not given.autocast
    how: Any = dict(precision=given.precision, autocast=given.autocast, fp32_gradients=half)
    train = replace(plan.train(model), lr=given.lr, clip=given.clip, **how)
    step.check_plan(model, train, plan.mesh)
    if given.export:
        huggingface.family(model)
    if given.out and not given.resume and (old := snapshots(given.out)):
        remedy = "add --resume to go on, or give another folder"
        raise ValueError(f"--out {given.out} has {old[-1].name}: {remedy}")
    return Job(model, train, plan.mesh, given)


def snapshots(out: Path) -> list[Path]:
    """Those of a run, the oldest first."""
    return sorted(out.glob("step-*.safetensors"))


class Data:
    """Rows of s + 1 bytes of text, the last tenth held out; their order hangs on the seed alone, on
    no mesh and no batch: a run has to remember how many it has had, and nothing else."""

    def __init__(self, files: list[Path], s: int, seed: int) -> None:
        opened = (gzip.open(f) if f.suffix == ".gz" else open(f, "rb") for f in files)
        text = b"".join(file.read() for file in opened)
        if len(text) < 10 * s + 1:
            few = f"the {len(text):,} bytes of --text are not ten sequences of {s:,} tokens"
            raise ValueError(f"{few}: give more, or a smaller --seq-len")
        rows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, s + 1, s)
        self.trained, self.held_out = rows.split([len(rows) - len(rows) // 10, len(rows) // 10])
        self.order = functools.lru_cache(2)(functools.partial(self._order, seed))

    def _order(self, seed: int, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed + 1_000_003 * epoch)
        return torch.randperm(len(self.trained), generator=generator)

    def batch(self, had: int, count: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of the rows that come after so many."""
        at = (divmod(i, len(self.trained)) for i in range(had, had + count))
        return pair(self.trained[torch.stack([self.order(epoch)[i] for epoch, i in at])])


def pair(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens, and what follows each."""
    return rows[:, :-1].long(), rows[:, 1:].long()


def learning_rate(k: int, given: argparse.Namespace) -> float:
    """Of step k, from 0."""
    rest, grown = max(given.steps - given.warm_up, 1), min((k + 1) / given.warm_up, 1)
    at = max(k - given.warm_up, 0)
    return grown * scaling.cosine(at, rest, peak=given.lr, end=given.lr / 10)


def metrics(out: Path, done: int) -> Any:
    """The file of a line for each step, without those after the `done` ones, which come again."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(lines[:done]))
    return path.open("a")


def speed(job: Job, seconds: float) -> dict[str, float]:
    """Of a step, in all ranks together; MFU counts attention in full, against peaks of --gpu."""
    tokens = job.train.global_batch * job.model.seq_len / seconds
    flops, name = tokens * job.model.flops_per_token(), job.given.gpu
    if name is None and torch.cuda.is_available():
        name = next((n for n in Hardware.names() if n in torch.cuda.get_device_name()), None)
    found = {"seconds": seconds, "tokens_per_second": tokens, "flops_per_second": flops}
    if name:
        fmt = job.train.precision if job.train.precision in ("bf16", "fp16") else "fp32"
        found["mfu"] = flops / job.mesh.size / Hardware.named(name).flops[fmt]
    return found


def told(line: dict[str, Any], steps: int) -> str:
    """A line of progress."""
    used = f"MFU {line['mfu']:.1%}" if "mfu" in line else f"{line['flops_per_second']:.3g} FLOP/s"
    held = f"  held out {line['held_out']:.4f}" if "held_out" in line else ""
    at = f"step {line['step']}/{steps}  loss {line['loss']:.4f}  norm {line['norm']:.3f}"
    return f"{at}  {line['tokens_per_second']:,.0f} tokens/s  {used}{held}"


def train(rank: Rank, job: Job) -> list[float]:
    """What every rank runs: the losses of its steps."""
    given, size, device = job.given, job.train.global_batch, rank.device
    begin = functools.partial(huggingface.read, given.begin) if given.begin else None
    mine = step.build(job.model, job.train, job.mesh, whole=begin)(rank)
    data = Data(given.text, job.model.seq_len, given.seed)
    held = [part.to(device) for part in pair(data.held_out[: given.held_out])]
    at = {"step": 0, "rows": 0}
    if given.resume and snapshots(given.out):
        at = mine.load(snapshots(given.out)[-1])
    writes, losses = given.out if rank.rank == 0 else None, []
    with metrics(writes, at["step"]) if writes else contextlib.nullcontext() as file:
        for k in range(at["step"], given.steps):
            begun, last = time.perf_counter(), k + 1 == given.steps
            for group in (group for each in mine.optimizers for group in each.param_groups):
                group["lr"] = learning_rate(k, given)
            rows = (part.to(device) for part in data.batch(at["rows"], size))
            taken = mine(mine.share(*rows))
            at = {"step": k + 1, "rows": at["rows"] + size}
            losses.append(taken.loss.item())  # which waits for the device
            line = at | {"loss": losses[-1], "norm": taken.norm.item()}
            line |= {"lr": learning_rate(k, given)} | speed(job, time.perf_counter() - begun)
            if last or (k + 1) % given.evaluate == 0:
                line["held_out"] = mine.evaluate(*held).item()
            if given.out and (last or (k + 1) % given.every == 0):
                mine.save(given.out / f"step-{k + 1:08}.safetensors", at)
            if writes:
                print(json.dumps(line), file=file, flush=True)
                for old in snapshots(writes)[:-KEPT]:
                    old.unlink()
            if rank.rank == 0:
                print(told(line, given.steps), file=sys.__stdout__, flush=True)
            rank.forget()
    if writes and given.export:
        huggingface.export(given.export, job.model, load_file(snapshots(writes)[-1]))
    return losses


def main() -> None:
    """Runs the command."""
    shell = options()
    given = shell.parse_args()
    try:
        job = asked(given)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
        world = World(job.mesh, timeout=600)
    except (ValueError, OSError) as error:
        shell.exit(2, f"{shell.prog}: {error}\n" if os.environ.get("RANK", "0") == "0" else "")
    with world:
        world.run(train, job)


if __name__ == "__main__":
    main()
