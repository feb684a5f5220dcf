"""Verdicts of `fused-attn verify`: problem classes, selection of backends, and invalid files."""

import contextlib
import dataclasses
import json
import os
import re
import runpy
import threading
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from stand_in import CPU, in_place_of_cpp

import fused_attn
from fused_attn import functional as F
from fused_attn import masks
from fused_attn.backends import (
    AttentionProblem,
    NormProblem,
    get_backend,
    problem_of,
    registry,
    select,
    verdicts,
)
from fused_attn.backends.verdicts import ClassVerdict, ProblemClass
from fused_attn.call.attention import AttentionCall, AttentionOptions, UncheckedAttention
from fused_attn.masks.spec import spec_of_mask
from fused_attn.ops import dispatch
from fused_attn.tools.cases import MASKS, Shape, make_mask

GOOD = ClassVerdict(True, 1.5)
PROBLEM = AttentionProblem(CPU, torch.float32, 16, 16, seqlen_q=100, seqlen_k=90)
NAME = ProblemClass("attention", "float32", "D<=32,L<=128", "none", "forward")


def problem(**properties):
    return dataclasses.replace(PROBLEM, **properties)


@pytest.fixture
def stand_in(verdict_folder):
    with in_place_of_cpp() as backend:
        yield backend


def stored(names=(NAME,), verdict=GOOD, **identity):
    own = verdicts.identity("stand_in", CPU) | identity
    return verdicts.store(own, dict.fromkeys(names, verdict))


def only_reason(backend, problem=PROBLEM):
    (reason,) = backend.opt_in_reasons(problem)
    return reason


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (PROBLEM, "attention float32 D<=32,L<=128 none forward"),
        (problem(needs_grad=True), "attention float32 D<=32,L<=128 none training"),
        (problem(head_dim_v=80), "attention float32 D<=96,L<=128 none forward"),
        (problem(head_dim=257), "attention float32 D>256,L<=128 none forward"),
        (problem(seqlen_k=512), "attention float32 D<=32,L<=512 none forward"),
        (problem(seqlen_k=2049), "attention float32 D<=32,L>2048 none forward"),
        (problem(seqlen_q=16), "attention float32 D<=32,Lq<=16 none forward"),
        (problem(seqlen_q=0), "attention float32 D<=32,L=0 none forward"),
        (problem(dtype=torch.float64), "attention other D<=32,L<=128 none forward"),
        (
            problem(mask="causal", dropout=True, softcap=True, packed=True, result="lse"),
            "attention float32 D<=32,L<=128 causal+softcap+packed+lse+dropout forward",
        ),
        (
            problem(mask="bias", learned_bias=True, needs_grad=True),
            "attention float32 D<=32,L<=128 bias+learned_bias training",
        ),
        (NormProblem(CPU, torch.bfloat16, 300), "layer_norm bfloat16 C<=1024 plain forward"),
        (
            NormProblem(
                CPU, torch.float16, 20000, rms=True, residual=True, dropout=True, needs_grad=True
            ),
            "rms_norm float16 C>16384 plain+residual+dropout training",
        ),
    ],
)
def test_classes(given, expected):
    """A problem has one class for each of its features, which "+" separates in `expected`."""
    *words, features, direction = expected.split()
    classes = [ProblemClass(*words, feature, direction) for feature in features.split("+")]
    assert verdicts.classes_of(given) == classes


def test_the_choice_is_by_class(stand_in):
    assert "`fused-attn verify`" in only_reason(stand_in)
    others = ["causal", "dropout"]
    stored([NAME, *(NAME._replace(feature=feature) for feature in others)])
    assert select(PROBLEM) is stand_in
    assert select(problem(mask="causal", dropout=True)) is stand_in
    for unseen in ({"mask": "dense"}, {"needs_grad": True}, {"softcap": True}, {"seqlen_q": 200}):
        assert select(problem(**unseen)) is not stand_in
        assert "did not check attention float32" in only_reason(stand_in, problem(**unseen))
    verdicts.forget(["stand_in"])
    assert select(PROBLEM) is not stand_in


