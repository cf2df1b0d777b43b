"""Activations: every tensor that autograd keeps for the backward pass, in the order of the forward pass."""

from collections.abc import Iterator
from dataclasses import dataclass

from labutils.config import ModelConfig, TrainConfig
from labutils.ledger import Ledger, Line
from labutils.memory.states import INDEX, WIDTHS


def activations(model: ModelConfig, train: TrainConfig) -> Ledger:
    """Bytes that autograd keeps for the backward pass of one micro-batch: a line for each saved tensor, under the module that saves it.

    Exact for `model.GPT` on a CPU; tokens and targets are tensors of their own.

    Source: read off `torch.autograd.graph.saved_tensors_hooks`; a test compares it byte by byte over random configurations.
    """
    return Ledger(
        Line(name, amount, component="activations", note=what)
        for name, amount, what in _Saved(model, train).step()
        if amount
    )


@dataclass(frozen=True)
class _Saved:
    """Walks through the model in the order of its forward pass and yields (module, bytes, what) for each tensor that autograd keeps."""

    model: ModelConfig
    train: TrainConfig

    @property
    def tokens(self) -> int:
        return self.train.micro_batch * self.model.seq_len

    @property
    def compute(self) -> int:
        """Bytes of an element in and between the matrix products."""
        return WIDTHS[self.train.precision]

    @property
    def stream(self) -> int:
        """Bytes of an element of the residual stream, which autocast leaves in fp32."""
        return 4 if self.train.autocast else self.compute

    def step(self) -> Iterator[tuple[str, int, str]]:
        n, (h, v, L) = self.tokens, self.model.letters("h v L")
        yield "tokens", n * INDEX, "token numbers, sb"
        yield "dropout", self.masks(n * h, self.stream), "dropout mask, sbh"
        for layer in range(L):
            yield from self.block(f"blocks.{layer}")
        yield from self.norm("norm")
        yield from self.linear("head", n, h, v)
        yield "outside", n * v * self.stream, "log-probabilities, sbv"
        yield "outside", n * INDEX, "targets, sb"
        yield "outside", self.stream, "number of targets"

    def block(self, at: str) -> Iterator[tuple[str, int, str]]:
        n, h = self.tokens, self.model.d_model
        if self.train.checkpointing == "full":
            yield at, n * h * self.stream, "input of the checkpointed block, sbh"
            return
        yield from self.norm(f"{at}.attention_norm")
        yield from self.attention(f"{at}.attention")
        yield f"{at}.dropout", self.masks(n * h, self.compute), "dropout mask, sbh"
        yield from self.norm(f"{at}.feed_forward_norm")
        yield from (self.experts if self.model.num_experts > 1 else self.feed_forward)(
            f"{at}.feed_forward", n
        )
        # Experts add their outputs up in the dtype of the stream.
        yield (
            f"{at}.dropout",
            self.masks(n * h, self.stream if self.model.num_experts > 1 else self.compute),
            "dropout mask, sbh",
        )

    def norm(self, at: str) -> Iterator[tuple[str, int, str]]:
        n, h = self.tokens, self.model.d_model
        if self.model.norm == "layernorm":
            yield at, n * h * self.stream, "input, sbh"
            yield at, 2 * n * self.stream, "mean and 1/σ of each token"
        else:
            yield at, n * h * 4, "input in fp32, sbh"
            yield at, n * 4, "1/rms of each token"
            yield at, n * h * 4, "input / rms, sbh"

    def linear(
        self, at: str, n: int, width: int, out: int, *, shared: bool = False, copies: int = 1
    ) -> Iterator[tuple[str, int, str]]:
        """The input of a linear layer, unless it is `shared` with a tensor already kept; autocast adds a half copy of each weight."""
        yield at, 0 if shared else n * width * self.compute, "input"
        if self.train.autocast:
            yield at, copies * width * out * self.compute, "half copy of the weight"

    def masks(self, elements: int, size: int) -> int:
        """Bytes of a dropout mask of `elements`, which a CPU keeps in the dtype of what it masks, `size` bytes each."""
        return elements * size if self.model.dropout else 0

    def attention(self, at: str) -> Iterator[tuple[str, int, str]]:
        b, n, e = self.train.micro_batch, self.tokens, self.compute
        s, h, a, g, d = self.model.letters("s h a g d")
        rope, fused = self.model.positions == "rope", self.train.attention == "sdpa"
        yield from self.projections(at, {"query": a * d, "key": g * d, "value": g * d})
        if rope and self.train.autocast:
            # One table serves all layers, and goes by its name in the first.
            yield (
                "blocks.0.attention.rotary",
                4 * s * (d // 2) * e,
                "half copies of cos and sin, for q and for k",
            )
        fallback, selective = (
            fused and bool(self.model.dropout),
            self.train.checkpointing == "selective",
        )
        if fallback and not selective:
            # PyTorch's fused CPU kernel has no dropout: it falls back on plain attention in fp32, keys and values repeated for every head.
            g, e = a, 4
        yield at, n * a * d * e, "queries"
        yield at, n * g * d * e, "keys"
        yield at, n * g * d * e, "values"
        keeps_output = fused and not fallback and not selective
        if keeps_output:
            yield at, n * a * d * e, "output, sbh"
            yield at, n * a * 4, "log-sum-exp of each row of scores, asb"
        elif not selective:
            yield at, b * a * s * s * e, "softmax of the scores, as²b"
            yield at, self.masks(b * a * s * s, e), "dropout mask, as²b"
            yield at, self.masks(b * a * s * s, e), "softmax after dropout, as²b"
        # The fused kernel lays its output out like its queries: as one row a token, ready for the next product, unless RoPE made them
        # anew, heads outermost; with one head or one token the two layouts are the same.
        yield from self.linear(
            f"{at}.output", n, a * d, h, shared=keeps_output and (not rope or 1 in (s, a))
        )

    def projections(self, at: str, widths: dict[str, int]) -> Iterator[tuple[str, int, str]]:
        """Linear layers that read one input: they share it, except under autocast, where each casts a half copy of its own."""
        for i, (name, width) in enumerate(widths.items()):
            yield from self.linear(
                f"{at}.{name}",
                self.tokens,
                self.model.d_model,
                width,
                shared=i > 0 and not self.train.autocast,
            )

    def feed_forward(self, at: str, n: int, copies: int = 1) -> Iterator[tuple[str, int, str]]:
        (h, f), e = self.model.letters("h f"), self.compute
        if self.model.ffn == "gelu":
            yield from self.linear(f"{at}.up", n, h, f, copies=copies)
            yield at, n * f * e, "input of GELU, sbf"
        else:
            yield from self.linear(f"{at}.gate", n, h, f, copies=copies)
            yield from self.linear(
                f"{at}.up", n, h, f, shared=not self.train.autocast, copies=copies
            )
            yield at, 3 * n * f * e, "input of SiLU, its output, and the factor beside it, sbf each"
        yield from self.linear(f"{at}.down", n, f, h, copies=copies)

    def experts(self, at: str, n: int) -> Iterator[tuple[str, int, str]]:
        """Every token visits k experts: whatever the router chooses, the experts together see k·n tokens."""
        (h, E, k), e = self.model.letters("h E k"), self.compute
        visits = k * n
        yield from self.linear(f"{at}.router", n, h, E)
        yield at, visits * INDEX, "chosen experts"
        yield at, visits * e, "softmax of their scores"
        yield at, 2 * visits * INDEX, "token and place of each visit"
        yield at, visits * e, "weight of each visit"
        yield at, visits * h * e, "outputs of the experts"
        yield at, visits * h * self.stream, "the same, weighted"
        yield from self.feed_forward(f"{at}.experts", visits, copies=E)
