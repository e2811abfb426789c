"""The best choices of all layers of a large model under a candidate, with a cache.

Candidates that differ in schedule or ZeRO only have the same prices of layers, and mostly the same best choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import ceil, log2
from typing import NamedTuple

import numpy as np

from workbench.core.options import V_SCHEDULES
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.cost.between_stages import weight_transfers
from workbench.cost.memory import live_micro_batches
from workbench.planning.candidates import Candidate
from workbench.planning.chains import Chain
from workbench.planning.incumbents import Incumbents
from workbench.planning.layer_prices import LayerPrices, bytes_of_weights, seconds_of_weights, with_options
from workbench.planning.problem import Choice, Problem
from workbench.planning.stage_balance import Unit

ONLY = float("inf")
"""The price of bytes if nothing but bytes counts."""


class Mode(NamedTuple):
    """What the chooser minimizes.

    Attributes:
        byte_price: the price of a whole memory of bytes, in steps; ``ONLY`` if nothing else counts.
        updates: the update of weights is left out (None), or gradient reduction is "hidden" behind backward, or not
            ("full").
        is_whole: whether weights count as ZeRO has gathered them, or as shards.
    """

    byte_price: float = 0.0
    updates: str | None = None
    is_whole: bool = False


class Rates(NamedTuple):
    """Prices of a second, a weight, an addition for a shared weight, a kept byte, and a frozen weight."""

    second: float = 1.0
    weight: float = 0.0
    shared: float = 0.0
    kept: float = 0.0
    frozen: float = 0.0


_OFFLOADED_PART = 1 / 16
"""The part of a micro-batch that the search takes to be on the device where activations are offloaded."""
FAST, LEAST_MEMORY, LEAST_MEMORY_WHOLE = Mode(), Mode(ONLY), Mode(ONLY, is_whole=True)


class Chooser:
    """The best choices of all layers, and the units that stages consist of."""

    def __init__(self, problem: Problem, incumbents: Incumbents) -> None:
        self.problem, self.incumbents = problem, incumbents
        self.ranges = _ranges(problem)
        self._found: dict[tuple[object, ...], tuple[Choice, ...] | None] = {}
        self._seconds: dict[tuple[object, ...], float | None] = {}
        self._lists_of_units: dict[tuple[object, ...], list[Unit]] = {}
        self._units: dict[tuple[object, ...], Unit] = {}
        self._parts: dict[tuple[int, str, int], np.ndarray] = {}
        self._kinds: dict[tuple[int, int], list[int]] = {}
        self._chains: dict[tuple[int, int], Chain] = {}
        self._alive: dict[tuple[object, ...], list[float]] = {}
        self._tied: dict[tuple[tuple[int, int, int], bool], float] = {}

    def choices(self, candidate: Candidate, mode: Mode) -> tuple[Choice, ...] | None:
        """The best choices of a mode; None if shared weights exclude all."""
        return self._best(self.incumbents.prices(candidate), candidate.options.recompute, self._rates(candidate, mode))

    def seconds(self, prices: LayerPrices, recompute: str) -> float | None:
        """Seconds of a micro-batch through all layers with the fastest choices."""
        key = (id(prices), recompute)
        if key not in self._seconds:
            choices = self._best(prices, recompute, Rates())
            units = self.units(prices, recompute, choices) if choices else []
            self._seconds[key] = sum(unit.seconds for unit in units) if choices else None
        return self._seconds[key]

    def units(
        self, prices: LayerPrices, recompute: str, choices: tuple[Choice, ...], by_row: bool = False
    ) -> list[Unit]:
        """The units that stages consist of. They count weights; bytes follow from the candidate."""
        key = (id(prices), recompute, choices, by_row)
        if key not in self._lists_of_units:
            ranges = [range(index, index + 1) for index in range(len(choices))] if by_row else self.ranges
            self._lists_of_units[key] = [self._unit(prices, choices, rows, recompute) for rows in ranges]
        return self._lists_of_units[key]

    def live(self, candidate: Candidate) -> list[float]:
        """For every stage, the largest number of micro-batches whose activations are alive on the device."""
        options = candidate.options
        key = (options.schedule, options.num_micro_batches, candidate.degrees[0], candidate.num_stages, options.offload)
        if key not in self._alive:
            is_offloaded = "activations" in options.offload
            alive = live_micro_batches(self.shape_of(candidate))
            self._alive[key] = [_OFFLOADED_PART for _ in alive] if is_offloaded else alive
        return self._alive[key]

    def tied_s(self, candidate: Candidate, is_split: bool = True) -> float:
        """Seconds of a micro-batch in which the last layer gets the weight that it shares with the first one, and sends
        its gradient back: every cut into stages puts them on different ranks. ``is_split``: whether it gets its part of
        the weight only.
        """
        software, last = self.problem.software, len(self.problem.rows) - 1
        if candidate.num_stages == 1 or software.copies_tied or (0, last) not in self.problem.ties:
            return 0.0
        if candidate.options.schedule in V_SCHEDULES:  # the first rank has both
            return 0.0
        key = candidate.degrees, is_split
        if key not in self._tied:
            setting = with_options(self.incumbents.prices(candidate).setting, candidate)
            transfers = weight_transfers(self.problem.rows[last], is_split, setting, setting)
            self._tied[key] = self.incumbents.classes.num_calls[last] * sum(each.seconds for each in transfers)
        return self._tied[key]

    def shape_of(self, candidate: Candidate) -> ResolvedStrategy:
        """The stages of a candidate, without layers."""
        layers = tuple(ResolvedLayer("", "data", None, stage) for stage in range(candidate.num_stages))
        return ResolvedStrategy(layers, candidate.degrees, candidate.options)

    def _best(self, prices: LayerPrices, recompute: str, rates: Rates) -> tuple[Choice, ...] | None:
        key = (id(prices), recompute, rates)
        if key not in self._found:

            def costs(index: int) -> np.ndarray:
                seconds, kept_bytes, weights, shares, frozen = self._parts_of(prices, recompute, index)
                held = rates.weight * weights + rates.shared * shares + rates.frozen * frozen
                return rates.second * seconds + rates.kept * kept_bytes + held

            self._found[key] = self._chain_of(prices.width).best(costs)
        return self._found[key]

    def _rates(self, candidate: Candidate, mode: Mode) -> Rates:
        """The prices of a mode. The price of bytes is relative to the seconds of the fastest choices."""
        prices, m = self.incumbents.prices(candidate), candidate.options.num_micro_batches
        weight = shared = kept = frozen = 0.0
        if mode.updates is not None:
            each = seconds_of_weights(prices, candidate, is_hidden=mode.updates == "hidden")
            weight, shared = each[0] / m, each[1] / m
        if mode.byte_price:
            options = replace(candidate.options, zero=0) if mode.is_whole else candidate.options
            found = bytes_of_weights(prices, replace(candidate, options=options))
            held = [float(ceil(size)) for size in found]  # rounded, so that candidates share a chain
            rate = 1.0
            if mode.byte_price != ONLY:
                seconds = self.seconds(prices, candidate.options.recompute) or 0.0
                rate = mode.byte_price * seconds / self.problem.memory_bytes
            weight, shared, frozen = weight + rate * held[0], shared + rate * held[1], rate * held[2]
            kept = rate * 2.0 ** ceil(log2(max(self.live(candidate))))
        return Rates(0.0 if mode.byte_price == ONLY else 1.0, weight, shared, kept, frozen)

    def _parts_of(self, prices: LayerPrices, recompute: str, index: int) -> np.ndarray:
        """The parts of a row's costs: seconds, kept bytes, weights, shared weights and frozen ones, each by the choices
        of the row before, of the row itself, and of the next row. Modes differ in the prices of these parts only.
        """
        options = self._chain_of(prices.width).options
        key = (id(prices), recompute, self._kinds_of_rows(prices.width)[index])
        if key not in self._parts:
            befores: Sequence[Choice | None] = options[index - 1] if index else [None]
            followings: Sequence[Choice | None] = options[index + 1] if index + 1 < len(options) else [None]
            is_again = bool(recompute) and prices.is_recomputed(index)
            is_own = self.problem.rows[index].layer.tied_to is None
            parts = np.empty((5, len(befores), len(options[index]), len(followings)))
            neighbours = befores, options[index], followings
            for place, (before, choice, following) in zip(
                np.ndindex(parts.shape[1:]), product(*neighbours), strict=True
            ):
                price = prices.row(index, before, choice, following)
                alone = price.input_bytes if prices.has_blocks else price.kept_alone_bytes
                kept = alone + price.kept_results_bytes(recompute) if is_again else price.kept_bytes
                own = (price.weights, price.shared, price.frozen.number) if is_own else (0.0, 0.0, 0.0)
                parts[:, *place] = prices.seconds(index, price, recompute), kept, *own
            self._parts[key] = parts
        return self._parts[key]

    def _kinds_of_rows(self, width: tuple[int, int]) -> list[int]:
        """Numbers that are equal for rows of one class whose neighbours have the same choices."""
        if width not in self._kinds:
            classes, options = self.incumbents.classes, [tuple(choices) for choices in self._chain_of(width).options]
            known: dict[object, int] = {}
            self._kinds[width] = [
                known.setdefault(
                    (number, tuple(classes.kinds[index + 1 : index + 2]), classes.recomputed[index] >= 0, near),
                    len(known),
                )
                for index, number in enumerate(classes.with_before)
                for near in [tuple(options[max(index - 1, 0) : index + 2])]
            ]
        return self._kinds[width]

    def _chain_of(self, width: tuple[int, int]) -> Chain:
        """The layers with their choices, for model and data ranks."""
        if width not in self._chains:
            options = [self.problem.choices(index, *width) for index in range(len(self.problem.rows))]
            self._chains[width] = Chain(self.problem, options)
        return self._chains[width]

    def _unit(self, prices: LayerPrices, choices: Sequence[Choice], rows: range, recompute: str) -> Unit:
        """A unit; equal rows with equal choices and neighbours share one."""
        kinds = self._kinds_of_rows(prices.width)
        pins = {pin.stage for index in rows if (pin := self.problem.pins[index]) is not None} - {None}
        stage = pins.pop() if pins else None
        near = slice(max(rows.start - 1, 0), rows.stop + 1)
        key = (id(prices), recompute, *kinds[rows.start : rows.stop], choices[near], stage)
        if key not in self._units:
            self._units[key] = self._added_up(prices, choices, rows, recompute, stage)
        return self._units[key]

    def _added_up(
        self, prices: LayerPrices, choices: Sequence[Choice], rows: range, recompute: str, stage: int | None
    ) -> Unit:
        seconds = kept = weights = shared = again = frozen = 0.0
        last = len(choices) - 1
        for index in rows:
            before = choices[index - 1] if index else None
            price = prices.row(index, before, choices[index], choices[index + 1] if index < last else None)
            seconds += prices.seconds(index, price, recompute)
            is_again = bool(recompute) and prices.is_recomputed(index)
            kept += price.kept_results_bytes(recompute) if is_again else price.kept_bytes
            again += price.kept_bytes if is_again else 0.0
            if is_again and index == rows[0]:
                kept += price.input_bytes if prices.has_blocks else price.kept_alone_bytes
            if self.problem.rows[index].layer.tied_to is None:
                weights, shared = weights + price.weights, shared + price.shared
                frozen += price.frozen.number
        return Unit(seconds, kept, weights, shared, again, len(rows), stage, frozen)


def _ranges(problem: Problem) -> list[range]:
    """Rows that a cut keeps together: blocks, and single layers outside of blocks."""
    ranges, index = [], 0
    starts = {first + block * period: period for first, period, count in problem.costs.blocks for block in range(count)}
    while index < len(problem.rows):
        period = starts.get(index, 1)
        ranges.append(range(index, index + period))
        index += period
    return ranges
