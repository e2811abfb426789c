"""Predictions of a strategy from the model's costs and a machine, which may both be unknown at first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from workbench.core.model_costs import ModelCosts
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate, SentBytes, estimate
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import COMPILED, WORKBENCH, Software
from workbench.errors import StrategyError
from workbench.ui.planning.machine_factors import MachineFactors
from workbench.ui.planning.prediction_pictures import Prediction

_MAX_ACTIONS = 6000
"""Most actions of a timeline. More would take longer than a toggle may, and would be too thin to see."""
_ANY_MACHINE = "h200"
"""For estimates of bytes, which hardly depend on the machine."""
_CHANGED, _AS_IT_IS = "before the last change", "on the machine as it is"


class Predictor:
    """Makes the panel's predictions.

    Args:
        hardware: a machine, its name or its file; None if unknown.
        batch_size: samples per step.
        optimizer: "adamw", "adam", "adamw8bit", "momentum" or "sgd".
        compiles: whether the next run compiles its step.
        note: what the predictions assume, if the run differs.

    Attributes:
        machine: the unchanged machine; ``assumed`` has the sliders' factors, ``hardware`` is the machine with them.
        costs: of the model; None while they are counted, or if they cannot be: ``problem`` says why.

    Raises:
        HardwareError: no such machine or file.
    """

    def __init__(
        self,
        hardware: Hardware | str | None,
        batch_size: int,
        optimizer: str = "momentum",
        compiles: Callable[[], bool] = bool,
        note: str = "",
    ) -> None:
        self._compiles, self._note = compiles, note
        self.machine = load_hardware(hardware) if isinstance(hardware, str) else hardware
        self.assumed = MachineFactors()
        self.batch_size, self.optimizer = batch_size, optimizer
        self.no_machine = (
            "No machine to predict for. Choose one below the rows, or give hardware= a name, a file, or "
            "wb.planner.calibrate(session)."
        )
        self.costs: ModelCosts | None = None
        self.problem = "counting what the layers cost\u2026"
        self._last: tuple[ResolvedStrategy, Hardware, bool, Estimate] | None = None
        self._last_sent: tuple[ResolvedStrategy, ModelCosts, SentBytes | None] | None = None
        self._before: Estimate | None = None
        self._before_label = _CHANGED

    @property
    def hardware(self) -> Hardware | None:
        """The machine of the predictions."""
        return None if self.machine is None else self.assumed.of(self.machine)

    @property
    def software(self) -> Software:
        """The program of the next run."""
        return COMPILED if self._compiles() else WORKBENCH

    @property
    def limit(self) -> tuple[float | None, str]:
        """Memory of a rank of the unchanged machine, which need not be that of the runs, and the machine's name."""
        return (None, "") if self.machine is None else (self.machine.memory_bytes, self.machine.name)

    @property
    def missing(self) -> str:
        """The reason why there is no prediction; empty if there is one."""
        if self.hardware is None:
            return self.no_machine
        return "" if self.costs is not None else self.problem

    def estimate(
        self, resolved: ResolvedStrategy, hardware: Hardware | None = None, with_timeline: bool = True
    ) -> Estimate | None:
        """The estimate of a strategy; None if there is none, and ``problem`` says why.

        Args:
            hardware: another machine than that of the predictions.
            with_timeline: include the schedule, unless it has too many actions.
        """
        hardware = hardware or self.hardware
        if self.costs is None or hardware is None:
            return None
        num_actions = 2 * resolved.num_stages * resolved.num_micro_batches
        by_name = {layer.name: layer for layer in resolved.layers}
        in_order = tuple(by_name[row.layer.name] for row in self.costs.rows if row.layer.name in by_name)
        try:
            return estimate(
                self.costs,
                replace(resolved, layers=in_order),
                hardware,
                self.batch_size,
                optimizer=self.optimizer,
                software=self.software,
                with_timeline=with_timeline and num_actions <= _MAX_ACTIONS,
            )
        except StrategyError as error:
            self.problem = str(error)
            return None

    def sent(self, resolved: ResolvedStrategy) -> SentBytes | None:
        """The estimate of the bytes that a strategy sends, also without a machine; None before layers are counted."""
        if self.costs is None:
            return None
        if self._last_sent is None or self._last_sent[0] != resolved or self._last_sent[1] is not self.costs:
            found = self.estimate(resolved, self.hardware or load_hardware(_ANY_MACHINE), with_timeline=False)
            self._last_sent = resolved, self.costs, None if found is None else found.sent
        return self._last_sent[2]

    def predict(self, resolved: ResolvedStrategy, is_old: bool, sent: SentBytes | None = None) -> Prediction | str:
        """The prediction of the last valid strategy beside that before the last change; or the reason why there is
        none. ``sent`` are its bytes, if they have been counted.
        """
        if self.missing:
            return self.missing
        hardware, last, compiles = self.hardware, self._last, self._compiles()
        assert hardware is not None
        if last is None or last[:3] != (resolved, hardware, compiles):
            found = self.estimate(resolved)
            if found is None:
                return self.problem
            self._compare_with_before(resolved)
            self._last = last = (resolved, hardware, compiles, found)
        return Prediction(
            counted(last[3], sent),
            resolved,
            self._before,
            hardware.memory_bytes,
            is_old,
            self._before_label,
            self._note,
        )

    def _compare_with_before(self, resolved: ResolvedStrategy) -> None:
        """If only the machine has changed, compare with the step on the unchanged machine."""
        if self._last is None:
            return
        if (self._last[0], self._last[2]) != (resolved, self._compiles()):
            self._before, self._before_label = self._last[3], _CHANGED
        elif self.assumed == MachineFactors():
            self._before = None
        else:
            self._before, self._before_label = self.estimate(resolved, self.machine), _AS_IT_IS


def counted(found: Estimate, sent: SentBytes | None) -> Estimate:
    """An estimate with the bytes that have been counted; unchanged if they have not."""
    return found if sent is None else replace(found, sent=sent)
