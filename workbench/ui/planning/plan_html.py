"""The planner's answer as HTML: its reasons, the comparison with the shown strategy, and a layer's other choices.

Pure functions. All prices are those of the present machine, which may differ from the plan's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from workbench.core.strategy import Strategy
from workbench.cost.estimate import Estimate
from workbench.cost.hardware import Hardware
from workbench.cost.software import Software
from workbench.errors import StrategyError
from workbench.planning.explain import Alternative, Explanation, explain
from workbench.planning.incumbents import PricedStrategy
from workbench.planning.one_device import DEGREES, fits, is_faster, one_device
from workbench.planning.plan import Plan
from workbench.planning.problem import Problem
from workbench.planning.strategy_comparison import StrategyDifference, WhyNot, compare_with_best
from workbench.planning.write_strategy import write_strategy
from workbench.ui.assets import element
from workbench.ui.number_text import MINUS, TIMES, signed_percent, three_digits
from workbench.ui.pictures.panel_svg import section
from workbench.units import format_bytes, format_seconds

_MOST_OTHERS = 6
_BAR = 84
_CHANGE = 30
_MANY_TIMES = 10
"""As slow: written as a factor, not in percent."""
_PARTS = {
    "compute_s": ("compute", "compute"),
    "boxing_s": ("boxing of activations", "boxing"),
    "gradient_s": ("boxing of gradients", "boxing"),
    "bubble_s": ("bubble", "idle"),
    "optimizer_s": ("optimizer", "optimizer-step"),
}
"""Name and colour of each part of a step."""


@dataclass(frozen=True)
class PricedPlan:
    """A plan, priced for the present machine and program.

    Attributes:
        plan: the result of the search.
        problem: the planner's problem on the present machine.
        ranked: the plan's strategy and the best ones with other degrees, the best on that machine first.
        alone: the step on one device.
    """

    plan: Plan
    problem: Problem
    ranked: tuple[PricedStrategy, ...]
    alone: PricedStrategy

    @classmethod
    def of(cls, plan: Plan, hardware: Hardware, software: Software) -> PricedPlan:
        """Price the best strategies of a plan for a machine and the program that trains."""
        shown = (plan.found, *plan.others[: _MOST_OTHERS - 1])
        if (hardware, software) == (plan.problem.hardware, plan.problem.software):
            return cls(plan, plan.problem, shown, plan.one_device)
        problem = replace(plan.problem, hardware=hardware, memory_bytes=hardware.memory_bytes, software=software)
        priced = [_priced(problem, found) for found in shown]
        ranked = sorted(priced, key=lambda found: (not fits(problem, found), found.value))
        return cls(plan, problem, tuple(ranked), one_device(problem))

    @property
    def chosen(self) -> PricedStrategy:
        """The plan's strategy."""
        return next(found for found in self.ranked if found.strategy == self.plan.found.strategy)

    def why_not(self, strategy: Strategy) -> WhyNot:
        """The reason why the plan is not this strategy."""
        return compare_with_best(self.problem, self.chosen, strategy)

    def explain(self, layer: str) -> Explanation | None:
        """The other choices of a layer; None for a layer that the plan does not know."""
        try:
            return explain(self.problem, self.chosen, layer)
        except StrategyError:
            return None


def priced_plan_html(priced: PricedPlan, strategy: Strategy, layer: str = "") -> str:
    """Three sections: the choice beside the best of other degrees; the shown strategy; a layer's choices.

    Args:
        strategy: the strategy of the panel's rows, valid or not.
        layer: name or pattern of the selected layer; empty where a block or nothing is selected.
    """
    sections = (_why(priced, strategy.options.precision), _why_not(priced, strategy), _layer(priced, layer))
    return element("div", *sections, css="wb-plan")


def problem_html(problem: str) -> str:
    """The reason why there is no plan, so that the user can change something and ask again."""
    return element("div", element("b", text="No plan. "), element("span", text=problem), css="wb-plan-problem")


def note_html(text: str) -> str:
    """A note in the place of the plan."""
    return element("div", element("span", text=text, css="wb-quiet"), css="wb-plan-note")


def _priced(problem: Problem, found: PricedStrategy) -> PricedStrategy:
    estimate = problem.estimate(found.strategy)
    return PricedStrategy(found.strategy, estimate, problem.value(found.strategy, estimate))


def _table(titles: Sequence[str], rows: Sequence[str]) -> str:
    head = element("thead", element("tr", *(element("th", text=title, scope="col") for title in titles)))
    return element("table", head, element("tbody", *rows))


def _number(text: str, css: str = "") -> str:
    return element("td", text=text, css=f"n {css}".strip())


# ---- why this one ----------------------------------------------------------------------------------------------------


