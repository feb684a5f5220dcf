"""Backend "sdpa": torch's attention and norm kernels, on every device."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_attn.backends import denylist, reference
from fused_attn.backends.base import Backend, Extent
from fused_attn.backends.machine import capability_of, too_old
from fused_attn.backends.problem import AttentionProblem, NormProblem, Problem
from fused_attn.base.torch_state import FLOATS, is_compiling, needs_grad, traced_as_constant
from fused_attn.call import packed
from fused_attn.call.attention import AttentionCall, AttentionOutputs, UncheckedAttention
from fused_attn.call.norm import NormCall, NormOutputs, UncheckedNorm
from fused_attn.call.options import with_options
from fused_attn.masks.spec import MaskSpec
from fused_attn.masks.torch_arguments import TorchArguments, arguments_of, torch_arguments

_aten = torch.ops.aten

# torch's function; while `enable()` is in effect, the implementation that it overrides.
torch_sdpa = F.scaled_dot_product_attention
_NO_MASK, _CAUSAL = TorchArguments(), TorchArguments(is_causal=True)


class SdpaBackend(Backend):
    """Backend of torch's scaled_dot_product_attention and norms, which autograd differentiates."""

    name = "sdpa"
    differentiable = True
    accepts_unchecked = True
    wraps_torch = True

    def default_for(self, device_type: str) -> Extent:
        return "all"

    def fallback_warning(self, device_type: str) -> str | None:
        if device_type in ("cpu", "meta"):
            return None
        if device_type == "cuda":
            return (
                "fused_attn computes attention and norms on cuda with torch's kernels (backend "
                '"sdpa"). Run `fused-attn verify` once: later calls use the fused_attn kernels '
                "that it finds correct and faster on this machine"
            )
        return (
            f"fused_attn has no kernels for {device_type}: attention and norms there run on "
            'torch\'s kernels (backend "sdpa")'
        )

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.transformed:
            reasons.append("does not support torch.func transforms or forward-mode AD")
        if problem.seeded:
            reasons.append("does not support a dropout seed: torch's generator draws the mask")
        if problem.sharded:
            reasons.append("cannot drop the same elements in a shard as in the global call")
        if isinstance(problem, NormProblem):
            return reasons
        if problem.partial:
            reasons.append("does not support partial results (attention over part of the keys)")
        if problem.softcap:
            reasons.append("does not support softcap")
        if problem.result == "lse":
            reasons += _no_lse(problem)
        return reasons

    def attention_fwd(
        self, call: AttentionCall | UncheckedAttention, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs | None:
        if isinstance(call, UncheckedAttention):
            if want_lse or call.options.softcap is not None:
                return None
            out = _unchecked_attention(call)
            return None if out is None else AttentionOutputs(out, None, None, None)
        out, lse = _out_and_lse(call, want_lse)
        return AttentionOutputs(out, lse, None, None)

    def attention_with_weights(self, call: AttentionCall, average: bool) -> tuple[Tensor, Tensor]:
        query, key, value = call.query, call.key, call.value
        shape = (*query.shape[:3], key.shape[2])
        if 0 in query.shape or 0 in key.shape:
            call = with_options(call, dropout_p=0.0)
            return reference.attention(call)[0], reference.attention_weights(call, average)
        if (group := query.shape[1] // key.shape[1]) > 1:
            key, value = (t.repeat_interleave(group, 1) for t in (key, value))
        mask, is_causal, empty = torch_arguments(call.mask, shape, query)
        scores = (query * call.options.scale) @ key.mT
        if is_causal:
            mask = torch.ones(shape[2:], dtype=torch.bool, device=query.device).tril()
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, float("-inf"))
        elif mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1)
        if call.options.dropout_p > 0.0:
            weights = F.dropout(weights, call.options.dropout_p)
        if empty is not None:
            weights = weights.masked_fill(empty, 0.0)
        return weights @ value, weights.mean(1) if average else weights

    def norm_fwd(
        self, call: NormCall | UncheckedNorm, for_backward: bool, want_total: bool
    ) -> NormOutputs | None:
        if isinstance(call, UncheckedNorm):
            return _unchecked_norm(call)
        total = call.input
        if call.options.dropout_p > 0.0:
            total = F.dropout(total, call.options.dropout_p)
        if call.residual is not None:
            total = call.residual + total
        out = reference.norm_of(total, call)
        return NormOutputs(out, total.contiguous() if call.has_total else None, None, None)


