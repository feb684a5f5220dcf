"""Backend "flash": FlashAttention 4, 3 and 2, and torch's varlen_attn.

These engines have the fastest published kernels for a few masks: bands, lengths, packed sequences
and ALiBi. The backend selects the first installed engine that supports a problem. It supports a
mask only if the host knows that a window and sequence lengths express it.

    plan.py           the window and the sequences of a mask
    engines.py        the four engines: their limits and calling conventions
    decode.py         appending to a KV cache
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_attn.backends import reference, verdicts
from fused_attn.backends.flash import engines
from fused_attn.backends.flash.decode import decode
from fused_attn.backends.flash.engines import (
    ENGINES,
    Engine,
    EngineCall,
    FlashAttention2,
    Results,
    aligned,
)
from fused_attn.backends.flash.plan import Layout, MaskPlan, layout_of, plan_of
from fused_attn.backends.kernels import EngineBackend
from fused_attn.backends.problem import AttentionProblem, NormProblem, Problem, problem_of
from fused_attn.base.torch_state import is_compiling, is_intercepted, needs_grad
from fused_attn.call.attention import AttentionCall, AttentionOutputs
from fused_attn.call.kv_cache import CacheUpdate
from fused_attn.masks import band

DTYPES = (torch.float16, torch.bfloat16)
DEVICES = ("cuda",)


class FlashBackend(EngineBackend):
    """FlashAttention's kernels, which are differentiable functions of their packages."""

    name = "flash"

    def unavailable(self) -> list[str]:
        missing = [engine.unavailable() for engine in ENGINES]
        return engines.no_gpu() or ([] if [] in missing else [*chain(*missing)])

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = self.unavailable()
        if isinstance(problem, NormProblem):
            return reasons
        if problem.device.type not in DEVICES:
            reasons.append(f"runs on {', '.join(DEVICES)}, not on {problem.device.type}")
        if reasons:
            return reasons
        chosen = _choice(problem)
        return chosen if isinstance(chosen, list) else []

    def attention_fwd(
        self, call: AttentionCall, for_backward: bool, want_lse: bool
    ) -> AttentionOutputs:
        problem = problem_of(call, "lse" if want_lse else "out")
        assert isinstance(problem, AttentionProblem)
        sizes = call.query.shape, call.key.shape, call.value.shape
        if any(0 in shape for shape in sizes):
            return AttentionOutputs(*reference.attention(call), None, None)
        is_traced = is_compiling()
        state = is_intercepted(), torch.are_deterministic_algorithms_enabled()
        chosen = _choice(problem) if is_traced else _cached_choice(problem, *state)
        assert not isinstance(chosen, list)  # `unsupported` has excluded other problems
        engine, plan = chosen
        if plan.empty:
            return AttentionOutputs(*reference.attention(call), None, None)
        return AttentionOutputs(*_run(engine, plan, call, want_lse), None, None)

    def attention_decode(
        self, call: AttentionCall, update: CacheUpdate, want_lse: bool
    ) -> tuple[Tensor, Tensor] | None:
        problem = problem_of(call, "lse", update.capacity)
        assert isinstance(problem, AttentionProblem)
        plan = _plan(problem)
        for engine in ENGINES:
            if isinstance(engine, FlashAttention2) and isinstance(plan, MaskPlan):
                return None if engine.refusals(problem, plan) else decode(engine, call, update)
        return None


def _choice(problem: AttentionProblem) -> tuple[Engine, MaskPlan] | list[str]:
    """Return the first engine that supports a problem, and the plan; or the reasons against all."""
    reasons = [] if problem.dtype in DTYPES else [f"does not support {problem.dtype}"]
    if problem.transformed:
        reasons.append("does not support torch.func transforms or forward-mode AD")
    if problem.dropout:
        reasons.append("does not support dropout: its engines cannot draw the Philox dropout mask")
    if problem.partial:
        reasons.append("does not support partial results (attention over part of the keys)")
    if problem.result == "weights":
        reasons.append("cannot return attention weights")
    plan = _plan(problem)
    if not isinstance(plan, MaskPlan):
        return [*reasons, plan]
    if reasons:
        return reasons
    for engine in ENGINES:
        refusals = engine.refusals(problem, plan)
        if not refusals:
            return engine, plan
        reasons.append(refusals[0])
    return reasons


@functools.lru_cache(maxsize=1024)
def _cached_choice(
    problem: AttentionProblem, traced: bool, deterministic: bool
) -> tuple[Engine, MaskPlan] | list[str]:
    """Return `_choice(problem)`, cached by the problem and the torch state that it depends on."""
    return _choice(problem)


