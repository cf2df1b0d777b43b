"""Every check passes its reference, rejects every wrong answer with the right words, and knows an untouched stub."""

import inspect
import json
import re

import numpy as np
import pytest
import torch
import wrong_answers

from labutils import checkpointing, config, data_parallel, precision, zero
from labutils.config import ModelConfig
from labutils.teach import check, exercises

NOTEBOOKS = sorted((config.DATA.parent / "notebooks").glob("*.ipynb"))
ALL = exercises.every()
WRONG_ANSWERS = wrong_answers.every()
WRONG = [
    pytest.param(exercise, wrong, id=f"{exercise.id}-{wrong.name}")
    for exercise in ALL.values()
    for wrong in WRONG_ANSWERS.get(exercise.id, ())
]


@pytest.mark.parametrize("exercise", ALL.values(), ids=ALL)
def test_the_reference_passes(exercise):
    report = check.check(exercise.id, exercise.reference)
    assert report.passed, str(report)


@pytest.mark.parametrize("exercise, wrong", WRONG)
def test_a_wrong_answer_is_rejected_with_words_that_help(exercise, wrong):
    report = check.check(exercise.id, wrong.attempt)
    failed = [verdict for verdict in report.verdicts if verdict.status == "failed"]
    assert [verdict.name for verdict in failed] == [wrong.rejected_by], str(report)
    assert wrong.hint in f"{failed[0].seen} {failed[0].hint}", str(report)


def _codes(fmt, x):
    return np.int64(fmt.encode(x))


def _shares(length, rank, size, epoch):
    return np.array(data_parallel.sampler(length, rank, size, epoch=epoch))


def _filled(target, seq_len, gpus, fits):
    share = target // seq_len // gpus
    micro = next(b for b in range(share, 0, -1) if share % b == 0 and fits(b))
    return [micro, share // micro]


def _summed(x, fmt):
    """Pairs by recursion, from the front."""
    if len(x) == 1:
        return x[0]
    half = 2 ** ((len(x) - 1).bit_length() - 1)
    return precision.round_to(_summed(x[:half], fmt) + _summed(x[half:], fmt), fmt)


def _pairs(n, k):
    for step in checkpointing.segments(n, k).steps:
        yield [step.op, step.at]


def _broken(checkpoint):
    return torch.tensor(ALL["checkpointing/bug-hunt"].reference(checkpoint))


RIGHT = {
    "floats/encode": [_codes],
    "floats/rounds-twice": [np.float64(1 + 2**-11 + 2**-40), 1 + 2**-11 + 2**-26],
    "floats/pairwise-sum": [_summed],
    "data_parallel/sampler": [_shares, lambda *args: tuple(_shares(*args).tolist())],
    "accumulation/configure": [_filled, lambda *args: tuple(map(np.int64, _filled(*args)))],
    "checkpointing/segments": [_pairs, lambda n, k: list(checkpointing.segments(n, k).steps)],
    "checkpointing/bug-hunt": [_broken, lambda checkpoint: np.bool_(_broken(checkpoint).item())],
    "zero/schedule": [lambda count: iter(map(list, zero.unit_order(count)))],
    "memory/count-parameters": [lambda config: float(ModelConfig.from_hf(config).num_params)],
}


@pytest.mark.parametrize(
    "exercise, attempt",
    [
        pytest.param(exercise, attempt, id=f"{exercise}-{number}")
        for exercise, attempts in RIGHT.items()
        for number, attempt in enumerate(attempts, 1)
    ],
)
def test_a_right_answer_in_another_style_passes(exercise, attempt):
    report = check.check(exercise, attempt)
    assert report.passed, str(report)


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
