"""Functions that the ranks of tests/distributed/test_tensor_parallel.py run.

Each function returns the results of calls on shards and of the same calls in one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import fused_attn
from fused_attn import masks

BATCH, HEADS, HEADS_KV, SEQLEN_Q, SEQLEN_K, HEAD_DIM = 3, 4, 2, 9, 11, 8
attend = fused_attn.scaled_dot_product_attention
PLACEMENTS = {"batch": Shard(0), "heads": Shard(1), "replicated": Replicate()}
DROPOUT_P = 0.3
normal = functools.partial(torch.randn, dtype=torch.float64, requires_grad=True)
Pairs = dict[str, tuple[Tensor, Tensor]]  # name -> results of the shards and of one process


@functools.cache
def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks with dimensions ("dp", "tp"), or ("tp",) for one size."""
    names = ("dp", "tp")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def full(tensor: Any) -> Any:
    """Return the global tensor of a DTensor; other values are returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shards_of(tensors: Sequence[Tensor], mesh: DeviceMesh, *places: Any) -> list[Tensor]:
    """Distribute tensors; return DTensors that require grad."""
    return [distribute_tensor(t.detach(), mesh, places).requires_grad_() for t in tensors]


def results(outs: Any, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the global outputs, and the global gradients of their weighted sum."""
    outs = [full(out) for out in (outs if isinstance(outs, tuple) else (outs,)) if out is not None]
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).view(o.shape) for o in outs]
    finite = [torch.where(out.isfinite(), out, 0.0) for out in outs]
    loss = sum((out * weight).sum() for out, weight in zip(finite, weights, strict=True))
    grads = torch.autograd.grad(loss, leaves)
    return [t.detach() for t in (*outs, *map(full, grads))]


def pairs(name: str, got: Sequence[Tensor], want: Sequence[Tensor]) -> Pairs:
    assert len(got) == len(want)
    return {f"{name}/{i}": both for i, both in enumerate(zip(got, want, strict=True))}


def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (HEADS, SEQLEN_Q), (HEADS_KV, SEQLEN_K), (HEADS_KV, SEQLEN_K)
    return [normal(BATCH, *shape, HEAD_DIM) for shape in shapes]


def all_masks() -> dict[str, Any]:
    """Return a mask of each kind, identical on all ranks; biases require grad."""
    torch.manual_seed(2)
    whole = (BATCH, HEADS, SEQLEN_Q, SEQLEN_K)
    lengths = torch.tensor([11, 0, 7])
    ids = [torch.randint(0, 3, (BATCH, n)) for n in (SEQLEN_Q, SEQLEN_K)]
    return {
        "none": None,
        "causal": masks.causal(),
        "window": masks.sliding_window(3, 1, align="bottom_right"),
        "padding": masks.padding(lengths, torch.tensor([9, 5, 4])),
        "left padding": masks.padding(lengths, side="left") & masks.causal(),
        "prefix": masks.prefix_lm(torch.tensor([2, 5, 0])),
        "documents": masks.documents(*ids),
        "alibi": masks.alibi(torch.rand(HEADS)),
        "alibi of batch": masks.alibi(torch.rand(BATCH, HEADS)) & masks.causal(),
        "dense": masks.dense(torch.rand(whole) > 0.3),
        "dense of heads": torch.rand(1, *whole[1:]) > 0.3,
        "key mask": torch.rand(BATCH, 1, 1, SEQLEN_K) > 0.3,
        "bias": normal(whole),
        "bias of heads": normal(1, *whole[1:]),
        "bias of batch": normal(BATCH, 1, 1, SEQLEN_K),
        "bias of all": normal(whole[2:]),
    }


def attention(placed: str, dropout_p: float) -> Pairs:
    """Return outputs, lse and gradients with plain mask tensors; each rank has a different seed."""
    mesh, place, found = mesh_of(2), PLACEMENTS[placed], {}
    call = functools.partial(attend, dropout_p=dropout_p, enable_gqa=True, return_lse=True)
    for kind, mask in all_masks().items():
        leaves, of_mask = qkv(), [mask] if kind.startswith("bias") else []
        torch.manual_seed(1)
        want = results(call(*leaves, mask), [*leaves, *of_mask])
        torch.manual_seed(1 + mesh.get_local_rank())
        shards = shards_of(leaves, mesh, place)
        outs = call(*shards, mask)
        assert all(out.placements == (place,) for out in outs)
        found |= pairs(kind, results(outs, [*shards, *of_mask]), want)
    return found


def dtensor_masks(placed: str) -> Pairs:
    """Return results with sinks and with DTensor masks in several layouts."""
    mesh, found = mesh_of(2), {}
    leaves, bias = qkv(), all_masks()["bias of heads"]
    sinks = normal(HEADS)
    call = functools.partial(attend, enable_gqa=True, sinks=sinks, return_lse=True)
    want = results(call(*leaves, bias), [*leaves, bias, sinks])
    for layout in (Replicate(), Shard(1), Shard(3)):
        shards = shards_of(leaves, mesh, PLACEMENTS[placed]) + shards_of([bias], mesh, layout)
        found |= pairs(str(layout), results(call(*shards), [*shards, sinks]), want)
    return found


def cached_masks() -> tuple[bool, Pairs]:
    """Return results of three calls with one mask, and True if two equal shardings share its shard.

    The third call has another sharding.
    """
    from fused_attn.distributed import dtensors

    leaves, mask = qkv(), all_masks()["dense"]
    specs, found = [], {}
    inner = dtensors._local_attention

    def spied(*args: Any) -> Any:
        results = inner(*args)
        specs.append(results[0].mask)
        return results

    want = results(attend(*leaves, mask, enable_gqa=True), leaves)
    with mock.patch.object(dtensors, "_local_attention", spied):
        for name in ("heads", "heads", "batch"):
            shards = shards_of(leaves, mesh_of(2), PLACEMENTS[name])
            out = attend(*shards, mask, enable_gqa=True)
            found |= pairs(f"{len(specs)}", results(out, shards), want)
    return specs[0] is specs[1], found


