# %% [markdown]
# # 14 · Fine-tune beside the weights
#
# **Fine-tuning 6.7 billion weights takes 108 GB, 16 bytes for each. What do you save, and what do you lose, if you freeze them all and train two thin matrices beside each weight matrix?**
#
# *90 min, and 30 further · before this: labs 03, 04 and 08 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - train a low-rank update beside a frozen layer, from a start that changes nothing (exercise 14.1),
# - know how many numbers LoRA trains, and which bytes it saves (exercise 14.2),
# - merge an adapter, once, so that it costs nothing and can be taken out again (exercise 14.3, a bug hunt).

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
# The *LoRA rank* r is a small number. α is a constant that you choose; divided by r it scales the update. A query matrix of a 7B model and its adapter, drawn to scale:

# %%
plots.low_rank(4096, 4096, 16)

# %% [markdown]
# A and B together are an **adapter**. LoRA is **W as it was, an update of rank r beside it, and only the update is trained.**

# %% [markdown]
# ## What does the first step change?
#
# A is drawn at random and B begins at zero. So B·A·x is zero, and fine-tuning begins at the *pre-trained function*.

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
# G is the gradient of the output y:
#
# $$ \nabla_A = \tfrac{\alpha}{r}\,B^\top G\,x^\top, \qquad \nabla_B = \tfrac{\alpha}{r}\,G\,(A x)^\top . $$
#
# The gradient of A has a factor B, and that of B a factor A. So in the first step only B has a gradient. What if *both* begin at zero? Try it:

# %%
zeros = lora.wrap(nn.Linear(64, 48), rank=4, alpha=8)
nn.init.zeros_(zeros.adapters["default"].A)
optimizer = torch.optim.AdamW(zeros.adapters.parameters(), lr=0.1)
for _ in range(100):
    zeros(x).square().mean().backward()
    optimizer.step()
sum(p.abs().sum().item() for p in zeros.adapters.parameters())

# %% [markdown]
# Both are still zero.
#
# ### Exercise 14.1 · Give a layer an adapter (12 min, ●●○)
#
# Mind the factor α/r and what is frozen. Do not form B·A: it would be as large as W.


# %%
class Adapted(nn.Module):
    """A frozen linear layer with an adapter: W·x (+ bias) + (α/r)·B·A·x."""

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
# An adapter of W[d, k] has r·(d + k) numbers. `lora.trainable` adds them up over the layers that a pattern names.
#
# The paper adapts the query and value matrices of GPT-3: 96 layers of width 12,288.
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
# Only the adapters are stepped, by AdamW.


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
# Now the states of a whole model: by a formula, by a dry run (the program on fake tensors), and by the program. The model is a GPT of 100,000 weights, which learns to add below; `rigs.lora.sums(8)` has its tokens and targets.

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
# Formula and dry run for Llama-2-7B (the buffers are RoPE's tables):

# %%
llama = ModelConfig.named("llama-2-7b")
dry = World(Mesh(), engine="dry").run(held, config=llama, r=16, rows=1)
formulas.states(llama, rigs.lora.fine_tuning(rank=16, frozen="fp32")).diff(dry)

# %% [markdown]
# Frozen weights are in fp32 here, usually in bf16. Full fine-tuning takes 16 bytes for each weight (lab 02).
#
# > Llama-2-7B takes 107.8 GB for full fine-tuning. How many GB with LoRA at r = 16, activations left out?

# %%
predict("7b/lora", GB=54)

# %%
states = formulas.states(llama, rigs.lora.fine_tuning(rank=16))
print(f"trained: {lora.trainable(llama, rank=16) / llama.num_params:.2%}")
reveal("7b/lora", GB=round(states.total / 1e9, 1))

