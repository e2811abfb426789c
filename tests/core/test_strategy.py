"""Strategies: text, patterns, mistakes, presets."""

import pickle
import re

import pytest

from workbench.core.options import V_SCHEDULES
from workbench.core.presets import PRESETS, balanced_cuts, preset
from workbench.core.rows import Layer
from workbench.core.strategy import Strategy
from workbench.errors import StrategyError

SIZES = {"fc1": (256, 64), "fc2": (256, 256), "fc3": (128, 256), "head": (10, 128)}
LAYERS = [
    Layer(name, "Linear", {"weight": s, "bias": s[:1]}, s[0] * s[1] + s[0], calls=(position, position))
    for position, (name, s) in enumerate(SIZES.items())
]


@pytest.mark.parametrize(
    "text",
    [
        "*: data",
        "fc: model; head: model@1 | 1x2+1x1 mb=2 gpipe sequence",
        "conv*: data; fc*: model; head: model@1 | 2x1x2 mb=4 1f1b",
        "blocks.[4-11].attn: model:column@2; *.norm: model:row | 4x2x2 gpipe zero=1 recompute bf16",
        "*: data | 1x2x1 zero=1 recompute=cheap offload=optimizer",
        "*: data | offload=optimizer+activations sequence",
    ],
)
def test_one_line_round_trip(text):
    strategy = Strategy(text)
    assert str(strategy) == text and Strategy(str(strategy)) == strategy
    assert pickle.loads(pickle.dumps(strategy)) == strategy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("offload", "did you mean 'offload=optimizer'"),
        ("offload=foo", "'offload=foo' is none of .*offload=optimizer, offload=activations, offload=optimizer.act"),
        ("offload=optimizer+optimizer", "is none of"),
        ("offload=optimizer offload=activations", "give one, or offload=optimizer.activations"),
        ("precision=fp8", "is none of .*; did you mean 'fp8'"),
        ("schedule=1fb1 zer=3", "did you mean '1f1b'.; option 'zer=3' is none either; did you mean 'zero=3'"),
    ],
)
def test_wrong_words_for_offload(options, words):
    with pytest.raises(StrategyError, match=words):
        Strategy(f"*: data | {options}")


def test_what_is_offloaded_has_one_order():
    assert str(Strategy("*: data | offload=activations+optimizer")) == "*: data | offload=optimizer+activations"
    assert Strategy("*: data").with_options(offload=True).options.offload == "optimizer+activations"


def test_a_choice_alone_means_all_layers():
    assert Strategy("model") == Strategy("*: model")


def test_all_mistakes_of_a_text_are_listed_at_once():
    with pytest.raises(StrategyError) as caught:
        Strategy("fc1 data; fc2: fast | 2x2 mb=0 sometimes")
    for part in ("'fc1 data'", "'fc2: fast'", "'2x2'", "'sometimes'", "mb=0"):
        assert part in str(caught.value)


def test_patterns_cover_subtrees_and_the_last_row_wins():
    layers = [Layer(f"blocks.{i}.{part}", "Linear", {"weight": (4, 4)}, 16) for i in (3, 4, 12) for part in ("a", "b")]
    strategy = Strategy("*: data; blocks.[4-11]: model; *.*.b: data@0")
    resolved = strategy.resolve(layers, 2)
    assert [layer.parallel for layer in resolved.layers] == ["data", "data", "model", "data", "data", "data"]


def test_a_layer_without_a_stage_follows_its_predecessor():
    resolved = Strategy("*: data; fc3: data@1").resolve(LAYERS, 2)
    assert [layer.stage for layer in resolved.layers] == [0, 0, 1, 1]
    assert resolved.degrees == (2, 1, 1)


