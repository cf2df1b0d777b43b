# %% [markdown]
# # 05 · Take the batch in pieces
#
# **You want four million tokens in a batch, and two sequences fit on the GPU. Can you have the gradient of the whole batch anyway, exactly?**
#
# *90 min, and 30 further · before this: lab 04 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - get the gradient of a large batch in the memory of a small one, also where micro-batches differ in length (exercise 5.1),
# - see what published loops lose, and repair one (exercise 5.2, a bug hunt),
# - go from tokens in a batch to micro-batch, GPUs and accumulation steps, with reasons (exercise 5.3).

# %% [markdown]
# ## Setup

# %%
import collections
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from labutils import accumulation, measure, memory, planner, units
from labutils import predict as formulas
from labutils.accumulation import micro_batches
from labutils.checkpointing import overhead
from labutils.config import Hardware, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# A small GPT and a batch of 16 sequences. First all at once: activations pile up, and are freed. Then the same batch four sequences at a time. The optimizer waits
# for the last four; meanwhile gradients add up in `.grad`.

# %%
config = ModelConfig(
    num_layers=3, d_model=64, num_heads=4, d_ff=256, vocab_size=128, seq_len=32
)
model = GPT(config, generator=torch.Generator().manual_seed(0))
draw = torch.Generator().manual_seed(1)
batch = tuple(torch.randint(128, (16, 32), generator=draw) for _ in range(2))


def loss(part):
    return model.loss(*part)


# %%
def both_ways():
    loss(batch).backward()
    model.zero_grad()
    accumulation.accumulate(loss, micro_batches(batch, 4))


title = "16 sequences: one mountain at once, four hills four at a time"
plots.memory_timeline(measure.history(both_ways, model), title=title)

# %% [markdown]
# The second part has four times as many operations, each on a quarter of the rows. The FLOPs stay the same, in micro-batches of 16, 4 and 1:


# %%
def flops(size):
    with FlopCounterMode(display=False) as counter:
        accumulation.accumulate(loss, micro_batches(batch, size))
    return counter.get_total_flops()


[units.text(flops(size), "FLOP") for size in (16, 4, 1)]

# %% [markdown]
# **Activations are paid for one micro-batch, FLOPs for all.** Time is the third part of the trade: the same FLOPs may take longer in smaller pieces. Compute one sequence at a time, and then all eight together. Which loses more by the small pieces, sequences of 32 tokens or of 512? The lesser processor time of two runs each, also for sequences of a single token:

# %%
def seconds(net, data, size):
    torch.set_num_threads(1)  # processor time counts threads that wait, too
    start = time.process_time()
    accumulation.accumulate(lambda part: net.loss(*part), micro_batches(data, size))
    return time.process_time() - start


clock = {}
for length in (1, 32, 512):
    net = GPT(dataclasses.replace(config, seq_len=length))
    data = tuple(torch.zeros(2, 8, length, dtype=torch.long))
    runs = [(seconds(net, data, 1), seconds(net, data, 8)) for _ in range(2)]
    clock[length] = tuple(map(min, zip(*runs, strict=True)))
times_as_long = {length: one / eight for length, (one, eight) in clock.items()}
print("short sequences lose more:", times_as_long[32] > times_as_long[512])
print("8 × 1 token is slower than 1 × 256:", clock[1][0] > clock[32][1])

# %% [markdown]
# So small pieces of short sequences waste time, and much of it not on arithmetic. Eight pieces of a single token have less than a thirtieth of the FLOPs of eight sequences of 32, and still take longer than those do all at once: each operation has a cost of its own, whatever it works on. Where a single sequence is work enough, small pieces cost less. How much depends on the machine. FLOPs cannot tell the two cases apart: look at the clock when you choose a micro-batch.

# %% [markdown]
# ## Is it the gradient of the whole batch?
#
# Here is the loop of many tutorials:
#
# ```python
# for i, batch in enumerate(loader):
#     loss = criterion(model(batch))
#     loss.backward()
#     if (i + 1) % accumulation_steps == 0:
#         optimizer.step()
#         optimizer.zero_grad()
# ```
#
# > With 8 accumulation steps, how large is its gradient, compared with that of the batch of all eight?

# %%
predict("accumulation/factor", times=1)

