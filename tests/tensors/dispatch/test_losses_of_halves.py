"""Losses in 16 bits, whose sum over the batch is larger than the dtype holds."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.testing import run_ranks

SCORES, LABELS = torch.tensor([[20.0, 0.0]]).repeat(4000, 1).half(), torch.ones(4000, dtype=torch.int64)


@pytest.mark.parametrize("labels", ["plain", "S(0)"])
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
def test_the_mean_loss_of_halves_does_not_overflow_where_their_sum_would(sbp, labels):
    def put(tensor, layout):
        return wb.tensor(tensor, placement=wb.placement.all(), sbp=layout)

    def program():
        found = F.cross_entropy(put(SCORES, sbp), LABELS if labels == "plain" else put(LABELS, labels))
        return found.dtype, found.item()

    assert run_ranks(program, 2) == [(torch.float16, 20.0)] * 2
