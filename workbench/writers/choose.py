"""Reads ``log=``: the name of a writer and its place, a function, or several of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from workbench.core.extras import install_command
from workbench.core.suggest import suggest
from workbench.errors import RunError
from workbench.writers import kinds
from workbench.writers.protocol import RunWriter, Writer

Log = str | Writer | Sequence[str | Writer]
"""``"tensorboard:runs/"``, or a function (name, settings) -> a run's log, or a list of these."""

WRITERS: dict[str, tuple[Callable[..., RunWriter], str]] = {
    "jsonl": (kinds.JsonLines, ""),
    "mlflow": (kinds.MLflow, "mlflow"),
    "tensorboard": (kinds.EventFiles, "tensorboard"),
    "trackio": (kinds.Trackio, "trackio"),
    "wandb": (kinds.WeightsAndBiases, "wandb"),
}
"""By name: what begins a run, and the package that it needs, which is also the name of its extra."""


def writers(log: Log | None) -> tuple[Writer, ...]:
    """The writers that ``log=`` names; none for None.

    Raises:
        RunError: a name that is none, or a package that is not installed.

    >>> len(writers(["jsonl:metrics.jsonl", lambda name, settings: ...]))
    2
    >>> writers("tensorbord:runs/")
    Traceback (most recent call last):
    workbench.errors.RunError: log='tensorbord:runs/': no writer is called 'tensorbord'. Did you mean ...
    """
    if log is None:
        return ()
    listed = [log] if isinstance(log, str) or callable(log) else list(log)
    return tuple(_writer(one) for one in listed)


def _writer(log: Any) -> Writer:
    if callable(log):
        return log
    if not isinstance(log, str):
        raise RunError(
            f"log={log!r}: a {type(log).__name__}. Give the name of a writer and a place, such as "
            "'jsonl:metrics.jsonl', or a function (name, settings) that begins the log of a run."
        )
    name, _, place = log.partition(":")
    if name not in WRITERS:
        meant = "".join(f" Did you mean {one!r}?" for one in suggest(name, WRITERS))
        raise RunError(
            f"log={log!r}: no writer is called {name!r}.{meant} Writers: {', '.join(WRITERS)}; each takes a place "
            "after a colon, such as 'tensorboard:runs/'."
        )
    begin, package = WRITERS[name]
    if package and importlib.util.find_spec(package) is None:
        raise RunError(
            f"log={log!r}: the package {package} is not installed. Install it: {install_command(package, package)}"
        )
    return partial(begin, place)
