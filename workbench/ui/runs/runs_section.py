"""The panel's Live and Compare tabs: follow and control a run, and compare finished runs."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import ipywidgets as widgets

from workbench.core.metrics import RunEvent, RunRecord
from workbench.core.profile import Profile
from workbench.core.seeds import repeats_of, seeds_of, with_seed, without_seed
from workbench.core.strategy import Strategy
from workbench.core.trace_events import chrome_trace
from workbench.core.verdict import CHECKED_STEPS
from workbench.errors import RunError
from workbench.session.comparison.checker import RunStopped
from workbench.session.comparison.saved_runs import SavedRuns
from workbench.ui.controls import bar, button, on_value
from workbench.ui.failures import guarded
from workbench.ui.live.history import Message
from workbench.ui.live.poller import Poller, Run
from workbench.ui.live.run_view import RunView
from workbench.ui.page_restore import as_request
from workbench.ui.runs.comparable import other_task
from workbench.ui.runs.profile_section import ProfileSection
from workbench.ui.runs.table_rows import key_of
from workbench.ui.runs.table_widget import RunTable
from workbench.ui.runs.trainer import OneDeviceSteps, Trainer, predictions

_BUSY = "a run holds the engines: ask again when it has ended"
_ANOTHER_PANEL = "Open in panel takes its strategy; a panel of its model, data and ranks repeats it."


@dataclass(frozen=True)
class PanelCallbacks:
    """The panel's edited strategy and functions, for the runs.

    Attributes:
        wanted: the strategy and its name; raises ``StrategyError`` with all its mistakes.
        estimate: the prediction for the strategy (``cost.Estimate``), or None.
        changed: called after a change that the strategy editor shows: a run begins or ends.
        opened: load a strategy's text, so that it can be undone.
        limit: memory of a rank in bytes, None if unknown, and the machine that has it.
    """

    wanted: Callable[[], tuple[Strategy, str]]
    estimate: Callable[[], Any] = lambda: None
    changed: Callable[[], None] = lambda: None
    opened: Callable[[str], None] = lambda text: None
    limit: Callable[[], tuple[float | None, str]] = lambda: (None, "")


class RunsSection:
    """Follows one run at a time and keeps the finished ones.

    ``live.box`` and ``table.box`` are the contents of the tabs; ``steering``, ``check`` and ``live.status.parts`` are
    in the bar above them. ``saved`` has earlier runs, ``error`` is the exception that ended the last run.
    ``is_changing``: the user chooses another strategy for a paused run.
    """

    def __init__(self, trainer: Trainer, steps: int, callbacks: PanelCallbacks, saved: SavedRuns | None = None) -> None:
        self._trainer, self._steps, self._callbacks = trainer, steps, callbacks
        self._lock = threading.RLock()
        self._poller: Poller | None = None
        self._run: Run | None = None
        self._names: dict[str, str] = {}
        self._estimates: dict[str, Any] = {}  # of applied strategies, by their text
        self._text = self._asked = ""  # the strategy that the engines train; the last one that they were asked for
        self._profiled = ""  # the name of the profiled strategy
        self.is_changing = self._is_stopping = self.is_paused = False
        self.error: BaseException | None = None
        self._end_shown = guarded(self._show_end)
        self._rest_shown = [guarded(show) for show in (self._show_buttons, self.show_runs)]
        self.runs: list[RunRecord] = []
        self.baseline: RunRecord | None = None
        self.pause_button = button("Pause", self._on_pause, icon="pause", disabled=True)
        self.stop_button = button("Stop", self.stop, icon="stop", disabled=True)
        self.change_button = button("Change strategy\u2026", self.change, disabled=True)
        self.apply_button = button("Apply", self.apply, "wb-primary")
        self.keep_button = button("Keep the old one", self.keep)
        self.trace_button = button("Trace", self._on_trace, icon="download", disabled=True)
        self.trace_button.tooltip = "save the newest recorded steps for chrome://tracing or ui.perfetto.dev"
        both = bar(self.pause_button, self.stop_button, css=("wb-group",))
        self.steering = (both, self.change_button, self.apply_button, self.keep_button)
        self.check = widgets.Checkbox(trainer.check_steps > 0, description="check against one device", indent=False)
        self._checked_steps = trainer.check_steps or CHECKED_STEPS
        on_value(self.check, self._on_check)
        self.compile = widgets.Checkbox(trainer.compiles, description="compile the step", indent=False)
        on_value(self.compile, self._on_compile)
        self.profile_section = ProfileSection(self.profile)
        self.live = RunView(trainer.num_ranks, (self.profile_section.button, self.trace_button), has_status=False)
        finds = self._find_difference if hasattr(trainer, "first_difference") else None
        opened = lambda run: callbacks.opened(run.strategy)  # noqa: E731
        self.table = RunTable(opened, self._run_again, saved, part=finds, another=self._run_another)
        self._show_buttons()

    # ---- what users call ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a run holds the engines."""
        return self._poller is not None

    @property
    def check_steps(self) -> int:
        """Number of first steps of the next run that one device trains too."""
        return self._trainer.check_steps

    def run(self, steps: int | None = None, seed: int | None = None, name: str = "") -> None:
        """Train with the edited strategy; returns at once.

        Args:
            seed: of the weights and of the order of the samples; default: the trainer's.
            name: of the run, without its seed; default: the strategy's name.

        Raises:
            RuntimeError: a run is already in progress.
            StrategyError: the strategy has mistakes.
            RunError: ``steps`` is not a number of steps, or ``seed`` no whole number.
        """
        with self._lock:
            if self._poller is not None:
                raise RuntimeError(
                    "panel.run(): a run holds the engines. Wait for it with panel.wait(), or panel.stop()."
                )
            strategy, label = self._callbacks.wanted()
            asked: Any = self._steps if steps is None else steps
            if not isinstance(asked, Integral) or asked < 1:
                raise RunError(
                    f"panel.run(steps={steps!r}): a whole number of at least 1. The strategy is the one in the rows."
                )
            num_steps = int(asked)
            (number,) = seeds_of(self._trainer.seed if seed is None else seed, 1)
            label = name or (f"{label}, compiled" if self._trainer.compiles else label)
            name = self._free_name(with_seed(label, number, self._trainer.seed))
            self._text, self._asked = str(strategy), ""
            self._names = {self._text: name}
            self.is_paused = self.is_changing = self._is_stopping = False
            self.error = None
            try:
                self._begin(strategy, name, num_steps, number)
            except Exception as error:  # noqa: BLE001 - shown where the run is, like those of its thread
                self._on_end(None, error)

    def _begin(self, strategy: Strategy, name: str, num_steps: int, seed: int) -> None:
        self.live.begin(name, str(strategy), num_steps)  # first: an estimate may have to wait for the layers' costs
        estimate = self._callbacks.estimate()
        self._expect(estimate, strategy)
        self._run = self._trainer.start(strategy, name, num_steps, predictions(estimate), seed)
        self._poller = Poller(self._run, self._on_messages, self._on_end, on_trained=self._on_trained)
        self._poller.start()
        self._show_buttons()
        self._callbacks.changed()

    def stop(self) -> None:
        """Ask the run to end after its current step; its weights and figures stay. Once more: end it now, in the middle
        of its step.
        """
        poller = self._poller
        if poller is None:
            return
        if self._is_stopping:
            poller.run.interrupt()
            return
        self._is_stopping = True
        poller.run.stop()
        self.live.status.show_stopping()
        self._show_buttons()

    def profile(self) -> None:
        """Profile the next steps of the run; without one, start one. Raises as ``run`` does."""
        if self._poller is None:
            self.run()
        if self._poller is not None:
            self._poller.run.profile()

    def pause(self) -> None:
        """Ask the run to wait after its current step."""
        if self._poller is not None and not self.is_paused:
            self._poller.run.pause()
            self.is_paused = True
            self._show_buttons()

    def resume(self) -> None:
        """Continue a paused run under its present strategy."""
        if self._poller is not None and self.is_paused:
            self._poller.run.resume()
            self.is_paused = self.is_changing = False
            self._show_buttons()

    def change(self) -> None:
        """Pause, so that another strategy can be chosen; ``apply`` continues with it."""
        if self._poller is not None:
            self.pause()
            self.is_changing = True
            self._show_buttons()
            self._callbacks.changed()

    def apply(self) -> None:
        """Continue under the edited strategy, with the same weights and the optimizer's state.

        Raises:
            RuntimeError: no run is in progress.
            StrategyError: the strategy has mistakes; the run stays paused.
        """
        if self._poller is None:
            raise RuntimeError("panel.apply(): no run is going on whose strategy could change. Start one: panel.run().")
        strategy, label = self._callbacks.wanted()
        text = str(strategy)
        self._names[text] = label
        self._estimates[text] = estimate = self._callbacks.estimate()
        with self._lock:  # a refusal comes after both
            self._poller.run.change(strategy, label, predictions(estimate))
            self._asked = text
        self.is_paused = True  # a run that is not paused ignores it
        self.resume()
        self._callbacks.changed()

    def keep(self) -> None:
        """Continue under the run's strategy, or the one that it was asked for and has not reported yet, and show it."""
        self._callbacks.opened(self._asked or self._text)
        self.resume()
        self._callbacks.changed()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until no run holds the engines; False when ``timeout_s`` passed before."""
        poller = self._poller
        if poller is not None:
            return poller.join(timeout_s)
        with self._lock:  # the thread of the last run may still show its end
            return True

    def static_html(self) -> str:
        """The last run and the comparison for readers without a kernel."""
        return self.live.static_html() + self.table.static_html()

    # ---- a run in progress (the poller's thread) ------------------------------------------------------------------

    def _on_messages(self, messages: Sequence[object]) -> None:
        with self._lock:
            for message in messages:
                if isinstance(message, OneDeviceSteps):
                    self.live.add_one_device(message.block)
                elif isinstance(message, Profile):
                    self.profile_section.show(message, self._profiled)
                    self.live.log.say("profiled: the table is below")
                elif isinstance(message, RunEvent) and message.kind == "strategy":
                    self._text = message.text
                    self._expect(self._estimates.get(message.text), Strategy(message.text))
                elif isinstance(message, RunEvent) and message.kind == "refused":
                    self._asked = ""
                elif isinstance(message, RunEvent) and message.kind == "profiling":
                    self._profiled = self._names.get(self._text, self._text)
            if self._run is not None and self._run.one_device_losses is not None:
                self.live.show_one_device(self._run.one_device_losses)
            found = [message for message in messages if isinstance(message, Message)]
            self.live.add(found, lambda text: self._names.get(text, text))

    def _on_trained(self) -> None:
        self.live.stopwatch.stop()
        self.live.status.is_stopping = False
        if self._trainer.check_steps:
            self.live.status.show_state("running", "comparing", "with one device")

    def _on_end(self, record: RunRecord | None, error: BaseException | None) -> None:
        with self._lock:
            self._poller = None
            self.is_paused = self.is_changing = self._is_stopping = False
            self.baseline = self._trainer.baseline or self.baseline
            if record is not None:
                self.runs.append(record)
            elif not isinstance(error, RunStopped):
                self.error = error or RuntimeError("the run ended without a result")
            self._end_shown(record, error)
            for show in self._rest_shown:
                show()
            self._callbacks.changed()

    def _show_end(self, record: RunRecord | None, error: BaseException | None) -> None:
        if self.error is not None:
            self.live.fail(self.error)
        elif record is not None:
            self.live.finish(record)
        else:
            self.live.leave(str(error))

    def show_runs(self) -> None:
        """Update the comparison."""
        truths = [self.baseline] if self.baseline is not None else []
        self.table.add(self.runs, truths, self.runs[-1] if self.runs else None)

    def _run_again(self, run: RunRecord) -> None:
        """Repeat a run with its steps and its seed."""
        self._repeat(run, run.settings.get("seed"))

    def _run_another(self, run: RunRecord) -> None:
        """Repeat a run with the seed behind those of all runs that differ from it in their seed only."""
        seeds = [each.settings.get("seed", self._trainer.seed) for each in repeats_of(run, self.table.runs)]
        self._repeat(run, max(seeds) + 1, without_seed(run))

    def _repeat(self, run: RunRecord, seed: int | None, name: str = "") -> None:
        if not self._refuses(run):
            self._callbacks.opened(run.strategy)
            self.compile.value = bool(run.settings.get("compiled"))
            self.run(run.settings.get("steps"), seed, name)

    def _refuses(self, run: RunRecord) -> bool:
        """Whether a run cannot be repeated here now; the table then says why."""
        why = _BUSY if self.busy else ""
        if other := other_task(run, self._trainer.num_ranks, self._trainer.settings):
            why = f"{self._name_in_table(run)} is no run of this panel's training: {other}. {_ANOTHER_PANEL}"
        if why:
            self.table.show_answer(why)
        return bool(why)

    def _name_in_table(self, run: RunRecord) -> str:
        return self.table.names.get(key_of(run), run.name)

    def _find_difference(self, run: RunRecord) -> None:
        """Find where a strategy parts from one device, in a thread, and show it below the table."""
        if self._refuses(run):
            return
        name = self._name_in_table(run)
        self.table.show_answer(f"{name}: takes one step, and the same step on one device \u2026")
        work = as_request(self._answer)
        threading.Thread(target=work, args=(name, run), name="workbench-first-difference", daemon=True).start()

    def _answer(self, name: str, run: RunRecord) -> None:
        asked = run.strategy, run.settings.get("seed")
        try:
            found = getattr(self._trainer, "first_difference")(*asked)  # noqa: B009 - a trainer need not have it
        except Exception as error:  # noqa: BLE001 - a model may fail in any way; the panel says how
            found = f"{type(error).__name__}: {error}"
        without = "without compiling, " if run.settings.get("compiled") else ""
        self.table.show_answer(f"{name}: {without}{found}")

    def _expect(self, estimate: Any, strategy: Strategy) -> None:
        """Show the prediction, and the stage of each rank."""
        resolved = strategy.resolve(self._trainer.layers, self._trainer.num_ranks)
        places, peaks = [(0, 0)] * self._trainer.num_ranks, [0.0] * self._trainer.num_ranks
        for stage, kinds in enumerate(estimate.memory if estimate is not None else [{}] * resolved.degrees[0]):
            for position, rank in enumerate(resolved.stage_ranks(stage)):
                places[rank], peaks[rank] = (stage, position), sum(kinds.values())
        self.live.expect(estimate, peaks if estimate is not None else (), places, self._callbacks.limit())

    def _free_name(self, label: str) -> str:
        """The strategy's label, with a number if an earlier run has the same."""
        taken = {run.name for run in self.runs}
        names = (label if number == 1 else f"{label} ({number})" for number in range(1, len(taken) + 2))
        return next(name for name in names if name not in taken)

    # ---- buttons --------------------------------------------------------------------------------------------------

    def _on_pause(self) -> None:
        (self.resume if self.is_paused else self.pause)()

    def _on_check(self, change: Any) -> None:
        self._trainer.check_steps = self._checked_steps if change["new"] else 0
        self._callbacks.changed()

    def _on_compile(self, change: Any) -> None:
        self._trainer.compiles = bool(change["new"])
        self._callbacks.changed()

    def _on_trace(self) -> None:
        trace = chrome_trace(self.live.history.traced if self.live.history is not None else ())
        self.live.link.download(f"{self._run_name()}-trace.json", json.dumps(trace), "application/json")

    def _run_name(self) -> str:
        words = next(iter(self._names.values()), "run")
        return "-".join("".join(c if c.isalnum() else " " for c in words).split()) or "run"

    def _show_buttons(self) -> None:
        busy, changing = self.busy, self.is_changing
        for each in (self.pause_button, self.stop_button, self.change_button):
            each.disabled = not busy
        self.check.disabled = self.compile.disabled = busy
        self.compile.tooltip = (
            "a program per step instead of Python: the third step takes seconds to minutes, later ones less"
        )
        self.check.tooltip = "a run's first steps are trained on one device too, from the same weights, and compared"
        waits = "no run is going on"
        self.pause_button.description = "Go on" if self.is_paused else "Pause"
        self.pause_button.icon = "play" if self.is_paused else "pause"
        self.pause_button.tooltip = "takes effect at the next step" if busy else waits
        polite, now = "end the run after its current step; weights stay", "do not wait for the end of this step"
        self.stop_button.description = "Stop now" if self._is_stopping else "Stop"
        self.stop_button.tooltip = (now if self._is_stopping else polite) if busy else waits
        self.change_button.tooltip = "pause, choose another strategy, go on with the same weights"
        self.change_button.layout.display = "none" if changing else ""
        self.apply_button.layout.display = self.keep_button.layout.display = "" if changing else "none"
        self.trace_button.disabled = not busy and not (self.live.history and self.live.history.traced)
        self.profile_section.refresh(busy)
