"""predict, reveal, check, hint and show, as a learner meets them."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import linecache
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from labutils import collectives, units
from labutils.flash import triton_kernel
from labutils.teach import check, exercises
from labutils.teach.exercises import _clock, _ranks


@pytest.fixture
def doubling(monkeypatch):
    """An exercise of two properties, in place of the course's own."""

    def small(attempt):
        if attempt(2) != 4:
            raise exercises.Failed(f"n = 2: got {attempt(2)}, it is 4", "is it n times n?")
        return "1 case"

    def large(attempt):
        if attempt(100) != 200:
            raise exercises.Failed(
                f"n = 100: got {attempt(100)}, it is 200", "n · n equals 2n at 2 alone"
            )

    exercise = exercises.Exercise(
        id="demo/double",
        reference=lambda n: 2 * n,
        hints=("Add.", "n + n"),
        properties=(exercises.Property("small", small), exercises.Property("large", large)),
    )
    card = exercises.Card("00_demo", "0.1", exercise.id, "double", "Double it", 2, "●○○")
    monkeypatch.setattr(exercises, "cards", lambda: (card,))
    monkeypatch.setattr(exercises, "find", lambda name: exercise)
    return exercise


def test_a_right_answer_passes(doubling):
    report = check.check("demo/double", doubling.reference)
    assert report.passed and str(report).splitlines() == [
        "solved · Double it",
        "✓ small · 1 case",
        "✓ large",
    ]


def test_an_error_is_shown_at_the_learners_own_line(doubling):
    def attempt(n):
        return torch.nn.functional.dropout(
            torch.ones(n), p=n
        )  # raises in torch's Python code, further in

    assert "in attempt, at this line: return torch.nn.functional.dropout(" in str(
        check.check("demo/double", attempt)
    )


def test_a_wrong_answer_is_diagnosed_first(doubling):
    report = check.check("demo/double", lambda n: n * n)
    assert not report.passed
    assert str(report).splitlines() == [
        "not yet · Double it",
        "✗ large · n = 100: got 10000, it is 200",
        "  n · n equals 2n at 2 alone",
        "✓ small · 1 case",
    ]
    assert "✗ large" in report._repr_html_() and 'role="status"' in report._repr_html_()


def test_what_comes_after_a_failure_is_not_reached(doubling):
    assert str(check.check("demo/double", lambda n: 0)).splitlines()[-1] == "– large"


def stub(n):
    raise NotImplementedError


class Stub:
    """A class as a lab hands it out."""

    def __init__(self, n):
        super().__init__()
        raise NotImplementedError

    def step(self):
        """Not there yet."""


@pytest.mark.parametrize("attempt", [stub, Stub, ..., None])
def test_an_untouched_stub_is_not_attempted(doubling, attempt):
    report = check.check("demo/double", attempt)
    assert not report.attempted and str(report) == "not attempted · Double it (2 min, ●○○)"


def half_done(n):
    if n > 1:
        raise NotImplementedError
    return 2 * n


class HalfDone(Stub):
    def __init__(self, n):
        self.n = n
        self.step()

    def step(self):
        raise NotImplementedError


def test_an_attempt_with_something_left_to_do_is_an_attempt(doubling):
    for attempt in (half_done, HalfDone, lambda n: stub(n)):
        report = check.check("demo/double", attempt)
        assert report.attempted and "raise NotImplementedError" in str(report)
    assert check.check("demo/double", functools.partial(stub)).verdicts == ()


def adds_in_eight_bits(n):
    eight = torch.ones(2).to(torch.float8_e4m3fn)
    return eight + eight


def test_what_torch_cannot_do_is_an_attempt(doubling):
    report = check.check("demo/double", adds_in_eight_bits)
    assert report.attempted and "not implemented for" in str(report)
    with pytest.raises(exercises.Failed, match="not implemented for"):
        _ranks.run(2, "two ranks", adds_in_eight_bits, "")


