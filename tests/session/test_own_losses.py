"""``wb.compare`` and the panel on real engines with models that return their own loss, from dicts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import workbench as wb
from tests.timeouts import WAIT_TIMEOUT_S
from workbench.errors import CellError
from workbench.ui.panel import Panel

pytestmark = pytest.mark.engines

ROWS = {"bert.encoder.layer.[0-1]": "model", "classifier": "model:row"}


def make_bert():
    import transformers

    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=37, max_position_embeddings=16, num_labels=3, **sizes, **rates)
    return transformers.BertForSequenceClassification(config)


def samples():
    """Padded sentences as ``datasets`` gives them: dicts of lists of numbers."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 37, (12, 8), generator=generator)
    mask = (torch.arange(8) < torch.arange(12)[:, None] % 5 + 4).long()
    rows = zip((ids * mask).tolist(), mask.tolist(), (ids[:, 0] % 3).tolist(), strict=True)
    return [{"input_ids": words, "attention_mask": seen, "labels": label} for words, seen, label in rows]


class Regression(nn.Module):
    """A user's own module: two inputs, targets in the batch, the loss with the output."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.out = nn.Linear(4, 6), nn.Linear(3, 6), nn.Linear(6, 1)

    def forward(self, left, right, y=None):
        found = self.out(torch.tanh(self.left(left) + self.right(right))).squeeze(1)
        return {"found": found} if y is None else {"found": found, "loss": F.mse_loss(found, y)}


def columns():
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(12, 4, generator=generator), torch.randn(12, 3, generator=generator)
    return {"left": left, "right": right.numpy(), "y": left.sum(1)}


@pytest.mark.slow  # so does the gallery; and tests/training/runs with samples and strategies of every kind
def test_transformers_are_compared_with_one_device(session):
    strategies = [ROWS, "pipeline | mb=2"]
    result = wb.compare(make_bert, samples(), strategies=strategies, batch_size=7, steps=4, session=session, keep=False)
    assert [run.name for run in result.runs] == [str(wb.Strategy(ROWS)), "pipeline | mb=2"]
    assert result.all_equal, result
    assert all(len(run.losses) == 4 for run in result.runs)


@pytest.mark.slow  # test_compare_command has such a module on engines
def test_the_panel_trains_a_module_with_its_own_loss(session):
    rows = {"left": "data", "right": "model"}
    panel = Panel(Regression, columns(), strategy=rows, batch_size=7, steps=5, keep=False, session=session)
    panel.run()
    assert panel.wait(WAIT_TIMEOUT_S)
    assert panel.runs[-1].error is None and panel.runs[-1].equal, panel.runs[-1]


def test_a_model_without_a_loss_is_told_before_anything_trains(session):
    data = {name: column for name, column in columns().items() if name != "y"}
    with pytest.raises(CellError, match=r"no loss_fn.*dict with found: 0 losses.*'labels'"):
        wb.compare(Regression, data, strategies=["data"], batch_size=7, steps=4, session=session, keep=False)
