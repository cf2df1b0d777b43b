# %% [markdown]
# # 16 · Scale the learning rate with the batch
#
# **You have 32 times as many GPUs. By how much do you raise the learning rate, and where does it stop helping?**
#
# *90 min · before this: labs 05 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - know what a larger batch changes in a recipe, at every iteration, and what not (exercise 16.1),
# - get the noise scale from what ranks hold before and after their all-reduce (exercise 16.2),
# - know what a changing rate, a weight decay and k micro-batches ask of SGD (exercise 16.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import functools
import random

import torch
from torch import nn

from labutils import scaling
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# Two weights, and a loss that falls in one direction. Each of 32 small steps follows the noisy gradient of a small batch. One large step follows the mean of 32 such gradients, at 32 times the learning rate.

# %%
draw, path = random.Random(4), [(0.0, 0.0)]
for _ in range(32):
    x, y = path[-1]
    path.append((x + 1 + draw.gauss(0, 2), y + 0.5 + draw.gauss(0, 2)))
plots.curves(
    xlabel="first weight", ylabel="second weight",
    title="Where the gradient stays the same, one large step is 32 small ones",
    small_steps=tuple(zip(*path, strict=True)),
    one_large_step=([0.0, path[-1][0]], [0.0, path[-1][1]]),
)  # fmt: skip

# %% [markdown]
# Scaling the learning rate is **going as far per epoch with fewer steps, as long as the gradient at the end of a step is still about that at its beginning.**

# %% [markdown]
# ## Is a batch on many ranks the batch?
#
# A network of 8,832 weights predicts the next character of a text from the last eight. It is small, so that many copies train at once: five seeds times several learning rates are the rows of one tensor. All rates of a seed see the same examples in the same order.

# %%
network = rigs.scaling.CHARACTERS
data, held_out = rigs.scaling.characters()
rows = network.start(range(5))
print(f"{len(data[1]):,} examples to learn from; rows {list(rows.shape)}")

# %% [markdown]
# First: is "a batch of 64" literally the same thing here and on ranks? Five steps of SGD with momentum 0.9, in float64. Once as a row; once on four ranks with 16 examples each, in micro-batches of 8 (lab 05), reduced once per step (lab 08).
#
# > How far apart are the weights?

# %%
predict("ranks/apart", times=1e-6)

# %%
row = rigs.copies.train_copies(
    network, data, lr=[0.25], batch=64, samples=320, seeds=[0], dtype=torch.float64
)[0, 0]
places = rigs.copies.order(len(data[1]), 320, seed=0).split(64)
batches = [(data[0][each], data[1][each]) for each in places]


def on_ranks(rank):
    module = network.alone(network.start([rank.rank])[0].double())
    sgd = functools.partial(torch.optim.SGD, lr=0.25, momentum=0.9)
    loss = nn.functional.cross_entropy
    rigs.copies.train_replica(module, loss, batches, sgd, rank.comm("dp"), micro=8)
    return module.row.detach()


found = World(4).run(on_ranks)
apart = max((each - row).abs().max().item() for each in found)
reveal("ranks/apart", times="below 1e-10" if apart < 1e-10 else "more")

# %% [markdown]
# So what holds for a batch here holds on ranks too: all else is measured on rows.

# %% [markdown]
# ## By how much do you raise the learning rate of SGD?
#
# Suppose that the true gradient does not change on the way; G_i is that of the i-th small batch. k small steps of rate η and one step of rate kη then end at the same weights:
#
# $$ w - \eta\,G_1 - \dots - \eta\,G_k \;=\; w - k\eta\,\frac{G_1 + \dots + G_k}{k}. $$
#
# This is the **linear rule**: k times the batch, k times the learning rate. Its rivals are the **square-root rule**, √k·η, and leaving η alone. Here k is the ratio of the new batch size to the old one, 16.

# %%
def losses(optimizer, base, batch):
    """Held-out losses in nats, [seeds, rules], after 32,768 examples."""
    lr = [scaling.scale_lr(base, batch / 16, rule) for rule in scaling.POWERS]
    lr = lr if batch > 16 else lr[:1]
    options = dict(lr=lr, batch=batch, samples=32768, seeds=range(5))
    rows = rigs.copies.train_copies(network, data, optimizer=optimizer, **options)
    return rigs.copies.score(network, rows, held_out)[0].expand(5, 3)


