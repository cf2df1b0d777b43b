"""Right answers to labs 02, 03, 08 and 14 in more styles: other tools, other orders."""

import contextlib
import functools
import itertools
import math
import operator

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from labutils import memory, units

# ── 02 ───────────────────────────────────────────────────────────────────────────────────────────


def _two_halves(weights, gradients, lr):
    """The weights as they were, and beside them all steps, in double precision."""
    parts = [weights.double(), torch.zeros_like(weights).double()]
    for gradient in gradients:
        parts[1] = parts[1] - lr * gradient.double()
    return sum(parts).float().bfloat16()


def _in_place(weights, gradients, lr):
    """The given tensor is overwritten, once, at the end."""
    master = weights.detach().clone().float()
    while gradients:
        master.add_(gradients.pop(0).float(), alpha=-lr)
    with torch.no_grad():
        return weights.copy_(master)


def _by_adding_up(weights, gradients, lr):
    steps = torch.stack([gradient.float().mul(-lr) for gradient in gradients])
    return torch.cat([weights.float()[None], steps]).sum(0).to(torch.bfloat16)


def _bookkeeper(finite, start, interval):
    """The step of the last change is kept, not a count."""
    found, changed = [float(start)], -1
    for k, good in enumerate(finite):
        if not good:
            factor, changed = 0.5, k
        elif k - changed == interval:
            factor, changed = 2.0, k
        else:
            factor = 1.0
        found.append(found[-1] * factor)
    return found


def _recursive(finite, start, interval, good=0):
    if not finite:
        return [start]
    first, rest = finite[0], finite[1:]
    if not first:
        return [start, *_recursive(rest, start / 2, interval)]
    if good + 1 == interval:
        return [start, *_recursive(rest, start * 2, interval)]
    return [start, *_recursive(rest, start, interval, good + 1)]


def _as_text(finite, start, interval):
    """Runs of good steps, found in a string."""
    scale, marks = start, "".join("." if good else "x" for good in finite)
    yield scale
    for k, mark in enumerate(marks, 1):
        run = len(marks[:k]) - len(marks[:k].rstrip("."))
        if mark == "x":
            scale /= 2
        elif run % interval == 0:
            scale *= 2
        yield scale


def _with_a_context(loss, optimizer, scaler, max_norm):
    with torch.enable_grad():
        optimizer.zero_grad(set_to_none=True)
        value = scaler.scale(loss())
        value.backward()
    scaler.unscale_(optimizer)
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    scaler.step(optimizer)
    return scaler.update()


def _no_clip_where_not_finite(loss, optimizer, scaler, max_norm):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
    scaler.scale(loss()).backward()
    fine = scaler.unscale_(optimizer)
    if fine:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, max_norm, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()


def _cleared_behind(loss, optimizer, scaler, max_norm):
    """Gradients are cleared before and after."""
    optimizer.zero_grad()
    (scaler.scale(loss())).backward()
    scaler.unscale_(optimizer)
    every = itertools.chain.from_iterable(map(operator.itemgetter("params"), optimizer.param_groups))
    nn.utils.clip_grad_norm_(list(every), max_norm, foreach=False)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# ── 03 ───────────────────────────────────────────────────────────────────────────────────────────


