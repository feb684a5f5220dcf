"""examples/positions.py: tables of positional embeddings."""

from __future__ import annotations

import pytest
import torch
from example_runs import EXAMPLES  # noqa: F401  # which lets examples/ be imported

# isort: split
from positions import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding

BATCH = 3


def test_sinusoidal_embedding_is_that_of_the_paper():
    module = SinusoidalPositionalEmbedding(6, max_seqlen=50, dtype=torch.float64)
    position, column = 37, 2
    angle = position / 10000 ** (2 * column / 6)
    row = module.weight[position]
    assert row[2 * column].item() == pytest.approx(torch.sin(torch.tensor(angle)).item(), abs=1e-6)
    assert row[2 * column + 1].item() == pytest.approx(
        torch.cos(torch.tensor(angle)).item(), abs=1e-6
    )
    assert not module.state_dict()
    assert not list(module.parameters())


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("learned", [False, True])
def test_positional_embedding(learned, batch_first):
    cls = LearnedPositionalEmbedding if learned else SinusoidalPositionalEmbedding
    module = cls(6, 9, batch_first=batch_first)
    x = torch.randn(BATCH, 5, 6) if batch_first else torch.randn(5, BATCH, 6)
    rows = (module(x) - x).transpose(0, 1) if not batch_first else module(x) - x
    for row in rows:
        torch.testing.assert_close(row, module.weight[:5].detach().clone())
    unbatched = torch.randn(5, 6)
    torch.testing.assert_close(module(unbatched), unbatched + module.weight[:5])
    positions = torch.randint(0, 9, x.shape[:-1])
    torch.testing.assert_close(module(x, positions), x + module.weight[positions])
    assert module(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"at most 9 positions \(max_seqlen\), got 10"):
        module(torch.randn(10, 6))
    with pytest.raises(ValueError, match="positions must have shape"):
        module(x, positions[:1])
    with pytest.raises(ValueError, match="input must have shape"):
        module(torch.randn(5, 7))


def test_learned_embedding_is_trained():
    module = LearnedPositionalEmbedding(6, 9)
    module(torch.randn(5, BATCH, 6)).sum().backward()
    assert module.weight.grad[:5].eq(BATCH).all()
    assert module.weight.grad[5:].eq(0).all()
