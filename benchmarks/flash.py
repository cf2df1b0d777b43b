"""Attention, forward and backward: `flash.attention` beside the textbook's and PyTorch's SDPA.

All three run in turn on the same tensors (8 heads of width 64, fp32), so that whatever else the
machine does slows all alike. Ratios are ours over theirs, below 1 where ours is faster or smaller.
Memory is the peak beyond q, k, v and the gradient that comes in, counted from live storages; what
SDPA's kernel takes and gives back within one call is not seen. The textbook is left out where its
scores would take most of the time. Aims: from s = 2048 on faster than the textbook in 1/20 of its
memory; within 4 × SDPA.
"""

import torch
import torch.nn.functional as F
from _side_by_side import interleave, owe, report
from torch import nn

from labutils import flash, measure, units

HEADS, WIDTH, LARGEST_TEXTBOOK = 8, 64, 2048
ROUNDS = {512: 15, 1024: 9, 2048: 5, 4096: 3}
WAYS = {
    "textbook": lambda q, k, v, causal: textbook(q, k, v, causal),
    "ours": lambda q, k, v, causal: flash.attention(q, k, v, causal=causal)[0],
    "sdpa": lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
}


def textbook(q, k, v, causal):
    """Attention with as few s × s tensors as autograd allows.

    flash.plain also returns the log-sum-exp, and keeps more for it.
    """
    scores = q @ k.mT * WIDTH**-0.5
    if causal:
        scores = scores + torch.full(scores.shape[-2:], float("-inf")).triu(1)
    return scores.softmax(-1) @ v


def steps(s, causal):
    """A forward and backward pass in each of the ways, with its output and its gradients."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = torch.randn(4, 1, HEADS, s, WIDTH, generator=generator).unbind()
    qkv = [tensor.requires_grad_() for tensor in (q, k, v)]

    def step(way):
        out = way(*qkv, causal)
        return out, *torch.autograd.grad(out, qkv, d_out)

    return {
        name: lambda way=way: step(way)
        for name, way in WAYS.items()
        if name != "textbook" or s <= LARGEST_TEXTBOOK
    }


def row(s, causal):
    return f"{s} tokens{', causal' * causal}"


def extra_peak(step, s):
    return measure.peak(step, nn.Module()).total - 4 * 4 * HEADS * s * WIDTH


def main():
    print(
        f"forward + backward, {HEADS} heads of width {WIDTH}, fp32, {torch.get_num_threads()} "
        "threads, interleaved; ms, median (minimum)"
    )
    print(
        "   s  causal  textbook             ours                 sdpa              | ours/textbook "
        " ours/sdpa    | memory: textbook  ours  sdpa   textbook/ours"
    )
    owe("SDPA", {row(s, causal): 1.1 for s in ROUNDS for causal in (False, True)})
    for s, rounds in ROUNDS.items():
        for causal in (False, True):
            calls = steps(s, causal)
            results = [call() for call in calls.values()]
            if not all(
                torch.allclose(a, b, atol=1e-4)
                for other in results[1:]
                for a, b in zip(results[0], other, strict=True)
            ):
                raise SystemExit(f"s = {s}: the results differ, the times mean nothing")
            del results
            times = interleave(calls, rounds)
            report(row(s, causal), "SDPA", times["ours"], times["sdpa"])
            held = {way: extra_peak(call, s) for way, call in calls.items()}
            cells = "  ".join(str(times.get(way, f"{'–':>19}")) for way in WAYS)
            textbook, sdpa = (
                times["ours"].ratio(times[peer]) if peer in times else "–"
                for peer in ("textbook", "sdpa")
            )
            memory = "  ".join(
                f"{units.text(held[way]) if way in held else '–':>8}" for way in WAYS
            )
            saved = f"{held['textbook'] / held['ours']:.1f}" if "textbook" in held else "–"
            print(
                f"{s:5} {'yes' if causal else 'no':>6} {cells} | {textbook:13}  {sdpa:12} | "
                f"{memory}  {saved:>6}",
                flush=True,
            )


if __name__ == "__main__":
    main()
