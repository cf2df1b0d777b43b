"""Grids against PyTorch's fake quantization, and our reader of BERT against transformers'."""

import pytest
import torch

from labutils.quantization import quantize
from labutils.teach import rigs


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_symmetric_rows_are_pytorchs_per_channel_quantization():
    x = drawn(6, 32)
    kept = quantize(x, "int8", granularity="row")
    zeros = torch.zeros(6, dtype=torch.int32)
    theirs = torch.fake_quantize_per_channel_affine(x, kept.parts["scales"], zeros, 0, -127, 127)
    torch.testing.assert_close(kept.dequantize(), theirs)


def test_affine_codes_are_pytorchs_with_the_same_scale_and_zero_point():
    x = drawn(4, 32) + 1
    kept = quantize(x, "int8", affine=True)
    scale, zero = kept.parts["scales"].item(), int(kept.parts["zero points"])
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)
    torch.testing.assert_close(kept.dequantize(), theirs)


def test_minilm_is_bert():
    transformers = pytest.importorskip("transformers")
    bert = transformers.BertModel.from_pretrained(rigs.quantization.folder()).eval()
    ours, sentences = (
        rigs.quantization.load_minilm(),
        rigs.quantization.token_ids(rigs.quantization.docstrings(3)),
    )
    with torch.no_grad():
        for sentence in sentences:
            theirs = bert(torch.tensor([sentence])).last_hidden_state[0]
            torch.testing.assert_close(ours.hidden([sentence]), theirs, rtol=0, atol=1e-5)
