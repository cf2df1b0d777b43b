# %% [markdown]
# # 16 · Scale the learning rate with the batch
#
# **You have 32 times as many GPUs. By how much do you raise the learning rate, and where does it stop helping?**
#
# *90 min, and 35 further · before this: labs 05 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - take a recipe to a larger batch: rate, warm-up and weight decay (exercise 16.1),
# - get the noise scale from what ranks hold before and after their all-reduce (exercise 16.2),
# - know what a changing rate, a weight decay and k micro-batches ask of SGD (exercise 16.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import functools

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
# Two weights are trained. Each of 32 small steps follows the noisy gradient of a small batch; one large step follows the mean of 32 such gradients, taken at the start, at 32 times the rate. On an even slope both end at the same place. In a valley that is as steep at the start, the small steps turn along its bottom, and the same large step ends high on the far side.

# %%
def walk(slope, rate=1.0, k=32):
    """Where k small steps go, and one along the mean gradient at k times the rate."""
    noise = torch.randn(k, 2, generator=torch.Generator().manual_seed(4))
    small = [torch.zeros(2)]
    for each in noise:
        small.append(small[-1] - rate * (slope(small[-1]) + each))
    large = -k * rate * (slope(torch.zeros(2)) + noise.mean(0))
    return tuple(zip(*(w.tolist() for w in small), strict=True)), large.tolist()


def slope(w):
    return torch.tensor([-1.0, -0.5])


def valley(w):
    """As steep at the start, with its bottom at a second weight of 4."""
    return torch.stack([torch.tensor(-1.0), (w[1] - 4) / 8])


(even, there), (curved, _) = walk(slope), walk(valley)
plots.curves(
    xlabel="first weight", ylabel="second weight",
    title="One large step is 32 small ones, as long as the gradient stays the same",
    on_a_slope=even, in_a_valley=curved, one_large_step=([0, there[0]], [0, there[1]]),
)  # fmt: skip

# %% [markdown]
# Scaling the learning rate is **going as far per epoch with fewer steps, as long as the gradient at the end of a step is still about that at its beginning.**

# %% [markdown]
# ## Is a batch on many ranks the batch?
#
# A network of 8,832 weights predicts the next character of a text from the last eight. Many copies train at once: five seeds times several learning rates are the rows of one tensor. All rates of a seed see the same examples in the same order.

# %%
network = rigs.scaling.CHARACTERS
data, held_out = rigs.scaling.characters()
rows = network.start(range(5))
print(f"{len(data[1]):,} examples to learn from; rows {list(rows.shape)}")

# %% [markdown]
# Is "a batch of 64" the same in a row and on ranks? Five steps of SGD with momentum 0.9, in float64: once as a row, once on four ranks with 16 examples each, in micro-batches of 8 (lab 05), reduced once per step (lab 08).
#
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
print("the weights are equal to 1e-10:", apart < 1e-10)

# %% [markdown]
# So all else is measured on rows, and holds on ranks. The loop that trains them:

# %%
show(rigs.copies.train_copies)

# %% [markdown]
# ## By how much do you raise the learning rate of SGD?
#
# Let g_i be the gradient of the i-th small batch, and suppose that it is the same anywhere on the way. Then k small steps of rate η and one step of rate kη end at the same weights:
#
# $$ w - \eta\,g_1 - \dots - \eta\,g_k \;=\; w - k\eta\,\frac{g_1 + \dots + g_k}{k}. $$
#
# This is the **linear rule**: k times the batch, k times the learning rate. Its rivals are the **square-root rule**, √k·η, and leaving η alone. Here k is the new batch size over the old one, 16.

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
# At a batch of 16 the best rate of SGD is 1/64 (a sweep over factors of two). Every run sees the same number of examples. The loss is a cross-entropy in nats on held-out examples; knowing nothing costs ln 64 = 4.16.
#
# > The loss at a batch of 16 is about 2.3. What is it at 32 times the batch, with the learning rate as it was?

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

# %%
reveal("unscaled/loss", nats=round(none.mean().item(), 1))

# %% [markdown]
# A longer record has twice as many examples and eight seeds (`python tools/scaling_sweep.py`; date and versions: `data/README.md`). Bands are two standard errors to each side:

# %%
axes = dict(xlabel="batch size in examples", ylabel="held-out loss (nats)", log="x")
curves = rigs.scaling.rule_curves("sgd")
plots.curves(title="SGD: up to 1,024 no rate beats the linear one", **axes, **curves)

# %%
for rule in scaling.POWERS:
    found = rigs.scaling.swept("rules", optimizer="sgd", rule=rule)
    print(f"{rule:12}", *(f"{batch:4.0f}: {mean}" for batch, mean in found.items()))

