"""Invalid input raises an error that names the argument, the expected and the actual value."""

from __future__ import annotations

import re

import pytest
import torch
from torch import randn

import fused_attn
import fused_attn.nn as fnn
from fused_attn import _cpu, masks, varlen_attention
from fused_attn import functional as F
from fused_attn.backends import AttentionProblem, NormProblem
from fused_attn.backends.fields import check_fields
from fused_attn.backends.registry import BACKENDS

Q = randn(2, 4, 5, 8)
K = randn(2, 4, 7, 8)


def sdpa(query=Q, key=K, value=K, *args, **kwargs):
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


TYPE_ERRORS = {
    "softmax_scale": (
        lambda: sdpa(softmax_scale=1.0),
        "scaled_dot_product_attention() got an unexpected keyword argument 'softmax_scale'; "
        "use scale=",
    ),
    "causal": (
        lambda: varlen_attention(Q, K, K, *[torch.tensor([0, 5])] * 2, 5, 5, causal=True),
        "'causal'; use is_causal=",
    ),
    "window_size": (
        lambda: fused_attn.decode_attention(Q, K, K, cache_lengths=[5, 5], window_size=(2, 0)),
        "use attn_mask=masks.sliding_window(left, right, align=",
    ),
    "cache_seqlens": (
        lambda: fused_attn.decode_attention(Q, K, K, cache_seqlens=[5, 5]),
        "'cache_lengths'",
    ),
    "unknown_keyword": (lambda: sdpa(moon=1), "got an unexpected keyword argument 'moon'"),
    "no_tensor": (lambda: sdpa(query=[1.0]), "query must be a tensor, got list"),
    "dtype": (
        lambda: sdpa(query=Q.int()),
        "query must be float32, float16, bfloat16 or float64, got torch.int32",
    ),
    "layer_norm_eps": (lambda: F.layer_norm(Q, 8, eps=None), "eps must be a float, got NoneType"),
    "dropout_type": (lambda: sdpa(dropout_p="0.1"), "dropout_p must be a float, got str"),
    "dropout_bool": (lambda: sdpa(dropout_p=True), "dropout_p must be a float, got bool"),
    "scale_type": (lambda: sdpa(scale="1"), "scale must be a float, got str"),
    "scale_shape": (
        lambda: sdpa(scale=torch.ones(4)),
        "scale must be a float, got a torch.float32 tensor of shape (4,)",
    ),
    "scale_with_gradient": (
        lambda: sdpa(scale=torch.tensor(0.3, requires_grad=True)),
        "scale must not require grad: its gradient is not computed",
    ),
    "mask_dtype": (
        lambda: sdpa(attn_mask=torch.ones(5, 7, dtype=torch.int64)),
        "attn_mask must be bool or float, got torch.int64: if 1 means attend and 0 means "
        "mask, pass its .bool()",
    ),
    "mask_type": (
        lambda: sdpa(attn_mask="causal"),
        "attn_mask must be a bool tensor, a float tensor or a Mask, got str",
    ),
    "sparse_mask": (
        lambda: sdpa(attn_mask=torch.zeros(5, 7).to_sparse()),
        "attn_mask must be a dense tensor",
    ),
    "bool_mask_with_gradient": (
        lambda: masks.dense(torch.ones(5, 7, requires_grad=True)),
        "mask must be a bool tensor (True = attend), got torch.float32 tensor",
    ),
    "bool_mask_expected": (
        lambda: masks.dense(torch.ones(5, 7, dtype=torch.uint8)),
        "got torch.uint8 tensor: if 1 means attend and 0 means mask, pass its .bool()",
    ),
    "mask_and_tensor": (
        lambda: masks.causal() & torch.ones(5, 7, dtype=torch.bool),
        "a Mask and a torch.bool tensor cannot be combined directly: use mask & "
        "masks.dense(tensor)",
    ),
    "tensor_and_mask": (
        lambda: torch.ones(5, 7, dtype=torch.bool) & masks.causal(),
        "use mask & masks.dense(tensor)",
    ),
    "mask_and_float_tensor": (
        lambda: masks.causal() & torch.zeros(5, 7),
        "use mask & masks.bias(tensor)",
    ),
    "mask_and_number": (lambda: masks.causal() & 1, "unsupported operand type"),
    "module_mask_dtype": (
        lambda: fnn.MultiheadAttention(8, 2)(*[randn(5, 2, 8)] * 3, torch.ones(2, 5).int()),
        "key_padding_mask must be a bool or float tensor, got torch.int32: pass mask.bool() "
        "if 1 means ignore, or mask == 0 if 1 means attend",
    ),
    "float_mask_expected": (
        lambda: masks.bias(torch.ones(5, 7, dtype=torch.bool)),
        "mask must be a float tensor, got torch.bool tensor",
    ),
    "lengths_type": (
        lambda: masks.padding([3.5, 7.0]),
        "key_lengths must be integers, got torch.float32",
    ),
    "no_lengths": (lambda: masks.padding(None), "key_lengths must be integers, got NoneType"),
    "slopes_are_integers": (lambda: masks.alibi([1, 2]), "slopes must be floats, got torch.int64"),
    "window_type": (lambda: masks.sliding_window(1.5), "left must be an int, got float"),
    "documents_type": (
        lambda: masks.documents(torch.zeros(5)),
        "query_ids must be integers, got torch.float32",
    ),
    "report_called": (
        lambda: fused_attn.swap_modules(torch.nn.Sequential(torch.nn.LayerNorm(8)))(Q),
        "a SwapReport is not a model: swap_modules changes the model in place and returns a "
        "report; call the model that was passed to it",
    ),
    "float_normalized_shape": (
        lambda: F.layer_norm(Q, (8.0,)),
        "normalized_shape must contain only ints, got (8.0,)",
    ),
    "norm_dtype": (
        lambda: F.rms_norm(Q.int(), 8),
        "input must be float32, float16, bfloat16 or float64, got torch.int32",
    ),
}
VALUE_ERRORS = {
    "head_dim": (
        lambda: sdpa(key=randn(2, 4, 7, 9), value=randn(2, 4, 7, 9)),
        "key must have head_dim 8 (like query), got 9",
    ),
    "seqlen_k": (
        lambda: sdpa(value=randn(2, 4, 6, 8)),
        "value must have seqlen_k 7 (like key), got 6",
    ),
    "batch": (
        lambda: sdpa(query=randn(3, 4, 5, 8)),
        "query, key and value must have batch dimensions that broadcast",
    ),
    "heads": (
        lambda: sdpa(query=randn(2, 8, 5, 8)),
        "key must have num_heads 8 or 1, got 4; pass enable_gqa=True",
    ),
    "gqa_heads": (
        lambda: sdpa(query=randn(2, 6, 5, 8), enable_gqa=True),
        "num_heads_kv of key must divide num_heads of query, 6, got 4",
    ),
    "gqa_value_heads": (
        lambda: sdpa(value=randn(2, 2, 7, 8), enable_gqa=True),
        "value must have num_heads_kv 4 (like key), got 2",
    ),
    "heads_are_lengths": (
        lambda: sdpa(randn(2, 5, 4, 8), randn(2, 7, 4, 8), randn(2, 7, 4, 8)),
        "query must have num_heads 7 or 1, got 5; query, key and value must be (batch, "
        "num_heads, seqlen, head_dim), and look like (batch, seqlen, num_heads, head_dim): "
        "pass their .transpose(1, 2)",
    ),
    "gqa_heads_are_lengths": (
        lambda: sdpa(randn(2, 5, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 8), enable_gqa=True),
        "got 7; query, key and value must be (batch, num_heads, seqlen, head_dim), and",
    ),
    "mask_of_lengths_that_are_heads": (
        lambda: sdpa(*[randn(2, 6, 4, 8)] * 3, torch.ones(6, 6, dtype=torch.bool)),
        "= (2, 6, 4, 4), got (6, 6); query, key and value must be (batch, num_heads, seqlen, "
        "head_dim), and look like",
    ),
    "dimensions": (
        lambda: sdpa(query=randn(8)),
        "query must have at least 2 dimensions, got shape (8,)",
    ),
    "dtypes_differ": (
        lambda: sdpa(key=K.double()),
        "key must have dtype torch.float32 (like query), got torch.float64",
    ),
    "devices_differ": (
        lambda: sdpa(key=K.to("meta"), value=K.to("meta")),
        "key must have device cpu (like query), got meta",
    ),
    "dropout_p": (lambda: sdpa(dropout_p=1.5), "dropout_p must be in [0, 1], got 1.5"),
    "dropout_nan": (lambda: sdpa(dropout_p=float("nan")), "dropout_p must be in [0, 1], got nan"),
    "softcap": (
        lambda: sdpa(softcap=-1.0),
        "softcap must be positive and finite, or None, got -1.0",
    ),
    "mask_shape": (
        lambda: sdpa(attn_mask=torch.ones(5, 6, dtype=torch.bool)),
        "attn_mask must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k) = (2, 4, "
        "5, 7), got (5, 6)",
    ),
    "mask_batch": (
        lambda: F.scaled_dot_product_attention(
            *randn(3, 2, 2, 3, 4, 8).unbind(), torch.ones(3, 2, 3, 4, 4) > 0
        ),
        "attn_mask must have batch dimensions that broadcast to (2, 2), got shape (3, 2, 3, 4, 4)",
    ),
    "mask_dimensions": (
        lambda: sdpa(attn_mask=torch.ones(1, 1, 1, 5, 7)),
        "attn_mask must have at most 4 dimensions, got (1, 1, 1, 5, 7)",
    ),
    "mask_device": (
        lambda: sdpa(attn_mask=torch.ones(5, 7, device="meta")),
        "attn_mask must be on cpu (like query), got meta",
    ),
    "negative_length": (lambda: masks.padding([3, -1]), "key_lengths must be >= 0, got -1"),
    "length_too_large": (
        lambda: sdpa(attn_mask=masks.padding([3, 8])),
        "key_lengths must be <= 7, got 8",
    ),
    "query_length_too_large": (
        lambda: sdpa(attn_mask=masks.padding([3, 7], [5, 6])),
        "query_lengths must be <= 5, got 6",
    ),
    "number_of_lengths": (
        lambda: sdpa(attn_mask=masks.padding([3, 7, 7])),
        "key_lengths must have shape (2,), got (3,)",
    ),
    "lengths_shape": (
        lambda: masks.padding(torch.ones(2, 2, dtype=torch.int64)),
        "key_lengths must have shape (batch,), got (2, 2)",
    ),
    "lengths_differ": (
        lambda: masks.padding([3, 7], [5]),
        "query_lengths must have shape (2,) (like key_lengths), got (1,)",
    ),
    "padding_side": (
        lambda: masks.padding([3, 7], side="top"),
        'side must be "right" or "left", got \'top\'',
    ),
    "prefix": (
        lambda: sdpa(attn_mask=masks.prefix_lm([8, 1])),
        "prefix_lengths must be <= 7, got 8",
    ),
    "align": (
        lambda: masks.causal("left"),
        "align must be one of ('top_left', 'bottom_right'), got 'left'",
    ),
    "window": (lambda: masks.sliding_window(-2), "left must be >= 0, or -1 for unlimited, got -2"),
    "documents_shape": (
        lambda: sdpa(attn_mask=masks.documents(torch.zeros(2, 4, dtype=torch.int64))),
        "query_ids must have shape (2, 5) or (5,), got (2, 4)",
    ),
    "slopes_shape": (
        lambda: sdpa(attn_mask=masks.alibi(torch.ones(3))),
        "slopes must have shape (4,) or (2, 4), got (3,)",
    ),
    "slopes_gradient": (
        lambda: masks.alibi(torch.ones(4, requires_grad=True)),
        "slopes must not require grad",
    ),
    "slopes_alignments": (
        lambda: sdpa(
            attn_mask=masks.alibi(torch.ones(4)) & masks.alibi(torch.ones(4), "bottom_right")
        ),
        "ALiBi masks that are combined must have the same align",
    ),
    "backend": (
        lambda: sdpa(backend="fast"),
        f"backend must be one of {', '.join(BACKENDS)}, got 'fast'",
    ),
    "backend_context": (
        lambda: fused_attn.use_backend("fast").__enter__(),
        "backend must be one of",
    ),
    "lengths_for_cu_seqlens": (
        lambda: varlen_attention(*[randn(7, 2, 8)] * 3, *[torch.tensor([3, 4])] * 2, 4, 4),
        "cu_seqlens_q must begin with 0 and end with the number of rows, 7, got 3 and 4; "
        "pass cumulative lengths: (0, n0, n0 + n1, ...)",
    ),
    "steps_of_cu_seqlens": (
        lambda: varlen_attention(*[randn(7, 2, 8)] * 3, *[torch.tensor([0, 8, 3, 7])] * 2, 4, 4),
        "must have differences (lengths) in [0, 4], got [-5, 8]; pass cumulative lengths",
    ),
    "no_normalized_shape": (
        lambda: F.layer_norm(torch.tensor(1.0), ()),
        "normalized_shape must have at least one dimension, got ()",
    ),
    "large_normalized_shape": (
        lambda: F.layer_norm(Q, (1 << 70,)),
        "input must have a shape that ends with normalized_shape",
    ),
    "normalized_shape": (
        lambda: F.layer_norm(Q, 9),
        "input must have a shape that ends with normalized_shape (9,), got shape (2, 4, 5, 8)",
    ),
    "weight_shape": (
        lambda: F.layer_norm(Q, 8, torch.ones(7)),
        "weight must have shape (8,) (normalized_shape), got (7,)",
    ),
    "residual_shape": (
        lambda: F.rms_norm(Q, 8, residual=K),
        "residual must have shape (2, 4, 5, 8) (like input), got (2, 4, 7, 8)",
    ),
    "residual_dtype": (
        lambda: F.rms_norm(Q, 8, residual=Q.double()),
        "residual must have dtype torch.float32 (like input), got torch.float64",
    ),
    "norm_dropout": (
        lambda: F.layer_norm(Q, 8, dropout_p=-0.1),
        "dropout_p must be in [0, 1], got -0.1",
    ),
}