def table(found):
    print("by batch: unscaled, square root, linear (up to 512)")
    for batch, each in found.items():
        means = map(rigs.scaling.mean, each.T[: 2 + (batch <= 512)].tolist())
        print(f"{batch:5}", *(f"  {m.value:.2f} ± {m.error:.2f}" for m in means))


# %% [markdown]
# At a batch of 16 the best rate of SGD is 1/64 (a sweep over factors of two). Every run sees the same number of examples. The loss is a cross-entropy in nats, on examples held out.
#
# > The loss at a batch of 16 is about 2.3. With 32 times the batch and the learning rate as it was, is it below 2.4, below 2.7, or above?

# %%
predict("unscaled/loss", nats=2.4)

# %%
sgd = {batch: losses("sgd", 1 / 64, batch) for batch in (16, 64, 512, 2048)}
table(sgd)


# %%
def worse(a, b):
    """By more than two standard errors of the difference, seed by seed."""
    mean, error = rigs.scaling.mean((a - b).tolist())
    return mean > 2 * error


none, root, linear = sgd[512].T
print("k = 32: unscaled is worse than the root:", worse(none, root))
print("        the root is worse than linear:", worse(root, linear))
behind = (linear - sgd[16][:, 2]).mean().item()
print("        linear is within 0.15 of k = 1:", behind < 0.15)
lost = (sgd[2048][:, 2] - linear).min().item()
print("k = 128: linear is worse by 0.2 in every seed:", lost > 0.2)

# %%
reveal("unscaled/loss", nats="above 2.7" if none.min() > 2.7 else "below 2.7")

# %% [markdown]
# The linear rule holds, and then fails altogether. Twice as many examples, eight seeds, recorded beforehand by `python tools/scaling_sweep.py` (date and versions: `data/README.md`). The bands are two standard errors to each side:

# %%
axes = dict(xlabel="batch size in examples", ylabel="held-out loss (nats)", log="x")
curves = rigs.scaling.rule_curves("sgd")
plots.curves(title="SGD: the linear rule keeps the loss", **axes, **curves)

# %%
for rule in scaling.POWERS:
    found = rigs.scaling.swept("rules", optimizer="sgd", rule=rule)
    print(f"{rule:12}", *(f"{batch:4.0f}: {mean}" for batch, mean in found.items()))

# %% [markdown]
# From a batch of 16 to 512 the linear rule costs 0.05, the root 0.35, no scaling 0.71. Linear is *not* exact: at 1,024 it is 0.11 behind, several standard errors; at 4,096 it has diverged.
#
# **The published table.** Goyal et al. trained ResNet-50 on ImageNet at k = 32 (256 to 8k images). Their errors in %, beside our losses at the same k:

# %%
theirs, ours = rigs.scaling.goyal("Table 2(a)"), {}
inputs = {"linear": "η=0.10·32", "square root": "η=0.10·√32", "none": "η=0.10"}
for rule, eta in inputs.items():
    ours = rigs.scaling.swept("rules", optimizer="sgd", rule=rule)[512.0]
    published = theirs[f"kn=8k, {eta}"]
    print(f"{rule:12} {published.value:.2f} ± {published.error:.2f} %     {ours} nats")

# %% [markdown]
# The order is the same. (Their ± is the standard deviation of five runs, ours the standard error of eight seeds.)

# %% [markdown]
# ## Is it the same for Adam?
#
# At a batch of 16 the best rate of Adam is 1/256, and RMSProp's too.
#
# > At 32 times the batch, which rule is best for Adam?

# %%
predict("adam/rule", rule="linear")

# %% [markdown]
# Adam and RMSProp divide each gradient by the root of a running mean of its square. Where noise is most of a gradient, k times the batch makes that root smaller by √k: the same signal is a step √k times as long already. The other √k is left for the learning rate.

# %%
adam = {batch: losses("adam", 1 / 256, batch) for batch in (16, 64, 512, 2048)}
table(adam)

