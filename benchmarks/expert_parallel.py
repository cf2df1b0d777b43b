"""A mixture-of-experts layer on four processes beside all of its experts in one, one after the
other, on the same tokens.

    python benchmarks/expert_parallel.py

Forward and backward of the layer. The loop computes every expert's rows for all four ranks' tokens;
each rank of the other computes two of the eight experts, and sends rows there and back over gloo.
With as many cores as ranks the ratio would be near 1/4 where the experts are wide; narrow ones do
not pay for the way.
"""

import os

import torch
from _side_by_side import Times, interleave, owe, report, slowest

from labutils import expert_parallel, units
from labutils.config import Mesh, ModelConfig
from labutils.model import MixtureOfExperts
from labutils.world import World

RANKS, ROUNDS, TOKENS, WIDTHS = 4, 11, 512, (64, 512, 2048)
PEER = "a loop over all experts"
SIZES = dict(num_layers=1, d_model=256, num_heads=4, vocab_size=16, seq_len=TOKENS)


def race(rank, width: int) -> tuple[dict[str, Times], float, int]:
    """Times of both, how far their outputs are apart, and the bytes that a rank sent in a pass."""
    torch.set_num_threads(1)
    config = ModelConfig(**SIZES, d_ff=width, num_experts=8, top_k=2)
    torch.manual_seed(0)
    whole, other = (torch.nn.Sequential(MixtureOfExperts(config)) for _ in range(2))
    other.load_state_dict(whole.state_dict())
    holder = torch.nn.ModuleList([other])
    expert_parallel.spread_experts(holder, rank.comm("ep"))
    spread, tokens = holder[0], torch.randn(RANKS, TOKENS, 256)
    mine = tokens[rank.rank : rank.rank + 1]
    apart = (spread(mine) - whole(mine)).abs().max().item()

    def step(layer, x):
        layer.zero_grad()
        layer(x).square().mean().backward()

    counts = spread[0].routing.counts
    calls = {
        PEER: lambda: step(whole, tokens) if rank.rank == 0 else None,
        "experts on four ranks": lambda: step(spread, mine),
    }
    times = interleave(calls, ROUNDS, group=rank.comm("dp").group)
    return times, apart, int(counts.sum() - counts[2 * rank.rank : 2 * rank.rank + 2].sum())


def main() -> None:
    """Print the table."""
    print(
        f"{TOKENS} tokens per rank, {RANKS} ranks on {os.cpu_count()} cores; ms, median (fastest)"
    )
    owe(PEER, {f"width {width}": 1.0 for width in WIDTHS})
    with World(Mesh(dp=RANKS, ep=RANKS), engine="processes", timeout=120) as world:
        for width in WIDTHS:
            ranks = world.run(race, width)
            times = slowest(times for times, *_ in ranks)
            loop, spread = times.values()
            report(f"width {width}", PEER, spread, loop)
            rows = max(rows for *_, rows in ranks)
            sent = units.text(2 * rows * 256 * 4)
            print(f"experts of width {width}: up to {sent} sent to experts, and as many gradients")
            for name, each in times.items():
                print(f"{name:>25}: {each}")
            apart = max(apart for _, apart, _ in ranks)
            print(f"{'spread / loop':>25}: {spread.ratio(loop)}, outputs within {apart:.0e}")


if __name__ == "__main__":
    main()
