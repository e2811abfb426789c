"""Detection of hangs over NCCL: ranks record their calls, and publish them in the store when one hangs.

NCCL matches calls by their order alone: the n-th send with the n-th receive between two ranks, the n-th all-reduce with
the n-th all-reduce in a group. So a rank counts its calls by *channel* (one rank to another, or a group) and keeps
their headers. Nothing is written while all is well. When a call has not ended after a moment, a rank publishes its
calls and reads those of the ranks that it waits for: two different calls with one number show that the ranks diverged.
A rank that has not reached the call yet may be slow; only the timeout ends that wait.

The main thread may be blocked in a wait for the device, so a separate thread checks, and aborts the call. torch has a
watchdog too, which ends the process together with the user's variables. ``disarm_torch`` leaves hangs to this one.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from workbench.transport.network.hang_detector import HAS_LEFT
from workbench.transport.peer_processes import PeerProcesses
from workbench.transport.rendezvous import Rendezvous

LOOK_S = 0.2
SUSPECT_S = 0.5
"""Age of a call from which the peers' calls are checked."""
_NUM_REMEMBERED = 32
"""Number of calls of a channel whose headers are kept."""
_NUM_SHOWN = 3
"""Number of unfinished calls in the text of an error."""
_GAVE_UP = "calls/gave up"
_TORCH_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # neither a timeout nor an error of NCCL ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # nor does an abort that takes long
}
_TORCHRUN_SETS = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
"""What torchrun puts into the environment of its workers if nobody has set it."""
_DUMP_WAIT = ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "250")
"""torch's watchdog sleeps four times as long when it has found an error, and its group cannot end before. By default
that is a minute, for a dump that nobody writes without its monitoring.
"""
_TORCH_WAITS_TIMES = 10
"""torch reports a call that has taken this multiple of our timeout."""
_log = logging.getLogger(__name__)


class Work(Protocol):
    """The handle that torch.distributed returns for a call."""

    def is_completed(self) -> bool: ...
    def wait(self) -> object: ...


@dataclass(slots=True, eq=False)
class Pending:
    """A call that has not ended.

    Attributes:
        works: torch's handles; None while torch has not returned them, as the first call on a communicator waits there
            for the peers. They hold the results: set others as soon as they have been waited for.
    """

    started_s: float
    header: str
    numbers: tuple[tuple[str, int], ...]
    ranks: frozenset[int]
    works: tuple[Work, ...] | None = None

    @property
    def has_ended(self) -> bool:
        """Whether all of it has been done."""
        return self.works is not None and all(work.is_completed() for work in self.works)


class StreamPosition:
    """The end of what the current stream of a device has been asked for, as a handle."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.get_device_module(device).Event()
        self._event.record()

    def is_completed(self) -> bool:
        """Whether the device has come to it."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Nothing: the stream is there already."""


def disarm_torch() -> None:
    """Keep torch's own watchdog from ending this process; call it before NCCL's group is made. What the user has set in
    the environment stays.
    """
    os.environ.setdefault(*_DUMP_WAIT)
    if dist.is_torchelastic_launched() and _TORCHRUN_SETS in os.environ.items():
        del os.environ[_TORCHRUN_SETS[0]]
    for name, value in _TORCH_SETTINGS.items():
        if os.environ.setdefault(name, value) != value:
            _log.warning(
                "%s=%s: a call over NCCL that hangs may end this process with its variables. The workbench needs %s to "
                "end it with CollectiveAborted. Unset the variable.",
                name,
                os.environ[name],
                value,
            )


def torch_timeout(timeout_s: float) -> datetime.timedelta:
    """The timeout of torch's groups: ours comes first."""
    return datetime.timedelta(seconds=_TORCH_WAITS_TIMES * timeout_s)


def send_channel(source: int, destination: int) -> str:
    """The channel from one rank to another."""
    return f"{source} -> {destination}"


def group_channel(ranks: Sequence[int]) -> str:
    """The channel of a group."""
    return f"group {sorted(ranks)}"


