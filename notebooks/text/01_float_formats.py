# %% [markdown]
# # 01 · Choose a number format
#
# **What do you lose when a weight, a gradient or a sum gets 16, 8 or 4 bits instead of 32, and when does training notice?**
#
# *90 min, and 35 further · before this: lab 00 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - read any pattern of bits in any format, down to four bits, infinities and NaN included (exercise 1.1),
# - write the cast that puts any number into any format, and know its range and its gap (exercise 1.2),
# - find the input that a cast gets wrong although a thousand random tests pass (exercise 1.3, a bug hunt),
# - predict where a sum stops growing, and keep it growing (exercise 1.4).

# %% [markdown]
# ## Setup

# %%
import math

import ml_dtypes
import torch

from labutils import floats, precision
from labutils.floats import BF16, E2M1, E2M3, E3M2, E4M3, E5M2, FP16, FP32, TF32
from labutils.teach import plots
from labutils.teach.check import check, hint, predict, predictions, reveal, show
from labutils.teach.widgets import bits, explore, slider

# %% [markdown]
# ## The idea in one picture
#
# A floating-point number is a sign, a power of two, and a place between that power and the next.
# Exponent bits buy *range*: how large and how small a number can be. Mantissa bits buy *precision*: how many places there are between two powers.
# One bit is the sign, and every other bit goes to one or the other.

# %%
formats = [FP32, TF32, BF16, FP16, E5M2, E4M3, E3M2, E2M3, E2M1]
title = "bf16 reaches as far up as fp32 with half the bits; fp16 does not"
plots.dynamic_range(formats, title=title)

# %% [markdown]
# The solid part of each bar holds the *normal* numbers. bf16's span what fp32's span, with half the bits; fp16's do not. (The hatched part, the *subnormal* numbers, ends sooner in bf16.)
# The formats below 8 bits span so little that a *scale* has to travel with them. The last section is about scales.

# %% [markdown]
# ## What does a pattern of bits mean?
#
# fp8 e4m3 has 1 sign bit, 4 exponent bits and 3 mantissa bits: 256 patterns in all. How many of them are NaN,
# "not a number"? Write down a guess before you go on.

# %%
predict("e4m3/nan-codes", codes=14)  # your guess: change it

# %% [markdown]
# Write $e$ for the exponent field and $m$ for the mantissa field, both read as integers, and $M$ for the number of mantissa bits.
# A *normal* number, which most are, has the value
#
# $$ \text{value} = (-1)^{\text{sign}} \cdot 2^{\,e - \text{bias}} \cdot \Bigl(1 + \frac{m}{2^M}\Bigr) $$
#
# with a bias of $2^{\text{exponent bits} - 1} - 1$.
#
# The 1 in front is not stored: a normal number's leading bit is always 1.
# The bias puts the exponent field, which counts from 0, around 1.0.

# %%
code = 0b0_1000_100
plots.bit_pattern(E4M3, code)

# %%
print(f"bias {E4M3.bias}, {E4M3.fields(code)}, value {E4M3.decode(code)}")

# %% [markdown]
# Two exponent fields are special.
#
# **Field 0: no leading 1.** With one, 0 itself would have no code.
# The stretch below the smallest normal number is filled evenly down to zero by *subnormal* numbers: $\pm\, 2^{1-\text{bias}} \cdot m / 2^M$. The exponent is $1-\text{bias}$,
# the one of the smallest normal number, so that no gap stays open.

# %%
[E4M3.decode(c) for c in range(11)]  # 0, seven subnormals, and the first normal numbers

# %% [markdown]
# **The top field: infinity and NaN.** IEEE formats give up the whole top exponent: mantissa 0 is infinity, everything else NaN.
# Of e4m3's 256 codes that would be 16, 2 infinities and 14 NaNs, and the largest value would be 240.
# e4m3 keeps one code for NaN in each sign, has no infinity at all, and counts on to the top.

# %%
# What IEEE rules would have thrown away.
[E4M3.decode(0b0_1111_000 + m) for m in range(8)]

# %%
reveal("e4m3/nan-codes", codes=E4M3.counts.nan)

# %% [markdown]
# All formats follow from a handful of numbers, so one class describes them all, also one that you make up.

# %%
# The rest is as in IEEE 754.
mine = floats.FloatFormat("1-3-4", exponent_bits=3, mantissa_bits=4)
limits = f"max {mine.max}, normal from {mine.min_normal}, eps {mine.eps}"
f"{limits}, subnormal from {mine.min_subnormal:.4f}; {mine.counts}"

# %%
for fmt in formats:
    top, least = f"max {fmt.max:<9.4g}", f"subnormal from {fmt.min_subnormal:<8.2g}"
    limits = f"{top} normal from {fmt.min_normal:<8.2g} {least} eps {fmt.eps:.2g}"
    bits_of = f"1 + {fmt.exponent_bits} + {fmt.mantissa_bits}"
    print(f"{fmt.name:5}{bits_of:>11} bits, {limits}")

