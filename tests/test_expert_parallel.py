"""Expert parallelism: equal to the dense evaluation of the same experts, sent and held as its formulas say, on threads, on processes and dry."""

import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from small_models import adamw, build, random_
from torch import nn

from labutils import data_parallel, expert_parallel, measure, predict, zero
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT, FeedForward, MixtureOfExperts
from labutils.teach import rigs
from labutils.world import RankError, World

SIZES = dict(num_layers=2, d_model=8, num_heads=2, vocab_size=16, seq_len=6)
GPT2 = ModelConfig(**SIZES | dict(num_layers=1), d_ff=6, num_experts=6, top_k=2, shared_expert=True)
MIXTRAL = ModelConfig(
    **SIZES, d_ff=5, num_experts=4, top_k=3, ffn="swiglu", norm="rmsnorm", positions="rope",
    bias=False, tied=False,
)  # fmt: skip
ROWS = 2  # sequences of a rank
TOKENS = ROWS * SIZES["seq_len"]
ALPHA = 0.1  # of the balance loss


@functools.cache
def ranks(dp, ep):
    return World(Mesh(dp=dp, ep=ep))


def batch(n):
    """The sequences of n ranks together."""
    generator = torch.Generator().manual_seed(n)
    return torch.randint(16, (n * ROWS, SIZES["seq_len"]), generator=generator)


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10)


# ── the dense evaluation: every expert sees every token ────────────────────────────────────────────────────────────


def gates(logits, k, score="softmax", room=None, bias=None):
    """[T, E] weights, most of them zero, and the balance loss: the definitions, token by token."""
    T, E = logits.shape
    scores = logits.exp() / logits.exp().sum(1, keepdim=True)
    if score == "sigmoid":
        scores = 1 / (1 + (-logits).exp())
    wanted = scores.detach() + (0 if bias is None else bias)
    chosen = [sorted(range(E), key=lambda e, row=row: -row[e])[:k] for row in wanted.tolist()]
    used, taken, asked = [0] * E, torch.zeros_like(wanted), torch.zeros_like(wanted)
    for choice in range(k):
        for token in range(T):
            expert = chosen[token][choice]
            asked[token, expert] = 1
            taken[token, expert] = room is None or used[expert] < room
            used[expert] += 1
    weights = scores * asked / (scores * asked).sum(1, keepdim=True)
    mean = (scores / scores.sum(1, keepdim=True)).mean(0)
    return weights * taken, E * (asked.sum(0) / (T * k) * mean).sum()


class Dense(nn.Module):
    """A mixture of experts as a sum over all of them; each of n groups of tokens is routed on its own."""

    def __init__(self, moe, n, **how):
        super().__init__()
        self.router, self.experts, self.shared, self.n = moe.router, moe.experts, moe.shared, n
        self.how = {"k": moe.top_k, **how}

    def forward(self, x):
        tokens = x.flatten(0, 1)
        parts = [gates(part, **self.how) for part in self.router(tokens).chunk(self.n)]
        weights = torch.cat([part for part, _ in parts])
        self.balance = sum(balance for _, balance in parts) / self.n
        out = sum(weights[:, i, None] * expert(tokens) for i, expert in enumerate(self.experts))
        return (out + self.shared(tokens)).view_as(x)


def steps(model, optimizer, x, reduce=None, balance=None, count=3, step_hook=None):
    """Losses, the last gradients and the weights."""
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model.loss(x, x)
        ((loss + ALPHA * balance(model)) if balance else loss).backward()
        losses.append(loss.item())
        if reduce:
            reduce(model)
        optimizer.step()
        if step_hook:
            step_hook(model)
    named = dict(model.named_parameters())
    return SimpleNamespace(
        losses=losses,
        gradients={name: p.grad.clone() for name, p in named.items() if p.grad is not None},
        weights={name: p.detach().clone() for name, p in named.items()},
    )


