"""The figure grammar: nothing is cut, nothing overlaps, everything is said in words too, and the numbers drawn are the numbers given."""

import dataclasses
import io
import itertools
import math
import re
import subprocess
import sys
from types import SimpleNamespace

import matplotlib
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from labutils import collectives, config, floats
from labutils.ledger import Ledger, Line
from labutils.teach import plots
from labutils.teach.plots import style
from labutils.timeline import History, Moment
from labutils.trace import Event, Trace
from labutils.world import World

H100 = config.Hardware.named("H100")
TINY = dataclasses.replace(H100, name="a tiny device", memory=20_000_000)


def ledger(*lines):
    return Ledger(Line(name, amount, component=name, axis=axis) for name, amount, axis in lines)


def segment(*blocks):
    """Blocks of so many MiB: used under a name, free without one."""
    return [
        SimpleNamespace(size=size * 2**20, state="used" if name else "free", name=name)
        for size, name in blocks
    ]


HOLES = [segment((5, "batch"), (5, ""), (10, "weights")), segment((20, ""))]
UNMAPPED = SimpleNamespace(size=2**40, state="unmapped", name="")


def sent(*amounts):
    return Ledger(Line("op", amount, axis="dp", rank=rank) for rank, amount in enumerate(amounts))


def ring(n, steps, nbytes=16_000_000, op="all_reduce_ring"):
    return Trace(
        [
            [Event(op, "dp", to=(i + 1) % n, sent=nbytes, source=(i - 1) % n, received=nbytes)]
            * steps
            for i in range(n)
        ]
    )


def star(n, nbytes=64_000_000):
    hub = [Event("naive", "dp", source=k, received=nbytes) for k in range(1, n)] + [
        Event("naive", "dp", to=k, sent=nbytes) for k in range(1, n)
    ]
    return Trace(
        [hub]
        + [
            [
                Event("naive", "dp", to=0, sent=nbytes),
                Event("naive", "dp", source=0, received=nbytes),
            ]
        ]
        * (n - 1)
    )


def two_steps():
    """A history with the shape of two training steps: activations come and go, optimizer state comes and stays."""
    moments, optimizer = [Moment("start", "", ledger(("weights", 40, "")))], 0
    for _ in range(2):
        for phase, heights in (
            ("forward", range(0, 90, 10)),
            ("backward", range(90, -1, -5)),
            ("optimizer", [0] * 12),
        ):
            optimizer = 80 if phase == "optimizer" else optimizer
            for height in heights:
                parts = [
                    ("weights", 40, ""),
                    ("optimizer", optimizer, ""),
                    ("activations", height, ""),
                    ("buffers", height % 20, ""),
                ]
                moments.append(
                    Moment(
                        phase,
                        "mm",
                        ledger(*((name, amount * 10**5, axis) for name, amount, axis in parts)),
                    )
                )
    return History(moments)


SIZES = [2**k for k in range(8, 31)]
LINK = config.Link(latency=25e-6, bandwidth=25e9)
COSTS = {
    "naive": [14 * LINK.time(size) for size in SIZES],
    "ring": [14 * LINK.time(size / 8) for size in SIZES],
    "tree": [6 * LINK.time(size) for size in SIZES],
    "halving_doubling": [6 * LINK.latency + 1.8 * size / LINK.bandwidth for size in SIZES],
}
PARAMETERS = 1_557_611_200
FORMATS = [
    floats.FP32,
    floats.TF32,
    floats.BF16,
    floats.FP16,
    floats.E5M2,
    floats.E4M3,
    floats.E2M3,
    floats.E2M1,
]
EASY = dict(xlabel="step", ylabel="loss (nats per token)")

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
        expandable_segments=[[*HOLES[0], UNMAPPED]],
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
    "bits": lambda: plots.bits(floats.E4M3, 0b1_0111_100),
    "bits of fp32": lambda: plots.bits(floats.FP32, floats.FP32.encode(0.1)),
    "bits of e2m1": lambda: plots.bits(floats.E2M1, 7),
    "number line": lambda: plots.number_line(
        [floats.E4M3, floats.E5M2, floats.E2M1], low=-6, high=6, mark=2.7
    ),
    "dynamic range": lambda: plots.dynamic_range(FORMATS),
    "relative error": lambda: plots.relative_error(FORMATS),
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
    "curves, narrow": lambda: plots.curves(
        [1, 2, 4],
        title="A long title on a narrow figure wraps",
        width=style.NARROW,
        a=[3, 2, 1],
        b=[3, 2, 1.02],
        **EASY,
    ),
}
each_figure = pytest.mark.parametrize("draw", GALLERY.values(), ids=GALLERY.keys())


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
def test_no_text_is_cut_and_no_two_texts_overlap(draw):
    figure = draw().figure
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
def test_a_figure_says_in_words_what_it_shows_and_is_the_same_every_time(draw):
    picture, again = draw(), draw()
    assert picture.svg == again.svg
    assert repr(picture) == picture.alt == again.alt and len(picture.alt) > 40
    assert picture.figure.texts[0].get_text()  # the title


