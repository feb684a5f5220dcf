"""Public functions: attention of padded or packed sequences, norms, rotary embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from torch import Tensor

from fused_attn import masks
from fused_attn.call.attention import AttentionOptions, UncheckedAttention
from fused_attn.call.keywords import refuse
from fused_attn.call.norm import NormOptions, UncheckedNorm
from fused_attn.call.packed import packed_spec
from fused_attn.call.validation import check_floats
from fused_attn.masks import Mask
from fused_attn.ops import dispatch, rotary, small


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
    **kwargs: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax(scale * query @ key^T + mask) @ value without materializing the scores.

    This is a drop-in replacement for `torch.nn.functional.scaled_dot_product_attention`. Kernels
    skip fully masked tiles. The output of query rows with no visible key is 0, never NaN. Keys and
    values that are masked for every query may be non-finite.

    Gradients of any order are supported for query, key, value, a float mask and sinks, through out
    and lse. Backend "sdpa" supports only first-order gradients, as torch's fused kernels do.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim); float32, float16, bfloat16 or float64. The
            shapes (seqlen_q, head_dim) and (batch, seqlen_q, head_dim), and extra leading batch
            dimensions, are also accepted.
        key: (batch, num_heads_kv, seqlen_k, head_dim). Batch and heads broadcast as in torch.
        value: (batch, num_heads_kv, seqlen_k, head_dim_v).
        attn_mask: a `fused_attn.masks.Mask`, or a tensor that is broadcastable to (batch,
            num_heads, seqlen_q, seqlen_k). A bool tensor is True where a query attends to a key. A
            float tensor is added to the scores, and -inf masks a position.
        dropout_p: probability of dropping an attention weight, in [0, 1], rounded to a multiple of
            2^-16. Dropout is applied whenever dropout_p > 0, so pass 0.0 in evaluation.
        is_causal: apply a top-left causal mask (query i attends to keys j <= i), in addition to
            attn_mask.
        scale: factor of query @ key^T; None means 1 / sqrt(head_dim).
        enable_gqa: allow num_heads to be a multiple of num_heads_kv, without expanding key and
            value.
        softcap: replace scores by softcap * tanh(scores / softcap) before the mask is added; None
            disables it.
        sinks: float (num_heads,), a logit for each head that is added to the softmax denominator of
            each row, as in GPT-OSS. Requires a backend that returns lse.
        seed: dropout seed, a 64-bit int or an int64 scalar tensor on query's device. A tensor must
            not change before the backward. Calls with the same seed drop the same positions, so use
            a different seed for each layer and training step. None draws a seed from torch's
            generator. Backend "sdpa" does not support a seed.
        return_lse: also return lse, the natural log of the softmax denominator.
        backend: "cpp", "cuda", "triton", "flash", "flex_flash", "flex", "sdpa" or
            "eager"; None selects a backend automatically.

    Returns:
        out, (batch, num_heads, seqlen_q, head_dim_v), with the leading dimensions and the memory
        layout of query, as in torch. With return_lse, also lse, (batch, num_heads, seqlen_q),
        float32 (float64 for float64 inputs). lse includes the sinks. Without sinks, it is -inf for
        query rows with no visible key.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value.
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
    if kwargs:
        refuse("scaled_dot_product_attention", kwargs)
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, attn_mask, is_causal, enable_gqa, options)
    results = dispatch.attention(call, return_lse, backend, sinks)
    return results if return_lse else results[0]  # type: ignore[return-value]


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    attn_mask: Tensor | Mask | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seed: int | Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    **kwargs: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute attention within each sequence of a packed batch, without padding.

    Results, gradients and dropped positions equal those of `scaled_dot_product_attention` on the
    padded batch.

    Args:
        query: (total_q, num_heads, head_dim); float32, float16, bfloat16 or float64.
        key: (total_k, num_heads_kv, head_dim); num_heads may be a multiple of num_heads_kv.
        value: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_q: (batch + 1,) int32 or int64, cumulative lengths from 0 to total_q. Rows
            [cu_seqlens_q[b], cu_seqlens_q[b + 1]) are sequence b. Pass the same tensor to every
            layer, because values derived from it are cached on it. In-place changes by torch
            operations are detected. Changes by another library's kernel or through `.data` are not.
        cu_seqlens_k: cumulative lengths of key and value, from 0 to total_k, as cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or an upper bound.
        attn_mask: a `fused_attn.masks.Mask`, or a bool or float tensor as in
            scaled_dot_product_attention, broadcastable to (batch, num_heads, max_seqlen_q,
            max_seqlen_k). Positions are relative to the start of each sequence.
        is_causal: apply a top-left causal mask: query i of a sequence attends to its keys j <= i.
            For a bottom-right causal mask, as in decoding with a cache, pass
            masks.causal(align="bottom_right") as attn_mask.
        dropout_p, scale, softcap, sinks, seed, backend: as in scaled_dot_product_attention.
        return_lse: also return lse, the natural log of the softmax denominator.

    Returns:
        out, (total_q, num_heads, head_dim_v). With return_lse, also lse, (num_heads, total_q),
        float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value. Values of cu_seqlens_q and cu_seqlens_k are checked only on the CPU.
        NotImplementedError: the requested backend does not support the call.

    Example:
        >>> lengths = torch.tensor([100, 28, 64])
        >>> cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        >>> query, key, value = (torch.randn(192, 8, 64) for _ in range(3))
        >>> out = fused_attn.varlen_attention(
        ...     query, key, value, cu_seqlens, cu_seqlens, 100, 100, is_causal=True
        ... )
        >>> out.shape
        torch.Size([192, 8, 64])

    Source: Dao 2023, "FlashAttention-2", section 3.2 (packed layout).
    """
    if kwargs:
        refuse("varlen_attention", kwargs)
    if type(query) is not Tensor or not query.dim() == key.dim() == value.dim() == 3:
        check_floats({"query": query, "key": key, "value": value}, 3)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    spec = packed_spec(query, key, *lengths, masks.as_mask(attn_mask), is_causal)
    options = AttentionOptions(scale, softcap, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedAttention(query, key, value, spec, False, True, options)
    results = dispatch.attention(call, return_lse, backend, sinks)
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

    This is a drop-in replacement for `torch.nn.functional.layer_norm`. Gradients of any order are
    supported for input, residual, weight and bias.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16 or float64. Views with contiguous
            rows are read in place (see docs/masks.md).
        normalized_shape: sizes of the trailing dimensions that are normalized together.
        weight, bias: (*normalized_shape), any of the dtypes of input; None omits them.
        eps: value added to the variance.
        residual: same shape and dtype as input, added to dropout(input) before the norm; None
            adds nothing.
        dropout_p: probability of dropping an element of input before the addition, in [0, 1],
            rounded to a multiple of 2^-16.
        seed: dropout seed, as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager"; None selects a backend automatically.

    Returns:
        out, with the shape and dtype of input. With return_residual, also residual +
        dropout(input), which is input itself if there is neither residual nor dropout.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value.

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
    results = dispatch.norm(call, return_residual, backend)
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

    This is a drop-in replacement for `torch.nn.functional.rms_norm`. Gradients of any order are
    supported for input, residual and weight.

    Args:
        input: (*, *normalized_shape); float32, float16, bfloat16 or float64. Views with contiguous
            rows are read in place (see docs/masks.md).
        normalized_shape: sizes of the trailing dimensions that are normalized together.
        weight: (*normalized_shape), any of the dtypes of input; None omits it.
        eps: value added to the mean square. None means the machine epsilon of float32 (of float64
            for float64 inputs), as in torch.
        residual: same shape and dtype as input, added to dropout(input) before the norm; None
            adds nothing.
        dropout_p: probability of dropping an element of input before the addition, in [0, 1],
            rounded to a multiple of 2^-16.
        seed: dropout seed, as in scaled_dot_product_attention.
        return_residual: also return residual + dropout(input).
        backend: "cpp", "cuda", "triton", "sdpa" or "eager"; None selects a backend automatically.

    Returns:
        out, with the shape and dtype of input. With return_residual, also residual +
        dropout(input), which is input itself if there is neither residual nor dropout.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value.

    Example:
        >>> x = torch.randn(2, 128, 512, dtype=torch.bfloat16)
        >>> fused_attn.rms_norm(x, 512, torch.ones(512), eps=1e-6).dtype
        torch.bfloat16

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    options = NormOptions(eps, True, dropout_p, seed)  # type: ignore[arg-type]
    call = UncheckedNorm(input, normalized_shape, weight, None, residual, options)
    results = dispatch.norm(call, return_residual, backend)
    return results if return_residual else results[0]  # type: ignore[return-value]


def rotary_embedding(
    input: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    interleaved: bool = False,
) -> Tensor:
    """Rotate pairs of dimensions of queries or keys by angles that depend on their positions.

    On CPUs, forward and backward are one pass each. On other devices, under torch.compile, and if
    cos or sin requires grad, torch's operations compute both. Gradients of any order are supported.
    Results are rounded once.

    Args:
        input: (batch, num_heads, seqlen, head_dim), with any strides; float32, float16, bfloat16
            or float64.
        cos, sin: cosine and sine of the angles: (positions, width), one table for all sequences, or
            (batch, seqlen, width) or (1, seqlen, width), one row for each token. width is
            rotary_dim / 2, one angle for each pair, or head_dim, one for each dimension, as in
            transformers. Dimensions from rotary_dim on remain unchanged.
        positions: (batch, seqlen) or (seqlen,) int32 or int64, the row of the tables for each
            token. None: token i uses row i.
        interleaved: pairs are dimensions (0, 1), (2, 3), ...; otherwise i and i + rotary_dim / 2.

    Returns:
        The rotated tensor, with the shape and dtype of input.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states the expected and the
            actual value. Values of positions are checked only on the CPU.

    Example:
        >>> query = torch.randn(2, 8, 128, 64)
        >>> angles = torch.arange(128)[:, None] * 10000.0 ** -(torch.arange(0, 64, 2) / 64)
        >>> fused_attn.rotary_embedding(query, angles.cos(), angles.sin()).shape
        torch.Size([2, 8, 128, 64])

    Source: Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding",
        equation 34.
    """
    return rotary.rotate(input, rotary.checked_rotation(input, cos, sin, positions, interleaved))
