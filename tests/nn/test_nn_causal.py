"""Causal mask tensors are recognized, with one comparison of values per tensor version."""

from __future__ import annotations

import gc

import pytest
import torch
from nn_helpers import BATCH, EMBED, HEADS, LEN_Q, causal_bias

import fused_attn.nn as fnn
from fused_attn import masks
from fused_attn.call import attention, validation
from fused_attn.masks import memo, recognize
from fused_attn.masks.recognize import is_causal_mask
from fused_attn.masks.spec import spec_of


@pytest.fixture
def compared(monkeypatch):
    """Return a list of the masks whose values are compared in the test."""
    seen = []
    compare = recognize._compare
    monkeypatch.setattr(recognize, "_compare", lambda mask: seen.append(mask) or compare(mask))
    return seen


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.float64])
def test_is_causal_mask(dtype):
    """A square causal mask is recognized; a hint replaces the comparison."""
    mask = causal_bias(4).isinf() if dtype == torch.bool else causal_bias(4, dtype)
    assert is_causal_mask(mask, None)
    assert not is_causal_mask(mask, False)
    assert is_causal_mask(None, True)
    assert not is_causal_mask(None, None)
    assert not is_causal_mask(mask.T, None)
    assert not is_causal_mask(mask[:3], None)
    late, early = mask.clone(), mask.clone()  # changed above and below the diagonal
    late[0, 3] = False if dtype == torch.bool else torch.finfo(dtype).min
    early[3, 0] = True if dtype == torch.bool else -1.0
    assert not is_causal_mask(late, None)
    assert not is_causal_mask(early, None)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_mask_is_compared_once(dtype, compared):
    mask = causal_bias(6, torch.float32)
    mask = mask.isinf() if dtype == torch.bool else mask
    other = torch.zeros_like(mask)
    for _ in range(3):
        assert is_causal_mask(mask, None)
        assert not is_causal_mask(other, None)
    assert len(compared) == 2


def test_in_place_changes_are_detected(compared):
    mask = causal_bias(6)
    assert is_causal_mask(mask, None)
    mask[0, 5] = 0.0
    assert not is_causal_mask(mask, None)
    mask.copy_(causal_bias(6))
    assert is_causal_mask(mask, None)
    assert len(compared) == 3


def test_slices_of_a_buffer_are_compared_once_each(compared):
    """Each slice of a mask buffer is compared only once, though each call passes a new view."""
    buffer = causal_bias(9)
    for _ in range(3):
        assert is_causal_mask(buffer[:4, :4], None)
        assert is_causal_mask(buffer[:7, :7], None)
        assert is_causal_mask(buffer[2:6, 2:6], None)
        assert not is_causal_mask(buffer[1:5, :4], None)
    assert len(compared) == 4
    buffer.zero_()
    assert not is_causal_mask(buffer[:4, :4], None)


def test_verdicts_are_bounded_and_do_not_keep_masks_alive(compared, monkeypatch):
    gc.collect()
    before = len(memo._of_tensors)
    mask = causal_bias(6)
    assert is_causal_mask(mask, None)
    assert len(memo._of_tensors) == before + 1
    compared.clear()
    del mask
    gc.collect()
    assert len(memo._of_tensors) == before
    monkeypatch.setattr(memo, "_LIMIT_OF_TENSOR", 2)
    buffer = causal_bias(6)
    for size in (2, 3, 4, 5):
        assert is_causal_mask(buffer[:size, :size], None)
    assert len(memo.memo_of(buffer)) <= 2


def test_masks_without_a_version_are_compared_at_each_call(compared):
    with torch.inference_mode():
        mask = causal_bias(6)
        assert is_causal_mask(mask, None)
        mask.zero_()
        assert not is_causal_mask(mask, None)
    assert len(compared) == 2


def test_masks_elsewhere_are_not_looked_at(compared):
    """Values of masks that are on another device or require grad are never read."""
    assert not is_causal_mask(torch.ones(4, 4, dtype=torch.bool, device="meta"), None)
    assert not is_causal_mask(causal_bias(4).requires_grad_(), None)
    assert not compared


@pytest.mark.parametrize("kind", ["attention", "weights", "appended", "encoder", "decoder"])
def test_modules_recognize_the_mask_of_every_step(kind, compared, monkeypatch):
    """A mask is compared once for all steps and layers, and attention receives a causal band."""
    attended = []
    original = validation.spec_of_mask

    def spy(mask, *args):
        attended.append(mask)
        return original(mask, *args)

    def spy_unchecked(mask, is_causal, *args):
        attended.append(masks.causal() if is_causal else mask)
        return spec_of(mask, is_causal, *args)

    monkeypatch.setattr(validation, "spec_of_mask", spy)
    for module in (attention, validation):
        monkeypatch.setattr(module, "spec_of", spy_unchecked)
    x, mask = torch.randn(LEN_Q, BATCH, EMBED), causal_bias(LEN_Q, torch.float32)
    layer = {"d_model": EMBED, "nhead": HEADS, "dim_feedforward": 16}
    if kind == "encoder":
        module = fnn.TransformerEncoder(fnn.TransformerEncoderLayer(**layer), 2)
        args, call = (x,), {"mask": mask}
    elif kind == "decoder":
        module = fnn.TransformerDecoderLayer(**layer)
        args, call = (x, x), {"tgt_mask": mask}
    else:
        module = fnn.MultiheadAttention(EMBED, HEADS, add_zero_attn=kind == "appended")
        args, call = (x, x, x), {"attn_mask": mask, "need_weights": kind == "weights"}
    for _ in range(3):
        module(*args, **call)
    assert len(compared) == 1
    masked = [m for m in attended if m is not None]  # a decoder's cross-attention has no mask
    assert masked
    assert all(m.bands and not m.biases and not m.dense_masks for m in masked)


def test_recognition_under_another_default_device():
    layer, x = fnn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
    expected = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    with torch.device("meta"):
        got = layer(x, x, x, attn_mask=mask, need_weights=False)[0]
    torch.testing.assert_close(got, expected)
