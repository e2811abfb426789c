"""Where the presets cut a model."""

import pytest

from workbench.core.presets import stage_cuts
from workbench.core.rows import Layer
from workbench.errors import StrategyError

NAMES = ["embed", "layers.0.q", "layers.0.up", "layers.0.norm", "layers.1.q", "layers.1.up", "layers.1.norm", "head"]
LAYERS = [Layer(name, "Linear", {"weight": (4, 4)}, 16) for name in NAMES]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_blocks_stay_whole_while_there_are_enough(num_stages):
    stages = dict(zip(NAMES, stage_cuts(LAYERS, num_stages), strict=True))
    assert sorted(set(stages.values())) == list(range(num_stages))
    for block in ("layers.0", "layers.1"):
        assert len({stage for name, stage in stages.items() if name.startswith(block)}) == 1


def test_more_stages_than_blocks_cut_between_layers():
    assert sorted(set(stage_cuts(LAYERS, 6))) == list(range(6))
    with pytest.raises(StrategyError, match="9 ranks, but the model has 8 layers"):
        stage_cuts(LAYERS, 9)
