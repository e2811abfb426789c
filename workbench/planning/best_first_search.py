"""The search of large problems: best first, by lower bounds; dynamic programming chooses what each layer does.

A priority queue holds every candidate (degrees, micro-batches, options) with a lower bound of its step. The search
takes the candidate with the lowest bound. The first time, it replaces the bound by a tighter one, from the best choices
of all layers. The second time, it cuts the candidate into stages and prices it. The search ends when no bound is below
the best step found. If a strategy does not fit into memory, bytes get a price in seconds, which rises until it fits.
If nothing fits, ``reduce_memory`` changes the strategies that hold least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf

from workbench.planning.bounds import Bounds
from workbench.planning.candidates import Candidate, Group, candidates_of, groups
from workbench.planning.chooser import FAST, LEAST_MEMORY, LEAST_MEMORY_WHOLE, Chooser, Mode
from workbench.planning.incumbents import Incumbents, PricedStrategy
from workbench.planning.layer_prices import WAITS, bytes_of_weights
from workbench.planning.problem import Choice, Problem
from workbench.planning.stage_balance import Unit, balanced_stages, held_bytes

_MOST_PRICED = 400
"""The largest number of strategies that ``reduce_memory`` prices."""
_Changed = tuple[Candidate, tuple[Choice, ...], tuple[int, ...]]
MODES = (
    FAST,
    LEAST_MEMORY,
    Mode(0.0, "hidden"),
    Mode(0.0, "full"),
    *(Mode(p, "full") for p in (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)),
)
FEW_MODES = (FAST, LEAST_MEMORY, Mode(1.0))
"""In this order. A candidate that does not fit with the least memory does not fit at all."""
MANY_GROUPS = 500
"""With more groups of candidates, the search tries fewer modes, and model axes of the widths of hosts only."""
MAX_FOR_MEMORY = 200
"""Candidates that the search prices for the objective "memory", those with the fewest bytes first."""
MAX_IF_QUICK = 12
"""The same if the question is only whether anything fits, or if nothing has been found that fits."""


def search_best_first(problem: Problem, incumbents: Incumbents, is_quick: bool = False) -> None:
    """Add the best strategies to the incumbents.

    With ``is_quick``, price a few candidates with little memory and stop at the first that fits.
    """
    _BestFirstSearch(problem, incumbents, is_quick).run()


class _BestFirstSearch:
    """The search of one problem."""

    def __init__(self, problem: Problem, incumbents: Incumbents, is_quick: bool = False) -> None:
        self.problem, self.incumbents, self._is_quick = problem, incumbents, is_quick
        self._chooser = Chooser(problem, incumbents)
        self._bounds = Bounds(self._chooser)
        self._groups = list(groups(problem))
        self._modes: Sequence[Mode] = MODES
        if len(self._groups) > MANY_GROUPS:
            self._groups = list(groups(problem, max(problem.hardware.links[0].span, 2)))
            self._modes = FEW_MODES
        self._only_least_memory = is_quick or self._modes is FEW_MODES

    def run(self) -> None:
        """Fill the incumbents."""
        if self.problem.objective == "memory":
            self._run_least_memory(MAX_IF_QUICK if self._is_quick else MAX_FOR_MEMORY)
        else:
            self._run_bounded()
        if self.incumbents.best is None and not self._is_quick and not self.problem.is_infeasible:
            self._run_least_memory(MAX_IF_QUICK)
            reduce_memory(self.problem, self.incumbents, self._chooser.ranges)

    def _run_bounded(self) -> None:
        """Price candidates in the order of their bounds, until no bound is below the best step."""
        every = (candidate for group in self._groups for candidate in self._members(group))
        waiting = [(self._value(one, self._bounds.quick(one)), place, False, one) for place, one in enumerate(every)]
        heapify(waiting)
        while waiting:
            value, place, is_close, candidate = heappop(waiting)
            if value == inf or value >= self.incumbents.best_value * (1 + 1e-12):
                return
            if is_close:
                self._place(candidate)
            else:
                heappush(waiting, (self._value(candidate, self._bounds.tight(candidate)), place, True, candidate))

    def _value(self, candidate: Candidate, step_s: float) -> float:
        return self.incumbents.num_counted(candidate.degrees) * step_s

    def _run_least_memory(self, most: int) -> None:
        """Price candidates in the order of the bytes of an average stage."""
        ranked: list[tuple[float, int, Candidate]] = []
        for group in self._least_memory_groups():
            for candidate in self._members(group):
                if not self._only_least_memory or self._is_least_memory(candidate):
                    ranked.append((self._average_bytes(candidate), len(ranked), candidate))
        for _, _, candidate in sorted(ranked)[:most]:
            self._place(candidate, for_least_memory=True)
            if self._is_quick and self.incumbents.best is not None:
                return

    def _least_memory_groups(self) -> list[Group]:
        """All groups, or for a quick search those with the smallest micro-batches, which keep fewer activations."""
        if not self._only_least_memory:
            return self._groups
        return list({(group.degrees, group.context): group for group in self._groups}.values())

    def _is_least_memory(self, candidate: Candidate) -> bool:
        """Whether a candidate can hold least: other schedules and lower stages of ZeRO hold more."""
        schedules, zeros = self.problem.constraints.schedule, self.problem.constraints.zero
        is_late = candidate.options.zero >= 2 or candidate.degrees[1] == 1
        return (schedules is not None or candidate.options.schedule in (None, "1f1b")) and (
            zeros is not None or is_late
        )

    def _members(self, group: Group) -> Iterator[Candidate]:
        """Members of a group; GPipe only with a constraint, because it takes as long as 1F1B and holds more.

        Stages consist of whole blocks.
        """
        takes_gpipe = self.problem.constraints.schedule is not None
        for candidate in candidates_of(self.problem, group):
            is_excluded = candidate.options.schedule == "gpipe" and not takes_gpipe
            if not is_excluded and (
                candidate.num_stages == group.degrees[0] or candidate.num_stages <= len(self._chooser.ranges)
            ):
                yield candidate

    def _average_bytes(self, candidate: Candidate) -> float:
        choices = self._chooser.choices(candidate, LEAST_MEMORY)
        if choices is None:
            return inf
        prices = self.incumbents.prices(candidate)
        each = bytes_of_weights(prices, candidate)
        units = self._chooser.units(prices, candidate.options.recompute, choices)
        live = self._chooser.live(candidate)
        held = sum(held_bytes(unit, each) for unit in units) / candidate.degrees[0]
        return held + max(live) * sum(unit.kept_bytes for unit in units) / candidate.num_stages

    def _place(self, candidate: Candidate, for_least_memory: bool = False) -> None:
        """Cut a candidate into stages and price it, in every mode; for a large problem until one fits."""
        tried: dict[tuple[Choice, ...], bool] = {}
        smallest = (LEAST_MEMORY_WHOLE, LEAST_MEMORY) if candidate.options.zero == 3 else (LEAST_MEMORY,)
        for mode in smallest if for_least_memory else self._modes:
            choices = self._chooser.choices(candidate, mode)
            if choices is None:
                continue
            if choices not in tried:
                tried[choices] = self._try(candidate, choices, for_least_memory)
            is_enough = tried[choices] and self._modes is FEW_MODES
            if is_enough or (mode == LEAST_MEMORY and not tried[choices]):
                return

    def _try(self, candidate: Candidate, choices: tuple[Choice, ...], for_least_memory: bool) -> bool:
        """Price the cuts that may be better than the best strategy; returns whether any cut fits."""
        prices = self.incumbents.prices(candidate)
        by_row = len(self._chooser.ranges) < candidate.num_stages
        units = self._chooser.units(prices, candidate.options.recompute, choices, by_row)
        if tied_s := self._chooser.tied_s(candidate, choices[-1][1] is not None):
            units = [*units[:-1], replace(units[-1], seconds=units[-1].seconds + tied_s)]
        limit = inf if for_least_memory else self.problem.memory_bytes
        fits, is_thorough = False, self._modes is not FEW_MODES or self.incumbents.best is None
        # an upper bound: all gradients beside all activations; then a lower bound without gradients
        for is_least in (False, True) if is_thorough else (False,):
            held = bytes_of_weights(prices, candidate, is_least)
            for stages in balanced_stages(units, self._chooser.live(candidate), held, limit, candidate.degrees[0]):
                if self._is_slower(candidate, units, stages):
                    fits = True
                else:
                    found = self.incumbents.add(candidate, choices, stages)
                    fits = fits or found.estimate.peak_bytes <= self.problem.memory_bytes
            if fits:
                break
        return fits

    def _is_slower(self, candidate: Candidate, units: Sequence[Unit], stages: Sequence[int]) -> bool:
        """Whether the slowest stage alone takes longer than the best strategy."""
        seconds, row = [0.0] * candidate.num_stages, 0
        for unit in units:
            seconds[stages[row]] += unit.seconds
            row += unit.num_rows
        m = candidate.options.num_micro_batches
        # the wait for the stages before, at the start and at the end
        waits = {**WAITS, "interleaved": 1.0}.get(candidate.options.schedule, 0.0)
        slices = self._chooser.shape_of(candidate).stages_by_slice()
        slowest = max(waits * sum(seconds[: own[0]]) + m * sum(seconds[stage] for stage in own) for own in slices)
        bound = slowest / self.problem.hardware.alone_speedup + self._bounds.update_s(candidate)
        return self.incumbents.cannot_improve(candidate.degrees, bound)


def reduce_memory(problem: Problem, incumbents: Incumbents, ranges: Sequence[range]) -> None:
    """Add strategies that hold less and less to the incumbents, until one fits or no change helps.

    The best-first search chooses by bytes that add up: gradients beside all activations. The peak of a step is one
    moment, which only a whole estimate finds; so this search of small changes runs last.

    Args:
        problem: the question.
        incumbents: hold strategies that do not fit.
        ranges: rows that a cut keeps together.
    """
    most, seen = incumbents.num_priced + _MOST_PRICED, set[_Changed]()
    start: PricedStrategy | None = None
    while incumbents.least_memory is not None and incumbents.least_memory is not start:
        start = incumbents.least_memory
        for changed in _changes(problem, incumbents, start, ranges):
            if changed not in seen and problem.fits_ties(changed[1]) and problem.fits_stages(changed[2]):
                seen.add(changed)
                incumbents.add(*changed)
            if incumbents.best is not None or incumbents.num_priced >= most:
                return


def _changes(
    problem: Problem, incumbents: Incumbents, found: PricedStrategy, ranges: Sequence[range]
) -> Iterator[_Changed]:
    """Other choices for two neighbouring kinds of rows, a unit on the next or previous stage, other options."""
    candidate = Candidate(found.strategy.options, found.strategy.num_stages)
    layers, (_, data, model) = found.strategy.layers, candidate.degrees
    choices = tuple(problem.choices_of(found.strategy))
    stages = tuple(layer.stage for layer in layers)
    free = [tuple(problem.choices(index, model, data)) for index in range(len(layers))]
    kinds = list(zip(incumbents.classes.with_before, free, choices, strict=True))
    for near in dict.fromkeys(tuple(kinds[index : index + 2]) for index in range(len(kinds))):
        for ours in product(*(options for _, options, _ in near)):
            new = dict(zip(near, ours, strict=True))
            yield candidate, tuple(new.get(kind, kind[2]) for kind in kinds), stages
    for rows in ranges:
        for stage in (stages[rows.start] - 1, stages[rows.stop - 1] + 1):
            moved = stages[: rows.start] + (stage,) * len(rows) + stages[rows.stop :]
            if list(moved) == sorted(moved) and set(moved) == set(stages):
                yield candidate, choices, moved
    for group in groups(problem):
        if (group.degrees, group.context) == (candidate.degrees, candidate.options.context):
            for other in candidates_of(problem, group):
                if other.num_stages == candidate.num_stages:
                    yield other, choices, stages
