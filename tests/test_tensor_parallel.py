"""Tensor and sequence parallelism: equal to the whole model, sent and kept as their formulas say, on threads, on processes and dry."""

import functools
from dataclasses import replace

import pytest
import torch
from small_models import adamw, build, steps
from torch import nn

from labutils import (
    anatomy,
    context_parallel,
    data_parallel,
    measure,
    memory,
    precision,
    predict,
    quantization,
    tensor_parallel,
)
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT
from labutils.teach import rigs
from labutils.world import RankError, World

SIZES = dict(num_layers=1, d_model=8, num_heads=12, d_head=2, d_ff=12, vocab_size=24, seq_len=12)
LLAMA_STYLE = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
GPT2 = ModelConfig(**SIZES | dict(num_layers=2))
LLAMA = ModelConfig(**SIZES, **LLAMA_STYLE, num_kv_heads=2)
QWEN = ModelConfig(**SIZES, **LLAMA_STYLE | dict(bias="qkv", tied=True), num_kv_heads=1)
MIXED = ModelConfig(**SIZES, ffn="swiglu", norm="rmsnorm", num_kv_heads=4, tied=False)
ALL = {
    "gpt2": GPT2,
    "a layer": replace(GPT2, num_layers=1),
    "llama": LLAMA,
    "qwen": QWEN,
    "mixed": MIXED,
}
STEPS = 2
# Of each kind the degrees that say something of their own.
CASES = [
    ("gpt2", 2),
    *(("a layer", n) for n in (1, 3)),
    *(("llama", n) for n in (2, 4)),
    ("qwen", 3),
    ("mixed", 2),
]
each_case = pytest.mark.parametrize("kind, n", CASES, ids=[f"{k} on {n}" for k, n in CASES])
each_way = pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
ROWS = tuple(
    torch.randint(24, (2, 12), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)
)
ROWS[1][0, 3:7] = -100  # targets that count for nothing


@functools.cache
def ranks(n):
    return World(Mesh(tp=n))


def plan(sequence=False, rows=2, precision="fp64", **how):
    options = dict(micro_batch=rows, global_batch=rows, sequence=sequence, precision=precision)
    return TrainConfig(**options, **how)


def sent(config, n, train):
    """What each rank is predicted to send in a step; of one rank there are no tokens to share."""
    mesh, train = Mesh(tp=n), replace(train, sequence=train.sequence and n > 1)
    return Ledger(line for i in range(n) for line in predict.sent(config, train, mesh, i))


def in_steps(ledger):
    """What was sent after the weights of the first rank."""
    return Ledger(line for line in ledger if line.name != "broadcast")


def kept(config, n, train):
    """What a rank is predicted to keep, and the targets, of which `predict` counts the number."""
    train = replace(train, sequence=train.sequence and n > 1)
    targets = Line("outside", 8 * (train.micro_batch * config.seq_len - 1), "activations")
    return predict.activations(config, train, Mesh(tp=n)) + Ledger([targets])


@functools.cache
def grid():
    return World(Mesh(dp=2, tp=2))


def freeze(model, frozen):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    return model


def trained(rank, config, sequence, frozen=()):
    model = freeze(build(config, rank.rank), frozen)
    assert tensor_parallel.parallelize(model, rank.comm("tp"), sequence) is model
    return steps(model, adamw(model), *ROWS, STEPS)


@functools.cache
def alone(config, frozen=()):
    model = freeze(build(config, 0), frozen)
    return steps(model, adamw(model), *ROWS, STEPS)


def joined(shares, whole):
    """The whole of a tensor, whose shares the ranks have in their order, some of them perhaps the same."""
    uneven = [dim for dim in range(whole.dim()) if shares[0].shape[dim] != whole.shape[dim]]
    if not uneven:
        assert all(torch.equal(share, shares[0]) for share in shares), "ranks drift apart"
        return shares[0]
    (dim,) = uneven
    copies = len(shares) * shares[0].shape[dim] // whole.shape[dim]
    for i, share in enumerate(shares):
        assert torch.equal(share, shares[i - i % copies]), "neighbours drift apart"
    return torch.cat(shares[::copies], dim)


