"""Test helpers; those that compare results apply the contract of fused_attn/tools/contract.py."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import cuda_emulation
import pytest
import torch
from long_double import LongDouble
from torch import Tensor

import fused_attn
from fused_attn import functional as F
from fused_attn.backends import AttentionProblem, cpp, cuda, get_backend, triton
from fused_attn.base import philox
from fused_attn.tools import contract
from fused_attn.tools.rounding import Expected

if os.environ.get("CUDA_EMULATED", "0") != "0":
    cuda_emulation.use()

# Backends with kernels of this package. test_sdpa.py tests the backends that call torch.
BACKENDS = [n for n in fused_attn.available_backends() if not get_backend(n).differentiable]
_ISAS = Path(__file__).resolve().parents[2] / "csrc/cpu/isas.inc"
ISAS = re.findall(r"^FUSED_ATTN_ISA\((\w+)", _ISAS.read_text(), re.MULTILINE)
MAX_REFERENCES = 256  # cache size; must exceed the number of problems of any test
# conftest.py deselects the dtypes that a test's backend does not support.
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTERPRETED = "triton" in BACKENDS and triton.interpreted()
# Emulated kernels run serially on the CPU and take seconds per call, unlike other backends.
SLOW_BACKENDS = ["cuda"] * cuda.emulated() + ["triton"] * INTERPRETED
# Marker that omits float16 on slow backends, in tests over dtypes and another parameter. The 16-bit
# dtypes differ only in how tiles are loaded and stored. test_shapes and, for norms,
# test_weight_of_the_same_type cover float16.
ONE_16_BIT_TYPE = pytest.mark.thinned("bfloat16 covers 16-bit dtypes", dtype=[torch.float16])


def takes(backend: str, dtype: torch.dtype, device: str | None = None) -> bool:
    """Return True if a backend supports a dtype on a device (default: the backend's device)."""
    where = device_of(backend) if device is None else torch.device(device)
    return not get_backend(backend).unsupported(AttentionProblem(where, dtype, 8, 8))


def device_of(backend: str) -> torch.device:
    """Return the device of a backend's tensors: the CPU if the backend supports it, else a GPU."""
    return torch.device("cpu" if takes(backend, torch.float32, "cpu") else "cuda")


FLOAT64_BACKENDS = [name for name in BACKENDS if takes(name, torch.float64)]


def most_exact(backend: str) -> torch.dtype:
    """Return the most precise dtype that a backend supports."""
    return torch.float64 if takes(backend, torch.float64) else torch.float32


def short(dtype: torch.dtype) -> str:
    """Return "f32" for torch.float32, "bf16" for torch.bfloat16, and so on."""
    return str(dtype).removeprefix("torch.").replace("float", "f")


_draw = 0


def use_draw(number: int) -> None:
    """Seed torch's generator and all generators of `drawn` for a draw number (option --draw)."""
    global _draw
    _draw = number
    # Without a GPU, torch.manual_seed records a traceback for each kind of device: 5 ms a test.
    seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed(number)


def drawn(seed: int) -> torch.Generator:
    """Return a CPU generator for a seed; its random numbers also depend on the draw number."""
    return torch.Generator().manual_seed(seed + 1_000_003 * _draw)


def assert_contract(
    name: str,
    got: Tensor,
    truth: Tensor,
    eager: Tensor,
    expected: contract.ExpectedError = contract.no_error,
) -> None:
    """Assert that `got` is within the numerics contract.

    The limit for gradients applies if `name` begins with "grad". Other arguments: `contract.judge`.
    """
    gradient = name.startswith("grad")
    finding = contract.judge(name, got, truth, eager, gradient=gradient, expected=expected)
    assert finding.ok, str(finding)


def run_with_gradients(
    function: Callable[..., tuple[Tensor, ...]],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    seed: int = 7,
    device: torch.device | None = None,
) -> dict[str, Tensor]:
    """Return outputs ("out0", ...) and gradients ("grad_query", ...) of function(**tensors).

    Inputs are converted to dtype, except that float32 biases and norm parameters stay float32 if
    dtype is a 16-bit type. The output gradients and the dropout mask are the same for every dtype
    and function. The function runs on `device`; the results are returned on the CPU.
    """
    leaves = {}
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        stays = dtype.itemsize == 2 and tensor.dtype == torch.float32
        stays &= name in ("bias", "weight", "norm_bias")
        leaf = tensor.detach().to(device, tensor.dtype if stays else dtype, copy=True)
        if not tensor.is_contiguous() and 0 not in tensor.stride():  # preserve its strides
            leaf = torch.empty_like(tensor, dtype=leaf.dtype, device=leaf.device).copy_(leaf)
        leaves[name] = leaf.requires_grad_()
    with dropout_seed(seed):
        outputs = function(**leaves)
    generator = drawn(seed)
    loss = outputs[0].new_zeros((), dtype=torch.float64)
    for output in outputs:
        weights = exact_in_16_bits(torch.randn(output.shape, generator=generator))
        finite = output.masked_fill(~output.isfinite(), 0.0)
        loss = loss + (finite.double() * weights.to(output.device)).sum()
    loss.backward()
    result = {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    for name, leaf in leaves.items():
        result[f"grad_{name}"] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return {name: tensor.cpu() for name, tensor in result.items()}


@contextlib.contextmanager
def dropout_seed(seed: int) -> Iterator[None]:
    """Draw all dropout seeds within the block from the CPU's generator, seeded with `seed`.

    The generators of torch for CPU and GPU draw different numbers from the same seed.
    """
    new_seed, cpu = philox.new_seed, torch.device("cpu")
    torch.default_generator.manual_seed(drawn(seed).initial_seed())
    with mock.patch.object(philox, "new_seed", lambda device: new_seed(cpu).to(device)):
        yield


def exact_in_16_bits(tensor: Tensor) -> Tensor:
    """Round a tensor to bfloat16, so that its values are exact in every dtype; return float64."""
    return tensor.to(torch.bfloat16).to(torch.float64)


def assert_like_eager(
    function: Callable[..., Callable[..., tuple[Tensor, ...]]],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    backend: str,
) -> dict[str, Tensor]:
    """Assert that outputs and all gradients of function(backend) are within the numerics contract.

    Returns:
        The results of the backend, by name.
    """
    got, findings = compare_with_eager(function, tensors, dtype, backend)
    for finding in findings:
        assert finding.ok, str(finding)
    return got


def compare_with_eager(
    function: Callable[..., Callable[..., tuple[Tensor, ...]]],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    backend: str,
) -> tuple[dict[str, Tensor], list[contract.Finding]]:
    """Return the results of a backend, and a contract finding for each of them.

    The backend runs on its device, and the float64 and eager references run on the CPU.
    """
    exact = {name: None if t is None else round_inputs(t, dtype) for name, t in tensors.items()}
    reference = Reference.of(
        lambda d: run_with_gradients(function("eager"), exact, d), dtype, exact, function
    )
    got = run_with_gradients(function(backend), exact, dtype, device=device_of(backend))
    return got, reference.findings(got)


def assert_outputs_like_eager(
    function: Callable[..., Callable[..., tuple[Tensor, ...]]],
    tensors: dict[str, Tensor | None],
    dtype: torch.dtype,
    backend: str,
) -> None:
    """Assert that outputs are within the numerics contract if no input requires grad.

    Such calls may run other kernels than calls that need gradients.
    """
    exact = {n: exact_in_16_bits(t) for n, t in tensors.items() if t is not None}

    def run(dtype: torch.dtype, backend: str) -> dict[str, Tensor]:
        leaves = {n: t.to(device_of(backend), dtype) for n, t in exact.items()}
        with dropout_seed(7):
            outputs = function(backend)(**leaves)
        return {f"out{i}": output.cpu() for i, output in enumerate(outputs)}

    reference = Reference.of(lambda d: run(d, "eager"), dtype, exact, function, "no gradients")
    for finding in reference.findings(run(dtype, backend)):
        assert finding.ok, str(finding)


class Reference:
    """Exact results, eager results and expected eager error of one problem.

    Args:
        run: function of a dtype that returns the results of eager attention, by name.
        dtype: dtype of the results that are judged.
    """

    _latest: ClassVar[dict[bytes, Reference]] = {}

    @classmethod
    def of(
        cls,
        run: Callable[[torch.dtype], dict[str, Tensor]],
        dtype: torch.dtype,
        tensors: Mapping[str, Tensor | None],
        function: Callable[..., Any],
        kind: str = "",
    ) -> Reference:
        """Return the reference of a problem, cached so that all instruction sets share it.

        Args:
            function: function that `run` calls with the tensors. The reference is cached only if
                the function has an attribute `key`, bytes that identify it.
            kind: distinguishes `run` functions that call the same function.
        """
        if not hasattr(function, "key"):
            return cls(run, dtype)
        digest = hashlib.sha256(f"{kind} {dtype}".encode() + function.key)
        for name, tensor in tensors.items():
            if tensor is not None:
                digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.stride()}".encode())
                digest.update(tensor.detach().double().numpy().tobytes())
        key = digest.digest()
        if key not in cls._latest:
            if len(cls._latest) >= MAX_REFERENCES:
                del cls._latest[next(iter(cls._latest))]
            cls._latest[key] = cls(run, dtype)
        return cls._latest[key]

    def __init__(self, run: Callable[[torch.dtype], dict[str, Tensor]], dtype: torch.dtype) -> None:
        self.eager = run(dtype)
        self.residuals: dict[str, Tensor] = {}
        if dtype == torch.float64:
            with LongDouble() as mode:
                self.truth = run(dtype)
            self.residuals = {name: mode.residual(t) for name, t in self.truth.items()}
        else:
            self.truth = {name: t.double() for name, t in run(torch.float64).items()}
        self.expected = Expected(run, self.truth, dtype, self.residuals)

    def findings(self, got: dict[str, Tensor]) -> list[contract.Finding]:
        """Return a contract finding for each result."""
        assert got.keys() == self.truth.keys()
        return [
            contract.judge(
                name, got[name], truth, self.eager[name],
                gradient=name.startswith("grad"),
                residual=self.residuals.get(name),
                expected=functools.partial(self.expected.error, name),
            )
            for name, truth in self.truth.items()
        ]  # fmt: skip


def round_inputs(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 inputs to dtype, because the contract excludes the rounding of inputs."""
    if tensor.dtype != torch.float32 or dtype in (torch.float32, torch.float64):
        return tensor
    return torch.empty_like(tensor).copy_(tensor.to(dtype))  # preserves the strides


def attention(mask: Any = None, **options: Any) -> Callable[..., Callable[..., tuple]]:
    """Return function(backend)(query, key, value, bias=None) for `assert_like_eager`.

    Args:
        mask: a Mask. Pass a float mask as `bias` to the returned function instead, so that its
            gradient is checked too.
        options: keyword arguments of scaled_dot_product_attention.
    """

    def of(backend: str) -> Callable[..., tuple[Tensor, ...]]:
        def call(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> tuple:
            whole = None if mask is None else mask.to(query.device)
            if bias is not None:
                added = fused_attn.masks.bias(bias)
                whole = added if whole is None else whole & added
            return F.scaled_dot_product_attention(
                query, key, value, whole, return_lse=True, backend=backend, **options
            )

        return call

    # Views of large tensors get no cache key, because their pickle contains the full storage.
    if mask is None or all(t.untyped_storage().nbytes() < 2**20 for t in mask.tensors()):
        of.key = pickle.dumps(("attention", mask, options))  # type: ignore[attr-defined]
    return of


def random_qkv(
    batch: int,
    num_heads: int,
    num_heads_kv: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int | None = None,
    seed: int = 0,
) -> dict[str, Tensor | None]:
    """Draw float32 query, key and value."""
    generator = drawn(seed)
    sizes = {
        "query": (num_heads, seqlen_q, head_dim),
        "key": (num_heads_kv, seqlen_k, head_dim),
        "value": (num_heads_kv, seqlen_k, head_dim if head_dim_v is None else head_dim_v),
    }
    return {n: torch.randn(batch, *size, generator=generator) for n, size in sizes.items()}


def leaves_of(tensors: Iterable[Tensor], dtype: torch.dtype, backend: str) -> list[Tensor]:
    """Return copies of the tensors on the backend's device, as leaves that require grad."""
    device = device_of(backend)
    return [t.detach().to(device, dtype, copy=True).requires_grad_() for t in tensors]


@contextlib.contextmanager
def use_threads(number: int) -> Iterator[None]:
    """Use a number of threads in the CPU kernels within the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic(wanted: bool = True) -> Iterator[None]:
    """If `wanted`, make torch use deterministic algorithms within the block."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(before or wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextlib.contextmanager
def use_isa(name: str) -> Iterator[None]:
    """Use the CPU kernels of an instruction set within the block; "" selects the best one."""
    cpp._cpu.set_isa(name)
    try:
        yield
    finally:
        cpp._cpu.set_isa("")


def saved_and_loaded(value: Any, weights_only: bool = False) -> Any:
    """Return a copy of a value made by torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def runnable(isa: str) -> bool:
    """Return True if this machine can run the kernels of an instruction set."""
    try:
        with use_isa(isa):
            return True
    except ValueError:
        return False
