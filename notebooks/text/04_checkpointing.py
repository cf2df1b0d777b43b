# %% [markdown]
# # 04 · Compute it again
#
# **With 32 sequences the activations of a 1.5B-parameter model take 60 GB by one count, and wait for one backward pass. What if you throw them away and compute them again?**
#
# *90 min, and 60 further · before this: lab 03 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - know at every moment of a training step which values must be held, and write the plan that keeps k of them (exercise 4.1),
# - count the cheapest plan for the memory you have (exercise 4.2),
# - write `checkpoint`, dropout included (exercise 4.3),
# - write the test that a broken one cannot pass (exercise 4.4, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import dataclasses

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from labutils import checkpointing, measure, memory, units
from labutils.checkpointing import Costs
from labutils.config import ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, predictions, reveal, show
from labutils.teach.exercises import checkpointing as exercises
from labutils.teach.widgets import explore

# %% [markdown]
# ## The idea in one picture
#
# Sixteen layers in a row, one training step, four ways to do it. Time runs to the right. A blue cell computes a layer, a yellow one takes it backward, and
# each red line is a tensor that waits in memory.

# %%
everything, segments = checkpointing.segments(16, 1), checkpointing.segments(16, 4)
binomial, nothing = checkpointing.binomial(16, 4), checkpointing.keep_nothing(16)
title = "Red lines cost memory, blue cells cost time: every plan chooses between them"
plans = [everything, segments, binomial, nothing]
plots.plan_maps({plan.name: plan.timeline for plan in plans}, title=title)

# %% [markdown]
# The first is what PyTorch does unless told otherwise: nothing is computed twice, and at the peak everything is in memory at once. The last holds almost
# nothing and takes longest. The two in between are the subject of this lab. In the second, **fewer than twice as many blue cells take away more than half of the red
# lines**; the third holds still less and computes more.

# %% [markdown]
# ## What must be held, and when?
#
# Call the layers $f_0, f_1, \dots$ and their backward passes $b_0, b_1, \dots$ A node $b_i$ needs two things: the gradient from $b_{i+1}$, and what $f_i$
# has recorded: its input $x_i$, its output $x_{i+1}$ (the *values*) and its *interior*, everything else that its backward pass needs. So the b nodes run from right to left, and what they need has to be there when their turn comes. To compute one f node once is a
# *forward evaluation*. Press play.

# %%
plots.plan_animation(checkpointing.segments(5, 1).timeline)

# %% [markdown]
# Now the other extreme: keep only the input, and for every b node compute its f node again, from the start.

# %%
plots.plan_animation(checkpointing.keep_nothing(5).timeline)

# %% [markdown]
# > With 10 layers, how many forward evaluations is that in all?

# %%
predict("checkpointing/nothing-kept", evaluations=20)

# %% [markdown]
# $b_9$ needs ten evaluations, $b_8$ nine, and so on to $b_0$ with one:
#
# $$ n + (n-1) + \dots + 1 = \frac{n(n+1)}{2}. $$
#
# A plan is a list of steps, so the evaluations can be counted as well, and the steps can be carried out on real layers:

# %%
plan = checkpointing.keep_nothing(10)
reveal("checkpointing/nothing-kept", evaluations=sum(plan.evaluations))

# %%
torch.manual_seed(0)
layers = [
    nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(10)
]
x = torch.randn(32, 64)
executed = checkpointing.run(layers, plan, x, torch.ones(32, 64))
print("evaluations of each layer:", executed.evaluations)
print("as the plan says:", plan.evaluations == executed.evaluations)

# %% [markdown]
# The first layer is computed ten times, the last one once: $(n+1)/2$ times on average. How much was held? `costs` measures each layer once (FLOPs,
# bytes of its output and of its interior), `plan.on(costs)` follows the plan on paper, and `run` counted the
# storages that were really alive after every step. Compare all 110 steps:

# %%
costs = checkpointing.costs(layers, x)
predicted = plan.on(costs)
pairs = zip(predicted.history.moments, executed.history.moments, strict=True)
unexplained = sum(a.ledger.diff(b.ledger).unexplained for a, b in pairs)
f"{unexplained} bytes unexplained in {len(plan.steps)} steps"

# %% [markdown]
# ## How little memory does one more forward pass buy?
#
# Cut n layers into k equal segments and keep each segment's input. When the backward pass reaches a segment, compute that segment once more, this time keeping
# all of it.
#
# > 144 layers. Instead of 145 values (the input is one), how many do you hold with the best number of segments?

