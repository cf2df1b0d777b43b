# %% [markdown]
# # 13a · Cut the model into a pipeline
#
# **Four devices hold a quarter of the layers each. How long does each of them wait, what must it hold, and which order of work makes both small?**
#
# *90 min, and 15 further · before this: labs 03, 07 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - write the order of work that holds few activations and wastes no time (exercise 13.1),
# - say how many activations each rank must hold, before it runs (exercise 13.2),
# - find the ring in which ranks wait for each other (exercise 13.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import dataclasses
import functools
import math

import torch

from labutils import checkpointing, measure, pipeline, schedule, units
from labutils import predict as formulas
from labutils.config import Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.schedule import Durations, simulate
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.editor import LEVELS, Editor
from labutils.teach.widgets import explore
from labutils.world import DeadlockError, World

# %% [markdown]
# ## The idea in one picture
#
# Rank 0 has the first layers, rank 3 the last. The forward pass (F) of a *micro-batch* walks from rank 0 to rank 3, its backward pass (B) walks back. Step through it, and look who is idle.

# %%
plots.schedule_animation(simulate(schedule.gpipe(4, 4)))

# %% [markdown]
# Pipeline parallelism is **a cut between layers, a small message up and one down per cut and micro-batch, and an order of work that keeps ranks busy.** The time in which a rank waits is the *bubble*.

# %% [markdown]
# ## What does the cut cost, and what does it save?
#
# A GPT of eight layers on four ranks: a *stage* is what one rank runs. `split` cuts, `local` keeps the stages of this rank, and a `Schedule` says who does what in which order.

# %%
sizes = dict(num_layers=8, d_model=64, num_heads=4, d_ff=256)
config = ModelConfig(**sizes, vocab_size=128, seq_len=32)
naive = schedule.naive(4, 8)
[str(op) for op in naive.ranks[3][:4]]

# %% [markdown]
# `F1@3` is the forward pass of micro-batch 1 through stage 3. `naive` sends one micro-batch there and back before it begins the next one.


# %%
def model(tied=True):
    made = torch.Generator().manual_seed(0)
    return GPT(dataclasses.replace(config, tied=tied), generator=made).double()


draw = torch.Generator().manual_seed(1)
tokens = torch.randint(128, (8, 2, 1, 32), generator=draw)
batches = [tuple(pair) for pair in tokens]


def step(plan, **options):
    """A function of a rank, which runs its part of one step."""
    data = batches[: plan.micro_batches]

    def run(rank):
        stages = pipeline.local(pipeline.split(model(), plan.stages), plan, rank.rank)
        return pipeline.run(stages, plan, rank.comm("pp"), data, **options), stages

    return run


# %% [markdown]
# Everything is in float64. The loss on the last rank, and each rank's gradients, compared with those of the whole model:

# %%
world = World(Mesh(pp=4))
runs, stages = zip(*world.run(step(naive)), strict=True)
whole = model()
loss = whole.loss(*(torch.cat(side) for side in zip(*batches, strict=True)))
loss.backward()
same = abs(runs[3].loss - loss).item() < 1e-12
f"{runs[3].loss:.5f} on rank 3, {loss:.5f} on one device, equal to 1e-12: {same}"

# %%
wanted = {name: p.grad for name, p in whole.named_parameters(remove_duplicate=False)}
errors = [
    (p.grad - wanted[name.partition(".")[2]]).abs().max().item()
    for rank in stages
    for name, p in rank.named_parameters()
]
{"equal to 1e-12": max(errors) < 1e-12}

# %% [markdown]
# What travels is the *residual stream* of a micro-batch: b sequences of s tokens of width h, so b·s·h numbers, once up and once down per cut. The formula foresees a whole training step, which also adds up one number, the loss, over all ranks. What neighbors send stands under the axis `pp`:

# %%
def between(plan, precision="fp64"):
    """Bytes that neighbors send in one step, one sequence per micro-batch."""
    sizes = dict(micro_batch=1, global_batch=plan.micro_batches)
    train = TrainConfig(**sizes, precision=precision, schedule=plan)
    each = [formulas.sent(config, train, Mesh(pp=4), rank) for rank in range(4)]
    return sum(each, Ledger()).only(axis="pp")


between(naive).diff(world.ledger)

# %% [markdown]
# Rank 0 and rank 3 exchange one gradient more: this model's head *is* its embedding, and the two stand at opposite ends. Both add up what the other computed.
#
# How much is that? Take GPT-2 in float32 on four ranks, and a step of so many tokens in all. In a pipeline all of them pass a rank in the middle, which sends h numbers up and h numbers down for each; under data parallelism every rank sends lab 08's all-reduce. Per rank and step:

# %%
gpt2 = ModelConfig.named("gpt2")
all_reduce = 2 * 3 / 4 * 4 * gpt2.num_params
embedding = 4 * gpt2.vocab_size * gpt2.d_model
for count in (8_192, 121_500):
    middle = 2 * 4 * gpt2.d_model * count
    sent = {"middle": middle, "end": middle / 2 + embedding, "all-reduce": all_reduce}
    print(f"{count:7,} tokens:", {of: units.text(n) for of, n in sent.items()})

# %% [markdown]
# A step of few tokens sends far less through the middle of a pipeline than in an all-reduce, and a large one as much or more. At an end the tied embedding is most of a small step.
#
# What it saves: each rank holds, and updates, its own parameters only.

# %%
[sum(p.numel() for p in rank.parameters()) for rank in stages]

# %% [markdown]
# And time? Let each F take one unit, each B two. `naive` lets one of four ranks work at a time:

# %%
plots.gantt(simulate(naive))

# %% [markdown]
# ## How many micro-batches fill the pipeline?
#
# *GPipe* sends all forwards first, then all backwards (AFAB): rank 1 works on micro-batch 0 while rank 0 is at micro-batch 1.
#
# > On four ranks, how many micro-batches does it take until ranks are idle at most 10 % of the time?

# %%
predict("bubble/ten-percent", micro_batches=8)

# %% [markdown]
# Take p ranks and m micro-batches, and let F and B also stand for the times of a forward and a backward pass. The last rank waits p − 1 forwards for its first F, works m(F + B) without a pause, and after its
# last B come p − 1 backwards: a step takes (m + p − 1)(F + B). Every rank works m(F + B) of it and is idle for (p − 1)(F + B), whatever m is. So
#
# $$ \text{bubble overhead} = \frac{\text{idle}}{\text{ideal}} = \frac{p-1}{m}, \qquad \text{bubble fraction} = \frac{\text{idle}}{\text{total}} = \frac{p-1}{m+p-1}. $$


# %%
def fraction(m, p=4):
    return simulate(schedule.gpipe(p, m)).bubble_fraction


enough = next(m for m in range(1, 99) if fraction(m) <= 0.1)
reveal("bubble/ten-percent", micro_batches=enough)

# %% [markdown]
# The simulator plays the operations one by one and knows neither formula. It agrees with both, for other times too. (`Durations` has two parts of a backward pass, B and W, for lab 13b.)

# %%
run = simulate(schedule.gpipe(4, 8), Durations(F=1, B=1.1, W=0.9))
idle = schedule.bubble("gpipe", 4, 8, Durations(F=1, B=1.1, W=0.9))
[round(run.idle(rank) - idle, 9) for rank in range(4)]

# %%
{"idle/ideal": run.bubble_overhead, "idle/total": run.bubble_fraction}

# %% [markdown]
# The simulator also knows what a rank waits for. Rank 1's bubble, piece by piece:

# %%
print(*simulate(schedule.gpipe(4, 8)).waits_of(1), sep="\n")

# %% [markdown]
# The same 3/8 of the ideal time is 3/11 of the total time. **Papers use both and call both "the bubble"**: ask for the denominator.
#
# Now for real. Each rank computes its stage, then sleeps until its operation has taken 100 ms, or 200 ms for a B.

# %% tags=["nbval-ignore-output"]
pace = Durations(F=0.1, B=0.1, W=0.1)
plan = schedule.gpipe(4, 8)
paced = pipeline.joined(plan, [run for run, _ in world.run(step(plan, pace=pace))])
plots.gantt(simulated=simulate(plan, pace), measured=paced, unit="s")

# %% tags=["nbval-ignore-output"]
for name, each in {"simulated": simulate(plan, pace), "measured": paced}.items():
    print(f"{name}: {each.bubble_fraction:.1%} of {each.makespan:.2f} s")

# %%
{"the order of the schedule": paced.schedule == plan}

# %% [markdown]
# Nobody told the ranks when to start. They wait for messages, and the bubble comes out. It is longer than simulated, where messages take no time and each rank has a core. `paced.to_perfetto("step.json")` writes a trace for
# ui.perfetto.dev.

# %% [markdown]
# ## What must each rank hold?
#
# Between F and B of a micro-batch a rank keeps its activations. Under GPipe all m are *in flight* on every rank when the first B begins. The strips of the chart show it, and lab 05's promise
# that memory stays flat with more micro-batches is gone.
#
# > With eight micro-batches, how few must rank 0 of four keep at once without making the step any longer than (m + p − 1)(F + B)?

