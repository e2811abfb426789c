"""The result of a search, and the questions that it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from workbench.core.presets import StrategyLike
from workbench.core.rows import count_parameters
from workbench.core.strategy import ResolvedStrategy, Strategy
from workbench.cost.estimate import Estimate
from workbench.cost.stage_settings import computed_in, rate_of
from workbench.planning.explain import Explanation, explain
from workbench.planning.incumbents import PricedStrategy, fullest_stages
from workbench.planning.one_device import DEGREES, describe_one_device, fits, one_device
from workbench.planning.problem import Problem, check_constraint_names
from workbench.planning.strategy_comparison import (
    PARTS,
    StrategyDifference,
    WhyNot,
    compare_strategies,
    compare_with_best,
)
from workbench.planning.write_strategy import write_strategy
from workbench.units import counted, format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

_SHOWN = ("zero", "shards", "context", "recompute", "offload", "sequence", "overlap")
"""Options that are columns of the table under their own names."""
_WIDTH = 118
"""Characters of a printed strategy's lines."""


@dataclass(frozen=True)
class Plan:
    """The best strategy that a search found.

    Attributes:
        problem: the question.
        found: the answer with its estimate.
        others: the best strategies with other degrees, best first.
        is_exact: whether the search priced every strategy or excluded it by a bound.
        search_s: seconds of the search.
        num_priced: number of strategies with a whole estimate.
        search: finds the plan of a problem; ``again`` calls it.
    """

    problem: Problem
    found: PricedStrategy
    search: Callable[[Problem], Plan] = field(repr=False, compare=False)
    others: tuple[PricedStrategy, ...] = field(default=(), repr=False)
    is_exact: bool = False
    search_s: float = 0.0
    num_priced: int = 0

    @property
    def resolved(self) -> ResolvedStrategy:
        """The choice of every layer."""
        return self.found.strategy

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy for ``wb.parallelize``."""
        return write_strategy(self.problem, self.found.strategy)

    @cached_property
    def estimate(self) -> Estimate:
        """Seconds and bytes of a step, with its timeline."""
        return self.problem.estimate(self.resolved, with_timeline=True)

    @cached_property
    def one_device(self) -> PricedStrategy:
        """The same step on one device, whether it fits there or not."""
        others = (found for found in self.others if found.strategy.degrees == DEGREES)
        return self.found if self.resolved.degrees == DEGREES else next(others, one_device(self.problem))

    @property
    def table(self) -> pd.DataFrame:
        """The best strategy for every triple of degrees, and one device (1 x 1 x 1), best first.

        Seconds, bytes, whether it fits into memory, and whether it is the plan: one device may be above it.
        """
        import pandas

        rows = [self.found, *self.others]
        rows += [self.one_device] if self.one_device not in rows else []
        rows.sort(key=lambda found: (not fits(self.problem, found), found.value))
        return pandas.DataFrame([_row(found, fits(self.problem, found), found is self.found) for found in rows])

    @property
    def layers(self) -> pd.DataFrame:
        """The choice of each layer, one row per layer. Parameters that layers share count at the first."""
        import pandas

        layers = zip(self.problem.rows, self.resolved.layers, strict=True)
        return pandas.DataFrame(
            [
                {
                    "layer": layer.name,
                    "kind": layer.kind,
                    "parallel": layer.parallel,
                    "split": layer.split,
                    "stage": layer.stage,
                    "parameters": count_parameters([row.layer]),
                }
                for row, layer in layers
            ]
        )

    def explain(self, layer: str) -> Explanation:
        """The other choices of a layer, and their costs.

        Args:
            layer: its name, or a pattern for several ("blocks.*.fc1").

        Raises:
            StrategyError: no such layer.
        """
        return explain(self.problem, self.found, layer)

    def why_not(self, strategy: StrategyLike) -> WhyNot:
        """Why the plan is not this strategy: the limit that it breaks, or how much slower it is, and where."""
        return compare_with_best(self.problem, self.found, strategy)

    def diff(self, other: Plan | StrategyLike) -> StrategyDifference:
        """The differences to another plan or strategy: options, layers, seconds and bytes."""
        return compare_strategies(self.problem, self.strategy, other.strategy if isinstance(other, Plan) else other)

    def again(self, **constraints: Any) -> Plan:
        """Search again with further constraints: ``plan.again(zero=1, layers="head: data")``."""
        check_constraint_names("again", constraints)
        return self.search(replace(self.problem, constraints=replace(self.problem.constraints, **constraints)))

    def __str__(self) -> str:
        problem, found = self.problem, self.found.estimate
        how = "every strategy was looked at" if self.is_exact else f"{self.num_priced} strategies were priced"
        layers, ranks = counted(len(problem.rows), "layer"), counted(problem.num_ranks, "rank")
        title = f"plan for {layers} on {ranks} of {problem.hardware.name}"
        lines = [
            f"{title}, batch {problem.batch_size}, best {problem.objective}",
            *_wrapped(self.strategy),
            f"  step {format_seconds(found.step_s)}, {found.samples_per_s:.4g} samples/s: {_parts(found)}",
            f"  {_memory(self.found, problem.memory_bytes)}",
            *self._other_rate(),
            f"  one device: {describe_one_device(problem, self.one_device, self.found)}",
            *self._next_best(),
            f"  searched in {format_seconds(self.search_s)}: {how}",
        ]
        return "\n".join(lines)

    def _other_rate(self) -> Sequence[str]:
        problem = self.problem
        dtype = computed_in(problem.counted, problem.precision, problem.software)
        rate = rate_of(problem.hardware, dtype, problem.precision)
        notes = [f"  no rate of products in {dtype} is known: priced as {rate}"] if rate != dtype else []
        if rate == "fp32" and problem.hardware.fp32_is_tf32:
            notes.append('  fp32 is priced as TF32: torch.set_float32_matmul_precision("high")')
        return notes

    def _next_best(self) -> Sequence[str]:
        lines = []
        what = {"memory": " memory", "cost": " rank-seconds"}.get(self.problem.objective, "")
        for found in self.others[:3]:
            more = f"{found.value[0] / self.found.value[0] - 1:+.1%}{what}"
            lines.append(f"  next: {found.strategy.options}, {format_seconds(found.estimate.step_s)} ({more})")
        return lines

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"


def _wrapped(strategy: Strategy) -> list[str]:
    """A strategy as lines that can be copied together; a row stays on one line."""
    text = str(strategy).replace(": ", ":\xa0")
    lines = wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def _row(found: PricedStrategy, has_memory: bool, is_best: bool) -> dict[str, Any]:
    pipeline, data, model = found.strategy.degrees
    options, price = found.strategy.options, found.estimate
    return {
        "pipeline": pipeline,
        "data": data,
        "model": model,
        "micro_batches": options.num_micro_batches,
        "schedule": options.schedule or "",
        "stages": found.strategy.num_stages,
        **{name: getattr(options, name) for name in _SHOWN},
        "step_s": price.step_s,
        "samples_per_s": price.samples_per_s,
        **{part: getattr(price, part) for part in PARTS},
        "peak_bytes": price.peak_bytes,
        "fits": has_memory,
        "best": is_best,
    }


def _parts(found: Estimate) -> str:
    parts = [(part.removesuffix("_s"), getattr(found, part)) for part in PARTS]
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts if seconds > 1e-9 * found.step_s)


def _memory(found: PricedStrategy, limit: float) -> str:
    price = found.estimate
    kinds = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in price.peak_kinds)
    where = f"at most, on {fullest_stages(found.strategy, price)}"
    beside = f"; {format_bytes(price.offloaded_bytes)} offloaded" if price.offloaded_bytes else ""
    return f"memory {format_bytes(price.peak_bytes)} of {format_bytes(limit)}, {where}: {kinds}{beside}"
