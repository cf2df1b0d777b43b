"""A recording of what only a GPU can say: peaks, our Triton attention against SDPA, matrix rates.

python benchmarks/gpu.py              on a machine with a GPU: predicted peaks against the
    allocator's and all the rest, to labutils/data/gpu_runs/<device>-<date>.json; elsewhere says so
    and ends
python benchmarks/gpu.py --rehearse   the same in small, on whatever is here, printed and not kept:
    it shows that the recorder works
"""

# First: without a GPU it wants the interpreter, and parts of PyTorch import triton too.
from labutils.flash import triton_kernel

# isort: split
import datetime
import functools
import gc
import itertools
import json
import pathlib
import platform
import subprocess
import sys

import torch
import torch.nn.functional as F
from _side_by_side import interleave

from labutils import checkpointing, flash, measure, memory
from labutils.config import DATA, ModelConfig, TrainConfig
from labutils.model import GPT

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
RUNS = DATA / "gpu_runs"
FULL = dict(
    model=ModelConfig.named("gpt2"),
    rows=8,
    lengths=(1024, 2048, 4096, 8192, 16384),
    heads=16,
    width=64,
    sizes=(4096, 8192),
    rounds=20,
)
TINY = ModelConfig(num_layers=1, d_model=16, num_heads=2, d_ff=64, vocab_size=64, seq_len=64)
SMALL = dict(model=TINY, rows=4, lengths=(32,), heads=1, width=16, sizes=(64,), rounds=1)


def provenance(command: str) -> dict:
    """What a recording must say about itself."""
    found = torch.cuda.get_device_properties(0) if GPU else None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "device": found.name if GPU else "cpu",
        "capability": f"{found.major}.{found.minor}" if GPU else None,
        "memory_bytes": found.total_memory if GPU else None,
        "driver": subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[
            0
        ]
        if GPU
        else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": getattr(triton_kernel.triton, "__version__", None),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
    }


