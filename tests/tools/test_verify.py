"""fused-attn verify accepts kernels that are correct and faster, and reports incorrect ones."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import BACKENDS
from small_plans import SHAPE, SMALL, class_named, fast, small_plan
from stand_in import CPU, in_place_of_cpp

from fused_attn import functional as F
from fused_attn.backends import get_backend, select, verdicts
from fused_attn.backends.registry import BACKENDS as REGISTERED
from fused_attn.tools import cli, plan, timing, verify
from fused_attn.tools.cases import MASKS
from fused_attn.tools.checks import AttentionCheck, DecodeCheck, NormCheck, PartialCheck

# Emulated backends that become the default only after verification.
EMULATED = [n for n in BACKENDS if n in verdicts.KERNELS and not torch.cuda.is_available()]
__all__ = ["fast"]  # a fixture
pytestmark = pytest.mark.usefixtures("fast")


@pytest.fixture
def stand_in(verdict_folder):
    """Register the stand-in backend for tests of logic that does not depend on the backend."""
    with in_place_of_cpp() as backend:
        yield backend


@pytest.fixture(params=["stand_in", *EMULATED])
def backend(request, verdict_folder):
    """Register a first backend, which is selected only if a stored verdict allows it."""
    first = [] if request.param == "stand_in" else [request.param]
    with in_place_of_cpp(*first):
        if first:
            del REGISTERED["stand_in"]
        yield get_backend(request.param)


def corrupt(monkeypatch, backend, when, how):
    """Patch a backend's attention to apply `how` to the outputs of calls that satisfy `when`."""
    right = backend.attention_fwd

    def attention_fwd(call, *args):
        outputs = right(call, *args)
        if when(call):
            how(outputs)
        return outputs

    monkeypatch.setattr(backend, "attention_fwd", attention_fwd)


def of_kind(kind):
    return lambda call: call.mask.kind == kind


def run_snippet(text, capsys):
    """Run code and return its standard output."""
    capsys.readouterr()
    exec(compile(text, "snippet", "exec"), {})
    return capsys.readouterr().out


def test_verdicts_select_a_backend_until_forgotten(backend, verdict_folder):
    made, steps = small_plan(), []
    problem = problem_of_probe(made.classes[class_named("causal", "training")][0])
    assert select(problem) is not backend
    report = verify.verify(backend.name, made, lambda report: steps.append(1))
    assert not report.wrong and report.path.parent == verdict_folder
    assert len(steps) == made.steps
    assert report.usable == list(made.classes)
    assert all(verdict.speedup == 2.0 for verdict in report.classes.values())
    assert select(problem) is backend
    x = torch.randn(1, 2, 40, 32, requires_grad=True)
    out = F.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert "Attention" in out.grad_fn.name()  # the node is not torch's
    verdicts.forget([backend.name])
    assert select(problem) is not backend


def problem_of_probe(probe):
    """Return the problem that `select` receives for a probe."""
    seen = []

    def chosen(problem, backend=None):
        seen.append(problem)
        raise NotImplementedError

    call, operands = probe.call(CPU), probe.operands(CPU)
    leaves = [t.requires_grad_(probe.gradients) for t in operands.values()]
    with pytest.MonkeyPatch.context() as patch:
        for module in ("ops.dispatch", "ops.decode_step"):
            patch.setattr(f"fused_attn.{module}.select", chosen)
        patch.setattr("fused_attn.ops.dispatch.backend_for_unchecked", lambda *args: None)
        patch.setattr("fused_attn.ops.decode_step._unchecked_step", lambda *args: None)
        with pytest.raises(NotImplementedError), torch.set_grad_enabled(probe.gradients):
            call(*leaves)
    return seen[0]


@pytest.mark.thinned("covered by causal masks", kind=["none"])
@pytest.mark.parametrize("kind", ["causal", "none"])
def test_a_wrong_kernel_is_refused(backend, kind, monkeypatch, capsys):
    """Only calls of the incorrect kind are stored as unusable; the printed code shows the error."""
    corrupt(monkeypatch, backend, of_kind(kind), lambda outputs: outputs.out.mul_(1.01))
    report = verify.verify(backend.name, small_plan())
    other = {"causal": "none", "none": "causal"}[kind]
    stored = json.loads(report.path.read_text())["classes"]
    for direction in ("forward", "training"):
        assert stored[str(class_named(kind, direction))]["usable"] is False
        assert stored[str(class_named(kind, direction))]["found"] == "wrong"
        assert stored[str(class_named(other, direction))]["usable"] is True
    assert report.wrong
    trial = report.wrong[0]
    for word in (repr(SHAPE), "dtype='float32'", "seed=0", "error", "allowed", torch.__version__):
        assert word in report.snippet(trial)
    assert "WRONG out" in run_snippet(report.snippet(trial), capsys)


