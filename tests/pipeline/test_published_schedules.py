"""Tables against those that torch publishes: equal schedules have one order, and two checkers agree on any table.

Written after the schedule tests of PyTorch (test/distributed/pipelining/test_schedule.py, the tables of its folder
artifacts). Torch's tables are made by the installed torch. Not here: steps that fetch and free weights, sends and
receives in a table (here a transport does both), schedules written by users.
"""

import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as published

from workbench.core.options import V_SCHEDULES, VIRTUAL_SCHEDULES
from workbench.pipeline.check import check_table
from workbench.pipeline.schedules import GENERATORS, KINDS, Action, make_table

SIZES = [
    (2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 16, 4), (3, 2, 2), (3, 8, 2),
    (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 10, 4), (1, 1, 1), (1, 4, 3),
]  # fmt: skip
"""(stages of a rank, micro-batches, ranks)."""


def published_table(kind, stages_per_rank, num_micro_batches, num_ranks):
    """Torch's table as one of ours: no idle steps, pairs one after the other; backwards that touch are one."""
    rounds = max(1, num_micro_batches // num_ranks)
    schedule = SimpleNamespace(
        pp_group_size=num_ranks, n_local_stages=stages_per_rank, _stages=[None] * stages_per_rank,
        num_stages=num_ranks * stages_per_rank, _num_stages=num_ranks, _n_microbatches=num_micro_batches,
        number_of_rounds=rounds, microbatches_per_round=num_micro_batches // rounds,
    )  # fmt: skip
    if hasattr(kind, "_calculate_single_rank_operations"):
        rows = [kind._calculate_single_rank_operations(schedule, rank) for rank in range(num_ranks)]
    else:
        rows = kind._get_pipeline_order(schedule).values()
    parts = [[part for action in row if action is not None for part in action.sub_actions or (action,)] for row in rows]
    steps = [[part for part in row if part.computation_type.value in KINDS] for row in parts]
    return [[Action.parse(str(action)) for action in published._merge_bw(row)] for row in steps]


def checked_by_torch(table, num_stages, num_micro_batches):
    """Whether torch's checks of a table and its run of all messages pass."""
    rows = {rank: [published._Action.from_str(str(action)) for action in row] for rank, row in enumerate(table)}
    try:
        rank_of = published._validate_schedule(rows, len(table), num_stages, num_micro_batches)
        with_messages = published._add_send_recv(
            {r: list(row) for r, row in rows.items() if row}, rank_of.get, num_stages
        )
        published._simulate_comms_compute(with_messages, rank_of.get, num_stages)
    except (AssertionError, ValueError, KeyError, IndexError):  # an index error: torch prints no unequal rows
        return False
    return True


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_equal_schedules_have_the_order_of_torch(size):
    stages_per_rank, num_micro_batches, num_ranks = size
    if num_micro_batches % num_ranks == 0:
        table = published_table(published.ScheduleInterleaved1F1B, *size)
        assert make_table("interleaved", stages_per_rank * num_ranks, num_micro_batches, num_ranks) == table
    if num_micro_batches >= num_ranks:
        kinds = {
            "gpipe": published.ScheduleGPipe,
            "1f1b": published.Schedule1F1B,
            "zero_bubble": published.ScheduleInterleavedZeroBubble,
        }
        for name, kind in kinds.items():
            table = published_table(kind, 1, num_micro_batches, num_ranks)
            printed = slice(num_ranks - (name == "1f1b"))  # torch prints no first forward for the last stage of 1F1B
            assert make_table(name, num_ranks, num_micro_batches)[printed] == table[printed], name


def merged(table):
    """The actions as text, a backward where its two parts touch."""
    rows = [published._merge_bw([published._Action.from_str(str(action)) for action in row]) for row in table]
    return [[str(action) for action in row] for row in rows]


def without_weights(table):
    """The same; of gradients of weights alone, only that they are computed."""
    return [["W" if "W" in text else text for text in row] for row in merged(table)]


@pytest.mark.parametrize(
    ("num_micro_batches", "num_ranks"), [(2, 2), (5, 2), (4, 4), (7, 4), (12, 4), (10, 5), (24, 8)]
)
def test_a_v_has_the_order_of_torch(num_micro_batches, num_ranks):
    """Zero bubble but for the last gradients of weights, which have an order of their own; DualPipeV wholly."""
    sizes = 2 * num_ranks, num_micro_batches, num_ranks
    found = make_table("zero_bubble_v", *sizes)
    theirs = published_table(published.ScheduleZBVZeroBubble, 2, num_micro_batches, num_ranks)
    assert without_weights(found) == without_weights(theirs)
    if num_micro_batches >= 2 * num_ranks:  # torch takes no fewer
        theirs = published_table(published.ScheduleDualPipeV, 2, num_micro_batches, num_ranks)
        assert merged(make_table("dualpipe_v", *sizes)) == merged(theirs)


def test_torch_finds_no_mistake_in_any_table_of_ours():
    for schedule in GENERATORS:
        for stages_per_rank, num_micro_batches, num_ranks in SIZES:
            num_stages = num_ranks * {"interleaved": stages_per_rank}.get(schedule, 1 + (schedule in V_SCHEDULES))
            table = make_table(schedule, num_stages, num_micro_batches, num_ranks)
            assert checked_by_torch(table, num_stages, num_micro_batches), (schedule, num_stages, num_micro_batches)


@pytest.mark.parametrize(
    ("kind", "stages_per_rank", "num_micro_batches", "num_ranks"),
    [
        ("LoopedBFS", 2, 3, 2),
        ("InterleavedZeroBubble", 2, 8, 2),  # the published table zb1p_2rank_2stagep
        ("ZBVZeroBubble", 2, 6, 3),
        ("DualPipeV", 2, 10, 4),  # the published table dualpipev_4rank_10mb
    ],
)
def test_our_checker_finds_no_mistake_in_a_published_table(kind, stages_per_rank, num_micro_batches, num_ranks):
    table = published_table(getattr(published, f"Schedule{kind}"), stages_per_rank, num_micro_batches, num_ranks)
    assert check_table(table, stages_per_rank * num_ranks, num_micro_batches) == []


def damaged(table, draw):
    """The table with two actions of a rank exchanged, one left out, or one on another rank."""
    rows = [list(row) for row in table]
    row, other = draw.choice(rows), draw.choice(rows)
    match draw.randrange(4):
        case 0:
            row.pop(draw.randrange(len(row)))
        case 1:
            other.insert(draw.randrange(len(other)), row.pop(draw.randrange(len(row))))
        case _:
            one, two = draw.randrange(len(row)), draw.randrange(len(row))
            row[one], row[two] = row[two], row[one]
    return rows


def test_both_checkers_refuse_the_same_damaged_tables():
    draw, verdicts = random.Random(0), []
    for _ in range(300):
        schedule = draw.choice([*GENERATORS])
        num_ranks, num_micro_batches = draw.randint(2, 4), draw.randint(1, 5)
        num_stages = num_ranks * (2 if schedule in VIRTUAL_SCHEDULES else 1)
        table = damaged(make_table(schedule, num_stages, num_micro_batches, num_ranks), draw)
        found = check_table(table, num_stages, num_micro_batches)
        assert checked_by_torch(table, num_stages, num_micro_batches) == (not found), (schedule, found, table)
        verdicts.append(not found)
    assert 20 < sum(verdicts) < 280, "too few tables of one kind"
