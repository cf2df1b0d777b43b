"""flash.attention beside F.scaled_dot_product_attention: output, gradients and log-sum-exp, in every mode that both have."""

import pytest
import torch
import torch.nn.functional as F

from labutils import flash


def qkv(a, g, s_q, s_k, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, a, s_q, 16), (2, g, s_k, 16), (2, g, s_k, 16))
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def both(tensors, ours, theirs):
    """(output, dq, dk, dv) of each, for the same gradient of the output."""
    d_out = torch.randn(
        tensors[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    ).to(tensors[0].dtype)
    return [
        (out, *torch.autograd.grad(out, tensors, d_out))
        for out in (ours(*tensors)[0], theirs(*tensors))
    ]


CASES = {
    "plain": ((4, 4, 40, 40), dict(), dict()),
    "causal": ((4, 4, 40, 40), dict(causal=True), dict(is_causal=True)),
    "grouped": ((6, 2, 40, 40), dict(causal=True), dict(is_causal=True, enable_gqa=True)),
    "rectangular": ((4, 4, 33, 70), dict(), dict()),
    "top-left": ((4, 4, 33, 70), dict(causal=True, offset=0), dict(is_causal=True)),
    "bottom-right": (
        (4, 4, 33, 70),
        dict(causal=True),
        dict(attn_mask=torch.ones(33, 70, dtype=torch.bool).tril(70 - 33)),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
def test_the_same_as_sdpa(name, dtype, tolerance):
    sizes, mine, theirs = CASES[name]
    pairs = both(
        qkv(*sizes, dtype),
        lambda *t: flash.attention(*t, block_q=16, block_k=24, **mine),
        lambda *t: F.scaled_dot_product_attention(*t, **theirs),
    )
    for what, ours, torchs in zip(("out", "dq", "dk", "dv"), *pairs, strict=True):
        torch.testing.assert_close(
            ours,
            torchs,
            atol=tolerance,
            rtol=tolerance,
            msg=lambda text, what=what: f"{what}: {text}",
        )


def test_the_same_log_sum_exp_as_torchs_flash_kernel():
    q, k, v = (tensor.detach() for tensor in qkv(4, 4, 40, 40))
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    torch.testing.assert_close(flash.attention(q, k, v, causal=True, block_q=16, block_k=8)[1], lse)
