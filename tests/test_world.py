"""One program on every engine: right values, every byte counted, and every kind of failure told at once and survived."""

import gc
import importlib
import itertools
import linecache
import math
import multiprocessing.forkserver
import os
import re
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from labutils import collectives, world
from labutils.config import Mesh
from labutils.world import DeadlockError, MismatchError, RankError, World, sockets, threads, worker
from labutils.world.distributed import DistributedEndpoint
from labutils.world.messages import CallSite, Request
from labutils.world.processes import _METHOD, _check_files, start_server
from labutils.world.threads import Rendezvous

ROOT = Path(__file__).parent.parent
PATIENT = 600.0  # seconds: what only such a time-out ends takes far longer than anything that a busy machine delays


@pytest.fixture(scope="module", params=["threads", "processes"])
def engine(request):
    return request.param


@pytest.fixture(scope="module")
def four(engine):
    with World(4, engine=engine, timeout=PATIENT) as four:
        yield four


@pytest.fixture(scope="module")
def processes():
    with World(4, engine="processes", timeout=PATIENT) as four:
        yield four


def fails(four, fn, kind, *args):
    """The error of a run that fails promptly, after which the next run works."""
    four.run(lambda rank: None)  # processes start with their first run, which takes its time
    start = time.monotonic()
    with pytest.raises(kind) as caught:
        four.run(fn, *args)
    if kind is not world.TimeoutError:
        assert time.monotonic() - start < four.timeout / 2
    assert (
        four.run(lambda rank: rank.comm().all_reduce(torch.ones(3)).tolist())
        == [[float(four.size)] * 3] * four.size
    )
    return caught.value


def pids_of(world):
    """Process ids of the ranks that are up; threads have none."""
    return [rank.process.pid for rank in getattr(world._engine, "ranks", [])]


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids):
    """Whether all processes end before the test loses patience."""
    deadline = time.monotonic() + PATIENT / 2
    if hasattr(os, "pidfd_open"):
        for pid in filter(alive, pids):
            select.select([os.pidfd_open(pid)], [], [], deadline - time.monotonic())
    else:
        running = [each for each in psutil.process_iter() if each.pid in pids]
        psutil.wait_procs(running, deadline - time.monotonic())
    return not any(map(alive, pids))


def line_of(text):
    """The number of the line of this file that holds `text`, as it stands in an error."""
    (number,) = [
        i
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if text in line and "line_of" not in line
    ]
    return f"tests/test_world.py, line {number}"


# ── programs ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_come_in_rank_order(engine, size):
    with World(size, engine=engine) as small:
        assert small.run(
            lambda rank, k, *, shift: (rank.rank * k + shift, rank.size), 10, shift=1
        ) == [(10 * i + 1, size) for i in range(size)]
        assert (
            small.run(lambda rank: rank.comm().all_reduce(torch.tensor(2.0)).item())
            == [2.0 * size] * size
        )


def test_what_ranks_returned_is_freed_with_the_list(four):
    gc.disable()  # it would free them sooner or later; gigabytes can't wait for that
    try:
        results = four.run(lambda rank: rank.comm("dp").all_reduce(torch.ones(3)))
        kept = [weakref.ref(x) for x in results]
        del results
        until(lambda: not any(x() is not None for x in kept))
    finally:
        gc.enable()


def test_a_rank_knows_its_place_on_the_mesh(engine):
    mesh = Mesh(pp=2, tp=2)
    with World(mesh, engine=engine) as grid:
        seen = grid.run(
            lambda rank: (
                rank.coords,
                tuple(rank.comm("tp").ranks),
                tuple(rank.comm("pp").ranks),
                rank.comm("pp").rank,
                rank.comm().size,
                rank.mesh,
            )
        )
        sums = grid.run(
            lambda rank: [
                rank.comm(axis).all_reduce(torch.tensor([rank.rank])).item()
                for axis in ("tp", "pp", "dp", "world")
            ]
        )
        everyone = grid.run(lambda rank: list(rank.comm().ranks))
    assert everyone == [[0, 1, 2, 3]] * 4
    assert seen == [
        (mesh.coords(i), mesh.group(i, "tp"), mesh.group(i, "pp"), mesh.coords(i)["pp"], 4, mesh)
        for i in range(4)
    ]
    assert sums == [[1, 2, 0, 6], [1, 4, 1, 6], [5, 2, 2, 6], [5, 4, 3, 6]]


@pytest.mark.parametrize("axes", [("dp", "cp"), ("cp", "dp")])
def test_axes_can_be_joined(axes):
    mesh = Mesh(pp=2, dp=2, cp=2, tp=2)

    def program(rank):
        joined = rank.comm(*axes)
        assert joined is rank.comm("dp", "cp")
        work = joined.all_reduce(torch.tensor([rank.rank]), async_op=True)
        gathered = joined.all_gather(torch.tensor([rank.rank])).tolist()
        return joined.axis, tuple(joined.ranks), joined.rank, gathered, work.wait().item()

    with World(mesh) as grid:
        for i, seen in enumerate(grid.run(program)):
            here = mesh.coords(i)
            alike = [
                j
                for j in range(mesh.size)
                if (mesh.coords(j)["pp"], mesh.coords(j)["tp"]) == (here["pp"], here["tp"])
            ]
            place = 2 * here["dp"] + here["cp"]
            assert seen == ("dp_cp", tuple(alike), place, alike, sum(alike))
        assert set(grid.ledger.by("axis")) == {"dp_cp"}
        everyone = grid.run(lambda rank: rank.comm("tp", "pp", "cp", "dp").ranks)
        assert everyone == [range(mesh.size)] * mesh.size


def test_numbers_from_numpy_are_numbers_of_ranks(engine):
    def program(rank, i):
        comm, one = rank.comm(), np.int64(1)
        sizes = [one, 2] if rank.rank else [1, 2]  # of one kind here, of two kinds there
        rows = comm.all_gather(torch.ones(sizes[rank.rank], 2), sizes=sizes)
        comm.gather(rows[: rank.rank + 1], dst=one, sizes=np.array([1, 2]))
        return comm.broadcast(torch.tensor(float(rank.rank)), src=i).item(), len(rows)

    with World(np.int64(2), engine=engine) as two:
        assert two.run(program, np.int8(1)) == [(1.0, 3)] * 2
    dry = World(np.int64(3), engine="dry")
    dry.run(lambda rank: rank.comm().all_reduce(torch.ones(3)), rank=np.int64(2))
    assert dry.ledger.by("rank") == {2: 16} and type(dry.size) is int


def test_random_numbers_differ_between_ranks_and_repeat_between_runs(four):
    first, second = (
        four.run(lambda rank: torch.rand(2, generator=rank.generator).tolist()) for _ in range(2)
    )
    assert first == second and len({tuple(numbers) for numbers in first}) == 4
    assert first[1] == torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()


def cell(source):
    """A function `program` as a notebook kernel would have compiled it: known to linecache under a name with the kernel's number in it."""
    source = textwrap.dedent(source)
    name = f"/tmp/ipykernel_{os.getpid()}/123.py"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace = {"__name__": "__main__", "torch": torch}
    exec(compile(source, name, "exec"), namespace)
    return namespace["program"]


