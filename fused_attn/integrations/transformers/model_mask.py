"""Tensor stand-ins for a Mask, which transformers models pass to their layers as the mask tensor.

A model can slice, concatenate, pad and move a stand-in like any tensor, and read its dtype.
`attention_forward` reads the Mask instead of the tensor, unless the tensor was written to.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._dynamo.comptime import ComptimeContext, comptime
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from fused_attn.masks import Mask
from fused_attn.masks.materialize import materialize
from fused_attn.masks.spec import normalize

Shape = tuple[int, int, int, int]  # batch, 1, seqlen_q, seqlen_k


class ModelMask(Tensor):
    """Tensor subclass that holds a Mask and behaves like the equivalent dense mask tensor.

    It has the shape, dtype and device of the dense tensor, but no storage. The first operation on
    it materializes the dense tensor, which is then cached. `attention_forward` and moves to another
    device do not materialize it.

    Attributes:
        mask: the visible keys.
    """

    mask: Mask
    _dense: tuple[Tensor, int] | None  # the dense tensor and its initial version
    _written: bool  # an operation wrote to this object; writes to views bump the version instead
    _escaped: bool  # other code has the storage and may write to it without a version bump

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
        # Tensors made in inference mode have no version counter, so writes would go undetected.
        with torch.inference_mode(False):
            where = torch.device(device)
            self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=where)
        self.mask, self._dense, self._written, self._escaped = mask, None, False, False
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
        use = ModelMask.dense
        if func is torch.ops.aten.detach.default:
            use = ModelMask._dense_escaping  # writes to the result would not bump the version
        elif func._schema.is_mutable:
            if torch.Tag.inplace_view in func.tags:
                raise _other_shape(func)
            use = ModelMask._dense_for_write
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
            with torch.inference_mode(False):
                tensor = dense_of(self.mask, tuple(self.shape), self.device, self.dtype)
            self._dense = tensor, tensor._version
        return self._dense[0]

    def content(self) -> Tensor | Mask:
        """Return the Mask, or the dense tensor if it or a view may have been written to."""
        made, version = self._dense or (self, 0)
        if self._written or self._escaped or self._version or made._version != version:
            return self.dense()
        return self.mask

    def _moved(
        self, *, device: Any = None, dtype: Any = None, layout: Any = None, **how: Any
    ) -> ModelMask | None:
        """Return a copy on another device, without materializing the dense tensor.

        Return None for conversions other than a move, and after a write.
        """
        content = self.content()
        if device is None or dtype not in (None, self.dtype) or isinstance(content, Tensor):
            return None
        return ModelMask(content.to(device), cast(Shape, tuple(self.shape)), device, self.dtype)

    def _dense_for_write(self) -> Tensor:
        self._written = True
        return self.dense()

    def _dense_escaping(self) -> Tensor:
        """Return the dense tensor for direct access to its storage, and stop using the Mask."""
        self._escaped = True
        return self.dense()

    # A wrapper subclass has no storage, so methods that access it use the dense tensor.

    def tolist(self) -> Any:
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._dense_escaping().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._dense_escaping().numpy().__array__(*args, **kwargs)

    def data_ptr(self) -> int:
        return self._dense_escaping().data_ptr()

    def const_data_ptr(self) -> int:
        return self._dense_escaping().const_data_ptr()  # type: ignore[attr-defined]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._dense_escaping().untyped_storage()

    def storage(self) -> Any:
        return self._dense_escaping().storage()

    def share_memory_(self) -> Tensor:
        return self._dense_escaping().share_memory_()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._dense_escaping().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._dense_escaping().__dlpack_device__()

    @property
    def data(self) -> Tensor:
        return self._dense_escaping().data

    @data.setter
    def data(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"data of a mask must stay {tuple(self.shape)} {self.dtype}, got "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
        self._dense, self._escaped = (tensor.detach(), 0), True

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        content = self.content()
        if isinstance(content, Tensor):
            return content.clone()
        mask = copy.deepcopy(content, memo)
        return ModelMask(mask, cast(Shape, tuple(self.shape)), self.device, self.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        content = self.content()
        if isinstance(content, Tensor):
            return content.contiguous().__reduce_ex__(protocol)
        return ModelMask, (content, tuple(self.shape), self.device, self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ModelMask({self.content()!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


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
    created it, and only while the tensor's version is unchanged.

    Args:
        mask, shape, device, dtype: as for ModelMask.
        dense: function that returns the dense tensor; called only under torch.compile.
    """
    if not torch.compiler.is_dynamo_compiling():
        return ModelMask(mask, shape, device, dtype)
    with torch.inference_mode(False):  # to get a version counter, as in ModelMask
        tensor: Any = dense().clone()  # cloned, because a view might not be writable
    tensor.fused_attn_mask = mask, _traced_version(tensor)
    return tensor


