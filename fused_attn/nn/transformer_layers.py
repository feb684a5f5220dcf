"""Transformer encoder and decoder layers on the fused kernels.

Each sublayer is attention or feed-forward, followed by dropout, residual addition and norm. A
single kernel fuses dropout, residual addition and norm. torch's inference fast path would bypass
the fused kernels, so it is used only if the default backend wraps torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_attn.masks import Mask
from fused_attn.nn._nested import on_padded
from fused_attn.nn.activation import drop, feed_forward_hidden
from fused_attn.nn.caches import KeyValueCache
from fused_attn.nn.norm import residual_norm
from fused_attn.nn.packing import Packing
from fused_attn.nn.replacement import FromTorch, fx_leaf, replaces, torch_infers


class _Layer(FromTorch):
    """Base class of the encoder and decoder layers."""

    self_attn: Any  # MultiheadAttention, or a user's replacement
    linear1: torch.nn.Linear
    linear2: torch.nn.Linear
    dropout: torch.nn.Dropout
    activation: Callable[[Tensor], Tensor]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("_sa_block", "_mha_block", "_ff_block"):
            if name in cls.__dict__:
                raise TypeError(
                    f"{cls.__name__} must not override {name}, which is never called, because "
                    "dropout and the residual sum are fused into the norm: override _self_attend, "
                    "_cross_attend or _feed_forward, which return the output before dropout"
                )

    def _self_attend(
        self,
        x: Tensor,
        attn_mask: Tensor | Mask | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return self.self_attn(
            x,
            x,
            x,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            need_weights=False,
            is_causal=is_causal,
        )[0]

    def _feed_forward(self, x: Tensor) -> Tensor:
        hidden = feed_forward_hidden(self.linear1, self.activation, self.dropout, x)
        return self.linear2(hidden)


@replaces(torch.nn.TransformerEncoderLayer)
class TransformerEncoderLayer(_Layer, torch.nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` on the fused kernels: self-attention and feed-forward.

    Arguments, parameters and state_dict keys are those of torch.nn.TransformerEncoderLayer.

    Args:
        d_model: number of features of input and output.
        nhead: number of attention heads; must divide d_model.
        dim_feedforward: number of features between the two linear layers.
        dropout: dropout probability of attention weights, activations and sublayer outputs in
            training.
        activation: "relu", "gelu", or a function from tensor to tensor.
        layer_norm_eps: eps of the norms.
        batch_first: batches have shape (N, S, d_model) instead of (S, N, d_model).
        norm_first: apply norms before the sublayers (pre-norm) instead of after the residual
            additions (post-norm).
        bias: add biases to the linear layers and norms.
        device, dtype: device and dtype of the parameters.

    Example:
        >>> layer = fused_attn.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> layer(torch.randn(2, 10, 64), is_causal=True).shape
        torch.Size([2, 10, 64])

    Source: Vaswani et al. 2017, section 3.1; norm_first: Xiong et al. 2020, figure 1.
    """

    @fx_leaf
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | Mask | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Pass src through the layer.

        Args:
            src: (S, N, d_model), (N, S, d_model) with batch_first, or (S, d_model).
            src_mask, src_key_padding_mask, is_causal: see `MultiheadAttention.forward`.

        Returns:
            The output, with the shape of src.
        """
        unmasked = src_mask is None and src_key_padding_mask is None and not is_causal
        # Calls with a mask never use torch's path, which returns NaN for fully masked rows.
        if unmasked and type(self) is TransformerEncoderLayer and torch_infers(self, src):
            return super().forward(src)
        if src.is_nested:  # torch's encoder passes such tensors in inference
            if src_key_padding_mask is not None:
                raise ValueError("src_key_padding_mask must be None if src is a nested tensor")
            return on_padded(lambda x, ignored: self.forward(x, src_mask, ignored, is_causal), src)
        masks = (src_mask, src_key_padding_mask, is_causal)
        return self._sublayers(src, lambda x: self._self_attend(x, *masks))

    def forward_packed(self, src: Tensor, packing: Packing) -> Tensor:
        """Run the layer on a packed batch, which contains only real tokens.

        Args:
            src: (1, total, d_model), from `Packing.pack`.
            packing: the sequence boundaries and the mask of the batch.

        Returns:
            The output, (1, total, d_model).
        """
        return self._sublayers(src, lambda x: self.self_attn.forward_packed(x, packing))

    def _sublayers(self, src: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            attended = attend(self.norm1(src))
            normed, x = residual_norm(
                self.norm2, self.dropout1, attended, src, return_residual=True
            )
            return x + drop(self.dropout2, self._feed_forward(normed))
        x = residual_norm(self.norm1, self.dropout1, attend(src), src)
        return residual_norm(self.norm2, self.dropout2, self._feed_forward(x), x)


@replaces(torch.nn.TransformerDecoderLayer)
class TransformerDecoderLayer(_Layer, torch.nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` on the fused kernels.

    Arguments, parameters and state_dict keys are those of torch.nn.TransformerDecoderLayer.

    Args:
        d_model: number of features of input, memory and output.
        nhead, dim_feedforward, dropout, activation: as in `TransformerEncoderLayer`.
        layer_norm_eps, norm_first, bias, device, dtype: as in `TransformerEncoderLayer`.
        batch_first: batches have shape (N, T, d_model) instead of (T, N, d_model).

    Example:
        >>> layer = fused_attn.nn.TransformerDecoderLayer(64, 4, batch_first=True)
        >>> layer(torch.randn(2, 7, 64), memory=torch.randn(2, 10, 64), tgt_is_causal=True).shape
        torch.Size([2, 7, 64])

    Source: Vaswani et al. 2017, section 3.1; norm_first: Xiong et al. 2020, figure 1.
    """

    multihead_attn: Any

    @fx_leaf
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | Mask | None = None,
        memory_mask: Tensor | Mask | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Pass tgt through the layer.

        Args:
            tgt: (T, N, d_model), (N, T, d_model) with batch_first, or (T, d_model).
            memory: (S, N, d_model), (N, S, d_model) with batch_first, or (S, d_model).
            tgt_mask, tgt_key_padding_mask, tgt_is_causal: masks of the self-attention; see
                `MultiheadAttention.forward`.
            memory_mask, memory_key_padding_mask, memory_is_causal: masks of the cross-attention.

        Returns:
            The output, with the shape of tgt.
        """
        self_args = (tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        cross_args = (memory, memory_mask, memory_key_padding_mask, memory_is_causal)
        return self._sublayers(
            tgt,
            lambda x: self._self_attend(x, *self_args),
            lambda x: self._cross_attend(x, *cross_args),
        )

    def _sublayers(
        self,
        tgt: Tensor,
        attend: Callable[[Tensor], Tensor],
        attend_memory: Callable[[Tensor], Tensor],
    ) -> Tensor:
        if self.norm_first:
            attended = attend(self.norm1(tgt))
            normed, x = residual_norm(
                self.norm2, self.dropout1, attended, tgt, return_residual=True
            )
            attended = attend_memory(normed)
            normed, x = residual_norm(self.norm3, self.dropout2, attended, x, return_residual=True)
            return x + drop(self.dropout3, self._feed_forward(normed))
        x = residual_norm(self.norm1, self.dropout1, attend(tgt), tgt)
        x = residual_norm(self.norm2, self.dropout2, attend_memory(x), x)
        return residual_norm(self.norm3, self.dropout3, self._feed_forward(x), x)

    def forward_cached(
        self,
        tgt: Tensor,
        own: KeyValueCache,
        memory: tuple[Tensor, ...],
        tgt_key_padding_mask: Tensor | None,
        memory_key_padding_mask: Tensor | None,
    ) -> Tensor:
        """Run the layer on new positions with causal self-attention.

        The arguments are those of `TransformerDecoder.step`, with the entries of its `DecoderCache`
        for this layer. The new positions are appended to `own`.
        """
        return self._sublayers(
            tgt,
            lambda x: self.self_attn.forward_cached(x, own, tgt_key_padding_mask),
            lambda x: self.multihead_attn.forward_projected(x, *memory, memory_key_padding_mask),
        )

    def _cross_attend(
        self,
        x: Tensor,
        memory: Tensor,
        attn_mask: Tensor | Mask | None,
        key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        return self.multihead_attn(
            x,
            memory,
            memory,
            attn_mask=attn_mask,
            key_padding_mask=key_padding_mask,
            need_weights=False,
            is_causal=is_causal,
        )[0]
