# %% [markdown]
# # 02 · Train in half the bits
#
# **Half precision makes activations smaller and, where a device has units for it, matrix products faster. What has to stay in fp32, so that the model still learns?**
#
# *90 min, and 55 further · before this: labs 00 and 01 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - train weights in half precision although a step is smaller than the gap between two of their values (exercise 2.1),
# - read a log of loss scales, and say what the next one will be (exercise 2.2),
# - put the parts of a step that scales and clips in their order, and know what other orders do (exercise 2.3, a bug hunt).
#
# *Half precision* is a format of 16 bits, bf16 or fp16.

# %% [markdown]
# ## Setup

# %%
import copy
import functools
import math
import pathlib
import timeit

import torch
from torch import _torch_docs, nn

from labutils import floats, measure, memory, precision, units
from labutils import predict as formulas
from labutils.config import Hardware, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.precision import LossScaler, MasterWeights, RoundedWeights
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.rigs.precision import Formats
from labutils.teach.widgets import explore

# %% [markdown]
# A small GPT and a real text to learn: the documentation of PyTorch's functions, which came with PyTorch. Letters are its tokens.

# %%
text = pathlib.Path(_torch_docs.__file__).read_text(encoding="utf-8")
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
f"{len(text):,} letters, {len(letters)} different ones"

# %%
sizes = dict(num_layers=2, d_model=32, num_heads=4, d_ff=128, seq_len=32)
config = ModelConfig(**sizes, vocab_size=len(letters))


def draw(generator, rows, tokens=codes):
    """Inputs and targets: `rows` windows of the text."""
    at = torch.randint(len(tokens) - 33, (rows, 1), generator=generator)
    window = tokens[at + torch.arange(33)]
    return window[:, :-1], window[:, 1:]


# %% [markdown]
# ## The idea in one picture
#
# One backward pass of this GPT, and how large its gradients are: a bar for each power of two. Under it, what four formats can hold; where a
# range is hollow, numbers are *subnormal* and lose digits (lab 01). The pass is in fp64, and the biases of the keys are left out: a bias adds the same number to all scores
# of a query, which softmax does not see, so their gradients are zero, and whatever comes out instead is rounding.

# %%
model = GPT(config, generator=torch.Generator().manual_seed(0))
first_batch = draw(torch.Generator().manual_seed(1), rows=16)
in_fp64 = copy.deepcopy(model).double()
in_fp64.loss(*first_batch).backward()
counted = [p for name, p in in_fp64.named_parameters() if not name.endswith("key.bias")]
gradients = precision.exponents(parameter.grad for parameter in counted)
formats = [floats.FP16, floats.BF16, floats.E5M2, floats.E4M3]
in_fp16 = precision.fate(gradients, "fp16")
lost, coarse = in_fp16["zero"], in_fp16["subnormal"]
title = f"In fp16, {lost:.1%} of the gradients are lost and {coarse:.0%} lose digits"
plots.exponent_histogram(gradients, formats, title=title)

# %%
for fmt in formats:
    fate = precision.fate(gradients, fmt)
    zero, subnormal = fate["zero"], fate["subnormal"]
    print(f"{fmt.name}: {zero:5.1%} become zero, {subnormal:5.1%} subnormal")

# %% [markdown]
# bf16 covers everything: it has the exponents of fp32. fp16 loses less than one gradient in a thousand and keeps one in six with fewer digits. Of the two fp8 formats, e5m2
# loses one in eleven, and e4m3 nearly half of them.
#
# That is *range*. The other loss is of *digits*: a weight of 1 has bf16 neighbors $2^{-7}$ above and $2^{-8}$ below it, and a training step
# moves it by a thousandth or less. Mixed precision is three repairs: **master weights** against digits that a weight loses, **loss scaling** against lost range, **fp32
# sums** against digits that a sum loses. Each has a section, in which it is missing.

# %% [markdown]
# ## What does half precision buy?
#
# A product of two matrices of 4096 × 4096 is $2 \cdot 4096^3$ floating-point operations (FLOPs), in every format. The formats differ in how many of them a device does per
# second. By the data sheets, at their peaks:

# %%
flops = 2 * 4096**3
for name in ("A100", "H100"):
    peak = Hardware.named(name).flops
    times = [
        f"{fmt} {1000 * flops / peak[fmt]:.2f} ms" for fmt in ("fp32", "tf32", "bf16")
    ]
    print(
        f"{name}: {', '.join(times)}; fp32 / bf16 = {peak['bf16'] / peak['fp32']:.0f}"
    )

# %% [markdown]
# The operands have half as many bytes, too.
#
# ### Further: and on your machine?
#
# A smaller product, the fastest of five:

# %% tags=["nbval-ignore-output"]
a, b = torch.randn(2, 256, 256, generator=torch.Generator().manual_seed(0))
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    product = functools.partial(torch.matmul, a.to(dtype), b.to(dtype))
    fastest = min(timeit.repeat(product, number=1, repeat=5))
    print(f"{dtype!s:15} {1000 * fastest:.2f} ms")

# %% [markdown]
# The times are those of one machine and are not compared with a run. Half precision is fast where there are units for it. The stored numbers are from a CPU that has none (no AVX-512 or AMX for 16 bits): there it is many times *slower* than fp32.
#
# So this lab's training runs form half-precision products as a matrix unit does, in a region called `wide_products`: multiply exactly, add in fp32,
# round once. The result is torch's own, up to the order in which the fp32 sums are added:

# %%
x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
with precision.wide_products():
    wide = x @ x.T
differ = (wide != x @ x.T).double().mean().item()
f"{differ:.0%} of {wide.numel()} results differ"

# %%
show(precision.wide_products.__torch_function__)

# %% [markdown]
# ## What becomes of a small step?
#
# Lab 01's sum stood still when its terms became too small. A weight does, too:

# %%
weight = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1000):
    weight -= 0.001
weight.item()

# %% [markdown]
# Below 1 the gap between bf16 numbers is $2^{-8} \approx 0.0039$, and what is less than half a gap is rounded away, a thousand times. Half a gap is between
# $2^{-9}|w|$ and $2^{-8}|w|$, depending on the digits of the weight $w$. So a bf16 weight surely stands still under steps below 0.2 % of it, and possibly under steps of up to 0.4 %.
#
# **On the GPT.** Train it in fp32, three seeds. `Formats` says what is kept in which format: the weights' dtype, what is made of torch's AdamW, the loss, the loss scale. Without arguments all is fp32.


