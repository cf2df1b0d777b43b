# %% [markdown]
# # 08 · Train one model on many devices
#
# **Four devices hold a copy of the model each and a quarter of the batch. What must they tell each other, and when, so that training is the same as on one?**
#
# *110 min · before this: labs 05 and 07 · needs a laptop, no GPU and no network*

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
# Divide by the number of ranks, and the two are one gradient, where all ranks have equally many examples (lab 05 shows what unequal ones do). Data loaders see to that, and so will you.
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
# These are the weights for seven workers, and the server receives as many gradients. On a ring no rank sends more than twice the gradient, however many ranks there are. The outputs that
# `DataParallel` gathers grow with the batch as well. Those of GPT-2 for eight sequences, in fp32, beside the gradient of the whole model:

# %%
outputs = 8 * gpt2.seq_len * gpt2.vocab_size * 4
{"outputs": units.text(outputs), "gradients": units.text(S)}

# %% [markdown]
# So DDP exchanges gradients, which have the size of the model; equal optimizers make equal weights of them. It also has one *process* per device, where `DataParallel` has a thread:
# PyTorch's documentation names Python's global interpreter lock as a reason to prefer DDP even on one machine.

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
# The hook is given the *parameter*. A published exercise reduces that and not its gradient: the bytes are right, and so is the first loss, and each rank steps along a gradient of its own.

# %% [markdown]
# ## How large should a bucket be?
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
# With a bucket for each tensor the network is busy to the end, mostly with latencies; with one bucket it has nothing to do until the backward pass is over. DDP's default of 25 MiB lies between
# them. Megatron-LM's grows with N, as N·λ·bw does.

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
# On the slowest network hardly anything is hidden.
#
# Now four processes, and a clock. Two cores cannot compute for four ranks and move their bytes at the same time, so the layers of this chain *sleep* in their backward
# pass, as a CPU does while a GPU works. Twelve layers of 1 MB, 20 ms each; of three steps the one of median length:

# %%
twelve = [(1_000_000, 0.020)] * 12
processes = World(4, engine="processes")


def sleeping(rank, overlap):
    """This rank's time line of each of three steps."""
    chain, comm = data_parallel.waiting_chain(twelve), rank.comm("dp")
    options = dict(bucket_bytes=1_000_000, overlap=overlap)
    replica, timelines = data_parallel.replicate(chain, comm, **options), []
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
# Every rank's clock starts as it leaves a barrier. The hidden part, beside the formula:

# %% tags=["nbval-ignore-output"]
in_buckets = data_parallel.buckets([1_000_000] * 12, 1_000_000)
f"buckets of 1 MB: {during.hidden:.0%} hidden, formula {hideable(in_buckets):.0%}"

# %% [markdown]
# Keep the *last* bucket small: DDP's `bucket_cap_mb` sets the size of all, `bucket_cap_mb_list` (torch 2.13) that of each. By default only the *first* is small.

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
# Right both times, so no test of values finds it. `no_sync()` lets gradients add up on their own rank until the last micro-batch.

# %% [markdown]
# ## What must all ranks agree on?
#
# The contracts of PyTorch's DDP:
#
# | about | DDP promises | you must | otherwise |
# |---|---|---|---|
# | weights | rank 0's at the start | build the same module | replicas stay apart |
# | order | buckets leave in one order | call your own collectives in one order | wrong sums, or a deadlock |
# | gradients | it waits for all of them | use every parameter, or `find_unused_parameters=True` | *shown below* |
# | skipped steps | equal gradients | look for inf, and clip, *after* the reduction | *shown below* |
# | steps | nothing | make equally many (exercise 8.1), or use `join()` | a deadlock |
# | examples | a mean over ranks | take equally many, or weigh by `data_parallel.share` | the gradient of another loss |
# | random numbers | nothing | seed dropout per rank | every rank drops the same units |
# | buffers | rank 0's before each forward pass (ours: at the start) | save rank 0's; use `SyncBatchNorm` for statistics of the whole batch | statistics of one rank's share |
# | format | that of the gradients | register a communication hook to send bf16 | in bf16: 8 significant bits in each number and each sum on the way |
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
# The mean over rank 0's ones and rank 1's zeros.
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
        "finite": bool(net.weight.isfinite().all()),
    }


found = world.run(overflowing)
reveal("overflow/skip", ranks=[rank["steps"] for rank in found].count(False))