def _plan(problem: AttentionProblem) -> MaskPlan | str:
    """Return the plan for the mask of a problem, or the reason why there is none."""
    if problem.mask in ("dense", "bias"):
        return f"does not support a {'bool' if problem.mask == 'dense' else 'float'} mask tensor"
    own = problem.band if problem.mask == "structured" else band.of_kind(problem.mask)
    if own is None:
        return "supports only causal masks, windows, padding and ALiBi, not this mask"
    return plan_of(own, problem.packed, problem.seqlen_q, problem.seqlen_k)


# ---- the pass -----------------------------------------------------------------------------------


def _run(
    engine: Engine, plan: MaskPlan, call: AttentionCall, want_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Return out and lse of a call; lse is None unless want_lse."""
    query, key, value = call.query, call.key, call.value
    query, scale = reference.with_positive_scale(query, float(call.options.scale))
    if needs_grad(query, key, value) and not is_intercepted():
        query, key, value = _FirstOrder.apply(query, key, value)
    spec, sizes = call.mask, call.sizes()
    is_packed = spec.cu_seqlens_q is not None
    layout: Layout | None = None
    if not is_packed and spec.bounds is None:
        key, value = (t[:, :, plan.key_begin : plan.key_end] for t in (key, value))
        sizes = (*sizes[:2], plan.key_end - plan.key_begin)
    if is_packed or spec.bounds is not None or not engine.dense:
        layout = layout_of(spec, plan, sizes, query)
    query, key, value = [aligned(t.transpose(1, 2)) for t in (query, key, value)]
    max_seqlen_q = sizes[1]
    if layout is not None:
        query, key, value = _as_rows(query, key, value, layout)
        # For a maximum of 1, flash-attn 2 assumes one row for each sequence, but some are empty.
        max_seqlen_q = max(max_seqlen_q, 2)
    results: list[Results] = []
    for sequences in (None,) if layout is None else layout.calls:
        arguments = EngineCall(
            query,
            key,
            value,
            sequences,
            max_seqlen_q,
            sizes[2],
            plan.left,
            None if results else plan.right,  # the second call of a square plan has no window
            scale,
            float(call.options.softcap),
            _slopes(spec.slopes, 1 if sequences is None else sequences.copies),
            want_lse,
        )
        results.append(engine.run(arguments))
    out, lse = _merged(results)
    if layout is not None:
        batch = call.query.shape[0]
        out = out.unflatten(0, (batch, -1))
        lse = lse if lse is None else lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return out.transpose(1, 2), lse


def _as_rows(
    query: Tensor, key: Tensor, value: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value as rows of all sequences, (batch * seqlen, num_heads, dim).

    Padding keys are set to 0. Kernels load whole tiles, and multiply values after the end of a
    sequence by weights of 0, which gives NaN for non-finite values.
    """
    if layout.real_keys is not None:
        real = layout.real_keys[:, :, None, None]
        key, value = torch.where(real, key, 0.0), torch.where(real, value, 0.0)
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)


def _slopes(slopes: Tensor | None, copies: int) -> Tensor | None:
    """Return ALiBi slopes for the `copies` sequences that replace each sequence of the batch."""
    if slopes is None or slopes.shape[0] == 1:
        return slopes if slopes is None else slopes[0].contiguous()
    return slopes.repeat_interleave(copies, 0) if copies > 1 else slopes.contiguous()


def _merged(results: list[Results]) -> Results:
    """Return the results of one call, or the merged results of two with disjoint rows."""
    if len(results) == 1:
        return results[0]
    (out, lse), (out_after, lse_after) = results
    if lse is None or lse_after is None:
        return out + out_after, None
    return out + out_after, torch.maximum(lse, lse_after)


class _FirstOrder(torch.autograd.Function):
    """Identity function whose gradients raise an error if they are differentiated.

    The engines' backwards are kernels without derivatives. Without this Function, second
    derivatives would lack terms.
    """

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return grads
        present = [grad.detach().requires_grad_() for grad in grads if grad is not None]
        fail = torch._C._functions.DelayedError(_NO_SECOND_ORDER, len(present))
        failing = iter(fail(*present) if len(present) > 1 else (fail(*present),))
        return tuple(None if grad is None else next(failing) for grad in grads)


_NO_SECOND_ORDER = 'backend "flash" does not support second derivatives: use backend "eager"'


def _kernel_files() -> Iterator[Path]:
    """Yield the files of this backend, and a version-dependent file of each engine."""
    yield from Path(__file__).parent.glob("*.py")
    for engine in ENGINES:
        try:
            files = metadata.distribution(engine.name).files or []
        except metadata.PackageNotFoundError:
            continue
        yield from (Path(str(file.locate())) for file in files if file.name == "METADATA")


verdicts.KERNELS[FlashBackend.name] = _kernel_files
