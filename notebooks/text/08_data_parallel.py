# %% [markdown]
# # 08 · Train one model on many devices
#
# **Four devices hold a copy of the model each and a quarter of the batch. What must they tell each other, and when, so that training is the same as on one?**
#
# *75 min · before this: labs 05 and 07 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - deal out data so that no example is lost and no rank waits for another (exercise 8.1),
# - keep replicas equal to the last bit, with gradients that travel while others are computed (exercise 8.2),
# - find what is wrong with a wrapper whose gradients are right (exercise 8.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import contextlib
import time

import torch
from torch import nn

from labutils import collectives, data_parallel, measure, memory, units
from labutils.accumulation import micro_batches
from labutils.config import Link, ModelConfig, TrainConfig
from labutils.ledger import Ledger
from labutils.model import GPT
from labutils.precision import LossScaler, autocast
from labutils.teach import plots
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore, log
from labutils.world import DeadlockError, RankError, World

# %% [markdown]
# ## The idea in one picture
#
# Every device computes the gradient of *its* examples, and what training needs is the mean over all devices: an all-reduce (lab 07). The backward pass runs from
# the last layer to the first, so the last layer's gradient is ready long before the first one's. Play it: gradients drop into buckets, and a bucket that is
# complete leaves while others still fill.

# %%
sizes = {"embed": 600_000, **{f"layer {i}": 1_000_000 for i in range(1, 6)}, "head": 600_000}
plots.bucket_animation(data_parallel.buckets(sizes, 2_000_000), bucket_bytes=2_000_000)

# %% [markdown]
# That is data parallelism: **a copy of everything on every device, one mean of gradients a step, and as little waiting for it as possible.**

# %% [markdown]
# ## Is the mean over devices the gradient of the batch?
#
# A small GPT, a batch of eight sequences, four ranks. In float64, so that whatever differs is a mistake and not rounding.

# %%
config = ModelConfig(num_layers=2, d_model=64, num_heads=4, d_ff=256, vocab_size=128, seq_len=32)
draw = torch.Generator().manual_seed(1)
batch = tuple(torch.randint(128, (8, 32), generator=draw) for _ in range(2))


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
world = World(4)
whole = model()
whole.loss(*batch).backward()


def added_up(rank):
    net = model()
    net.loss(*(side[rank.rank :: rank.size] for side in batch)).backward()
    return rank.comm("dp").all_reduce(gradient(net))


times = (world.run(added_up)[0].norm() / gradient(whole).norm()).item()
reveal("all-reduced/times", times=round(times, 9))

# %% [markdown]
# All-reduce *sums*, and each loss is a mean over its own two sequences:
#
# $$ \frac18\sum_{j=1}^{8} \nabla\ell_j \;=\; \frac14\sum_{r=1}^{4}\Bigl(\frac12\sum_{j\,\in\,r}\nabla\ell_j\Bigr). $$
#
# Divide by the number of ranks, and the two are one gradient. It is lab 05 once more, with ranks in place of micro-batches: there time, here space. So is the trap:
# the formula holds when all ranks have equally many examples. Ten sequences on four ranks are 3, 3, 2 and 2.


# %%
def uneven(rank, weigh):
    net, (inputs, targets) = model(), (side.tensor_split(rank.size)[rank.rank] for side in ten)
    share = len(inputs) / 10 if weigh else 1 / rank.size
    (net.loss(inputs, targets) * share).backward()
    return rank.comm("dp").all_reduce(gradient(net))


ten = tuple(torch.randint(128, (10, 32), generator=draw) for _ in range(2))
right = model()
right.loss(*ten).backward()
for weigh in (False, True):
    off = (world.run(uneven, weigh)[0] - gradient(right)).norm() / gradient(right).norm()
    print(f"weighed by examples: {weigh!s:5}  the gradient is off by {off:.0%}")

# %% [markdown]
# Nothing crashes, as in lab 05. Two cures: give each loss its share n_i / Σn (`data_parallel.share` finds it with an all-reduce of 8 bytes), or never let ranks differ.
# Data loaders do the second, and so will you.
#
# ### Exercise 8.1 · Deal out the data (10 min, ●○○)
#
# Every rank makes this call in a process of its own, without talking to the others.


# %%
def my_examples(length: int, rank: int, size: int, epoch: int) -> list[int]:
    """The indices, out of `length` examples, that `rank` of `size` reads in `epoch`: shuffled anew in each epoch, equally many on all ranks."""
    raise NotImplementedError


# %%
check("data_parallel/sampler", my_examples)

# %%
hint("data_parallel/sampler", 1)

# %%
show(data_parallel.sampler)

# %% [markdown]
# PyTorch's `DistributedSampler` does the same, and forgets the epoch unless you call `set_epoch`.

# %% [markdown]
# ## Who adds the gradients up?
#
# Three answers were tried, and the code for each is in the library. First the *parameter server*: one rank hands out the weights, takes in all gradients, and alone
# has an optimizer.

# %%
show(data_parallel.server_step)

# %% [markdown]
# Then PyTorch's `nn.DataParallel`: one process, a thread for each device. In *every* step it copies the model to all devices, scatters the inputs, and gathers the
# **outputs** on the first device, which computes the loss.

# %%
show(data_parallel.replicate_each_step)

# %% [markdown]
# And `DistributedDataParallel`, which you are about to build: a process for each device, weights broadcast *once*, an all-reduce of gradients in each step, an
# optimizer on every rank. Equal gradients through equal optimizers make equal weights, so nobody has to send weights again.
#
# > GPT-2 has 124 million parameters, so 498 MB of fp32 gradients. On eight ranks, how much does the server send in a step?

