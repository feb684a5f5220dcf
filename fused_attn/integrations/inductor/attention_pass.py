"""Inductor pass that fuses attention; `compile_pass()` returns it."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fused_attn.base import small_calls
from fused_attn.integrations.inductor import einsums, find, ops, scores
from fused_attn.integrations.inductor.find import Attention, NotFusedError
from fused_attn.version import __version__


@dataclass(frozen=True)
class SoftmaxFound:
    """A softmax in a compiled graph.

    Attributes:
        reason: the reason why it is not fused; empty if it is fused with its two matmuls.
        shape: shape of the scores.
        site: source file and line of the softmax.
    """

    reason: str
    shape: tuple[int, ...]
    site: str


class AttentionPass(CustomGraphPass):
    """Inductor pass that fuses attention; its repr lists each softmax found.

    Attributes:
        found: each softmax in the graphs that were compiled so far.
    """

    def __init__(self) -> None:
        self.found: list[SoftmaxFound] = []

    @property
    def options(self) -> dict[str, Any]:
        """Value for the `options` argument of torch.compile that runs this pass on each graph."""
        options: dict[str, Any] = {"pre_grad_custom_pass": self}
        if hasattr(config, "pre_grad_pass_timing"):  # otherwise `found` omits cached graphs
            options["pre_grad_pass_timing"] = "early"
        return options

    @property
    def fused(self) -> int:
        """Number of softmaxes in `found` that were fused."""
        return sum(not softmax.reason for softmax in self.found)

    def __call__(self, graph: Graph) -> None:
        """Replace all supported attention in a graph, in place, and update `found`."""
        for softmax in list(find.softmaxes(graph)):
            shape = tuple(ops.shape_of(softmax) or ())
            try:
                _replace(graph, find.Search(softmax).result())
            except NotFusedError as reason:
                self.found.append(SoftmaxFound(str(reason), shape, _site(softmax)))
            else:
                self.found.append(SoftmaxFound("", shape, _site(softmax)))

    def uuid(self) -> Any:
        """Return the key that identifies this pass in torch.compile's cache."""
        files = tuple(cast(str, m.__file__) for m in (find, ops, einsums, scores))
        return __version__, small_calls.limits, get_hash_for_files((__file__, *files))

    def __repr__(self) -> str:
        lines = [f"{self.fused} of {len(self.found)} softmaxes fused with their matmuls"]
        lines += [
            f"  scores {softmax.shape}  {softmax.reason or 'fused'}  {softmax.site}"
            for softmax in self.found
        ]
        return "\n".join(lines)


def _replace(graph: Graph, attention: Attention) -> None:
    """Replace weights @ value by a call of the fused function, and erase the nodes it replaces."""
    output = attention.output
    _try(attention)
    with graph.inserting_before(output):
        new = graph.call_function(scores.attention_of_steps, attention.arguments)
    new.meta = dict(output.meta)
    output.replace_all_uses_with(new)
    for node in reversed(attention.nodes):
        _erase(graph, node)


def _try(attention: Attention) -> None:
    """Run the fused call on fake tensors and raise NotFusedError if it fails.

    Otherwise, the failure would only occur when torch.compile runs the call.
    """
    arguments = map_arg(attention.arguments, lambda node: node.meta["example_value"])
    want = attention.output.meta["example_value"]
    try:
        with getattr(want, "fake_mode", contextlib.nullcontext()), torch.no_grad():
            got = scores.attention_of_steps(*arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise NotFusedError(f"the fused function rejects the arguments: {error}") from error
    if got.shape != want.shape:  # dtypes may differ here, because autocast is off
        raise NotFusedError(
            f"the fused function would return shape {tuple(got.shape)}, not {tuple(want.shape)}"
        )


def _erase(graph: Graph, node: Node) -> None:
    for user in list(node.users):  # the remaining users have unused results
        _erase(graph, user)
    graph.erase_node(node)


_LINE = re.compile(r'File "(.+)", line (\d+)')


def _site(node: Node) -> str:
    """Return the model's source line that created a node, as file:line; empty if unknown."""
    places = _LINE.findall(node.stack_trace or "")
    return ":".join(places[-1]) if places else ""
