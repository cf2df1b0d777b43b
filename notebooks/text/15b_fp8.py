# %% [markdown]
# # 15b · Train with products in 8 bits
#
# **The linear layers of a training step multiply numbers of 8 bits. What goes wrong, what prevents it, and which bytes does it save?**
#
# *90 min, and 50 further · before this: labs 01, 02 and 03 · needs a laptop, no GPU and no network*

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
# A linear layer multiplies three times in a training step: inputs by weights, and behind that the gradients of its outputs by weights and by inputs. Here are those gradients in a small GPT that has read Python's documentation for a while, by their exponents, over what the two formats of 8 bits can hold:

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
# e4m3 has four exponent and three mantissa bits, e5m2 five and two (lab 01). One spends a bit on precision, the other on range. What becomes of inputs, weights and gradients, without a scale?

# %%
for name, exponents in counts.items():
    for fmt in ("e4m3", "e5m2"):
        fate = precision.fate(exponents, fmt)
        zero_share, coarse = fate["zero"], fate["subnormal"]
        print(f"{name:7}{fmt}: {zero_share:4.0%} zero, {coarse:4.0%} coarse")

# %% [markdown]
# *Coarse* numbers are subnormal: they have fewer digits. Inputs fit both formats; half of the weights are coarse in e4m3, and of the gradients it would leave nearly nothing. The usual choice is e4m3 for inputs and weights, e5m2 for gradients.
#
# A **scale** moves a tensor: multiply by it, round, and keep its inverse, which brings the *result* of the product back. The largest |x|, the *amax*, goes to the format's largest number, 448 or 57,344.
#
# ### Exercise 15.4 · Put a tensor into 8 bits (10 min, ●○○)
#
# amax is given: it may be larger or smaller than what is in x, and 0 where x is zeros, which stay zeros.


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
# The model's weights are fixed now, and so is the batch. One backward pass in fp64, and one with 8-bit operands in all layers of the blocks; how far are the two gradients apart, relative to the first? Five schemes:
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
said = "int", "int-8", "integers", "8-bit integers", "8 bit integers"
reveal("schemes/best", *said, scheme=min(errors, key=errors.get))

# %% [markdown]
# Integers, as in lab 01: where all numbers are of one size, 255 equal steps beat an exponent. Outliers will change that. But how can the unscaled gradient be so near, when e5m2 rounds nearly half of the gradients of outputs to zero? The error is that of all twelve matrices as *one* vector, and the large ones decide it. Matrix by matrix, the five that are worst without a scale:

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
# Without a scale three matrices of twelve lose two fifths to a half: their gradients are the smallest. Does that matter? Adam divides the mean of each number's gradients by the root of their mean square, so small gradients move a weight as far as large ones. Here is its step after ten batches at these weights:

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
for name in of_each:
    off = (adams_step(SCHEMES[name]) - right).norm() / right.norm()
    print(f"{name:9} step off by {off:.1%}")

# %% [markdown]
# **Without a scale the gradient is off by 7 % and Adam's step by a third; with one, both are off by 3 to 5 %.** (What that costs a run, thirty steps cannot say: see below.) So one number for all gradients hides what goes wrong. By Adam's step int8's lead over tiles is gone, too.
#
# Is it the mantissa or the range that makes the error of "current"? Switch each off:

# %%
for forward, backward in ((F8_E4M3, F8_E4M3), (F8_E4M3, F8_E5M2), (F8_E5M2, F8_E5M2)):
    off = rigs.fp8.gradient_error(model, Scheme(forward, backward), batch)[0]
    print(str(forward)[13:17], str(backward)[13:17], f"{off:.1%}")