# %%
none, root, linear = adam[512].T
print("k = 32: linear is worse than the root:", worse(linear, root))
print("        unscaled is worse than the root:", worse(none, root))
near = (adam[64][:, 2] - adam[64][:, 1]).mean().abs() < 0.1
print("k = 4: linear and root are within 0.1:", near.item())

# %%
best = worse(linear, root) and worse(none, root)
reveal("adam/rule", rule="square root" if best else "another")

# %%
curves = rigs.scaling.rule_curves("adam")
plots.curves(title="Adam: the square root keeps it", **axes, **curves)

# %%
curves = rigs.scaling.rule_curves("rmsprop", most=512)
plots.curves(title="RMSProp: the square root, again", **axes, **curves)

# %% [markdown]
# At k = 4 the two rules are close. Unscaled and linear are both wrong by √k, to either side. The root fails too, later:

# %%
for optimizer in ("adam", "rmsprop"):
    found = rigs.scaling.swept("rules", optimizer=optimizer, rule="square root")
    print(f"{optimizer:8}", *(f"{b:5}: {found[b]}" for b in (16, 1024, 4096)))

# %% [markdown]
# RMSProp is 0.32 behind at 1,024, Adam 0.44 at 4,096.

# %% [markdown]
# **What else is scaled?** Not the weight decay. AdamW multiplies each weight by 1 − lr·wd in each step, wd being the weight decay. What this alone leaves of a weight after 3,200 steps, or 100 steps at 32 times the batch:

# %%
for lr, decay, steps in ((1e-3, 0.1, 3200), (32e-3, 0.1, 100), (32e-3, 3.2, 100)):
    left = scaling.shrinkage(lr, decay, steps)
    print(f"lr {lr:5}, wd {decay}: {left:.3f} of a weight is left")

# %% [markdown]
# Under the linear rule the decay of an epoch stays as it was, because lr grew.

# %% [markdown]
# ## What does a warm-up rescue?
#
# In the first epochs weights change fast, write Goyal et al., and the assumption that the gradient stays the same breaks down. Their **gradual warm-up** begins at η and grows by a constant amount *at each iteration*, for five epochs, to kη. Often it is told to begin at 0.
#
# > With 1,281,167 images and batches of 8,192 from η = 0.1 to 3.2: what is the learning rate halfway?

# %%
predict("warm-up/half", lr=1.6)