def test_functions_from_a_cell_run_and_fail_with_their_own_lines(four):
    program = cell("""
        def helper(x):
            if x == 2:
                raise ValueError(f"cannot do {x}")
            return x
        def program(rank):
            return helper(rank.rank)
    """)
    error = fails(four, program, RankError)
    assert error.rank == 2
    assert str(error).splitlines() == [
        "rank 2 of 4 raised ValueError: cannot do 2",
        "",
        "  Cell, line 7, in program",
        "    return helper(rank.rank)",
        "  Cell, line 4, in helper",
        '    raise ValueError(f"cannot do {x}")',
        "ValueError: cannot do 2",
    ]


def test_output_of_processes_is_shown_in_rank_order(processes, capsys):
    def program(rank):
        comm = rank.comm()
        for turn in reversed(range(4)):
            if rank.rank == turn:
                print("turn", turn, sep="=")
            comm.barrier()

    processes.run(program)
    assert capsys.readouterr().out == "".join(f"[rank {i}] turn={i}\n" for i in range(4))


# ── messages ───────────────────────────────────────────────────────────────────────────────────────────────────────


def shift(rank, n=5):
    comm = rank.comm("dp")
    x, out = torch.full((n,), float(comm.rank)), torch.empty(n)
    return comm.send_recv(x, (comm.rank + 1) % comm.size, out, (comm.rank - 1) % comm.size)


def test_every_byte_is_counted_under_the_outermost_name(four):
    def program(rank):
        comm = rank.comm("dp")
        with comm.record("outer"), comm.record("inner"):
            shift(rank)
            later = comm.all_gather(torch.zeros(3), async_op=True)
        later.wait()
        shift(rank, 3)
        if comm.rank == 0:
            comm.send(torch.zeros(2, dtype=torch.float64), 3)
        if comm.rank == 3:
            comm.recv(torch.zeros(2, dtype=torch.float64), 0)
        comm.all_reduce(torch.zeros(8))

    four.run(program)
    sent = {(line.name, line.axis, line.rank): (line.amount, line.count) for line in four.ledger}
    expected = {
        (name, "dp", i): value
        for i in range(4)
        for name, value in [("outer", (20 + 36, 1 + 3)), ("send_recv", (12, 1)), ("all_reduce", (48, 6))]
    }
    assert sent == expected | {("send", "dp", 0): (16, 1)}
    assert four.trace.received.total == four.ledger.total
    four.run(shift)
    assert four.trace.steps == 1 and four.ledger.total == 80


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.uint16,
    ],
)
@pytest.mark.parametrize("n", [0, 1, 1000, 700_001])
def test_what_arrives_is_what_was_sent(four, dtype, n):
    def program(rank):
        comm, generator = rank.comm(), torch.Generator()
        x = torch.randint(0, 2, (n,), generator=generator.manual_seed(rank.rank)).to(dtype)
        left = torch.randint(0, 2, (n,), generator=generator.manual_seed((rank.rank - 1) % 4)).to(
            dtype
        )
        out = comm.send_recv(x, (rank.rank + 1) % 4, torch.empty_like(x), (rank.rank - 1) % 4)
        return (
            torch.equal(out.view(torch.uint8), left.view(torch.uint8)) if n else out.shape == (0,)
        )

    assert all(four.run(program))


def test_nothing_of_an_asynchronous_collective_stays_alive(four):
    def program(rank):
        comm, x = rank.comm(), torch.ones(5)
        works = [
            comm.all_reduce(x, async_op=True),
            comm.all_gather(x, out=torch.empty(20), async_op=True),
        ]
        alive = [weakref.ref(tensor) for tensor in (x, *(work.wait() for work in works))]
        del works, x
        return [tensor() for tensor in alive]

    assert four.run(program) == [[None] * 3] * 4


def test_memory_is_given_up_when_its_rank_has_waited_whenever_the_other_one_came(monkeypatch):
    """Rank 1 comes second, moves the bytes, and is stopped before it returns from doing so."""
    come, done, looked = (threading.Event() for _ in range(3))

    class Stopping(Rendezvous):
        def post(self, *requests):
            if requests[0].rank == 1:
                assert come.wait(30)
            super().post(*requests)
            if requests[0].rank == 0:
                come.set()

        def _meet(self, one, other):
            super()._meet(one, other)
            done.set()
            assert looked.wait(30)

    def program(rank, sending):
        comm, x = rank.comm(), torch.ones(3)
        if rank.rank == 1:
            return comm.recv(x, 0) if sending else comm.send(x, 0)
        memory = weakref.ref(x.untyped_storage())
        work = comm.isend(x, 1) if sending else comm.irecv(x, 1)
        del x
        assert done.wait(30)
        before = memory() is not None
        work.wait()
        del work
        after = memory() is not None
        looked.set()
        return before, after

    monkeypatch.setattr(threads, "Rendezvous", Stopping)
    for sending in True, False:
        for event in come, done, looked:
            event.clear()
        assert World(2).run(program, sending)[0] == (True, False)


def test_what_was_sent_and_received_can_still_be_resized(four):
    def program(rank):
        x, out = torch.ones(5), torch.empty(5)
        rank.comm().send_recv(x, (rank.rank + 1) % 4, out, (rank.rank - 1) % 4)
        return [tensor.untyped_storage().resize_(0).nbytes() for tensor in (x, out)]

    assert four.run(program) == [[0, 0]] * 4


@pytest.mark.parametrize(
    ("op", "expected"), [("sum", 3.0), ("product", 2.0), ("min", 1.0), ("max", 2.0)]
)
@pytest.mark.parametrize("n", [3, 400_003])
def test_what_arrives_can_be_reduced(four, op, expected, n):
    def program(rank):
        comm = rank.comm()
        if rank.rank == 0:
            comm.send(torch.full((n,), 2.0, dtype=torch.float64), 1)
        if rank.rank == 1:
            return comm.recv(torch.ones(n, dtype=torch.float64), 0, reduce=op).unique().tolist()

    assert four.run(program)[1] == [expected]


def test_messages_of_one_channel_stay_in_order(four):
    sizes = [3, 500_000, 1, 5000, 0, 300_000, 2]

    def program(rank):
        comm = rank.comm()
        token = torch.empty(0)
        if rank.rank == 0:
            works = [comm.isend(torch.full((n,), float(i)), 1) for i, n in enumerate(sizes)]
            comm.send(token, 2)  # the receiver begins when all has been sent
            comm.send(torch.tensor([-1.0]), 1)
            return [work.wait() for work in works]
        if rank.rank == 2:
            comm.recv(token, 0)
            comm.send(token, 1)
        if rank.rank == 1:
            comm.recv(token, 2)
            works = [comm.irecv(torch.empty(n), 0) for n in sizes]
            last = comm.recv(torch.empty(1), 0).item()
            return [work.wait().unique().tolist() for work in works], last

    assert four.run(program)[1] == ([[float(i)] if n else [] for i, n in enumerate(sizes)], -1.0)


