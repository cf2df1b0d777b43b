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
# - give every rank its share of the data, so that no example is lost and no rank waits for another (exercise 8.1),
# - keep replicas equal to the last bit, with gradients that travel while others are computed (exercise 8.2),
# - find what is wrong with a wrapper whose gradients are right (exercise 8.3, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import contextlib
import functools
import statistics
import time

import torch
from torch import nn

from labutils import collectives, data_parallel, measure, memory, units
from labutils.accumulation import micro_batches
from labutils.config import Link, Mesh, ModelConfig, TrainConfig
from labutils.model import GPT
from labutils.precision import LossScaler
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
# That is data parallelism: **a copy of everything on every device, one mean of gradients per step, and as little waiting for it as possible.**

# %% [markdown]
# ## Is the mean over devices the gradient of the batch?
#
# A small GPT, a batch of eight sequences, four ranks. All is in float64, so that what differs is a mistake and not rounding.

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
# Divide by the number of ranks, and the two are one gradient. The formula is that of gradient accumulation (lab 05), with ranks in place of micro-batches, and it has the same
# condition: all ranks have equally many examples. Ten sequences on four ranks are 3, 3, 2 and 2.

# %%
ten = sequences(10)
right = model()
right.loss(*ten).backward()


def uneven(rank, weigh):
    net, comm = model(), rank.comm("dp")
    inputs, targets = mine(rank, ten)
    weight = data_parallel.share(len(inputs), comm) if weigh else 1
    (net.loss(inputs, targets) * weight).backward()
    return comm.all_reduce(gradient(net)) / comm.size


for weigh in (False, True):
    off = world.run(uneven, weigh)[0] - gradient(right)
    print(f"weighed: {weigh!s:5}  off by {off.norm() / gradient(right).norm():.0%}")

# %% [markdown]
# Nothing crashes in either case. `data_parallel.share` weighs each loss by its number of examples. Data loaders avoid the question: they give all ranks equally many.
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
S = 4 * gpt2.num_params


def busiest(algorithm, n):
    """GB that the rank sends which sends most."""
    return max(collectives.sent(algorithm, nbytes=S, n=n).by("rank").values()) / 1e9


reveal("server/sends", GB=round(busiest("broadcast_star", 8), 2))

# %% [markdown]
# These are the weights for seven workers, and the server receives as many gradients. On a ring no rank sends more than twice the gradient, however many ranks there are:

# %%
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
# The outputs that `DataParallel` gathers grow with the batch. Those of GPT-2 for eight sequences, in fp32, beside the gradient of the whole model:

# %%
outputs = 8 * gpt2.seq_len * gpt2.vocab_size * 4
{"outputs": units.text(outputs), "gradients": units.text(S)}

# %% [markdown]
# So exchange gradients, which have the size of the model, and leave outputs and losses where they are. Every rank then holds weights, gradients and an optimizer of its own: equal
# gradients through equal optimizers make equal weights. That every rank holds *everything* is the waste that lab 09 removes.
#
# **Threads or processes?** `DataParallel` runs its replicas as threads of one Python process. How many processor cores do two ranks keep busy that do nothing but Python? Below is the
# processor time of both over the time on the clock, the median of five runs that start together.


# %%
def python_only(rank):
    """This rank's time on the clock, and on a core."""
    rank.comm().barrier()
    clock, core = time.perf_counter(), time.thread_time()
    sum(i * i for i in range(1_000_000))
    return time.perf_counter() - clock, time.thread_time() - core


def cores_busy(ranks):
    clock, core = zip(*ranks.run(python_only), strict=True)
    return sum(core) / max(clock)


# %% tags=["nbval-ignore-output"]
for engine in ("threads", "processes"):
    with World(2, engine) as two:
        cores = statistics.median(cores_busy(two) for _ in range(5))
        print(f"two {engine}: {cores:.1f} cores")

# %% [markdown]
# Two threads share one core, however many there are: only the thread that has Python's global interpreter lock (GIL) runs. Two processes have a lock each, and use two cores where two
# are free. PyTorch's documentation gives this as one reason to use DDP, with one process per device, even on a single machine.

# %% [markdown]
# ## When may a gradient leave?
#
# The plainest data parallelism is a loop after the backward pass:

# %%
show(data_parallel.average_gradients)

# %% [markdown]
# The network idles while gradients are computed, and the ranks idle while they travel. But a gradient may leave as soon as it is complete, and autograd says when: `parameter.register_post_accumulate_grad_hook(hook)` calls `hook(parameter)` right after a gradient has been added to `.grad`.
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
# Layers come in reverse, and a gradient is complete when its *last* contribution is there. The tied matrix gets one contribution from the output, at the beginning of the backward pass,
# and one from the embedding, at the end. No other computation is left for it to hide behind. In GPT-2 it is large:

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
# The hook is given the *parameter*. A published exercise reduces that, and nothing else. Below it trains beside our replicas and beside one device with the whole batch.


# %%
def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def train(net, wrapper, data, eps=1e-8):
    """Weights and states after three steps; `wrapper` returns what net returns."""
    optimizer = torch.optim.AdamW(net.parameters(), eps=eps)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = wrapper(data[0]).flatten(0, 1)
        nn.functional.cross_entropy(outputs, data[1].flatten()).backward()
        optimizer.step()
    return weights(net), measure.model_states(net, optimizer)


# %%
def published(rank):
    net, comm = model(), rank.comm("dp")

    def hook(parameter):
        parameter.data.copy_(comm.all_reduce(parameter.data) / comm.size)

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return train(net, net, mine(rank, batch))


def replicated(rank):
    net = model(seed=rank.rank)
    replica = data_parallel.replicate(net, rank.comm("dp"))
    return train(net, replica, mine(rank, batch))


# %%
alone = model()
expected, _ = train(alone, alone, batch)


def compare(name, found, tolerance):
    (first, _), (second, _), *_ = found
    right = torch.allclose(first, expected, rtol=0, atol=tolerance)
    equal = torch.equal(first, second)
    print(f"{name:10}  as on one device: {right!s:5}  ranks the same bits: {equal!s:5}")


for program in (published, replicated):
    compare(program.__name__, world.run(program), 1e-12)
    sent = world.ledger.only(rank=0, name="all_reduce").total
    print(f"{'':10}  rank 0 all-reduces {units.text(sent)}")

# %% [markdown]
# The bytes are the same. But parameters of equal replicas have a mean that changes nothing, and then each rank steps along a gradient of its own.

# %% [markdown]
# ## How large should a bucket be?
#
# One message for each parameter costs a latency each; one message for all can leave only when the last gradient is there. A bucket of B bytes on a ring of N ranks, whose links have latency λ
# and bandwidth bw, takes
#
# $$ t(B) \;=\; 2(N-1)\,\lambda \;+\; 2\,\tfrac{N-1}{N}\,\frac{B}{\mathrm{bw}}, $$
#
# and the next one waits for it. Latency and bytes cost the same at B = N·λ·bw. So buckets should be large against N·λ·bw, and small against the whole gradient.
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
# Both extremes are slow, for opposite reasons. With a bucket for each tensor the network is busy to the end, mostly with latencies; with one bucket it has nothing to do until the backward
# pass is over. Between them lies a broad valley, and its left slope moves with N:

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
# DDP's default is 25 MiB, whatever N is. Megatron-LM's grows with N.

# %% [markdown]
# ## How much of the communication can you hide?
#
# A bucket that leaves when its layer is done travels while the next layer is computed. Only the last one has nothing left to hide behind. So, *if the network keeps up*,
#
# $$ \text{hidden} \;=\; 1 - \frac{S_{\text{last}}}{\sum_k S_k}, $$
#
# where $S_k$ are the bytes of bucket k. That is the most that overlap can do. The same backward pass with buckets of 25 MB, on three networks:


# %%
def hideable(buckets):
    return 1 - buckets[-1].nbytes / sum(bucket.nbytes for bucket in buckets)


buckets_of = dict(bucket_bytes=25_000_000, n=32)
for GBps in (1, 10, 100):
    slow_or_fast = Link(10e-6, GBps * 1e9)
    step = data_parallel.backward_timeline(layers, **buckets_of, link=slow_or_fast)
    exposed = units.text(step.exposed, "s")
    print(f"{GBps:3} GB/s: {step.hidden:.0%} hidden, {exposed} exposed")