# %%
predict("pipeline/in-flight", micro_batches=8)

# %% [markdown]
# Find such an order by hand; a move that cannot be is refused with its reason. Level 2 asks for as little memory as level 1's time allows. (In level 3 messages take time: come back to it after "Who waits for whom?".) With a kernel, *Run on ranks* below the
# board runs a finished order on a GPT of eight layers. It compares loss and gradients with those of one device, what ranks kept with the simulator, and what they sent with the formula.

# %%
Editor(LEVELS[:3])

# %% [markdown]
# A finished order is a line of text. `schedule.read` makes a schedule of it, and ranks run it as it stands:

# %%
yours = schedule.read("F0 F1 F2 B0 B1 B2 | F0 F1 B0 F2 B1 B2")
results = World(Mesh(pp=2)).run(step(yours))
[" ".join(map(str, run.ops)) for run, _ in results]

# %% [markdown]
# ### Exercise 13.1 · Write 1F1B (10 min, ●●○)
#
# Begin each backward pass as soon as you can, and no forward pass earlier than you must. In the middle of the step a rank then does one forward and one backward in turn, which gives
# the schedule its name, *1F1B*. There may be fewer micro-batches than ranks.


# %%
def my_order(rank: int, p: int, m: int) -> list[str]:
    """The operations of `rank` of p in order: "F0" is the forward of micro-batch 0.

    A step takes (m + p − 1)(F + B), and ranks hold as little as they then can.
    """
    raise NotImplementedError


# %%
check("pipeline/one-f-one-b", my_order)

# %%
hint("pipeline/one-f-one-b", 1)

# %%
show(schedule.one_f_one_b)

# %% [markdown]
# All schedules of this lab are made by one function, `spell_line`, from a sentence per rank: so many forwards first, then F and B in turn, then the backwards that are left. `gpipe` and
# `one_f_one_b` differ in that number only.

# %%
plan = schedule.one_f_one_b(4, 8)
reveal("pipeline/in-flight", micro_batches=plan.peak(0))

# %%
plots.gantt(simulate(schedule.gpipe(4, 8)), simulate(plan))

# %% [markdown]
# The bubble is the same; what ranks hold is not: rank i holds the p − i micro-batches that are on their way between it and the end, and more micro-batches add nothing. With less, rank 0
# would stand still: a micro-batch takes p(F + B) to the end and back, and p of them fill that time.
#
# In flight by formula, by simulation, and by the graphs that autograd kept on four real ranks:

# %%
by_formula = [schedule.peak_in_flight("one_f_one_b", 4, 8, rank) for rank in range(4)]
simulated = [simulate(plan).peak(rank) for rank in range(4)]
kept = [max(run.in_flight) for run, _ in world.run(step(plan))]
{"formula": by_formula, "simulated": simulated, "kept": kept}

# %% [markdown]
# In bytes: GPT-2 with three of its twelve layers on each of four ranks, every micro-batch one sequence of 1,024 tokens, by dry run of the same `pipeline.run` (lab 09). The activations that rank 0 keeps for its backward passes, at most; then the same if blocks keep their inputs alone and recompute the rest (lab 04):


# %%
def activations(rank, plan, layers, policy="none"):
    whole = checkpointing.apply(GPT(gpt2, attention="sdpa"), policy)
    stages = pipeline.split(whole, plan.stages, layers)
    stages = pipeline.local(stages, plan, rank.rank)
    data = [(torch.zeros(1, 1024, dtype=torch.long),) * 2] * plan.micro_batches
    run = functools.partial(pipeline.run, stages, plan, rank.comm("pp"), data)
    return measure.history(run, stages).only("activations").peak.ledger.total


# %%
dry, equal = World(Mesh(pp=4), engine="dry"), (3, 3, 3, 3)
plans = {"GPipe": schedule.gpipe(4, 8), "1F1B": schedule.one_f_one_b(4, 8)}
for said, policy in {"kept": "none", "recomputed": "full"}.items():
    for name, each in plans.items():
        held = dry.run(activations, each, equal, policy, rank=0)
        print(f"{said:11}{name:6}{units.text(held)}")

# %% [markdown]
# GPipe's paper recomputes (section 2.3), and so holds far less than 1F1B that does not. With recomputation a micro-batch in flight is little more than an input per block.

# %% [markdown]
# > Now one device alone, with all twelve layers and the head, which runs the eight micro-batches one after the other. How many MB of activations does it keep?

# %%
predict("pipeline/one-device", MB=2400)