def peaks(model: ModelConfig, rows: int) -> list[dict]:
    """Bytes at the peak of a training step, predicted and measured.

    On a GPU by its allocator (which rounds up), elsewhere from the storages.
    """
    torch.mm(
        *torch.ones(2, 64, 64, device=DEVICE)
    )  # a workspace that stays for good, and is no model's
    table = []
    for attention, policy, half in itertools.product(
        ("plain", "sdpa"), ("none", "full"), (False, True)
    ):
        gc.collect()
        before = torch.cuda.memory_allocated() if GPU else 0
        options = dict(
            precision="bf16" if half else "fp32",
            autocast=half,
            attention=attention,
            checkpointing=policy,
        )
        net = checkpointing.apply(GPT(model, attention=attention).to(DEVICE), policy)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=True)
        tokens, targets = (
            torch.randint(model.vocab_size, (rows, model.seq_len), device=DEVICE) for _ in range(2)
        )

        def step(net=net, optimizer=optimizer, tokens=tokens, targets=targets, half=half):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
                loss = net.loss(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # the optimizer's state appears in the first
        if GPU:  # what the allocator has handed out: tensors rounded up to 512, and workspaces
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            measured = torch.cuda.max_memory_allocated() - before
        else:
            measured = measure.peak(step, net, optimizer).total
        predicted = memory.peak(
            model, TrainConfig(micro_batch=rows, global_batch=rows, stepping="foreach", **options)
        ).total
        table.append(options | dict(rows=rows, predicted=predicted, measured=measured))
        del net, optimizer, step
    return table


def milliseconds(calls: dict, rounds: int) -> dict[str, float]:
    """The median time of each, in turn, until the device is done; two calls before it warm up."""
    wait = torch.cuda.synchronize if GPU else (lambda: None)
    timed = {name: lambda call=call: (call(), wait()) for name, call in calls.items()}
    interleave(timed, 2)
    return {name: times.median for name, times in interleave(timed, rounds).items()}


def attention(lengths: tuple[int, ...], heads: int, width: int, rounds: int) -> list[dict]:
    """Causal attention forward and backward, SDPA and our Triton kernels.

    ms, FLOP/s (causal counts half), the largest difference between them.
    """
    ways = {"sdpa": functools.partial(F.scaled_dot_product_attention, is_causal=True)}
    if triton_kernel.triton:
        ways["triton"] = lambda q, k, v: triton_kernel.triton_attention(q, k, v, causal=True)[0]
    table = []
    for s in lengths:
        dtype = torch.bfloat16 if GPU else torch.float16  # the interpreter has no bf16
        *x, d_out = torch.randn(4, 1, heads, s, width, device=DEVICE).to(dtype).unbind()
        x = [tensor.requires_grad_() for tensor in x]
        calls = {
            name: lambda way=way, x=x, d_out=d_out: torch.autograd.grad(way(*x), x, d_out)
            for name, way in ways.items()
        }
        results = [call() for call in calls.values()]
        apart = max(
            (a - b).abs().max().item()
            for other in results
            for a, b in zip(results[0], other, strict=True)
        )
        work = flash.attention_flops(s, width, heads, causal=True) + flash.attention_flops(
            s, width, heads, causal=True, backward=True
        )
        for name, ms in milliseconds(calls, rounds).items():
            table.append(
                dict(
                    way=name,
                    s=s,
                    heads=heads,
                    width=width,
                    dtype=str(dtype),
                    ms=ms,
                    flops_per_second=1e3 * work / ms,
                    apart=apart,
                )
            )
    return table


def products(sizes: tuple[int, ...], rounds: int) -> list[dict]:
    """FLOP/s of n × n products in fp32, bf16 and, from capability 8.9 on, fp8 (e4m3)."""
    table = []
    for n in sizes:
        a, b, one = (
            torch.randn(n, n, device=DEVICE),
            torch.randn(n, n, device=DEVICE),
            torch.ones((), device=DEVICE),
        )
        calls = {
            "fp32": functools.partial(torch.mm, a, b),
            "bf16": functools.partial(torch.mm, a.bfloat16(), b.bfloat16()),
        }
        if GPU and torch.cuda.get_device_capability() >= (8, 9):
            e4m3 = (
                a.to(torch.float8_e4m3fn),
                b.to(torch.float8_e4m3fn).t(),
            )  # the second factor has to be column-major
            calls["fp8"] = functools.partial(
                torch._scaled_mm, *e4m3, scale_a=one, scale_b=one, out_dtype=torch.bfloat16
            )
        table += [
            dict(n=n, format=name, ms=ms, flops_per_second=2e3 * n**3 / ms)
            for name, ms in milliseconds(calls, rounds).items()
        ]
    return table


def record(command: str, *, model, rows, lengths, heads, width, sizes, rounds) -> dict:
    """One recording, ready for JSON."""
    torch.manual_seed(0)
    found = dict(
        peaks=peaks(model, rows),
        attention=attention(lengths, heads, width, rounds),
        products=products(sizes, rounds),
    )
    return provenance(command) | found


def keep(recording: dict, folder: pathlib.Path = RUNS) -> pathlib.Path:
    """Writes a recording to gpu_runs/, unless it comes from a CPU or is a rehearsal."""
    if recording["device"] == "cpu" or "--rehearse" in recording["command"]:
        raise ValueError(
            f"gpu_runs/ holds full runs of GPUs; this is {recording['command']!r} on "
            f"{recording['device']}"
        )
    if missing := [name for name, value in recording.items() if not value]:
        raise ValueError(f"a recording must say its {', '.join(missing)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{recording['device'].lower().replace(' ', '-')}-{recording['date'][:10]}.json"
    path.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    return path


def main(arguments: list[str]) -> None:
    command = " ".join(["python benchmarks/gpu.py", *arguments])
    if arguments not in ([], ["--rehearse"]):
        raise SystemExit(f"{command}: the one option is --rehearse")
    if arguments:
        print(json.dumps(record(command, **SMALL), indent=1))
    elif GPU:
        print("written:", keep(record(command, **FULL)))
    else:
        print(
            "no GPU here: nothing to record (python benchmarks/gpu.py --rehearse shows what would "
            "be)"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