# %% [markdown]
# With a scale, e4m3 is the better format for gradients, too: here precision counts, and range does not. That is also most of what tiles gain above: they use e4m3 for gradients. DeepSeek-V3 uses e4m3 throughout, with tiles.
#
# **A tile** is as long as the part of a sum that is added up before a scale is applied: 128 products in DeepSeek-V3. So it has to lie *along the dim that is added up*, and that is another dim in each product:
#
# | product | adds up over |
# |---|---|
# | y[t, n] = x[t, k] · w[n, k]ᵀ | inputs k |
# | gradient of x[t, k] | outputs n |
# | gradient of w[n, k] | tokens t |
#
# ### Exercise 15.5 · Three products by tiles (12 min, ●●○)
#
# `quantization.to_eight(matrix, F8_E4M3, tile)` puts a matrix into 8 bits, `tile` being (rows, columns); `.mT` transposes the result, codes and scales, and `quantization.product(a, b)` is a·bᵀ. It refuses a scale that changes inside a sum.


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
# **Is this what the hardware computes?** PyTorch has the product itself, `torch._scaled_mm`, for CPUs and for GPUs of the H100's generation and later. One scale per tensor:

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
# On a CPU the sums are fp32. The matrix unit of an H800, an H100 with slower links, keeps about 14 bits while it adds, writes DeepSeek-V3 (section 3.3.2), which therefore moves its partial sums to fp32 every 128 products, and can apply the scales of a tile there. Emulated: after each 32 products the sum is cut to 14 bits.
#
# > With sums of 4,096 products, how large is the error of a product of two random matrices, in percent of its norm?

# %%
predict("sum/error", percent=0.01)


# %%
def summed(a, b, promoted=None, bits=14, cut=torch.trunc):
    """a·bᵀ, sums cut to so many bits; every `promoted` products they move to fp64."""
    total = part = torch.zeros(len(a), len(b), dtype=torch.float64)
    for k in range(0, a.shape[1], 32):
        part = part + a[:, k : k + 32] @ b[:, k : k + 32].mT
        mantissa, exponent = torch.frexp(part)
        part = torch.ldexp(cut(mantissa * 2.0**bits), exponent - bits)
        if promoted and (k + 32) % promoted == 0:
            total, part = total + part, torch.zeros_like(part)
    return total + part


def sum_error(k, promoted, cut=torch.trunc):
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(32, k, generator=draw) for _ in "ab")
    a, b = (quantization.to_eight(x, F8_E4M3).codes.double() for x in drawn)
    exact = a @ b.mT
    off = (summed(a, b, promoted, cut=cut) - exact).norm() / exact.norm()
    return 100 * off.item()


# %%
lengths = [128 * 2**i for i in range(8)]
off = {
    "14 bits": [sum_error(k, None) for k in lengths],
    "rounded to 14": [sum_error(k, None, torch.round) for k in lengths],
    "moved every 128": [sum_error(k, 128) for k in lengths],
}
reveal("sum/error", percent=round(off["14 bits"][lengths.index(4096)], 2))

# %%
plots.curves(
    lengths, xlabel="products in a sum", ylabel="error of the product (%)",
    title="With 14 bits the error grows with the sum, unless it is moved every 128",
    log="xy", **off,
)  # fmt: skip

# %% [markdown]
# Cut off and not rounded, the errors all point to zero and add up; rounded to the same 14 bits, they mostly cancel. Is 0.3 % much? Rounding these operands to e4m3 costs their product ten times that, 4 %. But that error has no sign, and does not grow with the length of the sum. DeepSeek reports almost 2 % at 4,096 for the *largest* error of an entry, where this is that of the whole product. So an emulation with sums in fp32 or fp64, as all of this lab below, is kinder than an H100 without that promotion.
#   <!-- claim: (lambda a, b: round(100 * ((quantization.product(*(quantization.to_eight(each, quantization.F8_E4M3) for each in (a, b))) - a @ b.mT).norm() / (a @ b.mT).norm()).item()))(*torch.randn(2, 32, 4096, generator=torch.Generator().manual_seed(0))) == 4 -->

