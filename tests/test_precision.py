"""Rounding of tensors: equal to ml_dtypes, torch and the exact `floats`, on every pattern and every hard case."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from labutils import floats, measure, precision
from labutils.floats import FloatFormat
from labutils.precision import rounding, sums

PEERS = {
    floats.FP16: np.float16,
    floats.BF16: ml_dtypes.bfloat16,
    floats.E4M3: ml_dtypes.float8_e4m3fn,
    floats.E5M2: ml_dtypes.float8_e5m2,
    floats.E4M3FNUZ: ml_dtypes.float8_e4m3fnuz,
    floats.E5M2FNUZ: ml_dtypes.float8_e5m2fnuz,
    floats.E3M2: ml_dtypes.float6_e3m2fn,
    floats.E2M3: ml_dtypes.float6_e2m3fn,
    floats.E2M1: ml_dtypes.float4_e2m1fn,
    FloatFormat("1-3-4", 3, 4): ml_dtypes.float8_e3m4,
    FloatFormat("1-4-3", 4, 3): ml_dtypes.float8_e4m3,
}
every_peer = pytest.mark.parametrize(
    ("fmt", "peer"), PEERS.items(), ids=[fmt.name for fmt in PEERS]
)
EIGHT_BITS_AND_LESS = [fmt for fmt in floats.FORMATS.values() if fmt.bits <= 8]


def assert_same(ours, theirs):
    """Equal values, signs of zero included, NaN where NaN."""
    ours, theirs = torch.as_tensor(ours).double(), torch.as_tensor(theirs).double()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    number = ~ours.isnan()
    assert torch.equal(ours.signbit()[number], theirs.signbit()[number])


def through(peer, x):
    """x in the peer's format and back, by the peer's own casts; NaN stays NaN as round_to has it."""
    with np.errstate(over="ignore", invalid="ignore"):
        back = x.numpy().astype(peer).astype(x.numpy().dtype)
    return torch.where(x.isnan(), x, torch.from_numpy(back))


def patterns(dtype, count=1 << 20):
    """Tensors of all 16-bit patterns, or of `count` random patterns of a wider dtype."""
    if dtype in (torch.float16, torch.bfloat16):
        return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    integer = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    info = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(info.min, info.max, (count,), dtype=integer, generator=generator).view(
        dtype
    )


def in_range(fmt, dtype, count=1 << 18):
    """Random numbers spread over the binades of fmt and a little around: random patterns mostly miss a small format."""
    generator = torch.Generator().manual_seed(1)
    low, high = fmt.min_exponent - fmt.mantissa_bits - 2, fmt.max_exponent + 2
    exponents = torch.randint(low, high, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, dtype=torch.float64, generator=generator), exponents).to(
        dtype
    )


def between(fmt, dtype):
    """Every value of fmt, the midpoint of each pair of neighbors, and dtype's next numbers on both sides of each."""
    values = torch.tensor(fmt.representable(), dtype=torch.float64)
    above = torch.tensor(
        [fmt.max + fmt.spacing(fmt.max) * k / 2 for k in (1, 2, 3)], dtype=torch.float64
    )
    points = torch.cat(
        [values, (values[1:] + values[:-1]) / 2, above, -above, torch.tensor([0.0, -0.0])]
    ).to(dtype)
    infinity = torch.tensor(math.inf, dtype=dtype)
    ends = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
    return torch.cat(
        [points, torch.nextafter(points, infinity), torch.nextafter(points, -infinity), ends]
    )


