"""The mask function for transformers returns structured masks, which models can use as tensors."""

import copy
import ctypes
import importlib
import pickle

import numpy as np
import pytest
import torch
from helpers import saved_and_loaded
from hf_families import is_structured, transformers
from transformers import masking_utils
from transformers.masking_utils import (
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

from fused_attn import masks
from fused_attn.integrations.transformers import attention_forward
from fused_attn.integrations.transformers.mask_functions import attention_mask
from fused_attn.integrations.transformers.model_mask import ModelMask
from fused_attn.masks import Mask
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import spec_of_mask

# attention_mask finds the model of a config only if the model's module has been imported.
for name in ("deepseek_v4", "dia", "gpt_oss", "llama"):
    importlib.import_module(f"transformers.models.{name}.modeling_{name}")

SHAPE = (2, 1, 4, 6)
PADDING = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)
NO_PADDING = torch.ones_like(PADDING)
PADDINGS = {"none": None, "no": NO_PADDING, "full": PADDING, "short": PADDING[:, :5]}
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 1, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1, 2]])
FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(2),
    "window of one": sliding_window_causal_mask_function(1),
    "wide window": sliding_window_causal_mask_function(50),
    "two windows": and_masks(sliding_window_causal_mask_function(3), sliding_window_overlay(2)),
    "window, not causal": sliding_window_overlay(2),
    "two-sided window": sliding_window_bidirectional_mask_function(1),
    "chunks": chunked_causal_mask_function(3, torch.tensor([0, 1])),
    "packed": and_masks(causal_mask_function, packed_sequence_mask_function(DOCUMENTS)),
    "packed window": and_masks(
        sliding_window_causal_mask_function(2), packed_sequence_mask_function(DOCUMENTS)
    ),
}
# Newer versions of transformers map the indices of packed sequences to positions.
REMAP = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
if REMAP is not None:
    FUNCTIONS |= {
        f"packed {name}, by position": and_masks(
            REMAP(FUNCTIONS[name], POSITIONS), packed_sequence_mask_function(DOCUMENTS)
        )
        for name in ("causal", "window", "chunks")
    }
PACKED = [name for name in FUNCTIONS if name.startswith("packed")]


def odd_keys(batch_idx, head_idx, q_idx, kv_idx):
    return (kv_idx % 2 == 1) & (q_idx >= 0)


SIZES = {"batch_size": 2, "q_length": 4, "kv_length": 6}


def make_mask(**kwargs):
    return attention_mask(**{**SIZES, "allow_is_bidirectional_skip": True, **kwargs})


def of_transformers(**kwargs):
    mask = sdpa_mask(**{**SIZES, **kwargs}, allow_is_causal_skip=False)
    return mask.expand(2, 1, -1, 6)


def dense_of(mask, shape=SHAPE):
    if mask is None:
        return torch.ones(shape, dtype=torch.bool)
    if isinstance(mask, ModelMask):
        assert mask.shape == shape
        mask = mask.content()
    spec = spec_of_mask(masks.as_mask(mask), *shape, torch.device("cpu"))
    visible, bias = materialize(spec, *shape, torch.device("cpu"), torch.float32)
    assert bias is None
    return visible.expand(shape)


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("length", [4, 1])
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_mask_equals_that_of_transformers(function, length, padding):
    for q_offset, kv_offset in ((0, 0), (2, 0), (1, 0), (3, 3), (5, 2), (2, 3), (5, 3)):
        kwargs = {"q_length": length, "q_offset": q_offset, "kv_offset": kv_offset}
        kwargs["mask_function"] = function
        if padding is not None:
            padded = torch.nn.functional.pad(padding, (kv_offset, 0), value=True)
            kwargs["attention_mask"] = padded
        expected = of_transformers(**kwargs)
        assert torch.equal(dense_of(make_mask(**kwargs), expected.shape), expected)
        if q_offset - kv_offset + length <= 6:  # the tokens fit into the static cache
            kwargs["q_offset"] = torch.tensor(q_offset)
            assert torch.equal(dense_of(make_mask(**kwargs), expected.shape), expected)


@pytest.mark.parametrize(
    "offset", [0, 1, 2, torch.tensor(1)], ids=["start", "mid", "end", "tensor"]
)
@pytest.mark.parametrize("name", ["causal", "window", "wide window", "two windows", "chunks"])
def test_mask_is_structured(name, offset):
    mask = make_mask(mask_function=FUNCTIONS[name], q_offset=offset, attention_mask=PADDING)
    structure = mask.content()
    assert len(structure.document_pairs) == (name == "chunks")
    assert [tuple(m.shape) for m in structure.dense_masks] == [(2, 1, 1, 6)]