# %% [markdown]
# ## When does it fail without a scale?
#
# The mean loss divides each gradient by the number of tokens, and 256 tokens are few. One device that accumulates a batch of a million in such micro-batches multiplies each loss by its share, $2^{-12}$ (lab 05). Data-parallel ranks divide by their own tokens only and take the mean behind the backward pass: with 64 ranks the share is $2^{-6}$.
#
# > The loss times $2^{-12}$, three seeds, thirty steps. How much of the fp32 run's gain does the unscaled run keep, in percent? (Gradients are divided by $2^{-12}$ before clipping and AdamW. All but 8-bit operands is in fp64.)

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
gaps = {
    name: [run[-1] - right[-1] for run, right in zip(three, runs["fp32"], strict=True)]
    for name, three in runs.items()
}
mean = {name: sum(three) / len(three) for name, three in gaps.items()}
print("unscaled worse by more than 0.1 in the mean:", mean["unscaled"] > 0.1)
print("delayed within 0.1 of fp32 in the mean:", abs(mean["delayed"]) < 0.1)

# %%
untrained, _ = rigs.fp8.train_reader(0, steps=0, in_fp64=True)
start = rigs.fp8.loss_of(untrained, next(rigs.fp8.excerpts(99, 64))).item()
gain = {name: sum(start - run[-1] for run in three) for name, three in runs.items()}
reveal("unscaled/gain", percent=round(100 * gain["unscaled"] / gain["fp32"], -1))

# %% [markdown]
# An error of 1 is a gradient of zero. What still learns are the embeddings, which are the head as well, and the last norm. With a scale the run is back, and the share makes no difference to the error. The cause is range: half of e5m2's smallest number is $2^{-17}$, and what is smaller becomes zero:

# %%
for said, share in shares.items():
    gone = precision.fate(counts["grad"], "e5m2", share)["zero"]
    print(f"loss times {said:4}: {gone:.0%} of the gradients of outputs become zero")

# %% [markdown]
# **Do 8 bits train as well?** With a share of 1, three seeds of each scheme. What could this experiment see? The blocks contribute little in thirty steps: without any gradient for them (unscaled at $2^{-12}$) the loss ends only so much higher. A gap is to be judged in parts of that:

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
# So in the mean of three seeds 8 bits keep most of what the blocks contribute. Which scheme is best it cannot say: any rounding leads a run elsewhere, and one seed of a scheme differs from the next by more than schemes differ. ("Within 0.25 of fp32" all of them are, and blocks without any gradient as well: such a test sees nothing.) DeepSeek-V3 reports a relative gap below 0.25 % of the loss over about a trillion tokens.

# %% [markdown]
# ### Further: would one loss scale do?
#
# One for all tensors is lab 02's remedy. Here it would do, but somebody has to choose it, by the worst matrix and not by the error of all, and keep it right while gradients shrink:

# %%
for share in (4, 256, 65536):
    of_all = error("unscaled", share=share)
    each = rigs.fp8.matrix_errors(model, SCHEMES["unscaled"], batch, share=share)
    print(f"loss times {share:6,}: {of_all:.1%}, worst matrix {max(each.values()):.0%}")

# %% [markdown]
# ## Further: what does a delayed scale cost?
#
# The current amax takes a pass over the tensor before the cast can begin. **Delayed scaling** takes the largest amax of earlier steps, and looks at this step's on the way. The first step has no history: its scale is 1.
#
# Seven backward passes at the same weights, the error of the gradient in each, for the loss and for the loss times $2^{-12}$:

# %%
for said in ("1", "2⁻¹²"):
    how = dict(share=shares[said], steps=7)
    delayed = rigs.fp8.gradient_error(model, SCHEMES["delayed"], batch, **how)
    print(f"loss times {said:4}:", *(f"{each:.2f}" for each in delayed))