# %%
best = rigs.scaling.best_rates("sgd")
print(f"{'best rate':12}", *(f"{batch:4}: {mean}" for batch, (_, mean) in best.items()))
grows = {batch: lr / best[16][0] for batch, (lr, _) in best.items()}
print("and is times", *(f"{batch:4}: {times:<13.1f}" for batch, times in grows.items()))

# %% [markdown]
# From a batch of 16 to 512 the linear rule costs 0.05 nats, the root 0.35, no scaling 0.71.
#
# **Not all that a large batch loses is the rule's.** For each batch five rates in steps of √2 were recorded. At 1,024 the linear rule is 0.11 behind the batch of 16, and so is the best rate: steps are too few. At 4,096 the rule fails, too. It diverges, where the best rate, 66 times that of 16, is 0.57 behind.
#
# ### Further: the published table
#
# Goyal et al. trained ResNet-50 on ImageNet at k = 32 (256 to 8k images). Their errors in %, and our losses at the same k:

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
# At a batch of 16 the best rate of Adam is 1/256 (by factors of two).
#
# > At 32 times the batch, with which of these multiples of its rate does Adam do best: 1, √32 = 5.7, or 32?

# %%
predict("adam/rate", times=32)

# %% [markdown]
# Adam divides each gradient by the root of a running mean of its square. Where a gradient is mostly noise, k times the batch makes this divisor √k times smaller. So the signal already makes a step √k times as long, and only the other √k is left for the learning rate.

# %%
adam = {batch: losses("adam", 1 / 256, batch) for batch in (16, 64, 512, 2048)}
table(adam)

# %%
reveal("adam/rate", times=[1, 5.7, 32][adam[512].mean(0).argmin()])

# %%
curves = rigs.scaling.rule_curves("adam")
plots.curves(title="Adam: the square root stays at the best rate", **axes, **curves)

# %%
found = rigs.scaling.swept("rules", optimizer="adam", rule="square root")
best = rigs.scaling.best_rates("adam")
for batch, (lr, mean) in best.items():
    times = f"{lr / best[16][0]:4.1f} times, by the root {(batch / 16) ** 0.5:4.1f}"
    print(f"{batch:4}: best rate {times}; loss {mean}, by the root {found[batch]}")

# %% [markdown]
# **The best rate grows nearly as the root.** At k = 32 it grows 6.9 times, by a finer record (thirty seeds, half as many examples) 7.6: near the root's 5.7, far from 1 and 32. (Seeds drawn again and again give 7.0 to 8.4.)
#   <!-- claim: claims.adams_rate_grows() == (7.6, 7.0, 8.4) -->
#
# **At 4,096 the root is 0.44 nats behind, and is not to blame.** The best rate is 0.43 behind: 16 steps are too few, whatever the rate.

# %% [markdown]
# **What happens to the weight decay?** AdamW multiplies each weight by 1 − lr·wd in each step, wd being the weight decay. At 32 times the batch an epoch has 100 steps in place of 3,200. What does decay alone leave of a weight after an epoch?

# %%
root = 32**0.5
for lr, decay, steps in (
    (1e-3, 0.1, 3200),
    (32e-3, 0.1, 100),
    (root * 1e-3, 0.1, 100),
    (root * 1e-3, root * 0.1, 100),
):
    left = scaling.shrinkage(lr, decay, steps)
    print(f"lr {lr:.4f}, wd {decay:.3f}, {steps:4} steps: {left:.3f} of a weight left")

# %% [markdown]
# What an epoch decays is lr·wd·steps, and Wang and Aitchison (2024) keep it. Under the linear rule the rate makes up for the missing steps, and wd stays. Under the square root only √k of k is made up: an epoch decays √k times less, unless wd becomes √k·wd.
#
# Does training want that? It would not be enough that √32·wd does better than wd: the small batch might want more. Where is the *best* wd of each batch? Recorded (`python tools/scaling_sweep.py decays`): AdamW on 2,048 examples that it sees 16 times, at the root's rates, at half and at twice these; steps of two, five seeds:

# %%
for batch in (16, 512):
    for lr, (wd, mean) in rigs.scaling.best_decays(batch).items():
        rate = f"batch {batch:3}, rate {256 * lr:4.1f}/256"
        print(f"{rate}: best wd {wd:.2f}, loss {mean}")

