"""The public surface: few names, each typed, each where a user looks for it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_overloads

import pytest

import workbench as wb
from workbench.core.options import PRESETS
from workbench.renamed import RENAMED

NAMESPACES = ("checkpoint", "debug", "draw", "planner")
SCRIPT = Path(__file__).parent / "public_surface_script.py"
LISTS_PRESETS = ("docs/concepts/strategies.md", "docs/glossary.md")


def imports_for_types(module: str) -> set[str]:
    """Names that type checkers see: those imported under TYPE_CHECKING."""
    path = import_module(module).__file__
    assert path is not None
    tree = ast.parse(Path(path).read_text("utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    nodes = [node for block in blocks for node in ast.walk(block)]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return assigned | {alias.asname for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names} - {
        None
    }


ANY_VALUE = {"batch", "inputs", "targets", "dataset", "data", "operands", "parts", "sizes", "constraints"}
"""Parameters whose values are the user's: batches, data sets, and keywords that are passed on."""
ANY_RESULT = {"evaluate"}
"""Functions whose result is what the user's own function or module returns."""


def public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All functions at the top and in the namespaces, and constructors of classes, by name."""
    for place in (wb, *(getattr(wb, name) for name in NAMESPACES)):
        for name in place.__all__:
            found = getattr(place, name)
            if inspect.isfunction(found) or (inspect.isclass(found) and "__init__" in vars(found)):
                yield name, found


def untyped(function: Callable[..., Any]) -> set[str]:
    """The parameters that are declared as Any; ``"return"`` for a result."""
    found = set[str]()
    for form in get_overloads(function) or [function]:
        signature = inspect.signature(form)
        found |= {name for name, one in signature.parameters.items() if one.annotation in (Any, "Any", one.empty)}
        found |= {"return"} if signature.return_annotation in (Any, "Any") else set()
    return found


def test_signatures_say_what_they_take_and_return() -> None:
    lacking = {name: untyped(function) - ANY_VALUE for name, function in public_functions()}
    assert {name for name, found in lacking.items() if "return" in found} == ANY_RESULT
    assert not {name: found for name, found in lacking.items() if found - {"return"}}


def test_an_untyped_signature_is_found() -> None:
    def function(one: int, two: Any, three) -> Any: ...  # type: ignore[no-untyped-def]

    assert untyped(function) == {"two", "three", "return"}


def test_the_tree_of_errors_has_every_error() -> None:
    tree = str(wb.errors.__doc__).partition("Messages")[0]
    classes = [value for value in vars(wb.errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    bases = {one: [base.__name__ for base in one.__bases__ if base.__module__ == "builtins"] for one in classes}
    expected = {(one.__name__, ", ".join(bases[one]).replace("Exception", "")) for one in classes}
    assert set(re.findall(r"^[ │├└─]+(\w+(?:Error|Aborted|Warning))(?: \((\w+)\))?", tree, re.MULTILINE)) == expected


def test_texts_that_list_the_presets_name_all() -> None:
    pages = [(Path(__file__).parents[1] / page).read_text("utf-8") for page in LISTS_PRESETS]
    for text in (*pages, *(str(inspect.getdoc(one)) for one in (wb.parallelize, wb.compare, wb.Panel))):
        assert not [name for name in PRESETS if name not in text]


def test_at_most_forty_names_are_at_the_top() -> None:
    assert len(wb.__all__) <= 40


def test_type_checkers_see_what_python_loads() -> None:
    assert imports_for_types("workbench") == {*wb.__all__, "errors", "flow", "testing"}


@pytest.mark.parametrize("name", NAMESPACES)
def test_type_checkers_see_what_python_loads_from_a_namespace(name: str) -> None:
    namespace = getattr(wb, name)
    assert imports_for_types(f"workbench.{name}") == set(namespace.__all__)
    assert all(getattr(namespace, member) is not None for member in namespace.__all__)


def test_a_name_of_version_0_1_says_what_to_write_now() -> None:
    with pytest.raises(AttributeError, match=r"'save'\. Write wb\.checkpoint\.save\."):
        getattr(wb, "save")  # noqa: B009 - mypy refuses the attribute
    with pytest.raises(AttributeError, match="'no_such_name'"):
        getattr(wb, "no_such_name")  # noqa: B009 - likewise


@pytest.mark.parametrize("address", [address for address in RENAMED.values() if address.startswith("wb.")])
def test_what_it_says_is_there(address: str) -> None:
    found: object = wb
    for part in address.split(",")[0].split(".")[1:]:
        found = getattr(found, part)
    assert callable(found)


def test_no_name_of_version_0_1_is_still_there() -> None:
    assert not {*RENAMED} & {*wb.__all__}


def test_the_script_uses_every_name() -> None:
    used = {node.attr for node in ast.walk(ast.parse(SCRIPT.read_text("utf-8"))) if isinstance(node, ast.Attribute)}
    namespaces = [getattr(wb, name) for name in NAMESPACES]
    assert not {*wb.__all__, *(name for namespace in namespaces for name in namespace.__all__)} - used


def test_compare_and_the_panel_take_the_same_arguments() -> None:
    """What both take has one name, one type, one default and one place; the first three may be given by position."""
    both = [inspect.signature(each).parameters for each in (wb.compare, wb.Panel)]
    shared = [name for name in both[0] if name in both[1]]
    job = [name for name in shared if name != "session"]  # the first argument of the panel
    assert job == [name for name in both[1] if name in job]
    assert job[:3] == ["model_fn", "dataset", "loss_fn"] and len(job) >= 13
    for name in job:
        one, other = (parameters[name] for parameters in both)
        assert (one.annotation, one.kind) == (other.annotation, other.kind), name
        assert one.default == other.default or name in ("batch_size", "steps"), name  # a panel has its own
