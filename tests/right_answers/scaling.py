"""Right answers to the exercises of `scaling`, in other styles than the reference."""

import itertools

import numpy as np
import torch

from labutils import scaling

# ── a recipe for k times the batch ───────────────────────────────────────────────────────────────


def _plain(optimizer, lr, decay, k, steps):
    peak = k * lr if optimizer == "sgd" else k**0.5 * lr

    def rate(t):
        if t >= 5 * steps:
            return peak
        return lr + t * (peak - lr) / (5 * steps)

    return rate, decay if optimizer == "sgd" else k**0.5 * decay


def _numpy(optimizer, lr, decay, k, steps):
    peak = lr * np.power(k, {"sgd": 1}.get(optimizer, 0.5))
    return [lambda t: np.interp(t, [0, 5 * steps], [lr, peak]), np.float64(decay * k * lr / peak)]


def _table(optimizer, lr, decay, k, steps):
    """The rates written out, as tensors."""
    peak = lr * (k if optimizer == "sgd" else k**0.5)
    rates = torch.linspace(lr, peak, 5 * steps + 1, dtype=torch.float64)
    return (lambda t: rates[min(t, 5 * steps)]), decay * k * lr / peak


def _per_epoch(optimizer, lr, decay, k, steps):
    """In amounts per iteration, with the decay of an epoch held."""
    power = 1 if optimizer in ("sgd",) else 1 / 2
    step = (lr * k**power - lr) / (5 * steps)
    taken = lr * decay * steps * k  # by an epoch of the small batch
    return (lambda t: lr + step * min(t, 5 * steps)), taken / (lr * k**power * steps)


def _where(optimizer, lr, decay, k, steps):
    """NumPy's where, whose result is an array without dims."""
    times, warm = (k if optimizer == "sgd" else np.sqrt(k)), 5 * steps
    return lambda t: np.where(t < warm, lr + (times - 1) * lr * t / warm, times * lr), decay * k / times


def _added_up(optimizer, lr, decay, k, steps):
    """A list of rates, each the one before it and the increment; in 32 bits at the end."""
    times, rates = k ** (1 if optimizer == "sgd" else 0.5), [lr]
    for _ in range(5 * steps):
        rates.append(rates[-1] + (times - 1) * lr / (5 * steps))
    return (lambda t: torch.tensor(rates[min(t, 5 * steps)])), torch.tensor(decay * k / times)


class _Schedule:
    def __init__(self, low, high, steps):
        self.ends, self.steps = (low, high), steps

    def __call__(self, t):
        share = min(t / self.steps, 1)
        return (1 - share) * self.ends[0] + share * self.ends[1]


def _object(optimizer, lr, decay, k, steps):
    times = {"sgd": k}.get(optimizer, k**0.5)
    return _Schedule(lr, times * lr, 5 * steps), decay * {"sgd": 1}.get(optimizer, times)


# ── the noise scale on ranks ─────────────────────────────────────────────────────────────────────


def _loop(gradients, b, comm):
    n, traces, signals = comm.size, 0.0, 0.0
    for g in gradients:
        small = comm.all_reduce((g @ g).reshape(1))[0] / n
        mean = comm.all_reduce(g) / n
        large = mean @ mean
        traces += (small - large) * n * b / (n - 1)
        signals += (n * large - small) / (n - 1)
    return traces / signals


def _at_once(gradients, b, comm):
    """All seeds in one message: gradients, and their lengths beside them."""
    own = torch.stack(gradients)
    packed = torch.cat([own, own.square().sum(1, keepdim=True)], 1)
    mean = comm.all_reduce(packed.flatten()).view(packed.shape) / comm.size
    small, large = mean[:, -1], mean[:, :-1].square().sum(1)
    trace = ((small - large) / (1 / b - 1 / (b * comm.size))).mean()
    return (trace / ((small - trace / b).mean())).item()


def _variance(gradients, b, comm):
    """tr Σ as b times the unbiased variance of the ranks' gradients, in NumPy."""
    trace, signal = [], []
    for own in gradients:
        mean = comm.all_reduce(own).numpy() / comm.size
        apart = torch.tensor([float(((own.numpy() - mean) ** 2).sum())], dtype=torch.float64)
        trace.append(b * comm.all_reduce(apart).item() / (comm.size - 1))
        signal.append((mean**2).sum() - trace[-1] / (b * comm.size))
    return np.mean(trace) / np.mean(signal)


def _distances(gradients, b, comm):
    """|G|² from products of different ranks' gradients, by the sum's length less the own ones."""
    n, trace, signal = comm.size, 0.0, 0.0
    for g in gradients:
        total, own = comm.all_reduce(g), comm.all_reduce(g.norm().pow(2)[None]).item()
        cross = (total.norm().item() ** 2 - own) / (n * (n - 1))
        signal += cross
        trace += b * (own / n - cross)
    return trace / signal


def _two_messages(gradients, b, comm):
    """All seeds at once: their sums of squares, and all gradients in one message."""
    n, own = comm.size, torch.stack(list(gradients))
    small = comm.all_reduce(own.pow(2).sum()[None])[0] / (n * len(own))
    large = (comm.all_reduce(own.flatten()) / n).pow(2).sum() / len(own)
    trace = (small - large) * n * b / (n - 1)
    return trace / (small - trace / b)