# %% [markdown]
# **The best wd moves from 0.4 to 1.6.** The rule says √32·0.4 = 2.3, so it holds within the sweep's factor of two. With the small batch's wd the large one is 0.3 nats behind.
#   <!-- claim: (lambda of: round(of[0.4].value - min(of.values()).value, 1))(rigs.scaling.swept("decay", "target", norm=False, batch=512, lr=2**-5.5)) == 0.3 -->
#
# **But it hardly moves with the rate.** At four times the rate an epoch decays four times as much, and the best wd is the same. So lr·wd·steps is not what this network wants kept.
#
# ### Further: is it the divisor?
#
# The square root was derived for gradients that are mostly noise. How much smaller is Adam's divisor really at a batch of 512 than at 16, along a run at 16?


# %%
def size(rows, batch, draws):
    """The root of the mean square of each weight's gradient."""
    draw, total = torch.Generator().manual_seed(9), 0
    for _ in range(draws):
        chosen = torch.randint(len(data[1]), (len(rows), batch), generator=draw)
        gradients = network.gradients(rows, data[0][chosen], data[1][chosen])
        total = total + gradients.square() / draws
    return total.sqrt()


along = {}


def note(step, rows):
    if step in (1, 16, 256, 1024):
        along[step] = rows[:, 0].clone()


options = dict(optimizer="adam", lr=[1 / 256], batch=16, samples=16384)
rigs.copies.train_copies(network, data, seeds=range(3), watch=note, **options)
for step, rows in along.items():
    smaller = (size(rows, 16, 64).mean() / size(rows, 512, 32).mean()).item()
    print(f"step {step:4}: {smaller:.1f} times smaller; {32 / smaller:.1f} are left")

# %% [markdown]
# The divisor is 3.5 to 5 times smaller, and not √32 = 5.7: at 512 the signal is no longer small beside the noise. So 6.5 to 9 times are left for the rate; the sweep found 7.6.
#
# ### Further: then what does decay want?
#
# A balance. Adam's mean step is lr·m/√v, m being the mean gradient, and decay's is lr·wd·w. Where they are equal, lr cancels. With √v 3.5 to 5 times smaller, the same weights need a wd so many times larger: 4 was found.
#
# A LayerNorm changes that: the length of the weights before it does not count, only how fast they turn, and lr·wd sets that. The same network with a LayerNorm, at a batch of 16:

# %%
for lr, (wd, mean) in rigs.scaling.best_decays(16, norm=True).items():
    print(f"rate {256 * lr:4.2f}/256: best wd {wd:.2f}, loss {mean}")

# %% [markdown]
# **There the best wd falls as the rate grows**, 2.4 times over a factor of eight. So where layers normalize, as a transformer's do, lr·wd begins to count.
#   <!-- claim: (lambda of: round(of[2**-10][0] / of[2**-7][0], 1))(rigs.scaling.best_decays(16, norm=True)) == 2.4 -->
#
# ### Further: then is it the same for RMSProp?
#
# RMSProp divides by such a root, too. But its mean of squares begins at 0, and it does not correct for that, as Adam does. By how much does its best rate grow, as it is and corrected? Recorded (`python tools/scaling_sweep.py finer`; Adam with β₁ = 0 and β₂ = 0.99 is a corrected RMSProp):

# %%
for way in (("adam", ""), ("rmsprop", ""), ("rmsprop", "corrected")):
    print("{:7} {:9}".format(*way), f"grows {rigs.scaling.grows(*way):.1f} times")

# %%
curves = rigs.scaling.rule_curves("rmsprop")
del curves["linear"]  # 13 nats at 1,024
title = "RMSProp: at 1,024 the root is no better than the old rate"
plots.curves(title=title, **axes, **curves)

# %% [markdown]
# **Corrected it grows 5.4 times, as the root says; as it is, 2.4 times.** Its first step is 1/√0.01 = 10 rates long, and its mean forgets over 100 steps. At a batch of 512 the run has 64: all of it is such steps, so a rate grown by the root is too large. (By the divisor alone it would grow 6.5 to 9 times, as Adam's: so that is not all.)
#   <!-- claim: [round(rigs.scaling.grows("rmsprop", rule), 1) for rule in ("corrected", "")] == [5.4, 2.4] -->
#
# ### Further: and the β?
#
# Adam's running mean of squares forgets over 1/(1 − β₂) *steps*. 1,000 steps are 16,000 examples at a batch of 16, and 512,000 at 512. So beside the rate Malladi et al. (2022) scale 1 − β₁ and 1 − β₂ by k, and ε by 1/√k. Adam allows that only below k = 10, where 1 − β₁ = 0.1 becomes 1. β₂ alone can be scaled further, and RMSProp has only β₂.
#
# What does it gain over the root alone? Recorded (`python tools/scaling_sweep.py betas`): differences in loss seed by seed, eight seeds, and for RMSProp also what the correction gains:

# %%
for optimizer in ("adam", "rmsprop"):
    rules = ("and both β", "and β₂", "corrected", "corrected, and β₂")
    for rule in rules[:2] if optimizer == "adam" else rules[1:]:
        more = rigs.scaling.swept(
            "betas", optimizer=optimizer, rule=rule, less="square root"
        )
        cells = [f"{b:4.0f}: {m.value:+.2f} ± {m.error:.2f}" for b, m in more.items()]
        print(f"{optimizer:8} {rule:17}", *cells, sep="  ")

# %% [markdown]
# With Adam nothing shows up to a batch of 1,024. At 4,096, in 16 steps, scaling β₂ alone makes the loss a little worse. Only RMSProp at 1,024 gains, 0.15 of the 0.32 that the root had lost.
#
# **That gain is the correction's.** Alone it gains 0.13, and β₂ on top of it 0.03 ± 0.02: a short memory soon forgets the 0 with which it began. (The paper claims more: in the limit of small steps the whole run follows that of the small batch. This compares ends alone.)

# %% [markdown]
# ## How do you warm up?
#
# In the first epochs weights change fast, write Goyal et al., and the assumption that the gradient stays the same breaks down. So they raise the rate gradually, by a constant amount *at each iteration*, for five epochs. With 1,281,167 images in batches of 8,192, from the small batch's rate, 0.1, to 3.2:

# %%
steps = round(5 * 1281167 / 8192)
half = scaling.warm_up(steps // 2, steps, start=0.1, end=3.2)
print(f"{steps} iterations, each adds {(3.2 - 0.1) / steps:.6f}; halfway {half:.2f}")

# %% [markdown]
# Goyal's warm-up begins at η, which is known to work; most libraries begin at 0. Three schedules:

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
    range(101), xlabel="iteration", ylabel="share of the scaled rate",
    title="WSD needs its last iteration only when it decays", **shapes,
)  # fmt: skip

# %% [markdown]
# *Cosine* falls as soon as the warm-up is over, so it must know the last iteration. *WSD* (warm-up, stable, decay) need not: train on, and decay when you want to stop.

# %% [markdown]
# ### Exercise 16.1 · Take a recipe to k times the batch (10 min, ●○○)


# %%
def recipe(optimizer: str, lr: float, decay: float, k: float, steps: int):
    """A function of the iteration (from 0) that gives its learning rate, and the decay.

    "sgd" takes the linear rule, "adam" and "rmsprop" the square root. lr and decay are
    those of the small batch. Warmed up as in Goyal's paper, over five epochs of
    `steps` iterations each, with the large batch; then constant. A step
    multiplies each weight by 1 − rate·decay; after the warm-up an epoch decays as
    much as it did with the small batch.
    """
    raise NotImplementedError


# %%
check("scaling/recipe", recipe)

# %%
hint("scaling/recipe", 1)

# %% [markdown]
# ## Further: does a warm-up help?
#
# On the characters, with the linear rule, at once and with a warm-up over an eighth of the steps (recorded; nats, by batch):

# %%
for rule in ("linear", "linear, warm-up"):
    found = rigs.scaling.swept("rules", optimizer="sgd", rule=rule)
    cells = [f"{b:.0f}: {found[b].value:.2f}" for b in (64, 256, 512, 1024)]
    print(f"{rule:16}", *cells, sep="  ")

# %% [markdown]
# It helps at none of them. But Goyal's network has normalization layers. So take handwritten digits (scikit-learn's) and three hidden layers, with a LayerNorm (lab 03) before each activation, or without. A batch is 718 digits, half of the data, so ten epochs of SGD are 20 steps.
#
# One rate would prove nothing, since a warm-up may want another rate. So the whole range was recorded, at once and with a warm-up over four of the ten epochs, twenty seeds each (`python tools/scaling_sweep.py rates`).
#
# > With LayerNorm, compare the smallest error of all rates at once with the smallest of all rates with a warm-up. How many points does the warm-up gain?

# %%
predict("warm-up/gains", points=5)

# %%
runs = {
    (norm, rule): rigs.scaling.swept("rates", "lr", norm=norm, rule=rule)
    for norm in (True, False)
    for rule in ("at once", "warm-up")
}
best = {of: min(found.values()) for of, found in runs.items()}
for (norm, rule), mean in best.items():
    print(f"LayerNorm {norm!s:5} {rule:8} best: {mean.value:.2f} ± {mean.error:.2f} %")
gains = best[True, "at once"].value - best[True, "warm-up"].value
reveal("warm-up/gains", points=round(gains, 1))

# %%
names = {True: "LayerNorm", False: "no norm"}
plots.curves(
    xlabel="learning rate, after the warm-up", ylabel="test error", unit="%", log="xy",
    title="With LayerNorm a warm-up rescues too large a rate; the best gains nothing",
    **{
        f"{names[norm]}, {rule}": (list(of), [mean.value / 100 for mean in of.values()])
        for (norm, rule), of in runs.items()
    },
)  # fmt: skip

