"""After a loss, on the notebook's side: which cells are set-up, cells that a replaced rank cannot run because it lacks
what they read, and the table of what was recovered. `on_engine/recovery` does the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from IPython.core.inputtransformer2 import TransformerManager

from workbench.errors import CellError, SessionError
from workbench.session import engine
from workbench.session.protocol import Failure
from workbench.session.ranks import describe_ranks
from workbench.units import counted

COMMAND = "%workbench recover"
_WIDEST = 40
_HOW_TO_MARK = (
    f"To get them, run {COMMAND}; then run the cells that make model and optimizer with %%global --setup, and "
    f"{COMMAND} again."
)


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """A context that calls ``undo`` if its body fails or is interrupted."""
    try:
        yield
    except BaseException:
        undo()
        raise


@dataclass(slots=True)
class Losses:
    """What a session's engines have lost.

    Attributes:
        ranks: those whose engines are new, and whose variables are not recovered yet. If these are all, no rank lacks
            what another one has; only a checkpoint may have more.
        has_parts: whether parts of variables are lost, with engines that had died and were given back.
        number: how often something was lost.
    """

    ranks: set[int] = field(default_factory=set)
    has_parts: bool = False
    number: int = 0

    def add(self, ranks: Collection[int], num_ranks: int) -> None:
        """Engines of these ranks are replaced or added, where the session has had ``num_ranks``. If all were new, the
        others have what cells have made since.
        """
        if len(self.ranks) == num_ranks:
            self.ranks.clear()
        self.ranks |= set(ranks)
        self.number += 1


class SetupCells:
    """The cells that make what training needs, in the order of their first runs."""

    def __init__(self) -> None:
        self._cells: dict[str, tuple[str, tuple[int, ...] | None]] = {}

    def record(self, name: str, code: str, ranks: tuple[int, ...] | None) -> None:
        """Remember a cell that has run, on all ranks if None. An earlier one of this name is replaced in its place."""
        self._cells[name] = (code, ranks)

    def __bool__(self) -> bool:
        return bool(self._cells)

    def recover(self, losses: Losses, call: Callable[..., list[Any]], run: Callable[..., object]) -> Recovered:
        """What `Session.recover` does when all ranks are there.

        Args:
            losses: of the session's engines; none afterwards.
            call: calls a function on all ranks.
            run: runs code on ranks.
        """
        if not losses.ranks and not losses.has_parts:
            return Recovered()
        lost = sorted(losses.ranks)
        parts = set().union(*call(engine.keep_variables, (losses.number, lost)))
        with undone_on_error(lambda: call(engine.put_back_variables, ())):
            num_cells = self.run_again(parts, run)
            rows = call(engine.restore_variables, (lost,))[0]
        losses.ranks -= set(lost)
        losses.has_parts = False
        return Recovered(tuple(lost), num_cells, rows)

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
                    f"that were not replaced have their variables back, the others have none. Change the cell, run it "
                    f"with %%global --setup (and before it those that make what it reads), then {COMMAND} once more.\n"
                    f"{error}"
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
    has_lost: bool = False  #: whether new ranks have no variables, or parts had been lost

    def __str__(self) -> str:
        lines = [f"workbench: {counted(self.now, 'engine')} now, {self.before} before", *_table(self.rows)]
        if self.rows:
            lines.append("Another strategy for a model: wb.parallelize(model, strategy, optimizer=optimizer)")
        if self.recovered is not None:
            lines.append(str(self.recovered))
        elif self.has_lost:
            new = range(self.before, self.now)
            have = "has" if len(new) == 1 else "have"
            what = f"{describe_ranks(new)} {have} no" if new else "Engines that had died were given back with their"
            who = f"{what} variables"
            lines.append(f"{who}. {_HOW_TO_MARK}")
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
    head = f"rank {rank} has no {plural} {', '.join(names)}: its engine is new. Rank {other} still has "
    lines = [
        f"{head}{'them' if len(names) > 1 else 'it'}. Nothing ran on any rank.",
        f"Bring all variables back: {COMMAND}. Or run the cells that make them again.",
    ]
    return CellError("\n".join(lines), rendered=lines)


def explain_lost_names(
    failures: Mapping[int, Failure], lost: Collection[int], names_of_others: Callable[[], Iterable[str] | None]
) -> dict[int, Failure]:
    """The failures; a NameError of a replaced rank says why the name is missing, if it is one of others' variables."""
    missing = {rank for rank, failure in failures.items() if rank in lost and failure.kind == "NameError"}
    there = [f"'{name}'" for name in names_of_others() or ()] if missing else []
    return {
        rank: replace(failure, message=f"{failure.message}: its engine is new; {COMMAND} brings variables back")
        if rank in missing and any(name in failure.message for name in there)
        else failure
        for rank, failure in failures.items()
    }


def first_reads(code: str) -> list[str]:
    """Names that the cell is sure to read before it sets them, in their order. What may not run does not count: bodies
    of functions, branches, and elements of comprehensions.

    >>> first_reads("loss = model(x)\\nif big: y = z\\nprint(loss, y)")
    ['model', 'x', 'big', 'print']
    """
    found: dict[str, None] = {}
    _read(ast.parse(TransformerManager().transform_cell(code)), found, set())
    return list(found)


def _read(node: ast.AST | None, found: dict[str, None], made: set[str]) -> None:
    """Add the names that ``node`` reads to ``found``, and those that it makes, or may make, to ``made``."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            found.update({name: None} if name not in made else {})
        case ast.AugAssign(target=ast.Name(id=name)) if name not in made:
            found[name] = None
            _read(node.value, found, made)
        case ast.Assign():
            _read_all([node.value, *node.targets], found, made)
        case ast.AnnAssign() | ast.NamedExpr():
            _read_all([node.value, node.target], found, made)
        case ast.For() | ast.AsyncFor():
            _read_all([node.iter, node.target, *node.body], found, made)
        case ast.If() | ast.While() | ast.IfExp():
            _read(node.test, found, made)
            made |= _names_made(node)
        case ast.BoolOp():
            _read(node.values[0], found, made)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            _read(node.generators[0].iter, found, made)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            _read_all(node.decorator_list, found, made)
            made.add(node.name)
        case ast.Name() | ast.Import() | ast.ImportFrom() | ast.Try() | ast.TryStar() | ast.Match():
            made |= _names_made(node)
        case ast.Lambda() | None:
            pass
        case _:
            _read_all(ast.iter_child_nodes(node), found, made)


def _read_all(nodes: Iterable[ast.AST | None], found: dict[str, None], made: set[str]) -> None:
    for node in nodes:
        _read(node, found, made)


def _names_made(node: ast.AST) -> set[str]:
    """Names that a piece of code may set."""
    made = set()
    for each in ast.walk(node):
        match each:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                made.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.alias(name=name, asname=alias):
                made.add(alias or name.partition(".")[0])
    return made
