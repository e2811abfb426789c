"""Kernels are torch operators: schema, fake tensors, autograd and compilation pass torch's own check."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workbench.kernels.attention_dropout import attention_dropout, attention_dropout_backward
from workbench.kernels.blocks import move_blocks
from workbench.kernels.cross_entropy_terms import (
    cross_entropy_terms,
    cross_entropy_terms_backward,
    cross_entropy_terms_reference,
)
from workbench.kernels.embedding_rows import embedding_rows, embedding_rows_backward
from workbench.kernels.random_slice import dropout_slice, fill_random

LOGITS, TARGET = torch.randn(3, 5), torch.tensor([4, 7, 2])
INDICES = torch.tensor([3, 9, 4, 3])
ROWS = [torch.randn(3) for _ in range(4)]
QUERY, KEY, VALUE = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 6)
DROPPED = 0.5, 1, 0.3, 7, 5, [30, 15, 5, 1]

CALLS = {
    "attention_dropout": (attention_dropout, (QUERY.clone().requires_grad_(), KEY, VALUE, None, *DROPPED)),
    "attention_dropout_backward": (
        attention_dropout_backward,
        (torch.randn(1, 2, 3, 6), QUERY, KEY, VALUE, None, torch.randn(1, 2, 3, 6), torch.randn(1, 2, 3), *DROPPED),
    ),
    "move_blocks": (move_blocks, ([torch.empty(2, 3)], [torch.ones(3, 2).t()] * 2, [2], "sum")),
    "cross_entropy_terms": (cross_entropy_terms, (LOGITS.clone().requires_grad_(), TARGET, 3)),
    "cross_entropy_terms_backward": (cross_entropy_terms_backward, (LOGITS, TARGET, 3, *ROWS)),
    "embedding_rows": (embedding_rows, (torch.randn(4, 2, requires_grad=True), INDICES, 3, 4)),
    "embedding_rows_backward": (embedding_rows_backward, (torch.randn(4, 2, requires_grad=True), INDICES, 3, 6, 4)),
    "fill_random": (fill_random, (torch.empty(2, 3), "uniform", 7, 5, [10, 1], 0.0, 1.0)),
    "dropout_slice": (dropout_slice, (torch.randn(2, 3, requires_grad=True), 7, 5, [10, 1], 0.3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_the_operator_passes_torchs_check(name):
    operator, arguments = CALLS[name]
    assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_have_shape_and_dtype_of_the_result(name):
    operator, arguments = CALLS[name]

    def each(value, change):
        if isinstance(value, torch.Tensor):
            return change(value.detach())
        return [each(v, change) for v in value] if isinstance(value, list) else value

    found = operator(*[each(value, torch.clone) for value in arguments])
    mode = FakeTensorMode()
    faked = [each(value, mode.from_tensor) for value in arguments]
    with mode:
        fake = operator(*faked)
    pairs = zip(found, fake, strict=True) if isinstance(found, tuple) else [(found, fake)]
    assert all((a is b is None) or (a.shape == b.shape and a.dtype == b.dtype) for a, b in pairs)


def test_offsets_beyond_32_bits_do_not_wrap(device):
    """Row and class numbers beyond 32 bits do not wrap."""
    far = 2**33 + 3
    weight = torch.randn(4, 2, device=device)
    indices = torch.tensor([far, 3, far + 3], device=device)
    assert torch.equal(embedding_rows(weight, indices, far)[[0, 2]], weight[[0, 3]])
    assert not embedding_rows(weight, indices, far)[1].any()
    logits, target = LOGITS.to(device), torch.tensor([far, 0, far + 4], device=device)
    expected = cross_entropy_terms_reference(logits, target, far)
    for one, other in zip(cross_entropy_terms(logits, target, far), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_padding_row_gets_no_gradient(device):
    indices = torch.tensor([0, 1, 1, 2], device=device)
    found = embedding_rows_backward(torch.ones(4, 2, device=device), indices, 0, 3, 1)
    assert found.tolist() == [[1, 1], [0, 0], [1, 1]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cross_entropy_terms", "embedding_rows", "dropout_slice"])
def test_gradients_of_gradients(name, device):
    operator, (given, *rest) = CALLS[name]
    given = given.detach().double().to(device).requires_grad_()
    rest = [value.to(device) if isinstance(value, torch.Tensor) else value for value in rest]
    assert torch.autograd.gradgradcheck(lambda x: operator(x, *rest), (given,))