class TestAgainstPeers:
    @every_peer
    def test_every_16_bit_pattern(self, fmt, peer):
        for dtype in (torch.float16, torch.bfloat16):
            x = patterns(dtype)
            assert_same(precision.round_to(x, fmt), through(peer, x.float()).to(dtype))

    @every_peer
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_values_midpoints_and_their_neighbors(self, fmt, peer, dtype):
        x = between(fmt, dtype)
        if dtype == torch.float64 and peer is not np.float16:
            # ml_dtypes itself goes through float32; what float32 holds exactly is safe from that.
            x = x[(x.float().double() == x) | x.isnan()]
        assert_same(precision.round_to(x, fmt), through(peer, x))

    @every_peer
    def test_random_patterns(self, fmt, peer):
        for x in (patterns(torch.float32), in_range(fmt, torch.float32)):
            assert_same(precision.round_to(x, fmt), through(peer, x))

    @pytest.mark.parametrize(
        ("fmt", "dtype", "overflow"),
        [
            ("fp16", torch.float16, "ieee"),
            ("bf16", torch.bfloat16, "ieee"),
            ("e5m2", torch.float8_e5m2, "ieee"),
            ("e4m3", torch.float8_e4m3fn, "saturate"),
        ],
    )
    def test_torch_s_own_casts(self, fmt, dtype, overflow):
        fmt = floats.named(fmt)
        for x in (
            patterns(torch.float32),
            in_range(fmt, torch.float32),
            between(fmt, torch.float32),
        ):
            assert_same(precision.round_to(x, fmt, overflow=overflow), x.to(dtype).float())

    def test_tf32_is_fp32_less_13_bits(self):
        for x in (patterns(torch.float32), patterns(torch.float32).abs() * 2.0**-126):
            x = torch.where(x.isnan(), 1.0, x)
            bits = x.view(torch.int32)
            expected = (bits + 0xFFF + (bits >> 13 & 1) & ~0x1FFF).view(torch.float32)
            assert_same(precision.round_to(x, "tf32"), expected)

    def test_fp32_in_float64(self):
        x = torch.cat([patterns(torch.float64), in_range(floats.FP32, torch.float64)])
        tie = patterns(torch.float32, 1 << 16).double()
        middle = (tie + torch.nextafter(tie.float(), torch.tensor(math.inf)).double()) / 2
        middle = middle[middle.isfinite()]
        for case in (x, middle, middle * (1 + 2**-52), middle * (1 - 2**-52)):
            assert_same(precision.round_to(case, "fp32"), case.float())

    def test_a_format_that_holds_x_changes_nothing(self):
        names = {
            torch.float64: ["fp64"],
            torch.float32: ["fp64", "fp32"],
            torch.bfloat16: ["tf32", "bf16"],
        }
        for x, fmt in [(patterns(dtype), fmt) for dtype, held in names.items() for fmt in held]:
            assert_same(precision.round_to(x, fmt), x)


