"""Checks that `fused-attn verify` runs on a backend.

The repr of a check is code that runs it:

AttentionCheck(shape="2,4/2,75,141,40", mask="causal", dtype="bfloat16").show("triton")
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_attn import functional, masks
from fused_attn.backends import AttentionProblem, NormProblem, use_backend
from fused_attn.backends.problem import Problem
from fused_attn.backends.registry import wanted_backend
from fused_attn.backends.verdicts import ProblemClass, classes_of
from fused_attn.base import philox
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.decode import decode_attention
from fused_attn.functional import varlen_attention
from fused_attn.masks import Mask
from fused_attn.masks.spec import spec_of_mask
from fused_attn.nn.weights import attention_with_weights
from fused_attn.tools import contract
from fused_attn.tools.cases import (
    Shape,
    combined,
    make_mask,
    packed_rows,
    packed_sequences,
    sequence_lengths,
)
from fused_attn.tools.contract import Finding

Call = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, repr=False)
class Check:
    """Base class of checks: a problem, and the property of its results to check.

    Attributes:
        dtype: name of the operands' torch dtype.
        gradients: check gradients in addition to outputs.
        seed: seed of the operands.
        how: the property. "contract": results and gradients are within the numerics contract.
            "twice": with torch.use_deterministic_algorithms(True), a second run returns the same
            bits. "graph": the replay of a CUDA graph returns the same bits. "bits": dropout keeps
            the same elements as the reference.
    """

    dtype: str = "float32"
    gradients: bool = True
    seed: int = 0
    how: str = "contract"

    def __repr__(self) -> str:
        shared = {field.name for field in dataclasses.fields(Check)}
        given = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in sorted(dataclasses.fields(self), key=lambda field: field.name in shared)
            if getattr(self, field.name) != field.default or field.name in ("dtype", "seed")
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def problem(self) -> Problem:
        """Return the properties of the call that select a backend, for device "cpu"."""
        raise NotImplementedError

    def classes(self) -> list[ProblemClass]:
        """Return the classes of the problem: for the mask or norm, then for each option."""
        return classes_of(self.problem())

    def reduced(self) -> Check:
        """Return the check with fewer sequences, heads or rows, so that eager fits in memory."""
        raise NotImplementedError

    def operands(self, device: torch.device) -> dict[str, Tensor]:
        """Return the float operands by name; every call returns equal tensors."""
        raise NotImplementedError

    def call(self, device: torch.device) -> Call:
        """Return the function under test, whose arguments are the operands."""
        raise NotImplementedError

    def eager(self, device: torch.device) -> Call:
        """Return the function that the "eager" backend runs as the reference of the contract."""
        return self.call(device)

    def kept(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return two bool masks of kept elements: the selected backend's and the reference's."""
        raise NotImplementedError

    def run(self, backend: str, device: torch.device | str = "cuda") -> list[Finding]:
        """Run the check on a backend and return one finding per result."""
        device = torch.device(device)
        if self.how == "bits":
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                got, want = use_backend(backend)(self.kept)(device)
            return [_difference("weights that dropout keeps", got, want)]
        call = use_backend(backend)(self.call(device))
        operands, dtype = self.operands(device), getattr(torch, self.dtype)
        if self.how == "contract":
            eager = use_backend("eager")(self.eager(device))
            return contract.check(call, eager, operands, dtype, self.gradients).findings
        runs = _two_runs(call, list(operands.values()), self.gradients, self.how == "graph")
        pairs = enumerate(zip(*runs, strict=True))
        return [_difference(f"result {i}", got, want) for i, (got, want) in pairs]

    def show(self, backend: str, device: torch.device | str = "cuda") -> None:
        """Run the check and print its findings."""
        for finding in self.run(backend, device):
            print("ok   " if finding.ok else "WRONG", finding)


