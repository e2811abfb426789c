"""Two strategies side by side: the options and layers that differ, and the difference in seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from workbench.core.compress_patterns import compress_patterns
from workbench.core.options import Options
from workbench.core.presets import StrategyLike, strategy_of
from workbench.core.rows import Row
from workbench.core.strategy import ResolvedLayer, ResolvedStrategy
from workbench.cost.estimate import Estimate
from workbench.errors import StrategyError
from workbench.planning.candidates import not_searched
from workbench.planning.incumbents import PricedStrategy, fullest_stages
from workbench.planning.problem import Problem
from workbench.planning.write_strategy import row_of
from workbench.units import format_bytes, format_seconds

PARTS = ("compute_s", "boxing_s", "gradient_s", "bubble_s", "optimizer_s")
"""The parts of a step, in the order of tables."""
_EQUAL = 1e-9
_NOISE = 1e-6
"""Texts leave out a part that is smaller than this fraction of the largest one."""


@dataclass(frozen=True)
class StrategyDifference:
    """The difference from one strategy to another.

    Attributes:
        options: (name, value here, value there) of each option that differs.
        layers: the choices there of the layers that differ, as few rows.
        seconds: by part of a step, there minus here.
        peak_bytes: there minus here.
        step_s: (here, there).
    """

    options: tuple[tuple[str, object, object], ...]
    layers: tuple[Row, ...]
    seconds: dict[str, float]
    peak_bytes: float
    step_s: tuple[float, float]

    def __str__(self) -> str:
        lines = [f"{name}: {here} -> {there}" for name, here, there in self.options]
        lines += [f"layers: {'; '.join(map(str, self.layers))}"] if self.layers else []
        here, there = self.step_s
        change = f"{format_seconds(here)} -> {format_seconds(there)} ({there / here - 1:+.1%})"
        lines.append(f"step: {change}: {format_parts(self.seconds)}")
        sign = "-" if self.peak_bytes < 0 else "+"
        lines.append(f"peak memory: {sign}{format_bytes(abs(self.peak_bytes))}")
        return "\n".join(lines)


@dataclass(frozen=True)
class WhyNot:
    """Why a plan is not another strategy.

    Attributes:
        reason: "cannot run", "memory", "parts of heads", "slower", "more memory" or "dearer" (by the objective),
            "equal", "better".
        text: the answer as a sentence, with numbers.
        estimate: the estimate of the strategy; None if it cannot run.
        difference: the difference from the plan to the strategy; None if it cannot run.
    """

    reason: str
    text: str
    estimate: Estimate | None = None
    difference: StrategyDifference | None = None

    def __str__(self) -> str:
        return self.text


def compare_with_best(problem: Problem, best: PricedStrategy, strategy: StrategyLike) -> WhyNot:
    """Compare a strategy with the best one: the limit that it breaks, or the difference in seconds and bytes."""
    try:
        resolved = _resolved(problem, strategy)
        price = problem.estimate(resolved)
    except StrategyError as error:
        return WhyNot("cannot run", f"It cannot run: {error}")
    difference = _difference(best.strategy, best.estimate, resolved, price)
    precisions = _precisions(best.strategy, resolved)
    if price.peak_bytes > problem.memory_bytes:
        largest = " and ".join(f"{format_bytes(size)} of {kind}" for kind, size in price.peak_kinds[:2])
        peak, limit = price.peak_bytes, problem.memory_bytes
        text = (
            f"It does not fit: each rank of {fullest_stages(resolved, price)} holds {format_bytes(peak)}, and a rank "
            f"has {format_bytes(limit)}: {format_bytes(peak - limit)} too much. Most of it is {largest}.{precisions}"
        )
        return WhyNot("memory", text, price, difference)
    ratio = problem.value(resolved, price)[0] / best.value[0] - 1
    word = {"throughput": "slower", "memory": "more memory", "cost": "dearer"}[problem.objective]
    figures = (
        f"{format_seconds(price.step_s)} a step against {format_seconds(best.estimate.step_s)}, "
        f"{format_bytes(price.peak_bytes)} against {format_bytes(best.estimate.peak_bytes)}. "
        f"{format_parts(difference.seconds)}.{precisions}"
    )
    if abs(ratio) <= _EQUAL:
        return WhyNot("equal", f"It is as good: {figures}", price, difference)
    split = [layer.stage for layer in resolved.layers if layer.split in ("column", "row")]
    degrees = [model for _, model in map(resolved.stage_width, split) if not problem.fits_heads(model)]
    if degrees:
        heads = " and ".join(map(str, problem.heads))
        text = (
            f"Its model degree of {degrees[0]} does not divide {heads} heads of attention: ranks would "
            f"gather parts of heads in every block, which is not in these figures. {figures}"
        )
        return WhyNot("parts of heads", text, price, difference)
    if ratio < 0:
        outside = not_searched(problem, resolved)
        why = f"the search did not look at {', '.join(outside)}" if outside else "the search missed it"
        return WhyNot("better", f"It is better by {-ratio:.1%}; {why}: {figures}", price, difference)
    return WhyNot(word, f"It is {word} by {ratio:.1%}: {figures}", price, difference)


def _precisions(best: ResolvedStrategy, other: ResolvedStrategy) -> str:
    """A sentence where figures are of two precisions: a strategy that names none is in 32 bits."""
    ours, theirs = best.options.precision, other.options.precision
    if ours == theirs:
        return ""
    fix = f" For the same, write {ours} behind its bar." if ours != "fp32" else ""
    return f" It is priced in {theirs}, the plan in {ours}.{fix}"


def compare_strategies(problem: Problem, here: StrategyLike, there: StrategyLike) -> StrategyDifference:
    """The difference from one strategy to another.

    Raises:
        StrategyError: one of them is not a strategy, or does not fit the model or the ranks.
    """
    sides = []
    for side in (here, there):
        resolved = _resolved(problem, side)
        sides += [resolved, problem.estimate(resolved)]
    return _difference(*sides)  # type: ignore[arg-type]


def _resolved(problem: Problem, strategy: StrategyLike) -> ResolvedStrategy:
    """On all ranks, or for the objective "cost" on as many as its degrees say."""
    written = strategy_of(strategy, problem.costs.layers, problem.num_ranks)
    num_ranks = written.options.num_ranks if problem.objective == "cost" else 0
    return written.resolve(problem.costs.layers, num_ranks or problem.num_ranks)


def _difference(
    one: ResolvedStrategy, price: Estimate, other: ResolvedStrategy, other_price: Estimate
) -> StrategyDifference:
    changed = [(a, b) for a, b in zip(one.layers, other.layers, strict=True) if a != b]
    has_stages = any(a.stage != b.stage for a, b in changed)
    rows = [replace(row_of(b, other.stage_width(b.stage)[1], has_stages), split=_split(b)) for _, b in changed]
    seconds = {part: getattr(other_price, part) - getattr(price, part) for part in PARTS}
    return StrategyDifference(
        _changed_options(one, other),
        compress_patterns([row.pattern for row in rows], rows) if rows else (),
        seconds,
        other_price.peak_bytes - price.peak_bytes,
        (price.step_s, other_price.step_s),
    )


def _split(layer: ResolvedLayer) -> str | None:
    """As rows say it."""
    return layer.split if layer.split in ("column", "row") else None


def _changed_options(one: ResolvedStrategy, other: ResolvedStrategy) -> tuple[tuple[str, object, object], ...]:
    names = [field.name for field in fields(Options) if field.name != "degrees"]
    pairs = [(name, getattr(one.options, name), getattr(other.options, name)) for name in names]
    pairs.insert(0, ("degrees", "x".join(map(str, one.degrees)), "x".join(map(str, other.degrees))))
    return tuple(pair for pair in pairs if pair[1] != pair[2])


def format_parts(seconds: dict[str, float]) -> str:
    """Differences of parts, the largest first.

    >>> format_parts({"compute_s": 0.0, "boxing_s": -0.002, "bubble_s": 1.0})
    'bubble +1.00 s, boxing -2.00 ms'
    """
    largest = sorted(seconds.items(), key=lambda item: -abs(item[1]))
    least = _NOISE * max(map(abs, seconds.values()), default=0.0)
    parts = [
        f"{name.removesuffix('_s')} {'-' if s < 0 else '+'}{format_seconds(abs(s))}"
        for name, s in largest
        if abs(s) > least
    ]
    return ", ".join(parts) or "every part takes as long"
