"""Backend "flash": refused calls, supported GPUs, and the signatures of the engines."""

import ast
import inspect
from importlib import metadata

import flash_models
import pytest
import torch
from flash_models import ENGINES, VERSIONS
from helpers import deterministic

import fused_attn
from fused_attn import masks
from fused_attn.backends import AttentionProblem, denylist, get_backend, verdicts
from fused_attn.backends.flash import engines
from fused_attn.backends.problem import NormProblem
from fused_attn.masks.band import Band, band_of
from fused_attn.masks.spec import spec_of_mask

FLASH = get_backend("flash")


def arguments_of(source, name):
    """Return the arguments of a function in source code as a dict: name -> default as text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            names = [a.arg for a in node.args.posonlyargs + node.args.args]
            defaults = map(ast.unparse, node.args.defaults)
            required = dict.fromkeys(names[: len(names) - len(node.args.defaults)])
            return required | dict(zip(names[len(required) :], defaults, strict=True))
    raise AssertionError(f"no function {name}")


@pytest.mark.parametrize("name", flash_models.FILES)
def test_signatures(name):
    """The stand-ins have the arguments and defaults of the installed engine's functions."""
    try:
        original = metadata.distribution(name).locate_file(flash_models.FILES[name]).read_text()
    except (metadata.PackageNotFoundError, FileNotFoundError):
        pytest.skip(f"reason: {name} is not installed")
    own = inspect.getsource(flash_models)
    for function, model in vars(flash_models.MODULES[name]).items():
        if callable(model):
            assert arguments_of(own, model.__name__) == arguments_of(original, function)


def test_signature_of_torch():
    if ENGINES["torch.nn.attention.varlen"].unavailable():
        pytest.skip("reason: needs a newer torch")
    from torch.nn.attention import varlen

    own, original = (
        [(p.name, p.default, p.kind) for p in inspect.signature(f).parameters.values()]
        for f in (flash_models.varlen_attn, varlen.varlen_attn)
    )
    assert own == original
    assert varlen.AuxRequest._fields == flash_models.AuxRequest._fields


FA2, FA3, FA4, VARLEN = "flash-attn", "flash-attn-3", "flash-attn-4", "torch.nn.attention.varlen"
OTHER_MASK = "supports only causal masks, windows, padding and ALiBi, not this mask"
ALIGNED = "supports top-left alignment in a batch of different lengths only for causal masks"
RIGHT_SIDE = "clamps the right window size to seqlen_k, which changes this mask"
ALIBI = {"mask": "structured", "band": Band(alibi=True), "bias_dtype": torch.float32}
REFUSED = [
    (FA2, {}, None),
    (FA2, {"mask": "causal", "packed": True}, None),
    (FA2, {"dtype": torch.float32}, "does not support torch.float32"),
    (FA2, {"dropout": True},
     "does not support dropout: its engines cannot draw the Philox dropout mask"),
    (FA2, {"result": "weights"}, "cannot return attention weights"),
    (FA2, {"transformed": True}, "does not support torch.func transforms or forward-mode AD"),
    (FA2, {"device": torch.device("xpu")}, "runs on cpu, cuda, not on xpu"),
    (FA2, {"mask": "dense"}, "does not support a bool mask tensor"),
    (FA2, {"mask": "bias", "bias_dtype": torch.bfloat16}, "does not support a float mask tensor"),
    (FA2, {"mask": "structured"}, OTHER_MASK),
    (FA2, {"mask": "structured", "band": Band(-5, 0, right=True)}, ALIGNED),
    (FA2, {"mask": "structured", "band": Band(3, 9)},
     "does not support a band that masks all keys for the last queries"),
    (FA2, {**ALIBI, "band": Band(alibi=True, alibi_offset=3)},
     "supports ALiBi only if it is aligned at the bottom right"),
    (FA2, {"result": "lse"}, None),
    (FA2, {"result": "lse", "needs_grad": True}, f"{FA2} cannot backpropagate through lse"),
    (FA3, {"result": "lse", "needs_grad": True}, f"{FA3} cannot backpropagate through lse"),
    (VARLEN, {"result": "lse", "needs_grad": True}, f"{VARLEN} cannot backpropagate through lse"),
    (FA4, {"result": "lse", "needs_grad": True}, None),
    (FA2, {"head_dim": 100, "head_dim_v": 100}, None),
    (FA3, {"head_dim": 100, "head_dim_v": 100},
     f"{FA3} supports head_dim up to 256 in multiples of 8, not 100"),
    (FA2, {"head_dim": 512, "head_dim_v": 512}, f"{FA2} supports head_dim up to 256, not 512"),
    (FA2, {"head_dim_v": 32}, f"{FA2} requires equal head_dim and head_dim_v, not 64 and 32"),
    (FA4, {"head_dim_v": 32}, None),
    (FA4, {"head_dim": 12}, f"{FA4} does not support head_dim 12 with head_dim_v 64"),
    (VARLEN, {"softcap": True}, f"{VARLEN} does not support softcap"),
    (FA2, ALIBI, None),
    (FA2, {"mask": "causal", "seqlen_q": 39}, None),
    (FA2, {"mask": "causal", "seqlen_q": 40}, f"{FA2} {RIGHT_SIDE}"),
    (VARLEN, {"mask": "causal", "seqlen_q": 40}, f"{VARLEN} {RIGHT_SIDE}"),
    (FA3, {"mask": "causal", "seqlen_q": 40}, None),
    (FA2, {"mask": "structured", "band": Band(-3), "seqlen_q": 21}, None),
    (FA2, {"mask": "structured", "band": Band(-3, right=True, from_end=True), "seqlen_q": 22},
     f"{FA2} {RIGHT_SIDE}"),
    (FA4, ALIBI, f"{FA4} does not support ALiBi"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "properties", "reason"), REFUSED, ids=str)
