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


WRONG = {
    "tensor_parallel/feed-forward": (
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
            "Subtract the largest logit",
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
