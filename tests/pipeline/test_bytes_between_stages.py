"""Several stages on a rank: what goes from one to another of the same rank is not sent. Traffic, traces, the plan, dry
runs and the estimate say the same.
"""

from __future__ import annotations

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.tensors.world import current
from workbench.testing import run_ranks
from workbench.training.costs.dry_run import dry_run
from workbench.training.costs.layer_costs import layer_costs

LAYERS = "0: {0}; 2: {0}@1; 4: {0}@2; 6: {0}@3 | "
BATCH = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


def chain() -> nn.Sequential:
    return nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU())])


@pytest.mark.parametrize(
    ("text", "num_ranks", "sent"),
    [
        ("0: data; 2: data@1; 4: data@1 | 1x1x1 mb=2 interleaved", 1, [0]),
        (LAYERS.format("data") + "2x1x1 mb=2 zero_bubble_v", 2, [1024, 1024]),
        (LAYERS.format("model") + "2x1x2 mb=2 zero_bubble_v", 4, [1024, 1024, 1536, 1536]),
        pytest.param(LAYERS.format("data") + "2x1x1 mb=2 interleaved", 2, [1536, 1536], marks=pytest.mark.slow),
        pytest.param(LAYERS.format("model") + "2x1x2 mb=2 interleaved", 4, None, marks=pytest.mark.slow),
    ],
)
def test_all_count_what_ranks_send_to_other_ranks(text: str, num_ranks: int, sent: list[int] | None) -> None:
    model = chain()

    def program(rank: int) -> tuple[int, int, int, int, int, set[int]]:
        mine = wb.parallelize(copy.deepcopy(model), text)
        wb.forward_backward(mine, F.mse_loss, BATCH, BATCH)  # after which the order of calls is known
        current().traffic.reset()
        with wb.debug.trace() as trace:
            wb.forward_backward(mine, F.mse_loss, BATCH, BATCH)
        edges = [edge for layer in mine.plan.layers_of() for edge in (layer.boxes_input, layer.boxes_output)]
        planned = 2 * sum(sum(edge.sent_bytes(rank)) for edge in edges)
        times = sum(record.num_boxings for record in trace.records)
        named = {int(rank) for r in trace.records for rank in re.findall(r"(?<=[@,])\d+", r.change)}
        return current().traffic.sent_bytes, trace.sent_bytes, trace.wire_bytes, planned, times, named

    found = run_ranks(program, num_ranks)
    of_ranks = [traffic for traffic, *_ in found]
    if sent is not None:
        assert of_ranks == sent
    assert [traced for _, traced, *_ in found] == [planned for *_, planned, _, _ in found] == of_ranks
    assert {wire for _, _, wire, *_ in found} == {sum(of_ranks)}
    assert len({times for *_, times, _ in found}) == 1
    assert {rank for *_, named in found for rank in named} <= set(range(num_ranks))
    assert list(dry_run(chain, text, num_ranks, BATCH, BATCH, F.mse_loss).sent_bytes) == of_ranks
    costs = layer_costs(chain, BATCH, loss_fn=F.mse_loss, targets=BATCH)
    resolved = Strategy(text).resolve(costs.layers, num_ranks)
    assert estimate(costs, resolved, load_hardware("h200"), 8).sent.activations == sum(of_ranks)