# %%
predict("server/sends", GB=0.5)

# %%
gpt2 = ModelConfig.named("gpt2")
S = 4 * gpt2.num_params
reveal("server/sends", GB=round(collectives.sent("broadcast_star", nbytes=S, n=8).by("rank")[0] / 1e9, 2))

# %% [markdown]
# Weights to seven workers, and it receives as much again in gradients, through one link. On a ring nobody sends more than twice the gradient, however many ranks
# there are:

# %%
ranks = [2, 4, 8, 16, 32, 64]
busiest = {
    way: [max(collectives.sent(algorithm, nbytes=S, n=n).by("rank").values()) / 1e9 for n in ranks]
    for way, algorithm in {"server": "broadcast_star", "all_reduce": "all_reduce_ring"}.items()
}
plots.curves(ranks, **busiest, log="x", xlabel="ranks", ylabel="sent by the busiest rank (GB)", title="A server sends more with every worker, a ring does not")

# %% [markdown]
# Now run all three on four ranks, every rank with weights of its own at the start. One step, to see who sends how much:


# %%
def mine(rank):
    return tuple(side[rank.rank :: rank.size] for side in batch)


def optimizer_at(rank, net, everywhere=False):
    return torch.optim.AdamW(net.parameters()) if everywhere or rank.rank == 0 else None


def entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


# %%
def server(rank, steps=1):
    net = model(seed=rank.rank)
    optimizer = optimizer_at(rank, net)
    for _ in range(steps):
        data_parallel.server_step(net, rank.comm("dp"), optimizer, lambda part: net.loss(*part), mine(rank))
    return weights(net), measure.model_states(net, optimizer)


def DataParallel(rank, steps=1):
    net = model(seed=rank.rank)
    optimizer = optimizer_at(rank, net)
    for _ in range(steps):
        data_parallel.replicate_each_step(net, rank.comm("dp"), optimizer, entropy, *batch)
    return weights(net), measure.model_states(net, optimizer)


# %%
def DDP(rank, steps=1):
    net = model(seed=rank.rank)
    replica, optimizer = data_parallel.replicate(net, rank.comm("dp")), optimizer_at(rank, net, everywhere=True)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs, targets = mine(rank)
        entropy(replica(inputs), targets).backward()
        optimizer.step()
    return weights(net), measure.model_states(net, optimizer)


# %%
books = {}
for way in (server, DataParallel, DDP):
    world.run(way)
    books[way.__name__] = Ledger(line for line in world.ledger if line.name != "broadcast")  # that is sent once, not in every step
plots.comm_bars(**books)

# %% [markdown]
# What `DataParallel` sends on top of the server is outputs and their gradients. In this toy they are small. In a language model an output is a number for each word
# of the vocabulary and each token. Eight sequences on one device, in fp32, beside the gradient of all of GPT-2:

# %%
{"outputs": units.text(8 * gpt2.seq_len * gpt2.vocab_size * 4), "gradients": units.text(S)}

# %% [markdown]
# Gradients have the size of the model, whatever the batch. That is the reason to exchange *them*, and leave outputs and losses where they are.
#
# Three results, always together: after three steps, are the weights those of one device with the whole batch? Who sends how many bytes a step? Who holds how many?

# %%
plain = model()
optimizer = torch.optim.AdamW(plain.parameters())
for _ in range(3):
    optimizer.zero_grad()
    plain.loss(*batch).backward()
    optimizer.step()

holds = {}
print(f"{'':14}{'equal':>7}{'sent by rank 0':>17}{'by rank 1':>12}{'held by rank 0':>17}{'by rank 1':>12}")
for way in (server, DataParallel, DDP):
    (w, held), (_, other), *_ = world.run(way, steps=3)
    holds[way.__name__], equal = (held.total, other.total), torch.allclose(w, weights(plain), rtol=0, atol=1e-12)
    sent = books[way.__name__].by("rank")
    print(f"{way.__name__:14}{equal!s:>7}" + "".join(f"{units.text(x):>{k}}" for x, k in zip((sent[0], sent[1], held.total, other.total), (17, 12, 17, 12), strict=True)))

# %% [markdown]
# The same from formulas, with S for the gradient: a server sends S to each worker and each worker S to it; in `DataParallel` a scatter of inputs, a gather of outputs and
# a scatter of their gradients come on top; DDP is one ring. Held are S of weights, S of gradients, and where there is an Adam 2S and a step counter for each tensor.

# %%
S64, outputs = weights(plain).nbytes, 8 * 32 * 128 * 8
star = collectives.sent("broadcast_star", nbytes=S64, n=4) + collectives.sent("reduce_star", nbytes=S64, n=4)
data = [("scatter_star", 8 * 32 * 8), ("gather_star", outputs), ("scatter_star", outputs)]
expected = {"server": star, "DDP": collectives.sent("all_reduce_ring", nbytes=S64, n=4, itemsize=8)}
expected["DataParallel"] = sum((collectives.sent(op, nbytes=nbytes, n=4) for op, nbytes in data), star)
unexplained = {way: expected[way].diff(book, by="rank").unexplained for way, book in books.items()}
adam = 2 * S64 + 4 * config.num_tensors
left = {way: (first - 2 * S64 - adam, other - 2 * S64 - adam * (way == "DDP")) for way, (first, other) in holds.items()}
f"bytes sent, unexplained: {unexplained}; bytes held, unexplained: {left}"

