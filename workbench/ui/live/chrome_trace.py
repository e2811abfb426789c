"""Measured steps for Chrome's trace viewer (chrome://tracing) and Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from workbench.core.metrics import StepSpans

_NAMES = {"F": "forward", "B": "backward", "I": "backward to inputs", "W": "gradients of weights", "O": "optimizer"}


def chrome_trace(steps: Iterable[StepSpans]) -> dict[str, Any]:
    """The steps in the trace event format: a process per rank, an event per action, microseconds from the first one.

    >>> chrome_trace([])["traceEvents"]
    []
    """
    recorded = list(steps)
    start_s = min((span.start_s for step in recorded for span in step.spans), default=0.0)
    names = [
        {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({step.rank for step in recorded})
    ]
    return {"traceEvents": [*names, *_events(recorded, start_s)], "displayTimeUnit": "ms"}


def _events(steps: list[StepSpans], start_s: float) -> Iterator[dict[str, Any]]:
    for step in steps:
        for span in step.spans:
            yield {
                "name": "optimizer" if span.kind == "O" else f"{span.kind}{span.micro_batch}",
                "cat": _NAMES.get(span.kind, span.kind),
                "ph": "X",
                "pid": step.rank,
                "tid": 0,
                "ts": (span.start_s - start_s) * 1e6,
                "dur": (span.stop_s - span.start_s) * 1e6,
                "args": {
                    "step": step.step,
                    "stage": span.stage,
                    "boxing_us": span.boxing_s * 1e6,
                    "exchanges": span.num_exchanges,
                    "sent_bytes": span.sent_bytes,
                },
            }