def test_an_unknown_layer_offers_the_nearest_names():
    with pytest.raises(StrategyError, match="nearest: head"):
        Strategy("haed: model").resolve(LAYERS, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("*: data | 2x2x1", "2 x 2 x 1 = 4, but there are 2 ranks"),
        ("*: data; head: data@1 | 1x2+1x1", r"stages 1x2\+1x1 take 3 ranks, but there are 2"),
        ("*: data | 1x1+1x1", "pipeline degree 2, but the rows use 1 stage"),
        ("*: data | 1x0+1x2 2x1x1", r"both 1x0\+1x2 and 2x1x1: give one; stages 1x0\+1x2: each degree is at least 1"),
        ("*: data | mb=2 context=2 mb=4 context=2", "both mb=2 and mb=4: give one; both context=2 and context=2"),
        ("*: data | gpipe 1f1b bf16 fp16", "both gpipe and 1f1b: give one; both bf16 and fp16: give one"),
        ("fc1: data@1; fc2: data@0", "stage 0 comes after stage 1"),
        ("*: data@1", "stage 0 has no layer"),
        ("head: data@7", "8 stages but only 4 layers"),
        ("*: data | 2x1x1", "pipeline degree 2, but the rows use 1 stage"),
    ],
)
def test_mistakes_name_both_numbers(text, message):
    with pytest.raises(StrategyError, match=message):
        Strategy(text).resolve(LAYERS, 2)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("fc1: modle", "did you mean 'fc1: model'"),
        ("fc1: mod:row@1", "did you mean 'fc1: model:row@1'"),
        ("dat", "did you mean 'data'"),
        ("pipelin", "did you mean 'pipeline'"),
        ("hybrid", "'hybrid' is a preset, which is made for a model"),
        ("hybrid | mb=2", r"'hybrid' is a preset, .* wb.parallelize\(model, 'hybrid \| mb=2'\)"),
        ("fsdp", r"here 'fsdp' is '\*: data \| zero=3'"),
        ("*: tp@1", r"here 'tp' is '\*: model', and the third of the degrees PxDxM"),
        ("*: pipeline", "here 'pipeline' is a preset, which is a whole strategy, or '@1' behind a choice"),
    ],
)
def test_a_row_that_is_none_says_what_was_meant(text, meant):
    with pytest.raises(StrategyError, match=f"is not 'pattern: .*; {meant}"):
        Strategy(text)


@pytest.mark.parametrize(
    ("option", "end"), [("tp=2", "here 'tp' is .*: model', .*"), ("zer=2", "did you mean 'zero=2'"), ("xy=7", "fp8")]
)
def test_an_option_with_a_value_is_like_none_without(option, end):
    with pytest.raises(StrategyError, match=f"option '{option}' is none of .*{end}[?M]?$"):
        Strategy(f"*: data | {option}")


def test_nothing_is_guessed_of_a_row_that_is_like_none():
    with pytest.raises(StrategyError, match=r"\[@stage\]'$"):
        Strategy("fc1: xyz")


def test_a_class_of_characters_is_an_error():
    (mistake,) = Strategy("*: data; fc[12]: model").check(LAYERS, 2)
    assert "a pattern knows * and ranges of numbers" in mistake.message
    assert not any(fix.startswith(("use ", "write '")) for fix in mistake.fixes)


@pytest.mark.parametrize(
    ("text", "num_ranks", "fix"),
    [("*: data; fc2: data@1; fc3: data@2", 2, "number the stages 0 to 1"),
     ("*: data; fc2: data@1; fc3: data@2 | 2x1x1 mb=4 interleaved", 2, "number the stages 0 to 1"),
     ("*: data; fc2: data@1; fc3: data@2 | 3x1x1", 4, "write 2x1+1x1+1x1 instead")],
)  # fmt: skip
def test_no_fix_is_offered_that_does_not_fit_the_ranks(text, num_ranks, fix):
    mistakes = Strategy(text).check(LAYERS, num_ranks)
    assert [mistake.fixes for mistake in mistakes] == [(fix,)]


@pytest.mark.parametrize(
    ("text", "num_ranks", "fix"),
    [("*: data | 2x1x1 mb=4", 2, "1x2x1"), ("*: model | 2x1x2", 4, "1x2x2"), ("*: model | 2x1x3", 6, "1x2x3")],
)
def test_proposed_degrees_multiply_to_the_ranks(text, num_ranks, fix):
    (mistake,) = Strategy(text).check(LAYERS, num_ranks)
    assert mistake.fixes[-1] == f"use {fix}"


