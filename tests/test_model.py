import csv
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from labutils import config, model, pipeline
from labutils.config import ModelConfig
from labutils.model import GPT

TINY = dict(num_layers=2, d_model=24, num_heads=4, d_ff=40, vocab_size=31, seq_len=12)
LLAMA = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False, num_kv_heads=2)


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tokens(b=3, s=12, v=31):
    return torch.randint(v, (b, s))


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


with open(config.DATA / "models.csv", newline="", encoding="utf-8") as file:
    PUBLISHED = {row["name"]: int(row["published_params"]) for row in csv.DictReader(file)}


@pytest.mark.parametrize("name", [n for n in PUBLISHED if not ModelConfig.named(n).beyond])
def test_published_models_have_exactly_their_published_parameters(name):
    with torch.device("meta"):
        assert (
            count(GPT(ModelConfig.named(name)))
            == ModelConfig.named(name).num_params
            == PUBLISHED[name]
        )


@st.composite
def configs(draw):
    heads_per_group, g, d = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        2 * draw(st.integers(1, 4)),
    )
    experts = draw(st.integers(1, 4))
    return ModelConfig(
        num_layers=draw(st.integers(1, 3)), d_model=draw(st.integers(1, 12)), num_heads=heads_per_group * g, num_kv_heads=g, d_head=d,
        d_ff=draw(st.integers(1, 9)), vocab_size=draw(st.integers(1, 20)), seq_len=draw(st.integers(1, 9)),
        ffn=draw(st.sampled_from(["gelu", "swiglu"])), norm=draw(st.sampled_from(["layernorm", "rmsnorm"])),
        positions=draw(st.sampled_from(["learned", "rope"])), bias=draw(st.sampled_from([True, False, "qkv"])), tied=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])), num_experts=experts, top_k=draw(st.integers(1, experts)),
        shared_expert=experts > 1 and draw(st.booleans()),
    )  # fmt: skip


@given(configs(), st.sampled_from(["plain", "sdpa"]))
@settings(max_examples=60, deadline=None)
def test_any_config_builds_runs_and_has_num_params(cfg, attention):
    gpt = GPT(cfg, attention=attention)
    x = tokens(2, cfg.seq_len, cfg.vocab_size)
    assert count(gpt) == cfg.num_params
    assert gpt(x).shape == (2, cfg.seq_len, cfg.vocab_size)
    gpt.loss(x, x).backward()
    routed = cfg.num_experts > 1
    assert all(
        p.grad is not None and p.grad.isfinite().all()
        for n, p in gpt.named_parameters()
        if not (routed and "experts" in n)
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("positions", ["learned", "rope"])
def test_fused_attention_equals_plain(kv_heads, positions):
    cfg = ModelConfig(**TINY, num_kv_heads=kv_heads, positions=positions)
    plain, fused = GPT(cfg), GPT(cfg, attention="sdpa")
    fused.load_state_dict(plain.state_dict())
    x = tokens(s=9)
    for gpt in (plain, fused):
        gpt.loss(x, x).backward()
    torch.testing.assert_close(fused(x), plain(x))
    for (name, p), q in zip(plain.named_parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg=lambda m, name=name: f"{name}: {m}")


def test_attention_can_be_a_function():
    cfg = ModelConfig(**TINY)
    calls = []

    def own(q, k, v, dropout):
        calls.append(q.shape)
        return model.attend_plain(q, k, v, dropout)

    gpt = GPT(cfg, attention=own)
    gpt(tokens())
    assert calls == [(3, 4, 12, 6)] * 2


@pytest.mark.parametrize("attend", model.ATTEND.values())
def test_a_group_of_query_heads_shares_its_key_head(attend):
    q, k, v = (torch.randn(2, heads, 7, 4) for heads in (6, 2, 2))
    repeated = attend(q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), 0.0)
    torch.testing.assert_close(attend(q, k, v, 0.0), repeated)


@pytest.mark.parametrize("attend", model.ATTEND.values())
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_attention_computes_in_the_format_that_it_is_given(attend, dtype):
    assert attend(*torch.randn(3, 1, 2, 5, 4).to(dtype), 0.0).dtype == dtype


