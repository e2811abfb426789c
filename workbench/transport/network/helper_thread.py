"""Interruptible waits for calls that block in C++: a helper thread blocks, and the main thread waits for it in Python.

A receive over gloo reports completion only in its blocking ``wait``, which ignores SIGINT. After an interrupt the
blocked thread is abandoned, and a new one replaces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

POLL_S = 0.05
BlockingCall = Callable[[], object]


class HelperThread:
    """A thread that makes blocking calls for another thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] | None = None

    def run(self, block: BlockingCall, check: Callable[[], None]) -> None:
        """Run ``block`` on the helper thread; call ``check`` every 50 ms meanwhile, which may raise to end the wait."""
        job = self.submit(block)
        try:
            while not job.finished.wait(POLL_S):
                check()
        except BaseException:
            self.close()  # the thread is blocked in this job; the next job gets a new thread
            raise
        if job.error is not None:
            raise job.error

    def submit(self, block: BlockingCall) -> Job:
        """Queue ``block`` after earlier jobs and return at once."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True).start()
        job = Job(block)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread after its queued jobs; a later job starts a new one."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


class Job:
    """A blocking call; after its end it keeps no reference to the awaited objects."""

    def __init__(self, block: BlockingCall) -> None:
        self._block: BlockingCall | None = block
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def perform(self) -> None:
        assert self._block is not None
        try:
            self._block()
        except BaseException as error:  # noqa: BLE001 - raised again in ``run``
            self.error = error
        self._block = None
        self.finished.set()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.perform()
        del job  # this loop must not keep the result alive
