"""``wb.Panel``: choose, see, run, compare. It ties the state, the grid, the bars and the live view together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import ipywidgets as widgets
from IPython.display import display

from workbench import theme
from workbench.core.metrics import RunRecord, StepMetrics
from workbench.core.strategy import Strategy
from workbench.ui.controls import Controls, html
from workbench.ui.grid import PANEL_CLASS, LayerGrid
from workbench.ui.live import LiveView
from workbench.ui.pump import Pump
from workbench.ui.state import PanelState
from workbench.ui.static_view import static_figure, static_html, static_text
from workbench.ui.tables import comparison_table_html
from workbench.ui.trainer import PanelRun, SessionTrainer, Trainer
from workbench.ui.view import GridState, grid_view
from workbench.units import format_count


class Panel(widgets.VBox):
    """A strategy that is toggled, run and compared, layer by layer.

    Runs do not block the cell: a thread follows them and draws, ten times a second at most. Each run starts from the
    same weights and takes the same batches, and is compared with one device.

    Args:
        session: the engines to train on.
        model_fn: makes the model, ``() -> nn.Module``.
        dataset: a (inputs, targets) pair of tensors or arrays, or a torch Dataset of such pairs.
        loss_fn: ``(output, target) -> scalar``, a mean over the samples.
        strategy: where to start: a preset (data, model, pipeline, hybrid), a strategy's text, or a ``wb.Strategy``.
        batch_size: samples per step, all ranks together.
        steps: steps per run.
        optimizer_fn: ``parameters -> optimizer``; default SGD with lr 0.1 and momentum 0.9.
        seed: of weights and data order.
        trainer: what describes the model and starts runs; default: the session's engines.

    Raises:
        StrategyError: ``strategy`` does not parse. One that does not fit the model is shown with its mistakes.

    >>> panel = wb.Panel(session, make_mlp, digits(), cross_entropy, strategy="hybrid")      # doctest: +SKIP
    >>> panel.run(); panel.wait(); panel.runs[-1].equal                                      # doctest: +SKIP
    True
    """

    def __init__(
        self,
        session: Any,
        model_fn: Callable[[], Any],
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any],
        *,
        strategy: Strategy | str | None = None,
        batch_size: int = 128,
        steps: int = 200,
        optimizer_fn: Callable[[Any], Any] | None = None,
        seed: int = 0,
        trainer: Trainer | None = None,
    ) -> None:
        job = (model_fn, dataset, loss_fn)
        self._trainer = trainer or SessionTrainer(
            session, *job, batch_size=batch_size, steps=steps, optimizer_fn=optimizer_fn, seed=seed
        )
        self._batch_size, self._steps = batch_size, steps
        self._lock = threading.RLock()
        self._pump: Pump | None = None
        self._run: PanelRun | None = None
        self._handles: tuple[Any, Any] | None = None
        self.state = PanelState(self._trainer.layers, self._trainer.num_ranks, strategy)
        self.runs: list[RunRecord] = []
        self.baseline: RunRecord | None = None
        self.controls = Controls(self._edit, self.run, self._facts(model_fn))
        self.grid = LayerGrid(self._on_event)
        self.live = LiveView(self._trainer.num_ranks, batch_size, self.stop)
        self.comparison = html()
        super().__init__([*self.controls.bars, self.grid, self.live.box, self.comparison])
        self.add_class(PANEL_CLASS)
        self._refresh()

    def _facts(self, model_fn: Callable[[], Any]) -> str:
        num_parameters = sum(layer.num_parameters for layer in self._trainer.layers)
        name = getattr(model_fn, "__name__", type(model_fn).__name__)
        return f"{name}, {format_count(num_parameters)} parameters, batch {self._batch_size}"

    def __repr__(self) -> str:
        state = "running" if self.running else f"{len(self.runs)} finished runs"
        return f"<Panel {self.state.text!r}: {state}>"

    # ---- what users call ----------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy as it stands in the panel."""
        return self.state.strategy

    @property
    def running(self) -> bool:
        """Does a run hold the engines?"""
        return self._pump is not None

    def run(self, steps: int | None = None) -> None:
        """Train with the panel's strategy; returns at once. ``wait`` waits, ``stop`` stops, ``runs`` has the results.

        Raises:
            RuntimeError: a run is going on already.
            StrategyError: the strategy has mistakes; all of them are listed.
        """
        with self._lock:
            if self._pump is not None:
                raise RuntimeError(
                    "panel.run(): a run holds the engines. Wait for it with panel.wait(), or panel.stop()."
                )
            self.state.strategy.resolve(self.state.layers, self.state.num_ranks)
            num_steps = steps or self._steps
            name = self._name_of_run()
            self.live.begin(name, str(self.state.strategy), num_steps)
            self._run = self._trainer.start(self.state.strategy, name, num_steps)
            self._pump = Pump(self._run, self._on_metrics, self._on_end)
            self._refresh()
            self._pump.start()

    def stop(self) -> None:
        """Ask the run to end after its current step; its weights and figures stay."""
        pump = self._pump
        if pump is not None:
            pump.run.stop()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no run holds the engines; False when ``timeout_s`` passed before."""
        pump = self._pump
        return pump is None or pump.join(timeout_s)

    # ---- a run goes on (the pump's thread) ----------------------------------------------------------------------

    def _on_metrics(self, metrics: list[StepMetrics]) -> None:
        with self._lock:
            if self._run is not None and self._run.one_device_losses is not None:
                self.live.show_one_device(self._run.one_device_losses)
            self.live.add(metrics)

    def _on_end(self, record: RunRecord | None, error: BaseException | None) -> None:
        with self._lock:
            self._pump = None
            self.baseline = self._trainer.baseline or self.baseline
            if error is not None or record is None:
                self.live.fail(error or RuntimeError("the run ended without a result"))
            else:
                self.runs.append(record)
                self.live.finish(record)
            self._refresh()

    def _name_of_run(self) -> str:
        """The strategy's label, with a number where an earlier run has the same."""
        taken = {run.name for run in self.runs}
        label = self.state.label
        names = (label if number == 1 else f"{label} ({number})" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    # ---- the user does something --------------------------------------------------------------------------------

    def _edit(self, action: Callable[[PanelState], None]) -> None:
        with self._lock:
            action(self.state)
            self._refresh()

    def _on_event(self, event: dict[str, Any]) -> None:
        """What the grid reports: an edit, a wish to run, or the page's theme."""
        kind, value, layers = event["event"], event.get("value"), event.get("layers", [])
        actions: dict[str, Callable[[PanelState], Any]] = {
            "parallel": lambda state: state.set_parallel(layers, str(value)),
            "split": lambda state: state.cycle_split(layers),
            "stage": lambda state: state.set_stage(layers, int(value or 0)),
            "fix": lambda state: state.apply_fix(str(value), event.get("layer")),
            "undo": PanelState.undo,
            "redo": PanelState.redo,
        }
        if kind == "theme":
            self.live.use(theme.palette(str(value)))
        elif kind != "run":
            self._edit(actions[kind])
        elif self.state.can_run and not self.running:
            self.run()

    def _refresh(self) -> None:
        """Show the state in every part of the panel."""
        self.controls.refresh(self.state, self.running)
        self.grid.view = self._view()
        if self.runs:
            title = '<div class="wb-section">Comparison</div>'
            self.comparison.value = title + comparison_table_html(self.runs, self.baseline, self.runs[-1].name)
        self._keep_static()

    def _view(self) -> dict[str, Any]:
        state = self.state
        return grid_view(
            GridState(
                layers=state.layers,
                choices=state.choices,
                drawn=state.drawn,
                degrees=state.degrees,
                batch_size=self._batch_size,
                num_micro_batches=state.options.num_micro_batches,
                sample_shape=self._trainer.sample_shape,
                mistakes=state.mistakes,
            )
        )

    # ---- display ------------------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """The widget, and after it what remains of it without a kernel (hidden by the panel's style where it lives)."""
        display(self._repr_mimebundle_(), raw=True)
        page = display(self._static_bundle(), raw=True, display_id=True)
        figure = display({"text/html": "", "text/plain": ""}, raw=True, display_id=True)
        self._handles = (page, figure) if page is not None and figure is not None else None

    def _static_bundle(self) -> dict[str, str]:
        latest = self.runs[-1].name if self.runs else None
        return {
            "text/html": static_html(self.state.text, self._view(), self.runs, self.baseline, latest),
            "text/plain": static_text(self.state.text, self.runs, self.baseline),
        }

    def _keep_static(self) -> None:
        """Bring the static copy up to date, between runs only: it is what a saved notebook shows."""
        if self._handles is None or self.running:
            return
        page, figure = self._handles
        page.update(self._static_bundle(), raw=True)
        if self.runs and self.live.figure is not None:
            figure.update(static_figure(self.live.figure), raw=True)
