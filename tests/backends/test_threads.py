"""Calls while another thread compiles, and use_backend blocks that end out of order."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fused_attn
from fused_attn import masks
from fused_attn.backends.registry import wanted_backend
from fused_attn.base.torch_state import is_compiling


def test_calls_while_another_thread_compiles():
    """While one thread compiles, eager calls of another thread still validate their arguments."""
    query, found = torch.randn(1, 2, 8, 16), []

    def elsewhere():
        found.append((is_compiling(), wanted_backend()))
        with pytest.raises(ValueError, match="key_lengths must be <= 8, got 9"):
            fused_attn.scaled_dot_product_attention(query, query, query, masks.padding([9]))

    def backend(graph, inputs):
        found.append(is_compiling())
        with ThreadPoolExecutor(1) as pool:
            pool.submit(elsewhere).result()
        return graph

    function = torch.compile(lambda x: x + is_compiling(), backend=backend)
    assert function(torch.zeros(1)) == 1 and found == [True, (False, None)]


def test_blocks_that_end_in_another_order():
    first, second = fused_attn.use_backend("eager"), fused_attn.use_backend("sdpa")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert wanted_backend() == "sdpa"
    second.__exit__(None, None, None)
    assert wanted_backend() is None
