"""torch.jit.trace of the public functions and modules."""

import io
from functools import partial

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

attend = scaled_dot_product_attention
CASES = {  # function of query, key, value and further tensors, and these tensors
    "plain": (attend, ()),
    "causal": (partial(attend, is_causal=True), ()),
    "bool mask": (attend, (torch.ones(L, L).tril().bool(),)),
    "key mask": (attend, (VISIBLE[:, None, None],)),
    "key mask and causal": (partial(attend, is_causal=True), (VISIBLE[:, None, None],)),
    "float mask": (attend, (torch.linspace(-1, 1, H * L * L).reshape(1, H, L, L),)),
    "bottom right": (partial(attend, attn_mask=masks.causal("bottom_right")), ()),
    "padding": (
        lambda q, k, v, n: attend(q, k, v, masks.padding(n) & masks.causal("bottom_right")),
        (LENGTHS,),
    ),
    "prefix": (lambda q, k, v, n: attend(q, k, v, masks.prefix_lm(n)), (LENGTHS,)),
    "documents": (
        lambda q, k, v, ids: attend(q, k, v, masks.documents(ids)),
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
def test_traced_calls_with_other_lengths(name):
    module = Called(CASES[name][0])
    traced = torch.jit.trace(module, tensors())
    assert torch.equal(traced(*tensors(9)), module(*tensors(9)))


@pytest.mark.parametrize("masked", ["not", "causal", "padding"])
def test_trace_of_an_encoder_layer(masked):
    """An encoder layer traced without gradients matches the module after it is saved and loaded."""
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    causal = torch.nn.Transformer.generate_square_subsequent_mask(L) if masked == "causal" else None
    padding = ~VISIBLE if masked == "padding" else None
    module = Called(lambda x: layer(x, src_mask=causal, src_key_padding_mask=padding))
    module.layer = layer.requires_grad_(False)
    x = torch.randn(B, L, 16)
    traced = saved_and_loaded(torch.jit.trace(module, x))
    torch.testing.assert_close(traced(x + 1.0), module(x + 1.0))
