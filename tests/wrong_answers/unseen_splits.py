"""Wrong answers to labs 10, 13a, 13b and 15a by another hand that had not written them."""

import math
from functools import partial

import torch
import torch.nn.functional as F

from labutils import tensor_parallel
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


def _own_layers(x, up, down, comm):
    """The library's layers, whose parameters are copies."""
    first = tensor_parallel.ColumnLinear.from_full(up, comm)
    return tensor_parallel.RowLinear.from_full(down, comm)(F.gelu(first(x)))


def _hook_of_x(x, up, down, comm):
    """Right where nothing else reads x."""
    if x.requires_grad:
        x.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    return feed_forward(x, up, down, comm, hooked="")


def _hook_of_the_bias(x, up, down, comm):
    """An n-th of the bias each, whose gradient is summed in a hook that stays."""
    down.bias.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    y = feed_forward(x, up, down, comm) - down.bias
    return y + Both.apply(down.bias / comm.size, comm.all_reduce, same)


_KEPT = {}


def _shares_kept(x, up, down, comm):
    """Shares are cut once and kept for later passes."""
    n, i, key = comm.size, comm.rank, (comm.size, comm.rank, id(up))
    if key not in _KEPT:
        _KEPT[key] = up.weight.chunk(n)[i].detach().clone(), up
    w1 = up.weight.chunk(n)[i]
    w1 = w1 + (_KEPT[key][0] - w1).detach()
    inner = F.gelu(Both.apply(x, same, comm.all_reduce) @ w1.mT + up.bias.chunk(n)[i])
    return Both.apply(inner @ down.weight.chunk(n, 1)[i].mT, comm.all_reduce, same) + down.bias


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


def _probabilities(logits, targets, comm):
    """The target's softmax first, its logarithm then."""
    v = logits.shape[-1]
    e = (logits - comm.all_reduce(logits.detach().amax(-1, keepdim=True), "max")).exp()
    softmax = e / reduce_from(e.sum(-1, keepdim=True), comm)
    place = targets - comm.rank * v
    mine = (place >= 0) & (place < v)
    found = softmax.gather(-1, place.clamp(0, v - 1)[:, None])[:, 0]
    return -reduce_from(found.where(mine, 0.0), comm).log().mean()


class _Deaf(torch.autograd.Function):
    """Computes its gradient forward, and gives that back whatever it gets."""

    @staticmethod
    def forward(ctx, logits, targets, comm):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            mean = cross_entropy(leaf, targets, comm)
        (ctx.found,) = torch.autograd.grad(mean, leaf)
        return mean.detach()

    @staticmethod
    def backward(ctx, grad):
        return ctx.found, None, None


def _as_often_as_ranks(logits, targets, comm):
    mean = cross_entropy(logits, targets, comm)
    return mean + (comm.size - 1) * (mean - mean.detach())


def tokens(x, norm, up, down, comm, *, alike=copy_to, cut="scatter", where="norm first"):
    """cut: how the sum comes to the tokens; where: what f or a gather is applied to."""
    weight, bias, last = (alike(p, comm) for p in (norm.weight, norm.bias, down.bias))
    if where == "gather first":  # every rank norms all tokens
        y = norm(gather_from(x, comm))
    elif where == "gather first, f of parameters":
        y = F.layer_norm(gather_from(x, comm), norm.normalized_shape, weight, bias, norm.eps)
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


def _hooked(x, norm, up, down, comm, *, after=False):
    """Hooks of the parameters themselves, which stay."""
    def summed(parameter):
        parameter.grad = comm.all_reduce(parameter.grad)

    for each in (norm.weight, norm.bias, down.bias):
        if after:
            each.register_post_accumulate_grad_hook(summed)
        else:
            each.register_hook(lambda grad: comm.all_reduce(grad.contiguous()))
    return tokens(x, norm, up, down, comm, alike=lambda parameter, comm: parameter)


def _a_part_each(parameter, comm):
    return reduce_from(parameter, comm) / comm.size


# ── 13a ──────────────────────────────────────────────────────────────────────────────────────────


