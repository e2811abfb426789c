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
    with pytest.raises(StrategyError, match="9 stages, but the model has 8 layers"):
        stage_cuts(LAYERS, 9)


def test_a_strategy_is_given_as_itself_its_text_a_preset_or_a_dict_of_rows():
    text = "embed: data; layers.*: model; head: model:column@1"
    assert strategy_of(text, LAYERS, 2) == strategy_of(Strategy(text), LAYERS, 2) == Strategy(text)
    rows = {"embed": "data", "layers.*": "model", "head": "model:column@1"}
    assert strategy_of(rows, LAYERS, 2) == Strategy(rows) == Strategy(text)
    assert Strategy(rows).with_options(num_micro_batches=4) == Strategy(f"{text} | mb=4")
    for name in PRESETS:
        assert strategy_of(f" {name} ", LAYERS, 2) == preset(name, LAYERS, 2)


@pytest.mark.parametrize(
    ("text", "num_ranks", "rows", "options"),
    [
        ("data | mb=4", 2, "*: data", "mb=4"),
        ("model|sequence bf16", 2, "*: model", "sequence bf16"),
        (" pipeline  |  mb=8 ", 2, "pipeline", "2x1x1 mb=8 1f1b"),
        ("pipeline | gpipe zero=1", 2, "pipeline", "2x1x1 mb=4 gpipe zero=1"),
        ("hybrid | recompute", 2, "hybrid", "1x1x2 recompute"),
        ("hybrid | 1x2x2", 4, "hybrid", "1x2x2"),
        ("pipeline |", 2, "pipeline", "2x1x1 mb=4 1f1b"),
    ],
)
def test_a_preset_takes_options(text, num_ranks, rows, options):
    found = strategy_of(text, LAYERS, num_ranks)
    assert found.rows == (Strategy(rows) if ":" in rows else preset(rows, LAYERS, num_ranks)).rows
    assert str(found.options) == options
    assert found.check(LAYERS, num_ranks) == []


def test_degrees_behind_a_pipeline_say_how_many_stages_there_are():
    found = strategy_of("pipeline | 2x2x1", LAYERS, 4)
    assert (found.rows, str(found.options)) == (preset("pipeline", LAYERS, 2).rows, "2x2x1 mb=4 1f1b")
    uneven = strategy_of("pipeline | 2x1+1x1 mb=2", LAYERS, 3)
    assert (uneven.rows, str(uneven.options)) == (preset("pipeline", LAYERS, 2).rows, "2x1+1x1 mb=2 1f1b")
    rounds = strategy_of("pipeline | interleaved", LAYERS, 2).resolve(LAYERS, 2)
    assert (rounds.num_stages, rounds.degrees, rounds.num_micro_batches) == (4, (2, 1, 1), 4)
    turning = strategy_of("pipeline | zero_bubble_v", LAYERS, 2).resolve(LAYERS, 2)
    assert (turning.stages_by_slice(), turning.degrees, turning.num_micro_batches) == ([[0, 3], [1, 2]], (2, 1, 1), 4)
    with pytest.raises(StrategyError, match=r"pipeline of 12 stages, but the model has \d layers"):
        strategy_of("pipeline | dualpipe_v", LAYERS, 6)


def test_a_strategy_is_given_as_a_file(tmp_path):
    text = "embed: data; layers.*: model; head: model:column@1 | 2x1x1 mb=4"
    path = tmp_path / "mine.strategy"
    path.write_text(text.replace("; ", ";\n  ") + "\n")
    assert strategy_of(path, LAYERS, 2) == strategy_of(str(path), LAYERS, 2) == Strategy(text)
    path.write_text("pipeline\n")
    assert strategy_of(path, LAYERS, 2) == preset("pipeline", LAYERS, 2)
    path.write_text("pipeline\n| mb=8\n")
    assert strategy_of(path, LAYERS, 2) == preset("pipeline", LAYERS, 2).with_options(num_micro_batches=8)
    (tmp_path / "other.txt").write_text(text)
    assert strategy_of(tmp_path / "other.txt", LAYERS, 2) == Strategy(text)


def test_a_missing_file_is_an_error(tmp_path):
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
        ("pipline | mb=8", r"did you mean 'pipeline \| mb=8'\?"),
        ("pipline|mb=8 bf61", r"did you mean 'pipeline \| mb=8 bf61'\?; option 'bf61' is none of"),
        ("pipeline | mb", r"strategy 'pipeline \| mb': option 'mb' is none of .*mb=N"),
        ("pipeline | mb=0", "mb=0: a step has at least 1 micro-batch"),
        ("pipeline; head: model", "'pipeline' is a preset, which is a whole strategy: no other row"),
        ("modle; head: data | mb=2", r"did you mean 'model'\?"),
        ({"embed": "modle"}, r"row 'embed: modle' is not .*did you mean 'embed: model'"),
        ({"embed": "data | mb=2"}, r"row 'embed: data . mb=2' is not"),
        ({}, "no row"),
        (3, r"3 is of type int, not a strategy: give its text.*\{'\*': 'data'\}"),
    ],
)
def test_what_is_no_strategy_says_what_would_be(wanted, message):
    with pytest.raises(StrategyError, match=message):
        strategy_of(wanted, LAYERS, 2)
