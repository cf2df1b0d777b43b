# %% [markdown]
# # 07 · Add up what many ranks hold
#
# **How does every rank get the sum of what all ranks hold, when no rank can hold or send everything?**
#
# *90 min, and 50 further · before this: lab 00 · needs a laptop, no GPU and no network*
#
# A training run on many devices needs a few exchanges in which all ranks of a group take part: *here is my gradient*, *give me your part of the weights*.
# These exchanges are called collectives. There are eight, and each can be built from `send` and `recv`.

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - order blocking sends so that nobody waits in a circle (exercise 7.1),
# - tell any number of ranks in as few steps as possible (exercise 7.2),
# - write a ring all-reduce in which no rank works more than another (exercise 7.3),
# - know what an all-reduce must be tested for besides its values (exercise 7.4).

# %% [markdown]
# ## Setup

# %%
import collections
import time

import torch

from labutils import collectives, units
from labutils.config import Link, Mesh
from labutils.ledger import Ledger, Line
from labutils.teach import plots
from labutils.teach.check import check, hint, predict, predictions, reveal, show
from labutils.teach.exercises.collectives import faults
from labutils.teach.widgets import explore, log
from labutils.world import DeadlockError, MismatchError, World

# %% [markdown]
# A `World` runs an ordinary function on every rank and returns the results in rank order. Here the ranks are threads of this notebook; later in the lab
# the same functions run on processes.

# %%
world = World(4)
world.run(lambda rank: f"I am rank {rank.rank} of {rank.size}")

# %% [markdown]
# ## The idea in one picture
#
# Four ranks stand in a circle. Each holds a tensor cut into four pieces; each rank has a color. In every step each rank passes *one piece* to its
# neighbor. Play it, and watch where a piece is complete for the first time.

# %%
ones = torch.ones(4_000_000)
world.run(lambda rank: collectives.all_reduce_ring(ones, rank.comm("dp")))
plots.ring_animation(world.trace)

# %% [markdown]
# The animation is drawn from the messages of a real run. After three steps each rank owns one finished piece; after three more, everybody owns all four.
# No rank ever sent a whole tensor at once, and no rank did more than another.

# %% [markdown]
# ## What can two ranks say to each other?
#
# Two things: `comm.send(x, dst)` and `comm.recv(out, src)`. A send returns when the other side has received: the two wait for each other, a *rendezvous*.
# Messages that run at the same time make one *step*; steps wait for each other.
#
# (`rank.comm("dp")` is the communicator through which a rank reaches the others; "dp", data parallelism, is the name of the axis on which a `World(4)` lines
# up its ranks.)


# %%
def tell(rank):
    comm, x = rank.comm("dp"), torch.full((3,), float(rank.rank))
    if rank.rank == 0:
        comm.send(x, 1)
    if rank.rank == 1:
        comm.recv(x, 0)
    return x.tolist()


world.run(tell)

# %% [markdown]
# Next, everybody passes a tensor to the right: send first, then receive.


# %%
got_past = []


def everybody_sends_first(rank):
    comm, x = rank.comm("dp"), torch.full((3,), float(rank.rank))
    comm.send(x, (comm.rank + 1) % comm.size)
    got_past.append(comm.rank)
    return comm.recv(torch.empty_like(x), (comm.rank - 1) % comm.size)


# %% [markdown]
# > How many of the four ranks get past their `send`? Change the number to your guess before you run the cells.

# %%
predict("sends-first/ranks-that-get-past", ranks=4)

# %%
try:
    world.run(everybody_sends_first)
except DeadlockError as error:
    print(error)

# %%
reveal("sends-first/ranks-that-get-past", ranks=len(got_past))

# %% [markdown]
# Each rank waits for its right neighbor to receive, and the right neighbor waits for its own: a *deadlock*.
#
# This world says so at once, with the line in which each rank waits. On a cluster the job stands still until a time-out (torch waits 10 minutes with NCCL,
# 30 with gloo). MPI libraries as a rule buffer *small* sends, so there this program may pass its test with three numbers and hang with three million.
#
# ### Exercise 7.1 · Break the circle (8 min, ●○○)
#
# Pass x to the next rank and return what the rank before you had, with blocking `comm.send` and `comm.recv` alone. However many ranks there are, two steps
# are enough, three where their number is odd.


# %%
def pass_right(x: torch.Tensor, comm) -> torch.Tensor:
    """What the rank before this one holds: all pass x to rank + 1, the last to 0."""
    raise NotImplementedError


# %%
check("collectives/ordered-sends", pass_right)

# %%
hint("collectives/ordered-sends", 1)

# %%
show(collectives.shift)

# %% [markdown]
# It is not enough that nobody hangs. If rank 0 alone sends first, rank 1 sends when it has received, rank 2 after that, and so on: N steps.
#
# Where both directions are always needed, `comm.send_recv(x, dst, out, src)` does them at once and leaves nothing to order.
#
# A second way to get stuck: ranks that disagree about *what* they are doing. Rank 2 takes another branch here.


# %%
def mismatched(rank):
    comm, x = rank.comm("dp"), torch.ones(8)
    if rank.rank == 2:
        return comm.all_gather(x)
    return comm.all_reduce(x)


try:
    world.run(mismatched)
except MismatchError as error:
    print(error)

# %% [markdown]
# Every collective is a contract: all ranks of a group make the same calls, in the same order, with the same shapes. An `if rank == 0:` around a collective
# is a common way to break it.

