"""Runs on disk: one file of JSON lines per run, written while the run goes on.

The first line has the strategy, seed, versions and machine. All reported steps, spans and events follow, and at the end
the record. Lines are only appended, each in one write. So a notebook that dies loses at most its last third of a
second, and a reader never sees half a line. Numbers that are not finite are null, and ``not_finite`` says where.

A full or read-only disk stops no run: the first failure is a warning, and the runs go on without their files.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from workbench.core.json_record import finite, restore
from workbench.core.metrics import RunEvent, RunRecord, StepBlock, StepSpans
from workbench.errors import SessionError
from workbench.writers.kinds import slug

FOLDER_VARIABLE = "WORKBENCH_RUNS"
_FORMAT = 1
_KINDS: dict[str, type] = {"steps": StepBlock, "spans": StepSpans, "event": RunEvent}
_KIND_OF = {kind: name for name, kind in _KINDS.items()}
_REPORTS = (b'{"line":"steps"', b'{"line":"spans"')
"""How their lines begin: nearly all of a file, which may have gigabytes of them."""
_PENDING = "has not finished: it still runs, or its notebook ended before it did"


def default_folder() -> Path:
    """``$WORKBENCH_RUNS``, else ``workbench/runs`` among the user's data."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if not chosen:
        chosen = os.path.join(os.environ.get("XDG_DATA_HOME") or "~/.local/share", "workbench", "runs")
    return Path(chosen).expanduser().absolute()


class SavedRuns:
    """The runs in a folder, oldest first.

    Args:
        folder: the folder of the files. Default: ``$WORKBENCH_RUNS``, else ``~/.local/share/workbench/runs``.

    Raises (its methods):
        SessionError: no run has that id.

    >>> runs = wb.draw.SavedRuns()                                    # doctest: +SKIP
    >>> [run.name for run in runs if run.equal]                  # doctest: +SKIP
    ['data', 'hybrid']
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute() if folder is not None else default_folder()
        self._has_warned = False

    @classmethod
    def of(cls, keep: bool | SavedRuns) -> SavedRuns | None:
        """Where runs are kept, from the argument ``keep`` of ``wb.compare``: a folder without runs counts too."""
        return keep if isinstance(keep, SavedRuns) else cls() if keep else None

    @property
    def code(self) -> str:
        """The call that gives these runs."""
        return f"wb.draw.SavedRuns({'' if self.folder == default_folder() else repr(str(self.folder))})"

    def __repr__(self) -> str:
        return f"SavedRuns({str(self.folder)!r}): {len(self.ids())} runs"

    def __len__(self) -> int:
        return len(self.ids())

    def __iter__(self) -> Iterator[RunRecord]:
        for run_id in self.ids():
            with suppress(SessionError, OSError):  # its file is broken or not readable: others are shown
                yield self[run_id]

    def __getitem__(self, run_id: str) -> RunRecord:
        """The record of a run. An unfinished run says so in ``error``, and has the steps until then."""
        try:
            return replace(_record_of(self._lines(run_id, _REPORTS), lambda: self._lines(run_id)), run_id=run_id)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SessionError(
                f"SavedRuns[{run_id!r}]: {self._path(run_id)} holds no run of the workbench: its first line is broken, "
                "or another program wrote it. Move or remove the file."
            ) from error

    def ids(self) -> list[str]:
        """The runs' ids, oldest first; they begin with date and time. None if the folder cannot be read."""
        with suppress(OSError):
            return sorted(path.stem for path in self.folder.glob("*.jsonl"))
        return []

    def messages(self, run_id: str) -> list[StepBlock | StepSpans | RunEvent]:
        """All reports of a run, in order."""
        return [_KINDS[line["line"]].from_dict(line) for line in self._lines(run_id) if line["line"] in _KINDS]  # type: ignore[attr-defined]

    def begin(self, record: RunRecord) -> RunFile:
        """Create the file of a new run. If that fails, a warning says so, and the run has no file and no id."""
        try:
            return self._begin(record)
        except OSError as error:
            self._warn(error)
            return RunFile("", -1)

    def _begin(self, record: RunRecord) -> RunFile:
        self.folder.mkdir(parents=True, exist_ok=True)
        started = datetime.now().astimezone()
        stem = f"{started:%Y%m%d-%H%M%S}-{slug(record.name).lower()}"
        for number in range(1, 1000):
            run_id = stem if number == 1 else f"{stem}-{number}"
            try:
                handle = os.open(self._path(run_id), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            except FileExistsError:
                continue
            file = RunFile(run_id, handle, self._warn)
            head = replace(record, run_id=run_id, started=record.started or started.isoformat(timespec="seconds"))
            file.write({"line": "run", "format": _FORMAT, "record": head.to_dict()})
            if not file.run_id:  # without its first line it holds no run
                self._path(run_id).unlink(missing_ok=True)
            return file
        raise SessionError(f"SavedRuns: 1000 runs called {record.name!r} began in one second in {self.folder}.")

    def rename(self, run_id: str, name: str) -> None:
        """Rename a run, also in its file."""
        with self._append(run_id) as file:
            file.write({"line": "name", "name": name})

    def remove(self, run_id: str) -> None:
        """Delete a run's file."""
        self._checked(run_id).unlink()

    def _warn(self, error: OSError) -> None:
        """Say once that runs are not kept."""
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"runs are not kept in {self.folder}: {type(error).__name__}: {error}. They go on, and their results are "
            f"complete. For another folder set {FOLDER_VARIABLE} or give keep=wb.draw.SavedRuns(folder); for none, "
            f"keep=False.",
            stacklevel=3,
        )

    def _append(self, run_id: str) -> RunFile:
        """The file of a run, behind its last line. Half a line, of a writer that died, gets an end."""
        handle = os.open(self._checked(run_id), os.O_RDWR | os.O_APPEND)
        size = os.fstat(handle).st_size
        if size and os.pread(handle, 1, size - 1) != b"\n":
            os.write(handle, b"\n")
        return RunFile(run_id, handle, _raise)

    def _path(self, run_id: str) -> Path:
        return self.folder / f"{run_id}.jsonl"

    def _checked(self, run_id: str) -> Path:
        path = self._path(run_id)
        if not path.is_file():
            raise SessionError(
                f"SavedRuns[{run_id!r}]: no such run among the {len(self)} in {self.folder}. ids() lists them."
            )
        return path

    def _lines(self, run_id: str, left_out: tuple[bytes, ...] = ()) -> Iterator[dict[str, Any]]:
        """The whole lines. A writer may have died, or found a full disk, while it wrote one of the others. Lines that
        another program wrote are left out, and those that begin with one of ``left_out``.
        """
        with self._checked(run_id).open("rb") as file:
            for text in file:
                with suppress(ValueError):
                    if text.startswith(left_out):
                        continue
                    line = json.loads(text)
                    if isinstance(line, dict) and isinstance(line.get("line"), str):
                        restore(line, line.pop("not_finite", {}))
                        yield line