@pytest.mark.parametrize("fmt", EIGHT_BITS_AND_LESS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", ["nearest", "zero"])
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
def test_equals_the_exact_reference(fmt, dtype, mode, overflow):
    x = between(fmt, dtype)
    x = x[~x.isnan()] if fmt.nan == "none" else x
    exact = [fmt.round(v, mode=mode, overflow=overflow) for v in x.tolist()]
    assert_same(
        precision.round_to(x, fmt, mode=mode, overflow=overflow),
        torch.tensor(exact, dtype=torch.float64),
    )


def test_float64_is_rounded_once_where_torch_rounds_twice():
    """1 + 2⁻¹¹ + 2⁻⁴⁰ lies above the tie, so it rounds up; float32 in between loses the 2⁻⁴⁰ and the tie goes down."""
    x = torch.tensor([1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert precision.round_to(x, "fp16") == 1 + 2**-10
    assert x.to(torch.float16).double() == 1
    for fmt in (floats.FP16, floats.BF16):
        hard = between(fmt, torch.float64)[::37]
        exact = [fmt.round(v) for v in hard.tolist()]
        assert_same(precision.round_to(hard, fmt), torch.tensor(exact, dtype=torch.float64))


@pytest.mark.parametrize(
    "fmt",
    [FloatFormat("wide", 10, 3), FloatFormat("long", 8, 30), FloatFormat("high", 8, 3, bias=0)],
    ids=lambda f: f.name,
)
@pytest.mark.parametrize("overflow", ["ieee", "saturate"])
def test_a_format_that_fp32_cannot_hold_still_rounds_float32(fmt, overflow):
    x = torch.tensor([1.0625 * 2.0**-140, 1.1 * 2.0**-130, 1.1, 3.0, 3.4e38, math.inf])
    exact = torch.tensor([fmt.round(v, overflow=overflow) for v in x.tolist()], dtype=torch.float64)
    assert_same(precision.round_to(x.double(), fmt, overflow=overflow), exact)
    assert_same(precision.round_to(x, fmt, overflow=overflow), exact.float())


class TestStochastic:
    def test_returns_one_of_the_two_neighbors_and_values_stay(self):
        for fmt in (floats.E4M3, floats.E5M2FNUZ, floats.E2M1, floats.FP16):
            x = in_range(fmt, torch.float32, 1 << 14).clamp(-fmt.max, fmt.max)
            low = precision.round_to(x, fmt, mode="zero")
            drawn = precision.round_to(
                x, fmt, mode="stochastic", generator=torch.Generator().manual_seed(0)
            )
            high = torch.tensor([fmt.spacing(v) for v in low.tolist()]).copysign(x) + low
            assert ((drawn == low) | (drawn == high)).all()
            assert torch.equal(drawn[low == x], x[low == x])
            assert (drawn != low).any() and (drawn != high).any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_is_unbiased(self, dtype):
        n, generator = 1 << 16, torch.Generator().manual_seed(0)
        for x in (16.2, -17.0, 19.8, 0.0005, 300.0):
            fmt = floats.E4M3
            drawn = precision.round_to(
                torch.full((n,), x, dtype=dtype), fmt, mode="stochastic", generator=generator
            )
            low = fmt.round(x, mode="zero")
            place = (abs(x) - abs(low)) / fmt.spacing(x)
            deviation = fmt.spacing(x) * math.sqrt(
                place * (1 - place) / n
            )  # of the mean of n Bernoulli draws
            assert abs(drawn.double().mean() - x) < 5 * deviation

    def test_specials_and_overflow(self):
        x = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e30])
        generator = torch.Generator().manual_seed(0)
        inf, nan = math.inf, math.nan
        for fmt, expected in [
            ("fp16", [inf, -inf, nan, 0.0, -0.0, inf]),
            ("e4m3", [nan, nan, nan, 0.0, -0.0, nan]),
        ]:
            drawn = precision.round_to(x, fmt, mode="stochastic", generator=generator)
            assert_same(drawn, torch.tensor(expected))
        drawn = precision.round_to(
            torch.tensor([inf, -3e38]), "bf16", mode="stochastic", generator=generator
        )
        assert drawn[0] == inf and drawn[1].isfinite()

    def test_the_same_seed_draws_the_same_numbers_whatever_the_chunk(self, monkeypatch):
        x = torch.randn(1000, generator=torch.Generator().manual_seed(2))

        def draw():
            generator = torch.Generator().manual_seed(3)
            return precision.round_to(x, "e4m3", mode="stochastic", generator=generator)

        whole = draw()
        monkeypatch.setattr(rounding, "CHUNK", 16)
        assert torch.equal(draw(), whole)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4)])
def test_any_shape_keeps_shape_and_dtype(shape):
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for fmt in ("e4m3", "fp16", "e8m0"):
            y = precision.round_to(torch.full(shape, 0.3, dtype=dtype), fmt)
            assert y.shape == shape and y.dtype == dtype
            assert (y == floats.named(fmt).round(float(torch.tensor(0.3, dtype=dtype)))).all()


def test_views_chunks_and_the_input_stays_as_it_was(monkeypatch):
    monkeypatch.setattr(rounding, "CHUNK", 7)
    x = torch.linspace(-500, 500, 60).view(6, 10)
    before = x.clone()
    expected = torch.tensor([[floats.E4M3.round(v) for v in row] for row in x.tolist()])
    assert_same(precision.round_to(x, "e4m3"), expected)
    assert_same(precision.round_to(x.T, "e4m3"), expected.T)
    assert_same(precision.round_to(x[:, ::3], "e4m3"), expected[:, ::3])
    assert torch.equal(x, before)


def test_the_gradient_passes_straight_through():
    x = torch.tensor([0.3, 1e9, -1e-9], requires_grad=True)
    (
        precision.round_to(x, "e4m3", overflow="saturate") * torch.tensor([1.0, 2.0, 3.0])
    ).sum().backward()
    assert x.grad.tolist() == [1.0, 2.0, 3.0]


@given(
    st.sampled_from([*PEERS]),
    st.floats(width=32, allow_nan=False),
    st.floats(width=32, allow_nan=False),
)
def test_idempotent_and_monotone(fmt, x, y):
    low, high = precision.round_to(torch.tensor(sorted([x, y])), fmt, overflow="saturate")
    assert low <= high
    assert precision.round_to(low, fmt) == low


def test_rounding_needs_room_for_a_chunk_and_not_for_all_numbers():
    x = torch.ones(64 * rounding.CHUNK)
    peak = measure.peak(lambda: precision.round_to(x, "e4m3"), torch.nn.Identity())
    assert x.nbytes < peak.total < 1.5 * x.nbytes


