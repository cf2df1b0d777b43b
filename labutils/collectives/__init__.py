"""Collectives written by hand over send and receive, and for each one the bytes it sends, the steps
it takes and the time it should need.

`algorithms` run on anything that has the few methods of `Peers`, return their result and leave
their input alone. `costs` are a row of one table each, written from the mathematics and not from
the code, so that the two can disagree.
"""

# isort: off
from labutils.collectives.algorithms import (
    REDUCTIONS, Peers, all_gather_ring, all_reduce_halving_doubling, all_reduce_naive,
    all_reduce_ring, all_reduce_tree, all_to_all_pairwise, broadcast_star, broadcast_tree,
    gather_star, reduce_scatter_ring, reduce_star, reduce_tree, ring_hops, scatter_star,
    shift,
)  # fmt: skip
from labutils.collectives.costs import (
    ALL_REDUCES, FORMULAS, algbw, bus_factor, busbw, cost, crossover, fastest, held, sent, shares,
    steps,
)  # fmt: skip
