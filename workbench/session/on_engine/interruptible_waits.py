"""Lets an interrupt, or an abort from the control thread, end the waits of plain torch.distributed.

``Work.wait`` blocks in C++, and Python does not see SIGINT until the other ranks arrive. Here a helper thread blocks
instead, and the main thread waits for the helper in Python. C++ code that waits by itself (DistributedDataParallel) is
not covered: ``connections`` ends waits for ranks of this host, and only a kill those for other hosts.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from workbench.errors import CollectiveAborted

#: The helper gets a wait after so many checks whether the work is done. So short waits stay nearly as fast as before.
_NUM_CHECKS = 100
_abort_reasons: list[str] = []
_num_waits = 0


def install() -> None:
    """Replace ``Work.wait`` for this process, once."""
    from torch.distributed import Work

    from workbench.tensors import world
    from workbench.transport.network.helper_thread import HelperThread

    plain_wait: Callable[..., bool] = Work.wait
    helper = HelperThread("workbench-wait")

    def wait(work: Any, *timeout: Any, **named: Any) -> bool:
        if threading.current_thread() is not threading.main_thread() or uses_gpu(world.joined()):
            return plain_wait(work, *timeout, **named)
        for _ in range(_NUM_CHECKS):
            if work.is_completed():
                return plain_wait(work, *timeout, **named)
            os.sched_yield()
        global _num_waits
        _num_waits += 1
        answers: list[bool] = []
        _abort_reasons.clear()
        helper.run(lambda: answers.append(plain_wait(work, *timeout, **named)), _raise_if_aborted)
        return answers[0]

    Work.wait = wait  # type: ignore[method-assign,assignment]


def uses_gpu(world: Any) -> bool:
    """Whether this process computes on a GPU. A rank of a world on the CPU may have looked at its GPU before it joined,
    which initializes CUDA.
    """
    torch = sys.modules["torch"]
    return torch.cuda.is_initialized() and (world is None or world.device.type != "cpu")


def num_waits() -> int:
    """The number of waits that the helper has got because they were long."""
    return _num_waits


def abort(reason: str) -> None:
    """End the present wait, if there is one, with ``CollectiveAborted``. Call it from any thread."""
    _abort_reasons.append(reason)


def _raise_if_aborted() -> None:
    if _abort_reasons:
        raise CollectiveAborted(f"a wait for other ranks was ended: {_abort_reasons[0]}")
