"""Ring attention: each rank attends to the keys of all ranks, one rank per step.

In step s, rank r attends to keys of rank r - s. It receives only the rows that its queries attend
to, while it computes earlier steps. Partial results are merged in float32. The backward receives
the same rows again and recomputes the weights of each block from the merged lse. It returns the
float32 gradients of keys and values to their owner, which adds them up in the order of the steps,
so two runs give bitwise equal results.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fused_attn.backends import Backend, problem_of, select
from fused_attn.base.philox import DECISIONS
from fused_attn.base.torch_state import statistics_dtype
from fused_attn.call.attention import (
    AttentionBackward,
    AttentionCall,
    AttentionOptions,
    AttentionOutputs,
)
from fused_attn.distributed.merged import MergedOutputs
from fused_attn.distributed.plan import Block, Piece, Plan, Step
from fused_attn.distributed.ranks import Ranks, Transfer, start_transfer
from fused_attn.distributed.sharding import attention_offsets
from fused_attn.masks.restrict import of_positions, without_first_keys
from fused_attn.masks.spec import MaskSpec
from fused_attn.ops import library

# Steps whose keys are in flight while a step is computed, each in a separate buffer. Simulated
# forward of packed causal documents with balanced positions, in ms, for 1, 2, 4 and 8 steps (see
# benchmarks/scale_simulation.py): 8 ranks 104, 93, 73, 62; 32 ranks 44, 36, 28, 27; 128
# ranks 29, 27, 26, 26. Causal masks with zigzag positions are not faster with more than 1.
AHEAD = 4


@dataclass(frozen=True)
class Ring:
    """Arguments of ring attention other than tensors.

    Attributes:
        ranks: the ranks that hold the queries and keys.
        plan: the plan of this rank.
        options: validated options. The seed is the same on all ranks.
        heads: (first head of this call, number of heads of the complete call), for dropout.
        backend: name of the backend that the caller requested, or None.
    """

    ranks: Ranks
    plan: Plan
    options: AttentionOptions
    heads: tuple[int, int] = (0, 0)
    backend: str | None = None


def ring(
    query: Tensor, key: Tensor, value: Tensor, mask: MaskSpec, setting: Ring
) -> tuple[Tensor, Tensor]:
    """Return out and lse of the queries of this rank.

    Args:
        query: (batch, num_heads, rows, head_dim), the queries of this rank.
        key, value: (batch, num_heads_kv, rows of keys, head_dim or head_dim_v), those of this rank.
        mask: mask of all positions. For packed sequences, batch is 1 in all tensors.
    """
    return _Ring.apply(query, key, value, setting, mask.with_tensors(()), *mask.tensors())


class _Ring(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        setting: Ring,
        mask: MaskSpec,
        *mask_tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        spec = mask.with_tensors(mask_tensors)
        merged = MergedOutputs(query, value)
        for _, step, (k, v) in _received(setting, key, value):
            call = AttentionCall(query, k, v, spec, setting.options)
            for block in step.blocks:
                part = BlockCall(call, block, setting.heads, setting.backend)
                merged.add(part.forward(for_backward=True), part.rows)
        outputs = merged.finish(query.dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, *outputs, *mask_tensors)
        ctx.setting, ctx.mask = setting, mask
        return outputs.out, outputs.lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        needs_bias = ctx.needs_input_grad[5 + MaskSpec.TENSORS.index("bias")]
        rest = ctx.setting, ctx.mask, needs_bias, grad_out, grad_lse
        query, key, value, bias = _RingBackward.apply(*rest, *ctx.saved_tensors)
        return query, key, value, None, None, *MaskSpec.by_tensor(bias=bias)


class _RingBackward(Function):
    """The backward of `_Ring`; a separate Function, so that differentiating it is an error."""

    @staticmethod
    def forward(
        ctx: Any,
        setting: Ring,
        mask: MaskSpec,
        wants_bias: bool,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        *saved: Any,
    ) -> tuple[Tensor | None, ...]:
        query, key, value, *rest = saved
        outputs, spec = AttentionOutputs(*rest[:4]), mask.with_tensors(rest[4:])
        grad_out = torch.zeros_like(outputs.out) if grad_out is None else grad_out
        sums = _Gradients(query, key, value, spec.bias if wants_bias else None)
        # A bias that is constant over the keys shifts lse only, so its gradient is that of lse.
        shifts_lse = sums.bias is not None and sums.bias.shape[3] == 1
        if shifts_lse and grad_lse is not None:
            visible = outputs.lse != -torch.inf
            for piece in setting.plan.queries:
                sums.add_shift(piece, torch.where(visible, grad_lse, 0.0)[:, :, _slice(piece.rows)])
        needs_bias = sums.bias is not None and not shifts_lse
        returning: deque[tuple[Step, Transfer]] = deque()
        for s, step, (k, v) in _received(setting, key, value):
            of_rows = sums.rows if s == 0 else _buffer(sums.rows, step.wanted).zero_()
            of_keys, of_values = of_rows.split([k.shape[3], v.shape[3]], dim=3)
            call = AttentionCall(query, k, v, spec, setting.options)
            for block in step.blocks:
                part = BlockCall(call, block, setting.heads, setting.backend)
                grads = part.backward(outputs, grad_out, grad_lse, needs_bias)
                sums.query[:, :, part.rows] += grads.query
                of_keys[:, :, part.columns] += grads.key[:, :, part.padding :]
                of_values[:, :, part.columns] += grads.value[:, :, part.padding :]
                if needs_bias:
                    sums.add_bias(block, grads.bias[..., -len(block.received) :])
            if s > 0:
                returning.append((step, _returned(setting, s, of_rows, sums.rows)))
            if len(returning) > AHEAD:
                sums.add_returned(*returning.popleft())
        while returning:
            sums.add_returned(*returning.popleft())
        return sums.finished()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError("distributed attention does not support second derivatives")


def _received(
    setting: Ring, key: Tensor, value: Tensor
) -> Iterator[tuple[int, Step, tuple[Tensor, Tensor]]]:
    """Yield each step with the keys and values that its blocks refer to.

    The rows of the next AHEAD steps are in flight while the caller computes a step. In step 0, the
    blocks refer to the rows of this rank.
    """
    steps = setting.plan.steps
    transfers = deque(_requested(setting, s, key, value) for s in range(1, AHEAD + 1))
    yield 0, _in_place(steps[0]), (key, value)
    for s in range(1, len(steps)):
        received = transfers.popleft().wait()
        transfers.append(_requested(setting, s + AHEAD, key, value))
        yield s, steps[s], received.split([key.shape[3], value.shape[3]], dim=3)


def _in_place(step: Step) -> Step:
    """Return the step of this rank's keys, with blocks that refer to its rows."""
    return replace(step, blocks=tuple(b._replace(received=b.keys.rows) for b in step.blocks))


