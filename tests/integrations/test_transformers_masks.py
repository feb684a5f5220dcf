"""The mask function for Hugging Face transformers: what the library says, as structure."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.masking_utils import (  # noqa: E402
    and_masks,
    bidirectional_mask_function,
    blockwise_overlay,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from fused_attn import masks  # noqa: E402
from fused_attn.integrations.transformers.masks import ModelMask, attention_mask  # noqa: E402
from fused_attn.masks import Mask  # noqa: E402
from fused_attn.masks.materialize import materialize  # noqa: E402
from fused_attn.masks.spec import normalize  # noqa: E402

SHAPE = (2, 1, 4, 6)
PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
LEFT = torch.tensor([0, 1])
FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(2),
    "window of one": sliding_window_causal_mask_function(1),
    "wide window": sliding_window_causal_mask_function(50),
    "two windows": and_masks(sliding_window_causal_mask_function(3), sliding_window_overlay(2)),
    "window, not causal": sliding_window_overlay(2),
    "two-sided window": sliding_window_bidirectional_mask_function(1),
    "chunks": chunked_causal_mask_function(3, LEFT),
    "packed": and_masks(causal_mask_function, packed_sequence_mask_function(DOCUMENTS)),
    "packed window": and_masks(
        sliding_window_causal_mask_function(2), packed_sequence_mask_function(DOCUMENTS)
    ),
}


def odd_keys(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx % 2 == 1) & (q_idx >= 0)


def make_mask(**kwargs):
    defaults = {"batch_size": 2, "q_length": 4, "kv_length": 6, "allow_is_bidirectional_skip": True}
    return attention_mask(**{**defaults, **kwargs})


def of_transformers(**kwargs):
    kwargs = {"batch_size": 2, "q_length": 4, "kv_length": 6, **kwargs}
    mask = sdpa_mask(**kwargs, allow_is_causal_skip=False)
    return mask.expand(2, 1, kwargs["q_length"], 6)


def dense_of(mask, shape=SHAPE):
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    spec = normalize(masks.as_mask(mask), *shape, torch.empty(0))
    visible, bias = materialize(spec, *shape, torch.device("cpu"), torch.float32)
    assert bias is None
    return visible.expand(shape)


@pytest.mark.parametrize("padding", [None, PADDING, PADDING[:, :5]], ids=["none", "full", "short"])
@pytest.mark.parametrize("length", [4, 1])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_mask_says_what_that_of_transformers_says(function, length, padding):
    for q_offset, kv_offset in ((0, 0), (2, 0), (1, 0), (3, 3), (5, 2), (2, 3), (5, 3)):
        kwargs = {
            "q_length": length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "mask_function": function,
            "attention_mask": padding,
        }
        if padding is not None:
            before = torch.nn.functional.pad(padding, (kv_offset, 0), value=True)
            kwargs["attention_mask"] = before
        expected = of_transformers(**kwargs)
        assert torch.equal(dense_of(make_mask(**kwargs), expected.shape), expected)
        if q_offset - kv_offset + length <= 6:  # or the static cache would have no room for them
            kwargs["q_offset"] = torch.tensor(q_offset)
            assert torch.equal(dense_of(make_mask(**kwargs), expected.shape), expected)


@pytest.mark.parametrize(
    "offset", [0, 1, 2, torch.tensor(1)], ids=["start", "mid", "end", "tensor"]
)
@pytest.mark.parametrize("name", ["causal", "window", "wide window", "two windows", "chunks"])
def test_mask_keeps_structure(name, offset):
    mask = make_mask(mask_function=FUNCTIONS[name], q_offset=offset, attention_mask=PADDING)
    assert isinstance(mask, ModelMask)
    assert len(mask.document_pairs) == (name == "chunks")
    assert [tuple(m.shape) for m in mask.dense_masks] == [(2, 1, 1, 6)]


@pytest.mark.parametrize("name", ["packed", "packed window"])
def test_packed_sequences_are_documents(name):
    # As create_causal_mask asks for them.
    mask = make_mask(
        mask_function=FUNCTIONS[name], allow_is_causal_skip=False, allow_is_bidirectional_skip=False
    )
    assert isinstance(mask, ModelMask)
    assert (len(mask.bands), len(mask.document_pairs), mask.dense_masks) == (1, 1, ())


def test_padding_alone_is_a_key_mask():
    mask = make_mask(mask_function=bidirectional_mask_function, attention_mask=PADDING)
    assert mask.shape == (2, 1, 1, 6)
    assert make_mask(mask_function=bidirectional_mask_function) is None


def test_mask_of_a_single_query_is_a_key_mask():
    for name, function in FUNCTIONS.items():
        mask = make_mask(mask_function=function, q_length=1, q_offset=5)
        if name in ("causal", "bidirectional", "wide window"):
            assert mask is None
        else:
            assert mask.shape == (2, 1, 1, 6)
    static = make_mask(q_length=1, q_offset=torch.tensor(2), allow_is_causal_skip=False)
    assert static.sum(-1).tolist() == [[[3]], [[3]]]


def test_mask_is_dense_where_it_is_not_understood():
    blocks = blockwise_overlay(torch.tensor([[-1, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]]))
    for function in (
        odd_keys,
        and_masks(causal_mask_function, odd_keys),
        or_masks(causal_mask_function, blocks),
        sliding_window_overlay(0),
    ):
        mask = make_mask(mask_function=function, attention_mask=PADDING)
        assert isinstance(mask, torch.Tensor)
        expected = of_transformers(mask_function=function, attention_mask=PADDING)
        assert torch.equal(mask.expand(SHAPE), expected)


def test_mask_is_dense_where_the_model_needs_a_tensor():
    for name in ("causal", "bidirectional", "window", "chunks"):
        mask = make_mask(
            mask_function=FUNCTIONS[name],
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
        )
        assert isinstance(mask, torch.Tensor)
        assert mask.shape == SHAPE


def test_a_mask_that_was_made_ahead_is_handed_on():
    ahead = make_mask(attention_mask=PADDING)
    assert make_mask(attention_mask=ahead) is ahead


def test_model_mask_stands_for_its_tensor():
    mask = make_mask(attention_mask=PADDING)
    expected = of_transformers(attention_mask=PADDING)
    assert (mask.shape, mask.ndim, mask.dim()) == (SHAPE, 4, 4)
    assert torch.equal(mask[:, :, :, :5], expected[:, :, :, :5])
    assert torch.equal(mask.expand(SHAPE), expected)
    assert mask.dtype == torch.bool
    assert type(mask & masks.causal()) is Mask
    with pytest.raises(AttributeError, match="nonsense"):
        mask.nonsense  # noqa: B018