def mask_of_tensor(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | Mask:
    """Return the Mask that a model's mask tensor carries, or the tensor if it carries none.

    Raises:
        ValueError: the Mask was made for other sequence lengths than those of query and key.
    """
    if isinstance(mask, ModelMask):
        content: Tensor | Mask = mask.content()
    else:
        content = _traced_content(mask) if torch.compiler.is_dynamo_compiling() else mask
    lengths = (query.shape[2], key.shape[2])
    if isinstance(content, Mask) and mask.shape[2:] != lengths:
        raise ValueError(
            f"attention_mask must have shape (batch, 1, {lengths[0]}, {lengths[1]}) (as query and "
            f"key), got {tuple(mask.shape)}"
        )
    return content


def _traced_content(tensor: Tensor) -> Tensor | Mask:
    """Return the Mask that `stand_in` attached to a tensor, or the tensor if no Mask is valid."""
    structure, version = getattr(tensor, "fused_attn_mask", (None, None))
    if structure is None or version is None or _traced_version(tensor) != version:
        return tensor
    return cast(Mask, structure)


def _traced_version(tensor: Tensor) -> int | None:
    """Return the version of a tensor at this point of the trace as a Python int; None if unknown.

    Under dynamo, reading `tensor._version` directly would return a traced value.
    """
    comptime(_note_version)
    return _noted_version()


_noted = threading.local()


def _note_version(context: ComptimeContext) -> None:
    """Store the version of `tensor`, a local of the traced frame, in `_noted`; None if unknown.

    The version of a graph input is unknown, because writes in an earlier graph leave no record. A
    version is also unknown after operations that may write without a version bump while tracing.
    """
    variable = context.get_local("tensor")
    tracker = variable._i_will_not_complain_if_bc_breaks_VariableTracker()
    fake = cast(Tensor, variable.as_fake())
    known = tracker.source is None and not fake.is_inference()
    if known and not _written_uncounted(tracker.as_proxy().node):
        _noted.version = fake._version
    else:
        _noted.version = None


def _written_uncounted(node: Node) -> bool:
    """Return True if writes to the tensor may not have bumped its version.

    This is so if `.data` or an in-place `_foreach_` op used the tensor or a value derived from it.
    """
    seen, rest = {node}, [node]
    while rest:
        new = rest.pop().users.keys() - seen
        for name in (getattr(user.target, "__name__", "") for user in new):
            if name == "_get_data_attr" or (name.startswith("_foreach_") and name.endswith("_")):
                return True
        seen |= new
        rest += new
    return False


@torch.compiler.assume_constant_result
def _noted_version() -> int | None:
    return cast("int | None", _noted.version)


def dense_of(mask: Mask, shape: Any, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Materialize a Mask as the dense tensor that transformers would pass to the model."""
    sizes = cast(Shape, tuple(shape))
    spec = normalize(mask, *sizes, torch.empty(0, device=device))
    visible, _ = materialize(spec, *sizes, device, torch.float32)
    if visible is None:
        visible = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    visible = visible.expand(shape)
    return visible if dtype == torch.bool else added(visible, dtype)


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a bool mask to the additive mask that transformers uses for eager attention."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)