# %% [markdown]
# All three are right. In the first two, rank 0 is the one that everybody waits for, and the other devices have their memory half empty. In the third all ranks do
# the same, and hold the same: weights, gradients and an optimizer each. That every rank holds *everything* is the waste that lab 09 removes.
#
# **And the threads?** `DataParallel` runs its replicas as threads of one Python process, and only one thread at a time may run Python. Two ranks that do nothing
# but Python, as threads and as processes:


# %%
def python(rank):
    start, total = time.perf_counter(), 0
    for i in range(500_000):
        total += i * i
    return time.perf_counter() - start


# %% tags=["nbval-ignore-output"]
for name, n, engine in (("one thread", 1, "threads"), ("two threads", 2, "threads"), ("two processes", 2, "processes")):
    with World(n, engine) as few:
        print(f"{name}: {units.text(min(max(few.run(python)) for _ in range(30)), 's')}")

# %% [markdown]
# Two threads take turns; two processes run at once, if two cores are free. A training step launches thousands of kernels from Python, so of eight threads seven wait for the interpreter. This is
# why every framework starts one process a device.

# %% [markdown]
# ## When may a gradient leave?
#
# The plainest way is a loop after the backward pass:

# %%
show(data_parallel.average_gradients)

# %% [markdown]
# It is right, and it wastes: the network has nothing to do while gradients are computed, and the ranks nothing while they travel. A gradient may leave as soon as it is
# complete. Autograd says when: `parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` right after a gradient has been added to
# `.grad`.
#
# > The token embedding is the first layer of the forward pass; in this model its matrix also is the last one, *tied* to the output. When does its gradient come: first,
# > last, or twice?

# %%
predict("ready/embedding", when="first")

# %%
order, watched = [], model()
for name, parameter in watched.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: order.append(name))
watched.loss(*batch).backward()
print(f"{len(order)} gradients. First: {order[0]}, {order[1]}. Last: {order[-2]}, {order[-1]}.")

# %%
reveal("ready/embedding", when="last")

# %% [markdown]
# Layers come in reverse, and a gradient is complete when its *last* contribution is there. The tied matrix gets its first one at the very beginning of the backward
# pass, from the output, and its second at the very end. It can hide behind nothing. In GPT-2 that is not a detail:

# %%
embedding = gpt2.vocab_size * gpt2.d_model / gpt2.num_params
print(f"{embedding:.0%} of all gradient bytes come last")

# %% [markdown]
# ### Exercise 8.2 · Reduce as you go (15 min, ●●○)
#
# Make `module` a replica: all ranks start from rank 0's weights, and after every `backward()` each `.grad` is the mean over ranks. You need
# `comm.broadcast(x, out=x)` and `comm.all_reduce(x)`. The check looks at values, at bytes, and at *when* you send.


# %%
def synchronize(module: nn.Module, comm) -> None:
    """Broadcast once, then reduce every gradient in a hook of its parameter."""
    raise NotImplementedError


# %%
check("data_parallel/hooks", synchronize)

# %%
hint("data_parallel/hooks", 1)

# %%
show(data_parallel.Replica._ready)

# %% [markdown]
# The library's hook does a little more: it puts the gradient into a bucket, and lets a bucket go that is complete. But first a mistake worth seeing.
#
# The hook is given the *parameter*. A published exercise reduces that, and nothing else. The parameters of equal replicas have a mean that changes nothing, so the first
# loss is right, the bytes are right, and the loss goes down. But each rank steps along a gradient of its own:


# %%
def drifting(rank, steps=3):
    net, comm = model(), rank.comm("dp")
    optimizer = torch.optim.AdamW(net.parameters())

    def hook(parameter):
        parameter.data.copy_(comm.all_reduce(parameter.data) / comm.size)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(steps):
        optimizer.zero_grad()
        net.loss(*mine(rank)).backward()
        optimizer.step()
    return weights(net)


replicas, drift_bytes = world.run(drifting), world.ledger.by("rank")
world.run(DDP, steps=3)
ddp_bytes = world.ledger.only(rank=0, name="all_reduce").total
print(f"replicas equal: {torch.equal(replicas[0], replicas[1])}; sent {units.text(drift_bytes[0])}, DDP sends {units.text(ddp_bytes)}")

# %% [markdown]
# ## How large should a bucket be?
#
# One message for each parameter costs a latency each; one message for all can leave only when the last gradient is there. A bucket of B bytes on a ring of N ranks
# takes
#
# $$ t(B) \;=\; 2(N-1)\,\lambda \;+\; 2\,\tfrac{N-1}{N}\,\frac{B}{\mathrm{bw}}, $$
#
# and the next one waits for it. So buckets should be large against N·λ·bw, where latency and bytes cost the same, and small against the whole gradient.
#
# The twelve blocks of GPT-2 are 192 tensors, 340 MB. Thirty-two ranks with links of 10 µs and 10 GB/s, and a backward pass of 80 ms:

# %%
link = Link(latency=10e-6, bandwidth=10e9)
with torch.device("meta"):  # shapes without memory
    blocks = {name: parameter.nbytes for name, parameter in GPT(gpt2).named_parameters() if name.startswith("blocks")}
layers = [(nbytes, 0.080 * nbytes / sum(blocks.values())) for nbytes in blocks.values()]
print(f"{len(layers)} tensors, {units.text(sum(blocks.values()))}; N·λ·bw = {units.text(32 * link.latency * link.bandwidth)}")

# %% [markdown]
# > A bucket for each tensor can leave the earliest. How long does the step take from the start of the backward pass to the last mean?

