"""compare() reports errors and a verdict, and leaves the model unchanged."""

import contextlib
import json
import random

import pytest
import torch
from helpers import drawn
from planted import scale_result

import fused_attn.nn as fnn
from fused_attn import functional
from fused_attn.swap import SwapReport, swap_modules
from fused_attn.tools.compare import compare
from fused_attn.tools.comparison import ComparisonReport, ComparisonRow
from fused_attn.tools.recording import Recorder


class Normed(torch.nn.Module):
    """Model that returns function(layer norm, input)."""

    def __init__(self, function):
        super().__init__()
        self.norm, self.function = torch.nn.LayerNorm(16), function

    def forward(self, x):
        return self.function(self.norm, x)


def noisy(noise):
    """Return a model that adds noise(input) to the output of its layer norm."""
    return Normed(lambda norm, x: norm(x) + noise(x))


def transformer(**kwargs):
    defaults = {"d_model": 32, "nhead": 4, "num_encoder_layers": 1, "num_decoder_layers": 1}
    return torch.nn.Transformer(**defaults, dim_feedforward=48, batch_first=True, **kwargs)


def compare_transformer(model, dtype=torch.float32, **options):
    """Compare a transformer on a padded batch and a causal target, with options of compare()."""
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 4:] = True
    masks = dict.fromkeys(("src_key_padding_mask", "memory_key_padding_mask"), padding)
    masks["tgt_mask"] = torch.nn.Transformer.generate_square_subsequent_mask(7, dtype=dtype)
    source, target = (torch.randn(3, n, 32, generator=drawn(n)).to(dtype) for n in (9, 7))
    return compare(model, source, target, **masks, **options)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_is_within_the_contract(dtype, norm_first):
    model = transformer(norm_first=norm_first).to(dtype)
    report = compare_transformer(model, dtype)
    assert report.ok, str(report)
    rows = {(row.name, row.kind): row for row in report.rows}
    for name in ("encoder.layers.0.self_attn", "decoder.layers.0", "decoder.norm", "encoder"):
        assert (name, "layer output") in rows
    for name, _ in model.named_parameters():
        assert (name, "param grad") in rows
    assert ("decoder.layers.0.norm2", "input grad") in rows
    eps = torch.finfo(dtype).eps
    for row in report.rows:
        assert 0.0 < row.eager_rms <= row.eager_max < 100 * eps, row
        assert 0.0 < row.fused_rms <= row.fused_max, row
    assert rows["output", "output"].binding
    assert not rows["encoder", "layer output"].binding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_errors_are_measured_against_float64(dtype):
    """For a model with one norm, the reported errors and limits equal those computed by hand."""
    model = torch.nn.Sequential(torch.nn.LayerNorm(16)).to(dtype)
    x = torch.randn(64, 16, dtype=dtype)
    report = compare(model, x)
    generator = torch.Generator().manual_seed(0)
    projection = torch.randn(64, 16, generator=generator, dtype=torch.float64).to(dtype)

    def by_hand(norm, to):
        weight, bias = (p.detach().to(to).requires_grad_() for p in model.parameters())
        out = norm(x.to(to), (16,), weight, bias)
        out.backward(projection.to(to))
        tensors = {"output": out, "0.weight": weight.grad, "0.bias": bias.grad}
        return {name: t.detach().double() for name, t in tensors.items()}

    truth = by_hand(torch.nn.functional.layer_norm, torch.float64)
    eager = by_hand(torch.nn.functional.layer_norm, dtype)
    fused = by_hand(functional.layer_norm, dtype)
    largest_grad = max(truth["0.weight"].abs().max(), truth["0.bias"].abs().max())
    rows = [row for row in report.rows if row.name in truth]
    assert len(rows) == 3
    for row in rows:
        exact, is_output = truth[row.name], row.kind == "output"
        eager_error, fused_error = ((t[row.name] - exact).abs() for t in (eager, fused))
        assert row.eager_max == eager_error.max().item()
        assert row.fused_max == fused_error.max().item()
        assert row.eager_rms == pytest.approx(eager_error.square().mean().sqrt().item())
        largest, factor = (exact.abs().max(), 2.0) if is_output else (largest_grad, 3.0)
        rounding = torch.finfo(dtype).eps * largest.item()
        assert row.limit == pytest.approx(factor * row.eager_max + rounding)


