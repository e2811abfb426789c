"""Imports go one way: the rooms of the package form layers, and files do not import each other in circles."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ANYONE = {"errors", "units", "theme", "lazy"}
"""Rooms that every other room may import; they import nothing themselves."""

ALLOWED = {
    "errors": set(),
    "units": set(),
    "theme": set(),
    "core": set(),
    "kernels": set(),
    "pipeline": set(),
    "cost": {"pipeline", "core"},
    "planning": {"cost", "pipeline", "core"},
    "transport": {"kernels", "core"},
    "tensors": {"transport", "kernels", "core"},
    "writers": {"core"},
    "training": {"writers", "tensors", "transport", "kernels", "pipeline", "core"},
    "api": {"training", "tensors", "core"},
    "session": {"writers", "api", "training", "tensors", "transport", "planning", "cost", "core"},
    "ui": {"writers", "session", "planning", "cost", "pipeline", "core"},
    "flow": {"session", "training", "tensors", "transport", "core"},
    "testing": {"training", "tensors", "transport", "core"},
    "cli": {"ui", "session", "planning", "cost", "core"},
    "lazy": set(),
    "renamed": set(),
    "checkpoint": {"training"},
    "debug": {"api", "training", "tensors"},
    "draw": {"ui", "session"},
    "planner": {"planning", "session", "training"},
    "": {
        "api", "checkpoint", "cli", "core", "cost", "debug", "draw", "flow", "planner", "planning", "renamed",
        "session", "testing", "training", "ui",
    },
}  # fmt: skip
"""Room -> rooms it may import. The room "" is the package itself: its lazy names, and ``python -m workbench``."""

EXCEPTIONS = {("workbench.session.engine", "workbench")}
"""(file, module): engines hand the package to the cells of a notebook under the name ``wb``."""

LATE = {"workbench.tensors.late_imports"}
"""Files whose imports inside functions may go up: methods of ``GlobalTensor`` call what imports ``GlobalTensor``."""


@dataclass(frozen=True)
class Import:
    """One import of the package by one of its files."""

    source: str
    target: str
    line: int
    at_import_time: bool

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: imports {self.target}"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """``workbench.core.sbp`` -> ``core``; the package and its ``__main__`` -> ``""``."""
    room = module.split(".")[1] if "." in module else ""
    return "" if room == "__main__" else room


def read_imports(root: Path, package: str = "workbench") -> list[Import]:
    """Every import of ``package`` by its own files, the ones inside functions included."""
    sources = {module_name(path, root): path for path in sorted((root / package).rglob("*.py"))}
    return [found for module, path in sources.items() for found in _imports_of(module, path, set(sources), package)]


@cache
def our_imports() -> list[Import]:
    """Those of the package as it is: reading its files takes seconds."""
    return read_imports(ROOT)


def _imports_of(module: str, path: Path, modules: set[str], package: str) -> Iterator[Import]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    base = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node, at_import_time in _import_nodes(tree):
        for target in _targets(node, base, modules):
            if target == package or target.startswith(f"{package}."):
                yield Import(module, target, node.lineno, at_import_time)


def _import_nodes(tree: ast.AST, at_import_time: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports, and whether they run when the module is imported: not those in functions or for type checkers only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_import_time
        if isinstance(node, ast.Import | ast.ImportFrom | ast.expr):  # most nodes are of expressions
            continue
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        yield from _import_nodes(node, at_import_time and not is_function and not is_for_types)


def _targets(node: ast.Import | ast.ImportFrom, base: str, modules: set[str]) -> Iterator[str]:
    """Modules that the statement loads; ``from package import name`` loads ``package.name`` where that is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    parent = node.module or ""
    if node.level:
        above = base.split(".")[: len(base.split(".")) - node.level + 1]
        parent = ".".join([*above, *([node.module] if node.module else [])])
    for alias in node.names:
        name = f"{parent}.{alias.name}"
        yield name if name in modules else parent


def wrong_edges(imports: Iterable[Import]) -> list[str]:
    """Imports that go against the table, in words."""
    wrong = []
    for found in imports:
        source, target = room_of(found.source), room_of(found.target)
        if (found.source, found.target) in EXCEPTIONS and not found.at_import_time:
            continue
        if source not in ALLOWED:
            wrong.append(f"{found}: the room {source!r} is not in the table of tests/test_imports.py")
        elif target != source and target not in ALLOWED[source] | ANYONE:
            allowed = ", ".join(sorted(ALLOWED[source] | ANYONE)) or "nothing"
            wrong.append(f"{found}: {source or 'the package'} may import {allowed}")
    return wrong


def find_cycle(imports: Iterable[Import]) -> list[str]:
    """One circle of files that need each other, also inside functions or for types only, or an empty list."""
    graph: dict[str, list[str]] = {}
    for found in imports:
        if found.source in LATE and not found.at_import_time:
            continue
        if found.source != found.target and (found.source, found.target) not in EXCEPTIONS:
            graph.setdefault(found.source, []).append(found.target)
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return []
        for target in graph.get(module, []):
            if cycle := visit(target, [*path, module]):
                return cycle
        finished.add(module)
        return []

    return next((cycle for module in graph if (cycle := visit(module, []))), [])