def _names_and_sizes(config):
    """The names of a state dict, each with its size."""
    h, f, L = (config[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    a = config["num_attention_heads"]
    kv = (config.get("num_key_value_heads") or a) * (h // a)
    sizes = {"model.embed_tokens.weight": config["vocab_size"] * h, "model.norm.weight": h}
    for i in range(L):
        at = f"model.layers.{i}"
        for name, out, into in (
            ("self_attn.q_proj", h, h), ("self_attn.k_proj", kv, h), ("self_attn.v_proj", kv, h),
            ("self_attn.o_proj", h, h), ("mlp.gate_proj", f, h), ("mlp.up_proj", f, h),
            ("mlp.down_proj", h, f),
        ):  # fmt: skip
            sizes[f"{at}.{name}.weight"] = out * into
            if config["model_type"] == "qwen2" and name[-6] in "qkv" and "attn" in name:
                sizes[f"{at}.{name}.bias"] = out
        sizes[f"{at}.input_layernorm.weight"] = sizes[f"{at}.post_attention_layernorm.weight"] = h
    if not config.get("tie_word_embeddings", False):
        sizes["lm_head.weight"] = config["vocab_size"] * h
    return sum(sizes.values())


def _a_polynomial(config):
    h, L = config["hidden_size"], config["num_hidden_layers"]
    share = config.get("num_key_value_heads", config["num_attention_heads"])
    share = share / config["num_attention_heads"]
    qwen = config["model_type"] == "qwen2"
    tables = 2 - config["tie_word_embeddings"]
    per_h = L * (2 + qwen * (1 + 2 * share) + 3 * config["intermediate_size"]) + 1
    return h * (per_h + tables * config["vocab_size"]) + L * h * h * (2 + 2 * share)


def _torch_modules(config):
    """One layer out of nn.Linear, on meta."""
    h, f, a = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = h * config.get("num_key_value_heads", a) // a
    bias = config["model_type"] == "qwen2"
    with torch.device("meta"):
        layer = nn.ModuleList(
            [nn.Linear(h, out, bias=bias) for out in (h, kv, kv)]
            + [nn.Linear(h, h, bias=False), nn.Linear(h, 2 * f, bias=False)]
            + [nn.Linear(f, h, bias=False), nn.RMSNorm(h), nn.RMSNorm(h)]
        )
    each = sum(parameter.numel() for parameter in layer.parameters())
    ends = config["vocab_size"] * h * (1 if config["tie_word_embeddings"] else 2) + h
    return config["num_hidden_layers"] * each + ends


def _measured(b, s, h, a, g, size):
    """Input, queries, keys and values are made, on meta."""
    dtype, d = {2: torch.bfloat16, 4: torch.float32}[size], h // a
    with torch.device("meta"):
        q, k, v = (
            nn.Linear(h, width, bias=False, dtype=dtype) for width in (h, g * d, g * d)
        )
        x = torch.ones(b, s, h, dtype=dtype, requires_grad=True)

        q, k, v = q(x), k(x), v(x)
    return sum(tensor.nbytes for tensor in (x, q, k, v)) + size * (b * a * s * s + b * s * h)


def _by_kind(b, s, h, a, g, size):
    square, rows = [("softmax", a)], [("x", a), ("q", a), ("k", g), ("v", g), ("mixed", a)]
    return size * b * s * (
        s * sum(heads for _, heads in square) + h // a * sum(heads for _, heads in rows)
    )


def _fractions(b, s, h, a, g, size):
    from fractions import Fraction

    share = Fraction(g, a)
    return int(size * b * s * h * (3 + 2 * share + Fraction(a * s, h)))


def _sorted_moments(parameters, activations, logits, stepping):
    states = {"weights": 2, "master": 4, "moments": 8}
    held = parameters * sum(states.values())
    update = held + parameters * sum([2, 4] + [4] * (stepping != "fused"))
    moments = [(held + activations + 2 * logits, "backward"), (update, "optimizer")]
    nbytes, phase = sorted(moments)[-1]
    return phase, nbytes


def _named(parameters, activations, logits, stepping):
    import collections

    Moment = collections.namedtuple("Moment", "phase nbytes")
    peak = Moment("optimizer", 20 * parameters + 4 * parameters * stepping.startswith("fore"))
    loss = Moment("backward", 14 * parameters + activations + logits * 2)
    return peak if peak.nbytes >= loss.nbytes else loss


def _in_gigabytes_and_back(*asked):
    phase, nbytes = _sorted_moments(*asked)
    return phase, 1e9 * (nbytes / 1e9)


def _doubling_back(gpu):
    """Fills with 1 MiB, frees it all but for a byte that was put between."""
    fillers, half = [], units.MIB
    while gpu.available or gpu.largest_free >= half:
        try:
            fillers.append(gpu.alloc(half))
            gpu.alloc(1)
            fillers.append(gpu.alloc(half - 512))
        except memory.OutOfMemory:
            break
    while fillers:
        gpu.free(fillers.pop())


def _two_in_each(gpu):
    """Two small ones stay in each segment, at both of its ends."""
    going = []
    for _ in range(gpu.capacity // (2 * units.MIB)):
        gpu.alloc(300)
        going += [gpu.alloc(units.MIB - 512), gpu.alloc(units.MIB - 512)]
        gpu.alloc(300)
    list(map(gpu.free, going))


def _small_crumbs(gpu):
    """Everything in 2 KiB, and the first of each segment stays."""
    crumbs = [gpu.alloc(2048) for _ in range(gpu.available // 2048)]
    segments = {}
    for address in crumbs:
        segments.setdefault(address // (2 * units.MIB), []).append(address)
    for first, *others in segments.values():
        for address in others:
            gpu.free(address)


# ── 08 ───────────────────────────────────────────────────────────────────────────────────────────


def _sorted_by_keys(length, rank, size, epoch):
    """Each example draws a number; they stand in its order."""
    draw = np.random.RandomState(1000 + epoch).rand(length)
    order = sorted(range(length), key=draw.__getitem__)
    rounds = math.ceil(length / size)
    return [order[(rank + size * k) % length] for k in range(rounds)]


def _contiguous(length, rank, size, epoch):
    g = torch.Generator()
    g.manual_seed(epoch * 31 + 5)
    order = torch.randperm(length, generator=g)
    share = (length + size - 1) // size
    places = torch.arange(rank * share, (rank + 1) * share) % length
    return order[places].tolist()


def _torchs(length, rank, size, epoch):
    from torch.utils.data import DistributedSampler

    sampler = DistributedSampler(range(length), num_replicas=size, rank=rank, seed=3)
    sampler.set_epoch(epoch)
    return list(sampler)


def _two_halves_of_an_all_reduce(module, comm):
    """A reduce-scatter and an all-gather of each gradient, padded."""

    def mean(parameter):
        flat = parameter.grad.flatten()
        flat = F.pad(flat, (0, -flat.numel() % comm.size))
        mine = comm.reduce_scatter(flat) / comm.size
        whole = comm.all_gather(mine)
        parameter.grad.copy_(whole[: parameter.numel()].view_as(parameter))

    for parameter in module.parameters():
        parameter.data.copy_(comm.broadcast(parameter.data, src=0))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(mean)


def _state_dict(module, comm):
    """Weights by the state dict; each hook is an object with a call."""
    for tensor in module.state_dict().values():
        comm.broadcast(tensor, out=tensor)

    class Hook:
        def __call__(self, parameter):
            total = comm.all_reduce(parameter.grad.clone())
            parameter.grad = total.mul(1.0 / comm.size)

    [p.register_post_accumulate_grad_hook(Hook()) for p in module.parameters() if p.requires_grad]


def _by_layer(module, comm):
    """A layer's weight and bias travel as one tensor, when both are there."""
    for parameter in module.parameters():
        comm.broadcast(parameter, out=parameter)
    for layer in module.modules():
        own = [p for p in layer.parameters(recurse=False) if p.requires_grad]

        def ready(_, own=own, come=[]):  # noqa: B006
            come.append(1)
            if len(come) < len(own):
                return
            come.clear()
            flat = comm.all_reduce(torch.cat([p.grad.reshape(-1) for p in own])) / comm.size
            for p, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
                p.grad.copy_(part.view_as(p))

        for parameter in own:
            parameter.register_post_accumulate_grad_hook(ready)


class _Views:
    """Gradients live in flat buckets, planned from the end of the model; autograd adds into them."""

    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.depth = module, comm, 0
        self.groups, room = [], 0
        for parameter in reversed([*module.parameters()]):
            parameter.data = comm.broadcast(parameter.data)
            if not parameter.requires_grad:
                continue
            if room <= 0:
                self.groups.append([])
                room = bucket_bytes
            self.groups[-1].append(parameter)
            room -= parameter.nbytes
        self.left = {}
        for group in self.groups:
            for parameter in group:
                parameter.register_post_accumulate_grad_hook(functools.partial(self.come, group))

    def come(self, group, parameter):
        if self.depth:
            return
        key = id(group)
        self.left[key] = self.left.get(key, len(group)) - 1
        self.send()

    def send(self):
        for group in self.groups:
            left = self.left.get(id(group), len(group))
            if left:
                if left > 0:
                    return
                continue
            flat = torch.cat([p.grad.flatten() for p in group]) / self.comm.size
            flat = self.comm.all_reduce(flat)
            for p in group:
                p.grad.copy_(flat[: p.numel()].view_as(p))
                flat = flat[p.numel() :]
            self.left[id(group)] = -1
        self.left = {}

    @contextlib.contextmanager
    def no_sync(self):
        self.depth += 1
        try:
            yield self
        finally:
            self.depth -= 1

    def __call__(self, *args, **options):
        return self.module(*args, **options)


class _NoSync:
    """A context of its own, which remembers what it found."""

    def __init__(self, owner):
        self.owner, self.found = owner, []

    def __enter__(self):
        self.found.append(self.owner.talks)
        self.owner.talks = False

    def __exit__(self, *error):
        self.owner.talks = self.found.pop()


class _Repaired(nn.Module):
    """The lab's wrapper with the fewest changes."""

    def __init__(self, module, comm, bucket_bytes):
        super().__init__()
        self.module, self.comm, self.talks = module, comm, True
        self.bucket_bytes, self.waiting, self.seen = bucket_bytes, [], 0
        for parameter in module.parameters():
            comm.broadcast(parameter, out=parameter)
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.context = _NoSync(self)

    def ready(self, parameter):
        if not self.talks:
            return None
        self.waiting.append(parameter)
        self.seen = (self.seen + 1) % len(self.trained)
        if not self.seen or sum(p.nbytes for p in self.waiting) >= self.bucket_bytes:
            self.flush()
        return None

    def flush(self):
        flat = torch.cat([p.grad.reshape(-1) for p in self.waiting])
        self.comm.all_reduce(flat, out=flat)
        at = 0
        while self.waiting:
            p = self.waiting.pop(0)
            p.grad = (flat[at : at + p.numel()] / self.comm.size).reshape(p.shape)
            at += p.numel()

    def no_sync(self):
        return self.context

    def forward(self, *args):
        return self.module(*args)


class _Async(_Repaired):
    """Reductions run on while autograd does; the last parameter waits for all of them."""

    def ready(self, parameter):
        if not self.talks:
            return
        self.waiting.append(parameter)
        self.seen += 1
        last = self.seen == len(self.trained)
        if last or sum(p.nbytes for p in self.waiting) >= self.bucket_bytes:
            flat = nn.utils.parameters_to_vector(p.grad for p in self.waiting)
            work = self.comm.all_reduce(flat, out=flat, async_op=True)
            self.flying = [*getattr(self, "flying", []), (work, flat, self.waiting)]
            self.waiting = []
        if last:
            for work, flat, parameters in self.flying:
                work.wait()
                sizes = [p.numel() for p in parameters]
                for p, part in zip(parameters, flat.div_(self.comm.size).split(sizes), strict=True):
                    p.grad.copy_(part.view_as(p))
            self.flying, self.seen = [], 0


# ── 14 ───────────────────────────────────────────────────────────────────────────────────────────


class _Einsum(nn.Module):
    """Letters for dims; W is kept by a reference and put back."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.base = linear
        for p in self.base.parameters():
            p.requires_grad_(False)
        self.down = nn.Parameter(nn.init.normal_(torch.empty(rank, linear.in_features)))
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.alpha, self.rank, self.before = alpha, rank, None

    def forward(self, x):
        y = self.base(x)
        if self.before is not None:
            return y
        low = torch.einsum("...k,rk->...r", x, self.down)
        return y + torch.einsum("...r,dr->...d", low, self.up) * (self.alpha / self.rank)

    def merge(self):
        assert self.before is None, "merged already"
        self.before = self.base.weight.data
        update = torch.einsum("dr,rk->dk", self.up, self.down).detach()
        self.base.weight.data = self.before + self.alpha / self.rank * update

    def unmerge(self):
        if self.before is not None:
            self.base.weight.data, self.before = self.before, None


class _Subclass(nn.Linear):
    """It is a linear layer itself and takes the weights over."""

    def __init__(self, linear, rank, alpha):
        shape, dtype = (linear.in_features, linear.out_features), linear.weight.dtype
        super().__init__(*shape, bias=linear.bias is not None, dtype=dtype)
        self.load_state_dict(linear.state_dict())
        self.requires_grad_(False)
        self.A = nn.Parameter(torch.rand(rank, self.in_features) * 2 - 1)
        self.B = nn.Parameter(self.A.new_zeros(self.out_features, rank))
        self.factor, self.plain = alpha / len(self.A), []

    def forward(self, x):
        y = super().forward(x)
        if not self.plain:
            y = torch.add(y, F.linear(F.linear(x, self.A), self.B), alpha=self.factor)
        return y

    @torch.no_grad()
    def merge(self):
        if not self.plain:
            self.plain.append(self.weight.clone())
            self.weight.addmm_(self.B, self.A, alpha=self.factor)

    @torch.no_grad()
    def unmerge(self):
        while self.plain:
            self.weight.copy_(self.plain.pop())


class _Sequence(nn.Module):
    """The adapter is a Sequential; merged, another layer computes."""

    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.adapter = nn.Sequential(
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )
        nn.init.zeros_(self.adapter[1].weight)
        self.scale, self.now = alpha / rank, None

    def forward(self, x):
        if self.now is None:
            return self.linear(x) + self.adapter(x) * self.scale
        return F.linear(x, self.now, self.linear.bias)

    def merge(self):
        if self.now is not None:
            raise ValueError("unmerge() first")
        down, up = (layer.weight for layer in self.adapter)
        self.now = (self.linear.weight + self.scale * (up @ down)).detach()

    def unmerge(self):
        if self.now is None:
            raise ValueError("merge() first")
        self.now = None


def _by_shapes(linears, rank, itemsize):
    state = {f"{i}.{name}": p for i, each in enumerate(linears) for name, p in each.named_parameters()}
    trained = sum(rank * sum(p.shape) for p in state.values() if p.dim() == 2)
    return trained, sum(math.prod(p.shape) for p in state.values()) * itemsize + trained * 16


def _by_parts(linears, rank, itemsize):
    """Weights, gradients and moments in turn."""
    trained = sum((each.in_features + each.out_features) * rank for each in linears)
    adapters = gradients = first = second = 4 * trained
    frozen = sum(
        each.in_features * each.out_features
        + (0 if each.bias is None else each.bias.shape[0]) for each in linears
    )  # fmt: skip
    return [trained, sum((adapters, gradients, first, second), frozen * itemsize)]


def _on_meta(linears, rank, itemsize):
    adapters = nn.ModuleList()
    for each in linears:
        adapters.append(nn.Linear(each.in_features, rank, bias=False, device="meta"))
        adapters.append(nn.Linear(rank, each.out_features, bias=False, device="meta"))
    trained = nn.utils.parameters_to_vector(adapters.parameters()).numel()
    frozen = nn.utils.parameters_to_vector(nn.ModuleList(linears).parameters()).numel()
    return np.array([trained, frozen * itemsize + 16 * trained]).tolist()


_ADAPTERS = {
    "Einstein's sums": _Einsum,
    "a linear layer itself": _Subclass,
    "a Sequential beside": _Sequence,
}
RIGHT = {
    "precision/master-weights": {
        "fp64, and what was added": _two_halves,
        "in place, at the end": _in_place,
        "steps stacked and added up": _by_adding_up,
    },
    "precision/dynamic-scale": {
        "the step of the last change": _bookkeeper,
        "a recursion": _recursive,
        "runs in a string": _as_text,
    },
    "precision/bug-hunt": {
        "foreach": _with_a_context,
        "an error where the norm is not finite": _no_clip_where_not_finite,
        "cleared before and after": _cleared_behind,
    },
    "memory/count-parameters": {
        "a state dict's names": _names_and_sizes,
        "a polynomial in h": _a_polynomial,
        "layers on meta": _torch_modules,
    },
    "memory/saved-by-attention": {
        "made on meta": _measured,
        "by what has which heads": _by_kind,
        "fractions": _fractions,
    },
    "memory/bug-hunt-peak": {
        "sorted": _sorted_moments,
        "a named tuple": _named,
        "a float": _in_gigabytes_and_back,
    },
    "memory/fragment": {
        "a byte between": _doubling_back,
        "two in each segment": _two_in_each,
        "crumbs": _small_crumbs,
    },
    "data_parallel/sampler": {
        "sorted by random keys": _sorted_by_keys,
        "a block each, round the end": _contiguous,
        "PyTorch's own": _torchs,
    },
    "data_parallel/hooks": {
        "in two halves": _two_halves_of_an_all_reduce,
        "a state dict, hooks that are objects": _state_dict,
        "a layer at a time": _by_layer,
    },
    "data_parallel/bug-hunt": {
        "planned from the end": _Views,
        "a context that remembers": _Repaired,
        "in flight until the last": _Async,
    },
    "lora/adapter": _ADAPTERS,
    "lora/held": {
        "by shapes": _by_shapes,
        "part by part": _by_parts,
        "modules on meta": _on_meta,
    },
    "lora/bug-hunt": _ADAPTERS,
}
