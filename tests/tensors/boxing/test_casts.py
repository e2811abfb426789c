"""Thousands of boxings against the oracle: shards, gradients, their gradients, bytes; simulated ranks and processes."""

import random

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from tests.tensors.boxing.casts import (
    GRIDS_OF_4,
    GRIDS_OF_6,
    GRIDS_OF_8,
    Cast,
    check_casts,
    oneflow_grid,
    place,
    run_casts,
    sampled,
)
from tests.timeouts import PROGRAM_TIMEOUT_S
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.world import current
from workbench.testing import run_ranks

GRIDS = {4: GRIDS_OF_4, 6: GRIDS_OF_6, 8: GRIDS_OF_8}


def assert_right(casts, num_ranks):
    check_casts(casts, run_ranks(lambda rank: run_casts(casts, rank), num_ranks))


def test_a_part_of_the_grid_of_oneflow():
    casts = oneflow_grid()
    assert len(casts) >= 6368
    assert_right(random.Random(0).sample(casts, 60), 4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(8))
def test_the_whole_grid_of_oneflow(part):
    assert_right(oneflow_grid()[part::8], 4)


@pytest.mark.parametrize(("num_ranks", "count"), [(4, 100), pytest.param(6, 60, marks=pytest.mark.slow), (8, 20)])
def test_sampled_casts(num_ranks, count):
    assert_right(sampled(GRIDS[num_ranks], count, seed=num_ranks), num_ranks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(100, 104))
@pytest.mark.parametrize(("num_ranks", "count"), [(4, 2000), (6, 2000), (8, 1000)])
def test_many_sampled_casts(num_ranks, count, seed):
    assert_right(sampled(GRIDS[num_ranks], count, seed), num_ranks)


def cast(source, source_sbp, target, target_sbp, shape=(5, 4), dtype=torch.float32):
    a, b = Placement.of("cpu", source), Placement.of("cpu", target)
    return Cast(Layout.of(a, source_sbp), Layout.of(b, target_sbp), shape, dtype)


def large_casts():
    """Large enough for sums in two steps and for paths, on every transport; most do not divide evenly."""
    four, two, grid = [0, 1, 2, 3], [2, 3], [[0, 1], [2, 3]]
    kinds = [(four, "P", four, "B"), (grid, "S(0), P", grid, "S(0), B"), (grid, "P, P", grid, "B, B"),
             (grid, "P, S(0)", grid, "B, B"), ([0, 1], "P", two, "B"), ([1], "B", four, "B"), (two, "S(1)", four, "B"),
             ([0, 1, 3], "P(max)", four, "B"), ([3, 0, 2], "P", grid, "B, S(1)")]  # fmt: skip
    return [cast(*kind, shape=(131, 515)) for kind in kinds]


def test_large_casts():
    plans = [wb.debug.boxing_plan(one.source, one.target, one.shape) for one in large_casts()]
    assert sum(plan.kind == "path" for plan in plans) >= 4
    assert_right(large_casts(), 4)


def casts_on_processes(num_ranks, count):
    return sampled(GRIDS[num_ranks], count, seed=count) + large_casts() * (num_ranks == 4)


def run_casts_on_processes(num_ranks, count, transport):
    assert current().transport_name == transport
    return run_casts(casts_on_processes(num_ranks, count), wb.rank())


ENVIRONMENTS = {
    "shared": {"WORKBENCH_TRANSPORT": "shared"},
    "gloo": {"WORKBENCH_TRANSPORT": "gloo"},
    "ipc": {"WORKBENCH_TRANSPORT": "ipc", "WORKBENCH_TEST_LATE_DEVICE": "1"},
    "mixed": [{"WORKBENCH_HOST": host} for host in ("alpha", "alpha", "beta", "beta")],
}


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.parametrize("transport", ["ipc", "mixed"])
@pytest.mark.parametrize(
    ("num_ranks", "count"),
    [(4, 25), pytest.param(4, 500, marks=pytest.mark.timeout(600))],
    ids=str,
)
def test_casts_on_processes_of_one_gpu_or_two_hosts(num_ranks, count, transport):
    assert_right_on_processes(num_ranks, count, transport)


