"""The panel's tabs, and the bar that stays in sight."""

from __future__ import annotations

from tests.timeouts import WAIT_TIMEOUT_S
from tests.ui.reports import FakeTrainer
from workbench.ui.panel import Panel
from workbench.ui.tabs import TERMS


def test_the_page_shows_where_something_begins(panel: Panel, trainer: FakeTrainer):
    tabs = panel.tabs
    assert tabs.chosen == "strategy"
    panel._editor.controls.run.click()
    assert (tabs.chosen, tabs.num_answers) == ("live", 1)
    panel._runs_section.change()
    assert tabs.chosen == "strategy", "where another one is chosen"
    panel.apply()
    assert tabs.chosen == "live"
    tabs.chosen = "compare"
    trainer.runs[-1].ended.set()
    assert panel.wait(WAIT_TIMEOUT_S)
    assert tabs.chosen == "compare", "the end of a run takes nobody away from what he reads"
    assert tabs.names["compare"] == "Compare (1)"
    panel.load("*: model")
    assert tabs.chosen == "strategy"


def test_a_click_on_run_is_answered_also_where_it_fails(panel: Panel, trainer: FakeTrainer, monkeypatch):
    def start(*_: object, **__: object) -> None:
        raise RuntimeError("no engines")

    monkeypatch.setattr(trainer, "start", start)
    panel._editor.controls.run.click()
    assert panel.tabs.num_answers == 1 and "no engines" in panel._runs_section.live.failure.value


def test_run_and_the_state_stay_in_sight(panel: Panel):
    stays, status = panel.children[0], panel._runs_section.live.status
    assert "wb-stays" in stays._dom_classes
    there = {child for bar in stays.children for child in getattr(bar, "children", ())}
    assert {panel._editor.controls.run, panel._editor.controls.problems, *status.parts} <= there


def test_fields_have_the_words_of_the_legend_as_tips(panel: Panel):
    controls = panel._editor.controls
    assert controls.sequence.tooltip == TERMS["sequence"] and controls.zero.tooltip == TERMS["ZeRO"]
    assert panel._editor.machine.sliders["flops"].tooltip == TERMS["products"]