# %%
predict("checkpointing/segments", values=72)

# %% [markdown]
# At most k inputs stay, and one segment of $n/k$ values is open at a time:
#
# $$ \text{held}(k) = k + \frac{n}{k}, $$
#
# least where the derivative $1 - n/k^2$ is zero: at $k = \sqrt n$, with $2\sqrt n$ values held.
#
# Every layer is computed twice, except those of the last segment: its backward pass comes next, so it is kept the first time. That is $2n - n/k$
# evaluations: less than one extra forward pass.


# %%
def held(n, k):
    return checkpointing.segments(n, k).on(Costs.uniform(n)).peak


{k: held(144, k) for k in (2, 4, 6, 9, 12, 16, 24, 36, 72)}

# %%
reveal("checkpointing/segments", values=held(144, 12))

# %%
plots.plan_animation(checkpointing.segments(9, 3).timeline)

# %% [markdown]
# `Costs.uniform(n)` counts the input and every value of one unit, interiors and gradients of none. (Chen et al. do not count the input: one less.)
#
# Equal segments are not the best. When a segment is finished, its input goes, so the segments before it may be longer. Segments of 17, 16, …, 5 and 1 layers hold 18 values, about $\sqrt{2n}$, in 287 evaluations.
# <!-- claim: min(room for room, cost in checkpointing.frontier(checkpointing.Costs.uniform(144)) if cost <= 2 * 144) == 18 and sum(range(5, 18)) + 1 == 144 -->
#
# ### Further: and a model of 1.5 billion parameters?
#
# Take GPT-2 XL with 32 sequences of 1024 tokens. The ZeRO paper counts 12 tensors of 105 MB in each of 48 layers, without scores. One of the twelve is the layer's output; the others its interior.

# %%
s, h, L = ModelConfig.named("gpt2-xl").letters("s h L")
output = 2 * 32 * s * h
gpt2 = Costs.uniform(L, output=output, interior=11 * output)
plans = {k: checkpointing.segments(L, k) for k in (1, 4, 6, 8, 12, 16, 24, 48)}
{k: units.text(plan.on(gpt2).peak) for k, plan in plans.items()}

# %% [markdown]
# The paper says "about 8 GB" (section 3.2) without naming its plan; 8 segments come near it. Now the interiors move the optimum. A kept input costs 1 unit, and each layer of the open segment costs 12. So k segments hold about $k + 12\,n/k$, which is least at $k = \sqrt{12 \cdot 48} = 24$: two layers in each segment.

# %% [markdown]
# ### Exercise 4.1 · Write a plan (20 min, ●●○)
#
# n layers, k segments, k divides n. Return the steps as a list of pairs: `("forward", i)`, `("record", i)`, `("backward", i)`, `("drop", i)`.
# `forward` and `record` make $x_{i+1}$ from $x_i$, and `record` also keeps what `backward` needs. `backward i` frees the interior and $x_{i+1}$; `drop i`
# frees $x_i$. A value that is held may not be made again: drop it first. Start with $x_0$, and end with $x_0$ alone. Compute and hold no more than counted above.


# %%
def write_segments(n: int, k: int) -> list[tuple[str, int]]:
    raise NotImplementedError


# %%
check("checkpointing/segments", write_segments)

# %%
hint("checkpointing/segments", 1)

# %%
show(checkpointing.segments)

# %%
show(checkpointing.plans._unroll)

# %% [markdown]
# ## Further: what is the best plan for the memory you have?
#
# Segments compute most layers twice. If memory does not even hold $\sqrt{2n}$ values, cut the segments into segments again, and compute a layer three or four times.
# Which cuts need the fewest evaluations?
#
# > 100 equal layers, recorded one at a time, and room for 10 *snapshots*: values that are kept for later, the input among them. How many forward evaluations does the best plan need?

# %%
predict("checkpointing/best-plan", evaluations=1000)

