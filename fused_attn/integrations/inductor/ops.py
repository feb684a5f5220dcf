"""Calls in a graph of torch.compile by one name each, however a model spells them.

The graphs are those that Dynamo makes: functions of torch, operators of Python, methods of Tensor,
in place or not.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

_FUNCTIONS: dict[Any, str] = {
    torch.matmul: "matmul", operator.matmul: "matmul", torch.bmm: "matmul",
    torch.einsum: "einsum", torch.baddbmm: "baddbmm",
    torch.softmax: "softmax", F.softmax: "softmax",
    torch.mul: "mul", torch.multiply: "mul", operator.mul: "mul", operator.imul: "mul",
    torch.div: "div", torch.divide: "div", torch.true_divide: "div",
    operator.truediv: "div", operator.itruediv: "div",
    torch.add: "add", operator.add: "add", operator.iadd: "add",
    torch.sub: "sub", operator.sub: "sub", operator.isub: "sub",
    torch.masked_fill: "masked_fill", torch.where: "where", torch.tanh: "tanh",
    F.dropout: "dropout", torch.dropout: "dropout",
    torch.reshape: "reshape", torch.flatten: "flatten", torch.unflatten: "unflatten",
    torch.squeeze: "squeeze", torch.unsqueeze: "unsqueeze",
    torch.nan_to_num: "nan_to_num", torch.amax: "amax",
}  # fmt: skip
_METHODS = {
    "matmul": "matmul", "bmm": "matmul", "baddbmm": "baddbmm", "softmax": "softmax",
    "mul": "mul", "multiply": "mul", "div": "div", "divide": "div", "true_divide": "div",
    "add": "add", "sub": "sub", "masked_fill": "masked_fill", "where": "where", "tanh": "tanh",
    "nan_to_num": "nan_to_num", "amax": "amax", "detach": "detach", "view": "reshape",
    "reshape": "reshape", "flatten": "flatten", "unflatten": "unflatten",
    "squeeze": "squeeze", "unsqueeze": "unsqueeze",
    "to": "cast", "float": "cast", "half": "cast", "bfloat16": "cast", "double": "cast",
    "type": "cast", "type_as": "cast", "contiguous": "cast", "clone": "cast",
}  # fmt: skip

_IN_PLACE = frozenset({
    operator.setitem, operator.iadd, operator.iand, operator.ifloordiv, operator.ilshift,
    operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow, operator.irshift,
    operator.isub, operator.itruediv, operator.ixor,
})  # fmt: skip
RESHAPES = frozenset({"reshape", "flatten", "unflatten", "squeeze", "unsqueeze"})


def op_of(node: Any) -> str:
    """The name of a call, one for all its spellings; empty for what is not listed above."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target, "")
    if node.op == "call_method":
        return _METHODS.get(str(node.target).removesuffix("_"), "")
    return ""


def in_place(node: Node) -> bool:
    """True if a call writes to its first argument."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    if node.kwargs.get("out") is not None or node.kwargs.get("inplace"):
        return True
    if node.target is F.dropout:
        return bool(argument(node, 3, "inplace", False))
    if node.target in _IN_PLACE:
        return True
    name = getattr(node.target, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    """An argument by its position or its name."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def shape_of(node: Any) -> torch.Size | None:
    """The shape of what a node gives, as it was traced; None where it is no tensor."""
    value = tensor_of(node)
    return None if value is None else value.shape


def tensor_of(node: Any) -> Tensor | None:
    """The tensor that a node gave when it was traced; it holds no values."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None
