"""The planner from a shell: `python -m labutils.planner --model llama-3.1-70b --nodes 8`."""

import argparse
import dataclasses
import json
import math
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from labutils import units
from labutils.config import Hardware, ModelConfig
from labutils.planner import export, stages
from labutils.planner.cluster import Cluster
from labutils.planner.plans import TIE, Estimate, Found, Job, search, sensitivity, text_of, why

EXAMPLE = """example, Llama-3.1-70B for 15 T tokens on 64 H100:
  python -m labutils.planner --model llama-3.1-70b --nodes 8 --gpu H100 --tokens 15e12

"Fits" means: allocated at most 90 % of the device (--reserve), since allocators reserve 3 to 9 %
more than is allocated. Plans within 3 % of the fastest are ties, ordered by headroom, in tenths
of what fits, then by simplicity (axes in use, a schedule beyond 1F1B, ZeRO above 1,
recomputation), then by seconds.
"""


def _tokens(word: str) -> float:
    """A number of tokens: 15e12, 15T or 4M (millions); argparse names the option of a refused one.

    >>> _tokens("15T") == _tokens("15e12")
    True
    """
    times = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(word[-1:].upper(), 1)
    try:
        number = float(word if times == 1 else word[:-1]) * times
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{word!r:.40} is no number of tokens: as 15e12 or 15T")
    return number


def _row(word: str) -> int:
    """A row of the table, or how many: from 1."""
    if not (word.isascii() and word.isdigit() and len(word) < 10 and int(word)):
        raise argparse.ArgumentTypeError(f"{word!r:.40}: rows are counted from 1, in nine digits")
    return int(word)


def _known(word: str, names: Sequence[str]) -> str:
    """The name that is meant, in whatever case, and without who publishes it; or the word itself.

    >>> _known("meta-llama/Llama-3.1-8B", ["gpt2", "llama-3.1-8b"])
    'llama-3.1-8b'
    """
    meant = word.rpartition("/")[2].lower()
    return next((name for name in names if name.lower() == meant), word)


def _name(path: Path) -> str:
    """What a model is called whose config.json is, or lies in, this path.

    >>> _name(Path("/models/Qwen2-72B/config.json")), _name(Path("/models/tiny.json"))
    ('Qwen2-72B', 'tiny')
    """
    return (path.parent if path.name == "config.json" else path).name.removesuffix(".json")


