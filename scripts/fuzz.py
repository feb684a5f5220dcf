"""Search random calls for results outside the numerics contract.

Half of the problems are hard for a kernel's rounding: few visible keys, or one key with nearly all
the weight. Their score gradients are small differences of large terms. hypothesis shrinks a case
that fails; it is printed as the command that reproduces it, and added to tests/fuzz_corpus.txt.

Besides kernels, the cases call swapped models of transformers, engines and libraries whose
arguments are mapped to masks, and distributed attention, whose ranks are threads.

    python scripts/fuzz.py --minutes 5 --isa avx2 generic --op attention,decode
    TRITON_INTERPRET=1 python scripts/fuzz.py --cases 100 --backend triton
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import hypothesis
import torch
from fuzz_cases import Case, worst
from fuzz_ops import OPS
from helpers import BACKENDS, INTERPRETED, takes, use_isa
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from fused_attn.base import small_calls

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "fuzz_corpus.txt"  # one case a line
DTYPES = ["float32", "bfloat16", "float16", "float64"]
PHASES = [Phase.generate, Phase.shrink]
ROUND = 50  # cases of one search, which ends at its first failure


def check(case: Case, backend: str, isas: Sequence[str | None] = (None,)) -> None:
    """Check a case on a backend, and on each of some instruction sets of backend "cpp".

    Raises:
        AssertionError: a result is wrong. Other exceptions are failures, too.
    """
    for isa in isas:
        with use_isa(isa) if isa else contextlib.nullcontext():
            OPS[case["op"]].check(case, backend)


def supports(case: Case, backend: str) -> bool:
    """Return True if a backend has kernels for the operation and dtype of a case."""
    own = backend == "cpp" or not OPS[case["op"]].only_cpp
    return own and takes(backend, getattr(torch, case["dtype"]))


def cases_of(ops: Sequence[str], backend: str, dtypes: Sequence[str]) -> st.SearchStrategy[Case]:
    """Return a strategy of cases that a backend supports."""
    both = [(op, dtype) for op in ops for dtype in dtypes]
    own = [of for of in both if supports({"op": of[0], "dtype": of[1]}, backend)]
    return st.sampled_from(own).flatmap(lambda of: OPS[of[0]].cases(of[0], backend, of[1]))


def search(
    strategy: st.SearchStrategy[Case],
    backend: str,
    seed: int,
    count: int,
    isas: Sequence[str | None] = (None,),
    until: float = float("inf"),
) -> tuple[int, tuple[Case, Exception] | None]:
    """Check cases until the first failure.

    Args:
        until: time at which no further case is checked.

    Returns:
        number of cases before any shrinking, and the shrunk failing case with its exception.
    """
    failed: list[tuple[Case, Exception]] = []
    checked = 0

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, report_multiple_bugs=False,
        phases=PHASES, suppress_health_check=list(HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )  # fmt: skip
    @hypothesis.given(strategy)
    def run(case: Case) -> None:
        nonlocal checked
        if not failed:
            if time.monotonic() > until:
                return
            checked += 1
        try:
            check(case, backend, isas)
        except Exception as error:
            failed.append((case, error))
            raise

    with contextlib.suppress(Exception):
        run()
    return checked, failed[-1] if failed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="cpp")
    parser.add_argument("--isa", nargs="*", default=[None], help="instruction sets of backend cpp")
    parser.add_argument("--op", default=",".join(OPS), help="which calls, separated by commas")
    parser.add_argument("--dtype", nargs="*", default=DTYPES, help=" ".join(DTYPES))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=1 << 60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=json.loads, help="check this case alone")
    args = parser.parse_args()
    small_calls.limits = small_calls.NONE
    if INTERPRETED:
        import triton_interpreter

        triton_interpreter.repair()
    if args.case:
        check(args.case, args.backend, args.isa)
        print("within the contract")
        return
    strategy = cases_of(args.op.split(","), args.backend, args.dtype)
    begin, seed, total = time.monotonic(), args.seed, 0
    until, failures = begin + 60 * args.minutes, 0
    while total < args.cases and time.monotonic() < until:
        count = min(ROUND, args.cases - total)
        checked, failure = search(strategy, args.backend, seed, count, args.isa, until)
        total, seed = total + checked, seed + 1
        if failure is not None:
            failures += 1
            report(*failure, args)
    seconds = time.monotonic() - begin
    shares = ", ".join(f"{op} {own:.2f}" for op, own in sorted(worst.items()))
    print(f"{args.backend}: {failures} failures in {total} cases, {seconds:.0f} s; worst: {shares}")
    raise SystemExit(failures > 0)


def report(case: Case, error: Exception, args: argparse.Namespace) -> None:
    """Print the command that reproduces a failure, and add its case to the corpus."""
    text = json.dumps(case)
    isas = f" --isa {' '.join(args.isa)}" if args.isa != [None] else ""
    print(f"{type(error).__name__}: {error}")
    print(f"    python scripts/fuzz.py --backend {args.backend}{isas} --case {shlex.quote(text)}")
    lines = CORPUS.read_text().splitlines() if CORPUS.exists() else []
    if text not in lines:
        CORPUS.write_text("\n".join([*lines, text, ""]))


if __name__ == "__main__":
    main()
