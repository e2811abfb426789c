"""The values that the notebook and its engines send each other, as plain frozen classes.

Requests are ipyparallel's own (execute, apply). Besides the code they have a `CellTag` in the request's label. Engines
send `Failure`, `Value` and `Published` while they work. Their control threads answer control requests
(`CONTROL_REQUEST`) with a `RankStatus`.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

_WRAPPERS = (
    os.path.join("torch", "distributed", "c10d_logger.py"),
    os.path.join("workbench", "tensors", "torch_patches"),
)
"""Calls of torch go through them."""
_TRANSPORT = os.path.join("workbench", "transport", "")
#: Type of the control message and of its reply. The nanny of an engine relays types it does not know.
CONTROL_REQUEST = "workbench_request"
CONTROL_REPLY = "workbench_reply"
#: The name of a wait begins with one of them. Ranks that share memory: their messages arrive at once. Over a network.
#: In plain torch.distributed: nobody but the notebook finds out that such a wait has no end. Of a stopped process.
LOCAL, REMOTE, PLAIN, STOPPED = "near", "far", "plain", "stopped"
#: What an ``except`` or ``finally`` clause handles.
INTERRUPT, ERROR = "interrupt", "error"
#: Prefix of the keys under which engines publish wire values.
WIRE_KEY = "workbench:"
#: A larger value of a cell's last expression is not sent with the cell's reply.
MAX_VALUE_BYTES = 16 * 2**20


_numbering = threading.Lock()
_last_run = 0


def next_run() -> int:
    """The number of a new run: above those of all runs before it, also of other notebooks on the same engines.

    An engine stops no run that is later than the one it is asked to stop, and knows that by their numbers.
    """
    global _last_run
    with _numbering:
        _last_run = max(_last_run + 1, time.time_ns() // 1_000)
        return _last_run


@dataclass(frozen=True, slots=True)
class CellTag:
    """The facts about a request that an engine needs besides the code.

    ``all_ranks``: every rank of the session runs this request, so collectives are allowed.
    ``wants_values``: send the value of the last expression, not only its picture.
    """

    run: int
    all_ranks: bool
    wants_values: bool = False
    label: str = ""

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str | None) -> CellTag | None:
        """The tag in a request's label; None for a request of another client."""
        try:
            return cls(**json.loads(text or ""))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a stack. ``source`` holds (line number, text) of the lines around it."""

    file: str
    line: int
    function: str
    in_cell: bool
    source: tuple[tuple[int, str], ...] = ()
    is_users: bool = False  #: of a cell or of the user's own file, not of a library


def describe_place(stack: Sequence[Frame], importing: str = "") -> str:
    """``at cell line 3, in all_reduce (distributed_c10d.py:2501)``: the cell's line and what it called or imports.

    Empty without frames.
    """
    if not stack:
        return ""
    last_cell = max((index for index, frame in enumerate(stack) if frame.in_cell), default=-1)
    inner = [frame for frame in stack[last_cell + 1 :] if not any(part in frame.file for part in _WRAPPERS)]
    called = inner[0] if inner else None
    inside = f"in {called.function} ({os.path.basename(called.file)}:{called.line})" if called else ""
    if called and _TRANSPORT in called.file:
        inside = "in an exchange with other ranks"
    if importing:
        inside = f"importing {importing}"
    line = f"at cell line {stack[last_cell].line}" if last_cell >= 0 else ""
    return ", ".join(part for part in (line, inside) if part)


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on one rank: its type and text, its frames from the cell inwards, outermost first."""

    kind: str
    message: str
    frames: tuple[Frame, ...]
    time_s: float  #: seconds since the epoch on the engine's host
    was_stopped: bool = False  #: ended by an interrupt or an abort, not by its own mistake
    chain: tuple[str, ...] = ()  #: "KeyError: 'x'" of the exceptions that led to this one
    in_handler: bool = False  #: raised by an ``except`` or ``finally`` clause that handled an interrupt
    syntax: str = ""  #: for syntax errors: the marked line, as Python shows it
    broke_off_step: bool = False  #: in the middle of a schedule, so its messages may be in transit


@dataclass(frozen=True, slots=True)
class Value:
    """A pickled value of a cell's last expression, or its picture."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Progress:
    """How many exchanges the program on one rank has called since its world was built."""

    generation: int = 0  #: of the world; equal on its ranks
    num_boxings: int = 0  #: every rank counts every one
    num_sums: tuple[tuple[tuple[int, ...], int], ...] = ()  #: by group of ranks, which count theirs
    latest: str = ""  #: the latest boxing


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint of a session, and the variables that its parts were."""

    path: str
    names: dict[str, list[str]]


