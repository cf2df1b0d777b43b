"""Wrong answers to the exercises of `tensor_parallel`."""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from labutils import tensor_parallel
from wrong_answers import Wrong

# ── a split feed-forward layer ────────────────────────────────────────────────────────────────────


class _Both(torch.autograd.Function):
    """An all-reduce forward, an all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Any) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.comm.all_reduce(grad), None


def _split(
    x: Tensor, up: Any, down: Any, comm: Any, *, f=None, g=None, bias="after", gather=False
) -> Tensor:
    n, i = comm.size, comm.rank
    x = (f or tensor_parallel.copy_to)(x, comm)
    inner = F.gelu(F.linear(x, up.weight.chunk(n)[i], up.bias.chunk(n)[i]))
    if gather:  # and each goes on with its own part of it
        inner = tensor_parallel.gather_from(inner.transpose(1, 2).contiguous(), comm)
        inner = inner.transpose(1, 2).chunk(n, 2)[i]
    y = F.linear(inner, down.weight.chunk(n, 1)[i])
    if bias == "each":
        y = y + down.bias
    if bias == "part":
        y = y + down.bias / n
    if bias == "rank 0" and i == 0:
        y = y + down.bias
    y = (g or tensor_parallel.reduce_from)(y, comm)
    return y + down.bias if bias == "after" else y


def _row_first(x: Tensor, up: Any, down: Any, comm: Any) -> Tensor:
    """GELU of parts of a sum."""
    n, i = comm.size, comm.rank
    part = F.linear(x.chunk(n, 2)[i], up.weight.chunk(n, 1)[i], up.bias / n)
    return tensor_parallel.reduce_from(F.linear(F.gelu(part), down.weight), comm) + down.bias


def _rows_of_x(x: Tensor, up: Any, down: Any, comm: Any) -> Tensor:
    """Rows of X, the whole W, and a sum."""
    mine = x.chunk(comm.size, 1)[comm.rank]
    return tensor_parallel.reduce_from(F.linear(F.gelu(up(mine)), down.weight), comm) + down.bias


def _as_it_is(x: Tensor, comm: Any) -> Tensor:
    return x


class _Sum(torch.autograd.Function):
    """Another hand's g, with what its backward pass does to the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Any, times: float) -> Tensor:
        ctx.times = times
        return comm.all_reduce(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return grad * ctx.times, None, None


def _columns_of(
    x: Tensor, up: Any, down: Any, comm: Any, *, cut="weights", times=1.0, spare=False, mine=None
) -> Tensor:
    """Columns of the width, counted by hand."""
    f, n = up.weight.shape[0], comm.size
    lo, hi = (comm.rank if mine is None else mine(comm)) * f // n, 0
    hi = lo + f // n
    x = tensor_parallel.copy_to(x, comm)
    if cut == "activations":  # the whole first product, and a slice of it
        inner = F.gelu(x @ up.weight.T + up.bias)[..., lo:hi]
    else:
        inner = F.gelu(x @ up.weight[lo:hi].T + up.bias[lo:hi])
    if spare:  # zeros in the place of others' columns
        whole = inner.new_zeros(*inner.shape[:-1], f)
        inner = torch.cat([whole[..., :lo], inner, whole[..., hi:]], -1)
        part = inner @ down.weight.T
    else:
        part = inner @ down.weight[:, lo:hi].T
    return _Sum.apply(part, comm, times) + down.bias


def _columns(**slips):
    return functools.partial(_columns_of, **slips)


def _rank_0_speaks(x: Tensor, up: Any, down: Any, comm: Any) -> Tensor:
    """All compute all of it, and the sum counts one of them."""
    y = F.linear(F.gelu(up(tensor_parallel.copy_to(x, comm))), down.weight)
    return tensor_parallel.reduce_from(y * (comm.rank == 0), comm) + down.bias


def _forgotten(x: Tensor, up: Any, down: Any, comm: Any) -> Tensor:
    """All but the bias of the sum."""
    return _columns_of(x, up, down, comm) - down.bias


# ── a loss from shares ────────────────────────────────────────────────────────────────────────────


def _loss(
    logits: Tensor,
    targets: Tensor,
    comm: Any,
    *,
    most: str = "all",
    unmasked: bool = False,
    total=tensor_parallel.reduce_from,
    gather: bool = False,
) -> Tensor:
    m = logits.detach().max(-1, keepdim=True).values
    if most == "all":
        m = comm.all_reduce(m, "max")
    z = logits - m if most else logits
    place = targets - comm.rank * logits.shape[-1]
    theirs = (place < 0) | (place >= logits.shape[-1])
    target = z.gather(-1, place.clamp(0, logits.shape[-1] - 1)[:, None])[:, 0]
    if not unmasked:
        target = target.masked_fill(theirs, 0)
    if gather:
        comm.all_gather(logits.detach().T.contiguous())
    return (total(z.exp().sum(-1), comm).log() - total(target, comm)).mean()


def _gathered(logits: Tensor, targets: Tensor, comm: Any) -> Tensor:
    """Everybody has all logits; the backward pass keeps the rank's own part."""
    n, v_t = comm.size, logits.shape[-1]
    others = comm.all_gather(logits.detach().T.contiguous()).T.split(v_t, 1)
    columns = [logits if i == comm.rank else others[i] for i in range(n)]
    return F.cross_entropy(torch.cat(columns, 1), targets)


def _own_words(logits: Tensor, targets: Tensor, comm: Any) -> Tensor:
    place = (targets - comm.rank * logits.shape[-1]).clamp(0, logits.shape[-1] - 1)
    return F.cross_entropy(logits, place)


def _by_hand(
    logits: Tensor, targets: Tensor, comm: Any, *, one_max=False, mean=True, local_max=False,
    shift=True, off=0,
) -> Tensor:  # fmt: skip
    """Three numbers for each token, in another order."""
    v_t = logits.shape[1]
    top = logits.detach().amax(1)
    if not local_max:
        top = comm.all_reduce(top, "max")
    if one_max:
        top = top.max().expand_as(top)
    shifted = logits - top[:, None] if shift else logits
    total = tensor_parallel.reduce_from(shifted.exp().sum(1), comm)
    words = torch.arange(v_t) + comm.rank * v_t + off
    mine = (shifted * (words == targets[:, None])).sum(1)
    each = total.log() - tensor_parallel.reduce_from(mine, comm)
    return each.mean() if mean else each.sum()


def _hand(**slips):
    return functools.partial(_by_hand, **slips)


def _divided(logits, targets, comm):
    """The right loss, divided by the number of ranks as replicas do."""
    return tensor_parallel.cross_entropy(logits, targets, comm) / comm.size


def _mean_of_losses(logits: Tensor, targets: Tensor, comm: Any) -> Tensor:
    """Each rank's loss of the targets among its words, averaged."""
    place = targets - comm.rank * logits.shape[1]
    mine = (place >= 0) & (place < logits.shape[1])
    each = F.cross_entropy(logits, place.clamp(0, logits.shape[1] - 1), reduction="none")
    return tensor_parallel.reduce_from((each * mine).sum(), comm) / len(targets)


# ── sequence parallelism ──────────────────────────────────────────────────────────────────────────


def _layer(
    x: Tensor,
    norm: Any,
    up: Any,
    down: Any,
    comm: Any,
    *,
    scatter: bool = True,
    normed: Any = tensor_parallel.copy_to,
    last: Any = tensor_parallel.copy_to,
    before: bool = False,
) -> Tensor:
    weight, bias = normed(norm.weight, comm), normed(norm.bias, comm)
    y = F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    inner = F.gelu(up(tensor_parallel.gather_from(y, comm)))
    y = F.linear(inner, down.weight, down.bias if before else None)
    if scatter:
        y = tensor_parallel.scatter_to(y, comm)
    else:
        y = tensor_parallel.reduce_from(y, comm)
        y = y[:, comm.rank * x.shape[1] :][:, : x.shape[1]]
    return x + y if before else x + y + last(down.bias, comm)


def _mean(parameter: Tensor, comm: Any) -> Tensor:
    return tensor_parallel.copy_to(parameter / 1, comm) * (1 / comm.size) + (
        parameter.detach() * (1 - 1 / comm.size)
    )


def _twice(parameter: Tensor, comm: Any) -> Tensor:
    return tensor_parallel.copy_to(tensor_parallel.copy_to(parameter, comm), comm)


def _gathers_twice(x: Tensor, norm: Any, up: Any, down: Any, comm: Any) -> Tensor:
    """Right, and each output is gathered and cut again."""
    y = tensor_parallel.gather_from(_layer(x, norm, up, down, comm), comm)
    return tensor_parallel.scatter_to(y / comm.size, comm)


def _tokens(
    x: Tensor, norm: Any, up: Any, down: Any, comm: Any, *, on="weights", gather="gather_from",
    bias=tensor_parallel.copy_to, share=None, outside=False,
) -> Tensor:  # fmt: skip
    """Another hand's layer, with its slips."""
    f = tensor_parallel.copy_to
    if on == "weights":
        y = F.layer_norm(x, x.shape[-1:], f(norm.weight, comm), f(norm.bias, comm), norm.eps)
    elif on == "output":  # f where tokens differ
        y = f(norm(x), comm)
    elif on == "weight alone":
        y = F.layer_norm(x, x.shape[-1:], f(norm.weight, comm), norm.bias, norm.eps)
    else:
        y = F.layer_norm(f(x, comm), x.shape[-1:], f(norm.weight, comm), f(norm.bias, comm))
    y = tensor_parallel.gather_from(y, comm)
    y = F.linear(F.gelu(up(y)), down.weight)
    if outside:  # the bias of one rank, once, before the sum
        y = y + down.bias * (comm.rank == 0)
    y = tensor_parallel.scatter_to(y, comm)
    return x + y if outside else x + y + bias(down.bias, comm)


def _hunted(**slips):
    return functools.partial(_tokens, **slips)


def _summed_weights(x: Tensor, norm: Any, up: Any, down: Any, comm: Any) -> Tensor:
    """The gradients of the matrices are summed over ranks, too."""
    f = tensor_parallel.copy_to
    y = F.layer_norm(x, x.shape[-1:], f(norm.weight, comm), f(norm.bias, comm), norm.eps)
    y = F.linear(tensor_parallel.gather_from(y, comm), f(up.weight, comm), up.bias)
    y = tensor_parallel.scatter_to(F.linear(F.gelu(y), down.weight), comm)
    return x + y + f(down.bias, comm)


WRONG = {
    "tensor_parallel/feed-forward": (
        Wrong("a bias that nobody adds", _forgotten, "the output", "Nobody adds it"),
        Wrong(
            "slices the activation",
            _columns(cut="activations"),
            "its share of the work",
            "cut the weight",
        ),
        Wrong("rank 0 speaks", _rank_0_speaks, "its share of the work", "cut the weight"),
        Wrong("zeros for others", _columns(spare=True), "its share of the work", "cut the weight"),
        Wrong(
            "a mean in the backward pass of g",
            functools.partial(
                lambda x, up, down, comm: _columns_of(x, up, down, comm, times=1 / comm.size)
            ),
            "the gradient of the input",
            "passes its gradient on",
        ),
        Wrong("all the same columns", _columns(mine=lambda comm: 0), "the output", "cut by its"),
        Wrong(
            "the bias t times",
            functools.partial(_split, bias="each"),
            "the output",
            "Every rank added the bias",
        ),
        Wrong("no sum", functools.partial(_split, g=_as_it_is), "the output", "add their parts up"),
        Wrong("rows first, and GELU of parts", _row_first, "the output", "no part of anything"),
        Wrong("rows of x with the whole matrix", _rows_of_x, "the output", "got shape"),
        Wrong(
            "no all-reduce in the backward pass",
            functools.partial(_split, f=_as_it_is),
            "the gradient of the input",
            "the backward pass of f is an all-reduce",
        ),
        Wrong(
            "an all-reduce in both passes of g",
            functools.partial(_split, g=_Both.apply),
            "the gradient of the input",
            "passes its gradient on as it is",
        ),
        Wrong(
            "an all-reduce that autograd does not see",
            functools.partial(_split, g=lambda y, comm: comm.all_reduce(y)),
            "the gradient of the input",
            "autograd Functions",
        ),
        Wrong(
            "every rank computes everything",
            lambda x, up, down, comm: down(F.gelu(up(x))),
            "the gradients of the weights",
            "Every rank computed everything",
        ),
        Wrong(
            "a part of the bias on each rank",
            functools.partial(_split, bias="part"),
            "the gradients of the weights",
            "times too small",
        ),
        Wrong(
            "the bias on rank 0 alone",
            functools.partial(_split, bias="rank 0"),
            "the gradients of the weights",
            "right in the output only",
        ),
        Wrong(
            "a gather between the products",
            functools.partial(_split, gather=True),
            "bytes sent",
            "nothing has to travel",
        ),
    ),
    "tensor_parallel/cross-entropy": (
        Wrong("one maximum for all", _hand(one_max=True), "large logits", "*that token*"),
        Wrong("a sum", _hand(mean=False), "the loss", "return their mean"),
        Wrong("a maximum of its words", _hand(local_max=True), "the loss", "same number"),
        Wrong("no shift", _hand(shift=False), "large logits", "exp(1000) is inf"),
        Wrong("a word too far", _hand(off=1), "the loss", "which one rank has"),
        Wrong("a mean over ranks, too", _divided, "the loss", "no mean over ranks"),
        Wrong("a mean of losses", _mean_of_losses, "the loss", "same number subtracted"),
        Wrong("a loss in a list", lambda *given: [_loss(*given)], "the loss", "Return a tensor"),
        Wrong("a loss of shape 1", lambda *given: _loss(*given)[None], "the loss",
              "Return a tensor of shape []"),
        Wrong("gathers the logits", _gathered, "bytes sent", "Are logits gathered?"),
        Wrong(
            "gathers them in passing",
            functools.partial(_loss, gather=True),
            "bytes sent",
            "Are logits gathered?",
        ),
        Wrong("a softmax of its own words", _own_words, "the loss", "over all ranks"),
        Wrong(
            "a maximum of its own",
            functools.partial(_loss, most="own"),
            "the loss",
            "the same number subtracted",
        ),
        Wrong(
            "others' targets count",
            functools.partial(_loss, unmasked=True),
            "the loss",
            "the others count as 0",
        ),
        Wrong(
            "no maximum",
            functools.partial(_loss, most=""),
            "large logits",
            "exp(1000) is inf",
        ),
        Wrong(
            "sums that autograd does not see",
            functools.partial(_loss, total=lambda x, comm: comm.all_reduce(x)),
            "the gradient",
            "autograd Functions",
        ),
        Wrong(
            "sums of the gradients, too",
            functools.partial(_loss, total=_Both.apply),
            "the gradient",
            "times too large",
        ),
    ),
    "tensor_parallel/bug-hunt": (
        Wrong("f after the norm", _hunted(on="output"), "the gradients of the matrices", "its own"),
        Wrong("f before the norm", _hunted(on="x"), "the gradients of the matrices", "its own"),
        Wrong("one of two", _hunted(on="weight alone"), "the gradients of the norm", "norm.bias"),
        Wrong("the bias on rank 0", _hunted(outside=True), "the gradient of the bias", "sum"),
        Wrong(
            "a mean of the bias", _hunted(bias=_mean), "the gradient of the bias", "do not average"
        ),
        Wrong("matrices summed", _summed_weights, "the gradients of the matrices", "columns work"),
        Wrong(
            "the one of the lab",
            functools.partial(_layer, scatter=False, normed=_as_it_is, last=_as_it_is),
            "the gradients of the matrices",
            "scatter_to sends them",
        ),
        Wrong(
            "cuts the sum",
            functools.partial(_layer, scatter=False),
            "the gradients of the matrices",
            "zero",
        ),
        Wrong(
            "the norm's gradients are not summed",
            functools.partial(_layer, normed=_as_it_is),
            "the gradients of the norm",
            "norms its own tokens",
        ),
        Wrong(
            "their mean",
            functools.partial(_layer, normed=_mean),
            "the gradients of the norm",
            "do not average",
        ),
        Wrong(
            "summed twice",
            functools.partial(_layer, normed=_twice),
            "the gradients of the norm",
            "summed twice",
        ),
        Wrong(
            "the bias is not summed",
            functools.partial(_layer, last=_as_it_is),
            "the gradient of the bias",
            "this rank's tokens alone",
        ),
        Wrong(
            "the bias t times",
            functools.partial(_layer, before=True),
            "the output",
            "Every rank added the bias",
        ),
        Wrong(
            "gathers its output, and cuts it again",
            _gathers_twice,
            "bytes sent",
            "A gather and a scatter each way",
        ),
    ),
}
