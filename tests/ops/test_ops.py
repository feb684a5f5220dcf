"""The registered ops under torch's opcheck, compile, export, autocast and modes."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers import BACKENDS, device_of, random_qkv
from mask_cases import MASKS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode

import fused_attn
from fused_attn import functional as F
from fused_attn import masks, varlen_attention
from fused_attn.backends import get_backend
from fused_attn.base import philox
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.call.norm import NormCall, NormOptions
from fused_attn.masks import spec as mask_spec
from fused_attn.nn.weights import attention_with_weights
from fused_attn.ops import library

SHAPE = (2, 4, 2, 33, 70)  # batch, heads, heads_kv, seqlen_q, seqlen_k
OPTIONS = [
    {},
    {"mask": "ragged", "dropout_p": 0.2},
    {"mask": "dense", "bias": True},
    {"mask": "documents", "softcap": 2.0},
    {"mask": "alibi"},
    {"mask": "causal", "for_backward": False},
]


def call_of(backend, mask=None, bias=False, dropout_p=0.0, softcap=0.0):
    device = device_of(backend)
    query, key, value = (t.to(device) for t in random_qkv(*SHAPE, 16, 24).values())
    mask = None if mask is None else MASKS[mask](2, 4, *SHAPE[3:]).to(device)
    if bias:
        mask &= masks.bias(torch.randn(4, *SHAPE[3:], device=device))
    spec = mask_spec.spec_of_mask(mask, 2, 4, *SHAPE[3:], query.device)
    seed = philox.new_seed(device) if dropout_p else None
    return AttentionCall(query, key, value, spec, AttentionOptions(0.25, softcap, dropout_p, seed))


@pytest.mark.thinned("ops do not depend on the mask", options=[OPTIONS[1], OPTIONS[3], OPTIONS[4]])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck_attention(options, backend):
    options = dict(options)
    for_backward = options.pop("for_backward", True)
    call, attention = call_of(backend, **options), torch.ops.fused_attn
    for want_lse in (False, True):
        rest = (for_backward, want_lse, backend)
        torch.library.opcheck(attention.attention_fwd.default, (*call.flat(), *rest))
    if not for_backward:
        return
    outputs = library.attention_fwd(call, get_backend(backend), True, True)
    needs_bias = call.mask.bias is not None
    for grad_lse in (None, torch.randn_like(outputs.lse)):
        grads = (torch.randn_like(outputs.out), grad_lse)
        rest = (*outputs.without_none(), *grads, needs_bias, backend)
        torch.library.opcheck(attention.attention_bwd.default, (*call.flat(), *rest))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_opcheck_norm(residual, rms, dropout_p, backend):
    x, other, weight, bias = (
        torch.randn(shape, device=device_of(backend)) if wanted else None
        for shape, wanted in (((6, 20), True), ((6, 20), residual), ((20,), True), ((20,), not rms))
    )
    if rms:  # rows that are not contiguous
        x = x.reshape(2, 3, 20).transpose(0, 1)
        other = None if other is None else torch.randn(3, 4, 20, device=x.device)[:, 2:]
    seed = philox.new_seed(x.device) if dropout_p else None
    call = NormCall(x, other, weight, bias, NormOptions(1e-5, rms, dropout_p, seed))
    torch.library.opcheck(torch.ops.fused_attn.norm_fwd.default, (*call.flat(), backend))
    _, total, mean, rstd = library.norm_fwd(call, get_backend(backend), True, True)
    of_total = replace(call, input=total if call.has_total else x, residual=None)
    mean = rstd.new_empty(0) if mean is None else mean
    rest = (mean, rstd, x, None, True, not rms, backend)
    torch.library.opcheck(torch.ops.fused_attn.norm_bwd.default, (*of_total.flat(), *rest))


def attend(query, key, value, bias, lengths):
    mask = masks.causal() & masks.padding(lengths) & masks.bias(bias)
    out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True, softcap=5.0)
    return F.layer_norm(out, out.shape[-1], residual=out)


def attend_inputs():
    tensors = random_qkv(*SHAPE, 16)
    leaves = [t.requires_grad_() for t in tensors.values()]
    return *leaves, torch.randn(4, *SHAPE[3:], requires_grad=True), torch.tensor([70, 31])


@pytest.mark.sampled("each compiler runs once", compiler=["inductor"], dynamic=[False])
@pytest.mark.sampled("each compiler runs once", compiler=["aot_eager"], dynamic=[True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compile_with_gradients(compiler, dynamic):
    inputs = attend_inputs()
    compiled = torch.compile(attend, fullgraph=True, backend=compiler, dynamic=dynamic)
    results = []
    for function in (attend, compiled):
        out = function(*inputs)
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs[:4])))
    torch.testing.assert_close(*results)


def attend_to_itself(x, **options):
    return F.scaled_dot_product_attention(x, x, x, **options)


def compiled_attention():
    torch.compiler.reset()  # functions that other tests compiled count towards the recompile limit
    return torch.compile(attend_to_itself, fullgraph=True, backend="aot_eager")


def test_functions_are_recompiled_within_use_backend():
    compiled, x = compiled_attention(), torch.randn(1, 2, 300, 64)
    first = compiled(x)
    with fused_attn.use_backend("eager"):
        second = compiled(x)
    assert torch.equal(first, attend_to_itself(x))
    assert torch.equal(second, attend_to_itself(x, backend="eager"))


def test_each_compiled_call_draws_a_dropout_mask():
    compiled, x = compiled_attention(), torch.randn(1, 1, 40, 8)
    assert not torch.equal(compiled(x, dropout_p=0.5), compiled(x, dropout_p=0.5))


def test_export():
    class Attend(torch.nn.Module):
        def forward(self, query, key, value, bias, lengths):
            return attend(query, key, value, bias, lengths)

    inputs = tuple(t.detach() for t in attend_inputs())
    seqlen = torch.export.Dim("seqlen_q", min=2, max=512)
    shapes = ({2: seqlen}, None, None, {1: seqlen}, None)
    program = torch.export.export(Attend(), inputs, dynamic_shapes=shapes)
    targets = {str(node.target) for node in program.graph.nodes}
    assert "fused_attn.attention_fwd.default" in targets
    torch.testing.assert_close(program.module()(*inputs), attend(*inputs))
    _, key, value, _, lengths = inputs
    longer = (torch.randn(2, 4, 50, 16), key, value, torch.randn(4, 50, 70), lengths)
    torch.testing.assert_close(program.module()(*longer), attend(*longer))


def test_compiled_calls_refuse_forward_mode():
    """Compiled calls raise an error for dual tensors, whose tangents a graph would drop."""
    x = torch.randn(1, 1, 4, 8)
    compiled = torch.compile(attend_to_itself, backend="aot_eager")
    with (
        forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="have no forward-mode derivatives"),
    ):
        compiled(forward_ad.make_dual(x, x))


MASKS_OF_LENGTHS = {
    "none": None,
    "causal": masks.causal(),
    "bottom_right": masks.causal("bottom_right"),
    "window": masks.causal() & masks.sliding_window(3, 2, align="bottom_right"),
}


@pytest.mark.sampled("cpp covers strict export", backend=["sdpa", "eager"], strict=[True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("mask", MASKS_OF_LENGTHS.values(), ids=MASKS_OF_LENGTHS)
@pytest.mark.parametrize("backend", ["cpp", "sdpa", "eager"])
def test_export_of_any_length(backend, mask, strict):
    """A program that was exported with dynamic lengths runs on longer sequences."""

    class Attend(torch.nn.Module):
        def forward(self, query, key, value):
            return F.scaled_dot_product_attention(query, key, value, mask, backend=backend)

    query, key, value = random_qkv(2, 2, 2, 9, 12, 16).values()
    seqlen_q, seqlen_k = torch.export.Dim("seqlen_q"), torch.export.Dim("seqlen_k")
    program = torch.export.export(
        Attend(), (query, key, value), strict=strict,
        dynamic_shapes=({2: seqlen_q}, {2: seqlen_k}, {2: seqlen_k}),
    )  # fmt: skip
    longer = tuple(random_qkv(2, 2, 2, 50, 70, 16).values())
    torch.testing.assert_close(program.module()(*longer), Attend()(*longer))


def test_functions_ops_and_compiled_graphs_check_lengths():
    too_long = torch.zeros(1, 1, 1, 8).expand(1, 1, 1 << 29, 8)
    query = torch.zeros(1, 1, 1, 8)
    spec = mask_spec.MaskSpec()
    call = AttentionCall(query, too_long, too_long, spec, AttentionOptions(1.0))
    with pytest.raises(ValueError, match="must have a seqlen below 536870912, got 536870912"):
        torch.ops.fused_attn.attention_fwd(*call.flat(), False, False, "cpp")
    compiled = torch.compile(
        lambda *qkv: F.scaled_dot_product_attention(*qkv), backend="aot_eager", dynamic=True
    )
    for attend in (F.scaled_dot_product_attention, compiled):
        with pytest.raises(ValueError, match="must have a seqlen below"):
            attend(query, too_long, too_long)


def test_compile_avoids_is_autocast_available(monkeypatch):
    """Compiled calls avoid is_autocast_available, which torch 2.9 and 2.10 cannot trace."""
    untraceable = torch.compiler.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    for device in ("cpu", "meta"):
        x = torch.randn(1, 2, 5, 8, device=device)
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled_attention()(x).dtype == attend_to_itself(x).dtype


def test_one_tensor_as_several_operands_of_a_compiled_call():
    def attend(x):
        out = F.scaled_dot_product_attention(x, x, x)
        weighed, weights = attention_with_weights(out, out, out)
        rows = weighed.flatten(0, 2)
        return F.layer_norm(rows, 8, residual=rows), weights

    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for one, two in zip(compiled(x), attend(x), strict=True):
        torch.testing.assert_close(one, two)
        grads = (torch.autograd.grad(t.square().sum(), x, retain_graph=True)[0] for t in (one, two))
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("backend", [*BACKENDS, "eager"])
def test_autocast(backend):
    query, key, value = (t.to(device_of(backend)) for t in random_qkv(*SHAPE, 16).values())
    leaf = query.clone().requires_grad_()
    with torch.autocast(query.device.type, dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(leaf, key, value, enable_gqa=True, backend=backend)
        peer = torch.nn.functional.scaled_dot_product_attention(leaf, key, value, enable_gqa=True)
        normed = F.layer_norm(query, 16, backend=backend)
    assert out.dtype == peer.dtype == torch.bfloat16
    assert normed.dtype == torch.float32
    out.float().sum().backward()
    assert leaf.grad.dtype == torch.float32
    # The direct call needs grad too: forwards with and without gradients round differently.
    half = [t.bfloat16() for t in (leaf, key, value)]
    direct = F.scaled_dot_product_attention(*half, enable_gqa=True, backend=backend)
    assert torch.equal(out, direct)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    inputs = attend_inputs()
    plain = torch.autograd.grad(attend(*inputs).sum(), inputs[:4])
    checkpoint(attend, *inputs, use_reentrant=reentrant).sum().backward()
    assert all(torch.equal(leaf.grad, g) for leaf, g in zip(inputs[:4], plain, strict=True))


def test_policies_of_selective_checkpoints_apply_to_the_op():
    policy = mock.Mock(return_value=CheckpointPolicy.MUST_SAVE)
    out = checkpoint(
        attend, *attend_inputs(), use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )  # fmt: skip
    out.sum().backward()
    ops = [call.args[1] for call in policy.call_args_list]
    assert torch.ops.fused_attn.attention_fwd.default in ops


def test_flop_counter():
    query, key, value = random_qkv(*SHAPE, 16, 24).values()
    query.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum().backward()
    product = 2 * 2 * 4 * 33 * 70
    assert counter.get_total_flops() == product * (16 + 24) + product * (3 * 16 + 2 * 24)
    packed = torch.randn(7, 2, 8, requires_grad=True)
    where = (torch.tensor([0, 3, 7]),) * 2
    with FlopCounterMode(display=False) as counter:
        varlen_attention(packed, packed, packed, *where, 4, 4).sum().backward()
    assert counter.get_total_flops() == 7 * (2 * 2 * 7 * 4 * 8)


def test_fake_and_meta_tensors():
    with FakeTensorMode():
        x = torch.empty(2, 4, 30, 16, requires_grad=True)
        mask = torch.ones(30, 30, dtype=torch.bool)
        out = F.scaled_dot_product_attention(x, x, x, mask)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad.shape == x.shape
    meta = torch.empty(2, 4, 30, 16, device="meta")
    assert F.scaled_dot_product_attention(meta, meta, meta, is_causal=True).shape == meta.shape
    assert F.layer_norm(meta, 16).shape == meta.shape


def test_functorch():
    x = torch.randn(3, 1, 2, 9, 8, dtype=torch.float64, requires_grad=True)

    def loss(x):
        return attend_to_itself(x, is_causal=True).square().sum()

    each = torch.func.vmap(torch.func.grad(loss))(x)
    (want,) = torch.autograd.grad(sum(loss(row) for row in x), x)
    torch.testing.assert_close(each, want)


def test_only_calls_under_a_mode_run_the_op():
    op, x = torch.ops.fused_attn.attention_fwd, torch.randn(1, 1, 4, 8)
    with mock.patch.object(torch.ops.fused_attn, "attention_fwd", wraps=op) as called:
        attend_to_itself(x)
        assert not called.called
        with FlopCounterMode(display=False):
            attend_to_itself(x)
        assert called.called


def test_masks_cache_their_summary_until_changed():
    visible = torch.ones(200, 200, dtype=torch.bool)
    mask = masks.dense(visible)
    x = torch.randn(1, 1, 200, 8)
    full = attend_to_itself(x, attn_mask=mask)
    (cached,) = mask.memo.values()
    summary = cached.value.dense_summary
    attend_to_itself(x, attn_mask=mask)
    (again,) = mask.memo.values()
    assert again.value.dense_summary is summary
    visible[:, 100:] = False
    half = attend_to_itself(x, attn_mask=mask)
    assert not torch.equal(full, half)
    assert torch.equal(half, attend_to_itself(x, attn_mask=visible.clone()))


@pytest.mark.parametrize(
    "write",
    [
        lambda lengths: torch._foreach_copy_([lengths], [lengths.flip(0)]),
        lambda lengths: torch.add(lengths.flip(0), 0, out=lengths),
        lambda lengths: lengths.set_(lengths.flip(0)),
    ],
    ids=["foreach", "out", "set"],
)
@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager"])
def test_writes_in_a_graph_invalidate_cached_masks(write, backend):
    torch.compiler.reset()
    lengths = torch.tensor([5, 3])
    mask = masks.padding(lengths)
    x = torch.randn(2, 1, 5, 8)
    attend_to_itself(x, attn_mask=mask)
    (write if backend == "none" else torch.compile(write, backend=backend))(lengths)
    got = attend_to_itself(x, attn_mask=mask)
    assert torch.equal(got, attend_to_itself(x, attn_mask=masks.padding([3, 5])))


def test_inference_mode_then_training():
    """Values that a Mask cached in inference mode are not used by calls with gradients."""
    mask = masks.padding([5, 3]) & masks.dense(torch.ones(5, 5, dtype=torch.bool))
    x = torch.randn(2, 1, 5, 8, requires_grad=True)
    with torch.inference_mode():
        attend_to_itself(x, attn_mask=mask)
    attend_to_itself(x, attn_mask=mask).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("kind", ["bool", "key", "float", "padding", "documents", "alibi", "both"])
def test_masks_made_in_inference_mode_then_training(kind):
    """Masks that were made in inference mode are copied before autograd saves them."""
    with torch.inference_mode():
        visible, bias = torch.rand(5, 5) < 0.9, torch.randn(5, 5)
        lengths, ids, slopes = torch.tensor([5, 3]), torch.arange(5) // 2, torch.rand(2)
    made = {
        "bool": visible,
        "key": visible[:1],
        "float": bias,
        "padding": masks.padding(lengths),
        "documents": masks.documents(ids),
        "alibi": masks.alibi(slopes),
        "both": masks.dense(visible) & masks.bias(bias),
    }[kind]
    copied = made.clone() if isinstance(made, torch.Tensor) else made.mapped(torch.clone)
    x = torch.randn(2, 2, 5, 8, requires_grad=True)
    losses = [attend_to_itself(x, attn_mask=mask).square().sum() for mask in (made, copied)]
    assert torch.equal(*[torch.autograd.grad(loss, x)[0] for loss in losses])
    with torch.no_grad():  # without autograd, the mask is read in place
        spec = mask_spec.spec_of_mask(masks.dense(visible), 2, 2, 5, 5, x.device)
    assert spec.dense.data_ptr() == visible.data_ptr()


def test_packed_lengths_made_in_inference_mode_then_training():
    with torch.inference_mode():
        starts = torch.tensor([0, 2, 5])
    x = torch.randn(5, 2, 8, requires_grad=True)
    varlen_attention(x, x, x, starts, starts, 3, 3).sum().backward()
    assert torch.isfinite(x.grad).all()
