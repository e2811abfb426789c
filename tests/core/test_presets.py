"""Where the presets cut a model, and what else a strategy may be given as."""

import pytest

from workbench.core.presets import PRESETS, preset, stage_cuts, strategy_of
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
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


def test_a_strategy_is_given_as_itself_its_text_a_preset_or_a_dict_of_rows():
    text = "embed: data; layers.*: model; head: model:column@1"
    assert strategy_of(text, LAYERS, 2) == strategy_of(Strategy(text), LAYERS, 2) == Strategy(text)
    rows = {"embed": "data", "layers.*": "model", "head": "model:column@1"}
    assert strategy_of(rows, LAYERS, 2) == Strategy(rows) == Strategy(text)
    assert Strategy(rows).with_options(num_micro_batches=4) == Strategy(f"{text} | mb=4")
    for name in PRESETS:
        assert strategy_of(f" {name} ", LAYERS, 2) == preset(name, LAYERS, 2)


def test_a_strategy_is_given_as_a_file(tmp_path):
    text = "embed: data; layers.*: model; head: model:column@1 | 2x1x1 mb=4"
    path = tmp_path / "mine.strategy"
    path.write_text(text.replace("; ", ";\n  ") + "\n")
    assert strategy_of(path, LAYERS, 2) == strategy_of(str(path), LAYERS, 2) == Strategy(text)
    path.write_text("pipeline\n")
    assert strategy_of(path, LAYERS, 2) == preset("pipeline", LAYERS, 2)
    (tmp_path / "other.txt").write_text(text)
    assert strategy_of(tmp_path / "other.txt", LAYERS, 2) == Strategy(text)


def test_a_file_that_is_none_is_told(tmp_path):
    with pytest.raises(StrategyError, match=r"strategy 'missing\.strategy': No such file.*workbench plan --out FILE"):
        strategy_of("missing.strategy", LAYERS, 2)
    with pytest.raises(StrategyError, match="Is a directory"):
        strategy_of(tmp_path, LAYERS, 2)
    (tmp_path / "picture.strategy").write_bytes(b"\x89PNG\xff")
    with pytest.raises(StrategyError, match="it is not text"):
        strategy_of(tmp_path / "picture.strategy", LAYERS, 2)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("pipline", "did you mean 'pipeline'"),
        ("hybird", "did you mean 'hybrid'"),
        ({"embed": "modle"}, r"row 'embed: modle' is not .*did you mean 'embed: model'"),
        ({"embed": "data | mb=2"}, r"row 'embed: data . mb=2' is not"),
        ({}, "no row"),
        (3, r"3 is of type int, not a strategy: give its text.*\{'\*': 'data'\}"),
    ],
)
def test_what_is_no_strategy_says_what_would_be(wanted, message):
    with pytest.raises(StrategyError, match=message):
        strategy_of(wanted, LAYERS, 2)