# %%
predict("buckets/one-each", ms=80)


# %%
def backward(bucket_bytes, n=32):
    return data_parallel.simulate(layers, bucket_bytes=bucket_bytes, n=n, link=link)


plots.overlap(a_bucket_for_each_tensor=backward(1), buckets_of_25_MB=backward(25_000_000), one_bucket_for_all=backward(10**9))

# %%
reveal("buckets/one-each", ms=round(1e3 * backward(1).makespan))

# %% [markdown]
# Both extremes are slow, for opposite reasons. Above, latencies fill the network and it never catches up; below, it has nothing to do until the end. Between them lies a
# broad valley, and its left slope moves with N:

# %%
sizes = [10 ** (k / 8) for k in range(40, 69)]
steps_ms = {f"{n} ranks": [1e3 * backward(int(size), n).makespan for size in sizes] for n in (8, 32, 128)}
plots.curves([size / 1e6 for size in sizes], **steps_ms, log="x", xlabel="bucket (MB)", ylabel="backward pass (ms)", title="Small buckets cost latency, large ones cannot hide")

# %% [markdown]
# DDP takes 25 MiB; Megatron-LM's default grows with the number of ranks, for the reason that you see.

# %% [markdown]
# ## How much of the communication can you hide?
#
# So far a formula. Now four processes, and a clock. Two cores cannot compute for four ranks and move their bytes at the same time, so this backward pass *sleeps*, as a
# CPU does while a GPU works.