# %% [markdown]
# **It gains less than nothing, −0.8 ± 0.3 points**, though it was free to take a larger rate. Over one epoch or two it ends at 5.1 %, too.
#   <!-- claim: [round(min(m.value for m in rigs.scaling.swept("rates", "lr", norm=True, rule=rule).values()), 1) for rule in ("one epoch", "two epochs", "warm-up")] == [5.1, 5.1, 5.1] -->
#
# What it does is to rescue a rate that is too large, and only with LayerNorm. At a rate of 4 the error is 52 % at once, and 16 % with a warm-up. (The linear rule comes near: from 1/32 at a batch of 8 to 2.8.) But a rate of 1, at once, ends at 4.4 %. Without LayerNorm the error shoots up from 0.5 on, warm-up or not.
#
# So whoever sweeps the rate needs no warm-up here. Longer runs, which end far from where they begin, may: twenty steps cannot say.
#
# **Up to which k does the linear rule hold, with a warm-up?** Here are the points by which the error is above that of the base batch, against k; ResNet-50 is Goyal's Figure 3:

# %%
theirs = {int(b) / 256: m.value for b, m in rigs.scaling.goyal("Fig 3").items()}
digits = rigs.scaling.swept("warm-up", norm=True, rule="linear, warm-up 0.4")
ours = {round(b / 8): mean.value for b, mean in digits.items()}
above = {
    name: ([k for k in of if k >= 1], [e - of[1] for k, e in of.items() if k >= 1])
    for name, of in {"ResNet-50": theirs, "digits": ours}.items()
}
plots.curves(
    xlabel="k, batch over base batch", ylabel="error above k = 1 (points)", log="x",
    title="Up to k = 32 ResNet-50 loses 0.1 points, digits 0.9; both fail later",
    **above,
)  # fmt: skip

# %% [markdown]
# ## Where does it stop helping?
#
# Where a batch has averaged out its noise. The gradient of B examples is the true one, G, plus noise. Examples are independent, so the noise has the variance tr Σ/B, and its product with G is zero in the mean:
#
# $$ \mathbb E\,|g_B|^2 \;=\; |G|^2 + \frac{\operatorname{tr}\Sigma}{B}, $$
#
# where tr Σ is the variance of one example's gradient, summed over all weights. Both terms are equal at B = tr Σ / |G|², the **simple noise scale** B_simple.
#
# |G|² and tr Σ are two unknowns, so gradients of two batch sizes are enough. One formula, and three ways to get them:
#
# | | small batch | large batch |
# |---|---|---|
# | two batch sizes | b | B |
# | covariance of single examples | 1 | all |
# | ranks, before and after the all-reduce | b | N·b |

# %%
show(scaling.estimate_spread)

# %% [markdown]
# (|g_B|² itself is *biased*: it still holds tr Σ / B.) Do two ways agree? Along runs at a batch of 32, eight seeds: single examples against all of 1,024, and batches of 16 against all of *another* 1,024. Had both used the same 1,024, they would agree even if the formula were wrong.

# %%
kept = {}


def keep(step, rows):
    if step in (1, 64, 256):
        kept[step] = rows[:, 0].clone()


