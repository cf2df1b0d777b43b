# %% [markdown]
# # 12 · Send tokens to their experts
#
# **A layer has many experts, and every token visits a few of them. If each rank holds only some experts, what travels, who waits for whom, and who averages which gradients?**
#
# *90 min, and 55 further · before this: labs 07, 08 and 09 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - write a router whose weights add up to 1 and can be learned (exercise 12.1),
# - bring tokens to experts on other ranks, and every result home to its token (exercise 12.2),
# - know which ranks average which gradients, and what a balance loss must reach (exercise 12.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
from dataclasses import replace

import torch

from labutils import anatomy, expert_parallel, measure, step
from labutils import predict as formulas
from labutils.config import Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.timeline import Timeline
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# Four ranks read 64 tokens each, and each rank holds two of eight experts. Every token makes two *visits*, to experts that a router chooses, here after 40 steps of training. A row says where one rank's tokens go, a bar how many visits one expert has to compute:

# %%
one, learn = World(1), rigs.expert_parallel.train_router
trained = one.run(learn, seed=0)[0]
plots.visits(trained.visits(ranks=4))

# %% [markdown]
# Expert parallelism is **an all-to-all of tokens to the ranks that hold their experts, and an all-to-all of results back.** The data decide how many tokens go where. So the shares are uneven, and all ranks wait for the rank whose experts are busiest.

# %% [markdown]
# ## How does a token choose its experts?
#
# A *mixture of experts* is a feed-forward layer in E versions, the experts $f_e$. A small linear layer, the *router*, scores each token x against each expert. The token visits the k experts that score highest, and their outputs are added up, weighted by the scores:
#
# $$ y \;=\; \sum_{e\,\in\,\text{best } k} w_e\, f_e(x), \qquad w_e \;=\; \frac{s_e}{\sum_{j\,\in\,\text{best } k} s_j}. $$
#
# The scores s are a softmax over all experts (Mixtral), or a sigmoid for each expert by itself (DeepSeek-V3). The division *renormalizes*: the weights of the chosen experts add up to 1.
#
# > Mixtral-8x7B has E = 8 experts in each layer and k = 2. How many billion parameters does it have?

# %%
predict("mixtral/parameters", billions=56)

# %%
mixtral = ModelConfig.named("mixtral-8x7b")
reveal("mixtral/parameters", billions=round(mixtral.num_params / 1e9, 1))

# %%
{part: f"{n / 1e9:.2f} billion" for part, n in mixtral.parameters.items() if n > 1e7}

# %% [markdown]
# Only the feed-forward layers come in eight versions; attention and embeddings are there once. And of the eight versions a token computes with two:

# %%
met = mixtral.num_params - mixtral.parameters["feed-forward"] * 6 // 8
f"a token meets {met / 1e9:.1f} of {mixtral.num_params / 1e9:.1f} billion parameters"

# %% [markdown]
# ### Exercise 12.1 · Choose the experts (10 min, ●○○)
#
# `bias` holds one number per expert. It is added to the *scores* to choose experts, and used nowhere else. Later in this lab it balances the experts.


# %%
def choose(logits, k: int, score: str, bias) -> tuple[torch.Tensor, torch.Tensor]:
    """The k experts of each token and their weights, both [T, k], from logits [T, E].

    score is "softmax" or "sigmoid"; bias is [E].
    """
    raise NotImplementedError


# %%
check("expert_parallel/route", choose)

# %%
hint("expert_parallel/route", 1)

# %%
show(expert_parallel.route)

# %% [markdown]
# Choosing has no gradient, so from the model's loss the router learns only through the weights. With k = 1 a renormalized weight is always 1, and the router learns nothing:

# %%
for k in (1, 2):
    logits = torch.tensor([[0.5, 0.2, -1.0]], requires_grad=True)
    weights = expert_parallel.route(logits, k).weights
    (weights * torch.tensor([3.0, 1.0])[:k]).sum().backward()
    print(f"k = {k}: largest gradient of a logit {logits.grad.abs().max():.2f}")

# %% [markdown]
# So the Switch Transformer, whose k is 1, leaves the division out.

# %% [markdown]
# ## How do tokens reach an expert on another rank, and come home?
#
# N_e ranks, the mesh axis `ep`, share the E experts: rank 0 holds the first E/N_e, rank 1 the next, and so on. A pass through the layer takes five steps:
#
# 1. **Count.** Sort the visits by expert. Tell every rank how many visits come to its experts: an all-to-all of E whole numbers.
# 2. **Dispatch.** Send the tokens' rows, an all-to-all with uneven shares.
# 3. **Compute.** Each expert runs on the rows that have come. It treats every row by itself, so it may take one rank's rows at a time, or all at once.
# 4. **Combine.** Send the results back, with the shares reversed.
# 5. **Add up.** Multiply each result by its weight, and add it to its token's row.
#
# ### Exercise 12.2 · Bring the tokens home (35 min, ●●●)
#
# `comm.all_to_all(rows, send_sizes, recv_sizes)` sends the first `send_sizes[0]` rows to rank 0, the next to rank 1, and so on, and returns what came, in rank order. Without sizes, all shares are equal. Forward pass only.


# %%
def moe(x, chosen, weights, experts, comm) -> torch.Tensor:
    """[T, h]: for each of this rank's tokens the weighted sum of its experts' outputs.

    x is [T, h]; chosen, weights are [T, k]; experts are functions of rows: this rank's,
    equally many on each rank. T differs between ranks.
    """
    raise NotImplementedError


