"""fused_attn.nn under torch.compile, torch.export and torch.fx."""

import copy

import pytest
import torch
from nn_helpers import (
    BATCH,
    EMBED,
    HEADS,
    LEN_K,
    LEN_Q,
    assert_equal_in_float64,
    causal_bias,
    perturb,
    randn,
    run,
)
from torch import nn
from torch.fx import symbolic_trace

import fused_attn
import fused_attn.nn as fnn


def graph_cases():
    padding = torch.tensor([[False] * LEN_Q, [False] * 3 + [True] * 2])
    x, memory = randn(BATCH, LEN_Q, EMBED), randn(BATCH, LEN_K, EMBED)
    causal = causal_bias(LEN_Q)
    layer = {"batch_first": True, "dropout": 0.0}
    return {
        "attention": (
            fnn.MultiheadAttention(EMBED, HEADS, batch_first=True),
            (x, memory, memory),
            {},
        ),
        "attention-heads": (
            fnn.MultiheadAttention(EMBED, HEADS, batch_first=True),
            (x, x, x),
            {"average_attn_weights": False, "is_causal": True},
        ),
        "attention-masks": (
            fnn.MultiheadAttention(EMBED, HEADS, batch_first=True, add_bias_kv=True),
            (x, x, x),
            {"attn_mask": causal, "key_padding_mask": padding, "need_weights": False},
        ),
        "encoder_layer-causal": (
            fnn.TransformerEncoderLayer(EMBED, HEADS, 16, **layer),
            (x,),
            {"src_mask": causal, "is_causal": True, "src_key_padding_mask": padding},
        ),
        "encoder": (
            fnn.TransformerEncoder(
                fnn.TransformerEncoderLayer(EMBED, HEADS, 16, norm_first=True, **layer), 2
            ),
            (x,),
            {"mask": causal, "src_key_padding_mask": padding},
        ),
        "transformer": (
            fnn.Transformer(EMBED, HEADS, 1, 1, 16, **layer),
            (memory, x),
            {"tgt_mask": causal, "tgt_key_padding_mask": padding},
        ),
        "layer_norm": (fnn.LayerNorm(EMBED), (x,), {}),
        "rms_norm": (fnn.RMSNorm(EMBED), (x,), {}),
    }


CASES = sorted(graph_cases())


@pytest.mark.sampled("the other cases cover these layers", case=["transformer"])
@pytest.mark.parametrize(
    ("case", "compiler"),
    [
        *((case, "aot_eager") for case in CASES),
        pytest.param("encoder", "inductor", marks=[pytest.mark.thorough, pytest.mark.slow]),
    ],
)
def test_compile(case, compiler):
    module, args, kwargs = graph_cases()[case]
    module = perturb(module.double())
    expected = run(module, args, kwargs)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend=compiler)
    actual = {k.replace("_orig_mod.", ""): v for k, v in run(compiled, args, kwargs).items()}
    assert_equal_in_float64(actual, expected)


def test_compiled_gradients_per_sample():
    """torch.compile of vmap(grad(...)) returns the gradients of torch's module."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, dtype=torch.float64)
    x = randn(3, 5, 2, EMBED)

    def gradients(module):
        def loss(params, x):
            out, _ = torch.func.functional_call(module, params, (x, x, x), {"need_weights": False})
            return out.sin().sum()

        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        params = {name: p.detach() for name, p in module.named_parameters()}
        return torch.compile(per_sample, backend="eager", fullgraph=True)(params, x)

    ours = gradients(fnn.MultiheadAttention.from_torch(copy.deepcopy(theirs)))
    torch.testing.assert_close(ours, gradients(theirs))


def test_compile_with_dropout():
    module = fnn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.5, batch_first=True)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    x = torch.randn(BATCH, LEN_Q, EMBED)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second), "the graph replays one dropout mask"
    first.sum().backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("backend", "strict"),
    [
        ("cpp", False),
        ("cpp", True),
        *(
            pytest.param(backend, strict, marks=pytest.mark.thorough)
            for backend in ("sdpa", "eager")
            for strict in (False, True)
        ),
    ],
)
def test_export_with_dropout(backend, strict):
    """An exported encoder in training mode draws a new dropout mask in each call, for any size."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 16, dropout=0.5, batch_first=True)
    model = nn.TransformerEncoder(layer, num_layers=1)
    fused_attn.swap_modules(model)
    sizes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}

    def inputs(batch, length):
        padding = (torch.arange(length) >= length - 1).expand(batch, -1)
        return {"src": torch.randn(batch, length, EMBED), "src_key_padding_mask": padding}

    example = inputs(2, 5)
    shapes = dict.fromkeys(example, sizes)
    with fused_attn.use_backend(backend):
        exported = torch.export.export(model, (), example, dynamic_shapes=shapes, strict=strict)
        for batch, length in ((2, 5), (3, 9), (4, 4)):
            call = inputs(batch, length)
            first, second = (exported.module()(**call) for _ in range(2))
            assert first.shape == call["src"].shape and first.isfinite().all()
            assert not torch.equal(first, second), "the program replays one dropout mask"


@pytest.mark.parametrize(
    ("case", "strict"),
    [*((case, False) for case in CASES), ("attention", True), ("encoder", True)],
)
def test_export(case, strict):
    """An exported program has the outputs and gradients of the module."""
    module, args, kwargs = graph_cases()[case]
    module = perturb(module.double()).eval()
    detach = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    program = torch.export.export(module, tuple(a.detach() for a in args), detach, strict=strict)
    assert_equal_in_float64(run(program.module(), args, kwargs), run(module, args, kwargs))
    ops = {str(node.target) for node in program.graph.nodes}
    with_weights = case in ("attention", "attention-heads")
    assert ("fused_attn.attention_weights.default" in ops) == with_weights


def test_compiled_padded_encoders_do_not_warn_about_caches(recwarn):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1)
    fused_attn.swap_modules(encoder)
    padded = torch.arange(9) >= torch.tensor([[9], [5]])
    compiled = torch.compile(encoder, backend="aot_eager")
    compiled(torch.randn(2, 9, 16), src_key_padding_mask=padded).sum().backward()
    assert not [warning for warning in recwarn if "lru_cache" in str(warning.message)]


class AllModules(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rms = nn.RMSNorm(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        x = self.layer(self.rms(x + self.attention(x, x, x, need_weights=False)[0]))
        return self.transformer(x, x)


def test_symbolic_trace():
    """In a torch.fx graph of a swapped model, each fused module is one node, as in torch."""
    model, x = AllModules(), torch.randn(3, 5, 8)
    before, expected = symbolic_trace(model), model(x)
    fused_attn.swap_modules(model)
    after = symbolic_trace(model)
    torch.testing.assert_close(after(x), expected)
    targets = [[n.target for n in t.graph.nodes if n.op == "call_module"] for t in (before, after)]
    assert targets[0] == targets[1]
