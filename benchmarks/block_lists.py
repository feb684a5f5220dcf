"""Time the block lists of structured masks against FlexAttention's create_block_mask, on one core.

    python benchmarks/block_lists.py [--longest 32768] [--json FILE]

create_block_mask evaluates seqlen_q x seqlen_k positions, so it is timed up to 8192 tokens only.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import CpuMeter
from tables import page, replaced
from torch.nn.attention.flex_attention import create_block_mask

from fused_attn import masks
from fused_attn.masks import Mask
from fused_attn.masks.intervals import block_lists, intervals_of
from fused_attn.masks.spec import spec_of_mask
from fused_attn.tools import timing

BLOCK_SIZE = (128, 128)
LONGEST_DENSE = 8192
PAGE = Path(__file__).parents[1] / "docs" / "engines.md"
PART = "block lists"  # generated part of the page
RESULTS = Path(__file__).parent / "results" / "block-lists.json"
MaskMod = Callable[..., torch.Tensor]


def cases(length: int) -> dict[str, tuple[Mask, MaskMod]]:
    """Return masks by name, each with the equivalent mask_mod of FlexAttention."""
    ids = torch.arange(length) // 700
    lengths = torch.tensor([length * 3 // 4])
    return {
        "causal": (masks.causal(), lambda b, h, q, k: q >= k),
        "sliding window 512": (
            masks.sliding_window(512),
            lambda b, h, q, k: (q >= k) & (q - k <= 512),
        ),
        "causal, padding": (
            masks.causal() & masks.padding(lengths),
            lambda b, h, q, k: (q >= k) & (k < lengths[b]),
        ),
        "causal, documents": (
            masks.causal() & masks.documents(ids[None]),
            lambda b, h, q, k: (q >= k) & (ids[q] == ids[k]),
        ),
    }


def milliseconds(function: Callable[[], Any], rounds: int = 5) -> float:
    """Return the median time of a call, each measured after a warm-up call."""
    return 1e3 * timing.medians({"": function}, torch.device("cpu"), rounds)[""]


def rows(longest: int) -> list[dict[str, Any]]:
    """Time each mask at each length."""
    found = []
    for length in (2048, 4096, 8192, 16384, 32768):
        if length > longest:
            break
        shape = (1, 1, length, length)
        for name, (mask, mask_mod) in cases(length).items():
            spec = spec_of_mask(mask, *shape, torch.device("cpu"))
            ours = milliseconds(
                lambda: block_lists(intervals_of(spec, shape, torch.device("cpu")), BLOCK_SIZE)  # noqa: B023
            )
            row = {"mask": name, "length": length, "ours_ms": round(ours, 2), "torch_ms": None}
            if length <= LONGEST_DENSE:
                theirs = milliseconds(
                    lambda: create_block_mask(mask_mod, 1, None, length, length, "cpu"),  # noqa: B023
                    rounds=1 if length > 4096 else 3,
                )
                row["torch_ms"] = round(theirs, 1)
            found.append(row)
    return found


def table(facts: dict[str, Any]) -> str:
    """Return the page's table of results."""
    machine, shown = facts["machine"], []
    for row in facts["rows"]:
        if row["length"] in (4096, LONGEST_DENSE, 32768):
            theirs = "not timed" if row["torch_ms"] is None else f"{row['torch_ms']:,.0f}"
            shown.append([row["mask"], f"{row['length']:,}", f"{row['ours_ms']:.1f}", theirs])
    about = f"Milliseconds on one core of {machine['cpu']}, torch {machine['torch']}; "
    header = ["mask", "tokens", "from intervals", "create_block_mask"]
    return page(f"{about}blocks of 128 x 128.", header, shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longest", type=int, default=32768)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {"machine": CpuMeter().machine(), "rows": rows(args.longest)}
    args.json.write_text(json.dumps(facts, indent=1) + "\n")
    if args.json == RESULTS:
        PAGE.write_text(replaced(PAGE.read_text("utf-8"), PART, table(facts)), "utf-8")
    for row in facts["rows"]:
        print(row)


if __name__ == "__main__":
    main()
