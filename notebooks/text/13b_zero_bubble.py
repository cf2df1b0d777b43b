# %% [markdown]
# # 13b · Fill the bubble
#
# **1F1B leaves every rank idle for p − 1 forward and backward passes. Which work can be moved there, how much of the bubble goes, and what does each step of it cost in memory?**
#
# *90 min, and 10 further · before this: lab 13a · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - move half of the backward pass without changing a gradient (exercise 13.4, a bug hunt),
# - place that half where ranks would wait, with no more micro-batches held than before, and know what that costs in bytes (exercise 13.5).

# %% [markdown]
# ## Setup

# %%
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributed import pipelining
from torch.utils.flop_counter import FlopCounterMode

from labutils import data_parallel, measure, pipeline, schedule, tensor_parallel
from labutils import predict as formulas
from labutils.checkpointing import apply as checkpointed
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.schedule import Durations, simulate
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.editor import LEVELS, Editor
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# A backward pass computes two things: the gradient of its input, for which the rank before waits, and those of its weights, for which nobody waits until the optimizer. Lab 13a kept them
# together. From here on **B is the first half only, and W the second**. Each takes one unit. 1F1B runs them in one piece of two units:

# %%
plots.gantt(simulate(schedule.one_f_one_b(4, 6)))

# %% [markdown]
# White is idle. Filling the bubble is **running W later, in those places**, at the price of keeping what it needs.

# %% [markdown]
# ## Can a backward pass be cut in two?
#
# For a linear layer $Y = XW^\mathsf{T}$ it is two products that do not need each other:
#
# $$ \text{B:}\ \ \frac{\partial \ell}{\partial X} = \frac{\partial \ell}{\partial Y}\,W, \qquad \text{W:}\ \ \frac{\partial \ell}{\partial W} = \Bigl(\frac{\partial \ell}{\partial Y}\Bigr)^{\!\mathsf{T}} X. $$
#
# The plainest way is to ask autograd twice, first for the input, then for the weights. How many FLOPs is that, in units of the forward pass? An ordinary backward pass is 2.

# %%
predict("backward-in-two/flops", forwards=2)

# %%
sizes = dict(num_layers=8, d_model=64, num_heads=4, d_ff=256)
config = ModelConfig(**sizes, vocab_size=128, seq_len=32)


def model():
    return GPT(config, generator=torch.Generator().manual_seed(0)).double()


def flops(fn):
    with FlopCounterMode(display=False) as counter:
        result = fn()
    return counter.get_total_flops(), result


stage = pipeline.split(model(), 4)[1]
x = torch.randn(1, 32, 64, dtype=torch.float64, requires_grad=True)
forward, y = flops(lambda: stage(x))
dy, weights = torch.ones_like(y), list(stage.parameters())

# %%
first, _ = flops(lambda: torch.autograd.grad(y, x, dy, retain_graph=True))
second, twice = flops(lambda: torch.autograd.grad(y, weights, dy))
reveal("backward-in-two/flops", forwards=round((first + second) / forward, 2))

# %% [markdown]
# The second call walks the whole graph again: to reach a weight it computes the gradients of all that lies behind it. What it adds, B once more, is longer than the W that you wanted to move.
#
# So let each linear layer compute its input's gradient when autograd comes by, and write down the other product as a debt. `Later` does that to every `F.linear` of the forward pass inside it;
# `pay` computes what is owed.

# %%
owed = []
with pipeline.Later(owed):
    forward, y = flops(lambda: stage(x))
b, _ = flops(lambda: y.backward(dy))
w, _ = flops(lambda: pipeline.pay(owed))
{"B": round(b / forward, 2), "W": round(w / forward, 2)}

# %%
same = [torch.equal(p.grad, grad) for p, grad in zip(weights, twice, strict=True)]
all(same)

# %%
show(pipeline.Later)

# %% [markdown]
# Together they are the 2 of an ordinary backward pass. B is a little more than W: the two products of attention have no weight, so both halves of their backward pass belong to B. They are
# 8 % of this forward pass, which makes B 1 + 0.08 and W 1 − 0.08.
#
# ### Exercise 13.4 · Bug hunt: the weight gradients that came too late (12 min, ●●○)
#
# This backward pass of a chain of linear layers passed its test, which had one layer. In a pipeline W may run after the forwards and B of later micro-batches, and a weight collects all of them.


