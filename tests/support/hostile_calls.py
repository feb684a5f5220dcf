"""Calls with hostile arguments: `python hostile_calls.py [GROUP ...]` runs them.

Each call of a group replaces one argument of a valid call. The call must return, or raise an
exception with a message. With backend=None, its result must be close to that of the reference.
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import cuda_emulation
import torch
from torch import Tensor

import fused_attn
from fused_attn import masks, nn
from fused_attn.backends import cpp, cuda
from fused_attn.base import small_calls
from fused_attn.call.attention import AttentionCall, AttentionOptions, AttentionOutputs
from fused_attn.call.norm import NormCall, NormOptions
from fused_attn.compat import flash_attn, flex_attention, xformers
from fused_attn.masks.spec import MaskSpec

Groups = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
HUGE = 1 << 40
NUMBERS = (
    None, -1, HUGE, math.nan, "x", object(), 1 << 70, True, 0, 0.5, 2.0, math.inf, -math.inf,
    1j, [], (2, "x"), (-1,), (HUGE, HUGE), torch.zeros(2), torch.float32,
)  # fmt: skip
_DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float64", "complex64")


class Subclass(Tensor):
    """Tensor subclass that overrides nothing."""


class Liar:
    """Object that pretends to be a tensor."""

    shape, dtype, device, ndim = torch.Size([2, 2, 5, 16]), torch.float32, torch.device("cpu"), 4
    is_nested = is_sparse = requires_grad = False
    dim, is_neg, data_ptr = lambda s: 4, lambda s: False, lambda s: 8


def resized(t: Tensor, size: int, offset: int = 0) -> Tensor:
    """Return a tensor whose storage has been resized to `size` bytes."""
    view = torch.cat([t.new_zeros(offset), t.flatten()])[offset:].view(t.shape)
    view.untyped_storage().resize_(size)
    return view


def misaligned(t: Tensor) -> Tensor:
    memory = bytearray(b"x" + t.contiguous().numpy().tobytes())
    return torch.frombuffer(memory, dtype=t.dtype, offset=1).view(t.shape)


VARIANTS: dict[str, Callable[[Tensor], Any]] = {
    **{f"{n!r:.20}": lambda t, n=n: n for n in NUMBERS[:6]},
    **{name: lambda t, name=name: t.to(getattr(torch, name)) for name in _DTYPES},
    "liar": lambda t: Liar(),
    "numpy": lambda t: t.numpy(),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t, t]),
    "meta": lambda t: t.to("meta"),
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape),
    "subclass": lambda t: t.as_subclass(Subclass),
    "scalar": lambda t: t.flatten()[0],
    "longer": lambda t: torch.cat([t, t]),
    "more dims": lambda t: t[(None,) * 7],
    "flat": lambda t: t.flatten(),
    "no batch": lambda t: t[:0],
    "transposed": lambda t: t.transpose(0, -1),
    "short row": lambda t: t[..., :-1],
    "expanded": lambda t: t.flatten()[:1].expand(t.shape),
    "huge": lambda t: t.flatten()[:1].expand((HUGE, *t.shape[1:])),
    "huge rows": lambda t: t.flatten()[:1].expand((*t.shape[:-1], HUGE)),
    "overlapping": lambda t: t.contiguous().as_strided(t.shape, (1,) * t.dim()),
    "misaligned": misaligned,
    "resized to 0": lambda t: resized(t, 0),
    "resized to 8": lambda t: resized(t, 8),
    "view of a resized": lambda t: resized(t, 0, 5),
    "end of a resized": lambda t: resized(t, t.numel() * t.element_size(), 5),
    "leaf": lambda t: t.detach().clone().requires_grad_(),
    "negated": lambda t: torch._neg_view(t),
    "nan": lambda t: t * math.nan,
    "out of range": lambda t: t + 1000,
    "far out of range": lambda t: t * 1e4 if t.is_floating_point() else t - (1 << 62),
}


def ints(*values: int) -> Tensor:
    return torch.tensor(values)


def public() -> Groups:
    """Return the public functions, with the arguments of a valid call."""
    torch.manual_seed(0)
    qkv = {n: torch.randn(2, 2, 5, 16) for n in ("query", "key", "value")}
    x, bias, w, ids = torch.randn(2, 5, 16), torch.randn(2, 1, 5, 5), torch.ones(16), ints(2, 5)
    one = {n: t[:, :, :1].contiguous() for n, t in qkv.items()}
    bshd = {n[0]: t.transpose(1, 2).contiguous() for n, t in qkv.items()}
    packed: dict[str, Any] = {n: t[0].transpose(0, 1).contiguous() for n, t in qkv.items()}
    packed |= {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 2, 5)}
    packed |= {"max_seqlen_q": 3, "max_seqlen_k": 3}
    options = {"dropout_p": 0.0, "is_causal": False, "scale": 0.2, "softcap": 2.0, "backend": None}
    norm = {"input": x, "normalized_shape": (16,), "weight": w, "residual": x, "eps": 1e-5}
    norm |= {"dropout_p": 0.0, "backend": None}
    caches = {"query": one["query"], "key_cache": qkv["key"], "value_cache": qkv["value"]}
    caches |= {"cache_lengths": ints(3, 4), "key": one["key"], "value": one["value"]}
    table = {"cos": torch.rand(7, 8), "sin": torch.rand(7, 8), "positions": ids.expand(2, 2)}
    sdpa, small = fused_attn.scaled_dot_product_attention, torch.nn.Sequential(nn.LayerNorm(16))

    def masked(make: Callable[..., Any], **arguments: Any) -> tuple[Any, dict[str, Any]]:
        return lambda **given: sdpa(*qkv.values(), make(**given)), arguments

    def under_hook(function: Callable[..., Any], leaf: Tensor) -> tuple[Any, dict[str, Any]]:
        """Return a function that runs a backward with replaced saved tensors, and its arguments."""

        def run(saved: Any) -> Any:
            unpack = lambda t: saved if t.shape == leaf.shape else t  # noqa: E731
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
                x = leaf.clone().requires_grad_()
                return torch.autograd.grad(function(x).sum(), x)

        return run, {"saved": leaf}

    mha = {**dict.fromkeys(("query", "key", "value"), x), "key_padding_mask": bias[:, 0, 0] > 0}
    return {
        "sdpa": (sdpa, {**qkv, "attn_mask": bias, **options}),
        "sdpa bool": (sdpa, {**qkv, "attn_mask": bias > 0, "sinks": w[:2], "backend": None}),
        "varlen": (fused_attn.varlen_attention, {**packed, **options}),
        "decode": (fused_attn.decode_attention, {**caches, "backend": None}),
        "paged": (fused_attn.decode_attention, {**caches, "block_table": ints(1, 0)[:, None]}),
        "layer_norm": (fused_attn.layer_norm, {**norm, "bias": w}),
        "rms_norm": (fused_attn.rms_norm, norm),
        "rotary": (fused_attn.rotary_embedding, {"input": qkv["query"][:, :, :2], **table}),
        "sdpa backward": under_hook(lambda x: sdpa(x, x, x), qkv["query"]),
        "norm backward": under_hook(lambda x: fused_attn.layer_norm(x, 16), x),
        "causal": masked(masks.causal, align="top_left"),
        "sliding_window": masked(masks.sliding_window, left=1, right=0, align="top_left"),
        "padding": masked(masks.padding, key_lengths=ids, query_lengths=ids, side="left"),
        "prefix_lm": masked(masks.prefix_lm, prefix_lengths=ids),
        "documents": masked(masks.documents, query_ids=ints(0, 0, 1, 1, 2).expand(2, 5)),
        "alibi": masked(masks.alibi, slopes=torch.rand(2), align="top_left"),
        "dense": masked(lambda mask: masks.dense(mask), mask=bias > 0),
        "bias": masked(lambda mask: masks.bias(mask), mask=bias),
        "from_mask_mod": masked(masks.from_mask_mod, mask_mod=lambda b, h, i, j: i >= j),
        "mha": (nn.MultiheadAttention(16, 2, batch_first=True), {**mha, "attn_mask": bias[0, 0]}),
        "encoder": (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), {"src": x}),
        "MultiheadAttention": (nn.MultiheadAttention, {"embed_dim": 16, "num_heads": 2}),
        "LayerNorm": (nn.LayerNorm, {"normalized_shape": 16, "eps": 1e-5}),
        "swap_modules": (fused_attn.swap_modules, {"model": small, "attention": True}),
        "use_backend": (lambda name: fused_attn.use_backend(name).__enter__(), {"name": "cpp"}),
        "flash_attn": (flash_attn.flash_attn_func, {**bshd, "dropout_p": 0.0, "softcap": 0.0}),
        "flex": (flex_attention.flex_attention, {**qkv, "scale": 0.2}),
        "xformers": (xformers.ops.memory_efficient_attention, {
            **dict(zip(("query", "key", "value"), bshd.values(), strict=True)), "p": 0.0}),
    }  # fmt: skip


def bindings() -> Groups:
    """Return the functions of the compiled modules, with the arguments of a valid call."""
    q, k, v = torch.randn(3, 2, 2, 5, 16)
    options, module, rows = AttentionOptions(0.2), cpp._cpu, ints(0, 5)
    bias, visible = torch.randn(2, 1, 5, 5), torch.rand(2, 1, 5, 5) > 0.3
    summary = torch.ones(2, 1, 1, 1, dtype=torch.uint8)
    tables = {
        "bias": bias, "bias_summary": summary, "dense": visible, "dense_summary": summary,
        "key_mask": visible[:, :, :1], "slopes": torch.rand(2, 2), "band_lo": -2, "band_hi": 3,
        "bounds": ints(0, 5, 0, 5, -9, 9, 0, 0).repeat(2, 1), "bits": torch.full((2, 1, 5, 1), -1),
        "query_documents": rows.repeat_interleave(5).view(2, 5), "alibi_offset": 0,
        "key_documents": rows.repeat_interleave(5).view(2, 5), "num_threads": 1,
        "intervals": rows.repeat(2, 2, 5, 1),
    }  # fmt: skip
    call = AttentionCall(q, k, v, MaskSpec(), options)
    saved = AttentionOutputs._make(module.attention_fwd(call, True, True, 1))
    of_keys, empty = replace(call, value=q[..., :0]), q[..., :0]
    lse = {"out": empty, "lse": saved.lse, "lse_residual": saved.lse_residual, "num_threads": 1}
    grads = {f"grad_{n}": q.clone() for n in ("query", "key", "value")}
    x, w = torch.randn(6, 16), torch.ones(16)
    ends = {"cu_seqlens_q": ints(0, 2, 5), "cu_seqlens_k": ints(0, 2, 5)}

    def fwd(num_threads: Any = 1, **given: Any) -> Any:
        return module.attention_fwd(replace(call, **given), True, True, num_threads)

    def packed(**given: Any) -> Any:
        return fwd(query=q[:1], key=k[:1], value=v[:1], mask=MaskSpec(**given))

    def bwd(grad_out: Any, grad_lse: Any, needs_bias: Any, **outputs: Any) -> Any:
        results = tuple(outputs.values())
        return module.attention_bwd(call, results, grad_out, grad_lse, needs_bias, 1)

    def decode(query: Any, key: Any, value: Any, mask: Any, *rest: Any) -> Any:
        step = AttentionCall(query, key, value, mask, AttentionOptions(0.2, decoding=True))
        return module.attention_decode(step, *rest)

    def norm(num_threads: Any, seed: Any, p: Any, **given: Any) -> Any:
        norm_call = NormCall(bias=None, options=NormOptions(1e-5, False, p, seed), **given)
        return module.norm_fwd(norm_call, True, True, num_threads)

    def named(name: str, *first: Any, of: Any = module, **more: Any) -> Callable[..., Any]:
        return lambda **given: getattr(of, name)(*first, **given, **more)

    result: Groups = {
        "_fwd": (fwd, {"query": q, "key": k, "value": v, "mask": MaskSpec(), "options": options}),
        "_masks": (lambda num_threads, **given: fwd(num_threads, mask=MaskSpec(**given)), tables),
        "_decode": (lambda **given: decode(*given.values()), {
            "query": q[:, :, :2], "key": k.clone(), "value": v.clone(), "mask": MaskSpec(),
            "block_table": ints(0, 1, 1, 0).view(2, 2), "seqlen_k": 9, "ends": (7, 9),
            "new_key": k[:, :, :3].clone(), "new_value": v[:, :, :3].clone(), "want_lse": True,
            "num_threads": 1}),
        "_decode a contiguous cache": (lambda **given: decode(*given.values()), {
            "query": q[:, :, :2], "key": k.clone(), "value": v.clone(), "mask": MaskSpec(),
            "block_table": None, "seqlen_k": 5, "ends": (4, 5), "new_key": k[:, :, :3].clone(),
            "new_value": v[:, :, :3].clone(), "want_lse": True, "num_threads": 1}),
        "_packed": (packed, {**ends, "max_seqlen_q": 3, "max_seqlen_k": 3}),
        "_bwd": (bwd, {
            **saved._asdict(), "grad_out": q, "grad_lse": saved.lse, "needs_bias": False}),
        "_weights": (named("attention_weights", of_keys), {
            **lse, "weights": torch.empty(2, 2, 5, 5), "average": False}),
        "_weights_bwd": (named("attention_weights_bwd", of_keys), {
            **lse, "grad_query": q.clone(), "grad_key": k.clone(), "row_sums": saved.lse.clone(),
            "grad_weights": torch.rand(2, 2, 5, 5), "grad_weights_factor": 1.0}),
        "_norm": (norm, {
            "input": x, "residual": x, "weight": w, "num_threads": 1, "seed": ints(1), "p": 0.1}),
        "_activation": (named("activation"), {
            "input": x, "bias": w, "out": x.clone(), "activation": 1, "dropout_p": 0.1, "seed": 3,
            "rows": 6, "columns": 16, "dtype": 0, "num_threads": 1}),
        "_rotary": (lambda num_threads, out, **given: module.rotary(
            *given.values(), False, False, False, out, num_threads), {
            "num_threads": 1, "out": q.clone(), "input": q, "cos": torch.rand(7, 8),
            "sin": torch.rand(7, 8), "positions": torch.zeros(2, 5, dtype=torch.int64)}),
        "_summary": (named("tile_summary"), {"tensor": visible, "summary": summary.clone()}),
        "_kinds": (named("tile_kinds", call), {"kinds": summary.repeat(1, 2, 1, 1)}),
        "_empty": (lambda **given: module.empty_tensor(*given.values()), {
            "shape": (2, 3), "strides": (3, 1), "dtype": 0}),
    }  # fmt: skip
    if not cuda.emulated():
        return result
    gpu = {"of": cuda.module.compiled(), "tf32": False, "device": -1, "stream": 0}
    tokens, lengths = 20, torch.tensor([2, 3], dtype=torch.int32)
    x = q.reshape(tokens, 16)
    norm_call = NormCall(x, None, w, w, NormOptions(1e-5, False))
    out = {"out": q.clone(), "lse": saved.lse.clone()}
    mean = {"mean": torch.zeros(tokens), "rstd": torch.zeros(tokens)}
    return result | {
        "_cuda fwd": (named("attention_fwd", call, **gpu), out),
        "_cuda bwd": (named("attention_bwd", call, **gpu), {
            **out, **grads, "lse_residual": saved.lse_residual, "grad_out": q,
            "row_statistics": q.new_empty(3, 2, 256), "deterministic": True}),
        "_cuda decode": (named("attention_decode", call, **gpu), {
            **out, "new_key": q[:, :, :1], "new_value": q[:, :, :1], "seqlen_new": 1,
            "cache_lengths": lengths, "num_splits": 2, "splits": q.new_empty(2, 2, 5, 2, 18),
            "block_table": lengths[:, None] - 2, "block_table_stride": 1, "page_size": 5,
            "seqlen_k": 5}),
        "_cuda norm": (named("norm_fwd", norm_call, **gpu), {"out": x.clone(), **mean}),
        "_cuda norm_bwd": (named("norm_bwd", norm_call, **gpu), {
            **mean, "grad_out": x, "grad_residual": x.clone(), "grad_weight": w.clone(),
            "partial_sums": torch.ones(2, tokens, 16), "num_parts": tokens}),
    }  # fmt: skip


# Groups and arguments whose tensors our kernels check before torch reads them. torch crashes if the
# storage of a tensor has been resized.
KERNELS = {"sdpa", "varlen", "decode", "paged", "layer_norm", "rms_norm"}
OPERANDS = {"query", "key", "value", "input", "weight", "bias", "residual"}


def hostile(group: str, arguments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a name and arguments, one of which is replaced."""
    for name, value in arguments.items():
        resizes = group[0] == "_" or (group in KERNELS and name in OPERANDS)
        if isinstance(value, Tensor):
            for kind, variant in VARIANTS.items():
                no_right_result = kind == "overlapping" and name.endswith("_cache")
                unread = "range" in kind and group == "_cuda decode"  # the host cannot check values
                if ("resized" in kind and not resizes) or no_right_result or unread:
                    continue
                try:
                    other = variant(value.detach().clone())
                except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
                    continue  # torch cannot create such a tensor
                yield f"{name}={kind}", {**arguments, name: other}
        else:
            for number in NUMBERS:
                yield f"{name}={number!r:.30}", {**arguments, name: number}


