"""Options of a strategy that no schedule runs together."""

from __future__ import annotations

from workbench.core.strategy import Strategy
from workbench.errors import StrategyError


def check_schedule_options(strategy: Strategy) -> None:
    """Raise for options that cannot run together.

    Raises:
        StrategyError: zero_bubble with recompute: both parts of a split backward would recompute a block, at
            different times.
    """
    options = strategy.options
    if options.schedule == "zero_bubble" and options.recompute:
        raise StrategyError(
            f"strategy {str(strategy)!r}: zero_bubble and recompute. A split backward would recompute each block "
            f"2 times. Use 1f1b with recompute, or leave recompute out."
        )
