# %% [markdown]
# # 15b · Train with products in 8 bits
#
# **The linear layers of a training step multiply numbers of 8 bits. What goes wrong, what prevents it, and which bytes does it save?**
#
# *90 min, and 60 further · before this: labs 01, 02 and 03 · needs a laptop, no GPU and no network*

# %% [markdown]
# ## Goals
#
# After this lab you
#
# - put a tensor into 8 bits by a scale, and know what is clipped and what is lost (exercise 15.4),
# - form the three products of a layer in 8 bits, with a scale for each tile (exercise 15.5),
# - repair a scale that comes from earlier steps (exercise 15.6, a bug hunt).

# %% [markdown]
# ## Setup

# %%
import copy
import functools
import itertools
from dataclasses import replace

import torch

from labutils import anatomy, floats, measure, precision, quantization, units, zero
from labutils.config import Hardware, Mesh, ModelConfig
from labutils.model import GPT
from labutils.quantization import F8_E4M3, F8_E5M2, RECIPES, SCHEMES, Scheme
from labutils.teach import plots, rigs
from labutils.teach.check import check, hint, predict, reveal, show
from labutils.teach.widgets import explore
from labutils.world import World

# %% [markdown]
# ## The idea in one picture
#
# A linear layer forms three products in a training step. Forward it multiplies its inputs by its weights. Backward it multiplies the gradients of its outputs, once by the weights and once by the inputs. Here are these gradients by exponent, in a small GPT that has read some of Python's documentation, above the ranges of the two 8-bit formats:

# %%
model = rigs.fp8.reader()
batch = next(rigs.fp8.excerpts(seed=5))
found = rigs.fp8.operands(model, batch)
counts = {name: precision.exponents(tensors) for name, tensors in found.items()}
lost = precision.fate(counts["grad"], "e5m2")["zero"]
title = f"As they are, e5m2 rounds {lost:.0%} of these gradients to zero"
plots.exponent_histogram(counts["grad"], [floats.E5M2, floats.E4M3], title=title)

# %% [markdown]
# FP8 training is **8-bit operands for every product of the linear layers, a scale that moves each tensor into the format's range, sums in more bits, and everything else as it was.**

# %% [markdown]
# ## Why two formats?
#
# e4m3 has four exponent and three mantissa bits, e5m2 five and two (lab 01). So e4m3 spends a bit on precision, and e5m2 on range. What becomes of inputs, weights and gradients without a scale?

# %%
for name, exponents in counts.items():
    for fmt in ("e4m3", "e5m2"):
        fate = precision.fate(exponents, fmt)
        zero_share, coarse = fate["zero"], fate["subnormal"]
        print(f"{name:7}{fmt}: {zero_share:4.0%} zero, {coarse:4.0%} coarse")

# %% [markdown]
# *Coarse* numbers are subnormal: they have fewer digits. Inputs fit both formats. In e4m3 half of the weights are coarse, which a scale will mend. Of the gradients e4m3 rounds 98 % to zero, and e5m2 half as many. So the usual choice is e4m3 for inputs and weights, and e5m2 for gradients.
#
# A **scale** is a factor that moves a tensor into range. Multiply by it and round; multiply the *result* of the product by its inverse. The scale brings the largest |x|, the *amax*, to the format's largest number: 448 for e4m3, 57,344 for e5m2.
#
# ### Exercise 15.4 · Put a tensor into 8 bits (10 min, ●○○)
#
# amax is given. It may be larger or smaller than the largest |x|. If all of x is zero, amax is 0, and x stays zero.


# %%
def in_eight_bits(x: torch.Tensor, amax: float, dtype: torch.dtype):
    """Codes of x in dtype, and the factor that brings them back.

    amax becomes the format's largest number; what is beyond becomes ±amax.
    """
    raise NotImplementedError


# %%
check("fp8/cast", in_eight_bits)

# %%
hint("fp8/cast", 1)

# %%
show(quantization.cast)

# %% [markdown]
# ## How wrong does the gradient become?
#
# Weights and batch are fixed. One backward pass runs in fp64, another with 8-bit operands in all layers of the blocks. The *error* is the distance between the two gradients, relative to that of fp64. Five schemes:
#
# | scheme | forward, backward | scale |
# |---|---|---|
# | unscaled | e4m3, e5m2 | none |
# | current | e4m3, e5m2 | one per tensor, from its amax now |
# | delayed | e4m3, e5m2 | one per tensor, from the amax of earlier steps |
# | tiles | e4m3, e4m3 | one for each 128 numbers of a row; for weights one for 128 × 128 |
# | int8 | int8, int8 | one per tensor, from its amax now |
#
# > Which of the five has the smallest error?

# %%
predict("schemes/best", scheme="tiles")


# %%
def error(name, **options):
    """Of the scheme's gradient; delayed scales get passes to fill their history."""
    options["steps"] = 6 if name == "delayed" else 1
    return rigs.fp8.gradient_error(model, SCHEMES[name], batch, **options)[-1]


errors = {name: error(name) for name in SCHEMES}
print({name: f"{each:.1%}" for name, each in errors.items()})

# %%
show(rigs.fp8.gradient_error)

# %%
said = "int", "int-8", "integers", "8-bit integers", "8 bit integers"
reveal("schemes/best", *said, scheme=min(errors, key=errors.get))

# %% [markdown]
# int8 wins, here and on 14 of 16 other batches, with one scale against e4m3's tiles. Outliers will change that.
#   <!-- claim: (lambda model: sum(int(rigs.fp8.gradient_error(model, quantization.SCHEMES["int8"], b)[0] < rigs.fp8.gradient_error(model, quantization.SCHEMES["tiles"], b)[0]) for b in [next(rigs.fp8.excerpts(seed=s)) for s in range(100, 116)]))(rigs.fp8.reader()) == 14 -->
#
# The unscaled gradient is off by only 7 %, although e5m2 rounds nearly half of the gradients of outputs to zero. Why? The error takes the gradients of all twelve matrices as *one* vector, and the large ones decide it. These five matrices are worst without a scale:

# %%
of_each = {
    name: rigs.fp8.matrix_errors(model, SCHEMES[name], batch)
    for name in ("unscaled", "current", "tiles", "int8")
}
worst = sorted(of_each["unscaled"], key=of_each["unscaled"].get)[-5:]
print(f"{'':27}", *(f"{name:>9}" for name in of_each))
for path in reversed(worst):
    print(f"{path:27}", *(f"{errors[path]:9.0%}" for errors in of_each.values()))

# %% [markdown]
# Without a scale three of twelve matrices are off by two fifths to a half: those with the smallest gradients. Does that matter? Adam divides the mean of each number's gradients by the root of their mean square. So small gradients move a weight as far as large ones. Here is Adam's step after ten batches at these weights:

