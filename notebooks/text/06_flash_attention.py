# %% [markdown]
# # 06 · Compute attention without its scores
#
# **A head 64 wide that reads 8192 tokens computes 67 million scores to produce half a million numbers. Can the result be exact if the scores are never stored?**
#
# *90 min, and 55 further · before this: lab 03 (what a layer keeps), softmax and its derivative · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# - Normalize a row of scores that you never see as a whole (exercise 6.1).
# - Compute attention over all keys from its results over parts of the keys (exercise 6.2).
# - Find the causal mask that is right on every square of scores and wrong in every chat (exercise 6.3, *Further*).

# %% [markdown]
# ## Setup

# %%
import math
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from labutils import flash, measure, units
from labutils.config import Hardware
from labutils.flash import triton_kernel
from labutils.ledger import Ledger, Line
from labutils.teach import plots
from labutils.teach.check import check, hint, predict, predictions, reveal, show
from labutils.teach.exercises.flash import buggy_attention
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# Here are the scores of 48 queries (down) and 48 keys (across), causal, cut into tiles. Press play.

# %%
tiling = flash.Tiling(s_q=48, s_k=48, block_q=8, block_k=8, offset=0)
walk = [
    (rows, columns) for rows in tiling.query_blocks for columns in tiling.keys_of(rows)
]
plots.tile_walk(walk, s_q=48, s_k=48)

# %% [markdown]
# - A block of queries stays. Blocks of keys and values are loaded one after the other. One tile of scores is computed, used, and overwritten by the next.
# - At the end of a row of tiles the block of output is finished and written once.
# - The crossed tiles, 15 of 36, are never touched: no query in them may look at their keys.

# %% [markdown]
# Two things should bother you. A softmax divides by the sum of its *whole* row, and no tile ever sees a row. And the backward pass needs the softmax's
# weights, which are gone.

# %% [markdown]
# ## How much memory do the scores take?
#
# *Plain attention* computes all scores, then all weights, then the output. Scores and weights are s × s numbers per head, everything else is s × d. Here d = 64.
#
# > 4 heads, 2048 tokens, fp32: how many MB does plain attention keep from its forward to its backward pass, Q, K and V included?

# %%
predict("flash/kept", MB=20)


