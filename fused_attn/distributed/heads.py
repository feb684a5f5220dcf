"""Attention modules whose heads are split over the ranks of a DeviceMesh.

`fused_attn.distributed.HeadwiseParallel` sets `head_mesh` on such a module and shards its
projections. Each rank projects its heads with local tensors, and calls attention with DTensors that
are sharded on heads, so that masks and dropout apply to its heads (see dtensors.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fused_attn.call.handlers import is_dtensor

_HEAD = 1


def local(parameter: Any) -> Any:
    """Return this rank's rows of a sharded parameter; other values are returned unchanged."""
    return parameter.to_local() if is_dtensor(parameter) else parameter


def packed_rows(bias: Any, mesh: Any) -> Tensor:
    """Return this rank's rows of the replicated bias of a packed projection, (3 * embed_dim,)."""
    from torch.distributed.tensor import Partial

    whole = bias.to_local(grad_placements=[Partial()])
    return whole.unflatten(0, (3, mesh.size(), -1))[:, mesh.get_local_rank()].flatten()


def shared_input(x: Any, mesh: Any) -> Tensor:
    """Return an input that all ranks project, as a local tensor; its gradient sums over all heads.

    Args:
        x: a plain tensor that is equal on all ranks, or a DTensor.
        mesh: one-dimensional DeviceMesh over which the heads are split.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    if not is_dtensor(x):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return x.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])


def on_heads(
    attend: Callable[..., Any], mesh: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any
) -> Any:
    """Call attend(query, key, value, *args) on DTensors that are sharded on heads.

    Args:
        attend: an attention function of this package.
        mesh: one-dimensional DeviceMesh over which the heads are split.
        query, key, value: local tensors, with the heads of this rank in dimension 1.

    Returns:
        The output of this rank's heads. If attend also returns attention weights, a tuple of this
        output and the weights of all heads.
    """
    from torch.distributed.tensor import DTensor, Shard

    heads = [
        DTensor.from_local(t, mesh, [Shard(_HEAD)], run_check=False) for t in (query, key, value)
    ]
    results = attend(*heads, *args)
    if isinstance(results, tuple):
        out, weights = results
        return out.to_local(), weights.full_tensor()
    return results.to_local()
