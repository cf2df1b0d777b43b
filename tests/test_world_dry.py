"""One rank of any mesh, alone: what it holds and sends is what it holds and sends among the others."""

import math
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labutils import accumulation, checkpointing, data_parallel, measure, precision, zero
from labutils.collectives import algorithms, sent
from labutils.config import Mesh, ModelConfig
from labutils.model import GPT
from labutils.world import RankError, World

TINY = ModelConfig(num_layers=2, d_model=32, num_heads=4, d_ff=128, vocab_size=64, seq_len=16)


def lines(ledger):
    return {(line.name, line.axis, line.rank): (line.amount, line.count) for line in ledger}


# ── what is sent ──────────────────────────────────────────────────────────────────────────────────


def collectives(rank):
    """By name of each call: the shape of its result, and the most bytes alive in it."""
    comm = rank.comm("dp")
    n, i = comm.size, comm.rank
    rows = torch.ones(3 * n + 1, 5)  # the shares of the ranks differ
    sizes = [k + 1 for k in range(n)]
    mine, pieces = torch.ones(sizes[i], 2), rows.tensor_split(n)
    send, recv = ([(a + b) % 3 for b in range(n)] for a in (i, i))
    share = pieces[i].contiguous()
    calls = {
        "all_reduce": lambda: comm.all_reduce(rows),
        "all_reduce out": lambda: comm.all_reduce(rows, out=rows),
        "all_reduce max": lambda: comm.all_reduce(rows, "max"),
        "naive": lambda: algorithms.all_reduce_naive(rows, comm),
        "tree": lambda: algorithms.all_reduce_tree(rows, comm),
        "halving_doubling": lambda: algorithms.all_reduce_halving_doubling(rows, comm),
        "reduce_scatter": lambda: comm.reduce_scatter(rows),
        "reduce_scatter out": lambda: comm.reduce_scatter(rows, out=share),
        "reduce_scatter in place": lambda: comm.reduce_scatter(rows, out=pieces[i]),
        "all_gather": lambda: comm.all_gather(rows),
        "all_gather sizes": lambda: comm.all_gather(mine, sizes=sizes),
        "broadcast": lambda: comm.broadcast(rows),
        "broadcast last": lambda: comm.broadcast(rows, n - 1, out=rows),
        "scatter": lambda: comm.scatter(rows),
        "gather": lambda: comm.gather(mine, sizes=sizes),
        "reduce": lambda: comm.reduce(rows, n - 1),
        "all_to_all": lambda: comm.all_to_all(rows[: 3 * n]),
        "all_to_all sizes": lambda: comm.all_to_all(torch.ones(sum(send), 2), send, recv),
        "barrier": lambda: comm.barrier(),
        "later": lambda: comm.all_reduce(rows, out=rows, async_op=True).wait(),
        "later in place": lambda: comm.reduce_scatter(rows, out=pieces[i], async_op=True).wait(),
        "never waited for": lambda: comm.all_reduce(rows, out=rows, async_op=True) and None,
    }
    shapes, starts = {}, {}
    with measure.recording(nn.Module()) as recorder:
        for name, call in calls.items():
            starts[name] = len(recorder.events)
            with comm.record(name):
                result = call()
            shapes[name] = None if result is None else (tuple(result.shape), result.dtype)
            del result
            recorder.happened("over")
    alive = [moment.ledger.total for moment in recorder.history().moments]
    ends = [*list(starts.values())[1:], len(alive)]
    peaks = (max(alive[start - 1 : end]) for start, end in zip(starts.values(), ends, strict=True))
    return shapes, dict(zip(calls, peaks, strict=True))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_a_rank_alone_books_what_it_sends_and_holds_among_the_others(n):
    threads, dry = World(n), World(n, engine="dry")
    results = threads.run(collectives)
    for r in range(n):
        assert dry.run(collectives, rank=r) == results[r]
        assert lines(dry.ledger) == lines(threads.ledger.only(rank=r))
        assert lines(dry.trace.received) == lines(threads.trace.received.only(rank=r))


