"""What the layer grid shows, as plain data for its script: pure functions, state in, dictionary out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log2, prod
from typing import Any

from workbench.core.layout import Layout
from workbench.core.strategy import Layer, Mistake
from workbench.ui.placing import (
    Choice,
    Degrees,
    Step,
    change_text,
    main_weight,
    parameter_layout,
    sbp_text,
    stage_placement,
    walk,
)
from workbench.units import format_bytes, format_count

_RANKS_WIDTH = 334
_ROW_HEIGHT, _TALL_ROW_HEIGHT = 32, 40
_MAX_COLUMNS_PER_RANK = 8
_COLUMN_WIDTH = 83


@dataclass(frozen=True)
class GridState:
    """All that the grid needs: ``choices`` are what the user set, ``drawn`` the last valid ones, one per layer."""

    layers: Sequence[Layer]
    choices: Sequence[Choice]
    drawn: Sequence[Choice]
    degrees: Degrees
    batch_size: int
    num_micro_batches: int = 1
    sample_shape: tuple[int, ...] = ()
    mistakes: Sequence[Mistake] = field(default=())


def grid_view(state: GridState) -> dict[str, Any]:
    """The whole view: stages and their columns, one entry per layer, totals."""
    columns = _columns(state.degrees)
    micro_batch = max(state.batch_size // state.num_micro_batches, 1)
    steps = walk(state.layers, state.drawn, state.degrees, micro_batch, state.sample_shape)
    rows = [_row(index, state, columns, steps[index]) for index in range(len(state.layers))]
    _make_room(rows)
    return {
        "ranks_width": round(max(columns[-1]["centre"] + columns[0]["centre"], 2 * _COLUMN_WIDTH)),
        "stages": _stages(state.degrees, columns),
        "columns": columns,
        "stage_options": _stage_options(state.degrees),
        "flow_title": "Input and the boxing that brings it",
        "flow_detail": "bytes per micro-batch, forward" if state.num_micro_batches > 1 else "bytes per step, forward",
        "rows": rows,
        "note": "coloured: the part of the weight that the rank holds \u00b7 \u2013 not on this rank",
        "total": _total(state),
    }


def _stage_options(degrees: Degrees) -> list[int]:
    """Stages that can be chosen: four by one click, all of them from a list where the pipeline is longer."""
    return list(range(degrees.num_ranks if degrees.pipeline > 4 else min(degrees.num_ranks, 4)))


def _columns(degrees: Degrees) -> list[dict[str, Any]]:
    """One column per rank, or one per stage where ranks are too many to tell apart."""
    if degrees.num_ranks <= _MAX_COLUMNS_PER_RANK:
        per_stage = degrees.data * degrees.model
        columns: list[dict[str, Any]] = [
            {"stage": rank // per_stage, "shade": rank % per_stage, "label": f"rank {rank}", "ranks": [rank]}
            for rank in range(degrees.num_ranks)
        ]
    else:
        grids = [list(stage_placement(degrees, stage).grid) for stage in range(degrees.pipeline)]
        columns = [
            {"stage": stage, "shade": 0, "label": f"{grid[0]}-{grid[-1]}", "ranks": grid}
            for stage, grid in enumerate(grids)
        ]
    width = min(_COLUMN_WIDTH, _RANKS_WIDTH / len(columns))
    for index, column in enumerate(columns):
        column["centre"] = round((index + 0.5) * width, 1)
        if width < _COLUMN_WIDTH and len(column["ranks"]) == 1:
            column["label"] = str(column["ranks"][0])
    return columns


def _stages(degrees: Degrees, columns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stages = []
    width = columns[0]["centre"] * 2
    for number in range(degrees.pipeline):
        places = [index for index, column in enumerate(columns) if column["stage"] == number]
        stage_width = width * len(places)
        axis = "" if stage_width < 150 else "model axis \u2192" if degrees.model > 1 else "data axis \u2192"
        stages.append(
            {
                "number": number,
                "left": round(places[0] * width, 1),
                "width": round(stage_width, 1),
                "label": f"stage {number}" if stage_width >= 60 else str(number),
                "axis": axis,
            }
        )
    return stages


def _row(index: int, state: GridState, columns: list[dict[str, Any]], step: Step) -> dict[str, Any]:
    layer, choice, drawn = state.layers[index], state.choices[index], state.drawn[index]
    mistakes = [mistake for mistake in state.mistakes if mistake.layer == layer.name]
    shape = main_weight(layer)
    layout = parameter_layout(layer, drawn, shape, stage_placement(state.degrees, drawn.stage))
    slices = [_slice(shape, layout, column) for column in columns]
    others = [f"{name} {_shape_text(size)}" for name, size in layer.shapes.items()]
    return {
        "id": f"wb-row-{index}",
        "name": layer.name,
        "kind": layer.kind,
        "weight": _shape_text(shape),
        "params": format_count(layer.num_parameters),
        "parallel": choice.parallel,
        "stage": choice.stage,
        "drawn_stage": drawn.stage,
        "bad": _bad_control(mistakes),
        "sbp": sbp_text(layout),
        "sbp_title": "; ".join(others),
        "picture": _picture_size(shape),
        "slices": slices,
        "slices_text": "; ".join(
            f"{column['label']}: {part['text'] if part else 'nothing'}"
            for column, part in zip(columns, slices, strict=True)
        ),
        "kept": bool(mistakes) and choice != drawn,
        "mistakes": [_mistake(mistake) for mistake in mistakes],
        "flow": _flow(layer, drawn, step, state),
    }


def _make_room(rows: list[dict[str, Any]]) -> None:
    """Rows with a note are taller where a boxing badge straddles one of their edges."""
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        badge = row["flow"]["boxing"] or (following and following["flow"]["boxing"])
        row["height"] = _TALL_ROW_HEIGHT if badge and row["flow"]["note"] else _ROW_HEIGHT


def _slice(shape: tuple[int, ...], layout: Layout, column: dict[str, Any]) -> dict[str, Any] | None:
    """What the column's ranks hold of a weight, as parts of its picture (fractions of width and height)."""
    held = [rank for rank in column["ranks"] if rank in layout.placement.grid]
    if not held:
        return None
    regions = {layout.region(shape, rank): position for position, rank in reversed(list(enumerate(held)))}
    first = next(iter(reversed(regions)))
    alone = len(held) == 1
    parts = [_part(shape, region, column["shade"] if alone else position) for region, position in regions.items()]
    text = _region_text(shape, first) if alone else f"{len(regions)} slices on {len(held)} ranks"
    return {"parts": parts, "text": text}


