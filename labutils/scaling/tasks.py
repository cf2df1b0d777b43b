"""Two small tasks on real data: the next character of a text, and handwritten digits."""

import torch
from torch import Tensor

from labutils import corpus
from labutils.scaling.copies import Network

CONTEXT, VOCAB = 8, 64
CHARACTERS = Network((8 * CONTEXT, 64, VOCAB), "tanh", tokens=VOCAB, embed=8)
"""8,832 parameters: the next character from the last eight, of 64 kinds."""

Examples = tuple[Tensor, Tensor]


def characters() -> tuple[Examples, Examples]:
    """Inputs int64 [n, 8] and targets [n] of the text, and 1,024 held out from its last tenth.

    The 63 most frequent characters keep a token each, the others share one.
    """
    text = corpus.encoded("topics")
    kept = torch.bincount(text, minlength=len(corpus.CHARACTERS)).argsort(
        descending=True, stable=True
    )
    renamed = torch.full((len(corpus.CHARACTERS),), VOCAB - 1)
    renamed[kept[: VOCAB - 1]] = torch.arange(VOCAB - 1)
    windows = renamed[text].unfold(0, CONTEXT + 1, 1)
    cut = int(0.9 * len(windows))
    held_out = windows[_spread_out(cut + CONTEXT, len(windows) - 1)]
    train = windows[:cut]
    return (train[:, :-1], train[:, -1]), (held_out[:, :-1], held_out[:, -1])


def _spread_out(first: int, last: int, count: int = 1024) -> Tensor:
    """Places from first to last: `torch.linspace` in fp32, which rounds another way where a CPU has
    other vector instructions, and one place of 1,024 moves a loss by 0.002."""
    step, i = float(torch.tensor((last - first) / (count - 1))), torch.arange(count).double()
    from_both_ends = torch.where(i < count / 2, first + step * i, last - step * (count - 1 - i))
    return from_both_ends.float().long()


def digits_network(norm: bool = True) -> Network:
    """A network for digits, with a LayerNorm before each activation or without."""
    return Network((64, 32, 32, 32, 10), "relu", norm)


def digits() -> tuple[Examples, Examples]:
    """1,437 images of handwritten digits, float32 [n, 64], with their classes, and 360 held out:
    scikit-learn's, which come with the package. A pixel is taken less its mean, over the standard
    deviation of all pixels.

    Raises ImportError, with the remedy, where scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        remedy = 'pip install -e ".[real]"'
        raise ImportError(f"the digits come with scikit-learn: {remedy}") from error
    images, classes = load_digits(return_X_y=True)
    shuffled = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32)[shuffled]
    x = (x - x[:1437].mean(0)) / x[:1437].std()
    y = torch.tensor(classes, dtype=torch.long)[shuffled]
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])
