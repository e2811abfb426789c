"""``wb.checkpoint.save`` and ``wb.checkpoint.load``: one checkpoint of everything that training needs to continue."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from workbench.errors import CheckpointError
from workbench.tensors.object_collectives import all_gather_object, raise_on_all_ranks, run_on_all_ranks
from workbench.tensors.world import World, at_rebuild, current
from workbench.training.gradients.failed_steps import end_failed_steps
from workbench.training.gradients.nested_steps import distinct
from workbench.training.saving import reading, writing
from workbench.training.saving.folders import absolute, check_seen, make_folder
from workbench.training.saving.parts import Restoring, checksums, collect, described, sum_terms

_POLL_S = 0.01
_under_way: WeakKeyDictionary[World, Saving] = WeakKeyDictionary()
_listener: Callable[[Path, Mapping[str, Any]], None] | None = None


class Saving:
    """A checkpoint that is being written: the handle of ``wb.checkpoint.save``."""

    def __init__(self, job: writing.Job) -> None:
        self._job = job
        self._error: Exception | None = None
        self._own_written = threading.Event()
        self._thread: threading.Thread | None = None
        self._waited = False
        self._raised: Exception | None = None

    @property
    def path(self) -> Path:
        """The directory of the complete checkpoint."""
        return self._job.path

    @property
    def is_complete(self) -> bool:
        """Whether the checkpoint has its final name, and nothing has failed. Reads the file system only."""
        return not self._has_failed and (self.path / ".metadata").is_file() and not self._job.folder.exists()

    @property
    def _has_failed(self) -> bool:
        return (self._raised or self._error) is not None

    def wait(self) -> Path:
        """Return when the checkpoint is complete. All ranks call it; the wait can be interrupted, which gives the save
        up. Later calls return or raise the same, without communication.

        Raises:
            CheckpointError: a rank could not write its part. The checkpoint before is unchanged.
            OSError: this rank could not write.
        """
        if self._raised is not None:
            raise self._raised
        if self._waited:
            return self.path
        self._waited = True
        world, what = self._job.world, f"save({str(self.path)!r})"
        _under_way.pop(world, None)
        try:
            if self._thread is None:
                self._run(self._job.write_own)
            _poll(lambda: self._own_written.is_set())
            raise_on_all_ranks(self._error, world, what)
            if self._thread is None:
                self._run(self._job.finish)
            else:
                thread = self._thread
                _poll(lambda: not thread.is_alive())
            raise_on_all_ranks(self._error, world, what)
        except BaseException as error:
            ended_by = f"{what} was given up: its wait was ended by {type(error).__name__}. Save again."
            self._raised = error if isinstance(error, Exception) else CheckpointError(ended_by)
            self._job.given_up.set()
            self._job.discard()
            raise
        return self.path

    def start(self) -> None:
        """Write in a helper thread. The interpreter waits for it at its end."""

        def run() -> None:
            self._run(self._job.write_own)
            if self._error is None:
                self._run(self._job.finish)

        self._thread = threading.Thread(target=run, name=f"save {self.path.name}")
        self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - raised by wait(), on every rank
            self._error = error
        self._own_written.set()

    def __repr__(self) -> str:
        state = "failed" if self._has_failed else "complete" if self.is_complete else "under way"
        return f"Saving({str(self.path)!r}, {state})"


def _tell_failures() -> None:
    """At the end of the program: tell the failures that no wait has raised."""
    for saving in _under_way.values():
        if (error := saving._error) is not None:
            sys.stderr.write(
                f"wb.checkpoint.save({str(saving.path)!r}) failed in the background: {type(error).__name__}: {error}\n"
                "The checkpoint before is unchanged. Call wait() on what save returns, and save again where it fails.\n"
            )


atexit.register(_tell_failures)  # runs when all helper threads have ended


def _poll(is_done: Callable[[], bool]) -> None:
    while not is_done():
        time.sleep(_POLL_S)  # an interrupt does not end Thread.join()


def save(
    path: str | os.PathLike[str],
    *,
    async_op: bool = False,
    on_complete: Callable[[], None] | None = None,
    **parts: Any,
) -> Saving:
    """Write one checkpoint. All ranks of the world call it, with equal arguments, on a file system that they share.

    Each rank writes the slices that it holds; each slice is written once, and nothing is gathered. The directory gets
    its name when all of it is on the disk, so ``path`` is always a complete checkpoint: the new one or the one before.
    ``torch.distributed.checkpoint`` reads the files too, on one device and without the workbench.

    Args:
        path: the directory to make. A checkpoint that is there is replaced, and nothing else is.
        async_op: copy the slices, return, and write in the background. The next ``save``, ``load`` or ``wait`` raises
            the error of a failed write, or else the end of the program tells it. The interpreter does not end before
            the checkpoint is complete.
        on_complete: rank 0 calls it when the checkpoint is complete, from a helper thread if ``async_op``.
        parts: the objects to save, by names of your choice: modules, optimizers (together with the module of their
            parameters), anything with ``state_dict`` and ``load_state_dict`` (schedulers, a GradScaler, a
            GlobalDataLoader), and plain values: numbers, strings, dicts, lists and tensors. Plain tensors are equal on
            all ranks, and one copy is written. The states of the random numbers of torch, Python and numpy are saved
            too, those of Python, numpy and a GPU for each rank.

    Returns:
        A handle with ``wait()``; without ``async_op`` the checkpoint is already complete.

    Raises:
        CheckpointError: a part cannot be saved, such as ``optimizer.state_dict()`` whose plain tensors are this rank's
            part; or a rank could not write; or a file or directory at ``path`` is no checkpoint.

    ``wb.checkpoint.save("runs/last", model=model, optimizer=optimizer, step=step)``
    """
    return begin(absolute(path), parts, async_op=async_op, on_complete=on_complete)


def begin(
    path: Path,
    parts: dict[str, Any],
    *,
    async_op: bool,
    on_complete: Callable[[], None] | None,
    before_complete: Callable[[Path], None] | None = None,
) -> Saving:
    """``save`` to an absolute path. ``before_complete``: rank 0 calls it with the directory when all is written, before
    it gets its name.
    """
    world = current()
    finish_previous(world)
    _end_failed_steps(parts, world)
    if _listener is not None:
        _listener(path, parts)
    what = f"save({str(path)!r})"
    found, aliases = run_on_all_ranks(lambda: collect(parts, world), world, what)
    leaves = sum_terms(found, parts)
    planner, local, checked = run_on_all_ranks(
        lambda: (*writing.local_plan(leaves), checksums(leaves, parts) if world.world_size > 1 else {}), world, what
    )
    items, metadata = writing.agree(planner, local, checked, leaves, world, what)
    job = writing.Job(
        path,
        _common_folder(path, world, what),
        world,
        writing.snapshot(items, planner, keeps=async_op),
        metadata,
        aliases,
        described(parts),
        on_complete,
        before_complete,
    )
    saving = Saving(job)
    if async_op:
        _under_way[world] = saving
        saving.start()
    else:
        saving.wait()
    return saving


def listen(listener: Callable[[Path, Mapping[str, Any]], None] | None) -> None:
    """Call ``listener`` with the path and the parts of each checkpoint that this process begins to save from now on."""
    global _listener
    _listener = listener


def _give_up() -> None:
    """Give up the saves in progress: the world was rebuilt, and a rank that was replaced writes nothing. A save whose
    files are all there is completed.
    """
    for saving in list(_under_way.values()):
        saving._job.given_up.set()
    _under_way.clear()


at_rebuild(_give_up)


def _common_folder(path: Path, world: World, what: str) -> Path:
    """The directory in which a save writes: rank 0 makes it, and all ranks see it. All ranks call it."""
    made = run_on_all_ranks(lambda: make_folder(path) if world.rank == 0 else None, world, what)
    folder: Path = all_gather_object(made, world, what)[0]
    run_on_all_ranks(lambda: check_seen(folder, world.rank), world, what)
    return folder


def _end_failed_steps(parts: Mapping[str, Any], world: World) -> None:
    """Optimizers whose step raised have no parameters with names."""
    given = [value for value in parts.values() if isinstance(value, Optimizer)]
    end_failed_steps([each for optimizer in given for each in distinct(optimizer)], world)


def finish_previous(world: World) -> None:
    """Wait for this world's asynchronous save in progress, if there is one."""
    previous = _under_way.get(world)
    if previous is not None:
        previous.wait()