# %% [markdown]
# `eps` is the gap between 1 and the next number, $2^{-M}$. Keep three of these lines in mind: fp16 ends at 65 504, e4m3 at 448, and the first bf16 number after 1 is 1.0078.
# tf32 has 19 bits and takes 32 in memory: it exists only inside matrix multiplications, as what is left of an fp32 operand.
#
# Is all of this the real thing? Decode every 16-bit pattern and compare with torch.

# %%
patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
for fmt, dtype in [(FP16, torch.float16), (BF16, torch.bfloat16)]:
    values = [fmt.decode(code % 2**16) for code in patterns.tolist()]
    ours = torch.tensor(values, dtype=torch.float64)
    theirs = patterns.view(dtype).double()
    differ = (ours != theirs) & ~(ours.isnan() & theirs.isnan())
    print(f"{fmt.name}: {differ.sum()} of {len(patterns):,} patterns differ")

# %% [markdown]
# Flip the bits yourself. Look for the largest number, the smallest, the NaN; watch the gap double when the exponent goes up by one.


# %%
def what_it_means(code):
    gap = E4M3.spacing(E4M3.decode(code))
    value = f"<p style='font-size:1.4em'>{E4M3.explain(code)}</p>"
    return value + f"<p>gap to the next value: {gap:g}</p>"


explore(what_it_means, states=256, code=bits(E4M3, start=0b0_0111_000))

# %% [markdown]
# ### Further: the same 8 bits, another meaning
#
# AMD's MI300 computes in *fnuz* formats: finite, NaN, unsigned zero. They have a bias that is larger by one, no infinity,
# and their only NaN is the code of −0. Write e4m3fnuz codes, and read them as e4m3; then the other way round:

# %%
numbers = torch.tensor([1.0, 240.0, -0.0])
written = numbers.to(torch.float8_e4m3fnuz)
f"fnuz ends at {floats.E4M3FNUZ.max}; read as e4m3: {written.view(torch.float8_e4m3fn)}"

# %%
written = numbers.to(torch.float8_e4m3fn)
f"written as e4m3, read as fnuz: {written.view(torch.float8_e4m3fnuz)}"

# %% [markdown]
# Numbers are off by a factor of 2, and fnuz's largest, or in the other direction −0, becomes NaN. No error is raised.

# %% [markdown]
# ### Exercise 1.1 · Read a code (10 min, ●○○)
#
# You get a format and a code. Return its value as a number, for any format: IEEE's, e4m3, the formats of 4 and 6 bits, fnuz.
# `fmt.fields(code)` cuts the code into its fields for you; `kind` is one of "normal", "subnormal", "zero", "inf" and "nan". A zero keeps its sign.


# %%
def decode(fmt: floats.FloatFormat, code: int) -> float:
    # A good first line: sign, exponent, mantissa, kind = fmt.fields(code)
    raise NotImplementedError


# %%
check("floats/decode", decode)

# %%
hint("floats/decode", 1)

# %%
show(floats.FloatFormat.decode)

# %% [markdown]
# ## Which value does a number get?
#
# 0.3 is no value of e4m3. It is rounded to an e4m3 number. How large is the error, in percent? Guess first.

# %%
predict("e4m3/error-of-0.3", percent=1)

# %% [markdown]
# Around $x$ the values of a format lie evenly, one *gap* apart. The gap depends on the power of two below $x$ and on nothing else:
#
# $$ \text{gap}(x) = 2^{\lfloor \log_2 |x| \rfloor - M} $$
#
# Below the smallest normal number the gap is what it is there.
#
# So rounding is counting: measure $x$ in gaps, round that to an integer, multiply back. Half a gap is the most you can be off. The gap is at
# most $2^{-M}$ of $x$, so
# the relative error is at most $2^{-M-1}$, the same for 0.02 and for 400.

# %%
gap = E4M3.spacing(0.3)
gaps = 0.3 / gap
f"0.3 is {gaps:.1f} gaps; {round(gaps)} gaps are {round(gaps) * gap}: {E4M3.round(0.3)}"

# %%
reveal("e4m3/error-of-0.3", percent=round(abs(E4M3.round(0.3) / 0.3 - 1) * 100, 2))

# %%
title = "The relative error has one bound for normal values and climbs only at the ends"
plots.relative_error([FP16, BF16, E4M3, E5M2], title=title)

# %% [markdown]
# The flat part of each line is $2^{-M-1}$, and it ends on the right with overflow. On the left it climbs: subnormal numbers keep their gap while $x$
# shrinks, until half the smallest is reached and everything below becomes zero.
#
# **Ties.** Exactly between two values, the one with the even *significand* (the mantissa with its leading bit) wins: its last bit is 0.

# %%
[E4M3.round(x) for x in (17, 19, 21, 23)]  # the gap is 2 here: all four are ties

# %% [markdown]
# **Other ways to round.** Toward zero cuts the rest off. *Stochastic* rounding goes up with a probability that is $x$'s place in the gap, so each result is off,
# unless $x$ is a value of the format, and their average is right:

# %%
g = torch.Generator().manual_seed(0)
x = torch.full((10_000,), 17.2)
for mode in ("nearest", "zero", "stochastic"):
    rounded = precision.round_to(x, E4M3, mode=mode, generator=g)
    print(f"{mode:10} mean {rounded.mean():.2f}")

