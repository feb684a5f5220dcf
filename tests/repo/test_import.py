"""Importing fused_attn: lazy imports, import order, and the error message without torch."""

import sys

import commands
import pytest

CALLS = """
import contextlib
import sys
import torch

def state():
    table = torch._C._dispatch_dump_table("aten::scaled_dot_product_attention")
    function = torch.nn.functional.scaled_dot_product_attention
    return table, torch.compiler.config.cache_key_tag, function

# If torch itself imports triton, `light` checks nothing.
before, unpatched = "triton" in sys.modules, state()
import fused_attn
from fused_attn import masks

def light(step):
    assert before or "triton" not in sys.modules, step

light("import")
assert state() == unpatched and "transformers" not in sys.modules
assert "fused_attn.tools.compare" in sys.modules and "matplotlib" not in sys.modules
for name in ("cli", "bench", "doctor", "arguments", "plots"):
    assert f"fused_attn.tools.{name}" not in sys.modules
x = torch.randn(2, 4, 9, 8, requires_grad=True)
fused_attn.scaled_dot_product_attention(x.detach(), x.detach(), x.detach())
mask = masks.causal() & masks.padding([9, 4])
out, lse = fused_attn.scaled_dot_product_attention(x, x, x, mask, 0.1, return_lse=True)
(out.sum() + lse.sum()).backward()
light("attention")
fused_attn.layer_norm(x, 8, residual=x).sum().backward()
fused_attn.rms_norm(x.detach(), 8)
light("norms")
with torch.autocast("cpu", dtype=torch.bfloat16):
    fused_attn.scaled_dot_product_attention(x, x, x, is_causal=True)
light("autocast")
with contextlib.suppress(NotImplementedError):  # runs the code that collects refusals
    fused_attn.scaled_dot_product_attention(x, x, x, backend="cuda")
wide = torch.randn(1, 1, 2, 300)
fused_attn.scaled_dot_product_attention(wide, wide, wide)
fused_attn.available_backends()
light("the choice of a backend")
with fused_attn.enabled():
    torch.nn.functional.scaled_dot_product_attention(x, x, x)
light("enable")
layer = torch.nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
assert fused_attn.swap_modules(layer).swapped
layer(torch.randn(2, 5, 16)).sum().backward()
light("modules")
"""

COUNTED = """
import torch
from fused_attn import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

x = torch.randn(2, 4, 9, 8)
with FlopCounterMode(display=False) as counter:
    scaled_dot_product_attention(x, x, x)
assert counter.get_total_flops() == 2 * 2 * (2 * 4 * 9) * 9 * 8, counter.get_total_flops()
"""

EXECUTED_TWICE = """
import fused_attn, importlib.util
specs = [importlib.util.find_spec("torch.utils.flop_counter") for _ in range(2)]
for spec in specs:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
import torch.utils.flop_counter as counter
assert type(counter.__spec__.loader).__name__ == "SourceFileLoader"
"""

FIRST = "import torch.utils.flop_counter\n"
LOOKED_FOR = (
    "import fused_attn, importlib.util\nimportlib.util.find_spec('torch.utils.flop_counter')\n"
)


def run(code: str) -> None:
    commands.output_of(sys.executable, "-c", code)


def test_imports_are_lazy_and_patch_nothing():
    run(CALLS)


@pytest.mark.sampled("covered by another import order", before=["", LOOKED_FOR])
@pytest.mark.parametrize("before", ["", FIRST, LOOKED_FOR], ids=["after", "before", "looked_for"])
def test_flops_are_counted_in_any_import_order(before):
    run(before + COUNTED)


def test_executing_the_counter_twice():
    """torch.utils.flop_counter can be imported after its spec has been found and executed twice."""
    run(EXECUTED_TWICE)


def test_without_torch_the_error_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None; import fused_attn"
    done = commands.run(sys.executable, "-c", code)
    last = done.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: fused_attn requires torch 2.9 or newer: pip install torch"
    assert "During handling" not in done.stderr and done.stderr.count("File") == 2


NAMED = """
sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
model = AutoModel.from_config(BertConfig(**sizes), attn_implementation="fused_attn")
assert model.config._attn_implementation == "fused_attn"
"""
BOTH = ["import fused_attn", "from transformers import AutoModel, BertConfig"]


@pytest.mark.sampled("covered by test_a_registered_name_is_not_replaced", imports=[BOTH[::-1]])
@pytest.mark.parametrize("imports", [BOTH, BOTH[::-1]], ids=["ours first", "ours second"])
def test_transformers_accepts_the_name(imports):
    pytest.importorskip("transformers", reason="reason: transformers is not installed")
    run("\n".join([*imports, NAMED]))


TAKEN = """
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
ALL_ATTENTION_FUNCTIONS.register("fused_attn", print)
import fused_attn
assert ALL_ATTENTION_FUNCTIONS["fused_attn"] is print
"""


@pytest.mark.thorough
def test_a_registered_name_is_not_replaced():
    """Importing the package does not replace a function registered as "fused_attn".

    Another copy of the package, loaded by `get_kernel`, may have registered that function.
    """
    pytest.importorskip("transformers", reason="reason: transformers is not installed")
    run(TAKEN)