def test_an_exception_is_part_of_the_report_and_shows_the_learners_line(doubling):
    report = check.check("demo/double", lambda n: n / 0)
    assert "ZeroDivisionError" in str(report) and "n / 0" in str(report)


def test_gradients_are_on_in_a_check_whatever_the_session_has_switched_off():
    exercise = exercises.find("lora/adapter")
    with torch.no_grad():
        assert check.check(exercise.id, exercise.reference).passed
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert check.check(exercise.id, exercise.reference).passed


def test_a_check_makes_its_tensors_on_the_cpu_whatever_the_sessions_device():
    torch.set_default_device("meta")
    try:
        for name in ("lora/adapter", "quantization/groups", "scaling/bug-hunt"):
            assert check.check(name, exercises.find(name).reference).passed, name
        assert torch.ones(1).is_meta
    finally:
        torch.set_default_device(None)


def test_a_check_makes_its_tensors_in_fp32_whatever_the_sessions_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        for name in ("precision/bug-hunt", "zero/repair", "lora/adapter"):
            assert check.check(name, exercises.find(name).reference).passed, name
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_gradients_that_an_attempt_switches_off_are_on_again_behind_it(doubling):
    def attempt(n):
        torch.set_grad_enabled(False)
        return 2 * n

    assert check.check("demo/double", attempt).passed and torch.is_grad_enabled()


@pytest.mark.parametrize("attempt", [lambda *args, **kwargs: torch.zeros(3), lambda: 4])
def test_what_a_check_cannot_work_with_is_not_told_as_an_error_of_the_learners_code(attempt):
    report = str(check.check("start/tokens-per-step", attempt))
    assert "with your answer the check meets" in report and "your code raised" not in report


def test_a_line_of_pythons_own_library_is_not_told_as_the_learners(doubling):
    report = str(check.check("demo/double", lambda n: functools.reduce(max, json.loads("[1, x]"))))
    assert "JSONDecodeError" in report and "at this line: report = str(" in report


def test_an_attempt_that_does_not_end_is_stopped(doubling, monkeypatch):
    def forever(n):
        while True:
            pass

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(check, "SECONDS", 0.2)
    report = check.check("demo/double", forever)
    assert not report.passed and "did not end within 0.2 seconds" in str(report)
    assert "Does every loop end?" in str(report)
    assert check.check("demo/double", doubling.reference).passed
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_ranks_that_do_not_end_are_stopped_and_the_next_attempt_runs(monkeypatch):
    def forever(x, comm):
        while comm.rank == 1:
            pass
        return x

    monkeypatch.setattr(check, "SECONDS", 0.5)
    assert "did not end within 0.5 seconds" in str(
        check.check("collectives/ordered-sends", forever)
    )
    monkeypatch.undo()
    assert check.check("collectives/ordered-sends", collectives.shift).passed


def test_a_sound_rank_may_be_late_on_a_busy_machine():
    """The clock of checks counts computing; that of ranks runs on while others compute."""
    assert _ranks.world_of(2).timeout > 10 * _clock.WAITING * check.SECONDS


@pytest.mark.parametrize("exercise", ["lora/adapter", "checkpointing/checkpoint"])
def test_a_check_leaves_the_generator_as_it_was(exercise):
    before = torch.get_rng_state()
    assert check.check(exercise, exercises.find(exercise).reference).passed
    assert torch.equal(torch.get_rng_state(), before)


def test_an_interrupt_is_still_the_learners(doubling):
    def interrupted(n):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check.check("demo/double", interrupted)


def test_an_answer_of_ten_megabytes_is_not_echoed(doubling):
    report = check.check("demo/double", lambda n: "x" * 10_000_000)
    assert "10,000,020 characters" in str(report) and len(str(report)) < 3000
    assert len(report._repr_html_()) < 4000


