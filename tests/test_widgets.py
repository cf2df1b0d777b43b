"""Control panels: what the page keeps is what the view returns, and nothing a view does gets out of its panel."""

import base64
import html
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from labutils import floats
from labutils.teach import plots, widgets
from labutils.teach.widgets import explore

LIVE = "application/vnd.jupyter.widget-view+json"


def stored(panel):
    """What the page of a panel keeps: its settings, and the views by the number of the state."""
    data = json.loads(
        re.search(r'<script type="application/json">(.*?)</script>', panel.html, re.DOTALL)[1]
    )
    views = json.loads(zlib.decompress(base64.b64decode(data["views"])))
    return data, views


def result(panel):
    """The HTML that the live panel shows."""
    return panel.live.children[-1].value


@pytest.mark.parametrize(
    "given, kind, values, start",
    [
        ((1, 4), "slider", [1, 2, 3, 4], 2),
        ((0, 1, 0.1), "slider", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1], 0.5),
        ((0.0, 1.0), "slider", [k / 50 for k in range(51)], 0.5),
        (range(2, 9, 2), "slider", [2, 4, 6, 8], 4),
        (widgets.log(1, 1000, base=10), "slider", [1, 10, 100, 1000], 10),
        (widgets.log(2**10, 2**12, unit="B", start=2**12), "slider", [1024, 2048, 4096], 4096),
        (["ring", "tree"], "choice", ["ring", "tree"], "ring"),
        ({"one kB": 1000, "one MB": 10**6}, "choice", [1000, 10**6], 1000),
        (True, "checkbox", [False, True], True),
        (widgets.bits(4, start=5), "bits", list(range(16)), 5),
    ],
)
def test_shorthands_become_controls(given, kind, values, start):
    seen = []
    panel = explore(lambda x: seen.append(x) or "shown", x=given)
    control = panel._controls["x"]
    assert (control.kind, list(control.values)) == (kind, values)
    assert panel.live and seen == [start] and type(seen[0]) is type(start)


def test_a_panel_starts_at_the_defaults_of_its_view():
    def view(n=3, algorithm="tree", overlap=True):
        return f"{n} {algorithm} {overlap}"

    panel = explore(view, n=(1, 4), algorithm=["ring", "tree"], overlap=False)
    assert "3 tree True" in result(panel) and "3 tree True" in panel.html
    assert (
        repr(panel)
        == "Control panel: n = 3 (1 … 4) · algorithm = tree (ring, tree) · overlap = yes (no, yes)"
    )


def test_bits_take_their_fields_from_a_format():
    control = widgets.bits(floats.E4M3, start=0b0_0111_000)
    assert (
        control.fields == (("sign", 1), ("exponent", 4), ("mantissa", 3))
        and len(control.values) == 256
    )
    assert control.labels[control.start] == "00111000"
    assert widgets.bits({"all": 2}).fields == (("all", 2),)


def test_a_panel_comes_as_live_widget_html_and_text():
    panel = explore(lambda n: f"<b>{n}</b>", n=(1, 3))
    bundle = panel._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", LIVE}
    assert bundle["text/html"] == panel.html and bundle["text/plain"] == repr(panel)
    assert "http" not in panel.html and "<b>2</b>" in panel.html


def test_the_page_keeps_every_state_as_the_view_returns_it():
    def view(n, algorithm, twice):
        return f"{algorithm}: {n * (1 + twice)} < 9"

    data, views = stored(explore(view, n=(1, 3), algorithm=["ring", "tree"], twice=False))
    shown = [views[state] for state in data["index"]]
    assert shown == [
        view(n, algorithm, twice)
        for n in (1, 2, 3)
        for algorithm in ("ring", "tree")
        for twice in (False, True)
    ]
    assert data["note"] == ""
    assert [control["kind"] for control in data["controls"]] == ["slider", "choice", "checkbox"]


def test_equal_states_are_kept_once():
    data, views = stored(explore(lambda n, unused: f"{n}", n=(1, 3), unused=(1, 5)))
    assert len(data["index"]) == 15 and views == ["1", "2", "3"]


def test_sliders_are_thinned_choices_are_not_and_the_page_says_so():
    calls = []
    panel = explore(
        lambda n, m, kind: calls.append((n, m, kind)) or f"{n} {m} {kind}",
        states=40,
        n=(1, 1000),
        m=(1, 7),
        kind=["a", "b", "c"],
    )
    data, _ = stored(panel)
    assert len(data["index"]) <= 40 and len(set(calls)) == len(calls) == len(data["index"])
    assert data["controls"][2]["labels"] == ["a", "b", "c"]
    assert data["controls"][0]["labels"][0] == "1" and data["controls"][0]["labels"][-1] == "1,000"
    assert (
        data["note"]
        == f"Stored here: {len(data['index'])} of 21,000 settings. Run the cell for all of them."
    )


