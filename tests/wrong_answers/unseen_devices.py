"""More wrong answers to labs 02, 03, 08 and 14, by somebody who had read the labs alone."""

import random
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labutils import precision, units
from labutils.teach.exercises.memory import count_parameters, fullest_moment, saved_by_attention
from wrong_answers import Wrong

# ── 02 ───────────────────────────────────────────────────────────────────────────────────────────


def _sgd(weights, gradients, lr, *, rate=lambda lr: lr, last=lambda w: w.bfloat16(), every=0):
    master = weights.float()
    for k, gradient in enumerate(gradients, 1):
        master = master - rate(lr) * gradient.float()
        if every and k % every == 0:
            master = master.bfloat16().float()
    return last(master)


def _cut_off(master):
    """The upper half of the bits."""
    return (master.view(torch.int32) & -65536).view(torch.float32).bfloat16()


def _rate_in_bf16(lr):
    return torch.tensor(lr).bfloat16().float().item()


def _bf16_beside(weights, gradients, lr):
    """What rounding takes is kept, in bf16."""
    left = torch.zeros_like(weights)
    for gradient in gradients:
        step = left - (lr * gradient.float()).bfloat16()
        rounded = weights + step
        left, weights = step - (rounded - weights), rounded
    return weights


def _scales(finite, start, interval, *, most=float("inf"), after=0, twice=False):
    found, good, bad = [start], 0, 0
    for ok in finite:
        good, bad = (good + 1, 0) if ok else (after, bad + 1)
        if not ok:
            found.append(found[-1] / (4 if twice and bad > 1 else 2))
        elif good == interval:
            found.append(min(2 * found[-1], most))
            good = 0
        else:
            found.append(found[-1])
    return found


def _before(finite, start, interval):
    """Scales after each step alone."""
    return precision.scales(finite, start, interval)[1:]


def _step(loss, optimizer, scaler, max_norm, *, bound=None, by_hand=False, clean=False,
          asks=False, raises=False, twice=False):  # fmt: skip
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if clean:
        for p in parameters:
            p.grad.nan_to_num_(0.0, 0.0, 0.0)
    if by_hand:
        for p in parameters:
            p.grad /= scaler.value
    elif bound is None:
        scaler.unscale_(optimizer)
    most = bound(max_norm, scaler.value) if bound else max_norm
    nn.utils.clip_grad_norm_(parameters, most, error_if_nonfinite=raises)
    taken = scaler.step(optimizer)
    if taken or not asks:
        scaler.update()
    if twice:
        scaler.update()


# ── 03 ───────────────────────────────────────────────────────────────────────────────────────────


def _counts(more, change=lambda c: {}):
    return lambda config: count_parameters(config | change(config)) + more(config)


def _one_head_if_unsaid(config):
    return count_parameters({"num_key_value_heads": 1} | config)


def _layers(config):
    return config["num_hidden_layers"]


def _keeps(more):
    return lambda b, s, h, a, g, size: (
        saved_by_attention(b, s, h, a, g, size) + more(b, s, h, a, g, size)
    )


def _moments(loss, update):
    def fullest(parameters, activations, logits, stepping):
        foreach = stepping == "foreach"
        after = loss(parameters, activations, logits, foreach)
        step = update(parameters, activations, logits, foreach)
        return max(("backward", after), ("optimizer", step), key=lambda moment: moment[1])

    return fullest


def _after_the_loss(p, act, logits, foreach):
    return 14 * p + act + 2 * logits


def _updating(p, act, logits, foreach):
    return (24 if foreach else 20) * p


