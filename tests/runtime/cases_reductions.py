"""Reductions, extrema, scans and norms for the sweep over layouts; ties and non-finite values among the operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.runtime.cases import Case, _case


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


INFINITE = torch.tensor([0.0, -torch.inf, 0.0, 0.0])


def _stack(*parts: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.double() if part.is_floating_point() else part.to(torch.int64) for part in parts])


CASES = [
    _case("amax split", lambda x: x.amax(0), (5, 4)),
    Case("amax ties", lambda x: _exact(x).amax((0, 1)), (), _ties),
    Case("amin ties keepdim", lambda x: _exact(x).amin(0, keepdim=True), (), _ties),
    Case("max of integers", lambda x: x.max(), (), _integers),
    Case("max of nan", lambda x: x.max().nan_to_num(0.5), (), _holes),
    Case("min of booleans", lambda x: x.amin(0), (), _booleans),
    Case("max dim ties", lambda x: _exact(x).max(0).values * 2, (), _ties),
    Case("max dim indices", lambda x: _exact(x).max(0).indices, (), _ties),
    Case("min dim indices", lambda x: _exact(x).min(0, keepdim=True).indices, (), _ties),
    Case("argmax ties", lambda x: _exact(x).argmax(0), (), _ties),
    Case("argmax flat", lambda x: _exact(x).argmax(), (), _ties),
    Case("argmin flat of nan", lambda x: torch.argmin(x, None, True), (), _holes),
    Case("argmax nan", lambda x: x.argmax(0), (), _holes),
    Case("aminmax", lambda x: torch.stack(torch.aminmax(_exact(x), dim=0)), (), _ties),
    _case("aminmax all", lambda x: torch.stack(x.aminmax()), (5, 4)),
    _case("topk", lambda x: x.topk(2, 0).values, (9, 4)),
    _case("topk indices", lambda x: x.topk(2, 0, largest=False).indices, (9, 4)),
    _case("topk long", lambda x: x.topk(3, 1)[0], (3, 11)),
    _case("kthvalue", lambda x: x.kthvalue(2, 1)[0], (5, 4)),
    _case("median", lambda x: x.median(0).values + x.median(), (5, 4)),
    Case("nanmedian", lambda x: x.nanmedian(1).values, (), _holes),
    Case("mode", lambda x: _exact(x).mode(0)[0], (), _ties),
    _case("quantile", lambda x: x.quantile(torch.tensor([0.25, 0.6]), 0), (5, 4)),
    _case("quantile all", lambda x: x.quantile(0.3), (5, 4)),
    _case("sort", lambda x: torch.sort(x, 1, descending=True)[0], (5, 4)),
    _case("argsort", lambda x: x.argsort(0), (5, 4)),
    _case("msort", lambda x: torch.msort(x), (5, 4)),
    _case("prod", lambda x: x.prod(), (5, 4)),
    Case("prod of zeros", lambda x: _exact(x).prod(0), (), _zeros),
    Case("prod of integers", lambda x: x.prod(1, keepdim=True), (), _integers),
    Case("all", lambda x: _stack(x.all(0), x.any(0)), (), _booleans),
    Case("any all", lambda x: _stack(x.any(), (x > 0).all()), (), _integers),
    Case("count_nonzero", lambda x: torch.count_nonzero(x, 0), (), _integers),
    Case("sum of booleans", lambda x: x.sum(0), (), _booleans),
    _case("sum dtype", lambda x: x.sum(0, dtype=torch.float64), (5, 4)),
    _case("sum axis", lambda x: torch.sum(x, axis=0, keepdims=True), (5, 4)),
    _case("mean dtype", lambda x: x.mean((0, 1), dtype=torch.float64), (5, 4)),
    Case("nansum", lambda x: x.nansum(0), (), _holes),
    Case("nanmean", lambda x: x.nanmean(0), (), _holes),
    _case("var split", lambda x: x.var(0), (5, 4)),
    Case("var shifted", lambda x: x.var(0), (), _shifted),
    _case("var two dims", lambda x: torch.var(x, (0, 2), keepdim=True, correction=0), (5, 4, 3)),
    _case("var biased", lambda x: x.var(False), (5, 4)),
    Case("std of zeros", lambda x: _exact(x).std(0), (), _zeros),
    _case("std unbiased", lambda x: torch.std(x, 0, False, True), (5, 4)),
    _case("var_mean", lambda x: torch.stack(torch.var_mean(x, 0)), (5, 4)),
    _case("std_mean", lambda x: torch.stack(torch.std_mean(x)), (5, 4)),
    _case("std_mean dim", lambda x: torch.stack(torch.std_mean(x, 1, correction=2)), (5, 4)),
    _case("logsumexp split", lambda x: torch.logsumexp(x * 30, 0), (5, 4)),
    _case("logsumexp all", lambda x: torch.logsumexp(x, (0, 1), True), (5, 4)),
    _case("logsumexp infinite", lambda x: torch.logsumexp(x.detach() + INFINITE, 0), (5, 4)),
    _case("softmax split", lambda x: x.softmax(0), (5, 4)),
    _case("softmax 3d", lambda x: F.softmax(40 * x, 1), (3, 5, 4)),
    _case("softmax dtype", lambda x: F.softmax(x, 0, dtype=torch.float64), (5, 4)),
    _case("softmin", lambda x: F.softmin(x, 0), (5, 4)),
    _case("log_softmax split", lambda x: F.log_softmax(30 * x, -1), (5, 4)),
    _case("softmax infinite", lambda x: (x + INFINITE).softmax(1), (5, 4)),
    _case("vector_norm", lambda x: torch.linalg.vector_norm(x, 2, 0), (5, 4)),
    Case("vector_norm of zeros", lambda x: torch.linalg.vector_norm(_exact(x), 2, 0, keepdim=True), (), _zeros),
    _case("vector_norm 3", lambda x: torch.linalg.vector_norm(x, 3.0), (5, 4)),
    _case("vector_norm -2", lambda x: torch.linalg.vector_norm(x, -2, 0), (7, 4)),
    Case("vector_norm inf", lambda x: torch.linalg.vector_norm(_exact(x), float("inf"), 0), (), _ties),
    Case("vector_norm 0", lambda x: torch.linalg.vector_norm(_exact(x), 0, 0), (), _zeros),
    _case("norm method", lambda x: x.norm(dim=0) + x.norm() + x.norm(1), (5, 4)),
    _case("norm fro", lambda x: torch.norm(x) + torch.norm(x, "fro", dim=(0, 1)), (5, 4)),
    _case("linalg norm", lambda x: torch.linalg.norm(x, dim=0).sum() + torch.linalg.norm(x), (5, 4)),
    _case(
        "matrix_norm 1", lambda x: torch.linalg.matrix_norm(x, 1) + torch.linalg.norm(x[0], float("-inf")), (3, 5, 4)
    ),
    _case("normalize", lambda x: F.normalize(x, dim=0), (5, 4)),
    _case("normalize 1", lambda x: F.normalize(x, 1.0, dim=1), (5, 4)),
    _case("dist", lambda x, y: torch.dist(x, y, 3), (5, 4), (5, 4)),
    _case("cdist", lambda x, y: torch.cdist(x, y), (5, 4), (7, 4)),
    _case("cosine_similarity", lambda x, y: F.cosine_similarity(x, y, dim=-1), (5, 4), (5, 4)),
    _case("cosine_similarity rows", lambda x, y: F.cosine_similarity(x[:, None], y, dim=2), (3, 5), (4, 5)),
    _case("pairwise_distance", lambda x, y: F.pairwise_distance(x, y, keepdim=True), (5, 4), (5, 4)),
    _case("cumsum split", lambda x: x.cumsum(0), (7, 4)),
    Case("cumsum of integers", lambda x: x.cumsum(0), (), _integers),
    _case("cumsum dtype", lambda x: torch.cumsum(x, 0, dtype=torch.float64), (5, 4)),
    _case("cumprod", lambda x: x.cumprod(0), (5, 4)),
    Case("cumprod of zeros", lambda x: _exact(x).cumprod(0), (), _zeros),
    _case("logcumsumexp", lambda x: torch.logcumsumexp(x, 0), (5, 4)),
    Case("cummax", lambda x: _exact(x).cummax(0).values, (), _ties),
    Case("cummax indices", lambda x: _exact(x).cummax(0).indices, (), _ties),
    Case("cummin indices", lambda x: _exact(x).cummin(0)[1], (), _ties),
    _case("cummin whole", lambda x: x.cummin(1)[0], (5, 4)),
    _case("diff", lambda x: x.diff(dim=0), (5, 4)),
    _case("diff twice", lambda x, y: torch.diff(x, 2, 1, prepend=y), (5, 4), (5, 2)),
    _case("histc", lambda x: torch.histc(x.detach(), 4, -1, 1), (5, 4)),
    _case("empty split", lambda x: x.amax(1).sum() + x.prod(1).sum(), (0, 4)),
    _case("one row", lambda x: x.amax(0) + x.logsumexp(0) + x.var(0, correction=0) + x.cumsum(0), (1, 4)),
    _case("two rows", lambda x: x.max(0)[0] + x.softmax(0) + x.prod(0) + x.cumprod(0), (2, 4)),
]