def order(rank, p, m, *, warm=lambda rank, p, m: p - 1 - rank, at_most=True, b_first=False,
          newest=False, ends=True, name="{}{}".format):  # fmt: skip
    """1F1B with its slips; newest: the backward of the forward before it."""
    first = min(warm(rank, p, m), m) if at_most else warm(rank, p, m)
    ops = [("F", k) for k in range(first)]
    for k in range(m - first):
        pair = ("F", first + k), ("B", first + k if newest else k)
        ops += pair[::-1] if b_first else pair
    left = range(first) if newest else range(m - first, m)
    return [name(*op) for op in ops + [("B", k) for k in left] * ends]


def peak(ops, nbytes, *, of=lambda op, nbytes: nbytes[op.stage], w_frees=1.0, tells=max):
    """of: what an operation adds; w_frees: which part of it goes with W, the rest with B."""
    split, held, seen = any(op.kind == "W" for op in ops), 0, [0]
    for op in ops:
        part = {"F": 1, "B": w_frees - 1 if split else -1, "W": -w_frees}[op.kind]
        held += int(part * of(op, nbytes))
        seen.append(held)
    return tells(seen)


def _until_a_backward(ops, nbytes):
    first = next(i for i, op in enumerate(ops) if op.kind != "F")
    return sum(nbytes[op.stage] for op in ops[:first])


def _by_micro_batch(ops, nbytes):
    """One entry for each micro-batch, whatever the stage."""
    alive, most, last = {}, 0, "W" if any(op.kind == "W" for op in ops) else "B"
    for op in ops:
        alive[op.micro_batch] = nbytes[op.stage] if op.kind == "F" else alive[op.micro_batch]
        if op.kind == last:
            alive[op.micro_batch] = 0
        most = max(most, sum(alive.values()))
    return most


def interleaved(rank, p, m, chunks, *, behind=lambda rank, p: p - 1 - rank, last_first=True, hops=2,
                more=0, stage=lambda rank, c, p, chunks: rank + c * p, way=tuple):  # fmt: skip
    jobs = [(c, r + k) for r in range(0, m, p) for c in range(chunks) for k in range(p)]
    back = [(chunks - 1 - c if last_first else c, k) for c, k in jobs]
    forwards = [("F", stage(rank, c, p, chunks), k) for c, k in jobs]
    backwards = [("B", stage(rank, c, p, chunks), k) for c, k in back]
    warm = min(hops * behind(rank, p) + (chunks - 1) * p + more, len(jobs))
    pairs = zip(forwards[warm:], backwards, strict=False)
    turns = [op for pair in pairs for op in pair]
    return way([*forwards[:warm], *turns, *backwards[len(jobs) - warm :]])


