"""Waits that block in C++, made interruptible: a helper thread blocks, the main thread waits for it from Python.

A receive over gloo reports completion only inside its own blocking ``wait``, which ignores SIGINT. A helper that is
left blocked after an interrupt is abandoned, and a new one takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

POLL_S = 0.05
Block = Callable[[], object]


class Helper:
    """One thread that blocks on behalf of another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[Job | None] | None = None

    def run(self, block: Block, check: Callable[[], None]) -> None:
        """Run ``block`` on the helper; meanwhile call ``check`` every 50 ms, which may raise to end the wait."""
        job = self.submit(block)
        try:
            while not job.finished.wait(POLL_S):
                check()
        except BaseException:
            self.close()  # the thread is stuck with this job; the next one gets a new thread
            raise
        if job.error is not None:
            raise job.error

    def submit(self, block: Block) -> Job:
        """Run ``block`` after the jobs before it, without waiting."""
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True).start()
        job = Job(block)
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """The thread ends after the jobs it has; what is submitted later gets a new one."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None


class Job:
    """A blocking call; when it has ended it holds no reference to what it waited for."""

    def __init__(self, block: Block) -> None:
        self._block: Block | None = block
        self.error: BaseException | None = None
        self.finished = threading.Event()

    def perform(self) -> None:
        assert self._block is not None
        try:
            self._block()
        except BaseException as error:  # noqa: BLE001 - raised again where the wait was asked for
            self.error = error
        self._block = None
        self.finished.set()


def _serve(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.perform()
        del job  # its result goes when whoever asked for it is done with it, not at the next job