@pytest.mark.parametrize("name", [*TYPE_ERRORS, *VALUE_ERRORS])
def test_error(name):
    kind = TypeError if name in TYPE_ERRORS else ValueError
    call, message = (TYPE_ERRORS | VALUE_ERRORS)[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_unsupported_calls():
    message = (
        "no backend supports attention(float32 on cpu, head_dim 30, seqlens 2 x 2, softcap): "
        "sdpa: does not support softcap"
    )
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        sdpa(*[randn(1, 1, 2, 30)] * 3, softcap=2.0, backend="sdpa")


def test_errors_name_the_backend_variable(monkeypatch):
    """Errors name FUSED_ATTN_BACKEND if it selects the backend, but not if backend= does."""
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "sdpa")
    with pytest.raises(NotImplementedError, match=r"\(FUSED_ATTN_BACKEND=sdpa rules out"):
        sdpa(softcap=2.0)
    with pytest.raises(NotImplementedError) as error:
        sdpa(softcap=2.0, backend="sdpa")
    assert "FUSED_ATTN_BACKEND" not in str(error.value)
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "fast")
    with pytest.raises(ValueError, match=r"FUSED_ATTN_BACKEND must be one of cpp, .*, got 'fast'"):
        sdpa()
    with pytest.raises(ValueError, match=r"^backend must be one of"):
        sdpa(backend="faster")


