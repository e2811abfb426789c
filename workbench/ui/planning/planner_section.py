"""The planner in the panel: it searches in a thread, and explains its plan while rows change."""

from __future__ import annotations

import threading
from collections.abc import Callable

from workbench.core.strategy import Strategy
from workbench.errors import WorkbenchError
from workbench.planning.plan import Plan
from workbench.ui.controls import html
from workbench.ui.failures import guarded
from workbench.ui.page_restore import as_request
from workbench.ui.planning.plan_html import PricedPlan, note_html, priced_plan_html, problem_html
from workbench.ui.planning.predictor import Predictor

Search = Callable[[Predictor, int, str], Plan]


def search_for(predictor: Predictor, num_ranks: int, precision: str) -> Plan:
    """The fastest strategy on the machine of the predictions.

    Raises:
        StrategyError: none fits into memory; the message says by how much, and how to make it fit.
    """
    from workbench.planning.search import search

    assert predictor.costs is not None
    assert predictor.hardware is not None
    return search(
        predictor.costs,
        predictor.hardware,
        num_ranks,
        predictor.batch_size,
        precision=precision,
        optimizer=predictor.optimizer,
        software=predictor.software,
    )


class PlannerSection:
    """Asks for a plan, and explains the last one. ``box`` is the widget.

    Args:
        predictor: the model's costs and the machine.
        on_found: called with a plan that was found.
        on_change: called when a search has begun or failed.
        search: the function that searches.
    """

    def __init__(
        self,
        predictor: Predictor,
        on_found: Callable[[Plan], None],
        on_change: Callable[[], None],
        search: Search = search_for,
    ) -> None:
        self._predictor, self._search = predictor, search
        self._on_found, self._on_change = on_found, on_change
        self.plan: Plan | None = None
        self.problem = ""
        self.is_searching = False
        self._priced_plan: PricedPlan | None = None
        self.box = html("", "wb-plan-host")
        self._in_thread = guarded(self._find)

    def ask(self, num_ranks: int, precision: str) -> None:
        """Search, which takes seconds for many ranks. The panel can be used meanwhile."""
        if self.is_searching or self._predictor.missing:
            return
        self.is_searching, self.problem = True, ""
        self._on_change()
        work, asked = as_request(self._in_thread), (num_ranks, precision)
        threading.Thread(target=work, args=asked, name="workbench-plan", daemon=True).start()

    def _find(self, num_ranks: int, precision: str) -> None:
        try:
            found = self._search(self._predictor, num_ranks, precision)
        except WorkbenchError as error:
            self.problem = str(error)
        except Exception as error:  # noqa: BLE001 - lost in this thread, it would leave the button disabled
            self.problem = f"the search failed: {type(error).__name__}: {error}"
        else:
            self.plan, self._priced_plan = found, None
        self.is_searching = False
        if self.problem or self.plan is None:
            self._on_change()
        else:
            self._on_found(self.plan)

    def html(self, strategy: Strategy, num_ranks: int, layer: str = "") -> str:
        """The plan beside a strategy and for a layer; empty without a plan."""
        if self.problem:
            return problem_html(self.problem)
        hardware, software = self._predictor.hardware, self._predictor.software
        if self.plan is None or hardware is None:
            return ""
        if self.plan.problem.num_ranks != num_ranks:
            return note_html(
                f"The plan is for {self.plan.problem.num_ranks} ranks, and there are {num_ranks} now. Press planner's "
                "choice to search again."
            )
        known = self._priced_plan
        if known is None or (known.problem.hardware, known.problem.software) != (hardware, software):
            self._priced_plan = known = PricedPlan.of(self.plan, hardware, software)
        return priced_plan_html(known, strategy, layer)
