"""Tensor stand-ins for a Mask, which transformers models pass to their layers as the mask tensor.

A model can slice, concatenate, pad and move a stand-in like any tensor, and read its dtype.
`attention_forward` reads the Mask instead of the tensor, unless the tensor may have been written
to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.utils._pytree import tree_leaves, tree_map_only

from fused_attn.base.torch_state import traced_as_constant
from fused_attn.masks import Mask
from fused_attn.masks.fields import Shape

# A wrapper subclass has no storage, so methods that access it use the dense tensor.
_STORAGE_METHODS = (
    "__array__", "__dlpack__", "__dlpack_device__", "const_data_ptr", "data_ptr", "numpy",
    "share_memory_", "storage", "untyped_storage",
)  # fmt: skip


class ModelMask(Tensor):
    """Tensor subclass that holds a Mask and behaves like the equivalent dense mask tensor.

    It has the shape, dtype and device of the dense tensor, but no storage. The first operation on
    it materializes the dense tensor, which is then cached. `attention_forward` and moves to another
    device do not materialize it.

    Attributes:
        mask: the visible keys.
    """

    mask: Mask
    _dense: Tensor | None  # the dense tensor, after the first operation
    _shared: bool  # other code may have written to the dense tensor or to a view of it

    @staticmethod
    def __new__(
        cls, mask: Mask, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.bool
    ) -> ModelMask:
        """Create a stand-in without storage.

        Args:
            mask: the visible keys.
            shape: (batch, 1, seqlen_q, seqlen_k).
            device: device of query.
            dtype: bool (True = attend), or a float dtype (0 = attend, lowest finite value =
                masked).
        """
        with torch.inference_mode(False):
            where = torch.device(device)
            self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=where)
        self.mask, self._dense, self._shared = mask, None, False
        return self

    # Operations return plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], ModelMask):
            moved = args[0]._moved(**kwargs)
            if moved is not None:
                return moved
        if torch.Tag.inplace_view in func.tags:
            raise _other_shape(func)
        # The schema marks operations that write to an argument or return a view of one.
        shares = any(argument.alias_info for argument in func._schema.arguments)
        use = ModelMask._dense_shared if shares else ModelMask.dense
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ModelMask)]
        args, kwargs = tree_map_only(ModelMask, use, (args, kwargs))
        result = func(*args, **kwargs)
        for mask in given:
            if mask.dense().shape != mask.shape:  # resized by an `out=` argument
                mask._dense = None
                raise _other_shape(func)
        return result

    def dense(self) -> Tensor:
        """Return the dense tensor, materializing it on first use."""
        if self._dense is None:
            with torch.inference_mode(False):  # a normal tensor, like `self`
                self._dense = dense_of(self.mask, self.shape, self.device, self.dtype)
        return self._dense

    def content(self) -> Tensor | Mask:
        """Return the Mask, or the dense tensor if it or a view may have been written to."""
        return self.dense() if self._shared else self.mask

    def _moved(
        self, *, device: Any = None, dtype: Any = None, layout: Any = None, **how: Any
    ) -> ModelMask | None:
        """Return a copy on another device, without materializing the dense tensor.

        Return None for conversions other than a move, and after a write.
        """
        if device is None or dtype not in (None, self.dtype) or self._shared:
            return None
        return ModelMask(self.mask.to(device), cast(Shape, tuple(self.shape)), device, self.dtype)

    def _dense_shared(self) -> Tensor:
        """Return the dense tensor to code that may write to it, and stop using the Mask."""
        self._shared = True
        return self.dense()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self._dense_shared().data

    def tolist(self) -> Any:
        return self.dense().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().contiguous().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ModelMask({self.content()!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _on_dense(name: str) -> Callable[..., Any]:
    def method(self: ModelMask, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._dense_shared(), name)(*args, **kwargs)

    return method


for _name in _STORAGE_METHODS:
    setattr(ModelMask, _name, _on_dense(_name))


def _other_shape(func: Any) -> NotImplementedError:
    return NotImplementedError(
        f"{func} would change the shape of a mask that all layers share: call clone() first"
    )


def stand_in(
    mask: Mask,
    shape: Shape,
    device: torch.device | str,
    dtype: torch.dtype,
    dense: Callable[[], Tensor],
) -> Tensor:
    """Return a tensor that carries a Mask and supports any operation.

    In eager mode, the result is a ModelMask. torch.compile cannot trace a tensor without storage,
    so in a graph the result is the dense tensor, with the Mask as an attribute. A graph that never
    reads the dense tensor does not compute it. The attribute is valid only in the graph that
    created it, and only while nothing else uses the tensor.

    Args:
        mask, shape, device, dtype: as for ModelMask.
        dense: function that returns the dense tensor; called only under torch.compile.
    """
    if not torch.compiler.is_dynamo_compiling():
        return ModelMask(mask, shape, device, dtype)
    tensor: Any = dense().clone()  # cloned, because a view might not be writable
    tensor.fused_attn_mask = mask
    return tensor


def mask_of_tensor(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | Mask:
    """Return the Mask that a model's mask tensor carries, or the tensor if it carries none."""
    content: Tensor | Mask = mask
    if isinstance(mask, ModelMask):
        content = mask.content()
    elif torch.compiler.is_dynamo_compiling():
        structure = getattr(mask, "fused_attn_mask", None)
        if structure is not None and _is_unused_in_graph(mask):
            content = structure
    lengths = (query.shape[2], key.shape[2])
    if isinstance(content, Mask) and mask.shape[2:] != lengths:
        raise ValueError(
            f"attention_mask must have shape (batch, 1, {lengths[0]}, {lengths[1]}) (like query "
            f"and key), got {tuple(mask.shape)}"
        )
    return content


def _is_unused_in_graph(tensor: Tensor) -> bool:
    """Return True if a tensor was made in this graph, and no operation has used it so far.

    Any operation may write to the tensor or to a view of it.
    """
    comptime(_note_uses)
    return _noted_unused()


_noted = threading.local()


def _note_uses(context: ComptimeContext) -> None:
    """Store in `_noted` whether `tensor`, a local of the traced frame, is unused."""
    variable = context.get_local("tensor")
    tracker = variable._i_will_not_complain_if_bc_breaks_VariableTracker()
    is_input = tracker.source is not None  # earlier graphs may have written to it
    _noted.unused = not is_input and all(
        user.target == "size" for user in tracker.as_proxy().node.users
    )


@traced_as_constant
def _noted_unused() -> bool:
    return cast(bool, _noted.unused)


def dense_of(mask: Mask, shape: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Materialize a Mask as the dense tensor that transformers would pass to the model."""
    sizes = cast(Shape, tuple(shape))
    visible = mask._visible_rows(sizes, range(sizes[2]), device).expand(shape)
    return visible if dtype == torch.bool else additive_mask(visible, dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to the additive mask that transformers uses for eager attention."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)