def test_a_picture_is_an_image_on_a_white_card():
    picture = plots.bits(floats.E4M3, 56)
    card = r'<figure style="[^"]*background:#fff[^"]*"><img alt="[^"]+" width="\d+" style="[^"]*" src="data:image/%s"></figure>'
    assert re.fullmatch(card % "png;base64,[A-Za-z0-9+/=]+", picture.html())
    assert re.fullmatch(card % r"svg\+xml,[^\"<>#\n]+", picture.html(vector=True))
    assert Image.open(io.BytesIO(picture.png)).width == pytest.approx(
        picture.figure.get_size_inches()[0] * 192, abs=1
    )
    assert picture.png == plots.bits(floats.E4M3, 56).png


def test_a_picture_is_saved_as_what_its_name_says(tmp_path):
    picture = plots.bits(floats.E2M1, 7)
    picture.save(tmp_path / "a.png")
    picture.save(str(tmp_path / "a.svg"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (
        tmp_path / "a.svg"
    ).read_text()
    with pytest.raises(ValueError, match=r"'.jpg'.*\.png or \.svg"):
        picture.save(tmp_path / "a.jpg")


def test_alt_text_is_mandatory_and_escaped():
    for alt in ("", "  ", None):
        with pytest.raises(ValueError, match="alt text"):
            plots.Picture(Figure(), alt)
    with pytest.raises(TypeError, match="matplotlib Figure, got str"):
        plots.Picture("figure", "alt")
    assert 'alt="a &quot;b&quot; &lt;c&gt;"' in plots.Picture(Figure(), 'a "b"\n <c>').html()


def test_drawing_needs_neither_pyplot_nor_torch():
    code = "import sys; from labutils import floats; from labutils.teach import plots; plots.bits(floats.E2M1, 7).png; print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
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
        *style.COMPONENTS.values(),
        *style.PASSES.values(),
        *style.FIELDS.values(),
        *style.NEUTRAL,
        *style.SERIES,
    ]:
        one, other = sorted((luminance(fill), luminance(style.on(fill))))
        assert (other + 0.05) / (one + 0.05) >= 4.5, fill


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 1)), min_size=1, max_size=9))
def test_spread_labels_neither_touch_nor_change_their_order(labels):
    places, sizes = zip(*labels, strict=True)
    found = style.spread(places, sizes, 0, 10)
    order = sorted(range(len(places)), key=lambda i: (places[i], found[i]))
    for a, b in itertools.pairwise(order):
        assert found[b] - found[a] >= (sizes[a] + sizes[b]) / 2 - 1e-9
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


# What is drawn is what was given.


def test_bars_are_as_long_as_the_bytes_and_hatched_by_their_axis():
    picture = plots.memory_bars(
        a=ledger(("weights", 6_000_000, ""), ("optimizer", 3_000_000, "dp")),
        b=ledger(("weights", 1_000_000, "")),
    )
    bars = picture.figure.axes[0].patches
    assert [bar.get_width() for bar in bars] == [6, 3, 1] and bars[1].get_x() == 6
    assert bars[1].get_hatch() and not bars[0].get_hatch()
    assert "a holds 9× what b holds" in picture.figure.texts[0].get_text()
    assert "weights 6.00 MB and optimizer 3.00 MB, 9.00 MB in all" in picture.alt


def test_titles_say_what_fits():
    small, large = ledger(("weights", 10**9, "")), ledger(("weights", 10**12, ""))
    assert (
        plots.memory_bars(small=small, large=large, capacity=H100).figure.texts[0].get_text()
        == "Only small fits in the 80.0 GB of one H100"
    )
    assert (
        plots.memory_bars(large=large, capacity=H100)
        .figure.texts[0]
        .get_text()
        .startswith("It does not fit")
    )


