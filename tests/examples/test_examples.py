"""Properties of the examples: reproducible results, agreement with eager, arguments, claims."""

import json
import re
from typing import Any

import pytest
from example_runs import EXAMPLES, run_example

# isort: split
import common

NAMES = ("bert", "gpt", "rnn", "transfer", "translate", "vit")


def timeless(figures: Any) -> Any:
    """Return the figures without times and rates, whose names contain "second"."""
    if isinstance(figures, dict):
        return {k: timeless(v) for k, v in figures.items() if "second" not in k}
    return [timeless(v) for v in figures] if isinstance(figures, list) else figures


def losses(printed: str) -> dict[str, float]:
    """Return the last printed loss of each training run, by title."""
    found = re.findall(r"^(.*): step \d+ of \d+, loss ([\d.]+)", printed, re.MULTILINE)
    return {title: float(loss) for title, loss in found}


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_runs_are_reproducible_and_agree_with_eager(name, tmp_path):
    """Two runs with one seed have equal figures and plots, except for times.

    Their last losses agree with those of a run on eager within 1 %.
    """
    first, second, eager = (
        run_example(name, tmp_path / str(i), *args)
        for i, args in enumerate(((), (), ("--backend", "eager")))
    )
    assert timeless(first[1]) == timeless(second[1])
    plots = [{p.name: p.read_bytes() for p in (tmp_path / i).glob("*.png")} for i in "01"]
    assert {n for n in plots[0] if plots[0][n] != plots[1][n]} <= {"gpt_speed.png"}
    assert plots[0].keys() == plots[1].keys() != set()
    assert first[1]["curves"]["holds"]
    assert json.loads((tmp_path / "0" / f"{name}.json").read_text("utf-8"))["backend"] == "cpp"

    assert "curves" not in eager[1] and "reference itself" in eager[0]
    fused = losses(first[0])
    for title, loss in losses(eager[0]).items():
        assert fused[title] == pytest.approx(loss, rel=1e-2), title


def test_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for args in (["--backend", "none"], ["--output", str(tmp_path / "file" / "folder")]):
        monkeypatch.setattr("sys.argv", ["example", *args])
        with pytest.raises(SystemExit), common.example("example", "An example."):
            pytest.fail("the example ran with a wrong argument")
        assert args[0] in capsys.readouterr().err


def test_failed_claims(tmp_path, monkeypatch):
    """If a claim is false, the run ends with an error, and the page marks it as not reached."""
    monkeypatch.syspath_prepend(str(EXAMPLES.parent / "benchmarks"))
    import examples_table

    monkeypatch.setattr(examples_table, "NAMES", ("example",))
    monkeypatch.setattr("sys.argv", ["example", "--output", str(tmp_path)])

    def run() -> None:
        with common.example("example", "An example.") as example:
            example.report("speed: 3")
            example.require(True, "size must be > 1")
            example.require(False, "loss must be < 1")
            with example.figure("plot", size=(1, 1)) as axis:
                axis.plot([1, 2])

    with pytest.raises(SystemExit, match="loss must be < 1"):
        run()
    page = examples_table.markdown(tmp_path, "results")
    for line in ("- speed: 3", "- size must be > 1", "- **not reached:** loss must be < 1"):
        assert line in page.splitlines()
    assert "![example_plot](results/example_plot.png)" in page