# %% [markdown]
# The loss of a batch is a *mean* over its tokens, and so is the loss of each piece. `backward()` adds:
#
# $$ \underbrace{\nabla \ell_1 + \dots + \nabla \ell_k}_{\text{the loop}} \;=\; k \cdot \underbrace{\tfrac1k\,(\nabla \ell_1 + \dots + \nabla \ell_k)}_{\text{the batch}} $$


# %%
def gradient(call):
    model.zero_grad()
    call()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def loop(k):
    for part in micro_batches(batch, 16 // k):
        loss(part).backward()


whole = gradient(lambda: loss(batch).backward())


def times(k):
    return (gradient(lambda: loop(k)).norm() / whole.norm()).item()


{k: round(times(k), 3) for k in (2, 4, 8)}

# %%
reveal("accumulation/factor", times=round(times(8), 3))

# %% [markdown]
# The cure is `(loss / k).backward()`, as long as all micro-batches are equal. `accumulate` does it, and the difference that remains is rounding:

# %%
for size in (8, 4, 2, 1):
    found = gradient(
        lambda size=size: accumulation.accumulate(loss, micro_batches(batch, size))
    )
    close = ((found - whole).norm() / whole.norm()).item() < 1e-5
    print(f"{16 // size:2} micro-batches: off by less than 1e-5: {close}")

# %% [markdown]
# Not to the bit: sums in another order are rounded differently (lab 01).

# %% [markdown]
# ### Further: why does nobody notice?
#
# With plain SGD a gradient k times as large is a learning rate k times as large. Adam divides by the size of the gradient. How far off are the weights after twenty steps on four of the sequences, if each gradient is
# eight times too large?


# %%
def moved(make, factor):
    net = GPT(config, generator=torch.Generator().manual_seed(0)).double()
    before = nn.utils.parameters_to_vector(net.parameters()).detach()
    optimizer, few = make(net.parameters(), lr=1e-3), [side[:4] for side in batch]
    for _ in range(20):
        optimizer.zero_grad()
        (factor * net.loss(*few)).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(net.parameters()).detach() - before


def with_decay(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr, weight_decay=0.1)


def with_floor(parameters, lr):
    return torch.optim.Adam(parameters, lr=lr, eps=1e-3)


kinds = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, with_decay, with_floor
for make in kinds:
    right = moved(make, 1)
    off = (moved(make, 8) - right).norm() / right.norm()
    print(f"{make.__name__:10} off by {off:.0%}")

# %% [markdown]
# Adam hides the mistake, and so does AdamW, while the factor stays the same. It shows wherever the gradient is compared with another number: weight decay that is added to the gradient (Adam's `weight_decay`), a large `eps`, clipping, the logged norm, loss scaling.

# %% [markdown]
# ## What if the pieces are not equal?
#
# Language-model batches have padding. Say four micro-batches have 30, 30, 2 and 18 tokens that count; the other targets are −100, and the loss leaves them
# out.
#
# > Each micro-batch's loss is divided by k = 4. How many times as much does a token of the short one count, compared with one of the longest?

# %%
predict("accumulation/short", times=1)

# %% [markdown]
# A token has weight $1/n_i$ inside its micro-batch of $n_i$ tokens, and the mean of means gives every micro-batch $1/k$. It should have been $1/\sum n_i$:
#
# $$ \frac{1}{k\,n_i} \quad\text{instead of}\quad \frac{1}{\sum_j n_j}. $$

# %%
lengths = [30, 30, 2, 18]
plots.token_weights(lengths)

# %%
reveal("accumulation/short", times=max(lengths) / min(lengths))

# %% [markdown]
# Nothing crashes. Only in October 2024 was an issue taken up: training with accumulation came out worse than with the whole batch at once, and the most used trainers had to be repaired. Here is how far off the gradient is:

# %%
padding = torch.arange(32) >= torch.tensor(lengths)[:, None]
targets = batch[1][:4].masked_fill(padding, accumulation.IGNORED)
ragged = micro_batches((batch[0][:4], targets), 1)
right = gradient(lambda: loss((batch[0][:4], targets)).backward())
for name, weigh in {"mean of means": None, "by tokens": accumulation.tokens}.items():
    found = gradient(
        lambda weigh=weigh: accumulation.accumulate(loss, ragged, weigh=weigh)
    )
    print(f"{name}: off by {(found - right).norm() / right.norm():.0%}")

# %% [markdown]
# The cure: count the tokens of the batch *before* the first backward pass, and give each loss its share $n_i / \sum n_j$.
#
# A micro-batch with *no* token that counts is the worst case: its mean is 0/0. `accumulate` leaves it out.

# %%
empty = (batch[0][:1], torch.full((1, 32), accumulation.IGNORED))
parts = [*ragged, empty]
weighed = accumulation.accumulate(loss, parts, weigh=accumulation.tokens)
loss(empty), weighed.isfinite()

# %% [markdown]
# ### Further: does training notice?
#
# The gradient of an untrained model says little about training. Let a small model read Python's source code: in each step two rows of 32 characters and two of a single one, one row at a time. In a mean of means the
# short rows have half of the weight, 2 characters of 66. Here is the loss on rows from the end of the text, which no step has seen, with three seeds for each way:

# %%
source, reader = rigs.corpus.encoded("source"), dict(num_layers=1, d_model=32, d_ff=128)
reader = ModelConfig(num_heads=4, vocab_size=96, seq_len=32, **reader)


def rows_of(lengths, text, draw, anywhere=False):
    places = torch.randint(len(text) - 32, (len(lengths), 1), generator=draw)
    found, at = text[places + torch.arange(33)], torch.arange(32)
    beyond = at >= torch.tensor(lengths)[:, None]
    if anywhere:  # a row of one target has it at any place, and reads all before it
        one = torch.randint(32, (len(lengths), 1), generator=draw)
        beyond = torch.where(torch.tensor(lengths)[:, None] == 1, at != one, beyond)
    return found[:, :-1], found[:, 1:].masked_fill(beyond, accumulation.IGNORED)


# %%
def learn(weigh, seed, anywhere=False):
    draw, losses = torch.Generator().manual_seed(seed), []
    net = GPT(reader, generator=draw).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(100):
        optimizer.zero_grad()
        rows = rows_of([32, 32, 1, 1], source[:500_000], draw, anywhere)
        parts = micro_batches(rows, 1)
        accumulation.accumulate(lambda part: net.loss(*part), parts, weigh=weigh)
        optimizer.step()
        if step % 20 == 19:
            with torch.no_grad():
                losses.append(net.loss(*unseen).item())
    return losses


# %%
unseen = rows_of([32] * 200, source[500_000:], torch.Generator().manual_seed(9))
weights = {"mean of means": None, "by tokens": accumulation.tokens}
curves = {
    name: [learn(how, seed) for seed in range(3)] for name, how in weights.items()
}
axes = dict(xlabel="steps", ylabel="loss on unseen rows")
title = "With rows this unequal, a mean of means learns more slowly"
plots.curves(range(20, 101, 20), title=title, **axes, **curves)

# %%
curves["mean of means, anywhere"] = [learn(None, seed, True) for seed in range(3)]
{name: [f"{run[-1]:.2f}" for run in runs] for name, runs in curves.items()}

# %% [markdown]
# The short rows come from the same text, so their characters are no worse than others, but they are too few to carry half of the weight. A short row asks for nothing but the second character of a row. Is it that? In the last line the single target stands anywhere in a whole row, with the same weight: most of the harm remains.

# %% [markdown]
# ### Further: and on several GPUs?
#
# Two ranks (processes that hold a copy of the model each) with two of the four micro-batches each. Data parallelism (lab 08) *averages* the gradients of the ranks.
#
# > Each rank weighs its losses with $n_i / \sum n_j$, where the sum now runs over the tokens of *both* ranks. How many times as long as the right gradient is the
# > averaged one?

# %%
predict("accumulation/ranks", times=1)


# %% [markdown]
# `World(2)` runs a function on two ranks, and `all_reduce` returns the sum over both (lab 07).


# %%
def averaged(rank, all_tokens, factor):
    """The gradient of ranks that hold two micro-batches each, averaged."""
    comm = rank.comm("dp")
    net = GPT(config, generator=torch.Generator().manual_seed(0))
    mine = ragged[comm.rank :: comm.size]
    total = torch.tensor(sum(map(accumulation.tokens, mine)))
    if all_tokens:
        total = comm.all_reduce(total)
    weights = dict(weigh=accumulation.tokens, total=int(total))
    accumulation.accumulate(lambda part: factor * net.loss(*part), mine, **weights)
    found = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    return comm.all_reduce(found) / comm.size


world, lengths_of = World(2), {}
ways = {"own tokens": (False, 1), "all tokens": (True, 1), "all tokens, × 2": (True, 2)}
for name, how in ways.items():
    found = world.run(averaged, *how)[0]
    lengths_of[name] = (found.norm() / right.norm()).item()
    off = (found - right).norm() / right.norm()
    print(f"{name:15} {lengths_of[name]:.2f} times as long, off by {off:.0%}")

# %%
reveal("accumulation/ranks", times=lengths_of["all tokens"])

# %% [markdown]
# The shares of all ranks add up to one, so the *sum* over ranks would be right, and the average is $N_d$ times too small. Weigh with the tokens of all ranks
# (`accumulate` takes their number as `total`), and multiply the loss by $N_d$.
#
# And a rank may not leave out an empty micro-batch where the forward pass communicates, as with sharded weights (FSDP, lab 09): the other ranks wait for it. Run it with a *sum* over tokens in place of the mean, divided by the total:
# the sum over no token is 0, and so is its gradient.

# %% [markdown]
# ### Exercise 5.1 · Accumulate (15 min, ●●○)
#
# `loss(batch)` is the mean over `weigh(batch)` tokens. Leave the gradient of the whole batch in `.grad` and return its loss. Some micro-batches may have no
# token at all. The check also looks at memory.


# %%
def accumulate(loss, batches, weigh):
    raise NotImplementedError


# %%
check("accumulation/accumulate", accumulate)

# %%
hint("accumulation/accumulate", 1)

# %%
show(accumulation.accumulate)

# %% [markdown]
# ## Does memory really stay flat?
#
# Accumulation gives "effectively infinite batch sizes without increasing activation memory", say reading notes on *The Ultra-Scale Playbook*.
#
# > From a batch of 4 to a batch of 16, in micro-batches of 4: by how many percent does the *peak* grow, between two steps of the optimizer, whose state is left out?

# %%
predict("accumulation/growth", percent=0)


# %% [markdown]
# First the activations, of batches of 4, 8 and 16: at once, and in fours.


# %%
def held(rows, size):
    model.zero_grad()
    data = tuple(side[:rows] for side in batch)
    parts = micro_batches(data, size)
    history = measure.history(lambda: accumulation.accumulate(loss, parts), model)
    ledgers = [moment.ledger for moment in history.moments]
    return max(ledger.only(component="activations").total for ledger in ledgers)


{rows: (units.text(held(rows, rows)), units.text(held(rows, 4))) for rows in (4, 8, 16)}

# %% [markdown]
# At once (left) they grow with the batch, in fours (right) not by a byte. What stays in memory is the **gradient**: without accumulation it lives from the
# backward pass to the step, with it from the first micro-batch on, all through every later forward pass. So at the top of every later hill there is one gradient more. (Without accumulation a part of one, too, if a loop calls `zero_grad` after the forward pass: lab 00.)

# %%
model.zero_grad()
parts = micro_batches(batch, 4)
first = measure.peak(lambda: accumulation.accumulate(loss, parts[:1]), model)
model.zero_grad()
later = measure.peak(lambda: accumulation.accumulate(loss, parts), model)
title = "From the second micro-batch on, the peak carries the gradients as well"
plots.memory_bars(one_micro_batch=first, two_or_more=later, title=title)

# %%
growth = later.total / first.total - 1
reveal("accumulation/growth", percent=round(100 * growth, 1))

# %%
more, adam = later.total - first.total, 2 * first.only(component="weights").total
with_adam = more / (first.total + adam)
print(f"{units.text(more)} more, one gradient; beside Adam's state {with_adam:.1%}")

# %% [markdown]
# ### Further: in which precision is the sum?
#
# In mixed precision there may be a second gradient. Add 64 small gradients to a large one in bf16:

# %%
w = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
slopes = [256.0] + [1.0] * 64
for slope in slopes:
    (slope * w).sum().backward()
w.grad.item(), sum(slopes)

# %% [markdown]
# The sum never moves: beyond 256 a bf16 number's gap is 2, so adding 1 is rounded away (lab 01). Other equal addends stop a little later, before 512 of them. Training codes keep the sum in fp32, beside the bf16 gradients, for $4\Psi$ bytes:

# %%
w.grad = None
with accumulation.gradient_buffer([w]) as buffer:
    for slope in slopes:
        (slope * w).sum().backward()
buffer[w].item()

# %% [markdown]
# This is the difference between the 16 and the 20 bytes per parameter of lab 03: for GPT-2 XL

# %%
gpt2 = ModelConfig.named("gpt2-xl")
for fp32 in (False, True):
    run = TrainConfig(micro_batch=1, global_batch=1, fp32_gradients=fp32)
    print(f"fp32 sum: {fp32!s:5} {units.text(formulas.states(gpt2, run).total)}")

# %% [markdown]
# ## What else changes when the batch comes in pieces?
#
# The gradient of a mean is the mean of gradients, so what treats every token or row on its own goes through. Two things in a training step do not, and a third,
# dropout, only seems not to.
#
# **Whatever looks across the batch.** In language models that is above all the *balancing loss* of a mixture of experts (lab 12): a router spreads the tokens
# over E experts, and $E \sum_e f_e P_e$ punishes a crowded one, where $f_e$ is the share of the tokens that expert $e$ gets and $P_e$ its mean probability. A
# product of two means over the batch is not a mean. A contrastive loss, whose negatives are the other rows, is of this kind too, and so is `BatchNorm`.
# `LayerNorm` and `RMSNorm` look at each row alone. How far off is the gradient of four micro-batches of 4 rows?


# %%
def in_pieces(net, loss):
    rows = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    found = []
    for size in (16, 4):
        net.zero_grad()
        accumulation.accumulate(lambda part: loss(net(part)), micro_batches(rows, size))
        found.append(nn.utils.parameters_to_vector(p.grad for p in net.parameters()))
    return f"{(found[1] - found[0]).norm() / found[0].norm():.0%}"


def mean(outputs):
    return outputs.square().mean()


def balancing(logits):
    chosen = nn.functional.one_hot(logits.argmax(-1), 4).float()
    return 4 * (chosen.mean(0) * logits.softmax(-1).mean(0)).sum()


torch.manual_seed(0)
norms = nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d
nets = {norm.__name__: nn.Sequential(norm(8), nn.Linear(8, 1)) for norm in norms}
off = {name: in_pieces(net, mean) for name, net in nets.items()}
off | {"balancing loss": in_pieces(nn.Linear(8, 4), balancing)}

# %% [markdown]
# **Clipping.** Every clipping inside the loop also shrinks all micro-batches before it. Clipped to 0.5 after the last micro-batch, or after each:


# %%
def clipped(inside):
    for part in micro_batches(batch, 4):
        (loss(part) / 4).backward()
        if inside:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


once, often = (
    gradient(lambda inside=inside: clipped(inside)) for inside in (False, True)
)
same = torch.allclose(once.norm(), often.norm(), rtol=1e-4)
cosine = nn.functional.cosine_similarity(once, often, dim=0)
angle = cosine.clamp(max=1).acos().rad2deg()
f"same length: {same}, turned by {angle:.0f} degrees"

# %% [markdown]
# Clip once, after the last micro-batch. The same holds for whatever belongs to a *step*: `GradScaler.unscale_`, `step` and `update` (lab 02), and the scheduler of the learning rate, which counts steps and not micro-batches: with twice as many accumulation steps an epoch has half as many.
#
# ### Further: and dropout?
#
# Masks are drawn in another order, so the gradient differs. Is it wrong? Compare with what a new seed changes:

# %%
shaky = GPT(
    dataclasses.replace(config, dropout=0.1), generator=torch.Generator().manual_seed(0)
)


def with_dropout(seed, size):
    torch.manual_seed(seed)
    shaky.zero_grad()
    accumulation.accumulate(lambda part: shaky.loss(*part), micro_batches(batch, size))
    return torch.cat([parameter.grad.flatten() for parameter in shaky.parameters()])


base = with_dropout(0, 16)
for name, how in {"at once": (1, 16), "in fours": (2, 4)}.items():
    off = (with_dropout(*how) - base).norm() / base.norm()
    print(f"another seed, {name}: {off:.0%}")

# %% [markdown]
# The pieces are no further off than another seed is: they are another draw of the masks.

# %% [markdown]
# ### Exercise 5.2 · Bug hunt: the loop that everybody copies (15 min, ●●○)
#
# Repair it. It gets an iterator of micro-batches of equal weight, `k` to a step, and returns the number of optimizer steps. Three things are wrong. The check
# also looks at memory.


# %%
def epoch(optimizer, loss, batches, k, max_norm):
    steps = 0
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, batch in enumerate(batches):
        loss(batch).backward()
        nn.utils.clip_grad_norm_(parameters, max_norm)
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return steps


# %%
check("accumulation/bug-hunt", epoch)

# %%
hint("accumulation/bug-hunt", 1)

# %%
show(accumulation.epoch)

# %% [markdown]
# ## How do you fill a batch of four million tokens?
#
# $$ \text{gbs} = \text{mbs} \cdot \text{ga} \cdot N_d $$
#
# Global batch = micro-batch · accumulation steps · copies of the model. The left side is a decision about *learning* (lab 16), the right side about machines,
# so you go from left to right:
#
# 1. **Tokens in a batch.** What the run needs: as many as still help (labs 00 and 16).
# 2. **Sequence length.** What the model is to read: 2k to 8k in pre-training. Tokens / length = sequences.
# 3. **Micro-batch.** The largest that fits, unless a pipeline needs many of them (lab 13). It decides how busy the GPU is.
# 4. **GPUs.** As many as you have. Each copy takes its share; where the GPUs do not divide the number of sequences (1024 on 24), change the batch: shares of unequal length make the others wait.
# 5. **Accumulation.** What is left over.
#
# 4 194 304 tokens, sequences of 4096, two fit at a time, 128 GPUs with a copy each:

# %%
planner.configure(target=2**22, seq_len=4096, gpus=128, fits=lambda b: b <= 2)

# %% [markdown]
# With 512 GPUs nothing is left to accumulate. Use the GPUs that you have first: they shorten the step, as long as their messages hide (lab 08). Accumulate what is left.
#
# `fits` asks for the peak of the step, second micro-batch included (lab 03). GPT-2 XL on H100s, half a million tokens in a batch:

# %%
h100 = Hardware.named("H100")


def fits(policy, attention):
    def fits(b):
        train = TrainConfig(
            micro_batch=b, global_batch=2 * b, checkpointing=policy, attention=attention
        )
        # A tenth of the memory is for the allocator's gaps.
        return memory.peak(gpt2, train).total <= 0.9 * h100.memory

    return fits


planner.configure(target=2**19, seq_len=1024, gpus=16, fits=fits("none", "plain"))

# %% [markdown]
# Change the number of GPUs, checkpoint, fuse attention. Where does accumulation disappear?


# %%
def setting(gpus=16, checkpointing="none", attention="plain"):
    fitting = fits(checkpointing, attention)
    recipe = planner.configure(target=2**19, seq_len=1024, gpus=gpus, fits=fitting)
    extra = f"+{overhead(gpt2, checkpointing):.1%}"
    cost = planner.Choice("recomputation", extra, "FLOPs of the step")
    return dataclasses.replace(recipe, choices=(*recipe.choices, cost))


policies, kinds = ["none", "selective", "full"], ["plain", "sdpa"]
explore(setting, gpus=[4, 16, 64], checkpointing=policies, attention=kinds)

# %% [markdown]
# Full checkpointing makes the micro-batch larger and computes 22 % more, as in lab 04; accumulation computes no product twice. So where a sequence fits, accumulate rather than recompute, unless the smaller micro-batch costs more time than those 22 %, as single short sequences may, or every micro-batch has to fetch the weights anew (lab 09).
# <!-- claim: round(100 * checkpointing.overhead(config.ModelConfig.named("gpt2-xl"), "full")) == 22 -->

# %% [markdown]
# ### Further: where do the rows come from?
#
# Documents differ in length. Give each a row of 1024 tokens and fill it up with padding, or *pack* them: lay them end to end and cut. Here are 1000 documents of 1 to 600 tokens.
#
# > How many times as many rows does padding need?

# %%
predict("accumulation/padding", times=1.5)


# %%
def packed(documents, length, end=0):
    """Rows of length + 1 tokens: inputs, and targets one place further."""
    stream = torch.cat([F.pad(document, (0, 1), value=end) for document in documents])
    return stream.unfold(0, length + 1, length)


draw = torch.Generator().manual_seed(0)
sizes = torch.randint(1, 601, (1000,), generator=draw).tolist()
rows = packed([torch.full((size,), size) for size in sizes], 1024)
formula = (sum(sizes) + len(sizes) - 1) // 1024
print("rows:", len(rows), "by formula:", formula)

# %%
reveal("accumulation/padding", times=round(len(sizes) / formula, 1))

# %% [markdown]
# That is padding to the length of a row. Loaders may also pad each micro-batch to its longest document. Tokens computed, over tokens that count, with eight documents at a time, as they come and sorted by length:


# %%
def padded(sizes):
    eights = [sizes[k : k + 8] for k in range(0, len(sizes), 8)]
    return sum(8 * max(eight) for eight in eights) / sum(sizes)


f"{padded(sizes):.1f} as they come, {padded(sorted(sizes)):.1f} sorted"

# %% [markdown]
# So packing is not the only remedy: sorting wastes next to nothing either, but a micro-batch then has documents of one length alone. A packed row needs no padding in any order. Its tokens see the documents before theirs, unless attention has a mask for each document (lab 11).
#
# **Resuming.** A run stops after three steps on 4 ranks and goes on with 6. If rows are dealt out in one global order, the loader needs one number: how many rows were read, here twelve in a step. If every rank reads a part of its own from beginning to end, the parts of six ranks are not those of four. How many of 96 rows are read twice, and how many never?


# %%
def in_order(step, rank, size, gbs=12):
    return range(gbs * step, gbs * (step + 1))[rank::size]


def own_part(step, rank, size, gbs=12, all_rows=96):
    mine = range(rank * all_rows // size, (rank + 1) * all_rows // size)
    return mine[step * gbs // size : (step + 1) * gbs // size]


for way in (in_order, own_part):
    ranks = [4] * 3 + [6] * 5
    read = collections.Counter(
        row
        for step, size in enumerate(ranks)
        for rank in range(size)
        for row in way(step, rank, size)
    )
    twice = sum(count > 1 for count in read.values())
    print(f"{way.__name__}: {twice} twice, {96 - len(read)} never")

# %% [markdown]
# Dealt out in one order, every row is read once, whatever the number of ranks. With a part for each rank 22 of the 96 are read twice, and as many never, and nothing crashes.
#
# **Waiting for data.** One after the other, twenty loads and steps take 20 · (load + step). With the next batch on its way during a step, they take load + 19 · max(load, step) + step, if all loads take equally long: nothing is loaded during the last step. Steps that sleep cannot be shorter than that:


# %%
def slept(load, step, ahead, steps=20):
    """Seconds of all steps, with so many batches on their way during a step."""
    coming, start = collections.deque(), time.perf_counter()
    with ThreadPoolExecutor(1) as loader:
        for k in range(steps):
            while len(coming) <= ahead and k + len(coming) < steps:
                coming.append(loader.submit(time.sleep, load))
            coming.popleft().result()
            time.sleep(step)
    return time.perf_counter() - start


by_formula = {0: 20 * (0.04 + 0.05), 1: 0.04 + 19 * 0.05 + 0.05}
measured = {ahead: slept(0.04, 0.05, ahead) for ahead in by_formula}
for ahead, least in by_formula.items():
    print(f"{ahead} ahead: {least:.2f} s; not less: {measured[ahead] >= least - 1e-3}")
print("sooner with one ahead:", measured[1] < measured[0])

# %% [markdown]
# ### Exercise 5.3 · Fill a batch (10 min, ●○○)
#
# Tokens in the batch, sequence length, GPUs (a copy of the model on each) and `fits(b)`. Return (micro-batch, accumulation steps) with exactly that many
# tokens in as few steps as possible.


# %%
def fill(target: int, seq_len: int, gpus: int, fits) -> tuple[int, int]:
    raise NotImplementedError


# %%
check("accumulation/configure", fill)

# %%
hint("accumulation/configure", 1)

# %% [markdown]
# ## In practice
#
# - **PyTorch DDP.** Every `backward()` all-reduces gradients, which accumulation needs only once: wrap all but the last micro-batch in `with model.no_sync():`,
#   forward pass included (lab 08).
# - **FSDP2.** `model.set_requires_gradient_sync(False)` for all but the last. Gradients are then kept *unsharded* between micro-batches, which costs the memory
#   that sharding the gradients saved; leaving it on reduces every time and keeps them small (lab 09).
# - **Data.** `DataLoader(num_workers=…, prefetch_factor=…)` loads ahead; torchdata's `StatefulDataLoader` remembers where it is.
# - **torchtitan 0.2.2.** `training.local_batch_size` and `training.global_batch_size`: the second turns accumulation on.
# - **Megatron-LM.** `--micro-batch-size`, `--global-batch-size`; accumulation steps follow from the data-parallel degree.
#   `--accumulate-allreduce-grads-in-fp32` is the fp32 buffer, `--calculate-per-token-loss` the mean over tokens of the whole batch.
# - **DeepSpeed.** `train_batch_size` = `train_micro_batch_size_per_gpu` · `gradient_accumulation_steps` · number of ranks; give two of the three.
#   `"data_types": {"grad_accum_dtype": "fp32"}` for the sum.
# - **Hugging Face Transformers.** `gradient_accumulation_steps`; since the repair of October 2024 (pull request 34191) the loss gets `num_items_in_batch`. A
#   model with a loss function of its own has to accept it.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **Two faults in one loop** (lecture slides on multi-GPU training: `loss.backward()` for every micro-batch, "if (i+1) % accumulation_steps == 0:" before the step). The gradient is k times too large for a mean loss, as above. And with <!-- erratum: S4-041 -->
# 10 batches and k = 4 it takes two steps; the gradients of two batches leak into the next epoch.

# %% [markdown]
# ### True under a condition
#
# **A larger batch "without increasing per-step memory"** (an article on efficient training at scale). Without increasing <!-- erratum: S1-026 -->
# *activations*. The gradient stays between micro-batches, and an fp32 sum adds 4 bytes per parameter: for GPT-2 XL 31.2 GB of
# model states in place of 24.9, as above.

# %% [markdown]
# **"The independent nature of micro-batch computations"** (the same article). True with LayerNorm and RMSNorm. With BatchNorm, or a balancing loss, the result <!-- erratum: S1-029 -->
# depends on the cut (Goyal et al., section 2.3, keep BatchNorm per worker on purpose).

# %% [markdown]
# ## Summary
#
# > - A micro-batch's loss enters with its share of the tokens. Without the fraction the gradient is k times too large; with 1/k short micro-batches count too
# >   much: a token among 2 counts 15 times as much as one among 30.
# >   <!-- claim: (lambda w: [accumulation.accumulate(lambda x: x.mean(), w.split([30, 30, 2, 18]), weigh=lambda x: 1), round((w.grad.max() / w.grad.min()).item())][1])(torch.ones(80, requires_grad=True)) == 15 -->
# > - Data parallelism averages: weigh with the tokens of all ranks, and multiply the loss by the number of ranks.
# > - Activations are those of one micro-batch, whatever the batch. Gradients stay from the first micro-batch to the step, and an fp32 sum of them costs 4Ψ more: 20 bytes per parameter instead of 16.
# >   <!-- claim: [round(predict.states(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=1, global_batch=1, fp32_gradients=f)).total / 1557611200) for f in (False, True)] == [16, 20] -->
# > - A bf16 sum of equal addends stops growing at 256 to 512 times the addend. Accumulate in fp32.
# >   <!-- claim: [[w.add_(a) for w in [torch.zeros(1, dtype=torch.bfloat16)] for _ in range(999)][-1].item() for a in (1, 1.0078125)] == [256, 512] -->
# > - What looks across the batch does not come in pieces: balancing losses, batch statistics, clipping. Clip once, after the last micro-batch, and do not drop the tail: 10 batches, four
# >   to a step, are three steps.
# >   <!-- claim: len(accumulation.micro_batches(torch.zeros(10, 1), 4)) == 3 -->
# > - gbs = mbs · ga · N_d. 4 million tokens in sequences of 4096 on 128 GPUs, two at a time: 4 accumulation steps; on 512 GPUs: one.
# >   <!-- claim: [config.TrainConfig(micro_batch=2, global_batch=1024).accumulation(dp) for dp in (128, 512)] == [4, 1] -->
#
# Next: lab 06 makes attention itself forget the large matrix.

# %% [markdown]
# ## References
#
# - P. Goyal et al., *Accurate, large minibatch SGD*, arXiv:1706.02677 (2017): sections 2.3 (batch statistics) and 3 (remark 3: normalize the loss by the
#   whole batch).
# - W. Fedus, B. Zoph, N. Shazeer, *Switch Transformers*, arXiv:2101.03961 (2021): the balancing loss.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): gradient accumulation, order of decisions.
# - S. Rajbhandari et al., *ZeRO*, arXiv:1910.02054 (2020), section 3.1: bytes per parameter.
# - Hugging Face, *Fixing gradient accumulation* (blog, October 2024) and transformers pull request 34191; the issue that started it: trl 2175.
# - PyTorch documentation of `DistributedDataParallel.no_sync` and `FSDPModule.set_requires_gradient_sync`; torchtitan pull request 1238; arguments of
#   Megatron-LM and DeepSpeed, as of 2025.