# %%
def my_backward(
    weights: list[Tensor], inputs: list[Tensor], dy: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """The gradient of the first layer's input, and a function W, which adds to .grad of
    each weight. Layer i computes y = x @ weights[i].mT, and its x is inputs[i]."""
    owed = []
    for x, weight in zip(reversed(inputs), reversed(weights), strict=True):
        grad, dy = dy, dy @ weight

        def pay():
            weight.grad = grad.mT @ x

        owed.append(pay)
    return dy, lambda: [pay() for pay in owed]


# %%
check("pipeline/late-weights", my_backward)

# %%
hint("pipeline/late-weights", 1)

# %%
show(pipeline.pay)

# %% [markdown]
# ## Where does W go?
#
# Until W has run, the rank keeps the inputs of its layers and the gradients of their outputs: where the two are apart, memory is freed by W and not by B. So a W that waits costs memory, and lab 13a says which ranks
# have some to spare.
#
# ### Exercise 13.5 · Place W (10 min, ●●○)


# %%
def my_order(rank: int, p: int, m: int) -> list[str] | str:
    """The operations "F0", "B0", "W0", … of `rank` of p, in order.

    They are a list, or one line of text with blanks between them. No rank holds more
    than p micro-batches at once. With one unit of time for each operation, and m ≥ p,
    a step takes 3m + p − 1.
    """
    raise NotImplementedError


# %%
check("pipeline/place-w", my_order)

# %%
hint("pipeline/place-w", 1)

# %%
show(schedule.zb_h1)

# %%
h1 = schedule.zb_h1(4, 8)
plots.gantt(simulate(schedule.one_f_one_b(4, 8)), simulate(h1))

# %% [markdown]
# This is *ZB-H1* of Qi et al. (2023). A third of the bubble stays, if F, B and W take equally long: in general (p − 1)(F + B − W), as long as W is the shortest. The last rank gets its first input at (p − 1)F and has p W left when its last B ends, at (p − 1)F + m(F + B) + (m − p)W. Then p − 1 B go back to rank 0, which has one W left: in all m(F + B + W) + (p − 1)(F + B − W). Formula and simulation, for
# other times:

# %%
times = Durations(F=1.0, B=1.2, W=0.8)
idle = simulate(h1, times).idle(0)
{"formula": schedule.bubble("zb_h1", 4, 8, times), "simulated": round(idle, 9)}

# %% [markdown]
# On real ranks: loss and gradients are those of the whole model, and autograd kept as many graphs as the simulator says.

# %%
draw = torch.Generator().manual_seed(1)
tokens = torch.randint(128, (8, 2, 1, 32), generator=draw)
batches = [tuple(pair) for pair in tokens]
whole = model()
whole.loss(*tokens.flatten(2).transpose(0, 1)).backward()
wanted = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}


def step(plan, **options):
    """A function of a rank, which runs its part of one step."""

    def run(rank):
        stages = pipeline.local(pipeline.split(model(), plan.stages), plan, rank.rank)
        return pipeline.run(stages, plan, rank.comm("pp"), batches, **options), stages

    return run


# %%
def off(stages):
    """Norm of the error of all gradients, relative to the norm of the gradients."""
    pairs = [
        (p.grad.flatten(), wanted[name.partition(".")[2]].flatten())
        for rank in stages
        for name, p in rank.named_parameters()
    ]
    found, right = (torch.cat(side) for side in zip(*pairs, strict=True))
    return ((found - right).norm() / right.norm()).item()


# %%
world = World(Mesh(pp=4))
runs, stages = zip(*world.run(step(h1)), strict=True)
held = [max(run.in_flight) for run in runs]
simulated = [h1.peak(rank) for rank in range(4)]
{"equal": off(stages) < 1e-10, "kept": held, "simulated": simulated}

