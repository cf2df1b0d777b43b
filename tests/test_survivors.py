"""Small mistakes that no other test saw, each a line of `mistakes/planted.py` once."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from labutils import (
    checkpointing,
    collectives,
    context_parallel,
    data_parallel,
    expert_parallel,
    flash,
    floats,
    measure,
    memory,
    model,
    pipeline,
    planner,
    precision,
    quantization,
    schedule,
    timeline,
    units,
    world,
    zero,
)  # fmt: skip
from labutils.config import Link, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.teach import plots

EXPERTS = ModelConfig(
    num_layers=1, d_model=8, num_heads=2, d_ff=16, vocab_size=8, seq_len=8, num_experts=2, top_k=1
)
TINY = ModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=16, vocab_size=8, seq_len=64)


def test_the_minimum_itself_is_allowed():
    assert units.whole(3, "ranks", 3) == 3


def test_a_scaled_ledger_counts_as_often():
    assert Ledger([Line("weights", 5, count=2)]).scaled(3).count == 6


def test_a_thousand_bytes_have_a_unit():
    assert str(Ledger([Line("weights", 1000)])).count("1.00 kB") == 2


def test_what_ends_together_is_taken_away_together():
    spans = [timeline.Span(0, "weights", "", 0, 2, (0, 10)) for _ in range(2)]
    spans.append(timeline.Span(0, "weights", "", 3, 4, (0, 15)))
    held = timeline.Occupancy(tuple(spans), 10, {"weights": 1}, {}, 4)
    assert held.peak == 20


def test_a_block_of_another_size_shares_its_scale_among_as_many():
    assert floats.BlockFormat("nv", floats.E2M1, 16).bits_per_value == 4.5


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_block_with_inf_or_nan_has_the_scale_nan(odd):
    scale, codes = floats.MXFP4.encode([1.0, odd])
    assert math.isnan(floats.E8M0.decode(scale)) and codes == [0, 0]


def test_a_recipe_says_how_its_steps_come_about_and_whether_the_batch_is_what_was_asked_for():
    def fits(b):
        return b <= 2

    recipe = planner.configure(target=4_194_304, seq_len=4096, gpus=128, fits=fits)
    said = {choice.what: choice.reason for choice in recipe.choices}
    assert said["accumulation steps"] == "1,024 / (2 · 128)"
    assert said["tokens in a batch"] == "what you asked for"
    rows = zip(recipe.choices, str(recipe).splitlines(), strict=True)
    begins = {len(row) - len(choice.reason) for choice, row in rows}
    assert len(begins) == 1  # reasons stand below each other
    more = planner.configure(target=4_194_303, seq_len=4096, gpus=128, fits=fits)
    assert more.choices[0].reason.startswith("the closest to 4,194,303")


def test_a_graph_that_is_dropped_is_freed_while_it_is_recorded():
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)

    def forwards(k):
        def step():
            for _ in range(k):
                layer(x).exp()

        return measure.history(step, layer).peak.ledger.total

    assert forwards(8) == forwards(2)


def test_a_storage_that_shrinks_leaves_room_below_the_capacity():
    layer = nn.Linear(1, 1, bias=False)

    def step():
        big = torch.empty(1000)
        for _ in range(5):
            big.untyped_storage().resize_(0)
            big.untyped_storage().resize_(4000)

    measure.history(step, layer, capacity=4100)
    with pytest.raises(measure.OutOfMemory):
        measure.history(step, layer, capacity=3900)


@pytest.mark.parametrize("name", model.ATTEND)
def test_attention_drops_as_often_as_it_is_told(name):
    torch.manual_seed(0)
    q = torch.zeros(4, 2, 64, 64)
    v = torch.eye(64).expand(4, 2, 64, 64)  # so that the output is the weights
    weights = model.ATTEND[name](q, q, v, 0.3)
    below = torch.ones(64, 64).tril().bool()
    assert (weights[..., below] == 0).float().mean().item() == pytest.approx(0.3, abs=0.02)


@pytest.mark.parametrize("name", model.ATTEND)
def test_attention_drops_nothing_that_it_is_not_told_to(name):
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.ATTEND[name](q, k, v), model.ATTEND[name](q, k, v, 0.0))


def test_the_stream_is_dropped_after_the_embedding_and_after_both_halves(monkeypatch):
    gpt = model.GPT(dataclasses.replace(TINY, dropout=0.5))
    shapes, dropout = [], F.dropout
    monkeypatch.setattr(
        F, "dropout", lambda x, *a, **k: (shapes.append(x.dim()), dropout(x, *a, **k))[1]
    )
    gpt(torch.zeros(1, 4, dtype=torch.long))
    assert shapes == [3, 4, 3, 3]  # the embedding, the scores, and what each half adds


@pytest.mark.parametrize(
    "kind, attention",
    [({}, "sdpa"), (dict(positions="rope"), "sdpa"), (dict(num_experts=4, top_k=2), "plain")],
)
def test_what_is_kept_in_half_precision_is_predicted_to_the_byte(kind, attention):
    config = dataclasses.replace(TINY, **kind)
    train = TrainConfig(micro_batch=2, global_batch=2, attention=attention)
    gpt = model.GPT(config, attention=attention).bfloat16()
    tokens = torch.zeros(2, config.seq_len, dtype=torch.long)
    kept = measure.saved_activations(lambda: gpt.loss(tokens, tokens.clone()), gpt)
    assert kept.total == memory.activations(config, train).total


@pytest.mark.parametrize("first", [-math.inf, -200.0])
def test_merging_begins_where_the_first_part_sees_next_to_nothing(first):
    one, two = torch.ones(1, 2), torch.full((1, 2), 3.0)
    out, lse = flash.merge(one, torch.tensor([first]), two, torch.tensor([5.0]))
    assert torch.equal(out, two) and lse.item() == 5.0
    back, other = flash.merge(two, torch.tensor([5.0]), one, torch.tensor([first]))
    assert torch.equal(back, two) and other.item() == 5.0


def test_gradients_of_queries_are_summed_in_fp32():
    """Over 64 key blocks a sum in 16 bits would be off by many of its roundings."""
    draw = torch.Generator().manual_seed(0)
    q, k, v, slope = (torch.randn(1, 1, 512, 16, generator=draw).bfloat16() for _ in range(4))

    def gradient(dtype, **blocks):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]
        flash.attention(*inputs, **blocks)[0].backward(slope.to(dtype))
        return inputs[0].grad.double()

    exact = gradient(torch.float64)
    few, many = ((gradient(torch.bfloat16, block_k=b) - exact).norm() for b in (512, 8))
    assert many < 1.05 * few


def test_the_bandwidth_of_a_sweep_counts_what_is_read_and_what_is_written(monkeypatch):
    from labutils.flash import fused

    monkeypatch.setattr(fused.timeit, "repeat", lambda fn, number, repeat: [1.0] * repeat)
    roof = fused.Roof.measured(size=64, nbytes=4096)
    assert (roof.flops, roof.bandwidth) == (2 * 64**3, 2 * 4096)


def test_bars_and_their_parts_are_labelled_with_what_they_hold():
    two = Ledger([Line("weights", 6 * 10**6, "weights"), Line("exp_avg", 3 * 10**6, "optimizer")])
    picture = plots.memory_bars(a=two, b=two.scaled(2))
    said = [text.get_text() for text in picture.figure.axes[0].texts]
    for amount in ("6.00 MB", "3.00 MB", "9.00 MB", "12.0 MB", "18.0 MB"):
        assert amount in said
    assert said.count("6.00 MB") == 2 and picture.alt.count("in all") == 2
    assert "9.00 MB in all" in picture.alt and "18.0 MB in all" in picture.alt


def test_the_fullest_moment_is_labelled_with_its_bytes():
    def moment(phase, nbytes):
        held = Ledger([Line("weights", 10**6, "weights"), Line("x", nbytes, "activations")])
        return timeline.Moment(phase, "mm", held)

    step = timeline.History([moment("forward", 10**6), moment("backward", 4 * 10**6)])
    picture = plots.memory_timeline(step)
    axes = picture.figure.axes[0]
    assert "peak 5.00 MB" in [text.get_text() for text in axes.texts]
    low, high = (band.get_data() for band in axes.patches[:2])
    assert list(low.values) == [1, 1] and list(high.values) == [2, 5]
    assert list(high.baseline) == [1, 1]


def test_spans_are_drawn_as_long_as_they_last_and_messages_below_what_is_computed():
    spans = (
        timeline.Span(0, "forward", "layer", 0.0, 1.0),
        timeline.Span(0, "backward", "layer", 1.0, 3.0),
        timeline.Span(0, "reduce", "bucket 0", 2.5, 4.0),
    )
    axes = plots.overlap(step=timeline.Timeline(spans)).figure.axes[0]
    boxes = [patch for patch in axes.patches if patch.get_width() in (1.0, 2.0, 1.5)]
    drawn = [(box.get_x(), box.get_width()) for box in boxes]
    assert drawn[:3] == [(0.0, 1.0), (1.0, 2.0), (2.5, 1.5)]
    above, same, below = (box.get_y() for box in boxes[:3])
    assert above == same < below


@pytest.mark.parametrize("n, k", [(10, 4), (7, 3), (11, 5), (9, 2)])
def test_segments_are_as_equal_as_they_come(n, k):
    plan = checkpointing.segments(n, k)
    first = next(i for i, step in enumerate(plan.steps) if step.op == "record")
    ends = [*sorted(plan.states[first].values), n]
    lengths = [end - start for start, end in itertools.pairwise(ends)]
    assert len(lengths) == k and max(lengths) - min(lengths) == (n % k > 0)


@pytest.mark.parametrize("prefetch, ahead", [(False, 0), (True, 1)])
def test_the_next_unit_is_gathered_ahead_only_if_asked_for(prefetch, ahead):
    def program(rank):
        chain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        zero.shard(chain, rank.comm("dp"), prefetch=prefetch)
        groups, seen = chain._sharded.groups[1:], []

        def look(*_):
            seen.append([i for i, group in enumerate(groups) if group.resident])

        for unit in chain:
            unit.register_forward_pre_hook(look)
        chain(torch.ones(2, 4))
        return seen

    there = [[i, i + 1][: 1 + ahead] for i in range(3)] + [[3]]
    assert world.World(1).run(program)[0] == there


@pytest.mark.parametrize("n", [2, 3, 5, 8])
def test_after_a_barrier_every_rank_has_heard_of_all(n):
    ranks = world.World(n)
    ranks.run(lambda rank: rank.comm().barrier())
    heard = [{i} for i in range(n)]
    for events in zip(*ranks.trace.ranks, strict=True):
        heard = [mine | heard[event.source] for mine, event in zip(heard, events, strict=True)]
    assert heard == [set(range(n))] * n


def test_the_norm_of_half_precision_gradients_is_summed_in_fp32():
    def program(rank):
        shard = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        shard.grad = torch.tensor([16.0, 1.0], dtype=torch.bfloat16)
        shard.shares = 2
        return zero.clip_grad_norm([shard], rank.comm("dp"), 100.0)

    for norm in world.World(2).run(program):
        assert norm.item() == pytest.approx(math.sqrt(2 * (256 + 1)))


def test_inputs_of_a_sharded_module_come_in_the_type_of_its_weights():
    def program(rank):
        layer = nn.Linear(4, 2)
        zero.shard(layer, rank.comm("dp"), param_dtype=torch.bfloat16)
        return layer(torch.ones(1, 4)).dtype

    assert world.World(1).run(program) == [torch.bfloat16]


def test_the_padding_of_a_gradient_is_zero_whatever_memory_held():
    def program(rank):
        layer = nn.Linear(5, 1, bias=False)
        optimizer = zero.Optimizer(layer.parameters(), rank.comm("dp"), level=1)
        (flat,) = optimizer.flats
        flat.open()
        return flat.buffer[5:].tolist()

    torch.use_deterministic_algorithms(True)  # which fills new memory with NaN
    try:
        assert world.World(2).run(program) == [[0.0]] * 2
    finally:
        torch.use_deterministic_algorithms(False)


def test_each_backward_pass_computes_again():
    calls, x = [], torch.ones(3, requires_grad=True)
    y = checkpointing.checkpoint(lambda x: calls.append("again") or x.exp().sin(), x)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert len(calls) == 3  # nothing is kept from one pass to the next


def test_an_input_that_needs_no_gradient_gets_none():
    chain = [nn.Linear(3, 5), nn.Linear(5, 1)]
    slope = torch.ones(4, 1)
    run = checkpointing.run(chain, checkpointing.keep_nothing(2), torch.ones(4, 3), slope)
    assert run.input_gradient is None and chain[0].weight.grad is not None


def test_a_gradient_inside_a_region_is_taken_again_in_its_own_format():
    """The backward pass lies in a region of its own, which the second evaluation must not see."""
    seen, x = [], torch.ones(3, 4, requires_grad=True)

    def product(x):
        y = x @ x.T
        seen.append(y.dtype)
        return y.sin().exp()

    def slope(x):
        y = checkpointing.checkpoint(product, x)
        return torch.autograd.grad(y.sum(), x, create_graph=True)[0]

    y = checkpointing.checkpoint(slope, x)
    with precision.autocast():
        y.sum().backward()
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("n", [1, 4])
def test_of_equally_fast_algorithms_the_first_is_named(n):
    free = Link(0, 1e9)  # of nothing, over a link without latency, each takes no time
    assert collectives.fastest(0, n, free) == collectives.ALL_REDUCES[0]


def test_a_tile_as_large_as_the_cache_is_taken():
    assert [flash.algorithms.default_blocks(heads) for heads in (1, 2, 4, 8, 9)] == [
        (512, 512), (256, 512), (256, 256), (256, 256), (256, 256),
    ]  # fmt: skip


HEADS = torch.randn(1, 2, 6, 4, generator=torch.Generator().manual_seed(0))
WORDLY = model.GPT(TINY)
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
WORDS = torch.tensor([1, 0, 7, 3, 3, 2])


def stepped(make, dtype=torch.float32):
    """The weight after two steps of an optimizer."""
    weight = nn.Parameter(X.to(dtype))
    optimizer = make([weight])
    for _ in range(2):
        weight.grad = weight.detach() * 0.5
        optimizer.step()
    return weight.detach()


def rounded(weights):
    inner = torch.optim.SGD(weights, lr=0.1)
    return precision.RoundedWeights(inner, generator=torch.Generator().manual_seed(0))


def unscaled():
    weight = nn.Parameter(X)
    weight.grad = X.clone()
    precision.LossScaler().unscale_(torch.optim.SGD([weight], lr=0.1))
    return weight.grad


def kept_in_8_bits():
    layer = nn.Linear(8, 6, device="cpu")
    for p in layer.parameters():
        p.data.copy_(X if p.dim() > 1 else X[:, 0])
    module = quantization.use_fp8(nn.Sequential(layer), quantization.SCHEMES["current"])
    optimizer = quantization.KeptAdam(module, quantization.RECIPES["FP8-LM"])
    for _ in range(2):
        module(X).sum().backward()
        optimizer.step()
    return module(X).detach()


MADE = {
    "a running sum": lambda: precision.running_sum(X, "bf16"),
    "a compensated sum": lambda: precision.kahan_sum(X, "bf16"),
    "random bits": lambda: precision.round_to(
        X, "bf16", mode="stochastic", generator=torch.Generator().manual_seed(0)
    ),
    "a loss scale": lambda: precision.LossScaler().scale(X.sum()),
    "a scale taken away": unscaled,
    "no master": lambda: stepped(rounded, torch.bfloat16),
    "moments in 8 bits": lambda: stepped(functools.partial(quantization.Adam8, smallest=1)),
    "states in 8 bits": kept_in_8_bits,
    "the dynamic code": lambda: quantization.from_blocks(quantization.to_blocks(X), X.shape),
    "a Hessian": lambda: quantization.hessian(X),
    "packed codes": lambda: quantization.pack_codes(WORDS, 3),
    "unpacked codes": lambda: quantization.unpack_codes(WORDS.byte(), 3, 8),
    "blocks of floats": lambda: quantization.quantize(X, "mxfp4").dequantize(),
    "attention": lambda: model.attend_plain(HEADS, HEADS, HEADS),
    "places of tokens": lambda: WORDLY(WORDS[None]),
    "a softmax in bf16": lambda: precision.cross_entropy(X, WORDS, "bf16"),
    "places in a queue": lambda: expert_parallel.route(X, 2, capacity=1).order,
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_is_made_lies_where_its_inputs_do(make):
    """Where torch would make it is another place, as for inputs on a GPU."""
    with torch.device("meta"):
        found = make()
    assert torch.equal(found, make())


def of_a_ring(comm, where):
    heads = HEADS.clone().requires_grad_()
    with torch.device(where):
        context_parallel.ring_attention(heads, heads, heads, comm).sum().backward()
    return heads.grad


def of_a_router(comm, where):
    net = model.GPT(EXPERTS)
    with torch.device(where):
        spread = expert_parallel.spread_experts(net, comm, biased=True)
    spread(WORDS[None])
    expert_parallel.update_bias(spread, comm)
    return torch.cat([bias for name, bias in spread.named_buffers() if name.endswith("bias")])


def of_a_norm(comm, where):
    weight = nn.Parameter(X.clone())
    weight.grad, weight.shares = X.clone(), 1
    with torch.device(where):
        zero.clip_grad_norm([weight], comm, 1.0)
    return weight.grad


def of_a_share(comm, where):
    with torch.device(where):
        comm.barrier()
        return torch.as_tensor(data_parallel.share(comm.rank + 1, comm), device="cpu")


def of_a_scaler(comm, where):
    weight = nn.Parameter(X.clone())
    weight.grad = X.clone()
    scaler = precision.LossScaler(comm=comm)
    with torch.device(where):
        scaler.unscale_(torch.optim.SGD([weight], lr=0.1))
    return weight.grad


def of_a_pipeline(comm, where):
    order = schedule.one_f_one_b(2, 2)
    stages = pipeline.local(pipeline.split(model.GPT(TINY), 2, (1, 0)), order, comm.rank)
    with torch.device(where):
        pipeline.run(stages, order, comm, [(WORDS[None], WORDS[None])] * 2)
    return torch.cat([p.grad.flatten() for p in stages.parameters()])


RANKS_MAKE = (of_a_ring, of_a_router, of_a_norm, of_a_share, of_a_scaler, of_a_pipeline)


@pytest.mark.parametrize("make", RANKS_MAKE)
def test_what_ranks_make_lies_where_their_inputs_do(make):
    with world.World(2) as two:
        found, wanted = (
            two.run(lambda rank, where: make(rank.comm("dp"), where), where)
            for where in ("meta", "cpu")
        )
    assert all(map(torch.equal, found, wanted))
