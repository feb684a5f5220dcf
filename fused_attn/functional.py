"""The public functions: validation, defaults, and the way to a kernel."""

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
    """Fused masked attention: softmax(scale * query @ key^T + mask) @ value, never held whole.

    Takes the place of `torch.nn.functional.scaled_dot_product_attention`. Masked tiles are
    skipped, rows with no visible key give 0 (never NaN), and what stands in keys and values that
    no query may see does not matter. Differentiable in query, key, value, a float mask, sinks and
    lse, to any order (first order only on backend "sdpa", as torch's fused kernels).

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16, float64. Also
            (seqlen_q, head_dim), (batch, seqlen_q, head_dim) and extra leading batch dimensions.
        key: (batch, num_heads_kv, seqlen_k, head_dim). Batch and heads broadcast as in torch.
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask: a bool tensor (True = attend) or a float tensor (added to the scores; -inf
            masks), broadcastable to (batch, num_heads, seqlen_q, seqlen_k), or a
            `fused_attn.masks.Mask`.
        dropout_p: probability in [0, 1], in steps of 2^-16, of dropping a weight. It always
            applies: pass 0.0 in evaluation.
        is_causal: query i sees keys j <= i (top-left); combines with attn_mask.
        scale: multiplies query @ key^T; None is 1 / sqrt(head_dim).
        enable_gqa: num_heads may be a multiple of num_heads_kv; nothing is expanded.
        softcap: scores become softcap * tanh(scores / softcap) before the mask is added.
        sinks: float (num_heads,): a logit for each head that takes part in the softmax of each row
            and has no value, as in GPT-OSS. Needs a backend that has lse.
        seed: what decides which weights are dropped: an int of 64 bits, or an int64 scalar tensor
            on query's device, which may not change before the backward. The same seed drops the
            same positions, so layers and steps need seeds of their own. None draws one from torch's
            generator. Not for backend "sdpa".
        return_lse: also return the natural log of the softmax denominator.
        backend: "cpp", "cuda", "triton", "sdpa" or "eager" instead of the automatic choice.

    Returns:
        out with query's leading shape and head_dim_v, laid out in memory as query is, as in torch;
        with return_lse also lse, (batch, num_heads, seqlen_q), float32 (float64 for float64), -inf
        for rows with no visible key. With sinks, lse has their terms too.

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.
        NotImplementedError: the backend that was asked for does not take the problem.

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
    """Layer norm of residual + dropout(input), in one pass over memory.

    Takes the place of `torch.nn.functional.layer_norm`. Differentiable in input, residual, weight
    and bias, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16, float64. Views whose
            rows are contiguous are read in place: see docs/masks.md.
        normalized_shape: the trailing dimensions that are normalised together.
        weight, bias: (*normalized_shape), of any of these types; None leaves them out.
        eps: added to the variance.
        residual: like input; added before the norm.
        dropout_p: probability in [0, 1], in steps of 2^-16, of dropping an element of input before
            the sum.
        seed: as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager" instead of the automatic choice.

    Returns:
        out, like input; with return_residual also the sum (input itself where nothing is added).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.

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
    """RMS norm of residual + dropout(input), in one pass over memory.

    Takes the place of `torch.nn.functional.rms_norm`. Differentiable in input, residual and
    weight, to any order.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16, float64. Views whose
            rows are contiguous are read in place: see docs/masks.md.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: (*normalized_shape), of any of these types; None leaves it out.
        eps: added to the mean square; None is that of float32 (float64 for float64), as in
            torch.
        residual: like input; added before the norm.
        dropout_p: probability in [0, 1], in steps of 2^-16, of dropping an element of input before
            the sum.
        seed: as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager" instead of the automatic choice.

    Returns:
        out, like input; with return_residual also the sum (input itself where nothing is added).

    Raises:
        ValueError, TypeError: an argument is wrong; the message has expected and got.

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
