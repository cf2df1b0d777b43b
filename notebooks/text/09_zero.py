# %% [markdown]
# # 09 · Keep a share, gather the rest
#
# **Every rank of data parallelism holds the same weights, gradients and optimizer state. What if each keeps a share, and asks for the rest when it is needed?**
#
# *85 min, and 65 further · before this: labs 07 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - divide an optimizer's memory by N without sending a byte more (exercise 9.1),
# - know when each unit of a fully sharded model is whole, and what that costs (exercise 9.2),
# - know what sharding does to gradient clipping and to master weights, and repair code that does not (exercise 9.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import dataclasses
import math
import pathlib
import tempfile

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from labutils import anatomy, checkpointing, collectives, measure, units, zero
from labutils import predict as formulas
from labutils.config import Hardware, Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.precision import LossScaler
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %%
world = World(4)

# %% [markdown]
# ## The idea in one picture
#
# Six equal layers, four ranks, one training step with Adam in fp32. Each row is a level, each cell one rank. The colored part is what that rank holds, the first layer on top, while the step runs from
# left to right.

# %%
held = rigs.occupancy.of_each_level(world)
title = "Each level holds less. At level 3 a layer is whole only around its turn"
plots.who_holds(**held, title=title)

# %% [markdown]
# Level 0 is plain data parallelism: four times the same. **Level 1** shards the optimizer state, **level 2** the gradients too, **level 3** also the
# weights. The thin lines are the shares that a rank keeps, a different quarter of all elements on each rank. The steps of the staircase are layers that are whole for a
# moment: gradients before they are reduced, weights while they or the layer before them computes, down through the forward pass and up again through the backward pass. At levels 0 and 1
# gradients come with the backward pass, and stay.
#
# This is ZeRO, the zero redundancy optimizer; level 3 is what PyTorch calls FSDP, fully sharded data parallelism.

# %% [markdown]
# ## What do 64 ranks hold 64 times?
#
# Mixed precision with Adam holds for each of Ψ parameters 2 bytes of weights, 2 of gradients and K = 12 of optimizer state (an fp32 master copy and two
# moments). A model of 7.5 billion parameters, on each of 64 devices:

# %%
zero.model_states(7.5e9, 64, level=0)

# %% [markdown]
# All 64 hold the same 120 GB.
#
# > Suppose you shard the optimizer state alone, and every device keeps all weights and gradients. How many GB are left on each?

# %%
predict("zero/level-1-of-7.5B", GB=60)

# %% [markdown]
# With K bytes of optimizer state and N data-parallel ranks (the paper's $N_d$):
#
# $$ \begin{aligned} \text{level 1: } & 2\Psi + 2\Psi + \frac{K\Psi}{N} \\ \text{level 2: } & 2\Psi + \frac{(2 + K)\Psi}{N} \\ \text{level 3: } & \frac{(2 + 2 + K)\Psi}{N} \end{aligned} $$

# %%
reveal("zero/level-1-of-7.5B", GB=zero.model_states(7.5e9, 64, level=1).total / 1e9)

# %%
[units.text(zero.model_states(7.5e9, 64, level).total) for level in range(4)]

# %% [markdown]
# Three quarters of the memory was optimizer state, which a rank needs once per step and only for the weights that it updates. What a level frees is room for a larger model, or for the activations of a larger micro-batch. Here are all 54 cells of the
# paper's table, in GB, with levels 1, 2 and 3 of each model next to each other:

# %%
models = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}
print("   N " + "".join(f"{name:>28} " for name in models))
for n in (1, 4, 16, 64, 256, 1024):
    kinds = [(params, level) for params in models.values() for level in (1, 2, 3)]
    held = [zero.model_states(params, n, level).total / 1e9 for params, level in kinds]
    print(f"{n:4} ", *(f"{GB:9.2f}" for GB in held))

# %% [markdown]
# The floors are 4Ψ and 2Ψ, a quarter and an eighth of these 16Ψ: no number of devices brings level 1 below a quarter. Level 3 has none in this table: by it, 1024 devices of 32 GB
# hold the states of a model of a trillion parameters. The table leaves out what is whole for a moment. That comes below.

# %% [markdown]
# ## What has to travel when everybody steps a share?
#
# Lay all parameters end to end and cut them into N equal shares. Where N does not divide Ψ, the end is padded, so that all ranks send alike.

# %%
cut = zero.partition(10, 4)
cut.share, cut.padding, [cut.bounds(rank) for rank in range(4)]

# %% [markdown]
# Rank r owns share r: it alone keeps the moments of these weights, and it alone steps them. For that it needs the mean gradient *of its share*, which is
# what a reduce-scatter leaves behind, and afterwards everybody needs everybody's new weights, which is an all-gather. A whole step of SGD:


# %%
def one_step(rank):
    comm, w, gradient = rank.comm("dp"), torch.zeros(12), torch.arange(12.0) * rank.rank
    mine = comm.reduce_scatter(gradient) / comm.size
    share = w.split(3)[comm.rank] - 0.1 * mine
    return comm.all_gather(share)


world.run(one_step)[0]

# %% [markdown]
# That is plain SGD with learning rate 0.1: element i has the gradients 0, i, 2i and 3i, whose mean is 1.5i, and the weights go from 0 to −0.15i.
#
# > Plain data parallelism needs one all-reduce of the gradient. Here there are two collectives. How many times as many bytes does a rank send?

# %%
predict("zero/level-1-sends", times=2)

# %%
sharded = world.ledger
world.run(lambda rank: rank.comm("dp").all_reduce(torch.zeros(12)))
title = "Level 1 sends what plain data parallelism sends"
plots.comm_bars(all_reduce=world.ledger, level_1=sharded, title=title)

# %%
reveal("zero/level-1-sends", times=sharded.total / world.ledger.total)

