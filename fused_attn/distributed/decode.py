"""Decoding with a KV cache whose positions are distributed over ranks.

Source: Dao et al. 2023, "Flash-Decoding for long-context inference", with ranks in place of splits.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fused_attn.base.torch_state import FLOATS, host_readable
from fused_attn.call.attention import AttentionCall, AttentionOptions, AttentionOutputs
from fused_attn.call.kv_cache import (
    check_decode_tensors,
    checked_cache_lengths,
    with_cache_lengths,
)
from fused_attn.distributed.agreement import agreed
from fused_attn.distributed.arguments import check_positions, fingerprint
from fused_attn.distributed.checksum import checksum
from fused_attn.distributed.merged import MergedOutputs
from fused_attn.distributed.plan import Block, Piece, pieces_of, split_at_overlap
from fused_attn.distributed.ranks import Mesh, Ranks, ranks_of
from fused_attn.distributed.ring import BlockCall
from fused_attn.distributed.sharding import Sharding
from fused_attn.masks import Mask, as_mask
from fused_attn.masks.spec import spec_of_mask


@torch.compiler.disable(recursive=True)
@torch.no_grad()
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    cache_lengths: Tensor | Sequence[int],
    positions: Sharding | None = None,
    mesh: Mesh = None,
    key: Tensor | None = None,
    value: Tensor | None = None,
    attn_mask: Tensor | Mask | None = None,
    is_causal: bool = True,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Append new keys and values to a distributed KV cache, and compute attention to all of it.

    All ranks pass the same arguments, except that each passes its part of the cache, and all get
    bitwise equal results. Apart from a message of constant size, only partial results are
    exchanged: (head_dim_v + 2) numbers of 4 bytes per query row and rank, regardless of the length
    of the sequence.

    Args:
        query: (batch, num_heads, seqlen_q, head_dim), as in fused_attn.decode_attention.
        key_cache: (batch, num_heads_kv, rows of this rank, head_dim). New keys are written to the
            rank that holds their positions.
        value_cache: (batch, num_heads_kv, rows of this rank, head_dim_v).
        cache_lengths: (batch,) integers, the number of cached positions of each sequence before the
            call, in all ranks together.
        positions: the cache positions of each rank; its length is the capacity. None means
            that ranks hold consecutive positions in their order, as many as their cache has rows.
            With several runs per rank, ranks share the work while sequences are short.
        mesh: one-dimensional DeviceMesh or process group of the ranks; None means all processes.
        key, value: new keys and values, all of them on each rank; as in decode_attention.
        attn_mask: mask of all positions, (batch, num_heads, seqlen_q, capacity), as in
            decode_attention.
        is_causal, scale, softcap, return_lse: as in decode_attention.

    Returns:
        out, (batch, num_heads, seqlen_q, head_dim_v). With return_lse, also lse, (batch, num_heads,
        seqlen_q), float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: an argument is invalid, or differs between ranks.
        RuntimeError: a rank failed or did not answer within the timeout of the process group.
    """
    groups = ranks_of(mesh)
    options = AttentionOptions(scale, softcap, decoding=True)  # type: ignore[arg-type]
    whole_mask, seqlen_new = None, 0
    shared: dict[str, int] = {}
    rows: dict[str, int] = {}
    error: Exception | None = None
    try:
        if len(groups) > 1:
            raise ValueError("mesh must have one dimension, got 2")
        check_decode_tensors(query, key_cache, value_cache, key, value)
        check_positions("key_cache", positions, key_cache.shape[2], groups)
        options = options.checked(query.shape[3], query.device)
        whole_mask = as_mask(attn_mask)
        seqlen_new = 0 if key is None else key.shape[2]
        rows = {"rows": key_cache.shape[2]}
        shared = {
            **_sizes(query, key_cache, value_cache),
            "number of new keys": seqlen_new,
            "is_causal": int(is_causal),
            "scale and softcap": hash((options.scale, options.softcap)),
            "attn_mask": checksum(whole_mask),
            "cache_lengths": _checksum_of_lengths(cache_lengths),
            "positions": fingerprint(positions),
        }
    except (ValueError, TypeError) as raised:
        error = raised
    of_ranks = agreed(groups, shared, rows, error, query.device)
    sharding, ranks = positions, groups[0]
    if sharding is None:
        sharding = Sharding.of_lengths([rank["rows"] for rank in of_ranks])
    batch, num_heads, seqlen_q, _ = query.shape
    given_lengths, _ = checked_cache_lengths(cache_lengths, query, seqlen_new, sharding.length)
    lengths = torch.as_tensor(given_lengths, device=query.device)
    mask = with_cache_lengths(
        whole_mask, is_causal and seqlen_q != 1, lengths, seqlen_new, seqlen_q
    )
    spec = spec_of_mask(mask, batch, num_heads, seqlen_q, sharding.length, query.device)
    if key is not None and value is not None:
        for cache, new in ((key_cache, key), (value_cache, value)):
            _append(cache, new, lengths, sharding, ranks.rank)
    call = AttentionCall(query, key_cache, value_cache, spec, options)
    pieces = pieces_of(sharding, ranks.rank, None)
    own = own_part(call, pieces, prefix=bool(mask.prefixes or mask.mask_mods))
    merged = _merged(ranks, own, call)
    return (merged.out, merged.lse) if return_lse else merged.out


