"""What the front loads, and what its tables of names hold."""

from __future__ import annotations

import importlib

import pytest

from tests.test_import_cost import loaded_by
from workbench import flow
from workbench.flow import nn


def test_the_table_of_names_loads_nothing() -> None:
    assert not loaded_by("workbench.flow", "workbench.flow.nn") & {"torch", "numpy", "ipyparallel"}


def test_all_names_are_there() -> None:
    assert set(flow.__all__) <= set(dir(flow))
    for module, names in ((flow, flow.__all__), (nn, nn.__all__)):
        assert not [name for name in names if getattr(module, name) is None]


@pytest.mark.parametrize("module", ["config", "distribute", "layers", "losses", "optimizer", "scope", "train"])
def test_every_name_that_a_module_shows_is_there(module: str) -> None:
    found = importlib.import_module(f"workbench.flow.{module}")
    assert all(hasattr(found, name) for name in found.__all__)
