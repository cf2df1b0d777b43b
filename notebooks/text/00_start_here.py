# %% [markdown]
# # 00 · Follow every byte of one training step
#
# **A model trains its first step and runs out of memory in its second. Same model, same batch, same GPU. What changed?**
#
# *85 min, and 15 further · before this: Python, and a training loop in PyTorch that you have seen once · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# - Turn a batch in samples into a batch in tokens (exercise 0.1).
# - Say what is alive at every moment of a training step, also of one that accumulates gradients (exercise 0.2).
# - Count what a model holds from its live tensors, not from a formula (exercise 0.3).
#
# Two sections go further: how much a larger batch helps the gradient, and where a step spends its time.

# %% [markdown]
# ## Setup

# %%
import os
import pathlib
import platform
import tempfile

import torch
from IPython.display import Markdown
from torch.utils.flop_counter import FlopCounterMode

from labutils import accumulation, measure, memory, notation, units
from labutils.config import Hardware, ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.timeline import History

# %% [markdown]
# ## The idea in one picture
#
# Here is a small GPT, an optimizer, and one training step: forward, backward, `optimizer.step()`. (`foreach=True` updates all weights at once, as PyTorch does on a GPU.)

# %%
dims = dict(num_layers=4, d_model=64, num_heads=4, d_ff=256, vocab_size=128, seq_len=64)
config = ModelConfig(**dims)
model = GPT(config, generator=torch.Generator().manual_seed(0))
generator = torch.Generator().manual_seed(1)
tokens, targets = torch.randint(128, (2, 8, 64), generator=generator)


