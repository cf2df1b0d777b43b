"""Every check passes its reference, rejects every wrong answer with the right words, and knows an untouched stub."""

import inspect
import json
import pathlib
import re

import numpy as np
import pytest
import torch
import wrong_answers

from labutils.teach import check, exercises
from labutils.teach.grade import judge

NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
ALL = exercises.every()
WRONG_ANSWERS = wrong_answers.every()
WRONG = [
    pytest.param(exercise, wrong, id=f"{exercise.id}-{wrong.name}")
    for exercise in ALL.values()
    for wrong in WRONG_ANSWERS.get(exercise.id, ())
]


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_the_reference_passes_and_leaves_all_as_it_was(exercise):
    seal = judge.Seal(exercise)
    report = check.check(exercise.id, exercise.reference)
    assert report.passed, str(report)
    assert not seal.broken(), "a grader would take this for an attack on the checks"


NUMBER = r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.]?\w| \d)"
AMOUNT = rf"(\[[^\]]*\]|{NUMBER})"
VERSUS = r"it is|it was|it should be|should be|not|instead of|the \w+ has|are alive|is right"
PAIR = re.compile(rf"{AMOUNT}[^\d;]*?\b(?:{VERSUS})\b[^\w;.\[-]*(?:only )?{AMOUNT}")
NO_DISTANCE = re.compile(r"\boff by (?:up to )?0(?:\.0*)?(?![.\d])|\b0 too (?:many|few)\b")


def equal_numbers(seen):
    """What compares two equal numbers in the words of a diagnosis, or finds them 0 apart."""
    same = [m[0] for m in PAIR.finditer(seen) if len(set(map(_plain, m.groups()))) == 1]
    return same + [m[0] for m in NO_DISTANCE.finditer(seen)]


def _plain(amount):
    """Written alike where it is the same: 1,024 is 1024, and -0.0 is not 0.0."""
    return amount if amount[0] == "[" else repr(float(amount.replace(",", "")))


@pytest.mark.parametrize(
    "seen, equal",
    [
        ("n = 4: you say 2.7585, and not 2.7585", True),
        ("you find 36.0 GB in the forward, it is 36.0 GB in the backward", True),
        ("y is off by 0%", True),
        ("the gradient is off by up to 0.00 here", True),
        ("you count 448, the model has 448", True),
        ("0 too many", True),
        ("the weight decay is 0.1 where it was 0.1", True),
        ("you count 1,024, the model has 1024 parameters", True),
        ("got shape [2, 3], not [2, 3]", True),
        ("got shape [3, 2], not [2, 3]", False),
        ("you say 0.0, it is -0.0", False),
        ("4 ranks: you say 8 tokens, it is 4", False),
        ("y is off by 0.02 %, and 0.5 elsewhere", False),
        ("step 1 of 2: got 3, it is 4", False),
    ],
)
def test_two_equal_numbers_are_seen(seen, equal):
    assert bool(equal_numbers(seen)) == equal


@pytest.mark.parametrize("exercise, wrong", WRONG)
def test_a_wrong_answer_is_rejected_with_words_that_help(exercise, wrong):
    report = check.check(exercise.id, wrong.attempt)
    failed = [verdict for verdict in report.verdicts if verdict.status == "failed"]
    assert [verdict.name for verdict in failed] == [wrong.rejected_by], str(report)
    assert wrong.hint in f"{failed[0].seen} {failed[0].hint}", str(report)
    assert not equal_numbers(failed[0].seen), str(report)


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_an_untouched_stub_breaks_nothing(exercise):
    def stub(*args, **kwargs):
        raise NotImplementedError

    attempts = [...] + [stub] * callable(exercise.reference)
    for attempt in attempts:
        assert not check.check(exercise.id, attempt).attempted


THINGS = [0, "text", (), (0, 0), (None, None), (torch.zeros(2), None), (0, 0, 0), {}]
THINGS += [torch.zeros(()), torch.zeros(3), np.zeros(2), len]


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_what_an_answer_returns_is_never_told_as_an_error_in_its_code(exercise):
    for thing in THINGS:

        def answer(*args, thing=thing, **kwargs):
            return thing

        class Answer:
            def __init__(self, *args, **kwargs):
                pass

            advance = step = cast = loss = answer

        for attempt in (answer, Answer):
            report = str(check.check(exercise.id, attempt))
            assert "your code raised" not in report, report
            assert "exercises/" not in report, report


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_the_exercise_is_complete(exercise):
    wrong = WRONG_ANSWERS.get(exercise.id, ())
    assert len(wrong) >= 8 and len(exercise.hints) >= 2
    assert len({each.name for each in wrong}) == len(wrong)
    if callable(exercise.reference):
        # The solution is the library's own code, shown and never copied.
        assert (inspect.getmodule(exercise.reference).__name__).startswith("labutils.")


CARD = re.compile(
    r"^### Exercise \d+\.\d+ · (?P<title>.+) \((?P<minutes>\d+) min, (?P<dots>[●○]{3})\)$",
    re.MULTILINE,
)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cards_in_the_labs_are_those_of_the_exercises(path):
    card, seen = None, []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            card = (list(CARD.finditer(source)) or [card])[-1]
        for exercise_id in (
            re.findall(r"\bcheck\(\s*\"([^\"]+)\"", source) if cell["cell_type"] == "code" else ()
        ):
            exercise = exercises.find(exercise_id)
            assert card, (
                f"{exercise_id} is checked before any card '### Exercise N.M · title (minutes min, ●●○)'"
            )
            assert card.groupdict() == dict(
                title=exercise.card.title, minutes=str(exercise.card.minutes), dots=exercise.card.dots
            )
            seen.append(exercise_id)
    assert len(set(seen)) >= 2, "a lab has at least two exercises"


def test_every_wrong_answer_belongs_to_an_exercise():
    assert WRONG_ANSWERS.keys() == ALL.keys()


def test_unknown_exercises_are_named():
    with pytest.raises(ValueError, match="topics are"):
        exercises.find("nonsense")
