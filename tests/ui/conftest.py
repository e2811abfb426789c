"""Runs with round numbers, so that tests of figures and tables can name the values that they expect."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from workbench.core.metrics import RunRecord

if TYPE_CHECKING:
    from tests.ui.reports import FakeTrainer
    from workbench.ui.panel import Panel


def make_record(name: str, **changes: object) -> RunRecord:
    """A finished run on two ranks: batch 100, three steps of 10, 20 and 25 ms, 6 MB and 8 MB peak."""
    memory = {"parameters": 1_000_000, "gradients": 1_000_000, "optimizer": 1_000_000, "activations": 2_000_000}
    values: dict[str, object] = {
        "name": name,
        "strategy": f"*: {name}",
        "num_ranks": 2,
        "batch_size": 100,
        "losses": (2.0, 1.5, 1.0),
        "step_times_s": (0.01, 0.02, 0.025),
        "samples_per_s": 5000.0,
        "speedup": 1.25,
        "peak_memory_bytes": (6_000_000, 8_000_000),
        "memory_by_kind": (memory, memory | {"buffers": 500_000}),
        "boxed_bytes_per_step": 1_230_000,
        "loss_difference": 2e-7,
        "weight_difference": 1e-7,
        "equal": True,
    }
    return RunRecord(**(values | changes))  # type: ignore[arg-type]


@pytest.fixture
def baseline() -> RunRecord:
    """The same run on one device."""
    return make_record(
        "1 device",
        num_ranks=1,
        samples_per_s=4000.0,
        speedup=1.0,
        peak_memory_bytes=(9_000_000,),
        memory_by_kind=({"parameters": 2_000_000},),
        boxed_bytes_per_step=0,
        loss_difference=0.0,
        equal=None,
    )


@pytest.fixture
def runs() -> list[RunRecord]:
    """Two good runs and one that failed."""
    model = make_record(
        "model", samples_per_s=3000.0, losses=(2.0, 1.5 + 1e-6, 1.0), peak_memory_bytes=(4_000_000,) * 2
    )
    failed = RunRecord("pipeline", "*: data@9", num_ranks=2, batch_size=100, error="stage 9 of 2 stages")
    return [make_record("data"), model, failed]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    """Describes a model of two layers and starts runs that report what a test wants; their ends are seen at once."""
    from tests.ui.reports import FakeTrainer
    from workbench.ui.live import poller

    monkeypatch.setattr(poller, "_INTERVAL_S", 0.01)
    return FakeTrainer()


@pytest.fixture
def panel(trainer: FakeTrainer) -> Panel:
    """A panel without engines."""
    from tests.ui.reports import make_mlp
    from workbench.ui.panel import Panel

    return Panel(make_mlp, None, None, steps=3, trainer=trainer, keep=False)
