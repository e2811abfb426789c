"""Finds out whether the main thread of an engine waits for other ranks, and whether its process still moves.

`Divergence` on the notebook's side decides from the answers of all ranks.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from workbench.session import protocol
from workbench.session.on_engine import interruptible_waits

if TYPE_CHECKING:
    from workbench.transport.messaging.message_transport import MessageTransport

_PACKAGE = Path(__file__).parents[2]
#: Files in whose functions a thread waits for other ranks: over memory of this host, over a network, in plain torch,
#: to join a world.
LOCAL_WAITS = str(_PACKAGE / "transport" / "messaging" / "waiter.py")
REMOTE_WAITS = str(_PACKAGE / "transport" / "network" / "helper_thread.py")
PLAIN_WAITS = interruptible_waits.__file__
JOIN_WAITS = str(_PACKAGE / "transport" / "rendezvous.py")
#: Files of torch whose functions wait for other ranks in C++. Other parts of torch.distributed wait for disks, say.
_TORCH_WAITS = tuple(
    os.path.join("torch", *parts)
    for parts in (
        ("distributed", "distributed_c10d.py"),
        ("distributed", "rendezvous.py"),
        ("distributed", "utils.py"),
        ("distributed", "_functional_collectives.py"),
        ("nn", "parallel", "distributed.py"),
    )
)
_TORCH_OPERATOR = os.path.join("torch", "_ops.py")
_BACKWARD = os.path.join("torch", "autograd", "graph.py")


def activity(world: Any) -> protocol.RankActivity:
    """The present activity of this process. Call it on the control thread, whose own work does not count."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    waits = wait_of(frame, world)
    return protocol.RankActivity(
        waits=waits,
        host=socket.gethostname(),
        processor_s=time.process_time() - time.thread_time(),
        wanted_s=_wanted_s(),
        call=_call(world) if waits else "",
    )


def wait_of(frame: FrameType | None, world: Any) -> str:
    """A name for the wait that a thread is in; empty if it is in none. Each wait has a name of its own."""
    if frame is None:
        return ""
    files = [found.f_code.co_filename for found, _ in traceback.walk_stack(frame)]
    number = f"{world.traffic.num_exchanges if world is not None else 0}.{interruptible_waits.num_waits()}"
    if LOCAL_WAITS in files:
        if (transport := _message_transport(world)) is None:
            return f"{protocol.REMOTE} {number}"
        # a rank whose message has arrived can go on, though it may not have got a processor yet
        return "" if transport.has_pending_message() else f"{protocol.LOCAL} {number}"
    if PLAIN_WAITS in files or JOIN_WAITS in files:
        return f"{protocol.PLAIN} {number}"
    if REMOTE_WAITS in files:
        return f"{protocol.REMOTE} {number}"
    return f"{protocol.PLAIN} {number}.{id(frame)}.{frame.f_lasti}" if _may_block_in_torch(frame, world) else ""


def _call(world: Any) -> str:
    """The peer and the exchange for which this rank waits; empty in plain torch.distributed."""
    if world is None:
        return ""
    # by its class: a transport that records would record the question
    ask = getattr(type(world.transport), "awaited_call", None)
    found = None if ask is None else ask(world.transport)
    return "" if found is None else f"rank {found[0]} in {found[1]}"


def _may_block_in_torch(frame: FrameType, world: Any) -> bool:
    """Whether the innermost Python code is torch's own, at a call that waits for other ranks in C++.

    A backward waits there if it is DistributedDataParallel's. On a GPU it waits for the device, too.
    """
    while frame.f_code.co_filename.endswith(_TORCH_OPERATOR) and frame.f_back is not None:
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file.endswith(_TORCH_WAITS):
        return True
    return file.endswith(_BACKWARD) and not interruptible_waits.uses_gpu(world)


def _wanted_s() -> float:
    """The processor time of all other threads, and the time for which they waited for a processor. Only Linux tells."""
    here, wanted_ns = threading.get_native_id(), 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            running_ns, waiting_ns, _ = map(int, path.read_text().split())
        except OSError:  # it has just ended
            continue
        wanted_ns += (running_ns + waiting_ns) * (path.parent.name != str(here))
    return wanted_ns / 1e9


def _message_transport(world: Any) -> MessageTransport | None:
    """The world's transport if all its messages are in memory of this host. Loads torch, which a world needs anyway."""
    if world is None:
        return None
    from workbench.transport.messaging.message_transport import MessageTransport

    return world.transport if isinstance(world.transport, MessageTransport) else None