# %%
check("expert_parallel/travel", moe)

# %%
hint("expert_parallel/travel", 1)

# %%
show(expert_parallel.dispatch)

# %%
show(expert_parallel.combine)

# %% [markdown]
# The backward pass takes the same way in reverse: gradients of results travel to the experts, gradients of tokens come back.
#
# > How many all-to-alls does *one* layer take per micro-batch, forward and backward?

# %%
predict("layer/all-to-alls", calls=2)

# %% [markdown]
# A small GPT on three ranks has one layer of six experts and a *shared expert*, which every token visits as well. Does it train like the plain model, which holds all experts and reads all sequences?

# %%
sizes = dict(num_layers=1, d_model=32, num_heads=2, d_ff=32, vocab_size=64, seq_len=32)
kind = dict(ffn="swiglu", norm="rmsnorm", positions="rope", bias=False, tied=False)
config = ModelConfig(**sizes, **kind, num_experts=6, top_k=2, shared_expert=True)
draw = torch.Generator().manual_seed(2)
data = torch.randint(64, (12, 32), generator=draw)


def train(net, x, reduce=lambda net: None, steps=3):
    """Losses, then gradients and weights by name, after some steps."""
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net.loss(x, x)
        loss.backward()
        reduce(net)
        optimizer.step()
        losses.append(loss.item())
    named = dict(net.named_parameters())
    return losses, {n: p.grad for n, p in named.items()}, named


# %%
def spread(rank, steps=3):
    net = GPT(config, generator=torch.Generator().manual_seed(rank.rank)).double()
    dp, edp, ep = rank.comm("dp"), rank.comm("edp"), rank.comm("ep")
    expert_parallel.spread_experts(net, ep, replicas=dp)
    mine = data.chunk(rank.size)[rank.rank]

    def reduce(net):
        expert_parallel.reduce_gradients(net, dp, edp)

    results = train(net, mine, reduce, steps)
    return *results, net.blocks[0].feed_forward.routing.counts.tolist()


def compare(ranks, whole):
    """The largest difference of gradients and of weights from the plain model's."""
    for what, here in (("gradients", 1), ("weights", 2)):
        pairs = [(g, whole[here][n]) for rank in ranks for n, g in rank[here].items()]
        worst = max((a - b).abs().max().item() for a, b in pairs)
        print(f"{what}: {len(pairs)} tensors, all equal: {worst < 1e-9}")


# %%
whole = train(GPT(config, generator=torch.Generator().manual_seed(0)).double(), data)
three = World(Mesh(dp=3, ep=3))
ranks = three.run(spread)
compare(ranks, whole)

# %% [markdown]
# It does, the router's gradient included. Now the bytes of one step. The formula is given what the router decided, how many visits each rank sends to each expert:

# %%
ranks = three.run(spread, steps=1)
visits = [rank[-1] for rank in ranks]
routed = expert_parallel.routed_sent(config, [visits], itemsize=8)
told = Ledger(line for line in three.ledger if line.axis == "ep")
routed.only(rank=0).diff(told.only(rank=0))

