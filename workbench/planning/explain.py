"""The other choices of a layer, and the cost of each while everything else stays the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.core.rows import Row
from workbench.cost.estimate import Estimate
from workbench.errors import StrategyError
from workbench.planning.incumbents import PricedStrategy
from workbench.planning.problem import Choice, Problem
from workbench.units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Alternative:
    """One choice for some layers.

    Attributes:
        choice: as in strategies: "data", "model", "model:column", "model:row".
        layers: names of the layers with this choice.
        estimate: of a step with this choice.
        fits: whether the step fits into memory.
        is_chosen: whether it is the choice of the plan.
        note: why the choice is not possible; the estimate is then None.
    """

    choice: str
    layers: tuple[str, ...]
    estimate: Estimate | None
    fits: bool
    is_chosen: bool
    note: str = ""


@dataclass(frozen=True)
class Explanation:
    """The choices of a layer, the chosen one first, then the others by seconds."""

    layer: str
    alternatives: tuple[Alternative, ...]

    @property
    def table(self) -> pd.DataFrame:
        """One row per choice: seconds, bytes, and the difference to the chosen one."""
        import pandas

        chosen = self.alternatives[0].estimate
        rows = []
        for one in self.alternatives:
            price = one.estimate
            rows.append(
                {
                    "choice": one.choice,
                    "layers": len(one.layers),
                    **{name: getattr(price, name, None) for name in ("step_s", "compute_s", "boxing_s", "peak_bytes")},
                    "more_s": None if price is None or chosen is None else price.step_s - chosen.step_s,
                    "fits": one.fits,
                    "chosen": one.is_chosen,
                    "note": one.note,
                }
            )
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        chosen = self.alternatives[0].estimate
        lines = [self.layer]
        for one in self.alternatives:
            where = one.layers[0] if len(one.layers) == 1 else f"{len(one.layers)} layers like {one.layers[0]}"
            mark = "*" if one.is_chosen else " "
            if one.estimate is None or chosen is None:
                lines.append(f" {mark} {one.choice:13} {where}: {one.note}")
                continue
            more = one.estimate.step_s - chosen.step_s
            change = "" if one.is_chosen else f", {'-' if more < 0 else '+'}{format_seconds(abs(more))}"
            fits = "" if one.fits else ", does not fit"
            lines.append(
                f" {mark} {one.choice:13} {where}: step {format_seconds(one.estimate.step_s)}{change}, "
                f"peak {format_bytes(one.estimate.peak_bytes)}{fits}"
            )
        return "\n".join(lines)


def explain(problem: Problem, best: PricedStrategy, layer: str) -> Explanation:
    """The choices of the layers that ``layer`` (a name or a pattern) matches: of them alone, and in all equal blocks.
    Layers with other choices, such as norms beside linear layers, change apart.

    Raises:
        StrategyError: nothing matches.
    """
    names = [row.layer.name for row in problem.rows]
    matched = [index for index, name in enumerate(names) if Row(layer).matches(name)]
    if not matched:
        raise StrategyError(f"explain({layer!r}): no layer matches. The layers are {', '.join(names[:8])}, ...")
    chosen = problem.choices_of(best.strategy)
    sets = [matched]
    if len(matched) == 1 and len(alike := _alike(names, matched[0])) > 1:
        sets.append(alike)
    found = [_priced(problem, best, chosen, matched[:1], chosen[matched[0]], is_chosen=True)]
    _, data, model = best.strategy.degrees
    for indices in sets:
        with_options: dict[tuple[Choice, ...], list[int]] = {}
        for index in indices:
            with_options.setdefault(tuple(problem.choices(index, max(2, model), data)), []).append(index)
        for options, same in with_options.items():
            other = [choice for choice in options if any(chosen[index] != choice for index in same)]
            found += [_priced(problem, best, chosen, same, choice) for choice in other]
    rest = sorted(found[1:], key=lambda one: one.estimate.step_s if one.estimate else float("inf"))
    return Explanation(layer, (found[0], *rest))


def _alike(names: list[str], index: int) -> list[int]:
    """Layers whose names differ in numbers only."""
    key = re.sub(r"\d+", "#", names[index])
    return [place for place, name in enumerate(names) if re.sub(r"\d+", "#", name) == key]


def _priced(
    problem: Problem,
    best: PricedStrategy,
    chosen: list[Choice],
    indices: list[int],
    choice: Choice,
    is_chosen: bool = False,
) -> Alternative:
    choices = [choice if index in set(indices) else known for index, known in enumerate(chosen)]
    names = tuple(problem.rows[index].layer.name for index in indices)
    word = choice[0] + (f":{choice[1]}" if choice[1] in ("column", "row") else "")
    if choice[0] == "model" and best.strategy.degrees[2] == 1:
        return Alternative(word, names, None, False, is_chosen, "the plan's model axis has 1 rank")
    if not problem.fits_ties(choices):
        return Alternative(word, names, None, False, is_chosen, "a layer that shares its weight cuts it otherwise")
    stages = [layer.stage for layer in best.strategy.layers]
    resolved = problem.resolve(choices, stages, best.strategy.options)
    if choice[0] == "expert":
        word += f":{resolved.layers[indices[0]].over_data * resolved.degrees[2]}"
    price = problem.estimate(resolved)
    return Alternative(word, names, price, price.peak_bytes <= problem.memory_bytes, is_chosen)
