"""What becomes of a router in 300 steps, with each way of `rigs.expert_parallel.WAYS` and eight
seeds. Writes labutils/data/expert_routing.json, which says how it was made.

    python tools/expert_routing.py
"""

import datetime
import json
import platform

import torch

from labutils.config import DATA
from labutils.teach import rigs
from labutils.world import World

STEPS, SEEDS = 300, range(8)
rig = rigs.expert_parallel


def main() -> None:
    """Train, and write the file."""
    torch.set_num_threads(1)
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    today = f"{datetime.date.today():%d %B %Y}, {platform.machine()}"
    runs: dict[str, list] = {}
    with World(1) as one:
        for way, how in rig.WAYS.items():
            found = [one.run(rig.train_router, seed, steps=STEPS, **how)[0] for seed in SEEDS]
            runs[way] = [rig.summary(run) for run in found]
            print(way, *(f"{run['busiest'][-1]:.2f} {run['loss'][-1]:.3f}" for run in runs[way]))
    made = f"python tools/expert_routing.py; {versions}; {today}"
    file = DATA / "expert_routing.json"
    file.write_text(json.dumps(dict(made=made, runs=runs)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