# %%
one = World(Mesh(pp=1), engine="dry")
alone = one.run(activations, schedule.one_f_one_b(1, 8), (12,), rank=0)
reveal("pipeline/one-device", MB=round(alone / 1e6))

# %%
head = 4 * 1024 * (gpt2.vocab_size + 2 * gpt2.d_model)  # logits, two inputs
print("one device without the head:", units.text(alone - head))

# %% [markdown]
# **Under 1F1B rank 0 keeps as much for its layers as one device does for all of them,** if m ≥ p and nothing is recomputed. It has a quarter of the layers, and four micro-batches in flight: p · L/p = L. It is spared only the head, which the last rank has; rank i keeps (p − i)/p of what one device keeps for layers. What a cut saves on every rank is parameters, gradients and optimizer states. Activations shrink by recomputation, by tensor parallelism (lab 10), by shorter rows (lab 11), or with fewer micro-batches in flight.

# %% [markdown]
# ### Exercise 13.2 · Bound the memory (8 min, ●○○)
#
# A rank may have several stages, and some schedules split the backward pass in two, B and W (lab 13b): then what F kept goes with W.


# %%
def my_peak(ops: list[schedule.Op], nbytes: list[int]) -> int:
    """The most bytes that a rank holds, which runs `ops` in this order.

    An op has .kind ("F", "B" or "W"), .stage and .micro_batch; a forward pass of
    stage i keeps nbytes[i] bytes.
    """
    raise NotImplementedError


# %%
check("pipeline/peak", my_peak)

# %%
hint("pipeline/peak", 1)

# %%
show(schedule.Schedule.in_flight)

# %% [markdown]
# ## Where do you cut?
#
# The longest stage sets the pace for all. GPT-2 has twelve equal blocks, and behind them the head, a product with 50,257 words per token.
#
# > How many blocks should the last of four stages have, so that the step is shortest?

# %%
predict("cut/last-stage", blocks=2)

# %%
layers = pipeline.cut(gpt2, 4)
reveal("cut/last-stage", blocks=layers[-1])

# %% [markdown]
# By FLOPs (the anatomy of lab 03), the head takes as long as so many blocks:

# %%
last = pipeline.stage_flops(gpt2, (12, 0))
f"{last[1] / (last[0] / 12):.1f} blocks"


# %%
def timed(layers):
    """1F1B with stages of so many layers; a block's forward pass takes 1, its B 2."""
    block = pipeline.stage_flops(gpt2, (12, 0))[0] / 12
    times = [flops / block for flops in pipeline.stage_flops(gpt2, layers)]
    return simulate(schedule.one_f_one_b(4, 8), Durations(F=times, B=times, W=times))


plots.gantt(equal=timed((3, 3, 3, 3)), by_time=timed(layers), unit="blocks")

# %% [markdown]
# From the last operation go back to the one that let it start, and on to the first: the *critical path*, as long as the step. Stage 3 has of its operations:

# %%
path = timed((3, 3, 3, 3)).critical_path()
f"{sum(op.stage == 3 for op in path)} of {len(path)}"

# %% [markdown]
# Cut by time the step takes 143 blocks in place of 206. Embedding and head are also why the small model's *first* and *last* stage hold more parameters: a cut by time is no cut by memory.

# %% [markdown]
# ## Who waits for whom?
#
# So far a send went on by itself (`isend`). A plain `send` may wait until its receiver takes the message; on the course's ranks it always does. With plain sends GPipe still finishes. 1F1B does not:

# %%
world.run(step(schedule.gpipe(4, 8), messages="blocking"))
try:
    world.run(step(plan, messages="blocking"))
except DeadlockError as stuck:
    print(stuck)

# %% [markdown]
# Rank 2 sends a forward to rank 3, and rank 3 a backward to rank 2: each waits for the other to receive. GPipe has no such pair: a rank
# sends its first backward when it has received all forwards.
#
# Two cures serve any legal schedule. Either sends do not wait, and each rank takes a neighbor's messages in the order of sending (`"matched"`, the default
# here); or both ends of a message know its place in one order of all operations (`"paired"`), which is correct with waiting sends too.

# %%
for messages in ("matched", "paired"):
    world.run(step(plan, messages=messages))
    print(messages, between(plan).diff(world.ledger).unexplained)

# %% [markdown]
# **A message takes time, too.** Let it take as long as a forward. How much longer is a step of 8, 16, 32 and 64 micro-batches? *Eager* 1F1B runs twice as many forwards first:

# %%
link = Link(latency=1, bandwidth=1e30)
ms = (8, 16, 32, 64)


