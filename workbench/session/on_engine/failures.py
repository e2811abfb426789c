"""Turns an exception on an engine into the plain `Failure` that the notebook groups and shows."""

from __future__ import annotations

import linecache
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from workbench.errors import CollectiveAborted
from workbench.session import protocol, user_modules
from workbench.session.on_engine import connections
from workbench.session.on_engine.deferred_interrupts import causes, was_interrupted
from workbench.session.on_engine.shell import current_tag, joined_world, send, shell

_LINES_AROUND = 2
_MAX_FRAMES = 20
_PACKAGE = os.path.join(Path(__file__).parents[2], "")
user_files: dict[str, str] = {}
"""File name -> title, for files that the user wrote. Errors show their lines as they show lines of cells."""
entry_points: set[CodeType] = set()
"""Functions of the workbench that call the user's code."""


def install(here: Any) -> None:
    """Send a `Failure` whenever the shell shows an error."""
    plain_show, plain_format = here._showtraceback, here.showtraceback

    def show(kind: type[BaseException], error: BaseException, text: list[str]) -> None:
        if current_tag() is not None and isinstance(error, BaseException):
            send(failure_of(error))
        plain_show(kind, error, text)

    def showtraceback(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
        # IPython prints exception groups and errors of magics, and shows no error.
        error = exc_tuple[1] if exc_tuple else sys.exc_info()[1]
        if current_tag() is None or error is None:
            plain_format(exc_tuple, *args, **kwargs)
        else:
            here._showtraceback(type(error), error, traceback.format_exception_only(error))

    here._showtraceback, here.showtraceback = show, showtraceback
    warnings.formatwarning = _name_cells_in_warnings(warnings.formatwarning)
    here.events.register("post_run_cell", lambda result: _release_tracebacks(here, result.error_in_exec))


def _name_cells_in_warnings(plain_format: Callable[..., str]) -> Callable[..., str]:
    """Let warnings name the cell, not its file. The file's name differs by rank, so the lines would not merge."""

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        if not _is_cell(filename):
            return plain_format(message, category, filename, lineno, line)
        source = (line or linecache.getline(filename, lineno)).strip()
        return f"{user_files.get(filename, 'cell')} line {lineno}: {category.__name__}: {message}\n  {source}\n"

    return format_warning


def _release_tracebacks(here: Any, error: BaseException | None) -> None:
    """Free the variables of functions that failed. IPython keeps the last traceback, and it keeps all their tensors."""
    here.history_manager.exceptions.clear()
    here.InteractiveTB.tb = None
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            setattr(sys, name, None)
    for each in causes(error):
        each.__traceback__ = None


def failure_of(error: BaseException) -> protocol.Failure:
    """The exception, with the frames of the user's cell and of the functions that it called."""
    return protocol.Failure(
        kind=type(error).__name__,
        message=_safe_str(error),
        frames=frames_of_traceback(error.__traceback__),
        time_s=time.time(),
        was_stopped=_is_stop(error) or connections.are_broken(),
        chain=tuple(_chain(error)),
        in_handler=was_interrupted(error) and not isinstance(error, KeyboardInterrupt),
        syntax="".join(traceback.format_exception_only(error)) if isinstance(error, SyntaxError) else "",
        broke_off_step=_broke_off_step(),
    )


def _is_stop(error: BaseException) -> bool:
    """Whether this is the end of a wait, or a group of such."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_stop, error.exceptions))
    return isinstance(error, (KeyboardInterrupt, CollectiveAborted))


def _broke_off_step() -> bool:
    """Whether the error broke off a step. Imports nothing: a cell that failed without the runtime needs no torch."""
    world, closed = joined_world(), sys.modules.get("workbench.transport.closed")
    return world is not None and closed is not None and bool(closed.is_closed(world))


def frames_of_traceback(tb: TracebackType | None) -> tuple[protocol.Frame, ...]:
    """Frames from the user's code inwards, outermost first."""
    return _user_frames([(frame, line) for frame, line in traceback.walk_tb(tb)])


def frames_of_stack(frame: FrameType | None) -> tuple[protocol.Frame, ...]:
    """Frames of a thread's stack from the user's code inwards; empty when no user code runs."""
    stack = [(found, line) for found, line in traceback.walk_stack(frame)] if frame is not None else []
    return _user_frames(stack[::-1])


def _user_frames(stack: list[tuple[FrameType, int]]) -> tuple[protocol.Frame, ...]:
    """The frames inside the outermost cell, or inside a call sent by ``submit``."""
    # Equal, not identical: ipyparallel rebuilds functions from their code.
    is_call = [frame.f_code in entry_points for frame, _ in stack]
    in_cell = [_is_cell(frame.f_code.co_filename) for frame, _ in stack]
    if True in in_cell:
        start = in_cell.index(True)
    elif True in is_call:
        start = is_call.index(True) + 1
    else:
        return ()
    kept = [_frame(*place, cell) for place, cell in zip(stack[start:], in_cell[start:], strict=True)]
    if len(kept) > _MAX_FRAMES:  # those of libraries go first
        half = _MAX_FRAMES // 2
        kept = [frame for frame in kept[:-half] if frame.is_users] + kept[-half:]
        del kept[half:-half]
    return tuple(kept)


def _frame(frame: FrameType, line: int, in_cell: bool) -> protocol.Frame:
    code = frame.f_code
    numbers: Iterable[int] = range(max(1, line - _LINES_AROUND), line + _LINES_AROUND + 1)
    lines = [(number, linecache.getline(code.co_filename, number, frame.f_globals)) for number in numbers]
    source = tuple((number, text.rstrip("\n")) for number, text in lines if text)
    file = user_files.get(code.co_filename, "cell") if in_cell else code.co_filename
    return protocol.Frame(file, line, code.co_qualname, in_cell, source, in_cell or _is_users(code.co_filename))


def _is_cell(filename: str) -> bool:
    return filename in user_files or shell().compile.format_code_name(filename) is not None


def _is_users(filename: str) -> bool:
    is_file = not filename.startswith("<") or filename.startswith("<ipython-input")
    return is_file and not filename.startswith(_PACKAGE) and user_modules.is_users(filename)


def _chain(error: BaseException) -> Iterable[str]:
    """``KeyError: 'x'`` of each exception that led to this one, nearest first, at most three."""
    for _ in range(3):
        led = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if led is None or led is error:
            return
        yield f"{type(led).__name__}: {_safe_str(led)}"
        error = led


def _safe_str(error: BaseException) -> str:
    members = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    try:
        return "\n".join([str(error), *getattr(error, "__notes__", ()), *map(_member, members)])
    except Exception as failure:  # noqa: BLE001 - a broken __str__ must not hide the failure
        return f"(its message cannot be shown: {type(failure).__name__})"


def _member(error: BaseException) -> str:
    """A line about one error of a group."""
    place = protocol.describe_place(frames_of_traceback(error.__traceback__))
    text = f"{type(error).__name__}: {_safe_str(error)}".replace("\n", "\n  ")
    return f"  {text} ({place})" if place else f"  {text}"