# %%
sizes = dict(micro_batch=1, global_batch=h1.micro_batches)
train = TrainConfig(**sizes, precision="fp64", schedule=h1)
sent = [formulas.sent(config, train, Mesh(pp=4), rank) for rank in range(4)]
sum(sent, Ledger()).only(axis="pp").diff(world.ledger).unexplained

# %% [markdown]
# ## Is that the same memory?
#
# In micro-batches it is: no rank holds more than p, as rank 0 of 1F1B does. In bytes? GPT-2 on four ranks, cut by time, so that the last one has the head and no block (lab 13a), eight micro-batches of one sequence of 1,024 tokens, by dry run: all that a rank holds at its fullest beyond weights and their gradients.
#
# > Under 1F1B the last rank holds 0.62 GB. How many GB under ZB-H1?

# %%
predict("h1/last-rank", GB=0.62)

# %%
gpt2, dry = ModelConfig.named("gpt2"), World(Mesh(pp=4), engine="dry")


def beyond(rank, plan, layers=None, policy="none"):
    """GB at the fullest moment of a step, beyond weights and their gradients."""
    whole = checkpointed(GPT(gpt2, attention="sdpa"), policy)
    stages = pipeline.split(whole, plan.stages, layers)
    stages = pipeline.local(stages, plan, rank.rank)
    data = [(torch.zeros(1, 1024, dtype=torch.long),) * 2] * plan.micro_batches
    run = partial(pipeline.run, stages, plan, rank.comm("pp"), data)
    peak = measure.history(run, stages).peak.ledger.total
    return (peak - 2 * sum(p.nbytes for p in stages.parameters())) / 1e9


for plan in (schedule.one_f_one_b(4, 8), h1):
    most = [dry.run(beyond, plan, rank=rank) for rank in (0, 3)]
    print(f"{plan.name:12} rank 0: {most[0]:.2f} GB, rank 3: {most[1]:.2f} GB")
reveal("h1/last-rank", GB=round(most[1], 2))

# %% [markdown]
# The W of the head waits with the head's input *and the gradient of its output*, the logits: b·s·v numbers, 206 MB for each micro-batch. So the last rank, which had room under 1F1B, becomes the fullest. (Rank 0 delays no W, and holds more as well: from each B to its W it keeps the gradients of its layers' outputs.) How many W of the last rank should wait? Let it be q at most, and all else as in ZB-H1:


# %%
def waiting(q):
    """ZB-H1 whose last rank lets at most q of its W wait."""
    last, owed = [], []
    for op in schedule.one_f_one_b(4, 8).ranks[3]:
        last.append(op)
        owed += [op._replace(kind="W")] * (op.kind == "B")
        last += [owed.pop(0)] if len(owed) > q else []
    return replace(h1, ranks=(*h1.ranks[:3], (*last, *owed)))


for q in range(4):
    plan = waiting(q)
    held, takes = dry.run(beyond, plan, rank=3), simulate(plan).makespan
    print(f"q = {q}: {held:.2f} GB, a step of {takes} units")

# %% [markdown]
# Each W that waits on the last rank buys one unit of time (if all stages take equally long), and costs the logits of one micro-batch. (On a last rank that has blocks, too, the head's own W could be paid at once and those of the blocks alone be put off: `Later` makes no such difference.)
#
# And where blocks recompute (lab 04)? Rank 2 under 1F1B and under ZB-H1:

# %%
for said, policy in {"kept": "none", "recomputed": "full"}.items():
    plans = schedule.one_f_one_b(4, 8), h1
    held = [dry.run(beyond, plan, None, policy, rank=2) for plan in plans]
    print(f"{said:11} {held[0]:.2f} GB under 1F1B, {held[1]:.2f} GB under ZB-H1")

# %% [markdown]
# **Under ZB-H1 recomputation saves a fifth there, where it saves three quarters under 1F1B.** What B has computed again stays until W.

# %% [markdown]
# ## What stops the rest?
#
# *ZB-H2* runs twice as many forwards first, and waits twice as long with W.
#
# > On four ranks with eight micro-batches, how much shorter is a step of ZB-H2, which ends in a barrier, than one of ZB-H1?

# %%
predict("h2/shorter", percent=10)

