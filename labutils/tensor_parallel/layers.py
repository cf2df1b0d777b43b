"""Megatron's layers: f and g, linear layers split by column and by row, a vocabulary shared out.

A dim written f_t, v_t or s_t is this rank's share of it; without a subscript it is whole, and the
tensor the same on all ranks. The residual stream is [b, s, h], or [b, s_t, h] where a layer is
given `sequence`.

Source: Shoeybi et al. 1909.08053, section 3; Korthikanti et al. 2205.05198, section 4.2.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from labutils import precision
from labutils.model import IGNORED as _IGNORED
from labutils.model import check_words as _check_words
from labutils.world import Comm, marked

Same = Shaped[Tensor, "*shape"]

# ── f and g, and their conjugates along the sequence ─────────────────────────────────────────────


def copy_to(x: Same, comm: Comm, name: str = "all_reduce backward") -> Same:
    """Megatron's f: x as it is, on its way into a split region; backward an all-reduce sums its
    gradient. So does it for a parameter that ranks hold alike and each uses for a part of the work,
    which is booked under the `name` "gradients"."""
    return _Conjugates.apply(x, _itself, functools.partial(_summed, comm, name))


def reduce_from(x: Same, comm: Comm) -> Same:
    """Megatron's g: the sum of x over ranks, by an all-reduce, on its way out of a split region;
    backward its gradient as it is."""
    return _Conjugates.apply(x, functools.partial(_summed, comm, "all_reduce forward"), _itself)


def gather_from(x: Float[Tensor, "b s_t h"], comm: Comm) -> Float[Tensor, "b s h"]:
    """f of sequence parallelism: the tokens of all ranks, by an all-gather; backward a
    reduce-scatter. Together they send what one all-reduce does."""
    gather = functools.partial(_gathered, comm, "forward")
    return _Conjugates.apply(x, gather, functools.partial(_scattered, comm, "backward"))


def scatter_to(x: Float[Tensor, "b s h"], comm: Comm) -> Float[Tensor, "b s_t h"]:
    """g of sequence parallelism: this rank's tokens of the sum over ranks, by a reduce-scatter;
    backward an all-gather. ValueError where the ranks do not divide the tokens."""
    share_of_tokens(x.shape[1], comm)
    scatter = functools.partial(_scattered, comm, "forward")
    return _Conjugates.apply(x, scatter, functools.partial(_gathered, comm, "backward"))


def share_of_tokens(s: int, comm: Comm) -> int:
    """How many of s tokens each rank has.

    Raises ValueError where the ranks do not divide s.
    """
    n = comm.size
    if s % n:
        remedy = f"cut it to {s - s % n} tokens or pad it to {s + -s % n}"
        raise ValueError(f"tp={n} does not divide a sequence of {s} tokens: {remedy}")
    return s // n


def _itself(x: Tensor) -> Tensor:
    return x.view_as(x)


def _summed(comm: Comm, name: str, x: Tensor) -> Tensor:
    with comm.record(name):
        return comm.all_reduce(x)


def _gathered(comm: Comm, phase: str, x: Tensor) -> Tensor:
    """All tokens; a comm deals in rows, and tokens are the second dim."""
    with comm.record(f"all_gather {phase}"):
        return comm.all_gather(x.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


def _scattered(comm: Comm, phase: str, x: Tensor) -> Tensor:
    """This rank's tokens of the sum."""
    with comm.record(f"reduce_scatter {phase}"):
        return comm.reduce_scatter(x.transpose(0, 1).contiguous()).transpose(0, 1).contiguous()


