# %% [markdown]
# # 02 · Train in half the bits
#
# **Half precision makes matrix products faster and activations smaller. What has to stay in fp32, so that the model still learns?**
#
# *75 min · before this: labs 00 and 01 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - keep half weights learning when steps are smaller than their digits (exercise 2.1),
# - read a log of loss scales, and say what the next one will be (exercise 2.2),
# - put scale, unscale, clip, step and update in their order, and know what every other order does (exercise 2.3, a bug hunt).
#
# You also switch the three techniques of mixed precision off, one at a time, and look at what breaks, and you count the bytes of
# every convention: 12, 16, 18, 20 and 24 a parameter.

# %% [markdown]
# ## Setup

# %%
import copy
import math
import pathlib

import torch
from torch import _torch_docs, nn

from labutils import floats, measure, memory, precision, units
from labutils.config import ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.precision import LossScaler, MasterWeights, RoundedWeights
from labutils.teach import plots
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore

# %% [markdown]
# A small GPT and a real text to learn: the documentation of PyTorch's functions, which came with PyTorch. Letters are its tokens.

# %%
text = pathlib.Path(_torch_docs.__file__).read_text(encoding="utf-8")
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
len(text), len(letters)

# %%
sizes = dict(num_layers=2, d_model=32, num_heads=4, d_ff=128, seq_len=32)
config = ModelConfig(**sizes, vocab_size=len(letters))


def batch(generator, rows=16, tokens=codes):
    at = torch.randint(len(tokens) - 33, (rows, 1), generator=generator)
    window = tokens[at + torch.arange(33)]
    return window[:, :-1], window[:, 1:]


# %% [markdown]
# ## The idea in one picture
#
# One backward pass of this GPT, and how large its gradients are: a bar for each power of two. Under it, what four formats can hold; where a
# range is hollow, numbers are *subnormal* and lose digits (lab 01).

# %%
model = GPT(config, generator=torch.Generator().manual_seed(0))
model.loss(*batch(torch.Generator().manual_seed(1))).backward()
gradients = precision.exponents(parameter.grad for parameter in model.parameters())
formats = [floats.FP16, floats.BF16, floats.E5M2, floats.E4M3]
plots.exponent_histogram(gradients, formats)

# %% [markdown]
# bf16 covers everything: it has the exponents of fp32. fp16 ends in the middle of the gradients, and the fp8 formats before most of them. So much
# for *range*. The other half of the story is *digits*: a weight of 1 has bf16 neighbors $2^{-7}$ above and $2^{-8}$ below it, and a training step
# moves it by a thousandth or less. Mixed precision is three repairs: **master weights** against lost digits, **loss scaling** against lost range, **fp32
# sums** against both. Each has a section, in which it is missing.

# %% [markdown]
# ## What becomes of a small step?
#
# > A bf16 weight of 1 takes 1000 steps of −0.001. Where is it then?

# %%
predict("precision/thousand-steps", weight=0.5)

# %%
weight = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1000):
    weight -= 0.001
weight.item()

# %%
reveal("precision/thousand-steps", weight=weight.item())

# %% [markdown]
# Below 1 the gap is $2^{-8} \approx 0.0039$, and what is less than half a gap is rounded away, a thousand times. In general a bf16 weight $w$ stands still
# while
#
# $$ |\Delta w| \;<\; \tfrac12\, 2^{-8}\, |w| \quad\text{or so, that is}\quad \frac{|\Delta w|}{|w|} < 0.2\,\%. $$
#
# Adam's step is about the learning rate, whatever the gradient. How many weights of our GPT could take one?


# %%
def share_that_moves(model, lr, fmt):
    """The share of weights that a step of `lr` changes, once rounded to `fmt`."""
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    start = precision.round_to(weights, fmt)
    return (precision.round_to(start - lr, fmt) != start).double().mean().item()


for lr in (1e-2, 1e-3, 1e-4, 1e-5):
    bf16, fp16 = (share_that_moves(model, lr, name) for name in ("bf16", "fp16"))
    print(f"lr = {lr:g}:  bf16 {bf16:4.0%} fp16 {fp16:4.0%}")

# %% [markdown]
# fp16 has three bits more, and needs a rate eight times lower to get stuck. Learning rates *end* low: that is what a schedule is for.
#
# **On the GPT.** Train it in fp32, three seeds. Then go on with a low rate in four ways: fp32; bf16 weights that the optimizer steps as they are; bf16 weights
# with an fp32 **master copy**, which is stepped and rounded into them; and bf16 weights rounded *stochastically*, up or down by chance.


