"""Wrong answers to labs 00–04 by somebody who had not read their checks."""

import functools
import io
import math
from functools import partial

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from labutils import accumulation, floats, memory, precision
from labutils.teach.exercises.memory import count_parameters, fullest_moment, saved_by_attention
from wrong_answers import Wrong

# ── 00 ───────────────────────────────────────────────────────────────────────────────────────────


def _tokens(change):
    """Tokens in a step of other sizes: `change` gets those."""
    return lambda *sizes: accumulation.tokens_per_step(*change(*sizes))


def _peak(step, micro_batches, weights, state, working, temporary, *, under=None, update=None):
    under = under or (lambda step, micro_batches: micro_batches > 1)
    update = update or (lambda step, w, s, t: 2 * w + s + t)
    hill = weights * (1 + under(step, micro_batches)) + state * (step > 1) + working
    return max(hill, update(step, weights, state, temporary))


def _bytes_of(parameters, skip=()):
    def count(model, optimizer):
        total = 0
        for p in parameters(model, optimizer):
            state = {k: t for k, t in optimizer.state.get(p, {}).items() if k not in skip}
            total += sum(t.nbytes for t in (p, p.grad, *state.values()) if t is not None)
        return total

    return count


def _optimized(model, optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


# ── 01 ───────────────────────────────────────────────────────────────────────────────────────────


def _decode(fmt, code, *, bias=lambda fmt: fmt.bias, signed=True, bits=None, nan=math.nan):
    sign, exponent, mantissa, kind = fmt.fields(code)
    sign = -1.0 if sign and signed else 1.0
    if kind in ("inf", "nan"):
        return sign * math.inf if kind == "inf" else nan
    lowest = 1 - bias(fmt)
    leading, power = (1, exponent - bias(fmt)) if kind == "normal" else (0, lowest)
    return sign * 2.0**power * (leading + mantissa / 2 ** (bits or fmt.mantissa_bits))


def _encode(fmt, x, *, rounds=round, first=float, ends_at_max=False, flushes=False):
    x = first(x)
    sign = (math.copysign(1, x) < 0) << (fmt.bits - 1)
    largest = fmt.encode(fmt.max)
    exponent = max(math.frexp(x)[1] - 1, fmt.min_exponent)
    if x == 0 or (flushes and abs(x) < fmt.min_normal):
        return sign
    significand = rounds(abs(x) / 2.0 ** (exponent - fmt.mantissa_bits))
    code = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + significand
    if code > largest or (ends_at_max and abs(x) > fmt.max):
        code = largest if ends_at_max == "stays" else largest + 1
    return sign + code


def _half_down(x):
    return math.ceil(x - 0.5)


def _to_odd(x):
    return math.floor(x) | 1 if x % 1 == 0.5 else round(x)


def _running(x, fmt):
    return precision.running_sum(x, fmt)[-1]


def _in_blocks(x, fmt, size):
    return precision.pairwise_sum(torch.stack([_running(b, fmt) for b in x.split(size)]), fmt)


def _two_places(x, fmt):
    halves = [_running(half, fmt) for half in (x[::2], x[1::2]) if len(half)]
    return precision.round_to(sum(halves), fmt)


def _last_unrounded(x, fmt):
    if len(x) < 2:
        return x.sum()
    half = len(x) // 2
    return precision.pairwise_sum(x[:half], fmt) + precision.pairwise_sum(x[half:], fmt)


# ── 02 ───────────────────────────────────────────────────────────────────────────────────────────


def _sgd(weights, gradients, lr, *, master=torch.float32, widen=True, mean=False):
    copy, given = weights.to(master), gradients
    if mean:
        given = [torch.stack(gradients).float().mean(0)]
    for gradient in given:
        copy = copy - (lr * gradient.to(master) if widen else (lr * gradient).to(master))
    return copy.bfloat16()


def _summed_in_bf16(weights, gradients, lr):
    total = functools.reduce(torch.add, gradients)
    return (weights.float() - lr * total.float()).bfloat16()


def _scales(finite, start, interval, *, least=0.0, most=math.inf, halved=None, window=False):
    halved = halved or (lambda scale: scale / 2)
    found, good = [start], 0
    for ok in finite:
        good = good + 1 if ok else 0
        if not ok:
            found.append(max(halved(found[-1]), least))
        else:
            grows = good >= interval
            found.append(min(found[-1] * (2 if grows else 1), most))
            good = 0 if grows and not window else good
    return found


def _step(loss, optimizer, scaler, max_norm, *, clip=None, update=True, early=False, zero=True):
    if zero:
        optimizer.zero_grad()
    scaler.scale(loss()).backward()
    parameters = _optimized(None, optimizer)
    scaler.unscale_(optimizer)
    (clip or nn.utils.clip_grad_norm_)(parameters, max_norm)
    if early:
        scaler.update()
    scaler.step(optimizer)
    if update and not early:
        scaler.update()


def _one_by_one(parameters, max_norm):
    for parameter in parameters:
        nn.utils.clip_grad_norm_([parameter], max_norm)


# ── 03 ───────────────────────────────────────────────────────────────────────────────────────────


def _counts(change, more=lambda c: 0):
    """The count of a config with `change`, and so many more."""
    return lambda config: count_parameters(config | change(config)) + more(config)


def _biases(config):
    return config["num_hidden_layers"] * config["hidden_size"] * (config["model_type"] == "qwen2")


def _keeps(more):
    """Attention's bytes and `more(d, **sizes)` numbers."""

    def kept(b, s, h, a, g, size):
        numbers = more(d=h // a, b=b, s=s, h=h, a=a, g=g)
        return saved_by_attention(b, s, h, a, g, size) + size * numbers

    return kept


def _fullest(parameters, activations, logits, stepping, *, base=14, scores=2, updating=None):
    each = updating or {"foreach": 24, "fused": 20}
    after_the_loss = "backward", base * parameters + activations + scores * logits
    update = "optimizer", each[stepping] * parameters
    return max(after_the_loss, update, key=lambda moment: moment[1])


# ── 04 ───────────────────────────────────────────────────────────────────────────────────────────


def _segments(n, k, *, drops=True, inputs_go=True, backward_first=True, sweep="forward", more=()):
    size, steps = n // k, []
    for i in range(n - size):
        steps.append((sweep, i))
        if i % size and drops:
            steps.append(("drop", i))
    firsts = range(0, n, size)
    for first in reversed(firsts) if backward_first else firsts:
        layers = range(first, first + size)
        steps += [("record", i) for i in layers] + [("backward", i) for i in reversed(layers)]
        if first and inputs_go:
            steps.append(("drop", first))
    return [*steps, *more]


def _fewest(n, snapshots, *, left=0, right=1, alone=lambda n: n * (n + 1) // 2, first=1):
    @functools.cache
    def best(n, c):
        if n == 1 or c == 1:
            return alone(n) if n > 1 else 1
        each = (m + best(n - m, c - right) + best(m, max(1, c - left)) for m in range(first, n))
        return min(each, default=1)

    return best(n, snapshots)


def _middle(n, c):
    if n == 1 or c == 1:
        return n * (n + 1) // 2
    return n // 2 + _middle(n - n // 2, c - 1) + _middle(n // 2, c)


class _Again(torch.autograd.Function):
    """The textbook's, and what a slip does: two runs, a sum, an input without gradient."""

    @staticmethod
    def forward(ctx, fn, slip, x, anchor):
        ctx.fn, ctx.slip, ctx.state = fn, slip, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, slope):
        (x,), later = ctx.saved_tensors, torch.get_rng_state()
        x = x.detach().requires_grad_()
        for _ in range(2 if ctx.slip == "twice" else 1):
            torch.set_rng_state(ctx.state)
            with torch.enable_grad():
                y, slope = ctx.fn(x), 0 * slope + 1 if ctx.slip == "sum" else slope
        torch.set_rng_state(later)
        if ctx.slip == "input alone":
            return None, None, torch.autograd.grad(y, x, slope)[0], None
        y.backward(slope)
        return None, None, x.grad, None


def _slips(slip, anchor=True):
    given = torch.ones(0, requires_grad=True) if anchor else None
    return lambda fn, x: _Again.apply(fn, slip, x, given)


def _put_away(put, get):
    def checkpoint(fn, x):
        with saved_tensors_hooks(put, get):
            return fn(x)

    return checkpoint


def _in_a_list(fn, x):
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or len(kept) - 1, kept.__getitem__):
        return fn(x)


def _to_bytes(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def _from_bytes(kept):
    return torch.load(io.BytesIO(kept), weights_only=False)


def _on_the_host(fn, x):
    with save_on_cpu():
        return fn(x)


def _asks_for_more(fn, x):
    return torch_checkpoint(fn, x.requires_grad_(), use_reentrant=False)


def _learns(checkpoint, *, grad, dropout=0.5, seed=0, look="weights"):
    """What a step leaves: gradients of weights or input, the output, or a random number."""
    draw = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Linear(8, 8))
    x = torch.randn(4, 8, generator=draw).requires_grad_(grad)
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw))
    if seed is not None:
        torch.manual_seed(seed)
    y = checkpoint(net, x)
    if look == "output":
        return [y.detach()]
    torch.rand(1)
    if y.requires_grad:
        y.square().sum().backward()
    if look == "next":
        return [torch.rand(1)]
    found = [x] if look == "input" else net.parameters()
    return [torch.zeros(1) if t.grad is None else t.grad for t in found]