# %% [markdown]
# **Overflow has two conventions, and libraries differ.** Above 464, half a gap beyond 448, e4m3 has no value left. ml_dtypes then says NaN.
# torch's cast *saturates* since version 2.12 (2026): it stops at 448, even for infinity. Before, it gave NaN as well, and for e5m2 and e4m3fnuz it still leaves the range:
# e5m2 has an infinity to go to, e4m3fnuz a NaN.
# In this course `overflow="ieee"` leaves the range, `overflow="saturate"` does not.

# %%
beyond = torch.tensor([464.0, 465.0, math.inf])
by_torch = beyond.to(torch.float8_e4m3fn)
by_ml_dtypes = beyond.numpy().astype(ml_dtypes.float8_e4m3fn)
theirs = by_ml_dtypes.astype("float32").tolist()
{"torch": by_torch.float().tolist(), "ml_dtypes": theirs}

# %%
other, far = (torch.float8_e5m2, torch.float8_e4m3fnuz), torch.tensor([1e6, math.inf])
{str(dtype): far.to(dtype).float().tolist() for dtype in other}

# %% [markdown]
# Drag a number and watch it land in five formats. From 1 on, e4m3 and e2m3 land on the same values, and so do e5m2 and e3m2: what did their other bits buy?


# %%
def where_it_lands(x):
    small = [E5M2, E4M3, E3M2, E2M3, E2M1]
    return plots.number_line(small, low=0, high=8, mark=x, title=f"Where {x:g} lands")


explore(where_it_lands, states=34, x=slider(0.0, 7.59, 0.23, start=2.53))

# %% [markdown]
# ### Exercise 1.2 · Write the cast (20 min, ●●○)
#
# You get a format and a finite float. Return the *code* it becomes: to nearest, ties to even; subnormals, overflow and fnuz's −0 included.
# Consecutive values have consecutive codes, so a significand that rounds up to the next power of two needs no special case: the carry runs into the
# exponent field by itself.


# %%
def encode(fmt: floats.FloatFormat, x: float) -> int:
    raise NotImplementedError


# %%
check("floats/encode", encode)

# %%
hint("floats/encode", 1)

# %% [markdown]
# The library's own also has other roundings, both conventions of overflow, and formats without a zero.

# %%
show(floats.FloatFormat.encode)

# %% [markdown]
# ## Further: what goes wrong if a number is rounded twice?
#
# ### Exercise 1.3 · Bug hunt: the cast that rounds twice (10 min, ●●●)
#
# This cast takes a float64 to fp16 by way of float32. (torch's own `.half()` on a float64 tensor takes the same way on a CPU.) It gets every fp16 value
# right, every midpoint between two of them, and a thousand random numbers.


# %%
def to_fp16(x):
    return torch.as_tensor(x, dtype=torch.float64).float().half().double()


def wrong(x):
    return (to_fp16(x) != precision.round_to(x, FP16)).sum().item()


values = torch.tensor(FP16.representable(), dtype=torch.float64)
midpoints = (values[1:] + values[:-1]) / 2
some = torch.rand(1000, dtype=torch.float64, generator=g)
tried = {"fp16 values": values, "midpoints": midpoints, "random": some}
{name: f"{wrong(x)} wrong" for name, x in tried.items()}

# %% [markdown]
# Find one finite number that it gets wrong.

# %%
counterexample = ...  # such as 0.1

# %%
check("floats/rounds-twice", counterexample)

# %%
hint("floats/rounds-twice", 1)

# %% [markdown]
# How rare is it? Of $2^{13}$ float32 numbers between two fp16 values one is the midpoint, and half of what float32 rounds to it should have gone the
# other way: one random number in $2^{14} = 16\,384$, about 61 in a million.
# Test the ties and their nearest neighbors *in float64*, and you see one at once.

# %%
f"{wrong(torch.rand(1_000_000, dtype=torch.float64, generator=g))} of a million"

# %% [markdown]
# ## Is 10 000 × 10 000 NaN in fp16?
#
# A book multiplies these two, in fp16. What comes out: a number, `inf` or `nan`?

# %%
predict("fp16/ten-thousand-squared", result="nan")

# %% [markdown]
# $10^8$ lies beyond 65 504. Rounding decides as if the exponent had no end, and only then asks whether the result exists: up to 65 519.99 it is still 65
# 504, from 65 520 on it is infinity.

# %%
a = torch.tensor(10_000.0, dtype=torch.float16)
reveal("fp16/ten-thousand-squared", "infinity", "∞", result=str((a * a).item()))

# %%
{x: FP16.round(x) for x in (65519.99, 65520)}

# %% [markdown]
# NaN comes one step later, when the infinity meets another or a zero: $\infty - \infty$,
# $\infty / \infty$, $\infty \cdot 0$.
# Here it is in a softmax of two harmless logits:

# %%
logits = torch.tensor([12.0, 11.0], dtype=torch.float16)
logits.exp(), logits.exp() / logits.exp().sum()

