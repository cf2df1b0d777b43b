"""How long it takes to predict the peak of a training step: the first model of its kind, one more,
and 10 000 of them.

python benchmarks/memory.py
"""

import itertools
import statistics
import time
from dataclasses import replace

from _side_by_side import interleave

from labutils import memory
from labutils.config import ModelConfig, TrainConfig


def main() -> None:
    model, train = ModelConfig.named("gpt2-xl"), TrainConfig(micro_batch=4, global_batch=4)
    first = []
    for attention, checkpointing, m in itertools.product(
        ("plain", "sdpa"), ("none", "selective", "full"), (1, 8)
    ):
        start = time.perf_counter()
        memory.peak(
            model,
            replace(train, attention=attention, checkpointing=checkpointing, global_batch=4 * m),
        )
        first.append(1e3 * (time.perf_counter() - start))
    middle, slowest = statistics.median(first), max(first)
    print(f"first of its kind   {middle:8.2f} ms ({len(first)} kinds, {slowest:.2f} the slowest)")
    taken = interleave({"one more": lambda: memory.peak(model, train)}, 200)["one more"]
    print(f"one more            {taken.median:8.3f} ms ({taken.minimum:.3f})")
    trains = [
        replace(
            train, micro_batch=b, global_batch=b, attention=attention, checkpointing=checkpointing
        )
        for b, attention, checkpointing in itertools.product(
            range(2, 52), ("plain", "sdpa"), ("none", "full")
        )
    ]
    models = [
        replace(model, num_layers=layers, d_ff=d_ff)
        for layers in range(8, 58, 10)
        for d_ff in range(3200, 13200, 1000)
    ]
    start = time.perf_counter()
    smallest = min(memory.peak(each, plan).total for each in models for plan in trains)
    taken = time.perf_counter() - start
    count = len(models) * len(trains)
    print(f"{count:,} configurations in {taken:.1f} s; the smallest peak is {smallest:,} bytes")


if __name__ == "__main__":
    main()