def options() -> argparse.ArgumentParser:
    """What the command takes."""
    shell = argparse.ArgumentParser(
        prog="python -m labutils.planner",
        description="All legal plans of a training run, ranked by the time of a step.",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = shell.add_argument
    add("--model", required=True, help="a name of data/models.csv, or the path of a config.json")
    add("--nodes", type=int, required=True, help="how many nodes")
    add("--gpu", default="H100", help="a name of data/hardware.csv (H100)")
    add("--gpus-per-node", type=int, default=8, metavar="N", help="GPUs of a node (8)")
    add("--between", metavar="SIZE", help="each GPU sends out of its node, as 50GB/s or 400Gb/s")
    add("--seq-len", type=int, metavar="N", help="tokens of a sequence (8192, or all positions)")
    add("--batch-tokens", type=_tokens, default=2**22, metavar="N", help="of a global batch (2^22)")
    add("--tokens", type=_tokens, default=0, metavar="N", help="of the whole training, as 15T")
    add("--reserve", type=float, default=0.10, help="share of a device left alone (0.10)")
    add("--price", type=float, default=0, help="of a GPU-hour")
    add("--stack", default="megatron", choices=("megatron", "course"), help="whose memory")
    add("--top", type=_row, default=10, metavar="N", help="rows of the table (10)")
    add("--plan", type=_row, metavar="N", help="the ledger and the seconds of row N, from 1")
    add("--explain", action="store_true", help="why the other rows are not the first")
    add("--json", action="store_true", help="the rows as JSON")
    add("--export", choices=tuple(export.WRITERS), help="flags of row --plan for a framework")
    return shell


def asked(given: argparse.Namespace) -> Job:
    """The job that the options describe; ValueError names the option and the remedy."""

    def sent() -> float | None:
        if given.between is None:
            return None
        bits = re.fullmatch(r"(.+[kMGT])(?:b/s|bps|bit/s)", given.between)
        size = f"{bits[1]}B" if bits else given.between.removesuffix("/s")
        speed = float(units.parse(size)) / (8 if bits else 1)
        if speed < 1e6:
            remedy = "give what each GPU sends, as 50GB/s or 400Gb/s"
            raise ValueError(f"{given.between} is no link: {remedy}")
        return speed

    def of(option: str, make: Callable, *args: Any) -> Any:
        try:
            return make(*args)
        except (ValueError, TypeError) as error:
            raise ValueError(f"--{option}: {error}") from None

    path = Path(given.model)
    if path.exists() or given.model.endswith(".json"):
        model = of("model", ModelConfig.from_hf, given.model)
        model = dataclasses.replace(model, name=_name(path.absolute()))
    else:
        model = of("model", ModelConfig.named, _known(given.model, ModelConfig.names()))
    longest = model.seq_len if model.positions == "learned" else 8192
    length = min(8192, longest) if given.seq_len is None else given.seq_len
    model = of("seq-len", lambda: dataclasses.replace(model, seq_len=length))
    if given.price and not given.tokens:
        raise ValueError("--price is paid for a whole training: give its --tokens, too")
    device = of("gpu", Hardware.named, _known(given.gpu, Hardware.names()))
    between = of("between", sent)
    cluster = of(
        "nodes, --gpus-per-node, --reserve or --price",
        lambda: Cluster(
            device=device,
            nodes=given.nodes,
            gpus_per_node=given.gpus_per_node,
            between=between,
            reserve=given.reserve,
            price=given.price,
        ),
    )
    numbers = dict(batch_tokens=int(given.batch_tokens), tokens=given.tokens)
    return of(
        "batch-tokens, --tokens or --stack",
        lambda: Job(model=model, cluster=cluster, stack=given.stack, **numbers),
    )


def row(estimate: Estimate) -> dict:
    """A plan and what it gives, as JSON has it."""
    job = estimate.job
    found = {
        "model": job.model.name,
        "seq_len": job.model.seq_len,
        "global_batch": job.batch,
        "plan": estimate.plan.named(),
        "step_seconds": estimate.seconds,
        "peak_bytes": round(estimate.peak),
        "tokens_per_second_and_gpu": estimate.tokens_per_second,
        "mfu": {kind: estimate.mfu(kind) for kind in ("6N", "causal", "full")},
        "seconds": estimate.parts,
    }
    if job.tokens:
        found |= {"days": estimate.days, "gpu_hours": estimate.gpu_hours}
    return found | ({"cost": estimate.cost} if job.tokens and job.cluster.price else {})


def table(found: Found, top: int) -> Iterator[str]:
    """The first plans in lines."""
    job, cluster = found.job, found.job.cluster
    yield (
        f"{found.job.model.name or 'model'} · {cluster.gpus:,} × {cluster.device.name} · "
        f"{job.batch:,} sequences of {job.model.seq_len:,} a step · memory of {job.stack}"
    )
    yield (
        f"{len(found):,} legal plans, {found.fits.sum():,} allocate at most "
        f"{units.text(cluster.room)} ({1 - cluster.reserve:.0%} of the device), "
        f"{len(found.ties)} within 3 % of the fastest (=)"
    )
    days = "     days" if job.tokens else ""
    yield f"{'':>4} {'step s':>8} {'peak GB':>8} {'MFU':>6} {'tok/s/GPU':>10}{days}  plan"
    most = found.fastest.seconds * (1 + TIE)
    for i, one in enumerate(found.best(top), 1):
        mark = "=" if one.seconds <= most else " "
        days = f" {one.days:8.1f}" if job.tokens else ""
        yield (
            f"{i:>3}{mark} {one.seconds:8.3f} {one.peak / 1e9:8.1f} {one.mfu():6.1%} "
            f"{one.tokens_per_second:10,.0f}{days}  {text_of(one.plan)}"
        )
    yield from _hints(job)
    yield "=: by how many tenths of those GB are left, then the simplest, then the fastest"
    yield "MFU: all products of the model, of attention the half that is not masked"
    if any(one.plan.zero > 1 for one in found.best(top)):
        yield "ZeRO-2, ZeRO-3: assuming that their messages hide behind computing while it lasts"
    if job.tokens and cluster.price:
        (first,) = found.best()
        yield f"row 1: {first.gpu_hours:,.0f} GPU-hours, {first.cost:,.0f} at the price given"
    yield textwrap.fill(f"rates: {job.rates.source}", 100, subsequent_indent="       ")


def _hints(job: Job) -> Iterator[str]:
    """What a batch costs that GPUs share unevenly, a vocabulary that they cannot share, and GPUs
    without bf16."""
    batch, gpus, near = job.batch, job.cluster.gpus, job.fitting_batch
    if near != batch:
        many, one = f"{gpus:,} GPUs", f"a batch of {batch:,} sequences"
        said = f"{many} do not divide {one}" if batch > gpus else f"{many} are no multiple of {one}"
        tokens = near * job.model.seq_len
        yield f"{said}: of {near:,} (--batch-tokens {tokens}) there are more plans"
    words = job.model.vocab_size
    if gpus > 1 and math.gcd(words, gpus) == 1:
        padded = 128 * math.ceil(words / 128)
        yield (
            f"no plan has tp, which would divide vocab_size={words:,}: Megatron-LM pads it, "
            f"so give a config.json with {padded:,}"
        )
    if (device := job.cluster.device).half != "bf16":
        yield f"{device.name} has no bf16: counted is fp16, as many bytes, and a loss scale to set"


def details(estimate: Estimate) -> Iterator[str]:
    """What each stage holds, and where the step's seconds go."""
    plan, job = estimate.plan, estimate.job
    yield text_of(plan)
    for name, seconds in estimate.parts.items():
        yield f"{name:>16} {seconds:9.3f} s {seconds / estimate.seconds:6.1%}"
    for rank in sorted({0, min(1, plan.pp - 1), plan.pp - 1}):
        yield f"rank {rank} of {plan.pp} of the pipeline"
        yield str(stages.ledger(job.model, plan, rank, job.stack))


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status, which is not 0 after an error that it has printed."""
    shell = options()
    given = shell.parse_args(words)
    if given.export and given.json:
        shell.error("--export prints flags, not JSON: leave one of the two out")
    try:
        job = asked(given)
        found = search(job, progress() if sys.stderr.isatty() else lambda done, of: None)
        chosen = 0 if given.plan is None else given.plan - 1
        rows = found.best(max(given.top, chosen + 1))
        _ = found.fastest  # or an error
        if chosen >= len(rows):
            raise ValueError(f"--plan {given.plan}: there are rows 1 to {len(rows)}, give one")
        said = _exported(given, found, chosen) if given.export else ""
    except ValueError as error:
        shell.exit(2, f"{shell.prog}: {error}\n")
    if given.export:
        print(said, end="")
    elif given.json:
        picked = rows[chosen : chosen + 1] if given.plan else rows[: given.top]
        print(json.dumps([row(one) for one in picked], indent=1))
    elif given.plan:
        print("\n".join(details(rows[chosen])))
    else:
        print("\n".join(table(found, given.top)))
    if given.explain:
        for i, one in enumerate(rows[: given.top], 1):
            print(f"{i:>3}  {why(found, one.plan)}", file=sys.stderr if given.json else sys.stdout)
        if not given.json:
            for what, share in sensitivity(found).items():
                print(f"{what:>26}: step {share:.1%} shorter")
    return 0


def _exported(given: argparse.Namespace, found: Found, chosen: int) -> str:
    """Flags of the row that is asked for, or of the first that the framework has."""
    if given.plan:
        return export.export(given.export, found.job, found[found.order[chosen]].plan)
    refused: list[ValueError] = []
    for i, place in enumerate(found.order[:200]):
        try:
            said = export.export(given.export, found.job, found[place].plan)
        except ValueError as error:
            refused.append(error)
            continue
        if refused:
            print(f"row {i + 1}, since row 1 cannot be: {refused[0]}", file=sys.stderr)
        return said
    raise ValueError(f"--export: none of the first {len(refused)} rows can be: {refused[0]}")


def progress(after: float = 1.0) -> Callable[[int, int], None]:
    """What shows how far a search is that takes longer than so many seconds."""
    begin = time.monotonic()

    def tell(done: int, of: int) -> None:
        if time.monotonic() - begin > after:
            ends = "\n" if done == of else "\r"
            print(f"{done:,} of {of:,} plans", end=ends, file=sys.stderr, flush=True)

    return tell


def piped() -> int:
    """`main` in a shell, where a reader such as `head` may leave before all is written."""
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that exit is silent
        return 0
    return status


if __name__ == "__main__":
    sys.exit(piped())
