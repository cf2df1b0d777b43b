"""Wrong answers to the exercises of `lora`."""

import functools
import math

import torch
from torch import nn

from wrong_answers import Wrong


class _Slips(nn.Module):
    """A layer with an adapter, and slips switched on one at a time."""

    def __init__(
        self, linear, rank, alpha, *, a="drawn", b="zero", scale="both", frozen="all",
        kept=True, once=True, early=True, added=True,
    ):  # fmt: skip
        super().__init__()
        self.linear = linear
        linear.weight.requires_grad_(frozen == "bias")
        linear.bias.requires_grad_(frozen == "weight")
        if frozen == "none":
            linear.requires_grad_(True)
        values = {"zero": torch.zeros, "drawn": torch.randn, "ones": torch.ones}
        self.A = nn.Parameter(values[a](rank, linear.in_features))
        self.B = nn.Parameter(values[b](linear.out_features, rank))
        factors = {
            "both": alpha / rank, "none": 1.0, "alpha": alpha, "rank": 1 / rank,
            "root": alpha / math.sqrt(rank), "upside down": rank / alpha, "//": alpha // rank,
        }  # fmt: skip
        self.scale, self.kept, self.once, self.early = factors[scale], kept, once, early
        self.added, self.merged, self.original = added, False, None

    def forward(self, x):
        if self.merged and self.early:
            return self.linear(x)
        factor = 0.0 if self.merged and self.added else self.scale
        return self.linear(x) + factor * (x @ self.A.T @ self.B.T)

    @torch.no_grad()
    def merge(self):
        if self.merged and self.once:
            return
        self.original = self.linear.weight.clone()
        self.linear.weight += self.scale * self.B @ self.A
        self.merged = True

    @torch.no_grad()
    def unmerge(self):
        if self.kept:
            self.linear.weight.copy_(self.original)
        else:
            self.linear.weight -= self.scale * self.B @ self.A
        self.merged = False


class _OfTheWeight(_Slips):
    """h = W·x + B·A·(W·x): the adapter behind the layer, not beside it."""

    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + self.scale * (x.sin() @ self.A.T @ self.B.T)


class _InFloat64(_Slips):
    """Subtracted in float64, and rounded all the same."""

    @torch.no_grad()
    def merge(self):
        if not self.merged:
            self.linear.weight.copy_(self.linear.weight.double() + self._delta())
            self.merged = True

    @torch.no_grad()
    def unmerge(self):
        self.linear.weight.copy_(self.linear.weight.double() - self._delta())
        self.merged = False

    def _delta(self):
        return self.scale * (self.B.double() @ self.A.double())


class _NoGradBase(_Slips):
    """It is frozen, after all."""

    def forward(self, x):
        with torch.no_grad():
            y = self.linear(x)
        return y + self.scale * (x @ self.A.T @ self.B.T)


class _DetachedInput(_Slips):
    def forward(self, x):
        return self.linear(x) + self.scale * (x.detach() @ self.A.T @ self.B.T)


class _Detached(_Slips):
    """The sum is right, and the base's part is cut off behind it."""

    def forward(self, x):
        return self.linear(x).detach() + self.scale * (x @ self.A.T @ self.B.T)


class _Widened(_Slips):
    """Right in fp64, and fp64 whatever comes in."""

    def forward(self, x):
        low = x.double() @ self.A.T.double() @ self.B.T.double()
        return self.linear(x) + self.scale * low


class _TwoDims(_Slips):
    def forward(self, x):
        low = torch.mm(torch.mm(x.reshape(x.shape), self.A.T), self.B.T)
        return self.linear(x) + self.scale * low


class _Whole(_Slips):
    """W + (α/r)·B·A as one matrix, in every pass."""

    def forward(self, x):
        weight = self.linear.weight + self.scale * self.B @ self.A
        return nn.functional.linear(x, weight, self.linear.bias)


