"""Invalid input raises an error that names the argument, the expected and the actual value."""

from __future__ import annotations

import re

import pytest
import torch

import fused_attn
import fused_attn.nn as fnn
from fused_attn import _cpu, masks, varlen_attention
from fused_attn import functional as F
from fused_attn.backends import AttentionProblem, NormProblem
from fused_attn.backends.fields import check_fields
from fused_attn.backends.registry import BACKENDS

Q = torch.randn(2, 4, 5, 8)
K = torch.randn(2, 4, 7, 8)


def sdpa(query=Q, key=K, value=K, *args, **kwargs):
    return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


CASES = {
    "softmax_scale": (
        lambda: sdpa(softmax_scale=1.0),
        TypeError, "scaled_dot_product_attention() got an unexpected keyword argument "
        "'softmax_scale'; use scale=",
    ),
    "causal": (
        lambda: varlen_attention(Q, K, K, *[torch.tensor([0, 5])] * 2, 5, 5, causal=True),
        TypeError, "'causal'; use is_causal=",
    ),
    "window_size": (
        lambda: fused_attn.decode_attention(Q, K, K, cache_lengths=[5, 5], window_size=(2, 0)),
        TypeError, "use attn_mask=masks.sliding_window(left, right, align=",
    ),
    "cache_seqlens": (
        lambda: fused_attn.decode_attention(Q, K, K, cache_seqlens=[5, 5]),
        TypeError, "'cache_lengths'",
    ),
    "unknown_keyword": (
        lambda: sdpa(moon=1), TypeError, "got an unexpected keyword argument 'moon'",
    ),
    "head_dim": (
        lambda: sdpa(key=torch.randn(2, 4, 7, 9), value=torch.randn(2, 4, 7, 9)),
        ValueError, "key must have head_dim 8 (like query), got 9",
    ),
    "seqlen_k": (
        lambda: sdpa(value=torch.randn(2, 4, 6, 8)),
        ValueError, "value must have seqlen_k 7 (like key), got 6",
    ),
    "batch": (
        lambda: sdpa(query=torch.randn(3, 4, 5, 8)),
        ValueError, "query, key and value must have batch dimensions that broadcast",
    ),
    "heads": (
        lambda: sdpa(query=torch.randn(2, 8, 5, 8)),
        ValueError, "key must have num_heads 8 or 1, got 4; pass enable_gqa=True",
    ),
    "gqa_heads": (
        lambda: sdpa(query=torch.randn(2, 6, 5, 8), enable_gqa=True),
        ValueError, "num_heads_kv of key must divide num_heads of query, 6, got 4",
    ),
    "gqa_value_heads": (
        lambda: sdpa(value=torch.randn(2, 2, 7, 8), enable_gqa=True),
        ValueError, "value must have num_heads_kv 4 (like key), got 2",
    ),
    "heads_are_lengths": (
        lambda: sdpa(torch.randn(2, 5, 4, 8), torch.randn(2, 7, 4, 8), torch.randn(2, 7, 4, 8)),
        ValueError, "query must have num_heads 7 or 1, got 5; query, key and value must be "
        "(batch, num_heads, seqlen, head_dim), and look like (batch, seqlen, num_heads, head_dim): "
        "pass their .transpose(1, 2)",
    ),
    "gqa_heads_are_lengths": (
        lambda: sdpa(
            torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8),
            enable_gqa=True,
        ),
        ValueError, "got 7; query, key and value must be (batch, num_heads, seqlen, head_dim), and",
    ),
    "mask_of_lengths_that_are_heads": (
        lambda: sdpa(*[torch.randn(2, 6, 4, 8)] * 3, torch.ones(6, 6, dtype=torch.bool)),
        ValueError, "= (2, 6, 4, 4), got (6, 6); query, key and value must be (batch, num_heads, "
        "seqlen, head_dim), and look like",
    ),
    "dimensions": (
        lambda: sdpa(query=torch.randn(8)),
        ValueError, "query must have at least 2 dimensions, got shape (8,)",
    ),
    "no_tensor": (lambda: sdpa(query=[1.0]), TypeError, "query must be a tensor, got list"),
    "dtype": (
        lambda: sdpa(query=Q.int()),
        TypeError, "query must be float32, float16, bfloat16 or float64, got torch.int32",
    ),
    "dtypes_differ": (
        lambda: sdpa(key=K.double()),
        ValueError, "key must have dtype torch.float32 (like query), got torch.float64",
    ),
    "devices_differ": (
        lambda: sdpa(key=K.to("meta"), value=K.to("meta")),
        ValueError, "key must have device cpu (like query), got meta",
    ),
    "dropout_p": (
        lambda: sdpa(dropout_p=1.5), ValueError, "dropout_p must be in [0, 1], got 1.5",
    ),
    "layer_norm_eps": (
        lambda: F.layer_norm(Q, 8, eps=None), TypeError, "eps must be a float, got NoneType",
    ),
    "dropout_nan": (
        lambda: sdpa(dropout_p=float("nan")), ValueError, "dropout_p must be in [0, 1], got nan",
    ),
    "dropout_type": (
        lambda: sdpa(dropout_p="0.1"), TypeError, "dropout_p must be a float, got str",
    ),
    "dropout_bool": (
        lambda: sdpa(dropout_p=True), TypeError, "dropout_p must be a float, got bool",
    ),
    "scale_type": (lambda: sdpa(scale="1"), TypeError, "scale must be a float, got str"),
    "scale_shape": (
        lambda: sdpa(scale=torch.ones(4)),
        TypeError, "scale must be a float, got a torch.float32 tensor of shape (4,)",
    ),
    "scale_with_gradient": (
        lambda: sdpa(scale=torch.tensor(0.3, requires_grad=True)),
        TypeError, "scale must not require grad: its gradient is not computed",
    ),
    "softcap": (
        lambda: sdpa(softcap=-1.0),
        ValueError, "softcap must be positive and finite, or None, got -1.0",
    ),
    "mask_shape": (
        lambda: sdpa(attn_mask=torch.ones(5, 6, dtype=torch.bool)),
        ValueError, "attn_mask must be broadcastable to (batch, num_heads, seqlen_q, seqlen_k) = "
        "(2, 4, 5, 7), got (5, 6)",
    ),
    "mask_batch": (
        lambda: F.scaled_dot_product_attention(
            *torch.randn(3, 2, 2, 3, 4, 8).unbind(), torch.ones(3, 2, 3, 4, 4) > 0
        ),
        ValueError,
        "attn_mask must have batch dimensions that broadcast to (2, 2), got shape (3, 2, 3, 4, 4)",
    ),
    "mask_dimensions": (
        lambda: sdpa(attn_mask=torch.ones(1, 1, 1, 5, 7)),
        ValueError, "attn_mask must have at most 4 dimensions, got (1, 1, 1, 5, 7)",
    ),
    "mask_dtype": (
        lambda: sdpa(attn_mask=torch.ones(5, 7, dtype=torch.int64)),
        TypeError, "attn_mask must be bool or float, got torch.int64: if 1 means attend and 0 "
        "means mask, pass its .bool()",
    ),
    "mask_type": (
        lambda: sdpa(attn_mask="causal"),
        TypeError, "attn_mask must be a bool tensor, a float tensor or a Mask, got str",
    ),
    "sparse_mask": (
        lambda: sdpa(attn_mask=torch.zeros(5, 7).to_sparse()),
        TypeError, "attn_mask must be a dense tensor",
    ),
    "mask_device": (
        lambda: sdpa(attn_mask=torch.ones(5, 7, device="meta")),
        ValueError, "attn_mask must be on cpu (like query), got meta",
    ),
    "bool_mask_with_gradient": (
        lambda: masks.dense(torch.ones(5, 7, requires_grad=True)),
        TypeError, "mask must be a bool tensor (True = attend), got torch.float32 tensor",
    ),
    "bool_mask_expected": (
        lambda: masks.dense(torch.ones(5, 7, dtype=torch.uint8)),
        TypeError, "got torch.uint8 tensor: if 1 means attend and 0 means mask, pass its .bool()",
    ),
    "mask_and_tensor": (
        lambda: masks.causal() & torch.ones(5, 7, dtype=torch.bool),
        TypeError, "a Mask and a torch.bool tensor cannot be combined directly: use "
        "mask & masks.dense(tensor)",
    ),
    "tensor_and_mask": (
        lambda: torch.ones(5, 7, dtype=torch.bool) & masks.causal(),
        TypeError, "use mask & masks.dense(tensor)",
    ),
    "mask_and_float_tensor": (
        lambda: masks.causal() & torch.zeros(5, 7), TypeError, "use mask & masks.bias(tensor)",
    ),
    "mask_and_number": (lambda: masks.causal() & 1, TypeError, "unsupported operand type"),
    "module_mask_dtype": (
        lambda: fnn.MultiheadAttention(8, 2)(*[torch.randn(5, 2, 8)] * 3, torch.ones(2, 5).int()),
        TypeError, "key_padding_mask must be a bool or float tensor, got torch.int32: pass "
        "mask.bool() if 1 means ignore, or mask == 0 if 1 means attend",
    ),
    "float_mask_expected": (
        lambda: masks.bias(torch.ones(5, 7, dtype=torch.bool)),
        TypeError, "mask must be a float tensor, got torch.bool tensor",
    ),
    "negative_length": (
        lambda: masks.padding([3, -1]), ValueError, "key_lengths must be >= 0, got -1",
    ),
    "length_too_large": (
        lambda: sdpa(attn_mask=masks.padding([3, 8])),
        ValueError, "key_lengths must be <= 7, got 8",
    ),
    "query_length_too_large": (
        lambda: sdpa(attn_mask=masks.padding([3, 7], [5, 6])),
        ValueError, "query_lengths must be <= 5, got 6",
    ),
    "number_of_lengths": (
        lambda: sdpa(attn_mask=masks.padding([3, 7, 7])),
        ValueError, "key_lengths must have shape (2,), got (3,)",
    ),
    "lengths_type": (
        lambda: masks.padding([3.5, 7.0]),
        TypeError, "key_lengths must be integers, got torch.float32",
    ),
    "lengths_shape": (
        lambda: masks.padding(torch.ones(2, 2, dtype=torch.int64)),
        ValueError, "key_lengths must have shape (batch,), got (2, 2)",
    ),
    "lengths_differ": (
        lambda: masks.padding([3, 7], [5]),
        ValueError, "query_lengths must have shape (2,) (like key_lengths), got (1,)",
    ),
    "no_lengths": (
        lambda: masks.padding(None), TypeError, "key_lengths must be integers, got NoneType",
    ),
    "slopes_are_integers": (
        lambda: masks.alibi([1, 2]), TypeError, "slopes must be floats, got torch.int64",
    ),
    "padding_side": (
        lambda: masks.padding([3, 7], side="top"),
        ValueError, "side must be \"right\" or \"left\", got 'top'",
    ),
    "prefix": (
        lambda: sdpa(attn_mask=masks.prefix_lm([8, 1])),
        ValueError, "prefix_lengths must be <= 7, got 8",
    ),
    "align": (
        lambda: masks.causal("left"),
        ValueError, "align must be one of ('top_left', 'bottom_right'), got 'left'",
    ),
    "window": (
        lambda: masks.sliding_window(-2),
        ValueError, "left must be >= 0, or -1 for unlimited, got -2",
    ),
    "window_type": (
        lambda: masks.sliding_window(1.5), TypeError, "left must be an int, got float",
    ),
    "documents_shape": (
        lambda: sdpa(attn_mask=masks.documents(torch.zeros(2, 4, dtype=torch.int64))),
        ValueError, "query_ids must have shape (2, 5) or (5,), got (2, 4)",
    ),
    "documents_type": (
        lambda: masks.documents(torch.zeros(5)),
        TypeError, "query_ids must be integers, got torch.float32",
    ),
    "slopes_shape": (
        lambda: sdpa(attn_mask=masks.alibi(torch.ones(3))),
        ValueError, "slopes must have shape (4,) or (2, 4), got (3,)",
    ),
    "slopes_gradient": (
        lambda: masks.alibi(torch.ones(4, requires_grad=True)),
        ValueError, "slopes must not require grad",
    ),
    "slopes_alignments": (
        lambda: sdpa(
            attn_mask=masks.alibi(torch.ones(4)) & masks.alibi(torch.ones(4), "bottom_right")
        ),
        ValueError, "ALiBi masks that are combined must have the same align",
    ),
    "backend": (
        lambda: sdpa(backend="fast"), ValueError,
        f"backend must be one of {', '.join(BACKENDS)}, got 'fast'",
    ),
    "backend_context": (
        lambda: fused_attn.use_backend("fast").__enter__(), ValueError, "backend must be one of",
    ),
    "unsupported": (
        lambda: F.scaled_dot_product_attention(
            *[torch.randn(1, 1, 2, 30)] * 3, softcap=2.0, backend="sdpa"
        ),
        NotImplementedError, "no backend supports attention(float32 on cpu, head_dim 30, seqlens "
        "2 x 2, softcap): sdpa: does not support softcap",
    ),
    "lengths_for_cu_seqlens": (
        lambda: varlen_attention(*[torch.randn(7, 2, 8)] * 3, *[torch.tensor([3, 4])] * 2, 4, 4),
        ValueError, "cu_seqlens_q must begin with 0 and end with the number of rows, 7, got 3 and "
        "4; pass cumulative lengths: (0, n0, n0 + n1, ...)",
    ),
    "steps_of_cu_seqlens": (
        lambda: varlen_attention(
            *[torch.randn(7, 2, 8)] * 3, *[torch.tensor([0, 8, 3, 7])] * 2, 4, 4
        ),
        ValueError,
        "must have differences (lengths) in [0, 4], got [-5, 8]; pass cumulative lengths",
    ),
    "report_called": (
        lambda: fused_attn.swap_modules(torch.nn.Sequential(torch.nn.LayerNorm(8)))(Q),
        TypeError, "a SwapReport is not a model: swap_modules changes the model in place and "
        "returns a report; call the model that was passed to it",
    ),
    "no_normalized_shape": (
        lambda: F.layer_norm(torch.tensor(1.0), ()),
        ValueError, "normalized_shape must have at least one dimension, got ()",
    ),
    "large_normalized_shape": (
        lambda: F.layer_norm(Q, (1 << 70,)),
        ValueError, "input must have a shape that ends with normalized_shape",
    ),
    "float_normalized_shape": (
        lambda: F.layer_norm(Q, (8.0,)),
        TypeError, "normalized_shape must contain only ints, got (8.0,)",
    ),
    "normalized_shape": (
        lambda: F.layer_norm(Q, 9),
        ValueError, "input must have a shape that ends with normalized_shape (9,), "
        "got shape (2, 4, 5, 8)",
    ),
    "weight_shape": (
        lambda: F.layer_norm(Q, 8, torch.ones(7)),
        ValueError, "weight must have shape (8,) (normalized_shape), got (7,)",
    ),
    "residual_shape": (
        lambda: F.rms_norm(Q, 8, residual=K),
        ValueError, "residual must have shape (2, 4, 5, 8) (like input), got (2, 4, 7, 8)",
    ),
    "residual_dtype": (
        lambda: F.rms_norm(Q, 8, residual=Q.double()),
        ValueError, "residual must have dtype torch.float32 (like input), got torch.float64",
    ),
    "norm_dtype": (
        lambda: F.rms_norm(Q.int(), 8),
        TypeError, "input must be float32, float16, bfloat16 or float64, got torch.int32",
    ),
    "norm_dropout": (
        lambda: F.layer_norm(Q, 8, dropout_p=-0.1),
        ValueError, "dropout_p must be in [0, 1], got -0.1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_error(name):
    call, kind, message = CASES[name]
    with pytest.raises(kind, match=re.escape(message)):
        call()


def test_errors_name_the_backend_variable(monkeypatch):
    """Errors name FUSED_ATTN_BACKEND if it, and not backend=, selects the backend."""
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
