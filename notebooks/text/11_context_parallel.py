# %% [markdown]
# # 11 · Share out one long sequence
#
# **A sequence of 131,072 tokens does not fit on one device. Ranks can share out its tokens, but in attention every token meets all that came before it. How do they meet without being in one place?**
#
# *90 min, and 50 further · before this: labs 06, 07 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - compute exact attention over keys that are never on one rank together (exercise 11.1),
# - know what a rank with a part of the sequence must be told about the whole (exercise 11.2, a bug hunt),
# - trade tokens for heads by an all-to-all (exercise 11.3).

# %% [markdown]
# ## Setup

# %%
import dataclasses

import torch
import torch.nn.functional as F

from labutils import context_parallel, data_parallel, flash, measure, step, units
from labutils import predict as formulas
from labutils.config import Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.teach import plots
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# Four ranks hold a quarter of the sequence each. Queries stay; keys and values go round a ring. A cell is a chunk of queries (down) that meets a chunk of keys
# (across). Its color says which rank computes it, its number in which step of the ring, from 0. White is masked.

# %%
quarters = context_parallel.layout(s=16, n=4, kind="contiguous")
title = "In step t, rank i has the keys of rank i − t"
plots.who_computes(title=title, shares=False, four_chunks=quarters.grid())

# %% [markdown]
# Step through it. Which ranks have nothing to do, and when?

# %%
plots.key_ring(quarters.grid())

# %% [markdown]
# This is *context parallelism*. Everything but attention works on each token alone, so there a rank needs nothing but its tokens. Attention needs
# **one ring of keys and values per layer, and lab 06's `flash.merge` to join what the steps give.**

# %% [markdown]
# ## Can a query meet its keys one rank at a time?
#
# In lab 06 the keys were cut into blocks. Each block gives an output and the log-sum-exp (lse) of its scores, and `flash.merge` turns two such pairs into the pair of
# both blocks together. Where a block was computed does not matter.
#
# In a step of the ring each rank starts two messages: it sends the keys and values that it holds to the next rank, and receives those of the rank before. Meanwhile it
# computes with what it holds, and merges. Then it waits for the messages.
#
# `comm.isend(x, dst)` and `comm.irecv(out, src)` begin a message and return at once; `wait()` on what they return ends it, and gives `out`.
#
# What a rank computes in a step is a list of *tiles*. Those of rank 2 with the keys of rank 1, and with its own:

# %%
list(quarters.tiles(rank=2, holder=1)), list(quarters.tiles(rank=2, holder=2))

# %% [markdown]
# `rows` are places among the tokens of rank 2, `columns` among those of the holder, the rank whose keys these are. Query i of `rows` sees key j of `columns` where j ≤
# i + `offset`. Offset 0 is the usual triangle; offset 4 is a square of 4 × 4 in which everything is seen.
#
# ### Exercise 11.1 · Pass the keys round (25 min, ●●○)
#
# Return output and lse of this rank's queries. Beside this rank's own keys, which the backward pass will need, keep two sets at most: the one that you compute with, and the one that is coming. Merge by `flash.merge(o1, lse1, o2, lse2)`; `whole` is the layout of all tokens, and `whole.tiles` is right for any.


# %%
def ring(q, k, v, whole, comm, attend):
    """(out, lse) over the keys of all ranks. q: [b, a, s/N, d]; k, v: [b, g, s/N, d].

    attend(q, k, v, offset) gives (out, lse) of one tile.
    """
    raise NotImplementedError


# %%
check("context_parallel/ring", ring)

# %%
hint("context_parallel/ring", 1)

# %%
show(context_parallel.ring)

# %% [markdown]
# **Backward** the keys go round once more. Each tile's gradients are right by themselves: with lse and $D$ over *all* keys, $P_{ij} = e^{s_{ij} - \text{lse}_i}$ (lab 06) is
# that tile's part of the whole softmax.
#
# $dQ$ stays with the queries. $dK$ and $dV$ collect from every rank, and have to come home: the sums follow their keys one rank behind, and the owner adds its own
# part at home.
#
# > Keys and values travel in bf16, the sums of their gradients in fp32. How many times the bytes of the forward pass does the backward pass send?

# %%
predict("ring/backward", times=2)

# %% [markdown]
# In each of N − 1 hops a rank sends keys and values of s/N tokens: g heads of width d, with e bytes per number.
#
# $$ \text{forward, per layer:}\quad (N-1)\cdot 2\,\frac{s}{N}\,g\,d\,e $$
#
# The backward pass sends them again, and as many sums of gradients: 2 + 4 bytes per number where there were 2. For Llama-3.1-8B, 32 layers, 131,072 tokens on 8 ranks:

# %%
llama = ModelConfig.named("llama-3.1-8b")
bf16 = TrainConfig(micro_batch=1, global_batch=1, attention="ring")
sent = formulas.sent(llama, bf16, Mesh(cp=8)).only(axis="cp")
sent

# %%
share = sent.by("name")
reveal("ring/backward", times=share["ring backward"] / share["ring forward"])

# %% [markdown]
# Is the formula what is sent? A small model with RoPE and two key–value heads takes a training step on four ranks. Then rank 2 alone repeats it in a dry run.
# `step.build` puts a whole training step together, for any mesh: it also averages the gradients of the four ranks, and the loss.

# %%
sizes = dict(num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ff=64)
style = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
config = ModelConfig(**sizes, **style, vocab_size=64, seq_len=32)
draw = torch.Generator().manual_seed(0)
tokens, targets = torch.randint(64, (2, 4, 32), generator=draw)
world = World(Mesh(cp=4))