def extra(make, m, p=4, link=link):
    return simulate(make(p, m), link=link).makespan - simulate(make(p, m)).makespan


makers = schedule.gpipe, schedule.one_f_one_b, schedule.eager_one_f_one_b
{make.__name__: [extra(make, m) for m in ms] for make in makers}

# %% [markdown]
# GPipe pays on the way in and on the way out, 2(p − 1) messages. 1F1B pays for every micro-batch: a way to the end and back now takes 2(p − 1) messages more, and the p micro-batches in flight no longer fill it. That is 2(p − 1)/p each. Eager 1F1B keeps 2p − 1 in flight, so that (2p − 1)(F + B) of work stand against a round of p(F + B) + 2(p − 1)t. It hides messages up to t = (F + B)/2, here 1.5 units, and pays in memory: 7 in place of 4 on rank 0. A longer one costs something for every micro-batch.
#   <!-- claim: all(abs(schedule.simulate(schedule.eager_one_f_one_b(4, m), link=config.Link(t, 1e30)).makespan - schedule.simulate(schedule.eager_one_f_one_b(4, m)).makespan - 6 * t) < 1e-9 for t in (0.5, 1.5) for m in (32, 64)) == True -->

# %%
plain = functools.partial(extra, schedule.one_f_one_b)
each = [(plain(64, p) - plain(32, p)) / 32 for p in (2, 4, 8)]
each, [2 * (p - 1) / p for p in (2, 4, 8)], schedule.eager_one_f_one_b(4, 8).peak(0)

# %% [markdown]
# For Llama-2-7B on four ranks, 4,096 tokens per micro-batch in bf16, 40 % of an H100's peak, and a network of 50 GB/s, a message takes this part of a forward; and a step of 32 becomes longer by:

# %%
llama, h100 = ModelConfig.named("llama-2-7b"), Hardware.named("H100")
forward = llama.flops_per_token() / 3 * 4096 / 4 / (0.4 * h100.flops["bf16"])
message = 2 * 4096 * llama.d_model / 50e9
real = Link(latency=message / forward, bandwidth=1e30)
print(f"{1000 * message:.2f} of {1000 * forward:.0f} ms, {message / forward:.1%}")
for make in makers:
    whole = simulate(make(4, 32)).makespan
    print(f"{make.__name__:18} {extra(make, 32, link=real) / whole:.1%} longer")

# %% [markdown]
# With lab 09's 61 % and 40 GB/s these shares are 1.9 times as large. So 1F1B's messages cost one to two percent here, even between nodes. That is why pipelines are laid across nodes, and tensor parallelism, which would wait there half of each layer (lab 10), inside one (Narayanan et al. 2021, section 3.2). With eight ranks of tensor parallelism in each node a forward is an eighth as long. Then the message has to be cut in eight, as sequence parallelism does and Narayanan's scatter/gather (section 4.1): whole it is 14 % of a forward.
#   <!-- claim: (lambda m: round(100 * 8 * (2 * 4096 * m.d_model / 50e9) / (m.flops_per_token() / 3 * 4096 / 4 / (0.4 * config.Hardware.named("H100").flops["bf16"]))))(config.ModelConfig.named("llama-2-7b")) == 14 -->

# %% [markdown]
# ## Can one rank have several stages?
#
# Give each rank u *chunks*, every p-th stage: with p = 4 and u = 2, rank 0 has stages 0 and 4. A micro-batch goes round twice, each stage is half as long, and so are the ramps at both ends:
#
# $$ \text{bubble overhead} = \frac1u\cdot\frac{p-1}{m}. $$

# %%
half = Durations(F=0.5, B=0.5, W=0.5)
chunks = schedule.interleaved(4, 8, chunks=2)
plots.gantt(simulate(plan), simulate(chunks, half))

# %% [markdown]
# The price: u times as many messages from a rank in the middle, here rank 1. And this order holds more, p(1 + (p − 1)/(pu)) micro-batches on rank 0 in place of p if m > p. Is that a price of chunks? Before its first backward it runs two forwards for each rank that follows. `fewer` runs one, as 1F1B does:

# %%
p, how = 4, dict(chunks=2, a_round=4)
fewer = schedule.spell_line("fewer", p, 8, lambda rank: p - 1 - rank + p, **how)
slow = Link(latency=0.1, bandwidth=1e30)
print("             rank 1 sends   ranks 0, 3 hold   a step   if a message takes 0.1")
for each in (plan, chunks, fewer):
    times = Durations(*[4 / each.stages] * 3)
    sent = between(each, "fp32").by("rank")[1]
    steps = [simulate(each, times, *link).makespan for link in ([], [slow])]
    held = [each.peak(rank) * 4 / each.stages for rank in (0, 3)]
    print(f"{each.name:12} {sent:10,} B {held[0]:11} {held[1]:5}", end="")
    print(f" {steps[0]:8} {steps[1]:14.1f}")