@pytest.mark.parametrize("of", ["out", "key"])
def test_wrong_partial_results_rule_out_their_class(stand_in, of, monkeypatch):
    """A wrong partial output rules out calls with its mask; a wrong gradient, only training."""
    forward, backward = stand_in.attention_fwd, stand_in.attention_bwd

    def corrupted(results, call):
        if call.options.partial and of in results._fields:
            getattr(results, of).mul_(1.01)
        return results

    monkeypatch.setattr(
        stand_in, "attention_fwd", lambda call, *args: corrupted(forward(call, *args), call)
    )
    monkeypatch.setattr(
        stand_in, "attention_bwd", lambda given: corrupted(backward(given), given.call)
    )
    checks = [PartialCheck(shape=SHAPE, mask="causal")]
    report = verify.verify(stand_in.name, replace(small_plan(), checks=checks))
    assert [trial.check for trial in report.wrong] == checks
    assert report.classes[class_named("none", "training")].usable
    assert not report.classes[class_named("causal", "training")].usable
    assert report.classes[class_named("causal", "forward")].usable == (of == "key")
    problem = problem_of_probe(small_plan().classes[class_named("causal", "training")][0])
    assert verdicts.reasons_against(stand_in.name, replace(problem, partial=True))


def test_errors_only_at_the_sizes_of_a_class(stand_in, monkeypatch):
    """A class whose probes fail is unusable, even if all smaller checks pass."""
    corrupt(
        monkeypatch, stand_in,
        lambda call: call.query.shape[2] > 30 and call.mask.kind == "causal",
        lambda outputs: outputs.out.fill_(float("nan")),
    )  # fmt: skip
    report = verify.verify(stand_in.name, small_plan())
    for name, verdict in report.classes.items():
        assert verdict.usable == (name.feature != "causal"), name


def test_a_different_dropout_mask_is_wrong(stand_in, monkeypatch):
    corrupt(
        monkeypatch, stand_in, lambda call: call.options.dropout_p > 0.0,
        lambda outputs: outputs.out[0, 0, 0].fill_(1.0),
    )  # fmt: skip
    made = small_plan(["dropout"])
    checks = [check for check in made.checks if check.how == "bits"]
    report = verify.verify(stand_in.name, replace(made, checks=checks))
    assert "number of different elements, of 6216" in report.wrong[0].failure()
    assert not report.classes[class_named("dropout", "forward")].usable


def test_results_that_do_not_repeat_are_wrong(stand_in, monkeypatch):
    noise = iter(range(10000))
    corrupt(
        monkeypatch, stand_in, of_kind("causal"),
        lambda outputs: outputs.out[0, 0, 0].mul_(1.0 + 2.0**-22 * (next(noise) % 7)),
    )  # fmt: skip
    check = AttentionCheck(shape=SHAPE, mask="causal", gradients=False, how="twice")
    assert not all(finding.ok for finding in check.run(stand_in.name, CPU))


def test_a_kernel_that_fails_is_wrong(stand_in, monkeypatch):
    def fail(outputs):
        raise RuntimeError("misaligned address")

    corrupt(monkeypatch, stand_in, of_kind("causal"), fail)
    report = verify.verify(stand_in.name, small_plan())
    assert report.wrong[0].failure() == "RuntimeError: misaligned address"
    assert not any(trial.lost for trial in report.trials)
    assert report.classes[class_named("none", "forward")].usable
    assert not report.classes[class_named("causal", "forward")].usable


def test_an_interrupt_loses_no_finished_check(command, tmp_path, monkeypatch):
    """After an interrupt, the JSON report lists the finished checks, and verdicts are stored."""
    stop = iter([None] * 9)

    def interrupted(check, *args):
        if next(stop, "now") == "now":
            raise KeyboardInterrupt
        return speedup(check, *args)

    speedup = verify._speedup
    monkeypatch.setattr(verify, "_speedup", interrupted)
    path = tmp_path / "report.json"
    assert command("--backend", "stand_in", "--json", str(path))[0] == cli.INTERRUPTED
    own = json.loads(path.read_text())["backends"]["stand_in"]
    assert own["checks"] >= 6 and own["classes"]
    assert json.loads(Path(own["path"]).read_text())["classes"] == own["classes"]


def test_an_unwritable_verdict_loses_no_report(command, tmp_path, monkeypatch):
    """The report is written even if a verdict cannot be stored."""

    def store(*args):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(verdicts, "store", store)
    path = tmp_path / "report.json"
    status, _, err = command("--backend", "stand_in", "--json", str(path))
    assert status == cli.USAGE and "could not be stored: read-only" in err
    assert json.loads(path.read_text())["backends"]["stand_in"]["checks"] >= 6


