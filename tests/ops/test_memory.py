"""Peak memory grows linearly in the sequence length, forward and backward."""

import json
import subprocess
import sys

SCRIPT = """
import json, os, resource, torch
from fused_attn import functional as F, masks

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def step(case, seqlen):
    x = [torch.randn(1, 2, seqlen, 64, requires_grad=True) for _ in range(3)]
    mask, options = None, {}
    if case == "masked":
        ids = torch.arange(seqlen) // 1000
        mask = masks.documents(ids) & masks.causal() & masks.alibi(torch.tensor([0.5, 0.25]))
    if case == "bias":
        mask = torch.zeros(1, 1, 1, seqlen, requires_grad=True)
        options = {"dropout_p": 0.1}
    out = F.scaled_dot_product_attention(*x, mask, backend="cpp", **options)
    out.sum().backward()

def peaks(case):
    torch.set_num_threads(2)
    step(case, 64)  # loads code and fills memory pools
    before = peak()
    for seqlen in (4096, 8192):
        step(case, seqlen)
        yield peak() - before

for case in ("plain", "masked", "bias"):
    if os.fork() == 0:  # so that each case has its own peak
        print(json.dumps(list(peaks(case))), flush=True)
        os._exit(0)
    os.wait()
"""


def test_peak_is_linear():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    cases = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(cases) == 3, run.stderr
    # Memory doubles with the length. An (L, S) matrix would take four times as much, and a float32
    # matrix of 8192 x 8192 takes 268 MB.
    for short, long in cases:
        assert long < 2.5 * short + 4e6, cases
        assert long < 150e6, cases
