"""Attention by pieces against torch's own, in 64 bits; the pieces of causal attention."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from workbench.kernels import flash_attention as module
from workbench.kernels.flash_attention import flash_attention, flash_attention_backward

CASES = {
    # heads, heads of keys, rows, keys, causal, with a mask
    "causal": (2, 2, 1024, 1024, True, False),
    "causal, two pieces": (2, 2, 384, 384, True, False),
    "causal, few rows": (2, 2, 100, 100, True, False),
    "causal, more keys than rows": (2, 2, 256, 512, True, False),
    "causal, shared keys": (6, 2, 512, 512, True, False),
    "whole": (2, 2, 256, 300, False, False),
    "whole, shared keys": (6, 2, 40, 300, False, False),
    "mask": (2, 2, 256, 256, False, True),
    "mask, shared keys": (6, 2, 256, 256, False, True),
}


def operands(case, dtype=torch.float64):
    heads, key_heads, rows, keys, is_causal, has_mask = CASES[case]
    generator = torch.Generator().manual_seed(0)
    shapes = (2, heads, rows, 8), (2, heads, rows, 8), (2, key_heads, keys, 8), (2, key_heads, keys, 8)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    mask = torch.randn(rows, keys, generator=generator, dtype=torch.float64).to(dtype) if has_mask else None
    return *tensors, mask, is_causal


@pytest.mark.parametrize("case", CASES)
def test_result_and_gradients_are_those_of_torch(case):
    grad, *others, mask, is_causal = operands(case)
    query, key, value = (x.requires_grad_() for x in others)
    ours, lse = flash_attention(query.detach(), key.detach(), value.detach(), mask, is_causal, 0.3)
    theirs = F.scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs.detach())

    expected = torch.autograd.grad(theirs, (query, key, value), grad)
    rows = query.detach(), key.detach(), value.detach(), mask, is_causal, ours, lse, 0.3
    for found, known in zip(flash_attention_backward(grad, *rows), expected, strict=True):
        torch.testing.assert_close(found, known)


@pytest.mark.parametrize("case", ["causal", "whole, shared keys"])
def test_lse_is_the_log_of_the_sum_of_exponentials(case):
    _, query, key, value, _, is_causal = operands(case)
    _, lse = flash_attention(query, key, value, None, is_causal, 0.3)

    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * 0.3
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(lse, scores.logsumexp(-1).to(lse.dtype))


@pytest.mark.parametrize(
    ("dtype", "rows", "expected"),
    [
        (torch.float32, 1024, [(8, 128, True), (4, 128, False), (2, 256, False), (1, 512, False)]),
        (torch.float32, 200, [(1, 200, True)]),
        (torch.bfloat16, 1024, [(1, 1024, True)]),  # the sums of pieces would round
    ],
)
def test_causal_attention_is_cut_into_pieces(dtype, rows, expected):
    query, key, value = (torch.zeros(1, 1, rows, 8, dtype=dtype) for _ in range(3))
    flash, calls = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, []

    def seen(*args, **options):
        calls.append((args[0].shape[1], args[0].shape[2], args[4]))
        return flash(*args, **options)

    with mock.patch.object(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", seen):
        module.flash_attention(query, key, value, None, True, 1.0)
    assert calls == expected
