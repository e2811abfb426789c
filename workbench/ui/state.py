"""The panel's state: one strategy being edited, its mistakes, the last valid one, undo. No widget, no drawing.

Every edit goes in as a method call and leaves the state consistent; views are computed from it afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from workbench.core.presets import PRESETS, preset
from workbench.core.strategy import Layer, Mistake, Options, ResolvedStrategy, Row, Strategy
from workbench.errors import StrategyError
from workbench.ui.placing import Choice, Degrees

CUSTOM = "custom"
_SPLIT_CYCLE = {None: "column", "column": "row", "row": None}


@dataclass(frozen=True, slots=True)
class _Moment:
    """What undo brings back."""

    strategy: Strategy
    base: str
    own_degrees: bool


class PanelState:
    """A strategy for ``layers`` on ``num_ranks`` ranks while it is being edited.

    Args:
        strategy: a preset's name, a strategy's text, a ``Strategy``, or None for the preset ``data``.

    Raises:
        StrategyError: the text does not parse. A strategy that parses but does not fit is accepted: its mistakes are
            shown like those of an edit.

    >>> state = PanelState([Layer("fc1", "Linear"), Layer("fc2", "Linear")], num_ranks=2)
    >>> state.set_parallel(["fc2"], "model")
    >>> state.text, state.label
    ('*: data; fc2: model', 'data, edited')
    """

    def __init__(self, layers: Sequence[Layer], num_ranks: int, strategy: Strategy | str | None = None) -> None:
        self.layers = list(layers)
        self.num_ranks = num_ranks
        self.text_problem = ""
        self.draft = ""
        self._now = self._opening(strategy if strategy is not None else "data")
        self._before: list[_Moment] = []
        self._after: list[_Moment] = []
        self.mistakes: list[Mistake] = []
        self._valid: ResolvedStrategy | None = None
        self._check()

    # ---- what is shown ------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The strategy as edited, valid or not."""
        return self._now.strategy

    @property
    def text(self) -> str:
        """The strategy on one line; while a text does not parse, that text."""
        return self.draft if self.text_problem else str(self.strategy)

    @property
    def base(self) -> str:
        """Name of the preset that the strategy started from, or ``"custom"``."""
        return self._now.base

    @property
    def label(self) -> str:
        """The base's name, with ``", edited"`` once a row or an option differs from it."""
        return f"{self.base}, edited" if self.is_edited else self.base

    @property
    def is_edited(self) -> bool:
        """Does the strategy do anything else than the preset that it started from?"""
        if self.base == CUSTOM:
            return False
        original = preset(self.base, self.layers, self.num_ranks)
        if original == self.strategy:
            return False
        return self.mistakes != [] or self._valid != _resolved(original, self.layers, self.num_ranks)

    @property
    def choices(self) -> list[Choice]:
        """What is chosen for every layer; splits that were left open are as last resolved."""
        valid = self._valid.layers if self._valid and not self.mistakes else None
        written = _written_choices(self.strategy, self.layers)
        return [replace(choice, split=valid[i].split) for i, choice in enumerate(written)] if valid else written

    @property
    def drawn(self) -> list[Choice]:
        """The last valid choices: what pictures show while there are mistakes."""
        if self._valid is None:
            return [Choice("data") for _ in self.layers]
        return [Choice(layer.parallel, layer.split, layer.stage) for layer in self._valid.layers]

    @property
    def degrees(self) -> Degrees:
        """Degrees of the last valid strategy."""
        return Degrees(*self._valid.degrees) if self._valid else Degrees(1, self.num_ranks, 1)

    @property
    def written_degrees(self) -> Degrees:
        """Degrees as the user set them, where they are set; they need not fit."""
        return Degrees(*self.strategy.options.degrees) if self.strategy.options.degrees else self.degrees

    @property
    def options(self) -> Options:
        """Options of the strategy as edited."""
        return self.strategy.options

    @property
    def num_problems(self) -> int:
        """How many things keep the strategy from running."""
        return len(self.mistakes) + bool(self.text_problem)

    @property
    def can_run(self) -> bool:
        """Is the strategy valid for this model on these ranks?"""
        return self.num_problems == 0

    @property
    def can_undo(self) -> bool:
        return bool(self._before)

    @property
    def can_redo(self) -> bool:
        return bool(self._after)

    # ---- edits --------------------------------------------------------------------------------------------------

    def set_parallel(self, names: Iterable[str], parallel: str) -> None:
        """Make layers ``"data"`` or ``"model"`` parallel; how model-parallel weights are split is left open."""
        self._edit_rows(names, lambda row: replace(row, parallel=parallel, split=None))

    def cycle_split(self, names: Iterable[str]) -> None:
        """Next way to split a model-parallel weight: open, column, row, open."""
        self._edit_rows(names, lambda row: replace(row, parallel="model", split=_SPLIT_CYCLE[row.split]))

    def set_stage(self, names: Iterable[str], stage: int) -> None:
        """Put layers on a pipeline stage; layers after them follow unless their own row says otherwise."""
        self._edit_rows(names, lambda row: replace(row, stage=stage))

    def set_degrees(self, degrees: Degrees) -> None:
        """Fix pipeline x data x model; until then they follow from the rows."""
        options = replace(self.options, degrees=(degrees.pipeline, degrees.data, degrees.model), widths=None)
        self._become(_Moment(Strategy.from_rows(self.strategy.rows, options), self.base, own_degrees=True))

    def set_options(self, **changes: object) -> None:
        """Change ``num_micro_batches`` or ``schedule``."""
        self._become(replace(self._now, strategy=self.strategy.with_options(**changes)))

    def set_preset(self, name: str) -> None:
        """Start again from a preset. One that cannot be made for this model is a problem of the text, not a crash."""
        try:
            self._become(_Moment(preset(name, self.layers, self.num_ranks), name, own_degrees=False))
        except StrategyError as error:
            self.draft, self.text_problem = self.text, str(error)

    def set_text(self, text: str) -> None:
        """Take a strategy from its text, or a preset's name. Text that does not parse changes nothing but the draft."""
        if text.strip() == self.text:
            return
        try:
            self._become(self._opening(text))
        except StrategyError as error:
            self.draft, self.text_problem = text, str(error)

    def apply_fix(self, fix: str, layer: str | None = None) -> bool:
        """Do what a mistake's fix says; False where only the user can."""
        if (match := re.fullmatch(r"use stage (\d+)", fix)) and layer is not None:
            self.set_stage([layer], int(match[1]))
        elif match := re.fullmatch(r"use (\d+)x(\d+)x(\d+)", fix):
            self.set_degrees(Degrees(*map(int, match.groups())))
        elif match := re.fullmatch(r"write '(.+)'", fix):
            self._rewrite_unmatched(match[1])
        else:
            return False
        return True

    def undo(self) -> None:
        """Take back the last edit."""
        self._travel(self._before, self._after)

    def redo(self) -> None:
        """Do the edit again that was taken back."""
        self._travel(self._after, self._before)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _opening(self, strategy: Strategy | str) -> _Moment:
        if isinstance(strategy, str) and strategy.strip() in PRESETS:
            name = strategy.strip()
            return _Moment(preset(name, self.layers, self.num_ranks), name, own_degrees=False)
        value = Strategy(strategy) if isinstance(strategy, str) else strategy
        return _Moment(value, CUSTOM, own_degrees=value.options.degrees is not None)

    def _edit_rows(self, names: Iterable[str], change: object) -> None:
        rows = list(self.strategy.rows)
        for name in names:
            current = Strategy.from_rows(rows).row_of(name) or Row(name)
            wanted = replace(change(current), pattern=name)  # type: ignore[operator]
            rows = _with_row(rows, wanted)
        options = self.options if self._now.own_degrees else replace(self.options, degrees=None)
        self._become(replace(self._now, strategy=Strategy.from_rows(rows, options)))

    def _rewrite_unmatched(self, clause: str) -> None:
        """Put ``clause`` in the place of the first row that matches no layer."""
        rows = list(self.strategy.rows)
        names = [layer.name for layer in self.layers]
        wrong = next((i for i, row in enumerate(rows) if not any(row.matches(name) for name in names)), None)
        if wrong is not None:
            rows[wrong] = Strategy(clause).rows[0]
            self._become(replace(self._now, strategy=Strategy.from_rows(rows, self.options)))

    def _become(self, moment: _Moment) -> None:
        """Go to a new moment. The one before can be undone to; what was undone is forgotten."""
        self.text_problem = self.draft = ""
        if moment.strategy != self._now.strategy:
            self._before.append(self._now)
            self._after.clear()
        self._now = moment
        self._check()

    def _travel(self, source: list[_Moment], target: list[_Moment]) -> None:
        self.text_problem = self.draft = ""
        if source:
            target.append(self._now)
            self._now = source.pop()
        self._check()

    def _check(self) -> None:
        self.mistakes = self.strategy.check(self.layers, self.num_ranks)
        if not self.mistakes:
            self._valid = self.strategy.resolve(self.layers, self.num_ranks)


