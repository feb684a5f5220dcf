"""stats() counts attention calls, with their call sites and the reasons for torch's kernels."""

import torch

import fused_attn


def test_modules_functions_and_backends():
    attention = fused_attn.nn.MultiheadAttention(32, 4, batch_first=True)
    x, heads = torch.randn(2, 10, 32), torch.randn(2, 4, 10, 8, requires_grad=True)
    with fused_attn.stats(call_sites=True) as counts:
        attention(x, x, x, need_weights=False)
        attention(x, x, x)
        fused_attn.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        fused_attn.scaled_dot_product_attention(heads, heads, heads, backend="cpp")
        with fused_attn.use_backend("sdpa"):
            fused_attn.scaled_dot_product_attention(heads, heads, heads)
        fused_attn.varlen_attention(
            *[heads[0].transpose(0, 1)] * 3, *[torch.tensor([0, 4, 10])] * 2, 6, 6
        )
    fused_attn.scaled_dot_product_attention(heads, heads, heads)
    assert (counts.fused, counts.left_to_torch) == (5, 1)
    (left,) = [kind for kind in counts.kinds if kind.reason]
    assert left.reason == "backend sdpa" and left.query == (2, 4, 10, 8)
    assert all("test_stats.py:" in kind.site for kind in counts.kinds)


def test_blocks_may_be_nested_and_graphs_are_not_counted():
    query = torch.randn(2, 4, 10, 8)

    def attend(query):
        return fused_attn.scaled_dot_product_attention(query, query, query)

    with fused_attn.stats() as outer:
        attend(query)
        with fused_attn.stats() as inner:
            attend(query)
            torch.compile(attend, backend="aot_eager", fullgraph=True)(query)
    assert (outer.fused, inner.fused) == (2, 1)


def test_packed_calls_are_counted_by_their_tokens():
    """The lengths of packed calls are their total numbers of tokens."""
    query, key = torch.randn(10, 4, 8), torch.randn(12, 2, 8)
    starts = torch.tensor([0, 4, 10]), torch.tensor([0, 5, 12])
    for leaf in (query, query.clone().requires_grad_()):
        for backend in (None, "eager"):
            with fused_attn.stats() as counts:
                fused_attn.varlen_attention(leaf, key, key, *starts, 6, 7, backend=backend)
            (kind,) = counts.kinds
            assert (kind.query, kind.seqlen_k) == ((10, 4, 8), 12)
