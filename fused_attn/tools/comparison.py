"""Report of `compare`: the errors of each tensor, the verdict and the formatting of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_attn.base.torch_state import dtype_name
from fused_attn.call.call_counts import CallCounts
from fused_attn.integrations.attention_in_code import CALLS_SDPA
from fused_attn.swap import SwapReport
from fused_attn.tools.terminal import aligned

# Header of `ComparisonReport.table`. Columns that begin with ">" are aligned to the right.
COLUMNS = ("tensor", "kind", ">eager max", ">fused max", ">limit", ">eager rms", ">fused rms", "")


@dataclass(frozen=True)
class ComparisonRow:
    """Errors of one tensor of a model, measured against float64.

    Attributes:
        name: name of a module, a parameter or a model output.
        kind: "output" (of the model), "layer output", "input grad" or "param grad".
        eager_max, eager_rms: maximum and root mean square error with eager attention.
        fused_max, fused_rms: maximum and root mean square error of the fused model.
        limit: upper bound that the contract sets on fused_max.
        ok: True if fused_max <= limit.
        binding: True if the row counts for the verdict. Layer outputs do not count, because their
            errors accumulate over the preceding layers. Tensors without a finite value in float64
            do not count either.
    """

    name: str
    kind: str
    eager_max: float
    eager_rms: float
    fused_max: float
    fused_rms: float
    limit: float
    ok: bool
    binding: bool

    @property
    def above(self) -> bool:
        """Return True if the row makes the verdict fail."""
        return self.binding and not self.ok

    @property
    def module(self) -> str:
        """Return the module that the tensor belongs to, or the name of a model output."""
        return module_of(self.name, self.kind)

    @property
    def share(self) -> float:
        """Return the fused model's maximum error as a fraction of the limit."""
        return self.fused_max / self.limit if self.limit else self.fused_max

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, one cell per column of `COLUMNS`."""
        numbers = (self.eager_max, self.fused_max, self.limit, self.eager_rms, self.fused_rms)
        verdict = ("ok" if self.ok else "ABOVE LIMIT") if self.binding else ""
        return (self.name, self.kind, *(f"{number:.2e}" for number in numbers), verdict)


@dataclass
class ComparisonReport:
    """Result of `compare`. Printing it shows the verdict and the findings by module.

    Attributes:
        rows: one row per compared tensor, in execution order.
        dtype: dtype of the model's parameters.
        swap: modules that were swapped for the fused run, and modules that were not.
        notes: remarks that help to interpret the errors.
        calls: counts of the calls of torch's scaled_dot_product_attention in the fused run; None
            if `compare` ran without `enable`.
    """

    rows: list[ComparisonRow]
    dtype: torch.dtype
    swap: SwapReport
    notes: list[str] = field(default_factory=list)
    calls: CallCounts | None = None

    @property
    def ok(self) -> bool:
        """Return True if there are binding rows and all of them are within the contract."""
        binding = [row for row in self.rows if row.binding]
        return bool(binding) and all(row.ok for row in binding)

    def shown_rows(self, parameters: bool = False) -> list[ComparisonRow]:
        """Return the rows grouped by module, with the outputs of the model first.

        Args:
            parameters: return the gradient of every parameter. If False, return only the gradient
                of each module that is closest to its limit.
        """
        modules: dict[str, dict[str, list[ComparisonRow]]] = {}
        for row in sorted(self.rows, key=lambda row: row.kind != "output"):
            modules.setdefault(row.module, {}).setdefault(row.kind, []).append(row)
        groups = [rows for kinds in modules.values() for rows in kinds.values()]
        if parameters:
            return [row for rows in groups for row in rows]
        return [_worst(rows) for rows in groups]

    def table(self, parameters: bool = False) -> str:
        """Return `shown_rows` as an aligned text table."""
        return aligned(COLUMNS, [row.cells() for row in self.shown_rows(parameters)])

    def left_alone(self) -> list[str]:
        """Return one line per type of module and reason for not swapping it, with module names."""
        left: dict[tuple[str, str], list[str]] = {}
        for entry in (*self.swap.skipped, *self.swap.unfused):
            if self.calls is None or entry.reason != CALLS_SDPA:  # `calls` reports SDPA calls
                left.setdefault((entry.type, entry.reason), []).append(entry.name)
        return [
            f"left alone: {len(names)} x {type_name} ({_some(names)}): {reason}"
            for (type_name, reason), names in left.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of JSON-serializable values."""
        return {
            "ok": self.ok,
            "dtype": dtype_name(self.dtype),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "swapped": [dataclasses.asdict(s) for s in self.swap.swapped],
            "skipped": [dataclasses.asdict(s) for s in self.swap.skipped],
            "unfused": [dataclasses.asdict(s) for s in self.swap.unfused],
            "calls": None if self.calls is None else self.calls.to_dict(),
            "notes": list(self.notes),
        }

    def title(self) -> str:
        """Return a line that describes the rows: reference, dtype and number of swapped modules."""
        swapped = len(self.swap.swapped)
        return f"errors against float64, {dtype_name(self.dtype)} model, {swapped} modules swapped"

    def verdict(self) -> str:
        """Return the verdict as text, with the number of outputs and gradients."""
        binding = [row for row in self.rows if row.binding]
        if self.ok:
            return f"within the contract: {len(binding)} outputs and gradients"
        above = sum(row.above for row in self.rows)
        return f"ABOVE THE LIMIT: {above} of {len(binding)} outputs and gradients"

    def remarks(self) -> list[str]:
        """Return the lines below the table: notes, call counts and modules left alone."""
        calls = [] if self.calls is None else [f"under enable(): {self.calls}"]
        return [*self.notes, *calls, *self.left_alone()]

    def __str__(self) -> str:
        return "\n".join([self.verdict(), self.title(), self.table(), *self.remarks()])


def module_of(name: str, kind: str) -> str:
    """Return the module that a compared tensor belongs to, or the name of a model output."""
    return name.rpartition(".")[0] if kind.startswith("param grad") else name


def _worst(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return the row that is closest to its limit or exceeds it most, labeled with the count."""
    worst = max(rows, key=lambda row: (row.above, row.share))
    if len(rows) == 1:
        return worst
    return dataclasses.replace(worst, kind=f"{worst.kind}, worst of {len(rows)}")


def _some(names: Sequence[str]) -> str:
    """Join the first three names; append "..." if there are more."""
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])
