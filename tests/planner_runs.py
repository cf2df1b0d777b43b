"""The published steps of data/published_steps.csv as runs of the planner."""

import csv
import re
from dataclasses import replace

from labutils import planner
from labutils.config import DATA, Hardware, ModelConfig
from labutils.planner import plans


def published(source: str):
    """(run, cluster) of each row of a source; where the micro-batch is not printed, of 1."""
    with open(DATA / "published_steps.csv", newline="", encoding="utf-8") as text:
        return [_run(row) for row in csv.DictReader(text) if row["source"].startswith(source)]


def _run(row):
    L, h, a, s, n, tp, cp, pp, batch, chunks = (
        int(row[key]) for key in "num_layers d_model num_heads seq_len gpus tp cp pp batch chunks".split()
    )  # fmt: skip
    old = row["model"] == "gpt"
    model = ModelConfig(
        num_layers=L, d_model=h, num_heads=a, d_ff=4 * h, vocab_size=51200, seq_len=s
    ) if old else replace(ModelConfig.named(row["model"]), seq_len=s)  # fmt: skip
    said = re.search(r"micro-batch (\d)", row["note"])
    dp, b, zero = n // (tp * cp * pp), int(said[1]) if said else 1, 0 if old else 1
    zero = 3 if "ZeRO-3" in row["note"] else zero
    plan = planner.Plan(
        tp=tp, cp=cp, pp=pp, dp=dp, micro_batch=b, micro_batches=batch // dp // b, chunks=chunks,
        schedule=2 * (chunks > 1), recompute=("none", "selective", "full").index(row["recompute"]),
        modern=not old, even=old, gradient_bytes=2 if old else 4, zero=zero,
    )  # fmt: skip
    # PTD-P counts what is computed again (equation 3); Meta the model's FLOPs, attention causal.
    per_step = 96 * batch * s * L * h * h * (1 + s / 6 / h + 51200 / 16 / L / h)
    if not old:
        per_step = plans.flops_per_token(model)["causal"] * batch * s
    seconds = float(row["seconds"] or 0) or per_step / n / float(row["tflops"]) / 1e12
    device = Hardware.named(row["device"])
    per_node, between = min(8, n), float(row["between_GBps"]) * 1e9
    cluster = planner.Cluster(
        device=device, nodes=n // per_node, gpus_per_node=per_node, between=between
    )
    return planner.MeasuredStep(
        model, plan, seconds, f"{row['source']}, {h} wide, {n} GPUs"
    ), cluster
