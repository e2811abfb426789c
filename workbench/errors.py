"""Every exception the workbench raises on purpose.

    WorkbenchError
    ├── LayoutError (ValueError)         a layout that cannot be, or that does not fit a tensor
    │   ├── SbpError                     split / broadcast / partial-sum entries
    │   └── PlacementError               device type and rank grid
    ├── StrategyError (ValueError)       a strategy that does not fit its model or its ranks
    ├── HardwareError (ValueError)       a machine file with a missing or absurd number
    ├── TableError (ValueError)          a table of runs with a missing or contradictory value
    ├── RunError (ValueError)            a training run that cannot be: no steps, more samples than there are
    ├── CaptureError (RuntimeError)      a step that cannot be replayed as a local program
    ├── NonFiniteError (ArithmeticError) a nan or an infinity under ``wb.debug.find_nonfinite()``
    ├── ExplicitBoxingError              an implicit boxing under ``wb.debug.explicit_boxing()``
    ├── WorldError (RuntimeError)        this process is not (or no longer) part of a world
    ├── CollectiveAborted (RuntimeError) a wait for other ranks ended early
    ├── CheckpointError (RuntimeError)   a checkpoint that cannot be written, or does not fit what it is loaded into
    ├── JobError (RuntimeError)          a job function of ``workbench.flow`` that cannot run unchanged
    ├── CommandError                     the command line ``workbench`` cannot do what was asked
    └── SessionError (RuntimeError)      the notebook's side of a cluster
        ├── NotStartedError              no session is running
        ├── EngineStartError             engines did not come up
        └── CellError                    code failed on one or more ranks
    CaptureWarning (UserWarning)         a captured step is slower than it could be

Messages have four parts, in this order: what was asked, both numbers, the rule, the fix.
Subclasses of ``ValueError`` and ``RuntimeError`` keep ``except ValueError`` in users' code working.

>>> wb.sbp.split("rows")
Traceback (most recent call last):
...
workbench.errors.SbpError: split(dim='rows'): dim is a str, not an int. Write e.g. split(0).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

_HIDDEN = (os.path.join(os.path.dirname(__file__), ""), f"{os.sep}IPython{os.sep}")


class WorkbenchError(Exception):
    """Base of all exceptions raised on purpose by the workbench."""

    def _render_traceback_(self) -> list[str]:
        """What notebooks show: the user's lines that led here and the message, without the lines of our own code.

        An error that follows from another one is shown with all lines, and so are all under ``%xmode Verbose``.
        """
        formatter, tb = sys.modules["IPython"].get_ipython().InteractiveTB, self.__traceback__
        follows = self.__cause__ is not None or not (self.__suppress_context__ or self.__context__ is None)
        is_whole = follows or formatter.mode == "Verbose"
        shown, offset = (tb, formatter.tb_offset) if is_whole else (_without_our_frames(tb), 0)
        return list(formatter.structured_traceback(type(self), self, shown, tb_offset=offset))


def _without_our_frames(tb: TracebackType | None) -> TracebackType | None:
    kept = None
    while tb is not None and any(part in tb.tb_frame.f_code.co_filename for part in _HIDDEN):
        tb = tb.tb_next
    if tb is not None:
        kept = TracebackType(_without_our_frames(tb.tb_next), tb.tb_frame, tb.tb_lasti, tb.tb_lineno)
    return kept


class LayoutError(WorkbenchError, ValueError):
    """A layout that is impossible, or that does not fit its tensor."""


class SbpError(LayoutError):
    """A wrong split / broadcast / partial-sum entry, or a wrong number of them."""


class PlacementError(LayoutError):
    """A placement with an unknown device type, a rank that does not exist, or a rank twice."""


class StrategyError(WorkbenchError, ValueError):
    """A strategy that does not parse, or does not fit its model or the number of ranks."""


class HardwareError(WorkbenchError, ValueError):
    """An unknown machine, or one with missing or impossible numbers."""


class TableError(WorkbenchError, ValueError):
    """A table of training runs with a missing or inconsistent value; it names row and column."""


class RunError(WorkbenchError, ValueError):
    """A training that is impossible: no steps, a batch larger than the data, a model instead of the function that makes
    it.
    """


class CaptureError(WorkbenchError, RuntimeError):
    """A step that ``wb.capture`` cannot replay: it depends on values, or keeps tensors."""


class CaptureWarning(UserWarning):
    """A captured step is slower than it could be: it was recorded too often, or a part could not be compiled."""


class NonFiniteError(WorkbenchError, ArithmeticError):
    """A nan or an infinity under ``wb.debug.find_nonfinite()``: which layer, on which rank."""


class ExplicitBoxingError(WorkbenchError):
    """An implicit boxing under ``wb.debug.explicit_boxing()``."""


class WorldError(WorkbenchError, RuntimeError):
    """This process is not part of a world, or the world does not support the request."""


class CollectiveAborted(WorkbenchError, RuntimeError):
    """A wait for other ranks ended before they came: abort, dead peer, timeout or divergence."""


class CheckpointError(WorkbenchError, RuntimeError):
    """A checkpoint that cannot be written, that is damaged or half-written, or that holds another model."""


class JobError(WorkbenchError, RuntimeError):
    """A job function of ``workbench.flow`` that cannot run unchanged, or that is called in the wrong place."""


class CommandError(WorkbenchError):
    """The command line cannot do what was asked: a file does not exist or lacks an entry that the command needs."""


class SessionError(WorkbenchError, RuntimeError):
    """A failure on the notebook's side of a cluster of engines."""

    def _render_traceback_(self) -> list[str]:
        """What notebooks show: the message, without a traceback through our own code."""
        return [f"{type(self).__name__}: {self}"]


class NotStartedError(SessionError):
    """A cell or call needs a running session and there is none."""


class EngineStartError(SessionError):
    """Engines did not start; the message has the last lines of their logs."""


class CellError(SessionError):
    """Code failed on one or more ranks; the message groups equal failures, the cause first.

    ``failures``: the failure of each rank (`workbench.session.protocol.Failure`), by rank.
    """

    def __init__(
        self, message: str, *, failures: Mapping[int, Any] | None = None, rendered: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.failures = dict(failures or {})
        self._rendered = list(rendered)

    def _render_traceback_(self) -> list[str]:
        return self._rendered or super()._render_traceback_()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CellError, failures=self.failures, rendered=self._rendered), (str(self),)
