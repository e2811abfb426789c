"""The panel's Strategy tab: edits a strategy, and shows each rank's slices, the boxings and the predictions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import ipywidgets as widgets

from workbench.core.layer_extents import of_linear_layers, traced
from workbench.core.layer_plan import LayerPlan
from workbench.core.model_costs import ModelCosts
from workbench.core.presets import StrategyLike
from workbench.core.rows import Layer, Row
from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate, SentBytes
from workbench.cost.hardware import Hardware
from workbench.errors import SessionError, StrategyError, WorkbenchError
from workbench.planning.plan import Plan
from workbench.session.comparison.subject import function_name
from workbench.session.on_engine.tensor_html import tensor_html
from workbench.theme import Palette, palette
from workbench.ui.assets import element
from workbench.ui.controls import PLANNING, Controls, button, html
from workbench.ui.failures import guarded
from workbench.ui.grid.view import Facts, boxings_of, grid_view
from workbench.ui.grid.widget import LayerGrid
from workbench.ui.page_restore import as_request
from workbench.ui.planning.byte_counter import ByteCounter, Counter
from workbench.ui.planning.machine_bar import MachineBar
from workbench.ui.planning.planner_section import PlannerSection, Search, search_for
from workbench.ui.planning.prediction_pictures import no_predictions_html, predictions_html
from workbench.ui.planning.predictor import Predictor, counted
from workbench.ui.script_section import ScriptSection
from workbench.ui.strategy.fixes import apply_fix
from workbench.ui.strategy.state import PanelState


class StrategyEditor:
    """Connects the state with the bars, the grid and the predictions. ``children`` are the widgets, from the top.

    Args:
        layers: the layers of the model.
        num_ranks: the number of ranks of the strategy.
        strategy: the first strategy.
        facts: batch, shapes, loss.
        predictor: predicts step time and memory.
        title: model, parameters and batch as text.
        on_run: called for the button Run.
        on_theme: called when the page has another theme.
        search: finds the planner's choice.
        no_run: the reason why the panel cannot run at all; empty if it can.
        calibrate: measures the machine of the engines, for a panel without ``hardware``; None without engines.
        count: counts the bytes that a strategy sends; None leaves it at estimates.
        script: (library) -> the strategy as a script.
        apply: the button that changes a run to the strategy.
    """

    def __init__(
        self,
        layers: list[Layer],
        num_ranks: int,
        strategy: StrategyLike | None,
        facts: Facts,
        predictor: Predictor,
        *,
        title: str,
        on_run: Callable[[], None],
        on_theme: Callable[[Palette], None] = lambda colours: None,
        on_change: Callable[[], None] = lambda: None,
        search: Search = search_for,
        no_run: str = "",
        calibrate: Callable[[], Hardware] | None = None,
        count: Counter | None = None,
        script: Callable[[Any], str] = str,
        apply: widgets.Button | None = None,
    ) -> None:
        self._lock = threading.RLock()
        self.bytes = ByteCounter(count, guarded(self._show_change), self._is_busy) if count else None
        self.is_shown, self._last_valid = False, ("", 0)
        self._facts, self._predictor = facts, predictor
        self._on_run, self._on_theme, self._on_change, self._no_run = on_run, on_theme, on_change, no_run
        self._calibrate, self._is_measuring = calibrate, False
        self._selected = ""
        self._shows_tensor = False
        self._num_ranks = num_ranks
        self.busy: Callable[[], bool] = lambda: False
        self.has_calls: Callable[[], bool] = lambda: False
        self.state = PanelState(layers, num_ranks, strategy)
        self.script = ScriptSection(script)
        self.controls = Controls(self.edit, on_run, self.plan, title, self.script.button, apply=apply)
        self.grid = LayerGrid(self._on_event, view=self.view() | {"tensor": False})  # a slow page may miss a change
        self.tensor = html("", "wb-tensor-host")
        self.predictions = html("", "wb-predictions-host")
        on_ranks = lambda number: self.edit(partial(PanelState.set_num_ranks, num_ranks=number))  # noqa: E731
        self.machine = MachineBar(predictor, num_ranks, self._show_change, on_ranks)
        self.measure = button("Measure this machine", self.calibrate, "wb-measure")
        self.machine.which.children = [*self.machine.which.children, self.measure]
        self._in_thread = guarded(self._measure)
        self.planner = PlannerSection(predictor, self._take_plan, self._show_change, search)
        below = (self.machine.box, self.predictions, self.planner.box)
        self.children = [*self.controls.bars, self.script.box, self.grid, self.tensor, *below]
        self.refresh()

    # ---- what the panel asks ------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy that is shown, with its mistakes.

        Raises:
            StrategyError: its text does not parse.
        """
        if self.state.text_problem:
            raise StrategyError(self.state.text_problem)
        return self.state.strategy

    def wanted(self) -> tuple[Strategy, str]:
        """The strategy and its name, for each way to start a run.

        Raises:
            SessionError: the panel has no engines, or its session has other ones now.
            StrategyError: the text does not parse, the strategy has mistakes, all of which are listed, or it is for
                another number of ranks.
        """
        with self._lock:
            if self._no_run:
                raise SessionError(f"No run can begin: {self._no_run}")
            if self._other_ranks:
                raise StrategyError(f"panel.run(): {self._other_ranks}")
            strategy = self.strategy
            strategy.resolve(self.state.layers, self.state.num_ranks)
            return strategy, self.state.label

    def estimate(self) -> Estimate | None:
        """The prediction for the strategy on the present machine; None if there is none."""
        with self._lock:
            found = self._predictor.estimate(self.state.resolved, self._predictor.machine)
            return None if found is None else counted(found, self._counted_bytes())

    def open(self, text: str) -> None:
        """Load a strategy's text. Undo restores the strategy before it."""
        self.edit(lambda state: state.set_text(text))

    def learn(self, costs: ModelCosts | None, problem: str = "") -> None:
        """Take the costs of the model's layers, or the reason why they cannot be counted."""
        with self._lock:
            self._predictor.costs, self._predictor.problem = costs, problem
            self._show_change()

    def forbid_runs(self, why: str) -> None:
        """Refuse runs from now on, and show the reason."""
        with self._lock:
            self._no_run = why
            self.controls.ended.value = element("div", text=why, css="wb-section wb-quiet")
            self.refresh()

    def plan(self) -> None:
        """Load the planner's choice. A thread searches for it, which takes seconds for many ranks."""
        self.planner.ask(self.state.num_ranks, self.state.options.precision)

    def _take_plan(self, plan: Plan) -> None:
        """Load a plan, unless the ranks or the precision are others by now."""
        with self._lock:
            now = self.state.num_ranks, self.state.options.precision
            if (plan.problem.num_ranks, plan.problem.precision) == now:
                self.edit(lambda state: state.set_planned(plan.strategy))
            else:
                self._show_change()

    def calibrate(self) -> None:
        """Measure the machine in a thread, and predict for it afterwards."""
        if self._calibrate is not None and not self._is_measuring and not self.busy():
            self._is_measuring = True
            self.refresh()
            work = as_request(self._in_thread)
            threading.Thread(target=work, args=(self._calibrate,), name="workbench-calibrate", daemon=True).start()

    def _measure(self, calibrate: Callable[[], Hardware]) -> None:
        try:
            self.machine.adopt(calibrate())
        except WorkbenchError as error:
            self._predictor.no_machine = f"the machine could not be measured: {error}"
        finally:
            self._is_measuring = False
            self._show_change()

    def view(self) -> dict[str, Any]:
        """The content of the grid, also for the static copy."""
        return grid_view(self.state, self._facts_now())

    def predictions_html(self, ident: str = "live") -> str:
        """The pictures below the grid."""
        found = self._predictor.predict(self.state.resolved, not self.state.can_run, self._counted_bytes())
        return no_predictions_html(found) if isinstance(found, str) else predictions_html(found, ident)

    # ---- the user does something --------------------------------------------------------------------------------

    def edit(self, action: Callable[[PanelState], Any]) -> None:
        """Change the state and show it. A change that cannot be shown is undone."""
        with self._lock:
            try:
                with self.state.unless_it_fails():
                    before = self.state.text, self.state.num_ranks
                    action(self.state)
                    self.refresh()
                    if (self.state.text, self.state.num_ranks) != before:
                        self.script.close()  # it is of another strategy
            except Exception:
                self._show_controls()
                raise
        self._on_change()

    def _on_event(self, event: dict[str, Any]) -> None:
        """Handle an event of the grid: an edit, a chosen row, a request to run, or the page's theme."""
        kind, value, rows = str(event.get("event")), event.get("value"), event.get("rows", [])
        actions: dict[str, Callable[[PanelState], Any]] = {
            "choice": lambda state: state.set_choice(rows, str(value)),
            "stage": lambda state: state.set_stage(rows, int(value or 0)),
            "fix": lambda state: apply_fix(state, str(value), event.get("row")),
            "undo": PanelState.undo,
            "redo": PanelState.redo,
            "open": lambda state: state.set_text(str(value)),
        }
        if kind in actions:
            self.edit(actions[kind])
        elif kind == "theme":
            self._on_theme(palette(str(value)))
        elif kind == "run":
            if self.state.can_run and not self.busy() and not self._no_run_now:
                self._on_run()
        else:
            self._look(kind, value, rows)

    def _look(self, kind: str, value: Any, rows: list[str]) -> None:
        """Handle events that change the view but not the strategy."""
        with self._lock:
            if kind == "fold":
                self.state.fold(rows[0])
            elif kind == "find":
                self.state.look_for(str(value))
            elif kind == "tensor":
                self._shows_tensor = not self._shows_tensor
            elif kind == "select":
                self._selected = rows[0]
                self._show_tensor()
                self._show_plan()
                return
            self.grid.view = self.view() | {"tensor": self._shows_tensor}
            self._show_tensor()

    # ---- showing ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show the state in every part. Makes all pictures before it shows one."""
        with self._lock:
            self._count_bytes()
            view, predictions = self.view(), self.predictions_html()
            self.grid.view = view | {"tensor": self._shows_tensor}  # first: there the user has clicked
            self._show_controls()
            self.predictions.value = predictions
            self._show_measure()
            self._show_tensor()
            self._show_plan()

    def _show_controls(self) -> None:
        no_plan = PLANNING if self.planner.is_searching else self._predictor.missing
        self.controls.refresh(self.state, self.busy(), no_plan, self._no_run_now)
        self.machine.refresh(self.state.num_ranks, self.state.options.precision)

    @property
    def _other_ranks(self) -> str:
        """The reason why a strategy for the slider's ranks cannot be trained; empty if the session has these ranks."""
        wanted, there = self.state.num_ranks, self._num_ranks
        return "" if wanted == there else f"the strategy is for {wanted} ranks, but there are {there}"

    @property
    def _no_run_now(self) -> str:
        return self._no_run or self._other_ranks

    def _show_plan(self) -> None:
        self.planner.box.value = self.plan_html()

    def plan_html(self) -> str:
        """The present explanation of the plan; empty before there is one."""
        return self.planner.html(self.state.strategy, self.state.num_ranks, self._selected_layer())

    def _selected_layer(self) -> str:
        """The pattern of the selected row; empty for a block of different layers, for own parameters where its pattern
        covers the layers below, too, and if no row is selected.
        """
        row = next((row for row in self.state.rows if row.node.identity == self._selected), None)
        if row is None or row.node.children:
            return ""
        num_covered = sum(Row(row.node.pattern).matches(layer.name) for layer in self.state.layers)
        return row.node.pattern if num_covered == len(row.node.layers) else ""

    def _show_measure(self) -> None:
        """Show the button while it can do something."""
        useful = self._calibrate is not None and self.machine.own is None
        self.measure.layout.display = "" if useful else "none"
        self.measure.disabled = self._is_measuring or self.busy()
        self.measure.description = "Measuring\u2026" if self._is_measuring else "Measure this machine"
        self.measure.tooltip = "about 10 s on all engines; the panel then predicts each strategy"

    def _facts_now(self) -> Facts:
        """The facts with all shapes and bytes that are known so far."""
        costs, found = self._predictor.costs, self._counted_bytes()
        sent = found or self._predictor.sent(self.state.resolved)
        facts = replace(self._facts, sent=sent, is_counted=found is not None)
        if costs is None:
            return replace(facts, problem=self._predictor.problem)
        behind = [work.name for row in costs.rows[-1:] for work in row.after]
        is_known = facts.is_cross_entropy or "cross_entropy" in behind
        extents = traced(self.state.layers, costs.rows, costs.sample_shape)
        return replace(facts, extents=extents, is_cross_entropy=is_known)

    def _counted_bytes(self) -> SentBytes | None:
        """The bytes that the shown strategy sends; None if they have not been counted."""
        return None if self.bytes is None else self.bytes.known(*self._last_valid)

    def _count_bytes(self) -> None:
        """Count the strategy that is shown, or the last valid one, and end the count of another one."""
        if self.state.can_run:
            self._last_valid = str(self.state.strategy), self.state.num_ranks
        _, num_ranks = self._last_valid
        if self.bytes is not None and self.is_shown and num_ranks:
            self.bytes.ask(*self._last_valid)

    def _is_busy(self) -> bool:
        """Whether a run, a measurement or a call of the session needs the processors: none waits for a count."""
        return self.busy() or self._is_measuring or self.has_calls()

    def _show_change(self) -> None:
        """Show and report a change of anything but the strategy: the machine, bytes, costs, the plan."""
        self.refresh()
        self._on_change()

    def _show_tensor(self) -> None:
        self.tensor.value = self._tensor_html() if self._shows_tensor else ""

    def _tensor_html(self) -> str:
        rows = self.state.rows
        row = next((row for row in rows if row.node.identity == self._selected), rows[0] if rows else None)
        if row is None:
            return ""
        if row.node.children:
            names = ", ".join(child.label for child in row.node.children[:8])
            return element("div", element("span", text=f"unfold the row and choose a layer: {names}", css="wb-quiet"))
        index = row.node.layers[0]
        planned = boxings_of(self.state, self._facts_now()).layers[index]
        return tensors_html(planned, self.state.resolved.layers[index].stage)


