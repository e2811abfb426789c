"""What is compared over ranks of tensors whose memory does not hold their values as they are."""

import copy

import pytest
import torch
from torch import nn

import workbench as wb
from workbench.errors import LayoutError
from workbench.tensors.agreement import check_same_on_all_ranks, content_hash, fingerprint
from workbench.tensors.world import current
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


def ones(module):
    """The module with ones for parameters."""
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    return module


def registered_backwards(module):
    """The module with its parameters registered the other way round."""
    found = nn.Module()
    for name, parameter in reversed(list(module.named_parameters())):
        found.register_parameter(name, parameter)
    return found


@pytest.mark.parametrize(
    ("other", "error"),
    [
        (registered_backwards, r"2 parameters and .* orders: 'weight' on rank 0 is where 'bias' is on rank 1.*sorted"),
        (lambda module: ones(nn.Linear(3, 2)), r"'weight' differs between rank 0 and rank 1.*manual_seed"),
        (lambda module: nn.Linear(2, 3, bias=False), r"the ranks hold \[1, 2\] parameters and buffers"),
        (lambda module: copy.deepcopy(module).double(), "'weight' differs between rank 0 and rank 1"),
    ],
    ids=["another order", "another shape of the same bytes", "fewer", "another dtype"],
)
def test_modules_are_compared_by_name_shape_value_and_order(other, error):
    built = ones(nn.Linear(2, 3))

    def program(rank):
        check_same_on_all_ranks(copy.deepcopy(built), current())
        with pytest.raises(LayoutError, match=error):
            check_same_on_all_ranks(other(built) if rank else built, current())

    run_ranks(program, 2)


def test_sparse_tensors_that_differ_are_told_apart():
    def program(rank):
        module = nn.Module()
        module.register_buffer("graph", torch.eye(3).mul(rank + 1).to_sparse())
        with pytest.raises(LayoutError, match="'graph' differs between rank 0 and rank 1"):
            check_same_on_all_ranks(module, current())

    run_ranks(program, 2)


def test_tensors_of_many_dims_become_global():
    whole = torch.arange(2.0**11).reshape([2] * 11)

    def program(rank):
        shard = wb.to_global(whole[rank : rank + 1], placement=wb.placement(ranks=[0, 1]), sbp="S(0)")
        return torch.equal(shard.full_tensor(), whole)

    assert run_ranks(program, 2) == [True, True]
