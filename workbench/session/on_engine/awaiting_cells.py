"""Runs cells that await, on a loop of their own.

ipykernel runs them on the kernel's loop, and asks its channel thread for its parent. Engines of ipyparallel have no
such thread: the request failed without a reply, and its cell ran until it was killed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from workbench.session.on_engine import deferred_interrupts


def install(shell: Any) -> None:
    """Let the shell run such cells; an interrupt ends them like others."""
    shell.loop_runner = run_to_end
    deferred_interrupts.allow_interrupts(run_to_end)


def run_to_end(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine while the kernel's loop, which runs this, stands still; what it leaves behind is cancelled."""
    outer, loop = asyncio.get_running_loop(), asyncio.new_event_loop()
    asyncio._set_running_loop(None)
    try:
        return loop.run_until_complete(coroutine)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:  # a gathering of nothing belongs to the kernel's loop
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
        asyncio._set_running_loop(outer)