def _library(gradients, b, comm):
    spreads = []
    for own in gradients:
        mean = comm.all_reduce(own).div(comm.size)
        length = comm.all_reduce(torch.linalg.vector_norm(own, keepdim=True) ** 2) / comm.size
        lengths = float(length), float(mean @ mean)
        spreads.append(scaling.estimate_spread(*lengths, b, b * comm.size))
    return np.float64(scaling.noise_scale(spreads))


def _lists(gradients, b, comm):
    """Signal and trace by the two equations, solved by hand."""
    n, traces, signals = comm.size, [], []
    for own in gradients:
        large = ((comm.all_reduce(own) / n).norm() ** 2).item()
        small = comm.all_reduce(own.norm().square().view(1)).item() / n
        signals.append((n * b * large - b * small) / (n * b - b))
        traces.append((small - large) / (1 / b - 1 / (n * b)))
    return np.mean(traces) / np.mean(signals)


# ── SGD for large batches ────────────────────────────────────────────────────────────────────────


class _Torch:
    """torch.optim.SGD itself, with a rate for each step."""

    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w = torch.nn.Parameter(w)
        self.sgd = torch.optim.SGD([self.w], lr, momentum=0.9, weight_decay=decay)
        grow = ((lr + t / warm * (k - 1) * lr) for t in range(warm))
        self.rates = itertools.chain(grow, itertools.repeat(k * lr))

    def step(self, gradients):
        self.w.grad = torch.stack(gradients).mean(0)
        self.sgd.param_groups[0]["lr"] = next(self.rates)
        self.sgd.step()


class _Gradients:
    """The velocity holds gradients: then nothing is to be corrected."""

    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w, self.lr, self.k, self.decay, self.warm = w, lr, k, decay, warm
        self.u, self.t = 0, 0

    def step(self, gradients):
        share = 1 if self.t >= self.warm else self.t / self.warm
        self.u = 0.9 * self.u + sum(gradients) / len(gradients) + self.decay * self.w
        self.w -= self.lr * (1 + share * (self.k - 1)) * self.u
        self.t += 1


class _Absorbed:
    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w, self.decay = w, decay
        self.rates = [*np.linspace(lr, k * lr, warm, endpoint=False), k * lr]
        self.v, self.before = torch.zeros_like(w), self.rates[0]

    def step(self, gradients):
        rate = self.rates.pop(0) if len(self.rates) > 1 else self.rates[0]
        mean = torch.mean(torch.stack(gradients), dim=0)
        self.v *= 0.9 * rate / self.before
        self.v += rate * (mean + self.decay * self.w)
        self.w.sub_(self.v)
        self.before = rate


class _Factor:
    """The velocity over its rate: the corrected one, by other words."""

    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w, self.decay, self.k, self.v, self.t = w, decay, k, None, 0
        self.rates = lambda t: lr * (k if t >= warm else 1 + (k - 1) * t / warm)

    def step(self, gradients):
        g = torch.stack(gradients).sum(0) / self.k + self.decay * self.w
        now, before = self.rates(self.t), self.rates(max(self.t - 1, 0))
        self.v = now * g if self.v is None else now * (0.9 * self.v / before + g)
        self.w.copy_(self.w - self.v)
        self.t += 1


class _InPlace(_Gradients):
    """Each micro-batch with its decay, added up with a weight."""

    def step(self, gradients):
        mean = torch.zeros_like(self.w)
        for each in gradients:
            mean.add_(each + self.decay * self.w, alpha=1 / self.k)
        share = min(self.t / self.warm, 1) if self.warm else 1
        self.u = mean + 0.9 * self.u
        self.w.sub_(self.u, alpha=self.lr * (1 + share * (self.k - 1)))
        self.t += 1


class _Remembers(_Gradients):
    """No velocity: all gradients since the start, and powers of 0.9."""

    def step(self, gradients):
        self.past = [*getattr(self, "past", []), sum(gradients) / self.k + self.decay * self.w]
        share = 1 if self.t >= self.warm else self.t / self.warm
        total = sum(0.9**age * each for age, each in enumerate(reversed(self.past)))
        self.w.copy_(self.w - (self.lr + share * (self.k - 1) * self.lr) * total)
        self.t += 1


class _RateOfBefore:
    """The rate of the step before is asked for again."""

    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w, self.lr, self.k, self.decay, self.warm = w, lr, k, decay, warm
        self.velocity, self.t = torch.zeros_like(w), 0

    def rate(self, t):
        return self.lr * (1 + (min(t / self.warm, 1) if self.warm else 1) * (self.k - 1))

    def step(self, gradients):
        rate, before = self.rate(self.t), self.rate(max(self.t - 1, 0))
        gradient = torch.stack(gradients).mean(0) + self.decay * self.w
        self.velocity = 0.9 * self.velocity * (rate / before) + rate * gradient
        self.w[:] = self.w - self.velocity
        self.t += 1


RIGHT = {
    "scaling/recipe": {
        "written out": _plain,
        "NumPy, in a list": _numpy,
        "a table": _table,
        "the decay of an epoch": _per_epoch,
        "where": _where,
        "added up": _added_up,
        "an object": _object,
    },
    "scaling/noise-on-ranks": {
        "sums": _loop,
        "one message": _at_once,
        "variance": _variance,
        "products of ranks": _distances,
        "two messages": _two_messages,
        "the library's": _library,
        "two equations": _lists,
    },
    "scaling/bug-hunt": {
        "torch's": _Torch,
        "gradients kept": _Gradients,
        "absorbed": _Absorbed,
        "over its rate": _Factor,
        "in place": _InPlace,
        "all gradients": _Remembers,
        "the rate of before": _RateOfBefore,
    },
}
