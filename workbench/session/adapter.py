"""The only file that touches ipyparallel's private parts; tests/session/test_adapter.py pins each of them.

`Engines` sends requests through ipyparallel's own views and turns all that comes back (output,
values, replies) into `Event`s in one queue per request, in the order of arrival.

Private parts used, and why:
    Client._io_loop          callbacks are attached where messages are handled, and before the first one is
    AsyncResult._children    one future per rank, with its output future and its `iopub_callbacks`
    Client._send, _control_stream, _build_targets    messages on the control channel, which has no public call
    Client.history           grows with every request and is emptied by `forget`
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ipyparallel as ipp

from workbench.session import protocol
from workbench.transport.held_interrupt import HeldInterrupt


@dataclass(frozen=True, slots=True)
class Event:
    """One message from a rank.

    kind and content: ``stream`` (name, text); ``display``, ``result`` and ``update`` of an earlier display (a MIME
    bundle with metadata); ``clear`` (wait: only before the next output);
    ``data`` (a value of the protocol); ``reply`` (the exception, or the returned value); ``idle`` (None: output is
    complete); ``wake`` (None: look at the clock).
    """

    kind: str
    rank: int
    content: Any
    time_s: float


class Request:
    """One request to some ranks, with the queue of their events.

    Args:
        run: the number in its tag.
    """

    def __init__(self, ranks: Sequence[int], run: int = 0) -> None:
        self.ranks, self.run = tuple(ranks), run
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._held: HeldInterrupt | None = None

    @classmethod
    @contextmanager
    def sending(cls, ranks: Sequence[int], run: int = 0) -> Iterator[Request]:
        """A new request; interrupts wait from here until `release`, or until it could not be sent."""
        request = cls(ranks, run)
        request.hold_interrupts()
        try:
            yield request
        except BaseException:
            if request.release():
                raise KeyboardInterrupt from None
            raise

    def hold_interrupts(self) -> None:
        """Let interrupts of the main thread wait, and wake who waits for events."""
        self._held = HeldInterrupt(lambda: self.put("wake", -1, None))

    @property
    def is_interrupted(self) -> bool:
        """Whether an interrupt waits."""
        return self._held is not None and self._held.has_come

    def take_interrupt(self) -> bool:
        """Whether an interrupt waits. It then counts as handled."""
        return self._held is not None and self._held.take()

    def release(self) -> bool:
        """Hold no interrupt any more; returns whether one waits that nobody has handled."""
        return self._held is not None and self._held.end()

    def put(self, kind: str, rank: int, content: Any) -> None:
        """Append an event; from any thread, and from a signal's handler."""
        self.events.put(Event(kind, rank, content, time.monotonic()))

    def take(self, timeout_s: float) -> Event | None:
        """The next event, if one comes in this time."""
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def attach(self, ranks: Sequence[int], result: ipp.AsyncResult) -> None:
        """Listen to the ranks of a result; runs on the client's I/O thread, before it reads the first message."""
        for rank, child in zip(ranks, result._children, strict=True):
            metadata = child.output.metadata
            child.iopub_callbacks.append(partial(self._on_message, rank, metadata))
            child.add_done_callback(partial(self._on_reply, rank))
            child.output.add_done_callback(lambda _future, rank=rank: self.put("idle", rank, None))

    def _on_message(self, rank: int, metadata: dict[str, Any], message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "stream":
            self.put("stream", rank, (content["name"], content["text"]))
        elif kind == "display_data":
            self.put("display", rank, content)
        elif kind == "execute_result":
            self.put("result", rank, content)
        elif kind == "update_display_data":
            self.put("update", rank, content)
        elif kind == "clear_output":
            self.put("clear", rank, {"wait": content["wait"]})
        elif kind == "data_message":
            self._take_data(rank, metadata)
        self._clear(metadata)

    def _take_data(self, rank: int, metadata: dict[str, Any]) -> None:
        data = metadata["data"]
        for key in [key for key in data if key.startswith(protocol.WIRE_KEY)]:
            self.put("data", rank, data.pop(key))

    @staticmethod
    def _clear(metadata: dict[str, Any]) -> None:
        """ipyparallel keeps all output of a request, and copies all of it for every new piece."""
        metadata["stdout"] = metadata["stderr"] = ""
        metadata["outputs"].clear()
        metadata["execute_result"] = None

    def _on_reply(self, rank: int, future: Any) -> None:
        self.put("reply", rank, future.exception() or future.result())


class Engines:
    """All engines of a session, by rank.

    Args:
        ids: by rank, the engine's id in ipyparallel. Engines that a profile starts get the next free ones.
    """

    def __init__(self, client: ipp.Client, ids: Iterable[int]) -> None:
        self.client = client
        self._ids = list(ids)
        self._views: dict[tuple[int, ...], ipp.DirectView] = {}

    def registered(self) -> list[int]:
        """The ranks that are registered now."""
        known = set(self.client.ids)
        return [rank for rank, number in enumerate(self._ids) if number in known]

    def assign(self, ranks: Sequence[int], ids: Sequence[int]) -> None:
        """Let other engines be these ranks, or the ranks behind the last one."""
        for rank, number in zip(ranks, ids, strict=True):
            self._ids[rank : rank + 1] = [number]
        self._views.clear()

    def reorder(self, order: Sequence[int]) -> None:
        """Number the ranks anew: ``order[0]`` is the rank that becomes rank 0."""
        self._ids = [self._ids[rank] for rank in order]
        self._views.clear()

    def drop(self, num_ranks: int) -> None:
        """Forget the ranks behind the first ``num_ranks``."""
        del self._ids[num_ranks:]
        self._views.clear()

    def execute(self, ranks: Sequence[int], code: str, tag: protocol.CellTag) -> Request:
        """Run code in the engines' namespace."""
        with Request.sending(ranks, tag.run) as request, self._answers_wait():
            result = self._view(request.ranks).execute(code, silent=False, block=False, label=str(tag))
            self.client._io_loop.add_callback(request.attach, request.ranks, result)
        return request

    def apply(self, ranks: Sequence[int], function: Callable, arguments: tuple, tag: protocol.CellTag) -> Request:
        """Call an importable function on the engines' main thread."""
        with Request.sending(ranks, tag.run) as request:
            self._send_call(request, ranks, function, arguments, tag)
        return request

    def apply_each(
        self, ranks: Sequence[int], function: Callable, arguments: Sequence[tuple], tag: protocol.CellTag
    ) -> Request:
        """Call an importable function with each rank's own arguments."""
        with Request.sending(ranks, tag.run) as request:
            for rank, own in zip(ranks, arguments, strict=True):
                self._send_call(request, [rank], function, own, tag)
        return request

    def signal(self, ranks: Sequence[int], name: str | int) -> dict[int, ControlCall]:
        """Have the nannies send a signal to those of the ranks that are alive. Their answers say that it was sent.

        The signal 0 has no effect: only the nannies answer.
        """
        return self._send(ranks, "signal_request", {"sig": name})

    def control(self, ranks: Sequence[int], operation: str, **arguments: Any) -> dict[int, ControlCall]:
        """Ask the engines' control threads; answers also come while their main threads are stuck."""
        return self._send(ranks, protocol.CONTROL_REQUEST, {"op": operation, "arguments": arguments})

    def _send(self, ranks: Sequence[int], kind: str, content: dict[str, Any]) -> dict[int, ControlCall]:
        calls = {}
        known = set(self.client.ids)
        for rank in ranks:
            if rank < len(self._ids) and self._ids[rank] in known:
                try:
                    idents, _ = self.client._build_targets([self._ids[rank]])
                except KeyError:  # it has just ended
                    continue
                future = self.client._send(self.client._control_stream, kind, content=content, ident=idents[0])
                calls[rank] = ControlCall(future)
        return calls

    def wait_until_gone(self, ranks: Sequence[int], timeout_s: float = 60.0) -> None:
        """Wait until the controller has noticed that these engines ended, so that their ids are free again."""
        deadline_s = time.monotonic() + timeout_s
        while set(ranks) & set(self.registered()) and time.monotonic() < deadline_s:
            time.sleep(0.02)

    def forget(self) -> None:
        """Drop what the client remembers of finished requests."""
        self.client.history.clear()
        for view in self._views.values():
            view.history.clear()

    def close(self) -> None:
        self.client.close(linger=0)

    def _send_call(
        self, request: Request, ranks: Sequence[int], function: Callable, arguments: tuple, tag: protocol.CellTag
    ) -> None:
        view = self._view(tuple(ranks))
        with self._answers_wait(), view.temp_flags(label=str(tag), block=False):
            result = view.apply_async(function, *arguments)
            self.client._io_loop.add_callback(request.attach, tuple(ranks), result)

    @contextmanager
    def _answers_wait(self) -> Iterator[None]:
        """Context in which the client reads no message: what it reads before somebody listens loses its order."""
        is_over = threading.Event()
        self.client._io_loop.add_callback(is_over.wait)
        try:
            yield
        finally:
            is_over.set()

    def _view(self, ranks: tuple[int, ...]) -> ipp.DirectView:
        if ranks not in self._views:
            self._views[ranks] = self.client.direct_view([self._ids[rank] for rank in ranks])
        return self._views[ranks]


class ControlCall:
    """The answer of one control thread, which may not have arrived yet."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def has_arrived(self, timeout_s: float) -> bool:
        """Whether there is an answer, after at most this time."""
        return bool(self._future.wait(timeout_s))

    def answer(self, timeout_s: float) -> Any:
        """The result of the operation; None if it failed or no answer came in time."""
        if not self.has_arrived(timeout_s):
            return None
        message = self._future.result()
        if message["content"].get("status") != "ok":
            return None
        return protocol.load(bytes(message["buffers"][0]))