def one_step(rank, train, tokens, targets):
    mine = step.build(config, train, rank.mesh)(rank)
    mine(mine.share(tokens, targets))


# %%
four = TrainConfig(micro_batch=4, global_batch=4, precision="fp32", attention="ring")
formula = formulas.sent(config, four, world.mesh, rank=2)
world.run(one_step, four, tokens, targets)
formula.diff(world.ledger.only(rank=2), by="name")

# %%
with World(world.mesh, engine="dry") as dry:
    dry.run(one_step, four, tokens, targets, rank=2)
formula.diff(dry.ledger).unexplained

# %% [markdown]
# In fp32, where keys are as wide as sums, backward is twice forward. "Targets" and "loss" are one number each, all-reduced.

# %% [markdown]
# ## Who has the most to do?
#
# All ranks have equally many tokens. But the first rank's queries see few keys, and the last rank's see most. A step is over when the busiest rank is done.
#
# > Four ranks, four chunks, a long sequence. How many times the average does the last rank compute?

# %%
predict("imbalance/last-rank", times=1.5)

# %% [markdown]
# In the picture, rank i has i whole cells and a half one, $i + \tfrac12$. The average over N ranks is N/2, so the last has
#
# $$ \frac{N - \frac12}{N/2} \;=\; \frac{2N-1}{N} $$
#
# times the average. On many ranks that nears 2, and half of all devices' time in attention is waiting.
#
# The *zig-zag* cuts the sequence into 2N chunks, and gives rank i the chunks i and 2N − 1 − i, an early one and a late one (as in Llama 3):

# %%
both = {
    kind: context_parallel.layout(131_072, 4, kind) for kind in ("contiguous", "zigzag")
}
title = "Contiguous: the last rank computes 1.75 times the average. Zig-zag: all alike"
plots.who_computes(title=title, **{kind: whole.grid() for kind, whole in both.items()})

# %% [markdown]
# Counted in pairs of query and key:

# %%
work = [sum(both["contiguous"].met(rank)) for rank in range(4)]
reveal("imbalance/last-rank", times=round(work[3] / (sum(work) / 4), 4))

# %%
zigzag = both["zigzag"]
[zigzag.work(rank) for rank in range(4)], {zigzag.met(rank) for rank in range(4)}

# %% [markdown]
# All four ranks have the same work, in total and in every step, at whose end ranks wait for each other's keys:

# %%
plots.key_ring(zigzag.grid())

# %% [markdown]
# How much time does that save? Take the attention of one layer of Llama-3.1-8B, forward. Each H100 is in a node of its own, with 40 GB/s to the next one. Its
# attention reaches 49 % of the peak. (Assumed: 0.81 of what products reach in lab 09, as on a B200.) The number in a bar is the rank whose keys are met.

# %%
h100 = Hardware.named("H100")
rate = h100.rate("attention")
both_links = {"NVLink": h100.inside, "between nodes": h100.network}
links = {name: Link(0, link.bandwidth) for name, link in both_links.items()}


def layer(tokens, n=4, link="between nodes", **how):
    """The forward pass of attention in one layer, with so many tokens per rank."""
    long = dataclasses.replace(llama, seq_len=n * tokens)
    options = dict(flops=rate, link=links[link], **how)
    return context_parallel.ring_timeline(long, n, **options)


# %%
title = "With 32,768 tokens per rank the zig-zag takes 57 % of the time"
steps = {kind: layer(32_768, kind=kind) for kind in ("contiguous", "zigzag")}
plots.overlap(title=title, per="layer", **steps)

# %% [markdown]
# ## When does the ring cost no time?
#
# With T tokens per rank, a step of the zig-zag computes (T/2) · T pairs of query and key: two chunks of queries meet one of keys, or one meets two. A pair costs 4d FLOPs in each of a heads of width d.
#
# > On those H100s, with 40 GB/s, how many tokens must a rank have until its messages hide behind computing?

# %%
predict("ring/tokens-per-rank", tokens=1000)

# %% [markdown]
# F is FLOP/s, bw bytes/s. Computing takes at least as long as sending if
#
# $$ \begin{aligned} \frac{4\,a\,d}{F}\cdot\frac{T^2}{2} \;&\ge\; \frac{2\,g\,d\,T\,e}{\mathrm{bw}} \\ \Longleftrightarrow\quad T \;&\ge\; e\,\frac{g}{a}\,\frac{F}{\mathrm{bw}} \end{aligned} $$
#
# The number of ranks and the width of a head cancel, and the length of the sequence is not in it: **tokens per rank** decide. Grouped queries help, since they send less.

# %%
groups = llama.num_kv_heads / llama.num_heads
least = {
    name: context_parallel.least_tokens(rate, link.bandwidth, groups=groups)
    for name, link in links.items()
}
reveal("ring/tokens-per-rank", tokens=round(least["between nodes"]))

# %%
counts = [2**k for k in range(8, 16)]


def stretched(tokens, link, **how):
    """The time of a layer's attention over that of its computing alone."""
    alone = context_parallel.layout(8 * tokens, 8).work(0) * 4 * llama.d_model / rate
    return layer(tokens, 8, link, **how).makespan / alone