# %%
def train(model, steps, make, seed, scaler=None, lr=2e-3, loss=GPT.loss, tokens=codes):
    """Test losses before, while and after training with what `make` makes of AdamW."""
    draw, test = torch.Generator().manual_seed(100 + seed), test_batch(tokens)
    optimizer = make(torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-15))
    scaler = scaler or LossScaler(1.0, dynamic=False)  # a scale of 1 changes nothing
    losses = [tested(model, test)]
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        scaler.scale(loss(model, *batch(draw, tokens=tokens)).float()).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0:
            losses.append(tested(model, test))
    return losses


# %%
def test_batch(tokens=codes):
    return batch(torch.Generator().manual_seed(99), 32, tokens)


@torch.no_grad()
def tested(model, test):
    return copy.deepcopy(model).float().loss(*test).item()


# %% [markdown]
# (The last settings are for later sections. `scaler` is one of them, too: until then it multiplies by 1.)

# %%
def adamw(optimizer):
    """torch's own, as it is."""
    return optimizer


def three_seeds(models, steps, dtype, make, settings=None, **options):
    """A run of each model in `dtype`; `settings` are those of a loss scaler."""
    runs = []
    for seed, model in enumerate(models):
        scaler = settings and LossScaler(**settings)
        learner = copy.deepcopy(model).to(dtype)
        runs.append(train(learner, steps, make, seed, scaler, **options))
    return runs


# %%
def untrained(config):
    generators = [torch.Generator().manual_seed(seed) for seed in range(3)]
    return [GPT(config, generator=generator) for generator in generators]


trained = untrained(config)
first = [train(gpt, 100, adamw, seed) for seed, gpt in enumerate(trained)]
[(round(run[0], 1), round(run[-1], 1)) for run in first]

# %%
half, plain = torch.bfloat16, torch.float32
chance = torch.Generator().manual_seed(0)


def by_chance(optimizer):
    return RoundedWeights(optimizer, generator=chance)


ways = {
    "fp32": (plain, adamw),
    "bf16 alone": (half, adamw),
    "with master weights": (half, MasterWeights),
    "rounded by chance": (half, by_chance),
}
runs = {name: three_seeds(trained, 100, *how, lr=1e-5) for name, how in ways.items()}

# %%
def change(run):
    return [loss - run[0] for loss in run]


gained = {name: [change(run) for run in three] for name, three in runs.items()}
title = "At a low learning rate, bf16 weights alone stand still"
told = ". With master weights, or rounded by chance, the loss falls as in fp32."
plots.curves(
    range(0, 101, 10),
    xlabel="steps at lr = 0.00001",
    ylabel="change of the test loss",
    title=title,
    alt=title + told + " Three seeds each.",
    **gained,
)

# %%
drop = {name: sum(change[-1] for change in changes) for name, changes in gained.items()}
{name: round(fall / drop["fp32"], 1) for name, fall in drop.items()}

# %% [markdown]
# Alone, bf16 weights gain a small part of what fp32 gains, from weights so near to zero that even this step is half a gap. With a master copy nothing
# is lost, and by chance hardly anything: a step of a tenth of a gap moves one weight in ten by a whole gap, and *on average* that is right.
#
# The master copy costs 4 bytes a parameter. It also makes the half weights redundant: they can be made from it at any time. That is why FSDP keeps only fp32
# shards and casts when it gathers (lab 09).

# %% [markdown]
# ### Exercise 2.1 · Half weights that learn (10 min, ●○○)
#
# `weights` and the `gradients` are bf16. Take a step of SGD for each gradient, and return the bf16 weights at the end.


# %%
def half_sgd(weights, gradients, lr):
    raise NotImplementedError


# %%
check("precision/master-weights", half_sgd)

# %%
hint("precision/master-weights", 1)

# %%
show(MasterWeights.step)

# %% [markdown]
# ## Which gradients does fp16 flush to zero?
#
# In the picture at the top fp16 lost next to nothing. But look at how a large batch comes about: a micro-batch's loss enters with its share of the batch (lab 05).
# Ours has 512 tokens; of a batch of four million it is a share of $2^{-13}$, and every gradient is smaller by that.
#
# > How many percent of the gradients become zero in fp16 then?