# %%
def adams_step(scheme=None):
    """For all matrices of the blocks, in learning rates."""
    twin, batches = copy.deepcopy(model).double(), rigs.fp8.excerpts(7)
    twin = quantization.use_fp8(twin, scheme) if scheme else twin
    mean = square = 0
    for _ in range(10):
        each = rigs.fp8.matrix_gradients(twin, next(batches))
        g = torch.cat([of.flatten() for of in each])
        mean, square = 0.9 * mean + 0.1 * g, 0.95 * square + 0.05 * g**2
    return mean / (square.sqrt() + 1e-12)


right = adams_step()
mixed = Scheme(torch.int8, F8_E4M3)  # gradients of outputs are floats
for name, scheme in {**SCHEMES, "int8, e4m3": mixed}.items():
    if name != "delayed":
        off = (adams_step(scheme) - right).norm() / right.norm()
        print(f"{name:10} step off by {off:.1%}")

# %% [markdown]
# **Without a scale the gradient is off by 7 % and Adam's step by a third; with one, both are off by 2 to 5 %.** So one number for the whole gradient hides what goes wrong.
#
# In Adam's step int8's lead over tiles is gone. With gradients of outputs in e4m3, and one scale still, it is back: 2.1 %. So in int8 one scale is too coarse for small gradients.
#
# Does "current" lose its 5 % by too few mantissa bits, or by too small a range? Trade one for the other, with one scale and with tiles. Formats are those of the forward and the backward pass:

# %%
I8 = torch.int8
formats = {"e5m2 e5m2": (F8_E5M2, F8_E5M2), "e4m3 e5m2": (F8_E4M3, F8_E5M2)}
formats |= {"e4m3 e4m3": (F8_E4M3, F8_E4M3), "int8 e4m3": (I8, F8_E4M3)}
formats["int8 int8"] = I8, I8
for name, each in formats.items():
    ways = (Scheme(*each, scaling) for scaling in ("current", "tiles"))
    off = (rigs.fp8.gradient_error(model, scheme, batch)[0] for scheme in ways)
    print("{}: {:.1%} with one scale, {:.1%} with tiles".format(name, *off))

# %% [markdown]
# By the mantissa: e4m3 is the better format for these gradients, too (3.7 %). That is most of what tiles gain above, since they use it for gradients, as DeepSeek-V3 does.
#
# **Where numbers are of similar size, 255 equal steps are finer than an exponent.** That holds for inputs and weights. Under one scale it does not hold for most gradients of outputs: int8 is better there in 2 of 8 other batches. In a tile it holds for them, too: int8 in tiles is off by 1.1 %.
#   <!-- claim: (lambda model, of: sum(int(rigs.fp8.gradient_error(model, of(torch.int8, torch.int8), b)[0] < rigs.fp8.gradient_error(model, of(torch.int8, quantization.F8_E4M3), b)[0]) for b in [next(rigs.fp8.excerpts(seed=s)) for s in range(100, 108)]))(rigs.fp8.reader(), quantization.Scheme) == 2 -->
#
# **A tile** is a group of numbers that share one scale. Their products are added up before the scale is applied, so a tile must lie *along the dim that is added up*. DeepSeek-V3's tiles are 128 long. Each product adds up over another dim:
#
# | product | adds up over |
# |---|---|
# | y[t, n] = x[t, k] · w[n, k]ᵀ | inputs k |
# | gradient of x[t, k] | outputs n |
# | gradient of w[n, k] | tokens t |
#
# ### Exercise 15.5 · Three products by tiles (12 min, ●●○)
#
# `quantization.to_eight(matrix, F8_E4M3, tile)` puts a matrix into 8 bits, with `tile` as (rows, columns). `.mT` transposes the result, codes and scales. `quantization.product(a, b)` is a·bᵀ, and refuses a scale that changes inside a sum.


# %%
def three_products(x, w, grad):
    """y[t, n], and the gradients of x[t, k] and w[n, k], of y = x·wᵀ."""
    raise NotImplementedError


# %%
check("fp8/products", three_products)

# %%
hint("fp8/products", 1)

# %%
show(quantization.Fp8Products)

# %% [markdown]
# **Is this what the hardware computes?** PyTorch has an 8-bit product of its own, `torch._scaled_mm`, for CPUs, and GPUs since the H100's generation. Compare, with one scale per tensor:

# %%
fp8_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
device = "cuda" if fp8_gpu else "cpu"
draw = torch.Generator().manual_seed(0)
a, b = (
    quantization.to_eight(torch.randn(size, 512, generator=draw).to(device), F8_E4M3)
    for size in (64, 256)
)
scales = dict(scale_a=a.inverse[0, 0], scale_b=b.inverse[0, 0])
theirs = torch._scaled_mm(a.codes, b.codes.mT, **scales, out_dtype=torch.float32)
ours = quantization.product(a, b)
largest = (theirs - ours).abs().max() / ours.abs().max()
close = largest < (1e-3 if fp8_gpu else 1e-5)
print("equal but for the rounding of sums:", close.item())

# %% [markdown]
# On a CPU, yes. On an H800 (an H100 with slower links) the matrix unit adds with about 14 bits (DeepSeek-V3, section 3.3.2). So its authors move partial sums to fp32 every 128 products, and apply the scales of tiles there. What would 14 bits cost without these moves? The emulation cuts a sum after every 32 products, which is a guess.
#
# > Two random matrices are multiplied, with sums of 4,096 products. How large is the error, in percent of the product's norm?

# %%
predict("sum/error", percent=0.01)


# %%
def summed(a, b, promoted=None, cut=torch.trunc, every=32, bits=14):
    """a·bᵀ, sums cut to so many bits; every `promoted` products they move to fp64."""
    total = part = torch.zeros(len(a), len(b), dtype=torch.float64)
    for k in range(0, a.shape[1], every):
        part = part + a[:, k : k + every] @ b[:, k : k + every].mT
        mantissa, exponent = torch.frexp(part)
        part = torch.ldexp(cut(mantissa * 2.0**bits), exponent - bits)
        if promoted and (k + every) % promoted == 0:
            total, part = total + part, torch.zeros_like(part)
    return total + part


def sum_error(k, *how):
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(32, k, generator=draw) for _ in "ab")
    a, b = (quantization.to_eight(x, F8_E4M3).codes.double() for x in drawn)
    exact = a @ b.mT
    off = (summed(a, b, *how) - exact).norm() / exact.norm()
    return 100 * off.item()


# %%
lengths = [128 * 2**i for i in range(8)]
off = {
    "14 bits": [sum_error(k) for k in lengths],
    "rounded to 14": [sum_error(k, None, torch.round) for k in lengths],
    "moved every 128": [sum_error(k, 128) for k in lengths],
}
reveal("sum/error", percent=round(off["14 bits"][lengths.index(4096)], 2))