def test_of_many_bits_the_leading_ones_flip():
    data, views = stored(
        explore(
            lambda code: f"{code:016b}",
            states=64,
            code=widgets.bits(16, start=0b1010_0000_0000_0011),
        )
    )
    assert data["controls"][0]["free"] == 6
    assert [views[state] for state in data["index"]] == [
        f"{lead:06b}0000000011" for lead in range(64)
    ]


@given(
    st.lists(
        st.tuples(st.sampled_from(["slider", "bits"]), st.integers(1, 9), st.floats(0, 1)).map(
            lambda drawn: (
                widgets.bits(drawn[1], start=int(drawn[2] * (2 ** drawn[1] - 1)))
                if drawn[0] == "bits"
                else widgets.Control(
                    "slider",
                    range(drawn[1] * 7),
                    [""] * drawn[1] * 7,
                    int(drawn[2] * (drawn[1] * 7 - 1)),
                )
            )
        ),
        min_size=1,
        max_size=3,
    ),
    st.integers(8, 300),
)
def test_what_is_kept_stays_in_budget_in_order_and_holds_the_start(controls, states):
    grid = widgets._thinned(controls, states)
    assert math.prod(map(len, grid)) <= states
    for control, kept in zip(controls, grid, strict=True):
        assert (
            control.start in kept
            and kept == sorted(set(kept))
            and 0 <= kept[0]
            and kept[-1] < len(control.values)
        )


def test_moving_a_control_calls_the_view():
    panel = explore(
        lambda n, kind, sure, code: f"{n} {kind} {sure} {code}",
        n=(1, 9),
        kind=["a", "b"],
        sure=False,
        code=widgets.bits(3),
    )
    slider, choice, checkbox, bits, _ = panel.live.children
    assert "5 a False 0" in result(panel)
    slider.value, choice.value, checkbox.value = 8, 1, True  # the place on the control
    assert "9 b True 0" in result(panel)
    (group,) = bits.children[1].children
    buttons = group.children[1].children
    buttons[0].value = True
    assert "9 b True 4" in result(panel) and buttons[0].description == "1"
    assert 'aria-live="polite"' in result(panel)


def test_what_goes_wrong_in_a_view_is_said_in_its_panel(capsys):
    def view(n):
        print("working <on it>")
        if n == 3:
            raise ValueError("n must not be <3>")
        return f"fine at {n}"

    panel = explore(view, n=(1, 3))
    assert "working &lt;on it&gt;" in result(panel) and "fine at 2" in result(panel)
    panel.live.children[0].value = 2
    assert "ValueError: n must not be &lt;3&gt;" in result(panel)
    panel.live.children[0].value = 0
    assert "fine at 1" in result(panel)
    data, views = stored(panel)
    assert "ValueError" in views[data["index"][2]]
    assert capsys.readouterr() == ("", "")


def test_warnings_of_a_view_are_said_every_time():
    def view(n):
        import warnings

        warnings.warn("rounded", stacklevel=1)
        return f"{n}"

    data, views = stored(explore(view, n=(1, 3)))
    assert all("UserWarning: rounded" in views[state] for state in data["index"])


@pytest.mark.parametrize(
    "made, message",
    [
        (None, "NoneType"),
        (3, "int"),
        (plots.Animation(["<svg></svg>"], ["a"], "alt"), "controls of its own"),
    ],
)
def test_a_view_that_returns_what_no_panel_can_show_is_told(made, message):
    assert (
        f"TypeError: {'an Animation' if message.startswith('controls') else 'a view returns'}"
        in html.unescape(result(explore(lambda n: made, n=(1, 2))))
    )
    assert message in result(explore(lambda n: made, n=(1, 2)))


def test_a_view_may_return_anything_that_has_html():
    class Table:
        def _repr_html_(self):
            return "<table></table>"

    assert "<table></table>" in result(explore(lambda n: Table(), n=(1, 2)))


def test_text_cannot_break_out_of_the_page():
    panel = explore(lambda n: f"</script><b>{n}", n={"</script>": 1, '"': 2})
    assert (
        panel.html.count("</script>") == 2 + 1
    )  # its own two, and the view's, which is HTML by agreement
    assert stored(panel)[1] == ["</script><b>1", "</script><b>2"]


@plots.style.drawn
def bars(n, m, kind):
    figure, axes = plots.style.canvas(f"{n} bars of {kind}", xlabel="rank", ylabel="bytes (MB)")
    axes.bar(range(n), [m + k for k in range(n)], color=plots.style.SERIES[0], **plots.style.EDGE)
    return plots.Picture(figure, f"{n} bars up to {m + n}")


