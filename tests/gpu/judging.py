"""Numerics contract for results on a GPU, with references from the CPU.

The backend "sdpa" has one looser bound, because torch does not specify its accuracy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from devices import DEVICE, by_torch, named
from helpers import Reference, dropout_seed, round_inputs, run_with_gradients
from torch import Tensor

from fused_attn import functional as F
from fused_attn.masks import Mask
from fused_attn.tools.cases import Shape, as_dense_mask, tensors_of
from fused_attn.tools.contract import Finding
from fused_attn.tools.torch_semantics import loosened

Function = Callable[[str | None], Callable[..., tuple[Tensor, ...]]]
Results = dict[str, Tensor]


def require(findings: list[Finding], backend: str) -> None:
    """Assert that all findings are within the limits of a backend."""
    judged = map(loosened, findings) if by_torch(backend) else findings
    wrong = [finding for finding in judged if not finding.ok]
    assert not wrong, f"{backend} on {DEVICE.type}: " + "; ".join(map(str, wrong))


@contextlib.contextmanager
def skip_if_refused() -> Iterator[None]:
    """Skip the test if a backend rejects a call within the block."""
    try:
        yield
    except NotImplementedError as error:
        pytest.skip(f"reason: refused: {error}")


def assert_judged(
    function: Function,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    backend: str,
    *,
    truth: Function | None = None,
    gradients: bool = True,
) -> Results:
    """Assert that results on DEVICE are as accurate as those of eager attention on the CPU.

    Args:
        function: maps the name of a backend to a function of the tensors that runs on it.
        truth: replaces `function` in the reference.
        gradients: also check the gradients of all tensors.

    Returns:
        The results of the backend, on the CPU, by name.
    """
    exact = {name: round_inputs(tensor, dtype) for name, tensor in tensors.items()}
    run = run_with_gradients if gradients else _run
    of = function if truth is None else truth
    kind = f"gpu, gradients {gradients}"
    reference = Reference.of(lambda d: run(of("eager"), exact, d), dtype, exact, of, kind)
    with skip_if_refused():
        got = run(function(named(backend)), exact, dtype, device=DEVICE)
    require(reference.findings(got), backend)
    return got


def _run(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Results:
    """Run a function without gradients, and return its outputs on the CPU."""
    copies = {name: t.to(device, dtype, copy=True) for name, t in tensors.items()}
    with torch.no_grad(), dropout_seed(7):
        outputs = function(**copies)
    return {f"out{i}": output.cpu() for i, output in enumerate(outputs)}


def attention(mask: Any = None, **options: Any) -> Function:
    """Return function(backend)(query, key, value, mask=None) for `assert_judged`.

    Args:
        mask: a Mask, or a function of (device, dtype) that returns a mask tensor. A mask that
            requires grad is passed to the returned function instead.
        options: keyword arguments of scaled_dot_product_attention.
    """

    def of(backend: str | None) -> Callable[..., tuple[Tensor, ...]]:
        def call(
            query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None
        ) -> tuple[Tensor, ...]:
            attn_mask = default_mask(query.device, query.dtype) if mask is None else mask
            results = F.scaled_dot_product_attention(
                query, key, value, attn_mask, enable_gqa=True, backend=backend, **options
            )
            return results if isinstance(results, tuple) else (results,)

        return call

    def default_mask(device: torch.device, dtype: torch.dtype) -> Any:
        if isinstance(mask, Mask):
            return mask.to(device)
        return None if mask is None else mask(device, dtype)

    return of


def as_torch_rounds(mask: Mask, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Mask:
    """Return a mask with the bias rounded to the dtype of the scores, as in torch.

    Args:
        sizes: (batch, num_heads, seqlen_q, seqlen_k).
    """
    batch, num_heads, *lengths = sizes
    shape = Shape(batch, num_heads, num_heads, *lengths, 1)
    visible, bias = tensors_of(mask, shape, "cpu", torch.float32)
    if bias is None or dtype == torch.float32:
        return mask
    rounded = as_dense_mask(visible, bias.to(dtype).float())
    assert rounded is not None
    return rounded
