"""Counts of calls of attention: of torch's function under `enable()`, and of ours in `stats()`."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor


class CallKind(NamedTuple):
    """Calls that are counted together.

    Attributes:
        reason: why torch's own kernels computed them; empty if ours did.
        query: the shape of query.
        seqlen_k: keys.
        site: file and line that called torch's function; empty unless call sites are wanted.
    """

    reason: str
    query: tuple[int, ...]
    seqlen_k: int
    site: str


class CallCounts:
    """Counts of calls, which `enable()`, `enabled()` and `stats()` give; printing it shows them.

    Calls in graphs of torch.compile are not counted.

    Args:
        call_sites: tell calls from different lines of code apart, which takes a microsecond a call.

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
        """The number of calls of each kind."""
        kinds: Counter[CallKind] = Counter()
        for (reason, shape, seqlen_k, site), count in self._counts.items():
            kinds[CallKind(reason, tuple(shape), seqlen_k, site)] = count
        return kinds

    @property
    def fused(self) -> int:
        """Calls that our kernels computed."""
        return sum(count for kind, count in self.kinds.items() if not kind.reason)

    @property
    def left_to_torch(self) -> int:
        """Calls that torch's own kernels computed."""
        return self._counts.total() - self.fused

    def reset(self) -> None:
        """Start again from 0."""
        self._counts.clear()

    def to_dict(self) -> dict[str, Any]:
        """Everything in types that JSON knows."""
        kinds = [{**kind._asdict(), "count": count} for kind, count in self.kinds.most_common()]
        return {"fused": self.fused, "left_to_torch": self.left_to_torch, "kinds": kinds}

    def add(self, reason: str, query: Tensor, key: Tensor) -> None:
        """Count a call."""
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
    """The first frame outside of torch and this package, as file:line."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "fused_attn"):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


counting: list[CallCounts] = []  # of the open blocks of `stats()`


@contextlib.contextmanager
def stats(*, call_sites: bool = False) -> Iterator[CallCounts]:
    """Count the calls of attention in a block, by shape and by what computed them.

    Counted are calls of `scaled_dot_product_attention` and `varlen_attention`, whoever makes them:
    swapped modules, models of transformers, and torch's function under `enable()` where our kernels
    take it. Not counted are steps of `decode_attention`, and calls in graphs of torch.compile.

    Args:
        call_sites: tell calls from different lines of code apart.

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
