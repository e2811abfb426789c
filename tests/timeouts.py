"""How long tests wait for an event. No test has a limit of its own.

A shared machine may take ten times as long, and a short limit finds no mistake that a long one misses. Tests that
promise a time are marked ``timed`` and run alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_TIMEOUT_S = 90.0
"""For processes, threads and messages. Below the limit of a whole test in pyproject.toml: the wait says what for."""
PROGRAM_TIMEOUT_S = 240.0
"""For a program of its own, which loads torch, and may start engines that load it again."""
PAGE_TIMEOUT_S = 240.0
"""For a page, its server and its kernel, which load half of what is installed."""
PROMPT_S = 15.0
"""For an end that must not wait for what it ends, which takes twice as long. How soon: ``benchmarks.session``."""


def wait_until(condition: Callable[[], object], what: object = "what was waited for") -> None:
    """Wait until a condition holds.

    Args:
        what: did not happen, for the error's text; called for it, where it is a function.

    Raises:
        AssertionError: it did not happen.

    >>> wait_until(lambda: True)
    """
    deadline_s = time.monotonic() + WAIT_TIMEOUT_S
    while not condition():
        told = what() if callable(what) else what
        assert time.monotonic() < deadline_s, f"{told} did not happen within {WAIT_TIMEOUT_S:g} s"
        time.sleep(0.02)