def until(condition):
    """Compute, without a word to the other ranks, until the condition holds."""
    deadline = time.monotonic() + PATIENT / 2
    while not condition():
        assert time.monotonic() < deadline, "nothing moved while this rank computed"
        torch.ones(64, 64) @ torch.ones(64, 64)
    return True


def test_messages_and_collectives_move_while_ranks_compute(four):
    def program(rank):
        comm = rank.comm()
        x, out = torch.full((300_000,), float(rank.rank)), torch.empty(300_000)
        works = [comm.irecv(out, (rank.rank - 1) % 4), comm.isend(x, (rank.rank + 1) % 4)]
        until(lambda: all(work.done() for work in works))
        total = comm.all_reduce(x, async_op=True)
        until(total.done)
        return works[0].wait() is out, out[0].item(), total.wait()[0].item()

    assert four.run(program) == [(True, float((i - 1) % 4), 6.0) for i in range(4)]


def test_messages_at_once_do_not_wait_for_each_other(four):
    """In an order in which each would wait for the next one for ever."""

    def program(rank):
        comm = rank.comm()
        outs = [torch.empty(30_000) for _ in range(2)]
        with comm.at_once():
            for k, out in zip((1, 3), outs, strict=True):
                peer = (rank.rank + k) % 4
                comm.send_recv(torch.full((len(out),), float(rank.rank)), peer, out, peer)
        return [out.unique().tolist() for out in outs]

    assert four.run(program) == [[[float((i + k) % 4)] for k in (1, 3)] for i in range(4)]


def test_one_thread_watches_all_messages_of_a_run(processes):
    def program(rank):
        comm, seen = rank.comm(), []
        x = torch.full((30_000,), float(rank.rank))
        for _ in range(5):
            works = comm.isend(x, (rank.rank + 1) % 4), comm.irecv(x * 0, (rank.rank - 1) % 4)
            seen.append([each for each in threading.enumerate() if each.name == "messages"])
            x = [work.wait() for work in works][1]
        return len(seen[0]), all(each == seen[0] for each in seen), x[0].item()

    for _ in range(2):  # a run has its own
        assert processes.run(program) == [(1, True, float((i - 5) % 4)) for i in range(4)]


def test_asynchronous_work_is_booked_where_it_was_started(four):
    def program(rank):
        comm = rank.comm("dp")
        work = comm.all_reduce(torch.ones(400_000), async_op=True)
        shift(rank)
        comm.isend(torch.ones(1), (rank.rank + 1) % 4)
        comm.irecv(torch.ones(1), (rank.rank - 1) % 4)
        assert work.wait()[0] == 4

    four.run(program)
    assert [event.op for event in four.trace.ranks[2]] == ["all_reduce"] * 6 + [
        "send_recv",
        "send",
        "recv",
    ]


def test_an_asynchronous_collective_tells_when_it_was_under_way(four):
    def program(rank):
        comm, before = rank.comm(), time.perf_counter()
        work = comm.all_reduce(torch.ones(100), async_op=True)
        work.wait()
        start, end = work.span
        with pytest.raises(RuntimeError, match="only an asynchronous collective has a span"):
            print(comm.irecv(torch.ones(1), (rank.rank - 1) % 4).span)
        comm.send(torch.ones(1), (rank.rank + 1) % 4)
        return before <= start < end <= time.perf_counter()

    assert four.run(program) == [True] * 4


def test_collectives_behave_like_those_of_torch(processes):
    def program(rank):
        comm, group = rank.comm(), rank.comm().group
        x = torch.arange(8.0) * (rank.rank + 1)
        theirs = [x.clone(), torch.empty(2), torch.empty(32), x.clone()]
        dist.all_reduce(theirs[0], group=group)
        dist.reduce_scatter_tensor(theirs[1], x.clone(), group=group)
        dist.all_gather_into_tensor(theirs[2], x, group=group)
        dist.broadcast(theirs[3], src=2, group=group)
        ours = [
            comm.all_reduce(x),
            comm.reduce_scatter(x),
            comm.all_gather(x),
            comm.broadcast(x, 2),
        ]
        exchanged = torch.empty(8)
        dist.all_to_all_single(exchanged, x, group=group)
        theirs.append(exchanged)
        ours.append(comm.all_to_all(x))
        return [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]

    assert processes.run(program) == [[True] * 5] * 4


def test_the_other_collectives_and_out(four):
    def program(rank):
        comm, x = rank.comm(), torch.arange(4.0) + rank.rank
        out = torch.empty(4)
        assert comm.all_reduce(x, out=out) is out and comm.broadcast(x, 3, out=x) is x
        scattered = comm.scatter(torch.arange(4.0) * rank.rank, src=2).item()
        gathered, reduced = (
            comm.gather(torch.tensor([rank.rank]), dst=1),
            comm.reduce(torch.ones(2), dst=1),
        )
        uneven = comm.all_gather(torch.ones(rank.rank), sizes=[0, 1, 2, 3])
        comm.barrier()
        return (
            out.tolist(),
            x.tolist(),
            scattered,
            gathered is not None and gathered.tolist(),
            reduced is not None and reduced.tolist(),
            len(uneven),
        )

    ends = [
        (
            [6.0, 10.0, 14.0, 18.0],
            [3.0, 4.0, 5.0, 6.0],
            2.0 * i,
            i == 1 and [0, 1, 2, 3],
            i == 1 and [4.0, 4.0],
            6,
        )
        for i in range(4)
    ]
    assert four.run(program) == ends


def test_lazily_conjugated_and_negated_tensors_arrive_as_what_they_are(four):
    sizes = [2, 2000]

    def program(rank):
        comm, wrong = rank.comm(), []
        for n in sizes:
            x = torch.complex(torch.ones(4 * n), torch.full((4 * n,), 2.0 + rank.rank))
            for lazy in (x.conj(), x.conj().imag):
                assert lazy.is_conj() or lazy.is_neg()
                plain = lazy.resolve_conj().resolve_neg()
                calls = {
                    "all_reduce": comm.all_reduce,
                    "reduce_scatter": comm.reduce_scatter,
                    "all_gather": comm.all_gather,
                    "all_to_all": comm.all_to_all,
                    "broadcast": comm.broadcast,
                    "scatter": comm.scatter,
                    "gather": comm.gather,
                    "reduce": comm.reduce,
                }
                for name, call in calls.items():
                    got, expected = call(lazy), call(plain)
                    if got is not None and not torch.equal(got, expected):
                        wrong.append((name, n))
            right, left = (rank.rank + 1) % 4, (rank.rank - 1) % 4
            got = comm.send_recv(x.conj(), right, torch.empty_like(x), left)
            if not torch.equal(
                got, torch.complex(torch.ones(4 * n), -2.0 - left * torch.ones(4 * n))
            ):
                wrong.append(("send_recv", n))
        return wrong

    assert four.run(program) == [[]] * 4


@pytest.mark.parametrize("algorithm", ["ring", "naive", "tree", "halving_doubling"])
def test_all_reduce_sends_what_its_formula_says(four, algorithm):
    run = getattr(collectives, f"all_reduce_{algorithm}")
    four.run(lambda rank: run(torch.ones(10), rank.comm("dp")))
    predicted = collectives.sent(f"all_reduce_{algorithm}", nbytes=40, n=4)
    assert predicted.diff(four.ledger, by="rank").unexplained == 0


