"""The best strategy for a model and machines, and what strategies cost: searched, simulated, measured. And the chosen
one as a script for a cluster.

``wb.planner.plan(costs, "h200", 8, 64).strategy`` goes into ``wb.parallelize``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.lazy import lazy_names

if TYPE_CHECKING:
    from workbench.planning.sweep import simulate as simulate
    from workbench.session.calibration import calibrate as calibrate
    from workbench.session.planning import layer_costs as layer_costs
    from workbench.session.planning import plan as plan
    from workbench.session.scripts import script as script
    from workbench.training.costs.dry_run import dry_run as dry_run
    from workbench.training.pipelining.balance import partition_stages as partition_stages

_HOMES = {
    "workbench.planning.sweep": ["simulate"],
    "workbench.session.calibration": ["calibrate"],
    "workbench.session.planning": ["layer_costs", "plan"],
    "workbench.session.scripts": ["script"],
    "workbench.training.costs.dry_run": ["dry_run"],
    "workbench.training.pipelining.balance": ["partition_stages"],
}

if not TYPE_CHECKING:  # type checkers would take every name
    __getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
