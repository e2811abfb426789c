"""Checkpoints of the variables of jobs."""

from __future__ import annotations

import os
from typing import Any

from workbench.flow import config
from workbench.flow.world_join import launched_world

__all__ = ["CheckPoint"]


class CheckPoint:
    """``init``, ``save`` and ``load`` the variables of all jobs, the state of their optimizers, and their steps.

    A checkpoint is a folder in the project's format: it loads under another number of devices and other layouts.

    ``check_point = flow.train.CheckPoint(); check_point.save("runs/lenet")``
    """

    def init(self) -> None:
        """Give all variables their initial values: the next call of a job makes them anew.

        Programs need not call it before their first job.
        """
        if launched_world() is None:
            from workbench.session import find_current

            if find_current() is None:
                return
        self._everywhere("init")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the folder ``path``. Every device writes its part.

        Raises:
            CheckpointError: no job has run yet, or the folder cannot be written.
        """
        self._everywhere("save", os.path.abspath(path))

    def load(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Read the folder ``path``, also before the first call of a job.

        Args:
            strict: raise an error if the checkpoint lacks variables of jobs. Otherwise they get their initial values.

        Raises:
            CheckpointError: there is no checkpoint, or it is of another model. The message lists names and shapes.
        """
        self._everywhere("load", os.path.abspath(path), strict)

    def _everywhere(self, action: str, *options: Any) -> None:
        world = launched_world()
        if world is not None:
            from workbench.flow.jobs import checkpoints
            from workbench.flow.jobs.store import store_of

            getattr(checkpoints, action)(store_of(world), *options)
        else:
            from workbench.flow.jobs import driver

            driver.change_variables(action, config.chosen(), *options)
