"""The live view without a kernel: one SVG that says what the figure said."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from tests.ui.conftest import make_record
from tests.ui.reports import block, spans
from workbench.core.metrics import RunEvent
from workbench.ui.live.figure_layout import BOTTOM, PANES_HEIGHT, TOP, WIDE
from workbench.ui.live.history import History
from workbench.ui.live.live_picture import live_picture
from workbench.ui.live.run_view import RunView

MEMORY = ({"parameters": 2_000_000, "peak": 4_000_000},) * 2


def texts(svg: str) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter("text")]


def test_all_parts_are_drawn_with_their_numbers():
    history = History(10, 2, "data")
    history.add([block(0, (2.0, 1.5), memory=MEMORY), spans(0), spans(1)])
    history.change(1, "<hybrid>")
    svg = live_picture(history, (2.0, 1.5, 1.0))
    found = texts(svg)
    assert any(text.startswith("Throughput") and "500 samples/s" in text for text in found)
    assert {"4.00 MB", "rank 0", "simulated", "F0", "data", "<hybrid>", "step 10"} <= set(found)
    assert any("measured 6.50 s" in text for text in found)
    assert f'height="{WIDE.height(2)}"' in svg


def test_the_loss_is_drawn_on_the_scale_that_was_chosen():
    history = History(10, 1)
    history.add([block(0, (100.0, 10.0, 1.0), time_s=(0.1,), boxing_s=(0.0,))])
    lines = list(ElementTree.fromstring(live_picture(history, log_loss=True)).iter("polyline"))
    heights = [float(point.split(",")[1]) for point in lines[-1].get("points").split()]
    assert heights[1] - heights[0] == heights[2] - heights[1], "each step is a tenth"
    assert "100" in texts(live_picture(history)) and "1.00" in texts(live_picture(history, log_loss=True))


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ((1.2, -0.4, -3.0), ("1.20", "-3.21")),
        ((-1.0, -3.0, -5.0), ("0", "-5.25")),
        ((-5.0, -5.0, -5.0), ("0", "-5.25")),
        ((2.0, 1.0, 0.0), ("2.00", "0")),
        ((0.0, 0.0, 0.0), ("1.00", "0")),
        ((-20000.0, -15000.0, -10000.0), ("0", "-21k")),
    ],
)
def test_negative_losses_stay_in_the_pane_and_larger_ones_are_higher(losses, ends):
    history = History(10, 1)
    history.add([block(0, losses, time_s=(0.1,), boxing_s=(0.0,))])
    svg = live_picture(history, losses)
    for line in list(ElementTree.fromstring(svg).iter("polyline"))[-2:]:
        heights = [float(point.split(",")[1]) for point in line.get("points").split()]
        assert all(TOP <= height <= PANES_HEIGHT - BOTTOM for height in heights)
        assert sorted(heights) == [height for _, height in sorted(zip(losses, heights, strict=True), reverse=True)]
        assert len(set(heights)) == len(set(losses))
    assert set(ends) <= {text.replace("\u2212", "-") for text in texts(svg)}


def test_ends_of_an_axis_near_zero_have_their_digits():
    history = History(10, 1)
    history.add([block(0, (4e-4, 2.5e-5), time_s=(0.1,), boxing_s=(0.0,))])
    assert {"0.0004", "2.5e-05"} <= set(texts(live_picture(history, log_loss=True)))


def test_one_step_is_a_dot():
    history = History(1, 1)
    history.add([block(0, (2.0,), time_s=(0.1,), boxing_s=(0.0,), num_steps=1)])
    dots = list(ElementTree.fromstring(live_picture(history, (2.0,))).iter("circle"))
    assert len(dots) == 4, "throughput, its median, one device, loss"
    assert all(TOP <= float(dot.attrib["cy"]) <= PANES_HEIGHT - BOTTOM for dot in dots)
    history.add([block(1, (1.0,), time_s=(0.1,), boxing_s=(0.0,), num_steps=2)])
    assert "<circle" not in live_picture(history, (2.0, 1.0))


def test_losses_that_are_no_numbers_are_left_out():
    history = History(10, 1)
    losses = (2.0, float("inf"), 1.0, float("nan"), float("nan"))
    history.add([block(0, losses, time_s=(0.1,), boxing_s=(0.0,))])
    for log_loss in (False, True):
        svg = live_picture(history, losses, log_loss=log_loss)
        lines = [line.get("points") or "" for line in ElementTree.fromstring(svg).iter("polyline")]
        assert lines and not any(word in line for line in lines for word in ("nan", "inf"))
        assert len(lines[-1].split()) == 2 and "2.00" in texts(svg)


def test_memory_of_no_kind_is_hatched_up_to_the_peak():
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=MEMORY)])
    assert live_picture(history).count("url(#wb-hatch)") >= 2


def test_the_limit_is_a_line_or_a_number_at_the_edge():
    history = History(10, 2)
    history.add([block(0, (2.0,), memory=MEMORY)])
    assert "limit 5.00 MB" in texts(live_picture(history, limit_bytes=5e6))
    assert "h200: 5.00 MB" in texts(live_picture(history, limit_bytes=5e6, machine="h200"))
    assert "limit 24.0 GB \u2192" in texts(live_picture(history, limit_bytes=24e9))
    assert not any("limit" in text for text in texts(live_picture(history)))


def test_before_a_timeline_is_known_the_panes_stand_alone():
    history = History(10, 1)
    history.add([block(0, (2.0,), time_s=(0.1,), boxing_s=(0.0,))])
    svg = live_picture(history)
    assert f'height="{PANES_HEIGHT}"' in svg and "Timeline" not in svg


def test_a_view_keeps_its_log_and_title_in_the_copy():
    view = RunView(2)
    assert view.static_html() == ""
    view.begin("data", "*: <data>", 10)
    view.add([block(0, (2.0,), memory=MEMORY), RunEvent("paused", 1)])
    view.finish(make_record("data"))
    copy = view.static_html()
    assert "*: &lt;data&gt;" in copy and "<svg" in copy and "step 1 \u00b7 paused" in copy and "<script" not in copy


def test_the_copy_of_a_run_that_failed_says_why():
    view = RunView(2)
    for messages in ([], [block(0, (2.0,), memory=MEMORY)]):
        view.begin("data", "*: data", 10)
        view.add(messages)
        view.fail(RuntimeError("no <room>\nat all"))
        line = view.log.lines[-1]
        assert (line.text, line.warns) == ("failed: RuntimeError: no <room>", True)
        copy = view.static_html()
        assert "failed: RuntimeError: no &lt;room&gt;" in copy and 'class="wb-failure"' in copy
        assert ("<svg" in copy) == bool(messages), "there is nothing to draw before the first step"
