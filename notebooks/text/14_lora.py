# %% [markdown]
# # 14 · Fine-tune beside the weights
#
# **A model of 6.7 billion weights takes 108 GB to fine-tune, 16 bytes for each. What do you save, and what do you lose, if you freeze them all and train two thin matrices beside each?**
#
# *90 min, and 25 further · before this: labs 03, 04 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - train a low-rank update beside a frozen layer, from a start that changes nothing (exercise 14.1),
# - know how many numbers LoRA trains, and which bytes it saves and which it does not (exercise 14.2),
# - merge an adapter so that it costs nothing, once, and can be taken out again (exercise 14.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import copy
import time
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import nn

from labutils import (
    checkpointing,
    collectives,
    data_parallel,
    lora,
    measure,
    memory,
    units,
)
from labutils import predict as formulas
from labutils.config import DATA, Hardware, Mesh, ModelConfig, TrainConfig
from labutils.flash.fused import product_flops
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# A linear layer computes y = W·x. **LoRA**, *low-rank adaptation*, freezes W and adds a product of two thin matrices, which alone are trained:
#
# $$ y \;=\; W x \;+\; \frac{\alpha}{r}\,B A\,x, \qquad W[d, k],\quad B[d, r],\quad A[r, k]. $$
#
# Here r, the *LoRA rank*, is a small number, and α a constant that you choose. A query matrix of a 7B model and its adapter, drawn to scale:

# %%
plots.low_rank(4096, 4096, 16)

# %% [markdown]
# A and B together are an **adapter**. LoRA is **W as it was, an update of rank r beside it, and only the update is trained.**

# %% [markdown]
# ## What does the first step change?
#
# A is drawn at random and B is zero: B·A·x is zero, and fine-tuning begins at the *pre-trained function*.

# %%
torch.manual_seed(0)
layer = lora.wrap(nn.Linear(64, 48), rank=4, alpha=8)
x, adapter = torch.randn(10, 64), layer.adapters["default"]
torch.equal(layer(x), layer.base(x))

# %% [markdown]
# > In the first backward pass, which of A and B has a gradient that is not zero: A, B, or both?

# %%
predict("first/gradient", of="both")

# %%
layer(x).square().mean().backward()
sizes = {name: p.grad.norm().item() for name, p in adapter.named_parameters()}
print({name: round(size, 3) for name, size in sizes.items()})
said = "only B", "B only", "B alone", "matrix B", "LoRA's B"
moves = " and ".join(name for name in sizes if sizes[name])
reveal("first/gradient", *said, of=moves)

# %% [markdown]
# With G the gradient of the output y,
#
# $$ \nabla_A = \tfrac{\alpha}{r}\,B^\top G\,x^\top, \qquad \nabla_B = \tfrac{\alpha}{r}\,G\,(A x)^\top . $$
#
# The gradient of A is zero as long as B is, and the other way round. What if *both* begin at zero? Try it:

# %%
zeros = lora.wrap(nn.Linear(64, 48), rank=4, alpha=8)
nn.init.zeros_(zeros.adapters["default"].A)
optimizer = torch.optim.AdamW(zeros.adapters.parameters(), lr=0.1)
for _ in range(100):
    zeros(x).square().mean().backward()
    optimizer.step()
sum(p.abs().sum().item() for p in zeros.adapters.parameters())

# %% [markdown]
# After a hundred steps both are what they were.
#
# ### Exercise 14.1 · Give a layer an adapter (12 min, ●●○)
#
# Mind the factor α/r, what is frozen, and that B·A as a matrix would be as large as W.


