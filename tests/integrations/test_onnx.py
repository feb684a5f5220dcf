"""torch.onnx.export of functions, modules and swapped models, run by onnxruntime."""

import pytest
import torch
import torch._inductor.lowering
from nn_helpers import Called, perturb

import fused_attn
from fused_attn import masks, nn
from fused_attn.ops.decompositions import decompositions

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason=f"reason: needs {package}")

pytestmark = pytest.mark.filterwarnings("ignore")
B, L, E = 2, 6, 32
PADDED = torch.arange(L) >= torch.tensor([[4], [L]])


def attend(*args, **kwargs):
    return fused_attn.scaled_dot_product_attention(*args, **kwargs)


def heads(length=L):
    return torch.randn(3, B, 4, length, 8).unbind()


def check_export(module, args, kwargs=None, dynamic_shapes=None, others=()):
    """Assert that the exported module matches the original, and uses only standard ONNX operators.

    Args:
        others: more arguments to call both modules with.
    """
    kwargs = kwargs or {}
    with torch.no_grad():
        program = torch.onnx.export(
            module, args, kwargs=kwargs, dynamo=True, verbose=False, dynamic_shapes=dynamic_shapes
        )
        for given in (args, *others):
            expected = module(*given, **kwargs)
            torch.testing.assert_close(program(*given, **kwargs)[0], expected, rtol=1e-5, atol=1e-5)
    assert all(node.domain == "" for node in program.model.graph)


ATTENTION = {
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), ()),
    "bool mask, a fully masked row": (attend, (torch.ones(L, L).tril(-1).bool(),)),
    "float mask": (attend, (torch.linspace(-1, 1, L * L).reshape(L, L),)),
    "padding and window": (
        lambda q, k, v, n: attend(q, k, v, masks.padding(n) & masks.sliding_window(2)),
        (torch.tensor([4, L]),),
    ),
    "fewer queries": (
        lambda q, k, v: attend(q[:, :, :2], k, v, masks.causal(align="bottom_right")),
        (),
    ),
    "decoding": (
        lambda q, k, v, n: fused_attn.decode_attention(q[:, :, :2], k, v, cache_lengths=n),
        (torch.tensor([4, L]),),
    ),
    "groups": (lambda q, k, v: attend(q, k[:, :2], v[:, :2], enable_gqa=True), ()),
}


@pytest.mark.sampled(
    "the other cases cover causal calls, masks and decoding",
    function=[ATTENTION[n][0] for n in ("padding and window", "fewer queries", "groups")],
)
@pytest.mark.parametrize(("function", "more"), ATTENTION.values(), ids=ATTENTION)
def test_attention(function, more):
    check_export(Called(function), (*heads(), *more))


def test_attention_of_any_length():
    function = lambda q, k, v: attend(q, k, v, is_causal=True)  # noqa: E731
    lengths = {2: torch.export.Dim("length", min=2, max=1000)}
    check_export(
        Called(function), heads(), dynamic_shapes=((lengths,) * 3,), others=[heads(9), heads(2)]
    )


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms(norm):
    check_export(perturb(norm(E)), (torch.randn(B, L, E),))


@pytest.mark.sampled("the padded batch covers the layer", padded=[False])
@pytest.mark.parametrize("padded", [True, False])
def test_encoder_layer(padded):
    layer = nn.TransformerEncoderLayer(E, 4, 48, batch_first=True).eval()
    kwargs = {"src_key_padding_mask": PADDED} if padded else {}
    check_export(layer, (torch.randn(B, L, E),), kwargs)


@pytest.mark.sampled("one model is enough for make test", name=["Mistral"])
@pytest.mark.slow
@pytest.mark.parametrize("name", ["Bert", "Mistral"])
def test_swapped_model_of_transformers(name):
    family = pytest.importorskip("hf_families").BY_NAME[name]
    model = family.model()
    fused_attn.swap_modules(model)

    class First(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids, attention_mask=attention_mask, use_cache=False)[0]

    inputs = family.inputs()
    inputs["attention_mask"][2] = 1  # avoids fully masked rows
    check_export(First().eval(), (inputs["input_ids"], inputs["attention_mask"]))


def test_exported_programs_contain_the_ops():
    """torch.export and its default decompositions preserve the ops of this package."""
    program = torch.export.export(Called(attend), heads())
    for decomposed in (program, program.run_decompositions()):
        assert "fused_attn.attention_fwd" in str(decomposed.graph)


def test_onnx_export_of_an_exported_program():
    args = heads()
    program = torch.export.export(Called(attend), args)
    table = torch.export.default_decompositions()
    table.update(decompositions())
    exported = torch.onnx.export(program.run_decompositions(table), dynamo=True, verbose=False)
    torch.testing.assert_close(exported(*args)[0], attend(*args), rtol=1e-5, atol=1e-5)


def test_compiles_in_ci(monkeypatch):
    """The ops compile with CI=true, where Inductor rejects fallbacks of decomposed ops."""
    monkeypatch.setenv("CI", "true")
    lowerings = torch._inductor.lowering.lowerings
    for op in decompositions():
        monkeypatch.delitem(lowerings, op, raising=False)
    torch.compiler.reset()
    args = heads()
    torch.testing.assert_close(torch.compile(attend)(*args), attend(*args))
