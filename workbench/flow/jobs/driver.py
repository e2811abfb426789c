"""The process that drives the engines: it sends a job once, then arrays, and receives arrays."""

from __future__ import annotations

import hashlib
import linecache
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary

from workbench.errors import CellError, JobError
from workbench.flow.config import DeviceLimits
from workbench.flow.jobs import remote
from workbench.flow.jobs.run import Job, zip_results
from workbench.session import Session, find_current, user_modules


@dataclass
class _EngineState:
    """The state of a session's engines: jobs by name (with a digest of the code sent), and serials of stores."""

    jobs: dict[str, str] = field(default_factory=dict)
    serials: tuple[str, ...] | None = None


_known: WeakKeyDictionary[Session, _EngineState] = WeakKeyDictionary()


def call(job: Job, arrays: Mapping[str, Any], limits: DeviceLimits) -> Any:
    """Run a job on the engines of the current session.

    Raises:
        CellError: it failed on an engine.
    """
    session = _session(limits)
    known = _known.setdefault(session, _EngineState())
    payload = _pickled(job)
    digest = hashlib.sha256(payload).hexdigest()
    if known.jobs.get(job.name) != digest:
        _submit(session, remote.keep_job, job.name, payload, dict(_sources(job.body)))
        known.jobs[job.name] = digest
    replies = _submit(session, remote.run_job, job.name, dict(arrays), limits, known.serials)
    known.serials = tuple(reply.serial for reply in replies)
    if job.view == "consistent":
        return replies[0].result
    return zip_results([replies[rank].result for rank in replies[0].ranks])


def change_variables(action: str, limits: DeviceLimits, *options: Any) -> None:
    """Call a function of `checkpoints` on all engines."""
    session = _session(limits)
    known = _known.setdefault(session, _EngineState())
    known.jobs.clear()  # where a process was replaced, it has none
    known.serials = tuple(_submit(session, remote.change_variables, action, *options))


def _pickled(job: Job) -> bytes:
    try:
        return user_modules.pack(job)
    except Exception as error:
        raise JobError(
            f"{job.name}: the function cannot be sent to the engines, because something that it uses by name cannot be "
            f"pickled ({type(error).__name__}: {error}). Make such things inside the body, or leave them out."
        ) from error


def _session(limits: DeviceLimits) -> Session:
    return find_current() or Session(engines=limits.num_devices)


def _submit(session: Session, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a function on all ranks, print their output here, and return the results by rank."""
    request = session.submit(function, *args)
    try:
        return request.result()
    except CellError:
        _known[session].jobs.clear()  # a process may have been replaced; the serials show that its variables are lost
        raise
    except BaseException:
        request.cancel()
        raise
    finally:
        if request.done() and request.text:
            sys.stdout.write(request.text.removesuffix("\n") + "\n")


def _sources(body: Any) -> Iterator[tuple[str, tuple[str, list[str]]]]:
    """The source text of a job's files, with their titles: errors on engines show its lines."""
    for name in sorted({code.co_filename for code in _codes(body, set())}):
        lines = linecache.getlines(name)
        if lines:
            yield name, (_title(name), lines)


def _codes(function: Any, seen: set[int]) -> Iterator[CodeType]:
    """The code of a function, and of the program's functions that it names."""
    if not isinstance(function, FunctionType) or id(function) in seen or _is_library(function):
        return
    seen.add(id(function))
    yield function.__code__
    for name in function.__code__.co_names:
        yield from _codes(function.__globals__.get(name), seen)


def _is_library(function: FunctionType) -> bool:
    return (function.__module__ or "").partition(".")[0] in ("workbench", "torch", "numpy")


def _title(filename: str) -> str:
    """``cell In[3]`` for a cell of a notebook, else the file's name."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = shell.compile.format_code_name(filename) if shell is not None else None
    return " ".join(named).lower().replace("in[", "In[") if named else Path(filename).name