# %%
calls = {line.name: line.count // 2 for line in told.only(rank=0)}  # 2 other ranks
reveal("layer/all-to-alls", calls=sum(calls.values()))

# %% [markdown]
# Five: one of counts, and four of rows. If visits are spread evenly over the experts, then in each of these four a rank sends
#
# $$ \frac{N_e-1}{N_e}\; k\, b\, s\, h \ \text{numbers} $$
#
# since its b·s tokens make k visits each, a row has h numbers, and 1/N_e of the visits stay at home.

# %% [markdown]
# ## Who averages which gradients?
#
# Expert parallelism adds no ranks. The data-parallel ranks are cut into blocks of N_e; each block holds all experts once, and every rank reads tokens of its own. The ranks that hold the *same* experts, one in each block, are the
# axis `edp` (expert data parallelism). On four ranks in blocks of two:

# %%
mesh = Mesh(dp=4, ep=2)
for axis in ("dp", "ep", "edp"):
    print(f"{axis:4}", sorted({mesh.group(rank, axis) for rank in range(4)}))

# %% [markdown]
# Attention, norms, embeddings, the router and a shared expert are on all ranks of `dp`, so their gradients are averaged over `dp`. An expert is only on the ranks of `edp`, N_d/N_e of the N_d data-parallel ranks, so its gradient is averaged over those.
#
# **Left alone, that average is N_e times too large.** An expert meets the tokens of all N_e ranks of its block, and each rank's loss is a mean over its own tokens. So the expert's gradient is already a sum of N_e means. Therefore the backward pass of `combine` divides by N_e before gradients reach the experts. That of `dispatch` multiplies by N_e again, for the gradients of tokens. Then each group of ranks divides by its own size:

# %%
show(expert_parallel.reduce_gradients)

# %%
compare(World(mesh).run(spread), whole)

# %% [markdown]
# A mean over the wrong group raises no error by itself, since shapes and names agree where the experts differ: `experts.0` is expert 0 on rank 0 and expert 3 on rank 1.

# %% [markdown]
# ### Further: what does a rank hold?
#
# > Mixtral in bf16 with fp32 masters takes 16 bytes per parameter (lab 02), 747 GB in all. On 8 ranks, with one expert of each layer per rank, a rank holds 116 GB. How many GB does a rank hold on 64 ranks, in blocks of eight?

# %%
predict("mixtral/64-ranks", GB=14.5)

# %% [markdown]
# A dry run of rank 43 answers. It takes one training step of all 32 layers on 4,096 tokens, as `step.build` puts it together (lab 11). It has no data that could decide where tokens go, so you state an assumption: with `balanced`, every expert gets equally many.

# %%
cluster, full = Mesh(dp=64, ep=8), replace(mixtral, seq_len=4096)
masters = TrainConfig(micro_batch=1, global_batch=64, attention="sdpa")


def full_step(rank):
    mine = step.build(full, masters, rank.mesh)(rank)
    tokens = torch.zeros(1, 4096, dtype=torch.long)
    mine([(tokens, tokens)])
    return measure.model_states(mine.stages, *mine.inner)


assume = expert_parallel.balanced(full, tokens=4096)
with World(cluster, engine="dry", assume=assume) as dry:
    held = dry.run(full_step, rank=43)

# %%
reveal("mixtral/64-ranks", GB=round(held.total / 1e9, 1))

# %%
formulas.states(full, masters, cluster, rank=43).diff(held)

# %% [markdown]
# **A rank holds 116 GB, as on 8 ranks:** more blocks are only more copies. That is too much for an H100.
#
# ZeRO-2 (lab 09) leaves 26 GB. It divides gradients (in fp32) and optimizer states by 64 where all ranks hold a parameter, and by 8 where it is an expert's, which 8 ranks hold.
#   <!-- claim: round(predict.states(__import__("dataclasses").replace(config.ModelConfig.named("mixtral-8x7b"), seq_len=4096), config.TrainConfig(micro_batch=1, global_batch=64, attention="sdpa", zero=2), config.Mesh(dp=64, ep=8), rank=43).total / 1e9) == 26 -->
#
# Without ZeRO, this is what rank 43 sends in one step:

# %%
in_a_step = Ledger(line for line in dry.ledger if line.name != "broadcast")
formulas.sent(full, masters, cluster, rank=43).diff(in_a_step)

# %% [markdown]
# **Seven eighths of these bytes are gradients.** The rank holds 14.5 GB of them in bf16, but they are summed in fp32 (lab 08), and a ring of N ranks sends 2(N − 1)/N times what it sums (lab 07). With one micro-batch of 4,096 tokens per rank, averaging the experts costs five times as many bytes as all their all-to-alls. (Of the axes in `dp_cp` and `pp_dp_cp` only dp has more than one rank here.)

# %% [markdown]
# ## What if all tokens want the same expert?
#
# The model of the first picture learns a synthetic language of 16 words, of which few are frequent. The next word depends on the last two *together*, so guessing it takes a feed-forward layer. A token visits an expert once at most. So with k = 2 of 8 the busiest expert can have at most four times the mean.
#
# > How many times the mean does the busiest expert have in the last 50 of 300 steps, averaged over eight seeds?

# %%
predict("unbalanced/busiest", times=1.5)

# %% [markdown]
# The runs are recorded, by `python tools/expert_routing.py`. (A test repeats their first steps.)

# %%
record = rigs.expert_parallel.routing_record()["runs"]
ends = rigs.expert_parallel.ends
reveal("unbalanced/busiest", times=round(sum(ends("nothing", "busiest")) / 8, 1))

# %% [markdown]
# **Why?** Three suspects: few words are frequent, nothing in the loss asks the router to use all experts, and all rows share a part, their mean, that pulls them to the same experts. Switch off each alone. ("α = 0.1" adds a loss that asks for balance, explained below. "Rows centered": the router scores rows less their mean.)

# %%
for way in ("nothing", "words equally frequent", "α = 0.1", "rows centered"):
    print(f"{way:22} {sum(ends(way, 'busiest')) / 8:.1f} times the mean")

# %% [markdown]
# **After 300 steps it takes all three.** Remove any one, and most of the skew is gone. (Experts drawn by lot for each *token* would give 1.2 in a batch of this size.)
#
# When does the skew come? "Frequencies given" adds the log of each word's frequency to the model's logits:

# %%
print("step                       ", "  1    4   10   40")
for words, how in {
    "uneven words": {},
    "even words": dict(skewed=False),
    "uneven, a tenth of the rate": dict(lr=0.001),
    "uneven, rows centered": dict(centered=True),
    "uneven, frequencies given": dict(given=True),
}.items():
    runs = [one.run(learn, seed, **how)[0].busiest for seed in range(8)]
    means = [sum(run[step - 1] for run in runs) / 8 for step in (1, 4, 10, 40)]
    print(f"{words:27}", *(f"{times:.1f} " for times in means))

# %% [markdown]
# **Part of the skew is there before training.** An untrained router sends its busiest expert twice the mean, since words repeat, and a word goes almost the same way every time: two experts drawn by lot for each *word* give 1.9, too.
#   <!-- claim: claims.busiest_by_lot() == 1.9 -->
#
# **What the first steps add is a part that all rows share.** Four steps at this learning rate, 0.01, lift the busiest expert to 3.5 times the mean. Where the router does not see the shared part, it stays at 1.6. At a tenth of the rate the skew rises later and less.
#
# **The shared part says which words are frequent.** A model first learns which words are frequent, whatever came before. Its head has no bias (nor has Mixtral's), so all rows must carry this. Where the frequencies are given, or even, the skew does not rise.
#
# Here are the words of the last of 300 steps, with nothing for balance:

# %%
by_word = record["nothing"][0]["words"]
rare = [sum(column) for column in zip(*by_word[5:], strict=True)]
names = [*(f"word {i}" for i in range(5)), "11 others"]
plots.visits([*by_word[:5], rare], names=names)

# %% [markdown]
# In this run each frequent word keeps mostly to two or three experts, whatever word stands before it. Experts 0 and 2 together get one visit of 512, so in this step they learn next to nothing.

# %% [markdown]
# **A balance loss** is added to the loss, times α:
#
# $$ E\sum_e v_e\,P_e, \qquad v_e = \text{share of the rank's visits}, \quad P_e = \text{mean probability}. $$
#
# This loss is 1 where visits and probabilities are even, and E/k where the router is certain that all tokens want the same k experts. Counts have no gradient, so the gradient flows through P alone. It lowers the probability of the experts whose share v is high.
#
# **A bias** (DeepSeek-V3) balances without a gradient: it is added where experts are chosen, and enters no weight w (exercise 12.1). After each step the bias of every expert that was asked for more often than the mean falls by γ; that of the others rises by γ. (γ is 0.01 in these runs, 0.001 in DeepSeek-V3.) Runs with a bias have sigmoid scores.

# %%
show(expert_parallel.update_bias)

# %%
ways = ("nothing", "α = 0.01", "α = 0.1", "a bias")
plots.curves(
    range(10, 301, 10),
    **{way: [run["busiest"] for run in record[way]] for way in ways},
    xlabel="training step",
    ylabel="visits of the busiest expert over the mean",
    title="Below twice the mean: all seeds with α = 0.1 or a bias, "
    "six of eight with 0.01, three with nothing",
)

# %%
for way in ("sigmoid scores", *ways[1:]):
    print(f"{way:15}", *(f"{times:.1f}" for times in ends(way, "busiest")))

# %% [markdown]
# **It is the bias that helps, not the sigmoid.** With a bias of 0 ("sigmoid scores") the visits are as uneven as with softmax.
#
# **And α has to be tuned.** With 0.01, Switch Transformers' value, the busiest expert still has more than twice the mean in two seeds of eight after 300 steps; with nothing, in five. (Switch's runs are far longer.)
#   <!-- claim: [sum(x > 2 for x in rigs.expert_parallel.ends(way, "busiest")) for way in ("α = 0.01", "nothing")] == [2, 5] -->

# %% [markdown]
# ### Further: what does dropping cost?
#
# *Dropping* sets a limit. From a rank with T tokens an expert has room for c times the mean, that is ⌈c·T·k/E⌉ visits; c is the *capacity factor*. Visits that come later are dropped. A token that loses all its visits goes on with the residual stream alone.
#
# > With c = 1.25 and nothing for balance, what percentage of all visits is dropped?

# %%
predict("dropping/visits", percent=5)

# %%
lost = sum(ends("dropping", "dropped")) / 8
reveal("dropping/visits", percent=round(100 * lost))

# %% [markdown]
# What does that cost? Each row says by how many nats the loss is higher than in the same seed's run with nothing dropped and nothing for balance (± standard error over eight seeds). The last row is a control that must show harm: an expert has room for one visit, where the mean is 64.

# %%
for way in ("α = 0.1", "a bias", "dropping, α = 0.1", "dropping", "room for nothing"):
    dropped, (more, error) = ends(way, "dropped"), rigs.expert_parallel.worse(way)
    pairs = zip(ends(way, "loss"), ends("nothing", "loss"), strict=True)
    higher = sum(with_it > without for with_it, without in pairs)
    print(f"{way:18} dropped {sum(dropped) / 8:4.0%}", end="")
    print(f"   loss {more:+.2f} ± {error:.2f}, higher in {higher} of 8")

# %% [markdown]
# **Great harm would show.** The control drops nearly all visits and loses a third of a nat: that is what experts are worth here.
#
# **The harm of dropping 29 %, with nothing for balance, may be chance.** The loss is higher by 0.06 ± 0.05, in six seeds of eight. But 0.16, about half of what experts are worth, is only two standard errors away. With a balance loss there is next to nothing to drop.
#
# **What balance surely buys is time.** With twice the visits on one *rank* a layer's experts take nearly twice as long (below).
#
# How much is dropped at c = 1? Even if each token draws its two experts by lot, some get more than the mean. This is the share of visits dropped, where the mean is 64 visits, and 4,096:

# %%
draw = torch.Generator().manual_seed(0)
for mean in (64, 4096):
    pairs = torch.rand(200, 4 * mean, 8, generator=draw).topk(2).indices
    counts = torch.stack([each.flatten().bincount(minlength=8) for each in pairs])
    for c in (1, 1.25):
        over = (counts - c * mean).clamp(min=0).sum() / counts.sum()
        print(f"{mean:5} visits, c = {c:4}: {over:6.2%} dropped")

# %% [markdown]
# **At c = 1, with two experts of eight, chance alone drops about 0.35/√mean of the visits.** The visits of an expert scatter with a standard deviation of √(3/4 · mean), or 0.87·√mean, since a token chooses it with a chance of 1/4. Dropped is what is above the mean: 0 for an expert below it, and on average 1/√(2π) = 0.4 standard deviations, or 0.35·√mean visits.
#
# So where a rank has few tokens, the extra quarter of room at c = 1.25 is for chance. Where it has many, it is for what the router has not learned. A busiest expert with 1.3 times the mean alone drops (1.3 − 1)/8 = 3.8 % of all visits at c = 1, and (1.3 − 1.25)/8 = 0.6 % at 1.25.
#   <!-- arithmetic: [round(100 * (1.3 - c) / 8, 1) for c in (1, 1.25)] == [3.8, 0.6] -->

# %% [markdown]
# ### Further: what holds a router's logits?
#
# **No loss so far keeps a router's logits from drifting.** A softmax stays the same if one number is added to all logits of a token, so neither the model's loss nor a balance loss sees it. But a drift costs precision in bf16 (lab 01): around 100, neighboring numbers are 0.5 apart.
#
# The *z-loss* of ST-MoE holds the logits z of a token t by pulling the sum of their exponentials to 1, so its logarithm ℓ to 0. The cell checks the gradient, in which p, the softmax of z, is the derivative of ℓ:
#
# $$ L_z \;=\; \frac1T\sum_t \ell_t^2, \qquad \ell_t = \log\sum_e e^{z_{te}}, \qquad \frac{\partial L_z}{\partial z_{te}} \;=\; \frac{2}{T}\,\ell_t\,p_{te}. $$

# %%
cross_entropy = torch.nn.functional.cross_entropy
made = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).double()
made, wanted = made.requires_grad_(), made.detach().softmax(-1)
of_tokens = made.logsumexp(-1)
(slope,) = torch.autograd.grad(of_tokens.square().mean(), made)
torch.allclose(slope, 2 / 64 * of_tokens.detach()[:, None] * wanted)

