"""The copy of a panel, and of a table of runs, shows in a saved notebook what its author has seen last."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from tests.ui.models import GPT_HYBRID, gpt
from tests.ui.reports import FakeTrainer, make_mlp
from workbench.core.metrics import RunRecord
from workbench.ui import static_copy
from workbench.ui.panel import Panel
from workbench.ui.runs.runs_view import show_runs
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.static_copy import StaticCopy


class Cell:
    """The output of a cell; ``page`` is the copy there, empty before it was written again."""

    def __init__(self, copy: StaticCopy) -> None:
        self.page = ""
        copy._handle = self

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        self.page = bundle["text/html"]

    def wait_until(self, holds: Callable[[str], object]) -> None:
        wait_until(lambda: self.page and holds(self.page), "the copy has followed")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_copy, "_DELAY_S", 0.0)


def step_time(html: str) -> str:
    found = re.search(r"predicted step time ([^:]+):", html)
    return found[1] if found else ""


def test_the_copy_has_the_predictions_of_the_machine_that_is_shown():
    offline = {"hardware": "v100-dgx1", "num_ranks": 4, "costs": gpt()}
    panel = Panel(make_mlp, (32, 64), strategy=GPT_HYBRID, batch_size=32, **offline)
    cell, editor, times = Cell(panel._copy), panel._editor, [step_time(panel._static_bundle()["text/html"])]
    for control, value in ((editor.machine.machine, "h200"), (editor.machine.sliders["flops"], 0.25)):
        control.value = value
        times.append(step_time(editor.predictions.value))
        cell.wait_until(lambda page: step_time(page) == times[-1])
    assert len(set(times)) == 3
    editor.learn(None, "they cannot be counted")
    cell.wait_until(lambda page: "they cannot be counted" in page)


def assert_followed(table: RunTable, cell: Cell) -> None:
    """The copy follows each action of the user in a table of runs, of which one is called data."""
    table.rename("data", "mine")
    cell.wait_until(lambda page: ">mine<" in page and "\u25b2" not in page)
    table.sort_by("peak_bytes")
    cell.wait_until(lambda page: "\u25b2" in page and 'class="chip"' not in page)
    table.set_baseline("data")
    cell.wait_until(lambda page: 'class="chip"' in page)
    table.selected = "data"
    table.hide()
    cell.wait_until(lambda page: ">mine<" not in page)
    table.show_all()
    cell.wait_until(lambda page: ">mine<" in page)
    table.filter_field.value = "memory < 1"
    cell.wait_until(lambda page: ">mine<" not in page)
    table.filter_field.value = ""
    cell.wait_until(lambda page: ">mine<" in page)


def test_the_copy_of_a_panel_has_the_table_of_runs_that_is_shown(panel: Panel, trainer: FakeTrainer):
    panel.run()
    trainer.runs[-1].ended.set()
    assert panel.wait(WAIT_TIMEOUT_S)
    assert_followed(panel._runs_section.table, Cell(panel._copy))


def test_the_copy_of_shown_runs_has_the_table_that_is_shown(runs: list[RunRecord]):
    view = show_runs(runs)
    cell = Cell(view._copy)
    assert_followed(view.table, cell)
    assert all(f">{run.name}<" in cell.page for run in runs if run.name != "data")


def test_a_copy_that_must_not_be_written_is_unchanged():
    is_busy = [True]
    copy = StaticCopy(lambda: {"text/html": "a page"}, lambda: bool(is_busy))
    cell = Cell(copy)
    copy.keep()
    copy.write()
    assert copy._timer is None and not cell.page
    is_busy.clear()
    copy.keep()
    cell.wait_until(lambda page: page == "a page")


def test_copies_in_several_cells_are_written_together(monkeypatch: pytest.MonkeyPatch):
    """That of the first cell stayed as it was when a second one showed the panel."""
    places: list[object] = []

    def display(bundle: object, raw: bool, display_id: object) -> SimpleNamespace:
        places.append(display_id)
        return SimpleNamespace(display_id="place" if display_id is True else display_id)

    monkeypatch.setattr(static_copy, "display", display)
    copy = StaticCopy(dict)
    copy.display()
    copy.display()
    assert places == [True, "place"]
