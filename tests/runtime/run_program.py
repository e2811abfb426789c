"""What torchrun starts in ``test_processes``: one of the programs, on every rank."""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path

import torch

import workbench as wb
from tests.runtime.casts import GRIDS_OF_4, GRIDS_OF_6, run_casts, sampled
from tests.runtime.programs import boxing_forward_and_backward, training_equals_one_device
from workbench.errors import CollectiveAborted
from workbench.runtime.ops.dispatch import FallbackWarning
from workbench.runtime.world import current


def boxing(num_ranks: str, count: str) -> None:
    done = boxing_forward_and_backward(int(num_ranks), int(count))
    print(f"{done} boxings over {current().transport_name}")


def casts(folder: str, num_ranks: str, count: str) -> None:
    """Leaves what this rank has of every cast in a file; whoever started it compares."""
    grids = {"4": GRIDS_OF_4, "6": GRIDS_OF_6}[num_ranks]
    outcomes = run_casts(sampled(grids, int(count), seed=int(count)), wb.rank())
    torch.save(outcomes, Path(folder) / f"rank{wb.rank()}.pt")


def training(kind: str, *strategies: str) -> None:
    warnings.simplefilter("ignore", FallbackWarning)
    for strategy in strategies:
        losses, weights = training_equals_one_device(kind, strategy, wb.world_size())
        assert losses < 1e-5 and weights < 1e-5, (strategy, losses, weights)
        if wb.rank() == 0:
            print(f"equal over {current().transport_name}")


def traced() -> None:
    """A trace counts the bytes that the transport has sent, and the plan's, also of an optimizer's step."""
    p, traffic = wb.placement("cpu", ranks=[0, 1]), current().traffic
    x = wb.randn(5, 7, placement=p, sbp="S(0)", requires_grad=True)
    model = wb.parallelize(torch.nn.Linear(7, 3), "*: data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = traffic.sent_bytes
    with wb.trace() as trace:
        (x.to_global(sbp="B") * 2).sum().backward()
        model(x).sum().backward()
        optimizer.step()
    assert trace.sent_bytes == traffic.sent_bytes - before
    written = next(record for record in trace.records if record.function == "to_global")
    assert written.wire_bytes == x.boxing_plan(sbp="B").wire_bytes and written.site.line.startswith("run_program.py:")
    print(f"{trace.wire_bytes} bytes traced, {len(trace.records)} kinds")


def dying() -> None:
    if wb.rank() == 1:
        time.sleep(0.5)
        os._exit(0)
    started = time.perf_counter()
    try:
        wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)").to_global(sbp="B")
    except CollectiveAborted as error:
        print(f"after {time.perf_counter() - started:.1f} s: {error}")


def example() -> None:
    p = wb.placement("cpu", ranks=[0, 1])
    x = wb.randn(4, 5, placement=p, sbp=wb.sbp.split(0))
    w = wb.randn(5, 8, placement=p, sbp=wb.sbp.broadcast)
    print((x @ w).shape)
    torch.testing.assert_close((x @ w).full_tensor(), x.full_tensor() @ w.full_tensor())


if __name__ == "__main__":
    wb.init()
    programs = {
        "boxing": boxing,
        "casts": casts,
        "training": training,
        "dying": dying,
        "example": example,
        "traced": traced,
    }
    programs[sys.argv[1]](*sys.argv[2:])
