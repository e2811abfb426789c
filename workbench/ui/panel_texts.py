"""Texts of the panel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.core.metrics import RunEvent
from workbench.core.rows import count_parameters
from workbench.units import format_count

if TYPE_CHECKING:
    from torch import nn

    from workbench.ui.runs.trainer import Trainer

NO_SESSION = (
    "Panel: no engines are running. Start them (%workbench start --engines 2 in a notebook, wb.Session(engines=2) in a "
    "script), or give num_ranks=2 to predict only."
)
NO_RUN_YET = "No run yet. Run trains with the chosen strategy and shows here how it goes."


def why_ended(message: object, what: str, again: str) -> str:
    """The reason that a session's message gives why a widget ends, and how to make it again; empty without one."""
    if not isinstance(message, RunEvent):
        return ""
    start = "Start engines again (%workbench start, or wb.Session())"
    reasons = {
        "closed": f"the session of this {what} is closed. {start}, and {again}.",
        "resized": f"the session has another number of engines now: {again}.",
    }
    return reasons.get(message.kind, "")


def session_first(given: Any) -> str:
    """The error where a session, or None, stands in place of the model."""
    return (
        f"Panel({type(given).__name__}, ...): the first argument is the function that makes the model. Write "
        "wb.Panel(make_model, data, loss_fn) for the current session, session= for another one, or num_ranks=2 to "
        "predict only."
    )


def session_or_ranks(num_engines: int, num_ranks: int) -> str:
    """The error where a panel gets a session, and a number of ranks to predict for."""
    return (
        f"Panel(session=..., num_ranks={num_ranks}): the session has {num_engines} engines, and the panel trains on "
        "these. Leave num_ranks= out, or leave session= out to predict only."
    )


def title(model_fn: Callable[[], nn.Module], trainer: Trainer, batch_size: int) -> str:
    """The model in words: ``"make_mlp, 117 k parameters, batch 128"``."""
    name = getattr(model_fn, "__name__", type(model_fn).__name__)
    return f"{name}, {format_count(count_parameters(trainer.layers))} parameters, batch {batch_size}"
