# %% [markdown]
# # 10 · Split every matrix
#
# **A layer is too large, or too slow, for one device. Can several compute it together, each with a part of every matrix, and what must they tell each other on the way?**
#
# *90 min, and 40 further · before this: labs 07 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - split two matrices so that they need one sum each way, forward and backward (exercise 10.1),
# - compute loss and gradient from logits that nobody gathers (exercise 10.2),
# - know which gradients are parts of a sum when ranks share out the tokens (exercise 10.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from labutils import collectives, data_parallel, memory, tensor_parallel, units
from labutils import predict as formulas
from labutils.config import Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.measure import saved_activations
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# These are the tensors that one layer of a GPT keeps for its backward pass, from left to right: tokens downwards, width to the right. A tensor has the name of the layer that reads it; q, k and v go into attention, heads come out of it. The colored part is what one of the four
# ranks holds. Between the green lines each rank works alone.

# %%
gpt2 = ModelConfig.named("gpt2")
plots.tensor_shares(
    n=4,
    rank=1,
    title="No tensor is cut twice: by width between lines, with SP by tokens elsewhere",
    tensor_parallel=tensor_parallel.layer_shares(gpt2),
    with_sequence_parallelism=tensor_parallel.layer_shares(gpt2, sequence=True),
)

# %% [markdown]
# *Tensor parallelism* (TP) cuts matrices, and with them heads and feed-forward width. *Sequence parallelism* (SP) cuts the tokens of everything between. The lines are what
# this lab is about: **an all-reduce per line, or its two halves, and every rank waits for it**, unless both are cut into pieces (asynchronous TP, below).

# %% [markdown]
# ## What does half a layer send?
#
# A linear layer computes $Y = XW^{\mathsf T}$. W can be cut by its outputs (*column parallel*, after the columns of $W^{\mathsf T}$) or by its inputs (*row parallel*):
#
# $$ Y = [\,XW_1^{\mathsf T},\; XW_2^{\mathsf T},\,\dots] \qquad\text{or}\qquad Y = X_1W_1^{\mathsf T} + X_2W_2^{\mathsf T} + \dots $$
#
# By outputs, each rank needs the whole X and has some columns of Y. By inputs, it needs some *columns* of X and has a part of the sum. Standing alone, both begin and end with a collective:

# %%
s, h, f = 32, 64, 256
draw = torch.Generator().manual_seed(0)
shapes = (s, h), (f, h), (h, f)
x, up, down = (torch.randn(shape, generator=draw).double() for shape in shapes)
world = World(Mesh(tp=4))


def by_column(rank):
    """Broadcast X, multiply, gather Y's columns (a comm gathers rows: transpose)."""
    comm, mine = rank.comm("tp"), x if rank.rank == 0 else torch.empty_like(x)
    y = comm.broadcast(mine) @ up.chunk(4)[comm.rank].T
    return comm.all_gather(y.T.contiguous()).T


def by_row(rank):
    """Scatter the columns of X, multiply, sum the parts."""
    comm, inner = rank.comm("tp"), F.gelu(x @ up.T)
    columns = comm.scatter(inner.T.contiguous()).T
    return comm.all_reduce(columns @ down.chunk(4, dim=1)[comm.rank].T)


# %% [markdown]
# A feed-forward layer is a product, a GELU, a product. Give it the first by columns and the second by rows, and X to all ranks:


# %%
def pair(rank):
    comm, i = rank.comm("tp"), rank.rank
    inner = F.gelu(x @ up.chunk(4)[i].T)
    return comm.all_reduce(inner @ down.chunk(4, dim=1)[i].T)


# %% [markdown]
# > In a model every rank has X already, so neither layer needs the collective that it begins with. How many times as many bytes does the busiest rank then send in the two layers
# > as in the pair?

# %%
predict("pair/times", times=2)

# %%
sent, last = {}, {by_column: "all_gather", by_row: "all_reduce", pair: "all_reduce"}
for fn, name in last.items():
    right = (x @ up.T) if fn is by_column else F.gelu(x @ up.T) @ down.T
    equal = all(torch.allclose(y, right) for y in world.run(fn))
    books = world.ledger, world.ledger.only(name=name)
    whole, sent[fn] = (max(each.by("rank").values()) for each in books)
    print(f"{fn.__name__:9}  equal: {equal}  busiest rank: {whole:,} B", end="")
    print(f", with X there: {sent[fn]:,} B")

# %%
reveal("pair/times", times=(sent[by_column] + sent[by_row]) / sent[pair])

# %% [markdown]
# What GELU gives for a rank's columns is what that rank's part of `down` reads. Nothing travels in between, and one all-reduce is left. The other order fails at GELU: each rank would have
# a part of a sum. On two ranks:

# %%
halves = zip(x.chunk(2, dim=1), up.chunk(2, dim=1), strict=True)
a, b = (columns @ inputs.T for columns, inputs in halves)
apart = F.gelu(a) + F.gelu(b) - F.gelu(a + b)
print(f"GELU of the parts, or of the sum: up to {apart.abs().max():.0f} apart")

