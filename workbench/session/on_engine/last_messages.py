"""A cell ends on a rank when its messages have left the rank. Otherwise those that found a ring of messages full would
wait for the rank's next exchange, and their readers with them.
"""

from __future__ import annotations

from typing import Any

from workbench.errors import CollectiveAborted
from workbench.session.on_engine.failures import failure_of
from workbench.session.on_engine.shell import joined_world, send


def deliver() -> None:
    """Wait until this rank's messages have left it.

    Raises:
        CollectiveAborted: a reader has ended, or reads nothing more.
    """
    if (world := joined_world()) is not None:
        world.transport.flush()


def deliver_after(result: Any) -> None:
    """Deliver messages behind a cell that has succeeded."""
    try:
        if result.success:
            deliver()
    except (KeyboardInterrupt, CollectiveAborted) as error:
        send(failure_of(error))