def assert_equal(results, expected):
    """Losses, gradients and weights of a group of ranks are those of the whole model."""
    losses, *tables = expected
    for result in results:
        assert result[0] == pytest.approx(losses, rel=1e-10, abs=1e-10)
    for i, table in enumerate(tables, 1):
        assert results[0][i].keys() == table.keys()
        for name, whole in table.items():
            found = joined([result[i][name] for result in results], whole)
            assert torch.allclose(found, whole, rtol=1e-10, atol=1e-10), name


# ── equal to the whole model ───────────────────────────────────────────────────────────────────────────────────────


@each_way
@each_case
def test_equal_to_the_whole_model_and_sent_as_predicted(kind, n, sequence):
    """All ranks but the first begin with other weights, which do not count."""
    config = ALL[kind]
    assert_equal(ranks(n).run(trained, config, sequence), alone(config))
    predicted, told = sent(config, n, plan(sequence)).scaled(STEPS), in_steps(ranks(n).ledger)
    assert predicted.diff(told).unexplained == 0
    assert {line.key: line.count for line in predicted} == {line.key: line.count for line in told}


@each_way
def test_frozen_parameters_stay_as_they_are(sequence):
    frozen = (
        "tokens",
        "positions",
        "up",
        "query.bias",
        "attention_norm",
        "blocks.0.feed_forward.down",
    )
    assert_equal(ranks(2).run(trained, MIXED, sequence, frozen), alone(MIXED, frozen))


