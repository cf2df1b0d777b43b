# %% [markdown]
# # 08 · Train one model on many devices
#
# **Four devices hold a copy of the model each and a quarter of the batch. What must they tell each other, and when, so that training is the same as on one?**
#
# *90 min, and 30 further · before this: labs 05 and 07 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - give every rank its share of the data, so that no example is lost and no rank waits for another (exercise 8.1),
# - keep replicas equal to the last bit, with gradients that travel while others are computed (exercise 8.2),
# - find what is wrong with a wrapper whose gradients are right (exercise 8.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import contextlib

import torch
from torch import nn

from labutils import anatomy, collectives, data_parallel, measure, precision, units
from labutils import predict as formulas
from labutils.accumulation import micro_batches
from labutils.config import Hardware, Link, Mesh, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore, log
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# Every device computes the gradient of *its* examples, and training needs the mean over all devices: an all-reduce (lab 07). The backward pass runs from
# the last layer to the first. Play it: gradients drop into buckets, and a bucket that is complete leaves while others still fill.

# %%
layers = {f"layer {i}": 1_000_000 for i in range(1, 6)}
sizes = {"embed": 600_000, **layers, "head": 600_000}
found = data_parallel.buckets(sizes, 2_000_000)
buckets = [dict(zip(each.names, each.sizes, strict=True)) for each in found]
plots.bucket_animation(buckets, bucket_bytes=2_000_000)

# %% [markdown]
# Data parallelism is **a copy of everything on every device, one mean of gradients per step, and as little waiting for it as possible.**

# %% [markdown]
# ## Is the mean over devices the gradient of the batch?
#
# A small GPT, eight sequences, four ranks. All is in float64: what differs is a mistake and not rounding.

# %%
sizes = dict(num_layers=2, d_model=64, num_heads=4, d_ff=256)
config = ModelConfig(**sizes, vocab_size=128, seq_len=32)
draw = torch.Generator().manual_seed(1)


def sequences(count):
    """Inputs and targets."""
    return tuple(torch.randint(128, (count, 32), generator=draw) for _ in range(2))


def mine(rank, data):
    """This rank's share of the sequences."""
    return tuple(side[rank.rank :: rank.size] for side in data)


# %%
def model(seed=0):
    return GPT(config, generator=torch.Generator().manual_seed(seed)).double()


def gradient(net):
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


# %% [markdown]
# Each rank takes two of the eight sequences, calls `backward()`, and all-reduces its gradient.
#
# > How large is the result, compared with the gradient of all eight on one device?

# %%
predict("all-reduced/times", times=1)

# %%
world, batch = World(4), sequences(8)
whole = model()
whole.loss(*batch).backward()


def added_up(rank):
    net = model()
    net.loss(*mine(rank, batch)).backward()
    return rank.comm("dp").all_reduce(gradient(net))


times = (world.run(added_up)[0].norm() / gradient(whole).norm()).item()
reveal("all-reduced/times", times=round(times, 9))

# %% [markdown]
# All-reduce *sums*, and each loss is a mean over its own two sequences:
#
# $$ \frac18\sum_{j=1}^{8} \nabla\ell_j \;=\; \frac14\sum_{r=1}^{4}\Bigl(\frac12\sum_{j\,\in\,r}\nabla\ell_j\Bigr). $$
#
# Here $\nabla\ell_j$ is the gradient of sequence j. Divide by the number of ranks, and the two are one gradient, if all ranks have equally many targets: here, equally many sequences of one length (lab 05).
#
# ### Exercise 8.1 · Deal out the data (10 min, ●○○)
#
# Every rank makes this call in a process of its own, without talking to the others.


# %%
def my_examples(length: int, rank: int, size: int, epoch: int) -> list[int]:
    """The indices, out of `length` examples, that `rank` of `size` reads in `epoch`.

    They are shuffled anew in each epoch. Every example is read, and all ranks have
    equally many; where that is not possible otherwise, some examples are read twice.
    """
    raise NotImplementedError


# %%
check("data_parallel/sampler", my_examples)

# %%
hint("data_parallel/sampler", 1)

# %%
show(data_parallel.sampler)

# %% [markdown]
# PyTorch's `DistributedSampler` returns the same indices, and those of epoch 0 again until you call `set_epoch`.

# %% [markdown]
# ## Who adds the gradients up?
#
# | design | who has an optimizer | what travels in each step |
# |---|---|---|
# | *parameter server* | rank 0 | weights from rank 0 to everybody, gradients from everybody to rank 0 |
# | `nn.DataParallel` | rank 0, which also computes the loss | the same, and inputs, outputs and the gradients of outputs |
# | `DistributedDataParallel` (DDP) | every rank | one all-reduce of gradients |
#
# > GPT-2 has 124 million parameters, so 498 MB of fp32 gradients. On eight ranks, how much does the server send in a step?

