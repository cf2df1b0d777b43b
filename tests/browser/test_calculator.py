"""The memory calculator on a bare page: no kernel, no server, no network; its numbers are Python's, to the byte."""

import collections
import dataclasses
import random
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from labutils import predict
from labutils.config import Hardware, Mesh, ModelConfig, TrainConfig
from labutils.teach import calculator

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Memory</title>
<style>@media (prefers-color-scheme: dark) {{ body {{ background: #121212; color: #ddd; }} }}</style><body><main><h1>Memory</h1>
<h2 id="far">How many parameters does a model have?</h2><div style="height:3000px"></div>{panel}</main>"""


@pytest.fixture(scope="module")
def panel():
    return calculator.Calculator("gpt2", "gpt3-175b")


@pytest.fixture(scope="module")
def page_file(panel, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(PAGE.format(panel=panel._repr_html_()), encoding="utf-8")
    return file


@pytest.fixture
def page(browser, page_file):
    trouble = []
    page = browser.new_page()
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith("file:") or trouble.append(request.url)
    )
    page.goto(page_file.as_uri())
    expect(page.locator("form")).to_be_visible()
    yield page
    page.close()
    assert trouble == []


def set_to(page, sizes, labels):
    for name, label in labels.items():
        page.locator(f"[name={name}]").select_option(label=label)
    for name, size in sizes.items():
        page.locator(f"[name={name}]").fill(str(size))


def shown(page):
    """Bytes of the peak, of each line and of each component, by what stands beside them."""
    rows = "all => all.map(row => [row.querySelector('th').textContent, row.dataset.bytes])"
    lines = page.locator("tr:has(th[scope=row])").evaluate_all(rows)
    return {name: int(amount) for name, amount in lines}


def test_its_numbers_are_those_of_python(page, panel):
    pick, largest = random.Random(3), 0
    for _ in range(12):
        labels = {name: pick.choice(list(options)) for name, options in calculator.CHOICES.items()}
        model, device = pick.choice(list(panel.models)), pick.choice(Hardware.names())
        b, s, n = pick.choice([1, 2, 7, 10**7]), pick.randint(2, 1024), pick.choice([1, 3, 8, 1000])
        set_to(page, {}, {"model": model, "device": device} | labels)
        set_to(page, {"b": b, "s": s, "devices": n}, {})
        peak = panel.evaluate(
            model=model,
            micro_batch=b,
            seq_len=s,
            devices=n,
            **labels,
        )
        assert shown(page) == {line.name: line.amount for line in peak} | {"peak": peak.total}
        verdict, room = page.locator(".lu-verdict"), Hardware.named(device).memory
        assert (verdict.get_attribute("data-bytes"), verdict.get_attribute("data-fits")) == (
            str(peak.total),
            str(peak.total <= room).lower(),
        )
        expect(verdict).to_contain_text(peak.event)
        if peak.total > room:
            first = next(phase for phase, amount in peak.phases.items() if amount > room)
            expect(verdict).to_contain_text(f"fails first in the {first}")
        largest = max(largest, peak.total)
    assert largest > 2**53  # more than a double holds exactly


def test_a_shape_of_ones_own_is_computed_as_well(page, panel):
    page.get_by_text("Another shape").click()
    shape = dict(L=7, h=640, a=10, g=10, d=64, f=2000, v=32000)
    set_to(page, {**shape, "s": "1,000"}, {})
    assert shown(page)["peak"] == panel.evaluate(model="gpt2", seq_len=1000, **shape).total
    expect(page.locator(".lu-note")).to_contain_text(
        "L = 7 · h = 640 · a = 10 · g = 10 · d = 64 · f = 2,000 · v = 32,000 · b = 1 · s = 1,000"
    )


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("b", "0", "The micro-batch must be at least 1, not 0."),
        ("b", "-3", "The micro-batch must be at least 1, not -3."),
        ("b", "", "The micro-batch must be a whole number, not “”."),
        ("s", "many", "The sequence length must be a whole number, not “many”."),
        ("s", "1.5", "The sequence length must be a whole number, not “1.5”."),
        ("s", "1", "The sequence length must be at least 2, not 1."),
        (
            "s",
            "1025",
            "This model has learned 1,024 positions and takes no longer sequence: 1,025 tokens are too many.",
        ),
        ("devices", "0", "The number of devices must be at least 1, not 0."),
        ("devices", "9" * 30, "The number of devices must be at most 1,000,000,000,000"),
        ("room", "much", "The memory of a device must be a number of GB above 0, not “much”."),
        ("room", "0", "The memory of a device must be a number of GB above 0, not “0”."),
        ("L", "2", "The formulas of this model are for 3 or more layers, not 2."),
        ("g", "5", "5 key–value heads do not divide 12 heads: choose a divisor of 12."),
        (
            "g",
            "6",
            "The formulas of this model are for as many key–value heads as heads, not for a = 12 and g = 6",
        ),
    ],
)
def test_what_cannot_be_is_said_and_nothing_breaks(page, name, given, message):
    before, field = shown(page), page.locator(f"[name={name}]")
    if name in calculator.SHAPE:
        page.get_by_text("Another shape").click()
    good = field.input_value()
    field.fill(given)
    expect(page.get_by_role("alert")).to_contain_text(message)
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".lu-result")).to_be_hidden()
    field.fill(good)
    expect(page.get_by_role("alert")).to_be_empty()
    assert page.locator("[aria-invalid]").count() == 0 and shown(page) == before


def test_a_longer_sequence_than_the_next_model_takes_is_shortened(page):
    set_to(page, {}, {"model": "gpt3-175b"})
    set_to(page, {"s": 2048}, {})
    set_to(page, {}, {"model": "gpt2"})
    expect(page.locator("[name=s]")).to_have_value("1024")
    expect(page.get_by_role("alert")).to_be_empty()


def test_the_keyboard_alone_will_do(page):
    verdict = page.locator(".lu-verdict")
    page.locator("[name=model]").focus()
    before = verdict.get_attribute("data-bytes")
    page.keyboard.press("ArrowDown")
    expect(verdict).not_to_have_attribute("data-bytes", before)
    page.keyboard.press("Tab")
    expect(page.get_by_label("micro-batch b")).to_be_focused()
    before = verdict.get_attribute("data-bytes")
    page.keyboard.type("64")  # the field is selected, so that what is typed replaces it
    expect(verdict).not_to_have_attribute("data-bytes", before)
    expect(verdict).to_have_attribute("data-fits", "false")
    page.locator(".lu-scroll").focus()
    expect(page.locator(".lu-scroll")).to_be_focused()


def test_the_ledger_of_each_phase_can_be_opened(page, panel):
    set_to(page, {"b": 4, "s": 512}, {})
    peak = panel.evaluate(model="gpt2", micro_batch=4, seq_len=512)
    for phase in ("forward", "backward", "optimizer"):
        button = page.get_by_role("button", name=phase)
        button.click()
        expect(button).to_be_focused()
        lines = shown(page)
        assert lines["peak" if phase == peak.phase else "total"] == peak.phases[phase]
        assert ("gradients" in lines) == (phase == "optimizer")
        expect(page.locator(".lu-open")).to_contain_text(phase)
    page.locator("[name=b]").fill("5")
    assert "peak" in shown(page)


def test_zero_on_one_device_says_that_it_does_nothing(page):
    set_to(page, {}, {"zero": "3: and weights"})
    expect(page.locator(".lu-note")).to_contain_text("nothing to shard")
    set_to(page, {"devices": 8}, {})
    expect(page.locator(".lu-note")).not_to_contain_text("nothing to shard")


def test_a_component_leads_to_where_it_is_derived(page):
    link = page.get_by_role("link", name="weights")
    assert link.get_attribute("href") == "#far"
    link.click()
    expect(page.locator("h2")).to_be_in_viewport()
    assert page.get_by_role("link").count() == 1  # the other headings are not on this page


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it(page, theme):
    page.emulate_media(color_scheme=theme)
    for broken in (False, True):
        page.locator("[name=b]").fill("0" if broken else "8")
        found = Axe().run(page).response["violations"]
        assert [f"{v['id']}: {v['nodes'][0]['html'][:150]}" for v in found] == []


MESHES = ["gpt2", "llama-3.1-8b", "qwen2-0.5b"]
FILL = """fields => {
  const form = document.querySelector("form");
  for (const [name, value] of fields) form.elements.namedItem(name).value = value;
  form.dispatchEvent(new Event("input"));
}"""


def drawn(pick):
    """A step on a mesh with more axes than dp, as the fields of the page and as predict takes it."""
    pp, cp, tp = pick.choice([(1, 1, 8), (3, 1, 1), (1, 2, 1), (2, 1, 4), (4, 2, 2), (3, 3, 4)])
    dp, m, stage = pick.choice([1, 2, 3, 64]), pick.randint(1, 9), pick.choice([0, pp // 2, pp - 1])
    schedule, chunks = pick.randint(0, 2), pick.choice([1, 2, 2, 3])
    m *= pp if schedule == 2 else 1
    name = pick.choice(MESHES)
    model = ModelConfig.named(name)
    grouped = model.num_kv_heads < model.num_heads
    heads = [(tp * k, g) for k in (1, 1, 1, 2, 4) for g in range(2, tp * k + 1) if tp * k % g == 0]
    a, g = pick.choice(
        [(a, g) for a, g in heads if (g < a) == grouped and 0 in (g % tp, tp % g)]
    )
    stages = pp * (chunks if schedule == 2 else 1)
    sizes = dict(L=pick.randint(max(3, stages - 2), max(9, stages + 4)), h=pick.randint(1, 4000), a=a, g=g, d=2 * pick.randint(1, 80))
    sizes |= dict(f=tp * pick.randint(1, 3000), v=tp * pick.randint(1, 9000))
    sizes |= dict(s=2 * cp * tp * pick.randint(1, 40), b=pick.randint(1, 4))
    labels = {name: pick.choice(list(options)) for name, options in calculator.CHOICES.items()}
    labels["precision"] = pick.choice([x for x in calculator.PRECISION if "autocast" not in x])
    if cp > 1:
        labels["attention"] = "fused"
    if dp * cp == 1 or (pp > 1 and model.tied):
        labels["zero"] = "0: nothing" if dp * cp == 1 else pick.choice(list(calculator.ZERO)[:3])
    sequence = tp > 1 and pick.choice([True, False])
    places = {name: list(calculator.CHOICES[name]).index(label) for name, label in labels.items()}
    fields = dict(pp=pp, cp=cp, tp=tp, model=name, devices=dp, m=m, stage=stage, sequence=int(sequence))
    fields |= dict(schedule=schedule, chunks=chunks)

    letters = {"L": "num_layers", "h": "d_model", "a": "num_heads", "g": "num_kv_heads"}
    letters |= {"d": "d_head", "f": "d_ff", "v": "vocab_size", "s": "seq_len"}
    model = dataclasses.replace(model, **{field: sizes[x] for x, field in letters.items()})
    options = dict(micro_batch=sizes["b"], global_batch=sizes["b"] * m * dp, sequence=sequence)
    for name, label in labels.items():
        options |= calculator.CHOICES[name][label]
    options |= dict(attention="ring") if cp > 1 else {}
    options |= dict(schedule=list(calculator.PIPELINES.values())[schedule], chunks=chunks)
    mesh = Mesh(pp=pp, dp=dp, cp=cp, tp=tp)
    rank = next(rank for rank in range(mesh.size) if mesh.coords(rank)["pp"] == stage)
    return fields | sizes | places, (model, TrainConfig(**options), mesh, rank)


def test_what_a_rank_of_a_mesh_holds_is_what_is_predicted(browser, tmp_path):
    page, pick = browser.new_page(), random.Random(5)
    file = tmp_path / "page.html"
    file.write_text(PAGE.format(panel=calculator.Calculator(*MESHES)._repr_html_()), "utf-8")
    page.goto(file.as_uri())
    expect(page.locator("form")).to_be_visible()
    for _ in range(150):
        fields, asked = drawn(pick)
        page.evaluate(FILL, list(fields.items()))
        wanted = collections.Counter()
        for line in predict.states(*asked) + predict.activations(*asked):
            part = re.sub(r"^blocks\.\d+\.?", "", line.name) or "residual stream"
            wanted[part] += line.amount
        assert page.get_by_role("alert").text_content() == "", fields
        expect(page.locator(".lu-verdict")).to_contain_text(f"rank={asked[-1]})")
        assert shown(page) == +wanted | {"total": wanted.total()}, fields
    page.close()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"tp": 5}, "tp = 5 does not divide a = 12: choose a divisor, or pad it."),
        ({"cp": 3}, "1,024 tokens are not 6 equal chunks, two for each of 3 ranks"),
        ({"cp": 2, "attention": 1}, "A ring of ranks (cp) has fused attention alone."),
        ({"pp": 2, "sequence": 1}, "choose a tp above 1 that divides them"),
        ({"pp": 15}, "12 layers fill at most 14 stages, not 15."),
        ({"pp": 2, "stage": 2}, "The ranks of the pipeline are 0 to 1: there is no rank 2."),
        ({"pp": 4, "schedule": 2, "chunks": 4}, "12 layers fill at most 14 stages, not 16."),
        ({"pp": 4, "schedule": 2, "m": 6}, "4 micro-batches in turn, which do not divide 6."),
        ({"pp": 2, "devices": 2, "zero": 3}, "choose ZeRO 2."),
        ({"pp": 2, "precision": 3}, "python -m labutils.planner"),
        ({"pp": 2, "L": 20000}, "At most 10,000 layers"),
    ],
)
def test_a_mesh_that_cannot_be_or_has_no_formula_is_refused(page, fields, message):
    page.evaluate(FILL, list(({"s": 1024} | fields).items()))
    expect(page.get_by_role("alert")).to_contain_text(message)
