"""What functions move where neighbours are one program, as in a compiled step."""

from __future__ import annotations

import torch
from torch import nn

from workbench.core.model_costs import ModelCosts
from workbench.core.strategy import Strategy
from workbench.cost.estimate import estimate
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import COMPILED, WORKBENCH
from workbench.planner import layer_costs, plan

WIDTH = 8
TENSOR = 4 * WIDTH
"""Bytes of an activation of one sample."""


class Chain(nn.Module):
    """Three functions between two products; the second product's are a bias and a residual."""

    def __init__(self, functions: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.functions = functions

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = y
        for _ in range(self.functions):
            z = z + 1.0
        return self.second(z)


def _fused(costs: ModelCosts) -> tuple[float, float]:
    (row, _) = costs.rows
    found = [work.fused_bytes for work in row.after]
    assert all(one is not None for one in found)
    return sum(one[0] for one in found if one), sum(one[1] for one in found if one)


def test_a_result_that_only_the_program_reads_is_not_written() -> None:
    costs = layer_costs(Chain(), torch.zeros(2, WIDTH))
    (row, _) = costs.rows
    assert sum(work.moved_bytes for work in row.after) == 6 * TENSOR
    assert _fused(costs)[0] == 2 * TENSOR  # y is read, z is written


def test_one_function_moves_the_same() -> None:
    costs = layer_costs(Chain(1), torch.zeros(2, WIDTH))
    (row, _) = costs.rows
    assert _fused(costs)[0] == sum(work.moved_bytes for work in row.after) == 2 * TENSOR


def test_a_tensor_is_read_once_and_what_backward_reads_is_written() -> None:
    class Gate(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            z = torch.sigmoid(y)
            return self.second(torch.sigmoid(z * y))

    costs = layer_costs(Gate(), torch.zeros(2, WIDTH))
    forward, backward = _fused(costs)
    assert forward == 3 * TENSOR  # y is read; z, which backward reads, and the product's operand are written
    assert backward == 5 * TENSOR  # gradient, operand, z and y are read, the gradient of y is written


def test_products_and_views_are_as_they_were() -> None:
    plain = layer_costs(Chain(0), torch.zeros(2, WIDTH))
    hardware = load_hardware("a100-80g-selene")
    strategy = Strategy("*: data | 1x1x1").resolve(plain.layers, 1)
    steps = [estimate(plain, strategy, hardware, 4, software=each).step_s for each in (WORKBENCH, COMPILED)]
    assert steps[0] == steps[1]


def test_a_compiled_step_is_predicted_faster_by_what_it_does_not_move() -> None:
    costs = layer_costs(Chain(3), torch.zeros(2, WIDTH))
    hardware = load_hardware("a100-80g-selene")
    strategy = Strategy("*: data | 1x1x1").resolve(costs.layers, 1)
    plain, compiled = (estimate(costs, strategy, hardware, 4, software=each) for each in (WORKBENCH, COMPILED))
    forward = sum(work.fused_bytes[0] for work in costs.rows[0].after if work.fused_bytes)
    assert forward == 2 * TENSOR
    assert compiled.step_s < plain.step_s - hardware.op_s  # of three additions, one moves what it computes
    assert compiled.memory == plain.memory


def test_a_plan_for_a_compiled_step() -> None:
    costs = layer_costs(Chain(3), torch.zeros(2, WIDTH))
    plain, compiled = (plan(costs, "a100-80g-selene", 2, 8, compile=each) for each in (False, True))
    assert compiled.estimate.step_s < plain.estimate.step_s
