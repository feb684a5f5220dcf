"""Padding removal: run a stack of encoder layers on the real tokens of a padded batch only.

The batch is packed into a (1, total, width) tensor before the first layer and unpacked after the
last. All operations in between are token-wise, except attention, which supports packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Module, ModuleList
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fused_attn import masks
from fused_attn.backends import default_backend
from fused_attn.base import small_calls
from fused_attn.base.torch_state import (
    PLAIN_TYPES,
    captured,
    in_transform,
    is_compiling,
    plain_eager,
    traced_as_constant,
)
from fused_attn.call.packed import cumulative
from fused_attn.masks import Mask
from fused_attn.nn.norm import LayerNorm, RMSNorm
from fused_attn.nn.replacement import patched, unhooked

# Minimum fraction of padding tokens; packing saves little time below it. Two layers with d_model
# 512 and 8 x 256 tokens, forward plus backward on two threads with AMX, take 0.91 to 0.96 of the
# padded time with 0 to 10 % padding (noise about 0.05), and 0.79 of it with 20 % padding. The cost
# of packing itself is too small to measure.
MIN_PADDED = 0.05

_POINTWISE_FUNCTIONS = (F.relu, F.gelu, F.silu, F.leaky_relu, F.mish, torch.relu, torch.tanh)
_NORMS = (torch.nn.LayerNorm, torch.nn.RMSNorm, LayerNorm, RMSNorm)
# Matched by exact type, because a subclass may mix tokens.
TOKENWISE_MODULES = (
    torch.nn.Linear, NonDynamicallyQuantizableLinear, torch.nn.Dropout, torch.nn.Identity, *_NORMS,
    torch.nn.ReLU, torch.nn.GELU, torch.nn.SiLU, torch.nn.LeakyReLU, torch.nn.Mish, torch.nn.Tanh,
)  # fmt: skip


@dataclass(frozen=True)
class Packing:
    """Positions of the real tokens in a padded batch.

    Attributes:
        index: (total,) int64; row of each real token in the flattened padded batch. The tokens of a
            sequence are contiguous.
        cu_seqlens: (batch + 1,) int32; start of each packed sequence, followed by the total.
        max_seqlen: upper bound of the sequence lengths.
        mask: additional mask, applied within each sequence.
    """

    index: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    mask: Mask

    def varlen_arguments(self) -> dict[str, Any]:
        """Return the arguments of varlen_attention that describe the sequences."""
        return {
            "cu_seqlens_q": self.cu_seqlens,
            "cu_seqlens_k": self.cu_seqlens,
            "max_seqlen_q": self.max_seqlen,
            "max_seqlen_k": self.max_seqlen,
            "attn_mask": self.mask,
        }

    def pack(self, padded: Tensor) -> Tensor:
        """Gather the real tokens of (N, S, width) or (S, N, width) into (1, total, width)."""
        return padded.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, packed: Tensor, padded_shape: torch.Size) -> Tensor:
        """Scatter (1, total, width) into a tensor of `padded_shape` that is 0 at padding."""
        rows = packed.new_zeros(padded_shape[0] * padded_shape[1], packed.shape[2])
        return rows.index_copy(0, self.index, packed[0]).unflatten(0, padded_shape[:2])


def saves_time(x: Tensor, ignored: Tensor, training: bool) -> bool:
    """Return True if a batch has enough padding for packing to save time.

    The result is False for a batch of padding only. Reading the values of `ignored` synchronizes
    with a GPU. In a torch.compile graph, the values are unknown and the result is always True.

    Args:
        x: padded batch, (*, width).
        ignored: (N, S) bool, True for padding.
        training: True if a layer is in training mode. A reentrant checkpoint runs its first forward
            without gradients. Packing only the recomputation would then change the dropout mask.
    """
    if is_compiling():
        return True
    padding, limits = int(ignored.sum()), small_calls.limits
    learns = training or torch.is_grad_enabled()
    limit = limits.packing_training if learns else limits.packing_forward
    return (
        MIN_PADDED * ignored.numel() <= padding < ignored.numel()
        and padding * x.shape[-1] ** 2 > limit
    )


def packing_of(
    ignored: Tensor, mask: Tensor | Mask | None, is_causal: bool, batch_first: bool
) -> Packing | None:
    """Return the packing of a batch, or None if packing would change results.

    In a torch.compile graph, batches with `mask` are never packed.

    Args:
        ignored: (N, S) bool, True for padding.
        mask: additional mask, indexed by padded position. With a mask, the batch is packed only if
            all padding is at the end.
        is_causal: also apply a causal mask.
        batch_first: batches have shape (N, S, width) instead of (S, N, width).
    """
    compiling = is_compiling()
    if compiling and mask is not None:
        return None
    real = ~ignored
    lengths = real.sum(1)
    index = real.flatten().nonzero().squeeze(1)
    batch, seqlen = ignored.shape
    max_seqlen, within = seqlen, Mask()
    if not compiling:
        max_seqlen = int(lengths.max())
    if mask is not None:
        if bool((real[:, 1:] > real[:, :-1]).any()):
            return None
        mask = mask if isinstance(mask, Mask) else mask[..., :max_seqlen, :max_seqlen]
        within = cast(Mask, masks.as_mask(mask))
    if is_causal:
        within = within & masks.causal()
    if not batch_first:
        index = index % seqlen * batch + index // seqlen
    return Packing(index, cumulative(lengths), max_seqlen, within)


def can_pack(
    src: Tensor,
    ignored: Tensor,
    mask: Tensor | Mask | None,
    layers: ModuleList,
    norm: Module | None,
) -> bool:
    """Return True if packing a batch saves time and does not change the results of real tokens.

    All modules except attention must be token-wise. No module may have hooks, because they would
    observe packed shapes. A Mask must depend on relative positions only.
    """
    if src.dim() != 3 or src.is_nested or ignored.dim() != 2 or ignored.dtype != torch.bool:
        return False
    backend = default_backend(src.device)
    if backend is not None and backend.wraps_torch:  # the backend would pad the batch again
        return False
    if must_stay_padded(src, ignored) or (isinstance(mask, Mask) and not mask.is_relative):
        return False
    # First, because checking the modules takes 30 us per layer.
    if not saves_time(src, ignored, any(layer.training for layer in layers)):
        return False
    if norm is not None and not (type(norm) in _NORMS and is_unmodified(norm)):
        return False
    return all(_is_tokenwise(layer) for layer in layers)


def must_stay_padded(*tensors: Tensor) -> bool:
    """Return True if packed shapes would be observed or the mask's values cannot be read.

    Traced graphs, dispatch modes and global hooks observe shapes. Values cannot be read from meta
    tensors and during CUDA graph capture.
    """
    if is_compiling():
        return not (_one_dynamic_graph() and PLAIN_TYPES.issuperset(map(type, tensors)))
    return (
        not plain_eager(*tensors)
        or tensors[0].is_meta
        or torch.nn.modules.module._has_any_global_hook()
        or captured(tensors[0])
    )


@traced_as_constant
def _one_dynamic_graph() -> bool:
    """Return True if the graph being traced may contain data-dependent sizes.

    torch's capture_dynamic_output_shape_ops enables them. Exported graphs are never packed.
    """
    import torch._dynamo.config  # loaded already, because Dynamo is tracing

    wanted = torch._dynamo.config.capture_dynamic_output_shape_ops
    return wanted and not torch.compiler.is_exporting() and not in_transform()


def outside_graphs(decide: Callable[..., Packing | None], x: Tensor, *args: Any) -> Packing | None:
    """Compute decide(x, *args). If permitted, torch.compile breaks the graph here.

    The decision depends on values. The graph after the break has a dynamic number of tokens, and
    one more is compiled for batches that stay padded. On GPUs, there is no break and all batches
    stay padded, because CUDA graphs would be recorded for each number of tokens.
    """
    if is_compiling() and x.is_cpu and _may_break_graph():
        return _uncompiled(decide, x, *args)
    return decide(x, *args)


def _uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function; `_may_break_graph` makes torch.compile break the graph here."""
    return function(*args)