def redistributed() -> Pairs:
    """Return results for unsupported placements, and for heads that do not divide evenly."""
    mesh, found = mesh_of(2), {}
    query, key, value = qkv()
    for name, heads, place in (
        ("queries", HEADS, Shard(2)), ("sum", HEADS, Partial()), ("three heads", 3, Shard(1))
    ):  # fmt: skip
        leaves = [t.detach().requires_grad_() for t in (query[:, :heads], key[:, :1], value[:, :1])]
        want = results(attend(*leaves), leaves)
        shards = shards_of(leaves, mesh, Replicate())
        if place == Partial():
            shards[0] = DTensor.from_local(leaves[0].detach() / 2, mesh, [place]).requires_grad_()
        else:
            shards[:1] = shards_of(leaves[:1], mesh, place)
        out = attend(*shards)
        assert out.placements == (Replicate(),)
        found |= pairs(name, results(out, shards), want)
    return found


def norms(dropout_p: float, rms: bool) -> Pairs:
    """Return results of norms on shards of each dimension, with plain and distributed weights."""
    mesh, found = mesh_of(2), {}
    torch.manual_seed(0)
    inputs, weights = [normal(3, 6, 16), normal(3, 6, 16)], [normal(16) for _ in range(2 - rms)]
    function = fused_attn.rms_norm if rms else fused_attn.layer_norm

    def call(x: Any, residual: Any, *weights: Any) -> Any:
        rest = {"residual": residual, "dropout_p": dropout_p, "return_residual": True}
        return function(x, 16, *weights, **rest)

    torch.manual_seed(1)
    want = results(call(*inputs, *weights), [*inputs, *weights])
    for place in (Shard(0), Shard(1), Shard(2), Replicate()):
        for distributed in (False, True):
            leaves = shards_of(inputs, mesh, place)
            leaves += shards_of(weights, mesh, Replicate()) if distributed else weights
            torch.manual_seed(1 + mesh.get_local_rank())
            found |= pairs(f"{place}, {distributed}", results(call(*leaves), leaves), want)
    return found


def compiled_calls() -> Pairs:
    """Return results of attention and a norm on DTensors, compiled into one graph."""
    leaves, plain, found = qkv(), [all_masks()["bias of heads"], normal(HEAD_DIM)], {}

    def call(q: Any, k: Any, v: Any, bias: Any, weight: Any) -> Any:
        out = attend(q, k, v, bias, DROPOUT_P, enable_gqa=True, seed=5)
        return fused_attn.rms_norm(out, HEAD_DIM, weight)

    want = results(call(*leaves, *plain), [*leaves, *plain])
    for name in ("batch", "heads"):
        torch._dynamo.reset()
        graph = torch.compile(call, backend="aot_eager", fullgraph=True)
        given = [*shards_of(leaves, mesh_of(2), PLACEMENTS[name]), *plain]
        found |= pairs(name, results(graph(*given), given), want)
    return found


def two_dimensions() -> Pairs:
    """Return results of attention with dropout on a mesh of two dimensions."""
    mesh, found = mesh_of(2, 2), {}
    leaves = [t.detach()[:2].requires_grad_() for t in qkv()]
    bias = normal(2, HEADS, SEQLEN_Q, SEQLEN_K)
    for name, places in (
        ("batch, heads", (Shard(0), Shard(1))), ("heads, batch", (Shard(1), Shard(0))),
        ("heads, none", (Shard(1), Replicate())), ("batch twice", (Shard(0), Shard(0))),
    ):  # fmt: skip
        both = []
        for given, seed in (
            (shards_of(leaves, mesh, *places), 1 + torch.distributed.get_rank()), (leaves, 1)
        ):  # fmt: skip
            torch.manual_seed(seed)
            out = attend(*given, bias, DROPOUT_P, enable_gqa=True)
            both.append(results(out, [*given, bias]))
        found |= pairs(name, *both)
    return found


# ---- errors -------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """Return the error message of each invalid call, by the message that is expected."""
    from fused_attn.distributed import HeadwiseParallel

    mesh = mesh_of(2)
    q, k, v = qkv()
    (shard,) = shards_of([q], mesh, Shard(1))
    ones = torch.ones(SEQLEN_Q, SEQLEN_Q), torch.ones(HEAD_DIM)
    mask, weight = shards_of(ones, mesh, Replicate())
    calls: dict[str, Callable[[], Any]] = {
        "num_heads must be divisible by the 2 ranks of the mesh, got 3": lambda: parallelize_module(
            fused_attn.nn.MultiheadAttention(12, 3), mesh, HeadwiseParallel()
        ),
        "HeadwiseParallel must be applied to fused_attn.nn": lambda: parallelize_module(
            torch.nn.Linear(3, 3), mesh, HeadwiseParallel()
        ),
        "key must be a DTensor (like query), got a plain tensor": lambda: attend(
            shard, k, v, enable_gqa=True
        ),
        "query must be a DTensor (like key), got a Tensor": lambda: attend(q, shard, shard),
        "query must be a DTensor (like attn_mask), got a Tensor": lambda: attend(q, q, q, mask),
        "input must be a DTensor (like weight), got a Tensor": lambda: fused_attn.rms_norm(
            q, HEAD_DIM, weight
        ),
    }
    return {message: error_of(call) for message, call in calls.items()}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (TypeError, ValueError, NotImplementedError) as error:
        return str(error)
    return "no error"
