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
from labutils.world import RankError, World

# %% [markdown]
# ## The idea in one picture
#
# Every device computes the gradient of *its* examples, and what training needs is the mean over all devices: an all-reduce (lab 07). The backward pass runs from
# the last layer to the first, so the last layer's gradient is ready long before the first one's. Play it: gradients drop into buckets, and a bucket that is
# complete leaves while others still fill.

# %%
layers = {f"layer {i}": 1_000_000 for i in range(1, 6)}
sizes = {"embed": 600_000, **layers, "head": 600_000}
buckets = [
    dict(zip(bucket.names, bucket.sizes, strict=True))
    for bucket in data_parallel.buckets(sizes, 2_000_000)
]
plots.bucket_animation(buckets, bucket_bytes=2_000_000)

# %% [markdown]
# That is data parallelism: **a copy of everything on every device, one mean of gradients a step, and as little waiting for it as possible.**

# %% [markdown]
# ## Is the mean over devices the gradient of the batch?
#
# A small GPT, a batch of eight sequences, four ranks. In float64, so that whatever differs is a mistake and not rounding.

# %%
sizes = dict(num_layers=2, d_model=64, num_heads=4, d_ff=256)
config = ModelConfig(**sizes, vocab_size=128, seq_len=32)
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
    net = model()
    inputs, targets = (side.tensor_split(rank.size)[rank.rank] for side in ten)
    share = len(inputs) / 10 if weigh else 1 / rank.size
    (net.loss(inputs, targets) * share).backward()
    return rank.comm("dp").all_reduce(gradient(net))


ten = tuple(torch.randint(128, (10, 32), generator=draw) for _ in range(2))
right = model()
right.loss(*ten).backward()
for weigh in (False, True):
    error = world.run(uneven, weigh)[0] - gradient(right)
    off = error.norm() / gradient(right).norm()
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
    """The indices, out of `length` examples, that `rank` of `size` reads in `epoch`.

    They are shuffled anew in each epoch, and equally many on all ranks.
    """
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
sent = collectives.sent("broadcast_star", nbytes=S, n=8).by("rank")
reveal("server/sends", GB=round(sent[0] / 1e9, 2))

# %% [markdown]
# Weights to seven workers, and it receives as much again in gradients, through one link. On a ring nobody sends more than twice the gradient, however many ranks
# there are:

# %%
def busiest(algorithm, n):
    """GB that the rank sends which sends most."""
    return max(collectives.sent(algorithm, nbytes=S, n=n).by("rank").values()) / 1e9


ranks = [2, 4, 8, 16, 32, 64]
plots.curves(
    ranks,
    server=[busiest("broadcast_star", n) for n in ranks],
    all_reduce=[busiest("all_reduce_ring", n) for n in ranks],
    log="x",
    xlabel="ranks",
    ylabel="sent by the busiest rank (GB)",
    title="A server sends more with every worker, a ring does not",
)

# %% [markdown]
# Now run all three on four ranks, every rank with weights of its own at the start. One step, to see who sends how much:


# %%
def mine(rank, data=batch):
    return tuple(side[rank.rank :: rank.size] for side in data)


