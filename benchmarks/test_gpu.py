"""On a GPU: attention, packed sequences, decoding, norms and calls against their peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gpu_ways
import pytest
import torch
from contract import check_part
from gpu_run import BACKWARD_FLOPS, Check, Runner
from gpu_shapes import BACKWARD, BF16, DECODE, FORWARD, NORMS, PACKED, SMALL
from gpu_ways import OURS
from shapes import Attention, Norm
from torch import Tensor

pytestmark = pytest.mark.gpu


def label(value: Any) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value.name


def cases(problems: list[Any]) -> list[Any]:
    return [pytest.param(*each, id="-".join(map(label, each))) for each in problems]


def attention(
    runner: Runner, group: str, shape: Attention, dtype: torch.dtype, **options: Any
) -> None:
    """A forward, or group "backward"."""
    backward, device = group == "backward", runner.device

    def operands(seed: int) -> list[Tensor]:
        tensors = [*shape.operands(dtype, device, seed)]
        if shape.mask == "bias":
            generator = torch.Generator(device).manual_seed(seed)
            size = shape.bias_size()
            tensors.append(torch.randn(size, generator=generator, dtype=dtype, device=device))
        return [t.requires_grad_(backward) for t in tensors]

    own, sets = gpu_ways.attention(shape, runner.backend, device), runner.sets(operands)
    peers = gpu_ways.attention_peers(shape, dtype, device)
    if shape.mask in ("ragged_blocks", "random"):
        mask = shape.bool_mask(device)  # summed up in each call, where a Mask keeps its summary
        peers[f"{OURS}, mask as tensor"] = lambda: (
            lambda query, key, value: own(query, key, value, mask)
        )
    runner.run(
        group, shape, dtype, own, peers, sets,
        attention_check(runner, shape, dtype, own, sets[0], backward), **options,
    )  # fmt: skip


def attention_check(
    runner: Runner, shape: Attention, dtype: torch.dtype, own: Any, operands: Any, backward: bool
) -> Check:
    """The contract on a sequence, and as many of its heads as eager attention can hold."""
    small = shape.reduced()
    if shape.mask == "bias":  # its gradient is that of the whole batch
        small = replace(small, batch=shape.batch)
    eager = gpu_ways.attention(small, "eager", runner.device)

    def part(tensor: Tensor) -> Tensor:
        if tensor.dim() == 3:  # the bias
            return tensor[: small.num_heads]
        heads = small.num_heads if tensor.shape[1] == shape.num_heads else small.kv_heads
        return tensor[: small.batch, :heads]

    def check() -> Callable[[Any], bool] | None:
        agrees = check_part(shape.name, dtype, own, eager, operands, backward, part)
        return agrees if shape.dropout_p == 0.0 else None

    return check


@pytest.mark.parametrize(("shape", "dtype"), cases(FORWARD))
def test_forward(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    attention(runner, "forward", shape, dtype, work=runner.work(shape, False))


@pytest.mark.parametrize("shape", DECODE, ids=label)
def test_decode(shape: Attention, runner: Runner) -> None:
    cached = shape.batch * shape.kv_heads * shape.seqlen_k * shape.head_dim
    read = 2 * cached * BF16.itemsize
    attention(runner, "decode", shape, BF16, work={"bytes": read})


@pytest.mark.parametrize("shape", [SMALL], ids=label)
def test_call(shape: Attention, runner: Runner) -> None:
    """What a call takes of the host, which is longer than its kernel."""
    attention(runner, "call", shape, BF16, work={}, timer=runner.host_timer)


@pytest.mark.parametrize("group", ["norm forward", "norm backward"])
@pytest.mark.parametrize("shape", NORMS, ids=label)
def test_norm(shape: Norm, group: str, runner: Runner) -> None:
    backward = group == "norm backward"

    def operands(seed: int) -> list[Tensor]:
        tensors = gpu_ways.norm_operands(shape, BF16, runner.device, seed)
        return [t.requires_grad_(backward) for t in tensors]

    sets = runner.sets(operands)
    own, eager = (gpu_ways.norm(shape, backend) for backend in (runner.backend, "eager"))

    def check() -> Callable[[Any], bool] | None:
        agrees = check_part(shape.name, BF16, own, eager, sets[0], backward)
        return agrees if shape.dropout_p == 0.0 else None

    # Forward: input and out, with a residual its sum too. Backward: the gradients of those and
    # what was normalised; with dropout input and residual have a gradient each.
    streams = 2 + 2 * shape.residual + (backward and not shape.residual)
    streams += backward and shape.dropout_p > 0.0
    work = {"bytes": streams * sets[0][0].nbytes}
    runner.run(group, shape, BF16, own, gpu_ways.norm_peers(shape), sets, check, work=work)


@pytest.mark.parametrize("group", ["packed forward", "packed backward"])
@pytest.mark.parametrize("shape", PACKED, ids=label)
def test_packed(shape: Attention, group: str, runner: Runner) -> None:
    backward = group == "packed backward"
    cu_seqlens = shape.packed(BF16, runner.device)[1]

    def operands(seed: int) -> list[Tensor]:
        rows = shape.packed(BF16, runner.device, seed)[0]
        return [t.requires_grad_(backward) for t in rows]

    sets = runner.sets(operands)
    own, eager = (
        gpu_ways.packed(shape, backend, cu_seqlens) for backend in (runner.backend, "eager")
    )

    def check() -> Callable[[Any], bool]:
        return check_part(shape.name, BF16, own, eager, sets[0], backward, lambda t: t[:, :1])

    pairs = shape.num_heads * float(shape.lengths().square().sum())
    work = {"flops": 4.0 * pairs * shape.head_dim * (BACKWARD_FLOPS if backward else 1.0)}
    runner.run(
        group, shape, BF16, own, gpu_ways.packed_peers(shape, cu_seqlens), sets, check, work=work
    )


@pytest.mark.parametrize(("shape", "dtype"), cases(BACKWARD))
def test_backward(shape: Attention, dtype: torch.dtype, runner: Runner) -> None:
    attention(runner, "backward", shape, dtype, work=runner.work(shape, True))