# %% [markdown]
# Frozen weights are 13.5 of the 14.1 GB.
#
# **QLoRA makes the frozen weights small, too.** In *NF4*, 4-bit NormalFloat, a weight is one of sixteen values, quantiles of a normal distribution, times a scale that each block of 64 weights shares.
#
# *Double quantization* makes the scales small: each takes 8 bits, and 256 of them share one scale of 32 bits. So a weight takes 4 + 8/64 + 32/(64·256) = 4.127 bits.
#
# For each product a layer makes its weight whole again, and then forgets it. Embedding and head stay in bf16. The small GPT over NF4, by formula and program, then Llama-2-7B by the formula:

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
# The small GPT again, with 32 sums of 8 tokens, and LoRA at r = 4.
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
# **With adapters on every layer, LoRA keeps most activations.** A's gradient needs x, its layer's input, as W's did. Attention and GELU keep what they kept, since gradients pass through them on their way to the first adapter. Gone is only what frozen weights' gradients alone needed: the head's input, and one of the two tensors that each norm keeps. By formula:

# %%
of_a_step = rigs.lora.fine_tuning(rank=4, frozen="fp32", batch=32)
formula = memory.activations(rigs.lora.ADDER, of_a_step)
formula.diff(kept["LoRA"]).unexplained

# %% [markdown]
# With adapters on queries and values alone, the paper's choice, the other layers need not keep their inputs. `down`'s is the widest:

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
# With this vocabulary of 12 the step is fullest in the midst of the backward pass. With Llama's 32,000 it is fullest where that pass begins. There all activations are alive, and two temporaries as large as the logits, which count as *buffers*. Two layers of Llama-2-7B:

# %%
two = replace(llama, num_layers=2)
dry = World(Mesh(), engine="dry").run(over, config=two, r=16, rows=1)
formula = rigs.lora.at_the_loss(two, rank=16, batch=1, frozen="fp32")
formula.diff(dry.peak.ledger, by="component")

# %% [markdown]
# Does Llama-2-7B at r = 16 fit the card of 24 GB, with one sequence of its 4,096 tokens? The formula counts all bytes where the step is fullest.
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
# **It does not fit: activations alone take 23.7 of 24 GB.** Rows of 1,024 tokens would fit (20.1 GB over bf16). So would, over NF4, adapters on queries and values alone (23.1 GB).
#   <!-- claim: (lambda m, step: [round(each.total / 1e9, 1) for each in (step(__import__("dataclasses").replace(m, seq_len=1024), rank=16), step(m, rank=16, pattern=("query", "value"), frozen="nf4"))])(config.ModelConfig.named("llama-2-7b"), rigs.lora.at_the_loss) == [20.1, 23.1] -->
#
# Otherwise you need checkpointing (lab 04). Each layer adds the same bytes, so dry runs of two and three layers give those of all 32:

# %%
for name in ("bf16", "nf4"):
    options = dict(r=16, rows=1, recompute=True) | {name: True}
    run = World(Mesh(), engine="dry").run
    peak = rigs.lora.peak_of_all_layers(llama, run, over, **options)
    whole[f"{name}, recomputed"] = peak
title = "Recomputation makes it fit 24 GB: most of a step is activations"
plots.memory_bars(**whole, capacity=card, title=title)

# %% [markdown]
# Now LoRA takes 16.0 GB over bf16, 7.0 over NF4.

