"""The book: it builds without a warning, asks nobody else for anything, and works in a browser, on a phone, with a keyboard and in the dark."""

import functools
import html
import http.server
import os
import pathlib
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

ROOT = pathlib.Path(__file__).resolve().parents[2]
LABS = [f"notebooks/{path.stem}" for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
PAGES = [*LABS, *(f"book/{path.stem}" for path in sorted((ROOT / "book").glob("*.md")))]
# One of each kind: a front page, panels without Python, a reference, sources, labs with wide figures.
ON_A_PHONE = [
    *("book/intro", "book/planner", "book/api_many_devices", "book/references"),
    *(LABS[0], LABS[3], LABS[-1]),
]
DESK, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
PUBLISHED = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "some/course"}
COLOURS = ["color-contrast", "link-in-text-block"]
AXE = {rule: {"enabled": False} for rule in COLOURS}
# Axe takes milliseconds for each element, and the most are words of code and of signatures, in some twenty colours, and glyphs of formulas, which are hidden from it.
FEWER_WORDS_AND_GLYPHS = """() => {
    const met = new Set(), words = ':is(.highlight, .sig, code) span:not(:has(span))';
    for (const depth of [1, 2])  // a word of a signature is a span in a span
        for (const word of document.querySelectorAll(words)) {
            const look = word.parentElement.className + '>' + word.className;
            if (met.has(look)) word.replaceWith(word.textContent);
            else met.add(look);
        }
    for (const glyphs of document.querySelectorAll('mjx-container > mjx-math[aria-hidden=true]'))
        glyphs.replaceChildren();
}"""
# Text that looks like one before it, in boxes that look like that one's, has the same contrast. What holds no first one is emptied.
ONE_TEXT_OF_EACH_LOOK = """() => {
    const numbers = new Map(), looks = new Map(), met = new Set();
    const look = element => {
        if (!looks.has(element)) {
            const style = getComputedStyle(element);
            const own = ['color', 'backgroundColor', 'backgroundImage', 'fontSize', 'fontWeight', 'opacity', 'textShadow', 'textDecoration'];
            const parent = element.matches('article') ? '' : look(element.parentElement);
            const all = [parent, element.tagName, element.className, ...own.map(name => style[name])].join();
            if (!numbers.has(all)) numbers.set(all, numbers.size);
            looks.set(element, numbers.get(all));
        }
        return looks.get(element);
    };
    for (const element of document.querySelectorAll('article *')) {
        const says = [...element.childNodes].some(node => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (says && element.checkVisibility() && !met.has(look(element))) {
            met.add(look(element));
            for (let box = element; box; box = box.parentElement) box.dataset.first = 1;
        }
    }
    for (const element of document.querySelectorAll('article *:not([data-first])')) element.replaceChildren();
    return met.size;
}"""
# The tests of a page follow one another, so that it is loaded once.
each_page = pytest.mark.parametrize("name", PAGES, scope="module")
each_lab = pytest.mark.parametrize("name", LABS, scope="module")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built book. The command is that of `make book`, but for where it writes,
    as in an action of GitHub."""
    target = tmp_path_factory.mktemp("book")
    command = next(
        line for line in (ROOT / "Makefile").read_text().splitlines() if "jupyter-book" in line
    )
    jupyter_book = pathlib.Path(sys.executable).with_name("jupyter-book")
    arguments = (
        command.partition("jupyter-book ")[2]
        .replace("--path-output book", f"--path-output {target}")
        .split()
    )
    finished = subprocess.run(
        [sys.executable, jupyter_book, *arguments],
        cwd=ROOT,
        env=os.environ | PUBLISHED,
        capture_output=True,
        text=True,
    )
    if finished.returncode:
        said = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
        pytest.fail(
            "\n".join([line for line in said if re.search("WARNING|ERROR|rror:", line)] or said)
        )
    return target / "_build" / "html"


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@dataclass
class Reader:
    """A browser tab at the book, and what went wrong in it."""

    page: object
    address: str
    trouble: list = field(default_factory=list)

    def open(self, name):
        """The page of this name, loaded unless it is there already."""
        url = f"{self.address}/{name}.html"
        if self.page.url.partition("#")[0] != url:
            self.page.goto(url)
            self.page.evaluate(
                "window.MathJax?.startup?.promise"
            )  # pages without a formula come without MathJax
        return self.page

    def sit(self, viewport, theme):
        """At a desk or with a phone, in the light or in the dark, whatever a test before did."""
        self.trouble.clear()
        self.page.set_viewport_size(viewport)
        self.page.emulate_media(color_scheme=theme)
        self.page.evaluate("() => new Promise(requestAnimationFrame)")  # the page has seen its size
        return self

    def dress(self, theme):
        self.page.emulate_media(color_scheme=theme)
        followed = expect(self.page.locator("html"))  # once the page is drawn again
        followed.to_have_attribute("data-theme", theme)


@pytest.fixture(scope="module")
def tab(browser, address) -> Iterator[Reader]:
    """One tab for all tests: to open one takes longer than to load most pages."""
    context = browser.new_context(viewport=DESK, color_scheme="light")
    reader = Reader(context.new_page(), address)

    def only_here(route):
        if route.request.url.startswith((address, "data:", "blob:")):
            route.continue_()
        else:
            reader.trouble.append(f"asked {route.request.url}")
            route.abort()

    context.route("**/*", only_here)
    reader.page.on(
        "console",
        lambda message: (
            message.type in ("error", "warning") and reader.trouble.append(message.text)
        ),
    )
    reader.page.on("pageerror", lambda error: reader.trouble.append(str(error)))
    reader.page.on(
        "response",
        lambda response: (
            response.status >= 400 and reader.trouble.append(f"{response.status} {response.url}")
        ),
    )
    yield reader
    context.close()


@pytest.fixture
def reader(tab) -> Reader:
    """The tab at a desk and in the light, whatever a test before did."""
    return tab.sit(DESK, "light")


@pytest.fixture
def phone(tab) -> Reader:
    """The same tab on a phone."""
    return tab.sit(PHONE, "light")


def test_every_lab_has_a_page_and_no_page_names_another_site_to_load_from(site):
    assert all((site / f"{name}.html").exists() for name in PAGES)
    loads = re.compile(
        r"""(?:<(?:script|img|iframe|source)[^>]*\ssrc|<link[^>]*rel="(?:stylesheet|preload|icon)"[^>]*\shref)=["']?(?:https?:)?//[^"'>\s]+"""
    )
    for path in site.rglob("*.html"):
        assert not loads.findall(path.read_text(encoding="utf-8")), path.name


