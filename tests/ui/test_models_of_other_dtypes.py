"""The panel of models in 64 bits, in 16 bits, and of weights of 8 bits: predictions, bytes in the grid, pictures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from workbench.training.costs.layer_costs import layer_costs
from workbench.ui.grid.view import boxings_of
from workbench.ui.panel import Panel

BATCH = 8


class Quantized(nn.Module):
    """A weight of 8 bits with a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight * self.scale).t()


def made(dtype: torch.dtype) -> nn.Sequential:
    first = nn.Linear(8, 16) if dtype.is_floating_point else Quantized()
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 16))
    return model.to(dtype) if dtype.is_floating_point else model


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_there_are_predictions_bytes_and_pictures(dtype: torch.dtype):
    given = dtype if dtype.is_floating_point else torch.float32
    samples = torch.zeros(BATCH, 8, dtype=given)
    data = TensorDataset(samples, torch.zeros(BATCH, 16, dtype=given))
    costs = layer_costs(lambda: made(dtype), samples)
    panel = Panel(
        lambda: made(dtype), data, nn.functional.mse_loss, strategy="*: model", num_ranks=2, costs=costs,
        batch_size=BATCH, hardware="h200", keep=False,
    )  # fmt: skip
    found = panel.estimate()
    assert found is not None and found.step_s > 0
    size = 1 if dtype == torch.int8 else dtype.itemsize
    layer = panel.state.layers[0]
    assert layer.itemsize_of("weight") == size
    boxings = boxings_of(panel.state, panel._editor._facts_now())
    assert boxings.bytes_known and sum(boxings.gradient_bytes) > 0
    assert boxings.layers[1].itemsize == given.itemsize
    for each in panel.state.layers:
        panel._editor.grid._handle_custom_msg({"event": "select", "rows": [each.name]}, [])
        panel._editor.grid._handle_custom_msg({"event": "tensor"}, [])
