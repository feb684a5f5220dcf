"""`compile_pass()` fuses hand-written attention in models under torch.compile."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fused_attn.integrations.inductor.attention_pass import AttentionPass


def compile_pass() -> AttentionPass:
    """Return a pass for torch.compile that fuses hand-written attention in a model.

    The pass replaces the following sequence by one call of `scaled_dot_product_attention`, in
    forward and backward: query @ key^T, operations that scale, bias or mask the scores, a softmax,
    dropout, and weights @ value. Masks and biases remain tensors, and biases get gradients. A
    matmul may be @, matmul, bmm, baddbmm or einsum. Operations may be in place, and the scores may
    be reshaped between them. Attention is not fused if other code reads the scores or the weights.

    Results match those without the pass up to rounding, with three exceptions. Rows fully masked by
    -inf are 0 instead of NaN; rows fully masked partly by a fill, such as -1e4, and partly by an
    added mask (as in causal masks of left-padded queries) have different weights; dropout drops
    different weights.

    Returns:
        The pass. Its repr lists each softmax found, with the reason if it was not fused.

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