lines = {link: [stretched(count, link) for count in counts] for link in links}
fine = [2 ** (8 + k / 8) for k in range(57)]
law = {
    link: [(7 * max(1, bound / count) + 1) / 8 for count in fine]
    for link, bound in least.items()
}
title = "A ring of 8 ranks waits for its messages up to the bend of each line"
axes = dict(xlabel="tokens per rank", ylabel="time over computing alone", log="xy")
dots = {link: (counts, found) for link, found in lines.items()}
plots.curves(fine, title=title, measured=dots, **axes, **law)

# %%
for link, found in lines.items():
    print(f"{link}, from {least[link]:.0f} tokens on:", [round(x, 2) for x in found])

# %% [markdown]
# Above the least number of tokens the factor is 1.00. The lines are the formula: of eight steps seven take max(1, least/T) times their computing, and the last one
# sends nothing. The dots are simulated time lines.
#
# What if the ring waited *before* it computed?

# %%
for count in (8192, 32_768):
    waits = stretched(count, "between nodes", overlap=False)
    print(f"{count:6} tokens: {waits:.2f} times the computing alone")

# %% [markdown]
# The backward pass computes 2.5 times as much (lab 06), and a hop with sums carries 3 times as much, so it needs 3 / 2.5 = 1.2 times as many tokens. Its last hop,
# which brings the sums home, has nothing left to hide behind.
#
# All this assumes ranks alike, no latency, and nothing else on the links. A latency of 2 µs on NVLink asks for 824 tokens in place of 679, since a hop of so few takes 8 µs; 5 µs between nodes ask for 6,160 in place of 6,112.
#   <!-- claim: (lambda m, h: [round((2 * link.latency / a + (b / a) ** 2) ** 0.5 + b / a) for link in (h.inside, h.network) for a, b in [(4 * m.d_model / h.rate("attention"), 2 * m.num_kv_heads * m.d_head * 2 / link.bandwidth)]] + [round(1e6 * 679 * 2 * m.num_kv_heads * m.d_head * 2 / h.inside.bandwidth)])(config.ModelConfig.named("llama-3.1-8b"), config.Hardware.named("H100")) == [824, 6160, 8] -->

# %% [markdown]
# ## What must a rank be told about its tokens?
#
# Outside attention a rank needs to know only four things of the whole sequence:
#
# | what | a rank alone would | so |
# |---|---|---|
# | positions (RoPE, or learned) | count its tokens from 0 | it takes the rows `whole.positions(rank)` of the tables |
# | labels | take the next of *its* tokens, where at a chunk's end the right one is another rank's | shift the sequence first, then split tokens and labels alike: `distribute` gives a GPT that is called with whole sequences |
# | loss | average over *its* targets | sum, divided by the targets of all: ranks may have different numbers of targets that count (lab 05) |
# | gradients | have those of its own tokens | a mean over `("dp", "cp")`, as if all were replicas |
#
# `distribute` does the first two, `mean_loss` the third, and `data_parallel.replicate` over the joint axis the fourth.
#
# The test takes three steps of AdamW in float64. Each of two dp ranks has two sequences, every sequence is cut over two cp ranks, and some targets are ignored:

# %%
targets[0, 3:9] = targets[1, 20:] = targets[2, 9:30] = targets[3, :6] = -100


def plain(seed=0):
    return GPT(config, generator=torch.Generator().manual_seed(seed)).double()


def train(model, loss):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimizer.step()
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return [loss.item() for loss in losses], weights


# %%
def trained(rank, attention="ring"):
    model, cp = plain(seed=rank.rank), rank.comm("cp")
    context_parallel.distribute(model, cp, attention=attention)
    replica = data_parallel.replicate(model, rank.comm("dp", "cp"))
    mine = slice(rank.coords["dp"], None, 2)
    return train(
        model,
        lambda: context_parallel.mean_loss(replica(tokens[mine]), targets[mine], cp),
    )


grid = World(Mesh(dp=2, cp=2))
results = grid.run(trained)

# %% [markdown]
# Replicas descend the mean over dp of each rank's mean loss (lab 08). The plain model that they are compared with must do the same:


# %%
def mean_of_both():
    halves = [(tokens[i::2], targets[i::2]) for i in range(2)]
    return sum(alone.loss(*half) for half in halves) / 2


alone = plain()
losses, weights = train(alone, mean_of_both)


def is_right(results):
    """Whether all losses (their mean over dp) and weights are those of one device."""
    both = torch.tensor([results[0][0], results[2][0]]).mean(0)
    near = [(found - weights).abs().max() < 1e-9 for _, found in results]
    return torch.allclose(both, torch.tensor(losses)) and all(near)


is_right(results)

# %% [markdown]
# ### Exercise 11.2 · Bug hunt: the model that passed its test (12 min, ●●●)
#
# Below, a model, a zig-zag and the ring are put together by hand. The *mean over ranks* of `loss` should be the loss of the whole sequences, and the mean of its gradients the gradient of that loss.
# Its test compares the loss of a fresh model. Three things are wrong. (The model and its one RoPE table, `model.blocks[0].attention.rotary`, have a `places_` each: None, or a function from a number of tokens to their places.)


# %%
class LongContext:
    def __init__(self, model, comm):
        self.model, self.comm = model, comm
        for block in model.blocks:
            block.attention.attend = self.attend

    def attend(self, q, k, v, dropout):
        return context_parallel.ring_attention(q, k, v, self.comm, "contiguous")

    def loss(self, tokens, targets):
        whole = context_parallel.layout(tokens.shape[1], self.comm.size, "zigzag")
        mine, right = (whole.split(x, self.comm.rank) for x in (tokens, targets))
        logits = self.model(mine)
        return F.cross_entropy(logits.flatten(0, 1), right.flatten())


