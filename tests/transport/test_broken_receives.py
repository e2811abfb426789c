"""gloo never ends a receive whose sender stops halfway; its resources are freed after the timeout."""

import os
import signal
import threading
import time
from contextlib import suppress

import psutil
import pytest
import torch

import workbench as wb
from tests.processes import Ranks
from tests.timeouts import wait_until
from tests.transport.chaos import added_resources, open_resources
from workbench.errors import CollectiveAborted
from workbench.tensors.world import shutdown

pytestmark = pytest.mark.procs
TIMEOUT_S = 3.0
NUM_MESSAGES, NUM_NUMBERS = 20, 2**24
"""A message far larger than the buffers of a connection."""


def stop_while_sending():
    """Rank 0 stops in the middle of a message; returns when rank 1 noticed, and its open resources later.

    A busy machine may send a message whole before its sender is stopped: then the next one is sent.
    """
    os.environ["WORKBENCH_TRANSPORT"] = "gloo"
    before = open_resources(None, 0, 1)
    world = wb.init(init_method=os.environ["WORKBENCH_TEST_RENDEZVOUS"], timeout_s=TIMEOUT_S)
    exchange, numbers = world.transport.exchange, torch.zeros(NUM_NUMBERS)
    sender = psutil.Process(world.transport.hang_detector.members[0].pid)
    if world.rank == 0:
        with suppress(CollectiveAborted):  # rank 1 has left
            for number in range(NUM_MESSAGES):
                time.sleep(0.3)  # the receiver waits by then, so that the sender begins at once
                exchange([(1, numbers)], [], number, "half a message")
                os.kill(os.getpid(), signal.SIGSTOP)
        return None
    started_s = []

    def receive():
        for number in range(NUM_MESSAGES):
            started_s.append(time.monotonic())
            exchange([], [(0, numbers)], number, "half a message")
            wait_until(lambda: sender.status() == psutil.STATUS_STOPPED)
            sender.send_signal(signal.SIGCONT)

    try:
        with pytest.raises(CollectiveAborted, match=r"rank 0 is stopped \(SIGSTOP\)"):
            receive()
        started = started_s[-1]
        noticed_s = time.monotonic() - started
        shutdown()
        while added_resources(before, open_resources(None, 0, 1)) and time.monotonic() - started < 3 * TIMEOUT_S:
            time.sleep(0.05)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("workbench")]
        return noticed_s, names, added_resources(before, open_resources(None, 0, 1))
    finally:
        sender.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_an_interrupted_receive_frees_its_resources_after_the_timeout():
    with Ranks(stop_while_sending, 2, joins=False) as ranks:
        _, (noticed_s, threads, left) = ranks.results()
    assert noticed_s < 2 * TIMEOUT_S
    assert not threads and not left