@pytest.mark.parametrize(
    ("text", "num_ranks", "message", "fix"),
    [
        ("*: model | 2x1x2", 4, "degree 2, but the rows use 1 stage", "with '@1', or write 'pipeline | 2x2x1', which"),
        ("*: data | 3x1x1", 3, "degree 3, but the rows use 1 stage", "on stage 1 with '@1', and so on to '@2', or"),
        ("*: data | 1x1+1x1", 2, "degree 2, but the rows use 1 stage", "on stage 1 with '@1'"),
        ("*: data | 4x4x1", 2, "4 x 4 x 1 = 16, but there are 2 ranks", "use 1x2x1"),
        ("*: data | 4x1x1 zero_bubble_v", 2, "4 x 1 x 1 = 4, but there are 2 ranks", "use 1x2x1"),
    ],
)  # fmt: skip
def test_a_pipeline_degree_without_stages_is_told_how_to_get_them(text, num_ranks, message, fix):
    mistake = Strategy(text).check(LAYERS, num_ranks)[0]
    assert message in mistake.message and fix in mistake.fixes[0]


def test_a_row_split_follows_a_column_split_that_feeds_it():
    resolved = Strategy("*: model").resolve(LAYERS, 2)
    assert [layer.split for layer in resolved.layers] == ["column", "row", "column", "row"]


def test_attention_weights_are_split_by_their_names():
    layers = [Layer(name, "Linear", {"weight": (8, 8)}, 64) for name in ("att.q", "att.k", "att.v", "att.o")]
    resolved = Strategy("*: model").resolve(layers, 2)
    assert [layer.split for layer in resolved.layers] == ["column", "column", "column", "row"]


def test_a_convolution_in_groups_is_split_by_columns_whatever_its_name():
    """Its weight's second dim counts the inputs of one group, so a row of it is in all groups."""
    shapes = {"begin": (8, 3, 3, 3), "proj": (8, 1, 3, 3), "cut": (8, 4, 3, 3), "end": (4, 8, 1, 1)}
    groups = {"proj": 8, "cut": 2}
    layers = [Layer(name, "Conv2d", {"weight": s}, groups=groups.get(name, 1)) for name, s in shapes.items()]
    resolved = Strategy("*: model").resolve(layers, 2)
    assert [layer.split for layer in resolved.layers] == ["column", "column", "column", "row"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mb": 4}, r"with_options\(mb=4\): 'mb' is none of degrees, num_micro_batches, schedule"),
        ({"schedule": "zero-bubble"}, "option 'zero-bubble' is none of .*zero_bubble"),
        ({"num_micro_batches": 0, "zero": 7}, "mb=0: a step has at least 1.*zero=7: ZeRO has stages 0 to 3"),
        ({"degrees": (2, 1)}, "option '2x1' is none of"),
        ({"precision": "float16"}, "option 'float16' is none of .*fp16"),
    ],
)
def test_options_that_cannot_be_are_refused(changes, message):
    with pytest.raises(StrategyError, match=message):
        Strategy("*: data").with_options(**changes)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_presets_fit_and_round_trip(name, num_ranks):
    strategy = preset(name, LAYERS, num_ranks)
    assert strategy.check(LAYERS, num_ranks) == []
    assert Strategy(str(strategy)) == strategy


def test_the_pipeline_preset_refuses_more_stages_than_layers():
    with pytest.raises(StrategyError, match="5 stages, but the model has 4 layers"):
        preset("pipeline", LAYERS, 5)


def test_balanced_cuts_equal_brute_force():
    weights = [5, 1, 1, 1, 2, 7, 3]
    for parts in range(1, 6):
        cuts = balanced_cuts(weights, parts)
        worst = max(sum(w for w, c in zip(weights, cuts, strict=True) if c == part) for part in range(parts))
        assert sorted(set(cuts)) == list(range(parts)) and cuts == sorted(cuts)
        assert worst == _best_worst(weights, parts)


def _best_worst(weights, parts):
    if parts == 1:
        return sum(weights)
    return min(
        max(sum(weights[:cut]), _best_worst(weights[cut:], parts - 1)) for cut in range(1, len(weights) - parts + 2)
    )


def test_ranks_of_a_stage():
    resolved = Strategy("*: data; head: model@1 | 2x2x2").resolve(LAYERS, 8)
    assert resolved.stage_grid(1) == [[4, 5], [6, 7]]