# %% [markdown]
# ## How does one rank tell all the others?
#
# Rank 0 has the initial weights, seven others need them. The plain way is a star: rank 0 sends to each in turn.


# %%
def run(algorithm, numel=1_000_000, ranks=8, engine="threads"):
    """What every rank returned, and the trace of messages; rank r holds r + 1, in fp32.

    It holds it `numel` times, in a gather only as often as its share says.
    """

    def program(rank):
        collective, comm = getattr(collectives, algorithm), rank.comm("dp")
        x = torch.full((numel,), rank.rank + 1.0)
        sizes = collectives.shares(numel, ranks)
        if "gather" in algorithm:
            return collective(x[: sizes[rank.rank]], comm, sizes=sizes)
        return collective(x, comm)

    with World(ranks, engine) as several:
        return several.run(program), several.trace


# %%
_, star = run("broadcast_star")
plots.messages(star)

# %% [markdown]
# Seven steps, and in each of them six ranks have nothing to do. But after the first step *two* ranks have the tensor. Let both pass it on, then all
# four that have it, and so on.
#
# > How many steps does that take for 1000 ranks?

# %%
predict("broadcast/steps-for-1000-ranks", steps=999)

# %%
_, tree = run("broadcast_tree")
plots.messages(tree)

# %%
steps = collectives.steps("broadcast_tree", 1000)
reveal("broadcast/steps-for-1000-ranks", steps=steps)

# %% [markdown]
# The number of ranks that have the tensor doubles in each step, so N ranks need ⌈log₂ N⌉ steps. The bytes did not become fewer: each of the N − 1 others
# has to receive S once, whoever sends it.

# %%
{"star": star.sent.by("rank"), "tree": tree.sent.by("rank")}

# %% [markdown]
# Both total 7 · 4 MB. What changed is the load of rank 0 and the number of steps that wait for each other.
#
# ### Exercise 7.2 · Tell a thousand ranks in ten steps (10 min, ●●○)
#
# Any number of ranks, from rank 0.


# %%
def broadcast(x: torch.Tensor, comm) -> torch.Tensor:
    """Rank 0's x, on every rank, in ⌈log₂ N⌉ steps; elsewhere its shape matters."""
    raise NotImplementedError


# %%
check("collectives/broadcast-tree", broadcast)

# %%
hint("collectives/broadcast-tree", 1)

# %%
show(collectives.broadcast_tree)

# %% [markdown]
# The same tree serves in the other direction: run the broadcast backwards, adding where two branches meet, and you have `reduce`: the sum of all tensors at
# one rank.

# %% [markdown]
# ## Which collectives are there?
#
# Eight. Three pairs run the same messages in opposite directions: broadcast and reduce, scatter and gather, all-gather and reduce-scatter. The other two are all-reduce and all-to-all.
# Take three ranks, and three pieces on each: with i = (r + 1)·(1, 2), rank r holds i, i² and i³.


# %%
def example(rank):
    i = (rank.rank + 1) * torch.tensor([1, 2])
    return torch.cat([i, i**2, i**3])


def on_three(collective):
    return three.run(lambda rank: collective(example(rank), rank.comm("dp")).tolist())


three = World(3)
three.run(lambda rank: example(rank).tolist())

# %% [markdown]
# Scatter: rank 0's pieces, one for each rank.

# %%
on_three(collectives.scatter_star)

# %% [markdown]
# Reduce: the sum of all, at rank 0 alone.

# %%
three.run(lambda rank: collectives.reduce_tree(example(rank), rank.comm("dp")))

# %% [markdown]
# Reduce-scatter: the same sum, and each rank has its piece of it.

# %%
on_three(collectives.reduce_scatter_ring)

# %% [markdown]
# All-gather gives every piece to everybody. After a reduce-scatter, the two together are an all-reduce:


# %%
def two_halves(rank):
    mine = collectives.reduce_scatter_ring(example(rank), rank.comm("dp"))
    return collectives.all_gather_ring(mine, rank.comm("dp")).tolist()


three.run(two_halves)

# %%
on_three(collectives.all_reduce_ring)

# %% [markdown]
# All-to-all adds nothing: it transposes. Piece j of rank i goes to rank j, where it becomes piece i. Experts will need it (lab 12).

# %%
on_three(collectives.all_to_all_pairwise)

# %%
show(collectives.all_to_all_pairwise)

# %% [markdown]
# Who sends to whom, in which step? Choose one, and a number of ranks.


# %%
def who_sends(collective="scatter_star", ranks=4):
    """The messages of one collective, as it really ran."""
    return plots.messages(run(collective, 120, ranks)[1])


explore(who_sends, collective=list(collectives.FORMULAS), ranks=[2, 4, 6, 8])

# %% [markdown]
# Look for three shapes: *stars*, in which one rank meets all others; *trees*, in which the number of busy ranks doubles; and patterns in which every rank
# does the same in every step, so that none waits.
#
# ### Further: what does each cost?
#
# Let S be the whole tensor, here 24 MB on 4 ranks. For each collective but the all-reduces, which are the next
# question: what all ranks send together, what the *busiest* rank sends and receives, what ranks 0 to 3 hold at the end, and the steps.


# %%
def row(algorithm):
    results, trace = run(algorithm, numel=6_000_000, ranks=4)
    held = held_by(results)
    busiest = [max(way.by("rank").values()) for way in (trace.sent, trace.received)]
    held_MB = " ".join(f"{nbytes / 1e6:g}" for nbytes in held.by("rank").values())
    unexplained = sum(bytes_unexplained(algorithm, trace, held, nbytes=24e6, n=4))
    amounts = map(units.text, (trace.sent.total, *busiest))
    columns = "".join(f"{amount:>9}" for amount in amounts)
    return f"{algorithm:28}{columns}{held_MB:>14}{trace.steps:6}{unexplained:13}"


