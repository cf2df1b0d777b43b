"""The one GPT of the course, built from a `ModelConfig`: every lab trains or shards this model."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from labutils import randomness, units
from labutils.config import ModelConfig

ROPE_BASE = 10_000.0  # of the angles by which RoPE turns pairs of numbers
INIT_STD = 0.02  # of the weights, as GPT-2 draws them
IGNORED = -100  # the target that cross-entropy leaves out

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
Places = Callable[[int], Sequence[int]]


def attend_plain(
    q: Float[Tensor, "b a s d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    dropout: float = 0.0,
) -> Float[Tensor, "b a s d"]:
    """Causal softmax(q·kᵀ/√d)·v with every s×s matrix written out.

    The a/g query heads of a group share one key–value head. `dropout` is the chance of a weight to
    be zero.

    Source: Vaswani et al. 1706.03762, eq. 1; groups as in Ainslie et al. 2305.13245.
    """
    b, a, s, d = q.shape
    # A group's queries are stacked into one tall matrix: k and v are never repeated.
    stacked = b, k.shape[1], -1, d
    scores = (q.reshape(stacked) @ k.mT).view(b, a, s, s) / math.sqrt(d)
    # Added, not filled in: an addition keeps nothing for the backward pass.
    future = torch.full((s, s), -math.inf, dtype=scores.dtype, device=scores.device).triu(1)
    weights = randomness.dropout((scores + future).softmax(-1), dropout)
    return (weights.view(b, k.shape[1], -1, s) @ v).view(b, a, s, d)


def attend_sdpa(
    q: Float[Tensor, "b a s d"],
    k: Float[Tensor, "b g s d"],
    v: Float[Tensor, "b g s d"],
    dropout: float = 0.0,
) -> Float[Tensor, "b a s d"]:
    """`attend_plain` of the same q, k, v and dropout through PyTorch's fused kernels, which keep no
    s×s matrix where they can.
    """
    return F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    )


ATTEND: dict[str, Attend] = {"plain": attend_plain, "sdpa": attend_sdpa}  # by name


class Rotary(nn.Module):
    """RoPE: turns the pair (j, j + d/2) of a head by position · base^(−2j/d).

    So q·k depends on the distance of the two alone.

    Source: Su et al. 2104.09864, section 3.2.2, with the halves paired as in the released Llama
    weights.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, seq_len: int, d_head: int, base: float = ROPE_BASE) -> None:
        super().__init__()
        if d_head % 2:
            remedy = "RoPE turns pairs of numbers, so give the heads an even width"
            raise ValueError(f"d_head={d_head} is odd: {remedy}")
        angle = torch.outer(torch.arange(seq_len), base ** (-torch.arange(0, d_head, 2) / d_head))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.places_: Places | None = None  # as of the GPT
        self.picked: tuple[Tensor, Tensor, Tensor] | None = None

    def rows(self, s: int) -> tuple[Float[Tensor, "s half"], Float[Tensor, "s half"]]:
        """The tables where the s tokens at hand stand; picked out once for all layers and steps."""
        if self.places_ is None:
            return self.cos[:s], self.sin[:s]
        if self.picked is None or self.picked[0] is not self.cos or len(self.picked[1]) != s:
            at = torch.tensor(self.places_(s), device=self.cos.device)
            self.picked = self.cos, self.cos[at], self.sin[at]
        return self.picked[1:]

    def forward(self, x: Float[Tensor, "b heads s d"]) -> Float[Tensor, "b heads s d"]:
        cos, sin = (table.to(x.dtype) for table in self.rows(x.shape[2]))
        left, right = x.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention with a query heads and g key–value heads."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None, attend: Attend) -> None:
        super().__init__()
        h, a, g, d = config.letters("h a g d")
        self.d_head = d
        self.rotary = rotary
        self.attend = attend
        self.dropout = config.dropout
        self.query = nn.Linear(h, a * d, bias=bool(config.bias))
        self.key = nn.Linear(h, g * d, bias=bool(config.bias))
        self.value = nn.Linear(h, g * d, bias=bool(config.bias))
        self.output = nn.Linear(a * d, h, bias=config.bias is True)

    def forward(self, x: Float[Tensor, "b s h"]) -> Float[Tensor, "b s h"]:
        # −1 heads: a tensor-parallel rank holds only some of them.
        q, k, v = (
            part(x).unflatten(-1, (-1, self.d_head)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        dropout = self.dropout if self.training else 0.0
        # Torch's kernels, and an attention of the learner's own, name no generator.
        with randomness.own() if dropout else nullcontext():
            heads = self.attend(q, k, v, dropout)
        return self.output(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """down(gelu(up·x)), or SwiGLU's down(silu(gate·x) · up·x).

    Source: GPT-2's tanh GELU (Hendrycks & Gimpel 1606.08415); SwiGLU: Shazeer 2002.05202, eq. 6.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        h, f = config.letters("h f")
        self.gate = nn.Linear(h, f, bias=config.bias is True) if config.ffn == "swiglu" else None
        self.up = nn.Linear(h, f, bias=config.bias is True)
        self.down = nn.Linear(f, h, bias=config.bias is True)

    def forward(self, x: Float[Tensor, "... h"]) -> Float[Tensor, "... h"]:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts(nn.Module):
    """E feed-forward layers, of which each token visits the k that its router scores highest.

    They are weighted by a softmax over those k. With `shared` there is one more, which every token
    visits, without a weight.

    Source: Mixtral 2401.04088; shared: DeepSeekMoE 2401.06066.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.d_model, config.num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(config.num_experts))
        self.shared = FeedForward(config) if config.shared_expert else None

    def forward(self, x: Float[Tensor, "b s h"]) -> Float[Tensor, "b s h"]:
        tokens = x.flatten(0, 1)
        scores, chosen = self.router(tokens).topk(self.top_k)
        weights = scores.softmax(-1)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            token, slot = (chosen == i).nonzero(as_tuple=True)
            weighted = expert(tokens[token]) * weights[token, slot, None]
            # Under autocast this is in half precision, and the stream is in fp32.
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out.view_as(x) if self.shared is None else out.view_as(x) + self.shared(x)


class Dropout(nn.Dropout):
    """Dropout of what a rank has, by its own random numbers; of what a group of ranks has, each the
    same tensor, by those that the `group`, a Comm, has in common."""

    group: Any = None

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        generator = self.group.generator if self.group and self.training else None
        return randomness.dropout(x, self.p, self.training, generator)


class Embedding(nn.Embedding):
    """PyTorch's embedding. IndexError for a token that is no word, by its number."""

    def forward(self, tokens: Int[Tensor, "..."]) -> Float[Tensor, "... h"]:
        try:
            return super().forward(tokens)
        except IndexError:  # looked for only now: a step costs nothing more
            check_words("token", tokens, self.num_embeddings)
            raise


class Block(nn.Module):
    """One layer: each half reads the normalized residual stream and adds to it (pre-norm)."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, rotary, attend)
        self.feed_forward_norm = _norm(config)
        kind: type[nn.Module] = MixtureOfExperts if config.num_experts > 1 else FeedForward
        self.feed_forward = kind(config)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "b s h"]) -> Float[Tensor, "b s h"]:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.feed_forward_norm(x)))


class GPT(nn.Module):
    """A decoder-only transformer: tokens in, one score per word of the vocabulary and position out.

    `attention` is "plain", "sdpa", or any function of (q, k, v, dropout) such as a ring attention
    of your own.

    >>> sizes = dict(num_layers=2, d_model=32, num_heads=4, d_ff=128)
    >>> config = ModelConfig(**sizes, vocab_size=65, seq_len=16)
    >>> model = GPT(config)
    >>> model(torch.zeros(3, 16, dtype=torch.long)).shape
    torch.Size([3, 16, 65])
    >>> sum(p.numel() for p in model.parameters()) == config.num_params
    True

    Invariant: the parameters number exactly config.num_params; inside `with torch.device("meta")`
    that costs no memory at any size.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        attention: str | Attend = "plain",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not callable(attention) and attention not in ATTEND:
            known = ", ".join(map(repr, ATTEND))
            own = "a function of (q, k, v, dropout)"
            raise ValueError(f"unknown attention {attention!r}: use {known} or {own}")
        attend = attention if callable(attention) else ATTEND[attention]
        units.instance(config, ModelConfig, "GPT")
        config.require_gpt()
        self.config = config
        self.places_: Places | None = None  # context parallelism has its own
        with _Undrawn():
            self._build(attend)
        self.initialize(generator)

    def _build(self, attend: Attend) -> None:
        config = self.config
        h, L, s, v = config.letters("h L s v")
        self.tokens = Embedding(v, h)
        self.positions = nn.Embedding(s, h) if config.positions == "learned" else None
        # One table, shared by all layers.
        rotary = Rotary(s, config.d_head) if config.positions == "rope" else None
        self.dropout = Dropout(config.dropout)
        blocks = nn.ModuleList(Block(config, rotary, attend) for _ in range(L))
        self.blocks = cast("Sequence[Block]", blocks)
        self.norm = _norm(config)
        self.head = nn.Linear(h, v, bias=False)
        if config.tied:
            self.head.weight = self.tokens.weight

    @torch.no_grad()
    def initialize(self, generator: torch.Generator | None = None) -> None:
        """Draws the weights as GPT-2 does: N(0, 0.02²), biases zero.

        What adds to the residual stream is smaller by √(2L). Without a generator ranks draw from
        one that all have in common, and a single device from torch's own.

        Source: Radford et al. 2019, section 2.3 (L layers add to the stream twice each).
        """
        smaller = math.sqrt(2 * self.config.num_layers)
        generator = generator or randomness.alike(self.tokens.weight.device)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                adds_to_stream = name.endswith(("output.weight", "down.weight"))
                std = INIT_STD / smaller if adds_to_stream else INIT_STD
                parameter.normal_(0, std, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)

    def places(self, s: int) -> slice | Int[Tensor, " s"]:
        """Where in their sequence the s tokens stand that this model is given: at its beginning,
        but for a rank of context parallelism. ValueError for a sequence that is too long."""
        at = range(s) if self.places_ is None else self.places_(s)
        longest, needed = self.config.seq_len, max(at, default=-1) + 1
        if needed > longest:
            fits = f"{needed} tokens do not fit seq_len={longest}"
            raise ValueError(f"{fits}: cut the sequence or build a longer model")
        if self.places_ is None:
            return slice(s)
        return torch.tensor(at, device=self.tokens.weight.device)

    def embed(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s_or_s_t h"]:
        """The residual stream as it enters the first layer; of all tokens, but for a rank that has
        a share of them."""
        at = self.places(tokens.shape[1])
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + (self.positions.weight[at] if isinstance(at, slice) else self.positions(at))
        return self.dropout(x)

    def forward(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s v"]:
        check_tokens("GPT", tokens)
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Int[Tensor, "b s"], targets: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token; a target of −100 counts for nothing."""
        return cross_entropy(self(tokens), targets)


def cross_entropy(
    logits: Float[Tensor, "*tokens v"], targets: Int[Tensor, "*tokens"], reduction: str = "mean"
) -> Float[Tensor, "..."]:
    """Cross-entropy in nats; a target of −100 counts for nothing.

    reduction: "mean" or "sum" over the targets, or "none": [tokens]

    Raises IndexError for a target that is no word, ValueError where not each logit row has one.
    """
    if targets.is_floating_point() or logits.ndim < 2 or logits.shape[:-1] != targets.shape:
        got = f"{targets.dtype} {tuple(targets.shape)} for logits {tuple(logits.shape)}"
        raise ValueError(f"cross_entropy takes a whole number for each row of logits, got {got}")
    try:
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction=reduction)
    except IndexError:
        check_words("target", targets, logits.shape[-1], IGNORED)
        raise


def check_tokens(call: str, tokens: Tensor) -> None:
    """Raises TypeError or ValueError where `tokens` are no whole numbers, [b, s] with an s above 0;
    the error says that `call` takes them."""
    units.instance(tokens, Tensor, call)
    if tokens.dtype not in (torch.int64, torch.int32) or tokens.ndim != 2 or not tokens.shape[1]:
        got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
        raise ValueError(f"{call} takes tokens (b, s) of int64 or int32, got {got}: convert them")


def check_words(what: str, words: Tensor, v: int, ignored: int = 0) -> None:
    """Raises IndexError for a number among `words` that is none of v words, nor `ignored`; the
    error calls them `what`.

    On a GPU it is an assertion there, for which nobody waits; fake tensors have no values.
    """
    if isinstance(words, FakeTensor) or words.is_meta or not words.numel():
        return
    wrong = ((words < 0) | (words >= v)) & (words != ignored)
    if words.is_cuda:
        torch._assert_async(~wrong.any(), f"a {what} is none of {v} words")
    elif wrong.any():
        first = words[wrong][0].item()
        remedy = f"use 0 … {v - 1}; do tokenizer and model belong together?"
        found = f"{what} {first} is not in the vocabulary of {v} words"
        raise IndexError(f"{found}: {remedy}") from None


class _Undrawn(TorchFunctionMode):
    """Leaves the weights of new layers as memory comes, where torch would draw values from its own
    generator, only for `initialize` to draw them again."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if getattr(func, "__module__", "") == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model)
    return nn.RMSNorm(config.d_model, eps=1e-5)
