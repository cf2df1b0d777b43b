"""The published bubbles and peaks of pipeline schedules as formulas, each with where it holds."""

from collections.abc import Sequence

from labutils import units
from labutils.schedule.simulation import Durations


def bubble(
    name: str, p: int, m: int, times: Durations | None = None, *, barrier: bool = True
) -> float:
    """Idle time of a rank in one step of the schedule `name`, in the unit of `times`.

    times: of one operation, alike on all stages: with u chunks per rank, 1/u of the rank's; a unit
        of time each if None
    barrier: whether all ranks wait for each other between steps: then the step lasts the makespan,
        otherwise the period

    The ideal time is m·u·(F+B+W): the *overhead* is bubble/ideal, (p−1)/m for GPipe and 1F1B; the
    *fraction* is bubble/(ideal+bubble), (p−1)/(m+p−1).

    >>> bubble("one_f_one_b", 4, 8), bubble("zb_h1", 4, 8), bubble("zb_h2", 4, 8, barrier=False)
    (9, 3, 0)
    >>> N_p, m, F, B, W = 4, 8, 2, 3, 1
    >>> times = Durations(F=F, B=B, W=W)  # of a micro-batch on a stage
    >>> bubble("gpipe", N_p, m, times) == (N_p - 1) * (F + B + W)  # GPipe, 1F1B
    True
    >>> bubble("zb_h2", N_p, m, times, barrier=False) == (N_p - 1) * (F + B - 2 * W)  # ZB-H2
    True

    Raises ValueError: if no formula is known for these times, or p or m is less than 1.

    Source: Narayanan et al. 2021, arXiv:2104.04473, sections 2.2.1 and 2.2.2; Qi et al. 2023,
    arXiv:2401.10241, Table 2 (without a barrier); DeepSeek-V3, arXiv:2412.19437, Table 2, whose B
    is B+W here; those of zb_v and interleaved_zb are by simulation.
    """
    p, m, times = units.whole(p, "p", 1), units.whole(m, "m", 1), times or Durations()
    units.instance(times, Durations, "bubble")
    f, b, w, fused = times.F, times.B, times.W, times.fused or 0
    if isinstance(f, Sequence) or isinstance(b, Sequence) or isinstance(w, Sequence):
        raise ValueError("the formulas are for stages that are alike: give F, B, W one time each")
    plain = (p - 1) * (f + b + w), True, ""
    w_short = w <= min(f, b)
    known = {
        "naive": (m * plain[0], True, ""),
        **dict.fromkeys(("gpipe", "one_f_one_b", "eager_one_f_one_b"), plain),
        **dict.fromkeys(("interleaved", "breadth_first"), plain),
        "zb_h1": ((p - 1) * (f + b - w), w_short and m >= p, "W ≤ F, W ≤ B and m ≥ p"),
    }
    enough = w_short and m >= 2 * p - 1, "W ≤ F, W ≤ B and m ≥ 2p−1"
    if barrier:
        alike = f == b == w
        folded = (fused + b - 2 * w, alike and b + w <= fused <= f + b + w)  # DeepSeek's B is B+W
        pairs = "F = B = W and B+W ≤ fused ≤ F+B+W"
        known["zb_h2"] = ((p - 1) * max(f + b - 2 * w, f), *enough)
        known["zb_v"] = ((p - 1) * f, alike and m >= 2 * p, "F = B = W and m ≥ 2p")
        known["dualpipe"] = ((p // 2 - 1) * folded[0], folded[1] and p % 2 == 0, pairs)
        known["dualpipe_v"] = ((p - 1) * folded[0], folded[1], pairs)
    else:
        known["zb_h2"] = ((p - 1) * (f + b - 2 * w), *enough)
        known["zb_v"] = (2 * (p - 1) * (b - w), w <= f <= b and m >= 2 * p, "W ≤ F ≤ B and m ≥ 2p")
        known["interleaved_zb"] = ((p - 1) * f, f == b == w, "F = B = W")
    ends = f"that ends {'with' if barrier else 'without'} a barrier"
    idle, holds, when = units.entry(known, name, f"no formula for a step {ends} by")
    if not holds:
        raise ValueError(f"the formula of {name} needs {when}: got {times}, m={m}")
    return idle


def peak_in_flight(name: str, p: int, m: int, rank: int = 0, chunks: int = 1) -> int:
    """Most activations that a rank of the schedule `name` holds at once, of one of its `chunks` and
    one micro-batch each.

    >>> [peak_in_flight("one_f_one_b", 4, 8, rank) for rank in range(4)]
    [4, 3, 2, 1]
    >>> N_p, m, i = 4, 8, 1
    >>> peak_in_flight("one_f_one_b", N_p, m, i) == min(N_p - i, m)  # 1F1B
    True
    >>> peak_in_flight("gpipe", N_p, m, i) == m  # GPipe
    True
    >>> peak_in_flight("interleaved", 4, 8, chunks=2)  # 4·(1 + 3/8) micro-batches through 2 chunks
    11

    Invariant: the same as `schedule.peak(rank)`; interleaved where p divides m.
    Raises ValueError: if no formula is known, or there is no such rank.

    Source: Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (1F1B); Qi et al. 2023,
    arXiv:2401.10241, section 2.3 (ZB-H1 and ZB-H2); DeepSeek-V3, arXiv:2412.19437, Table 2
    (DualPipe: p+1); the others by simulation.
    """
    p, m, chunks = units.whole(p, "p", 1), units.whole(m, "m", 1), units.whole(chunks, "chunks", 1)
    if (rank := units.whole(rank, "rank")) >= p:
        raise ValueError(f"rank={rank} is none of p={p}: use 0 … {p - 1}")
    after = p - 1 - rank
    known = {
        "naive": 1,
        "gpipe": m,
        "one_f_one_b": min(after + 1, m),
        "eager_one_f_one_b": min(2 * after + 1, m),
        "interleaved": min(2 * after + (chunks - 1) * p + 1, chunks * m),
        "breadth_first": chunks * m,
        "zb_h1": min(p, m),
        "zb_h2": min(2 * p - 1, m),
        "zb_v": 2 * p,
        "dualpipe": p + 1,
        "dualpipe_v": 2 * p + 1,
    }
    units.entry(known, name, "no formula for")
    if name == "zb_v" and m < 2 * p - 1:
        raise ValueError(f"the formula of zb_v needs m ≥ 2p−1: got m={m} at p={p}")
    return known[name]