# %% [markdown]
# $e^{12} = 162\,755$ is too large for fp16. Subtract the largest logit first, and no exponential exceeds 1. bf16 does not need
# that here, and has three bits of precision less:

# %%
stable = (logits - logits.max()).exp()
wide = logits.bfloat16().exp()
found = {"fp16, less the largest": stable, "bf16": wide}
{name: (x / x.sum()).tolist() for name, x in found.items()}

# %% [markdown]
# **The other end is quieter.** fp16's smallest subnormal is $2^{-24}$. What is at most half of it, $2^{-25} \approx 3 \cdot 10^{-8}$, becomes zero, and nothing
# tells you. Take gradients of the size $10^{-7}$:

# %%
gradients = torch.randn(100_000, generator=g) * 1e-7
for scale in (1, 1024):
    rounded = [precision.round_to(gradients * scale, fmt) for fmt in (FP16, BF16)]
    zeros = [(x == 0).float().mean().item() for x in rounded]
    print(f"× {scale:4}: {zeros[0]:6.2%} become 0 in fp16, {zeros[1]:.2%} in bf16")
small = (gradients * scale).abs() < FP16.min_normal
f"× {scale}: {small.float().mean():.0%} lie below fp16's normal numbers"

# %% [markdown]
# Multiplying the loss by 1024 multiplies every gradient by 1024 and brings nearly all of them back: that is *loss scaling*. Nearly half are still subnormal here and have fewer digits, so a larger scale would do better.
# bf16 needs none: its exponent is fp32's. Lab 02 trains with and without.

# %% [markdown]
# ## Where does a sum of 4096 ones stop?
#
# Start at zero and add 1.0, 4096 times, in fp16. Where do you end? (bf16 runs along; guess that too.)

# %%
predict("sum-of-ones/fp16", ones=4096)

# %%
predict("sum-of-ones/bf16", ones=2048)

# %% [markdown]
# The gap of fp16 at 2048 is $2^{11-10} = 2$. So $2048 + 1$ lies exactly between 2048 and 2050, a tie; the even significand is 2048's. Every further 1 is lost in the same way: it is *swamped*.
# In general a sum of ones stops where the gap becomes 2, at $2^{M+1}$, if the format reaches that far (e2m3 ends at 7.5).

# %%
stops = [2 ** (fmt.mantissa_bits + 1) for fmt in (FP16, BF16)]
print(f"gap at 2048: {FP16.spacing(2048)}, 2048 + 1 is {FP16.round(2048 + 1)}")
print(f"sums of ones stop at {stops[0]} in fp16 and at {stops[1]} in bf16")

# %%
ones = torch.ones(4096)
sums = {fmt.name: precision.running_sum(ones, fmt).tolist() for fmt in (FP16, BF16)}
guesses = {name: predictions[f"sum-of-ones/{name}"] for name in sums}
plots.running_sums(ones.cumsum(0).tolist(), **sums, guesses=guesses)

# %% [markdown]
# The hollow diamonds are your guesses. Now PyTorch: a loop in bf16, then its own sum and dot product of the same tensor:

# %%
bf16 = torch.ones(4096, dtype=torch.bfloat16)
total = torch.zeros((), dtype=torch.bfloat16)
for one in bf16:
    total += one
product = (bf16 @ bf16).item()
f"the loop {total.item()}, sum() {bf16.sum().item()}, dot product {product}"

# %% [markdown]
# The loop rounds to bf16 every time, and stalls at 256. PyTorch's `sum()` and `mean()` of 16-bit tensors add in fp32 and round once, at the end; so do its products on a CPU. On terms where a tree
# of bf16 sums gives another number:

# %%
many = torch.linspace(0, 1, 3000).bfloat16()
once = many.float().sum().bfloat16()
tree = precision.pairwise_sum(many.float(), BF16).item()
f"sum() {many.sum().item()}, rounded once {once.item()}, bf16 tree {tree}"

# %% [markdown]
# What stalls is a sum that is *stored* in 16 bits between additions: a loop of yours, a gradient that accumulates in bf16, a weight that is updated in bf16. PyTorch has such sums, too (further down).
#
# There are four cures.
#
# **A wider accumulator.** Keep terms in 16 bits and the sum in fp32, whose gap reaches 2 only at 16.8 million. `sum()` above does this, and so do
# tensor cores within a product of 16-bit operands.

# %%
wide = precision.running_sum(ones, FP32)[-1].item()
f"{wide:g} in fp32, which would stop at {2 ** (FP32.mantissa_bits + 1):,}"

# %% [markdown]
# **A tree.** Add neighbors, then their sums, and so on: the two numbers of every addition are of one size, and a term passes through 12 roundings
# instead of 4095. The bound on the relative error of $n$ positive terms falls from $n$ to $\log_2 n$ half-gaps (Higham 1993).

# %%
f"a tree in bf16: {precision.pairwise_sum(ones, BF16).item():g}"

