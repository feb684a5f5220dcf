"""Diagonal bands: the masks that varlen kernels express by a window and sequence lengths.

The values of `MaskSpec.bounds` are on the device of the mask. A Band describes the same conditions
on the host, so that a backend can be selected without a device sync.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fused_attn.masks.fields import unknown_fields
from fused_attn.masks.mask import UNLIMITED, Mask


class Band(NamedTuple):
    """Host-side description of a mask that consists of bands, sequence lengths and ALiBi only.

    Key j is visible to query i if lo <= j - i - offset <= hi, and both are within the lengths of
    their sequence. The offset is 0, or key_end - query_end of the sequence if `from_end`.

    Attributes:
        lo, hi: limits of the band; -UNLIMITED and UNLIMITED for none.
        from_end: True if the band is aligned with the ends of the sequences.
        alibi: True if the mask has ALiBi slopes.
        alibi_from_end: True if ALiBi has the offset key_end - query_end; otherwise `alibi_offset`.
        alibi_offset: constant offset of ALiBi.
        left, right: True if the mask has lengths with padding on that side.
        queries: True if the mask has query lengths.
        lengths: number of padding masks that were combined.
        offset: key_end - query_end if it is known, and equal for all sequences; otherwise None.
    """

    lo: int = -UNLIMITED
    hi: int = UNLIMITED
    from_end: bool = False
    alibi: bool = False
    alibi_from_end: bool = False
    alibi_offset: int = 0
    left: bool = False
    right: bool = False
    queries: bool = False
    lengths: int = 0
    offset: int | None = None

    @property
    def is_limited(self) -> bool:
        """True if the band masks any position."""
        return self.lo > -UNLIMITED or self.hi < UNLIMITED


_OTHER_CONDITIONS = ("bias", "dense", "key_mask", "query_documents", "intervals", "bits")
NO_BAND = Band()
_CAUSAL = Band(hi=0)


def band_of(spec: Any) -> Band | None:
    """Return the Band of a MaskSpec; None if it has other conditions or its Band is unknown.

    The values of tensors are not read.
    """
    if unknown_fields(spec):
        return None
    if any(getattr(spec, name) is not None for name in _OTHER_CONDITIONS):
        return None
    alibi = spec.slopes is not None
    if spec.bounds is not None:
        return None if spec.band is None else spec.band._replace(alibi=alibi)
    if alibi:
        return Band(spec.band_lo, spec.band_hi, alibi=True, alibi_offset=spec.alibi_offset)
    return Band(spec.band_lo, spec.band_hi)


def of_kind(kind: str) -> Band | None:
    """Return the Band of a MaskSpec of kind "none" or "causal"; None for other kinds."""
    return {"none": NO_BAND, "causal": _CAUSAL}.get(kind)


def band_with_lengths(mask: Mask, seqlen_q: int, seqlen_k: int) -> Band | None:
    """Return the Band of a Mask that has lengths; None if no Band describes it.

    Dense tensors, biases and documents are not considered, see `band_of`.
    """
    if mask.prefixes or any(band.offset is not None for band in mask.bands):
        return None
    left = right = UNLIMITED
    aligns = set()
    for band in mask.bands:
        if band.left < UNLIMITED or band.right < UNLIMITED:
            aligns.add(band.align)
        left, right = min(left, band.left), min(right, band.right)
    if len(aligns) > 1:
        return None
    sides = {pad.side for pad in mask.paddings}
    offset = None
    # Symbolic sizes are not compared, so torch.compile adds no guard.
    if isinstance(seqlen_q, int) and isinstance(seqlen_k, int):
        if sides == {"left"}:
            offset = seqlen_k - seqlen_q
        elif seqlen_q == seqlen_k and all(
            pad.query_lengths is pad.key_lengths or pad.side == "left" for pad in mask.paddings
        ):
            offset = 0
    return Band(
        -left,
        right,
        aligns == {"bottom_right"},
        alibi_from_end=any(alibi.align == "bottom_right" for alibi in mask.slopes),
        left="left" in sides,
        right="right" in sides,
        queries=any(pad.query_lengths is not None for pad in mask.paddings),
        lengths=len(mask.paddings),
        offset=offset,
    )