# %%
predict("server/sends", GB=0.5)

# %%
gpt2 = ModelConfig.named("gpt2")
weights = collectives.sent("broadcast_star", nbytes=4 * gpt2.num_params, n=8)
reveal("server/sends", GB=round(max(weights.by("rank").values()) / 1e9, 2))

# %% [markdown]
# These are the weights for seven workers, each served by the server itself, which receives as many gradients. On a ring no rank sends more than twice the gradient, however many there are.
# (Workers could pass the weights on. On GPUs `DataParallel` has NCCL do so: rank 0 then sends them once. One rank steps for all even so, and the others wait.)
#
# The outputs that `DataParallel` gathers grow with the batch. Eight sequences, in fp32:

# %%
units.text(8 * gpt2.seq_len * gpt2.vocab_size * 4)

# %% [markdown]
# `DataParallel` runs a *thread* per device. Where Python has a global interpreter lock, only one of them executes Python at a time. DDP runs a *process* per device, each with a lock of its own. How much time that costs is not measured here.

# %% [markdown]
# ### Further: what makes a server slow?
#
# Run it. One step of SGD on eight ranks with 8 MB of gradients: by the server; by *servers everywhere*, each for an eighth of the weights; and by an all-reduce. Are the weights right, what does the busiest rank send and receive, and how far off are the formulas?


# %%
def one_server(comm, w, gradient):
    total = collectives.reduce_star(gradient, comm)  # None elsewhere
    new = w if total is None else w - 0.1 * total / comm.size
    return collectives.broadcast_star(new, comm)


def servers_everywhere(comm, w, gradient):
    mine = collectives.all_to_all_pairwise(gradient, comm)  # my share, from all
    total = mine.view(comm.size, -1).sum(0)
    new = w.chunk(comm.size)[comm.rank] - 0.1 * total / comm.size
    return collectives.all_gather_ring(new, comm)


def by_all_reduce(comm, w, gradient):
    return w - 0.1 * collectives.all_reduce_ring(gradient, comm) / comm.size


def one_step(rank, how):
    w, gradient = torch.zeros(2_000_000), torch.full((2_000_000,), float(rank.rank))
    return how(rank.comm("dp"), w, gradient)


# %%
parts = {
    one_server: ("reduce_star", "broadcast_star"),
    servers_everywhere: ("all_to_all_pairwise", "all_gather_ring"),
    by_all_reduce: ("all_reduce_ring",),
}
with World(8) as eight:
    for how, names in parts.items():
        new = torch.stack(eight.run(one_step, how))  # the mean of 0 to 7 is 3.5
        right = bool((new + 0.35).abs().max() < 1e-6)
        predicted = [collectives.sent(name, nbytes=8e6, n=8) for name in names]
        unexplained = sum(predicted[1:], predicted[0]).diff(eight.ledger).unexplained
        ways = eight.trace.sent, eight.trace.received
        amounts = [units.text(max(way.by("rank").values())) for way in ways]
        print(f"{how.__name__:18} {right}, busiest {amounts}, off by {unexplained}")

# %% [markdown]
# All bytes pass through a single server's links: it sends and receives seven times the model. **Servers everywhere are a reduce-scatter and an all-gather, an all-reduce in its two halves, to the byte.**
# Parameter servers live on where ranks do not wait for each other, or touch few of the weights.
#
# **And `DataParallel`?** Rank 0 deals out weights and inputs, gathers the outputs, computes the loss alone, and deals out its gradient by the outputs, here called slopes. On four ranks, each step a star: is the gradient that of the batch, and are all bytes explained?

# %%
def as_data_parallel(rank):
    comm, net = rank.comm("dp"), model(seed=rank.rank)
    w = nn.utils.parameters_to_vector(net.parameters()).detach()
    new = collectives.broadcast_star(w, comm)
    nn.utils.vector_to_parameters(new, net.parameters())
    outputs = net(collectives.scatter_star(batch[0], comm))
    gathered = collectives.gather_star(outputs.detach(), comm)
    slopes = torch.empty(8, 32, 128).double()
    if comm.rank == 0:  # the others wait
        gathered.requires_grad_()
        loss = nn.functional.cross_entropy(gathered.flatten(0, 1), batch[1].flatten())
        (slopes,) = torch.autograd.grad(loss, gathered)
    outputs.backward(collectives.scatter_star(slopes, comm))
    return collectives.reduce_star(gradient(net), comm)