# %%
plots.curves(
    lengths, xlabel="products in a sum", ylabel="error of the product (%)",
    title="In 14 bits the error grows with the sum, unless it moves to fp32 every 128",
    log="xy", **off,
)  # fmt: skip

# %% [markdown]
# **Errors of cut-off sums add up, since all of them point towards zero.** Rounded to the same 14 bits, sums err both ways, and errors mostly cancel. How large they are hangs on how often the unit cuts (4,096 products):

# %%
for every in (1, 8, 32):
    alone, moved = (sum_error(4096, to, torch.trunc, every) for to in (None, 128))
    print(f"cut after {every:2}: {alone:.1f} %, moved every 128: {moved:.2f} %")

# %% [markdown]
# Is that much? Rounding the operands to e4m3 costs 4 %, but that error does not grow with the sum. The rest of this lab sums in fp32 or fp64.
#   <!-- claim: (lambda a, b: round(100 * ((quantization.product(*(quantization.to_eight(each, quantization.F8_E4M3) for each in (a, b))) - a @ b.mT).norm() / (a @ b.mT).norm()).item()))(*torch.randn(2, 32, 4096, generator=torch.Generator().manual_seed(0))) == 4 -->

# %% [markdown]
# ## When does it fail without a scale?
#
# It fails where gradients are smaller than here. The mean loss divides each gradient by the number of tokens, here 256. A device that accumulates a million tokens in such micro-batches multiplies each loss by its share, $2^{-12}$ (lab 05). If 64 data-parallel ranks share these tokens, the share is $2^{-6}$: each divides by its own only, as the mean over ranks comes after the backward pass.
#
# > The loss is multiplied by $2^{-12}$. How many percent of the fp32 run's gain in loss does the unscaled run keep? (Thirty steps, three seeds. Gradients are divided by $2^{-12}$ before clipping and AdamW. Everything but 8-bit operands is in fp64.)

# %%
predict("unscaled/gain", percent=100)

# %%
shares = {"1": 1.0, "2⁻⁴": 2.0**-4, "2⁻⁸": 2.0**-8, "2⁻¹²": 2.0**-12}
rigs.fp8.print_errors(
    {
        name: {said: error(name, share=share) for said, share in shares.items()}
        for name in ("unscaled", "current", "tiles")
    }
)


# %%
def losses(scheme=None, **more):
    how = dict(steps=30, in_fp64=True, **more)
    return [rigs.fp8.train_reader(seed, scheme, **how)[1] for seed in range(3)]


runs = {
    "fp32": losses(),
    "unscaled": losses(SCHEMES["unscaled"], share=2.0**-12),
    "delayed": losses(SCHEMES["delayed"], share=2.0**-12),
}
title = "Without a scale the blocks learn nothing at a large batch's loss scale"
alt = f"{title}. Three seeds each; delayed scaling learns as fp32 does."
plots.curves(
    range(10, 40, 10), xlabel="steps", ylabel="test loss (nats per character)",
    title=title, alt=alt, **runs,
)  # fmt: skip

# %%
untrained, _ = rigs.fp8.train_reader(0, steps=0, in_fp64=True)
start = rigs.fp8.loss_of(untrained, next(rigs.fp8.excerpts(99, 64))).item()
gain = {name: sum(start - run[-1] for run in three) for name, three in runs.items()}
reveal("unscaled/gain", percent=round(100 * gain["unscaled"] / gain["fp32"], -1))

# %% [markdown]
# An error of 100 % is a gradient of zero: at $2^{-12}$ the blocks get none. The unscaled run still keeps 90 % of the gain, since the last norm and the embeddings, which are the head as well, learn. With a scale the blocks learn again, and the error is the same at every share.
#
# The cause is range. What is below $2^{-17}$, half of e5m2's smallest number, becomes zero:

# %%
for said, share in shares.items():
    gone = precision.fate(counts["grad"], "e5m2", share)["zero"]
    print(f"loss times {said:4}: {gone:.0%} of the gradients of outputs become zero")

# %% [markdown]
# **Do 8 bits train as well?** Now the share is 1. First a control: what could this experiment see? Without any gradient for the blocks (unscaled at $2^{-12}$) the loss ends only a little higher. That difference is all that the blocks contribute, so a scheme's gap is judged as a part of it:

# %%
ends = {"no gradient for the blocks": runs["unscaled"]}
ends |= {name: losses(SCHEMES[name]) for name in ("current", "tiles", "int8")}
gaps = {
    name: [run[-1] - right[-1] for run, right in zip(three, runs["fp32"], strict=True)]
    for name, three in ends.items()
}
contributed = sum(gaps["no gradient for the blocks"])
for name, three in gaps.items():
    mean = sum(three) / contributed
    print(f"{name:27} loses less than a third of it in the mean:", mean < 1 / 3)
apart = max(max(three) - min(three) for name, three in gaps.items() if name in SCHEMES)
more = apart > contributed / 9
print("but seeds of one scheme are farther apart than a third:", more)

# %% [markdown]
# In the mean of three seeds each scheme keeps more than two thirds of what the blocks contribute. This experiment cannot say which scheme is best: seeds of one scheme differ by more than a third of that. DeepSeek-V3 reports a relative gap below 0.25 % of the loss over about a trillion tokens.

# %% [markdown]
# ### Further: would one loss scale do?
#
# Lab 02's remedy was one loss scale for all tensors. Here it would do as well: anything from 256 to 65,536. But somebody has to choose it, and to adjust it while gradients shrink. The error of the worst matrix must decide, not that of the whole gradient:

# %%
for share in (4, 256, 65536, 2**28):
    of_all = error("unscaled", share=share)
    each = rigs.fp8.matrix_errors(model, SCHEMES["unscaled"], batch, share=share)
    worst = max(each.values())
    print(f"loss times {share:11,}: {of_all:.1%}, worst matrix {worst:.0%}")

# %% [markdown]
# ## Further: what does a delayed scale cost?
#
# For the current amax a GPU reads the whole tensor before it can cast. **Delayed scaling** saves that pass: its scale comes from the largest amax of earlier steps, and this step's amax is noted on the way. The first step has no history, so its scale is 1.
#
# How long does it take to find its scales? Here is the error in seven backward passes at the same weights, for the loss as it is and for the loss times $2^{-12}$. The last row has the largest gradient of an output in each pass, over what its scale can reach:

# %%
for said in ("1", "2⁻¹²"):
    how = dict(share=shares[said], steps=7)
    delayed = rigs.fp8.gradient_error(model, SCHEMES["delayed"], batch, **how)
    print(f"loss times {said:4}:", *(f"{each:.0%}" for each in delayed))

