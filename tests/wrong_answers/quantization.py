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


def _grouped(w, bits, group, scale):
    """Groups of neighbors, whose scale is what `scale` makes of max|w| and the top code."""
    top, codes, scales = 2 ** (bits - 1) - 1, [], []
    for part in w.split(group, dim=1):
        scales.append(scale(part.abs().amax(1, keepdim=True), top))
        codes.append((part / scales[-1]).round())
    return torch.cat(codes, 1), torch.cat(scales, 1)


def _at_least(least):
    return functools.partial(_grouped, scale=lambda most, top: (most / top).clamp(min=least))


def _added(more):
    return functools.partial(_grouped, scale=lambda most, top: most / top + more)


def _divided_in_place(w, bits, group):
    """The parts of w are views."""
    scales = []
    for part in w.split(group, dim=1):
        scale = part.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
        scale[scale == 0] = 1
        part.div_(scale).round_()
        scales.append(scale)
    return w, torch.cat(scales, 1)


def _of_rows(w, bits, group):
    """Each group's scale, and codes by that of the row."""
    _, scales = _groups(w, bits, group)
    row = w.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (w / torch.where(row > 0, row, 1.0)).round(), scales


def _written(
    x, w, limit, *, least=1e-30, more=0.0, low=-127, own=None, by_bf16=False, cut=torch.round
):
    """The repaired layer, with slips. least, more: against 0/0; own: the scale of x follows it."""
    w_scale = (w.abs().amax(1) / 127).clamp(min=least) + more
    w_codes = cut(w / w_scale[:, None]).int()
    x_scale = (limit if own is None else own(x).clamp(max=limit)) / 127
    x = x.bfloat16().float() if by_bf16 else x
    return ((x / x_scale).round().clamp(low, 127).int() @ w_codes.mT) * x_scale * w_scale


def _made_whole_first(x, w, limit):
    """Rounded, and multiplied by their scales before the product, which is one of floats."""
    scale = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    x = (x / (limit / 127)).round().clamp(-127, 127) * (limit / 127)
    return x @ ((w / scale).round() * scale).mT


def _half_way(x, w, limit):
    """The scale of w is inside the sum."""
    scale = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    codes = (x / (limit / 127)).round().clamp(-127, 127)
    return torch.einsum("tk,dk->td", codes, (w / scale).round() * scale) * (limit / 127)


def _clamps_x(x, w, limit):
    return _written(x.clamp_(-limit, limit), w, limit)


def _divides_w(x, w, limit):
    scale = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    w /= scale
    return (x.clamp(-limit, limit) / limit * 127).round() @ w.round().mT * scale.mT * limit / 127


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


def _only_clipped(x, w, limit):
    """No integers at all."""
    return x.clamp(-limit, limit) @ w.mT


def _weights_only(x, w, limit):
    scale = w.abs().amax(1, keepdim=True) / 127
    return x.clamp(-limit, limit) @ ((w / scale).round() * scale).mT


def _dropped(x, w, limit):
    return _layer(x * (x.abs() <= limit), w, limit)


def _never_negative(x, w, limit):
    return _layer(x.clamp(min=0), w, limit)


def _by_length(x, w, limit):
    """Rows of x of length 1, and their length again behind the product."""
    length = x.norm(dim=1, keepdim=True)
    return _layer(x, w, limit) / length * length


def _six_bits(x, w, limit):
    scale = w.abs().amax(1) / 31
    codes = (x / (limit / 31)).clamp(-31, 31).round()
    return codes @ (w / scale[:, None]).round().mT * scale * (limit / 31)


def _codes_in_float(x, w, limit):
    """Codes stay whole floats, and a channel of zeros divides by its own scale."""
    scale = w.abs().amax(1) / 127
    codes = (x / (limit / 127)).clamp(-127, 127).round()
    return codes @ (w / scale[:, None]).round().mT * scale * (limit / 127)


def _scaled_back_early(x, w, limit):
    """Codes of x that were not rounded, times rounded weights."""
    codes = (x * 127 / limit).clamp(-127, 127)
    scale = w.abs().amax(1) / 127
    return (codes @ (w / scale[:, None]).round().mT) * scale * limit / 127


def _one_row(x, w, limit):
    return (_layer(x[:1], w, limit)).expand(len(x), len(w))


def _feedback(
    w, H, scales, *, sign=1, eliminate=True, divide=True, inverse=True, clamp=True, cut=torch.round
):
    """Error feedback with slips."""
    y, M = w.clone(), torch.linalg.inv(H) if inverse else H
    for j in range(w.shape[1]):
        code = cut(y[:, j] / scales[:, 0])
        rounded = (code.clamp(-7, 7) if clamp else code) * scales[:, 0]
        error = (y[:, j] - rounded) / (M[j, j] if divide else 1)
        y[:, j] = rounded
        y[:, j + 1 :] -= sign * error[:, None] * M[j, j + 1 :]
        if eliminate:
            M = M - M[:, j, None] * M[j] / M[j, j]
    return y


