"""Reductions, extrema, scans and norms for the sweep over layouts; ties and non-finite values among the operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import Case, _case


def _exact(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded: partial sums add up to the same integers and ties everywhere."""
    return x.detach().round() + (x - x.detach())


def _ties(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(0, 3, (7, 5), generator=generator).float()]


def _integers(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(-3, 3, (5, 4), generator=generator)]


def _booleans(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.rand(5, 4, generator=generator) > 0.6]


def _holes(generator: torch.Generator) -> list[torch.Tensor]:
    x = torch.randn(5, 4, generator=generator)
    x[1, 2] = x[4, 0] = torch.nan
    return [x]


def _shifted(generator: torch.Generator) -> list[torch.Tensor]:
    return [30 + torch.randn(7, 5, generator=generator)]


def _zeros(generator: torch.Generator) -> list[torch.Tensor]:
    x = torch.randn(5, 4, generator=generator)
    x[2] = 0
    x[:, 1] = 0
    return [x]


def _sum_of_all(x: torch.Tensor, functions: list[Callable[..., torch.Tensor]]) -> torch.Tensor:
    """The functions' results added up, each with a factor of its own: one run for all of them."""
    total = functions[0](x)
    for number, function in enumerate(functions[1:]):
        total = total + (number - 1.5) * function(x)
    return total


def _several(name: str, *functions: Callable[..., torch.Tensor], shape: tuple[int, ...] = (5, 4)) -> Case:
    return _case(name, lambda x: _sum_of_all(x, list(functions)), shape)


INFINITE = torch.tensor([0.0, -torch.inf, 0.0, 0.0])


def _indices(x: torch.Tensor) -> torch.Tensor:
    found = x.max(0).indices + 10 * x.min(0).indices + 100 * x.argmax(0) + 1000 * x.argmax()
    return found + 10_000 * (x.cummax(0).indices + 10 * x.cummin(0)[1])


