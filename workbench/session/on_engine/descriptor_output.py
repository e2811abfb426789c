"""Shows what child processes and C code print, before the reply of the cell in which they printed it.

They write to file descriptors, and so do forks of the engine, such as workers of a DataLoader. ipykernel reads these
on a thread, and sends a reply without asking this thread: lines that it read too late were shown in the next cell, or
nowhere.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any


def install() -> None:
    """Read both descriptors here, in the place of ipykernel's threads."""
    outputs = DescriptorOutput(1, sys.stdout), DescriptorOutput(2, sys.stderr)
    follow(*outputs)
    for output in outputs:
        os.register_at_fork(after_in_child=output.bypass)


def follow(*outputs: DescriptorOutput) -> None:
    """Read all of them on one thread, and before a flush of any of their streams; pass on the first one's first.

    The last one is read first: what was written to others before it is in their pipes by then.
    """
    lock = threading.Lock()  # who has it finds empty pipes, or writes what was in them

    def read_all(still_open: Sequence[DescriptorOutput] = outputs) -> list[DescriptorOutput]:
        with lock:
            found = [(output, output.read()) for output in reversed(still_open)]
            return [output for output, each in reversed(found) if output.pass_on(each)]

    def read_while_open() -> None:
        still_open = list(outputs)
        while still_open:
            poll = select.poll()
            for output in still_open:
                poll.register(output.pipe, select.POLLIN)
            poll.poll()
            still_open = read_all(still_open)

    for output in outputs:
        output.read_before_flush(read_all)
    threading.Thread(target=read_while_open, name="workbench-output", daemon=True).start()


class DescriptorOutput:
    """Writes to a stream what is written to a descriptor.

    Args:
        stream: whose ``fileno()``, if it has one, was the descriptor before ipykernel read it.
    """

    def __init__(self, number: int, stream: Any) -> None:
        self._number, self._stream, self._flush = number, stream, stream.flush
        try:
            self._log = os.dup(stream.fileno())
        except io.UnsupportedOperation:  # ipykernel does not read it
            self._log = os.dup(number)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.pipe, end = os.pipe()
        os.set_blocking(self.pipe, False)
        os.dup2(end, number)
        os.close(end)

    def read(self) -> bytes | None:
        """What the pipe holds, or None. It is empty where nobody can write to it any more."""
        try:
            return os.read(self.pipe, 2**16)
        except BlockingIOError:
            return None

    def pass_on(self, found: bytes | None) -> bool:
        """To the stream and the log what `read` has found; whether somebody may still write to the pipe."""
        if found:
            self._stream.write(self._decoder.decode(found))
            self._write_log(found)
        return found != b""

    def _write_log(self, rest: bytes) -> None:
        """On a full disk the log ends, and the cell goes on."""
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._log, rest) :]

    def read_before_flush(self, read_all: Callable[[], object]) -> None:
        """Let each flush of the stream call ``read_all`` first."""

        def flush() -> None:
            read_all()
            self._flush()

        self._stream.flush = flush

    def bypass(self) -> None:
        """In a fork, which has no thread that sends: let the stream write to the descriptor, which the parent reads."""
        file = open(self._number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        self._stream.write, self._stream.flush = file.write, file.flush
