"""Peak memory grows linearly in the sequence length, forward and backward."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, resource, sys, torch
from fused_attn import functional as F, masks

case = sys.argv[1]
torch.set_num_threads(2)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def step(seqlen):
    x = [torch.randn(1, 2, seqlen, 64, requires_grad=True) for _ in range(3)]
    options = {}
    mask = None
    if case == "masked":
        ids = torch.arange(seqlen) // 1000
        mask = masks.documents(ids) & masks.causal() & masks.alibi(torch.tensor([0.5, 0.25]))
    if case == "bias":
        mask = torch.zeros(1, 1, 1, seqlen, requires_grad=True)
        options = {"dropout_p": 0.1}
    out = F.scaled_dot_product_attention(*x, mask, backend="cpp", **options)
    out.sum().backward()

step(64)  # loads code and fills memory pools
before = peak()
peaks = {}
for seqlen in (4096, 8192):
    step(seqlen)
    peaks[seqlen] = peak() - before
print(json.dumps(peaks))
"""


@pytest.mark.parametrize("case", ["plain", "masked", "bias"])
def test_peak_is_linear(case):
    command = [sys.executable, "-c", SCRIPT, case]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    peaks = {int(n): peak for n, peak in json.loads(run.stdout).items()}
    # Memory doubles with the length. An (L, S) matrix would take four times as much, and a float32
    # matrix of 8192 x 8192 takes 268 MB.
    assert peaks[8192] < 2.5 * peaks[4096] + 4e6, peaks
    assert peaks[8192] < 150e6, peaks
