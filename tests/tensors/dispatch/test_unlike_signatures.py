"""Functions of torch and operators of aten that share their name with one of torch.nn.functional, and take other
arguments.
"""

import pytest
import torch
import torch.nn.functional as F

import workbench as wb
from workbench.tensors.dispatch.arguments import parameters_of
from workbench.tensors.dispatch.registry import COMPOSITES, EXACT, HANDLERS, RULES
from workbench.testing import run_ranks

_DATA = torch.Generator().manual_seed(2)


def random(*shape):
    return torch.rand(shape, generator=_DATA, dtype=torch.float64)


IDS = torch.tensor([[1, 4], [2, 2], [0, 3]])
SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
LABELS, SETS = torch.tensor([0, 3, 1, 2, 0, 1]), torch.tensor([[0, 3, -1, -1]] * 6)
aten = torch.ops.aten
# (function of the operands, the operands; the first is split)
CALLS = {
    "embedding": (lambda ids, table: torch.embedding(table, ids, 2, False, False), (IDS, random(5, 4))),
    "embedding by frequency": (lambda ids, table: torch.embedding(table, ids, -1, True), (IDS, random(5, 4))),
    "batch_norm": (
        lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, True, 0.3, 1e-3, False) + m + v,
        (random(6, 3), random(3), random(3), random(3), random(3)),
    ),
    "batch_norm with statistics": (
        lambda x, w, b, m, v: torch.batch_norm(x, w, b, m, v, False, 0.3, 1e-3, False),
        (random(6, 3), random(3), random(3), random(3), random(3)),
    ),
    "instance_norm": (
        lambda x, w, b, m, v: torch.instance_norm(x, w, b, m, v, True, 0.3, 1e-3, False) + (m + v)[:, None],
        (random(6, 3, 4), random(3), random(3), random(3), random(3)),
    ),
    "layer_norm": (lambda x, w, b: torch.layer_norm(x, (3,), w, b, 1e-3, False), (random(6, 3), random(3), random(3))),
    "group_norm": (lambda x, w, b: torch.group_norm(x, 2, w, b, 1e-3, False), (random(6, 4), random(4), random(4))),
    "dropout": (lambda x: torch.dropout(x, 0.5, False), (random(6, 3),)),
    "softmax": (lambda x: torch.softmax(x, 0, torch.float64), (random(6, 3),)),
    "frobenius_norm": (lambda x: torch.frobenius_norm(x, [0, 1], True), (random(6, 3),)),
    "ctc_loss": (
        lambda x, t: torch.ctc_loss(x.log_softmax(2), t, [4, 4, 4], [2, 2, 2], 0, 2, True),
        (random(4, 3, 6), IDS + 1),
    ),
    "poisson_nll_loss": (lambda x, t: torch.poisson_nll_loss(x, t, False, True, 1e-6, 0), (random(6, 3), random(6, 3))),
    "aten.batch_norm": (
        lambda x, w, b, m, v: aten.batch_norm(x, w, b, m, v, True, 0.3, 1e-3, False) + m + v,
        (random(6, 3), random(3), random(3), random(3), random(3)),
    ),
    "aten.instance_norm": (
        lambda x, w, b, m, v: aten.instance_norm.default(x, w, b, m, v, True, 0.3, 1e-3, False) + (m + v)[:, None],
        (random(6, 3, 4), random(3), random(3), random(3), random(3)),
    ),
    "aten.tensordot": (lambda x, y: aten.tensordot(x, y, [0], [1]), (random(6, 4), random(3, 6))),
    "aten.tensordot of two dims": (lambda x, y: aten.tensordot(x, y, [0, 1], [0, 1]), (random(6, 4), random(6, 4))),
    "aten.cdist": (lambda x, y: aten.cdist(x, y, 2.0, 1) + aten.cdist(x, y, 2.0, None), (random(6, 3), random(5, 3))),
    "aten.unfold": (lambda x: aten.unfold(x, 1, 2, 1), (random(6, 3, 4),)),
    "aten.fractional_max_pool2d": (
        lambda x, s: aten.fractional_max_pool2d(x, [2, 2], [2, 2], s)[0],
        (random(4, 2, 6, 6), random(4, 2, 2)),
    ),
    "aten.add.out": (lambda x, y: aten.add.out(x, y, out=torch.empty_like(x)), (random(6, 3), random(6, 3))),
    "aten.bernoulli_": (lambda x: (aten.bernoulli_.float(x, 1.0), x)[1], (random(6, 3),)),
    "aten.dropout_": (lambda x: (aten.dropout_.default(x, 1.0, True), x)[1], (random(6, 3),)),
    "aten.index_add_": (lambda x, y: (aten.index_add_.default(x, 0, LABELS, y), x)[1], (random(6, 4), random(6, 4))),
    "aten.index_put_": (lambda x, y: (aten.index_put_.default(x, [LABELS[:4]], y), x)[1], (random(6, 4), random(4, 4))),
}
PAIRS = {
    "binary_cross_entropy_with_logits": (lambda x, t, n: torch.binary_cross_entropy_with_logits(x, t, t, x, n)),
    "kl_div": (lambda x, t, n: torch.kl_div(x, t, n, log_target=True)),
    "hinge_embedding_loss": (lambda x, t, n: torch.hinge_embedding_loss(x, SIGNS, 0.5, n)),
    "margin_ranking_loss": (lambda x, t, n: torch.margin_ranking_loss(x, t, SIGNS.expand(6, 4), 0.5, n)),
    "cosine_embedding_loss": (lambda x, t, n: torch.cosine_embedding_loss(x, t, SIGNS[:2].repeat(3), 0.5, n)),
    "triplet_margin_loss": (lambda x, t, n: torch.triplet_margin_loss(x, t, x * 0.5 + t, 0.5, 2.0, 1e-6, True, n)),
}
PAIRS |= {
    "aten.mse_loss": lambda x, t, n: aten.mse_loss(x, t, n),
    "aten.mse_loss.default": lambda x, t, n: aten.mse_loss.default(x, t, reduction=n),
    "aten.l1_loss": lambda x, t, n: aten.l1_loss(x, t, n),
    "aten.smooth_l1_loss": lambda x, t, n: aten.smooth_l1_loss(x, t, n, 0.3),
    "aten.huber_loss": lambda x, t, n: aten.huber_loss(x, t, n, 0.3),
    "aten.soft_margin_loss": lambda x, t, n: aten.soft_margin_loss(x, t, n),
    "aten.kl_div": lambda x, t, n: aten.kl_div(x, t, n, log_target=True),
    "aten.binary_cross_entropy": lambda x, t, n: aten.binary_cross_entropy(x, t, t, n),
    "aten.nll_loss": lambda x, t, n: aten.nll_loss(x, LABELS, t[0], n, 1),
    "aten.multi_margin_loss": lambda x, t, n: aten.multi_margin_loss(x, LABELS, 2, 0.5, t[0], n),
    "aten.multilabel_margin_loss": lambda x, t, n: aten.multilabel_margin_loss(x, SETS, n),
    "torch._C._nn.mse_loss": lambda x, t, n: torch._C._nn.mse_loss(x, t, n),
}
"""Losses of a pair; the number is the reduction."""
CALLS |= {
    f"{name} {number}": (lambda x, t, f=function, n=number: f(x, t, n), (random(6, 4), random(6, 4)))
    for name, function in PAIRS.items()
    for number in (0, 1, 2)
}


