"""The columns of the grid: the ranks of each, grouped by stage, and their widths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.core.sharding_plan import ShardingPlan
from workbench.units import format_ranks

RANKS_WIDTH = 280
_WIDEST, _NARROWEST = 74.0, 28.0
_MAX_COLUMNS_PER_RANK = 8
_WIDTH_OF_A_WORD = 60
_WIDTH_OF_AN_AXIS = 140


@dataclass(frozen=True)
class Column:
    """One column: a rank, or all ranks of a stage if there are many.

    Attributes:
        stage: on the pipeline axis; stages on the same ranks share columns.
        shade: position of the rank in its stage.
        centre: in pixels from the left.
    """

    stage: int
    shade: int
    label: str
    ranks: tuple[int, ...]
    centre: float
    width: float


def columns_of(plan: ShardingPlan) -> list[Column]:
    """One column per rank up to 8 ranks, else one per stage."""
    grids = [placement.grid for placement in dict.fromkeys(plan.placements)]
    groups = [
        (number, position, ranks)
        for number, grid in enumerate(grids)
        for position, ranks in enumerate(
            [(r,) for r in grid] if sum(map(len, grids)) <= _MAX_COLUMNS_PER_RANK else [grid]
        )
    ]
    width = max(min(_WIDEST, RANKS_WIDTH / len(groups)), _NARROWEST)
    return [
        Column(stage, shade, _label(ranks, width), ranks, round((index + 0.5) * width, 1), width)
        for index, (stage, shade, ranks) in enumerate(groups)
    ]


def _label(ranks: tuple[int, ...], width: float) -> str:
    """The longest label that fits: ``"rank 3"``, ``"ranks 8-15"``, ``"8-15"``, ``"8"``."""
    word = "rank" if len(ranks) == 1 else "ranks"
    text = format_ranks(list(ranks))
    full = f"{word} {text}"
    if len(ranks) == 1:
        return full if width >= _WIDTH_OF_A_WORD else text
    if 7 * len(full) <= width - 8:
        return full
    return text if 7 * len(text) <= width - 4 else f"{ranks[0]}"


def total_width(columns: list[Column]) -> int:
    """Pixels of all columns; at least those of two."""
    return round(max(columns[0].width * len(columns), 2 * _WIDEST))


def stage_heads(plan: ShardingPlan, columns: list[Column]) -> list[dict[str, Any]]:
    """The coloured bands above the columns of the stages."""
    heads = []
    numbers = dict.fromkeys(column.stage for column in columns)
    for number in numbers:
        places = [index for index, column in enumerate(columns) if column.stage == number]
        width = columns[0].width * len(places)
        data, model = plan.resolved.stage_width(number)
        axis = "model" if model > 1 else "data" if data > 1 else ""
        if data > 1 and model > 1:
            axis = "data, model"
        heads.append(
            {
                "number": number,
                "left": round(places[0] * columns[0].width, 1),
                "width": round(width, 1),
                "label": f"stage {number}" if width >= _WIDTH_OF_A_WORD else str(number),
                "axis": f"{axis} \u2192" if axis and width >= _WIDTH_OF_AN_AXIS else "",
            }
        )
    return heads


def view(columns: list[Column]) -> list[dict[str, Any]]:
    """The columns as plain data."""
    return [
        {
            "stage": column.stage,
            "shade": column.shade,
            "label": column.label,
            "centre": column.centre,
            "ranks": list(column.ranks) if len(column.ranks) <= _MAX_COLUMNS_PER_RANK else [column.ranks[0]],
        }
        for column in columns
    ]
