"""After a loss, on the notebook's side: which cells are set-up, and the table of what was recovered.
`on_engine/recovery` does the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.errors import CellError, SessionError
from workbench.session.protocol import SavedCheckpoint
from workbench.session.ranks import describe_ranks
from workbench.units import counted

COMMAND = "%workbench recover"
_WIDEST = 40
_MAX_NAMES = 12
_HOW_TO_MARK = (
    f"To get them, run {COMMAND}; then run the cells that make model and optimizer with %%global --setup, and "
    f"{COMMAND} again."
)


@dataclass(slots=True)
class Losses:
    """What a session's engines have lost.

    Attributes:
        ranks: those whose engines are new, and whose variables are neither recovered nor made again by cells. If these
            are all, no rank lacks what another one has; only a checkpoint may have more.
        has_parts: whether parts of variables are lost, with engines that had died and were given back.
        number: how often something was lost.
    """

    ranks: set[int] = field(default_factory=set)
    has_parts: bool = False
    number: int = 0

    def __bool__(self) -> bool:
        return bool(self.ranks) or self.has_parts

    def add(
        self, ranks: Collection[int], num_ranks: int, names: Callable[[int], Collection[str] | None] = lambda _: None
    ) -> None:
        """Engines of these ranks are replaced or added, where the session has had ``num_ranks``.

        Ranks that were replaced before are whole again if cells have made there since what all whole ranks hold; or,
        where no whole rank is left, what all that hold something hold.

        Args:
            names: the variables of a rank now; None if it does not answer. It is called only after an earlier loss.
        """
        there = sorted(set(range(num_ranks)) - set(ranks)) if self.ranks else []
        held = {rank: set(names(rank) or ()) for rank in there}
        whole = [rank for rank in there if rank not in self.ranks] or there
        if answers := [held[rank] for rank in whole if held[rank]]:
            self.ranks -= {rank for rank in there if held[rank] >= set.intersection(*answers)}
        self.ranks |= set(ranks)
        self.number += 1

    def lacking(self, num_ranks: int) -> tuple[int, ...]:
        """The ranks that lack what another one of ``num_ranks`` has."""
        return tuple(sorted(self.ranks)) if len(self.ranks) < num_ranks else ()


def describe_loss(ranks: Sequence[int], how: str, names: Sequence[str] | None, are_all_lost: bool) -> str:
    """A line about engines that are replaced: their ranks, how they ended, and the variables, None if unknown."""
    what = f"workbench: {describe_ranks(ranks)} died ({how}) and {'is' if len(ranks) == 1 else 'are'} started again"
    if are_all_lost:
        return f"{what}; all variables are lost. To run set-up cells and load the newest checkpoint: {COMMAND}"
    if names is None:  # a rank that has them is stuck, or the machine is busy
        return f"{what}; their variables are lost. To bring them back: {COMMAND}"
    if not names:
        return f"{what} without variables"
    return f"{what}; lost: {_listed(names)}. To bring them back: {COMMAND}"


def describe_repeated_loss(ranks: Sequence[int], num_starts: int, how: Callable[[int], str]) -> str:
    """An error about engines that have ended whenever they were started; ``how`` is how one of a rank has ended."""
    ways = "; ".join(dict.fromkeys(map(how, ranks)))
    return (
        f"{describe_ranks(ranks)} died {num_starts} times in a row while joining the other ranks ({ways}). The next "
        f"cell or run starts {'it' if len(ranks) == 1 else 'them'} again: free memory on the host before, or begin "
        f"with fewer engines (%workbench stop, then start)."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def refuse_to_give_back(num_engines: int, holders: Mapping[int, Sequence[str]]) -> None:
    """Raise SessionError if engines are to be given back with variables that other ranks lack.

    Args:
        num_engines: that stay.
        holders: ranks that have them and would be given back, with the names if these are known.
    """
    if not holders:
        return
    names = sorted({name for each in holders.values() for name in each})
    raise SessionError(
        f"resize({num_engines}): {describe_ranks(holders)}, which would be given back, still "
        f"{'has' if len(holders) == 1 else 'have'} variables that other ranks lack"
        f"{f': {_listed(names)}' if names else ''}. No engine was given back. Bring them to all ranks first: "
        f"{COMMAND}. To give them up: %workbench restart."
    )


class SetupCells:
    """The cells that make what training needs, in the order of their first runs."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[str, tuple[int, ...] | None]] = {}

    def record(self, name: str, code: str, ranks: tuple[int, ...] | None, is_setup: bool = True) -> None:
        """Remember a cell that has run, on all ranks if None; its code is its name if that is empty. An earlier one of
        this name is replaced in its place, and forgotten if this run is not set-up: its code may be out of date.
        """
        if is_setup:
            self._cells[name or code] = (code, ranks)
        elif self._cells.pop(name, None) is not None:
            print(
                "workbench: this cell is no longer marked as set-up, as it ran without --setup. "
                f"{COMMAND} runs {counted(len(self._cells), 'other cell')} again.",
                file=sys.stderr,
            )

    def __bool__(self) -> bool:
        return bool(self._cells)

    def recover(
        self,
        losses: Losses,
        saved: list[SavedCheckpoint],
        call: Callable[..., list[Any]],
        run: Callable[..., object],
    ) -> Recovered:
        """What `Session.recover` does when all ranks are there.

        Args:
            losses: of the session's engines; none afterwards.
            saved: the session's checkpoints, oldest first.
            call: calls a function on all ranks.
            run: runs code on ranks.
        """
        if not losses:
            return Recovered()
        from workbench.session.on_engine import recovery as on_engine  # loads torch

        lost = sorted(losses.ranks)
        held = call(on_engine.keep, (losses.number, lost))
        try:
            num_cells = self.run_again(set().union(*held), run, len(held), are_all_lost=len(lost) == len(held))
            rows = call(on_engine.restore, (lost, saved))[0]
        except BaseException:
            call(on_engine.put_back, ())
            raise
        losses.ranks -= set(lost)
        losses.has_parts = False
        return Recovered(tuple(lost), num_cells, rows)

    def run_again(
        self, parts: Collection[str], run: Callable[..., object], num_ranks: int, are_all_lost: bool = False
    ) -> int:
        """Run the cells on those of their ranks that are there; returns how many ran.

        Args:
            parts: names of modules and optimizers, which nothing but a cell can make.
            run: runs code on ranks.
            num_ranks: of the session now.
            are_all_lost: no rank has variables from before.

        Raises:
            SessionError: a cell failed, or only cells can make what was lost and there is none.
        """
        cells = [
            (number, code, None if ranks is None else tuple(rank for rank in ranks if rank < num_ranks))
            for number, (code, ranks) in enumerate(self._cells.values(), start=1)
        ]
        cells = [cell for cell in cells if cell[2] != ()]
        if not cells and are_all_lost:
            raise SessionError(
                "recover: no cell is marked as set-up, and all ranks have lost their variables, so nothing can make "
                "them again. Run your cells, those that make model and optimizer with %%global --setup; "
                "wb.checkpoint.load brings back what you have saved."
            )
        if not cells and parts:
            raise SessionError(
                f"recover: no cell is marked as set-up, and only cells can make {', '.join(sorted(parts))} again. "
                f"Run them with %%global --setup, without the training loop, then {COMMAND} once more. Until then all "
                f"is kept that the other ranks hold."
            )
        for number, code, ranks in cells:
            try:
                run(code, ranks, values=False, label=f"set-up cell {number}")
            except CellError as error:
                raise SessionError(
                    f"recover: set-up cell {number} of {len(self._cells)} failed, so nothing is recovered yet; ranks "
                    f"that were not replaced have their variables back, the others have none. Change the cell, run it "
                    f"with %%global --setup (and before it those that make what it reads; what it reads from %push, "
                    f"push again), then {COMMAND} once more.\n"
                    f"{error}"
                ) from None
        return len(cells)


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `Session.recover` did.

    ``rows`` has for each variable where its value came from, or that it is lost and why; ``print`` shows them as a
    table. Variables that are as their set-up cells make them have no row.
    """

    ranks: tuple[int, ...] = ()  #: that had lost their variables
    num_cells: int = 0  #: that ran again
    rows: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        if not self.ranks and not self.num_cells:
            return "workbench: no rank has lost its variables, so there is nothing to recover"
        what = describe_ranks(self.ranks) if self.ranks else "what lay on engines that are gone"
        head = f"workbench: recovered {what}; {counted(self.num_cells, 'set-up cell')} ran again"
        return "\n".join([head, *_table(self.rows)])


@dataclass(frozen=True, slots=True)
class Resized:
    """What `Session.resize` did; ``print`` shows it.

    ``rows`` has for each variable that lay on engines which were given back how it lies now. ``recovered`` is the table
    of new ranks' variables, None if none could be brought there yet.
    """

    before: int  #: the number of engines
    now: int
    rows: list[tuple[str, str]] = field(default_factory=list)
    recovered: Recovered | None = None
    lacking: tuple[int, ...] = ()  #: ranks that have no variables, though others have
    has_lost_parts: bool = False  #: whether engines that had died were given back

    def __str__(self) -> str:
        lines = [f"workbench: {counted(self.now, 'engine')} now, {self.before} before", *_table(self.rows)]
        if self.rows:
            lines.append("Another strategy for a model: wb.parallelize(model, strategy, optimizer=optimizer)")
        if self.recovered is not None:
            lines.append(str(self.recovered))
        else:
            have = "has" if len(self.lacking) == 1 else "have"
            missing = [f"{describe_ranks(self.lacking)} {have} no variables."] if self.lacking else []
            if self.has_lost_parts:
                missing.append("Engines that had died were given back with their variables.")
            lines += [" ".join([*missing, _HOW_TO_MARK])] if missing else []
        return "\n".join(lines)


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """One line for each source, with the names of all that came from there; losses last."""
    sources: dict[str, list[str]] = {}
    for name, source in rows:
        sources.setdefault(source, []).append(name)
    last = sorted(sources, key=lambda source: source.startswith("lost"))
    names = {source: ", ".join(sources[source]) for source in last}
    width = min(_WIDEST, max(map(len, names.values()), default=0))
    return [f"  {each:<{width}}  {source}" for source, each in names.items()]
