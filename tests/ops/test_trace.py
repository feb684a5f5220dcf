"""torch.jit.trace of the public functions and modules."""

import io

import pytest
import torch
from nn_helpers import Called

from fused_attn import layer_norm, masks, nn, rms_norm, scaled_dot_product_attention

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)
B, H, L, D = 2, 4, 6, 8
VISIBLE = torch.tensor([[1, 0, 1, 1, 0, 1], [1, 1, 1, 0, 0, 0]]).bool()
LENGTHS = torch.tensor([4, 6])

CASES = {
    "plain": (lambda q, k, v: scaled_dot_product_attention(q, k, v), ()),
    "causal": (lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), ()),
    "bool mask": (
        lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask),
        (torch.ones(L, L).tril().bool(),),
    ),
    "key mask": (
        lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask),
        (VISIBLE[:, None, None],),
    ),
    "key mask and causal": (
        lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask, is_causal=True),
        (VISIBLE[:, None, None],),
    ),
    "float mask": (
        lambda q, k, v, mask: scaled_dot_product_attention(q, k, v, mask),
        (torch.linspace(-1, 1, H * L * L).reshape(1, H, L, L),),
    ),
    "bottom right": (
        lambda q, k, v: scaled_dot_product_attention(q, k, v, masks.causal("bottom_right")),
        (),
    ),
    "padding": (
        lambda q, k, v, n: scaled_dot_product_attention(
            q, k, v, masks.padding(n) & masks.causal("bottom_right")
        ),
        (LENGTHS,),
    ),
    "prefix": (
        lambda q, k, v, n: scaled_dot_product_attention(q, k, v, masks.prefix_lm(n)),
        (LENGTHS,),
    ),
    "documents": (
        lambda q, k, v, ids: scaled_dot_product_attention(q, k, v, masks.documents(ids)),
        (torch.tensor([0, 0, 0, 1, 1, 1]),),
    ),
    "norm": (lambda q, k, v: layer_norm(q, (D,)), ()),
    "norm of a traced size": (lambda q, k, v: rms_norm(q, k.shape[-1:]), ()),
}


def saved_and_loaded(traced):
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    return torch.jit.load(file)


def tensors(length=L):
    torch.manual_seed(length)
    return torch.randn(3, B, H, length, D).unbind()


@pytest.mark.parametrize(("function", "more"), CASES.values(), ids=CASES)
def test_trace(function, more):
    module = Called(function)
    traced = saved_and_loaded(torch.jit.trace(module, (*tensors(), *more)))
    args = tuple(t + 1.0 for t in tensors())
    assert torch.equal(traced(*args, *more), module(*args, *more))


@pytest.mark.parametrize("name", ["plain", "causal", "bottom right", "norm"])
def test_a_traced_call_takes_other_lengths(name):
    module = Called(CASES[name][0])
    traced = torch.jit.trace(module, tensors())
    assert torch.equal(traced(*tensors(9)), module(*tensors(9)))


@pytest.mark.parametrize("masked", ["not", "causal", "padding"])
def test_trace_of_an_encoder_layer(masked):
    """An encoder layer traced without gradients matches the module after it is saved and loaded."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L)

    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            mask = causal if masked == "causal" else None
            padding = ~VISIBLE if masked == "padding" else None
            return self.layer(x, src_mask=mask, src_key_padding_mask=padding)

    x = torch.randn(B, L, 16)
    with torch.no_grad():
        traced = saved_and_loaded(torch.jit.trace(Masked(), x))
        torch.testing.assert_close(traced(x + 1.0), Masked()(x + 1.0))
