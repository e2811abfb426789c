"""gloo never ends a receive whose sender stops halfway; its resources are freed after the timeout."""

import os
import signal
import threading
import time

import pytest
import torch

import workbench as wb
from tests.processes import Ranks
from tests.transport.chaos import added_resources, open_resources
from workbench.errors import CollectiveAborted
from workbench.tensors.world import shutdown

pytestmark = pytest.mark.procs
TIMEOUT_S = 3.0
NUM_NUMBERS = 2**24
"""A message far larger than the buffers of a connection."""


def stop_while_sending():
    """Rank 0 stops in the middle of a message; returns when rank 1 noticed, and its open resources later."""
    os.environ["WORKBENCH_TRANSPORT"] = "gloo"
    before = open_resources(None, 0, 1)
    world = wb.init(init_method=os.environ["WORKBENCH_TEST_RENDEZVOUS"], timeout_s=TIMEOUT_S)
    members = world.transport.hang_detector.members
    numbers, started = torch.zeros(NUM_NUMBERS), time.monotonic()
    if world.rank == 0:
        time.sleep(0.3)  # the receiver waits by then, so that the sender begins at once
        world.transport.exchange([(1, numbers)], [], 0, "half a message")
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    try:
        with pytest.raises(CollectiveAborted, match=r"rank 0 is stopped \(SIGSTOP\)"):
            world.transport.exchange([], [(0, numbers)], 0, "half a message")
        noticed_s = time.monotonic() - started
        shutdown()
        while added_resources(before, open_resources(None, 0, 1)) and time.monotonic() - started < 3 * TIMEOUT_S:
            time.sleep(0.05)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("workbench")]
        return noticed_s, names, added_resources(before, open_resources(None, 0, 1))
    finally:
        os.kill(members[0].pid, signal.SIGCONT)


def test_an_interrupted_receive_frees_its_resources_after_the_timeout():
    with Ranks(stop_while_sending, 2, joins=False) as ranks:
        _, (noticed_s, threads, left) = ranks.results()
    assert noticed_s < 2 * TIMEOUT_S
    assert not threads and not left