# %% [markdown]
# **Compensated summation (Kahan).** Stay in 16 bits, and keep a second number: what the last addition lost, which joins the next term.
#
# $$ \begin{aligned}
# y &= x + \text{lost} \\
# t &= \text{total} + y \\
# \text{lost} &= y - (t - \text{total}) \\
# \text{total} &= t
# \end{aligned} $$
#
# Every operation is rounded to the format. The 4096 ones again, and a weight of 1 with a thousand updates of 0.001, each less than half of bf16's gap at 1:

# %%
weight = torch.tensor([1.0] + [0.001] * 1000)
sums = [precision.kahan_sum(x, BF16).item() for x in (ones, weight)]
f"ones: {sums[0]:g}; the weight: {sums[1]}, and exactly {weight.double().sum():.3f}"

# %%
show(precision.kahan_sum)

# %% [markdown]
# The price is four additions per term, and a second 16-bit number for each sum. It has an end, too: what was lost is a sum in 16 bits itself. A sum of ones stops at $2^{M+1} \cdot 2^{M+1}$, which is 65 536 in bf16 (in fp16 it overflows before that). Zamirai et al. (2020) train in bf16 alone with such a number per weight.

# %% [markdown]
# **Stochastic rounding.** At 256 the gap is 2, and 1 goes up every second time. The sum wanders, but its *expected* value is right.
# Weights in bf16 without an fp32 copy are trained in this way, too.
# %%
three = torch.ones(3, 4096)
wandering = precision.running_sum(three, BF16, mode="stochastic", generator=g)
plots.running_sums(
    ones.cumsum(0).tolist(),
    **{f"run_{i}": row.tolist() for i, row in enumerate(wandering, 1)},
    title="Rounded stochastically, a bf16 sum of ones wanders, and never stalls",
)

# %% [markdown]
# ### Further: how far does a stochastic sum wander?
#
# Where the gap is $G$, a 1 goes up by $G$ with a probability of $1/G$: its variance is $G - 1$. The gap is $G$ from $128\,G$ to $256\,G$, so for about $128\,G$ ones. By the formula, and in 200 runs:

# %%
variance = sum(128 * G * (G - 1) for G in (2, 4, 8, 16))
draw = dict(mode="stochastic", generator=torch.Generator().manual_seed(1))
ends = precision.running_sum(torch.ones(200, 4096), BF16, **draw)[:, -1]
print(f"by the formula 4096 ± {variance**0.5:.0f}", end=", ")
print(f"200 runs: {ends.mean():.0f} ± {ends.std():.0f}")

# %% [markdown]
# ### Further: sums of PyTorch's that stall
#
# On a CPU the gradient of an embedding in bf16 is added up row by row, in bf16 (`index_add`).
# A token that occurs 4096 times, each time with a gradient of 1, gets

# %%
table = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
torch.nn.functional.embedding(torch.zeros(4096).long(), table).sum().backward()
f"{table.grad.item()} of 4096"

# %% [markdown]
# The gradient of a bf16 LayerNorm's bias is such a sum, too.

# %% [markdown]
# ### Exercise 1.4 · A sum that does not stall (10 min, ●●○)
#
# You get terms and a format, and `precision.round_to(x, fmt)`. Return their sum, every partial result rounded to the format, with an error that grows
# with $\log n$ and not with $n$: build a tree. Which one is up to you.


# %%
def pairwise_sum(x: torch.Tensor, fmt: floats.FloatFormat) -> torch.Tensor:
    raise NotImplementedError


# %%
check("floats/pairwise-sum", pairwise_sum)

# %%
hint("floats/pairwise-sum", 1)

# %%
show(precision.pairwise_sum)

# %% [markdown]
# ## Further: does the order of a sum matter?
#
# Floating-point addition commutes, $a + b = b + a$, and does not associate. Take the first 2000 terms of $1 + \tfrac12 + \tfrac13 + \dots$, from the front and from the back.

# %%
harmonic = 1 / torch.arange(1, 2001, dtype=torch.float64)
for fmt in (BF16, FP16, FP32):
    terms = precision.round_to(harmonic, fmt)
    both_ways = torch.stack([terms, terms.flip(0)])
    forward, backward = precision.running_sum(both_ways, fmt)[:, -1].tolist()
    pairwise = precision.pairwise_sum(terms, fmt).item()
    print(f"{fmt.name}: large first {forward:.4f}", end=", ")
    print(f"small first {backward:.4f}, pairwise {pairwise:.4f}")
print(f"exact: {harmonic.sum().item():.4f}")

# %% [markdown]
# Large terms first, the sum falls short the most in both 16-bit formats. Small ones first it comes closer, and as a tree closer still.
#
# Now the same thousand fp32 numbers in a hundred orders:

# %%
terms = torch.rand(1000, generator=g) - 0.5
shuffled = torch.stack([terms[torch.randperm(1000, generator=g)] for _ in range(100)])
results = precision.running_sum(shuffled, FP32)[:, -1]
apart = (results.max() - results.min()).item()
f"{len(set(results.tolist()))} different sums, up to {apart:.0e} apart"

# %% [markdown]
# In lab 07 another all-reduce algorithm or another number of
# ranks adds in another order, and two *correct* runs may then differ in their last bits.
#
# **tf32 is the same story in one multiplication.** 1.0001 differs from 1 in the 14th bit of its fraction; tf32 keeps 10. 1024 of them add up to 1024:

# %%
operand, column = torch.full((1024,), 1.0001), torch.ones(1024)
by_tf32, by_fp32 = precision.round_to(operand, TF32) @ column, operand @ column
f"1.0001 is {TF32.round(1.0001)}: sums {by_tf32.item()} and {by_fp32.item():.3f}"

# %% [markdown]
# The sum itself ran in fp32: only the operand was rounded. In torch `torch.set_float32_matmul_precision("high")` allows
# this on a GPU (newer versions also have `torch.backends.cuda.matmul.fp32_precision`).

# %% [markdown]
# ## Further: what do 8, 6 and 4 bits buy?
#
# Draw 8192 numbers from a normal distribution, as weights are at the start of training. Multiply them all by one *scale*, so that the largest becomes the format's
# largest, and round. Which 8 bits have the smaller error: e4m3, whose gap follows the number, or int8, 255 values at one distance?

# %%
predict("eight-bits/smaller-error", format="e4m3")


# %%
def scaled(w, fmt):
    unit = w.abs().max() / fmt.max
    if fmt is floats.INT8:
        return (w / unit).round() * unit
    return precision.round_to(w / unit, fmt, overflow="saturate") * unit


def error(w, rounded):
    return f"{(rounded - w).norm() / w.norm():.1%}"


w = torch.randn(8192, generator=g)
candidates = BF16, E4M3, E5M2, floats.INT8, E2M3, E2M1
{fmt.name: error(w, scaled(w, fmt)) for fmt in candidates}

# %%
in_8_bits = {fmt.name: scaled(w, fmt) - w for fmt in (E4M3, floats.INT8)}
smaller = min(in_8_bits, key=lambda name: in_8_bits[name].norm())
reveal("eight-bits/smaller-error", format=smaller)

# %% [markdown]
# int8 beats e4m3 here: its error is a part of the *largest* number, e4m3's a part of each number, and of these 8192 none is more than about four times the typical one. Real weights and activations have
# outliers. Plant larger and larger ones, and look at the error of the other 8191 numbers:

# %%
spiked = w.clone()
for outlier in (4, 8, 12, 16):
    spiked[0] = outlier
    int8, e4m3 = (error(w[1:], scaled(spiked, f)[1:]) for f in (floats.INT8, E4M3))
    print(f"{outlier:4} times the typical number: int8 {int8}, e4m3 {e4m3}")

# %% [markdown]
# From about 12 on e4m3 is ahead, on numbers of a normal distribution. Now one of 1000, for all formats:

# %%
spiked[0] = 1000.0
{fmt.name: error(w[1:], scaled(spiked, fmt)[1:]) for fmt in candidates}

# %% [markdown]
# The gap of an integer is the same everywhere: with the outlier in range it is 7.9, and nearly everything else becomes zero. An e4m3 number has an exponent of its
# own and keeps its error, as long as the outlier leaves it above the subnormal numbers. That ends where the outlier is 448/2⁻⁶ times as large as the number; where it is 448/2⁻¹⁰ times as large, the number is half the smallest subnormal and becomes zero:

# %%
f"{E4M3.max / E4M3.min_normal:,.0f} and {2 * E4M3.max / E4M3.min_subnormal:,.0f} times"

# %% [markdown]
# The typical number is 1 here, and there are smaller ones, so the error of all grows around these two, and not at once:

# %%
for outlier in (1e4, 1e5, 1e6):
    further = torch.cat([torch.tensor([outlier]), w[1:]])
    print(f"{outlier:9,.0f}: {error(w[1:], scaled(further, E4M3)[1:])}")

# %% [markdown]
# What lies further under the outlier is lost, as in an integer.

# %% [markdown]
# **A scale for every 32 numbers.** e2m1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and nothing else: a scale has to bring every number into that window.
# MXFP4 stores 4 bits per value, and one scale of 8 bits for every 32 values: $4 + 8/32 = 4.25$ bits per value. MXFP6 and MXFP8 take 6.25 and 8.25.

# %%
scale, codes = floats.MXFP4.encode([0.011, -0.002, 0.0051, 0.0007])
elements = [E2M1.bit_string(code) for code in codes]
print(f"scale {floats.E8M0.decode(scale)}, elements {elements}")
print("decoded:", floats.MXFP4.decode(scale, codes))

# %% [markdown]
# The scale is a power of two (e8m0: eight exponent bits, no mantissa), so multiplying by it rounds nothing inside the range. Give *every* format such blocks and such a scale,
# int8 as well, on the numbers with the outlier of 1000, and look at the blocks that are without it:


# %%
def in_blocks(w, mx):
    blocks = [mx.decode(*mx.encode(block.tolist())) for block in w.split(mx.block_size)]
    return torch.tensor([value for block in blocks for value in block])


def int8_block(block):
    unit = 2 ** (block.abs().max() / floats.INT8.max).log2().ceil()
    return (block / unit).round() * unit