# %% [markdown]
# ## Further: what does it cost in time?
#
# A training step forms three products for each weight matrix: for outputs, for gradients of inputs, for gradients of weights. LoRA saves the third, since W has no gradient now. It does not save the second: gradients must still flow back to the first adapter. And each adapter adds 2·r·(d + k) FLOPs per token to each of the three.
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
# LoRA saves the gradients of W. They are less than a third of full fine-tuning's FLOPs, as attention's own products have no weights. The adapters add a little. (A test counts every product that runs.) The longer the rows, the larger attention's share, and the less LoRA saves: 32 % of the FLOPs with 512 tokens in a row, 28 % with 4,096 and 20 % with 16,384.
#   <!-- claim: [(lambda m: round(100 - 100 * sum(lora.training_flops(m, rank=16).values()) / m.flops_per_token()))(__import__("dataclasses").replace(config.ModelConfig.named("llama-2-7b"), seq_len=s)) for s in (512, 4096, 16384)] == [32, 28, 20] -->
#
# Recomputation, which the card asked for, takes more than LoRA has saved: it runs all blocks forward once more, 15 GFLOPs per token. But full fine-tuning would have to recompute as well. Where both do, LoRA takes 79 % of its FLOPs.
#   <!-- claim: (lambda m, p: (lambda again: round(100 * (sum(p.values()) + again) / (m.flops_per_token() + again)))(p["outputs"] - 2 * m.vocab_size * m.d_model))(config.ModelConfig.named("llama-2-7b"), lora.training_flops(config.ModelConfig.named("llama-2-7b"), rank=16)) == 79 -->
#
# FLOPs are not yet time. Here is LoRA's share of the time, for this GPT and for one six times as wide with 128 tokens in a row:


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
# In the narrow model LoRA may even take longer than full fine-tuning. In the wide one its time comes nearer to its FLOPs. On GPT-3 the paper has 43.1 tokens per second and GPU with LoRA, and 32.5 with full fine-tuning (section 4.2). So LoRA takes 75 % of the time.
#
# Over NF4 each weight is also made whole twice per micro-batch, forward and backward, and a third time with recomputation. That reads 0.5 and writes 2 bytes per weight. By the data sheet of the card above it takes 16 ms each time for Llama-2-7B's layers (1,008 GB/s). Their products take 321 ms with 4,096 tokens (165 TFLOP/s), and 40 with 512. So with few tokens it counts. (Nothing was measured.)
#   <!-- claim: (lambda m, card: (lambda n: [round(1e3 * x) for x in (n * 2.516 / card.memory_bandwidth, 2 * n * 4096 / card.flops["bf16"], 2 * n * 512 / card.flops["bf16"])] + [round(card.flops["bf16"] / 1e12)])(m.num_params - 2 * m.vocab_size * m.d_model))(config.ModelConfig.named("llama-2-7b"), config.Hardware.named("RTX-4090")) == [16, 321, 40, 165] -->

# %% [markdown]
# **On several devices** (lab 08) only what is trained has gradients to reduce. Here four ranks take a quarter of the sums each. Are their gradients those of one device, and how many bytes are sent?


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
# Here the gradients of both are in fp32. On Llama-2-7B, LoRA at r = 16 reduces 160 MB on each rank, and full fine-tuning 13.5 GB in bf16. That is 1.2 % of the bytes for 0.6 % of the numbers, as adapters stay in fp32.
#   <!-- claim: (lambda m: (lambda nbytes: [round(nbytes / 1e6), round(2 * m.num_params / 1e9, 1), round(100 * nbytes / m.num_params / 2, 1)])(4 * lora.trainable(m, rank=16)))(config.ModelConfig.named("llama-2-7b")) == [160, 13.5, 1.2] -->
#
# With tensor parallelism, the model is cut first, as an adapter is cut like its layer; then comes `adapt`, and then replicas or shards.

# %% [markdown]
# ## Does it learn, and what does it forget?
#
# This model adds in base 10: "60+44=" is continued by "401", the digits of 104, the least significant one first. 512 of the 10,000 sums were held out of its training. Now it must learn to add in base 8.

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
# Sums that carry nothing read the same in both bases. The rest must be learned, in 150 steps of 32 sums. Full fine-tuning and LoRA (r = 4, α = 32) train with two seeds, each at its best rate of the sweep below.


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
# Both learn base 8 and forget base 10. To go back, full fine-tuning needs a second copy of the model. From LoRA, take the adapter out:

# %%
for model in tuned[4]:
    lora.activate(model, None)
same = [torch.equal(model(tokens), adder(tokens)) for model in tuned[4]]
print("base 10:", right(tuned[4], 10), "the same bits:", same)

