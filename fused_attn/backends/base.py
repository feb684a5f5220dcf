"""The base of all backends: the passes, and the reasons not to take a problem."""

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

# In the order of csrc/params.h, enum Activation.
ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh")


class CacheUpdate(NamedTuple):
    """The rows that `decode_attention` adds to a cache, and their place there.

    Attributes:
        key, value: (batch, num_heads_kv, seqlen_new, dim), or None.
        lengths: (batch,) integers, rows that the cache has of each sequence.
        block_table: (batch, max_pages) integers, or None.
    """

    key: Tensor | None
    value: Tensor | None
    lengths: Tensor
    block_table: Tensor | None


class Backend:
    """One way to compute the ops; the registry has an object of each.

    Callers pass checked calls in `kernel_layout()` to every pass of attention but attention_decode,
    whose caches may have any strides.

    Attributes:
        name: what users ask for.
        differentiable: whether its passes are torch operations, which autograd, torch.compile and
            torch.func go through; else they are kernels, and the passes below their derivatives.
        accepts_unchecked: True if `attention_fwd` and `norm_fwd` accept unvalidated calls, and
            return None for those that they refuse. Such calls are never intercepted.
        wraps_torch: whether all is computed by torch's own kernels, as they are. What torch does
            differently stays so: dropout draws from torch's generator, not by a call's seed
            (Philox), and NaN in keys and values that no query sees may reach results. Nor is there
            a reason to keep modules from torch's own inference paths, or to pack sequences.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    accepts_unchecked: ClassVar[bool] = False
    wraps_torch: ClassVar[bool] = False

    def unavailable(self) -> list[str]:
        """Reasons why this backend cannot run on this machine; empty if it can."""
        return []

    def unsupported(self, problem: Problem) -> list[str]:
        """Reasons why this backend does not take a problem; empty if it does."""
        return []

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        """Reasons why this backend has to be asked for by name; empty if it is chosen unasked."""
        return []

    def fallback_warning(self, device_type: str) -> str | None:
        """The sentence that users should see once where this backend is chosen unasked."""
        return None

    def default_for(self, device_type: str) -> Extent:
        """Return for which calls on a type of device this backend is the default."""
        return "none"

    def tile_summary(self, tensor: Tensor) -> Tensor | None:
        """A summary of each 32 x 64 tile of a dense mask or bias: uint8, enum SummaryValue of
        csrc/params.h; None where the passes want no summaries."""
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
        """dropout(activation(input + bias)) of a contiguous tensor, (*, columns), which is not
        negated lazily; in out, or in a tensor that is no view. Not every backend has it.

        Args:
            bias: (columns,), of the same type.
            activation: one of ACTIVATIONS.
            seed: int64 scalar; what it drops is `base.philox.norm_keep`. None without dropout.
            grad_out: the gradient of the result; then this is the gradient of input + bias. For
                "relu" input is the result then.
            out: where the result is written; it may be input.
        """
        raise NotImplementedError

    def attention_fwd(
        self, call: Any, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs | None:
        """Compute the outputs of an AttentionCall, or of an UncheckedAttention if the backend
        accepts those; None refuses the latter.

        With for_backward, out is computed as the backward recomputes it. Without for_backward and
        want_lse, a backend may round the weights in another way.
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
        """The gradients under grad_out and grad_lse. Backends that take unchecked calls get calls
        and outputs that are not `kernel_layout()` too, and give None for those."""
        raise NotImplementedError

    def attention_with_weights(self, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
        """out, and the weights that made it; of a differentiable backend."""
        outputs = self.attention_fwd(call, True, True)
        assert outputs is not None
        out, lse, lse_residual, _ = outputs
        return out, self.attention_weights(call, lse, lse_residual, average)

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        """The weights after dropout, from the lse of `attention_fwd` and what rounding took of it;
        call.value is not looked at."""
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
        """Gradients of query, key and bias (empty if not needed) by `attention_weights`."""
        return weights_bwd.attention_weights_bwd(
            call, lse, lse_residual, grad_weights, average, needs_bias
        )

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate
    ) -> tuple[Tensor, Tensor] | None:
        """out and lse of attention to a cache, behind whose rows the new ones are written.

        Args:
            call: with the cache as key and value, (batch, num_heads_kv, max_len, dim), or with a
                block table (num_pages, num_heads_kv, page_size, dim); its mask ends each sequence.

        Returns:
            None where no kernel takes the problem; nothing has been written then.
        """
        return None

    def norm_fwd(self, call: Any, for_backward: bool, want_total: bool) -> NormOutputs | None:
        """Compute the outputs of a NormCall, or of an UncheckedNorm if the backend accepts those;
        None refuses the latter.

        mean and rstd may be None without for_backward, total without both.
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
        """The gradients; `call` has the sum that was normalised as its input, and no residual. None
        as of `attention_bwd`, where mean or rstd are not as they were."""
        raise NotImplementedError