def _nearest(w, H, scales):
    return (w / scales).round().clamp(-7, 7) * scales


def _all_columns(w, H, scales):
    """The error goes to every column, finished ones too."""
    y, M = w.clone(), torch.linalg.inv(H)
    for j in range(w.shape[1]):
        rounded = (y[:, j] / scales[:, 0]).round().clamp(-7, 7) * scales[:, 0]
        y = y - ((y[:, j] - rounded) / M[j, j])[:, None] * M[j]
    return y


def _in_place(w, H, scales):
    fed = _feedback(w, H, scales)
    w.copy_(fed)
    return w


def _codes_alone(w, H, scales):
    return (_feedback(w, H, scales) / scales).round()


def _damped(w, H, scales):
    """A hundredth more on the diagonal of H, which has its damping already."""
    return _feedback(w, H + 0.01 * H.diagonal().mean() * torch.eye(len(H)), scales)


def _own_scales(w, H, scales):
    return _feedback(w, H, w.abs().amax(1, keepdim=True) / 7)


def _clamped_at_last(w, H, scales):
    """Columns are rounded beyond the largest code, and brought back when all are done."""
    return (_feedback(w, H, scales, clamp=False) / scales).round().clamp(-7, 7) * scales


def _eliminated_first(w, H, scales):
    """j leaves the inverse before the columns after it have changed."""
    y, M = w.clone(), torch.linalg.inv(H)
    for j in range(w.shape[1]):
        rounded = (y[:, j] / scales[:, 0]).round().clamp(-7, 7) * scales[:, 0]
        error = (y[:, j] - rounded) / M[j, j]
        M = M - M[:, j, None] * M[j] / M[j, j]
        y[:, j] = rounded
        y[:, j + 1 :] -= error[:, None] * M[j, j + 1 :]
    return y


def _to_the_next(w, H, scales):
    """Error diffusion: all of it to the column that follows."""
    y = w.clone()
    for j in range(w.shape[1]):
        rounded = (y[:, j] / scales[:, 0]).round().clamp(-7, 7) * scales[:, 0]
        if j + 1 < w.shape[1]:
            y[:, j + 1] += y[:, j] - rounded
        y[:, j] = rounded
    return y


def _slip(function, **slips):
    return functools.partial(function, **slips)


def _every_nth(w, bits, group):
    n, top = w.shape[1] // group or 1, 2 ** (bits - 1) - 1
    scales = torch.stack([w[:, i::n].abs().amax(1) for i in range(n)], 1) / top
    return (w / scales.repeat(1, group)[:, : w.shape[1]]).round(), scales


def _other_scales(change):
    def attempt(w, bits, group):
        codes, scales = _groups(w, bits, group)
        return codes, change(scales)

    return attempt


def _largest_itself(w, bits, group):
    codes, scales = _groups(w, bits, group)
    return codes, scales * (2 ** (bits - 1) - 1)


def _unsigned(w, bits, group):
    codes, scales = _groups(w, bits, group)
    return (codes + 2 ** (bits - 1)).to(torch.uint8), scales


