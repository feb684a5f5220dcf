"""scripts/gpu_session.py saves all finished results, even if later tests crash or hang."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import gpu_sections
import gpu_session
import pytest
from commands import ROOT, output_of
from gpu_sections import Run, Section

SCHEMA = json.loads((ROOT / "scripts" / "gpu_session.schema.json").read_text())
GOOD = "def test_good(): pass\n"
SLOW = "import time\ndef test_good(): pass\ndef test_slow(): time.sleep(60)\n"
# Limits: files in the results folder, bytes per file, bytes of the tree copied to a GPU machine.
MAX_FILES, MAX_BYTES, MAX_TREE = 8, 16 << 20, 64 << 20


def check(out):
    """Check the format of a session's results and the sizes of its files; return the results."""
    jsonschema = pytest.importorskip("jsonschema", reason="reason: needs jsonschema")
    results = json.loads((out / "results.json").read_text())
    jsonschema.validate(results, SCHEMA)
    assert {record["section"] for record in results["records"]} == set(results["sections"])
    files = [path for path in out.iterdir() if path.is_file()]
    assert len(files) <= MAX_FILES and all(f.stat().st_size <= MAX_BYTES for f in files)
    return results


def session(tmp_path, *files, seconds=120.0, unit_seconds=20.0, processes=1, **options):
    """Run a session with one section per test file (given as source); return its results."""
    sections = []
    for number, text in enumerate(files):
        path = tmp_path / f"test_planted_{number}.py"
        path.write_text(text)
        run = Run([str(path)], processes, unit_seconds)
        sections.append(Section(f"section {number}", 100.0, [run], **options))
    gpu_session.Session(sections, tmp_path / "out", seconds, dry=True).run()
    return check(tmp_path / "out")


def statuses(results):
    return {record["unit"].rpartition("::")[2]: record["status"] for record in results["records"]}


FAULTS = {
    "segfault": ("import os; os.kill(os.getpid(), 11)", "crash", "crashed while running"),
    "hang": ("import time; time.sleep(60)", "hang", "over 2 s"),
    "cuda": ("raise RuntimeError('CUDA error: an illegal access')", "crash", "illegal access"),
    "triton": ("raise RuntimeError('Error [CUDA]: misaligned address')", "crash", "misaligned"),
    "host": ("raise TypeError('host code')", "crash", "TypeError: host code"),
    "path": ("import gpu_records as g; raise OSError(g.__file__)", "crash", ": scripts/gpu_r"),
    "wrong": ("assert 1 == 2", "wrong", "assert 1 == 2"),
    "unsupported": ("raise NotImplementedError('has no mask')", "refused", "has no mask"),
    "refused": ("import pytest; pytest.skip('reason: refused: dropout')", "refused", "dropout"),
    "skipped": ("import pytest; pytest.skip('reason: other')", "skipped", "reason: other"),
    "noisy": ("print('x' * 10_000_000); assert False", "wrong", "assert False"),
    "good": ("pass", "ok", ""),
}


def test_faults(tmp_path, capsys):
    """Each planted fault is recorded with its status; later tests and the next section run."""
    planted = [f"def test_{name}():\n    {code}\n" for name, (code, _, _) in FAULTS.items()]
    results = session(tmp_path, "\n".join(planted), "def test_next(): pass\n", unit_seconds=2.0)
    wanted = {f"test_{name}": status for name, (_, status, _) in FAULTS.items()}
    assert statuses(results) == wanted | {"test_next": "ok"}
    messages = {r["unit"].rpartition("::test_")[2]: r["message"] for r in results["records"]}
    assert all(words in messages[name] for name, (_, _, words) in FAULTS.items())
    assert {section["status"] for section in results["sections"].values()} == {"done"}
    assert results["sections"]["section 0"]["planned"] == len(FAULTS)
    with tarfile.open(tmp_path / "out" / "logs.tar.gz") as archive:
        assert all(member.size <= gpu_session.LOG_BYTES for member in archive)
    assert capsys.readouterr().out.count("\n") <= gpu_session.TABLE_LINES


