"""The planner in the panel: its choice, why it and not another, and a machine whose numbers are moved."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tests.timeouts import WAIT_TIMEOUT_S, wait_until
from tests.ui.models import GPT_HYBRID, gpt
from workbench.core.strategy import Strategy
from workbench.cost.hardware_files import load_hardware
from workbench.cost.software import COMPILED, WORKBENCH
from workbench.errors import StrategyError
from workbench.planner import layer_costs
from workbench.planning.plan import Plan
from workbench.ui.planning.machine_factors import MachineFactors, factor_text, machine_number
from workbench.ui.planning.plan_html import PricedPlan, priced_plan_html
from workbench.ui.planning.planner_section import Search, search_for
from workbench.ui.planning.predictor import Predictor
from workbench.ui.strategy_editor import StrategyEditor, facts_of

MACHINE = load_hardware("v100-dgx1")


def make_part(
    num_ranks: int = 4, strategy: str | None = None, search: Search = search_for, **more: Any
) -> StrategyEditor:
    """The strategy editor of a panel for a GPT of two blocks."""
    predictor = Predictor(MACHINE, 32)
    predictor.costs = gpt(2)
    facts = facts_of(gpt(2).layers, 32, (64,), None)
    return StrategyEditor(
        gpt(2).layers, num_ranks, strategy, facts, predictor, title="gpt", on_run=lambda: None, search=search, **more
    )


@pytest.fixture(scope="module")
def plan() -> Plan:
    return search_for(make_part()._predictor, 4, "fp32")


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", html))


def ask(part: StrategyEditor) -> None:
    part.controls.planned.click()
    wait_until(lambda: not part.planner.is_searching and part.planner.box.value != "")


def test_what_was_counted_says_whether_a_loss_of_one_s_own_is_a_cross_entropy():
    loss = lambda scores, classes: nn.functional.cross_entropy(scores, classes)  # noqa: E731
    predictor, batch = Predictor(MACHINE, 4), (torch.zeros(4, 8), torch.zeros(4, dtype=torch.long))
    predictor.costs = costs = layer_costs(lambda: nn.Linear(8, 6), batch[0], loss_fn=loss, targets=batch[1])
    facts = facts_of(costs.layers, 4, (8,), loss)
    part = StrategyEditor(costs.layers, 2, "model:column", facts, predictor, title="", on_run=lambda: None)
    assert part.grid.view["end"]["boxings"]["boxing"]["change"] == "S(1) \u2192 S(0)"


def test_a_run_that_compiles_its_step_is_predicted_and_planned_so():
    compiles = [False]
    predictor = Predictor(MACHINE, 32, compiles=lambda: compiles[0])
    plain = layer_costs(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Tanh(), nn.GELU(), nn.Linear(8, 8)), (2, 8))
    predictor.costs = plain
    strategy = Strategy("data").resolve(plain.layers, 2)
    found = []
    for compiles[0] in (False, True):
        shown = predictor.predict(strategy, False)
        assert not isinstance(shown, str)
        assert search_for(predictor, 2, "fp32").problem.software.fuses == compiles[0]
        found.append(shown.estimate.step_s)
    assert found[1] < found[0]
    assert shown.before is not None and shown.before.step_s == found[0]


# ---- searching ------------------------------------------------------------------------------------------------------


def test_the_planner_s_choice_is_searched_for_beside_the_notebook():
    asked, go = [], threading.Event()

    def search(predictor: Predictor, num_ranks: int, precision: str) -> Plan:
        asked.append((num_ranks, precision))
        assert go.wait(WAIT_TIMEOUT_S)
        return plan

    part = make_part(strategy="*: data | fp16", search=search)
    plan = search_for(part._predictor, 4, "fp16")
    part.controls.planned.click()
    assert part.controls.planned.disabled
    assert part.controls.planned.description == "planning\u2026"
    go.set()
    wait_until(lambda: part.controls.planned.description == "planner's choice")
    assert asked == [(4, "fp16")]
    assert part.state.text == str(plan.strategy)
    assert not part.controls.planned.disabled
    part.controls.undo.click()
    assert part.state.text == "*: data | fp16"


@pytest.mark.parametrize("what", ["ranks", "precision"])
def test_a_plan_for_other_ranks_or_another_precision_than_are_shown_by_then_is_not_loaded(plan: Plan, what: str):
    go = threading.Event()

    def search(*_asked: object) -> Plan:
        assert go.wait(WAIT_TIMEOUT_S)
        return plan

    part = make_part(search=search)
    part.controls.planned.click()
    if what == "ranks":
        part.machine.ranks.value = 8
    else:
        part.edit(lambda state: state.set_options(precision="fp16"))
    chosen = part.state.text
    go.set()
    expected = "for 4 ranks" if what == "ranks" else "Planned for fp32"
    wait_until(lambda: expected in words(part.planner.box.value))
    assert part.state.text == chosen and not part.state.mistakes
    assert part.controls.planned.description == "planner's choice"


@pytest.mark.parametrize(
    ("error", "expected"), [(StrategyError("it needs 3 GB more"), "3 GB more"), (KeyError("x"), "KeyError: 'x'")]
)
def test_a_failed_search_says_why_and_can_be_asked_again(plan: Plan, error: Exception, expected: str):
    answers: list[Exception | Plan] = [error, plan]

    def search(*_asked: object) -> Plan:
        priced = answers.pop(0)
        if isinstance(priced, Exception):
            raise priced
        return priced

    part = make_part(search=search)
    ask(part)
    assert expected in words(part.planner.box.value)
    assert part.state.text == "*: data"
    assert not part.controls.planned.disabled, "whoever gives a rank more memory may ask again"
    ask(part)
    assert part.state.text == str(plan.strategy)
    assert expected not in words(part.planner.box.value)


def test_the_plan_has_the_optimizer_of_the_predictions(plan: Plan):
    assert (plan.problem.optimizer, plan.problem.batch_size) == ("momentum", 32)


# ---- explaining -----------------------------------------------------------------------------------------------------


def test_why_this_one_shows_the_best_of_every_split_of_the_ranks(plan: Plan):
    text = words(priced_plan_html(PricedPlan.of(plan, MACHINE, WORKBENCH), plan.strategy))
    for found in (plan.found, *plan.others[:5]):
        assert " \u00d7 ".join(map(str, found.strategy.degrees)) in text
    more = plan.others[0].estimate.step_s / plan.found.estimate.step_s - 1
    assert f"+{round(100 * more)} %" in text
    assert "They are the planner's choice" in text


def test_one_device_is_a_row_that_cannot_be_opened(plan: Plan):
    html = priced_plan_html(PricedPlan.of(plan, MACHINE, WORKBENCH), plan.strategy)
    assert html.count("one device") == 1
    assert html.index("one device") > html.index('class="chosen"')
    assert "1x1x1" not in html
    assert "nothing on 4 ranks beats it" not in html


def test_nothing_beats_one_device_over_slow_links(plan: Plan):
    slow = MachineFactors(links=1e-3).of(MACHINE)
    priced = PricedPlan.of(plan, slow, WORKBENCH)
    html = priced_plan_html(priced, plan.strategy)
    assert "nothing on 4 ranks beats it" in words(html)
    assert html.index("one device") < html.index('class="chosen"')
    assert priced.alone.estimate.step_s == pytest.approx(plan.one_device.estimate.step_s), "it exchanges nothing"


def test_one_device_without_the_memory_is_the_last_row(plan: Plan):
    limit = (plan.estimate.peak_bytes + plan.one_device.estimate.peak_bytes) / 2
    html = priced_plan_html(
        PricedPlan.of(plan, MachineFactors(memory=limit / MACHINE.memory_bytes).of(MACHINE), WORKBENCH), plan.strategy
    )
    first_table = html[: html.index("</table>")]
    assert first_table.rindex("<tr") < first_table.index("one device")
    assert "over" in first_table[first_table.index("one device") :]


def test_why_not_says_by_how_much_and_in_which_part(plan: Plan):
    priced = PricedPlan.of(plan, MACHINE, WORKBENCH)
    shown = Strategy("*: model")
    verdict = priced.why_not(shown)
    text = words(priced_plan_html(priced, shown))
    assert verdict.reason == "slower"
    assert verdict.text.split(":")[0] in text
    assert "boxing of activations" in text
    assert "planner \u2192 shown" in text


def test_why_not_says_what_does_not_fit(plan: Plan):
    small = MachineFactors(memory=plan.estimate.peak_bytes * 1.05 / MACHINE.memory_bytes).of(MACHINE)
    text = words(priced_plan_html(PricedPlan.of(plan, small, WORKBENCH), Strategy("*: data")))
    assert "It does not fit" in text
    assert "too much" in text


def test_why_not_says_what_cannot_run(plan: Plan):
    text = words(
        priced_plan_html(PricedPlan.of(plan, MACHINE, WORKBENCH), Strategy("blocks: data@1; ln_f: data@0 | 2x1x1"))
    )
    assert "It cannot run" in text


def test_a_layer_is_explained_in_the_plan(plan: Plan):
    priced = PricedPlan.of(plan, MACHINE, WORKBENCH)
    found = priced.explain("lm_head")
    assert found is not None
    text = words(priced_plan_html(priced, plan.strategy, "lm_head"))
    for one in found.alternatives:
        assert one.choice in text
    assert priced.explain("no such layer") is None


def test_the_answer_is_priced_for_the_machine_as_it_is_now(plan: Plan):
    fast = MachineFactors(flops=4.0).of(MACHINE)
    priced = PricedPlan.of(plan, fast, WORKBENCH)
    assert "Planned before the machine was changed." in words(priced_plan_html(priced, plan.strategy))
    assert priced.chosen.estimate.step_s < plan.found.estimate.step_s
    assert priced.chosen.strategy == plan.found.strategy
    assert "search again" in words(priced_plan_html(priced, plan.strategy))


def test_the_answer_is_priced_for_the_program_that_trains(plan: Plan):
    priced = PricedPlan.of(plan, MACHINE, COMPILED)
    assert priced.problem.software == COMPILED
    assert "Planned before compiling the step was switched." in words(priced_plan_html(priced, plan.strategy))
    both = PricedPlan.of(plan, MachineFactors(flops=4.0).of(MACHINE), COMPILED)
    assert "before the machine was changed and compiling the step was switched." in words(
        priced_plan_html(both, plan.strategy)
    )


def test_a_plan_of_another_precision_says_so(plan: Plan):
    text = words(
        priced_plan_html(PricedPlan.of(plan, MACHINE, WORKBENCH), plan.strategy.with_options(precision="fp16"))
    )
    assert "Planned for fp32, and the rows are in fp16. Press planner's choice to search again." in text
    assert "missed" not in text
    assert "Planned for" not in words(priced_plan_html(PricedPlan.of(plan, MACHINE, WORKBENCH), plan.strategy))


def test_the_answer_follows_rows_selection_and_ranks(plan: Plan):
    part = make_part(search=lambda *_: plan)
    ask(part)
    assert "They are the planner's choice" in words(part.planner.box.value)
    part._on_event({"event": "choice", "rows": ["lm_head"], "value": "data"})
    part._on_event({"event": "choice", "rows": ["blocks.[0-1]"], "value": "data"})
    part._on_event({"event": "choice", "rows": ["tok_emb"], "value": "model"})
    assert "They are the planner's choice" not in words(part.planner.box.value)
    part._on_event({"event": "select", "rows": ["lm_head"]})
    assert "all other layers left as they are" in words(part.planner.box.value)
    part.machine.ranks.value = 8
    assert "The plan is for 4 ranks, and there are 8 now" in words(part.planner.box.value)


def test_another_split_of_the_ranks_can_be_opened(plan: Plan):
    part = make_part(search=lambda *_: plan)
    ask(part)
    text = re.findall(r'data-text="([^"]*)"', part.planner.box.value)[1]
    part._on_event({"event": "open", "value": text})
    assert part.state.text == str(Strategy(text))
    assert not part.state.mistakes


# ---- the machine ----------------------------------------------------------------------------------------------------


def test_sliders_change_what_is_predicted_and_reset_takes_it_back():
    part = make_part(strategy="*: model")
    before = part._predictor.estimate(part.state.resolved)
    assert before is not None
    part.machine.sliders["links"].value = 4.0
    after = part._predictor.estimate(part.state.resolved)
    assert after is not None
    assert after.boxing_s < before.boxing_s
    assert after.compute_s == before.compute_s
    assert "on the machine as it is" in part.predictions.value
    assert "\u00d74" in part.machine.values["links"].value
    assert part.estimate() == before, "a run is predicted on the machine that there is"
    part.machine.reset.click()
    assert part._predictor.assumed == MachineFactors()
    assert part.machine.reset.disabled
    assert part.machine.sliders["links"].value == 1.0


def test_the_memory_slider_moves_the_limit():
    part = make_part()
    assert "limit 17.2 GB" in part.predictions.value
    part.machine.sliders["memory"].value = 0.5
    assert "limit 8.59 GB" in part.predictions.value


def test_faster_products_compute_faster_and_box_alike():
    part = make_part(strategy="*: model")
    before = part._predictor.estimate(part.state.resolved)
    part.machine.sliders["flops"].value = 2.0
    after = part._predictor.estimate(part.state.resolved)
    assert before is not None
    assert after is not None
    assert after.compute_s < before.compute_s
    assert after.boxing_s == before.boxing_s


def test_ranks_can_be_planned_for_that_are_not_there():
    part = make_part(strategy=GPT_HYBRID.replace("blocks.[0-3]", "blocks.0").replace("blocks.[4-7]", "blocks.1"))
    part.machine.ranks.value = 8
    assert part.state.text.endswith("| 2x2x2 mb=4 1f1b")
    assert "Predicted step time" in part.predictions.value
    assert part.controls.run.disabled
    assert "for 8 ranks, but there are 4" in part.controls.run.tooltip
    with pytest.raises(StrategyError, match="for 8 ranks, but there are 4"):
        part.wanted()
    part.controls.undo.click()
    assert part.machine.ranks.value == 4
    assert not part.controls.run.disabled


def test_a_preset_is_made_anew_for_other_ranks_and_rows_keep_their_choices():
    part = make_part(strategy="pipeline", num_ranks=2)
    part.machine.ranks.value = 4
    assert part.state.degrees.pipeline == 4
    assert part.state.label == "pipeline"
    part._on_event({"event": "open", "value": "*: data; lm_head: model"})
    part.machine.ranks.value = 2
    assert part.state.text == "*: data; lm_head: model"


def test_another_machine_can_be_chosen():
    part = make_part()
    part.machine.machine.value = "h200"
    assert part._predictor.hardware == load_hardware("h200")
    assert "limit 141 GB" in part.predictions.value
    part.machine.machine.value = MACHINE.name
    assert part._predictor.hardware == MACHINE


def test_without_a_machine_one_can_be_chosen():
    predictor = Predictor(None, 32)
    predictor.costs = gpt(1)
    facts = facts_of(gpt(1).layers, 32, (64,), None)
    part = StrategyEditor(gpt(1).layers, 2, None, facts, predictor, title="gpt", on_run=lambda: None)
    assert part.machine.machine.value == "none"
    assert part.machine.sliders["links"].disabled
    part.machine.machine.value = "h200"
    assert "Predicted step time" in part.predictions.value
    assert not part.controls.planned.disabled
    part.machine.machine.value = "none"
    assert "No machine" in part.predictions.value


def test_numbers_of_a_machine_in_words():
    h200 = load_hardware("h200")
    assert machine_number(h200, "links") == "48.0\u2013348 GB/s"
    assert machine_number(h200, "memory") == "141 GB"
    assert machine_number(h200, "flops", "bf16") == "623 TFLOP/s"
    assert factor_text(1.0) == ""
    assert factor_text(0.5) == "\u00d70.5"