def test_a_flood_of_prints_is_shortened(doubling, capsys, monkeypatch):
    def loud(n):
        while True:
            print("x" * 100)

    monkeypatch.setattr(check, "SECONDS", 0.2)
    assert not check.check("demo/double", loud).passed
    printed = capsys.readouterr().out
    assert 5000 < len(printed) < 10_100 and "characters" in printed


def test_a_recursion_without_end_is_told_in_two_lines(doubling):
    def deeper(n):
        return deeper(n) + 1

    report = str(check.check("demo/double", deeper))
    assert "RecursionError" in report and "return deeper(n) + 1" in report
    assert len(report.splitlines()) <= 5


def test_an_attempt_that_leaves_the_interpreter_does_not(doubling):
    assert "raised SystemExit" in str(check.check("demo/double", lambda n: sys.exit(1)))


def test_what_waits_for_ever_is_stopped_too(doubling, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 0.1)
    assert "did not end" in str(check.check("demo/double", lambda n: time.sleep(60)))


class Counter:
    @contextlib.contextmanager
    def first(self):
        yield

    def second(self):
        return 2


def handed_out(n):
    return n * n


@pytest.mark.parametrize("code", [handed_out, Counter])
def test_the_code_of_a_bug_hunt_is_no_attempt_until_it_changes(doubling, monkeypatch, code):
    exercise = dataclasses.replace(doubling, untouched=exercises.digest(code))
    monkeypatch.setattr(exercises, "find", lambda name: exercise)
    assert len(exercise.untouched) == 8
    assert not check.check("demo/double", code).attempted
    assert check.check("demo/double", lambda n: n * n).attempted
    assert not check.check("demo/double", lambda n: n * n).passed


def test_a_digest_follows_the_code_and_not_its_comments():
    def same(source):
        space, path = {"__name__": "__main__"}, f"cell {len(linecache.cache)}"
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        exec(compile(source, path, "exec"), space)
        return exercises.digest(space["Sum"])

    plain = "class Sum:\n    start = 0\n\n    def of(self, x):\n        return sum(x)\n"
    assert same(plain) == same("# mine\n\n" + plain.replace("\n\n", "\n    # from 0\n\n\n"))
    for change in [("start = 0", "start = 1"), ("sum(x)", "sum(y)"), ("Sum:", "Sum(int):")]:
        assert same(plain.replace(*change)) != same(plain)
    assert exercises.digest(3) == exercises.digest(sum) == exercises.digest(int) == ""


def test_hints_are_graded_and_folded(doubling):
    hint = check.hint("demo/double")
    assert str(hint) == "Hint 1 of 2:\nAdd." and "Add." not in repr(hint)
    assert "<details" in hint._repr_html_() and " open" not in hint._repr_html_()
    assert "Add.</div></details>" in hint._repr_html_()
    with pytest.raises(ValueError, match="has 2 hints, asked for number 3"):
        check.hint("demo/double", 3)


@pytest.fixture(autouse=True)
def no_guesses_left_over(monkeypatch):
    monkeypatch.setattr(check, "predictions", {})


@pytest.mark.parametrize(
    "guess, kept",
    [
        (dict(MB=64), 64_000_000),
        (dict(GiB=1.5), 3 * 2**29),
        (dict(steps=6), 6),
        (dict(answer="inf"), "inf"),
        (dict(MB=0.5), 500_000),
    ],
)
def test_a_guess_is_kept_in_base_units(guess, kept):
    check.predict("q", **guess)
    assert check.predictions == {"q": kept}


@pytest.mark.parametrize(
    "guess, error",
    [
        ({}, ValueError),
        (dict(MB=1, GB=1), ValueError),
        (dict(MB=float("nan")), ValueError),
        (dict(MB=[1]), TypeError),
        (dict(MB=True), TypeError),
    ],
)
def test_a_guess_that_is_none_is_refused(guess, error):
    with pytest.raises(error, match="guess"):
        check.predict("q", **guess)