# %%
h2 = schedule.zb_h2(4, 8)
shorter = 1 - simulate(h2).makespan / simulate(h1).makespan
reveal("h2/shorter", percent=100 * shorter)

# %% [markdown]
# Nothing, as long as B and W take equally long, and a forward is no shorter. On a line of stages the last rank waits p − 1 forwards for its first input, whatever the order, and has m(F + B + W) to do after that: a step that ends in a barrier takes
# at least (p − 1)F + m(F + B + W), here 3m + p − 1 units, which is what ZB-H1 takes. With the B and W counted above, and others:

# %%
for b, w in ((1.0, 1.0), (1.08, 0.92), (1.3, 0.7), (1.6, 0.4), (1.8, 0.2)):
    times = Durations(F=1.0, B=b, W=w)
    shorter = 1 - simulate(h2, times).makespan / simulate(h1, times).makespan
    print(f"B {b:.2f}, W {w:.2f}: ZB-H2 is {shorter:.1%} shorter")

# %% [markdown]
# Where B is somewhat longer than W, ZB-H2 still takes the least of 27 units, and ZB-H1 no longer does: 6 % is the most of these five, and with more micro-batches they fall. With a W much shorter than B neither has enough of it to fill the bubble. In the paper ZB-H2 is idle for (p − 1)(F + B − 2W), without a barrier: not at all for equal times.
#
# The barrier stands before the optimizer's update, O, here of one unit: clipping needs the norm of all ranks' gradients, loss scaling the test for inf. Take it away. Each rank updates as
# soon as its own W are done, rank 0 begins its next step while rank 3 still works at this one, and what counts is the *period*, the longest that one rank takes from its first operation to
# the end of its update:

# %%
update = Durations(O=1)
plots.gantt(simulate(h1, update), simulate(h2, update), barrier=False)

# %%
for plan in (h1, h2):
    run = simulate(plan, update)
    print(f"{plan.name}: {run.makespan} with a barrier before O, {run.period} without")

# %% [markdown]
# With equal times ZB-H2 now has no bubble at all: 3m and the update. Rank 0 holds 2p − 1 micro-batches for it. So "zero bubble" holds for updates that wait for nobody; the paper lets every rank update
# without waiting, and takes the update back in the rare case that clipping or inf asks for it (*post-update validation*).
#
# Between the two lies a choice. Give a limit on memory, and search for the shortest period, on eight ranks with 24 micro-batches and equal times:

# %%
limits = range(8, 17)
named = {"ZB-H1": schedule.zb_h1(8, 24), "ZB-H2": schedule.zb_h2(8, 24)}


def idle_share(plan):
    return 100 * simulate(plan).period_bubble_fraction


plots.curves(
    list(limits),
    searched=[idle_share(schedule.zb_auto(8, 24, limit)) for limit in limits],
    measured={
        name: ([each.peak(0)], [idle_share(each)]) for name, each in named.items()
    },
    xlabel="limit on micro-batches that a rank holds",
    ylabel="bubble fraction, no barrier (%)",
    title="Each micro-batch more buys a piece of the bubble, until none is left",
)

# %% [markdown]
# **Measured on GPUs.** Bubbles of GPTs on 8 to 32 GPUs, of the whole time (Qi et al., Table 5, m = 3p). Below them what the formulas say: first with equal times, then with the F, B and W that the authors measured for these models, in µs (the list of settings in their `v_schedule.py`):

# %%
clocked = {
    "PZ-01": (18_522, 18_086, 9_337),
    "PZ-04": (29_718, 29_444, 19_927),
    "PZ-07": (11_347, 11_248, 8_132),
    "PZ-10": (10_419, 10_207, 7_715),
}


def bubbles(p, f, b, w):
    """Of 1F1B, ZB-H1 and ZB-H2 without a barrier, of the whole time of 3p batches."""
    idle = [(p - 1) * (f + b + k * w) for k in (1, -1, -2)]
    return [each / (3 * p * (f + b + w) + each) for each in idle]