int8 = torch.cat([int8_block(block) for block in spiked.split(32)])
block_formats = floats.MXFP8, floats.MXFP6, floats.MXFP4
blocked = {"int8": int8} | {mx.name: in_blocks(spiked, mx) for mx in block_formats}
{name: error(w[32:], rounded[32:]) for name, rounded in blocked.items()}

# %% [markdown]
# One outlier now ruins one block at most: on normally distributed numbers int8 in blocks is again the best of 8 bits, and MXFP4, at half the bits, has about fourteen times its error. In the ruined block:

# %%
{name: error(w[1:32], rounded[1:32]) for name, rounded in blocked.items()}

# %% [markdown]
# Only MXFP8 has enough exponents for this outlier *and* its neighbors.
#
# **NVFP4** is NVIDIA's answer at 4 bits. It changes three things in MXFP4. Blocks have 16 numbers. The scale is an e4m3 number, so that a block's largest value lands near 6 rather than anywhere between 4 and 8.
# And since e4m3 spans less than e8m0, the whole tensor gets one more scale, in fp32. Which of the three makes the error smaller? Change the first two, each alone and both, on the normal numbers and on numbers with heavy tails (Student's t with 3 degrees of freedom):

# %%
others = torch.randn(3, 8192, generator=g)
tailed = w / others.square().mean(0).sqrt()


def in_fp4(w, mx):
    """Rounded in blocks; with the scale of the whole tensor, where blocks' are e4m3."""
    unit = w.abs().max() / (E2M1.max * E4M3.max) if mx.scale is E4M3 else 1
    return in_blocks(w / unit, mx) * unit


for scale in (floats.E8M0, E4M3):
    for size in (32, 16):
        mx = floats.BlockFormat("fp4", E2M1, size, scale)
        normal, heavy = (error(x, in_fp4(x, mx)) for x in (w, tailed))
        told = f"{scale.name} for {size} numbers, {mx.bits_per_value:g} bits per value"
        print(f"{told}: {normal:>5} of normal, {heavy} of heavy-tailed numbers")

# %% [markdown]
# The scale's mantissa makes the error smaller with either block. The smaller block does it with the e4m3 scale; with a power of two it helps the heavy-tailed numbers a little and the normal ones not at all.
# (The standard's power cuts what lands between 6 and 8 to 6. Rounded up, it cuts nothing, and the smaller block helps both.) NVFP4 needs both changes, and its blocks confine an outlier to 15 neighbors instead of 31.
#
# The third change, the scale of the whole tensor, makes no number more exact. It brings small tensors into the range of e4m3. NVFP4 without it, on the normal numbers and on a thousandth of them:

# %%
{x: error(w * x, in_blocks(w * x, floats.NVFP4)) for x in (1, 0.001)}

# %% [markdown]
# ## In practice
#
# The flags for 16 bits stand in lab 02. For fewer, and for sums:
#
# - **PyTorch.** `torch.float8_e4m3fn` and `torch.float8_e5m2` are for storage and scaled products, there is no arithmetic on them.
#   `torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction` is True by default, and so is bf16's: a GPU may then add parts of a product in 16 bits.
# - **FSDP2.** In `MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)` the second says where gradients are added; left out, it is the first.
# - **torchtitan 0.2.2.** fp8 is a conversion of the model's linear layers, with tensorwise, rowwise or MXFP8 scales.
# - **Megatron-LM.** `--fp8-format e4m3` or `hybrid`, with `--fp8-recipe delayed`, `tensorwise`, `blockwise` or `mxfp8`.
# - **DeepSpeed.** `"data_types": {"grad_accum_dtype": "fp32"}` for the sum of gradients.
# - **Transformer Engine.** Recipes: `DelayedScaling` with `Format.HYBRID` (e4m3 forward, e5m2 backward), `MXFP8BlockScaling` (e4m3 both ways),
#   `NVFP4BlockScaling` (e2m1, blocks of 16).
#
# Where sums are kept is a question for the hardware, too: DeepSeek-V3 (section 3.3.2) found that fp8 products on Hopper kept about 14 bits while adding, and moves the partial sums to
# fp32 registers every 128 terms.

# %% [markdown]
# ## Errata
#
# Unless another source is named, the statements stand in chapter 15, *LLM Training Acceleration (WIP)*, of an online book on large language models, in its part on float types.
#
# ### Wrong
#
# **10k · 10k: "And thus you’d end up with NaN (Not a Number) result"** in fp16. It becomes infinity; NaN takes a second step. <!-- erratum: S0-075 -->

# %%
f"10k · 10k is {FP16.round(10_000 * 10_000)}; inf − inf is {math.inf - math.inf}"

# %% [markdown]
# ### True under a condition
#
# **"the largest number possible is 64k"** in fp16. True as a round number: it is 65 504, 32 less than 64 · 1024, and what is below 65 520 still rounds down to it. <!-- erratum: S0-074 -->

# %%
f"{64 * 1024 - FP16.max:g} less than 64 · 1024"

# %% [markdown]
# **fp32: "it is two times slower than FP16/BF16".** True of memory traffic, 4 bytes against 2, and of tf32. In matrix products an A100 does 312 TFLOP/s in 16 bits, 156 in <!-- erratum: S0-085 -->
# tf32 and 19.5 in fp32 outside the tensor cores: a factor of 2 or of 16, depending on which fp32 is meant.