class _WholeUpdate(_Slips):
    """x times the matrix B·A."""

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ (self.B @ self.A).T)


class _NoBias(_Slips):
    def forward(self, x):
        return x @ self.linear.weight.T + self.scale * (x @ self.A.T @ self.B.T)


class _KeptAtTheStart(_Slips):
    """W is kept when the layer is made."""

    def __init__(self, linear, rank, alpha):
        super().__init__(linear, rank, alpha)
        self.at_first = linear.weight.detach().clone()

    @torch.no_grad()
    def merge(self):
        if not self.merged:
            self.linear.weight += self.scale * self.B @ self.A
            self.merged = True

    @torch.no_grad()
    def unmerge(self):
        if self.merged:
            self.linear.weight.copy_(self.at_first)
            self.merged = False


class _ForgetsTheBias(_Slips):
    """Written out, with a bias that may be None."""

    def __init__(self, linear, rank, alpha):
        nn.Module.__init__(self)
        self.linear, self.scale = linear.requires_grad_(False), alpha / rank
        self.A = nn.Parameter(torch.randn(rank, linear.in_features))
        self.B = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        low = x @ self.A.T @ self.B.T
        return x @ self.linear.weight.T + self.linear.bias + self.scale * low


class _FullPrecision(_ForgetsTheBias):
    """Factors in fp32, and so what they give."""

    def forward(self, x):
        return self.linear(x) + self.scale * (x.float() @ self.A.T @ self.B.T)


class _KeepsFirst(_Slips):
    """Keeps the weight, and then looks whether it is merged."""

    @torch.no_grad()
    def merge(self):
        self.original = self.linear.weight.clone()
        if not self.merged:
            self.linear.weight += self.scale * self.B @ self.A
        self.merged = True

    def unmerge(self):
        if self.merged:
            super().unmerge()


class _RefusesLate(_KeepsFirst):
    """As the last, with an error."""

    def merge(self):
        again = self.merged
        super().merge()
        if again:
            raise RuntimeError("it is merged already")


class _BackAgain(_Slips):
    """What was kept once is put back whenever one asks."""

    def unmerge(self):
        if self.original is not None:
            super().unmerge()


class _Toggles(_Slips):
    """A second merge() takes the first one back."""

    def merge(self):
        if self.merged:
            self.unmerge()
        else:
            super().merge()

    def unmerge(self):
        if self.merged:
            super().unmerge()


class _NeverAsked(_Slips):
    """unmerge() takes for granted that merge() came before."""

    @torch.no_grad()
    def unmerge(self):
        self.linear.weight.copy_(self.original)
        self.original, self.merged = None, False


class _OldUpdate(_Slips):
    """B·A is computed once, by the first merge."""

    update = None

    @torch.no_grad()
    def merge(self):
        if not self.merged:
            self.original = self.linear.weight.clone()
            self.update = self.scale * self.B @ self.A if self.update is None else self.update
            self.linear.weight += self.update
            self.merged = True


class _FrozenAfter(_Slips):
    """What is merged is done."""

    def merge(self):
        super().merge()
        self.requires_grad_(False)

    def unmerge(self):
        if self.merged:
            super().unmerge()


class _ZeroedB(_Slips):
    """Merging throws the adapter away."""

    @torch.no_grad()
    def merge(self):
        super().merge()
        self.B.zero_()


class _Seeded(_Slips):
    """The same numbers in every run, for reproducibility."""

    def __init__(self, linear, rank, alpha):
        torch.manual_seed(0)
        super().__init__(linear, rank, alpha)


class _MergedUnderNoGrad(_Slips):
    """Merged is for inference."""

    def forward(self, x):
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.merged):
            return super().forward(x)


class _LosesTheBias(_Slips):
    def forward(self, x):
        if self.merged:
            return x @ self.linear.weight.T
        return super().forward(x)


class _MergedInEval(_Slips):
    def forward(self, x):
        if self.merged and not self.training:
            return self.linear(x)
        return self.linear(x) + self.scale * (x @ self.A.T @ self.B.T)


