"""A strategy is a table: one row per layer pattern, and options. A value that notebook and engines share.

    conv*: data; fc*: model; head: model@1 | 2x1x2 mb=4 1f1b

A row is ``pattern: choice[@stage]`` with choices ``data``, ``model``, ``model:column``, ``model:row``, ``expert``,
``expert:N``. A pattern is a module path with ``*`` and numeric ranges (``blocks.[4-11]``, and ``blocks.[04-11]`` for
04, 05 ... 11) and covers its subtree; a character of a name that would mean something else is written as in a web
address (``a%3Bb`` for ``a;b``). The last matching row wins, and ``expert`` is for experts only. A layer without a stage
lives on the stage of its predecessor, the first on stage 0; what no row matches is ``data``.
Options: the degrees ``pipeline x data x model``, or for stages of different width one ``data x model`` for each, joined
by ``+`` (``2x1x2`` is ``1x2+1x2``); ``mb=`` micro-batches, a schedule, ``zero=`` 0 to 3, ``shards=`` (ZeRO splits over
groups of so many data ranks, and groups hold copies), ``recompute``
(or ``recompute=attention``, ``recompute=cheap``, ``recompute=4`` blocks),
``offload=optimizer``, ``offload=activations`` or ``offload=optimizer+activations`` (the optimizer's state, what forward
keeps for backward, or both lie in the host's memory, or for CPUs in files),
``sequence`` (between model-parallel layers, the model axis splits dim 1 instead of holding all of it on every rank),
``context=`` (so many of the data ranks take the same samples, and each a slice of their sequence),
``overlap=`` (row-split linear layers compute so many pieces of their rows, and the sum over ranks of one piece overlaps
with the product of the next), ``bf16``, ``fp16`` or ``fp8`` (products of linear layers in 8 bits, else as ``bf16``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any
from urllib.parse import unquote

from workbench.core.degrees import mistakes_of_degrees, mistakes_of_overlap
from workbench.core.expert_rows import mistakes_of_experts, number_in_list, over_data
from workbench.core.options import PRECISIONS, SCHEDULES, V_SCHEDULES, Options, parse_options
from workbench.core.recompute_kinds import mistakes_of_recompute
from workbench.core.row_mistakes import mistakes_of_rows
from workbench.core.rows import Layer, Row, clauses_of, in_order_of_calls, listed_order, num_blocks, parse_rows, quoted
from workbench.core.weight_splits import overlaps, split_dim, splits_of, tied_pairs
from workbench.errors import StrategyError


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake of a strategy for a model: its layer (or None), a message, and fixes."""

    layer: str | None
    message: str
    fixes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.layer}: {self.message}" if self.layer else self.message


