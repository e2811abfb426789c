"""``wb.Panel``: choose, see, run, compare. It connects the strategy editor to the runs, and keeps a static copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import ipywidgets as widgets

from workbench.core.metrics import RunRecord
from workbench.core.model_costs import ModelCosts
from workbench.core.presets import StrategyLike
from workbench.core.strategy import Strategy
from workbench.core.verdict import CHECKED_STEPS
from workbench.cost.estimate import Estimate
from workbench.cost.hardware import Hardware
from workbench.errors import NotStartedError
from workbench.session.cluster import Session, find_current
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.session.scripts import script
from workbench.theme import Palette
from workbench.ui import panel_texts
from workbench.ui.controls import bar, button, display_widget, html
from workbench.ui.failures import Failures
from workbench.ui.grid.widget import PANEL_CLASS
from workbench.ui.page_restore import MissedChanges, as_request
from workbench.ui.planning import offline_trainer
from workbench.ui.planning.predictor import Predictor
from workbench.ui.runs.runs_section import PanelCallbacks, RunsSection
from workbench.ui.runs.trainer import SessionTrainer, Trainer
from workbench.ui.static_copy import StaticCopy
from workbench.ui.static_panel import check_text, static_html, static_text
from workbench.ui.strategy.state import PanelState
from workbench.ui.strategy_editor import StrategyEditor, facts_of
from workbench.ui.tabs import Tabs, tab_contents
from workbench.writers.choose import Log

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_COUNTING_S = 10.0
"""A run that starts right after the panel waits so long for its prediction."""


class Panel(widgets.VBox):
    """Choose a strategy layer by layer, train it, and compare the runs.

    Runs do not block the cell: a thread follows them and draws, at most ten times a second. Each run starts from the
    same weights, takes the same batches, and is compared with one device.

    Args:
        model_fn: makes the model, ``() -> nn.Module``. Every engine calls it after seeding.
        dataset: all samples in tensors or arrays: a tuple or dict of them, nested or not; or a Dataset whose items are
            tuples or dicts of these. A dict gives keyword arguments to the model, a tuple positional ones.
        loss_fn: (output, targets) -> scalar, a mean over the samples. The targets are a tuple's last entry, or a dict's
            ``label``, ``labels``, ``label_ids``, ``target`` or ``targets`` (several: as a dict); the model does not get
            them. None: the model returns its own loss, as its result, as ``.loss`` or ``["loss"]`` (transformers), or
            as a tuple's scalar, and gets all entries. Losses of micro-batches are weighted by their samples, on one
            device too.
        strategy: the first one: a preset (data, model, pipeline, hybrid; also ``"pipeline | mb=8"``), the text of a
            strategy, a dict of rows, a file (a ``Path`` or a name that ends in .strategy; ``workbench plan --out``
            writes one), or a ``wb.Strategy``.
        batch_size: samples per step, all ranks together.
        steps: training steps of each run.
        optimizer_fn: parameters -> torch optimizer. Default: SGD with lr 0.1 and momentum 0.9.
        seed: of the weights and of the order of the samples.
        collate_fn: list of samples -> batch, as for torch's ``DataLoader``; for a Dataset or a list of samples.
        shuffle: a new order of the samples in every epoch, from the seed. False: the data set's order.
        drop_last: leave out a last batch of an epoch with fewer samples.
        count: (inputs, targets) -> the number of terms of a micro-batch's mean loss, if that is not its number of
            samples: for example, of words that count.
        check_steps: number of first steps that one device trains too, for the comparison; 0 for none. The panel's
            switch "check against one device" changes it.
        keep: keep the runs on disk, see ``wb.draw.SavedRuns``; a ``SavedRuns`` gives the folder.
        log: where the runs' steps are written too, such as ``"tensorboard:runs/"``, or a list of such places; see the
            guide "Keep logs where you keep them".
        hardware: the machine of the predictions: ``wb.planner.calibrate(session)``, a file, or a name ("h200"). None:
            no predictions.
        session: the engines to train on. Default: the current session.
        num_ranks: predict for so many ranks, with ``hardware``, and train nothing. No session is needed.
        costs: of the model's layers. Default: counted from the model on metadata.
        trainer: describes the model and starts runs. Default: the session's engines.

    Raises:
        StrategyError: ``strategy`` does not parse. A strategy that does not fit the model is shown with its mistakes.
        HardwareError: no such machine or file.
        RunError: no writer has the name in ``log``, or its package is not installed.
        NotStartedError: no session is open, and there is no ``num_ranks``.
        ValueError: both ``session`` and ``num_ranks``, or a session in place of the model.

    >>> panel = wb.Panel(make_mlp, digits(), cross_entropy, strategy="hybrid")      # doctest: +SKIP
    >>> panel.run(); panel.wait(); panel.runs[-1].equal                                      # doctest: +SKIP
    True
    """

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        dataset: Any,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        *,
        strategy: StrategyLike | None = None,
        batch_size: int = 128,
        steps: int = 200,
        optimizer_fn: Callable[[Any], Optimizer] | None = None,
        seed: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        count: Callable[[Any, Any], Any] | None = None,
        check_steps: int = CHECKED_STEPS,
        keep: bool | SavedRuns = True,
        log: Log | None = None,
        hardware: Hardware | str | None = None,
        session: Session | None = None,
        num_ranks: int | None = None,
        costs: ModelCosts | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        if not callable(model_fn):
            raise ValueError(panel_texts.session_first(model_fn))
        if session is not None and num_ranks is not None:
            raise ValueError(panel_texts.session_or_ranks(session.num_engines, num_ranks))
        job = (model_fn, dataset, loss_fn, collate_fn)
        options: dict[str, Any] = {
            "batch_size": batch_size, "steps": steps, "seed": seed,
            "optimizer_fn": optimizer_fn, "collate_fn": collate_fn, "count": count,
        }  # fmt: skip
        saved = SavedRuns.of(keep)
        self._is_offline = is_offline = trainer is None and num_ranks is not None
        if trainer is None and num_ranks is not None:
            costs = costs or offline_trainer.costs_of(*job)
            trainer = offline_trainer.OfflineTrainer(costs, num_ranks, dataset, loss_fn, collate_fn)
        elif trainer is None:
            session = session or find_current()
            if session is None:
                raise NotStartedError(panel_texts.NO_SESSION)
            trainer = SessionTrainer(
                session, model_fn, dataset, loss_fn, strategy=strategy, keep=saved, check_steps=check_steps, log=log,
                shuffle=shuffle, drop_last=drop_last, **options,
            )  # fmt: skip
        trained = trainer
        optimizer, note = offline_trainer.optimizer_name(optimizer_fn, trainer.layers)
        predictor = Predictor(hardware, batch_size, optimizer, lambda: trained.compiles, note)
        predictor.costs, predictor.problem = costs, predictor.problem if session else "costs of the layers: not known"
        samples = None if offline_trainer.is_shape(dataset) else dataset
        self._job: dict[str, Any] = {"model_fn": model_fn, "dataset": samples, "loss_fn": loss_fn, **options}
        self._failures = Failures()
        guard = self._failures.guard
        callbacks = PanelCallbacks(
            self.wanted, guard(self.estimate), guard(self.changed), self.load, lambda: predictor.limit
        )
        with self._failures.collecting():
            self._copy = StaticCopy(self._static_bundle, lambda: self.running)
            self._runs_section = RunsSection(trainer, steps, callbacks, saved)
            self._runs_section.table.changed = self._copy.keep
            self._editor = StrategyEditor(
                trainer.layers,
                trainer.num_ranks,
                strategy,
                facts_of(trainer.layers, batch_size, trainer.sample_shape, loss_fn),
                predictor,
                title=panel_texts.title(model_fn, trainer, batch_size),
                on_run=self._on_run,
                on_theme=self._on_page,
                on_change=self._copy.keep,
                no_run=offline_trainer.NO_ENGINES if is_offline else "",
                calibrate=None if session is None else lambda: offline_trainer.measured(session),
                count=offline_trainer.sent_counter(*job, batch_size, None if session else predictor.machine),
                script=self.script,
                apply=self._runs_section.apply_button,
            )
        self._editor.busy = lambda: self.running
        self._endings: list[Callable[[], None]] = []
        if self._editor.bytes is not None:
            self._endings.append(self._editor.bytes.end)
        self.tabs = Tabs(guard(self._runs_section.live.see_status), guard(lambda view: missed.send_to(view)))
        self._was = (False, False)
        runs = self._runs_section
        parts = {
            "strategy": self._editor.children,
            "live": [html(panel_texts.NO_RUN_YET, "wb-nothing-yet"), runs.live.box, runs.profile_section.box],
            "compare": [runs.table.box],
        }
        super().__init__([self._bar(), *(tab_contents(tab, widgets) for tab, widgets in parts.items())])
        self.add_class(PANEL_CLASS)
        missed = MissedChanges(self)
        count = as_request(guard(self._count))
        self._counting = threading.Thread(target=count, args=job, name="workbench-count-layers", daemon=True)
        if session is not None and costs is None:
            self._counting.start()
        if session is not None:
            self._editor.has_calls = lambda: session.is_busy
            self._endings.append(session.subscribe(guard(self._on_message)))

    def close(self) -> None:
        """Remove the panel from the page. It counts nothing more, and hears no more from the session."""
        endings = getattr(self, "_endings", [])  # a panel that could not be made is closed too
        while endings:
            endings.pop()()
        super().close()

    def _on_message(self, _rank: int, message: object) -> None:
        """Handle the session's message that it is closed, or has other engines."""
        if why := panel_texts.why_ended(message, "panel", "run the cell that makes the panel once more"):
            self._editor.forbid_runs(why)

    def _bar(self) -> widgets.VBox:
        """The bar that stays in sight above the tabs."""
        controls, runs = self._editor.controls, self._runs_section
        legend = button("?", lambda: None, "wb-legend-button", "wb-icon", tooltip="explain the words of the panel")
        checks = () if self._is_offline else (bar(runs.check, runs.compile, css=("wb-switches",)),)
        buttons = (controls.problems, controls.run, *runs.steering, legend)
        top = bar(self.tabs, html("", "wb-space"), *buttons)
        status = bar(*runs.live.status.parts, *checks, css=("wb-bar", "wb-status"))
        stays = widgets.VBox([top, status, controls.ended, self._failures.box])
        stays.add_class("wb-stays")
        return stays

    def _count(self, *job: Any) -> None:
        """Count the costs of the layers, in a thread."""
        try:
            self._editor.learn(offline_trainer.costs_of(*job))
        except Exception as error:  # noqa: BLE001 - any model may fail in any way; the panel says why and works without
            self._editor.learn(None, str(error) or type(error).__name__)

    def __repr__(self) -> str:
        state = "running" if self.running else f"{len(self.runs)} finished runs"
        return f"<Panel {self.state.text!r}: {state}>"

    # ---- what users call ----------------------------------------------------------------------------------------

    @property
    def state(self) -> PanelState:
        """The strategy during editing: mistakes, undo, visible rows."""
        return self._editor.state

    @property
    def strategy(self) -> Strategy:
        """The strategy that the panel shows. ``StrategyError`` says what is wrong with a text that does not parse."""
        return self._editor.strategy

    @property
    def running(self) -> bool:
        """Whether a run holds the engines."""
        return self._runs_section.busy

    @property
    def check_steps(self) -> int:
        """Number of first steps of the next run that one device trains too, for the comparison; 0 for none."""
        return self._runs_section.check_steps

    @property
    def runs(self) -> list[RunRecord]:
        """The finished runs."""
        return self._runs_section.runs

    @property
    def baseline(self) -> RunRecord | None:
        """The run on one device; None before there is one."""
        return self._runs_section.baseline

    @property
    def error(self) -> BaseException | None:
        """The error that ended the last run, which the panel also shows; None without an error."""
        return self._runs_section.error

    def run(self, steps: int | None = None, seed: int | None = None) -> None:
        """Train with the panel's strategy. Returns at once: ``wait`` waits, ``stop`` stops, ``runs`` has the results. A
        ``seed`` other than the panel's gives other weights and another order of the samples.

        Raises:
            RuntimeError: a run is already in progress.
            StrategyError: the strategy has mistakes; it lists all of them.
            SessionError: the panel has no engines.
        """
        self._runs_section.run(steps, seed)

    def profile(self) -> None:
        """Profile the next steps of the run, or start one: the tab Live shows the table, see ``wb.debug.profile``.

        Raises:
            StrategyError, SessionError: as ``run``.
        """
        self._runs_section.profile()

    def script(self, library: Literal["workbench", "torch"] = "workbench") -> str:
        """The panel's strategy as a script for ``torchrun``, see ``wb.planner.script``."""
        return script(self.strategy, self.state.num_ranks, library=library, **self._job)

    def stop(self) -> None:
        """Ask the run to end after its current step; its weights and figures stay. A second call ends it at once,
        inside its step.
        """
        self._runs_section.stop()

    def pause(self) -> None:
        """Ask the run to wait after its current step."""
        self._runs_section.pause()

    def resume(self) -> None:
        """Continue a paused run."""
        self._runs_section.resume()

    def apply(self) -> None:
        """Change the run to the panel's strategy at its next step, with the same weights and optimizer state.

        Raises:
            RuntimeError: no run is in progress.
            StrategyError: the strategy has mistakes; it lists all of them.
        """
        self._runs_section.apply()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no run holds the engines. False if ``timeout_s`` passed first.

        A kernel handles no clicks while a cell runs. It handles the clicks of that time when the cell has ended.
        """
        return self._runs_section.wait(timeout_s)

    # ---- callbacks of the runs -------------------------------------------------------------------

    def wanted(self) -> tuple[Strategy, str]:
        """The panel's strategy and its name; raises as ``StrategyEditor.wanted``."""
        self._failures.clear()  # what the user tried before
        return self._editor.wanted()

    def estimate(self) -> Estimate | None:
        """The prediction for the strategy, once its layers are counted; None if there is no prediction."""
        if self._counting.is_alive():
            self._counting.join(_COUNTING_S)
        return self._editor.estimate()

    def _on_run(self) -> None:
        try:
            self.run()
        finally:
            self.tabs.num_answers += 1

    def changed(self) -> None:
        """Show the state in every part of the panel, and open the tab of a run that has begun."""
        self._editor.refresh()
        now = (self.running, self._runs_section.is_changing)
        if now != self._was and self.running:
            self.tabs.chosen = "strategy" if self._runs_section.is_changing else "live"
        self._was = now
        self.tabs.show_counts(len(self.runs))
        self._copy.keep()

    def load(self, text: str) -> None:
        """Load the text of a strategy; undo restores the one before."""
        self._failures.clear()
        self._editor.open(text)
        self.tabs.chosen = "strategy"

    # ---- display ------------------------------------------------------------------------------------------------

    def _ipython_display_(self) -> None:
        """Display the widget and its static copy, which the panel's style hides while the widget works."""
        self._editor.is_shown = True
        display_widget(self)
        self._editor.refresh()
        self._copy.display()

    def _on_page(self, colours: Palette) -> None:
        """Handle a page that shows the panel, or that has another theme."""
        self._runs_section.live.use(colours)
        if not self._is_offline:
            self._runs_section.live.prepare()

    def _static_bundle(self) -> dict[str, str]:
        runs = self._runs_section.static_html()
        predicted = self._editor.predictions_html("static") + self._editor.plan_html()
        check = "" if self._is_offline else check_text(self.check_steps)
        html = static_html(self.state.text, self._editor.view(), predicted, runs, check)
        return {"text/html": html, "text/plain": static_text(self.state.text, self.runs, self.baseline, check)}
