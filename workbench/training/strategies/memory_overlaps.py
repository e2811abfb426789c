"""Parameters that share memory with another tensor of their module."""

from __future__ import annotations

import torch
from torch import nn

from workbench.errors import StrategyError


def refuse_overlaps(module: nn.Module) -> None:
    """Raise for a parameter some of whose memory belongs to another parameter or buffer too.

    After ``wb.parallelize`` each tensor has memory of its own, so a step would change one and not the other. Plain
    tensors only: those of a parallelized module do not overlap.

    Raises:
        StrategyError: two tensors overlap; both are named.
    """
    parameters = {id(parameter) for parameter in module.parameters()}
    held = [
        (tensor, name)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    ]
    before: list[tuple[torch.Tensor, str]] = []  # that reach behind the start of the next
    for tensor, name in sorted(held, key=lambda pair: (str(pair[0].device), pair[0].data_ptr())):
        before = [pair for pair in before if pair[0].device == tensor.device and _end(pair[0]) > tensor.data_ptr()]
        for other, other_name in before:
            num_bytes = _shared_bytes(other, tensor) if {id(other), id(tensor)} & parameters else 0
            if num_bytes:
                raise StrategyError(
                    f"parallelize: {other_name!r} and {name!r} are two tensors that share memory ({num_bytes} bytes). "
                    "Each gets shards of its own, so a step would change one and not the other. Tie them as one "
                    "parameter (b.weight = a.weight), compute one from the other in forward, or give it memory of its "
                    "own (.clone())."
                )
        before.append((tensor, name))


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last element."""
    if not tensor.numel():
        return 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _shared_bytes(one: torch.Tensor, other: torch.Tensor) -> int:
    """The bytes that belong to both; columns of one table lie between each other and share none."""
    start = min(one.data_ptr(), other.data_ptr())
    places = torch.arange(max(_end(one), _end(other)) - start, device="cpu")
    is_shared = torch.zeros(2, len(places), dtype=torch.bool, device="cpu")
    for tensor, belongs in zip((one, other), is_shared, strict=True):
        unit = tensor.element_size()
        strides = (*(stride * unit for stride in tensor.stride()), 1)
        belongs[places.as_strided((*tensor.shape, unit), strides, tensor.data_ptr() - start).flatten()] = True
    return int(is_shared.all(0).sum())