def test_errors_of_fused_modules_are_measured(monkeypatch):
    """An error in fused attention makes the rows of the attention module and the output fail."""
    report = compare_transformer(transformer())
    assert report.ok and not any("accumulate" in note for note in report.notes)
    scale_result(monkeypatch, functional, "scaled_dot_product_attention", 1 + 1e-4)
    report = compare_transformer(transformer())
    assert not report.ok
    bad = {row.name for row in report.rows if not row.ok}
    assert {"encoder.layers.0.self_attn", "output"} <= bad
    assert "ABOVE LIMIT" in str(report)
    assert any("accumulate" in note for note in report.notes)  # explains the output's error
    assert max(row.eager_max for row in report.rows) < 1e-4


def test_wrong_gradients_are_reported(monkeypatch):
    right = functional.layer_norm

    def wrong(*args, **kwargs):
        out = right(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda grad: grad * (1 + 1e-4))
        return out

    monkeypatch.setattr(functional, "layer_norm", wrong)
    report = compare_transformer(transformer())
    assert not report.ok
    assert all(row.ok for row in report.rows if row.kind.endswith("output"))
    assert compare_transformer(transformer(), backward=False).ok


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_buckets_of_t5_are_the_same_in_all_runs(monkeypatch, factor):
    """Rounding in eager runs cannot change T5's distance buckets, which would increase limits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    )
    tokens = torch.randint(3, 40, (2, 40))
    scale_result(monkeypatch, functional, "scaled_dot_product_attention", factor)
    report = compare(transformers.T5EncoderModel(config), input_ids=tokens)
    assert report.ok is (factor == 1.0)
    assert all(row.limit < 1e-5 for row in report.rows if row.kind == "output")


def test_complex_buffers_stay_complex(monkeypatch):
    """Complex buffers stay complex in all runs, including those that estimate eager's error.

    These runs are needed only for an error above the limit.
    """

    class Rotation(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(16, dtype=torch.bfloat16)
            self.register_buffer("rotation", torch.ones(16, dtype=torch.complex64))

        def forward(self, x):
            assert self.rotation.is_complex()
            return self.norm(x)

    scale_result(monkeypatch, functional, "layer_norm", 1.1)
    assert not compare(Rotation(), torch.randn(4, 16, dtype=torch.bfloat16)).ok


def test_the_model_is_left_as_it_was():
    model = transformer(dropout=0.5)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    rng = torch.random.get_rng_state()
    compare_transformer(model)
    assert torch.equal(torch.random.get_rng_state(), rng)
    assert all(m.training for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    assert all(type(m).__module__.startswith("torch.") for m in model.modules())
    assert all("forward" not in m.__dict__ for m in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.encoder.layers[0].activation is torch.nn.functional.relu
    assert torch.backends.mha.get_fastpath_enabled()


def test_existing_gradients_are_ignored():
    model = torch.nn.Sequential(torch.nn.LayerNorm(16))
    x = torch.randn(4, 16)
    expected = compare(model, x).to_dict()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    assert compare(model, x).to_dict() == expected
    assert all(p.grad.eq(7.0).all() for p in model.parameters())


def test_inputs_that_require_grad_are_compared():
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    report = compare(attention, x, x, x, need_weights=False)
    rows = {(row.name, row.kind) for row in report.rows}
    assert {("input[0]", "input grad"), ("output[0]", "output")} <= rows
    assert ("in_proj_weight", "param grad") in rows
    assert x.grad is None


def test_relus_use_the_signs_of_the_first_run():
    recorder = Recorder(set(), True, torch.float32)

    def run(*numbers):
        linear = torch.nn.Linear(1, 1, bias=False)
        linear.weight.data.fill_(1.0)
        x = torch.tensor(numbers)[:, None].requires_grad_()
        found = recorder.run(torch.nn.Sequential(linear, torch.nn.ReLU()), (x,), {})
        return found["output", "output"].flatten().tolist(), x.grad.ne(0).flatten().tolist()

    assert run(2.0, -2.0) == ([2.0, 0.0], [True, False])
    assert run(-1.0, 1.0) == ([-1.0, 0.0], [True, False])
    layer = torch.nn.TransformerEncoderLayer(8, 2, 8)
    Recorder(set(), True, torch.float32).run(layer, (torch.randn(3, 2, 8),), {})
    assert layer.activation is not torch.nn.functional.relu


def test_rows_without_visible_keys_are_noted():
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [True] * 5])
    report = compare(attention, x, x, x, padding, backward=False)
    assert report.ok
    assert any("not finite with eager attention" in note for note in report.notes)
    assert report.notes[0] in str(report)


@pytest.mark.parametrize("backward", [True, False])
def test_report_as_text_and_json(backward):
    report = compare_transformer(transformer(), backward=backward)
    table = report.table(parameters=True).splitlines()
    assert len(table) == len(report.rows) + 1
    assert any(row.kind == "param grad" for row in report.rows) == backward
    assert "within the contract" in str(report)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["ok"] is True
    assert data["dtype"] == "float32"
    assert len(data["rows"]) == len(report.rows)
    assert data["rows"][0]["name"] == report.rows[0].name
    assert data["swapped"][0]["from_type"] == "torch.nn.Transformer"


def test_verdict_counts_only_binding_rows():
    def row(ok, binding):
        return ComparisonRow("a", "layer output", 0.0, 0.0, 1.0, 1.0, 0.5, ok, binding)

    def verdict(*rows):
        return ComparisonReport(list(rows), torch.float32, SwapReport()).ok

    assert verdict(row(True, True), row(False, False))
    assert not verdict(row(True, True), row(False, True))


def test_errors():
    with pytest.raises(ValueError, match="got one with fused modules"):
        compare(fnn.LayerNorm(4), torch.randn(2, 4))
    model = torch.nn.Sequential(torch.nn.LayerNorm(4))
    swap_modules(model)
    with pytest.raises(ValueError, match="got one with fused modules"):
        compare(model, torch.randn(2, 4))
    with pytest.raises(ValueError, match="got float64"):
        compare(torch.nn.LayerNorm(4).double(), torch.randn(2, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="must have modules that can be swapped"):
        compare(torch.nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(ValueError, match="must have float parameters"):
        compare(torch.nn.Identity(), torch.randn(2, 4))


def test_an_empty_comparison_is_not_ok():
    assert not compare(Normed(lambda norm, x: norm(x).argmax(-1)), torch.randn(3, 16)).ok


def seeded(x):
    """Return noise that is equal in each run with one dtype, but differs between dtypes."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)


