"""Random cases for engines, and for libraries whose arguments this package accepts.

Expected results come from float64 eager attention with masks evaluated by position.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from enable_helpers import counting
from flash_models import ENGINES, installer
from fuzz_cases import Case, Masked, attend, attention_cases, check_attention
from fuzz_masks import MODS, Expression, trees
from helpers import drawn, run_with_gradients
from hypothesis import strategies as st
from nn_helpers import assert_equal_in_float64
from torch import Tensor

import fused_attn
from fused_attn.backends.flex import variant_of
from fused_attn.backends.flex.functions import mask_function, score_function
from fused_attn.call.attention import AttentionCall, AttentionOptions
from fused_attn.compat import flash_attn, flex_attention
from fused_attn.compat.xformers.ops import fmha
from fused_attn.masks import as_mask
from fused_attn.masks.spec import spec_of_mask

# ---- engines ------------------------------------------------------------------------------------


def compare(
    case: Case, number: int, function: Any, tensors: dict[str, Tensor], backend: str, grads: bool
) -> None:
    """Assert that float64 results equal those of eager attention up to the order of summation.

    The arguments are those of `fuzz_cases.judge`. Calls that sdpa or flash refuses are skipped.
    """

    def run(backend: str) -> dict[str, Tensor]:
        if grads:
            results = run_with_gradients(
                functools.partial(function, backend), tensors, torch.float64
            )
        else:
            outputs = function(backend, **{n: t.double() for n, t in tensors.items()})
            results = {f"out{i}": output for i, output in enumerate(outputs)}
        return {n: t.masked_fill(t == -torch.inf, -1e3) for n, t in results.items()}

    try:
        got = run(backend)
    except NotImplementedError as error:
        if ": sdpa: " in str(error) or ": flash: " in str(error):
            return
        raise
    assert_equal_in_float64(got, run("eager"))


def by_engine(
    case: Case, at: Masked, lengths: Any, starts: Any, backend: str, *qkv: Tensor, **extra: Tensor
) -> tuple[Tensor, ...]:
    """Return results from the engine or library that a case names, or from eager attention."""
    names = dict(zip(("query", "key", "value"), qkv, strict=False)) | extra
    run = functools.partial(attend, case, at, lengths, starts, **names)
    if backend == "eager":
        return run("eager")
    if case["kind"] == "sdpa":
        return run("sdpa")
    if case["kind"] in ENGINES:
        installed = contextlib.contextmanager(installer)
        with pytest.MonkeyPatch.context() as patch, installed(patch) as install:
            install(case["kind"])
            return run("flash")
    with fused_attn.use_backend(backend):
        return LIBRARIES[case["kind"]](case, at, lengths, starts, **names)


def by_flex(
    case: Case, at: Masked, lengths: Any, starts: Any, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    """Check flex's mask and score functions position by position; return eager results."""
    shape = at.visible.shape
    spec = spec_of_mask(as_mask(at.mask, case["is_causal"]), *shape, query.device)
    call = AttentionCall(query, key, value, spec, AttentionOptions(1.0))
    variant, operands = variant_of(call, False)
    score_mod, bias = score_function(variant, operands), torch.zeros(shape)
    mask_mod, visible = mask_function(variant.pattern, operands), torch.ones(shape) > 0
    if score_mod is not None:
        bias = flex_attention._applied(score_mod, torch.zeros(shape), shape, range(shape[2]), "cpu")
    if operands.lists is not None:
        visible = flex_attention.create_mask(mask_mod, *shape, device="cpu")
    visible = visible & (bias > -torch.inf)
    assert torch.equal(visible, at.visible)
    torch.testing.assert_close(bias[visible], at.bias[visible].float())
    return attend(case, at, lengths, starts, "eager", query, key, value)


# ---- libraries ----------------------------------------------------------------------------------


def by_torch(
    case: Case, at: Masked, lengths: Any, starts: Any, query: Tensor, key: Tensor, value: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    mask = at.mask if bias is None else bias
    with fused_attn.enabled(), counting() as computed:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=case["is_causal"], enable_gqa=True,
            scale=case["options"]["scale"],
        )  # fmt: skip
    assert computed
    return (out,)


