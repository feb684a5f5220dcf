"""swap_modules: which modules it swaps, skips and restores, and what it leaves unchanged."""

import functools
from types import SimpleNamespace

import pytest
import torch
from nn_helpers import assert_equal_in_float64, run, swapped_copy

import fused_attn.nn as fnn
from fused_attn.swap import SwapReport, contains_fused_modules, swap_modules

PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])


class Block(torch.nn.Module):
    """Model with deeply nested attention, and a norm that is used in two places."""

    def __init__(self, embed_dim=12):
        super().__init__()
        self.inner = torch.nn.ModuleDict(
            {"attend": torch.nn.MultiheadAttention(embed_dim, 3, batch_first=True)}
        )
        self.norm = torch.nn.LayerNorm(embed_dim)
        self.tied = self.norm
        self.rms = torch.nn.Sequential(torch.nn.Linear(embed_dim, embed_dim), torch.nn.RMSNorm(12))

    def forward(self, x, padding=None):
        attended, _ = self.inner["attend"](x, x, x, key_padding_mask=padding)
        return self.rms(self.tied(x + self.norm(attended)))


def kinds(model):
    return {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}


def test_nested_and_shared_modules():
    model = Block().double()
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    expected = run(model, (x, PADDING))
    modules = {name: id(m) for name, m in model.named_modules(remove_duplicate=False)}
    report = swap_modules(model)
    assert type(model.inner["attend"]) is fnn.MultiheadAttention
    assert type(model.norm) is fnn.LayerNorm
    assert type(model.rms[1]) is fnn.RMSNorm
    assert {name: id(m) for name, m in model.named_modules(remove_duplicate=False)} == modules
    assert [(s.name, s.to_type) for s in report.swapped] == [
        ("inner.attend", "fused_attn.nn.MultiheadAttention"),
        ("norm", "fused_attn.nn.LayerNorm"),
        ("tied", "fused_attn.nn.LayerNorm"),
        ("rms.1", "fused_attn.nn.RMSNorm"),
    ]
    assert not report.skipped
    assert_equal_in_float64(run(model, (x, PADDING)), expected)


def test_parameters_are_unchanged():
    model = Block()
    before = {name: id(p) for name, p in model.named_parameters()}
    keys = list(model.state_dict())
    swap_modules(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys


def test_restore():
    model = Block().double()
    before = kinds(model)
    report = swap_modules(model)
    assert kinds(model) != before
    model.eval()
    model.norm.weight.data.fill_(2.0)
    report.restore()
    assert kinds(model) == before
    assert not model.norm.training
    assert model.norm.weight.eq(2.0).all(), "restore() has reset a weight changed after the swap"
    report.restore()  # a second call changes nothing
    assert kinds(model) == before
    assert len(swap_modules(model).swapped) == 4


@pytest.mark.parametrize(("attention", "norm"), [(True, False), (False, True), (False, False)])
def test_attention_and_norm_flags(attention, norm):
    model = torch.nn.ModuleList(
        [Block(), torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(12, 3, 8), 1)]
    )
    swap_modules(model, attention=attention, norm=norm)
    fused = {type(m).__name__ for m in model.modules() if type(m).__module__.startswith("fused")}
    attentions = {"MultiheadAttention", "TransformerDecoder", "TransformerDecoderLayer"}
    assert fused == (attentions if attention else set()) | (
        {"LayerNorm", "RMSNorm"} if norm else set()
    )


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("norm", [True, False])
def test_partially_swapped_transformer(attention, norm):
    model = torch.nn.Transformer(12, 3, 1, 1, 8, dropout=0.0, batch_first=True).double()
    swapped = swapped_copy(model, attention=attention, norm=norm)
    args = tuple(torch.randn(2, n, 12, dtype=torch.float64) for n in (5, 4))
    assert_equal_in_float64(run(swapped, args), run(model, args))