def through_rank_0(weights, inputs, outputs, n):
    """What travels from rank 0 or to it, by name."""
    stars = [
        ("weights", "broadcast_star", weights), ("inputs", "scatter_star", inputs),
        ("outputs", "gather_star", outputs), ("slopes", "scatter_star", outputs),
        ("gradients", "reduce_star", weights),
    ]  # fmt: skip
    return {name: collectives.sent(how, nbytes=k, n=n) for name, how, k in stars}


# %%
found = world.run(as_data_parallel)[0]
close = torch.allclose(found, gradient(whole), rtol=0, atol=1e-12)
told = through_rank_0(8 * config.num_params, 8 * 8 * 32, 8 * 8 * 32 * 128, n=4)
unexplained = sum(told.values(), Ledger()).diff(world.ledger).unexplained
print(f"right: {close}, off by {unexplained}")

# %% [markdown]
# The gradients of the parts add up to that of the batch without a division, because rank 0 takes the mean over all outputs. GPT-2 on eight devices, with one sequence on each, and with eight, in fp32:

# %%
for b in (1, 8):
    tokens = 8 * b * gpt2.seq_len
    outputs = 4 * tokens * gpt2.vocab_size
    told = through_rank_0(4 * gpt2.num_params, 8 * tokens, outputs, n=8)
    print(b, {name: units.text(each.total) for name, each in told.items()})

# %% [markdown]
# Outputs outweigh the weights as soon as a rank has more than Ψ/(s·v) = 2.4 sequences. (With the loss inside the module a number travels in their place.)
# <!-- claim: round((lambda m: m.num_params / (m.seq_len * m.vocab_size))(config.ModelConfig.named("gpt2")), 1) == 2.4 -->
# Nothing here overlaps: rank 0 needs all outputs before it has a loss, and all gradients before it steps, while seven devices wait.
# The 0.87 GB that each rank of DDP sends can travel while other gradients are computed, as the next question shows.

# %% [markdown]
# ## When may a gradient leave?
#
# The plainest data parallelism is a loop after the backward pass:

# %%
show(data_parallel.average_gradients)

# %% [markdown]
# The network idles while gradients are computed, and the ranks while they travel. But autograd says when a gradient is complete: `parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` right after a gradient has been added to `.grad`.
#
# > The token embedding is the first layer of the forward pass. In this model its matrix is also the last one, *tied* to the output. When does its gradient come: first,
# > last, or twice?

# %%
predict("ready/embedding", when="first")

# %%
order, watched = [], model()
for name, parameter in watched.named_parameters():
    parameter.register_post_accumulate_grad_hook(
        lambda _, name=name: order.append(name)
    )
watched.loss(*batch).backward()
print(f"{len(order)} gradients. First: {order[:2]}. Last: {order[-2:]}.")

# %%
places = [place for place, name in enumerate(order) if name == "tokens.weight"]
reveal("ready/embedding", when="last" if places == [len(order) - 1] else "not last")

# %% [markdown]
# Layers come in reverse, and a gradient is complete when its *last* contribution is there. The tied matrix gets one from the output, at the beginning of the backward pass,
# and one from the embedding, at the end. No computation is left for it to hide behind. In GPT-2 it is large:

# %%
embedding = gpt2.vocab_size * gpt2.d_model / gpt2.num_params
print(f"{embedding:.0%} of all gradient bytes come last")

# %% [markdown]
# ### Exercise 8.2 · Reduce as you go (15 min, ●●○)
#
# Make `module` a replica: all ranks start from rank 0's weights, and after every `backward()` each `.grad` is the mean over ranks. You need
# `comm.broadcast(x, out=x)` and `comm.all_reduce(x)`. A layer may be frozen. The check looks at values, at bytes, and at *when* you send.


# %%
def synchronize(module: nn.Module, comm) -> None:
    """Broadcast once, then reduce every gradient in a hook of its parameter."""
    raise NotImplementedError


# %%
check("data_parallel/hooks", synchronize)

# %%
hint("data_parallel/hooks", 1)

# %%
show(data_parallel.Replica.gradient_ready)

# %% [markdown]
# The hook is given the *parameter*. Reduce that in place of its gradient, and the bytes and the first loss are right, while each rank steps along a gradient of its own.

# %% [markdown]
# ## Further: how large should a bucket be?
#
# A bucket of B bytes on a ring of N ranks, whose links have latency λ
# and bandwidth bw, takes
#
# $$ t(B) \;=\; 2(N-1)\,\lambda \;+\; 2\,\tfrac{N-1}{N}\,\frac{B}{\mathrm{bw}}, $$
#
# and the next one waits for it. Latency and bytes cost the same at B = N·λ·bw.
#
# The twelve blocks of GPT-2 are 192 tensors, 340 MB. Thirty-two ranks with links of 10 µs and 10 GB/s, and a backward pass of 80 ms:

# %%
link = Link(latency=10e-6, bandwidth=10e9)
with torch.device("meta"):  # shapes without memory
    blocks = [parameter.nbytes for parameter in GPT(gpt2).blocks.parameters()]
layers = [(nbytes, 0.080 * nbytes / sum(blocks)) for nbytes in blocks]
print(len(layers), "tensors; N·λ·bw =", units.text(32 * link.latency * link.bandwidth))

# %% [markdown]
# > A bucket for each tensor can leave the earliest. How long does the step take from the start of the backward pass to the last mean?

# %%
predict("buckets/one-each", ms=80)


# %%
def backward(size):
    return data_parallel.backward_timeline(layers, bucket_bytes=size, n=32, link=link)


plots.overlap(
    a_bucket_for_each_tensor=backward(1),
    buckets_of_25_MB=backward(25_000_000),
    one_bucket_for_all=backward(10**9),
)

# %%
reveal("buckets/one-each", ms=round(1e3 * backward(1).makespan))

# %% [markdown]
# With a bucket for each tensor the network is busy to the end, mostly with latencies. With one bucket for all it has nothing to do until the backward pass is over. Best is about the smallest bucket with which the network keeps up: while it travels, the backward pass, which makes S bytes in T seconds, must not fill the next one. From $t(B) \le T\,B/S$, with N for N − 1:
#
# $$ B \;\ge\; \frac{2N\lambda}{T/S - 2/\mathrm{bw}}. $$
#
# Here that is 18 MB, on links of 30 GB/s 4 MB, on a ring of 1024 ranks 580 MB. Where the denominator is not positive, no bucket keeps up. DDP's default is 25 MiB. Megatron-LM's grows with N, as this bound does.
# <!-- claim: (lambda sizes: [round(2 * 32 * 1e-5 / (0.08 / sum(sizes) - 2 / bw) / 1e6) for bw in (1e10, 3e10)] + [round(2 * 1024 * 1e-5 / (0.08 / sum(sizes) - 2 / 1e10) / 1e6, -1)] + [data_parallel.backward_timeline([(n, 0.08 * n / sum(sizes)) for n in sizes], bucket_bytes=18_000_000, n=32, link=config.Link(1e-5, 1e10)).makespan < min(data_parallel.backward_timeline([(n, 0.08 * n / sum(sizes)) for n in sizes], bucket_bytes=b, n=32, link=config.Link(1e-5, 1e10)).makespan for b in (9_000_000, 36_000_000))])([p.nbytes for p in __import__("labutils.model").model.GPT(config.ModelConfig.named("gpt2")).blocks.parameters()]) == [18, 4, 580, True] -->
#
# On 1024 ranks that is more than the 340 MB there are: no bucket keeps up, and latency decides. Milliseconds with buckets of 25 MB, of 200 MB, and with one for all:

# %%
on_1024 = dict(n=1024, link=link)
for size in (25_000_000, 200_000_000, 10**9):
    found = data_parallel.backward_timeline(layers, bucket_bytes=size, **on_1024)
    print(f"{size / 1e6:5.0f} MB: {1e3 * found.makespan:.0f} ms")

# %% [markdown]
# ## How much of the communication can you hide?
#
# A bucket travels while the next layer is computed. Only the last one has nothing left to hide behind. So, *if the network keeps up*,
#
# $$ \text{hidden} \;=\; 1 - \frac{S_{\text{last}}}{\sum_i S_i}, $$
#
# where $S_i$ are the bytes of bucket i. Now four processes, and a clock. Two cores are too few to compute for four ranks and send as well: the layers of this chain *sleep* in their backward
# pass, as a CPU does while a GPU works. Twelve layers of 1 MB, 20 ms each; of three steps the one of median length:

# %%
twelve = [(1_000_000, 0.020)] * 12
processes = World(4, engine="processes")


def sleeping(rank, overlap):
    chain = rigs.data_parallel.waiting_chain(twelve)
    comm, timelines = rank.comm("dp"), []
    options = dict(bucket_bytes=1_000_000, overlap=overlap)
    replica = data_parallel.replicate(chain, comm, **options)
    for _ in range(3):
        comm.barrier()
        replica(torch.ones(1)).backward()
        timelines.append(replica.timeline)
    return timelines


def median_step(overlap):
    steps = map(sum, zip(*processes.run(sleeping, overlap), strict=True))
    return sorted(steps, key=lambda step: step.makespan)[1]


# %% tags=["nbval-ignore-output"]
after, during = median_step(overlap=False), median_step(overlap=True)
plots.overlap(after_the_backward_pass=after, during_the_backward_pass=during)

# %% [markdown]
# Every rank's clock starts as it leaves a barrier. *Hidden* is the share of the time with a message on its way in which the same rank computes, taken over all ranks. The formula says 92 % here. Is more than half of it hidden on this machine, during the backward pass and after it?

