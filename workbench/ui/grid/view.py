"""The content of the layer grid as plain data for its script: pure functions from state to dictionary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from workbench.core.expert_rows import fitting_ranks
from workbench.core.layer_extents import LayerExtents
from workbench.core.rows import Layer, count_parameters
from workbench.core.sharding_plan import ShardingPlan
from workbench.core.strategy import Mistake
from workbench.cost.estimate import SentBytes
from workbench.ui.grid import boxing_column, columns
from workbench.ui.grid.boxing_column import End, StepBoxings
from workbench.ui.grid.columns import Column
from workbench.ui.grid.slices import held, picture_size, shape_text
from workbench.ui.number_text import TIMES
from workbench.ui.strategy.fixes import can_apply
from workbench.ui.strategy.grouping import Node, Row
from workbench.ui.strategy.state import PanelState
from workbench.units import format_count

_ROW, _CHILD, _FOLDED, _TALL = 32, 28, 42, 42
_MAX_PICTURES = 4
_FIND_FROM = 40
_STAGES_AS_BUTTONS = 4


@dataclass(frozen=True)
class Facts:
    """The grid's knowledge besides the strategy.

    Attributes:
        batch_size: samples of a step, all ranks together.
        extents: sizes of the inputs and outputs of all layers.
        loss: name of the loss function, shown as the last row.
        is_cross_entropy: whether it is known to be a cross-entropy.
        sent: bytes of a step, skip connections and functions between layers included; None if unknown.
        is_counted: whether ``sent`` was counted in a dry run, and not estimated.
        problem: why the layers' shapes are not known yet, or cannot be; empty if they are.
    """

    batch_size: int
    extents: Sequence[LayerExtents]
    loss: str = ""
    is_cross_entropy: bool = False
    sent: SentBytes | None = None
    is_counted: bool = False
    problem: str = ""


def grid_view(state: PanelState, facts: Facts) -> dict[str, Any]:
    """The whole view: stages and their columns, one entry per visible row, totals."""
    boxings = boxings_of(state, facts)
    drawing = _Drawing(state, facts, columns.columns_of(boxings.plan), boxings)
    has_end = facts.loss and state.layers
    met = boxing_column.end_of(boxings, state.resolved, facts.is_cross_entropy) if has_end else None
    rows, end = drawing.rows(), _end_row(state, facts, met)
    _make_room(rows, end)
    period = "micro-batch" if drawing.boxings.num_micro_batches > 1 else "step"
    total, parts = boxing_column.total_text(drawing.boxings, met, facts.sent, facts.is_counted, facts.problem)
    offered, used = _stage_options(state), _num_stages(state)
    return {
        "ranks_width": columns.total_width(drawing.columns),
        "stages": columns.stage_heads(boxings.plan, drawing.columns),
        "columns": columns.view(drawing.columns),
        "stage_options": offered,
        "new_stage": used if used in offered and len(offered) <= _STAGES_AS_BUTTONS else None,
        "boxing_detail": f"bytes per {period}, forward + back",
        "rows": rows,
        "end": end,
        "find": {"text": state.wanted_name, "shown": len(state.layers) >= _FIND_FROM, "found": len(rows)},
        "note": drawing.note,
        "total": [total, parts],
    }


def boxings_of(state: PanelState, facts: Facts) -> StepBoxings:
    """The boxings of the last valid strategy."""
    return boxing_column.boxings_of(ShardingPlan(state.layers, state.resolved), facts.extents, facts.batch_size)


def _stage_options(state: PanelState) -> list[int]:
    """The stages to choose from: those in use and one more, up to four; for a longer pipeline, a list."""
    used = _num_stages(state)
    return list(
        range(state.num_ranks if used > _STAGES_AS_BUTTONS else min(state.num_ranks, used + 1, _STAGES_AS_BUTTONS))
    )


def _num_stages(state: PanelState) -> int:
    """Number of stages in the strategy's text."""
    written = max((choice.stage for choice in state.choices), default=0) + 1
    return max(state.degrees.pipeline, state.written_degrees.pipeline, written)


def _end_row(state: PanelState, facts: Facts, met: End | None) -> dict[str, Any] | None:
    """The loss, after the last layer. It has no choice. A search for names hides it."""
    if met is None or state.wanted_name:
        return None
    shown = {"layout": met.layout, "boxing": met.boxing}
    return {"label": facts.loss, "text": f"follows {state.layers[-1].name}", "boxings": shown}


