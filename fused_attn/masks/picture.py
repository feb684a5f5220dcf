"""Plots of masks, with the visible positions and the tiles that kernels skip."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_attn.masks.intervals import pooled
from fused_attn.masks.mask import Mask
from fused_attn.masks.materialize import materialize, sizes_of
from fused_attn.masks.spec import spec_of_mask

# Colors of skipped tiles, of masked positions in partial tiles, of visible positions with the
# lowest and the highest bias, and of the lines between tiles.
_SKIPPED, _HIDDEN, _LIGHT, _DARK, _LINE = "#e9ecef", "#ffffff", "#9ecae1", "#1f5f99", "#adb5bd"


class DenseHeadMask(NamedTuple):
    """Dense mask of one head of one sequence, and the kinds of its tiles.

    Attributes:
        visible: bool (seqlen_q, seqlen_k), True = visible.
        added: float32 (seqlen_q, seqlen_k), the bias added to the scores, or None.
        kinds: uint8 (number of query tiles, number of key tiles); 0 = skipped, 1 = partial,
            2 = full.
    """

    visible: Tensor
    added: Tensor | None
    kinds: Tensor


def dense_head_mask(
    mask: Mask, seqlen_q: int, seqlen_k: int, sequence: int, head: int, tile: tuple[int, int]
) -> DenseHeadMask:
    """Compute the dense mask of one head of one sequence, on the CPU."""
    batch, num_heads = sizes_of(mask)
    sizes = max(batch, sequence + 1), max(num_heads, head + 1), seqlen_q, seqlen_k
    cpu = torch.device("cpu")
    spec = spec_of_mask(mask.to(cpu), *sizes, cpu)
    visible, added = materialize(spec, *sizes, cpu, torch.float32)
    visible = torch.ones((), dtype=torch.bool) if visible is None else visible
    of_head = visible.expand(sizes)[sequence, head]
    if added is not None:
        added = added.detach().float().expand(sizes)[sequence, head]
    seen, hidden = (pooled(m[None, None], tile, any_of=True)[0, 0] for m in (of_head, ~of_head))
    return DenseHeadMask(of_head, added, seen.to(torch.uint8) + (seen & ~hidden))


def plot(
    mask: Mask,
    seqlen_q: int,
    seqlen_k: int,
    sequence: int,
    head: int,
    tile: tuple[int, int],
    axes: Any,
) -> Any:
    """Implement `Mask.plot`."""
    try:
        from matplotlib import colors, patches, pyplot
    except ImportError:
        raise ImportError("plot needs matplotlib: pip install 'fused-attn[cli]'") from None
    of_head = dense_head_mask(mask, seqlen_q, seqlen_k, sequence, head, tile)
    axes = pyplot.subplots(figsize=(4.5, 4.5), layout="constrained")[1] if axes is None else axes
    image = torch.empty(seqlen_q, seqlen_k, 3)
    computed = of_head.kinds.bool().repeat_interleave(tile[0], 0).repeat_interleave(tile[1], 1)
    for color, where in ((_SKIPPED, ~computed), (_HIDDEN, computed)):
        image[where[:seqlen_q, :seqlen_k]] = torch.tensor(colors.to_rgb(color))
    shades = colors.LinearSegmentedColormap.from_list("visible", [_LIGHT, _DARK])
    strength = torch.ones(seqlen_q, seqlen_k)
    if of_head.added is not None and of_head.visible.any():
        values = of_head.added[of_head.visible]
        low, high = values.min(), values.max()
        strength = (of_head.added - low) / (high - low) if high > low else strength
    shaded = torch.from_numpy(shades(strength.nan_to_num().numpy())[..., :3]).float()
    image[of_head.visible] = shaded[of_head.visible]
    axes.imshow(image.numpy(), interpolation="nearest", extent=(0, seqlen_k, seqlen_q, 0))
    for step, end, line in ((tile[0], seqlen_q, axes.axhline), (tile[1], seqlen_k, axes.axvline)):
        for place in range(step, end, step):
            line(place, color=_LINE, linewidth=0.6)
    counts = [int((of_head.kinds == kind).sum()) for kind in range(3)]
    names = [(_SKIPPED, f"skipped tiles: {counts[0]}"), (_HIDDEN, f"partial: {counts[1]}")]
    names.append((_DARK, f"full: {counts[2]}"))
    handles = [patches.Patch(facecolor=c, edgecolor=_LINE, label=label) for c, label in names]
    axes.legend(
        handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3, fontsize=8,
        frameon=False,
    )  # fmt: skip
    axes.set(xlabel="keys", ylabel="queries")
    share = of_head.visible.float().mean().item()
    axes.set_title(f"{share:.0%} of the scores are visible", fontsize=9)
    return axes


Mask._draw = plot
