"""Measured timelines are of the type of simulated ones; stages are cut by what layers cost."""

import itertools
import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import workbench as wb
from tests.training.models import make
from workbench.core.presets import balanced_cuts
from workbench.errors import StrategyError
from workbench.pipeline.schedules import Action, make_table
from workbench.pipeline.simulate import Span, Timeline, measured_durations, simulate
from workbench.testing import run_ranks
from workbench.training.pipelining.balance import fastest_partition, step_s


class Slow(nn.Linear):
    """A layer that takes its time, forward and backward."""

    def __init__(self, size, forward_s, backward_s):
        super().__init__(size, size)
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, x):
        output = super().forward(x)
        if not getattr(output, "is_placeholder", False):  # a stage that is not here takes none
            time.sleep(self.forward_s)
            if output.requires_grad:
                output.register_hook(lambda grad: time.sleep(self.backward_s))
        return output


def slow_model(*times):
    torch.manual_seed(0)
    return nn.Sequential(*(Slow(4, *pair) for pair in times))


@pytest.mark.timed
@pytest.mark.sampled(2)
@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("interleaved", 4)])
def test_a_measured_step_is_what_the_simulator_says(schedule, num_stages):
    """Work that is sleep overlaps on any number of cores; of some steps, the one that other work delayed least."""
    models = [slow_model(*[(0.02, 0.04)] * 4) for _ in range(2)]
    rows = "; ".join(f"{k}: data@{k * num_stages // 4}" for k in range(4))
    batch = torch.ones(4, 4), torch.ones(4, 4)

    def program(rank):
        model = wb.parallelize(models[rank], f"{rows} | 2x1x1 mb=4 {schedule}")
        timelines = []
        for _ in range(4):
            wb.barrier()
            wb.forward_backward(model, F.mse_loss, *batch)
            timelines.append(wb.debug.timeline(model))
        return timelines[1:]

    first, second = run_ranks(program, 2)
    assert first == second
    measured = min(first, key=lambda timeline: timeline.makespan_s)
    table = make_table(schedule, num_stages, 4, 2)
    assert [[span.action for span in spans] for spans in measured.spans] == table
    paper = simulate(table, num_stages, measured_durations([measured]))
    assert 0.85 * paper.makespan_s < measured.makespan_s < 1.5 * paper.makespan_s  # a busy machine delays some actions
    assert 0.0 < measured.bubble < 0.6
    waits = [span.waited_s for timeline in first for span in timeline.spans[1]]  # a rank that is late does not wait
    assert max(waits) > 0.01 and all(span.busy_s > 0 for spans in measured.spans for span in spans)


def test_time_waited_is_not_work():
    spans = (Span(0, Action(0, "F", 0), 0.0, 3.0, 1.0), Span(0, Action(0, "B", 0), 3.0, 4.0))
    timeline = Timeline((spans, ()))
    assert timeline.makespan_s == 4.0 and timeline.bubble == pytest.approx(1 - 3.0 / 8.0)
    assert measured_durations([timeline])(Action(0, "F", 7)) == 2.0


def test_evaluation_has_a_timeline_of_forwards():
    models = [make("mlp") for _ in range(2)]

    def program(rank):
        model = wb.parallelize(models[rank], "0: data; 4: data@1 | 2x1x1 mb=3 1f1b")
        wb.evaluate(model, torch.ones(6, 16))
        return wb.debug.timeline(model)

    found = run_ranks(program, 2)[0]
    assert [[str(span.action) for span in spans] for spans in found.spans] == [
        ["0F0", "0F1", "0F2"],
        ["1F0", "1F1", "1F2"],
    ]


def test_stages_are_cut_by_what_layers_cost_not_by_their_number():
    model = slow_model((0.004, 0.004), (0.004, 0.004), (0.004, 0.004), (0.01, 0.03))
    model[3].register_buffer("count", torch.zeros(1))
    model[0].weight.grad = torch.ones(4, 4)
    state = torch.get_rng_state()
    found = wb.planner.partition_stages(model, F.mse_loss, torch.ones(2, 4), torch.ones(2, 4), 2, num_repeats=2)
    assert str(found.strategy) == "0: data@0; 1: data@0; 2: data@0; 3: data@1 | 2x1x1"
    assert list(found.costs_s) == ["0", "1", "2", "3"] and found.costs_s["3"] > 0.03
    assert found.stage_costs_s() == pytest.approx([sum(list(found.costs_s.values())[:3]), found.costs_s["3"]])
    assert "ms" in str(found)
    assert str(found.strategy.options) == "2x1x1"
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4)) and model[1].weight.grad is None
    assert torch.equal(torch.get_rng_state(), state) and not model[0]._forward_pre_hooks


