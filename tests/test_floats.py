"""One description of all formats: every code of every small one against ml_dtypes, numpy, the standard library."""

import math
import struct
from bisect import bisect_left
from fractions import Fraction
from itertools import pairwise
from random import Random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labutils import floats
from labutils.floats import FloatFormat

# Ours beside the same format of numpy or ml_dtypes; the last three show that a format of one's own is one line.
PEERS = [
    (floats.FP16, np.float16),
    (floats.BF16, ml_dtypes.bfloat16),
    (floats.E4M3, ml_dtypes.float8_e4m3fn),
    (floats.E5M2, ml_dtypes.float8_e5m2),
    (floats.E4M3FNUZ, ml_dtypes.float8_e4m3fnuz),
    (floats.E5M2FNUZ, ml_dtypes.float8_e5m2fnuz),
    (floats.E3M2, ml_dtypes.float6_e3m2fn),
    (floats.E2M3, ml_dtypes.float6_e2m3fn),
    (floats.E2M1, ml_dtypes.float4_e2m1fn),
    (floats.E8M0, ml_dtypes.float8_e8m0fnu),
    (FloatFormat("1-3-4", 3, 4), ml_dtypes.float8_e3m4),
    (FloatFormat("1-4-3", 4, 3), ml_dtypes.float8_e4m3),
    (
        FloatFormat("b11", 4, 3, bias=11, nan="negative_zero"),
        ml_dtypes.float8_e4m3b11fnuz,
    ),
]
SMALL = [(fmt, peer) for fmt, peer in PEERS if fmt.bits <= 8]
ids = [fmt.name for fmt, _ in PEERS]
small_ids = [fmt.name for fmt, _ in SMALL]


