"""Rounding float32 to a small format and back: `precision.round_to` beside casts of ml_dtypes.

For fp16 the cast is numpy's. Both are run in turn, so that whatever else the machine does slows
both alike; the ratio is theirs over ours, above 1 where ours is faster. Both work on one thread,
however many torch has.
"""

import ml_dtypes
import numpy as np
import torch
from _side_by_side import interleave, owe, report

from labutils import precision

PEERS = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
ELEMENTS, ROUNDS = 1 << 22, 9


def main():
    x = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
    print(
        f"rounding {ELEMENTS:,} float32 numbers, {ROUNDS} rounds interleaved, ms, median (minimum)"
    )
    print("format ours                 peer                 peer/ours")
    owe("ml_dtypes, numpy", dict.fromkeys(PEERS, 1.0))
    for name, peer in PEERS.items():

        def ours(name=name):
            return precision.round_to(x, name)

        def theirs(peer=peer):
            return x.numpy().astype(peer).astype(np.float32)

        if not np.array_equal(ours().numpy(), theirs()):
            raise SystemExit(f"{name}: the two disagree, their times mean nothing")
        times = interleave(
            {"ours": ours, "peer": theirs}, ROUNDS
        )  # the comparison was everybody's warm-up
        report(name, "ml_dtypes, numpy", times["ours"], times["peer"])
        print(f"{name:6} {times['ours']}  {times['peer']}  {times['peer'].ratio(times['ours'])}")


if __name__ == "__main__":
    main()
