"""Shows what child processes and C code print, before the reply of the cell in which they printed it.

They write to file descriptors, and so do forks of the engine, such as workers of a DataLoader. ipykernel reads these
on a thread, and sends a reply without asking this thread: lines that it read too late were shown in the next cell, or
nowhere.
"""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
import threading
from typing import Any


def install() -> None:
    """Read both descriptors here, in the place of ipykernel's threads."""
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        os.register_at_fork(after_in_child=DescriptorOutput(number, stream).bypass)


class DescriptorOutput:
    """Writes to a stream what is written to a descriptor. A flush of the stream reads what is there before.

    Args:
        stream: whose ``fileno()``, if it has one, was the descriptor before ipykernel read it.
    """

    def __init__(self, number: int, stream: Any) -> None:
        self._number, self._stream, self._flush, self._lock = number, stream, stream.flush, threading.Lock()
        try:
            self._log = os.dup(stream.fileno())
        except io.UnsupportedOperation:  # ipykernel does not read it
            self._log = os.dup(number)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pipe, end = os.pipe()
        os.set_blocking(self._pipe, False)
        os.dup2(end, number)
        os.close(end)
        stream.flush = self._read_and_flush
        threading.Thread(target=self._follow, name=f"workbench-output-{number}", daemon=True).start()

    def _follow(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        while poll.poll() and self._read():
            pass

    def _read(self) -> bool:
        """Pass on what the pipe holds; whether somebody may still write to it."""
        with self._lock:  # who has it finds an empty pipe, or writes what was in it
            try:
                found = os.read(self._pipe, 2**16)
            except BlockingIOError:
                return True
            self._stream.write(self._decoder.decode(found))
            os.write(self._log, found)
            return bool(found)

    def _read_and_flush(self) -> None:
        self._read()
        self._flush()

    def bypass(self) -> None:
        """In a fork, which has no thread that sends: let the stream write to the descriptor, which the parent reads."""
        file = open(self._number, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        self._stream.write, self._stream.flush = file.write, file.flush