# %%
def its_test(rank):
    comm = rank.comm("cp")
    loss = LongContext(plain(), comm).loss(tokens, tokens)
    return (comm.all_reduce(loss.detach().reshape(1)) / comm.size).item()


f"{world.run(its_test)[0]:.3f}, and in one place {plain().loss(tokens, tokens):.3f}"

# %% [markdown]
# They agree: the test passes. Could it fail? The same fresh model, with zeros in place of attention's outputs:

# %%
blind = plain()
for block in blind.blocks:
    block.attention.attend = lambda q, k, v, dropout: torch.zeros_like(q)
f"{blind.loss(tokens, tokens):.3f} without attention"

# %% [markdown]
# A fresh model's loss hardly depends on attention, so no mistake in attention fails this test. Test with large weights.

# %%
check("context_parallel/bug-hunt", LongContext)

# %%
hint("context_parallel/bug-hunt", 1)

# %% [markdown]
# In the library, the positions and the loss:

# %%
show(GPT.places)

# %%
show(GPT.embed)

# %%
show(context_parallel.mean_loss)

# %% [markdown]
# ## Further: what does a rank of 16 keep of 131,072 tokens?
#
# > Llama-3.1-8B in bf16, one sequence. One device would keep 984 GB for the backward pass. How many times less does each of 16 ranks keep, though the keys of all ranks pass through it?

# %%
predict("kept/of-16", times=12)

# %% [markdown]
# Keys that pass are used and dropped. A rank keeps q, k, v, output and lse of its own tokens. So it keeps what a model keeps that reads s/N tokens (lab 03), its rows
# of the RoPE tables, and the number of all targets.
#
# The dry run takes the last of N ranks, at full width and length, with one of the 32 layers. `block` says how large a tile of scores may be. Fake tensors have no values to store, so it may be as large as the sequence.

# %%
one = dataclasses.replace(llama, num_layers=1)


def kept_by(rank):
    model = GPT(one).to(torch.bfloat16)
    context_parallel.distribute(model, rank.comm("cp"), block=2**17)
    long = torch.zeros(1, one.seq_len, dtype=torch.long)
    return measure.saved_activations(lambda: model.loss(long, long), model)


# %%
print("ranks   1 layer, dry run  unexplained  32 layers by formula")
for n in (1, 2, 4, 8, 16):
    with World(Mesh(cp=n), engine="dry") as dry:
        kept = dry.run(kept_by, rank=n - 1).total
    ring, last = Mesh(cp=n), n - 1
    formula = formulas.activations(one, bf16, ring, last).total
    whole = formulas.activations(llama, bf16, ring, last).total
    batch = 2 * 8 * one.seq_len // n  # tokens and targets, which a step has anyway
    print(f"{n:5}  {kept:16,} B  {kept - batch - formula:11}  {units.text(whole):>20}")

# %% [markdown]
# The last column is less than 32 times the bytes of the one layer, because these include log-probabilities, which a model has only once.

# %%
by_1, by_16 = (formulas.activations(llama, bf16, Mesh(cp=n)).total for n in (1, 16))
reveal("kept/of-16", times=round(by_1 / by_16, 3))

# %%
print("activations", units.text(by_16))
for level in (0, 3):
    shared = dataclasses.replace(bf16, zero=level)
    held = formulas.states(llama, shared, Mesh(cp=16)).total
    both = units.text(by_16 + held)
    print(f"states, ZeRO-{level}", units.text(held), "and both", both)

# %% [markdown]
# **Of what a rank holds, context parallelism divides activations alone.** Every rank holds all states, and with activations that is 190 GB, too much for an H100.
#
# So the same ranks shard the states, by ZeRO-3 over `("dp", "cp")` (lab 09). States and activations are then 69.6 GB. The peak is higher, because in the backward pass of the head come
# gathered weights, their gradients and those of the logits. By `predict.peak`, for a rank with as many tokens, it is 75.5 GB, which 80 GB barely hold.
#   <!-- claim: claims.peak_of_8192_tokens_on_16_ranks() == 75.5 -->
#
# With recomputation (lab 04) far fewer ranks would do. But then keys go round three times, and the ring sends a quarter more.

# %% [markdown]
# ## Further: or trade tokens for heads?
#
# In attention each head works alone. So *Ulysses* trades tokens for heads. Before attention, each rank sends the others their heads of its tokens, and gets its own
# heads of all tokens. That is an all-to-all (lab 07). After attention another one takes everything back.
#
# ### Exercise 11.3 · Trade tokens for heads (8 min, ●●○)
#
# `comm.all_to_all(x)` sends row r of x to rank r, and returns the rows for this one. `whole.join(parts, dim)` puts the tokens of all ranks in the order of the sequence.


# %%
def heads_for_tokens(x, whole, comm):
    """From [b, a, s/N, d], this rank's tokens, to [b, a/N, s, d], this rank's heads."""
    raise NotImplementedError


# %%
check("context_parallel/heads", heads_for_tokens)

# %%
hint("context_parallel/heads", 1)

# %%
show(context_parallel.heads_for_tokens)

# %% [markdown]
# > Llama-3.1-8B has a = 32 query heads and g = 8 key–value heads. On 8 ranks, how many times the bytes of Ulysses does a ring send in a forward pass? (Decide, too, whether a whole training step has the same ratio; the answer is below.)

