"""Wrong answers to the exercises of `quantization`."""

import functools

import torch
import torch.nn.functional as F

from wrong_answers import Wrong


def _groups(
    w, bits, group, *, largest=torch.abs, axis="row", top=-1, nearest=torch.round, guard=True
):
    """Groups of neighbors in a row, with slips."""
    d, k = w.shape
    top = 2 ** (bits - 1) + top
    parts = F.pad(w, (0, -k % group)).view(d, -1, group)
    found = (
        largest(parts).amax(2) if axis != "column" else largest(parts).amax(0, keepdim=True).amax(2)
    )
    if axis == "whole row":
        found = found.amax(1, keepdim=True)
    scales = (found / top).expand(d, parts.shape[1]).clone()
    if guard:
        scales[scales == 0] = 1.0
    return nearest(w / scales.repeat_interleave(group, 1)[:, :k]), scales


def _over_the_end(w, bits, group):
    flat = F.pad(w.flatten(), (0, -w.numel() % group)).view(-1, group)
    scales = flat.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    codes = (flat / scales).round().flatten()[: w.numel()].view_as(w)
    starts = torch.arange(len(w))[:, None] * w.shape[1] + torch.arange(0, w.shape[1], group)
    return codes, scales.flatten()[starts // group]


def _in_one_list(w, bits, group):
    codes, _ = _over_the_end(w, bits, group)
    return codes, torch.ones(-(-w.numel() // group))


def _not_rounded(w, bits, group):
    _, scales = _groups(w, bits, group)
    return w / scales.repeat_interleave(group, 1)[:, : w.shape[1]], scales


def _affine(
    x,
    bits,
    *,
    hold=True,
    more=0,
    steps=-1,
    add=True,
    late=False,
    zero=None,
    nearest=torch.round,
    symmetric=False,
):
    low, high = x.min().item(), x.max().item()
    if hold:
        low, high = min(low, 0.0), max(high, 0.0)
    scale = (high - low) / (2**bits + steps)
    if symmetric:
        scale = max(-low, high) / 127
    at = round(-low / scale) + more if zero is None else zero
    codes = nearest(x / scale) + at * add
    codes = codes.to(torch.int64) % 256 if late else codes.clamp(0, 2**bits - 1)
    return codes.clamp(0, 2**bits - 1), scale, max(at, 0) if hold else at


def _cast_first(x, bits):
    """Zero is right; from −1 to 3 the largest number has the code 256, cast to 0."""
    low, high = min(x.min().item(), 0.0), max(x.max().item(), 0.0)
    scale = (high - low) / 255
    zero = round(-low / scale)
    return ((x / scale).ceil() + zero).to(torch.uint8).clamp(0, 255), scale, zero


def _layer(
    x, w, limit, *, axis=1, late=False, sums=torch.int32, follow=False, clip=True, whole=False
):
    w_scale = w.abs().amax(axis) / 127
    w_scale = torch.where(w_scale > 0, w_scale, 1.0)
    if whole:
        w_scale = w.abs().max() / 127
    w_codes = (w / (w_scale if whole else w_scale.unsqueeze(axis))).round().to(torch.int8)
    x_scale = (x.abs().max() if follow else limit) / 127
    codes = (x / x_scale).round()
    codes = (
        codes.to(torch.int32).to(torch.int8).clamp(-127, 127) if late else codes.clamp(-127, 127)
    )
    if not clip:
        codes = (x / x_scale).round().to(torch.int16)
    return (codes.to(sums) @ w_codes.to(sums).mT) * x_scale * w_scale


def _slip(function, **slips):
    return functools.partial(function, **slips)


WRONG = {
    "quantization/groups": (
        Wrong("max, not max of |w|", _slip(_groups, largest=lambda w: w), "scales", "max(w)"),
        Wrong("over the rows", _slip(_groups, axis="column"), "scales", "over all rows"),
        Wrong("one scale per row", _slip(_groups, axis="whole row"), "scales", "Each group"),
        Wrong("over the end of a row", _over_the_end, "scales", "over the end of a row"),
        Wrong("in one list", _in_one_list, "scales", "over the end of a row"),
        Wrong("2ᵇ⁻¹ for the top", _slip(_groups, top=0), "scales", "not ±8"),
        Wrong("cut off", _slip(_groups, nearest=torch.trunc), "codes", "cut the fraction off"),
        Wrong("rounded down", _slip(_groups, nearest=torch.floor), "codes", "rounds down"),
        Wrong("not rounded", _not_rounded, "codes", "few bits"),
        Wrong("0/0", _slip(_groups, guard=False), "a group of zeros", "0/0 is NaN"),
    ),
    "quantization/zero-point": (
        Wrong("zero outside", _slip(_affine, hold=False), "scale", "must hold 0"),
        Wrong("2ᵇ steps", _slip(_affine, steps=0), "scale", "not 2ᵇ"),
        Wrong("symmetric", _slip(_affine, symmetric=True), "scale", "symmetric scale"),
        Wrong("one too many", _slip(_affine, more=1), "zero point", "Off by one"),
        Wrong("one too few", _slip(_affine, more=-1), "zero point", "Off by one"),
        Wrong("none", _slip(_affine, zero=0), "zero point", "begin at 0"),
        Wrong("the middle", _slip(_affine, zero=128), "zero point", "middle of the codes"),
        Wrong("not added", _slip(_affine, add=False), "there and back", "zero point is not added"),
        Wrong("clamped after the cast", _cast_first, "there and back", "Clamp first"),
        Wrong("cut off", _slip(_affine, nearest=torch.floor), "there and back", "cut off"),
    ),
    "quantization/bug-hunt": (
        Wrong("over the wrong axis", _slip(_layer, axis=0), "a scale for each output channel", "over the other axis"),
        Wrong("one scale for w", _slip(_layer, whole=True), "a scale for each output channel", "output channel"),
        Wrong("summed in int8", _slip(_layer, sums=torch.int8), "sums of products", "Sum in int32"),
        Wrong("summed in int16", _slip(_layer, sums=torch.int16), "sums of products", "Sum in int32"),
        Wrong("clipped after the cast", _slip(_layer, late=True), "beyond the limit", "Clip first"),
        Wrong("the scale follows x", _slip(_layer, follow=True), "beyond the limit", "follows x"),
    ),
}  # fmt: skip