for row, times in clocked.items():
    case, paper = rigs.pipeline.published_bubbles(row)
    p = int(re.search(r"p=(\d+)", case)[1])
    print(case, "| searched, in 2p micro-batches:", paper["ZB-2p"])
    names = "1F1B", "ZB-H1", "ZB-H2"
    lines = {"measured": [paper[name] for name in names]}
    lines |= {"equal times": bubbles(p, 1, 1, 1), "their times": bubbles(p, *times)}
    for said, three in lines.items():
        pairs = zip(names, three, strict=True)
        print(f"    {said:11}", *(f"{name} {each:.3f}" for name, each in pairs))

# %% [markdown]
# With equal times all are measured larger, by 1 to 11 points of the whole time. Under ZB-H1 and ZB-H2 the cause of most of that is W: on these GPUs it takes a half to three quarters of B. (By FLOPs it would take more: measure it.) 1F1B waits the same share whatever W takes of a backward pass. With their times the formulas miss what is measured by up to 0.02; the rest may be messages. What was searched for with these times in hand comes near zero in three of the four settings.

# %% [markdown]
# ## Does it need the memory?
#
# Give each rank two chunks, as in lab 13a, but let the second one come *back*: stages 0 to 3 on ranks 0 to 3, stages 4 to 7 on ranks 3 to 0, a V. Rank 0 then has the first stage and the
# last, so a micro-batch's first backward begins where its forward began.

# %%
zb_v = schedule.zb_v(4, 8)
half = Durations(F=0.5, B=0.5, W=0.5)
plots.gantt(simulate(zb_v, half), simulate(h2), barrier=False, ahead=0.1)

# %%
run = simulate(zb_v, half)
{"period": run.period, "ideal": 8 * 3, "holds": [zb_v.peak(r) / 2 for r in range(4)]}

# %% [markdown]
# The period of ZB-H2, and no rank holds more than the p micro-batches of 1F1B's rank 0, for u = 2 chunks and equal times. Embedding and head stand on one rank: if they share a matrix, nothing has to be exchanged for it.
#
# Are the times equal? In GPT-2 the head is as long as 4.5 blocks. In the V rank 0 has the embedding, no block and the head, so that all ranks have nearly the same work. ZB-V's order was made for equal stages. Beside it stands one that is made with these times: each rank, whenever it is free, begins the first thing it can, B before F before W. Periods in forward passes of a block, and what the fullest rank holds:

# %%
cuts = {"line": (4, 4, 4, 0), "V": (0, *[2] * 6, 0)}
takes = {
    cut: [12 * n / pipeline.stage_flops(gpt2, (12, 0))[0] for n in flops]
    for cut, flops in ((cut, pipeline.stage_flops(gpt2, cuts[cut])) for cut in cuts)
}
planned = rigs.pipeline.planned(zb_v.places[0], 8, takes["V"], cap=8, room=2)
for plan, cut in ((h2, "line"), (zb_v, "V"), (planned, "V")):
    times = takes[cut]
    run = simulate(plan, Durations(F=times, B=times, W=times))
    held = max(dry.run(beyond, plan, cuts[cut], rank=rank) for rank in (0, 3))
    least = f"without idling {8 * 3 * sum(times) / 4:.0f}"
    print(f"{plan.name:8} period {run.period:.0f}, {least}; {held:.2f} GB")

# %% [markdown]
# **The head spoils ZB-V's order, and not the V.** In ZB-V each micro-batch waits for a stage of 4.5 among stages of 2. The planned order holds no more micro-batches and takes 119; it pays in bytes, since more W of the head wait.
#
# No order of this cut takes less. Rank 0 has no block: it waits until the first micro-batch has been through all twelve, and then it has 24 times 4.5 to do. The last rank of ZB-H2 does as much, but begins its step after that wait, and takes 107. With a barrier ZB-H2 takes 119, too.
#
# So a V wants equal *stages*, and not equal ranks. In Llama-2-7B the head is as long as 0.6 of a block, and the condition is easy to meet.
#
# **One channel, two kinds of messages.** In a V rank 0 sends rank 1 the forwards of stage 0 *and* the backwards of stage 7. If each rank receives in the order in
# which *it* needs them, what happens?

# %%
swapped = world.run(step(zb_v, messages="unmatched"))
matched = world.run(step(zb_v))
[f"{off(stages for _, stages in results):.1%}" for results in (swapped, matched)]