@pytest.mark.filterwarnings("ignore::workbench.tensors.dispatch.fallback.FallbackWarning")
@pytest.mark.filterwarnings("ignore:at..frobenius_norm is deprecated:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_function_of_torch_has_its_own_arguments(name):
    function, operands = CALLS[name]
    expected = function(*(x.clone() for x in operands))

    def program():
        p = wb.placement.all()
        return function(
            *(wb.tensor(x, placement=p, sbp="B" if number else "S(0)") for number, x in enumerate(operands))
        ).full_tensor()

    for found in run_ranks(program, 2):
        torch.testing.assert_close(found, expected)


COMPATIBLE = {
    "dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "softmax", "log_softmax", "embedding_bag", "tanh",
    "elu", "max_unpool2d", "max_unpool3d",
}  # fmt: skip
"""Their handlers and composites read both orders, and their rules none."""


def test_all_pairs_with_unlike_signatures_are_known():
    """A composite is found by name: torch may have added a function that takes other arguments."""
    unlike = set()
    for name in dir(F):
        functional, of_torch = getattr(F, name), getattr(torch, name, getattr(torch._C._nn, name, None))
        if of_torch is None or of_torch is functional or not any(name in t for t in (COMPOSITES, HANDLERS, RULES)):
            continue
        names = [[n for n, stands, _ in p if stands] for p in parameters_of(functional)]
        others = [[n for n, stands, _ in p if stands] for p in parameters_of(of_torch)]
        if names and any(ours[: len(names[0])] != names[0][: len(ours)] for ours in others):
            unlike.add(name)
    known = {name for name in unlike if getattr(aten, name) in EXACT or getattr(F, name) in EXACT}
    assert {"embedding", "kl_div", "batch_norm", "mse_loss", "nll_loss"} <= known
    assert unlike - known <= COMPATIBLE