class _Conjugates(torch.autograd.Function):
    """One function forward, another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable, back: Callable) -> Tensor:
        ctx.back = back
        return ahead(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


class _GatheredProducts(torch.autograd.Function):
    """x·Wᵀ for each W, with an x that is gathered, used and let go: what is kept for the backward
    pass is this rank's tokens, which are gathered again there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.comm = comm
        ctx.save_for_backward(x, *weights)
        whole = _gathered(comm, "forward", x)
        return tuple(F.linear(whole, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        trained, x_grad = ctx.needs_input_grad[2:], None
        found: list[Tensor | None] = [None] * len(weights)
        if ctx.needs_input_grad[0]:
            products = (grad @ weight for grad, weight in zip(grads, weights, strict=True))
            x_grad = _scattered(ctx.comm, "backward", functools.reduce(torch.add, products))
        if any(trained):
            rows = _gathered(ctx.comm, "backward", x).flatten(0, 1)
            pairs = zip(grads, trained, strict=True)
            found = [grad.flatten(0, 1).mT @ rows if learns else None for grad, learns in pairs]
        return x_grad, None, *found


# ── layers ────────────────────────────────────────────────────────────────────────────────────────


class Split(nn.Module):
    """A layer of which this rank has a share, made of one that all ranks have whole. With
    `sequence`, its side towards the residual stream is this rank's tokens.

    products: of x and the weight, where they are not F.linear's but of fewer bits
    """

    def __init__(self, whole: Any, comm: Comm, sequence: bool = False) -> None:
        super().__init__()
        self.comm = comm
        self.sequence = sequence
        self.products: nn.Module | None = None
        if "weight" not in whole._parameters and not hasattr(type(whole), "weight"):
            why = f"{type(whole).__name__} has no matrix of numbers that could be cut"
            remedy = (
                "parallelize plain linear layers, or keep these and share out the batch by "
                "data_parallel.replicate or zero.Optimizer"
            )
            raise TypeError(f"{why}: {remedy}")
        if whole._forward_pre_hooks or whole._forward_hooks:
            what = f"what was hooked to a {type(whole).__name__} (quantized inputs?) would be lost"
            raise TypeError(f"{what}: parallelize the model first, then hook to its shares")
        self.weight: Tensor = whole.weight
        self.bias: Tensor | None = getattr(whole, "bias", None)

    @classmethod
    def from_full(cls, whole: Any, comm: Comm, **options: Any) -> "Split":
        """This rank's share; ValueError where the ranks do not divide what is split, TypeError for
        a layer that has no matrix to split."""
        made = cls(whole, comm, **options)
        if hasattr(whole, "share_with"):
            whole.share_with(made)
        return made

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x·Wᵀ + bias."""
        if self.products is None:
            return F.linear(x, weight, bias)
        y = self.products(x, weight)
        return y if bias is None else y + bias

    def share(self, p: Tensor, dim: int, pieces: int, what: str, parts: int) -> nn.Parameter:
        """A copy of this rank's of so many `parts` of a parameter, which is cut along `dim`, never
        within one of its `pieces`; of fewer parts than ranks, neighbours have the same one.

        Raises ValueError where parts or pieces do not divide; it says `what` they are.
        """
        n, i = self.comm.size, self.comm.rank
        if n % parts or pieces % parts:
            padded = pieces + -pieces % n
            raise ValueError(f"tp={n} does not divide {pieces} {what}: pad them to {padded}")
        part = i * parts // n
        mine = p.detach().tensor_split(parts, dim)[part]
        made = nn.Parameter(mine.clone(memory_format=torch.contiguous_format), p.requires_grad)
        marked(made, p, shares=parts)
        vars(made)["cut"] = dim, part, parts  # where a snapshot has it
        return made


class ColumnLinear(Split):
    """A linear layer of whose outputs each rank computes its share: W[f_t, h], bias[f_t].

    In goes x[b, s, h], with `sequence` x[b, s_t, h]; out comes [b, s, f_t]. Layers that read the
    same x (`together`) bring it in once: one f, or one gather, for all. `heads` are not cut; of
    fewer heads than ranks, neighbours have the same one, and sum its gradient.
    """

    def __init__(
        self, whole: Any, comm: Comm, sequence: bool = False, heads: int | None = None
    ) -> None:
        super().__init__(whole, comm, sequence)
        pieces, what = (heads, "heads") if heads else (whole.out_features, "outputs")
        parts = min(comm.size, heads or comm.size)
        self.weight = self.share(whole.weight, 0, pieces, what, parts)
        if whole.bias is not None:
            self.bias = self.share(whole.bias, 0, pieces, what, parts)
        self.sharing = comm.neighbours(comm.size // parts) if parts < comm.size else None
        self.readers = [self]
        self.product: Tensor | None = None

    @staticmethod
    def together(*linears: nn.Module) -> None:
        """Tell the layers that they will read the same x, each once, and always in this order."""
        readers = [linear for linear in linears if isinstance(linear, ColumnLinear)]
        for linear in readers:
            linear.readers = readers

    def forward(self, x: Float[Tensor, "b s_or_s_t h"]) -> Float[Tensor, "b s f_t"]:
        if self.product is None:  # the first one computes for all
            for linear, y in zip(self.readers, self._products(x), strict=True):
                linear.product = y
        product, self.product = self.product, None
        assert product is not None  # `_products` made one for each reader
        return product

    def _products(self, x: Tensor) -> list[Tensor]:
        pairs = [linear._used() for linear in self.readers]
        weights, biases = [weight for weight, _ in pairs], [bias for _, bias in pairs]
        if self.sequence and self.products is None:
            half = precision.half_here(x)  # as autocast would cast, which sees no product inside
            if half is not None:
                x, *weights = (t.to(half) for t in (x, *weights))
            products = _GatheredProducts.apply(x, self.comm, *weights)
            added = zip(products, biases, strict=True)
            return [y if b is None else y + b.to(y.dtype) for y, b in added]
        x = gather_from(x, self.comm) if self.sequence else copy_to(x, self.comm)
        whole = zip(self.readers, weights, biases, strict=True)
        return [linear.multiply(x, weight, bias) for linear, weight, bias in whole]

    def _used(self) -> tuple[Tensor, Tensor | None]:
        weight, bias, sharing = self.weight, self.bias, self.sharing
        if sharing is not None:
            weight = copy_to(weight, sharing, "gradients")
            bias = bias if bias is None else copy_to(bias, sharing, "gradients")
        return weight, bias


class RowLinear(Split):
    """A linear layer of whose inputs each rank has its share: W[h, f_t], and the whole bias[h].

    In goes x[b, s, f_t]; out comes [b, s, h], with `sequence` [b, s_t, h].
    """

    def __init__(self, whole: Any, comm: Comm, sequence: bool = False) -> None:
        super().__init__(whole, comm, sequence)
        self.weight = self.share(whole.weight, 1, whole.in_features, "inputs", comm.size)

    def forward(self, x: Float[Tensor, "b s f_t"]) -> Float[Tensor, "b s_or_s_t h"]:
        y = self.multiply(x, self.weight)
        y = scatter_to(y, self.comm) if self.sequence else reduce_from(y, self.comm)
        if self.bias is None:
            return y
        # Once, after the sum; with `sequence` each rank adds it to its own tokens alone.
        return y + (copy_to(self.bias, self.comm, "gradients") if self.sequence else self.bias)


class TokenNorm(Split):
    """A LayerNorm or RMSNorm of this rank's tokens: the gradients of its weight and bias, which are
    whole, are summed over the ranks that have the other tokens."""

    def __init__(self, whole: nn.LayerNorm | nn.RMSNorm, comm: Comm) -> None:
        super().__init__(whole, comm, sequence=True)
        kind: Callable[..., Tensor] = F.rms_norm
        if isinstance(whole, nn.LayerNorm):
            kind = F.layer_norm
        self.normalize = kind
        self.shape = whole.normalized_shape
        self.eps = whole.eps

    def forward(self, x: Float[Tensor, "b s_t h"]) -> Float[Tensor, "b s_t h"]:
        used = [copy_to(p, self.comm, "gradients") for p in self.parameters()]
        return self.normalize(x, self.shape, *used, eps=self.eps)


class TokenLinear(Split):
    """A whole linear layer of this rank's tokens, as a router or an expert is under sequence
    parallelism: the gradients of its weight and bias are summed over the ranks that have the other
    tokens."""

    def __init__(self, whole: Any, comm: Comm) -> None:
        super().__init__(whole, comm, sequence=True)
        self.out_features, self.in_features = whole.weight.shape

    def forward(self, x: Float[Tensor, "... k"]) -> Float[Tensor, "... d"]:
        weight, bias = copy_to(self.weight, self.comm, "gradients"), self.bias
        bias = bias if bias is None else copy_to(bias, self.comm, "gradients")
        return self.multiply(x, weight, bias)


class VocabEmbedding(Split):
    """An embedding of which each rank has the rows of its words, W[v_t, h], and zeros for others'.

    Out comes [b, s, h], with `sequence` [b, s_t, h]. IndexError for a token that is no word.
    """

    def __init__(self, whole: nn.Embedding, comm: Comm, sequence: bool = False) -> None:
        super().__init__(whole, comm, sequence)
        self.weight = self.share(whole.weight, 0, whole.num_embeddings, "words", comm.size)

    def forward(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s_or_s_t h"]:
        _check_words("token", tokens, len(self.weight) * self.comm.size)
        place, others = _place(tokens, len(self.weight), self.comm)
        x = F.embedding(place, self.weight).masked_fill(others[..., None], 0)
        return scatter_to(x, self.comm) if self.sequence else reduce_from(x, self.comm)


# ── the loss ──────────────────────────────────────────────────────────────────────────────────────


def cross_entropy(
    logits: Float[Tensor, "*tokens v_t"],
    targets: Int[Tensor, "*tokens"],
    comm: Comm,
    reduction: str = "mean",
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats, from this rank's columns of logits that nobody has whole; targets
    of −100 count for nothing.

    reduction: "mean", or "sum", in fp32 or wider: what a batch of several micro-batches adds up

    Cost: of each token the largest logit, then the sum of exponentials and the target's logit, are
    all-reduced, in fp32 or wider. Kept are the probabilities of this rank's words.
    Raises IndexError for a target that is no word, ValueError for another reduction.
    Source: Shoeybi et al. 1909.08053, section 3; Megatron-LM's vocab_parallel_cross_entropy.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r}: use 'mean' or 'sum'")
    if precision.half_here(logits) is not None:  # as autocast has it
        logits = logits.float()
    return _CrossEntropy.apply(logits, targets, comm, reduction)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, comm: Comm, reduction: str) -> Tensor:
        _check_words("target", targets, logits.shape[-1] * comm.size, _IGNORED)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        place, others = _place(targets, logits.shape[-1], comm)
        with comm.record("loss"):
            wide = wide - comm.all_reduce(wide.max(-1, keepdim=True).values, "max")
            target = wide.gather(-1, place[..., None])[..., 0].masked_fill(others, 0)
            exponentials = wide.exp_()
            total, target = comm.all_reduce(torch.stack([exponentials.sum(-1), target]))
        ignored = targets == _IGNORED
        count = (~ignored).sum().to(wide.dtype)  # half formats cannot count so far
        count = torch.ones_like(count) if reduction == "sum" else count
        softmax = exponentials.div_(total[..., None]).to(logits.dtype)
        ctx.comm = comm
        ctx.save_for_backward(softmax, targets, count)
        whole = (total.log() - target).masked_fill(ignored, 0).sum()
        return whole if reduction == "sum" else (whole / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        softmax, targets, count = ctx.saved_tensors
        place, others = _place(targets, softmax.shape[-1], ctx.comm)
        scale = (grad / count).to(softmax.dtype).expand(targets.shape)
        scale = scale.masked_fill(targets == _IGNORED, 0)[..., None]
        hit = scale.masked_fill(others[..., None], 0)
        return (softmax * scale).scatter_add_(-1, place[..., None], -hit), None, None, None


def _place(words: Tensor, v_t: int, comm: Comm) -> tuple[Tensor, Tensor]:
    """Where in this rank's share each word stands (0 for others'), and which are others'."""
    place = words - comm.rank * v_t
    others = (place < 0) | (place >= v_t)
    return place.masked_fill(others, 0), others
