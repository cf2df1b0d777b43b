"""The figure grammar: nothing is cut, nothing overlaps, everything is said in words too."""

import io
import itertools
import math
import re
import subprocess
import sys

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from pictures import (
    CHAIN,
    COSTS,
    EASY,
    FORMATS,
    H100,
    HOLES,
    LOADS,
    MARKS,
    PARAMETERS,
    SIZES,
    TIMELINES,
    TINY,
    ledger,
    occupancy,
    ring,
    segment,
    sent,
    star,
    timeline,
    two_steps,
)
from PIL import Image

from labutils import checkpointing, floats, schedule
from labutils.ledger import Ledger
from labutils.schedule import Durations, simulate
from labutils.teach import plots
from labutils.teach.plots import draw, style
from labutils.timeline import Occupancy, Timeline
from labutils.trace import Trace

GALLERY = {
    "memory bars": lambda: plots.memory_bars(
        fp32=ledger(
            ("weights", 4 * PARAMETERS, ""),
            ("gradients", 4 * PARAMETERS, ""),
            ("optimizer", 8 * PARAMETERS, ""),
            ("activations", 60 * 10**9, ""),
        ),
        mixed_precision=ledger(
            ("weights", 2 * PARAMETERS, ""),
            ("gradients", 2 * PARAMETERS, ""),
            ("optimizer", 12 * PARAMETERS, ""),
        ),
        zero_1=ledger(
            ("weights", 2 * PARAMETERS, ""),
            ("optimizer", 3 * PARAMETERS, "dp"),
            ("temporary buckets", 6 * 10**8, ""),
        ),
        zero_1_and_slices=ledger(
            ("weights", PARAMETERS // 2, "tp"),
            ("embedding on every rank", 5 * 10**9, ""),
            ("optimizer", PARAMETERS, "dp"),
        ),
        capacity=H100,
    ),
    "memory bar far below capacity": lambda: plots.memory_bars(
        measured=ledger(("weights", 40_000, ""), ("optimizer", 80_004, "")), capacity=H100
    ),
    "memory timeline": lambda: plots.memory_timeline(two_steps()),
    "memory timeline, capacity": lambda: plots.memory_timeline(two_steps(), capacity=TINY),
    "memory map": lambda: plots.memory_map(
        title="Holes", asked=15 * 2**20, before=[segment((20, "weights"))], after=HOLES
    ),
    "memory map, capacity": lambda: plots.memory_map(
        title="A segment that grows",
        capacity=64 * 2**20,
        expandable_segments=[HOLES[0]],
    ),
    "comm bars": lambda: plots.comm_bars(
        naive=sent(192, 64, 64, 64), ring=sent(96, 96, 96, 96), guess=64
    ),
    "comm bars of 8 ranks": lambda: plots.comm_bars(
        naive=sent(448, *[64] * 7),
        tree=sent(192, 64, 128, 64, 64, 64, 64, 64),
        halving_doubling=sent(*[112] * 8),
        ring=sent(*[112] * 8),
        guess=1000,
    ),
    "comm bars and a wild guess": lambda: plots.comm_bars(
        ring=sent(96, 96, 96, 96), guess=123_456_789_000
    ),
    "comm bars of 16 ranks": lambda: plots.comm_bars(ring=sent(*[112_000] * 16)),
    "messages of a ring": lambda: plots.messages(ring(8, 14)),
    "messages of a star": lambda: plots.messages(star(4)),
    "cost curves": lambda: plots.cost_curves(
        SIZES, measured={"ring": (SIZES[::4], COSTS["ring"][::4])}, **COSTS
    ),
    "bits": lambda: plots.bit_pattern(floats.E4M3, 0b1_0111_100),
    "bits of fp32": lambda: plots.bit_pattern(floats.FP32, floats.FP32.encode(0.1)),
    "bits of e2m1": lambda: plots.bit_pattern(floats.E2M1, 7),
    "number line": lambda: plots.number_line(
        [floats.E4M3, floats.E5M2, floats.E2M1], title="t", low=-6, high=6, mark=2.7
    ),
    "dynamic range": lambda: plots.dynamic_range(FORMATS, title="t"),
    "relative error": lambda: plots.relative_error(FORMATS, title="t"),
    "shared grids": lambda: plots.shared_grids(
        alone=([0.2, -0.5, 1.0], [0.25] * 3), in_groups=([0.2, -0.5, 4.0], [0.25, 0.25, 4.0])
    ),
    "curves": lambda: plots.curves(
        range(3),
        title="With loss scaling nothing is lost",
        fp32=[3, 2, 1],
        fp16_with_loss_scaling=[[3, 2.1, 1.1], [3, 2, 1]],
        fp16=[3, 2, 2],
        **EASY,
    ),
    "curves, logarithmic": lambda: plots.curves(
        [1, 2, 4, 8, 16, 32],
        xlabel="batch (samples)",
        ylabel="tokens per second",
        title="Full",
        log="xy",
        roof=[1e3, 2e3, 4e3, 8e3, 8e3, 8e3],
        measured={"roof": [900, 1800, 3500, 6000, 7300, 7500]},
        guess=(16, 9e3),
    ),
    "traffic bars": lambda: plots.traffic_bars(plain=LOADS.scaled(4), tiled=LOADS, guess=2e6),
    "visits": lambda: plots.visits([[5, 0, 2, 1], [3, 3, 1, 1]]),
    "a roofline": lambda: plots.roofline(
        {"A100": (312e12, 2e12), "laptop": (3e11, 4e10)},
        {"plain": (1e12, 4e10), "tiled": (1e12, 2e9), "close to it": (1e12, 2.4e9)},
        title="t",
    ),
    "running sums": lambda: plots.running_sums(
        range(1, 101), fp16=range(1, 101), e2m1=[min(n, 4) for n in range(1, 101)]
    ),
    "gradient noise": lambda: plots.gradient_noise(
        {1: [4.0, 6.0], 2: [2.2, 3.0], 4: [1.0, 1.5], 8: [0.6, 0.55]}, noise=5.0, signal=2.0
    ),
    "exponents": lambda: plots.exponent_histogram(
        {-30: 1, -20: 2, 0: 4, 18: 1}, [floats.FP16, floats.E4M3]
    ),
    "a trade-off": lambda: plots.trade_off(checkpointing.frontier(CHAIN), marks=MARKS, once=18),
    "token weights": lambda: plots.token_weights([6, 2, 9]),
    "plans": lambda: plots.plan_maps(TIMELINES, title="t"),
    "overlap": lambda: plots.overlap(after_backward=timeline(True), during=timeline(False)),
    "gantt": lambda: plots.gantt(simulate(schedule.one_f_one_b(4, 8))),
    "gantt of several, in a row": lambda: plots.gantt(
        simulate(schedule.interleaved(2, 4)), simulate(schedule.zb_h1(2, 4)), barrier=False
    ),
    "gantt of pairs": lambda: plots.gantt(
        simulate(schedule.dualpipe_v(2, 4), Durations(fused=2.5)), unit="ms"
    ),
    "a thin update": lambda: plots.low_rank(4096, 4096, 16),
    "an update of a flat matrix": lambda: plots.low_rank(256, 1024, 64),
    "who holds": lambda: plots.who_holds(
        title="t",
        level_1=[occupancy(1, rank) for rank in range(4)],
        level_3=[occupancy(3, rank) for rank in range(4)],
    ),
}
each_figure = pytest.mark.parametrize("picture", GALLERY.values(), ids=GALLERY.keys())


def texts(figure):
    """Every piece of text that is drawn, with its box in pixels."""
    found = list(figure.texts)
    for axes in figure.axes:
        found += axes.texts
        if axes.axison:
            found += [axes.xaxis.label, axes.yaxis.label]
            for axis, (low, high) in (
                (axes.xaxis, sorted(axes.get_xlim())),
                (axes.yaxis, sorted(axes.get_ylim())),
            ):
                found += [
                    label
                    for place, label in zip(
                        axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True
                    )
                    if low <= place <= high
                ]
    return [
        (text.get_text(), text.get_window_extent())
        for text in found
        if text.get_text() and text.get_visible()
    ]


@each_figure
def test_no_text_is_cut_and_no_two_texts_overlap(picture):
    figure = picture().figure
    with matplotlib.rc_context(style.RC):
        figure.draw_without_rendering()
        written = texts(figure)
    for text, box in written:
        assert (
            box.x0 >= 0 and box.y0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
        ), f"{text!r} leaves the figure"
    for (one, a), (other, b) in itertools.combinations(written, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across <= 1 or down <= 3, (
            f"{one!r} and {other!r} overlap"
        )  # a box is a line of text with its leading: 3 pixels of it are empty


@each_figure
def test_a_figure_says_in_words_what_it_shows_and_is_the_same_every_time(picture):
    picture, again = picture(), picture()
    assert picture.svg == again.svg
    assert repr(picture) == picture.alt == again.alt and len(picture.alt) > 40
    assert picture.figure.texts[0].get_text()  # the title


def test_a_picture_is_an_image_on_a_white_card():
    picture = plots.bit_pattern(floats.E4M3, 56)
    card = r'<figure style="[^"]*background:#fff[^"]*"><img alt="[^"]+" width="\d+" style="[^"]*" src="data:image/%s"></figure>'
    assert re.fullmatch(card % "png;base64,[A-Za-z0-9+/=]+", picture.html())
    assert re.fullmatch(card % r"svg\+xml,[^\"<>#\n]+", picture.html(vector=True))
    assert Image.open(io.BytesIO(picture.png)).width == pytest.approx(
        picture.figure.get_size_inches()[0] * 192, abs=1
    )
    assert picture.png == plots.bit_pattern(floats.E4M3, 56).png


def test_a_picture_keeps_its_words_with_its_pixels():
    picture = plots.memory_bars(a=ledger(("weights", 3 * 10**9, "")), b=ledger(("x", 10**9, "")))
    words = Image.open(io.BytesIO(picture.png)).info["words"].split("|")
    assert {"3.00 GB", "1.00 GB", picture.figure.texts[0].get_text()} <= set(words)


def test_a_picture_keeps_its_letters_legible_on_a_phone():
    wide, narrow = GALLERY["memory bars"]().html(), plots.Picture(Figure((2, 1)), "alt").html()
    assert "min-width:560px" in wide and "min-width:192px" in narrow and "overflow-x:auto" in wide


def test_alt_text_is_mandatory_and_escaped():
    for alt in ("", "  ", None):
        with pytest.raises(ValueError, match="alt text"):
            plots.Picture(Figure(), alt)
    with pytest.raises(TypeError, match="matplotlib Figure, got str"):
        plots.Picture("figure", "alt")
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in plots.Picture(Figure(), 'a "b"\n <c>').html()


def test_drawing_needs_neither_pyplot_nor_torch():
    code = "import sys; from labutils import floats; from labutils.teach import plots; plots.bit_pattern(floats.E2M1, 7).png; print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split() == ["False", "False"]


def test_ink_on_every_fill_can_be_read():
    def luminance(color):
        red, green, blue = (
            (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for c in (v / 255 for v in bytes.fromhex(color[1:]))
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for fill in [
        *style.COMPONENT_COLORS.values(),
        *style.PASS_COLORS.values(),
        *style.FIELDS.values(),
        *style.NEUTRAL,
        *style.SERIES,
    ]:
        one, other = sorted((luminance(fill), luminance(style.on(fill))))
        assert (other + 0.05) / (one + 0.05) >= 4.5, fill


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 1)), min_size=1, max_size=9))
def test_spread_labels_neither_touch_nor_change_their_order(labels):
    places, sizes = zip(*labels, strict=True)
    found = draw.spread(places, sizes, 0, 10)
    order = sorted(range(len(places)), key=lambda i: (found[i], places[i]))
    for a, b in itertools.pairwise(order):
        assert found[b] - found[a] >= (sizes[a] + sizes[b]) / 2 - 1e-9
        assert places[a] - places[b] < max(sizes) / 16
    assert (
        found[order[0]] >= sizes[order[0]] / 2 - 1e-9
        and found[order[-1]] <= 10 - sizes[order[-1]] / 2 + 1e-9
    )
    if all(
        places[b] - places[a] >= (sizes[a] + sizes[b]) / 2 for a, b in itertools.pairwise(order)
    ):
        inside = (
            sizes[order[0]] / 2 <= places[order[0]]
            and places[order[-1]] <= 10 - sizes[order[-1]] / 2
        )
        assert not inside or found == pytest.approx(list(places))