def _frees_at_once(gpu):
    for _ in range(gpu.capacity // (2 * units.MIB)):
        gpu.alloc(512)
        gpu.free(gpu.alloc(units.MIB))
        gpu.free(gpu.alloc(units.MIB - 512))


def _stays(nbytes, *goes, segments=None):
    def fragment(gpu):
        going = []
        for _ in range(segments or gpu.capacity // (nbytes + sum(goes))):
            gpu.alloc(nbytes)
            going += [gpu.alloc(size) for size in goes]
        for address in going:
            gpu.free(address)

    return fragment


def _last_stays(gpu):
    """All in pieces of 1 MiB; the last one stays."""
    pieces = [gpu.alloc(units.MIB) for _ in range(gpu.capacity // units.MIB)]
    for address in pieces[:-1]:
        gpu.free(address)


# ── 08 ───────────────────────────────────────────────────────────────────────────────────────────


def _order(length, epoch):
    return random.Random(epoch).sample(range(length), length)


def _last_again(length, rank, size, epoch):
    order = _order(length, epoch)
    return (order + order[-1:] * (-length % size))[rank::size]


def _fresh_rest(length, rank, size, epoch):
    """What fills up is drawn by each rank for itself."""
    mine = _order(length, epoch)[rank::size]
    if len(mine) < -(-length // size):
        mine.append(random.Random(f"{epoch} {rank}").randrange(length))
    return mine


def _blocks(length, rank, size, epoch):
    """Blocks of neighbors are shuffled, and not what is in them."""
    starts = list(range(0, length, 4))
    random.Random(epoch).shuffle(starts)
    order = [i for start in starts for i in range(start, min(start + 4, length))]
    share = -(-length // size)
    return (order * size)[rank * share : (rank + 1) * share]


def _by_first(length, rank, size, epoch):
    """One order for all epochs, and the ranks change places."""
    return (_order(length, 0) * size)[: -(-length // size) * size][(rank + epoch) % size :: size]


def _one_for_all(length, rank, size, epoch):
    """Everybody the first ones."""
    return _order(length, epoch)[: -(-length // size)]


def _hooks(module, comm, *, reduce=None, told=lambda rank: 0, only=lambda p: True):
    def mean(parameter):
        parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size)

    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter, src=told(comm))
        if parameter.requires_grad and only(parameter):
            ready = partial(reduce, comm=comm) if reduce else mean
            parameter.register_post_accumulate_grad_hook(ready)


def _maximum(parameter, comm):
    parameter.grad.copy_(comm.all_reduce(parameter.grad, "max"))


def _by_numel(parameter, comm):
    parameter.grad.copy_(comm.all_reduce(parameter.grad) / parameter.numel())


def _root(parameter, comm):
    parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size**0.5)


def _in_bf16(parameter, comm):
    parameter.grad.copy_(comm.all_reduce(parameter.grad.bfloat16()) / comm.size)


def _steps_too(parameter, comm):
    parameter.grad.copy_(comm.all_reduce(parameter.grad) / comm.size)
    parameter.data.sub_(0.1 * parameter.grad)


class _Buckets:
    """Buckets with a slip in a method that a subclass overrides."""

    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.most, self.quiet = module, comm, bucket_bytes, 0
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.bucket, self.come = [], 0
        self.start()
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def start(self):
        for parameter in self.module.parameters():
            self.comm.broadcast(parameter, out=parameter)

    def ready(self, parameter):
        if self.quiet:
            return
        self.come = (self.come + 1) % len(self.trained)
        self.bucket.append(parameter)
        if not self.come or sum(p.nbytes for p in self.bucket) >= self.most:
            self.flush()

    def flush(self):
        flat = self.comm.all_reduce(torch.cat([p.grad.flatten() for p in self.bucket]))
        flat = self.divided(flat)
        for p, part in zip(self.bucket, flat.split([p.numel() for p in self.bucket]), strict=True):
            p.grad.copy_(part.view_as(p))
        self.bucket = []

    def divided(self, flat):
        return flat / self.comm.size

    @contextmanager
    def no_sync(self):
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def __call__(self, *args):
        return self.module(*args)


class _Sums(_Buckets):
    def divided(self, flat):
        return flat


class _DividesByBuckets(_Buckets):
    def divided(self, flat):
        return flat / len(self.bucket)


class _Backwards(_Buckets):
    """What was put in last is taken out first."""

    def flush(self):
        flat = self.comm.all_reduce(torch.cat([p.grad.flatten() for p in self.bucket]))
        for p in reversed(self.bucket):
            part, flat = flat[: p.numel()], flat[p.numel() :]
            p.grad.copy_(part.view_as(p) / self.comm.size)
        self.bucket = []


class _CountsInSilence(_Buckets):
    """Gradients that come in no_sync() count as well."""

    def ready(self, parameter):
        self.come = (self.come + 1) % (len(self.trained) + 1)
        if self.quiet:
            return
        self.bucket.append(parameter)
        if self.come == len(self.trained) or sum(p.nbytes for p in self.bucket) >= self.most:
            self.flush()


class _KeepsTheBucket(_Buckets):
    def flush(self):
        found = self.bucket
        super().flush()
        self.bucket = found


class _FromEach(_Buckets):
    """The last rank's weights for all."""

    def start(self):
        for parameter in self.module.parameters():
            self.comm.broadcast(parameter, out=parameter, src=self.comm.size - 1)


class _SilentToggle(_Buckets):
    @contextmanager
    def no_sync(self):
        self.quiet = not self.quiet
        try:
            yield
        finally:
            self.quiet = not self.quiet


# ── 14 ───────────────────────────────────────────────────────────────────────────────────────────


class _Layer(nn.Module):
    """An adapter beside a layer, with slips in what a subclass overrides."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, linear.in_features))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale, self.kept = alpha / rank, None

    def update(self, x):
        return self.scale * (x @ self.A.T @ self.B.T)

    def forward(self, x):
        return self.linear(x) if self.kept is not None else self.linear(x) + self.update(x)

    @torch.no_grad()
    def merge(self):
        if self.kept is None:
            self.kept = self.linear.weight.clone()
            self.linear.weight += self.scale * self.B @ self.A

    @torch.no_grad()
    def unmerge(self):
        if self.kept is not None:
            self.linear.weight.copy_(self.kept)
            self.kept = None


class _Activated(_Layer):
    """A nonlinearity between the two, as in the adapters before LoRA."""

    def update(self, x):
        return self.scale * (F.relu(x @ self.A.T) @ self.B.T)


class _BehindTheLayer(_Layer):
    """The input is normalized on its way to A."""

    def update(self, x):
        return super().update(F.normalize(x, dim=-1))


class _OnlyB(_Layer):
    """A stays as it was drawn."""

    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.A.requires_grad_(False)


class _InFp32(_Layer):
    """The layer is made anew, in fp32."""

    def __init__(self, linear, rank, alpha):
        d, k = linear.weight.shape
        copied = nn.Linear(k, d)
        copied.load_state_dict(linear.state_dict())
        super().__init__(copied, rank, alpha)


class _Halves(_Layer):
    """Two products, of half the rank each, and the second forgotten."""

    def update(self, x):
        r = len(self.A) // 2 or 1
        return self.scale * (x @ self.A[:r].T @ self.B[:, :r].T)


class _MergesTransposed(_Layer):
    @torch.no_grad()
    def merge(self):
        if self.kept is None:
            self.kept = self.linear.weight.clone()
            self.linear.weight += self.scale * (self.B @ self.A).T


class _MergesWithoutScale(_Layer):
    @torch.no_grad()
    def merge(self):
        if self.kept is None:
            self.kept = self.linear.weight.clone()
            self.linear.weight += self.B @ self.A


class _KeepsAReference(_Layer):
    @torch.no_grad()
    def merge(self):
        if self.kept is None:
            self.kept = self.linear.weight
            self.linear.weight += self.scale * self.B @ self.A


class _NeverLeaves(_Layer):
    """unmerge() puts W back, and the adapter stays out."""

    @torch.no_grad()
    def unmerge(self):
        if self.kept is not None:
            self.linear.weight.copy_(self.kept)


class _MergesTheBias(_Layer):
    @torch.no_grad()
    def merge(self):
        if self.kept is None:
            super().merge()
            self.linear.bias += self.scale * (self.B @ self.A).sum(1)


def _held(linears, rank, itemsize, *, size=lambda each: each.in_features + each.out_features,
          numbers=lambda each: sum(p.numel() for p in each.parameters()), each=16, more=0):  # fmt: skip
    trained = sum(rank * size(layer) for layer in linears)
    return trained, itemsize * sum(map(numbers, linears)) + each * trained + more


# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "precision/master-weights": [
        ("digits cut off", partial(_sgd, last=_cut_off), "short steps add up", "cut off"),
        ("the rate in bf16", partial(_sgd, rate=_rate_in_bf16), "rounded once", "the learning rate"),
        ("rounded every ten steps", partial(_sgd, every=10), "short steps add up", "read it back"),
        ("beside it, in bf16", _bf16_beside, "rounded once", "fp32 all the way"),
        ("half the rate", partial(_sgd, rate=lambda lr: lr / 2), "long steps", "One step"),
        ("fp16 comes back", partial(_sgd, last=lambda w: w.half()), "half again", "float16"),
    ],
    "precision/dynamic-scale": [
        ("at most 2²⁴", partial(_scales, most=2.0**24), "it grows", "no upper end"),
        ("an inf counts as one good step", partial(_scales, after=1), "in a row", "to 0"),
        ("a second inf costs more", partial(_scales, twice=True), "it backs off", "halves"),
        ("scales after the steps alone", _before, "it grows", "before each"),
        ("the scale begins at 1", lambda finite, start, interval: [
            scale / start for scale in precision.scales(finite, start, interval)], "it grows", "doubles"),
    ],
    "precision/bug-hunt": [
        ("a smaller bound, before it is unscaled", partial(_step, bound=lambda n, s: n / s),
         "clipping sees true gradients", "unscale"),
        ("unscaled by hand as well", partial(_step, by_hand=True), "a plain step", "once too often"),
        ("NaN becomes 0", partial(_step, clean=True), "an overflow changes nothing", "in any"),
        ("no update after a skipped step", partial(_step, asks=True), "the scale moves", "between two calls of update()"),
        ("an error in an overflow", partial(_step, raises=True), "an overflow changes nothing", "your code raised"),
        ("two updates", partial(_step, twice=True), "a plain step", "since the last update()"),
    ],
    "memory/count-parameters": [
        ("one head of keys if nothing is said", _one_head_if_unsaid, "Llama 2 7B", "as many as"),
        ("a bias in the head", _counts(lambda c: c["vocab_size"]), "Llama 2 7B", "has no bias"),
        ("three norms", _counts(lambda c: _layers(c) * c["hidden_size"]), "Llama 2 7B", "two norms"),
        ("Qwen2 is always tied", _counts(lambda c: 0, lambda c: {
            "tie_word_embeddings": c["model_type"] == "qwen2"}), "Qwen2 7B", "The head is missing"),
        ("no query heads of their own", _counts(lambda c: 0, lambda c: {
            "num_attention_heads": c.get("num_key_value_heads", c["num_attention_heads"])}),
         "Llama 3.1 8B, with fewer key–value heads", "a value head of its own"),
    ],
    "memory/saved-by-attention": [
        ("the mask, a byte each", _keeps(lambda b, s, h, a, g, size: s * s),
         "as many key–value heads as heads", "need not be kept"),
        ("the mask of each head, a byte each", _keeps(lambda b, s, h, a, g, size: a * b * s * s),
         "as many key–value heads as heads", "need not be kept"),
        ("a norm as well", _keeps(lambda b, s, h, a, g, size: size * b * s * h),
         "as many key–value heads as heads", "too many"),
        ("the log-sum-exp in place of the softmax",
         _keeps(lambda b, s, h, a, g, size: size * a * b * (s - s * s)),
         "as many key–value heads as heads", "softmax"),
        ("one sequence", lambda b, s, h, a, g, size: saved_by_attention(1, s, h, a, g, size),
         "as many key–value heads as heads", "b sequences"),
    ],
    "memory/bug-hunt-peak": [
        ("two working copies", _moments(_after_the_loss, lambda p, act, logits, foreach: (
            28 if foreach else 20) * p), "one sequence, foreach", "working copy"),
        ("activations stay", _moments(_after_the_loss, lambda p, act, logits, foreach: (
            24 if foreach else 20) * p + act), "one sequence, fused", "no activation"),
        ("no masters after the loss", _moments(lambda p, act, logits, foreach: (
            10 * p + act + 2 * logits), _updating), "more sequences", "two moments"),
        ("weights in fp32", _moments(lambda p, act, logits, foreach: 16 * p + act + 2 * logits,
         lambda p, act, logits, foreach: (26 if foreach else 22) * p), "one sequence, fused", "are bf16"),
        ("the other way round", lambda *asked: (
            {"backward": "optimizer", "optimizer": "backward"}[fullest_moment(*asked)[0]],
            fullest_moment(*asked)[1]), "one sequence, fused", "is over"),
    ],
    "memory/fragment": [
        ("freed at once", _frees_at_once, "20 MiB are refused", "no segment has taken"),
        ("10 MiB pieces, every second one", _stays(10 * units.MIB, 10 * units.MIB),
         "20 MiB are refused", "nothing is left"),
        ("forty segments", _stays(512, units.MIB, units.MIB - 512, segments=40),
         "20 MiB are refused", "gpu.available"),
        ("the last stays", _last_stays, "20 MiB are refused", "did something stay"),
        ("1 MiB in 20", _stays(units.MIB + 1, 9 * units.MIB, 9 * units.MIB), "99 % are free", "too large"),
    ],
    "data_parallel/sampler": [
        ("the last one again", _last_again, "nobody works twice", "spread"),
        ("a rest of its own", _fresh_rest, "nobody works twice", "first ones"),
        ("blocks of neighbors", _blocks, "a new order in every epoch", "the examples themselves"),
        ("ranks change places", _by_first, "a new order in every epoch", "depend on the epoch"),
        ("everybody the first ones", _one_for_all, "nobody works twice", "for nothing"),
    ],
    "data_parallel/hooks": [
        ("the largest", partial(_hooks, reduce=_maximum), "the gradient of the whole batch",
         "a sum, divided"),
        ("by the number of elements", partial(_hooks, reduce=_by_numel),
         "the gradient of the whole batch", "nothing else"),
        ("by the root", partial(_hooks, reduce=_root), "the gradient of the whole batch",
         "nothing else"),
        ("in bf16", partial(_hooks, reduce=_in_bf16), "the gradient of the whole batch", "dtype"),
        ("steps at once", partial(_hooks, reduce=_steps_too), "the gradient of the whole batch",
         "the optimizer steps"),
        ("the last rank's weights", partial(_hooks, told=lambda comm: comm.size - 1),
         "equal starts", "src=0"),
        ("matrices alone", partial(_hooks, only=lambda p: p.dim() > 1),
         "the gradient of the whole batch", "own gradient"),
    ],
    "data_parallel/bug-hunt": [
        ("sums", _Sums, "full buckets", "All-reduce sums"),
        ("by the size of the bucket", _DividesByBuckets, "full buckets", "number of ranks"),
        ("taken out backwards", _Backwards, "full buckets", "the mean over ranks"),
        ("counts in silence", _CountsInSilence, "step after step", "the next backward pass"),
        ("keeps the bucket", _KeepsTheBucket, "step after step", "It happened in"),
        ("the last rank's weights", _FromEach, "equal starts", "src=0"),
        ("a switch", _SilentToggle, "no_sync in no_sync", "turns the first one round"),
    ],
    "lora/adapter": [
        ("a nonlinearity", _Activated, "the factor α/r", "no multiple"),
        ("a norm before A", _BehindTheLayer, "the factor α/r", "no multiple"),
        ("A stays as drawn", _OnlyB, "what is trained", "A is not trained"),
        ("made anew in fp32", _InFp32, "it begins as the layer", "dtype"),
        ("half of the rank", _Halves, "the factor α/r", "first A"),
    ],
    "lora/held": [
        ("a square of the inputs", partial(_held, size=lambda each: 2 * each.in_features),
         "numbers trained", "d outputs"),
        ("biases get adapters", partial(_held, size=lambda each: each.in_features
         + each.out_features * (1 + (each.bias is not None))), "numbers trained",
         "has no adapter"),
        ("a master copy", partial(_held, each=20), "bytes held", "no master copy"),
        ("adapters in bf16", partial(_held, each=14), "bytes held", "all fp32"),
        ("frozen weights in fp32", lambda linears, rank, itemsize: _held(linears, rank, 4),
         "bytes held", "four bytes"),
        ("merged", lambda linears, rank, itemsize: (
            _held(linears, rank, itemsize)[0], _held(linears, rank, itemsize, each=12)[1]),
         "bytes held", "four numbers"),
    ],
    "lora/bug-hunt": [
        ("transposed", _MergesTransposed, "merged, the same values", "takes the place"),
        ("without the factor", _MergesWithoutScale, "merged, the same values", "(α/r)"),
        ("a reference, not a copy", _KeepsAReference, "unmerged, the same bits", "clone"),
        ("the adapter stays out", _NeverLeaves, "unmerged, the same bits", "the adapter is not"),
        ("the bias too", _MergesTheBias, "merged, the same values", "takes the place"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