def _unchecked_attention(call: UncheckedAttention) -> Tensor | None:
    """Run torch's attention on an unvalidated call; return None if it must be validated first."""
    query, key, value = call.query, call.key, call.value
    grouped = _grouped(query, key, value, call.enable_gqa)
    if grouped is None:
        return None
    arguments = _CAUSAL if call.is_causal else _NO_MASK
    if isinstance(call.attn_mask, MaskSpec):
        return None
    if call.attn_mask is not None:
        known = arguments_of(call.attn_mask, call.is_causal, query, key)
        if known is None:
            return None
        arguments = known
    return _attention(
        query, key, value, arguments, call.options.dropout_p, call.options.scale, grouped
    )


def _unchecked_norm(call: UncheckedNorm) -> NormOutputs | None:
    """Run torch's norm on an unvalidated call; return None if it must be validated first."""
    input, residual, shape, eps = call.input, call.residual, call.normalized_shape, call.options.eps
    if input.is_nested or input.dtype not in FLOATS or call.options.dropout_p > 0.0:
        return None
    if not shape or input.shape[len(input.shape) - len(shape) :] != shape:
        return None
    for parameter in (call.weight, call.bias):
        if parameter is not None and (parameter.shape != shape or parameter.dtype != input.dtype):
            return None
    if residual is not None:
        if residual.shape != input.shape or residual.dtype != input.dtype:
            return None
        input = residual + input
    if call.options.rms:
        out = torch.rms_norm(input, shape, call.weight, eps)
    else:
        out = torch.layer_norm(input, shape, call.weight, call.bias, eps)
    return NormOutputs(out, input, None, None)


