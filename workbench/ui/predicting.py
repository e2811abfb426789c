"""From a strategy to its prediction: the model's costs and a machine, both of which may not be known (yet)."""

from __future__ import annotations

from dataclasses import replace

from workbench.core.model_costs import ModelCosts
from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate, estimate
from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import known_machines, load_hardware
from workbench.errors import StrategyError
from workbench.ui.predictions import Prediction

_MAX_ACTIONS = 6000
"""Of a timeline; more would take longer than a toggle may, and could not be told apart."""


class Predictor:
    """Predicts what the panel shows.

    Args:
        hardware: a machine, its name or its file; None where nobody has said which.
        batch_size: samples per step.
        optimizer: "adamw", "adam", "momentum" or "sgd".

    Raises:
        HardwareError: no such machine or file.
    """

    def __init__(self, hardware: Hardware | str | None, batch_size: int, optimizer: str = "momentum") -> None:
        self.hardware = load_hardware(hardware) if isinstance(hardware, str) else hardware
        self._batch_size, self._optimizer = batch_size, optimizer
        machines = ", ".join(known_machines())
        self.no_machine = (
            "No machine to predict for: hardware=wb.calibrate(session) measures this one, hardware= also takes a file, "
            f"or one of {machines}."
        )
        self.costs: ModelCosts | None = None
        self.problem = "counting what the layers cost\u2026"
        self._last: tuple[ResolvedStrategy, Estimate] | None = None
        self._before: Estimate | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """Output shape of one sample, by layer."""
        return {row.layer.name: row.output_shape for row in self.costs.rows} if self.costs else {}

    @property
    def missing(self) -> str:
        """Why nothing can be predicted; empty where something can."""
        if self.hardware is None:
            return self.no_machine
        return "" if self.costs is not None else self.problem

    def estimate(self, resolved: ResolvedStrategy) -> Estimate | None:
        """What the cost model says about a strategy; None where it cannot say anything, and ``problem`` says why."""
        if self.costs is None or self.hardware is None:
            return None
        by_name = {layer.name: layer for layer in resolved.layers}
        in_order = tuple(by_name[row.layer.name] for row in self.costs.rows if row.layer.name in by_name)
        try:
            return estimate(
                self.costs,
                replace(resolved, layers=in_order),
                self.hardware,
                self._batch_size,
                optimizer=self._optimizer,
                with_timeline=_num_actions(resolved) <= _MAX_ACTIONS,
            )
        except StrategyError as error:
            self.problem = str(error)
            return None

    def predict(self, resolved: ResolvedStrategy, is_old: bool) -> Prediction | str:
        """What is shown for the last valid strategy, beside that before the last change; or why nothing is."""
        if self.missing:
            return self.missing
        assert self.hardware is not None
        if self._last is None or self._last[0] != resolved:
            found = self.estimate(resolved)
            if found is None:
                return self.problem
            self._before = self._last[1] if self._last else None
            self._last = (resolved, found)
        return Prediction(self._last[1], resolved, self._before, self.hardware.memory_bytes, self.hardware.name, is_old)


def _num_actions(resolved: ResolvedStrategy) -> int:
    """Forward and backward of every micro-batch on every stage."""
    return 2 * resolved.num_stages * resolved.num_micro_batches


__all__ = ["Predictor"]
