"""Slices of an embedding sum to the full one, forward and backward; kernels against references."""

import pytest
import torch
import torch.nn.functional as F

from workbench.kernels.embedding_rows import (
    embedding_rows,
    embedding_rows_backward_reference,
    embedding_rows_reference,
)


@pytest.mark.parametrize("cuts", [[(0, 9)], [(0, 4), (4, 4), (4, 9)]], ids=str)
def test_slices_sum_to_the_full_embedding(cuts, device):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(9, 5, generator=generator).to(device).requires_grad_()
    indices = torch.randint(0, 9, (14,), generator=generator).to(device)
    weights = torch.randn(14, 5, generator=generator).to(device)
    expected = F.embedding(indices, weight)
    (grad,) = torch.autograd.grad((expected * weights).sum(), weight)
    found = sum(embedding_rows(weight[a:b], indices, a) for a, b in cuts)
    (theirs,) = torch.autograd.grad((found * weights).sum(), weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(theirs, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(6, 5, 20), (1, 1, 1), (0, 3, 4), (3, 4, 0), (4, 700, 6)], ids=str)
def test_kernels_equal_their_references(dtype, shape, device):
    rows, width, positions = shape
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(width, rows, generator=generator).to(dtype).to(device).t()
    indices = torch.randint(0, 8, (positions,), generator=generator).to(device)
    leaf = weight.detach().requires_grad_()
    out = embedding_rows(leaf, indices, 2)
    assert torch.equal(out, embedding_rows_reference(weight, indices, 2))
    grad = torch.randn(positions, width, generator=generator).to(dtype).to(device)
    (found,) = torch.autograd.grad(out, leaf, grad)
    rounding = 2 * torch.finfo(dtype).eps
    wanted = embedding_rows_backward_reference(grad, indices, 2, rows)
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=8 * rounding)
