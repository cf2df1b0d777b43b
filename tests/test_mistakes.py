"""The list of mistakes to plant still fits the code."""

from mistakes.run import MISTAKES, ROOT


def test_a_hundred_mistakes_can_be_planted():
    """A line that has changed since makes one fewer; `mistakes.run` names it."""
    files = []
    for mistake in MISTAKES:
        text = (ROOT / mistake.file).read_text(encoding="utf-8")
        assert all((ROOT / test).exists() for test in mistake.tests)
        if text.count(mistake.right) == 1:
            compile(mistake.planted(text), mistake.file, "exec")
            files.append(mistake.file)
    assert len(files) >= 100 and len(set(files)) >= 30