# %% [markdown]
# No error, no hang, and a wrong gradient: some ranks took another message than they thought. Received in the *sender's* order, early ones kept, all is right. All messages have one
# shape, so only a test of values against one device sees this.
#
# *DualPipe* (DeepSeek-V3) sends micro-batches in from both ends of a line, and runs a forward of one direction and a backward of the other *at once*, so that each computes while the other's
# messages travel, such as those of expert parallelism (lab 12). *DualPipeV* does the same with the two legs of a V. That pays if the pair takes less time than its parts:

# %%
shown = Durations(F=0.5, B=0.5, W=0.5, fused=1.1)
plots.gantt(simulate(schedule.dualpipe_v(4, 8), shown))

# %%
dual = schedule.dualpipe_v(4, 12)
v = simulate(schedule.zb_v(4, 12), half).period
for pair in (1.5, 1.3, 1.1):
    both = simulate(dual, Durations(F=0.5, B=0.5, W=0.5, fused=pair)).period
    print(f"a pair takes {pair}; a step: DualPipeV {both:.1f}, ZB-V {v:.1f}")

# %% [markdown]
# "A pair" is F of one micro-batch with B and W of another. If it takes its parts' 1.5, DualPipeV is p − 1 units longer. It pays where a pair is shorter than its parts by (p − 1)/(2m − p − 2) units, more often with many micro-batches: here from 1.33 down, with m = 24 from 1.43. (`pipeline.run` has one device per rank and runs such pairs one after the other, F first: the same
# gradients, and no gain.)
#   <!-- claim: all(abs(schedule.simulate(schedule.dualpipe_v(p, m), schedule.Durations(0.5, 0.5, 0.5, fused=1.5 - (p - 1) / (2 * m - p - 2))).period - 3 * m) < 1e-9 for p, m in ((4, 12), (4, 24), (8, 24))) == True -->

# %% [markdown]
# **Held under every schedule** of the two labs, by GPT-2 cut by FLOPs: micro-batches and, beyond weights and their gradients, GB, on rank 0 and on rank 3. No rank between them holds more than the fuller of the two:

# %%
makers = schedule.gpipe, schedule.one_f_one_b, schedule.eager_one_f_one_b
makers += schedule.interleaved, schedule.zb_h1, schedule.zb_h2
makers += schedule.interleaved_zb, schedule.zb_v, schedule.dualpipe_v
print("                 micro-batches        GB on rank 0 and 3")
for make in makers:
    plan, ends = make(4, 8), (0, 3)
    count = [plan.peak(rank) * 4 / plan.stages for rank in ends]
    held = [dry.run(beyond, plan, rank=rank) for rank in ends]
    print(f"{plan.name:18} {count[0]} {count[1]}   {held[0]:.2f} {held[1]:.2f} GB")

# %% [markdown]
# Four of them hold 4 micro-batches on their fullest rank, and from 0.83 to 1.67 GB: bytes follow the head, and whether its W waits. ZB-H2 with 7 holds about as much as GPipe with 8.

# %% [markdown]
# Place schedules of this lab by hand, and run them on ranks. Here are levels 4 to 8 (the first three are in lab 13a). Each has goals, and a finished board says which one was missed. Level 5 counts bytes: find the W of the last rank that must not wait.

# %%
Editor(LEVELS[3:])

# %% [markdown]
# ## Further: does it still compose?
#
# Pipeline, data and tensor parallelism on a mesh of 2 × 2 × 2: `parallelize`, `split`, `run`, then the average over replicas.


# %%
def three_axes(rank):
    dp, tp = rank.comm("dp"), rank.comm("tp")
    plan = schedule.zb_v(2, 4)
    net = tensor_parallel.parallelize(model(), tp)
    stages = pipeline.local(pipeline.split(net, 4), plan, rank.comm("pp").rank)
    mine = batches[4 * dp.rank :][:4]
    loss = partial(tensor_parallel.cross_entropy, comm=tp)
    pipeline.run(stages, plan, rank.comm("pp"), mine, loss=loss)
    data_parallel.average_gradients(stages, dp)
    return {
        name.partition(".")[2]: parameter.grad
        for name, parameter in stages.named_parameters()
    }