# %% [markdown]
# **Is the update of low rank?** LoRA presumes that it is. Full fine-tuning can tell, since nothing held its update, W₈ − W₁₀, to a low rank. Cut the update of each of the twelve matrices to its r largest singular values, leave all else as trained, and let the model add in base 8.
#
# > Of 64 singular values in each matrix, how many does it take to get over 95 % of the sums right?

# %%
predict("update/rank", values=32)


# %%
@torch.no_grad()
def cut_to(r, tuned, rest=None, before=adder):
    """A model with the update of each matrix cut to rank r; all else is that of
    `rest`, or of the tuned model."""
    model = copy.deepcopy(rest or tuned)
    new, old = dict(tuned.named_parameters()), dict(before.named_parameters())
    for name, w in model.named_parameters():
        if name.startswith("blocks") and w.dim() == 2:
            U, S, V = torch.linalg.svd(new[name] - old[name], full_matrices=False)
            w.copy_(old[name] + U[:, :r] * S[:r] @ V[:r])
    return model


# %%
cuts = {r: [cut_to(r, model) for model in tuned[0]] for r in (0, 1, 2, 4, 8, 64)}
shares = {r: right(models, 8) for r, models in cuts.items()}
print("base 8 after two fine-tunings:")
for r, share in shares.items():
    print(f"rank {r:2}: {share[0]:.0%} and {share[1]:.0%} right")
alone = right([cut_to(64, model, adder) for model in tuned[0]], 8)
print(f"rank 64, all else of base 10: {alone[0]:.0%} and {alone[1]:.0%} right")
draw = torch.Generator().manual_seed(0)
fresh = GPT(rigs.lora.ADDER, attention="sdpa", generator=draw)  # where base 10 began
first = right([cut_to(r, adder, before=fresh.double()) for r in (4, 8, 16)], 10)
print("base 10 from scratch, rank 4, 8, 16:", *(f"{share:.0%}" for share in first))

# %%
enough = min(r for r, share in shares.items() if min(share) > 0.95)
reveal("update/rank", values=enough)

# %% [markdown]
# **This task needs few directions, as LoRA presumes:** cut to rank 4, full fine-tuning's own update still adds right. (At twice the rate four values leave 90 % right; to base 9 two are enough.) What was learned from scratch, in 1,200 steps, takes 16.
#
# But it is not LoRA's update. LoRA keeps embeddings, norms and head of base 10, and with these all 64 values get only about two thirds right.
#
# **Which learning rate, and which r?** This sweep was recorded by `python tools/lora_sweep.py`, with 60 steps, α = 32 and five seeds for each point. The band is the range of the seeds:

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
# **With this α, LoRA's best rate is four to eight times that of full fine-tuning.** One rate serves every r: at 0.0032 each LoRA rank is within its error of its best. (Losses are means ± standard errors; rates are tried by factors of two.)
#
# **What is α for?** Here is the sweep at r = 4 for other values of α (three seeds):
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
# From α = 4 to 512 the best rate falls sixteenfold: a fourfold α about halves it. So LoRA's best rate, in multiples of full fine-tuning's, depends on α. Set α once, such as 32, and sweep the rate (section 4.1).
#
# ### Further: which layers, and why is α divided by r?
#
# At this size the sweep does not tell r = 4 and r = 16 apart. Does it tell layers apart? Here are adapters on attention alone at r = 8, and on the feed-forward layers alone at r = 2:

# %%
for pattern in ("attention.*", "feed_forward.*"):
    lr, loss, error = runs.best(pattern=pattern)
    print(f"{pattern:15}{runs.trained(pattern):6,} trained: {loss:.3f} ± {error:.3f}")

