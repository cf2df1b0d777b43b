"""Every check passes its reference, rejects every wrong answer with the right words, and knows an untouched stub."""

import inspect
import json
import pathlib
import re

import pytest
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


@pytest.mark.parametrize("exercise, wrong", WRONG)
def test_a_wrong_answer_is_rejected_with_words_that_help(exercise, wrong):
    report = check.check(exercise.id, wrong.attempt)
    failed = [verdict for verdict in report.verdicts if verdict.status == "failed"]
    assert [verdict.name for verdict in failed] == [wrong.rejected_by], str(report)
    assert wrong.hint in f"{failed[0].seen} {failed[0].hint}", str(report)


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_an_untouched_stub_breaks_nothing(exercise):
    def stub(*args, **kwargs):
        raise NotImplementedError

    attempts = [...] + [stub] * callable(exercise.reference)
    for attempt in attempts:
        assert not check.check(exercise.id, attempt).attempted


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_the_exercise_is_complete(exercise):
    wrong = WRONG_ANSWERS.get(exercise.id, ())
    assert len(wrong) >= 3 and len(exercise.hints) >= 2
    assert len({each.name for each in wrong}) == len(wrong)
    assert exercise.title and exercise.proves
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
                title=exercise.title, minutes=str(exercise.minutes), dots=exercise.dots
            )
            seen.append(exercise_id)
    assert len(set(seen)) >= 2, "a lab has at least two exercises"


def test_every_wrong_answer_belongs_to_an_exercise():
    assert WRONG_ANSWERS.keys() == ALL.keys()


def test_unknown_exercises_are_named():
    with pytest.raises(ValueError, match="topics are"):
        exercises.find("nonsense")