def _part(shape: tuple[int, ...], region: tuple[tuple[int, int], ...], shade: int) -> dict[str, Any]:
    """The region as a rectangle: the first dim goes down, the second (of two or more) to the right."""
    top, bottom = (edge / shape[0] for edge in region[0])
    left, right = (edge / shape[1] for edge in region[1]) if len(shape) > 1 else (0.0, 1.0)
    return {"x": left, "y": top, "w": right - left, "h": bottom - top, "shade": shade}


def _region_text(shape: tuple[int, ...], region: tuple[tuple[int, int], ...]) -> str:
    """``"rows 0-127 of 256"``; the whole weight is ``"all of 256 x 64"``."""
    names = ("rows", "columns", *(f"dim {dim}" for dim in range(2, len(shape))))
    parts = [
        f"{name} {start}-{stop - 1} of {size}"
        for name, (start, stop), size in zip(names, region, shape, strict=False)
        if (start, stop) != (0, size)
    ]
    return ", ".join(parts) or f"all of {_shape_text(shape)}"


def _picture_size(shape: tuple[int, ...]) -> list[int]:
    """Width and height in pixels that grow with the logarithm of the weight's sizes."""
    down, across = shape[0], shape[1] if len(shape) > 1 else 1
    if len(shape) == 1:
        return [24, 5]
    return [_pixels(across, largest=42), _pixels(down, largest=24)]


def _pixels(size: int, largest: int) -> int:
    return int(min(max(4 * log2(max(size, 1)) - 10, 6), largest))


def _shape_text(shape: tuple[int, ...]) -> str:
    return " \u00d7 ".join(map(str, shape))


def _bad_control(mistakes: Sequence[Mistake]) -> str | None:
    """Which of the row's controls the first mistake is about."""
    if not mistakes:
        return None
    return "stage" if "stage" in mistakes[0].message else "parallel"


def _mistake(mistake: Mistake) -> dict[str, Any]:
    return {"message": mistake.message, "fixes": [fix_button(fix) for fix in mistake.fixes]}


def fix_button(fix: str) -> dict[str, Any]:
    """A fix as the script draws it; ``value`` is what comes back when it is clicked, None where only the user can."""
    return {"label": fix, "value": fix if fix.startswith(("use ", "write ")) else None}


def _flow(layer: Layer, choice: Choice, step: Step, state: GridState) -> dict[str, Any]:
    return {
        "layout": sbp_text(step.layout),
        "note": _gradient_note(layer, choice, state.degrees),
        "boxing": _badge(step) if step.boxings else None,
    }


def _badge(step: Step) -> dict[str, Any]:
    """The boxings before a layer as one badge; its tip is the whole plan."""
    return {
        "change": change_text(step.boxings[-1]),
        "kind": " + ".join(plan.kind for plan in step.boxings),
        "bytes": format_bytes(step.wire_bytes) if step.bytes_known else "",
        "free": step.wire_bytes == 0,
        "title": "\n".join(plan.describe() for plan in step.boxings) if step.bytes_known else "",
    }


def _gradient_note(layer: Layer, choice: Choice, degrees: Degrees) -> str:
    """What the gradients of a layer cost once per step where copies of its weight see different samples."""
    copies = degrees.data * (degrees.model if choice.parallel == "data" else 1)
    if copies == 1:
        return ""
    size = 2 * (copies - 1) * 4 * layer.num_parameters
    return f"grad P \u2192 B {format_bytes(size)} per step"


def _total(state: GridState) -> str:
    """Bytes of parameters that each rank (or the largest of many) holds."""
    held = parameters_held(state.layers, state.drawn, state.degrees)
    if len(held) <= 4:
        return "parameters held: " + ", ".join(f"rank {rank} {format_bytes(size)}" for rank, size in enumerate(held))
    return f"parameters held: at most {format_bytes(max(held))} per rank"


def parameters_held(layers: Sequence[Layer], choices: Sequence[Choice], degrees: Degrees) -> list[int]:
    """Bytes of fp32 parameters by rank."""
    held = [0] * degrees.num_ranks
    for layer, choice in zip(layers, choices, strict=True):
        placement = stage_placement(degrees, choice.stage)
        for shape in layer.shapes.values():
            layout = parameter_layout(layer, choice, shape, placement)
            for rank in placement.grid:
                held[rank] += 4 * prod(layout.local_shape(shape, rank))
    return held