@dataclass(frozen=True, slots=True)
class OmittedValue:
    """Replaces a value that stayed on its engine. It says why, and how to get the value."""

    text: str

    def __repr__(self) -> str:
        return f"<{self.text}>"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """The logical tensor of a global tensor, equal on every rank. `Session.pull` returns it."""

    tensor: Any


@dataclass(frozen=True, slots=True)
class Published:
    """One object given to `workbench.session.engine.publish`, pickled on the engine."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Bar:
    """The present state of a progress bar of one rank."""

    number: int  #: counts the rank's bars of this request, in the order in which they were made
    name: str  #: its first description: bars with different names are different bars
    left: str  #: the text before the bar: ``epochs:  40%``
    right: str  #: the text after the bar: `` 4/10 [00:01<00:02,  3.10it/s]``
    done: float
    total: float | None
    depth: int = 0  #: 1 inside another bar
    state: str = (
        "runs"  #: or "finished", "left" (closed before its end), "failed" (by an error), "gone" (not to be kept)
    )


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The report of one rank on itself. ``alive=False``, and most of the rest empty, if it does not answer."""

    rank: int
    alive: bool
    pid: int | None = None
    device: str = ""
    transport_groups: tuple[str, ...] = ()  #: the transport of each group of ranks, and the reason; equal on all ranks
    memory_bytes: int | None = None  #: resident size of the process
    busy: bool = False
    doing: str = ""  #: where the main thread is, e.g. ``at cell line 3``; empty when idle
    stack: tuple[Frame, ...] = ()  #: of the main thread, outermost first, from the cell inwards
    importing: str = ""  #: the module that the main thread imports now; interrupts wait for the end of an import
    run: int = 0  #: the number of the last request of a session that it has begun
    is_handling: bool = False  #: whether a request has begun whose reply it has not sent
    ended: str = ""  #: how its process ended, e.g. ``killed by SIGKILL``; empty if it is there
    handles: str = ""  #: what the ``except`` or ``finally`` clause that runs is for: `INTERRUPT`, `ERROR`, or nothing


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Whether a rank can continue by itself."""

    waits: str = ""  #: the main thread's wait for other ranks: ``"near 17"``, ``"far 3"``; empty if it does not wait
    host: str = ""
    processor_s: float = 0.0  #: the time that its process has used so far
    wanted_s: float = 0.0  #: that time, and the time for which its threads have waited for a processor
    call: str = ""  #: what the main thread waits for: ``"rank 1 in barrier()"``; empty where nobody knows


class TooLarge(ValueError):
    """A pickle is larger than its limit."""


class LimitedBuffer(io.BytesIO):
    """A buffer that ends a pickle once it is larger than the limit."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self.limit_bytes:
            raise TooLarge(f"larger than {self.limit_bytes} bytes")
        return super().write(data)


def dump(value: object, limit_bytes: int | None = None) -> bytes:
    """Pickle a value by cloudpickle, see `pickling`.

    Raises:
        TooLarge: the pickle would be larger than ``limit_bytes``.
    """
    from workbench.session import pickling

    buffer = io.BytesIO() if limit_bytes is None else LimitedBuffer(limit_bytes)
    pickling.dump(value, buffer)
    return buffer.getvalue()


def dump_or_omit(value: object, limit_bytes: int = MAX_VALUE_BYTES) -> bytes:
    """Pickle a value, or an ``OmittedValue`` with the reason why it stays."""
    from workbench.units import format_bytes

    kind = type(value).__name__
    try:
        return dump(value, limit_bytes)
    except TooLarge:
        return dump(
            OmittedValue(
                f"{kind} larger than {format_bytes(limit_bytes)}, the most that comes back with a cell: "
                f"give it a name in the cell and fetch it with session.pull(name)"
            )
        )
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        return dump(OmittedValue(f"{kind} that cannot be pickled ({error}): it stays on its engine"))


def load(payload: bytes) -> Any:
    """Unpickle the bytes of `dump`. Returns an ``OmittedValue`` if this process lacks a module of the value."""
    try:
        return pickle.loads(payload)
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        return OmittedValue(f"value that cannot be rebuilt here ({type(error).__name__}: {error})")
