"""Every check accepts right answers in other styles than the reference, four for each exercise."""

import pytest
import right_answers

from labutils.teach import check, exercises

ALL, RIGHT = exercises.every(), right_answers.every()
STYLES = 4


@pytest.mark.parametrize(
    "exercise, answer",
    [
        pytest.param(exercise, answer, id=f"{exercise}-{style}")
        for exercise, styles in RIGHT.items()
        for style, answer in styles.items()
    ],
)
def test_a_right_answer_in_another_style_passes(exercise, answer):
    report = check.check(exercise, answer)
    assert report.passed, str(report)


def test_every_exercise_is_tried_in_enough_styles():
    few = {exercise for exercise in ALL if len(RIGHT.get(exercise, ())) < STYLES}
    assert not few, f"{STYLES} right answers each for {sorted(few)}"
    assert RIGHT.keys() <= ALL.keys(), sorted(RIGHT.keys() - ALL.keys())


def test_an_all_reduce_that_is_no_ring_passes_and_is_told_so():
    answers = RIGHT["collectives/ring-all-reduce"]
    told = {name: str(check.check("collectives/ring-all-reduce", answers[name])) for name in answers}
    assert "no ring: a rank sends to 7 others" in told.pop("no ring")
    assert not any("no ring" in each for name, each in told.items() if name != "two halves")


def test_keys_that_go_to_every_rank_pass_and_are_told_that_this_is_no_ring():
    exercise = "context_parallel/ring"
    answers = RIGHT[exercise]
    said = {name: "no ring" in str(check.check(exercise, answers[name])) for name in answers}
    assert [name for name, is_told in said.items() if is_told] == ["each to each"]