def load(
    path: str | os.PathLike[str], *, strict: bool = True, random_state: bool = True, **parts: Any
) -> dict[str, Any]:
    """Read a checkpoint into ``parts``, under any strategy, on any ranks, or on one device. All ranks of the world call
    it.

    Each rank reads the slices that it holds. The load first compares sizes, names, shapes and checksums; if that fails,
    it has changed nothing. Objects with state come next, before tensors are filled.

    Args:
        path: a directory of ``wb.checkpoint.save`` or of ``torch.distributed.checkpoint.save``. Load only files that
            you trust: as in ``torch.load`` of whole objects, a file may run code.
        strict: refuse a checkpoint that lacks tensors of a module or parameters of an optimizer, or has others, or the
            state of an optimizer or a scheduler of another class. False ignores these.
        random_state: also restore the states of the random numbers. A rank that was not there at the save gets those of
            Python, numpy and a GPU only if all ranks had the same.
        parts: modules, optimizers and other objects, by the names under which they were saved. They are filled in
            place.

    Returns:
        The plain values that were saved, by name. Tensors in values of ``parts`` are filled in place, and stand in what
        is returned.

    Raises:
        CheckpointError: there is no such checkpoint, or it is half-written, damaged, or of another model. The error
            lists everything that is missing, unexpected or of another shape.

    ``step = wb.checkpoint.load("runs/last", model=model, optimizer=optimizer)["step"]``

    A state dict of a model is a value too, for files with other names. ``wb.checkpoint.load(path,
    **model.state_dict())`` reads one that torch saved without a name for the model.
    """
    world, path = current(), absolute(path)
    finish_previous(world)
    _end_failed_steps(parts, world)
    what = f"load({str(path)!r})"
    found = run_on_all_ranks(lambda: reading.find(path) if world.rank == 0 else None, world, what)
    folder: Path = all_gather_object(found, world, what)[0]
    restoring, pieces = run_on_all_ranks(lambda: _compare(folder, parts, world, strict), world, what)

    run_on_all_ranks(restoring.load_objects, world, what)

    def fill() -> dict[str, Any]:
        restoring.checkpoint.fill(pieces)
        if parts and random_state:
            restoring.assign_random_state()
        restoring.assign()
        return restoring.values()

    values: dict[str, Any] = run_on_all_ranks(fill, world, what)
    return values


def _compare(folder: Path, parts: dict[str, Any], world: World, strict: bool) -> Any:
    restoring = Restoring(parts, reading.Checkpoint(folder), world, strict)
    problems = [problem for part in parts for problem in restoring.problems_of(part)]
    if problems:
        raise CheckpointError(
            f"load({str(folder)!r}): the checkpoint does not fit.\n  "
            + "\n  ".join(problems)
            + "\nNothing was loaded. Load it into the objects that it was saved from"
            + ("; strict=False ignores missing and unexpected tensors, and classes." if strict else ".")
        )
    wanted = list(restoring.targets())
    return restoring, restoring.checkpoint.check(wanted, restoring.filled)
