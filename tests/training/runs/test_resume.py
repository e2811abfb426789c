"""Loader, step, optimizer and checkpoint together: every schedule goes on where another one stopped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import workbench as wb
from workbench.tensors.dispatch.read_values import value_on_all_ranks
from workbench.testing import run_ranks

INTERLEAVED = "0: data@0; 1: data@1; 2: data@2; 3: data@3 | 2x1x1 mb=2 interleaved"
HYBRID = "0: data@0; 1: data@0; 2: model@1; 3: model@1 | 2x1x2 mb=2 zero_bubble"
WIDTHS = "0: data@0; 1: data@0; 2: data@1; 3: data@1 | 2x1+1x1 mb=2"


def make():
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


torch.manual_seed(0)
STATE = make().state_dict()
DATA = TensorDataset(torch.randn(10, 6), torch.arange(10) % 6)


def losses(strategy, num_ranks, folder, loads):
    """Two epochs of three uneven batches; saved after the second batch, or gone on with from there."""

    def program():
        model = make()
        model.load_state_dict(STATE)
        wb.parallelize(model, strategy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = wb.GlobalDataLoader(DATA, 4, module=model, shuffle=True)
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        found = []
        if loads:
            wb.checkpoint.load(folder, **parts)
        for _ in range(2):
            for inputs, targets in loader:
                optimizer.zero_grad()
                loss = wb.forward_backward(model, F.cross_entropy, inputs, targets)
                optimizer.step()
                found.append(float(value_on_all_ranks(loss)))
                if len(found) == 2 and not loads:
                    wb.checkpoint.save(folder, **parts)
        return found

    return run_ranks(program, num_ranks)[0]


@pytest.mark.parametrize(
    ("saved_by", "num_ranks", "loaded_by"),
    [
        (INTERLEAVED, 2, [("*: data", 3), (HYBRID, 4)]),
        pytest.param(WIDTHS, 3, [(INTERLEAVED, 2), ("*: data | 1x2x1 zero=2", 2)], marks=pytest.mark.slow),
        pytest.param("*: data", 1, [(WIDTHS, 3)], marks=pytest.mark.slow),
    ],
    ids=["interleaved", "widths", "data"],
)
def test_any_schedule_goes_on(tmp_path, saved_by, num_ranks, loaded_by):
    truth = losses("*: data", 1, tmp_path / "one", loads=False)
    saved = losses(saved_by, num_ranks, tmp_path / "ckpt", loads=False)
    torch.testing.assert_close(saved, truth, rtol=0, atol=1e-5)
    for strategy, ranks in loaded_by:
        again = losses(strategy, ranks, tmp_path / "ckpt", loads=True)
        torch.testing.assert_close(again, truth[2:], rtol=0, atol=1e-5, msg=lambda text, s=strategy: f"{s}: {text}")