# %% [markdown]
# While messages take no time, both orders are equally short, and rank 0 of `fewer` holds the p micro-batches of 1F1B. So rank 0 of the usual order does not hold more because of its chunks: it is eager, as above, and hides messages.
#
# On the last rank chunks do cost: 2.5 micro-batches in place of 1, in either order. All p of a round go through its first chunk before the first one comes to its second.

# %% [markdown]
# ### Exercise 13.3 · Bug hunt: the order that hangs from three ranks on (12 min, ●●○)
#
# It passed its test, which had two ranks and two chunks. From three ranks on it hangs: find the ring in which they wait, and repair it, for any number of chunks.


# %%
def my_interleaved(rank: int, p: int, m: int, chunks: int) -> list[tuple]:
    """The operations of `rank` of p in order: ("F", stage, k) or ("B", stage, k) of
    micro-batch k; stages are rank, rank + p, … for `chunks` chunks; p divides m."""
    jobs = [(c, r + k) for r in range(0, m, p) for c in range(chunks) for k in range(p)]
    forwards = [("F", rank + c * p, k) for c, k in jobs]
    backwards = [("B", rank + (c + 1) % chunks * p, k) for c, k in jobs]
    after = (rank + 1) % p
    warm = min(2 * after + (chunks - 1) * p, len(jobs))
    ops = forwards[:warm]
    for k in range(warm, len(jobs)):
        ops += [forwards[k], backwards[k - warm]]
    return ops + backwards[len(jobs) - warm :]


# %%
check("pipeline/bug-hunt", my_interleaved)

# %%
hint("pipeline/bug-hunt", 1)

# %%
show(schedule.interleaved)

# %% [markdown]
# ## Further: what if nobody waits for the update?
#
# *PipeDream* drops the end of the step. Each rank updates its weights after each of its backward passes and goes on, so the pipeline fills once, and drains when training ends. B must meet
# the weights of its F, so each rank *stashes* them. Of micro-batch k = 0 … 7, how many updates behind is what rank 0, and rank 3, computes with?

# %%
dream = schedule.pipedream(4, 8)
{rank: [k - dream.version(rank, k) for k in range(8)] for rank in (0, 3)}

# %% [markdown]
# *PipeDream-2BW* updates once per p micro-batches, with gradients one update old on all ranks. Versions of the weights that ranks hold, of a smaller GPT of four layers:


# %%
small = dict(num_layers=4, d_model=32, d_ff=128, tied=False)
tiny = dataclasses.replace(config, **small)
two = schedule.pipedream_2bw(4, 8)


def dreaming(rank, plan, data, lr=0.28):
    """The stages that a rank has trained, and what `run` tells."""
    net = GPT(tiny, generator=torch.Generator().manual_seed(0)).double()
    stages = pipeline.local(pipeline.split(net, 4, (1,) * 4), plan, rank.rank)
    sgd = torch.optim.SGD(stages.parameters(), lr=lr)
    return stages, pipeline.run(stages, plan, rank.comm("pp"), data, optimizer=sgd)


for plan in (dream, two):
    print(plan.name, [run.versions for _, run in world.run(dreaming, plan, batches)])

# %% [markdown]
# What does staleness do to learning? To tell it from everything else, switch it on alone: one device, SGD, and gradients for weights that are 3, 2, 1 and 0 updates old in the four layers, or one update old in all. All 48 micro-batches are one sequence. (Of random tokens nothing can be learned, and no difference shows.) Is that PipeDream, and 2BW?

# %%
x, y = batches[0]
aged = functools.partial(rigs.pipeline.aged, tiny, (x, y))
fresh, stale, one_old = (0,) * 4, (3, 2, 1, 0), (1,) * 4


def on_ranks(make, lr):
    """The loss after 48 micro-batches."""
    trained = world.run(dreaming, make(4, 48), [(x, y)] * 48, lr)
    parts = [stage for stages, _ in trained for stage in stages]
    logits = functools.reduce(lambda out, stage: stage(out), parts, x)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()


dreams = (schedule.pipedream, stale, 48), (schedule.pipedream_2bw, one_old, 12)
for make, ages, n in dreams:
    off = abs(on_ranks(make, 0.28) - aged(ages, n, 0.28))
    print(make.__name__, {"equal to 1e-9": off < 1e-9})

