"""How a request ended, rank by rank, and what a cell returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from workbench.session import protocol


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell: its output as text, the last expression's value by rank, and its time.

    ``values`` has one entry per rank that ran the cell, in rank order. An entry is None if the cell ends in a
    statement. If all ranks ran the cell, the entry of a global tensor is its logical tensor. ``rank_elapsed_s`` has, in
    the same order, the seconds after which each rank was done.
    """

    text: str
    values: list[Any]
    elapsed_s: float
    rank_elapsed_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """How every rank of a run ended."""

    ranks: tuple[int, ...]
    replies: dict[int, Any] = field(default_factory=dict)
    values: dict[int, Any] = field(default_factory=dict)
    failures: dict[int, protocol.Failure] = field(default_factory=dict)
    dead: dict[int, str] = field(default_factory=dict)  #: rank -> how it ended
    places: dict[int, str] = field(default_factory=dict)  #: rank -> where it was when it was stopped
    calls: dict[int, str] = field(default_factory=dict)  #: rank -> what it waited for when the ranks had diverged
    stopped: tuple[int, ...] = ()  #: ranks that had to be stopped
    stop_reason: str = ""  #: "failure", "interrupt", "restart", "timeout", "divergence", "deadlock", "closed" or ""
    replaced: tuple[int, ...] = ()  #: ranks whose engines a restart replaces
    killed: tuple[int, ...] = ()
    unended: dict[int, str] = field(default_factory=dict)  #: those of them that had time, and what they did not end
    progress: dict[int, protocol.Progress] = field(default_factory=dict)  #: of ranks that have exchanged data
    checkpoints: list[protocol.SavedCheckpoint] = field(default_factory=list)  #: that the notebook is told of
    unlike_counts: str = ""  #: an error if ranks have called unlike numbers of exchanges
    elapsed_s: float = 0.0
    replied_s: dict[int, float] = field(default_factory=dict)  #: rank -> seconds after which it replied

    @property
    def ok(self) -> bool:
        return not self.failures and not self.dead and not self.stop_reason and not self.unlike_counts

    @property
    def reason(self) -> str:
        """Why it failed, in one line: the error of a rank before what ended the others. Empty if it has not failed."""
        own = [(one.time_s, rank, one) for rank, one in self.failures.items() if not one.was_stopped]
        causes = [f"rank {rank}: {one.kind}: {one.message}" for _, rank, one in sorted(own, key=lambda each: each[:2])]
        causes += [f"rank {rank}: {how}" for rank, how in sorted(self.dead.items()) if self.stop_reason != "closed"]
        return next(iter(causes), self.stop_reason or self.unlike_counts)

    @property
    def left_exchanges_open(self) -> bool:
        """Whether the ranks may have different exchanges open: a wait was ended, a pipeline's step broke off, only some
        ranks failed, or some have called more exchanges."""
        only_some = 0 < len(self.failures) < len(self.ranks)
        return bool(only_some or self.unlike_counts) or any(
            failure.was_stopped or failure.broke_off_step for failure in self.failures.values()
        )