# %%
def step():
    model.loss(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad()


# %% [markdown]
# `measure.history` runs it and writes down, after every operation, how many bytes are alive and what they are for.

# %%
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
first = measure.history(step, model, optimizer)
title = "One training step: activations come and go, the optimizer comes to stay"
plots.memory_timeline(first, title=title)

# %% [markdown]
# Read it from left to right.
#
# - **Forward.** Each layer keeps what its backward pass will need, its *activations*. They pile up.
# - **Backward.** Layer by layer, from the last to the first, activations are used and freed, and *gradients* take their place.
# - **Optimizer.** Adam keeps two numbers for every parameter. It makes them in its first `step()`, and they stay.
# - **The end.** `zero_grad()` sets every gradient to `None`, and its memory is free.
#
# The lilac fringe on top, *buffers*, is what single operations need for a moment. The rest of this lab turns the picture into numbers, and one of
# them answers the question at the top.

# %% [markdown]
# ## How does a lab work?
#
# Every quantity in this course is met three times: you **predict** it from a formula, you **compute** it with code that does it, you **measure** it
# on a run. The three must agree. Prediction and measurement have the same type, a `Ledger`, so the comparison is one line,
# `predicted.diff(measured)`, and the last line of its table, *unexplained*, has to be zero.
#
# Before each answer comes a guess. Change the number below to yours and run the cell.
#
# > An fp32 weight takes 4 bytes. How many bytes does each parameter take **while Adam trains it**, activations aside?

# %%
predict("start/bytes-per-parameter", bytes=4)

# %% [markdown]
# - `check("topic/exercise", your_function)` tests your answer and says which property failed, on which input, and what that usually means.
# - `hint("topic/exercise", 1)` says a little, level 2 a little more. `show(...)` unfolds the course's own solution.
# - Panels with sliders work in this notebook and, with fewer stops, on the web page too.
#
# Exercises that you leave untouched report "not attempted" and never break *Run all*.

# %% [markdown]
# ## What is on this machine, and how large is a gigabyte?

# %% tags=["nbval-ignore-output"]
print(platform.system(), "on", platform.machine(), end=" · ")
print("Python", platform.python_version(), "· torch", torch.__version__)
print("cores:", os.cpu_count(), "· threads of torch:", torch.get_num_threads())
if hasattr(os, "sysconf"):
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    binary = units.text(host, binary=True)
    print(units.text(host), "of memory, which some tools write as", binary)
for i in range(torch.cuda.device_count()):
    device = torch.cuda.get_device_properties(i)
    print(device.name, units.text(device.total_memory))

# %% [markdown]
# Two units share one name. A **GB** is 10⁹ bytes, a **GiB** is 2³⁰, 7 % more. This course writes GB, and GiB only where a tool reports it.
#
# > `nvidia-smi` reports 81 559 MiB on an H100 that is sold as "80 GB". How many GB are that?

# %%
predict("start/h100", GB=80)

# %%
reported = units.parse("81559 MiB")
units.text(reported), units.text(reported, binary=True)

# %%
reveal("start/h100", GB=reported / units.GB)

# %% [markdown]
# "80" is what the card has in GiB, rounded up: 79.6. The course plans with the advertised number, in GB.

# %% [markdown]
# ## What do the letters mean?
#
# Papers disagree about letters. Here is the table for shapes. Ψ (psi) is the number of parameters.

# %%
Markdown(notation.markdown("shapes"))

# %% [markdown]
# A configuration unpacks into these letters, so that a line of code looks like the line of a paper. GPT-2 XL:

# %%
xl = ModelConfig.named("gpt2-xl")
s, h, L, v, Ψ = xl.letters("s h L v Ψ")
s, h, L, v, Ψ

# %% [markdown]
# **Where the parameters are.** A layer has two parts. In *attention*, where each token reads from those before it, four h×h matrices make queries, keys, values and the output.
# The *feed-forward* part works on each token alone: one matrix widens it from h to 4h numbers, one brings it back. Together 4h² + 8h² = 12h².

# %%
f"{12 * L * h**2:,} of {Ψ:,} parameters: {12 * L * h**2 / Ψ:.1%}"

# %% [markdown]
# The embedding is most of what is left. The course's `GPT` counts exactly, for any configuration, because it is built from it. On the *meta* device
# tensors have a shape and no memory, so this laptop can build Llama 3.1 405B:

# %%
with torch.device("meta"):
    giant = GPT(ModelConfig.named("llama-3.1-405b"))
f"{sum(p.numel() for p in giant.parameters()):,}"

# %% [markdown]
# ## How many tokens does one step learn from?
#
# A *rank* is one process, as a rule with a GPU of its own. A *micro-batch* is what it takes through the model at once: b sequences of s tokens.
# A rank may run several before the optimizer steps (*gradient accumulation*, lab 05), and many ranks work side by side (*data parallelism*, lab 08).
# The product of these is a batch in samples; times s it is a batch in tokens.
#
# A recipe for choosing: tokens per step first, then the sequence length, then the largest micro-batch that fits, then the ranks you have;
# accumulation is what is left. With 1024 sequences in a step, two at a time:

# %%
train = TrainConfig(micro_batch=2, global_batch=1024)
{f"{dp} ranks": train.accumulation(dp) for dp in (128, 512)}

# %% [markdown]
# ### Exercise 0.1 · Tokens in one step (4 min, ●○○)
#
# Proves that you can turn a batch in samples into a batch in tokens. Replace the last line, run both cells, and read the report.


# %%
def tokens_per_step(micro_batch: int, accumulation: int, dp: int, seq_len: int) -> int:
    """Tokens that one optimizer step learns from."""
    raise NotImplementedError


# %%
check("start/tokens-per-step", tokens_per_step)

# %%
show(accumulation.tokens_per_step)

# %% [markdown]
# ## What does a parameter cost while it trains?
#
# In fp32 everything takes 4 bytes: the weight, its gradient, and Adam's two moments, the running mean of the gradient and of its square. In bytes:
#
# $$ \underbrace{4\Psi}_{\text{weights}} + \underbrace{4\Psi}_{\text{gradients}} + \underbrace{4\Psi + 4\Psi}_{\text{Adam}} = 16\,\Psi $$
#
# The prediction as a ledger, with one line that textbooks leave out: PyTorch keeps a step counter of 4 bytes with every tensor.

# %%
parameters, tensors = config.num_params, len(list(model.parameters()))
f"{parameters:,} parameters in {tensors} tensors"

# %%
parts = [
    Line("weights", 4 * parameters, component="weights"),
    Line("gradients", 4 * parameters, component="gradients"),
    Line("step", 4 * tensors, component="optimizer"),
    Line("exp_avg", 4 * parameters, component="optimizer"),
    Line("exp_avg_sq", 4 * parameters, component="optimizer"),
]
predicted = Ledger(parts)

# %% [markdown]
# And the measurement. `measure.model_states` adds up the storages that are alive; it knows nothing of the formula.

# %%
model.loss(tokens, targets).backward()
predicted.diff(measure.model_states(model, optimizer))

# %%
whole = predicted.total - 4 * tensors  # without the step counters
reveal("start/bytes-per-parameter", bytes=whole // parameters)

# %% [markdown]
# Zero bytes are unexplained. (Lab 02 meets other conventions, 12 to 24 bytes.) What GPT-2 XL would hold in this way,
# before its first activation:

# %%
optimizer.zero_grad()
units.text(16 * xl.num_params)

# %% [markdown]
# ## Why can the second step fail where the first succeeded?
#
# This first step peaks at the beginning of its backward pass: all activations are there, the logits' gradients join them, nothing has been freed.
# The optimizer's state comes later, so it plays no part in this peak.

# %%
f"{units.text(first.peak.ledger.total)} in the {first.peak.phase} pass"

# %% [markdown]
# > Run the same step once more. At how many MB does it peak?

# %%
predict("start/second-peak", MB=12.4)

# %%
second = measure.history(step, model, optimizer)
both = History([*first.moments, *second.moments])
title = "The second hill is as high as the first, and stands on a higher floor"
plots.memory_timeline(both, title=title)

# %%
reveal("start/second-peak", MB=second.peak.ledger.total / units.MB)

# %% [markdown]
# **The two peaks, derived.** Gradients take as much as the weights. Call *state* what the optimizer keeps, *working* what forward and backward hold
# at their fullest besides weights and state, and *temporary* what `optimizer.step()` needs for a moment (with `foreach=True`, PyTorch's default on GPUs, about a copy of the parameters). A step is fullest at one of two moments,
# while it computes or while it updates:
#
# $$ \begin{aligned}
# \text{updating} &= 2\,\text{weights} + \text{state} \\
# &\quad + \text{temporary} \\
# \text{step 1} &= \max(\text{weights} + \text{working}, \\
# &\qquad\;\; \text{updating}) \\
# \text{step 2} &= \max(\text{weights} + \text{state} \\
# &\qquad\;\; + \text{working},\; \text{updating})
# \end{aligned} $$
#
# Under the first hill there is no state yet. Under the second there is.

# %%
held = measure.model_states(model, optimizer).by("component")
weights, state = held["weights"], held["optimizer"]
working = first.phases["backward"].ledger.total - weights
temporary = first.phases["optimizer"].ledger.total - (2 * weights + state)
found = dict(weights=weights, state=state, working=working, temporary=temporary)
{name: units.text(amount) for name, amount in found.items()}

# %%
updating = 2 * weights + state + temporary
step_1 = max(weights + working, updating)
step_2 = max(weights + state + working, updating)
peaks = first.peak.ledger.total, second.peak.ledger.total
measured = Ledger([Line("step 1", peaks[0]), Line("step 2", peaks[1])])
Ledger([Line("step 1", step_1), Line("step 2", step_2)]).diff(measured)

# %% [markdown]
# **What does `zero_grad()` have to do with it?** In `step` it comes last and sets gradients to `None`. Two other ways that one sees, and the peak that each gives:


# %%
def after_the_forward_pass():
    loss = model.loss(tokens, targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def filled_with_zeros():
    model.loss(tokens, targets).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


for kind in (step, after_the_forward_pass, filled_with_zeros):
    kind()  # gradients and state are now what this kind of step leaves behind
    peak = measure.peak(kind, model, optimizer).total
    more = units.text(peak - second.peak.ledger.total)
    print(f"{kind.__name__:22} {units.text(peak)}, {more} more")
optimizer.zero_grad()

# %% [markdown]
# Gradients that are filled with zeros stay, and the whole second hill stands on them: one more time the bytes of the weights. Cleared *after* the forward pass, the old gradients lie under its activations, but are gone before the backward
# pass begins. So the peak moves to the end of the forward pass, where the gradient of the logits, 262 kB, is not there yet: 849 kB of gradients less 262 kB are 587 kB more. Let go of gradients before the forward pass.
#
# **And where nothing is trained?** Under `torch.no_grad()` nothing waits for a backward pass. What is left of the hill is what one layer's forward pass holds for a moment, at its fullest in the softmax of the attention:


# %%
def evaluation():
    with torch.no_grad():
        model.loss(tokens, targets)


peak = measure.peak(evaluation, model, optimizer)
{name: units.text(amount) for name, amount in peak.by("component").items()}

# %% [markdown]
# A device between the two peaks lets the first step pass and stops the second. Give the step such a budget, a fresh optimizer, and watch:

# %%
capacity = (first.peak.ledger.total + second.peak.ledger.total) // 2
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for number in (1, 2):
    try:
        measure.history(step, model, optimizer, capacity=capacity)
        print(f"step {number} fits in {units.text(capacity)}")
    except measure.OutOfMemory as error:
        print(f"step {number} fails in the {error}")

# %% [markdown]
# **At full size.** On the meta device tensors have shapes and lifetimes, but no memory: the same measurement runs for GPT-2 large, with
# 774 million parameters and four sequences of 1024 tokens, on any laptop.


# %%
def without_memory(name: str, batch: int):
    """A step of a model on the meta device, the model, its optimizer."""
    with torch.device("meta"):
        model = GPT(ModelConfig.named(name))
        tokens = torch.zeros(batch, model.config.seq_len, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step():
        model.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


# %%
large = without_memory("gpt2-large", batch=4)
both = [measure.history(*large) for _ in range(2)]
moments = [*both[0].moments, *both[1].moments]
title = "GPT-2 large in fp32 on a V100: step 1 fits, step 2 does not"
plots.memory_timeline(History(moments), capacity=Hardware.named("V100"), title=title)

# %% [markdown]
# Nothing leaked. PyTorch's optimizers allocate their state at the first `step()`, after the first hill, and the second hill stands on top of it. A library that allocates the state before any batch, as DeepSpeed's ZeRO does, would fail in step 1 here.
#
# This happens only if the hill is what counts. With a small batch the hill is low, and the update is the fullest moment of *both* steps: whoever
# survives the first step survives them all, as long as no later batch is larger. By the formulas above, an optimizer that keeps state makes step 2 peak higher exactly when
# working > weights + temporary:

# %%
floor = weights + temporary
f"{units.text(working)} > {units.text(floor)}: {working > floor}"

# %% [markdown]
# **Reserved is more than allocated.** On a GPU PyTorch does not ask the driver for every tensor. Its *allocator* reserves segments, hands out pieces of them, and keeps what is freed for the next request.
# `nvidia-smi` shows what is reserved, and what the driver itself takes. `memory.Allocator` follows the same rules (lab 03 opens it). Replay the storages of GPT-2's first steps in it:


# %%
def replayed(steps: int) -> memory.Allocator:
    step, *rest = without_memory("gpt2", batch=4)
    gpu = memory.Allocator(units.parse("32 GB"))

    def run():
        for _ in range(steps):
            step()

    memory.replay(measure.storages(run, *rest), gpu)
    return gpu


for gpu, told in ((replayed(1), "after step 1"), (replayed(2), "after step 2")):
    amounts = gpu.allocated, gpu.peak_allocated, gpu.reserved
    now, peak, reserved = map(units.text, amounts)
    print(f"{told}: {now} allocated, {peak} at the peak, {reserved} reserved")

# %% [markdown]
# What is reserved grows with the hill and stays when the step is over, so a tool that shows it does not show what the model holds. It is larger than the peak of the tensors, too: requests are
# rounded up, and a freed piece does not always fit the next request.

# %% [markdown]
# ### Exercise 0.2 · What does the hill of an accumulating step stand on? (10 min, ●●○)
#
# With gradient accumulation a step runs `micro_batches` times through forward and backward, and only then calls `optimizer.step()` and `zero_grad()`; `backward()` adds to the gradients
# that are there. Return the bytes at the fullest moment of step number `step`, 1 or later. `working` is what one micro-batch needs, as above. The check ends with peaks that were measured.
# (Proves that you know what is alive when.)


# %%
def step_peak(
    step: int,
    micro_batches: int,
    weights: int,
    state: int,
    working: int,
    temporary: int,
) -> int:
    """Bytes at the fullest moment of a step, in fp32."""
    raise NotImplementedError


# %%
check("start/step-peak", step_peak)

# %%
hint("start/step-peak", 1)

# %%
show(memory.step_peak)

# %% [markdown]
# ### Exercise 0.3 · Bug hunt: a counter that counts too much (8 min, ●●○)
#
# This counter walks over all modules and adds up each parameter, its gradient and its optimizer state. It is right for many models. Find the one kind
# for which it is wrong, and repair it. (Proves that you count memory by what is alive, not by a formula.)


# %%
def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of weights, gradients and optimizer state."""
    total = 0
    for module in model.modules():
        for p in module.parameters(recurse=False):
            tensors = [p, p.grad, *optimizer.state.get(p, {}).values()]
            total += sum(t.nbytes for t in tensors if t is not None)
    return total


# %%
check("start/bug-hunt-state-bytes", state_bytes)

# %%
show(measure.model_states)

# %% [markdown]
# ## Play: which step fails on which device?
#
# The panel knows one thing that you have not derived yet, the working memory of this GPT in fp32. Lab 03 takes the formula apart, term by term. Here
# it is enough that it explains your measurement to the last byte.


# %%
def working_memory(model: ModelConfig, b: int) -> int:
    s, h, f, a, L, v = model.letters("s h f a L v")
    return b * s * (4 * L * (8 * h + 2 * f + a * s + 4) + 8 * h + 12 * v + 24) + 8


formula = Ledger([Line("working", working_memory(config, b=8))])
formula.diff(Ledger([Line("working", working)]))


# %%
def bar(**parts: int) -> Ledger:
    return Ledger(Line(part, nbytes, component=part) for part, nbytes in parts.items())


def two_steps(model="gpt2-large", device="V100", optimizer="AdamW", batch=4):
    hardware, model = Hardware.named(device), ModelConfig.named(model)
    psi, adam = model.num_params, optimizer == "AdamW"
    held = working_memory(model, batch)
    kept = dict(weights=4 * psi, optimizer=8 * psi * adam)
    bars = dict(
        step_1_computes=bar(weights=4 * psi, activations=held),
        step_1_updates=bar(**kept, gradients=4 * psi, buffers=4 * psi * adam),
        step_2_computes=bar(**kept, activations=held),
    )
    failing = [name for name, parts in bars.items() if parts.total > hardware.memory]
    verdict = f"step {failing[0][5]} fails" if failing else "training fits"
    title = f"{model.name}, {batch} × {model.seq_len} tokens, {optimizer}: {verdict}"
    return plots.memory_bars(capacity=hardware, title=title, **bars)


# %%
explore(
    two_steps,
    model=["gpt2-medium", "gpt2-large"],
    device=["V100", "A100-40GB"],
    optimizer=["SGD", "AdamW"],
    batch=[1, 2, 4, 8],
)

# %% [markdown]
# Look for three kinds of setting: one where step 2 fails and step 1 does not; one where changing only the optimizer repairs that; one where even SGD
# cannot help.

# %% [markdown]
# ## Further: is a larger batch a better batch?
#
# Memory pushes the batch down. What pushes it up?
#
# A batch's gradient is an average over its sequences: an estimate of the gradient over all data, and averages get better with size.
#
# > How many times smaller is its squared distance from the gradient over all data if the batch grows from 4 to 64 sequences?

# %%
predict("start/noise", times=4)

# %% [markdown]
# To try it you need data with something to learn: sequences that count upward, each from its own start in its own stride. And a model that has learned a little of it:


# %%
def sequences(n: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.randint(32, (n, 1), generator=generator)
    stride = torch.randint(1, 9, (n, 1), generator=generator)
    counted = (first + stride * torch.arange(17)) % 32
    return counted[:, :-1], counted[:, 1:]


tiny = dict(num_layers=2, d_model=32, num_heads=2, d_ff=128, vocab_size=32, seq_len=16)
generator = torch.Generator().manual_seed(0)
learner = GPT(ModelConfig(**tiny), generator=generator)
adam = torch.optim.AdamW(learner.parameters(), lr=2e-3)
for _ in range(64):
    learner.loss(*sequences(16, generator)).backward()
    adam.step()
    adam.zero_grad()

# %% [markdown]
# Let 256 sequences be "all data". `gradient(pick)` is the gradient of a batch of them, as one long vector:

# %%
x, y = sequences(256, torch.Generator().manual_seed(1))


def gradient(pick) -> torch.Tensor:
    learner.zero_grad()
    learner.loss(x[pick], y[pick]).backward()
    return torch.cat([p.grad.flatten() for p in learner.parameters()])


single = torch.stack([gradient([i]) for i in range(256)])
whole = gradient(slice(None))
deviations = single - whole

# %% [markdown]
# **The formula.** Call σ² the mean squared distance of a *single* sequence's gradient from the whole one. In the average of B gradients, drawn independently
# of each other, deviations partly cancel, and the mean squared distance is
#
# $$ \frac{\sigma^2}{B}. $$
#
# (Papers write tr Σ for σ²: the variances of all components, added up.) 256 gradients give σ²:

# %%
noise = deviations.square().sum(1).mean().item()
signal = whole.square().sum().item()
f"σ² = {noise:.4g}; the squared length of the whole gradient is {signal:.4g}"

# %% [markdown]
# **The measurement** draws 2000 batches of each size. All sequences are equally long, so the gradient of a batch is the mean of its sequences' gradients, and the products of the 256 deviations with each other are enough for all batches.
# One batch goes through a backward pass to see that this is so:

# %%
generator = torch.Generator().manual_seed(2)
products = deviations @ deviations.T


def squared_distances(B: int, draws: int = 2000) -> list[float]:
    """Of the gradients of so many random batches of B from the whole one."""
    pick = torch.randint(256, (draws, B), generator=generator)
    shares = torch.zeros(draws, 256).scatter_add_(1, pick, torch.ones(draws, B)) / B
    return (shares @ products * shares).sum(1).tolist()


pick = torch.randint(256, (16,), generator=generator)
by_mean, by_backward = single[pick].mean(0), gradient(pick)
print(f"apart by {(by_mean - by_backward).norm() / by_backward.norm():.0e}")
measured = {B: squared_distances(B) for B in (1, 4, 16, 64)}
plots.gradient_noise(measured, noise=noise, signal=signal)

# %%
mean = {B: sum(found) / len(found) for B, found in measured.items()}
reveal("start/noise", times=round(mean[4] / mean[64], 1))

# %% [markdown]
# The formula says 64/4 = 16. Where the two lines cross, a batch's gradient is as much noise as signal.
# McCandlish et al. call that crossing the *simple noise scale* (tr Σ over the squared length of the whole gradient), and find that it says roughly up to which size a larger batch pays. It belongs to this model at this
# moment: lab 16 measures it along a run, and asks what a larger batch does to the loss, and to the learning rate.

# %% [markdown]
# ## Further: where the time of a step goes
#
# Memory is one half of a step, time the other. PyTorch's profiler writes down when every operation began and ended, and how many floating-point operations (FLOPs) its products took. `rigs.profiles.profiled` calls
# `torch.profiler.profile(with_flops=True)`. Names for the parts of the step are yours to give:

# %%
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
part = torch.profiler.record_function


def named_step():
    with part("forward"):
        loss = model.loss(tokens, targets)
    with part("backward"):
        loss.backward()
    with part("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


named_step()  # the first step also makes the optimizer's state
profile = rigs.profiles.profiled(named_step)

# %% [markdown]
# **FLOPs, three times.** A product of an m×k and a k×n matrix takes 2mkn FLOPs, a multiplication and an addition for each term. A token meets 12h² weights in each layer and vh in the head; in attention its query meets s keys,
# and its weights meet s values, 2·2sh FLOPs per layer. The backward pass takes two products where the forward pass takes one: three times as many in all. By the formula, counted on the meta device without computing anything, and in the profile of the real step:

# %%
s, h, L, v = config.letters("s h L v")
forward = 8 * s * (2 * (12 * L * h**2 + v * h) + 4 * s * h * L)
names = ("aten::mm", "aten::addmm", "aten::bmm")
in_profile = sum(event.flops for event in profile.events() if event.name in names)
with torch.device("meta"), FlopCounterMode(display=False) as counter:
    GPT(config).loss(torch.zeros(8, 64).long(), torch.zeros(8, 64).long()).backward()
{"formula": 3 * forward, "dry": counter.get_total_flops(), "profile": in_profile}

# %% [markdown]
# **The trace.** `export_chrome_trace` writes a file that [ui.perfetto.dev](https://ui.perfetto.dev) draws, in your browser: time to the right, what called what from top to bottom, so that "backward" lies above the operations that it consists of. What the
# file says of your machine (these numbers differ between machines and between runs, so nobody compares them with the stored ones):

# %% tags=["nbval-ignore-output"]
with tempfile.TemporaryDirectory() as folder:
    trace = pathlib.Path(folder, "step.json")
    profile.export_chrome_trace(str(trace))
    size = units.text(trace.stat().st_size)
spans = {e.key: e for e in profile.key_averages()}
for name in ("forward", "backward", "optimizer"):
    print(f"{name:10}{spans[name].cpu_time_total / 1000:6.1f} ms")
operations = [e for e in spans.values() if e.key.startswith("aten::")]
busiest = sorted(operations, key=lambda e: -e.self_cpu_time_total)[:3]
print("most time of their own:", ", ".join(event.key for event in busiest))
print(f"{len(profile.events())} events, {size}")

# %% [markdown]
# The optimizer takes its part of the time and none of the products' FLOPs: time is not FLOPs. On a GPU add `activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]`. The trace then has a row for each CUDA stream,
# and what one looks for are its gaps: a GPU that waits for Python, for data, or for another rank (lab 08).

# %% [markdown]
# ## When a cell fails
#
# - **NameError**: a cell above has not run. *Run → Restart Kernel and Run All Cells* puts everything in order; nothing you typed is lost.
# - **Your function raises inside a check**: the report names the error and your line. The notebook stays as it was.
# - **An error of the course's own code** names the value that was wrong and what would be right. Try one:

# %%
try:
    ModelConfig(**dims | dict(num_heads=5))
except ValueError as error:
    print(error)

# %% [markdown]
# - **The kernel dies**: usually the machine ran out of memory. Restart it and close other notebooks; every lab stays under 2 GB.
# - **A number differs from the stored one.** Bytes must not: that is a bug, and a report of it is welcome. Losses may differ in their last digits: another CPU may add in another order.

# %% [markdown]
# ## In practice
#
# | | sequences that a rank runs at once | sequences in a step | accumulation | tokens in a sequence |
# |---|---|---|---|---|
# | Megatron-LM | `--micro-batch-size` | `--global-batch-size` | follows from the two | `--seq-length` |
# | DeepSpeed | `train_micro_batch_size_per_gpu` | `train_batch_size` | `gradient_accumulation_steps` | up to your data loader |
# | torchtitan 0.2.2 | `training.local_batch_size` | `training.global_batch_size` | follows from the two | `training.seq_len` |
# | this course | `micro_batch` | `global_batch` | `TrainConfig.accumulation` | `seq_len` |
#
# DeepSpeed takes any two of its three numbers and infers the third.
#
# **The same timeline on a GPU.** PyTorch's allocator can record every allocation with the line of Python that asked for it:
#
# ```python
# torch.cuda.memory._record_memory_history()
# step(); step()
# torch.cuda.memory._dump_snapshot("two_steps.pickle")     # drop the file on pytorch.org/memory_viz
# ```
#
# Megatron-LM has `--record-memory-history` and `--memory-snapshot-path` for it, torchtitan 0.2.2 `profiling.enable_memory_snapshot`. The tool does not show what libraries such as NCCL allocate for themselves.
#
# **Let the second step fail early.** A job that dies in step 2 after an hour of loading is a waste. Run two steps on random tokens first, as many as the largest batch has, and load
# weights and data after them. Make the optimizer anew then, or load its state too: the old one remembers gradients of random tokens.


# %% [markdown]
# ## Errata: what published texts get wrong here
#
# In every lab this section has two parts: what is *wrong*, and what is *true under a condition* that its text leaves out. Words in quotation marks stand so in the text. In this lab all of it is of the second kind.
#
# ### True under a condition
#
# - **The first step may fit and a later one not**, "which can make the first step appear successful while later steps fail due to increased memory usage from optimizer state" (an article on efficient training at scale, on the memory of a step). <!-- erratum: S1-007 -->
#   It depends on what the forward and backward passes hold: with one short sequence instead of eight, the same model peaks in the optimizer, in every step alike.

# %%
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)


def short_step():
    model.loss(tokens[:1, :16].clone(), targets[:1, :16].clone()).backward()
    optimizer.step()
    optimizer.zero_grad()


peaks = [measure.history(short_step, model, optimizer).peak for _ in range(2)]
[(peak.phase, units.text(peak.ledger.total)) for peak in peaks]

# %% [markdown]
# - **"NVIDIA’s A100 and H100 have a maximum of 80GB RAM"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024). <!-- erratum: S2-002 -->
#   True of those that are called SXM or PCIe. The H100 NVL, also a PCIe card, has 94 GB. The course's table of devices, from the data sheets, in GB:

# %%
{name: Hardware.named(name).memory // units.GB for name in Hardware.names()}

# %% [markdown]
# ## Summary
#
# > **Everything is met three times**: predicted, computed, measured. `predicted.diff(measured)` ends with *unexplained 0*, or something is not
# > understood yet.
#
# > **A GiB is 7 % more than a GB.** 81 559 MiB are 85.5 GB.
# > <!-- claim: units.text(units.parse("81559 MiB")) == "85.5 GB" -->
#
# > **Tokens per step = micro-batch × accumulation × data-parallel ranks × sequence length.** With 2, 4, 128 and 4096, four million.
# > <!-- claim: config.TrainConfig(micro_batch=2, global_batch=1024).accumulation(dp=128) * 2 * 128 * 4096 == 4_194_304 -->
#
# > **fp32 Adam holds 16 bytes per parameter**: 24.9 GB for GPT-2 XL before any activation.
# > <!-- claim: units.text(16 * config.ModelConfig.named("gpt2-xl").num_params) == "24.9 GB" -->
#
# > **The state of PyTorch's optimizers appears at the end of the first step.** From then on the activations' hill stands on it; the second step can fail where
# > the first did not, if working memory is more than the weights and what the update needs for a moment.
#
# > **`backward()` adds to gradients that are there.** While micro-batches accumulate, gradients as large as the weights lie under the hill, however many there are.
# > <!-- claim: (lambda peak: peak(1) < peak(2) == peak(64))(lambda m: memory.step_peak(1, m, weights=1, state=2, working=20, temporary=1)) -->
#
# > **The squared distance of a batch's gradient from the whole one falls with 1/B**, if its sequences are drawn independently: with sixteen times the batch it is a sixteenth.

# %% [markdown]
# ## References
#
# - S. McCandlish, J. Kaplan, D. Amodei, OpenAI Dota Team, *An Empirical Model of Large-Batch Training*,
#   [arXiv:1812.06162](https://arxiv.org/abs/1812.06162): the noise scale.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face 2025: memory over the course of a step, batch sizes in tokens, choosing a configuration.
# - A. Radford et al., *Language Models are Unsupervised Multitask Learners*, 2019: GPT-2 and its initialization.
# - S. Rajbhandari et al., *ZeRO*, [arXiv:1910.02054](https://arxiv.org/abs/1910.02054), section 3: model states and residual states.
# - PyTorch, [Understanding CUDA memory usage](https://docs.pytorch.org/docs/stable/torch_cuda_memory.html), and the documentation of
#   `torch.optim.AdamW` on `foreach` and `fused`, and of `torch.profiler`.
# - What `nvidia-smi` reports on cards sold as 80 GB and others: [Why does an NVIDIA H100 80GB card offer 85.52
#   GB?](https://thundergolfer.com/blog/nvidia-gpu-memory-capacity)
# - [Megatron-LM](https://github.com/NVIDIA/Megatron-LM) `megatron/training/config`, [DeepSpeed
#   configuration](https://www.deepspeed.ai/docs/config-json/), [torchtitan](https://github.com/pytorch/torchtitan) 0.2.2,
#   `torchtitan/config/job_config.py`: the flags.
