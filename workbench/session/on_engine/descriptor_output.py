"""Shows what subprocesses and C code print, before the reply of the cell in which they printed it.

They write to file descriptors. ipykernel reads these on a thread, and sends a reply without asking this thread: lines
that it read too late were shown in the next cell, or nowhere.
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
        DescriptorOutput(number, stream)


class DescriptorOutput:
    """Writes to a stream what is written to a descriptor. A flush of the stream reads what is there before.

    Args:
        stream: whose ``fileno()``, if it has one, was the descriptor before ipykernel read it.
    """

    def __init__(self, number: int, stream: Any) -> None:
        self._stream, self._flush, self._pid, self._lock = stream, stream.flush, os.getpid(), threading.Lock()
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
        if os.getpid() == self._pid:  # no fork, which has the pipe, too
            self._read()
        self._flush()
