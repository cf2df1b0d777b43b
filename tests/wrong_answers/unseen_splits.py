"""Wrong answers to labs 10, 13a, 13b and 15a by another hand that had not written them."""

import math
from functools import partial

import torch.nn.functional as F

from labutils.tensor_parallel import copy_to, cross_entropy, gather_from, reduce_from, scatter_to
from wrong_answers import Wrong
from wrong_answers.unseen_parallel import Both, same

# ── 10 ───────────────────────────────────────────────────────────────────────────────────────────


def feed_forward(x, up, down, comm, *, total=None, shifted=True, gelu=F.gelu, hooked="x"):
    """total: another sum than an all-reduce, both ways; hooked: whose gradient is summed."""
    n, i = comm.size, comm.rank
    total = total(comm) if total else comm.all_reduce
    a = Both.apply(x, same, total) if hooked == "x" else x
    inner = gelu(a @ up.weight.chunk(n)[i].mT + (up.bias.chunk(n)[i] if shifted else 0))
    if hooked == "inner":
        inner.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    return Both.apply(inner @ down.weight.chunk(n, 1)[i].mT, total, same) + down.bias


def _gathered_and_added(comm):
    return lambda x: comm.all_gather(x[None].contiguous()).sum(0)


def _in_fp32(comm):
    return lambda x: comm.all_reduce(x.float()).double()


def loss(logits, targets, comm, *, top="max", back=True, others=0.0, limit=math.inf, over=len):
    """top: of all words, subtracted; back: added again; others: for a target that is not here."""
    v = logits.shape[-1]
    whole = {"max": lambda z: comm.all_reduce(z.amax(-1), "max"), "none": lambda z: z[:, 0] * 0,
             "mean": lambda z: comm.all_reduce(z.mean(-1)) / comm.size}[top](logits.detach())  # fmt: skip
    total = reduce_from((logits - whole[:, None]).clamp(-limit, limit).exp().sum(-1), comm)
    place = targets - comm.rank * v
    mine = (place >= 0) & (place < v)
    found = logits.gather(-1, place.clamp(0, v - 1)[:, None])[:, 0]
    target = reduce_from(found.where(mine, others), comm)
    return ((total.log() + whole if back else total.log()) - target).sum() / over(targets)


def _of_its_targets(logits, targets, comm):
    """nll_loss of the targets that the rank has: other tokens' softmax gets no gradient."""
    v = logits.shape[-1]
    z = logits - comm.all_reduce(logits.detach().amax(-1, keepdim=True), "max")
    z = z - reduce_from(z.exp().sum(-1, keepdim=True), comm).log()
    place = targets - comm.rank * v
    place = place.where((place >= 0) & (place < v), -100)
    return reduce_from(F.nll_loss(z, place, reduction="sum"), comm) / len(targets)


def _a_leaf(logits, targets, comm):
    return cross_entropy(logits, targets, comm).detach().requires_grad_()


def _as_often_as_ranks(logits, targets, comm):
    mean = cross_entropy(logits, targets, comm)
    return mean + (comm.size - 1) * (mean - mean.detach())


def tokens(x, norm, up, down, comm, *, alike=copy_to, cut="scatter", where="norm first"):
    """cut: how the sum comes to the tokens; where: what f or a gather is applied to."""
    weight, bias, last = (alike(p, comm) for p in (norm.weight, norm.bias, down.bias))
    if where == "gather first":  # every rank norms all tokens
        y = norm(gather_from(x, comm))
    else:
        y = gather_from(F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps), comm)
    y = F.linear(F.gelu(up(y)), down.weight)
    if where == "f of what is added":
        return scatter_to(y, comm) + copy_to(x + down.bias, comm)
    if cut == "scatter":
        return x + scatter_to(y, comm) + last
    y = reduce_from(y, comm)
    y = copy_to(y, comm) if cut == "f behind g" else y + (comm.size - 1) * (y - y.detach())
    return x + y.chunk(comm.size, 1)[comm.rank] + last


def _a_part_each(parameter, comm):
    return reduce_from(parameter, comm) / comm.size


# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "tensor_parallel/feed-forward": [
        ("no bias between", partial(feed_forward, shifted=False), "the output", "nothing is cut"),
        ("no GELU", partial(feed_forward, gelu=lambda x: x), "the output", "nothing is cut"),
        ("sums in fp32", partial(feed_forward, total=_in_fp32), "the output", "the dtype of x"),
        ("the gradient of columns summed", partial(feed_forward, hooked="inner"),
         "the gradient of the input", "f passes x on"),
        ("parts gathered and added", partial(feed_forward, total=_gathered_and_added),
         "bytes sent", "to gather them all"),
    ],
    "tensor_parallel/cross-entropy": [
        ("the largest not added again", partial(loss, back=False), "the loss", "same number"),
        ("others' targets at −inf", partial(loss, others=-math.inf), "the loss", "count as 0"),
        ("the mean for the largest", partial(loss, top="mean"), "large logits", "that token"),
        ("clamped", partial(loss, top="none", limit=80.0), "large logits", "the largest"),
        ("of its targets", _of_its_targets, "the gradient", "zero for some tokens"),
        ("a leaf", _a_leaf, "the gradient", "no history"),
        ("n times", _as_often_as_ranks, "the gradient", "too large"),
    ],
    "tensor_parallel/bug-hunt": [
        ("f behind g", partial(tokens, cut="f behind g"), "bytes sent", "scatter each way"),
        ("n times what was cut", partial(tokens, cut="n times"),
         "the gradients of the matrices", "scatter_to"),
        ("gathers, then norms", partial(tokens, where="gather first"),
         "the gradients of the norm", "a sum over ranks"),
        ("f of what is added", partial(tokens, where="f of what is added"),
         "the gradients of the matrices", "its own"),
        ("g for parameters", partial(tokens, alike=_a_part_each),
         "the gradients of the norm", "copy_to"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
