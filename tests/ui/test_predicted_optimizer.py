"""The optimizer that a panel's predictions are for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ui.models import gpt
from tests.ui.reports import make_mlp
from workbench.ui.panel import Panel


def raises(parameters: Any) -> Any:
    raise RuntimeError("no GPU & no state")


@pytest.mark.parametrize(
    ("optimizer_fn", "predicted", "note"),
    [
        (None, "momentum", ""),
        (lambda ps: torch.optim.SGD(ps, lr=0.1), "sgd", ""),
        (lambda ps: torch.optim.AdamW([{"params": list(ps), "lr": 0.1}]), "adamw", ""),
        (lambda ps: torch.optim.Adam([p for p in ps if p.ndim == 2]), "adam", ""),
        (
            lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=0.02),
            "adamw",
            "For AdamW: what Muon takes is not known. Known are SGD, Adam, AdamW and AdamW8bit.",
        ),
        (raises, "adamw", "For AdamW: optimizer_fn on meta tensors raised RuntimeError: no GPU &amp; no state"),
    ],
)
def test_predictions_are_for_the_run_s_optimizer_or_say_which(optimizer_fn: Any, predicted: str, note: str):
    costs, shape = gpt(1), (32, 64)
    panel = Panel(make_mlp, shape, num_ranks=2, costs=costs, hardware="h200", optimizer_fn=optimizer_fn)
    assert panel._editor._predictor.optimizer == predicted
    html = panel._editor.predictions_html()
    assert note in html if note else "For AdamW" not in html