# %%
def plain(q, k, v):
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def tensors(s, a=4, d=64, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    qkv = torch.randn(3, 1, a, s, d, generator=draw, dtype=dtype)
    return [x.requires_grad_() for x in qkv.unbind()]


q, k, v = tensors(2048)

# %% [markdown]
# **Derived.** For the backward pass a product keeps its two factors: here Q and K, then the weights and V. The softmax keeps its result, which is the weights again. With a heads:
#
# $$ \underbrace{3\,a\,s\,d}_{Q,\,K,\,V} + \underbrace{a\,s^2}_{\text{weights}} \quad\text{against}\quad \underbrace{3\,a\,s\,d}_{Q,\,K,\,V} + \underbrace{a\,s\,d}_{\text{output}} + \underbrace{a\,s}_{\text{lse}} $$
#
# The right side is tiled attention. In place of the weights it keeps its output and one number per row: *lse*, the log-sum-exp of the row's scores,
# $\text{lse}_i = \log \sum_j e^{S_{ij}}$. This is the logarithm of the softmax's denominator, and enough to bring the weights back (shown below). At 4 bytes per
# number:

# %%
a, s, d = 4, 2048, 64
numbers = {"plain": 3 * a * s * d + a * s**2, "tiled": 4 * a * s * d + a * s}
kept = {
    name: Ledger([Line("kept", 4 * n, component="activations")])
    for name, n in numbers.items()
}

# %% [markdown]
# Measured, from what autograd holds on to:


# %%
def saved(attend):
    return measure.saved_activations(lambda: attend(q, k, v), nn.Module())


kept["plain"].diff(saved(plain), by="component")

# %%
reveal("flash/kept", MB=saved(plain).total / 1e6)

# %%
kept["tiled"].diff(saved(lambda *qkv: flash.attention(*qkv)[0]), by="component")

# %% [markdown]
# PyTorch's own attention in one call (here on a CPU) keeps as many bytes:

# %%
kept["tiled"].diff(saved(F.scaled_dot_product_attention), by="component")


# %% [markdown]
# What is kept is not the peak: in plain attention's backward pass the gradients of weights and scores stand beside the weights. Measured at the fullest moment of a
# whole forward and backward pass, inputs not counted:


# %%
def extra_peak(attend, s):
    qkv = tensors(s)
    d_out = torch.ones_like(qkv[0])

    def step():
        return torch.autograd.grad(attend(*qkv), qkv, d_out)

    return measure.peak(step, nn.Module()).total - 4 * d_out.nbytes


def tiled(*qkv):
    return flash.attention(*qkv, block_q=128, block_k=128)[0]


lengths, ways = [256, 512, 1024, 2048], {"plain": plain, "tiled": tiled}
peaks = {
    name: [extra_peak(attend, s) for s in lengths] for name, attend in ways.items()
}
{name: [units.text(p) for p in found] for name, found in peaks.items()}

# %% [markdown]
# Plain attention is fullest in the softmax's backward pass. Tiled attention is fullest in a tile of its backward pass, where each row has two numbers beside lse: the
# gradient of lse, and $D$, a sum over the whole row (derived below).

# %%
block = 128
fullest = {  # numbers per head
    "plain": lambda s: {
        "weights and two gradients": 3 * s * s,
        "output, dV": 2 * s * d,
    },
    "tiled": lambda s: {
        "output, dQ, dK, dV": 4 * s * d,
        "lse, its gradient, D": 3 * s,
        "two tiles": 2 * block * block,
        "dK, dV of a block": 2 * block * d,
        "lse of a block": block,
    },
}

# %%
long = [256, 512, 1024, 2048, 4096, 8192]
formula = {
    name: [4 * a * sum(numbers(s).values()) for s in long]
    for name, numbers in fullest.items()
}
title = "Three s × s tensors at once, against four s × d and two tiles"
measured = {name: (lengths, found) for name, found in peaks.items()}
axes = dict(xlabel="sequence length s", ylabel="peak", unit="B", log="xy")
plots.curves(long, title=title, measured=measured, **axes, **formula)

# %% [markdown]
# The markers lie *on* the lines. Formula less measurement, in bytes:

# %%
{
    name: [formula[name][i] - peak for i, peak in enumerate(found)]
    for name, found in peaks.items()
}

# %% [markdown]
# The ratio of the two peaks grows with the length, so ask for the length behind any *factor* of memory saved. From 256 to 2048 tokens:

# %%
[round(most / least, 1) for most, least in zip(*peaks.values(), strict=True)]

# %% [markdown]
# ## How can a softmax be finished before its row is?
#
# Take one query. Its scores $S_j$ arrive in blocks, and each block is forgotten. A numerically safe softmax subtracts the maximum of the row, which is known only at the end.
#
# (A few whole rows at a time would save memory, too, but not fit where they are used: 128 rows of 8192 scores take 2.1 MB in 16 bits,
# ten times what the fast memory of a GPU's processor holds.) <!-- arithmetic: round(2 * 128 * 8192 / 1e6, 1) == 2.1 and 10 < 2 * 128 * 8192 / 192e3 < 11 -->
#
# **The trick is a change of units.** Let $m$ be the largest score so far, and keep two sums in units of $e^m$: $\;\ell = \sum e^{S_j - m}$ and $o = \sum e^{S_j - m}\,v_j$.
# When a block brings a larger maximum $m'$, every term has to become $e^{S_j - m'} = e^{S_j - m}\cdot e^{m - m'}$. All terms have the *same* factor, so the sums can be converted without the terms:
#
# $$ \ell \leftarrow e^{m-m'}\,\ell + \sum_{\text{block}} e^{S_j-m'} \qquad o \leftarrow e^{m-m'}\,o + \sum_{\text{block}} e^{S_j-m'}\,v_j \qquad m \leftarrow m' $$
#
# In the end the output is $o/\ell$, and $\text{lse} = m + \log \ell = \log \sum e^{S_j}$. Per row only a maximum, a sum and the d numbers of an output travel from block to block.
#
# Follow two blocks of one key each: score 0 with value 1, then score 5 with value 3.

# %%
factor = math.exp(0 - 5)
total, out = factor * 1 + 1, factor * 1 + 1 * 3
out / total

# %%
scores, values = torch.tensor([0.0, 5.0]), torch.tensor([[1.0], [3.0]])
blocks = zip(scores.split(1), values.split(1), strict=True)
flash.online(blocks)[0], scores.softmax(0) @ values

# %% [markdown]
# > Algorithm 1 of the FlashAttention-2 paper prints the factor for $o$ as $\mathrm{diag}(e^{m-m'})^{-1}$. What would the output of these two blocks be?

# %%
predict("flash/inverse", output="3")

# %%
reveal("flash/inverse", "150", output=f"{(1 / factor * 1 + 1 * 3) / total:.1f}")

# %% [markdown]
# An average of 1 and 3 cannot be 150. The inverse is a misprint; the paper's own code does not have it.
#
# A second trap: a masked block has the maximum −∞, and −∞ − (−∞) is not a number. `OnlineSoftmax` therefore starts from the lowest finite number.

# %% [markdown]
# ### Exercise 6.1 · A softmax that is never complete (15 min, ●●○)
#
# Normalize a row of scores that you never see as a whole. `blocks` yields pairs: scores `(n,)` and values `(n, width)`.


# %%
def online_softmax(blocks):
    """(output, log-sum-exp) of one row, as two tensors; each block is seen once."""
    raise NotImplementedError


# %%
check("flash/online-softmax", online_softmax)

# %%
hint("flash/online-softmax")

# %%
show(flash.OnlineSoftmax)

# %% [markdown]
# For many rows at once, this *is* the tiled forward pass:

# %%
show(flash.forward)

# %% [markdown]
# ## What does the backward pass need?
#
# The weights were thrown away tile by tile. Keep $\text{lse}$, and any tile of them comes back with one product and one exponential ($S$ is already divided by $\sqrt d$):
#
# $$ P_{ij} = e^{\,S_{ij} - \text{lse}_i}. $$
#
# Neither a maximum nor a sum is needed. What remains is the derivative of softmax ($dX$ is the gradient of X, $\circ$ multiplies number by number):
# $\;dS = P \circ (dP - D)$ with $dP = dO\,V^\top$ and $D_i = \sum_j P_{ij}\,dP_{ij}$. $D$ sums over a whole row again! Substitute $dP$ and pull $dO$ out:
#
# $$ D_i = \sum_j P_{ij} \sum_c dO_{ic} V_{jc} = \sum_c dO_{ic} \sum_j P_{ij} V_{jc} = \sum_c dO_{ic}\, O_{ic}. $$
#
# The sum over all keys is a sum over one row of the *output*, which is kept.

# %% [markdown]
# > Forward, a tile takes two matrix products ($QK^\top$, $PV$). Plain attention's backward pass takes four. How many does a tile of the backward pass take?

# %%
predict("flash/products", products=4)

# %% [markdown]
# Count them as they run, in units of one product of s × s × d:


# %%
def products(attend):
    """Matrix products of the forward and of the backward pass."""
    results, one = [], flash.attention_flops(256, 64, heads=4) / 2
    qkv = tensors(256)
    forward = flash.product_flops(lambda: results.append(attend(*qkv).sum()))
    return forward / one, flash.product_flops(lambda: results[0].backward()) / one


{name: products(attend) for name, attend in ways.items()}

# %%
reveal("flash/products", products=products(tiled)[1])

# %% [markdown]
# Five: $dV = P^\top dO$, $dP = dO\,V^\top$, $dQ = dS\,K/\sqrt d$, $dK = dS^\top Q/\sqrt d$, and $QK^\top$ once more, because it was not kept. With the forward pass
# that is seven against six: **a tile costs more arithmetic, not less.**
#
# But with a causal mask tiled attention skips tiles that plain attention computes. Products of both passes, masked, 256 tokens in tiles of 32:

# %%
masked = {
    "plain": lambda *qkv: flash.plain(*qkv, causal=True)[0],
    "tiled": lambda *qkv: flash.attention(*qkv, causal=True, block_q=32, block_k=32)[0],
}
{name: sum(products(attend)) for name, attend in masked.items()}

# %% [markdown]
# Backward, the outer loop runs over keys: $dK$ and $dV$ of a block collect from all queries, and $dQ$ is added up in slow memory.

# %%
show(flash.backward)

# %%
show(flash.backward_of_keys)


# %% [markdown]
# Compared with plain attention, in float64, masked, with fewer key–value heads than query heads and lengths that no block divides:


# %%
def gradients(attend, to=torch.float64, **options):
    q, *_ = tensors(75, a=6, d=16, dtype=torch.float64)
    _, k, v = tensors(90, a=2, d=16, dtype=torch.float64)
    out, lse = attend(q.to(to), k.to(to), v.to(to), causal=True, **options)
    return out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))


