"""A cell after which ranks have called unlike numbers of exchanges fails, and no later cell receives its messages."""

import pytest

from workbench.errors import CellError
from workbench.session.on_engine import progress
from workbench.session.outcome import Outcome
from workbench.session.output.tracebacks import cell_error
from workbench.session.protocol import Failure, Progress
from workbench.session.unlike_counts import ExchangeCounts, describe_unlike
from workbench.testing import run_ranks

RANKS = range(2)
GROUP = (0, 1)


def refuse_to_answer(rank, operation):
    raise AssertionError("no rank need be asked")


def test_equal_counts_are_no_error():
    assert describe_unlike({rank: Progress(2, 8, ((GROUP, 3), ((rank,), rank))) for rank in RANKS}) == ""


def test_ranks_of_unlike_worlds_are_not_compared():
    assert describe_unlike({0: Progress(1, 8), 1: Progress(2, 7)}) == ""


def test_the_error_has_both_counts_and_the_last_exchange():
    error = describe_unlike({0: Progress(0, 7), 1: Progress(0, 8, latest="boxing P -> B of (4,)"), 2: Progress(0, 7)})
    assert "rank 1 called 8, ranks 0,2 7." in error
    assert "boxing P -> B of (4,)" in error and "on all ranks" in error


def test_sums_are_counted_by_the_ranks_of_their_group():
    error = describe_unlike({0: Progress(num_sums=((GROUP, 2),)), 1: Progress(), 2: Progress()})
    assert "unlike numbers of sums over ranks 0-1: rank 0 called 2, rank 1 0." in error


def test_ranks_are_asked_only_where_they_seem_to_differ():
    counts, outcome = ExchangeCounts(), Outcome((0, 1))
    counts.check(outcome, RANKS, refuse_to_answer)  # no exchanges
    outcome.progress = dict.fromkeys(RANKS, Progress(0, 3))
    counts.check(outcome, RANKS, refuse_to_answer)
    one = Outcome((0,), progress={0: Progress(0, 5)})
    counts.check(one, RANKS, lambda rank, operation: Progress(0, 5))  # rank 1 has exchanged data in a `pull`, too
    assert one.ok and not one.left_exchanges_open
    one.progress = {0: Progress(0, 6)}
    counts.check(one, RANKS, lambda rank, operation: None)  # a rank that is busy cannot tell
    assert one.ok
    counts.check(one, RANKS, lambda rank, operation: Progress(0, 6 - rank))
    assert not one.ok and one.left_exchanges_open
    assert str(cell_error(one)).startswith("The ranks have called unlike numbers of exchanges: rank 0 called 6, rank")


def test_a_cell_that_failed_on_one_rank_is_not_asked_about():
    failures = {0: Failure("ValueError", "x", (), 0.0)}
    outcome = Outcome((0, 1), progress={0: Progress(0, 5)}, failures=failures)
    ExchangeCounts().check(outcome, RANKS, refuse_to_answer)
    assert not outcome.unlike_counts


def test_an_engine_counts_every_boxing_and_names_the_latest():
    def program(rank):
        import workbench as wb

        ranks = wb.placement(ranks=[0, 1])
        wb.ones(4, placement=ranks, sbp="S(0)").to_global(placement=wb.placement(ranks=[1]), sbp="B")
        return progress.progress()

    for found in run_ranks(program, 2):
        assert found.num_boxings == 1 and "-> B on cpu:[1] of (4,)" in found.latest


SETUP = """
import torch, torch.nn as nn, workbench as wb
torch.set_grad_enabled(False)
x = torch.arange(64.0).view(8, 8)
torch.manual_seed(0); plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
torch.manual_seed(0); model = wb.parallelize(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "pipeline")
y = model(x[:4]);
"""
IS_RIGHT = "y = model(x[:4])\nbool((y.full_tensor() - plain(x[:4])).abs().max() < 1e-4)"


@pytest.mark.engines
@pytest.mark.parametrize(
    ("ranks", "replaced"), [([0], []), (None, []), pytest.param(None, [1], marks=pytest.mark.slow)]
)
def test_a_call_on_one_rank_that_need_not_wait_fails_and_harms_no_later_cell(session, ranks, replaced):
    if replaced:
        session.restart(replaced)
    session.run(SETUP)
    with pytest.raises(CellError, match=r"unlike numbers of exchanges: rank 0 called \d+, rank 1 \d+\. .* in 1\. All"):
        session.run("if wb.rank() == 0: model(x[4:])", ranks=ranks)
    assert session.run(IS_RIGHT).values == [True, True]
    session.run("torch.set_grad_enabled(True);")


def box_and_count(n):
    import workbench as wb

    return wb.ones(n, placement=wb.placement(ranks=[0, 1]), sbp="S(0)").sum().item()


@pytest.mark.engines
def test_requests_of_some_ranks_between_those_of_all_are_no_error(session):
    session.run("z = wb.ones(4, placement=wb.placement(ranks=[0, 1]), sbp='S(0)')\nlater = z.to_global_async(sbp='B')")
    assert session.run("float(z.to_local().sum())", ranks=[0]).values == [2.0]
    session.run("z.to_global(placement=wb.placement(ranks=[1]), sbp='B'); later = later.wait()")
    assert session.pull("z").shape == (4,)
    assert session.submit(box_and_count, 4).result() == [4.0, 4.0]
    assert session.run("float(later.to_local().sum())", ranks=[1]).values == [4.0]
    session.run("wb.rebuild();")
    assert session.run("z.sum().item()").values == [4.0, 4.0]
