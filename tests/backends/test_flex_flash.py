"""Backend "flex_flash" without a GPU: refused calls, and masks that torch packs into words.

On Blackwell, FlashAttention-4 evaluates a mask function for 32 keys at once if torch's analysis
shows that the visible keys of a query are a union of intervals.
"""

import types
from unittest import mock

import pytest
import torch

from fused_attn import masks
from fused_attn.backends import AttentionProblem, flex, get_backend
from fused_attn.backends.flash import engines
from fused_attn.backends.flex import flash, variant_of
from fused_attn.backends.flex.functions import mask_function
from fused_attn.backends.flex.operands import dimensions
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.call.packed import packed_spec
from fused_attn.masks.spec import MaskSpec, spec_of_mask

packing = pytest.importorskip(
    "torch._inductor.kernel.flex.interval_mask_packing", reason="reason: needs torch 2.13"
)


@pytest.fixture
def _hopper(monkeypatch):
    """Pretend that flash-attn-4 and an H100 are present."""
    monkeypatch.setattr(engines, "version_of", lambda package: flash.MIN_VERSION)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("properties", "reason"),
    [
        ({}, None),
        ({"mask": "structured", "softcap": True, "packed": True, "needs_grad": True}, None),
        ({"result": "lse"}, None),
        ({"result": "lse", "needs_grad": True}, "cannot backpropagate through lse"),
        ({"learned_bias": True, "mask": "bias"}, "does not support the gradient of a bias"),
        ({"dtype": torch.float32}, "does not support torch.float32"),
        ({"head_dim": 20}, "supports head_dim in multiples of 8 up to 128, not 20"),
        ({"head_dim_v": 192}, "supports head_dim_v in multiples of 8 up to 128, not 192"),
        ({"dropout": True}, "does not support dropout"),
    ],
    ids=str,
)
def test_refusals(properties, reason):
    given = {"dtype": torch.bfloat16, "head_dim": 64, "head_dim_v": 64, **properties}
    reasons = get_backend("flex_flash").unsupported(AttentionProblem(torch.device("cuda"), **given))
    assert reasons == ([] if reason is None else [reason])


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("major", [8, 12])
def test_refuses_other_gpus(major, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, 0))
    problem = AttentionProblem(torch.device("cuda"), torch.bfloat16, 64, 64)
    (reason,) = get_backend("flex_flash").unsupported(problem)
    assert reason.endswith(f"not on compute capability {major}.x")


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(
    ("capability", "seqlen_q", "size"),
    [(90, 300, (128, 128)), (100, 300, (256, 128)), (100, 100, (128, 128))],
)
def test_block_size(capability, seqlen_q, size, monkeypatch):
    monkeypatch.setattr(flash, "capability_of", lambda device: capability)
    call = types.SimpleNamespace(query=torch.empty(1, 1, seqlen_q, 64))
    assert get_backend("flex_flash").block_size(call) == size


def test_not_available_without_the_package():
    if engines.version_of(flash.PACKAGE) is not None:
        pytest.skip("reason: flash-attn-4 is installed")
    assert "flash-attn-4 is not installed" in get_backend("flex_flash").unavailable()


def operands_of(mask, batch):
    """Return the variant and operands of a mask; "packed" means three causal sequences."""
    query = torch.empty(batch, 2, 300, 16)
    if mask == "packed":
        starts = torch.tensor([0, 100, 150, 300])
        like = query[0].transpose(0, 1)
        spec = packed_spec(like, like, starts, starts, 150, 150, masks.causal(), False)
    else:
        spec = spec_of_mask(mask, batch, 2, 300, 300, query.device)
    call = AttentionCall(query, query, query, spec, AttentionOptions(0.25))
    return variant_of(call, False)


MASKS = {
    "causal": (masks.causal(), 2),
    "window": (masks.sliding_window(64, 3), 1),
    "padding": (masks.padding([300, 100]), 2),
    "padding_left_causal": (masks.causal() & masks.padding([300, 100], side="left"), 2),
    "prefix": (masks.prefix_lm([10, 0]), 2),
    "documents": (masks.documents(torch.arange(300) // 70), 1),
    "packed": ("packed", 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_torch_packs_the_mask(name):
    """torch's analysis finds one interval of visible keys for each query of the mask."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    variant, operands = operands_of(*MASKS[name])
    named = {id(tensor) for tensor, _ in dimensions(variant.pattern, operands)}
    tables = [t for t in (operands.begin, operands.end) if id(t) in named]

    def function(b, h, q, k, begin, end):
        with TransformGetItemToIndex():
            mod = mask_function(variant.pattern, operands._replace(begin=begin, end=end))
            return mod(b, h, q, k)

    place = [torch.zeros((), dtype=torch.int32) for _ in range(4)]
    with TransformGetItemToIndex():
        graph = make_fx(function, tracing_mode="fake")(*place, *tables)
    graph.graph.eliminate_dead_code()
    stand_in = types.SimpleNamespace(sizevars=SizeVarAllocator())
    with V.set_graph_handler(stand_in):
        intervals = packing.select_packed_mask_intervals(graph)
    assert intervals is not None and len(intervals) == 1


def test_versions_with_a_race_are_refused(monkeypatch):
    monkeypatch.setattr(engines, "version_of", lambda package: "4.0.0b25")
    missing = "flash-attn-4 must be 4.0.0b26 or newer, got 4.0.0b25"
    assert missing in get_backend("flex_flash").unavailable()


@pytest.mark.parametrize(("name", "expected"), [("flex_flash", 0.5), ("flex", -0.5)])
def test_scales_that_are_not_positive(name, expected, monkeypatch):
    """FlashAttention-4 receives a positive scale, because it scales masked scores of -inf."""
    variant = mock.Mock(side_effect=NotImplementedError)
    monkeypatch.setattr(flex, "variant_of", variant)
    x = torch.randn(1, 2, 8, 16)
    call = AttentionCall(x, x, x, MaskSpec(), AttentionOptions(-0.5))
    with pytest.raises(NotImplementedError):
        get_backend(name).attention_fwd(call, False, False)
    assert variant.call_args.args[0].options.scale == expected


def test_backwards_of_wide_heads_need_shared_memory(monkeypatch):
    monkeypatch.setattr(flex, "capability_of", lambda device: 89)
    monkeypatch.setattr(flex, "HAS_TRITON", True)

    def reasons(size, needs_grad):
        there = torch.device("cuda"), torch.bfloat16, size, size
        return get_backend("flex").unsupported(AttentionProblem(*there, needs_grad=needs_grad))

    assert reasons(160, True) == ["has no backward for head_dim above 128 on this GPU"]
    assert not reasons(160, False) and not reasons(128, True)
