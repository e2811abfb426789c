"""What is compared over ranks of tensors whose memory does not hold their values as they are."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.tensors.agreement import content_hash, fingerprint
from workbench.testing import run_ranks


class RealPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, spectrum):
        return self.layer(spectrum.real) + self.layer(spectrum.imag)


def test_batches_that_are_views_of_others_are_compared_by_value():
    built, spectrum = RealPart(), torch.randn(4, 3, dtype=torch.complex64)

    def program():
        model = wb.parallelize(copy.deepcopy(built), "*: data")
        return model(spectrum.conj()).sum().item()

    assert run_ranks(program, 2) == [pytest.approx(built(spectrum.conj()).sum().item(), rel=1e-5)] * 2
    negated = torch._neg_view(torch.randn(4, 3))
    for view, value in ((spectrum.conj(), spectrum.conj().resolve_conj()), (negated, negated.resolve_neg())):
        assert view.is_conj() or view.is_neg()
        assert fingerprint([view]) == fingerprint([value])
        assert content_hash(view) == content_hash(value)