def held_by(results):
    amounts = [0 if y is None else y.nbytes for y in results]
    return Ledger(Line("result", amount, rank=i) for i, amount in enumerate(amounts))


def bytes_unexplained(algorithm, trace, held, **sizes):
    sent = collectives.sent(algorithm, **sizes).diff(trace.sent)
    return sent.unexplained, collectives.held(algorithm, **sizes).diff(held).unexplained

# %%
print(f"{'in all':>37}{'sends':>9}{'receives':>9}{'held in MB':>14}", end="")
print(f"{'steps':>6}{'unexplained':>13}")
for algorithm in collectives.FORMULAS:
    if algorithm not in collectives.ALL_REDUCES:
        print(row(algorithm))

# %% [markdown]
# The last column compares every rank's bytes, sent and held, with their formulas: nothing is left over. The tree moves as many bytes as the star, in fewer
# steps and with less work for the busiest rank.
#
# Two of the stars, in a few lines each:

# %%
show(collectives.scatter_star)

# %%
show(collectives.reduce_star)

# %% [markdown]
# ## How many bytes does each rank send in an all-reduce?
#
# > Four ranks hold a gradient of 64 MB each. Every rank needs the sum of all four. How many megabytes leave
# > *your* rank?

# %%
predict("all-reduce/bytes-per-rank", MB=64)

# %% [markdown]
# **Two ways to do it.** Send everything to rank 0, add there, send the sum back: rank 0 receives 3 · 64 MB and sends 3 · 64 MB, the others send 64 MB
# once. Or cut the tensor into N pieces and pass them round a ring:
# after N − 1 hops each rank owns one finished piece, after N − 1 more everybody owns all of them. Every hop carries 1/N of the tensor, so each rank sends
#
# $$ 2\,\frac{N-1}{N}\,S \;=\; 2\cdot\tfrac{3}{4}\cdot 64\ \text{MB} \;=\; 96\ \text{MB}, $$
#
# whichever it is. On a thousand ranks it would be 128 MB, twice the tensor, and never more.

# %%
traces = {way: run(f"all_reduce_{way}", 16_000_000, 4)[1] for way in ("naive", "ring")}
sent = {way: trace.sent for way, trace in traces.items()}
plots.comm_bars(**sent, guess=predictions["all-reduce/bytes-per-rank"])

# %%
collectives.sent("all_reduce_ring", nbytes=64e6, n=4).diff(sent["ring"])

# %%
reveal("all-reduce/bytes-per-rank", MB=sent["ring"].by("rank")[0] / 1e6)

# %% [markdown]
# The *total* over all links is the same for both, 2(N − 1)S.

# %%
{way: units.text(ledger.total) for way, ledger in sent.items()}

# %% [markdown]
# A table that prints totals hides the difference. A step is over when its *busiest* rank is done, and in the ring all ranks are equally busy.
#
# As long as only ranks can add, nothing can do better: for each element of the sum, N − 1 contributions of other ranks have to be sent before any rank knows it, and then N − 1 copies
# of the result. That is 2(N − 1)S, and the ring shares it equally.
#
# **Equal, bytes sent, bytes held**: the three results that a distributed program owes you. Every all-reduce against the plain sum 1 + 2 + 3 + 4, against
# the formula of what is sent, and of what is held; the second and third number are the bytes that stay unexplained.


# %%
def three_results(algorithm):
    results, trace = run(algorithm, 1_000_003, ranks=4)
    equal = all(bool((y == 1 + 2 + 3 + 4).all()) for y in results)
    sizes = {"nbytes": 4 * 1_000_003, "n": 4}
    return equal, *bytes_unexplained(algorithm, trace, held_by(results), **sizes)


{algorithm: three_results(algorithm) for algorithm in collectives.ALL_REDUCES}

# %% [markdown]
# When N does not divide the tensor, as here, some pieces are one element longer. Then ranks differ by a few bytes, and the formula knows which.

# %%
_, uneven = run("all_reduce_ring", 10, ranks=4)
collectives.sent("all_reduce_ring", nbytes=40, n=4).diff(uneven.sent)

# %% [markdown]
# ### Exercise 7.3 · Write the ring (15 min, ●●○)
#
# You get `send_recv` and your neighbors. Return the sum; send no more than a ring has to (another exchange with as few bytes passes, too). `collectives.shares(numel, N)` says how to cut a tensor of `numel` elements, and `reduce="sum"`
# in `send_recv` adds what arrives to `out`.


# %%
def ring_all_reduce(x: torch.Tensor, comm) -> torch.Tensor:
    """Sum of x over all ranks. Any length, also shorter than the number of ranks."""
    raise NotImplementedError


# %%
check("collectives/ring-all-reduce", ring_all_reduce)

# %%
hint("collectives/ring-all-reduce", 1)

# %% [markdown]
# The library's ring is two rounds of the same four lines; the first one adds, in the dtype that travels. In bf16 each hop rounds: the sum of a one from each of 1024 ranks stops at 256 (lab 01), where a tree of ten additions reaches 1024. Lab 08 measures it on random gradients.
# <!-- claim: (precision.running_sum(torch.ones(1024), "bf16")[-1].item(), precision.pairwise_sum(torch.ones(1024), "bf16").item()) == (256, 1024) -->