# %% [markdown]
# All of them: the mean of an inf and three numbers is an inf, on every rank. Now let each rank look *before* the reduction:

# %%
dict(enumerate(world.run(overflowing, look_first=True)))

# %% [markdown]
# Rank 2 skips alone, and the others step along its inf.
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
# In the library:

# %%
show(data_parallel.Replica.backward_done)

# %%
show(data_parallel.Replica.no_sync)

# %% [markdown]
# ## Is it as good as PyTorch's?
#
# On processes, PyTorch's `DistributedDataParallel` runs beside ours: same weights, same data, its own all-reduce (gloo). Three results after three steps: equal to one device, bytes sent,
# bytes held.

# %%
sizes = dict(num_layers=4, d_model=128, num_heads=4, d_ff=512)
medium = ModelConfig(**sizes, vocab_size=128, seq_len=32)


def train(net, wrapper, data):
    """Weights and states after three steps; `wrapper` returns what net returns."""
    optimizer = torch.optim.AdamW(net.parameters(), eps=1e-4)  # above rounding noise
    for _ in range(3):
        optimizer.zero_grad()
        outputs = wrapper(data[0]).flatten(0, 1)
        nn.functional.cross_entropy(outputs, data[1].flatten()).backward()
        optimizer.step()
    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    return weights, measure.model_states(net, optimizer)


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
expected, _ = train(alone, alone, batch)
for whose in ("theirs", "ours"):
    (first, states), (second, _), *_ = processes.run(trained, whose)
    right = torch.allclose(first, expected, rtol=0, atol=1e-6)
    same, held = torch.equal(first, second), units.text(states.total)
    print(
        f"{whose:6} as on one device: {right}, ranks the same bits: {same}, {held} held"
    )

# %%
grouped = data_parallel.buckets([parameter.nbytes for parameter in alone.parameters()])
sent = data_parallel.bytes_to_start(alone, 4)
sent += data_parallel.bytes_to_reduce(grouped, 4, backwards=3)
sent.diff(processes.ledger)

# %%
setting = TrainConfig(micro_batch=2, global_batch=8, precision="fp32")
memory.model_states(medium, setting, Mesh(dp=4)).diff(states)

# %%
processes.close()

# %% [markdown]
# Gradients are views of the buckets, so the buckets add nothing. Nobody counts what gloo sends. `make bench` compares times.
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
# | | Accelerate | Lightning | torchtitan |
# |---|---|---|---|
# | replicas | `accelerator.prepare(model, optimizer, loader)` | `Trainer(strategy="ddp", devices=8, num_nodes=2)` | `parallelism.data_parallel_replicate_degree` (and `…shard_degree = 1`) |
# | shares of the data | in `prepare` | `use_distributed_sampler=True`, the default | its own data loader |
# | accumulation | `Accelerator(gradient_accumulation_steps=k)`, `with accelerator.accumulate(model):` | `Trainer(accumulate_grad_batches=k)` | `training.global_batch_size` against `training.local_batch_size` |
# | options | `kwargs_handlers=[DistributedDataParallelKwargs(…)]` | `strategy=DDPStrategy(…)` | buckets of 100 MiB |
# | start | `accelerate launch` or `torchrun` | the Trainer itself or `torchrun` | `torchrun` |
#
# **Megatron-LM** sends buckets during the backward pass with `--overlap-grad-reduce`; `--ddp-bucket-size` counts *elements*, at least 40 million, and a million per data-parallel rank if that is
# more.

# %% [markdown]
# ## Errata
#
# **"A synchronization phase where the outputs from all GPUs are harmonized"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024, on DDP). DDP averages *gradients*; outputs and losses stay
# where they are.
#
# **Weights that do not fit, and DDP as a remedy** (the same article). DDP holds *everything* on every rank, on two as on two thousand: 16 bytes per parameter in mixed precision with Adam.
#
# **Gradients synchronized by all-reduce**, without a word on the division (an article on training at scale, on data parallelism). All-reduce sums: without the division the
# gradient is N times too large.
#
# **A default bucket of 25 MB** (the same article, and *The Ultra-Scale Playbook*): `bucket_cap_mb=25` counts MiB, 26.2 MB, and the first bucket to leave has 1 MiB.
#   <!-- claim: (torch.nn.parallel.distributed._DEFAULT_BUCKET_CAP_MB * torch.nn.parallel.distributed._MB_TO_BYTES, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES) == (25 * 2**20, 2**20) -->
#
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
