"""Reads and writes by index whose sizes differ from those of the tensor that is read or written."""

import torch

import workbench as wb
from workbench.testing import run_ranks


def test_split_rows_add_to_the_first_rows_of_a_larger_target():
    labels = torch.tensor([[0, 1], [2, 3], [1, 1], [4, 0]])

    def program():
        rows = wb.tensor(labels, placement=wb.placement.all(), sbp="S(0)")
        return torch.zeros(6, 5).scatter_add(1, rows, torch.ones(4, 2)).full_tensor()

    for found in run_ranks(program, 2):
        assert torch.equal(found, torch.zeros(6, 5).scatter_add(1, labels, torch.ones(4, 2)))