@pytest.mark.parametrize("enabled", [False, True])
def test_calls_run_where_the_verdict_says(stand_in, enabled):
    """Calls run on a verified backend only if it is usable in all of their problem classes."""
    seen = []
    stand_in.corrupt = lambda call, outputs: seen.append(call.query.shape[2])
    function = (torch.nn.functional if enabled else F).scaled_dot_product_attention
    names = [NAME._replace(feature=feature) for feature in ("none", "causal")]
    names.append(NAME._replace(feature="bias", direction="training"))
    x, long, eye = torch.randn(1, 2, 100, 16), torch.randn(1, 2, 200, 16), torch.eye(100)
    leaf = x.clone().requires_grad_()
    with fused_attn.enabled() if enabled else contextlib.nullcontext():
        function(x, x, x)
        assert seen == []
        stored(names)
        function(x, x, x)
        function(x, x, x, is_causal=True)
        function(leaf, x, x, eye)
        assert seen == [100, 100, 100]
        function(long, long, long)
        function(long, long, long, is_causal=True)
        function(x, x, x, eye.bool())
        function(leaf, x, x)
        function(x, x, x, dropout_p=0.1)
        verdicts.forget(["stand_in"])
        function(x, x, x)
    assert seen == [100, 100, 100]


def test_learned_and_constant_biases_have_separate_verdicts(stand_in):
    """A verdict for constant biases does not apply to learned biases, even under enabled()."""
    constant = NAME._replace(feature="bias", direction="training")
    seen = []
    stand_in.corrupt = lambda call, outputs: seen.append(call.mask.bias.requires_grad)
    x = torch.randn(1, 2, 100, 16, requires_grad=True)

    def calls():
        seen.clear()
        for bias in (torch.randn(100, 100), torch.randn(100, 100, requires_grad=True)):
            F.scaled_dot_product_attention(x, x, x, bias)
            F.scaled_dot_product_attention(x, x, x, masks.causal() & masks.bias(bias))
            with fused_attn.enabled():
                torch.nn.functional.scaled_dot_product_attention(x, x, x, bias)
        return seen

    assert calls() == []
    stored([constant])
    assert calls() == [False] * 3
    stored([constant, constant._replace(feature="learned_bias")])
    assert calls() == [False] * 3 + [True] * 3


def test_calls_of_other_classes_skip_validation(stand_in, monkeypatch):
    """Calls of problem classes without a verdict skip validation, even if a verdict is stored."""
    stored()
    monkeypatch.setattr(dispatch, "select", None)
    x, weight = torch.randn(1, 2, 200, 16), torch.randn(16)
    F.scaled_dot_product_attention(x, x, x)
    F.scaled_dot_product_attention(x, x, x, masks.causal())
    F.layer_norm(x, 16, weight, weight)
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        F.scaled_dot_product_attention(*[x[:, :, :100]] * 3)


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("name", ["none", *MASKS])
def test_unchecked_and_checked_calls_are_the_same_problem(name, needs_grad):
    shape = Shape(2, 4, 2, 30, 40, 16)
    query, key, value = shape.operands(torch.bfloat16).values()
    key.requires_grad_(needs_grad)
    mask = make_mask(name, shape)
    call = UncheckedAttention(query, key, value, mask, False, True, AttentionOptions(None, None))
    assert call.prepare() and call.resolve_mask() is not None
    spec = spec_of_mask(mask, 2, 4, 30, 40, query.device)
    assert problem_of(call.assume_checked()) == problem_of(
        AttentionCall(query, key, value, spec, AttentionOptions(1.0))
    )


def test_autocast_selects_by_the_autocast_dtype(stand_in):
    """Under autocast, verdicts apply to the dtype that the kernels receive."""
    seen = []
    stand_in.corrupt = lambda call, outputs: seen.append(call.query.dtype)
    stored([NAME._replace(dtype="bfloat16")])
    x = torch.randn(1, 2, 100, 16)
    F.scaled_dot_product_attention(x, x, x)
    with torch.autocast("cpu", torch.bfloat16):
        F.scaled_dot_product_attention(x, x, x)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("found", [None, GOOD, ClassVerdict(False, 0.9, "slower")])
def test_no_fallback_warning_after_verification(stand_in, found, monkeypatch):
    monkeypatch.setattr(registry, "_notified", set())
    monkeypatch.setattr(
        type(get_backend("sdpa")), "fallback_warning", lambda self, device_type: "do it"
    )
    if found is not None:
        stored(verdict=found)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        select(problem(mask="dense"))
    assert [str(warning.message) for warning in seen] == (["do it"] if found is None else [])