@pytest.mark.parametrize("options", [{}, LLAMA, dict(num_experts=3, top_k=2)])
def test_no_token_sees_a_later_one(options):
    gpt = GPT(ModelConfig(**TINY, **options))
    x = tokens()
    changed = x.clone()
    changed[:, 7:] = (x[:, 7:] + 1) % 31
    torch.testing.assert_close(gpt(changed)[:, :7], gpt(x)[:, :7], rtol=0, atol=1e-14)
    assert not torch.allclose(gpt(changed)[:, 7:], gpt(x)[:, 7:])


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
@settings(deadline=None)
def test_rotary_scores_depend_on_distance_alone(i, j, shift):
    rotary = model.Rotary(64, 8, base=100.0).double()
    q, k = torch.randn(8), torch.randn(8)

    def at(x, position):
        return rotary(x.expand(1, 1, 64, 8))[0, 0, position]

    torch.testing.assert_close(
        at(q, i + shift) @ at(k, j + shift), at(q, i) @ at(k, j), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(at(q, i).norm(), q.norm(), rtol=1e-5, atol=1e-5)


def test_rotary_turns_by_the_angle_of_the_paper():
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 4, 4)
    turned = model.Rotary(4, 4, base=100.0)(x)[0, 0, 3]
    expected = [
        math.cos(3),
        math.cos(0.3),
        math.sin(3),
        math.sin(0.3),
    ]  # pairs (0, 2) and (1, 3); base^(−2/4) = 0.1
    torch.testing.assert_close(turned, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_gpt2_block_equals_torch():
    cfg = ModelConfig(**TINY)
    block = GPT(cfg).blocks[0]
    peer = nn.TransformerEncoderLayer(
        24,
        4,
        40,
        dropout=0.0,
        activation=lambda x: F.gelu(x, approximate="tanh"),
        batch_first=True,
        norm_first=True,
    )
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)
    a, ff = block.attention, block.feed_forward
    with torch.no_grad():
        peer.self_attn.in_proj_weight.copy_(
            torch.cat([a.query.weight, a.key.weight, a.value.weight])
        )
        peer.self_attn.in_proj_bias.copy_(torch.cat([a.query.bias, a.key.bias, a.value.bias]))
    for theirs, ours in [
        (peer.self_attn.out_proj, a.output), (peer.linear1, ff.up), (peer.linear2, ff.down),
        (peer.norm1, block.attention_norm), (peer.norm2, block.feed_forward_norm),
    ]:  # fmt: skip
        theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 12, 24)
    torch.testing.assert_close(
        block(x),
        peer(x, src_mask=nn.Transformer.generate_square_subsequent_mask(12), is_causal=True),
    )


def test_llama_block_equals_its_formulas():
    cfg = ModelConfig(**TINY, **LLAMA | {"num_kv_heads": 4})
    gpt = GPT(cfg)
    block = gpt.blocks[0]
    for p in block.parameters():
        nn.init.normal_(p, std=0.3)

    def normed(x, norm):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight

    def turned(x):  # as a rotation of complex numbers
        half = x.shape[-1] // 2
        angle = torch.outer(torch.arange(12), 10000.0 ** (-torch.arange(half) / half))
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    x = torch.randn(1, 12, 24)
    n = normed(x, block.attention_norm)
    heads = []
    for i in range(4):
        q, k, v = (
            n @ part.weight[6 * i : 6 * i + 6].T
            for part in (block.attention.query, block.attention.key, block.attention.value)
        )
        scores = (turned(q) @ turned(k).mT / math.sqrt(6)).masked_fill(
            torch.ones(12, 12).triu(1).bool(), -math.inf
        )
        heads.append(scores.softmax(-1) @ v)
    y = x + torch.cat(heads, -1) @ block.attention.output.weight.T
    n, ff = normed(y, block.feed_forward_norm), block.feed_forward
    gate = n @ ff.gate.weight.T
    y = y + (gate * torch.sigmoid(gate) * (n @ ff.up.weight.T)) @ ff.down.weight.T
    torch.testing.assert_close(block(x), y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_routed_experts_equal_their_dense_evaluation(shared):
    cfg = ModelConfig(**TINY, num_experts=5, top_k=2, shared_expert=shared)
    moe = GPT(cfg).blocks[0].feed_forward
    for p in moe.parameters():
        nn.init.normal_(p, std=0.5)
    x = torch.randn(2, 6, 24)
    scores = moe.router(x)
    kept = scores >= scores.sort(-1, descending=True).values[..., 1:2]  # the two highest
    weights = scores.masked_fill(~kept, -math.inf).softmax(-1)
    dense = sum(weights[..., i, None] * expert(x) for i, expert in enumerate(moe.experts))
    torch.testing.assert_close(moe(x), dense + moe.shared(x) if shared else dense)


def test_loss_is_mean_cross_entropy_and_ignores_masked_targets():
    gpt = GPT(ModelConfig(**TINY))
    x, y = tokens(), tokens()
    y[0, :5] = -100
    kept = y != -100
    by_hand = -gpt(x).log_softmax(-1)[kept].gather(-1, y[kept][:, None]).mean()
    torch.testing.assert_close(gpt.loss(x, y), by_hand)
    assert gpt.loss(x, tokens()).item() == pytest.approx(math.log(31), abs=0.1)


def test_a_tied_head_is_the_embedding_and_collects_both_gradients():
    x = tokens()
    tied = GPT(ModelConfig(**TINY))
    untied = GPT(ModelConfig(**TINY, tied=False))
    assert tied.head.weight is tied.tokens.weight
    untied.load_state_dict(tied.state_dict())
    for gpt in (tied, untied):
        gpt.loss(x, x).backward()
    torch.testing.assert_close(
        tied.head.weight.grad, untied.head.weight.grad + untied.tokens.weight.grad
    )


@pytest.mark.parametrize("options", [{}, LLAMA, dict(num_experts=3, top_k=2)])
def test_what_a_model_saves_is_its_weights(options):
    """Tables of RoPE follow from the config; they would be missing in a file of another's."""
    gpt = GPT(ModelConfig(**TINY | options))
    assert gpt.state_dict().keys() == dict(gpt.named_parameters(remove_duplicate=False)).keys()


def test_initialization_is_gpt2s():
    cfg = ModelConfig(
        num_layers=8, d_model=128, num_heads=4, d_ff=512, vocab_size=500, seq_len=64, num_experts=2
    )
    gpt = GPT(cfg)
    for name, p in gpt.named_parameters():
        if p.dim() == 1:
            assert (p == (1 if name.endswith("norm.weight") else 0)).all(), name
        elif p.numel() > 1000:
            expected = (
                0.02 / math.sqrt(16)
                if name.endswith(("attention.output.weight", "down.weight"))
                else 0.02
            )
            assert p.std().item() == pytest.approx(expected, rel=0.05), name


def test_a_generator_decides_the_weights_alone():
    cfg = ModelConfig(**TINY)
    first = GPT(cfg, generator=torch.Generator().manual_seed(7))
    torch.rand(5)
    second = GPT(cfg, generator=torch.Generator().manual_seed(7))
    assert all(
        torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True)
    )


