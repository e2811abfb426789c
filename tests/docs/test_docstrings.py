"""What is public says what it means, and shows how it is used."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

import workbench as wb
from tests.docs.pages import ROOT

WITHOUT_EXAMPLE = {
    "errors": "one example stands for all classes of errors, in the module; what raises them names them",
    "flow": "names are OneFlow's; docs/flow.md shows them beside the original, and the tests run that page",
}
"""Modules of the package whose members need no example of their own, and why."""

REFERENCE = "\n".join(page.read_text("utf-8") for page in sorted((ROOT / "docs" / "api").glob("*.md")))


def public_names() -> Iterator[tuple[str, Any]]:
    """``wb.NAME``, and for those that are modules their members."""
    for name in (*wb.__all__, *WITHOUT_EXAMPLE):
        value = getattr(wb, name)
        yield name, value
        if isinstance(value, types.ModuleType):
            yield from ((f"{name}.{member}", found) for member, found in members_of(value))


def members_of(module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    """What a module offers: its ``__all__``, or what has been defined in it."""
    for name in getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]:
        found = getattr(module, name)
        if hasattr(module, "__all__") or getattr(found, "__module__", None) == module.__name__:
            yield name, found


def referred() -> Iterator[tuple[str, Any]]:
    """Objects that the reference shows by their address: what public functions give."""
    for address in re.findall(r"^::: (workbench\.[\w.]+)$", REFERENCE, re.MULTILINE):
        module, _, name = address.rpartition(".")
        yield name, getattr(import_module(module), name)


def is_ours(value: Any) -> bool:
    """Torch's dtypes in ``flow`` say themselves what they are; modules and constants have no docstring of their own."""
    return str(getattr(value, "__module__", "")).startswith("workbench") and not isinstance(value, types.ModuleType)


def undocumented(name: str, value: Any) -> list[str]:
    """The object and its public methods and properties, as far as they lack a docstring."""
    found = [name] if not inspect.getdoc(value) else []
    if inspect.isclass(value):
        for member in vars(value):
            described = inspect.getattr_static(value, member)
            is_method = isinstance(described, types.FunctionType | property | classmethod | staticmethod)
            if not member.startswith("_") and is_method and not inspect.getdoc(getattr(value, member)):
                found.append(f"{name}.{member}")
    return found


def has_example(name: str, value: Any) -> bool:
    """A doctest, or a line of code that uses the name."""
    text, last = inspect.getdoc(value) or "", name.rpartition(".")[2]
    return bool(
        ">>> " in text
        or re.search(rf"``[^`]*\b{last}\b[.(][^`]*``", text)
        or re.search(rf"^    .*\b{last}\b[.( ]", text, re.MULTILINE)
    )


@pytest.mark.parametrize(
    ("name", "value"), [*public_names(), *referred()], ids=[name for name, _ in [*public_names(), *referred()]]
)
def test_public_names_have_docstrings(name: str, value: Any) -> None:
    if is_ours(value) or isinstance(value, types.ModuleType):
        assert not undocumented(name, value)


def test_public_names_have_examples() -> None:
    lacking = [
        name
        for name, value in public_names()
        if name.partition(".")[0] not in WITHOUT_EXAMPLE or "." not in name
        if (is_ours(value) or "." not in name) and not has_example(name, value)
    ]
    assert not lacking, "end the docstring with a doctest, or with a line of code that uses the name"


def test_the_reasons_are_needed() -> None:
    names = dict(public_names())
    for module in WITHOUT_EXAMPLE:
        members = [name for name in names if name.startswith(f"{module}.") and is_ours(names[name])]
        assert any(not has_example(name, names[name]) for name in members)


def test_missing_docstrings_and_examples_are_found() -> None:
    class Bare:
        def method(self) -> None: ...

    def told() -> None:
        """Something happens."""

    assert undocumented("Bare", Bare) == ["Bare", "Bare.method"]
    assert not has_example("told", told)
