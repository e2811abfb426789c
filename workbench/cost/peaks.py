"""Memory of a rank at the peak of a backward: activations are freed while gradients are made.

Backward passes a stage's rows from the last to the first. At a row there are the activations of the rows up to it, the
gradients of the weights after it, and the operands and results of the row's own functions. All activations and all
gradients of one micro-batch are never alive together.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from workbench.core.model_costs import ModelCosts
from workbench.core.weight_splits import TABLE
from workbench.cost.buckets import UNDER_WAY, bucket_bytes
from workbench.cost.layers import LayerPrice
from workbench.cost.offload import offloads
from workbench.cost.stage_settings import StageSettings

SMALL_UNIT_BYTES, LARGEST_UNIT = 2**20, 4
"""ZeRO 3 gathers a whole block if it is small, or at most 1/``LARGEST_UNIT`` of the model; otherwise it gathers layer
by layer.
"""


class Alive(NamedTuple):
    """Bytes at one moment of a backward: activations, gradients of weights, gathered parameters and sums."""

    activations: float = 0.0
    gradients: float = 0.0
    buffers: float = 0.0


class Peaks(NamedTuple):
    """The peaks of one stage.

    Attributes:
        first: the fullest moment of the first backward of a step, before which there are no gradients.
        later: of a later backward, which adds to gradients.
        last: of the last backward, which makes the sums of gradients; the only one of a step without micro-batches.
        update_bytes: sums and other copies of gradients, while the optimizer steps.
    """

    first: Alive = Alive()
    later: Alive = Alive()
    last: Alive = Alive()
    update_bytes: float = 0.0


NO_PEAKS = Peaks()


def peaks_of(
    model: ModelCosts, mine: Sequence[int], again: RowsAgain, units: Sequence[int], prices: Sequence[LayerPrice],
    setting: StageSettings, updated: Sequence[int], in_place: Sequence[float],
) -> Peaks:  # fmt: skip
    """Peaks of a stage that consists of the rows ``mine``, of which those in ``updated`` hold their weights.

    ``in_place``: for each of ``mine``, to the gradients of how many weights a later micro-batch adds in place.
    """
    held = set(updated)
    weights = [prices[i].weights if i in held else 0.0 for i in mine]
    frozen = [prices[i].frozen.number if i in held else 0.0 for i in mine]
    tables = [model.rows[i].layer.kind == TABLE for i in mine]
    shared = sum(prices[i].shared for i in updated)
    gradients = _Gradients(weights, [units[i] for i in mine], tables, shared, setting, in_place, frozen)
    places = _activations(mine, again, prices, setting)
    has_parts = setting.num_micro_batches > 1
    first, later, last = (
        max((Alive(size, *gradients.at(row, is_own, *which)) for row, is_own, size in places), key=sum, default=Alive())
        for which in ((False, False), (True, False), (has_parts, True))
    )
    return Peaks(first, later, last, gradients.update_bytes())


def units_of(model: ModelCosts, blocks: Sequence[int]) -> list[int]:
    """For each row, the number of the unit with which ZeRO 3 gathers it: its block, or itself."""
    size_of = [4.0 * row.layer.num_parameters for row in model.rows]
    largest = max(SMALL_UNIT_BYTES, sum(size_of) / LARGEST_UNIT)
    sizes: dict[int, float] = {}
    for index, block in enumerate(blocks):
        sizes[block] = sizes.get(block, 0.0) + size_of[index]
    return [block if sizes[block] <= largest else -1 - index for index, block in enumerate(blocks)]


class RowsAgain(NamedTuple):
    """What recomputation runs again.

    Attributes:
        blocks: for every row the number of the block that runs again with it; below zero where none does.
        are_alone: the model has no blocks, and each layer that has a backward runs again alone.
    """

    blocks: Sequence[int]
    are_alone: bool


def _activations(
    mine: Sequence[int], rows_again: RowsAgain, prices: Sequence[LayerPrice], setting: StageSettings
) -> list[tuple[int, bool, float]]:
    """(row, whether in its own function or in those after it, bytes) through a stage."""
    found, kept = [], 0.0
    is_offloaded, before, stays = offloads(setting, "activations"), 0.0, 0.0
    block, of_block = None, 0.0
    kind, (blocks, are_alone) = setting.recompute_kind, rows_again
    is_full = kind not in ("", "scores")
    for row, i in enumerate(mine):
        price, again = prices[i], 0.0
        is_alone = are_alone and price.has_backward
        results = min(price.kept_results_bytes(kind), price.kept_bytes)
        if is_full and is_alone:
            kept, again = kept + price.kept_alone_bytes + results, price.kept_bytes - price.kept_alone_bytes
        elif is_full and blocks[i] >= 0:
            if blocks[i] != block:
                block, of_block = blocks[i], -price.input_bytes  # kept already
                kept += price.input_bytes
            of_block += price.kept_bytes - results
            kept += price.kept_results_bytes(kind)
            again = max(of_block, 0.0)
        elif kind == "scores":
            kept, again = kept + price.kept_bytes - price.scores_bytes, price.scores_bytes
        elif is_full and row and mine[row - 1] == i - 1 and blocks[i - 1] >= 0:
            kept += price.kept_behind_block_bytes
        else:
            kept += price.kept_bytes
        if is_offloaded:  # what backward works on, what comes or goes beside it, and what never goes
            own = kept - (results if is_full and (blocks[i] >= 0 or is_alone) else 0.0)
            stays += kept - own
            before, kept = own, before + own + stays
        found.append((row, False, kept + again + price.passing_after_bytes))
        found.append((row, True, kept + again - price.kept_after_bytes + price.passing_bytes))
        kept = 0.0 if is_offloaded else kept
    return found


class _Gradients:
    """Bytes of gradients and gathered parameters at a row of backward."""

    def __init__(
        self,
        weights: Sequence[float],
        units: Sequence[int],
        tables: Sequence[bool],
        shared: float,
        setting: StageSettings,
        in_place: Sequence[float],
        frozen: Sequence[float],
    ) -> None:
        self._in_place = in_place
        software, precision = setting.software, setting.precision
        self._setting, self._weights, self._total, self._shared = setting, weights, sum(weights), shared
        self._size = software.gradient_bytes(precision)
        self._behind = [self._total - done for done in accumulate(weights)]
        self._is_sharded = setting.zero >= 2 and (setting.data > 1 or shared > 0)
        share = shared / self._total if self._total else 0.0
        self._part = (1 - share) / setting.shards + share / (setting.shards * setting.model)
        self._bucket = max(bucket_bytes(self._total * self._size), max(weights, default=0.0) * self._size)
        summed = (1.0 if setting.data > 1 else share) if setting.zero < 2 and not software.keeps_gradients else 0.0
        if setting.zero == 3 and setting.shards < setting.data:  # the groups' sums of shards
            summed = 1.0
        self._sum = summed * (self._part if setting.zero else 1.0) * self._size  # bytes of each weight's
        self._gathered = [0.0] * len(weights)
        self._of_unit = [0.0] * len(weights)  # of the row and those behind it in its unit
        self._begins = [row == 0 or units[row - 1] != unit for row, unit in enumerate(units)]
        self._ends = [row + 1 == len(units) or units[row + 1] != unit for row, unit in enumerate(units)]
        if setting.zero == 3 and self._is_sharded:
            wholes: dict[int, float] = {}
            for row in range(len(weights) - 1, -1, -1):
                before = 0.0 if self._ends[row] else self._of_unit[row + 1]
                self._of_unit[row] = before + weights[row]
                needed = 0.0 if tables[row] else (weights[row] + frozen[row]) * software.parameter_bytes(precision)
                wholes[units[row]] = wholes.get(units[row], 0.0) + needed
            self._gathered = [wholes[unit] for unit in units]

    def at(self, row: int, is_own: bool, is_later: bool, has_sums: bool) -> tuple[float, float]:
        """(bytes of gradients, of gathered parameters and of sums) at a row; its own function makes its gradient."""
        own = self._weights[row] if is_own else 0.0
        gathered = 0.0 if self._ends[row] and not is_own else self._gathered[row]  # its unit's backward has not begun
        if self._setting.software.keeps_gradients:
            return self._total * self._size * (self._part if self._is_sharded else 1.0), gathered
        if not self._is_sharded:
            sums = self._behind[row] * self._sum if has_sums else 0.0
            made = max(0.0, own - self._in_place[row]) if is_later else own
            return ((self._total if is_later else self._behind[row]) + made) * self._size, sums
        if self._setting.zero == 2:
            return self._scattered(self._behind[row] + own, is_later), 0.0
        whole = self._of_unit[row] - (0.0 if is_own else self._weights[row])
        others = self._total if is_later else self._behind[row] + self._weights[row] - self._of_unit[row]
        parts = others + (whole if is_own and self._begins[row] else 0.0)  # scattered there
        sums = self._behind[row] * self._sum if has_sums else 0.0
        return (whole + parts * self._part) * self._size, gathered + sums

    def update_bytes(self) -> float:
        """Bytes of the sums of gradients, and of Adam's results for all weights at once on GPUs."""
        setting, sums = self._setting, self._total * self._sum
        if setting.software.keeps_gradients or setting.hardware.exchanges_on_cores:
            return sums
        part = self._part if setting.zero else 1.0
        return sums + (4.0 * self._total * part if setting.optimizer in ("adam", "adamw") else 0.0)

    def _scattered(self, there: float, is_later: bool) -> float:
        whole = min(there * self._size, UNDER_WAY * self._bucket)
        parts = (self._total if is_later else there) * self._size - (0.0 if is_later else whole)
        return parts * self._part + whole + min(self._bucket, whole) * self._part