def test_imports_go_one_way() -> None:
    wrong = wrong_edges(our_imports())
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_itself_through_others() -> None:
    cycle = find_cycle(our_imports())
    assert not cycle, " -> ".join(cycle)


def inside(folder: str, imports: Iterable[Import]) -> list[Import]:
    """The imports between what lies in ``folder``: files, and rooms as wholes."""

    def child_of(module: str) -> str:
        return ".".join(module.split(".")[: folder.count(".") + 2]) if module.startswith(f"{folder}.") else ""

    pairs = {(child_of(found.source), child_of(found.target)) for found in imports if found.at_import_time}
    return [Import(source, target, 0, True) for source, target in sorted(pairs) if source and target]


FOLDERS = sorted(".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "workbench").rglob("__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_room_imports_itself_through_its_neighbours(folder: str) -> None:
    cycle = find_cycle(inside(folder, our_imports()))
    assert not cycle, " -> ".join(cycle)


def test_every_room_is_in_the_table() -> None:
    rooms = {path.stem if path.is_file() else path.name for path in (ROOT / "workbench").iterdir()}
    assert rooms - {"__init__", "__main__", "__pycache__", "py"} == set(ALLOWED) - {""}


def test_table_itself_has_no_circles() -> None:
    edges = [Import(f"p.{source}", f"p.{target}", 0, True) for source, targets in ALLOWED.items() for target in targets]
    assert not find_cycle(edges)


# The checks above are worth what they catch: fake trees with one mistake each.


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "workbench" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("core/a.py", "import workbench.tensors.world"),
        ("core/a.py", "from workbench.tensors import world"),
        ("core/a.py", "from workbench import tensors"),
        ("core/a.py", "from ..tensors import world"),
        ("core/a.py", "def f():\n    from workbench.tensors.world import init"),
        ("core/a.py", "if TYPE_CHECKING:\n    from workbench.tensors.world import World"),
        ("core/__init__.py", "from ..tensors import world"),
        ("tensors/a.py", "from workbench.session import cluster"),
        ("tensors/a.py", "import workbench as wb"),
        ("session/a.py", "from workbench.ui import figure_parts"),
        ("errors.py", "from workbench.units import format_bytes\nimport workbench.core"),
    ],
)
def test_wrong_edge_is_found(tmp_path: Path, file: str, statement: str) -> None:
    tree = {
        "__init__.py": "",
        "tensors/__init__.py": "",
        "tensors/world.py": "",
        "core/__init__.py": "",
        file: statement,
    }
    wrong = wrong_edges(read_imports(write_tree(tmp_path, tree)))
    assert len(wrong) == 1
    assert "may import" in wrong[0]


def test_exception_holds_inside_functions_only() -> None:
    for source, target in EXCEPTIONS:
        assert not wrong_edges([Import(source, target, 1, at_import_time=False)])
        assert wrong_edges([Import(source, target, 1, at_import_time=True)])


def test_late_imports_are_inside_functions() -> None:
    for file in LATE:
        assert {found.at_import_time for found in our_imports() if found.source == file} == {False}
    late, tensor = "workbench.tensors.late_imports", "workbench.tensors.global_tensor"
    assert find_cycle([Import(tensor, late, 1, True), Import(late, tensor, 1, True)])


def test_every_exception_is_used() -> None:
    assert not EXCEPTIONS - {(found.source, found.target) for found in our_imports()}


def test_unknown_room_is_found(tmp_path: Path) -> None:
    wrong = wrong_edges(read_imports(write_tree(tmp_path, {"misc/a.py": "from workbench import errors"})))
    assert len(wrong) == 1
    assert "'misc' is not in the table" in wrong[0]


def test_right_edges_pass(tmp_path: Path) -> None:
    tree = {"tensors/a.py": "from workbench.core import sbp\nfrom workbench.errors import WorldError\nimport torch"}
    imports = read_imports(write_tree(tmp_path, tree))
    assert len(imports) == 2
    assert not wrong_edges(imports)


def test_cycle_of_files_is_found(tmp_path: Path) -> None:
    tree = {"core/__init__.py": "", "core/a.py": "from workbench.core import b", "core/b.py": "from . import c"}
    assert not find_cycle(read_imports(write_tree(tmp_path, tree | {"core/c.py": ""})))
    cycle = find_cycle(read_imports(write_tree(tmp_path, {"core/c.py": "from workbench.core.a import x"})))
    assert cycle == ["workbench.core.a", "workbench.core.b", "workbench.core.c", "workbench.core.a"]


@pytest.mark.parametrize("statement", ["def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_an_import_that_comes_later_closes_a_cycle_too(tmp_path: Path, statement: str) -> None:
    tree = {"core/a.py": "import workbench.core.b", "core/b.py": statement.format("import workbench.core.a")}
    assert find_cycle(read_imports(write_tree(tmp_path, tree)))
