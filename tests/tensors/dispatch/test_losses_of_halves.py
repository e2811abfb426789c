"""Mean losses in 16 bits, which hold neither the sum over the batch nor the number of its labels."""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.testing import run_ranks

NUM_LABELS = 257 * 32  # in bfloat16 256 * 32, by which the mean would be 31.875
SCORES, LABELS = torch.tensor([[31.75, 0.0]]).repeat(NUM_LABELS, 1), torch.ones(NUM_LABELS, dtype=torch.int64)


@pytest.mark.parametrize("weight", [None, torch.ones(2)])
@pytest.mark.parametrize("labels", ["plain", "S(0)"])
@pytest.mark.parametrize("sbp", ["S(0)", "S(1)"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_mean_loss_of_halves_is_that_of_their_sum_in_32_bits(dtype, sbp, labels, weight):
    def put(tensor, layout):
        return wb.tensor(tensor, placement=wb.placement.all(), sbp=layout)

    def program():
        targets = LABELS if labels == "plain" else put(LABELS, labels)
        weights = None if weight is None else weight.to(dtype)
        found = F.cross_entropy(put(SCORES.to(dtype), sbp), targets, weights)
        return found.dtype, found.item()

    assert run_ranks(program, 2) == [(dtype, 31.75)] * 2