# %%
show(collectives.ring_hops)

# %%
show(collectives.all_reduce_ring)

# %% [markdown]
# ## Further: what must an all-reduce be tested for?
#
# ### Exercise 7.4 · Bug hunt: the ring that passed its test (12 min, ●●○)
#
# A published course teaches the ring all-reduce with code of this kind, and with a test that it passes.


# %%
def published_ring(x, comm):
    total, travelling = x.clone(), x.clone()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for _ in range(comm.size - 1):
        travelling = comm.send_recv(travelling, right, torch.empty_like(x), left)
        total += travelling
    for _ in range(comm.size - 1):
        total = comm.send_recv(total, right, torch.empty_like(x), left)
    return total


def published_test(all_reduce, world):
    x = torch.arange(8.0)
    results = world.run(lambda rank: all_reduce(x + rank.rank, rank.comm("dp")))
    expected = sum(x + rank for rank in range(world.size))
    right = all(torch.equal(y, expected) for y in results)
    return [] if right else ["some rank does not hold the sum"]


published_test(published_ring, World(8))

# %% [markdown]
# No complaints: every rank holds the right sum. Yet two things are wrong with it. Write the test that finds them: it returns
# a list of complaints about any all-reduce, and an empty list for one that you would train with. After `world.run(…)`, `world.ledger` knows who sent what.


# %%
def complaints(all_reduce, world) -> list[str]:
    """What is wrong with `all_reduce(x, comm)`, when every rank of `world` runs it."""
    raise NotImplementedError


# %%
check("collectives/missing-test", complaints)

# %%
hint("collectives/missing-test", 1)

# %%
show(faults)

# %% [markdown]
# ## Fewer bytes or fewer steps?
#
# The ring sends as few bytes as possible, but in 2(N − 1) steps that wait for each other. On a thousand ranks that is 1998 times the latency of the network,
# also for a tensor of 4 bytes. Two other patterns need about 2 log₂ N steps.
#
# The *tree* reduces whole tensors to rank 0 and broadcasts the sum. In *halving–doubling* each rank exchanges half the tensor with a partner far away, then a
# quarter with a nearer one, and so on, until it holds one finished piece; then the same exchanges in the other order double what it holds.

# %%
_, halving = run("all_reduce_halving_doubling")
plots.messages(halving)

# %%
show(collectives.all_reduce_halving_doubling)

# %% [markdown]
# How long does each take? The simplest model that is of use gives every message a latency λ and every rank a link of bandwidth bw of its own:
#
# $$ t \;=\; \text{steps}\cdot\lambda \;+\; \frac{\text{bytes that travel one after the other}}{\mathrm{bw}} $$
#
# | all-reduce | steps | bytes one after the other |
# |---|---|---|
# | naive | $2(N-1)$ | $2(N-1)\,S$ |
# | ring | $2(N-1)$ | $2\frac{N-1}{N}\,S$ |
# | tree | $2\lceil\log_2 N\rceil$ | $2\lceil\log_2 N\rceil\,S$ |
# | halving–doubling, N a power of two | $2\log_2 N$ | $2\frac{N-1}{N}\,S$ |
# | halving–doubling, other N; p is the power of two below | $2\log_2 p + 2$ | $2\frac{p-1}{p}\,S + 2S$ |
#
# Steps and bytes of the four, counted in runs on eight ranks with 4 MB, and the time that the formula makes of them. The last column replays the messages of
# the run, one by one, over such links:

# %%
link = Link(latency=10e-6, bandwidth=10e9)
print(f"{'4 MB on 8 ranks':28} steps   all send  busiest  formula   replay")
for algorithm in collectives.ALL_REDUCES:
    _, trace = run(algorithm)
    amounts = trace.sent.total, max(trace.sent.by("rank").values())
    total, busiest = map(units.text, amounts)
    times = collectives.cost(algorithm, 4e6, 8, link), trace.makespan(link)
    formula, replay = (units.text(seconds, "s") for seconds in times)
    row = f"{trace.steps:5} {total:>10} {busiest:>8} {formula:>8} {replay:>8}"
    print(f"{algorithm:28} {row}")

# %% [markdown]
# The two times agree: the formula counts the right messages in the right order. That is all it shows, since the replay uses the same λ and bw.

# %% [markdown]
# > Six ranks, and links of 10 µs and 10 GB/s. From which message size on is the ring the fastest?

# %%
predict("all-reduce/ring-wins-from", kB=64)


# %%
def curves(ranks, link, sizes):
    """Seconds that each all-reduce needs, by its short name."""
    times = {}
    for name in collectives.ALL_REDUCES:
        short = name.removeprefix("all_reduce_")
        times[short] = [collectives.cost(name, size, ranks, link) for size in sizes]
    return times


sizes = [10 ** (k / 10) for k in range(18, 91)]
plots.cost_curves(sizes, **curves(6, link, sizes))

# %%
where = collectives.crossover("all_reduce_ring", "all_reduce_halving_doubling", 6, link)
reveal("all-reduce/ring-wins-from", kB=round(where / 1000, 1))

# %% [markdown]
# The product λ · bw is what a link could have sent in the time of one latency, here 100 kB: on six ranks the lines cross at 2.2 times that. With more ranks the ring has more steps, and the place moves: its steps decide below about N · λ · bw, and its bytes far above.
#
# And on eight ranks?

# %%
plots.cost_curves(sizes, **curves(8, link, sizes))