def _why(priced: PricedPlan, precision: str) -> str:
    chosen = priced.chosen
    shown = list(priced.ranked)
    if priced.plan.resolved.degrees != DEGREES:
        shown.insert(_place_of_one_device(priced), priced.alone)
    slowest = max(found.estimate.step_s for found in priced.ranked)  # of these ranks: one device may be far too slow
    rows = [_other(priced, found, chosen, slowest) for found in shown]
    titles = ("pipe \u00d7 data \u00d7 model", "", "step", "", "peak per rank")
    rate = f"{three_digits(chosen.estimate.samples_per_s)} samples/s"
    how = "every strategy was looked at" if priced.plan.is_exact else f"{priced.plan.num_priced} strategies were priced"
    note = f"The best of every split of the ranks. {how[0].upper()}{how[1:]} in {format_seconds(priced.plan.search_s)}."
    description = _alone_text(priced)
    alone = element("p", element("b", text=description), css="verdict") if description else ""
    why_stale = _stale_text(priced, precision)
    stale = element("p", text=f"{why_stale} Press planner's choice to search again.", css="stale") if why_stale else ""
    return section(
        "Planner's choice", rate, _table(titles, rows), alone, element("p", text=note, css="wb-quiet"), stale
    )


def _place_of_one_device(priced: PricedPlan) -> int:
    """The number of better strategies in a sorted list."""
    own = (not fits(priced.problem, priced.alone), priced.alone.value)
    return sum((not fits(priced.problem, found), found.value) < own for found in priced.ranked)


def _alone_text(priced: PricedPlan) -> str:
    """The sentence for a model that more ranks do not make faster."""
    best, num_ranks = priced.ranked[0], priced.problem.num_ranks
    if num_ranks == 1 or not is_faster(priced.problem, priced.alone, best):
        return ""
    return f"One device is predicted to be as fast: nothing on {num_ranks} ranks beats it."


def _stale_text(priced: PricedPlan, precision: str) -> str:
    """What is other than in the search; empty if nothing is."""
    texts, asked = [], priced.plan.problem
    changes = [
        *(["the machine was changed"] if priced.problem.hardware != asked.hardware else []),
        *(["compiling the step was switched"] if priced.problem.software != asked.software else []),
    ]
    if changes:
        first = (
            "It is still the best of these."
            if priced.ranked[0] is priced.chosen
            else "Another one of these is better now."
        )
        texts.append(f"Planned before {' and '.join(changes)}. {first}")
    if precision != priced.problem.precision:
        texts.append(f"Planned for {priced.problem.precision}, and the rows are in {precision}.")
    return " ".join(texts)


def _other(priced: PricedPlan, found: PricedStrategy, chosen: PricedStrategy, slowest: float) -> str:
    estimate, is_chosen = found.estimate, found is chosen
    degrees = " \u00d7 ".join(map(str, found.strategy.degrees))
    is_alone = found is priced.alone and priced.problem.num_ranks > 1
    options = str(replace(found.strategy.options, degrees=None)) or "\u00a0"
    ratio = estimate.step_s / chosen.estimate.step_s
    more = "" if is_chosen else f"{three_digits(ratio)}{TIMES}" if ratio >= _MANY_TIMES else signed_percent(ratio - 1)
    text = str(write_strategy(priced.problem, found.strategy))
    name = element("button", text=degrees, type="button", css="wb-link wb-open", data_text=text, title=f"show {text}")
    if is_alone:  # no strategy of these ranks for the rows to show
        name = element("span", text="one device")
    over = "" if fits(priced.problem, found) else "over"
    return element(
        "tr",
        element("td", name, element("small", text=options)),
        element("td", _split(estimate, slowest) if estimate.step_s <= slowest else "", css="split"),
        _number(format_seconds(estimate.step_s)),
        _number(more, "change"),
        _number(format_bytes(estimate.peak_bytes), over),
        css="chosen" if is_chosen else "",
    )


def _split(estimate: Estimate, slowest: float) -> str:
    """A step as a bar of its parts."""
    parts = [(name, colour, getattr(estimate, part)) for part, (name, colour) in _PARTS.items()]
    description = ", ".join(f"{name} {format_seconds(seconds)}" for name, _, seconds in parts if seconds > 0)
    widths = [(colour, _BAR * seconds / slowest) for _, colour, seconds in parts]
    bars = [
        element("i", style=f"width: {width:.1f}px; background: var(--wb-{colour})")
        for colour, width in widths
        if width >= 0.3
    ]
    return element("span", *bars, css="wb-split", title=description, role="img", aria_label=description)


# ---- why not what is shown -------------------------------------------------------------------------------------------


