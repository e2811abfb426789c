"""Costs that are measured: the same on all ranks, used by what is decided next, and without effect on numbers."""

import pytest
import torch

import workbench as wb
from tests.processes import run_processes
from workbench.core.boxing import LinkCost
from workbench.tensors.boxing import calibration
from workbench.tensors.world import current
from workbench.testing import run_ranks


def measured_and_used():
    """The cost before and after, on this rank; boxings are right throughout."""
    world = current()
    placement = wb.placement.all("cpu")
    full = torch.arange(35.0).view(5, 7)
    x = wb.to_global(full, placement=placement, sbp="B").to_global(sbp="S(0)")
    assert torch.equal(x.to_global(sbp="S(1)").full_tensor(), full)
    before, cost = world.transport.cost, wb.planner.calibrate()
    assert world.transport.cost == cost and all(not spec.exchanges for spec in world.specs.values())
    assert x.boxing_plan(sbp="S(1)").time_s(cost) > 0
    assert torch.equal(x.to_global(sbp="S(1)").full_tensor(), full)
    return before, cost


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_all_ranks_agree_on_what_exchanges_cost(num_ranks):
    results = run_ranks(measured_and_used, num_ranks)
    assert len(set(results)) == 1
    before, cost = results[0]
    assert cost != before and cost.one_shot_bytes == before.one_shot_bytes
    assert 0 < cost.latency_s < 1 and 1e5 < cost.bandwidth_bytes_per_s < 1e13


def test_the_slowest_rank_counts(monkeypatch):
    def measure(world):
        return LinkCost([1e-6, 5e-6, 2e-6][world.rank], [3e9, 4e9, 1e9][world.rank])

    monkeypatch.setattr(calibration, "_measure", measure)
    for cost in run_ranks(wb.planner.calibrate, 3):
        assert (cost.latency_s, cost.bandwidth_bytes_per_s) == (5e-6, 1e9)


def test_decisions_follow_the_cost(monkeypatch):
    """Where starting an exchange is dear, one is made instead of two; where bytes are, the other way round."""
    costs = {"start-up": LinkCost(1.0, 1e12), "bytes": LinkCost(1e-12, 1e3)}

    def program():
        p = wb.placement("cpu", ranks=[[0, 1], [2, 3]])
        found = {}
        for name, cost in costs.items():
            monkeypatch.setattr(calibration, "_measure", lambda world, cost=cost: cost)
            wb.barrier()
            wb.planner.calibrate()
            plan = wb.debug.boxing_plan((p, ["S(0)", "P"]), (p, ["B", "B"]), (1024, 256))
            found[name] = len(plan.steps)
            wb.barrier()
        return found

    for found in run_ranks(program, 4):
        assert found["start-up"] <= found["bytes"] and found["start-up"] == 1, found


def test_one_rank_has_nothing_to_measure():
    def program():
        before = current().transport.cost
        return wb.planner.calibrate() == before

    assert run_ranks(program, 1) == [True]


def calibrated_and_rebuilt():
    """The constant, what was measured, and what holds in the world after this one."""
    before, cost = measured_and_used()
    wb.rebuild()
    return before, cost, current().transport.cost


@pytest.mark.procs
def test_processes_agree_and_a_new_world_starts_from_constants():
    results = run_processes(calibrated_and_rebuilt, 2)
    before, cost, after = results[0]
    assert results[0] == results[1] and before == after != cost
