"""Panels and animations on a bare page: no kernel, no server, no network, several of each."""

import pathlib
import re

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from labutils.teach import plots, widgets
from labutils.teach.widgets import explore


def numbers(n=4, algorithm="ring", twice=False):
    return f"<p>{n * (1 + twice)} ranks, {algorithm}</p>"


def frames(name, count=4):
    circle = '<circle cx="20" cy="20" r="9" fill="#2F74D0"/>'
    svg = '<svg role="img" aria-label="{0} {1}" width="200" height="40" viewBox="0 0 200 40"><g class="lu-glide" style="--x:-40px;--y:0px">{2}</g></svg>'
    return plots.Animation(
        [svg.format(name, k, circle) for k in range(count)],
        [f"{name} frame {k}" for k in range(count)],
        f"{name} moves",
    )


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    panel = explore(numbers, n=(1, 8), algorithm=["ring", "tree"], twice=False)
    pattern = explore(
        lambda code: f"<p>pattern {code}</p>",
        code=widgets.bits({"sign": 1, "exponent": 2, "mantissa": 5}, start=0b0_01_00000),
    )
    body = "".join(
        made
        for made in (
            panel.html,
            panel.html,
            pattern.html,
            frames("first")._repr_html_(),
            frames("second")._repr_html_(),
        )
    )
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Panels</title><body><main><h1>Panels</h1>{body}</main>',
        encoding="utf-8",
    )
    return file


@pytest.fixture
def page(browser, page_file: pathlib.Path):
    trouble = []
    page = browser.new_page()
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:", "blob:")) or trouble.append(request.url)
        ),
    )
    page.clock.install()
    page.goto(page_file.as_uri())
    yield page
    page.close()
    assert trouble == []


def test_a_slider_answers_to_mouse_and_keyboard_and_leaves_its_twin_alone(page):
    one, twin = page.locator(".lu-explore").nth(0), page.locator(".lu-explore").nth(1)
    slider = one.get_by_role("slider", name="n")
    expect(one.locator(".lu-view")).to_have_text("4 ranks, ring")
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 3, box["y"] + box["height"] / 2)
    expect(one.locator(".lu-view")).to_have_text("8 ranks, ring")
    page.keyboard.press("ArrowLeft")
    expect(one.locator(".lu-view")).to_have_text("7 ranks, ring")
    expect(one.locator("output")).to_have_text("7")
    assert slider.evaluate("slider => slider.ariaValueText") == "7"
    page.keyboard.press("Home")
    expect(one.locator(".lu-view")).to_have_text("1 ranks, ring")
    expect(twin.locator(".lu-view")).to_have_text("4 ranks, ring")


def test_every_control_can_be_reached_and_moved_with_the_keyboard_alone(page):
    view = page.locator(".lu-explore").first.locator(".lu-view")
    page.keyboard.press("Tab")
    page.keyboard.press("End")
    expect(view).to_have_text("8 ranks, ring")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    expect(view).to_have_text("8 ranks, tree")
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    expect(view).to_have_text("16 ranks, tree")


def test_bits_flip_up_to_the_ones_that_are_stored(page):
    panel = page.locator(".lu-explore").nth(2)
    expect(panel.locator(".lu-view")).to_have_text("pattern 32")
    sign = panel.get_by_role("button", name="sign bit 0")
    sign.click()
    expect(panel.locator(".lu-view")).to_have_text("pattern 160")
    expect(sign).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Space")
    expect(panel.locator(".lu-view")).to_have_text("pattern 32")
    panel.get_by_role("button", name="mantissa bit 4").press("Enter")
    expect(panel.locator(".lu-view")).to_have_text("pattern 48")
    expect(
        panel.get_by_role("button", name="mantissa bit 0")
    ).to_be_disabled()  # 64 states: 6 of 8 bits flip
    expect(panel.locator(".lu-note")).to_have_text(
        "Stored here: 64 of 256 settings. Run the cell for all of them."
    )


def test_an_animation_steps_plays_and_stops(page):
    player, twin = page.locator(".lu-player").nth(0), page.locator(".lu-player").nth(1)
    shown = player.locator(".lu-frame:visible")
    expect(shown).to_have_text("first frame 0")
    player.get_by_role("button", name="Next step").click()
    expect(shown).to_have_text("first frame 1")
    page.keyboard.press("ArrowRight")
    expect(shown).to_have_text("first frame 2")
    page.keyboard.press("ArrowLeft")
    expect(shown).to_have_text("first frame 1")
    player.get_by_role("slider", name="Step").press("End")
    expect(shown).to_have_text("first frame 3")
    player.get_by_role("button", name="Play").click()  # at the end: from the start again
    expect(shown).to_have_text("first frame 0")
    page.clock.run_for(1500)
    expect(shown).to_have_text("first frame 1")
    player.get_by_role("button", name="Pause").press("Space")
    page.clock.run_for(5000)
    expect(shown).to_have_text("first frame 1")
    player.get_by_role("button", name="Play").click()
    page.clock.run_for(10000)
    expect(shown).to_have_text("first frame 3")
    expect(player.get_by_role("button", name="Play")).to_be_visible()
    expect(twin.locator(".lu-frame:visible")).to_have_text("second frame 0")


@pytest.mark.parametrize("motion, name", [("no-preference", "lu-glide"), ("reduce", "none")])
def test_nothing_glides_for_readers_who_asked_for_less_motion(page, motion, name):
    page.emulate_media(reduced_motion=motion)
    assert (
        page.locator(".lu-glide").first.evaluate(
            "element => getComputedStyle(element).animationName"
        )
        == name
    )


def test_every_input_has_a_name_and_axe_finds_nothing(page):
    inputs = page.locator("input, select, .lu-explore button, .lu-player button")
    assert inputs.count() == 2 * 3 + 8 + 2 * 4
    found = Axe().run(page).response["violations"]
    assert [f"{rule['id']}: {rule['nodes'][0]['html'][:200]}" for rule in found] == []


def test_a_page_without_javascript_shows_the_start_and_says_how_to_move_it(browser, page_file):
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(page_file.as_uri())
    panel = page.locator(".lu-explore").first
    expect(panel.locator(".lu-view")).to_have_text("4 ranks, ring")
    expect(panel.locator(".lu-note")).to_have_text(
        "Shown: n = 4, algorithm = ring, twice = no. Run the cell to move the controls."
    )
    expect(page.locator(".lu-frame:visible")).to_have_text(
        [re.compile("first frame 0"), re.compile("second frame 0")]
    )
    assert page.locator("input, select, button").count() == 0  # no dead controls
    context.close()
