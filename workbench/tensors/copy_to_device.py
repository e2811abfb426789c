"""Copies from the host to the device of the shards, for which the host does not wait."""

from __future__ import annotations

import torch


def copy_to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``value`` on ``device``. Cut it first: all of it is copied.

    From the host it goes through pinned memory of its own: the driver would let the host wait for the device before it
    reads ordinary memory. The caller may write to ``value`` at once, also if it is pinned.

    >>> copy_to_device(torch.ones(2), torch.device("cpu"))
    tensor([1., 1.])
    """
    if value.device.type != "cpu" or device.type in ("cpu", "meta") or value.requires_grad:
        return value.to(device)
    own = value.clone() if value.is_pinned() else value
    return own.pin_memory().to(device, non_blocking=True)