print(f"formula : {hideable(data_parallel.buckets(blocks, 25_000_000)):.0%} hidden")

# %% [markdown]
# On the slowest network hardly anything is hidden. When does a network keep up? A parameter takes 4 bytes of gradient over links of bandwidth bw, about 8/bw seconds on many ranks. Its share
# of a backward pass over T tokens is 4T FLOPs, 4T/F seconds at F FLOP/s. The number of parameters cancels:
#
# $$ \frac{8}{\mathrm{bw}} \;\le\; \frac{4T}{F} \quad\Longleftrightarrow\quad T \;\ge\; \frac{2F}{\mathrm{bw}} \quad\text{tokens per rank.} $$
#
# At 400 TFLOP/s and 50 GB/s per rank, with fewer tokens and with more, for two models:

# %%
F, network = 400e12, Link(latency=0, bandwidth=50e9)
enough = 2 * F / network.bandwidth


def hidden_at(tokens, parameters, pieces=100):
    """The hidden part where a backward pass has so many tokens per rank."""
    piece = int(4 * parameters / pieces), 4 * tokens * parameters / pieces / F
    options = dict(bucket_bytes=piece[0], n=1024, link=network)
    return data_parallel.backward_timeline([piece] * pieces, **options).hidden


for tokens in (enough / 4, enough / 2, enough, 2 * enough):
    small, large = hidden_at(tokens, 1e9), hidden_at(tokens, 70e9)
    print(f"{tokens:6,.0f} tokens: {small:.0%} hidden with 1 B, {large:.0%} with 70 B")

# %% [markdown]
# So far a formula. Now four processes, and a clock. Two cores cannot compute for four ranks and move their bytes at the same time, so the layers of this chain *sleep* in their backward
# pass, as a CPU does while a GPU works. Twelve layers of 1 MB, 20 ms each, and of a few steps the one of median length:

# %%
twelve = [(1_000_000, 0.020)] * 12
processes = World(4, engine="processes")


def sleeping(rank, per_bucket=1, overlap=True):
    """This rank's time line of each of three steps."""
    chain, comm = data_parallel.waiting_chain(twelve), rank.comm("dp")
    options = dict(bucket_bytes=per_bucket * 1_000_000, overlap=overlap)
    replica, timelines = data_parallel.replicate(chain, comm, **options), []
    for _ in range(3):
        comm.barrier()
        replica(torch.ones(1)).backward()
        timelines.append(replica.timeline)
    return timelines


def median_step(**options):
    steps = map(sum, zip(*processes.run(sleeping, **options), strict=True))
    return sorted(steps, key=lambda step: step.makespan)[1]


# %% tags=["nbval-ignore-output"]
after, during = median_step(overlap=False), median_step()
plots.overlap(after_the_backward_pass=after, during_the_backward_pass=during)

# %% [markdown]
# Every rank's clock starts as it leaves a barrier. Without overlap the network rests for the whole backward pass, and then the ranks rest. How many bytes move does not depend on when they
# move:

# %%
counted = processes.ledger.only(name="all_reduce")
in_buckets = data_parallel.buckets([1_000_000] * 12, 1_000_000)
data_parallel.bytes_to_reduce(in_buckets, 4, backwards=3).diff(counted)

# %% [markdown]
# With k layers to a bucket the last bucket is k times as large, and the formula says 1 − k/12. Line: the formula. Dots: measured, where the time of a bucket includes the wait for the
# slowest rank.

# %% tags=["nbval-ignore-output"]
per_bucket = [1, 3, 6, 12]
steps = [during, *(median_step(per_bucket=k) for k in per_bucket[1:])]
one, all_twelve = (units.text(step.exposed, "s") for step in (steps[0], steps[-1]))
plots.curves(
    per_bucket,
    hidden=[100 * (1 - k / 12) for k in per_bucket],
    measured={"hidden": [100 * step.hidden for step in steps]},
    xlabel="layers in a bucket",
    ylabel="communication hidden (%)",
    title=f"What is in the last bucket cannot hide: {one} exposed with one layer in it,"
    f" {all_twelve} with all",
)