# %%
predict("precision/flushed", percent=20)

# %% [markdown]
# A number below half the smallest subnormal, $2^{-25}$, is rounded to zero. Multiplying by $2^{-13}$ moves the histogram 13 bars to the left:

# %%
plots.exponent_histogram(gradients, formats, scale=2.0**-13)

# %%
counted = precision.fate(gradients, "fp16", 2.0**-13)
reveal("precision/flushed", percent=round(100 * counted["zero"]))

# %% [markdown]
# Counting bars is the prediction. The measurement, rounded to 5 %, is a backward pass of a real fp16 model, with the loss times $2^{-13}$:


# %%
def zeros(scale):
    """The share of gradients that are zero in the fp16 model and not in fp32."""
    small = copy.deepcopy(model).half()
    small.zero_grad()
    (small.loss(*batch(torch.Generator().manual_seed(1))).float() * scale).backward()
    pairs = zip(small.parameters(), model.parameters(), strict=True)
    lost = sum(((p.grad == 0) & (q.grad != 0)).sum() for p, q in pairs)
    return lost.item() / sum(gradients.values())


for scale in (1.0, 2.0**-7, 2.0**-13, 2.0**-16):
    counted = precision.fate(gradients, "fp16", scale)["zero"]
    about = round(20 * zeros(scale)) / 20
    print(f"loss times {scale:<9.2g} counted {counted:4.0%}, measured {about:4.0%}")

# %% [markdown]
# Far more than you counted. The backward pass begins with the gradients of the *logits*, and a weight's gradient is a sum over all of them. At the start of training each
# of the 94 letters has a probability of about 1/94, and 512 tokens share the mean: $\frac{1}{94 \cdot 512} \approx 2^{-15.6}$ for every logit that is not the target's. Times
# $2^{-13}$ that is below $2^{-25}$. They are flushed first, and what they would have added up to never comes about. The same count, for them:

# %%
arriving = []
noted = lambda head, d_in, d_out: arriving.append(d_out[0])  # noqa: E731
handle = model.head.register_full_backward_hook(noted)
model.loss(*batch(torch.Generator().manual_seed(1))).backward()
handle.remove()
of_logits = precision.exponents(arriving)
for scale in (1.0, 2.0**-7, 2.0**-13, 2.0**-16):
    zero = precision.fate(of_logits, "fp16", scale)["zero"]
    print(f"loss times {scale:<9.2g} {zero:4.0%} of the logits' gradients are zero")

# %% [markdown]
# **Loss scaling** moves the histogram back. The backward pass is linear, so the loss times $S$ gives gradients times $S$; they are divided by $S$ *in fp32*, where
# that is exact for a power of two. Training with the share of $2^{-16}$, as in a batch of 34 million tokens. Adam divides by the size of the gradient, so in
# fp32 the share makes no difference:

# %%
def tiny(model, x, y):
    return model.loss(x, y).float() * 2.0**-16


fp16, scaling = torch.float16, {"init_scale": 2.0**16, "growth_interval": 20}
attempts = {
    "fp32": (plain, adamw),
    "fp16 without a scale": (fp16, MasterWeights),
    "fp16 with loss scaling": (fp16, MasterWeights, scaling),
}
started = untrained(config)
curves = {
    name: three_seeds(started, 60, *how, loss=tiny) for name, how in attempts.items()
}

# %%
title = "Without a loss scale fp16 learns nothing; with one it learns what fp32 learns"
plots.curves(
    range(0, 61, 10),
    xlabel="steps",
    ylabel="test loss (nats per letter)",
    title=title,
    alt=title + ". Three seeds each.",
    **curves,
)

# %%
def furthest(three, others):
    """The largest distance between runs of the same seed."""
    return (torch.tensor(three) - torch.tensor(others)).abs().max().item()


apart = furthest(curves["fp32"], curves["fp16 with loss scaling"])
{"with a scale, never further than 0.05 from fp32": apart < 0.05}

# %%
falls = [abs(round(run[0] - run[-1], 2)) for run in curves["fp16 without a scale"]]
{"without a scale the loss falls by": falls}

# %% [markdown]
# ## Who chooses the scale?
#
# Too low loses small gradients. Too high makes large ones infinite, and one infinity in a weight is the end of the run. A *static* scale is a number that
# somebody found by trying: the paper used 8 to 32 768. A *dynamic* one looks for itself: it grows until something overflows, drops that step, and comes down.


