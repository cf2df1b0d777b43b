"""The memory calculator: its formulas give what `memory.moments.by_formula` gives, byte for byte, and the panel says what it needs to say."""

import dataclasses
import html
import json
import pathlib
import re

import nbformat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labutils import memory, predict, units
from labutils.config import Mesh, ModelConfig, TrainConfig
from labutils.teach import calculator, plots

LAB = pathlib.Path(__file__).resolve().parents[1] / "notebooks" / "03_memory.ipynb"
TINY = ModelConfig(  # of the kind of Llama 3, whose formulas are stored
    num_layers=6,
    d_model=16,
    num_heads=4,
    num_kv_heads=2,
    d_ff=20,
    vocab_size=17,
    seq_len=9,
    ffn="swiglu",
    norm="rmsnorm",
    positions="rope",
    bias=False,
    tied=False,
)


@pytest.fixture(scope="module")
def panel():
    return calculator.Calculator("gpt2", tiny=TINY)


@pytest.fixture(scope="module")
def small():
    """One kind of model, whose tables are soon computed."""
    return calculator.Calculator("gpt2")


labels = {name: st.sampled_from(list(options)) for name, options in calculator.CHOICES.items()}


def asked(model, b, s, n, chosen):
    """The same setting, predicted without the panel."""
    options = {
        key: value
        for name, label in chosen.items()
        for key, value in calculator.CHOICES[name][label].items()
    }
    train = TrainConfig(micro_batch=b, global_batch=b * n, **options)
    model = dataclasses.replace(model, seq_len=s)
    return memory.moments.by_formula(model, train, Mesh(dp=n))


def lines(peak):
    return sorted((line.name, line.component, line.amount) for line in peak)


@settings(max_examples=16, deadline=None)
@given(
    st.sampled_from(["gpt2", "tiny"]),
    st.sampled_from([1, 2, 3, 64, 10**9]),
    st.integers(2, 1024),
    st.sampled_from([1, 2, 3, 1000]),
    st.fixed_dictionaries(labels),
)
def test_its_formulas_give_what_the_closed_form_gives(panel, name, b, s, n, chosen):
    found = panel.evaluate(model=name, micro_batch=b, seq_len=s, devices=n, **chosen)
    wanted = asked(panel.models[name], b, s, n, chosen)
    assert (found.total, found.phases, found.phase, found.event) == (
        wanted.total,
        wanted.phases,
        wanted.phase,
        wanted.event,
    )
    assert lines(found) == lines(wanted)


@settings(max_examples=15, deadline=None)
@given(
    st.integers(4, 7),
    st.integers(1, 3),
    st.integers(2, 12),
    st.integers(1, 9),
    st.integers(1, 40),
    st.fixed_dictionaries(labels),
)
def test_no_moment_that_was_thrown_away_is_ever_fuller(panel, L, b, s, half, f, chosen):
    """Against the whole step, operation by operation, at sizes where any moment may be the fullest."""
    shape = dict(L=L, h=8 * half, a=4, g=2, d=2 * half, f=f, v=half)
    found = panel.evaluate(model="tiny", micro_batch=b, seq_len=s, **shape, **chosen)
    options = {
        key: value
        for name, label in chosen.items()
        if name != "zero"
        for key, value in calculator.CHOICES[name][label].items()
    }
    model = dataclasses.replace(
        TINY, num_layers=L, d_model=8 * half, d_head=2 * half, d_ff=f, vocab_size=half, seq_len=s
    )
    assert (
        found.total
        == memory.history(
            model, TrainConfig(micro_batch=b, global_batch=b, **options)
        ).peak.ledger.total
    )


def test_of_a_row_of_layers_few_moments_are_kept(small):
    """Some tens of some hundred operations are left; most at level 1, where gradients pile up."""
    counts = [len(moments) for moments in small.tables["passes"]]
    assert 0 < min(counts) and max(counts) < 150


def test_a_table_goes_through_its_choices_the_last_one_fastest(small):
    def alive(numbers):
        return tuple(small.tables["formulas"][number] for number in numbers)

    def told(numbers):
        moments = [small.tables["moments"][number] for number in numbers]
        return [(phase, event, alive(lines)) for phase, event, lines in moments]

    model = small.models["gpt2"]
    chosen = {name: list(options)[1] for name, options in calculator.CHOICES.items()}
    held, moments = calculator._states(
        model, *(chosen[name] for name in ("precision", "optimizer", "zero"))
    )
    found = small.tables["states"][(1 * len(calculator.OPTIMIZER) + 1) * len(calculator.ZERO) + 1]
    assert alive(found[0]) == held and told(found[1]) == moments
    one, several = calculator._passes(
        model, *(chosen[name] for name in ("precision", "attention", "checkpointing", "zero"))
    )
    place = ((1 * len(calculator.CORES) + 1) * len(calculator.CHECKPOINTING) + 1) * len(
        calculator.ZERO
    ) + 1
    assert [told(moments) for moments in small.tables["passes"][2 * place : 2 * place + 2]] == [
        one,
        several,
    ]


def test_models_of_one_kind_share_their_formulas(small):
    one, three = small, calculator.Calculator("gpt2", "gpt2-xl", "gpt3-175b")
    for name in ("formulas", "moments", "states", "passes", "parameters"):
        assert one.tables[name] == three.tables[name]
    assert (
        three.evaluate(model="gpt3-175b", seq_len=2048).only(name="weights").total
        == 2 * ModelConfig.named("gpt3-175b").num_params
    )