# create_causal_mask passes these arguments for packed sequences.
NO_SKIPS = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_documents(name):
    structure = make_mask(mask_function=FUNCTIONS[name], **NO_SKIPS).content()
    assert (len(structure.bands), len(structure.document_pairs)) == (1, 1 + ("chunks" in name))
    assert not structure.dense_masks


@pytest.mark.skipif(REMAP is None, reason="reason: needs a newer transformers (see REMAP)")
@pytest.mark.parametrize("ids", [None, DOCUMENTS // 2], ids=["unpacked", "coarser"])
@pytest.mark.parametrize("name", ["causal", "window", "chunks", "packed"])
def test_positions_that_do_not_match_the_packing(name, ids):
    function = REMAP(FUNCTIONS[name], POSITIONS % 4)
    if ids is not None:
        function = and_masks(function, packed_sequence_mask_function(ids))
    mask = make_mask(mask_function=function)
    assert torch.equal(dense_of(mask), of_transformers(mask_function=function))


def test_padding_alone_is_a_key_mask():
    mask = make_mask(mask_function=bidirectional_mask_function, attention_mask=PADDING)
    assert mask.shape == (2, 1, 1, 6)
    assert make_mask(mask_function=bidirectional_mask_function) is None


def test_batches_without_padding_have_no_key_mask():
    ones = {"attention_mask": NO_PADDING, "q_offset": 2}
    assert make_mask(mask_function=bidirectional_mask_function, **ones) is None
    assert not make_mask(mask_function=causal_mask_function, **ones).content().dense_masks
    one_query = {**ones, "q_length": 1, "q_offset": 5}
    assert make_mask(mask_function=causal_mask_function, **one_query) is None
    later = make_mask(mask_function=causal_mask_function, kv_length=7, **ones)  # static cache
    assert [tuple(m.shape) for m in later.content().dense_masks] == [(2, 1, 1, 7)]


def test_mask_of_a_single_query_is_a_key_mask():
    for name, function in FUNCTIONS.items():
        mask = make_mask(mask_function=function, q_length=1, q_offset=5)
        if name in ("causal", "bidirectional", "wide window"):
            assert mask is None
        else:
            assert mask.shape == (2, 1, 1, 6)
    static = make_mask(q_length=1, q_offset=torch.tensor(2), allow_is_causal_skip=False)
    assert static.sum(-1).tolist() == [[[3]], [[3]]]


BLOCKS = blockwise_overlay(torch.tensor([[-1, 0, 0, 1, 1, 1], [0, 0, 0, 0, -1, -1]]))
SCATTERED = blockwise_overlay(torch.tensor([[0, -1, 0, 0, -1, 0], [-1, 1, 1, -1, -1, 1]]))
WINDOW = sliding_window_overlay(2)


@pytest.mark.parametrize(
    ("function", "condition"),
    [
        (odd_keys, "bits"),
        (and_masks(causal_mask_function, odd_keys), "bits"),
        (or_masks(causal_mask_function, BLOCKS), "intervals"),
        (and_masks(or_masks(causal_mask_function, BLOCKS), WINDOW), "intervals"),
        (or_masks(and_masks(WINDOW, causal_mask_function), BLOCKS), "intervals"),
        (or_masks(causal_mask_function, SCATTERED), "bits"),
        (or_masks(causal_mask_function, lambda b, h, q, k: k - q <= (q + 1) % 3), "intervals"),
        (or_masks(causal_mask_function, lambda *_: torch.tensor(True)), ""),
        (sliding_window_overlay(0), ""),
    ],
)
@pytest.mark.parametrize("offset", [0, 2])
def test_unions_and_functions_of_users(function, condition, offset):
    """On a CPU, unions and custom functions become key intervals if possible, else bit masks."""
    known = {"mask_function": function, "attention_mask": PADDING, "q_offset": offset}
    mask = make_mask(**known, use_vmap=True, allow_is_causal_skip=False)
    expected = of_transformers(**known, use_vmap=True)
    assert torch.equal(dense_of(mask), expected)
    found = [name for name in ("bits", "intervals") if getattr(mask.mask, name)]
    assert "".join(found) == condition
    assert is_structured(mask.mask)


def test_mask_is_dense_if_the_model_needs_a_tensor():
    for name in ("causal", "bidirectional", "window", "chunks"):
        mask = make_mask(mask_function=FUNCTIONS[name], **NO_SKIPS)
        assert type(mask) is torch.Tensor
        assert mask.shape == SHAPE


def test_an_existing_model_mask_is_returned():
    ahead = make_mask(attention_mask=PADDING)
    assert make_mask(attention_mask=ahead) is ahead


# ---- ModelMask, which replaces a mask tensor in a model -----------------------------------------

VALUES = torch.linspace(-1, 1, 2 * 16 * 8).reshape(2, 1, 16, 8)
DTYPES = [torch.bool, torch.float32, torch.bfloat16]


def model_mask(dtype=torch.bool):
    """Return a ModelMask and the tensor that it represents."""
    config = transformers.GptOssConfig() if dtype.is_floating_point else None
    mask = make_mask(attention_mask=PADDING, dtype=dtype, config=config)
    assert isinstance(mask, ModelMask)
    expected = of_transformers(attention_mask=PADDING)
    if dtype.is_floating_point:
        expected = torch.where(expected, 0.0, torch.finfo(dtype).min).to(dtype)
    return mask, expected


USES = {
    "slice": lambda mask: mask[:, :, 1:, :5],
    "pad": lambda mask: torch.nn.functional.pad(mask, (0, 3)),
    "join": lambda mask: torch.cat([mask, torch.ones_like(mask)], dim=-1),
    "join lists": lambda mask: torch.stack([mask, mask.clone()]),
    "where": lambda mask: torch.where(mask.bool(), 1.0, 2.0),
    "as an argument": lambda mask: torch.zeros(2, 1, 4, 6).masked_fill(mask.bool(), 1.0),
    "not": lambda mask: mask.logical_not(),
    "compare": lambda mask: mask == 0,
    "reduce": lambda mask: mask.bool().all(),
    "type": lambda mask: mask.to(torch.float64),
    "iterate": lambda mask: torch.stack(list(mask)),
    "expand": lambda mask: mask.expand(2, 3, 4, 6),
    "detach": lambda mask: mask.detach(),
    "data": lambda mask: mask.data,
    "numbers": lambda mask: torch.tensor(mask.tolist()),
    "numpy": lambda mask: torch.from_numpy(mask.float().numpy()),
    "sdpa": lambda mask: torch.nn.functional.scaled_dot_product_attention(
        *VALUES.split([4, 6, 6], 2), mask if mask.dtype == torch.bool else mask.float()
    ),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_of_a_model_mask_return_tensors(dtype, use):
    mask, expected = model_mask(dtype)
    actual = use(mask)
    assert type(actual) is torch.Tensor
    assert torch.equal(actual, use(expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_metadata_of_a_model_mask_does_not_materialize_it(dtype):
    mask, expected = model_mask(dtype)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad"):
        assert getattr(mask, name) == getattr(expected, name)
    assert (mask.dim(), mask.size(-1), len(mask)) == (4, 6, 2)
    assert mask.to("cpu") is mask
    assert mask.contiguous() is mask
    assert "bands" in repr(mask)
    assert mask._dense is None
    assert torch.equal(mask.dense(), expected)
    assert mask.dense() is mask.dense()  # created once, for all layers


DIAGONAL = torch.eye(4, 6, dtype=torch.bool)
WRITES = {
    "whole": lambda mask: mask.masked_fill_(DIAGONAL, False),
    "view": lambda mask: mask.__setitem__((slice(None), slice(None), 1), True),
    "view of a view": lambda mask: mask[0][0, 2, 4:].fill_(True),
    "operator": lambda mask: mask.__iand__(DIAGONAL),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("inference", [False, True])
def test_writes_into_a_model_mask_take_effect(write, inference):
    mask, expected = model_mask()
    other = make_mask(attention_mask=PADDING)
    with torch.inference_mode(inference):
        write(mask), write(expected)
    assert torch.equal(dense_of(mask), expected)
    assert isinstance(other.content(), Mask)


# Functions that return the memory of a mask.
MEMORY = {
    "numpy": lambda mask: mask.numpy(),
    "forced numpy": lambda mask: mask.numpy(force=True),
    "array": lambda mask: np.asarray(mask),
    "dlpack": lambda mask: torch.from_dlpack(mask),
    "numpy dlpack": lambda mask: np.from_dlpack(mask),
    "pointer": lambda mask: np.ctypeslib.as_array(
        (ctypes.c_bool * mask.numel()).from_address(mask.data_ptr())
    ),
    "storage": lambda mask: torch.empty(0, dtype=mask.dtype).set_(mask.untyped_storage()),
    "shared": lambda mask: mask.share_memory_(),
    "data": lambda mask: mask.data,
    "detached": lambda mask: mask.detach(),
}


@pytest.mark.parametrize("memory_of", MEMORY.values(), ids=MEMORY)
def test_writes_into_the_memory_of_a_model_mask_take_effect(memory_of):
    mask, expected = model_mask()
    memory = memory_of(mask)
    assert (torch.as_tensor(memory).reshape(expected.shape) == expected).all()
    memory[...] = True
    assert mask.content().all()


def test_data_of_a_model_mask_cannot_be_set():
    mask, expected = model_mask()
    with pytest.raises(AttributeError):
        mask.data = ~expected


def test_writes_into_several_model_masks_take_effect():
    pair = [model_mask(torch.float32)[0] for _ in range(2)]
    torch._foreach_mul_(pair, 0.0)
    for mask in pair:
        assert not mask.content().any()
    mask, expected = model_mask()
    torch.logical_not(expected, out=mask)
    assert torch.equal(mask.content(), ~expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.unsqueeze_(0),
        lambda mask: mask.squeeze_(1),
        lambda mask: mask.transpose_(0, 1),
        lambda mask: mask.t_(),
        lambda mask: mask.resize_(1, 1, 4, 6),
        lambda mask: mask.as_strided_((2, 2), (1, 1)),
        lambda mask: mask.set_(torch.ones(3, dtype=torch.bool)),
        lambda mask: torch.logical_not(torch.ones(1, 1, 4, 6), out=mask),
        lambda mask: torch.cat([torch.ones_like(mask)] * 2, out=mask),
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_shapes_of_model_masks_cannot_be_changed(change):
    mask, expected = model_mask()
    with pytest.raises((NotImplementedError, RuntimeError)):
        change(mask)
    assert mask.shape == mask.dense().shape == expected.shape
    assert torch.equal(dense_of(mask), expected)


@pytest.mark.parametrize("made_in_inference_mode", [False, True])
def test_model_masks_stay_structured_until_a_view_exists(made_in_inference_mode):
    with torch.inference_mode(made_in_inference_mode):
        mask, _ = model_mask()
        assert mask.any() and (mask == 0).any()
        assert isinstance(mask.content(), Mask)
        mask[:, :, 0].any()  # the holder of a view may write to it later
        assert not isinstance(mask.content(), Mask)


def test_copies_of_model_masks_are_tensors():
    mask, expected = model_mask()
    for other in (
        copy.copy(mask),
        copy.deepcopy(mask),
        pickle.loads(pickle.dumps(mask)),
        saved_and_loaded(mask, weights_only=True),
    ):
        assert type(other) is torch.Tensor
        assert torch.equal(other, expected)


def test_moved_model_masks_stay_structured():
    mask, _ = model_mask()
    moved = mask.to("meta", non_blocking=True)
    assert isinstance(moved, ModelMask)
    assert {t.device.type for t in moved.content().tensors()} == {"meta"}


@pytest.mark.parametrize(("queries", "keys"), [(4, 8), (4, 5), (4, 1), (1, 6), (5, 6)])
def test_mask_of_another_shape_raises(queries, keys):
    mask = make_mask()
    query, key = torch.randn(2, 2, queries, 8), torch.randn(2, 2, keys, 8)
    with pytest.raises(ValueError, match=rf"\(batch, 1, {queries}, {keys}\).*got \(2, 1, 4, 6\)"):
        attention_forward(torch.nn.Module(), query, key, key, mask)


def test_models_that_support_only_eager_receive_float_masks():
    lowest = torch.finfo(torch.float32).min
    config = transformers.GptOssConfig()
    causal = {"q_length": 1, "q_offset": 5, "allow_is_bidirectional_skip": False, "config": config}
    assert torch.equal(make_mask(**causal).dense(), torch.zeros(2, 1, 1, 6))
    padded = make_mask(**causal, attention_mask=PADDING)
    assert torch.equal(padded[:, 0, 0] == lowest, ~PADDING)
    unknown = make_mask(mask_function=odd_keys, config=config)
    assert unknown.unique().tolist() == [lowest, 0.0]
    bidirectional = {"mask_function": bidirectional_mask_function, "config": config}
    assert make_mask(**bidirectional) is None  # as for eager attention
    padding = make_mask(**bidirectional, attention_mask=PADDING)
    assert [m.shape for m in padding.content().dense_masks] == [(2, 1, 1, 6)]
    assert make_mask(config=transformers.LlamaConfig()).dtype == torch.bool


def test_user_configs_inherit_the_mask_dtype_of_their_base():
    def dtype(base):
        return make_mask(config=type("Config", (base,), {"__module__": __name__})()).dtype

    assert dtype(transformers.DeepseekV4Config) == torch.float32
    assert dtype(transformers.GptOssConfig) == torch.float32
    assert dtype(transformers.LlamaConfig) == torch.bool
    assert make_mask(config=transformers.DiaEncoderConfig()).dtype == torch.bool  # of a submodel
    assert dtype(transformers.PreTrainedConfig) == torch.float32  # of an unknown model


def test_configs_of_a_users_model_have_the_mask_dtype_of_that_model():
    class Known(transformers.PreTrainedConfig):
        pass

    class KnowsBoolMasks(transformers.PreTrainedModel):
        config_class = Known
        _supports_sdpa = True

    assert make_mask(config=Known()).dtype == torch.bool
