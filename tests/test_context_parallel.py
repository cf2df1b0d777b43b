"""Context parallelism: attention over ranks equals attention in one place, and so does training; sent, kept and computed as the formulas say."""

import functools
import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import adamw, build, steps

from labutils import context_parallel, data_parallel, flash, measure, precision, predict
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.context_parallel import attention as over_ranks
from labutils.ledger import Ledger, Line
from labutils.model import GPT, attend_plain
from labutils.world import RankError, World
from labutils.world.messages import Work

SIZES = dict(num_layers=1, d_model=12, num_heads=12, d_head=2, d_ff=12, vocab_size=24, seq_len=24)
LLAMA_STYLE = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
GPT2 = ModelConfig(**SIZES)
LLAMA = ModelConfig(**SIZES | LLAMA_STYLE | dict(num_layers=2), num_kv_heads=2)
ROWS = tuple(
    torch.randint(24, (2, 24), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
)
ROWS[1][0, 3:7] = -100  # targets that count for nothing, on some ranks
ROWS[1][1, 20] = -100
ATTENTION = {
    "ring": context_parallel.ring_attention,
    "ulysses": context_parallel.ulysses_attention,
}
each_kind = pytest.mark.parametrize("kind", ["contiguous", "zigzag"])
each_way = pytest.mark.parametrize("way", list(ATTENTION))


@functools.cache
def ranks(n):
    return World(Mesh(cp=n))


@pytest.fixture(scope="module")
def three_processes():
    with World(Mesh(cp=3), engine="processes") as world:
        yield world


# ── who has what, and what it has to do ────────────────────────────────────────────────────────────────────────────

layouts = st.builds(
    lambda n, c, kind: context_parallel.layout(2 * n * c, n, kind),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from(["contiguous", "zigzag"]),
)


@given(layouts)
def test_each_token_is_on_one_rank_and_comes_back(whole):
    where = [whole.positions(rank) for rank in range(whole.n)]
    assert sorted(itertools.chain(*where)) == list(range(whole.s))
    assert {len(positions) for positions in where} == {whole.s // whole.n}
    x = torch.arange(3 * whole.s).view(3, whole.s)
    shares = [whole.split(x, rank) for rank in range(whole.n)]
    assert all(torch.equal(part, x[:, list(at)]) for part, at in zip(shares, where, strict=True))
    assert torch.equal(whole.join(shares), x)


@given(layouts)
def test_tiles_are_the_pairs_that_the_mask_leaves(whole):
    """Counted pair by pair, from the positions alone."""
    for rank in range(whole.n):
        queries = whole.positions(rank)
        for step, pairs in enumerate(whole.met(rank)):
            keys = whole.positions((rank - step) % whole.n)
            assert pairs == sum(j <= i for i in queries for j in keys)
            for tile in whole.tiles(rank, (rank - step) % whole.n):
                rows, columns = queries[tile.rows], keys[tile.columns]
                seen = [
                    [j <= i + tile.offset for j in range(len(columns))] for i in range(len(rows))
                ]
                assert seen == [[key <= query for key in columns] for query in rows]
                assert tile.pairs == sum(map(sum, seen)) > 0, "an empty tile is computed"


@given(layouts)
def test_work_is_what_the_formula_says(whole):
    work = [whole.work(rank) for rank in range(whole.n)]
    assert work == [sum(whole.met(rank)) for rank in range(whole.n)]
    assert sum(work) == whole.s * (whole.s + 1) // 2
    c, n = whole.chunk, whole.n
    worst = Fraction(max(work) * n, sum(work))
    assert worst == (Fraction((2 * n - 1) * c + 1, n * c + 1) if whole.kind == "contiguous" else 1)


def test_the_imbalance_nears_twice_the_average():
    """Whole chunks, the diagonal half (Ultra-Scale Playbook, P = 4): 1, 3, 5 and 7; and 4 each."""
    c = 10**6
    for kind, expected in (("contiguous", [1, 3, 5, 7]), ("zigzag", [4, 4, 4, 4])):
        whole = context_parallel.layout(4 * c, 4, kind)
        assert [round(2 * whole.work(rank) / c**2, 4) for rank in range(4)] == expected


def ring_time(tokens, n, bandwidth, latency=0.0, **how):
    """A layer of 2 heads and 1 key–value head, 3 wide: a pair of query and key takes 1 s."""
    sizes = dict(num_layers=1, d_model=6, num_heads=2, num_kv_heads=1, d_ff=1, vocab_size=2)
    model, link = ModelConfig(**sizes, seq_len=n * tokens), Link(latency, bandwidth)
    return context_parallel.ring_timeline(model, n, flops=24.0, link=link, **how)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_the_ring_hides_from_the_tokens_on_that_the_formula_says(n):
    """T = e·(g/a)·F/bw: at 24 FLOP/s and bw = 24/T of these bytes."""
    tokens = 8
    work = context_parallel.layout(n * tokens, n).work(0)
    assert ring_time(tokens, n, 24 / tokens).makespan == work
    assert context_parallel.least_tokens(24.0, 24 / tokens, groups=1 / 2) == tokens
    slow = ring_time(tokens, n, 12 / tokens)
    steps = context_parallel.layout(n * tokens, n).met(0)
    assert slow.makespan == (n - 1) * tokens**2 + steps[-1]
    after = ring_time(tokens, n, 24 / tokens, overlap=False).makespan
    assert after == work + (n - 1) * tokens**2 / 2


def test_a_contiguous_ring_takes_as_long_as_its_last_rank():
    last = context_parallel.layout(32, 4, "contiguous").work(3)
    assert ring_time(8, 4, 1e9, kind="contiguous").makespan == pytest.approx(last)
    assert ring_time(8, 4, 1e9, 100.0).makespan == pytest.approx(300 + 32)


def test_a_message_waits_for_its_receiver():
    """Contiguous: rank 0 has nothing to compute after its own keys, but rank 1 has, until 36 + 64."""
    spans = ring_time(8, 4, 1e9, kind="contiguous").spans
    third = {span.rank: span.start for span in spans if span.name == "keys 3"}
    assert third[0] == pytest.approx(100)
    assert max(s.end for s in spans if s.rank == 0 and s.kind == "forward") == 36


@given(layouts)
def test_the_grid_says_who_meets_whom_when(whole):
    grid = whole.grid()
    assert set(grid) == {(i, j) for i in range(whole.s // whole.chunk) for j in range(i + 1)}
    for (query, key), (rank, step) in grid.items():
        assert query in whole.numbers(rank) and key in whole.numbers((rank - step) % whole.n)


# ── attention ──────────────────────────────────────────────────────────────────────────────────────────────────────


def drawn(a, g, s, dtype=torch.float64, d=4):
    """q, k, v and a gradient of the output; scores are large, so that a merge must rescale."""
    draw = torch.Generator().manual_seed(a * 100 + g * 10 + s)
    sizes = [(2, heads, s, d) for heads in (a, g, g, a)]
    return [3 * torch.randn(size, generator=draw, dtype=torch.float64).to(dtype) for size in sizes]


@functools.cache
def in_one_place(a, g, s):
    *qkv, d_out = drawn(a, g, s)
    leaves = [x.requires_grad_() for x in qkv]
    out = attend_plain(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def on_ranks(rank, way, kind, a, g, s, dtype=torch.float64, block=None):
    """Output and gradients of this rank's tokens, from q, k, v that are laid out as a model has them."""
    comm = rank.comm("cp")
    whole = context_parallel.layout(s, comm.size, kind)
    *qkv, d_out = (whole.split(x, comm.rank, 2) for x in drawn(a, g, s, dtype))
    leaves = [x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv]
    out = ATTENTION[way](*leaves, comm, kind, block)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def assert_equal(results, kind, a, g, s):
    whole = context_parallel.layout(s, len(results), kind)
    for name, shares, expected in zip(
        ("out", "dq", "dk", "dv"), zip(*results, strict=True), in_one_place(a, g, s), strict=True
    ):
        found = whole.join(shares, dim=2)
        assert torch.allclose(found, expected, rtol=1e-10, atol=1e-10), name


CASES = [
    *[("ring", n, 4, 2) for n in (1, 2, 3, 4)],
    ("ring", 2, 3, 1),
    ("ring", 3, 2, 2),
    ("ulysses", 1, 4, 2),  # as many heads for each
    ("ulysses", 2, 4, 2),  # a key–value head for each rank
    ("ulysses", 2, 8, 4),
    ("ulysses", 3, 3, 3),
    ("ulysses", 4, 8, 2),  # one for two ranks
    ("ulysses", 4, 4, 1),  # one for all
]


@each_kind
@pytest.mark.parametrize("way, n, a, g", CASES)
def test_attention_over_ranks_equals_attention_in_one_place(way, n, a, g, kind):
    s = 24
    assert_equal(ranks(n).run(on_ranks, way, kind, a, g, s), kind, a, g, s)


@pytest.fixture
def sides(monkeypatch):
    """The longest side of each tile of scores, forward and backward, as they are computed."""
    found, masked = set(), flash.algorithms.Problem._masked

    def seen(self, scores, at):
        found.add(max(block.stop - block.start for block in at))
        return masked(self, scores, at)

    monkeypatch.setattr(flash.algorithms.Problem, "_masked", seen)
    return found


@each_way
def test_a_tile_may_be_cut_into_blocks(way, sides):
    results = ranks(3).run(on_ranks, way, "zigzag", 3, 3, 24, block=3)
    assert_equal(results, "zigzag", 3, 3, 24)
    assert max(sides) == 3


@each_way
def test_so_may_those_of_a_model(way, sides):
    ranks(4).run(trained, GPT2, attention=way, block=2)
    assert max(sides) == 2


@each_way
def test_chunks_of_one_token(way):
    assert_equal(ranks(4).run(on_ranks, way, "zigzag", 4, 4, 8), "zigzag", 4, 4, 8)


@each_kind
@each_way
def test_processes_do_the_same(three_processes, way, kind):
    results = three_processes.run(on_ranks, way, kind, 6, 3, 24)
    assert_equal(results, kind, 6, 3, 24)


@each_way
def test_half_precision_stays_close(way):
    results = ranks(4).run(on_ranks, way, "zigzag", 4, 2, 24, torch.bfloat16)
    whole = context_parallel.layout(24, 4, "zigzag")
    *qkv, d_out = (x.double() for x in drawn(4, 2, 24, torch.bfloat16))
    leaves = [x.requires_grad_() for x in qkv]
    out = attend_plain(*leaves)
    expected = [out.detach(), *torch.autograd.grad(out, leaves, d_out)]
    for shares, right in zip(zip(*results, strict=True), expected, strict=True):
        found = whole.join(shares, dim=2)
        assert found.dtype == torch.bfloat16
        assert (found.double() - right).norm() < 2**-6 * right.norm()


def watched(rank, kind, monkeypatch):
    """Of each tile that is computed in a dry run: how many messages had begun, how many of them the
    rank had waited for, and its pairs."""
    seen, comm, attention, backward = [], rank.comm("cp"), flash.attention, flash.backward_of_keys
    waited, wait = [], Work.wait

    def awaited(work):
        waited.append(work)
        return wait(work)

    def note(tile):
        seen.append((len(comm._events), len(waited), tile.pairs))

    def forward_tile(q, k, v, *, causal, offset, **blocks):
        rows, columns = slice(0, q.shape[2]), slice(0, k.shape[2])
        note(context_parallel.Tile(rows, columns, offset))
        return attention(q, k, v, causal=causal, offset=offset, **blocks)

    def backward_tile(memory, problem):
        note(context_parallel.Tile(*problem.tiling.whole, problem.tiling.offset))
        return backward(memory, problem)

    monkeypatch.setattr(flash, "attention", forward_tile)
    monkeypatch.setattr(flash, "backward_of_keys", backward_tile)
    monkeypatch.setattr(Work, "wait", awaited)
    q, k, v = torch.randn(3, 1, 2, 8, 4, requires_grad=True).unbind()
    out = context_parallel.ring_attention(q, k, v, comm, kind)
    forward, seen[:], waited[:] = list(seen), [], []
    out.sum().backward()
    return forward, seen


@each_kind
@pytest.mark.parametrize("rank", [1, 3])
def test_the_next_keys_travel_while_a_rank_computes_what_the_mask_leaves(rank, kind, monkeypatch):
    with World(Mesh(cp=4), engine="dry") as dry:
        forward, backward = dry.run(watched, kind, monkeypatch, rank=rank)
    whole = context_parallel.layout(32, 4, kind)
    tiles = [
        (step, tile.pairs) for step in range(4) for tile in whole.tiles(rank, (rank - step) % 4)
    ]
    # A send and a receive at the beginning of every step but the last; each is waited for when the
    # tiles of its step are done.
    assert forward == [(min(2 * (step + 1), 6), 2 * step, pairs) for step, pairs in tiles]
    assert sum(pairs for *_, pairs in forward) == whole.work(rank)
    # Sums of gradients follow one step behind, and are waited for one step later still.
    assert backward == [
        (6 + begun + 2 * max(step - 1, 0), waits + 2 * max(step - 2, 0), pairs)
        for (step, _), (begun, waits, pairs) in zip(tiles, forward, strict=True)
    ]


def mean_of_values(rank):
    """Alike scores, so that the output of a row is the mean of the values that it sees: one a tile."""
    comm = rank.comm("cp")
    v = values_to_average()[:, :, comm.rank : comm.rank + 1]
    q = torch.zeros_like(v)
    return context_parallel.ring_attention(q, q, v, comm, "contiguous")


def values_to_average():
    return torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_half_precision_outputs_are_rounded_once():
    """With one key to a tile a tile's own output is exact, and what is left is the sum of tiles."""
    found = torch.cat(ranks(8).run(mean_of_values), 2)
    right = values_to_average().double().cumsum(2) / torch.arange(1, 9)[:, None]
    assert ((found - right).abs() <= (2**-8 + 2**-20) * right.abs()).all()  # half a place


def test_losses_that_are_too_many_for_fp16_have_a_mean():
    """128 targets of a rank, of 1,000 nats each, add up beyond 65,504."""

    def program(rank):
        logits = torch.tensor([0.0] * 7 + [1000.0], dtype=torch.float16).expand(1, 128, 8)
        targets = torch.zeros(1, 256, dtype=torch.long)
        return context_parallel.mean_loss(logits, targets, rank.comm("cp")).item()

    assert ranks(2).run(program) == [1000.0] * 2


# ── a model ────────────────────────────────────────────────────────────────────────────────────────────────────────


def trained(rank, config, s=24, **how):
    """Losses and weights of replicas over dp and cp, each of whose ranks began with other weights."""
    model = build(config, rank.rank)
    assert context_parallel.distribute(model, rank.comm("cp"), **how) is model
    replica = data_parallel.replicate(model, rank.comm("dp", "cp"))
    rows = [side[rank.coords["dp"] :: rank.mesh.dp, :s] for side in ROWS]

    def loss(tokens, targets):
        logits = replica(tokens)
        kind = how.get("kind", "zigzag")
        return context_parallel.mean_loss(logits, targets, rank.comm("cp"), kind)

    losses, _, found = steps(model, adamw(model), *rows, loss=loss)
    return losses, found


@functools.cache
def alone(config, s=24, dp=1):
    """The mean over dp of the losses, which is what replicas descend."""
    model = build(config, 0)

    def loss(tokens, targets):
        sides = [(tokens[i::dp], targets[i::dp]) for i in range(dp)]
        return sum(model.loss(*side) for side in sides) / dp

    rows = (side[:, :s] for side in ROWS)
    losses, _, found = steps(model, adamw(model), *rows, loss=loss)
    return losses, found


def assert_trained(results, expected, dp=1):
    losses = [
        sum(of) / dp
        for of in zip(*(result[0] for result in results[:: len(results) // dp]), strict=True)
    ]
    assert losses == pytest.approx(expected[0], rel=1e-10, abs=1e-10)
    for _, found in results:
        assert found.keys() == expected[1].keys()
        for name, whole in expected[1].items():
            assert torch.allclose(found[name], whole, rtol=1e-10, atol=1e-10), name


MODELS = [
    ("llama", 2, "ring", "zigzag"),
    ("llama", 3, "ring", "contiguous"),
    ("gpt2", 1, "ring", "zigzag"),
    ("gpt2", 4, "ring", "zigzag"),
    ("gpt2", 4, "ulysses", "contiguous"),
    ("llama", 4, "ulysses", "zigzag"),
]


@pytest.mark.parametrize("name, n, attention, kind", MODELS)
def test_training_equals_the_plain_model(name, n, attention, kind):
    config = {"gpt2": GPT2, "llama": LLAMA}[name]
    results = ranks(n).run(trained, config, attention=attention, kind=kind)
    assert_trained(results, alone(config))
    assert len({tuple(losses) for losses, _ in results}) == 1, "every rank has the whole loss"


@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["learned", "rope"])
def test_a_sequence_may_be_shorter_than_the_longest(config):
    assert_trained(ranks(2).run(trained, config, s=12), alone(config, s=12))


@pytest.mark.parametrize("kind", ["zigzag"])
def test_gradients_are_reduced_over_dp_and_cp(kind):
    with World(Mesh(dp=2, cp=2)) as grid:
        assert_trained(grid.run(trained, LLAMA, kind=kind), alone(LLAMA, dp=2), dp=2)


# ── what is sent and kept ──────────────────────────────────────────────────────────────────────────────────────────


def one_pass(rank, config, dtype, attention, kind):
    torch.set_default_dtype(dtype)
    try:
        model = GPT(config)
        context_parallel.distribute(model, rank.comm("cp"), attention=attention, kind=kind)
        tokens = torch.zeros(2, 24, dtype=torch.long)
        model.loss(tokens, tokens).backward()
    finally:
        torch.set_default_dtype(torch.float32)


def counts(ledger):
    return {line.key: line.count for line in ledger}


def plan(way="ring", kind="contiguous", precision="fp32"):
    options = dict(micro_batch=2, global_batch=2, precision=precision)
    return TrainConfig(attention=way, layout=kind, **options)


def by_attention(config, train, n):
    """What attention of each rank is predicted to send in a step."""
    mesh = Mesh(cp=n)
    each = (line for rank in range(n) for line in predict.sent(config, train, mesh, rank))
    return Ledger(line for line in each if line.axis == "cp")


def told(ledger):
    """What attention sent: the loss is one number."""
    return Ledger(line for line in ledger if line.name != "loss")


SENT = [
    ("ring", 3, "contiguous", 12),
    ("ring", 4, "zigzag", 3),
    ("ulysses", 2, "zigzag", 2),
    ("ulysses", 3, "contiguous", 12),
    ("ulysses", 4, "contiguous", 1),
]


@pytest.mark.parametrize("way, n, kind, g", SENT)
def test_sent_formula_dry_and_real_are_one(way, n, kind, g):
    config = replace(GPT2, num_kv_heads=g)
    predicted = by_attention(config, plan(way, kind), n)
    ranks(n).run(one_pass, config, torch.float32, way, kind)
    assert predicted.diff(told(ranks(n).ledger)).unexplained == 0
    assert counts(predicted) == counts(told(ranks(n).ledger))
    with World(Mesh(cp=n), engine="dry") as dry:
        dry.run(one_pass, config, torch.float32, way, kind, rank=n - 1)
    assert predicted.only(rank=n - 1).diff(told(dry.ledger)).unexplained == 0


@each_way
def test_sent_on_processes(three_processes, way):
    three_processes.run(one_pass, GPT2, torch.float32, way, "zigzag")
    predicted = by_attention(GPT2, plan(way), 3)
    assert predicted.diff(told(three_processes.ledger)).unexplained == 0


def test_half_precision_sends_sums_of_gradients_in_fp32():
    with World(Mesh(cp=2), engine="dry") as dry:
        dry.run(one_pass, GPT2, torch.bfloat16, "ring", "contiguous")
    predicted = by_attention(GPT2, plan(precision="bf16"), 2).only(rank=0)
    assert predicted.diff(told(dry.ledger)).unexplained == 0
    shares = predicted.by("name")
    assert shares["ring backward"] == 3 * shares["ring forward"]


def saved(rank, way, kind, a, g, s):
    """Bytes that autograd keeps of q, k, v and whatever is made of them."""
    comm, storages = rank.comm("cp"), {}

    def keep(x):
        storages[x.untyped_storage()._cdata] = x.untyped_storage().nbytes()
        return x

    q, k, v = (torch.randn(2, heads, s // comm.size, 4, requires_grad=True) for heads in (a, g, g))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = ATTENTION[way](q, k, v, comm, kind)
    del out
    return sum(storages.values())


@each_kind
def test_what_is_kept_is_a_share_of_the_tokens(kind):
    a, g, s, d = 4, 2, 64, 4
    for n in (1, 2, 4):
        per_token = 2 * (2 * a * d + 2 * g * d + a) * 4
        assert ranks(n).run(saved, "ring", kind, a, g, s) == [per_token * s // n] * n
    half = 2 * (2 * a * d + 2 * g * d + a) * 4 // 2  # of two ranks, heads shared out
    assert ranks(2).run(saved, "ulysses", kind, a, g, s) == [half * s] * 2


def passed(rank, config, way):
    """What autograd keeps of a pass of the whole model."""
    how = {"attention": way, "kind": "contiguous"}
    model = context_parallel.distribute(GPT(config), rank.comm("cp"), **how)
    tokens = torch.zeros(2, 24, dtype=torch.long)
    return measure.saved_activations(lambda: model.loss(tokens, tokens.clone()), model)


@pytest.mark.parametrize("config, n", [(LLAMA, 3), (LLAMA, 1), (GPT2, 2)])
def test_kept_formula_and_real_are_one(config, n):
    own = 8 * 2 * 24 // n  # bytes of a rank's tokens, and of its targets
    batch = Ledger(Line(at, own, "activations") for at in ("tokens", "outside"))
    predicted = predict.activations(config, plan(), Mesh(cp=n)) + batch
    for real in ranks(n).run(passed, config, "ring"):
        assert predicted.diff(real, by="name").unexplained == 0, predicted.diff(real, by="name")


# ── what cannot be ─────────────────────────────────────────────────────────────────────────────────────────────────


def heads(a, g, n=4, **how):
    config = ModelConfig(**SIZES | dict(num_heads=a), num_kv_heads=g)
    return lambda: ranks(n).run(
        lambda rank: context_parallel.distribute(GPT(config), rank.comm("cp"), **how)
    )


def called(tokens, queries=4, n=2):
    def program(rank):
        q, k = torch.zeros(1, 2, queries, 4), torch.zeros(1, 2, tokens, 4)
        if queries != tokens:  # tests check shapes before the function itself does
            return over_ranks._laid_out(q, k, rank.comm("cp"), "zigzag")
        return context_parallel.ring_attention(q, k, k, rank.comm("cp"), "zigzag")

    return lambda: ranks(n).run(program)


def twice(rank):
    comm = rank.comm("cp")
    return context_parallel.distribute(context_parallel.distribute(GPT(GPT2), comm), comm)


def too_long(rank):
    model = context_parallel.distribute(GPT(GPT2), rank.comm("cp"))
    return model(torch.zeros(1, 48, dtype=torch.long))


BAD = [
    (
        lambda: context_parallel.layout(18, 4),
        "18 tokens are not 8 equal chunks (zigzag, cp=4): cut it to 16 tokens or pad it to 24",
    ),
    (lambda: context_parallel.layout(4, 4), "pad it to 8"),
    (
        lambda: context_parallel.layout(8, 4, "striped"),
        "no layout 'striped': there are contiguous, zigzag",
    ),
    (lambda: context_parallel.layout(0, 4), "s must be at least 1, got 0"),
    (lambda: context_parallel.layout(8, 4).positions(4), "rank 4 has no tokens: use 0 … 3"),
    (
        lambda: context_parallel.layout(8, 4).split(torch.zeros(1, 4), 0),
        "layout of s=8 tokens, got 4 tokens along dim 1",
    ),
    (
        lambda: context_parallel.layout(8, 4).join([torch.zeros(1, 2)] * 3),
        "there are 4 shares, got 3",
    ),
    (called(5, 5), "10 tokens are not 4 equal chunks"),
    (called(6), "4 queries and 6 keys"),
    (
        heads(6, 6, attention="ulysses"),
        "cp=4 does not share out 6 heads and 6 key–value heads: use ring attention",
    ),
    (heads(12, 6, attention="ulysses"), "cp=4 does not share out 12 heads and 6"),
    (heads(12, 6, attention="flash"), "unknown attention over ranks 'flash'"),
    (heads(12, 6, kind="striped"), "no layout 'striped'"),
    (lambda: ranks(2).run(twice), "takes a whole labutils.model.GPT, got ContextGPT"),
    (lambda: ranks(2).run(too_long), "48 tokens do not fit seq_len=24"),
    (
        lambda: predict.sent(GPT2, plan(), Mesh(cp=5)),
        "24 tokens are not 5 equal chunks",
    ),
    (
        lambda: ranks(1).run(
            lambda rank: context_parallel.distribute(
                GPT(replace(GPT2, dropout=0.1)), rank.comm("cp")
            )
        ),
        "dropout=0.1 on distributed tokens: build the model with dropout=0",
    ),
]


@pytest.mark.parametrize("attempt, said", BAD)
def test_bad_input_is_named_with_its_remedy(attempt, said):
    with pytest.raises((ValueError, TypeError, RankError)) as error:
        attempt()
    assert said in str(error.value)


# ── autocast ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_autocast_goes_through_attention_over_ranks(kind):
    """In torch's region and in ours, to the same bits; the loss is in fp32, as on one device."""
    config = ModelConfig(num_layers=1, d_model=16, num_heads=2, d_ff=16, vocab_size=12, seq_len=8)
    x = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(0))

    def program(rank, ours):
        model = build(config, 0, torch.float32)
        if rank is not None:
            context_parallel.distribute(model, rank.comm("cp"), attention=kind)
        region = precision.autocast() if ours else torch.autocast("cpu", torch.bfloat16)
        with region:
            loss = model.loss(x, x)
        loss.backward()
        return loss.detach(), model.head.weight.grad, model.blocks[0].attention.query.weight.grad

    theirs, ours = (World(Mesh(cp=2)).run(program, own) for own in (False, True))
    whole = program(None, False)
    for one, other in zip(theirs, ours, strict=True):
        assert all(map(torch.equal, one, other))
        assert one[0].dtype == torch.float32 and one[0].item() == pytest.approx(
            whole[0].item(), rel=0.01
        )
    mean = (ours[0][2] + ours[1][2]) / 2
    assert (mean - whole[2]).norm() <= 0.05 * whole[2].norm()