@dataclass(frozen=True, kw_only=True, repr=False)
class AttentionCheck(Check):
    """Check of an attention call, padded or packed.

    Attributes:
        shape, mask: texts for Shape.parse and make_mask. The mask applies to the padded batch.
        bias: additional float mask (num_heads, seqlen_q, seqlen_k): "" (none), "constant" or
            "learned".
        packed: pack sequences of different lengths without padding. The longest has the length
            given by `shape`.
        result: additional result: "out" (none), "lse" or "weights".
        poison: fill key and value with NaN beyond the end of each sequence. Requires a mask with
            "padding".
    """

    shape: str
    mask: str = "none"
    bias: str = ""
    dropout_p: float = 0.0
    softcap: float | None = None
    packed: bool = False
    result: str = "out"
    poison: bool = False

    def problem(self) -> Problem:
        shape = Shape.parse(self.shape)
        kind = "bias" if self.bias else _kind(self.mask, shape.seqlen_q, shape.seqlen_k)
        if self.packed and kind in ("none", "causal"):
            kind = "structured"
        return AttentionProblem(
            torch.device("cpu"), getattr(torch, self.dtype), shape.head_dim, shape.head_dim,
            mask=kind, seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k, packed=self.packed,
            softcap=self.softcap is not None, dropout=self.dropout_p > 0.0, result=self.result,
            learned_bias=self.bias == "learned" and self.gradients, needs_grad=self.gradients,
        )  # fmt: skip

    def reduced(self) -> Check:
        return dataclasses.replace(self, shape=str(Shape.parse(self.shape).reduced()))

    def operands(self, device: torch.device) -> dict[str, Tensor]:
        shape, dtype = Shape.parse(self.shape), getattr(torch, self.dtype)
        operands = shape.operands(dtype, device, self.seed)
        if self.poison:
            for name in ("key", "value"):
                for b, length in enumerate(sequence_lengths(shape.batch, shape.seqlen_k)):
                    operands[name][b, :, length:] = float("nan")
        if self.packed:
            operands = {name: packed_rows(tensor) for name, tensor in operands.items()}
        if self.bias == "learned":
            operands["bias"] = self._bias(device)
        return operands

    def _bias(self, device: torch.device) -> Tensor:
        shape, generator = Shape.parse(self.shape), torch.Generator(device).manual_seed(self.seed)
        sizes = shape.num_heads, shape.seqlen_q, shape.seqlen_k
        bias = torch.randn(sizes, generator=generator, device=device)
        return bias.to(getattr(torch, self.dtype))

    def call(self, device: torch.device) -> Call:
        shape = Shape.parse(self.shape)
        mask = make_mask(self.mask, shape, device)
        if self.result == "weights":
            if self.bias or self.packed or self.softcap is not None:
                raise ValueError("result='weights' supports only masks and dropout")
            return functools.partial(
                attention_with_weights, attn_mask=mask, average=True, dropout_p=self.dropout_p
            )
        options: dict[str, Any] = {
            "dropout_p": self.dropout_p,
            "softcap": self.softcap,
            "return_lse": self.result == "lse",
        }
        constant = self._bias(device) if self.bias == "constant" else None
        sequences = packed_sequences(shape, device) if self.packed else None

        def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = constant) -> Any:
            return attend(query, key, value, _both(mask, bias), sequences, **options)

        return call

    def kept(self, device: torch.device) -> tuple[Tensor, Tensor]:
        shape, there = Shape.parse(self.shape), {"dtype": getattr(torch, self.dtype)}
        batch, heads, seqlen_q, seqlen_k = shape.scores
        query = torch.zeros(batch, heads, seqlen_q, 8, device=device, **there)
        key = torch.zeros(batch, heads, seqlen_k, 8, device=device, **there)
        # With an identity matrix as value, out equals the weights after dropout.
        value = torch.eye(seqlen_k, device=device, **there).expand(batch, heads, -1, -1)
        torch.manual_seed(self.seed)
        want = philox.attention_keep(philox.new_seed(device), self.dropout_p, *shape.scores)
        torch.manual_seed(self.seed)
        out = functional.scaled_dot_product_attention(query, key, value, None, self.dropout_p)
        assert isinstance(out, Tensor)
        return out != 0, want


