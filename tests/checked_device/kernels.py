"""The operators of the checked device: the host computes them on the same memory, and they refuse what a GPU refuses.

One kernel serves every operator. Views only describe memory, so torch's own kernels for the host make them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from tests.checked_device import clock, late_copies
from tests.checked_device.counts import count_launch, count_wait, counts_of_thread
from tests.checked_device.host_memory import on_device, on_host
from workbench.tensors import default_generator

DEVICE_TYPE = "checked"
PAGEABLE = "copy of pageable memory"
aten = torch.ops.aten
IN_16_BITS = [
    getattr(aten, name).default
    for name in ("linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "conv2d", "scaled_dot_product_attention")
]
IN_32_BITS = [aten.layer_norm.default, aten.softmax.int, aten.log_softmax.int, aten.nll_loss.default]
"""What autocast does with operators, as on GPUs; a few of each."""
generator = torch.Generator()
"""The device's own generator: what seeds the host's does not have to seed it."""
chosen: list[int] = []
"""The numbers that ``set_device`` was called with."""

_HOST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
_WAITING = frozenset(
    [
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "equal",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
    ]
)
"""Operators for whose result, or for the size of it, the host waits."""
_INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"])
"""Operators that take indices of the host."""


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """The kernel of every operator that has none of its own."""
    if _is_view(op):
        return op.redispatch(_HOST_KEYS, *args, **kwargs)
    name = op._schema.name.removeprefix("aten::")
    written = _written(op, args, kwargs)
    _check(name, args, kwargs, written)
    if not clock.current_stream().is_main:
        raise RuntimeError(f"{name} on a stream of its own: here these only copy")
    _count(name, args, kwargs)
    _use(args, kwargs)
    host_args, host_kwargs = tree_map(_host_of, args), tree_map(_host_of, kwargs)
    host_written = _written(op, host_args, host_kwargs)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    with _drawing_on_device() if draws else nullcontext():
        result = op(*host_args, **host_kwargs)
    for tensor, host in zip(written, host_written, strict=True):
        _follow_size(tensor, host)
    if written and op._schema.returns:  # in place, or out=: what is returned is what was given
        return written[0] if isinstance(result, torch.Tensor) else tuple(written)
    return tree_map(lambda value: on_device(value) if isinstance(value, torch.Tensor) else value, result)


def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    """``torch.empty`` on the device."""
    return on_device(aten.empty.memory_format(size, dtype=dtype, memory_format=memory_format, device="cpu"))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> torch.Tensor:
    """``torch.empty_strided`` on the device."""
    return on_device(aten.empty_strided.default(size, stride, dtype=dtype, device="cpu"))


def convolution(*args: Any) -> torch.Tensor:
    """What torch calls on a device that it does not know; and its gradients."""
    result: torch.Tensor = run(aten.convolution.default, *args)
    return result


def convolution_backward(grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> Any:
    """Gradients of ``convolution``."""
    return run(aten.convolution_backward.default, grad, x, weight, None, *rest)


def run_in_16_bits(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator that autocast computes in its dtype."""
    return _run_cast(torch.get_autocast_dtype(DEVICE_TYPE), op, args, kwargs)