@dataclass
class _Drawing:
    """Makes one view."""

    state: PanelState
    facts: Facts
    columns: list[Column]
    boxings: StepBoxings

    def __post_init__(self) -> None:
        self.drawn = self.state.drawn
        self.problems = _problems_by_layer(self.state.mistakes)
        self.hints = {hint.layer: hint for hint in self.state.hints}

    @property
    def note(self) -> str:
        """The legend of the pictures."""
        if any(len(column.ranks) > 1 for column in self.columns):
            return f"a picture per stage: its slices, and how many copies ({TIMES}) \u00b7 \u2013 nothing there"
        return "coloured: the part of the weight that the rank holds \u00b7 \u2013 nothing there"

    def rows(self) -> list[dict[str, Any]]:
        """One entry per visible row."""
        shown = self.state.rows
        found = []
        for index, row in enumerate(shown):
            before = shown[index - 1] if index else None
            is_first_below = before is not None and before.depth < row.depth
            found.append(self._row(index, row, is_first_below))
        self._note_between_blocks(shown, found)
        for row, view in zip(shown, found, strict=True):
            view |= self._hint(row)
            view["boxings"]["note"] = " \u00b7 ".join(filter(None, (view["hint"], view["boxings"]["note"])))
        return found

    def _hint(self, row: Row) -> dict[str, str]:
        """The reason why a row's choice has no effect; empty unless that holds for all of its layers."""
        found = [self.hints.get(self.state.layers[index].name) for index in row.node.layers]
        first = found[0] if not row.unfolded and None not in found else None
        return {"hint": first.message if first else "", "hint_tip": first.reason if first else ""}

    def _row(self, index: int, row: Row, is_first_below: bool) -> dict[str, Any]:
        node, state = row.node, self.state
        mistakes = self._mistakes(row)
        choices = [state.choices[i] for i in node.layers]
        stages = {choice.stage for choice in choices}
        parallel, stage = _common(c.parallel for c in choices), _common(stages)
        layouts = [self._main_layout(i) for i in node.first]
        full = boxing_column.full_text(layouts[0], self.boxings.plan.axes_of(node.first[0]))
        kept = bool(mistakes) and any(state.choices[i] != self.drawn[i] for i in node.layers)
        return {
            "id": f"wb-row-{index}",
            "pattern": node.identity,
            "label": node.label,
            "depth": row.depth,
            "open": row.unfolded,
            "kind": "" if node.children else state.layers[node.layers[0]].kind,
            "weight": self._weight_text(node),
            "params": _parameters_text([state.layers[i] for i in node.layers]),
            "parallel": parallel,
            "experts": self._ranks_of_experts(node),
            "choice_text": _common(map(str, choices)) or "mixed",
            "stage": stage,
            "stages_text": "-".join(map(str, sorted({min(stages), max(stages)}))),
            "on": self._on({self.drawn[i].stage for i in node.layers}),
            "bad": _bad_control(mistakes),
            "sbp": _common(boxing_column.sbp_text(layout) for layout in layouts) or "mixed",
            "sbp_tip": f"weight {full}" if len(set(layouts)) == 1 else "",
            "pictures": [] if row.unfolded else self._pictures(node),
            "kept": kept,
            "mistakes": [_mistake(mistake, count) for mistake, count in mistakes],
            "boxings": boxing_column.boxing_view(
                node, self.boxings, is_open=row.unfolded, is_first_below=is_first_below
            ),
            "height": _height(row),
        }

    def _ranks_of_experts(self, node: Node) -> list[int]:
        """Over how many ranks the row's experts may be split; empty for a row without experts."""
        having = [i for i in node.layers if self.state.layers[i].experts]
        fitting = (
            fitting_ranks(self.state.layers[i].experts, *self.state.resolved.stage_width(self.drawn[i].stage))
            for i in having
        )
        return sorted(set.intersection(*map(set, fitting))) if having else []

    def _on(self, stages: set[int]) -> list[bool]:
        """For each column, whether its ranks hold any of the row's layers."""
        ranks = {rank for stage in stages for rank in self.boxings.plan.placements[stage]}
        return [not ranks.isdisjoint(column.ranks) for column in self.columns]

    def _main_layout(self, index: int) -> Any:
        plan = self.boxings.plan
        return plan.parameter_layout(plan.resolved.layers[index], len(main_weight(self.state.layers[index])))

    def _weight_text(self, node: Node) -> str:
        layers = [self.state.layers[i] for i in (node.layers if node.children else node.first[:1])]
        if len(layers) == 1:
            return shape_text(main_weight(layers[0]))
        return f"{len(layers)} weights"

    def _pictures(self, node: Node) -> list[dict[str, Any]]:
        """Pictures of the row's weight, or of the largest weight in a folded block."""
        if node.children and any(child.children for child in node.children):
            return []
        indices = [i for i in node.first if main_weight(self.state.layers[i])]
        if len(indices) > 1:
            largest = sorted(indices, key=lambda i: -prod(main_weight(self.state.layers[i])))[:_MAX_PICTURES]
            indices = [i for i in indices if i in largest]
        return [self._picture(i, small=len(indices) > 1) for i in indices]

    def _picture(self, index: int, small: bool) -> dict[str, Any]:
        layer, shape = self.state.layers[index], main_weight(self.state.layers[index])
        layout = self._main_layout(index)
        itemsize = layer.itemsize_of(main_parameter(layer))
        slices = [held(shape, layout, column.ranks, column.shade, itemsize) for column in self.columns]
        return {"size": picture_size(shape, small), "slices": slices, "label": layer.name.rpartition(".")[2]}

    def _mistakes(self, row: Row) -> list[tuple[Mistake, int]]:
        """The mistakes of the row's layers, with the number of layers. An open row leaves them to the rows below it."""
        if row.unfolded:
            return []
        counts: Counter[str] = Counter()
        first: dict[str, Mistake] = {}
        for index in row.node.layers:
            for mistake in self.problems.get(self.state.layers[index].name, ()):
                counts[mistake.message] += 1
                first.setdefault(mistake.message, mistake)
        return [(mistake, counts[message]) for message, mistake in first.items()]

    def _note_between_blocks(self, shown: Sequence[Row], found: list[dict[str, Any]]) -> None:
        """The note of the last row in an open block: the boxings to the next block."""
        parents: list[Row] = []
        for index, row in enumerate(shown):
            parents = [*parents[: row.depth], row]
            is_last = index + 1 == len(shown) or shown[index + 1].depth < row.depth
            if row.depth and is_last and not row.node.children:
                text = boxing_column.between_blocks(parents[row.depth - 1].node, self.boxings)
                found[index]["boxings"]["note"] = text or found[index]["boxings"]["note"]


