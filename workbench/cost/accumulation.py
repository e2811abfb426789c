"""Gradients of micro-batches: which are added up where they lie, and which are made anew and added by another pass.

torch makes a gradient for each micro-batch, so there is a second one of the same size beside the sum of the earlier
ones. In a step of this package the products and look-ups of large weights add to the sum in place instead. It does not
where something has to see each gradient: hooks that sum it over ranks, a backward in two parts, a checkpoint; nor under
autocast, nor in blocks that run as plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

from workbench.core import gradient_accumulation
from workbench.core.model_costs import LayerCost
from workbench.core.strategy import ResolvedLayer
from workbench.core.weight_splits import TABLE
from workbench.cost.stage_settings import StageSettings, weights_in

_BY_LINEAR = ("Linear", "NonDynamicallyQuantizableLinear")
"""Layers whose product is ``F.linear``."""


def added_in_place(row: LayerCost, choice: ResolvedLayer, setting: StageSettings) -> float:
    """How many of a rank's weights of a layer have gradients to which its own function may add in place.

    ``stage_adds_in_place`` says whether it does.
    """
    is_table = row.layer.kind == TABLE
    if not is_table and row.layer.kind not in _BY_LINEAR:
        return 0.0
    if setting.precision != "fp32" or (is_table and not setting.hardware.exchanges_on_cores):
        return 0.0
    if choice.expert is not None or (setting.model > 1 and choice.split is None):  # copies, whose gradients are summed
        return 0.0
    if setting.overlap > 1 and choice.split == "row":  # a product in pieces
        return 0.0
    shapes = row.layer.shapes
    largest = max(shapes, key=lambda name: prod(shapes[name]), default="")
    number = prod(shapes[largest]) / (setting.model if choice.split else 1) if largest else 0
    if number < gradient_accumulation.SMALLEST_NUMEL or largest in row.layer.frozen:
        return 0.0
    return weights_in(row.layer, largest, setting.software) / (setting.model if choice.split else 1)


def stage_adds_in_place(setting: StageSettings) -> bool:
    """Whether products on a stage add to gradients in place, outside of blocks that run as plain torch."""
    is_later = setting.num_micro_batches > 1 and setting.software.fuses_accumulation == "large"
    return is_later and setting.data == 1 and not setting.recompute and not setting.splits_backward


def rows_in_blocks(names: Sequence[str], stages: Sequence[int]) -> list[bool]:
    """For each layer whether a module around it, but not the whole model, lies on one stage: a stage that is one rank
    runs it as plain torch. A module of which a part has a number for its name is a list or chain, and runs by parts.

    >>> rows_in_blocks(["table", "blocks.0.fc", "blocks.0.proj", "chain.1", "head"], [0, 0, 0, 1, 1])
    [False, True, True, False, False]
    """
    found: dict[str, set[int]] = {}
    for name, stage in zip(names, stages, strict=True):
        for block in _blocks_around(name):
            found.setdefault(block, set()).add(stage)
    return [any(len(found[block]) == 1 for block in _blocks_around(name)) for name in names]


@lru_cache(maxsize=65536)
def _blocks_around(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    return tuple(".".join(parts[:end]) for end in range(1, len(parts)) if not parts[end].isdigit())


def accumulation_s(weights: float, setting: StageSettings) -> float:
    """Seconds to add a micro-batch's gradients of so many weights to the earlier ones by another pass over memory:
    read, read, write. The first one adds nothing.
    """
    if setting.software.fuses_accumulation == "all":
        return 0.0
    later = 1 - 1 / setting.num_micro_batches
    moved = 3 * later * setting.software.gradient_bytes(setting.precision) * weights
    return moved / setting.hardware.memory_bandwidth_bytes_per_s
