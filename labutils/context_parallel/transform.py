"""`distribute`: a whole GPT that works on one rank's tokens of each sequence."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from labutils import units
from labutils.config import ModelConfig
from labutils.context_parallel.attention import kv_heads, ring_attention, ulysses_attention
from labutils.context_parallel.sequence import layout
from labutils.model import GPT
from labutils.model import IGNORED as _IGNORED
from labutils.world import Comm

_ATTENTION = {"ring": ring_attention, "ulysses": ulysses_attention}


class ContextGPT(GPT):
    """A GPT whose ranks share out the tokens of each sequence; made by `distribute`. It is given
    whole sequences, and a call returns the logits of this rank's tokens, [b, s_c, v]."""

    comm: Comm
    kind: str

    def forward(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s_c v"]:
        here = layout(tokens.shape[1], self.comm.size, self.kind)
        return super().forward(here.split(tokens, self.comm.rank))

    def loss(self, tokens: Int[Tensor, "b s"], targets: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token of the whole sequences, the same on all ranks; a
        target of −100 counts for nothing."""
        return mean_loss(self(tokens), targets, self.comm, self.kind)


def mean_loss(
    logits: Float[Tensor, "b s_c v"],
    targets: Int[Tensor, "b s"],
    comm: Comm,
    kind: str = "zigzag",
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats per token of whole sequences, from the logits of each rank's
    tokens and all targets; those of −100 count for nothing.

    kind: how the sequences are laid out, "contiguous" or "zigzag"

    Invariant: the mean over ranks of the gradients of this loss is the gradient of the whole one,
    however many targets each rank has. So what averages gradients for data parallelism is right.
    """
    mine = layout(targets.shape[1], comm.size, kind).split(targets, comm.rank)
    each = F.cross_entropy(logits.flatten(0, 1), mine.flatten(), reduction="none")
    total = each.sum(dtype=torch.promote_types(each.dtype, torch.float32))  # fp16 ends at 65,504
    count = (targets != _IGNORED).sum()  # of all ranks: the mean of ranks' means would be wrong
    return _SumOverRanks.apply(total / count, comm).to(each.dtype)  # fp32 under autocast


class _SumOverRanks(torch.autograd.Function):
    """The sum of a number over ranks. Each has it, and weighs it alike: n times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.n = comm.size
        with comm.record("loss"):
            return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.n, None


def distribute(
    module: GPT,
    comm: Comm,
    *,
    attention: str = "ring",
    kind: str = "zigzag",
    block: int | None = None,
) -> ContextGPT:
    """The GPT, changed in place so that each rank computes its tokens of the sequences it is given.

    Its parameters stay whole. Each rank's gradients are of its own tokens; their mean over the
    ranks is right, as of replicas: `data_parallel.replicate`, `zero.shard` or `zero.Optimizer` over
    rank.comm("dp", "cp") are to follow, and make weights alike.

    module: a whole GPT, without dropout
    attention: "ring" or "ulysses"
    kind: the layout of the tokens, "contiguous" or "zigzag"
    block: as in `ring_attention`; one that is large makes a dry run short

    Cost: bytes sent as in `predict.sent`; of activations each rank keeps those of s/n tokens.
    Invariant: loss, gradients and steps are those of the whole model, up to rounding.
    Raises ValueError for dropout, whose masks would need the place of each token, and for heads
    that Ulysses cannot share out; in a pass, for a sequence that the ranks cannot.
    """
    share_tokens(module, comm, attention=attention, kind=kind, block=block)
    module.__class__ = ContextGPT
    assert isinstance(module, ContextGPT)
    module.comm = comm
    module.kind = kind
    return module


def share_tokens(
    module: GPT,
    comm: Comm,
    *,
    attention: str,
    kind: str,
    block: int | None = None,
) -> GPT:
    """The GPT, changed in place so that it takes this rank's tokens of each sequence, with their
    places, and its attention those of all ranks. It is given the tokens that `layout` gives the
    rank, and returns their logits.

    That is all of `distribute` but for cutting sequences and the loss; tensor parallelism, stages
    and the rest can follow, as after a plain GPT. `module`, `kind`, `block` and errors are those of
    `distribute`.
    """
    if type(module) is not GPT or module.places_ is not None:  # nor a share of one
        got = type(module).__name__
        again = ", which has its tokens" if type(module) is GPT else ""
        raise TypeError(f"distribute takes a whole labutils.model.GPT, got {got}{again}")
    units.instance(comm, Comm, "distribute")
    require(module.config, comm.size, attention, kind)
    if module.config.dropout:
        remedy = "build the model with dropout=0"
        raise ValueError(f"dropout={module.config.dropout} on distributed tokens: {remedy}")
    attend = functools.partial(_ATTENTION[attention], comm=comm, kind=kind, block=block)
    module.places_ = functools.partial(_places, comm, kind)
    layers: list[Any] = list(module.get_submodule("blocks").children())
    for layer in layers:
        layer.attention.attend = functools.partial(_attend, attend)
        if layer.attention.rotary is not None:  # one for all layers
            layer.attention.rotary.places_ = module.places_
    return module


def _places(comm: Comm, kind: str, s: int) -> tuple[int, ...]:
    """Where in their sequence the s tokens stand that this rank has."""
    return layout(s * comm.size, comm.size, kind).positions(comm.rank)


def _attend(attend: Any, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention as the model calls it; `distribute` sees that there is no dropout."""
    return attend(q, k, v)


def require(model: ModelConfig, n: int, attention: str, kind: str) -> None:
    """Nothing, or a ValueError that says what n ranks cannot do with this model, by this kind of
    attention and of layout."""
    if attention not in _ATTENTION:
        known = " or ".join(map(repr, _ATTENTION))
        raise ValueError(f"unknown attention over ranks {attention!r}: use {known}")
    layout(2 * n, n, kind)
    if attention == "ulysses":
        kv_heads(model.num_heads, model.num_kv_heads, n)