def _requested(setting: Ring, s: int, key: Tensor, value: Tensor) -> Transfer:
    """Start to send this rank's keys and values, and to receive those of step s.

    A message has shape (batch, num_heads_kv, rows, head_dim + head_dim_v).
    """
    empty = torch.cat([key[:, :, :0], value[:, :, :0]], dim=3)
    if s >= len(setting.plan.steps):
        return Transfer(empty, empty, [])
    step, rank = setting.plan.steps[s], setting.ranks.rank
    parts = [torch.cat([t[:, :, _slice(rows)] for t in (key, value)], dim=3) for rows in step.sent]
    return start_transfer(
        setting.ranks,
        to=rank + s,
        sent=torch.cat([empty, *parts], dim=2).contiguous(),
        source=rank - s,
        received=_buffer(empty, step.wanted),
    )


def _returned(setting: Ring, s: int, grads: Tensor, like: Tensor) -> Transfer:
    """Start to send the gradients of received keys and values to their owner.

    Args:
        grads: gradients of the message that was received in step s.
        like: a tensor with the dtype and the dimensions of grads, except the number of rows.
    """
    rank = setting.ranks.rank
    received = _buffer(like, setting.plan.steps[s].sent)
    return start_transfer(
        setting.ranks, to=rank - s, sent=grads, source=rank + s, received=received
    )


def _buffer(like: Tensor, rows: Sequence[range]) -> Tensor:
    """Allocate a message of the given rows, with the dtype and other dimensions of `like`."""
    return like.new_empty(*like.shape[:2], sum(map(len, rows)), like.shape[3])


def _slice(rows: range) -> slice:
    return slice(rows.start, rows.stop)