# %% [markdown]
# ## What must the backward pass send?
#
# Between the residual stream and the split region stand two functions, Megatron's f and g. Each rank reads the same X, so X gets a gradient from each, and they must be summed. The gradient of a part of a sum is
# that of the sum, which each rank has.
#
# | | forward | backward |
# |---|---|---|
# | **f**, on the way in | X as it is | all-reduce of the gradient |
# | **g**, on the way out | all-reduce of the parts | the gradient as it is |
#
# ### Exercise 10.1 · Split a feed-forward layer (25 min, ●●○)
#
# All ranks get the same x and the same whole layers. Use your share. On every rank y, the gradient of x and that of `down.bias` are whole; of `up` and `down` your share. Autograd does not see through `comm.all_reduce`: write f and g as
# `torch.autograd.Function`s, or with hooks of tensors. In a model it runs in every step, and x goes past it, too.


# %%
def split_feed_forward(x, up: nn.Linear, down: nn.Linear, comm):
    """down(gelu(up(x))) for x[b, s, h], alike on all ranks; up and down have biases."""
    raise NotImplementedError


# %%
check("tensor_parallel/feed-forward", split_feed_forward)

# %%
hint("tensor_parallel/feed-forward", 1)

# %%
show(tensor_parallel.RowLinear)

# %% [markdown]
# **Compared with PyTorch.** DTensor's `parallelize_module` takes the same plan by name. On two processes, the same weights and the same input: is it the same layer?

# %%
two = World(Mesh(tp=2), engine="processes")


def against_dtensor(rank):
    torch.manual_seed(0)
    comm = rank.comm("tp")
    net = nn.Sequential(nn.Linear(h, f), nn.GELU(), nn.Linear(f, h))
    ours = tensor_parallel.ColumnLinear.from_full(net[0], comm)
    last = tensor_parallel.RowLinear.from_full(net[2], comm)
    mesh = DeviceMesh.from_group(comm.group, "cpu", mesh_dim_names=("tp",))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    theirs = parallelize_module(net, mesh, plan)
    a, b = (torch.ones(2, 4, h, requires_grad=True) for _ in range(2))
    y, z = last(F.gelu(ours(a))), theirs(b)
    (y**2).sum().backward(), (z**2).sum().backward()
    shares = [theirs[i].weight.grad.to_local() for i in (0, 2)]
    mine = ours.weight.grad, last.weight.grad
    pairs = (y, z), (a.grad, b.grad), *zip(mine, shares, strict=True)
    return all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)


two.run(against_dtensor)

# %% [markdown]
# **Attention** is the same pair: queries, keys and values by columns, the output by rows. A rank gets whole heads, so softmax needs nobody. With fewer key–value heads than
# ranks (GQA), neighbors hold the same head and sum its gradient. Llama-3.1-8B on 16 ranks:

# %%
rank_of_16 = tensor_parallel.rank_config(ModelConfig.named("llama-3.1-8b"), 16)
rank_of_16.num_heads, rank_of_16.num_kv_heads, rank_of_16.d_ff, rank_of_16.vocab_size

# %% [markdown]
# A rank is a smaller GPT of the same width. `parallelize(model, comm)` cuts a whole one in place. It begins with a broadcast of rank 0's weights, so ranks may draw different ones.
#
# Three results, for a GPT-2 and a Llama with two key–value heads: **equal** losses, gradients and weights after three steps in float64, **bytes sent**, **bytes kept** for the backward pass.

# %%
sizes = dict(num_layers=2, d_model=32, num_heads=8, d_ff=128, vocab_size=96, seq_len=16)
style = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
small = ModelConfig(**sizes)
grouped = ModelConfig(**sizes, **style, num_kv_heads=2)
print(rigs.tensor_parallel.Compared.HEAD)
for config in (small, grouped):
    print(rigs.tensor_parallel.compared(world, config))

# %% [markdown]
# ## Further: who needs the logits?
#
# The head is a matrix [v, h], cut by words: each rank has the logits of its words, for every token. The embedding is cut the same way: a rank looks up its own words, gives zeros for
# others, and g sums.
#
# The loss of a token with logits z is $\log\sum_j e^{z_j} - z_{\text{target}}$. Eight ranks, Llama-3.1-8B, 8192 tokens, fp32.
#
# > A rank that gathers all logits sends 3.68 GB. How much if it sends only what the loss needs?

# %%
predict("loss/sends", MB=100)

# %% [markdown]
# Of each token three numbers are reduced over ranks: the largest logit (subtracted, so that no exponential overflows), the sum of exponentials, the target's logit.

# %%
llama = replace(ModelConfig.named("llama-3.1-8b"), seq_len=8192)
fp32 = TrainConfig(micro_batch=1, global_batch=1, precision="fp32")
parts = formulas.sent(llama, fp32, Mesh(tp=8))
logits = 4 * llama.seq_len * llama.vocab_size
gathered = collectives.sent("all_gather_ring", nbytes=logits, n=8, rank=0)
print(f"{units.text(gathered.total)} or {units.text(parts.only(name='loss').total)}")

# %%
reveal("loss/sends", MB=parts.only(name="loss").total / 1e6)

# %% [markdown]
# ### Exercise 10.2 · A loss without the logits (10 min, ●●○)
#
# `tensor_parallel.reduce_from(x, comm)` is g: a sum whose gradient is right. `comm.all_reduce(x, "max")` is the largest.


