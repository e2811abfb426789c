"""The best strategies that a search has found so far: of all, and for each triple of degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, prod

from workbench.core.strategy import ResolvedStrategy
from workbench.cost.estimate import Estimate, combine
from workbench.planning.candidates import Candidate
from workbench.planning.layer_prices import LayerPrices, RowClasses, data_ranks, with_options
from workbench.planning.problem import Choice, Problem

Value = tuple[float, float]


@dataclass(frozen=True)
class PricedStrategy:
    """A strategy that was priced."""

    strategy: ResolvedStrategy
    estimate: Estimate
    value: Value

    def is_better(self, other: PricedStrategy | None) -> bool:
        """Whether it is preferred; of equals, the one with the smaller model axis."""
        return other is None or self._order < other._order

    @property
    def _order(self) -> tuple[float, float, int]:
        first, second = (float(f"{each:.9g}") for each in self.value)  # sums in another order are no difference
        return first, second, self.strategy.degrees[2]


def fullest_stages(strategy: ResolvedStrategy, price: Estimate) -> str:
    """The stages of the fullest rank as text: "stage 1", or "stages 1 and 2" of a rank with several."""
    *others, last = map(str, strategy.stages_by_slice()[price.fullest_stage])
    return f"stages {', '.join(others)} and {last}" if others else f"stage {last}"


@dataclass
class Incumbents:
    """The best strategy, the best for each triple of degrees, and the one with the smallest peak.

    Attributes:
        problem: the question.
        best: the best strategy that fits into memory; None if none has been found.
        least_memory: the strategy with the smallest peak, whether it fits or not.
        by_degrees: the best strategies that fit.
        num_priced: number of estimates.
    """

    problem: Problem
    best: PricedStrategy | None = None
    least_memory: PricedStrategy | None = None
    by_degrees: dict[tuple[int, int, int], PricedStrategy] = field(default_factory=dict)
    num_priced: int = 0

    def __post_init__(self) -> None:
        self.classes = RowClasses(self.problem)
        self._prices: dict[tuple[object, ...], LayerPrices] = {}

    def prices(self, candidate: Candidate) -> LayerPrices:
        """Prices of layers for a candidate; candidates with equal prices share them."""
        options, (_, data, model) = candidate.options, candidate.degrees
        samples = self.problem.batch_size / (data // options.context) / options.num_micro_batches
        several = options.num_micro_batches > 1
        return self.prices_of(model, data, samples, several, options.sequence, options.context, options.overlap)

    def prices_of(
        self, model: int, data: int, samples: float, several: bool, sequence: bool, context: int, overlap: int
    ) -> LayerPrices:
        """Prices of layers on a model axis of ``model`` ranks; arguments are those of ``LayerPrices``."""
        key = (model, data_ranks(self.problem, data), samples, several, sequence, context, overlap)
        if key not in self._prices:
            self._prices[key] = LayerPrices(self.problem, self.classes, *key)
        return self._prices[key]

    def cannot_improve(self, degrees: tuple[int, int, int], least_step_s: float) -> bool:
        """Whether a strategy with this lower bound of its step is no better than the best one."""
        if self.best is None or self.problem.objective == "memory":
            return False
        return self.num_counted(degrees) * least_step_s >= self.best.value[0] * (1 + 1e-12)

    def num_counted(self, degrees: tuple[int, int, int]) -> int:
        """Number of ranks for the objective "cost", else 1."""
        return prod(degrees) if self.problem.objective == "cost" else 1

    def add(self, candidate: Candidate, choices: Sequence[Choice], stages: Sequence[int]) -> PricedStrategy:
        """Price a strategy, and keep it if it is better than the incumbents."""
        strategy = self.problem.resolve(choices, stages, candidate.options)
        candidate = Candidate(strategy.options, candidate.num_stages)
        prices = self.prices(candidate)
        settings = [with_options(prices.setting, candidate)] * candidate.num_stages
        priced = prices.of_strategy(candidate, strategy)
        return self.keep(strategy, combine(self.problem.counted, strategy, priced, settings, self.problem.batch_size))

    def keep(self, strategy: ResolvedStrategy, estimate: Estimate) -> PricedStrategy:
        """Keep a strategy that was priced if it is better than the incumbents."""
        found = PricedStrategy(strategy, estimate, self.problem.value(strategy, estimate))
        self.num_priced += 1
        if self.least_memory is None or estimate.peak_bytes < self.least_memory.estimate.peak_bytes:
            self.least_memory = found
        if estimate.peak_bytes <= self.problem.memory_bytes:
            degrees = strategy.degrees
            if found.is_better(self.by_degrees.get(degrees)):
                self.by_degrees[degrees] = found
            if found.is_better(self.best):
                self.best = found
        return found

    @property
    def kept(self) -> list[PricedStrategy]:
        """The best strategies that fit, and the one that holds least."""
        return [*self.by_degrees.values(), *([self.least_memory] if self.least_memory is not None else [])]

    @property
    def best_value(self) -> float:
        """The value of the best strategy; infinite if there is none."""
        return inf if self.best is None else self.best.value[0]
