"""The meter counts what is held at once: all of a batch, or of the micro-batches that a schedule keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks
from workbench.training.batches import Batch
from workbench.training.diagnostics.memory import ActivationMeter
from workbench.training.pipelining.step import train_micro_batches

INPUTS, TARGETS = torch.randn(8, 16), torch.arange(8) % 4


def measured(strategy, num_ranks):
    torch.manual_seed(0)
    state = chain().state_dict()

    def program():
        model = chain()
        model.load_state_dict(state)
        model = wb.parallelize(model, strategy)
        meter = ActivationMeter(model)
        parts = Batch(INPUTS, TARGETS).cut(wb.Strategy(strategy).options.num_micro_batches)
        train_micro_batches(model, F.cross_entropy, parts, meter.measure)
        return meter.size_bytes

    return run_ranks(program, num_ranks)


def chain():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def test_micro_batches_are_held_one_at_a_time():
    whole, parts = measured("*: data", 1)[0], measured("*: data | mb=4", 1)[0]
    assert whole / 4 <= parts < 0.3 * whole


@pytest.mark.parametrize("num_micro_batches", [2, 4])
def test_a_pipeline_holds_what_its_schedule_says(num_micro_batches):
    """GPipe holds all micro-batches; under 1F1B the first of two stages holds two, the second one."""
    rows = f"*: data; [2-4]: data@1 | 2x1x1 mb={num_micro_batches}"
    first, second = measured(f"{rows} gpipe", 2)
    of_first, of_second = measured(f"{rows} 1f1b", 2)
    assert of_first == pytest.approx(first * 2 / num_micro_batches, rel=0.05)
    assert of_second == pytest.approx(second / num_micro_batches, rel=0.1)


def test_what_a_backward_has_used_counts_no_more():
    layer = nn.Linear(4, 4)
    meter, x = ActivationMeter(layer), torch.ones(2, 4)
    for _ in range(3):
        with meter.measure():
            loss = torch.tanh(layer(x)).sum()
        loss.backward()
    assert meter.size_bytes == 2 * 2 * 4 * 4 and meter.held_bytes == 0


def test_a_measured_graph_that_is_dropped_is_freed_and_writes_to_it_are_errors():
    meter = ActivationMeter()
    with meter.measure():
        torch.ones(16, requires_grad=True).exp()
        assert meter.held_bytes == 0 and meter.size_bytes == 64
        result = torch.ones(16, requires_grad=True).exp()
    assert meter.held_bytes == 64
    result.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()