@dataclass(frozen=True, slots=True)
class ResolvedLayer:
    """What one layer, of class ``kind``, does.

    Attributes:
        split: "column", "row", "expert" or None (nothing of it is split).
        over_data: of "expert", over how many ranks of the data axis experts are split, besides the model axis.
        expert: of "expert", for a part of one of a list of experts: its number, and how many there are.
    """

    name: str
    parallel: str
    split: str | None
    stage: int
    kind: str = ""
    over_data: int = 1
    expert: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ResolvedStrategy:
    """A strategy applied to the layers of one model and a number of ranks."""

    layers: tuple[ResolvedLayer, ...]
    degrees: tuple[int, int, int]
    options: Options

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.options.num_micro_batches

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages together."""
        return self.options.num_ranks if self.options.widths else prod(self.degrees)

    @property
    def schedule(self) -> str:
        """Name of the pipeline schedule."""
        return self.options.schedule or "1f1b"

    @property
    def num_stages(self) -> int:
        """Pipeline stages; several on a rank under the schedules of ``VIRTUAL_SCHEDULES``, else one."""
        return max((layer.stage for layer in self.layers), default=0) + 1

    def slice_of(self, stage: int) -> int:
        """The slice of the pipeline axis on which a stage lies: stages go round the slices, or forth and back (V)."""
        turn, place = divmod(stage, self.degrees[0])
        return self.degrees[0] - 1 - place if turn % 2 and self.schedule in V_SCHEDULES else place

    def stages_by_slice(self) -> list[list[int]]:
        """The stages of every slice of the pipeline axis."""
        found: list[list[int]] = [[] for _ in range(self.degrees[0])]
        for stage in range(self.num_stages):
            found[self.slice_of(stage)].append(stage)
        return found

    def stage_width(self, stage: int) -> tuple[int, int]:
        """Data and model degree of a stage."""
        widths = self.options.widths
        return widths[self.slice_of(stage)] if widths else self.degrees[1:]

    def shard_groups(self, stage: int) -> int:
        """Into how many groups a stage's data ranks are cut, each of which holds all of ZeRO's shards."""
        return self.stage_width(stage)[0] // (self.options.shards or self.stage_width(stage)[0])

    def stage_axes(self, stage: int) -> dict[str, int]:
        """The sizes of a stage's axes by name. Those of data and context are the data degree; one of 1 is left out."""
        data, model = self.stage_width(stage)
        sizes = {"data": data // self.options.context, "context": self.options.context, "model": model}
        return {name: size for name, size in sizes.items() if size > 1} or {"data": 1}

    def stage_grid(self, stage: int) -> list[list[int]]:
        """The ranks of a stage: one row per data-parallel replica, one column per slice of the model axis."""
        data, model = self.stage_width(stage)
        before = (self.stage_width(slice_) for slice_ in range(self.slice_of(stage)))
        first = sum(rows * columns for rows, columns in before)
        return [[first + d * model + m for m in range(model)] for d in range(data)]

    def stage_ranks(self, stage: int) -> list[int]:
        """The ranks of a stage, in order."""
        return [rank for row in self.stage_grid(stage) for rank in row]


class Strategy:
    """Which layer is data parallel, which model parallel, and on which pipeline stage.

    Args:
        rows: the text of rows ``pattern: choice`` and, after a ``|``, of options (``"data"`` alone is ``"*: data"``);
            or the rows as a dict, ``{pattern: choice}``. ``with_options`` adds options.

    Raises:
        StrategyError: a row or an option does not parse. It lists all mistakes.

    >>> Strategy("conv*: data; fc*: model; head: model@1 | 2x1x2 mb=4 1f1b").options.degrees
    (2, 1, 2)
    >>> Strategy({"fc*": "data", "head": "model@1"}).with_options(num_micro_batches=4)
    Strategy('fc*: data; head: model@1 | mb=4')
    """

    __slots__ = ("options", "rows")

    def __init__(self, rows: str | Mapping[str, str]) -> None:
        mistakes: list[str] = []
        if isinstance(rows, Mapping):
            clauses, options_text = clauses_of(rows, mistakes), ""
        elif isinstance(rows, str):
            rows_text, _, options_text = rows.partition("|")
            clauses = rows_text.split(";")
        else:
            raise StrategyError(
                f"{rows!r} is of type {type(rows).__name__}, not a strategy: give its text, such as '*: data', or its "
                "rows as a dict, such as {'*': 'data'}."
            )
        self.rows: tuple[Row, ...] = parse_rows(clauses, mistakes, options_text.strip())
        self.options: Options = parse_options(options_text, mistakes)
        if mistakes:
            raise StrategyError(f"strategy {rows!r}: " + "; ".join(mistakes))

    @classmethod
    def from_rows(cls, rows: Iterable[Row], options: Options | None = None) -> Strategy:
        """A strategy from its parts."""
        strategy = cls.__new__(cls)
        strategy.rows, strategy.options = tuple(rows), options or Options()
        return strategy

    def with_options(self, **changes: Any) -> Strategy:
        """The same rows with some options changed, by their names in ``Options``: ``num_micro_batches=4``, ``zero=3``.

        Raises:
            StrategyError: there is no such option, or it cannot have this value.
        """
        return Strategy.from_rows(self.rows, self.options.with_changes(**changes))

    def __str__(self) -> str:
        rows, options = "; ".join(map(str, self.rows)), str(self.options)
        return f"{rows} | {options}" if options else rows

    def __repr__(self) -> str:
        return f"Strategy({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Strategy) and (self.rows, self.options) == (other.rows, other.options)

    def __hash__(self) -> int:
        return hash((self.rows, self.options))

    def __getstate__(self) -> str:
        return str(self)

    def __setstate__(self, text: str) -> None:
        self.__init__(text)  # type: ignore[misc]

    def row_of(self, layer: Layer) -> Row | None:
        """The row that applies to a layer: the last one that matches; ``expert`` matches experts only."""
        rows = (row for row in reversed(self.rows) if layer.experts or row.parallel != "expert")
        return next((row for row in rows if row.matches(layer.name)), None)

    def rows_of(self, layers: Sequence[Layer]) -> list[Row]:
        """The row that applies to each layer; a row that says ``data`` where none matches."""
        names = tuple(layer.name for layer in layers)
        others = tuple(row for row in self.rows if row.parallel != "expert")
        decide, decide_others = _deciding_rows(self.rows, names), _deciding_rows(others, names)
        rows = zip(layers, decide, decide_others, strict=True)
        return [row if layer.experts else other for layer, row, other in rows]

    def check(self, layers: Sequence[Layer], num_ranks: int) -> list[Mistake]:
        """All mistakes of this strategy for these layers on ``num_ranks`` ranks; empty if there are none."""
        options, rows, resolved = self.options, self.rows_of(layers), self._applied(layers, num_ranks)
        stages, splits = [each.stage for each in resolved.layers], [each.split for each in resolved.layers]
        widths = [resolved.stage_width(stage) for stage in stages]
        num_overlapping = sum(overlaps(c.kind, c.split, resolved.stage_width(c.stage)[1]) for c in resolved.layers)
        mistakes = [Mistake(None, *each) for each in mistakes_of_rows(self.rows, layers)]
        mistakes += _check_stages(layers, stages)
        of_degrees = mistakes_of_degrees(options, resolved.degrees, max(stages, default=0) + 1, num_ranks)
        mistakes += [Mistake(None, *each) for each in of_degrees] + _check_ties(layers, rows, splits)
        mistakes += [Mistake(*each) for each in mistakes_of_experts(self.rows, layers, rows, widths)]
        of_options = mistakes_of_overlap(options, len(layers), num_overlapping)
        of_options += mistakes_of_recompute(options.recompute, num_blocks(layers))
        return mistakes + [Mistake(None, *each) for each in of_options]

    def resolve(self, layers: Sequence[Layer], num_ranks: int) -> ResolvedStrategy:
        """The choice of every layer.

        Raises:
            StrategyError: the strategy does not fit. It lists all mistakes.
        """
        mistakes = self.check(layers, num_ranks)
        if mistakes:
            lines = [f"  {mistake}." + "".join(f" Fix: {fix}." for fix in mistake.fixes[:1]) for mistake in mistakes]
            raise StrategyError(f"strategy {str(self)!r} does not fit:\n" + "\n".join(lines))
        return self._applied(layers, num_ranks)

    def _applied(self, layers: Sequence[Layer], num_ranks: int) -> ResolvedStrategy:
        """The choice of every layer, whether the strategy fits or not."""
        rows, stages = self.rows_of(layers), _stages(self, layers)
        resolved = ResolvedStrategy((), _degrees(self, layers, num_ranks), self.options)
        choices = []
        for layer, row, split, stage in zip(layers, rows, splits_of(layers, rows, stages), stages, strict=True):
            width = resolved.stage_width(stage)
            spread = over_data(row, *width), number_in_list(row, layer, *width)
            choices.append(ResolvedLayer(layer.name, row.parallel, split, stage, layer.kind, *spread))
        return replace(resolved, layers=tuple(choices))


@lru_cache(maxsize=64)
def _deciding_rows(rows: tuple[Row, ...], names: tuple[str, ...]) -> tuple[Row, ...]:
    """Patterns that are paths are looked up, so that a row for each of a thousand layers is not a million matches."""
    plain = {unquote(row.pattern): place for place, row in enumerate(rows) if not set("*[") & set(row.pattern)}
    others = [(place, row) for place, row in enumerate(rows) if set("*[") & set(row.pattern)]
    found = []
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
        place = max((plain[path] for path in paths if path in plain), default=-1)
        later = (at for at, row in reversed(others) if at > place and row.matches(name))
        place = next(later, place)
        found.append(rows[place] if place >= 0 else Row(quoted(name)))
    return tuple(found)


def _stages(strategy: Strategy, layers: Sequence[Layer]) -> list[int]:
    rows, stages, stage = strategy.rows_of(layers), [0] * len(layers), 0
    for at in listed_order(layers):
        own = rows[at].stage
        stage = stages[at] = stage if own is None else own
    return stages


def _degrees(strategy: Strategy, layers: Sequence[Layer], num_ranks: int) -> tuple[int, int, int]:
    if strategy.options.degrees:
        return strategy.options.degrees
    widths = strategy.options.widths
    if widths:
        return len(widths), max(data for data, _ in widths), max(model for _, model in widths)
    num_stages = max(_stages(strategy, layers), default=0) + 1
    if strategy.options.schedule == "interleaved":  # two stages on a rank or more, as many as there have to be
        num_stages = next(
            (n for n in range(num_stages // 2, 0, -1) if num_stages % n == num_ranks % n == 0), num_stages
        )
    if strategy.options.schedule in V_SCHEDULES:
        num_stages = (num_stages + 1) // 2
    width = max(1, num_ranks // num_stages)
    uses_model = any(row.parallel == "model" for row in strategy.rows_of(layers))
    context = strategy.options.context
    return (num_stages, context, max(1, width // context)) if uses_model else (num_stages, width, 1)


def _check_stages(layers: Sequence[Layer], stages: Sequence[int]) -> list[Mistake]:
    mistakes, highest = list[Mistake](), max(stages, default=0)
    if all(layer.calls for layer in layers):  # else the first step says where stages go back
        mistakes = _check_order(layers, dict(zip([layer.name for layer in layers], stages, strict=True)))
    if len(layers) < highest + 1:
        mistakes.append(Mistake(None, f"{highest + 1} stages but only {len(layers)} layers; each stage needs one"))
    mistakes += [
        Mistake(None, f"stage {stage} has no layer", (f"put a layer on stage {stage}, or renumber",))
        for stage in sorted(set(range(highest + 1)) - set(stages))
    ]
    return mistakes


def _check_order(layers: Sequence[Layer], stages: Mapping[str, int]) -> list[Mistake]:
    """Layers on an earlier stage than one that is called before them."""
    mistakes, highest, before = [], 0, ""
    for layer in in_order_of_calls(layers):
        stage = stages[layer.name]
        if stage < highest:
            message = f"stage {stage} comes after stage {highest} ({before}): stages cannot go back"
            mistakes.append(Mistake(layer.name, message, (f"use stage {highest}",)))
        elif stage > highest:
            highest, before = stage, layer.name
    return mistakes


def _check_ties(layers: Sequence[Layer], rows: Sequence[Row], splits: Sequence[str | None]) -> list[Mistake]:
    """Layers that share a weight but cut it differently."""
    mistakes = []
    for first, later in tied_pairs(layers):
        one, two = layers[first], layers[later]
        dims = split_dim(one.kind, splits[first]), split_dim(two.kind, splits[later])
        if dims[0] == dims[1]:
            continue
        cut = [f"cut along dim {dim}" if dim is not None else "whole" for dim in dims]
        message = (
            f"shares its weight {one.shapes.get('weight', ())} with {one.name}, which leaves it {cut[0]} "
            f"({_choice(rows[first], splits[first])}), while {_choice(rows[later], splits[later])} here means "
            f"{cut[1]}: one tensor lies in one way"
        )
        same = next((s for s in ("column", "row") if split_dim(two.kind, s) == dims[0]), None)
        fix = f"{quoted(two.name)}: " + (f"model:{same}" if dims[0] is not None else "data")
        mistakes.append(Mistake(two.name, message, (f"write {fix!r}",)))
    return mistakes


def _choice(row: Row, split: str | None) -> str:
    return f"model:{split}" if split else row.parallel


__all__ = [
    "PRECISIONS", "SCHEDULES", "Layer", "Mistake", "Options", "ResolvedLayer", "ResolvedStrategy", "Row", "Strategy",
]  # fmt: skip
