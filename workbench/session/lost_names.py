"""Cells that a replaced rank cannot run, because they read variables that it lacks and other ranks have."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from IPython.core.inputtransformer2 import TransformerManager

from workbench.errors import CellError
from workbench.session.protocol import Failure
from workbench.session.recovery import COMMAND


class _MakesAnyName(Exception):
    """Code may set names that it does not spell."""


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
    of functions, branches, messages of ``assert``, elements of comprehensions, and all behind code that may set any
    name: ``import *``, ``exec``, ``globals()``, ``get_ipython().push``, and magics.

    >>> first_reads("loss = model(x)\\nif big: y = z\\nprint(loss, y)")
    ['model', 'x', 'big', 'print']
    """
    found: dict[str, None] = {}
    with suppress(_MakesAnyName):
        _read(ast.parse(TransformerManager().transform_cell(code)), found, set())
    return list(found)


def _read(node: ast.AST | None, found: dict[str, None], made: set[str]) -> None:
    """Add the names that ``node`` is sure to read to ``found``, and those that it may set to ``made``."""
    if node is None:
        return
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)) if name not in made:
            found[name] = None
    parts = _sure_parts(node)
    for part in ast.iter_child_nodes(node) if parts is None else parts:
        _read(part, found, made)
    made |= _names_made([node] if parts is None else ast.walk(node))


def _sure_parts(node: ast.AST) -> Sequence[ast.AST | None] | None:
    """The parts of a node that are sure to run if it does, in their order; None if these are all, in its own order."""
    match node:
        case ast.Assign():
            return [node.value, *node.targets]
        case ast.AnnAssign() | ast.NamedExpr():
            return [node.value, node.target]
        case ast.For() | ast.AsyncFor():
            return [node.iter, node.target, *node.body]
        case (
            ast.If(test=first)
            | ast.While(test=first)
            | ast.IfExp(test=first)
            | ast.Assert(test=first)
            | ast.BoolOp(values=[first, *_])
        ):
            return [first]
        case ast.Compare():
            return [node.left, node.comparators[0]]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            return [node.generators[0].iter]
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.decorator_list
        case ast.Try() | ast.TryStar() | ast.Match() | ast.Lambda():
            return []
    return None


def _names_made(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that pieces of code may set. Raises _MakesAnyName if these are not known."""
    made = set()
    for each in nodes:
        _check_names_are_known(each)
        match each:
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name)):
                made.add(name)
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                made.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                made.add(name)
            case ast.alias(name=name, asname=alias):
                made.add(alias or name.partition(".")[0])
            case ast.Global(names=names):
                made.update(names)
    return made


def _check_names_are_known(node: ast.AST) -> None:
    """Raise _MakesAnyName if the node by itself may set names that it does not spell."""
    match node:
        case ast.alias(name="*") | ast.Call(func=ast.Name(id="exec" | "globals" | "locals")):
            raise _MakesAnyName
        case ast.Call(func=ast.Name(id="vars"), args=[], keywords=[]):
            raise _MakesAnyName
        case ast.Attribute(value=ast.Call(func=ast.Name(id="get_ipython")), attr=name):
            if name not in ("system", "getoutput"):  # what `!command` becomes
                raise _MakesAnyName
