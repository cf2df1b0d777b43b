"""`parallelize`: a whole GPT becomes one rank's share of it, as the table of its parts says."""

import re
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from labutils import anatomy, units
from labutils.config import ModelConfig
from labutils.model import GPT, FeedForward
from labutils.tensor_parallel import layers
from labutils.world import Comm, marked


def styles(model: ModelConfig) -> dict[str, str]:
    """How each part of the model that has weights is split, by its path: of a matrix the dim with a
    letter that tp divides (`anatomy.SPLITS`), the first ("column") or the second ("row"); of the
    embedding its words ("vocabulary"); what has no such letter is "whole" on every rank, and so are
    routers and experts, which ep spreads.

    >>> table = styles(ModelConfig.named("llama-3.1-8b"))
    >>> [table[f"blocks.*.feed_forward{part}"] for part in ("_norm", ".gate", ".up", ".down")]
    ['whole', 'column', 'column', 'row']
    """
    units.instance(model, ModelConfig, "styles")
    found, letters = {}, set(anatomy.SPLITS["tp"]) - set("f" * (model.num_experts > 1))
    for part in anatomy.parts(model):
        dims = (part.weight or part.products).split()  # a tied head has no weight of its own
        if len(dims) > 2 or not dims:  # softmax·v, and what has no weight
            continue
        split = [bool(letters & set(dim)) for dim in dims]
        style = ("column" if part.products else "vocabulary") if split[0] else "row"
        found[part.name] = style if any(split) else "whole"
    return found


def rank_config(model: ModelConfig, n: int) -> ModelConfig:
    """The model that each of n ranks has: fewer heads, narrower feed-forward layers and a smaller
    vocabulary, at the same hidden width. With fewer key–value heads than ranks it has one. Experts
    stay as wide as they are.

    >>> rank = rank_config(ModelConfig.named("llama-3.1-8b"), 16)
    >>> rank.num_heads, rank.num_kv_heads, rank.d_ff, rank.d_model
    (2, 1, 896, 4096)

    Raises ValueError, with the size that n does not divide.
    """
    units.instance(model, ModelConfig, "rank_config")
    n = units.whole(n, "n", 1)
    shared = n % model.num_kv_heads == 0  # each key–value head on as many neighbouring ranks
    divided = replace(model, num_kv_heads=model.num_heads) if shared else model
    sizes = anatomy.letters(divided, tp=n)
    a, g, f, v = (sizes[letter] for letter in "agfv")
    g = 1 if shared else g
    return replace(model, num_heads=a, num_kv_heads=g, d_ff=f, vocab_size=v)


def require_dense(model: ModelConfig) -> None:
    """Nothing, or a ValueError for a mixture of experts, whose costs under tp have no formula."""
    if model.num_experts > 1:
        remedy = "a dry run counts it (World(mesh, engine='dry'))"
        raise ValueError(f"no formula for num_experts={model.num_experts} under tp: {remedy}")


class ParallelGPT(GPT):
    """A GPT of which this rank has its share; made by `parallelize`. A call returns this rank's
    columns of the logits, [b, s, v_t], for `cross_entropy`."""

    comm: Comm
    sequence: bool

    def embed(self, tokens: Int[Tensor, "b s"]) -> Float[Tensor, "b s_or_s_t h"]:
        """The residual stream as it enters the first layer; under sequence parallelism its share of
        the tokens."""
        if self.positions is None or not self.sequence:
            return super().embed(tokens)
        s = tokens.shape[1]
        at, share = self.places(s), layers.share_of_tokens(s, self.comm)
        first = self.comm.rank * share
        weight = layers.copy_to(self.positions.weight, self.comm, "gradients")
        if isinstance(at, slice):
            positions = weight[first:][:share]
        else:
            positions = F.embedding(at[first:][:share], weight)
        return self.dropout(self.tokens(tokens) + positions)

    def loss(self, tokens: Int[Tensor, "b s"], targets: Int[Tensor, "b s"]) -> Float[Tensor, ""]:
        """Mean cross-entropy in nats per token, the same on all ranks; a target of −100 counts for
        nothing."""
        return layers.cross_entropy(self(tokens), targets, self.comm)