def _why_not(priced: PricedPlan, strategy: Strategy) -> str:
    verdict = priced.why_not(strategy)
    if verdict.difference is None or verdict.estimate is None:
        return section("Why not the rows above", "", element("p", text=verdict.text, css="verdict bad"))
    difference = verdict.difference
    if not difference.options and not difference.layers:
        same = element("p", text="They are the planner's choice.", css="verdict")
        return section("Why not the rows above", "", same)
    head, _, rest = verdict.text.partition(": ")
    detail = rest if verdict.reason == "memory" else ""
    css = "verdict bad" if verdict.reason == "memory" else "verdict"
    description = element("p", element("b", text=head), css=css)
    parts = [element("p", text=detail, css="bad")] if detail else []
    changes = _changes(priced.chosen.estimate, verdict.estimate)
    return section("Why not the rows above", "", description, *parts, changes, _differs(difference))


def _changes(plan: Estimate, shown: Estimate) -> str:
    """For each part, seconds of the plan, of the shown strategy, and the difference."""
    pairs = [(name, getattr(plan, part), getattr(shown, part), colour) for part, (name, colour) in _PARTS.items()]
    pairs = [pair for pair in pairs if max(pair[1:3]) > 1e-6 * max(plan.step_s, shown.step_s)]
    largest = max((abs(there - here) for _, here, there, _ in pairs), default=0.0) or 1.0
    rows = [
        element(
            "tr",
            element("td", text=name),
            _number(format_seconds(here)),
            _number(format_seconds(there)),
            element("td", _diverging((there - here) / largest, colour), css="split"),
            _number(_signed(there - here)),
        )
        for name, here, there, colour in pairs
    ]
    rows.append(_total("step", plan.step_s, shown.step_s, _signed(shown.step_s - plan.step_s), format_seconds))
    more = shown.peak_bytes - plan.peak_bytes
    sign = MINUS if more < 0 else "+"
    change = f"{sign}{format_bytes(abs(more))}" if abs(more) >= 1 else ""
    rows.append(_total("peak per rank", plan.peak_bytes, shown.peak_bytes, change, format_bytes))
    return _table(("", "planner", "shown", "", "more"), rows)


def _total(name: str, here: float, there: float, change: str, write_number: Callable[[float], str]) -> str:
    texts = [write_number(value) for value in (here, there)]
    return element("tr", element("td", text=name), *map(_number, texts), element("td"), _number(change), css="total")


def _signed(seconds: float) -> str:
    """``"+1.20 ms"``, with a true minus; empty without a difference."""
    if abs(seconds) < 1e-9:
        return ""
    return f"{MINUS if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _diverging(share: float, colour: str) -> str:
    """A bar to the right of the middle for more, to the left for less."""
    width = abs(share) * _CHANGE
    left = _CHANGE if share > 0 else _CHANGE - width
    bar = element("i", style=f"left: {left:.1f}px; width: {width:.1f}px; background: var(--wb-{colour})")
    return element("span", bar, css="wb-change", aria_hidden="true")


def _differs(difference: StrategyDifference) -> str:
    """The differences in text: options of the plan and of the rows, and the choices of the rows' layers."""
    description = [
        f"{name.replace('_', ' ')} {_word(here)} \u2192 {_word(there)}" for name, here, there in difference.options
    ]
    if difference.layers:
        rows = "; ".join(map(str, difference.layers[:6]))
        description.append(f"layers {rows}" + ("; \u2026" if len(difference.layers) > 6 else ""))
    return element("p", text=f"planner \u2192 shown: {', '.join(description)}", css="wb-quiet")


def _word(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)


# ---- a layer ---------------------------------------------------------------------------------------------------------


def _layer(priced: PricedPlan, layer: str) -> str:
    found = priced.explain(layer) if layer else None
    if found is None:
        text = "Select a layer above to see what else it could do, and what that would cost."
        return section("What else a layer could do", "", element("p", text=text, css="wb-quiet"))
    chosen = found.alternatives[0].estimate
    rows = [_alternative(one, chosen) for one in found.alternatives]
    note = "in the planner's choice, all other layers left as they are"
    return section("What else a layer could do", layer, _table(("", "step", "", "peak per rank"), rows),
                    element("p", text=note, css="wb-quiet"))  # fmt: skip


def _alternative(one: Alternative, chosen: Estimate | None) -> str:
    where = one.layers[0] if len(one.layers) == 1 else f"all {len(one.layers)} like {one.layers[0]}"
    name = element("td", element("code", text=one.choice), element("small", text=where))
    css = "chosen" if one.is_chosen else ""
    if one.estimate is None or chosen is None:
        return element("tr", name, element("td", text=one.note, css="wb-quiet", colspan="3"), css=css)
    change = "" if one.is_chosen else _signed(one.estimate.step_s - chosen.step_s)
    return element(
        "tr",
        name,
        _number(format_seconds(one.estimate.step_s)),
        _number(change, "change"),
        _number(format_bytes(one.estimate.peak_bytes), "" if one.fits else "over"),
        css=css,
    )