def _after_alone(rank, p, m, chunks):
    """The first of three mistakes is mended."""
    found = interleaved(rank, p, m, chunks)
    own = [("B", rank + (op[1] // p + 1) % chunks * p, op[2]) for op in found if op[0] == "F"]
    backwards = iter(own)
    return [op if op[0] == "F" else next(backwards) for op in found]


def _breadth_first(rank, p, m, chunks):
    rows = [[(rank + c * p, k) for k in range(m)] for c in range(chunks)]
    back = [("B", *at) for row in rows[::-1] for at in row]
    return [("F", *at) for row in rows for at in row] + back


# ── 13b ──────────────────────────────────────────────────────────────────────────────────────────


def late(weights, inputs, dy, *, turned=False, order=reversed, half=False, of="output", at_once=False,
         adds=True):  # fmt: skip
    """of: whose gradient W reads; order: of the inputs; half: a mean with what is there."""
    owed = []
    for x, weight in zip(order(inputs), reversed(weights), strict=True):
        out, dy = dy, dy @ weight
        owed.append((weight, out if of == "output" else dy, x))

    def pay():
        for weight, grad, x in owed:
            product = x.mT @ grad if turned else grad.mT @ x
            if adds and weight.grad is not None:
                product = (product + weight.grad) / (1 + half)
            weight.grad = product

    if at_once:
        pay()
        return dy, lambda: None
    return dy, pay


def place(rank, p, m, *, waits=lambda rank, p, m: rank, first=False, ahead=lambda rank, p: p - 1 - rank,
          newest=False):  # fmt: skip
    """ZB-H1 by a queue of W: how many may wait; first: each W before its B."""
    ops, owed = [], []
    for op in order(rank, p, m, warm=lambda rank, p, m: ahead(rank, p)):
        if op[0] == "B":
            owed.append("W" + op[1:])
        late_ones = [owed.pop(-1 if newest else 0)] if len(owed) > waits(rank, p, m) else []
        ops += [*late_ones, op] if first else [op, *late_ones]
    return ops + owed


# ── 15a ──────────────────────────────────────────────────────────────────────────────────────────


def groups(w, bits, group, *, reach=lambda top: top, even=round, signed=False, way=lambda *both: both):
    """Groups as slices of columns; reach: what the largest |w| becomes."""
    codes, scales, top = [], [], 2 ** (bits - 1) - 1
    for part in w.split(group, 1):
        scale = part.abs().amax(1, keepdim=True) / reach(top)
        scale = scale.where(scale > 0, 1.0)
        codes.append((part / scale).ceil() if even is math.ceil else (part / scale).round())
        scales.append(scale)
    return way(torch.cat(codes, 1) + top * signed, torch.cat(scales, 1))


def _min_to_max(w, bits, group):
    """Scales of an affine grid."""
    codes, scales = [], []
    for part in w.split(group, 1):
        reach = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
        scales.append((reach / (2**bits - 1)).where(reach > 0, 1.0))
        codes.append((part / scales[-1]).round())
    return torch.cat(codes, 1), torch.cat(scales, 1)


def _whole_groups(w, bits, group):
    codes, scales = groups(w, bits, group)
    return codes, scales[:, : w.shape[1] // group]


def integers(x, w, limit, *, ends=(-127, 127), top=127, of_w=1, sums=torch.int32, x_scale=True,
             whole=True):  # fmt: skip
    """A layer of codes; top: what max|w| becomes; of_w: over which axis; sums: their type."""
    w_scale = (w.abs().amax() if of_w is None else w.abs().amax(of_w)) / top
    w_scale = torch.where(w_scale > 0, w_scale, 1.0)
    w_codes = w / (w_scale[:, None] if w_scale.dim() else w_scale)
    x_codes = (x / (limit / 127)).clamp(*ends)
    x_codes, w_codes = (c.round() if whole else c for c in (x_codes, w_codes))
    y = (x_codes.to(sums) @ w_codes.to(sums).mT) * w_scale
    return y * (limit / 127) if x_scale else y


def _clipped_only(x, w, limit):
    return x.clamp(-limit, limit) @ w.mT


def feedback(w, H, scales, *, backwards=False, ends=7, copied=True, near=False, first=False,
             made=True):  # fmt: skip
    """near: the next column alone makes up; first: the error of what the column was at first."""
    y, given, inverse = w.clone() if copied else w, w.clone(), torch.linalg.inv(H)
    columns = range(w.shape[1])
    for j in reversed(columns) if backwards else columns:
        rounded = (y[:, j] / scales[:, 0]).round().clamp(-ends, ends) * scales[:, 0]
        error = ((given if first else y)[:, j] - rounded) / inverse[j, j]
        y[:, j] = rounded
        rest = slice(0, j) if backwards else slice(j + 1, j + 2 if near else None)
        y[:, rest] -= error[:, None] * inverse[j, rest]
        inverse = inverse - inverse[:, j, None] * inverse[j] / inverse[j, j]
    return y if made else y / scales


# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "tensor_parallel/feed-forward": [
        ("layers of its own", _own_layers, "the gradients of the weights", "another leaf"),
        ("a hook of x", _hook_of_x, "a second pass, in a residual stream", "a tensor of its own"),
        ("a hook of the bias", _hook_of_the_bias, "a second pass, in a residual stream", "for good"),
        ("shares kept", _shares_kept, "a second pass, in a residual stream", "has stepped them"),
        ("an output in fp32", lambda *given: feed_forward(*given).float(),
         "the output", "the dtype of x"),
        ("GELU by tanh", partial(feed_forward, gelu=partial(F.gelu, approximate="tanh")),
         "the output", "nothing is cut"),
        ("no bias between", partial(feed_forward, shifted=False), "the output", "nothing is cut"),
        ("no GELU", partial(feed_forward, gelu=lambda x: x), "the output", "nothing is cut"),
        ("sums in fp32", partial(feed_forward, total=_in_fp32), "the output", "the dtype of x"),
        ("the gradient of columns summed", partial(feed_forward, hooked="inner"),
         "the gradient of the input", "f passes x on"),
        ("parts gathered and added", partial(feed_forward, total=_gathered_and_added),
         "bytes sent", "to gather them all"),
    ],
    "tensor_parallel/cross-entropy": [
        ("a probability's logarithm", _probabilities, "large logits", "probability, too"),
        ("deaf", _Deaf.apply, "the gradient", "multiply by it"),
        ("a loss in fp32", lambda *given: loss(*given).float(), "the loss", "Keep their dtype"),
        ("logits in fp32", lambda logits, *given: loss(logits.float(), *given).double(),
         "the loss", "Keep their dtype"),
        ("the largest not added again", partial(loss, back=False), "the loss", "same number"),
        ("others' targets at −inf", partial(loss, others=-math.inf), "the loss", "count as 0"),
        ("the mean for the largest", partial(loss, top="mean"), "large logits", "that token"),
        ("clamped", partial(loss, top="none", limit=80.0), "large logits", "the largest"),
        ("of its targets", _of_its_targets, "the gradient", "zero for some tokens"),
        ("a leaf", _a_leaf, "the gradient", "no history"),
        ("n times", _as_often_as_ranks, "the gradient", "too large"),
    ],
    "tensor_parallel/bug-hunt": [
        ("gathers, then norms, with sums", partial(tokens, where="gather first, f of parameters"),
         "what is normed", "norm first"),
        ("hooks of parameters", _hooked, "a second pass", "for good"),
        ("hooks behind the gradients", partial(_hooked, after=True), "a second pass", "for good"),
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
    "pipeline/one-f-one-b": [
        ("no fewer than p", partial(order, at_most=False),
         "fewer micro-batches than ranks", "min(warm-up, m)"),
        ("backwards first", partial(order, b_first=True),
         "every operation, in a legal order", "its own forward"),
        ("the newest backward", partial(order, newest=True), "time", "B0 first"),
        ("the ends forgotten", partial(order, ends=False),
         "every operation, in a legal order", "at the end"),
        ("numbers of ranks", lambda rank, p, m: order(rank, p, m, name=lambda kind, _: f"{kind}{rank}"),
         "every operation, in a legal order", "on every rank"),
        ("eager", partial(order, warm=lambda rank, p, m: 2 * (p - 1 - rank)),
         "memory", "one for each rank behind"),
        ("all ranks at once", lambda rank, p, m: [order(each, p, m) for each in range(p)],
         "every operation, in a legal order", "of this rank"),
    ],
    "pipeline/peak": [
        ("half goes with B", partial(peak, w_frees=0.5), "W apart", "they go with W"),
        ("the first stage's", partial(peak, of=lambda op, nbytes: nbytes[0]), "1F1B", "of its stage"),
        ("all stages'", partial(peak, of=lambda op, nbytes: sum(nbytes)), "1F1B", "of its stage"),
        ("by number of micro-batch",
         partial(peak, of=lambda op, nbytes: nbytes[op.micro_batch % len(nbytes)]), "1F1B", "stage"),
        ("a mean stage",
         lambda ops, nbytes: peak(ops, [1] * len(nbytes)) * sum(nbytes) // len(nbytes),
         "1F1B", "of its stage"),
        ("before the first backward", _until_a_backward, "1F1B", "the largest count"),
        ("an entry per micro-batch", _by_micro_batch, "several chunks", "several stages"),
    ],
    "pipeline/bug-hunt": [
        ("the same chunk first", partial(interleaved, last_first=False), "two ranks", "comes back first"),
        ("one rank more behind", partial(interleaved, behind=lambda rank, p: p - rank),
         "memory", "are enough"),
        ("three hops", partial(interleaved, hops=3), "three ranks and more", "behind its first backward"),
        ("neighbouring stages",
         partial(interleaved, stage=lambda rank, c, p, chunks: rank * chunks + c),
         "two ranks", "rank + chunk·p"),
        ("one forward fewer", partial(interleaved, more=-1), "two ranks", "its own forward"),
        ("the first of three", _after_alone, "other numbers of chunks", "comes back first"),
        ("breadth first", _breadth_first, "memory", "are enough"),
    ],
    "pipeline/late-weights": [
        ("transposed products", partial(late, turned=True), "one layer", "transposed"),
        ("inputs from the first", partial(late, order=iter), "several layers", "another order"),
        ("a mean of micro-batches", partial(late, half=True), "several micro-batches", "the sum over"),
        ("the gradient of the input", partial(late, of="input"), "one layer", "layer's output"),
        ("W before it is asked for", partial(late, at_once=True), "one layer", "belong to W"),
        ("the last micro-batch alone", partial(late, adds=False), "several micro-batches", "add to"),
    ],
    "pipeline/place-w": [
        ("W last of all", partial(place, waits=lambda rank, p, m: m), "memory", "until W"),
        ("no W waits", partial(place, waits=lambda rank, p, m: 0), "time", "rank before wait"),
        ("on the last rank alone",
         partial(place, waits=lambda rank, p, m: rank * (rank == p - 1)), "time", "rank before wait"),
        ("W before B", partial(place, first=True),
         "every operation, in a legal order", "its own B"),
        ("forwards of ZB-H2", partial(place, ahead=lambda rank, p: 2 * (p - 1 - rank)),
         "memory", "until W"),
        ("as many as ranks follow", partial(place, waits=lambda rank, p, m: p - 1 - rank),
         "memory", "until W"),
    ],
    "quantization/groups": [
        ("one code more", partial(groups, reach=lambda top: top + 1), "scales", "divide by"),
        ("rounded up", partial(groups, even=math.ceil), "codes", "rounds up"),
        ("codes from 0", partial(groups, signed=True), "codes", "codes = round"),
        ("the other way round", partial(groups, way=lambda *both: both[::-1]),
         "scales", "codes first"),
        ("a scale for a row", lambda w, bits, group: groups(w, bits, w.shape[1]),
         "scales", "a scale of its own"),
        ("whole groups alone", _whole_groups, "scales", "may be short"),
        ("from min to max", _min_to_max, "scales", "top code"),
        ("scales upside down", partial(groups, way=lambda c, s: (c, 1 / s)), "scales", "one over"),
    ],
    "quantization/bug-hunt": [
        ("not clipped", partial(integers, ends=(-(2**30), 2**30)), "beyond the limit", "Clip them"),
        ("positive codes", partial(integers, ends=(0, 127)), "beyond the limit", "negative ones"),
        ("divided by 128", partial(integers, top=128), "integers", "divide by 127"),
        ("one scale for all of w", partial(integers, of_w=None),
         "a scale for each output channel", "a row of w"),
        ("without the scale of x", partial(integers, x_scale=False),
         "sums of products", "by both scales"),
        ("int16 to sum in", partial(integers, sums=torch.int16), "sums of products", "int32"),
        ("sums in fp16", partial(integers, sums=torch.float16), "sums of products", "int32"),
        ("numbers for codes", partial(integers, whole=False, sums=torch.float64), "integers", "round both"),
        ("clipped, not rounded", _clipped_only, "integers", "round both"),
    ],
    "quantization/feedback": [
        ("from the last column", partial(feedback, backwards=True), "values", "From the first"),
        ("to 8", partial(feedback, ends=8), "on the grid", "clamp"),
        ("w itself", partial(feedback, copied=False), "what is left alone", "clone"),
        ("the next column alone", partial(feedback, near=True), "values", "j + 1:"),
        ("the error of w", partial(feedback, first=True), "values", "by then"),
        ("codes", partial(feedback, made=False), "on the grid", "times scales"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