# %% [markdown]
# An all-reduce *is* a reduce-scatter and an all-gather (lab 07). The optimizer step fits between its halves: $2\Psi\,(N-1)/N$ elements per rank, as before.
#
# **On a real model.** A GPT of four layers, in float64 so that equal can mean equal. `zero.Optimizer` takes the parameters and any function that makes a
# torch optimizer, and is used like one. That function gets this rank's *pieces*: of each parameter the stretch that lies in the rank's share, often nothing.

# %%
sizes = dict(num_layers=4, d_model=32, num_heads=4, d_ff=128)
config = ModelConfig(**sizes, vocab_size=96, seq_len=16, dropout=0.0)
draw = torch.Generator().manual_seed(0)
text = torch.randint(96, (3, 12, 17), generator=draw)  # three steps of twelve sequences


# %%
def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def build(rank, level, dtype=torch.float64, recompute=False, **options):
    """A model of this rank's own random weights, and its optimizer."""
    model, comm = GPT(config, generator=rank.generator).to(dtype), rank.comm("dp")
    if recompute:
        checkpointing.apply(model, "full")
    if level == 3:
        zero.shard(model, comm, **options)
        return model, adamw(model.parameters())
    options = {"level": level, "bucket_bytes": 2**16}
    return model, zero.Optimizer(model.parameters(), comm, adamw, **options)


def step(rank, model, optimizer, k):
    """Step k, on this rank's sequences."""
    optimizer.zero_grad()
    mine = text[k].chunk(rank.size)[rank.rank]
    model.loss(mine[:, :-1], mine[:, 1:]).backward()
    optimizer.step()


# %% [markdown]
# The ranks draw different weights, and all go on with those of rank 0. The plain model has the same, and sees the whole batch:

# %%
model = GPT(config, generator=torch.Generator().manual_seed(0)).double()
optimizer = adamw(model.parameters())
for sequences in text:
    optimizer.zero_grad()
    model.loss(sequences[:, :-1], sequences[:, 1:]).backward()
    optimizer.step()
expected = [parameter.detach() for parameter in model.parameters()]

# %% [markdown]
# Three results, always together, each against its formula: **equal** weights on every rank after three steps, **bytes sent** in those steps, **bytes held**
# at the fullest moment of the third. `rigs.zero.three_results` builds, trains and compares on all ranks of a world:

# %%
few = [World(ranks) for ranks in (2, 3)]
print(rigs.zero.Results.HEAD)
for level in (1, 2):
    for several in (*few, world):
        results = rigs.zero.three_results(several, level, build, step, expected)
        print(results)

# %% [markdown]
# "Sent" is one step of rank 0. Levels 1 and 2 send the same. What they hold differs in the gradients: level 1 keeps them whole until the step, level 2
# reduces them bucket by bucket *during* the backward pass and keeps a share. The peak of four ranks at level 2, line by line:

# %%
results.peak_states.diff(results.history.peak.ledger)

# %% [markdown]
# The buckets are the temporary part: one that fills and one that is being reduced. The optimizer's lines are a quarter of the weights each, as promised.
#
# A schedule of the learning rate takes the torch optimizer inside: `LambdaLR(optimizer.inner, …)`.
#
# **What it buys with accumulation.** Level 1 keeps whole gradients, so it can add up micro-batches and reduce once per step. Levels 2 and 3 keep
# no whole gradients, and reduce after every micro-batch: (k + 1)Ψ at level 2 and 3kΨ at level 3 for k of them, where level 1 sends 2Ψ, all times (N − 1)/N. Eight micro-batches, GPT-2 in fp32, 4 ranks:

# %%
def step_sends(level, k=1):
    train = TrainConfig(micro_batch=1, global_batch=4 * k, precision="fp32", zero=level)
    return formulas.sent(ModelConfig.named("gpt2"), train, Mesh(dp=4)).total


for level in (1, 2, 3):
    print(f"level {level}: {units.text(step_sends(level, k=8))}")

# %% [markdown]
# So with long accumulation, and where whole gradients fit, level 1 sends the least.
#
# ### Exercise 9.1 · Shard the optimizer (20 min, ●●○)
#
# w holds all weights end to end, alike on all ranks; `make([parameter])` is a torch optimizer. Any length, and state for a share alone.


# %%
class ShardedOptimizer:
    def __init__(self, w: nn.Parameter, comm, make):
        raise NotImplementedError

    def step(self):
        """w.grad is this rank's own. Afterwards w is new, and the same on all ranks."""


# %%
check("zero/optimizer", ShardedOptimizer)

# %%
hint("zero/optimizer", 1)

# %% [markdown]
# The library does it for many flat tensors, so that one can travel while the next one is computed:

# %%
show(zero.Optimizer.step)

# %% [markdown]
# ## When does a layer have to be whole?
#
# While it computes. Level 3 gathers a layer right before its forward, frees it right after, gathers it once more for its backward,
# and reduce-scatters the gradient of all its weights. Nothing is sent when a layer is freed: every owner still has its share.
#
# > Plain data parallelism sends $2\Psi(N-1)/N$ elements per step. How many times as much does level 3 send?

# %%
predict("zero/level-3-sends", times=2)

# %% [markdown]
# Two gathers and a reduce-scatter, each $\Psi(N-1)/N$:

# %%
reveal("zero/level-3-sends", times=round(step_sends(3) / step_sends(0), 2))

# %% [markdown]
# `zero.shard` changes a module in place: from then on its parameters *are* this rank's pieces, and they have their gradients after `backward()`. Any torch
# optimizer steps them. A *unit*, here a layer, is what is gathered at once. Three results, with the two switches of level 3. `reshard=False` keeps the layers after the forward and saves the second gather. `prefetch` starts to
# gather the next layer while this one computes, and pays with one more whole layer.


# %%
def level_3(several, **options):
    return rigs.zero.three_results(several, 3, build, step, expected, **options)


print(rigs.zero.Results.HEAD)
for switches in ({}, {"prefetch": False}, {"reshard": False}):
    print(level_3(world, **switches), "", switches or "as they are set")