# %% [markdown]
# The *last* bucket is the one to keep small. PyTorch's DDP has one small bucket by default, of 1 MiB beside those of 25 MiB. Which one is it? Ten layers of 1 MiB, the sizes of their
# buckets in the order in which they leave:


# %%
def torchs_buckets(rank):
    net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(10)))
    group = rank.comm("dp").group
    theirs = nn.parallel.DistributedDataParallel(net, process_group=group)
    for _ in range(3):
        theirs(torch.ones(1, 512)).sum().backward()
    return theirs._get_ddp_logging_data()["rebuilt_bucket_sizes"]


processes.run(torchs_buckets)[0]

# %% [markdown]
# The *first*: the network begins early, and what is exposed at the end is a whole bucket. You make it smaller with `bucket_cap_mb`, or give each bucket a size of its own with
# `bucket_cap_mb_list` (torch 2.13).

# %% [markdown]
# ## What do micro-batches change?
#
# With accumulation (lab 05) there are several backward passes to a step, and every one of them calls the hooks.
#
# > Four micro-batches, a reduction in each. The gradients at the end: right or wrong? And how many times the bytes are sent?

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
# Right both times: the mean of gradients that are equal already changes nothing, and the next micro-batch adds to it. No test of values can find the difference. `no_sync()` lets gradients
# add up on their own rank until the last micro-batch.

# %% [markdown]
# ## What must all ranks agree on?
#
# The contracts of PyTorch's DDP, and what happens where you break your part. Ours has the same ones, except where the table says so.
#
# | about | what DDP promises | what you must do | otherwise |
# |---|---|---|---|
# | weights at the start | rank 0's, by one broadcast | build the same module on every rank | replicas stay as far apart as they began |
# | order of reductions | buckets leave in one order, whichever is full first | call collectives of your own in the same order on all ranks | one tensor is added to another, or a deadlock |
# | which gradients exist | it waits for every parameter | use every parameter in every step, or `find_unused_parameters=True` | *shown below* |
# | skipped steps | the same gradient on every rank | look for inf, and clip, *after* the reduction | *shown below* |
# | number of steps | nothing | equal shares (exercise 8.1), or `join()` | a deadlock |
# | size of the share | a mean over ranks | equally many examples, or `data_parallel.share` | the gradient is off, as in the first question |
# | micro-batches | a reduction in each backward pass | `no_sync()` for all but the last | right values, k times the bytes |
# | random numbers | nothing | one seed for the weights, another per rank for dropout | every rank drops the same units |
# | buffers (BatchNorm's statistics) | rank 0's before each forward pass; ours only at the start | save rank 0's; `nn.SyncBatchNorm` has statistics of the whole batch | each rank has other statistics |
# | format on the wire | that of the gradients | nothing; a communication hook sends bf16, half the bytes | bf16: each number and each sum on the way has 8 significant bits |
#
# **Which gradients exist.** Rank 1 does not use one of two layers:


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
    return {name: p.grad.tolist() for name, p in net.named_parameters()}


two = World(2)
try:
    two.run(branching, find_unused=False)
except RankError as error:
    print(str(error).splitlines()[0])

# %% [markdown]
# Its bucket would never be complete. With `find_unused` a gradient that does not come counts as zero, on this rank alone:

# %%
two.run(branching, find_unused=True)[1]

# %% [markdown]
# The mean over rank 0's ones and rank 1's zeros. A mixture of experts needs this agreement for every expert that gets no token on some rank.
#
# **Skipped steps.** In fp16 the loss is scaled, and a step whose gradients overflow is skipped (lab 02). Now the loss of one rank, of four, is inf.
#
# > How many ranks skip the step?

# %%
predict("overflow/skip", ranks=1)


# %%
def overflowing(rank, look_first=False):
    """Whether this rank steps, and whether its weights are finite then."""
    net, comm = nn.Linear(4, 1), rank.comm("dp")
    replica, scaler = data_parallel.replicate(net, comm), LossScaler(2.0**12)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with replica.no_sync() if look_first else contextlib.nullcontext():
        loss = replica(torch.ones(1, 4)).sum() * (torch.inf if rank.rank == 2 else 1)
        scaler.scale(loss).backward()
    if look_first:
        scaler.unscale_(optimizer)
        data_parallel.average_gradients(net, comm)
    return {
        "steps": scaler.step(optimizer),
        "finite": bool(weights(net).isfinite().all()),
    }