def same(got: Any, want: Any) -> bool:
    """Return True if results are close wherever the reference is finite."""
    if isinstance(got, (tuple, list)):
        return all(same(a, b) for a, b in zip(got, want, strict=True))
    if not isinstance(got, Tensor) or got.is_nested or got.device.type != "cpu":
        return True
    known = want.isfinite()
    return torch.allclose(got[known].double(), want[known].double(), 1e-2, 1e-2)


def outcome(function: Callable[..., Any], given: dict[str, Any]) -> tuple[str, bool]:
    """Run a hostile call; return a description of its outcome, and True if that is permitted."""
    copies = dict(given)
    for name, value in given.items():
        if name.endswith("_cache") and type(value) is Tensor and value.numel() < 1 << 20:
            copies[name] = value.clone()
    torch.manual_seed(0)
    try:
        got = function(**given)
    except Exception as error:
        has_message = bool(str(error)) or isinstance(error, MemoryError)
        return f"raised {type(error).__name__}: {error}"[:80], has_message
    if "backend" not in given or given["backend"] is not None:
        return "returned", True
    torch.manual_seed(0)
    try:
        return "returned", same(got, function(**{**copies, "backend": "eager"}))
    except Exception as error:
        return f"returned, but the reference raised {error}", False


def main(groups: list[str]) -> None:
    """Run groups of calls and print their number; after a crash, the last line names the call."""
    functions = {**public(), **bindings()}
    count = 0
    for group in groups or functions:
        function, arguments = functions[group]
        function(**arguments)
        for name, given in hostile(group, arguments):
            print(f"{group}({name})", end=" ", flush=True)
            what, allowed = outcome(function, given)
            print(what.replace("\n", " ") if allowed else f"WRONG: {what}", flush=True)
            count += 1
    print("calls", count)


if __name__ == "__main__":
    if os.environ.get("CUDA_EMULATED"):
        cuda_emulation.use()
    torch.set_num_threads(1)
    small_calls.limits = small_calls.NONE
    warnings.simplefilter("ignore")
    main(sys.argv[1:])
