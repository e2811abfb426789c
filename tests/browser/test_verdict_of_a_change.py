"""A run that is right until its strategy changes, in the table of a real panel."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.server import LabServer, write_notebook

pytestmark = [pytest.mark.browser, pytest.mark.engines, pytest.mark.slow]
_SOURCE = """%load_ext workbench
%workbench start --engines 2
---
import time
import torch
import workbench as wb
from torch import nn
from torch.nn.functional import cross_entropy
from workbench.cli.demo import digits

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x):
        weight = self.first.weight
        shard = weight.to_local() if hasattr(weight, "to_local") else weight
        return self.last(self.first(x).tanh() * (len(shard) / 32))  # right where each rank has the whole weight

def make():
    torch.manual_seed(0)
    return Scaled()

def slow_loss(output, target):
    time.sleep(0.2)
    return cross_entropy(output, target)
---
panel = wb.Panel(make, digits(), slow_loss, strategy="data", batch_size=64, steps=30)
panel
"""


def test_strategies_before_the_change_are_right_and_those_behind_it_are_not(open_notebook: Any, lab: LabServer) -> None:
    from playwright.sync_api import expect

    write_notebook(lab.folder / "change.ipynb", _SOURCE.split("---\n"))
    page = open_notebook("change.ipynb")
    page.run_cells(1)
    page.show(2, ".wb-panel")
    page.run_button.click()
    page.wait_for_step(4)
    page.button("Change strategy").click()
    page.write_strategy("first: model; last: data")
    page.button("Apply").click()
    page.wait_for_state("done")
    page.open_tab("compare")
    expect(page.rows).to_have_count(3)
    marks = {text.partition("\n")[0]: text[-9:] for text in page.rows.all_inner_texts()}
    [before], [behind] = (
        [mark for name, mark in marks.items() if sign in name] for sign in ("data, steps 1-", "\u2192")
    )
    assert "\u2713" in before and "\u2717" in behind, marks
