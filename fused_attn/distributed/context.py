"""Context parallelism: models whose sequences are distributed over ranks."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from fused_attn import functional
from fused_attn.call import handlers
from fused_attn.call.attention import UncheckedAttention
from fused_attn.distributed.arguments import METHODS, Arguments, Method
from fused_attn.distributed.attention import attend, with_seed
from fused_attn.distributed.balance import balanced
from fused_attn.distributed.dtensors import head_sharding
from fused_attn.distributed.ranks import Mesh, Ranks, gather_on_mesh, index_of, ranks_of, size_of
from fused_attn.distributed.sharding import Sharding
from fused_attn.masks import Mask, as_mask, causal
from fused_attn.masks.materialize import sizes_of
from fused_attn.masks.spec import MaskSpec

Makers = Literal["zigzag", "contiguous"] | Sharding | Callable[[int, int], Sharding] | None
LoadBalancer = Makers | Literal["balanced"]


@contextlib.contextmanager
def context_parallel(
    mesh: Mesh,
    *,
    buffers: Sequence[Tensor] = (),
    buffer_seq_dims: Sequence[int] = (),
    no_restore_buffers: set[Tensor] | None = None,
    mask: Tensor | Mask | None = None,
    method: Method = "auto",
    load_balancer: LoadBalancer = None,
) -> Iterator[Sharding]:
    """Distribute sequences over ranks within the block, for a model that runs in it.

    The signature is that of torch.distributed.tensor.experimental.context_parallel, with `mask`,
    `method` and `load_balancer` added. All ranks pass the same complete buffers. Within the block,
    each buffer has only the rows of this rank, and attention between them is computed as for the
    complete sequence. This applies to torch.nn.functional.scaled_dot_product_attention and to that
    of this package, and so to modules and models that call them. It does not apply to hand-written
    attention, or where a module has imported torch's function by name.

    Run the backward within the block, too: activation checkpointing calls attention again.

    Args:
        mesh: one- or two-dimensional DeviceMesh, process group, or None for all processes; see
            ring_attention.
        buffers: tensors with a sequence dimension, such as token ids, labels and position ids. They
            are sharded in place, and are complete again after the block.
        buffer_seq_dims: the sequence dimension of each buffer. These dimensions have equal sizes.
        no_restore_buffers: buffers that remain sharded after the block.
        mask: mask of the complete sequence for all attention calls. It replaces their attn_mask;
            their is_causal still applies. None means that calls may pass is_causal, but no
            attn_mask.
        method: "ring" exchanges keys and values, "all_to_all" heads; "auto" selects the one that
            sends fewer bytes for a call and its mask. Ignored for a two-dimensional mesh.
        load_balancer: "zigzag", "contiguous", "balanced", a Sharding, or a function of (length,
            number of ranks) that returns one. None means "zigzag". "balanced" calls
            `balanced_sharding` with `mask`, which should include the causal mask of the model; the
            first dimension of the first buffer is the batch.

    Yields:
        The Sharding.

    Raises:
        ValueError, TypeError: an argument is invalid, a buffer requires grad, or an attention call
            within the block does not have the rows of this rank.

    Example:
        >>> mesh = torch.distributed.init_device_mesh("cpu", (4,))  # doctest: +SKIP
        >>> with fused_attn.distributed.context_parallel(  # doctest: +SKIP
        ...     mesh, buffers=[tokens, labels, positions], buffer_seq_dims=[1, 1, 1], mask=mask
        ... ):
        ...     loss(model(tokens, positions), labels).backward()
    """
    if len(buffers) != len(buffer_seq_dims):
        count = f"{len(buffers)} values (one for each buffer)"
        raise ValueError(f"buffer_seq_dims must have {count}, got {len(buffer_seq_dims)}")
    if not buffers:
        raise ValueError("buffers must not be empty: their sizes define the sequence length")
    kept = no_restore_buffers or set()
    if any(not any(buffer is own for own in buffers) for buffer in kept):
        raise ValueError("no_restore_buffers must be a subset of buffers")
    given = as_mask(mask)
    of_mask = [] if given is None else given.tensors()
    for buffer in buffers:
        if any(buffer.data_ptr() == t.data_ptr() and t.numel() for t in of_mask):
            raise ValueError(
                "mask must not share memory with a buffer, because buffers are sharded in place: "
                "clone the mask's tensors"
            )
        if buffer.requires_grad or buffer._base is not None:
            kind = "require grad" if buffer.requires_grad else "be a view of another tensor"
            raise ValueError(f"buffers must not {kind}, because they are sharded in place")
    groups = ranks_of(mesh)
    length = _length(buffers, buffer_seq_dims)
    if load_balancer == "balanced":
        batch = buffers[0].shape[0] if buffer_seq_dims[0] % buffers[0].dim() else 1
        heads = 1 if given is None else sizes_of(given)[1]
        load_balancer = balanced(given, length, size_of(groups), batch=batch, num_heads=heads)
    sharding = _sharding(load_balancer, length, groups)
    shards = context_parallel_shard(mesh, buffers, buffer_seq_dims, load_balancer=sharding)
    complete = [None if any(b is k for k in kept) else b.clone() for b in buffers]
    calls = Calls(groups, sharding, mask, method)
    try:
        for buffer, shard in zip(buffers, shards, strict=True):
            buffer.resize_(shard.shape).copy_(shard)
        with calls.redirected():
            yield sharding
    finally:
        for buffer, whole in zip(buffers, complete, strict=True):
            if whole is not None:
                buffer.resize_(whole.shape).copy_(whole)
    if calls.count == 0:
        warnings.warn(
            "scaled_dot_product_attention was not called under context_parallel: attention that a "
            "model computes without this function is not distributed",
            stacklevel=3,
        )


def context_parallel_shard(
    mesh: Mesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Makers = None,
) -> list[Tensor]:
    """Return the rows of this rank of each tensor; differentiable.

    Args:
        mesh, load_balancer: as in context_parallel, but not "balanced", which needs a mask.
        buffers: complete tensors, the same on all ranks.
        seq_dims: the sequence dimension of each tensor. These dimensions have equal sizes.
    """
    groups = ranks_of(mesh)
    if not buffers:
        return []
    sharding = _sharding(load_balancer, _length(buffers, seq_dims), groups)
    rows = sharding.positions(index_of(groups))
    return [
        buffer.index_select(dim, rows.to(buffer.device))
        for buffer, dim in zip(buffers, seq_dims, strict=True)
    ]


def context_parallel_unshard(
    mesh: Mesh,
    buffers: Sequence[Tensor],
    seq_dims: Sequence[int],
    load_balancer: Makers = None,
) -> list[Tensor]:
    """Return complete tensors from the rows that each rank holds, on all ranks; differentiable.

    The backward returns this rank's rows of the gradient, so all ranks must compute the same
    results from the complete tensors.

    Args:
        mesh: as in context_parallel.
        buffers: the rows of this rank.
        seq_dims: the sequence dimension of each tensor.
        load_balancer: as in context_parallel_shard.

    Raises:
        ValueError: the ranks do not have the rows that load_balancer assigns to them.
    """
    groups = ranks_of(mesh)
    results = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        gathered = gather_on_mesh(groups, [buffer.shape[dim]], buffer.device)
        rows = [own for (own,) in gathered]
        sharding = _sharding(load_balancer, sum(rows), groups)
        expected = [sharding.rows(rank) for rank in range(sharding.ranks)]
        if rows != expected:
            raise ValueError(
                f"buffers must have the number of rows that load_balancer assigns to each rank, "
                f"{expected} by rank, got {rows}"
            )
        results.append(_complete(buffer, dim, sharding, groups))
    return results


class ContextParallel(ParallelStyle):
    """Parallel style of modules whose attention is distributed; for torch's parallelize_module.

    The module's inputs must be rows of this rank already. Within its forward, and that of modules
    in it, attention is computed as in context_parallel.

    Attributes:
        mask: mask of the complete sequence, or None; may be changed between forwards.
        sharding: the positions of each rank; may be changed between forwards.

    Args:
        sharding: the Sharding.
        mask, method: as in context_parallel.
    """

    def __init__(
        self, sharding: Sharding, mask: Tensor | Mask | None = None, method: Method = "auto"
    ) -> None:
        super().__init__()
        self.sharding, self.mask, self.method = sharding, mask, method
        self._open: list[contextlib.ExitStack] = []

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        groups = ranks_of(device_mesh)

        def enter(module: nn.Module, args: Any) -> None:
            stack = contextlib.ExitStack()
            stack.enter_context(Calls(groups, self.sharding, self.mask, self.method).redirected())
            self._open.append(stack)

        def leave(module: nn.Module, args: Any, results: Any) -> None:
            if self._open:  # empty if a hook before `enter` raised
                self._open.pop().close()

        # Hook all submodules, because activation checkpointing calls them again in the backward.
        for part in module.modules():
            part.register_forward_pre_hook(enter)
            part.register_forward_hook(leave, always_call=True)
        return module


class Calls:
    """Attention calls of a model whose sequences are distributed.

    Attributes:
        count: number of calls that were made.

    Args:
        groups: the ranks of each dimension of the mesh.
        sharding: the positions of each rank.
        mask, method: as in context_parallel.
    """

    def __init__(
        self,
        groups: list[Ranks],
        sharding: Sharding,
        mask: Tensor | Mask | None,
        method: Method,
    ) -> None:
        if method not in METHODS:
            raise ValueError(f'method must be "auto", "ring" or "all_to_all", got {method!r}')
        self.count = 0
        self._groups, self._sharding, self._method = groups, sharding, method
        self._mask = None if mask is None else as_mask(mask)
        self._with_causal = causal() if self._mask is None else self._mask & causal()

    @contextlib.contextmanager
    def redirected(self) -> Iterator[None]:
        """Distribute all attention calls within the block."""
        torch_function = torch.nn.functional.scaled_dot_product_attention
        fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # the fast path bypasses the function
        attention: Any = functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = attention
        try:
            with handlers.handled_by(self):
                yield
        finally:
            torch.nn.functional.scaled_dot_product_attention = torch_function
            torch.backends.mha.set_fastpath_enabled(fast_path)

    def attention(
        self, call: UncheckedAttention, want_lse: bool, named: str | None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one call, as a handler of call/handlers.py."""
        error = None
        if isinstance(call.attn_mask, MaskSpec):
            error = ValueError(
                "packed sequences (varlen_attention) are not supported under context_parallel: "
                "pass padded sequences, or call ring_attention with cu_seqlens"
            )
        elif call.attn_mask is not None and self._mask is None:
            error = ValueError(
                "attn_mask must be None under context_parallel, where it would cover only the rows "
                "of this rank: pass the mask of the complete sequence to context_parallel as mask"
            )
        self.count += 1
        tensors, options, heads = (call.query, call.key, call.value), call.options, None
        by_heads = head_sharding(*tensors[:2]) if handlers.is_dtensor(call.query) else None
        if by_heads is not None:
            heads = by_heads.part(1).start, call.query.shape[1]
            tensors = tuple(map(by_heads.to_local, tensors))
            if options.seed is None:  # must be equal on all ranks of both meshes
                ranks = *self._groups, *ranks_of(by_heads.mesh)
                options = with_seed(options, ranks, tensors[0].device)
        mask = self._with_causal if call.is_causal else self._mask
        local = Arguments(
            *tensors, mask, False, call.enable_gqa, self._sharding, options, method=self._method,
            heads=heads, backend=named, error=error,
        )  # fmt: skip
        with handlers.handled_by(None):
            out, lse = attend(local, self._groups)
        if by_heads is not None:
            out, lse = by_heads.from_local(out), by_heads.from_local(lse)
        return out, lse if want_lse else None

    def attention_with_weights(
        self, call: UncheckedAttention, average: bool, named: str | None
    ) -> tuple[Tensor, Tensor]:
        """Raise NotImplementedError."""
        raise NotImplementedError("attention weights are not available under context_parallel")


