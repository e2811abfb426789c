"""NCCL with one rank: it starts, sums, and a call that is aborted ends in an error that leaves the GPU usable."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.gpu.place import Finding, Found, Place
from workbench.errors import CollectiveAborted
from workbench.transport.network.distributed import DistributedTransport
from workbench.transport.rendezvous import Member, Rendezvous
from workbench.transport.selection import open_group

_CYCLES = 4_000_000_000
"""Of a kernel that does nothing, about two seconds."""


def alone(place: Place) -> Iterator[Found]:
    """Start, sum, abort.

    Raises:
        AssertionError: a sum is wrong, or nothing says that the call was aborted.
    """
    device = torch.device(place.device)
    rendezvous = Rendezvous(HashStore(), 0, (Member("here", os.getpid(), 1),))
    started_s = time.monotonic()
    open_group("nccl", rendezvous, 0, 1, 30.0)
    transport = DistributedTransport(0, 1, "nccl", 30.0, device, rendezvous)
    ones = torch.ones(1000, device=device)
    assert transport.all_reduce(ones, [0], "sum", 0, "first sum").equal(ones)
    yield Finding("start and first sum", f"{time.monotonic() - started_s:.1f} s")
    torch.cuda._sleep(_CYCLES)
    threading.Timer(0.3, transport.abort, ["it was asked to"]).start()
    said = ""
    try:
        for number in range(1_000_000):
            transport.all_gather(ones, f"gather {number}")
    except CollectiveAborted as error:
        said = str(error).splitlines()[0]
    assert said, "an aborted call ended as if nothing had happened"
    yield Finding("aborted", said)
    assert float(torch.ones(3, device=device).sum()) == 3.0
    yield Finding("afterwards", "the GPU computes")
    transport.close()
