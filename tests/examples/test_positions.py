"""examples/positions.py: tables of positional embeddings."""

import math

import pytest
import torch
from example_runs import EXAMPLES  # noqa: F401  # adds examples/ to sys.path

# isort: split
from positions import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding


def test_sinusoidal_embedding_follows_the_paper():
    module = SinusoidalPositionalEmbedding(6, max_seqlen=50)
    position, column = 37, 2
    angle = position / 10000 ** (2 * column / 6)
    row = module.weight[position]
    assert row[2 * column].item() == pytest.approx(math.sin(angle), abs=1e-6)
    assert row[2 * column + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert not module.state_dict()


@pytest.mark.parametrize("cls", [LearnedPositionalEmbedding, SinusoidalPositionalEmbedding])
def test_positional_embedding(cls):
    module, x = cls(6, 9), torch.randn(3, 5, 6)
    torch.testing.assert_close(module(x), x + module.weight[:5])
    positions = torch.randint(0, 9, (3, 5))
    torch.testing.assert_close(module(x, positions), x + module.weight[positions])
    assert module(x.bfloat16()).dtype == torch.bfloat16
