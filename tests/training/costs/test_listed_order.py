"""What rows do not say, the model's list decides, also for costs, whose layers are in the order of calls."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workbench.core.presets import strategy_of
from workbench.core.rows import Layer
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.cost.hardware_files import load_hardware
from workbench.planning.problem import Constraints
from workbench.planning.search import search
from workbench.training.costs.layer_costs import layer_costs
from workbench.training.strategies.state import describe


class ListedBackwards(nn.Module):
    """Two layers of which the second one is listed first."""

    def __init__(self) -> None:
        super().__init__()
        self.fc2, self.fc1, self.head = nn.Linear(24, 12), nn.Linear(12, 24), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc2(torch.relu(self.fc1(x))))


COSTS = layer_costs(ListedBackwards, torch.ones(8, 12))
LISTED = describe(ListedBackwards())


def by_name(resolved: ResolvedStrategy) -> dict[str, object]:
    return {layer.name: layer for layer in resolved.layers}


@pytest.mark.parametrize("text", ["*: model", "hybrid", "fc1: model; fc2: model:row", "fc[1-2]: model; head: data"])
def test_a_text_means_the_same_for_costs_and_for_the_model(text: str) -> None:
    assert [layer.name for layer in COSTS.layers] == ["fc1", "fc2", "head"] != [layer.name for layer in LISTED]
    found = [strategy_of(text, layers, 2).resolve(layers, 2) for layers in (COSTS.layers, LISTED)]
    assert by_name(found[0]) == by_name(found[1])


def test_a_plan_resolves_to_the_splits_that_it_was_priced_with() -> None:
    constraints = Constraints(model=2, layers="fc1: model:column; fc2: model:row")
    plan = search(COSTS, load_hardware("h200"), 2, 8, constraints=constraints)
    assert by_name(plan.strategy.resolve(LISTED, 2)) == by_name(plan.resolved)
    assert plan.why_not(plan.strategy).reason == "equal"


def test_a_layer_without_a_stage_is_on_that_of_the_layer_listed_before_it() -> None:
    layers = [Layer(name, "Linear", place=place) for name, place in (("b", 1), ("a", 0), ("c", 2))]
    resolved = Strategy("b: data@1; c: data@2 | 3x1x1").resolve(layers, 3)
    assert {layer.name: layer.stage for layer in resolved.layers} == {"a": 0, "b": 1, "c": 2}