class TestSums:
    def test_running_sums_are_the_machine_s_own(self):
        generator = torch.Generator().manual_seed(0)
        for name, dtype in [
            ("fp16", torch.float16),
            ("bf16", torch.bfloat16),
            ("fp32", torch.float32),
        ]:
            x = torch.randn(500, generator=generator).to(dtype)
            total, expected = torch.zeros((), dtype=dtype), []
            for term in x:
                total = total + term
                expected.append(total)
            assert_same(precision.running_sum(x, name), torch.stack(expected))

    @pytest.mark.parametrize(
        ("fmt", "stall"), [("fp16", 2048), ("bf16", 256), ("e4m3", 16), ("e5m2", 8)]
    )
    def test_a_sum_of_ones_stalls_where_the_spacing_becomes_2(self, fmt, stall):
        """Source: computed; 2048 and 256 are also what torch's own fp16 and bf16 additions give."""
        sums = precision.running_sum(torch.ones(4096), fmt)
        assert sums.max() == sums[-1] == stall
        assert floats.named(fmt).spacing(stall) == 2

    def test_a_tree_loses_less(self):
        assert precision.pairwise_sum(torch.ones(4096), "bf16") == 4096
        x = torch.rand(8, 1000, generator=torch.Generator().manual_seed(0)).bfloat16().float()
        exact = x.double().sum(-1)
        tree = precision.pairwise_sum(x, "bf16").double()
        line = precision.running_sum(x, "bf16")[:, -1].double()
        assert ((tree - exact).abs() < (line - exact).abs()).all()

    @pytest.mark.parametrize("fmt", ["bf16", "fp16", "fp32"])
    def test_what_an_addition_loses_comes_with_the_next_term(self, fmt, monkeypatch):
        """Source: Higham 1993: |error| ≤ (2u + O(nu²)) Σ|x|, u half of eps; 4 stands for its O."""
        assert precision.kahan_sum(torch.ones(4096), fmt) == 4096
        x = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
        x = precision.round_to(x, fmt)
        u = floats.named(fmt).eps / 2
        error = (precision.kahan_sum(x, fmt).double() - x.double().sum(-1)).abs()
        assert (error <= (2 * u + 4 * 1000 * u**2) * x.double().abs().sum(-1)).all()
        line = precision.running_sum(x, fmt)[:, -1].double() - x.double().sum(-1)
        assert error.square().mean() < line.square().mean() / 4
        fast = precision.kahan_sum(x, fmt)
        monkeypatch.setattr(sums, "MACHINE", {})
        assert torch.equal(precision.kahan_sum(x, fmt), fast)

    def test_compensation_is_kahans(self):
        """The loop of the paper, in the machine's own fp32."""
        x = torch.randn(500, generator=torch.Generator().manual_seed(0))
        total = lost = np.float32(0)
        for term in x.numpy():
            y = term - lost
            t = total + y
            lost = (t - total) - y
            total = t
        assert precision.kahan_sum(x, "fp32").item() == total

    @pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
    def test_any_length(self, n):
        x = torch.arange(n, dtype=torch.float32)
        assert precision.kahan_sum(x, "fp16") == x.sum()
        assert precision.pairwise_sum(x, "fp16") == x.sum()
        assert precision.running_sum(x, "fp16").tolist() == x.cumsum(0).tolist()

    def test_a_term_with_more_digits_is_not_rounded_before_it_is_added(self):
        """1 and a little more than half of the next step: rounded first, a tie that goes to 1."""
        x = torch.tensor([1, 2.0**-24 * (1 + 2.0**-26)], dtype=torch.float64)
        for found in (precision.running_sum(x, "fp32")[-1], precision.pairwise_sum(x, "fp32")):
            assert found.item() == 1 + 2.0**-23

    @pytest.mark.parametrize("fmt", ["fp16", "bf16", "fp32"])
    def test_the_machine_and_the_rounding_agree(self, fmt, monkeypatch):
        """Numbers that are fmt's already take the fast road: the slow one gives the same bits, specials and subnormals included."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(5, 300, generator=generator) * 2.0 ** torch.randint(
            -30, 15, (5, 300), generator=generator
        )
        x[0, 7], x[1, 5], x[1, 9] = math.inf, floats.named(fmt).max, floats.named(fmt).max
        x = precision.round_to(x, fmt)
        before = x.clone()
        fast = precision.running_sum(x, fmt)
        assert torch.equal(x, before) and torch.equal(precision.running_sum(x[2], fmt), fast[2])
        monkeypatch.setattr(sums, "MACHINE", {})
        assert_same(fast, precision.running_sum(x, fmt))

    def test_stochastic_rounding_keeps_a_sum_growing(self):
        """Past 256 each step adds 2 with probability 1/2: 4096 draws, each of deviation at most spacing/2 = 8."""
        x = torch.ones(16, 4096)
        sums = precision.running_sum(
            x, "bf16", mode="stochastic", generator=torch.Generator().manual_seed(0)
        )[:, -1]
        assert abs(sums.mean() - 4096) < 5 * 8 * math.sqrt(4096 / 16)


class TestCrossEntropy:
    LOGITS = torch.randn(20, 600, generator=torch.Generator().manual_seed(0))
    TARGETS = torch.arange(20)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_summed_in_fp32_it_is_torch_s(self, dtype):
        found = []
        for loss in (
            lambda z: precision.cross_entropy(z, self.TARGETS, "fp32"),
            lambda z: F.cross_entropy(z.float(), self.TARGETS),
        ):
            logits = self.LOGITS.to(dtype, copy=True).requires_grad_()
            value = loss(logits)
            (3 * value).backward()
            found.append((value.detach(), logits.grad))
        torch.testing.assert_close(*found)
        assert found[0][1].dtype == dtype

    @pytest.mark.parametrize("fmt", ["bf16", "e4m3"])
    def test_a_stalled_sum_makes_the_loss_small_and_all_gradients_large(self, fmt):
        """Equal logits: the sum ends at 2^(m + 1) whatever v is, so each of v words has the probability 1/2^(m + 1) and is pushed down by that."""
        stall = 2 ** (floats.named(fmt).mantissa_bits + 1)
        logits = torch.full((20, 600), 7.0, requires_grad=True)
        loss = precision.cross_entropy(logits, self.TARGETS, fmt)
        loss.backward()
        assert loss.item() == pytest.approx(math.log(stall))
        assert logits.grad.sum(-1).tolist() == pytest.approx([(600 / stall - 1) / 20] * 20)

    def test_the_gradient_is_p_minus_y_with_the_sum_that_was_taken(self):
        logits = self.LOGITS.clone().requires_grad_()
        precision.cross_entropy(logits, self.TARGETS, "bf16").backward()
        terms = (self.LOGITS - self.LOGITS.amax(-1, keepdim=True)).exp()
        sums_ = torch.stack(
            [sum(row, torch.zeros((), dtype=torch.bfloat16)) for row in terms.bfloat16()]
        ).float()
        expected = (terms / sums_[:, None] - F.one_hot(self.TARGETS, 600)) / 20
        torch.testing.assert_close(logits.grad, expected)

    def test_far_apart_logits_neither_overflow_nor_divide_by_zero(self):
        logits = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
        loss = precision.cross_entropy(logits, torch.tensor([0]), "fp16")
        loss.backward()
        assert loss.item() == 0 and logits.grad.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: precision.cross_entropy(
                torch.ones(2, 3), torch.zeros(2, dtype=torch.long), "fp12"
            ),
            ValueError,
            "unknown format 'fp12'",
        ),
        (lambda: precision.round_to(torch.ones(2), "fp12"), ValueError, "unknown format 'fp12'"),
        (
            lambda: precision.round_to(torch.ones(2).to(torch.float8_e5m2), "fp16"),
            TypeError,
            "got torch.float8",
        ),
        (
            lambda: precision.round_to(torch.ones(2), "fp16", mode="up"),
            ValueError,
            "mode='up' or overflow='ieee' is not in",
        ),
        (
            lambda: precision.round_to(torch.ones(2), "fp16", overflow="wrap"),
            ValueError,
            "mode='nearest' or overflow='wrap' is not in",
        ),
        (
            lambda: precision.round_to(torch.ones(2), "fp16", mode="stochastic"),
            ValueError,
            "pass generator=",
        ),
        (
            lambda: precision.running_sum(torch.ones(2), FloatFormat("p30", 8, 30)),
            ValueError,
            "30 mantissa bits",
        ),
    ],
)
def test_bad_input_is_named_and_remedied(call, error, says):
    with pytest.raises(error, match=says):
        call()