# %% [markdown]
# Both are worse than adapters on all layers at r = 4, by about two standard errors. No order shows between the two, though attention alone trains three times as many numbers.
#
# **What would happen without the division by r?** B·A is a sum of r products, each of a column of B and a row of A. Adam moves each number of B by about the learning rate, whatever r is, and so each product lowers the loss. Here is how far the first step of r products lowers it, against that of one:


# %%
def lowers(r, factor):
    """Nats by which the first step lowers the loss in base 8, a mean of four seeds."""
    found = []
    for seed in range(4):
        model, draw = copy.deepcopy(adder), torch.Generator().manual_seed(seed)
        lora.adapt(model, rank=r, alpha=r * factor, generator=draw)
        rigs.lora.learn_sums(model, 8, steps=1, batch=512, lr=1e-3)
        found.append(rigs.lora.score_sums(model, 8)[0])
    return rigs.lora.score_sums(adder, 8)[0] - sum(found) / 4


for name, factor in {"8 for every r": lambda r: 8, "32/r": lambda r: 32 / r}.items():
    drops = {r: lowers(r, factor(r)) for r in (1, 4, 16)}
    times = (f"r = {r}: {drop / drops[1]:.1f} times" for r, drop in drops.items())
    print(f"a factor of {name:13}", *times, sep="   ")

# %% [markdown]
# **Without the division the first step lowers the loss about r times as far; with it, about as far for every r.** The weights themselves move only √r times as far, as the rows of A point in random directions (tested). But the loss feels only what goes down its gradient, and there the r products add up.
#
# Do whole runs follow? With α = 8r the factor before B·A is 8 for every r. If the rate has to make up for r, the best rate of r = 16 is 1/16 of that of r = 1 (the same record):

# %%
fixed = {"1": (others, {"alpha": "8"}), "4": (runs, {})}
fixed["16"] = (others, {"alpha": "128"})
for r, (recorded, which) in fixed.items():
    lr, loss, error = recorded.best(rank=r, **which)
    print(f"r {r:>2}: {loss:.3f} ± {error:.3f} at {lr:.1e}")

# %% [markdown]
# The best rate of r = 16 is an eighth of that of r = 1, one step of the sweep away from 1/16. With the division (α = 32 for both) it is twice that of r = 1, one step, too, and within the errors. **So the division spares a search for the rate.**
#
# The loss at the best rate does not ask for the division. Without it, r = 1 and r = 16 both end lower than with α = 32: by 0.02 in the mean, and in each of the three seeds that both sweeps have. And r = 16 ends at 0.083, where full fine-tuning ends.
#   <!-- claim: [(lambda lower: min(lower) > 0 and round(sum(lower) / 3, 2))(claims.lora_with_alpha_8r(rank)) for rank in ("1", "16")] == [0.02, 0.02] -->
#
# Two variants: *rsLoRA* divides by √r, not by r (not tried here). *LoRA+* gives B a larger rate than A.
#
# ### Further: on text
#
# A GPT that has read Python's reference is fine-tuned on Python's source code, for 120 steps with three seeds (the same tool):

# %%
text = rigs.lora.sweep("text")
table(text)

# %% [markdown]
# Here LoRA *learns less* than full fine-tuning with every seed, and the smaller r is, the less it learns.
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
# From corner to corner the learning rate doubles; each curve ends at its best rate.
#
# *What shows:* at a rate of 0.0008, where full fine-tuning ends and LoRA begins, every LoRA rank learns less and forgets less. With each at its best rate, only r = 1 forgets less than full fine-tuning.
#
# *What does not show:* that LoRA forgets less for what it learns. The highest curve is that of full fine-tuning: it has learned more for as much forgotten.
#
# This is one model of 100,000 weights, one α and 120 steps. On Llama-2-7B, Biderman et al. (2024, *LoRA learns less and forgets less*) find about the same trade for both. *LoRA without regret* finds LoRA equal to full fine-tuning where the data set is small.

