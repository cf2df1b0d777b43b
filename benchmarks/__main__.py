"""All benchmarks, within ten minutes on any machine, and one table of what they found.

    python benchmarks                 every one; the table goes to benchmarks/table.csv, too
    python benchmarks flash zero      only these; their rows are printed, and not kept

A row is ours beside theirs: milliseconds by medians, their ratio, below 1 where ours is faster, and
the ratio that we aim at. A benchmark that takes longer than its share of the time is stopped, and
rows that it owes are in the table without a number.
"""

import csv
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
TABLE = HERE / "table.csv"
COLUMNS = ("benchmark", "row", "peer", "ours", "theirs", "ratio", "aim", "rounds", "note")
# Seconds; what one leaves is the next one's. `gpu.py` records runs, by itself.
SHARES = {
    "tensor_parallel": 30, "data_parallel": 60, "zero": 60, "mesh": 40, "context_parallel": 60,
    "expert_parallel": 40, "pipeline": 60, "all_reduce": 50, "flash": 70, "mixed_precision": 45,
    "checkpointing": 20, "lora": 25, "rounding": 20, "memory": 20,
}  # fmt: skip


def run(name: str, seconds: float) -> tuple[list[dict], bool]:
    """The rows of a benchmark that is given so many seconds, and whether it went well."""
    with tempfile.TemporaryDirectory() as folder:
        told = pathlib.Path(folder, "rows")
        told.touch()
        command = [sys.executable, str(HERE / f"{name}.py")]
        environment = {**os.environ, "BENCHMARK_ROWS": str(told)}
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        try:
            status = process.wait(max(seconds, 0))
            note = f"failed: exit status {status}" if status else "not measured"
        except subprocess.TimeoutExpired:
            status, note = 0, f"skipped: {name} had no more than {seconds:.0f} s"
            print(f"{name}: stopped after {seconds:.0f} s", flush=True)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        rows: dict[tuple, dict] = {}
        for line in told.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            key = row["row"], row["peer"]
            rows[key] = {"benchmark": name, "note": note} | rows.get(key, {}) | row
        if status or process.returncode:  # before it could say what it owes
            rows = rows or {(): {"benchmark": name, "row": "all", "peer": "", "note": note}}
    return list(rows.values()), not status


def machine() -> str:
    """This machine, the versions and the date, for whoever reads the table."""
    names = ("torch", "numpy", "ml_dtypes", "peft")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)
    cpu = platform.machine()
    info = pathlib.Path("/proc/cpuinfo")
    if info.exists():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    where = f"{cpu}, {os.cpu_count()} cores, {platform.system()}, Python "
    return f"{where}{platform.python_version()}, {versions}, {datetime.date.today():%d %B %Y}"


def text(rows: list[dict]) -> str:
    """The table as text: a line for each row."""
    lines = [f"{'':38} {'beside':26} {'ours':>9} {'theirs':>9} {'ratio':>6} {'aim':>5}"]
    for row in rows:
        what = f"{row['benchmark']}: {row['row']}"
        numbers = row["note"]
        if "ratio" in row:
            numbers = f"{row['ours']:9.2f} {row['theirs']:9.2f} {row['ratio']:6.2f}"
            numbers += f" {row['aim']:5.2f}  {row['note']}"
        lines.append(f"{what:38} {row['peer']:26} {numbers}".rstrip())
    return "\n".join(lines)


def keep(rows: list[dict], path: pathlib.Path) -> None:
    """Writes the table; its first line says where the numbers are from."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        file.write(f"# python benchmarks: {machine()}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main(names: list[str]) -> int:
    """The exit status."""
    if unknown := sorted(set(names) - SHARES.keys()):
        raise SystemExit(f"no benchmark is called {', '.join(unknown)}: {', '.join(SHARES)}")
    rows, well, deadline = [], True, time.monotonic()
    for name in names or SHARES:
        print(f"\n── {name} ──", flush=True)
        deadline += SHARES[name]
        found, fine = run(name, deadline - time.monotonic())
        rows, well = rows + found, well and fine
    print(f"\n{machine()}\nms by medians, ratio ours / theirs\n\n{text(rows)}")
    if not names and well:
        keep(rows, TABLE)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
