"""Canonical names for calls in a torch.compile graph, independent of how a model spells them.

In Dynamo's graphs, the same operation may be a torch function, a Python operator or a Tensor
method, in place or not.
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
    """Return the canonical name of a call; empty if the tables above do not list it."""
    if not isinstance(node, Node):
        return ""
    if node.op == "call_function":
        return _FUNCTIONS.get(node.target, "")
    if node.op == "call_method":
        return _METHODS.get(str(node.target).removesuffix("_"), "")
    return ""


def in_place(node: Node) -> bool:
    """Return True if a call writes to an existing tensor."""
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
    """Return an argument of a call by position or name, or `default` if it is not passed."""
    if len(node.args) > index:
        return node.args[index]
    return node.kwargs.get(name, default)


def shape_of(node: Any) -> torch.Size | None:
    """Return the traced shape of a node's result; None if it is not a tensor."""
    value = tensor_of(node)
    return None if value is None else value.shape


def tensor_of(node: Any) -> Tensor | None:
    """Return the fake tensor that tracing recorded as a node's result; None if not a tensor."""
    value = node.meta.get("example_value") if isinstance(node, Node) else None
    return value if isinstance(value, Tensor) else None