# %%
predict("ring/over-ulysses", times=1)

# %% [markdown]
# Ulysses moves queries and outputs of a heads, and keys and values of g heads. On more ranks than g, key–value heads are copied until there are N. A rank keeps 1/N of
# what it moves, and sends the rest:
#
# $$ \underbrace{\bigl(2a + 2\max(g, N)\bigr)\,\frac{s}{N}\,d\,e\cdot\frac{N-1}{N}}_{\text{Ulysses}} \qquad \underbrace{2\,g\,\frac{s}{N}\,d\,e\cdot(N-1)}_{\text{ring}} $$


# %%
def by_attention(way, n, model=llama, tp=1):
    train = dataclasses.replace(bf16, attention=way)
    return formulas.sent(model, train, Mesh(cp=n, tp=tp)).only(axis="cp")


def forward_bytes(way, n):
    sent = by_attention(way, n)
    return sum(line.amount for line in sent if "forward" in line.name)


ratio = {
    n: forward_bytes("ring", n) / forward_bytes("ulysses", n) for n in (2, 4, 8, 16, 32)
}
reveal("ring/over-ulysses", times=ratio[8])

# %%
{n: round(times, 2) for n, times in ratio.items()}

# %% [markdown]
# **Forward, the ring sends less on few ranks and more on many.** For N up to g both send the same at N = a/g + 1, here five ranks.
#
# **In a training step of Llama-3.1-8B the ring sends more from three ranks on.** Backward it sends three times its forward bytes (keys and values, with fp32 sums of
# their gradients), and Ulysses sends what it sent forward. So a step of the ring sends 4 × its forward bytes, and a step of Ulysses 2 × its own. They are equal at
#
# $$ 4\cdot 2g\,(N-1) \;=\; 2\,(2a+2g)\,\frac{N-1}{N} \quad\Longleftrightarrow\quad N \;=\; \frac{1}{2}\Bigl(\frac{a}{g}+1\Bigr). $$
#
# With four query heads per key–value head that is at two and a half ranks. (With sums in bf16 a step of the ring would send 3 × its forward bytes, on 8 ranks 2.4
# times a step of Ulysses.) A step's bytes, ring over Ulysses, by the number of ranks:

# %%
{
    n: round(by_attention("ring", n).total / by_attention("ulysses", n).total, 1)
    for n in ratio
}

# %% [markdown]
# So on four ranks the ring sends less forward, but 1.6 times as much in a step. Ulysses has another advantage: it computes with one kernel over the whole sequence.
# And it has two drawbacks: as it is usually built, attention waits for the exchange, and there are no more ranks than heads.
#
# Is Ulysses right, too? After three steps of training the weights equal those of one device, and every byte that a step sends is in the formula:

# %%
four = dataclasses.replace(four, attention="ulysses")
world.run(one_step, four, tokens, targets)
sent = formulas.sent(config, four, world.mesh, rank=2)
is_right(grid.run(trained, "ulysses")), sent.diff(world.ledger.only(rank=2)).unexplained

# %% [markdown]
# ### Or gather all keys?
#
# A third way sends forward what the ring sends, but in one all-gather before attention. The backward pass gathers keys and values again, unless they were kept, and
# ends with a reduce-scatter of their gradients. In this simplest form nothing overlaps, and a rank holds all keys and values of one layer.
#
# Llama 3 405B was trained like that: 131,072 tokens on 16 ranks, times eight of tensor parallelism. Its report gives two reasons (section 3.3.2). A *document mask*,
# under which tokens attend within their own document only, is simple when all keys are there; and with grouped queries the keys are small. Would you decide so, too?
#
# > Llama-3.1-405B has 128 query heads and 8 key–value heads. Without tensor parallelism a ring of 16 ranks sends 1.8 times the bytes of Ulysses in a training step.
# > How many times is it if eight ranks of `tp` share out the heads first (lab 10)?

# %%
predict("llama-405b/ring-over-ulysses", times=1.8)

# %% [markdown]
# Compare the three in a training step of one layer, with 40 GB/s per rank. First, do the hops of the ring hide? Backward is the harder case: with the fp32 sums of
# gradients a hop carries 3 times the bytes, and computing takes 2.5 times as long. How long do the two take?

# %%
big = dataclasses.replace(ModelConfig.named("llama-3.1-405b"), seq_len=131_072)
pairs, bw = context_parallel.layout(big.seq_len, 16).work(0), h100.network.bandwidth
attend = 3.5 * pairs * 4 * big.d_model / rate  # forward, and 2.5 times as much backward
one_head = 2 * 2 * big.seq_len * big.d_head  # keys and values of all tokens, in bf16
carries, during = 3 * 8 * one_head / 16 / bw, attend * 2.5 / 3.5 / 16
print(f"a hop backward: {1e3 * carries:.1f} ms, behind {1e3 * during:.1f} ms")

# %% [markdown]
# They hide. Only the last hop, of sums alone, has nothing to hide behind. So the ring waits for that hop, and the other two wait for all that they send.
#
# The table divides this wait by the time that attention computes ("of attention"), and by all that a rank computes for a layer ("of all"). "Holds" is what a rank has
# of keys, values and their gradients at the fullest moment, in the backward pass:


# %%
def three_ways(tp):
    """What each way sends, waits for and holds; what a rank computes for a layer."""
    keys = 8 / tp * one_head
    spent = formulas.time(big, bf16, Mesh(cp=16, tp=tp), device=h100).spent(0)
    ring, heads = (by_attention(way, 16, big, tp) for way in ("ring", "ulysses"))
    ring, heads = ring.total / big.num_layers, heads.total / big.num_layers
    rows = {  # a gather, another backward, and fp32 gradients, which are twice as wide
        "ring": (ring, 2 * keys / 16 / bw, 2 * 3 * keys / 16),
        "all-gather": (4 * keys * 15 / 16, 4 * keys * 15 / 16 / bw, 3 * keys),
        "Ulysses": (heads, heads / bw, 2 * one_head),
    }
    return rows, (spent["forward"] + spent["backward"]) / big.num_layers


for tp in (1, 8):
    rows, computes = three_ways(tp)
    print(f"tp = {tp}         sends     waits   of attention   of all     holds")
    for way, (nbytes, waits, held) in rows.items():
        print(f"  {way:10} {units.text(nbytes):>8} {1e3 * waits:6.2f} ms", end="")
        print(f" {waits / attend * tp:13.1%} {waits / computes:9.1%}", end="")
        print(f" {units.text(held):>9}")

# %%
(ring_sends, *_), (ulysses_sends, *_) = rows["ring"], rows["Ulysses"]
reveal("llama-405b/ring-over-ulysses", times=round(ring_sends / ulysses_sends, 2))

# %% [markdown]
# **With eight ranks of tensor parallelism all three send the same here.** Ring and all-gather send an eighth of what they sent, since a rank has one key–value head in
# place of eight. Ulysses gains less. Its 16 ranks need 16 key–value heads, so the only one is copied 16 times.
#
# (The bytes are equal because a rank has as many query heads as cp has ranks, 16. On fewer ranks of cp the ring sends less than Ulysses. And with sums in bf16, ring and all-gather send a quarter less.)
#
# **The waits are not the same.** All-gather and Ulysses wait a fifth of the time that attention computes, or a tenth of what the whole layer does. The ring hardly
# waits. (What the ring pays is not counted: 16 small products in place of a large one, and as many merges.) Llama 3's authors took the wait, and 200 MB, for masks
# that stay simple.
#
# The ring hides its messages, and its rivals could hide some: one group of heads can travel while another computes. With eight ranks of tp there is nothing to cut, as a rank has one key–value head, and under Ulysses one query head.
#
# Even without tp the ring waits less than Ulysses in this table, because its hops hide. Forward they hide down to 1,528 tokens per rank, and backward down to 1.2
# times as many.
#   <!-- claim: (lambda h: round(context_parallel.least_tokens(h.rate("attention"), h.network.bandwidth, groups=8 / 128)))(config.Hardware.named("H100")) == 1528 -->
#
# What if a rank has too few tokens for that? Take a step of one layer of Llama-3.1-8B on 4 and on 8 ranks, without tp. (Backward the first two hops carry keys and values alone,
# since the sums start one rank behind.) "In halves" gives Ulysses an overlap, too: half of the queries travel while the other half computes. Each wait over attention's computing:

# %%
def waits_of(count, n):
    """What the three wait for, over what attention computes."""
    long = dataclasses.replace(llama, seq_len=n * count)
    tile = context_parallel.layout(n * count, n).work(0) / n * 4 * long.d_model / rate
    hop = 2 * 2 * count * long.num_kv_heads * long.d_head / bw  # keys and values
    back = [hop] * 2 + [3 * hop] * (n - 3) + [2 * hop]  # keys; both; sums of gradients
    ring = (n - 1) * max(0, hop - tile) + sum(max(0, x - 2.5 * tile) for x in back)
    ring += 2 * hop  # the sums come home
    heads = by_attention("ulysses", n, long).total / long.num_layers / bw
    a, g = long.num_heads, max(n, long.num_kv_heads)
    half = heads / 4 * a / 2 / (a + g)  # half of the queries, or of the outputs
    keys = heads / 4 * 2 * g / (a + g)  # come first; their gradients leave last
    cut = sum(
        2 * half + keys + 2 * max(half, work / 2) - work
        for work in (n * tile, 2.5 * n * tile)  # forward, backward
    )
    return [wait / (3.5 * n * tile) for wait in (ring, heads, cut)]


print("ranks, tokens each    ring   Ulysses   in halves")
for n in (4, 8):
    for count in (2048, 4096, 8192, 16384):
        print(f"{n:5}  {count:11}", *(f"{wait:9.0%}" for wait in waits_of(count, n)))

# %% [markdown]
# **So count the tokens of a rank, and the ranks.** With enough tokens to hide behind, a ring waits least. With fewer, and without tp, Ulysses waits least, and earlier if there
# are many ranks: on 8 with 4,096 tokens, on 4 with 2,048 (in halves; in one piece the two are alike there). An all-gather keeps masks simple, where its memory and its wait do not hurt.
#
# `predict.time` counts a step of any mesh as if nothing overlapped (lab 10). It knows the ring, not the all-gather, but that sends the same bytes, and there nothing
# does overlap. Does it give the table's wait? Both without the latency of 5 µs per message:

# %%
no_latency = dataclasses.replace(h100, network=Link(0, bw))
exposed = formulas.time(big, bf16, Mesh(cp=16, tp=8), device=no_latency).spent(0)["cp"]
waits = rows["all-gather"][1]
print(f"{1e3 * exposed / big.num_layers:.2f} ms, and in the table {1e3 * waits:.2f} ms")