# %%
def untrained(config):
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return [GPT(config, generator=generator) for generator in generators]


trained = untrained(config)
in_fp32 = [
    rigs.precision.learn(gpt, Formats(), draw, steps=100, seed=seed)
    for seed, gpt in enumerate(trained)
]
{
    "before": [round(run[0], 1) for run in in_fp32],
    "after": [round(run[-1], 1) for run in in_fp32],
}

# %%
show(rigs.precision.train)

# %% [markdown]
# Then go on with a low learning rate, in five ways:
#
# - in fp32;
# - with weights in bf16, and AdamW on them as they are: its two moments are then in bf16 as well;
# - with an fp32 step, moments included, whose result is rounded to the nearest bf16: only the weights are in bf16;
# - the same with *stochastic* rounding: up or down at random, up with the probability of the place in the gap (lab 01);
# - with an fp32 **master copy** of the weights, which is stepped, kept, and rounded into the bf16 weights.

# %%
generator = torch.Generator().manual_seed(0)


def stochastic(optimizer):
    return RoundedWeights(optimizer, generator=generator)


bf16, fp16 = torch.bfloat16, torch.float16
ways = {
    "fp32": Formats(),
    "all in bf16": Formats(bf16),
    "rounded to nearest": Formats(bf16, RoundedWeights),
    "rounded stochastically": Formats(bf16, stochastic),
    "master weights": Formats(bf16, MasterWeights),
}
runs = rigs.precision.three_seeds(trained, ways, draw, steps=40, lr=1e-5)


# %%
def changes(runs):
    return [[loss - run[0] for loss in run] for run in runs]


def learning(runs, title, told="", ylabel="test loss (nats per letter)"):
    steps = range(0, 10 * len(next(iter(runs.values()))[0]), 10)
    told = dict(title=title, alt=f"{title}.{told} Three seeds each.")
    return plots.curves(steps, xlabel="steps", ylabel=ylabel, **told, **runs)


gained = {name: changes(three) for name, three in runs.items()}
title = "At a learning rate of 0.00001, rounded bf16 weights hardly learn"
told = " With master weights or stochastic rounding the loss falls as in fp32."
learning(gained, title, told, ylabel="change of the test loss (nats)")

# %%
falls = {name: sum(run[-1] for run in three) for name, three in gained.items()}
{name: f"{fall / falls['fp32']:.0%} of the gain" for name, fall in falls.items()}

# %% [markdown]
# Forty such steps gain less than a hundredth of a nat, of a loss of about 3 (a *nat* is the unit of a loss with the natural logarithm). Of that, bf16 weights get a tenth. Moments in fp32 do not help in these forty steps: the two curves are the same, so what is lost here is lost when
# the *weight* is rounded. A master copy or stochastic rounding brings nearly everything back. A step of a tenth of a gap, rounded stochastically, moves one weight in ten by a whole gap; on average that is the step.
#
# The master copy costs 4 bytes per parameter. It also makes the half-precision weights redundant: they can be made from it at any time. FSDP keeps only the fp32
# shards, and casts when it gathers (lab 09).

# %% [markdown]
# ### Further: how many weights stand still?
#
# Adam divides by the size of the gradient, so where gradients are about equal from step to step, its step is about the learning rate, however small they are. (With PyTorch's betas a gradient that comes once in a thousand steps, as for a rare word, makes a step of 2.5 learning rates, and the last of ten in a row after a long silence one of 6.5.) How many weights of our GPT would a step of one learning rate move?
# <!-- arithmetic: [round(0.1 / (0.001 / (1 - 0.999**1000))**0.5, 1), round((1 - 0.9**10) / (1 - 0.999**10)**0.5, 1)] == [2.5, 6.5] -->