# %% [markdown]
# With the small loss a layer whose scale is 1 hands zeros on, and what is given zeros has nothing to put into its history: it takes passes until every layer has seen its gradients. Then this scheme is as good as the current one, until a tensor grows: what exceeds the history is clipped in that step.
#
# ### Exercise 15.6 · Bug hunt: the scale of the last steps (10 min, ●●●)
#
# A step casts a tensor once, or several times with micro-batches, and then calls `advance()`. Its scale has to bring the largest |x| of the last `length` steps, as x was before the cast, to the format's largest number; any scale will do while all were zeros. The test passes; four things are wrong all the same.


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
# In the library a step's end is a call, `advance_scales(model)`, so that a checkpointed layer computes twice with one scale; with a `comm`, all ranks take the largest amax of any:

# %%
show(quantization.advance_scales)

# %% [markdown]
# ## What does an outlier do?
#
# Activations of large language models have channels up to a hundred times as large as the others (SmoothQuant); MiniLM's first token had 17 to 19 times (lab 15a). Plant one: the first input channel of every layer times k, its weights divided by k. In exact arithmetic nothing changes. The reader is 128 wide, so that a tile is a whole row and every tile meets the outlier; take a GPT of width 512 (one layer, untrained), of whose four tiles in a row one does.
#
# > At an outlier of 100, int8 with one scale is off by 69 %. How many percent is int8 with a scale per tile?

# %%
predict("tiles/int8", percent=70)

# %%
I8, ks = torch.int8, [1, 10, 100, 1e3, 1e4, 1e5, 1e6]
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
    title=title, alt=f"{title}. The numbers are printed below.", log="xy", **outlier,
)  # fmt: skip

# %%
table = {
    name: {f"{k:g}": each for k, each in zip(ks, row, strict=True)}
    for name, row in outlier.items()
}
rigs.fp8.print_errors(table)
kept = [floats.E4M3.min_normal, floats.E4M3.min_subnormal]
whole, span = (floats.E4M3.max / least for least in kept)
print(f"e4m3: all digits over a factor of {whole:,.0f}, something over {span:,.0f}")

# %% [markdown]
# int8's steps are all as large as the outlier asks. e4m3 gives each number an exponent of its own: all keep their digits while the largest of the tensor is at most 28,672 times as large. What is smaller loses digit after digit, and is zero beyond the span. (The largest number of the outlier's channel is some four times its typical one: here the loss begins near 7,000.) So the floats' problem is precision, and the integers' is range.
#
# Tiles keep what an outlier does in one place. Which place? One product at a time, on the operands of `up`:


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


kinds = {"one scale": (None, None), "tiles": ((1, 128), (128, 128))}
for (kind, tiles), k in itertools.product(kinds.items(), (1, 100)):
    large = torch.ones(512)
    large[0] = k
    y, of_x, of_w = in_int8(x * large, w / large, grad, *tiles)
    got = zip(right.items(), (y, of_x * large, of_w / large), strict=True)
    off = (f"{what} {(z - true).norm() / true.norm():6.1%}" for (what, true), z in got)
    print(f"{kind:9} outlier {k:3}: ", *off)

# %% [markdown]
# In the forward product the outlier spoils one tile in four. In the gradient of the weights it spoils none: there a tile lies along tokens, and the large channel fills tiles of its own. The gradient of x loses that one channel, whose weights are a hundred times as small as the others in their tile.
#
# **Does it show in training?** Recorded: 60 steps of the wide GPT at a rate of 5e-4, three seeds (`python tools/fp8_sweep.py outlier`). First a control: how much higher does the loss end if the blocks get no gradient? The losses of a scheme are in parts of that, seed by seed:

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
# Without an outlier int8 loses nothing that shows. With one of 100, one scale loses 10 to 13 % of what the blocks contribute, and tiles 1 to 2 %, in every seed. At an outlier of 100,000 one scale in e4m3 leads each run elsewhere, by up to 9 % up or down, and tiles stay within 1 %.

