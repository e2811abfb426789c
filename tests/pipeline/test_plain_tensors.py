"""Plain tensors that a forward makes and stages write to in place."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.pipeline.test_steps import whole
from workbench.errors import StrategyError
from workbench.testing import run_ranks


class Slots(nn.Module):
    """Fills a tensor of its own, as recurrent layers keep their states."""

    def __init__(self, write):
        super().__init__()
        self.layer, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        slots = torch.zeros(len(x), 2, 4)
        self.write(slots, self.layer(x))
        return slots.sum(1)


def by_index(slots, h):
    slots[:, 0] = h
    slots[:, 1] = h.tanh()


def one_after_the_other(slots, h):
    slots += h[:, None]
    slots[:, 0] = slots[:, 1].clone() * h
    slots.mul_(h[:, None].sigmoid())


WRITES = [by_index, one_after_the_other]


def trained(model, strategy, x, y):
    model = wb.parallelize(copy.deepcopy(model), strategy)
    losses = [wb.forward_backward(model, F.mse_loss, x, y).item() for _ in range(2)]
    return losses, [whole(p.grad) for p in model.parameters()]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero_bubble"])
def test_a_stage_fills_a_plain_tensor(write, schedule):
    torch.manual_seed(0)
    model, x, y = nn.Sequential(Slots(write), Slots(write)), torch.randn(8, 4), torch.randn(8, 4)
    truth = copy.deepcopy(model)
    losses = []
    for _ in range(2):
        loss = F.mse_loss(truth(x), y)
        loss.backward()
        losses.append(loss.item())
    strategy = f"0: data@0; 1: data@1 | mb=4 {schedule}"
    for found, grads in run_ranks(lambda: trained(model, strategy, x, y), num_ranks=2):
        assert found == pytest.approx(losses, rel=1e-6)
        for grad, parameter in zip(grads, truth.parameters(), strict=True):
            torch.testing.assert_close(grad, parameter.grad)


def through_a_view(slots, h):
    slots[:, 0].copy_(h)


def beside_a_view(slots, h):
    first = slots[:, 0]
    slots[:, 1] = h
    slots[:, 1] += first


@pytest.mark.parametrize("write", [through_a_view, beside_a_view])
def test_a_write_that_others_would_miss_is_refused(write):
    model = nn.Sequential(Slots(write), Slots(write))
    with pytest.raises(StrategyError, match=r"plain tensor \(4, .*is a view, has views.*by index.*new_zeros"):
        run_ranks(lambda: trained(model, "0: data@0; 1: data@1 | mb=2 1f1b", torch.ones(8, 4), torch.ones(8, 4)), 2)
