"""What the front loads, and what its tables of names hold."""

from __future__ import annotations

import importlib

import pytest

from tests.test_import_cost import NOTEBOOK_SIDE, loaded_by, loaded_with_torch
from workbench import flow
from workbench.flow import nn


def test_the_table_of_names_loads_nothing() -> None:
    assert not loaded_by("workbench.flow", "workbench.flow.nn") & {"torch", "numpy", "ipyparallel"}


def test_an_engine_loads_nothing_of_the_notebooks_side_to_run_jobs() -> None:
    loaded = loaded_with_torch()["jobs"]
    assert "workbench.flow.jobs.remote" in loaded
    assert not loaded & (NOTEBOOK_SIDE | {"ipyparallel", "IPython", "workbench.session.cluster", "sklearn"})


@pytest.mark.parametrize("name", flow.__all__)
def test_a_name_of_flow_is_there(name: str) -> None:
    assert getattr(flow, name) is not None
    assert name in dir(flow)


@pytest.mark.parametrize("name", nn.__all__)
def test_a_name_of_nn_is_there(name: str) -> None:
    assert getattr(nn, name) is not None


@pytest.mark.parametrize("module", ["config", "distribute", "layers", "losses", "optimizer", "scope", "train"])
def test_every_name_that_a_module_shows_is_there(module: str) -> None:
    found = importlib.import_module(f"workbench.flow.{module}")
    assert all(hasattr(found, name) for name in found.__all__)