def _out_and_lse(call: AttentionCall, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Return out and lse. lse may be None unless with_lse."""
    if call.mask.cu_seqlens_q is not None:
        return packed.over_padded(call, lambda padded: _out_and_lse(padded, with_lse))
    query, key, value = call.query, call.key, call.value
    if 0 in query.shape or 0 in key.shape:
        return reference.attention(with_options(call, dropout_p=0.0))
    arguments = torch_arguments(call.mask, (*query.shape[:3], key.shape[2]), query)
    if with_lse:
        return _with_lse(query, key, value, arguments, call.options.scale)
    # Convert to bool, because under torch.export the comparison may return a SymBool.
    grouped = True if query.shape[1] != key.shape[1] else False  # noqa: SIM210
    out = _attention(
        query, key, value, arguments, call.options.dropout_p, call.options.scale, grouped
    )
    return out, None


def _grouped(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> bool | None:
    """Return True if heads share keys and values; None if the call must be validated first."""
    if query.dtype not in FLOATS or not query.dtype == key.dtype == value.dtype:
        return None
    if query.is_nested or key.is_nested or value.is_nested:
        return None
    sizes, sizes_k, sizes_v = query.shape, key.shape, value.shape
    if len(sizes) != 4 or 0 in sizes:
        return None
    if sizes == sizes_k == sizes_v:
        return False
    if len(sizes_k) != 4 or 0 in sizes_k or 0 in sizes_v or sizes_k[:3] != sizes_v[:3]:
        return None
    if sizes[0] != sizes_k[0] or sizes[3] != sizes_k[3]:
        return None
    if sizes[1] == sizes_k[1]:
        return False
    return True if enable_gqa and sizes[1] % sizes_k[1] == 0 else None


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    arguments: TorchArguments,
    dropout_p: float,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    mask, is_causal, empty = arguments
    query, scale = _positive_scale(query, scale, is_causal)
    if mask is not None and query.device.type == "cuda":
        mask = _dense_in_keys(mask, key.shape[2])
        if mask.requires_grad and not needs_grad(query, key, value) and torch.is_grad_enabled():
            query = _requiring_grad(query, mask)
    if grouped and _repeats_heads(query, key, value, mask, is_causal):
        group, grouped = query.shape[1] // key.shape[1], False
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    with allowed_kernels(query, key, value, mask):
        options: dict[str, Any] = {"scale": scale, "enable_gqa": grouped}
        parts = _row_parts(query, key, mask)
        outs = [torch_sdpa(q, key, value, m, dropout_p, is_causal, **options) for q, m in parts]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 2)
    if empty is None:
        return out
    # In place only if no gradient is needed, because torch's backward reads out.
    return out.masked_fill(empty, 0.0) if out.requires_grad else out.masked_fill_(empty, 0.0)


def _positive_scale(
    query: Tensor, scale: float | None, is_causal: bool
) -> tuple[Tensor, float | None]:
    """Return query and scale with the same scores, and a positive scale if is_causal.

    torch's CPU kernel multiplies -inf at masked positions by the scale.
    """
    if scale is not None and scale <= 0.0 and (is_causal or query.device.type != "cpu"):
        return reference.with_positive_scale(query, scale)
    return query, scale


_MAX_MASK = 1 << 32  # elements per head: torch's memory-efficient kernel has 32-bit row offsets


def _row_parts(
    query: Tensor, key: Tensor, mask: Tensor | None
) -> list[tuple[Tensor, Tensor | None]]:
    """Split query and mask by rows into parts whose masks the kernel can address.

    The kernel silently reads wrong rows of larger masks (pytorch/pytorch#187227).
    """
    if mask is None or query.device.type == "cpu" or is_compiling() or mask.shape[-2] == 1:
        return [(query, mask)]
    if query.shape[2] * key.shape[2] < _MAX_MASK:
        return [(query, mask)]
    rows = max(1, _MAX_MASK // 2 // key.shape[2])
    return list(zip(query.split(rows, 2), mask.split(rows, -2), strict=True))


def _requiring_grad(query: Tensor, mask: Tensor) -> Tensor:
    """Return query as a tensor that requires grad.

    If only the mask requires grad, torch's memory-efficient kernel reads an lse that was not
    computed, an illegal access (https://github.com/pytorch/pytorch/issues/148476).
    """
    first = mask[(0,) * mask.dim()].nan_to_num(0.0, 0.0, 0.0)
    return query + (first * 0.0).to(query.dtype)


def _repeats_heads(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> bool:
    """Return True if torch would materialize the scores of a grouped call.

    This happens if only the memory-efficient kernel supports the mask, dtype or sizes without
    materializing them, because that kernel does not support GQA.
    """
    if query.device.type != "cuda" or torch.version.hip is not None or query.dtype == torch.float64:
        return False
    if not denylist.is_denied("memory-efficient", denylist.GROUPED_HEADS, query.device):
        return False
    size, is_half = query.shape[3], query.dtype in (torch.float16, torch.bfloat16)
    by_flash = is_half and mask is None and size == value.shape[3] and size <= 256
    if by_flash and (not is_causal or query.shape[2] == key.shape[2]):
        return False
    capability = capability_of(query.device)
    prefers_cudnn = capability is None or capability // 10 in (9, 10)
    by_cudnn = is_half and prefers_cudnn and max(size, value.shape[3]) <= 128
    return not by_cudnn or _cudnn_is_denied(query, key, value, mask)


def _dense_in_keys(mask: Tensor, seqlen_k: int) -> Tensor:
    """Return a mask whose last dimension is dense, as torch's CUDA kernels require."""
    if mask.shape[-1] == seqlen_k and mask.stride(-1) == 1:
        return mask
    return mask.expand(*mask.shape[:-1], seqlen_k).contiguous()


# ---- cuDNN --------------------------------------------------------------------------------------

_AS_SET = contextlib.nullcontext()


def allowed_kernels(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch avoids cuDNN if cuDNN has a defect for the call.

    Only the forward chooses a kernel; the backward follows it.

    Args:
        query, key, value: 4-D, as for torch's function.
        mask: its attn_mask.
    """
    if not _cudnn_is_denied(query, key, value, mask):
        return _AS_SET
    if not is_compiling():
        return _CudnnOff()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    enabled = zip(kernels, _enabled_kernels(), strict=True)
    return sdpa_kernel([kernel for kernel, is_enabled in enabled if is_enabled])


def _cudnn_is_denied(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return True if torch must not choose cuDNN for a call."""
    if query.device.type != "cuda" or (mask is None and query.shape[2] != 1):
        return False
    if query.shape[2] == 1 and denylist.is_denied("cudnn", denylist.ONE_QUERY, query.device):
        return True
    if not needs_grad(query, key, value, mask):
        return False
    feature = denylist.ONE_QUERY_WITH_GRADIENTS if mask is None else denylist.MASK_WITH_GRADIENTS
    return denylist.is_denied("cudnn", feature, query.device)


@traced_as_constant
def _enabled_kernels() -> tuple[bool, bool, bool]:
    """Return whether flash, memory-efficient and math attention are enabled."""
    flags = torch.backends.cuda
    return flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()


class _CudnnOff:
    """Context that disables cuDNN attention, with less overhead than torch's `sdpa_kernel`."""

    def __enter__(self) -> None:
        self.enabled = torch.backends.cuda.cudnn_sdp_enabled()
        if self.enabled:
            torch.backends.cuda.enable_cudnn_sdp(False)

    def __exit__(self, *error: object) -> None:
        if self.enabled:
            torch.backends.cuda.enable_cudnn_sdp(True)


# ---- lse ----------------------------------------------------------------------------------------


def _no_lse(problem: AttentionProblem) -> list[str]:
    """Return the reasons why no torch op returns lse for a problem; empty if one does."""
    reasons = []
    if problem.needs_grad:
        reasons.append("cannot backpropagate through lse")
    if problem.dropout:
        reasons.append("cannot return lse with dropout")
    if problem.device.type == "cuda":
        reasons += too_old(problem.device)
        if problem.mask == "causal" and not problem.seqlen_q == problem.seqlen_k > 0:
            reasons.append(
                "cannot return lse with a causal mask on cuda if the lengths differ or are 0"
            )
        if problem.mask not in ("none", "causal"):
            reasons.append("cannot return lse with a mask other than causal on cuda")
        if problem.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(f"cannot return lse for {problem.dtype} on cuda")
        if problem.head_dim % 8 or problem.head_dim > 256:
            reasons.append(f"cannot return lse for head_dim {problem.head_dim} on cuda")
    elif problem.device.type != "cpu":
        reasons.append(f"cannot return lse on {problem.device.type}")
    if problem.head_dim != problem.head_dim_v:
        reasons.append("cannot return lse if head_dim_v differs from head_dim")
    return reasons


def _with_lse(
    query: Tensor, key: Tensor, value: Tensor, arguments: TorchArguments, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return out and lse, computed by torch's flash attention ops. lse is not differentiable."""
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    # These ops ignore the stride of the last dimension.
    query, key, value = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, key, value))
    mask, is_causal = arguments.attn_mask, arguments.is_causal
    query, scale = _positive_scale(query, scale, is_causal)
    if query.device.type == "cuda":
        assert mask is None  # see _no_lse
        results = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
        return results[0], results[1]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, float("-inf"))
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    if arguments.empty is None:
        return out, lse
    lse = lse.masked_fill(arguments.empty.squeeze(-1), float("-inf"))
    return out.masked_fill(arguments.empty, 0.0), lse
