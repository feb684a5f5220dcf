"""Outputs and gradients have torch's memory layout on every dispatch path."""

import itertools

import pytest
import torch
from helpers import BACKENDS, device_of
from torch.utils._python_dispatch import TorchDispatchMode

from fused_attn import functional as F
from fused_attn import masks, nn, varlen_attention
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.masks.spec import MaskSpec

BATCH, HEADS, SEQLEN, DIM = SHAPE = (2, 3, 5, 8)
# Memory orders of batch (b), heads (h) and length (l), outermost first; head_dim is innermost.
ORDERS = {
    "".join("bhl"[i] for i in order): (*order, 3) for order in itertools.permutations(range(3))
}
every_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


def lying(order, device="cpu", shape=SHAPE):
    """Return a random tensor with the given shape and memory order of its dimensions."""
    inverse = [order.index(dim) for dim in range(len(order))]
    return torch.randn([shape[dim] for dim in order], device=device).permute(inverse)


@every_order
@pytest.mark.parametrize("masked", [False, True])
def test_output_lies_as_that_of_torch(order, masked):
    query, other = lying(order), lying((0, 1, 2, 3))
    mask = torch.rand(SEQLEN, SEQLEN) < 0.9 if masked else None
    want = torch.nn.functional.scaled_dot_product_attention(query, other, other, mask)
    plain = F.scaled_dot_product_attention(query, other, other, mask)
    with_lse = F.scaled_dot_product_attention(query, other, other, mask, return_lse=True)[0]
    trained = F.scaled_dot_product_attention(query.requires_grad_(), other, other, mask)
    assert want.stride() == query.stride()
    assert plain.stride() == with_lse.stride() == trained.stride() == want.stride()


@pytest.mark.parametrize("backend", BACKENDS)
def test_views_that_work_with_torch(backend):
    there = device_of(backend)
    contiguous = torch.randn(SHAPE, device=there)
    packed = torch.randn(BATCH, SEQLEN, 3, HEADS, DIM, device=there)  # a packed QKV projection
    wide = torch.randn(BATCH, HEADS, SEQLEN, 2 * DIM, device=there)
    for value in (contiguous, wide):
        out = F.scaled_dot_product_attention(contiguous, contiguous, value, backend=backend)
        assert out.view(BATCH * HEADS, SEQLEN, -1).shape[2] == value.shape[3]
    query, key, value = (t.transpose(1, 2) for t in packed.unbind(2))
    out = F.scaled_dot_product_attention(query, key, value, backend=backend)
    assert out.transpose(1, 2).view(BATCH, SEQLEN, HEADS * DIM).is_contiguous()
    more = torch.randn(2, *SHAPE, device=there)
    assert F.scaled_dot_product_attention(more, more, more, backend=backend).is_contiguous()


@every_order
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_lie_as_their_tensors(order, backend):
    """Gradients have the strides of their tensors, so that autograd need not copy them."""
    orders = order, (0, 1, 2, 3), (0, 2, 1, 3)
    leaves = [lying(o, device_of(backend)).detach().requires_grad_() for o in orders]
    out = F.scaled_dot_product_attention(*leaves, backend=backend)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.stride() for g in grads] == [leaf.stride() for leaf in leaves]


@pytest.mark.thinned("covered by the order blh", order=[ORDERS["lbh"]])
@pytest.mark.sampled(
    "covered by the orders blh and lbh",
    order=[v for n, v in ORDERS.items() if n not in ("blh", "lbh")],
)
@pytest.mark.parametrize("backend", BACKENDS)
@every_order
def test_fakes_agree(order, backend):
    """The fake kernels of the ops return the shapes and strides of the real ones."""
    there = device_of(backend)
    query, key = lying(order, there), lying((0, 2, 1, 3), there)
    last = lying((0, 1, 3, 2), there)  # kernels need a copy of this layout
    for call in (
        AttentionCall(query, key, key, MaskSpec(), AttentionOptions(1.0)),
        AttentionCall(last, query, query, MaskSpec(), AttentionOptions(1.0)),
        AttentionCall(query[:1], key[:1], last[:1], MaskSpec(), AttentionOptions(1.0)),
    ):
        forward, backward = torch.ops.fused_attn.attention_fwd, torch.ops.fused_attn.attention_bwd
        torch.library.opcheck(forward.default, (*call.flat(), True, True, backend))
        outputs = forward(*call.flat(), True, True, backend)
        rest = (*outputs, torch.ones_like(outputs[0]), None, False, backend)
        torch.library.opcheck(backward.default, (*call.flat(), *rest))


@pytest.mark.sampled(
    "covered by the orders bhl and lbh",
    order=[v for n, v in ORDERS.items() if n not in ("bhl", "lbh")],
)
@every_order
def test_compiled_with_sizes_as_symbols(order):
    def attend(query, key):
        return F.scaled_dot_product_attention(query, key, key)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for seqlen in (4, 7):
        shape = (BATCH, HEADS, seqlen, DIM)
        query, key = (lying(order, shape=shape).requires_grad_() for _ in range(2))
        for function in (attend, compiled):
            out = function(query, key)
            grad = torch.autograd.grad(out.sum(), query)[0]
            assert out.stride() == grad.stride() == query.stride()


class NoCopies(TorchDispatchMode):
    """Dispatch mode in which no tensor may be cloned or copied."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", ["attention", "weights", "encoder", "decoder"])
def test_modules_copy_nothing(kind, batch_first):
    """Modules transpose projections and outputs as views, so they copy no tensor."""
    options = {"batch_first": batch_first, "dropout": 0.0}
    attention = nn.MultiheadAttention(16, 2, **options)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, **options)
    decoder = nn.TransformerDecoderLayer(16, 2, 32, **options)
    call = {
        "attention": lambda x: attention(x, x, x, need_weights=False, is_causal=True)[0],
        "weights": lambda x: attention(x, x, x)[0],
        "encoder": encoder,
        "decoder": lambda x: decoder(x, x),
    }[kind]
    x = torch.randn(4, 6, 16, requires_grad=True)
    with NoCopies():
        call(x)


@pytest.mark.parametrize("expanded", [0, 1, 2])
def test_outputs_of_expanded_queries_are_contiguous(expanded):
    sizes = [1 if dim == expanded else size for dim, size in enumerate(SHAPE)]
    query, key = torch.randn(sizes).expand(SHAPE), torch.randn(SHAPE)
    plain = F.scaled_dot_product_attention(query, key, key)
    with_lse = F.scaled_dot_product_attention(query, key, key, return_lse=True)[0]
    assert plain.is_contiguous() and with_lse.is_contiguous()


def test_packed_sequences():
    packed = torch.randn(SEQLEN, HEADS, DIM, requires_grad=True)
    starts = torch.tensor([0, 2, SEQLEN])
    out = varlen_attention(packed, packed, packed, starts, starts, 3, 3, masks.causal())
    assert out.is_contiguous()
    assert torch.autograd.grad(out.sum(), packed)[0].is_contiguous()
