"""Right answers to the exercises of `quantization`, in other styles than the reference."""

import numpy as np
import torch

# ── a scale for each group ───────────────────────────────────────────────────────────────────────


def _columns(w, bits, group):
    top, codes, scales = 2 ** (bits - 1) - 1, [], []
    for part in w.split(group, dim=1):
        scale = part.abs().max(dim=1, keepdim=True).values / top
        scale[scale == 0] = 1
        codes.append((part / scale).round().to(torch.int8))
        scales.append(scale)
    return torch.cat(codes, 1), torch.cat(scales, 1)


def _numbers(w, bits, group):
    top, codes, scales = 2 ** (bits - 1) - 1, [], []
    for row in w.tolist():
        codes.append([])
        scales.append([])
        for at in range(0, len(row), group):
            part = row[at : at + group]
            scale = max(map(abs, part)) / top or 1.0
            scales[-1].append(scale)
            codes[-1] += [round(value / scale) for value in part]
    return codes, scales


def _numpy(w, bits, group):
    w, top = w.numpy(), 2 ** (bits - 1) - 1
    padded = np.pad(w, ((0, 0), (0, -w.shape[1] % group))).reshape(len(w), -1, group)
    scales = np.abs(padded).max(2) / top
    safe = np.where(scales == 0, 1, scales)
    return np.rint(w / safe.repeat(group, 1)[:, : w.shape[1]]), scales


def _reciprocal(w, bits, group):
    """Multiplied by one over the scale, which for a group of zeros is 0."""
    parts = [part.abs().max(1).values for part in w.split(group, 1)]
    scales = torch.stack(parts, 1) / (2 ** (bits - 1) - 1)
    inverse = torch.where(scales > 0, 1 / scales, 0)
    return (w * inverse[:, torch.arange(w.shape[1]) // group]).round().char(), scales


def _bf16_scales(w, bits, group):
    codes, scales = _columns(w, bits, group)
    return codes.int(), scales.bfloat16()


# ── a layer of integers ──────────────────────────────────────────────────────────────────────────


def _wide(x, w, limit):
    w_scale = w.abs().amax(1, keepdim=True) / 127
    w_codes = (w / w_scale).round().to(torch.int8)
    codes = torch.clamp(x, -limit, limit).mul(127 / limit).round().to(torch.int8)
    return (codes.int() @ w_codes.int().T) * (limit / 127) * w_scale.T


def _int_mm(x, w, limit):
    w_scale = w.abs().amax(1) / 127
    w_codes = (w / w_scale[:, None]).round().char()
    codes = (x * (127 / limit)).clamp(-127, 127).round().char()
    return torch._int_mm(codes, w_codes.T.contiguous()) * (limit / 127 * w_scale)


def _rows(x, w, limit):
    out = []
    for row in w:
        scale = row.abs().max() / 127
        codes = (row / scale).round().to(torch.int64)
        out.append((x / (limit / 127)).clamp(-127, 127).round().to(torch.int64) @ codes * scale)
    return torch.stack(out, 1).numpy() * limit / 127


def _double(x, w, limit):
    """Codes as whole numbers in float64."""
    per_row = 127 / w.abs().max(dim=1).values.double().clamp(min=1e-30)
    codes = torch.clamp(x.double() / limit, -1, 1).mul(127).round()
    return torch.einsum("tk,dk->td", codes, (w.double() * per_row[:, None]).round()) * (
        limit / 127 / per_row
    )


def _repaired(x, w, limit):
    """The lab's own, with four changes."""
    w_scale = w.abs().amax(1) / 127
    w_scale[w_scale == 0] = 1
    w_codes = (w / w_scale[:, None]).round().to(torch.int8)
    x_scale = limit / 127
    x_codes = (x / x_scale).round().clamp(-127, 127).to(torch.int8)
    return (x_codes.int() @ w_codes.int().mT) * x_scale * w_scale


def _term_by_term(x, w, limit):
    """A sum of outer products, and 1e-8 against 0/0."""
    scale = (w.abs().amax(1, keepdim=True) / 127).clamp(min=1e-8)
    x_codes, w_codes = (x / limit).clamp(-1, 1).mul(127).round().long(), (w / scale).round().long()
    sums = sum(torch.outer(a, b) for a, b in zip(x_codes.mT, w_codes.mT, strict=True))
    return (sums * (limit / 127) * scale.mT).tolist()


# ── errors that cancel ───────────────────────────────────────────────────────────────────────────


def _nearest_code(column, scales):
    return (column / scales.flatten()).round().clamp(-7, 7) * scales.flatten()


def _cholesky(w, H, scales):
    """GPTQ's own way: all eliminations are one Cholesky factor of the inverse."""
    U, w = torch.linalg.cholesky(torch.linalg.inv(H), upper=True), w.clone()
    for j in range(w.shape[1]):
        rounded = _nearest_code(w[:, j], scales)
        w[:, j + 1 :] -= torch.outer((w[:, j] - rounded) / U[j, j], U[j, j + 1 :])
        w[:, j] = rounded
    return w


def _inverted_anew(w, H, scales):
    """The inverse of what is left of H, computed for each column."""
    done, rest = [], w
    for j in range(len(H)):
        inverse = torch.linalg.inv(H[j:, j:])
        done.append(_nearest_code(rest[:, 0], scales))
        error = (rest[:, 0] - done[-1]) / inverse[0, 0]
        rest = rest[:, 1:] - error[:, None] * inverse[0, 1:]
    return torch.stack(done, 1)


def _least_squares(w, H, scales):
    """The later columns solve for the smallest change of the output."""
    w = w.clone()
    for j in range(len(H)):
        rounded = _nearest_code(w[:, j], scales)
        change = w[:, j] - rounded
        w[:, j] = rounded
        if j + 1 < len(H):
            w[:, j + 1 :] += torch.outer(
                change, torch.linalg.solve(H[j + 1 :, j + 1 :], H[j + 1 :, j])
            )
    return w


def _row_by_row(w, H, scales):
    rows = []
    for row, scale in zip(w.numpy().copy(), scales.numpy().ravel(), strict=True):
        inverse = np.linalg.inv(H.numpy())
        for j in range(len(row)):
            value = np.clip(np.rint(row[j] / scale), -7, 7) * scale
            row[j + 1 :] -= (row[j] - value) / inverse[j, j] * inverse[j, j + 1 :]
            row[j] = value
            inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        rows.append(row)
    return np.array(rows)


def _half_scales(w, bits, group):
    """Scales in fp16, as they are kept in practice."""
    codes, scales = _columns(w, bits, group)
    return codes, scales.half()


RIGHT = {
    "quantization/groups": {
        "part after part": _columns, "lists": _numbers, "NumPy": _numpy, "fp16": _half_scales,
        "reciprocal": _reciprocal, "bf16": _bf16_scales,
    },
    "quantization/bug-hunt": {
        "int32": _wide, "torch._int_mm": _int_mm, "row by row": _rows, "float64": _double,
        "repaired": _repaired, "term by term": _term_by_term,
    },
    "quantization/feedback": {
        "Cholesky": _cholesky, "inverted anew": _inverted_anew, "least squares": _least_squares,
        "row by row": _row_by_row,
    },
}  # fmt: skip