def test_no_graph_spans_ranks_but_backward_may_communicate(four):
    class SumOfGradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, comm):
            ctx.comm = comm
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return ctx.comm.all_reduce(gradient), None

    def program(rank):
        x = torch.ones(3, requires_grad=True)
        assert not rank.comm().all_reduce(x * 2).requires_grad
        received = rank.comm().send_recv(
            x * 2, (rank.rank + 1) % 4, torch.empty(3), (rank.rank - 1) % 4
        )
        assert received.tolist() == [2.0] * 3 and not received.requires_grad
        (SumOfGradients.apply(x, rank.comm()) * (rank.rank + 1)).sum().backward()
        return x.grad.tolist()

    assert four.run(program) == [[10.0] * 3] * 4


def test_process_groups_are_real_on_processes_and_absent_on_threads():
    def program(rank):
        x = torch.tensor([float(rank.rank)])
        dist.all_reduce(x, group=rank.comm("tp").group)
        return x.item()

    with World(Mesh(dp=2, tp=2), engine="processes") as grid:
        assert grid.run(program) == [1.0, 1.0, 5.0, 5.0]
        assert grid.ledger.total == 0
    with pytest.raises(RankError, match=r'use World\(..., engine="processes"\)'):
        World(2).run(program)


def test_messages_over_torch_distributed_for_gpus_and_clusters(processes):
    def program(rank):
        rank._endpoint = DistributedEndpoint(10)
        rank._comms.clear()
        comm = rank.comm()
        work = comm.all_reduce(torch.full((1000,), 2.0), async_op=True)
        received = comm.send_recv(
            torch.ones(3) * rank.rank,
            (rank.rank + 1) % 4,
            torch.ones(3),
            (rank.rank - 1) % 4,
            reduce="sum",
        )
        return (
            comm.all_reduce(torch.ones(1000)).unique().tolist(),
            work.wait().unique().tolist(),
            received[0].item(),
        )

    assert processes.run(program) == [([4.0], [8.0], 1.0 + (i - 1) % 4) for i in range(4)]


# ── failures ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_exception_on_one_rank_is_raised_here(four):
    def program(rank):
        if rank.rank == 1:
            try:
                {}["weights"]
            except KeyError as error:
                raise ValueError("no weights") from error  # one rank fails
        rank.comm().all_reduce(torch.ones(10**6))

    error = fails(four, program, RankError)
    assert error.rank == 1 and str(error).startswith("rank 1 of 4 raised ValueError: no weights\n")
    assert (
        line_of("# one rank fails") in str(error)
        and "KeyError: 'weights'" in str(error)
        and "raise ValueError" in str(error)
    )
    assert "world/" not in str(error) and "failed as well" not in str(error)


def test_an_exception_on_all_ranks_is_told_once(four):
    def program(rank):
        rank.comm().barrier()
        raise ValueError("no data")

    error = fails(four, program, RankError)
    assert (
        str(error).startswith("all 4 ranks raised ValueError: no data; this is rank 0\n")
        and str(error).count("Traceback") == 0
    )


def test_different_exceptions_are_all_told(four):
    def program(rank):
        raise ValueError(f"shard {rank.rank}")

    error = fails(four, program, RankError)
    assert str(error).startswith(
        "rank 0 of 4 raised ValueError: shard 0\n"
    ) and "rank 3 failed as well: ValueError: shard 3" in str(error)


def test_except_does_not_swallow_the_end_of_a_run(four):
    def program(rank):
        if rank.rank == 0:
            raise ValueError("first")
        while True:
            try:
                rank.comm().recv(torch.empty(1), 0)
            except Exception:
                pass

    assert fails(four, program, RankError).rank == 0


def test_an_error_does_not_wait_for_ranks_that_compute(four):
    def program(rank):
        if rank.rank == 0:
            raise ValueError("first")
        while True:
            torch.ones(8) + 1

    assert fails(four, program, RankError).rank == 0


@pytest.fixture
def unhurried(monkeypatch):
    """Ranks are ended because they do not end, and not because a machine is busy."""
    monkeypatch.setattr(world.processes, "_PATIENCE", PATIENT)


@pytest.mark.parametrize("segments", [0, 1, 2])
def test_ranks_stay_warm_after_an_error_in_the_middle_of_a_message(segments, unhurried):
    def program(rank):
        comm, n = rank.comm(), 10_000_000
        if rank.rank == 0:
            comm.send(torch.ones(n), 1)
        if rank.rank == 1:
            comm._recv(torch.empty(n), 0, None)  # ready to receive, but nobody reads on
            until(lambda: select.select([comm._endpoint.links[0].sock], [], [], 0)[0])
            for _ in range(segments):
                comm._endpoint._drive()
            raise ValueError("with half a message in")

    with World(2, engine="processes", timeout=PATIENT) as two:
        two.run(shift)
        pids = pids_of(two)
        for _ in range(3):
            fails(two, program, RankError)
            assert [x.mean().item() for x in two.run(shift, 400_000)] == [1.0, 0.0]
        assert pids_of(two) == pids


def test_who_was_ready_in_a_run_that_failed_is_not_in_the_next(processes):
    def program(rank):
        if rank.rank == 1:
            rank.comm().recv(torch.empty(7), 0)
        if rank.rank == 0:
            until(lambda: select.select([rank.comm()._endpoint.links[1].sock], [], [], 0)[0])
            raise ValueError("without a look at who is ready")

    fails(processes, program, RankError)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_rank_is_reported_and_not_waited_for(processes, number):
    def program(rank):
        comm = rank.comm()
        comm.all_reduce(torch.ones(100))
        if rank.rank == 2:
            os.kill(os.getpid(), number)
        comm.all_reduce(torch.ones(10**6))

    processes.run(shift)
    pids = pids_of(processes)
    error = fails(processes, program, RankError)
    assert error.rank == 2 and str(error).startswith(
        f"rank 2 of 4 died: its process was killed by {number.name}"
    )
    assert gone(pids)


def test_a_rank_that_exits_is_reported(processes):
    def program(rank):
        if rank.rank == 1:
            os.write(2, "\n".join(map(str, range(20))).encode())
            os._exit(7)
        rank.comm().barrier()

    last = "\n".join(map(str, range(8, 20)))
    assert str(fails(processes, program, RankError)) == (
        f"rank 1 of 4 died: its process ended with exit code 7; it last wrote:\n{last}"
    )


def test_after_a_failure_process_groups_are_new(unhurried):
    """They may have lost a rank in the middle of a call, and are of no more use."""

    def program(rank, group):
        if group:
            dist.all_reduce(torch.ones(1), group=rank.comm().group)
        if rank.rank == 1:
            raise ValueError("after it")

    with World(2, engine="processes", timeout=PATIENT) as two:
        for group in (False, True):
            two.run(shift)
            pids = pids_of(two)
            fails(two, program, RankError, group)
            assert gone(pids) if group else pids_of(two) == pids


