"""Tensor parallelism: styles and plans for torch's `parallelize_module`.

`HeadwiseParallel` splits the heads of an attention module over the ranks of a DeviceMesh. Its
parameters become DTensors, so state dicts, optimizers and FSDP2 handle them like those of torch's
styles. Attention runs on DTensors that are sharded on heads (see distributed/dtensors.py): each
rank computes its heads, with their part of the mask, and drops the same weights as one process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import Module, Parameter

from fused_attn.distributed.module_plans import head_counts, parallel_modules
from fused_attn.nn import MultiheadAttention

__all__ = ["HeadwiseParallel", "parallelize_plan", "shard_placement"]


class HeadwiseParallel(ParallelStyle):
    """Split the heads of an attention module over the ranks of a one-dimensional DeviceMesh.

    For `fused_attn.nn.MultiheadAttention`, the style shards all parameters: each rank holds the
    rows of its heads in the projections of query, key and value, and the columns of its heads in
    out_proj, whose results are summed over the ranks. state_dict keys and global shapes do not
    change.

    For an attention module of a Hugging Face model, the style only sets the mesh of its heads for
    the attention function. Apply ColwiseParallel and RowwiseParallel to its projections, as
    `parallelize_plan` does.

    Args:
        input_layouts: placement of query, key and value; None means Replicate. For
            MultiheadAttention only.
        output_layouts: placement of the output; None means Replicate. For MultiheadAttention only.
        use_local_output: return a plain tensor, instead of a DTensor.

    Example:
        >>> mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (8,))
        >>> attention = fused_attn.nn.MultiheadAttention(512, 8)
        >>> parallelize_module(attention, mesh, HeadwiseParallel())

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = input_layouts or Replicate()
        self.output_layouts = output_layouts or Replicate()
        self.use_local_output = use_local_output

    def _apply(self, module: Module, device_mesh: DeviceMesh) -> Module:
        """Shard a module in place and return it; torch's `parallelize_module` calls this method.

        Raises:
            TypeError: the module is not an attention module that can be split.
            ValueError: the size of the mesh does not divide the number of heads.
        """
        counts = head_counts(module)
        if counts is None:
            raise TypeError(
                "HeadwiseParallel must be applied to fused_attn.nn.MultiheadAttention, or a module "
                "with head_dim and linear projections of query, key and value, got "
                f"{type(module).__name__}"
            )
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh must have one dimension, got {device_mesh}")
        size = device_mesh.size()
        for name, count in counts.items():
            if count % size:
                raise ValueError(
                    f"{name} must be divisible by the {size} ranks of the mesh, got {count}"
                )
        if isinstance(module, MultiheadAttention):
            self._shard(module, device_mesh)
        module.head_mesh = device_mesh  # type: ignore[assignment]
        return module

    def _shard(self, module: MultiheadAttention, mesh: DeviceMesh) -> None:
        source = getattr(self, "src_data_rank", 0)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if name == "in_proj_weight":
                sharded = _packed_rows(parameter, mesh, source)
            else:
                # The packed bias is replicated: it is small, and FSDP2, which shards dimension 0,
                # could not shard its rows of q, k and v again.
                dim = 2 if name in ("bias_k", "bias_v") else 0
                placement = Replicate() if name == "in_proj_bias" else Shard(dim)
                sharded = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
            rows = Parameter(sharded.detach(), requires_grad=parameter.requires_grad)
            module.register_parameter(name, rows)
        if module.in_proj_weight is not None:
            module.register_state_dict_pre_hook(_check_fsdp)
        out_proj = RowwiseParallel(
            output_layouts=self.output_layouts, use_local_output=self.use_local_output
        )
        out_proj.src_data_rank = source
        out_proj._apply(module.out_proj, mesh)
        if self.input_layouts != Replicate():
            prepare = partial(_gather_inputs, mesh, self.input_layouts)
            module.register_forward_pre_hook(prepare, with_kwargs=True)


