"""MultiheadAttention on the fused kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn import functional, masks
from fused_attn.call.handlers import heads
from fused_attn.masks import Mask
from fused_attn.nn._nested import on_padded
from fused_attn.nn.caches import KeyValueCache
from fused_attn.nn.mask_terms import combine, mask_terms
from fused_attn.nn.packing import Packing
from fused_attn.nn.replacement import FromTorch, fx_leaf, replaces
from fused_attn.nn.weights import attention_with_weights


@replaces(torch.nn.MultiheadAttention)
class MultiheadAttention(FromTorch, torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` (Vaswani et al. 2017, section 3.2.2) on the fused kernels.

    Arguments, parameters and state_dict keys are those of torch.nn.MultiheadAttention. The
    parameters are in_proj_weight (3 * embed_dim, embed_dim), in_proj_bias (3 * embed_dim,) and
    those of out_proj. If kdim or vdim differs from embed_dim, q_proj_weight, k_proj_weight and
    v_proj_weight replace in_proj_weight.

    Key padding masks and causal masks are never materialized as (batch * num_heads, L, S) tensors.
    For fully masked queries, the output is the bias of out_proj and gradients are 0, never NaN.

    Args:
        embed_dim: number of features of query and output; head_dim is embed_dim / num_heads.
        num_heads: number of heads; must divide embed_dim.
        dropout: dropout probability of the attention weights in training.
        bias: add biases to the projections.
        add_bias_kv: append a learned key and value, bias_k and bias_v, each (1, 1, embed_dim).
        add_zero_attn: append a key and value of zeros.
        kdim, vdim: number of features of key and value; None means embed_dim.
        batch_first: batches have shape (N, L, embed_dim) instead of (L, N, embed_dim).
        device, dtype: device and dtype of the parameters.

    Raises:
        ValueError: embed_dim or num_heads is not positive, as in torch.nn.
        AssertionError: num_heads does not divide embed_dim, as in torch.nn.

    Example:
        >>> attention = fused_attn.nn.MultiheadAttention(64, 4, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> padding = torch.arange(10) >= torch.tensor([[10], [7]])
        >>> out, _ = attention(x, x, x, key_padding_mask=padding, need_weights=False)
        >>> out.shape
        torch.Size([2, 10, 64])

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.2.2.
    """

    head_mesh: Any = None  # DeviceMesh over which HeadwiseParallel splits the heads

    @fx_leaf
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention of query over key and value.

        Args:
            query: (L, N, embed_dim), (N, L, embed_dim) with batch_first, or (L, embed_dim).
            key: (S, N, kdim), (N, S, kdim) with batch_first, or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) with batch_first, or (S, vdim).
            key_padding_mask: (N, S), or (S,) for unbatched input: bool (True = ignore the key) or
                float (added to the scores).
            need_weights: also return the attention weights, which a second kernel computes. The
                output always comes from the fused kernel. Averaged weights take N * L * S elements
                of memory, and weights per head take num_heads times as much.
            attn_mask: (L, S) or (N * num_heads, L, S) tensor, bool (True = ignore) or float (added
                to the scores), or a `fused_attn.masks.Mask` that defines the visible keys.
            average_attn_weights: average the returned weights over the heads. The kernel averages
                them before the store.
            is_causal: use causal attention. A tensor attn_mask must then be the causal mask, as in
                torch, and is only read if it requires grad. Unlike in torch, attn_mask may also be
                None or a Mask, which is combined with the causal mask. A causal (L, L) tensor on
                the CPU is detected without is_causal; see `is_causal_mask`.

        Returns:
            A tuple of the output and the weights. The output has the shape of query. The weights
            are None if need_weights is False. Otherwise they include dropout, as in torch, and have
            shape (N, L, S) if averaged, else (N, num_heads, L, S); unbatched input omits N. S
            includes the keys of add_bias_kv and add_zero_attn, which come last.

        Raises:
            ValueError, TypeError: an argument is invalid; the message states the expected and the
                actual value.
        """
        if query.is_nested and query is key is value and not need_weights:
            return self._forward_nested(query, key_padding_mask, attn_mask, is_causal), None
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        batch, _, seqlen_q, _ = q.shape
        terms, is_causal = mask_terms(
            attn_mask, key_padding_mask, is_causal, batch, self.num_heads, seqlen_q, k.shape[2]
        )
        extra = (self.bias_k is not None) + self.add_zero_attn
        if extra:
            k, v, terms, is_causal = self._prepend_keys(k, v, terms, is_causal, extra)
        args = (q, k, v, combine(terms), self.dropout if self.training else 0.0, is_causal)
        if not need_weights:
            out = on_heads_of(self, functional.scaled_dot_product_attention, *args)
            return self.out_proj(self._merge_heads(out, batched)), None
        attend = partial(attention_with_weights, average=average_attn_weights)
        out, weights = on_heads_of(self, attend, *args)
        weights = weights.roll(-extra, -1) if extra else weights
        output = self.out_proj(self._merge_heads(out, batched))
        return output, weights if batched else weights.squeeze(0)

    def _forward_nested(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | Mask | None,
        is_causal: bool,
    ) -> Tensor:
        """Compute self-attention of a nested tensor, which encoder layers pass in inference."""
        if key_padding_mask is not None:
            raise ValueError("key_padding_mask must be None if query is a nested tensor")
        if not self.batch_first:
            raise ValueError("batch_first must be True if query is a nested tensor")

        def attend(padded: Tensor, ignored: Tensor) -> Tensor:
            return self.forward(
                padded, padded, padded, ignored, False, attn_mask, is_causal=is_causal
            )[0]

        return on_padded(attend, x)

    def forward_packed(self, x: Tensor, packing: Packing) -> Tensor:
        """Compute self-attention within each sequence of a packed batch.

        Args:
            x: (1, total, embed_dim), from `Packing.pack`.
            packing: the sequence boundaries and the mask of the batch.

        Returns:
            The output, (1, total, embed_dim).
        """
        projected = self._linear(x[0], self.in_proj_weight, self._bias())
        head_dim = self.embed_dim // self.num_heads
        q, k, v = projected.unflatten(1, (3, -1, head_dim)).unbind(1)
        dropout_p, arguments = self.dropout if self.training else 0.0, packing.varlen_arguments()
        attend = partial(functional.varlen_attention, dropout_p=dropout_p, **arguments)
        out = on_heads_of(self, attend, q, k, v)
        return self.out_proj(out.flatten(1))[None]

    def forward_cached(
        self, x: Tensor, cache: KeyValueCache, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Append new positions to the cache and compute their causal self-attention.

        Args:
            x: (T, N, embed_dim), or (N, T, embed_dim) with batch_first.
            cache: keys and values of the earlier positions; updated in place.
            key_padding_mask: (N, cached positions + T); see `forward`.

        Returns:
            The output for the new positions, with the shape of x.
        """
        q, k, v = self._project(x, x, x)
        k, v = cache.append(k, v)
        terms, _ = mask_terms(
            None, key_padding_mask, False, q.shape[0], self.num_heads, q.shape[2], k.shape[2]
        )
        if q.shape[2] > 1:
            terms.append(masks.causal(align="bottom_right"))
        # This call takes 20 us per token, and decode_attention would take 140 us (CPU, 128 cached
        # positions, 8 heads, head_dim 64).
        out = on_heads_of(
            self, functional.scaled_dot_product_attention, q, k, v, combine(terms),
            self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(self._merge_heads(out, True))

    def forward_projected(
        self, x: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Compute cross-attention over keys and values from `project_memory`.

        Args:
            x: (T, N, embed_dim), or (N, T, embed_dim) with batch_first.
            key, value: (M, num_heads, S, head_dim). N must be a multiple of M. Groups of N / M
                consecutive sequences share a memory, and the kernel processes the queries of a
                group as one sequence.
            key_padding_mask: (M, S); see `forward`.

        Returns:
            The output, with the shape of x.
        """
        q = self._project_query(x)
        memories, sharing = key.shape[0], q.shape[0] // max(key.shape[0], 1)
        # With batch_first, q is stored as (N, T, num_heads, head_dim), so the result is a view.
        q = q.transpose(1, 2).unflatten(0, (memories, sharing)).flatten(1, 2).transpose(1, 2)
        seqlens = q.shape[2], key.shape[2]
        terms, _ = mask_terms(None, key_padding_mask, False, memories, self.num_heads, *seqlens)
        out = on_heads_of(
            self, functional.scaled_dot_product_attention, q, key, value, combine(terms),
            self.dropout if self.training else 0.0,
        )  # fmt: skip
        out = out.unflatten(2, (sharing, -1)).transpose(1, 2).flatten(0, 1)
        return self.out_proj(self._merge_heads(out, True))

    def project_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Return the projected keys and values of a memory, each (N, num_heads, S, head_dim)."""
        return self._project_keys(memory, memory)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "query, key and value must not be nested tensors, except in self-attention with "
                "need_weights=False: pad them and pass key_padding_mask, so that padded keys are "
                "skipped"
            )
        if query.dim() not in (2, 3):
            raise ValueError(
                f"query must have 3 dimensions (2 if unbatched), got shape {tuple(query.shape)}"
            )
        for name, tensor, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.dim() != query.dim():
                raise ValueError(
                    f"{name} must have {query.dim()} dimensions (like query), "
                    f"got shape {tuple(tensor.shape)}"
                )
            if tensor.shape[-1] != width:
                raise ValueError(
                    f"{name} must have {width} features, got shape {tuple(tensor.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value must have the batch size and length of key, {tuple(key.shape[:-1])}, "
                f"got {tuple(value.shape[:-1])}"
            )
        batch_dim = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ValueError(
                f"key must have batch size {query.shape[batch_dim]} (like query), "
                f"got {key.shape[batch_dim]}"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project query, key and value; return (batch, num_heads, seqlen, head_dim) views."""
        if self._qkv_same_embed_dim and query is key is value:
            return self._split_heads(self._linear(query, self.in_proj_weight, self._bias()), 3)
        return self._project_query(query), *self._project_keys(key, value)

    def _project_query(self, query: Tensor) -> Tensor:
        bias = self._bias()
        bias = bias if bias is None else bias.chunk(3)[0]
        weight = self.q_proj_weight
        if self._qkv_same_embed_dim:
            weight = self._rows(self.in_proj_weight).chunk(3)[0]
        return self._split_heads(self._linear(query, weight, bias), 1)[0]

    def _project_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Project key and value; return views in the layout of `_project`."""
        bias = self._bias()
        bias = bias if bias is None else _of_keys(bias)
        weights: tuple[Tensor, ...] = (self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weight = _of_keys(self._rows(self.in_proj_weight))
            if key is value:
                return self._split_heads(self._linear(key, weight, bias), 2)
            weights = weight.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        projected = zip((key, value), weights, biases, strict=True)
        return tuple(self._split_heads(self._linear(x, w, b), 1)[0] for x, w, b in projected)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Project x for the heads of this rank, which are all heads without `head_mesh`."""
        if self.head_mesh is None:
            return F.linear(x, weight, bias)
        return F.linear(heads().shared_input(x, self.head_mesh), heads().local(weight), bias)

    def _bias(self) -> Any:
        """Return in_proj_bias for the heads of this rank."""
        bias = self.in_proj_bias
        if bias is None or self.head_mesh is None:
            return bias
        return heads().packed_rows(bias, self.head_mesh)

    def _rows(self, parameter: Any) -> Any:
        """Return the rows of a parameter that belong to the heads of this rank."""
        return parameter if self.head_mesh is None else heads().local(parameter)

    def _split_heads(self, packed: Tensor, count: int) -> tuple[Tensor, ...]:
        """Split (..., count * embed_dim) into count (batch, num_heads, seqlen, head_dim) views."""
        head_dim = self.embed_dim // self.num_heads
        parts = packed.unflatten(-1, (count, -1, head_dim)).unbind(-3)
        if packed.dim() == 2:
            return tuple(part.transpose(0, 1).unsqueeze(0) for part in parts)
        if self.batch_first:
            return tuple(part.transpose(1, 2) for part in parts)
        return tuple(part.permute(1, 2, 0, 3) for part in parts)

    def _merge_heads(self, out: Tensor, batched: bool) -> Tensor:
        """Reshape (batch, num_heads, seqlen, head_dim) to the layout of the query."""
        if not batched:
            return out.squeeze(0).transpose(0, 1).flatten(1)
        if self.batch_first:
            return out.transpose(1, 2).flatten(2)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _prepend_keys(
        self, k: Tensor, v: Tensor, terms: list[Tensor | Mask], is_causal: bool, extra: int
    ) -> tuple[Tensor, Tensor, list[Tensor | Mask], bool]:
        """Prepend the keys of add_bias_kv and add_zero_attn, which are visible to every query.

        torch appends these keys. Prepended keys precede the diagonal, so a causal mask remains a
        band. That band is one of the returned masks, so the returned is_causal is False.
        """
        if any(isinstance(term, Mask) for term in terms):
            raise ValueError(
                "attn_mask must be a tensor in a module with add_bias_kv or add_zero_attn, "
                "got a Mask, which does not cover the appended keys"
            )
        batch, num_heads, _, head_dim = k.shape
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 1, 0)), F.pad(v, (0, 0, 1, 0))
        if self.bias_k is not None and self.bias_v is not None:
            # Under autocast, the dtype of k and v differs from that of the parameters.
            bias_k, bias_v = (
                self._rows(bias)
                .view(1, num_heads, 1, head_dim)
                .expand(batch, -1, -1, -1)
                .to(k.dtype)
                for bias in (self.bias_k, self.bias_v)
            )
            k, v = torch.cat([bias_k, k], dim=2), torch.cat([bias_v, v], dim=2)
        padded: list[Tensor | Mask] = [
            F.pad(term, (extra, 0), value=True if term.dtype == torch.bool else 0.0)
            for term in cast(list[Tensor], terms)
        ]
        if is_causal:
            padded.append(masks.sliding_window(-1, extra))
        return k, v, padded, False


def _of_keys(packed: Tensor) -> Tensor:
    """Return the key and value rows of a packed weight or bias."""
    return packed[packed.shape[0] // 3 :]


def on_heads_of(
    module: Any, attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> Any:
    """Call attend(q, k, v, *args), on the heads of this rank if HeadwiseParallel split them."""
    # getattr takes 3 us for a missing attribute of a module. `module` may also be None.
    mesh = getattr(module, "__dict__", {}).get("head_mesh")
    if mesh is None:
        return attend(q, k, v, *args)
    return heads().on_heads(attend, mesh, q, k, v, *args)
