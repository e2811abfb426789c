"""The plan under recomputation: boxings that run again count."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + self.down(F.gelu(self.up(x))))


@pytest.mark.parametrize(
    ("rows", "options", "num_ranks"),
    [
        ("*: model", "1x1x2 recompute", 2),
        ("*: model", "1x1x2 recompute=1", 2),
        ("*: model; 1: model@1; 2: model@1", "2x1x2 mb=2 1f1b recompute", 4),
    ],
)
def test_the_plan_counts_the_boxings_that_run_again(rows, options, num_ranks):
    """In backward, where they run. What has come from another stage does not come again."""
    model = nn.Sequential(Normed(), Normed(), nn.Linear(8, 5))
    batch = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5

    def program(rank):
        mine = wb.parallelize(copy.deepcopy(model), f"{rows} | {options}")
        wb.forward_backward(mine, F.cross_entropy, *batch)
        with wb.debug.trace() as trace:
            wb.forward_backward(mine, F.cross_entropy, *batch)
        layers, m = mine.plan.layers_of(), mine.plan.resolved.num_micro_batches
        sent = [edge.sent_bytes(rank) for layer in layers for edge in (layer.boxes_input, layer.boxes_output)]
        names = {layer.layer.name for layer in layers}
        ran = [
            sum(r.sent_bytes for r in trace.records if r.direction == direction and r.function in names)
            for direction in ("forward", "backward")
        ]
        return [m * sum(both) for both in zip(*sent, strict=True)], ran

    for planned, ran in run_ranks(program, num_ranks):
        assert planned == ran
        assert sum(planned) > 0