# %%
{"during": during.hidden > 0.5, "after": after.hidden > 0.5}

# %% [markdown]
# So keep the *last* bucket small. DDP's default, `bucket_cap_mb=25`, counts MiB: buckets of 26.2 MB, and only the *first* is smaller, 1 MiB; `bucket_cap_mb_list` (torch 2.13) sets each.
#   <!-- claim: (torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * torch.nn.parallel.distributed._MB_TO_BYTES, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES) == (25 * 2**20, 2**20) -->

# %% [markdown]
# ### Further: when does the network keep up?
#
# Take the 32 blocks of Llama-3.1-8B on 64 H100s, with gradients in bf16, a bucket for each block.
#
# > How many tokens must a rank have, in the micro-batch after which it reduces, until all but the last bucket hide?

# %%
predict("hidden/tokens", tokens=500)

# %% [markdown]
# A weight takes 4 FLOPs per token in the backward pass, and its gradient of g bytes travels as 2g bytes. With F FLOPs per second and bw bytes per second, and T tokens,
#
# $$ \frac{4\,\Psi\,T}{F} \;\ge\; \frac{2\,g\,\Psi}{\mathrm{bw}}\,\frac{N-1}{N} \quad\Longleftrightarrow\quad T \;\ge\; \frac g2\cdot\frac{F}{\mathrm{bw}}\,\frac{N-1}{N}. $$
#
# The model's size cancels. (With full recomputation a weight takes 6 FLOPs there, and T is two thirds of that.) Take F as 601 TFLOP/s, 61 % of the H100's peak, and bw as 320 GB/s, what the eight links of a node carry (lab 09 says where both are from). How much is hidden, latencies included, at half, once, twice and four times that T, on 64 ranks and on 1024:

# %%
h100 = Hardware.named("H100")
weights = sum(anatomy.units(ModelConfig.named("llama-3.1-8b"))["blocks.0"])


def enough(n, g):
    """Tokens that hide gradients of g bytes, latencies left out."""
    return g / 2 * h100.rate() / h100.ring(n).bandwidth * (n - 1) / n


def hides(n, g, tokens):
    blocks = [(g * weights, 4 * weights * tokens / h100.rate())] * 32
    how = dict(bucket_bytes=g * weights, n=n, link=h100.ring(n))
    return f"{data_parallel.backward_timeline(blocks, **how).hidden:.0%}"


# %%
for n, g in ((64, 2), (64, 4), (1024, 2)):
    T = enough(n, g)
    shares = [hides(n, g, k * T) for k in (0.5, 1, 2, 4)]
    print(f"{n:4} ranks, {g} bytes: T = {T:,.0f}, hidden {shares}")

# %%
reveal("hidden/tokens", tokens=round(enough(64, 2)))

# %% [markdown]
# On 64 ranks about four fifths are hidden at T, and all but the last bucket at twice that: the rest is latency. On 1024 ranks the law fails. A ring is then 2046 hops long, and at T four fifths of the communication is waited for. Here each hop takes 5 µs. Seven of eight stay inside a node: if those take 2 µs, 65 % are still waited for.
# There you need larger buckets, more tokens, or an all-reduce of fewer steps (lab 07).
# <!-- claim: (lambda h, w: 100 - round(100 * data_parallel.backward_timeline([(2 * w, 4 * w * 1877 / h.rate())] * 32, bucket_bytes=2 * w, n=1024, link=config.Link((7 * 2e-6 + 5e-6) / 8, h.ring(1024).bandwidth)).hidden))(config.Hardware.named("H100"), sum(anatomy.units(config.ModelConfig.named("llama-3.1-8b"))["blocks.0"])) == 65 -->
#
# **What should travel, bf16 or fp32?** Half the bytes hide behind half the tokens. But a ring adds n numbers one after the other, and a bf16 sum is rounded at each hop. A tree rounds log₂ n times. How far off is the sum of random bf16 gradients, by one all-reduce on a ring, by a tree, and if it is rounded once, at the end?

# %%
for n in (4, 16, 64):
    drawn = torch.randn(n, 4096, generator=torch.Generator().manual_seed(0)).bfloat16()

    def in_bf16(rank, drawn=drawn):
        return rank.comm("dp").all_reduce(drawn[rank.rank])

    with World(n) as ranks:
        total = ranks.run(in_bf16)[0]
    exact = drawn.double().sum(0)
    tree = precision.pairwise_sum(drawn.float().T, "bf16")
    kinds = {"ring": total, "tree": tree, "once": exact.bfloat16()}
    off = {how: (y - exact).norm() / exact.norm() for how, y in kinds.items()}
    print(f"{n:2} ranks:", ", ".join(f"{how} {each:.1%}" for how, each in off.items()))

