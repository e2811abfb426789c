"""Schedules against a checker that shares no code with the generators."""

import pytest

from workbench.errors import StrategyError
from workbench.pipeline.check import check_table, max_live_micro_batches
from workbench.pipeline.schedules import GENERATORS, Action, gpipe, make_table, one_forward_one_backward


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 16])
def test_every_table_runs_to_its_end(schedule, num_stages, num_micro_batches):
    assert check_table(make_table(schedule, num_stages, num_micro_batches), num_stages, num_micro_batches) == []


def test_1f1b_holds_as_many_micro_batches_as_stages_are_left_gpipe_all():
    assert [max_live_micro_batches(actions) for actions in one_forward_one_backward(4, 8)] == [4, 3, 2, 1]
    assert [max_live_micro_batches(actions) for actions in gpipe(4, 8)] == [8] * 4


def test_actions_print_and_parse():
    assert [str(action) for action in one_forward_one_backward(2, 2)[1]] == ["1F0", "1B0", "1F1", "1B1"]
    assert Action.parse("2B13") == Action(2, "B", 13)
    with pytest.raises(StrategyError, match="2F0"):
        Action.parse("F2")


def test_the_checker_finds_what_is_missing_twice_and_stuck():
    table = gpipe(2, 2)
    assert "0B1 is missing" in check_table([table[0][:-1], table[1]], 2, 2)
    assert "1F0 stands 2 times" in check_table([table[0], [*table[1], table[1][0]]], 2, 2)
    backwards_first = [[*table[0][2:], *table[0][:2]], table[1]]
    assert check_table(backwards_first, 2, 2) == ["deadlock: rank 0 waits at 0B0, rank 1 waits at 1F0"]


def test_an_unknown_schedule_names_those_there_are():
    with pytest.raises(StrategyError, match="gpipe, 1f1b"):
        make_table("zigzag", 2, 2)
