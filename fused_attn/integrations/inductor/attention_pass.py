"""The pass of Inductor that `compile_pass()` makes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, cast

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from fused_attn.base import small_calls
from fused_attn.integrations.inductor import einsums, find, ops, scores
from fused_attn.integrations.inductor.find import Attention, NotFusedError, Operand
from fused_attn.version import __version__


@dataclass(frozen=True)
class SoftmaxFound:
    """A softmax in a compiled graph.

    Attributes:
        reason: why it stays as it is; empty if it and its neighbours are fused.
        shape: of the scores.
        site: file and line of the softmax.
    """

    reason: str
    shape: tuple[int, ...]
    site: str


class AttentionPass(CustomGraphPass):
    """The pass that `compile_pass()` makes; printing it shows what it found.

    Attributes:
        found: each softmax of the graphs that were compiled so far.
    """

    def __init__(self) -> None:
        self.found: list[SoftmaxFound] = []

    @property
    def options(self) -> dict[str, Any]:
        """The options of torch.compile that make it run the pass, on each graph that it meets."""
        options: dict[str, Any] = {"pre_grad_custom_pass": self}
        if hasattr(config, "pre_grad_pass_timing"):  # or a graph from its cache would be no find
            options["pre_grad_pass_timing"] = "early"
        return options

    @property
    def fused(self) -> int:
        """The number of attentions that were fused."""
        return sum(not softmax.reason for softmax in self.found)

    def __call__(self, graph: Graph) -> None:
        """Replace the attention in a graph, in place."""
        for softmax in list(find.softmaxes(graph)):
            shape = tuple(ops.shape_of(softmax) or ())
            try:
                _replace(graph, find.attention_at(softmax))
            except NotFusedError as reason:
                self.found.append(SoftmaxFound(str(reason), shape, _site(softmax)))
            else:
                self.found.append(SoftmaxFound("", shape, _site(softmax)))

    def uuid(self) -> Any:
        """What a graph in torch.compile's cache depends on."""
        files = tuple(cast(str, m.__file__) for m in (find, ops, einsums, scores))
        return __version__, small_calls.limits, get_hash_for_files((__file__, *files))

    def __repr__(self) -> str:
        lines = [f"{self.fused} of {len(self.found)} softmaxes fused with their products"]
        lines += [
            f"  scores {softmax.shape}  {softmax.reason or 'fused'}  {softmax.site}"
            for softmax in self.found
        ]
        return "\n".join(lines)


def _replace(graph: Graph, attention: Attention) -> None:
    """Put a call of the fused function in the place of a product with values."""
    output = attention.output
    with graph.inserting_before(output):
        operands = [_made(graph, o) for o in (attention.query, attention.key, attention.value)]
        new = graph.call_function(
            scores.attention_of_steps,
            (*operands, attention.steps, attention.dropout_p, output.meta["example_value"].dtype),
        )
        if attention.order is not None:
            new = graph.call_method("permute", (new, attention.order))
        # A product is contiguous, the fused function's result lies in memory as query does.
        if any(user.target not in _ANY_LAYOUT for user in output.users):
            new = graph.call_method("contiguous", (new,))
    new.meta = dict(output.meta)
    output.replace_all_uses_with(new)
    for node in reversed(attention.nodes):
        _erase(graph, node)


# Methods that take tensors of any strides, and begin what most models do with the result.
_ANY_LAYOUT = ("transpose", "permute", "reshape", "flatten", "contiguous")


def _made(graph: Graph, operand: Operand) -> Node:
    """An operand with the dimensions that the fused function wants."""
    node = operand.node
    if operand.transposed:
        return graph.call_method("transpose", (node, -2, -1))
    if operand.arranged is not None:
        node = graph.call_method("permute", (node, operand.arranged.permutation))
        for dim in operand.arranged.added:
            node = graph.call_method("unsqueeze", (node, dim))
    return node


def _erase(graph: Graph, node: Node) -> None:
    for user in list(node.users):  # calls whose results nobody reads
        _erase(graph, user)
    graph.erase_node(node)


_LINE = re.compile(r'File "(.+)", line (\d+)')


def _site(node: Node) -> str:
    """The line of the model that made a node, as file:line."""
    places = _LINE.findall(node.stack_trace or "")
    return ":".join(places[-1]) if places else ""