def test_reveal_says_how_far_off():
    assert "made no guess" in str(check.reveal("q", MB=96))
    check.predict("q", MB=96)
    assert str(check.reveal("q", MB=96)) == "You guessed 96.0 MB, it is 96.0 MB: right."
    for actual in (48, 192):
        assert "off by a factor of 2." in str(check.reveal("q", MB=actual))
    assert str(check.reveal("q", MB=96.3)).endswith("right within half a percent.")
    assert str(check.reveal("q", MB=95.4)).endswith("off by a factor of 1.01.")
    check.predict("q", GiB=1.5)
    assert "1.50 GiB, it is 3.00 GiB: off" in str(check.reveal("q", GiB=3))
    check.predict("q", answer="nan")
    assert (
        str(check.reveal("q", answer="inf")) == "You guessed nan, it is inf: worth a second look."
    )
    assert "second look" in str(check.reveal("q", "infinity", answer="inf"))
    check.predict("q", steps=0)
    assert str(check.reveal("q", steps=6)) == "You guessed 0 steps, it is 6 steps."


@pytest.mark.parametrize(
    "guess, answer, words",
    [
        ("INT8", "int8", ()),
        ("int 8", "int8", ()),
        ("b", "B", ()),
        ("the B.", "B", ()),
        ("LoRA's B", "B", ("LoRA's B",)),
        ("Infinity", "inf", ("infinity",)),
        ("+inf", "inf", ()),
        ("3.0", "3", ()),
        (3, "3", ()),
        ("a", "a", ()),
    ],
)
def test_a_guess_in_words_is_judged_by_what_it_means(guess, answer, words):
    check.predict("q", answer=guess)
    assert str(check.reveal("q", *words, answer=answer)).endswith(": right.")
    assert str(check.reveal("q", answer="other")).endswith(": worth a second look.")


def test_show_is_the_library_itself():
    source = check.show(units.whole)
    assert str(source).startswith("units.whole:\ndef whole(")
    assert "<details" in source._repr_html_() and "def" not in repr(source)
    assert check.show(units).title == "units"
    with pytest.raises(TypeError, match="needs a function, a class or a module"):
        check.show(3)


def test_show_opens_a_kernel_as_the_function_it_is_made_from():
    shown = check.show(triton_kernel._forward)
    assert shown.title == "flash.triton_kernel._forward"
    assert shown.text.startswith("@jit\ndef _forward(") and shown.text.count("\n") < 40


@pytest.mark.parametrize("waited", [0.0, 2.9, 3.1])
def test_who_waits_for_a_processor_waits_for_nothing(monkeypatch, waited):
    """On a busy machine an attempt that computes little takes long, and is not stopped for it."""
    now = SimpleNamespace(wall=0.0, computed=0.0, queued=0.0)
    clock = SimpleNamespace(monotonic=lambda: now.wall, process_time=lambda: now.computed)
    monkeypatch.setattr(_clock, "time", clock)
    monkeypatch.setattr(_clock, "_queued", lambda: now.queued)

    def busy():
        now.wall, now.computed, now.queued = 100 + waited, 0.5, 99.5
        signal.raise_signal(signal.SIGALRM)

    late = waited > _clock.WAITING
    with pytest.raises(_clock.TimeIsUp) if late else contextlib.nullcontext(), _clock.limit(1):
        busy()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells it")
def test_threads_that_share_a_processor_queue_for_it():
    """Two that compute for a while on one processor: what they compute and queue is their time."""
    processor, computed, told = min(os.sched_getaffinity(0)), threading.Barrier(3), threading.Event()

    def compute():
        os.sched_setaffinity(0, {processor})
        while time.thread_time() < 0.1:
            hashlib.sha256(bytes(100_000))  # lets go of the lock
        computed.wait()
        told.wait()

    before = _clock._queued()
    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    computed.wait()
    queued = _clock._queued() - before
    told.set()
    for thread in threads:
        thread.join()
    assert queued > 0.05