# %% [markdown]
# On a ring the error grows with the number of ranks, on a tree much more slowly. A sum in fp32 that is rounded once stays at 0.2 %. Many training codes reduce in fp32, as FSDP can with `reduce_dtype=torch.float32` (lab 09).

# %% [markdown]
# ## What do micro-batches change?
#
# With accumulation (lab 05) there are several backward passes to a step, and every one of them calls the hooks.
#
# > Four micro-batches, a reduction in each. Are the gradients right? And how many times the bytes are sent?

# %%
predict("accumulation/bytes", times=1)

# %%
many = sequences(32)


def accumulated(rank, quiet, k=4):
    replica = data_parallel.replicate(model(seed=rank.rank), rank.comm("dp"))
    for i, (inputs, targets) in enumerate(micro_batches(mine(rank, many), 8 // k)):
        with replica.no_sync() if quiet and i + 1 < k else contextlib.nullcontext():
            outputs = replica(inputs).flatten(0, 1)
            (nn.functional.cross_entropy(outputs, targets.flatten()) / k).backward()
    return gradient(replica)


# %%
right, sent = model(), {}
right.loss(*many).backward()
for quiet in (False, True):
    found = world.run(accumulated, quiet)[0]
    sent[quiet] = world.ledger.only(rank=0, name="all_reduce").total
    equal = torch.allclose(found, gradient(right), rtol=0, atol=1e-12)
    print(f"no_sync: {quiet!s:5}  right: {equal}  sent: {units.text(sent[quiet])}")

# %%
reveal("accumulation/bytes", times=sent[False] // sent[True])

# %% [markdown]
# Right both times, so no test of values finds it. `no_sync()` lets gradients add up on their own rank until the last micro-batch.

# %% [markdown]
# ## What must all ranks agree on?
#
# The contracts of DDP:
#
# | about | DDP promises | you must | otherwise |
# |---|---|---|---|
# | weights | rank 0's at the start | change them by the optimizer alone | replicas drift apart |
# | order | buckets leave in one order | call your own collectives in one order | wrong sums, or a deadlock |
# | gradients | it waits for all of them | use every parameter, or set `find_unused_parameters`: what does not come from a rank counts as 0, and what comes from none stays None | an error: a bucket never fills |
# | skipped steps (lab 02) | equal gradients | look for inf, and clip, *after* the reduction | the rank with the inf skips alone, and the others step along it |
# | steps | nothing | make equally many (exercise 8.1), or use `join()` | a deadlock |
# | targets | a mean over ranks | take equally many, or weigh by `data_parallel.share` of their number | *shown below* |
# | buffers | rank 0's, before each forward pass (`broadcast_buffers`) | use `SyncBatchNorm`, or no BatchNorm | each rank normalizes by its own rows |
# | random numbers | nothing | seed dropout per rank | every rank drops the same units |
#
# **An uneven last batch.** Ten sequences are three, three, two and two. Unweighted, the last four count too much:


# %%
def uneven(rank, weighted):
    net, comm, own = model(), rank.comm("dp"), mine(rank, ten)
    weight = data_parallel.share(len(own[0]), comm) if weighted else 1
    (weight * net.loss(*own)).backward()
    data_parallel.average_gradients(net, comm)
    return gradient(net)


ten, right = sequences(10), model()
right.loss(*ten).backward()
for weighted in (False, True):
    error = (world.run(uneven, weighted)[0] - gradient(right)).norm()
    print(f"weighted: {weighted!s:5}  off by {error / gradient(right).norm():.1%}")

# %% [markdown]
# ### Exercise 8.3 · Bug hunt: the wrapper that passed its test (20 min, ●●●)
#
# A wrapper with buckets, and its test: every rank gets the right gradient. Three things are wrong all the same. Repair them. A layer may be frozen, and one `no_sync()` may stand inside another.


# %%
class Buckets:
    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm = module, comm
        self.bucket_bytes, self.waiting = bucket_bytes, []
        for parameter in filter(lambda p: p.requires_grad, module.parameters()):
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        self.waiting.append(parameter)
        if sum(p.nbytes for p in self.waiting) >= self.bucket_bytes:
            self.flush()

    def flush(self):
        sums = self.comm.all_reduce(torch.cat([p.grad.flatten() for p in self.waiting]))
        for p in self.waiting:
            mine, sums = sums[: p.numel()], sums[p.numel() :]
            p.grad.copy_(mine.view_as(p) / self.comm.size)
        self.waiting.clear()

    @contextlib.contextmanager
    def no_sync(self):
        yield

    def __call__(self, *args):
        return self.module(*args)


# %%
def its_test(rank):
    net = nn.Linear(4, 2, bias=False)
    nn.init.ones_(net.weight)
    wrapped = Buckets(net, rank.comm("dp"), bucket_bytes=32)
    wrapped(torch.full((1, 4), rank.rank + 1.0)).sum().backward()
    return bool((net.weight.grad == 2.5).all())


world.run(its_test)

# %%
check("data_parallel/bug-hunt", Buckets)

# %%
hint("data_parallel/bug-hunt", 1)

# %% [markdown]
# In the library:

# %%
show(data_parallel.Replica.backward_done)

# %%
show(data_parallel.Replica.no_sync)

# %% [markdown]
# ## Further: is it as good as PyTorch's?
#
# PyTorch's DDP runs on the same processes, over gloo. After three steps: equal weights, bytes held, bytes sent.

# %%
sizes = dict(num_layers=4, d_model=128, num_heads=4, d_ff=512)
medium = ModelConfig(**sizes, vocab_size=128, seq_len=32)


def train(net, wrapper, data):
    """Weights and states after three steps, and the storages that gradients lie in."""
    optimizer = torch.optim.AdamW(net.parameters(), eps=1e-4)  # above rounding noise
    for _ in range(3):
        optimizer.zero_grad()
        outputs = wrapper(data[0]).flatten(0, 1)
        nn.functional.cross_entropy(outputs, data[1].flatten()).backward()
        optimizer.step()
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    places = {weight.grad.untyped_storage().data_ptr() for weight in net.parameters()}
    return weights, measure.model_states(net, optimizer), len(places)


# %%
def trained(rank, whose):
    net = GPT(medium, generator=torch.Generator().manual_seed(rank.rank))
    comm = rank.comm("dp")
    if whose == "ours":
        replica = data_parallel.replicate(net, comm)
    else:
        options = dict(process_group=comm.group, gradient_as_bucket_view=True)
        replica = nn.parallel.DistributedDataParallel(net, **options)
    return train(net, replica, mine(rank, batch))


# %%
alone = GPT(medium, generator=torch.Generator().manual_seed(0))
expected, *_ = train(alone, alone, batch)
for whose in ("theirs", "ours"):
    (first, states, places), (second, *_), *_ = processes.run(trained, whose)
    right = torch.allclose(first, expected, rtol=0, atol=1e-6)
    same, held = torch.equal(first, second), units.text(states.total)
    told = f"{whose:6} equal: {right}, ranks the same bits: {same}"
    print(f"{told}, {held} held, gradients in storages: {places}")

# %%
numbers = dict(nbytes=4 * medium.num_params, n=4)
sent = collectives.sent("broadcast_tree", name="broadcast", **numbers)
sent += collectives.sent("all_reduce_ring", name="all_reduce", **numbers).scaled(3)
sent.diff(processes.ledger)

# %%
setting = TrainConfig(micro_batch=2, global_batch=8, precision="fp32")
formulas.states(medium, setting, Mesh(dp=4)).diff(states)

# %%
processes.close()

# %% [markdown]
# All gradients lie in one or two storages, the buckets, which so add nothing. (Without `gradient_as_bucket_view` DDP's buckets come on top, unseen by this count.) What gloo itself sends is not counted here. `make bench` times both.
#
# ## Further: turn the knobs
#
# The blocks of GPT-2 once more. Find a network on which overlap hides nearly everything, one on which no bucket size helps, and the bucket that suits 128 ranks.


# %%
def knobs(bucket=1e7, ranks=128, bandwidth_GBps=10):
    network = Link(10e-6, bandwidth_GBps * 1e9)
    options = dict(bucket_bytes=int(bucket), n=ranks, link=network)
    return plots.overlap(backward=data_parallel.backward_timeline(layers, **options))


sizes = log(1e5, 1e9, 10, unit="B")
explore(knobs, states=30, bucket=sizes, ranks=[8, 128], bandwidth_GBps=[1, 10, 100])

# %% [markdown]
# ## In practice
#
# **PyTorch DDP.** `DistributedDataParallel(model, device_ids=[local_rank])` under `torchrun`, which starts a process per device. On each of two machines of eight GPUs:
#
# ```bash
# torchrun --nnodes=2 --nproc-per-node=8 \
#     --rdzv-backend=c10d --rdzv-endpoint=first-machine:29400 --rdzv-id=my-run train.py
# ```
#
# | | Accelerate | Lightning | torchtitan 0.2.2 |
# |---|---|---|---|
# | replicas | `accelerator.prepare(model, optimizer, loader)` | `Trainer(strategy="ddp", devices=8, num_nodes=2)` | `parallelism.data_parallel_replicate_degree` |
# | shares of the data | in `prepare` | `use_distributed_sampler=True`, the default | its own data loader |
# | accumulation | `Accelerator(gradient_accumulation_steps=k)`, `with accelerator.accumulate(model):` | `Trainer(accumulate_grad_batches=k)` | `training.global_batch_size` against `training.local_batch_size` |
#
# **Megatron-LM** sends buckets during the backward pass with `--overlap-grad-reduce`; `--ddp-bucket-size` counts *elements*, at least 40 million, and a million per data-parallel rank if that is
# more.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **"a synchronization phase where the outputs from all GPUs are harmonized"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024, on DDP). DDP averages *gradients*; outputs and losses stay <!-- erratum: S2-019 -->
# where they are.
#
# ### True under a condition
#
# **"Each node computes gradients locally"** (lecture slides on multi-GPU training). True where a node has one device. Each *process* does, and there is one per device: two nodes of eight GPUs are sixteen data-parallel ranks. <!-- erratum: S4-044 -->

# %% [markdown]
# ## Summary
#
# > - The gradient of the batch is the *mean* over ranks, if all have equally many targets; all-reduce sums, so divide by N, once.
# >   <!-- claim: world.World(4).run(lambda rank: rank.comm().all_reduce(torch.tensor([1.0])).item()) == [4.0] * 4 -->
# > - On eight ranks a server that serves every worker itself sends GPT-2's weights seven times, 3.48 GB per step; a ring has each rank send 1.75 times its gradient, 0.87 GB.
# >   <!-- claim: [round(max(collectives.sent(way, nbytes=4 * config.ModelConfig.named("gpt2").num_params, n=8).by("rank").values()) / 1e9, 2) for way in ("broadcast_star", "all_reduce_ring")] == [3.48, 0.87] -->
# > - A server for an eighth of the weights on each rank sends what the ring sends: an all-reduce is a reduce-scatter and an all-gather.
# >   <!-- claim: (lambda f: sum(f(a, nbytes=800, n=8).by("rank")[0] for a in ("all_to_all_pairwise", "all_gather_ring")) == f("all_reduce_ring", nbytes=800, n=8).by("rank")[0])(collectives.sent) -->
# > - Gradients come from the last layer to the first. Small buckets pay latency, one bucket for all cannot hide. A tied embedding comes last: 31 % of GPT-2.
# >   <!-- claim: (lambda m: round(100 * m.vocab_size * m.d_model / m.num_params))(config.ModelConfig.named("gpt2")) == 31 -->
# > - If the network keeps up, all but the last bucket can hide: 92 % for twelve equal ones. On a network ten times too slow 9 % do. It keeps up if a rank has (g/2)·F/bw tokens (two thirds of that with full recomputation), for gradients of g bytes and messages much longer than N·λ·bw.
# >   <!-- claim: [round(100 * data_parallel.backward_timeline([(1000, 1.0)] * 12, bucket_bytes=1000, n=2, link=config.Link(0, bw)).hidden) for bw in (2000, 100)] == [92, 9] -->
# > - Look for inf, and clip, after the reduction: all ranks then see the same.
# > - With k micro-batches reduce once per step: without `no_sync` the values are right and the bytes k-fold.
# >   <!-- claim: len({predict.sent(config.ModelConfig.named("gpt2"), config.TrainConfig(micro_batch=1, global_batch=4 * k), config.Mesh(dp=4)).total for k in (1, 8)}) == 1 -->
# > - Data parallelism divides the batch and its activations, not the model: every rank holds all 16 bytes per parameter that Adam takes.
# >   <!-- claim: [round(predict.states(m, config.TrainConfig(micro_batch=1, global_batch=n), config.Mesh(dp=n)).total / m.num_params) for m in [config.ModelConfig.named("gpt2-xl")] for n in (1, 2048)] == [16, 16] -->
#
# Next: [lab 09](09_zero.ipynb) lets every rank hold its part only.

# %% [markdown]
# ## References
#
# - S. Li et al., *PyTorch Distributed: experiences on accelerating data parallel training*, arXiv:2006.15704 (2020): buckets, hooks, overlap, `no_sync`, unused parameters.
# - P. Goyal et al., *Accurate, large minibatch SGD*, arXiv:1706.02677 (2017): section 3, remark 3 (sum against mean); section 4 (reduction during the backward pass).
# - M. Li et al., *Scaling distributed machine learning with the parameter server*, OSDI 2014.
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): data parallelism and its three optimizations.
# - PyTorch 2.13, documentation of `DistributedDataParallel`, `DataParallel` and `DistributedSampler`.
# - Megatron-LM, `megatron/core/distributed/distributed_data_parallel_config.py`; DeepSpeed, *Configuration JSON*; torchtitan, `models/llama3/infra/parallelize.py` and
#   pull request 2458: as of 2025 and 2026.
