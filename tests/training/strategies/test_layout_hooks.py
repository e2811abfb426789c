"""What moves at the layout hooks of layers: kinds and bytes, by dry runs, which tests compare with real ranks. And
calls inside of calls.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from benchmarks.gpt import GPT, next_word_loss
from tests.training.models import CNN, make
from workbench.tensors.execution_context import OUTSIDE
from workbench.tensors.global_tensor import local_torch
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run


def test_a_residual_goes_to_the_next_stage_once():
    """The norm takes it as B, the sum behind attention the same: what has been sent is not sent again as S(0)."""
    words = torch.arange(40).view(4, 10)
    text = "*: model; blocks.1: model@1; norm: model@1; head: model@1 | 2x1x2"
    run = dry_run(lambda: GPT(64, 2, 50, 10), text, 4, words, words, next_word_loss)
    activation = 4 * 10 * 64 * 4
    assert run.by_kind["send"] == 2 * 2 * activation  # to each of two ranks, and its gradient back


def test_a_convolution_split_by_rows_takes_slices_of_channels():
    images = torch.ones(4, 1, 8, 8), torch.arange(4)
    run = dry_run(CNN, "*: data; conv2: model:row | 1x1x2", 2, *images, F.cross_entropy)
    assert run.by_kind["all-to-all"] == 2 * 4 * 6 * 4 * 4 * 4 // 2  # samples to channels of its input, and back


class Student(nn.Module):
    """Calls a teacher, which is no part of it, and then a layer on a table that all samples share."""

    teachers = ()

    def __init__(self):
        super().__init__()
        self.places, self.head, self.seen = nn.Linear(3, 6), nn.Linear(6, 6), []

    def forward(self, x, table):
        with torch.no_grad():
            wanted = [teacher(x) for teacher in self.teachers]
        places = self.places(table)
        self.seen.append((current().context.call.num_samples, places))
        return self.head(x + places) - sum(wanted)


def test_a_call_goes_on_after_that_of_another_parallelized_module():
    """Its number of samples holds again: the rows of the table are none."""
    student, teacher = Student(), nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    x, table = torch.randn(4, 3, 6), torch.eye(3)

    def program():
        model = wb.parallelize(copy.deepcopy(student), "*: data")
        model.teachers = [wb.parallelize(copy.deepcopy(teacher), "*: data")]
        output = model(x, table).full_tensor()
        assert current().context.call is OUTSIDE
        ((num_samples, places),) = model.seen
        return output, num_samples, places.sbp

    found = run_ranks(program)
    student.teachers = [teacher]
    expected = student(x, table)
    for output, num_samples, sbp in found:
        assert num_samples == 4 and sbp == (wb.sbp.broadcast,)
        torch.testing.assert_close(output, expected)


def test_a_strategy_takes_the_place_of_those_of_its_parts():
    """Their hooks would box inputs and sum gradients a second time."""
    built = make("mlp")

    def num_hooks(model):
        with local_torch():
            of_gradients = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
        return of_gradients, [len(each._forward_pre_hooks) + len(each._forward_hooks) for each in model.modules()]

    def program():
        once, twice = (copy.deepcopy(built) for _ in range(2))
        wb.parallelize(twice[0], "*: model | bf16")
        assert num_hooks(wb.parallelize(once, "*: data")) == num_hooks(wb.parallelize(twice, "*: data"))

    run_ranks(program, 2)