@pytest.mark.skipif(_METHOD != "forkserver", reason="there is no fork server here")
def test_the_fork_server_is_in_no_torchrun_job(monkeypatch):
    seen = {}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setattr(multiprocessing.forkserver, "ensure_running", lambda: seen.update(os.environ))
    start_server()
    assert "PYTHONPATH" in seen and "TORCHELASTIC_RUN_ID" not in seen
    assert os.environ["TORCHELASTIC_RUN_ID"] == "7"


def test_a_rank_that_never_arrives_ends_in_a_time_out(engine):
    def program(rank):
        rank.comm().barrier()  # from here on, the others need far less than the time-out
        while rank.rank == 2:
            torch.ones(8) + 1  # rank 2 is here
        rank.comm("dp").all_reduce(torch.ones(8))  # the others wait

    with World(4, engine=engine, timeout=3) as impatient:
        error = fails(impatient, program, world.TimeoutError)
    text = str(error)
    assert text.startswith("ranks 0, 1, 3 waited 3 s in all_reduce for rank 2:\n")
    for i in (0, 1, 3):
        assert f"  rank {i} waits in all_reduce(float32[8], op=sum) on axis 'dp'\n" in text
    assert text.endswith(
        f"\n  ranks 0, 1, 3 wait at {line_of('# the others wait')}, in program"
    )
    where = re.search(
        r"rank 2 has not arrived and is at tests/test_world.py, line (\d+), in program", text
    )
    assert int(where[1]) in (
        int(line_of("# rank 2 is here").split()[-1]) - 1,
        int(line_of("# rank 2 is here").split()[-1]),
    )
    assert isinstance(error, TimeoutError)


def test_a_ring_in_which_all_send_first_is_a_deadlock(four):
    def program(rank):
        x = torch.ones(4)
        rank.comm().send(x, (rank.rank + 1) % 4)  # all send
        rank.comm().recv(x, (rank.rank - 1) % 4)

    error = fails(four, program, DeadlockError)
    _, *ranks, place = str(error).splitlines()
    assert ranks == [
        f"  rank {i} waits in send(float32[4]) to rank {(i + 1) % 4}" for i in range(4)
    ]
    assert place == f"  ranks 0, 1, 2, 3 wait at {line_of('# all send')}, in program"


def test_ranks_that_wait_at_different_places_each_name_theirs(four):
    def program(rank):
        if rank.rank % 2:
            rank.comm().recv(torch.ones(4), rank.rank - 1)  # the odd ones
        rank.comm().recv(torch.ones(4), (rank.rank + 1) % 4)  # the even ones

    _, *ranks = str(fails(four, program, DeadlockError)).splitlines()
    assert len(ranks) == 4
    for i, told in enumerate(ranks):
        assert told.endswith(f" at {line_of('# the odd' if i % 2 else '# the even')}, in program")


@pytest.mark.parametrize("waiting", [(1, 2, 3), (3,)], ids=["all others", "one"])
def test_waiting_for_a_rank_that_has_finished_is_a_deadlock(four, waiting):
    def program(rank):
        if rank.rank in waiting:
            with rank.comm().record("handshake"):
                rank.comm().recv(torch.empty(3), 0)

    error = fails(four, program, DeadlockError)
    assert "rank 0 has finished" in str(
        error
    ) and "rank 3 waits in recv(float32[3]) from rank 0 inside handshake" in str(error)


@pytest.mark.parametrize("begun", [1, 3])
def test_waiting_for_work_that_nobody_joins_is_a_deadlock(four, begun):
    """However many collectives are begun: one thread of a rank carries them out."""

    def program(rank):
        if rank.rank != 3:
            works = [rank.comm().all_reduce(torch.ones(4), async_op=True) for _ in range(begun)]
            works[0].wait()

    assert "all_reduce(float32[4], op=sum)" in str(fails(four, program, DeadlockError))


@pytest.fixture
def alone():
    """The endpoint of the only rank, and a request that nobody answers."""
    folder, lock = sockets.make_folder()
    with lock, sockets.create_memory(folder, 1):
        endpoint = sockets.SocketEndpoint(folder, 0, 1, PATIENT, lambda: None)
        yield endpoint, Request(CallSite("recv", "world", ("here", 1, "program")), rank=0)
    sockets.sweep_folders()


@pytest.mark.parametrize("done", [False, True])
def test_who_has_what_it_waited_for_does_not_wait(alone, done):
    """A thread that is slow to go on would find its request done and the run called a deadlock."""
    endpoint, request = alone
    request.done = done
    endpoint.waiting[request] = math.inf
    for _ in range(3):
        endpoint._look()
    assert endpoint.progress.rests(0) != done
    assert isinstance(request.error, DeadlockError) != done


def test_a_rank_leaves_after_what_it_has_begun(alone):
    """Which could send in the next run."""
    endpoint, request = alone
    endpoint.begin(worker := object())
    order = []

    def work():
        until(lambda: endpoint.stopped)
        order.append("stopped")
        endpoint.finish(request, worker)

    working = threading.Thread(target=work)
    working.start()
    endpoint.leave(over=True)
    order.append("left")
    working.join()
    assert order == ["stopped", "left"] and endpoint.progress.rests(0)


def test_nothing_of_a_run_that_failed_goes_on_in_the_next(four):
    """Collectives that were begun and are still queued would send to ranks that do another thing."""

    def fails_early(rank):
        begun = [rank.comm().all_reduce(torch.ones(5), async_op=True) for _ in range(3000)]
        if rank.rank == 1:
            raise ValueError("no data")
        return [work.wait() for work in begun]

    def program(rank):
        comm = rank.comm()
        return [comm.all_reduce(torch.ones(7), async_op=True).wait().sum().item() for _ in range(20)]

    for _ in range(3):
        assert "no data" in str(fails(four, fails_early, RankError))
        assert four.run(program) == [[28.0] * 20] * 4


def test_slow_ranks_are_no_deadlock(four):
    def program(rank):
        if rank.rank == 3:
            end = time.monotonic() + 0.3
            until(lambda: time.monotonic() > end)
        return rank.comm().all_reduce(torch.ones(1)).item()

    assert four.run(program) == [4.0] * 4


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("all_reduce(float32[4], op=sum)", "broadcast(float32[4], src=0)"),
        ("all_reduce(float32[4], op=sum)", "all_reduce(float32[2, 2], op=sum)"),
        ("all_reduce(float32[4], op=sum)", "all_reduce(float64[4], op=sum)"),
        ("all_reduce(float32[4], op=sum)", "all_reduce(float32[4], op=max)"),
        ("all_reduce(float32[4], op=sum)", "barrier()"),
        ("broadcast(float32[4], src=0)", "broadcast(float32[4], src=1)"),
    ],
)
def test_different_calls_are_a_mismatch_that_says_who_called_what(four, ours, theirs):
    def call(comm, text):
        op, dtype, shape, argument = re.fullmatch(
            r"(\w+)\((?:(\w+)\[([\d, ]+)\], \w+=(\w+))?\)", text
        ).groups()
        if op == "barrier":
            return comm.barrier()
        x = torch.ones([int(n) for n in shape.split(",")], dtype=getattr(torch, dtype))
        return (
            comm.broadcast(x, int(argument)) if op == "broadcast" else comm.all_reduce(x, argument)
        )

    def program(rank):
        rank.comm("dp").barrier()
        if rank.rank == 1:
            call(rank.comm("dp"), theirs)
        else:
            call(rank.comm("dp"), ours)

    text = str(fails(four, program, MismatchError))
    assert (
        "ranks 0, 1, 2, 3 must make the same calls on axis 'dp' in the same order, but call 2 differs:"
        in text
    )
    assert (
        f"  rank 0: {ours} at tests/test_world.py, line" in text
        and f"  rank 1: {theirs} at tests/test_world.py, line" in text
    )