class _Gradients:
    """Gradient accumulators of this rank, in the statistics dtype.

    Attributes:
        query, bias: gradients of query and bias.
        rows: gradients of keys and values, as one message (see `_requested`).
    """

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
        self._dtypes = [None if t is None else t.dtype for t in (query, key, value, bias)]
        dtype = statistics_dtype(query.dtype)
        self.query = torch.zeros_like(query, dtype=dtype, memory_format=torch.contiguous_format)
        self._widths = key.shape[3], value.shape[3]
        self.rows = self.query.new_zeros(*key.shape[:3], sum(self._widths))
        self.bias = None if bias is None else torch.zeros_like(bias, dtype=dtype)

    def add_returned(self, step: Step, transfer: Transfer) -> None:
        """Wait for the gradients of this rank's keys and values from another rank, and add them."""
        received, begin = transfer.wait(), 0
        for rows in step.sent:
            self.rows[:, :, _slice(rows)] += received[:, :, begin : begin + len(rows)]
            begin += len(rows)

    def add_shift(self, piece: Piece, grad_lse: Tensor) -> None:
        """Add the gradient of lse, (batch, num_heads, rows of the piece), to that of bias."""
        part = self._bias_of(piece, range(1))
        part += grad_lse[..., None].sum_to_size(part.shape)

    def add_bias(self, block: Block, grad: Tensor) -> None:
        """Add the gradient of the bias of a block."""
        part = self._bias_of(block.queries, block.keys.positions)
        part += grad

    def _bias_of(self, queries: Piece, keys: range) -> Tensor:
        """Return a view of the gradient of bias for the given queries and keys."""
        part = of_positions(MaskSpec(bias=self.bias), queries.positions, keys, queries.sequence)
        assert part.bias is not None
        return part.bias

    def finished(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of query, key, value and bias in the dtypes of the tensors."""
        sums = self.query, *self.rows.split(self._widths, dim=3), self.bias
        return tuple(s if s is None else s.to(d) for s, d in zip(sums, self._dtypes, strict=True))


class BlockCall:
    """One kernel call: a block of queries of this rank and received keys.

    Args:
        call: all queries of this rank, all received keys, and the mask of all positions.
        heads, backend: as in `Ring`.

    Attributes:
        rows: query rows of the block.
        columns: rows of the received keys.
        padding: number of rows inserted before the keys, so that they begin at a multiple of
            DECISIONS, as dropout requires.
    """

    def __init__(
        self,
        call: AttentionCall,
        block: Block,
        heads: tuple[int, int] = (0, 0),
        backend: str | None = None,
    ) -> None:
        queries, keys = block.queries, block.keys.positions
        self.rows, self.columns = _slice(queries.rows), _slice(block.received)
        q = call.query[:, :, self.rows]
        k, v = (t[:, :, self.columns] for t in (call.key, call.value))
        options = replace(call.options, partial=True)
        drops = options.dropout_p > 0.0
        self.padding = keys.start % DECISIONS if drops else 0
        padded = range(keys.start - self.padding, keys.stop)
        own = of_positions(call.mask, queries.positions, padded, queries.sequence)
        if self.padding:
            k, v = (torch.nn.functional.pad(t, (0, 0, self.padding, 0)) for t in (k, v))
            own = without_first_keys(own, self.padding, (len(q), q.shape[2], k.shape[2]), q.device)
        if drops:
            head0, total = heads
            options.dropout_offsets = attention_offsets(
                len(q), row0=queries.positions.start, key0=padded.start, head0=head0,
                num_heads_global=total, batch0=queries.sequence or 0, device=q.device,
            )  # fmt: skip
        self._call = AttentionCall(q, k, v, own, options)
        self._backend: Backend = select(problem_of(self._call, "lse"), backend)

    def forward(self, for_backward: bool) -> AttentionOutputs:
        """Return the partial result of the block."""
        return library.attention_fwd(self._call, self._backend, for_backward, want_lse=True)

    def backward(
        self,
        outputs: AttentionOutputs,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs_bias: bool,
    ) -> Any:
        """Return the gradients of the block, from the merged outputs of all query rows."""
        own = AttentionOutputs._make(t if t is None else t[:, :, self.rows] for t in outputs)
        grad_lse = None if grad_lse is None else grad_lse[:, :, self.rows]
        grad_out = grad_out[:, :, self.rows]
        work = AttentionBackward(self._call, own.without_none(), grad_out, grad_lse, needs_bias)
        return library.attention_bwd(work, self._backend)
