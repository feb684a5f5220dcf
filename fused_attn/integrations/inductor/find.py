"""Search for attention in a graph: query @ key^T, score steps, softmax, and weights @ value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import SymFloat, SymInt
from torch.fx import Graph, Node

from fused_attn.base import small_calls
from fused_attn.integrations.inductor import einsums
from fused_attn.integrations.inductor.ops import (
    RESHAPES,
    argument,
    in_place,
    op_of,
    shape_of,
    tensor_of,
)
from fused_attn.integrations.inductor.scores import Arrangement, Step

# Largest supported fill value for masked scores. The model replaces masked scores by the value,
# whereas the fused function adds it. Results agree up to rounding for values this low, because
# exp(-1e4 + 9e3) is 0 even in float64.
MASK_THRESHOLD = -1e4
# Methods that accept any strides. Most models apply one of them to the attention output first.
ANY_LAYOUT = ("transpose", "permute", "reshape", "flatten", "contiguous")


class NotFusedError(Exception):
    """Raised if a softmax cannot be fused; the message is the reason."""


@dataclass(frozen=True)
class Attention:
    """Attention found in a graph.

    Attributes:
        output: node of weights @ value.
        arguments: arguments with which `attention_of_steps` computes the output.
        nodes: the nodes that this call replaces, in graph order.
    """

    output: Node
    arguments: tuple[Any, ...]
    nodes: list[Node]


def softmaxes(graph: Graph) -> Iterator[Node]:
    """Yield the nodes of a graph that compute a softmax over the last dimension."""
    for node in graph.nodes:
        if op_of(node) == "softmax":
            shape, dim = shape_of(node), argument(node, 1, "dim")
            if shape is not None and dim in (-1, len(shape) - 1):
                yield node


@dataclass
class Search:
    """Search for the attention that contains a given softmax."""

    softmax: Node
    product: Node | None = None
    steps: list[Step] = field(default_factory=list)
    chain: list[Node] = field(default_factory=list)
    dropout_p: float = 0.0
    shifted: bool = False  # True if a constant per row was subtracted; `steps` omits it

    def result(self) -> Attention:
        """Return the attention; raise NotFusedError if the fused function cannot compute it."""
        self._trace_scores(argument(self.softmax, 0, "input"), self.softmax)
        self.chain.append(self.softmax)
        product, ends = self.product, shape_of(self.softmax)
        assert product is not None
        shape = shape_of(product)
        if shape is None or ends is None or shape[-2:] != ends[-2:]:
            raise NotFusedError(
                "the last two dimensions of the scores change between query @ key^T and the softmax"
            )
        output = self._trace_weights()
        self._check(product, output)
        operands = (*operands_of(product)[:2], values_of(output))
        value, order = _values(output)
        # The output of a matmul is contiguous, but that of the fused function has the layout of
        # query. Users in ANY_LAYOUT accept both.
        contiguous = any(user.target not in ANY_LAYOUT for user in output.users)
        arguments = (
            operands, (*_factors(product), value), tuple(self.steps), self.dropout_p, order,
            contiguous,
        )  # fmt: skip
        return Attention(output, arguments, [product, *self.chain, output])

    def _trace_scores(self, node: Any, reader: Node) -> None:
        """Add the steps from query @ key^T to the value of `node` that `reader` reads."""
        writers = _writers(node, reader)
        name = op_of(node)
        if name in ("matmul", "einsum", "baddbmm"):
            if in_place(node):
                raise NotFusedError("query @ key^T is written to an existing tensor")
            self.product = node
            if name == "baddbmm":
                self._add_baddbmm(node)
        else:
            self._step_up(name, node, self._trace_scores)
            self.chain.append(node)
        for writer in writers:
            self._step_up(op_of(writer), writer, _nothing)
            self.chain.append(writer)

    def _step_up(self, name: str, node: Any, go_up: Callable[[Any, Node], None]) -> None:
        """Add the steps that compute the input of a call, then the step of the call."""
        input = argument(node, 0, "input")
        if name == "cast":
            _check_float(node)
            go_up(input, node)
        elif name in RESHAPES:
            go_up(input, node)
            method = str(node.target) if node.op == "call_method" else name
            if node.kwargs:
                raise NotFusedError(f"{method} with keyword arguments is applied to the scores")
            self.steps.append(("reshape", method, tuple(node.args[1:])))
        elif name == "tanh":
            go_up(input, node)
            if self.shifted or not all(step[0] == "multiply" for step in self.steps):
                raise NotFusedError("tanh is applied to masked or biased scores")
            self.steps.append(("tanh",))
        elif name in ("mul", "div", "add", "sub"):
            self._arithmetic(name, node, go_up)
        elif name == "masked_fill":
            go_up(input, node)
            self._replace("fill", argument(node, 1, "mask"), argument(node, 2, "value"))
            _check_shape(node, input)
        elif name == "where":
            self._where(node, go_up)
        else:
            raise NotFusedError(f"the scores depend on {_shown(node)}, which cannot be fused")

    def _arithmetic(self, name: str, node: Node, go_up: Callable[[Any, Node], None]) -> None:
        if node.kwargs or len(node.args) != 2:
            raise NotFusedError(
                f"{_shown(node)} with additional arguments is applied to the scores"
            )
        scores, other = node.args
        if name in ("mul", "add") and not self._is_scores(scores, node):
            scores, other = other, scores
        go_up(scores, node)
        if name in ("mul", "div"):
            self.steps.append(self._factor(name, other, node))
        elif name == "sub" and _is_row_shift(other, scores):
            self.shifted = True  # softmax is invariant to subtracting a constant from a row
        elif tensor_of(other) is None:
            raise NotFusedError("a number is added to the scores")
        else:
            self.steps.append(("add" if name == "add" else "subtract", other))
        _check_shape(node, scores)

    def _factor(self, name: str, other: Any, node: Node) -> Step:
        numbers = [step[2] for step in self.steps if step[0] in ("fill", "keep")]
        if isinstance(other, (int, float)):
            factor = float(other) if name == "mul" else 1.0 / other
            if ("tanh",) in self.steps and factor <= 0.0:
                raise NotFusedError(
                    "tanh of the scores is multiplied by a factor that is not positive"
                )
            if (factor <= 0.0 and numbers) or any(n * factor > MASK_THRESHOLD for n in numbers):
                raise NotFusedError(
                    f"a factor after the mask raises masked scores above {MASK_THRESHOLD:g}"
                )
            return ("multiply", factor)
        if numbers:
            raise NotFusedError("the scores are multiplied by a tensor after the mask")
        if ("tanh",) in self.steps:
            raise NotFusedError(
                "tanh of the scores is multiplied by a factor that is not a constant"
            )
        shape = shape_of(other)
        number = isinstance(other, Node) and isinstance(other.meta.get("example_value"), SymFloat)
        if not number and (shape is None or (len(shape) > 0 and shape[-1] != 1)):
            raise NotFusedError("the scores are multiplied by a tensor that differs between keys")
        return ("multiply" if name == "mul" else "divide", other)

    def _where(self, node: Node, go_up: Callable[[Any, Node], None]) -> None:
        if len(node.args) != 3:
            raise NotFusedError(
                "where() without three positional arguments is applied to the scores"
            )
        if node.op == "call_method":
            kept, visible, other = node.args
        else:
            visible, kept, other = node.args
        if _constant(other) is not None:
            go_up(kept, node)
            self._replace("keep", visible, other)
            _check_shape(node, kept)
        else:
            go_up(other, node)
            self._replace("fill", visible, kept)
            _check_shape(node, other)

    def _replace(self, kind: str, mask: Any, value: Any) -> None:
        """Add a step that replaces scores by a number."""
        number = _constant(value)
        if self.shifted and number != -math.inf:
            raise NotFusedError("shifted scores are masked by a finite number")
        if number is None or number > MASK_THRESHOLD:
            raise NotFusedError(
                f"masked scores are set to a tensor, or to a number above {MASK_THRESHOLD:g}"
            )
        self.steps.append((kind, mask, number))

    def _add_baddbmm(self, node: Node) -> None:
        beta, alpha = node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
        if not isinstance(beta, (int, float)) or not isinstance(alpha, (int, float)):
            raise NotFusedError("beta or alpha of baddbmm is not a number")
        self.steps.append(("multiply", float(alpha)))
        if beta:
            if beta != 1:
                raise NotFusedError("beta of baddbmm is neither 0 nor 1")
            self.steps.append(("add", argument(node, 0, "input")))

    def _is_scores(self, node: Any, reader: Node) -> bool:
        """Return True if a node is computed from query @ key^T."""
        trial = Search(self.softmax)
        try:
            trial._trace_scores(node, reader)
        except NotFusedError:
            return False
        return True

    def _trace_weights(self) -> Node:
        node = self.softmax
        while True:
            users = [user for user in node.users if not _is_dead(user, set())]
            if len(users) != 1:
                raise NotFusedError("the weights are used by no operation, or by more than one")
            (user,) = users
            name = op_of(user)
            if name in ("matmul", "einsum"):
                return user
            if not user.args or user.args[0] is not node or in_place(user):
                raise NotFusedError(
                    f"the weights are passed to {_shown(user)}, which cannot be fused"
                )
            if name in RESHAPES and not user.kwargs:
                method = str(user.target) if user.op == "call_method" else name
                self.steps.append(("reshape", method, tuple(user.args[1:])))
            elif name == "dropout":
                self._dropout(user)
            elif name == "masked_fill":
                self._zero_rows(user)
            elif name == "nan_to_num":
                self._without_nan(user)
            elif name == "cast":
                _check_float(user)
            else:
                raise NotFusedError(
                    f"the weights are passed to {_shown(user)}, which cannot be fused"
                )
            self.chain.append(user)
            node = user

    def _dropout(self, node: Node) -> None:
        functional = node.target is torch.nn.functional.dropout
        p = argument(node, 1, "p", 0.5)
        training = argument(node, 2, "training" if functional else "train", True)
        if not isinstance(training, bool) or not isinstance(p, (int, float)) or self.dropout_p:
            raise NotFusedError("dropout is applied twice, or its arguments are not constants")
        self.dropout_p = float(p) if training else 0.0

    def _zero_rows(self, node: Node) -> None:
        """Fold a masked_fill of the weights into the scores; raise NotFusedError if impossible.

        The masked_fill must set weights to 0 exactly where scores were replaced. This is equivalent
        to replacing these scores by -inf, because the fused function returns 0 for fully masked
        rows.
        """
        mask, value = argument(node, 1, "mask"), argument(node, 2, "value")
        same = [step for step in self.steps if step[0] == "fill" and step[1] is mask]
        fills = [step for step in self.steps if step[0] in ("fill", "keep")]
        if _constant(value) != 0.0 or same != fills or self.dropout_p:
            raise NotFusedError(
                "masked_fill of the weights is not equivalent to the mask of the scores"
            )
        self.steps = [("fill", mask, -math.inf) if step in same else step for step in self.steps]

    def _without_nan(self, node: Node) -> None:
        """Omit a redundant nan_to_num of the weights; raise NotFusedError if it has an effect.

        If all masks set scores to -inf, only fully masked rows are NaN. The fused function returns
        0 for these rows anyway.
        """
        if argument(node, 1, "nan") not in (None, 0.0):
            raise NotFusedError("nan_to_num replaces NaN in the weights by another number than 0")
        if any(step[0] in ("fill", "keep") and step[2] != -math.inf for step in self.steps):
            raise NotFusedError(
                "nan_to_num is applied to the weights, but masked scores are not -inf"
            )

    def _check(self, product: Node, output: Node) -> None:
        tensors = [tensor_of(node) for node in (*operands_of(product)[:2], values_of(output))]
        dtypes = {None if t is None else t.dtype for t in tensors}
        if len(dtypes) != 1 or None in dtypes or not dtypes.pop().is_floating_point:  # type: ignore[union-attr]
            raise NotFusedError("query, key and value do not have the same floating-point dtype")
        if any(t is None or t.dim() < 3 for t in tensors):
            raise NotFusedError("query, key or value has fewer than 3 dimensions")
        result, weights = tensor_of(output), tensor_of(self.softmax)
        if result is None or weights is None:
            raise NotFusedError("the shape of the output is unknown")
        if weights.dtype == torch.float64 != result.dtype:
            raise NotFusedError("the softmax is computed in float64")
        needs_grad = result.requires_grad
        limits = small_calls.limits
        most = limits.compiled_training if needs_grad else limits.compiled_forward
        if result.is_cpu and _multiply_adds(product) <= most:
            raise NotFusedError("the call is small: the code that Inductor generates is faster")
        if operands_of(output)[0] is not self.chain[-1]:
            raise NotFusedError("the weights are the second operand of the product with value")
        inside, derived, node = {*self.chain, output}, {product}, product.next
        while node is not output:
            if in_place(node) and node not in inside:
                raise NotFusedError(
                    "a tensor is modified in place between query @ key^T and weights @ value"
                )
            if derived & set(node.all_input_nodes):
                derived.add(node)
            node = node.next
        read = {product, *self.chain}
        for user in {user for node in read for user in node.users} - inside:
            if not _is_dead(user, inside):
                raise NotFusedError(f"the scores or weights are also used by {_shown(user)}")
        operands = [values_of(output), *(operand for step in self.steps for operand in step)]
        if any(isinstance(operand, Node) and operand in derived for operand in operands):
            raise NotFusedError("a mask, a factor or value depends on the scores")


def _multiply_adds(product: Node) -> int:
    """Return the number of multiply-adds of query @ key^T, using the hints of dynamic sizes."""
    scores, query = tensor_of(product), tensor_of(operands_of(product)[0])
    assert scores is not None and query is not None
    sizes = [*scores.shape, query.shape[-1]]
    return math.prod(size.node.hint or 1 if isinstance(size, SymInt) else size for size in sizes)


def operands_of(product: Node) -> list[Any]:
    """Return the operands of a matmul node; for baddbmm, without the added tensor."""
    name = op_of(product)
    if name == "einsum":
        operands = product.args[1:]
        return list(operands[0]) if isinstance(operands[0], (list, tuple)) else list(operands)
    return [argument(product, i, n) for i, n in _FACTORS[name]]


def values_of(output: Node) -> Any:
    """Return the value operand of weights @ value."""
    operands = operands_of(output)
    if len(operands) != 2:
        raise NotFusedError("the weights are passed to an einsum that does not have two operands")
    return operands[1]


_FACTORS = {
    "matmul": ((0, "input"), (1, "other")),
    "baddbmm": ((1, "batch1"), (2, "batch2")),
}


def _factors(product: Node) -> tuple[Arrangement | None, Arrangement | None]:
    """Return the arrangements that convert query and key to (*batch, seqlen, head_dim)."""
    if op_of(product) != "einsum":
        ndim = len(shape_of(operands_of(product)[1]) or ())
        return None, ((*range(ndim - 2), ndim - 1, ndim - 2), ())
    arranged = einsums.scores_of(*_einsum_of(product))
    if arranged is None:
        raise NotFusedError(
            f"einsum {product.args[0]!r} is not a product of query and key^T over one shared "
            "dimension"
        )
    return arranged


def _values(output: Node) -> tuple[Arrangement | None, tuple[int, ...] | None]:
    """Return the arrangement of value and the output permutation, as `einsums.output_of` does.

    Both are None unless the matmul is an einsum.
    """
    if op_of(output) != "einsum":
        return None, None
    arranged = einsums.output_of(*_einsum_of(output))
    if arranged is None:
        raise NotFusedError(
            f"einsum {output.args[0]!r} is not a product of the weights and value over the keys"
        )
    return arranged


def _einsum_of(product: Node) -> tuple[str, list[int]]:
    """Return the equation of an einsum and the number of dimensions of each operand."""
    shapes = [shape_of(operand) for operand in operands_of(product)]
    return str(product.args[0]), [0 if shape is None else len(shape) for shape in shapes]


def _check_float(cast: Node) -> None:
    result = tensor_of(cast)
    if result is None or not result.is_floating_point():
        raise NotFusedError("the scores or weights are converted to integers")


def _check_shape(node: Node, scores: Any) -> None:
    if shape_of(node) != shape_of(scores):
        raise NotFusedError("a mask or a factor enlarges the scores by broadcasting")


def _nothing(node: Any, reader: Node) -> None:
    """Do nothing, because the input of an in-place call has already been searched."""


def _writers(node: Any, reader: Node) -> list[Node]:
    """Return the in-place calls on a tensor before `reader` whose results are unused."""
    if not isinstance(node, Node):
        raise NotFusedError("the scores are not computed in this graph")
    found = [
        u for u in node.users if in_place(u) and argument(u, 0, "input") is node and not u.users
    ]
    return sorted(user for user in found if user < reader)


def _is_dead(node: Node, inside: set[Node]) -> bool:
    """Return True for a call without side effects whose result is unused outside of `inside`.

    Reading only the type of a result does not count as use.
    """
    if node.op not in ("call_function", "call_method") or in_place(node):
        return False
    return all(
        user in inside or _reads_type(user, node) or _is_dead(user, inside) for user in node.users
    )


def _reads_type(user: Node, node: Node) -> bool:
    return op_of(user) == "cast" and user.args[0] is not node


def _is_row_shift(other: Any, scores: Any) -> bool:
    """Return True if `other` is the row maximum of the scores, detached or not."""
    if op_of(other) == "detach":
        other = other.args[0]
    return (
        op_of(other) == "amax"
        and argument(other, 0, "input") is scores
        and argument(other, 1, "dim") in (-1, (-1,), [-1])
        and argument(other, 2, "keepdim") is True
    )


def _constant(value: Any) -> float | None:
    """Return the value of a number or of a one-element constant tensor; None if unknown."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and value.target in (torch.full, torch.tensor):
        of_full = value.target is torch.full
        number = argument(value, 1, "fill_value") if of_full else argument(value, 0, "data")
        shape = shape_of(value)
        if isinstance(number, (int, float)) and shape is not None and shape.numel() == 1:
            return float(number)
    return None


def _shown(node: Any) -> str:
    target = getattr(node, "target", node)
    return str(getattr(target, "__name__", target))