def test_the_model_itself_is_swapped():
    model = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(12, 2, 8, batch_first=True), 2
    ).eval()
    x = torch.randn(2, 5, 12)
    expected = model(x, src_key_padding_mask=PADDING)
    report = swap_modules(model)
    assert type(model) is fnn.TransformerEncoder
    assert report.swapped[0].name == "(the model)"
    with torch.no_grad():  # torch's module would use its inference fast path
        actual = model(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(actual[~PADDING], expected[~PADDING])
    report.restore()
    assert type(model) is torch.nn.TransformerEncoder


class Shifted(torch.nn.LayerNorm):
    """Layer norm that adds 1, so that it must not be replaced."""

    def forward(self, input):
        return super().forward(input) + 1.0


def test_subclasses_are_skipped_and_listed():
    class MyAttention(torch.nn.MultiheadAttention):
        pass

    model = torch.nn.ModuleDict(
        {"norm": Shifted(4), "attend": MyAttention(4, 2), "plain": torch.nn.LayerNorm(4)}
    )
    report = swap_modules(model)
    assert type(model["norm"]) is Shifted
    assert type(model["attend"]) is MyAttention
    assert [s.name for s in report.swapped] == ["plain"]
    skipped = {s.name: s.reason for s in report.skipped}
    assert skipped.keys() == {"norm", "attend"}
    assert "subclass of torch.nn.LayerNorm" in skipped["norm"]
    assert "subclass of torch.nn.MultiheadAttention" in skipped["attend"]
    assert [s.name for s in swap_modules(model, attention=False).skipped] == ["norm"]


def test_patched_and_parametrized_modules_are_skipped():
    model = torch.nn.ModuleList([torch.nn.LayerNorm(4) for _ in range(3)])
    model[0].forward = lambda input: input
    model[1].compile()
    torch.nn.utils.parametrize.register_parametrization(model[2], "weight", torch.nn.Identity())
    report = swap_modules(model)
    assert not report.swapped
    reasons = [s.reason for s in report.skipped]
    assert "forward was replaced" in reasons[0]
    assert "compiled in place" in reasons[1]
    assert "swap first, then register the parametrization" in reasons[2]


@pytest.mark.parametrize("name", ["_sa_block", "_ff_block", "_mha_block"])
def test_layers_with_a_replaced_block_are_skipped(name):
    decodes = name == "_mha_block"
    kind = torch.nn.TransformerDecoderLayer if decodes else torch.nn.TransformerEncoderLayer
    layer = kind(12, 4, 16, 0.0)
    setattr(layer, name, lambda x, *args, **kwargs: 2 * x)
    x = [torch.randn(2, 5, 12)] * (1 + decodes)
    before, report = layer(*x), swap_modules(layer)
    torch.testing.assert_close(layer(*x), before)
    (skipped,) = report.skipped
    assert f"its {name} was replaced" in skipped.reason


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (torch.nn.LayerNorm, "forward"),
        (torch.nn.MultiheadAttention, "forward"),
        (torch.nn.TransformerEncoderLayer, "_ff_block"),
    ],
)
def test_classes_of_torch_with_a_replaced_method_are_skipped(kind, name, monkeypatch):
    method = getattr(kind, name)
    monkeypatch.setattr(kind, name, functools.wraps(method)(lambda *a, **kw: method(*a, **kw)))
    monkeypatch.setattr(kind, "reset_parameters", lambda self: None, raising=False)
    layer = torch.nn.TransformerEncoderLayer(12, 4, 16)
    report = swap_modules(layer)
    skipped = {s.type: s.reason for s in report.skipped}
    assert skipped.keys() == {f"torch.nn.{kind.__name__}"}
    assert f"{kind.__name__}.{name} was replaced" in "".join(skipped.values())
    monkeypatch.undo()
    assert swap_modules(layer).swapped


def test_hooks_are_called_until_removed():
    model = Block()
    calls = []
    handles = [
        model.norm.register_forward_hook(lambda *_: calls.append("forward")),
        model.norm.register_forward_pre_hook(lambda *_: calls.append("pre")),
        model.inner["attend"].register_full_backward_hook(lambda *_: calls.append("backward")),
    ]
    swap_modules(model)
    x = torch.randn(2, 5, 12, requires_grad=True)
    model(x).sum().backward()
    assert set(calls) == {"backward", "forward", "pre"}
    for handle in handles:
        handle.remove()
    calls.clear()
    model(x).sum().backward()
    assert not calls


def test_swapping_twice_changes_nothing():
    model = Block()
    assert not contains_fused_modules(model)
    swap_modules(model)
    assert contains_fused_modules(model)
    report = swap_modules(model)
    assert not report.swapped
    assert not report.skipped
    assert str(report) == "nothing to swap; modules that were already fused: 3"


def test_report_is_readable():
    report = swap_modules(torch.nn.ModuleDict({"a": torch.nn.LayerNorm(4), "b": Shifted(4)}))
    lines = str(report).splitlines()
    assert lines[0] == "1 swapped, 1 left alone"
    assert lines[1].split() == ["a", "torch.nn.LayerNorm", "->", "fused_attn.nn.LayerNorm"]
    assert "left alone: subclass" in lines[2]


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match=r"model must be a .*Module, got list"):
        swap_modules([torch.nn.LayerNorm(4)])


def test_models_compiled_before_the_swap_use_the_fused_modules():
    model = Block()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.randn(2, 5, 12)
    expected = compiled(x)
    report = swap_modules(compiled)
    assert isinstance(report, SwapReport)
    assert type(model.norm) is fnn.LayerNorm
    torch.testing.assert_close(compiled(x), expected)


def test_report_notes_for_gpus():
    """The report suggests `fused-attn verify` on CUDA, and says that MPS has no kernels."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(8))
    report = swap_modules(model)
    assert not report.notes
    report.restore()
    on_gpus = [SimpleNamespace(device=torch.device(name)) for name in ("cuda", "mps", "cuda")]
    model.parameters = lambda: on_gpus
    on_cuda, on_mps = swap_modules(model).notes
    assert "fused-attn verify" in on_cuda and "no kernels for mps" in on_mps
