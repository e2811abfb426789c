"""The controls above the grid: presets and undo, degrees and options, the strategy as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from html import escape
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from workbench.core.offload_kinds import CHOICES
from workbench.core.options import PRECISIONS, SCHEDULES
from workbench.core.presets import PRESETS, preset_name
from workbench.core.strategy import Mistake
from workbench.session.output.kept_messages import keep_messages
from workbench.ui import page_restore
from workbench.ui.assets import element
from workbench.ui.failures import guarded
from workbench.ui.shown_in_cells import show_in_this_cell
from workbench.ui.strategy.choices import Degrees
from workbench.ui.strategy.edit_rows import clauses
from workbench.ui.strategy.fixes import can_apply
from workbench.ui.strategy.state import PLANNED, PanelState
from workbench.ui.tabs import TERMS

PLANNING = "planning\u2026"
_TIMES = "\u00d7"
_LARGEST = 2**53 - 1
"""Of the whole numbers that a page knows."""
_PRESET_TIPS = {
    "data": "every rank has the whole model and a part of the batch",
    "model": "linear layers, embeddings, convolutions, attention and experts are split over the ranks",
    "pipeline": "the model is cut into stages, one per rank",
    "hybrid": "the first half of the layers data, the second half model parallel",
}
_OFFLOAD = (("none", ""), *((choice if "+" not in choice else "both", choice) for choice in CHOICES))
_RECOMPUTE = (("none", ""), ("cheap", "cheap"), ("attention", "attention"), ("full", "full"))


def button(description: str, on_click: Callable[[], None], *css: str, **traits: Any) -> widgets.Button:
    """A button in the panel's style."""
    made = widgets.Button(description=description, **traits)
    made.on_click(guarded(lambda _: on_click()))
    for name in css:
        made.add_class(name)
    return made


def on_value(control: widgets.Widget, handler: Callable[[Any], None]) -> None:
    """Call ``handler`` on every change of a control's value, by the user or by Python."""
    control.observe(guarded(handler), "value")


def html(text: str = "", *css: str) -> widgets.HTML:
    """A widget of HTML with CSS classes."""
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


class LateBox(widgets.VBox):
    """A box that gets its children later. They exist from the beginning, as its ``later``."""

    def __init__(self, later: Sequence[widgets.Widget]) -> None:
        super().__init__()
        self.later = tuple(later)


def display_widget(widget: widgets.Widget) -> None:
    """Display a widget that a static copy follows.

    Without a kernel only the copy has text: that of the widget would be from the time when it was first shown.
    """
    keep_messages()
    page_restore.install()
    show_in_this_cell(widget)
    display(widget._repr_mimebundle_() | {"text/plain": ""}, raw=True)  # without any, nbconvert warns


def label(text: str, *css: str) -> widgets.HTML:
    """A grey label in front of a field."""
    return html(f'<span class="wb-quiet">{escape(text)}</span>', *css)


def field(text: str, control: widgets.Widget) -> widgets.HBox:
    """A control with its label and its tip; they stay together when the bar wraps."""
    control.tooltip = TERMS[text]
    return bar(label(text), control, css=("wb-field",))


