"""Host-side lookup of the keys that are visible to a range of queries, from mask intervals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fused_attn.masks.fields import Shape
from fused_attn.masks.intervals import Intervals, intervals_of
from fused_attn.masks.spec import MaskSpec


class VisibleKeys:
    """Lookup of the keys that are visible to any query of a range.

    For packed sequences, queries and keys are packed rows.

    Args:
        spec: the mask. Tensors on a GPU are copied to the host, which synchronizes.
        shape: (batch, num_heads, seqlen_q, seqlen_k), as for `intervals_of`.
    """

    def __init__(self, spec: MaskSpec, shape: Shape) -> None:
        spec = replace(spec, bias=None, bias_summary=None, dense_summary=None)
        spec = spec.with_tensors([None if t is None else t.detach().cpu() for t in spec.tensors()])
        self._intervals: Intervals = intervals_of(spec, shape, torch.device("cpu"))
        self._begin: Any = self._intervals.begin.numpy()
        self._end: Any = self._intervals.end.numpy()

    @property
    def work(self) -> Tensor:
        """Number of visible keys of each query, int64 (seqlen_q,), summed over the batch.

        Keys that are masked in all heads do not count. A dense tensor limits the number of keys of
        a query, so the count is an upper bound. Documents that are not contiguous are treated as
        contiguous.
        """
        begin, end = self._intervals.begin.long(), self._intervals.end.long()
        rest, count = self._intervals.rest, end - begin
        if rest.key_mask is not None:
            seen = rest.key_mask.any(1)[:, 0].expand(-1, self._intervals.seqlen_k)
            before = torch.nn.functional.pad(seen.cumsum(-1), (1, 0))
            rows = max(len(begin), len(before))
            begin, end, before = (t.expand(rows, -1) for t in (begin, end, before))
            count = before.gather(1, end) - before.gather(1, begin)
        if rest.dense is not None and self._intervals.rows is None:
            seen = rest.dense.any(1)
            count = torch.minimum(count, seen.sum(-1) * (self._intervals.seqlen_k // seen.shape[2]))
        return count.sum(0)

    def ranges(self, firsts: Any) -> tuple[Any, Any]:
        """Return, for chunks of queries, the smallest ranges that contain their visible keys.

        Conditions that intervals cannot express (`Intervals.rest`) are ignored.

        Args:
            firsts: first query of each chunk, ascending, as NumPy integers. The last chunk ends at
                the last query.

        Returns:
            First keys and ends, NumPy int64 (chunks,); both are 0 without a visible key.
        """
        visible = self._begin < self._end
        begin = np.where(visible, self._begin, self._intervals.seqlen_k).min(0)
        end = np.where(visible, self._end, 0).max(0)
        begin = np.minimum.reduceat(begin, firsts).astype(np.int64)
        end = np.maximum.reduceat(end, firsts).astype(np.int64)
        return np.minimum(begin, end), end

    @property
    def mean_work(self) -> float:
        """Mean number of visible keys per query and batch element; see `work`."""
        work, batch = self.work.double(), len(self._intervals.begin)
        return float(work.mean()) / batch if work.numel() else 0.0

    def of(self, queries: range, keys: range) -> range | None:
        """Return the smallest range that contains every visible key, or None if there is none.

        Args:
            queries, keys: positions, or packed rows.
        """
        begin = np.maximum(self._begin[:, queries.start : queries.stop], keys.start)
        end = np.minimum(self._end[:, queries.start : queries.stop], keys.stop)
        any_visible = begin < end
        if not any_visible.any():
            return None
        found = range(int(begin[any_visible].min()), int(end[any_visible].max()))
        return self._without_masked(queries, found)

    def _without_masked(self, queries: range, keys: range) -> range | None:
        """Remove the keys at both ends that are masked by conditions outside of the intervals."""
        rest, packed = self._intervals.rest, self._intervals.rows is not None
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        visible = torch.ones(len(keys), dtype=torch.bool)
        if rest.key_mask is not None:
            visible &= _any_of_key(rest.key_mask, columns)
        if rest.dense is not None and not packed:
            own = rest.dense if rest.dense.shape[2] == 1 else rest.dense[:, :, rows]
            visible &= _any_of_key(own, columns)
        if rest.query_documents is not None and rest.key_documents is not None:
            of_queries, of_keys = rest.query_documents[:, rows], rest.key_documents[:, columns]
            batch = max(len(of_queries), len(of_keys))
            pairs = zip(of_keys.expand(batch, -1), of_queries.expand(batch, -1), strict=True)
            visible &= torch.stack([torch.isin(*pair) for pair in pairs]).any(0)
        at = visible.nonzero()
        if at.numel() == 0:
            return None
        return range(keys.start + int(at[0]), keys.start + int(at[-1]) + 1)


def _any_of_key(mask: Tensor, keys: slice) -> Tensor:
    """Return, for each key, whether it is visible to any query in a 4-D bool mask."""
    mask = mask if mask.shape[3] == 1 else mask[..., keys]
    return mask.any(0).any(0).any(0)