# %%
def my_cross_entropy(logits, targets, comm):
    """Mean loss; this rank has logits[s, v_t], words comm.rank · v_t and on."""
    raise NotImplementedError


# %%
check("tensor_parallel/cross-entropy", my_cross_entropy)

# %%
hint("tensor_parallel/cross-entropy", 1)

# %%
show(tensor_parallel.layers._CrossEntropy)

# %% [markdown]
# ## What do all ranks still keep alike?
#
# A layer of GPT-3 (s = 2048, h = 12,288, a = 96 heads, b = 1), half-precision, as the paper counts:
#
# $$ \underbrace{sbh\Bigl(10 + \frac{24}{t} + \frac{5as}{ht}\Bigr)}_{\text{tensor parallelism}} $$
#
# $$ \underbrace{\frac{sbh}{t}\Bigl(34 + \frac{5as}{h}\Bigr)}_{\text{with sequence parallelism}} $$
#
# on t ranks. The 10 are the inputs of norms and of column layers, and the masks of dropout on the residual stream.

# %%
layer = dict(b=1, s=2048, h=12288, a=96)
print("   t     TP   with SP   (GB)")
for t in (1, 2, 4, 8):
    ways = (memory.korthikanti(**layer, t=t, sequence=sp) for sp in (False, True))
    print(f"{t:4} {next(ways).total / 1e9:7.3f} {next(ways).total / 1e9:7.3f}")

# %% [markdown]
# A norm needs all of a token, dropout not even that, and neither needs another token. So each rank takes s/t tokens there. g becomes a
# *reduce-scatter* (sum, and each rank keeps its tokens), f an *all-gather*; backward it is the other way round.
#
# > Four all-reduces per layer become four all-gathers and four reduce-scatters. What is gathered is not kept: each of the two gathers of the forward pass is done once more in the
# > backward pass, for the gradients of weights. How many times as many bytes?

# %%
predict("sp/times", times=2)

# %%
one_layer, four = replace(small, num_layers=1), Mesh(tp=4)
with_sp = replace(fp32, sequence=True)


def of_a_layer(train):
    """What a model of two layers sends more than a model of one, by name."""
    one, two = (formulas.sent(m, train, four).by("name") for m in (one_layer, small))
    more = {name: nbytes - one[name] for name, nbytes in two.items()}
    return {name: nbytes for name, nbytes in more.items() if nbytes}


of_a_layer(fp32), of_a_layer(with_sp)

# %% [markdown]
# An all-reduce *is* the two halves (lab 07), so eight halves send the same. Two things come on top:
#
# - "all_gather backward" is twice as large: what was not kept is gathered again;
# - "gradients": some parameters see only a rank's tokens. Which ones? Exercise 10.3 asks. The answer leaves them out:

# %%
halves = [nbytes for name, nbytes in of_a_layer(with_sp).items() if name != "gradients"]
reveal("sp/times", times=sum(halves) / sum(of_a_layer(fp32).values()))

# %% [markdown]
# Compare the formula with the dry run, embedding, loss and the first broadcast (lab 08) included, and the dry run with the real one:


# %%
def one_pass(rank):
    model = tensor_parallel.parallelize(GPT(one_layer), rank.comm("tp"), sequence=True)
    model.loss(*torch.zeros(2, 1, 16, dtype=torch.long)).backward()


dry = World(four, engine="dry")
dry.run(one_pass, rank=0)
weights = dict(nbytes=4 * one_layer.num_params, n=4, rank=0)
start = collectives.sent("broadcast_tree", **weights, name="broadcast")
(formulas.sent(one_layer, with_sp, four) + start).diff(dry.ledger, by="name")

# %%
world.run(one_pass)
dry.ledger.diff(world.ledger.only(rank=0))

# %% [markdown]
# So SP with regathering is a trade of bytes. (In time the extra gather need cost nothing: Megatron-LM runs it beside the product that gives the input's gradient, section 4.2.2 of the paper.) One feed-forward layer on four ranks, with the gathered input kept, or gathered again:

# %%
whole_up, whole_down = nn.Linear(h, f), nn.Linear(f, h)


