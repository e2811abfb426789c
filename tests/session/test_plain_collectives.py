"""Ranks that wait in plain torch.distributed for ranks that never come; `test_chaos` holds how soon control is back."""

import pytest

from workbench.errors import CellError

pytestmark = pytest.mark.engines

SETUP = """
import torch.distributed as dist
x = torch.ones(1000)
kept = 5
ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(10, 10))
"""
FINISHED = r"rank 0 waits for other ranks, but rank 1 has finished it"
EACH_OTHER = r"all of them wait for one another"
CASES = {
    "a collective": ("if wb.rank() == 0: dist.all_reduce(x)", FINISHED, "all_reduce"),
    "a receive": ("if wb.rank() == 0: dist.recv(x, src=1)", FINISHED, "recv"),
    "a barrier": ("if wb.rank() == 0: dist.barrier()", FINISHED, "barrier"),
    "an object": ("if wb.rank() == 0: dist.broadcast_object_list([None], src=1)", FINISHED, "broadcast"),
    "a group": ("if wb.rank() == 0: dist.new_group([0, 1])", FINISHED, "new_group"),
    "work": ("if wb.rank() == 0: dist.all_reduce(x, async_op=True).wait()", FINISHED, "wait"),
    "a backward of DDP, which waits in C++": (
        "loss = ddp(torch.ones(2, 10)).sum()\nif wb.rank() == 0: loss.backward()",
        FINISHED,
        "backward",
    ),
    "a forward of DDP": ("if wb.rank() == 0: torch.nn.parallel.DistributedDataParallel(ddp.module)", FINISHED, "init"),
    "two collectives": ("dist.all_reduce(x) if wb.rank() == 0 else dist.recv(x, src=0)", EACH_OTHER, "recv"),
    "a collective and a boxing": (
        "dist.all_reduce(x) if wb.rank() == 0 else wb.barrier()",
        EACH_OTHER,
        "all_reduce",
    ),
}
ALWAYS = ("a collective", "two collectives", "a group")
"""`test_chaos` has a backward of DDP beside them."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in ALWAYS else pytest.mark.slow) for case in CASES]
)
def test_control_is_back_and_the_next_cell_works(session, case):
    code, words, call = CASES[case]
    is_killed = case == "a group"  # nothing ends a wait in a store
    session.run(SETUP)
    with pytest.raises(CellError, match=words) as caught:
        session.run(code)
    assert call in str(caught.value) and "at cell line" in str(caught.value)
    assert ("its variables are lost" in str(caught.value)) is is_killed
    session.run("import torch.distributed as dist; y = torch.ones(3); dist.all_reduce(y)")
    assert session.run("y.tolist(), globals().get('kept')").values[is_killed:] == [([2.0] * 3, 5)] * (2 - is_killed)


@pytest.mark.sampled(3, 2)
@pytest.mark.parametrize("call", ["wait()", "wait(timedelta(seconds=60))", "wait(timeout=timedelta(seconds=60))"])
def test_a_wait_takes_the_arguments_of_torch(session, call):
    """A short one, which torch serves, and one that a helper thread serves because it is long."""
    session.run("import time, torch.distributed as dist\nfrom datetime import timedelta\nx = torch.ones(3)")
    short = session.run(f"dist.all_reduce(x, async_op=True).{call}").values
    long = session.run(f"time.sleep(0.2 * wb.rank())\ndist.all_reduce(x, async_op=True).{call}").values
    assert short == long == [True, True]
    assert session.run("x.tolist()").values == [[4.0] * 3] * 2


def test_a_wait_that_times_out_raises_as_in_torch(session):
    session.run("import torch.distributed as dist\nfrom datetime import timedelta\nx, kept = torch.ones(3), 5")
    with pytest.raises(CellError, match=r"(?i)tim(ed|e) ?out"):
        session.run("if wb.rank() == 0: dist.all_reduce(x, async_op=True).wait(timeout=timedelta(seconds=0.1))")
    assert session.run("y = torch.ones(3); dist.all_reduce(y); (y[0].item(), kept)").values == [(2.0, 5)] * 2