def entropy(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


# %%
def train(net, wrapper, inputs, targets, steps=3, eps=1e-8):
    """Weights and bytes held after some steps; `wrapper` computes what net does."""
    optimizer = torch.optim.AdamW(net.parameters(), eps=eps)
    for _ in range(steps):
        optimizer.zero_grad()
        entropy(wrapper(inputs), targets).backward()
        optimizer.step()
    return weights(net), measure.model_states(net, optimizer)


def DDP(rank, steps=1):
    net = model(seed=rank.rank)
    return train(net, data_parallel.replicate(net, rank.comm("dp")), *mine(rank), steps)


# %%
def on_rank_0(rank, steps, step):
    """The same, where `step(net, comm, optimizer)` has an optimizer on rank 0 alone."""
    net = model(seed=rank.rank)
    optimizer = torch.optim.AdamW(net.parameters()) if rank.rank == 0 else None
    for _ in range(steps):
        step(net, rank.comm("dp"), optimizer)
    return weights(net), measure.model_states(net, optimizer)


def server(rank, steps=1):
    def step(net, *args):
        data_parallel.server_step(net, *args, lambda part: net.loss(*part), mine(rank))

    return on_rank_0(rank, steps, step)


def DataParallel(rank, steps=1):
    def step(*args):
        data_parallel.replicate_each_step(*args, entropy, *batch)

    return on_rank_0(rank, steps, step)


# %%
books = {}
for way in (server, DataParallel, DDP):
    world.run(way)  # a broadcast is sent once, not in every step
    each_step = Ledger(line for line in world.ledger if line.name != "broadcast")
    books[way.__name__] = each_step
plots.comm_bars(**books)

# %% [markdown]
# What `DataParallel` sends on top of the server is outputs and their gradients. In this toy they are small. In a language model an output is a number for each word
# of the vocabulary and each token. Eight sequences on one device, in fp32, beside the gradient of all of GPT-2:

# %%
outputs = 8 * gpt2.seq_len * gpt2.vocab_size * 4
{"outputs": units.text(outputs), "gradients": units.text(S)}

# %% [markdown]
# Gradients have the size of the model, whatever the batch. That is the reason to exchange *them*, and leave outputs and losses where they are.
#
# Three results, always together: after three steps, are the weights those of one device with the whole batch? Who sends how many bytes a step? Who holds how many?

# %%
alone = model()
train(alone, alone, *batch)
found = {way.__name__: world.run(way, steps=3) for way in (server, DataParallel, DDP)}
{
    name: torch.allclose(ranks[0][0], weights(alone), rtol=0, atol=1e-12)
    for name, ranks in found.items()
}

# %%
for name, ranks in found.items():
    for i in (0, 1):
        amounts = units.text(books[name].by("rank")[i]), units.text(ranks[i][1].total)
        print(f"{name:13} rank {i}: sends {amounts[0]:>8}, holds {amounts[1]:>8}")

# %% [markdown]
# The same from formulas, with S for the gradient: a server sends S to each worker and each worker S to it; in `DataParallel` a scatter of inputs, a gather of outputs and
# a scatter of their gradients come on top; DDP is one ring. Held are S of weights, S of gradients, and where there is an Adam 2S and a step counter for each tensor.

# %%
S64 = weights(alone).nbytes
rows = [("scatter_star", 8 * 32 * 8)]  # inputs: 8 bytes a token
rows += [("gather_star", 8 * 32 * 128 * 8), ("scatter_star", 8 * 32 * 128 * 8)]


def all_of(calls):
    sent = [collectives.sent(op, nbytes=nbytes, n=4) for op, nbytes in calls]
    return sum(sent, Ledger())


expected = {"server": all_of([("broadcast_star", S64), ("reduce_star", S64)])}
expected["DataParallel"] = expected["server"] + all_of(rows)
expected["DDP"] = all_of([("all_reduce_ring", S64)])
{way: expected[way].diff(book, by="rank").unexplained for way, book in books.items()}

# %%
adam = 2 * S64 + 4 * config.num_tensors
unexplained = {}
for name, ((_, first), (_, other), *_) in found.items():
    optimizers = adam, adam * (name == "DDP")
    held = first.total - 2 * S64, other.total - 2 * S64
    unexplained[name] = [a - b for a, b in zip(held, optimizers, strict=True)]
unexplained

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
for name, n, engine in (
    ("one thread", 1, "threads"),
    ("two threads", 2, "threads"),
    ("two processes", 2, "processes"),
):
    with World(n, engine) as few:
        took = min(max(few.run(python)) for _ in range(30))
        print(f"{name}: {units.text(took, 's')}")

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


def noting(name):
    return lambda parameter: order.append(name)


for name, parameter in watched.named_parameters():
    parameter.register_post_accumulate_grad_hook(noting(name))
watched.loss(*batch).backward()
print(f"{len(order)} gradients. First: {order[:2]}. Last: {order[-2:]}.")

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
show(data_parallel.Replica.gradient_ready)

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
sent = f"sent {units.text(drift_bytes[0])}, DDP sends {units.text(ddp_bytes)}"
print(f"replicas equal: {torch.equal(replicas[0], replicas[1])}; {sent}")

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
    blocks = [parameter.nbytes for parameter in GPT(gpt2).blocks.parameters()]
layers = [(nbytes, 0.080 * nbytes / sum(blocks)) for nbytes in blocks]
together = units.text(32 * link.latency * link.bandwidth)
print(f"{len(layers)} tensors, {units.text(sum(blocks))}; N·λ·bw = {together}")

# %% [markdown]
# > A bucket for each tensor can leave the earliest. How long does the step take from the start of the backward pass to the last mean?

# %%
predict("buckets/one-each", ms=80)


# %%
def backward(bucket_bytes, n=32):
    return data_parallel.backward_timeline(
        layers, bucket_bytes=bucket_bytes, n=n, link=link
    )


plots.overlap(
    a_bucket_for_each_tensor=backward(1),
    buckets_of_25_MB=backward(25_000_000),
    one_bucket_for_all=backward(10**9),
)

# %%
reveal("buckets/one-each", ms=round(1e3 * backward(1).makespan))

# %% [markdown]
# Both extremes are slow, for opposite reasons. Above, latencies fill the network and it never catches up; below, it has nothing to do until the end. Between them lies a
# broad valley, and its left slope moves with N:

# %%
sizes = [10 ** (k / 8) for k in range(40, 69)]
steps_ms = {
    f"{n} ranks": [1e3 * backward(int(size), n).makespan for size in sizes]
    for n in (8, 32, 128)
}
plots.curves(
    [size / 1e6 for size in sizes],
    **steps_ms,
    log="x",
    xlabel="bucket (MB)",
    ylabel="backward pass (ms)",
    title="Small buckets cost latency, large ones cannot hide",
)

# %% [markdown]
# DDP takes 25 MiB; Megatron-LM's default grows with the number of ranks, for the reason that you see.

# %% [markdown]
# ## How much of the communication can you hide?
#
# So far a formula. Now four processes, and a clock. Two cores cannot compute for four ranks and move their bytes at the same time, so this backward pass *sleeps*, as a
# CPU does while a GPU works.


# %%
class Slow(torch.autograd.Function):
    """The identity; its backward pass takes its time and gives `weight` ones."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        ctx.shape = weight.shape
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, torch.ones(ctx.shape), None


class Layer(nn.Module):
    def __init__(self, numel, seconds):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))
        self.seconds = seconds

    def forward(self, x):
        return Slow.apply(x, self.weight, self.seconds)


# %%
def slow_step(rank, overlap, bucket_bytes=1_000_000, steps=5):
    """The time lines of a few steps of this rank: twelve layers of 1 MB, 20 ms each."""
    net = nn.Sequential(*(Layer(250_000, 0.020) for _ in range(12)))
    comm, timelines = rank.comm("dp"), []
    options = dict(bucket_bytes=bucket_bytes, overlap=overlap)
    replica = data_parallel.replicate(net, comm, **options)
    for _ in range(steps):
        comm.barrier()
        replica(torch.ones(1, requires_grad=True)).sum().backward()
        timelines.append(replica.timeline)
    return timelines


def fastest(timelines):
    """Of the steps of all ranks, the one that took least."""
    steps = [sum(step) for step in zip(*timelines, strict=True)]
    return min(steps, key=lambda timeline: timeline.makespan)


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
def in_buckets_of(k):
    """Twelve layers of 1 MB, k to a bucket."""
    return data_parallel.buckets([1_000_000] * 12, 1_000_000 * k)


def hideable(grouped):
    return 1 - grouped[-1].nbytes / sum(bucket.nbytes for bucket in grouped)


twelve = in_buckets_of(1)
reveal("overlap/hidden", percent=round(100 * hideable(twelve)))

# %% [markdown]
# And the clock, with overlap and without:

# %%
processes = World(4, engine="processes")
after = fastest(processes.run(slow_step, overlap=False))
during = fastest(processes.run(slow_step, overlap=True))

# %% tags=["nbval-ignore-output"]
plots.overlap(after_the_backward_pass=after, during_the_backward_pass=during)

# %% [markdown]
# Every rank's clock starts as it leaves a barrier. Above, the network rests for the whole backward pass, and then the ranks rest. Below, eleven of twelve buckets are under way
# while their rank is busy.

# %% tags=["nbval-ignore-output"]
for name, step in {"without overlap": after, "with it": during}.items():
    exposed = units.text(step.exposed, "s")
    print(f"{name:15}: hidden {step.hidden:.0%}, exposed {exposed}")
print(f"formula        : hidden {hideable(twelve):.0%}")

# %% [markdown]
# How many bytes moved does not depend on when they moved:

# %%
counted = processes.ledger.only(name="all_reduce")
data_parallel.bytes_to_reduce(twelve, 4, backwards=5).diff(counted)

# %% [markdown]
# With k layers to a bucket the last bucket is k times as large, and the formula says 1 − k/12. Line: the formula. Dots: measured.

# %% tags=["nbval-ignore-output"]
def overlapped(k):
    return fastest(processes.run(slow_step, True, bucket_bytes=1_000_000 * k, steps=4))


per_bucket = [1, 2, 3, 6, 12]
steps = [during, *(overlapped(k) for k in per_bucket[1:])]
one, all_twelve = (units.text(step.exposed, "s") for step in (steps[0], steps[-1]))
plots.curves(
    per_bucket,
    hidden=[100 * hideable(in_buckets_of(k)) for k in per_bucket],
    measured={"hidden": [100 * step.hidden for step in steps]},
    xlabel="layers in a bucket",
    ylabel="communication hidden (%)",
    title=f"What is in the last bucket cannot hide: {one} exposed with one layer in it,"
    f" {all_twelve} with all",
)

# %% [markdown]
# (On the clock a bucket's time includes the wait for the slowest rank, so single dots lie above or below.) The *last* bucket is the one to keep small. PyTorch's DDP has a small bucket too, of 1 MiB beside those of 25. Which one is it? Ten layers of 1 MiB, in the order in which
# their buckets leave:


# %%
def torchs_buckets(rank):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(10)))
    group = rank.comm("dp").group
    theirs = nn.parallel.DistributedDataParallel(net, process_group=group)
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
    for i, (inputs, targets) in enumerate(micro_batches(mine(rank, many), 8 // k)):
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
    equal = torch.allclose(found[0], gradient(right), rtol=0, atol=1e-12)
    each = units.text(sent[quiet])
    print(f"no_sync: {quiet!s:5}  equal: {equal}  sent by each rank: {each}")

# %%
reveal("accumulation/bytes", times=sent[False] // sent[True])

# %% [markdown]
# Right both times: a mean of gradients that are equal already is what it was, and the next micro-batch adds to it. So no test of values will ever find it, and the
# step sends four times as much. `no_sync()` lets gradients add up at home until the last micro-batch.

# %% [markdown]
# ## What must all ranks agree on?
#
# | what | or else | who sees to it |
# |---|---|---|
# | the weights at the start | replicas stay as far apart as they were | one broadcast, in `replicate` |
# | the order of reductions | bucket 1 of one rank is added to bucket 0 of another | every rank sends its buckets in their order, whichever is full first |
# | which gradients there are | a bucket is never complete, and the other ranks wait | shown below |
# | whether a step is skipped | one rank's weights are another model's from there on | shown below |
# | how many steps there are | the others wait for a rank that has no batch left: a deadlock | equal shares (exercise 8.1), or DDP's `join` |
# | buffers, such as the running statistics of a BatchNorm | which rank's model is it that you save? | DDP sends rank 0's before each forward pass, ours at the start; `nn.SyncBatchNorm` has statistics of the whole batch |
# | the format on the wire | gradients in bf16 are half the bytes, and every addition on the way rounds to 8 significant bits | a communication hook (below), `reduce_dtype` in FSDP2 (lab 09) |
#
# **Which gradients there are.** Here rank 1 does not use one of two layers:


# %%
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(2, 1, bias=False)
        self.right = nn.Linear(2, 1, bias=False)

    def forward(self, x, both):
        return self.left(x) + self.right(x) if both else self.left(x)


def branching(rank, find_unused):
    net, comm = Branches(), rank.comm("dp")
    replica = data_parallel.replicate(net, comm, find_unused=find_unused)
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
# **Whether a step is skipped.** In fp16 the loss is scaled, and a step whose gradients overflow is skipped (lab 02). Now one rank has an example whose gradient is inf, and three have
# not.
#
# > Who has to skip the step, and how do they come to know?


# %%
def half(rank, parts, steps=8):
    """Scales, steps taken and own overflows of a rank with `parts` of the batch."""
    net, overflowed = model().float(), set()
    replica = data_parallel.replicate(net, rank.comm("dp"))
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = LossScaler(2.0**12, growth_interval=3)
    scales, taken = [], []
    for step in range(steps):
        optimizer.zero_grad()
        if not fp16_backward(replica, scaler, parts, too_large=step == 4):
            overflowed.add(step)
        scales.append(int(scaler.value))
        taken.append(scaler.step(optimizer))
        scaler.update()
    return scales, taken, overflowed


# %%
def fp16_backward(replica, scaler, parts, too_large):
    """Whether gradients were finite as they left the loss; quarter 2 may be inf."""
    finite = []
    for part in parts:
        quiet = replica.no_sync() if part != parts[-1] else contextlib.nullcontext()
        with autocast(torch.float16), quiet:
            outputs = replica(batch[0][part::4])
            outputs.register_hook(lambda slope: finite.append(slope.isfinite().all()))
            loss = entropy(outputs, batch[1][part::4]) / len(parts)
            scaler.scale(loss * (1e9 if too_large and part == 2 else 1)).backward()
    return all(finite)


# %%
def report(who, scales, taken, overflowed):
    own = sorted(overflowed) or "none"
    skipped = taken.index(False)
    print(f"{who:10} own overflow: {own!s:4}  skipped {skipped}, scales {scales}")


for i, found in enumerate(world.run(lambda rank: half(rank, [rank.rank]))):
    report(f"rank {i}", *found)
report("one device", *World(1).run(half, range(4))[0])

# %% [markdown]
# All of them skip, and nobody has to tell them: the mean of an inf and three numbers is an inf, on every rank. So reduce *first*, then look for infs, then unscale. Every rank keeps a scaler of its
# own, all see the same gradients, and all scales move alike, as on one device that takes the four quarters one after the other. A rank that looked at its own
# gradient before the reduction would skip alone, and its weights would be another model's from there on.
#
# ### Exercise 8.3 · Bug hunt: the wrapper that passed its test (20 min, ●●●)
#
# A data-parallel wrapper with buckets, and the test that it was written with: every rank gets the right gradient. Three things are wrong all the same. Repair them.


# %%
class Buckets:
    def __init__(self, module, comm, bucket_bytes):
        self.module, self.comm = module, comm
        self.bucket_bytes, self.waiting = bucket_bytes, []
        for parameter in module.parameters():
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
# The library's own, in full:

# %%
show(data_parallel.Replica)

# %% [markdown]
# ## Is it as good as PyTorch's?
#
# On processes, PyTorch's `DistributedDataParallel` runs beside ours in the same rank function: same weights, same data, its own all-reduce (gloo).

# %%
sizes = dict(num_layers=4, d_model=128, num_heads=4, d_ff=512)
medium = ModelConfig(**sizes, vocab_size=512, seq_len=64)
data = tuple(torch.randint(512, (8, 64), generator=draw) for _ in range(2))


def wrapped(rank, whose):
    net = GPT(medium, generator=torch.Generator().manual_seed(rank.rank))
    if whose == "ours":
        return net, data_parallel.replicate(net, rank.comm("dp"))
    options = dict(process_group=rank.comm("dp").group, gradient_as_bucket_view=True)
    return net, nn.parallel.DistributedDataParallel(net, **options)


# %%
EPS = 1e-4  # above the rounding noise of gradients that should be 0


def trained(rank, whose):
    return train(*wrapped(rank, whose), *mine(rank, data), eps=EPS)


theirs, ours = (processes.run(trained, whose) for whose in ("theirs", "ours"))
counted = processes.ledger

# %%
net = GPT(medium, generator=torch.Generator().manual_seed(0))
alone, _ = train(net, net, *data, eps=EPS)
for name, found in {"ours": ours, "theirs": theirs}.items():
    first, *others = (w for w, _ in found)
    same = all(torch.equal(first, other) for other in others)
    equal = torch.allclose(first, alone, rtol=0, atol=1e-6)
    print(f"{name:7} equal to one device: {equal}, replicas the same bits: {same}")

# %% [markdown]
# **Bytes sent**: everything that left our ranks, a broadcast and three steps, predicted by formula (what gloo sends, nobody counts):

# %%
grouped = data_parallel.buckets([parameter.nbytes for parameter in net.parameters()])
sent = data_parallel.bytes_to_start(net, 4)
sent += data_parallel.bytes_to_reduce(grouped, 4, backwards=3)
sent.diff(counted)

# %% [markdown]
# **Bytes held** by each rank after the last step: weights, gradients, Adam. Gradients are views of the buckets, so the buckets add nothing; PyTorch does the same with
# `gradient_as_bucket_view=True`, and without it holds every gradient twice.

# %%
setting = TrainConfig(micro_batch=2, global_batch=8, precision="fp32")
memory.model_states(medium, setting).diff(ours[0][1])

# %%
for name, found in {"ours": ours, "theirs": theirs}.items():
    print(f"{name:7}", *(units.text(states.total) for _, states in found))

# %% [markdown]
# And the time of a step, forward to the last mean, the two taking turns:


# %%
def race(rank, rounds=12):
    """Seconds of each step, ours and theirs in turn."""
    racers = {whose: wrapped(rank, whose)[1] for whose in ("ours", "theirs")}
    times = {whose: [] for whose in racers}
    inputs, targets = mine(rank, data)
    for whose, wrapper in list(racers.items()) * rounds:
        wrapper.zero_grad()
        rank.comm("dp").barrier()
        start = time.perf_counter()
        entropy(wrapper(inputs), targets).backward()
        times[whose].append(time.perf_counter() - start)
    return times


# %% tags=["nbval-ignore-output"]
times = processes.run(race)
for whose in ("ours", "theirs"):
    slowest = sorted(map(max, zip(*(rank[whose] for rank in times), strict=True)))
    print(f"{whose}: {units.text(slowest[len(slowest) // 2], 's')}")

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
    """The backward pass and its reductions, on links of 10 µs and that bandwidth."""
    network = Link(10e-6, bandwidth_GBps * 1e9)
    options = dict(bucket_bytes=int(bucket), n=ranks, link=network)
    during = data_parallel.backward_timeline(layers, **options)
    after = data_parallel.backward_timeline(layers, **options, overlap=False)
    return plots.overlap(after_the_backward_pass=after, during_the_backward_pass=during)


sizes = log(1e5, 1e9, 10, unit="B")
explore(knobs, states=45, bucket=sizes, ranks=[8, 32, 128], bandwidth_GBps=[1, 10, 100])

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
# | `register_comm_hook` | what is sent instead: `fp16_compress_hook`, `bf16_compress_hook`, PowerSGD |
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
summed = collectives.sent("all_reduce_ring", nbytes=S, n=4).by("rank")[0]
outputs = [4 * b * gpt2.seq_len * gpt2.vocab_size for b in (1, 8)]
[units.text(nbytes) for nbytes in (summed, *outputs)]

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
each = states.total / xl.num_params
f"{units.text(states.total)} per rank, {each:.0f} bytes per parameter, on 2 as on 2000"

# %% [markdown]
# **"The default bucket is 25 MB"** (the scaling guide and its source). `bucket_cap_mb=25` counts MiB. And the first bucket to leave is smaller:

# %%
ddp = nn.parallel.distributed
usual = ddp._DEFAULT_BUCKET_CAP_MB * ddp._MB_TO_BYTES
{"bucket": usual, "first bucket": torch.distributed._DEFAULT_FIRST_BUCKET_BYTES}

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
# >   <!-- claim: round(100 * data_parallel.backward_timeline([(1000, 1.0)] * 12, bucket_bytes=1000, n=2, link=config.Link(0, 2000)).hidden) == 92 -->
# > - Whether a step is skipped must agree too: an inf of one rank is in the mean of all, if you reduce before you look.
# > - The last bucket must be flushed, every bucket in the same order on all ranks, and with k micro-batches once a step: without `no_sync` the values are right and
# >   the bytes k-fold.
# >   <!-- claim: data_parallel.bytes_to_reduce(data_parallel.buckets({"a": 400}), 4, backwards=4).total == 4 * data_parallel.bytes_to_reduce(data_parallel.buckets({"a": 400}), 4).total -->
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
