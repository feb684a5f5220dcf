"""Interface of the backends: the passes that they compute and the problems that they support."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from fused_attn.backends.problem import Problem
from fused_attn.base.flat import Empty, empty_strided
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionGradients,
    AttentionOutputs,
    WeightsBackward,
)
from fused_attn.call.kv_cache import CacheUpdate
from fused_attn.call.norm import NormBackward, NormGradients, NormOutputs

Extent = Literal["all", "some", "none"]

# The indices must match enum Activation in csrc/params.h.
ACTIVATIONS = ("identity", "relu", "gelu", "gelu_tanh")


class Backend:
    """Base class of the implementations of the ops. The registry has one instance per subclass.

    Passes receive validated calls, unless accepts_unchecked. Tensors may have any strides.

    Attributes:
        name: the name by which users select the backend.
        differentiable: True if the passes consist of torch operations, which autograd,
            torch.compile and torch.func can trace. Otherwise, the subclass also implements the
            backward passes.
        accepts_unchecked: True if `attention_fwd` and `norm_fwd` accept unvalidated calls. They
            return None to reject such a call. Callers never pass unvalidated calls if
            torch intercepts calls, see `torch_state.is_intercepted`.
        wraps_torch: True if torch's unmodified kernels compute everything, with torch's semantics.
            Dropout then uses torch's generator instead of Philox with the seed of the call. NaN in
            keys and values that are masked for every query may reach the results. Modules then use
            torch's inference fast paths, and do not pack sequences.
        empty: allocates an uninitialized tensor, in memory that the backend may reuse.
    """

    name: ClassVar[str]
    differentiable: ClassVar[bool] = False
    accepts_unchecked: ClassVar[bool] = False
    wraps_torch: ClassVar[bool] = False
    empty: Empty = staticmethod(empty_strided)

    def unavailable(self) -> list[str]:
        """Return the reasons why this backend cannot run on this machine; empty if it can."""
        return []

    def unsupported(self, problem: Problem) -> list[str]:
        """Return the reasons why this backend does not support a problem; empty if it does."""
        return []

    def opt_in_reasons(self, problem: Problem) -> list[str]:
        """Return the reasons why this backend is opt-in for a problem; empty if it is not."""
        return []

    def fallback_warning(self, device_type: str) -> str | None:
        """Return the warning to emit once if this backend is selected by default, or None."""
        return None

    def default_for(self, device_type: str) -> Extent:
        """Return for which problems this backend can be the default: all, some or none.

        Args:
            device_type: the device of the problems, such as "cuda".
        """
        return "none"

    def tile_summary(self, tensor: Tensor) -> Tensor | None:
        """Summarize each tile of 32 queries x 64 keys of a dense mask or bias.

        Args:
            tensor: (batch, num_heads, seqlen_q, seqlen_k).

        Returns:
            uint8 (batch, num_heads, ceil(seqlen_q / 32), ceil(seqlen_k / 64)), with values of enum
            SummaryValue in csrc/params.h. None if the passes use no summaries.
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
        """Compute dropout(activation(input + bias)), or its gradient if grad_out is given.

        Backends need not implement this method.

        Args:
            input: (*, columns), contiguous, without lazy negation.
            bias: (columns,), in the dtype of input.
            activation: one of ACTIVATIONS.
            seed: int64 scalar; seed of the dropout mask, see `base.philox.norm_keep`. None without
                dropout.
            grad_out: gradient of the result. If given, the method returns the gradient of
                input + bias. For "relu", input must then be the result of the forward.
            out: tensor to write the result to; may be input. By default, a new tensor that is not
                a view is allocated.
        """
        raise NotImplementedError

    def rotary(
        self,
        input: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        per_dimension: bool,
        backward: bool,
    ) -> Tensor:
        """Compute a rotary embedding, or with `backward`, its gradient for the gradient `input`.

        Backends need not implement this method.

        Args:
            input: (batch, num_heads, seqlen, head_dim), with last stride 1, not empty.
            cos, sin: (positions, width) or (batch or 1, seqlen, width), with last stride 1, in the
                dtype of input or its accumulator dtype.
            positions: (batch, seqlen) int64, contiguous, valid rows of cos and sin; None: token i
                uses row i.
            per_dimension: width is rotary_dim, otherwise rotary_dim / 2; see `rotary_embedding`.

        Returns:
            A tensor whose dimensions are ordered in memory as those of input.
        """
        raise NotImplementedError

    def attention_fwd(
        self, call: Any, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs | None:
        """Compute the outputs of an attention call.

        Args:
            call: an AttentionCall, or an UncheckedAttention if accepts_unchecked.
            for_backward: True if a backward follows. The scores must then be computed exactly as
                the backward recomputes them.
            want_lse: True if lse is requested. If neither flag is set, a backend may round the
                weights differently.

        Returns:
            The outputs, or None to reject an UncheckedAttention.
        """
        raise NotImplementedError

    def attention_bwd(self, work: AttentionBackward) -> AttentionGradients | None:
        """Compute the gradients of query, key, value and, if needs_bias, bias.

        A backend with accepts_unchecked returns None if the tensors do not fit together. This
        happens if a saved-tensor hook has changed them.
        """
        raise NotImplementedError

    def attention_with_weights(self, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
        """Compute out and the attention weights. Called on differentiable backends only."""
        raise NotImplementedError

    def attention_weights(
        self, call: AttentionCall, lse: Tensor, lse_residual: Tensor, average: bool
    ) -> Tensor:
        """Compute the attention weights after dropout from the lse and lse_residual of a forward.

        Implementations do not read call.value.
        """
        raise NotImplementedError

    def attention_weights_bwd(self, work: WeightsBackward) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of query, key and bias for a loss on the attention weights.

        The gradient of bias is empty unless needs_bias.
        """
        raise NotImplementedError

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate, want_lse: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Append new keys and values to a KV cache, and attend to the cache.

        Args:
            call: key and value are the caches, (batch, num_heads_kv, max_len, dim), or (num_pages,
                num_heads_kv, page_size, dim) with a block table. The mask sets the end of each
                sequence. No tensor is empty.
            update: the cache, and the keys and values to append.
            want_lse: lse is requested, as in `attention_fwd`.

        Returns:
            out and lse, which may be None if not requested. None, without changes to the cache, if
            no kernel supports the step.
        """
        return None

    def norm_fwd(self, call: Any, for_backward: bool, want_total: bool) -> NormOutputs | None:
        """Compute the outputs of a norm call.

        Args:
            call: a NormCall, or an UncheckedNorm if accepts_unchecked.
            for_backward: True if a backward follows. Otherwise, mean and rstd may be None.
            want_total: True if total is requested. If neither flag is set, total may be None.

        Returns:
            The outputs, or None to reject an UncheckedNorm.
        """
        raise NotImplementedError

    def norm_bwd(self, work: NormBackward) -> NormGradients | None:
        """Compute the gradients of a norm.

        A backend with accepts_unchecked returns None if mean or rstd does not have the dtype and
        layout in which the forward returns it.
        """
        raise NotImplementedError
