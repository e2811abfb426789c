"""NCCL with one rank: it starts, every call of it gives what went in, and an aborted one leaves the GPU usable."""

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
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int16, torch.complex64)


def alone(place: Place) -> Iterator[Found]:
    """Start, sum, gather, scatter, send, abort.

    Raises:
        AssertionError: a result is wrong, or nothing says that the call was aborted.
    """
    device = torch.device(place.device)
    rendezvous = Rendezvous(HashStore(), 0, (Member("here", os.getpid(), 1),))
    started_s = time.monotonic()
    open_group("nccl", rendezvous, 0, 1, 30.0)
    transport = DistributedTransport(0, 1, "nccl", 30.0, device, rendezvous)
    ones = torch.ones(1000, device=device)
    assert transport.all_reduce(ones, [0], "sum", 0, "first sum").equal(ones)
    yield Finding("start and first sum", f"{time.monotonic() - started_s:.1f} s")
    for dtype in _DTYPES:
        _call_everything(transport, torch.arange(60, device=device).remainder(2).to(dtype))
    yield Finding("every call", ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES))
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


def _call_everything(transport: DistributedTransport, x: torch.Tensor) -> None:
    """Alone, a rank gets what it gave."""
    gathered = transport.start_all_gather(x, [x.numel()], [0], "gather")()
    scattered = transport.start_reduce_scatter([x], [0], "scatter")()
    total = transport.all_reduce(x, [0], "sum", 0, "sum")
    received = torch.empty_like(x)
    transport.exchange([(0, x)], [(0, received)], 0, "to itself")
    for what, found in {"gather": gathered, "scatter": scattered, "sum": total, "send": received}.items():
        assert found.equal(x), f"{what} of {x.dtype}: {found}"
