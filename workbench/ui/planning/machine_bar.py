"""The machine of the predictions: a choice, and sliders that change its numbers and the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ipywidgets as widgets

from workbench.cost.hardware import Hardware
from workbench.cost.hardware_files import known_machines, load_hardware
from workbench.ui.controls import bar, button, html, label, on_value
from workbench.ui.planning.machine_factors import MachineFactors, factor_text, machine_number
from workbench.ui.planning.predictor import Predictor
from workbench.ui.tabs import TERMS

MOST_RANKS = 256
NO_MACHINE = "none"
_LABELS = {"links": "links", "memory": "memory", "flops": "products"}


class MachineBar:
    """Changes the predictor's machine. ``box`` is the widget, ``own`` the machine that was given or measured.

    Args:
        predictor: has the machine.
        num_ranks: the first number of ranks.
        on_machine: called after a change of the machine.
        on_ranks: called with a new number of ranks.
    """

    def __init__(
        self,
        predictor: Predictor,
        num_ranks: int,
        on_machine: Callable[[], None],
        on_ranks: Callable[[int], None],
    ) -> None:
        self._predictor, self._on_machine, self._on_ranks = predictor, on_machine, on_ranks
        self.own, self._refreshing = predictor.machine, False
        self._num_ranks = num_ranks
        self.machine = widgets.Dropdown(options=self._machines(), layout={"width": "168px"})
        self.machine.value = predictor.machine.name if predictor.machine else NO_MACHINE
        self.sliders = {name: _slider(name) for name in _LABELS}
        self.values = {name: html("", "wb-machine-value") for name in _LABELS}
        self.ranks = widgets.SelectionSlider(options=_ranks(num_ranks), value=num_ranks, layout={"width": "112px"})
        self.ranks.tooltip = "how many ranks the strategy is for"
        self.reset = button("Reset", self._on_reset, tooltip="the machine as it is, and the ranks that there are")
        on_value(self.machine, self._on_chosen)
        on_value(self.ranks, lambda change: self._user(lambda: self._on_ranks(change["new"])))
        for name, slider in self.sliders.items():
            on_value(slider, lambda change, name=name: self._user(lambda: self._assume(name, change["new"])))  # type: ignore[misc]
        fields = [
            bar(label(_LABELS[name]), self.sliders[name], self.values[name], css=("wb-field",)) for name in _LABELS
        ]
        self.which = bar(label("machine"), self.machine, css=("wb-field",))
        ranks = bar(label("ranks"), self.ranks, self.reset, css=("wb-field",))
        self.numbers = bar(*fields, css=("wb-field",))
        self.box = bar(bar(self.which, ranks, css=("wb-field",)), self.numbers, css=("wb-bar", "wb-wrap", "wb-machine"))

    def adopt(self, machine: Hardware) -> None:
        """Predict for a measured machine, and add it to the choices."""
        self.own, self._predictor.machine, self._predictor.assumed = machine, machine, MachineFactors()
        self._refreshing = True
        self.machine.options = self._machines()
        self._refreshing = False

    def refresh(self, num_ranks: int, precision: str) -> None:
        """Show the assumed machine, and the ranks of the strategy."""
        self._refreshing = True
        try:
            machine, assumed = self._predictor.hardware, self._predictor.assumed
            self.numbers.layout.display = "none" if machine is None else ""
            self.machine.value = machine.name if machine else NO_MACHINE
            for name, slider in self.sliders.items():
                slider.disabled = machine is None
                slider.value = getattr(assumed, name)
                number = machine_number(machine, name, precision) if machine else ""
                times = factor_text(slider.value)
                self.values[name].value = f"<span>{number}</span> <b>{times}</b>" if times else f"<span>{number}</span>"
            if num_ranks not in dict(self.ranks.options).values():
                self.ranks.options = _ranks(num_ranks)
            self.ranks.value = num_ranks
            self.reset.disabled = assumed == MachineFactors() and num_ranks == self._num_ranks
        finally:
            self._refreshing = False

    def _machines(self) -> list[str]:
        own = [self.own.name] if self.own is not None else [NO_MACHINE]
        return [*own, *(name for name in known_machines() if name not in own)]

    def _user(self, action: Callable[[], None]) -> None:
        """Handle a change by the user, not one by ``refresh``."""
        if not self._refreshing:
            action()

    def _on_chosen(self, change: dict[str, Any]) -> None:
        if self._refreshing:
            return
        name = change["new"]
        is_own = self.own is not None and name == self.own.name
        self._predictor.machine = self.own if is_own else None if name == NO_MACHINE else load_hardware(name)
        self._predictor.assumed = MachineFactors()
        self._on_machine()

    def _assume(self, name: str, factor: float) -> None:
        self._predictor.assumed = replace(self._predictor.assumed, **{name: factor})
        self._on_machine()

    def _on_reset(self) -> None:
        self._predictor.assumed = MachineFactors()
        self._on_machine()
        self._on_ranks(self._num_ranks)


def _slider(name: str) -> widgets.FloatLogSlider:
    """A slider from a 64th to 64 times, in half powers of two."""
    return widgets.FloatLogSlider(
        1.0, base=2, min=-6, max=6, step=0.5, readout=False, tooltip=TERMS[_LABELS[name]], layout={"width": "92px"}
    )


def _ranks(num_ranks: int) -> list[tuple[str, int]]:
    """Powers of two, and the present number of ranks."""
    powers = {2**power for power in range(MOST_RANKS.bit_length()) if 2**power <= MOST_RANKS}
    return [(str(number), number) for number in sorted(powers | {num_ranks})]