def _differs(**how):
    def is_broken(checkpoint):
        plain, found = (_learns(c, **how) for c in (lambda fn, x: fn(x), checkpoint))
        return any(not torch.equal(a, b) for a, b in zip(plain, found, strict=True))

    return is_broken


# Exercise: name, attempt, the property that must reject it, words of what it must say.
_ALL = {
    "start/tokens-per-step": [
        ("the larger of two", _tokens(lambda b, k, dp, s: (b, max(k, dp), 1, s)), "many ranks",
         "different sequences"),
        ("one sequence each", _tokens(lambda b, k, dp, s: (1, k, dp, s)), "one rank",
         "one rank reads"),
        ("shares accumulate", lambda micro_batch, accumulation, dp, seq_len:
         micro_batch * dp * seq_len // accumulation, "accumulation", "adds the same"),
        ("a token more each", _tokens(lambda b, k, dp, s: (b, k, dp, s + 1)),
         "one rank", "one rank reads"),
        ("rank 0 only leads", _tokens(lambda b, k, dp, s: (b, k, max(1, dp - 1), s)),
         "many ranks", "different sequences"),
    ],
    "start/step-peak": [
        ("updates without gradients", partial(_peak, update=lambda step, w, s, t: w + s + t),
         "the update", "one set of gradients"),
        ("gradients of the last step", partial(_peak, under=lambda step, m: step > 1 or m > 1),
         "later steps", "let go of the last step's"),
        ("the first update has no state",
         partial(_peak, update=lambda step, w, s, t: 2 * w + s * (step > 1) + t),
         "the update", "in step 1 already"),
        ("working memory once", partial(_peak, update=lambda step, w, s,
         t: 2 * w + s + t * (step == 1)),
         "the update", "needs for a moment"),
        ("gradients of all but the last", partial(_peak, under=lambda step, m: m - 1),
         "many micro-batches", "share one set"),
        ("state wherever it accumulates", lambda step, micro_batches, **sizes: memory.step_peak(
            step + (micro_batches > 1), micro_batches, **sizes), "two micro-batches",
             "second micro-batch"),
    ],
    "start/bug-hunt-state-bytes": [
        ("what is optimized", _bytes_of(_optimized), "a frozen part", "takes its own bytes"),
        ("what is trained", _bytes_of(lambda m, o: [p for p in m.parameters() if p.requires_grad]),
         "a frozen part", "takes its own bytes"),
        ("the first group", _bytes_of(lambda m, o: o.param_groups[0]["params"]),
         "a frozen part", "Alive are"),
        ("no step counters", _bytes_of(lambda m, o: m.parameters(), skip=("step",)),
         "after one step", "step counter"),
        ("children's own", _bytes_of(lambda m, o: {
            p for c in m.children() for p in c.parameters(recurse=False)}), "after one step",
             "Alive are"),
    ],
    "floats/decode": [
        ("IEEE's bias", partial(_decode, bias=lambda fmt: 2 ** (fmt.exponent_bits - 1) - 1),
         "other formats, down to four bits", "Ask fmt.bias"),
        ("no sign", partial(_decode, signed=False), "signs and zeros", "must survive"),
        ("three bits", partial(_decode, bits=3), "normal numbers", "mantissa/2^mantissa_bits"),
        ("NaN is 0", partial(_decode, nan=0.0), "inf and NaN", "everything else NaN"),
        ("NaN is infinite", partial(_decode, nan=math.inf), "inf and NaN", "everything else NaN"),
    ],
    "floats/encode": [
        ("by way of float32", partial(_encode, first=lambda x: torch.tensor(x).item()),
         "rounded once", "float32 does not see it"),
        ("away from zero", partial(_encode, rounds=math.ceil), "the nearer neighbor", "farther"),
        ("half down", partial(_encode, rounds=_half_down), "ties to even", "even significand"),
        ("to odd", partial(_encode, rounds=_to_odd), "ties to even", "even significand"),
        ("no subnormals", partial(_encode, flushes=True), "subnormal numbers", "gap stays"),
        ("ends at the largest", partial(_encode, ends_at_max=True), "overflow", "after rounding"),
        ("stays at the largest", partial(_encode, ends_at_max="stays"), "overflow", "goes to inf"),
    ],
    "floats/rounds-twice": [
        ("a third", 1 / 3, "the cast gets it wrong", "Move closer to a tie"),
        ("half the smallest", 2.0**-25, "the cast gets it wrong", "An exact tie"),
        ("a shift that float32 holds", 1 + 2**-11 + 2**-20, "the cast gets it wrong",
         "Move closer"),
        ("the other side", 1 + 2**-11 - 2**-40, "the cast gets it wrong", "by luck"),
        ("the counterexample, already rounded", torch.tensor(1 + 2**-11 + 2**-40),
         "the cast gets it wrong", "An exact tie"),
        ("a word", "1 + 2**-11", "a finite number", "one finite Python number"),
    ],
    "floats/pairwise-sum": [
        ("the smallest first", lambda x, fmt: _running(x.sort().values, fmt), "a sum of ones",
         "stalls"),
        ("blocks of 128, then a tree", partial(_in_blocks, size=128), "a sum of ones", "stalls"),
        ("even and odd places", _two_places, "a sum of ones", "stalls"),
        ("a tree in fp32", lambda x, fmt: fmt.round(precision.pairwise_sum(x, floats.FP32).item()),
         "every addition in the format", "rounded once"),
        ("two halves, not rounded", _last_unrounded, "every addition in the format",
         "Round after every"),
    ],
    "precision/master-weights": [
        ("the sum in bf16", _summed_in_bf16, "short steps add up",
         "a sum of gradients stands still"),
        ("a master in fp16", partial(_sgd, master=torch.float16), "short steps add up",
         "fp32 copy"),
        ("the step in bf16", partial(_sgd, widen=False), "rounded once", "*before* you multiply"),
        ("the mean gradient", partial(_sgd, mean=True), "long steps", "every gradient in turn"),
        ("the last gradient", lambda w, gs, lr: _sgd(w, gs[-1:] * len(gs), lr),
         "long steps", "every gradient in turn"),
    ],
    "precision/dynamic-scale": [
        ("never below 1", partial(_scales, least=1.0), "it backs off", "no lower end"),
        ("halved as an integer", partial(_scales, halved=lambda scale: scale // 2),
         "it backs off", "no lower end"),
        ("a window of good steps", partial(_scales, window=True), "it grows", "begins anew"),
        ("at most 65,536", partial(_scales, most=65536.0), "it grows", "doubles"),
        ("starts again", lambda finite, start, interval: _scales(
            finite, start, interval, halved=lambda _: start), "it backs off", "halves"),
    ],
    "precision/bug-hunt": [
        ("clips each alone", partial(_step, clip=_one_by_one),
         "clipping sees true gradients", "all gradients together"),
        ("the sum of magnitudes", partial(_step, clip=partial(nn.utils.clip_grad_norm_,
         norm_type=1)),
         "clipping sees true gradients", "Euclidean"),
        ("half the bound", partial(_step, clip=lambda ps, most: nn.utils.clip_grad_norm_(ps,
         most / 2)),
         "clipping sees true gradients", "shorter than max_norm"),
        ("moves before it steps", partial(_step, early=True), "a plain step",
         "update() comes last"),
        ("adds to what is there", partial(_step, zero=False), "gradients are fresh",
         "before backward()"),
    ],
    "memory/count-parameters": [
        ("positions", _counts(lambda c: {},
         lambda c: c["max_position_embeddings"] * c["hidden_size"]),
         "Llama 2 7B", "no table of positions"),
        ("no embedding", _counts(lambda c: {}, lambda c: -c["vocab_size"] * c["hidden_size"]),
         "Llama 2 7B", "or the embedding"),
        ("LayerNorm", _counts(lambda c: {},
         lambda c: (2 * c["num_hidden_layers"] + 1) * c["hidden_size"]),
         "Llama 2 7B", "no bias"),
        ("no bias at queries", _counts(lambda c: {}, lambda c: -_biases(c)),
         "Qwen2 0.5B, tied", "a bias on its queries"),
        ("four biases", _counts(lambda c: {}, _biases), "Qwen2 0.5B, tied", "output projection"),
        ("tied, all of them", _counts(lambda c: {"tie_word_embeddings": True}),
         "Llama 2 7B", "The head is missing"),
    ],
    "memory/saved-by-attention": [
        ("a lower triangle", _keeps(lambda b, s, a, **_: b * a * s * (s + 1) // 2 - b * a * s * s),
         "as many key–value heads as heads", "which tensors"),
        ("scores of g heads", _keeps(lambda b, s, a, g, **_: b * (g - a) * s * s),
         "grouped heads", "s×s matrix of its own"),
        ("keys for all", _keeps(lambda b, s, d, a, g, **_: 2 * b * s * d * (a - g)),
         "grouped heads", "have g heads"),
        ("what comes out as well", _keeps(lambda b, s, h, **_: b * s * h),
         "as many key–value heads as heads", "output projection makes"),
        ("no queries", _keeps(lambda b, s, h, **_: -b * s * h),
         "as many key–value heads as heads", "the queries"),
        ("always two bytes", lambda b, s, h, a, g, size: saved_by_attention(b, s, h, a, g, 2),
         "as many key–value heads as heads", "which tensors"),
    ],
    "memory/bug-hunt-peak": [
        ("a gradient of the logits", partial(_fullest, scores=1), "more sequences",
         "two times the logits"),
        ("three of them", partial(_fullest, scores=3), "more sequences", "two moments"),
        ("no weights", partial(_fullest, base=12), "more sequences", "two moments"),
        ("gradients in bf16", partial(_fullest, updating={"foreach": 20, "fused": 16}),
         "one sequence, fused", "fp32 copy of all gradients"),
        ("both in turn", lambda *asked: ("optimizer", fullest_moment(*asked)[1]),
         "more sequences", "but in the backward"),
    ],
    "checkpointing/segments": [
        ("all values of the sweep", partial(_segments, drops=False), "legal",
         "drop what lies inside"),
        ("inputs stay", partial(_segments, inputs_go=False), "legal", "made again"),
        ("front to back", partial(_segments, backward_first=False), "legal", "made again"),
        ("records in the sweep", partial(_segments, sweep="record"), "legal", "too early"),
        ("x0 goes too", partial(_segments, more=[("drop", 0)]), "legal", "it is the caller's"),
        ("k layers in each", lambda n, k: _segments(n, n // k), "forward evaluations",
         "right for n/k segments"),
    ],
    "checkpointing/fewest-evaluations": [
        ("a snapshot less on both sides", partial(_fewest, left=1), "fewest evaluations",
         "on both sides"),
        ("the left pays", partial(_fewest, left=1, right=0), "fewest evaluations",
         "one snapshot less"),
        ("never the first value", partial(_fewest, first=2), "fewest evaluations", "so few"),
        ("the middle", _middle, "fewest evaluations", "Try every m"),
        ("one sweep where nothing is held", partial(_fewest, alone=lambda n: n),
         "fewest evaluations", "starts from x0 again"),
    ],
    "checkpointing/checkpoint": [
        ("all in a list", _in_a_list, "nothing kept elsewhere", "memory does"),
        ("all on the host", _on_the_host, "nothing kept elsewhere", "memory does"),
        ("all as bytes", _put_away(_to_bytes, _from_bytes), "evaluations", "not computed again"),
        ("the input needs a gradient now", _asks_for_more,
         "input without gradient", "belongs to the caller"),
        ("runs twice", _slips("twice"), "evaluations", "a third"),
        ("a sum goes backward", _slips("sum"), "gradients", "incoming gradient"),
        ("no weights' gradients", _slips("input alone"), "gradients", "no gradient"),
        ("nothing but x", _slips("", anchor=False), "input without gradient", "frozen embedding"),
    ],
    "checkpointing/bug-hunt": [
        ("the output", _differs(grad=False, look="output"), "catches lost weights",
         "gradients of the weights"),
        ("no dropout in it", _differs(grad=False, dropout=0.0), "catches another mask",
         "put some in"),
        ("no seed", _differs(grad=True, seed=None), "lets right ones pass", "Set the seed"),
        ("weights alone", _differs(grad=False), "catches a generator left behind",
         "after the backward pass"),
        ("what comes next alone", _differs(grad=True, look="next"),
         "catches lost weights", "gradients of the weights"),
    ],
}  # fmt: skip

WRONG = {exercise: tuple(Wrong(*each) for each in answers) for exercise, answers in _ALL.items()}
