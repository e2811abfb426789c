"""Placements of two and three axes: every S, B and P on every axis of every operand; values and gradients.

One device is the truth. The grids are permuted; dims are smaller than an axis, of size one, of size zero; and one dim
may be split by two axes.
"""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import Case
from tests.tensors.dispatch.test_functions import entries_for, spread
from workbench.core.layout import Layout
from workbench.core.placement import Placement
from workbench.tensors.dispatch.fallback import FallbackWarning
from workbench.testing import run_ranks

GRIDS = {
    "2x2": [[0, 1], [2, 3]],
    "2x2 permuted": [[3, 0], [1, 2]],
    "3x2 permuted": [[4, 1], [0, 5], [2, 3]],
    "1x3": [[2, 0, 1]],
    "2x2x2 permuted": [[[6, 1], [0, 7]], [[3, 2], [5, 4]]],
    "2x1x2": [[[3, 1]], [[0, 2]]],
}


def _tokens(num_tokens: int, num_words: int):
    def make(generator: torch.Generator) -> list[torch.Tensor]:
        ids = torch.randint(0, num_words, (num_tokens, 2), generator=generator)
        return [ids, torch.randn(num_words, 3, generator=generator)]

    return make


def _labels(num_samples: int, num_classes: int):
    def make(generator: torch.Generator) -> list[torch.Tensor]:
        targets = torch.randint(0, num_classes, (num_samples,), generator=generator)
        targets[-1] = -100
        return [torch.randn(num_samples, num_classes, generator=generator), targets]

    return make


CASES = [
    Case("matmul", torch.matmul, ((5, 4), (4, 3))),
    Case("matmul of thin", torch.matmul, ((1, 2), (2, 1))),
    Case("matmul of none", torch.matmul, ((0, 4), (4, 3))),
    Case("matmul over none", torch.matmul, ((3, 0), (0, 2))),
    Case("matmul in batches", torch.matmul, ((3, 2, 4), (3, 4, 2))),
    Case("linear", F.linear, ((2, 5, 4), (7, 4), (7,))),
    Case("linear of one", F.linear, ((1, 3), (2, 3), (2,))),
    Case("add", torch.add, ((5, 4), (5, 4))),
    Case("add row", torch.add, ((5, 4), (4,))),
    Case("add column", torch.add, ((2, 1), (1, 3))),
    Case("add none", torch.add, ((0, 4), (1, 4))),
    Case("sum", lambda x: x.sum(), ((5, 4, 3),)),
    Case("sum rows", lambda x: x.sum(0), ((2, 5),)),
    Case("sum of none", lambda x: x.sum(0), ((0, 3),)),
    Case("mean", lambda x: x.mean((0, 2)), ((5, 2, 3),)),
    Case("view", lambda x: x.view(3, 2, 4), ((6, 4),)),
    Case("view back", lambda x: x.view(20, 2), ((5, 4, 2),)),
    Case("view even", lambda x: x.view(2, 4, 12), ((8, 3, 4),)),
    Case("view of none", lambda x: x.view(0, 8), ((0, 4, 2),)),
    Case("view of one", lambda x: x.view(1, 5, 1), ((5,),)),
    Case("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), ((5, 3, 4), (4,), (4,))),
    Case("layer_norm of one", lambda x, w: F.layer_norm(x, (5,), w), ((1, 5), (5,))),
    Case("cat", lambda x, y: torch.cat([x, y], dim=1), ((5, 4), (5, 2))),
    Case("cat rows", lambda x, y: torch.cat([x, y]), ((2, 3), (1, 3))),
    Case("cat none", lambda x, y: torch.cat([x, y]), ((0, 3), (2, 3))),
    Case("embedding", F.embedding, (), _tokens(5, 7)),
    Case("embedding of one", F.embedding, (), _tokens(1, 2)),
    Case("cross_entropy", F.cross_entropy, (), _labels(7, 5)),
    Case("cross_entropy of few", F.cross_entropy, (), _labels(2, 2)),
    Case("getitem", lambda x: x[1:4, None, 2], ((5, 4),)),
    Case("getitem stride", lambda x: x[::2, 1], ((5, 2, 3),)),
    Case("getitem none", lambda x: x[2:2], ((5, 4),)),
    Case("getitem list", lambda x: x[[4, 0, 1, 0]], ((5, 4),)),
    Case("softmax", lambda x: x.softmax(-1), ((2, 5),)),
    Case("transpose", lambda x: x.transpose(0, -1) * 2, ((5, 1, 3),)),
    Case("residual", lambda x, w, v: x + F.gelu(x @ w) @ v, ((5, 4), (4, 6), (6, 4))),
]


def combinations(case: Case, num_axes: int, at_most: int) -> list[tuple]:
    """All layouts of all operands, or a fixed random part of them."""
    per_operand = [list(itertools.product(entries_for(t), repeat=num_axes)) for t in case.operands()]
    total = 1
    for layouts in per_operand:
        total *= len(layouts)
    generator = random.Random(f"{case.name} {num_axes}")
    if total <= at_most:
        return list(itertools.product(*per_operand))
    return [tuple(generator.choice(layouts) for layouts in per_operand) for _ in range(at_most)]


def assert_layouts_agree(case: Case, grid: str, at_most: int) -> None:
    """One world runs all combinations; every rank compares with one device."""
    placement = Placement.of("cpu", GRIDS[grid])
    operands = [t.double() if t.is_floating_point() else t for t in case.operands()]
    leaves = [t.clone().requires_grad_() if t.is_floating_point() else t for t in operands]
    expected = case.function(*leaves)
    weight = torch.linspace(-1, 2, expected.numel(), dtype=torch.float64).reshape(expected.shape)
    (expected * weight).sum().backward()
    chosen = combinations(case, placement.num_axes, at_most)

    def program(rank: int) -> None:
        for sbps in chosen:
            try:
                assert_one(rank, sbps)
            except Exception as error:
                error.add_note(f"{case.name} of {sbps} on {placement}")
                raise

    def assert_one(rank: int, sbps: tuple) -> None:
        tensors = [spread(t, Layout.of(placement, list(sbp)), rank) for t, sbp in zip(operands, sbps, strict=True)]
        result = case.function(*tensors)
        assert result.shape == expected.shape
        (result * weight).sum().backward()
        assert_same(result.full_tensor(), expected, "value")
        for place, (tensor, leaf) in enumerate(zip(tensors, leaves, strict=True)):
            if leaf.grad is not None:
                assert tensor.grad is not None, f"gradient of operand {place} is missing"
                assert tensor.grad.sbp == tensor.layout_on_ranks.dual().sbp
                assert_same(tensor.grad.full_tensor(), leaf.grad, f"gradient of operand {place}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        run_ranks(program, placement.num_ranks)


def assert_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.sampled(9)
@pytest.mark.parametrize("grid", ["3x2 permuted", "2x2x2 permuted"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_part_of_the_layouts(case, grid):
    assert_layouts_agree(case, grid, at_most=1)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_layouts(case, grid):
    assert_layouts_agree(case, grid, at_most=60)


def test_the_sweep_notices_a_wrong_value_and_a_wrong_gradient():
    def wrong_value(x):
        return x if type(x) is torch.Tensor else x * 1.001

    def wrong_gradient(x):
        return x * 2 if type(x) is torch.Tensor else x + x.detach()

    for function, what in ((wrong_value, "value"), (wrong_gradient, "gradient of operand 0")):
        with pytest.raises(AssertionError, match=what):
            assert_layouts_agree(Case("wrong", function, ((5, 4),)), "2x2", at_most=4)
