"""The schedule editor on a bare page: no kernel, no network; its rules are those of `schedule`."""

import random

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect

from labutils import schedule
from labutils.config import Link
from labutils.schedule import Board, Op, Schedule, simulate
from labutils.teach.editor import LEVELS, Editor

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Schedules</title>
<style>@media (prefers-color-scheme: dark) {{ body {{ background: #121212; color: #ddd; }} }}</style><body><main><h1>Schedules</h1>{}</main>"""
PLAYED = """(root, [level, moves]) => {
    const { setUp, whyNot, play, measure } = root.rules;
    const board = setUp(level);
    const said = moves.map(([rank, op]) => {
        const reason = whyNot(board, rank, op);
        if (reason === null) play(board, rank, op);
        return reason;
    });
    return [said, measure(board)];
}"""


@pytest.fixture
def page(browser, tmp_path):
    file, trouble = tmp_path / "page.html", []
    file.write_text(PAGE.format(Editor()._repr_html_() * 2), encoding="utf-8")
    page = browser.new_page(viewport={"width": 360, "height": 640})
    page.on("console", lambda message: trouble.append(message.text))
    page.on("pageerror", lambda error: trouble.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith("file:") or trouble.append(request.url)
    )
    page.goto(file.as_uri())
    yield page
    page.close()
    assert trouble == []


@pytest.fixture
def editor(page):
    return page.locator(".lu-editor").first


def board_of(pick):
    """A schedule without operations, on a line, a loop or a V, and a limit."""
    p, m = pick.randint(1, 3), pick.randint(1, 4)
    place = pick.choice([schedule.loop(p), schedule.loop(p, 2), schedule.vee(p)])
    empty = Schedule("random", ((),) * p, (place,), m, split=pick.random() < 0.5)
    return empty, pick.choice([None, None, 1, 2, 3])


REASONS = (
    "operations of", "stages are", "micro-batches are", "which is", "twice", "its own", "has come",
    "its limit",
)  # fmt: skip


def moves_on(empty, cap, pick):
    """Moves until none is left, legal ones mostly; what Python says to each; the rows."""
    board, moves, said = Board(empty, cap), [], []
    rows = [[] for _ in empty.ranks]
    every = [
        (rank, Op(kind, stage, k))
        for rank in range(len(rows))
        for kind in empty.kinds
        for stage in range(empty.stages)
        for k in range(empty.micro_batches)
    ]
    odd = [Op("W", 0, 0), Op("X", 0, 0), Op("F", -1, 0), Op("F", empty.stages, 0), Op("B", 0, 99)]
    while legal := [(rank, op) for rank, op in every if board.why_not(rank, op) is None]:
        coming = [(rank, op) for rank, op in every if op not in board.done]
        strange = pick.choice([*every, *((0, op) for op in odd)])
        rank, op = pick.choice(pick.choice([legal, legal, coming, [strange]]))
        said.append(board.why_not(rank, op))
        moves.append((rank, op))
        if said[-1] is None:
            board.play(rank, op)
            rows[rank].append(op)
    return moves, said, tuple(map(tuple, rows))


def test_its_rules_are_those_of_the_board_and_its_times_those_of_the_simulator(editor):
    pick, reasons, finished = random.Random(5), set(), 0
    for _ in range(50):
        empty, cap = board_of(pick)
        moves, said, rows = moves_on(empty, cap, pick)
        level = dict(place=empty.places[0], m=empty.micro_batches, kinds=empty.kinds, cap=cap)
        sizes = [pick.randint(1, 9) for _ in empty.places[0]]
        level |= dict(barrier=True, message=pick.randint(0, 2), sizes=sizes)
        found, measured = editor.evaluate(PLAYED, [level, moves])
        assert found == said
        reasons |= {word for word in REASONS for reason in said if word in (reason or "")}
        made = Schedule("random", rows, empty.places, empty.micro_batches, empty.split)
        if schedule.why_illegal(made, cap) is None:
            run, finished = simulate(made, link=Link(level["message"], 1.0)), finished + 1
            assert (measured["makespan"], measured["period"]) == (run.makespan, run.period)
            assert measured["peaks"] == [made.peak(rank) for rank in range(len(rows))]
            assert measured["most"] == [made.peak(rank, sizes) for rank in range(len(rows))]
            assert measured["bubble"] == pytest.approx(run.bubble_fraction)
    assert finished > 20 and reasons == set(REASONS)


def keys_of(best):
    """The buttons of a schedule's operations, in an order in which they can be placed."""
    spans = sorted(simulate(best).spans, key=lambda span: span.start)
    return [f"{span.rank} {span.kind} {span.name.partition('@')[2]}" for span in spans]


CLICKED = """(root, keys) => {
    for (const key of keys) root.querySelector(`[data-key="${key}"]`).click();
}"""


def test_a_finished_schedule_is_recognized_and_can_be_read(editor):
    status = editor.get_by_role("status")
    for number, level in enumerate(LEVELS):
        editor.get_by_label("level").select_option(str(number))
        editor.evaluate(CLICKED, keys_of(level.best))
        expect(status).to_contain_text(f"You built {level.told['best']}: {level.told['time']:g} per")
        expect(status).to_contain_text("Goal reached.")
        chosen = editor.get_by_label("level").locator("option").nth(number)
        expect(chosen).to_have_text(f"{level.title} ✓")
        line = editor.locator(".lu-line").text_content()
        assert line.startswith("mine = schedule.read(")
        mine = eval(line.removeprefix("mine = "), {"schedule": schedule})
        assert mine.ranks == level.best.ranks
        on = editor.get_by_role("button", name="Next level")
        if number + 1 == len(LEVELS):
            expect(on).to_have_count(0)
            continue
        on.click()
        expect(editor.get_by_label("level")).to_have_value(str(number + 1))
        expect(editor).to_contain_text(LEVELS[number + 1].task)


MISSED = {  # level, what is built there: what is said of it
    (0, schedule.naive): "36 units of time where 18 are asked",
    (2, schedule.one_f_one_b): "26 units of time where 22 are asked",
    (2, schedule.gpipe): "12 as the sum of all peaks where 8 are asked",
    (4, schedule.zb_h1): "600 MB on the fullest rank where 400 are asked",
}


def test_the_goal_that_is_missed_is_named(editor):
    for (number, make), said in MISSED.items():
        editor.get_by_label("level").select_option(str(number))
        editor.evaluate(CLICKED, keys_of(make(3, 4)))
        expect(editor.get_by_role("status")).to_contain_text(f"Goal missed: {said}. Best known")
        expect(editor.get_by_role("button", name="Next level")).to_have_count(0)


FIELD = """root => {
    const live = document.createElement("div");
    live.className = "lu-live";
    root.replaceWith(live);
    live.append(root, Object.assign(document.createElement("input"), { type: "text", ariaLabel: "order" }));
    live.lastChild.addEventListener("input", ({ target }) => { document.title = target.value; });
}"""


def test_beside_a_kernel_s_field_a_finished_order_is_handed_over(page, editor):
    keys = keys_of(LEVELS[0].best)
    editor.evaluate(CLICKED, keys)
    expect(editor).to_contain_text("with a kernel, a button below runs it on ranks")
    editor.get_by_role("button", name="Clear").click()
    editor.evaluate(FIELD)
    editor.evaluate(CLICKED, keys)
    expect(editor).to_contain_text("the button below runs it on ranks")
    assert schedule.read(page.title()).ranks == LEVELS[0].best.ranks


def test_the_keyboard_alone_will_do_and_what_is_illegal_is_refused_with_its_reason(page, editor):
    status = editor.get_by_role("status")
    editor.get_by_label("level").select_option("1")
    editor.get_by_role("group", name="Ranks").focus()
    page.keyboard.type("ffff")
    expect(status).to_have_text("No: rank 0 holds 4 activations at F3@0; its limit is 3.")
    page.keyboard.press("b")
    expect(status).to_have_text("No: rank 0 runs B0@0 before B0@1 has come from rank 1.")
    page.keyboard.press("ArrowDown")
    page.keyboard.type("b")
    expect(status).to_have_text("No: rank 1 runs B0@1 before its own F0@1.")
    page.keyboard.type("f")
    expect(editor.get_by_label("rank 1: F0@1")).to_be_visible()
    page.keyboard.press("Backspace")
    expect(status).to_have_text("Taken back: F0 of rank 1.")
    expect(editor.get_by_label("rank 1: idle")).to_be_visible()
    page.keyboard.press("Control+f")  # the browser's
    expect(editor.get_by_label("rank 1: idle")).to_be_visible()
    twin = page.locator(".lu-editor").nth(1)
    expect(twin.get_by_label("rank 0: idle")).to_be_visible()
    expect(editor.get_by_role("button", name="B0").first).to_have_attribute("aria-disabled", "true")


def test_a_key_without_an_operation_is_told_why(page, editor):
    editor.get_by_role("group", name="Ranks").focus()
    page.keyboard.press("w")
    expect(editor.get_by_role("status")).to_have_text(
        "No: this board has no W. Its B is the whole backward pass."
    )
    page.keyboard.press("Shift+F")
    expect(editor.get_by_role("status")).to_contain_text("No: rank 0 has one stage")


def test_a_second_chunk_takes_shift(page, editor):
    editor.get_by_label("level").select_option("7")
    editor.get_by_role("group", name="Ranks").focus()
    page.keyboard.type("f")
    page.keyboard.press("Shift+F")
    expect(editor.get_by_role("status")).to_have_text(
        "No: rank 0 runs F0@3 before F0@2 has come from rank 1."
    )


def test_a_worse_order_is_told_what_is_known(page, editor):
    editor.get_by_role("group", name="Ranks").focus()
    for _ in range(4):
        for keys in (("f", "ArrowDown"), ("ArrowUp", "b")):
            for key in keys * 3:
                page.keyboard.press(key)
    status = editor.get_by_role("status")
    expect(status).to_contain_text("You built naive: 36 per step")
    expect(status).to_contain_text("Best known here: GPipe: 18 per step, ranks hold 4, 4, 4.")
    editor.get_by_role("button", name="Clear").click()
    expect(editor.locator(".lu-line")).to_have_count(0)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everybody_can_read_it(page, editor, theme):
    page.emulate_media(color_scheme=theme)
    editor.get_by_label("level").select_option("7")
    editor.get_by_role("button", name="F0@0").click()
    found = Axe().run(page).response["violations"]
    assert [f"{v['id']}: {v['nodes'][0]['html'][:150]}" for v in found] == []
    wide = page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 360  # the board scrolls, the page does not
