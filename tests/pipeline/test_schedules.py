"""Schedules against a checker that shares no code with the generators."""

import pytest

from workbench.core.options import SCHEDULES, V_SCHEDULES, VIRTUAL_SCHEDULES, Options
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.errors import StrategyError
from workbench.pipeline.check import check_table, max_live_micro_batches
from workbench.pipeline.schedules import (
    GENERATORS,
    Action,
    gpipe,
    interleaved,
    make_table,
    one_forward_one_backward,
    zero_bubble,
)
from workbench.pipeline.simulate import simulate


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 16])
def test_every_table_runs_to_its_end(schedule, num_stages, num_micro_batches):
    num_stages *= 2 if schedule in V_SCHEDULES else 1
    assert check_table(make_table(schedule, num_stages, num_micro_batches), num_stages, num_micro_batches) == []


def test_strategies_know_every_schedule():
    assert set(SCHEDULES) == set(GENERATORS)


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_strategies_put_stages_on_the_ranks_that_run_them(schedule, num_ranks):
    num_stages = num_ranks * (2 if schedule in VIRTUAL_SCHEDULES else 1)
    layers = tuple(ResolvedLayer(str(stage), "data", None, stage) for stage in range(num_stages))
    resolved = ResolvedStrategy(layers, (num_ranks, 1, 1), Options(schedule=schedule))
    table = make_table(schedule, num_stages, 2, num_ranks)
    assert resolved.stages_by_slice() == [sorted({action.stage for action in actions}) for actions in table]
    assert [resolved.stage_ranks(stage) for stage in range(num_stages)] == [
        [rank] for stage in range(num_stages) for rank, own in enumerate(resolved.stages_by_slice()) if stage in own
    ]


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
    with pytest.raises(StrategyError, match=", ".join(GENERATORS)):
        make_table("zigzag", 2, 2)


@pytest.mark.parametrize("stages_per_rank", [1, 2, 3])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4, 7, 8])
def test_interleaved_tables_run_to_their_end(stages_per_rank, num_ranks, num_micro_batches):
    num_stages = stages_per_rank * num_ranks
    table = interleaved(num_stages, num_micro_batches, num_ranks)
    assert len(table) == num_ranks
    assert check_table(table, num_stages, num_micro_batches) == []


def test_interleaving_needs_as_many_stages_on_each_rank_and_others_one():
    with pytest.raises(StrategyError, match="multiple of 2"):
        interleaved(5, 4, 2)
    with pytest.raises(StrategyError, match="one stage on each"):
        make_table("1f1b", 4, 4, num_ranks=2)


@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_a_v_has_two_stages_on_each_rank(schedule):
    with pytest.raises(StrategyError, match=rf"{schedule}: 4 stages on 4 ranks\..* r and 7 - r: use 8 stages"):
        make_table(schedule, 4, 4, num_ranks=4)


def test_zero_bubble_cuts_a_backward_in_two_where_a_stage_waits_for_it():
    assert [{action.kind for action in actions} for actions in zero_bubble(3, 4)] == [{*"FB"}, {*"FIW"}, {*"FIW"}]


def test_zero_bubble_holds_no_more_than_the_first_stage_of_1f1b():
    table = zero_bubble(4, 8)
    assert check_table(table, 4, 8) == []
    assert [max_live_micro_batches(actions) for actions in table] == [4, 4, 4, 4]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_the_peaks_of_a_v_are_those_of_the_papers(num_ranks):
    """Stages are half as large as those of 1F1B: ZB-V holds as much as its first stage, DualPipeV half a stage more."""
    for m in (2 * num_ranks, 5 * num_ranks):
        for schedule, most in (("zero_bubble_v", 2 * num_ranks), ("dualpipe_v", 2 * num_ranks + 1)):
            table = make_table(schedule, 2 * num_ranks, m, num_ranks)
            assert [max_live_micro_batches(actions) for actions in table] == [most] * num_ranks


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_no_rank_of_zero_bubble_v_waits_between_its_first_action_and_its_last_one(num_ranks):
    """With equal times of forward, gradients of inputs and of weights. Ranks begin one forward after another."""
    for m in (2 * num_ranks - 1, 3 * num_ranks):
        timeline = simulate(make_table("zero_bubble_v", 2 * num_ranks, m, num_ranks), 2 * num_ranks, unit)
        for rank, spans in enumerate(timeline.spans):
            assert (spans[0].start_s, spans[-1].stop_s) == (rank, rank + 6 * m)
    too_few = simulate(make_table("zero_bubble_v", 2 * num_ranks, num_ranks, num_ranks), 2 * num_ranks, unit)
    assert any(spans[-1].stop_s - spans[0].start_s > 6 * num_ranks for spans in too_few.spans)


def test_the_checker_finds_weights_before_their_inputs_and_stages_on_two_ranks():
    table = zero_bubble(2, 2)
    at = table[1].index(Action(1, "I", 1))
    broken = [action for action in table[1] if action != Action(1, "I", 1)]
    assert check_table([table[0], broken], 2, 2) == ["1I1 is missing"]
    first, second = table[1].index(Action(1, "W", 0)), table[1].index(Action(1, "I", 0))
    swapped = list(table[1])
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert "deadlock" in check_table([table[0], swapped], 2, 2)[0]
    moved = [[*table[0], table[1][at]], broken]
    assert check_table(moved, 2, 2) == ["stage 1 stands on ranks [0, 1]"]