# %% [markdown]
# ## Further: what if the matrix unit applies the scales?
#
# Blackwell's does, while it adds (lab 01 has the formats). *MXFP8* has a scale for each 32 numbers, a power of two; *MXFP4* the same with 4 bits; *NVFP4* one for each 16, in e4m3. Gradients are in the same format as inputs and weights, and blocks lie along the sum, as tiles do. `quantization.use_blocks` emulates it; the error of the reader's gradient:

# %%
finer = floats.BlockFormat("mxfp8 with a scale in e4m3", floats.E4M3, 32, floats.E4M3)
for fmt in (floats.MXFP8, finer, floats.MXFP4, floats.NVFP4):
    print(f"{fmt.name}: {rigs.fp8.block_error(model, fmt, batch):.1%}")

# %% [markdown]
# MXFP8's blocks are a quarter of a tile, and yet it is less precise than tiles. Its scale is to blame: with three bits of mantissa for the scale, and nothing else changed, it is nearly as good as they are. But which of the two powers of two is the scale? Inputs, weights and gradients of the last layer `up`, in e4m3 and blocks of 32:

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

# %% [markdown]
# The standard's rule is the first: a largest number above 448 is clipped, by up to an eighth. Transformer Engine takes the other power, which clips nothing, and gets half of that loss back, or more. The rest is the price of a power of two: a scale in fp32 brings each largest number to 448, where it is exact.
#
# In four bits the error is 15 %, and NVIDIA's recipe for training in NVFP4 (2025) does four things about it:
#
# | what | against |
# |---|---|
# | gradients of outputs are rounded *stochastically* (lab 01), inputs and weights to the nearest | errors that point the same way in every step |
# | for the gradient of the weights, G and x are multiplied along tokens by a random *Hadamard* matrix, 16 × 16, which GᵀHHᵀx does not notice | outliers: a rotation spreads them over a block (lab 15a) |
# | weights have a scale for 16 × 16 numbers | two roundings of one weight, forward and backward |
# | some linear layers stay in bf16, about 15 %, most of them at the end | layers that four bits hurt most |
#
# As with 8 bits, embeddings, head, norms and attention's products stay in bf16 or fp32, and master weights, gradients of weights and moments in fp32.
#
# Stochastic rounding makes *one* gradient worse, since it does not take the nearest number. A run averages many. Recorded (`python tools/fp8_sweep.py averaged`): the error of the mean gradient of 1, 4, 16 and 64 batches, three seeds.
#
# > Only gradients of outputs are rounded. Of how many batches must one take the mean until stochastic rounding is better than nearest?

# %%
predict("nvfp4/batches", batches=1)

# %%
batches, off = (1, 4, 16, 64), {}
for (name, _), three in rigs.fp8.sweep_record("averaged", "rounded", "batches").items():
    off.setdefault(name, []).append(sum(three) / len(three))
nearest, drawn = off["gradients, nearest"], off["gradients, stochastic"]
better = [b < a for a, b in zip(nearest, drawn, strict=True)].index(True)
reveal("nvfp4/batches", batches=batches[better])

# %%
plots.curves(
    batches, xlabel="batches in the mean", ylabel="error of the mean gradient",
    title="Nearest keeps an error of its own, and rounding x and W costs far more",
    log="xy", **off,
)  # fmt: skip

# %%
for name, row in off.items():
    print(f"{name:24}", *(f"{each:6.1%}" for each in row))

# %% [markdown]
# Up to 16 batches nearest is ahead: another batch has other errors, so these average out as well. But not all of them do, and at 64 stochastic rounding has caught up, in every seed. (It falls by 5 and not by √64 = 8, mostly since the mean gradient, by which the error is divided, becomes shorter, too.) A run adds up thousands of gradients.
#
# What rounding inputs and weights costs stays at 11 %, however gradients are rounded: their errors are the same in every batch, or pass through the whole network before they come back. The rotation takes 0.3 to 0.5 points of that in each seed; this reader has no outliers that it could spread. So the two parts of the recipe that were tried show little on this model: inputs and weights count, and not gradients. (NVIDIA's 12B model, trained so on 10 trillion tokens, has 62.58 % on MMLU-Pro, and its FP8 run 62.62 %.)