options = dict(lr=[1 / 16], batch=32, samples=32 * 256, seeds=range(8), watch=keep)
rigs.copies.train_copies(network, data, **options)
x, y = (side[:: len(side) // 2048][:2048] for side in data)
halves, scales = (slice(0, None, 2), slice(1, None, 2)), {}
for step, copies in kept.items():
    for half, b in zip(halves, (1, 16), strict=True):
        found = []
        for w in copies:
            of = rigs.copies.squared_lengths(network, w, x[half], y[half], (b, 1024))
            found.append(scaling.estimate_spread(of[b], of[1024], b, 1024))
        scales.setdefault(step, []).append(scaling.noise_scale(found))
    print(f"step {step:3}:", *(f"{scale:.0f}" for scale in scales[step]))

# %%
for step, (covariance, two_sizes) in scales.items():
    apart = max(covariance, two_sizes) / min(covariance, two_sizes)
    print(f"step {step:3}: within a factor of 1.5:", apart < 1.5)
print("it grows from the start:", min(scales[256]) > max(scales[1]))

# %% [markdown]
# Each number is one ratio, of the means over seeds of tr Σ *and* of |G|². The ratio of one seed is of little use, since seeds differ fivefold; from the record, at step 128:

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
# To find out, train to a target loss and count steps. Each batch size has the best of six learning rates (never the first or the last of the six). Steps S and batch B lie on a hyperbola,
#
# $$ S \;=\; S_{\min} + \frac{E_{\min}}{B}. $$
#
# No batch takes fewer than S_min steps, and none fewer than E_min examples. Both terms are equal at the **critical batch size** B_crit = E_min / S_min, which takes twice the fewest steps and twice the fewest examples.
#
# > The target is a loss of 2.55. A batch of 512 is 64 times one of 8. How many times fewer steps does it take?

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
many = [2 ** (3 + i / 8) for i in range(65)]
plots.curves(
    xlabel="batch size in examples", ylabel="steps to a loss of 2.55", log="xy",
    title=f"At {line.critical:.0f} examples both terms are equal",
    hyperbola=(many, [line.steps(batch) for batch in many]),
    fewest_steps=(many, [line.smin] * len(many)),
    fewest_examples=(many, [line.emin / batch for batch in many]),
    measured={
        "hyperbola": (list(runs), [mean.value for _, mean in runs.values()]),
        "B_crit": ([line.critical], [line.steps(line.critical)]),
    },
)  # fmt: skip

# %% [markdown]
# The best learning rates follow the linear rule up to 512 (by factors of two); at 2,048 the best is that of 512. So the rule ends past the bend at 424, about where larger batches stop paying.
#
# Does B_simple tell B_crit? Four targets, each with the noise scale measured nearest to that loss:

# %%
for target in (3.0, 2.7, 2.55, 2.4):
    critical, simple = rigs.scaling.critical_and_simple(target)
    times = f"{simple / critical:.1f} times"
    print(f"loss {target}: B_crit {critical:.0f}, B_simple {simple:.0f}, {times}")

# %% [markdown]
# **B_simple is too large each time, 1.1 to 2.4 times**, and needs no sweep. (Seeds drawn again and again give B_crit within 15 % of these, at 3.0 within 25 %, B_simple within 20 to 40 %.) Adam's B_crit is 301, 384, 580 and 724: nearer, though B_simple is from runs of SGD.
#   <!-- claim: [round(rigs.scaling.hyperbola("adam", t).critical) for t in (3.0, 2.7, 2.55, 2.4)] == [301, 384, 580, 724] -->
#
# **B_crit is one of a target.** From 3.0 to 2.55 it becomes three times as large. So a batch that is too large at the start may be right at the end: hence batch-size ramps.
#
# ### Further: and on another task?
#
# On one task this could be luck: any number near 500 would do. So take digits (scikit-learn's), with a LayerNorm before each activation and without:

# %%
for norm in (True, False):
    for target in (1.0, 0.5, 0.3):
        critical, simple = rigs.scaling.critical_and_simple(target, norm)
        said = f"LayerNorm {norm!s:5}, loss {target}: B_crit {critical:3.0f}, "
        print(f"{said}B_simple {simple:.0f}, {simple / critical:.1f} times")

# %% [markdown]
# **Digits want smaller batches, and B_simple says so.** Again it is too large each time, 1.6 to 2.4 times.
#   <!-- claim: (lambda times: [round(min(times), 1), round(max(times), 1)])([(lambda pair: pair[1] / pair[0])(rigs.scaling.critical_and_simple(t, norm)) for norm in (True, False) for t in (1.0, 0.5, 0.3)]) == [1.6, 2.4] -->
#
# ### Further: the same as time
#
# How many devices help? Each takes 8 examples of 1 ms; then all, however many, all-reduce in 2 ms. At the critical batch a run takes 2·S_min steps, and with more devices never fewer than S_min:

# %%
devices = [2 ** (i / 2) for i in range(17)]
seconds = [line.seconds(8 * n, n, example=1e-3, reduce=2e-3) for n in devices]
at = line.critical / 8
plots.curves(
    devices, xlabel="devices of 8 examples", ylabel="time to the target",
    unit="s", log="xy",
    title=f"Past {line.critical / 8:.0f} devices no number of them halves the time",
    trained=seconds, if_every_device_counted=[seconds[0] / n for n in devices],
    measured={"B_crit": ([at], [line.seconds(8 * at, at, example=1e-3, reduce=2e-3)])},
)  # fmt: skip

# %% [markdown]
# ### Exercise 16.3 · Bug hunt: momentum for large batches (12 min, ●●●)
#
# Some put the learning rate into the velocity v: first v ← m·v + η·g, then w ← w − v. Goyal's section 3 warns of it. `LargeBatch` should do what `torch.optim.SGD` with momentum 0.9 and `weight_decay` does on the mean of the k gradients, at the rate that `rate()` returns. It passes its test, with k = 1. Three things are wrong.


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
# ## Further: turn the knobs
#
# Dots are the best of six rates at each batch size, lines what either rule predicts from a batch of 8. Which rule does each optimizer follow, and up to which batch? (Rates were tried by factors of two: for a target of 2.55 Adam's rises fourfold up to 512, where √64 = 8.)


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
# ## Further: what if the model becomes wider?
#
# All rules so far are for one model. Does the best rate of a narrow network suit a wider one? Adam moves every weight by about its rate, whatever the gradient's length. A hidden unit sums n inputs, n being the width, and its n weights move together: its output moves n times as far as one weight. So one rate for all layers must fall as n grows. *μP* (Yang et al. 2022, table 3) divides the rate only where a layer's input grows, by n/32 if 32 is the narrow width. For Adam:
#
# | | rate | variance at the start |
# |---|---|---|
# | embedding, first layer, biases (their inputs do not grow) | as it was | as usual, 1 / inputs |
# | hidden matrices | · 32/n | as usual, 1/n |
# | last matrix | · 32/n | 32/n of the usual, so 1/n² |
#
# Recorded: the network of characters with three hidden layers, 16,384 examples in batches of 64, eight rates, three seeds (`python tools/scaling_sweep.py widths`).
#
# > Without μP, the network of width 256 trains with the best rate of width 32. How many nats does it lose against *its* best rate?

# %%
predict("width/lost", nats=0.1)

# %%
widths = (32, 64, 128, 256)
found = {
    (rule, n): rigs.scaling.swept("widths", "lr", rule=rule, target=n)
    for rule in ("standard", "μP", "μP's rates alone", "μP's start alone")
    for n in widths
}
tried, at_32 = list(found["μP", 32]), min(found["μP", 32].items(), key=lambda i: i[1])
print(f"{'width':15}", *(f"{n:11}" for n in widths))
for rule in dict.fromkeys(rule for rule, _ in found):
    bests = [min(found[rule, n].items(), key=lambda i: i[1]) for n in widths]
    said = (f"{mean.value:.2f} at 1/{1 / lr:<4.0f}" for lr, mean in bests)
    print(f"{rule:16}", *said)
    same = [found[rule, n][at_32[0]].value for n in widths]
    print(f"{'':4} always 1/{1 / at_32[0]:<3.0f}", *(f"{loss:11.2f}" for loss in same))
lost = found["standard", 256][at_32[0]].value
lost -= min(found["standard", 256].values()).value
reveal("width/lost", nats=round(lost, 1))

# %%
curves, bests, times = {}, {}, [256 * lr for lr in tried[:-1]]
for (rule, n), means in found.items():
    if n in (64, 256) and "alone" not in rule:
        values = [mean.value for mean in means.values()][:-1]
        curves[f"{rule} {n}"] = values
        bests[f"{rule} {n}"] = [times[values.index(min(values))]], [min(values)]
plots.curves(
    times, xlabel="learning rate, in 1/256", ylabel="held-out loss (nats)", log="x",
    title="In a wider network the best rate is smaller; with μP it stays",
    measured=bests, **curves,
)  # fmt: skip

# %% [markdown]
# With one rate for all layers the best rate falls fourfold, and no width does better than 64. With μP the best rate is the same at every width, and wider is better each time.
#
# **Do the rates do it, or the smaller start?** The rates: alone they keep the best rate in its place, and end as low. With the smaller start alone the best rate falls as before. Why does width 256, with its best single rate, stay 0.14 nats behind μP? What suits the wide matrices is too small for embedding, first layer and biases, whose inputs do not grow. With 1/512 for all layers the loss is 2.33; with 1/512 for the wide matrices and 1/64 for the others it is 2.16.
#   <!-- claim: (lambda of: [round(of("standard")[1 / 512].value, 2), round(of("μP's rates alone")[1 / 64].value, 2)])(lambda rule: rigs.scaling.swept("widths", "lr", rule=rule, target=256)) == [2.33, 2.16] -->
#
# So tune the narrow network, and keep the rate. (This is one task, Adam, a pass of 256 steps and a factor of eight in width; in μP a rate for deeper or longer training is a question of its own.)

# %% [markdown]
# ## In practice
#
# None of these three scales the rate for you: you set it, for the global batch.
#
# | | Megatron-LM | torchtitan 0.2.2 | Hugging Face `TrainingArguments` |
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
# > - k times the batch, below the noise scale: k times the learning rate for SGD, √k for Adam. At k = 32, 0.1 becomes 3.2, or 0.566. (The best rate of Adam grew 7.6 times here, where √32 = 5.7; that of RMSProp 5.4 times with Adam's correction, 2.4 times without.)
# >   <!-- claim: [round(scaling.scale_lr(0.1, 32, rule), 3) for rule in ("linear", "square root")] == [3.2, 0.566] -->
# > - Tell the rule's loss from the batch's: try other rates. Here the linear rule is 0.11 behind at 1,024, where no rate does better; at 4,096 it diverges, and the best rate is 0.57 behind.
# >   <!-- claim: (lambda of, best: [round(of[1024].value - of[16].value, 2), round(best[1024][1].value - of[16].value, 2), round(best[4096][1].value - of[16].value, 2), of[4096].value > 10])(rigs.scaling.swept("rules", optimizer="sgd", rule="linear"), rigs.scaling.best_rates("sgd")) == [0.11, 0.11, 0.57, True] -->
# > - What an epoch decays is lr·wd·steps. Under the linear rule wd stays. Under the square root it becomes √k·wd; otherwise 0.945 of a weight is left where it was 0.726. Here the best wd grew fourfold at k = 32, where √32 = 5.7; it fell with a rising rate only with a LayerNorm.
# >   <!-- claim: [round(scaling.shrinkage(32**0.5 * 1e-3, scaling.scale_decay(0.1, 32, rule), 100), 3) for rule in ("linear", "square root")] == [0.945, 0.726] -->
# > - Goyal's warm-up begins at η and grows at every iteration. On digits, over four of ten epochs and with LayerNorm, it rescues a rate that is too large: an error of 52 % becomes 16 %. Without LayerNorm it does not. The best rate with it is no better than the best without.
# >   <!-- claim: (lambda at: [round(at("at once")[4].value), round(at("warm-up")[4].value)] == [52, 16] and min(m.value for m in at("at once").values()) < min(m.value for m in at("warm-up").values()))(lambda rule: rigs.scaling.swept("rates", "lr", norm=True, rule=rule)) is True -->
# > - tr Σ / |G|², from ranks before and after the all-reduce, tells the critical batch size without a sweep, and grows from the start of a run: it was 1.1 to 2.4 times too large for ten targets, of characters and digits. The critical batch hangs on the target: 135 for a loss of 3.0, 424 for 2.55.
# >   <!-- claim: [round(rigs.scaling.hyperbola("sgd", t).critical) for t in (3.0, 2.55)] == [135, 424] -->
# >   <!-- claim: (lambda times: [len(times), round(min(times), 1), round(max(times), 1)])([(lambda pair: pair[1] / pair[0])(rigs.scaling.critical_and_simple(t, norm)) for norm, targets in (("", (3.0, 2.7, 2.55, 2.4)), (True, (1.0, 0.5, 0.3)), (False, (1.0, 0.5, 0.3))) for t in targets]) == [10, 1.1, 2.4] -->
# > - At the critical batch a run takes twice its fewest steps and twice its fewest examples.
# >   <!-- claim: (lambda h: h.steps(h.critical) / h.smin)(scaling.Hyperbola(10.0, 100.0)) == 2 -->
#
# So, with 32 times as many GPUs: measure the noise scale first.
#
# - *The new batch is below it.* AdamW: √32·lr = 5.7·lr, √32·wd, the same β₁ and β₂. SGD: 32·lr, momentum and wd as they were. Then sweep the rate by factors of two. Warm up from the old rate, as everybody does; in this lab's short runs that helped only against too large a rate.
# - *It is above.* A run still gets shorter, but no number of GPUs halves its time. Stop below the noise scale, which was too large here each time, and let the other GPUs try another setting or share the model.

# %% [markdown]
# ## References
#
# - P. Goyal et al., *Accurate, large minibatch SGD: training ImageNet in 1 hour*, arXiv:1706.02677 (2017): sections 2.1, 2.2, 3 and 5.1; Tables 1 and 2; Figure 3.
# - S. McCandlish et al., *An empirical model of large-batch training*, arXiv:1812.06162 (2018): noise scale, critical batch size.
# - A. Krizhevsky, *One weird trick for parallelizing convolutional neural networks*, arXiv:1404.5997 (2014): both rules.
# - S. Malladi et al., *On the SDEs and scaling rules for adaptive gradient algorithms*, arXiv:2205.10287 (2022): √k, with β and ε.
# - X. Wang, L. Aitchison, *How to set AdamW's weight decay as you scale model and dataset size*, arXiv:2405.13698 (2024).
# - D. Granziol et al., *Learning rates as a function of batch size: a random matrix theory approach to neural network training*, arXiv:2006.09092 (2020).
# - G. Yang et al., *Tensor programs V: tuning large neural networks via zero-shot hyperparameter transfer*, arXiv:2203.03466 (2022): μP, table 3.
# - I. Loshchilov, F. Hutter, *Decoupled weight decay regularization*, ICLR 2019: AdamW.
# - torchtitan, pull requests 938 and 1284 (schedules); Megatron-LM, `megatron/training/arguments.py`.
