"""MultiheadAttention on the fused kernels."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn import functional, masks
from fused_attn.mask_spec import materialize, normalize
from fused_attn.masks import Mask
from fused_attn.nn._from_torch import FromTorch, replaces
from fused_attn.nn.caches import KeyValueCache
from fused_attn.nn.packing import Packing


@replaces(torch.nn.MultiheadAttention)
class MultiheadAttention(FromTorch, torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` (Vaswani et al. 2017, section 3.2.2) on the fused kernels.

    Arguments, parameters and state_dict keys are those of torch.nn.MultiheadAttention. A key
    padding mask stays a key mask and a causal mask stays a structure: neither becomes a
    (batch * num_heads, L, S) tensor. Queries that may see no key give the bias of out_proj and
    zero gradients, never NaN.
    """

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
        """Attend from query to key and value.

        Args:
            query: (L, N, embed_dim), (N, L, embed_dim) with batch_first, or (L, embed_dim).
            key: (S, N, kdim), (N, S, kdim) with batch_first, or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) with batch_first, or (S, vdim).
            key_padding_mask: (N, S), or (S,) for unbatched input: bool (True = ignore the key) or
                float (added to the scores).
            need_weights: also return the attention weights. That is O(L * S) memory; the output
                is the fused one either way.
            attn_mask: (L, S) or (N * num_heads, L, S): bool (True = ignore) or float (added to
                the scores), or a `fused_attn.masks.Mask`, which says what is visible.
            average_attn_weights: average the returned weights over the heads.
            is_causal: attend causally. A tensor given as attn_mask is then taken to be the causal
                mask and is not read, as torch documents; unlike torch, it may also be left out,
                and a Mask is combined with it.

        Returns:
            The output, shaped as query, and the weights before dropout, (N, L, S) or (N,
            num_heads, L, S), without N for unbatched input; None if need_weights is False.

        Raises:
            ValueError, TypeError: an argument is wrong; the message has expected and got.
        """
        self._check_inputs(query, key, value)
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value)
        batch, _, seqlen_q, _ = q.shape
        terms, is_causal = mask_terms(
            attn_mask, key_padding_mask, is_causal, batch, self.num_heads, seqlen_q, k.shape[2]
        )
        k, v, terms, is_causal = self._append_keys(k, v, terms, is_causal, seqlen_q)
        mask = combine(terms)
        dropout_p = self.dropout if self.training else 0.0
        out = functional.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal)
        output = self.out_proj(self._merge_heads(cast(Tensor, out), batched))
        if not need_weights:
            return output, None
        weights = attention_weights(q, k, mask, is_causal)
        weights = weights.mean(dim=1) if average_attn_weights else weights
        return output, weights if batched else weights.squeeze(0)

    def forward_packed(self, x: Tensor, packing: Packing) -> Tensor:
        """Self-attention within each sequence of a packed batch.

        Args:
            x: (1, total, embed_dim), as `Packing.pack` gives it.
        """
        projected = F.linear(x[0], self.in_proj_weight, self.in_proj_bias)
        q, k, v = projected.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        out = functional.varlen_attention(
            q, k, v, packing.cu_seqlens, packing.cu_seqlens, packing.max_seqlen,
            packing.max_seqlen, packing.mask, self.dropout if self.training else 0.0,
        )  # fmt: skip
        return self.out_proj(cast(Tensor, out).flatten(1))[None]

    def forward_cached(
        self, x: Tensor, cache: KeyValueCache, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Causal self-attention of new positions, which are appended to the cache.

        Args:
            x: (T, N, embed_dim), or (N, T, embed_dim) with batch_first.
            key_padding_mask: (N, positions so far and T), see `forward`.
        """
        q, k, v = self._project(x, x, x)
        k, v = cache.append(k, v)
        terms, _ = mask_terms(
            None, key_padding_mask, False, q.shape[0], self.num_heads, q.shape[2], k.shape[2]
        )
        if q.shape[2] > 1:
            terms.append(masks.causal(align="bottom_right"))
        out = functional.scaled_dot_product_attention(
            q, k, v, combine(terms), self.dropout if self.training else 0.0
        )
        return self.out_proj(self._merge_heads(cast(Tensor, out), True))

    def forward_projected(
        self, x: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Attention to keys and values that were projected before, by `project_memory`.

        Args:
            x: (T, N, embed_dim), or (N, T, embed_dim) with batch_first.
            key, value: (M, num_heads, S, head_dim), where N is a multiple of M: so many sequences,
                next to each other, share one memory, and are one sequence of queries to it.
            key_padding_mask: (M, S), see `forward`.
        """
        q = self._project_query(x)
        memories, sharing = key.shape[0], q.shape[0] // max(key.shape[0], 1)
        q = q.unflatten(0, (memories, sharing)).transpose(1, 2).flatten(2, 3)
        seqlens = q.shape[2], key.shape[2]
        terms, _ = mask_terms(None, key_padding_mask, False, memories, self.num_heads, *seqlens)
        out = functional.scaled_dot_product_attention(
            q, key, value, combine(terms), self.dropout if self.training else 0.0
        )
        out = cast(Tensor, out).unflatten(2, (sharing, -1)).transpose(1, 2).flatten(0, 1)
        return self.out_proj(self._merge_heads(out, True))

    def project_memory(self, memory: Tensor) -> tuple[Tensor, ...]:
        """Keys and values of a memory, (N, num_heads, S, head_dim) each."""
        return self._project_keys(memory, memory)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(
                "query, key and value must not be nested tensors: pad them and pass "
                "key_padding_mask, which costs no time for padded keys"
            )
        if query.dim() not in (2, 3):
            raise ValueError(
                f"query must have 3 dimensions (2 if unbatched), got {tuple(query.shape)}"
            )
        for name, tensor, width in (
            ("query", query, self.embed_dim),
            ("key", key, self.kdim),
            ("value", value, self.vdim),
        ):
            if tensor.dim() != query.dim():
                raise ValueError(
                    f"{name} must have {query.dim()} dimensions (as query), "
                    f"got {tuple(tensor.shape)}"
                )
            if tensor.shape[-1] != width:
                raise ValueError(f"{name} must have {width} features, got {tuple(tensor.shape)}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(
                f"value must have batch and length of key {tuple(key.shape[:-1])}, "
                f"got {tuple(value.shape[:-1])}"
            )
        batch_dim = 0 if self.batch_first else 1
        if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
            raise ValueError(
                f"key must have batch size {query.shape[batch_dim]} (as query), "
                f"got {key.shape[batch_dim]}"
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """query, key and value as (batch, num_heads, seqlen, head_dim) views of the projections."""
        bias = self.in_proj_bias
        if self._qkv_same_embed_dim and query is key is value:
            return self._split_heads(F.linear(query, self.in_proj_weight, bias), 3)
        return self._project_query(query), *self._project_keys(key, value)

    def _project_query(self, query: Tensor) -> Tensor:
        packed = self._qkv_same_embed_dim
        weight = self.in_proj_weight[: self.embed_dim] if packed else self.q_proj_weight
        bias = None if self.in_proj_bias is None else self.in_proj_bias[: self.embed_dim]
        return self._split_heads(F.linear(query, weight, bias), 1)[0]

    def _project_keys(self, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """key and value as `_project` has them."""
        bias = None if self.in_proj_bias is None else self.in_proj_bias[self.embed_dim :]
        weights: tuple[Tensor, ...] = (self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weight = self.in_proj_weight[self.embed_dim :]
            if key is value:
                return self._split_heads(F.linear(key, weight, bias), 2)
            weights = weight.chunk(2)
        biases = (None, None) if bias is None else bias.chunk(2)
        projected = zip((key, value), weights, biases, strict=True)
        return tuple(self._split_heads(F.linear(x, w, b), 1)[0] for x, w, b in projected)

    def _split_heads(self, packed: Tensor, count: int) -> tuple[Tensor, ...]:
        """(..., count * embed_dim) -> count views (batch, num_heads, seqlen, head_dim)."""
        head_dim = self.embed_dim // self.num_heads
        parts = packed.unflatten(-1, (count, self.num_heads, head_dim)).unbind(-3)
        if packed.dim() == 2:
            return tuple(part.transpose(0, 1).unsqueeze(0) for part in parts)
        if self.batch_first:
            return tuple(part.transpose(1, 2) for part in parts)
        return tuple(part.permute(1, 2, 0, 3) for part in parts)

    def _merge_heads(self, out: Tensor, batched: bool) -> Tensor:
        """(batch, num_heads, seqlen, head_dim) -> the layout of the query."""
        if not batched:
            return out.squeeze(0).transpose(0, 1).flatten(1)
        if self.batch_first:
            return out.transpose(1, 2).flatten(2)
        return out.permute(2, 0, 1, 3).flatten(2)

    def _append_keys(
        self, k: Tensor, v: Tensor, terms: list[Tensor | Mask], is_causal: bool, seqlen_q: int
    ) -> tuple[Tensor, Tensor, list[Tensor | Mask], bool]:
        """Append the keys of add_bias_kv and add_zero_attn, which every query sees."""
        batch, num_heads, seqlen_k, head_dim = k.shape
        if self.bias_k is not None and self.bias_v is not None:
            # Under autocast k and v are of another type than the parameters.
            bias_k, bias_v = (
                bias.view(1, num_heads, 1, head_dim).expand(batch, -1, -1, -1).to(k.dtype)
                for bias in (self.bias_k, self.bias_v)
            )
            k, v = torch.cat([k, bias_k], dim=2), torch.cat([v, bias_v], dim=2)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        extra = k.shape[2] - seqlen_k
        if extra == 0:
            return k, v, terms, is_causal
        if any(isinstance(term, Mask) for term in terms):
            raise ValueError(
                "attn_mask must be a tensor in a module with add_bias_kv or add_zero_attn, "
                "got a Mask: it does not say that the appended keys are visible"
            )
        if is_causal:
            causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=k.device).tril()
            terms = [*terms, causal]
        padded = [
            F.pad(term, (0, extra), value=True if term.dtype == torch.bool else 0.0)
            for term in cast(list[Tensor], terms)
        ]
        return k, v, cast(list[Tensor | Mask], padded), False


def mask_terms(
    attn_mask: Tensor | Mask | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> tuple[list[Tensor | Mask], bool]:
    """The masks of a torch.nn module in terms of fused_attn: visible where True, not ignored.

    Returns:
        Tensors (bool = visible, or float) that broadcast to (batch, num_heads, seqlen_q,
        seqlen_k), or Masks, of which all apply; and whether attention is causal besides.
    """
    terms: list[Tensor | Mask] = []
    if key_padding_mask is not None:
        _check_mask_type("key_padding_mask", key_padding_mask)
        expected = (batch, seqlen_k)
        shape = tuple(key_padding_mask.shape)
        if shape != expected and not (batch == 1 and shape == (seqlen_k,)):
            raise ValueError(f"key_padding_mask must have shape (N, S) = {expected}, got {shape}")
        terms.append(_visible(key_padding_mask).reshape(batch, 1, 1, seqlen_k))
    if isinstance(attn_mask, Mask):
        terms.append(attn_mask)
    elif attn_mask is not None:
        _check_mask_type("attn_mask", attn_mask)
        if attn_mask.shape not in (
            (seqlen_q, seqlen_k),
            (batch * num_heads, seqlen_q, seqlen_k),
        ):
            raise ValueError(
                f"attn_mask must have shape (L, S) = {(seqlen_q, seqlen_k)} or (N * num_heads, L, "
                f"S) = {(batch * num_heads, seqlen_q, seqlen_k)}, got {tuple(attn_mask.shape)}"
            )
        # A mask that is learned is not merely the causal one, whatever the hint says.
        if not is_causal or attn_mask.requires_grad:
            term = _visible(attn_mask)
            terms.append(term if term.dim() == 2 else term.unflatten(0, (batch, num_heads)))
            is_causal = False
    return terms, is_causal


def combine(terms: list[Tensor | Mask]) -> Tensor | Mask | None:
    """One mask for the fused function."""
    if len(terms) < 2:
        return terms[0] if terms else None
    combined = as_mask(terms[0])
    for term in terms[1:]:
        combined = combined & as_mask(term)
    return combined


def as_mask(term: Tensor | Mask) -> Mask:
    """A term of `mask_terms` as a Mask."""
    return cast(Mask, masks.as_mask(term))


def attention_weights(
    query: Tensor, key: Tensor, mask: Tensor | Mask | None, is_causal: bool
) -> Tensor:
    """softmax(scores) as a tensor; rows with no visible key are 0.

    Plain torch, so it is differentiable in query, key and a float mask. It does not start from the
    lse of the fused function: exp(score - lse) would be less accurate by a factor of |lse|.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim).
        key: (batch, num_heads, seqlen_k, head_dim).
        mask, is_causal: as in `scaled_dot_product_attention`.

    Returns:
        (batch, num_heads, seqlen_q, seqlen_k) in the type of query.
    """
    batch, num_heads, seqlen_q, head_dim = query.shape
    shape = (batch, num_heads, seqlen_q, key.shape[2])
    spec = normalize(masks.as_mask(mask, is_causal), *shape, query)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    visible, bias = materialize(spec, *shape, query.device, dtype)
    # Autocast would round the scores to half precision.
    with torch.autocast(query.device.type, enabled=False):
        q, k = query.to(dtype) / math.sqrt(head_dim), key.to(dtype)
        if visible is not None:
            # 0 * NaN is NaN: what stands in keys that no query may see must not matter.
            k = k.masked_fill(~visible.any(2)[..., None], 0.0)
        scores = q @ k.transpose(-2, -1)
        if bias is not None:
            scores = scores + bias
        if visible is None:
            return scores.softmax(-1).to(query.dtype)
        empty = ~visible.any(-1, keepdim=True)
        scores = scores.masked_fill(~visible, float("-inf")).masked_fill(empty, 0.0)
        return scores.softmax(-1).masked_fill(empty, 0.0).to(query.dtype)


def _visible(mask: Tensor) -> Tensor:
    """torch.nn's bool masks say what to ignore; float masks are added in both conventions."""
    return ~mask if mask.dtype == torch.bool else mask


def _check_mask_type(name: str, mask: Tensor) -> None:
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} must be a bool or float tensor, got {got}")