class RunFile:
    """A run's file while it is written. After a failure it takes nothing more, and its run has no id.

    Args:
        fail: called with the failure.
    """

    def __init__(self, run_id: str, handle: int, fail: Callable[[OSError], None] = lambda error: None) -> None:
        self.run_id, self._handle, self._fail = run_id, handle, fail

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def add(self, messages: Iterable[object]) -> None:
        """Append reports of a run; other objects are ignored."""
        for message in messages:
            kind = _KIND_OF.get(type(message))
            if kind is not None:
                self.write({"line": kind, **_rounded(message.to_dict())})  # type: ignore[attr-defined]

    def finish(self, record: RunRecord) -> RunRecord:
        """Append the record and close the file. Returns the record with its id; without one if the file is broken."""
        self.write({"line": "record", "record": replace(record, run_id=self.run_id).to_dict()})
        self.close()
        return replace(record, run_id=self.run_id)

    def write(self, line: dict[str, Any]) -> None:
        """Append one line in one write."""
        plain, not_finite = finite(line)
        plain |= {"not_finite": not_finite} if not_finite else {}
        rest = (json.dumps(plain, separators=(",", ":"), allow_nan=False) + "\n").encode()
        try:
            while rest and self._handle >= 0:  # a disk that gets full takes a part
                rest = rest[os.write(self._handle, rest) :]
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Safe to call twice."""
        handle, self._handle = self._handle, -1
        if handle < 0:
            return
        try:
            os.close(handle)
        except OSError as error:  # a disk of the network says only now that it is full
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.run_id = ""
        with suppress(OSError):
            self.close()
        self._fail(error)


def _record_of(lines: Iterable[dict[str, Any]], every: Callable[[], Iterable[dict[str, Any]]]) -> RunRecord:
    """The record of a run, from the lines of its file without reports; from ``every`` line if it has not finished.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: they are not those of a run.
    """
    last: dict[str, dict[str, Any]] = {line["line"]: line for line in lines}
    record: RunRecord = RunRecord.from_dict((last.get("record") or last["run"])["record"])
    if not record.losses:  # it has failed, or not finished
        blocks = (StepBlock.from_dict(line) for line in every() if line["line"] == "steps")
        steps = [step for block in blocks for step in zip(block.step_times_s, block.losses, strict=True)]
        losses = tuple(loss for _, loss in steps if loss is not None)
        record = replace(record, losses=losses, step_times_s=tuple(time for time, _ in steps))
    if "record" not in last:
        record = replace(record, error=_PENDING)
    if not record.samples:
        samples = tuple(count for line in every() if line["line"] == "steps" for count in line["samples"])
        record = replace(record, samples=samples)
    return replace(record, name=last["name"]["name"]) if "name" in last else record


def _raise(error: OSError) -> None:
    raise error


def _rounded(value: Any) -> Any:
    """Round seconds to a tenth of a microsecond, which halves the files. Losses stay exact."""
    for key in ("time_s", "boxing_s"):
        if isinstance(value.get(key), tuple):
            value[key] = [[round(time, 7) for time in row] for row in value[key]]
    return value