class Checkpointed(nn.Module):
    """Each layer runs again in backward, to its end: what is behind it needs its result."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: layer(x).tanh(), x, use_reentrant=False)
        return x


def test_layers_that_run_again_in_backward_take_the_time_of_both_runs():
    model = Checkpointed(slow_model(*[(0.004, 0.0)] * 3))
    found = wb.planner.partition_stages(model, F.mse_loss, torch.ones(2, 4), torch.ones(2, 4), 2, num_repeats=2)
    assert min(found.costs_s.values()) > 0.007


def test_a_cut_never_goes_through_a_block():
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))
    model = nn.Module()
    model.blocks, model.head = blocks, nn.Linear(4, 4)
    model.forward = lambda x: model.head(blocks[2](blocks[1](blocks[0](x))))
    found = wb.planner.partition_stages(model, F.mse_loss, torch.ones(2, 4), torch.ones(2, 4), 2, num_repeats=1)
    assert [row.pattern for row in found.strategy.rows] == ["blocks.0", "blocks.1", "blocks.2", "head"]
    with pytest.raises(StrategyError, match=r"5 stages, but the model has 4 parts.*at most 4"):
        wb.planner.partition_stages(model, F.mse_loss, torch.ones(2, 4), torch.ones(2, 4), 5)


def test_a_spread_module_is_not_measured():
    model = make("mlp")

    def program():
        wb.parallelize(model, "*: data")
        with pytest.raises(StrategyError, match=r"spread over 1 ranks already.*before wb.parallelize"):
            wb.planner.partition_stages(model, F.cross_entropy, torch.ones(2, 16), torch.zeros(2, dtype=torch.long), 2)

    run_ranks(program, 1)


def test_balanced_cuts_are_the_best_of_all():
    draw = random.Random(0)
    for _ in range(50):
        weights = [draw.randint(0, 9) for _ in range(draw.randint(2, 7))]
        parts = draw.randint(1, len(weights))
        cuts = balanced_cuts(weights, parts)
        assert sorted(set(cuts)) == list(range(parts)) and cuts == sorted(cuts)
        largest = max(sum(w for w, c in zip(weights, cuts, strict=True) if c == part) for part in range(parts))
        every = itertools.combinations(range(1, len(weights)), parts - 1)
        best = min(max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *ends, len(weights)))) for ends in every)
        assert largest == best


def test_a_cut_is_proposed_for_a_schedule_and_its_micro_batches():
    model = slow_model(*[(0.004, 0.008)] * 5, (0.008, 0.016))
    batch = torch.ones(2, 4), torch.ones(2, 4)
    few = wb.planner.partition_stages(model, F.mse_loss, *batch, 3, num_micro_batches=2, schedule="1f1b", num_repeats=2)
    assert str(few.strategy.options) == "3x1x1 mb=2 1f1b"
    costs = list(few.costs_s.values())
    assert list(few.stages.values()) == fastest_partition(costs, 3, 2, "1f1b")
    turned = wb.planner.partition_stages(model, F.mse_loss, *batch, 4, schedule="zero_bubble_v", num_repeats=1)
    assert str(turned.strategy.options) == "2x1x1 zero_bubble_v" and set(turned.stages.values()) == {0, 1, 2, 3}
    with pytest.raises(StrategyError, match="schedule 'fast' is not available"):
        wb.planner.partition_stages(model, F.mse_loss, *batch, 3, schedule="fast", num_repeats=1)
    for name, number in (("num_micro_batches", 0), ("num_micro_batches", 2.5), ("num_stages", 0), ("num_repeats", 0)):
        with pytest.raises(StrategyError, match=f"{name}={number}, but a .* has a whole number of them, from 1 on"):
            wb.planner.partition_stages(model, F.mse_loss, *batch, **{"num_stages": 3, name: number})


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_of_few_cuts_the_one_with_the_shortest_step_is_found(schedule):
    draw = random.Random(1)
    for _ in range(15):
        costs = [draw.randint(1, 9) for _ in range(draw.randint(3, 7))]
        num_stages, micro_batches = draw.randint(2, min(4, len(costs))), draw.choice((1, 2, 5))
        found = fastest_partition(costs, num_stages, micro_batches, schedule)
        assert sorted(set(found)) == list(range(num_stages)) and found == sorted(found)
        every = (
            [sum(end <= part for end in ends) for part in range(len(costs))]
            for ends in itertools.combinations(range(1, len(costs)), num_stages - 1)
        )
        best = min(step_s(totals(costs, cut, num_stages), micro_batches, schedule) for cut in every)
        assert step_s(totals(costs, found, num_stages), micro_batches, schedule) == pytest.approx(best, rel=1e-5)


def test_of_many_cuts_a_descent_finds_one_no_slower_than_with_even_stages():
    costs = [2.0, *[4.0] * 16, 7.0]
    even, found = balanced_cuts(costs, 4), fastest_partition(costs, 4, 4, "1f1b")
    assert step_s(totals(costs, found, 4), 4, "1f1b") < step_s(totals(costs, even, 4), 4, "1f1b")


def test_a_full_pipeline_in_a_v_goes_on_at_the_pace_of_its_slowest_rank():
    longer, shorter = (step_s([3.0, 5.0, 4.0, 1.0], number, "zero_bubble_v") for number in (40, 39))
    assert longer - shorter == 5.0 + 4.0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_full_pipeline_goes_on_at_the_pace_of_its_slowest_stage(schedule):
    """What is not simulated is what the simulator would say."""
    stages, micro_batches = [3.0, 5.0, 4.0], 40
    shares = {"F": 0.4, "B": 0.6}
    table = make_table(schedule, 3, micro_batches)
    paper = simulate(table, 3, lambda action: stages[action.stage] * shares[action.kind]).makespan_s
    assert step_s(stages, micro_batches, schedule) == pytest.approx(paper)


def totals(costs, cut, num_stages):
    return [sum(c for c, stage in zip(costs, cut, strict=True) if stage == k) for k in range(num_stages)]
