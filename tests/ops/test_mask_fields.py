"""Code that reads the fields of MaskSpec one by one refuses a mask that sets an unknown field."""

import re
from contextlib import nullcontext
from dataclasses import fields, make_dataclass
from pathlib import Path

import pytest
import torch

from fused_attn.masks import band, intervals, restrict, torch_arguments
from fused_attn.masks.fields import DIMENSIONS, KNOWN
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import BOUNDS, MaskSpec
from fused_attn.masks.tables import TABLES

CPU = torch.device("cpu")
New = make_dataclass("New", [("gates", torch.Tensor | None, None)], bases=(MaskSpec,), eq=False)
READERS = {
    "ring, heads": lambda spec: restrict.of_heads(spec, slice(0, 1)),
    "ring, sequences": lambda spec: restrict.of_sequences(spec, slice(0, 1)),
    "ring, positions": lambda spec: restrict.of_positions(spec, range(2), range(3)),
    "flex": lambda spec: intervals.intervals_of(spec, (2, 4, 5, 5), CPU),
    "eager": lambda spec: materialize(spec, 2, 4, 5, 5, CPU, torch.float32),
    "sdpa": lambda spec: torch_arguments.torch_arguments(spec, (2, 4, 5, 5), torch.empty(0)),
}


def with_triton():
    pytest.importorskip("triton", reason="reason: needs Triton")
    from fused_attn.backends.triton.spec_args import mask_args

    return mask_args


@pytest.mark.parametrize("name", [*READERS, "triton"])
def test_refused(name):
    reader = with_triton() if name == "triton" else READERS[name]
    reader(MaskSpec(band_hi=0))
    reader(New(band_hi=0))  # the new field exists, but is not set
    with pytest.raises(NotImplementedError, match="masks with gates"):
        reader(New(band_hi=0, gates=torch.ones(2)))


@pytest.mark.parametrize("name", DIMENSIONS)
def test_triton_reads_or_refuses_each_tensor(name):
    sizes = {"b": 2, "h": 3, "q": 5, "k": 7, "w": 1}
    shape = [int(d) if d.isdigit() else sizes[d.lower()] for d in DIMENSIONS[name]]
    tensor = torch.zeros(shape, dtype=torch.bool if "mask" in name else torch.int64)
    refused = pytest.raises(NotImplementedError, match="tables of masks")
    with refused if name in TABLES else nullcontext():
        with_triton()(MaskSpec(**{name: tensor}))


def test_rows_that_tables_mask_are_known_to_torch():
    """Rows that a table fully masks are listed as empty, because torch's kernels may return NaN."""
    nothing = torch.zeros(1, 1, 5, 2, dtype=torch.int64)
    for spec in (MaskSpec(intervals=nothing), MaskSpec(bits=nothing[..., :1])):
        arguments = torch_arguments.torch_arguments(spec, (2, 3, 5, 7), torch.empty(0))
        assert arguments.empty is not None and bool(arguments.empty.all())


def test_flash_gets_no_band():
    """A mask with conditions besides its band is not passed to a flash engine as a band."""
    assert band.band_of(New(band_hi=0)) == band.Band(hi=0)
    unknown = New(band_hi=0, gates=torch.ones(2))
    assert band.band_of(unknown) is None and band.of_kind(unknown.kind) is None


def test_the_tables_are_complete():
    names = {field.name for field in fields(MaskSpec)}
    assert names == KNOWN and set(DIMENSIONS) < names
    text = (Path(__file__).parents[2] / "csrc/fields/mask.inc").read_text()
    assert dict(re.findall(r"(\w+), \"(\w+)\"\)", text)) == DIMENSIONS
    assert len(DIMENSIONS["bounds"]) == 2 and int(DIMENSIONS["bounds"][1]) == len(BOUNDS)
