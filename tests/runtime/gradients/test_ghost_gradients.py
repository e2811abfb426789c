"""Gradients of parameters that live on other ranks: they say that the owner has one, and hold nothing."""

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


def models():
    torch.manual_seed(0)
    states = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()
    found = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    for model in found:
        model.load_state_dict(states)
    return found


def test_a_ghosts_gradient_is_made_once():
    """Optimizers ask every parameter in every step; what a step was told of is gone all the same."""
    ranks = models()

    def program(rank):
        model = wb.parallelize(ranks[rank], "0: data@0; 1: data@1 | 2x1x1 mb=2")
        ghost = next(p for p in model.parameters() if p.is_ghost)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.ones(4, 4), torch.zeros(4, 4)
        seen = []
        for _ in range(3):
            assert ghost.grad is None
            wb.forward_backward(model, nn.functional.mse_loss, *batch)
            seen.append(ghost.grad)
            optimizer.step()
            optimizer.zero_grad()
        assert seen[0] is seen[1] is seen[2]
        assert seen[0].is_ghost and seen[0].sbp == ghost.layout_on_ranks.dual().sbp and seen[0].dtype == torch.float32
        model.double()
        wb.forward_backward(model, nn.functional.mse_loss, *(part.double() for part in batch))
        assert ghost.grad is not seen[0] and ghost.grad.dtype == torch.float64

    run_ranks(program, 2)


def test_norms_of_gradients_are_those_of_this_step():
    """A norm boxes the gradient and remembers the form; a rank without a part must not remember the last step's."""
    ranks = models()

    def program(rank):
        model = wb.parallelize(ranks[rank], "0: data@0; 1: data@1 | 2x1x1 mb=2")
        inputs, targets = torch.ones(4, 4), torch.zeros(4, 4)
        seen = []
        for step in (1, 2, 3):
            model.zero_grad()
            wb.forward_backward(model, lambda out, wanted, step=step: step * (out - wanted).sum(), inputs, targets)
            seen.append([p.grad.square().sum().sqrt().item() for p in model.parameters()])
        return seen

    first, *later = run_ranks(program, 2)[0]
    assert min(first) > 0
    for step, norms in enumerate(later, 2):
        assert norms == pytest.approx([step * norm for norm in first])