def parallelize_plan(model: Module) -> dict[str, ParallelStyle]:
    """Return the plan that splits attention and feed-forward blocks of a model over ranks.

    Modules are recognized by their submodules, not by their names in the model:

    - `fused_attn.nn`: attention headwise; linear1 columnwise, linear2 rowwise.
    - Hugging Face models with separate linear projections (q_proj, k_proj, v_proj and o_proj or
      out_proj; query, key, value and output.dense), and feed-forward blocks of two or three linear
      layers.

    All other modules (norms, embeddings, heads of models) are not in the plan, and are replicated.

    Args:
        model: a model whose parameters are not DTensors yet.

    Returns:
        For each module name, a style for `torch.distributed.tensor.parallel.parallelize_module`.

    Raises:
        NotImplementedError: an attention module cannot be split; the message names it and the
            reason.
        ValueError: the model has no module that can be split.

    Example:
        >>> model = fused_attn.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> sorted(parallelize_plan(model))
        ['linear1', 'linear2', 'self_attn']

    Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
    """
    plan = parallel_modules(model)
    if not plan:
        raise ValueError(
            "model must have attention or feed-forward modules that can be split over ranks, got "
            f"{type(model).__name__}"
        )
    styles: dict[str, Any] = {
        "heads": HeadwiseParallel,
        "columns": ColwiseParallel,
        "rows": RowwiseParallel,
    }
    return {name: styles[kind]() for name, kind in plan.items()}


def shard_placement(parameter: Parameter) -> Shard | None:
    """Return the dimension in which FSDP2 must shard a parameter that HeadwiseParallel sharded.

    Pass it to `fully_shard` as shard_placement_fn. in_proj_weight is sharded on columns, because
    its rows of query, key and value are sharded over the ranks of tensor parallelism. Other
    parameters have the default of FSDP2, dimension 0.

    Args:
        parameter: a parameter of the model, before `fully_shard`.

    Example:
        >>> parallelize_module(model, mesh["tp"], parallelize_plan(model))
        >>> fully_shard(model, mesh=mesh["dp"], shard_placement_fn=shard_placement)
    """
    if isinstance(parameter, DTensor) and parameter.ndim > 1 and _is_packed(parameter):
        return Shard(1)
    return None


def _is_packed(parameter: Any) -> bool:
    return any(isinstance(p, _StridedShard) and p.split_factor == 3 for p in parameter.placements)


def _check_fsdp(module: MultiheadAttention, *_: Any) -> None:
    """Raise ValueError if a state_dict would contain a wrong global in_proj_weight.

    torch's placements cannot express rows that FSDP2 sharded a second time.
    """
    weight: Any = module.in_proj_weight
    if not isinstance(weight, DTensor):
        return
    rows = [p for p in weight.placements if isinstance(p, (Shard, _StridedShard)) and p.dim == 0]
    if len(rows) > 1:
        raise ValueError(
            "in_proj_weight must be sharded on columns by fully_shard, got rows: call fully_shard "
            "with shard_placement_fn=fused_attn.distributed.shard_placement"
        )


def _packed_rows(parameter: Tensor, mesh: DeviceMesh, source: int | None) -> DTensor:
    """Shard a packed parameter, (3 * embed_dim, ...), so that each rank has rows of q, k and v."""
    whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=source).to_local()
    rows = whole.unflatten(0, (3, mesh.size(), -1))[:, mesh.get_local_rank()].flatten(0, 1)
    return DTensor.from_local(
        rows.contiguous(), mesh, [_StridedShard(0, split_factor=3)], run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _gather_inputs(
    mesh: DeviceMesh, layout: Placement, module: Module, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Replace query, key and value by replicated DTensors (forward pre-hook)."""
    gathered: dict[int, Tensor] = {}  # one result per tensor, as for self-attention

    def gather(x: Tensor) -> Tensor:
        if id(x) not in gathered:
            whole: Any = x
            if not isinstance(x, DTensor):
                whole = DTensor.from_local(x, mesh, [layout], run_check=False)
            gathered[id(x)] = whole.redistribute(mesh, [Replicate()])
        return gathered[id(x)]

    names = ("query", "key", "value")
    args = tuple(gather(x) if i < len(names) else x for i, x in enumerate(args))
    kwargs = {name: gather(x) if name in names else x for name, x in kwargs.items()}
    return args, kwargs
