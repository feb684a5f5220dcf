"""`compile_pass()`: attention that models write out by hand, fused under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fused_attn.integrations.inductor.attention_pass import AttentionPass


def compile_pass() -> AttentionPass:
    """A pass for torch.compile that fuses attention which a model writes out by hand.

    A product of query and key, steps that scale it, add to it or hide parts of it, a softmax,
    dropout and a product with values become one call of `scaled_dot_product_attention`, forward and
    backward. Masks and biases stay the tensors that they are, and biases keep their gradients.
    Products may be @, matmul, bmm, baddbmm or einsum; steps in place or not; the scores may be
    reshaped on the way. What else reads the scores or the weights keeps them from being fused.

    Numbers are those of the model without the pass, to rounding, but for two cases: rows whose keys
    are all hidden by -inf are 0, where the model has NaN, and dropout drops other weights.

    Returns:
        The pass. Printing it shows each softmax that it met, and why it was left as it is.

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
