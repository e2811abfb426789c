"""Metadata of a tensor: logical sizes and strides, and torch's own attributes of the shard."""

from __future__ import annotations

import math
from typing import Any

import torch

from workbench.tensors.dispatch.read_values import describe
from workbench.tensors.dispatch.registry import handler
from workbench.tensors.dispatch.strides import on_meta
from workbench.tensors.global_tensor import local_torch


@handler("size")
def size(func: Any, args: Any, kwargs: Any) -> Any:
    """Logical size, of one dim or of all."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    shape = torch.Size(args[0]._spec.shape)
    return shape if dim is None else shape[dim]


@handler("dim", "ndimension", "get:ndim", "get:shape")
def num_dims(func: Any, args: Any, kwargs: Any) -> Any:
    """Number of dims, or the shape if torch asks through its own getter."""
    if func.__name__ == "__get__" and func.__self__.__name__ == "shape":
        return torch.Size(args[0]._spec.shape)
    return len(args[0]._spec.shape)


@handler("is_same_size")
def has_same_size(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether two tensors have the same logical shape."""
    return args[0].shape == (args[1] if len(args) > 1 else kwargs["other"]).shape


@handler("_nested_tensor_from_mask_left_aligned")
def may_be_nested(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``nn.TransformerEncoder`` may leave out padding by a nested tensor: never, so no value is read."""
    return False


@handler("numel", "nelement")
def num_elements(func: Any, args: Any, kwargs: Any) -> int:
    """Logical number of elements."""
    return math.prod(args[0]._spec.shape)


@handler("get:nbytes")
def num_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Logical number of bytes."""
    with local_torch():
        return math.prod(args[0]._spec.shape) * args[0].element_size()


@handler("stride", "storage_offset", "is_contiguous", "dim_order")
def place_in_memory(func: Any, args: Any, kwargs: Any) -> Any:
    """As on one device; an error where the shard does not tell."""
    if func.__name__ == "is_contiguous" and len(args) > 1:
        return func(on_meta(args[0]), memory_format=args[1])
    return func(on_meta(args[0]), *args[1:], **kwargs)


@handler("len")
def length(func: Any, args: Any, kwargs: Any) -> int:
    """Logical size of dim 0."""
    if not args[0]._spec.shape:
        raise TypeError("len() of a 0-d tensor")
    return args[0]._spec.shape[0]


@handler("repr")
def representation(func: Any, args: Any, kwargs: Any) -> str:
    """Shape, dtype and layout; never communicates."""
    return describe(args[0])


@handler("format")
def formatted(func: Any, args: Any, kwargs: Any) -> str:
    """In an f-string a tensor of one value is this value, others their values and layout; all ranks call it."""
    text = args[1] if len(args) > 1 else kwargs.get("format_spec", "")
    return format(str(args[0]) if args[0]._spec.shape else args[0].item(), text)


@handler("type")
def type_or_cast(func: Any, args: Any, kwargs: Any) -> Any:
    """``x.type()`` is the name of the shard's type; ``x.type(dtype)`` casts, also by a type's name or class."""
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        return _of_shard(func, args, kwargs)
    dtype = wanted if isinstance(wanted, torch.dtype) else torch.empty(0).type(wanted).dtype
    return args[0].to(dtype)


def _of_shard(func: Any, args: Any, kwargs: Any) -> Any:
    with local_torch():
        return func(*args, **kwargs)


_ASKED_OF_THE_SHARD = """
get:dtype get:device get:requires_grad set:requires_grad get:is_leaf get:grad_fn get:layout get:names
get:is_cuda get:is_cpu get:is_meta get:is_sparse get:is_sparse_csr get:is_quantized get:is_nested get:is_mkldnn
get:is_xla get:is_xpu get:is_mps get:is_ipu get:is_maia get:is_vulkan get:is_mtia get:itemsize
get:_version get:_base get:output_nr get:_backward_hooks set:_backward_hooks get:retains_grad get:_grad_fn
get:grad_dtype set:grad_dtype get:_post_accumulate_grad_hooks set:_post_accumulate_grad_hooks get:_cdata
is_floating_point is_complex is_signed is_inference is_pinned is_set_to is_shared is_neg is_conj
data_ptr untyped_storage element_size get_device requires_grad_ record_stream
has_names _is_view hash share_memory_ is_distributed
_has_symbolic_sizes_strides _has_compatible_shallow_copy_type
"""
handler(*_ASKED_OF_THE_SHARD.split())(_of_shard)