both = zip(
    gradients(flash.plain),
    gradients(flash.attention, block_q=16, block_k=32),
    strict=True,
)
all((exact - ours).abs().max() < 1e-12 for exact, ours in both)

# %% [markdown]
# The gradient through lse is included: $\partial\,\text{lse}_i / \partial S_{ij} = P_{ij}$, so it joins as $dS = P \circ (dP - D + d\text{lse})$. Lab 11 will need it.
#
# In a batch, short sequences are *padded*: filled up at the end. Under a causal mask padding needs no mask of its own, since no token looks at what comes after it
# (and the loss leaves padded positions out):

# %%
q, k, v = tensors(100)
padded = [F.pad(x, (0, 0, 0, 28), value=9.0) for x in (q, k, v)]
alone, in_batch = (flash.attention(*x, causal=True)[0] for x in ((q, k, v), padded))
bool((in_batch[:, :, :100] - alone).abs().max() < 1e-6)

# %% [markdown]
# Without a causal mask short sequences need a padding mask, or are packed one behind the other (*In practice*).

# %% [markdown]
# ## Further: which numbers of a tile may have 16 bits?
#
# In half-precision training (lab 02) Q, K and V arrive in bf16. Here is the loop of one head in fp32,
# in which any of its five quantities can be rounded to bf16 after every block: the scores S, the maximum m, the weights P, the sum ℓ and the output o.


# %%
def in_tiles(q, k, v, short="", block=64):
    def keep(name, x):
        return x.bfloat16().float() if name in short else x

    m, ell, o = (
        q.new_full((len(q), 1), -1e30),
        q.new_zeros(len(q), 1),
        torch.zeros_like(q),
    )
    for keys, values in zip(k.split(block), v.split(block), strict=True):
        S = keep("S", q @ keys.mT / math.sqrt(q.shape[1]))
        m, old = keep("m", torch.maximum(m, S.amax(-1, keepdim=True))), m
        P = (S - m).exp()
        ell = keep("l", ell * (old - m).exp() + P.sum(-1, keepdim=True))
        o = keep("o", o * (old - m).exp() + keep("P", P) @ values)
    return o / ell


# %% [markdown]
# > One of the five can be rounded to bf16 after every block, and the result is as exact as in fp32. Which?

# %%
predict("flash/harmless", name="P")


# %%
def in_bf16(keys):
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(n, 64, generator=draw).bfloat16().float() for n in (128, keys, keys)
    ]


def error(q, k, v, short="", block=64):
    exact = plain(q.double(), k.double(), v.double())
    return ((in_tiles(q, k, v, short, block) - exact).norm() / exact.norm()).item()


errors = {
    name: [error(*in_bf16(keys), short=name) for keys in (1024, 4096, 16384)]
    for name in ("", "m", "P", "S", "o", "l")
}
{name or "none": [f"{e:.1e}" for e in found] for name, found in errors.items()}

# %%
reveal(
    "flash/harmless", name=min(("S", "m", "P", "l", "o"), key=lambda n: errors[n][0])
)

# %% [markdown]
# It is the maximum $m$, because $m$ is a unit and not a result. Both $o$ and $\ell$ are counted in it, and it cancels in $o/\ell$, rounded or not.
#
# (That holds for scores up to 32,768. From there on the numbers of bf16 lie 256 apart, a rounded maximum may be too small by 128, and $e^{128}$ overflows in fp32.)
#
# The columns are 1024, 4096 and 16 384 keys. With more keys the errors of the two sums $\ell$ and $o$ grow, and that of $P$ does not. More keys also mean more blocks,
# and each block rounds a sum once more. Which of the two is the cause? Here are 16 384 keys in 16 blocks, as many as 1024 keys had, and 1024 keys in 256 blocks:

# %%
for keys, block in ((16384, 1024), (1024, 4)):
    print({x: f"{error(*in_bf16(keys), x, block):.1e}" for x in ("P", "o", "l")})

# %% [markdown]
# The cause is the number of blocks: with 16 of them the errors of $o$ and $\ell$ are as small as with 1024 keys, and with 256 the error of $o$ is as large as with 16 384. That of $\ell$ needs many keys, too: the sums of 64 are nearly alike, and are rounded alike.
#
# So far the weight was spread over many keys. Queries a hundred times as long make scores of several hundred, and then few keys get all of it:

# %%
q, k, v = in_bf16(1024)
{name: f"{error(100 * q, k, v, short=name):.0e}" for name in ("P", "S", "o", "l")}

# %% [markdown]
# Now S is the worst. Beyond 256 the numbers of bf16 lie 2 apart, so a score can be wrong by 1, and its weight is then wrong by a factor of e.
#
# So kernels keep S, ℓ and o in fp32, and m with them. They round $P$ alone, because tensor cores multiply 16-bit factors. Plain attention in bf16 writes S to slow
# memory, rounded, and so it has the error of S, too.
#
# The log-sum-exp has to stay in fp32 as well. It is about 9 here, where the numbers of bf16 lie 1/16 apart. Recover the weights from a rounded lse and add up each
# row, which should give 1:

# %%
q, k, v = in_bf16(4096)
scores = q @ k.mT / 8
sums = (scores - scores.logsumexp(-1, keepdim=True).bfloat16()).exp().sum(-1)
f"{sums.min().item():.2f} to {sums.max().item():.2f}"

# %% [markdown]
# ## How many bytes move?
#
# Tiling can save traffic, too. A GPU has a large slow memory, *HBM*, and in each of its processors a small fast one. On an A100 HBM delivers 1.5 to 2.0 TB/s. The fast
# memories hold 192 kB each, and together deliver about 19 TB/s (FlashAttention paper, section 2.1).
#
# Count the numbers that enter and leave *a processor* in the forward pass. Plain attention takes three steps: read Q and K, write S; read S, write P; read P and V,
# write O. Each is counted once, as in the first paper. Tiled attention moves no scores, but every block of queries reads all keys and values again:
#
# $$ \text{plain} = 4 s^2 + 4 s d $$
#
# $$ \text{tiled} = \underbrace{2 s d}_{Q,\,O} + \underbrace{2 s d \cdot \lceil s / B_q \rceil}_{K,\,V\text{ per block of } B_q} + \underbrace{s}_{\text{lse}} $$
#
# > 4096 tokens, d = 64, 16-bit numbers, one head. Plain attention moves 136 MB. With blocks of 128 queries, how many MB does tiled attention move?

