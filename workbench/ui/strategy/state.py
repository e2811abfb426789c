"""The panel's state: one strategy being edited, its mistakes, the last valid one, undo. No widget, no drawing.

Every edit is a method call that leaves the state consistent. Views are computed from the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from workbench.core.ineffective_choices import IneffectiveChoice, find_ineffective_choices
from workbench.core.options import parse_options
from workbench.core.presets import PRESETS, StrategyLike, preset_name, strategy_of
from workbench.core.rows import Layer, Row, quoted
from workbench.core.strategy import Mistake, Options, ResolvedLayer, ResolvedStrategy, Strategy
from workbench.errors import StrategyError
from workbench.ui.strategy import edit_rows
from workbench.ui.strategy.choices import Choice, Degrees
from workbench.ui.strategy.grouping import Node, find, fold, tree, visible, walk
from workbench.ui.strategy.grouping import Row as GridRow

PLANNED = "planner's choice"


@dataclass(frozen=True, slots=True)
class _UndoEntry:
    """The state that undo restores. ``origin`` is the name of the strategy before its edits; None without a name."""

    strategy: Strategy
    num_ranks: int
    base: str
    origin: Strategy | None
    own_degrees: bool


class PanelState:
    """A strategy for ``layers`` on ``num_ranks`` ranks while it is being edited.

    Edits name rows: by their identity (``nodes``), by the name of a layer, or by a pattern.

    Args:
        strategy: any value that `strategy_of` takes, or None for the preset ``data``.

    Raises:
        StrategyError: the text does not parse. A strategy that parses but does not fit is accepted: its mistakes are
            shown like those of an edit.

    >>> state = PanelState([Layer("fc1", "Linear"), Layer("fc2", "Linear")], num_ranks=2)
    >>> state.set_choice(["fc2"], "model")
    >>> state.text, state.label
    ('*: data; fc2: model', 'data, edited')
    """

    def __init__(self, layers: Sequence[Layer], num_ranks: int, strategy: StrategyLike | None = None) -> None:
        self.layers = list(layers)
        self.text_problem = ""
        self.draft = ""
        self.unfolded: set[str] = set()
        self.wanted_name = ""
        self._now = self._opening(strategy if strategy is not None else "data", num_ranks)
        self.presets: dict[str, str] = {}
        self._presets_for = 0
        self._before: list[_UndoEntry] = []
        self._after: list[_UndoEntry] = []
        self.mistakes: list[Mistake] = []
        self.resolved = Strategy("*: data").resolve(self.layers, num_ranks)
        self.choices: list[Choice] = []
        self.nodes: list[Node] = []
        self._check()

    # ---- what is shown ------------------------------------------------------------------------------------------

    @property
    def strategy(self) -> Strategy:
        """The edited strategy, valid or not."""
        return self._now.strategy

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the strategy."""
        return self._now.num_ranks

    @property
    def text(self) -> str:
        """The strategy on one line, or the user's text while it does not parse."""
        return self.draft if self.text_problem else str(self.strategy)

    @property
    def base(self) -> str:
        """The preset that the strategy started from, with its options; empty for written rows."""
        return self._now.base

    @property
    def label(self) -> str:
        """The base's name, with ``", edited"`` once a row or an option differs from it; a text is its own name."""
        if not self.base:
            return str(self.strategy)
        return f"{self.base}, edited" if self.is_edited else self.base

    @property
    def is_edited(self) -> bool:
        """Whether the strategy differs from the one that it started from."""
        origin = self._now.origin
        if origin is None or origin == self.strategy:
            return False
        return self.mistakes != [] or self.resolved != _resolved(origin, self.layers, self.num_ranks)

    @property
    def rows(self) -> list[GridRow]:
        """The rows of the grid: the unfolded ones, or the layers of a search."""
        return find(self.layers, self.wanted_name) if self.wanted_name else visible(self.nodes, self.unfolded)

    @property
    def drawn(self) -> list[Choice]:
        """The last valid choices, which pictures show while there are mistakes."""
        return [self._drawn(layer) for layer in self.resolved.layers]

    @property
    def hints(self) -> list[IneffectiveChoice]:
        """Choices of the last valid strategy that have no effect."""
        return find_ineffective_choices(self.resolved)

    @property
    def degrees(self) -> Degrees:
        """Degrees of the last valid strategy."""
        return Degrees(*self.resolved.degrees)

    @property
    def written_degrees(self) -> Degrees:
        """The degrees that the user set; they need not fit."""
        return Degrees(*self.options.degrees) if self.options.degrees else self.degrees

    @property
    def options(self) -> Options:
        """Options of the edited strategy."""
        return self.strategy.options

    @property
    def num_problems(self) -> int:
        """The number of mistakes; the same mistake at several layers counts once."""
        return len({mistake.message for mistake in self.mistakes}) + bool(self.text_problem)

    @property
    def can_run(self) -> bool:
        """Whether the strategy is valid for this model on these ranks."""
        return self.num_problems == 0

    @property
    def can_undo(self) -> bool:
        """Whether there is an edit to undo, or text that does not parse."""
        return bool(self._before or self.text_problem)

    @property
    def can_redo(self) -> bool:
        """Whether there is an undone edit."""
        return bool(self._after)

    # ---- edits --------------------------------------------------------------------------------------------------

    def set_choice(self, names: Iterable[str], choice: str) -> None:
        """Set rows to ``data``, ``model``, ``model:column``, ``model:row``, ``expert`` or ``expert:4``.

        ``expert`` is for experts: it leaves other layers of a row as they are.
        """
        parallel, _, how = choice.partition(":")
        split, ranks = (None, int(how)) if how.isdecimal() else (how or None, None)
        change = partial(replace, parallel=parallel, split=split, ranks=ranks)
        self._edit_rows(names, change, experts_only=parallel == "expert")

    def set_stage(self, names: Iterable[str], stage: int) -> None:
        """Put rows on a pipeline stage; layers after them follow unless their own row says otherwise."""
        self._edit_rows(names, lambda row: replace(row, stage=stage))

    def set_degrees(self, degrees: Degrees) -> None:
        """Fix pipeline x data x model; until then they follow from the rows."""
        options = replace(self.options, degrees=(degrees.pipeline, degrees.data, degrees.model), widths=None)
        strategy = Strategy.from_rows(self.strategy.rows, options)
        self._become(replace(self._now, strategy=strategy, own_degrees=True))

    def set_num_ranks(self, num_ranks: int) -> None:
        """Change the number of ranks. A preset is made anew; else the data axis takes the remaining ranks."""
        if num_ranks == self.num_ranks:
            return
        if preset_name(self.base) and not self.is_edited and not _try_preset(self.base, self.layers, num_ranks):
            self._become(self._opening(self.base, num_ranks))
            return
        options = _for_ranks(self.options, num_ranks)
        strategy = Strategy.from_rows(self.strategy.rows, options)
        self._become(replace(self._now, strategy=strategy, num_ranks=num_ranks))

    def set_options(self, **changes: object) -> None:
        """Change any of ``core.options.Options``: micro-batches, schedule, ZeRO, context and others.

        Stages that are those of the preset ``pipeline`` become as many as the schedule takes.
        """
        strategy = self.strategy.with_options(**changes)
        if strategy.options.schedule != self.options.schedule and self._pipeline_rows(self.options) == strategy.rows:
            rows = self._pipeline_rows(strategy.options) or strategy.rows
            strategy = Strategy.from_rows(rows, strategy.options)
        self._become(replace(self._now, strategy=strategy))

    def set_preset(self, name: str) -> None:
        """Start again from a preset. One that cannot be made for this model is a problem of the text, not a crash."""
        try:
            self._become(self._opening(name, self.num_ranks))
        except StrategyError as error:
            self.draft, self.text_problem = self.text, str(error)

    def set_planned(self, strategy: Strategy) -> None:
        """Start again from a planner's choice."""
        self._become(_UndoEntry(strategy, self.num_ranks, PLANNED, strategy, own_degrees=False))

    def set_text(self, text: str) -> None:
        """Take a strategy from its text, or a preset's name. One that was here before gets its name back; degrees that
        the text names stay when rows are edited. Text that does not parse changes only the draft.
        """
        if text.strip() == self.text:
            return
        earlier = [now for now in (*self._before, self._now) if str(now.strategy) == text.strip()]
        known = [now for now in earlier if now.num_ranks == self.num_ranks]
        try:
            written = self._opening(text, self.num_ranks)
            self._become(replace(known[-1], own_degrees=written.own_degrees) if known else written)
        except StrategyError as error:
            self.draft, self.text_problem = text, str(error)

    def write_row(self, row: Row) -> None:
        """Put a row in the place of the first that matches no layer, or at the end, without rows that it hides."""
        rows = list(self.strategy.rows)
        wrong = edit_rows.first_unmatched(rows, self.layers)
        rows = [*rows, row] if wrong is None else [*rows[:wrong], row, *rows[wrong + 1 :]]
        rows = edit_rows.without_hidden(rows)
        self._become(replace(self._now, strategy=Strategy.from_rows(rows, self.options)))

    def fold(self, pattern: str) -> None:
        """Show the rows below a row, or hide them."""
        node = self._node(pattern)
        if node is not None and node.children:
            self.unfolded = fold(node, self.unfolded)

    def look_for(self, name: str) -> None:
        """Show only layers whose names contain ``name`` or match it as a glob; all rows if it is empty."""
        self.wanted_name = name.strip()

    def undo(self) -> None:
        """Take back the last edit; text that does not parse first."""
        if self.text_problem:
            self.text_problem = self.draft = ""
            return
        self._move_through_history(self._before, self._after)

    def redo(self) -> None:
        """Repeat the undone edit."""
        self._move_through_history(self._after, self._before)

    @contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """Context that undoes the edits inside if it ends with an exception."""
        moment, before, after = self._now, list(self._before), list(self._after)
        draft = self.draft, self.text_problem
        try:
            yield
        except BaseException:
            self._now, self._before, self._after = moment, before, after
            self.draft, self.text_problem = draft
            self._check()
            raise

    # ---- inside -------------------------------------------------------------------------------------------------

    def _opening(self, strategy: StrategyLike, num_ranks: int) -> _UndoEntry:
        value = strategy_of(strategy, self.layers, num_ranks)
        if isinstance(strategy, str) and preset_name(strategy):
            name, _, options = map(str.strip, strategy.partition("|"))
            base = f"{name} | {options}" if options else name
            return _UndoEntry(value, num_ranks, base, value, own_degrees=bool(parse_options(options, []).degrees))
        return _UndoEntry(value, num_ranks, "", None, own_degrees=value.options.degrees is not None)

    def _pipeline_rows(self, options: Options) -> tuple[Row, ...] | None:
        """The rows of the preset ``pipeline``; None if it cannot be made."""
        try:
            return strategy_of(f"pipeline | {options}", self.layers, self.num_ranks).rows
        except StrategyError:
            return None

    def _drawn(self, layer: ResolvedLayer) -> Choice:
        _, model = self.resolved.stage_width(layer.stage)
        if layer.parallel == "expert":
            return Choice("expert", str(layer.over_data * model), layer.stage)
        return Choice(layer.parallel, None if layer.split == "expert" else layer.split, layer.stage)

    def _edit_rows(self, names: Iterable[str], change: Callable[[Row], Row], experts_only: bool = False) -> None:
        targets: dict[str, tuple[int, ...]] = {}
        for name in names:
            pattern, indices = self._row_named(name)
            targets[pattern] = tuple(dict.fromkeys((*targets.get(pattern, ()), *indices)))
        if experts_only:
            having = {name: [i for i in indices if self.layers[i].experts] for name, indices in targets.items()}
            targets = {name: tuple(having[name]) or indices for name, indices in targets.items()}
        rows = edit_rows.edited(self.strategy, self.layers, targets, change)
        options = self.options if self._now.own_degrees else replace(self.options, degrees=None)
        self._become(replace(self._now, strategy=Strategy.from_rows(rows, options)))

    def _row_named(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Pattern and layers of a row of the grid, by its identity; else of a layer, or of a pattern."""
        if (node := self._node(name)) is not None:
            return node.pattern, node.layers
        exact = tuple(index for index, layer in enumerate(self.layers) if name in (layer.name, quoted(layer.name)))
        if exact:
            return quoted(self.layers[exact[0]].name), exact
        return name, tuple(index for index, layer in enumerate(self.layers) if Row(name).matches(layer.name))

    def _node(self, identity: str) -> Node | None:
        """The row with this identity, visible or not; None if there is none."""
        nodes = (*(row.node for row in self.rows), *walk(self.nodes))
        return next((node for node in nodes if node.identity == identity), None)

    def _become(self, moment: _UndoEntry) -> None:
        """Change the state. Undo restores the one before; undone edits are dropped."""
        self.text_problem = self.draft = ""
        if (moment.strategy, moment.num_ranks) != (self._now.strategy, self.num_ranks):
            self._before.append(self._now)
            self._after.clear()
        self._now = moment
        self._check()

    def _move_through_history(self, source: list[_UndoEntry], target: list[_UndoEntry]) -> None:
        self.text_problem = self.draft = ""
        if source:
            target.append(self._now)
            self._now = source.pop()
        self._check()

    def _check(self) -> None:
        if self._presets_for != self.num_ranks:
            self._presets_for = self.num_ranks
            self.presets = {name: _try_preset(name, self.layers, self.num_ranks) for name in PRESETS}
        self.mistakes = self.strategy.check(self.layers, self.num_ranks)
        if not self.mistakes:
            self.resolved = self.strategy.resolve(self.layers, self.num_ranks)
        self.choices = _written_choices(self.strategy, self.layers, self.drawn) if self.mistakes else self.drawn
        self.nodes = tree(self.layers, self.choices)


def _written_choices(strategy: Strategy, layers: Sequence[Layer], drawn: Sequence[Choice]) -> list[Choice]:
    """The choices of the rows, valid or not. A layer without a stage is on its predecessor's; splits are as drawn."""
    choices: list[Choice] = []
    for row, last in zip(strategy.rows_of(layers), drawn, strict=True):
        stage = row.stage if row.stage is not None else choices[-1].stage if choices else 0
        written = str(row.ranks) if row.ranks is not None else row.split
        choices.append(Choice(row.parallel, written or (last.split if row.parallel == last.parallel else None), stage))
    return choices


def _for_ranks(options: Options, num_ranks: int) -> Options:
    """The options for another number of ranks; degrees that do not fit are dropped and follow from the rows."""
    if options.degrees is None and options.widths is None:
        return options
    pipeline, _, model = options.degrees or (0, 0, 0)
    fits = pipeline * model and num_ranks % (pipeline * model) == 0
    degrees = (pipeline, num_ranks // (pipeline * model), model) if fits else None
    return replace(options, degrees=degrees, widths=None)


def _resolved(strategy: Strategy, layers: Sequence[Layer], num_ranks: int) -> ResolvedStrategy | None:
    return None if strategy.check(layers, num_ranks) else strategy.resolve(layers, num_ranks)


def _try_preset(name: str, layers: Sequence[Layer], num_ranks: int) -> str:
    """The reason why a preset cannot be made for this model; empty if it can."""
    try:
        strategy_of(name, layers, num_ranks)
    except StrategyError as error:
        return str(error)
    return ""