# %%
class Slow(torch.autograd.Function):
    """The identity, whose backward pass takes its time and gives `weight` a gradient of ones."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.shape, ctx.seconds = weight.shape, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, torch.ones(ctx.shape), None


class Layer(nn.Module):
    def __init__(self, numel, seconds):
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.zeros(numel)), seconds

    def forward(self, x):
        return Slow.apply(x, self.weight, self.seconds)


# %%
def slow_step(rank, overlap, bucket_bytes=1_000_000, steps=5):
    """The time lines of a few steps of this rank, with twelve layers of 1 MB and 20 ms each."""
    net = nn.Sequential(*(Layer(250_000, 0.020) for _ in range(12)))
    replica, timelines = data_parallel.replicate(net, rank.comm("dp"), bucket_bytes=bucket_bytes, overlap=overlap), []
    for _ in range(steps):
        rank.comm("dp").barrier()
        replica(torch.ones(1, requires_grad=True)).sum().backward()
        timelines.append(replica.timeline)
    return timelines


def fastest(timelines):
    """Of the steps of all ranks, the one that took least."""
    return min((sum(step) for step in zip(*timelines, strict=True)), key=lambda timeline: timeline.makespan)


# %% [markdown]
# Twelve layers, a bucket each. Every bucket leaves when its layer is done and travels while the next layer is computed. Only the last one, layer 0's, has nothing left to
# hide behind. So if the network keeps up, the part of communication that can be hidden is everything but the last bucket:
#
# $$ \text{hidden} \;=\; 1 - \frac{S_{\text{last}}}{\sum_k S_k}. $$
#
# > How much is that here?

# %%
predict("overlap/hidden", percent=50)

# %%
twelve = data_parallel.buckets({f"{i}.weight": 1_000_000 for i in range(12)}, 1_000_000)
reveal("overlap/hidden", percent=round(100 * data_parallel.hideable(twelve)))

# %% [markdown]
# And the clock, with overlap and without:

# %%
processes = World(4, engine="processes")
measured = {way: fastest(processes.run(slow_step, overlap=way == "during")) for way in ("after", "during")}

# %% tags=["nbval-ignore-output"]
plots.overlap(after_the_backward_pass=measured["after"], during_the_backward_pass=measured["during"])

# %% [markdown]
# Every rank's clock starts as it leaves a barrier. Above, the network rests for the whole backward pass, and then the ranks rest. Below, eleven of twelve buckets are under way
# while their rank is busy.

# %% tags=["nbval-ignore-output"]
print(f"hidden: {measured['after'].hidden:.0%} without overlap, {measured['during'].hidden:.0%} with it; "
      f"formula: {data_parallel.hideable(twelve):.0%}; exposed {units.text(measured['after'].exposed, 's')} and {units.text(measured['during'].exposed, 's')}")  # fmt: skip

# %% [markdown]
# How many bytes moved does not depend on when they moved:

# %%
data_parallel.predict(twelve, 4, backwards=5).diff(processes.ledger.only(name="all_reduce"))

# %% [markdown]
# With k layers to a bucket the last bucket is k times as large, and the formula says 1 − k/12. Line: the formula. Dots: measured.

# %% tags=["nbval-ignore-output"]
per_bucket = [1, 2, 3, 6, 12]
formula = [100 * data_parallel.hideable(data_parallel.buckets(dict.fromkeys(map(str, range(12)), 1_000_000), 1_000_000 * k)) for k in per_bucket]
steps = [measured["during"], *(fastest(processes.run(slow_step, overlap=True, bucket_bytes=1_000_000 * k, steps=4)) for k in per_bucket[1:])]
clock = [100 * step.hidden for step in steps]
title = f"What is in the last bucket cannot hide: {units.text(steps[0].exposed, 's')} exposed with one layer in it, {units.text(steps[-1].exposed, 's')} with all"
plots.curves(per_bucket, hidden=formula, measured={"hidden": clock}, xlabel="layers in a bucket", ylabel="communication hidden (%)", title=title)

# %% [markdown]
# (On the clock a bucket's time includes the wait for the slowest rank, so single dots lie above or below.) The *last* bucket is the one to keep small. PyTorch's DDP has a small bucket too, of 1 MiB beside those of 25. Which one is it? Ten layers of 1 MiB, in the order in which
# their buckets leave:


# %%
def torchs_buckets(rank):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(10)))
    theirs = nn.parallel.DistributedDataParallel(net, process_group=rank.comm("dp").group)
    for _ in range(3):
        theirs(torch.ones(1, 512)).sum().backward()
    told = theirs._get_ddp_logging_data()
    return told["rebuilt_bucket_sizes"], told["rebuilt_per_bucket_param_indices"]


processes.run(torchs_buckets)[0]

# %% [markdown]
# The *first*: parameter 9, the last layer's, leaves alone so that the network has something to do early. What is exposed at the end is a whole bucket, unless you choose
# `bucket_cap_mb` smaller.

# %% [markdown]
# ## What do micro-batches change?
#
# With accumulation (lab 05) there are several backward passes to a step, and every one of them calls the hooks.
#
# > Four micro-batches, a reduction in each. The gradients at the end: right or wrong? And how many times the bytes are sent?

# %%
predict("accumulation/bytes", times=1)

# %%
many = tuple(torch.randint(128, (32, 32), generator=draw) for _ in range(2))


def accumulated(rank, quiet, k=4):
    net = model(seed=rank.rank)
    replica = data_parallel.replicate(net, rank.comm("dp"))
    parts = micro_batches(tuple(side[rank.rank :: rank.size] for side in many), 8 // k)
    for i, (inputs, targets) in enumerate(parts):
        with replica.no_sync() if quiet and i + 1 < k else contextlib.nullcontext():
            (entropy(replica(inputs), targets) / k).backward()
    return gradient(net)


# %%
right = model()
right.loss(*many).backward()
sent = {}
for quiet in (False, True):
    found = world.run(accumulated, quiet)
    sent[quiet] = world.ledger.only(rank=0, name="all_reduce").total
    print(f"no_sync: {quiet!s:5}  equal: {torch.allclose(found[0], gradient(right), rtol=0, atol=1e-12)}  sent by each rank: {units.text(sent[quiet])}")

# %%
reveal("accumulation/bytes", times=sent[False] // sent[True])

# %% [markdown]
# Right both times: a mean of gradients that are equal already is what it was, and the next micro-batch adds to it. So no test of values will ever find it, and the
# step sends four times as much. `no_sync()` lets gradients add up at home until the last micro-batch.

# %% [markdown]
# ## What must all ranks agree on?
#
# **On the weights at the start**: everything else only keeps replicas as far apart as they were. **On the order of reductions**: every rank makes the same calls, so
# bucket 1 never leaves before bucket 0, whichever is full first. **On which gradients there are.** Here rank 1 does not use one of two layers:


# %%
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x, both):
        return self.left(x) + self.right(x) if both else self.left(x)


def branching(rank, find_unused):
    replica = data_parallel.replicate(Branches(), rank.comm("dp"), find_unused=find_unused)
    replica(torch.ones(1, 2), both=rank.rank == 0).sum().backward()
    return [parameter.grad.tolist() for parameter in replica.parameters()]


two = World(2)
try:
    two.run(branching, find_unused=False)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Its bucket would never be complete, and rank 0 would wait for it. With `find_unused` a gradient that does not come counts as zero, on this rank alone:

# %%
two.run(branching, find_unused=True)

# %% [markdown]
# Half a gradient from two ranks: rank 0's ones, and rank 1's zeros. A mixture of experts without this agreement hangs the first time that an expert gets no token.
#
# **On what is not a gradient.** A BatchNorm keeps running statistics of what it has seen, in *buffers*. No gradient reaches them, so nothing that you have built so far keeps
# them equal. Each rank's data has another mean here; after three steps, a look at the validation set:


# %%
def normed(rank, sync):
    net = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    replica = data_parallel.replicate(net, rank.comm("dp"), forward_sync_buffers=sync)
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step)) + rank.rank
        replica(x).sum().backward()
    with torch.no_grad():
        replica.eval()(x)
    return round(net[0].running_mean.mean().item(), 2)


for sync in (False, True):
    print(f"rank 0's buffers before each forward pass: {sync!s:5}  running mean of each rank: {world.run(normed, sync)}")

# %% [markdown]
# Four models, though all weights are the same bits: which one is it that you save? DDP's answer, and ours: rank 0's buffers go to all ranks before a forward pass. That makes
# them equal, and costs a small message, four forward passes times a mean and a variance of four channels and a count:

# %%
data_parallel.predict_buffers(nn.BatchNorm1d(4), 4, forwards=4).diff(world.ledger.only(name="buffers"))

# %% [markdown]
# Equal is not averaged: what the other ranks have seen is thrown away. Statistics of the *whole* batch are another module, `nn.SyncBatchNorm`. And validate on rank 0 alone, through the
# wrapper, and its broadcast waits for ranks that do not come: call `replica.module`.
#
# **On skipping a step.** In fp16 the loss is scaled, and a step whose gradients overflow is skipped (lab 02). Now one rank has an example whose gradient is inf, and three have
# not.
#
# > Who has to skip the step, and how do they come to know?


# %%
def half(rank, parts=None, steps=8):
    """Scales, steps taken and own overflows; the rank runs the quarters `parts` of the batch, its own unless told otherwise."""
    net, parts = model().float(), [rank.rank] if parts is None else parts
    replica, scaler = data_parallel.replicate(net, rank.comm("dp")), LossScaler(2.0**12, growth_interval=3)
    optimizer, scales, taken, overflowed = torch.optim.AdamW(net.parameters()), [], [], set()
    for step in range(steps):
        optimizer.zero_grad()
        for part in parts:
            with autocast(torch.float16), replica.no_sync() if part != parts[-1] else contextlib.nullcontext():
                outputs = replica(batch[0][part::4])
                outputs.register_hook(lambda slope, step=step: None if slope.isfinite().all() else overflowed.add(step))
                loss = entropy(outputs, batch[1][part::4]) * (1e9 if (step, part) == (4, 2) else 1)
                scaler.scale(loss).backward()
        for parameter in net.parameters():
            parameter.grad /= len(parts)
        scales.append(int(scaler.value))
        taken.append(scaler.step(optimizer))
        scaler.update()
    return scales, taken, overflowed


# %%
for index, (scales, taken, overflowed) in enumerate(world.run(half)):
    print(f"rank {index}  own overflow in steps {sorted(overflowed) or 'none'}, skipped {taken.index(False)}, scales {scales}")
scales, taken, _ = World(1).run(half, parts=range(4))[0]
print(f"one device, skipped {taken.index(False)}, scales {scales}")

# %% [markdown]
# All of them skip, and nobody has to tell them: the mean of an inf and three numbers is an inf, on every rank. So reduce *first*, then look for infs, then unscale. Every rank keeps a scaler of its
# own, all see the same gradients, and all scales move alike, as on one device that takes the four quarters one after the other. A rank that looked at its own
# gradient before the reduction would skip alone, and its weights would be another model's from there on.
#
# **On the format on the wire.** Gradients that are kept in fp32 may travel in bf16: half the bytes, and an error. Each number is rounded to 8 bits and then added three
# times, in 8 bits again:


# %%
def on_the_wire(rank, dtype):
    net = model().float()
    replica = data_parallel.replicate(net, rank.comm("dp"), reduce_dtype=dtype)
    inputs, targets = mine(rank)
    entropy(replica(inputs), targets).backward()
    return gradient(net), replica.buckets


(exact, grouped), *_ = world.run(on_the_wire, None)
full = world.ledger.only(rank=0, name="all_reduce").total
(rounded, _), *_ = world.run(on_the_wire, torch.bfloat16)
halved = world.ledger.only(name="all_reduce")
print(f"{halved.only(rank=0).total / full} of the bytes, off by {(rounded - exact).norm() / exact.norm():.1%}")

# %%
data_parallel.predict(grouped, 4, itemsize=2).diff(halved)

# %% [markdown]
# Each addition rounds once more, so the error grows with the number of ranks. Whether the sum is worth four bytes is a setting of every framework (below).
#
# **And on the number of steps.** Rank 1 has one batch less:


# %%
def runs_out(rank):
    replica = data_parallel.replicate(nn.Linear(2, 1), rank.comm("dp"))
    for _ in range(3 - rank.rank):
        replica(torch.ones(1, 2)).sum().backward()


try:
    two.run(runs_out)
except DeadlockError as error:
    print(str(error).splitlines()[0].rstrip(":"))

# %% [markdown]
# That is what equal shares in exercise 8.1 are for. Where they cannot be had, a rank without an example must take part all the same, with nothing to add, and the
# others count for more:


# %%
def sits_out(rank):
    replica, comm = data_parallel.replicate(nn.Linear(2, 1), rank.comm("dp")), rank.comm("dp")
    for step in range(3):
        replica.zero_grad()
        examples = int(step < 3 - rank.rank)
        weight = data_parallel.share(examples, comm)
        if examples:
            (replica(torch.ones(1, 2)).sum() * weight).backward()
        else:
            replica.sit_out()
    return replica.module.weight.grad.tolist()


two.run(sits_out)

# %% [markdown]
# PyTorch's `join` lets a rank sit out for the rest of a loop. It goes on dividing by the number of all ranks, so the others count for less, unless you weigh them.
#
# ### Exercise 8.3 · Bug hunt: the wrapper that passed its test (20 min, ●●●)
#
# A data-parallel wrapper with buckets, and the test that it was written with: every rank gets the right gradient. Three things are wrong all the same. Repair them.


# %%
class Buckets:
    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm, self.bucket_bytes, self.waiting = module, comm, bucket_bytes, []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.ready)

    def ready(self, parameter):
        self.waiting.append(parameter)
        if sum(p.nbytes for p in self.waiting) >= self.bucket_bytes:
            self.flush()

    def flush(self):
        flat = self.comm.all_reduce(torch.cat([p.grad.flatten() for p in self.waiting])) / self.comm.size
        for p, mean in zip(self.waiting, flat.split([p.numel() for p in self.waiting]), strict=True):
            p.grad.copy_(mean.view_as(p))
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
# The library's own, in full:

# %%
show(data_parallel.Replica)

# %% [markdown]
# ## Is it as good as PyTorch's?
#
# On processes, PyTorch's `DistributedDataParallel` runs beside ours in the same rank function: same weights, same data, its own all-reduce (gloo).

# %%
medium = ModelConfig(num_layers=4, d_model=128, num_heads=4, d_ff=512, vocab_size=512, seq_len=64)
data = tuple(torch.randint(512, (8, 64), generator=draw) for _ in range(2))


def wrapped(rank, whose):
    net = GPT(medium, generator=torch.Generator().manual_seed(rank.rank))
    if whose == "ours":
        return net, data_parallel.replicate(net, rank.comm("dp"))
    return net, nn.parallel.DistributedDataParallel(net, process_group=rank.comm("dp").group, gradient_as_bucket_view=True)


# %%
def trained(rank, whose, steps=3):
    net, wrapper = wrapped(rank, whose)
    optimizer = torch.optim.AdamW(net.parameters(), eps=1e-4)  # above the rounding noise of gradients that should be 0
    inputs, targets = (side[rank.rank :: rank.size] for side in data)
    for _ in range(steps):
        optimizer.zero_grad()
        entropy(wrapper(inputs), targets).backward()
        optimizer.step()
    return weights(net), measure.model_states(net, optimizer)


# %%
def trained_alone(steps=3):
    net = GPT(medium, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(net.parameters(), eps=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        net.loss(*data).backward()
        optimizer.step()
    return weights(net)


# %%
theirs, ours = (processes.run(trained, whose) for whose in ("theirs", "ours"))
counted = processes.ledger
alone = trained_alone()
for name, found in {"ours": ours, "theirs": theirs}.items():
    alike = all(torch.equal(w, found[0][0]) for w, _ in found)
    print(f"{name:7} equal to one device: {torch.allclose(found[0][0], alone, rtol=0, atol=1e-6)}, replicas the same bits: {alike}")

# %% [markdown]
# **Bytes sent**: everything that left our ranks, a broadcast and three steps, predicted by formula (what gloo sends, nobody counts):

# %%
grouped = data_parallel.buckets({name: parameter.nbytes for name, parameter in GPT(medium).named_parameters()})
(data_parallel.predict_start(GPT(medium), 4) + data_parallel.predict(grouped, 4, backwards=3)).diff(counted)

# %% [markdown]
# **Bytes held** by each rank after the last step: weights, gradients, Adam. Gradients are views of the buckets, so the buckets add nothing; PyTorch does the same with
# `gradient_as_bucket_view=True`, and without it holds every gradient twice.

# %%
held = memory.model_states(medium, TrainConfig(micro_batch=2, global_batch=8, precision="fp32"))
held.diff(ours[0][1])

# %%
{name: {rank: units.text(states.total) for rank, (_, states) in enumerate(found)} for name, found in {"ours": ours, "theirs": theirs}.items()}

# %% [markdown]
# And the time of a step, forward to the last mean, the two taking turns:


# %%
def race(rank, rounds=12):
    racers, times = {whose: wrapped(rank, whose)[1] for whose in ("ours", "theirs")}, {"ours": [], "theirs": []}
    inputs, targets = (side[rank.rank :: rank.size] for side in data)
    for _ in range(rounds):
        for whose, wrapper in racers.items():
            wrapper.zero_grad()
            rank.comm("dp").barrier()
            start = time.perf_counter()
            entropy(wrapper(inputs), targets).backward()
            times[whose].append(time.perf_counter() - start)
    return times


# %% tags=["nbval-ignore-output"]
times = processes.run(race)
slowest = {whose: sorted(map(max, zip(*(rank[whose] for rank in times), strict=True))) for whose in ("ours", "theirs")}
", ".join(f"{whose}: {units.text(steps[len(steps) // 2], 's')}" for whose, steps in slowest.items())

# %%
processes.close()

# %% [markdown]
# Four processes on two cores mostly measure who gets a core. `make bench` takes more care, and prints the ratio.
#
# ## Turn the knobs
#
# The blocks of GPT-2 once more. Find a network on which overlap hides everything, one on which no bucket size helps, and the bucket that suits 128 ranks.


# %%
def knobs(bucket=1e7, ranks=32, bandwidth_GBps=10):
    """The backward pass and the reductions of these buckets, on links of 10 µs and that bandwidth."""
    network = Link(10e-6, bandwidth_GBps * 1e9)
    after, during = (data_parallel.simulate(layers, bucket_bytes=int(bucket), n=ranks, link=network, overlap=overlap) for overlap in (False, True))
    return plots.overlap(after_the_backward_pass=after, during_the_backward_pass=during)


explore(knobs, states=45, bucket=log(1e5, 1e9, 10, unit="B"), ranks=[8, 32, 128], bandwidth_GBps=[1, 10, 100])

# %% [markdown]
# ## In practice
#
# **PyTorch DDP.** `DistributedDataParallel(model, device_ids=[local_rank])`, one process for each device, started by `torchrun`. What you set:
#
# | option | what it does |
# |---|---|
# | `bucket_cap_mb` (25) | bucket size in **MiB**: 26.2 MB. Left alone, the first one to leave has 1 MiB |
# | `gradient_as_bucket_view=True` | `.grad` is a view of the bucket: one gradient less in memory, no copies |
# | `find_unused_parameters=True` | walks the graph after each forward pass for parameters that will get no gradient; costs time |
# | `static_graph=True` | the graph is the same in every step: finds unused parameters once, and allows reentrant checkpoints that share a layer |
# | `init_sync=True` | rank 0's parameters and buffers to all at the start |
# | `forward_sync_buffers=True` | rank 0's buffers to all before a forward pass; up to version 2.12 it was `broadcast_buffers` |
# | `model.no_sync()` | around forward and backward of all micro-batches but the last |
# | `model.join()` | ranks that run out of data shadow the collectives of the others |
# | `register_comm_hook` | what is sent instead: `fp16_compress_hook`, `bf16_compress_hook` (ours: `reduce_dtype=torch.bfloat16`), PowerSGD |
#
# After the first step DDP rebuilds its buckets in the order in which gradients really came, unless it has to look for unused parameters.
#
# **Megatron-LM** keeps all gradients in one contiguous buffer. `--overlap-grad-reduce` sends its buckets during the backward pass (off by default);
# `--ddp-bucket-size` counts *elements*, at least 40 million, and a million for each data-parallel rank if that is more, because a message on a ring is the bucket over
# N, and small messages cost latency. `--accumulate-allreduce-grads-in-fp32` sums in fp32; `--use-distributed-optimizer` keeps one half of the all-reduce
# (lab 09).
#
# **DeepSpeed** reduces at the accumulation boundary, in the format of `communication_data_type`. `overlap_comm` (off by default) and `reduce_bucket_size` (5·10⁸ *elements*) are settings of `zero_optimization`, and stages 1 to 3
# are lab 09's.
#
# **torchtitan** uses data parallelism without sharding only if you ask for it, `parallelism.data_parallel_replicate_degree`, with buckets of 100 MiB; since 2026
# through a `replicate` that wraps block by block, as FSDP2 does. With `data_parallel_shard_degree` as well it is hybrid sharding: sharded within a group,
# replicated between groups.
#
# **A mean over tokens**, not over ranks, is what a language model with padding needs: all-reduce the number of tokens first (lab 05), and tell DDP not to divide,
# or multiply by N.

# %% [markdown]
# ## Errata
#
# **"A synchronization phase where the outputs from all GPUs are harmonized"** (a memory guide, on DDP). That is `nn.DataParallel`. DDP averages *gradients*; outputs and losses stay
# where they are. Outputs would grow with the batch, gradients do not. What each of four ranks of GPT-2
# sends for its gradients, whatever its batch, beside the bytes of its outputs for one sequence and for eight:

# %%
summed = collectives.sent("all_reduce_ring", nbytes=4 * gpt2.num_params, n=4).by("rank")[0]
outputs = {b: 4 * b * gpt2.seq_len * gpt2.vocab_size for b in (1, 8)}
[units.text(summed), *map(units.text, outputs.values())]

# %% [markdown]
# **"Gradients are synchronized by all-reduce"** (a scaling guide) leaves out the division. NCCL, gloo and MPI sum; without the division the gradient is N times too large, and Adam
# hides it (lab 05).
#
# **A hook that reduces its argument** (a published exercise): the argument is the parameter. The bytes are as they should be, and so is the first loss; see
# exercise 8.2.
#
# **"If the weights do not fit, use multi-GPU (DDP or FSDP)"** (the memory guide). DDP holds *everything* on every rank, on two as on two thousand. GPT-2 XL in mixed precision with
# Adam:

# %%
xl = ModelConfig.named("gpt2-xl")
states = memory.model_states(xl, TrainConfig(micro_batch=1, global_batch=2048))
f"{units.text(states.total)} on each rank, {states.total / xl.num_params:.0f} bytes a parameter, whatever the number of ranks"

# %% [markdown]
# **"The default bucket is 25 MB"** (the scaling guide and its source). `bucket_cap_mb=25` counts MiB. And the first bucket to leave is smaller:

# %%
nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * nn.parallel.distributed._MB_TO_BYTES, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES

# %% [markdown]
# **"Each node computes gradients locally"** (lecture slides). Each *process*, and there is one for each device: two nodes of eight GPUs are sixteen data-parallel ranks.

# %% [markdown]
# ## Summary
#
# > - The gradient of the batch is the *mean* over ranks, if all have equally many examples; all-reduce sums, so divide by N, once.
# >   <!-- claim: world.World(4).run(lambda rank: rank.comm().all_reduce(torch.tensor([1.0])).item()) == [4.0] * 4 -->
# > - Exchange what has the size of the model, not of the batch. On eight ranks a server sends GPT-2's weights seven times, 3.48 GB a step; a ring has each rank send
# >   1.75 times its gradient, 0.87 GB.
# >   <!-- claim: [round(max(collectives.sent(way, nbytes=4 * config.ModelConfig.named("gpt2").num_params, n=8).by("rank").values()) / 1e9, 2) for way in ("broadcast_star", "all_reduce_ring")] == [3.48, 0.87] -->
# > - Gradients come from the last layer to the first, and travel in buckets while others are computed. A bucket for each tensor drowns in latency, one bucket for all
# >   cannot hide. A tied embedding comes last: 31 % of GPT-2.
# >   <!-- claim: round(100 * 50257 * 768 / config.ModelConfig.named("gpt2").num_params) == 31 -->
# > - All communication can hide but the last bucket's: 1 − S_last / ΣS, 92 % for twelve equal buckets.
# >   <!-- claim: round(100 * data_parallel.hideable(data_parallel.buckets({str(i): 1 for i in range(12)}, 1))) == 92 -->
# > - Buffers and skipped steps must agree too: rank 0's statistics go to all, and an inf of one rank is in the mean of all, if you reduce before you look.
# > - The last bucket must be flushed, every bucket in the same order on all ranks, and with k micro-batches once a step: without `no_sync` the values are right and
# >   the bytes k-fold.
# >   <!-- claim: data_parallel.predict(data_parallel.buckets({"a": 400}), 4, backwards=4).total == 4 * data_parallel.predict(data_parallel.buckets({"a": 400}), 4).total -->
# > - Data parallelism makes training faster, not smaller: every rank holds all 16 bytes a parameter.
# >   <!-- claim: round(memory.model_states(config.ModelConfig.named("gpt2-xl"), config.TrainConfig(micro_batch=1, global_batch=2048)).total / config.ModelConfig.named("gpt2-xl").num_params) == 16 -->
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
