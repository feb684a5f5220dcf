"""fused_attn.nn on nested tensors with empty sequences, and on batches of only padding."""

from __future__ import annotations

import pytest
import torch

import fused_attn.nn as fnn
from fused_attn import swap_modules

WIDTH = 8
LENGTHS = {"no_sequence": [], "empty": [0], "all_empty": [0, 0], "one_empty": [0, 3]}
LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}


def modules():
    """Return a dict of functions and modules that accept a nested tensor."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    stack = torch.nn.TransformerEncoder(layer, 2).eval()
    swap_modules(stack)
    attention = stack.layers[0].self_attn
    return {
        "attention": lambda x: attention(x, x, x, need_weights=False)[0],
        "layer": stack.layers[0],
        "stack": stack,
        "layer_norm": fnn.LayerNorm(WIDTH),
        "rms_norm": fnn.RMSNorm(WIDTH),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("name", modules())
def test_sequences_do_not_affect_each_other(name, lengths, layout):
    if layout == "jagged" and not lengths:
        pytest.skip("reason: torch cannot create a jagged tensor without sequences")
    module = modules()[name]
    sequences = [torch.randn(length, WIDTH) for length in lengths]
    nested = torch.nested.nested_tensor(sequences, layout=LAYOUTS[layout])
    with torch.no_grad():
        got = module(nested)
        assert got.is_nested and got.layout == nested.layout
        for row, sequence in zip(got.unbind(), sequences, strict=True):
            assert row.shape == sequence.shape
            if len(sequence):
                torch.testing.assert_close(row, module(sequence[None])[0])


def test_residuals_of_jagged_tensors():
    """Results share the offsets of jagged inputs, so that torch can add them to the inputs."""
    rows = [torch.randn(length, WIDTH) for length in (3, 5)]
    x = torch.nested.nested_tensor(rows, layout=torch.jagged)
    attention = modules()["attention"]
    out = x + attention(x)
    for got, row in zip(out.unbind(), rows, strict=True):
        torch.testing.assert_close(got, row + attention(row[None])[0])


@pytest.mark.parametrize("shape", [(2, 0), (0, 0), (0, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
def test_batches_of_only_padding(batch_first, shape):
    layer = fnn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=batch_first)
    src = torch.randn(*(shape if batch_first else shape[::-1]), WIDTH, requires_grad=True)
    out = fnn.TransformerEncoder(layer, 2)(src, src_key_padding_mask=torch.full(shape, True))
    assert out.shape == src.shape and not out.any()
    out.sum().backward()
