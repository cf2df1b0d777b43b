"""Right answers to the exercises of `tensor_parallel`, in other styles than the reference."""

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from labutils import tensor_parallel

# ── a split feed-forward layer ────────────────────────────────────────────────────────────────────


class _F(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.all_reduce(grad.contiguous()), None


class _G(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, comm):
        return comm.all_reduce(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _functions(x, up, down, comm):
    f_t = up.out_features // comm.size
    mine = slice(comm.rank * f_t, (comm.rank + 1) * f_t)
    inner = F.gelu(_F.apply(x, comm) @ up.weight[mine].T + up.bias[mine])
    return _G.apply(inner @ down.weight[:, mine].T, comm) + down.bias


@dataclasses.dataclass
class _Settings:
    """An object that can be called, and, as it can be compared, has no hash."""

    act: Callable = F.gelu

    def __call__(self, x, up, down, comm):
        weight, bias = (p.chunk(comm.size)[comm.rank] for p in (up.weight, up.bias))
        inner = self.act(F.linear(_F.apply(x, comm), weight, bias))
        return _G.apply(inner @ down.weight.chunk(comm.size, 1)[comm.rank].T, comm) + down.bias


def _hooks(x, up, down, comm):
    """A hook for f; for g a sum whose history is the part's own."""
    x = x.view_as(x)
    x.register_hook(lambda grad: comm.all_reduce(grad))
    rows = torch.tensor_split(torch.arange(up.out_features), comm.size)[comm.rank]
    part = F.gelu(F.linear(x, up.weight[rows], up.bias[rows])) @ down.weight[:, rows].mT
    others = (comm.all_reduce(part.detach()) - part.detach()).detach()
    return part + others + down.bias


def _strided(x, up, down, comm):
    """Every n-th column: which ones a rank has is its own affair, as long as both agree."""
    i, n = comm.rank, comm.size
    x = tensor_parallel.copy_to(x, comm)
    inner = F.gelu(F.linear(x, up.weight[i::n], up.bias[i::n]))
    return tensor_parallel.reduce_from(F.linear(inner, down.weight[:, i::n]), comm) + down.bias


def _sums_of_columns(x, up, down, comm):
    """Shares by tensor_split, f and g by hooks of a detached sum."""
    w1, b1 = (p.tensor_split(comm.size)[comm.rank] for p in (up.weight, up.bias))
    w2 = down.weight.T.tensor_split(comm.size)[comm.rank]
    inner = F.gelu(tensor_parallel.copy_to(x, comm).matmul(w1.mT).add(b1))
    return torch.add(tensor_parallel.reduce_from(inner.matmul(w2), comm), down.bias)


def _written_out(x, up, down, comm):
    """GELU by its formula, each term kept for the backward pass."""
    f_t = up.out_features // comm.size
    weight, bias = (p.narrow(0, comm.rank * f_t, f_t) for p in (up.weight, up.bias))
    z = torch.addmm(bias, _F.apply(x, comm).reshape(-1, x.shape[-1]), weight.t())
    inner = 0.5 * z * (1 + torch.erf(z / 2**0.5))
    part = inner @ down.weight.narrow(1, comm.rank * f_t, f_t).t()
    return (_G.apply(part, comm) + down.bias).view_as(x)


def _computed_again(x, up, down, comm):
    """Its share of the layer is a checkpoint: nothing is kept between the two products."""

    def share(x):
        weight, bias = up.weight.chunk(comm.size)[comm.rank], up.bias.chunk(comm.size)[comm.rank]
        inner = F.gelu(F.linear(x, weight, bias))
        return F.linear(inner, down.weight.chunk(comm.size, 1)[comm.rank])

    part = torch.utils.checkpoint.checkpoint(share, _F.apply(x, comm), use_reentrant=False)
    return _G.apply(part, comm) + down.bias


def _bias_in_the_sum(x, up, down, comm):
    """Each rank adds an n-th of the bias to its part, and the bias' gradient is summed, too."""
    i, n = comm.rank, comm.size
    x, bias = (tensor_parallel.copy_to(each, comm) for each in (x, down.bias))
    inner = F.gelu(F.linear(x, up.weight.chunk(n)[i], up.bias.chunk(n)[i]))
    part = F.linear(inner, down.weight.chunk(n, dim=1)[i], bias / n)
    return tensor_parallel.reduce_from(part, comm)


# ── a loss from shares ────────────────────────────────────────────────────────────────────────────


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, comm):
        s, v_t = logits.shape
        m = comm.all_reduce(logits.amax(1), "max")
        exponentials = (logits - m[:, None]).exp()
        total = comm.all_reduce(exponentials.sum(1))
        hit = torch.arange(v_t) + comm.rank * v_t == targets[:, None]
        target = comm.all_reduce((logits * hit).sum(1))
        ctx.save_for_backward((exponentials / total[:, None] - hit.double()) / s)
        return (total.log() + m - target).mean()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


def _two_levels(logits, targets, comm):
    """The log-sum-exp of the ranks' log-sum-exps."""
    own = logits.logsumexp(-1)
    m = comm.all_reduce(own.detach(), "max")
    whole = m + tensor_parallel.reduce_from((own - m).exp(), comm).log()
    lo = comm.rank * logits.shape[1]
    mine = (targets >= lo) & (targets < lo + logits.shape[1])
    rows = mine.nonzero()[:, 0]
    target = torch.zeros_like(whole).index_put((rows,), logits[rows, targets[rows] - lo])
    return (whole - tensor_parallel.reduce_from(target, comm)).mean()


def _stacked(logits, targets, comm):
    m = comm.all_reduce(logits.detach().max(-1).values, "max")
    hit = F.one_hot(targets, logits.shape[1] * comm.size).chunk(comm.size, 1)[comm.rank]
    z = logits - m[:, None]
    both = tensor_parallel.reduce_from(torch.stack([z.exp().sum(1), (z * hit).sum(1)]), comm)
    return torch.mean(both[0].log() - both[1])


def _a_row_at_a_time(logits, targets, comm):
    """Lists of tokens; the target's logit comes with the exponentials in one sum."""
    top = comm.all_reduce(torch.stack([row.max() for row in logits.detach()]), "max")
    lo, hi = comm.rank * logits.shape[1], (comm.rank + 1) * logits.shape[1]
    rows = []
    for row, m, t in zip(logits, top, targets.tolist(), strict=True):
        hit = row[t - lo] - m if lo <= t < hi else row.new_zeros(())
        rows.append(torch.stack([(row - m).exp().sum(), hit]))
    total, target = tensor_parallel.reduce_from(torch.stack(rows), comm).unbind(1)
    return sum(total.log() - target) / len(rows)


# ── sequence parallelism ──────────────────────────────────────────────────────────────────────────


def _functional(x, norm, up, down, comm):
    f = tensor_parallel.copy_to
    y = F.layer_norm(x, (x.shape[-1],), f(norm.weight, comm), f(norm.bias, comm), norm.eps)
    y = F.gelu(up(tensor_parallel.gather_from(y, comm)))
    return tensor_parallel.scatter_to(y @ down.weight.T, comm) + f(down.bias, comm) + x


def _modules(x, norm, up, down, comm):
    """The library's layers, over the very parameters that were given."""
    own = tensor_parallel.layers.TokenNorm(norm, comm)
    column = tensor_parallel.ColumnLinear(nn.Linear(6, 24), comm, sequence=True)
    column.weight, column.bias = up.weight, up.bias
    row = tensor_parallel.RowLinear(nn.Linear(24, 6), comm, sequence=True)
    row.weight, row.bias = down.weight, down.bias
    return x + row(F.gelu(column(own(x))))


def _hooked(x, norm, up, down, comm):
    """Gradients are summed by hooks of the tensors that stand in for the parameters."""
    weight, bias, last = (p.view_as(p) for p in (norm.weight, norm.bias, down.bias))
    for each in (weight, bias, last):
        each.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    y = F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
    y = F.linear(F.gelu(up(tensor_parallel.gather_from(y, comm))), down.weight)
    return tensor_parallel.scatter_to(y, comm).add(last).add(x)


def _one_sum(x, norm, up, down, comm):
    """The three small parameters go through f as one vector."""
    h = x.shape[-1]
    three = tensor_parallel.copy_to(torch.cat([norm.weight, norm.bias, down.bias]), comm)
    weight, bias, last = three.split(h)
    y = nn.functional.layer_norm(x, (h,), eps=norm.eps) * weight + bias
    y = torch.nn.functional.gelu(up(tensor_parallel.gather_from(y, comm)))
    return torch.stack([x, tensor_parallel.scatter_to(y @ down.weight.mT, comm)]).sum(0) + last



def _beside(logits, targets, comm):
    """The loss has no history; softmax − 1 does, as factors of the logits."""
    with torch.no_grad():
        most = comm.all_reduce(logits.amax(-1), "max")
        sums = comm.all_reduce((logits - most[:, None]).exp().sum(-1))
        words = comm.rank * logits.shape[1] + torch.arange(logits.shape[1])
        right = (targets[:, None] == words).to(logits)
        at_target = comm.all_reduce((logits * right).sum(-1))
        loss = (most + sums.log() - at_target).mean()
        again = comm.all_reduce(logits.amax(-1), "max")
        shares = (logits - again[:, None]).exp()
        shares /= comm.all_reduce(shares.sum(-1))[:, None]
    slope = ((shares - right) * logits).sum() / len(targets)
    return loss + slope - slope.detach()


RIGHT = {
    "tensor_parallel/feed-forward": {
        "autograd Functions": _functions,
        "hooks": _hooks,
        "an object with settings": _Settings(),
        "every n-th column": _strided,
        "sums of columns": _sums_of_columns,
        "the bias in the sum": _bias_in_the_sum,
        "GELU written out": _written_out,
        "computed again": _computed_again,
    },
    "tensor_parallel/cross-entropy": {
        "an autograd Function": _Loss.apply,
        "in two levels": _two_levels,
        "stacked": _stacked,
        "a row at a time": _a_row_at_a_time,
        "a loss beside its gradient": _beside,
    },
    "tensor_parallel/bug-hunt": {
        "functional": _functional,
        "the library's layers": _modules,
        "hooks of tensors": _hooked,
        "one sum": _one_sum,
    },
}