def test_every_link_within_the_site_leads_somewhere(site):
    pages = {path.resolve(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in pages.items()}
    for path, text in pages.items():
        for link in set(re.findall(r'<a [^>]*?href="([^":]+)"', text)):
            target, _, place = html.unescape(link).partition("#")
            found = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert found.exists(), f"{path.name} → {link}"
            there = found not in places or not place or urllib.parse.unquote(place) in places[found]
            assert there, f"{path.name} → {link}"


@each_lab
def test_a_lab_can_be_downloaded_opened_in_binder_and_seen_as_source(site, name):
    page = html.unescape((site / f"{name}.html").read_text(encoding="utf-8"))
    assert f'href="../_sources/{name}.ipynb"' in page and (site / f"_sources/{name}.ipynb").exists()
    binder = "https://mybinder.org/v2/gh/some/course/main?urlpath=lab/tree"
    assert f'href="{binder}/{name}.ipynb"' in page
    assert f'href="https://github.com/some/course/blob/main/{name}.ipynb?plain=1"' in page


def test_no_page_is_larger_than_a_megabyte(site):
    sizes = {path.name: path.stat().st_size for path in site.rglob("*.html")}
    assert {name: size for name, size in sizes.items() if size > 1_000_000} == {}


@each_page
def test_a_page_is_whole(reader, name):
    page = reader.open(name)
    images = page.locator("article img").evaluate_all(
        "all => all.map(image => [image.alt.trim() !== '', image.complete && image.naturalWidth > 0])"
    )
    assert all(alternative and drawn for alternative, drawn in images)
    assert (
        page.locator("article .math").evaluate_all(
            "all => all.filter(math => !math.querySelector('mjx-container')).map(math => math.textContent)"
        )
        == []
    )
    assert page.locator("mjx-merror, [data-mjx-error]").count() == 0
    assert page.locator("article").inner_text().count("$$") == 0
    assert reader.trouble == []


def test_a_table_printed_by_a_cell_is_a_table(reader):
    table = reader.open("notebooks/00_start_here").locator("article .cell_output table").first
    assert table.locator("mjx-container").count() >= 10


def test_the_cheat_sheet_is_two_pages_of_paper(reader):
    printed = reader.open("book/cheat_sheet").pdf(prefer_css_page_size=True)
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 2
    reader.page.emulate_media(media="print")
    assert reader.page.locator("article h1").is_visible(), "paper says what it is"
    reader.page.emulate_media(media="screen")


def test_math_is_typeset(reader):
    assert reader.open("book/notation").locator("article mjx-container").count() > 20


@each_lab
def test_panels_answer_to_mouse_and_keyboard(reader, name):
    page = reader.open(name)
    panels = page.locator(".lu-explore")
    assert panels.count() > 0
    for panel in panels.all():
        inputs, view = panel.locator(".lu-inputs"), panel.locator(".lu-view")

        def answers(act, view=view):
            before = view.inner_html()
            act()
            page.wait_for_function(
                "([view, before]) => view.innerHTML !== before", arg=[view.element_handle(), before]
            )

        if (slider := inputs.locator("input[type=range]").first).count():
            slider.scroll_into_view_if_needed()
            box = slider.bounding_box()
            answers(
                lambda box=box: page.mouse.click(box["x"] + 2, box["y"] + box["height"] / 2)
            )  # its left end
            answers(lambda: page.keyboard.press("End"))
        elif (choice := inputs.locator("select").first).count():
            choice.focus()
            answers(
                lambda: page.keyboard.press(
                    "ArrowDown" if choice.input_value() == "0" else "ArrowUp"
                )
            )
        else:
            button = inputs.locator("button:enabled").first
            answers(button.click)
            button.focus()
            answers(lambda: page.keyboard.press("Space"))
    assert reader.trouble == []


@each_lab
def test_animations_play_without_a_kernel(reader, name):
    page = reader.open(name)
    for player in page.locator(".lu-player").all():
        shown = player.locator(".lu-frame:not([hidden])")
        before = shown.inner_html()
        player.locator("button").first.click()
        page.wait_for_function(
            "([player, before]) => player.querySelector('.lu-frame:not([hidden])').innerHTML !== before",
            arg=[player.element_handle(), before],
        )
    assert reader.trouble == []


@each_page
def test_a_page_fits_a_phone(phone, name):
    page = phone.open(name)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    sticking_out = """all => all.filter(element => {
        for (let box = element.parentElement; box; box = box.parentElement)
            if (getComputedStyle(box).overflowX !== 'visible') return false;  // it scrolls within its own box
        return element.getBoundingClientRect().right > innerWidth + 1;
    }).map(element => element.outerHTML.slice(0, 120))"""
    assert page.locator("article *:visible").evaluate_all(sticking_out) == []


@each_lab
def test_a_figure_on_a_phone_scrolls_rather_than_shrinks(phone, name):
    figures = phone.open(name).locator("article figure:has(> img[width]):visible")
    shrunk = """all => all.filter(figure => {
        const image = figure.querySelector('img'), card = getComputedStyle(figure);
        const least = Math.min(image.getAttribute('width'), 560) - 1;
        return image.getBoundingClientRect().width < least || card.overflowX !== 'auto';
    }).map(figure => figure.outerHTML.slice(0, 200))"""
    assert figures.evaluate_all(shrunk) == []


def grave(page, **options):
    """What axe finds in the article that is serious."""
    options = {"resultTypes": ["violations"], **options}
    if not page.evaluate("'axe' in window"):  # half a megabyte of script
        page.evaluate(Axe().axe_script)
    found = page.evaluate("options => axe.run('article', options)", options)["violations"]
    return [
        f"{v['id']}: {v['help']} {v['nodes'][0]['html'][:200]}"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


def few_words(reader, name):
    """The page with one word of each colour in its code: what axe has to read, and a browser to draw again in the dark."""
    page = reader.open(name)
    page.evaluate(FEWER_WORDS_AND_GLYPHS)
    return page


@each_page
def test_a_page_can_be_read_by_everybody(reader, name):
    """All rules but those of colours."""
    assert grave(few_words(reader, name), rules=AXE) == []


@each_lab
def test_reports_are_written_on_the_page_also_in_the_dark(reader, name):
    shown = few_words(reader, name).locator("article .cell_output .text_html")
    reader.dress("dark")
    painted = """all => new Set(all.map(box => getComputedStyle(box).backgroundColor)).size == 1
        && getComputedStyle(all[0]).backgroundColor == 'rgba(0, 0, 0, 0)'"""
    assert shown.count() and shown.evaluate_all(painted)


@each_page
def test_colours_can_be_told_apart_in_the_light_and_in_the_dark(reader, name):
    page = few_words(reader, name)
    looks = page.evaluate(ONE_TEXT_OF_EACH_LOOK)
    assert looks >= 5 and grave(page, runOnly=COLOURS) == []
    reader.dress("dark")
    assert grave(page, runOnly=COLOURS) == []
    page.goto("about:blank")  # what was taken out is no loss to others


@pytest.mark.parametrize("name", ON_A_PHONE, scope="module")
def test_a_page_can_be_read_by_everybody_on_a_phone_in_the_dark(phone, name):
    page = few_words(phone, name)
    phone.dress("dark")
    assert grave(page, rules=AXE) == []
    assert page.evaluate(ONE_TEXT_OF_EACH_LOOK) >= 5 and grave(page, runOnly=COLOURS) == []
    page.goto("about:blank")


def test_the_map_shows_what_a_route_has(reader):
    page = reader.open("book/intro")
    assert page.locator(".map li").count() == len(LABS)
    page.get_by_label("Two evenings").check()
    on = page.locator(".map li:has(p:visible) a").all_inner_texts()
    assert [title.partition(" ")[0] for title in on] == ["00", "07"]
    page.get_by_label("A term").check()
    assert page.locator(".map p:visible").count() == len(LABS)


def test_search_finds_a_word(reader):
    page = reader.open("book/intro")
    page.keyboard.press("Control+k")
    page.keyboard.type("underflow")
    page.keyboard.press("Enter")
    expect(page.locator("#search-results")).to_contain_text("Glossary")
    assert reader.trouble == []


def test_the_dark_can_be_switched_on_and_pictures_stay_on_white(reader):
    page = reader.open(LABS[0] if LABS else "book/intro")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    switch = page.locator("button.theme-switch-button").first
    for _ in range(2):  # auto, light, dark: two steps at most
        if page.locator("html").get_attribute("data-theme") == "light":
            switch.click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate(background) != light
    for figure in page.locator("article figure:has(img[src^='data:'])").all():
        expect(figure).to_have_css("background-color", "rgb(255, 255, 255)")
        expect(figure.locator("img").first).to_have_css("filter", "none")
    page.goto(f"{reader.address}/book/notation.html")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")  # the choice is kept
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    assert reader.trouble == []