def test_a_panel_of_64_pictures_stays_small():
    panel = explore(bars, n=(1, 4), m=(1, 8), kind=["a", "b"])
    assert len(stored(panel)[0]["index"]) == 64
    assert len(panel.html) < 300_000


def test_a_panel_is_the_same_in_every_process():
    code = "from test_widgets import *; panels = [explore(bars, n=(1, 2), m=(1, 2), kind=['a']).html for _ in 'ab']; print(panels[0] == panels[1], panels[0])"
    here = os.environ | {
        "PYTHONPATH": os.pathsep.join([*sys.path, str(pathlib.Path(__file__).parent)])
    }
    one, other = (
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=here | {"PYTHONHASHSEED": seed},
        )
        for seed in "12"
    )
    assert one.stdout == other.stdout and one.stdout.startswith("True <div")


BAD = {
    "no function": (
        lambda: explore(3, n=(1, 2)),
        TypeError,
        "needs a function of the controls, got 3",
    ),
    "no control": (lambda: explore(lambda: ""), ValueError, "at least one control"),
    "a name that the view lacks": (
        lambda: explore(lambda n: "", m=(1, 2)),
        TypeError,
        "controls m.*give each a parameter",
    ),
    "a parameter without control": (
        lambda: explore(lambda n, m: "", n=(1, 2)),
        TypeError,
        "missing a required argument: 'm'",
    ),
    "a lone word": (
        lambda: explore(lambda n: "", n="sum"),
        TypeError,
        "control 'n'.*cannot make a control of 'sum'.*list or dict",
    ),
    "an empty choice": (
        lambda: explore(lambda n: "", n=[]),
        ValueError,
        "control 'n'.*at least one value",
    ),
    "four numbers": (
        lambda: explore(lambda n: "", n=(1, 2, 3, 4)),
        ValueError,
        r"\(low, high, step\)",
    ),
    "a tuple of words": (
        lambda: explore(lambda n: "", n=("a", "b")),
        TypeError,
        "got 'a'.*a choice is a list",
    ),
    "the wrong way round": (lambda: explore(lambda n: "", n=(4, 1)), ValueError, "low=4, high=1"),
    "a step of 0": (
        lambda: explore(lambda n: "", n=(1, 4, 0)),
        ValueError,
        "step must be above 0, got 0",
    ),
    "NaN": (lambda: explore(lambda n: "", n=(0.0, math.nan)), ValueError, "finite"),
    "too fine": (lambda: explore(lambda n: "", n=(0, 1, 1e-9)), ValueError, "at most 10,000"),
    "a log of 0": (lambda: widgets.log(0, 8), ValueError, "low.*above 0, got 0"),
    "a base of 1": (lambda: widgets.log(1, 8, base=1), ValueError, "above 1, got 1"),
    "33 bits": (lambda: widgets.bits(33), ValueError, "1 to 32 of them, got 33"),
    "bits of a word": (lambda: widgets.bits("e4m3"), TypeError, "FloatFormat, got 'e4m3'"),
    "a start that does not fit": (
        lambda: widgets.bits(4, start=16),
        ValueError,
        "start=16 does not fit in 4 bits",
    ),
    "a default that is not offered": (
        lambda: explore(lambda n=9: "", n=(1, 4)),
        ValueError,
        "control 'n': cannot start at 9: this slider offers 1 … 4",
    ),
    "no state": (
        lambda: explore(lambda n: "", states=0, n=(1, 4)),
        ValueError,
        "states must be at least 1, got 0",
    ),
    "more choices than states": (
        lambda: explore(lambda n: "", states=2, n=["a", "b", "c"]),
        ValueError,
        "3 combinations, more than states=2",
    ),
}


@pytest.mark.parametrize("make, error, message", BAD.values(), ids=BAD.keys())
def test_bad_controls_are_named_with_their_remedy(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_figures_without_alt_text_do_not_reach_a_panel():
    assert "TypeError" in result(explore(lambda n: Figure(), n=(1, 2)))


def test_a_slider_has_ten_thousand_steps_at_most():
    assert len(widgets.slider(1, 10_000).values) == 10_000
    with pytest.raises(ValueError, match="a slider of 10,001 steps is finer than anyone can drag"):
        widgets.slider(0, 10_000)


def test_a_range_beyond_any_slider_is_refused_before_it_is_listed():
    with pytest.raises(ValueError, match="control 'n': a slider of 1,000,000,000 steps"):
        widgets.explore(lambda n: "", n=range(10**9))