@traced_as_constant
def _may_break_graph() -> bool:
    """Return True if the graph being traced may be split, which fullgraph=True forbids."""
    global _uncompiled
    import torch._dynamo
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if _one_dynamic_graph() or torch.compiler.is_exporting() or in_transform():
        return False
    if not hasattr(_uncompiled, "_torchdynamo_disable"):
        _uncompiled = torch._dynamo.disable(_uncompiled, reason="it depends on tensor values")
    tracer = InstructionTranslator.current_tx()
    return not (tracer.one_graph or getattr(tracer, "error_on_graph_break", False))


def _is_tokenwise(layer: Module) -> bool:
    attention = layer.self_attn
    if not (callable(layer.activation) and _is_pointwise(layer.activation)):
        return False
    return all(
        (type(module) in TOKENWISE_MODULES or module is layer or module is attention)
        and is_unmodified(module)
        for module in layer.modules()
    )


def _is_pointwise(activation: object) -> bool:
    if type(activation) in TOKENWISE_MODULES or activation in _POINTWISE_FUNCTIONS:
        return True
    return getattr(activation, "pointwise", False)  # compare() sets it on its wrapper of F.relu


_methods: dict[type[Module], frozenset[str]] = {}


@traced_as_constant
def _methods_of(kind: type[Module]) -> frozenset[str]:
    """Return the names of a class's callable attributes, cached per class.

    An instance attribute with one of these names overrides a method.
    """
    names = _methods.get(kind)
    if names is None:
        names = frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))
        _methods[kind] = names
    return names


def overrides_methods(module: Module) -> bool:
    """Return True if attributes of the instance replace methods of its class."""
    return not _methods_of(type(module)).isdisjoint(module.__dict__)


def is_unmodified(module: Module, ignored: Callable[[Any], bool] | None = None) -> bool:
    """Return True if a module has no hooks and no methods overridden on the instance.

    A norm must also normalize over a single dimension. For `ignored`, see `unhooked`.
    """
    normalized_shape: Any = module.__dict__.get("normalized_shape", (1,))
    if len(normalized_shape) != 1 or not unhooked(module, ignored):
        return False
    return not (overrides_methods(module) or patched(module))
