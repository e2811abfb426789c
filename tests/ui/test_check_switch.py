"""The switch "check against one device": for the next runs, and said wherever a run or a choice is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.session.simulated_session import SimulatedSession
from tests.ui.reports import FakeTrainer
from workbench.core.verdict import CHECKED_STEPS
from workbench.session.comparison.comparison import Comparison
from workbench.session.comparison.subject import Subject
from workbench.session.on_engine import shell
from workbench.ui.panel import Panel
from workbench.ui.runs.render_table import comparison_table_text
from workbench.ui.runs.table_rows import equal_text


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "publish", lambda message: None)
    monkeypatch.setattr(shell, "commands", list)


def make_linear() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 4))


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4


def test_a_run_keeps_the_check_that_it_has_begun_with():
    session: Any = SimulatedSession()
    subject = Subject.of(make_linear, samples(), cross_entropy, batch_size=8, steps=3)
    with Comparison(session, subject) as comparison:
        checked = comparison.start("*: data")
        comparison.check_steps = 0
        unchecked = comparison.start("*: data").result()
        checked = checked.result()
    assert (checked.equal, checked.settings["check_steps"]) == (True, CHECKED_STEPS)
    assert (unchecked.equal, unchecked.settings["check_steps"]) == (None, 0)
    assert equal_text(unchecked) == "unchecked"
    assert "unchecked" in comparison_table_text([unchecked], None)


def test_a_saved_notebook_says_whether_the_choice_is_checked():
    panel = Panel(make_linear, None, trainer=FakeTrainer(), keep=False)
    for on, words in [(True, "20 steps checked against one device"), (False, "not checked against one device")]:
        panel._runs_section.check.value = on
        page = panel._static_bundle()
        assert words in page["text/html"] and words in page["text/plain"]
    assert panel.check_steps == 0
