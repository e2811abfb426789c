"""Pictures of an estimate: lengths, labels and words are those of its numbers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tests.ui.models import GPT_HYBRID, gpt
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.cost.estimate import Estimate, SentBytes
from workbench.pipeline.schedules import make_table
from workbench.pipeline.simulate import simulate
from workbench.ui.pictures.panel_svg import Axis
from workbench.ui.planning.prediction_pictures import Prediction, parts_of, predictions_html, timeline_rows
from workbench.ui.planning.predictor import Predictor

MEMORY = {"parameters": 40e6, "gradients": 40e6, "optimizer": 20e6, "activations": 90e6, "buffers": 10e6}


def resolved(text: str = GPT_HYBRID, num_ranks: int = 4) -> ResolvedStrategy:
    return Strategy(text).resolve(gpt().layers, num_ranks)


def make_estimate(num_stages: int = 2, num_micro_batches: int = 4, **changes: object) -> Estimate:
    """2 s: 1 s of compute, 0.4 s of boxing, 0.1 s of gradients, 0.4 s of bubble, 0.1 s of optimizer."""
    table = make_table("1f1b", num_stages, num_micro_batches)
    timeline = simulate(table, num_stages, lambda action: 0.1 if action.kind == "F" else 0.2)
    memory = tuple({kind: size / (stage + 1) for kind, size in MEMORY.items()} for stage in range(num_stages))
    made = Estimate(2.0, 1.0, 0.4, 0.1, 0.4, 0.1, memory, SentBytes(4e6, 1e6), 16.0, timeline)
    return replace(made, **changes)  # type: ignore[arg-type]


def section(html: str, css: str) -> str:
    return re.search(rf'<section class="{css}[^"]*">.*?</section>', html, re.DOTALL)[0]  # type: ignore[index]


def widths(html: str, colour: str) -> list[float]:
    """Of all bars in a colour."""
    bars = re.findall(r"<rect [^>]*>", html)
    return [float(re.search(r'width="([\d.]+)"', bar)[1]) for bar in bars if f"--wb-{colour})" in bar]  # type: ignore[index]


def test_the_step_is_split_in_proportion():
    time = section(predictions_html(Prediction(make_estimate(), resolved())), "time")
    [compute], [boxing] = widths(time, "compute"), widths(time, "boxing")
    assert compute / boxing == pytest.approx(2, rel=0.01), "1 s against 0.4 s of activations and 0.1 s of gradients"
    for text in ("16.0 samples/s", "2.00 s", "compute 1.00 s", "boxing 500 ms", "bubble 400 ms", "optimizer 100 ms"):
        assert text in re.sub("<[^>]*>", "", time).replace("&nbsp;", " "), text


def test_parts_add_up():
    assert sum(seconds for *_, seconds in parts_of(make_estimate())) == pytest.approx(2.0)


def test_the_strategy_before_is_a_thinner_bar():
    before = make_estimate(step_s=4.0, compute_s=3.0)
    time = section(predictions_html(Prediction(make_estimate(), resolved(), before)), "time")
    now, earlier = widths(time, "compute")
    assert earlier / now == pytest.approx(3, rel=0.01) and "before the last change" in time


def test_every_rank_has_its_bytes_by_kind():
    memory = section(predictions_html(Prediction(make_estimate(), resolved(), limit_bytes=400e6)), "memory")
    lengths = widths(memory, "memory-activations")
    assert len(lengths) == 4 and lengths[0] / lengths[2] == pytest.approx(2, rel=0.02)
    assert memory.count("200 MB</text>") == 2 and memory.count("100 MB</text>") == 2
    assert "limit 400 MB" in memory and 'class="limit"' in memory


def test_too_much_memory_is_said_in_numbers():
    memory = section(predictions_html(Prediction(make_estimate(), resolved(), limit_bytes=150e6)), "memory")
    assert 'class="memory over"' in memory and "50.0 MB too much" in memory
    assert memory.count("value limit") == 2, "the two ranks of the first stage"


def test_what_is_offloaded_is_said_beside_it():
    estimate = make_estimate(offloaded_bytes=30e6)
    memory = section(predictions_html(Prediction(estimate, resolved(), limit_bytes=150e6)), "memory")
    assert "50.0 MB too much, 30.0 MB offloaded" in memory
    memory = section(predictions_html(Prediction(estimate, resolved(), limit_bytes=400e6)), "memory")
    assert "30.0 MB offloaded" in memory and "too much" not in memory
    assert "offloaded" not in predictions_html(Prediction(make_estimate(), resolved()))


def test_a_limit_far_away_is_named_at_the_edge():
    memory = section(predictions_html(Prediction(make_estimate(), resolved(), limit_bytes=80e9)), "memory")
    assert "limit 80.0 GB \u2192" in memory and '<line class="limit"' not in memory


def two_stages(num_ranks: int) -> ResolvedStrategy:
    return resolved(f"blocks.[4-7]: data@1; ln_f: data@1; lm_head: data@1 | 2x{num_ranks // 2}x1", num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_few_ranks_have_a_bar_each(num_ranks: int):
    memory = section(predictions_html(Prediction(make_estimate(), two_stages(num_ranks))), "memory")
    assert len(widths(memory, "memory-parameters")) == num_ranks
    assert "cell" not in memory


@pytest.mark.parametrize(("num_ranks", "cells", "each"), [(16, 16, "rank"), (64, 64, "rank"), (1024, 172, "6 ranks")])
def test_many_ranks_have_a_cell_each_whose_shade_is_their_bytes(num_ranks: int, cells: int, each: str):
    memory = section(predictions_html(Prediction(make_estimate(), two_stages(num_ranks), limit_bytes=150e6)), "memory")
    shades = re.findall(r"color-mix\(in srgb, var\(--wb-([a-z-]+)\) (\d+)%", memory)
    assert len(shades) == cells
    assert set(shades) == {("error", "100"), ("memory-parameters", "58")}, "the first stage is over the limit"
    assert f"one cell per {each}," in memory
    assert "200 MB</text>" in memory
    assert "100 MB</text>" in memory
    assert len(widths(memory, "memory-activations")) == 1, "the fullest rank by kind"


def test_cells_of_many_stages_share_rows():
    layers = gpt(24).layers
    text = "; ".join(f"blocks.{n}: data@{n // 2}" for n in range(24)) + "; ln_f: data@11; lm_head: data@11 | 12x2x1"
    strategy = Strategy(text).resolve(layers, 24)
    memory = section(predictions_html(Prediction(make_estimate(num_stages=12), strategy)), "memory")
    assert re.findall(r">(st[^<]*)</text>", memory) == [f"st. {n}-{n + 1}" for n in range(0, 12, 2)]


def test_exchanges_stand_at_the_end_of_their_action():
    timeline = make_estimate().timeline
    assert timeline is not None
    rows = timeline_rows(timeline, resolved(), 400, shares=((0.25, 0.5), (0.0, 0.1)))
    first = {bar.kind: bar for bar in reversed(rows[0].bars)}
    assert first["F"].boxing == pytest.approx(first["F"].width / 4)
    assert first["B"].boxing == pytest.approx(first["B"].width / 2)
    assert "boxing" in first["F"].tip
    assert all(bar.boxing == 0 for bar in rows[1].bars if bar.kind == "F")


def test_the_timeline_has_a_bar_per_action_and_numbers_where_they_fit():
    timeline = make_estimate().timeline
    assert timeline is not None
    rows = timeline_rows(timeline, resolved(), width=400)
    assert [row.label for row in rows] == ["stage 0", "stage 1"] and rows[1].ranks == (2, 3)
    assert [len(row.bars) for row in rows] == [8, 8]
    first = rows[0].bars[0]
    assert (first.kind, first.text, first.left) == ("F", "0", 0) and "F0" in first.tip
    assert rows[0].bars[-1].left + rows[0].bars[-1].width == pytest.approx(400)
    thin = timeline_rows(timeline, resolved(), width=40)
    assert {bar.text for row in thin for bar in row.bars} == {""}


def test_thousands_of_actions_become_few_bars():
    timeline = make_estimate(num_micro_batches=1000).timeline
    assert timeline is not None
    rows = timeline_rows(timeline, resolved(), width=428)
    assert sum(len(row.bars) for row in rows) < 2 * 2 * 428


def test_pictures_have_words_for_those_who_do_not_see_them():
    html = predictions_html(Prediction(make_estimate(), resolved()))
    labels = re.findall(r'aria-label="([^"]*)"', html)
    assert len(labels) == 3 and all(label.startswith(("predicted", "simulated")) for label in labels)


def test_copies_on_one_page_have_hatchings_of_their_own():
    prediction = Prediction(make_estimate(), resolved())
    assert "wb-idle-static" in predictions_html(prediction, "static")
    assert "wb-idle-static" not in predictions_html(prediction)


@pytest.mark.parametrize(
    ("largest", "marks"),
    [
        (1.96, [0, 0.5, 1, 1.5]),
        (100, [0, 25, 50, 75, 100]),
        (7, [0, 2, 4, 6]),
        (3e-13, [0, 1e-13, 2e-13, 3e-13]),
        (1e7, [0, 2.5e6, 5e6, 7.5e6, 1e7]),
    ],
)
def test_ticks_are_round(largest: float, marks: list[float]):
    assert Axis(0.0, largest, 40.0, 338.0).ticks() == marks


def test_the_predictor_says_what_is_missing():
    strategy = resolved()
    assert "wb.planner.calibrate" in str(Predictor(None, 32).predict(strategy, is_old=False))
    predictor = Predictor("v100-dgx1", 32)
    assert "counting" in str(predictor.predict(strategy, is_old=False))
    predictor.costs = gpt()
    found = predictor.predict(strategy, is_old=False)
    assert isinstance(found, Prediction) and found.before is None
    other = predictor.predict(resolved("data"), is_old=False)
    assert isinstance(other, Prediction) and other.before == found.estimate


def test_what_cannot_be_predicted_is_said_instead():
    predictor = Predictor("v100-dgx1", 32)
    predictor.costs = gpt()
    assert "bf16" in str(predictor.predict(resolved("data | bf16"), is_old=False))
