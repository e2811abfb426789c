"""The variables that a cell reads before it sets them. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from IPython.core.inputtransformer2 import TransformerManager


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