# %%
twin = quantization.use_fp8(copy.deepcopy(model).double(), SCHEMES["delayed"])
layers = quantization.fp8_layers(twin).values()
print("largest over reach:", end="")
for _ in range(7):
    rigs.fp8.matrix_gradients(twin, batch, share=shares["2⁻¹²"])
    times = max(each.seen[2] * each.scale[2] for each in layers) / floats.E5M2.max
    print(f" {times:.2g}", end="")
    quantization.advance_scales(twin)

# %% [markdown]
# With the small loss it takes four passes, two for each of two reasons. At first every scale is 1, so layers hand on zeros, and a layer that gets zeros has nothing to put into its history. The second pass reaches all layers, but through zeros: most gradients that come into their histories are too small. So in passes 3 and 4 gradients are up to 30 and 9 times too large for their scales, and are clipped.
#
# After that, delayed scaling is as good as current scaling until a tensor outgrows its history. What exceeds the history is clipped in that step.
#
# ### Exercise 15.6 · Bug hunt: the scale of the last steps (10 min, ●●●)
#
# A step casts a tensor once, or several times with micro-batches, and then calls `advance()`. The scale has to bring the largest |x| of the last `length` steps to the format's largest number, where x is the tensor before the cast. While all of these were zeros, any scale will do. The test passes, and yet four things are wrong.


# %%
class Delayed:
    def __init__(self, dtype, length):
        self.dtype, self.length = dtype, length
        self.history, self.seen, self.scale = [], 0.0, 1.0

    def cast(self, x):
        codes = quantization.cast(x * self.scale, self.dtype)
        self.seen = codes.float().abs().max().item() / self.scale
        return codes, 1 / self.scale

    def advance(self):
        self.history = [*self.history, self.seen][: self.length]
        self.scale = quantization.largest(self.dtype) / max(self.history)


# %%
def its_test():
    scale, x = Delayed(F8_E4M3, 16), torch.tensor([8.0, -2.0])
    for _ in range(3):
        codes, inverse = scale.cast(x)
        scale.advance()
    return torch.allclose(codes.float() * inverse, x)


its_test()

# %%
check("fp8/bug-hunt", Delayed)

# %%
hint("fp8/bug-hunt", 1)

# %% [markdown]
# In the library `advance_scales(model)` ends a step. So a checkpointed layer, which computes twice in a step, uses the same scale both times. With a `comm`, all ranks take the largest amax of any rank:

# %%
show(quantization.advance_scales)

# %% [markdown]
# ## What does an outlier do?
#
# In large language models some channels of activations are up to a hundred times as large as the others (SmoothQuant). Plant such an *outlier*: multiply the first input channel of every layer by k, and divide its weights by k. In exact arithmetic nothing changes. The GPT above is 128 wide, so every tile would contain the outlier. Take one of width 512 (one layer, untrained): there it is in one of four tiles in a row.
#
# > At an outlier of 100, int8 with one scale is off by 69 %. How many percent is int8 with a scale per tile?

# %%
predict("tiles/int8", percent=70)

# %%
ks = [1, 10, 100, 1e3, 1e4, 1e5, 1e6]
schemes = {
    "int8": Scheme(I8, I8), "int8, tiles": Scheme(I8, I8, "tiles"),
    "e4m3": Scheme(F8_E4M3, F8_E4M3), "e4m3, tiles": SCHEMES["tiles"],
}  # fmt: skip
wide = GPT(rigs.fp8.WIDE_READER, attention="sdpa").double()
wide.initialize(torch.Generator().manual_seed(0))
outlier = {
    name: [rigs.fp8.gradient_error(wide, scheme, batch, k=k)[-1] for k in ks]
    for name, scheme in schemes.items()
}
reveal("tiles/int8", percent=round(100 * outlier["int8, tiles"][ks.index(100)]))

# %%
title = "int8 breaks at an outlier of 100, e4m3 at 100,000; tiles put both off tenfold"
plots.curves(
    ks, xlabel="outlier: times the other channels", ylabel="error of the gradient",
    title=title, log="xy", unit="%", **outlier,
)  # fmt: skip

# %%
table = {
    name: {f"{k:g}": each for k, each in zip(ks, row, strict=True)}
    for name, row in outlier.items()
}
rigs.fp8.print_errors(table)

# %% [markdown]
# **Integers lack range, and floats precision.** int8 has one step size for the tensor, and the outlier makes it large. From 1,000 on all other inputs and the outlier's weights round to zero, so every forward product is zero; what gradient is left points elsewhere (105 %). e4m3 gives each number an exponent. So it keeps all digits while the tensor's largest number is at most 448 / 2⁻⁶ = 28,672 times as large. Then it loses digit after digit, the last beyond 448 / 2⁻⁹ = 229,376 times.
#
# How much of that is the tile's doing? Its scale also is that of one token and not of all. So here are the three products of the layer `up` in int8, with one scale per tensor, one per row of inputs and gradients, and with tiles:


# %%
parts = rigs.fp8.operands(wide, batch)  # gradients, from the last layer to the first
parts = parts["x"][4], parts["weight"][4], parts["grad"][1]
x, w, grad = (each.flatten(0, -2) for each in parts)
right = {"y": x @ w.mT, "gradient of x": grad @ w, "gradient of w": grad.mT @ x}


def in_int8(x, w, grad, along, square):
    def put(each):
        return quantization.to_eight(each, I8, along)

    w = quantization.to_eight(w, I8, square)
    pairs = (put(x), w), (put(grad), w.mT), (put(grad.mT), put(x.mT))
    return [quantization.product(*pair) for pair in pairs]


kinds = {"one scale": (None, None), "rows": ((1, 2048), None)}
kinds["tiles"] = (1, 128), (128, 128)
for (kind, tiles), k in itertools.product(kinds.items(), (1, 100)):
    large = torch.ones(512)
    large[0] = k
    y, of_x, of_w = in_int8(x * large, w / large, grad, *tiles)
    got = zip(right.items(), (y, of_x * large, of_w / large), strict=True)
    off = (f"{what} {(z - true).norm() / true.norm():6.1%}" for (what, true), z in got)
    print(f"{kind:9} outlier {k:3}: ", *off)

# %% [markdown]
# **Most of it is a scale for each row.** At the outlier of 100 it takes the error of the forward product from 83 to 32 %, since with one scale the row of the largest outlier sets the step for all. A tile halves that, to 17 %: the outlier spoils one tile in four, and errors add up as squares.
#
# In the gradient of w rows and tiles lie along tokens, so the large channel has scales of its own. In the gradient of x only the large channel is lost. Its weights are a hundred times as small as the others that share their scale.
#
# ### Further: does it show in training?
#
# Recorded are 60 steps of the wide GPT at a rate of 5e-4, three seeds (`python tools/fp8_sweep.py outlier`). The control again: how much higher does the loss end without gradients for the blocks? What a scheme loses is in percent of that, seed by seed:

# %%
ends = rigs.fp8.sweep_record("outlier", "scheme", "k")
right = ends.pop(("fp32", "1"))
none = ends.pop(("no gradient for the blocks", "1"))
gained = [a - b for a, b in zip(none, right, strict=True)]
print("what the blocks contribute:", *(f"{each:.2f}" for each in gained))
for (name, k), three in ends.items():
    lost = [(c - b) / g for b, c, g in zip(right, three, gained, strict=True)]
    print(f"{name:16} outlier {k:6}", *(f"{each:6.1%}" for each in lost))

# %% [markdown]
# Without an outlier int8 loses nothing that shows. At 100, int8 with one scale loses 10 to 13 % of what the blocks contribute, and with tiles 1 to 2 %. At 100,000, e4m3 with one scale ends up to 9 % higher or lower, and with tiles within 1 %.

# %% [markdown]
# ## Further: what if the matrix unit applies the scales?
#
# Blackwell's matrix unit applies scales while it adds, so fewer numbers may share a scale than in a tile. Such a group is a *block* (lab 01):
#
# | format | numbers | in a block | scale of a block |
# |---|---|---|---|
# | *MXFP8* | e4m3 | 32 | a power of two |
# | *MXFP4* | e2m1 | 32 | a power of two |
# | *NVFP4* | e2m1 | 16 | in e4m3 |
#
# Blocks lie along the sum, as tiles do. Gradients have the same format as inputs and weights.
#
# Are shorter blocks more precise? `quantization.use_blocks` emulates them. Here is the error of the small GPT's gradient:

# %%
finer = floats.BlockFormat("mxfp8 with a scale in e4m3", floats.E4M3, 32, floats.E4M3)
for fmt in (floats.MXFP8, finer, floats.MXFP4, floats.NVFP4):
    print(f"{fmt.name}: {rigs.fp8.block_error(model, fmt, batch):.1%}")

# %% [markdown]
# Not by themselves. MXFP8 is off by 4.9 %, and tiles, which are four times as long, by 3.5 %. The scale is to blame: with a scale in e4m3, and nothing else changed, the error is 3.7 %.
#
# A power of two can bring a block's largest number into a range, but not to one value. Which range should it be: 256 to 512, or 224 to 448? Compare both with an exact scale, which brings the largest number to 448. The columns are the errors of inputs, weights and gradients at the last layer `up`:

# %%
def off_by(x, scale):
    """The error of x, if this function of a block's largest number gives its scale."""
    each = scale(quantization.tile_amax(x, (1, 32)))
    back = quantization.to_eight(x, F8_E4M3, (1, 32), scale=each).numbers()
    return (back - x).norm() / x.norm()


ways = {
    "256 … 512": lambda amax: 2.0 ** (8 - amax.log2().floor()),
    "224 … 448": lambda amax: 2.0 ** (448 / amax).log2().floor(),
    "448": lambda amax: 448 / amax,
}
up = found["x"][10], found["weight"][10], found["grad"][1]
for to, way in ways.items():
    off = (f"{off_by(x.flatten(0, -2), way):.1%}" for x in up)
    print(f"the largest number to {to:9}:", *off)

won = []
for x in itertools.chain(*found.values()):
    standard, engine, exact = (off_by(x.flatten(0, -2), way) for way in ways.values())
    won += [(standard - engine) / (standard - exact)] if exact.isfinite() else []
print(f"won back, over all layers: {min(won):.0%} to {max(won):.0%}")

# %% [markdown]
# 256 to 512 is the standard's rule. It clips largest numbers above 448, by up to an eighth. 224 to 448 is Transformer Engine's rule, and clips nothing. It wins back 40 to 68 % of what the standard's rule loses against the exact scale, over inputs, weights and gradients of all layers. The rest is the price of a power of two.
#
# In four bits the error of the gradient is 15 to 19 %. NVIDIA's recipe for training in NVFP4 (2025) takes four measures:
#
# | what | against |
# |---|---|
# | stochastic rounding for gradients of outputs (lab 01); inputs and weights go to the nearest number | errors that point the same way in every step |
# | a random rotation along tokens before the product for the gradient of w | outliers: the rotation spreads them over a block (lab 15a) |
# | one scale for 16 × 16 weights | a weight that is rounded one way forward and another way backward |
# | about 15 % of the linear layers stay in bf16, most of them at the end | layers that four bits hurt most |
#
# The rotation is a random *Hadamard* matrix H, 16 × 16. The gradient of w is Gᵀx, with G the gradients of outputs. Both G and x are multiplied by H along tokens, which changes nothing in exact arithmetic: since HHᵀ = 1, GᵀHHᵀx = Gᵀx.
#
# As with 8 bits, embeddings, head, norms and attention's products stay in bf16 or fp32. Master weights, gradients of weights and moments stay in fp32.
#
# **Does stochastic rounding pay?** It makes *one* gradient worse, since it does not take the nearest number. But a run adds up thousands of gradients, and errors of random sign average out. Recorded (`python tools/fp8_sweep.py averaged`, three seeds) is the error of the mean gradient of 1, 4, 16 and 64 batches.
#
# > Only gradients of outputs are in NVFP4. Over how many batches must one average until stochastic rounding beats rounding to nearest?

# %%
predict("nvfp4/batches", batches=2)

# %%
batches, off = (1, 4, 16, 64), {}
for (name, _), three in rigs.fp8.sweep_record("averaged", "rounded", "batches").items():
    off.setdefault(name, []).append(sum(three) / len(three))
nearest, drawn = off["gradients, nearest"], off["gradients, stochastic"]
better = [b < a for a, b in zip(nearest, drawn, strict=True)].index(True)
alone = {name: off.pop(name) for name in list(off)[-5:]}  # one thing each
reveal("nvfp4/batches", batches=batches[better])

# %%
plots.curves(
    batches, xlabel="batches in the mean", ylabel="error of the mean gradient",
    title="Nearest keeps an error of its own, and rounding x and W costs far more",
    log="xy", unit="%", **off,
)  # fmt: skip

# %%
for name, row in (off | alone).items():
    print(f"{name:32}", *(f"{each:6.1%}" for each in row))

# %% [markdown]
# **Here it pays late, and little.** Over 16 batches rounding to nearest is still ahead: its errors change from batch to batch, so most of them average out, too. A part of them does not. Over 64 batches stochastic rounding is ahead in every seed, with 2.1 against 2.2 % in the mean.
#
# Why does it gain no more? Random errors halve with four times the batches, and these fall from 3.3 to 2.1 %. So a part always points the same way. One suspect is the scale of a block, rounded to e4m3: where it is rounded down, the block's largest number is beyond 6 and is clipped. Recorded (`python tools/fp8_sweep.py longer`) is the same with scales that are rounded up, and with exact ones:

# %%
record = rigs.fp8.sweep_record("longer", "rounded", "batches")
for name in dict.fromkeys(name for name, _ in record):
    over = (100 * sum(record[name, n]) / 3 for n in ("64", "256"))
    print("{:30} {:.1f} % over 64 batches, {:.1f} % over 256".format(name, *over))

# %% [markdown]
# **Stochastic rounding averages out what it rounds, and not what a scale clips.** Without clipping errors halve from 64 to 256 batches. With NVFP4's own scales they do not: 1.6 % are left, where nearest leaves 2.0 %.
#
# Rounding inputs and weights as well costs far more: an error of 11 % stays, however gradients are rounded. Why does it not average out? The last rows round one thing alone. To the nearest number, weights leave 7 %, the inputs of the first queries, keys and values 10 %, and the inputs of all other layers 2 %.
#
# **What repeats does not average out.** The weights are the same in every batch here (in a run they move). The first layers read embeddings, which are the same wherever a character stands. So rounding them to nearest makes the same errors each time. Rounded stochastically, drawn anew each time, each of these two leaves about 2 %. What the other layers read hangs on the text before it, so its errors average out without that.
#
# The rotation wins back 0.3 to 0.5 percentage points at 64 batches, in each seed. This small GPT has no outliers for it to spread.
#
# So the two measures that were tried show little on this model. (NVIDIA's 12B model, trained with this recipe on 10 trillion tokens, has 62.58 % on MMLU-Pro, and its FP8 run 62.62 %.)

# %% [markdown]
# ## Which bytes are saved?
#
# A weight that is multiplied in 8 bits still has to be *stepped*. A step moves a weight of 1 by a thousandth, and the next e4m3 number is an eighth away: the step would be lost (lab 02). So the formats in which states are *kept* are a choice of their own.

# > bf16 training holds 16 bytes per parameter (lab 02). How many does Transformer Engine hold, whose products are in 8 bits?

# %%
predict("te/bytes", bytes_per_parameter=8)

# %% [markdown]
# | | weights | gradients | and their sum | master weights | moments |
# |---|---|---|---|---|---|
# | bf16, fp32 sums | bf16 | bf16 | fp32 | fp32 | fp32, fp32 |
# | bf16 | bf16 | bf16 | – | fp32 | fp32, fp32 |
# | Transformer Engine | fp32 | fp32 | – | – | fp32, fp32 |
# | FP8-LM | fp8 | fp8 | fp16 | fp16 | fp8, fp16 |
# | DeepSeek-V3 | fp8 | bf16 | fp32 | fp32 | bf16, bf16 |
# | nanotron | fp8 | fp8 | fp32 | bf16 | fp8, fp8 |
# | 8-bit Adam | bf16 | bf16 | – | fp32 | blocks of 8 bits |
#
# (From The Ultra-Scale Playbook, and for DeepSeek-V3 section 3.3.3 of its report; the last row is explained below. FP8-LM's own paper counts 6 bytes, without the fp8 weights and the sum.)

# %%
for name, kept in RECIPES.items():
    print(f"{name:20}{kept.bytes_per_parameter:3} bytes per parameter")
engine = RECIPES["Transformer Engine"].bytes_per_parameter
reveal("te/bytes", bytes_per_parameter=engine)

# %% [markdown]
# Sixteen, as in bf16: 8-bit operands are forgotten after the step, and states are the fp32 ones of autocast (lab 02). Only *keeping* weights, gradients and moments in few bits saves bytes.
#
# Does the count hold? `KeptAdam` keeps the linear layers of the blocks as a recipe says, and the rest in fp32. First the formula against a dry run, then every recipe against the program:


# %%
def stepped(_, batch, name):
    """What two steps of a recipe leave in memory."""
    net = quantization.use_fp8(GPT(rigs.fp8.READER), Scheme())
    optimizer = quantization.KeptAdam(net, RECIPES[name])
    for _ in range(2):
        rigs.fp8.loss_of(net, batch).backward()
        optimizer.step()
    return measure.model_states(net, optimizer)


formula = quantization.fp8_states(rigs.fp8.READER, RECIPES["nanotron"])
dry = World(Mesh(), engine="dry").run(stepped, batch, "nanotron")
formula.diff(dry, by="name")

# %%
for name, kept in RECIPES.items():
    real = stepped(None, batch, name)
    formula = quantization.fp8_states(rigs.fp8.READER, kept)
    off = formula.diff(real, by="name").unexplained
    print(f"{name:20}{units.text(real.total)} held, {off} B unexplained")

# %% [markdown]
# The formula at full size, on Llama-2-7B:

# %%
llama = ModelConfig.named("llama-2-7b")
bars = {name: quantization.fp8_states(llama, kept) for name, kept in RECIPES.items()}
plots.memory_bars(**bars, capacity=Hardware.named("H100"))

# %% [markdown]
# **Activations** shrink, too: for the gradient of w a layer keeps its input, now in 8 bits.


# %%
def kept_by(scheme):
    net = GPT(rigs.fp8.READER, attention="sdpa")
    net = quantization.use_fp8(net, scheme) if scheme else net
    return measure.saved_activations(lambda: rigs.fp8.loss_of(net, batch), net).total


tokens, (h, f, L) = batch[0].numel(), rigs.fp8.READER.letters("h f L")
per_token = 4 * (3 * h + f) - (5 * h + f)
saved = kept_by(None) - kept_by(Scheme())
print(f"{saved / kept_by(None):.0%} of the activations saved,", end=" ")
print("unexplained:", saved - L * (tokens * per_token - 6 * 4))
half = GPT(rigs.fp8.READER, attention="sdpa").bfloat16()
half = measure.saved_activations(lambda: rigs.fp8.loss_of(half, batch), half).total
print(f"against bf16: {L * tokens * (h + f) / half:.0%}")

# %% [markdown]
# **Against bf16, the usual rival, 8-bit inputs save 10 % of the activations here:** a block saves h + f bytes per token. With one matrix for queries, keys and values, as is usual, it saves 3h + f.
#
# Against fp32 they save 23 %, not three quarters, for two reasons. Norms, attention and GELU keep what they kept. And queries, keys and values read *one* input, which fp32 keeps once and these layers three times. (The 6 · 4 bytes are scales.)
#
# ### Further: and messages?
#
# A gather of weights in 8 bits sends half the bytes of one in bf16. To share one scale, ranks first agree on one amax:


# %%
weight = found["weight"][3].float()


