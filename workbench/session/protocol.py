"""The values that the notebook and its engines send each other, as plain frozen classes.

Requests are ipyparallel's own (execute, apply); what they carry besides code is a `CellTag` in the
request's label. Engines send `Failure`, `Value` and `Published` while they work, and answer control
requests (`CONTROL_REQUEST`, on a thread of their own) with a `RankStatus`.
"""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import asdict, dataclass
from typing import Any

#: Type of the control message and of its reply. The nanny of an engine relays types it does not know.
CONTROL_REQUEST = "workbench_request"
CONTROL_REPLY = "workbench_reply"
#: The name of a wait between ranks that share memory begins with it: their messages arrive at once.
LOCAL = "near"
#: Prefix of the keys under which engines publish wire values.
WIRE_KEY = "workbench:"
#: Values of a cell's last expression above this size are not sent along with the cell's reply.
MAX_VALUE_BYTES = 16 * 2**20


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


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on one rank: its type and text, its frames from the cell inwards, outermost first."""

    kind: str
    message: str
    frames: tuple[Frame, ...]
    time_s: float  #: seconds since the epoch on the engine's host
    was_stopped: bool = False  #: ended by an interrupt or an abort, not by its own mistake
    chain: tuple[str, ...] = ()  #: "KeyError: 'x'" of the exceptions that led to this one
    syntax: str = ""  #: for syntax errors: the marked line, as Python shows it
    broke_off_step: bool = False  #: in the middle of a schedule: messages of it may be under way

    @property
    def cell_line(self) -> int | None:
        """The line of the cell that led to the exception, counted from 1."""
        return next((frame.line for frame in self.frames if frame.in_cell), None)


@dataclass(frozen=True, slots=True)
class Value:
    """A pickled value of a cell's last expression, or its picture."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class OmittedValue:
    """Stands for a value that stayed on its engine; says why and how to get it."""

    text: str

    def __repr__(self) -> str:
        return f"<{self.text}>"


@dataclass(frozen=True, slots=True)
class LogicalTensor:
    """The logical tensor of a global one, as `Session.pull` returns it: the same on every rank."""

    tensor: Any


@dataclass(frozen=True, slots=True)
class Published:
    """One object given to `workbench.session.engine.publish`, pickled on the engine."""

    sequence: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Bar:
    """A progress bar of one rank as it is now."""

    number: int  #: of the rank's bars in this request, in the order in which they were made
    name: str  #: its description when it was made: bars that ranks call differently are different bars
    left: str  #: what stands before the bar: ``epochs:  40%``
    right: str  #: and behind it: `` 4/10 [00:01<00:02,  3.10it/s]``
    done: float
    total: float | None
    depth: int = 0  #: 1 inside another bar
    state: str = (
        "runs"  #: or "finished", "left" (closed before its end), "failed" (by an error), "gone" (not to be kept)
    )


@dataclass(frozen=True, slots=True)
class RankStatus:
    """The report of one rank on itself. ``alive=False``, and the rest empty, if it does not answer."""

    rank: int
    alive: bool
    pid: int | None = None
    device: str = ""
    transport: str = ""
    transport_groups: tuple[str, ...] = ()  #: which ranks use what, and why; the same on all ranks
    memory_bytes: int | None = None  #: resident size of the process
    busy: bool = False
    num_requests: int = 0  #: how many it has begun: another number is another cell
    doing: str = ""  #: where the main thread is, e.g. ``at cell line 3``; empty when idle
    stack: tuple[Frame, ...] = ()  #: of the main thread, outermost first, from the cell inwards
    importing: str = ""  #: the module that the main thread imports now; interrupts wait for the end of an import
    waits: str = ""  #: which wait for other ranks the main thread is in: ``"near 17"``, ``"far 3"``; empty if in none


class TooLarge(ValueError):
    """A pickle is larger than its limit."""


class _LimitedBuffer(io.BytesIO):
    """Stops a pickle as soon as it is larger than the limit."""

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

    buffer = io.BytesIO() if limit_bytes is None else _LimitedBuffer(limit_bytes)
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


def load_strictly(payload: bytes) -> Any:
    """Unpickle the bytes of `dump`; errors of unpickling pass through."""
    return pickle.loads(payload)


def load(payload: bytes) -> Any:
    """Unpickle the bytes of `dump`; an ``OmittedValue`` if this side lacks what the value needs."""
    try:
        return pickle.loads(payload)
    except Exception as error:  # noqa: BLE001 - pickling runs anybody's code
        return OmittedValue(f"value that cannot be rebuilt here ({type(error).__name__}: {error})")