# %%
def scales_of(steps, interval, start=2.0**4):
    """The dynamic scale over a short run in fp16, and which steps were skipped."""
    learner = copy.deepcopy(started[0]).half()
    generator = torch.Generator().manual_seed(7)
    optimizer = MasterWeights(torch.optim.AdamW(learner.parameters(), lr=2e-3))
    scaler, values, skipped = LossScaler(start, growth_interval=interval), [], []
    for step in range(steps):
        optimizer.zero_grad()
        scaler.scale(learner.loss(*batch(generator)).float()).backward()
        values.append(scaler.value)
        if not scaler.step(optimizer):
            skipped.append(step)
        scaler.update()
    return values, skipped


values, skipped = scales_of(60, interval=3)
title = "The scale climbs until gradients overflow, and stays near that edge"
axes = dict(xlabel="step", ylabel="loss scale", log="y")
plots.curves(range(60), **axes, title=title, alt=title + ".", scale=values)

# %%
halved = [values[step + 1] == values[step] / 2 for step in skipped if step < 59]
all(halved), len(skipped) > 0

# %% [markdown]
# Every fall is a skipped step: the gradients of that batch are thrown away. With PyTorch's growth interval of 2000 that is one step in two thousand; here it is
# 3, so that you see it. The rule is PyTorch's, and so are the numbers, step for step. Ours and `torch.amp.GradScaler`, on the same gradients, some of them infinite:


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
ours == theirs, ours[0]

# %% [markdown]
# ### Exercise 2.2 · Move the scale (10 min, ●●○)
#
# `finite[k]` says whether the gradients of step k were finite. Return the scale of each step, and the one after the last: it doubles after `interval` good steps
# in a row, and halves after a bad one.


# %%
def scales(finite, start, interval):
    raise NotImplementedError


# %%
check("precision/dynamic-scale", scales)

# %%
hint("precision/dynamic-scale", 1)

# %%
show(LossScaler)

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
# ## When does a sum stop growing?
#
# > A bf16 counter adds 1, again and again. How far does it get?

# %%
predict("precision/counter", count=1000)

# %% [markdown]
# A format with $m$ mantissa bits has gaps of 2 from $2^{m+1}$ on; there $n + 1$ lies halfway, and the tie goes to the even neighbor, which is $n$. So a counter
# ends at $2^{m+1}$: 256 in bf16, 2048 in fp16. One after the other:

# %%
ones = torch.ones(4096)
names = ("bf16", "fp16", "fp32")
{name: precision.running_sum(ones, name)[-1].item() for name in names}

# %%
reveal("precision/counter", count=precision.running_sum(ones, "bf16")[-1].item())

# %% [markdown]
# A language model has such a counter in its last step. The softmax divides by a sum over the *vocabulary*, and before training all words are about equally likely: as
# many terms as words, all about equal. Our 94 letters are too few to stall it. So let pairs of letters be the tokens, those that occur:

# %%
both = codes[:-1:2] * len(letters) + codes[1::2]
words, pairs = torch.unique(both, return_inverse=True)
wide = ModelConfig(**sizes, vocab_size=len(words))
len(words), round(math.log(len(words)), 2)

# %% [markdown]
# A model that knows nothing gives each of them one chance in 2144, and its loss is $\ln 2144 = 7.67$. Leave logits and weights in fp32, and only
# round the terms of that sum, and the sum, to bf16:
#
# > What loss does the untrained model report?

# %%
predict("precision/half-sum", loss=7.7)

# %%
def summed_in(fmt):
    """A loss whose softmax divides by a sum in `fmt`."""

    def loss(model, x, y):
        return precision.cross_entropy(model(x).flatten(0, 1), y.flatten(), fmt)

    return loss


fresh = untrained(wide)
x, y = batch(torch.Generator().manual_seed(1), tokens=pairs)
reported = {name: summed_in(name)(fresh[0], x, y).item() for name in names}
{name: round(loss, 2) for name, loss in reported.items()}

# %%
reveal("precision/half-sum", loss=round(reported["bf16"], 2))

# %% [markdown]
# The sum stands still at 256, and $\ln 256 = 5.55$. The rest is the largest logit, from which all terms are measured, so that none is above 1. Each word
# *looks* more probable than it is: all probabilities together are not 1, but much more. In fp16 they are a little less, because from 1024 on the gap is 1, and
# a term between ½ and 1 is added as 1.