def test_repr_of_problems_omits_default_properties():
    gpu = torch.device("cuda:0")
    wide = AttentionProblem(gpu, torch.bfloat16, 300, 300, mask="causal")
    assert repr(wide) == "attention(bfloat16 on cuda:0, head_dim 300, causal)"
    biased = AttentionProblem(
        gpu, torch.float16, 64, 32, torch.float32, "bias", 5, 7, dropout=True, result="lse"
    )
    assert repr(biased) == (
        "attention(float16 on cuda:0, head_dim 64, head_dim_v 32, seqlens 5 x 7, float32 bias, "
        "with lse, dropout)"
    )
    packed = AttentionProblem(gpu, torch.float16, 64, 64, None, "structured", 5, 7, packed=True)
    assert "seqlens 5 x 7, structured mask, packed)" in str(packed)
    norm = NormProblem(gpu, torch.float32, 768, rms=True, residual=True, needs_grad=True)
    assert f"{norm}" == "rms_norm(float32 on cuda:0, 768 columns, residual, needs_grad)"
    assert repr(NormProblem(gpu, torch.float32, 8)) == "layer_norm(float32 on cuda:0, 8 columns)"


def test_the_compiled_module_refuses_unknown_fields():
    x, summary = torch.randn(1, 1, 4, 8), torch.empty(1, 1, 1, 1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the kernels do not read the fields no_such_field"):
        _cpu.tile_summary(tensor=x, summary=summary, no_such_field=1)


def test_fields_of_a_call_that_the_compiled_module_lacks_are_an_error():
    known = set(_cpu.FIELDS)
    check_fields(known)
    with pytest.raises(ImportError, match="does not read the call fields dense, softcap"):
        check_fields(known - {"softcap", "dense"})