# %% [markdown]
# ## Which bytes are saved?
#
# Weights that are multiplied in 8 bits are still *stepped*. An fp32 weight of 1 moves by a thousandth; the next e4m3 number is an eighth away (lab 02's lesson). Which states live from step to step, and in which format, is a choice of its own:

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
# (The Ultra-Scale Playbook's table; the last row is below. That DeepSeek-V3 keeps master weights and sums of gradients in fp32, and moments in bf16, is in section 3.3.3 of its report. FP8-LM's own paper counts 6 bytes: no second copy of the weights, and no sum.)

# %%
for name, kept in RECIPES.items():
    print(f"{name:20}{kept.bytes_per_parameter:3} bytes per parameter")
engine = RECIPES["Transformer Engine"].bytes_per_parameter
reveal("te/bytes", bytes_per_parameter=engine)

# %% [markdown]
# Sixteen, as in bf16, or with autocast, which keeps the same fp32 states (lab 02): operands are made for a product and forgotten. What saves bytes is *keeping* weights, gradients and moments in few bits. On a small GPT: by the formula, by a dry run, by the real program. `KeptAdam` keeps the linear layers of the blocks as a recipe says, and the rest in fp32.


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
# **Activations** are saved, too: for the gradient of w a layer keeps its input, now in 8 bits.


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
# Against bf16, which is what everybody has, a layer saves h + f bytes per token, 10 % here. And against fp32 not three quarters: norms, attention and GELU keep what they kept. And queries, keys and values read *one* input, which fp32 keeps once and these layers three times (the 6 · 4 bytes are scales); with one matrix for all three, as is usual, a layer saves 3h + f.
#
# ### Further: and messages?
#
# They halve against bf16, if weights are gathered as codes. Ranks first agree on one amax:


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
# An H100's data sheet has twice the FLOP/s for e4m3 as for bf16. Eight blocks of Llama-3.1-8B under ZeRO 3, 64 ranks, 3,072 tokens each, on lab 09's H100s, whose products reach 61 % of the peak, with eight rings; then products in half the time; then messages of half the bytes as well:

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
# So it depends on the tokens of a rank. At 1,536 the messages decide, and products in 8 bits alone bring nearly nothing; at 8,192 all messages are hidden, and sending them in 8 bits brings nothing.
#
# (The last bar sends gradients in 8 bits, too, which torchao does not.) Attention's products and the head's, which stay in bf16, and casts are left out. What they leave of the gain is **Amdahl's law**: if a part a of the FLOPs runs twice as fast, a step is 1 / (1 − a/2) times as fast. For Llama-3.1-8B, by tokens in a row (attention is counted in full; a causal kernel leaves out up to half of it):

# %%
for s in (2048, 8192, 32768, 131072):
    config = replace(ModelConfig.named("llama-3.1-8b"), seq_len=s)
    linear = 6 * block * config.num_layers / config.flops_per_token()
    faster = 1 / (1 - linear / 2)
    print(f"{s:7,} tokens: {linear:.0%} in linear layers, {faster:.2f} times")

# %% [markdown]
# ## Further: can the moments be in 8 bits?
#
# Eight of the sixteen bytes are Adam's moments. **8-bit Adam** keeps each in 256 values, the *dynamic code*: seven decades, in each twice as many values as in the one below. Each *block* of 2,048 numbers is divided by its own largest.

