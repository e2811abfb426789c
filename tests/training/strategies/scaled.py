"""A model whose first stage has a parameter without dims, and its training."""

import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.models.training import whole

ON_TWO_STAGES = "(root): data@0; first: data@0; last: data@1 | 2x1x1 mb=2 1f1b"


class Scaled(nn.Module):
    """The state of its scale looks like a count of steps."""

    def __init__(self):
        super().__init__()
        self.scale, self.first, self.last = nn.Parameter(torch.tensor(1.5)), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x * self.scale).tanh())


def train_scaled(model, optimizer, num_steps):
    """The losses."""
    inputs, losses = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).double(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        losses.append(whole(wb.forward_backward(model, F.cross_entropy, inputs, torch.arange(8) % 3)).item())
        optimizer.step()
    return losses