def gathered(rank, eight):
    comm, mine = rank.comm("dp"), weight.chunk(4)[rank.rank].contiguous()
    if not eight:
        return comm.all_gather(mine.bfloat16())
    amax = comm.all_reduce(mine.abs().max().reshape(1), "max")
    codes = quantization.cast(mine * quantization.scale_for(amax, F8_E4M3), F8_E4M3)
    return comm.all_gather(codes.view(torch.uint8)).view(F8_E4M3)


world = World(4)
for eight in (False, True):
    result, books = world.run(gathered, eight)[0], world.ledger.only(rank=0)
    print({name: units.text(sent) for name, sent in books.by("name").items()})
whole = quantization.to_eight(weight, F8_E4M3).codes
print("the codes of the whole matrix:", torch.equal(result.float(), whole.float()))

# %% [markdown]
# ### Further: and time?
#
# By its data sheet an H100 computes twice as fast in e4m3 as in bf16. How much faster is a step? Take eight blocks of Llama-3.1-8B under ZeRO-3, on 64 ranks with 3,072 tokens each. They run on lab 09's H100s (61 % of the peak, eight rings). First comes bf16; then products in half the time; then messages of half the bytes as well:

# %%
h100 = Hardware.named("H100")
block = sum(anatomy.units(ModelConfig.named("llama-3.1-8b"))["blocks.0"])


def step(fmt, itemsize, tokens=3_072):
    seconds = 2 * block * tokens / h100.rate(fmt=fmt)
    layers = [(itemsize * block, seconds)] * 8
    return zero.step_timeline(zero.unit_order(8), layers, n=64, link=h100.ring(64))


ways = {
    "products and messages in bf16": step("bf16", 2),
    "products in 8 bits": step("fp8", 2),
    "weights and gradients sent in 8 bits, too": step("fp8", 1),
}
title = "3,072 tokens: products in half the time leave messages little to hide behind"
plots.overlap(title=title, **ways)

# %%
three = ("bf16", 2), ("fp8", 2), ("fp8", 1)
for tokens in (1_536, 3_072, 8_192):
    ends = (step(*how, tokens).makespan for how in three)
    print(f"{tokens:,} tokens:", *(f"{1e3 * end:6.1f} ms" for end in ends))

# %% [markdown]
# So the gain depends on the tokens of a rank. At 1,536 messages decide, and products in 8 bits alone bring 4 %. At 8,192 products hide nearly all messages, and sending them in 8 bits brings only 2 %. (torchao sends no gradients in 8 bits.)
#
# The times leave out casts, and the products of attention and head, which stay in bf16. **Amdahl's law** says what these products cost: if a share a of the FLOPs runs twice as fast, a step is 1 / (1 − a/2) times as fast. Here it is for Llama-3.1-8B, by tokens in a row. (Attention is counted in full; a causal kernel leaves out up to half of it.)

# %%
for s in (2048, 8192, 32768, 131072):
    config = replace(ModelConfig.named("llama-3.1-8b"), seq_len=s)
    linear = 6 * block * config.num_layers / config.flops_per_token()
    faster = 1 / (1 - linear / 2)
    print(f"{s:7,} tokens: {linear:.0%} in linear layers, {faster:.2f} times")

# %% [markdown]
# ## Further: can the moments be in 8 bits?
#
# Eight of the sixteen bytes are Adam's moments. **8-bit Adam** keeps each as one of 256 values, the *dynamic code*. These values span seven decades, and each decade has twice as many of them as the one below. Each *block* of 2,048 numbers is divided by its own largest.

# %% [markdown]
# Thirty steps of training cannot judge the code: seeds differ by more than it changes. So take twenty steps with exact moments m and v, round these, and look at the next step. How far is it off, and how far does any weight move, in learning rates?
#
# The first two rows have the dynamic code, in blocks and with one scale for a matrix. The others have *even* steps, values that are equally far apart, in blocks: for both moments, for m, for v, and for m and √v.

# %%
twin, text = rigs.fp8.reader().double(), rigs.fp8.excerpts(7)
adam = torch.optim.AdamW(twin.parameters(), lr=2e-3, betas=(0.9, 0.95))
for ready in range(21):
    adam.zero_grad()
    rigs.fp8.loss_of(twin, next(text)).backward()
    if ready < 20:
        adam.step()


# %%
def dynamic(x, signed, block=2048):
    codes = quantization.to_blocks(x, signed=signed, block=block)
    return quantization.from_blocks(codes, x.shape, signed=signed, block=block)


def even(x, signed):
    how = dict(granularity=2048, affine=not signed)
    return quantization.quantize(x.flatten(), "int8", **how).dequantize().view_as(x)


def root(x, signed):
    return even(x, True) if signed else even(x.sqrt(), False).square()


# %%
def next_step(keep):
    """Of all matrices in the blocks, in learning rates."""
    steps, bias = [], (1 - 0.95**21) ** 0.5 / (1 - 0.9**21)
    for p in twin.blocks.parameters():
        if p.dim() == 2:
            m, v = adam.state[p]["exp_avg"], adam.state[p]["exp_avg_sq"]
            m = 0.9 * keep(m, True) + 0.1 * p.grad
            v = 0.95 * keep(v, False) + 0.05 * p.grad**2
            steps.append((bias * m / (v.sqrt() + 1e-8)).flatten())
    return torch.cat(steps)


exact = next_step(lambda x, signed: x)
ways = {
    "dynamic code": dynamic,
    "one scale": functools.partial(dynamic, block=None),
    "even steps": even,
    "even m": lambda x, signed: even(x, True) if signed else x,
    "even v": lambda x, signed: x if signed else even(x, False),
    "even m, √v": root,
}
for name, keep in ways.items():
    moved = next_step(keep)
    off = (moved - exact).norm() / exact.norm()
    print(f"{name:12} off by {off:4.0%}, largest step {moved.abs().max():5.1f}")

# %% [markdown]
# Even steps are good enough for m, but not for v, since they round some v to zero. Then only (1 − β₂)g² of the *newest* gradient is left under the root. Where that is tiny and m is not, a weight moves by more than 400 learning rates. Even steps of √v are good enough here as well, since the root halves the decades.
#
# Why blocks? Make one gradient of a matrix a thousand times as large as the largest, as a rare token's may be. Its second moment is then a million times as large as the largest.
#
# > The matrix has 128 × 512 numbers. In blocks of 2,048, how many percent of its second moments become zero? (And with one scale for all?)

# %%
predict("moments/zero", percent=50)

# %%
v = rigs.fp8.matrix_gradients(model, batch)[4].square()
v.view(-1)[0] = 1e6 * v.max()
for block in (2048, None):
    codes = quantization.to_blocks(v, signed=False, block=block)
    back = quantization.from_blocks(codes, v.shape, signed=False, block=block)
    zero_share = ((back == 0) & (v > 0)).double().mean().item()
    print(f"block {block}: {zero_share:.0%} zero")
    if block:
        reveal("moments/zero", percent=round(100 * zero_share))