# %% [markdown]
# Think of the *first* value to keep, $x_m$. Reaching it costs m evaluations. Then the right part, $n - m$ layers, is taken backward with one snapshot less,
# because $x_m$ occupies one. Then $x_m$ goes, and the left part has all snapshots again. With c snapshots:
#
# $$ e(n, c) = \min_{1 \le m < n}\; \bigl[\, m + e(n-m,\, c-1) + e(m,\, c) \,\bigr]. $$
#
# The recurrence ends in two places. One layer needs one evaluation: $e(1, c) = 1$. And with $x_0$ as the only snapshot every layer starts from $x_0$ again: $e(n, 1) = n(n+1)/2$.
# (The layer being computed has values of its own: in the first picture 4 snapshots hold 6.)
#
# Griewank and Walther solved this in closed form. If each layer may be computed r times before it is recorded, c snapshots reach $\binom{c+r}{c}$ layers. Take the least r that reaches n:
#
# $$ e(n, c) = (r+1)\,n - \binom{c+r}{c+1}. $$
#
# So 10 snapshots with $r = 4$ reach 1001 layers. <!-- arithmetic: math.comb(10 + 4, 10) == 1001 -->
# (If several are recorded at once, layers without an interior need 237 in the same 12 values. With one of 11 outputs, as in GPT-2 XL, 322 stay best.)
# <!-- claim: [min(cost for room, cost in checkpointing.frontier(checkpointing.Costs.uniform(100, interior=i)) if room <= 12 + i) for i in (0, 11)] == [237, 322] -->

# %%
for n, snapshots in [(10, 3), (100, 10), (1000, 10)]:
    formula = checkpointing.binomial_evaluations(n, snapshots)
    counted = sum(checkpointing.binomial(n, snapshots).evaluations)
    both = f"{formula} by formula, {counted} in the plan"
    print(f"{n:4} layers, {snapshots:2} snapshots: {both}")

# %%
reveal(
    "checkpointing/best-plan", evaluations=checkpointing.binomial_evaluations(100, 10)
)

# %% [markdown]
# ### Exercise 4.2 · Count the best plan (10 min, ●●○)
#
# Write the recurrence, and remember each result (memoize it): without that, the longer chains of the check do not end. `snapshots` counts $x_0$.


# %%
def fewest_evaluations(n: int, snapshots: int) -> int:
    raise NotImplementedError


# %%
check("checkpointing/fewest-evaluations", fewest_evaluations)

# %%
hint("checkpointing/fewest-evaluations", 1)

# %%
show(exercises.fewest_evaluations)

# %% [markdown]
# ## Further: what is the best plan for a real model?
#
# Real chains are not uniform: an embedding costs no FLOPs, a head makes scores as wide as the vocabulary. Take a GPT apart and measure every stage:

# %%
still = ModelConfig(
    num_layers=8, d_model=64, num_heads=4, d_ff=256, vocab_size=512, seq_len=64
)
config = dataclasses.replace(still, dropout=0.1)
model = GPT(config, generator=torch.Generator().manual_seed(0))
draw = torch.Generator().manual_seed(1)
tokens, targets = (torch.randint(512, (8, 64), generator=draw) for _ in range(2))
chain = checkpointing.stages(model, targets)
costs = checkpointing.costs(chain, tokens)
for which, i in {"first": 0, "second": 1, "last": -1}.items():
    stage = costs.stages[i]
    sizes = units.text(stage.output), units.text(stage.interior)
    amounts = f"output {sizes[0]}, interior {sizes[1]}"
    print(f"{which:6} stage: {units.text(stage.forward, 'FLOP')}, {amounts}")

# %% [markdown]
# The same recurrence works, with bytes in place of snapshots and one choice more: a stage may be *recorded* in the first sweep, where its interior is small or memory is plenty.
#
# Let $w_i$ be the FLOPs of one evaluation of stage i. You have to take stages $i \dots j$ backward, with R bytes of room besides $x_i$. Either record stage i at once; its interior and output are then held until the end. Or go on to some $x_m$, keep it, and come back:
#
# $$ C(i, j, R) = \min \begin{cases} w_i + C(i+1,\, j,\; R - \text{interior}_i - \text{output}_i) \\ \min_m\; \bigl[\, w_i + \dots + w_{m-1} + C(i,\, m-1,\; R) \\ \qquad\quad + C(m,\, j,\; R - \text{size}(x_m)) \,\bigr] \end{cases} $$
#
# With no stage left C is 0; where R is negative there is no plan. `frontier` solves it for all budgets at once (Beaumont et al. for one), and returns every trade worth making, as long as what is kept stays until its turn.

# %% [markdown]
# > The full step holds 33 MB of activations. With half of that, how much more do you compute, in percent of a forward pass?

# %%
predict("checkpointing/half-the-memory", percent=100)

# %%
trades = checkpointing.frontier(costs)
once = sum(stage.forward for stage in costs.stages)
n = len(chain)
marks = {}
for name, k in {"everything": 1, "3 segments": 3, "every stage": n}.items():
    fixed = checkpointing.segments(n, k).on(costs)
    marks[name] = fixed.peak, fixed.cost

