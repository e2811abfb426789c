"""Ranks that run different programs: the cell fails with both calls, and the next cell works in a new world."""

import pytest

from workbench.errors import CellError
from workbench.session import protocol
from workbench.session.run import Outcome


def failure(was_stopped=False):
    return protocol.Failure("ValueError", "", (), 0.0, was_stopped=was_stopped, chain=(), syntax="")


def test_what_leaves_exchanges_open():
    assert not Outcome((0, 1)).left_exchanges_open
    assert not Outcome((0, 1), failures={0: failure(), 1: failure()}).left_exchanges_open
    assert Outcome((0, 1), failures={1: failure()}).left_exchanges_open
    assert Outcome((0, 1), failures={0: failure(True), 1: failure(True)}).left_exchanges_open


@pytest.mark.engines
@pytest.mark.timeout(120)
def test_a_cell_whose_ranks_diverge_names_both_calls_and_the_next_one_works(session):
    session.run('x = wb.ones(4, placement=wb.placement("cpu", ranks=[0, 1]), sbp="S(0)")')
    with pytest.raises(CellError) as caught:
        session.run('x.to_global(sbp="B") if wb.rank() == 0 else wb.barrier()')
    text = str(caught.value)
    assert "diverged" in text and "boxing" in text and "barrier()" in text
    assert session.run("x.sum().item()").values == [4.0, 4.0]
