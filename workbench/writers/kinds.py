"""The writers that are chosen by name: JSON lines, TensorBoard, MLflow, Trackio, Weights & Biases.

Each imports its package when a run begins, and writes on this machine unless its place or its package's own environment
variable names a server.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any


def slug(name: str) -> str:
    """A run's name as part of a path.

    >>> slug("encoder*: data@0 | mb=4")
    'encoder-data-0-mb-4'
    """
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:60] or "run"


def _own_place(folder: Path, name: str, ending: str, create: Callable[[Path], None]) -> Path:
    """A new file or folder for a run in ``folder``, by its name and time. Runs that begin in one second have numbers:
    ``create`` raises ``FileExistsError`` for the place of another one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{slug(name)}-{datetime.now().astimezone():%Y%m%d-%H%M%S}", 1
    while True:
        path = folder / f"{stem}{f'-{number}' if number > 1 else ''}{ending}"
        try:
            create(path)
        except FileExistsError:
            number += 1
        else:
            return path


class JsonLines:
    """One line per step: ``{"run": "data", "step": 1, "loss": 2.3}``, the settings first. Runs share the file
    ``place``; in a folder (a place that ends with ``/``) each has its own.

    JSON has no nan: such a value is null, and ``not_finite`` has it as text.
    """

    def __init__(self, place: str, name: str, settings: Mapping[str, Any]) -> None:
        path = Path(place or "metrics.jsonl").expanduser()
        if place.endswith("/") or path.is_dir():
            path = _own_place(path, name, ".jsonl", lambda new: new.touch(0o644, exist_ok=False))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._name = name
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._write({"settings": dict(settings)})

    def _write(self, values: Mapping[str, Any]) -> None:
        line = (json.dumps({"run": self._name, **values}, default=str) + "\n").encode()
        if os.write(self._handle, line) < len(line):
            raise OSError("the disk is full: half a line was written")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        broken = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
        row = {name: None if name in broken else value for name, value in values.items()}
        self._write({"step": step, **row, **({"not_finite": broken} if broken else {})})

    def close(self, error: str | None) -> None:
        try:
            if error is not None:
                self._write({"error": error})
        finally:
            os.close(self._handle)


class EventFiles:
    """TensorBoard's files: a folder of its own for every run, under ``place`` (``runs``)."""

    def __init__(self, place: str, name: str, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        runs = Path(place or "runs").expanduser().resolve()  # each write opens the file again, by its name
        folder = _own_place(runs, name, "", Path.mkdir)
        self._writer = SummaryWriter(str(folder))
        self._writer.add_text("settings", "\n".join(f"* {key}: {value}" for key, value in settings.items()))

    def add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, error: str | None) -> None:
        if error is not None:
            self._writer.add_text("error", error)
        self._writer.close()


class WeightsAndBiases:
    """A run of the project ``place`` (``workbench``), offline unless ``WANDB_MODE`` says otherwise."""

    def __init__(self, place: str, name: str, settings: Mapping[str, Any]) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        quiet = wandb.Settings(silent=True, console="off")
        project = place or os.environ.get("WANDB_PROJECT", "workbench")
        self._run = wandb.init(
            project=project, name=name, config=dict(settings), mode=mode, reinit="create_new", settings=quiet
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, error: str | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


_MLFLOW_MOST = 1000
"""The most values that MLflow takes in a call."""
_MLFLOW_INTERVAL_MS = 1000


class MLflow:
    """A run of the experiment ``workbench`` in the store ``place``: an SQLite file that ends with ``.db``, a folder
    for ``mlflow.db``, or the address of a server or database. Without a place, MLflow's own: ``$MLFLOW_TRACKING_URI``,
    or a local one. Characters that MLflow takes in no name become ``_``.
    """

    def __init__(self, place: str, name: str, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        if place and "://" not in place:
            path = Path(place).expanduser().resolve()
            path = path if path.suffix == ".db" else path / "mlflow.db"
            path.parent.mkdir(parents=True, exist_ok=True)
            place = f"sqlite:///{path}"
        self._client = MlflowClient(tracking_uri=place or None)
        known = self._client.get_experiment_by_name("workbench")
        experiment = known.experiment_id if known is not None else self._client.create_experiment("workbench")
        self._run = self._client.create_run(experiment, run_name=name).info.run_id
        params = [Param(key, str(value)[:500]) for key, value in settings.items()]
        self._client.log_batch(self._run, params=params)
        self._waiting: list[Any] = []
        self._sent_ms = 0

    def add(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        named = {re.sub(r"[^\w\-./ :]", "_", name): value for name, value in values.items()}
        self._waiting += [Metric(name, value, now_ms, step) for name, value in named.items()]
        if now_ms - self._sent_ms >= _MLFLOW_INTERVAL_MS or len(self._waiting) >= _MLFLOW_MOST:
            self._send(now_ms)

    def _send(self, now_ms: int) -> None:
        """Write what waits: each call takes milliseconds, and longer to a server."""
        for first in range(0, len(self._waiting), _MLFLOW_MOST):
            self._client.log_batch(self._run, self._waiting[first : first + _MLFLOW_MOST])
        self._waiting, self._sent_ms = [], now_ms

    def close(self, error: str | None) -> None:
        self._send(0)
        if error is not None:
            self._client.set_tag(self._run, "error", error[:500])
        self._client.set_terminated(self._run, "FINISHED" if error is None else "FAILED")


class Trackio:
    """A run of the project ``place`` (``workbench``) in Trackio's own folder."""

    def __init__(self, place: str, name: str, settings: Mapping[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=place or "workbench", name=name, config=dict(settings), embed=False)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, error: str | None) -> None:
        self._run.finish()
