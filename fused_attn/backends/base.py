"""Base class of the backends: the passes, and the reasons to reject a problem."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor

from fused_attn.backends import weights_bwd
from fused_attn.backends.problem import Problem
from fused_attn.call.calls import (
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    NormCall,
    NormGradients,
    NormOutputs,
)

Extent = Literal["all", "some", "none"]

# In the order of enum Activation in csrc/params.h.
ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh")


class CacheUpdate(NamedTuple):
    """Rows that `decode_attention` appends to a cache, and their position in it.

    Attributes:
        key, value: (batch, num_heads_kv, seqlen_new, dim), or None.
        lengths: (batch,) integers, the number of rows already in the cache for each sequence.
        block_table: (batch, max_pages) integers, or None.
    """

    key: Tensor | None
    value: Tensor | None
    lengths: Tensor
    block_table: Tensor | None


class Backend:
    """Implementation of the ops; the registry holds one instance of each subclass.

    Callers pass validated calls in `kernel_layout()` to every attention pass except
    `attention_decode`, whose caches may have any strides.

    Attributes:
        name: the name that users select it by.
        differentiable: True if the passes are torch operations, which autograd, torch.compile and
            torch.func trace through. Otherwise they are kernels, with backward passes below.
        accepts_unchecked: True if `attention_fwd` and `norm_fwd` accept unvalidated calls, and
            return None for those that they refuse. Such calls are never intercepted.
        wraps_torch: True if torch's unmodified kernels compute everything, with torch's semantics.
            Dropout draws from torch's generator instead of a call's seed (Philox). NaN in keys and
            values that are masked for every query may reach results. Modules need not avoid
            torch's inference fast paths for this backend, or pack sequences.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    accepts_unchecked: ClassVar[bool] = False
    wraps_torch: ClassVar[bool] = False

    def unavailable(self) -> list[str]:
        """Return why this backend cannot run on this machine; empty if it can."""
        return []

    def unsupported(self, problem: Problem) -> list[str]:
        """Return why this backend does not support a problem; empty if it does."""
        return []

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        """Return why this backend is opt-in for a problem; empty if it can be the default."""
        return []

    def fallback_warning(self, device_type: str) -> str | None:
        """Return the warning to show once if this backend is the default; None for no warning."""
        return None

    def default_for(self, device_type: str) -> Extent:
        """Return for which problems on a device type this backend is the default."""
        return "none"

    def tile_summary(self, tensor: Tensor) -> Tensor | None:
        """Return a summary of each 32 x 64 tile of a dense mask or bias.

        It is uint8 (enum SummaryValue in csrc/params.h); None if the passes use no summaries.
        """
        return None

    def activation(
        self,
        input: Tensor,
        bias: Tensor | None,
        activation: str,
        dropout_p: float,
        seed: Tensor | None,
        grad_out: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Compute dropout(activation(input + bias)), or its gradient. Optional for backends.

        Args:
            input: (*, columns), contiguous, without lazy negation.
            bias: (columns,), in the dtype of input.
            activation: one of ACTIVATIONS.
            seed: int64 scalar for the dropout mask `base.philox.norm_keep`. None without dropout.
            grad_out: the gradient of the result. If given, return the gradient of input + bias;
                for "relu", input is then the result of the forward.
            out: the tensor to write to, which may be input. By default a new one, not a view.
        """
        raise NotImplementedError

    def attention_fwd(
        self, call: Any, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs | None:
        """Compute the outputs of an AttentionCall, or of an UncheckedAttention if the backend
        accepts those; return None to refuse the latter.

        With for_backward, out is computed as the backward recomputes it. Without for_backward and
        want_lse, a backend may round the weights differently.
        """
        raise NotImplementedError

    def attention_bwd(
        self,
        call: AttentionCall,
        outputs: AttentionOutputs,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs_bias: bool,
    ) -> AttentionGradients | None:
        """Compute the gradients for grad_out and grad_lse.

        A backend with accepts_unchecked may receive a call and outputs that are not in
        `kernel_layout()`. It returns None for those that it cannot read.
        """
        raise NotImplementedError

    def attention_with_weights(self, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
        """Compute out and its attention weights; called on differentiable backends only."""
        outputs = self.attention_fwd(call, True, True)
        assert outputs is not None
        out, lse, lse_residual, _ = outputs
        return out, self.attention_weights(call, lse, lse_residual, average)

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        """Compute the weights after dropout from the lse and lse_residual of `attention_fwd`.

        call.value is not read.
        """
        raise NotImplementedError

    def attention_weights_bwd(
        self,
        call: AttentionCall,
        lse: Tensor,
        lse_residual: Tensor,
        grad_weights: Tensor,
        average: bool,
        needs_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of `attention_weights`: query, key, bias (empty if not needed)."""
        return weights_bwd.attention_weights_bwd(
            call, lse, lse_residual, grad_weights, average, needs_bias
        )

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate
    ) -> tuple[Tensor, Tensor] | None:
        """Append the new rows to a cache and compute attention to it.

        Args:
            call: key and value are the cache, (batch, num_heads_kv, max_len, dim), or (num_pages,
                num_heads_kv, page_size, dim) with a block table. The mask sets each sequence's end.

        Returns:
            out and lse. None if no kernel supports the problem; nothing is written in that case.
        """
        return None

    def norm_fwd(self, call: Any, for_backward: bool, want_total: bool) -> NormOutputs | None:
        """Compute the outputs of a NormCall, or of an UncheckedNorm if the backend accepts those;
        return None to refuse the latter.

        mean and rstd may be None without for_backward; total may be None without for_backward and
        want_total.
        """
        raise NotImplementedError

    def norm_bwd(
        self,
        call: NormCall,
        mean: Any,
        rstd: Tensor,
        grad_out: Tensor,
        grad_total: Tensor | None,
        needs_weight: bool,
        needs_bias: bool,
    ) -> NormGradients | None:
        """Compute the gradients; call.input is the sum that was normalised, without a residual.

        A backend with accepts_unchecked returns None if the dtype or layout of mean or rstd is not
        that of the forward's outputs.
        """
        raise NotImplementedError
