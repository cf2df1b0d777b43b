"""One training step of `model.GPT`, walked through without numbers: every operation that PyTorch runs on a CPU, in its order.

The walk reads like the model: what is a local variable there is one here, so that memory dies where it does there.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from labutils.memory.sharding import ROOT, Units
from labutils.memory.states import FP32
from labutils.memory.tape import Node, Parameter, Size, Tape, Tensor, checkpoint

CASTS = "half copies of weights"


class Kind(NamedTuple):
    """Everything that decides which operations run; sizes do not, except where a size of 1 makes a view of a copy."""

    half: int  # bytes of a number in matrix products
    autocast: bool
    dropout: bool
    norm: str
    rope: bool
    ffn: str
    bias: bool | str
    tied: bool
    attention: str
    checkpointing: str
    tokens: bool  # more than one, and so on
    batch: bool
    heads: bool
    groups: bool
    grouped: bool  # fewer key–value heads than heads
    layers: int
    optimizer: str
    stepping: str
    fp32_gradients: bool | str
    micro_batches: int
    zero: int


Shapes = dict[str, Size]
Weights = dict[str, Parameter]


def around(size: dict[str, Size], kind: Kind) -> Shapes:
    """Numbers in each parameter outside of the layers, in the order in which the model holds them."""
    found = {"tokens": size["v"] * size["h"]}
    if not kind.rope:
        found["positions"] = size["s"] * size["h"]
    found |= _norm("norm", size, kind)
    return found if kind.tied else found | {"head": size["v"] * size["h"]}


def layer(size: dict[str, Size], kind: Kind) -> Shapes:
    """Numbers in each parameter of a layer, in the order in which it holds them."""
    h, f, a, g, d = (size[letter] for letter in "hfagd")
    shapes = {"query": (h, a * d), "key": (h, g * d), "value": (h, g * d), "output": (a * d, h)}
    found = _norm("attention_norm", size, kind)
    for name, (wide, out) in shapes.items():
        found[f"{name}.weight"] = wide * out
        if kind.bias is True or (kind.bias and name != "output"):
            found[f"{name}.bias"] = out
    found |= _norm("feed_forward_norm", size, kind)
    matrices = [("gate", h, f)] * (kind.ffn == "swiglu") + [("up", h, f), ("down", f, h)]
    for name, wide, out in matrices:
        found[f"{name}.weight"] = wide * out
        if kind.bias is True:
            found[f"{name}.bias"] = out
    return found


def _norm(at: str, size: dict[str, Size], kind: Kind) -> Shapes:
    return {
        f"{at}.{name}": size["h"]
        for name in (("weight", "bias") if kind.norm == "layernorm" else ("weight",))
    }


class Walk(Tape):
    """Walks a kind of model: `size` gives the letters, `kind` the choices that change which operations run, `units` what ZeRO does meanwhile."""

    units: Units

    def __init__(self, size: dict[str, Size], kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.b, self.s, self.h, self.f, self.a, self.g, self.d, self.v = (
            size[letter] for letter in "bshfagdv"
        )
        self.n = self.b * self.s
        self.half = kind.half
        self.width = (
            FP32 if kind.autocast else kind.half
        )  # bytes of a weight, and of a number in the residual stream
        self.casts: dict[Parameter, Tensor] = {}  # autocast keeps its half copies of the weights
        self.casting = kind.autocast
        self.passed: defaultdict[int, list[int]] = defaultdict(
            list
        )  # the moments at which each layer was left, forward and backward

    # The operations

    def add(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        out = self.new("add", x.elements, max(x.width, y.width), name)
        cast = {
            place: [("_to_copy", t.elements, t.width)]
            for place, t in enumerate((x, y))
            if t.width != out.width
        }
        return self.attach(out, (x, y), lambda grads, saved: (grads[0], grads[0]), fits=cast)

    def cast(self, x: Tensor, width: int, name: str) -> Tensor:
        if x.width == width:
            return x
        back = x.width
        out = self.new("_to_copy", x.elements, width, name)
        return self.attach(
            out,
            (x,),
            lambda grads, saved: (self.new("_to_copy", grads[0].elements, back, grads[0].name),),
        )

    def view(self, x: Tensor) -> Tensor:
        return self.attach(x.detach(), (x,), lambda grads, saved: (grads[0],))

    def scale(self, x: Tensor, event: str, name: str) -> Tensor:
        """x times or over a constant: nothing to keep."""
        return self.attach(
            self.like(event, x, name), (x,), lambda grads, saved: (self.like(event, grads[0]),)
        )

    def times(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        """x·y, element by element; each is kept for the gradient of the other."""
        kept = self.save(x, y)

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.like("mul", grads[0], f"gradient of {name}") for _ in range(2)]

        return self.attach(
            self.new("mul", x.elements, max(x.width, y.width), name), (x, y), backward, kept
        )

    def dropout(self, x: Tensor, name: str) -> Tensor:
        if not self.kind.dropout:
            return x
        mask = self.like("empty_like", x, f"mask of {name}")
        self.happened("bernoulli_")
        self.happened("div_")
        kept = self.save(mask)
        out = self.like("mul", x, f"{name} after dropout")
        return self.attach(out, (x,), lambda grads, saved: (self.like("mul", grads[0]),), kept)

    def linear(
        self, x: Tensor, weight: Parameter, bias: Parameter | None, out: Size, name: str
    ) -> Tensor:
        n, width = self.n, self.half
        if self.casting:
            inputs = [self.cached(bias)] if bias is not None else []
            inputs = [self.cached(weight), *inputs]
            inputs = [self.cast(x, self.half, f"half copy of the input of {name}"), *inputs]
        else:
            inputs = [x, weight] if bias is None else [x, weight, bias]
        # Tokens in one row each, weight transposed: views, whose order decides which gradient is passed on first.
        for place in (1, 0) if bias is None else (0, 1):
            inputs[place] = self.view(inputs[place])
        kept = self.save(*inputs[:2])
        into, over = x.elements, weight.elements
        what, of_weight = f"gradient of the input of {name}", f"gradient of the weight of {name}"

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            if bias is None:
                dw = self.new("mm", over, width, of_weight)
                return [self.new("mm", into, width, what), dw]
            dx = self.new("mm", into, width, what)
            return [dx, self.new("mm", over, width, of_weight), grads[0]]

        fits = {} if bias is None else {2: [("sum", bias.elements, width)]}
        y = self.new("mm" if bias is None else "addmm", n * out, width, name)
        return self.attach(y, inputs, backward, kept, fits)

    def cached(self, weight: Parameter) -> Tensor:
        if weight not in self.casts:
            self.casts[weight] = self.cast(weight, self.half, CASTS)
        return self.casts[weight]

    def norm(self, x: Tensor, weights: Weights, at: str) -> Tensor:
        return (self.layer_norm if self.kind.norm == "layernorm" else self.rms_norm)(x, weights, at)

    def layer_norm(self, x: Tensor, weights: Weights, at: str) -> Tensor:
        weight, bias = weights[f"{at}.weight"], weights[f"{at}.bias"]
        kept = self.save(x)
        into, width, h = x.elements, x.width, self.h

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            made = [
                self.allocate(into, width, "gradient of the residual stream"),
                *(self.allocate(h, width, "gradient of a norm") for _ in range(2)),
            ]
            self.happened("native_layer_norm_backward")
            return made

        out, mean, deviation = (
            self.allocate(into, width, "normalized"),
            *(self.allocate(self.n, width, "mean and 1/σ") for _ in range(2)),
        )
        self.happened("native_layer_norm")
        kept += self.save(mean, deviation, weight)
        return self.attach(out, (x, weight, bias), backward, kept)

    def rms_norm(self, x: Tensor, weights: Weights, at: str) -> Tensor:
        weight = weights[f"{at}.weight"]
        full, n, h = x.elements, self.n, self.h
        wide = self.cast(x, FP32, "stream in fp32")

        def through_power(grads: list[Tensor], saved: list) -> list[Tensor]:
            power = self.new("pow", full, FP32, "working memory of RMSNorm")
            twice = self.like("mul", power)
            return [self.like("mul", twice)]

        kept = self.save(wide)
        square = self.attach(
            self.new("pow", full, FP32, "working memory of RMSNorm"), (wide,), through_power, kept
        )
        mean = self.new("mean", n, FP32, "1/rms")
        self.attach(
            mean,
            (square,),
            lambda grads, saved: (self.new("div", full, FP32, "working memory of RMSNorm"),),
        )
        self.happened("add_")

        def through_root(grads: list[Tensor], saved: list) -> list[Tensor]:
            cube = self.new("pow", n, FP32, "1/rms")
            product = self.like("mul", cube)
            return [self.like("mul", product)]

        root = self.attach(self.new("rsqrt", n, FP32, "1/rms"), (mean,), through_root)
        root.node.saved = self.save(root)
        del square, mean

        def through_product(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.new("mul", full, FP32, "working memory of RMSNorm") for _ in range(2)]

        kept = self.save(wide, root)
        normal = self.new("mul", full, FP32, "stream / rms")
        self.attach(normal, (wide, root), through_product, kept, {1: [("sum", n, FP32)]})
        kept = self.save(normal, weight)
        fits = [
            ("sum", h, FP32),
            *([("_to_copy", h, weight.width)] if weight.width != FP32 else []),
        ]
        out = self.new("mul", full, FP32, "normalized")
        self.attach(out, (normal, weight), through_product, kept, {1: fits})
        del wide, normal
        return self.cast(out, x.width, "normalized")

    def rotary(self, x: Tensor) -> Tensor:
        """Its two halves times cos and sin: tables that are kept, but need no gradient."""
        # A half is counted as all its numbers at half their bytes, so that sizes stay whole polynomials.
        whole, width = x.elements, x.width
        half, thin = whole, width // 2
        tables = (
            [
                self.new("_to_copy", self.s * self.d, self.half // 2, "half copies of cos and sin")
                for _ in range(2)
            ]
            if self.casting
            else []
        )
        name = "rotated halves"

        def split(grads: list[Tensor | None], saved: list) -> list[Tensor]:
            return [self.new("cat", whole, width, "gradient of queries and keys")]

        halves = Node(next(self.sequence), (x,), [], split, {}, 2)
        left, right = (Tensor(x.storage, half, thin, halves, i) for i in range(2))

        def turn(t: Tensor, table: int) -> Tensor:
            kept = self.save(tables[table]) if tables else []
            return self.attach(
                self.like("mul", t, name),
                (t,),
                lambda grads, saved: (self.like("mul", grads[0], name),),
                kept,
            )

        def both(t: Tensor, u: Tensor, event: str) -> Tensor:
            def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
                return [grads[0], self.like("neg", grads[0], name) if event == "sub" else grads[0]]

            return self.attach(self.like(event, t, name), (t, u), backward)

        parts = [
            both(turn(left, 0), turn(right, 1), "sub"),
            both(turn(right, 0), turn(left, 1), "add"),
        ]

        def narrow(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [Tensor(grads[0].storage, half, thin) for _ in range(2)]

        return self.attach(
            self.new("cat", whole, width, "queries and keys, rotated"), parts, narrow
        )

    def copied(self, x: Tensor, forward: bool, backward: bool, name: str | None = None) -> Tensor:
        """x in another layout: a view of it where strides allow, a copy where they don't, on the way there and on the way back."""
        if forward:
            out = self.like("clone", x, name)
        else:
            out = Tensor(x.storage, x.elements, x.width)
        if not forward and not backward:
            out.node, out.index = x.node, x.index
            return out

        def back(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.like("clone", grads[0]) if backward else grads[0]]

        return self.attach(out, (x,), back)

    def product(self, x: Tensor, y: Tensor, out: Size, name: str, grad_name: str) -> Tensor:
        """A batched matrix product."""
        kept = self.save(x, y)
        sizes, width = (x.elements, y.elements), x.width
        names = (f"gradient of {grad_name}", f"gradient of {y.name}")

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            second = self.new("bmm", sizes[1], width, names[1])
            return [self.new("bmm", sizes[0], width, names[0]), second]

        return self.attach(self.new("bmm", out, width, name), (x, y), backward, kept)

    def masked(self, scores: Tensor) -> Tensor:
        return self.attach(
            self.like("add", scores, "scores, masked"), (scores,), lambda grads, saved: (grads[0],)
        )

    def softmax(self, x: Tensor, event: str) -> Tensor:
        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.like("_softmax_backward_data", grads[0], "gradient of the scores")]

        out = self.attach(self.like(event, x, "softmax"), (x,), backward)
        out.node.saved = self.save(out)
        return out

    # The model

    @property
    def scores(self) -> Size:
        return self.b * self.a * self.s * self.s

    def attend_plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kind, rope = self.kind, self.kind.rope
        queries = q.elements
        # Heads lie inside tokens, until RoPE makes queries and keys anew with heads outermost.
        stacks = kind.tokens and (kind.grouped or (kind.batch and kind.groups))
        apart = kind.tokens and kind.batch and kind.groups
        stacked = self.copied(q, stacks and not rope, False, "queries in rows")
        keys = self.copied(k, apart and not rope, False, "keys in rows")
        scores = self.product(stacked, keys, self.scores, "scores", "queries")
        del stacked, keys
        scores = self.scale(scores, "div", "scores")
        whole = self.new("full", self.s * self.s, q.width, "mask of the future")
        future = self.like("triu", whole)
        del whole
        weights = self.dropout(self.softmax(self.masked(scores), "_softmax"), "softmax")
        rows = self.copied(v, apart, False, "values in rows")
        out = self.product(weights, rows, queries, "output of attention", "softmax")
        del rows, future
        return self.copied(out, False, stacks)

    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.kind.dropout:
            return self.attend_fallback(q, k, v)
        sizes, width, event = (
            (q.elements, k.elements, v.elements),
            q.width,
            "_scaled_dot_product_flash_attention_for_cpu",
        )

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            made = [
                self.allocate(size, width, f"gradient of {name}")
                for size, name in zip(sizes, ("queries", "keys", "values"), strict=True)
            ]
            self.happened(f"{event}_backward")
            return made

        kept = self.save(q, k, v)
        out = self.allocate(q.elements, width, "output of attention")
        rows = self.allocate(self.n * self.a, FP32, "log-sum-exp")
        self.happened(event)
        kept += self.save(out, rows)
        return self.attach(out, (q, k, v), backward, kept)

    def attend_fallback(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """With dropout, PyTorch's fused CPU kernel falls back on plain attention in fp32, with keys and values repeated for every head."""
        kind, rope, width = self.kind, self.kind.rope, q.width
        apart = kind.tokens and kind.batch and kind.heads
        q, k, v = (
            self.cast(t, FP32, f"{name} in fp32")
            for t, name in ((q, "queries"), (k, "keys"), (v, "values"))
        )
        scaled = self.scale(q, "mul", "queries, scaled")
        ones = self.new("ones", self.s * self.s, 1, "mask of the future")
        lower = self.like("tril", ones)
        del ones
        low, high = (self.new("scalar_tensor", 1, FP32, "mask of the future") for _ in range(2))
        mask = self.new("where", self.s * self.s, FP32, "mask of the future")
        del lower, low, high
        every = [self.repeated(k, "keys"), self.repeated(v, "values")] if kind.grouped else [k, v]
        keys = self.scale(every[0], "mul", "keys, scaled")
        rows = self.copied(scaled, apart and not rope, False)
        columns = self.copied(keys, apart and not rope and not kind.grouped, False)
        scores = self.product(rows, columns, self.scores, "scores", "queries")
        del rows, columns, keys
        masked = self.masked(scores)
        del scores
        weights = self.softmax(masked, "_safe_softmax")
        del masked
        weights = self.dropout(weights, "softmax")
        half = self.cast(
            weights, width, "softmax in half"
        )  # returned beside the output, and thrown away
        out = self.product(
            weights,
            self.copied(every[1], apart and not kind.grouped, False),
            q.elements,
            "output of attention",
            "softmax",
        )
        out = self.cast(self.copied(out, False, apart), width, "output of attention")
        del mask, half
        return out

    def repeated(self, x: Tensor, name: str) -> Tensor:
        groups = x.elements
        out = self.new("clone", self.n * self.a * self.d, x.width, f"{name}, repeated")
        return self.attach(
            out, (x,), lambda grads, saved: (self.new("sum", groups, FP32, f"gradient of {name}"),)
        )

    def attention(self, x: Tensor, weights: Weights) -> Tensor:
        a, g, d, kind = self.a, self.g, self.d, self.kind
        # Gradients come back with heads outermost; those of keys even transposed, as their product was.
        back = (
            kind.tokens and kind.heads and self.regroups,
            self.keys_regroup,
            kind.tokens and kind.groups and not self.fused,
        )
        q, k, v = (
            self.copied(
                self.linear(
                    x, weights[f"{part}.weight"], weights.get(f"{part}.bias"), size * d, name
                ),
                False,
                copies,
            )
            for (part, size, name), copies in zip(
                (("query", a, "queries"), ("key", g, "keys"), ("value", g, "values")),
                back,
                strict=True,
            )
        )
        if kind.rope:
            q, k = self.rotary(q), self.rotary(k)
        attend = self.attend_plain if kind.attention == "plain" else self.attend_fused
        heads = (
            checkpoint(self, self.replay, attend, q, k, v)
            if kind.checkpointing == "selective"
            else attend(q, k, v)
        )
        copies = kind.tokens and kind.heads and (not self.fused or kind.rope)
        return self.linear(
            self.copied(heads, copies, False),
            weights["output.weight"],
            weights.get("output.bias"),
            self.h,
            "output of attention",
        )

    @property
    def fused(self) -> bool:
        return self.kind.attention == "sdpa" and not self.kind.dropout

    @property
    def regroups(self) -> bool:
        return not self.fused or self.kind.rope

    @property
    def keys_regroup(self) -> bool:
        kind = self.kind
        if kind.rope or (kind.grouped and kind.attention == "sdpa" and kind.dropout):
            return kind.tokens and kind.groups
        return kind.tokens and kind.batch and not self.fused

    def feed_forward(self, x: Tensor, weights: Weights) -> Tensor:
        def linear(x: Tensor, name: str, out: Size, what: str) -> Tensor:
            return self.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), out, what)

        if self.kind.ffn == "gelu":
            return linear(
                self.activation(linear(x, "up", self.f, "input of GELU"), "gelu"),
                "down",
                self.h,
                "output of feed-forward",
            )
        gate = self.activation(linear(x, "gate", self.f, "input of SiLU"), "silu")
        product = self.times(gate, linear(x, "up", self.f, "factor of SiLU"), "SwiGLU")
        del gate
        return linear(product, "down", self.h, "output of feed-forward")

    def activation(self, x: Tensor, event: str) -> Tensor:
        kept = self.save(x)
        name = {"gelu": "GELU", "silu": "SiLU"}[event]

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.like(f"{event}_backward", grads[0], f"gradient of the input of {name}")]

        return self.attach(self.like(event, x, name), (x,), backward, kept)

    def block(self, weights: Weights, x: Tensor) -> Tensor:
        x = self.add(
            x,
            self.dropout(
                self.attention(self.norm(x, weights, "attention_norm"), weights), "attention"
            ),
            "residual stream",
        )
        return self.add(
            x,
            self.dropout(
                self.feed_forward(self.norm(x, weights, "feed_forward_norm"), weights),
                "feed-forward",
            ),
            "residual stream",
        )

    def embed(self, weights: Weights) -> Tensor:
        v, h, s, width = self.v, self.h, self.s, self.width

        def lookup(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.new("embedding_dense_backward", v * h, width, "gradient of the embedding")]

        x = self.attach(
            self.new("embedding", self.n * h, width, "residual stream"),
            (weights["tokens"],),
            lookup,
        )
        positions = weights.get("positions")
        if positions is not None:
            rows = Tensor(positions.storage, positions.elements, width)
            self.attach(
                rows,
                (positions,),
                lambda grads, saved: (
                    self.new("slice_backward", s * h, width, "gradient of the positions"),
                ),
            )
            fits = {1: [("sum", s * h, width)]}
            x = self.attach(
                self.like("add", x), (x, rows), lambda grads, saved: (grads[0], grads[0]), fits=fits
            )
        return self.dropout(x, "embedding")

    def logits(self, outer: Weights, layers: list[Weights]) -> Tensor:
        self.units.gather(ROOT, 0)
        x = self.embed(outer)
        if self.kind.zero == 3:
            x = self.seen(x, lambda: self.units.free(0))
        for number, weights in enumerate(layers):
            self.units.gather(number, number + 1)
            block = functools.partial(self.block, weights)
            x = self.boundary(
                checkpoint(self, self.replay, block, x)
                if self.kind.checkpointing == "full"
                else block(x),
                number,
            )
            self.units.free(number)
        head = outer["tokens"] if self.kind.tied else outer["head"]
        logits = self.linear(self.norm(x, outer, "norm"), head, None, self.v, "logits")
        self.units.free(ROOT)
        return self.seen(logits, self.units.begin_backward) if self.kind.zero else logits

    def loss(self, outer: Weights, layers: list[Weights]) -> Tensor:
        return self.cross_entropy(self.logits(outer, layers))

    def boundary(self, x: Tensor, layer: int) -> Tensor:
        """x, as it leaves a layer, both ways."""

        def passed() -> None:
            self.passed[layer].append(len(self.moments) - 1)

        def back() -> None:
            passed()
            self.units.come_back(layer)

        passed()
        return self.seen(x, back)

    def seen(self, x: Tensor, back: Callable[[], None]) -> Tensor:
        """x, with a node that calls `back` when its gradient has come."""

        def backward(grads: list[Tensor], saved: list) -> list[Tensor]:
            back()
            return [grads[0]]

        return self.attach(x.detach(), (x,), backward)

    def cross_entropy(self, logits: Tensor) -> Tensor:
        # Autocast computes the loss in fp32.
        wide = self.cast(logits, FP32, "logits in fp32") if self.casting else logits

        def through_logarithm(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.like("_log_softmax_backward_data", grads[0], "gradient of the logits")]

        logs = self.attach(
            self.like("_log_softmax", wide, "log-probabilities"), (wide,), through_logarithm
        )
        logs.node.saved = self.save(logs)
        size, width = logs.elements, logs.width

        def through_choice(grads: list[Tensor], saved: list) -> list[Tensor]:
            return [self.new("nll_loss_backward", size, width, "gradient of the log-probabilities")]

        kept = self.save(logs)
        loss, count = self.allocate(1, width, "loss"), self.allocate(1, width, "number of targets")
        self.happened("nll_loss_forward")
        return self.attach(loss, (logs,), through_choice, kept + self.save(count))

    @contextmanager
    def replay(self) -> Iterator[None]:
        """A second evaluation finds autocast as it was, with no copies of weights made yet."""
        casts, casting = self.casts, self.casting
        self.casts, self.casting = {}, self.kind.autocast
        try:
            yield
        finally:
            self.casts, self.casting = casts, casting
