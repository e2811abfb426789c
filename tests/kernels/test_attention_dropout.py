"""Flash attention with dropout against the formula in 64 bits; slices against the whole."""

import pytest
import torch

from workbench.kernels import attention_blocks
from workbench.kernels.attention_blocks import BlockSettings, attend, attend_backward, peaks_of
from workbench.kernels.attention_dropout import (
    attention_dropout,
    attention_dropout_backward_reference,
    attention_dropout_reference,
)
from workbench.kernels.flash_attention import add_block

SEED, P = 2**62 + 12345, 0.3
BATCH, HEADS = 1, 2
CASES = {
    # rows, keys, widths of keys and of values, mask, number of the first causal row, position of the first score
    "whole blocks": (64, 64, 16, 16, None, None, 0),
    "causal": (70, 72, 24, 8, None, 0, 8),
    "rows of a causal slice": (36, 72, 16, 16, None, 34, 0),
    "more rows than keys": (72, 20, 16, 16, None, 0, 0),
    "choice": (40, 66, 16, 16, "choice", None, 1),
    "causal addends": (33, 40, 100, 128, "addends", 3, 2**35),
    "unaligned": (33, 35, 16, 80, None, 0, 2**35 + 3),
    "heads of 32": (70, 72, 32, 32, None, 0, 4),
    "heads of 64": (70, 72, 64, 64, None, 0, 0),
    "one": (1, 1, 1, 1, None, None, 0),
    "no rows": (0, 5, 16, 16, None, None, 0),
    "no keys": (5, 0, 16, 16, None, None, 0),
}
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""Of values near 1; the interpreter rounds to bfloat16 towards zero."""


def operands_of(case, dtype, device):
    rows, keys, width, value_width, kind, causal_from, first = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def of_heads(num, width):
        return torch.randn(BATCH, num, HEADS, width, generator=generator).to(dtype).to(device).transpose(1, 2)

    mask = None
    if kind == "choice":
        mask = torch.rand(BATCH, 1, rows, keys, generator=generator).to(device) > 0.3
        mask[..., 2, :] = False  # sees no key
    if kind == "addends":
        mask = torch.randn(1, HEADS, 1, keys, generator=generator).to(dtype).to(device)
    mask = None if mask is None else mask.expand(BATCH, HEADS, rows, keys)
    strides = [HEADS * rows * keys, rows * keys, keys, 1]
    settings = 0.3, causal_from, P, SEED, first, strides
    return [of_heads(rows, width), of_heads(keys, width), of_heads(keys, value_width)], mask, settings


def with_gradients(function, operands, *rest):
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out, lse = function(*leaves, *rest)
    grad = torch.cos(torch.arange(out.numel(), device=out.device)).view(out.shape).to(out.dtype)
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_the_formula(case, dtype, device):
    operands, mask, settings = operands_of(case, dtype, device)
    found = with_gradients(attention_dropout, operands, mask, *settings)
    wanted = with_gradients(attention_dropout_reference, [operand.double() for operand in operands], mask, *settings)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype in (dtype, torch.float32)
        tolerance = TOLERANCES[dtype] * max(1.0, float(theirs.abs().amax()) if theirs.numel() else 0.0)
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_references_compute_in_the_type_of_the_operands(dtype):
    operands, mask, settings = operands_of("choice", dtype, "cpu")
    found = with_gradients(attention_dropout_reference, operands, mask, *settings)
    grads = attention_dropout_backward_reference(torch.ones_like(found[0]), *operands, mask, *settings)
    wide = [operand.double() for operand in operands]
    wanted = [*with_gradients(attention_dropout_reference, wide, mask, *settings)]
    wanted += attention_dropout_backward_reference(torch.ones_like(wanted[0]), *wide, mask, *settings)
    for ours, theirs in zip((*found, *grads), wanted, strict=True):
        assert ours.dtype in (dtype, torch.float32)
        tolerance = TOLERANCES[dtype] * max(1.0, float(theirs.abs().amax()))
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=0, atol=tolerance)


def test_the_tolerance_tells_another_mask(device):
    operands, mask, settings = operands_of("causal", torch.float32, device)
    found = with_gradients(attention_dropout, operands, mask, *settings)
    *start, seed, first, strides = settings
    other = with_gradients(attention_dropout_reference, operands, mask, *start, seed, first + 4, strides)
    for index in (0, 2, 3, 4):
        assert float((found[index] - other[index]).abs().amax()) > 0.1


def test_slices_drop_what_the_whole_drops(device):
    (query, key, value), _, settings = operands_of("causal", torch.float32, device)
    scale, _, *random, first, strides = settings
    whole, _ = attention_dropout(query, key, value, None, *settings)
    for head, begin, end in ((0, 0, 70), (1, 3, 50)):
        position = first + head * strides[1] + begin * strides[2]
        part = query[:, head : head + 1, begin:end], key[:, head : head + 1], value[:, head : head + 1]
        found, _ = attention_dropout(*part, None, scale, begin, *random, position, strides)
        torch.testing.assert_close(found[:, 0], whole[:, head, begin:end])


def assert_blocks_add_up(device, causal_from, mask=None):
    """Keys in two blocks. Backward of a block has the result, and the sums, of both."""
    (query, key, value), _, settings = operands_of("whole blocks", torch.float32, device)
    scale, _, *random, first, strides = settings
    grad = torch.cos(torch.arange(query.numel(), device=device)).view(query.shape)
    whole = [x.double().requires_grad_() for x in (query, key, value)]
    exact = None if mask is None else mask.double()
    wanted, _ = attention_dropout_reference(*whole, exact, scale, causal_from, *random, first, strides)
    blocks, peaks = [], None if mask is None else peaks_of(mask)
    for keys in (slice(0, 40), slice(40, 64)):
        seen = None if causal_from is None else causal_from - keys.start
        blocks.append((keys, BlockSettings(scale, seen, *random, first + keys.start, strides, peaks)))
    out, lse = torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf, device=device)
    for keys, of_block in blocks:
        add_block(out, lse, *attend(query, key[:, :, keys], value[:, :, keys], part_of(mask, keys), of_block))
    found = [
        attend_backward(grad, query, key[:, :, keys], value[:, :, keys], part_of(mask, keys), out, lse, of_block)
        for keys, of_block in blocks
    ]
    of_query, of_key, of_value = zip(*found, strict=True)
    grads = sum(of_query), torch.cat(of_key, 2), torch.cat(of_value, 2)
    for ours, theirs in zip((out, *grads), (wanted, *torch.autograd.grad(wanted, whole, grad.double())), strict=True):
        torch.testing.assert_close(ours, theirs.detach().float(), rtol=0, atol=1e-4)


def part_of(mask, keys):
    return None if mask is None else mask[..., keys]


@pytest.mark.sampled(2, start=1)
@pytest.mark.parametrize("causal_from", [None, 0])
def test_blocks_of_keys_add_up(device, causal_from):
    assert_blocks_add_up(device, causal_from)


def test_blocks_of_keys_that_a_large_number_hides_add_up(device):
    """The kernel gets it subtracted, so it does not round the scores beside it; 64 bits hardly do."""
    mask = torch.zeros(1, 1, 64, 64, device=device)
    mask[..., :9, :] = -1e8
    assert_blocks_add_up(device, None, mask)


@pytest.mark.parametrize("causal_from", [None, 0])
def test_blocks_of_keys_add_up_in_the_reference(causal_from, monkeypatch):
    monkeypatch.setattr(attention_blocks, "runs_on", lambda device: True)
    assert_blocks_add_up("cpu", causal_from)
    mask = torch.zeros(1, 1, 64, 64).masked_fill(torch.arange(64)[:, None] < 9, -1e8)
    assert_blocks_add_up("cpu", causal_from, mask)


def test_gradients_of_gradients():
    operands = [torch.randn(1, 1, n, 2, dtype=torch.float64, requires_grad=True) for n in (2, 3, 3)]
    settings = None, 0.5, 1, P, SEED, 0, [6, 6, 3, 1]
    assert torch.autograd.gradgradcheck(lambda *x: attention_dropout(*x, *settings)[0], operands)


def test_everything_may_be_dropped(device):
    operands, mask, (scale, causal_from, _, *rest) = operands_of("whole blocks", torch.float32, device)
    found = with_gradients(attention_dropout, operands, mask, scale, causal_from, 1.0, *rest)
    assert not any(result.any() for result in (found[0], *found[2:]))
