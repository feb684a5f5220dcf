"""FlexAttention's Triton kernels, generated for a simulated H100 and run without a GPU.

On a GPU, the backend "flex" runs these kernels. Here, Triton's interpreter runs them on the CPU
with the backend's operands and block lists, and Triton's compiler compiles them for sm_90. The
tests use private hooks of Inductor, so they support only one version of torch and Triton.
"""

import functools
import os
import shutil

import pytest
import torch
from helpers import Reference, exact_in_16_bits

from fused_attn import masks
from fused_attn.backends import reference
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.call.packed import packed_spec
from fused_attn.masks.spec import spec_of_mask

triton = pytest.importorskip("triton")
if not torch.__version__.startswith("2.13.") or not triton.__version__.startswith("3.6."):
    pytest.skip("reason: written for torch 2.13 and Triton 3.6", allow_module_level=True)
if shutil.which("g++") is None:
    pytest.skip("reason: needs g++", allow_module_level=True)

from flex_on_h100 import flat_tensors, graphs, interpret, kernels_of, lower  # noqa: E402

BIAS = "bias"


def draw(*size):
    """Draw random float32 numbers that are exact in 16 bits."""
    return exact_in_16_bits(torch.randn(size, generator=GENERATOR)).float()


GENERATOR = torch.Generator().manual_seed(1)


class Problem:
    """Call on a padded batch or on packed sequences, with float32 tensors."""

    def __init__(
        self, mask, *, sizes=(140, 130), heads=(2, 2), dtype=torch.float32, softcap=0.0, bias=None,
        packed=(), batch=2,
    ):  # fmt: skip
        self.dtype, self.softcap, self.packed, self.mask = dtype, softcap, packed, mask
        batch, sizes = (1, (sum(packed), sum(packed))) if packed else (batch, sizes)
        self.tensors = {
            "query": draw(batch, heads[0], sizes[0], 16),
            "key": draw(batch, heads[1], sizes[1], 16),
            "value": draw(batch, heads[1], sizes[1], 16),
        }
        if bias is not None:
            self.tensors[BIAS] = draw(*bias)
        self.grads = [draw(batch, heads[0], sizes[0], 16), draw(batch, heads[0], sizes[0])]

    def call(self, dtype=None):
        """Return the call with tensors in a dtype; in 16-bit calls, the bias is float32."""
        dtype = self.dtype if dtype is None else dtype
        tensors = {n: t.to(dtype).requires_grad_() for n, t in self.tensors.items() if n != BIAS}
        mask = self.mask
        if BIAS in self.tensors:
            wide = torch.float32 if dtype.itemsize == 2 else dtype
            mask = mask & masks.bias(self.tensors[BIAS].to(wide).requires_grad_())
        query, key = tensors["query"], tensors["key"]
        if self.packed:
            starts = torch.tensor([0, *self.packed]).cumsum(0)
            longest = max(self.packed)
            like = [t[0].transpose(0, 1) for t in (query, key)]
            spec = packed_spec(*like, starts, starts, longest, longest, mask, False)
        else:
            shape = (*query.shape[:3], key.shape[2])
            spec = spec_of_mask(mask, *shape, query.device)
        return AttentionCall(*tensors.values(), spec, AttentionOptions(0.25, self.softcap))

    def leaves(self, call):
        """Return the differentiable tensors by name."""
        leaves = {"query": call.query, "key": call.key, "value": call.value}
        return leaves | ({BIAS: call.mask.bias} if BIAS in self.tensors else {})

    def of_reference(self, dtype):
        """Return out, lse and the gradients of eager attention in a dtype, by name."""
        call = self.call(dtype)
        out, lse = reference.attention(call)
        unmasked = lse > float("-inf")
        grads = [grad.to(t.dtype) for grad, t in zip(self.grads, (out, lse), strict=True)]
        total = (out * grads[0]).sum() + (lse * grads[1])[unmasked].sum()
        leaves = self.leaves(call)
        found = torch.autograd.grad(total, list(leaves.values()))
        named = {f"grad_{n}": grad for n, grad in zip(leaves, found, strict=True)}
        return {"out0": out.detach(), "out1": lse.detach(), **named}

    def to_run(self):
        """Return the inputs of the generated code, and the gradients of out and lse."""
        call = self.call()
        tensors = flat_tensors(call)[1]
        empty = reference.attention(call)[1] == float("-inf")
        return tensors, [self.grads[0].to(self.dtype), self.grads[1].masked_fill(empty, 0.0)]

    def named(self, results):
        """Convert the results of the generated code to a dict of tensors by name."""
        out, lse, grads = results
        tensors = flat_tensors(self.call())[1]
        places = {"query": 0, "key": 1, "value": 2}
        if BIAS in self.tensors:
            sizes = [n for n in self.tensors[BIAS].shape if n > 1]
            places[BIAS] = next(p for p in grads if p > 2 and list(tensors[p].shape) == sizes)
        found = {f"grad_{n}": grads[place] for n, place in places.items()}
        if BIAS in self.tensors:
            found["grad_bias"] = found["grad_bias"].view(self.tensors[BIAS].shape)
        return {"out0": out, "out1": lse, **found}


