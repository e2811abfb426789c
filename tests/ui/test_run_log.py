"""The log: changes, progress now and then, and who kept the others waiting."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.ui.reports import block
from workbench.core.metrics import RunEvent
from workbench.ui.live.run_log import MAX_LINES, RunLog
from workbench.ui.live.run_view import RunView


@pytest.fixture
def log() -> RunLog:
    return RunLog(now=lambda: datetime(2026, 11, 22, 14, 2, 41, tzinfo=UTC))


def texts(log: RunLog) -> list[str]:
    return [line.text for line in log.lines]


def test_a_change_says_what_moved(log: RunLog):
    log.add_event(RunEvent("strategy", 300, "*: model", 0.3, 0), "data", "hybrid")
    log.add_event(RunEvent("strategy", 400, "*: model", 0.3, 2_000_000), "hybrid", "data")
    assert "step 300 \u00b7 strategy data \u2192 hybrid" in texts(log)[0] and "every slice was local" in texts(log)[0]
    assert "2.00 MB moved, 300 ms" in texts(log)[1]
    assert log.lines[0].time == "14:02:41" and log.lines[0].who == "all"


def test_pauses_and_refusals_are_logged(log: RunLog):
    for kind in ("paused", "running", "refused"):
        log.add_event(RunEvent(kind, 5, "no layer matches"))
    assert texts(log) == [
        "step 5 \u00b7 paused",
        "step 5 \u00b7 goes on",
        "step 5 \u00b7 strategy kept: no layer matches",
    ]
    assert log.lines[2].warns


def test_progress_is_logged_every_ten_seconds(log: RunLog):
    for second in range(25):
        log.add_block(block(second * 10, (1.5,) * 10), float(second))
    assert texts(log) == [f"step {step} \u00b7 loss 1.5 \u00b7 500 samples/s" for step in (10, 110, 210)]


def test_a_loss_that_is_no_number_is_said_once(log: RunLog):
    log.add_block(block(0, (1.0, 1e33)), 0.0)
    log.add_block(block(2, (2.0, float("inf"), float("nan"))), 0.5)
    log.add_block(block(5, (float("nan"),)), 1.0)
    assert [line.text for line in log.lines if line.warns] == [
        "step 4 \u00b7 the loss is inf: a smaller learning rate may help, and wb.debug.find_nonfinite names the layer"
    ]


def test_a_step_of_unknown_length_says_no_rate(log: RunLog):
    log.add_block(block(0, (2.0,), time_s=(0.0, 0.0)), 0.0)
    assert texts(log) == []
    log.add_block(block(1, (1.5,)), 0.3)
    assert texts(log) == ["step 2 \u00b7 loss 1.5 \u00b7 500 samples/s"]


def test_the_rate_does_not_take_a_short_batch_for_all(log: RunLog):
    log.add_block(replace(block(0, (1.0,) * 3), samples=(128, 128, 1)), 0.0)
    assert texts(log) == ["step 3 \u00b7 loss 1 \u00b7 640 samples/s"]


def test_a_changed_strategy_is_not_measured_by_the_one_before(log: RunLog):
    log.add_block(block(0, (1.0,) * 40, time_s=(0.01,) * 4, boxing_s=(0.0,) * 4), 0.0)
    log.add_event(RunEvent("strategy", 40, "*: model"), "data", "model")
    log.add_block(block(40, (1.0,) * 5, time_s=(0.2,) * 4, boxing_s=(0.0, 0.15, 0.15, 0.15)), 20.0)
    assert texts(log)[-1] == "step 45 \u00b7 loss 1 \u00b7 500 samples/s"
    assert not any(line.warns for line in log.lines), "no rank is slow: all steps of this strategy take as long"


def test_a_rank_that_keeps_the_others_waiting_is_named(log: RunLog):
    log.add_block(block(0, (1.0,) * 10, time_s=(0.1,) * 4, boxing_s=(0.01,) * 4), 0.0)
    log.add_block(block(10, (1.0,), time_s=(1.2,) * 4, boxing_s=(0.01, 0.01, 1.1, 1.1)), 0.5)
    slow = log.lines[-1]
    assert slow.warns and slow.who == "2-3" and "step 11 \u00b7 waited 1.09 s for rank 0" in slow.text


def test_a_step_that_is_slow_for_all_is_nobodys_fault(log: RunLog):
    log.add_block(block(0, (1.0,) * 10, time_s=(0.1,) * 4, boxing_s=(0.01,) * 4), 0.0)
    log.add_block(block(10, (1.0,), time_s=(1.2,) * 4, boxing_s=(0.01,) * 4), 0.5)
    assert not any(line.warns for line in log.lines)


def test_only_the_last_lines_are_kept_and_all_are_counted(log: RunLog):
    for number in range(MAX_LINES + 50):
        log.say(f"line {number} <b>")
    assert len(log.lines) == MAX_LINES and log.count == MAX_LINES + 50
    assert "line 249 &lt;b&gt;" in log.html()
    short = log.head_and_tail(4)
    assert [line.text for line in short][2] == "\u2026 246 lines \u2026" and len(short) == 5


def test_ranks_can_be_chosen_in_the_log():
    view = RunView(4)
    view.begin("data", "*: data", 10)
    view.log.say("only us", [1, 2, 3], warns=True)
    for rank in range(4):
        view.log_section.ranks.value = str(rank)
        assert ("only us" in view.log_section.lines.value) == (rank > 0)
        assert "data: *: data" in view.log_section.lines.value, "it is about all ranks"


def test_a_log_that_is_not_followed_stands_still():
    view = RunView(2)
    view.begin("data", "*: data", 10)
    view.log.say("one")
    view.draw(everything=True)
    view.log_section.follow.value = False
    view.log.say("two")
    view.draw(everything=True)
    assert "two" not in view.log_section.lines.value and "1 new" in view.log_section.count.value
    view.log_section.follow.value = True
    assert "two" in view.log_section.lines.value and "new" not in view.log_section.count.value
