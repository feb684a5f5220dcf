"""The fused-attn command: exit statuses, tables, JSON, PNG, and one-line errors."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import commands
import pytest
import torch
import torch.nn.functional as F
from planted import scale_result

import fused_attn
from fused_attn import functional
from fused_attn.backends import get_backend
from fused_attn.tools import bench, cli, plots, sources
from fused_attn.tools.cases import MASKS

SMALL = ["--shape", "2,4/2,33,47,16", "--repeats", "2"]


def run(capsys, *argv):
    """Return the exit status, stdout and stderr of a fused-attn command."""
    try:
        status = cli.main(argv)
    except SystemExit as leaving:
        status = leaving.code
    out, err = capsys.readouterr()
    return status, out, err


def assert_one_line_error(result, *words):
    status, out, err = result
    assert (status, out) == (2, "")
    assert err.startswith("fused-attn") and err.endswith("\n") and err.count("\n") == 1
    for word in words:
        assert word in err


def example():
    """Return a model and inputs, in the form that `compare` loads from module:function."""
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    return layer, (torch.randn(2, 5, 16),), {"src_mask": torch.zeros(5, 5)}


def just_a_model():
    return example()[0]


def nothing_to_swap():
    return torch.nn.Linear(4, 4), (torch.randn(2, 4),)


def failing():
    raise RuntimeError("two\nlines")


@pytest.mark.parametrize("command", [[], ["doctor"], ["verify"], ["compare"], ["bench"]])
def test_help_has_examples(capsys, command):
    status, out, _ = run(capsys, *command, "--help")
    assert status == 0
    assert f"\n  fused-attn {' '.join(command)}" in out[out.index("examples:") :]
    assert "\x1b" not in out


def test_masks_are_in_the_help(capsys):
    out = run(capsys, "bench", "--help")[1]
    assert all(f"\n  {name} " in out for name in MASKS)


def test_version(capsys):
    assert run(capsys, "--version")[1] == f"fused-attn {fused_attn.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], ["COMMAND"]),
        (["nothing"], ["'nothing'"]),
        (["bench", "--shape", "1,2,3"], ["--shape", "'1,2,3'"]),
        (["bench", "--shape", "1,3/2,8,8,8"], ["divisible by heads_kv", "'1,3/2,8,8,8'"]),
        (["bench", "--mask", "causal,moon"], ["joined by +", "'moon'"]),
        (["bench", "--mask", "causal:4"], ["'causal:4'"]),
        (["bench", "--dtype", "int8"], ["float32, bfloat16, float16", "'int8'"]),
        (["bench", "--device", "moon"], ["'moon'"]),
        (["bench", "--repeats", "0"], ["positive integer"]),
        (["bench", "--dropout", "1.5"], ["must be in [0, 1)", "'1.5'"]),
        (["bench", "--shape", "100000,64,100000,100000,64"], ["GiB of memory"]),
        (["bench", "--json", "no/such/folder.json"], ["no/such/folder.json"]),
        (["verify", "--backend", "moon"], ["'moon'", "'cuda'", "'triton'"]),
        (["compare", "no/such/folder"], ["module:function", "'no/such/folder'"]),
        (["compare", "no_such_module:f"], ["ModuleNotFoundError", "no_such_module"]),
        (["compare", "test_cli:nothing"], ["function of test_cli", "'nothing'"]),
        (["compare", "test_cli:just_a_model"], ["(model, args tuple)", "got (Trans"]),
        (["compare", "test_cli:failing"], ["RuntimeError: two lines"]),
        (["compare", "test_cli:nothing_to_swap"], ["modules that can be swapped"]),
        (["compare", "test_cli:example", "--batch", "3"], ["--batch and --seqlen"]),
        (["compare", "."], ["config.json"]),
    ],
    ids=" ".join,
)
def test_errors_are_one_line(capsys, argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert_one_line_error(run(capsys, *argv), *words)


@pytest.mark.skipif(torch.cuda.is_available(), reason="reason: torch finds a GPU")
def test_no_gpu_is_a_one_line_error(capsys):
    assert_one_line_error(run(capsys, "bench", "--device", "cuda"), "torch finds none")


def test_traceback_on_demand(capsys):
    status, _, err = run(capsys, "compare", "test_cli:failing", "--traceback")
    assert status == 2
    assert "Traceback" in err and "in failing" in err


def test_plots_need_matplotlib(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(capsys, "bench", *SMALL, "--png", str(tmp_path / "a.png"))
    assert_one_line_error(result, "fused-attn[cli]")


def test_doctor(capsys):
    status, out, err = run(capsys, "doctor")
    assert (status, err) == (0, "") and "\x1b" not in out
    for name, backend in fused_attn.backends.registry.BACKENDS.items():
        (row,) = re.findall(rf"^{name}  +((?:not )?available.*)$", out, re.MULTILINE)
        assert all(reason in row for reason in backend.unavailable()[:1])
    assert re.search(r"^cpu  +attention, causal  +cpp  +first in order$", out, re.MULTILINE)
    assert fused_attn.backends.cpp.isa() in out
    others = ", ".join(name for name in fused_attn.backends.registry.BACKENDS if name != "cpp")
    assert f"passed: cpp on cpu; not checked: {others}" in out


@pytest.mark.skipif(
    importlib.util.find_spec("fused_attn._cuda") is not None,
    reason="reason: the CUDA module is built",
)
def test_doctor_says_how_to_build_for_gpus(capsys):
    out = run(capsys, "doctor")[1]
    assert "built without the CUDA module: build with FUSED_ATTN_CUDA=1" in out


def test_doctor_json(capsys, tmp_path):
    status, out, _ = run(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert (status, facts["ok"]) == (0, True)
    assert facts["versions"]["torch"] == torch.__version__
    assert {"transformers", "timm", "triton"} < facts["versions"].keys()
    assert facts["machine"].keys() == {
        "cpu", "isa", "FUSED_ATTN_CPU_ISA", "threads", "gpus", "cudnn"
    }  # fmt: skip
    flex = [row for row in facts["refusals"] if row["backend"] == "flex"]
    assert {row["reason"] for row in flex} >= {"does not support gradients on the CPU"}
    available = [entry["name"] for entry in facts["backends"] if entry["available"]]
    assert tuple(available) == fused_attn.available_backends()
    assert {check["dtype"] for check in facts["self_check"]} == set(bench.DTYPES)
    for check in facts["self_check"]:
        assert check["backend"] == "cpp" and 0 < check["error"] <= check["limit"]
    assert run(capsys, "doctor", "--json", str(tmp_path / "facts.json"))[1].startswith("Versions")
    assert json.loads((tmp_path / "facts.json").read_text()).keys() == facts.keys()


@pytest.mark.sampled("covered by norm_fwd", kernel=["attention_bwd"])
@pytest.mark.parametrize("kernel", ["attention_bwd", "norm_fwd"])
def test_doctor_finds_a_wrong_kernel(capsys, monkeypatch, kernel):
    backend = get_backend("cpp")
    right = getattr(backend, kernel)

    def wrong(*args):
        results = right(*args)
        results[0].mul_(1.1)
        return results

    monkeypatch.setattr(backend, kernel, wrong)
    status, out, _ = run(capsys, "doctor", "--backend", "cpp")
    assert status == 1
    assert re.search(r"\d of \d checks FAILED", out)


def test_doctor_says_why_a_backend_does_not_run(capsys, monkeypatch):
    monkeypatch.setattr(get_backend("cpp"), "unavailable", lambda: ["was not built"])
    status, out, _ = run(capsys, "doctor", "--backend", "cpp")
    assert status == 1
    assert "not available: was not built" in out
    assert out.count("cpp: was not built\n") == 1


def test_doctor_reports_an_unknown_instruction_set():
    env = os.environ | {"FUSED_ATTN_CPU_ISA": "moon", "PYTHONPATH": str(commands.ROOT)}
    done = commands.run(sys.executable, "-m", "fused_attn", "doctor", "--json", env=env)
    facts = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (1, "")
    assert facts["machine"]["FUSED_ATTN_CPU_ISA"] == "moon"
    assert "moon" in next(b["reasons"][0] for b in facts["backends"] if b["name"] == "cpp")
    assert "FUSED_ATTN_CPU_ISA must be one of" in facts["machine"]["isa"]


def test_compare_function(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="reason: needs matplotlib")
    json_file, png_file = tmp_path / "a.json", tmp_path / "a.png"
    files = ("--json", str(json_file), "--png", str(png_file))
    status, out, err = run(capsys, "compare", "test_cli:example", "--dtype", "bfloat16", *files)
    assert (status, err) == (0, "") and "\x1b" not in out
    assert "bfloat16 model" in out and "within the contract" in out
    facts = json.loads(json_file.read_text())
    assert facts["ok"] and facts["dtype"] == "bfloat16"
    assert {"rows", "swapped", "skipped", "notes", "seed", "source", "versions"} < facts.keys()
    assert any(row["kind"] == "param grad" for row in facts["rows"])
    assert png_file.read_bytes().startswith(b"\x89PNG")


def test_compare_is_repeatable_by_seed(capsys):
    def rows(seed):
        argv = ("compare", "test_cli:example", "--no-backward", "--json", "-", "--seed", seed)
        return json.loads(run(capsys, *argv)[1])["rows"]

    assert rows("1") == rows("1") != rows("2")
    assert not any(row["kind"].endswith("grad") for row in rows("1"))


def test_compare_fails_for_nan(capsys, monkeypatch):
    """NaN in the fused output makes compare fail, and its JSON has no NaN literal."""
    scale_result(monkeypatch, functional, "layer_norm", float("nan"))
    status, out, _ = run(capsys, "compare", "test_cli:example")
    assert status == 1
    assert "ABOVE" in out
    status, out, _ = run(capsys, "compare", "test_cli:example", "--json", "-")
    assert (status, json.loads(out, parse_constant=pytest.fail)["ok"]) == (1, False)


def hugging_face_model(kind):
    transformers = pytest.importorskip("transformers", reason="reason: needs transformers")
    text = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    layer = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    layer |= {"intermediate_size": 24}
    sizes = {
        "Bert": text | layer | {"max_position_embeddings": 9},
        "ViT": layer | {"image_size": 8, "patch_size": 4},
        "T5": text | {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2},
    }
    config = getattr(transformers, f"{kind}Config")(**sizes[kind])
    return getattr(transformers, f"{kind}Model")(config)


@pytest.mark.parametrize("weights", [True, False])
def test_compare_folder(capsys, tmp_path, weights):
    model = hugging_face_model("Bert")
    (model if weights else model.config).save_pretrained(tmp_path)
    capsys.readouterr()
    argv = ("compare", str(tmp_path), "--batch", "3", "--json", "-")
    status, out, err = run(capsys, *argv, "--keep-padding")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert any("contains no weights" in note for note in facts["notes"]) != weights
    names = {row["name"] for row in facts["rows"]}
    assert "encoder.layer.0.attention.self.query.weight" in names
    if weights:
        loaded = sources.load(str(tmp_path)).model.state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    else:  # without --keep-padding, padded rows of the output differ
        status, out, err = run(capsys, *argv)
        assert (status, err) == (1, "")
        assert any("remove_padding=False" in note for note in json.loads(out)["notes"])


class RunsCode:
    """Object whose unpickling creates the file "ran"."""

    def __reduce__(self):
        return Path("ran").touch, ()


@pytest.mark.parametrize("file", ["config", "weights", "module"])
def test_compare_runs_no_code_of_a_folder(capsys, tmp_path, monkeypatch, file):
    monkeypatch.chdir(tmp_path)
    config = hugging_face_model("Bert").config.to_dict()
    Path("evil.py").write_text("open('ran', 'w'); from transformers import *")
    if file == "weights":
        torch.save({"x": RunsCode()}, "pytorch_model.bin")
    else:
        config["auto_map"] = {"AutoConfig": "evil.BertConfig", "AutoModel": "evil.BertModel"}
        config["model_type"] = "bert" if file == "config" else "evil"
    Path("config.json").write_text(json.dumps(config))
    status, _, err = run(capsys, "compare", str(tmp_path), "--keep-padding")
    assert status == (0 if file == "config" else 2), err  # transformers also defines a BertModel
    assert not Path("ran").exists()


@pytest.mark.parametrize("kind", ["Bert", "ViT", "T5"])
def test_inputs_of_hugging_face_models(kind):
    model = hugging_face_model(kind).eval()
    inputs = sources.hugging_face_inputs(model, 3, None if kind == "Bert" else 8)
    names = {
        "Bert": {"input_ids", "attention_mask"},
        "ViT": {"pixel_values"},
        "T5": {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask"},
    }
    assert inputs.keys() == names[kind]
    assert model(**inputs).last_hidden_state.shape[0] == 3
    if kind != "ViT":
        mask = inputs["attention_mask"]
        length = 9 if kind == "Bert" else 8
        assert mask.sum(1).tolist() == [length, length - 2, length - 4]
        assert torch.equal(inputs["input_ids"] == 0, mask == 0)


def test_models_with_unknown_inputs_are_refused(monkeypatch):
    model = hugging_face_model("Bert")
    monkeypatch.setattr(type(model), "main_input_name", "smells")
    with pytest.raises(ValueError, match=r"smells.*module:function"):
        sources.hugging_face_inputs(model, 2, 8)


def test_bench(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="reason: needs matplotlib")
    json_file, png_file = tmp_path / "a.json", tmp_path / "a.png"
    status, out, err = run(
        capsys, "bench", *SMALL, "--shape", "1,2,8,8,8", "--mask", "none,causal+padding",
        "--dtype", "float32", "--dtype", "bfloat16", "--backward", "--threads", "1",
        "--json", str(json_file), "--png", str(png_file),
    )  # fmt: skip
    assert (status, err) == (0, "") and "\x1b" not in out
    facts = json.loads(json_file.read_text())
    assert facts["ok"] and facts["machine"]["threads"] == 1
    assert len(facts["results"]) == 2 * 2 * 2 * 2
    assert len({tuple(r[k] for k in list(r)[:4]) for r in facts["results"]}) == 16
    for result in facts["results"]:
        ours, theirs = (result["milliseconds"][way] for way in (bench.OURS, bench.PEER))
        assert result["speedup"] == pytest.approx(theirs / ours)
        assert result["backend"] == "cpp" and 0 < result["error"] <= result["limit"]
        assert f"{result['speedup']:.2f}" in out
    assert png_file.read_bytes().startswith(b"\x89PNG")


def test_bench_with_options(capsys):
    options = ("--mask", "alibi", "--bias", "--dropout", "0.1")
    status, out, err = run(capsys, "bench", *SMALL, *options)
    assert (status, err) == (0, "") and "dropout 0.1; a bias with gradient" in out
    assert " - " not in out


def test_bench_reports_no_speedup_for_a_wrong_result(capsys, monkeypatch):
    right = functional.scaled_dot_product_attention
    monkeypatch.setattr(
        functional, "scaled_dot_product_attention",
        lambda *args, **kwargs: right(*args, **kwargs)
        * (1.0 if fused_attn.backends.wanted_backend() == "eager" else 1.001),
    )  # fmt: skip
    status, out, _ = run(capsys, "bench", *SMALL, "--mask", "causal")
    assert status == 1
    assert "NOT within the numerics contract" in out and "not timed" in out
    facts = json.loads(run(capsys, "bench", *SMALL, "--mask", "causal", "--json", "-")[1])
    (result,) = facts["results"]
    assert not facts["ok"] and result["error"] > result["limit"]
    assert (result["speedup"], result["milliseconds"]) == (None, {})


def test_bench_without_a_peer(capsys, monkeypatch):
    """If SDPA is wrong or fails, bench reports why, without a speedup."""
    scale_result(monkeypatch, F, "scaled_dot_product_attention")
    status, out, _ = run(capsys, "bench", *SMALL, "--mask", "causal")
    assert status == 0
    assert "SDPA computes a different result" in out

    def refuse(*args, **kwargs):
        raise RuntimeError("no\nkernel")

    monkeypatch.setattr(F, "scaled_dot_product_attention", refuse)
    status, out, _ = run(capsys, "bench", *SMALL, "--mask", "causal")
    assert status == 0
    assert re.search(r" -  +- +\d+% +SDPA: no kernel$", out, re.MULTILINE)


def test_bench_measures_the_requested_backend(capsys):
    facts = json.loads(run(capsys, "bench", *SMALL, "--backend", "eager", "--json", "-")[1])
    assert {result["backend"] for result in facts["results"]} == {"eager"}


@pytest.mark.gpu
def test_bench_on_a_gpu(capsys):
    argv = ("bench", "--device", "cuda", "--backend", "triton", "--dtype", "bfloat16", "--backward")
    status, out, _ = run(capsys, *argv, "--shape", "2,4/2,200,200,64", "--json", "-")
    assert status == 0
    assert all(result["speedup"] for result in json.loads(out)["results"])


def test_installed_command():
    tomllib = pytest.importorskip("tomllib", reason="reason: needs Python 3.11")
    project = tomllib.loads((commands.ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"fused-attn": "fused_attn.tools.cli:main"}
    assert project["optional-dependencies"]["cli"] == ["matplotlib"]


def test_a_terminal_gets_progress_and_red_rows(monkeypatch, capsys):
    """Rows above the limit are red, and progress is shown, only if the output is a terminal."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    scale_result(monkeypatch, functional, "layer_norm")
    status, out, err = run(capsys, "compare", "test_cli:example")
    assert (status, err) == (1, "") and "\x1b" not in out
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    _, out, err = run(capsys, "compare", "test_cli:example")
    assert re.search(r"^\x1b\[1;31m.+ABOVE LIMIT\x1b\[0m$", out, re.MULTILINE)
    assert not re.search(r"^\x1b.* ok", out, re.MULTILINE)
    assert "\rcomparing: 0 of 7" in err.replace("\x1b[K", "") and err.endswith("\r\x1b[K")
    err = run(capsys, "bench", *SMALL, "--mask", "causal")[2]
    assert "measuring 2,4/2,33,47,16 causal float32 forward, 1 of 1: 2 of 2" in err


def test_plots_of_large_models_have_no_labels(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="reason: needs matplotlib")
    model, args, kwargs = example()
    report = fused_attn.compare(model, *args, **kwargs)
    plots.plot_comparison(report, tmp_path / "labeled.png")
    monkeypatch.setattr(plots, "_MAX_LABELS", 3)
    plots.plot_comparison(report, tmp_path / "bare.png")
    sizes = [(tmp_path / name).stat().st_size for name in ("labeled.png", "bare.png")]
    assert sizes[0] > sizes[1] > 0


WITHOUT_MODULE = """
import sys
sys.modules["fused_attn._cpu"] = None
from fused_attn.tools import cli
for command in ("bench --shape 1,1,32,32,8 --mask causal", "doctor", "verify --help"):
    try:
        status = cli.main(command.split())
    except SystemExit as leaving:
        status = leaving.code
    assert not status, command
"""


def test_without_the_cpu_module():
    """The commands exit with status 0 even if the compiled CPU module cannot be imported."""
    commands.output_of(sys.executable, "-c", WITHOUT_MODULE)
