"""The emulator of CUDA kernels: its results, and the mistakes in kernels that it detects.

`make emulator` builds the emulator and the kernels in tests/cuda_emulator/check_kernels.cpp.
"""

import ctypes
import importlib.util
import re
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NAME = "_emulator_check"
MODULE = ROOT / "build" / "cuda_emulator" / (NAME + sysconfig.get_config_var("EXT_SUFFIX"))
SOURCE = (ROOT / "tests" / "cuda_emulator" / "check_kernels.cpp").read_text().splitlines()

pytestmark = pytest.mark.skipif(not MODULE.exists(), reason=f"no {MODULE.name}: make emulator")


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, MODULE)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def settings(seed: int = 0, race_check: bool = True) -> None:
    ctypes.CDLL(str(MODULE)).cuda_emulator_settings(ctypes.c_uint64(seed), race_check)


@pytest.fixture(autouse=True)
def _default_settings() -> Iterator[None]:
    yield
    settings()


def run(module: ModuleType, kernel: str, tensors: list[torch.Tensor], **arguments: Any) -> None:
    module.run(kernel=kernel, pointers=[t.data_ptr() for t in tensors], **arguments)


def lines_of(text: str) -> list[int]:
    """Return the numbers of the lines in check_kernels.cpp that contain a text."""
    return [number for number, line in enumerate(SOURCE, 1) if text in line]


def line_of(text: str) -> int:
    (line,) = lines_of(text)
    return line


DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def matmul(module: ModuleType, dtype: str, mistake: str = "") -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix product of the emulated kernel, and the same in float64; padding is NaN."""
    m, n, k = 150, 128, 160
    torch.manual_seed(0)
    a = torch.full((192, k), torch.nan, dtype=DTYPES[dtype])
    a[:m] = torch.randn(m, k)
    b, c = torch.randn(k, n).to(a), torch.full((m, n), torch.nan)
    grid = {"blocks": 6, "threads": 128, "shared_size": 3 * 8192}
    run(module, f"matmul_{dtype}", [a, b, c], sizes=[m, n, k], mistake=mistake, **grid)
    return c, a[:m].double() @ b.double()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_matmul_16_bits(module: ModuleType, dtype: str, seed: int) -> None:
    settings(seed)
    got, expected = matmul(module, dtype)
    assert (got - expected).abs().max() < 1e-4  # products are exact, sums are float32


@pytest.mark.parametrize("round_operands", [True, False])
def test_matmul_tf32(module: ModuleType, round_operands: bool) -> None:
    torch.manual_seed(0)
    a, b, c = torch.randn(16, 40), torch.randn(40, 8), torch.empty(16, 8)
    run(module, "matmul_tf32", [a, b, c], sizes=[40, round_operands], blocks=1, threads=32)

    def operand(x: torch.Tensor) -> torch.Tensor:
        bits = x.view(torch.int32) + (0x1000 if round_operands else 0)
        return (bits & ~0x1FFF).view(torch.float32).double()

    assert (c - operand(a) @ operand(b)).abs().max() < 1e-5


def test_float16_denormals_and_specials(module: ModuleType) -> None:
    a, b = (torch.zeros(*size, dtype=torch.float16) for size in ((64, 32), (32, 64)))
    a[0, 0], b[0] = 2.0**-24, 1.0
    a[1, 1], a[2, 1], b[1, 1] = torch.inf, -65504.0, 2.0**-15
    a[3, 2] = torch.nan
    c = torch.empty(64, 64)
    grid = {"blocks": 1, "threads": 128, "shared_size": 3 * 8192}
    run(module, "matmul_float16", [a, b, c], sizes=[64, 64, 32], **grid)
    assert c[0].eq(2.0**-24).all()
    assert c[1, 1] == torch.inf and c[1, 0].isnan()  # Inf * 0
    assert c[2, 1] == -65504.0 * 2.0**-15 and c[3].isnan().all() and c[4:].eq(0).all()


def test_conversions(module: ModuleType) -> None:
    torch.manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (100_000,)).to(torch.int32)
    ties = torch.arange(0, 2**16, dtype=torch.int32) << 16 | 0x8000  # between bfloat16 numbers
    half_ties = (torch.arange(-200, 200) + 0.5) * 2.0**-24  # between float16 numbers
    edges = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504.0, 65519.9, 65520.0, 3.4e38]
    values = [bits.view(torch.float32), ties.view(torch.float32), half_ties, torch.tensor(edges)]
    x = torch.cat([*values, torch.linspace(-160.0, 130.0, 5000)])
    out = torch.full((6, len(x)), -1.0)
    run(module, "conversions", [x, out], sizes=[len(x)], blocks=1, threads=32)

    def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
        zeros = got.signbit() == expected.signbit()
        return bool(((got == expected) & zeros | got.isnan() & expected.isnan()).all())

    for row, dtype in enumerate([torch.float16, torch.bfloat16]):
        assert same(out[row], x.to(dtype).float())
        low, high = out[4 + row].view(dtype).view(-1, 2).float().unbind(1)
        assert same(low, x.to(dtype).float()) and same(high[~x.isnan()], -low[~x.isnan()])
    tf32 = ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    assert same(out[2], tf32.where(x.isfinite(), x))
    powers = x.double().exp2()
    expected = powers.where(~(powers < 2.0**-126), 0.0).float()
    assert torch.allclose(out[3], expected, rtol=3e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [32, 256, 1024])
def test_collectives(module: ModuleType, threads: int) -> None:
    blocks = 3
    out = torch.empty(blocks, threads, 3, dtype=torch.int32)
    count = torch.zeros(1)
    run(module, "collectives", [out, count], sizes=[threads], blocks=blocks, threads=threads)
    thread = torch.arange(threads)
    votes = (thread % 3 == 0).view(-1, 32).long() @ (1 << torch.arange(32))
    assert out[..., 0].eq(thread // 32 * 32 + 31 - thread % 32).all()
    assert out[..., 1].eq(thread ^ 5).all()
    assert (out[..., 2].long() & 0xFFFFFFFF).eq(votes[thread // 32]).all()
    assert count.item() == blocks * threads


def errors(mistake: Callable[[], object]) -> list[str]:
    """Assert that a mistake raises an error with each of 8 seeds; return the error messages."""
    messages = []
    for seed in range(8):
        settings(seed)
        with pytest.raises(RuntimeError) as error:
            mistake()
        messages.append(str(error.value))
    settings()
    return messages


WRITTEN = "race: touches what was written without a barrier in between"
READ = "race: overwrites what was read without a barrier in between"
COPIED = "race: touches what a copy that was not waited for writes"


def assert_race(messages: list[str], kernel: str, said: set[str], lines: tuple[str, str]) -> None:
    """Assert that each message describes the race and both of its lines, in either order."""
    first, second = map(lines_of, lines)
    pattern = re.compile(
        rf"{kernel} could not be launched with .*: check_kernels.cpp:(\d+): "
        r"block \d+, thread \d+: (race: .*) "
        r"\(shared address \d+; the other: (?:thread|warp) \d+, line (\d+)\)"
    )
    for message in messages:
        match = pattern.fullmatch(message)
        assert match is not None and match[2] in said, message
        here, there = int(match[1]), int(match[3])
        assert (here in first and there in second) or (here in second and there in first), message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("no sync_block", {COPIED, READ, WRITTEN}),
        ("no copy_wait", {COPIED}),
        ("early copy", {COPIED, READ}),
    ],
)
def test_planted_races(module: ModuleType, dtype: str, mistake: str, said: set[str]) -> None:
    messages = errors(lambda: matmul(module, dtype, mistake))
    assert_race(messages, f"matmul_{dtype}", said, ("copy_async(base", "load_matrices"))
    settings(race_check=False)
    got, expected = matmul(module, dtype, mistake)
    assert not (got - expected).abs().max() < 1e-4
    settings()
    got, expected = matmul(module, dtype)  # an error does not affect later launches
    assert (got - expected).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
def test_planted_wrong_fragment(module: ModuleType, dtype: str) -> None:
    got, expected = matmul(module, dtype, "wrong fragment")
    assert (got - expected).abs().max() > 1


def pairs(module: ModuleType, mistake: str = "") -> torch.Tensor:
    out = torch.zeros(130, dtype=torch.int32)
    grid = {"blocks": 1, "threads": 128, "shared_size": 1024}
    run(module, "pairs", [out], sizes=[], mistake=mistake, **grid)
    return out[:128]


@pytest.mark.parametrize("seed", range(10))
def test_pairs(module: ModuleType, seed: int) -> None:
    settings(seed)
    thread = torch.arange(128)
    assert pairs(module).eq(10 * (thread ^ 32) + 45 + (thread ^ 1)).all()


INT = ("store_shared<int>(thread", "sum += load_shared")
UINT16 = ("store_shared<uint16_t>", "load_shared<uint16_t>")


@pytest.mark.parametrize(
    ("mistake", "said", "lines"),
    [
        ("no sync_block", READ, INT),
        ("ended warp", WRITTEN, INT),
        ("early store", WRITTEN, INT),
        ("no sync_warp", READ, UINT16),
    ],
)
def test_races(module: ModuleType, mistake: str, said: str, lines: tuple[str, str]) -> None:
    assert_race(errors(lambda: pairs(module, mistake)), "pairs", {said}, lines)


GLOBAL = r"\d+: global address \S+ is null or no multiple of 16"


@pytest.mark.parametrize(
    ("mistake", "line", "said"),
    [
        ("misaligned", "store_shared<float>", r"\d+: shared address \d+ is no multiple of 4"),
        ("out of bounds", "load_shared<Chunk>", r"\d+: 16 bytes at shared .* 1024 bytes"),
        ("misaligned matrix", "load_matrices(r", "37: shared address 776 is no multiple of 16"),
        ("misaligned source", "copy_async(0,", GLOBAL),
        ("misaligned chunk", "load_chunk(", GLOBAL),
    ],
)
def test_mistakes(module: ModuleType, mistake: str, line: str, said: str) -> None:
    place = f"check_kernels.cpp:{line_of(line)}: block 0, thread "
    for message in errors(lambda: pairs(module, mistake)):
        assert re.fullmatch(f"pairs could not be launched with .*: {place}{said}", message), message
    assert pairs(module).ne(0).all()


def test_diverged_lanes(module: ModuleType) -> None:
    lines = {line_of('makes("diverged")'), line_of("the end")}
    for message in errors(lambda: pairs(module, "diverged")):
        assert "others of the same warp are at" in message
        assert {int(line) for line in re.findall(r"check_kernels.cpp:(\d+)", message)} == lines
    for message in errors(lambda: pairs(module, "ended")):
        assert re.search("45 of the same warp has ended|45: ends, but others of the", message)


def test_a_seed_determines_the_schedule(module: ModuleType) -> None:
    first, second = (errors(lambda: matmul(module, "float16", "no sync_block")) for _ in range(2))
    assert first == second and len(set(first)) > 1


def test_threads_of_the_host(module: ModuleType) -> None:
    with ThreadPoolExecutor(4) as pool:
        for got, expected in pool.map(lambda _: matmul(module, "float16"), range(8)):
            assert (got - expected).abs().max() < 1e-4


def test_launches_beyond_gpu_limits(module: ModuleType) -> None:
    with pytest.raises(
        RuntimeError, match=r"with 1 blocks, 2048 threads per block and 0 bytes .*: the emulator"
    ):
        run(module, "conversions", [], sizes=[], blocks=1, threads=2048)
    with pytest.raises(RuntimeError, match="too much shared memory"):
        run(module, "conversions", [], sizes=[], blocks=1, threads=32, shared_size=1 << 20)
