"""Time decoding steps and continuous batching against torch: `python benchmarks/decode_steps.py`.

A step appends one token to each sequence and attends to its cache. torch's step writes the new rows
and calls scaled_dot_product_attention: with a mask if lengths differ, on gathered rows if the cache
is paged. Steps of fused_attn and of torch alternate, as do the runs of `generate_batch` of
transformers, with a model of random weights.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables
import torch
import torch.nn.functional as F
from measure import CpuMeter
from torch import Tensor

from fused_attn import decode_attention, masks
from fused_attn.tools.timing import medians

RESULTS = Path(__file__).parent / "results" / "decode_steps.json"
PAGE = Path(__file__).parents[1] / "docs" / "kernels-cpu.md"
HEADS, HEAD_DIM = 8, 64
SIZES = ((1, 400), (8, 400), (8, 2048))  # sequences, and keys of each
PAGES = {"pages of 16": 16, "pages of 128": 128}
PART = "decoding"  # generated part of the page
NEW_TOKENS, PROMPTS = 32, 8

Ways = dict[str, Callable[[], Any]]


def steps(batch: int, length: int) -> dict[str, Ways]:
    """Return the steps of fused_attn and of torch for each kind of cache, by name."""
    capacity = length + 128 - length % 128
    query, key, value = torch.randn(3, batch, HEADS, 1, HEAD_DIM).unbind()
    caches = torch.randn(2, batch, HEADS, capacity, HEAD_DIM).unbind()
    equal = torch.full((batch,), length - 1)
    mixed = equal - torch.arange(batch) * (length // 32)
    sequence = torch.arange(batch)

    def by_torch(lengths: Tensor) -> Tensor:
        for cache, new in zip(caches, (key, value), strict=True):
            cache[sequence, :, lengths] = new[:, :, 0]
        seen = None
        if lengths is mixed:
            seen = (torch.arange(length) <= lengths[:, None])[:, None, None]
        return F.scaled_dot_product_attention(query, *(c[:, :, :length] for c in caches), seen)

    def paged(size: int) -> Ways:
        table = torch.randperm(batch * (capacity // size)).view(batch, -1)
        pages = [
            c.unflatten(2, (-1, size)).transpose(1, 2).flatten(0, 1)[table.flatten().argsort()]
            for c in caches
        ]

        def gathered() -> Tensor:
            holder, row = table[:, (length - 1) // size], (length - 1) % size
            for cache, new in zip(pages, (key, value), strict=True):
                cache[holder, :, row] = new[:, :, 0]
            rows = (c[table].transpose(1, 2).flatten(2, 3)[:, :, :length] for c in pages)
            return F.scaled_dot_product_attention(query, *rows)

        own = functools.partial(
            decode_attention, query, *pages, cache_lengths=equal, key=key, value=value,
            block_table=table,
        )  # fmt: skip
        return {"fused_attn": own, "torch": gathered}

    decode = functools.partial(decode_attention, query, *caches, key=key, value=value)
    window = masks.sliding_window(length // 4, align="bottom_right")
    return {
        "equal lengths": {
            "fused_attn": lambda: decode(cache_lengths=equal), "torch": lambda: by_torch(equal),
        },
        "different lengths": {
            "fused_attn": lambda: decode(cache_lengths=mixed), "torch": lambda: by_torch(mixed),
        },
        "window": {"fused_attn": lambda: decode(cache_lengths=equal, attn_mask=window)},
        **{name: paged(size) for name, size in PAGES.items()},
    }  # fmt: skip


def tokens_per_second(rounds: int) -> dict[str, float]:
    """Return the speed of `generate_batch` with each attention implementation."""
    import transformers

    from fused_attn.integrations import transformers as integration

    integration.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=1000, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = [torch.randint(1000, (50 + 50 * i,)).tolist() for i in range(PROMPTS)]
    greedy = transformers.GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=512, max_batch_tokens=512, auto_switch_to_flash=False
    )

    def run(name: str) -> None:
        integration.set_implementation(model, name)
        with contextlib.redirect_stderr(io.StringIO()):
            results = model.generate_batch(
                prompts, generation_config=greedy, continuous_batching_config=batching
            )
        assert all(result.error is None for result in results.values())

    took: dict[str, list[float]] = {"fused_attn": [], "sdpa": []}
    for turn in range(rounds + 1):
        for name, own in took.items():
            begin = time.perf_counter()
            run(name)
            own.append(time.perf_counter() - begin) if turn else None
    return {name: NEW_TOKENS * PROMPTS / min(own) for name, own in took.items()}


def table(facts: dict[str, Any]) -> str:
    """Return the part of docs/kernels-cpu.md that this benchmark writes."""
    machine, speed = facts["machine"], facts["tokens_per_second"]
    about = (
        f"{machine['cpu']}, {machine['threads']} threads, `{machine['isa']}` kernels, torch "
        f"{machine['torch']}, float32, {HEADS} heads, head_dim {HEAD_DIM}; median times of a step "
        "in ms, and the speedup over torch (see benchmarks/decode_steps.py):"
    )
    rows = []
    for row in facts["rows"]:
        cells = [row["cache"], str(row["batch"]), f"{row['length']:,}", f"{row['fused_attn']:.2f}"]
        if "torch" in row:
            cells += [f"{row['torch']:.2f}", f"{row['torch'] / row['fused_attn']:.1f}"]
        rows.append([*cells, "", ""][:6])
    below = (
        f"`generate_batch` of transformers, Llama with 4 layers of width 512, {PROMPTS} prompts of "
        f"50 to {50 * PROMPTS} tokens, {NEW_TOKENS} new tokens each: {speed['fused_attn']:.0f} "
        f"tokens/s, with sdpa {speed['sdpa']:.0f}."
    )
    header = ["cache", "sequences", "keys", "fused_attn", "torch", "speedup"]
    return tables.page(about, header, rows, below, numbers=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    rows, cpu = [], torch.device("cpu")
    with torch.inference_mode():
        for batch, length in SIZES:
            for name, ways in steps(batch, length).items():
                outs = [way() for way in ways.values()]
                torch.testing.assert_close(outs[0], outs[-1])
                times = {way: round(1e3 * s, 4) for way, s in medians(ways, cpu, rounds).items()}
                rows.append({"cache": name, "batch": batch, "length": length, **times})
                print(rows[-1], flush=True)
    speed = {n: round(s, 1) for n, s in tokens_per_second(max(rounds // 40, 1)).items()}
    print(speed)
    machine = {**CpuMeter().machine(), "threads": torch.get_num_threads()}
    facts = {"machine": machine, "rows": rows, "tokens_per_second": speed}
    RESULTS.write_text(json.dumps(facts, indent=1) + "\n")
    text = PAGE.read_text("utf-8")
    PAGE.write_text(tables.replaced(text, PART, table(facts)), "utf-8")


if __name__ == "__main__":
    main()