@given(st.permutations([1.0, 1.0 + 1e-6, 1.05, 5.0]))
def test_rounding_does_not_decide_the_order_of_labels(places):
    found = draw.spread(places, [1] * 4, 0, 10)
    close = [place for place, at in sorted(zip(found, places, strict=True)) if at != 5]
    assert close == [place for place, at in zip(found, places, strict=True) if at != 5]


BAD = {
    "an empty ledger": (
        lambda: plots.memory_bars(a=Ledger()),
        "bars show bytes above 0, this ledger holds 0",
    ),
    "negative bytes": (lambda: plots.memory_bars(a=ledger(("weights", -3, ""))), "above 0"),
    "a timeline of nothing": (lambda: plots.overlap(empty=Timeline(())), "nothing was recorded"),
    "no gradient": (lambda: plots.bucket_animation([], bucket_bytes=1), "0 gradients do not fit"),
    "many gradients": (
        lambda: plots.bucket_animation([{f"p{i}": 1 for i in range(17)}], bucket_bytes=1),
        "animate 1 to 16",
    ),
    "many stages": (
        lambda: plots.plan_animation(checkpointing.segments(11, 2).timeline),
        "animate up to 10",
    ),
    "many tiles": (
        lambda: plots.tile_walk([(slice(0, 1), slice(0, 1))], s_q=99, s_k=99),
        "too many",
    ),
    "nothing to count": (lambda: plots.exponent_histogram({}, [floats.FP16]), "nothing to count"),
    "a scale of 3": (
        lambda: plots.exponent_histogram({0: 1}, [floats.FP16], scale=3.0),
        "scale=3.0 is not a power of two",
    ),
    "a scale of 0": (
        lambda: plots.exponent_histogram({0: 1}, [floats.FP16], scale=0.0),
        "scale=0.0 is not a power of two",
    ),
    "nothing held": (
        lambda: plots.who_holds(title="t", level_1=[Occupancy((), 4, {"weights": 4}, {"forward": 0}, 1)]),
        "no spans",
    ),
    "sums of two lengths": (
        lambda: plots.running_sums(range(40), fp16=[1.0]),
        "40 exact sums need as many partial sums",
    ),
    "a map before the first request": (
        lambda: plots.memory_map(title="t", now=[]),
        "nothing is reserved",
    ),
    "a guess in words": (
        lambda: plots.comm_bars(a=sent(1), guess="64 MB"),
        "guess must be a number of bytes",
    ),
    "a guess of NaN": (
        lambda: plots.comm_bars(a=sent(1), guess=math.nan),
        "guess must be a number of bytes",
    ),
    "no message": (lambda: plots.messages(Trace([[]])), "no messages"),
    "no ring": (lambda: plots.ring_animation(star(4)), "this is no ring"),
    "half a ring": (lambda: plots.ring_animation(ring(4, 5)), "takes 3 steps, or 6"),
    "a large ring": (lambda: plots.ring_animation(ring(9, 16)), "animate up to 8"),
    "runs of two lengths": (
        lambda: plots.curves([0, 1], title="t", a=[[1, 2], [1]], **EASY),
        "a: a series is",
    ),
    "a short series": (lambda: plots.curves([0, 1], title="t", a=[1], **EASY), "a: 2 places on x"),
    "no place": (lambda: plots.curves(title="t", a=[1, 2], **EASY), "a: 0 places on x"),
    "0 on a logarithmic axis": (
        lambda: plots.curves([0, 1], title="t", log="x", a=[1, 2], **EASY),
        "above 0, got 0 on x",
    ),
    "a frame without label": (
        lambda: plots.Animation(["<svg></svg>"], [], "alt"),
        "1 frames and 0 labels",
    ),
    "no frame": (lambda: plots.Animation([], [], "alt"), "at least one frame"),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_named_with_its_remedy(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