found = world.run(overflowing)
reveal("overflow/skip", ranks=[rank["steps"] for rank in found].count(False))

# %% [markdown]
# All of them, and nobody has to tell them: the mean of an inf and three numbers is an inf, on every rank. Now let each rank look for inf *before* the reduction:

# %%
dict(enumerate(world.run(overflowing, look_first=True)))

# %% [markdown]
# Rank 2 skips alone. The others step along the mean, which holds its inf, and their weights are lost. Clipping is the same case: the norm that counts is that of the mean.
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
# In the library, the end of a backward pass and a block without reductions are these:

# %%
show(data_parallel.Replica.backward_done)

# %%
show(data_parallel.Replica.no_sync)

# %% [markdown]
# ## Is it as good as PyTorch's?
#
# On processes, PyTorch's `DistributedDataParallel` runs beside ours in the same rank function: same weights, same data, its own all-reduce (gloo).

# %%
sizes = dict(num_layers=4, d_model=128, num_heads=4, d_ff=512)
medium = ModelConfig(**sizes, vocab_size=128, seq_len=32)


def wrapped(rank, whose, net, bucket_bytes=data_parallel.BUCKET_BYTES):
    comm = rank.comm("dp")
    if whose == "ours":
        return data_parallel.replicate(net, comm, bucket_bytes=bucket_bytes)
    options = dict(bucket_cap_mb=bucket_bytes / 2**20, gradient_as_bucket_view=True)
    options["process_group"] = comm.group
    return nn.parallel.DistributedDataParallel(net, **options)


def trained(rank, whose):
    net = GPT(medium, generator=torch.Generator().manual_seed(rank.rank))
    # eps is above the rounding noise of gradients that should be 0
    return train(net, wrapped(rank, whose, net), mine(rank, batch), eps=1e-4)


# %%
alone = GPT(medium, generator=torch.Generator().manual_seed(0))
expected, _ = train(alone, alone, batch, eps=1e-4)
theirs, ours = (processes.run(trained, whose) for whose in ("theirs", "ours"))
compare("ours", ours, 1e-6)
compare("PyTorch's", theirs, 1e-6)

# %% [markdown]
# **Bytes sent**: all that left our ranks, in a broadcast and three steps, beside the formula (nobody counts what gloo sends):

# %%
grouped = data_parallel.buckets([parameter.nbytes for parameter in alone.parameters()])
sent = data_parallel.bytes_to_start(alone, 4)
sent += data_parallel.bytes_to_reduce(grouped, 4, backwards=3)
sent.diff(processes.ledger)

# %% [markdown]
# **Bytes held** by each rank after the last step: weights, gradients, Adam. Gradients are views of the buckets, so the buckets add nothing; PyTorch's do the same with
# `gradient_as_bucket_view=True`.

# %%
setting = TrainConfig(micro_batch=2, global_batch=8, precision="fp32")
memory.model_states(medium, setting, Mesh(dp=4)).diff(ours[0][1])

# %%
{"ours": units.text(ours[0][1].total), "PyTorch's": units.text(theirs[0][1].total)}

# %% [markdown]
# **Time.** Four processes on two cores mostly measure who gets a core, so this step is that of the sleeping chain: 240 ms of waiting, and what is exposed. The median of five,
# the two taking turns, on the slowest rank:


# %%
def race(rank):
    turns = {}
    for whose in ("ours", "theirs"):
        chain = data_parallel.waiting_chain(twelve)
        replica = wrapped(rank, whose, chain, bucket_bytes=1_000_000)
        turns[whose] = functools.partial(one_pass, replica)
    return measure.median_seconds(turns, 5, before=rank.comm("dp").barrier)


def one_pass(replica):
    replica.zero_grad()
    replica(torch.ones(1)).backward()


# %% tags=["nbval-ignore-output"]
times = processes.run(race)
for whose in ("ours", "theirs"):
    print(f"{whose}: {units.text(max(rank[whose] for rank in times), 's')}")
