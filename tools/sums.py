"""What the last digits of a sum depend on, fixed in this one place.

    python tools/sums.py COMMAND …     runs a command with these settings, as `make lab` does

A sum of floats is rounded at every addition, so its last digits depend on the order. PyTorch's
order depends on the machine: how many numbers a vector instruction adds at once, and how many
threads share the work. `make lab`, `make test` and `make notebooks` take the same on every machine
that has it. Stored outputs are compared as numbers and hold without it, too
(`tools/machines.py`), but with it a lab prints what is written in it. One thread is also the
quickest for tensors as small as those of the labs when other programs keep the cores busy.

And one thing no digit depends on: glibc gives memory of 128 kB and more back to the system at once,
and takes it anew, page by page, for the next tensor: a third of the time of lab 15a's networks.

What you have set yourself wins: `OMP_NUM_THREADS=4 make lab`.
"""

import os
import pathlib
import re
import sys

KEEP = {"MALLOC_MMAP_THRESHOLD_": str(2**28), "MALLOC_TRIM_THRESHOLD_": str(2**29)}  # bytes
CPU = pathlib.Path("/proc/cpuinfo")  # of Linux; elsewhere PyTorch has no AVX2 to choose


def flags(cpu=CPU):
    """The instruction sets that the processor has, as Linux calls them; none where it says none."""
    found = re.search(r"^flags\s*:(.*)$", cpu.read_text(), re.MULTILINE) if cpu.exists() else None
    return set(found[1].split()) if found else set()


def settings(environ=os.environ, cpu=CPU):
    """Environment variables that nobody has set; to be set before torch is imported."""
    wanted = {"OMP_NUM_THREADS": "1", **KEEP}  # MKL and oneDNN follow the first
    if "avx2" in flags(cpu):  # elsewhere PyTorch would warn, or meet an unknown instruction
        wanted["ATEN_CPU_CAPABILITY"] = "avx2"
    return {name: value for name, value in wanted.items() if name not in environ}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("name a command: python tools/sums.py jupyter lab")
    os.execvpe(sys.argv[1], sys.argv[1:], os.environ | settings())