def test_reasons(stand_in):
    stored(verdict=ClassVerdict(False, 0.8, "0.80 times as fast as sdpa"))
    assert "found no class of problems" in only_reason(stand_in)
    verdicts.store(
        verdicts.identity("stand_in", CPU),
        {NAME: ClassVerdict(False, None, "wrong"), NAME._replace(feature="causal"): GOOD},
    )
    assert only_reason(stand_in) == f"`fused-attn verify` found it wrong for {NAME}"


@pytest.mark.parametrize("other", [1.4, 1.5, 1.6])
def test_the_fastest_is_chosen(stand_in, other, monkeypatch):
    monkeypatch.setitem(verdicts.KERNELS, "another", list)
    causal = NAME._replace(feature="causal")
    stored([NAME, causal])
    verdicts.store(verdicts.identity("another", CPU), {NAME: ClassVerdict(True, other)})
    faster = f"`fused-attn verify` found another faster for {NAME}"
    assert stand_in.opt_in_reasons(PROBLEM) == ([faster] if other > 1.5 else [])
    assert stand_in.opt_in_reasons(problem(mask="causal")) == []
    verdicts.forget(["another"])
    assert stand_in.opt_in_reasons(PROBLEM) == []


def test_the_environment_wins(stand_in, monkeypatch):
    stored()
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "eager")
    assert select(PROBLEM).name == "eager"
    monkeypatch.setenv("FUSED_ATTN_BACKEND", "stand_in")
    assert select(problem(mask="dense")) is stand_in


def test_verdicts_are_read_once(stand_in, monkeypatch):
    stored()
    read = mock.Mock(wraps=verdicts._read)
    monkeypatch.setattr(verdicts, "_read", read)
    for _ in range(3):
        stand_in.opt_in_reasons(PROBLEM)
    read.assert_called_once_with("stand_in", CPU)


def test_no_identity_is_computed_without_stored_verdicts(stand_in, monkeypatch):
    monkeypatch.setattr(verdicts, "identity", None)
    assert only_reason(stand_in) == verdicts.BY_NAME_ONLY


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"identity": {}}', '{"identity": 1, "classes": 2}', "\x00\xff"],
    ids=repr,
)
def test_a_broken_file_is_ignored(stand_in, text):
    path = stored()
    path.write_bytes(text.encode("latin-1"))
    verdicts.read_again()
    assert select(PROBLEM) is not stand_in
    reason = only_reason(stand_in)
    assert re.search(r"cannot be read \(\w+Error: .+\)|is for another machine", reason)
    assert str(path) in reason and reason.endswith(": run `fused-attn verify` again")
    assert "\n" not in reason


@pytest.mark.parametrize(
    "entry", [None, {}, {"usable": 1, "speedup": 2.0, "found": ""}, {"usable": "yes"}]
)
def test_invalid_entries_are_not_usable(stand_in, entry):
    path = stored([NAME, NAME._replace(feature="causal")])
    facts = json.loads(path.read_text())
    facts["classes"][str(NAME)] = entry
    path.write_text(json.dumps(facts))
    verdicts.read_again()
    assert select(PROBLEM) is not stand_in


def test_a_file_of_another_machine_is_not_used(stand_in):
    """A verdict file of another GPU is not used, even under this machine's file name."""
    foreign = stored(gpu="another GPU")
    assert only_reason(stand_in) == verdicts.BY_NAME_ONLY
    foreign.rename(stored())
    verdicts.read_again()
    assert "is for another machine" in only_reason(stand_in)


@pytest.mark.parametrize("name", ["driver", "torch", "triton", "fused_attn", "kernels"])
def test_reasons_name_what_changed(stand_in, name):
    stored(**{name: "0.0"})
    reason = only_reason(stand_in)
    assert reason.startswith("was verified here with ")
    assert ("different kernels" if name == "kernels" else f"{name} 0.0") in reason


def test_changed_or_unreadable_kernel_sources_invalidate_verdicts(stand_in, tmp_path, monkeypatch):
    source = tmp_path / "kernel.py"
    source.write_text("x + 1")
    monkeypatch.setitem(verdicts.KERNELS, "stand_in", lambda: [source])
    stored()
    assert select(PROBLEM) is stand_in
    source.write_text("x + 2")
    verdicts.read_again()
    assert "with different kernels" in only_reason(stand_in)
    source.unlink()
    verdicts.read_again()
    assert select(PROBLEM) is not stand_in
    assert "cannot be read (FileNotFoundError" in only_reason(stand_in)


