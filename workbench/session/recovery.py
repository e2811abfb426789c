"""After a loss, on the notebook's side: which cells are set-up, cells that a replaced rank cannot run, and the table of
what was recovered. `on_engine/recovery` does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from workbench.errors import CellError, SessionError
from workbench.session.first_reads import first_reads
from workbench.session.protocol import Failure
from workbench.session.ranks import describe_ranks
from workbench.units import counted

COMMAND = "%workbench recover"
_WIDEST = 40


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """A context that calls ``undo`` if its body fails or is interrupted."""
    try:
        yield
    except BaseException:
        undo()
        raise


class SetupCells:
    """The cells that make what training needs, in the order of their first runs."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[str, tuple[int, ...]]] = {}

    def record(self, name: str, code: str, ranks: tuple[int, ...]) -> None:
        """Remember a cell that has run. An earlier one of this name is replaced in its place."""
        self._cells[name] = (code, ranks)

    def run_again(self, parts: Collection[str], run: Callable[..., object]) -> int:
        """Run the cells on their ranks; returns how many they are.

        Args:
            parts: names of modules and optimizers, which nothing but a cell can make.
            run: runs code on ranks.

        Raises:
            SessionError: a cell failed, or there are parts and no cell.
        """
        if not self._cells and parts:
            raise SessionError(
                f"recover: no cell is marked as set-up, and only cells can make {', '.join(sorted(parts))} again. "
                f"Run them with %%global --setup, without the training loop, then {COMMAND} once more. Until then all "
                f"is kept that the other ranks hold."
            )
        for number, (code, ranks) in enumerate(self._cells.values(), start=1):
            try:
                run(code, ranks, values=False, label=f"set-up cell {number}")
            except CellError as error:
                raise SessionError(
                    f"recover: set-up cell {number} of {len(self._cells)} failed, so nothing is recovered yet; ranks "
                    f"that were not replaced have their variables back. Change the cell, run it with %%global --setup, "
                    f"then {COMMAND} once more.\n{error}"
                ) from None
        return len(self._cells)


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
        if not self.ranks:
            return "workbench: no rank has lost its variables, so there is nothing to recover"
        lines = [
            f"workbench: recovered {describe_ranks(self.ranks)}; {counted(self.num_cells, 'set-up cell')} ran again"
        ]
        sources: dict[str, list[str]] = {}
        for name, source in self.rows:
            sources.setdefault(source, []).append(name)
        last = sorted(sources, key=lambda source: source.startswith("lost"))
        names = {source: ", ".join(sources[source]) for source in last}
        width = min(_WIDEST, max(map(len, names.values()), default=0))
        return "\n".join([*lines, *(f"  {each:<{width}}  {source}" for source, each in names.items())])


def refuse_lost_names(
    code: str, targets: Collection[int], lost: Collection[int], names_of: Callable[[int], Iterable[str] | None]
) -> None:
    """Raise `CellError` if a cell reads variables that a replaced rank has lost and other ranks still have.

    ``names_of(rank)`` are a rank's variables, None if it does not answer.
    """
    replaced = sorted(set(targets) & set(lost))
    others = sorted(set(targets) - set(lost))
    wanted = first_reads(code) if replaced and others else []
    there = set(names_of(others[0]) or ()) if wanted else set()
    for rank in replaced if there else ():
        here = names_of(rank)
        missing = [name for name in wanted if name in there and here is not None and name not in here]
        if missing:
            raise _missing_error(rank, others[0], missing)


def _missing_error(rank: int, other: int, names: Sequence[str]) -> CellError:
    plural = "variables" if len(names) > 1 else "variable"
    head = f"rank {rank} has no {plural} {', '.join(names)}: its engine was replaced. Rank {other} still has "
    lines = [
        f"{head}{'them' if len(names) > 1 else 'it'}. Nothing ran on any rank.",
        f"Bring all variables back: {COMMAND}. Or run the cells that make them again.",
    ]
    return CellError("\n".join(lines), rendered=lines)


def explain_lost_names(failures: Mapping[int, Failure], lost: Collection[int]) -> dict[int, Failure]:
    """The failures; a NameError of replaced ranks alone says why the name is missing."""
    others = {failure.message for rank, failure in failures.items() if rank not in lost}
    return {
        rank: replace(failure, message=f"{failure.message}: its engine was replaced; {COMMAND} brings variables back")
        if rank in lost and failure.kind == "NameError" and failure.message not in others
        else failure
        for rank, failure in failures.items()
    }
