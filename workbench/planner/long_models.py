"""The search of large problems: choices by dynamic programming, cuts by balance, candidates in the order of a bound.

For every candidate (degrees, micro-batches, options) the best choices of all layers follow from prices that add up;
with them a bound from below of its step. Candidates are then cut into stages and priced in the order of their bounds,
until no bound is below the best step found. Where a strategy does not fit into memory, bytes get a price in seconds,
which is raised until it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import ceil, inf, log2
from typing import NamedTuple

import numpy as np

from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.cost.memory import live_micro_batches
from workbench.planner.chains import best_chain
from workbench.planner.cuts import Unit, balanced_stages
from workbench.planner.ledger import Ledger
from workbench.planner.prices import Prices, bytes_of_weights, least_step_s, least_update_s, seconds_of_weights
from workbench.planner.problem import Choice, Problem
from workbench.planner.settings import Candidate, Group, groups, members

ONLY = float("inf")
"""The price of bytes where nothing else costs anything."""


class Way(NamedTuple):
    """What choices are made by, besides seconds: the price of a memory full of bytes, in steps, and updates of weights.

    Updates are left out (None), or take as long as if sums of gradients were "hidden" behind backward, or not ("full").
    Weights count in parts, or ``is_whole``: as they are when ZeRO has gathered them.
    """

    byte_price: float = 0.0
    updates: str | None = None
    is_whole: bool = False


FAST, LEAN, LEAN_WHOLE = Way(), Way(ONLY), Way(ONLY, is_whole=True)
WAYS = (FAST, LEAN, Way(0.0, "hidden"), Way(0.0, "full"), *(Way(p, "full") for p in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)))
FEW_WAYS = (FAST, LEAN, Way(1.0))
"""In the order in which they are tried: what does not fit at its leanest does not fit at all."""
MANY_GROUPS = 500
"""Where there are more groups of candidates, fewer prices are tried, and model axes only of the widths of hosts."""
MOST_OF_MEMORY = 200
"""Candidates that are priced for the objective "memory", the leanest first."""
MOST_IF_QUICK = 12
"""Where it is asked only whether anything fits."""


def search_long(problem: Problem, ledger: Ledger, is_quick: bool = False) -> None:
    """Put the best strategies into the ledger; quickly, a few lean ones, and none behind the first that fits."""
    _LongSearch(problem, ledger, is_quick).run()


class _LongSearch:
    """Remembers the chains of a problem; candidates that differ in schedule or ZeRO only have the same ones."""

    def __init__(self, problem: Problem, ledger: Ledger, is_quick: bool = False) -> None:
        self.problem, self.ledger, self._is_quick = problem, ledger, is_quick
        self._chains: dict[tuple[object, ...], tuple[Choice, ...] | None] = {}
        self._bare: dict[tuple[object, ...], list[Unit]] = {}
        self._known_parts: dict[tuple[int, bool, int], np.ndarray] = {}
        self._kinds_known: dict[int, list[int]] = {}
        self._tables: dict[int, list[list[Choice]]] = {}
        self._alive: dict[tuple[object, ...], list[float]] = {}
        self._parameters = sum(row.layer.num_parameters for row in problem.rows if row.layer.tied_to is None)
        self._units = _ranges(problem)
        self._groups = list(groups(problem))
        self._ways: Sequence[Way] = WAYS
        if len(self._groups) > MANY_GROUPS:
            self._groups = list(groups(problem, max(problem.hardware.links[0].span, 2)))
            self._ways = FEW_WAYS
        self._only_lean = is_quick or self._ways is FEW_WAYS

    def run(self) -> None:
        """Fill the ledger."""
        if self.problem.objective == "memory":
            self._run_lean()
            return
        firsts = {}
        for group in self._groups:
            bounds = [self._bound(one, has_update=False) for one in self._kinds(group)]
            if bounds and min(bounds) < inf:
                firsts[group] = min(bounds) * self.ledger.num_counted(group.degrees)
        for group in sorted(firsts, key=firsts.__getitem__):
            if self.ledger.cannot_improve(group.degrees, firsts[group] / self.ledger.num_counted(group.degrees)):
                continue
            bounded = [(self._bound(one), place, one) for place, one in enumerate(self._members(group))]
            for bound, _, candidate in sorted(bounded):
                if bound < inf and not self.ledger.cannot_improve(candidate.degrees, bound):
                    self._place(candidate)

    def _run_lean(self) -> None:
        """By the bytes of an average stage."""
        ranked: list[tuple[float, int, Candidate]] = []
        for group in self._lean_groups():
            for candidate in self._members(group):
                if not self._only_lean or self._is_lean(candidate):
                    ranked.append((self._average_bytes(candidate), len(ranked), candidate))
        for _, _, candidate in sorted(ranked)[: MOST_IF_QUICK if self._is_quick else MOST_OF_MEMORY]:
            self._place(candidate)
            if self._is_quick and self.ledger.best is not None:
                return

    def _lean_groups(self) -> list[Group]:
        """Those with the smallest micro-batches, where not all are looked at: less is alive at once."""
        if not self._only_lean:
            return self._groups
        return list({group.degrees: group for group in self._groups}.values())

    def _is_lean(self, candidate: Candidate) -> bool:
        """Other schedules hold more, and so does less ZeRO."""
        schedules, zeros = self.problem.wishes.schedule, self.problem.wishes.zero
        is_late = candidate.options.zero >= 2 or candidate.degrees[1] == 1
        return (schedules is not None or candidate.options.schedule in (None, "1f1b")) and (
            zeros is not None or is_late
        )

    def _members(self, group: Group) -> Iterator[Candidate]:
        """GPipe takes as long as 1F1B and holds more: only where it is wished for. Stages are made of whole blocks."""
        takes_gpipe = self.problem.wishes.schedule is not None
        for candidate in members(self.problem, group):
            is_left_out = candidate.options.schedule == "gpipe" and not takes_gpipe
            if not is_left_out and (
                candidate.num_stages == group.degrees[0] or candidate.num_stages <= len(self._units)
            ):
                yield candidate

    def _kinds(self, group: Group) -> Iterator[Candidate]:
        """The members that differ in seconds of a micro-batch or their schedule, with little recomputation and ZeRO."""
        seen = set()
        for candidate in self._members(group):
            options = candidate.options
            kind = (options.sequence, options.schedule, candidate.num_stages)
            if kind not in seen:
                seen.add(kind)
                yield candidate

    def _bound(self, candidate: Candidate, has_update: bool = True) -> float:
        """Seconds below which the candidate hardly gets; infinite where it cannot fit."""
        prices, (pipeline, _, model) = self.ledger.prices(candidate), candidate.degrees
        own, shared = bytes_of_weights(prices, candidate, is_least=True)
        least = min(own / model, own + shared) * self._parameters / pipeline
        if has_update and least > self.problem.memory_bytes:
            return inf
        choices = self._chain(candidate, FAST)
        if choices is None:
            return inf
        units = self._bare_units(candidate, choices)
        seconds = sum(unit.seconds for unit in units)
        weights = self._parameters / model if has_update else 0.0
        bound = least_step_s(prices, candidate, seconds, weights)
        fill = {"interleaved": pipeline / candidate.num_stages, "zero_bubble": 1 / 6}
        part = fill.get(candidate.options.schedule or "", 0.0)
        return bound + part * (pipeline - 1) / pipeline * seconds / prices.setting.hardware.alone_speedup

    def _average_bytes(self, candidate: Candidate) -> float:
        choices = self._chain(candidate, LEAN)
        if choices is None:
            return inf
        own, shared = bytes_of_weights(self.ledger.prices(candidate), candidate)
        units, live = self._bare_units(candidate, choices), self._live(candidate)
        held = sum(own * unit.weights + shared * unit.shared for unit in units) / candidate.degrees[0]
        return held + max(live) * sum(unit.kept_bytes for unit in units) / candidate.num_stages

    def _chain(self, candidate: Candidate, way: Way) -> tuple[Choice, ...] | None:
        """The best choices, where bytes and updates cost what the way says."""
        prices, recompute, m = self.ledger.prices(candidate), candidate.options.recompute, candidate.degrees[2]
        weight, shared, kept = self._rates(candidate, way)
        counts_s = 0.0 if way.byte_price == ONLY else 1.0
        key = (id(prices), recompute, counts_s, weight, shared, kept)
        if key not in self._chains:

            def costs(index: int) -> np.ndarray:
                seconds, kept_bytes, weights, shares = self._parts(prices, recompute, index)
                return counts_s * seconds + kept * kept_bytes + (weight * weights + shared * shares)

            self._chains[key] = best_chain(self.problem, self._options(m), costs)
        return self._chains[key]

    def _parts(self, prices: Prices, recompute: bool, index: int) -> np.ndarray:
        """What a row's costs are made of: seconds, kept bytes, weights and shared ones, each by the choice of the row
        before, its own, and that of the next one. Ways differ only in what each of these costs, equal rows in nothing.
        """
        options = self._options(prices.model)
        key = (id(prices), recompute, self._kinds_of_rows(prices.model)[index])
        if key not in self._known_parts:
            befores: Sequence[Choice | None] = options[index - 1] if index else [None]
            followings: Sequence[Choice | None] = options[index + 1] if index + 1 < len(options) else [None]
            is_again = recompute and prices.is_recomputed(index)
            is_own = self.problem.rows[index].layer.tied_to is None
            parts = np.empty((4, len(befores), len(options[index]), len(followings)))
            neighbours = befores, options[index], followings
            for place, (before, choice, following) in zip(
                np.ndindex(parts.shape[1:]), product(*neighbours), strict=True
            ):
                price = prices.row(index, before, choice, following)
                kept = price.input_bytes if is_again else price.kept_bytes
                own = (price.weights, price.shared) if is_own else (0.0, 0.0)
                parts[:, *place] = prices.seconds(index, price, recompute), kept, *own
            self._known_parts[key] = parts
        return self._known_parts[key]

    def _kinds_of_rows(self, model: int) -> list[int]:
        """Numbers that are equal for rows of one class, between neighbours that may do the same."""
        if model not in self._kinds_known:
            classes, options = self.ledger.classes, [tuple(choices) for choices in self._options(model)]
            known: dict[object, int] = {}
            self._kinds_known[model] = [
                known.setdefault(
                    (number, tuple(classes.kinds[index + 1 : index + 2]), classes.blocks[index] >= 0, near), len(known)
                )
                for index, number in enumerate(classes.with_before)
                for near in [tuple(options[max(index - 1, 0) : index + 2])]
            ]
        return self._kinds_known[model]

    def _rates(self, candidate: Candidate, way: Way) -> tuple[float, float, float]:
        """(of a weight, of a shared one besides, of a kept byte), in seconds of a micro-batch; bytes alone if ONLY."""
        prices, m = self.ledger.prices(candidate), candidate.options.num_micro_batches
        weight = shared = kept = 0.0
        if way.updates is not None:
            each = seconds_of_weights(prices, candidate, is_hidden=way.updates == "hidden")
            weight, shared = each[0] / m, each[1] / m
        if way.byte_price:
            options = replace(candidate.options, zero=0) if way.is_whole else candidate.options
            found = bytes_of_weights(prices, replace(candidate, options=options))
            held = [float(ceil(size)) for size in found]  # alike ones share a chain
            rate = 1.0
            if way.byte_price != ONLY:
                fast = self._chain(candidate, FAST)
                seconds = sum(unit.seconds for unit in self._bare_units(candidate, fast)) if fast else 0.0
                rate = way.byte_price * seconds / self.problem.memory_bytes
            weight, shared = weight + rate * held[0], shared + rate * held[1]
            kept = rate * 2.0 ** ceil(log2(max(self._live(candidate))))
        return weight, shared, kept

    def _options(self, model: int) -> list[list[Choice]]:
        if model not in self._tables:
            self._tables[model] = [self.problem.choices(index, model) for index in range(len(self.problem.rows))]
        return self._tables[model]

    def _bare_units(self, candidate: Candidate, choices: tuple[Choice, ...], by_row: bool = False) -> list[Unit]:
        """What may become stages, with weights in place of bytes that are held."""
        prices, recompute = self.ledger.prices(candidate), candidate.options.recompute
        key = (id(prices), recompute, choices, by_row)
        if key not in self._bare:
            ranges = [range(index, index + 1) for index in range(len(choices))] if by_row else self._units
            self._bare[key] = [self._unit(prices, choices, rows, recompute) for rows in ranges]
        return self._bare[key]

    def _unit(self, prices: Prices, choices: Sequence[Choice], rows: range, recompute: bool) -> Unit:
        seconds = kept = weights = shared = again = 0.0
        last = len(choices) - 1
        for index in rows:
            before = choices[index - 1] if index else None
            price = prices.row(index, before, choices[index], choices[index + 1] if index < last else None)
            seconds += prices.seconds(index, price, recompute)
            is_again = recompute and prices.is_recomputed(index)
            kept += 0.0 if is_again else price.kept_bytes
            again += price.kept_bytes if is_again else 0.0
            if is_again and index == rows[0]:
                kept += price.input_bytes
            if self.problem.rows[index].layer.tied_to is None:
                weights, shared = weights + price.weights, shared + price.shared
        pins = {pin.stage for index in rows if (pin := self.problem.pins[index]) is not None} - {None}
        return Unit(seconds, kept, weights, shared, again, len(rows), pins.pop() if pins else None)

    def _live(self, candidate: Candidate) -> list[float]:
        options = candidate.options
        key = (options.schedule, options.num_micro_batches, candidate.degrees[0], candidate.num_stages)
        if key not in self._alive:
            layers = tuple(ResolvedLayer("", "data", None, stage) for stage in range(candidate.num_stages))
            self._alive[key] = live_micro_batches(ResolvedStrategy(layers, candidate.degrees, options))
        return self._alive[key]

    def _place(self, candidate: Candidate) -> None:
        """Cut into stages and price, for every way of choosing; of a large problem until one fits."""
        tried: dict[tuple[Choice, ...], bool] = {}
        lean = (LEAN_WHOLE, LEAN) if candidate.options.zero == 3 else (LEAN,)
        for way in lean if self.problem.objective == "memory" else self._ways:
            choices = self._chain(candidate, way)
            if choices is None:
                continue
            if choices not in tried:
                tried[choices] = self._try(candidate, choices)
            is_enough = tried[choices] and self._ways is FEW_WAYS
            if is_enough or (way == LEAN and not tried[choices]):
                return

    def _try(self, candidate: Candidate, choices: tuple[Choice, ...]) -> bool:
        """Price the ways to cut that may be better than the best strategy; whether any way fits."""
        prices = self.ledger.prices(candidate)
        units = self._bare_units(candidate, choices, by_row=len(self._units) < candidate.num_stages)
        limit = inf if self.problem.objective == "memory" else self.problem.memory_bytes
        fits, is_thorough = False, self._ways is not FEW_WAYS or self.ledger.best is None
        # gradients beside all activations, which is more than there is at once; or left out
        for is_least in (False, True) if is_thorough else (False,):
            held = bytes_of_weights(prices, candidate, is_least)
            for stages in balanced_stages(units, self._live(candidate), held, limit, candidate.degrees[0]):
                if self._is_hopeless(candidate, units, stages):
                    fits = True
                else:
                    found = self.ledger.add(candidate, choices, stages)
                    fits = fits or found.estimate.peak_bytes <= self.problem.memory_bytes
            if fits:
                break
        return fits

    def _is_hopeless(self, candidate: Candidate, units: Sequence[Unit], stages: Sequence[int]) -> bool:
        """Whether the slowest stage alone takes longer than the best strategy."""
        seconds, row = [0.0] * candidate.num_stages, 0
        for unit in units:
            seconds[stages[row]] += unit.seconds
            row += unit.num_rows
        m, (ranks, _, model) = candidate.options.num_micro_batches, candidate.degrees
        # for those before, at the start and the end
        waits = 0.0 if candidate.options.schedule == "zero_bubble" else 1.0
        slowest = max(waits * sum(seconds[:rank]) + m * sum(seconds[rank::ranks]) for rank in range(ranks))
        prices = self.ledger.prices(candidate)
        bound = slowest / prices.setting.hardware.alone_speedup
        bound += least_update_s(prices, candidate, self._parameters / model / ranks)
        return self.ledger.cannot_improve(candidate.degrees, bound)


def _ranges(problem: Problem) -> list[range]:
    """Rows that belong together: blocks, and single layers outside of them."""
    ranges, index = [], 0
    starts = {first + block * period: period for first, period, count in problem.costs.blocks for block in range(count)}
    while index < len(problem.rows):
        period = starts.get(index, 1)
        ranges.append(range(index, index + period))
        index += period
    return ranges


__all__ = ["search_long"]
