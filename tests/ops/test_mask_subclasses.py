"""Masks that are tensor subclasses: causal biases, and subclasses with and without overrides."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import random_qkv
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import fused_attn
from fused_attn import masks

SHAPE = 2, 4, 2, 33, 47, 16
MODULE = fused_attn.nn.MultiheadAttention(16, 2)


class Plain(torch.Tensor):
    """Tensor subclass without overrides."""


class Overriding(torch.Tensor):
    """Tensor subclass that overrides __torch_function__."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture
def qkv():
    return list(random_qkv(*SHAPE).values())


def attend(qkv, mask, **options):
    return fused_attn.scaled_dot_product_attention(*qkv, mask, enable_gqa=True, **options)


CAUSAL = pytest.mark.parametrize(
    ("make", "align"), [(causal_upper_left, "top_left"), (causal_lower_right, "bottom_right")]
)


@CAUSAL
@pytest.mark.parametrize("backend", [None, "sdpa", "eager"])
@pytest.mark.parametrize("compiled", [False, True])
def test_causal_bias(make, align, backend, compiled, qkv):
    """A CausalBias becomes masks.causal, and its uninitialized memory is not read."""
    bias = make(33, 47)
    visible = torch.ones(33, 47).tril(14 if align == "bottom_right" else 0) > 0
    function = torch.compile(attend, backend="eager", fullgraph=True) if compiled else attend
    got = [function(qkv, bias, backend=backend)]
    got.append(F.scaled_dot_product_attention(*qkv, bias, enable_gqa=True))
    with fused_attn.enabled():
        got.append(F.scaled_dot_product_attention(*qkv, bias, enable_gqa=True))
    want = attend(qkv, visible, backend="eager")
    torch.testing.assert_close(got, [want] * 3)
    assert str(masks.as_mask(bias)) == str(masks.causal(align))


@CAUSAL
def test_causal_bias_in_other_functions(make, align):
    """varlen_attention, decode_attention and the modules accept a CausalBias."""
    x = torch.randn(2, 33, 32)
    layer = fused_attn.nn.MultiheadAttention(32, 4, batch_first=True)
    hidden = torch.ones(33, 33, dtype=torch.bool).triu(1)
    for need_weights in (False, True):
        got = layer(x, x, x, attn_mask=make(33, 33), need_weights=need_weights)[0]
        want = layer(x, x, x, attn_mask=hidden, need_weights=need_weights)[0]
        torch.testing.assert_close(got, want)
    rows, ends = torch.randn(40, 2, 16), torch.tensor([0, 25, 40])
    packed = [rows, rows, rows, ends, ends, 25, 25]
    torch.testing.assert_close(
        fused_attn.varlen_attention(*packed, make(25, 25)),
        fused_attn.varlen_attention(*packed, masks.causal(align)),
    )
    query, cache = torch.randn(2, 2, 3, 16), torch.randn(2, 2, 40, 16)
    options = {"cache_lengths": torch.tensor([20, 40]), "is_causal": False}
    torch.testing.assert_close(
        fused_attn.decode_attention(query, cache, cache, attn_mask=make(3, 40), **options),
        fused_attn.decode_attention(query, cache, cache, attn_mask=masks.causal(align), **options),
    )


def test_causal_bias_of_other_lengths(qkv):
    with pytest.raises(ValueError, match=r"CausalBias for lengths \(33, 47\), got \(33, 46\)"):
        attend(qkv, causal_upper_left(33, 46))


def test_plain_subclasses_are_tensors(qkv):
    """Parameters, buffers and subclasses without overrides are read as plain tensors."""
    visible = torch.rand(33, 47) < 0.5
    bias = torch.randn(33, 47)
    for tensor, given in (
        (visible, visible.as_subclass(Plain)),
        (bias, bias.as_subclass(Plain)),
        (bias, torch.nn.Parameter(bias)),
        (visible, torch.nn.Buffer(visible)),
    ):
        got = attend(qkv, given)
        torch.testing.assert_close(got.as_subclass(torch.Tensor), attend(qkv, tensor))


@pytest.mark.parametrize(
    "call",
    [
        attend,
        lambda qkv, mask: masks.dense(mask),
        lambda qkv, mask: MODULE(*[torch.randn(47, 2, 16)] * 3, attn_mask=mask),
    ],
    ids=["function", "dense", "module"],
)
def test_subclasses_with_overrides_are_refused(call, qkv):
    """Masked tensors and subclasses with overrides are refused.

    Their memory need not contain the values of the mask.
    """
    visible = torch.rand(47, 47) < 0.5
    for mask in (visible.as_subclass(Overriding), torch.masked.masked_tensor(visible, visible)):
        with pytest.raises(TypeError, match="attn_mask must be a plain tensor, got"):
            call(qkv, mask)


def test_dense_and_bias_refuse_a_causal_bias():
    for function in (masks.dense, masks.bias):
        with pytest.raises(TypeError, match="mask must be a"):
            function(causal_upper_left(3, 3))


def test_repr_shows_shapes_instead_of_values():
    mask = masks.causal() & masks.padding([3, 4]) & masks.dense(torch.ones(2, 2) > 0)
    text = repr(mask)
    assert "paddings=[Padding(key_lengths=int64[2]" in text and "dense_masks=[bool[2, 2]]" in text


@pytest.mark.parametrize("lengths", [None, "ab", 1.5])
def test_invalid_lengths(lengths):
    with pytest.raises((TypeError, ValueError), match="key_lengths must"):
        masks.padding(lengths)
