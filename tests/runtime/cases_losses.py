"""Losses for the sweep over layouts: reductions, ignored labels, weights, smoothing, probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.runtime.cases import Case, _case

Make = Callable[[torch.Generator], list[torch.Tensor]]


def _labels(batch: tuple[int, ...], num_classes: int, ignored: int | None = -100, weights: bool = False) -> Make:
    def make(generator: torch.Generator) -> list[torch.Tensor]:
        scores = torch.randn(*batch[:1], num_classes, *batch[1:], generator=generator)
        target = torch.randint(0, num_classes, batch, generator=generator)
        if ignored is not None and batch:
            target.view(-1)[1] = ignored
        return [scores, target, *([torch.rand(num_classes, generator=generator) + 0.1] if weights else [])]

    return make


def _all_ignored(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(4, 3, generator=generator), torch.full((4,), -100)]


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


REDUCTIONS = ("none", "mean", "sum")
ROWS = _labels((7,), 6)
WEIGHTED = _labels((7,), 5, weights=True)
PIXELS = _labels((3, 2, 2), 5, weights=True)
CASES = [
    *[Case(f"cross_entropy {r}", lambda x, t, r=r: F.cross_entropy(x, t, reduction=r), (), ROWS) for r in REDUCTIONS],
    *[
        Case(f"cross_entropy weight {r}", lambda x, t, w, r=r: F.cross_entropy(x, t, w.detach(), reduction=r), (), make)
        for r, make in zip(REDUCTIONS, (WEIGHTED, PIXELS, WEIGHTED), strict=True)
    ],
    *[
        Case(
            f"cross_entropy smoothing {r}",
            lambda x, t, w, r=r: F.cross_entropy(x, t, w.detach(), reduction=r, label_smoothing=0.2),
            (),
            WEIGHTED,
        )
        for r in REDUCTIONS
    ],
    Case("cross_entropy smooth", lambda x, t: F.cross_entropy(20 * x, t, label_smoothing=0.1), (), ROWS),
    Case(
        "cross_entropy ignores a class", lambda x, t: F.cross_entropy(x, t, ignore_index=2), (), _labels((6,), 4, None)
    ),
    Case("cross_entropy one row", lambda x, t: F.cross_entropy(x[0], t[0]), (), _labels((2,), 5, None)),
    Case("cross_entropy all ignored", lambda x, t: F.cross_entropy(x.detach(), t).isnan(), (), _all_ignored),
    Case("cross_entropy sum legacy", lambda x, t: F.cross_entropy(x, t, size_average=False), (), ROWS),
    Case("cross_entropy pixels mean", lambda x, t, w: F.cross_entropy(x, t) + 0 * w.sum(), (), PIXELS),
    *[
        Case(
            f"cross_entropy probabilities {r}",
            lambda x, y, w, r=r, s=s: F.cross_entropy(x, y.softmax(1), w.detach(), reduction=r, label_smoothing=s),
            (),
            _probabilities,
        )
        for r, s in zip(REDUCTIONS, (0.0, 0.3, 0.0), strict=True)
    ],
    *[
        Case(f"nll_loss {r}", lambda x, t, w, r=r: F.nll_loss(x.log_softmax(1), t, w.detach(), reduction=r), (), make)
        for r, make in zip(REDUCTIONS, (PIXELS, WEIGHTED, WEIGHTED), strict=True)
    ],
    Case("nll_loss mean unweighted", lambda x, t: F.nll_loss(x.tanh(), t), (), ROWS),
    *[
        _case(f"{f.__name__} {r}", lambda x, y, f=f, r=r: f(x, y, reduction=r), (5, 4), (5, 4))
        for f, r in zip((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss), itertools.cycle(REDUCTIONS))
    ],
    _case("mse_loss weight", lambda x, y, w: F.mse_loss(x, y, weight=w.detach().abs() + 1), *[(5, 4)] * 3),
    _case("huber_loss weight", lambda x, y, w: F.huber_loss(x, y, "mean", 0.5, w), *[(5, 4)] * 3),
    _case("l1_loss legacy", lambda x, y: F.l1_loss(x, y, None, False).sum(0), (5, 4), (5, 4)),
    _case("bce", lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.detach().sigmoid()), (5, 4), (5, 4)),
    _case(
        "bce weight", lambda x, y, w: F.binary_cross_entropy(x.sigmoid(), y.sigmoid(), w.detach()), (5, 4), (5, 4), (4,)
    ),
    _case(
        "bce logits pos_weight",
        lambda x, y, w: F.binary_cross_entropy_with_logits(
            x, y.sigmoid(), pos_weight=w.detach().abs(), reduction="sum"
        ),
        (5, 4),
        (5, 4),
        (4,),
    ),
    _case("kl_div", lambda x, y: F.kl_div(x, y.softmax(1), reduction="batchmean"), (5, 4), (5, 4)),
    _case("kl_div log", lambda x, y: F.kl_div(x, y, reduction="sum", log_target=True), (5, 4), (5, 4)),
    _case("poisson_nll", lambda x, y: F.poisson_nll_loss(x, y.detach().abs(), full=True), (5, 4), (5, 4)),
    _case("gaussian_nll", lambda x, y, v: F.gaussian_nll_loss(x, y, v.abs()), (5, 4), (5, 4), (5,)),
    Case("hinge_embedding", F.hinge_embedding_loss, (), _signs((5, 4), (5, 4))),
    Case("margin_ranking", lambda x, y, t: F.margin_ranking_loss(x, y, t, 0.1), (), _signs((7,), (7,), (7,))),
    Case("soft_margin", F.soft_margin_loss, (), _signs((5, 4), (5, 4))),
    Case("cosine_embedding", lambda x, y, t: F.cosine_embedding_loss(x, y, t, 0.2), (), _signs((5, 4), (5, 4), (5,))),
    _case("triplet_margin", lambda a, p, n: F.triplet_margin_loss(a, p, n, swap=True), *[(5, 4)] * 3),
    _case("triplet distance", lambda a, p, n: F.triplet_margin_with_distance_loss(a, p, n), *[(5, 4)] * 3),
    Case("multi_margin", lambda x, t: F.multi_margin_loss(x, t, 2), (), _classes),
    Case("multilabel_margin", F.multilabel_margin_loss, (), _label_lists),
    _case("multilabel_soft_margin", lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()), (5, 4), (5, 4)),
    Case("ctc_loss", lambda x, *rest: F.ctc_loss(x.log_softmax(2), *rest), (), _sequences),
]