@pytest.mark.parametrize("shape", [dict(num_layers=1), dict(num_heads=1, num_kv_heads=1)])
def test_few_layers_or_one_head_are_kinds_of_their_own(shape):
    model = dataclasses.replace(TINY, **shape)
    made = calculator.Calculator(mine=model)
    for chosen in (
        {},
        {"attention": "plain", "checkpointing": "full"},
        {"precision": "bf16 autocast over fp32: 16 bytes, and 2 of copies", "zero": "3: and weights"},
    ):
        whole = {name: chosen.get(name, calculator.START[name]) for name in calculator.CHOICES}
        assert lines(made.evaluate(seq_len=7, micro_batch=2, devices=4, **whole)) == lines(
            asked(model, 2, 7, 4, whole)
        )


def test_a_multiple_of_all_parameters_is_written_so(small):
    named = {(name, formula) for name, _, formula in small.tables["formulas"]}
    assert {
        ("weights", "2Ψ"),
        ("weights", "4Ψ"),
        ("weight shards", "4P"),
        ("exp_avg", "4Ψ"),
        ("exp_avg", "4P"),
    } <= named


def test_models_that_predict_refuses_are_refused_at_once():
    with pytest.raises(ValueError, match="num_experts=8"):
        calculator.Calculator("mixtral-8x7b")
    with pytest.raises(ValueError, match="no model called"):
        calculator.Calculator("gpt5")
    with pytest.raises(TypeError, match="takes a ModelConfig"):
        calculator.Calculator(mine={"hidden_size": 4096})


def test_without_names_it_offers_every_model_that_can_be_predicted():
    offered = calculator.Calculator()
    assert "mixtral-8x7b" not in offered.models and {"gpt2", "llama-3.1-405b", "qwen2-0.5b"} <= set(
        offered.models
    )
    assert repr(offered).startswith("Memory calculator: gpt2, gpt2-medium, ")


def test_the_page_shows_something_before_its_script_runs(small):
    page = small._repr_html_()
    assert "At the start: optimizer" in page and 'class="ledger"' in page
    assert {label for options in calculator.CHOICES.values() for label in options} <= set(
        map(html.unescape, re.findall(r">([^<]*)</option>", page))
    )
    assert json.loads(re.search(r'<script type="application/json">(.*?)</script>', page)[1])


def test_the_bars_have_the_colors_of_the_figures():
    style = pathlib.Path(calculator.__file__).with_suffix(".css").read_text("utf-8")
    assert (
        dict(re.findall(r"\.lu-(\w+) { background: (#\w+); }", style))
        == plots.style.COMPONENT_COLORS
    )


def test_every_component_is_derived_in_the_lab_and_the_panel_stays_small():
    cells = nbformat.read(LAB, as_version=4).cells
    headings = {
        line.lstrip("# ")
        for cell in cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("#")
    }
    assert set(calculator.SECTIONS.values()) <= headings and set(calculator.SECTIONS) == set(
        memory.moments.COMPONENTS
    )
    outputs = [
        output.data["text/html"]
        for cell in cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    assert [len(output) < 400_000 for output in outputs if "lu-calculator" in output] == [True]


AXES = dict(pp=[1, 2], dp=[4, 1], cp=[1, 2], tp=[1, 2])


@pytest.mark.parametrize("places", [(0, 0, 0, 0, 0, 0), (1, 1, 0, 1, 1, 1), (1, 1, 0, 0, 1, 2)])
def test_a_rank_of_a_mesh_holds_what_is_predicted_at_each_level(places):
    panel = calculator.ranks("gpt2", "llama-3.1-8b", seq_len=1024, micro_batches=4, **AXES)
    name, *degrees, recomputation = (
        control.values[place]
        for place, control in zip(places, panel._controls.values(), strict=True)
    )
    mesh = Mesh(**dict(zip(AXES, degrees, strict=True)))
    model = dataclasses.replace(ModelConfig.named(name), seq_len=1024)
    wanted = []
    for zero in range(4):
        train = TrainConfig(
            micro_batch=1,
            global_batch=4 * mesh.dp,
            fp32_gradients="only",
            zero=zero,
            sequence=mesh.tp > 1,
            attention="ring" if mesh.cp > 1 else "sdpa",
            checkpointing=recomputation,
        )
        asked_of = model, train, mesh
        both = predict.states(*asked_of) + predict.activations(*asked_of)
        wanted.append((f"ZeRO {zero}", units.text(both.total)))
    shown = panel._shown(places)
    assert re.findall(r'"lu-phase">(ZeRO \d)<.*?</div><span>(.+?)</span>', shown) == wanted
    limits = re.findall(r'<i style="left:([\d.]+)%', shown)
    assert len(limits) == 4 and len(set(limits)) == 1, "the bars have one scale"
    for told, bar in re.findall(r'aria-label="(.+?)">(.+?)<i ', shown):
        widths = [float(width) for width in re.findall(r"width:([\d.]+)%", bar)]
        assert told.startswith("weights ") and widths[0] > 0 and 0 < sum(widths) <= 100.1


def test_on_one_rank_there_is_nothing_to_shard_and_what_cannot_be_is_said():
    panel = calculator.ranks("llama-3.1-8b", "mixtral-8x7b", dp=[1, 2], ep=[1, 2])
    assert panel._shown((0, 0, 0, 0)).count('"lu-phase"') == 1
    refused = panel._shown((0, 1, 1, 0))
    assert '"lu-phase"' not in refused and refused.count("and the model has none") == 1
    assert "Activations depend on the routing" in panel._shown((1, 1, 1, 0))