def test_refusals(install, name, properties, reason):
    install(name)
    there = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "head_dim": 64}
    there |= {"head_dim_v": 64, "seqlen_q": 20, "seqlen_k": 20}
    reasons = FLASH.unsupported(AttentionProblem(**{**there, **properties}))
    assert reasons == ([] if reason is None else [reason])


def test_masks_other_than_bands(install):
    """Masks other than a band with padding are refused."""
    install(*ENGINES)
    query = torch.randn(2, 2, 8, 16, dtype=torch.float64)
    lengths, documents = masks.padding([3, 8]), masks.documents(torch.arange(8) // 4)
    two_alignments = masks.sliding_window(2, 0) & masks.sliding_window(3, 3, "bottom_right")
    for mask in (masks.prefix_lm([3, 8]), documents, two_alignments & lengths):
        assert band_of(spec_of_mask(mask, 2, 2, 8, 8, query.device)) is None
        with pytest.raises(NotImplementedError, match=OTHER_MASK):
            fused_attn.scaled_dot_product_attention(query, query, query, mask, backend="flash")
    starts = torch.tensor([0, 8, 16])
    rows = query.transpose(1, 2).flatten(0, 1)
    with pytest.raises(NotImplementedError, match=OTHER_MASK):  # padding in packed sequences
        fused_attn.varlen_attention(
            rows, rows, rows, starts, starts, 8, 8, lengths, backend="flash"
        )


def test_norms_and_machines_without_engines(monkeypatch):
    norm = NormProblem(torch.device("cuda"), torch.bfloat16, 8)
    assert FLASH.opt_in_reasons(norm) == ["does not support norms"]
    monkeypatch.setattr(engines, "no_gpu", list)
    monkeypatch.setattr(engines, "version_of", {"flash-attn-4": "4.0.0b10"}.get)
    monkeypatch.setattr(torch, "__version__", "2.12.1+cu130")
    assert FLASH.unavailable() == [
        "flash-attn-4 must be 4.0.0b36 or newer, got 4.0.0b10",
        "flash-attn-3 is not installed",
        "flash-attn is not installed",
        "torch.nn.attention.varlen must be 2.13 or newer, got 2.12.1+cu130",
    ]


@pytest.mark.parametrize(
    ("name", "capability", "supported"),
    [
        (FA2, 75, False), (FA2, 80, True), (FA2, 120, True),
        (FA3, 89, False), (FA3, 90, True), (FA3, 100, False),
        (FA4, 80, False), (FA4, 90, True), (FA4, 103, True), (FA4, 120, False),
    ],
    ids=str,
)  # fmt: skip
def test_gpus(install, monkeypatch, name, capability, supported):
    install(name)
    monkeypatch.setattr(engines, "capability_of", lambda device: capability)
    reasons = FLASH.unsupported(AttentionProblem(torch.device("cuda"), torch.bfloat16, 64, 64))
    reason = f"{name} does not support compute capability {capability / 10}"
    assert reasons == ([] if supported else [reason])


DEFECTS = denylist.DEFECTS  # the fixture `install` removes them


@pytest.mark.parametrize(
    ("capability", "sizes", "mask", "number"),
    [
        (90, (64, 64), "causal", 1915), (90, (64, 64), "none", None),
        (100, (64, 64), "causal", None),
        (90, (192, 128), "none", 2087), (100, (192, 128), "none", None),
        (100, (256, 256), "none", 3216), (90, (256, 256), "none", None),
    ],
)  # fmt: skip
def test_denylist(install, monkeypatch, capability, sizes, mask, number):
    """Calls with a known bug in flash-attn-4's backward are refused only if they need gradients."""
    install(FA4)
    monkeypatch.setattr(denylist, "DEFECTS", DEFECTS)
    monkeypatch.setattr(denylist, "version_of", VERSIONS.get)
    for module in (denylist, engines):
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
    there = torch.device("cuda"), torch.bfloat16, *sizes
    shape = {"mask": mask, "seqlen_q": 20, "seqlen_k": 20}
    assert FLASH.unsupported(AttentionProblem(*there, **shape)) == []
    reasons = FLASH.unsupported(AttentionProblem(*there, **shape, needs_grad=True))
    assert len(reasons) == (number is not None)
    assert all(f"/issues/{number})" in reason for reason in reasons)


def test_selected_by_name_only():
    """Without a verdict, the backend is opt-in; verdicts include a hash of its source files."""
    assert "flash" not in fused_attn.available_backends() or torch.cuda.is_available()
    there = AttentionProblem(torch.device("cuda"), torch.bfloat16, 64, 64)
    assert FLASH.opt_in_reasons(there)
    assert FLASH.default_for("cuda") == "none"
    names = {path.name for path in verdicts.KERNELS["flash"]()}
    assert names >= {"__init__.py", "engines.py", "plan.py"}


def test_deterministic_backwards_of_wide_heads(install):
    """The cached choice of an engine depends on torch.use_deterministic_algorithms."""
    install("flash-attn-3")
    sizes = {"head_dim": 256, "head_dim_v": 256, "seqlen_q": 20, "seqlen_k": 20}
    problem = AttentionProblem(torch.device("cuda"), torch.bfloat16, needs_grad=True, **sizes)
    assert FLASH.unsupported(problem) == []
    with deterministic():
        (reason,) = FLASH.unsupported(problem)
    assert reason == "flash-attn-3 has no deterministic backward for head_dim above 192"
