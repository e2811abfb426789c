"""Engines that are lists of answers: a test says when each message arrives, and what a rank says then."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from workbench.session.protocol import RankStatus


class Call:
    """A question; ``answer_now`` says what has come back so far."""

    def __init__(self, answer_now: Callable[[], Any]) -> None:
        self._answer_now = answer_now

    def has_arrived(self, timeout_s: float) -> bool:
        return self._answer_now() is not None

    def answer(self, timeout_s: float) -> Any:
        return self._answer_now()


class PlayedEngines:
    """Records what is sent. ``statuses`` are the ranks' answers now; a rank without one is silent, and so is a nanny
    that is not among ``nannies``.
    """

    def __init__(self, statuses: dict[int, RankStatus], nannies: Collection[int] = ()) -> None:
        self.statuses, self.nannies = statuses, set(nannies)
        self.sent: list[tuple[str, tuple[int, ...]]] = []
        self._arguments: list[tuple[str, dict[str, Any]]] = []
        self.killed: list[int] = []
        self.ended: set[int] = set()
        self.on_interrupt: Callable[[Sequence[int]], None] = lambda ranks: None

    def control(self, ranks: Sequence[int], operation: str, **arguments: Any) -> dict[int, Call]:
        self.sent.append((operation, tuple(ranks)))
        self._arguments.append((operation, arguments))
        if operation == "interrupt":
            self.on_interrupt(ranks)
        return {rank: Call(lambda rank=rank: self.statuses.get(rank)) for rank in ranks}

    def arguments(self, operation: str) -> list[dict[str, Any]]:
        """The arguments with which ranks were asked for an operation, in the order of sending."""
        return [told for sent, told in self._arguments if sent == operation]

    def signal(self, ranks: Sequence[int], name: str | int) -> dict[int, Call]:
        if name and ranks:
            self.sent.append((str(name), tuple(ranks)))
        return {rank: Call(lambda rank=rank: True if rank in self.nannies else None) for rank in ranks}

    def forget(self) -> None:
        pass

    # what a run needs of processes

    num_ranks = 1

    def kill(self, ranks: Sequence[int]) -> None:
        self.killed += ranks

    def pids(self) -> list[int]:
        return []

    def dead(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if rank in self.ended]

    def how_ended(self, rank: int) -> str:
        return "killed"

    def is_stopped(self, rank: int) -> bool:
        return False