def _with_row(rows: Sequence[Row], wanted: Row) -> list[Row]:
    """``rows`` with one layer's own row replaced, or left out where the other rows say the same."""
    others = [row for row in rows if row.pattern != wanted.pattern]
    said = Strategy.from_rows(others).row_of(wanted.pattern)
    if said is not None and replace(said, pattern=wanted.pattern) == wanted:
        return others
    place = next((i for i, row in enumerate(rows) if row.pattern == wanted.pattern), None)
    if place is not None and Strategy.from_rows(rows).row_of(wanted.pattern) == rows[place]:
        return [*rows[:place], wanted, *rows[place + 1 :]]
    return [*others, wanted]


def _written_choices(strategy: Strategy, layers: Sequence[Layer]) -> list[Choice]:
    """Choices as the rows say, valid or not; a layer without a stage is on its predecessor's."""
    choices: list[Choice] = []
    for layer in layers:
        row = strategy.row_of(layer.name) or Row(layer.name)
        stage = row.stage if row.stage is not None else choices[-1].stage if choices else 0
        choices.append(Choice(row.parallel, row.split, stage))
    return choices


def _resolved(strategy: Strategy, layers: Sequence[Layer], num_ranks: int) -> ResolvedStrategy | None:
    return None if strategy.check(layers, num_ranks) else strategy.resolve(layers, num_ranks)
