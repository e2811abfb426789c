"""Base of the transports over messages: an orderly close, and a failure that reaches all peers."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from workbench.errors import CollectiveAborted
from workbench.transport.base import reason_of
from workbench.transport.messaging.control_page import FAILED, LEFT, ControlPage
from workbench.transport.messaging.link import Link
from workbench.transport.messaging.waiter import Waiter

T = TypeVar("T", bound="MessageTransport")
P = ParamSpec("P")
R = TypeVar("R")


def closes_on_error(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """Decorate a method of a transport so that an error in it ends the transport.

    An interrupted exchange leaves messages behind, so neither this rank nor its peers may continue.
    """

    @wraps(method)
    def run(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.waiter.abort_reason is not None:
            self.fail()
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self.waiter.abort_reason}")
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self.waiter.abort_reason = self.waiter.abort_reason or reason_of(error)
            self.fail()
            raise

    return run


class MessageTransport(ABC):
    """Common part of the transports over messages: how they end, and how they deliver their last messages.

    Attributes:
        waiter: waits for messages of peers, and says why a wait has to end.
    """

    def __init__(self, rank: int, page: ControlPage, links: Mapping[int, Link], waiter: Waiter) -> None:
        self.rank, self.world_size = rank, len(links) + 1
        self._page, self._links, self.waiter = page, links, waiter
        self._is_closed = False
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Called with the reason when this rank fails: ranks of other hosts may wait for it."""

    def flush(self) -> None:
        """Send the messages that had no room in their rings; all data was copied when it was sent. A world that has
        ended sends nothing more.
        """
        if self.waiter.abort_reason is None and not all(link.send_queued() for link in self._links.values()):
            self._wait_for_room()

    @closes_on_error
    def _wait_for_room(self) -> None:
        started = time.perf_counter()
        for link in self._links.values():
            while not link.send_queued():
                self.waiter.wait_for_room(link, time.perf_counter() - started)

    @closes_on_error
    def _run(self, finish: Callable[[], Any]) -> Any:
        """The result of the second half of an exchange."""
        return finish()

    def has_pending_message(self) -> bool:
        """Whether a wait of this rank is about to end; may be asked from another thread."""
        return self.waiter.has_pending_message()

    def awaited_call(self) -> tuple[int, str] | None:
        """See ``base.Transport``."""
        return self.waiter.awaited_call()

    def abort(self, reason: str) -> None:
        """See ``base.Transport``."""
        self.waiter.abort_reason = self.waiter.abort_reason or reason

    def fail(self) -> None:
        """Publish that this rank has failed, so that waits of its peers end."""
        reason = self.waiter.abort_reason = self.waiter.abort_reason or "it was aborted"
        if not self._is_closed:
            self._page.end(FAILED, reason)
            self.on_failure(reason)

    def close(self) -> None:
        """See ``base.Transport``; peers can still read the last messages."""
        if self._is_closed:
            return
        if self.waiter.abort_reason is None:
            self._let_peers_read()
            self._page.end(LEFT)
            self.waiter.abort_reason = "this rank has left it"
        else:
            self.fail()  # no wait may have seen the reason yet
        self._is_closed = True
        self._free()

    @abstractmethod
    def _let_peers_read(self) -> None:
        """Wait, for a limited time, until peers can read the last messages without this rank."""

    @abstractmethod
    def _free(self) -> None:
        """Close files and free memory."""
