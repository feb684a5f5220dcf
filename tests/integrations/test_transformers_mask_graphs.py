"""Hugging Face masks in compiled graphs stay structured, and in-place changes take effect."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.0")

from fused_attn import functional
from fused_attn.integrations.transformers import attention_forward
from fused_attn.integrations.transformers.mask_functions import attention_mask
from fused_attn.masks import Mask

PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
WRITES = {
    "no write": lambda mask: mask.logical_not(),
    "whole": lambda mask: mask.fill_(True),
    "view": lambda mask: mask[:, :, 1:].fill_(True),
    "item": lambda mask: mask.__setitem__((0, 0, 0), True),
    "operator": lambda mask: mask.__ior__(torch.ones_like(mask)),
    "out": lambda mask: torch.logical_not(mask, out=mask),
    "foreach": lambda mask: torch._foreach_copy_([mask], [torch.ones_like(mask)]),
    "foreach of views": lambda mask: torch._foreach_zero_([mask[:, :, 1:], mask[:, :, :1]]),
    "data": lambda mask: mask.data.logical_not_(),
    "detached": lambda mask: mask.detach().fill_(True),
}


QUERY, KEY = torch.linspace(-2, 2, 2 * 2 * 10 * 8).sin().view(2, 2, 10, 8).split([4, 6], 2)


@pytest.mark.sampled(
    "the rest covers no write, a write to the mask and writes to views",
    write=[w for n, w in WRITES.items() if n not in ("no write", "whole", "foreach of views")],
)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("graph_break", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_writes_into_a_mask_take_effect(write, graph_break, inference):
    def attend(query, key):
        mask = attention_mask(2, 4, 6, attention_mask=PADDING)
        write(mask)
        if graph_break:
            torch._dynamo.graph_break()
        return attention_forward(torch.nn.Module(), query, key, key, mask)[0]

    expected = attend(QUERY, KEY)
    torch.compiler.reset()  # otherwise each write would recompile the same function
    compiled = torch.compile(attend, fullgraph=not graph_break, backend="aot_eager")
    with torch.inference_mode(inference):
        torch.testing.assert_close(compiled(QUERY, KEY), expected)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_masks_in_a_graph_are_structured(inference, dynamic, monkeypatch):
    kinds = []
    attend = functional.scaled_dot_product_attention

    @torch.compiler.assume_constant_result
    def note(kind):
        kinds.append(kind)

    def spy(query, key, value, attn_mask, **kwargs):
        note(isinstance(attn_mask, Mask))
        return attend(query, key, value, attn_mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)

    def layer(query, key):
        mask = attention_mask(2, query.shape[2], key.shape[2], attention_mask=PADDING)
        assert mask.shape[-1] > 1 and mask.dtype == torch.bool  # reads only metadata
        return attention_forward(torch.nn.Module(), query, key, key, mask)[0]

    with torch.inference_mode(inference):
        torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)(QUERY, KEY)
    assert kinds and all(kinds)