def test_unsupported_calls_are_not_wrong(stand_in, monkeypatch):
    right = stand_in.unsupported

    def unsupported(problem):
        causal = getattr(problem, "mask", "") == "causal"
        return ["has no causal"] if causal else right(problem)

    monkeypatch.setattr(stand_in, "unsupported", unsupported)
    report = verify.verify(stand_in.name, small_plan())
    assert not report.wrong
    assert report.classes[class_named("causal", "forward")].found == "unsupported"
    assert report.classes[class_named("none", "forward")].usable


@pytest.mark.parametrize("speedup", [1.0, 0.8])
def test_kernels_that_are_not_faster_are_not_chosen(stand_in, speedup, monkeypatch):
    monkeypatch.setattr(
        timing, "medians",
        lambda ways, *rest: {name: 1.0 if name == stand_in.name else speedup for name in ways},
    )  # fmt: skip
    report = verify.verify(stand_in.name, small_plan())
    assert not report.wrong and report.usable == []
    found = report.classes[class_named("causal", "forward")]
    assert found.speedup == speedup and f"{speedup:.2f} times as fast as" in found.found


def test_the_slowest_probe_decides(stand_in, monkeypatch):
    times = iter([2.0, 0.5] * 1000)
    monkeypatch.setattr(
        timing, "medians",
        lambda ways, *rest: dict(zip(ways, (1.0, next(times)), strict=True)),
    )  # fmt: skip
    report = verify.verify(stand_in.name, small_plan())
    assert {verdict.speedup for verdict in report.classes.values()} == {0.5}


def test_classes_that_do_not_fit_in_memory_are_not_used(stand_in, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "medians", full)
    report = verify.verify(stand_in.name, small_plan())
    assert not report.wrong and report.usable == []
    assert "memory" in report.classes[class_named("none", "forward")].found


def test_the_peer_is_torch(stand_in, monkeypatch):
    """Kernels are timed against the first backend of torch operations that supports the call."""
    peers = set()
    monkeypatch.setattr(
        timing, "medians", lambda ways, *rest: peers.add(list(ways)[1]) or dict.fromkeys(ways, 1.0)
    )
    verify.verify(stand_in.name, small_plan(features=("none", "softcap")))
    torch_backends = [
        n for n, b in REGISTERED.items() if b.differentiable and n not in verdicts.KERNELS
    ]
    assert peers == set(torch_backends)


@pytest.mark.parametrize("quick", [True, False])
def test_plans_check_every_mask_and_feature_in_every_dtype(quick):
    made = plan.plan(quick, graphs=True)
    kinds = {c.classes()[0].feature for c in made.checks if isinstance(c, AttentionCheck)}

    def of(kind, dtype):
        return [c for c in made.checks if isinstance(c, kind) and c.dtype == dtype]

    def features(checks):
        return {name.feature for check in checks for name in check.classes()}

    for dtype in plan.QUICK_DTYPES if quick else ("float32", "float16", "bfloat16"):
        attention = of(AttentionCheck, dtype)
        masks = {part.partition(":")[0] for check in attention for part in check.mask.split("+")}
        assert masks == {"none", *MASKS}
        assert {check.how for check in attention} == {"contract", "bits", "twice", "graph"}
        assert features(attention) == {n.feature for n in made.classes if n.op == "attention"}
        assert features(of(PartialCheck, dtype)) == kinds
        assert features(of(NormCheck, dtype)) == {"plain", "residual", "dropout"}
        assert of(DecodeCheck, dtype)
    assert not [c for c in plan.plan(quick, graphs=False).checks if c.how == "graph"]


def test_probes_belong_to_their_class():
    """Dispatch assigns each probe to the problem class that the probe was created for."""
    sizes = {**SMALL, "ends": (*verdicts.LENGTHS, plan.LONGEST), "hidden": 32}
    probes = plan.attention_probes(["bfloat16"], [32], **sizes)
    classes = plan.by_class([*probes, *plan.norm_probes(["float16"], elements=1 << 10)])
    for name, pair in classes.items():
        assert len(pair) == 2
        for probe in pair:
            names = verdicts.classes_of(problem_of_probe(probe))
            assert names == probe.classes() and name in names
            assert [n.feature for n in probe.reduced().classes()] == [n.feature for n in names]


def test_a_full_plan_covers_all_classes():
    names = plan.plan(quick=False, graphs=False).classes
    assert {name.dtype for name in names} == {"float32", "float16", "bfloat16"}
    sizes = {name.sizes for name in names if name.op == "attention"}
    assert sizes == {
        verdicts.attention_sizes(width, length)
        for width in verdicts.WIDTHS
        for length in verdicts.length_words()
    }


