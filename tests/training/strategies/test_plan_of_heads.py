"""The plan of a model of which several layers take one tensor: it arrives once, from where it is made."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.testing import run_ranks


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.cls, self.reg = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.body(x))
        return self.cls(x).sum() + self.reg(x).sum()


class OfTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x).sum() + self.b(x).sum()


@pytest.mark.parametrize(
    ("make", "text", "num_ranks"),
    [
        (TwoHeads, "body: data; cls: model; reg: model", 2),
        (TwoHeads, "body: data; cls: model; reg: data", 2),
        (TwoHeads, "*: model", 2),
        (TwoHeads, "body: data; cls: model@1; reg: model@1 | 2x1x2 mb=2 1f1b", 4),
        (OfTheBatch, "a: model; b: model", 2),
    ],
)
def test_the_plan_has_the_boxings_that_run(make: type[nn.Module], text: str, num_ranks: int) -> None:
    model, batch = make(), torch.randn(8, 8, generator=torch.Generator().manual_seed(0))

    def program(rank: int) -> tuple[dict[str, int], dict[str, int]]:
        mine = wb.parallelize(copy.deepcopy(model), text)
        wb.forward_backward(mine, torch.mean, batch)
        with wb.debug.trace() as trace:
            wb.forward_backward(mine, torch.mean, batch)
        layers, m = mine.plan.layers_of(), mine.plan.resolved.num_micro_batches
        planned = {each.layer.name: m * sum((each.boxes_input + each.boxes_output).sent_bytes(rank)) for each in layers}
        ran = dict.fromkeys(planned, 0)
        for record in trace.records:
            if record.function in ran:
                ran[record.function] += record.sent_bytes
        return planned, ran

    for planned, ran in run_ranks(program, num_ranks):
        assert planned == ran
