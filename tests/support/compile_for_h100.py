"""Print, as JSON, the attention calls in the graphs of torch.compile on a simulated H100.

    python tests/support/compile_for_h100.py GUARD_LIBRARY

GUARD_LIBRARY is built from cuda_guard.cpp.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any


def calls_of(**options: Any) -> list[str]:
    """Return the names of the attention operations in the graph of a call with a mask tensor."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    import fused_attn

    trains = options.pop("trains", False)
    names: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names.extend(getattr(node.target, "__name__", "") for node in nodes)
        return graph

    def call(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return fused_attn.scaled_dot_product_attention(query, key, value, mask, **options)

    torch._dynamo.reset()
    with FakeTensorMode():
        there = {"device": "cuda", "dtype": torch.bfloat16}
        query, key, value = (
            torch.empty(2, 4, 64, 64, requires_grad=trains, **there) for _ in range(3)
        )
        mask = torch.ones(64, 64, dtype=torch.bool, device="cuda")
        torch.compile(call, fullgraph=True, backend=backend)(query, key, value, mask)
    return [name for name in names if "attention" in name or "sdpa" in name]


def main() -> None:
    ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    from lower_for_h100 import pretend

    pretend()
    found = {
        "inference": calls_of(),
        "training": calls_of(trains=True),
        "flex": calls_of(backend="flex"),
        "softcap": calls_of(softcap=3.0),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
