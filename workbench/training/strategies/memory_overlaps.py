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
    spans = [
        (*_span(tensor), name, id(tensor) in parameters)
        for name, tensor in (*module.named_parameters(), *module.named_buffers())
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    ]
    last: tuple[int, int, str, bool] = (0, 0, "", False)
    for span in sorted(span for span in spans if span[0] < span[1]):
        start, end, name, is_parameter = span
        if start < last[1] and (is_parameter or last[3]):
            raise StrategyError(
                f"parallelize: {last[2]!r} and {name!r} are two tensors that share memory ({min(end, last[1]) - start} "
                "bytes). Each gets shards of its own, so a step would change one and not the other. Tie them as one "
                "parameter (b.weight = a.weight), compute one from the other in forward, or give it memory of its own "
                "(.clone())."
            )
        last = max(last, span, key=lambda known: known[1])


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address and the one behind the last; equal if there are no elements."""
    if not tensor.numel():
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
