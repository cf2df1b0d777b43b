"""What the experiments of the labs stand on: two frozen texts, the same tokens on every Python."""

import hashlib

import pytest

from labutils.teach.rigs import corpus


@pytest.mark.parametrize(
    "name, digest", [("topics", "1f33318beb65f01c"), ("source", "edb7858cbbeb1d93")]
)
def test_tokens_are_frozen(name, digest):
    tokens = corpus.encoded(name)
    text = "".join(corpus.CHARACTERS[token] for token in tokens)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_each_character_is_its_place_in_ascii():
    assert len(corpus.CHARACTERS) == len(set(corpus.CHARACTERS)) == 96
    assert list(corpus.CHARACTERS[1:]) == sorted(corpus.CHARACTERS[1:])


def test_an_unknown_text_is_refused():
    with pytest.raises(ValueError, match="no text 'wiki': take one of topics, source"):
        corpus.encoded("wiki")