def _length(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> int:
    """Return the size of the sequence dimensions, which must be equal."""
    sizes = {buffer.shape[dim] for buffer, dim in zip(buffers, seq_dims, strict=True)}
    if len(sizes) != 1:
        raise ValueError(f"buffers must have equal sequence lengths, got {sizes}")
    return sizes.pop()


def _sharding(load_balancer: Makers, length: int, groups: list[Ranks]) -> Sharding:
    """Return the Sharding that a load balancer specifies."""
    size = size_of(groups)
    if isinstance(load_balancer, str) and load_balancer not in ("zigzag", "contiguous"):
        raise ValueError(
            'load_balancer must be "zigzag", "contiguous", "balanced" (context_parallel only), a '
            f"Sharding or a function that returns one, got {load_balancer!r}"
        )
    if load_balancer is None or load_balancer == "zigzag":
        return Sharding.zigzag(length, size)
    if load_balancer == "contiguous":
        return Sharding.contiguous(length, size)
    sharding = load_balancer if isinstance(load_balancer, Sharding) else load_balancer(length, size)
    if not isinstance(sharding, Sharding):
        raise TypeError(f"load_balancer must return a Sharding, got {type(sharding).__name__}")
    if sharding.length != length or sharding.ranks != size:
        raise ValueError(
            f"load_balancer must distribute {length} positions over {size} ranks, got {sharding}"
        )
    return sharding


def _complete(rows: Tensor, dim: int, sharding: Sharding, groups: list[Ranks]) -> Tensor:
    """Gather the complete tensor from all ranks; differentiable in the rows of this rank."""
    own = rows.movedim(dim, 0)
    counts = [sharding.rows(rank) for rank in range(sharding.ranks)]
    message = own.new_zeros(1, max(counts), *own.shape[1:])
    message[0, : len(own)] = own.detach()
    for ranks in reversed(groups):
        message = torch.cat(ranks.gather(message))
    whole = own.new_empty(sharding.length, *own.shape[1:])
    positions = [sharding.positions(rank, whole.device) for rank in range(sharding.ranks)]
    for rank, count in enumerate(counts):
        whole[positions[rank]] = message[rank, :count]
    return whole.index_copy(0, positions[index_of(groups)], own).movedim(0, dim)