def codes_of(fmt, values, peer):
    """The codes that the peer gives to these values."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values).astype(peer).view(np.uint16 if fmt.bits > 8 else np.uint8)


def same_code(fmt, ours, theirs):
    """Equal codes, or two NaNs: a NaN may carry any payload."""
    return ours == theirs or {fmt.fields(int(code)).kind for code in (ours, theirs)} == {"nan"}


def hard_cases(fmt):
    """Every value, every midpoint, one fp32 step to either side of each, and what lies around the largest value."""
    values = np.array([v for v in fmt.representable()])
    middles = (values[1:] + values[:-1]) / 2
    ends = [fmt.max + fmt.spacing(fmt.max) * k / 4 for k in (1, 2, 3, 4, 8)] + [
        1e30,
        0.0,
        fmt.min_subnormal / 2,
    ]
    with np.errstate(over="ignore"):
        points = np.concatenate([values, middles, ends, np.negative(ends)]).astype(np.float32)
        around = [np.nextafter(points, np.float32(side)) for side in (-np.inf, np.inf)]
    return np.concatenate([points, *around, np.array([np.inf, -np.inf, -0.0, np.nan], np.float32)])


@pytest.mark.parametrize(("fmt", "peer"), PEERS, ids=ids)
class TestAgainstPeers:
    def test_every_code_decodes_to_the_peer_s_value(self, fmt, peer):
        storage = np.uint16 if fmt.bits > 8 else np.uint8
        with np.errstate(invalid="ignore"):  # NaNs that signal
            theirs = np.arange(1 << fmt.bits, dtype=storage).view(peer).astype(np.float64)
        ours = np.array([fmt.decode(code) for code in range(1 << fmt.bits)])
        np.testing.assert_array_equal(ours, theirs)
        assert (np.signbit(ours) == np.signbit(theirs))[~np.isnan(ours)].all()

    def test_every_code_survives_a_round_trip(self, fmt, peer):
        for code in range(1 << fmt.bits):
            assert (
                same_code(fmt, fmt.encode(fmt.decode(code)), code) or fmt.fields(code).kind == "nan"
            )

    def test_limits(self, fmt, peer):
        info = ml_dtypes.finfo(peer)
        assert (fmt.max, fmt.min_normal, fmt.eps) == (info.max, info.smallest_normal, info.eps)
        assert fmt.min_subnormal == info.smallest_subnormal

    def test_counts(self, fmt, peer):
        kinds = [fmt.fields(code).kind for code in range(1 << fmt.bits)]
        infinite, nan = kinds.count("inf"), kinds.count("nan")
        assert fmt.counts == (len(kinds) - infinite - nan, infinite, nan)


@pytest.mark.parametrize(("fmt", "peer"), SMALL, ids=small_ids)
def test_hard_cases_encode_as_the_peer_does(fmt, peer):
    for x, theirs in zip(cases := hard_cases(fmt), codes_of(fmt, cases, peer), strict=True):
        if fmt is floats.E8M0 and x == 0:
            assert (
                fmt.decode(fmt.encode(x)) == fmt.min_normal
            )  # torch's choice; ml_dtypes makes 0 a NaN
        elif fmt is floats.E8M0 and 2**-127 < x < 1.5 * 2**-127:
            assert (
                fmt.encode(x) == 0 and theirs == 1
            )  # the nearest; both peers round up in this one gap
        elif math.isnan(x) and fmt.nan == "none":
            with pytest.raises(ValueError, match="has no NaN"):
                fmt.encode(x)  # ml_dtypes makes NaN a −0
        else:
            assert same_code(fmt, fmt.encode(x), theirs), x


def test_fp64_and_fp32_are_the_machine_s():
    random = Random(0)
    for _ in range(3000):
        bits = random.getrandbits(64)
        (x,) = struct.unpack("<d", struct.pack("<Q", bits))
        assert floats.FP64.encode(x) == bits or math.isnan(x)
        assert math.isnan(x) or floats.FP64.decode(bits) == x
        narrow = np.float32(random.uniform(-1, 1) * 2.0 ** random.randint(-155, 128))
        assert floats.FP32.encode(float(narrow)) == narrow.view(np.uint32)


@pytest.mark.parametrize(("fmt", "narrow"), [(floats.FP32, np.float32), (floats.FP16, np.float16)])
def test_float64_ties_round_once(fmt, narrow):
    random = Random(1)
    for _ in range(2000):
        code = random.randrange(fmt.encode(fmt.max))
        middle = (fmt.decode(code) + fmt.decode(code + 1)) / 2
        for x in (middle, math.nextafter(middle, 0), math.nextafter(middle, math.inf)):
            assert fmt.round(x) == narrow(x)


def test_a_fraction_no_float_can_hold_is_rounded_once():
    tie = Fraction(1) + Fraction(1, 2**11)
    assert floats.FP16.round(tie) == 1
    assert floats.FP16.round(tie + Fraction(1, 10**100)) == 1 + 2**-10
    assert floats.FP16.round(tie - Fraction(1, 10**100)) == 1


formats = st.sampled_from([fmt for fmt, _ in SMALL if fmt.signed])
reals = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.fractions(-9, 9)


@given(formats, reals, st.sampled_from(["nearest", "zero"]))
def test_rounding_agrees_with_a_search_through_all_values(fmt, x, mode):
    values = fmt.representable()
    i = bisect_left(values, x)
    below, above = values[i - 1], values[min(i, len(values) - 1)]
    if abs(x) > fmt.max:
        expected = math.copysign(fmt.max, x)
    elif x in (below, above):
        expected = x
    elif mode == "zero":
        expected = min(below, above, key=abs)
    else:
        # A tie goes to the code that ends in 0, which is the even significand.
        expected = min(
            below, above, key=lambda v: (abs(Fraction(v) - Fraction(x)), fmt.encode(v) & 1)
        )
    assert fmt.round(x, mode=mode, overflow="saturate") == expected


@given(formats, reals, reals)
def test_rounding_is_monotone_idempotent_and_odd(fmt, x, y):
    def rounded(v):
        return fmt.round(v, overflow="saturate")

    assert rounded(rounded(x)) == rounded(x)
    assert rounded(-x) == -rounded(x)
    assert rounded(min(x, y)) <= rounded(max(x, y))


@given(formats, st.integers(0, 2**31), st.floats(0, 1, exclude_max=True))
def test_stochastic_rounding_returns_a_neighbor(fmt, seed, place):
    values = fmt.representable()
    i = Random(seed).randrange(len(values) - 1)
    x = Fraction(values[i]) + Fraction(place) * (Fraction(values[i + 1]) - Fraction(values[i]))
    possible = {values[i], values[i + 1]} if place else {values[i]}
    assert fmt.round(x, mode="stochastic", random=Random(seed)) in possible


def test_stochastic_rounding_is_unbiased():
    n, random = 4000, Random(0)
    for place in (0.1, 0.5, 0.9):
        ups = sum(
            floats.E4M3.round(16 + 2 * place, mode="stochastic", random=random) == 18
            for _ in range(n)
        )
        assert abs(ups - n * place) < 5 * math.sqrt(
            n * place * (1 - place)
        )  # 5 standard deviations


@pytest.mark.parametrize(
    ("fmt", "x", "ieee", "saturate"),
    [
        (floats.FP16, 65519.99, 65504, 65504),
        (floats.FP16, 65520, math.inf, 65504),
        (floats.E5M2, -1e9, -math.inf, -57344),
        (floats.E4M3, 464, 448, 448),
        (floats.E4M3, 464.001, math.nan, 448),
        (floats.E4M3, -math.inf, math.nan, -448),
        (floats.E2M1, math.inf, 6, 6),
    ],
)
def test_overflow_goes_where_it_says(fmt, x, ieee, saturate):
    np.testing.assert_equal(fmt.round(x), float(ieee))
    assert fmt.round(x, overflow="saturate") == saturate


def test_toward_zero_stops_at_the_largest_value_but_infinity_stays():
    assert floats.FP16.round(1e9, mode="zero") == 65504
    assert floats.FP16.round(-math.inf, mode="zero") == -math.inf
    assert floats.E4M3.round(-1e9, mode="zero") == -448


def test_spacing_is_the_distance_to_the_next_value():
    for fmt in (floats.E4M3, floats.E2M1, floats.E5M2FNUZ):
        values = [v for v in fmt.representable() if v >= 0]
        assert [fmt.spacing(v) for v in values[:-1]] == [b - a for a, b in pairwise(values)]
    assert math.isnan(floats.FP16.spacing(70000)) and math.isnan(floats.FP16.spacing(math.nan))


def test_a_block_shares_its_scale():
    scale, codes = floats.MXFP4.encode([5.0, -0.75, 0.0, 1.1])
    assert floats.E8M0.decode(scale) == 1
    assert floats.MXFP4.decode(scale, codes) == [
        4.0,
        -1.0,
        0.0,
        1.0,
    ]  # 5 and 0.75 are ties: to even
    assert floats.MXFP8.decode(*floats.MXFP8.encode([1000.0, 1.0])) == [
        896.0,
        1.0,
    ]  # 500 saturates at 448
    assert floats.MXFP4.decode(*floats.MXFP4.encode([0.0] * 32)) == [0.0] * 32
    assert all(math.isnan(v) for v in floats.MXFP4.decode(*floats.MXFP4.encode([1.0, math.nan])))


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=32))
def test_the_largest_of_a_block_is_never_off_by_more_than_a_quarter(values):
    scale, codes = floats.MXFP4.encode(values)
    largest = max(values, key=abs)
    if abs(largest) > 1e-35:
        assert floats.MXFP4.decode(scale, codes)[values.index(largest)] == pytest.approx(
            largest, rel=0.25
        )


def test_nvfp4_is_what_its_definition_says():
    """Blocks of 16, a scale in e4m3 of max|v| / 6; Source: NVIDIA, arXiv:2509.25149."""
    nvfp4 = floats.NVFP4
    assert (nvfp4.block_size, nvfp4.bits_per_value) == (16, 4.5)
    values = np.random.default_rng(0).normal(size=(50, 16)).astype(np.float32)
    values[1] = 0
    for row in values:
        unit = (np.abs(row).max() / np.float32(6)).astype(ml_dtypes.float8_e4m3fn).astype(float)
        elements = (row / unit if unit else 0 * row).astype(ml_dtypes.float4_e2m1fn).astype(float)
        assert nvfp4.decode(*nvfp4.encode(row.tolist())) == (unit * elements).tolist()
    assert nvfp4.decode(*nvfp4.encode([1e6, 1e-6])) == [448 * 6, 0.0]
    assert nvfp4.decode(*nvfp4.encode([1e-6, 0.0])) == [0.0, 0.0]
    assert all(math.isnan(v) for v in nvfp4.decode(*nvfp4.encode([1.0, math.inf])))


@pytest.mark.parametrize("kind", [np.int8, np.uint8])
def test_a_format_of_numpy_integers_is_that_of_ints(kind):
    """An integer of 8 bits overflows in 2**8, and is not negative where it has no sign."""
    fp32 = FloatFormat("fp32", kind(8), kind(23), bias=kind(127))
    assert fp32 == floats.FP32 and fp32.decode(np.int64(0x40490FDB)) == np.float32(math.pi)
    assert FloatFormat("FP32", kind(8), kind(23)).max == floats.FP32.max
    assert floats.E4M3.decode(kind(100)) == floats.E4M3.decode(100)
    assert (floats.IntFormat("i", kind(8)).min, floats.IntFormat("i", kind(8)).max) == (-128, 127)
    blocks = floats.BlockFormat("blocks", floats.E2M1, kind(16))
    assert type(blocks.block_size) is int and blocks.bits_per_value == 4.5


def test_names():
    assert all(floats.named(name) is fmt for name, fmt in floats.FORMATS.items())
    assert floats.named(floats.E4M3) is floats.E4M3


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: floats.named("fp12"),
            ValueError,
            "unknown format 'fp12': choose one of fp64, fp32",
        ),
        (lambda: floats.named(8), ValueError, "unknown format 8: choose one of fp64, fp32"),
        (lambda: FloatFormat("x", 0, 3), ValueError, "exponent_bits must be at least 1, got 0"),
        (lambda: FloatFormat("x", 12, 3), ValueError, "exponent_bits must be at most 11, got 12"),
        (lambda: FloatFormat("x", 4, -1), ValueError, "mantissa_bits must be at least 0, got -1"),
        (
            lambda: FloatFormat("x", 4, 3.0),
            TypeError,
            "mantissa_bits must be a whole number, got 3.0",
        ),
        (
            lambda: FloatFormat("x", 4, 3, bias=math.nan),
            TypeError,
            "bias must be a whole number, got nan",
        ),
        (lambda: FloatFormat("x", 4, 3, bias=1200), ValueError, "choose a bias nearer to 7"),
        (
            lambda: FloatFormat("x", 4, 3, nan="many"),
            ValueError,
            "nan='many' is unknown: choose one of 'ieee'",
        ),
        (lambda: FloatFormat("x", 1, 3), ValueError, "leave no normal number"),
        (lambda: floats.E4M3.decode(256), ValueError, "code of e4m3 must be at most 255, got 256"),
        (lambda: floats.E4M3.decode(-1), ValueError, "code of e4m3 must be at least 0, got -1"),
        (lambda: floats.E4M3.decode(1.0), TypeError, "code of e4m3 must be a whole number"),
        (lambda: floats.E4M3.encode("1"), TypeError, "cannot encode '1'"),
        (
            lambda: floats.E4M3.encode(1, mode="up"),
            ValueError,
            "mode='up' is unknown: choose one of 'nearest'",
        ),
        (lambda: floats.E4M3.encode(1, overflow="wrap"), ValueError, "overflow='wrap' is unknown"),
        (lambda: floats.E4M3.encode(1, mode="stochastic"), TypeError, "needs random=random.Random"),
        (lambda: floats.E2M1.encode(math.nan), ValueError, "e2m1 has no NaN"),
        (lambda: floats.FP32.representable(), ValueError, "too many to list"),
        (lambda: floats.IntFormat("int0", 0), ValueError, "bits must be at least 1, got 0"),
        (
            lambda: floats.MXFP4.encode([1.0] * 33),
            ValueError,
            "encodes 1 to 32 values at a time, got 33",
        ),
    ],
)
def test_bad_input_is_named_and_remedied(call, error, says):
    with pytest.raises(error, match=says.replace("(", r"\(")):
        call()
