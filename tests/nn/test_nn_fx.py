"""torch.fx.symbolic_trace of a swapped model: each fused module is one node, as in torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import symbolic_trace

from fused_attn import swap_modules


class Model(nn.Module):
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
    model, x = Model(), torch.randn(3, 5, 8)
    before, expected = symbolic_trace(model), model(x)
    swap_modules(model)
    after = symbolic_trace(model)
    torch.testing.assert_close(after(x), expected)
    targets = [[n.target for n in t.graph.nodes if n.op == "call_module"] for t in (before, after)]
    assert targets[0] == targets[1]
