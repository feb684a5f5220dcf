"""Recognition of the modules of a model that tensor parallelism can split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.nn import Linear, Module

from fused_attn.nn import MultiheadAttention, TransformerDecoderLayer, TransformerEncoderLayer

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))
_OUTPUTS = ("o_proj", "out_proj", "dense")
_HEAD_DIMS = ("head_dim", "attention_head_size")
# First and last linear layers of feed-forward blocks.
_FEED_FORWARD = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("up_proj",), "down_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
)
_LAYERS = (TransformerEncoderLayer, TransformerDecoderLayer)
# Layers that project query, key and value with one packed weight.
_PACKED = ("c_attn", "qkv_proj", "query_key_value", "Wqkv", "qkv")


def parallel_modules(model: Module) -> dict[str, str]:
    """Return a dict from the name of each module to split to "heads", "columns" or "rows".

    An attention module precedes its projections.

    Raises:
        NotImplementedError: an attention module cannot be split.
    """
    plan: dict[str, str] = {}
    inside: list[str] = []  # MultiheadAttention modules, which HeadwiseParallel shards as a whole
    for name, module in model.named_modules():
        if any(name.startswith(f"{own}.") for own in inside):
            continue
        if isinstance(module, MultiheadAttention):
            inside.append(name)
            plan[name] = "heads"
            continue
        for child, kind in _parts(name, module):
            plan[f"{name}.{child}".strip(".")] = kind
    return plan


def head_counts(module: Any) -> dict[str, int] | None:
    """Return the numbers of heads of an attention module; None if it cannot be split."""
    if isinstance(module, MultiheadAttention):
        return {"num_heads": module.num_heads}
    names, head_dim = projections_of(module), _head_dim(module)
    if names is None or head_dim is None:
        return None
    query, key, _ = (getattr(module, name) for name in names)
    counts = {"num_heads": query.out_features // head_dim}
    if key.out_features != query.out_features:
        counts["num_heads_kv"] = key.out_features // head_dim
    return counts


def projections_of(module: Module) -> tuple[str, str, str] | None:
    """Return the names of the linear projections of query, key and value, or None."""
    for names in _PROJECTIONS:
        if _are_linear(module, names):
            return names
    return None


def _parts(name: str, module: Module) -> Iterator[tuple[str, str]]:
    """Yield (relative name, kind) of the modules to split in an attention or feed-forward block."""
    for child, layer in module.named_children():
        if child in _PACKED and isinstance(getattr(layer, "weight", None), Tensor):
            raise NotImplementedError(
                f"{name}.{child} ({type(layer).__name__}) projects query, key and value with one "
                "weight, whose rows cannot be split because the order of their heads is unknown: "
                "replace it with three linear layers"
            )
    yield from _attention(name, module, "", module, "")
    inner, output = getattr(module, "self", None), getattr(module, "output", None)
    if isinstance(inner, Module) and isinstance(output, Module):  # as in BERT
        yield from _attention(name, inner, "self.", output, "output.")
    yield from _feed_forward(module)


def _attention(
    name: str, module: Module, prefix: str, after: Module, prefix_after: str
) -> Iterator[tuple[str, str]]:
    """Yield the parts of an attention module.

    Args:
        name: name of the block in the model, for errors.
        module: the module that has the projections of query, key and value.
        prefix: its name in the block, with a trailing dot, or "".
        after: the module that has the projection of the output.
        prefix_after: as prefix, for `after`.
    """
    names = projections_of(module)
    outputs = [output for output in _OUTPUTS if _are_linear(after, [output])]
    if names is None or not outputs or head_counts(module) is None:
        return
    if _normalizes(module, {getattr(module, projection).out_features for projection in names}):
        raise NotImplementedError(
            f"{name} cannot be split over ranks, because it normalizes query or key over all heads"
        )
    yield prefix.rstrip("."), "heads"
    for projection in names:
        yield prefix + projection, "columns"
    yield prefix_after + outputs[0], "rows"


def _feed_forward(module: Module) -> Iterator[tuple[str, str]]:
    hidden, output = getattr(module, "intermediate", None), getattr(module, "output", None)
    if _are_linear(hidden, ["dense"]) and _are_linear(output, ["dense"]):  # as in BERT
        yield "intermediate.dense", "columns"
        yield "output.dense", "rows"
    for first, last in _FEED_FORWARD:
        if not _are_linear(module, [*first, last]):
            continue
        width = getattr(module, first[0]).out_features
        if isinstance(module, _LAYERS) or not _normalizes(module, {width}):
            for name in first:
                yield name, "columns"
            yield last, "rows"
        return


def _are_linear(module: Any, names: Iterable[str]) -> bool:
    return all(isinstance(getattr(module, name, None), Linear) for name in names)


def _head_dim(module: Module) -> int | None:
    found = (getattr(module, name, None) for name in _HEAD_DIMS)
    return next((head_dim for head_dim in found if isinstance(head_dim, int)), None)


def _normalizes(module: Module, widths: set[int]) -> bool:
    """Return True if a child other than a linear layer has a weight whose width is in `widths`."""
    weights = [
        getattr(child, "weight", None)
        for child in module.children()
        if not isinstance(child, Linear)
    ]
    return any(isinstance(w, Tensor) and w.dim() == 1 and w.shape[0] in widths for w in weights)
