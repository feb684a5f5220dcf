"""Masks of attn-gym by `masks.from_mask_mod`: results, times and memory against FlexAttention.

    pip install --no-deps attn-gym==0.0.17
    python benchmarks/mask_mods.py

Runs on a CPU. Each mask must give the results and gradients of its dense form. FlexAttention is
compiled, and its calls alternate with ours. It has no gradients on CPUs. The last row compares a
causal mask_mod with masks.causal(), at 8,192 tokens.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attn_gym.masks as gym
import torch
from measure import CpuMeter
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

from fused_attn import masks, scaled_dot_product_attention
from fused_attn.masks.spec import spec_of_mask

RESULTS = Path(__file__).parent / "results" / "mask-mods.json"
HEADS, LENGTH, HEAD_DIM, LONG = 4, 1024, 64, 8192
OFFSETS = torch.tensor([0, 300, 301, 700, LENGTH])
GLOBAL = torch.arange(LENGTH) % 50 == 0
TREE = gym.build_tree_ancestor_matrix([-1, 0, 0, 1, 2, 2, 3, 4], device="cpu")
SQUARE = (LENGTH, LENGTH)
MODS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "causal_mask": (gym.causal_mask, SQUARE),
    "sliding_window(100)": (gym.generate_sliding_window(100), SQUARE),
    "prefix_lm(200)": (gym.generate_prefix_lm_mask(200), SQUARE),
    "doc_mask_mod(causal)": (gym.generate_doc_mask_mod(gym.causal_mask, OFFSETS), SQUARE),
    "packed_causal_doc": (gym.generate_packed_causal_doc_mask_mod(OFFSETS), SQUARE),
    "batchify(causal, 256)": (gym.batchify_mask_mod(gym.causal_mask, 256), SQUARE),
    "vision_cross_attention": (
        gym.generate_vision_cross_attention_mask_mod(torch.tensor([[0, 400], [400, LENGTH]]), 100),
        (LENGTH, 200),
    ),
    "dilated_window(64, 2)": (gym.generate_dilated_sliding_window(64, 2), SQUARE),
    "global_window(64)": (gym.generate_global_sliding_window(64, GLOBAL), SQUARE),
    "block_diffusion(32)": (gym.generate_block_diffusion_mask(LENGTH // 2, 32), SQUARE),
    "natten(7, 7)": (gym.generate_natten(32, 32, 7, 7), SQUARE),
    "tiled_natten": (gym.generate_tiled_natten(32, 32, 7, 7, 8, 8), SQUARE),
    "morton_natten": (gym.generate_morton_natten(32, 32, 7, 7), SQUARE),
    "sta_2d": (gym.generate_sta_mask_mod_2d((32, 32), (24, 24), (8, 8)), SQUARE),
    "sta_3d": (gym.generate_sta_mask_mod_3d((4, 16, 16), (4, 12, 12), (4, 4, 4)), SQUARE),
    "spatial_head": (gym.generate_spatial_head_mask_mod(64, 8, 120, 2), SQUARE),
    "temporal_head": (gym.generate_temporal_head_mask_mod(64, 8, 120, 2), SQUARE),
    "jetspec_tree": (gym.generate_jetspec_tree_causal_mask_mod(LENGTH - 8, TREE), (8, LENGTH)),
    "jetspec_training": (
        gym.generate_jetspec_training_mask_mod(LENGTH // 2, 16),
        (LENGTH // 2, LENGTH),
    ),
    "shared_prefix": (
        gym.generate_shared_prefix_mask_mod(OFFSETS, torch.tensor([-1, 0, 0, 0])),
        SQUARE,
    ),
}


def milliseconds(*calls: Callable[[], Any], rounds: int = 11) -> list[float]:
    """Return the median times of calls that alternate, after a first one each."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(rounds + 1):
        for call, own in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            own.append(time.perf_counter() - begin) if turn else None
    return [1e3 * statistics.median(own) for own in times]


def leaves_of(lengths: tuple[int, int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((1, HEADS, length, HEAD_DIM) for length in (lengths[0], lengths[1], lengths[1]))
    return [torch.randn(size, generator=generator).requires_grad_() for size in sizes]


def results_of(leaves: list[torch.Tensor], mask: masks.Mask) -> list[torch.Tensor]:
    out = scaled_dot_product_attention(*leaves, mask)
    return [out, *torch.autograd.grad(out.square().sum(), leaves)]


def measure(name: str) -> dict[str, Any]:
    mask_mod, lengths = MODS[name]
    mask, leaves = masks.from_mask_mod(mask_mod), leaves_of(lengths)
    begin = time.perf_counter()
    kind = spec_of_mask(mask, 1, HEADS, *lengths, leaves[0].device).kind
    seconds = time.perf_counter() - begin
    dense = masks.dense(create_mask(mask_mod, 1, 1, *lengths, device="cpu"))
    for got, expected in zip(results_of(leaves, mask), results_of(leaves, dense), strict=True):
        torch.testing.assert_close(got, expected)
    query, key, value = (leaf.detach() for leaf in leaves)
    block_mask = create_block_mask(mask_mod, None, None, *lengths, device="cpu")
    flex = torch.compile(flex_attention)
    calls = [lambda: scaled_dot_product_attention(query, key, value, mask)]
    try:
        flex(query, key, value, block_mask=block_mask)
        calls.append(lambda: flex(query, key, value, block_mask=block_mask))
    except Exception as error:
        print(f"{name}: FlexAttention does not compile: {str(error).splitlines()[0]}")
    times = milliseconds(*calls)
    memory = [CpuMeter().memory(call) for call in calls]
    torch.compiler.reset()
    return {
        "mask": name, "lengths": lengths, "kind": kind, "evaluated_ms": round(1e3 * seconds, 1),
        "fused_attn_ms": round(times[0], 3),
        "flex_attention_ms": round(times[1], 3) if len(times) > 1 else None,
        "fused_attn_bytes": memory[0],
        "flex_attention_bytes": memory[1] if len(times) > 1 else None,
    }  # fmt: skip


def long_causal() -> dict[str, Any]:
    """Compare a causal mask_mod with masks.causal(): times, and memory of the evaluation."""
    query, key, value = (leaf.detach() for leaf in leaves_of((LONG, LONG)))
    mask = masks.from_mask_mod(gym.causal_mask)
    memory = CpuMeter().memory(
        lambda: spec_of_mask(
            masks.from_mask_mod(gym.causal_mask), 1, HEADS, LONG, LONG, query.device
        )
    )
    own, causal = milliseconds(
        lambda: scaled_dot_product_attention(query, key, value, mask),
        lambda: scaled_dot_product_attention(query, key, value, masks.causal()),
        rounds=5,
    )
    return {"length": LONG, "mask_mod_ms": own, "causal_ms": causal, "evaluation_bytes": memory}


def main() -> None:
    rows = []
    for name in MODS:
        rows.append(measure(name))
        print(rows[-1], flush=True)
    long = long_causal()
    print(long)
    machine = CpuMeter().machine()
    RESULTS.write_text(
        json.dumps({"machine": machine, "rows": rows, "long": long}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
