"""Counters of attention calls, for `enable()`, `enabled()` and `stats()`."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CallKind(NamedTuple):
    """Group of attention calls that are counted together.

    Attributes:
        reason: why the calls ran on torch's kernels; empty if they ran on ours.
        query: shape of query.
        seqlen_k: number of keys.
        site: "file:line" of the call; empty unless call sites are recorded.
    """

    reason: str
    query: tuple[int, ...]
    seqlen_k: int
    site: str


class CallCounts:
    """Counts of attention calls, returned by `enable()`, `enabled()` and `stats()`.

    Printing the object shows a table of the counts. Calls in torch.compile graphs are not counted.

    Args:
        call_sites: count the calls of each source line separately. This adds 1 us per call.

    Example:
        >>> query = torch.randn(2, 4, 128, 32)
        >>> with fused_attn.enabled() as counts:
        ...     out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
        >>> counts.fused, counts.left_to_torch
        (1, 0)
    """

    def __init__(self, call_sites: bool = False) -> None:
        self.call_sites = call_sites
        self._counts: Counter[tuple[str, torch.Size, int, str]] = Counter()

    @property
    def kinds(self) -> Counter[CallKind]:
        """Number of calls of each kind."""
        kinds: Counter[CallKind] = Counter()
        for (reason, shape, seqlen_k, site), count in self._counts.items():
            kinds[CallKind(reason, tuple(shape), seqlen_k, site)] = count
        return kinds

    @property
    def fused(self) -> int:
        """Number of calls that ran on our kernels."""
        return sum(count for kind, count in self.kinds.items() if not kind.reason)

    @property
    def left_to_torch(self) -> int:
        """Number of calls that ran on torch's kernels."""
        return self._counts.total() - self.fused

    def reset(self) -> None:
        """Reset all counts to 0."""
        self._counts.clear()

    def to_dict(self) -> dict[str, Any]:
        """Return all counts as a JSON-serializable dict, most frequent kinds first."""
        kinds = [{**kind._asdict(), "count": count} for kind, count in self.kinds.most_common()]
        return {"fused": self.fused, "left_to_torch": self.left_to_torch, "kinds": kinds}

    def add(self, reason: str, query: Tensor, key: Tensor) -> None:
        """Count one call; `reason` is why it ran on torch's kernels, "" if it ran on ours."""
        seqlen_k = key.size(-2) if key.dim() > 1 else 0
        site = _call_site() if self.call_sites else ""
        self._counts[reason, query.shape, seqlen_k, site] += 1

    def __repr__(self) -> str:
        lines = [f"{self.fused} calls fused, {self.left_to_torch} left to torch"]
        for kind, count in self.kinds.most_common():
            sizes = f"query {kind.query}, {kind.seqlen_k} keys"
            where = f"  {kind.site}" if kind.site else ""
            lines.append(f"  {count:6}  {sizes}  {kind.reason or 'fused'}{where}")
        return "\n".join(lines)


def _call_site() -> str:
    """Return "file:line" of the innermost stack frame outside torch and fused_attn."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "fused_attn"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


counting: list[CallCounts] = []  # counters of the `stats()` blocks that are currently open


@contextlib.contextmanager
def stats(*, call_sites: bool = False) -> Iterator[CallCounts]:
    """Count the attention calls in a `with` block, by shape and by the kernels that ran them.

    All calls of `scaled_dot_product_attention` and `varlen_attention` are counted. This includes
    calls by swapped modules and by models of transformers. It also includes calls of torch's
    `scaled_dot_product_attention` under `enable()` if they run on our kernels. Calls of
    `decode_attention` and calls in torch.compile graphs are not counted.

    Args:
        call_sites: count the calls of each source line separately.

    Example:
        >>> layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> report = fused_attn.swap_modules(layer)
        >>> with fused_attn.stats() as counts:
        ...     out = layer(torch.randn(2, 10, 64))
        >>> counts.fused
        1
    """
    counts = CallCounts(call_sites)
    counting.append(counts)
    try:
        yield counts
    finally:
        counting.remove(counts)