# %%
together = [math.exp(reported["fp32"] - reported[name]) for name in names]
f"about {together[0]:.1f} in bf16, {together[1]:.2f} in fp16"

# %% [markdown]
# A lower loss, and a worse model: the gradient of a logit is $p_i - y_i$. If the $p_i$ add up to more than 1, the words are pushed down by more than the right one is
# pushed up, in every step.
#
# **On the GPT.** fp32 throughout; bf16 weights with a master copy, and the softmax's sum in bf16; the same with that one sum in fp32.


# %%
sums = {
    "fp32": (plain, adamw, GPT.loss),
    "bf16, sum in bf16": (half, MasterWeights, summed_in("bf16")),
    "bf16, sum in fp32": (half, MasterWeights, summed_in("fp32")),
}
stalled = {
    name: three_seeds(fresh, 100, dtype, make, loss=loss, tokens=pairs)
    for name, (dtype, make, loss) in sums.items()
}

# %%
title = "A single sum in bf16, and the model falls behind, farther with every step"
plots.curves(
    range(0, 101, 10),
    xlabel="steps",
    ylabel="test loss (nats per pair)",
    title=title,
    alt=title + ". With that sum in fp32 it learns what fp32 learns. Three seeds each.",
    **stalled,
)

# %%
def off(name):
    """How far the last losses are from those of fp32, seed for seed."""
    pairs_of_runs = zip(stalled[name], stalled["fp32"], strict=True)
    return [round(abs(run[-1] - other[-1]), 1) for run, other in pairs_of_runs]


{name: off(name) for name in stalled}

# %% [markdown]
# After 100 steps about half a nat a pair is lost, by every seed, and all else is as it should be: master weights, activations, range. Nothing overflowed and nothing is NaN.
# The log does not show it either, because it is written with the same sum. On the test batch:

# %%
learner = copy.deepcopy(fresh[0]).to(half)
train(learner, 100, MasterWeights, 0, loss=summed_in("bf16"), tokens=pairs)
learner.float()
in_the_log, true = (summed_in(name)(learner, *test_batch(pairs)) for name in names[::2])
nats = (true - in_the_log).item()
f"the log says {nats:.1f} nats too little; probabilities add up to {math.exp(nats):.1f}"

# %% [markdown]
# By now a few words stand out, and a term that is less than half a gap of the sum so far is lost: single words of no account, and together the long tail. One after
# another is the worst order, and a tree (lab 01) loses far less. Kernels do something between the two, and add in fp32
# even where they read and write half.
# fp16 gets as far as 2048, but vocabularies have 32 000 to 256 000 words.
#
# **In a matrix product** the terms have both signs, and a sum in half goes wrong more slowly. It has $h$ terms forward; backward, where the gradient of a weight is a sum over
# all tokens, it has $sb$. Hardware multiplies in half and **adds in fp32**. What if it did not?


# %%
def weight_gradient(x, dy, fmt):
    """The gradient of a layer's first weights: a running sum over tokens, in `fmt`."""
    terms = (dy[:, :8, None] * x[:, None, :8]).permute(1, 2, 0)
    return precision.running_sum(terms, fmt)


kept = {}
layer = model.blocks[0].feed_forward.up
layer.register_forward_hook(lambda _, given, out: kept.update(x=given[0].detach()))
layer.register_full_backward_hook(lambda _, din, dout: kept.update(dy=dout[0].detach()))
model.loss(*batch(torch.Generator().manual_seed(2), 64)).backward()
x, dy = kept["x"].flatten(0, 1), kept["dy"].flatten(0, 1)
exact = weight_gradient(x, dy, "fp32")

# %%
terms = [8, 32, 128, 512, 2048]


def error(fmt):
    partial = weight_gradient(x, dy, fmt)
    off = (partial - exact).norm(dim=(0, 1)) / exact.norm(dim=(0, 1))
    return [off[n - 1].item() for n in terms]


title = "The more terms, the less a half-precision sum is worth"
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
# Ours ends at 2048 tokens; a batch of four million goes on. Two other long sums are kept in fp32: gradients over micro-batches (lab 05), and Adam's $v$, which moves by a
# thousandth of its difference in each step. Let the gradients become zero:

# %%
v = torch.ones(1, dtype=torch.bfloat16)
for _ in range(1000):
    v += 0.001 * (0.0 - v)  # β₂ = 0.999
v.item(), round(0.999**1000, 2)

# %% [markdown]
# In fp32 $v$ would have fallen to a third. In bf16 it never moves, and with it the step stays as short as it was.

# %% [markdown]
# ## What does autocast decide?
#
# Instead of half weights you can keep fp32 weights and choose the format *operation by operation*: matrix products in half, losses in fp32, everything else in the format of its
# operands. That is `torch.autocast`, and this is ours, on the same batch:

# %%
x, y = batch(torch.Generator().manual_seed(3))


def gradients_in(region):
    model.zero_grad()
    with region:
        loss = model.loss(x, y)
    loss.backward()
    return loss, [parameter.grad.clone() for parameter in model.parameters()]


loss, mine = gradients_in(precision.autocast(torch.bfloat16))
their_loss, torchs = gradients_in(torch.autocast("cpu", dtype=torch.bfloat16))
loss.item() == their_loss.item(), all(map(torch.equal, mine, torchs))

# %% [markdown]
# Equal to the bit, loss and every gradient. Two lists are all the knowledge in it:

# %%
sorted(precision.FULL_OPS), len(precision.HALF_OPS)

# %% [markdown]
# `cross_entropy` is on the first list, and you have seen why.
#
# > The GPT has $\Psi$ parameters. Inside the region, what happens to the memory of its weights: half, the same, or one and a half times as much?

# %%
predict("precision/autocast-weights", times=0.5)

# %% [markdown]
# The weights stay in fp32, and for the backward pass autograd keeps a half copy of every matrix beside them: 4 + 2 bytes. Predicted, and measured:

# %%
saved = {}
for name, enabled in {"fp32": False, "autocast": True}.items():
    with precision.autocast(torch.bfloat16, enabled=enabled):
        run = lambda: model.loss(x.clone(), y.clone())  # noqa: E731
        saved[name] = measure.saved_activations(run, model)
setting = TrainConfig(micro_batch=16, global_batch=16, precision="bf16", autocast=True)
predicted = memory.activations(config, setting)
{name: units.text(ledger.total) for name, ledger in saved.items()}

# %%
predicted.diff(saved["autocast"]).unexplained

# %%
copies = [line.amount for line in predicted if line.note == "half copy of the weight"]
times = 1 + sum(copies) / (4 * config.num_params)
reveal("precision/autocast-weights", times=round(times, 1))

# %% [markdown]
# The difference between prediction and measurement is 0 bytes, half copies included. And it saves much less than half, because the residual stream, norms
# and losses stay in fp32.

# %% [markdown]
# ## Do the three together match fp32?
#
# Half weights with a master copy, a dynamic loss scale, and products that PyTorch adds up in fp32: 100 steps, three seeds, against fp32.

# %%
scaling = {"init_scale": 2.0**16, "growth_interval": 50}
recipes = {
    "fp32": (plain, adamw),
    "bf16, master weights": (half, MasterWeights),
    "fp16, all three": (fp16, MasterWeights, scaling),
}
whole = {name: three_seeds(started, 100, *how) for name, how in recipes.items()}
title = "With all three, half precision learns what fp32 learns"
plots.curves(
    range(0, 101, 10),
    xlabel="steps",
    ylabel="test loss (nats per letter)",
    title=title,
    alt=title + ". Three seeds each.",
    **whole,
)

# %%
ends = {name: torch.tensor([run[-1] for run in three]) for name, three in whole.items()}
spread = ends["fp32"].max() - ends["fp32"].min()
{name: bool((end - ends["fp32"]).abs().max() < spread) for name, end in ends.items()}

# %% [markdown]
# The formats differ by less than the seeds do. bf16 needs no loss scale: its exponents are those of fp32. That, and not its accuracy, is why it replaced fp16.

# %% [markdown]
# ## 12, 16, 18, 20 or 24 bytes a parameter?
#
# Every text has its number. They are all right, for what they include; here each is *measured*, after a step of AdamW, and compared with its formula.


# %%
def states(dtype, make):
    learner = GPT(config, generator=torch.Generator().manual_seed(0)).to(dtype)
    optimizer = make(torch.optim.AdamW(learner.parameters()))
    learner.loss(x, y).backward()
    optimizer.step()
    return measure.model_states(learner, getattr(optimizer, "optimizer", optimizer))


