"""A thread that waits for other ranks is recognised by the file whose function waits."""

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import Work

from workbench.session import protocol
from workbench.session.on_engine import activity, interruptible_waits
from workbench.tensors import world as world_module
from workbench.transport import rendezvous
from workbench.transport.messaging import waiter
from workbench.transport.messaging.message_transport import MessageTransport
from workbench.transport.network.helper_thread import HelperThread


def test_the_files_of_waits_exist():
    waits = (activity.LOCAL_WAITS, activity.REMOTE_WAITS, activity.PLAIN_WAITS, activity.JOIN_WAITS)
    assert all(Path(file).is_file() for file in waits)


def test_a_rank_that_joins_a_world_alone_waits_for_others():
    found = []
    store = SimpleNamespace(check=lambda keys: len(found) == 2)
    look = lambda: found.append(activity.wait_of(sys._getframe(), None))  # noqa: E731
    rendezvous._wait_for_all(store, ["member/1"], "rank 0", 1.0, look)
    assert found[0].startswith(protocol.PLAIN) and found[0] == found[1]


def test_a_wait_in_a_helper_thread_is_recognised():
    release, found = threading.Event(), []

    def look() -> None:
        found.append(activity.wait_of(sys._current_frames()[main], None))
        release.set()

    main = threading.get_ident()
    helper = HelperThread("test")
    helper.run(release.wait, look)
    helper.close()
    assert found[0].startswith("far 0.")
    assert activity.wait_of(sys._current_frames()[main], None) == ""


class Waiting(MessageTransport):
    def __init__(self, has_message):
        self.has_message = has_message

    def has_pending_message(self):
        return self.has_message

    def _let_peers_read(self):
        """Nothing was sent."""

    def _free(self):
        """Nothing is held."""


@pytest.mark.parametrize(("has_message", "found"), [(False, "near 5.0"), (True, "")])
def test_a_rank_that_has_not_taken_its_message_yet_does_not_wait(has_message, found, monkeypatch):
    """On a machine with too much to do, a rank may get no processor for seconds though its message is there."""
    world = SimpleNamespace(transport=Waiting(has_message), traffic=SimpleNamespace(num_exchanges=5))
    seen = []

    def sleep(seconds):
        seen.append(activity.wait_of(sys._current_frames()[threading.get_ident()], world))
        raise KeyboardInterrupt

    monkeypatch.setattr(waiter.time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        waiter.Waiter.wait_for_room(SimpleNamespace(), None, 0.0)
    assert seen == [found]


@pytest.mark.parametrize(
    ("file", "waits"),
    [
        ("torch/distributed/distributed_c10d.py", True),
        ("torch/nn/parallel/distributed.py", True),
        ("torch/autograd/graph.py", True),
        ("torch/distributed/checkpoint/filesystem.py", False),  # a slow disk
        ("torch/distributed/elastic/multiprocessing/api.py", False),  # processes of its own
        ("torch/nn/modules/module.py", False),
        ("cell.py", False),
    ],
)
def test_torch_waits_for_other_ranks_only_in_some_of_its_files(file, waits):
    found = []
    space = {"look": lambda: found.append(activity.wait_of(sys._getframe(1), None))}
    exec(compile("look()", f"/somewhere/{file}", "exec"), space)
    assert found[0].startswith(protocol.PLAIN) is waits
    assert waits or found == [""]


def test_ranks_on_the_cpu_wait_as_on_the_cpu_though_torch_has_looked_at_gpus(monkeypatch):
    """A rank that looks for a GPU of its own initializes CUDA, also where it then works on the CPU."""
    waited_in = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(Work, "wait", lambda work: waited_in.append(threading.current_thread().name) or True)
    interruptible_waits.install()

    def is_taken_for_a_wait(device):
        world, found = SimpleNamespace(device=torch.device(device), traffic=SimpleNamespace(num_exchanges=5)), []
        monkeypatch.setattr(world_module, "joined", lambda: world)
        Work.wait(SimpleNamespace(is_completed=lambda: False))
        space = {"look": lambda: found.append(activity.wait_of(sys._getframe(1), world))}
        exec(compile("look()", "/somewhere/torch/autograd/graph.py", "exec"), space)
        return bool(found[0])

    assert is_taken_for_a_wait("cpu")
    assert not is_taken_for_a_wait("cuda")
    assert [name.startswith("workbench-wait") for name in waited_in] == [True, False]