# %% [markdown]
# ## What does it cost after training?
#
# An adapter beside W costs two more products for each token. *Merged*, W + (α/r)·B·A takes the place of W:

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
# ### Further: and over NF4?
#
# Over NF4, the merged weight W + Δ, with Δ = (α/r)·B·A, has to be rounded to NF4 once more. What does that cost? Recorded is the loss in base 8 of adapters that have learned over NF4 (150 steps, r = 4; `python tools/lora_sweep.py merged`). As a control, W alone is rounded again:

# %%
for row in rigs.lora.sweep("merged").rows:
    print(", ".join(f"{name} {value}" for name, value in row.items()))

# %% [markdown]
# Merging into weights in bf16 costs nothing that shows. Merging into NF4 costs 0.001 to 0.005 nats in each of three seeds, up to 44 % of so small a loss.
#
# The control shows why: rounding W alone is harmless, since W lies on NF4's grid already. W + Δ does not lie on it. So QLoRA's adapters stay beside W, or W is made whole first. Several adapters may stand beside one frozen model. On disk each is A and B alone (`lora.state`).
#
# ### Exercise 14.3 · Bug hunt: the layer that merges (12 min, ●●●)
#
# The layer should merge at most once, give W back to the bit, and cost one product while merged. Its test passes, but none of the three holds.


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

# %%
show(lora.LoraLinear.merge)

# %% [markdown]
# ## Further: turn the knobs
#
# The bars are a step of LoRA with one sequence, without checkpointing. Which model fits a card of 24 GB, and with how many tokens? Do the adapters show at r = 256?


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
# Where α/r is a power of two, outputs, gradients and twenty steps here are PEFT's to the bit (`tests/against_torch/test_peft.py`).

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **B is zero "in order to start from identity mapping"** (lecture slides on multi-GPU training), or **"resulting in an identity transform"** (PEFT's documentation, developer guide on LoRA, up to version 0.20.0). It starts from the pre-trained function: the update is zero. <!-- erratum: S4-056, LO-17 -->
#
# ### True under a condition
#
# **"LoRA reduces the number of parameters by approximating weight matrices with low-rank factorization"** (the same slides). True of the *trained* parameters, and of the *update*. W stays whole, and all parameters become more. <!-- erratum: S4-052 -->
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
# > - On Llama-2-7B LoRA saves gradients and optimizer state: 14.1 of 107.8 GB of states are left, 13.5 of them frozen weights. With these in NF4, 4.5 GB are left.
# >   <!-- claim: (lambda m: [round(x / 1e9, 1) for x in (16 * m.num_params, predict.states(m, rigs.lora.fine_tuning(16)).total, 2 * m.num_params, predict.states(m, rigs.lora.fine_tuning(16, "nf4")).total)])(config.ModelConfig.named("llama-2-7b")) == [107.8, 14.1, 13.5, 4.5] -->
# > - With adapters on all layers LoRA saves few activations: a step of Llama-2-7B with 4,096 tokens takes 28.6 GB over NF4, unless it recomputes. Without recomputation it saves only 28 % of that step's FLOPs, as gradients still flow to the first adapter.
# >   <!-- claim: round(rigs.lora.at_the_loss(config.ModelConfig.named("llama-2-7b"), rank=16, batch=1, frozen="nf4").total / 1e9, 1) == 28.6 -->
# >   <!-- claim: (lambda m: round(100 - 100 * sum(lora.training_flops(m, rank=16).values()) / m.flops_per_token()))(config.ModelConfig.named("llama-2-7b")) == 28 -->
# > - A merged adapter costs nothing. To take it out again to the bit, keep W, since (W + Δ) − Δ is rounded twice.
# > - Full fine-tuning's own update of the layers' matrices is of low rank here: four of 64 singular values are enough, together with the embeddings, norms and head that it trained. From scratch it took 16.
# > - At α = 32 LoRA's best learning rate here is two to eight times that of full fine-tuning, and falls as α grows. On this text it learns less, and less for what it forgets. Removed, the adapter leaves the model as it was.
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