CASES = [
    Case("amax ties", lambda x: _exact(x).amax((0, 1)) + _exact(x).max() - 3 * _exact(x).amin(0), (), _ties),
    Case("max of integers", lambda x: x.max() + x.amin(0) + x.prod(1, keepdim=True) + x.cumsum(0), (), _integers),
    Case("max of nan", lambda x: x.max().nan_to_num(0.5) + x.argmax(0) + torch.argmin(x, None, True), (), _holes),
    Case("booleans", lambda x: x.amin(0) + x.sum(0) + x.all(0).int() + x.any().int(), (), _booleans),
    Case("max dim ties", lambda x: _exact(x).max(0).values * 2 + _exact(x).min(0, keepdim=True)[0], (), _ties),
    Case("indices", lambda x: _indices(_exact(x)), (), _ties),
    _case("aminmax", lambda x: torch.aminmax(x, dim=0)[0] - 2 * torch.aminmax(x, dim=0)[1] + x.aminmax()[1], (5, 4)),
    _case("topk", lambda x: x.topk(2, 0).values, (9, 4)),
    _case("topk indices", lambda x: x.topk(2, 0, largest=False).indices, (9, 4)),
    _several("order", lambda x: x.kthvalue(2, 1)[0], lambda x: x.median(1).values, lambda x: x.quantile(0.3)),
    _case("quantile", lambda x: x.quantile(torch.tensor([0.25, 0.6]), 0), (5, 4)),
    Case("mode", lambda x: _exact(x).mode(0)[0], (), _ties),
    _several("sort", lambda x: torch.sort(x, 1, descending=True)[0], lambda x: x.msort(), lambda x: x.argsort(0)),
    _several("prod", lambda x: x.prod(), lambda x: x.amax(0), lambda x: x.mean((0, 1))),
    Case("products of zeros", lambda x: _exact(x).prod(0) + _exact(x).cumprod(0), (), _zeros),
    Case("checks", lambda x: torch._is_all_true(x) + x.any() + torch._is_any_true(x), (), _booleans),
    Case("counts", lambda x: torch.count_nonzero(x, 0) + x.any() + (x > 0).all(), (), _integers),
    _several(
        "dtype",
        lambda x: x.sum(0, dtype=torch.float64),
        lambda x: torch.sum(x, axis=0, keepdims=True),
        lambda x: x.mean((0, 1), dtype=torch.float64),
        lambda x: torch.cumsum(x, 0, dtype=torch.float64),
    ),
    Case("nan sums", lambda x: x.nansum(0) + x.nanmean(0), (), _holes),
    Case("nan sums, no dims", lambda x: x.nansum(dim=()) + x.nanmean([]), (), _holes),
    _several("var", lambda x: x.var(0), lambda x: x.var(False), lambda x: torch.std(x, 0, False, True)),
    _case("var two dims", lambda x: torch.var(x, (0, 2), keepdim=True, correction=0), (5, 4, 3)),
    Case("var shifted", lambda x: x.var(0), (), _shifted),
    Case("std of zeros", lambda x: _exact(x).std(0) + torch.linalg.vector_norm(_exact(x), 2, 0), (), _zeros),
    _several(
        "std_mean",
        lambda x: torch.std_mean(x)[0],
        lambda x: torch.std_mean(x, 0, correction=2)[1],
        lambda x: torch.var_mean(x, 0)[0],
        lambda x: torch.var_mean(x)[1],
    ),
    _several("logsumexp", lambda x: torch.logsumexp(x * 30, 0), lambda x: torch.logsumexp(x, (0, 1), True)),
    _case("logsumexp infinite", lambda x: torch.logsumexp(x.detach() + INFINITE, 0), (5, 4)),
    _several(
        "softmax",
        lambda x: x.softmax(0),
        lambda x: F.softmin(x, 0),
        lambda x: F.log_softmax(30 * x, -1),
        lambda x: F.softmax(x, 0, dtype=torch.float64),
        lambda x: (x + INFINITE).softmax(1),
    ),
    _case("softmax 3d", lambda x: F.softmax(40 * x, 1), (3, 5, 4)),
    _several(
        "vector_norm",
        lambda x: torch.linalg.vector_norm(x, 3.0),
        lambda x: torch.linalg.vector_norm(x, -2, 0),
        lambda x: x.norm(dim=0),
        lambda x: x.norm(1),
        shape=(7, 4),
    ),
    Case("vector_norm inf", lambda x: torch.linalg.vector_norm(_exact(x), float("inf"), 0), (), _ties),
    Case("vector_norm 0", lambda x: torch.linalg.vector_norm(_exact(x), 0, 0), (), _zeros),
    _several(
        "matrix norms",
        lambda x: torch.norm(x, "fro", dim=(0, 1)),
        lambda x: torch.linalg.norm(x),
        lambda x: torch.linalg.matrix_norm(x, 1),
        lambda x: torch.linalg.norm(x, float("-inf")),
    ),
    _several("normalize", lambda x: F.normalize(x, dim=0), lambda x: F.normalize(x, 1.0, dim=1)),
    _case("cdist", lambda x, y: torch.cdist(x, y), (5, 4), (7, 4)),
    _case("distances", lambda x, y: torch.dist(x, y, 3) + F.pairwise_distance(x, y), (5, 4), (5, 4)),
    _case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), (5, 4), (1, 4)),
    _several("cumulative", lambda x: x.cumsum(0), lambda x: x.cumprod(0), lambda x: torch.logcumsumexp(x, 0)),
    Case("cummax", lambda x: _exact(x).cummax(0).values - 2 * _exact(x).cummin(1)[0], (), _ties),
    _case("diff", lambda x, y: torch.diff(x, 2, 1, prepend=y) + x.diff(dim=1, append=y)[:, :4], (5, 4), (5, 2)),
    _case("gradient", lambda x: torch.gradient(x, dim=1)[0] + torch.gradient(x, spacing=0.5, edge_order=2)[0], (5, 4)),
    _case("histc", lambda x: torch.histc(x.detach(), 4, -1, 1), (5, 4)),
    _case("cov", lambda x: torch.cov(x) + torch.corrcoef(x), (5, 4)),
    _case("empty split", lambda x: x.amax(1).sum() + x.prod(1).sum(), (0, 4)),
    _case("one row", lambda x: x.amax(0) + x.logsumexp(0) + x.var(0, correction=0) + x.cumsum(0), (1, 4)),
    _case("two rows", lambda x: x.max(0)[0] + x.softmax(0) + x.prod(0) + x.cumprod(0), (2, 4)),
]