class NcclWatchdog:
    """Records one rank's calls and checks them against those of its peers.

    Args:
        end: called (on the watchdog's thread) with the reason when a call cannot end.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, timeout_s: float, end: Callable[[str], None]) -> None:
        self.rank, self._timeout_s, self._end = rank, timeout_s, end
        # A client of its own: torch waits for peers in calls of the other one, which serves nobody else meanwhile.
        self._store: Store = rendezvous.store.clone()  # type: ignore[attr-defined]
        self._processes = PeerProcesses(rendezvous.pids_beside(rank))
        self._calls: dict[str, tuple[int, deque[str]]] = {}
        self._pending: deque[Pending] = deque()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._how = ""

    def call(
        self, function: Callable[[], Work | None], header: str, channels: Sequence[str], ranks: Sequence[int]
    ) -> Pending:
        """Make a call of this rank on these channels, together with ``ranks``; it is recorded before it is made. One
        that returns None has ended then.
        """
        with suppress(RuntimeError):  # the thread reports it
            self._drop_ended()
        numbers = []
        with self._lock:
            for channel in channels:
                number, headers = self._calls.get(channel) or (0, deque(maxlen=_NUM_REMEMBERED))
                headers.append(header)
                self._calls[channel] = (number + 1, headers)
                numbers.append((channel, number + 1))
            others = frozenset(ranks) - {self.rank}
            pending = Pending(time.monotonic(), header, tuple(numbers), others)
            self._pending.append(pending)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="workbench-calls", daemon=True)
            self._thread.start()
        try:
            work = function()
            pending.works = () if work is None else (work,)
        finally:
            if pending.works is None:  # it failed: no hang of this rank, and peers must not take it for made
                with self._lock:
                    self._pending.remove(pending)
                    for channel, number in numbers:
                        last, headers = self._calls[channel]
                        if last == number:  # no other thread has made a later one
                            headers.pop()
                            self._calls[channel] = (last - 1, headers)
        return pending

    def find_hang(self) -> str | None:
        """Why the oldest call in flight cannot end; None if there is no call, or if it may still end."""
        try:
            oldest = self._drop_ended()
        except RuntimeError as error:
            header = self._pending[0].header
            return f"rank {self.rank} stopped waiting in {header}: NCCL reports {str(error).splitlines()[0]}"
        if oldest is None or time.monotonic() - oldest.started_s < SUSPECT_S:
            return None
        try:
            reason = self._hang_reason(oldest)
        except RuntimeError as error:
            reason = f"the store where the ranks have met cannot be reached: {str(error).splitlines()[0]}"
        if reason is None:
            return None
        return ". ".join(
            filter(None, [f"rank {self.rank} stopped waiting in {oldest.header}: {reason}", unfinished_calls()])
        )

    def end(self, how: str) -> None:
        """Publish that this rank has ended; ``how`` follows "rank 2" in a sentence."""
        if self._how:
            return
        self._how = how[:2000]
        with suppress(RuntimeError):  # the rank that served the store may have ended
            self._write()
            if how != HAS_LEFT and not self._store.check([_GAVE_UP]):
                self._store.set(_GAVE_UP, f"rank {self.rank} {self._how}")

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK_S)
        self._processes.close()

    def _drop_ended(self) -> Pending | None:
        """Forget the calls that have ended; returns the oldest of the others."""
        with self._lock:
            while self._pending and self._pending[0].has_ended:
                self._pending.popleft()
            return self._pending[0] if self._pending else None

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            reason = self.find_hang()
            if reason is not None:
                self._end(reason)
                return

    def _hang_reason(self, call: Pending) -> str | None:
        for peer in sorted(call.ranks):
            if self._processes.has_ended(peer):
                return f"process {self._processes.pids[peer]} of rank {peer} has ended"
            stopped = self._processes.stopped_reason(peer)
            if stopped is not None:
                return stopped
        if self._store.check([_GAVE_UP]):  # a failure of any rank ends the world
            return self._store.get(_GAVE_UP).decode()
        self._write()
        statuses = {peer: status for peer in sorted(call.ranks) if (status := self._read(peer)) is not None}
        for peer, status in statuses.items():
            other = _different_call(call, status)
            if other is not None:
                channel, number, header = other
                return (
                    f"ranks diverged: call {number} of {channel} is {header} on rank {peer}. "
                    "All ranks must run the same program."
                )
            if status["ended"] and not _has_made(call, status):
                return f"rank {peer} {status['ended']}"
        if (error := group_error()) is not None:  # the call counts as completed, and the device waits for ever
            return f"NCCL reports {error}, as when a host is lost; torch's own lines on this rank say more"
        if time.monotonic() - call.started_s > self._timeout_s:
            last = "; ".join(f"rank {peer} {_last_of(call, statuses.get(peer))}" for peer in sorted(call.ranks))
            return f"it has not ended for {self._timeout_s:g} s; {last}"
        return None

    def _write(self) -> None:
        with self._lock:
            calls = {channel: (number, list(headers)) for channel, (number, headers) in self._calls.items()}
        self._store.set(f"calls/{self.rank}", json.dumps({"calls": calls, "ended": self._how}))

    def _read(self, rank: int) -> dict[str, Any] | None:
        key = f"calls/{rank}"
        found: dict[str, Any] | None = json.loads(self._store.get(key)) if self._store.check([key]) else None
        return found


def _header_of(status: dict[str, Any], channel: str, number: int) -> str | None:
    """The header of call ``number`` of a rank; None if it was not made yet, or is not kept any more."""
    last, headers = status["calls"].get(channel, (0, []))
    index = len(headers) - 1 - (last - number)
    return headers[index] if 0 <= index < len(headers) else None


def _different_call(call: Pending, status: dict[str, Any]) -> tuple[str, int, str] | None:
    for channel, number in call.numbers:
        header = _header_of(status, channel, number)
        if header is not None and header != call.header:
            return channel, number, header
    return None


def _has_made(call: Pending, status: dict[str, Any]) -> bool:
    return any(status["calls"].get(channel, (0,))[0] >= number for channel, number in call.numbers)


def _last_of(call: Pending, status: dict[str, Any] | None) -> str:
    """The last call of a rank on the channels of ``call``, for error texts."""
    for channel, _ in call.numbers:
        number, headers = (status or {"calls": {}})["calls"].get(channel, (0, []))
        if headers:
            return f"has made {number} calls of {channel}, the last one {headers[-1]}"
    return "has recorded no such call"


def group_error() -> str | None:
    """The name of the first error that torch's own watchdog has found in a call over NCCL, such as ``COMM_ERROR``."""
    for group in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError, AttributeError):  # a group of another backend
            found = group._get_backend(torch.device("cuda")).get_error().name
            if found != "SUCCESS":
                return str(found)
    return None


