"""torch.fx.symbolic_trace of swapped models: a fused module is one node, as in torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import symbolic_trace

from fused_attn import swap_modules


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.rms = nn.RMSNorm(8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)

    def forward(self, x):
        x = self.norm(x)
        return self.layer(self.rms(x + self.attention(x, x, x, need_weights=False)[0]))


class Translation(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x):
        return self.model(x, x)


@pytest.mark.parametrize("kind", [Block, Translation])
def test_symbolic_trace(kind):
    model, x = kind(), torch.randn(3, 5, 8)
    graphs, want = [symbolic_trace(model).graph], model(x)
    swap_modules(model)
    traced = symbolic_trace(model)
    graphs.append(traced.graph)
    torch.testing.assert_close(traced(x), want)
    before, after = ([n.target for n in g.nodes if n.op == "call_module"] for g in graphs)
    assert before == after
