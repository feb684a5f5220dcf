"""The registered op `new_seed`, which draws the dropout seed of intercepted calls.

The backward must use the dropout mask of the forward, so a compiler that recomputes parts of the
forward in the backward must not draw the seed again. With an activation_memory_budget below 1,
AOTAutograd recomputes random operations like all others, unless the metadata of their nodes has a
policy. No public function sets a policy, so this op sets it when it is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from fused_attn.base import philox
from fused_attn.base.namespace import NAMESPACE, OPS
from fused_attn.base.torch_state import is_compiling


def new_seed(device: torch.device) -> Tensor:
    """Draw a seed that a compiled backward does not draw again; see `philox.new_seed`."""
    if is_compiling() or torch._C._len_torch_dispatch_stack():
        return OPS.new_seed(device=device)
    return philox.new_seed(device)


def _run(*, device: torch.device) -> Tensor:
    return philox.new_seed(device)


def _fake(*, device: torch.device) -> Tensor:
    return torch.empty((), dtype=torch.int64, device=device)


def _trace(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Trace the op as torch's randint, with a policy for AOTAutograd's partitioner.

    AOTAutograd would merge equal nodes of any other op, so all layers would share one seed.
    """
    with mode:
        seed = philox.new_seed(**kwargs)
    node = next(reversed(mode.tracer.graph.nodes))
    if _saves_only_inputs(node):
        # The seed is drawn again from the saved state of the generator. Inductor replaces
        # randint by an operation without this policy, but not the overload with a generator.
        node.target = torch.ops.aten.randint.low_generator
        node.kwargs = {**node.kwargs, "generator": None}
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    else:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return seed


def _saves_only_inputs(node: torch.fx.Node) -> bool:
    """Return True if the memory budget of the node's graph is 0, which overrides MUST_SAVE."""
    from torch._functorch import config

    region = (node.meta.get("custom") or {}).get("_region_activation_memory_budget")
    return 0 in (config.activation_memory_budget, node.meta.get("memory_budget"), region)


def register(library: torch.library.Library) -> None:
    """Register the op in the library of this package's ops."""
    name, tags = f"{NAMESPACE}::new_seed", (torch.Tag.nondeterministic_seeded,)
    library.define("new_seed(*, Device device) -> Tensor", tags=tags)
    library.impl("new_seed", _run, "CompositeExplicitAutograd")
    # Under torch.vmap, run torch's randint, which draws one seed for each element if required.
    library.impl("new_seed", _run, "FuncTorchVmapMode")
    torch.library.register_fake(name, _fake, lib=library)
    torch.library.register_torch_dispatch(name, ProxyTorchDispatchMode, _trace, lib=library)