# %%
def shares(rank):
    """One device's gradients, in the place of weights, which are cut for this rank."""
    net = model()
    net.load_state_dict(wanted)
    tensor_parallel.parallelize(net, rank.comm("tp"))
    return dict(net.named_parameters(remove_duplicate=False))


grid = World(Mesh(pp=2, dp=2, tp=2))
right, found = grid.run(shares), grid.run(three_axes)
errors = [
    (grad - own[name]).abs().max().item()
    for own, table in zip(right, found, strict=True)
    for name, grad in table.items()
]
len(errors), {"equal to 1e-12": max(errors) < 1e-12}

# %% [markdown]
# All gradients of all ranks are those of one device. With ZeRO, `zero.Optimizer(…, level=1)` takes the place of the average. `replicate` and `zero.shard` reduce after a backward pass; where W is
# apart `run` refuses them, since half a backward pass has not all gradients. A gradient is whole after its stage's last W, which ZB-H1 runs last of all: an average over replicas then has no work of its rank left to hide behind. Of the bytes that a step sends, the pipeline's are the fewest. (In a step of so few tokens: those of `dp` do not grow with them, the other two do.)

# %%
sent = grid.ledger.by("axis")
sent["tp"] -= grid.ledger.only(name="broadcast").total  # of the first weights, once
sent

# %% [markdown]
# ## Further: play with it
#
# Which schedules have no bubble left when all three take equally long, and which when W is half as long, or half as long again? What does a barrier change?

# %%
orders = {
    "1F1B": schedule.one_f_one_b,
    "ZB-H1": schedule.zb_h1,
    "ZB-H2": schedule.zb_h2,
    "ZB-V": schedule.zb_v,
}


def view(order="ZB-H1", w=1.0, barrier=False):
    """Four ranks, eight micro-batches; F and B take 1, W as long as you say."""
    made = orders[order](4, 8)
    share = 4 / made.stages
    times = Durations(share, share, w * share)
    return plots.gantt(simulate(made, times), barrier=barrier)


explore(view, order=list(orders), w=[0.5, 1.0, 1.5], barrier=False)

# %% [markdown]
# ## In practice
#
# | schedule | torch.distributed.pipelining | elsewhere |
# |---|---|---|
# | ZB-H1, with chunks | `ScheduleInterleavedZeroBubble` | Sea AI Lab's fork of Megatron-LM |
# | ZB-V | `ScheduleZBVZeroBubble` | the same |
# | DualPipeV | `ScheduleDualPipeV` | DeepSeek's `dualpipe` |
#
# torchtitan 0.2.2 takes their names in `parallelism.pipeline_parallel_schedule`. What they call B differs: in torch's lists a full backward pass is `B`, its halves are `I` and `W`. With that, its
# ZB-V can be read, and simulated like ours. Its first operations on rank 0, the stage before the letter and the micro-batch behind it:

# %%
stage = SimpleNamespace(
    group_size=4, num_stages=8, group_rank=0, stage_index=0, group=None,
    device="cpu", has_backward=True, is_first=True, submod=torch.nn.Module(),
)  # fmt: skip
torchs = pipelining.ScheduleZBVZeroBubble([stage] * 2, 8, loss_fn=max)


def as_ours(op):
    """7F0 is our F0@7, and 7B0, a whole backward pass, is B0@7 and then W0@7."""
    stage, kind, micro_batch = re.fullmatch(r"(\d+)([FBIW])(\d+)", str(op)).groups()
    letters = {"F": "F", "B": "BW", "I": "B", "W": "W"}[kind]
    return " ".join(f"{letter}{micro_batch}@{stage}" for letter in letters)


ranks = torchs.pipeline_order.values()
theirs = " | ".join(" ".join(as_ours(op) for op in ops if op) for ops in ranks)
print(*torchs.pipeline_order[0][:8])

# %%
for name, order in {"torch": schedule.read(theirs), "ours": zb_v}.items():
    run = simulate(order, half)
    print(f"{name:5}", run.makespan, run.period, [order.peak(r) for r in range(4)])