@pytest.mark.parametrize("received", [torch.float64, 7])
@pytest.mark.parametrize("n", [5, 10_000])
def test_a_message_that_does_not_fit_is_a_mismatch(four, received, n):
    def program(rank):
        if rank.rank == 0:
            rank.comm().send(torch.ones(n), 1)  # sends float32
        if rank.rank == 1:
            out = (
                torch.empty(received)
                if isinstance(received, int)
                else torch.empty(n, dtype=received)
            )
            rank.comm().recv(out, 0)  # wants another thing

    text = str(fails(four, program, MismatchError))
    assert f"rank 0: send(float32[{n}]) to rank 1 at {line_of('# sends float32')}" in text
    assert re.search(
        rf"rank 1: recv\(float(32\[7|64\[{n}).* from rank 0 at {line_of('# wants another thing')}",
        text,
    )


def test_long_texts_do_not_hold_up_an_error(four):
    def program(rank):
        if rank.rank == 1:
            raise ValueError("ab" * 200_000)

    assert "ab" * 200_000 in str(fails(four, program, RankError))


def test_of_a_message_that_nobody_reads_the_ends_are_told(four):
    """Of hundreds of megabytes from every rank, telling it all took minutes."""

    def program(rank):
        raise ValueError(f"begin{'x' * 20_000_000}end")

    said = str(fails(four, program, RankError))
    assert "ValueError: begin" in said and "x … 19,000,0" in said and "end" in said
    assert len(said) < 3_000_000


def test_a_time_out_beyond_what_a_system_can_wait_is_none(engine):
    with World(2, engine=engine, timeout=1e300) as two:
        two.run(lambda rank: rank.comm().barrier())
        two.run(lambda rank: (rank.rank and time.sleep(0.05)) or rank.comm().barrier())


def test_a_recursion_without_end_is_told_in_few_lines(four):
    def deeper(n):
        return deeper(n + 1)

    def program(rank):
        deeper(0)

    text = str(fails(four, program, RankError))
    assert "RecursionError" in text and "in program" in text and "more calls …" in text
    assert len(text.splitlines()) < 60


def test_prints_are_kept_up_to_a_limit(four, capsys):
    def program(rank):
        for i in range(30_000 if rank.rank == 2 else 1):
            print(f"{i:99}")
        if rank.rank == 2:
            print("x" * 3_000_000)

    before = sys.stdout, sys.stderr
    four.run(program)
    out = capsys.readouterr().out
    assert out.count("[rank 2] … and 5,000,001 characters more\n") == 1
    assert out.count(" characters more") == 1 and len(out) < 1_200_000
    assert out.count(f"{0:99}\n") == 4 and out.count(f"{9_999:99}\n") == 1 and f"{10_000:99}" not in out
    assert (sys.stdout, sys.stderr) == before


def test_the_limit_of_prints_is_that_of_ranks_and_not_of_other_threads(capsys):
    def program(rank):
        if rank.rank == 0:
            other = threading.Thread(target=print, args=("y" * 2_000_000,))
            other.start()
            other.join()
        print("x" * 1_000_001, file=sys.stderr)

    World(2).run(program)
    out, err = capsys.readouterr()
    assert out == "y" * 2_000_000 + "\n" and err.count("x") == 2 * 1_000_000
    assert sorted(re.findall(r"\[rank \d\] … and 2 characters more", err)) == [
        f"[rank {i}] … and 2 characters more" for i in (0, 1)
    ]


def test_what_cannot_be_read_back_names_its_rank(processes):
    class Broken:
        def __reduce__(self):
            return int, ("no number",)

    error = fails(processes, lambda rank: Broken() if rank.rank == 1 else 0, RankError)
    text = "rank 1 of 4 returned what cannot be read back in the notebook (ValueError: invalid lit"
    assert str(error).startswith(text) and error.rank == 1


@pytest.mark.parametrize("place", ["short", "x" * 120])
def test_folders_of_owners_that_are_gone_are_swept(place, tmp_path, monkeypatch):
    (tmp_path / place).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / place))
    folder, lock = sockets.make_folder()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(os.path.join(folder, "249"))
    sockets.sweep_folders()
    assert os.path.exists(folder)
    lock.close()
    sockets.sweep_folders()
    assert not os.path.exists(folder)


def test_processes_start_where_the_path_of_temporary_files_is_long(tmp_path):
    (long := tmp_path / ("x" * 120)).mkdir()
    program = "from labutils.world import World; w = World(1, 'processes'); print(w.run(print))"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(long)}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.stdout == "[rank 0] Rank(0 of 1)\n[None]\n" and not ended.stderr, ended.stderr
    assert not list(long.iterdir())


def test_a_world_that_starts_sweeps_and_its_own_folder_stays(processes):
    stale, lock = sockets.make_folder()
    lock.close()
    processes.close()
    processes.run(lambda rank: None)
    assert not os.path.exists(stale)
    sockets.sweep_folders()
    assert all(map(os.path.exists, processes._engine.folders))