# %% [markdown]
# First without a model: all logits begin at 100 and learn given probabilities, without z-loss (the control), with 0.001 times the z-loss, and with 0.01 times:


# %%
def learned(share, steps=1000):
    z = torch.full_like(wanted, 100).requires_grad_()
    for _ in range(steps):
        loss = cross_entropy(z, wanted) + share * z.logsumexp(-1).square().mean()
        (slope,) = torch.autograd.grad(loss, z)
        z = (z - 200 * slope).detach().requires_grad_()
    return z.detach()


for share in (0, 0.001, 0.01):
    z = learned(share)
    exact, rough = (x.softmax(-1) - wanted for x in (z, z.bfloat16().double()))
    print(f"{share:5}: log of the sum {z.logsumexp(-1).mean():5.1f}", end="")
    print(f", probabilities off by {exact.abs().max():.3f}", end="")
    print(f", with logits in bf16 by {rough.abs().max():.3f}")

# %% [markdown]
# **Without z-loss nothing brings the logits back.** In exact numbers that does no harm, but in bf16 such logits make a probability wrong by up to 7 percentage points. (Routers often run in fp32 for this reason.)
#
# **With enough z-loss, 0.01, both are right,** exact and rounded. In the middle row the logits are still on their way. Meanwhile the pull bends the probabilities: it is stronger on likely experts.
#
# **Does a trained router drift as far as 100?** Here is the router above after 200 steps, a mean of three seeds, with the model's loss over the last 50 steps:


# %%
def after(share, seed):
    """A trained router: mean log of the sum, largest logit, bf16's error, loss."""
    run = one.run(learn, seed, z_loss=share, steps=200)[0]
    z, loss = run.logits, run.losses[-50:].mean()
    error = (z.softmax(-1) - z.bfloat16().double().softmax(-1)).abs().max()
    return z.logsumexp(-1).mean(), z.abs().max(), error, loss


for share in (0, 0.001, 0.01):
    of_seeds = zip(*(after(share, seed) for seed in range(3)), strict=True)
    of_sum, largest, off, loss = (sum(each) / 3 for each in of_seeds)
    print(f"{share:5}: log of the sum {of_sum:.1f}, largest {largest:.1f}, ", end="")
    print(f"probabilities off by {off:.3f}, loss {loss:.1f}")

# %% [markdown]
# **Not in 200 steps.** The log of the sum begins at log 8 = 2.1 and drifts up to 2.5; a z-loss brings it down.
#
# **And nothing was wrong yet.** Bf16 costs 0.2 percentage points at most, with and without z-loss, and the loss is no better with it. So a z-loss insures against a drift over many more steps, which these runs cannot show.
#
# (With 0.01 the largest logit by size is even larger, 5.4: a z-loss holds the sum, not the distances between logits.)

# %% [markdown]
# ## Further: when does the all-to-all dominate?
#
# > An H100 computes products in bf16 at 601 TFLOP/s, 61 % of the peak, and sends 40 GB/s between nodes, 80 % of 400 Gbit/s (lab 09). An expert is three matrices of h × f (SwiGLU). From which width f on does an expert compute as long as its rows travel one way?

# %%
predict("all-to-all/width", columns=1000)

# %% [markdown]
# A visit takes 6·h·f FLOPs. Its row travels twice, there and back, each time with 2·h bytes in bf16. With V visits per rank, F FLOP/s and a link of bw bytes/s:
#
# $$ \frac{t_\text{experts}}{t_\text{one way}} \;=\; \frac{6hf\,V/F}{2h\,V/\mathrm{bw}} \;=\; \frac{3\,f\cdot \mathrm{bw}}{F} \;\ge\; 1 \quad\Longleftrightarrow\quad f \;\ge\; \frac{F}{3\,\mathrm{bw}}. $$
#
# **What counts is how *wide* an expert is,** against F/bw, the FLOPs that the device does while one byte travels. The model's width h, the tokens, k and E all cancel. ((N_e − 1)/N_e, the share of rows that leave their rank, is taken as 1.)
#
# To compute as long as all four trips of a step take, an expert needs 4/3 of this width: backward it computes twice as much as forward, so three parts of computing stand against four trips.