class Controls:
    """All bars above the grid. ``run``, ``problems`` and ``ended`` are in none of them, so that they can stay in sight:
    ``ended`` says why no run can begin any more.

    Args:
        edit: called with a function of the state for each edit of the user.
        run: starts a run.
        plan: loads the planner's choice into the panel.
        facts: model, parameters, batch.
        beside: more buttons behind the text.
        apply: the button that changes a run to the strategy.
    """

    def __init__(
        self,
        edit: Callable[[Callable[[PanelState], None]], None],
        run: Callable[[], None],
        plan: Callable[[], None],
        facts: str,
        *beside: widgets.Button,
        apply: widgets.Button | None = None,
    ) -> None:
        self._edit, self.apply = edit, apply
        self._refreshing = False
        self.presets = {
            name: button(name, partial(edit, partial(PanelState.set_preset, name=name))) for name in PRESETS
        }
        self.planned = button(PLANNED, plan)
        self.undo = self._icon("undo", "Undo (Ctrl+Z in the grid)", PanelState.undo)
        self.redo = self._icon("repeat", "Redo (Ctrl+Shift+Z in the grid)", PanelState.redo)
        self.problems = html()
        self.ended = html()
        self.run = button("Run", run, "wb-primary", "wb-run", icon="play")
        self.degrees = {name: _number(1) for name in ("pipeline", "data", "model")}
        self.sum = html()
        self.micro_batches = _number(1)
        self.schedule = widgets.Dropdown(options=SCHEDULES, layout={"width": "124px"})
        self.zero = widgets.Dropdown(options=(0, 1, 2, 3), layout={"width": "46px"})
        self.shards, self.context = _number(0), _number(1)
        self.recompute = widgets.Dropdown(options=_RECOMPUTE, layout={"width": "88px"})
        self.offload = widgets.Dropdown(options=_OFFLOAD, layout={"width": "88px"})
        self.sequence = widgets.Checkbox(description="sequence", indent=False, tooltip=TERMS["sequence"])
        self.overlap = _number(1)
        self.precision = widgets.Dropdown(options=PRECISIONS, layout={"width": "62px"})
        self.options: dict[str, widgets.Widget] = {
            "num_micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "zero": self.zero,
            "shards": self.shards,
            "context": self.context,
            "recompute": self.recompute,
            "offload": self.offload,
            "sequence": self.sequence,
            "overlap": self.overlap,
            "precision": self.precision,
        }
        self.text = widgets.Text(continuous_update=False, layout={"width": "auto"})
        self.pieces = html("", "wb-pieces")
        self.copy = button("Copy", lambda: None, "wb-copy", tooltip="copy the text; wb.Strategy(text) reads it")
        self.mistakes = html("", "wb-mistake-list")
        self._observe()
        self.bars = self._lay_out(facts, beside)

    def _icon(self, icon: str, tooltip: str, action: Callable[[PanelState], None]) -> widgets.Button:
        return button("", lambda: self._edit(action), "wb-icon", icon=icon, tooltip=tooltip)

    def _observe(self) -> None:
        self.text.add_class("wb-text")
        for number in self.degrees.values():
            on_value(number, self._on_degrees)
        for name, control in self.options.items():
            on_value(control, lambda change, name=name: self._on_option(**{name: change["new"]}))  # type: ignore[misc]
        on_value(self.text, lambda change: self._on_user(lambda state: state.set_text(change["new"])))

    def _lay_out(self, facts: str, beside: tuple[widgets.Button, ...]) -> list[widgets.Widget]:
        pipeline, data, model = self.degrees.values()
        presets = bar(*self.presets.values(), self.planned, css=("wb-group",))
        history = bar(self.undo, self.redo, css=("wb-group",))
        degrees = bar(
            *(label("pipeline"), pipeline, label(_TIMES), label("data"), data),
            *(label(_TIMES), label("model"), model, self.sum),
            css=("wb-field",),
        )
        parts = bar(field("micro-batches", self.micro_batches), field("schedule", self.schedule), css=("wb-field",))
        data = (field("ZeRO", self.zero), field("shards", self.shards), field("context", self.context))
        memory = (field("recompute", self.recompute), field("offload", self.offload))
        form = (field("overlap", self.overlap), self.sequence, field("precision", self.precision))
        options = (bar(*controls, css=("wb-field",)) for controls in (data, memory, form))
        groups = (degrees, parts, *options)  # controls of one group wrap together
        text = bar(self.text, self.pieces, css=("wb-text-field",))
        return [
            bar(presets, history, html("", "wb-space"), label(facts, "wb-facts")),
            bar(*groups, css=("wb-bar", "wb-wrap")),
            bar(label("as text"), text, self.copy, *beside),
            self.mistakes,
        ]

    def _on_user(self, action: Callable[[PanelState], None]) -> None:
        """Edit, unless the change comes from ``refresh``."""
        if not self._refreshing:
            self._edit(action)

    def _on_degrees(self, _change: Any) -> None:
        numbers = [number.value for number in self.degrees.values()]
        self._on_user(lambda state: state.set_degrees(Degrees(*numbers)))

    def _on_option(self, **changes: Any) -> None:
        self._on_user(lambda state: state.set_options(**changes))

    def refresh(self, state: PanelState, busy: bool, no_plan: str = "", no_run: str = "") -> None:
        """Show ``state``.

        Args:
            busy: whether a run holds the engines, so that none can be started.
            no_plan: the reason why the planner has no choice; empty if it has.
            no_run: the reason why the panel cannot run at all; empty if it can.
        """
        self._refreshing = True
        try:
            self._show_presets(state, no_plan)
            self._show_degrees(state)
            self._show_options(state)
            self._show_text(state)
            self._show_problems(state, busy, no_run)
        finally:
            self._refreshing = False

    def _show_presets(self, state: PanelState, no_plan: str) -> None:
        for name, preset in [*self.presets.items(), (PLANNED, self.planned)]:
            on = name == (preset_name(state.base) or state.base)
            preset.description = state.label if on else name
            (preset.add_class if on else preset.remove_class)("wb-on")
            if name == PLANNED and no_plan == PLANNING:
                preset.description = PLANNING
            reason = no_plan if name == PLANNED else state.presets[name]
            tip = "the fastest strategy that fits into memory" if name == PLANNED else _PRESET_TIPS[name]
            preset.disabled, preset.tooltip = bool(reason), reason or tip
        self.undo.disabled, self.redo.disabled = not state.can_undo, not state.can_redo

    def _show_degrees(self, state: PanelState) -> None:
        degrees = state.written_degrees
        for name, number in self.degrees.items():
            number.value = getattr(degrees, name)
        ranks = state.options.num_ranks or degrees.num_ranks
        fits = ranks == state.num_ranks
        text = f"= {ranks} ranks \u2713" if fits else f"= {ranks} ranks, but there are {state.num_ranks}"
        self.sum.value = f'<span class="{"wb-sum" if fits else "wb-wrong-sum"}">{text}</span>'

    def _show_options(self, state: PanelState) -> None:
        recompute = state.options.recompute
        blocks = [(f"{recompute} blocks", recompute)] if recompute.isdecimal() else []
        self.recompute.options = (*_RECOMPUTE, *blocks)
        for name, control in self.options.items():
            value = getattr(state.options, name)
            control.value = "1f1b" if name == "schedule" and not value else value
        self.schedule.disabled = state.written_degrees.pipeline == 1
        self.shards.disabled = not state.options.zero

    def _show_text(self, state: PanelState) -> None:
        self.text.value = state.text
        wrong = [mistake.layer for mistake in state.mistakes if mistake.layer is not None]
        pieces = clauses(state.text, wrong, state.layers)
        self.pieces.value = "".join(f'<span class="{role}">{escape(text)}</span>' for text, role in pieces)
        (self.text.add_class if state.num_problems else self.text.remove_class)("wb-wrong")

    def _show_problems(self, state: PanelState, busy: bool, no_run: str) -> None:
        count = state.num_problems
        problems = f"{count} problem{'s' if count > 1 else ''}"
        chip = (
            f'<button class="wb-chip error wb-problem" title="go to the next one (E in the grid)">{problems}</button>'
        )
        self.problems.value = chip if count else ""
        lines = [element("div", text=state.text_problem)] if state.text_problem else []
        lines += [_mistake_line(mistake) for mistake in state.mistakes if mistake.layer is None]
        self.mistakes.value = element("div", *lines, css="wb-mistakes") if lines else "" if count else _hints(state)
        reason = f"fix {problems} first" if count else no_run
        self.run.disabled = busy or bool(reason)
        waits = "a run holds the engines" if busy else "train with this strategy (Alt+Enter)"
        self.run.tooltip = reason or waits
        if self.apply is not None:
            self.apply.disabled = bool(reason)
            self.apply.tooltip = reason or "go on with this strategy and the same weights"


def _number(smallest: int) -> widgets.BoundedIntText:
    """A field for whole numbers, with room for all digits. The text of a strategy has no limit either."""
    made = widgets.BoundedIntText(value=smallest, min=smallest, max=_LARGEST)
    widgets.dlink((made, "value"), (made.layout, "width"), lambda number: f"{max(46, 14 + 8 * len(str(number)))}px")
    return made


def _hints(state: PanelState) -> str:
    """Settings of the strategy without effect, each with its fix."""
    lines = [
        element("div", element("span", text=f"{hint.message}: {hint.reason}."), _fix(hint.fix))
        for hint in state.hints
        if hint.layer is None
    ]
    return element("div", *lines, css="wb-hints") if lines else ""


def _fix(fix: str) -> str:
    """A fix as a button, or as text where only the user can make it."""
    return element("button", text=fix, css="fix", data_fix=fix) if can_apply(fix) else element("span", text=fix)


def _mistake_line(mistake: Mistake) -> str:
    """A mistake that belongs to no row, with its fixes."""
    return element("div", element("span", text=mistake.message), *map(_fix, mistake.fixes[:2]))