PROBLEMS = {
    "window_lengths": Problem(masks.sliding_window(64, 0) & masks.padding([130, 100], [140, 120])),
    "gqa_softcap_bias": Problem(
        masks.causal("bottom_right"), heads=(4, 2), softcap=4.0, bias=(1, 4, 140, 130)
    ),
    "bf16_key_bias": Problem(masks.padding([130, 60]), dtype=torch.bfloat16, bias=(2, 1, 1, 130)),
    "shuffled_dense": Problem(
        masks.documents(torch.arange(140) % 3, torch.arange(130) % 4)
        & masks.dense(torch.rand(2, 1, 140, 130, generator=torch.Generator()) < 0.6)
    ),
    "one_query": Problem(
        masks.dense(torch.rand(2, 1, 1, 130, generator=torch.Generator()) < 0.5), sizes=(1, 130)
    ),
    "prefix_padded_left": Problem(
        masks.prefix_lm([50, 7]) & masks.padding([60, 25], side="left"), sizes=(70, 60)
    ),
    "packed_alibi": Problem(
        masks.causal() & masks.alibi(torch.tensor([0.5, 0.25])), packed=(40, 90, 20)
    ),
}


@pytest.fixture(scope="module")
def lowered(tmp_path_factory):
    """Return a cached function that maps the name of a problem to its generated code."""
    folder = tmp_path_factory.mktemp("lowered")
    return functools.cache(lambda name: lower([PROBLEMS[name].call()], folder)[0])


def check(lowering, problem, tmp_path):
    """Check that results and gradients of a problem are within the numerics contract."""
    (results,) = interpret([lowering], [problem.to_run()], tmp_path)
    for finding in Reference(problem.of_reference, problem.dtype).findings(problem.named(results)):
        assert finding.ok, str(finding)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_and_gradients(name, lowered, tmp_path):
    check(lowered(name), PROBLEMS[name], tmp_path)


@pytest.mark.thorough
def test_other_sizes(lowered, tmp_path):
    """Code that was generated for one batch size and one pair of lengths is correct for others."""
    mask = masks.sliding_window(30, 9) & masks.padding([290, 0, 77], [200, 150, 200])
    check(lowered("window_lengths"), Problem(mask, sizes=(200, 290), batch=3), tmp_path)


@pytest.mark.thorough
def test_kernels_follow_block_lists(lowered, tmp_path):
    """Kernels compute only the listed blocks, and apply the mask only in partial blocks."""
    problem = PROBLEMS["window_lengths"]
    tensors, grads = problem.to_run()
    no_keys, no_queries, swapped = list(tensors), list(tensors), list(tensors)
    no_keys[3], no_keys[5] = torch.zeros_like(tensors[3]), torch.zeros_like(tensors[5])
    no_queries[7], no_queries[9] = torch.zeros_like(tensors[7]), torch.zeros_like(tensors[9])
    swapped[3:7] = [*tensors[5:7], *tensors[3:5]]
    wrong = [(own, grads) for own in (no_keys, no_queries, swapped)]
    first, second, third = interpret([lowered("window_lengths")] * 3, wrong, tmp_path)
    assert not first[0].any()  # out
    assert not second[2][1].any() and not second[2][2].any()  # gradients of key and value
    assert (third[0] - problem.of_reference(torch.float64)["out0"]).abs().max() > 0.01


@pytest.mark.thorough
def test_nan_in_padding(lowered, tmp_path):
    """NaN in padded keys and values affects no result, even in blocks that contain real keys."""
    problem = PROBLEMS["window_lengths"]
    tensors, grads = problem.to_run()
    for place in (1, 2):
        tensors[place] = tensors[place].detach().clone()
        tensors[place][1, :, 100:] = float("nan")
    out, _, found = interpret([lowered("window_lengths")], [(tensors, grads)], tmp_path)[0]
    assert not out.isnan().any()
    assert not any(grad.isnan().any() for grad in found.values())


@pytest.mark.thorough
def test_graphs_of_torch_compile(tmp_path):
    """Graphs compiled for an H100 contain the attention op of their backend.

    In training, masked calls disable cuDNN around torch's SDPA. Calls with softcap run on eager
    attention.
    """
    torchs = "scaled_dot_product_attention"
    assert graphs(tmp_path) == {
        "inference": [torchs],
        "training": ["_sdpa_kernel", torchs, "_sdpa_kernel"],
        "flex": ["flex_attention"],
        "softcap": [],
    }


@pytest.mark.sampled("covered by one mask", name=PROBLEMS.keys() - {"window_lengths"})
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiles_for_hopper(name, lowered):
    """Kernels compile for sm_90 and fit into shared memory; bfloat16 uses matrix instructions."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("reason: interpreted kernels are not compiled")
    from triton_compiler import SHARED_LIMITS, compile_source

    for kernel, source, options in kernels_of(lowered(name)):
        compiled = compile_source(kernel, source, options, "sm_90")
        assert compiled.shared <= SHARED_LIMITS["sm_90"]
        if "tem_fused" in kernel and PROBLEMS[name].dtype == torch.bfloat16:
            assert "mma" in compiled.text