@pytest.mark.parametrize("n", range(2, 18))
def test_a_ring_booked_at_once_is_the_ring_hop_by_hop(n):
    """Bytes, messages and peers, whether n divides the rows or not, and with fewer rows than
    ranks."""

    def program(rank):
        comm = rank.comm("dp")
        for rows in (0, 1, n, 2 * n + 3):
            x = torch.ones(rows, 3)
            with comm.record(f"{rows} rows"):
                algorithms.all_reduce_ring(x, comm)
                algorithms.reduce_scatter_ring(x, comm)
                algorithms.all_gather_ring(x, comm)
                algorithms.all_to_all_pairwise(x.repeat(n, 1)[: n * rows], comm)

    def peers(events):
        return {(e.op, e.to, e.source) for e in events}

    threads, dry = World(n), World(n, engine="dry")
    threads.run(program)
    for r in {0, 1, n // 2, n - 1}:
        dry.run(program, rank=r)
        assert lines(dry.ledger) == lines(threads.ledger.only(rank=r))
        assert lines(dry.trace.received) == lines(threads.trace.received.only(rank=r))
        assert peers(dry.trace.ranks[r]) == peers(threads.trace.ranks[r])


def test_one_rank_of_a_billion_costs_nothing():
    mesh = Mesh(pp=100, dp=10**5, tp=100)
    dry = World(mesh, engine="dry")

    def program(rank):
        x = torch.ones(10**9 + 7)
        for axes in ((), ("dp",), ("pp", "dp"), ("tp", "pp")):
            rank.comm(*axes).all_reduce(x, out=x)
        rank.comm().barrier()
        rank.comm().broadcast(torch.ones(4), src=5)
        rank.comm().all_gather(torch.ones(1))
        return rank

    assert repr(dry.run(program, rank=123_456_789)) == "Rank(123456789 of 1000000000)"
    seats = {"world": 10**9, "dp": 10**5, "pp_dp": 10**7, "pp_tp": 10**4}
    places = {"world": 123_456_789, "dp": 34_567, "pp_dp": 1_234_567, "pp_tp": 12 * 100 + 89}
    for axis, n in seats.items():
        whole = dict(nbytes=4 * (10**9 + 7), n=n, rank=places[axis])
        (expected,) = sent("all_reduce_ring", **whole)
        found = dry.ledger.only(name="all_reduce", axis=axis)
        assert (found.total, found.count) == (expected.amount, expected.count)
    assert dry.ledger.only(name="barrier").count == 30
    assert dry.ledger.only(name="all_gather").count == 10**9 - 1
    assert len(dry.trace.ranks) == 10**9 and dry.trace.ranks[-1] == ()
    mine = dry.trace.ranks[123_456_789]
    assert mine and dry.trace.ranks[123_456_789 - 10**9] == mine
    assert dry.trace.ranks[123_456_788:123_456_791] == ((), mine, ())

    def fails(rank):
        raise ValueError("wrong")

    with pytest.raises(RankError, match="rank 5 of 1000000000 raised ValueError: wrong"):
        dry.run(fails, rank=5)
    with pytest.raises(ValueError, match=r"ranks \[7\] wait"):
        dry.run(lambda rank: rank.comm().barrier(), rank=7)
        dry.trace.steps  # noqa: B018


@pytest.mark.parametrize("name", ["scatter", "all_to_all", "gather"])
def test_messages_one_by_one_to_a_billion_ranks_are_refused(name):
    with pytest.raises(RankError, match="each of 1,000,000,000 ranks .*: use 16,384 at most"):
        World(10**9, engine="dry").run(
            lambda rank: getattr(rank.comm(), name)(torch.ones(10**9, 1))
        )


def test_messages_are_booked_one_by_one():
    def program(rank):
        comm, x = rank.comm("dp"), torch.ones(3)
        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        work = comm.isend(x, right)
        got = comm.recv(torch.empty(3), left)
        work.wait()
        with comm.record("named"):
            comm.send_recv(x, right, got, left)
            comm.all_reduce(x, async_op=True)

    threads, dry = World(3), World(3, engine="dry")
    threads.run(program)
    for r in range(3):
        dry.run(program, rank=r)
        assert lines(dry.ledger) == lines(threads.ledger.only(rank=r))
        first = [events[:3] for events in (dry.trace.ranks[r], threads.trace.ranks[r])]
        assert first[0] == first[1]


def test_a_ring_is_booked_with_the_numbers_that_its_ranks_have_in_the_world():
    def program(rank):
        for axis in ("dp", "tp"):
            rank.comm(axis).all_reduce(torch.ones(6))

    mesh = Mesh(dp=2, tp=3)
    threads, dry = World(mesh), World(mesh, engine="dry")
    threads.run(program)
    for r in range(6):
        dry.run(program, rank=r)
        peers = [{(e.to, e.source) for e in w.trace.ranks[r]} for w in (threads, dry)]
        assert peers[0] == peers[1]


def test_a_trace_of_one_rank_has_no_steps():
    dry = World(4, engine="dry")
    dry.run(lambda rank: rank.comm().all_reduce(torch.ones(4)))
    assert len(dry.trace.ranks) == 4 and not any(dry.trace.ranks[1:])
    with pytest.raises(ValueError, match="for a message that nobody sends"):
        dry.trace.steps  # noqa: B018


def test_axes_of_a_mesh_of_16384_ranks():
    mesh = Mesh(dp=128, tp=8, pp=16)
    dry = World(mesh, engine="dry")

    def program(rank):
        for axis in ("dp", "tp", "pp"):
            comm = rank.comm(axis)
            comm.all_gather(torch.ones(2))
        return rank.rank, rank.coords

    assert dry.run(program, rank=11_111) == (11_111, mesh.coords(11_111))
    assert dry.ledger.by("axis") == {"dp": 8 * 127, "tp": 8 * 7, "pp": 8 * 15}


def test_a_ring_over_16384_ranks_takes_no_16384_steps():
    dry = World(Mesh(dp=16_384), engine="dry")

    def program(rank):
        x, comm = torch.ones(2**26 + 3), rank.comm("dp")
        comm.all_reduce(x, out=x)  # the first call is slower: torch gets ready
        start = time.thread_time()
        comm.all_reduce(x, out=x)
        return time.thread_time() - start

    assert dry.run(program, rank=5) < 0.5
    assert dry.ledger.count == 4 * 16_383


# ── what is held ──────────────────────────────────────────────────────────────────────────────────


def trained(rank, level, optimizer=torch.optim.AdamW, **options):
    """The history of a second step, on ranks that begin with other weights and other tokens."""
    torch.manual_seed(rank.rank)
    comm, model = rank.comm("dp"), GPT(TINY, **options)
    x, y = torch.randint(64, (2, 2, 16), generator=rank.generator)
    net = model
    if level == 0:
        net = data_parallel.replicate(model, comm)
        owner = inner = optimizer(model.parameters())
    else:
        owner, inner = owned(model, comm, level, optimizer)

    def step():
        F.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        owner.step()
        owner.zero_grad()

    step()
    history = measure.history(step, model, inner)
    states = measure.model_states(model, inner)
    return (
        {phase: moment.ledger for phase, moment in history.phases.items()},
        history.peak.event,
        states.total,
    )


def owned(model, comm, level, optimizer):
    """What steps, and the torch optimizer in it."""
    if level == 3:
        inner = optimizer(zero.shard(model, comm).parameters())
        return inner, inner
    owner = zero.Optimizer(model.parameters(), comm, optimizer, level=level)
    return owner, owner.inner


@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("n", [2, 3])
def test_a_step_holds_and_sends_the_same_dry_on_threads_and_on_processes(level, n, several):
    threads, dry = World(n), World(n, engine="dry")
    results, processes = threads.run(trained, level), several(n)
    assert processes.run(trained, level) == results
    assert lines(processes.ledger) == lines(threads.ledger)
    for r in range(n):
        assert dry.run(trained, level, rank=r) == results[r]
        assert lines(dry.ledger) == lines(threads.ledger.only(rank=r))


@pytest.fixture(scope="module")
def several():
    """A world of processes of each size, kept warm."""
    worlds = {}

    def of(n):
        if n not in worlds:
            worlds[n] = World(n, engine="processes")
        return worlds[n]

    yield of
    for world in worlds.values():
        world.close()


# ── what runs ─────────────────────────────────────────────────────────────────────────────────────


def one_step(rank, kind):
    """A step of each kind that the labs train with; what it returns is compared with a real run."""
    torch.manual_seed(0)
    config = TINY if kind != "dropout" else ModelConfig(**vars(TINY) | {"dropout": 0.1})
    model = GPT(config, attention="sdpa" if kind == "sdpa" else "plain")
    settings = {"foreach": dict(foreach=True), "fused": dict(fused=True)}.get(kind, {})
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    if kind in ("full", "selective"):
        checkpointing.apply(model, kind)
    x, y = torch.randint(64, (2, 4, 16), generator=rank.generator)
    scaler = precision.LossScaler(2.0**8) if kind == "scaled" else None

    def step():
        if kind == "accumulated":
            batch = [(x[:2], y[:2]), (x[2:], y[2:])]
            accumulation.accumulate(lambda part: model.loss(*part), batch)
            optimizer.step()
        elif kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                loss = model.loss(x, y)
            loss.backward()
            optimizer.step()
        elif kind == "scaled":
            scaler.scale(model.loss(x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            model.loss(x, y).backward()
            if kind == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
        optimizer.zero_grad()

    step()
    return measure.history(step, model, optimizer)


KINDS = (
    "loop", "foreach", "fused", "sdpa", "dropout", "full", "selective", "autocast", "accumulated",
    "clipped", "scaled",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_moment_of_a_step_is_that_of_a_real_step(kind):
    assume = {bool: True, float: 0.0, int: 1}
    dry = World(1, engine="dry", assume=assume).run(one_step, kind)
    assert dry == World(1).run(one_step, kind)[0]


def test_runs_share_tensors_and_take_real_ones_as_arguments():
    dry = World(2, engine="dry")
    made = dry.run(lambda rank: torch.ones(3))
    total = dry.run(lambda rank, x, more: (x + more["y"]).shape, made, {"y": torch.ones(4, 3)})
    assert total == (4, 3)
    assert dry.run(lambda rank: rank.comm().all_reduce(made).shape, rank=1) == (3,)


# ── values ────────────────────────────────────────────────────────────────────────────────────────


ASKING = {
    "if x.sum() > 1": lambda x: 1 if x.sum() > 1 else 0,
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.long().tolist(),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
}


@pytest.mark.parametrize("asking", ASKING)
def test_who_asks_for_a_value_is_told_where_and_what_to_do(asking):
    with pytest.raises(
        RankError, match=r"test_world_dry.py, line \d+.*assume=\{(bool|float|int): "
    ):
        World(4, engine="dry").run(lambda rank: ASKING[asking](torch.ones(4)), rank=2)


def test_a_shape_that_depends_on_values_is_an_error():
    with pytest.raises(RankError, match=r"rank 0 of 4 .*unique.* whatever the values"):
        World(4, engine="dry").run(lambda rank: torch.ones(4).unique())


def test_what_is_assumed_is_answered():
    assume = {bool: False, float: 2.5, int: lambda x: x.numel() // 2}
    dry = World(1, engine="dry", assume=assume)
    x = torch.ones(8)
    answers = {name: dry.run(lambda rank, x, ask=ask: ask(x), x) for name, ask in ASKING.items()}
    assert answers["if x.sum() > 1"] == 0 and answers["item"] == 2.5
    assert answers["equal"] is False and answers["allclose"] is False
    assert answers["nonzero"].shape == (4, 1) and answers["where"][0].shape == (4,)
    assert dry.run(lambda rank: torch.tensor(3.0).item()) == 3.0  # a constant is known


def test_what_happens_again_has_a_result_of_its_own():
    """Of the same sizes, it is like the first one; memory, formats and views are its own."""

    def program(rank):
        x, y = torch.zeros(4, 4, dtype=torch.long), torch.ones(4, 4, dtype=torch.long)
        found = []
        for _ in range(2):
            made = [x + 1, x + 1.0, x + True, x.t() + 1, x[:, :3].contiguous(), x.contiguous()]
            made += [x.mul_(2), x.new_empty(3), x.new_empty(3, dtype=torch.half), x[0], x[None]]
            found += [(z.shape, z.stride(), z.dtype, z.untyped_storage().nbytes()) for z in made]
            made += [x, y]
            storages = [z.untyped_storage()._cdata for z in made]
            found.append([storages.index(each) for each in storages])
        return found

    dry, real = World(1, engine="dry").run(program), World(1).run(program)[0]
    assert dry == real and dry[:12] == dry[12:]


def test_a_balanced_mixture_of_experts_keeps_what_any_routing_keeps():
    config = ModelConfig(**vars(TINY) | {"num_experts": 4, "top_k": 2})

    def program(rank):
        torch.manual_seed(rank.rank)
        model = GPT(config)
        x, y = torch.randint(64, (2, 2, 16), generator=rank.generator)
        return measure.saved_activations(lambda: model.loss(x, y), model).total

    chosen = 2 * 2 * 16 // 4  # k experts for each token, E of them
    dry = World(2, engine="dry", assume={int: chosen})
    assert [dry.run(program, rank=r) for r in (0, 1)] == World(2).run(program)


# ── what goes wrong ───────────────────────────────────────────────────────────────────────────────


def test_bad_input_is_refused():
    dry = World(4, engine="dry")
    with pytest.raises(ValueError, match=r"rank=4 is none of 4: use 0 … 3"):
        dry.run(lambda rank: None, rank=4)
    with pytest.raises(ValueError, match="rank must be at least 0, got -1"):
        dry.run(lambda rank: None, rank=-1)
    with pytest.raises(TypeError, match="rank must be a whole number"):
        dry.run(lambda rank: None, rank=1.0)
    with pytest.raises(ValueError, match="on threads all ranks run: leave rank=1 out"):
        World(4).run(lambda rank: None, rank=1)
    with pytest.raises(ValueError, match="on threads tensors have values"):
        World(4, assume={bool: True})
    with pytest.raises(TypeError, match="assume"):
        World(4, engine="dry", assume={"bool": True})
    with pytest.raises(TypeError, match=r"assume says what to answer .* \{bool: True.*: got 5"):
        World(4, engine="dry", assume=5)
    with pytest.raises(RankError, match="neither threads nor a dry run have a ProcessGroup"):
        dry.run(lambda rank: rank.comm().group)


def test_an_error_of_the_rank_is_raised_here_and_the_next_run_works():
    def fails(rank):
        raise ValueError("wrong")

    dry = World(8, engine="dry")
    with pytest.raises(RankError, match="rank 3 of 8 raised ValueError: wrong") as caught:
        dry.run(fails, rank=3)
    assert caught.value.rank == 3 and "in fails" in caught.value.traceback
    assert dry.run(lambda rank: rank.rank, rank=3) == 3


@pytest.mark.parametrize("use", [lambda x: torch.ones(3) + x, lambda x: x.view(3, 1), torch.t])
def test_a_real_tensor_from_outside_is_told_how_to_come_in(use):
    outside = torch.ones(3)
    with pytest.raises(
        RankError, match=r"real tensor, float32\[3\].*pass it as an argument of run"
    ):
        World(2, engine="dry").run(lambda rank: use(outside))


def test_ranks_have_random_numbers_of_their_own():
    def program(rank):
        return torch.randn(3, generator=rank.generator).shape, rank.generator.initial_seed()

    assert World(9, engine="dry").run(program, rank=7) == ((3,), 7)
    assert math.prod(World(9, engine="dry").run(program)[0]) == 3