def masters_with(fp32_gradients):
    return lambda optimizer: MasterWeights(optimizer, fp32_gradients=fp32_gradients)


conventions = {
    "bf16, by chance": states(half, by_chance),
    "fp32": states(plain, adamw),
    "bf16 + master": states(half, MasterWeights),
    "... fp32 gradients": states(half, masters_with("only")),
    "... half and fp32": states(half, masters_with(True)),
}
for name, held in conventions.items():
    lines = [line for line in held if line.name != "step" and line.amount]
    parts = [f"{line.amount / config.num_params:g} {line.name}" for line in lines]
    each = sum(line.amount for line in lines) / config.num_params
    print(f"{name:20}", " + ".join(parts), f"= {each:g}")

# %%
half_run = {"micro_batch": 16, "global_batch": 16, "precision": "bf16"}
formulas = {
    "fp32": TrainConfig(micro_batch=16, global_batch=16, precision="fp32"),
    "bf16 + master": TrainConfig(**half_run),
    "... fp32 gradients": TrainConfig(**half_run, fp32_gradients="only"),
    "... half and fp32": TrainConfig(**half_run, fp32_gradients=True),
}
for name, setting in formulas.items():
    predicted = memory.model_states(config, setting)
    print(f"{name:20} unexplained: {predicted.diff(conventions[name]).unexplained}")

# %% [markdown]
# Zero bytes are unexplained. So mixed precision saves *no* model states: 16 bytes before and 16 after. It saves activations, and it saves time.
#
# **16 is what is held between steps.** An optimizer wants fp32 gradients, so while it steps, fp32 copies of the half ones are there as well:

# %%
learner = GPT(config, generator=torch.Generator().manual_seed(0)).to(half)
masters = MasterWeights(torch.optim.AdamW(learner.parameters()))


def one_step():
    learner.loss(x, y).backward()
    masters.step()


history = measure.history(one_step, learner, masters.optimizer)
held = [moment.ledger.only(component="gradients").total for moment in history.moments]
most, last = max(held) / config.num_params, held[-1] / config.num_params
f"{most:g} bytes of gradients a parameter at the most, {last:g} in the end"

# %% [markdown]
# That is how Megatron-LM's guide comes to 20 bytes for fp16 weights and gradients: it counts those copies. It has 18 for half weights whose gradients are summed in
# fp32, and 16 for fp32. The 18 of Hugging Face's guide are others: fp32 weights, gradients and moments, and the half copies that autocast makes, 4 + 4 + 8 + 2.
#
# The "24 bytes" of a much-read book are 16 of these and 8 for "activations and temporary memory", which do not depend on parameters at all (lab 03).

# %% [markdown]
# ## Turn the knobs
#
# Slide the loss scale. Which scale loses least in fp16? Is there any for e4m3, and what would you need for it? (Lab 15: a scale for each tensor, or each tile.)


# %%
def histogram(log2_scale=0, share="1", fmt="fp16"):
    chosen = [floats.named(fmt)] + [other for other in formats if other.name != fmt]
    scale = 2.0 ** (log2_scale + shares[share])
    return plots.exponent_histogram(gradients, chosen, scale=scale)


shares, names = {"1": 0, "2⁻¹³ (4 M tokens)": -13}, ["fp16", "e5m2", "e4m3"]
explore(histogram, log2_scale=(-8, 24, 4), share=list(shares), fmt=names)

