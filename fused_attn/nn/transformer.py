"""Transformer stacks that share masks across layers and pack padded batches."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, ModuleList

from fused_attn import masks
from fused_attn.base.torch_state import is_compiling, plain_eager
from fused_attn.masks import Mask
from fused_attn.masks.recognize import is_causal_mask
from fused_attn.nn.attention import MultiheadAttention
from fused_attn.nn.caches import DecoderCache, KeyValueCache, check_no_grad
from fused_attn.nn.mask_terms import combine, mask_terms
from fused_attn.nn.packing import Packing, can_pack, is_unmodified, outside_graphs, packing_of
from fused_attn.nn.replacement import FromTorch, fx_leaf, is_plain, replaces, torch_infers
from fused_attn.nn.transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer


class _NoNestedTensorWarning(FromTorch):
    """Base class that suppresses torch's constructor warning about unused nested tensors.

    The warning does not apply, because these stacks pack padded batches instead.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "enable_nested_tensor is True", UserWarning)
            super().__init__(*args, **kwargs)


@replaces(torch.nn.TransformerEncoder)
class TransformerEncoder(_NoNestedTensorWarning, torch.nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder`: a stack of encoder layers that share one mask.

    Arguments, parameters and state_dict keys are those of torch.nn.TransformerEncoder. A batch
    with a bool src_key_padding_mask is packed if it has enough padding. Layers, norms and dropout
    then process only its real tokens, in training and in inference. Packing requires unmodified
    layers of this package without hooks, because hooks would observe packed shapes. Packing is
    opt-in under torch.compile; see docs/models.md.

    Args:
        encoder_layer: layer that is copied num_layers times. A torch.nn.TransformerEncoderLayer is
            converted. Other layers are supported, but never packed.
        num_layers: number of layers.
        norm: module to apply after the last layer, or None.
        enable_nested_tensor: if False, packing is disabled and padded rows match those of torch.
        mask_check: as in torch. It matters only if torch's inference path runs or is reproduced.

    Example:
        >>> layer = fused_attn.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> encoder = fused_attn.nn.TransformerEncoder(layer, num_layers=2)
        >>> padding = torch.arange(10) >= torch.tensor([[10], [4]])
        >>> encoder(torch.randn(2, 10, 64), src_key_padding_mask=padding).shape
        torch.Size([2, 10, 64])
    """

    @fx_leaf
    def forward(
        self,
        src: Tensor,
        mask: Tensor | Mask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Pass src through the layers in turn.

        The first path that applies is used:

        1. torch's inference fast path, if the only mask is a bool padding mask and the default
           backend wraps torch's kernels;
        2. the batch is packed, to remove its padding;
        3. the padding is set to 0 before the norm, where torch would use a nested tensor;
        4. the padding remains as it is.

        Args:
            src: (S, N, d_model), (N, S, d_model) with batch_first, or (S, d_model).
            mask, src_key_padding_mask: see `MultiheadAttention.forward`.
            is_causal: see `MultiheadAttention.forward`. If None, a causal mask is detected, unless
                detection needs a device synchronization.

        Returns:
            The output, with the shape of src. Rows ignored by a bool src_key_padding_mask are 0,
            packed or not, unless enable_nested_tensor is False. In torch, these rows are 0 only on
            the inference path, so code that reads them may get different values.
        """
        ignored = src_key_padding_mask
        by_torch = mask is None and not is_causal and torch_infers(self, src)
        if by_torch and ignored is not None and ignored.dtype == torch.bool:
            # torch skips the padding with nested tensors.
            return self._without_ignored(super().forward(src, None, ignored), ignored)
        causal = is_causal_mask(mask, is_causal)
        packing = None
        if self.enable_nested_tensor and ignored is not None:
            packing = outside_graphs(self._choose_packing, src, mask, ignored, causal)
        if packing is not None:
            packed = packing.pack(src)
            for layer in self.layers:
                packed = layer.forward_packed(packed, packing)
            packed = packed if self.norm is None else self.norm(packed)
            return packing.unpack(packed, src.shape)
        torch_zeroes = self._torch_zeroes_padding(src, mask, ignored)
        mask, src_key_padding_mask, causal = _share_masks(
            self.layers, "self_attn", mask, src_key_padding_mask, causal, src, src
        )
        output = src
        for layer in self.layers:
            output = layer(
                output,
                src_mask=mask,
                is_causal=causal,
                src_key_padding_mask=src_key_padding_mask,
            )
        if torch_zeroes and ignored is not None:
            output = output.masked_fill(ignored[..., None].bool(), 0.0)
        output = output if self.norm is None else self.norm(output)
        return self._without_ignored(output, ignored)

    def _without_ignored(self, output: Tensor, ignored: Tensor | None) -> Tensor:
        """Return the output with 0 in rows that a bool mask ignores, if packing is enabled."""
        if ignored is None or ignored.dtype != torch.bool or not self.enable_nested_tensor:
            return output
        if output.dim() == 2:
            rows = ignored.reshape(-1)
        else:
            rows = ignored if ignored.dim() == 2 else ignored[None]
            rows = rows if self.layers[0].self_attn.batch_first else rows.transpose(0, 1)
        return output.masked_fill(rows[..., None], 0.0)

    def _torch_zeroes_padding(self, src: Tensor, mask: object, ignored: Tensor | None) -> bool:
        """Return True if torch would use nested tensors, which it pads with 0 before the norm.

        With enable_nested_tensor=False, padded rows must match those of torch. The conditions are
        those under which torch.nn.TransformerEncoder.forward creates a nested tensor.
        """
        if self.enable_nested_tensor or not getattr(self, "use_nested_tensor", False):
            return False
        if mask is not None or ignored is None:
            return False
        tensors = (src, *self.layers[0].parameters())
        infers = (
            torch.backends.mha.get_fastpath_enabled()
            and not self.layers[0].training
            and not torch.is_autocast_enabled()
            and not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
            and plain_eager(*tensors)
            and not src.is_meta
            and src.dim() == 3
            and src.shape[:2] == ignored.shape
        )
        if not infers or not getattr(self, "mask_check", True):
            return infers
        return torch._nested_tensor_from_mask_left_aligned(src, ignored.logical_not())

    def _choose_packing(
        self, src: Tensor, mask: Tensor | Mask | None, ignored: Tensor, is_causal: bool
    ) -> Packing | None:
        """Return the packing of src, or None to keep src padded; arguments as in `forward`."""
        if not all(_takes_masks(layer, "self_attn") for layer in self.layers):
            return None
        if not can_pack(src, ignored, mask, self.layers, self.norm):
            return None
        attention = self.layers[0].self_attn
        # mask_terms validates `ignored`: a transposed mask would pack the wrong tokens.
        batch, seqlen = src.shape[:2] if attention.batch_first else src.shape[1::-1]
        terms, is_causal = mask_terms(
            mask, ignored, is_causal, batch, attention.num_heads, seqlen, seqlen
        )
        within = terms[1] if len(terms) > 1 else None
        return packing_of(ignored, within, is_causal, attention.batch_first)


@replaces(torch.nn.TransformerDecoder)
class TransformerDecoder(FromTorch, torch.nn.TransformerDecoder):
    """`torch.nn.TransformerDecoder`: a stack of decoder layers that share their masks.

    Arguments, parameters and state_dict keys are those of torch.nn.TransformerDecoder.

    Args:
        decoder_layer: layer that is copied num_layers times. A torch.nn.TransformerDecoderLayer is
            converted. Other layers are supported, except by `prepare` and `step`.
        num_layers: number of layers.
        norm: module to apply after the last layer, or None.

    Example:
        >>> layer = fused_attn.nn.TransformerDecoderLayer(64, 4, batch_first=True)
        >>> decoder = fused_attn.nn.TransformerDecoder(layer, num_layers=2)
        >>> target, memory = torch.randn(2, 7, 64), torch.randn(2, 10, 64)
        >>> decoder(target, memory, fused_attn.masks.causal()).shape
        torch.Size([2, 7, 64])
    """

    @fx_leaf
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Pass tgt through the layers in turn.

        Args:
            tgt: (T, N, d_model), (N, T, d_model) with batch_first, or (T, d_model).
            memory: (S, N, d_model), (N, S, d_model) with batch_first, or (S, d_model).
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask: see
                `TransformerDecoderLayer.forward`.
            tgt_is_causal: use causal self-attention. If None, a causal tgt_mask is detected, unless
                detection needs a device synchronization.
            memory_is_causal: use causal cross-attention; see `MultiheadAttention.forward`.

        Returns:
            The output, with the shape of tgt.
        """
        tgt_causal = is_causal_mask(tgt_mask, tgt_is_causal)
        tgt_mask, tgt_key_padding_mask, tgt_causal = _share_masks(
            self.layers, "self_attn", tgt_mask, tgt_key_padding_mask, tgt_causal, tgt, tgt
        )
        memory_mask, memory_key_padding_mask, memory_is_causal = _share_masks(
            self.layers,
            "multihead_attn",
            memory_mask,
            memory_key_padding_mask,
            memory_is_causal,
            tgt,
            memory,
        )
        output = tgt
        for layer in self.layers:
            output = layer(
                output,
                memory,
                tgt_mask=tgt_mask,
                memory_mask=memory_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
                memory_key_padding_mask=memory_key_padding_mask,
                tgt_is_causal=tgt_causal,
                memory_is_causal=memory_is_causal,
            )
        return output if self.norm is None else self.norm(output)

    @property
    def batch_first(self) -> bool:
        """True if batches have shape (N, T, d_model); read from the first layer."""
        return self.layers[0].self_attn.batch_first

    def prepare(
        self, memory: Tensor, memory_key_padding_mask: Tensor | None = None
    ) -> DecoderCache:
        """Project the keys and values of the memory and return a cache for `step`.

        Args:
            memory: (S, N, d_model), or (N, S, d_model) with batch_first.
            memory_key_padding_mask: (N, S); see `MultiheadAttention.forward`.

        Raises:
            TypeError: a layer is not from this package and so does not support caches, or it has
                hooks.
            ValueError: memory does not have 3 dimensions, or gradients would have to flow through
                the cache.
        """
        for layer in self.layers:
            if not (_takes_masks(layer, "self_attn") and _takes_masks(layer, "multihead_attn")):
                raise TypeError(
                    "each layer must be a fused_attn.nn.TransformerDecoderLayer whose attention "
                    "is fused_attn.nn.MultiheadAttention without add_bias_kv or add_zero_attn, got "
                    f"{type(layer).__module__}.{type(layer).__name__}"
                )
            if not all(is_unmodified(m) for m in (layer, layer.self_attn, layer.multihead_attn)):
                raise TypeError(
                    "layers and their attention must have no hooks and no overridden methods, "
                    "because decoding steps do not call them"
                )
        if memory.dim() != 3:
            raise ValueError(f"memory must have 3 dimensions, got shape {tuple(memory.shape)}")
        projected = [layer.multihead_attn.project_memory(memory) for layer in self.layers]
        for key, value in projected:
            check_no_grad(key, value)
        caches = [KeyValueCache() for _ in self.layers]
        return DecoderCache(caches, projected, memory_key_padding_mask)

    def step(
        self, tgt: Tensor, cache: DecoderCache, tgt_key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """Run the decoder on new positions; the results are those of a causal `forward`.

        Args:
            tgt: new positions, (T, N, d_model), or (N, T, d_model) with batch_first. N may be a
                multiple of the memory batch size; see `DecoderCache`.
            cache: cache from `prepare`, to which the new positions are appended. If a layer raises,
                they are discarded.
            tgt_key_padding_mask: (N, cached positions + T); see `MultiheadAttention.forward`.

        Returns:
            The output, with the shape of tgt.

        Example:
            >>> layer = fused_attn.nn.TransformerDecoderLayer(64, 4, batch_first=True)
            >>> decoder = fused_attn.nn.TransformerDecoder(layer, num_layers=2).eval()
            >>> memory, embedded = torch.randn(2, 10, 64), torch.randn(2, 7, 64)
            >>> with torch.no_grad():
            ...     cache = decoder.prepare(memory)
            ...     first = decoder.step(embedded[:, :1], cache)
            ...     second = decoder.step(embedded[:, 1:2], cache)
            >>> second.shape
            torch.Size([2, 1, 64])
        """
        batch_dim = 0 if self.batch_first else 1
        memories = cache.memory[0][0].shape[0]
        if tgt.dim() != 3 or tgt.shape[batch_dim] % max(memories, 1):
            raise ValueError(
                "tgt must have 3 dimensions and a batch size that is a multiple of the memory's "
                f"batch size ({memories}), got shape {tuple(tgt.shape)}"
            )
        output = tgt
        with cache.unchanged_on_errors():
            for layer, own, memory in zip(self.layers, cache.own, cache.memory, strict=True):
                output = layer.forward_cached(
                    output, own, memory, tgt_key_padding_mask, cache.memory_key_padding_mask
                )
        return output if self.norm is None else self.norm(output)


@replaces(torch.nn.Transformer)
class Transformer(_NoNestedTensorWarning, torch.nn.Transformer):
    """`torch.nn.Transformer` (Vaswani et al. 2017): encoder and decoder on the fused kernels.

    Arguments, parameters, state_dict keys and `forward` are those of torch.nn.Transformer, whose
    `forward` only calls `encoder` and `decoder`.

    Args:
        d_model, nhead, dim_feedforward, dropout, activation: as in `TransformerEncoderLayer`, for
            the layers of encoder and decoder.
        layer_norm_eps, batch_first, norm_first, bias, device, dtype: as in
            `TransformerEncoderLayer`.
        num_encoder_layers, num_decoder_layers: number of layers.
        custom_encoder, custom_decoder: modules to use in place of encoder and decoder.

    Example:
        >>> model = fused_attn.nn.Transformer(64, 4, 2, 2, 128, batch_first=True)
        >>> source, target = torch.randn(2, 10, 64), torch.randn(2, 7, 64)
        >>> model(source, target, tgt_is_causal=True).shape
        torch.Size([2, 7, 64])
    """

    forward = fx_leaf(torch.nn.Transformer.forward)


def _share_masks(
    layers: ModuleList,
    attention: str,
    mask: Tensor | Mask | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
    query: Tensor,
    key: Tensor,
) -> tuple[Tensor | Mask | None, Tensor | None, bool]:
    """Combine the masks into one Mask that caches derived data for the kernels of all layers.

    Returns the mask, key_padding_mask and is_causal arguments for each layer. They are unchanged
    for layers of other classes, which do not support Masks, and for layers with hooks, which may
    read them. They are also unchanged under torch.compile, which merges equal subexpressions.
    """
    if mask is None and key_padding_mask is None:
        return mask, key_padding_mask, is_causal
    if is_compiling() or not all(
        _takes_masks(layer, attention) and is_plain(layer) and is_plain(getattr(layer, attention))
        for layer in layers
    ):
        return mask, key_padding_mask, is_causal
    module = getattr(layers[0], attention)
    batch_dim, length_dim = (0, 1) if module.batch_first else (1, 0)
    batch = query.shape[batch_dim] if query.dim() == 3 else 1
    seqlens = (t.shape[length_dim] if t.dim() == 3 else t.shape[0] for t in (query, key))
    terms, is_causal = mask_terms(
        mask, key_padding_mask, is_causal, batch, module.num_heads, *seqlens
    )
    return masks.as_mask(combine(terms), is_causal), None, False


def _takes_masks(layer: Module, attention: str) -> bool:
    module = getattr(layer, attention, None)
    return (
        type(layer) in (TransformerEncoderLayer, TransformerDecoderLayer)
        and type(module) is MultiheadAttention
        and module.bias_k is None
        and not module.add_zero_attn
    )