# %% [markdown]
# ### Is the zig-zag fair to packed documents?
#
# Documents are packed into one sequence, and each token attends within its own. Take a single document of 131,072 tokens; then one of 65,536 among 32 of 2,048, of
# which 0 to 32 stand before it. Here is the work of the busiest of four ranks over the mean, first with one zig-zag through the whole sequence, then with each
# document cut by itself:


# %%
def busiest(lengths, apart=False, n=4):
    """The work of the busiest rank over the mean."""
    whole = context_parallel.layout(sum(lengths), n)
    seen = torch.cat([torch.arange(1, length + 1) for length in lengths])
    work = [seen[list(whole.positions(rank))].sum().item() for rank in range(n)]
    if apart:
        cuts = [context_parallel.layout(length, n) for length in lengths]
        work = [sum(cut.work(rank) for cut in cuts) for rank in range(n)]
    return round(max(work) * n / sum(work), 2)


short = [2048] * 32
before = {k: [*short[:k], 65_536, *short[k:]] for k in range(0, 33, 8)}
print("one document:", busiest([131_072]))
for k, lengths in before.items():
    together, apart = busiest(lengths), busiest(lengths, apart=True)
    print(f"{k:2} before it: {together:.2f}, cut apart {apart:.2f}")

# %% [markdown]
# **One zig-zag balances one triangle.** With a long document among short ones the busiest rank computes 1.7 to 2.9 times the mean, depending on where the long one
# stands.
#
# Where each document has a zig-zag of its own, the work is even again, on a ring as well. Transformer Engine does so, and pads each document to a multiple of 2·cp
# (pull request 2129). The price is that padding, and small tiles: a document of 2,048 tokens on 16 ranks is 32 chunks of 64.

# %% [markdown]
# ### Further: with tensor parallelism
#
# With tensor parallelism (lab 10) each rank has its heads already, and the ring runs among the ranks that have the *same* heads. Here is attention alone, on two by two ranks, each with
# half the tokens of half the heads:

# %%
q, k, v = torch.randn(3, 1, 4, 16, 8, generator=draw, dtype=torch.float64)
right, _ = flash.attention(q, k, v, causal=True)


def quarter(rank):
    cp, tp = rank.comm("cp"), rank.comm("tp")
    whole = context_parallel.layout(16, cp.size)

    def cut(x):
        return whole.split(x.chunk(tp.size, 1)[tp.rank], cp.rank, 2)

    out = context_parallel.ring_attention(*map(cut, (q, k, v)), cp)
    return (out - cut(right)).abs().max().item() < 1e-12


square = World(Mesh(cp=2, tp=2))
square.run(quarter), square.ledger.by("axis")

# %% [markdown]
# All outputs are right, and attention sends over cp alone. A mesh is legal if tp splits the layers (lab 10) and 2·cp divides the sequence. With sequence parallelism (lab 10), tp must also divide the s/cp tokens that the tp ranks share.

# %% [markdown]
# ## Further: turn the knobs
#
# One layer of Llama-3.1-8B. Find a setting in which the zig-zag gains next to nothing, and one in which a faster link gains nothing.


# %%
def knobs(tokens_per_rank=8192, ranks=4, layout="zigzag", link="between nodes"):
    forward = layer(tokens_per_rank, ranks, link, kind=layout)
    return plots.overlap(per="layer", forward=forward)


lengths = [512, 8192]
kinds = ["contiguous", "zigzag"]
explore(knobs, tokens_per_rank=lengths, ranks=[4, 8], layout=kinds, link=list(links))

# %% [markdown]
# With 512 tokens between nodes the zig-zag saves 1 to 3 %: both layouts mostly wait for messages. With 8,192 a faster link gains nothing, since from 6,112 tokens on every message hides.

# %% [markdown]
# ## In practice
#
# | | how to ask for it | what it does |
# |---|---|---|
# | Megatron-LM | `--context-parallel-size 4` | zig-zag; `--cp-comm-type p2p` is the ring, `a2a` Ulysses, `all_gather` gathers keys and values, `a2a+p2p` both on two levels |
# | torchtitan 0.2.2 | `parallelism.context_parallel_degree` | PyTorch's own, below; `parallelism.context_parallel_rotate_method`, which 0.3 no longer has |
# | PyTorch | `with context_parallel(mesh, buffers=[…], buffer_seq_dims=[…]):` from `torch.distributed.tensor.experimental` | cuts the buffers (give it the RoPE tables, too) and replaces `scaled_dot_product_attention`; a CUDA device only |
# | DeepSpeed | `DistributedAttention` around the attention of the model | Ulysses |
#
# PyTorch's rotate method is `"allgather"` unless you call `set_rotate_method("alltoall")`. `"allgather"` collects all keys at once, so their memory grows with s.
#
# Megatron-LM reduces gradients over dp × cp, torchtitan shards over both. To weigh by tokens, Megatron-LM has `--calculate-per-token-loss`.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **Table 2 of the Ring Attention paper** (Liu et al., arXiv:2310.01889) lists the least block to hide the ring as F/bw. For an A100 on InfiniBand, 312 TFLOP/s and 12.5 GB/s, it prints 24.5 thousand tokens and 149.5 thousand per host; the <!-- erratum: CP-02 -->
# ratio is 24.96 thousand, and six blocks are 149.76 thousand:

# %%
312e12 / 12.5e9, 6 * 312e12 / 12.5e9

