"""Attention of other CPU libraries, as calls on the operands of one problem.

Each library takes the operands in the layout that its own models use: (batch, seqlen, heads,
head_dim), for torch as a transposed view. What a library prepares once for a model (a compiled
graph, a filled cache, a schedule) is not in the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from shapes import Attention
from torch import Tensor

import fused_attn
from fused_attn.backends import cpp

PAGE = 128  # tokens in a page of vLLM's cache


class UnsupportedError(Exception):
    """The library does not compute the problem. The message is the reason."""


@dataclass(frozen=True)
class Call:
    """A prepared call.

    Attributes:
        run: computes the attention.
        out: converts the result of `run` to a tensor (batch, heads, seqlen_q, head_dim).
    """

    run: Callable[[], Any]
    out: Callable[[Any], Tensor] = lambda result: result


Operands = tuple[Tensor, Tensor, Tensor]  # query, key and value, (batch, heads, seqlen, head_dim)
T = TypeVar("T")
Library = Callable[[Attention, Operands], Call]


def attempt(prepare: Callable[[], T]) -> T | str:
    """Return the result of a function, or the first line of its error."""
    try:
        return prepare()
    except Exception as error:  # other libraries may raise anything
        return (str(error).strip() or repr(error)).splitlines()[0]


def fused(shape: Attention, operands: Operands) -> Call:
    mask, gqa = shape.own_mask(), shape.size.num_heads != shape.size.num_heads_kv
    return Call(lambda: fused_attn.scaled_dot_product_attention(*operands, mask, enable_gqa=gqa))


def sdpa(shape: Attention, operands: Operands) -> Call:
    gqa, causal = shape.size.num_heads != shape.size.num_heads_kv, shape.mask == "causal"
    visible = None if causal else shape.tensors()[0]
    return Call(
        lambda: F.scaled_dot_product_attention(*operands, visible, is_causal=causal, enable_gqa=gqa)
    )


def zentorch(shape: Attention, operands: Operands) -> Call:
    import zentorch  # noqa: F401

    if operands[0].dtype == torch.float16:
        raise UnsupportedError("no float16")
    if shape.size.num_heads != shape.size.num_heads_kv:
        raise UnsupportedError("equal numbers of heads only")
    visible = None if shape.mask == "causal" else shape.tensors()[0]
    added = None
    if visible is not None:
        added = torch.zeros(visible.shape, dtype=operands[0].dtype)
        added.masked_fill_(~visible, float("-inf"))
    attend = torch.ops.zentorch.zentorch_sdpa
    return Call(lambda: attend(*operands, 0.0, shape.mask == "causal", attn_mask=added)[0])


# ---- OpenVINO -----------------------------------------------------------------------------------


def openvino(shape: Attention, operands: Operands) -> Call:
    import openvino as ov
    from openvino import opset13 as ops

    dtype = operands[0].dtype
    element = {torch.float32: ov.Type.f32, torch.bfloat16: ov.Type.bf16}.get(dtype, ov.Type.f16)
    rows = [t.transpose(1, 2).contiguous() for t in operands]
    inputs = [ops.parameter(list(t.shape), element) for t in rows]
    heads = [ops.transpose(x, [0, 2, 1, 3]) for x in inputs]
    size, causal = shape.size, shape.mask == "causal"
    if (group := size.num_heads // size.num_heads_kv) > 1:
        heads[1:] = [_repeated(ops, x, shape, group) for x in heads[1:]]
    visible = None if causal else shape.tensors()[0]
    if visible is not None:
        inputs.append(ops.parameter(list(visible.shape), ov.Type.boolean))
        rows.append(visible.contiguous())
    node = ops.scaled_dot_product_attention(*heads, *inputs[3:], causal=causal)
    model = ov.Model([ops.result(ops.transpose(node, [0, 2, 1, 3]))], inputs, "attention")
    compiled = ov.Core().compile_model(model, "CPU", openvino_options(element))
    request = compiled.create_infer_request()
    for i, tensor in enumerate(rows):
        request.set_input_tensor(i, _openvino_tensor(ov, tensor))

    def out(_: Any) -> Tensor:
        data = torch.from_numpy(request.get_output_tensor(0).data.copy())
        if dtype == torch.bfloat16:  # numpy has no such type
            data = data.view(torch.bfloat16)
        return data.reshape(rows[0].shape).transpose(1, 2)

    return Call(request.infer, out)


def openvino_options(precision: Any) -> dict[str, Any]:
    """Return the options of compile_model for a type of OpenVINO, or its name."""
    return {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
    }


def _repeated(ops: Any, heads: Any, shape: Attention, group: int) -> Any:
    """Return a graph node that repeats each key head, in the form that OpenVINO recognizes."""
    size = shape.size
    last = [size.seqlen_k, size.head_dim]
    wide = ops.broadcast(ops.unsqueeze(heads, 2), [size.batch, size.num_heads_kv, group, *last])
    return ops.reshape(wide, [size.batch, size.num_heads, *last], special_zero=False)


def _openvino_tensor(ov: Any, tensor: Tensor) -> Any:
    if tensor.dtype == torch.bfloat16:
        return ov.Tensor(tensor.view(torch.int16).numpy(), ov.Shape(tensor.shape), ov.Type.bf16)
    return ov.Tensor(tensor.numpy(), shared_memory=True)


# ---- onnxruntime --------------------------------------------------------------------------------


def onnxruntime_options() -> Any:
    """Return session options: as many threads as torch, which stop spinning after a call.

    By default they spin on. Calls of other libraries then took up to twice as long (32 x 12 heads
    of 128 x 32, float32: 16 instead of 7 ms).
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def onnxruntime(shape: Attention, operands: Operands) -> Call:
    """onnxruntime's GroupQueryAttention, which is causal, or its MultiHeadAttention."""
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper

    dtype, size = operands[0].dtype, shape.size
    if dtype == torch.bfloat16:
        raise UnsupportedError("no bfloat16 on CPUs")
    element = TensorProto.FLOAT if dtype == torch.float32 else TensorProto.FLOAT16
    rows = [t.transpose(1, 2).flatten(2).contiguous().numpy() for t in operands]
    feeds = dict(zip(("query", "key", "value"), rows, strict=True))
    names, options, results = ["query", "key", "value"], {"num_heads": size.num_heads}, ["out"]
    causal = shape.mask in ("causal", "window")
    if causal and size.seqlen_q == size.seqlen_k:
        kind = "GroupQueryAttention"
        options["kv_num_heads"] = size.num_heads_kv
        if shape.mask == "window":
            options["local_window_size"] = 256
        names += ["", "", "last", "length"]
        feeds["last"] = np.full(size.batch, size.seqlen_k - 1, np.int32)
        feeds["length"] = np.array([size.seqlen_k], np.int32)
        results += ["present_key", "present_value"]
    elif shape.mask in ("none", "padding") and size.num_heads == size.num_heads_kv:
        kind = "MultiHeadAttention"
        if shape.mask == "padding":
            names += ["", "lengths"]
            feeds["lengths"] = shape.lengths().to(torch.int32).numpy()
    else:
        raise UnsupportedError("no operator for this mask and these heads")
    node = helper.make_node(kind, names, results, domain="com.microsoft", **options)
    types = {np.dtype(np.int32): TensorProto.INT32}
    graph = helper.make_graph(
        [node],
        "attention",
        [
            helper.make_tensor_value_info(n, types.get(x.dtype, element), x.shape)
            for n, x in feeds.items()
        ],
        [helper.make_tensor_value_info(n, element, None) for n in results],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(
        model.SerializeToString(), onnxruntime_options(), providers=["CPUExecutionProvider"]
    )

    def out(result: list[Any]) -> Tensor:
        own = torch.from_numpy(result[0])
        return own.unflatten(2, (size.num_heads, size.head_dim)).transpose(1, 2)

    return Call(lambda: session.run(["out"], feeds), out)


# ---- vLLM ---------------------------------------------------------------------------------------


def vllm(shape: Attention, operands: Operands) -> Call:
    """vLLM's kernel on packed queries and a paged cache, which is filled before."""
    ops = _vllm_ops()
    size, dtype = shape.size, operands[0].dtype
    if shape.mask not in ("none", "causal", "window", "padding"):
        raise UnsupportedError("no such mask")
    lengths = [size.seqlen_k] * size.batch
    if shape.mask == "padding":
        lengths = shape.lengths().tolist()
    causal = shape.mask in ("causal", "window")
    window = 256 if shape.mask == "window" else -1
    pages = [-(-n // PAGE) for n in lengths]
    cache = torch.zeros(sum(pages), size.num_heads_kv, PAGE, 2 * size.head_dim, dtype=dtype)
    key_cache, value_cache = cache.view(sum(pages), size.num_heads_kv, 2 * PAGE, -1).chunk(2, dim=2)
    table = torch.zeros(size.batch, max(pages), dtype=torch.int32)
    slots, first = [], 0
    for b, (length, own) in enumerate(zip(lengths, pages, strict=True)):
        table[b, :own] = torch.arange(first, first + own)
        slots.append(torch.arange(first * PAGE, first * PAGE + length))
        first += own
    packed = [
        torch.cat([t[b, :, :n].transpose(0, 1) for b, n in enumerate(lengths)]).contiguous()
        for t in operands[1:]
    ]
    ops.cpu_attn_reshape_and_cache(
        *packed, key_cache, value_cache, torch.cat(slots), "vec", 1.0, 1.0, "auto"
    )
    query = operands[0].transpose(1, 2).flatten(0, 1).contiguous()
    starts = torch.arange(0, len(query) + 1, size.seqlen_q, dtype=torch.int32)
    keys, result = torch.tensor(lengths, dtype=torch.int32), torch.empty_like(query)
    schedule = ops.get_scheduler_metadata(
        size.batch, size.num_heads, size.num_heads_kv, size.head_dim, keys, dtype, starts, causal,
        window, "vec", True, None, "auto",
    )  # fmt: skip

    def run() -> Tensor:
        ops.cpu_attention_with_kv_cache(
            query, key_cache, value_cache, result, starts, keys, size.head_dim**-0.5, causal, None,
            window, table, 0.0, schedule, None, None, 1.0, 1.0, "auto",
        )  # fmt: skip
        return result

    return Call(run, lambda rows: rows.unflatten(0, (size.batch, -1)).transpose(1, 2))


def _vllm_ops() -> Any:
    """Load vLLM's library for this CPU. Its Python package is not imported."""
    package = find_spec("vllm")
    if package is None or package.origin is None:
        raise UnsupportedError("not installed")
    isa = "AVX512" if cpp.isa().startswith(("avx512", "amx")) else "AVX2"
    path = Path(package.origin).parent / f"_C_{isa}.abi3.so"
    torch.ops.load_library(str(path))
    return torch.ops._C


LIBRARIES: dict[str, Library] = {
    "fused_attn": fused, "torch": sdpa, "zentorch": zentorch, "openvino": openvino,
    "onnxruntime": onnxruntime, "vllm": vllm,
}  # fmt: skip