def run_in_32_bits(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator that autocast computes in float32."""
    return _run_cast(torch.float32, op, args, kwargs)


def _run_cast(dtype: torch.dtype, op: Any, args: Any, kwargs: Any) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in _FLOATS else value

    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
        return op(*tree_map(cast, args), **tree_map(cast, kwargs))


def resize_(tensor: torch.Tensor, size: Any, **_: Any) -> torch.Tensor:
    """``Tensor.resize_``: new memory where the old is too small."""
    host = on_host(tensor)
    _follow_size(tensor, host.new_empty(host.numel()).set_(host).resize_(size))
    return tensor


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """A copy between the host and the device, or on the device."""
    comes, goes = source.device.type != DEVICE_TYPE, target.device.type != DEVICE_TYPE
    if not clock.current_stream().is_main:
        return _copy_on_stream(source, target, non_blocking)
    is_late = (comes or goes) and non_blocking and late_copies.is_pinned(source if comes else target)
    if comes:
        for counts in counts_of_thread():
            counts.copies_from_host += 1
            counts.bytes_from_host += source.nbytes
    if not (comes or goes):
        count_launch("copy_")
    elif not is_late:
        count_wait(PAGEABLE if comes else "copy to the host")
    _use(source, target)
    if is_late:
        (late_copies.copy_from_host if comes else late_copies.copy_to_host)(_host_of(source), _host_of(target))
    else:
        _host_of(target).copy_(_host_of(source))
    return target


def _copy_on_stream(source: torch.Tensor, target: torch.Tensor, non_blocking: bool) -> torch.Tensor:
    host = source if source.device.type != DEVICE_TYPE else target
    if host.device.type != DEVICE_TYPE and not (non_blocking and late_copies.is_pinned(host)):
        count_wait(PAGEABLE)
    come, go = _host_of(source), _host_of(target)

    def copy() -> None:
        late_copies.reach((come, go))
        go.copy_(come)

    clock.current_stream().ask(copy, (come, go))
    return target


def _use(*values: Any) -> None:
    found = [_host_of(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    late_copies.use(found)
    clock.use(found)


def _host_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if value.device.type != DEVICE_TYPE:
            return value
        return on_host(value) if value.numel() else torch.empty(value.shape, dtype=value.dtype)  # which out= may resize
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == DEVICE_TYPE else value


def _is_view(op: Any) -> bool:
    if op._schema.name == "aten::set_":
        return True
    return any(value.alias_info is not None and not value.alias_info.is_write for value in op._schema.returns)


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that the operator writes, in the order of its schema."""
    found = []
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def _check(name: str, args: Any, kwargs: Any, written: list[torch.Tensor]) -> None:
    """Refuse a tensor of the host, but for numbers that are read only, and indices; and a generator of the host."""
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
        raise RuntimeError(f"Expected a '{DEVICE_TYPE}' device type for generator but found 'cpu'")
    counted = [args[0], *args[2:]] if name in _INDEXING else args
    for tensor in tree_leaves((counted, kwargs)):
        if not isinstance(tensor, torch.Tensor) or tensor.device.type == DEVICE_TYPE:
            continue
        if tensor.dim() > 0 or any(tensor is other for other in written):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {name} got a tensor {tuple(tensor.shape)} on "
                f"{tensor.device} and others on {DEVICE_TYPE}:0."
            )


def _count(name: str, args: Any, kwargs: Any) -> None:
    indices = [leaf for leaf in tree_leaves(args[1]) if leaf is not None] if name in _INDEXING else []
    has_unknown_size = name == "repeat_interleave" and kwargs.get("output_size") is None
    waits = name in _WAITING or has_unknown_size or any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    from_host = [index.nbytes for index in indices if index.device.type != DEVICE_TYPE]
    count_launch(name)
    if waits:
        count_wait(name)
    for counts in counts_of_thread():
        counts.copies_from_host += len(from_host)
        counts.bytes_from_host += sum(from_host)
    for _ in from_host:
        count_wait(PAGEABLE)


def _follow_size(tensor: torch.Tensor, host: torch.Tensor) -> None:
    """Give a tensor of the device the memory of the host's one, if it has another size now."""
    if tensor.device.type == DEVICE_TYPE and tensor.shape != host.shape:
        moved = on_device(host)
        aten.set_.source_Storage_storage_offset.redispatch(
            _HOST_KEYS, tensor, moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride()
        )


@contextmanager
def _drawing_on_device() -> Iterator[None]:
    """The host's generator has the state of the device's inside."""
    with default_generator.restored():
        torch.set_rng_state(generator.get_state())
        try:
            yield
        finally:
            generator.set_state(torch.get_rng_state())
