"""Plan of `fused-attn verify`: the checks, and the problems that are timed for each class."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fused_attn.backends import verdicts
from fused_attn.backends.verdicts import ProblemClass
from fused_attn.tools.cases import DTYPES, MASKS, Shape
from fused_attn.tools.checks import AttentionCheck, Check, DecodeCheck, NormCheck, PartialCheck

# A quick run covers the dtype and head_dim values of most models.
QUICK_DTYPES, QUICK_WIDTHS = ("bfloat16",), (64, 128)

TOKENS = 8192  # batch * seqlen of a probe; keeps a GPU busy
HIDDEN = 2048  # num_heads * head_dim
CACHED = 8192  # number of keys in probes with few queries
LONGEST = 4096  # seqlen of the unbounded class; eager attention still fits in memory
MANY_COLUMNS = 32768  # columns of the unbounded class of norms
NORM_ELEMENTS = 1 << 24


Options = dict[str, Any]  # keyword arguments of a check


@dataclass(frozen=True)
class Plan:
    """Checks to run, and probes to time for each problem class.

    Attributes:
        classes: probes of each class, which are timed. The smallest speedup among them decides.
        rounds: number of measurements per probe.
    """

    checks: Sequence[Check]
    classes: Mapping[ProblemClass, Sequence[Check]]
    rounds: int = 10

    @property
    def steps(self) -> int:
        """Return the number of progress steps: one per check and per class."""
        return len(self.checks) + len(self.classes)


def plan(quick: bool, graphs: bool) -> Plan:
    """Return the full plan, or the quick plan, which covers what most models use.

    Args:
        graphs: also check CUDA graphs, which requires a GPU.
    """
    dtypes = QUICK_DTYPES if quick else DTYPES
    widths = QUICK_WIDTHS if quick else verdicts.WIDTHS
    classes = by_class([*attention_probes(dtypes, widths), *norm_probes(dtypes)])
    return Plan(list(checks(dtypes, widths, graphs)), classes, 5 if quick else 10)


# SHAPE spans several tiles, with sizes that no tile size divides, and query heads share KV heads.
# It has many rows, because the contract uses the largest error of eager attention, which varies by
# chance if there are few rows.
SHAPE = "4,4/2,101,149,40"
# At these sizes, every kind of mask has skipped and partial tiles in SHAPE.
_SIZES = {"window": 37, "documents": 40, "ragged_documents": 40, "blocks": 64, "ragged_blocks": 64}
_COMBINED = (
    "causal+padding", "window:37+alibi", "documents:40+causal_bottom_right", "prefix+padding",
    "random+padding",
)  # fmt: skip
# Edge cases: a single position; more queries than keys, so that the first queries are fully masked;
# one KV head; head_dim 1.
_ODD = (
    ("1,1,1,1,8", "none"), ("4,2,129,40,64", "causal_bottom_right"), ("4,6/1,33,300,80", "causal"),
    ("8,2/1,17,257,1", "padding"),
)  # fmt: skip


def checks(dtypes: Sequence[str], widths: Sequence[int], graphs: bool) -> Iterator[Check]:
    """Yield all checks of numerics, dropout, run-to-run reproducibility and CUDA graphs."""
    for dtype in dtypes:
        yield from attention_checks(dtype, widths)
        yield from norm_checks(dtype)
        for how in ("twice", "graph") if graphs else ("twice",):
            yield from _of_two_runs(dtype, how)


def attention_checks(dtype: str, widths: Sequence[int]) -> Iterator[Check]:
    """Yield checks of the numerics of attention and of its dropout mask."""
    for text in ("none", *(f"{n}:{_SIZES[n]}" if n in _SIZES else n for n in MASKS), *_COMBINED):
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, result="lse")
    for text in ("none", "causal", "padding"):
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, gradients=False)
        for bias in ("constant", "learned"):
            yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, bias=bias)
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, softcap=2.0)
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, dropout_p=0.3)
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, packed=True, result="lse")
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, result="weights")
    yield AttentionCheck(shape=SHAPE, dtype=dtype, packed=True, bias="learned", dropout_p=0.3)
    yield AttentionCheck(shape=SHAPE, mask="causal", dtype=dtype, softcap=5.0, dropout_p=0.5)
    yield AttentionCheck(shape=SHAPE, mask="causal", dtype=dtype, dropout_p=0.3, result="weights")
    for text in ("padding", "causal+padding"):
        yield AttentionCheck(shape=SHAPE, mask=text, dtype=dtype, poison=True)
    for shape, text in _ODD:
        yield AttentionCheck(shape=shape, mask=text, dtype=dtype, result="lse")
    # A partial problem has the class of its mask, so each kind of mask is checked.
    for text in ("none", "causal", "padding", "window:37", "random"):
        yield PartialCheck(shape=SHAPE, mask=text, dtype=dtype)
    yield PartialCheck(shape=SHAPE, mask="causal", bias="constant", dtype=dtype)
    for width in widths:
        yield AttentionCheck(shape=f"4,2/1,65,130,{width}", mask="causal", dtype=dtype)
        yield PartialCheck(shape=f"4,2/1,65,130,{width - 7}", dtype=dtype)
        for bias in ("constant", "learned"):
            yield AttentionCheck(shape=f"4,2,130,65,{width - 7}", dtype=dtype, bias=bias)
        # Few queries run on the split-KV kernels.
        few = f"8,8/2,5,700,{width}"
        yield AttentionCheck(shape=few, mask="padding", dtype=dtype, gradients=False)
        yield PartialCheck(shape=few, mask="padding", dtype=dtype, gradients=False)
        yield DecodeCheck(shape=f"16,8/2,1,320,{width}", dtype=dtype)
    yield DecodeCheck(shape="8,8/2,4,320,64", page_size=32, dtype=dtype)
    for dropout_p in (0.1, 0.5):
        yield AttentionCheck(shape="2,3,45,201,8", dtype=dtype, dropout_p=dropout_p, how="bits")


def norm_checks(dtype: str) -> Iterator[Check]:
    """Yield checks of the numerics of norms and of their dropout masks."""
    sizes = (3, 16), (5, 37), (130, 96), (33, 1000), (3, 8192), (2, 20000)
    for (rows, columns), rms in itertools.product(sizes, (False, True)):
        common: Options = {"rows": rows, "columns": columns, "rms": rms, "dtype": dtype}
        yield NormCheck(**common)
        yield NormCheck(**common, affine=False, residual=True)
        yield NormCheck(**common, residual=True, dropout_p=0.25)
    for rms in (False, True):
        yield NormCheck(rows=50, columns=193, rms=rms, dtype=dtype, dropout_p=0.4, how="bits")


def _of_two_runs(dtype: str, how: str) -> Iterator[Check]:
    """Yield checks that two runs return the same bits.

    CUDA graphs are checked without dropout, because each replay draws a new dropout mask.
    """
    dropout_p = 0.0 if how == "graph" else 0.3
    common: Options = {"dtype": dtype, "how": how}
    shape = "2,4/2,130,300,64"
    for text in ("none", "causal", "padding", "random"):
        yield AttentionCheck(shape=shape, mask=text, result="lse", **common)
        yield AttentionCheck(shape=shape, mask=text, gradients=False, **common)
    for bias in ("constant", "learned"):
        yield AttentionCheck(shape=shape, bias=bias, dropout_p=dropout_p, **common)
    yield AttentionCheck(shape=shape, mask="causal", softcap=5.0, **common)
    for rms in (False, True):
        yield NormCheck(rows=700, columns=768, rms=rms, **common)
        yield NormCheck(
            rows=700, columns=768, rms=rms, residual=True, dropout_p=dropout_p, **common
        )


# Options of the smaller and the larger probe of each class. The kernels skip few tiles with these
# masks. With more skipped tiles, speedups would be larger, because torch computes all tiles.
_OPTIONS: tuple[tuple[Options, Options], ...] = (
    ({}, {}),
    ({"mask": "causal"},) * 2,
    ({"mask": "alibi"}, {"mask": "padding"}),
    ({"mask": "random"},) * 2,
    ({"bias": "constant"},) * 2,
    ({"dropout_p": 0.1},) * 2,
    ({"softcap": 30.0},) * 2,
    ({"packed": True},) * 2,
    ({"result": "lse"},) * 2,
    ({"result": "weights"},) * 2,
    ({"bias": "learned"},) * 2,
)
_NORMS: tuple[Options, ...] = ({}, {"residual": True}, {"dropout_p": 0.1})


def by_class(probes: Iterable[Check]) -> dict[ProblemClass, list[Check]]:
    """Return the probes of each class; a probe belongs to the last of its `classes()`."""
    classes: dict[ProblemClass, list[Check]] = {}
    for probe in probes:
        classes.setdefault(probe.classes()[-1], []).append(probe)
    return classes


def attention_probes(
    dtypes: Sequence[str],
    widths: Sequence[int],
    ends: Sequence[int] = (*verdicts.LENGTHS, LONGEST),
    tokens: int = TOKENS,
    hidden: int = HIDDEN,
    cached: int = CACHED,
) -> Iterator[Check]:
    """Yield two probes of each class of attention problems.

    Probes use the largest head_dim of their class, at which neither implementation pads columns.
    The first probe is small, so that host time matters: two sequences, just longer than half the
    longest length of the class. The second has at least two sequences of the longest length.

    Probes of the class of few queries have one query per sequence. The first has 16 sequences with
    cached // 8 keys each, and the second has two sequences with `cached` keys each.

    Args:
        widths: largest head_dim of each class.
        ends: longest sequence length of each class.
        tokens: batch * seqlen of the second probe, unless that is fewer than two sequences.
        hidden: num_heads * head_dim.
        cached: number of keys of the second probe with few queries.
    """
    for dtype, width in itertools.product(dtypes, widths):
        heads = max(1, hidden // width)
        few = [Shape(b, heads, heads, 1, n, width) for b, n in ((16, cached // 8), (2, cached))]
        pairs = [few]
        for end in ends:
            batches = (2, end // 2 + 1), (max(2, tokens // end), end)
            pairs.append([Shape(b, heads, heads, n, n, width) for b, n in batches])
        for trains, pair, options in itertools.product((False, True), pairs, _OPTIONS):
            learned = options[0].get("bias") == "learned"
            if (trains and pair is few) or (learned and not trains):
                continue
            for shape, own in zip(pair, options, strict=True):
                yield AttentionCheck(shape=str(shape), dtype=dtype, gradients=trains, **own)


def norm_probes(
    dtypes: Sequence[str],
    ends: Sequence[int] = (*verdicts.COLUMNS, MANY_COLUMNS),
    elements: int = NORM_ELEMENTS,
) -> Iterator[Check]:
    """Yield two probes of each class of norms.

    The first probe has few rows of just over half the class's largest number of columns. The second
    has many rows of the largest number.
    """
    for dtype, end, rms in itertools.product(dtypes, ends, (False, True)):
        for options, trains in itertools.product(_NORMS, (False, True)):
            common: Options = {"dtype": dtype, "rms": rms, "gradients": trains, **options}
            yield NormCheck(rows=128, columns=end // 2 + 1, **common)
            yield NormCheck(rows=max(1, elements // end), columns=end, **common)
