"""What models hand from layer to layer in the place of a mask's tensor.

To a model it is a tensor: it may be sliced, joined, padded, moved and asked for its type. To
`attention_forward` it is structure, as long as nobody wrote to it.
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
    """A Mask that is to a model the tensor that it stands for.

    It has that tensor's shape, type and device, and no memory. The first operation that is not
    `attention_forward` makes the tensor, which is kept, and is computed with that.

    Attributes:
        mask: what is visible.
    """

    mask: Mask
    _made: tuple[Tensor, int] | None  # the tensor, and its version when it was new
    _written: bool  # by an operation on this itself; those on views change versions
    _escaped: bool  # memory that somebody else may write to, without a version, is known outside

    @staticmethod
    def __new__(
        cls, mask: Mask, shape: Shape, device: torch.device | str, dtype: torch.dtype = torch.bool
    ) -> ModelMask:
        """A stand-in.

        Args:
            mask: what is visible.
            shape: (batch, 1, seqlen_q, seqlen_k).
            device: where query will be.
            dtype: bool (True = attend), or a float type: 0 = attend, the lowest number = do not.
        """
        # Of tensors made in inference mode nobody can tell whether they were written to.
        with torch.inference_mode(False):
            where = torch.device(device)
            self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=where)
        self.mask, self._made, self._written, self._escaped = mask, None, False, False
        return self

    # Operations have plain tensors as results.
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
            use = ModelMask._let_out  # what is written to its result changes no version
        elif func._schema.is_mutable:
            if torch.Tag.inplace_view in func.tags:
                raise _other_shape(func)
            use = ModelMask._to_be_written
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ModelMask)]
        args, kwargs = tree_map_only(ModelMask, use, (args, kwargs))
        result = func(*args, **kwargs)
        for mask in given:
            if mask.dense().shape != mask.shape:  # `out=` resizes
                mask._made = None
                raise _other_shape(func)
        return result

    def dense(self) -> Tensor:
        """The tensor that this stands for."""
        if self._made is None:
            with torch.inference_mode(False):
                tensor = dense_of(self.mask, tuple(self.shape), self.device, self.dtype)
            self._made = tensor, tensor._version
        return self._made[0]

    def content(self) -> Tensor | Mask:
        """The structure, or the tensor if it, or a view of it, was written to."""
        made, version = self._made or (self, 0)
        if self._written or self._escaped or self._version or made._version != version:
            return self.dense()
        return self.mask

    def _moved(
        self, *, device: Any = None, dtype: Any = None, layout: Any = None, **how: Any
    ) -> ModelMask | None:
        """This on another device; None if something else is wanted, or it was written to."""
        content = self.content()
        if device is None or dtype not in (None, self.dtype) or isinstance(content, Tensor):
            return None
        return ModelMask(content.to(device), cast(Shape, tuple(self.shape)), device, self.dtype)

    def _to_be_written(self) -> Tensor:
        self._written = True
        return self.dense()

    def _let_out(self) -> Tensor:
        """The tensor, for those that get at its memory: from now on it alone counts."""
        self._escaped = True
        return self.dense()

    # What reads memory, of which there is none here.

    def tolist(self) -> Any:
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self._let_out().numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._let_out().numpy().__array__(*args, **kwargs)

    def data_ptr(self) -> int:
        return self._let_out().data_ptr()

    def const_data_ptr(self) -> int:
        return self._let_out().const_data_ptr()  # type: ignore[attr-defined]

    def untyped_storage(self) -> torch.UntypedStorage:
        return self._let_out().untyped_storage()

    def storage(self) -> Any:
        return self._let_out().storage()

    def share_memory_(self) -> Tensor:
        return self._let_out().share_memory_()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._let_out().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self._let_out().__dlpack_device__()

    @property
    def data(self) -> Tensor:
        return self._let_out().data

    @data.setter
    def data(self, tensor: Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"data of a mask must stay {tuple(self.shape)} {self.dtype}, got "
                f"{tuple(tensor.shape)} {tensor.dtype}"
            )
        self._made, self._escaped = (tensor.detach(), 0), True

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
    """A Mask as a tensor that models may do with as they like.

    torch.compile can't follow a tensor without memory. There it is the tensor itself, with the
    structure as an attribute: a graph in which nobody reads the tensor does not compute it. The
    structure counts in the graph that made it, as long as the tensor's version is the same.

    Args:
        mask, shape, device, dtype: as of ModelMask.
        dense: makes the tensor.
    """
    if not torch.compiler.is_dynamo_compiling():
        return ModelMask(mask, shape, device, dtype)
    with torch.inference_mode(False):  # versions, as in ModelMask
        tensor: Any = dense().clone()  # no view, so it can be written to, also in a graph
    tensor.fused_attn_mask = mask, _traced_version(tensor)
    return tensor


def handed_on(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | Mask:
    """What attention takes for a mask of a model: structure, where it stands for that.

    Raises:
        ValueError: it was made for other lengths than those of query and key.
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
    """The structure that `stand_in` gave a tensor, or the tensor if there is none or none left."""
    structure, version = getattr(tensor, "fused_attn_mask", (None, None))
    if structure is None or version is None or _traced_version(tensor) != version:
        return tensor
    return cast(Mask, structure)


def _traced_version(tensor: Tensor) -> int | None:
    """The version that a tensor has at this point of a graph that is being traced, a constant.

    `_version` itself is a number there that only the graph knows.
    """
    comptime(_note_version)
    return _noted_version()


_noted = threading.local()


def _note_version(context: ComptimeContext) -> None:
    """Keep the version of `tensor` of the frame that is traced; None if it can't be known.

    It can't of an input: what was written to it in the graph before this one left no trace. Nor
    where something may have written that counts no versions in a graph.
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
    """Whether `.data` or an in-place `_foreach_` op had the tensor, or something made of it."""
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
    """A Mask as the tensor that models expect of the library."""
    sizes = cast(Shape, tuple(shape))
    spec = normalize(mask, *sizes, torch.empty(0, device=device))
    visible, _ = materialize(spec, *sizes, device, torch.float32)
    if visible is None:
        visible = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=device)
    visible = visible.expand(shape)
    return visible if dtype == torch.bool else added(visible, dtype)


def added(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """A bool mask as one that is added to the scores, as the library has it for eager attention."""
    zero = torch.zeros((), dtype=dtype, device=visible.device)
    return torch.where(visible, zero, torch.finfo(dtype).min)
