"""What the parts of the package load: without heavy libraries engines start sooner and commands answer at once."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import workbench

ROOT = Path(__file__).parent.parent
NOTEBOOK_SIDE = {"IPython.display", "anywidget", "ipyparallel.client.client", "ipywidgets", "pandas", "plotly"}
"""What only the notebook's side may load."""

EAGER = [
    f"workbench.flow.{name}"
    for name in ("creation", "env", "functions", "nn.graph", "nn.modules", "placements", "saving")
]
"""What programs that run on every rank load of ``flow``."""

_PROGRAM = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


@cache
def loaded_by(*modules: str) -> frozenset[str]:
    """Names of all modules that a new interpreter holds after it has imported ``modules``."""
    command = [sys.executable, "-c", _PROGRAM, *modules]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return frozenset(json.loads(output))


_PROGRAM_WITH_TORCH = """
import importlib, json, os, sys, torch
for part, modules in json.load(sys.stdin).items():
    if os.fork() == 0:
        for name in modules:
            importlib.import_module(name)
        print(json.dumps([part, sorted(sys.modules)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, part
"""
"""Loads torch once, which takes seconds."""


@cache
def loaded_with_torch() -> dict[str, frozenset[str]]:
    """By part of the package, names of all modules of a process that has imported torch and then the part."""
    floors = [name for room in ("transport", "tensors", "training") for name in modules_in(room)]
    on_engines = [name for name in modules_in("flow") if name != "workbench.flow.jobs.driver"]
    parts = {"ranks": [*floors, *EAGER], "engine": ["workbench.session.engine"], "jobs": on_engines}
    parts["commands"] = [f"workbench.ui.{name}" for name in ("planning.offline_trainer", "runs.report")]
    command = [sys.executable, "-c", _PROGRAM_WITH_TORCH]
    done = subprocess.run(command, input=json.dumps(parts), check=True, capture_output=True, text=True, cwd=ROOT)
    return {part: frozenset(names) for part, names in map(json.loads, done.stdout.splitlines())}


def modules_in(room: str) -> list[str]:
    folder = ROOT / "workbench" / room
    assert folder.is_dir(), room
    names = (path.relative_to(ROOT).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def test_the_package_loads_next_to_nothing() -> None:
    assert not loaded_by("workbench") & {"torch", "plotly", "pandas", "ipyparallel", "numpy", "IPython"}


def test_the_algebra_loads_no_torch() -> None:
    for room in ("core", "pipeline"):
        assert not loaded_by(*modules_in(room)) & {"torch", "numpy"}, room


def test_ranks_and_eager_programs_load_nothing_of_a_notebook() -> None:
    loaded = loaded_with_torch()["ranks"]
    assert {"torch", "workbench.tensors.world", *EAGER} <= loaded
    assert not loaded & (NOTEBOOK_SIDE | {"ipyparallel", "IPython", "workbench.session"})


def test_the_engine_loads_nothing_of_the_notebooks_side() -> None:
    """`torch._dynamo` is no part of the notebook; loading it takes two seconds, once for all forked engines."""
    loaded = loaded_with_torch()["engine"]
    assert not loaded & (NOTEBOOK_SIDE - {"IPython.display"} | {"torch._dynamo", "workbench.session.cluster"})


def test_an_engine_loads_nothing_of_the_notebooks_side_to_run_jobs() -> None:
    loaded = loaded_with_torch()["jobs"]
    assert "workbench.flow.jobs.remote" in loaded
    assert not loaded & (NOTEBOOK_SIDE | {"ipyparallel", "IPython", "workbench.session.cluster", "sklearn"})


def test_the_command_line_answers_without_torch() -> None:
    assert not loaded_by(*modules_in("cli")) & {"torch", "plotly", "pandas", "ipyparallel", "sklearn"}


def test_commands_need_nothing_of_the_extra_for_notebooks() -> None:
    loaded = loaded_with_torch()["commands"]
    assert "workbench.ui.runs.render_table" in loaded
    assert not loaded & {"anywidget", "ipywidgets", "jupyterlab", "plotly"}


def test_a_loaded_module_is_seen() -> None:
    assert {"json.tool", "workbench.units"} <= loaded_by("json.tool", "workbench.units")


@pytest.mark.parametrize("name", workbench.__all__)
def test_public_name_is_there(name: str) -> None:
    assert getattr(workbench, name) is not None
    assert name in dir(workbench)


def test_a_name_of_an_extra_that_is_not_installed_says_what_installs_it() -> None:
    program = "import sys\nsys.modules['ipywidgets'] = None\nimport workbench\nworkbench.Panel"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "workbench.Panel needs ipywidgets, which is not installed. `workbench doctor` says how" in done.stderr


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = workbench.no_such_name


def test_star_import_gives_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from workbench import *", namespace)
    assert set(workbench.__all__) <= set(namespace)


def test_names_load_without_collections_of_garbage_and_leave_the_collector_as_it_was() -> None:
    program = (
        "import gc\n"
        "num = lambda: gc.get_stats()[2]['collections']\n"
        "import workbench as wb\nbefore = num()\nwb.init\n"
        "assert num() == before and gc.isenabled(), (num(), before, gc.isenabled())\n"
        "assert 'capture' not in vars(wb)\ngc.disable()\nwb.capture\nassert not gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
