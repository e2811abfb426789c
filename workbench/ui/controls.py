"""The bars above the grid: presets and undo, degrees and options, the strategy as text. Widgets in, calls out."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from workbench.core.presets import PRESETS
from workbench.ui.placing import Degrees
from workbench.ui.state import PanelState

SCHEDULES = ("1f1b", "gpipe")


def button(description: str, on_click: Callable[[], None], *css: str, **traits: Any) -> widgets.Button:
    """A button in the panel's style."""
    made = widgets.Button(description=description, **traits)
    made.on_click(lambda _: on_click())
    for name in css:
        made.add_class(name)
    return made


def html(text: str = "", *css: str) -> widgets.HTML:
    """A piece of HTML with classes."""
    made = widgets.HTML(text)
    for name in css:
        made.add_class(name)
    return made


def bar(*children: widgets.Widget, css: tuple[str, ...] = ("wb-bar",)) -> widgets.HBox:
    """One row of controls."""
    made = widgets.HBox(children)
    for name in css:
        made.add_class(name)
    return made


def label(text: str) -> widgets.HTML:
    """A quiet label in front of a field."""
    return html(f'<span class="wb-quiet">{escape(text)}</span>')


class Controls:
    """All bars above the grid. ``edit`` is called with a function of the state for everything the user does here."""

    def __init__(
        self, edit: Callable[[Callable[[PanelState], None]], None], run: Callable[[], None], facts: str
    ) -> None:
        self._edit = edit
        self._refreshing = False
        self.presets = {name: self._preset_button(name) for name in PRESETS}
        self.undo = self._icon("undo", "Undo (Ctrl+Z in the grid)", PanelState.undo)
        self.redo = self._icon("repeat", "Redo (Ctrl+Shift+Z in the grid)", PanelState.redo)
        self.problems = html()
        self.run = button("Run", run, "wb-primary", icon="play")
        self.degrees = {name: self._number(1, 4096) for name in ("pipeline", "data", "model")}
        self.sum = html()
        self.micro_batches = self._number(1, 4096)
        self.schedule = widgets.Dropdown(options=SCHEDULES, layout={"width": "78px"})
        self.text = widgets.Text(continuous_update=False, layout={"width": "auto"})
        self.mistakes = html("", "wb-mistake-list")
        self._observe()
        self.bars = self._lay_out(facts)

    def _preset_button(self, name: str) -> widgets.Button:
        return button(
            name, lambda: self._edit(lambda state: state.set_preset(name)), tooltip=f"start from the preset {name}"
        )

    def _icon(self, icon: str, tooltip: str, action: Callable[[PanelState], None]) -> widgets.Button:
        return button("", lambda: self._edit(action), "wb-icon", icon=icon, tooltip=tooltip)

    @staticmethod
    def _number(smallest: int, largest: int) -> widgets.BoundedIntText:
        return widgets.BoundedIntText(value=1, min=smallest, max=largest, layout={"width": "52px"})

    def _observe(self) -> None:
        self.text.add_class("wb-text")
        for field in self.degrees.values():
            field.observe(self._on_degrees, "value")
        self.micro_batches.observe(lambda change: self._on_option(num_micro_batches=change["new"]), "value")
        self.schedule.observe(lambda change: self._on_option(schedule=change["new"]), "value")
        self.text.observe(lambda change: self._on_user(lambda state: state.set_text(change["new"])), "value")

    def _lay_out(self, facts: str) -> list[widgets.Widget]:
        times = "\u00d7"
        pipeline, data, model = self.degrees.values()
        title = html('<span class="wb-title">Strategy</span>')
        presets = bar(*self.presets.values(), css=("wb-group",))
        history = bar(self.undo, self.redo, css=("wb-group",))
        return [
            bar(title, presets, history, html("", "wb-space"), self.problems, self.run),
            bar(
                *(
                    label("pipeline"),
                    pipeline,
                    label(times),
                    label("data"),
                    data,
                    label(times),
                    label("model"),
                    model,
                    self.sum,
                ),
                *(label("micro-batches"), self.micro_batches, label("schedule"), self.schedule),
                *(html("", "wb-space"), label(facts)),
            ),
            bar(label("as text"), self.text),
            self.mistakes,
        ]

    def _on_user(self, action: Callable[[PanelState], None]) -> None:
        """Edit, unless the change is only the state being shown."""
        if not self._refreshing:
            self._edit(action)

    def _on_degrees(self, _change: Any) -> None:
        numbers = [field.value for field in self.degrees.values()]
        self._on_user(lambda state: state.set_degrees(Degrees(*numbers)))

    def _on_option(self, **changes: Any) -> None:
        self._on_user(lambda state: state.set_options(**changes))

    def refresh(self, state: PanelState, busy: bool) -> None:
        """Show ``state``; while a run holds the engines nothing can be started."""
        self._refreshing = True
        try:
            self._show_presets(state)
            self._show_fields(state)
            self._show_problems(state, busy)
        finally:
            self._refreshing = False

    def _show_presets(self, state: PanelState) -> None:
        for name, preset in self.presets.items():
            on = name == state.base
            preset.description = state.label if on else name
            (preset.add_class if on else preset.remove_class)("wb-on")
        self.undo.disabled, self.redo.disabled = not state.can_undo, not state.can_redo

    def _show_fields(self, state: PanelState) -> None:
        degrees = state.written_degrees
        for name, field in self.degrees.items():
            field.value = getattr(degrees, name)
        fits = degrees.num_ranks == state.num_ranks
        text = f"= {degrees.num_ranks} ranks \u2713" if fits else f"= {degrees.num_ranks}, but {state.num_ranks} ranks"
        self.sum.value = f'<span class="{"wb-sum" if fits else "wb-wrong-sum"}">{text}</span>'
        self.micro_batches.value = state.options.num_micro_batches
        schedule = state.options.schedule or SCHEDULES[0]
        self.schedule.value = schedule if schedule in SCHEDULES else None
        self.schedule.disabled = degrees.pipeline == 1
        self.text.value = state.text
        (self.text.add_class if state.text_problem else self.text.remove_class)("wb-wrong")

    def _show_problems(self, state: PanelState, busy: bool) -> None:
        count = state.num_problems
        plural = "s" if count > 1 else ""
        self.problems.value = f'<span class="wb-chip error">{count} problem{plural}</span>' if count else ""
        unplaced = [str(mistake) for mistake in state.mistakes if mistake.layer is None]
        lines = [*([state.text_problem] if state.text_problem else []), *unplaced]
        self.mistakes.value = f'<div class="wb-mistakes">{escape(chr(10).join(lines))}</div>' if lines else ""
        self.run.disabled = busy or not state.can_run
        reason = (
            f"fix {count} problem{plural} first"
            if count
            else "a run holds the engines"
            if busy
            else "train with this strategy"
        )
        self.run.tooltip = reason
