"""Losses for the sweep over layouts: reductions, ignored labels, weights, smoothing, probabilities."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from tests.tensors.dispatch.cases import Case, _case

Make = Callable[[torch.Generator], list[torch.Tensor]]


def _labels(batch: tuple[int, ...], num_classes: int, ignored: int | None = -100, weights: bool = False) -> Make:
    def make(generator: torch.Generator) -> list[torch.Tensor]:
        scores = torch.randn(*batch[:1], num_classes, *batch[1:], generator=generator)
        target = torch.randint(0, num_classes, batch, generator=generator)
        if ignored is not None and batch:
            target.view(-1)[1] = ignored
        return [scores, target, *([torch.rand(num_classes, generator=generator) + 0.1] if weights else [])]

    return make


def _probabilities(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(7, 5, generator=generator), torch.randn(7, 5, generator=generator), torch.rand(5)]


def _signs(*shapes: tuple[int, ...]) -> Make:
    """Tensors of these shapes; the last holds plus and minus one."""

    def make(generator: torch.Generator) -> list[torch.Tensor]:
        operands = [torch.randn(shape, generator=generator) for shape in shapes]
        return [*operands[:-1], operands[-1].sign().long()]

    return make


def _classes(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(5, 4, generator=generator), torch.randint(0, 4, (5,), generator=generator)]


def _label_lists(generator: torch.Generator) -> list[torch.Tensor]:
    targets = torch.randint(0, 4, (5, 4), generator=generator)
    targets[:, 2] = -1
    return [torch.randn(5, 4, generator=generator), targets]


def _sequences(generator: torch.Generator) -> list[torch.Tensor]:
    targets = torch.randint(1, 5, (3, 4), generator=generator)
    return [torch.randn(9, 3, 5, generator=generator), targets, torch.tensor([9, 7, 8]), torch.tensor([4, 2, 3])]


def _all_reductions(name: str, loss: Callable[..., torch.Tensor], make: Make, **options: Any) -> Case:
    """The loss with each of its reductions, added up."""

    def every(*operands: torch.Tensor) -> torch.Tensor:
        each, mean, total = (loss(*operands, reduction=r, **options) for r in ("none", "mean", "sum"))
        return each + 2 * mean - 0.5 * total

    return Case(name, every, (), make)


def _cross_entropy(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(x, target, weight.detach(), **options)


def _of_probabilities(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(x, y.softmax(1), weight.detach(), **options)


def _nll(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.nll_loss(x.log_softmax(1), target, weight.detach(), **options)


def _regressions(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    weight = w.detach().abs() + 1
    losses = F.mse_loss(x, y, reduction="sum") + 2 * F.mse_loss(x, y) + 3 * F.mse_loss(x, y, weight=weight)
    losses = losses + F.l1_loss(x, y, weight=weight) + F.l1_loss(x, target=y, reduction="sum", weight=weight)
    losses = losses + F.l1_loss(*(t.reshape(-1) for t in (x, y)), weight=weight.reshape(-1))  # views, perhaps boxed
    return losses + F.l1_loss(x, y) + F.l1_loss(x, y, reduction="none") + 2 * F.huber_loss(x, y, "mean", 0.5, weight)


def _likelihoods(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    p, q = x.sigmoid(), y.sigmoid()
    crossed = F.binary_cross_entropy(p, q) + 2 * F.binary_cross_entropy(p, q, w.detach())
    crossed = crossed + F.binary_cross_entropy_with_logits(x, q, pos_weight=w.detach().abs(), reduction="sum")
    diverged = F.kl_div(x, q, reduction="batchmean") + F.kl_div(x, y, reduction="sum", log_target=True)
    return crossed + diverged + F.poisson_nll_loss(x, y.detach().abs(), full=True)


def _by_signs(x: torch.Tensor, y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    ranked = F.margin_ranking_loss(x, y, t, 0.1) + F.hinge_embedding_loss(y, t) - F.soft_margin_loss(x, t)
    return ranked + F.cosine_embedding_loss(x, y, t[:, 0], 0.2)


def _triplets(a: torch.Tensor, p: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return F.triplet_margin_loss(a, p, n, swap=True) + F.triplet_margin_with_distance_loss(a, p, n, reduction="sum")


ROWS = _labels((7,), 6)
WEIGHTED = _labels((7,), 5, weights=True)
PIXELS = _labels((3, 2, 2), 5, weights=True)
CASES = [
    _all_reductions("cross_entropy of rows", F.cross_entropy, ROWS),
    Case("cross_entropy smooth", partial(F.cross_entropy, label_smoothing=0.1), (), ROWS),
    _all_reductions("cross_entropy weight", _cross_entropy, WEIGHTED),
    _all_reductions("cross_entropy weight pixels", _cross_entropy, PIXELS, label_smoothing=0.2),
    _all_reductions("cross_entropy probabilities", _of_probabilities, _probabilities),
    Case("cross_entropy probabilities smooth", partial(_of_probabilities, label_smoothing=0.3), (), _probabilities),
    Case("cross_entropy large", lambda x, t: F.cross_entropy(60 * x, t, reduction="sum"), (), ROWS),
    Case("cross_entropy ignores a class", partial(F.cross_entropy, ignore_index=2), (), _labels((6,), 4, None)),
    Case("cross_entropy one row", lambda x, t: F.cross_entropy(x[0], t[0]), (), _labels((2,), 5, None)),
    _all_reductions("nll_loss", _nll, PIXELS),
    _case("regressions", _regressions, *[(5, 4)] * 3),
    _case("smooth_l1_loss", lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0.5), (5, 4), (5, 4)),
    _case("likelihoods", _likelihoods, (5, 4), (5, 4), (4,)),
    _case("gaussian_nll", lambda x, y, v: F.gaussian_nll_loss(x, y, v.abs()), (5, 4), (5, 4), (5,)),
    Case("losses of signs", _by_signs, (), _signs((5, 4), (5, 4), (5, 4))),
    _case("triplets", _triplets, *[(5, 4)] * 3),
    Case("multi_margin", lambda x, t: F.multi_margin_loss(x, t, 2), (), _classes),
    Case("multilabel_margin", F.multilabel_margin_loss, (), _label_lists),
    _case("multilabel_soft_margin", lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()), (5, 4), (5, 4)),
    Case("ctc_loss", lambda x, *rest: F.ctc_loss(x.log_softmax(2), *rest), (), _sequences),
]