def trade(rank, keep):
    comm = rank.comm("tp")
    first = tensor_parallel.ColumnLinear.from_full(whole_up, comm, sequence=True)
    second = tensor_parallel.RowLinear.from_full(whole_down, comm, sequence=True)
    tokens, outputs = torch.ones(1, s // 4, h, requires_grad=True), []

    def forward():
        if keep:
            x = tensor_parallel.gather_from(tokens, comm)
            inner = F.linear(x, first.weight, first.bias)
        else:
            inner = first(tokens)
        outputs.append(second(F.gelu(inner)))

    kept = saved_activations(forward, nn.ModuleList([first, second]))
    outputs[0].sum().backward()
    return kept.total


# %%
found = {}
for keep in (True, False):
    kept = world.run(trade, keep)[0]
    moved = world.ledger.only(rank=0)
    found[keep] = kept, moved.total - moved.only(name="gradients").total
(kept, moved), (less, more) = found[True], found[False]
print(f"{more / moved - 1:.0%} more sent, {1 - less / kept:.0%} less kept")

# %% [markdown]
# On more ranks the extra gather costs the same quarter and saves more: the gathered input is t times the share. In a layer of GPT-3 without its scores (lab 04), on eight:

# %%
sbh = 2048 * 12288
least = memory.korthikanti(**layer, t=8, sequence=True, checkpointing="selective").total
extra = 2 * 2 * sbh * 7 // 8  # two inputs of 2sbh, whole instead of an eighth
print(f"{1 - least / (least + extra):.0%} less kept")

# %% [markdown]
# ### Exercise 10.3 · Bug hunt: the layer whose outputs are right (10 min, ●●●)
#
# Each rank has its tokens, the whole norm, and its shares of `up` and `down` (the bias of `down` is whole). Every output passes the test. Three things are wrong. Of the library, f and g are `copy_to` and `reduce_from`; with SP `gather_from` and `scatter_to`.


# %%
def my_layer(x, norm, up, down, comm):
    """x + down(gelu(up(norm(x)))) for this rank's tokens, x[b, s_t, h]."""
    tokens = tensor_parallel.gather_from(norm(x), comm)
    inner = F.gelu(F.linear(tokens, up.weight, up.bias))
    y = tensor_parallel.reduce_from(F.linear(inner, down.weight), comm)
    s_t = x.shape[1]
    mine = y[:, comm.rank * s_t :][:, :s_t]
    return x + mine + down.bias


# %%
check("tensor_parallel/bug-hunt", my_layer)

# %%
hint("tensor_parallel/bug-hunt", 1)

# %%
show(tensor_parallel.layers.TokenNorm)

# %% [markdown]
# ### Further: when would you have seen it?
#
# Train with one of the three bugs: each rank steps its copy of the norms' weights by the gradient of its own tokens. Two ranks with SP, 60 steps of AdamW, and always the same sequences, which the model learns by heart:


# %%
class Unsummed(tensor_parallel.layers.TokenNorm):
    def forward(self, x):
        return self.normalize(x, self.shape, *self.parameters(), eps=self.eps)


def learn(rank, kind):
    """Losses, and after each step the norms' weights and biases on this rank."""
    model = GPT(small, generator=torch.Generator().manual_seed(0))
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence=True)
    whole = tensor_parallel.layers.TokenNorm
    norms = [module for module in model.modules() if isinstance(module, whole)]
    for norm in norms:
        norm.__class__ = kind
    optimizer, losses, weights = torch.optim.AdamW(model.parameters()), [], []
    batch = torch.randint(96, (2, 8, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(model.loss(*batch))
        losses[-1].backward()
        optimizer.step()
        own = [p.detach() for norm in norms for p in norm.parameters()]
        weights.append(torch.cat(own))
    return [loss.item() for loss in losses], torch.stack(weights)


# %%
kinds = {"summed": tensor_parallel.layers.TokenNorm, "not_summed": Unsummed}
pair_of_ranks, losses, apart = World(Mesh(tp=2)), {}, {}
for name, kind in kinds.items():
    (losses[name], mine), (_, other) = pair_of_ranks.run(learn, kind)
    apart[name] = (mine - other).abs().amax(1).tolist()
plots.curves(
    range(60), xlabel="step", ylabel="loss (nats)",
    title="The losses of both runs lie on each other", **losses,
)  # fmt: skip

# %%
plots.curves(
    range(1, 61), xlabel="step", ylabel="largest difference between two ranks",
    title="But two copies of one weight drift apart, step by step", **apart,
)  # fmt: skip

# %%
ends = {name: round(each[-1], 2) for name, each in losses.items()}
ends, {name: round(each[-1], 2) for name, each in apart.items()}

# %% [markdown]
# This loss does not show it, nor do other seeds, four ranks or ten times the rate. Compare what should be alike on all ranks, as the second figure does; one broadcast is enough for that. (A snapshot takes one rank's copy: the model that is loaded is not the one that was trained.)

# %% [markdown]
# ### Further: at full size
#
# In the library, with sequence parallelism, on four ranks and on two processes:

# %%
print(rigs.tensor_parallel.Compared.HEAD)
for config in (small, grouped):
    print(rigs.tensor_parallel.compared(world, config, sequence=True))
print(rigs.tensor_parallel.compared(two, small, sequence=True))
two.close()

# %% [markdown]
# The four models of Korthikanti et al., t = 8 with sequence parallelism: rank 3 runs a forward pass, in bf16, on fake tensors, of as many layers as the paper gives one device. The library's formula says the
# same to the byte. PyTorch on a CPU keeps masks in two bytes, not one, and two statistics per token and norm; without these, a layer keeps what the paper's equation 4 says:

# %%
stages = {  # layers on a device, width, heads, micro-batch
    "22B": (48, 6144, 64, 4),
    "175B": (12, 12288, 96, 1),
    "530B": (3, 20480, 128, 1),
    "1T": (2, 25600, 160, 1),
}

# %%
print("       dry run  unexplained   GB per layer   equation 4")
for name, (layers, width, heads, b) in stages.items():
    big = dict(num_layers=layers, d_model=width, num_heads=heads, d_ff=4 * width)
    big = ModelConfig(**big, vocab_size=51_200, seq_len=2048, dropout=0.1)
    dry, unexplained, each = rigs.tensor_parallel.at_full_size(big, 8, 3, micro_batch=b)
    paper = memory.korthikanti(b=b, s=2048, h=width, a=heads, t=8, sequence=True)
    print(f"{name:5} {units.text(dry.total):>8} {unexplained:12}", end="")
    print(f" {each / 1e9:14.4f} {paper.total / 1e9:12.4f}")

# %% [markdown]
# ## Why is this communication hard to hide?
#
# Data parallelism sends gradients that nobody waits for until the step. Here a product waits for the gather before it, and everything waits for the sum after it.
#
# A layer of Llama-3.1-70B, forward, 8192 tokens, with SP: gather, products, scatter, twice. The H100s of lab 09 compute at 61 % of the peak, assumed for products of any size (small ones reach less). Messages reach 80 % of a link, 360 GB/s within a node. Between nodes
# it is 40 GB/s per rank: eight rings, an eighth of the tensor each, leave a node through all of its eight links (lab 07), 320 GB/s together.

# %%
model = replace(ModelConfig.named("llama-3.1-70b"), seq_len=8192)
h100 = Hardware.named("H100")
rate, inside = h100.rate(), h100.ring(8)
across, own = h100.ring(16), h100.network  # eight rings at once, or a rank's own link


def forward_of_a_layer(n, link, **how):
    return tensor_parallel.layer_timeline(model, n, link, flops=rate, **how)


# %% [markdown]
# > Eight ranks in a node become sixteen in two nodes. How many times as long does a layer take?

# %%
predict("across/times", times=0.5)

# %%
eight, sixteen = forward_of_a_layer(8, inside), forward_of_a_layer(16, across)
through_one = forward_of_a_layer(16, own)
asynchronous = forward_of_a_layer(8, inside, pieces=True)
waits = [f"{each.exposed / each.makespan:.0%}" for each in (eight, sixteen)]
plots.overlap(
    title=f"Ranks wait {waits[0]} of a layer in a node, {waits[1]} across two",
    per="layer",
    eight_in_a_node=eight,
    eight_in_a_node_asynchronous=asynchronous,
    sixteen_across_two_nodes=sixteen,
    sixteen_on_a_single_ring=through_one,
)

# %%
reveal("across/times", times=round(sixteen.makespan / eight.makespan, 2))

# %%
f"on a single ring: {through_one.makespan / eight.makespan:.1f} times as long"

# %% [markdown]
# Twice the devices do not halve the time: each computes half as much, and sends about as much as before. Compared with eight, about a third of the sixteen is wasted, and on a single ring, through one of eight links, they would even take longer than eight in a node. So TP stays in a node where another axis can use the second.
#
# ### Further: and over a training step?
#
# Backward a layer computes twice as much, sends its four halves again, and gathers twice what was not kept. That gather can hide behind the product that gives the input's gradient, the scatter of this gradient behind that of the weights'. Each of these two products takes as long as the layer's product by columns forward. Columns below: none, one or both hidden.


# %%
def of_a_step(layer, beside):
    """Share of a step that ranks wait, `beside` of three messages behind a product."""
    message, qkv, *_, up, _, _ = (span.end - span.start for span in layer.spans)
    left = [max(0, message - product) for product in (qkv, up)]
    waiting = layer.exposed + 2 * (3 - beside) * message + beside * sum(left)
    return waiting / (waiting + 3 * (layer.makespan - layer.exposed))


for where, layer in {"in a node": eight, "across two": sixteen}.items():
    print(f"{where:10}", *(f"{of_a_step(layer, beside):.0%}" for beside in range(3)))

# %% [markdown]
# A message that takes longer than the short product of queries, keys and values does not hide wholly. The last column is Megatron-LM's.
#
# **A step of a real mesh.** `predict.time` puts a whole training step of any mesh on one clock, with nothing hidden. Is that the first column? Here is what a layer sends in a step on eight ranks, once by `predict.time` (what two layers take more than one), once by the time line above, whose ten messages are alike:

# %%
split = TrainConfig(micro_batch=1, global_batch=1, sequence=True)


def on_the_clock(layers):
    deep = replace(model, num_layers=layers)
    return formulas.time(deep, split, Mesh(tp=8), device=h100).spent(0)["tp"]


message = eight.spans[0].end - eight.spans[0].start
of_norms = 2 * collectives.cost("all_reduce_ring", 2 * model.d_model, 8, inside)
found, played = on_the_clock(2) - on_the_clock(1), 10 * message
print(f"{1e3 * found:.3f} ms, ten messages {1e3 * played:.3f} ms, ", end="")
print(f"unexplained {1e3 * (found - played - of_norms):.3f} ms")

# %% [markdown]
# The rest are the gradients of two norms, summed over the ranks: those of exercise 10.3.
#
# > You have 64 H100s of 80 GB, eight in a node, and train Llama-3.1-70B with 128 sequences of 8,192 tokens per step. Data parallelism with ZeRO-1 (lab 09) takes what tensor parallelism leaves. Over how many ranks do you split each matrix for the shortest step that fits?

# %%
predict("mesh-of-64/tp", ranks=4)

# %%
policies, fitting = {"none": "kept", "full": "recomputed"}, {}
print("activations  tp   needs   a step   of it tp, dp")
for policy, said in policies.items():
    for tp in (1, 2, 4, 8, 16):
        how = dict(zero=1, attention="sdpa", sequence=tp > 1, checkpointing=policy)
        train = TrainConfig(micro_batch=1, global_batch=128, **how)
        asked = model, train, Mesh(tp=tp, dp=64 // tp)
        timed = formulas.time(*asked, device=h100)
        after, kept = formulas.states(*asked), formulas.activations(*asked)
        whole = after.only(name="weights")  # whole gradients in bf16 are as large
        shards = after.only(component="gradients")  # as there are after a step
        held = after.total - shards.total + whole.total + kept.total
        takes, spent = timed.makespan, timed.spent(0)
        shares = " ".join(f"{spent.get(axis, 0) / takes:4.0%}" for axis in ("tp", "dp"))
        print(f"{said:11} {tp:3} {held / 1e9:4.0f} GB {takes:6.1f} s   {shares}")
        if held < 80e9:
            fitting[takes] = tp

# %%
reveal("mesh-of-64/tp", ranks=fitting[min(fitting)])

# %% [markdown]
# With memory enough nobody would split a matrix: the step would take 13.9 seconds, and 591 GB per rank. With all activations kept, eight ranks need 85 GB and do not fit; sixteen fit, and take 26.1 seconds. With blocks computed again eight take 22.3 seconds and 50 GB, and four do not fit. (Nothing overlaps here.)
#
# Is there another way into 80 GB? ZeRO-3 shares out weights and gradients, too, and splits no matrix. With blocks computed again, and no message hidden:

# %%
level_1 = replace(train, sequence=False), Mesh(dp=64)
level_3 = replace(level_1[0], zero=3), Mesh(dp=64)
timed = formulas.time(model, *level_1, device=h100)
computing = timed.makespan - timed.spent(0)["dp"]
sending = formulas.sent(model, *level_3).total / h100.ring(64).bandwidth
held = formulas.peak_states(model, *level_3) + formulas.activations(model, *level_3)
f"{computing:.1f} s computing, {sending:.1f} s sending, {held.total / 1e9:.0f} GB"

# %% [markdown]
# **So the eight ranks are ZeRO-1's answer, and not the mesh's:** ZeRO-3 takes 18.3 seconds without any split. What it cannot do is use more ranks than the batch has sequences, here 128. From there on matrices are split, or the sequence (lab 11).

# %% [markdown]
# ### Which width is enough?
#
# With GPT's widths, and without attention's scores, a layer has 12h² weights, so its products take 24·b·s·h² FLOPs forward, a t-th on each rank. The four halves carry (t − 1)/t · b·s·h numbers each, of two bytes. Computing takes at least as long as sending if
#
# $$ \frac{24\,b\,s\,h^2}{t\,F} \;\ge\; \frac{8\,b\,s\,h}{\mathrm{bw}}\cdot\frac{t-1}{t} \quad\Longleftrightarrow\quad \frac{h}{t-1} \;\ge\; \frac{F}{3\,\mathrm{bw}}. $$
#
# Batch and layers cancel, as long as a message is so large that its latency does not count. **The width per rank** decides. With ρ for the left side over the right, ranks wait 1/(1 + ρ) of the layer. The backward pass computes twice as much and, with the extra gather hidden, sends the same: there ρ is twice as large.
# Three Llamas on 2 to 16 ranks, each on both links, with 2,048 tokens:

# %%
def waits_at(name, n, link, s=2048):
    """ρ, and the share of a layer's forward pass that ranks wait, latency left out."""
    wide, link = replace(ModelConfig.named(name), seq_len=s), Link(0, link.bandwidth)
    spans = tensor_parallel.layer_timeline(wide, n, link, flops=rate)
    rho = wide.d_model / (n - 1) * 3 * link.bandwidth / rate
    return rho, spans.exposed / spans.makespan


names = [f"llama-3.1-{size}" for size in ("8b", "70b", "405b")]
sizes_and_links = [(n, link) for n in (2, 4, 8, 16) for link in (inside, across)]
dots = sorted(waits_at(name, *each) for name in names for each in sizes_and_links)
law = [2 ** (k / 4) for k in range(-8, 21)]
plots.curves(
    law,
    formula=[1 / (1 + rho) for rho in law],
    measured={"time lines of three Llamas": tuple(zip(*dots, strict=True))},
    log="x",
    xlabel="ρ = 3·bw·h / (F·(t − 1))",
    ylabel="share of a layer that ranks wait",
    title="The width per rank, against F/bw, decides how long ranks wait",
)

# %% [markdown]
# What is left between dots and line are attention's scores, which take FLOPs and send nothing, and widths that are not quite GPT's. The scores, counted in full, are s/6h of the products: 4 % of them for the 70B at 2,048 tokens; at 131,072 they are 2.7 times the products. So a long sequence does help. Eight ranks in a node:

# %%
for s in (2048, 8192, 131_072):
    print(f"{s:7,} tokens: ranks wait {waits_at('llama-3.1-70b', 8, inside, s)[1]:.0%}")

# %% [markdown]
# Four axes of a mesh have such a law, in F/bw, FLOPs per byte. Between nodes the rings of ZeRO and of TP run through all ranks of a node, and so use all of its links. In lab 11's ring and lab 12's all-to-all every rank sends through its own. Who reaches it: 8,192 tokens per rank, the 70B on 8 and on 16 ranks, DeepSeek-V3's experts?

# %%
attention, width = h100.rate("attention"), [8192 / 7, 8192 / 15]
print(f"{'at least':40} {'NVLink':>12} {'between nodes':>20}")
for what, flops, link, sizes in (
    ("ZeRO-3: tokens per rank, F/bw", rate, across, [8192] * 2),
    ("TP: width per rank, F/(3·bw)", rate / 3, across, width),
    ("ring, g/a = 1/4: tokens, F/(2·bw)", attention / 2, own, [8192] * 2),
    ("EP: width of an expert, F/(3·bw)", rate / 3, own, [2048] * 2),
):
    print(f"{what:35}", end="")
    for each, size in zip((inside, link), sizes, strict=True):
        said = "yes" if size >= flops / each.bandwidth else "no"
        print(f" {flops / each.bandwidth:8.0f}, {size:4.0f}: {said:3}", end="")
    print()

# %% [markdown]
# **Asynchronous TP**, the second row, cuts the product into pieces: it starts with a rank's own tokens while others arrive, and finished rows leave while the next are computed. In this cost model
# most of it hides. PyTorch's team reports up to about 20 % for the forward pass of Llama-3-70B, and about 8 % for its training.

# %%
waits = asynchronous.exposed / asynchronous.makespan
f"{eight.makespan / asynchronous.makespan - 1:.0%} faster, {waits:.0%} still waiting"

# %% [markdown]
# ## Further: which random numbers, and on which mesh?
#
# Dropout on a tensor that all ranks have must drop the same everywhere, or the copies differ. Dropout of a rank's own heads or tokens must differ. How many different masks do four ranks draw?

# %%
dropped = replace(small, dropout=0.5)


def masks(rank, sequence):
    model = GPT(dropped, generator=rank.generator)
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence)
    keys = torch.ones(1, 2, 16, 4)
    heads = model.blocks[0].attention.attend(keys, keys, keys, 0.5)
    return [tuple(t.flatten().tolist()) for t in (model.dropout(torch.ones(64)), heads)]


for sequence in (False, True):
    drawn = zip(*world.run(masks, sequence), strict=True)
    stream, heads = (len(set(each)) for each in drawn)
    print(f"sequence: {sequence!s:5}  residual stream: {stream}  attention: {heads}")

# %% [markdown]
# **With data parallelism.** Neighbors share matrices (tp), the others batches (dp). After `parallelize` every gradient is whole when autograd delivers it, so replicas need to
# know nothing. Clipping has to: in the norm of the whole gradient, what all ranks of tp hold alike counts once (`zero.clip_grad_norm`). Two by two ranks, a sequence for each pair:

# %%
batch = torch.randint(96, (2, 2, 16), generator=draw)  # inputs and targets


def on_a_mesh(rank):
    model = GPT(small, generator=rank.generator).double()
    tensor_parallel.parallelize(model, rank.comm("tp"), sequence=True)
    replica = data_parallel.replicate(model, rank.comm("dp"))
    tokens, targets = batch[:, rank.coords["dp"], None]
    loss = tensor_parallel.cross_entropy(replica(tokens), targets, rank.comm("tp"))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


# %%
plain_model = GPT(small, generator=torch.Generator().manual_seed(0)).double()
plain_model.loss(*batch).backward()
whole = {name: p.grad for name, p in plain_model.named_parameters()}
grid = World(Mesh(dp=2, tp=2))
due = grid.run(rigs.tensor_parallel.cut_as_weights, small, whole)
pairs = list(zip(grid.run(on_a_mesh), due, strict=True))
print(all(torch.allclose(got[at], own[at]) for got, own in pairs for at in own))
{axis: units.text(nbytes) for axis, nbytes in grid.ledger.by("axis").items()}

# %% [markdown]
# ## Further: turn the knobs
#
# The same layer. On which links do eight ranks take at most three quarters of the time of four? On the slowest, with asynchronous TP, how many ranks are fastest? Do fewer tokens make waiting a smaller part?


# %%
def knobs(ranks=8, GBps=360, tokens=8192, asynchronous=False):
    longer, link = replace(model, seq_len=tokens), Link(2e-6, GBps * 1e9)
    how = dict(flops=rate, pieces=asynchronous)
    forward = tensor_parallel.layer_timeline(longer, ranks, link, **how)
    return plots.overlap(per="layer", forward=forward)


explore(
    knobs,
    states=48,
    ranks=[2, 4, 8],
    GBps=[20, 40, 120, 360],
    tokens=[1024, 8192],
    asynchronous=False,
)

# %% [markdown]
# With 8,192 tokens at 120 GB/s or more, with or without asynchronous TP. With 1,024 at 360 GB/s, and at 120 only if it is asynchronous. On 20 GB/s, if it is asynchronous, two ranks are fastest: more ranks save less computing than they add messages. Fewer tokens make waiting a *larger* part. On eight ranks at 360 GB/s, not asynchronous, it is 37 % instead of 29 %. Most of that is latency, which does not shrink with the tokens: without it, it is 31 % instead of 28 %.
#   <!-- claim: (lambda h, m, replace, play: [round(100 * (lambda t: t.exposed / t.makespan)(play(replace(m, seq_len=s), 8, config.Link(latency, 360e9), flops=h.rate()))) for latency in (2e-6, 0) for s in (1024, 8192)])(config.Hardware.named("H100"), config.ModelConfig.named("llama-3.1-70b"), __import__("dataclasses").replace, tensor_parallel.layer_timeline) == [37, 29, 31, 28] -->

# %% [markdown]
# ## In practice
#
# | | TP | SP | loss | asynchronous |
# |---|---|---|---|---|
# | Megatron-LM | `--tensor-model-parallel-size 8` | `--sequence-parallel` | by vocabulary, always | `--tp-comm-overlap` |
# | torchtitan 0.2.2 | `parallelism.tensor_parallel_degree` | always with TP | by vocabulary, unless `parallelism.disable_loss_parallel` | `parallelism.enable_async_tensor_parallel` |
# | PyTorch | `parallelize_module(model, mesh["tp"], plan)` with `ColwiseParallel`, `RowwiseParallel` | `SequenceParallel` in the plan | `loss_parallel()` | through `torch.compile` |
#
# From torchtitan 0.3 on, SP is a switch of its own, `parallelism.enable_sequence_parallel`. In the backward pass Megatron-LM hides the all-reduce of f under the weight gradients of the same layer.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **"Multiply row blocks of X with W independently and sum partial results."** (an article on efficient training at scale, on row parallelism). These are *columns* of X with rows of $W^{\mathsf T}$. Rows of X times the whole W are <!-- erratum: S1-044 -->
# other tokens: they are to be put together, not summed, and that is data parallelism.
#
# **SP reduces "the maximal activation size per GPU" to b·s/N_sp·h/N_tp** (reading notes on *The Ultra-Scale Playbook*). SP uses the *same* t ranks, and a tensor is cut by tokens or by width, never both: b·s·h/t, as in the picture above. The text is t times too small. <!-- erratum: S3-026 -->
#   <!-- claim: (lambda m: {cut for _, width, cut in tensor_parallel.layer_shares(m, True) if width} == {"s", "h"})(config.ModelConfig.named("gpt2")) -->
#
# **SP for what requires "the full hidden dimension, such as LayerNorm and Dropout"** (the article). LayerNorm does; dropout needs no other element at all. <!-- erratum: S1-047 -->
#
# ### True under a condition
#
# **"minimizing communication"** (the same notes, on TP). True of weights, which do not travel. Activations do, in every layer, on the critical path: 8·b·s·h·(t − 1)/t elements per layer and rank. <!-- erratum: S3-021 -->
#   <!-- claim: sum(claims.sent_by_a_layer(False, 8).values()) == 4 * 8 * 16 * 64 * 7 // 8 -->
#
# **TP "partitions model parameters, gradients, optimizer states, and activations"** (the article). Not those of 10·sbh bytes; with SP these, too. <!-- erratum: S1-042 -->

# %% [markdown]
# ## Summary
#
# > - Columns, then rows: nothing travels between, and one all-reduce sums at the end. f and g are conjugate: what one does forward, the other does backward.
# > - Bias after the sum, once; heads whole; loss from three numbers per token, never from gathered logits.
# > - A layer all-reduces b·s·h numbers four times. With sequence parallelism it sends the same in eight halves, and 25 % more if the gathered inputs are not kept.
# >   <!-- claim: (lambda plain, split: round(100 * (split / plain - 1)))(*(sum(n for name, n in claims.sent_by_a_layer(sp).items() if name != "gradients") for sp in (False, True))) == 25 -->
# > - On eight ranks a layer of GPT-3 keeps 0.58 GB with TP, and 0.36 GB with SP, of 2.87.
# >   <!-- claim: [round(memory.korthikanti(b=1, s=2048, h=12288, a=96, **how).total / 1e9, 2) for how in ({}, {"t": 8}, {"t": 8, "sequence": True})] == [2.87, 0.58, 0.36] -->
# > - Parameters that each rank applies to its own tokens have gradients to be summed. No output shows it.
# > - Forward, ranks compute as long as they wait if h/(t − 1) = F/(3·bw), the width per rank. Batch and layers do not matter, latency left out; a long sequence helps by attention's scores alone.
# > - Its communication is exposed: of a layer of Llama-3.1-70B 29 % of the forward pass within a node of H100s, 52 % across two and eight links; of a step 22 and 44 % if the extra gather hides behind its product, 18 and 40 % if a scatter does, too.
# >   <!-- claim: [claims.tensor_parallel_exposed(n) for n in (None, 1, 2)] == [(29, 52), (22, 44), (18, 40)] -->
#
# Next: [lab 11](11_context_parallel.ipynb) cuts the sequence everywhere, also in attention.

# %% [markdown]
# ## References
#
# - M. Shoeybi et al., *Megatron-LM*, arXiv:1909.08053 (2019): section 3, f and g, vocabulary-parallel embedding and loss.
# - V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, arXiv:2205.05198 (2022): section 4.2 (equations 2 to 4), table 2.
# - D. Narayanan et al., *Efficient large-scale language model training on GPU clusters using Megatron-LM*, arXiv:2104.04473 (2021): sections 2.3 and 3.2.
# - H. He, L. Wright, L. Wehrstedt, T. Liu, W. Liang, *Introducing async tensor parallelism in PyTorch*, PyTorch forum, distributed with TorchTitan (2024).
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025). PyTorch 2.13, *Tensor Parallelism – torch.distributed.tensor.parallel*.
