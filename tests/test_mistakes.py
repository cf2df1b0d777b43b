"""The list of mistakes to plant fits the code."""

from mistakes.run import MISTAKES, ROOT


def test_every_mistake_can_be_planted():
    """`planted` refuses a quote that does not stand exactly once in its file."""
    for mistake in MISTAKES:
        assert all((ROOT / test).exists() for test in mistake.tests)
        text = (ROOT / mistake.file).read_text(encoding="utf-8")
        compile(mistake.planted(text), mistake.file, "exec")
    assert len(MISTAKES) >= 400 and len({mistake.file for mistake in MISTAKES}) >= 60