# %%
def share_that_moves(model, lr, fmt):
    """The share of weights that a step of `lr` changes, once rounded to `fmt`."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = precision.round_to(weights, fmt)
    return (precision.round_to(start - lr, fmt) != start).double().mean().item()


for lr in (1e-2, 1e-3, 1e-4, 1e-5):
    low, high = (share_that_moves(model, lr, name) for name in ("bf16", "fp16"))
    print(f"lr = {lr:g}:  bf16 {low:4.0%} fp16 {high:4.0%}")

# %% [markdown]
# fp16 has three bits more: its weights get stuck at learning rates that are eight times lower. Schedules let the learning rate end low.

# %% [markdown]
# ### Further: moments in bf16, in a longer run
#
# Moments in bf16 lose something of their own. Adam's second moment comes down by a factor of $\beta_2$ a step at the most. With PyTorch's default of 0.999 that is less than half a gap, so in bf16 it never comes down. Gradients of 1 in a hundred steps, then of 0.01 in two thousand:


# %%
def second_moment(dtype, beta2):
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    adam = torch.optim.AdamW([weight], betas=(0.9, beta2))
    for slope in [1.0] * 100 + [0.01] * 2000:
        weight.grad = torch.full_like(weight, slope)
        adam.step()
    return adam.state[weight]["exp_avg_sq"].item()


for beta2 in (0.999, 0.95):
    low, high = (second_moment(dtype, beta2) for dtype in (bf16, torch.float32))
    print(f"beta2 = {beta2}: {low:.4f} in bf16, {high:.4f} in fp32")

# %% [markdown]
# A step is divided by the square root of it, so with 0.999 it is more than twice too short in bf16, and the longer the run the worse. Master weights alone do not repair that: the moments have to be in fp32 as well. With 0.95, which many large language models are trained with, a
# step down is several gaps, and bf16 follows.

# %% [markdown]
# ### Exercise 2.1 · Half-precision weights that learn (10 min, ●○○)
#
# `weights` and the `gradients` are bf16. Take a step of SGD for each gradient, and return the bf16 weights at the end, rounded there and nowhere before.


# %%
def half_sgd(weights: torch.Tensor, gradients: list[torch.Tensor], lr: float):
    """The bf16 weights after all steps."""
    raise NotImplementedError


# %%
check("precision/master-weights", half_sgd)

# %%
hint("precision/master-weights", 1)

# %%
show(precision.half_sgd)

# %% [markdown]
# ## Which gradients does fp16 flush to zero?
#
# In the picture at the top fp16 lost next to nothing. But look at how a large batch comes about: a micro-batch's loss enters with its share of the batch (lab 05).
# Ours has 512 tokens. If one device takes four million in such pieces, the share is $2^{-13}$, and every gradient is smaller by that. (The ranks of data parallelism divide by their number after the backward pass.)
#
# > A backward pass in fp16, of this loss times $2^{-13}$. How many percent of the gradients come out as zero?

# %%
predict("precision/flushed", percent=20)

# %% [markdown]
# First a prediction by the formula. A number below half the smallest subnormal, $2^{-25}$, is rounded to zero. Multiplying by $2^{-13}$ moves the histogram 13 bars to the left:

# %%
plots.exponent_histogram(gradients, formats, scale=2.0**-13)

# %% [markdown]
# Then the measurement: a real fp16 model. Its cross-entropy is computed in fp32, its backward pass is not.


# %%
def flushed(scale, net=model):
    """Where gradients are zero in fp16 and not in fp64, by parameter."""
    exact, small = copy.deepcopy(net).double(), copy.deepcopy(net).half()
    exact.loss(*first_batch).backward()
    (rigs.precision.fp32_loss(small, *first_batch) * scale).backward()
    pairs = zip(exact.named_parameters(), small.parameters(), strict=True)
    return {name: (low.grad == 0) & (p.grad != 0) for (name, p), low in pairs}


def share(masks):
    """The share that is true, rounded to 5 %."""
    true = torch.cat([mask.flatten() for mask in masks]).double().mean().item()
    return round(20 * true) / 20


for scale in (1.0, 2.0**-7, 2.0**-13, 2.0**-16):
    counted = precision.fate(gradients, "fp16", scale)["zero"]
    measured = share(flushed(scale).values())
    print(f"loss times {scale:<9.2g} counted {counted:4.0%}, measured {measured:4.0%}")

# %%
reveal("precision/flushed", percent=round(100 * share(flushed(2.0**-13).values())))

# %% [markdown]
# Far more than the bars say, already at $2^{-7}$.
#
# ### Further: where are they lost?
#
# The bars count what a weight's gradient *would be*. But it is a sum over tokens: of what arrives at the layer from above, times the layer's input. What arrives is
# smaller, and is flushed on its way. Count the zeros in that, for each kind of layer, and those in the gradients measured:

# %%
arriving = {}


def noted(name):
    return lambda layer, d_in, d_out: arriving.update({name: d_out[0].detach()})


linears = [(name, m) for name, m in in_fp64.named_modules() if isinstance(m, nn.Linear)]
handles = [layer.register_full_backward_hook(noted(name)) for name, layer in linears]
in_fp64.loss(*first_batch).backward()
for handle in handles:
    handle.remove()

# %%
masks = flushed(2.0**-7)
for kind in ("query", "key", "value", "output", "up", "down"):
    here = precision.exponents(arriving[n] for n in arriving if n.endswith(kind))
    zero = precision.fate(here, "fp16", 2.0**-7)["zero"]
    lost = share(mask for n, mask in masks.items() if n.endswith(f"{kind}.weight"))
    print(
        f"{kind:6}: {zero:4.0%} of what arrives, {lost:4.0%} of the weights' gradients"
    )

# %% [markdown]
# At $2^{-7}$ query and key weights learn next to nothing, and all other weights learn on.
#
# At $2^{-13}$ it is nearly everything. The backward pass begins with the gradients of the *logits*. At the start of training each of the 94 letters has a probability of about 1/94, and 512 tokens
# share the mean: $\frac{1}{94 \cdot 512}$ for every logit that is not the target's. In powers of two, against the border of $2^{-25}$, and counted:

# %%
border = math.log2(1 / (94 * 512)) - 13
of_logits = precision.fate(precision.exponents([arriving["head"]]), "fp16", 2.0**-13)
f"2^{border:.1f}: {of_logits['zero']:.0%} of the logits' gradients are zero"

# %% [markdown]
# That is the start of training, where attention prefers nothing yet and all letters are about equally likely. The GPT that has learned for 100 steps:

# %%
for scale in (2.0**-7, 2.0**-13, 2.0**-16):
    learned = share(flushed(scale, trained[0]).values())
    print(f"loss times {scale:<9.2g} {learned:4.0%} of the gradients are zero")

# %% [markdown]
# It loses less, and at the smallest share everything. What is lost changes with training, so a scale that was found once does not fit for good.
#
# A large vocabulary does a part of this without any share: with 50,257 tokens to choose from and 4,096 in a micro-batch a logit's gradient is $\frac{1}{50{,}257 \cdot 4096} = 2^{-27.6}$ and vanishes. Not that of the target, about $\frac{1}{4096} = 2^{-12}$: the layers below learn on, from the push up of the right words without the push down of all others.
# <!-- arithmetic: [round(math.log2(1 / (50_257 * 4096)), 1), math.log2(1 / 4096)] == [-27.6, -12] -->

# %% [markdown]
# ### The remedy: loss scaling
#
# *Loss scaling* moves the histogram back. The backward pass is linear, so the loss times $S$ gives gradients times $S$; they are divided by $S$ *in fp32*, where
# that is exact for a power of two.
#
# **On the GPT.** Train with the share that a micro-batch of 256 tokens has in a batch of 34 million: $2^{-17}$. A weight whose gradient $g$ is the same at every step moves by $\text{lr} \cdot g / (|g| + \text{eps})$ under Adam. With $g = 0.001$ before the share:

# %%
g = 0.001 * 2.0**-17
{f"eps = {eps}": f"{g / (g + eps):.0%} of lr" for eps in (1e-8, 1e-15)}

# %% [markdown]
# PyTorch's default of $10^{-8}$ would shorten every step here, in every format. All runs of this lab use $10^{-15}$.


# %%
def tiny(model, x, y):
    return rigs.precision.fp32_loss(model, x, y) * 2.0**-17


scaling = {"init_scale": 2.0**16, "growth_interval": 20}
attempts = {
    "fp32": Formats(loss=tiny),
    "fp16 without a scale": Formats(fp16, MasterWeights, tiny),
    "fp16 with loss scaling": Formats(fp16, MasterWeights, tiny, scaling),
    "fp16, whole loss, no repair": Formats(fp16, RoundedWeights),
}
curves = rigs.precision.three_seeds(untrained(config), attempts, draw, steps=40)

# %%
title = "With a small share of the loss, fp16 learns nothing unless the loss is scaled"
learning(curves, title)


# %%
def apart(runs, others):
    """How far the last losses are from those of other runs, seed for seed."""
    pairs = zip(runs, others, strict=True)
    return [f"{abs(run[-1] - other[-1]):.1f}" for run, other in pairs]


{name: apart(three, curves["fp32"]) for name, three in curves.items()}

# %% [markdown]
# The last run is the control: with the whole loss of its 256 tokens fp16 needs no scale here, and no master weights either. Here it is the share in a large batch that makes gradients too small.

# %% [markdown]
# ## Who chooses the scale?
#
# Too low loses small gradients. Too high makes large ones infinite, and one infinity in a weight is the end of the run. A *static* scale is found by trying:
# Micikevicius et al., who introduced it, used 8 to 32 768. A *dynamic* one grows until something overflows, drops that step, and comes down.
#
# Train in fp16 twice, with a scale that starts at $2^{10}$ and doubles after three good steps. Once the cross-entropy is computed in fp32, once in fp16 as the logits are.
#
# > With the cross-entropy in fp16: what is the largest scale at which a step is still taken?

# %%
predict("precision/largest-scale", times=4096)

# %% [markdown]
# Both, 60 steps:


# %%
def half_loss(model, x, y):
    return model.loss(x, y)


def log_of(loss, steps=60):
    """The scale of each step in fp16, and whether the step was taken."""
    learner = untrained(config)[0].half()
    generator = torch.Generator().manual_seed(7)
    scale = {"init_scale": 2.0**10, "growth_interval": 3}
    formats = Formats(fp16, MasterWeights, loss, scale)
    batches = (draw(generator, 8) for _ in range(steps))
    return list(rigs.precision.train(learner, batches, formats))


losses = {"loss in fp32": rigs.precision.fp32_loss, "loss in fp16": half_loss}
logs = {name: log_of(loss) for name, loss in losses.items()}


# %%
def staircase(log):
    corners = [(k + side, scale) for k, (scale, _) in enumerate(log) for side in (0, 1)]
    return tuple(zip(*corners, strict=True))


def skipped(log):
    found = [(k, scale) for k, (scale, taken) in enumerate(log, 1) if not taken]
    return tuple(zip(*found, strict=True))


title = "The scale climbs until something overflows; each dot is a skipped step"
axes = dict(xlabel="step", ylabel="loss scale", log="y", title=title)
lines = {name: staircase(log) for name, log in logs.items()}
marks = {name: skipped(log) for name, log in logs.items()}
plots.curves(measured=marks, **axes, **lines)

# %% [markdown]
# Every fall is a skipped step: the gradients of that batch are thrown away. With the loss in fp32 the falls come at different scales. With the loss in fp16 they come regularly.

# %%
largest = max(scale for scale, taken in logs["loss in fp16"] if taken)
reveal("precision/largest-scale", times=int(largest))

# %% [markdown]
# What overflows is the first gradient of all: the gradient of the scaled loss with respect to the loss *is* $S$. The next power of two, $2^{16} = 65\,536$, is infinite in fp16, which ends at 65 504.
#
# PyTorch's growth interval is 2000: a scale that overflows each time it has grown then skips one step in about two thousand. Here the interval is 3, so that you see it.

# %% [markdown]
# ### Exercise 2.2 · Move the scale (10 min, ●●○)
#
# `finite[k]` says whether the gradients of step k were finite. Return the scale of each step, and the one after the last: it doubles after `interval` good steps
# in a row, halves after a bad one, and either begins the count anew.


# %%
def scales(finite: list[bool], start: float, interval: int):
    """len(finite) + 1 scales, the first of them `start`."""
    raise NotImplementedError


# %%
check("precision/dynamic-scale", scales)

# %%
hint("precision/dynamic-scale", 1)

# %%
show(precision.scales)

# %% [markdown]
# ### Further: is it PyTorch's rule?
#
# With the loss in fp16 the whole log can be predicted without training: a step is taken where $S$ is finite in fp16.


# %%
def predicted_log(steps=60, scale=2.0**10, interval=3):
    good = 0
    for _ in range(steps):
        taken = math.isfinite(floats.FP16.round(scale))
        yield scale, taken
        good = good + 1 if taken else 0
        if good == interval or not taken:
            scale, good = scale * (2 if taken else 0.5), 0


pairs = zip(predicted_log(), logs["loss in fp16"], strict=True)
f"{sum(a == b for a, b in pairs)} of 60 steps as predicted"

# %% [markdown]
# The rule is PyTorch's, and so are the numbers, step for step. Ours and `torch.amp.GradScaler`, on the same gradients, some of them infinite:


# %%
def driven(scaler, read, slopes):
    """The scale that `read` finds after each step, and the weight at the end."""
    weight = nn.Parameter(torch.ones(1))
    optimizer, found = torch.optim.SGD([weight], lr=0.1), []
    for slope in slopes:
        optimizer.zero_grad()
        scaler.scale(weight.sum() * slope).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(read(scaler))
    return found, weight.item()


slopes = [1.0, 2.0, float("inf"), 0.5, 1.0, float("nan"), 1.0, 3.0, 1.0, 2.0]
settings = dict(init_scale=1024.0, growth_interval=2)
ours = driven(LossScaler(**settings), lambda scaler: scaler.value, slopes)
torchs = torch.amp.GradScaler
theirs = driven(torchs("cpu", **settings), torchs.get_scale, slopes)
{"ours": ours[0], "the same as torch's, weight included": ours == theirs}

# %% [markdown]
# ### Exercise 2.3 · Bug hunt: a step that clips (15 min, ●●○)
#
# The loss goes down with this code, for a while. Three things are wrong with it.


# %%
def step(loss, optimizer, scaler, max_norm):
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(parameters, max_norm)
    scaler.unscale_(optimizer)
    optimizer.step()


# %%
check("precision/bug-hunt", step)

# %%
hint("precision/bug-hunt", 1)

# %%
show(precision.clipped_step)

# %% [markdown]
# ## Further: when does a sum stop growing?
#
# Lab 01's counter: in a format with $M$ mantissa bits a running sum of ones ends at $2^{M+1}$, 256 in bf16 and 2048 in fp16.

# %% [markdown]
# A language model has such a counter in its last step. The softmax divides by a sum over the *vocabulary*, and before training all words are about equally likely: as
# many terms as words, all about equal. Our 94 letters are too few to stall it. So let pairs of letters be the tokens, those that occur:

# %%
both = codes[:-1:2] * len(letters) + codes[1::2]
words, pairs = torch.unique(both, return_inverse=True)
wide = ModelConfig(**sizes, vocab_size=len(words))
f"{len(words)} pairs; ln {len(words)} = {math.log(len(words)):.2f}"

# %% [markdown]
# A model that knows nothing gives each of them one chance in 2144, and its loss is $\ln 2144 = 7.67$. Leave logits and weights in fp32, and only
# round the terms of that sum, and every partial sum, to bf16:
#
# > What loss does the untrained model report?

# %%
predict("precision/half-sum", nats=7.7)


# %%
def summed_in(fmt):
    """A loss whose softmax divides by a running sum in `fmt`."""

    def loss(model, x, y):
        return precision.cross_entropy(model(x).flatten(0, 1), y.flatten(), fmt)

    return loss


def draw_pairs(generator, rows):
    return draw(generator, rows, tokens=pairs)


fresh, names = untrained(wide), ("bf16", "fp16", "fp32")
x, y = draw_pairs(torch.Generator().manual_seed(1), 16)
reported = {name: summed_in(name)(fresh[0], x, y).item() for name in names}
{name: round(loss, 2) for name, loss in reported.items()}

# %%
reveal("precision/half-sum", nats=round(reported["bf16"], 2))

# %%
show(precision.sums._CrossEntropy)

# %% [markdown]
# The sum stands still at 256. The terms are $e$ to the power of a logit less the largest logit of its row, so that none is above 1. The loss then also has the largest logit less the target's, on average over the batch:

# %%
with torch.no_grad():
    logits = fresh[0](x).flatten(0, 1)
target = logits.gather(1, y.flatten()[:, None])[:, 0]
stalled = math.log(256) + (logits.amax(1) - target).mean().item()
f"reported {reported['bf16']:.3f}, ln 256 and the largest logit {stalled:.3f}"

# %% [markdown]
# Each word *looks* more probable than it is: all probabilities together are not 1:

# %%
total = [math.exp(reported["fp32"] - reported[name]) for name in names]
f"about {total[0]:.1f} in bf16, {total[1]:.2f} in fp16"

# %% [markdown]
# A lower loss, and a worse model: the gradient of a logit is $p_i - y_i$. If the $p_i$ add up to more than 1, the words are pushed down by more than the right one is
# pushed up, in every step.
#
# **On the GPT**, at a learning rate of 0.002: fp32 throughout; bf16 weights with a master copy, and the softmax's sum in bf16; the same with that one sum in fp32.

# %%
choices = {
    "fp32": Formats(),
    "bf16, sum in bf16": Formats(bf16, MasterWeights, summed_in("bf16")),
    "bf16, sum in fp32": Formats(bf16, MasterWeights),
}
sums = rigs.precision.three_seeds(fresh, choices, draw_pairs, steps=40)

# %%
title = "With that one sum in bf16 the model learns less, in every seed"
told = " With it in fp32 it learns what fp32 learns."
learning(sums, title, told, ylabel="test loss (nats per pair)")

# %%
{name: apart(three, sums["fp32"]) for name, three in sums.items()}

# %% [markdown]
# The gap grows: after 160 steps it is 0.9 nats (tested). (At a rate of 0.01 none is seen after 40 steps; after 160 it is 0.8 to 1.1.) The training log does not show it, as it is written with the same sum. On a test batch, after 40 steps:

# %%
net = copy.deepcopy(fresh[0]).to(bf16)
rigs.precision.learn(net, choices["bf16, sum in bf16"], draw_pairs, steps=40, seed=0)
net.float()
in_the_log, true = (summed_in(name)(net, x, y).item() for name in names[::2])
off = true - in_the_log
f"the log says {off:.1f} nats too little; probabilities add up to {math.exp(off):.1f}"

# %% [markdown]
# PyTorch's `sum()` and cross-entropy read bf16 and add in fp32, so you meet a stalled sum in few places of its own (lab 01), and where you write the loop, or the kernel, yourself.
# In bf16, `.sum()` and the loss of 4096 equal words:

# %%
ones = torch.ones(1, 4096, dtype=torch.bfloat16)
loss = nn.functional.cross_entropy(ones, torch.tensor([0]))
{"sum": ones.sum().item(), "loss": loss.item(), "ln 4096": math.log(4096)}

# %% [markdown]
# ### Further: sums inside a matrix product
#
# In a matrix product the terms have both signs, and a sum in half precision goes wrong more slowly. It has $h$ terms forward, where $h$ is the hidden width; backward, where the gradient of a weight is a sum over
# all tokens, it has $sb$, sequence length times batch. Hardware multiplies in half precision and **adds in fp32**. What if it did not?


# %%
def weight_gradient(x, dy, fmt):
    """The gradient of 8 × 8 weights of a layer: a running sum over tokens, in `fmt`."""
    terms = torch.einsum("to,ti->oit", dy[:, :8], x[:, :8])
    return precision.running_sum(terms, fmt)


seen, probe = {}, copy.deepcopy(model)
layer = probe.blocks[0].feed_forward.up
layer.register_forward_hook(lambda _, given, out: seen.update(x=given[0].detach()))
layer.register_full_backward_hook(lambda _, din, dout: seen.update(dy=dout[0].detach()))
probe.loss(*draw(torch.Generator().manual_seed(2), 64)).backward()
x, dy = seen["x"].flatten(0, 1), seen["dy"].flatten(0, 1)
exact = weight_gradient(x, dy, "fp32")

# %%
terms = [8, 32, 128, 512, 2048]


def error(fmt):
    partial = weight_gradient(x, dy, fmt)
    off = (partial - exact).norm(dim=(0, 1)) / exact.norm(dim=(0, 1))
    return [off[n - 1].item() for n in terms]


title = "The more terms, the larger the error of a running sum in half precision"
plots.curves(
    terms,
    xlabel="tokens added up",
    ylabel="relative error of the gradient",
    log="xy",
    title=title,
    alt=title + ".",
    bf16=error("bf16"),
    fp16=error("fp16"),
)

# %% [markdown]
# That is the sum's own error, in a layer whose terms fp16 holds. Those of the query's weights are subnormal there at the start, and lose more to that than to the sum. Ours ends at 2048 tokens; a batch of four million goes on. The sum of gradients over micro-batches is another long one (lab 05).

# %% [markdown]
# ## Further: what does autocast decide?
#
# Instead of weights in half precision you can keep fp32 weights and choose the format *operation by operation*: matrix products in half precision, losses in fp32, everything else in the format of its
# operands. On a CPU that is `torch.autocast`, and this is ours, on the same batch:

# %%
x, y = draw(torch.Generator().manual_seed(3), 16)


def gradients_in(region):
    model.zero_grad()
    with region:
        loss = model.loss(x, y)
    loss.backward()
    return loss, [parameter.grad.clone() for parameter in model.parameters()]


loss, mine = gradients_in(precision.autocast(torch.bfloat16))
their_loss, torchs = gradients_in(torch.autocast("cpu", dtype=torch.bfloat16))
differing = sum((a != b).sum().item() for a, b in zip(mine, torchs, strict=True))
{"losses apart": (loss - their_loss).item(), "gradients that differ": differing}

# %% [markdown]
# Not a bit of difference, in the loss or in any gradient. For the operations of this GPT two lists are enough:

# %%
sorted(precision.FULL_OPS), len(precision.HALF_OPS)

# %% [markdown]
# PyTorch has a third list, of operations that convert their operands to the widest format among them: `cat`, `stack`, `index_copy` on a CPU. This GPT calls none of them, and
# our region does not know it.
#
# **On a GPU the lists are longer.** PyTorch registers its rules per device. Which of these operations have one?

# %%
has_rule = torch._C._dispatch_has_kernel_for_dispatch_key
for op in ("linear", "nll_loss", "softmax.int", "layer_norm", "exp", "sum", "gelu"):
    cpu, cuda = (has_rule(f"aten::{op}", f"Autocast{on}") for on in ("CPU", "CUDA"))
    print(f"{op:12} CPU: {cpu!s:6} CUDA: {cuda}")

# %% [markdown]
# On CUDA, softmax, norms, exponentials, logarithms and sums run in fp32, too (the section "CUDA Ops that can autocast to float32" of the documentation of `torch.amp`).
# What follows counts the bytes of a CPU's region.
#
# > The GPT has $\Psi$ parameters. Inside the region, what happens to the memory of its weights: half of it, the same, or one and a half times as much?

# %%
predict("precision/autocast-weights", times=0.5)

# %% [markdown]
# The weights stay in fp32, and for the backward pass autograd keeps a half-precision copy of every matrix beside them: 4 + 2 bytes. Predicted, and measured:

# %%
saved = {}
for name, enabled in {"fp32": False, "autocast": True}.items():
    with precision.autocast(torch.bfloat16, enabled=enabled):

        def run():
            return model.loss(x.clone(), y.clone())

        saved[name] = measure.saved_activations(run, model)
setting = TrainConfig(micro_batch=16, global_batch=16, precision="bf16", autocast=True)
predicted = memory.activations(config, setting)
{name: units.text(ledger.total) for name, ledger in saved.items()}

# %%
f"unexplained: {predicted.diff(saved['autocast']).unexplained} bytes"

# %%
copies = [line.amount for line in predicted if line.note == "half copy of the weight"]
times = 1 + sum(copies) / (4 * config.num_params)
reveal("precision/autocast-weights", times=round(times, 2))

# %% [markdown]
# The prediction has the copies in it. It is not quite one and a half times: weights of matrix products have a copy; biases, norms and positions have none.

# %% [markdown]
# Here activations and copies together take a third less than in fp32, not half: what is not a product, such as the residual stream, norms and the loss, stays in fp32, and the copies come on top, whatever the batch. For GPT-2 XL it is 13 % less with one sequence, 42 % with 32.
# <!-- claim: [round(100 - 100 * memory.activations(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=b, global_batch=b, precision="bf16", autocast=True)).total / memory.activations(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=b, global_batch=b, precision="fp32")).total) for b in (1, 32)] == [13, 42] -->

# %% [markdown]
# ## Do the three together match fp32?
#
# From scratch, with a learning rate of 0.001 and the whole loss of a batch, this GPT cannot tell: there fp16 without any repair learned what fp32 learns (the control above).
# So test them where they are needed: at the end of a schedule, with a learning rate of 0.00001, on a micro-batch's share of $2^{-17}$. Here are all three, then each of two taken away. (Sums are in fp32.)

# %%
together = {
    "fp16, all three": Formats(fp16, MasterWeights, tiny, scaling),
    "without master weights": Formats(fp16, RoundedWeights, tiny, scaling),
    "without a loss scale": Formats(fp16, MasterWeights, tiny),
    "bf16, no loss scale": Formats(bf16, MasterWeights, tiny),
}
late = rigs.precision.three_seeds(trained, together, draw, steps=40, lr=1e-5)
late = {"fp32": runs["fp32"], **late}
gained = {name: changes(three) for name, three in late.items()}
title = "With all three fp16 learns what fp32 learns, without masters or a scale less"
learning(gained, title, ylabel="change of the test loss (nats)")

# %%
falls = {name: sum(run[-1] for run in three) for name, three in gained.items()}
{name: f"{fall / falls['fp32']:z.0%} of the gain" for name, fall in falls.items()}

# %% [markdown]
# bf16 needs no loss scale, but needs the master copy more than fp16: without one its weights got a tenth of the gain above, those of fp16 get more than half.

# %% [markdown]
# ## Further: 12, 16, 18, 20 or 24 bytes per parameter?
#
# In fp32, AdamW's training holds 16 bytes per parameter when a step ends and before `zero_grad()` lets gradients go (lab 00). Mixed precision has its own parts, and every text its own number. Here each convention is *measured*, after a step of AdamW, and compared with its formula.


# %%
def states(dtype, make):
    learner = GPT(config, generator=torch.Generator().manual_seed(0)).to(dtype)
    optimizer = make(torch.optim.AdamW(learner.parameters()))
    with precision.wide_products():
        loss = learner.loss(x, y)
    loss.backward()
    optimizer.step()
    return measure.model_states(learner, getattr(optimizer, "optimizer", optimizer))


def masters_with(fp32_gradients):
    return lambda optimizer: MasterWeights(optimizer, fp32_gradients=fp32_gradients)


# %%
conventions = {
    "bf16, stochastic": states(bf16, stochastic),
    "fp32": states(torch.float32, lambda optimizer: optimizer),
    "bf16 + master": states(bf16, MasterWeights),
    "... fp32 gradients": states(bf16, masters_with("only")),
    "... bf16 and fp32": states(bf16, masters_with(True)),
}
each = {}
for name, held in conventions.items():
    lines = [line for line in held if line.name != "step" and line.amount]
    parts = [f"{line.amount / config.num_params:g} {line.name}" for line in lines]
    each[name] = sum(line.amount for line in lines) / config.num_params
    print(f"{name:18}", " + ".join(parts), f"= {each[name]:g}")

# %%
mixed = {"micro_batch": 16, "global_batch": 16, "precision": "bf16"}
settings = {
    "fp32": TrainConfig(micro_batch=16, global_batch=16, precision="fp32"),
    "bf16 + master": TrainConfig(**mixed),
    "... fp32 gradients": TrainConfig(**mixed, fp32_gradients="only"),
    "... bf16 and fp32": TrainConfig(**mixed, fp32_gradients=True),
}
for name, setting in settings.items():
    predicted = formulas.states(config, setting)
    print(f"{name:18} unexplained: {predicted.diff(conventions[name]).unexplained}")

# %% [markdown]
# So mixed precision saves *no* model states: 16 bytes before and 16 after. It saves activations (see the errata), and time on hardware that has units for it.
#
# **16 is what is held when a step ends.** Two of the 16 are a bf16 gradient.
#
# > While the optimizer steps, how many bytes of gradients are there for each parameter, at the most?

# %%
predict("precision/gradients-in-a-step", bytes=2)

# %%
learner = GPT(config, generator=torch.Generator().manual_seed(0)).to(bf16)
masters = MasterWeights(torch.optim.AdamW(learner.parameters()))


def one_step():
    learner.loss(x, y).backward()
    masters.step()


history = measure.history(one_step, learner, masters.optimizer)
held = [moment.ledger.only(component="gradients").total for moment in history.moments]
most, last = max(held) / config.num_params, held[-1] / config.num_params
reveal("precision/gradients-in-a-step", bytes=int(most))

# %%
f"{most:g} bytes of gradients per parameter at the most, {last:g} in the end"

# %% [markdown]
# The optimizer steps fp32 masters and wants fp32 gradients, so copies of the bf16 ones are there as well. That is how Megatron-LM's guide comes to 20 bytes for fp16 weights and gradients: it counts those copies. It has 18 for half-precision weights whose gradients are summed in
# fp32, and 16 for fp32.
#
# **Hugging Face's 18** are others: fp32 weights, gradients and moments, and the half-precision copies that autocast makes, 4 + 4 + 8 + 2. For our GPT and for GPT-2 XL, by the formula:

# %%
gpt2 = ModelConfig.named("gpt2-xl")
for name, shape in {"ours": config, "GPT-2 XL": gpt2}.items():
    region = memory.activations(shape, TrainConfig(**mixed, autocast=True))
    copies = sum(
        line.amount for line in region if line.note == "half copy of the weight"
    )
    print(f"{name}: {each['fp32'] + copies / shape.num_params:.2f} bytes per parameter")

# %% [markdown]
# **20 whose parts sum to 16.** A digest of *The Ultra-Scale Playbook* lists bf16 weights, bf16 gradients, fp32 master weights and fp32 optimizer states, and its table gives 20 GB for a billion parameters. The parts
# of its list are those of "bf16 + master". The 20 are those of "... bf16 and fp32": a second, fp32 copy of the gradients, which micro-batches are summed in, is in the table and not in the list. Its four rows, in GB:

# %%
for billions in (1, 7, 70, 405):
    listed, table = (each[n] * billions for n in ("bf16 + master", "... bf16 and fp32"))
    print(f"{billions:3} billion: {listed:5g} listed, {table:5g} in the table")

# %% [markdown]
# **24** are 16 of states and 8 for "activations and temporary memory". Activations do not depend on parameters but on tokens (lab 03). In bytes per parameter, measured in fp32:


# %%
def activation_bytes(rows):
    """Activations that a backward pass of so many sequences keeps, per parameter."""
    inputs, targets = draw(torch.Generator().manual_seed(0), rows)
    saved = measure.saved_activations(lambda: model.loss(inputs, targets), model)
    return saved.total / config.num_params


{f"b = {rows}": round(activation_bytes(rows), 1) for rows in (1, 2, 16)}

# %% [markdown]
# ## Further: turn the knobs
#
# Slide the loss scale. Which scale loses least in fp16? Is there one that suits all gradients in e4m3?


# %%
def histogram(log2_scale=0, share="1", fmt="fp16"):
    chosen = [floats.named(fmt)] + [other for other in formats if other.name != fmt]
    scale = 2.0 ** (log2_scale + shares[share])
    return plots.exponent_histogram(gradients, chosen, scale=scale)


shares, names = {"1": 0, "2⁻¹³ (4 M tokens)": -13}, ["fp16", "e5m2", "e4m3"]
explore(histogram, log2_scale=(-8, 24, 8), share=list(shares), fmt=names)

# %% [markdown]
# ## In practice
#
# | | half-precision weights or autocast | master weights | gradients reduced in | loss scale |
# |---|---|---|---|---|
# | PyTorch | `torch.autocast(device, dtype)` | the fp32 weights themselves | their own format | `torch.amp.GradScaler` |
# | FSDP2 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` | the fp32 shards | `reduce_dtype=torch.float32` | `torch.amp.GradScaler` for fp16 (the first FSDP: `ShardedGradScaler`) |
# | torchtitan 0.2.2 | FSDP2's, by `training.mixed_precision_param` (bfloat16) | the fp32 shards | `training.mixed_precision_reduce` (float32) | none: it trains in bf16 |
# | DeepSpeed | `"bf16": {"enabled": true}` or `"fp16"` | kept by its optimizer | its `"communication_data_type"` | `"loss_scale": 0` is dynamic, `"initial_scale_power": 16`, `"loss_scale_window"`, `"hysteresis"` |
# | Megatron-LM | `--bf16` or `--fp16` | kept by its optimizer | `--accumulate-allreduce-grads-in-fp32`, which `--bf16` implies unless `--grad-reduce-in-bf16` | `--initial-loss-scale`, `--min-loss-scale`, `--loss-scale-window`, `--hysteresis` |
#
# - **With accumulation** every micro-batch's loss is scaled; `unscale_`, clipping, `step` and `update` come once per batch, after the last one.
# - **FSDP2 casts modules, not operations**: weights are gathered in `param_dtype` and activations are in half precision all through; autocast would keep the
#   residual stream in fp32.
# - **Hysteresis** is how many overflows it takes before the scale comes down.
# - **Sums in fp16 inside matrix products** exist on GPUs, for speed, behind `torch.backends.cuda.matmul.allow_fp16_accumulation`: off unless you switch it on.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **"FP16/BF16 Training requires FP32 master weights, loss scaling, and accumulation in FP32"** (reading notes on *The Ultra-Scale Playbook*). bf16 needs no loss scaling: its smallest normal number is that of fp32. <!-- erratum: S3-043 -->

# %%
{fmt.name: f"{fmt.min_normal:.2g}" for fmt in (floats.BF16, floats.FP32, floats.FP16)}

# %% [markdown]
# **"20 GB" for a billion parameters** in mixed precision (an article on efficient training at scale). The parts that it lists sum to 16 GB, as worked out above. <!-- erratum: S1-012 -->
#
# ### True under a condition
#
# **"Usually, loss scaling is used to overcome this issue, but it doesn’t always work well."** (chapter 15, *LLM Training Acceleration (WIP)*, of an online book on large language models). True of *underflow*. The issue that stands before it is overflow, which a scale causes when it is too large; then the step is skipped. <!-- erratum: S0-076 -->
#
# **"Reduced memory footprint"** of mixed precision (the same chapter). True of activations. Model states stay at 16 bytes per parameter, and weights alone grow from 4 to 6: <!-- erratum: S0-048 -->

# %%
fp32_run = TrainConfig(micro_batch=1, global_batch=1, precision="fp32")
bf16_run = TrainConfig(micro_batch=1, global_batch=1, precision="bf16")
for count in (formulas.states, memory.activations):
    in_32, in_16 = (units.text(count(gpt2, run).total) for run in (fp32_run, bf16_run))
    print(f"{count.__name__}: {in_32} in fp32, {in_16} in bf16")

# %% [markdown]
# **"Use fp16 gradients to update model parameters that are saved as fp32."** (the same chapter, in its list of steps). Where the loss is scaled, a division by the scale stands between the two, in fp32: in fp16 the gradients would vanish again, and <!-- erratum: S0-053 -->
# `GradScaler` refuses fp16 gradients.
#
# **"24 bytes of memory are required for one fp32 parameter"**, of which **"around 20 bytes per parameter"** are everything but the weights (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024). A rule of thumb: 16 are states, and the other 8 hold only where activations happen to take them. <!-- erratum: S2-005, S2-006 -->

# %% [markdown]
# ## Summary
#
# > - A half-precision weight stands still under steps below half its gap. A bf16 weight of 1 is where it was after any number of steps of −0.001. Step an fp32 copy, or round stochastically.
# >   <!-- claim: floats.BF16.round(1 - 0.001) == 1 -->
# > - fp16 rounds to zero what is below 2⁻²⁵. A scale on the loss lifts all gradients; it is divided out in fp32, before clipping. bf16 needs none.
# >   <!-- claim: (floats.FP16.round(2.0**-25), floats.FP16.round(1.01 * 2.0**-25) > 0, floats.BF16.min_normal == floats.FP32.min_normal) == (0, True, True) -->
# > - Compute the loss in fp32. In fp16 its gradient is the scale itself, and no power of two above 2¹⁵ survives.
# >   <!-- claim: (floats.FP16.round(2.0**15), floats.FP16.round(2.0**16)) == (2**15, math.inf) -->
# > - A running sum of ones ends at 2^(M + 1): 256 in bf16, 2048 in fp16. A softmax summed like that takes 4096 equally likely words for 256. Add in fp32.
# >   <!-- claim: [round(math.exp(precision.cross_entropy(torch.zeros(1, 4096), torch.zeros(1).long(), name))) for name in ("bf16", "fp16", "fp32")] == [256, 2048, 4096] -->
# > - Mixed precision with Adam holds 2 + 2 + 12 = 16 bytes per parameter, as fp32 does; 18 with fp32 gradients in place of half-precision ones, 20 with both.
# >   <!-- claim: [predict.states(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=1, global_batch=1, precision="bf16", fp32_gradients=f)).total // 1557611200 for f in (False, "only", True)] == [16, 18, 20] -->
#
# Next: lab 03 counts the rest of the memory, byte by byte.

# %% [markdown]
# ## References
#
# - P. Micikevicius et al., *Mixed precision training*, arXiv:1710.03740: the three techniques, constant scales; section 3.3 for sums and the softmax.
# - S. Gupta et al., *Deep learning with limited numerical precision*, arXiv:1502.02551: stochastic rounding.
# - P. Zamirai et al., *Revisiting BFloat16 training*, arXiv:2010.06192: bf16 weights without a master copy.
# - S. Rajbhandari et al., *ZeRO*, arXiv:1910.02054, section 3.1: 2 + 2 + 12 bytes.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): fp32 gradient accumulation.
# - Megatron Core user guide, *Distributed optimizer*: 16, 18 and 20 bytes. Hugging Face Transformers documentation, *Model memory anatomy*: 18.
# - PyTorch documentation of `torch.amp`, `torch.autocast` and `torch.distributed.fsdp.MixedPrecisionPolicy`; configuration of DeepSpeed and arguments of Megatron-LM.