@dataclass(frozen=True, kw_only=True, repr=False)
class PartialCheck(AttentionCheck):
    """Check of partial results (`AttentionOptions.partial`) over two parts of the keys.

    The parts are merged as in ring attention, or as in distributed decoding without gradients. The
    result must satisfy the contract of an ordinary call. Partial problems have no separate class: a
    failure rules out the class of the same problem with ordinary results.
    """

    def call(self, device: torch.device) -> Call:
        if self.packed or self.dropout_p or self.result != "out" or self.bias == "learned":
            raise ValueError("PartialCheck supports only masks, constant biases and softcap")
        shape, softcap = Shape.parse(self.shape), self.softcap or 0.0
        bias = self._bias(device) if self.bias else None
        mask = _both(make_mask(self.mask, shape, device), bias)
        options = AttentionOptions(shape.head_dim**-0.5, softcap, decoding=not self.gradients)

        def merged(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            spec = spec_of_mask(mask, *shape.scores, query.device)
            return _of_two_parts(AttentionCall(query, key, value, spec, options), self.gradients)

        return merged

    def eager(self, device: torch.device) -> Call:
        return super().call(device)


@dataclass(frozen=True, kw_only=True, repr=False)
class DecodeCheck(Check):
    """Check of a decoding step, which appends new tokens to a KV cache and attends to it.

    Attributes:
        shape: text for Shape.parse. seqlen_q is the number of new tokens, seqlen_k the capacity of
            the cache per sequence.
        page_size: rows per page of a paged cache; 0 for a contiguous cache.
    """

    shape: str
    page_size: int = 0
    gradients: bool = False

    def problem(self) -> Problem:
        shape, dtype = Shape.parse(self.shape), getattr(torch, self.dtype)
        return AttentionProblem(
            torch.device("cpu"), dtype, shape.head_dim, shape.head_dim, mask="structured",
            seqlen_q=shape.seqlen_q, seqlen_k=shape.seqlen_k,
        )  # fmt: skip

    def operands(self, device: torch.device) -> dict[str, Tensor]:
        shape, dtype = Shape.parse(self.shape), getattr(torch, self.dtype)
        operands = shape.operands(dtype, device, self.seed)
        new = dataclasses.replace(shape, seqlen_k=shape.seqlen_q)
        added = new.operands(dtype, device, self.seed + 1)
        cached = {f"{name}_cache": operands[name] for name in ("key", "value")}
        if self.page_size:
            cached = {name: self._pages(tensor) for name, tensor in cached.items()}
        return {"query": operands["query"], **cached, "key": added["key"], "value": added["value"]}

    def call(self, device: torch.device) -> Call:
        shape = Shape.parse(self.shape)
        room = shape.seqlen_k - shape.seqlen_q
        lengths = sequence_lengths(shape.batch, room).to(device)
        table = None
        if self.page_size:
            table = torch.arange(shape.batch * self._pages_of_one(), device=device)
            table = table.reshape(shape.batch, -1)

        def call(
            query: Tensor, key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor
        ) -> Any:
            caches = key_cache.clone(), value_cache.clone()  # decode_attention appends in place
            out = decode_attention(
                query, *caches, cache_lengths=lengths, key=key, value=value, block_table=table
            )
            return out, *caches

        return call

    def _pages_of_one(self) -> int:
        return Shape.parse(self.shape).seqlen_k // self.page_size

    def _pages(self, cache: Tensor) -> Tensor:
        batch, num_heads, _, head_dim = cache.shape
        cut = cache.reshape(batch, num_heads, self._pages_of_one(), self.page_size, head_dim)
        return cut.transpose(1, 2).flatten(0, 1).contiguous()


@dataclass(frozen=True, kw_only=True, repr=False)
class NormCheck(Check):
    """Check of norm(residual + dropout(input)) over the rows of a matrix.

    Attributes:
        affine: pass a weight, and for a layer norm also a bias.
    """

    rows: int
    columns: int
    rms: bool = False
    residual: bool = False
    dropout_p: float = 0.0
    affine: bool = True

    def problem(self) -> Problem:
        return NormProblem(
            torch.device("cpu"), getattr(torch, self.dtype), self.columns, rms=self.rms,
            residual=self.residual, dropout=self.dropout_p > 0.0, needs_grad=self.gradients,
        )  # fmt: skip

    def reduced(self) -> Check:
        return dataclasses.replace(self, rows=min(self.rows, 64))

    def operands(self, device: torch.device) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(self.seed)
        return {
            name: torch.randn(sizes, generator=generator, device=device).to(
                getattr(torch, self.dtype)
            )
            for name, sizes in self._sizes().items()
        }

    def call(self, device: torch.device) -> Call:
        names = list(self._sizes())
        function: Call = functional.rms_norm if self.rms else functional.layer_norm
        total = self.residual or self.dropout_p > 0.0
        options = {"dropout_p": self.dropout_p, "return_residual": total}

        def call(*tensors: Tensor) -> Any:
            given = dict(zip(names, tensors, strict=True))
            return function(normalized_shape=self.columns, **given, **options)

        return call

    def kept(self, device: torch.device) -> tuple[Tensor, Tensor]:
        ones = torch.ones(self.rows, self.columns, device=device, dtype=getattr(torch, self.dtype))
        torch.manual_seed(self.seed)
        seed = philox.new_seed(device)
        want = philox.norm_keep(seed, self.dropout_p, self.rows, self.columns)
        torch.manual_seed(self.seed)
        call = dataclasses.replace(self, affine=False, residual=False).call(device)
        return call(ones)[1] != 0, want

    def _sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the operands by name."""
        matrix, row = (self.rows, self.columns), (self.columns,)
        sizes: dict[str, tuple[int, ...]] = {"input": matrix}
        if self.affine:
            sizes["weight"] = row
            if not self.rms:
                sizes["bias"] = row
        if self.residual:
            sizes["residual"] = matrix
        return sizes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    sequences: tuple[Tensor, Tensor, int, int] | None = None,
    **options: Any,
) -> Any:
    """Call varlen_attention for `packed_sequences`; without them, scaled_dot_product_attention."""
    if sequences is not None:
        return varlen_attention(query, key, value, *sequences, mask, **options)
    return functional.scaled_dot_product_attention(
        query, key, value, mask, enable_gqa=True, **options
    )


def _of_two_parts(call: AttentionCall, gradients: bool) -> Tensor:
    """Return out merged from two parts of the keys, as in distributed attention on one rank."""
    from fused_attn.distributed import decode, plan, ranks, ring  # imports torch.distributed

    rows, keys = range(call.query.shape[2]), range(call.key.shape[2])
    middle = len(keys) // 3 + 1
    pieces = [plan.Piece(part, part, None) for part in (keys[:middle], keys[middle:])]
    if not gradients:
        return decode.own_part(call, pieces, prefix=False).finish(call.query.dtype).out
    queries = plan.Piece(rows, rows, None)
    step = plan.Step(tuple(plan.Block(queries, piece, piece.rows) for piece in pieces), (), ())
    rank, of_rank = ranks.Ranks(None, 0, 1), plan.Plan((queries,), (step,))
    setting = ring.Ring(rank, of_rank, call.options, backend=wanted_backend())
    return ring.ring(call.query, call.key, call.value, call.mask, setting)[0]


@functools.cache
def _kind(mask: str, seqlen_q: int, seqlen_k: int) -> str:
    """Return `MaskSpec.kind` of a mask, which does not depend on the batch and the heads."""
    shape = Shape(1, 1, 1, seqlen_q, seqlen_k, 8)
    return spec_of_mask(make_mask(mask, shape), *shape.scores, torch.device("cpu")).kind


def _both(mask: Mask | None, bias: Tensor | None) -> Mask | None:
    """Combine a mask with a float bias that is converted to the dtype of the scores."""
    own = None if bias is None else masks.bias(bias.to(statistics_dtype(bias.dtype)))
    return combined(mask, own)


@contextlib.contextmanager
def _repeatable() -> Iterator[None]:
    """Request deterministic algorithms from torch within the block.

    Warnings of operations without a deterministic algorithm are suppressed.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_only)