def test_a_limit_on_files_is_named_with_its_remedy(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(RuntimeError, match="share a file of .*`ulimit -f unlimited`, take few"):
            sockets.create_memory(str(tmp_path), 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_posix_and_type_checks_threads_run_and_wrong_types_are_told():
    missing = "resource", "fcntl", "pwd", "grp", "termios"
    hide = f"import sys; sys.modules.update(dict.fromkeys({missing}))"
    program = f"""
        {hide}
        from labutils import collectives
        from labutils.world import World
        print(World(2).run(lambda rank: rank.rank))
        for wrong in (None, [1.0]):
            try:
                collectives.all_reduce_ring(wrong, None)
            except TypeError as error:
                print(error)
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    asked = "write all_reduce_ring(x, rank.comm()): got"
    said = ["[0, 1]", f"{asked} None and None", f"{asked} a list and None"]
    assert ended.stdout.splitlines() == said, ended.stderr


def never_ends(folder, all_compute=False):
    """A file that is at its end when rank 1 has been there, and a program in which that rank, or all, compute for ever."""
    os.mkfifo(fifo := folder / "there")

    def program(rank):
        if rank.rank == 1:
            with open(fifo, "w"):
                pass
        while rank.rank == 1 or all_compute:
            torch.ones(8) + 1
        rank.comm().barrier()

    return fifo, program


@pytest.mark.parametrize("computes", [True, False])
def test_a_world_that_another_thread_closes_says_so_and_runs_again(computes, tmp_path):
    fifo, program = never_ends(tmp_path, computes)

    with World(2, engine="processes") as two:

        def close():
            with open(fifo):
                two.close()

        other = threading.Thread(target=close)
        other.start()
        with pytest.raises(world.WorldError, match="another thread closed this world while its r"):
            two.run(program)
        other.join()
        assert two.run(lambda rank: rank.rank) == [0, 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_message_that_waits_in_vain_in_a_destructor_is_an_error(engine):
    """Python prints what a `__del__` raises and goes on."""

    class Last:
        def __init__(self, comm):
            self.comm = comm

        def __del__(self):
            self.comm.barrier()

    with World(2, engine=engine, timeout=PATIENT) as two, pytest.raises(DeadlockError):
        two.run(lambda rank: Last(rank.comm()) and None if rank.rank == 0 else None)
    with World(2, engine=engine) as two:
        assert two.run(lambda rank: Last(rank.comm()) and rank.rank) == [0, 1]

    def own_error(rank):
        if rank.rank == 0:
            Last(rank.comm())  # waits for rank 1, in vain
            raise ValueError("its own")

    with World(2, engine=engine, timeout=PATIENT) as two, pytest.raises(RankError, match="its own"):
        two.run(own_error)


def test_what_cannot_travel_says_so(processes):
    error = fails(processes, lambda rank: threading.Lock() if rank.rank == 1 else 0, RankError)
    assert "rank 1 returned a lock that cannot be sent to the notebook" in str(
        error
    ) and "return numbers, text or tensors" in str(error)
    lock = threading.Lock()
    assert "cannot be sent to the ranks" in str(fails(processes, lambda rank: lock, TypeError))


def test_an_interrupt_ends_all_ranks_and_the_next_run_works(four, tmp_path):
    fifo, program = never_ends(tmp_path)

    def interrupt():
        with open(fifo) as there:
            there.read()  # returns when rank 1 has been there
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored here
    pids = pids_of(four)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            four.run(program)
    finally:
        signal.signal(signal.SIGINT, handler)
    thread.join()
    assert gone(pids)
    assert four.run(lambda rank: rank.rank) == [0, 1, 2, 3]
    assert not [thread for thread in threading.enumerate() if thread.name == "rank 1"]


def test_ranks_survive_what_befalls_kernel_and_fork_server_or_die_with_them(tmp_path, request):
    """A script without a main guard, because ranks are not to run it again."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import multiprocessing.forkserver, os, signal, sys
            from labutils.world import World, processes

            def server():
                return multiprocessing.forkserver._forkserver._forkserver_pid

            def pids_of(world):
                return [rank.process.pid for rank in world._engine.ranks]

            print("once", flush=True)
            two = World(2, engine="processes")
            two.run(lambda rank: None)
            pids = pids_of(two)

            if os.fork() == 0:
                sys.exit()
            os.wait()
            assert two.run(lambda rank: rank.rank) == [0, 1] and pids_of(two) == pids

            if processes._METHOD == "forkserver":
                processes._START = 0.5
                os.kill(server(), signal.SIGSTOP)
                try:
                    World(2, engine="processes").run(lambda rank: None)
                except RuntimeError as error:
                    print(error)
                os.kill(server(), signal.SIGCONT)
                processes._START = 60
                assert two.run(lambda rank: rank.rank) == [0, 1] and pids_of(two) == pids

                os.kill(server(), signal.SIGKILL)
                try:
                    two.run(lambda rank: [rank.comm().barrier() for _ in range(10**6)])
                except RuntimeError as error:
                    print(error)
            assert two.run(lambda rank: rank.rank) == [0, 1]
            idle = World(2, engine="processes")
            idle.run(lambda rank: None)
            servers = [server()] * (processes._METHOD == "forkserver")
            print(*pids_of(two), *pids_of(idle), *servers, flush=True)
            print(*two._engine.folders, *idle._engine.folders, flush=True)

            def program(rank):
                while True:
                    pass
            two.run(program)
        """)
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True
    )
    request.addfinalizer(process.kill)
    assert process.stdout.readline() == "once\n"
    if _METHOD == "forkserver":
        assert "fork server has not answered for 0.5 s" in process.stdout.readline()
        died = r"rank \d of 2 died: its process ended in a way that its fork server, which is gone"
        assert re.match(died, process.stdout.readline())
    pids = list(map(int, process.stdout.readline().split()))
    folders = process.stdout.readline().split()
    assert all(map(alive, pids)) and all(map(os.path.exists, folders))
    for folder, name in itertools.product(folders, range(100)):  # no rank ends before it is done
        Path(folder, str(name)).touch()
    process.kill()
    process.wait()
    process.stdout.close()
    assert gone(pids) and not any(map(os.path.exists, folders))


def test_one_world_is_used_from_several_threads(processes):
    results = {}

    def use(i):
        for _ in range(5):
            sums = processes.run(
                lambda rank, i: rank.comm().all_reduce(torch.full((5,), i))[0].item(), i
            )
            results.setdefault(i, []).extend(sums)

    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: [4 * i] * 20 for i in range(4)}


def test_running_out_of_files_names_the_limit_and_the_remedy(tmp_path, monkeypatch):
    crowd = World(20, engine="processes")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/dev/fd")) + 10
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with pytest.raises(
            RuntimeError,
            match=rf"20 ranks need more open files than the {limit} .* `ulimit -n 4096`",
        ):
            crowd.run(lambda rank: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_an_error_that_says_no_more_is_of_no_rank_and_waits_for_nothing():
    error = RankError("stopped")
    assert (str(error), error.waits, error.rank, error.traceback) == ("stopped", "", None, "")


def test_what_a_rank_started_ends_with_it():
    """Such as a shell, in the process group of which the rank is the leader."""
    with World(2, engine="processes") as two:
        started = two.run(lambda rank: os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "100"))
        assert all(map(alive, started))
    start = time.monotonic()
    assert gone(started) and time.monotonic() - start < 60


@pytest.mark.parametrize("opened, ranks, needed", [(100, 20, 196), (0, 2, 44), (0, 14, 72)])
def test_open_files_are_counted_here_and_in_the_fork_server(opened, ranks, needed, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda folder: range(opened))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (needed, needed))
    _check_files(ranks)
    with pytest.raises(RuntimeError, match=f"{ranks + 1} ranks need more open files"):
        _check_files(ranks + 1)


def test_closing_leaves_no_process_and_no_thread():
    with World(3, engine="processes") as three:
        three.run(lambda rank: rank.comm().all_reduce(torch.ones(1), async_op=True).wait())
        pids = pids_of(three)
        assert len(pids) == 3 and all(map(alive, pids))
    assert gone(pids)
    before = set(threading.enumerate())
    World(3).run(lambda rank: rank.comm().all_reduce(torch.ones(1), async_op=True).wait())
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
    assert set(threading.enumerate()) <= before


def test_nothing_but_the_loopback_is_opened(processes):
    def listening(rank):
        own = {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }
        rows = [
            line.split()
            for table in ("tcp", "tcp6", "udp", "udp6")
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        ]
        return [row[1] for row in rows if f"socket:[{row[9]}]" in own]

    if not os.path.exists("/proc/net/tcp"):
        pytest.skip("reads /proc/net, which only Linux has")
    addresses = [address for rank in processes.run(listening) for address in rank]
    assert addresses and all(address.startswith("0100007F:") for address in addresses)


# ── bad input ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: World(0), ValueError, "dp must be at least 1, got 0"),
        (
            lambda: World(2, engine="mpi"),
            ValueError,
            "no engine 'mpi': there are threads, processes, torchrun",
        ),
        (lambda: World(2, timeout=0), ValueError, "timeout must be a finite number above 0, got 0"),
        (
            lambda: World(2, engine="torchrun"),
            RuntimeError,
            "start the script with torchrun --standalone --nproc-per-node",
        ),
        (
            lambda: World(9999, engine="processes"),
            ValueError,
            "9999 ranks are too many processes for one machine",
        ),
        (
            lambda: World(10**5, engine="threads"),
            ValueError,
            '100,000 ranks are too many threads .*: use at most 1,024, or engine="dry"',
        ),
        (
            lambda: World(2).run(3),
            TypeError,
            "run takes a function of a rank, got 3|Argument fn|type-check",
        ),
    ],
)
def test_worlds_that_cannot_be(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda comm: comm._owner.comm("xp"), "a mesh has no axis 'xp'"),
        (lambda comm: comm._owner.comm("dp", "ep"), "cannot be joined: ep lies on the ranks of dp"),
        *(
            (
                lambda comm, name=name: getattr(comm, name)(torch.tensor(2.0)),
                rf"{name} deals in rows and got a tensor without dimensions: pass x.reshape\(1\)",
            )
            for name in ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")
        ),
        (
            lambda comm: comm.recv(
                torch.ones(4, dtype=torch.complex64).conj(), (comm.rank + 1) % 4
            ),
            "recv cannot write into a lazily conjugated or negated tensor",
        ),
        (
            lambda comm: comm.send(torch.ones(2), 9),
            "there is no rank 9 on axis 'world' of 4 ranks: use 0 … 3",
        ),
        (lambda comm: comm.send(torch.ones(2), True), "there is no rank True on axis 'world'"),
        (lambda comm: comm.recv(torch.ones(2), 1.0), "there is no rank 1.0 on axis 'world'"),
        (
            lambda comm: comm.broadcast(torch.ones(2), src=True),
            "src=True is not a rank of this group of 4: use 0 … 3",
        ),
        (
            lambda comm: comm.reduce(torch.ones(2), dst="0"),
            "dst='0' is not a rank of this group of 4: use 0 … 3",
        ),
        (
            lambda comm: comm.send(torch.ones(2), -1),
            "there is no rank -1 on axis 'world' of 4 ranks",
        ),
        (
            lambda comm: comm.send(torch.ones(2), comm.rank),
            r"sends to itself: nothing needs to travel, use x.clone\(\)",
        ),
        (
            lambda comm: comm.send(torch.ones(2, 3).t(), (comm.rank + 1) % 4),
            r"float32\[3, 2\] with strides \(1, 3\): pass x.contiguous\(\)",
        ),
        (lambda comm: comm.recv(torch.ones(4)[::2], (comm.rank + 1) % 4), r"pass x.contiguous\(\)"),
        (
            lambda comm: comm.recv(torch.ones(4), (comm.rank + 1) % 4, reduce="mean"),
            "cannot reduce by 'mean': use one of",
        ),
        (
            lambda comm: comm.all_reduce(torch.ones(4).to_sparse()),
            "all_reduce takes a dense tensor on cpu, got one with torch.sparse_coo",
        ),
        (lambda comm: comm.all_reduce(torch.ones(4, device="meta")), "on meta: convert it first"),
        (lambda comm: comm.broadcast(torch.ones(4), 4), "src=4"),
        (
            lambda comm: comm.all_gather(torch.ones(4), sizes=4),
            r"sizes must be a list: give the rows of each rank, as in \[2, 3\]; got {'sizes': 4}",
        ),
        (
            lambda comm: comm.all_to_all(torch.ones(4), [1, 1, 1, 1.5]),
            "send_sizes must be a whole number, got 1.5",
        ),
        *(
            (
                lambda comm, given=given: comm.all_to_all(torch.ones(6), **given),
                "6 rows for 4 ranks, which are no equal shares: pass send_sizes and recv_sizes",
            )
            for given in ({}, {"recv_sizes": [1, 1, 2, 2]})
        ),
        *(
            (
                lambda comm, out=out: comm.broadcast(torch.ones(2), out=out),
                r"the result of broadcast is float32\[2\] and out is .*: give an out like it",
            )
            for out in (torch.ones(3), torch.ones(2, dtype=torch.float64))
        ),
    ],
)
def test_bad_calls_name_the_value_and_the_remedy(four, program, text):
    with pytest.raises(RankError) as error:
        four.run(lambda rank: program(rank.comm()))
    assert re.search(text, str(error.value).splitlines()[0])  # below stands the source line


def test_a_tensor_is_asked_for():
    with pytest.raises(RankError, match="TypeError|TypeCheckError"):
        World(2).run(lambda rank: rank.comm().send([1, 2], 1 - rank.rank))


# ── torchrun ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_script_runs_under_torchrun(tmp_path, capsys, monkeypatch):
    script = str(ROOT / "tests" / "world_torchrun.py")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")
    }
    environment |= {"PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "4",
        script,
    ]
    job = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr
    monkeypatch.chdir(tmp_path)
    Path("freed").unlink()
    runpy.run_path(script, run_name="__main__")
    torchrun, threads = job.stdout.splitlines(), capsys.readouterr().out.splitlines()
    assert torchrun[0] == "torchrun" and threads[0] == "threads"
    assert (
        torchrun[5:] == threads[1:]
        and torchrun[4].startswith("[rank 3] is at")
        and any(line.endswith(" True (4, 3, 2, 1) 0") for line in torchrun)  # the pipeline
        and torchrun[-2] == "DeadlockError"
        and torchrun[-1] == "ranks 0, 1, 3 waited 3 s in barrier for rank 2:"
    )


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_ranks_on_gpus_meet_by_nccl_and_send_by_it(monkeypatch, tmp_path, device, backend):
    begun = []
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(dist, "FileStore", lambda *of: None)
    monkeypatch.setattr(dist, "init_process_group", lambda name, **where: begun.append(name))
    monkeypatch.setattr(worker, "own_device", lambda rank, size: torch.device(device))
    for kind in ("DistributedEndpoint", "SocketEndpoint"):
        monkeypatch.setattr(worker, kind, lambda *of, kind=kind: kind)
    member = worker._join(0, Mesh(dp=1), 1.0, str(tmp_path))
    assert begun == [backend]
    assert member.endpoint == ("DistributedEndpoint" if device == "cuda" else "SocketEndpoint")


def test_what_is_shaken_exists():
    shaken = runpy.run_path(str(ROOT / "tests" / "shaken" / "sitecustomize.py"))
    for module, classes in shaken["MEET"].items():
        known = importlib.import_module(f"labutils.{module}")
        for name, calls in classes.items():
            assert all(call in vars(vars(known)[name]) for call in calls.split())
