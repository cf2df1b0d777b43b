"""What a collective costs by formula: bytes sent and held by each rank, steps, α–β (Hockney) time,
and the bus bandwidth of nccl-tests. S is bytes of the whole tensor, n the number of ranks."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from labutils import units
from labutils.config import Link
from labutils.ledger import Ledger, Line


def shares(amount: int, n: int) -> tuple[int, ...]:
    """`amount` cut into `n` pieces that differ by at most one, the larger ones first, as
    `torch.tensor_split` cuts.

    >>> shares(10, 4), shares(2, 4)
    ((3, 3, 2, 2), (1, 1, 0, 0))
    """
    n = units.whole(n, "n", 1)
    base, larger = divmod(units.whole(amount, "amount"), n)
    return (base + 1,) * larger + (base,) * (n - larger)


def power_of_two(n: int) -> int:
    """The largest power of two in n."""
    return 1 << (units.whole(n, "n", 1).bit_length() - 1)


def widths(n: int) -> list[int]:
    """1, 2, 4, … below n: how many ranks of a binomial tree have the tensor after each step."""
    return [2**k for k in range(_log(n))]


def _log(n: int) -> int:
    """⌈log₂ n⌉."""
    return (units.whole(n, "n", 1) - 1).bit_length()


# ── one row for each algorithm ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Seat:
    """Where a formula is evaluated: one rank of n, and S bytes that are cut between elements (or
    rows) of `itemsize` bytes. Rank 0 is the root, which has the tensor first or gets the result."""

    n: int
    rank: int
    S: int
    itemsize: int

    @property
    def others(self) -> int:
        """How many ranks a root has to serve; 0 for a rank that is not the root."""
        return self.n - 1 if self.rank == 0 else 0

    @property
    def leaf(self) -> int:
        """1 for every rank that is not the root."""
        return int(self.rank > 0)

    @property
    def children(self) -> int:
        """Ranks to which this one passes the tensor down the binomial tree."""
        return sum(self.rank < width < self.n - self.rank for width in widths(self.n))

    def piece(self, ahead: int = 0) -> int:
        """Bytes in the piece of the rank that many places ahead on the ring."""
        there = (self.rank + ahead) % self.n
        return self.cut(self.n, there, there + 1)

    def cut(self, parts: int, first: int, end: int) -> int:
        """Bytes in shares `first` to `end` (not included) of `parts` shares of the tensor."""
        base, larger = divmod(self.S // self.itemsize, parts)
        return ((end - first) * base + min(end, larger) - min(first, larger)) * self.itemsize


@dataclass(frozen=True)
class Formula:
    """What an algorithm costs.

    steps: messages that wait for each other, by n
    share: what these carry together, as a multiple of S, by n
    sent: messages that the rank at a seat sends, and bytes in them
    """

    steps: Callable[[int], int]
    share: Callable[[int], Fraction | int]
    sent: Callable[[Seat], tuple[int, int]]

    def __add__(self, then: "Formula") -> "Formula":
        """Of one algorithm after the other."""
        return Formula(
            lambda n: self.steps(n) + then.steps(n),
            lambda n: self.share(n) + then.share(n),
            lambda at: tuple(map(operator.add, self.sent(at), then.sent(at))),
        )


def _halving_doubling_path(n: int) -> tuple[int, Fraction]:
    p, left_over = power_of_two(n), n != power_of_two(n)
    return 2 * _log(p) + 2 * left_over, Fraction(2 * (p - 1), p) + 2 * left_over


def _halving_doubling(at: Seat) -> tuple[int, int]:
    """All but your own piece on the way down; you, your pair, your quartet, … on the way up; and a
    left-over rank's tensor."""
    p = power_of_two(at.n)
    if at.rank >= p:
        return 1, at.S
    extra, down = at.rank + p < at.n, at.S - at.cut(p, at.rank, at.rank + 1)
    groups = [(at.rank // width * width, width) for width in widths(p)]
    up = sum(at.cut(p, first, first + width) for first, width in groups)
    return 2 * len(groups) + extra, down + up + extra * at.S


# Steps, and the multiple of S that they carry: n − 1 whole tensors, n − 1 pieces, or a whole tensor
# for each level of a tree.
_TENSORS = (lambda n: n - 1, lambda n: n - 1)
_PIECES = (lambda n: n - 1, lambda n: Fraction(n - 1, n))
_LEVELS = (_log, _log)

FORMULAS: dict[str, Formula] = {  # by collective and algorithm
    "broadcast_star": Formula(*_TENSORS, lambda at: (at.others, at.others * at.S)),
    "broadcast_tree": Formula(*_LEVELS, lambda at: (at.children, at.children * at.S)),
    "scatter_star": Formula(*_PIECES, lambda at: (at.others, (1 - at.leaf) * (at.S - at.piece()))),
    "gather_star": Formula(*_PIECES, lambda at: (at.leaf, at.leaf * at.piece())),
    "reduce_star": Formula(*_TENSORS, lambda at: (at.leaf, at.leaf * at.S)),
    "reduce_tree": Formula(*_LEVELS, lambda at: (at.leaf, at.leaf * at.S)),
    "reduce_scatter_ring": Formula(*_PIECES, lambda at: (at.n - 1, at.S - at.piece())),
    "all_gather_ring": Formula(*_PIECES, lambda at: (at.n - 1, at.S - at.piece(1))),
}
FORMULAS |= {
    "all_reduce_naive": FORMULAS["reduce_star"] + FORMULAS["broadcast_star"],
    "all_reduce_ring": FORMULAS["reduce_scatter_ring"] + FORMULAS["all_gather_ring"],
    "all_reduce_tree": FORMULAS["reduce_tree"] + FORMULAS["broadcast_tree"],
    "all_reduce_halving_doubling": Formula(
        lambda n: _halving_doubling_path(n)[0],
        lambda n: _halving_doubling_path(n)[1],
        _halving_doubling,
    ),
    "all_to_all_pairwise": Formula(*_PIECES, lambda at: (at.n - 1, at.S - at.piece())),
}
"""S is always the whole tensor: what is broadcast, what a scatter divides, what a gather puts
together, what each rank brings to the rest."""

_MOST = 100_000  # ranks that get a line of their own

ALL_REDUCES = tuple(name for name in FORMULAS if name.startswith("all_reduce"))


def _formula(algorithm: str) -> Formula:
    return units.entry(FORMULAS, algorithm, "no algorithm")


# ── bytes ─────────────────────────────────────────────────────────────────────────────────────────


def sent(
    algorithm: str,
    *,
    nbytes: int | float,
    n: int,
    itemsize: int = 4,
    axis: str = "dp",
    rank: int | None = None,
    name: str | None = None,
) -> Ledger:
    """Bytes that each rank sends, a line for each that sends anything, exact also where n does not
    divide the tensor. The algorithm's src or dst is rank 0.

    nbytes: the whole tensor S
    itemsize: bytes of an element (of a row, for an operation on rows): cuts fall between them
    rank: the only one that is asked for; all unless given
    name: of the lines, as in the books of a run; the algorithm's unless given
    axis: of the lines

    >>> sent("all_reduce_ring", nbytes=64e6, n=4).by("rank")
    {0: 96000000, 1: 96000000, 2: 96000000, 3: 96000000}
    >>> S, N = 64_000_000, 4
    >>> one = dict(nbytes=S, n=N, rank=0)
    >>> sent("reduce_scatter_ring", **one).total == (N - 1) / N * S  # reduce-scatter, all-gather
    True
    >>> sent("all_to_all_pairwise", **one).total == (N - 1) / N * S  # all-to-all
    True
    >>> sent("all_reduce_ring", **one).total == 2 * (N - 1) / N * S  # all-reduce
    True
    """
    formula, lines = _formula(algorithm), []
    for at in _seats(nbytes, n, itemsize, rank):
        messages, amount = formula.sent(at)
        if messages:
            lines.append(Line(name or algorithm, amount, "", axis, at.rank, messages))
    return Ledger(lines)


def held(algorithm: str, *, nbytes: int | float, n: int, itemsize: int = 4) -> Ledger:
    """Bytes of the result on each rank: the whole tensor, a share of it, or nothing where only the
    root gets it. Arguments, algorithm, nbytes, n and itemsize, are those of `sent`.

    >>> held("reduce_scatter_ring", nbytes=40, n=4).by("rank")
    {0: 12, 1: 12, 2: 8, 3: 8}
    """
    _formula(algorithm)

    def result(at: Seat) -> int:
        if algorithm.startswith(("scatter", "reduce_scatter")):
            return at.piece()
        if algorithm.startswith(("gather", "reduce")):
            return 0 if at.leaf else at.S
        return at.n * at.piece() if algorithm.startswith("all_to_all") else at.S

    seats = _seats(nbytes, n, itemsize)
    return Ledger(Line("result", result(at), rank=at.rank) for at in seats)


def _seats(nbytes: int | float, n: int, itemsize: int, rank: int | None = None) -> list[Seat]:
    S = int(nbytes) if isinstance(nbytes, float) and nbytes.is_integer() else nbytes
    S, n = units.whole(S, "nbytes"), units.whole(n, "n", 1)
    itemsize = units.whole(itemsize, "itemsize", 1)
    if S % itemsize:
        elements = f"a whole number of elements of {itemsize} bytes"
        raise ValueError(f"{S} bytes are not {elements}: give the tensor's itemsize")
    if rank is None and n > _MOST:
        raise ValueError(
            f"a ledger with a line for each of {n} ranks is too long: use {_MOST:,} "
            "ranks at most, or ask for one, as in sent(…, rank=0)"
        )
    if rank is not None and (rank := units.whole(rank, "rank")) >= n:
        raise ValueError(f"rank {rank} is none of {n}: use 0 … {n - 1}")
    ranks = range(n) if rank is None else (rank,)
    return [Seat(n, each, S, itemsize) for each in ranks]


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


def steps(algorithm: str, n: int) -> int:
    """Messages of an algorithm that have to wait for each other, when a rank can send one and
    receive one at a time.

    >>> [steps(algorithm, 8) for algorithm in ALL_REDUCES]
    [14, 14, 6, 6]
    """
    return _formula(algorithm).steps(units.whole(n, "n", 1))


def cost(algorithm: str, nbytes: int | float, n: int, link: Link) -> float:
    """Seconds that an algorithm needs for a tensor of nbytes when every rank has a link of its own:
    steps · λ + (bytes that travel one after the other) / bw.

    Invariant: equals `trace.makespan(link)` of a real run wherever n divides the tensor. That
    replays the messages in this same model: it tests their order and sizes, not the model.
    Source: Hockney's model, as in Thakur, Rabenseifner and Gropp, 2005.

    >>> cost("all_reduce_ring", 64e6, 4, Link(1e-5, 1e9))
    0.09606
    >>> from math import log2
    >>> S, N, λ, bw = 2**26, 8, 2**-17, 2**30
    >>> link = Link(latency=λ, bandwidth=bw)
    >>> cost("all_reduce_ring", S, N, link) == 2 * (N - 1) * (λ + S / (N * bw))  # by a ring
    True
    >>> cost("all_reduce_tree", S, N, link) == 2 * log2(N) * (λ + S / bw)  # all-reduce by a tree
    True
    >>> both = cost("all_reduce_halving_doubling", S, N, link)
    >>> both == 2 * log2(N) * λ + 2 * (N - 1) * S / (N * bw)  # by halving and doubling
    True
    """
    formula, n = _formula(algorithm), units.whole(n, "n", 1)
    nbytes = _size(nbytes)
    units.instance(link, Link, "cost")
    waits = formula.steps(n) * Fraction(link.latency)
    return float(waits + formula.share(n) * Fraction(nbytes) / Fraction(link.bandwidth))


def _size(nbytes: int | float) -> int | float:
    """A number of bytes, which may be one that no tensor has, as one of Python's."""
    if units.is_whole(nbytes):
        return units.whole(nbytes, "nbytes")
    return units.positive(nbytes, "nbytes", or_zero=True)


def fastest(nbytes: int | float, n: int, link: Link) -> str:
    """The all-reduce with the lowest `cost`; of equals the one that stands first."""
    return min(ALL_REDUCES, key=lambda algorithm: cost(algorithm, nbytes, n, link))


def crossover(first: str, second: str, n: int, link: Link) -> float | None:
    """The tensor size in bytes at which two algorithms cost the same, or None where one of them is
    never slower.

    first, second: names of algorithms
    n, link: ranks, and the link that each of them has

    >>> round(crossover("all_reduce_ring", "all_reduce_tree", 8, Link(1e-5, 1e9)))
    18824
    """
    n = units.whole(n, "n", 1)
    steps_apart = _formula(first).steps(n) - _formula(second).steps(n)
    share_apart = Fraction(_formula(second).share(n) - _formula(first).share(n))
    if steps_apart * share_apart <= 0:
        return None
    return float(steps_apart * Fraction(link.latency) * Fraction(link.bandwidth) / share_apart)


# ── how others report it ──────────────────────────────────────────────────────────────────────────

_BUS: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    **dict.fromkeys(("reduce_scatter", "all_gather", "all_to_all"), lambda n: Fraction(n - 1, n)),
    **dict.fromkeys(("broadcast", "reduce"), lambda n: Fraction(1)),
}


def bus_factor(op: str, n: int) -> Fraction:
    """Bus bandwidth over algorithm bandwidth: what the busiest link must carry at least, as a share
    of the tensor.

    Source: nccl-tests, doc/PERFORMANCE.md.

    >>> bus_factor("all_reduce", 8)
    Fraction(7, 4)
    """
    return units.entry(_BUS, op, "nccl-tests gives no bus factor for")(units.whole(n, "n", 1))


def algbw(nbytes: int | float, seconds: float) -> float:
    """Algorithm bandwidth in bytes per second: the tensor's size over the time."""
    return _size(nbytes) / units.positive(seconds, "seconds")


def busbw(op: str, nbytes: int | float, seconds: float, n: int) -> float:
    """Bus bandwidth in bytes per second: comparable with the hardware's, whatever the number of
    ranks.

    op, nbytes: the collective, and bytes of its whole tensor
    seconds, n: that it took on n ranks

    >>> busbw("all_reduce", 64e6, 0.096, 4)
    1000000000.0
    >>> S, N, seconds = 64e6, 4, 0.125
    >>> busbw("all_reduce", S, seconds, N) == 2 * (N - 1) * S / (N * seconds)  # all-reduce
    True
    """
    return float(algbw(nbytes, seconds) * bus_factor(op, n))
