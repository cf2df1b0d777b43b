# %% [markdown]
# # 03 · Know what is in the memory
#
# **A model of 1.5 billion parameters is 3 GB in 16 bits. Why does training it not fit in 32 GB, and can you tell beforehand, to the byte?**
#
# *90 min · before this: labs 00 and 02 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - count the parameters of a model from its `config.json`, to the last one (exercise 3.1),
# - say which tensors a layer keeps for the backward pass, and how large they are (exercise 3.2),
# - look at a published memory table and see that it cannot be right (exercise 3.3, a bug hunt).
#
# You also predict the peak of a step with its phase, watch an allocator fail with memory to spare, and leave with a calculator.

# %% [markdown]
# ## Setup

# %%
import dataclasses

import torch

from labutils import checkpointing, measure, memory, units
from labutils.config import Hardware, Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.teach import calculator, plots
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.exercises import memory as exercises
from labutils.teach.widgets import explore, log

# %% [markdown]
# ## The idea in one picture
#
# A training step of a small GPT. The first picture is measured: every storage, from the operation that made it to the one that freed it. The second comes from the
# configuration alone, and no tensor is made for it.

# %%
dims = dict(num_layers=3, d_model=64, num_heads=4, d_ff=256, vocab_size=128, seq_len=32)
config = ModelConfig(**dims)
train = TrainConfig(micro_batch=8, global_batch=8, precision="fp32")
model = GPT(config, generator=torch.Generator().manual_seed(0))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(128, (2, 8, 32), generator=torch.Generator().manual_seed(1))
x, y = tokens[0].clone(), tokens[1].clone()