# %%
h100 = Hardware.named("H100")
flops, NVLINK, NODES = h100.rate(), h100.inside, h100.network
even = {link: flops / (3 * link.bandwidth) for link in (NVLINK, NODES)}
reveal("all-to-all/width", columns=round(even[NODES]))

# %%
print(f"NVLink: {even[NVLINK]:.0f}; Mixtral's experts: 14336, DeepSeek-V3's: 2048")


# %% [markdown]
# Mixtral's experts are wide enough for both links, DeepSeek-V3's for NVLink alone. Between nodes each all-to-all of V3's forward pass would take 2.4 times as long as its experts.
#   <!-- claim: (lambda h: round(h.rate() / (3 * h.network.bandwidth) / 2048, 1))(config.Hardware.named("H100")) == 2.4 -->
#
# **How could DeepSeek-V3 train across nodes all the same?** Its report (section 3.2.1) states a ratio of computing to communicating of about 1 : 1. In the first line only experts compute, and each row goes to 8 experts and back in bf16. Each further line changes one thing more:

# %%
v3 = replace(ModelConfig.named("deepseek-v3"), seq_len=4096)
each = {n: x / 58 for n, x in anatomy.token_flops(v3).items() if "sparse" in n}
experts = sum(x for n, x in each.items() if "experts" in n)
scores = sum(x for n, x in each.items() if n.endswith(("attention", "weighted"))) / 2
products = sum(each.values()) - 2 * scores  # all matrices; half of the scores is masked
row, bw, scoring = v3.d_model, NODES.bandwidth, scores / h100.rate("attention")
steps = {
    "experts, 8 rows there and back": (experts / flops, 8 * 4 * row),
    "a row to each of 4 nodes at most": (experts / flops, 4 * 4 * row),
    "there in 8 bits, back in 16": (experts / flops, 4 * 3 * row),
    "the whole layer computes": (products / flops + scoring, 4 * 3 * row),
    "products in 8 bits, twice as fast": (products / 2 / flops + scoring, 4 * 3 * row),
    "forward and backward": (3 * products / 2 / flops + 3.5 * scoring, 2 * 4 * 3 * row),
}
for what, (seconds, nbytes) in steps.items():
    print(f"{what:34} {seconds / (nbytes / bw):.2f} : 1")

# %% [markdown]
# **With all changes the ratio is 0.96 : 1, near the published one.** The last line is of a whole step, the others of a forward pass alone; they end at 0.61 : 1. The backward pass lifts the ratio: products take twice as long as forward and attention's scores 2.5 times (lab 06), while as many bytes travel.
#
# **The agreement proves no single change.** The fourth line has neither 8-bit products nor a backward pass, and comes about as near to 1 : 1. And the last two lines assume that products in 8 bits reach the same share of their peak as products in bf16.
#
# At 1 : 1 half of such a layer's time goes into waiting, unless something else is computed meanwhile. That is what DualPipe is for (lab 13b).

# %% [markdown]
# How much travel can hide behind computing? Take the forward pass of the experts of one layer of Mixtral, on eight H100s with one expert and 4,096 tokens each. (Attention is left out.) "In halves" sends one half of the tokens while the other is computed:


# %%
def layer(link, f=14336, counts=None, chunks=1):
    counts = counts or [[1024] * 8] * 8
    shape = replace(full, num_layers=1, d_ff=f)
    how = dict(flops=flops, link=link, chunks=chunks)
    return expert_parallel.routed_timeline(shape, counts, **how)


def two(timeline):
    """Two of the eight ranks: all eight look alike, or like one of these."""
    return Timeline(tuple(span for span in timeline.spans if span.rank < 2))


plots.overlap(
    NVLink=two(layer(NVLINK)),
    between_nodes=two(layer(NODES)),
    between_nodes_in_halves=two(layer(NODES, chunks=2)),
    narrow_experts_between_nodes_in_halves=two(layer(NODES, f=2048, chunks=2)),
    per="layer",
    title="In halves, wide experts hide half of what travels, narrow ones a fifth",
)

# %% [markdown]
# **Some travel stays exposed.** In halves, the first dispatch and the last combine have nothing to hide behind. And rows travel twice: to hide both trips an expert must be 2·F/(3·bw) wide, 10,020 between nodes. A narrower one leaves part of the travel exposed, however finely you cut.
#
# > Now one expert of eight gets twice the mean, and the others share the rest. How many times as long does this pass take on NVLink?

# %%
predict("imbalance/times", times=1.1)

# %%
skewed = [[2048, *[877] * 6, 882]] * 8
reveal(
    "imbalance/times",
    times=round(layer(NVLINK, counts=skewed).makespan / layer(NVLINK).makespan, 2),
)

# %%
plots.overlap(
    balanced=two(layer(NVLINK)),
    one_expert_with_twice_the_mean=two(layer(NVLINK, counts=skewed)),
    per="layer",
    title="One expert with twice the visits: seven ranks of eight wait for it",
)

# %% [markdown]
# The total work does not grow, but the busy expert's rank computes twice as much, and all others wait for it.
#
# With eight experts on each rank, one expert is only an eighth of a rank's usual work:

# %%
many = replace(full, num_layers=1, num_experts=64)
shares = [[128] * 64, [256, *[126] * 62, 124]]
how, timed = dict(flops=flops, link=NVLINK), expert_parallel.routed_timeline
alike, busy = (timed(many, [share] * 8, **how).makespan for share in shares)
print(f"{busy / alike:.2f} times as long")

# %% [markdown]
# **What counts is the busiest *rank*,** and several experts on one rank even out. In the first picture expert 4 has 3.4 times an expert's mean. But its rank, with experts 4 and 5, has only twice a rank's.
#
# That rank also keeps twice the rows for its backward pass, so it runs out of memory first. In the pass with one expert per rank, the busy one has 8,192 rows more. One of Mixtral's experts keeps h + 4f numbers per row, 123 kB in bf16: 1.0 GB more per layer.
#   <!-- claim: (lambda m: [2 * (m.d_model + 4 * m.d_ff), round(8192 * 2 * (m.d_model + 4 * m.d_ff) / 1e9, 1)])(config.ModelConfig.named("mixtral-8x7b")) == [122880, 1.0] -->

# %% [markdown]
# ### Turn the knobs
#
# At which width do two halves hide half of what travels between nodes? Then give one expert three times its share: how much longer does it take?


# %%
def knobs(expert_width=2048, GBps=40, chunks=2, busiest=1.0):
    most = round(1024 * busiest)
    counts = [[most, *[(8192 - most) // 7] * 7]] * 8
    timeline = layer(Link(5e-6, GBps * 1e9), expert_width, counts, chunks)
    return plots.overlap(per="layer", forward=two(timeline))


explore(
    knobs,
    states=48,
    expert_width=[1024, 2048, 4096, 14336],
    GBps=[40, 360],
    chunks=[1, 2, 4],
    busiest=[1.0, 3.0],
)

# %% [markdown]
# Two halves hide 43 % at 4,096 and 49 % at 14,336. Half is their limit, reached where an expert computes as long as its rows travel one way; latency takes the last percent. With three times the share the pass takes 2.8 to 3.0 times as long between nodes, and 2.3 to 3.0 times at 360 GB/s.
#   <!-- claim: (lambda play: [[round(100 * (1 - play(40, f, 2, 1).exposed / play(40, f, 1, 1).exposed)) for f in (4096, 14336)], *([round(pick(play(bw, f, c, 3).makespan / play(bw, f, c, 1).makespan for f in (1024, 2048, 4096, 14336) for c in (1, 2, 4)), 1) for pick in (min, max)] for bw in (40, 360))])(lambda bw, f, c, times: expert_parallel.routed_timeline(__import__("dataclasses").replace(config.ModelConfig.named("mixtral-8x7b"), num_layers=1, d_ff=f), [[1024 * times, *[(8192 - 1024 * times) // 7] * 7]] * 8, flops=config.Hardware.named("H100").rate(), link=config.Link(5e-6, bw * 1e9), chunks=c)) == [[43, 49], [2.8, 3.0], [2.3, 3.0]] -->

# %% [markdown]
# ## Further: which gradients does this step get wrong?
#
# ### Exercise 12.3 · Bug hunt: the loss was right (10 min, ●●○)
#
# `reduced_step` is a training step with a balance loss, on four ranks in blocks of two. Its test finds the right loss. Yet two things are wrong. Repair them.


# %%
def reduced_step(model, tokens, dp, edp, alpha):
    loss = model.loss(tokens, tokens)
    for block in model.blocks:
        routing = block.feed_forward.routing
        share = routing.load / routing.load.sum()
        mean = torch.tensor(routing.probabilities.mean(0).tolist(), dtype=loss.dtype)
        loss = loss + alpha * len(share) * (share * mean).sum()
    loss.backward()
    for parameter in model.parameters():
        dp.all_reduce(parameter.grad, out=parameter.grad)
        parameter.grad /= dp.size
    return loss


# %%
def its_test(rank):
    net = GPT(config, generator=torch.Generator().manual_seed(0)).double()
    expert_parallel.spread_experts(net, rank.comm("ep"))
    mine = data.chunk(4)[rank.rank]
    loss = reduced_step(net, mine, rank.comm("dp"), rank.comm("edp"), alpha=0.1)
    right = net.loss(mine, mine) + 0.1 * expert_parallel.auxiliary_loss(net)
    return torch.allclose(loss, right)


World(mesh).run(its_test)

# %%
check("expert_parallel/bug-hunt", reduced_step)

# %%
hint("expert_parallel/bug-hunt", 1)

# %% [markdown]
# ## In practice
#
# | | Megatron-LM |
# |---|---|
# | experts over ranks | `--expert-model-parallel-size 8` |
# | all-to-all | `--moe-token-dispatcher-type alltoall`; default `allgather`; `flex` for DeepEP |
# | score | `--moe-router-score-function sigmoid`; default `softmax` |
# | balance loss | `--moe-router-load-balancing-type aux_loss` is the default, but `--moe-aux-loss-coeff` is 0 until you set it: 1e-2 |
# | z-loss | `--moe-z-loss-coeff`; none by default, 1e-3 is advised |
# | bias | `--moe-router-enable-expert-bias`, `--moe-router-bias-update-rate 1e-3` |
# | dropping | `--moe-expert-capacity-factor 1.0`; none by default |
# | shared expert | `--moe-shared-expert-intermediate-size`, `--moe-shared-expert-overlap` |
# | one grouped product, no loop | `--moe-grouped-gemm` |
#
# Megatron-LM counts capacity per rank, as here. It advises to keep the ranks of EP and TP inside one NVLink domain. It warns that a run from scratch may run out of memory in the first 100 to 300 steps, when routing is most uneven. Its shared experts are replicated over the ranks of EP, and can compute while tokens travel.
#
# torchtitan 0.2.2 has `parallelism.expert_parallel_degree`. As here, expert parallelism takes no ranks of its own: it cuts those of FSDP and context parallelism into blocks (of tensor parallelism, too, where `parallelism.expert_tensor_parallel_degree` is 1).
#
# DeepSeek-V3 sends a token to at most four nodes. A row crosses to a node once and spreads there over NVLink, which is 3.2 times as fast (160 against 50 GB/s: its cards are H800s).

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **A balance loss without a gradient** (NeMo Automodel, issue 1408, repaired in pull request 1412): the return value of the function that attaches it was thrown away, so it never reached the router. <!-- erratum: CODE-02 -->
#
# **A balance loss for each micro-batch** (NeMo Automodel, repaired in pull request 3359): the loss was divided by the number of micro-batches M, but the balance loss was not. So α counted M times (lab 05). <!-- erratum: CODE-03 -->
#
# ### True under a condition
#
# **8x7B** in a model's name. Only feed-forward layers are there eight times: it has 46.7 billion parameters, not 56. <!-- erratum: EP-01 -->
#   <!-- claim: round(config.ModelConfig.named("mixtral-8x7b").num_params / 1e9, 1) == 46.7 -->

# %% [markdown]
# ## Summary
#
# > - Of Mixtral's 46.7 billion parameters a token meets 12.9 billion.
# >   <!-- claim: [round((m.num_params - m.parameters["feed-forward"] * 6 // 8) / 1e9, 1) for m in [config.ModelConfig.named("mixtral-8x7b")]] == [12.9] -->
# > - A layer takes five all-to-alls per micro-batch: counts, dispatch, combine, and two backward. Each of the four with rows sends (N_e − 1)/N_e · k·b·s·h numbers per rank if routing is even.
# > - Gradients of experts are averaged over N_d/N_e ranks, all others over N_d. (Here `combine` has divided those of experts by N_e before; Megatron-LM divides their sum by N_d at once.)
# >   <!-- claim: [len(config.Mesh(dp=64, ep=8).group(43, axis)) for axis in ("edp", "dp")] == [8, 64] -->
# > - Experts grow unevenly busy where words are unevenly frequent, all rows share a part that says so, and nothing in the loss asks for balance. Here the busiest has 2.4 times the mean; 1.5 with equally frequent words, 1.3 without the shared part, 1.3 with a balance loss of α = 0.1.
# >   <!-- claim: claims.busiest_experts() == (2.4, 1.5, 1.3, 1.3) -->
# > - Expert parallelism divides experts by N_e, and nothing else: Mixtral in bf16 with fp32 masters holds 116 GB per rank in blocks of 8, on 8 ranks and on 64, without ZeRO.
# >   <!-- claim: [round(predict.states(config.ModelConfig.named("mixtral-8x7b"), config.TrainConfig(micro_batch=1, global_batch=n), config.Mesh(dp=n, ep=8)).total / 1e9) for n in (8, 64)] == [116, 116] -->
# > - Choosing has no gradient. The router learns through the weights, and from a balance loss through the mean probabilities P.
# > - Forward, experts compute as long as their rows travel one way if they are F/(3·bw) wide, with F FLOP/s: 557 on an H100's NVLink, 5,010 between nodes. Over a step, with all four trips, it takes 4/3 of that.
# >   <!-- claim: (lambda h: [round(h.rate() / (3 * link.bandwidth)) for link in (h.inside, h.network)])(config.Hardware.named("H100")) == [557, 5010] -->
# > - Experts are as slow as the busiest rank: with twice the visits on one rank they take nearly twice the time (attention left out). Where a rank has eight experts and one of them gets twice the visits, they take a tenth more.
#
# Next: [lab 13a](13a_pipelines.ipynb) cuts the model between its layers.

# %% [markdown]
# ## References
#
# - D. Lepikhin et al., *GShard: scaling giant models with conditional computation and automatic sharding*, arXiv:2006.16668 (2020): dispatch, combine, capacity, balance loss (algorithm 1).
# - W. Fedus, B. Zoph, N. Shazeer, *Switch Transformers*, arXiv:2101.03961 (2021): k = 1, capacity factor, balance loss.
# - B. Zoph et al., *ST-MoE: designing stable and transferable sparse expert models*, arXiv:2202.08906 (2022): the z-loss.
# - A. Q. Jiang et al., *Mixtral of experts*, arXiv:2401.04088 (2024).
# - D. Dai et al., *DeepSeekMoE*, arXiv:2401.06066 (2024): shared experts, many narrow ones.
# - DeepSeek-AI, *DeepSeek-V3 technical report*, arXiv:2412.19437 (2024): sigmoid scores, the bias, at most four nodes (section 3.2.2).
# - L. Wang et al., *Auxiliary-loss-free load balancing strategy for mixture-of-experts*, arXiv:2408.15664 (2024).
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): expert parallelism.
# - Megatron-LM, `megatron/core/transformer/moe/README.md`, 2025; torchtitan 0.2.2, `torchtitan/config/job_config.py`.