# %%
predict("flash/moved", MB=20)

# %%
sizes = dict(s=4096, d=64, block_q=128, block_k=128)
loops = ("plain", "flash-1", "flash-2")
traffic = {name: flash.traffic(name, **sizes) for name in loops}
plots.traffic_bars(guess=predictions["flash/moved"], **traffic)

# %% [markdown]
# **flash-1** and **flash-2** are the loops of the two papers. In flash-1 the outer loop runs over keys: for each block of keys, the unfinished output of every query
# is read and written again. In flash-2 it runs over queries, as in the picture at the top, and each output is written once. The tiles and FLOPs are the same, the
# bytes two thirds.
#
# Every tile that `flash.attention` loads or stores is counted:

# %%
q, k, v = (x.detach() for x in tensors(1000, a=2))
run = dict(causal=True, block_q=96, block_k=64)
crossed = flash.counted(q, k, v, **run)
flash.traffic("flash-2", s=1000, d=64, heads=2, itemsize=4, **run).diff(crossed)

# %% [markdown]
# **The law.** The first paper divides a fast memory of M numbers into four equal parts, a block each of queries, keys, values and output. Do the same for flash-2.
# Then a block of the outer loop has $B = M/(4d)$ rows (one of the inner at most d). For each of its s/B blocks of queries, flash-2 moves two tensors, K and V.
# For each of its s/B blocks of keys, flash-1 moves three: it reads Q and O, and writes O.
#
# $$ \text{flash-2} \approx 2 s d \cdot \frac{s}{B} = \frac{8\, s^2 d^2}{M} $$
#
# $$ \text{flash-1} \approx 3 s d \cdot \frac{s}{B} = \frac{12\, s^2 d^2}{M} $$
#
# Both are the $\Theta(s^2 d^2 / M)$ of the paper. So twice the tokens, or heads twice as wide, should move 4 times the numbers, and twice the fast memory half.
# Counted:


# %%
def moved(algorithm, s, d, fast):
    """Numbers, not bytes, that cross the border; blocks fill `fast` numbers."""
    inner, outer = flash.block_sizes(fast, d)
    rows, columns = (outer, inner) if algorithm == "flash-2" else (inner, outer)
    blocks = dict(block_q=rows, block_k=columns, itemsize=1, stat_itemsize=1)
    return flash.traffic(algorithm, s=s, d=d, **blocks).total


fast = 25_600  # numbers: 51 kB in 16 bits
twice = {"s": (8192, 64, fast), "M": (4096, 64, 2 * fast), "d": (4096, 128, fast)}
for loop in ("flash-1", "flash-2"):
    once = moved(loop, 4096, 64, fast)
    found = {f"{x} × 2": round(moved(loop, *to) / once, 2) for x, to in twice.items()}
    print(loop, found)

# %% [markdown]
# Plain attention moves some $4s^2$ numbers. Divide by what a loop moves, and you have its *gain*. **With four equal parts the gain is $M/3d^2$ for flash-1 and
# $M/2d^2$ for flash-2: no constant.**

# %%
for head in (64, 128):
    for loop, tensors_again in (("flash-1", 3), ("flash-2", 2)):
        law = fast / (tensors_again * head**2)
        gain = moved("plain", 4096, head, fast) / moved(loop, 4096, head, fast)
        print(f"{loop}, d = {head:3}: law {law:.2f}, counted {gain:.2f}")

# %% [markdown]
# With heads of 128 and 51 kB of fast memory both loops move *more* than plain attention. Tiling need not be the cause: there are two others.
#
# One is the four equal parts. In flash-2 keys and values only pass through, so keep 16 of them at a time, and give the rest to queries, their outputs, and the tile of
# scores.
#
# The other is the count. Plain attention's products work in blocks, too: they read K again for each block of Q, V for each of O. "Counted alike" includes that:

