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


# ── zero has a code ──────────────────────────────────────────────────────────────────────────────


def _plain(x, bits):
    low, high = min(0, x.min()), max(0, x.max())
    scale = (high - low) / (2**bits - 1)
    zero = torch.round(-low / scale)
    return torch.clamp(torch.round(x / scale) + zero, 0, 2**bits - 1), scale, zero


def _comprehension(x, bits):
    values, top = x.tolist(), 2**bits - 1
    low, high = min([0.0, *values]), max([0.0, *values])
    scale = (high - low) / top
    zero = round(-low / scale)
    return [min(max(round(value / scale) + zero, 0), top) for value in values], scale, zero


def _shifted(x, bits):
    """Everything rounded at once: x/scale + zero."""
    x = x.numpy()
    scale = (np.maximum(x.max(), 0) - np.minimum(x.min(), 0)) / (2**bits - 1)
    zero = int(np.rint(-np.minimum(x.min(), 0) / scale))
    return np.rint(x / scale + zero).clip(0, 2**bits - 1), scale, zero


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


RIGHT = {
    "quantization/groups": {"part after part": _columns, "lists": _numbers, "NumPy": _numpy},
    "quantization/zero-point": {"tensors": _plain, "a list": _comprehension, "NumPy": _shifted},
    "quantization/bug-hunt": {"int32": _wide, "torch._int_mm": _int_mm, "row by row": _rows},
}
