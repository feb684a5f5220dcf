"""If a process has run kernels on several threads, its forked child warns and uses one thread."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, warnings
import torch
import fused_attn
torch.set_num_threads(2)
query = torch.randn(2, 4, 256, 64)
def call():
    return fused_attn.scaled_dot_product_attention(query, query, query)
expected = call() if sys.argv[1] == "warm" else None
child = os.fork()
if child == 0:
    signal.alarm(30)  # ends a child that waits forever
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = call()
        # would hang if it used several threads
        torch.mm(torch.ones(600, 600), torch.ones(600, 600))
    same = expected is None or torch.equal(out, expected)
    warned = sum("forked" in str(w.message) for w in caught)
    print(same, warned, torch.get_num_threads(), flush=True)
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="reason: needs fork")
@pytest.mark.parametrize(("parent", "expected"), [("warm", "True 1 1"), ("cold", "True 0 2")])
def test_child_of_a_fork(parent, expected):
    """A forked child does not hang; after a call in the parent, it warns and uses one thread."""
    command = [sys.executable, "-c", PROGRAM, parent]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == expected