# %% [markdown]
# In blocks 3 % of the second moments become zero, those of one block of 32; with one scale it is 99 %. Where the moment became zero, the step is divided by the newest gradient alone, as with even steps above. So a block does for the optimizer what a tile does for a product.

# %% [markdown]
# ## Further: turn the knobs
#
# Build a recipe. How many bytes per parameter does the smallest one with fp32 master weights have?


# %%
def knobs(weights="bf16", gradients="bf16", master="fp32", moments="fp32"):
    mine = quantization.StateFormats(weights, gradients, moments, moments, master)
    title = f"{mine.bytes_per_parameter} bytes per parameter in the linear layers"
    bars = {"your recipe": quantization.fp8_states(llama, mine)}
    bars["bf16"] = quantization.fp8_states(llama, RECIPES["bf16"])
    return plots.memory_bars(title=title, **bars, capacity=h100)


explore(
    knobs, states=24, weights=["bf16", "fp8"], gradients=["bf16", "fp8"],
    master=["fp32", "bf16"], moments=["fp32", "bf16", "blocks"],
)  # fmt: skip

# %% [markdown]
# ## In practice
#
# | | products in 8 bits | scaling |
# |---|---|---|
# | Transformer Engine | `with te.autocast(enabled=True, recipe=…)` | `DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=1024, amax_compute_algo="max")`, `Float8CurrentScaling`, `Float8BlockScaling`, `MXFP8BlockScaling`, `NVFP4BlockScaling` |
# | torchao | `convert_to_float8_training(model)` | `Float8LinearConfig`: tensorwise or rowwise, from the current amax |
# | torchtitan 0.2.2 | `--model.converters="quantize.linear.float8"` | `--quantize.linear.float8.recipe_name rowwise` |
# | Megatron-LM | `--fp8-format hybrid` or `e4m3` | `--fp8-recipe delayed`, `tensorwise`, `blockwise` or `mxfp8` |
#
# Messages: torchao gathers FSDP2's weights in 8 bits with `enable_fsdp_float8_all_gather`. Moments: bitsandbytes' `AdamW8bit`, in blocks of 256.

# %% [markdown]
# ## Errata
#
# ### True under a condition
#
# **"DeepSeek-V3’s tile quantization" among techniques that "aim to reduce the parameter memory burden significantly"** (reading notes on *The Ultra-Scale Playbook*). Its recipe takes 15 bytes per parameter in the Playbook's own table, where bf16 with the same fp32 gradients takes 20. Weights in 8 bits save 1 of the 5 bytes, moments in 16 bits the other 4. Tiles, which are against outliers, save none. <!-- erratum: S3-045 -->
#   <!-- claim: [quantization.RECIPES[name].bytes_per_parameter for name in ("DeepSeek-V3", "bf16, fp32 sums")] == [15, 20] -->
#
# **"using fp8 or int8 reduces by 75%"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024). True of weights alone, against fp32, without scales. With a scale for each 32 numbers it is 74.2 %. The states of training take 9 to 16 bytes per parameter in the FP8 recipes above, where bf16 takes 16. <!-- erratum: S2-010 -->
#   <!-- claim: round(100 * (1 - floats.MXFP8.bits_per_value / 32), 1) == 74.2 -->
#   <!-- claim: (lambda each: (min(each), max(each)))([quantization.RECIPES[name].bytes_per_parameter for name in ("nanotron", "Transformer Engine", "DeepSeek-V3", "FP8-LM")]) == (9, 16) -->

# %% [markdown]
# ## Summary
#
# > - e4m3 reaches to 448, e5m2 to 57,344 with one bit of precision less. A scale brings each tensor into range. What is beyond is clipped and not made infinite, as infinity times 0 is no number.
# >   <!-- claim: (quantization.largest(quantization.F8_E4M3), quantization.largest(quantization.F8_E5M2)) == (448, 57344) -->
# > - Without a scale, at the loss scale of a large batch, all gradients of the blocks are zero. With one for each tensor, the loss scale does not matter. (One well-chosen loss scale for all does as well here.)
# >   <!-- claim: quantization.cast(torch.tensor([2.0**-18]), quantization.F8_E5M2).float().item() == 0 -->
# > - A delayed scale needs some steps until every layer has seen its gradients, and clips what outgrows its history.
# > - Judge a format by the error of Adam's step, not of the whole gradient: without a scale the step is off by a third here, the gradient by 7 %.
# > - Without outliers int8 is as precise as 8-bit floats or more, but for gradients under one scale. Here it breaks at an outlier of 100. e4m3 keeps its digits over a factor of 28,672, and loses them one by one up to 229,376.
# >   <!-- claim: [floats.E4M3.max / each for each in (floats.E4M3.min_normal, floats.E4M3.min_subnormal)] == [28672, 229376] -->
# > - A sum of 4,096 products that is cut to 14 bits after every 32 is off by 0.3 % here, and moved to fp32 every 128 by 0.01 %. Cut after each product it is 3.7 %.
# > - A tile confines an outlier to 128 numbers of a row: at one of 100 a forward product in int8 is off by 83 % here with one scale, by 32 % with one for each row, and by 17 % with tiles. A tile lies along the dim that is added up, so it is 1 × 128; for weights, which are multiplied both ways, 128 × 128.
# > - Products in 8 bits save no model states: 16 bytes per parameter remain 16. What is *kept* in few bits saves bytes: three recipes take 15, 10 and 9, and both moments in blocks make it 10.
# >   <!-- claim: [quantization.RECIPES[n].bytes_per_parameter for n in ("Transformer Engine", "DeepSeek-V3", "nanotron", "FP8-LM", "8-bit Adam")] == [16, 15, 10, 9, 10] -->
#
# Next: how the learning rate follows the batch.

# %% [markdown]
# ## References
#
# - P. Micikevicius et al., *FP8 formats for deep learning*, arXiv:2209.05433 (2022).
# - DeepSeek-AI, *DeepSeek-V3 technical report*, arXiv:2412.19437 (2024), section 3.3: tiles, e4m3 throughout, sums of 14 bits and their promotion.
# - NVIDIA, *Pretraining large language models with NVFP4*, arXiv:2509.25149 (2025).
# - N. Tazi et al., *The Ultra-Scale Playbook*, Hugging Face (2025): the table of FP8 recipes.
# - H. Peng et al., *FP8-LM: training FP8 large language models*, arXiv:2310.18313 (2023).
# - T. Dettmers et al., *8-bit optimizers via block-wise quantization*, arXiv:2110.02861 (2021).
# - NVIDIA, Transformer Engine user guide, *Common API*; torchao, documentation of `torchao.float8`; torchtitan and Megatron-LM, their arguments.
