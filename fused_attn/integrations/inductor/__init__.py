"""`compile_pass()`: fuse attention that models write out by hand, under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fused_attn.integrations.inductor.attention_pass import AttentionPass


def compile_pass() -> AttentionPass:
    """Return a pass for torch.compile that fuses attention written out by hand in a model.

    It replaces the following sequence by one call of `scaled_dot_product_attention`, forward and
    backward: query @ key^T, steps that scale, bias or mask the scores, a softmax, dropout, and the
    product with the values. Masks and biases remain tensors, and biases keep their gradients.
    Products may be @, matmul, bmm, baddbmm or einsum. Steps may be in place, and the scores may be
    reshaped in between. Attention is not fused if anything else reads the scores or the weights.

    Results match the model without the pass to rounding, with two exceptions: rows fully masked by
    -inf are 0, where the model gives NaN, and dropout drops different weights.

    Returns:
        The pass. Printing it shows each softmax found and why any of them was not fused.

    Example:
        >>> def attend(query, key, value):
        ...     return (query @ key.transpose(-2, -1) / 8).softmax(-1) @ value
        >>> attention = fused_attn.compile_pass()
        >>> compiled = torch.compile(attend, options=attention.options)
        >>> out = compiled(*torch.randn(3, 2, 4, 128, 64))
        >>> attention.fused
        1
    """
    from fused_attn.integrations.inductor.attention_pass import AttentionPass  # imports Inductor

    return AttentionPass()