# %%
f"16 bits are {312 / 156:g} times as fast as tf32 and {312 / 19.5:g} times as fp32"

# %% [markdown]
# ## Summary
#
# - Exponent bits buy range, mantissa bits buy precision. The relative error of rounding is at most $2^{-M-1}$: 0.05 % in fp16,
#   0.4 % in bf16, 6.25 % in e4m3.
#   <!-- claim: [fmt.eps / 2 for fmt in (floats.FP16, floats.BF16, floats.E4M3)] == [2**-11, 2**-8, 0.0625] -->
# - fp16 ends at 65 504 and loses what is below $2^{-25}$; bf16's normal numbers span what fp32's span, with 3 bits less precision than fp16.
#   <!-- claim: (floats.FP16.max, floats.FP16.round(2**-25), floats.FP16.mantissa_bits - floats.BF16.mantissa_bits, floats.BF16.min_normal == floats.FP32.min_normal, floats.BF16.max_exponent == floats.FP32.max_exponent) == (65504, 0, 3, True, True) -->
# - e4m3 ends at 448 and has no infinity. What happens beyond is a convention of the library: 448 in torch from version 2.12 on, NaN in ml_dtypes.
#   <!-- claim: (floats.E4M3.max, floats.E4M3.round(1e6, overflow="saturate"), math.isnan(floats.E4M3.round(1e6))) == (448, 448, True) -->
# - 10 000 × 10 000 is infinity in fp16. NaN is what the next operation makes of it.
#   <!-- claim: floats.FP16.round(10_000 * 10_000) == math.inf -->
# - A running sum of ones stops at $2^{M+1}$: 2048 in fp16, 256 in bf16. PyTorch's own `sum()` adds in fp32; the gradient of a bf16 embedding on a CPU does not.
#   Where a sum has to stay in 16 bits: a tree, compensation, or stochastic rounding.
#   <!-- claim: [precision.running_sum(torch.ones(4096), name)[-1].item() for name in ("fp16", "bf16")] == [2048, 256] -->
# - Round once. Two roundings in a row, fp32 and then fp16, are wrong for one random number in 16 384, which few tests contain.
#   <!-- claim: floats.FP16.round(1 + 2**-11 + 2**-40) != floats.FP16.round(floats.FP32.round(1 + 2**-11 + 2**-40)) -->
# - On normally distributed numbers int8 has a smaller error than e4m3 while the largest is less than about 12 times the typical one. An e4m3 number keeps its digits down to 1/28 672 of the largest, and is zero below 1/458 752.
#   <!-- claim: (floats.E4M3.max / floats.E4M3.min_normal, 2 * floats.E4M3.max / floats.E4M3.min_subnormal) == (28672, 458752) -->
# - A scale that 32 values share confines an outlier to its block, whatever the format. It costs a quarter of a bit: 8.25, 6.25 and 4.25 bits per value; NVFP4 takes 4.5, and gains by the mantissa of its scale and by its smaller blocks.
#   <!-- claim: [mx.bits_per_value for mx in (floats.MXFP8, floats.MXFP6, floats.MXFP4, floats.NVFP4)] == [8.25, 6.25, 4.25, 4.5] -->
#
# Next: lab 02 trains with these formats, and takes away one safeguard at a time.

# %% [markdown]
# ## References
#
# - D. Goldberg, *What every computer scientist should know about floating-point arithmetic*, ACM Computing Surveys 23 (1991).
# - N. J. Higham, *The accuracy of floating point summation*, SIAM Journal on Scientific Computing 14 (1993): running against pairwise sums.
# - IEEE 754-2019: fp16, fp32, fp64, rounding, overflow after rounding.
# - P. Micikevicius et al., *Mixed precision training*, arXiv:1710.03740 (2018); *FP8 formats for deep learning*, arXiv:2209.05433 (2022).
# - Open Compute Project, *OFP8*, revision 1.0 (2023), and *Microscaling formats (MX)*, version 1.0 (2023); B. D. Rouhani et al., arXiv:2310.10537.
# - NVIDIA, *Pretraining large language models with NVFP4*, arXiv:2509.25149 (2025).
# - W. Kahan, *Further remarks on reducing truncation errors*, Communications of the ACM 8 (1965); P. Zamirai et al., *Revisiting BFloat16 training*,
#   arXiv:2010.06192 (2020).
# - PyTorch [#178817](https://github.com/pytorch/pytorch/pull/178817) (merged in April 2026): the cast to `float8_e4m3fn` saturates.
# - DeepSeek-AI, *DeepSeek-V3 technical report*, arXiv:2412.19437 (2024), section 3.3: fp8 in a large run, and where it accumulates.
# - NVIDIA, Transformer Engine user guide (recipes); PyTorch documentation of `MixedPrecisionPolicy` and `set_float32_matmul_precision`; argument lists
#   of Megatron-LM, torchtitan (0.2.2) and DeepSpeed, to mid-2026.