def tied(first="Embedding"):
    return [
        Layer("words", first, {"weight": (10, 4)}, 40),
        Layer("fc", "Linear", {"weight": (4, 4)}, 16),
        Layer("head", "Linear", {"weight": (10, 4)}, 40, tied_to="words"),
    ]


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        ("*: model", ["row", "column", "column"]),
        ("*: model; words: model:column", ["column", "column", "row"]),
        ("*: model; head: model:row", ["column", "column", "row"]),
        ("*: data; fc: model", [None, "column", None]),
    ],
)
def test_layers_with_one_weight_share_its_split(text, splits):
    assert [layer.split for layer in Strategy(text).resolve(tied(), 2).layers] == splits


def test_a_weight_that_a_layer_cannot_split_stays_whole_in_all_that_share_it():
    assert [layer.split for layer in Strategy("*: model").resolve(tied("Memory"), 2).layers] == [None, "column", None]
    with pytest.raises(StrategyError, match="Fix: write 'head: data'"):
        Strategy("*: model; head: model:column").resolve(tied("Memory"), 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "*: model:column",
            r"head: shares its weight \(10, 4\) with words.* cut along dim 1 .* Fix: write 'head: model:row'",
        ),
        ("*: data; head: model", r"leaves it whole \(data\), while model:column here.* Fix: write 'head: data'"),
    ],
)
def test_rows_that_disagree_about_a_shared_weight_are_a_mistake(text, message):
    with pytest.raises(StrategyError, match=message):
        Strategy(text).resolve(tied(), 2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_fit_a_shared_weight(name):
    assert preset(name, tied(), 2).check(tied(), 2) == []


@pytest.mark.parametrize(
    ("text", "splits"),
    [
        ("*: model", ["row", "row", "row", "column"]),  # all as the head
        ("*: model; decoder.words: model:column", ["column", "column", "column", "row"]),  # as the one that says how
    ],
)
def test_all_layers_that_share_one_weight_lie_in_one_way(text, splits):
    """The four of an encoder and a decoder with tied words."""
    tables = [
        Layer(name, "Embedding", {"weight": (10, 4)}, 40, tied_to="words" if name != "words" else None)
        for name in ("words", "encoder.words", "decoder.words")
    ]
    layers = [*tables, Layer("head", "Linear", {"weight": (10, 4)}, 40, tied_to="words")]
    assert Strategy(text).check(layers, 2) == []
    assert [layer.split for layer in Strategy(text).resolve(layers, 2).layers] == splits


@pytest.mark.parametrize(
    "names",
    ["q_lin k_lin v_lin out_lin", "wq wk wv wo", "to_q to_k to_v to_out.0", "W_query W_key W_value out_proj",
     "queries keys values fc_out", "w_qs w_ks w_vs fc", "linear_q linear_k linear_v linear_out"],
)  # fmt: skip
def test_names_of_attention_win_over_shapes(names):
    assert splits([(f"block.{name}", 8, 8) for name in (*names.split(), "lin1", "lin2", "classifier")]) == [
        *("column", "column", "column", "row"), *("column", "row"), "column",
    ]  # fmt: skip


def test_a_column_finds_its_row_in_its_own_block():
    """The gate of a block comes last here, as in Llama's own code, and has as many features as the next block takes."""
    block = [("ff.w1", 8, 24), ("ff.w2", 24, 8), ("ff.w3", 8, 24)]
    layers = [(f"layers.{k}.{name}", *sizes) for k in range(2) for name, *sizes in [("mix", 24, 10), *block]]
    assert splits(layers) == 2 * ["column", "column", "row", "column"]
    assert splits([("0.conv", 8, 24), ("1.conv", 24, 8)]) == ["column", "row"]  # a block with one layer is no pair


def test_only_a_layer_that_leads_back_takes_a_third_of_a_column():
    assert splits([("packed", 8, 24), ("end", 8, 8)]) == ["column", "row"]
    assert splits([("gate", 8, 24), ("up", 8, 24), ("down", 24, 8)]) == ["column", "column", "row"]


def splits(layers):
    """What plain ``model`` makes of linear layers: (name, inputs, outputs) of each."""
    described = [Layer(name, "Linear", {"weight": (outputs, inputs)}) for name, inputs, outputs in layers]
    return [layer.split for layer in Strategy("*: model").resolve(described, 2).layers]


def test_interleaved_stages_go_round_the_slices():
    layers = [Layer(str(k), "Linear", {"weight": (4, 4)}, 16) for k in range(4)]
    rows = "; ".join(f"{k}: data@{k}" for k in range(4))
    resolved = Strategy(f"{rows} | 2x1x2 mb=4 interleaved").resolve(layers, 4)
    assert resolved.num_stages == 4
    assert [resolved.stage_ranks(stage) for stage in range(4)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert Strategy(f"{rows} | interleaved").resolve(layers, 2).degrees == (2, 1, 1)
    mistakes = Strategy(f"{rows} | 3x1x1 interleaved").check(layers, 3)
    assert "3, but the rows use 4 stages; interleaved takes a multiple" in str(mistakes[0])
    assert "pipeline degree 2, but the rows use 4 stages" in str(Strategy(f"{rows} | 2x1x1 1f1b").check(layers, 2)[0])


@pytest.mark.parametrize("schedule", V_SCHEDULES)
def test_stages_of_a_v_go_forth_and_back(schedule):
    layers = [Layer(str(k), "Linear", {"weight": (4, 4)}, 16) for k in range(6)]
    rows = "; ".join(f"{k}: data@{k}" for k in range(4))
    resolved = Strategy(f"{rows} | 2x1x2 mb=4 {schedule}").resolve(layers, 4)
    assert [resolved.stage_ranks(stage) for stage in range(4)] == [[0, 1], [2, 3], [2, 3], [0, 1]]
    assert resolved.stages_by_slice() == [[0, 3], [1, 2]]
    wide = Strategy(f"{rows} | 1x2+1x1 mb=4 {schedule}").resolve(layers, 3)
    assert [wide.stage_grid(stage) for stage in range(4)] == [[[0, 1]], [[2]], [[2]], [[0, 1]]]
    assert Strategy(f"{rows} | {schedule}").resolve(layers, 4).degrees == (2, 2, 1)
    assert Strategy(f"*: data | {schedule}").resolve(layers, 2).degrees == (1, 2, 1)


@pytest.mark.parametrize(
    ("num_stages", "options", "num_ranks", "found", "fixes"),
    [
        (4, "4x1x1", 4, "pipeline degree 4, but the rows use 4 stages: {} puts 2 stages on each rank of .* takes 8",
         ["use 2x2x1", "number the stages 0 to 7"]),
        (3, "2x1x1", 2, "pipeline degree 2, but the rows use 3 stages: {} .* takes 4", ["number the stages 0 to 3"]),
        (3, "", 2, "pipeline degree 2, but the rows use 3 stages: {} .* takes 4", ["number the stages 0 to 3"]),
        (1, "2x1x1", 2, "pipeline degree 2, but the rows use 1 stage: {} .* takes 4", ["number the stages 0 to 3"]),
        (6, "", 2, "6 stages on 2 ranks: {} puts 2 stages on each", ["number the stages 0 to 3"]),
        (4, "2x1x1", 4, "2 x 1 x 1 = 2, but there are 4 ranks", ["use 2x2x1"]),
    ],
)  # fmt: skip
def test_one_error_says_how_many_stages_a_v_takes(num_stages, options, num_ranks, found, fixes):
    layers = [Layer(str(k), "Linear", {"weight": (4, 4)}, 16) for k in range(8)]
    rows = "; ".join(f"{k}: data@{min(k, num_stages - 1)}" for k in range(8))
    for schedule in V_SCHEDULES:
        (mistake,) = Strategy(f"{rows} | {options} {schedule}").check(layers, num_ranks)
        assert re.match(found.format(schedule), str(mistake)), mistake
        assert list(mistake.fixes) == fixes


def test_stages_of_different_width():
    resolved = Strategy("*: model; fc3: data@1; head: model@2 | 2x1+1x1+1x2").resolve(LAYERS, 5)
    assert [resolved.stage_grid(stage) for stage in range(3)] == [[[0], [1]], [[2]], [[3, 4]]]
    assert resolved.num_ranks == 5