@pytest.mark.sampled(2, start=1)
@pytest.mark.procs
@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize(
    ("num_ranks", "count"),
    [
        pytest.param(4, 60, marks=pytest.mark.slow),
        (6, 40),
        pytest.param(6, 600, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
    ids=str,
)
def test_casts_on_processes(num_ranks, count, transport):
    assert_right_on_processes(num_ranks, count, transport)


def assert_right_on_processes(num_ranks, count, transport):
    outcomes = run_processes(
        run_casts_on_processes,
        num_ranks,
        num_ranks,
        count,
        transport,
        environment=ENVIRONMENTS[transport],
        timeout_s=PROGRAM_TIMEOUT_S if count < 100 else 2 * PROGRAM_TIMEOUT_S,
    )
    check_casts(casts_on_processes(num_ranks, count), outcomes)


def test_terms_of_one_reduction_are_complete_before_they_take_part_in_another():
    kinds = ["P", "P(max)", "P(min)"]
    assert_right([cast([0, 1], a, [1, 2, 0], b) for a in kinds for b in kinds], 3)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16])
def test_every_dtype_has_a_value_that_changes_no_maximum(dtype):
    assert_right([cast([0, 1, 2], a, [2, 1], b, dtype=dtype) for a in ("B", "S(0)") for b in ("P(max)", "P(min)")], 3)


def test_the_check_notices_wrong_shards_gradients_and_bytes():
    one = cast([0, 1], "S(0)", [0, 1], "B", shape=(3, 2))
    by_rank = run_ranks(lambda rank: run_casts([one], rank), 2)
    check_casts([one], by_rank)
    for name in ("shard", "grad", "second"):
        right = getattr(by_rank[1][0], name)
        for wrong in (right + 1, right[:-1], None):
            with pytest.raises(AssertionError):
                check_casts([one], [by_rank[0], [by_rank[1][0]._replace(**{name: wrong})]])
    with pytest.raises(AssertionError, match="moved 1"):
        check_casts([one], [by_rank[0], [by_rank[1][0]._replace(moved=1)]])


def box_odd_shards():
    """Shards that are views of less memory than they have elements, that overlap, or that lie channels last."""
    p = wb.placement("cpu", ranks=[0, 1, 2])
    row, image = torch.arange(5.0), torch.arange(72.0).reshape(2, 3, 4, 3)
    odd = [
        (wb.tensor(row, placement=p, sbp="S(0)").expand(7, 5), row.expand(7, 5), "S(0)"),
        (wb.tensor(row, placement=p, sbp="B").expand(7, 5), row.expand(7, 5), "S(1)"),
        (wb.tensor(image, placement=p, sbp="S(2)").contiguous(memory_format=torch.channels_last), image, "S(1)"),
        (wb.tensor(row, placement=p, sbp="B").unfold(0, 3, 1), row.unfold(0, 3, 1), "S(0)"),
    ]
    for x, full, sbp in odd:
        for target in (sbp, "B", "P"):
            assert torch.equal(x.to_global(sbp=target).full_tensor(), full), (x, target)
        other = x.to_global(placement=wb.placement("cpu", ranks=[2, 0]), sbp="S(0)")
        assert torch.equal(other.to_global(placement=p, sbp="B").full_tensor(), full), x
    return len(odd)


def test_odd_shards():
    assert run_ranks(box_odd_shards, 3) == [4] * 3


@pytest.mark.procs
def test_odd_shards_on_processes():
    assert run_processes(box_odd_shards, 3, environment={"WORKBENCH_TRANSPORT": "shared"}) == [4] * 3


def test_strided_shards_are_strided():
    one = cast([0, 1], "S(0)", [0, 1], "B")
    assert run_ranks(lambda rank: place(one, one.source, rank, 1, strided=True).is_contiguous(), 2) == [False] * 2