@pytest.mark.parametrize("attention", ["plain", "sdpa"])
def test_dropout_acts_in_training_alone(attention):
    gpt = GPT(ModelConfig(**TINY, dropout=0.3), attention=attention)
    x = tokens()
    assert not torch.allclose(gpt(x), gpt(x))
    gpt.eval()
    plain = GPT(ModelConfig(**TINY))
    plain.load_state_dict(gpt.state_dict())
    torch.testing.assert_close(gpt(x), plain(x))


def test_bad_input_is_named():
    cfg = ModelConfig(**TINY)
    with pytest.raises(ValueError, match="unknown attention 'flash': use 'plain', 'sdpa'"):
        GPT(cfg, attention="flash")
    with pytest.raises(ValueError, match="13 tokens do not fit seq_len=12"):
        GPT(cfg)(tokens(s=13))
    with pytest.raises(ValueError, match="d_head=3 is odd"):
        GPT(ModelConfig(**TINY, d_head=3, positions="rope"))


@pytest.mark.parametrize("word", [31, 1031, -1, -70])
def test_a_word_that_the_vocabulary_has_not_is_named(word):
    gpt, (x, y) = GPT(ModelConfig(**TINY)), (tokens(), tokens())
    remedy = "is not in the vocabulary of 31 words: use 0 … 30; do tokenizer and model belong"
    for call in (gpt.loss, pipeline.mean_cross_entropy):
        logits_or_tokens, wrong = (x, y.clone()) if call == gpt.loss else (gpt(x), y.clone())
        wrong[0, 3], wrong[1, 5] = -100, word
        with pytest.raises(IndexError, match=f"^target {word} {remedy}") as error:
            call(logits_or_tokens, wrong)
        assert error.value.__suppress_context__  # not torch's own above it
    x[2, 3] = word
    with pytest.raises(IndexError, match=f"^token {word} {remedy}"):
        gpt.loss(x, y)


def test_the_last_word_is_one_and_100_below_zero_is_no_target():
    gpt, x = GPT(ModelConfig(**TINY)), torch.full((2, 4), 30)
    y = torch.tensor([[30, -100, 30, 0]] * 2)
    each = model.cross_entropy(gpt(x), y, reduction="none")
    assert each.shape == (8,) and (each == 0).tolist() == [False, True, False, False] * 2
    assert gpt.loss(x, y).item() == pytest.approx(each.sum().item() / 6, rel=1e-12)
