"""Public attention and norm functions; they build an unchecked call and dispatch it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fused_attn.call.options import AttentionOptions, NormOptions
from fused_attn.call.unchecked import UncheckedAttention, UncheckedNorm
from fused_attn.masks import Mask
from fused_attn.ops import autograd, small


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * query @ key^T + mask) @ value without materializing the scores.

    Drop-in replacement for `torch.nn.functional.scaled_dot_product_attention`. Kernels skip fully
    masked tiles. Rows with no visible key return 0, never NaN. Keys and values that are masked for
    every query may hold any values, NaN included. Differentiable in query, key, value, a float
    mask, sinks and lse, to any order; on backend "sdpa" to first order only, as torch's fused
    kernels are.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16 or float64. Also
            accepted: (seqlen_q, head_dim), (batch, seqlen_q, head_dim), and extra leading batch
            dimensions.
        key: (batch, num_heads_kv, seqlen_k, head_dim). Batch and heads broadcast as in torch.
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask: a bool tensor (True = attend) or a float tensor (added to the scores; -inf
            masks), broadcastable to (batch, num_heads, seqlen_q, seqlen_k), or a
            `fused_attn.masks.Mask`.
        dropout_p: probability of dropping an attention weight, in [0, 1], rounded to a multiple of
            2^-16. Dropout always applies: pass 0.0 in evaluation.
        is_causal: query i attends to keys j <= i (top-left); combines with attn_mask.
        scale: multiplies query @ key^T; None means 1 / sqrt(head_dim).
        enable_gqa: allow num_heads to be a multiple of num_heads_kv, without expanding key and
            value.
        softcap: replaces the scores by softcap * tanh(scores / softcap) before the mask is added.
        sinks: float (num_heads,): an extra logit for each head, without a value, in the softmax of
            each row, as in GPT-OSS. Needs a backend that returns lse.
        seed: dropout seed: a 64-bit int, or an int64 scalar tensor on query's device that must not
            change before the backward. A seed determines the dropped positions, so use a different
            one for each layer and step. None draws one from torch's generator. Not supported by
            backend "sdpa".
        return_lse: also return the natural log of the softmax denominator.
        backend: "cpp", "cuda", "triton", "sdpa" or "eager"; None selects one automatically.

    Returns:
        out, with query's leading dimensions, head_dim_v, and query's memory layout, as in torch.
        With return_lse also lse, (batch, num_heads, seqlen_q), float32 (float64 for float64), -inf
        for rows with no visible key. lse includes the sinks.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states expected and actual value.
        NotImplementedError: the requested backend does not support the call.

    Example:
        >>> query = torch.randn(2, 8, 128, 64)
        >>> key, value = torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 64)
        >>> mask = fused_attn.masks.causal() & fused_attn.masks.padding([128, 100])
        >>> out, lse = fused_attn.scaled_dot_product_attention(
        ...     query, key, value, mask, enable_gqa=True, return_lse=True
        ... )
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 128, 64]), torch.Size([2, 8, 128]))

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Milakov and Gimelshein
        2018, "Online normalizer calculation for softmax"; Dao 2023, "FlashAttention-2".
    """
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, attn_mask, is_causal, enable_gqa, options)
    results = autograd.attention(call, return_lse, backend, sinks)
    return results if return_lse else results[0]  # type: ignore[return-value]


def layer_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the layer norm of residual + dropout(input) in one pass over memory.

    Drop-in replacement for `torch.nn.functional.layer_norm`. Differentiable in input, residual,
    weight and bias, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16 or float64. Views with contiguous
            rows are read in place: see docs/masks.md.
        normalized_shape: the trailing dimensions that are normalised together.
        weight, bias: (*normalized_shape), any of these dtypes; None omits them.
        eps: added to the variance.
        residual: same shape and dtype as input; added before the norm.
        dropout_p: probability of dropping an element of input before the addition, in [0, 1],
            rounded to a multiple of 2^-16.
        seed: as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager"; None selects one automatically.

    Returns:
        out, with the shape and dtype of input. With return_residual also the sum, or input itself
        if nothing is added or dropped.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states expected and actual value.

    Example:
        >>> sublayer, x = torch.randn(2, 128, 512), torch.randn(2, 128, 512)
        >>> weight, bias = torch.ones(512), torch.zeros(512)
        >>> out, x = fused_attn.layer_norm(
        ...     sublayer, 512, weight, bias, residual=x, dropout_p=0.1, return_residual=True
        ... )
        >>> out.shape, x.shape
        (torch.Size([2, 128, 512]), torch.Size([2, 128, 512]))

    Source: Ba et al. 2016, "Layer Normalization", equation 4.
    """
    if backend is None and type(dropout_p) is float and dropout_p == 0.0:
        done = small.layer_norm(input, normalized_shape, weight, bias, eps, residual)
        if done is not None:
            return done if return_residual else done[0]
    options = NormOptions(eps, False, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedNorm(input, normalized_shape, weight, bias, residual, options)
    results = autograd.norm(call, return_residual, backend)
    return results if return_residual else results[0]  # type: ignore[return-value]


def rms_norm(
    input: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    return_residual: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the RMS norm of residual + dropout(input) in one pass over memory.

    Drop-in replacement for `torch.nn.functional.rms_norm`. Differentiable in input, residual and
    weight, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16 or float64. Views with contiguous
            rows are read in place: see docs/masks.md.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: (*normalized_shape), any of these dtypes; None omits it.
        eps: added to the mean square; None means the machine epsilon of float32 (float64 for
            float64), as in torch.
        residual: same shape and dtype as input; added before the norm.
        dropout_p: probability of dropping an element of input before the addition, in [0, 1],
            rounded to a multiple of 2^-16.
        seed: as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager"; None selects one automatically.

    Returns:
        out, with the shape and dtype of input. With return_residual also the sum, or input itself
        if nothing is added or dropped.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states expected and actual value.

    Example:
        >>> x = torch.randn(2, 128, 512, dtype=torch.bfloat16)
        >>> fused_attn.rms_norm(x, 512, torch.ones(512), eps=1e-6).dtype
        torch.bfloat16

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    options = NormOptions(eps, True, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedNorm(input, normalized_shape, weight, None, residual, options)
    results = autograd.norm(call, return_residual, backend)
    return results if return_residual else results[0]  # type: ignore[return-value]
