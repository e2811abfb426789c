"""A cell that runs again: what it showed before leaves the pages, and comes back where it is displayed once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
import pytest
from ipywidgets.widgets import widget as of_widgets

from workbench.ui import shown_in_cells
from workbench.ui.shown_in_cells import show_in_this_cell


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a cell of this name that displays these widgets."""
    monkeypatch.setattr(of_widgets, "_instances", {})
    monkeypatch.setattr(shown_in_cells, "_shown", {})
    number = iter(range(100))

    def run_cell(cell: str, *shown: widgets.Widget) -> None:
        request = {"header": {"msg_id": f"request {next(number)}"}, "metadata": {"cellId": cell} if cell else {}}
        shell: Any = type("Shell", (), {"get_parent": lambda self: request})()
        monkeypatch.setattr(shown_in_cells, "get_ipython", lambda: shell)
        for widget in shown:
            show_in_this_cell(widget)

    return run_cell


def panel() -> widgets.VBox:
    return widgets.VBox([widgets.HBox([widgets.Button(description="Run")])])


def num_known() -> int:
    return len(of_widgets._instances)


def test_a_cell_that_runs_again_leaves_no_widgets_behind(run: Any) -> None:
    run("a", panel())
    known = num_known()
    for _ in range(3):
        run("a", panel())
    assert num_known() == known


def test_what_was_shown_before_comes_back_as_it_was(run: Any) -> None:
    first = panel()
    button = first.children[0].children[0]
    name = first.model_id
    run("a", first)
    known = num_known()
    run("a", panel())
    assert [widget.comm for widget in (first, button, button.style)] == [None] * 3
    button.description = "Stop"
    run("b", first)
    assert first.model_id == name and num_known() == 2 * known
    assert first.get_state()["children"] == [f"IPY_MODEL_{first.children[0].model_id}"]
    assert button.comm is not None and button.description == "Stop"


def test_two_panels_of_one_cell_stay(run: Any) -> None:
    first, second = panel(), panel()
    run("a", first, second)
    assert first.comm is not None and second.comm is not None


@pytest.mark.parametrize("other_cell", ["b", ""])
def test_what_another_place_shows_too_stays(run: Any, other_cell: str) -> None:
    first = panel()
    run("a", first)
    run(other_cell, first)
    run("a", panel())
    assert first.comm is not None and first.children[0].comm is not None


def test_what_is_part_of_another_widget_stays(run: Any) -> None:
    first = panel()
    run("a", first)
    both = widgets.HBox([first])
    run("a", panel())
    assert both.children == (first,) and first.comm is not None


def test_a_widget_that_runs_again_itself_stays(run: Any) -> None:
    first = panel()
    for _ in range(2):
        run("a", first)
    assert first.comm is not None


def test_what_shares_a_part_keeps_it(run: Any) -> None:
    shared = widgets.Button()
    run("a", widgets.VBox([shared]))
    run("b", widgets.VBox([shared]))
    run("a", panel())
    assert shared.comm is not None


def test_requests_without_a_cell_leave_all_widgets(run: Any) -> None:
    first = panel()
    run("", first)
    run("", panel())
    assert first.comm is not None


def test_what_the_user_has_closed_is_not_kept(run: Any) -> None:
    first = panel()
    run("", first)
    first.close()
    run("", panel())
    assert all(first not in roots for _, roots in shown_in_cells._shown.values())