@pytest.mark.parametrize(
    "check",
    [
        AttentionCheck(shape=SHAPE, mask="padding", poison=True, result="lse"),
        AttentionCheck(shape=SHAPE, packed=True, bias="learned"),
        AttentionCheck(shape=SHAPE, packed=True, bias="constant", dtype="bfloat16"),
        AttentionCheck(shape=SHAPE, mask="causal", bias="constant"),
        AttentionCheck(shape=SHAPE, dropout_p=0.2, result="weights"),
        AttentionCheck(shape=SHAPE, softcap=2.0, dtype="bfloat16"),
        PartialCheck(shape=SHAPE, mask="causal", dtype="bfloat16"),
        PartialCheck(shape=SHAPE, mask="padding", bias="constant", softcap=2.0),
        DecodeCheck(shape="3,8/2,2,64,16"),
        DecodeCheck(shape="3,8/2,1,64,16", page_size=16),
        NormCheck(rows=5, columns=37, rms=True, dropout_p=0.2, dtype="float16"),
        NormCheck(rows=5, columns=37, affine=False),
        NormCheck(rows=5, columns=37, dropout_p=0.3, how="bits"),
    ],
    ids=repr,
)
def test_checks(check, backend, capsys):
    """A correct backend passes each check, run with the code that a report prints."""
    code = f"from fused_attn.tools.checks import *; {check!r}.show({backend.name!r}, 'cpu')"
    out = run_snippet(code, capsys)
    assert out and all(line.startswith("ok") for line in out.splitlines())


@pytest.mark.parametrize("stale", [False, True])
def test_a_graph_with_stale_results_is_wrong(stale, stand_in, monkeypatch):
    """A CUDA graph whose replay does not update its results is reported as wrong."""

    class Graph:
        def __init__(self, step):
            self.step, self.results = step, [t.clone() for t in step()]

        def replay(self):
            for kept, new in zip(self.results, [] if stale else self.step(), strict=not stale):
                kept.copy_(new)

    def captured(step):
        graph = Graph(step)
        return graph.results, graph

    monkeypatch.setattr("fused_attn.tools.checks._captured", captured)
    check = AttentionCheck(shape=SHAPE, mask="causal", how="graph")
    findings = check.run(stand_in.name, CPU)
    assert len(findings) == 4 and all(finding.ok is not stale for finding in findings)


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(verdicts.KERNELS))
def test_graphs_on_a_gpu(name):
    if verify.against(name):
        pytest.skip(f"reason: {verify.against(name)[0]}")
    for check in plan.checks(["bfloat16"], [64], graphs=True):
        if check.how == "graph":
            assert all(finding.ok for finding in check.run(name))


@pytest.fixture
def command(stand_in, monkeypatch, capsys):
    """Return a function that verifies a small plan, and returns exit status, stdout and stderr."""
    monkeypatch.setattr(plan, "plan", lambda quick, graphs: small_plan())

    def run(*argv):
        return cli.main(["verify", *argv]), *capsys.readouterr()

    return run


def test_command(command, verdict_folder):
    status, out, _ = command("--backend", "stand_in")
    assert status == 0
    assert re.search(r"^float32 +numerics of attention +\d+ +0 +0$", out, re.MULTILINE)
    assert "CUDA graphs: not checked without a GPU" in out
    assert re.search(r"^attention +float32 +D<=32,L<=128 +training +2.00 +2.00", out, re.MULTILINE)
    assert f"stored in {verdict_folder}" in out
    status, out, _ = command("--forget")
    assert (status, list(verdict_folder.iterdir())) == (0, []) and "removed" in out
    assert command("--forget")[:2] == (0, "nothing was stored\n")


def test_command_with_a_wrong_kernel(command, stand_in):
    def wrong(call, outputs):
        if call.mask.kind == "causal":
            outputs.out.mul_(1.01)

    stand_in.corrupt = wrong
    status, out, _ = command("--backend", "stand_in")
    assert status == 1
    assert "AttentionCheck(shape='2,4/2,21,37,16', mask='causal', dtype='float32', seed=0)" in out
    assert "checks are WRONG" in out and "wrong" in out
    facts = json.loads(command("--backend", "stand_in", "--json", "-")[1])
    own = facts["backends"]["stand_in"]
    assert own["ok"] is False and own["wrong"][0]["snippet"].startswith("# backend stand_in")
    assert own["classes"][str(class_named("causal", "forward"))]["usable"] is False


def test_command_warns_that_the_environment_overrides(command, monkeypatch):
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "eager")
    assert "FUSED_ATTN_BACKEND=eager overrides" in command("--backend", "stand_in")[1]


@pytest.mark.skipif(bool(EMULATED) or torch.cuda.is_available(), reason="reason: a kernel can run")
def test_command_without_a_gpu(capsys):
    assert cli.main(["verify"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("fused-attn verify: error: ") and err.count("\n") == 1


def test_calls_store_no_verdict(stand_in, verdict_folder):
    x = torch.randn(1, 2, 40, 32)
    F.scaled_dot_product_attention(x, x, x)
    assert not verdict_folder.exists()
