"""Lets waits of plain torch.distributed end: by an interrupt, or by an abort from the control thread.

``Work.wait`` blocks in C++, where SIGINT is not seen until the other ranks come. Here a helper thread
blocks in its place, and the main thread waits for the helper from Python. Waits that C++ code starts by
itself (those of DistributedDataParallel) are not reached; ranks stuck there can only be killed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from workbench.errors import CollectiveAborted

#: Checks whether the work is done before a thread is asked: short waits stay as fast as they were.
_NUM_CHECKS = 100
_POLL_S = 0.05
_abort_reason: list[str] = []


def install() -> None:
    """Replace ``Work.wait`` for this process, once."""
    import torch
    from torch.distributed import Work

    plain_wait: Callable[..., bool] = Work.wait
    if getattr(plain_wait, "_can_be_stopped", False):
        return
    helper = _Helper()

    def wait(work: Any, *timeout: Any) -> bool:
        if threading.current_thread() is not threading.main_thread() or torch.cuda.is_initialized():
            return plain_wait(work, *timeout)
        for _ in range(_NUM_CHECKS):
            if work.is_completed():
                return plain_wait(work, *timeout)
            os.sched_yield()
        return helper.run(lambda: plain_wait(work, *timeout))

    wait._can_be_stopped = True  # type: ignore[attr-defined]
    Work.wait = wait  # type: ignore[method-assign,assignment]


def abort(reason: str) -> None:
    """End the wait that is going on now, if there is one, with ``CollectiveAborted``; from any thread."""
    _abort_reason.append(reason)


class _Helper:
    """One thread that blocks for the main thread; a new one takes over from one that is left blocked."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] | None = None

    def run(self, block: Callable[[], bool]) -> bool:
        if self._jobs is None:
            self._jobs = SimpleQueue()
            threading.Thread(target=_serve, args=(self._jobs,), name="workbench-wait", daemon=True).start()
        job = _Job(block)
        _abort_reason.clear()
        self._jobs.put(job)
        try:
            while not job.finished.acquire(timeout=_POLL_S):
                if _abort_reason:
                    raise CollectiveAborted(f"a wait for other ranks was ended: {_abort_reason[0]}")
        except BaseException:
            self._jobs = None
            raise
        return job.result()


class _Job:
    def __init__(self, block: Callable[[], bool]) -> None:
        self._block = block
        self._value = False
        self._error: BaseException | None = None
        self.finished = threading.Lock()
        self.finished.acquire()

    def perform(self) -> None:
        try:
            self._value = self._block()
        except BaseException as error:  # noqa: BLE001 - raised again where the wait was asked for
            self._error = error
        self.finished.release()

    def result(self) -> bool:
        if self._error is not None:
            raise self._error
        return self._value


def _serve(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().perform()