def _from_end_to_end(w, bits, group):
    parts = w.split(group, 1)
    each = [part.amax(1) - part.amin(1) for part in parts]
    scales = torch.stack(each, 1) / (2**bits - 2)
    return (w / scales.repeat_interleave(group, 1)[:, : w.shape[1]]).round(), scales


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
        Wrong("1e-3 at least", _at_least(1e-3), "small weights", "no group of zeros"),
        Wrong("1e-5 at least", _at_least(1e-5), "small weights", "no group of zeros"),
        Wrong("1e-8 added", _added(1e-8), "small weights", "no group of zeros"),
        Wrong("1e-5 added", _added(1e-5), "scales", "top code"),
        Wrong("divided in place", _divided_in_place, "scales", "a copy"),
        Wrong("every n-th column", _every_nth, "scales", "neighbors"),
        Wrong("a dim too many", _other_scales(lambda s: s[..., None]), "scales", "too many"),
        Wrong("from 0 to 15", _unsigned, "codes", "signed"),
        Wrong("the largest itself", _largest_itself, "scales", "This is max|w| itself"),
        Wrong("from the smallest to the largest", _from_end_to_end, "scales", "max|w| alone"),
        Wrong("codes by rows", _of_rows, "codes", "its own group"),
    ),
    "quantization/bug-hunt": (
        Wrong("over the wrong axis", _slip(_layer, axis=0), "a scale for each output channel", "over the other axis"),
        Wrong("one scale for w", _slip(_layer, whole=True), "a scale for each output channel", "output channel"),
        Wrong("0/0 in a channel", _codes_in_float, "a channel of zeros", "0/0 is NaN"),
        Wrong("summed in int8", _slip(_layer, sums=torch.int8), "sums of products", "Sum in int32"),
        Wrong("summed in int16", _slip(_layer, sums=torch.int16), "sums of products", "Sum in int32"),
        Wrong("clipped after the cast", _slip(_layer, late=True), "beyond the limit", "Clip first"),
        Wrong("what is beyond left out", _dropped, "beyond the limit", "and not 0"),
        Wrong("codes from 0", _never_negative, "beyond the limit", "negative ones are 0"),
        Wrong("no integers", _only_clipped, "integers", "round both"),
        Wrong("weights alone", _weights_only, "integers", "round both"),
        Wrong("codes that are not rounded", _scaled_back_early, "integers", "round both"),
        Wrong("six bits", _six_bits, "a scale for each output channel", "code 1"),
        Wrong("the first token for all", _one_row, "a scale for each output channel", ""),
        Wrong("over the length of a row", _by_length, "a channel of zeros", "a row of x"),
        Wrong("down to −128", _slip(_written, low=-128), "symmetric codes", "beyond the limit"),
        Wrong("limit at most", _slip(_written, own=lambda x: x.abs().max()), "integers", "limit / 127"),
        Wrong("by tokens, limit at most", _slip(_written, own=lambda x: x.abs().amax(1, keepdim=True)),
              "integers", "a row of smaller numbers"),
        Wrong("x by way of bf16", _slip(_written, by_bf16=True), "integers", "once"),
        Wrong("w cut off", _slip(_written, cut=torch.trunc), "integers", "towards zero"),
        Wrong("a scale of 1e-3 at least", _slip(_written, least=1e-3), "a channel of small weights", "none of zeros"),
        Wrong("a scale of 1e-6 at least", _slip(_written, least=1e-6), "a channel of small weights", "none of zeros"),
        Wrong("1e-8 added", _slip(_written, more=1e-8), "a channel of small weights", "none of zeros"),
        Wrong("1e-6 added", _slip(_written, more=1e-6), "integers", "nothing added"),
        Wrong("made whole first", _made_whole_first, "products", "no code"),
        Wrong("a scale inside the sum", _half_way, "products", "come out of the sum"),
        Wrong("summed in bf16", _slip(_layer, sums=torch.bfloat16), "integers", "16 bits"),
        Wrong("summed in fp16", _slip(_layer, sums=torch.half), "sums of products", "fp16"),
        Wrong("returned in fp16", lambda *args: _layer(*args, sums=torch.int32).half(),
              "integers", "16 bits"),
        Wrong("clamps x in place", _clamps_x, "beyond the limit", "a copy"),
        Wrong("divides w in place", _divides_w, "a scale for each output channel", "a copy"),
        Wrong("the scale follows x", _slip(_layer, follow=True), "beyond the limit", "whatever x is"),
    ),
    "quantization/feedback": (
        Wrong("to nearest", _nearest, "values", "not handed on"),
        Wrong("the other sign", _slip(_feedback, sign=-1), "values", "wrong way round"),
        Wrong("nothing eliminated", _slip(_feedback, eliminate=False), "values", "Eliminate j"),
        Wrong("not divided", _slip(_feedback, divide=False), "values", "[j, j]"),
        Wrong("H itself", _slip(_feedback, inverse=False), "values", "*inverse*"),
        Wrong("not clamped", _slip(_feedback, clamp=False), "on the grid", "clamp"),
        Wrong("all columns changed", _all_columns, "on the grid", "only later"),
        Wrong("in place", _in_place, "what is left alone", "clone"),
        Wrong("codes for values", _codes_alone, "on the grid", ""),
        Wrong("to the next column", _to_the_next, "values", ""),
        Wrong("damped again", _damped, "values", "Take H as it is"),
        Wrong("scales of its own", _own_scales, "on the grid", "scales are given"),
        Wrong("clamped at last", _clamped_at_last, "values", "what column j has become"),
        Wrong("codes cut off", _slip(_feedback, cut=torch.trunc), "values", "towards zero"),
        Wrong("codes rounded down", _slip(_feedback, cut=torch.floor), "values", "not down"),
        Wrong("eliminated first", _eliminated_first, "values", "not handed on"),
    ),
}  # fmt: skip
