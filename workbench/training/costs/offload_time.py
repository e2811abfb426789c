"""How fast a rank's state comes from the host's memory and goes back: of a GPU over its link, of a CPU to a file."""

from __future__ import annotations

import torch

from workbench.training.costs.stopwatch import Stopwatch
from workbench.training.offload.host_memory import host_memory

_BYTES = 2**26


def time_offload(watch: Stopwatch) -> float:
    """Bytes per second. Of a CPU: those that a change of pages that were given back takes longer than of others."""
    device = watch.world.device
    memory = host_memory(device)
    there = memory.allocate(_BYTES)
    here = torch.zeros(_BYTES, dtype=torch.uint8, device=device)
    if device.type != "cpu":

        def copy() -> None:
            here.copy_(there, non_blocking=True)
            there.copy_(here, non_blocking=True)

        return 2 * _BYTES / watch.own_s(copy)

    def change() -> None:
        memory.will_read(there)
        there.add_(1)
        memory.release(there)

    return 2 * _BYTES / max(watch.own_s(change) - watch.own_s(lambda: here.add_(1)), 1e-6)
