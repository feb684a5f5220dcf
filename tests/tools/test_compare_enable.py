"""compare() of models that call torch's attention function: call counts and the report."""

import pytest
import torch
import torch.nn.functional as F
from planted import scale_result

from fused_attn.integrations import enable
from fused_attn.integrations.attention_in_code import BY_HAND, CALLS_SDPA, EITHER
from fused_attn.tools.compare import compare


class Attention(torch.nn.Module):
    """Self-attention with one QKV projection and F.scaled_dot_product_attention."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads, self.qkv = heads, torch.nn.Linear(dim, 3 * dim)

    def forward(self, x):
        parts = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)


class ByHand(torch.nn.Module):
    """Single-head attention from matrix products and a softmax."""

    def __init__(self, dim=64):
        super().__init__()
        self.qkv = torch.nn.Linear(dim, 3 * dim)

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        return (query @ key.transpose(-2, -1)).softmax(-1) @ value


class Either(Attention):
    """Attention with a fused and a hand-written branch, as in timm."""

    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        if self.fused:
            return super().forward(x)
        query, key, value = self.qkv(x).chunk(3, -1)
        return torch.softmax(query @ key.mT, -1) @ value


def model(*blocks):
    torch.manual_seed(0)
    return torch.nn.Sequential(*blocks)


def tokens(length=160):
    return torch.randn(2, length, 64)


def test_calls_are_compared_and_counted():
    report = compare(model(Attention(), Attention()), tokens(), enable=True)
    assert report.ok, str(report)
    assert (report.calls.fused, report.calls.left_to_torch) == (2, 0)
    rows = {(row.name, row.kind) for row in report.rows}
    assert {("0", "layer output"), ("1.qkv.weight", "param grad")} <= rows
    assert "under enable(): 2 calls fused" in str(report)
    assert report.to_dict()["calls"]["fused"] == 2


def test_a_wrong_kernel_is_reported(monkeypatch):
    scale_result(monkeypatch, enable.functional, "scaled_dot_product_attention")
    assert not compare(model(Attention()), tokens(), enable=True).ok


def test_compare_within_enabled():
    """Inside an outer enabled() block, the reference run of compare() is still eager."""
    with enable.enabled() as outer:
        report = compare(model(Attention()), tokens(), enable=True)
    assert report.ok and report.calls.fused == 1 == outer.fused
    assert outer.left_to_torch > 0


def test_the_error_without_enable_suggests_it():
    with pytest.raises(ValueError, match=r"enable=True"):
        compare(model(Attention()), tokens())


def test_nothing_fused_is_an_error():
    with pytest.raises(ValueError, match="calls that enable"):
        compare(model(ByHand()), tokens(), enable=True)


def test_the_report_lists_verdict_modules_and_unfused_modules():
    report = compare(model(torch.nn.LayerNorm(64), Attention(), ByHand()), tokens())
    lines = str(report).splitlines()
    assert lines[0] == report.verdict()
    assert sum("test_compare_enable.Attention (1): calls torch" in line for line in lines) == 1
    assert sum("test_compare_enable.ByHand (2): has a softmax" in line for line in lines) == 1
    shown = report.shown_rows()
    assert [row.kind for row in shown[:1]] == ["output"]
    order = list(dict.fromkeys(row.module for row in shown))
    assert [row.module for row in shown] == sorted((row.module for row in shown), key=order.index)
    (worst,) = [row for row in shown if (row.module, row.kind) == ("0", "param grad, worst of 2")]
    assert worst.share == max(r.share for r in report.rows if r.name in ("0.weight", "0.bias"))
    assert sorted(report.shown_rows(parameters=True), key=report.rows.index) == report.rows


def test_modules_fused_by_enable_are_not_listed_as_unfused():
    norm_and_attention = model(torch.nn.LayerNorm(64), Attention())
    assert compare(norm_and_attention, tokens()).left_alone()
    assert not compare(norm_and_attention, tokens(), enable=True).left_alone()


def test_the_branch_that_runs_is_reported():
    either = model(Either(True), Either(False), torch.nn.LayerNorm(64))
    assert {s.reason for s in compare(either, tokens()).swap.unfused} == {EITHER}
    report = compare(either, tokens(), enable=True)
    assert [s.reason for s in report.swap.unfused] == [CALLS_SDPA, BY_HAND]
    (line,) = report.left_alone()
    assert "1 x test_compare_enable.Either (1): has a softmax" in line