def test_the_timeline_marks_the_fullest_moment():
    history = two_steps()
    picture = plots.memory_timeline(history)
    marker = next(line for line in picture.figure.axes[0].lines if line.get_marker() == "v")
    (place,), (height,) = marker.get_data()
    assert history.moments[place] is history.peak and height * 1e6 == pytest.approx(
        history.peak.ledger.total
    )
    assert {"weights", "activations", "optimizer", "forward", "backward"} <= {
        text.get_text() for text in picture.figure.axes[0].texts
    }


def test_a_memory_map_draws_blocks_end_to_end_in_binary_units():
    picture = plots.memory_map(
        title="t", asked=15 * 2**20, capacity=64 * 2**20, now=[[*HOLES[0], UNMAPPED], HOLES[1]]
    )
    axes = picture.figure.axes[0]
    widths = [patch.get_width() for patch in axes.patches]
    assert widths == pytest.approx(
        [5, 5, 10, 20, 20, 20, 15]
    )  # three blocks and their segment, one block and its segment, the request
    assert [bool(patch.get_hatch()) for patch in axes.patches] == [
        False,
        True,
        False,
        False,
        True,
        False,
        False,
    ]
    assert axes.patches[4].get_x() > axes.patches[2].get_x() + 10 and axes.get_xlabel().endswith(
        "(MiB)"
    )
    assert next(line for line in axes.lines if line.get_linestyle() == "--").get_xdata()[0] == 64
    assert (
        "now: 2 segments, 15.0 MiB in use, 25.0 MiB free in 2 blocks, the largest 20.0 MiB. A request of 15.0 MiB"
        in picture.alt
    )
    assert (
        "64.0 MiB of the device" in picture.alt
        and "nothing free" in plots.memory_map(title="t", now=[segment((1, "a"))]).alt
    )


def test_comm_bars_draw_every_rank_and_the_guess_as_a_hollow_diamond():
    picture = plots.comm_bars(naive=sent(192, 64, 64, 64), ring=sent(96, 96, 96, 96), guess=64)
    axes = picture.figure.axes[0]
    assert [bar.get_height() for bar in axes.patches] == [192, 64, 64, 64, 96, 96, 96, 96]
    (guess,) = axes.lines
    assert (
        guess.get_marker() == "D"
        and guess.get_markerfacecolor() == "none"
        and list(guess.get_ydata()) == [64]
    )
    assert (
        picture.figure.texts[0].get_text()
        == "The busiest rank sends 2× as much in naive as in ring"
    )


def test_messages_say_where_the_load_is():
    assert (
        plots.messages(star(4)).figure.texts[0].get_text()
        == "6 steps, and 100% of all bytes pass through rank 0"
    )
    assert (
        plots.messages(ring(4, 6)).figure.texts[0].get_text()
        == "6 steps, and every rank carries the same load"
    )


@settings(max_examples=10)
@given(st.floats(1e3, 1e8), st.integers(2, 40))
def test_the_crossing_of_two_costs_is_found(crossing, points):
    sizes = [10 ** (2 + 7 * k / points) for k in range(points + 1)]
    picture = plots.cost_curves(
        sizes,
        fast_start=[size**1.0 for size in sizes],
        fast_end=[math.sqrt(size * crossing) for size in sizes],
    )
    (line,) = [line for line in picture.figure.axes[0].lines if line.get_linestyle() == ":"]
    assert line.get_xdata()[0] == pytest.approx(crossing, rel=1e-6)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_the_ring_fills_every_piece(n):
    def summed(frame):
        return [
            [int(count) for count in mine.split()]
            for mine in re.findall(
                r"rank \d: ([\d ]+)", re.search(r'aria-label="([^"]*)"', frame)[1]
            )
        ]

    animation = plots.ring_animation(ring(n, 2 * (n - 1)))
    assert len(animation.frames) == len(animation.labels) == 2 * (n - 1) + 1
    assert summed(animation.frames[0]) == [[1] * n] * n
    half = summed(animation.frames[n - 1])
    assert all(
        half[rank][rank] == n and sum(count == n for count in half[rank]) == 1 for rank in range(n)
    )  # rank i has finished piece i
    assert summed(animation.frames[-1]) == [[n] * n] * n
    gathered = plots.ring_animation(ring(n, n - 1, op="all_gather_ring"))
    assert summed(gathered.frames[0]) == [
        [int(piece == rank) for piece in range(n)] for rank in range(n)
    ]
    assert summed(gathered.frames[-1]) == [[1] * n] * n