def _two_runs(
    call: Call, operands: Sequence[Tensor], gradients: bool, graphed: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return results and gradients of two runs of the same call.

    With `graphed`, the first run is the replay of a CUDA graph, and the second is eager.
    """
    leaves = [t.clone().requires_grad_(gradients) for t in operands]
    weights: list[Tensor] = []  # gradients with respect to the results

    def step() -> list[Tensor]:
        with torch.set_grad_enabled(gradients):
            outs = contract.results_of(call(*leaves))
        if not gradients:
            return outs
        if not weights:
            weights.extend(torch.randn_like(out) for out in outs)
        return [*(out.detach() for out in outs), *torch.autograd.grad(outs, leaves, weights)]

    def seeded() -> list[Tensor]:
        torch.manual_seed(0)
        return step()

    devices = [leaves[0].device] if leaves[0].is_cuda else []
    with torch.random.fork_rng(devices), _repeatable():
        if not graphed:
            seeded()
            return seeded(), seeded()
        captured, graph = _captured(step)
        with torch.no_grad():
            for leaf in leaves:  # the replay must read the new values from the same memory
                leaf.mul_(0.5)
        graph.replay()
        return [t.clone() for t in captured], step()


def _captured(step: Callable[[], list[Tensor]]) -> tuple[list[Tensor], torch.cuda.CUDAGraph]:
    """Capture `step` in a CUDA graph; return its results and the graph."""
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # warm-up: compilation and other one-time work is not capturable
            step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        results = step()
    return results, graph


def _difference(name: str, got: Tensor, want: Tensor) -> Finding:
    """Return a finding whose error is the number of differing elements and whose limit is 0."""
    if got.shape != want.shape:
        return Finding(name, float("inf"), 0.0, f": shape {got.shape}, not {want.shape}")
    other = (got != want) & ~(got.isnan() & want.isnan())
    return Finding(
        name, float(other.sum()), 0.0, f": number of different elements, of {got.numel()}"
    )
