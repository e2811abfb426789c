"""Every schedule on real processes, over each transport; a stage that raises ends the others."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from tests.processes import Ranks, run_processes
from tests.training.models import make
from tests.training.programs import training_equals_one_device

pytestmark = pytest.mark.procs

TWO = "0: data; 2: data; 4: data@1; 6: data@1 | 2x1x1 mb=3 {}"
ROUND = "0: data; 2: data@1; 4: data@2; 6: data@3 | 2x1x1 mb=3 interleaved"


def train_under_every_schedule():
    differences = [training_equals_one_device("mlp", TWO.format(name), 2, 2) for name in ("1f1b", "zero_bubble")]
    return max(max(pair) for pair in [*differences, training_equals_one_device("mlp", ROUND, 2, 2)])


@pytest.mark.parametrize("transport", ["shared", pytest.param("gloo", marks=pytest.mark.slow)])
def test_every_schedule_equals_one_device(transport):
    found = run_processes(train_under_every_schedule, 2, environment={"WORKBENCH_TRANSPORT": transport})
    assert max(found) < 1e-5


def fail_on_the_second_stage():
    model = wb.parallelize(make("mlp"), TWO.format("1f1b"))

    def loss_fn(output, targets):
        if wb.rank() == 1:
            raise ZeroDivisionError("the second stage has had enough")
        return F.cross_entropy(output, targets)

    wb.forward_backward(model, loss_fn, torch.ones(6, 16), torch.zeros(6, dtype=torch.long))


def test_a_stage_that_raises_ends_the_others():
    with Ranks(fail_on_the_second_stage, 2) as ranks, pytest.raises(AssertionError) as caught:
        ranks.results()
    assert "had enough" in str(caught.value)
