"""Tables of a GPU session list failures, and say which backends may become defaults."""

import sys

import pytest
from commands import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
pytest.importorskip("matplotlib", reason="reason: needs matplotlib")
import gpu_tables


def record(section, unit, status, message="", **data):
    return {"section": section, "unit": unit, "status": status, "message": message, "data": data}


def speed(mask, **milliseconds):
    measured = {
        "group": "forward", "name": f"{mask}-D128-8k", "dtype": "bfloat16", "backend": "triton",
        "mask": mask, "milliseconds": milliseconds, "speedup": {"sdpa": 2.0}, "aims": {},
        "gflops": 4e5, "share_of_peak": 0.5,
    }  # fmt: skip
    return record("speed", f"test_forward[{mask}]", "ok", measured=measured)


@pytest.fixture
def session():
    times = {"fused_attn": 1.0, "fused_attn, flex": 3.0, "fused_attn, cuda": 1.0, "sdpa": 2.0}
    return {
        "machine": {"gpus": [{"name": "H100"}], "torch": "2.11", "triton": "3.6", "driver": "580"},
        "ceilings": {"matmul": 790e3, "copy": 3000.0},
        "sections": {"triton": {"planned": 3}, "speed": {"planned": 1}},
        "records": [
            record("triton", "tests/gpu/test_checks.py::test_check[triton-bf16-a]", "ok"),
            record("triton", "tests/gpu/test_checks.py::test_check[triton-bf16-b]", "refused"),
            record("flex", "tests/gpu/test_checks.py::test_check[flex-bf16-a]", "ok"),
            record("cuda", "tests/gpu/test_checks.py::test_check[cuda-bf16-a]", "ok"),
            record("cuda", "tests/gpu/test_checks.py::test_check[cuda-bf16-b]", "hang", "a | b"),
            speed("causal", **times),
        ],
    }


def test_failures_are_listed(session):
    text = gpu_tables.performance(session)
    assert "Failures: 1." in text and "| cuda | test_checks.py::test_check[cuda-bf16-b]" in text
    assert "a \\| b" in text and "400 TFLOP/s" in text and "50%" in text
    assert "H100, torch 2.11" in text and "790 TFLOP/s" in text


def test_eligibility_as_a_default(session):
    """A backend is eligible as a default if no check fails and no case is slower than sdpa."""
    rows = {row[0]: row for row in gpu_tables.eligibility(session)}
    assert rows["triton"] == ["triton", "forward", "causal", "1", "2.00x", "yes"]
    assert rows["flex"][4:] == ["0.67x", "no"]
    assert rows["cuda"][4:] == ["2.00x", "no"]  # a check hung
    assert "| triton | forward | causal | 1 | 2.00x | yes |" in gpu_tables.engines(session)
    slower = speed("causal", fused_attn=3.0, sdpa=2.0)
    session["records"].append(slower)
    assert gpu_tables.eligibility(session)[-1][3:] == ["2", "0.67x", "no"]


def test_without_sessions():
    assert gpu_tables.all_of([], gpu_tables.engines) == "No GPU was measured yet."
