"""Runs that compile their step: rows beside the others, judged like them, and as they are where a compiler fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import workbench as wb
from tests.session.simulated_session import SimulatedSession
from workbench.core.metrics import RunEvent
from workbench.errors import CaptureWarning
from workbench.session.comparison.compare import CompareResult
from workbench.session.on_engine import shell
from workbench.training.capture import compiled


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiled, "_shared", WeakValueDictionary())


class Reader(nn.Module):
    """Decides by a value, as no captured step can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum().item() > 1e6 else x


def model(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 4), *more)


def compared(make: Callable[[], nn.Module], strategies: list[str], steps: int = 7, **options: Any) -> CompareResult:
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(20, 8, generator=generator), torch.randint(0, 4, (20,), generator=generator)
    session: Any = SimulatedSession()
    return wb.compare(
        make, data, cross_entropy, strategies, batch_size=8, steps=steps, session=session, keep=False, compile=True,
        **options,
    )  # fmt: skip


def compile_by(monkeypatch: pytest.MonkeyPatch, function: Callable[[Any], Any]) -> None:
    monkeypatch.setattr(torch._inductor, "standalone_compile", lambda graph, values, dynamic_shapes: function(graph))


def test_compiled_runs_are_rows_beside_the_others(monkeypatch):
    graphs: list[Any] = []
    compile_by(monkeypatch, lambda graph: graphs.append(graph) or graph)
    result = compared(model, ["*: data", "*: model", "0: data; 3: data@1 | mb=2"])
    assert [run.name.endswith(", compiled") for run in result.runs] == [False, True] * 3
    assert [run.settings["compiled"] for run in result.runs] == [False, True] * 3
    assert result.all_equal, result
    assert graphs
    for eager, fast in zip(result.runs[::2], result.runs[1::2], strict=True):
        assert eager.strategy == fast.strategy
        assert fast.losses == pytest.approx(eager.losses, rel=1e-5)
        assert fast.boxed_bytes_per_step == eager.boxed_bytes_per_step
        assert "uncompiled" not in fast.settings


def test_a_run_says_which_of_its_programs_is_compiled(monkeypatch):
    said: list[Any] = []
    monkeypatch.setattr(shell, "publish", said.append)
    compile_by(monkeypatch, lambda graph: graph)
    compared(model, ["*: model"])
    events = [event.text for event in said if isinstance(event, RunEvent) and event.kind == "compiling"]
    assert len(events) > 1
    assert events == [f"{number} of {len(events)}" for number in range(1, len(events) + 1)]


def test_a_wrong_program_is_noticed(monkeypatch):
    def wrong(graph: Any) -> Any:
        return lambda *values: [value * 1.5 if value.is_floating_point() else value for value in graph(*values)]

    monkeypatch.setattr(compiled, "_shared", {})  # functions have no weak references
    compile_by(monkeypatch, wrong)
    assert [run.equal for run in compared(model, ["*: data"]).runs] == [True, False]


def test_without_a_compiler_the_operators_are_replayed_and_the_row_says_so(monkeypatch):
    def fails(graph: Any) -> Any:
        raise RuntimeError("No working C++ compiler found in config.cpp.cxx")

    compile_by(monkeypatch, fails)
    with pytest.warns(CaptureWarning, match=r"apt-get install g\+\+"):
        result = compared(model, ["*: data"])
    assert result.all_equal
    assert "apt-get install g++" in result._repr_html_()


def test_a_step_that_cannot_be_captured_is_taken_as_it_is(monkeypatch):
    compile_by(monkeypatch, lambda graph: graph)
    result = compared(lambda: model(nn.BatchNorm1d(4), Reader()), ["*: data"])
    eager, refused = result.runs
    assert result.all_equal
    assert refused.losses == eager.losses
    assert "item()" in refused.settings["uncompiled"]


@pytest.mark.parametrize("options", [{"count": lambda inputs, targets: inputs.abs().sum()}, {"steps": 2}])
def test_a_run_of_which_no_step_was_compiled_says_so(monkeypatch, options):
    """Its row read "compiled": each step's micro-batches had weights of their own, or there was no third step."""
    compile_by(monkeypatch, lambda graph: graph)
    eager, fast = compared(lambda: nn.Sequential(nn.Linear(8, 4)), ["*: data | mb=2"], **options).runs
    assert fast.losses == pytest.approx(eager.losses, rel=1e-5)
    assert fast.settings["uncompiled"].startswith("no step was compiled") and "uncompiled" not in eager.settings