RANDOM = r"same outputs in every run, got .* in output .* random"
REFUSED = {
    "randn_like": (torch.randn_like, RANDOM),
    "dropout": (torch.nn.functional.dropout, RANDOM),
    "small, equal in all dtypes": (lambda x: 1e-4 * torch.rand(x.shape).to(x.dtype), RANDOM),
    "Python's random": (lambda x: random.random(), RANDOM),
    "different in float64": (seeded, "about the same outputs in float64 and float32"),
    "NaN": (lambda x: x * float("nan"), "finite values"),
}


@pytest.mark.parametrize(("noise", "message"), REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("backward", [True, False])
def test_random_models_and_nan_are_refused(noise, message, backward):
    with pytest.raises(ValueError, match=message):
        compare(noisy(noise), torch.randn(9, 16), backward=backward)


def test_the_first_layer_that_does_not_repeat_is_named():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    model.layers[1].norm1 = noisy(torch.randn_like)
    with pytest.raises(ValueError, match=r"first layer that differs: layers\.1\.norm1\)"):
        compare(model, torch.randn(2, 5, 16))


def test_a_random_bfloat16_model_is_refused():
    model = noisy(lambda x: 0.1 * torch.rand(x.shape).to(x.dtype)).bfloat16()
    with pytest.raises(ValueError, match="same outputs in every run"):
        compare(model, torch.randn(9, 16).bfloat16())


def test_an_output_that_is_only_rounding_error_is_not_random():
    def means(norm, x):
        out = norm(x)
        return {"out": out, "mean": out.mean()}

    assert "out" in str(compare(Normed(means), torch.randn(9, 16)))


def test_a_stateful_model_is_not_random():
    """A model that changes its state is accepted, because each run uses a fresh copy."""

    class Counts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = torch.nn.LayerNorm(16), 0

        def forward(self, x):
            self.calls += 1
            return self.norm(x) * self.calls

    assert compare(Counts(), torch.randn(9, 16)).ok


def test_arguments_may_be_tuples():
    x = torch.randn(2, 5, 16)
    assert compare(Normed(lambda norm, pair: norm(pair[0]) + pair[1]), (x, x)).ok


def test_progress(monkeypatch):
    """Progress advances exactly to its announced total, with and without a backward pass."""
    steps = []

    @contextlib.contextmanager
    def progress(description, total):
        calls = []
        yield lambda: calls.append(1)
        steps.append((description, total, len(calls)))

    monkeypatch.setattr("fused_attn.tools.compare.progress", progress)
    for backward in (True, False):
        compare(torch.nn.Sequential(torch.nn.LayerNorm(4)), torch.randn(2, 4), backward=backward)
    assert steps == [("comparing", 7, 7), ("comparing", 4, 4)]