@pytest.mark.thorough
def test_a_section_that_takes_too_long(tmp_path, monkeypatch):
    """At the session's time limit, the current section is stopped, and the next one is skipped."""
    monkeypatch.setattr(gpu_session, "GRACE", 0.0)
    results = session(tmp_path, SLOW, GOOD, seconds=20.0)
    assert statuses(results) == {"test_good": "ok", "test_slow": "skipped", "section 1": "skipped"}
    assert [s["status"] for s in results["sections"].values()] == ["cut", "skipped"]


def test_sigterm_half_way(tmp_path):
    """After SIGTERM, results.json lists the finished test as ok and unfinished ones as skipped."""
    (tmp_path / "test_planted.py").write_text(SLOW)
    code = (
        "import sys, gpu_session; from gpu_sections import Run, Section\n"
        f"made = [Section('slow', 50.0, [Run([{str(tmp_path / 'test_planted.py')!r}])]),"
        " Section('next', 5.0, [])]\n"
        f"sys.exit(gpu_session.main(['--out', {str(tmp_path / 'out')!r}, '--dry'], lambda: made))"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT / "scripts")}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=tmp_path)
    path = tmp_path / "out" / "results.json"
    until = time.monotonic() + 40.0
    while not (path.exists() and "test_good" in path.read_text()) and time.monotonic() < until:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20.0) == 0
    results = check(tmp_path / "out")
    assert statuses(results) == {"test_good": "ok", "test_slow": "skipped", "next": "skipped"}
    assert results["sections"]["slow"]["message"] == "SIGTERM arrived"


@pytest.mark.parametrize("builds", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_without_the_cuda_module(builds, tmp_path, monkeypatch):
    """A missing _cuda module is built; if that fails, only the section that needs it is skipped."""
    facts = "import pytest\n@pytest.mark.parametrize('name', ['_cpu', '_cuda'])\n"
    facts += "def test_modules(name):\n    if name == '_cuda': pytest.skip('reason: no module')\n"
    for name, text in (("facts", facts), ("good", GOOD)):
        (tmp_path / f"test_{name}.py").write_text(text)
    monkeypatch.setattr(gpu_session, "BUILD", f"echo told; exit {int(not builds)}")
    monkeypatch.setattr(gpu_session.Session, "_suspicious", lambda self: False)
    good = [Run([str(tmp_path / "test_good.py")])]
    sections = [
        Section("facts", 30.0, [Run([str(tmp_path / "test_facts.py")])]),
        Section("other", 30.0, good),
        Section("cuda", 30.0, good, needs="_cuda"),
    ]
    gpu_session.Session(sections, tmp_path / "out", 60.0, dry=False).run()
    results = check(tmp_path / "out")
    assert results["sections"]["cuda"]["status"] == ("done" if builds else "skipped")
    assert results["sections"]["other"]["status"] == "done"
    assert builds or "told" in results["sections"]["cuda"]["message"]


def test_plan_of_a_session():
    """The sections fit into the time limit of a session, and a dry session has the same sections.

    The files of the repository are small enough to be copied to a GPU machine.
    """
    sections = gpu_sections.on_gpu()
    in_a_row = [s.seconds for s in sections if not s.beside and s.name != "memcheck"]
    assert sum(in_a_row) <= 545  # correctness sections rarely reach their limit
    assert [s.name for s in sections] == [s.name for s in gpu_sections.dry()]
    names = output_of("git", "ls-files", "-z", cwd=ROOT).split("\0")
    carried = [ROOT / name for name in names if name] + [*ROOT.glob("fused_attn/*-312-*.so")]
    assert sum(path.stat().st_size for path in carried if path.exists()) <= MAX_TREE


@pytest.mark.thorough
def test_dry_session(tmp_path):
    """A dry session (without a GPU) writes a result for every section within 245 s."""
    began = time.monotonic()
    script = ROOT / "scripts/gpu_session.py"
    output_of(sys.executable, script, "--dry", "--seconds", 240, "--out", tmp_path, cwd=ROOT)
    assert time.monotonic() - began <= 245.0
    results = check(tmp_path)
    skipped = {n for n, s in results["sections"].items() if s["status"] == "skipped"}
    assert skipped <= {"memcheck"}
    assert {r["status"] for r in results["records"]} <= {"ok", "refused", "skipped"}