def unit(action):
    """A backward takes two units, each part of a split backward one."""
    return 2.0 if action.kind == "B" else 1.0


def bubble(schedule, num_stages, num_micro_batches, num_ranks=None):
    table = make_table(schedule, num_stages, num_micro_batches, num_ranks)
    return simulate(table, num_stages, unit).bubble


def test_bubbles_are_those_of_the_papers():
    ideal = (4 - 1) / (8 + 4 - 1)
    assert bubble("gpipe", 4, 8) == pytest.approx(ideal)
    assert bubble("1f1b", 4, 8) == pytest.approx(ideal)
    # Two stages a rank halve the bubble against the work: 3/2 of 8 + 3/2.
    assert bubble("interleaved", 8, 8, 4) == pytest.approx(1.5 / 9.5)
    # A third of it is left: (p - 1)(F + I - W) against 3 units per micro-batch.
    assert bubble("zero_bubble", 4, 8) == pytest.approx(3 / (24 + 3))
    # Half a forward, which is half a stage's, for each rank before the last one.
    assert bubble("zero_bubble_v", 8, 8, 4) == bubble("dualpipe_v", 8, 8, 4) == pytest.approx(1.5 / (24 + 1.5))


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (1, 1.2, 0.8), (1, 1.5, 0.5), (1, 0.9, 0.7)])
def test_the_bubble_of_dualpipe_v_is_at_most_the_published_one(num_ranks, f, i, w):
    """(PP/2 - 1)(F&B + B - 3W), with a forward and a backward one after the other: F&B = F + B. (DualPipe, README.)"""
    m, seconds = 3 * num_ranks, {"F": f, "I": i, "W": w, "B": i + w}
    table = make_table("dualpipe_v", 2 * num_ranks, m, num_ranks)
    took = simulate(table, 2 * num_ranks, lambda action: seconds[action.kind]).makespan_s
    assert took - 2 * m * (f + i + w) <= (num_ranks - 1) * (f + 2 * (i + w) - 3 * w) + 1e-9


def test_transfers_and_unequal_stages_lengthen_the_timeline():
    table = make_table("gpipe", 2, 1)
    assert simulate(table, 2, unit, transfer_s=0.5).makespan_s == 1 + 0.5 + 1 + 2 + 0.5 + 2
    slow = simulate(make_table("1f1b", 2, 4), 2, lambda action: unit(action) * (1 + action.stage))
    assert slow.makespan_s == 1 + 4 * 6 + 2
    with pytest.raises(StrategyError, match="stuck at 0B0"):
        simulate([table[0][::-1], table[1]], 2, unit)


def messages_by_pair(table, num_stages, sends):
    """What a rank sends to another one, or receives from it, in its order: (from stage, to stage, micro-batch)."""
    rank_of = {action.stage: rank for rank, actions in enumerate(table) for action in actions}
    found = {}
    for rank, actions in enumerate(table):
        for action in actions:
            step = {"F": 1, "W": 0}.get(action.kind, -1)
            other = action.stage + (step if sends else -step)
            if step and 0 <= other < num_stages and rank_of[other] != rank:
                ends = (action.stage, other) if sends else (other, action.stage)
                pair = (rank, rank_of[other]) if sends else (rank_of[other], rank)
                found.setdefault(pair, []).append((*ends, action.micro_batch))
    return found


@pytest.mark.parametrize("schedule", GENERATORS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_ranks_receive_in_the_order_in_which_others_send(schedule, num_ranks):
    """NCCL matches messages by it. In a V each direction of its second half has a channel of its own."""
    for stages_per_rank in (2, 3) if schedule == "interleaved" else (2,) if schedule in V_SCHEDULES else (1,):
        for m in (1, 2, 3, 5, 8, 13):
            num_stages = stages_per_rank * num_ranks
            table = make_table(schedule, num_stages, m, num_ranks)
            sent, received = (messages_by_pair(table, num_stages, sends) for sends in (True, False))
            assert sent.keys() == received.keys()
            for pair, messages in sent.items():
                is_behind = lambda message: schedule in V_SCHEDULES and min(message[:2]) >= num_ranks  # noqa: E731
                for behind in (False, True):
                    assert [x for x in messages if is_behind(x) == behind] == [
                        x for x in received[pair] if is_behind(x) == behind
                    ]


def test_the_checker_follows_recorded_edges():
    """A skip edge changes nothing; an edge that goes back stops 1F1B, and not a schedule of one order on all ranks."""
    skip, turn = [(0, 1), (1, 2), (0, 2)], [(0, 1), (1, 0)]
    assert check_table(make_table("1f1b", 3, 4), 3, 4, skip) == []
    assert check_table(make_table("gpipe", 2, 3), 2, 3, turn) == []
    assert check_table(make_table("1f1b", 2, 1), 2, 1, turn) == []
    assert "deadlock" in check_table(make_table("1f1b", 2, 2), 2, 2, turn)[0]
    assert "deadlock" in check_table(make_table("zero_bubble", 2, 2), 2, 2, turn)[0]
    assert "deadlock" in check_table(make_table("interleaved", 4, 2, 2), 4, 2, [(0, 1), (1, 2), (2, 0), (2, 3)])[0]
