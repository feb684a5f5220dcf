"""compare() judges the packed model, and reports outputs that depend on padded rows."""

import pytest
import torch
from padded_models import (
    BATCH,
    IGNORED,
    LENGTH,
    OPTION,
    STACKS,
    WIDTH,
    Pooled,
    made,
    recorded_packings,
)
from planted import scale_result

import fused_attn.nn as fnn
from fused_attn.tools.compare import compare

NAMES = pytest.mark.parametrize("name", STACKS)


@NAMES
def test_outputs_in_padded_rows_are_reported(name):
    model, args, kwargs = made(name)
    report = compare(model, *args, **kwargs)
    assert not report.ok
    (output,) = [row for row in report.rows if row.kind == "output"]
    assert not output.ok and output.fused_max > 0.01
    (note,) = report.notes
    assert f"padded rows are 0 in the output of {STACKS[name]}" in note and OPTION in note
    assert note in str(report)
    kept = compare(model, *args, **kwargs, remove_padding=False)
    assert kept.ok, str(kept)
    assert not kept.notes
    assert [(row.name, row.kind) for row in kept.rows] == [(r.name, r.kind) for r in report.rows]


@NAMES
def test_the_packed_model_is_judged(name, monkeypatch):
    """One packed run decides the verdict; layer outputs are recorded in a run with padding."""
    packings = recorded_packings(monkeypatch)
    model, args, kwargs = made(name, real_only=True)
    report = compare(model, *args, **kwargs)
    assert report.ok, str(report)
    assert not report.notes
    assert [packing is not None for packing in packings] == [True]
    layers = [row for row in report.rows if row.kind == "layer output"]
    assert len(layers) > 6 and all(row.fused_max < 1e-5 for row in layers)
    assert compare(model, *args, **kwargs, remove_padding=False).ok
    assert len(packings) == 1


def test_errors_of_packed_attention_are_reported(monkeypatch):
    """Errors of packed attention fail the report, though layer outputs come from a padded run."""
    scale_result(monkeypatch, fnn.MultiheadAttention, "forward_packed")
    model, args, kwargs = made("torch", real_only=True)
    report = compare(model, *args, **kwargs)
    assert not report.ok
    bad = {row.kind for row in report.rows if row.binding and not row.ok}
    assert bad >= {"output", "param grad"}
    assert not any("padded rows" in note for note in report.notes)
    assert compare(model, *args, **kwargs, remove_padding=False).ok


def test_inference_with_padding_kept():
    """Without gradients, padded rows agree with eager attention only if padding is kept.

    torch's inference path returns 0 in padded rows; eager attention does not.
    """
    model, args, kwargs = made("torch")
    report = compare(model, *args, **kwargs, backward=False, remove_padding=False)
    assert report.ok, str(report)
    assert not compare(model, *args, **kwargs, backward=False).ok


class RealRows(Pooled):
    """Model that returns only the rows of real tokens, for batch-first and other encoders."""

    def forward(self, src):
        batch_first = self.encoder.layers[0].self_attn.batch_first
        out = self.encoder(src, src_key_padding_mask=IGNORED)
        return out[~IGNORED if batch_first else ~IGNORED.t()]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
def test_relus_of_packed_batches_do_not_decide_the_verdict(batch_first, monkeypatch):
    """ReLUs whose inputs change sign between bfloat16 runs do not make the report fail."""
    packings = recorded_packings(monkeypatch)
    for seed in range(3):
        torch.manual_seed(seed)
        model = RealRows(batch_first=batch_first).bfloat16()
        shape = (BATCH, LENGTH) if batch_first else (LENGTH, BATCH)
        report = compare(model, torch.randn(*shape, WIDTH, dtype=torch.bfloat16))
        assert report.ok, str(report)
    assert len(packings) == 3 and None not in packings