def facts_of(
    layers: list[Layer], batch_size: int, sample_shape: tuple[int, ...], loss_fn: Callable[..., Any] | None
) -> Facts:
    """Facts about a model before its costs are known: shapes behind linear layers on flat samples."""
    loss = function_name(loss_fn)
    is_known = loss in ("cross_entropy", "CrossEntropyLoss")
    return Facts(batch_size, of_linear_layers(layers, sample_shape), loss, is_known)


_MAX_PARAMETERS = 2
_DTYPES = {1: "uint8", 2: "bfloat16", 4: "float32", 8: "float64", 16: "complex128"}
"""By bytes of an element, of which the costs of layers tell only the number."""


def tensors_html(planned: LayerPlan, stage: int) -> str:
    """Pictures of a layer's largest parameters and of its input."""
    layer = planned.layer
    largest = sorted(layer.shapes.items(), key=lambda item: -prod(item[1]))[:_MAX_PARAMETERS]
    parts = []
    for name, shape in largest:
        itemsize = layer.itemsize_of(name)
        picture = tensor_html(_DTYPES[itemsize], itemsize, shape, planned.parameters[name], hue=stage)
        parts.append(_titled(f"{layer.name}.{name}", picture))
    if planned.input_shape is not None:
        itemsize = planned.itemsize
        picture = tensor_html(_DTYPES[itemsize], itemsize, planned.input_shape, planned.input_layout, hue=stage)
        parts.append(_titled(f"what enters {layer.name}, one micro-batch", picture))
    return element("div", *parts, css="wb-tensors")


def _titled(title: str, picture: str) -> str:
    return element("div", element("div", text=title, css="wb-title"), picture)