def unfinished_calls() -> str:
    """The calls that NCCL has not ended, oldest first; empty where torch has no NCCL, or has recorded nothing."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # of builds with NCCL
    if dump is None:
        return ""
    try:
        return describe_dump(json.loads(dump(includeCollectives=True, onlyActive=True)))
    except (RuntimeError, TypeError, ValueError, LookupError) as error:  # a text for an error must not be another one
        return f"torch's record of NCCL cannot be read: {error}"


def describe_dump(dump: Mapping[str, Any]) -> str:
    """The same for a dump of the recorder, in the format 2.x.

    >>> entry = dict(profiling_name="nccl:all_reduce", state="scheduled", is_p2p=False, collective_seq_id=5)
    >>> describe_dump({"entries": [entry | dict(process_group=["0", "default_pg"], input_sizes=[[25]])]})
    'NCCL has not ended 1 call: all_reduce of [25], number 5 of group default_pg'
    """
    calls = [_describe(entry, dump) for entry in dump.get("entries", ()) if entry["state"] != "completed"]
    if not calls:
        return ""
    more = f"; and {len(calls) - _NUM_SHOWN} more" if len(calls) > _NUM_SHOWN else ""
    return f"NCCL has not ended {len(calls)} call{'s' * (len(calls) > 1)}: {'; '.join(calls[:_NUM_SHOWN])}{more}"


def _describe(entry: Mapping[str, Any], dump: Mapping[str, Any]) -> str:
    name, description = entry["process_group"]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    sizes = "".join(f" of {size}" for size in entry["input_sizes"][:1] or entry["output_sizes"][:1])
    ranks = dump.get("pg_config", {}).get(name, {}).get("ranks", "")
    function = entry["profiling_name"].removeprefix("nccl:")
    group = " ".join(filter(None, [name if description == "undefined" else description, ranks]))
    return f"{function}{sizes}, number {number} of group {group}"