def parallelize(module: GPT, comm: Comm, sequence: bool = False) -> GPT:
    """The GPT, changed in place into this rank's share of it: 1/n of each matrix of tp rank 0,
    under the name that it had.

    sequence: whether the ranks also share out the tokens of the residual stream, and what is
        computed there

    Its parameters have their whole gradients after a backward pass, so any optimizer can step them,
    and `data_parallel.replicate` and `zero.shard` can follow on another axis. Dropout of what all
    ranks have is the same on all, that of heads and of tokens which one rank has is its own.

    Cost: bytes sent as in `predict.sent`, kept as in `predict.activations`.
    Invariant: loss, gradients and steps are those of the whole model, up to rounding, where all
    ranks are given the same tokens and targets; nobody compares them, and with others the loss is
    a plausible number.
    Raises ValueError where comm.size does not divide heads, width or vocabulary, and neither
    divides key–value heads nor is a multiple of them; in a pass, where it does not divide the
    sequence that it splits.
    Source: Shoeybi et al. 1909.08053, section 3; Korthikanti et al. 2205.05198, section 4.2.
    """
    if type(module) is not GPT:  # a share of one already knows its own tokens or words
        got = type(module).__name__
        raise TypeError(f"parallelize takes a whole labutils.model.GPT, got {got}")
    units.instance(comm, Comm, "parallelize")
    config = module.config
    rank_config(config, comm.size)  # or an error that says what does not fit
    # A rank of a pipeline may have one of the ends, or none.
    both = config.tied and module.head is not None and module.tokens is not None
    if both and module.head.weight is not module.tokens.weight:  # rounded alone, say
        raise ValueError("the head of this tied model has a weight of its own: give it tied=False")
    for parameter in module.parameters():
        comm.broadcast(parameter.data, out=parameter.data)
    table = styles(config)
    for path in [name for name, _ in module.named_modules()]:
        if (style := table.get(re.sub(r"\d+", "*", path))) is not None:
            module.set_submodule(path, _share(module, path, style, comm, sequence))
    if both:
        module.head.weight = module.tokens.weight
    blocks: list[Any] = list(module.get_submodule("blocks").children())
    for block in blocks:
        attention, feed_forward = block.attention, block.feed_forward
        layers.ColumnLinear.together(attention.query, attention.key, attention.value)
        if isinstance(feed_forward, FeedForward) and feed_forward.gate is not None:
            layers.ColumnLinear.together(feed_forward.gate, feed_forward.up)
    for parameter in module.parameters():
        marked(parameter)  # that of a norm is whole
    if not sequence:  # what all ranks have is to stay the same
        for part in (module, *blocks):
            if part.dropout is not None:
                part.dropout.group = comm
    module.__class__ = ParallelGPT
    assert isinstance(module, ParallelGPT)
    module.comm = comm
    module.sequence = sequence
    return module


def _share(module: GPT, path: str, style: str, comm: Comm, sequence: bool) -> nn.Module:
    """This rank's share of a part."""
    whole, name = module.get_submodule(path), path.rpartition(".")[2]
    if style == "column":
        a, g = module.config.letters("a g")
        heads = {"query": a, "key": g, "value": g}.get(name)
        return layers.ColumnLinear.from_full(whole, comm, sequence=sequence, heads=heads)
    if style == "row":
        return layers.RowLinear.from_full(whole, comm, sequence=sequence)
    if style == "vocabulary":
        return layers.VocabEmbedding.from_full(whole, comm, sequence=sequence)
    if not sequence or isinstance(whole, nn.Embedding):
        return whole
    norm = isinstance(whole, (nn.LayerNorm, nn.RMSNorm))
    kind = layers.TokenNorm if norm else layers.TokenLinear
    return kind.from_full(whole, comm)