# %% [markdown]
# (Thirty steps of training cannot judge it: their seeds are farther apart than what any of this changes.) Take twenty steps with exact moments, round these, and look at the next step: how far is it off, and how far does any weight move, in learning rates? Once in blocks of this code, and once with one scale for a matrix; then in the same blocks with *even* steps: for both moments, for either, and for the mean and the *root* of the second:

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
# So the second moment is what needs a code: even steps do for the mean. They make some second moments zero; what stays under the root is (1 − β₂)g², of the *newest* gradient, which may be tiny where the mean m is not. Even steps of √v do here as well, since the root halves the decades; they reach less far than the dynamic code's seven.
#
# Why blocks? Let one gradient of a matrix be a thousand times the largest, as a rare token's may be, and look at the second moment, which squares it.
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
# Each of those weights is divided by its newest gradient alone, as with even steps above. A block is the optimizer's tile.

# %% [markdown]
# ## Further: turn the knobs
#
# Build a recipe. How many bytes has the smallest one with fp32 master weights?


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
# **"DeepSeek-V3’s tile quantization" among techniques that "aim to reduce the parameter memory burden significantly"** (reading notes on *The Ultra-Scale Playbook*). Its recipe takes 15 bytes per parameter in the Playbook's own table, where bf16 with the same fp32 gradients takes 20. Of the 5 bytes 1 is the weights', in 8 bits, and 4 are the moments', in 16; the tiles, which are against outliers, change none. <!-- erratum: S3-045 -->
#   <!-- claim: [quantization.RECIPES[name].bytes_per_parameter for name in ("DeepSeek-V3", "bf16, fp32 sums")] == [15, 20] -->
#
# **"using fp8 or int8 reduces by 75%"** (A. Khandelwal, *Efficient LLM Training: Memory & Compute Optimization*, Medium, 12 February 2024). Weights alone, against fp32, without scales: with a scale for each 32 numbers it is 74.2 %. The states of training take 9 to 16 bytes per parameter in the FP8 recipes above, where bf16 takes 16. <!-- erratum: S2-010 -->
#   <!-- claim: round(100 * (1 - floats.MXFP8.bits_per_value / 32), 1) == 74.2 -->
#   <!-- claim: (lambda each: (min(each), max(each)))([quantization.RECIPES[name].bytes_per_parameter for name in ("nanotron", "Transformer Engine", "DeepSeek-V3", "FP8-LM")]) == (9, 16) -->

# %% [markdown]
# ## Summary
#
# > - e4m3 reaches to 448, e5m2 to 57,344 with one bit of precision less. A scale brings each tensor into range; what is beyond is clipped, as an infinity times 0 is no number.
# >   <!-- claim: (quantization.largest(quantization.F8_E4M3), quantization.largest(quantization.F8_E5M2)) == (448, 57344) -->
# > - Without a scale, at the loss scale of a large batch, all gradients of the blocks are zero. With one for each tensor, the loss scale does not matter. (One well-chosen loss scale for all does as well here.)
# >   <!-- claim: quantization.cast(torch.tensor([2.0**-18]), quantization.F8_E5M2).float().item() == 0 -->
# > - A delayed scale needs some steps until every layer has seen its gradients, and clips what outgrows its history.
# > - Judge a format by Adam's step and not by the error of the whole gradient: without a scale the one is off by a third here, the other by 7 %.
# > - Without outliers int8 is as precise as 8-bit floats, or more. It breaks here at one of 100. e4m3 keeps its digits over a factor of 28,672, and loses one after the other up to 229,376.
# >   <!-- claim: [floats.E4M3.max / each for each in (floats.E4M3.min_normal, floats.E4M3.min_subnormal)] == [28672, 229376] -->
# > - A sum of 4,096 products in 14 bits is off by 0.3 % here, and moved to fp32 every 128 by 0.01 %.
# > - A tile confines an outlier to 128 numbers of a row: at one of 100 the gradient in int8 is off by 17 % here, and by 69 % with one scale. A tile lies along the dim that is added up: 1 × 128, and for weights, which are multiplied both ways, 128 × 128.
# > - Products in 8 bits save no model states: 16 bytes remain 16. What is *kept* in few bits saves: 15, 10 or 9; two moments in blocks alone, 16 to 10.
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