# %%
print(rigs.zero.Results.HEAD, *map(level_3, few), sep="\n")

# %% [markdown]
# **And with activation checkpointing?** Each layer computes its forward once more, in the backward pass (lab 04). Does it have to be gathered a third time?

# %%
print(rigs.zero.Results.HEAD, level_3(world, recompute=True), sep="\n")

# %% [markdown]
# No: it is computed again where it is whole anyway, for its own backward. Recomputation costs time and not a byte on the wire. (A piece of several layers, recomputed at once, makes them whole together: it costs memory.)
#
# The same on two processes, which share no memory: the same weights, and the same bytes as two ranks above.

# %%
processes = World(2, "processes")
print(rigs.zero.Results.HEAD)
for level in (1, 2, 3):
    print(rigs.zero.three_results(processes, level, build, step, expected))

# %% [markdown]
# The same step of rank 0, over time:

# %%
results = level_3(world)
title = "A layer comes, computes and goes; what stays is a quarter of everything"
plots.memory_timeline(results.history, title=title)

# %%
results.peak_states.diff(results.history.peak.ledger)

# %% [markdown]
# A quarter of everything is what stays. The last three lines, here the larger part of a small model, are *transient*: the unit that computes, the next one,
# and what belongs to no layer (embeddings, head) and is whole through the entire pass. *On its way* is a matrix's gradient that is not in its bucket yet.

# %% [markdown]
# ### Exercise 9.2 · Gather, use, free (15 min, ●●○)
#
# Write the schedule of level 3 for any number of units, as a list of pairs: `("gather", i)` starts to make unit i whole, `("forward", i)` and
# `("backward", i)` need it whole, `("free", i)` keeps the share alone, `("reduce", i)` leaves a share of the gradient. At most two units are whole at once, and two
# gradients; the gather of the next unit begins before this one computes.


# %%
def schedule(num_units: int) -> list[tuple[str, int]]:
    raise NotImplementedError


# %%
check("zero/schedule", schedule)

# %%
hint("zero/schedule", 1)

# %%
show(zero.unit_order)

# %% [markdown]
# Nobody writes such a list for a real model. `zero.shard` sets hooks before and after each unit's passes, which do the same when its turn comes, and free the last unit too: hence all of 3Ψ above.

# %% [markdown]
# ### Further: one rank of 16,384
#
# What a rank sends and holds can be counted without the other ranks, and without numbers in its tensors. On `engine="dry"` one rank of any size runs alone: its
# tensors have shapes and no values, its messages are counted and arrive at once. The very same `zero.shard`, on Llama-3.1-405B. Weights travel and compute in bf16; the shares
# are fp32, 16 bytes for each parameter.
#
# > A share of these 16 bytes is 0.4 GB on each of 16,384 ranks. How many GB of model states does a rank hold at the fullest moment?

# %%
predict("zero/peak-of-16384", GB=1)