def step():
    loss = model.loss(x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# %%
step()  # the optimizer's state comes with the first step
measured = measure.history(step, model, optimizer)
title = "Measured: a hill of activations on a plateau of model states"
plots.memory_timeline(measured, title=title)

# %%
predicted = memory.history(config, train)
title = "Predicted from the configuration: the same hill, the same peak"
plots.memory_timeline(predicted, title=title)


# %%
def alive(history):
    passes = [m for m in history.moments if m.phase in ("forward", "backward")]
    return [(m.event, m.ledger.total) for m in passes]


peaks = predicted.peak.ledger.total, measured.peak.ledger.total
alive(predicted) == alive(measured), len(alive(measured)), peaks[0] == peaks[1]

# %% [markdown]
# Equal after every operation of the forward and the backward pass, to the byte, and at the peak. The lab takes this apart, from what is there all the time to what is there for a moment: parameters, model states,
# activations, temporaries, and at last what the allocator adds.

# %% [markdown]
# ## How many parameters has a model?
#
# A decoder has a table of words, L equal layers, a norm at the end and a head. GPT-2's layers have four attention matrices of $h \times h$, two of the feed-forward network of
# $h \times 4h$, biases, and two norms: $12h^2 + 13h$.

# %%
gpt2 = ModelConfig.named("gpt2-xl")
gpt2.parameters

# %% [markdown]
# > How many parameters has GPT-2 XL, the "1.5 billion" one, in billions?

# %%
predict("memory/gpt2-xl", billions=1.5)

# %%
h, v, s, L = gpt2.letters("h v s L")
by_hand = v * h + s * h + L * (12 * h**2 + 13 * h) + 2 * h
reveal("memory/gpt2-xl", billions=by_hand / 1e9)

# %%
by_hand, by_hand == gpt2.num_params

# %% [markdown]
# Today's models differ in four places. SwiGLU has three matrices, not two. Grouped-query attention (GQA) has fewer key and value heads, $g$ of them. There are no biases, or three a
# layer. And the head may be the table of words again, *tied*. All of it stands in the `config.json` that comes with the weights:

# %%
llama = ModelConfig.from_hf(exercises.LLAMA_3)
llama.num_params, llama.letters("L h a g f v")

# %%
for name in (
    "gpt2", "gpt3-175b", "llama-2-7b", "llama-3.1-405b",
    "qwen2-0.5b", "qwen2-7b", "mixtral-8x7b",
):  # fmt: skip
    named = ModelConfig.named(name)
    print(f"{name:15}{named.num_params:>17,}")

# %% [markdown]
# The numbers are those of the released weights, to the last parameter. "405B" has 405.9, "GPT-3 175B" 174.6 and "7B" anything from 6.7 to 7.6. Mixtral's "8x7B" are 46.7, because the
# eight experts share one attention.
#
# ### Exercise 3.1 · Count the parameters of a config.json (15 min, ●●○)
#
# `config` is the parsed file, Llama's or Qwen2's. Qwen2 has biases at queries, keys and values. Return the number of parameters.


# %%
def count_parameters(config) -> int:
    raise NotImplementedError


# %%
check("memory/count-parameters", count_parameters)

# %%
hint("memory/count-parameters", 1)

# %%
show(exercises.count_parameters)

# %% [markdown]
# ## What is there before the first token?
#
# Weights, their gradients, and what the optimizer remembers: the *model states*, Ψ numbers each, whatever the batch.
#
# > GPT-2 XL with AdamW in bf16, with an fp32 master copy of the weights: how many GB?

# %%
predict("memory/states", GB=3)

# %%
states = memory.model_states(gpt2, TrainConfig(micro_batch=1, global_batch=1))
states

# %%
reveal("memory/states", GB=states.total / 1e9)

# %% [markdown]
# Two bytes for a weight, two for its gradient, and twelve for the optimizer: the master copy and Adam's two moments, in fp32. In bytes per parameter, by precision and by what ZeRO (lab 09) leaves on each of 8 devices:

# %%
precisions = {
    "fp32": {"precision": "fp32"},
    "bf16": {"precision": "bf16"},
    "bf16, gradients in fp32 instead": {"precision": "bf16", "fp32_gradients": "only"},
    "bf16, gradients in fp32 as well": {"precision": "bf16", "fp32_gradients": True},
}
for name, options in precisions.items():
    runs = [
        TrainConfig(micro_batch=1, global_batch=8, zero=level, **options)
        for level in range(4)
    ]
    shares = [memory.model_states(gpt2, run, Mesh(dp=8)).total for run in runs]
    print(f"{name:32}", *(f"{share / gpt2.num_params:6.2f}" for share in shares))

# %% [markdown]
# So 16, 18 and 20 bytes per parameter are all right, for different recipes (lab 02 takes them apart). And the measured ones? The small model, between `backward` and `step`:

# %%
model.loss(x, y).backward()
memory.model_states(config, train).diff(measure.model_states(model, optimizer))

# %%
optimizer.zero_grad()

# %% [markdown]
# ## What does the forward pass keep?
#
# Model states do not know the batch. Activations do: autograd keeps a tensor when the backward pass of some operation reads it.
#
#
# | operation | its backward pass reads |
# |---|---|
# | $y = xW$ | $x$ (and $W$, which is there anyway) |
# | LayerNorm | its input, and mean and 1/σ of each token |
# | softmax | its *output* |
# | $QK^\top$, and weights times $V$ | both factors |
# | GELU | its input |
# | dropout | a mask |
# | $x + y$ | nothing |
#
# > In bf16 with dropout: how many bytes does GPT-2 XL keep in one layer for a single sequence of 1024 tokens, in MB?

# %%
predict("memory/one-layer", MB=100)

# %%
run = TrainConfig(micro_batch=1, global_batch=1, precision="bf16")
with_dropout = dataclasses.replace(gpt2, dropout=0.1)
kept = memory.activations(with_dropout, run)
layer = [line for line in kept if line.name.startswith("blocks.7.")]
for line in layer:
    part, amount = line.name.removeprefix("blocks.7."), units.text(line.amount)
    print(f"{part:20}{amount:>9}  {line.note}")

# %%
reveal("memory/one-layer", MB=sum(line.amount for line in layer) / 1e6)

# %% [markdown]
# Nearly three quarters are the s × s matrices of attention: the softmax of 25 heads, what dropout leaves of it, and the mask. That was the prediction; the measurement hooks every tensor that autograd packs
# away, for the small model of the first picture:

# %%
counted = memory.activations(config, train)
saved = measure.saved_activations(lambda: model.loss(x.clone(), y.clone()), model)
counted.diff(saved).unexplained

# %% [markdown]
# Zero bytes. A test of this course does the same for random configurations: norms, feed-forward networks, GQA, RoPE, fused attention, autocast, dropout, checkpointing.
#
# ### Exercise 3.2 · Predict what attention keeps (15 min, ●●○)
#
# Plain causal attention with $a$ query and $g$ key-value heads, no dropout, no norm, the output projection included; `size` is the bytes of a number. Return the bytes that autograd keeps.


# %%
def saved_by_attention(b: int, s: int, h: int, a: int, g: int, size: int) -> int:
    raise NotImplementedError


# %%
check("memory/saved-by-attention", saved_by_attention)

# %%
hint("memory/saved-by-attention", 1)

# %%
show(exercises.saved_by_attention)

# %% [markdown]
# ## Does the published formula say the same?
#
# The formula that everybody cites is that of Korthikanti et al.: a layer keeps
#
# $$ sbh\left(34 + 5\,\frac{as}{h}\right) \text{ bytes.} $$
#
# Here are its 34 and its 5:

# %%
paper = memory.korthikanti(b=1, s=1024, h=1600, a=25)
paper

# %%
48 * paper.total - sum(line.amount for line in kept)

# %% [markdown]
# The formula counts less than PyTorch keeps. It is no rounding, and no "about": each byte of the difference has a name.

# %%
beyond = memory.beyond_the_paper(with_dropout, run)
beyond

# %%
kept.total, paper.scaled(48).total + beyond.total == kept.total

# %% [markdown]
# The paper assumes dropout masks of one byte; on a CPU PyTorch keeps them in the format of what they mask. It leaves out mean and 1/σ, the embedding, the head and the loss. With a vocabulary of
# 50 257 words the log-probabilities alone are half as large as a layer.

# %% [markdown]
# ## What makes activations grow?
#
# > GPT-2 XL goes from 1024 to 4096 tokens. How many times as many bytes do its activations take, with plain attention?

# %%
predict("memory/four-times-longer", times=4)

# %%
lengths = [256, 512, 1024, 2048, 4096, 8192]


def one(batch=1, **options):
    """A run whose batch is one micro-batch."""
    return TrainConfig(micro_batch=batch, global_batch=batch, **options)


def activations(tokens, **options):
    longer = dataclasses.replace(gpt2, seq_len=tokens)
    return memory.activations(longer, one(**options)).total


reveal("memory/four-times-longer", times=activations(4096) / activations(1024))

# %%
title = "The scores grow with the square; what is left without them grows in proportion"
plots.curves(
    lengths,
    xlabel="tokens in a sequence",
    ylabel="activations, one sequence",
    unit="B",
    log="xy",
    title=title,
    plain=[activations(s) for s in lengths],
    fused_attention=[activations(s, attention="sdpa") for s in lengths],
    checkpointed=[activations(s, checkpointing="full") for s in lengths],
)

# %% [markdown]
# In the batch and in the layers they are linear, always. In the sequence they are $34sbh + 5as^2b$: linear *and* quadratic, equal where $s = 34h/5a$, at

# %%
34 * 64 / 5, 34 * 128 / 5

# %% [markdown]
# tokens for heads 64 and 128 wide. Fused attention (lab 06) removes the square, so today's activations are linear in $s$ too.
#
# **What do a modern model's parts change?** One layer of Llama-3.1-8B at 4096 tokens in bf16, each part put back to that of GPT-2:


# %%
def one_layer(**changes):
    varied = dataclasses.replace(llama, num_layers=1, seq_len=4096, **changes)
    saved = memory.activations(varied, one(attention="sdpa"))
    return sum(line.amount for line in saved if line.name.startswith("blocks."))


base = one_layer()
parts = {
    "32 key-value heads, not 8": {"num_kv_heads": 32},
    "GELU, not SwiGLU": {"ffn": "gelu"},
    "LayerNorm, not RMSNorm": {"norm": "layernorm"},
}
print(f"{'as it is':28}{units.text(base):>9}")
for name, changes in parts.items():
    changed = one_layer(**changes)
    print(f"{name:28}{units.text(changed):>9}  {changed / base - 1:+.0%}")

# %% [markdown]
# GQA saves on keys and values. SwiGLU keeps four tensors of $sbf$ where GELU keeps two. And RMSNorm, as PyTorch runs it on a CPU, keeps its input in fp32 and the normalized one as well: simpler to compute, and
# *larger* to remember, until somebody fuses it.

# %% [markdown]
# ## When is memory fullest?
#
# Activations are largest at the end of the forward pass. Is that the peak?
#
# > GPT-2 XL in bf16, one sequence, full checkpointing, 24.9 GB of model states: how many GB at the fullest moment? And is it in the forward pass, in the backward pass or in the optimizer's step?

# %%
predict("memory/peak", GB=26)

# %%
setting = TrainConfig(micro_batch=1, global_batch=1, checkpointing="full")
peak = memory.predict(gpt2, setting, hardware=Hardware.named("V100"))
{name: units.text(amount) for name, amount in peak.phases.items()}

# %%
reveal("memory/peak", GB=peak.total / 1e9)

# %%
peak

# %% [markdown]
# Weights, gradients, moments, and an fp32 copy of the gradients that nobody budgets for: the optimizer steps the master weights, and those are fp32. Each line's note is its formula in the letters of the course.
# That is the answer to the lab's question: of 32 GB two tenths of a gigabyte are left, for a batch of one, before the driver and the libraries have taken theirs.
#
# With 32 sequences and without checkpointing it is another moment: the loss has been taken, and over all saved activations stand the log-probabilities and *two* gradients of them.

# %%
large = memory.predict(gpt2, one(32))
working = large.only(component="buffers")
buffers = {line.name: units.text(line.amount) for line in working}
large.phase, large.event, units.text(large.total), buffers

# %% [markdown]
# Move the batch: from how many sequences on is the peak no longer in the optimizer?


# %%
def fullest(micro_batch=2, checkpointing="none"):
    """The peak of GPT-2 XL, 1024 tokens a sequence, fused attention."""
    run = one(micro_batch, attention="sdpa", checkpointing=checkpointing)
    peak = memory.predict(gpt2, run)
    total = units.text(peak.total)
    title = f"Fullest in the {peak.phase} at {total}, after {peak.event}"
    return plots.memory_bars(title=title, capacity=Hardware.named("H100"), peak=peak)


explore(fullest, micro_batch=log(1, 32), checkpointing=["none", "selective", "full"])

# %% [markdown]
# From 4 sequences on; with full checkpointing from 32. Then the memory is a question of the batch, before it one of the parameters.
#
# Is it true? The same prediction for the small model, against its measured peak, at several settings:


# %%
def measured_peak(setting):
    """The fullest moment of a second step, measured."""
    learner = GPT(config, attention=setting.attention)
    checkpointing.apply(learner, setting.checkpointing)
    make = torch.optim.SGD if setting.optimizer == "sgd" else torch.optim.AdamW
    stepper = make(learner.parameters(), lr=0.1)

    def one_step():
        loss = learner.loss(x, y)
        loss.backward()
        stepper.step()
        stepper.zero_grad()

    one_step()
    return measure.history(one_step, learner, stepper).peak


# %%
tried = {
    "as above": {},
    "fused attention": {"attention": "sdpa"},
    "checkpointed": {"checkpointing": "full"},
    "SGD": {"optimizer": "sgd"},
}
for name, options in tried.items():
    setting = dataclasses.replace(train, **options)
    guess, found = memory.predict(config, setting), measured_peak(setting)
    unexplained = guess.total - found.ledger.total
    print(f"{name:16}{guess.phase:>10}{guess.total:>10,} B, unexplained: {unexplained}")

# %% [markdown]
# This holds for the course's GPT on a CPU, where every operation is known. On a GPU the allocator rounds (next section), and libraries add workspaces of their own; published
# estimators state an error of a few percent there.

# %% [markdown]
# ## Why is there no room while bytes are free?
#
# What PyTorch asks of the driver is not what tensors ask of PyTorch. Asking is slow, so freed memory is kept in *segments* and handed out again in *blocks*: small tensors share segments of 2 MiB, larger
# ones of 20 MiB, and from 10 MiB on a tensor has a segment to itself. `memory.Allocator` follows those rules, on a device of your choice.
#
# > A device of 40 MiB. Eight tensors of 5 MiB, and every second one is freed. How many MiB does the largest tensor have that finds room now?

# %%
predict("memory/largest-free", MiB=20)

# %%
gpu = memory.Allocator(40 * units.MIB)
addresses = [gpu.alloc(5 * units.MIB, name=f"tensor {i % 2}") for i in range(8)]
for address in addresses[::2]:
    gpu.free(address)
gpu

# %%
reveal("memory/largest-free", MiB=gpu.largest_free / units.MIB)

# %%
title = "Half of the memory is free, and a tensor of 10 MiB finds no room"
plots.memory_map(title=title, asked=10 * units.MIB, after_freeing=gpu.layout)

# %%
try:
    gpu.alloc(10 * units.MIB)
except memory.OutOfMemory as error:
    print(error)

# %% [markdown]
# That is fragmentation. Before it gives up the allocator hands back segments in which nothing is left; here every segment holds something.
#
# **Two remedies.** It happens to large tensors too. A batch of 6 GiB comes and goes, the optimizer's state moves into the hole it left, and the next batch, as large as the first, finds 9 GiB free and no 6 in one piece:


# %%
def second_batch(**options):
    """A device of 10 GiB after a batch, the state that came after it, and, where there
    was room for it, the next batch."""
    gpu = memory.Allocator(10 * units.GIB, **options)
    gpu.free(gpu.alloc(6 * units.GIB, name="batch"))
    gpu.alloc(units.GIB, name="state")
    try:
        gpu.alloc(6 * units.GIB, name="batch")
    except memory.OutOfMemory as error:
        print(error)
    return gpu


devices = {
    "default": second_batch(),
    "max_split_size": second_batch(max_split_size=512 * units.MIB),
    "expandable_segments": second_batch(expandable_segments=True),
}

# %%
title = "Not cutting the large block helps, and so does a segment that can grow"
layouts = {name: gpu.layout for name, gpu in devices.items()}
plots.memory_map(title=title, asked=6 * units.GIB, capacity=10 * units.GIB, **layouts)

# %% [markdown]
# `max_split_size` leaves blocks above that size whole: the state gets a segment of its own, and the hole waits for the next batch. `expandable_segments` reserves addresses instead of memory: the segment grows
# by the 1 GiB that is missing. Neither helps the eight small tensors above, whose holes are smaller than a page of 20 MiB.
#
# **On a real step.** The trace of the first picture, every storage with its birth and death, replayed on a device. The tensors are small, so they share segments; what is reserved beyond them is the price of
# not asking the driver:

# %%
replayer = memory.Allocator(units.parse("1 GiB"))
memory.replay(measure.storages(step, model, optimizer), replayer)
peaks = {
    "tensors": measured.peak.ledger.total,
    "blocks": replayer.peak_allocated,
    "segments": replayer.peak_reserved,
}
{name: units.text(amount) for name, amount in peaks.items()}

# %% [markdown]
# Blocks are multiples of 512 bytes, segments of 2 MiB. A recorded run on a GPU belongs here; this course does not have one yet.

# %% [markdown]
# ## Where do the 60 GB of GPT-2 come from?
#
# The ZeRO paper's example: GPT-2 with 1.5 billion parameters, 1024 tokens, batch 32. Weights 3 GB; model states 24 GB; activations "about 60 GB"; with checkpointing "about 8 GB". Each number again:

# %%
states = memory.model_states(gpt2, one(32))
weights = states.only(component="weights").total
{"weights": units.text(weights), "model states": units.text(states.total)}

# %%
def kept_by(**options):
    return memory.activations(gpt2, one(32, **options)).total


def layers(**options):
    return 48 * memory.korthikanti(b=32, s=1024, h=1600, a=25, **options).total


ways = {
    "12 numbers a token, layer and column": 12 * 32 * 1024 * 1600 * 48 * 2,
    "Korthikanti, without as²b": layers(checkpointing="selective"),
    "Korthikanti": layers(),
    "PyTorch, no dropout": kept_by(),
    "PyTorch, fused attention": kept_by(attention="sdpa"),
    "PyTorch, full checkpointing": kept_by(checkpointing="full"),
}
for name, amount in ways.items():
    print(f"{name:38}{units.text(amount):>9}")

# %% [markdown]
# The 60 GB are the paper's own count of 12 numbers for each token, layer and column, without the scores, which alone are
# 165 − 84 = 81 GB. Its 8 GB with checkpointing come out at 8.5, log-probabilities included. So the model that is 3 GB takes 25 GB before the first token, and between 9 and 287 GB more after it,
# by what you keep.

# %% [markdown]
# ### Exercise 3.3 · Bug hunt: a table that fits one layer (10 min, ●○○)
#
# This function made a published table of activations, by the paper's formula. It is right for one layer. Repair it.


# %%
def activation_bytes(b: int, s: int, h: int, a: int, L: int) -> int:
    return L * 34 * s * b * h + 5 * a * s * s * b


# %%
check("memory/bug-hunt-table", activation_bytes)

# %%
hint("memory/bug-hunt-table", 1)

# %%
show(exercises.activation_bytes)

# %% [markdown]
# ## The calculator
#
# Everything above in one panel. Where do its formulas come from? From the step itself, run once, small, with a prime for each letter: a storage of
# $4 \cdot 13 \cdot 17 \cdot 29$ bytes can only be $4bsv$. So, for a given kind of step, every line of the ledger is a polynomial in the letters $L, b, s, h, a, g, d, f, v$, at every moment; the page holds those of the moments
# that can be the fullest, and puts your numbers into them. So each amount stands beside its formula, and the name of a component leads to where it is derived. It needs no kernel.

# %%
calculator.Calculator(
    "gpt2-xl", "gpt2", "gpt3-175b", "llama-2-70b", "llama-3.1-8b", "llama-3.1-70b",
    "llama-3.1-405b", "mistral-7b", "qwen2-7b", "qwen2-72b",
)  # fmt: skip

# %% [markdown]
# A step is one micro-batch: with accumulation (lab 05) the gradients lie there during the next forward pass as well. *foreach* is how PyTorch's AdamW steps on a GPU unless told otherwise: fast, with a
# working copy of all weights, and that is where the peak of a small batch comes from. Like all predictions of this lab it counts the operations of a CPU; a sequence shorter than GPT's learned positions
# counts as a model with fewer of them.
#
# Find the cheapest way to train Llama-3.1-8B with 4096 tokens on 8 H100s. Which line decides? For another model or your own, `calculator.Calculator("qwen2-0.5b", mine=ModelConfig.from_hf("config.json"))`; for a sweep
# `memory.predict`, about 0.1 ms each once it has met the kind of step:

# %%
short = dataclasses.replace(llama, seq_len=4096)
eight, h100 = Mesh(dp=8), Hardware.named("H100")


def largest_batch(**options):
    """The most sequences of 4096 tokens in a micro-batch on each of 8 H100s."""
    options |= {"attention": "sdpa", "stepping": "fused"}
    for batch in range(1, 100):
        run = TrainConfig(micro_batch=batch, global_batch=8 * batch, **options)
        if not memory.predict(short, run, mesh=eight, hardware=h100).fits:
            return batch - 1


for zero in range(4):
    policies = ("none", "full")
    fits = {kind: largest_batch(zero=zero, checkpointing=kind) for kind in policies}
    print(f"ZeRO {zero}:", fits)

# %% [markdown]
# With checkpointing, level 2 fits one sequence fewer than level 1. What does each hold at its peak with 11 of them?

# %%
options = {"checkpointing": "full", "attention": "sdpa", "stepping": "fused"}
for zero in (1, 2):
    run = TrainConfig(micro_batch=11, global_batch=88, zero=zero, **options)
    top = memory.predict(short, run, mesh=eight)
    held = {name: units.text(amount) for name, amount in top.by("component").items()}
    print(f"ZeRO {zero}, {top.event}:", held)

# %% [markdown]
# The peak is at the loss, at both levels. At level 1 no gradient is there yet; at level 2 the course's ZeRO keeps each rank's share of them from one step to the next.

# %% [markdown]
# ## In practice
#
# - **`torch.cuda.max_memory_allocated()`** is the peak of what tensors take, rounded up to blocks; **`max_memory_reserved()`** is what the driver sees. `nvidia-smi` shows more than either: the CUDA context and NCCL's
#   buffers are outside of PyTorch.
# - **`torch.cuda.memory._record_memory_history()`**, then `_dump_snapshot("file")`: every allocation with its stack, to be opened at pytorch.org/memory_viz.
# - **`PYTORCH_ALLOC_CONF`** (before: `PYTORCH_CUDA_ALLOC_CONF`, still read) takes the two remedies: `expandable_segments:True` or `max_split_size_mb:512`. The first is what to try when the message of an error says that much
#   is "reserved by PyTorch but unallocated".
# - **Megatron-LM** prints its `report_theoretical_memory` beside the measured memory at the first log: formulas for sequence parallelism with selective recomputation. `--record-memory-history` writes PyTorch's snapshot
#   to `--memory-snapshot-path`.
# - **torchtitan** logs peak active and reserved memory; `scripts/estimate/estimation.py` runs the model on fake tensors (`--memory_estimation.enabled` in many versions, `.enable` in others).
# - **`torch.distributed._tools.mem_tracker.MemTracker`** does the same in PyTorch: under `FakeTensorMode` it tracks a model that does not fit. The prediction above agrees with it; a test compares the two.
# - **`accelerate estimate-memory`** counts weights, and a multiple of them for training with Adam; **DeepSpeed**'s `estimate_zero2_model_states_mem_needs_all_live` and `estimate_zero3_…` count
#   weights, gradients and optimizer states. Activations are in neither.

# %% [markdown]
# ## Errata
#
# **The Qwen2 table of a book chapter** gives activations at $b = 1$, $s = 4096$ as a linear and a quadratic term. With its own formula:

# %%
stated = {"qwen2-0.5b": (2.9, 2), "qwen2-7b": (3.9, 4), "qwen2-72b": (71, 8)}
for name, (linear, quadratic) in stated.items():
    h, a, L = ModelConfig.named(name).letters("h a L")
    right = L * 34 * 4096 * h / 1e9, L * 5 * a * 4096**2 / 1e9
    print(f"{name:11} stated {linear:5} + {quadratic} GB", end="   ")
    print(f"by the formula {right[0]:5.1f} + {right[1]:5.1f} GB")

# %% [markdown]
# The quadratic term has lost its factor L, 3.9 looks like a 13.9 that lost a digit, and 72B has 80 layers, not 64 as the table says. And Qwen2 is not the model of the formula: GQA, SwiGLU, RMSNorm, no dropout, fused attention. What it keeps, counted:

# %%
for name in stated:
    qwen = dataclasses.replace(ModelConfig.named(name), seq_len=4096)
    plain, fused = (
        units.text(memory.activations(qwen, one(attention=kind)).total)
        for kind in ("plain", "sdpa")
    )
    print(f"{name:11} plain {plain:>8}   fused {fused:>8}")

# %% [markdown]
# **"34 + 5·a/h"** (notes on a scaling guide): a factor $s$ is lost. For GPT-3 at 2048 tokens that is 82 GB instead of 275.
#
# **"Activations scale linearly with sequence length"** (the same): linearly with the batch, and with the square of the sequence as long as scores are kept.
#
# **"Around 20 bytes per parameter for everything else"** (a handbook): 12 are states; the other 8 stand for activations and buffers, which do not depend on the number of parameters.
#
# **"The multiplier 2 is because both K and V are cached"** (the book chapter): that is a cache of *inference*. Training keeps queries, keys and values of the batch, once.
#
# **"2Ψ bytes for fp16 parameters and gradients"** (a summary of the ZeRO paper): 2Ψ each.

# %% [markdown]
# ## Summary
#
# > - Parameters are counted from the configuration, to the last one: GPT-2 XL has 1 557 611 200, Llama-3.1-8B 8 030 261 248.
# >   <!-- claim: [config.ModelConfig.named(name).num_params for name in ("gpt2-xl", "llama-3.1-8b")] == [1557611200, 8030261248] -->
# > - Before the first token AdamW takes 16 bytes per parameter, in fp32 as in bf16 with master weights; 18 or 20 with gradients in fp32.
# >   <!-- claim: [memory.model_states(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=1, global_batch=1, precision=p, fp32_gradients=g)).total // 1557611200 for p, g in (("fp32", False), ("bf16", False), ("bf16", "only"), ("bf16", True))] == [16, 16, 18, 20] -->
# > - A layer keeps sbh(34 + 5as/h) bytes by the paper; what PyTorch keeps beyond it has a name, byte for byte.
# >   <!-- claim: memory.korthikanti(b=1, s=2048, h=12288, a=96).total == 2048 * 12288 * (34 + 80) -->
# > - Linear in batch and layers; in the sequence linear plus quadratic, until fused attention removes the square. They meet at 435 tokens for heads 64 wide, at 870 for 128.
# >   <!-- arithmetic: [34 * d / 5 for d in (64, 128)] == [435.2, 870.4] -->
# > - The peak is where most things meet: after the loss where activations are large, in the optimizer where they are not.
# >   <!-- claim: [memory.predict(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=b, global_batch=b, checkpointing=p)).phase for b, p in ((32, "none"), (1, "full"))] == ["backward", "optimizer"] -->
# > - Free is not the same as available: half of 40 MiB free, in pieces of 5, and 10 MiB find no room.
# >   <!-- claim: (lambda gpu: [[gpu.free(a) for a in [gpu.alloc(5 * 2**20) for _ in range(8)][::2]], gpu.largest_free][1])(memory.Allocator(40 * 2**20)) == 5 * 2**20 -->
# > - A large block that is not cut, or a segment that can grow, makes room again for the batch of 6 GiB.
# >   <!-- claim: [(lambda gpu: [gpu.free(gpu.alloc(6 * 2**30)), gpu.alloc(2**30), gpu.alloc(6 * 2**30) >= 0][2])(memory.Allocator(10 * 2**30, **o)) for o in (dict(max_split_size=2**29), dict(expandable_segments=True))] == [True, True] -->
#
# Next: lab 04 pays for less memory with time.

# %% [markdown]
# ## References
#
# - V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, arXiv:2205.05198: section 4, the formula line by line; table 2.
# - S. Rajbhandari et al., *ZeRO*, arXiv:1910.02054: section 3, model states, activations and fragmentation of GPT-2.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): memory of a training step.
# - A. Yang et al., *Qwen2 technical report*, arXiv:2407.10671: table 1.
# - PyTorch, notes on CUDA memory management, and the comments of `c10/cuda/CUDACachingAllocator.cpp`; documentation of `torch.cuda.memory`.