class _KeptInHalf(_Slips):
    @torch.no_grad()
    def merge(self):
        if not self.merged:
            super().merge()
            self.original = self.original.half()


class _WithHistory(_Slips):
    """merge() outside of no_grad."""

    def merge(self):
        if not self.merged:
            self.original = self.linear.weight.clone()
            self.linear.weight.copy_(self.original + self.scale * self.B @ self.A)
            self.merged = True

    def unmerge(self):
        if self.merged:
            super().unmerge()


def _slips(**slips):
    return functools.partial(_Slips, **slips)


def _count(*, bias=False, whole=False, a=True, b=True, per=16, frozen=True, biases=True, more=0):
    """Trained numbers and bytes with slips."""

    def attempt(linears, rank, itemsize):
        trained = sum(
            rank * (a * each.in_features + b * each.out_features)
            + bias * (each.bias is not None) * each.out_features
            + whole * each.weight.numel() * rank
            for each in linears
        )
        numbers = sum(
            p.numel() for each in linears for p in each.parameters() if biases or p.dim() == 2
        )
        right = sum(rank * (each.in_features + each.out_features) for each in linears)
        return trained, (itemsize * frozen + more) * numbers + per * right

    return attempt


WRONG = {
    "lora/adapter": (
        Wrong("both drawn", _slips(b="drawn"), "it begins as the layer", "must be zero"),
        Wrong("both zero", _slips(a="zero"), "it learns", "with both zero"),
        Wrong("A of ones", _slips(a="ones"), "it learns", "update of a lower rank"),
        Wrong("a seed of its own", _Seeded, "it learns", "set inside the layer"),
        Wrong("the bias trained", _slips(frozen="weight"), "what is trained", "its bias too"),
        Wrong("W trained", _slips(frozen="bias"), "what is trained", "W itself is trained"),
        Wrong("all trained", _slips(frozen="none"), "what is trained", "The layer itself"),
        Wrong("no factor", _slips(scale="none"), "the factor α/r", "α/r is missing"),
        Wrong("α alone", _slips(scale="alpha"), "the factor α/r", "1/r is not"),
        Wrong("1/r alone", _slips(scale="rank"), "the factor α/r", "α is not"),
        Wrong("α/√r", _slips(scale="root"), "the factor α/r", "rank-stabilized"),
        Wrong("α // r", _slips(scale="//"), "the factor α/r", "cuts the fraction off"),
        Wrong("r/α", _slips(scale="upside down"), "the factor α/r", "upside down"),
        Wrong("of another input", _OfTheWeight, "the factor α/r", "first A"),
        Wrong("the base under no_grad", _NoGradBase, "the layer below", "Frozen is W"),
        Wrong("the base's output detached", _Detached, "the layer below", "Frozen is W"),
        Wrong("x detached", _DetachedInput, "the layer below", "must not be detached"),
        Wrong("two dims only", _TwoDims, "the layer below", "[b, s, k]"),
        Wrong("widened", _Widened, "in bf16", "dtype of x"),
        Wrong("W + B·A made whole", _Whole, "thin", "first A·x"),
        Wrong("B·A made whole", _WholeUpdate, "thin", "first A·x"),
        Wrong("no bias", _NoBias, "it begins as the layer", "bias"),
        Wrong("always a bias", _ForgetsTheBias, "no bias", "linear.bias is None"),
        Wrong("an output in fp32", _FullPrecision, "in bf16", "dtype of x"),
    ),
    "lora/held": (
        Wrong("the bias counts", _count(bias=True), "numbers trained", "frozen with its layer"),
        Wrong("r·d·k", _count(a=False, b=False, whole=True), "numbers trained", "more than W"),
        Wrong("A alone", _count(b=False), "numbers trained", "A alone"),
        Wrong("B alone", _count(a=False), "numbers trained", "B alone"),
        Wrong("one moment", _count(per=12), "bytes held", "four numbers, not three"),
        Wrong("no moments", _count(per=8), "bytes held", "two moments"),
        Wrong("adapters alone", _count(frozen=False), "bytes held", "still there"),
        Wrong("no biases", _count(biases=False), "bytes held", "biases are missing"),
        Wrong("the last layer alone", lambda linears, rank, itemsize: _count()(
            linears[-1:], rank, itemsize), "numbers trained", "for each layer"),
        Wrong("once for all layers", lambda linears, rank, itemsize: (
            rank * (linears[0].in_features + linears[0].out_features),
            _count()(linears, rank, itemsize)[1]), "numbers trained", "for each layer"),
        Wrong("bytes first", lambda linears, rank, itemsize: _count()(
            linears, rank, itemsize)[::-1], "numbers trained", "the trained numbers first"),
        Wrong("counters of steps", lambda linears, rank, itemsize: (
            _count()(linears, rank, itemsize)[0],
            _count()(linears, rank, itemsize)[1] + 8 * len(linears)), "bytes held", "counters"),
        Wrong("as words", lambda linears, rank, itemsize: tuple(
            f"{n} numbers" for n in _count()(linears, rank, itemsize)), "numbers trained", ""),
        Wrong("in numbers", lambda linears, rank, itemsize: (
            _count()(linears, rank, itemsize)[0],
            sum(p.numel() for each in linears for p in each.parameters())
            + 4 * _count()(linears, rank, itemsize)[0]), "bytes held", "itemsize"),
        Wrong("adapters in half", lambda linears, rank, itemsize: _count(per=4 * itemsize)(
            linears, rank, itemsize), "bytes held", "stay fp32"),
        Wrong("frozen gradients", lambda linears, rank, itemsize: _count(more=itemsize)(
            linears, rank, itemsize), "bytes held", "has no gradient"),
    ),
    "lora/bug-hunt": (
        Wrong(
            "the one of the lab",
            _slips(kept=False, once=False, early=False),
            "merged twice",
            "in W two times",
        ),
        Wrong("merged in eval alone", _MergedInEval, "merged, the same values", "in both modes"),
        Wrong("kept in fp16", _KeptInHalf, "unmerged, the same bits", "rounded to float16"),
        Wrong("with a history", _WithHistory, "trained as before", "torch.no_grad()"),
        Wrong("kept at the start", _KeptAtTheStart, "weights loaded later", "of that moment"),
        Wrong("the first update", _OldUpdate, "trained in between", "when it is merged"),
        Wrong("frozen after", _FrozenAfter, "trained as before", "to train on"),
        Wrong("keeps, then looks", _KeepsFirst, "twice, and back", "as if it were W"),
        Wrong("keeps, then refuses", _RefusesLate, "twice, and back", "as if it were W"),
        Wrong("back again", _BackAgain, "twice, and back", "of no use any more"),
        Wrong("there and back", _Toggles, "twice, and back", "it stays merged"),
        Wrong("unmerge first", _NeverAsked, "unmerged without a merge", "Nothing was merged"),
        Wrong("B zeroed", _ZeroedB, "unmerged, the same bits", ""),
        Wrong("merged under no_grad", _MergedUnderNoGrad, "merged, the same values", "still learn"),
        Wrong("the bias lost", _LosesTheBias, "merged, the same values", ""),
        Wrong("merged twice, refused late", _slips(once=False), "merged twice", "in W two times"),
        Wrong("subtracts", _slips(kept=False), "unmerged, the same bits", "Keep W itself"),
        Wrong("in float64", _InFloat64, "unmerged, the same bits", "rounded again"),
        Wrong("times zero", _slips(early=False), "no work left", "return early"),
        Wrong(
            "adds it again",
            _slips(early=False, added=False),
            "merged, the same values",
            "takes the place of W",
        ),
    ),
}  # fmt: skip
