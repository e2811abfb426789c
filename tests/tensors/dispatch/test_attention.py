"""Attention with dropout in blocks of query rows, and split causal attention by the mask that flash attention has."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.kernels import attention_dropout, launch
from workbench.kernels.random_slice import fill_random
from workbench.tensors import random
from workbench.tensors.rules.attention import attention, with_dropout
from workbench.testing import run_ranks

_DATA = torch.Generator().manual_seed(3)
Q, K, V = (torch.randn(4, 2, 6, 8, generator=_DATA, dtype=torch.float64) for _ in range(3))
MASK = torch.randn(2, 6, 6, generator=_DATA, dtype=torch.float64)
P, KEY = 0.3, 1234567890123
CALLS = {
    "plain": {},
    "causal": {"is_causal": True},
    "added": {"attn_mask": MASK, "scale": 0.7},
    "chosen": {"attn_mask": MASK > -1, "dropout_p": 0.6},
    "all dropped": {"dropout_p": 1.0},
    "a row that sees no key": {"attn_mask": MASK[0].abs() > torch.tensor([[9.0], [0], [0], [9], [0], [0]])},
}
LAYOUTS = ("B", "S(0)", "S(1)", "S(2)")


def written_out(q, k, v, attn_mask=None, dropout_p=P, is_causal=False, scale=None):
    """The formula, with the whole mask of the key."""
    scores = q @ k.transpose(-2, -1) * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:]).tril().bool()
    if attn_mask is not None:
        addend = (
            attn_mask
            if attn_mask.is_floating_point()
            else torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf)
        )
        scores = scores + addend
    keep = torch.empty(scores.shape, dtype=torch.bool)
    fill_random(keep, "bernoulli", KEY, 0, list(keep.stride()), 1 - dropout_p, 0.0)
    sees_none = scores.isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(sees_none, 0).softmax(-1).masked_fill(sees_none, 0)
    return (weights * keep * (0 if dropout_p == 1 else 1 / (1 - dropout_p))) @ v


def distributed(operands, layouts):
    p = wb.placement.all("cpu")
    return [wb.to_global(x, p, "B").to_global(sbp=sbp) for x, sbp in zip(operands, layouts, strict=True)]


def with_gradients(function, *operands):
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out = function(*leaves)
    grads = torch.autograd.grad((out * torch.cos(out.detach() * 9)).sum(), leaves)
    return [getattr(x, "full_tensor", lambda x=x: x)().detach() for x in (out, *grads)]


@pytest.mark.parametrize("rows", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_dropout_in_blocks_is_that_of_one_device(rows, monkeypatch):
    expected = {name: with_gradients(partial(written_out, **given), Q, K, V) for name, given in CALLS.items()}
    monkeypatch.setattr(random, "_draw", lambda world, generator: KEY)

    def program():
        for name, given in CALLS.items():
            for sbp in LAYOUTS:
                others = "B" if sbp == "S(2)" else sbp
                q, k, v = distributed([Q, K, V], [sbp, others, others])
                attend = partial(F.scaled_dot_product_attention, **{"dropout_p": P, **given})
                found = with_gradients(attend, q, k, v)
                for one, other in zip(found, expected[name], strict=True):
                    torch.testing.assert_close(one, other, msg=partial("{}, {}: {}".format, name, sbp))

    monkeypatch.setattr(with_dropout, "_block_bytes", lambda device: rows * 4 * 6 * 8)  # of 2 x 2 batches and heads
    run_ranks(program, 2)


def test_the_flash_kernel_drops_what_one_device_drops(monkeypatch):
    if not launch.has_triton() or not launch.is_interpreted():
        pytest.skip("needs Triton's interpreter")
    operands = [x.float() for x in (Q[:2], K[:2, :1], V[:2])]  # the same keys for all heads
    layouts = {"causal": ["S(2)", "B", "B"], "a row that sees no key": ["S(1)", "B", "S(1)"], "added": ["S(0)"] * 3}
    calls, kernel = [], with_dropout.attention_dropout
    monkeypatch.setattr(
        with_dropout, "attention_dropout", lambda *given: calls.append(given[0].dtype) or kernel(*given)
    )
    monkeypatch.setattr(with_dropout, "runs_on", lambda device: device.type == "cpu")
    monkeypatch.setattr(attention_dropout, "can_launch", lambda tensor: True)
    monkeypatch.setattr(random, "_draw", lambda world, generator: KEY)

    def attend(name, function):
        mask = CALLS[name].get("attn_mask")
        mask = {"attn_mask": mask.float()} if mask is not None and mask.is_floating_point() else {}
        return partial(function, **{"dropout_p": P, **CALLS[name], **mask})

    def program():
        for name, sbps in layouts.items():
            given = distributed(operands, sbps)
            found = with_gradients(attend(name, F.scaled_dot_product_attention), *given)
            for one, other in zip(found, expected[name], strict=True):
                torch.testing.assert_close(one, other, msg=partial("{}: {}".format, name))
        with torch.autocast("cpu", torch.bfloat16):
            assert F.scaled_dot_product_attention(*given, dropout_p=P).dtype == torch.bfloat16

    expected = {name: with_gradients(attend(name, written_out), *operands) for name in layouts}
    run_ranks(program, 2)
    assert calls.count(torch.float32) == 6 and torch.bfloat16 in calls


def test_scores_of_one_block_exist_at_a_time(monkeypatch):
    monkeypatch.setattr(with_dropout, "_block_bytes", lambda device: 4 * 64 * 8)  # 4 rows of 64 scores
    saved = []

    def program():
        q = wb.randn(64, 2, placement=wb.placement.all("cpu"), sbp="B", dtype=torch.float64, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
            F.scaled_dot_product_attention(q, q, q, dropout_p=0.5, is_causal=True)

    run_ranks(program, 1)
    assert max(saved, default=0) <= 64 * 2 * 8


@pytest.mark.parametrize("has_flash", [False, True])
def test_split_rows_of_causal_attention(has_flash, monkeypatch):
    monkeypatch.setattr(attention, "has_aligned_flash", lambda device: has_flash)

    def program():
        for num_rows, num_keys in ((6, 6), (6, 3), (3, 6), (1, 6)):
            given = Q[:, :, :num_rows], K[:, :, :num_keys], V[:, :, :num_keys]
            expected = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *given)
            q, k, v = distributed(given, ["S(2)", "B", "B"])
            found = with_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), q, k, v)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)

    run_ranks(program, 3)


def test_split_rows_make_no_mask_where_flash_attention_has_it(monkeypatch):
    """On a GPU. Here, a substitute stands for the kernel, and for torch's check of what it takes."""
    from torch.nn.attention import bias

    calls = []

    def flash(query, key, value, dropout_p, is_causal, return_debug_mask, scale):
        calls.append((query.shape[-2], key.shape[-2], is_causal))
        mask = torch.ones(query.shape[-2], key.shape[-2]).tril(key.shape[-2] - query.shape[-2]).bool()
        return (F.scaled_dot_product_attention(query, key, value, mask, scale=scale),)

    monkeypatch.setattr(attention, "has_aligned_flash", lambda device: True)
    monkeypatch.setattr(bias, "can_use_flash_attention", lambda params: True)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", flash)

    def program():
        q, k, v = distributed([Q, K, V], ["S(2)", "B", "B"])
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).full_tensor()

    for found in run_ranks(program, 3):
        torch.testing.assert_close(found, F.scaled_dot_product_attention(Q, K, V, is_causal=True))
    assert sorted(calls) == [(2, 4, True), (2, 6, True)]  # rank 0 has torch's own causal mask