# %%
for head in (64, 128):
    tiled, product = ((fast - n * 16 * head) // (n * head + 16) for n in (2, 1))
    blocks = dict(block_q=tiled, block_k=16, itemsize=1, stat_itemsize=1)
    narrow = flash.traffic("flash-2", s=4096, d=head, **blocks).total
    once = moved("plain", 4096, head, fast)
    again = 2 * 4096 * head * (math.ceil(4096 / product) - 1)
    gains = f"gain {once / narrow:.2f}, counted alike {(once + again) / narrow:.2f}"
    print(f"d = {head:3}, {tiled} queries at a time: {gains}")

# %% [markdown]
# Both were causes: for heads of 128 the gain rises from 0.80 to 1.25, and counted alike to 1.72.
#
# **Counted alike, tiling pays at this border only where fast memory holds more than half of d² numbers.** With narrow blocks of keys $B$ approaches M/2d rows, so
# flash-2 moves $4 s^2 d^2/M$ at least. Plain attention's blocks approach M/d rows, so it moves $4 s^2 + 2 s^2 d^2/M$. The ratio, $M/d^2 + \tfrac12$, is the largest
# gain. With 16 keys at a time tiling pays from some 5,000 numbers on for heads of 64, and from 14,000 for heads of 128.
# <!-- claim: [round((lambda q, p: (flash.traffic("plain", s=4096, d=d, itemsize=1).total + 2 * 4096 * d * (-(-4096 // p) - 1)) / flash.traffic("flash-2", s=4096, d=d, block_q=q, block_k=16, itemsize=1, stat_itemsize=1).total)((M - 32 * d) // (2 * d + 16), (M - 16 * d) // (d + 16)), 1) for M, d in ((5000, 64), (14000, 128))] == [1.0, 1.0] -->

# %% [markdown]
# ## Can the keys live in two places?
#
# Cut the keys into two halves and attend to each, as if the other did not exist. Each half gives an output, normalized over its own keys, and its lse. Is that enough for the whole?
#
# It is: $e^{\text{lse}}$ is the denominator that a half was divided by. Undo both divisions, add, divide once:
#
# $$ O = \frac{e^{\text{lse}_1} O_1 + e^{\text{lse}_2} O_2}{e^{\text{lse}_1} + e^{\text{lse}_2}}, \qquad \text{lse} = \log\left(e^{\text{lse}_1} + e^{\text{lse}_2}\right). $$

# %%
whole, _ = flash.attention(q, k, v)
halves = [
    flash.attention(q, k[:, :, at], v[:, :, at])
    for at in (slice(0, 500), slice(500, 1000))
]
merged, _ = flash.merge(*halves[0], *halves[1])
bool((whole - merged).abs().max() < 1e-6)

# %% [markdown]
# (A key in both parts would count twice.) This one function serves keys on two GPUs, keys in two programs of one GPU that share a long row
# (Flash-Decoding), and keys that arrive over a ring of ranks (lab 11).
#
# ### Exercise 6.2 · Two halves of the keys (15 min, ●●○)
#
# Compute attention over all keys from its results over two parts of them. A part may be masked throughout (output 0, lse −∞); scores may be large. In a row that neither part sees, gradients stay finite.


# %%
def merge(o1, lse1, o2, lse2):
    """(output, lse) over both sets of keys. Outputs are (…, d), lse are (…)."""
    raise NotImplementedError


# %%
check("flash/merge", merge)

# %%
hint("flash/merge")

# %%
show(flash.merge)

# %% [markdown]
# ## Further: the mask where keys outnumber queries
#
# ### Exercise 6.3 · Bug hunt: right on every square (15 min, ●●○)
#
# In a chat, a new token is one query against the keys of the whole conversation. Where does a causal mask sit when there are more keys than queries? The code below
# passed every test its author wrote. Open it, copy it into the next cell, and mend it.
#
# It should still work in tiles, and skip those that are all mask. It should take more queries than keys, too: there the first queries see no key, and their output is
# 0 and their lse −∞.

# %%
show(buggy_attention)

# %%
my_attention = buggy_attention  # replace this line by your corrected copy

# %%
check("flash/causal-hunt", my_attention)

# %%
hint("flash/causal-hunt")

# %% [markdown]
# ## Further: what is a fused kernel, in general?
#
# Attention is the famous case of something ordinary. An operation reads its inputs from slow memory and writes its result there, and the next one reads it back. Take a softmax in five operations, on 4096 rows of 4096 numbers in fp32:

# %%
show(flash.softmax)

# %% [markdown]
# > It reads 67 MB and returns 67 MB. How many MB move in total?

# %%
predict("flash/softmax", MB=300)

# %%
predicted = flash.passes(flash.softmax, 4096, 4096)
reveal("flash/softmax", MB=predicted.total / 1e6)

# %% [markdown]
# The maximum and the sum read once each; subtraction, exponential and division each read and write. That makes eight sweeps, where PyTorch's own `softmax` takes two.
# Counted at PyTorch's dispatcher:

# %%
draw = torch.Generator().manual_seed(0)
x = torch.randn(4096, 4096, generator=draw)
predicted.diff(flash.moved(lambda: flash.softmax(x)))

# %% [markdown]
# *Fusing* means: take a few rows into fast memory, do everything there, write the result. No arithmetic changes. `one_pass` does that to any row-wise function, 16 rows at a time:

# %%
_, crossed = flash.one_pass(flash.softmax, x)
flash.passes(flash.softmax, 4096, 4096, fused=True).diff(crossed)

# %% [markdown]
# LayerNorm takes 2 sweeps in place of 8 as well, and SwiGLU, which has two inputs to read, 3 in place of 8.
#
# ### Must the logits exist?
#
# The largest tensor of a training step is often not in attention. Llama 3 has v = 128 256 words, and the logits of 8192 tokens are 4.2 GB in fp32.
#
# > How many GB does cross-entropy in fp32 hold at its fullest moment? Do not count its inputs, the last hidden states (width 4096) and the matrix W of the output.

# %%
predict("flash/logits", GB=4.2)

# %% [markdown]
# Three tensors of that size are there at once: the logarithms of the probabilities, their gradient, and the gradient of the logits. But no token needs another's
# logits. So take r tokens at a time: compute their logits, their loss, its gradient and the two products that pass it on, and forget.
#
# Since the loss is the end of the network, the gradients can be computed in the *forward* pass, while the logits are there; the backward pass only scales them.

# %%
show(flash.fused.LinearCrossEntropy)

# %% [markdown]
# What remains are the gradients of W and of the hidden states, the logits of r tokens, r rows of a product on its way, and a few numbers per row. By formula:


# %%
def by_formula(s, v, h, rows):
    chunks = v * h + s * h + rows * v + rows * h + 3 * rows + 1
    return [4 * (3 * s * v + 2), 4 * chunks]


def all_at_once(x, W, t, rows):
    return torch.autograd.grad(F.cross_entropy(x @ W.mT, t), (x, W))


def in_chunks(x, W, t, rows):
    return torch.autograd.grad(flash.linear_cross_entropy(x, W, t, rows), (x, W))


def counted(rank, s, v, h, rows):
    """Bytes at the fullest moment, beyond the inputs: all at once, and in chunks."""
    x, W = (torch.zeros(n, h, requires_grad=True) for n in (s, v))
    given = x, W, torch.zeros(s, dtype=torch.long)
    return [
        measure.peak(partial(way, *given, rows), nn.Module()).total
        - sum(each.nbytes for each in given)
        for way in (all_at_once, in_chunks)
    ]


# %% [markdown]
# Measured on 256 tokens of width 64, and in a dry run of the whole, whose tensors have shapes and no numbers:

# %%
small, whole = (256, 128_256, 64, 32), (8192, 128_256, 4096, 512)
with World(1, engine="dry") as dry:
    found = dry.run(counted, *whole, rank=0)
print("measured and dry:", counted(None, *small) == by_formula(*small), end=" ")
print(found == by_formula(*whole), *map(units.text, found))

# %%
reveal("flash/logits", GB=round(found[0] / 1e9, 1))

# %% [markdown]
# Most of the 2.51 GB is the gradient of W, which has to be somewhere. Are the gradients those of PyTorch? And how many bytes do operations load and store, all at once
# and in chunks of 512, 128 and 32 rows?

# %%
draw = torch.Generator().manual_seed(0)
x, W = (torch.randn(n, 64, generator=draw, requires_grad=True) for n in (512, 32_000))
t = torch.randint(32_000, (512,), generator=draw)
pairs = zip(all_at_once(x, W, t, 64), in_chunks(x, W, t, 64), strict=True)
print("equal:", all(torch.allclose(a, b, atol=1e-6) for a, b in pairs))
print("all at once:", units.text(flash.moved(partial(all_at_once, x, W, t, 0)).total))
for rows in (512, 128, 32):
    amount = flash.moved(partial(in_chunks, x, W, t, rows)).total
    print(f"{rows:3} rows at a time: {units.text(amount)}")

# %% [markdown]
# The gradients are equal, and the memory is paid for in traffic: each chunk reads W twice, and reads and writes the whole gradient of W. (A single chunk of all 512
# rows already moves more than all at once, because its softmax goes through memory step by step here. A fused kernel takes fewer sweeps.)
#
# So how many rows should a chunk have? It takes 6·r·v·h FLOPs for those 4·v·h numbers, in 16 bits 0.75·r FLOPs per byte. An H100 does 295 FLOPs while it moves a byte
# (next section). So there a chunk should have some 390 rows or more (590 if the gradient of W is added up in fp32).
# <!-- arithmetic: round(295 / (6 / (4 * 2)), -1) == 390 and round(295 / (6 / (2 * 2 + 2 * 4)), -1) == 590 -->

# %% [markdown]
# ### Where is the roof?
#
# A device does at most so many FLOPs per second, and moves at most so many bytes per second. With *intensity* = FLOPs per byte moved,
#
# $$ \text{FLOP/s} \;\le\; \min\left(\text{peak},\; \text{intensity} \times \text{bandwidth}\right). $$
#
# The two limits meet at the *ridge*. Left of it memory is the limit, right of it arithmetic.
#
# A roofline of HBM has to count the bytes of HBM, and so far you have counted those of the processors. Between the two lies **L2**, a cache that all processors share:
# what one has read from HBM, others can read there.
#
# The L2 of an H100 holds 50 MB. Take heads of 128, 16 384 tokens, and one block of 128 queries on each of its 132 processors. A head has 128 such blocks, so about one
# head is worked on at a time. This is what its K and V take, and what its scores would take:

# %%
s, d = 16_384, 128
heads_at_once = 132 / (s / 128)
taken = {"K and V": 2 * s * d, "scores": s * s}  # numbers per head, 2 bytes each
{name: units.text(2 * heads_at_once * numbers) for name, numbers in taken.items()}

# %% [markdown]
# K and V fit into L2 several times over, the scores do not. So a tiled kernel can share reads, and HBM carries something between two bounds: *every read*, or each
# tensor *once*. The figure shows both bounds, plain attention, and a softmax alone (about 5 FLOPs per number, in eight sweeps). The level dotted line is a
# rate that was timed:

# %%
roof = flash.Roof.of(Hardware.named("H100"))
flops, sizes = flash.attention_flops(s, d), dict(s=s, d=d)
moves = {
    "plain": flash.traffic("plain", **sizes),
    "tiled, every read": flash.traffic("flash-2", block_q=128, **sizes),
    "tiled, once": flash.traffic("flash-2", block_q=s, **sizes),
}
points = {name: (flops, ledger.total) for name, ledger in moves.items()}
points["softmax"] = 5 * s * s, flash.passes(flash.softmax, s, s, itemsize=2).total
title = "Between 425 and 989 TFLOP/s: it depends on how often a read is shared"
timed = {"timed": 620.73e12}  # pull request 2391, below
device = {roof.name: (roof.flops, roof.bandwidth)}
plots.roofline(device, points, timed=timed, title=title)

# %% [markdown]
# The timed kernel is FlashAttention-3, in the forward pass, with this head and length (PyTorch's benchmark suite, pull request 2391). Its blocks have 128 queries, too
# (`hopper/tile_size.h`). The report names neither the Hopper GPU nor the mask. The mask does not matter here: a causal one halves FLOPs and reads alike. This is the
# most that the roof allows the three attentions:

# %%
at_most = {name: flops / roof.time(flops, x.total) for name, x in moves.items()}
{name: units.text(rate, "FLOP/s") for name, rate in at_most.items()}

# %% [markdown]
# **If it ran on an H100, this kernel shared reads.** Had HBM served every read, 425 TFLOP/s would have been the most, and the kernel reached 621. So HBM served at
# most 425/621 of the reads, about two thirds. The others were shared: in L2, or by pairs of processors that take K and V from one load, which this kernel can do.
#
# If it ran on an H200, the timing proves next to nothing. There HBM has 4.8 TB/s, and could serve 98 % of the reads.
# <!-- claim: round(100 * config.Hardware.named("H200").memory_bandwidth / config.Hardware.named("H100").memory_bandwidth * 425 / 621) == 98 -->
#
# In both cases a roofline of one memory cannot say what keeps the kernel below 989. (`flash.Roof.measured()` is the roof of your own machine.)
#
# ### How does it look on a GPU?
#
# On a GPU the loop must live inside *one* kernel, or each tile goes back to slow memory after all. A kernel is a program that runs many times at once, each time for
# another block. In the forward pass that is a block of queries of one head, as in the picture at the top.
#
# In the backward pass $dK$ and $dV$ of a block collect from all queries, $dQ$ from all keys, and programs that run at the same time would overwrite each other's sums.
# FlashAttention-2 adds to $dQ$ atomically: no addition is lost. The kernels below share out the gradients instead: one makes $dQ$, one $dK$ and $dV$. Both compute
# $QK^\top$ and $dO\,V^\top$, so a tile takes 3 + 4 = 7 products in place of 5.
#
# The language is *Triton*: Python syntax, compiled for the GPU. Open it, and compare the thirty lines of `_forward` with `flash.forward`. The other two kernels are made of the same pieces:

# %%
show(triton_kernel)

# %% [markdown]
# Without a GPU, Triton's interpreter carries out the same programs on the CPU, to see whether they are right, not how fast they are. The test from above, with $q$, $k$ and $v$ in fp32:

# %% tags=["nbval-ignore-output"]
if triton_kernel.triton:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fp32 = torch.empty(0, device=device)
    start = time.perf_counter()
    found = gradients(triton_kernel.triton_attention, to=fp32)
    took = units.text(time.perf_counter() - start, "s")
    pairs = zip(gradients(flash.plain), found, strict=True)
    worst = max((exact - ours.to(exact)).abs().max().item() for exact, ours in pairs)
    what = f"output, lse and gradients within {worst:.0e} of plain attention in fp64"
    print(f"{device}, {took}: {what}")
else:
    print("The package triton is not installed: nothing ran here.")

# %% [markdown]
# *Recorded GPU runs: none yet.* If you have a GPU, `python benchmarks/gpu.py` times them against `F.scaled_dot_product_attention` and records it in
# `labutils/data/gpu_runs/`.

# %% [markdown]
# ## Further: what would HBM have to carry?
#
# Choose a length, a head, a fast memory and a device. Blocks are as large as fits; the outer block gets M/4d rows. The title lists the ways that would take longer
# than their arithmetic, if HBM had to carry all that they move.


# %%
def side(s=4096, d=64, fast_kB=200, device="A100"):
    inner, outer = flash.block_sizes(fast_kB * 1000 // 2, d)  # 2 bytes per number
    ledgers = {
        "plain": flash.traffic("plain", s=s, d=d),
        "flash-1": flash.traffic("flash-1", s=s, d=d, block_q=inner, block_k=outer),
        "flash-2": flash.traffic("flash-2", s=s, d=d, block_q=outer, block_k=inner),
        "each tensor once": flash.traffic("flash-2", s=s, d=d, block_q=s),
    }
    roof, flops = flash.Roof.of(Hardware.named(device)), flash.attention_flops(s, d)
    slow = [n for n, x in ledgers.items() if roof.bound(flops, x.total) == "memory"]
    took = units.text(flops / roof.flops, "s")
    longer = ", ".join(slow) or "nothing"
    title = f"One head on an {device}: arithmetic {took}; longer in HBM: {longer}"
    return plots.traffic_bars(title=title, **ledgers)


widths, devices = [64, 128, 256], ["A100", "H100"]
explore(side, s=[1024, 4096, 16384], d=widths, fast_kB=[50, 100, 200], device=devices)

# %% [markdown]
# Look for the settings where tiling moves *more* than plain attention, as the first paper counts.
#
# How much fast memory would make flash-2 win at d = 256? By the law 2d² = 131 072 numbers, which are 262 kB in 16 bits. A processor of an H100 has only 228 kB. Kernels for
# d = 256 exist all the same: with 16 keys at a time some 75,000 numbers are enough, and 45,000 counted alike.
# <!-- claim: [round((flash.traffic("plain", s=4096, d=256, itemsize=1).total + again * 2 * 4096 * 256 * (-(-4096 // ((M - 16 * 256) // 272)) - 1)) / flash.traffic("flash-2", s=4096, d=256, block_q=(M - 32 * 256) // 528, block_k=16, itemsize=1, stat_itemsize=1).total, 2) for M, again in ((75000, 0), (45000, 1))] == [1.0, 1.0] -->
#
# And what HBM carries can be less than what the processors read, because caches serve a part. The last bar is the least.

# %% [markdown]
# ## In practice
#
# - **PyTorch.** `F.scaled_dot_product_attention` chooses among `SDPBackend.FLASH_ATTENTION`, `EFFICIENT_ATTENTION`, `CUDNN_ATTENTION` and `MATH`; the last is plain attention and keeps
#   s × s. `with sdpa_kernel(SDPBackend.FLASH_ATTENTION):` turns a silent fall-back into an error. `is_causal` is the *upper left* triangle of a rectangle; `torch.nn.attention.bias`
#   has both. Any other mask: `flex_attention`.
# - **The flash-attn package.** fp16 and bf16 only. Since version 2.1 `causal=True` means the *lower right* corner, as here; before, and in PyTorch, the upper left.
#   Sequences of different lengths are packed (`flash_attn_varlen_func` with cumulative lengths) instead of padded.
# - **Hugging Face transformers.** `from_pretrained(…, attn_implementation="flash_attention_2")`; also `"flash_attention_3"`, `"sdpa"`, `"flex_attention"` and `"eager"`, plain attention.
# - **Megatron-LM.** `--attention-backend flash`, `fused`, `unfused`, `local` or `auto` (default).
# - **torchtitan.** A model's own choice: in 0.2.2 `attn_type`, `"sdpa"`, `"flex"` or `"varlen"`; on the main branch of 2026 `attn_backend`, with `"flex_flash"` for Hopper and later.
# - **Logits in chunks.** `F.linear_cross_entropy` of PyTorch 2.13 with `options=nn.LinearCrossEntropyOptions(…)`; Liger Kernel's `LigerFusedLinearCrossEntropyLoss`.
#
# Dropout inside a fused attention stores no mask: the backward pass draws the same numbers again from the same seed. `flash.attention` has none.

# %% [markdown]
# ## Errata
#
# ### Wrong
#
# **Computation falls from O(n²) "to linear (O(n))"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024, on <!-- erratum: S2-013 -->
# FlashAttention). Twice the tokens, four times the FLOPs, and four times the bytes moved. What becomes linear is the memory that is *kept*.

# %%
once, twice = (moved("flash-1", s, 64, 25600) for s in (4096, 8192))
more_flops = flash.attention_flops(8192, 64) / flash.attention_flops(4096, 64)
{"FLOPs": more_flops, "numbers moved": round(twice / once, 2)}

# %% [markdown]
# **FlashAttention-2, algorithm 1, line 10** prints $\mathrm{diag}(e^{m_{old}-m_{new}})^{-1}$. You saw 150 where 2.99 was right. <!-- erratum: FA-08 -->
#
# **66.6 and 75.2 GFLOPs** (FlashAttention, figure 2: GPT-2 medium, s = 1024, d = 64, 16 heads, batch 64, forward and backward). The forward pass alone has 275 by the formula of the <!-- erratum: FA-09 -->
# second paper, forward and backward 962. Whatever was counted, only the ratio can be used: 1.13 times the FLOPs with FlashAttention. The table's point stands: 40.3 GB against 4.4 GB moved, 41.7 ms against 7.3 ms.

# %%
forward = flash.attention_flops(1024, 64, heads=16 * 64) / 1e9
backward = flash.attention_flops(1024, 64, heads=16 * 64, backward=True) / 1e9
print(f"GFLOPs: forward {forward:.0f}, both {forward + backward:.0f}", end="; ")
print(f"printed ratio {75.2 / 66.6:.2f}")

# %% [markdown]
# ### True under a condition
#
# **"a reduction in memory requirements by 10–20 times and a performance improvement of 2–4 times"** (the same Medium article; both figures stand in the introduction of the FlashAttention-2 paper). <!-- erratum: S2-015, S2-016 -->
# Both factors hold for attention alone, at some length: the first grows with s/d without limit (here 2 at 256 tokens, 22 at 2048).
#
# **Activation memory "scales quadratically with sequence length."** (chapter 15, *LLM Training Acceleration (WIP)*, of an online book on large language models). <!-- erratum: S0-026 -->
# True while the s × s tensors are stored. In Korthikanti's $sbh\,(34 + 5as/h)$ the second term is what a fused attention removes; what is left is linear.

# %% [markdown]
# ## Summary
#
# - Besides Q, K and V, plain attention keeps a·s² weights; tiled attention keeps its output and one number per row: 67 MB against 2 MB with 4 heads of 64, 2048 tokens and fp32.
#   <!-- claim: (flash.traffic("plain", s=2048, d=64, heads=4, itemsize=4).only(name="P", component="store").total, flash.traffic("flash-2", s=2048, d=64, heads=4, itemsize=4).only(component="store").total) == (67108864, 2129920) -->
# - A softmax can be finished late: when the maximum grows from m to m', every sum so far is multiplied by e^(m − m'). Nothing is approximated: what differs is rounding.
#   <!-- claim: abs(flash.online([(torch.tensor([0.0]), torch.tensor([[1.0]])), (torch.tensor([5.0]), torch.tensor([[3.0]]))])[0].item() - (math.exp(-5) + 3) / (math.exp(-5) + 1)) < 1e-6 -->
# - The backward pass recomputes the weights from lse, and D = rowsum(dO ∘ O) spares it the sum over keys. It takes 5 products where the forward takes 2.
#   <!-- claim: 2 * flash.attention_flops(4096, 64, backward=True) == 5 * flash.attention_flops(4096, 64) -->
# - In a bf16 kernel P may be rounded; the scores, the sums ℓ and o, and lse stay in fp32.
#   <!-- claim: flash.attention(*torch.ones(3, 1, 1, 4, 8, dtype=torch.bfloat16))[1].dtype == torch.float32 -->
# - What tiling saves in traffic depends on fast memory (M numbers) and head width. As the first paper counts, plain attention moves about M/2d² times the numbers of flash-2 (forward, four equal parts),
#   and up to M/d² times with few keys at a time. With M = 25 600 and 4096 tokens: 3.09 and, with 16 keys, 4.81 for heads of 64; 0.80 and 1.25 for 128.
#   <!-- claim: [round(flash.traffic("plain", s=4096, d=d, itemsize=1).total / flash.traffic("flash-2", s=4096, d=d, block_q=q, block_k=k, itemsize=1, stat_itemsize=1).total, 2) for d, q, k in ((64, 100, 64), (64, 163, 16), (128, 50, 50), (128, 79, 16))] == [3.09, 4.81, 0.8, 1.25] -->
# - Output and lse of two disjoint sets of keys give those of their union. Ring attention and split decoding use this.
#   <!-- claim: torch.allclose(flash.merge(torch.zeros(1, 2), torch.zeros(1), torch.ones(1, 2), torch.zeros(1))[0], torch.full((1, 2), 0.5)) -->
# - A fused kernel does the same arithmetic in fewer sweeps: softmax 2 instead of 8, LayerNorm as well, SwiGLU 3.
#   Nor need all logits exist at once: with 512 rows at a time cross-entropy holds 2.5 GB in place of 12.6 (fp32, 8192 tokens, width 4096, 128 256 words).
#   <!-- claim: (lambda v, h: [round(4e-9 * n, 1) for n in (512 * v + v * h + 8192 * h, 3 * 8192 * v)])(config.ModelConfig.named("llama-3.1-8b").vocab_size, config.ModelConfig.named("llama-3.1-8b").d_model) == [2.5, 12.6] -->
#   <!-- claim: [round(flash.passes(f, 4096, 4096, fused=x).total / (4 * 4096**2)) for f in (flash.softmax, flash.layernorm, flash.swiglu) for x in (True, False)] == [2, 8, 2, 8, 3, 8] -->
# - A roofline belongs to one memory. On an H100, with heads of 128 and 16 384 tokens, HBM allows 425 TFLOP/s if it serves every read of K and V, and the full 989
#   if each tensor crosses once. A published kernel reaches 621, on a Hopper GPU that its report does not name.
#   <!-- claim: [(lambda r, f: round(f / r.time(f, flash.traffic("flash-2", s=16384, d=128, block_q=q).total) / 1e12))(flash.Roof.of(config.Hardware.named("H100")), flash.attention_flops(16384, 128)) for q in (128, 16384)] == [425, 989] -->
#
# Next: [lab 07](07_collectives.ipynb) leaves the single device: what does it cost to add numbers in different places?

# %% [markdown]
# ## References
#
# *(reported)*: quoted after others; we have not read it.
#
# - T. Dao, D. Y. Fu, S. Ermon, A. Rudra, C. Ré, *FlashAttention: fast and memory-efficient exact attention with IO-awareness*, arXiv:2205.14135 (2022): algorithms 0, 1 and 3, theorems 1 and 2, figure 2.
# - T. Dao, *FlashAttention-2: faster attention with better parallelism and work partitioning*, arXiv:2307.08691 (2023): algorithms 1 and 2, sections 3.1 and 4.1.
# - J. Shah et al., *FlashAttention-3: fast and accurate attention with asynchrony and low-precision*, arXiv:2407.08608 (2024): its versions and its source, `hopper/tile_size.h`.
# - PyTorch benchmark suite, pull request 2391 (July 2024): FlashAttention-3 against a Triton kernel, forward, heads of 128; 620.73 TFLOP/s at 16 384 tokens.
# - NVIDIA, *Hopper architecture in depth* (2022): the H100's L2 cache (reported).
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax*, arXiv:1805.02867 (2018): the change of units (reported).
# - M. N. Rabe, C. Staats, *Self-attention does not need O(n²) memory*, arXiv:2112.05682 (2021) (reported).
# - P.-L. Hsu et al., *Liger Kernel: efficient Triton kernels for LLM training*, arXiv:2410.10989 (2024): cross-entropy in chunks, gradients in the forward pass (reported).
# - S. Williams, A. Waterman, D. Patterson, *Roofline: an insightful visual performance model*, Communications of the ACM 52 (2009) (reported).
# - V. Korthikanti et al., *Reducing activation recomputation in large transformer models*, arXiv:2205.05198 (2022): equation 1.
# - PyTorch documentation of `scaled_dot_product_attention`, `torch.nn.attention`; Hugging Face documentation of attention backends; argument lists of Megatron-LM and torchtitan, to mid-2026.