# %% [markdown]
# ## In practice
#
# | | half weights or autocast | master weights | gradients reduced in | loss scale |
# |---|---|---|---|---|
# | PyTorch | `torch.autocast(device, dtype)` | the fp32 weights themselves | their own format | `torch.amp.GradScaler` |
# | FSDP2 | `MixedPrecisionPolicy(param_dtype=torch.bfloat16)` | the fp32 shards | `reduce_dtype=torch.float32` | `torch.amp.GradScaler` for fp16 (the first FSDP: `ShardedGradScaler`) |
# | torchtitan | FSDP2's, by `training.mixed_precision_param` (bfloat16) | the fp32 shards | `training.mixed_precision_reduce` (float32) | none: it trains in bf16 |
# | DeepSpeed | `"bf16": {"enabled": true}` or `"fp16"` | kept by its optimizer | its `"communication_data_type"` | `"loss_scale": 0` is dynamic, `"initial_scale_power": 16`, `"loss_scale_window"`, `"hysteresis"` |
# | Megatron-LM | `--bf16` or `--fp16` | kept by its optimizer | `--accumulate-allreduce-grads-in-fp32`, which `--bf16` implies unless `--grad-reduce-in-bf16` | `--initial-loss-scale`, `--min-loss-scale`, `--loss-scale-window`, `--hysteresis` |
#
# - **FSDP2 casts modules, not operations**: weights are gathered in `param_dtype`, so that half as many bytes travel and activations are half all through; autocast would keep the
#   residual stream in fp32. There is no second copy of the weights either: the fp32 shard *is* the master.
# - **Hysteresis** is a number of overflows that are forgiven before the scale comes down.
# - **Softmax and norms** are the operations that people put back into fp32 by hand: `--attention-softmax-in-fp32` in Megatron-LM. Its loss is computed in fp32 unless you
#   say `--fp16-lm-cross-entropy`, a switch that you now know the price of.
# - **Sums in fp16 inside matrix products** exist on GPUs, for speed, behind `torch.backends.cuda.matmul.allow_fp16_accumulation`: off unless you switch it on.
# - **With bf16 there is no scaler**, and a run that has one at all says which format it was written for.

# %% [markdown]
# ## Errata
#
# **"FP16/BF16 training requires FP32 master weights, loss scaling, and accumulation in FP32."** (notes on a scaling guide) Not bf16, as for loss scaling: its smallest normal number is that of fp32.

# %%
floats.BF16.min_normal == floats.FP32.min_normal, floats.FP16.min_subnormal

# %% [markdown]
# **"Loss scaling is used to overcome overflow."** (a book chapter) It is there against *underflow*. Overflow is what it causes when it goes too far, and then the step is skipped.
#
# **"Reduced memory footprint."** (the same) Model states stay at 16 bytes a parameter; weights alone grow from 4 to 6. The saving is in activations:

# %%
fp32_run = TrainConfig(micro_batch=1, global_batch=1, precision="fp32")
bf16_run = TrainConfig(micro_batch=1, global_batch=1, precision="bf16")
gpt2 = ModelConfig.named("gpt2-xl")
for count in (memory.model_states, memory.activations):
    fp32, bf16 = (units.text(count(gpt2, run).total) for run in (fp32_run, bf16_run))
    print(f"{count.__name__}: {fp32} in fp32, {bf16} in bf16")

# %% [markdown]
# **"Update fp32 parameters with fp16 gradients."** (the same, in a list of steps) Between the two stands a division by the scale, in fp32; in fp16 the gradients would vanish again, which is why
# `GradScaler` refuses fp16 gradients.
#
# **16, 18, 20, 24 bytes** stand in five texts for "mixed precision with Adam". See the table above: half gradients, fp32 gradients, both, and a guess for activations.

# %% [markdown]
# ## Summary
#
# > - A half weight stands still under steps below half its gap. A bf16 weight of 1 is where it was after any number of steps of −0.001. Step an fp32 copy, or round by chance.
# >   <!-- claim: floats.BF16.round(1 - 0.001) == 1 -->
# > - fp16 rounds to zero what is below 2⁻²⁵. A scale on the loss lifts all gradients; it is divided out in fp32, before clipping. bf16 needs none.
# >   <!-- claim: (floats.FP16.round(2.0**-25), floats.FP16.round(1.01 * 2.0**-25) > 0, floats.BF16.min_normal == floats.FP32.min_normal) == (0, True, True) -->
# > - A sum of ones ends at 2^(m + 1): 256 in bf16, 2048 in fp16. A softmax summed like that takes 4096 equally likely words for 256. Add in fp32.
# >   <!-- claim: [round(math.exp(precision.cross_entropy(torch.zeros(1, 4096), torch.zeros(1).long(), name))) for name in ("bf16", "fp16", "fp32")] == [256, 2048, 4096] -->
# > - Mixed precision with Adam holds 2 + 2 + 12 = 16 bytes a parameter, as fp32 does; 18 with fp32 gradients in place of half ones, 20 with both.
# >   <!-- claim: [memory.model_states(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=1, global_batch=1, precision="bf16", fp32_gradients=f)).total // 1557611200 for f in (False, "only", True)] == [16, 18, 20] -->
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