# %% [markdown]
# **Table 1 of the same paper** gives 6bch *bytes* for the six blocks that a rank holds. In bf16 they are 12bch bytes: the table counts numbers. <!-- erratum: CP-07 -->
#
# ### True under a condition
#
# **Its condition c ≥ F/bw** holds without a mask and without grouped queries. A causal mask in a zig-zag takes twice the tokens; grouping divides them by a/g. <!-- erratum: CP-06 -->
#
# **"During training, we cannot afford large context windows."** (chapter 15, *LLM Training Acceleration (WIP)*, of an online book on large language models). True while s × s scores are stored. Of what is kept above, no tensor grows faster than s, and each rank has 1/N of it. <!-- erratum: S0-027 -->

# %% [markdown]
# ## Summary
#
# > - Queries stay, keys and values go round, results are merged by their log-sum-exps: exact attention over keys that are never in one place.
# > - A ring sends keys and values N − 1 times. Backward they go again, with fp32 sums of their gradients: three times the bytes in bf16.
# >   <!-- claim: (lambda x: x["ring backward"] / x["ring forward"])(predict.sent(config.ModelConfig.named("llama-3.1-8b"), config.TrainConfig(micro_batch=1, global_batch=1, attention="ring"), config.Mesh(cp=8)).by("name")) == 3 -->
# > - Contiguous chunks give the last rank (2N − 1)/N times the average, 1.75 on four ranks. The zig-zag gives all the same, step by step.
# >   <!-- claim: (lambda x: round(x.work(3) / (x.s * (x.s + 1) / 8), 3))(context_parallel.layout(131072, 4, "contiguous")) == 1.75 -->
# >   <!-- claim: len({context_parallel.layout(131072, 4).work(rank) for rank in range(4)}) == 1 -->
# > - Tokens per rank decide whether the forward ring hides: e·(g/a)·F/bw of them, 6,112 at 40 GB/s for Llama-3.1-8B on H100s whose attention reaches 49 % of their peak, 679 on NVLink.
# >   <!-- claim: (lambda h: [round(context_parallel.least_tokens(h.rate("attention"), link.bandwidth, groups=8 / 32)) for link in (h.network, h.inside)])(config.Hardware.named("H100")) == [6112, 679] -->
# > - A rank keeps 1/N of the activations: 61.5 GB instead of 984 GB for Llama-3.1-8B at 131,072 tokens on 16 ranks.
# >   <!-- claim: [round(predict.activations(config.ModelConfig.named("llama-3.1-8b"), config.TrainConfig(micro_batch=1, global_batch=1, attention="ring"), config.Mesh(cp=n)).total / 1e9, k) for n, k in ((16, 1), (1, None))] == [61.5, 984] -->
# > - Positions and the number of targets are those of the whole sequence: each target weighs alike on all cp ranks. Gradients are averaged over ("dp", "cp").
# > - Ulysses trades tokens for heads, and has no more ranks than heads. On 8 ranks of Llama-3.1-8B a ring sends 1.6 times as much forward and 3.2 times as much in a training step, with fp32 sums of gradients. But with enough tokens per rank the ring hides all but its last hop.
# >   <!-- claim: (lambda ring, ulysses: ring / ulysses)(*(predict.sent(config.ModelConfig.named("llama-3.1-8b"), config.TrainConfig(micro_batch=1, global_batch=1, attention=way), config.Mesh(cp=8)).only(name=name).total for way, name in (("ring", "ring forward"), ("ulysses", "all_to_all forward")))) == 1.6 -->
# >   <!-- claim: round((lambda ring, ulysses: ring / ulysses)(*(predict.sent(config.ModelConfig.named("llama-3.1-8b"), config.TrainConfig(micro_batch=1, global_batch=1, attention=way), config.Mesh(cp=8)).only(axis="cp").total for way in ("ring", "ulysses"))), 1) == 3.2 -->
# > - Tensor parallelism shares out the heads first, and takes away what Ulysses gains. With Llama-3.1-405B's 16 ranks of cp times 8 of tp, ring, Ulysses and an all-gather of keys send the same in a step, if gradients are summed in fp32; on fewer ranks of cp the ring sends less.
# >   <!-- claim: (lambda ring, ulysses: ring / ulysses)(*(predict.sent(config.ModelConfig.named("llama-3.1-405b"), config.TrainConfig(micro_batch=1, global_batch=1, attention=way), config.Mesh(cp=16, tp=8)).only(axis="cp").total for way in ("ring", "ulysses"))) == 1 -->
#
# Next: [lab 12](12_expert_parallel.ipynb) shares out the experts of a layer.

# %% [markdown]
# ## References
#
# - H. Liu, M. Zaharia, P. Abbeel, *Ring Attention with blockwise transformers for near-infinite context*, arXiv:2310.01889 (2023): section 3, tables 1 and 2.
# - S. A. Jacobs et al., *DeepSpeed Ulysses*, arXiv:2309.14509 (2023).
# - W. Brandon et al., *Striped attention: faster ring attention for causal transformers*, arXiv:2311.09431 (2023): the first balanced ring.
# - Llama team, *The Llama 3 herd of models*, arXiv:2407.21783 (2024): section 3.3.2, an all-gather of keys over 16 ranks; 2·CP chunks, as here.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): context parallelism and the zig-zag.
# - PyTorch 2.13, `torch.distributed.tensor.experimental`, source of its ring attention; Megatron-LM, argument list; as of 2025; torchtitan 0.2.2, `torchtitan/config/job_config.py`; Transformer Engine, pull request 2129 (2025).
