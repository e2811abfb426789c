"""What ends a transport over letters: its user, in good order, or whatever breaks off one of its calls."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from workbench.errors import CollectiveAborted
from workbench.transport.letters.board import FAILED, LEFT, Board
from workbench.transport.letters.link import Link
from workbench.transport.letters.waits import Waiter

T = TypeVar("T", bound="OverLetters")
P = ParamSpec("P")
R = TypeVar("R")


def ends_the_transport(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
    """An exchange that was broken off leaves letters behind: neither this rank nor its peers may go on with them."""

    @wraps(method)
    def run(self: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._waiter.abort_reason is not None:
            self.give_up()
            raise CollectiveAborted(f"rank {self.rank}: this world has ended: {self._waiter.abort_reason}")
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._waiter.abort_reason = self._waiter.abort_reason or str(error) or type(error).__name__
            self.give_up()
            raise

    return run


class OverLetters(ABC):
    """What transports over letters have in common: how they end, and how they get the last letters out."""

    def __init__(self, rank: int, board: Board, links: Mapping[int, Link], waiter: Waiter) -> None:
        self.rank, self.world_size = rank, len(links) + 1
        self._board, self._links, self._waiter = board, links, waiter
        self._is_closed = False
        self.tell_also: Callable[[str], None] = lambda reason: None
        """Called with the reason when this rank gives up; ranks of other hosts may wait for it."""

    @ends_the_transport
    def flush(self) -> None:
        """What was sent is a copy; only letters for which a ring had no room are left to send."""
        started = time.perf_counter()
        for link in self._links.values():
            while not link.push():
                self._waiter.wait_for_room(link, time.perf_counter() - started)

    def abort(self, reason: str) -> None:
        """See ``base.Transport``."""
        self._waiter.abort_reason = self._waiter.abort_reason or reason

    def give_up(self) -> None:
        """Tell the peers that this rank takes no part any more."""
        reason = self._waiter.abort_reason = self._waiter.abort_reason or "it was told to"
        if not self._is_closed:
            self._board.end(FAILED, reason)
            self.tell_also(reason)

    def close(self) -> None:
        """See ``base.Transport``; peers can still read the last letters."""
        if self._is_closed:
            return
        if self._waiter.abort_reason is None:
            self._let_peers_read()
            self._board.end(LEFT)
            self._waiter.abort_reason = "this rank has left it"
        else:
            self.give_up()  # the reason may not have met a wait yet
        self._is_closed = True
        self._free()

    @abstractmethod
    def _let_peers_read(self) -> None:
        """Wait, within reason, until the last letters can be done without this rank."""

    @abstractmethod
    def _free(self) -> None:
        """Give back files and memory."""


__all__ = ["OverLetters", "ends_the_transport"]