def in_pages(rows: Tensor, lengths: list[int], size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return packed rows in randomly ordered pages, with NaN elsewhere, and the block table."""
    count = -(-max(1, *lengths) // size)
    table = torch.randperm(len(lengths) * count, generator=drawn(seed)).view(-1, count)
    position = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    index = table[sequence, position // size] * size + position % size
    return _at_rows(rows, index, table.numel() * size).unflatten(0, (-1, size)), table.int()


def _at_rows(rows: Tensor, index: Tensor, total: int) -> Tensor:
    return rows.new_full((total, *rows.shape[1:]), torch.nan).index_copy(0, index, rows)


def by_flash_attn(
    case: Case, at: Masked, lengths: Any, starts: Any, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    given, slopes = case["library"], case["library"]["slopes"]
    options = {"causal": given["causal"], "window_size": tuple(given["window"])}
    options |= {"alibi_slopes": None if slopes is None else torch.tensor(slopes)}
    options |= {"softmax_scale": case["options"]["scale"], "return_attn_probs": True}
    options["softcap"] = case["options"]["softcap"] or 0.0
    longest, wanted = case["shape"][3:5], 1 + case["lse"]
    qkv = [query, key, value] if lengths else [t.transpose(1, 2) for t in (query, key, value)]
    same = [t.shape == qkv[1].shape for t in qkv]
    dim = 1 if lengths else 2
    ends = (starts, longest) if lengths else ((), ())
    if given["packed"] and all(same) and (not lengths or lengths[0] == lengths[1]):
        functions = (
            flash_attn.flash_attn_qkvpacked_func,
            flash_attn.flash_attn_varlen_qkvpacked_func,
        )
        more = [longest[0]] if lengths else []
        results = functions[bool(lengths)](torch.stack(qkv, dim), *ends[0][:1], *more, **options)
    elif given["packed"] and same[2]:
        functions = flash_attn.flash_attn_kvpacked_func, flash_attn.flash_attn_varlen_kvpacked_func
        packed = torch.stack(qkv[1:], dim)
        results = functions[bool(lengths)](qkv[0], packed, *ends[0], *ends[1], **options)
    elif lengths:
        if given["pages"]:
            paged = [in_pages(t, lengths[1], given["pages"], case["seed"]) for t in qkv[1:]]
            qkv[1:], options["block_table"] = [t for t, _ in paged], paged[0][1]
        results = flash_attn.flash_attn_varlen_func(*qkv, *starts, *longest, **options)
    else:
        results = flash_attn.flash_attn_func(*qkv, **options)
    out, lse = results[:2]
    return (out if lengths else out.transpose(1, 2), lse)[:wanted]


def by_xformers(
    case: Case, at: Masked, lengths: Any, starts: Any, query: Tensor, key: Tensor, value: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    own, (rule, *sizes) = fmha.attn_bias, case["library"]["rule"]
    if lengths:
        mask, key, value = _blocks(case, lengths, key, value)
        rows = [t[None] for t in (query, key, value)]
        return (fmha.memory_efficient_attention(*rows, mask, scale=case["options"]["scale"])[0],)
    mask = {
        "none": lambda: bias,
        "causal": own.LowerTriangularMask,
        "bottom": own.LowerTriangularFromBottomRightMask,
        "bottom local": own.LowerTriangularFromBottomRightLocalAttentionMask,
        "window": own.LocalAttentionFromBottomRightMask,
    }[rule](*sizes)
    if rule == "causal" and bias is not None:
        mask = mask.add_bias(bias)
    rows = [t.transpose(1, 2) for t in (query, key, value)]
    if case["library"]["groups"] and bias is None:
        rows = [t.unflatten(2, (case["shape"][2], -1)) for t in rows]
    out = fmha.memory_efficient_attention(*rows, mask, scale=case["options"]["scale"])
    return ((out.flatten(2, 3) if out.dim() == 5 else out).transpose(1, 2),)


def _blocks(case: Case, lengths: Any, key: Tensor, value: Tensor) -> tuple[Any, Tensor, Tensor]:
    """Return an xFormers mask for sequences, with keys and values in the layout that it expects."""
    own, (rule, *sizes), kind = fmha.attn_bias, *map(case["library"].get, ("rule", "keys"))
    if kind == "packed":
        made = own.BlockDiagonalMask.from_seqlens(*lengths)
        local = "make_local_attention", "make_local_attention_from_bottomright"
        names = {"causal": "make_causal", "bottom": "make_causal_from_bottomright"}
        names |= dict(zip(("local", "bottom local"), local, strict=True))
        return made if rule == "none" else getattr(made, names[rule])(*sizes), key, value
    suffix, causal = kind.title() + "KeysMask", "CausalWithOffset" * (rule == "bottom")
    if kind == "paged":
        named = getattr(own, f"PagedBlockDiagonal{causal}PaddedKeysMask")
        paged = [in_pages(t, lengths[1], 3, case["seed"]) for t in (key, value)]
        mask = named.from_seqlens(*lengths, paged[0][1], 3)
        return mask, *(t.flatten(0, 1) for t, _ in paged)
    step = case["shape"][4] + 2
    starts = [b * step + (kind == "gappy") for b in range(len(lengths[1]))]
    index = torch.cat([b + torch.arange(n) for b, n in zip(starts, lengths[1], strict=True)])
    total = step * len(starts) + (kind == "gappy")
    named = getattr(own, f"BlockDiagonal{causal}{suffix}")
    between = step if kind == "padded" else [*starts, total]
    mask = named.from_seqlens(lengths[0], between, lengths[1])
    return mask, *(_at_rows(t, index, total) for t in (key, value))


def by_flex_attention(
    case: Case, at: Masked, lengths: Any, starts: Any, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, ...]:
    shape, scale, cap = at.visible.shape, case["options"]["scale"], case["options"]["softcap"]
    members, block_mask, bias = (case["mask"] or [""])[1:], None, torch.zeros(shape)
    for tree in members if (case["mask"] or [""])[0] == "and" else [case["mask"]] * bool(members):
        member = Expression(tree, shape)
        if tree[0] == "bias":
            bias = member.tensors[0].expand(shape)
        else:
            mask_mod = _mask_mod(*tree[1:], member.tensors)
            block_mask = flex_attention.create_block_mask(mask_mod, *shape, device="cpu")

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        elif scale is not None:
            score = score * 0.5
        return score + bias[b, h, q, k]

    factor = 2.0 if cap is None else 1.0
    results = flex_attention.flex_attention(
        query, key, value, score_mod, block_mask, None if scale is None else scale * factor,
        enable_gqa=True, return_lse=case["lse"],
    )  # fmt: skip
    return results if case["lse"] else (results,)  # type: ignore[return-value]


def _mask_mod(name: str, n: int, ids: list[Tensor]) -> Any:
    return lambda b, h, q, k: MODS[name](b, h, q, k, n, *ids)


LIBRARIES = {
    "flex": by_flex,
    "torch": by_torch,
    "flash_attn": by_flash_attn,
    "xformers": by_xformers,
    "flex_attention": by_flex_attention,
}


@st.composite
def engine_cases(draw: st.DrawFn, op: str, backend: str, dtype: str) -> Case:
    """Draw a case of an engine or a library."""
    pick = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    kind = pick("sdpa", *ENGINES, *LIBRARIES)
    packed = pick(False, True) and kind not in ("flex", "torch", "flex_attention")
    case = draw(attention_cases("varlen" if packed else "attention", backend, "float64"))
    case |= {"op": op, "kind": kind, "poison": None, "sinks": False, "sizes": ["1"] * 3}
    case["options"]["dropout_p"] = 0.0
    batch, heads, _, *longest, _, _ = case["shape"]
    shape = batch, heads, *longest
    if kind == "sdpa" or kind in ENGINES:  # avoid most calls that the engine refuses
        engine = ENGINES.get(kind)
        case["shape"][5:] = [pick(8, 16, 40)] * 2
        if engine is not None:
            kinds = "band", "padding", *["alibi"] * engine.has_alibi
            case |= {"bias": None, "mask": draw(trees(shape, kinds))}
        if engine is None or not engine.has_softcap:
            case["options"]["softcap"] = None
        for step in case["steps"]:
            step["rows"] = None if engine is not None else step["rows"]
            step["grads"] &= not case["lse"] or (engine is not None and engine.has_lse_gradient)
        return case
    case |= {"is_causal": False, "layouts": ["plain"] * 3, "library": {}, "raw": True}
    for step in case["steps"]:
        step |= {"change": False, "rows": None}
    if kind in ("flex", "flash_attn", "flex_attention"):
        case["bias"] = None
    if kind == "flash_attn":
        slopes = pick(None, [pick(0.5, 0.25, 2.0) for _ in range(heads)])
        window = [pick(-1, 0, 3, 50), pick(-1, 0, 2)]
        case["library"] = own = {
            "causal": pick(False, True), "window": window, "slopes": slopes,
            "packed": pick(False, True), "pages": pick(None, 1, 16),
        }  # fmt: skip
        case["mask"] = ["band", window[0], 0 if own["causal"] else window[1], "bottom_right"]
        if slopes is not None:
            case["mask"] = ["and", case["mask"], ["alibi", slopes, "bottom_right"]]
    elif kind == "flex_attention":
        case["mask"] = draw(trees(shape, ("mod", "bias")))
    elif kind == "torch":
        case["lse"], case["options"]["softcap"] = False, None
        case["mask"] = draw(trees(shape, ("dense",))) if case["bias"] is None else None
        case["is_causal"] = case["mask"] is None and case["bias"] is None and pick(False, True)
    elif kind == "xformers":
        case["lse"], case["options"]["softcap"] = False, None
        keys = pick("packed", "padded", "gappy", "paged") if packed else ""
        bands = {"none": [], "causal": [-1, 0, "top_left"], "bottom": [-1, 0, "bottom_right"]}
        n = pick(1, 2, 9)
        if keys in ("", "packed"):
            bands["bottom local"] = [n - 1, 0, "bottom_right"]
        if keys == "packed":
            bands["local"] = [n - 1, 0, "top_left"]
        elif keys == "":
            bands["window"] = [n, 2, "bottom_right"]
        else:
            del bands["causal"]
        rule = pick(*bands)
        sizes = {"window": [n, 2], "local": [n], "bottom local": [n]}.get(rule, [])
        case["library"] = {"rule": [rule, *sizes], "keys": keys, "groups": pick(False, True)}
        case["mask"] = ["band", *bands[rule]] if bands[rule] else None
        if packed or rule not in ("none", "causal"):
            case["bias"] = None
        if keys == "packed" and rule.startswith("bottom"):  # requires as many keys as queries
            case["lengths"][1] = list(map(max, *case["lengths"]))
            case["shape"][4] = max(longest)
    return case


def check_engine(case: Case, backend: str) -> None:
    """Check an engine or a library against eager attention."""
    check_attention(case, backend, compare, by_engine)
