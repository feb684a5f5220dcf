"""Run the most important GPU tests and benchmarks in a limited time: `make gpu-session`.

    python scripts/gpu_session.py [--seconds S] [--out DIR] [--sections A,B] [--kernels A] [--dry]

Sections (scripts/gpu_sections.py) run the GPU tests and benchmarks of this repository in child
processes. A crash, a hang or a broken GPU context costs one test. results.json in the output folder
is updated several times a second, so that finished results are never lost; its format is
scripts/gpu_session.schema.json. This process imports neither torch nor the package.

--dry runs a small part of each section without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gpu_sections
from gpu_sections import BACKENDS, Run, Section

ROOT = Path(__file__).resolve().parents[1]
STATUSES = ("ok", "wrong", "crash", "hang", "refused", "skipped")
LOG_BYTES = 4_000_000  # end of each log that is kept
TABLE_LINES = 60
GRACE = 3.0  # seconds reserved at the end to write the results
BUILD_SECONDS = 120.0
KERNELS = Path(
    "/tmp/fused-attn-triton"
)  # Triton finds kernels at the path where they were compiled
# Build the modules here if one was not copied with the tree or cannot be imported.
BUILD = "FUSED_ATTN_CUDA=1 FUSED_ATTN_CUDA_ARCHS=90a {python} setup.py -q build_ext --inplace"

Record = dict[str, Any]


class StoppedError(Exception):
    """SIGTERM or SIGINT arrived."""


@dataclass
class Process:
    """A child in a separate process group, whose output goes to a log."""

    popen: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, command: Sequence[str], log: Path, environment: dict[str, str]) -> Process:
        with open(log, "ab") as file:
            popen = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return cls(popen, log)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def tail(self, size: int) -> str:
        data = self.log.read_bytes()[-size:] if self.log.exists() else b""
        return data.decode("utf-8", "replace")


@dataclass
class Records:
    """Records of a run, read from the lines that its processes append to a file."""

    path: Path
    position: int = 0
    planned: int = 0
    begun: dict[str, float] = field(default_factory=dict)  # start times of units without a record
    by_unit: dict[str, Record] = field(default_factory=dict)

    def read(self) -> None:
        """Read the lines that are new. The last line may be incomplete."""
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            file.seek(self.position)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self.position += end
        for line in data[:end].splitlines():
            self.add(json.loads(line))

    def add(self, entry: Record) -> None:
        if "planned" in entry:
            self.planned += entry["planned"]
        elif "begun" in entry:
            self.begun[entry["begun"]] = time.monotonic()
        else:
            unit = entry["unit"]
            began = self.begun.pop(unit, time.monotonic())
            known = self.by_unit.get(unit)
            if known is None or known["status"] == "ok":
                seconds = round(time.monotonic() - began, 3)
                self.by_unit[unit] = {"seconds": seconds, "data": {}, **entry}

    def finish(self, status: str, message: str) -> None:
        """Add a record for each unit that has begun and has none."""
        for unit in list(self.begun):
            self.add({"unit": unit, "status": status, "message": message})


@dataclass
class Active:
    """A section that is running."""

    section: Section
    began: float
    limit: float
    record: Record
    process: Process | None = None
    records: Records | None = None
    next_run: int = 0


class Session:
    """Runs sections and keeps results.json up to date.

    Args:
        sections: sections to run.
        out: folder of results.json and logs.tar.gz.
        seconds: time after which everything ends.
        dry: without a GPU.
        kernels: archive of the folder KERNELS, or None.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        out: Path,
        seconds: float,
        dry: bool,
        kernels: Path | None = None,
    ) -> None:
        self.sections, self.out, self.dry = sections, out, dry
        self.began = time.monotonic()
        self.end = self.began + seconds - GRACE
        out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="gpu-session-"))  # logs, records and caches
        self.results: dict[str, Any] = {
            "format": 1, "dry": dry, "limit": seconds, "seconds": 0.0, "commit": _commit(),
            "machine": {}, "ceilings": {}, "sections": {}, "records": [],
        }  # fmt: skip
        self.has_kernels = kernels is not None
        if kernels is not None:
            with tarfile.open(kernels) as archive:
                archive.extractall(KERNELS.parent, filter="data")
        self.builder: Process | None = None
        self.active: list[Active] = []

    # ---- the course of a session ----

    def run(self) -> None:
        """Run all sections, and write the results; SIGTERM ends the session early."""
        stopped = ""
        try:
            waiting = list(self.sections)
            while waiting:
                group = [waiting.pop(0)]
                while waiting and waiting[0].beside:
                    group.append(waiting.pop(0))
                self._run_group(group)
        except StoppedError as error:
            stopped = str(error)
        for active in self.active:
            self._close(active, stopped or "the session ended")
        for section in self.sections:
            if section.name not in self.results["sections"]:
                self._skip(section, stopped or "no time was left")
        if self.builder is not None:
            self.builder.kill()
        self._finish()

    def _run_group(self, group: Sequence[Section]) -> None:
        if self._suspicious() and not self._gpu_answers():
            for section in group:
                self._skip(section, "the GPU does not answer")
            return
        for section in group:
            left = self.end - time.monotonic()
            missing = self._missing(section)
            if "{crashed}" in section.runs[0].arguments and not self._crashed():
                missing = "nothing crashed"
            if left < 2.0 or missing:
                self._skip(section, missing or "no time was left")
                continue
            record: Record = {"status": "running", "seconds": 0.0, "planned": 0, "message": ""}
            self.results["sections"][section.name] = record
            now = time.monotonic()
            self.active.append(Active(section, now, min(section.seconds, left), record))
        while self.active:
            for active in list(self.active):
                self._advance(active)
            self._write()
            time.sleep(0.3)

    def _advance(self, active: Active) -> None:
        """Start the next run of a section if none is running; end the section after its limit."""
        now = time.monotonic()
        if active.records is not None:
            active.records.read()
        if now - active.began > active.limit:
            self._close(active, f"the section's {active.limit:.0f} s were over")
        elif active.process is None:
            if active.next_run == len(active.section.runs):
                self._close(active, "")
            else:
                self._start(active)
        elif active.process.popen.poll() is not None:
            self._end_run(active, "")

    def _start(self, active: Active) -> None:
        run, number = active.section.runs[active.next_run], active.next_run
        active.next_run += 1
        stem = f"{active.section.name.replace(' ', '-')}-{number}"
        active.records = Records(self.work / f"{stem}.jsonl")
        command = self._command(run, active.records.path)
        log = self.work / f"{stem}-output.log"
        active.process = Process.start(command, log, self._environment(run))

    def _end_run(self, active: Active, reason: str) -> None:
        """Record the results of a run that has ended; if a reason is given, end it first."""
        assert active.process is not None and active.records is not None
        active.process.kill()
        status = active.process.popen.returncode
        active.records.read()
        active.records.finish(
            "skipped" if reason else "crash", f"unfinished: {reason or f'pytest ended ({status})'}"
        )
        found = [{"section": active.section.name, **r} for r in active.records.by_unit.values()]
        if active.section.runs[active.next_run - 1].under:
            message = " ".join(active.process.tail(1500).split())[-600:]
            unit = f"{active.section.name}, run {active.next_run}"
            found += [_record(active.section, unit, "wrong" if status else "ok", message)]
        if not found:
            unit = f"{active.section.name}, run {active.next_run}"
            message = reason or f"no test ran (pytest's exit status {status})"
            found = [
                _record(active.section, unit, "skipped" if reason or status == 5 else "crash",
                        f"{message}: {' '.join(active.process.tail(1500).split())[-600:]}")
            ]  # fmt: skip
        self.results["records"] += found
        active.record["planned"] += active.records.planned
        self._learn(found)
        active.process = active.records = None

    def _close(self, active: Active, reason: str) -> None:
        if active.process is not None:
            self._end_run(active, reason)
        elapsed = round(time.monotonic() - active.began, 1)
        active.record |= {"status": "cut" if reason else "done", "seconds": elapsed}
        active.record["message"] = reason
        self.active.remove(active)
        if active.section.name == "facts" and not self.dry and "_cuda" in self._lost_modules():
            self._build()

    def _skip(self, section: Section, reason: str) -> None:
        entry = {"status": "skipped", "seconds": 0.0, "planned": 0, "message": reason}
        self.results["sections"][section.name] = entry
        self.results["records"].append(_record(section, section.name, "skipped", reason))

    # ---- what a run needs ----

    def _command(self, run: Run, records: Path) -> list[str]:
        crashed = self._crashed()
        arguments = [a.format(backend=self._fastest(), crashed=crashed) for a in run.arguments]
        processes = 0 if run.under else min(run.processes, os.cpu_count() or 1)
        options = {
            "-n": processes, "--max-worker-restart": 100_000, "--rootdir": ROOT,
            "--records": records, "--unit-seconds": run.unit_seconds,
        }  # fmt: skip
        given = [str(part) for option in options.items() for part in option]
        plugins = ["-p", "gpu_records", "-p", "no:cacheprovider"]
        pytest = [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors"]
        return [*run.under, *pytest, *plugins, *given, *arguments]

    def _environment(self, run: Run) -> dict[str, str]:
        """Return the environment of a run. Caches are in the work folder, not in the home."""
        path = [str(ROOT / "scripts"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        caches = {
            name: str(self.work / name.lower())
            for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
                         "CUDA_CACHE_PATH", "HYPOTHESIS_STORAGE_DIRECTORY")
        }  # fmt: skip
        if self.has_kernels:
            caches["TRITON_CACHE_DIR"] = str(KERNELS)
        one_thread = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        where = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        return {**os.environ, **one_thread, **caches, **where, **run.environment}

    def _missing(self, section: Section) -> str:
        """Return why a section's module is missing; wait for one that is being built."""
        if not section.needs or section.needs not in self._lost_modules():
            return ""
        if self.builder is None:
            return f"{section.needs} does not import"
        until = min(self.end, time.monotonic() + BUILD_SECONDS)
        while self.builder.popen.poll() is None and time.monotonic() < until:
            self._write()
            time.sleep(0.5)
        if self.builder.popen.poll() == 0:
            return ""
        return f"{section.needs} was not built: {' '.join(self.builder.tail(400).split())}"

    def _lost_modules(self) -> list[str]:
        tests = {name: f"test_modules[{name}]" for name in ("_cpu", "_cuda")}
        failed = [r["unit"] for r in self.results["records"] if r["status"] != "ok"]
        return [name for name, test in tests.items() if any(test in unit for unit in failed)]

    def _build(self) -> None:
        command = ["sh", "-c", BUILD.format(python=sys.executable)]
        self.builder = Process.start(command, self.work / "build.log", dict(os.environ))

    def _fastest(self) -> str:
        """Return the backend to time: the first that runs all smoke tests."""
        smoke = [r for r in self.results["records"] if r["section"] == "smoke"]
        for backend in BACKENDS:
            own = [r["status"] for r in smoke if f"[{backend}-" in r["unit"]]
            needed = [s for s in own if s not in ("refused", "skipped")]
            if needed and needed.count("ok") >= 0.8 * len(needed):
                return backend
        return BACKENDS[-1]

    def _crashed(self) -> str:
        """Return the first test that crashed on the GPU; empty if none did."""
        units = [r["unit"] for r in self.results["records"] if r["status"] == "crash"]
        return next((unit for unit in units if "::" in unit), "")

    def _suspicious(self) -> bool:
        """Return True if a unit of the latest sections crashed or hung."""
        latest = list(self.results["sections"])[-2:]
        return not self.dry and any(
            r["section"] in latest and r["status"] in ("crash", "hang")
            for r in self.results["records"]
        )

    def _gpu_answers(self) -> bool:
        code = "import torch; torch.ones(2, device='cuda').sum().item()"
        for _ in range(2):
            probe = Process.start(
                [sys.executable, "-c", code], self.work / "probe.log", dict(os.environ)
            )
            try:
                if probe.popen.wait(25.0) == 0:
                    return True
            except subprocess.TimeoutExpired:
                probe.kill()
        return False

    # ---- results ----

    def _learn(self, records: Sequence[Record]) -> None:
        for name in ("machine", "ceilings"):
            for record in records:
                self.results[name] = record["data"].get(name) or self.results[name]

    def _write(self) -> None:
        """Write all results so far to results.json, including those of running sections."""
        running = [
            {"section": a.section.name, **record}
            for a in self.active
            if a.records is not None
            for record in a.records.by_unit.values()
        ]
        self.results["seconds"] = round(time.monotonic() - self.began, 1)
        facts = {**self.results, "records": self.results["records"] + running}
        text = json.dumps(facts, indent=0) + "\n"
        for folder in (ROOT, sys.prefix):  # results are published: no paths of the machine
            text = text.replace(f"{folder}/", "")
        temporary = self.out / "results.json.tmp"
        temporary.write_text(text, "utf-8")
        temporary.replace(self.out / "results.json")

    def _finish(self) -> None:
        self._write()
        with tarfile.open(self.out / "logs.tar.gz", "w:gz") as archive:
            for path in sorted(self.work.glob("*.log")):
                data = path.read_bytes()[-LOG_BYTES:]
                path.write_bytes(data)
                archive.add(path, path.name)
        shutil.rmtree(self.work, ignore_errors=True)
        print("\n".join(summary(self.results)))


def _record(section: Section, unit: str, status: str, message: str) -> Record:
    return {
        "section": section.name, "unit": unit, "status": status, "seconds": 0.0,
        "message": message, "data": {},
    }  # fmt: skip


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return told.stdout.strip()


def summary(results: dict[str, Any]) -> list[str]:
    """Return the lines to print last: counts of each section, failures, and speeds."""
    records = results["records"]
    machine = results["machine"]
    gpus = [gpu["name"] for gpu in machine.get("gpus", [])] or ["no GPU"]
    lines = [f"{', '.join(gpus)}; torch {machine.get('torch')}; {results['ceilings']}"]
    lines.append("section       seconds planned " + " ".join(f"{s:>7}" for s in STATUSES))
    for name, section in results["sections"].items():
        counts = Counter(r["status"] for r in records if r["section"] == name)
        cells = " ".join(f"{counts[status]:7}" for status in STATUSES)
        about = f"{section['seconds']:7.0f} {section['planned']:7}"
        lines.append(f"{name:13} {about} {cells}  {section['message']}".rstrip())
    speeds = [r["data"]["measured"] for r in records if "measured" in r["data"]]
    for speed in speeds[:20]:
        peers = ", ".join(f"{name} {ms}" for name, ms in speed.get("milliseconds", {}).items())
        lines.append(f"{speed['group']} {speed['name']} {speed['dtype']} (ms): {peers}"[:240])
    failed = [r for r in records if r["status"] in ("wrong", "crash", "hang")]
    room = TABLE_LINES - len(lines) - 1
    lines += [f"{r['status'].upper()} {r['unit']}: {r['message']}"[:240] for r in failed[:room]]
    if len(failed) > room:
        lines.append(f"and {len(failed) - room} more failures: see results.json")
    return lines


def main(
    argv: Sequence[str] | None = None,
    sections: Callable[[], list[Section]] | None = None,
) -> int:
    """Run a session from command-line arguments; `sections` replaces those of gpu_sections."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=530.0, help="time for everything")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-session")
    parser.add_argument("--sections", default="", help="names of sections, separated by commas")
    parser.add_argument(
        "--kernels", type=Path, help="archive of Triton kernels compiled for the simulated GPU"
    )
    parser.add_argument("--dry", action="store_true", help="a small part, without a GPU")
    options = parser.parse_args(argv)
    made = (sections or (gpu_sections.dry if options.dry else gpu_sections.on_gpu))()
    wanted = [name.strip() for name in options.sections.split(",") if name.strip()]
    if unknown := set(wanted) - {section.name for section in made}:
        parser.error(f"no section {', '.join(sorted(unknown))}")
    made = [section for section in made if not wanted or section.name in wanted]

    def stop(number: int, _: Any) -> None:
        raise StoppedError(f"{signal.Signals(number).name} arrived")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    Session(made, options.out, options.seconds, options.dry, options.kernels).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