processes.close()

# %% [markdown]
# `make bench` times training steps of both, and prints the ratio.
#
# ## Turn the knobs
#
# The blocks of GPT-2 once more, on links of 10 µs. Find a network on which overlap hides nearly everything, one on which no bucket size helps, and the bucket that suits 128 ranks.


# %%
def knobs(bucket=1e7, ranks=128, bandwidth_GBps=10):
    """The backward pass and its reductions."""
    network = Link(10e-6, bandwidth_GBps * 1e9)
    options = dict(bucket_bytes=int(bucket), n=ranks, link=network)
    return plots.overlap(backward=data_parallel.backward_timeline(layers, **options))


sizes = log(1e5, 1e9, 10, unit="B")
explore(knobs, states=30, bucket=sizes, ranks=[8, 128], bandwidth_GBps=[1, 10, 100])

# %% [markdown]
# ## In practice
#
# **PyTorch DDP.** `DistributedDataParallel(model, device_ids=[local_rank])` in a program of which `torchrun` starts one process per device. On two machines of eight GPUs, the same line on both:
#
# ```bash
# torchrun --nnodes=2 --nproc-per-node=8 \
#     --rdzv-backend=c10d --rdzv-endpoint=first-machine:29400 --rdzv-id=my-run train.py
# ```
#
# | option | what it does |
# |---|---|
# | `bucket_cap_mb` (25) | bucket size in **MiB**: 26.2 MB. Left alone, the first one to leave has 1 MiB |
# | `gradient_as_bucket_view=True` | `.grad` is a view of the bucket: one gradient less in memory, no copies |
# | `find_unused_parameters=True` | searches the graph after each forward pass for parameters without a gradient |
# | `register_comm_hook` | what is sent instead: `fp16_compress_hook`, `bf16_compress_hook`, PowerSGD |
#
# | | Accelerate | Lightning | torchtitan |
# |---|---|---|---|
# | replicas | `accelerator.prepare(model, optimizer, loader)` | `Trainer(strategy="ddp", devices=8, num_nodes=2)` | `parallelism.data_parallel_replicate_degree` (and `…shard_degree = 1`) |
# | shares of the data | in `prepare` | `use_distributed_sampler=True`, the default | its own data loader |
# | accumulation | `Accelerator(gradient_accumulation_steps=k)`, `with accelerator.accumulate(model):` | `Trainer(accumulate_grad_batches=k)` | `training.global_batch_size` against `training.local_batch_size` |
# | DDP's options | `kwargs_handlers=[DistributedDataParallelKwargs(…)]` | `strategy=DDPStrategy(…)` | buckets of 100 MiB |
# | start | `accelerate launch` or `torchrun` | the Trainer itself or `torchrun` | `torchrun` |
#
# **Megatron-LM** sends buckets during the backward pass with `--overlap-grad-reduce` (off by default); `--ddp-bucket-size` counts *elements*, at least 40 million, and a million per
# data-parallel rank if that is more. **DeepSpeed** reduces at the accumulation boundary; `overlap_comm` (off by default) and `reduce_bucket_size` (5·10⁸ *elements*) are settings of
# `zero_optimization`.
#
# **A mean over tokens**, not over ranks, is what a language model with padding needs: all-reduce the number of tokens first (lab 05), and multiply the loss by N, since DDP divides.

# %% [markdown]
# ## Errata
#
# **"A synchronization phase where the outputs from all GPUs are harmonized"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024, on DDP). DDP averages *gradients*; outputs and losses stay
# where they are. What each of four ranks of GPT-2 sends for its gradients, whatever its batch, beside the bytes of its outputs for one sequence and for eight:

# %%
summed = collectives.sent("all_reduce_ring", nbytes=S, n=4).by("rank")[0]
outputs = [4 * b * gpt2.seq_len * gpt2.vocab_size for b in (1, 8)]
[units.text(nbytes) for nbytes in (summed, *outputs)]

# %% [markdown]
# **Weights that do not fit, and DDP as a remedy** (the same article recommends "DDP or FSDP" for them). DDP holds *everything* on every rank, on two as on two thousand. GPT-2 XL in mixed
# precision with Adam:

# %%
xl = ModelConfig.named("gpt2-xl")
for n in (2, 2000):
    setting = TrainConfig(micro_batch=1, global_batch=n)
    states = memory.model_states(xl, setting, Mesh(dp=n)).total
    each = f"{states / xl.num_params:.0f} B per parameter"
    print(f"{n:4} ranks: {units.text(states)} on each, {each}")

# %% [markdown]
# **Gradients synchronized by all-reduce**, without a word on the division (an article on training at scale, in its section on data parallelism). NCCL, gloo and MPI sum; without the division the gradient
# is N times too large, and Adam hides it (lab 05).
#
# **A default bucket of 25 MB** (the same article, and *The Ultra-Scale Playbook*). `bucket_cap_mb=25` counts MiB. And the first bucket to leave is smaller:

# %%
ddp = nn.parallel.distributed
usual = ddp._DEFAULT_BUCKET_CAP_MB * ddp._MB_TO_BYTES
{"bucket": usual, "first bucket": torch.distributed._DEFAULT_FIRST_BUCKET_BYTES}

# %% [markdown]
# **"Each node computes gradients locally"** (lecture slides on multi-GPU training). Each *process* does, and there is one per device: two nodes of eight GPUs are sixteen data-parallel ranks.

# %% [markdown]
# ## Summary
#
# > - The gradient of the batch is the *mean* over ranks, if all have equally many examples; all-reduce sums, so divide by N, once.
# >   <!-- claim: world.World(4).run(lambda rank: rank.comm().all_reduce(torch.tensor([1.0])).item()) == [4.0] * 4 -->
# > - Exchange what has the size of the model, not of the batch. On eight ranks a server sends GPT-2's weights seven times, 3.48 GB per step; a ring has each rank send
# >   1.75 times its gradient, 0.87 GB.
# >   <!-- claim: [round(max(collectives.sent(way, nbytes=4 * config.ModelConfig.named("gpt2").num_params, n=8).by("rank").values()) / 1e9, 2) for way in ("broadcast_star", "all_reduce_ring")] == [3.48, 0.87] -->
# > - Gradients come from the last layer to the first, and travel in buckets while others are computed. Small buckets pay latency, one bucket for all
# >   cannot hide. A tied embedding comes last: 31 % of GPT-2.
# >   <!-- claim: (lambda m: round(100 * m.vocab_size * m.d_model / m.num_params))(config.ModelConfig.named("gpt2")) == 31 -->
# > - If the network keeps up, all communication can hide but the last bucket's: 1 − S_last / ΣS, 92 % for twelve equal buckets. If it is ten times too slow, 9 % hide.
# >   <!-- claim: [round(100 * data_parallel.backward_timeline([(1000, 1.0)] * 12, bucket_bytes=1000, n=2, link=config.Link(0, bw)).hidden) for bw in (2000, 100)] == [92, 9] -->
# > - With fp32 gradients it keeps up from about 2F/bw tokens per rank on, whatever the size of the model: 16,000 at 400 TFLOP/s and 50 GB/s.
# >   <!-- claim: [round(100 * data_parallel.backward_timeline([(4000, 4000 * T / 400e12)] * 100, bucket_bytes=4000, n=1024, link=config.Link(0, 50e9)).hidden) for T in (8000, 16000)] == [50, 99] -->
# > - Look for inf, and clip, after the reduction: the inf of one rank is then in the mean of all, and all skip the step.
# > - The last bucket must be flushed, every bucket in the same order on all ranks, and with k micro-batches once per step: without `no_sync` the values are right and
# >   the bytes k-fold.
# >   <!-- claim: data_parallel.bytes_to_reduce(data_parallel.buckets({"a": 400}), 4, backwards=4).total == 4 * data_parallel.bytes_to_reduce(data_parallel.buckets({"a": 400}), 4).total -->
# > - Data parallelism makes training faster, not smaller: every rank holds all 16 bytes per parameter.
# >   <!-- claim: [round(memory.model_states(m, config.TrainConfig(micro_batch=1, global_batch=n), config.Mesh(dp=n)).total / m.num_params) for m in [config.ModelConfig.named("gpt2-xl")] for n in (1, 2048)] == [16, 16] -->
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