# %%
def dry_step(rank, config, apart=False):
    """What a step holds that is not the optimizer's first."""
    model = GPT(config, attention="sdpa")
    parts = [model.tokens, *model.blocks, model.head] if apart else None
    zero.shard(model, rank.comm("dp"), units=parts, param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    tokens = torch.zeros(1, 8192, dtype=torch.long)

    def step():
        model.loss(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for piece in model.parameters():
        piece.grad = torch.zeros_like(piece) if len(piece) else None
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    return rigs.zero.states_over(step, model, optimizer).peak.ledger


# %%
largest, n = ModelConfig.named("llama-3.1-405b"), 16_384
train, mesh = TrainConfig(micro_batch=1, global_batch=n, zero=3), Mesh(dp=n)
print("   rank  layers              held  unexplained              sent  unexplained")
with World(n, engine="dry") as dry:
    for rank, layers in ((0, 3), (11_111, 3), (11_111, 8)):
        deep = dataclasses.replace(largest, num_layers=layers)
        held = dry.run(dry_step, deep, rank=rank)
        states = formulas.peak_states(deep, train, mesh, rank).diff(held)
        start = dict(nbytes=4 * deep.num_params, n=n, itemsize=4, rank=rank)
        books = rigs.zero.between_ranks(formulas.sent(deep, train, mesh, rank))
        books += collectives.sent("broadcast_tree", **start)
        row = f"{held.total:15,} B {states.unexplained:12}"
        row += f" {books.total:15,} B {dry.ledger.total - books.total:12}"
        print(f"{rank:7,} {layers:7} {row}")

# %% [markdown]
# "Sent" is the start, where rank 0 sends its weights down a tree, and one step. The formulas explain every byte. From three layers on, a further one adds its share to the peak and nothing else. Ask the formulas for all 126:

# %%
peak = formulas.peak_states(largest, train, mesh, rank=11_111).total
reveal("zero/peak-of-16384", GB=round(peak / 1e9, 1))

# %% [markdown]
# Nearly all of it is one layer and the next, with their gradients, and the embedding and the head, which belong to no layer and are whole through the entire pass.
# No number of devices lowers that. Units do: with embedding and head as units of their own, as torchtitan has them, the eight layers hold at most

# %%
with World(n, engine="dry") as dry:
    apart = dry.run(dry_step, deep, True, rank=11_111)
units.text(held.total), units.text(apart.total)

# %% [markdown]
# A GPT of a trillion parameters, with tied embeddings, on 1024 devices: its states on paper and at their peak:

# %%
wide = dict(num_heads=160, d_ff=102_400, vocab_size=50_304, seq_len=2048)
trillion = ModelConfig(num_layers=128, d_model=25_600, **wide)
train = dataclasses.replace(train, global_batch=1024)
at_most = formulas.peak_states(trillion, train, Mesh(dp=1024)).total
units.text(zero.model_states(trillion.num_params, 1024, 3).total), units.text(at_most)

# %% [markdown]
# More than the 80 GB of an H100. Activations come on top. (Without prefetch one layer less is whole, 15.7 GB, and every gather is waited for.)
# <!-- claim: (lambda m: round(2e-9 * sum(anatomy.units(m)["blocks.0"]), 1))(config.ModelConfig(num_layers=128, d_model=25600, num_heads=160, d_ff=102400, vocab_size=50304, seq_len=2048)) == 15.7 -->
# And what does a step take? Llama 3 was trained on 2,048 sequences of 8,192 tokens at a time: 1,024 tokens for each of 16,384 ranks.
# A node of H100s has eight links of 50 GB/s, of which messages reach 40. Eight rings use them all (lab 07), 320 GB/s from each rank to the next. Products reach 61 % of the peak, an estimate from Llama 3's published throughput:

# %%
def level_3_sends(model, n, **kind):
    """Bytes that each of n ranks sends in a step of one micro-batch, all in bf16."""
    train = TrainConfig(**dict(micro_batch=1, global_batch=n, zero=3) | kind)
    return rigs.zero.between_ranks(formulas.sent(model, train, Mesh(dp=n))).total


h100 = Hardware.named("H100")
wire = h100.ring(n)
sent = level_3_sends(largest, n)
hops = 3 * (largest.num_layers + 1) * (n - 1)  # of a ring, three times for each unit
print(f"computing: {6 * largest.num_params * 1024 / h100.rate():.1f} s")
print(units.text(sent), f"of bytes: {sent / wire.bandwidth:.1f} s")
print(f"{hops:,} hops: {hops * wire.latency:.0f} s")

# %% [markdown]
# **Sharding alone is not enough for the 405 billion: with 16 million tokens in a step, 1,024 for each rank are too little work to hide the bytes.** Rings are not to blame: without a single hop the bytes take 1.8 times as long as the computing (1.4 times if every layer is recomputed), and smaller groups of ranks gather as many.
# Nor is memory: with the units of above a whole sequence fits, at 68 GB, if every layer is recomputed. But a sequence for every rank would be a batch eight times as large.
# <!-- claim: (lambda peak: round(1e-9 * (peak(3) + 123 * (peak(4) - peak(3)) - 8 * 128_256 * 16_384)))(lambda layers: predict.peak((lambda c: type(c)(**(vars(c) | {"num_layers": layers, "seq_len": 8192})))(config.ModelConfig.named("llama-3.1-405b")), config.TrainConfig(micro_batch=1, global_batch=16384, zero=3, checkpointing="full", attention="sdpa"), config.Mesh(dp=16384)).total) == 68 -->
# Labs 10 and 13 divide the bytes: a rank with an eighth of each layer, or one layer in sixteen, makes that much less whole and gathers that much less. With 8 × 16 ranks to a copy of the model, 128 copies are left: rings of 128, and 16 sequences for each.

# %% [markdown]
# ## Further: is level 3 slower, then?
#
# It sends 1.5 times as much. Whether that takes time depends on what a rank computes meanwhile. Take the blocks of Llama-3.1-8B in bf16 on 64 such H100s, eight per
# node. One unit is one block; its forward pass is 2 FLOPs per weight and token.

# %%
block_params = sum(anatomy.units(ModelConfig.named("llama-3.1-8b"))["blocks.0"])
rate, network = h100.rate(), h100.ring(64)


def step_in(order, tokens):
    """A step in that order, of a rank that has so many tokens of the batch."""
    block = 2 * block_params, 2 * block_params * tokens / rate
    return zero.step_timeline(order, [block] * 32, n=64, link=network)


# %% [markdown]
# > How many tokens must a rank have in a micro-batch until the gathers hide behind computation?

# %%
predict("zero/tokens-per-rank", tokens=1000)

# %% [markdown]
# A gather brings $2\Psi_l$ bytes of layer l, at bw bytes per second; meanwhile its neighbor computes $2\Psi_l$ FLOPs for each of T tokens, at F FLOPs per second:
#
# $$ \begin{aligned} \frac{2\Psi_l T}{F} \;&\ge\; \frac{2\Psi_l}{\mathrm{bw}}\,\frac{N-1}{N} \\ \Longleftrightarrow\quad T \;&\ge\; \frac{F}{\mathrm{bw}}\,\frac{N-1}{N} \end{aligned} $$
#
# The size of the layer cancels. The backward pass computes twice as long, and has a gather and a reduce-scatter to hide: the same condition, if gradients travel in 16 bits; in fp32 the
# reduce-scatter takes twice as long, and it needs one and a half times as many tokens.

# %%
reveal("zero/tokens-per-rank", tokens=round(rate / network.bandwidth * 63 / 64))

# %% [markdown]
# This condition leaves out the latency of a ring's hops; the time lines below count it. Every gather is N − 1 hops long, however short its pieces: on 64 ranks the hops of a block take 23 % of the time of its bytes, on 1024 ranks 3.8 times that time, at 5 µs for each hop.
# <!-- claim: (lambda b, r: [round((n - 1) * r.latency * r.bandwidth / b, 2) for n in (64, 1024)])(2 * sum(anatomy.units(config.ModelConfig.named("llama-3.1-8b"))["blocks.0"]), config.Hardware.named("H100").ring(64)) == [0.23, 3.75] -->
# So the condition holds for messages much longer than N·λ·bw, λ being the latency of a hop. Beyond that, libraries gather in fewer steps than a ring, or in smaller groups (hybrid sharding, below).
#
# Level 3 as it is set gathers in every micro-batch, so tokens of other micro-batches hide nothing. 4,096 tokens per step, taken as 1, 2, 4 and 8 micro-batches; the time of a step over that of its
# computation:


# %%
def stretched(order, count):
    timeline = step_in(order, count)
    return timeline.makespan / (timeline.makespan - timeline.exposed)


[round(stretched(zero.unit_order(32), 4096 // k), 2) for k in (1, 2, 4, 8)]

# %% [markdown]
# Now against level 2, which reduces each layer during the backward pass. It gathers all new weights after the step, or, as `--overlap-param-gather` of Megatron-LM does, each layer's while the
# layer before it computes in the next forward pass:

# %%
tokens = [2**k for k in range(8, 16)]
orders = rigs.zero.orders(32)
lines = {name: [stretched(order, k) for k in tokens] for name, order in orders.items()}
axes = {"xlabel": "tokens per rank", "ylabel": "step / computation", "log": "x"}
title = "The next layer arrives while this one computes, if a rank has enough tokens"
plots.curves(tokens, title=title, **axes, **lines)

# %%
{name: [round(time, 2) for time in times] for name, times in lines.items()}

# %% [markdown]
# *No prefetch* is level 3 whose gathers begin when their layer is needed. With few tokens the step is as long as its messages, and level 3 pays for its third Ψ. With enough of them it waits only for its first gather and its last
# reduction. Level 2 waits for all gathers if nothing computes while they run. If they run ahead, it is never slower than level 3 here.
#
# This is a model: ranks alike, no contention, attention's own FLOPs left out.
#
# ## Further: what if the network between machines is slow?
#
# **Hybrid sharding (HSDP)** shards inside a machine and replicates across machines: gathers and reduce-scatters stay on the fast links, and across goes an
# all-reduce of the gradient's *share*. Two machines of two ranks: on the axis `tp` lie the ranks of one machine, on `dp` the machines.


# %%
def hybrid(rank):
    """Three steps: are the weights the plain model's?"""
    inside, across = rank.comm("tp"), rank.comm("dp")
    model = GPT(config, generator=torch.Generator().manual_seed(0)).double()
    optimizer = adamw(zero.shard(model, inside).parameters())
    for sequences in text:
        optimizer.zero_grad()
        mine = sequences.chunk(rank.size)[rank.rank]
        model.loss(mine[:, :-1], mine[:, 1:]).backward()
        for piece in filter(len, model.parameters()):
            piece.grad = across.all_reduce(piece.grad) / across.size
        optimizer.step()
    return rigs.zero.is_equal(model, expected)


machines = World(Mesh(dp=2, tp=2))
machines.run(hybrid)

# %% [markdown]
# Bytes of rank 0 in three steps, with the start and with the gather that compares the weights: first by formula, then counted.

# %%
psi = sum(parameter.numel() for parameter in model.parameters())
inside = 3 * level_3_sends(config, 2, precision="fp64")
inside += 8 * psi + 8 * psi // 2  # the start, and the gather
share = dict(nbytes=8 * psi // 2, n=2, itemsize=8, rank=0)
across = collectives.sent("all_reduce_ring", **share).total
{"tp": inside, "dp": 3 * across}, machines.ledger.only(rank=0).by("axis")

# %% [markdown]
# Llama-3.1-8B in bf16, 64 devices, eight per machine. What a rank sends in a step, and what it holds of model states:

# %%
llama = ModelConfig.named("llama-3.1-8b")
flat, inside = level_3_sends(llama, 64), level_3_sends(llama, 8)
params = llama.num_params
share = dict(nbytes=2 * params // 8, n=8, itemsize=2, rank=0)
across = collectives.sent("all_reduce_ring", **share).total
held = [units.text(zero.model_states(params, n, 3).total) for n in (64, 8)]
print(f"sharded over 64: a rank sends {units.text(flat)}, holds {held[0]}")
amounts = f"{units.text(inside)} inside, {units.text(across)} across"
print(f"hybrid: {amounts}, holds {held[1]}")

# %% [markdown]
# These are bytes per *rank*. What leaves a *machine*? In one ring over all ranks a single rank of eight sends to another machine; in the hybrid all eight do. A rank has a link of its own:

# %%
leaves = {"one ring": (flat, 1), "eight rings": (flat, 8), "hybrid": (8 * across, 8)}
for how, (nbytes, links) in leaves.items():
    each = units.text(nbytes / links)
    print(f"{how:11} {units.text(nbytes)} leave a machine, {each} per link of {links}")

# %% [markdown]
# So the hybrid sends 59 % as many bytes from machine to machine as flat sharding in rings, and 89 % if gradients are reduced in fp32. For that a rank holds eight times the model states.
# <!-- arithmetic: [(lambda flat, across: round(100 * across / flat))((4 + g) * 63 / 64, 8 * 2 * g / 8 * 7 / 8) for g in (2, 4)] == [59, 89] -->
# Against one ring the gain is in the links, eight in place of one. Against eight rings,
# which use all links as well, 5.9 GB through each become 3.5, and a gather has 7 hops in place of 63. With accumulation the hybrid gains more: shares of gradients add up, and cross once per step, where flat gathers cross in every micro-batch.

# %% [markdown]
# ## Further: what changes with half-precision weights?
#
# The weights that compute are bf16, and travel as bf16. The optimizer steps an fp32 master copy (lab 02), and nobody needs more of that than the share
# that it owns: so the master is sharded from the start, at every level. At level 3 the fp32 share is all that stays: with `param_dtype=torch.bfloat16` it is
# rounded when it is gathered.
#
# > By the paper's count level 1 on four ranks holds 2 + 2 + 12/4 = 7 bytes for each parameter. How many does a rank have after a step, when whole gradients are gone and the fp32 share of them is not?

# %%
predict("zero/bytes-after-a-step", bytes=5)


# %%
def at_rest(rank, level):
    if level == 3:
        model, optimizer = build(rank, 3, torch.float32, param_dtype=torch.bfloat16)
    else:
        model, optimizer = build(rank, level, torch.bfloat16)
    step(rank, model, optimizer, 0)
    return measure.model_states(model, getattr(optimizer, "inner", optimizer))


rest = {level: world.run(at_rest, level)[0].by("name") for level in (1, 2, 3)}
for level, lines in rest.items():
    del lines["step"]
    print(level, {name: round(nbytes / psi, 2) for name, nbytes in lines.items()})

# %%
reveal("zero/bytes-after-a-step", bytes=round(sum(rest[1].values()) / psi, 1))

# %% [markdown]
# At levels 1 and 2 the weights are whole, 2 bytes; master copy and moments are 4 + 4 + 4 bytes, divided by four. At level 3 the shares of the weights *are* the master copy. The share of the gradient is fp32 here at every
# level, as the optimizer takes it: 4 bytes divided by four, where the paper counts 2.
#
# **One rank's inf must be everybody's.** With fp16 the loss is scaled (lab 02), and a step whose gradient has overflowed is skipped. But after the reduce-scatter
# a rank sees its share alone. Let one gradient overflow on rank 2, that of the last norm, and ask each rank: is your share finite, did you step, what is your scale now?


# %%
def overflow(rank):
    model, optimizer = build(rank, 2, torch.float16)
    scaler = LossScaler(2.0**10, comm=rank.comm("dp"))
    mine = text[0].chunk(4)[rank.rank]
    if rank.rank == 2:
        model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    scaler.scale(model.loss(mine[:, :-1], mine[:, 1:])).backward()
    gradients = [piece.grad for piece in optimizer.collect() if piece.grad is not None]
    finite = all(gradient.isfinite().all().item() for gradient in gradients)
    stepped = scaler.step(optimizer)
    scaler.update()
    return f"share finite: {finite}, stepped: {stepped}, scale: {scaler.value:g}"


world.run(overflow)

# %% [markdown]
# The rank whose gradient overflowed is not the one that sees it. If each asked only itself, most would step, the others would not, and from then on the
# ranks would train different models with different scales. The scaler knows the ranks: one all-reduce of one number, the largest flag, and all skip alike:

# %%
{name: nbytes for name, nbytes in world.ledger.by("name").items() if name == "finite"}

# %% [markdown]
# ### Exercise 9.3 · Bug hunt: the optimizer that passed its test (15 min, ●●●)
#
# A colleague wrote level 1 for bf16 weights, with clipping. All ranks agree after a step, the weights are those of one device, and of master copy and optimizer state a rank holds its share. (That gradients are added up in bf16 is meant.)


# %%
class HalfOptimizer:
    """An fp32 master copy and the optimizer state of this rank's share of w."""

    def __init__(self, w: nn.Parameter, comm, make):
        self.w, self.comm, self.dealt = w, comm, zero.partition(w.numel(), comm.size)
        self.master = nn.Parameter(self.own(w.detach()).float())
        self.inner = make([self.master])

    def own(self, x):
        padded = nn.functional.pad(x, (0, self.dealt.padding))
        return padded.split(self.dealt.share)[self.comm.rank]

    def step(self, max_norm):
        """The norm of the gradient, which is scaled to at most max_norm before it."""
        padded = nn.functional.pad(self.w.grad, (0, self.dealt.padding))
        self.master.data.copy_(self.own(self.w.detach()))
        self.master.grad = self.comm.reduce_scatter(padded).float() / self.comm.size
        norm = nn.utils.clip_grad_norm_([self.master], max_norm)
        self.inner.step()
        new = self.comm.all_gather(self.master.detach().bfloat16())
        self.w.data.copy_(new[: self.w.numel()])
        return norm


# %%
def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.25)


def its_test(rank):
    w = nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    optimizer = HalfOptimizer(w, rank.comm("dp"), sgd)
    w.grad = torch.full_like(w, 2.0 * rank.rank)  # the mean of 0, 2, 4, 6 is 3
    optimizer.step(max_norm=100)
    return w.tolist()


all(w == [1 - 0.25 * 3] * 10 for w in world.run(its_test))

# %% [markdown]
# It has two bugs that this test cannot see. Repair the class in its cell, and run the check again.

# %%
check("zero/repair", HalfOptimizer)

# %%
hint("zero/repair", 1)

# %% [markdown]
# The library's clipping, at every level: each rank adds up the squares of its share, one number travels, and all scale alike.

# %%
show(zero.clip_grad_norm)

# %% [markdown]
# ## Further: what if the next run has another number of ranks?
#
# A share is a share of N. A snapshot must not be: a machine fails, and three are left. `zero.save` writes whole parameters, without padding, into a safetensors file; `zero.load` cuts
# anew, for any number of ranks and any level. Two steps on four ranks at level 2, the third elsewhere; each rank says whether its weights are those of the plain model:

# %%
folder = tempfile.TemporaryDirectory()
path = pathlib.Path(folder.name) / "after-two-steps"


def begin(rank):
    model, optimizer = build(rank, level=2)
    step(rank, model, optimizer, 0)
    step(rank, model, optimizer, 1)
    zero.save(path, model, optimizer)


def go_on(rank, level):
    model, optimizer = build(rank, level)
    zero.load(path, model, optimizer)
    step(rank, model, optimizer, 2)
    return rigs.zero.is_equal(model, expected)


# %%
world.run(begin)
for ranks, level in ((3, 3), (2, 2), (2, 3), (1, 1)):
    with World(ranks) as fewer:
        print(f"ranks: {ranks}, level {level}: {fewer.run(go_on, level)}")

# %%
folder.cleanup()

# %% [markdown]
# ## Further: how does it compare with PyTorch's own?
#
# Two processes, the model and the batches from above. `ZeroRedundancyOptimizer` together with `DistributedDataParallel` is PyTorch's level 1, `fully_shard` its
# level 3.


# %%
def theirs(rank, name):
    """Three steps by PyTorch: are the weights the plain model's?"""
    model = GPT(config, generator=torch.Generator().manual_seed(0)).double()
    module, group = model, rank.comm("dp").group
    if name == "fully_shard":
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=DeviceMesh.from_group(group, "cpu"))
        optimizer = adamw(model.parameters())
    else:
        module = DistributedDataParallel(model, process_group=group)
        how = dict(process_group=group, optimizer_class=torch.optim.AdamW, lr=1e-2)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), **how)
    for sequences in text:
        optimizer.zero_grad()
        mine = sequences.chunk(rank.size)[rank.rank]
        outputs = module(mine[:, :-1]).flatten(0, 1)
        nn.functional.cross_entropy(outputs, mine[:, 1:].flatten()).backward()
        optimizer.step()
    whole = [getattr(w, "full_tensor", lambda w=w: w)() for w in model.parameters()]
    pairs = zip(whole, expected, strict=True)
    return all(torch.allclose(w, e, rtol=0, atol=1e-10) for w, e in pairs)


# %%
for name in ("ZeroRedundancyOptimizer", "fully_shard"):
    print(f"{name:23}", processes.run(theirs, name))
processes.close()

# %% [markdown]
# The same weights again, on both ranks.
#
# `ZeroRedundancyOptimizer` comes after DDP's all-reduce, and then every rank broadcasts the parameters that it owns: 3Ψ in all, not 2Ψ. It also gives each
# parameter to one rank as a whole, so that a large embedding makes its owner's share large. `fully_shard` cuts each parameter along its
# first dim, not a flat tensor: names and shapes survive, and a sharded snapshot needs no communication.
#
# ## Further: turn the knobs
#
# Model states on each device at the four levels, against what one device has. Activations come on top (lab 03). The paper's 7.5B parameters on 64 devices of
# 32 GB: at which level do the states fit, and at which do they leave 8 GB? And if gradients are kept in fp32?

# %%
conventions = {"16Ψ: 2-byte gradients": 2, "18Ψ: 4-byte gradients": 4}
psi_70b = ModelConfig.named("llama-3.1-70b").num_params
known = {"7.5B": 7_500_000_000, "llama-3.1-70b": psi_70b}


def memory_per_device(
    model="7.5B", devices=64, precision="16Ψ: 2-byte gradients", device="V100"
):
    """The four levels as stacked bars; hatched is what the dp axis shards."""
    width = {"gradient_bytes": conventions[precision]}
    states = [
        zero.model_states(known[model], devices, level, **width) for level in range(4)
    ]
    bars = {f"level_{level}": ledger for level, ledger in enumerate(states)}
    return plots.memory_bars(capacity=Hardware.named(device), **bars)


knobs = {"model": list(known), "devices": [8, 64, 512], "precision": list(conventions)}
explore(memory_per_device, **knobs, device=["V100", "H100"])

# %% [markdown]
# ## In practice
#
# | you set | you get |
# |---|---|
# | `ZeroRedundancyOptimizer(params, …)` with DDP | PyTorch: level 1 |
# | `fully_shard(block)` for each block, then `fully_shard(model)` | PyTorch FSDP2: level 3 |
# | … with `reshard_after_forward=False` | no second gather: what level 2 sends |
# | … with `mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` | fp32 shards, gathered as bf16; gradients reduced in fp32 |
# | … with `offload_policy=CPUOffloadPolicy()` | shards, gradients and the step on the host |
# | `nn.utils.clip_grad_norm_(model.parameters(), 1.0)`, `torch.amp.GradScaler` after `fully_shard` | the global norm; one inf for all: they know sharded tensors |
# | `--parallelism.fsdp_reshard_after_forward always`, `never` or `default` | torchtitan 0.2.2: the same switch |
# | `"zero_optimization": {"stage": 1}`, or 2, or 3 | DeepSpeed: the level |
# | `"offload_optimizer": {"device": "cpu"}` in it, `"gradient_clipping": 1.0` beside it | DeepSpeed: offload; the global norm |
# | `--use-distributed-optimizer`, `--clip-grad 1.0` | Megatron-LM: level 1, whose halves `--overlap-grad-reduce` and `--overlap-param-gather` hide; the global norm |
#
# **FSDP2** is called bottom-up, on each block and then on the root, and each call makes one group that is gathered at once: our units. An integer for `reshard_after_forward` reshards to a smaller group, such
# as one machine. torchtitan 0.2.2 shards over `--parallelism.data_parallel_shard_degree` ranks and replicates over `--parallelism.data_parallel_replicate_degree` of such groups: hybrid sharding.
# `set_requires_gradient_sync(False)` keeps whole gradients through the micro-batches before the last, and reduces once per step, as level 1 does.
#
# **On a cluster** of two nodes of eight devices, type on both:
#
# ```
# torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint node0:29400 \
#     examples/train.py --dp 16 --zero 3
# ```
#

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **"Once the forward pass is complete, FSDP releases the unsharded local data back to the other GPUs."** (A. Khandelwal, *Efficient LLM Training: Memory & Compute <!-- erratum: S2-024 -->
# Optimization*, Medium, 12 February 2024). Nothing is sent back. Everything that one forward of level 3 sends, with the frees in it:


# %%
def forward_only(rank):
    model, _ = build(rank, 3, torch.float32)
    with torch.no_grad():
        model(text[0][:, :-1])


world.run(forward_only)
world.ledger.by("name"), 4 * (4 * psi * 3 // 4)

# %% [markdown]
# The broadcast is the start; the rest is one gather: each rank sends $\Psi(N-1)/N$ elements of 4 bytes.
#
# ### True under a condition
#
# **"requests the necessary data from the other GPUs as needed to reconstruct a complete set of unsharded, local data"** (the same article). True where *data* means parameters; the training data of a rank stay its own. <!-- erratum: S2-023 -->
#
# **ZeRO-2 as "enabling reduce-scatter in the backward pass instead of all-reduce"** (an article on efficient training at scale). True where level 1 uses an all-reduce. Level 1 can do without as well, and above it did; what level 2 adds is to *free* the gradients of others. <!-- erratum: S1-040 -->
# DeepSpeed's first stage 1 did use an all-reduce, 3Ψ per step, until March 2020.
#
# **Optimizer states as "momentum and variance in the Adam optimization algorithm"** (chapter 15, *LLM Training Acceleration (WIP)*, of an online book on large <!-- erratum: S0-064 -->
# language models), followed by K = 12. Two moments are K = 8; the other four bytes are the fp32 master copy, which the chapter's first section does count. The lines above have all three.
#
# **A table of 16Ψ in a text that calls 20Ψ the standard** (reading notes on *The Ultra-Scale Playbook*). With fp32 gradients in addition to the half-precision ones a parameter takes 2 + 6 + 12 = 20 bytes, and the floors of levels 1 and 2 are 40 % and 10 %, not <!-- erratum: S3-019 -->
# the 25 % and 12.5 % of the table.
# <!-- claim: [[round(100 * zero.model_states(1, 10**9, level, gradient_bytes=g).total / (14 + g), 1) for level in (1, 2)] for g in (2, 6)] == [[25.0, 12.5], [40.0, 10.0]] -->
#
# **(2Ψ + 2Ψ + kΨ)/N_d at level 3** (the same notes, after the ZeRO paper's table 1). True between units; it leaves out what is whole for a moment: for the model of a trillion parameters on 1024 devices 15.8 GB become 89.3 GB, as above. <!-- erratum: S3-018 -->
#
# **The paper's table 1** truncates whole numbers: 257.75 GB stand there as 257, 4187.5 as 4187. Those with decimals it rounds (41.25 to 41.3). <!-- erratum: ZE-30 -->

# %% [markdown]
# ## Summary
#
# > - Optimizer state, gradients, weights: each level of ZeRO shards one more. 7.5B parameters on 64 devices: 120, 31.4, 16.6, 1.9 GB.
# >   <!-- claim: [round(zero.model_states(7.5e9, 64, level).total / 1e9, 1) for level in range(4)] == [120.0, 31.4, 16.6, 1.9] -->
# > - Levels 1 and 2 send what plain data parallelism sends, 2Ψ(N − 1)/N elements: an all-reduce with the step between its halves.
# >   <!-- claim: all(claims.zero_sends(level) * 4 * 840 * 3 // 4 == collectives.sent("all_reduce_ring", nbytes=4 * 840, n=4, rank=0).total for level in (1, 2)) -->
# > - Level 3 sends 3Ψ(N − 1)/N, half as much again, or 2Ψ without resharding. Freeing sends nothing.
# >   <!-- claim: 2 * claims.zero_sends(3) == 3 * claims.zero_sends(2) -->
# >   <!-- claim: claims.zero_sends(3, reshard=False) == claims.zero_sends(2) -->
# > - The gathers of level 3 hide if a rank has about F/bw tokens in a micro-batch, FLOP/s over bytes/s, whatever the size of a layer, as long as it has many more bytes than N·λ·bw.
# > - Hybrid sharding keeps gathers inside a machine; between machines each rank all-reduces its share of the gradient, 2(Ψ/n)(1 − n/N) elements with n of the N ranks in each machine.
# >   <!-- claim: collectives.sent("all_reduce_ring", nbytes=960, n=4).by("rank")[0] * 4 == collectives.sent("all_reduce_ring", nbytes=4 * 960, n=4).by("rank")[0] -->
# > - With micro-batches levels 2 and 3 reduce after each one, if they keep no whole gradients, and level 1 once: with eight, level 2 sends 4.5 times as much.
# >   <!-- claim: claims.zero_sends(2, micro_batches=8) == 4.5 * claims.zero_sends(1, micro_batches=8) -->
# > - The floors of levels 1 and 2 are 4Ψ and 2Ψ. That of level 3, with layers as units, is two layers and the embeddings with their gradients, and one matrix's gradient on its way, on top of 16Ψ/N: 44.5 GB for Llama-3.1-405B on 16,384 ranks. Embedding and head as units of their own save 16.8 GB of that.
# >   <!-- claim: round(8e-9 * (lambda m: m.vocab_size * m.d_model)(config.ModelConfig.named("llama-3.1-405b")), 1) == 16.8 -->
# >   <!-- claim: round(1e-9 * predict.peak_states(config.ModelConfig.named("llama-3.1-405b"), config.TrainConfig(micro_batch=1, global_batch=16384, zero=3), config.Mesh(dp=16384)).total, 1) == 44.5 -->
# >   <!-- claim: [round(zero.model_states(1, 10**9, level).total, 6) for level in (1, 2)] == [4, 2] -->
# > - Recomputing a layer gathers nothing: it is whole for its backward anyway. Level 3 with checkpointing still sends 3Ψ(N − 1)/N.
# >   <!-- claim: [predict.sent(config.ModelConfig(num_layers=2, d_model=8, num_heads=2, d_ff=8, vocab_size=16, seq_len=4), config.TrainConfig(micro_batch=1, global_batch=4, zero=3, checkpointing=kind), config.Mesh(dp=4)).only(name="all_gather").count for kind in ("none", "full")] == [2 * 3 * 3] * 2 -->
# > - No rank sees the whole gradient: clip by the norm over all ranks, skip a step together, keep the fp32 master of your share, and save whole parameters, which any number of ranks can load.

# %% [markdown]
# ## References
#
# - S. Rajbhandari, J. Rasley, O. Ruwase, Y. He, *ZeRO: Memory optimizations toward training trillion parameter models*, arXiv:1910.02054: levels, table 1, and the bytes sent in section 7.
# - J. Ren et al., *ZeRO-Offload*, arXiv:2101.06840: which part of a step belongs on the host.
# - Y. Zhao et al., *PyTorch FSDP: experiences on scaling fully sharded data parallel*, arXiv:2304.11277: flat parameters, prefetch, resharding.
# - PyTorch documentation of `torch.distributed.fsdp.fully_shard` and of `ZeroRedundancyOptimizer`; torchtitan, `docs/fsdp.md`.
# - DeepSpeed, *ZeRO stage 1 with reduced communication*, release note of 17 March 2020, and its documentation of the configuration file.
# - NVIDIA, Megatron Core developer guide, *Distributed optimizer*: what is distributed, and its table of bytes for each parameter.
