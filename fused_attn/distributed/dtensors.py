"""DTensor inputs: calls on the shards of a distributed tensor.

A call with DTensors is validated on its global shapes. Then it is replaced by the call on this
rank's shards: local tensors, the part of the mask that belongs to them, and the global offsets of
the dropout mask. The ordinary path runs this call, and its results become DTensors again. Each step
is an ordinary differentiable operation (`to_local`, slices, `from_local`), so torch.compile, FSDP2
and activation checkpointing need nothing else.

Sharding rules of the registered ops (`register_sharding`) cannot do this. Mask tensors are often
plain tensors, which DTensor rejects in one op with DTensors. A rule also cannot slice a tensor to
the heads of this rank, or set offsets that differ between ranks.

Supported placements are Replicate, Shard of the batch, Shard of the heads if the size of the mesh
dimension divides num_heads and num_heads_kv, and for norms Shard of any dimension that is not
normalized. Other placements are redistributed to Replicate, as DTensor does for torch's ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_attn.base.torch_state import PLAIN_TYPES
from fused_attn.call.attention import AttentionCall, UncheckedAttention
from fused_attn.call.handlers import is_dtensor, tensors_of
from fused_attn.call.norm import NormCall, UncheckedNorm
from fused_attn.call.options import with_options
from fused_attn.call.validation import checked_attention, checked_norm
from fused_attn.distributed.sharding import attention_offsets
from fused_attn.masks import Mask
from fused_attn.masks.memo import recall
from fused_attn.masks.restrict import of_heads, of_sequences
from fused_attn.masks.spec import MaskSpec
from fused_attn.ops import dispatch
from fused_attn.ops.seeds import new_seed

# Use loops and list comprehensions instead of generator expressions, because torch.compile traces
# this file.
_BATCH, _HEAD = 0, 1


@dataclass(frozen=True)
class TensorSharding:
    """Placements of the results of a call.

    Attributes:
        mesh: DeviceMesh of the tensors.
        placements: Replicate or Shard for each mesh dimension.
        shape: global shape of the first tensor of the call.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: tuple[int, ...]

    def part(self, dim: int) -> slice:
        """Return the part of a tensor dimension that this rank computes."""
        start, stop = 0, self.shape[dim]
        for mesh_dim, placement in enumerate(self.placements):
            if placement.is_shard(dim):
                length = -(-(stop - start) // self.mesh.size(mesh_dim))  # like torch.chunk
                start = min(start + self.mesh.get_local_rank(mesh_dim) * length, stop)
                stop = min(start + length, stop)
        return slice(start, stop)

    def shards(self, dim: int) -> int:
        """Return the number of shards of a tensor dimension."""
        count = 1
        for mesh_dim, placement in enumerate(self.placements):
            if placement.is_shard(dim):
                count *= self.mesh.size(mesh_dim)
        return count

    @property
    def is_sharded(self) -> bool:
        """True if this rank computes only a part of the call."""
        return [p for p in self.placements if p.is_shard()] != []

    def to_local(self, tensor: Any) -> Any:
        """Return this rank's shard of a DTensor with the dimensions of `shape`; None for None."""
        if tensor is None:
            return None
        return _waited(tensor.redistribute(self.mesh, self.placements).to_local())

    def shared(self, tensor: Any) -> Any:
        """Return a local tensor that all ranks use, whose gradient is the sum over the shards.

        Args:
            tensor: a DTensor, or a plain tensor that is equal on all ranks; None is returned.
        """
        from torch.distributed.tensor import DTensor, Partial, Replicate

        tensor = replicated(tensor)
        if tensor is None or not (tensor.requires_grad and self.is_sharded):
            return tensor
        everywhere = [Replicate()] * len(self.placements)
        sums = [Partial() if p.is_shard() else Replicate() for p in self.placements]
        whole = DTensor.from_local(tensor, self.mesh, everywhere, run_check=False)
        return whole.to_local(grad_placements=sums)

    def from_local(self, tensor: Tensor | None, placements: Sequence[Any] | None = None) -> Any:
        """Return the DTensor whose shard on this rank is `tensor`.

        Args:
            tensor: a result of the call, whose sharded dimensions are those of `shape`.
            placements: placements of the result; None means those of the call.
        """
        from torch.distributed.tensor import DTensor

        if tensor is None:
            return None
        placed = self.placements if placements is None else placements
        dims = [dim for dim in range(tensor.dim()) if self.shards(dim) > 1]
        if not [dim for dim in dims if self.shape[dim] % self.shards(dim)]:
            return DTensor.from_local(tensor, self.mesh, placed, run_check=False)
        shape = [self.shape[i] if i in dims else n for i, n in enumerate(tensor.shape)]
        stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        return DTensor.from_local(
            tensor.contiguous(), self.mesh, placed, run_check=False, shape=torch.Size(shape),
            stride=tuple(stride),
        )  # fmt: skip

    def seed(self, device: torch.device) -> Tensor:
        """Draw a dropout seed on each rank of the mesh, and return that of the first rank."""
        from torch.distributed._functional_collectives import broadcast

        seed = new_seed(device)
        for mesh_dim in range(self.mesh.ndim):
            if self.mesh.size(mesh_dim) > 1:
                seed = broadcast(seed, 0, (self.mesh, mesh_dim))
        return _waited(seed)


def _waited(tensor: Tensor) -> Tensor:
    """Return a plain tensor, after waiting for an AsyncCollectiveTensor, which has no storage."""
    return tensor if type(tensor) in PLAIN_TYPES else tensor.clone()


def replicated(tensor: Any) -> Any:
    """Return the global tensor of a DTensor; other values are returned unchanged."""
    return _waited(tensor.full_tensor()) if is_dtensor(tensor) else tensor


def attention(
    call: UncheckedAttention, want_lse: bool, named: str | None
) -> tuple[Tensor, Tensor | None]:
    """Compute an attention call with DTensors, as `dispatch.attention` does without sinks.

    Raises:
        ValueError, TypeError: an argument is invalid; the message states expected and actual
            values.
    """
    local, leading, sharding = _local_attention(call)
    out, lse = dispatch.select_and_run_attention(call, local, want_lse, named)
    return dispatch.in_shape(sharding.from_local(out), sharding.from_local(lse), leading)


def attention_with_weights(
    call: UncheckedAttention, average: bool, named: str | None
) -> tuple[Tensor, Tensor]:
    """Compute out and the attention weights of all heads of a call with DTensors."""
    local, _, sharding = _local_attention(call)
    out, weights = dispatch.run_weights(local, average, named)
    return sharding.from_local(out), _of_all_heads(weights, sharding, average)


def sinks_like(lse: Any, sinks: Any) -> Any:
    """Return plain sinks as a replicated DTensor on the mesh of lse, which is a DTensor."""
    if not isinstance(sinks, Tensor) or is_dtensor(sinks):
        return sinks
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * lse.device_mesh.ndim
    return DTensor.from_local(sinks, lse.device_mesh, everywhere, run_check=False)


def _local_attention(
    call: UncheckedAttention,
) -> tuple[AttentionCall, tuple[int, ...] | None, TensorSharding]:
    """Validate a call, and return the call on this rank's shards.

    Returns:
        The call to run, the leading dimensions of the results (see `checked_attention`), and the
        sharding of the results.
    """
    if [tensor for tensor in tensors_of(call.attn_mask) if is_dtensor(tensor)]:
        given: Any = call.attn_mask
        call.attn_mask = replicated(given) if is_dtensor(given) else given.mapped(replicated)
    whole, leading = checked_attention(call)
    _check_dtensors("query", whole.query, key=whole.key, value=whole.value)
    sharding = _attention_sharding(whole.query, whole.key)
    query, key, value = (sharding.to_local(t) for t in (whole.query, whole.key, whole.value))
    options, batch, heads = whole.options, sharding.part(_BATCH), sharding.part(_HEAD)
    # The mask of the shard is cached on the Mask that the caller passed.
    mask = call.attn_mask if isinstance(call.attn_mask, Mask) and not call.is_causal else None
    local = AttentionCall(query, key, value, _mask_of_part(whole, sharding, mask), options)
    if options.dropout_p == 0.0:
        return local, leading, sharding
    seed = sharding.seed(query.device) if options.seed is None else replicated(options.seed)
    local = with_options(local, seed=seed)
    if sharding.is_sharded:
        offsets = attention_offsets(
            local.sizes()[0], head0=heads.start, batch0=batch.start,
            num_heads_global=sharding.shape[1], device=query.device,
        )  # fmt: skip
        local = with_options(local, dropout_offsets=offsets)
    return local, leading, sharding


def head_sharding(query: Any, key: Any) -> TensorSharding:
    """Return the sharding of a call with DTensors that are sharded on heads only.

    Raises:
        NotImplementedError: the tensors are sharded in another dimension.
    """
    sharding = _attention_sharding(query, key)
    if sharding.shards(_BATCH) > 1:
        raise NotImplementedError(
            "context_parallel requires DTensors that are sharded on heads only, got a sharded "
            "batch: pass local tensors (DTensor.to_local)"
        )
    return sharding


def _attention_sharding(query: Any, key: Any) -> TensorSharding:
    from torch.distributed.tensor import Replicate

    mesh, placements = query.device_mesh, _kept(query, (_BATCH, _HEAD))
    sharding = TensorSharding(mesh, placements, tuple(query.shape))
    parts = sharding.shards(_HEAD)
    if query.shape[1] % parts or key.shape[1] % parts:
        placements = tuple([Replicate() if p.is_shard(_HEAD) else p for p in placements])
        sharding = replace(sharding, placements=placements)
    return sharding


def _mask_of_part(call: AttentionCall, sharding: TensorSharding, mask: Mask | None) -> MaskSpec:
    """Return the mask of this rank's sequences and heads; see `_local_attention`."""
    batch, heads = sharding.part(_BATCH), sharding.part(_HEAD)

    def cut() -> MaskSpec:
        spec = call.mask
        bias = sharding.shared(spec.bias)
        if bias is not spec.bias:
            spec = replace(spec, bias=bias, bias_summary=None)
        if sharding.shards(_HEAD) > 1:
            spec = of_heads(spec, heads)
        # Packed sequences are never sharded on batch, because it is 1.
        return of_sequences(spec, batch) if sharding.shards(_BATCH) > 1 else spec

    if mask is None:
        return cut()
    sizes = (*sharding.shape[:3], call.key.shape[2], batch.start, batch.stop, heads.start)
    device = call.query.device
    return recall(mask.memo, ("shard", *sizes, heads.stop, device), mask.tensors(), device, cut)


def _of_all_heads(weights: Tensor, sharding: TensorSharding, average: bool) -> Any:
    """Return the attention weights of all heads as a DTensor.

    Args:
        weights: result of `attention_with_weights` for the local call.
        average: the weights are averaged over the heads of this rank.
    """
    from torch.distributed.tensor import Partial

    parts = sharding.shards(_HEAD)
    if not average or parts == 1:
        return sharding.from_local(weights)
    means = tuple([Partial() if p.is_shard(_HEAD) else p for p in sharding.placements])
    return sharding.from_local(weights / parts, means)


def norm(call: UncheckedNorm, want_total: bool, named: str | None) -> tuple[Tensor, Tensor | None]:
    """Compute a norm call with a DTensor as `dispatch.norm` does."""
    shape = call.input.shape
    local, sharding = _local_norm(call)
    out, total = dispatch.run_norm(local, want_total, named)
    return dispatch.norm_in_shape(sharding.from_local(out), sharding.from_local(total), shape)


def _local_norm(call: UncheckedNorm) -> tuple[NormCall, TensorSharding]:
    """Validate a norm call; return the call on this rank's shards and the results' sharding."""
    call.weight, call.bias = replicated(call.weight), replicated(call.bias)
    checked = checked_norm(call)
    input: Any = checked.input
    options = checked.options
    _check_dtensors("input", input, residual=checked.residual)
    placements = _kept(input, range(input.dim() - 1))
    sharding = TensorSharding(input.device_mesh, placements, tuple(input.shape))
    local = NormCall(
        sharding.to_local(input),
        sharding.to_local(checked.residual),
        sharding.shared(checked.weight),
        sharding.shared(checked.bias),
        options,
    )
    if options.dropout_p > 0.0:
        device = local.input.device
        seed = sharding.seed(device) if options.seed is None else replicated(options.seed)
        local = with_options(local, seed=seed, dropout_offsets=_norm_offsets(sharding, device))
    return local, sharding


def _norm_offsets(sharding: TensorSharding, device: torch.device) -> Tensor | None:
    """Return the global index of the first row of each run of consecutive rows of the shard.

    The result, int64 (runs,), is None if the call is not sharded.
    """
    leading = sharding.shape[:-1]
    sharded = [dim for dim in range(len(leading)) if sharding.shards(dim) > 1]
    if not sharded:
        return None
    last = sharded[-1]
    first = torch.zeros((), dtype=torch.int64, device=device)
    for dim in range(last):
        part = sharding.part(dim)
        own = torch.arange(part.start, part.stop, device=device)
        first = first[..., None] * leading[dim] + own
    first = first * leading[last] + sharding.part(last).start
    return first.flatten() * math.prod(leading[last + 1 :])


def _kept(tensor: Any, dims: Sequence[int]) -> tuple[Any, ...]:
    """Return a tensor's placements; all but shards of the given dimensions become Replicate."""
    from torch.distributed.tensor import Replicate, Shard

    placements = []
    for placement in tensor.placements:
        # Do not read `Shard.dim`: torch.compile would make it symbolic.
        kept = [dim for dim in dims if type(placement) is Shard and placement.is_shard(dim)]
        placements.append(placement if kept else Replicate())
    return tuple(placements)


def _check_dtensors(first: str, tensor: Any, **others: Any) -> None:
    for name, other in others.items():
        if other is not None and not is_dtensor(other):
            raise ValueError(f"{name} must be a DTensor (like {first}), got a plain tensor")
        if other is not None and other.device_mesh != tensor.device_mesh:
            raise ValueError(
                f"{name} must be on {tensor.device_mesh} (like {first}), got {other.device_mesh}"
            )