def main_parameter(layer: Layer) -> str:
    """Name of the parameter with the most elements, for a row's picture. Empty for a layer without parameters."""
    return max(layer.shapes, key=lambda name: prod(layer.shapes[name]), default="")


def main_weight(layer: Layer) -> tuple[int, ...]:
    """Shape of ``main_parameter``."""
    return layer.shapes.get(main_parameter(layer), ())


def _parameters_text(layers: Sequence[Layer]) -> str:
    """How many parameters layers have. One that an earlier layer has too counts there: ``"(shared)"`` if all do."""
    count = count_parameters(layers)
    return format_count(count) if count or not any(layer.shapes for layer in layers) else "(shared)"


def _common(values: Any) -> Any:
    """The common value; None if values differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else None


def _height(row: Row) -> int:
    if row.node.children and not row.unfolded:
        return _FOLDED
    return _CHILD if row.depth and not row.node.children else _ROW


def _make_room(rows: list[dict[str, Any]], end: dict[str, Any] | None) -> None:
    """Make rows taller that have badges on both edges, or one badge and a note."""
    if not rows:
        return
    for row, following in zip(rows, [*rows[1:], end], strict=True):
        edges = bool(row["boxings"]["boxing"]) + bool(following and following["boxings"]["boxing"])
        if edges + bool(row["boxings"]["note"]) > 1 and edges:
            row["height"] = max(row["height"], _TALL)


def _problems_by_layer(mistakes: Sequence[Mistake]) -> dict[str, list[Mistake]]:
    found: dict[str, list[Mistake]] = {}
    for mistake in mistakes:
        if mistake.layer is not None:
            found.setdefault(mistake.layer, []).append(mistake)
    return found


def _bad_control(mistakes: Sequence[tuple[Mistake, int]]) -> str | None:
    """The control of the row that the first mistake concerns."""
    if not mistakes:
        return None
    return "stage" if mistakes[0][0].message.startswith("stage") else "parallel"


def _mistake(mistake: Mistake, count: int) -> dict[str, Any]:
    """A mistake as the script draws it. A click on a fix returns ``value``; None if only the user can make the fix."""
    times = f" ({count} times)" if count > 1 else ""
    fixes = [{"label": fix, "value": fix if can_apply(fix) else None} for fix in mistake.fixes[:2]]
    return {"message": mistake.message + times, "fixes": fixes}