# %% [markdown]
# The same makespan, period and memory.

# %% [markdown]
# ## Errata
#
# ### True under a condition
#
# **"split the backward pass into computation for input (B) and weights (W) to fill pipeline gaps and achieve near-zero idle time"** (reading notes on *The Ultra-Scale Playbook*). True without a barrier before the update. With one, and F = B = W, ZB-H2 takes as long as ZB-H1, 27 units on four ranks with m = 8. <!-- erratum: S3-036 -->
#   <!-- claim: [schedule.simulate(make(4, 8)).makespan for make in (schedule.zb_h1, schedule.zb_h2)] == [27, 27] -->
#
# **Two meanings of B.** It is the input's half in Qi et al. (Table 2), the whole backward pass in DeepSeek-V3 (Table 2). Their ZB1P, (PP − 1)(F + B − 2W), is ZB-H1's (p − 1)(F + B − W). <!-- erratum: PP-11 -->
#   <!-- claim: (lambda f, b, w: schedule.bubble("zb_h1", 4, 8, schedule.Durations(f, b, w)) == 3 * (f + (b + w) - 2 * w))(2, 3, 1) == True -->
#
# **2× parameters of DualPipe** (DeepSeek-V3, Table 2): with both directions a rank of four holds two of 4 stages. In DualPipeV it holds two of 8, which is 1×. <!-- erratum: PP-12 -->
#   <!-- claim: [(made.stages, sum(place.count(0) for place in made.places)) for made in (schedule.dualpipe(4, 8), schedule.dualpipe_v(4, 8))] == [(4, 2), (8, 2)] -->

# %% [markdown]
# ## Summary
#
# > - A backward pass is two halves. Nobody waits for W, and split in the layer it costs no FLOPs; asked of autograd twice, it costs a forward pass more.
# > - ZB-H1 fills all of the bubble but (p − 1)(F + B − W), and no rank holds more micro-batches than the p of 1F1B's rank 0: 3 units idle and 4 held, for p = 4 and times of 1. In bytes the last rank holds more: with each W of the head waits a gradient of logits.
# >   <!-- claim: [schedule.simulate(schedule.zb_h1(4, 8)).idle(0), max(schedule.zb_h1(4, 8).peak(r) for r in range(4))] == [3, 4] -->
# > - ZB-H2 fills it all, if no barrier ends the step and F, B and W take equally long, and holds 2p − 1: a period of 24 for p = 4 and m = 8, and 7 held.
# >   <!-- claim: [schedule.simulate(schedule.zb_h2(4, 8)).period, schedule.zb_h2(4, 8).peak(0)] == [24, 7] -->
# > - A V of two chunks fills it in the memory of p micro-batches, if F, B and W take equally long on stages of one length. A head longer than a stage spoils this order: plan one with the real times.
# >   <!-- claim: [schedule.simulate(schedule.zb_v(4, 8)).period, schedule.zb_v(4, 8).peak(0)] == [48, 8] -->
# > - In a V, forwards and backwards share a channel: receive in the sender's order.
# > - Name the metric with every bubble: with or without a barrier, over ideal or over total.
#
# Next: [lab 14](14_lora.ipynb) changes few weights of a large model.

# %% [markdown]
# ## References
#
# - P. Qi et al., *Zero bubble pipeline parallelism*, arXiv:2401.10241 (2023): Table 2, section 2.3, Table 5; times of F, B and W: `megatron/core/pipeline_parallel/v_schedule.py` of their `zero-bubble-pipeline-parallelism`.
# - P. Qi et al., *Pipeline parallelism with controllable memory*, arXiv:2405.15362 (2024): V-shaped schedules in a half or a third of the memory.
# - DeepSeek's `dualpipe`, its README: DualPipeV is the *cut-in-half* of Sea AI Lab, whose ZB-V is in Qi et al. (2023).
# - DeepSeek-AI, *DeepSeek-V3 technical report*, arXiv:2412.19437 (2024): section 3, Table 2.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, arXiv:2104.04473 (2021): section 2.2.
# - PyTorch 2.13, documentation of `torch.distributed.pipelining`.
