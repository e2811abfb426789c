"""What one click sends to the page: the picture of the row first, and little else."""

from __future__ import annotations

from typing import Any

import ipywidgets
import pytest
from torch.nn.functional import cross_entropy

from tests.ui.models import gpt
from workbench.ui.grid.widget import LayerGrid
from workbench.ui.panel import Panel

MOST_MESSAGES, MOST_BYTES = 8, 40_000


def gpt_16_blocks() -> None:
    """Only its name is shown."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """States that widgets send, in order."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(ipywidgets.Widget, "_send", lambda _self, message, **_: found.append(message["state"]))
    return found


def test_the_grid_opens_with_its_rows(sent: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    to_open = LayerGrid.open
    monkeypatch.setattr(LayerGrid, "open", lambda grid: (opened.append(dict(grid.view)), to_open(grid)))
    Panel(gpt_16_blocks, (32, 64), cross_entropy, batch_size=32, num_ranks=4, costs=gpt(16))
    assert [len(view["rows"]) > 3 for view in opened] == [True]
    assert not [state for state in sent if "view" in state]


def test_a_click_on_a_deep_model_sends_its_picture_first(sent: list[dict[str, Any]]) -> None:
    panel = Panel(
        gpt_16_blocks, (32, 64), cross_entropy, batch_size=32, hardware="v100-dgx1", num_ranks=4, costs=gpt(16)
    )
    for value in ("model", "data"):
        sent.clear()
        panel._editor.grid._handle_custom_msg({"event": "choice", "rows": ["tok_emb"], "value": value}, [])
        assert "view" in sent[0], sent
        assert len(sent) <= MOST_MESSAGES
        assert sum(len(repr(state)) for state in sent) < MOST_BYTES
