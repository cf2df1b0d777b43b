"""Wrong answers to labs 14–16 by somebody who had not read their checks."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labutils import quantization
from wrong_answers import Wrong

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def slip(of, **switches):
    return type(of.__name__, (of,), switches)


# ── 14 ───────────────────────────────────────────────────────────────────────────────────────────


class Adapter(nn.Module):
    frozen, zero, registered, detached = ("weight", "bias"), "B", True, False
    factor = staticmethod(lambda alpha, rank: alpha / rank)

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear, self.factor(alpha, rank)
        for name, parameter in linear.named_parameters():
            parameter.requires_grad_(name not in self.frozen)
        a, b = (
            linear.weight.new_zeros(rank, linear.in_features),
            linear.weight.new_zeros(linear.out_features, rank),
        )
        with torch.no_grad():
            for factor in {"A": [b], "B": [a], "none": [a, b], "both": []}[self.zero]:
                factor.normal_()
        kind = nn.Parameter if self.registered else torch.Tensor.requires_grad_
        self.A, self.B = kind(a), kind(b)

    def forward(self, x):
        with torch.set_grad_enabled(not self.detached):
            y = self.linear(x)
        return y + self.scale * (x @ self.A.mT @ self.B.mT)


def held(linears, rank, itemsize, *, each=16, biases=True, count=lambda r, i, o: r * (i + o)):
    trained = sum(count(rank, layer.in_features, layer.out_features) for layer in linears)
    parts = [p for x in linears for p in ([x.weight, x.bias] if biases else [x.weight])]
    return trained, itemsize * sum(p.numel() for p in parts if p is not None) + each * trained


class Mergeable(nn.Module):
    puts_back, once, early, forgets, itself = "what was", True, True, False, False
    first = False

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features).normal_())
        self.B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        self.merged, self.before = False, None

    def forward(self, x):
        y = self.linear(x)
        if self.merged and self.early:
            return y
        return y + (0 if self.merged else self.scale) * (x @ self.A.mT @ self.B.mT)

    @torch.no_grad()
    def merge(self):
        if self.merged and self.once:
            return
        weight, update = self.linear.weight, self.scale * self.B @ self.A
        if self.before is None or not self.first:
            self.before = weight if self.itself else weight.clone()
        self.added = update
        weight += update
        self.merged = True
        if self.forgets:
            self.B.zero_()

    @torch.no_grad()
    def unmerge(self):
        if not self.merged:
            return
        weight, now = self.linear.weight, self.scale * self.B @ self.A
        back = {"what was": self.before, "half": self.before.bfloat16().to(weight.dtype),
                "added": weight - self.added, "now": weight - now}  # fmt: skip
        weight.copy_(back[self.puts_back])
        self.merged = False


class Thaws(Mergeable):
    """A weight of its own while it is merged, which an optimizer would find."""

    def merge(self):
        frozen = self.linear.weight
        super().merge()
        self.linear.weight = nn.Parameter(frozen.detach())

    def unmerge(self):
        super().unmerge()
        self.linear.weight.requires_grad_(False)


# ── 15 ───────────────────────────────────────────────────────────────────────────────────────────


def _whole_rows(w, bits, group):
    if group < w.shape[1]:
        return groups(w, bits, group)
    scale = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (w / scale).round(), scale


def groups(w, bits, group, *, top=lambda bits: 2 ** (bits - 1) - 1, largest=None, cut=torch.round):
    d, k = w.shape
    rows = F.pad(w, (0, -k % group)).view(d, -1, group)
    scales = (largest(rows) if largest else rows.abs().amax(-1)) / top(bits)
    safe = scales.where(scales != 0, torch.ones_like(scales))
    codes = cut(rows / safe[..., None]).clamp(-top(bits), top(bits))
    return codes.reshape(d, -1)[:, :k].to(torch.int8), scales


def _rest_dropped(w, bits, group):
    k = w.shape[1] // group * group
    codes, scales = groups(w[:, :k], bits, group)
    return torch.cat([codes, codes.new_zeros(len(w), w.shape[1] - k)], 1), scales


def _down_the_columns(w, bits, group):
    codes, scales = groups(w.mT.contiguous(), bits, group)
    return codes.mT, scales.mT


def int8(x, w, limit, *, dim=1, clip="before", sums=torch.int32, scale=None, one=False, top=127,
         bits=8):  # fmt: skip
    if bits == 7:
        step = w.abs().amax(1, keepdim=True) / 63
        w = (w / step).round() * step
    w_scale = (w.abs().amax().expand(len(w), 1) if one else w.abs().amax(dim, keepdim=True)) / 127
    x_scale = (scale(x) if scale else limit) / 127
    whole = (x / x_scale).round()
    codes = (whole.clamp(-top, top) if clip == "before" else whole).to(torch.int8)
    product = codes.clamp(-127, 127).to(sums) @ (w / w_scale).round().to(torch.int8).mT.to(sums)
    return product * x_scale * w_scale.flatten()


def feedback(w, H, scales, *, top=7, eliminates=True, backwards=False, divides=True, sign=-1,
             inverts=True, hands_on=True):  # fmt: skip
    w, out = w.clone(), torch.zeros_like(w)
    inverse = torch.linalg.inv(H) if inverts else H.clone()
    for j in range(w.shape[1])[:: -1 if backwards else 1]:
        out[:, j] = (w[:, j] / scales[:, 0]).round().clamp(-top, top) * scales[:, 0]
        error = (w[:, j] - out[:, j]) / (inverse[j, j] if divides else 1)
        free = slice(0, j) if backwards else slice(j + 1, None)
        w[:, free] += hands_on * sign * error[:, None] * inverse[j, free]
        if eliminates:
            inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]
    return out


def cast(x, amax, dtype, *, own=False, top=None, clips=True, inverse=True, power=False):
    most = top or torch.finfo(dtype).max
    amax = x.abs().max().item() if own else amax
    scale = most / amax if amax else 1.0
    scale = 2.0 ** math.floor(math.log2(scale)) if power else scale
    codes = (x * scale).clamp(-most, most) if clips else x * scale
    return codes.to(dtype), 1 / scale if inverse else scale


_LONG, _HIGH, _SQUARE = (1, 128), (128, 1), (128, 128)


def products(x, w, grad, *, dtype=E4M3, rows=_LONG, columns=_HIGH, weights=_SQUARE, exact=()):
    def eight(matrix, tile):
        return quantization.to_eight(matrix, dtype, tile)

    found = [
        quantization.product(eight(x, rows), eight(w, weights)),
        quantization.product(eight(grad, rows), eight(w, weights).mT),
        quantization.product(eight(grad, columns).mT, eight(x, columns).mT),
    ]
    for i in exact:
        found[i] = (x @ w.mT, grad @ w, grad.mT @ x)[i]
    return tuple(found)


class Delayed:
    before, largest, newest, zeros, anew, margin, of_last = True, True, True, True, True, 1.0, False
    signed = False

    def __init__(self, dtype, length):
        self.dtype, self.length = dtype, length
        self.history, self.seen, self.scale = [], 0.0, 1.0

    def cast(self, x):
        top = quantization.largest(self.dtype)
        codes = quantization.cast((x * self.scale).clamp(-top, top), self.dtype)
        inside = codes.float().abs().max().item() / self.scale
        amax = (x if self.signed else x.abs()).max().item() if self.before else inside
        self.seen = max(self.seen, amax) if self.largest else amax
        return codes, 1 / self.scale

    def advance(self):
        history = [*self.history, self.seen]
        self.history = history[-self.length :] if self.newest else history[: self.length]
        most = self.history[-1] if self.of_last else max(self.history)
        if most or not self.zeros:
            self.scale = self.margin * quantization.largest(self.dtype) / most
        self.seen = 0.0 if self.anew else self.seen


# ── 16 ───────────────────────────────────────────────────────────────────────────────────────────


def recipe(optimizer, lr, decay, k, steps, *, factor=None, epochs=5, ahead=0, shape=None,
           decayed=lambda decay, k, f: decay * k / f):  # fmt: skip
    f = factor(optimizer, k) if factor else k if optimizer == "sgd" else math.sqrt(k)

    def rate(t):
        share = min((t + ahead) / (epochs * steps), 1)
        return shape(lr, f, share, t // steps) if shape else lr * (1 + (f - 1) * share)

    return rate, decayed(decay, k, f)


def noise(gradients, b, comm, *, means=True, own=False, corrects=True, divides=None):
    n, traces, signals = comm.size, [], []
    for gradient in gradients:
        mean = comm.all_reduce(gradient) / (n if means else 1)
        small, large = gradient.square().sum(), mean.square().sum()
        small = small if own else comm.all_reduce(small.reshape(1))[0] / n
        traces.append((small - large) / (1 / b - 1 / (n * b)) if corrects else small * b)
        signals.append((n * large - small) / (n - 1) if corrects else large)
    trace, signal = torch.stack(traces), torch.stack(signals)
    return float(divides(trace, signal) if divides else trace.mean() / signal.mean())


class Momentum:
    means, scaled_decay, corrects, upside_down, inside, ahead = True, False, True, False, False, 0

    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w, self.lr, self.k, self.decay, self.warm = w, lr, k, decay, warm
        self.velocity, self.t, self.last = torch.zeros_like(w), 0, None

    def rate(self):
        share = min((self.t + self.ahead) / self.warm, 1) if self.warm else 1
        return self.lr * (1 + share * (self.k - 1))

    def step(self, gradients):
        rate = self.rate()
        decay = self.decay * (self.k if self.scaled_decay else 1)
        gradient = sum(gradients) / (len(gradients) if self.means else 1) + decay * self.w
        if self.inside:
            self.velocity = rate * (0.9 * self.velocity + gradient)
        else:
            change = rate / (self.last or rate) if self.corrects else 1.0
            change = 1 / change if self.upside_down else change
            self.velocity = 0.9 * change * self.velocity + rate * gradient
        self.last = rate
        self.w -= self.velocity
        self.t += 1


class OfItsOwn(Momentum):
    def __init__(self, w, *args, **options):
        super().__init__(w.clone(), *args, **options)


# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "lora/adapter": [
        ("the bias trains", slip(Adapter, frozen=("weight",)), "what is trained", "its bias too"),
        ("α over √r", slip(Adapter, factor=staticmethod(lambda alpha, rank: alpha / rank**0.5)),
         "the factor α/r", "rank-stabilized"),
        ("both zero, again", slip(Adapter, zero="both"), "it learns", "both zero"),
        ("none zero", slip(Adapter, zero="none"), "it begins as the layer", "must be zero"),
        ("tensors, not parameters", slip(Adapter, registered=False), "what is trained", "A has"),
        ("under no_grad", slip(Adapter, detached=True), "the layer below", "flows through B·A alone"),
    ],
    "lora/held": [
        ("biases forgotten", partial(held, biases=False), "bytes held", "biases are missing"),
        ("one moment, again", partial(held, each=12), "bytes held", "not three"),
        ("no moments, again", partial(held, each=8), "bytes held", "two moments"),
        ("a product of both sides", partial(held, count=lambda r, i, o: r * i * o),
         "numbers trained", "more than W"),
        ("one factor", partial(held, count=lambda r, i, o: r * i), "numbers trained", "A alone"),
        ("bits", lambda linears, r, size: held(linears, r, 8 * size), "bytes held", "itemsize"),
    ],
    "lora/bug-hunt": [
        ("kept at the first merge", slip(Mergeable, first=True), "weights loaded later", "merged first"),
        ("merges again", slip(Mergeable, once=False), "merged twice", "two times"),
        ("takes off what it would add", slip(Mergeable, puts_back="now"),
         "unmerged, the same bits", "put it back"),
        ("takes off what it added", slip(Mergeable, puts_back="added"),
         "unmerged, the same bits", "put it back"),
        ("times zero, again", slip(Mergeable, early=False), "no work left", "return early"),
        ("keeps no copy", slip(Mergeable, itself=True), "unmerged, the same bits", "no rounding"),
        ("keeps it in bf16", slip(Mergeable, puts_back="half"), "unmerged, the same bits", "Keep W"),
        ("thaws", Thaws, "trained as before", "unless told otherwise"),
        ("forgets B", slip(Mergeable, forgets=True), "unmerged, the same bits",
         "the adapter is not"),
    ],
    "quantization/groups": [
        ("as far as −8", partial(groups, top=lambda bits: 2 ** (bits - 1)), "scales", "not ±8"),
        ("127 for all", partial(groups, top=lambda bits: 127), "scales", "the top code"),
        ("floor", partial(groups, cut=torch.floor), "codes", "round(w / scale)"),
        ("cut off, again", partial(groups, cut=torch.trunc), "codes", "the fraction off"),
        ("without signs", partial(groups, largest=lambda rows: rows.amax(-1)), "scales", "max|w|"),
        ("the rest left out", _rest_dropped, "scales", "may be short"),
        ("a whole row of zeros", _whole_rows, "a group of zeros", "0/0 is NaN"),
        ("eight at most", lambda w, bits, group: groups(w, bits, min(group, 8)), "scales", "groups"),
        ("three at least", partial(groups, top=lambda bits: max(2 ** (bits - 1) - 1, 3)),
         "scales", "all 2ᵇ − 1 steps"),
        ("groups of a column", _down_the_columns, "scales", "within a row"),
    ],
    "quantization/bug-hunt": [
        ("scales of inputs", partial(int8, dim=0), "a scale for each output channel", "a row of w"),
        ("a scale for all", partial(int8, one=True), "a scale for each output channel", "a row of w"),
        ("clips afterwards", partial(int8, clip="after"), "beyond the limit", "Clip first"),
        ("sums in int8", partial(int8, sums=torch.int8), "sums of products", "Sum in int32"),
        ("sums in int16", partial(int8, sums=torch.int16), "sums of products", "Sum in int32"),
        ("a scale after x", partial(int8, scale=lambda x: x.abs().max()),
         "beyond the limit", "limit / 127"),
        ("the codes end at 126", partial(int8, top=126), "integers", "−127 … 127"),
        ("weights in seven bits", partial(int8, bits=7), "integers", "−127 … 127"),
        ("no codes", lambda x, w, limit: x.clamp(-limit, limit) @ w.mT, "integers", "round both"),
    ],
    "quantization/feedback": [
        ("codes to 8", partial(feedback, top=8), "on the grid", "clamp before"),
        ("the inverse left", partial(feedback, eliminates=False), "values", "Eliminate j"),
        ("nothing handed on", partial(feedback, hands_on=False), "values", "nearest value"),
        ("from the last one", partial(feedback, backwards=True), "values", "change w[:, j + 1:]"),
        ("not divided, again", partial(feedback, divides=False), "values", "Divide the error"),
        ("the other sign, again", partial(feedback, sign=1), "values", "wrong way round"),
        ("H itself, again", partial(feedback, inverts=False), "values", "*inverse* of H"),
    ],
    "fp8/cast": [
        ("clips nothing", partial(cast, clips=False), "what is beyond", "goes to infinity"),
        ("448 for both, again", partial(cast, top=448.0), "the whole range", "brings amax to"),
        ("its own amax", partial(cast, own=True), "amax as given", "amax is given"),
        ("the scale itself", partial(cast, inverse=False), "back again", "one over it"),
        ("powers of two", partial(cast, power=True), "the whole range", "brings amax to"),
    ],
    "fp8/products": [
        ("rows for all", partial(products, columns=_LONG), "scales", "lies across"),
        ("squares for all", partial(products, rows=_SQUARE, columns=_SQUARE), "values", "for weights"),
        ("e5m2", partial(products, dtype=E5M2), "values", "E4M3"),
        ("y in fp32", partial(products, exact=[0]), "values", "y is off"),
        ("w's gradient in fp32", partial(products, exact=[2]), "values", "gradient of w"),
        ("weights by rows", partial(products, weights=_LONG), "scales", "changes after 1"),
        ("one scale", partial(products, rows=None, columns=None, weights=None),
         "values", "a whole tensor"),
    ],
    "fp8/bug-hunt": [
        ("looks behind the cast", slip(Delayed, before=False), "a jump is learned", "*before*"),
        ("the last micro-batch, again", slip(Delayed, largest=False), "micro-batches", "largest of all"),
        ("the first steps", slip(Delayed, newest=False), "the history advances", "the oldest"),
        ("divides by zero", slip(Delayed, zeros=False), "zeros", "divides by 0"),
        ("never begins anew", slip(Delayed, anew=False), "the history advances", "the oldest"),
        ("the last step alone", slip(Delayed, of_last=True), "the history advances", "the largest"),
        ("the largest with its sign", slip(Delayed, signed=True), "a steady tensor", "to 448"),
        ("half the range", slip(Delayed, margin=0.5), "a steady tensor", "brings the largest"),
    ],
    "scaling/recipe": [
        ("linear for all, again", partial(recipe, factor=lambda name, k: k), "the rule", "is SGD's"),
        ("the root for all", partial(recipe, factor=lambda name, k: k**0.5), "the rule", "k·lr"),
        ("from 0, again", partial(recipe, shape=lambda lr, f, share, epoch: lr * f * share),
         "where the warm-up begins", "begins at η"),
        ("one epoch", partial(recipe, epochs=1), "every iteration", "five epochs of"),
        ("in leaps", partial(recipe, shape=lambda lr, f, share, epoch:
                             lr * (1 + (f - 1) * min(epoch / 5, 1))), "every iteration", "in leaps"),
        ("one ahead", partial(recipe, ahead=1), "where the warm-up begins", "Iteration 0"),
        ("decay as it was", partial(recipe, decayed=lambda decay, k, f: decay),
         "weight decay", "make up for"),
        ("decay by k", partial(recipe, decayed=lambda decay, k, f: decay * k),
         "weight decay", "as much as before"),
    ],
    "scaling/noise-on-ranks": [
        ("a mean of ratios", partial(noise, divides=lambda t, s: (t / s).mean()),
         "value", "mean of ratios"),
        ("the first seed", partial(noise, divides=lambda t, s: t[0] / s[0]), "value", "E|g|²"),
        ("sums of gradients", partial(noise, means=False), "value", "*sums*"),
        ("a rank's own length", partial(noise, own=True), "value", "from rank to rank"),
        ("lengths as they are", partial(noise, corrects=False), "value", "E|g|²"),
        ("upside down, again", partial(noise, divides=lambda t, s: s.mean() / t.mean()),
         "value", "one over"),
    ],
    "scaling/bug-hunt": [
        ("sums", slip(Momentum, means=False), "several micro-batches", "too large"),
        ("the decay scaled", slip(Momentum, scaled_decay=True), "weight decay", "this number stays"),
        ("the old velocity", slip(Momentum, corrects=False), "while the rate grows", "correction"),
        ("the change upside down", slip(Momentum, upside_down=True),
         "while the rate grows", "upside down"),
        ("the rate on all of it", slip(Momentum, inside=True), "one micro-batch", "torch.optim.SGD"),
        ("one ahead", slip(Momentum, ahead=1), "while the rate grows", "the second rate"),
        ("a tensor of its own", OfItsOwn, "one micro-batch", "keeps the old one"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