def _sizes(query: Tensor, key_cache: Tensor, value_cache: Tensor) -> dict[str, int]:
    names = "batch", "num_heads", "seqlen_q", "head_dim"
    return {
        **dict(zip(names, query.shape, strict=True)),
        "num_heads_kv": key_cache.shape[1],
        "head_dim_v": value_cache.shape[3],
        "dtype": FLOATS.index(query.dtype),
    }


def _checksum_of_lengths(cache_lengths: Tensor | Sequence[int]) -> int:
    """Return a checksum of cache_lengths; 0 on a GPU, where reading them would synchronize."""
    if isinstance(cache_lengths, Tensor) and not host_readable(cache_lengths):
        return 0
    return checksum(None, (torch.as_tensor(cache_lengths).to(torch.int64),))


_FEW = 8  # maximum number of new positions for which `_append` does not synchronize with a GPU


def _append(cache: Tensor, new: Tensor, lengths: Tensor, sharding: Sharding, rank: int) -> None:
    """Write the new rows that belong to this rank."""
    if cache.shape[2] == 0 or new.shape[2] == 0:
        return
    table = _row_of_position(sharding, rank, cache.device)
    steps = torch.arange(new.shape[2], device=cache.device)
    row = table[lengths.to(torch.int64)[:, None] + steps]  # (batch, seqlen_new); -1: other ranks
    sequence = torch.arange(len(cache), device=cache.device)
    if new.shape[2] > _FEW:
        b, t = (row >= 0).nonzero(as_tuple=True)
        cache[b, :, row[b, t]] = new[b, :, t]
        return
    for step in range(new.shape[2]):
        # If the position belongs to another rank, rewrite row 0 with its present content.
        own, at = (row[:, step] >= 0)[:, None, None], row[:, step].clamp(min=0)
        cache[sequence, :, at] = torch.where(own, new[:, :, step], cache[sequence, :, at])


@functools.lru_cache(maxsize=16)
def _row_of_position(sharding: Sharding, rank: int, device: torch.device) -> Tensor:
    """Return the row of this rank that stores each position; -1 if another rank stores it."""
    table = torch.full((sharding.length,), -1, dtype=torch.int64, device=device)
    table[sharding.positions(rank, device)] = torch.arange(sharding.rows(rank), device=device)
    return table


def own_part(call: AttentionCall, pieces: Sequence[Piece], prefix: bool) -> MergedOutputs:
    """Return the merged partial results of the keys of this rank.

    Args:
        call: the call of all positions, with the cache of this rank.
        pieces: the positions of this rank's cache.
        prefix: True if the mask may have prefixes.
    """
    rows = range(call.query.shape[2])
    queries, merged = Piece(rows, rows, None), MergedOutputs(call.query, call.value)
    for piece in pieces:
        whole = rows, piece.positions
        for q, k in split_at_overlap(*whole) if prefix else [whole]:
            keys = piece.part(k)
            part = BlockCall(call, Block(queries.part(q), keys, keys.rows))
            merged.add(part.forward(for_backward=False), part.rows)
    return merged


def _merged(ranks: Ranks, own: MergedOutputs, call: AttentionCall) -> AttentionOutputs:
    """Merge the results of all ranks in rank order, so that they are bitwise equal on all ranks."""
    wide = own.finish(own.dtype)
    message = torch.cat([wide.out, wide.lse[..., None], wide.lse_residual[..., None]], -1)
    merged = MergedOutputs(call.query, call.value)
    for part in ranks.gather(message):
        out, lse, residual = part[..., :-2], part[..., -2], part[..., -1]
        merged.add(AttentionOutputs(out, lse, residual, None), slice(None))
    return merged.finish(call.query.dtype)