def test_the_ring_is_drawn_from_a_real_trace():
    import torch

    with World(4) as world:
        world.run(lambda rank: collectives.all_reduce_ring(torch.ones(1000), rank.comm("dp")))
        animation = plots.ring_animation(world.trace)
    assert len(animation.frames) == 7 and animation.labels[-1].endswith(
        "sent so far: 6.00 kB a rank."
    )
    html = animation._repr_html_()
    assert html.count('class="lu-frame"') == 7 and html.count('class="lu-frame" hidden') == 6
    assert html == plots.ring_animation(world.trace)._repr_html_() and "http" not in html.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_a_band_spans_the_runs():
    picture = plots.curves([0, 1], title="t", runs=[[1, 2], [3, 6]], xlabel="x", ylabel="y")
    (band,) = picture.figure.axes[0].collections
    assert band.get_datalim(picture.figure.axes[0].transData).intervaly.tolist() == [1, 6]
    assert picture.figure.axes[0].lines[0].get_ydata().tolist() == [2, 4]


def test_a_series_may_have_places_of_its_own_and_y_a_unit():
    picture = plots.curves(
        title="t",
        measured={"line": ([1], [5.0])},
        xlabel="x",
        ylabel="y",
        unit="B",
        log="xy",
        line=([1, 10], [5.0, 50_000.0]),
    )
    assert (
        picture.alt
        == "t. y against x. line goes from 5 B at 1 to 50.0 kB at 10; line, measured: 5 B."
    )
    assert [line.get_xydata().tolist() for line in picture.figure.axes[0].lines] == [
        [[1, 5], [10, 50_000]],
        [[1, 5]],
    ]


BAD = {
    "no ledger": (lambda: plots.memory_bars(), "at least one ledger"),
    "not a ledger": (lambda: plots.memory_bars(a=3), "a: a bar is drawn from a Ledger, got int"),
    "an empty ledger": (lambda: plots.memory_bars(a=Ledger()), "a: this ledger is empty"),
    "negative bytes": (
        lambda: plots.memory_bars(a=ledger(("weights", 10, ""), ("gradients", -3, ""))),
        "negative",
    ),
    "a map of nothing": (lambda: plots.memory_map(title="t"), "at least one moment"),
    "a map before the first request": (
        lambda: plots.memory_map(title="t", now=[[UNMAPPED]]),
        "nothing is reserved",
    ),
    "no rank": (lambda: plots.comm_bars(a=ledger(("weights", 10, ""))), "a: a line without a rank"),
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
    "too few times": (
        lambda: plots.cost_curves([1, 2], ring=[1.0]),
        "ring: 2 sizes need as many times, got 1",
    ),
    "a size of 0": (lambda: plots.cost_curves([0, 2], ring=[1.0, 2.0]), "above 0"),
    "measured without a line": (
        lambda: plots.cost_curves([1, 2], measured={"tree": ([1], [1])}, ring=[1.0, 2.0]),
        "measured tree",
    ),
    "runs of two lengths": (
        lambda: plots.curves([0, 1], title="t", a=[[1, 2], [1]], **EASY),
        "a: a series is",
    ),
    "a short series": (lambda: plots.curves([0, 1], title="t", a=[1], **EASY), "a: 2 places on x"),
    "no series": (lambda: plots.curves([0, 1], title="t", **EASY), "at least one series"),
    "no place": (lambda: plots.curves(title="t", a=[1, 2], **EASY), "a: 0 places on x"),
    "0 on a logarithmic axis": (
        lambda: plots.curves([0, 1], title="t", log="x", a=[1, 2], **EASY),
        "above 0, got 0 on x",
    ),
    "an unknown axis": (lambda: plots.curves([0, 1], title="t", log="z", a=[1, 2], **EASY), "'z'"),
    "a frame without label": (
        lambda: plots.Animation(["<svg></svg>"], [], "alt"),
        "1 frames and 0 labels",
    ),
    "no frame": (lambda: plots.Animation([], [], "alt"), "at least one frame"),
}


@pytest.mark.parametrize("draw, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_named_with_its_remedy(draw, message):
    with pytest.raises((ValueError, TypeError), match=message):
        draw()