@functools.cache
def alone(config, n, frozen="", balance=False, **how):
    """One process with the tokens of n ranks; the model as it is unless the routing is another."""
    model = build(config, 0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    if how or balance:
        for block in model.blocks:
            block.feed_forward = Dense(block.feed_forward, n, **how)

    def of(model):
        return sum(block.feed_forward.balance for block in model.blocks)

    return steps(model, adamw(model), batch(n), balance=of if balance else None)


def mine(rank):
    return batch(rank.size).chunk(rank.size)[rank.rank]


def trained(rank, config, frozen="", balance=False, **how):
    """The same on ranks that begin elsewhere, with what each layer routed in each step."""
    model = build(config, rank.rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    dp, routed = rank.comm("dp"), []
    assert expert_parallel.spread_experts(model, rank.comm("ep"), replicas=dp, **how) is model

    def look(model):
        routed.extend(block.feed_forward.routing.counts.tolist() for block in model.blocks)

    result = steps(
        model,
        adamw(model),
        mine(rank),
        lambda model: expert_parallel.reduce_gradients(model, dp, rank.comm("edp")),
        expert_parallel.auxiliary_loss if balance else None,
        step_hook=look,
    )
    return SimpleNamespace(**vars(result), routed=routed)


def assert_equal(results, whole, config, ep):
    """Losses, gradients and weights; each rank has its experts alone, and all else."""
    losses = torch.tensor([result.losses for result in results], dtype=torch.float64).mean(0)
    assert close(losses, torch.tensor(whole.losses, dtype=torch.float64))
    each = config.num_experts // ep
    for rank, result in enumerate(results):
        others = set(range(config.num_experts)) - set(
            range(rank % ep * each, (rank % ep + 1) * each)
        )
        held = {name for name in whole.weights if not any(f"experts.{i}." in name for i in others)}
        assert result.weights.keys() == held
        assert result.gradients.keys() == held & whole.gradients.keys()
        for name in held:
            assert close(result.weights[name], whole.weights[name]), name
        for name in result.gradients:
            assert close(result.gradients[name], whole.gradients[name]), name


def plan(dp, precision="fp64", rows=ROWS, **how):
    options = dict(micro_batch=rows, global_batch=rows * dp, precision=precision, optimizer="adamw")
    return TrainConfig(**options, **how)


def in_a_pass(ledger):
    """Without the start, and what a step tells about its loss; gradients over whatever axes."""
    lines = (line for line in ledger if line.name not in ("broadcast", "targets", "loss"))
    whole = (replace(x, axis="") if x.name == "gradients" else x for x in lines)
    return Ledger(whole).merged()


def assert_sent(ledger, results, config, dp, ep):
    """Bytes and messages of every rank, with the tokens that went where, block of ep ranks by block."""
    for rank in range(dp):
        block = results[rank - rank % ep :][:ep]
        even = predict.sent(config, plan(dp), Mesh(dp=dp, ep=ep), rank)
        predicted = in_a_pass(even.only(name="gradients")).scaled(3)
        for step in range(3):
            layers = range(step * config.num_layers, (step + 1) * config.num_layers)
            counts = [[result.routed[i] for result in block] for i in layers]
            predicted += Ledger(
                replace(line, rank=rank)
                for line in expert_parallel.routed_sent(config, counts, itemsize=8, rank=rank % ep)
            )
        predicted, real = predicted.merged(), in_a_pass(ledger.only(rank=rank))
        assert predicted.diff(real).unexplained == 0, predicted.diff(real)
        assert {line.key: line.count for line in predicted} == {
            line.key: line.count for line in real
        }


CASES = [
    *((GPT2, n, n) for n in (1, 3)),
    (MIXTRAL, 4, 2),
    (GPT2, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(
    "config, dp, ep", CASES, ids=[f"{c.ffn} dp={d} ep={e}" for c, d, e in CASES]
)
def test_equal_to_the_plain_layer_and_sent_as_predicted(config, dp, ep):
    results = ranks(dp, ep).run(trained, config)
    assert_equal(results, alone(config, dp), config, ep)
    assert_sent(ranks(dp, ep).ledger, results, config, dp, ep)


HOW = {
    "sigmoid": dict(score="sigmoid"),
    "dropping": dict(capacity_factor=0.75),
    "both": dict(score="sigmoid", capacity_factor=1.0),
}


@pytest.mark.parametrize("kind, dp, ep", [("sigmoid", 2, 2), ("dropping", 3, 3), ("both", 4, 2)])
def test_equal_to_every_expert_on_every_token(kind, dp, ep):
    """Sigmoid scores, dropped tokens, the balance loss."""
    how = dict(HOW[kind])
    results = ranks(dp, ep).run(trained, GPT2, balance=True, **how)
    factor = how.pop("capacity_factor", None)
    if factor:
        how["room"] = expert_parallel.capacity(TOKENS, 6, 2, factor)
        dropped = TOKENS * 2 - torch.tensor([result.routed for result in results]).sum(-1)
        assert (dropped > 0).any(), "a test of dropping in which nothing is dropped"
    assert_equal(results, alone(GPT2, dp, balance=True, **how), GPT2, ep)
    assert_sent(ranks(dp, ep).ledger, results, GPT2, dp, ep)


@pytest.mark.parametrize("frozen", ["experts", "router"])
def test_frozen_parameters_stay_as_they_are(frozen):
    results = ranks(2, 2).run(trained, MIXTRAL, frozen)
    assert not any(frozen in name for name in results[0].gradients)
    assert_equal(results, alone(MIXTRAL, 2, frozen), MIXTRAL, 2)


def test_all_tokens_to_one_expert():
    """The other ranks' experts get nothing, and gradients of zero; nobody waits for anybody."""

    def program(rank):
        model = build(MIXTRAL, 0)
        expert_parallel.spread_experts(model, rank.comm("ep"))
        for block in model.blocks:
            block.feed_forward.top_k = 1
            block.feed_forward.router.weight.data.zero_()  # of equal scores the first expert wins
        model.loss(mine(rank), mine(rank)).backward()
        experts = expert_parallel.expert_parameters(model)
        counts = model.blocks[0].feed_forward.routing.counts.tolist()
        return counts, {name: p.grad.abs().sum().item() > 0 for name, p in experts.items()}

    for rank, (counts, reached) in enumerate(ranks(2, 2).run(program)):
        assert sorted(counts) == [0, 0, 0, TOKENS]
        busy = str(counts.index(TOKENS))
        assert all(got == (f"experts.{busy}." in name) for name, got in reached.items()), rank


# ── dispatch and combine on their own ──────────────────────────────────────────────────────────────────────────────


def round_trip(rank, room):
    """Identity experts: what comes back is x times the weights of what was not dropped; and in which
    order tokens came."""
    comm, generator = rank.comm("ep"), torch.Generator().manual_seed(rank.rank)
    x = torch.randn(7 + rank.rank, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    logits = torch.randn(len(x), 6, generator=generator, dtype=torch.float64, requires_grad=True)
    routing = expert_parallel.route(logits, 2, capacity=room)
    inputs, trip = expert_parallel.dispatch(x, routing, comm)
    came = [len(rows) for rows in inputs]
    back = expert_parallel.combine(inputs, trip, routing, comm)
    weights, _ = gates(logits, 2, room=room)
    expected = weights.sum(1, keepdim=True) * x
    found = torch.autograd.grad(back.square().sum(), (x, logits), retain_graph=True)
    right = torch.autograd.grad(expected.square().sum(), (x, logits))
    same = [close(a, b) for a, b in zip((back, *found), (expected, *right), strict=True)]
    return same, routing.counts.tolist(), came


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("room", [None, 1, 2])
def test_every_token_comes_back_in_its_place(n, room):
    """Ranks with unequally many tokens."""
    results = ranks(n, n).run(round_trip, room)
    assert all(all(same) for same, _, _ in results)
    counts = torch.tensor([counts for _, counts, _ in results])
    assert counts.sum(0).tolist() == [count for _, _, came in results for count in came]
    if room is None:
        assert counts.sum(1).tolist() == [2 * (7 + rank) for rank in range(n)]


def test_expert_gradients_are_a_mean_over_ranks_and_those_of_tokens_are_whole():
    def program(rank):
        x = torch.ones(2, 1, requires_grad=True)
        w = torch.tensor(5.0, requires_grad=True)
        routing = expert_parallel.route(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 1)
        inputs, trip = expert_parallel.dispatch(x, routing, rank.comm("ep"))
        expert_parallel.combine(
            [w * rows for rows in inputs], trip, routing, rank.comm("ep")
        ).sum().backward()
        return w.grad.item(), x.grad.flatten().tolist()

    assert ranks(2, 2).run(program) == [(1.0, [5.0, 5.0])] * 2


# ── the router ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("k, room", [(1, None), (2, None), (4, None), (2, 3), (3, 2)])
def test_routes_as_defined(score, k, room):
    logits = torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(k))
    bias = torch.tensor([0.3, 0.0, 0.0, -0.3], dtype=torch.float64)
    for added in (None, bias):
        routing = expert_parallel.route(logits, k, score=score, capacity=room, bias=added)
        expected, balance = gates(logits, k, score, room, added)
        taken = routing.order[: routing.counts.sum()]
        token, choice = taken % 11, taken // 11
        found = torch.zeros_like(expected)
        found[token, routing.chosen[token, choice]] = routing.weights[token, choice]
        assert close(found, expected)
        assert close(routing.weights.sum(1), torch.ones(11, dtype=torch.float64))
        assert close(expert_parallel.balance_loss(routing), balance)
        assert (found != 0).sum(0).tolist() == routing.counts.tolist()
        assert routing.load.sum() == 11 * k
        if room:
            assert routing.counts.tolist() == routing.load.clamp(max=room).tolist()


def test_balance_loss_is_1_when_balanced_and_grows_to_E():
    even = expert_parallel.route(torch.eye(4, dtype=torch.float64), 1)
    assert expert_parallel.balance_loss(even).item() == pytest.approx(1)
    logits = (torch.tensor([[50.0, 0, 0, 0]] * 5)).requires_grad_()
    assert expert_parallel.balance_loss(expert_parallel.route(logits, 1)).item() == pytest.approx(4)
    assert expert_parallel.balance_loss(
        expert_parallel.route(torch.randn(9, 4), 4)
    ).item() == pytest.approx(1)


def test_balance_loss_pushes_the_crowded_expert_down():
    logits = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 0.5]], requires_grad=True)
    expert_parallel.balance_loss(expert_parallel.route(logits, 1)).backward()
    assert (logits.grad[:, 0] > 0).all() and (logits.grad[:, 1] < 0).all()


def test_bias_chooses_and_nothing_else():
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    routing = expert_parallel.route(logits, 2, score="sigmoid", bias=torch.tensor([-9.0, 0.0, 0.0]))
    assert routing.chosen.tolist() == [[1, 2]]
    chosen = logits[0, 1:].sigmoid()
    assert torch.allclose(routing.weights[0], chosen / chosen.sum())
    assert torch.allclose(routing.probabilities[0], logits[0].sigmoid() / logits[0].sigmoid().sum())


def test_bias_moves_by_the_sign_of_the_load_of_all_ranks_until_it_is_balanced():
    def program(rank):
        model = random_(GPT(replace(MIXTRAL, top_k=1, num_layers=1)), 3)
        expert_parallel.spread_experts(model, rank.comm("ep"), score="sigmoid", biased=True)
        layer, x = model.blocks[0].feed_forward, mine(rank)
        model(x)
        model(x)  # micro-batches add up
        first = layer.load.tolist()
        expert_parallel.update_bias(model, rank.comm("dp"), rate=0.01)
        moved = layer.bias.tolist()
        for _ in range(30):
            model(x)
            expert_parallel.update_bias(model, rank.comm("dp"), rate=0.02)
        model.eval()
        model(x)
        return first, moved, layer.load.tolist(), layer.routing.counts.tolist()

    results = ranks(2, 2).run(program)
    before = torch.tensor([first for first, *_ in results]).sum(0)
    for _, moved, left, _ in results:
        assert moved == pytest.approx((0.01 * (before.double().mean() - before).sign()).tolist())
        assert left == [0] * 4
    after = torch.tensor([counts for *_, counts in results]).sum(0)
    assert before.sum() == 2 * after.sum() and after.max() * 2 < before.max()


def test_a_language_whose_next_word_hangs_on_the_last_two():
    rig = rigs.expert_parallel
    said, even = (rig.language(8, 9, seed=1, skewed=skewed)(400) for skewed in (True, False))
    assert said.shape == (400, 9) and torch.equal(said, rig.language(8, 9, seed=1)(400))
    followers = {}
    for row in said.tolist():
        for *pair, after in zip(row, row[1:], row[2:], strict=False):
            followers.setdefault(tuple(pair), set()).add(after)
    assert max(len(after) for after in followers.values()) == 2 and len(followers) > 40
    of_1 = set().union(*(after for (_, last), after in followers.items() if last == 1))
    assert len(of_1) > 2  # the word before it matters
    often, evenly = (torch.bincount(x[:, 2:].flatten(), minlength=8).double() for x in (said, even))
    assert often.argmax() < 3 and often.max() / often.mean() > 1.3 * (evenly.max() / evenly.mean())


def test_the_record_of_routers_is_made_of_these_very_steps():
    rig, record = rigs.expert_parallel, rigs.expert_parallel.routing_record()
    assert record["runs"].keys() == rig.WAYS.keys()
    assert {len(runs) for runs in record["runs"].values()} == {8}
    assert record["made"].startswith("python tools/expert_routing.py; torch ")
    some = ("nothing", "rows centered", "frequencies given", "dropping, α = 0.1", "a bias")
    for way in some:
        run = ranks(1, 1).run(rig.train_router, 1, steps=10, **rig.WAYS[way])[0]
        assert (run.asked.sum(1) == 8 * 32 * 2).all()
        assert [sum(row) for row in run.visits(4)] == [128] * 4
        for name in ("busiest", "dropped", "loss"):
            first = record["runs"][way][1][name][0]
            assert rig.summary(run)[name] == pytest.approx([first], abs=2e-4), name


def test_the_rigs_router_is_pulled_to_zero_and_learns_at_the_rate_it_is_given():
    def run(**how):
        return ranks(1, 1).run(rigs.expert_parallel.train_router, 0, **how)[0]

    plain, pulled = (run(z_loss=z).logits.logsumexp(-1).mean() for z in (0.0, 1.0))
    assert abs(pulled) < 0.1 < 2 < plain  # −15 where it is not squared
    still, moved = run(steps=2, lr=0.0).losses, run(steps=2).losses
    assert still[0] == moved[0] and still[1] > moved[1]


# ── who reduces which gradients ────────────────────────────────────────────────────────────────────────────────────


def test_ranks_with_the_same_experts_are_a_group():
    mesh = Mesh(pp=2, dp=4, cp=2, tp=2, ep=4)
    for rank in range(mesh.size):
        ep, edp = mesh.group(rank, "ep"), mesh.group(rank, "edp")
        assert len(ep) == 4 and len(edp) == 2 and set(ep) & set(edp) == {rank}
        assert {mesh.coords(other)["ep"] for other in edp} == {mesh.coords(rank)["ep"]}
        joined = {other for first in edp for other in mesh.group(first, "ep")}
        both = mesh.group(rank, "dp"), mesh.group(rank, "cp")
        assert joined >= {*both[0], *both[1]} and len(joined) == 8
    assert Mesh(dp=4, ep=2).group(1, "edp") == (1, 3)
    with pytest.raises(RankError, match="edp lies on the ranks of dp and cp; join those"):
        ranks(2, 2).run(lambda rank: rank.comm("dp", "edp"))


def test_spread_experts_are_averaged_over_edp_or_not_at_all():
    """Over dp they would become the mean of different experts, without an error in sight."""

    def program(rank, transform):
        model = expert_parallel.spread_experts(build(GPT2, 0), rank.comm("ep"))
        experts = [p for name, p in model.named_parameters() if ".experts." in name]
        assert experts and all(p.shares == rank.mesh.ep for p in experts)
        model.loss(mine(rank), mine(rank)).backward()
        return transform(model, rank.comm("dp")) and None

    refused = (
        r"experts, which differ along 'dp': call expert_parallel.reduce_gradients.*comm\('edp'\)"
    )
    for transform in (
        data_parallel.replicate,
        data_parallel.average_gradients,
        zero.shard,
        lambda model, comm: zero.Optimizer(model.parameters(), comm, level=1),
    ):
        with pytest.raises(RankError, match=refused):
            ranks(2, 2).run(program, transform)
        ranks(2, 1).run(program, transform)  # nothing is spread


# ── dry runs: balanced routing is the caller's assumption ──────────────────────────────────────────────────────────


def balance_(model):
    """Make every router choose experts evenly: token t the k that follow t·k."""
    for block in model.blocks:
        router = block.feed_forward.router
        E, k = router.out_features, block.feed_forward.top_k

        def forward(tokens, plain=router.forward, E=E, k=k):
            place = torch.arange(len(tokens))[:, None] * k + torch.arange(k)
            wanted = torch.zeros(len(tokens), E).scatter(1, place % E, 50.0)
            return plain(tokens) + wanted

        router.forward = forward


def one_step(rank, config):
    """The peak of a second step, its states, what was sent in it."""
    model = random_(GPT(config), 0)
    dp, edp = rank.comm("dp"), rank.comm("edp")
    expert_parallel.spread_experts(model, rank.comm("ep"), replicas=dp)
    balance_(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.zeros(ROWS, config.seq_len, dtype=torch.long)

    def step():
        optimizer.zero_grad()
        (model.loss(x, x) + ALPHA * expert_parallel.auxiliary_loss(model)).backward()
        expert_parallel.reduce_gradients(model, dp, edp)
        optimizer.step()

    step()
    peak = measure.history(step, model, optimizer).peak.ledger
    return peak, measure.model_states(model, optimizer)


def assert_dry_is_real(real, config, dp, ep):
    """Peaks and states of each rank, and all that it sent; the formulas too."""
    results = real.run(one_step, config)
    assume = expert_parallel.balanced(config, TOKENS)
    with World(Mesh(dp=dp, ep=ep), engine="dry", assume=assume) as dry:
        for rank in (0, dp - 1)[ep != dp :]:
            peak, states = dry.run(one_step, config, rank=rank)
            assert peak.diff(results[rank][0]).unexplained == 0
            assert states.diff(results[rank][1]).unexplained == 0
            of = config, plan(dp, "fp32"), dry.mesh, rank
            assert predict.states(*of).diff(states).unexplained == 0
            assert dry.ledger.diff(real.ledger.only(rank=rank)).unexplained == 0
            predicted = in_a_pass(predict.sent(*of)).scaled(2)
            assert predicted.diff(in_a_pass(dry.ledger)).unexplained == 0


def test_formula_dry_run_and_threads_agree():
    assert_dry_is_real(ranks(4, 2), replace(MIXTRAL, num_layers=1, shared_expert=True), 4, 2)


def test_a_rank_of_mixtral_among_64():
    """Two of its layers on 8 × 8 ranks: what it holds and sends is what the formulas say."""
    config = replace(ModelConfig.named("mixtral-8x7b"), num_layers=2)
    mesh, rank, tokens = Mesh(dp=64, ep=8), 43, 4096

    def program(here):
        model = GPT(config, attention="sdpa")
        expert_parallel.spread_experts(model, here.comm("ep"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        x = torch.zeros(1, tokens, dtype=torch.long)
        model.loss(x, x).backward()
        expert_parallel.reduce_gradients(model, here.comm("dp"), here.comm("edp"))
        optimizer.step()
        return measure.model_states(model, optimizer)

    with World(mesh, engine="dry", assume=expert_parallel.balanced(config, tokens)) as dry:
        states = dry.run(program, rank=rank)
        told = in_a_pass(dry.ledger)
    train = plan(64, "fp32", rows=1)
    held = {line.name: line.amount for line in predict.states(config, train, mesh, rank)}
    assert held == states.by("name")
    short = replace(config, seq_len=tokens)
    predicted = in_a_pass(predict.sent(short, train, mesh, rank))
    assert predicted.diff(told).unexplained == 0


# ── when ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_layer_takes_its_all_to_alls_and_its_busiest_rank():
    """By hand: 8 visits a rank on 2 ranks, of which 4 stay; 1 s for each row that travels, 2 s for each computed."""
    config = ModelConfig(**SIZES, d_ff=4, num_experts=2, top_k=1)
    a_visit = 2 * 2 * 8 * 4
    how = dict(flops=a_visit / 2, link=Link(0.0, 8.0), itemsize=1)
    even = expert_parallel.routed_timeline(config, [[4, 4], [4, 4]], **how)
    assert (even.makespan, even.exposed) == (4 + 16 + 4, 8)
    halves = expert_parallel.routed_timeline(config, [[4, 4], [4, 4]], **how, chunks=2)
    assert (halves.makespan, halves.exposed) == (2 + 16 + 2, 4)
    said = [{s.name for s in each.spans if s.kind == "forward"} for each in (even, halves)]
    assert said == [{"experts"}, {"part 1", "part 2"}]  # whose numbers are not those of experts
    busy = expert_parallel.routed_timeline(config, [[8, 0], [6, 2]], **how)
    assert (busy.makespan, busy.exposed) == (6 + 28 + 6, 12)
    shared = expert_parallel.routed_timeline(
        replace(config, shared_expert=True), [[4, 4]] * 2, **how
    )
    assert (shared.makespan, shared.exposed) == (16 + 16 + 4, 4)
    slow = expert_parallel.routed_timeline(
        config, [[4, 4]] * 2, **how | dict(link=Link(3.0, 1.0)), chunks=2
    )
    assert slow.makespan == 4 * (3 + 16)
    crowd = replace(config, num_experts=3)  # two send 4 rows each, and one receives them all
    assert expert_parallel.routed_timeline(crowd, [[4, 0, 0]] * 3, **how).makespan == 8 + 24 + 8
    alone = expert_parallel.routed_timeline(config, [[8, 8]], **how)
    assert (alone.makespan, alone.hidden) == (32, 1)


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_does_not_fit_says_so():
    for wrong, error, message in [
        (lambda: expert_parallel.route(torch.ones(2, 3), 4), ValueError, "k=4 of 3 experts"),
        (
            lambda: expert_parallel.route(torch.ones(2, 3), 1, score="relu"),
            ValueError,
            "unknown score 'relu'",
        ),
        (lambda: expert_parallel.capacity(4, 2, 1, 0.0), ValueError, "capacity_factor must be"),
        (lambda: expert_parallel.balanced(GPT2, 5), ValueError, "10 visits over num_experts=6"),
        (
            lambda: expert_parallel.routed_sent(GPT2, [[[0] * 6] * 5]),
            ValueError,
            "ep=5 does not divide num_experts=6",
        ),
        (
            lambda: expert_parallel.auxiliary_loss(GPT(MIXTRAL)),
            RuntimeError,
            "no layer has routed tokens yet",
        ),
    ]:
        with pytest.raises(error, match=message):
            wrong()
    dense = replace(MIXTRAL, num_experts=1, top_k=1)
    for module, message in [
        (lambda: GPT(dense), "spread_experts takes a module with MixtureOfExperts inside, got GPT"),
        (lambda: MixtureOfExperts(MIXTRAL), "inside, got MixtureOfExperts"),
        (lambda: FeedForward(MIXTRAL), "got FeedForward"),
    ]:
        with pytest.raises(RankError, match=message):
            ranks(2, 2).run(
                lambda rank, module=module: expert_parallel.spread_experts(
                    module(), rank.comm("ep")
                )
            )
    with pytest.raises(RankError, match="ep=3 does not divide num_experts=4: choose"):
        ranks(3, 3).run(lambda rank: expert_parallel.spread_experts(GPT(MIXTRAL), rank.comm("ep")))
    with pytest.raises(RankError, match="this module has no bias: spread_experts"):
        ranks(1, 1).run(lambda rank: expert_parallel.update_bias(
            expert_parallel.spread_experts(GPT(MIXTRAL), rank.comm("ep")), rank.comm("dp")))  # fmt: skip


# ── numbers out of range, and none at all ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "attempt, said",
    [
        (lambda: expert_parallel.capacity(-4096, 8, 1, 1.0), "tokens must be at least 0"),
        (lambda: expert_parallel.capacity(4096, 0, 1, 1.0), "num_experts must be at least 1"),
        (lambda: expert_parallel.route(torch.ones(2, 4), 1, capacity=-1), "capacity must be at"),
        (lambda: expert_parallel.routed_sent(MIXTRAL, [[]], itemsize=0), "itemsize must be"),
    ],
)
def test_numbers_out_of_range_are_refused(attempt, said):
    with pytest.raises(ValueError, match=said):
        attempt()


@pytest.mark.parametrize("wrong", [dict(capacity_factor=-1.0), dict(score="tanh")])
def test_spreading_says_at_once_what_no_pass_could_do(wrong):
    with pytest.raises(RankError, match=r"capacity_factor must be|unknown score 'tanh'"):
        ranks(2, 2).run(
            lambda rank: expert_parallel.spread_experts(GPT(MIXTRAL), rank.comm("ep"), **wrong)
        )


def test_no_token_goes_nowhere():
    routing = expert_parallel.route(torch.ones(0, 4), 2, capacity=3)
    assert routing.counts.tolist() == routing.load.tolist() == [0] * 4 and not len(routing.order)


@pytest.mark.parametrize(
    "tokens, experts, k, factor, wanted",
    [
        (10, 4, 1, 1.0, 3),
        (9, 4, 1, 1.0, 3),
        (8, 4, 1, 1.0, 2),
        (7, 3, 2, 1.1, 6),
        (1, 8, 1, 1.25, 1),
    ],
)
def test_a_room_is_rounded_up(tokens, experts, k, factor, wanted):
    """By hand: 2.5 → 3, 2.25 → 3, 2 → 2, 5.13 → 6, 0.16 → 1."""
    assert expert_parallel.capacity(tokens, experts, k, factor) == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tables_of_positions_are_as_wide_as_the_model(dtype):
    """RoPE's cosines and sines are buffers, which `.to(dtype)` converts, too."""
    model = GPT(MIXTRAL).to(dtype)
    rotary = model.blocks[0].attention.rotary
    assert rotary.cos.dtype == rotary.sin.dtype == dtype
