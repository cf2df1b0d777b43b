"""Every collective returns the right values on every rank, sends exactly the bytes of its formula, and leaves its input alone."""

import functools
import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import collectives, world
from labutils.config import Link

RANKS = (1, 2, 3, 4, 5, 6, 7, 8)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
CASES = [
    *((29, dtype) for dtype in DTYPES),
    (0, torch.float32),
    (1, torch.bfloat16),
    (3, torch.int64),
    (24, torch.float16),
]
LINK = Link(latency=1e-5, bandwidth=1e9)


@functools.cache
def ranks(n: int) -> world.World:
    return world.World(n)


def own(i: int, length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What rank i begins with: small whole numbers, whose sums are exact in every dtype here, whatever the order."""
    return ((torch.arange(length) * (i + 3)) % 7 - 3 + i).to(dtype)


def bits(x: torch.Tensor) -> bytes:
    return bytes(x.contiguous().view(torch.uint8).tolist())


def expected(
    algorithm: str, n: int, length: int, dtype: torch.dtype, root: int, op: str = "sum"
) -> list:
    everyone = torch.stack([own(i, length, dtype) for i in range(n)])
    total = {
        "sum": everyone.sum(0, dtype=dtype),
        "product": everyone.prod(0, dtype=dtype),
        "min": everyone.amin(0),
        "max": everyone.amax(0),
    }[op]
    mine = [x.split(collectives.shares(length, n)) for x in everyone]
    return {
        "broadcast": [everyone[root]] * n,
        "scatter": list(mine[root]),
        "gather": [
            torch.cat([mine[i][i] for i in range(n)]) if i == root else None for i in range(n)
        ],
        "reduce": [total if i == root else None for i in range(n)],
        "reduce_scatter": list(total.split(collectives.shares(length, n))),
        "all_gather": [torch.cat([mine[i][i] for i in range(n)])] * n,
        "all_reduce": [total] * n,
        "all_to_all": [torch.cat([mine[j][i] for j in range(n)]) for i in range(n)],
    }[algorithm.rpartition("_")[0] if not algorithm.endswith("halving_doubling") else "all_reduce"]


def the_one(algorithm: str) -> str | None:
    """How an algorithm names the one rank that has the tensor first, or gets the result."""
    names = inspect.signature(getattr(collectives, algorithm)).parameters
    return next((name for name in ("src", "dst") if name in names), None)


def run(algorithm: str, n: int, length: int, dtype: torch.dtype, root: int = 0, **kwargs) -> list:
    function = getattr(collectives, algorithm)
    if peer := the_one(algorithm):
        kwargs[peer] = root

    def program(rank):
        x = own(rank.rank, length, dtype)
        if "gather" in algorithm:
            sizes = collectives.shares(length, n)
            x = x.split(sizes)[rank.rank]
            kwargs["sizes"] = sizes
        before = x.clone()
        result = function(x, rank.comm("dp"), **kwargs)
        assert torch.equal(x, before), "the input was changed"
        assert result is None or length == 0 or result.data_ptr() != x.data_ptr()
        return result

    return ranks(n).run(program)


@pytest.mark.parametrize("algorithm", collectives.FORMULAS)
@pytest.mark.parametrize("n", RANKS)
def test_values_bytes_messages_and_steps(algorithm, n):
    for length, dtype in CASES:
        for root in (length % n, 0) if the_one(algorithm) else (0,):
            results = run(algorithm, n, length, dtype, root)
            rights = expected(algorithm, n, length, dtype, root)
            for result, right in zip(results, rights, strict=True):
                assert (result is None) == (right is None)
                assert right is None or (result.dtype == dtype and torch.equal(result, right)), (
                    length,
                    dtype,
                )
            assert ranks(n).trace.steps == collectives.steps(algorithm, n)
            assert ranks(n).trace.sent.total == ranks(n).trace.received.total
        # What is sent and held is predicted for root 0, which came last.
        predicted = collectives.sent(
            algorithm, nbytes=length * dtype.itemsize, n=n, itemsize=dtype.itemsize
        )
        assert predicted.diff(ranks(n).ledger).unexplained == 0, (length, dtype)
        assert predicted == ranks(n).ledger  # the number of messages too
        kept = collectives.held(
            algorithm, nbytes=length * dtype.itemsize, n=n, itemsize=dtype.itemsize
        )
        assert [0 if result is None else result.nbytes for result in results] == [
            line.amount for line in kept
        ]


@pytest.mark.parametrize("algorithm", [name for name in collectives.FORMULAS if "reduce" in name])
@pytest.mark.parametrize("op", collectives.REDUCTIONS)
def test_every_reduction(algorithm, op):
    for result, right in zip(
        run(algorithm, 5, 13, torch.int64, op=op),
        expected(algorithm, 5, 13, torch.int64, 0, op),
        strict=True,
    ):
        assert (right is None and result is None) or torch.equal(result, right)


@pytest.mark.parametrize("algorithm", collectives.ALL_REDUCES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_all_ranks_end_with_the_same_bits_every_time(algorithm, dtype):
    def program(rank):
        x = torch.randn(37, generator=rank.generator).to(dtype)
        return getattr(collectives, algorithm)(x, rank.comm("dp"))

    first, again = ranks(6).run(program), ranks(6).run(program)
    assert len({bits(x) for x in first + again}) == 1


def floats(n: int) -> list[torch.Tensor]:
    return [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(n)]


def test_the_ring_sums_piece_j_in_the_order_of_the_ring_after_rank_j():
    n, tensors = 4, floats(4)
    result = ranks(n).run(
        lambda rank: collectives.all_reduce_ring(tensors[rank.rank], rank.comm("dp"))
    )[0]
    for j, piece in enumerate(result.split(16)):
        order = [tensors[(j + 1 + k) % n].split(16)[j] for k in range(n)]
        assert torch.equal(piece, functools.reduce(torch.add, order))


@pytest.mark.parametrize("algorithm", ["all_reduce_naive", "reduce_star"])
def test_rank_0_adds_in_rank_order(algorithm):
    tensors = floats(6)
    result = ranks(6).run(
        lambda rank: getattr(collectives, algorithm)(tensors[rank.rank], rank.comm("dp"))
    )[0]
    assert torch.equal(result, functools.reduce(torch.add, tensors))


@pytest.mark.parametrize("algorithm", collectives.ALL_REDUCES)
def test_shapes_views_out_and_autograd(algorithm):
    all_reduce = getattr(collectives, algorithm)

    def program(rank):
        comm = rank.comm("dp")
        base = own(rank.rank, 24).view(4, 6)
        transposed = all_reduce(base.T, comm)
        scalar = all_reduce(torch.tensor(float(rank.rank)), comm)
        weight = own(rank.rank, 5).requires_grad_()
        summed = all_reduce(weight, comm)
        into = torch.empty(4, 6, dtype=torch.float64)
        assert all_reduce(base, comm, out=into) is into
        in_place = base.clone()
        all_reduce(in_place, comm, out=in_place)
        return transposed, scalar, summed, into, in_place

    total = sum(own(i, 24).view(4, 6) for i in range(3))
    for transposed, scalar, summed, into, in_place in ranks(3).run(program):
        assert (
            torch.equal(transposed, total.T)
            and torch.equal(into, total)
            and torch.equal(in_place, total)
        )
        assert scalar.shape == () and scalar == 3 and not summed.requires_grad


STRIDED = {
    "all_reduce": {}, "reduce_scatter": {}, "all_gather": {}, "broadcast": dict(src=1),
    "scatter": dict(src=1), "gather": dict(dst=1), "reduce": dict(dst=1), "all_to_all": {},
    "reduce_star": dict(dst=1), "shift": {},
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name, ends", STRIDED.items(), ids=STRIDED)
def test_what_is_not_contiguous_is_sent_as_what_is(name, ends, n):
    def program(rank):
        comm = rank.comm("dp")
        x = own(rank.rank, 24).view(4, 6).T  # 6 × 4
        given = (x, x.contiguous())
        run = getattr(comm, name, None) or functools.partial(getattr(collectives, name), comm=comm)
        return [run(each, **ends) for each in given]

    for strided, plain in ranks(n).run(program):
        assert (plain is None) == (strided is None)
        assert plain is None or torch.equal(strided, plain)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_reduce_scatter_and_all_gather_work_in_place(n):
    def program(rank):
        comm, i = rank.comm("dp"), rank.rank
        x = own(i, 10)
        apart = comm.reduce_scatter(x, out=torch.empty(collectives.shares(10, n)[i], dtype=x.dtype))
        assert torch.equal(x, own(i, 10))
        mine = x.split(collectives.shares(10, n))[i]
        assert comm.reduce_scatter(x, out=mine) is mine and torch.equal(mine, apart)
        whole, address = torch.empty(10, dtype=x.dtype), x.data_ptr()
        assert comm.all_gather(mine, sizes=collectives.shares(10, n), out=whole) is whole
        assert (
            comm.all_gather(mine, sizes=collectives.shares(10, n), out=x, async_op=True).wait() is x
        )
        assert torch.equal(x, whole) and x.data_ptr() == address
        return whole

    assert all(
        torch.equal(whole, sum(own(i, 10) for i in range(n))) for whole in ranks(n).run(program)
    )


def test_an_all_gather_takes_what_lies_elsewhere_in_its_output():
    def program(rank):
        whole = torch.zeros(6)
        x = whole[4:]  # only for the last rank the place of its own piece
        x.fill_(rank.rank + 1)
        return collectives.all_gather_ring(x, rank.comm("dp"), out=whole).tolist()

    assert ranks(3).run(program) == [[1, 1, 2, 2, 3, 3]] * 3


@settings(max_examples=40)
@given(st.data(), st.integers(1, 7), st.sampled_from(DTYPES))
def test_rows_of_any_number_and_width(data, n, dtype):
    rows, width = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 3))
    sizes = tuple(data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)))
    table = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=n, max_size=n)
    )

    def program(rank):
        i, comm = rank.rank, rank.comm("dp")
        x = torch.full((rows, width), i + 1, dtype=dtype)
        scattered = collectives.reduce_scatter_ring(x, comm)
        gathered = collectives.all_gather_ring(
            torch.full((sizes[i], width), i, dtype=dtype), comm, sizes=sizes
        )
        mine = torch.repeat_interleave(torch.arange(n) + 10 * i, torch.tensor(table[i])).to(dtype)
        swapped = collectives.all_to_all_pairwise(
            mine, comm, send_sizes=table[i], recv_sizes=[row[i] for row in table]
        )
        return scattered, gathered, swapped

    for i, (scattered, gathered, swapped) in enumerate(ranks(n).run(program)):
        assert torch.equal(
            scattered,
            torch.full((collectives.shares(rows, n)[i], width), n * (n + 1) // 2, dtype=dtype),
        )
        assert gathered.shape == (sum(sizes), width)
        assert gathered[:, :1].flatten().tolist() == [
            rank for rank, size in enumerate(sizes) for _ in range(size)
        ] * (width > 0)
        assert swapped.tolist() == [10 * j + i for j in range(n) for _ in range(table[j][i])]


@given(st.integers(0, 200), st.integers(1, 40))
def test_shares_cover_and_are_torch_tensor_split(amount, n):
    sizes = collectives.shares(amount, n)
    assert sum(sizes) == amount and len(sizes) == n and max(sizes) - min(sizes) <= 1
    assert sizes == tuple(len(piece) for piece in torch.arange(amount).tensor_split(n))


@given(
    st.sampled_from(list(collectives.FORMULAS)),
    st.integers(1, 33),
    st.integers(0, 500),
    st.sampled_from([1, 2, 4, 8]),
)
def test_formulas_agree_with_each_other(algorithm, n, length, itemsize):
    sizes = dict(nbytes=length * itemsize, n=n, itemsize=itemsize)
    sent = collectives.sent(algorithm, **sizes)
    assert (
        all(line.amount >= 0 for line in sent)
        and sent.count >= collectives.steps(algorithm, n) * (n > 1) / 2
    )
    S, total = length * itemsize, sent.total
    if algorithm.startswith(("all_reduce_naive", "all_reduce_ring", "all_reduce_tree")):
        assert total == 2 * (n - 1) * S  # the same over all links: only the busiest rank differs
    if algorithm.startswith(("broadcast", "reduce_", "all_gather", "all_to_all")):
        assert total == (n - 1) * S
    if algorithm == "all_reduce_ring":
        halves = (
            collectives.sent("reduce_scatter_ring", **sizes).by("rank"),
            collectives.sent("all_gather_ring", **sizes).by("rank"),
        )
        assert sent.by("rank") == {
            rank: halves[0][rank] + halves[1][rank] for rank in sent.by("rank")
        }


@pytest.mark.parametrize("algorithm", collectives.FORMULAS)
def test_a_rank_of_a_million_is_asked_for_alone(algorithm):
    with pytest.raises(ValueError, match=r"each of 1000000 ranks .* sent\(…, rank=0\)"):
        collectives.sent(algorithm, nbytes=4_000_004, n=10**6)
    for rank in (0, 7, 999_999):
        alone = collectives.sent(algorithm, nbytes=4_000_004, n=10**6, rank=rank)
        few = collectives.sent(algorithm, nbytes=4_004, n=1000, rank=rank % 1000)
        assert alone.only(rank=rank).total == alone.total and len(alone) == len(few)


@pytest.mark.parametrize("algorithm", collectives.FORMULAS)
@pytest.mark.parametrize("n", RANKS)
def test_cost_is_the_makespan_of_a_real_run(algorithm, n):
    length = n * 8  # pieces of equal size, also for the largest power of two in n
    run(algorithm, n, length, torch.float64)
    assert math.isclose(
        ranks(n).trace.makespan(LINK),
        collectives.cost(algorithm, length * 8, n, LINK),
        rel_tol=1e-12,
    )


def test_where_the_winner_changes():
    for first, second in (
        ("all_reduce_ring", "all_reduce_tree"),
        ("all_reduce_ring", "all_reduce_halving_doubling"),
    ):
        size = collectives.crossover(first, second, 6, LINK)
        times = [
            [collectives.cost(way, size * k, 6, LINK) for k in (1, 0.5, 2)]
            for way in (first, second)
        ]
        assert math.isclose(times[0][0], times[1][0])
        assert times[0][1] > times[1][1] and times[0][2] < times[1][2]
    assert collectives.crossover("all_reduce_ring", "all_reduce_halving_doubling", 8, LINK) is None
    assert collectives.fastest(1e9, 8, LINK) == "all_reduce_halving_doubling"
    size = collectives.crossover("all_reduce_ring", "all_reduce_halving_doubling", 6, LINK)
    assert collectives.fastest(size * 0.99, 6, LINK) == "all_reduce_halving_doubling"
    assert collectives.fastest(size * 1.01, 6, LINK) == "all_reduce_ring"
    assert all(
        collectives.fastest(1e9, n, LINK) == "all_reduce_ring" for n in (3, 5, 6, 7, 9, 100, 1000)
    )


def test_bandwidths_as_nccl_tests_reports_them():
    for op, factor in {
        "all_reduce": 1.75,
        "reduce_scatter": 0.875,
        "all_gather": 0.875,
        "all_to_all": 0.875,
        "broadcast": 1,
        "reduce": 1,
    }.items():
        assert collectives.bus_factor(op, 8) == factor
        assert collectives.busbw(op, 8e9, 2.0, 8) == 4e9 * factor
    assert collectives.algbw(8e9, 2.0) == 4e9
    # On links of bandwidth B with no latency, a ring's bus bandwidth is B.
    free = Link(0, 3e9)
    assert math.isclose(
        collectives.busbw(
            "all_reduce", 5e8, collectives.cost("all_reduce_ring", 5e8, 16, free), 16
        ),
        3e9,
    )


def on_two(fn):
    return ranks(2).run(lambda rank: fn(rank.comm("dp")))


@pytest.mark.parametrize(
    "attempt, said",
    [
        (
            lambda: on_two(
                lambda comm: collectives.all_reduce_ring(torch.ones(3), comm, op="mean")
            ),
            "divide by comm.size",
        ),
        (
            lambda: on_two(lambda comm: collectives.all_reduce_ring(torch.ones(3), comm, op="xor")),
            "sum, product, min, max",
        ),
        (
            lambda: on_two(lambda comm: collectives.broadcast_tree(torch.ones(3), comm, src=2)),
            "use 0 … 1",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.all_reduce_ring(torch.ones(3), comm, out=torch.ones(4))
            ),
            "out",
        ),
        (
            lambda: on_two(lambda comm: collectives.reduce_scatter_ring(torch.tensor(1.0), comm)),
            "rows",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.reduce_scatter_ring(x := torch.ones(4), comm, out=x[1:3])
            ),
            "is not its piece 0 of 2",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.all_gather_ring(torch.ones(3), comm, out=torch.ones(3))
            ),
            "must be contiguous, (6,)",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.all_gather_ring(torch.ones(3), comm, sizes=(3,))
            ),
            "names 1 ranks",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.all_gather_ring(torch.ones(3), comm, sizes=(2, 2))
            ),
            "brings 3 rows",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.all_to_all_pairwise(torch.ones(3), comm, send_sizes=(1, 1))
            ),
            "the 3 rows",
        ),
        (
            lambda: on_two(
                lambda comm: collectives.all_to_all_pairwise(
                    torch.ones(4), comm, send_sizes=(2, 2), recv_sizes=(1, 1)
                )
            ),
            "agree on rank",
        ),
        (lambda: collectives.sent("all_reduce_ring", nbytes=10, n=4), "itemsize"),
        (lambda: collectives.sent("all_reduce_ring", nbytes=-4, n=4), "nbytes"),
        (lambda: collectives.sent("all_reduce_ring", nbytes=0.5, n=4), "nbytes"),
        (lambda: collectives.sent("all_reduce_ring", nbytes=8, n=0), "n must be at least 1"),
        (
            lambda: collectives.sent("all_reduce_butterfly", nbytes=8, n=2),
            "all_reduce_naive, all_reduce_ring, all_reduce_tree",
        ),
        (lambda: collectives.cost("all_reduce", 8, 2, LINK), "no algorithm 'all_reduce'"),
        (
            lambda: collectives.cost("all_reduce_ring", float("nan"), 2, LINK),
            "finite number of at least 0, got nan",
        ),
        (
            lambda: collectives.cost("all_reduce_ring", -1, 2, LINK),
            "nbytes must be at least 0, got -1",
        ),
        (
            lambda: collectives.cost("all_reduce_ring", float("inf"), 2, LINK),
            "nbytes must be a finite number of at least 0, got inf",
        ),
        (lambda: collectives.bus_factor("barrier", 4), "nccl-tests"),
        (lambda: collectives.algbw(8, 0), "seconds"),
        (lambda: collectives.shares(4, 0), "n must be at least 1"),
    ],
)
def test_bad_input_is_named_with_its_remedy(attempt, said):
    # Inside a rank the world reports it; outside it is the plain error; under jaxtyping's checks a wrong type is a TypeCheckError.
    with pytest.raises((ValueError, TypeError, world.RankError)) as error:
        attempt()
    assert said in str(error.value)
