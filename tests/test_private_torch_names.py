"""The list of private names of torch against the sources, and against the torch that runs."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import re
from pathlib import Path

import pytest
import torch

from tests import private_torch_names
from tests.private_torch_names import CHECKED_ON, NAMES, NOT_OF_TORCH, OPTIONAL

ROOT = Path(__file__).parent.parent
_OBJECTS = {
    "torch.Tensor": torch.ones(1),
    "torch.UntypedStorage": torch.ones(1).untyped_storage(),
    "torch.autograd.graph.Node": torch.ones(1, requires_grad=True).exp().grad_fn,
    "torch.nn.Module": torch.nn.Module(),
    "torch.optim.Optimizer": torch.optim.SGD([torch.ones(1)]),
    "torch._ops.OpOverload": torch.ops.aten.add.Tensor,
    "torch._ops.OpOverloadPacket": torch.ops.aten.add,
}
"""What has attributes that its class does not show."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _whole(paths: set[str]) -> set[str]:
    """Without the beginnings of others: a module beside what is taken from it."""
    return {path for path in paths if not any(other.startswith(f"{path}.") for other in paths)}


def private_names(source: str) -> tuple[set[str], set[str]]:
    """(paths from ``torch`` with a private part, other private attributes that the source reads)."""
    return _private_names(list(ast.walk(ast.parse(source))))


def _private_names(nodes: list[ast.AST]) -> tuple[set[str], set[str]]:
    known = {"torch": "torch"}
    paths: set[str] = set()

    def path_of(node: ast.expr) -> str | None:
        if isinstance(node, ast.Attribute):
            owner = path_of(node.value)
            return None if owner is None else f"{owner}.{node.attr}"
        return known.get(node.id) if isinstance(node, ast.Name) else None

    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            known |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            paths |= {f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            known |= {a.asname: a.name for a in node.names if a.asname and a.name.startswith("torch.")}
            paths |= {a.name for a in node.names if a.name.startswith("torch.")}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (path := path_of(node.value)):
            known[node.targets[0].id] = path
    attributes = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            path = path_of(node)
            paths |= {path} if path else set()
            attributes |= {node.attr} if path is None and _is_private(node.attr) else set()
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            paths |= {node.value} if re.fullmatch(r"torch(\.\w+)+", node.value) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
            attributes |= {name} if _is_private(name) else set()
    return _whole({path.partition(".__")[0] for path in paths if any(map(_is_private, path.split(".")))}), attributes


@functools.cache
def _used() -> tuple[set[str], set[str]]:
    """Private paths of torch in the package, and the names of private attributes that may be torch's."""
    paths, attributes, own = set[str](), set[str](), set[str]()
    for file in (ROOT / "workbench").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        found = _private_names(nodes)
        paths, attributes = paths | found[0], attributes | found[1]
        own |= _own_names(nodes)
    return _whole(paths), {name for name in attributes if name not in own or _has(name)}


def _own_names(nodes: list[ast.AST]) -> set[str]:
    """Of functions, classes, variables, and attributes of ``self``."""
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    named |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return named | {
        node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    }


def _has(name: str) -> bool:
    return any(hasattr(one, name) for one in _OBJECTS.values())


def _listed(text: str) -> set[str]:
    return {line.split()[0] for line in text.splitlines() if line.startswith("torch.")}


def is_in_torch(path: str) -> bool:
    """Whether there is something behind a path; of a class that ``_OBJECTS`` has, an attribute of the object there."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        start = ".".join(names[:end])
        with contextlib.suppress(ModuleNotFoundError):
            found = _OBJECTS[start] if start in _OBJECTS and end < len(names) else importlib.import_module(start)
            for name in names[end:]:
                if not hasattr(found, name):
                    return False
                found = getattr(found, name)
            return True
    return False


OTHERS = {name for names in NOT_OF_TORCH.values() for name in names.split()}


def test_every_private_name_that_is_used_is_listed() -> None:
    paths, attributes = _used()
    names = _listed(NAMES + OPTIONAL)
    unlisted = paths - names | attributes - {name.rpartition(".")[2] for name in names} - OTHERS
    assert unlisted == set(), f"Take a public name, or add it to {private_torch_names.__file__}."


def test_every_listed_name_is_used() -> None:
    paths, attributes = _used()
    names = _listed(NAMES + OPTIONAL) - paths
    unused = {name for name in names if name.rpartition(".")[2] not in attributes} | OTHERS - attributes
    assert unused == set(), f"Take it out of {private_torch_names.__file__}."


@pytest.mark.parametrize("path", sorted(_listed(NAMES)))
def test_torch_has_it(path: str) -> None:
    assert is_in_torch(path)


def test_a_name_that_torch_lacks_is_found() -> None:
    for path in ("torch._C._no_such_name", "torch.nn.Module._no_such_name", "torch._no_such_module.name"):
        assert not is_in_torch(path)


def test_versions_are_those_that_the_package_asks_for() -> None:
    """And the one that runs is among them: a new version gets a row in docs/versions.md first."""
    (wanted,) = re.findall(r'"torch(>=.*)"', (ROOT / "pyproject.toml").read_text())
    first, past = CHECKED_ON[0], int(CHECKED_ON[-1].partition(".")[2]) + 1
    assert wanted == f">={first},<2.{past}"
    assert ".".join(torch.__version__.split(".")[:2]) in CHECKED_ON


@pytest.mark.parametrize(
    ("source", "paths", "attributes"),
    [
        ("import torch\ntorch._C._a()", {"torch._C._a"}, set()),
        ("from torch._x import y\ny.z", {"torch._x.y.z"}, set()),
        ("import torch.nn.functional as F\nF._mask(1)", {"torch.nn.functional._mask"}, set()),
        ("import torch\naten = torch.ops.aten\naten._copy", {"torch.ops.aten._copy"}, set()),
        ('patch("torch.nn.Module._call")', {"torch.nn.Module._call"}, set()),
        ("node._sequence_nr() + x.__dict__", set(), {"_sequence_nr"}),
        ('getattr(op, "_schema", None)', set(), {"_schema"}),
        ("import torch\ntorch.nn.Linear(1)", set(), set()),
    ],
)
def test_private_names_are_found(source: str, paths: set[str], attributes: set[str]) -> None:
    assert private_names(source) == (paths, attributes)
