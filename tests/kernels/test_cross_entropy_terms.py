"""The loss over slices of the classes against torch's cross entropy over all; kernels against references."""

import pytest
import torch
import torch.nn.functional as F

from workbench.kernels.cross_entropy_terms import (
    cross_entropy_terms,
    cross_entropy_terms_backward_reference,
    cross_entropy_terms_reference,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def sliced_loss(logits, target, cuts, smoothing=0.0, z=0.0):
    """Cross entropy per row from slices of the classes, combined as ranks would."""
    parts = [cross_entropy_terms(logits[:, a:b], target, a) for a, b in cuts]
    lse = torch.logsumexp(torch.stack([part[0] for part in parts]), 0)
    picked, total = (sum(part[i] for part in parts) for i in (1, 2))
    return lse - (1 - smoothing) * picked - smoothing / logits.shape[1] * total + z * lse**2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cuts", [[(0, 7)], [(0, 3), (3, 7)], [(0, 4), (4, 4), (4, 7)]], ids=str)
def test_slices_of_the_classes_give_the_full_loss_and_gradient(cuts, smoothing, device):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 7, generator=generator) * 30).to(device).requires_grad_()
    target = torch.randint(0, 7, (5,), generator=generator).to(device)
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=smoothing)
    (grad,) = torch.autograd.grad(expected.sum(), logits)
    found = sliced_loss(logits, target, cuts, smoothing)
    (theirs,) = torch.autograd.grad(found.sum(), logits)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(theirs, grad)


def test_the_z_loss_reduces_the_log_of_the_sum(device):
    logits = torch.randn(3, 5, device=device, requires_grad=True)
    target = torch.tensor([0, 1, 2], device=device)
    expected = F.cross_entropy(logits, target, reduction="none") + 1e-2 * torch.logsumexp(logits, 1) ** 2
    (grad,) = torch.autograd.grad(expected.sum(), logits)
    (theirs,) = torch.autograd.grad(sliced_loss(logits, target, [(0, 2), (2, 5)], z=1e-2).sum(), logits)
    torch.testing.assert_close(theirs, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(4, 9), (1, 1), (3, 0), (0, 5), (2, 130)], ids=str)
def test_kernels_equal_their_references(dtype, shape, device):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(shape[1], shape[0], generator=generator).to(dtype).to(device).t()  # transposed strides
    target = torch.randint(0, 12, shape[:1], generator=generator).to(device)
    leaf = logits.detach().requires_grad_()
    found = cross_entropy_terms(leaf, target, 3)
    wanted = cross_entropy_terms_reference(logits, target, 3)
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    if shape[1]:
        weights = [torch.randn(shape[0], generator=generator).to(found[0].dtype).to(device) for _ in range(3)]
        (grad,) = torch.autograd.grad(sum((w * part).sum() for w, part in zip(weights, found, strict=True)), leaf)
        reference = cross_entropy_terms_backward_reference(logits, target, 3, wanted[0], tuple(weights))
        rounding = 2 * torch.finfo(dtype).eps
        torch.testing.assert_close(grad, reference, rtol=max(rounding, 1e-5), atol=max(rounding, 1e-5))


def test_logits_of_minus_infinity_have_probability_zero(device):
    logits = torch.tensor([[-torch.inf, -torch.inf, 0.5], [-torch.inf] * 3], device=device)
    lse, _, _ = cross_entropy_terms(logits, torch.tensor([2, 0], device=device), 0)
    assert lse.tolist() == [0.5, -torch.inf]
