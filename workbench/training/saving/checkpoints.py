"""``wb.checkpoint.Checkpoints``: a directory of checkpoints by step, which keeps the newest few."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from workbench.tensors.object_collectives import all_gather_object, run_on_all_ranks
from workbench.tensors.world import current
from workbench.training.saving import store
from workbench.training.saving.folders import BRANCH, REPLACED, UNFINISHED, remove, write_whole

_COMPLETE = re.compile(rf"step-(\d+)({re.escape(REPLACED)})?")
_LEFT = re.compile(rf"step-\d+{UNFINISHED}")


class Checkpoints:
    """The checkpoints of one run: ``directory/step-00000100`` and so on.

    Args:
        directory: on a file system that all ranks share. The first save makes it.
        keep: number of complete checkpoints. Each new one removes the oldest. None keeps all.

    A run that has loaded an earlier step and goes on from there is newer than what it has left: with 100, 200 and 300,
    a save of 110 makes 110 the newest and 100 the oldest, and later ones remove 200 and 300. A step that is saved again
    replaces the one before.

    Raises:
        ValueError: ``keep`` below 1.

    A run that may be killed at any moment and started again::

        checkpoints = wb.checkpoint.Checkpoints("runs/gpt", keep=3)
        found = checkpoints.load(model=model, optimizer=optimizer, loader=loader)
        for step in range(found["step"] if found else 0, num_steps):
            ...
            checkpoints.save(step + 1, async_op=True, model=model, optimizer=optimizer, loader=loader)
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ValueError(
                f"Checkpoints(keep={keep}): at least 1 checkpoint is kept. Give a number, or None for all."
            )
        self.directory, self.keep = Path(os.path.abspath(directory)), keep

    def path(self, step: int) -> Path:
        """The directory of the checkpoint of a step."""
        return self.directory / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, ascending. Reads the file system only; no communication."""
        found = (_COMPLETE.fullmatch(path.name) for path in self.directory.glob("step-*"))
        return sorted(
            {int(match[1]) for match in found if match and (self.directory / match[0] / ".metadata").is_file()}
        )

    def incomplete(self) -> list[str]:
        """Names of directories that interrupted saves have left. Loads ignore them; the next save removes them."""
        return sorted(path.name for path in self.directory.glob("step-*") if _is_left_over(path))

    def latest(self) -> int | None:
        """The step of the newest complete checkpoint, equal on all ranks; None if there is none. All ranks call it."""
        world, what = current(), f"latest checkpoint of {self.directory.name}"
        store.finish_previous(world)

        def newest() -> int | None:
            return next(reversed(self._by_age()), None) if world.rank == 0 else None

        latest: int | None = all_gather_object(run_on_all_ranks(newest, world, what), world, what)[0]
        return latest

    def save(self, step: int, *, async_op: bool = False, **parts: Any) -> store.Saving:
        """``wb.checkpoint.save`` under the step's name; the parts get the value ``step``."""
        return store.begin(
            self.path(step),
            {"step": step, **parts},
            async_op=async_op,
            on_complete=lambda: self._tidy(step),
            before_complete=lambda folder: self._write_branch(step, folder),
        )

    def load(self, step: int | None = None, **parts: Any) -> dict[str, Any] | None:
        """``wb.checkpoint.load`` of a step; default: the newest complete one.

        Returns:
            The plain values, with ``"step"``; None if no step was given and there is no complete checkpoint.
        """
        if step is None:
            step = self.latest()
        return None if step is None else store.load(self.path(step), **parts)

    def _folder(self, step: int) -> Path:
        """The complete directory of a step: under its name, or where a killed save has moved it."""
        path = self.path(step)
        return path if path.exists() else path.with_name(path.name + REPLACED)

    def _branch(self, step: int) -> int:
        file = self._folder(step) / BRANCH
        return int(file.read_text()) if file.is_file() else 0

    def _by_age(self) -> list[int]:
        """The steps of the complete checkpoints, the oldest first."""
        return sorted(self.steps(), key=lambda step: (self._branch(step), step))

    def _write_branch(self, step: int, folder: Path) -> None:
        """Begin a new branch if the newest other checkpoint has a higher step, which the run has gone back from."""
        others = [other for other in self._by_age() if other != step]
        branch = self._branch(others[-1]) + (others[-1] > step) if others else 0
        if branch:
            write_whole(folder / BRANCH, str(branch).encode())

    def _tidy(self, step: int) -> None:
        """Remove old checkpoints and the leftovers of killed saves."""
        old = self._by_age()
        for superfluous in old[: -self.keep] if self.keep else []:
            if superfluous != step:
                remove(self._folder(superfluous))
        for name in self.incomplete():
            remove(self.directory / name)

    def __repr__(self) -> str:
        steps = self._by_age()
        left = self.incomplete()
        newest = f"newest step {steps[-1]}" if steps else "none yet"
        ignored = f", ignored: {', '.join(left)}" if left else ""
        return f"Checkpoints({str(self.directory)!r}, {len(steps)} complete, {newest}{ignored})"


def _is_left_over(path: Path) -> bool:
    is_without_contents = _COMPLETE.fullmatch(path.name) and not (path / ".metadata").is_file()
    return path.is_dir() and bool(_LEFT.fullmatch(path.name) or is_without_contents)