# %% [markdown]
# With a power of two, halving–doubling has the ring's bytes *and* the tree's steps: in this model it never loses.
#
# ### Further: where do two patterns cost the same?
#
# Setting the two costs equal gives the place. On six ranks the ring takes 10 steps and 5/3 S one after the other; in halving–doubling
# two of the six first hand their tensor to another rank and get the sum at the end, which makes 6 steps and (1 + 3/2 + 1) S. They meet at
# S = (10 − 6) · λ · bw / (7/2 − 5/3). In units of λ · bw, on 6, 100 and 1000 ranks:

# %%
pair = "all_reduce_ring", "all_reduce_halving_doubling"
[round(collectives.crossover(*pair, n, link) / 100e3, 1) for n in (6, 100, 1000)]

# %% [markdown]
# ### Further: then why does anyone use a ring?
#
# The model gives every pair of ranks a link of its own. Suppose that the machine itself is wired as a ring, where a message to a rank three places away
# occupies three links. Links are *full duplex*: each carries bw in one direction and bw in the other at the same time. So in each step count, in every
# direction of every link, the bytes that have to pass; the fullest one decides how long the step takes.


# %%
def through_the_fullest_direction(trace):
    """Bytes through the fullest direction of a link, added up over the steps."""
    n, load = len(trace.ranks), collections.Counter()
    for m in trace.messages:
        right = (m.to - m.source) % n
        hops = {+1: right, -1: n - right}
        shortest = [way for way in hops if hops[way] == min(hops.values())]
        for way, hop in ((w, k) for w in shortest for k in range(hops[w])):
            # Where both ways are equally long, half of the bytes goes each way.
            load[m.start, way, (m.source + way * hop) % n] += m.nbytes / len(shortest)
    steps = {step for step, _, _ in load}
    return sum(max(load[key] for key in load if key[0] == step) for step in steps)


for name in ("ring", "halving_doubling"):
    for n in (8, 16):
        _, trace = run(f"all_reduce_{name}", ranks=n)
        fullest = units.text(through_the_fullest_direction(trace))
        print(f"{name:17} {n:3} ranks {fullest:>9}")

# %% [markdown]
# Halving–doubling sends through both directions of each link, the ring through one, and still the ring is ahead on such a network for large tensors, by a factor that grows with N (on four ranks it is 1).
# (With the nearest partner first, the long messages of halving–doubling go over one link. Each step then puts S/2 through the fullest direction, the one with the farthest partner S/4: (log₂ N − ½) · S there and back, 10 and 14 MB here. The ring is still ahead. Two rings of half the tensor each, in opposite directions, would halve the ring's number once more.) A ring works with any number of ranks, on any network with a cycle through
# all of them.
# <!-- arithmetic: [4 * 2 * (0.5 * (steps - 1) + 0.25) for steps in (3, 4)] == [10, 14] -->
#
# ## Further: and if some links are slow?
#
# Machines have fast links inside and a slower network between them, and a ring is as fast as its slowest hop. Here are two machines of four ranks each: on the axis `tp` lie the ranks of one machine,
# on `dp` those with the same place in different machines. The *hierarchical* all-reduce is three collectives in a row:


# %%
def two_levels(rank):
    inside, across = rank.comm("tp"), rank.comm("dp")
    x = torch.full((1_000_000,), rank.rank + 1.0)
    piece = collectives.reduce_scatter_ring(x, inside)
    piece = collectives.all_reduce_ring(piece, across)
    return collectives.all_gather_ring(piece, inside)


machines = World(Mesh(dp=2, tp=4))
results = machines.run(two_levels)
[y.unique().tolist() for y in results], sum(range(1, 9))

# %% [markdown]
# A rank sends through the network between machines what its *piece* costs, a quarter of the tensor; predicted, and counted:


# %%
def on_two_levels(nbytes, inside, across):
    """What each rank sends inside its machine, and between machines."""
    ring, pieces = collectives.sent, {"nbytes": nbytes, "n": inside}
    halves = ring("reduce_scatter_ring", **pieces) + ring("all_gather_ring", **pieces)
    summed = ring("all_reduce_ring", nbytes=nbytes // inside, n=across)
    return {"tp": halves.by("rank")[0], "dp": summed.by("rank")[0]}


on_two_levels(4_000_000, inside=4, across=2), machines.ledger.only(rank=5).by("axis")

# %% [markdown]
# What does it gain? Four machines of eight ranks, 1 GB, 450 GB/s inside a machine and 50 GB/s from each rank to the other machines.
#
# > How many times as long does one ring over all 32 ranks take, if each of its hops is as slow as the slowest link, and it leaves a machine through one of the eight?

# %%
predict("hierarchy/one-ring-takes", times=2)

# %%
fast, slow = Link(2e-6, 450e9), Link(10e-6, 50e9)


def seconds_on_two_levels(nbytes, inside=8, across=4):
    halves = ("reduce_scatter_ring", "all_gather_ring")
    within = sum(collectives.cost(half, nbytes, inside, fast) for half in halves)
    return within + collectives.cost("all_reduce_ring", nbytes / inside, across, slow)


flat = collectives.cost("all_reduce_ring", 1e9, 32, slow)
reveal("hierarchy/one-ring-takes", times=round(flat / seconds_on_two_levels(1e9), 1))

# %%
print("machines   bytes     one ring  eight rings   two levels")
for nbytes, count in ((1e3, 4), (1e6, 4), (1e8, 4), (1e9, 4), (1e9, 64)):
    n = 8 * count
    rings = [collectives.cost("all_reduce_ring", nbytes / k, n, slow) for k in (1, 8)]
    two = seconds_on_two_levels(nbytes, 8, count)
    times = [units.text(seconds, "s") for seconds in (*rings, two)]
    cells = "".join(f"{each:>13}" for each in times)
    print(f"{count:8} {units.text(nbytes):>7}{cells}")

# %% [markdown]
# Two levels have fewer slow steps, 6 in place of 62: that decides for small tensors. For large ones the number of links decides. One ring leaves a machine through a single one of its
# eight links. *Eight rings*, an eighth of the tensor each, leave through all of them. On four machines the two levels lose against those at 1 GB, because their fast and slow parts come one
# after the other. On 64 machines they win even there, since eight rings then wait for 1022 steps of 10 µs, and two levels for 126.
#
# This holds under two conditions. Of eight hops of a ring seven stay inside a machine. Where those take 2 µs, and a rank waits for its neighbor alone, a hop takes 3 µs on average, and the eight rings need 8.1 ms in place of 15.2: less than two levels.
# And two levels that cut the tensor into chunks can do their fast part, 3.9 ms, while the slow part of another chunk is on its way. So neither pattern is the better one. Bytes per step decide, as before, with the latency of each hop and what overlaps.
# <!-- arithmetic: [round(1e3 * (1022 * hop + 2 * 511 / 512 * 1e9 / 8 / 50e9), 1) for hop in (10e-6, (7 * 2e-6 + 10e-6) / 8)] + [round(1e3 * (14 * 2e-6 + 2 * 7 / 8 * 1e9 / 450e9), 1)] == [15.2, 8.1, 3.9] -->
#
# With one link for the whole machine the eighths would share it, and most of the gain would be gone: the bytes through it would be more than three quarters of the one ring's:

# %%
through_one = [8 * on_two_levels(1_000_000_000, 8, 4)["dp"]]
through_one.append(collectives.sent("all_reduce_ring", nbytes=1e9, n=32).by("rank")[0])
[units.text(nbytes) for nbytes in through_one]

# %% [markdown]
# ## Further: does the model hold on this machine?
#
# So far the ranks were threads. Now they are processes that talk through the operating system. The functions are the same ones, and so must be what every
# rank holds at the end, to the bit, and what it has sent, to the byte:


# %%
def same_on_both(algorithm):
    on_threads, trace = run(algorithm, 10, 4, "threads")
    on_processes, counted = run(algorithm, 10, 4, "processes")
    pairs = zip(on_threads, on_processes, strict=True)
    equal = all(x is y is None or torch.equal(x, y) for x, y in pairs)
    return equal, trace.sent.diff(counted.sent).unexplained


{algorithm: same_on_both(algorithm) for algorithm in collectives.FORMULAS}

# %% [markdown]
# All thirteen agree.
#
# To predict times we need λ and bw of *this* machine. Everybody passes a tensor to the right at once, ten times in a row, once with one number and once with
# four million:


# %%
processes = World(4, engine="processes")


def seconds(program, nbytes, repeats=15):
    """Median over repeats of the slowest rank's time for program(x, comm)."""

    def timed(rank):
        comm, x, times = rank.comm("dp"), torch.ones(nbytes // 4), []
        for _ in range(repeats):
            comm.barrier()
            start = time.perf_counter()
            program(x, comm)
            times.append(time.perf_counter() - start)
        return times

    return sorted(map(max, zip(*processes.run(timed), strict=True)))[repeats // 2]


def pass_on(x, comm, times=10):
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = torch.empty_like(x)
    for _ in range(times):
        comm.send_recv(x, right, out, left)


# %% tags=["nbval-ignore-output"]
latency = seconds(pass_on, 4) / 10
here = Link(latency, 16e6 / max(seconds(pass_on, 16_000_000, 5) / 10 - latency, 1e-9))
print("latency", units.text(here.latency, "s"))
print("bandwidth", units.text(here.bandwidth, "B/s"), "for each rank, all at once")

# %% [markdown]
# (On a busy machine λ is larger: measure it when nothing else runs.) With these two numbers the model predicts every algorithm at every size. Lines are predictions, dots are measurements on four processes.

# %% tags=["nbval-ignore-output"]
sizes, measured = [4**k for k in range(2, 13)], {}
for name in collectives.ALL_REDUCES:
    times = [seconds(getattr(collectives, name), size) for size in sizes[::2]]
    measured[name.removeprefix("all_reduce_")] = sizes[::2], times

title = "Lines: a link for every rank. Dots: four processes that share a laptop"
plots.cost_curves(sizes, measured=measured, **curves(4, here, sizes), title=title)

# %% [markdown]
# Where the dots leave their lines, ask what the ranks share. In the model every rank has a link of its own; these processes share a few cores and one memory.
# λ and bw were measured while all four sent at once. In a step of the naive way or the tree only some of them send. Measure both numbers again while ranks 2
# and 3 are silent; and three messages into one rank, which the model counts as three steps, and one:


# %% tags=["nbval-ignore-output"]
def only_two(x, comm):
    if comm.rank < 2:
        for _ in range(10):
            comm.send_recv(x, 1 - comm.rank, torch.empty_like(x), 1 - comm.rank)


def into_rank_0(x, comm, sources=(1, 2, 3)):
    for _ in range(10):
        if comm.rank in sources:
            comm.send(x, 0)
        for source in sources if comm.rank == 0 else ():
            comm.recv(torch.empty_like(x), source)


def one_into_rank_0(x, comm):
    into_rank_0(x, comm, sources=(1,))


print("four at once:", units.text(here.latency, "s"), units.text(here.bandwidth, "B/s"))
fewer = seconds(only_two, 4) / 10
rate = 16e6 / max(seconds(only_two, 16_000_000, 5) / 10 - fewer, 1e-9)
print("only two:    ", units.text(fewer, "s"), units.text(rate, "B/s"))
print("three into rank 0:", units.text(seconds(into_rank_0, 4) / 10, "s"))
print("one into rank 0:  ", units.text(seconds(one_into_rank_0, 4) / 10, "s"))

# %% [markdown]
# With two ranks silent, the other two are faster than before. And three messages into one rank take less than 3λ. That does not show that they overlap: λ was measured while all four sent, and a single message into rank 0 with the others silent takes less than λ, too. Since few ranks send in each of their steps, the naive way and the tree are
# faster than the model says. In the ring and in halving–doubling all ranks send in every step, as they did when λ and bw were measured, so for them the model leaves out less. Even then the *order* of the four is
# not always the model's: for messages of some kilobytes the naive way and the tree may change places. A count of bytes needs no such care: it is the same everywhere.

# %%
processes.close()

# %% [markdown]
# ## Further: turn the knobs
#
# Number of ranks, message size, latency, bandwidth: which all-reduce wins, and by how much? Try six ranks against eight, then a thousand. Is there any
# setting in which the plain tree is faster than all others?


# %%
def contest(ranks=6, size=2**20, latency_µs=10, bandwidth_GBps=10):
    """The four all-reduces on such links, dots at the chosen size."""
    link = Link(latency_µs * 1e-6, bandwidth_GBps * 1e9)
    sizes = [10 ** (k / 10) for k in range(18, 91)]
    here = curves(ranks, link, [size])
    dots = {name: ([size], times) for name, times in here.items()}
    winner = collectives.fastest(size, ranks, link).removeprefix("all_reduce_")
    times, name = units.text(here[winner][0], "s"), winner.replace("_", "-")
    title = f"{units.text(size)} on {ranks} ranks: {name} wins with {times}"
    lines = curves(ranks, link, sizes)
    return plots.cost_curves(sizes, measured=dots, title=title, **lines)


size, few, many = log(2**10, 2**30, 2, unit="B"), [1, 10], [10, 100]
knobs = dict(ranks=[6, 8, 1000], size=size, latency_µs=few, bandwidth_GBps=many)
explore(contest, states=36, **knobs)

# %% [markdown]
# ## In practice
#
# **You call, the library chooses.** `torch.distributed.all_reduce` hands the tensor to NCCL on GPUs and to gloo on CPUs. NCCL picks an algorithm for every
# call from a model like ours, latency + bytes / bandwidth (`src/graph/tuning.cc`). The plain tree never wins above: halving–doubling
# takes as many steps and carries fewer bytes. NCCL's trees are *pipelined*: chunks follow each other up and down, so that such
# a tree carries about 2S instead of 2⌈log₂ N⌉ S. With switches that add (NVLS inside a machine, SHARP between machines) a rank sends its tensor once and the
# network returns the sum.
#
# **Reading nccl-tests.** `algbw` is S / t. `busbw` puts the bytes that a link must carry at least in the place of S, and is comparable with a data sheet for any
# number of ranks. Look twice at the data sheet: a link is full duplex, and the 900 GB/s of an H100's NVLink are both directions together. A ring sends in
# one of them, so its busbw is to be compared with 450 GB/s. Eight ranks, links of 10 GB/s in each direction, no latency:

# %%
rings = ("all_reduce_ring", "reduce_scatter_ring", "all_gather_ring")
for name in (*rings, "all_to_all_pairwise"):
    op = name.rpartition("_")[0]
    t = collectives.cost(name, 1e9, 8, Link(0, 10e9))
    algbw, busbw = collectives.algbw(1e9, t), collectives.busbw(op, 1e9, t, 8)
    factor = f"{units.text(algbw, 'B/s'):>9} × {collectives.bus_factor(op, 8)!s:>3}"
    print(f"{op:15} algbw {factor} = busbw {units.text(busbw, 'B/s')}")

# %% [markdown]
# | you want | you set |
# |---|---|
# | to see what NCCL chose | `NCCL_DEBUG=INFO`, `NCCL_DEBUG_SUBSYS=INIT,TUNING` |
# | to force it, for an experiment | `NCCL_ALGO=Ring` or `Tree` (by version also `CollnetChain`, `NVLS`, …), `NCCL_PROTO=Simple`, `LL`, `LL128` |
# | the right network card | `NCCL_SOCKET_IFNAME`, `NCCL_IB_HCA`; `GLOO_SOCKET_IFNAME` for gloo |
# | to know who hangs | `TORCH_FR_BUFFER_SIZE` (before: `TORCH_NCCL_TRACE_BUFFER_SIZE`) with `TORCH_NCCL_DUMP_ON_TIMEOUT` (the flight recorder), `TORCH_NCCL_DESYNC_DEBUG` |
# | to catch mismatched collectives | `TORCH_DISTRIBUTED_DEBUG=DETAIL`; `dist.monitored_barrier()` on gloo |
# | in-place, asynchronous, a mean | torch's calls write into their input; `async_op=True` returns a `Work`; `ReduceOp.AVG` is documented for NCCL only |
#
# **Frameworks** make messages large before they send them, since below N · λ · bw the steps of a ring decide: DDP packs gradients into buckets (`bucket_cap_mb`, 25 by
# default), DeepSpeed has `reduce_bucket_size` and `allgather_bucket_size`, FSDP2 gathers a whole transformer block at a time (torchtitan calls
# `fully_shard` on each), Megatron-LM keeps gradients in one contiguous buffer (`--overlap-grad-reduce`, and `--use-distributed-optimizer` to split the
# all-reduce into its halves).
#
# **On a cluster** the functions of this lab run unchanged: inside a `torchrun` job a `World` takes the ranks that are there. Labs 08 and 09 show the command.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **"Storage Size"** is the heading over the volume of each collective in chapter 15, *LLM Training Acceleration (WIP)*, of an online book on large language models. It is no storage: it is the sum over all links. <!-- erratum: S0-103 -->
# For N = 4 and Φ = 240 elements of 1 byte, these totals, and what the busiest rank sends or receives:

# %%
table = {
    "broadcast_star": "(N − 1)·Φ", "scatter_star": "(N − 1)/N·Φ",
    "reduce_star": "(N − 1)·Φ", "gather_star": "(N − 1)/N·Φ",
    "all_gather_ring": "(N − 1)·Φ", "reduce_scatter_ring": "(N − 1)·Φ",
    "all_reduce_naive": "2(N − 1)·Φ", "all_reduce_ring": "2(N − 1)·Φ",
}  # fmt: skip
for algorithm, published in table.items():
    _, trace = run(algorithm, 60, ranks=4)
    busiest = max(max(way.by("rank").values()) for way in (trace.sent, trace.received))
    counted = f"in all {trace.sent.total:5}   busiest rank {busiest:4}"
    print(f"{algorithm:20} published {published:12} {counted}")

# %% [markdown]
# Every published entry is right as a *total*. The text says that the ring balances the load; its table, in which the last two rows are equal, cannot show that. The busiest rank does.
#
# **"Gather operation: every device broadcasts their data patition to a designated devices."** (the same chapter): a message to one rank is a send. A broadcast by each of N ranks <!-- erratum: S0-089 -->
# would be an all-gather, in which every rank sends N − 1 times as much:

# %%
ways = ("gather_star", "all_gather_ring")
[max(run(way, 60, ranks=4)[1].sent.by("rank").values()) for way in ways]

# %% [markdown]
# **A ring of whole tensors** (published code of a course, exercise 7.4): 2(N − 1)S per rank instead of 2(N − 1)S/N, N times too much. And every rank adds in an <!-- erratum: CODE-01 -->
# order of its own: with real numbers the replicas of a model end with *different bits*. Its value test, on whole numbers that are exact in fp32, sees neither:

# %%
faults(published_ring, World(8), numel=1024)[:2]

# %% [markdown]
# ## Summary
#
# > - Blocking sends that nothing buffers must be ordered: if all send first, all wait. Every rank makes the same collective calls in the same order.
# > - A tree reaches N ranks in ⌈log₂ N⌉ steps: 1000 ranks in 10. <!-- claim: collectives.steps("broadcast_tree", 1000) == 10 -->
# > - All-reduce = reduce-scatter + all-gather. In a ring each rank sends 2(N − 1)/N · S: 96 MB for 64 MB on 4 ranks.
# >   <!-- claim: set(collectives.sent("all_reduce_ring", nbytes=64e6, n=4).by("rank").values()) == {96_000_000} -->
# > - Naive and ring send the same total; the busiest rank sends 192 MB against 96 MB.
# >   <!-- claim: max(collectives.sent("all_reduce_naive", nbytes=64e6, n=4).by("rank").values()) == 192_000_000 -->
# >   <!-- claim: len({collectives.sent(f"all_reduce_{way}", nbytes=64e6, n=4).total for way in ("naive", "ring")}) == 1 -->
# > - Where links differ, use all that leave a machine: by summing inside it first, in few steps, or by as many rings as there are links. Either way a rank sends a piece, not the tensor, through the slow network.
# >   <!-- claim: collectives.sent("all_reduce_ring", nbytes=64e6 / 8, n=4).by("rank")[0] * 8 == collectives.sent("all_reduce_ring", nbytes=64e6, n=4).by("rank")[0] -->
# > - Few bytes or few steps: in a ring of many ranks the steps decide below about N · λ · bw, the bytes above it. On 8 ranks the ring takes 14 steps, halving–doubling 6.
# >   <!-- claim: all(0.9 < collectives.crossover("all_reduce_ring", "all_reduce_halving_doubling", n, config.Link(1, 1)) / n < 1 for n in (100, 1000)) -->
# >   <!-- claim: (collectives.steps("all_reduce_ring", 8), collectives.steps("all_reduce_halving_doubling", 8)) == (14, 6) -->
# > - Test an all-reduce at lengths that N does not divide, for its values, the same bits on all ranks, an untouched input, and the bytes of the busiest rank.

# %% [markdown]
# ## References
#
# - P. Patarasuk, X. Yuan, *Bandwidth optimal all-reduce algorithms for clusters of workstations*, J. Parallel Distrib. Comput. 69, 2009: the ring, and
#   that it is optimal.
# - R. Thakur, R. Rabenseifner, W. Gropp, *Optimization of collective communication operations in MPICH*, IJHPCA 19, 2005: halving–doubling, and the cost model.
# - P. Goyal et al., *Accurate, large minibatch SGD*, arXiv:1706.02677, section 4: both in training practice.
# - NVIDIA, nccl-tests, `doc/PERFORMANCE.md`: algorithm and bus bandwidth; NCCL, `src/graph/tuning.cc`: the model by which it chooses.