def test_concurrent_writes_never_leave_a_partial_file(stand_in, verdict_folder):
    stored()
    stop = threading.Event()

    def write():
        while not stop.is_set():
            stored([NAME._replace(sizes=str(i)) for i in range(2000)] + [NAME])

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        reasons = {verdicts._read("stand_in", CPU).general for _ in range(50)}
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert reasons == {""}
    assert len(list(verdict_folder.iterdir())) == 1  # no temporary file is left


def test_a_failed_store_leaves_no_files(stand_in, verdict_folder, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        stored()
    assert not list(verdict_folder.iterdir())


def test_forget_removes_all_of_a_backend(stand_in, verdict_folder):
    paths = {stored(), stored(gpu="another GPU")}
    (verdict_folder / "stand_in-1.tmp").touch()
    other = verdict_folder / "triton-1.json"
    other.touch()
    assert paths < set(verdicts.forget(["stand_in"]))
    assert list(verdict_folder.iterdir()) == [other]
    assert verdicts.forget(["stand_in"]) == []


def test_folder_is_the_users_cache(monkeypatch):
    """verdicts.folder() follows $XDG_CACHE_HOME. runpy reloads it: conftest.py has patched it."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    folder = runpy.run_path(verdicts.__file__)["folder"]
    assert folder() == Path("/somewhere/fused_attn/verdicts")


def marked(x, backend):
    """Return x + 1 if the backend may be the default for x's sizes, or x + 2 if it is opt-in."""
    sizes = {"seqlen_q": x.shape[2], "seqlen_k": x.shape[2]}
    own = AttentionProblem(x.device, x.dtype, x.shape[3], x.shape[3], **sizes)
    return x + (2 if backend.opt_in_reasons(own) else 1)


def test_compiled_functions_select_as_eager_ones(stand_in):
    """A function compiled with fullgraph=True selects the same backend as in eager mode."""
    stored()
    torch.compiler.reset()
    compiled = torch.compile(lambda x: marked(x, stand_in), fullgraph=True, backend="eager")
    for length in (100, 101, 120, 200, 300, 30):
        x = torch.zeros(1, 1, length, 16)
        assert torch.equal(compiled(x), marked(x, stand_in))


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("everywhere", [True, False])
def test_exported_lengths_stay_open(stand_in, everywhere, strict):
    """A program exported with a dynamic length uses only backends that are usable at any length."""
    words = verdicts.length_words() if everywhere else ["L<=128"]
    stored([NAME._replace(sizes=f"D<=32,{word}") for word in words])

    class Marked(torch.nn.Module):
        def forward(self, x):
            return marked(x, stand_in)

    shapes = {"x": {2: torch.export.Dim("length")}}
    x = torch.zeros(1, 1, 100, 16)
    program = torch.export.export(Marked(), (x,), dynamic_shapes=shapes, strict=strict)
    for length in (1, 100, 5000):
        got = program.module()(torch.zeros(1, 1, length, 16))
        assert got.eq(1 if everywhere else 2).all()


def test_a_compiled_call_in_one_graph(stand_in):
    stored([NAME._replace(direction="training")])
    torch.compiler.reset()
    seen = []
    stand_in.corrupt = lambda call, outputs: seen.append(call.query.shape[2])
    call = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    tensors = [torch.randn(1, 2, 100, 16, requires_grad=True) for _ in "qkv"]
    call(*tensors).sum().backward()
    assert seen == [100] and all(tensor.grad is not None for tensor in tensors)


def test_default_backend_of_a_device(stand_in):
    """A device has a single default backend, unless stored verdicts make it depend on the call."""
    assert registry.default_backend(CPU) is not None
    stored()
    assert registry.default_backend(CPU) is None
    verdicts.forget(["stand_in"])
    assert registry.default_backend(CPU) is not None


def test_driver_version_without_proc(monkeypatch):
    """If a container hides /proc/driver, the version is read from the driver's library."""

    class Library:
        def cuDriverGetVersion(self, version):  # noqa: N802
            version._obj.value = 13000
            return 0

    monkeypatch.setattr(verdicts, "_DRIVERS", ())
    monkeypatch.setattr(verdicts.ctypes, "CDLL", lambda name: Library())
    assert verdicts._driver() == "for CUDA up to 13000"

    monkeypatch.setattr(Library, "cuDriverGetVersion", lambda self, version: 35)  # no driver
    assert verdicts._driver() == "none"