# %% [markdown]
# It is. Now each at the best of four learning rates, for three seeds. The last three rows take as much *time*: in the 153 units in which PipeDream makes 48 updates, 2BW makes 12, and so does who ends each update before the next begins, which takes 12 units. (2BW's are means over four micro-batches. Here all are alike, and a mean teaches no more than one; elsewhere it does.)


# %%
def best(ages, updates):
    """The lowest loss over the rates, for each seed."""
    rates, seeds = (0.14, 0.28, 0.57, 1.1), range(3)
    return [min(aged(ages, updates, lr, seed) for lr in rates) for seed in seeds]


cases = {
    "none old, 48 updates": (fresh, 48),
    "three old, 48 updates": ((3,) * 4, 48),
    "PipeDream turned round": (stale[::-1], 48),
    "PipeDream, 48 updates": (stale, 48),
    "2BW, 12 updates": (one_old, 12),
    "none old, 12 updates": (fresh, 12),
}
for name, case in cases.items():
    print(f"{name:22}", *(f"{loss:6.1f}" for loss in best(*case)))

# %% [markdown]
# **PipeDream's staleness costs about one to two nats here,** after as many updates and with each at its best rate: 0.2 to 0.5 without it, 1.3 to 2.4 with it. (A model that guesses has 4.85.) If all layers are three updates old it costs nearly three.
#
# Age alone does not decide. With the oldest weights in the last layer, the order turned round, less than half a nat is lost. A pipeline cannot choose that: rank 0 waits longest for its backward passes.
#
# **After as much time PipeDream is ahead,** for each seed: many stale updates are worth more here than few fresh ones. 2BW's, few and one old, end 0.5 to 0.7 nats above as many fresh ones.
#
# At a still larger rate PipeDream's loss is nan. Is that staleness? The control, one device at the same rate, after 48 updates:

# %%
{
    "stale is nan": math.isnan(on_ranks(schedule.pipedream, 2.0)),
    "alone is above 1,000": aged(fresh, 48, 2.0) > 1000,
}

# %% [markdown]
# It is not: without staleness the same rate diverges as well. A nan on a pipeline says nothing until one device has run at its rate.

# %% [markdown]
# ## Further: play with it
#
# The message of a real model: choose its size, and the link between two stages. Where does a message cost 1F1B more than a tenth of its step, and does that fall with the size of the model? Which order profits most from more micro-batches?


# %%
orders = {
    "GPipe": schedule.gpipe,
    "1F1B": schedule.one_f_one_b,
    "eager 1F1B": schedule.eager_one_f_one_b,
    "interleaved, 2 chunks": schedule.interleaved,
}


def view(model="llama-2-7b", GBps=50, order="1F1B", m=8):
    """A step on four ranks, with 4,096 tokens per micro-batch, as above."""
    sized, made = ModelConfig.named(model), orders[order](4, m)
    forward = sized.flops_per_token() / 3 * 4096 / 4 / (0.4 * h100.flops["bf16"])
    message = 2 * 4096 * sized.d_model / (GBps * 1e9)
    each, wire = forward * 4 / made.stages, Link(latency=message, bandwidth=1e30)
    return plots.gantt(simulate(made, Durations(each, each, each), wire), unit="s")


sizes = ["qwen2-0.5b", "llama-2-7b", "llama-2-70b"]
explore(view, states=48, model=sizes, GBps=[1, 50], order=list(orders), m=[4, 8])

# %% [markdown]
# ## In practice
#
# | | Megatron-LM | torch.distributed.pipelining, torchtitan 0.2.2 |
# |---|---|---|
# | ranks | `--pipeline-model-parallel-size` | `parallelism.pipeline_parallel_degree` |
# | micro-batches | global batch ÷ (micro-batch · dp) | `parallelism.pipeline_parallel_microbatch_size` |
# | order | 1F1B | `Schedule1F1B`, `ScheduleGPipe`, …; `parallelism.pipeline_parallel_schedule` |
# | chunks | `--num-layers-per-virtual-pipeline-stage` | `ScheduleInterleaved1F1B` |
# | cut | `--decoder-first-pipeline-num-layers`, `--decoder-last-pipeline-num-layers`; `--account-for-embedding-in-pipeline-split`, `--account-for-loss-in-pipeline-split` count each as a layer | `parallelism.module_fqns_per_model_part` |

