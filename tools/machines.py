"""Do the stored outputs hold on another machine? Labs under other settings, as a table.

    python tools/machines.py                              every lab under every variant: an hour
    python tools/machines.py 00_start_here 02_precision   two labs under every variant
    python tools/machines.py --only default 2             every lab under two variants

It is not part of `make test`. A variant replaces what `tools/sums.py` fixes: the vector
instructions of PyTorch, oneDNN and MKL, and the number of threads. One that this processor lacks is
left out, which is said. Cells are compared as `make test` compares them.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys

import sums

from notebooks import twins

ROOT = pathlib.Path(__file__).resolve().parents[1]
PATIENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # who waits spins else
VARIANTS = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512"},
    "2": {"OMP_NUM_THREADS": "2"} | PATIENT,
    "4": {"OMP_NUM_THREADS": "4", "MKL_DYNAMIC": "FALSE"} | PATIENT,
    "default, 2": {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"} | PATIENT,
    "onednn": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
    "mkl": {"MKL_CBWR": "COMPATIBLE"},
}
NEEDED = {"avx2": "avx2", "avx512": "avx512f"}
FAILED = re.compile(r"^(?:FAILED|ERROR) \S+\.ipynb(?:::Cell (\d+))?", re.MULTILINE)


def verdict(returncode, told):
    """What pytest says of a lab, as a cell of the table: "passed", or the cells that fail."""
    if returncode == 0:
        return "passed"
    cells = FAILED.findall(told)
    return " ".join(cells) if cells and all(cells) else f"pytest ended with {returncode}"


def held(notebook, variant):
    """The `verdict` on a lab under a variant."""
    options = ["-q", "-rfE", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, str(notebook)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | sums.settings() | VARIANTS[variant] | {"PYTHONPATH": path}
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    return verdict(run.returncode, run.stdout)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NN_topic", help="labs; all when none is named")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, help="variants; all when not given")
    options = parser.parse_args(arguments)
    have = sums.flags()
    variants = options.only or list(VARIANTS)
    for lacking in [each for each in variants if NEEDED.get(each, "") not in {"", *have}]:
        print(f"left out: this processor has no {lacking}")
        variants.remove(lacking)
    print("| lab |", " | ".join(variants), "|\n" + "|---" * (1 + len(variants)) + "|")
    good = True
    for notebook, _ in twins(options.names):
        print(f"| {notebook.stem}", end=" ", flush=True)
        for variant in variants:
            found = held(notebook, variant)
            good &= found == "passed"
            print(f"| {found}", end=" ", flush=True)
        print("|")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