most = trades[-1][0]  # bytes of the full step
guess = most / 2, once * (1 + predictions["checkpointing/half-the-memory"] / 100)
plots.trade_off(trades, once=once, marks=marks, guess=guess)

# %%
half = checkpointing.plan(costs, most // 2)
extra = half.on(costs).cost / once - 1
reveal("checkpointing/half-the-memory", percent=round(100 * extra))

# %% [markdown]
# Within half of the activations' memory a step costs 0.58 of a forward pass more, 19 % of a step's FLOPs: some stages are computed twice, the others once. (The plan may hold less than half: the trades are stairs.)
# So nothing forces you to checkpoint *all* layers, as most configurations do. Carry it out; compare gradients, FLOPs, bytes:

# %%
torch.manual_seed(2)
model.loss(tokens, targets).backward()
plain = [parameter.grad.clone() for parameter in model.parameters()]
model.zero_grad()

# %%
torch.manual_seed(2)
executed = checkpointing.run(chain, half, tokens)
predicted = half.on(costs)
gradients = [parameter.grad for parameter in model.parameters()]
equal = all(torch.equal(a, b) for a, b in zip(plain, gradients, strict=True))
same = executed.cost == predicted.cost, executed.peak == predicted.peak
print(f"gradients equal: {equal}; FLOPs and peak as predicted: {same}")
print("evaluations of each stage:", executed.evaluations)

# %%
title = "Within half of the activations: one mountain becomes three smaller ones"
plots.memory_timeline(executed.history, title=title)

# %% [markdown]
# Every gradient is equal to the bit, dropout included. Counted is what is *held between steps*; inside a step an operation needs temporary memory on top (lab 03).
#
# Lower the budget: the first sweep drops more and more, then the second leaves gaps, too.


# %%
least = checkpointing.smallest_budget(costs)


def plan_for(percent=50):
    budget = max(least, most * percent // 100)
    found = checkpointing.plan(costs, budget)
    extra = found.on(costs).cost / once - 1
    share = f"{units.text(budget)} of {units.text(most)}"
    title = f"{share}: {extra:.2f} extra forward passes"
    return plots.plan_maps({found.name: found.timeline}, until=60, title=title)


explore(plan_for, percent=[0, 13, 14, 15, 16, 20, 25, 30, 40, 50, 60, 70, 80, 90, 100])

# %% [markdown]
# ## How do you checkpoint without changing one bit?
#
# Plans move whole modules around. In a training loop you want less: *this function, please, without keeping its insides*. That is `checkpoint(fn, *args)`.
#
# Autograd asks for a place to put every tensor it saves. `checkpoint` hands out an empty slot instead and remembers the arguments. When the backward pass
# opens the first slot, the function runs again, and this time the slots are filled.

# %%
block = model.blocks[0]
x = torch.randn(4, 64, 64, requires_grad=True)
calls = {
    "as it is": lambda: block(x),
    "in checkpoint": lambda: checkpointing.checkpoint(block, x),
}
for name, call in calls.items():
    print(f"{name}: {units.text(measure.saved_activations(call, block).total)}")

# %% [markdown]
# What waits for the backward pass is the input alone: 4 · 64 · 64 numbers of 4 bytes.
#
# **The trap is dropout.** The second run must drop the *same* elements, or the gradient belongs to a function that was never evaluated. Here is a step with
# the trap open: the block runs again on whatever random numbers come next.


# %%
class Careless(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx, slope):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(block(x), slope)
        return x.grad


# %%
def gradient(call):
    torch.manual_seed(3)
    block.zero_grad()
    call(x).square().sum().backward()
    return block.feed_forward.up.weight.grad.clone()


right = gradient(block)
ways = {
    "careless": Careless.apply,
    "ours": lambda x: checkpointing.checkpoint(block, x),
}
ways["torch"] = lambda x: torch_checkpoint(block, x, use_reentrant=False)
{
    name: f"{(gradient(way) - right).norm() / right.norm():.1%}"
    for name, way in ways.items()
}

# %% [markdown]
# With p = 0.1 in one block the careless one is wrong by more than a fifth, and nothing complains. So `checkpoint` keeps the state of the random
# generators (5 kB on a CPU), sets it before the second run, and puts the newer state back afterwards. It does the same with autocast.
#
# Two more things that a second run can get wrong. A `BatchNorm` inside a checkpointed region updates its running statistics twice. And a function that does not
# do the same both times is caught only if it saves other shapes, other types or another number of tensors.
#
# ### Further: reentrant or not
#
# There are two ways to build `checkpoint`. The older one is an `autograd.Function` like `Careless`. Its backward pass starts another backward pass inside: it *reenters* autograd.
#
# A Function sees its tensor arguments, and not the weights inside `fn`. If the input needs no gradient (tokens, a frozen layer below, LoRA), its output needs none either, and the weights get nothing. With such an input, does the output need a gradient?

# %%
frozen = torch.randn(4, 64, 64)  # needs no gradient
{name: way(frozen).requires_grad for name, way in ways.items()}

# %% [markdown]
# Only "careless" is a Function. PyTorch's `use_reentrant=True` is one, too: its output needs no gradient either, and it warns: "None of the inputs have requires_grad=True. Gradients will be None".
#
# The newer way, ours and PyTorch's with `use_reentrant=False`, records the graph as usual and empties its slots with hooks. So it sees the weights, and its second run can stop early. Use it.

# %% [markdown]
# ### Exercise 4.3 · Write checkpoint (30 min, ●●●)
#
# `checkpoint(fn, x)` for a function of one tensor. The check looks at gradients (also those of weights inside `fn`, and also where `x` needs none), at the bytes that are kept, wherever they are, at the number
# of evaluations and their time, at dropout, and at two regions in a row. The hints lead to the older, shorter way, an `autograd.Function`; hooks are welcome, too.


# %%
def my_checkpoint(fn, x):
    raise NotImplementedError


# %%
check("checkpointing/checkpoint", my_checkpoint)

# %%
hint("checkpointing/checkpoint", 1)

# %%
show(exercises.Recomputed)

# %%
show(checkpointing.recompute._Region)

# %% [markdown]
# ## Further: how do you test a checkpoint?
#
# ### Exercise 4.4 · Bug hunt: the checkpoint that passes every test (15 min, ●●○)
#
# Three broken checkpoints are out there. One gives weights no gradient, one draws a new dropout mask, and one restores the generator for the second run and
# leaves it in the past, so that the next layers draw old numbers again. Each passes an ordinary test. Write `is_broken(checkpoint)` that catches all three
# and lets right ones pass. `checkpoint` is called as `checkpoint(fn, x)`.


# %%
def is_broken(checkpoint) -> bool:
    raise NotImplementedError


# %%
check("checkpointing/bug-hunt", is_broken)

# %%
hint("checkpointing/bug-hunt", 1)

# %%
show(exercises.is_broken)

# %% [markdown]
# ## What does it cost: 33 %, 30 or 40?
#
# Full recomputation is said to cost 33 %, or 30 to 40 %.
#
# A backward pass takes twice the FLOPs of a forward pass, so if every layer is computed once more, a step grows by
#
# $$ \frac{\text{one more forward}}{\text{forward} + \text{backward}} = \frac{1}{1 + 2} = 33\,\%. $$
#
# > PyTorch's FLOP counter, on the GPT above without dropout, every layer checkpointed: how many percent does it find?

# %%
predict("checkpointing/overhead", percent=33)


# %%
def flops(policy):
    net = checkpointing.apply(GPT(still), policy)
    with FlopCounterMode(display=False) as counter:
        net.loss(tokens, targets).backward()
    return counter.get_total_flops()


counted = {policy: flops(policy) for policy in checkpointing.POLICIES}
{policy: f"{each / counted['none'] - 1:.1%}" for policy, each in counted.items()}

# %%
more = counted["full"] / counted["none"] - 1
reveal("checkpointing/overhead", percent=round(100 * more, 1))

# %% [markdown]
# Not 33. Two things are missing. The *head* is not checkpointed, and in a small model it has its share of the forward pass. And the second run *stops
# early*: when the last saved tensor is there, the rest is not computed. The last thing a block saves is the input of its last product, `down`, so that
# product, a third of the layer's weights, is not computed again. `overhead` counts both, and each can be switched off; "stops early" is what was measured:

# %%
for early in (False, True):
    for policy in checkpointing.POLICIES[1:]:
        overhead = checkpointing.overhead(still, policy, early_stop=early)
        how = "stops early" if early else "to the end"
        print(f"{policy:10} {how:11} {overhead:.1%}")
dropped = checkpointing.overhead(config, "full")
print(f"full, with dropout after `down`: {dropped:.1%}")

# %% [markdown]
# The last line: with dropout after `down`, as in `config`, the second run has to reach its mask, and the saving is gone.
#
# ### Further: does a large model have 33 %?
#
# Two things lower the 33 %. The head is not computed again: its part of the forward pass grows with the vocabulary, and falls with width, layers and length. An early stop leaves out `down`: its part is smaller with SwiGLU, and with long sequences, where attention does most of the work. Both parts, and what is left:

# %%
sizes = {"gpt3-175b": (2048,), "llama-3.1-8b": (4096, 131072)}
sizes |= {"llama-3.1-405b": (8192,), "qwen2-0.5b": (4096,)}
for name, s in ((name, s) for name, lengths in sizes.items() for s in lengths):
    sized = dataclasses.replace(ModelConfig.named(name), seq_len=s)
    to_the_end, early = (
        checkpointing.overhead(sized, "full", early_stop=stop) for stop in (False, True)
    )
    head, down = 1 - 3 * to_the_end, 3 * (to_the_end - early)
    print(f"{name:15}{s:7} tokens: head {head:5.1%}, down {down:5.1%}", end="")
    print(f"; to the end {to_the_end:.1%}, early {early:.1%}")

# %% [markdown]
# So a model has 33 % if it recomputes to the end and its head is small. The same head of 128 000 words is 6 % of the forward pass with 8 billion parameters, and 0.5 % with 405 billion.

# %% [markdown]
# ### Further: time is not FLOPs
#
# Korthikanti et al. (table 4) timed one layer of a 22B model: 7.7 ms forward, 11.9 ms backward. So the backward pass takes 1.55 times as long as the forward, not twice, and one more forward weighs more:
#
# $$ \text{overhead} = \frac{1}{1 + \rho}, \quad \rho = \frac{\text{backward}}{\text{forward}}. $$

# %%
forward, backward = 7.7, 11.9  # milliseconds, table 4
timed = {"full": 27.2, "selective": 20.9}  # forward and backward together
both = forward + backward
print(f"predicted, full {forward / both:.1%}", end="; timed")
print("", *(f"{policy} {ms / both - 1:.1%}" for policy, ms in timed.items()))

# %% [markdown]
# The formula with the timed ratio gives 39.3 %, and the clock 38.8 %. Whoever says "30 to 40 %" has a $\rho$ between 2.3 and 1.5.
#
# **And the clock on your machine?** Take a narrow GPT and one eight times as wide, both with full recomputation and the early stop. Three numbers each: the extra FLOPs; what the formula makes of them with your machine's $\rho$; the extra seconds.

# %% tags=["nbval-ignore-output"]
for width, s, b in ((64, 64, 8), (512, 128, 2)):
    sized = dict(d_model=width, d_ff=4 * width, seq_len=s, num_layers=4)
    shape = dataclasses.replace(still, **sized)
    (forward, backward), full = rigs.checkpointing.clocked(shape, b, ("none", "full"))
    more, both = checkpointing.overhead(shape, "full"), forward + backward
    print(f"width {width:3}, {1000 * both:.0f} ms: FLOPs {more:.0%}", end=", ")
    print(f"rho {backward / forward:.1f}, so {3 * more * forward / both:.0%}", end=", ")
    print(f"by the clock {sum(full) / both - 1:.0%}")

# %% [markdown]
# In the wide model products fill more of the time, and the clock comes nearer to the FLOPs. In the narrow one norms, softmax, GELU and Python, which no FLOP counter sees, weigh more.

# %% [markdown]
# ## Further: which part is cheapest to compute again?
#
# By Korthikanti's count one layer holds $34\,sbh$ bytes, and $5\,a s^2 b$ more for the *core* of attention: the scores, and what softmax and dropout make of them.
#
# > GPT-3: a = 96, s = 2048, h = 12 288. If only the attention core is computed again, what part of the activations goes away?

# %%
predict("checkpointing/selective", percent=30)

# %%
gpt3 = ModelConfig.named("gpt3-175b")
s, h, a = gpt3.letters("s h a")
core = 5 * a * s / h  # 5as²b in units of sbh
reveal("checkpointing/selective", percent=round(100 * core / (34 + core), 2))

# %% [markdown]
# 70 % of the memory goes away, with dropout and plain attention. And the price? The core's FLOPs are the two products of attention, s/6h of the products with weights: 2.8 %. To compute them once more adds to a step:

# %%
{
    how: f"{checkpointing.overhead(gpt3, 'selective', early_stop=early):.2%}"
    for how, early in {"to the end": False, "stops early": True}.items()
}

# %% [markdown]
# That is *selective* recomputation, the paper's proposal; FlashAttention has since moved it into the kernel (lab 06). On our GPT it is a policy, and lab 03's formula predicts what each policy keeps:


# %%
def saved(policy):
    net = checkpointing.apply(GPT(config), policy)
    return measure.saved_activations(lambda: net.loss(tokens, targets), net)


def formula(policy):
    train = TrainConfig(
        micro_batch=8, global_batch=8, precision="fp32", checkpointing=policy
    )
    return memory.activations(config, train)


{
    policy: formula(policy).diff(saved(policy)).unexplained
    for policy in checkpointing.POLICIES
}

# %%
kept = {policy: saved(policy).total for policy in checkpointing.POLICIES}
print({policy: units.text(each) for policy, each in kept.items()})
stages = checkpointing.plan(costs, kept["selective"]).on(costs).cost / once - 1
core = 3 * checkpointing.overhead(config, "selective", early_stop=False)
print(f"selective: {core:.2f} of a forward pass more; whole stages: {stages:.2f}")

# %% [markdown]
# With the memory of *selective*, the best plan of whole stages computes several times as much again. *Selective* takes what is cheap to compute, and a whole stage has the expensive with it.
#
# Is the core so large because the model is large? Divide both terms by sbh: $5s/d$ stands against 34, where $d = h/a$ is the width of a head. Neither the width of the model nor its number of layers is in it. With heads 64 wide the two terms are equal at 435 tokens. <!-- arithmetic: round(34 * 64 / 5) == 435 -->
# Size changes the price: at s/6h of the products with weights, a wide model computes the core again for less.
#
# All these bytes are counted at the *end of the forward pass*. With "full", the interior of one layer comes on top during the backward pass. In the optimizer's step recomputation does not help: the activations are gone.

# %% [markdown]
# ## In practice
#
# - **PyTorch.** `torch.utils.checkpoint.checkpoint(fn, x, use_reentrant=False)`, early stop included; `checkpoint_sequential` cuts a chain into k
#   segments and leaves out the last, as here. `create_selective_checkpoint_contexts` takes a policy *per operation*: keep products, recompute the rest.
#   With `torch.compile`, `torch._functorch.config.activation_memory_budget` (0 … 1) lets a solver choose.
# - **FSDP2.** Wrap blocks with `apply_activation_checkpointing(model, checkpoint_wrapper_fn=checkpoint_wrapper, check_fn=…)` first, call `fully_shard` after.
# - **torchtitan 0.2.2.** `activation_checkpoint.mode` is `none`, `full`, `selective` (per operation) or `memory_budget` (needs the compiler).
# - **Megatron-LM.** `--recompute-granularity full` with `--recompute-method uniform` (segments of `--recompute-num-layers`) or `block` (only the first
#   layers of each stage, the rest kept: what you saw within half the memory); `--recompute-granularity selective` with `--recompute-modules core_attn …`.
# - **DeepSpeed.** `"activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": true, …}`: kept values are sharded over tensor-parallel
#   ranks, or moved to the host's memory, as PyTorch's `torch.autograd.graph.save_on_cpu` does. An H100 at 40 % of its peak, $F = 4 \cdot 10^{14}$ FLOP/s,
#   computes $24h^2$ FLOPs per token in a layer's forward pass. Meanwhile a link of $\text{bw} = 64$ GB/s moves the layer's input, 2h bytes, if $h \ge F/(12\,\text{bw})$, about 500; all that a layer with fused attention records, 32h bytes, from about 8200 on.
#   <!-- arithmetic: [round(size * 0.4 * 989e12 / (24 * 64e9), -2) for size in (2, 32)] == [500, 8200] -->
# - **Hugging Face Transformers.** `gradient_checkpointing=True`: every layer, as in most libraries, also the last one, whose backward pass comes next. On 8 layers an eighth of the extra work is unnecessary.
#
# **On a real cluster** start with nothing, then recompute what is cheap per byte (norms, activation functions, dropout; without fused attention its core first), then every k-th layer, and full last.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **About 33 GB of checkpoints for a 100B model** (ZeRO, section 6.1; section 3.2 has 60). One fp16 input per layer, 125 layers of width 8192, 32 <!-- erratum: ACT-76 -->
# sequences of 1024:

# %%
units.text(2 * 32 * 1024 * 8192 * 125)

# %% [markdown]
# The stated 33 are half of it.
#
# ### True under a condition
#
# **"Activation checkpointing can reduce activation memory by about 50%, with a 33% recomputation overhead."** (lecture slides on multi-GPU training). It can: half of the memory cost 19 % of a step above. Other plans go further: the slides' own 60 and 8 GB are 87 % apart. <!-- arithmetic: round(100 * (60 - 8) / 60) == 87 --> <!-- erratum: S4-009 -->
#
# **Selective recomputation costs 2.7 % more FLOPs** (Korthikanti, equations 7 and 8, for GPT-3). One more forward pass of the two attention products is the 0.9 % above, <!-- erratum: ACT-40 -->
# $4bs^2h$ per layer. Equation (8) adds $12bs^2h$, three times that: true if their backward pass is repeated as well.
# Softmax and dropout are repeated as well: a FLOP count does not see them, and the clock above does, 6.6 % for a layer of the 22B model.

# %% [markdown]
# ## Summary
#
# > - With nothing kept, n layers take $n(n+1)/2$ evaluations: 55 for 10, 5050 for 100.
# >   <!-- claim: [sum(checkpointing.keep_nothing(n).evaluations) for n in (4, 10, 100)] == [10, 55, 5050] -->
# > - $\sqrt n$ equal segments hold $2\sqrt n$ values for less than one extra forward pass: 24 instead of 145 for 144 equal layers, and 18 where segments get shorter towards the end. What layers record besides their output makes shorter segments better.
# >   <!-- claim: checkpointing.segments(144, 12).on(checkpointing.Costs.uniform(144)).peak == 24 -->
# > - The best plan for equal layers that are recorded one at a time is binomial: 25 evaluations for 10 layers with 3 snapshots, 322 for 100 with 10, 4636 for 1000 with 10.
# >   <!-- claim: [checkpointing.binomial_evaluations(*case) for case in ((10, 3), (100, 10), (1000, 10))] == [25, 322, 4636] -->
# > - For unequal layers and a budget in bytes, dynamic programming finds the best plan of whole layers, as long as what is kept stays until its turn. With half of the activations our GPT computes 0.58 of a forward pass more, and 20 equal layers with an interior of 30 outputs 0.55.
# >   <!-- claim: round(min(cost for room, cost in checkpointing.frontier(checkpointing.Costs.uniform(20, interior=30)) if room <= 621 / 2) / 20 - 1, 2) == 0.55 -->
# > - `checkpoint` keeps the arguments alone and changes no bit, if the second run sees the random state of the first.
# >   <!-- claim: measure.saved_activations(lambda: checkpointing.checkpoint(torch.exp, torch.ones(8, requires_grad=True)), torch.nn.Module()).total == 32 -->
# > - Full recomputation adds a third of the FLOPs if it runs to the end (GPT-3: 33 %; with PyTorch's early stop and no dropout 22 %), and about 39 % of the time where the backward pass is 1.55 times the forward.
# >   <!-- claim: [round(checkpointing.overhead(config.ModelConfig.named("gpt3-175b"), "full", early_stop=e), 3) for e in (False, True)] == [0.332, 0.224] -->
# > - For GPT-3 with dropout and plain attention the core is 70 % of a layer's activations, and to compute it again adds 0.9 % to the FLOPs. The first number depends on s/d alone, the second on s/h.
# >   <!-- claim: (round(1 - memory.korthikanti(b=1, s=2048, h=12288, a=96, checkpointing="selective").total / memory.korthikanti(b=1, s=2048, h=12288, a=96).total, 2), round(checkpointing.overhead(config.ModelConfig.named("gpt3-175b"), "selective", early_stop=False), 3)) == (0.70, 0.009) -->
#
# Next: [lab 05](05_accumulation.ipynb) leaves the layers alone and cuts the batch instead.

# %% [markdown]
# ## References
#
# - T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training deep nets with sublinear memory cost*, arXiv:1604.06174 (2016): segments, √n, recursion.
# - A. Griewank, A. Walther, *Algorithm 799: revolve*, ACM Transactions on Mathematical Software 26 (2000): the binomial optimum.
# - O. Beaumont, L. Eyraud-Dubois, J. Herrmann, A. Joly, A. Shilova, *Optimal checkpointing for heterogeneous chains: how to train deep neural networks with
#   limited memory*, arXiv:1911.13214 (2019).
# - V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, arXiv:2205.05198 (2022): selective recomputation, table 4.
# - S. Rajbhandari et al., *ZeRO*, arXiv:1910.02054 (2020), sections 3.2 and 6.1. D. Narayanan et al., *Megatron-LM on GPU clusters*, arXiv:2104.04473
#   (2021), section 3.5: how many checkpoints.
# - PyTorch documentation of `torch.utils.checkpoint`; `torchtitan/distributed/activation_checkpoint.py`; arguments of Megatron-LM and DeepSpeed, to mid-2026; torchtitan 0.2.2.