# %% [markdown]
# ## Errata
#
# ### True under a condition
#
# **The bubble** is (p − 1)/m in Narayanan et al. 2021 (section 2.2.1) and in reading notes on *The Ultra-Scale Playbook*, and (K − 1)/(M + K − 1) in GPipe (section 2.3): one idle time over two denominators, 3/8 of the ideal time and 3/11 of the whole on four ranks with m = 8. <!-- erratum: S3-033, PP-02 -->
#   <!-- claim: (lambda run: (run.bubble_overhead, run.bubble_fraction))(schedule.simulate(schedule.gpipe(4, 8))) == (3 / 8, 3 / 11) -->
#
# **"we found the bubble overhead to be negligible when M ≥ 4 × K"** (GPipe, section 2.3). By its formula the fraction at M = 4K is 16 to 19 % for 4 to 16 stages. The paper's next sentence says that recomputation may start while a stage waits, which the formula leaves out. <!-- erratum: PP-03 -->
#   <!-- claim: [round(100 * schedule.simulate(schedule.gpipe(k, 4 * k)).bubble_fraction) for k in (4, 16)] == [16, 19] -->
#
# **1F1B as "requiring memory storage for only $p$ micro-batches, versus $m$ micro-batches in the naive AFAB schedule"** (the same reading notes). True of rank 0 where m ≥ p. Rank i stores min(p − i, m), four ranks 4, 3, 2 and 1. <!-- erratum: S3-035 -->
#   <!-- claim: [schedule.one_f_one_b(4, 8).peak(rank) for rank in range(4)] == [4, 3, 2, 1] -->

# %% [markdown]
# ## Summary
#
# > - A cut sends b·s·h numbers per micro-batch and direction, and nothing else unless head and embedding are one matrix.
# > - p stages that are equally long wait (p − 1)(F + B) per step. That is (p − 1)/m of the ideal time and (p − 1)/(m + p − 1) of the total.
# >   <!-- claim: [schedule.bubble("gpipe", p, m) == (p - 1) * 3 == schedule.simulate(schedule.gpipe(p, m)).idle(0) for p, m in ((2, 3), (4, 8))] == [True, True] -->
# > - On four ranks it takes 27 micro-batches until that is 10 % of the total.
# >   <!-- claim: [round(schedule.simulate(schedule.gpipe(4, m)).bubble_fraction, 3) for m in (26, 27)] == [0.103, 0.1] -->
# > - Where messages take no time, 1F1B waits as long as GPipe. It holds p − i micro-batches on rank i: on rank 0 of four 4, where GPipe holds all 8 or 64, or recomputes them as its paper does.
# >   <!-- claim: [[schedule.one_f_one_b(4, m).peak(0), schedule.gpipe(4, m).peak(0)] for m in (8, 64)] == [[4, 8], [4, 64]] -->
# > - Under 1F1B, with m ≥ p, rank 0 saves no activations of layers: p micro-batches of L/p layers are those of one device with all L. Only the head's are elsewhere.
# >   <!-- claim: [schedule.one_f_one_b(p, 64).peak(0) / p for p in (1, 4, 8)] == [1, 1, 1] -->
# > - The longest stage sets the pace. Count the head: cut in four by FLOPs, GPT-2 has no block on the head's rank.
# >   <!-- claim: pipeline.cut(config.ModelConfig.named("gpt2"), 4) == (4, 4, 4, 0) -->
# > - Where each send waits for its receiver, 1F1B as it stands never ends; with sends that do not wait, received in the sender's order, it does.
# > - u chunks per rank divide the bubble by u, and multiply the messages.
# >   <!-- claim: schedule.simulate(schedule.interleaved(4, 8), schedule.Durations(0.5, 0.5, 0.5)).bubble_overhead == 3 / 16 -->
# > - Without a flush there is no bubble, and gradients are of old weights: up to p − 1 updates old on rank 0, on four ranks 3, 2, 1 and 0.
# >   <!-- claim: [7 - schedule.pipedream(4, 8).version(rank, 7) for rank in range(4)] == [3, 2, 1, 0] -->
#
# Next: [lab 13b](13b_zero_bubble.ipynb) fills the bubble.

# %% [markdown]
# ## References
#
# - Y. Huang et al., *GPipe: efficient training of giant neural networks using pipeline parallelism*, arXiv:1811.06965 (2019): section 2.3.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, arXiv:2104.04473 (2021): sections 2.2.1 and 2.2.2.
# - D. Narayanan et al., *PipeDream: generalized pipeline parallelism for DNN training*, SOSP (2019); *Memory-efficient pipeline-parallel DNN training*, arXiv:2006.09503 (2021): 2BW.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): pipeline parallelism.
# - PyTorch 2.13, documentation of `torch.distributed.pipelining`.
