"""The report of `compare`: errors of each tensor, the verdict, and how they are shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fused_attn.call.call_counts import CallCounts
from fused_attn.integrations.attention_in_code import CALLS_SDPA
from fused_attn.swap import Skipped, SwapReport
from fused_attn.tools.terminal import aligned

# Of `ComparisonReport.table`; ">" aligns to the right.
COLUMNS = ("tensor", "kind", ">eager max", ">fused max", ">limit", ">eager rms", ">fused rms", "")


@dataclass(frozen=True)
class ComparisonRow:
    """Errors of one tensor against float64.

    Attributes:
        name: module, parameter or model output.
        kind: "output" (of the model), "layer output", "input grad" or "param grad".
        eager_max, eager_rms: maximal and root mean square error of eager attention, as measured.
        fused_max, fused_rms: the same of the fused model.
        limit: what the contract allows for fused_max.
        ok: fused_max <= limit.
        binding: the row counts for the verdict. Layer outputs do not: what they are off by has
            gathered in the layers before. Nor does what is nowhere finite in float64.
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
        """The row makes the verdict bad."""
        return self.binding and not self.ok

    @property
    def module(self) -> str:
        """The module that the tensor belongs to; an output of the model has its own name."""
        is_parameter = self.kind.startswith("param grad")
        return self.name.rpartition(".")[0] if is_parameter else self.name

    @property
    def share(self) -> float:
        """The error as a share of the limit."""
        return self.fused_max / self.limit if self.limit else self.fused_max

    def cells(self) -> tuple[str, ...]:
        """The row as text, under `COLUMNS`."""
        numbers = (self.eager_max, self.fused_max, self.limit, self.eager_rms, self.fused_rms)
        verdict = ("ok" if self.ok else "ABOVE LIMIT") if self.binding else ""
        return (self.name, self.kind, *(f"{number:.2e}" for number in numbers), verdict)


@dataclass
class ComparisonReport:
    """The result of `compare`; printing it shows the verdict and the findings by module.

    Attributes:
        rows: one for each compared tensor, in the order of execution.
        dtype: type of the model's parameters.
        swap: what was swapped for the fused run, and what was left alone.
        notes: what the numbers do not show.
        calls: counts of the calls of torch's scaled_dot_product_attention in the fused run; None
            without `enable`.
    """

    rows: list[ComparisonRow]
    dtype: torch.dtype
    swap: SwapReport
    notes: list[str] = field(default_factory=list)
    calls: CallCounts | None = None

    @property
    def ok(self) -> bool:
        """The outputs of the model and all gradients (at least one) are within the contract."""
        binding = [row for row in self.rows if row.binding]
        return bool(binding) and all(row.ok for row in binding)

    def shown_rows(self, parameters: bool = False) -> list[ComparisonRow]:
        """The rows in the order of modules, outputs of the model first.

        Args:
            parameters: show the gradient of each parameter. False: of a module, the gradient that
                is the largest share of its limit.
        """
        modules: dict[str, dict[str, list[ComparisonRow]]] = {}
        for row in sorted(self.rows, key=lambda row: row.kind != "output"):
            modules.setdefault(row.module, {}).setdefault(row.kind, []).append(row)
        groups = [rows for kinds in modules.values() for rows in kinds.values()]
        if parameters:
            return [row for rows in groups for row in rows]
        return [_worst(rows) for rows in groups]

    def table(self, parameters: bool = False) -> str:
        """`shown_rows` as an aligned text table."""
        return aligned(COLUMNS, [row.cells() for row in self.shown_rows(parameters)])

    def left_alone(self) -> list[str]:
        """A line for each kind of module that runs as it did before, with its names and why."""
        return [
            f"left alone: {len(names)} x {type_name} ({_some(names)}): {reason}"
            for (type_name, reason), names in self._left().items()
        ]

    def _left(self) -> dict[tuple[str, str], list[str]]:
        left: dict[tuple[str, str], list[str]] = {}
        for entry in self._not_swapped():
            left.setdefault((entry.type, entry.reason), []).append(entry.name)
        return left

    def _not_swapped(self) -> Iterator[Skipped]:
        yield from self.swap.skipped
        for entry in self.swap.unfused:
            if self.calls is None or entry.reason != CALLS_SDPA:  # `calls` tells of those
                yield entry

    def to_dict(self) -> dict[str, Any]:
        """Everything in types that JSON knows."""
        return {
            "ok": self.ok,
            "dtype": str(self.dtype).removeprefix("torch."),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "swapped": [dataclasses.asdict(s) for s in self.swap.swapped],
            "skipped": [dataclasses.asdict(s) for s in self.swap.skipped],
            "unfused": [dataclasses.asdict(s) for s in self.swap.unfused],
            "calls": None if self.calls is None else self.calls.to_dict(),
            "notes": list(self.notes),
        }

    def title(self) -> str:
        """A line that says what the rows are of."""
        dtype = str(self.dtype).removeprefix("torch.")
        swapped = len(self.swap.swapped)
        return f"errors against float64, {dtype} model, {swapped} modules swapped"

    def verdict(self) -> str:
        """`ok` in words."""
        binding = [row for row in self.rows if row.binding]
        if self.ok:
            return f"within the contract: {len(binding)} outputs and gradients"
        above = sum(row.above for row in self.rows)
        return f"ABOVE THE LIMIT: {above} of {len(binding)} outputs and gradients"

    def remarks(self) -> list[str]:
        """Return the lines below the table: notes, counts of calls, and modules left alone."""
        calls = [] if self.calls is None else [f"under enable(): {self.calls}"]
        return [*self.notes, *calls, *self.left_alone()]

    def __str__(self) -> str:
        return "\n".join([self.verdict(), self.title(), self.table(), *self.remarks()])


def _worst(rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """The row of a group that is closest to its limit, or furthest above."""
    worst = max(rows, key=lambda row: (row.above, row.share))
    if len(rows) == 1:
        return worst
    return dataclasses.replace(worst, kind=f"{worst.kind}, worst of {len(rows)}")


def _some(names: Sequence[str], most: int = 3) -> str:
    """The first of some names."""
    return ", ".join([*names[:most], *(["..."] if len(names) > most else [])])