def test_no_rank_has_the_logits_whole():
    """The largest tensor that is not a weight or its gradient is a share of the logits."""
    config = replace(GPT2, vocab_size=960)

    def program(rank):
        model = tensor_parallel.parallelize(GPT(config), rank.comm("tp"))
        tokens = torch.zeros(4, 12, dtype=torch.long)
        lives = measure.storages(lambda: model.loss(tokens, tokens).backward(), model)
        return max(life.nbytes for life in lives if life.component in ("activations", "buffers"))

    assert ranks(4).run(program) == [4 * 12 * 960 // 4 * 4] * 4


def test_half_precision_stays_close():
    def program(rank, sequence):
        model = build(GPT2, 0, torch.bfloat16)
        tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
        loss = model.loss(*ROWS)
        loss.backward()
        return loss.dtype, loss.item()

    whole = build(GPT2, 0, torch.bfloat16).loss(*ROWS).item()
    for sequence in (False, True):
        for dtype, loss in ranks(2).run(program, sequence):
            assert dtype is torch.bfloat16 and loss == pytest.approx(whole, rel=0.02)


# ── layers of their own ────────────────────────────────────────────────────────────────────────────────────────────


@each_way
def test_a_column_and_a_row_make_a_feed_forward_layer(sequence):
    """Inputs, weights and biases get the gradients that the whole layers give them."""
    up, down = nn.Linear(4, 6, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)
    x = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    y = down(up(x).tanh())
    y.square().sum().backward()

    def program(rank):
        comm, n = rank.comm("tp"), rank.size
        column = tensor_parallel.ColumnLinear.from_full(up, comm, sequence=sequence)
        row = tensor_parallel.RowLinear.from_full(down, comm, sequence=sequence)
        mine = (x.detach().chunk(n, 1)[rank.rank] if sequence else x.detach()).requires_grad_()
        out = row(column(mine).tanh())
        out.square().sum().backward()
        parameters = [*column.parameters(), *row.parameters()]
        return out.detach(), mine.grad, [p.grad for p in parameters]

    for n in (2, 3):
        results = ranks(n).run(program)
        for found, whole in ((0, y.detach()), (1, x.grad)):
            assert torch.allclose(joined([result[found] for result in results], whole), whole)
        for i, p in enumerate((up.weight, up.bias, down.weight, down.bias)):
            assert torch.allclose(joined([result[2][i] for result in results], p.grad), p.grad)


def test_the_gather_and_the_scatter_are_conjugates():
    """Over all ranks together, ⟨gather x, y⟩ = ⟨x, gatherᵀ y⟩, and so for the scatter, the copy and the sum."""

    def program(rank):
        comm, found = rank.comm("tp"), []
        functions = {
            tensor_parallel.copy_to: 6,
            tensor_parallel.reduce_from: 6,
            tensor_parallel.gather_from: 2,
            tensor_parallel.scatter_to: 6,
        }
        for function, s in functions.items():
            x = torch.randn(2, s, 4, generator=rank.generator, dtype=torch.float64).requires_grad_()
            there = function(x, comm)
            y = torch.randn(there.shape, generator=rank.generator, dtype=torch.float64)
            there.backward(y)
            found.append(((there * y).sum().item(), (x * x.grad).sum().item(), list(there.shape)))
        return found

    results = ranks(3).run(program)
    shapes = [[shape for _, _, shape in result] for result in results]
    assert shapes == [[[2, 6, 4], [2, 6, 4], [2, 6, 4], [2, 2, 4]]] * 3
    gather, scatter = ([result[i] for result in results] for i in (2, 3))
    for pairs in (gather, scatter):
        assert sum(pair[0] for pair in pairs) == pytest.approx(sum(pair[1] for pair in pairs))


def test_a_copy_sums_the_gradient_and_a_sum_copies_it():
    def program(rank):
        comm, found = rank.comm("tp"), []
        for function in (tensor_parallel.copy_to, tensor_parallel.reduce_from):
            x = torch.tensor([1.0 + rank.rank], requires_grad=True)
            y = function(x, comm)
            y.backward(torch.tensor([10.0]))
            found += [y.item(), x.grad.item()]
        return found

    assert ranks(3).run(program) == [[1.0 + i, 30.0, 6.0, 10.0] for i in range(3)]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_is_torchs(reduction):
    """Also of logits so large that their exponentials overflow, and of targets at the edges of a share."""
    logits = torch.randn(5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[0], logits[1, 3] = logits[0] + 1e4, 1e4  # a whole row, and one word of a row
    logits.requires_grad_()
    targets = torch.tensor([7, 8, 0, 23, -100])
    expected = nn.functional.cross_entropy(logits, targets, reduction=reduction)
    (3 * expected).backward()

    def program(rank):
        mine = logits.detach().chunk(rank.size, 1)[rank.rank].clone().requires_grad_()
        loss = tensor_parallel.cross_entropy(mine, targets, rank.comm("tp"), reduction=reduction)
        (3 * loss).backward()
        return loss.item(), mine.grad

    for n in (1, 2, 3):
        results = ranks(n).run(program)
        assert [loss for loss, _ in results] == pytest.approx([expected.item()] * n, rel=1e-12)
        assert torch.allclose(torch.cat([grad for _, grad in results], 1), logits.grad, atol=1e-12)


def test_half_precision_counts_all_targets():
    """Of 257 equal tokens, as many as no bf16 can count, the loss is that of one."""

    def program(rank):
        logits = torch.zeros(257, 12, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.full((257,), 5)
        loss = tensor_parallel.cross_entropy(logits, targets, rank.comm("tp"))
        loss.backward()
        return loss, logits.grad.dtype

    one = torch.tensor(24.0).log().bfloat16()
    assert all(loss == one and dtype is one.dtype for loss, dtype in ranks(2).run(program))


def test_neighbours_are_a_group_of_their_own():
    def program(rank):
        block = rank.comm("tp").neighbours(2)
        assert block._channel != rank.comm("tp")._channel, (
            "their messages could be taken for others"
        )
        return tuple(block.ranks), block.rank, block.all_reduce(torch.tensor([rank.rank])).item()

    assert ranks(4).run(program) == [((0, 1), 0, 1), ((0, 1), 1, 1), ((2, 3), 0, 5), ((2, 3), 1, 5)]
    with pytest.raises(RankError, match="blocks of 2 do not fill 3 ranks: choose a divisor"):
        ranks(3).run(program)


# ── the table ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table_says_which_part_is_split_how():
    assert tensor_parallel.styles(replace(QWEN, norm="layernorm", positions="learned")) == {
        "tokens": "vocabulary",
        "positions": "whole",
        "blocks.*.attention_norm": "whole",
        "blocks.*.attention.query": "column",
        "blocks.*.attention.key": "column",
        "blocks.*.attention.value": "column",
        "blocks.*.attention.output": "row",
        "blocks.*.feed_forward_norm": "whole",
        "blocks.*.feed_forward.gate": "column",
        "blocks.*.feed_forward.up": "column",
        "blocks.*.feed_forward.down": "row",
        "norm": "whole",
        "head": "column",
    }


@each_case
def test_a_rank_has_a_model_of_its_own(kind, n):
    """`rank_config` describes the share: its parameters by name and shape."""

    def program(rank):
        model = tensor_parallel.parallelize(GPT(ALL[kind]), rank.comm("tp"))
        return {name: tuple(p.shape) for name, p in model.named_parameters()}

    share = tensor_parallel.rank_config(ALL[kind], n)
    dry = World(Mesh(tp=n), engine="dry").run(program, rank=n - 1)
    assert dry == anatomy.tensors(share)


ILLEGAL = [
    (
        replace(GPT2, num_heads=4, num_kv_heads=4),
        3,
        "tp=3 does not divide num_heads=4: choose another, or pad it",
    ),
    (LLAMA, 3, "tp=3 does not divide num_kv_heads=2: choose another"),
    (replace(GPT2, d_ff=14), 4, "tp=4 does not divide d_ff=14: choose another, or pad it"),
    (
        replace(GPT2, vocab_size=50),
        4,
        "tp=4 does not divide vocab_size=50: choose another, or pad it",
    ),
]


@pytest.mark.parametrize("config, n, message", ILLEGAL, ids=[case[2] for case in ILLEGAL])
def test_a_degree_that_does_not_divide_is_named(config, n, message):
    with pytest.raises(ValueError, match=message):
        tensor_parallel.rank_config(config, n)
    with pytest.raises(RankError, match=message):
        ranks(n).run(lambda rank: tensor_parallel.parallelize(GPT(config), rank.comm("tp")))


def test_what_else_makes_no_sense_is_named():
    def program(rank, make):
        return make(rank.comm("tp"))

    def passed(comm):
        model = tensor_parallel.parallelize(GPT(GPT2), comm, sequence=True)
        model.loss(*(side[:, :7] for side in ROWS))

    def long(comm):
        tensor_parallel.parallelize(GPT(replace(GPT2, seq_len=6)), comm).loss(*ROWS)

    def again(comm):
        tensor_parallel.parallelize(tensor_parallel.parallelize(GPT(GPT2), comm), comm)

    def of_tokens(comm):
        tensor_parallel.parallelize(context_parallel.distribute(GPT(GPT2), comm), comm)

    layers = tensor_parallel
    wrong = {
        "tp=4 does not divide a sequence of 7 tokens: cut it to 4 tokens or pad it to 8": passed,
        "tp=4 does not divide a sequence of 5 tokens: cut it to 4 tokens or pad it to 8": lambda comm: (
            layers.scatter_to(torch.ones(1, 5, 2), comm)
        ),
        "12 tokens do not fit seq_len=6": long,
        "takes a whole labutils.model.GPT, got ParallelGPT": again,
        "takes a whole labutils.model.GPT, got ContextGPT": of_tokens,
        "the head of this tied model has a weight of its own: give it tied=False": lambda comm: (
            tensor_parallel.parallelize(quantization.quantized(GPT(GPT2), torch.Tensor.round), comm)
        ),
        "tp=4 does not divide 6 outputs: pad them to 8": lambda comm: layers.ColumnLinear.from_full(
            nn.Linear(4, 6), comm
        ),
        "tp=4 does not divide 2 inputs: pad them to 4": lambda comm: layers.RowLinear.from_full(
            nn.Linear(2, 4), comm
        ),
        "tp=4 does not divide 3 heads: pad them to 4": lambda comm: layers.ColumnLinear.from_full(
            nn.Linear(4, 12), comm, heads=3
        ),
        "tp=4 does not divide 50 words: pad them to 52": lambda comm: (
            layers.VocabEmbedding.from_full(nn.Embedding(50, 4), comm)
        ),
    }
    for message, make in wrong.items():
        with pytest.raises(RankError, match=message):
            ranks(4).run(program, make)


# ── dropout ────────────────────────────────────────────────────────────────────────────────────────────────────────


def masks(rank, sequence):
    """What dropout leaves of ones: of the embedding, of a layer, of attention, in two passes."""
    seen = []

    def attend(q, k, v, dropout):
        seen.append(nn.functional.dropout(torch.ones(40), dropout))
        return q

    config = replace(GPT2, num_layers=1, dropout=0.5)
    model = GPT(config, attention=attend, generator=rank.generator)
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    for _ in range(2):
        seen.append(model.dropout(torch.ones(40)))
        seen.append(model.blocks[0].dropout(torch.ones(40)))
        model.loss(*ROWS)
    model.eval()
    assert model.dropout(torch.ones(3)).sum() == 3
    return torch.stack(seen)


@each_way
def test_dropout_agrees_where_it_must_and_differs_where_it_must(sequence):
    first, again = (grid().run(masks, sequence) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))  # whatever the timing
    assert all(len(each.unique(dim=0)) == len(each) for each in first)  # anew in every pass
    stream, attention = [0, 1, 3, 4], [2, 5]
    for (i, one), (j, other) in ((a, b) for a in enumerate(first) for b in enumerate(first)):
        if i < j:
            alike = i // 2 == j // 2 and not sequence  # the same tokens: one data-parallel rank
            assert torch.equal(one[stream], other[stream]) == alike
            assert not any(torch.equal(one[k], other[k]) for k in attention)


def test_dropout_leaves_torchs_own_random_numbers_alone():
    config = replace(GPT2, num_layers=1, dropout=0.5)

    def program(rank):
        model = GPT(config, generator=rank.generator)
        before = torch.get_rng_state()
        tensor_parallel.parallelize(model, rank.comm("tp")).loss(*ROWS)
        return torch.equal(torch.get_rng_state(), before)

    assert ranks(1).run(program) == [True]


# ── kept ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def saved(rank, config, sequence, dtype, attention):
    model = GPT(config, attention=attention).to(dtype)
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    tokens, targets = torch.zeros(2, 3, config.seq_len, dtype=torch.long).unbind()
    return measure.saved_activations(lambda: model.loss(tokens.clone(), targets.clone()), model)


def paper(b, s, h, a, t, sequence):
    """Korthikanti's bytes of a layer, and what PyTorch keeps beyond them: masks in two bytes, the norms' statistics."""
    found = memory.korthikanti(b=b, s=s, h=h, a=a, t=t, sequence=sequence).total
    equation = 34 * s * b * h // t if sequence else 10 * s * b * h + 24 * s * b * h // t
    assert found == equation + 5 * a * s * s * b // t
    tokens = s // t if sequence else s
    return found + 2 * tokens * b * h + a * s * s * b // t + 2 * 2 * tokens * b * 2


def of_layers(ledger):
    return sum(line.amount for line in ledger if line.name.startswith("blocks."))


@each_way
@pytest.mark.parametrize("t", [2, 4, 8])
def test_korthikantis_equations_2_to_4_are_what_autograd_keeps(t, sequence):
    sizes = dict(d_model=16, num_heads=8, d_ff=64, vocab_size=24, seq_len=16, dropout=0.1)
    config = ModelConfig(num_layers=1, **sizes)
    formula = kept(config, t, plan(sequence, rows=3, precision="bf16"))
    assert of_layers(formula) == paper(b=3, s=16, h=16, a=8, t=t, sequence=sequence)
    for found in ranks(t).run(saved, config, sequence, torch.bfloat16, "plain"):
        assert formula.diff(found).unexplained == 0, formula.diff(found)


@each_way
@pytest.mark.parametrize("kind, n", [case for case in CASES if case[1] > 1])
def test_what_every_variant_keeps(kind, n, sequence):
    """Grouped queries, SwiGLU, RMSNorm, the fused kernel: beyond the paper, and to the byte."""
    for attention in ("plain", "sdpa"):
        config = replace(ALL[kind], d_head=4, num_layers=1)
        formula = kept(config, n, plan(sequence, 3, "fp32", attention=attention))
        for found in ranks(n).run(saved, config, sequence, torch.float32, attention):
            assert formula.diff(found).unexplained == 0, formula.diff(found)


@pytest.fixture
def bf16():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@each_way
def test_a_layer_of_gpt_3_on_one_of_8_ranks(sequence, bf16):
    """175B at its full width, dry: bytes sent and kept by formula, and the paper's."""
    whole = ModelConfig.named("gpt3-175b")
    config = replace(whole, num_layers=1, vocab_size=51_200, dropout=0.1)
    s, h, a = config.letters("s h a")

    def program(rank):
        model = tensor_parallel.parallelize(GPT(config), rank.comm("tp"), sequence)
        tokens, targets = torch.zeros(2, 1, s, dtype=torch.long).unbind()
        losses = []

        def forward():
            losses.append(model.loss(tokens.clone(), targets.clone()))

        held = measure.saved_activations(forward, model)
        losses[0].backward()
        return held

    train = plan(sequence, rows=1, precision="bf16")
    with World(Mesh(tp=8), engine="dry") as dry:
        found = dry.run(program, rank=5)
        predicted = predict.sent(config, train, Mesh(tp=8), 5)
        assert predicted.diff(in_steps(dry.ledger)).unexplained == 0
    formula = kept(config, 8, train)
    assert formula.diff(found).unexplained == 0, formula.diff(found)
    assert of_layers(found) == paper(b=1, s=s, h=h, a=a, t=8, sequence=sequence)


def test_the_volume_is_four_all_reduces_or_eight_halves():
    """Of one layer, in b·s·h numbers and (n−1)/n of them a half; and two gathers more, of what is not kept whole."""
    half = 2 * 12 * 8 * 4 * 3 // 4
    assert of_one_layer(False) == {"all_reduce forward": 4 * half, "all_reduce backward": 4 * half}
    assert of_one_layer(True) == {
        "all_gather forward": 2 * half,
        "reduce_scatter forward": 2 * half,
        "all_gather backward": (2 + 2) * half,
        "reduce_scatter backward": 2 * half,
    }


def of_one_layer(sequence):
    """What a model of two layers sends more than one of one, but for gradients."""
    train = plan(sequence, precision="fp32")
    one, two = (
        predict.sent(replace(LLAMA, num_layers=L), train, Mesh(tp=4)).by("name") for L in (1, 2)
    )
    more = {name: two[name] - one[name] for name in two if name != "gradients"}
    return {name: nbytes for name, nbytes in more.items() if nbytes}


# ── on a mesh with data parallelism ────────────────────────────────────────────────────────────────────────────────


def on_a_grid(rank, sequence):
    """Two replicas with a sequence each, of two tensor-parallel ranks."""
    model = build(LLAMA, rank.rank)
    tensor_parallel.parallelize(model, comm := rank.comm("tp"), sequence)
    mine = [side[rank.coords["dp"], None] for side in (ROWS[0], ROWS[0].flip(1))]
    replica = data_parallel.replicate(model, rank.comm("dp"))
    model.loss = lambda x, y: tensor_parallel.cross_entropy(replica(x), y, comm)
    return steps(model, adamw(model), *mine)


@each_way
def test_replicas_need_not_know_of_it(sequence):
    """With ZeRO it is the table's business (test_compositions)."""
    whole = build(LLAMA, 0)
    _, *expected = steps(whole, adamw(whole), ROWS[0], ROWS[0].flip(1))
    results = grid().run(on_a_grid, sequence)
    for group in (results[:2], results[2:]):
        assert_equal([(0.0, *result[1:]) for result in group], (0.0, *expected))


# ── what the lab shows ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_comparison_sees_a_gradient_that_is_not_summed(monkeypatch):
    config = replace(GPT2, num_layers=1)
    fine = rigs.tensor_parallel.compared(ranks(2), config, sequence=True)
    assert fine.equal and (fine.sent_unexplained, fine.kept_unexplained) == (0, 0)
    assert str(fine).split() == [
        "2",
        "True",
        "True",
        *str(fine).split()[3:5],
        "0",
        *str(fine).split()[6:8],
        "0",
    ]
    monkeypatch.setattr(tensor_parallel.layers, "copy_to", lambda x, *_: x)
    broken = rigs.tensor_parallel.compared(ranks(2), config, sequence=True)
    assert not broken.equal and broken.sent_unexplained > 0


def test_a_dry_rank_keeps_what_the_paper_prints():
    t, sizes = 8, dict(d_model=16, num_heads=8, d_ff=64, vocab_size=24, seq_len=16, dropout=0.1)
    config = ModelConfig(num_layers=2, **sizes)
    dry, unexplained, each = rigs.tensor_parallel.at_full_size(config, t, t - 1, micro_batch=3)
    assert unexplained == 0 and dry.total > 2 * each
    assert each == memory.korthikanti(b=3, s=16, h=16, a=8, t=t, sequence=True).total
    assert torch.get_default_dtype() is torch.float32


@each_way
def test_the_picture_of_a_layer_is_what_it_keeps(sequence):
    """Widths times tokens, over n where cut, are the bytes of `predict.activations` but for numbers per token and head."""
    config, n = replace(GPT2, num_layers=1), 4
    s, h, a = config.letters("s h a")
    shares = tensor_parallel.layer_shares(config, sequence)
    drawn = sum(4 * s * h * width / (n if cut else 1) for _, width, cut in shares)
    formula = kept(config, n, plan(sequence, rows=1, precision="fp32", attention="sdpa"))
    statistics = 2 * 2 * 4 * s // (n if sequence else 1) + 4 * a // n * s
    assert drawn == of_layers(formula) - statistics
    between = ["gather", "scatter"] if sequence else ["f", "g"]
    assert [name for name, width, _ in shares if not width] == 2 * between


LINK = Link(1e-6, 1e9)


def test_a_layer_waits_for_two_gathers_and_two_scatters():
    """Nothing hides; what it computes are its FLOPs, of which each rank has its part."""
    config, n, rate = replace(LLAMA, num_layers=1), 2, 1e9
    timeline = tensor_parallel.layer_timeline(config, n, LINK, flops=rate, micro_batch=3)
    half = (n - 1) * (LINK.latency + 3 * 12 * 8 * 2 / n / LINK.bandwidth)
    assert timeline.hidden == 0 and timeline.exposed == pytest.approx(4 * half)
    assert all(span.end > span.start for span in timeline.spans)  # what takes no time is not drawn
    flops = sum(f for name, f in anatomy.token_flops(config).items() if "blocks" in name)
    assert timeline.makespan - timeline.exposed == pytest.approx(3 * 12 * flops / n / rate)
    assert tensor_parallel.layer_timeline(config, 1, LINK, flops=rate).exposed == 0


@pytest.mark.parametrize("rate", [1e6, 1e9, 1e12])
def test_in_pieces_a_layer_takes_no_longer_and_no_less_than_either_alone(rate):
    config, n = replace(LLAMA, num_layers=1), 4
    config = replace(config, num_kv_heads=4)
    whole, pieces = (
        tensor_parallel.layer_timeline(config, n, LINK, flops=rate, pieces=each)
        for each in (False, True)
    )
    computed, sent = whole.makespan - whole.exposed, whole.exposed
    assert max(computed, sent) <= pieces.makespan * (1 + 1e-9)
    assert pieces.makespan <= whole.makespan * (1 + 1e-9)
    assert pieces.makespan - pieces.exposed == pytest.approx(computed)
    # A rank's own piece does not travel.
    assert sum(span.kind == "exchange" for span in pieces.spans) == 4 * (n - 1)
    if rate == 1e6:  # so slow that all but the last pieces hide
        assert pieces.hidden > 0.8


# ── words that the vocabulary does not have ────────────────────────────────────────────────────────────────────────


def beyond(rank, add, target_add):
    model = tensor_parallel.parallelize(build(GPT2, 0), rank.comm("tp"))
    tokens, targets = (x.clone() for x in ROWS)
    tokens[1, 5] += add
    targets[1, 5] += target_add
    return model.loss(tokens, targets).item()


@pytest.mark.parametrize(
    "add, target_add, said",
    [
        (1000, 0, r"token 10\d\d is not in the vocabulary of 24 words: use 0 … 23; do tokenizer"),
        (-70, 0, r"token -\d\d is not in the vocabulary of 24 words"),
        (0, 1000, r"target 10\d\d is not in the vocabulary of 24 words"),
        (0, -50, r"target -\d\d is not in the vocabulary of 24 words"),
    ],
)
def test_a_word_that_no_rank_has_is_an_error(add, target_add, said):
    """Each rank would take it for a word of the other's; one device raises an IndexError, too."""
    with pytest.raises(RankError, match="IndexError: " + said):
        ranks(2).run(beyond, add, target_add)
    with pytest.raises(IndexError):
        build(GPT2, 0).loss(ROWS[0] + add, ROWS[1].clamp(min=0) + target_add)


@pytest.mark.parametrize("word", [0, 23])
def test_the_first_and_the_last_word_are_words_and_100_is_no_target(word):
    def program(rank):
        model = tensor_parallel.parallelize(build(GPT2, 0), rank.comm("tp"))
        tokens, targets = torch.full((2, 4), word), torch.tensor([[word, -100, word, -100]] * 2)
        return model.loss(tokens, targets).item()

    tokens, targets = torch.full((2, 4), word), torch.tensor([[word, -100, word, -100]] * 2)
    expected = build(GPT2, 0).loss(tokens, targets).item()
    assert ranks(2).run(program) == [pytest.approx(expected, rel=1e-12)] * 2


# ── autocast ───────────────────────────────────────────────────────────────────────────────────────────────────────

REGIONS = {
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "ours": lambda: precision.autocast(torch.bfloat16),
}


def half_products(rank, region, config, sequence):
    model = build(config, 0, torch.float32)
    if rank is not None:
        tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    with REGIONS[region]():
        loss = model.loss(*ROWS)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("config", [GPT2, QWEN], ids=["gpt2", "qwen"])
@each_way
def test_autocast_goes_through_split_layers(sequence, config):
    """In torch's region and in ours, to the same bits, as near to one device as bf16 is; the loss is fp32."""
    found = [ranks(2).run(half_products, region, config, sequence) for region in REGIONS]
    whole, gradients = half_products(None, "torch", config, False)
    for (loss, ours), (again, theirs) in zip(*found, strict=True):
        assert loss.dtype == torch.float32 and torch.equal(loss, again)
        assert loss.item() == pytest.approx(whole.item(), rel=0.01)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name, wanted in gradients.items():
        mine = joined([result[1][name] for result in found[0]], wanted)
        assert mine.dtype == torch.float32
        assert (mine - wanted).norm() <= 0.05 * wanted.norm() + 1e-4, name


def test_a_hook_that_a_share_would_lose_is_refused_and_no_model_of_ranks_is_copied():
    """Rounded weights are kept, rounded inputs would not be."""

    def program(rank, inputs):
        model = quantization.quantized(build(LLAMA, 0), torch.round, inputs)
        return tensor_parallel.parallelize(model, rank.comm("tp")).loss(*ROWS).item()

    with pytest.raises(RankError, match=r"hooked to a Linear \(quantized inputs\?\) would be lost"):
        ranks(2).run(program, torch.round)
    expected = quantization.quantized(build(LLAMA, 0), torch.round).loss(*ROWS).item()
    assert ranks(2).run(program, None) == [pytest.approx(expected, rel=1e-12)] * 2

    def late(rank):
        model = tensor_parallel.parallelize(build(LLAMA, 0), rank.comm("tp"))
        quantization.quantized(model, torch.round)

    with pytest.raises(RankError, match="has no copy: copy the module first, and change the copy"):
        ranks(2).run(late)


@pytest.mark.parametrize("sequence", [False, True])
def test_routers_and_experts_are_whole_and_learn_from_all_tokens(sequence):
    config = replace(MIXED, num_experts=4, top_k=2, shared_expert=True, bias=True)
    losses, gradients, weights = alone(config)
    for mine, found, stepped in ranks(2).run(trained, config, sequence):
        assert mine == pytest.approx(losses, rel=1e-12)
        for name in (name for name in weights if "feed_forward." in name):
            torch.testing.assert_close(found[name], gradients[name], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(stepped[name], weights[name], rtol=1e-9, atol=1e-12)


def test_costs_of_experts_have_no_formula():
    config = replace(MIXED, num_experts=4, top_k=2)
    with pytest.raises(ValueError, match="no formula for num_experts=4 under tp: a dry run"):
        tensor_parallel.layer_timeline(config, 2, Link(0, 1), flops=1.0)