# %%
steps = round(5 * 1281167 / 8192)
print(f"{steps} iterations, each adds {(3.2 - 0.1) / steps:.6f}")
reveal("warm-up/half", lr=scaling.warm_up(steps // 2, steps, start=0.1, end=3.2))

# %%
shapes = {
    "Goyal's": [scaling.warm_up(t, 20, start=1 / 8, end=1) for t in range(101)],
    "from 0, then cosine": [
        scaling.warm_up(t, 20, start=0, end=scaling.cosine(max(t - 20, 0), 80, peak=1))
        for t in range(101)
    ],
    "WSD": [min(t / 20, scaling.wsd(t, 100, peak=1, decay=20)) for t in range(101)],
}
plots.curves(
    range(101), xlabel="iteration", ylabel="of the scaled rate",
    title="WSD knows its end only when it decays", **shapes,
)  # fmt: skip

# %% [markdown]
# *Cosine* falls as soon as the warm-up is over, so it must know the last one. *WSD*, warm-up, stable, decay, does not: train on, and decay when you want to stop.
#
# Handwritten digits (scikit-learn's), ten epochs of SGD, half of the data in a batch: k is about 90. The network has three hidden layers with a LayerNorm (lab 03) before each activation, or without. The rate at a batch of 8 is 1/32 with it, 1/128 without. The warm-up takes four of the ten epochs.


# %%
def digit_errors(norm, base, schedule):
    """Test errors in %, ten seeds, at a batch of 718 under the linear rule."""
    network, (images, test) = rigs.scaling.digits_network(norm), rigs.scaling.digits()
    options = dict(batch=718, samples=14370, seeds=range(10), schedule=schedule)
    lr = [scaling.scale_lr(base, 718 / 8, "linear")]
    rows = rigs.copies.train_copies(network, images, lr=lr, **options)
    return 100 * rigs.copies.score(network, rows, test)[1][:, 0]


# %% [markdown]
# > In which of the two does the warm-up help: with LayerNorm, without, or both?

# %%
predict("warm-up/helps", where="both")

# %%
rescued, slowly = {}, scaling.gradual(ratio=718 / 8, share=0.4)
for norm, base in ((True, 1 / 32), (False, 1 / 128)):
    at_once, gradual = (digit_errors(norm, base, each) for each in (None, slowly))
    rescued[norm] = worse(at_once, gradual + 5)
    print(f"LayerNorm {norm!s:5}: better by 5 points and more: {rescued[norm]}")

# %%
reveal("warm-up/helps", where={(True, False): "with"}.get(tuple(rescued.values()), "?"))

# %% [markdown]
# Recorded with twenty seeds, test errors in %:

# %%
for norm in (True, False):
    for rule in ("square root", "linear", "linear, warm-up 0.4"):
        found = rigs.scaling.swept("warm-up", norm=norm, rule=rule)
        cells = [f"{b:3.0f}: {m.value:.1f}±{m.error:.1f}" for b, m in found.items()]
        print(f"LayerNorm {norm!s:5} {rule:20}", *cells)

# %% [markdown]
# With LayerNorm the warm-up rescues the largest batch. Without, it does not: from 512 on the error is above 30 % with it and without it, and at 256 it costs almost 2 points. (The networks of Goyal have batch normalization.) And at this size the plain square root is at least as good as linear with warm-up, from a batch of 512 on.
#
# **Goyal's curve, and ours.** Errors above that of the base batch, in points, against k, with warm-up; theirs is Figure 3:

# %%
theirs = {int(b) / 256: m.value for b, m in rigs.scaling.goyal("Fig 3").items()}
digits = rigs.scaling.swept("warm-up", norm=True, rule="linear, warm-up 0.4")
ours = {b / 8: mean.value for b, mean in digits.items()}
above = {
    name: ([k for k in of if k >= 1], [e - of[1] for k, e in of.items() if k >= 1])
    for name, of in {"ResNet-50": theirs, "digits": ours}.items()
}
plots.curves(
    xlabel="k, batch over base batch", ylabel="error above k = 1 (points)", log="x",
    title="Flat, and then it is not", **above,
)  # fmt: skip

# %% [markdown]
# ### Exercise 16.1 · Take a recipe to k times the batch (10 min, ●○○)


# %%
def recipe(optimizer: str, lr: float, decay: float, k: float, steps: int):
    """A function of the iteration (from 0) that gives its learning rate, and the decay.

    "sgd" takes the linear rule, "adam" and "rmsprop" the square root. Warmed up as in
    Goyal's paper, over five epochs of `steps` iterations each; then constant.
    """
    raise NotImplementedError


# %%
check("scaling/recipe", recipe)

# %%
hint("scaling/recipe", 1)

# %% [markdown]
# ## Where does it stop helping?
#
# The gradient of a batch of B examples is the true one, G, plus noise. Its expected squared length is
#
# $$ \mathbb E\,|g_B|^2 \;=\; |G|^2 + \frac{\operatorname{tr}\Sigma}{B}, $$
#
# where tr Σ is the variance of one example's gradient, summed over all weights. At B = tr Σ / |G|² both are equal: the **simple noise scale**, B_simple.
#
# Two unknowns, so two batch sizes are enough. Three ways to get them, and one formula:
#
# | | small batch | large batch |
# |---|---|---|
# | two batch sizes | b | B |
# | covariance of single examples | 1 | n |
# | ranks, before and after the all-reduce | b | N·b |

# %%
show(scaling.estimate_spread)

# %% [markdown]
# |g_B|² itself is a *biased* estimate of |G|²: it still holds tr Σ / B. Along runs at a batch of 32, four seeds, from 1,024 examples each; single examples against all, and batches of 16 against all:

# %%
kept = {}


def keep(step, rows):
    if step in (1, 64, 256):
        kept[step] = rows[:, 0].clone()


options = dict(lr=[1 / 16], batch=32, samples=32 * 256, seeds=range(4), watch=keep)
rigs.copies.train_copies(network, data, **options)
x, y = (side[:: len(side) // 1024][:1024] for side in data)
pairs, scales = ((1, 1024), (16, 1024)), {}
for step, copies in kept.items():
    lengths = [
        rigs.copies.squared_lengths(network, w, x, y, (1, 16, 1024)) for w in copies
    ]
    for b, B in pairs:
        found = [scaling.estimate_spread(of[b], of[B], b, B) for of in lengths]
        scales.setdefault(step, []).append(scaling.noise_scale(found))
    print(f"step {step:3}:", *(f"{scale:.0f}" for scale in scales[step]))

# %%
for step, (covariance, two_sizes) in scales.items():
    near = abs(two_sizes / covariance - 1) < 0.1
    print(f"step {step:3}: they agree within 10 %:", near)
print("it grows as the loss falls:", scales[256][0] > scales[1][0])

# %% [markdown]
# The means over seeds of tr Σ *and* of |G|² are divided once. Seed by seed the ratio is of little use; from the record, at step 128:

# %%
loss, found = rigs.scaling.spreads()[128]
print("each seed:", *(round(each.trace / each.signal) for each in found))
print(f"loss {loss:.2f}: ratio of means {scaling.noise_scale(found):.0f}")

# %% [markdown]
# ### Exercise 16.2 · Measure the noise scale on ranks (10 min, ●●○)
#
# Every rank has the gradient of b examples before the all-reduce, and that of N·b after it.


# %%
def noise_on_ranks(gradients: list, b: int, comm) -> float:
    """B_simple, the same number on every rank.

    gradients: this rank's own, flat, of b examples each; one for each of several seeds.
    `comm.all_reduce(x)` sums over ranks, `comm.size` is their number.
    """
    raise NotImplementedError


# %%
check("scaling/noise-on-ranks", noise_on_ranks)

# %%
hint("scaling/noise-on-ranks", 1)

# %% [markdown]
# ## Does the noise scale predict the largest useful batch?
#
# Train to a target loss instead, and count steps, each batch size at the best of six learning rates. Steps S and batch B lie on a hyperbola,
#
# $$ S \;=\; S_{\min} + \frac{E_{\min}}{B}. $$
#
# No batch takes fewer than S_min steps, and none fewer than E_min examples. Where both terms are equal lies the **critical batch size** B_crit = E_min / S_min: twice the steps of the largest batch, and twice the examples of the smallest.
#
# > The target is a loss of 2.55. From batch 8 to 512, 64 times, the steps fall by less. By how many times?

# %%
predict("steps/fewer", times=64)

# %%
runs = rigs.scaling.fewest_steps("sgd", 2.55)
line = rigs.scaling.hyperbola("sgd", 2.55)
for batch, (lr, mean) in runs.items():
    steps, fitted = f"{mean.value:4.0f} ± {mean.error:2.0f}", line.steps(batch)
    print(f"batch {batch:4}: best rate {lr:.3g}, {steps} steps, {fitted:4.0f} fitted")
reveal("steps/fewer", times=round(runs[8][1].value / runs[512][1].value))

# %%
plots.curves(
    xlabel="batch size in examples", ylabel="steps to a loss of 2.55", log="xy",
    title=f"The hyperbola bends at about {line.critical:.0f} examples",
    hyperbola=(list(runs), [line.steps(batch) for batch in runs]),
    measured={"measured": (list(runs), [mean.value for _, mean in runs.values()])},
)  # fmt: skip

# %% [markdown]
# And look at the learning rates: four times the batch, four times the best rate, up to 512, a little past the bend. At 2,048 the best rate is the same. *The linear rule holds where the steps fall as fast as the batch grows.* Now three targets, each with the noise scale that was measured nearest to that loss:

# %%
measured = rigs.scaling.spreads()
for target in (2.7, 2.55, 2.4):
    critical = rigs.scaling.hyperbola("sgd", target).critical
    near = min(measured.values(), key=lambda each: abs(each[0] - target))
    simple = scaling.noise_scale(near[1])
    times = f"{simple / critical:.1f} times"
    print(f"loss {target}: B_crit {critical:.0f}, B_simple {simple:.0f}, {times}")

# %% [markdown]
# Within a factor of two, from single gradients and without a sweep; and B_crit grows as the loss falls. So a batch that is too large at the start may be right at the end: that is what a batch-size ramp is for.
#
# **The same as time.** Devices with 8 examples each, 1 ms per example, and 2 ms for an all-reduce, assumed to be the same for any number. At the critical batch a run takes 2·S_min steps, and never fewer than S_min:

# %%
devices = [2**i for i in range(9)]
seconds = [line.seconds(8 * n, n, example=1e-3, reduce=2e-3) for n in devices]
plots.curves(
    devices, xlabel="devices of 8 examples", ylabel="time to the target",
    unit="s", log="xy",
    title=f"Past {line.critical / 8:.0f} devices, no number of devices halves the time",
    trained=seconds, if_every_device_counted=[seconds[0] / n for n in devices],
)  # fmt: skip

# %% [markdown]
# ### Exercise 16.3 · Bug hunt: momentum for large batches (12 min, ●●●)
#
# Some write the learning rate into the velocity v, v ← m·v + η·g, and then w ← w − v. Goyal's section 3 warns of it. This one passes its test, with k = 1. Three things are wrong.


# %%
class LargeBatch:
    def __init__(self, w, lr, k, decay=0.0, warm=0):
        self.w, self.lr, self.k, self.decay, self.warm = w, lr, k, decay, warm
        self.velocity, self.t = torch.zeros_like(w), 0

    def rate(self):
        """From lr to k·lr, in `warm` steps."""
        share = min(self.t / self.warm, 1) if self.warm else 1
        return self.lr * (1 + share * (self.k - 1))

    def step(self, gradients):
        """`gradients` are those of k micro-batches."""
        gradient = sum(gradients) + self.k * self.decay * self.w
        self.velocity = 0.9 * self.velocity + self.rate() * gradient
        self.w -= self.velocity
        self.t += 1


# %%
def its_test():
    w, reference = torch.ones(3), nn.Parameter(torch.ones(3))
    ours = LargeBatch(w, 0.1, 1)
    theirs = torch.optim.SGD([reference], 0.1, momentum=0.9)
    for t in range(5):
        reference.grad = torch.full((3,), float(t))
        ours.step([reference.grad])
        theirs.step()
    return torch.allclose(w, reference)


its_test()

# %%
check("scaling/bug-hunt", LargeBatch)

# %%
hint("scaling/bug-hunt", 1)

# %% [markdown]
# ## Turn the knobs
#
# The best of six rates at each batch size, for three targets, and what either rule predicts from a batch of 8. Which rule does each optimizer follow, and up to which batch?


# %%
def knobs(optimizer="sgd", target=2.55):
    runs = rigs.scaling.fewest_steps(optimizer, target)
    best = {b: lr for b, (lr, _) in runs.items()}
    bend = rigs.scaling.hyperbola(optimizer, target).critical
    lines = {
        rule: [scaling.scale_lr(best[8], b / 8, rule) for b in best]
        for rule in ("linear", "square root")
    }
    return plots.curves(
        list(best), xlabel="batch size in examples", ylabel="best learning rate",
        title=f"The critical batch size is {bend:.0f}", log="xy",
        measured={"measured": list(best.values())}, **lines,
    )  # fmt: skip


explore(knobs, optimizer=["sgd", "adam"], target=[2.7, 2.55, 2.4])

# %% [markdown]
# ## In practice
#
# None of these three scales the rate for you: you set it, for the global batch.
#
# | | Megatron-LM | torchtitan | Hugging Face `TrainingArguments` |
# |---|---|---|---|
# | rate | `--lr`, `--min-lr` | `optimizer.lr` | `learning_rate` |
# | warm-up | `--lr-warmup-iters`, from `--lr-warmup-init` (0) | `lr_scheduler.warmup_steps`, first step 1/warmup | `warmup_steps`, from 0 |
# | cosine | `--lr-decay-style cosine` | `decay_type = "cosine"` | `lr_scheduler_type="cosine"` |
# | WSD | `--lr-decay-style WSD`, `--lr-wsd-decay-iters` | `decay_ratio` | `lr_scheduler_type="warmup_stable_decay"` |
# | larger batch later | `--rampup-batch-size` | – | – |

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **α = 0.1 "works best for kn=256 (23.68% error)"** (lecture slides on multi-GPU training; the caption of Goyal's Table 2(a) has the same slip). 23.68 % is the row of 0.20; that of 0.10 is 23.60 %, also in Table 1. <!-- erratum: S4-031 -->
#   <!-- claim: [rigs.scaling.goyal("Table 2(a)")["kn=256, η=" + eta].value for eta in ("0.20", "0.10")] == [23.68, 23.60] -->
#
# ### True under a condition
#
# **α_t = α_max · t / T_w** (the same slides, on Goyal's warm-up). True where warm-up begins at 0. Goyal's begins at η; halfway from 0.1 to 3.2 it is at 1.65 and not at 1.60 (section 2.2). <!-- erratum: S4-037 -->
#   <!-- claim: round(scaling.warm_up(391, 782, start=0.1, end=3.2), 6) == 1.65 -->

# %% [markdown]
# ## Summary
#
# > - k times the batch: k times the learning rate for SGD, √k for Adam and RMSProp. At k = 32, 0.1 becomes 3.2, or 0.566.
# >   <!-- claim: [round(scaling.scale_lr(0.1, 32, rule), 3) for rule in ("linear", "square root")] == [3.2, 0.566] -->
# > - The linear rule holds, and then fails: here it costs 0.11 from a batch of 16 to 1,024, and at 4,096 it diverges.
# >   <!-- claim: (lambda of: round(of[1024].value - of[16].value, 2) == 0.11 and of[4096].value > 10)(rigs.scaling.swept("rules", optimizer="sgd", rule="linear")) is True -->
# > - Weight decay is not scaled: 32 times the rate in 1/32 of the steps decays as much as before.
# >   <!-- claim: round(scaling.shrinkage(32e-3, 0.1, 100) / scaling.shrinkage(1e-3, 0.1, 3200), 2) == 1.0 -->
# > - Goyal's warm-up begins at η, grows at every iteration, and rescues large batches of a network with normalization; without, it does not.
# >   <!-- claim: (lambda at: at(True, "linear") > 2 * at(True, "linear, warm-up 0.4") and at(False, "linear, warm-up 0.4") > 30)(lambda norm, rule: rigs.scaling.swept("warm-up", norm=norm, rule=rule)[718].value) is True -->
# > - tr Σ / |G|², from ranks before and after the all-reduce, predicts the critical batch size within a factor of 2, and grows from the start of a run.
# >   <!-- claim: max(scaling.noise_scale(min(rigs.scaling.spreads().values(), key=lambda e: abs(e[0] - t))[1]) / scaling.fit({b: m.value for b, (_, m) in rigs.scaling.fewest_steps("sgd", t).items()}).critical for t in (2.7, 2.55, 2.4)) < 2 -->
# > - At the critical batch a run takes twice its fewest steps and twice its fewest examples.
# >   <!-- claim: (lambda h: h.steps(h.critical) / h.smin)(scaling.Hyperbola(10.0, 100.0)) == 2 -->
#
# So, with 32 times as many GPUs: kη or √k·η, warmed up, if 32 times your batch is still below the noise scale. Beyond it a run still gets shorter, but no number of GPUs halves its time.

# %% [markdown]
# ## References
#
# - P. Goyal et al., *Accurate, large minibatch SGD: training ImageNet in 1 hour*, arXiv:1706.02677 (2017): sections 2.1, 2.2, 3 and 5.1; Tables 1 and 2; Figure 3.
# - S. McCandlish et al., *An empirical model of large-batch training*, arXiv:1812.06162 (2018): noise scale, critical batch size.
# - D. Granziol et al., *Learning rates as a function of batch size: a random matrix theory approach to neural network training*, arXiv:2006.09092 (2020).
# - I. Loshchilov, F. Hutter, *Decoupled weight decay regularization*, ICLR 2019: AdamW.
# - torchtitan, pull requests 938 and 1284 (schedules); Megatron-LM, `megatron/training/arguments.py`.
