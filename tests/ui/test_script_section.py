"""The panel's button Script: the text of the strategy, its file, and what has no script."""

from __future__ import annotations

import threading

import pytest
from torch.nn.functional import cross_entropy

from tests.timeouts import wait_until
from tests.ui.reports import FakeTrainer
from workbench.cli.demo import make_mlp
from workbench.errors import StrategyError
from workbench.ui.panel import Panel
from workbench.ui.script_section import ScriptSection


def written(section: ScriptSection) -> str:
    wait_until(lambda: section.page.text != "" and "writes" not in section.note.value, "the script is written")
    return section.page.text


@pytest.fixture
def section() -> ScriptSection:
    return ScriptSection(lambda library: f"# {library}\n")


def test_a_click_shows_the_script_and_another_hides_it(section: ScriptSection):
    assert not section.is_open and section.page.text == ""
    section.button.click()
    assert section.is_open and written(section) == "# workbench\n"
    section.library.value = "torch"
    wait_until(lambda: section.page.text == "# torch\n", "the other library")
    sent: list[tuple[str, str, str]] = []
    section.page.download = lambda *file: sent.append(file)
    section.save.click()
    assert sent == [("script.py", "# torch\n", "text/x-python")]
    section.button.click()
    assert not section.is_open and section.page.text == ""


def test_what_has_no_script_says_why(section: ScriptSection):
    def refuse(library: str) -> str:
        raise StrategyError("mb=4: no plan is written") if library == "torch" else KeyError("head")

    section = ScriptSection(refuse)
    section.toggle()
    assert written(section) == "KeyError: 'head'" and section.save.disabled and section.note.value == "no script:"
    section.library.value = "torch"
    wait_until(lambda: section.page.text == "mb=4: no plan is written", "the other error")


def test_a_script_that_comes_late_is_not_shown():
    may_end = threading.Event()
    section = ScriptSection(lambda library: library if library == "torch" else str(may_end.wait(20)))
    section.toggle()
    section.library.value = "torch"
    assert written(section) == "torch"
    may_end.set()
    wait_until(lambda: not any(t.name == "workbench-write-script" for t in threading.enumerate()), "both have ended")
    assert section.page.text == "torch"


def test_the_panel_s_script_is_of_its_strategy_and_its_job(trainer: FakeTrainer):
    panel = Panel(make_mlp, None, cross_entropy, trainer=trainer, keep=False, batch_size=32, steps=7, seed=5)
    panel.load("*: data")
    text = panel.script()
    assert '"*: data"' in text and "BATCH_SIZE = 32" in text and "STEPS = 7" in text and "SEED = 5" in text
    assert "from workbench.cli.demo import make_mlp as model_fn" in text and "FILL IN: dataset" in text
    section = panel._editor.script
    section.toggle()
    assert written(section) == text
    panel._editor.machine.ranks.value = 4
    assert panel.state.text == "*: data" and not section.is_open, "it was for 2 ranks"
    panel._editor.machine.ranks.value = 2
    section.toggle()
    panel.load("*: data | 1x2x1 zero=3")
    assert not section.is_open, "it was of another strategy"
    assert "zero=3" in panel.script() and "fully_shard" in panel.script("torch")


def test_text_that_does_not_parse_has_no_script_and_trains_nothing(panel: Panel, trainer: FakeTrainer):
    """The rows from before it were taken, without a word."""
    panel.load("*: dta")
    for use in (panel.run, panel.profile, panel.script, lambda: panel.strategy):
        with pytest.raises(StrategyError, match="dta"):
            use()
    panel._editor.script.toggle()
    assert "dta" in written(panel._editor.script) and panel._editor.script.save.disabled
    assert not trainer.runs and str(panel.state.strategy) == "*: data", "undo goes back to it"
    panel.load("*: model")
    assert str(panel.strategy) == "*: model"