# %%
class Adapted(nn.Module):
    """A frozen linear layer with an adapter: W·x + bias + (α/r)·B·A·x."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float):
        super().__init__()
        raise NotImplementedError

    def forward(self, x):
        raise NotImplementedError


# %%
check("lora/adapter", Adapted)

# %%
hint("lora/adapter", 1)

# %%
show(lora.Adapter)

# %% [markdown]
# ## How many numbers are trained, and which bytes does that save?
#
# An adapter of W[d, k] has r·(d + k) numbers. `lora.trainable` adds them up over the layers that a pattern names, from the table of the model's parts (`anatomy`).
#
# The paper adapts the query and value matrices of GPT-3, 96 layers of width 12,288.
#
# > With r = 1, how many million numbers are trained, of 175 billion?

# %%
predict("gpt3/trained", M=175)

# %%
gpt3 = ModelConfig.named("gpt3-175b")
trained = lora.trainable(gpt3, rank=1, pattern=("query", "value"))
reveal("gpt3/trained", M=round(trained / 1e6, 2))

# %% [markdown]
# ### Exercise 14.2 · Count what is trained and held (8 min, ●○○)
#
# Adapters are kept in fp32 whatever the frozen layers are, and AdamW steps them.


# %%
def fine_tuned(linears: list, rank: int, itemsize: int) -> tuple[int, int]:
    """How many numbers LoRA trains beside these `nn.Linear` layers, and how many
    bytes weights, gradients and optimizer state take together.

    Frozen numbers, biases too, take `itemsize` bytes; adapters, gradients, moments
    are fp32. AdamW's counters of steps do not count.
    """
    raise NotImplementedError


# %%
check("lora/held", fine_tuned)

# %%
hint("lora/held", 1)

# %% [markdown]
# Now a whole model: by a formula, by a dry run (the program on fake tensors), and by the program. This GPT of 100,000 weights learns to add below; `rigs.lora.sums(8)` are its tokens and targets in base 8.

# %%
tokens, targets = (side[:32].clone() for side in rigs.lora.sums(8))


def stepper(
    config=rigs.lora.ADDER, r=4, rows=32, bf16=False, nf4=False, recompute=False
):
    """A GPT, its optimizer, and a step of fine-tuning; with r = 0 of all of it."""
    model = GPT(config, attention="sdpa")
    model = model.bfloat16() if bf16 else model
    model = lora.quantize_base(model.bfloat16()) if nf4 else model
    model = checkpointing.apply(model, "full") if recompute else model
    model = lora.adapt(model, rank=r, alpha=32) if r else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    x, y = (torch.zeros(rows, config.seq_len, dtype=torch.long) for _ in "xy")

    def step():
        optimizer.zero_grad()
        model.loss(x, y).backward()
        optimizer.step()

    step()
    return model, optimizer, step


# %%
def held(_, **options):  # World.run hands in the rank, which is not needed here
    return measure.model_states(*stepper(**options)[:2])


# %%
formula = formulas.states(rigs.lora.ADDER, rigs.lora.fine_tuning(rank=4, frozen="fp32"))
dry = World(Mesh(), engine="dry").run(held)
formula.diff(dry)

# %%
dry.diff(held(None))

# %% [markdown]
# The formula and the dry run for Llama-2-7B (the buffers are RoPE's tables):

# %%
llama = ModelConfig.named("llama-2-7b")
dry = World(Mesh(), engine="dry").run(held, config=llama, r=16, rows=1)
formulas.states(llama, rigs.lora.fine_tuning(rank=16, frozen="fp32")).diff(dry)

# %% [markdown]
# Usually the frozen weights are in bf16. Full fine-tuning takes 16 bytes for each weight (lab 02).
#
# > Llama-2-7B takes 107.8 GB for full fine-tuning. How many GB with LoRA at r = 16, activations left out?

# %%
predict("7b/lora", GB=54)

# %%
states = formulas.states(llama, rigs.lora.fine_tuning(rank=16))
print(f"trained: {lora.trainable(llama, rank=16) / llama.num_params:.2%}")
reveal("7b/lora", GB=round(states.total / 1e9, 1))

# %% [markdown]
# What is left is frozen weights.
#
# **QLoRA** makes the frozen weights small too. *NF4*, 4-bit NormalFloat, has sixteen values, quantiles of a normal distribution; each block of 64 weights has a scale, and scales are quantized once more in blocks of 256 (*double quantization*): 4 + 8/64 + 32/(64·256) = 4.127 bits per weight. Embedding and head stay in bf16. For each product a layer makes its weight whole again, and forgets it (lab 15 builds it). The small GPT over NF4, formula and program, and then Llama-2-7B by the formula:

# %%
formula = formulas.states(rigs.lora.ADDER, rigs.lora.fine_tuning(rank=4, frozen="nf4"))
formula.diff(held(None, nf4=True))

# %%
bars = {
    f"LoRA over {name}": formulas.states(llama, rigs.lora.fine_tuning(16, name))
    for name in ("bf16", "nf4")
}
full = formulas.states(llama, TrainConfig(micro_batch=1, global_batch=1))
title = "Without activations, LoRA would fit 24 GB"
card = Hardware.named("RTX-4090")
plots.memory_bars(full_fine_tuning=full, **bars, capacity=card, title=title)

# %% [markdown]
# ## Does LoRA shrink the activations, too?
#
# The small GPT again, 32 sums of 8 tokens. LoRA at r = 4 trains 9,216 numbers, and 100,672 are frozen.
#
# > Full fine-tuning keeps 2.59 MB of activations for the backward pass. How many MB does LoRA keep?

# %%
predict("activations/lora", MB=0.3)


# %%
def saved(r):
    model, *_ = stepper(r=r)
    return measure.saved_activations(lambda: model.loss(tokens, targets), model)


kept = {"full": saved(0), "LoRA": saved(4)}
print({name: units.text(ledger.total) for name, ledger in kept.items()})
reveal("activations/lora", MB=round(kept["LoRA"].total / 1e6, 2))

# %% [markdown]
# A's gradient needs x, its layer's input, as W's did. And attention and GELU keep what they kept: gradients pass through them on their way to the first adapter. Gone is what only the gradients of frozen weights need: the input of the head, and one of the two tensors that each norm keeps. Tensor by tensor:

# %%
of_a_step = rigs.lora.fine_tuning(rank=4, frozen="fp32", batch=32)
formula = memory.activations(rigs.lora.ADDER, of_a_step)
formula.diff(kept["LoRA"]).unexplained

# %% [markdown]
# With adapters on queries and values alone, the paper's choice, the layers without an adapter need no input, `down`'s, the widest, among them:

# %%
model = GPT(rigs.lora.ADDER, attention="sdpa")
lora.adapt(model, rank=4, alpha=32, pattern=("query", "value"))
few = measure.saved_activations(lambda: model.loss(tokens, targets), model).total
less = 1 - few / kept["full"].total
print(f"{units.text(few)}, {less:.0%} less than full fine-tuning")

# %% [markdown]
# The memory of one step: full fine-tuning, then an adapter on every layer.


# %%
def over(_, **options):
    model, optimizer, step = stepper(**options)
    return measure.history(step, model, optimizer)


plots.memory_timeline(over(None, r=0))

# %%
plots.memory_timeline(over(None))

# %% [markdown]
# With a vocabulary of 12 the step is fullest in the midst of the backward pass. With a vocabulary of 32,000 it is fullest where that pass begins: all activations are there, and beside the logits, b·s·v, two temporaries of their size, which count as *buffers*. Two layers of Llama-2-7B:

# %%
two = replace(llama, num_layers=2)
dry = World(Mesh(), engine="dry").run(over, config=two, r=16, rows=1)
formula = rigs.lora.at_the_loss(two, rank=16, batch=1, frozen="fp32")
formula.diff(dry.peak.ledger, by="component")

# %% [markdown]
# So the card of 24 GB: Llama-2-7B at r = 16 with one sequence of its 4,096 tokens. By the same formula, states and activations where the step is fullest:
#
# > LoRA over NF4 has 4.5 GB of states. How many GB does the step take?

# %%
predict("7b/step", GB=6)

# %%
whole = {
    f"LoRA over {name}": rigs.lora.at_the_loss(llama, rank=16, frozen=name)
    for name in ("bf16", "nf4")
}
reveal("7b/step", GB=round(whole["LoRA over nf4"].total / 1e9, 1))

# %% [markdown]
# Rows of 1,024 tokens would fit (20.1 GB over bf16), and adapters on queries and values alone (23.1 GB over NF4, by a hair). Else you need checkpointing (lab 04): `checkpointing.apply(model, "full")`. Each layer adds the same bytes, so dry runs of two and three give those of all 32.
#   <!-- claim: (lambda m, step: [round(each.total / 1e9, 1) for each in (step(__import__("dataclasses").replace(m, seq_len=1024), rank=16), step(m, rank=16, pattern=("query", "value"), frozen="nf4"))])(config.ModelConfig.named("llama-2-7b"), rigs.lora.at_the_loss) == [20.1, 23.1] -->

# %%
for name in ("bf16", "nf4"):
    options = dict(r=16, rows=1, recompute=True) | {name: True}
    run = World(Mesh(), engine="dry").run
    peak = rigs.lora.peak_of_all_layers(llama, run, over, **options)
    whole[f"{name}, recomputed"] = peak
title = "Recomputation makes it fit 24 GB: most of a step is activations"
plots.memory_bars(**whole, capacity=card, title=title)

# %% [markdown]
# Now LoRA over bf16 takes 16.0 GB, over NF4 7.

# %% [markdown]
# ## Further: what does it cost in time?
#
# Per token a training step multiplies three times: for outputs, for gradients of inputs, for gradients of weights. W has no gradient now. But gradients of inputs must still flow back to the first adapter, and each adapter adds 2·r·(d + k) FLOPs to each of the three.
#
# > Of the FLOPs of full fine-tuning, how many percent does LoRA at r = 16 take on Llama-2-7B?

# %%
predict("7b/flops", percent=1)

# %%
passes = lora.training_flops(llama, rank=16)
share = sum(passes.values()) / llama.flops_per_token()
for name, flops in passes.items():
    print(f"{name:21}{flops / 1e9:6.2f} GFLOPs per token")
reveal("7b/flops", percent=round(100 * share))

# %% [markdown]
# What is saved is the gradients of W. They are less than a third of full fine-tuning, as attention's own products have no weights, and the adapters add a little. (A test counts every product that runs.) It is 28 % at 4,096 tokens in a row, and the less, the longer rows are: 32 % at 512, 20 % at 16,384. The recomputation that the card asked for runs all blocks forward once more, 15 GFLOPs per token, which is more than LoRA has saved. Full fine-tuning would have to recompute as well: where both do, LoRA takes 79 % of its FLOPs.
#   <!-- claim: (lambda m, p: (lambda again: round(100 * (sum(p.values()) + again) / (m.flops_per_token() + again)))(p["outputs"] - 2 * m.vocab_size * m.d_model))(config.ModelConfig.named("llama-2-7b"), lora.training_flops(config.ModelConfig.named("llama-2-7b"), rank=16)) == 79 -->
#   <!-- claim: [(lambda m: round(100 - 100 * sum(lora.training_flops(m, rank=16).values()) / m.flops_per_token()))(__import__("dataclasses").replace(config.ModelConfig.named("llama-2-7b"), seq_len=s)) for s in (512, 4096, 16384)] == [32, 28, 20] -->
#
# FLOPs are not yet time. This GPT, and one six times as wide with 128 tokens in a row:


# %%
def seconds(config, rows):
    """Of the fastest step on one core: full fine-tuning, and LoRA, by turns."""
    torch.set_num_threads(1)
    runs = [(stepper(config, r, rows)[2], []) for r in (0, 4)]
    for step, took in 1536 // config.d_model * runs:
        start = time.process_time()
        step()
        took.append(time.process_time() - start)
    return [min(took) for _, took in runs]


# %% tags=["nbval-ignore-output"]
wide = replace(rigs.lora.ADDER, d_model=384, d_ff=1536, seq_len=128)
falls_less = {}
print("LoRA's part of full fine-tuning, on this CPU:")
for config, rows in ((rigs.lora.ADDER, 32), (wide, 4)):
    work = sum(lora.training_flops(config, rank=4).values()) / config.flops_per_token()
    full, beside = seconds(config, rows)
    falls_less[config.d_model] = beside / full > work
    print(f"width {config.d_model:3}: {work:.0%} of FLOPs, {beside / full:.0%} of time")

# %%
print("width 64: time falls less than the FLOPs:", falls_less[64])

# %% [markdown]
# In the narrow model LoRA may even take longer; in the wide one time comes nearer to the FLOPs. On GPT-3 the paper has 43.1 tokens per second and GPU instead of 32.5 (section 4.2): 75 % of the time.

# %% [markdown]
# **On several devices** (lab 08) only what is trained has gradients to reduce. Four ranks, a quarter of the sums each: are gradients equal, and how many bytes are sent?


# %%
def replica(rank, r=4):
    draw = torch.Generator().manual_seed(0)
    model = GPT(rigs.lora.ADDER, attention="sdpa", generator=draw)
    lora.adapt(model, rank=r, alpha=32, generator=draw)
    if rank is None:
        model.loss(tokens, targets).backward()
        return model
    wrapped = data_parallel.replicate(model, rank.comm("dp"))
    mine, aims = (side[rank.rank :: rank.size] for side in (tokens, targets))
    logits = wrapped(mine).flatten(0, 1)
    nn.functional.cross_entropy(logits, aims.flatten()).backward()
    return model


# %%
def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


world = World(4)
alone, ranks = replica(None), world.run(replica)
off = max((gradients(each) - gradients(alone)).abs().max().item() for each in ranks)
print("gradients equal to those of one device:", off < 1e-6)

# %%
nbytes = 4 * lora.trainable(rigs.lora.ADDER, rank=4)
ring = collectives.sent("all_reduce_ring", nbytes=nbytes, n=4, itemsize=4)
print(f"{nbytes / (4 * rigs.lora.ADDER.num_params):.0%} of full fine-tuning's bytes")
ring.diff(world.ledger.only(name="all_reduce"), by="rank")

# %% [markdown]
# Both are in fp32 here. For Llama-2-7B at r = 16 a rank reduces 160 MB, 1.2 % of the 13.5 GB that full fine-tuning has in bf16: twice the share of the numbers, as adapters stay in fp32.
#   <!-- claim: (lambda m: (lambda nbytes: [round(nbytes / 1e6), round(2 * m.num_params / 1e9, 1), round(100 * nbytes / m.num_params / 2, 1)])(4 * lora.trainable(m, rank=16)))(config.ModelConfig.named("llama-2-7b")) == [160, 13.5, 1.2] -->

# %% [markdown]
# ## Does it learn, and what does it forget?
#
# This model adds in base 10: "60+44=" is continued by "401", the digits of 104, the least significant one first. It was trained on 9,488 sums, and 512 are held out. Now it must learn to add in base 8.

# %%
adder = GPT(rigs.lora.ADDER, attention="sdpa")
adder.load_state_dict(load_file(DATA / "adder.safetensors"))
adder.double()  # so that the scores below are those of every CPU
before = rigs.lora.score_sums(adder, 10)[1]
print(f"base 10: {before:.1%} of the held-out sums are right")

# %% [markdown]
# > Of the held-out sums in base 8, how many percent does it get right before any fine-tuning?

# %%
predict("zero-shot/right", percent=0)

# %%
reveal("zero-shot/right", percent=round(100 * rigs.lora.score_sums(adder, 8)[1], 1))

# %%
print(f"{rigs.lora.carry_free(8):.1%} of the sums in base 8 carry nothing")

# %% [markdown]
# Those that carry nothing read the same in both bases. The rest must be learned: 150 steps of 32 sums, two seeds, full fine-tuning and LoRA (r = 4, α = 32), each at its best learning rate of the sweep below.


# %%
def tune(seed, r):
    model, lr = copy.deepcopy(adder), 8e-4
    if r:
        draw, lr = torch.Generator().manual_seed(seed), 3.2e-3
        lora.adapt(model, rank=r, alpha=32, generator=draw)
    return rigs.lora.learn_sums(model, 8, steps=150, batch=32, lr=lr, seed=seed)


def right(models, base):
    return [rigs.lora.score_sums(model, base)[1] for model in models]


# %%
tuned = {r: [tune(seed, r) for seed in range(2)] for r in (0, 4)}
scores = {r: (right(models, 8), right(models, 10)) for r, models in tuned.items()}
print("a seed each: all weights, then LoRA with r = 4")
for scores_8, scores_10 in scores.values():
    print("base 8:", *(f"{score:.0%}" for score in scores_8))
    print("base 10:", *(f"{score:.0%}" for score in scores_10))

# %% [markdown]
# Both learn, and both forget. Full fine-tuning needs a second copy of the model to go back; here, take the adapter out:

# %%
for model in tuned[4]:
    lora.activate(model, None)
same = [torch.equal(model(tokens), adder(tokens)) for model in tuned[4]]
print("base 10:", right(tuned[4], 10), "the same bits:", same)

# %% [markdown]
# **Is the update of low rank?** That is what LoRA presumes. We have an update that nothing held to a low rank: that of full fine-tuning, W₈ − W₁₀ for each of the twelve matrices. Cut each to its r largest singular values, leave all else as it was trained, and let the model add in base 8.
#
# > Of 64 singular values in each matrix, how many does it take to get over 95 % of the sums right?

# %%
predict("update/rank", values=32)


# %%
def cut_to(r, tuned, rest=None):
    """A model with the update of each matrix cut to rank r, and its energy; all else
    is that of `rest`, or of the fine-tuned model."""
    model, kept = copy.deepcopy(rest or tuned), []
    after, old = dict(tuned.named_parameters()), dict(adder.named_parameters())
    for name, w in model.named_parameters():
        if name.startswith("blocks") and w.dim() == 2:
            before, update = old[name], (after[name] - old[name]).detach()
            U, S, V = torch.linalg.svd(update, full_matrices=False)
            w.data = before + U[:, :r] * S[:r] @ V[:r]
            kept.append((S[:r].square().sum() / S.square().sum()).item())
    return model, kept


# %%
cuts = {r: [cut_to(r, model)[0] for model in tuned[0]] for r in (0, 1, 2, 4, 8, 64)}
shares = {r: right(models, 8) for r, models in cuts.items()}
print("base 8 after two fine-tunings:")
for r, share in shares.items():
    print(f"rank {r:2}: {share[0]:.0%} and {share[1]:.0%} right")
energy = cut_to(4, tuned[0][0])[1]
print(f"4 of 64 values hold {min(energy):.0%} to {max(energy):.0%} of the squares")
alone = right([cut_to(64, model, adder)[0] for model in tuned[0]], 8)
print(f"rank 64, all else of base 10: {alone[0]:.0%} and {alone[1]:.0%} right")

# %%
enough = min(r for r, share in shares.items() if min(share) > 0.95)
reveal("update/rank", values=enough)

# %% [markdown]
# Cut to rank 4, full fine-tuning's own update still adds right: this task needs few directions, as LoRA presumes. (At twice the rate four leave 90 %; to base 9 two are enough.) But it is not LoRA's update: with embeddings, norms and head of base 10, which LoRA keeps, not even all 64 are enough.
#
# Several adapters may stand beside one frozen model. On disk each is A and B alone (`lora.state`).
#
# **Which learning rate, and which r?** Recorded beforehand, 60 steps, α = 32 and five seeds for each point, by `python tools/lora_sweep.py`. The band is the range of the seeds:

# %%
runs = rigs.lora.sweep("addition")
series = {f"r {r}": runs.losses(rank=r) for r in ("1", "4", "16")}
plots.curves(
    xlabel="learning rate", ylabel="held-out loss (nats per digit)", log="x",
    title="At α = 32 LoRA wants a larger rate than full fine-tuning",
    full=runs.losses(rank="full"), **series,
)  # fmt: skip

# %%
def table(runs):
    for r in ("full", "1", "4", "16"):
        lr, loss, error = runs.best(rank=r)
        times = lr / runs.best(rank="full")[0]
        print(f"{r:>4}: {loss:.3f} ± {error:.3f} at {lr:.1e}, {times:.0f} times")


table(runs)

# %% [markdown]
# A loss is a mean ± its standard error; rates are tried by factors of two. With this α, LoRA's best rate is four to eight times that of full fine-tuning. At 0.0032 every LoRA rank is within its error of its best: one rate serves all ranks.
#
# **What is α for?** The same at r = 4, with other values of α (three seeds, `python tools/lora_sweep.py alpha`):
#
# > With α = 128 in place of 32, how many times the rate of full fine-tuning is LoRA's best?

# %%
predict("alpha/times", times=8)

# %%
others, full_rate = rigs.lora.sweep("alpha"), runs.best(rank="full")[0]
alphas = {
    "4": (others, dict(rank="4", alpha="4")),
    "32": (runs, dict(rank="4")),
    "128": (others, dict(rank="4", alpha="128")),
    "512": (others, dict(rank="4", alpha="512")),
}
for alpha, (recorded, which) in alphas.items():
    lr, loss, error = recorded.best(**which)
    times = lr / full_rate
    print(f"α = {alpha:>3}: {loss:.3f} ± {error:.3f} at {lr:.1e}, {times:.0f} times")
reveal("alpha/times", times=round(others.best(rank="4", alpha="128")[0] / full_rate))

# %%
plots.curves(
    xlabel="learning rate", ylabel="held-out loss (nats per digit)", log="xy",
    title="A larger α wants a smaller rate",
    **{f"α = {a}": recorded.losses(**which) for a, (recorded, which) in alphas.items()},
)  # fmt: skip

# %% [markdown]
# With 128 times the α the best rate falls sixteenfold: a fourfold α about halves it. So "LoRA wants ten times the rate" is a sentence about its α, too. Set α once, such as 32, and sweep the rate (section 4.1).
#
# ### Further: which layers, and why is α divided by r?
#
# At this size r = 4 and r = 16 are not told apart. Do layers differ? Attention alone at r = 8, the feed-forward layers alone at r = 2:

# %%
for pattern in ("attention.*", "feed_forward.*"):
    lr, loss, error = runs.best(pattern=pattern)
    print(f"{pattern:15}{runs.trained(pattern):6,} trained: {loss:.3f} ± {error:.3f}")

# %% [markdown]
# Each is worse than adapters on all layers at r = 4, by about two standard errors. Between the two no order shows, though attention alone trains three times as many numbers.
#
# B·A is a sum of r products of a column and a row. Adam moves each number of B by about the rate, whatever r is. If all r products moved a weight the same way, together they would move it r times as far as one: that is what α/r takes away. In the first step they do not. The rows of A are drawn, and r of them move the weights √r times as far (tested). Which of the two do whole runs follow? Switch the division off: with α = 8r the factor before B·A is 8 for every r (the same record).

# %%
fixed = {"1": (others, {"alpha": "8"}), "4": (runs, {})}
fixed["16"] = (others, {"alpha": "128"})
for r, (recorded, which) in fixed.items():
    lr, loss, error = recorded.best(rank=r, **which)
    print(f"r {r:>2}: {loss:.3f} ± {error:.3f} at {lr:.1e}")

# %% [markdown]
# Now the best rate of r = 16 is an eighth of that of r = 1: between 1/√16 and 1/16. With α = 32 for both it is twice as large, one step of the sweep and within the errors. So the division spares a search for the rate. The loss at the best rate does not ask for it: r = 1 and r = 16 both end lower here than with α = 32, in each of the three seeds that both have, by 0.02 in the mean. And r = 16 with α = 128 ends at 0.083, where full fine-tuning ends. Two variants: *rsLoRA* divides by √r, not by r (not tried here); *LoRA+* gives B a larger rate than A.
#   <!-- claim: [(lambda lower: min(lower) > 0 and round(sum(lower) / 3, 2))(claims.lora_with_alpha_8r(rank)) for rank in ("1", "16")] == [0.02, 0.02] -->
#
# ### Further: on text
#
# A GPT that has read Python's reference is fine-tuned to its source code, 120 steps, three seeds (the same tool):

# %%
text = rigs.lora.sweep("text")
table(text)

# %% [markdown]
# Here LoRA *learns less*, with every seed, and the less, the smaller r is.
#
# > At half its best rate, full fine-tuning still learns more than r = 4 at its best, and forgets 0.14 nats of the reference. How many nats does r = 4 forget?

# %%
predict("text/forgets", nats=0.1)

# %%
series = {"full": text.traded(rank="full")}
series |= {f"r {r}": text.traded(rank=r) for r in ("1", "4", "16")}
small, beside = series["full"][0][-2], series["r 4"][0][-1]
print(f"full fine-tuning: {small:.2f} nats")
reveal("text/forgets", nats=round(beside, 2))

# %%
plots.curves(
    xlabel="forgotten: reference (nats per character)",
    ylabel="learned: source code (nats per character)",
    title="Here full fine-tuning learns more for as much forgotten",
    measured=series, **series,
)  # fmt: skip

# %% [markdown]
# From corner to corner the rate doubles; each curve ends at its best. *What shows:* at 0.0008, where full fine-tuning ends and LoRA begins, every LoRA rank learns less and forgets less. Each at its best rate, only r = 1 forgets less. *What does not show:* that LoRA forgets less for what it learns; the highest curve is that of full fine-tuning. This is one model of 100,000 weights, one α and 120 steps. On Llama-2-7B, Biderman et al. (2024, *LoRA learns less and forgets less*) find about the same trade for both, and *LoRA without regret* finds LoRA equal to full fine-tuning where the data set is small.

# %% [markdown]
# ## What does it cost after training?
#
# Beside W, the adapter's two products run for each token. Merged, W + (α/r)·B·A takes the place of W:

# %%
model = tuned[4][0]
lora.activate(model, "default")
logits, flops = model(tokens), {"beside": product_flops(lambda: model(tokens))}
with lora.merged(model):
    flops["merged"] = product_flops(lambda: model(tokens))
    close = torch.allclose(model(tokens), logits, atol=1e-3)
flops["plain"] = product_flops(lambda: adder(tokens))
print(flops, "the same logits:", close)

# %% [markdown]
# No FLOP is left of it.
#
# ### Further: and over NF4?
#
# There W + Δ has to be rounded to NF4 once more. Recorded, the loss in base 8 of adapters that have learned over NF4 (150 steps, r = 4; `python tools/lora_sweep.py merged`). The control rounds W alone again:

# %%
for row in rigs.lora.sweep("merged").rows:
    print(", ".join(f"{name} {value}" for name, value in row.items()))

# %% [markdown]
# Into bf16 the merge costs nothing that shows; into NF4 0.001 to 0.005 nats in each of three seeds, up to 44 % of so small a loss. The rounding of W alone is harmless, since W lies on NF4's grid already; W + Δ does not. QLoRA's adapters stay beside, or W is made whole first.
#
# ### Exercise 14.3 · Bug hunt: the layer that merges (12 min, ●●●)
#
# Its test passes. It should merge once at the most, come out again to the bit, and cost one product while merged. None of the three holds.


# %%
class Mergeable(nn.Module):
    def __init__(self, linear, rank, alpha):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.A = nn.Parameter(torch.randn(rank, linear.in_features))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale, self.merged = alpha / rank, False

    def forward(self, x):
        low = x @ self.A.T @ self.B.T
        return self.linear(x) + (0 if self.merged else self.scale) * low

    @torch.no_grad()
    def merge(self):
        self.linear.weight += self.scale * self.B @ self.A
        self.merged = True

    @torch.no_grad()
    def unmerge(self):
        self.linear.weight -= self.scale * self.B @ self.A
        self.merged = False


# %%
def its_test():
    layer, x = Mergeable(nn.Linear(8, 8), 2, 4), torch.ones(1, 8)
    nn.init.ones_(layer.B)
    before = layer(x)
    layer.merge()
    merged = layer(x)
    layer.unmerge()
    return all(torch.allclose(y, before, atol=1e-4) for y in (merged, layer(x)))


its_test()

# %%
check("lora/bug-hunt", Mergeable)

# %%
hint("lora/bug-hunt", 1)

# %% [markdown]
# In the library:

# %%
show(lora.LoraLinear.merge)

# %% [markdown]
# ## Further: turn the knobs
#
# A step of LoRA with one sequence, without checkpointing. With how many tokens does which model fit a card of 24 GB, and do the adapters show at r = 256?


# %%
def knobs(model="llama-2-7b", r=16, tokens=512):
    config = replace(ModelConfig.named(model), seq_len=tokens)
    bars = {
        f"frozen in {name}": rigs.lora.at_the_loss(config, rank=r, frozen=name)
        for name in ("bf16", "nf4")
    }
    return plots.memory_bars(**bars, capacity=card)


models = ["llama-2-7b", "llama-2-13b", "llama-2-70b"]
explore(knobs, states=27, model=models, r=[1, 16, 256], tokens=[512, 2048, 4096])

# %% [markdown]
# ## In practice
#
# | | PEFT | torchtune | Megatron Bridge |
# |---|---|---|---|
# | LoRA rank, α | `LoraConfig(r=16, lora_alpha=32)` | `lora_rank`, `lora_alpha` | `dim`, `alpha` |
# | which layers | `target_modules=["q_proj", "v_proj"]`, or `"all-linear"` | `lora_attn_modules`, `apply_lora_to_mlp` | `target_modules` |
# | merging | `merge_adapter()`, `unmerge_adapter()`, `merge_and_unload()` | `get_merged_lora_ckpt` | `examples/peft/merge_lora.py` |
# | QLoRA | `BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)` | `quantize_base=True` | – |
#
# Outputs, gradients and twenty steps here are PEFT's to the bit where α/r is a power of two (`tests/against_torch/test_peft.py`). Tensor parallelism comes first, as an adapter is cut like its layer; then `adapt`; then replicas or shards.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **B is zero "in order to start from identity mapping"** (lecture slides on multi-GPU training), or **"resulting in an identity transform"** (PEFT's documentation, developer guide on LoRA, up to version 0.20.0). It starts from the pre-trained function: the update is zero. <!-- erratum: S4-056, LO-17 -->
#
# ### True under a condition
#
# **"LoRA reduces the number of parameters by approximating weight matrices with low-rank factorization"** (the same slides). True of the *trained* parameters, and of the *update*: W stays whole and frozen, and all parameters become more. <!-- erratum: S4-052 -->
#
# **h = W·x + A·Bᵀ·x** (the same slides). True for α = r. The paper's factor α/r (section 4.1) is missing. <!-- erratum: S4-059 -->
#
# **"the checkpoint size is reduced by roughly 10,000×", from 350 GB to 35 MB** (Hu et al., section 4.2, r = 4). Rounded twice: 37.7 MB, and 9,272 times less than 350 GB. <!-- erratum: LO-10 -->
#   <!-- claim: (round(2 * lora.trainable(config.ModelConfig.named("gpt3-175b"), rank=4, pattern=("query", "value")) / 1e6, 1), round(350e9 / (2 * 18874368))) == (37.7, 9272) -->

# %% [markdown]
# ## Summary
#
# > - y = W·x + (α/r)·B·A·x: W is frozen, A drawn, B zero. With both zero nothing is ever learned.
# > - An adapter has r·(d + k) numbers; on all matrices of Llama-2-7B's layers, at r = 16, that is 0.59 % of the model.
# >   <!-- claim: (lambda m: round(100 * lora.trainable(m, rank=16) / m.num_params, 2))(config.ModelConfig.named("llama-2-7b")) == 0.59 -->
# > - It saves gradients and optimizer state: of 107.8 GB of states 14.1 are left, of which 13.5 are the frozen weights. In NF4 with double quantization it is 4.5.
# >   <!-- claim: (lambda m: [round(x / 1e9, 1) for x in (16 * m.num_params, predict.states(m, rigs.lora.fine_tuning(16)).total, 2 * m.num_params, predict.states(m, rigs.lora.fine_tuning(16, "nf4")).total)])(config.ModelConfig.named("llama-2-7b")) == [107.8, 14.1, 13.5, 4.5] -->
# > - With adapters on all layers it saves few activations: a step of Llama-2-7B with 4,096 tokens takes 28.6 GB over NF4, unless it recomputes. And it saves 28 % of the FLOPs on Llama-2-7B with 4,096 tokens in a row: gradients still flow to the first adapter.
# >   <!-- claim: round(rigs.lora.at_the_loss(config.ModelConfig.named("llama-2-7b"), rank=16, batch=1, frozen="nf4").total / 1e9, 1) == 28.6 -->
# >   <!-- claim: (lambda m: round(100 - 100 * sum(lora.training_flops(m, rank=16).values()) / m.flops_per_token()))(config.ModelConfig.named("llama-2-7b")) == 28 -->
# > - Merged it costs nothing. To take it out again to the bit, keep W: (W + Δ) − Δ is rounded twice.
# > - Full fine-tuning's own update of the layers' matrices is of low rank here: of 64 singular values four are enough, beside the embeddings, norms and head that were trained with them.
# > - Its best learning rate here is two to eight times that of full fine-tuning at α = 32, and falls as α grows. On this text it learns less, and less for what it forgets. Removed, the adapter leaves the model as it was.
# >   <!-- claim: claims.lora_learns() == ([2, 8], True) -->
#
# Next: numbers of eight bits and fewer, for weights, activations and gradients.

# %% [markdown]
# ## References
#
# - E. Hu et al., *LoRA: low-rank adaptation of large language models*, arXiv:2106.09685 (2021): sections 4.1 and 4.2; Tables 4 to 6.
# - T. Dettmers et al., *QLoRA: efficient finetuning of quantized LLMs*, arXiv:2305.14314 (2023): NF4 and double quantization.
# - D. Biderman et al., *LoRA learns less and forgets less*, arXiv:2405.09673 (2024).
# - D. Kalajdzievski, *A rank stabilization scaling factor for fine-tuning with LoRA*, arXiv:2312.03732 (2023); S. Hayou et al., *LoRA+*, arXiv:2402.12354 (2024).
# - J. Schulman et al., *LoRA without regret*, Thinking Machines Lab (2025): learning rates, which layers.
# - Hugging Face PEFT, documentation of `LoraConfig`; torchtune, documentation of its LoRA recipes.
